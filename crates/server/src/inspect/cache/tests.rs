//! Caches that the core itself wrote, damaged one byte at a time.

use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::io::{Action, Completion, Done, Nanos};
use hdcs_core::base::limits::CACHE_BYTES_MIN;
use hdcs_core::cache::{CacheConfig, CacheEvent, ReadCache};

use super::*;

const LINE_BLOCKS: usize = 4;
const UUID: Uuid = Uuid::from_bytes([7; 16]);

/// A cache of the core over a file.
struct Rig {
    file: tempfile::NamedTempFile,
    pool: Arc<Pool>,
    cache: ReadCache,
    actions: Vec<Action>,
}

impl Rig {
    fn new() -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(CACHE_BYTES_MIN).unwrap();
        let pool = Pool::new(16 << 20);
        let config = CacheConfig {
            dram_blocks: 0,
            ssd: Some(SsdConfig {
                bytes: CACHE_BYTES_MIN,
                uuid: UUID.into_bytes(),
                line_blocks: LINE_BLOCKS,
            }),
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        let mut actions = Vec::new();
        let cache = ReadCache::new(config, Nanos(0), Arc::clone(&pool), &mut actions);
        let mut this = Self {
            file,
            pool,
            cache,
            actions,
        };
        this.run();
        assert!(this.cache.is_ready());
        this
    }

    fn step(&mut self, event: CacheEvent) {
        self.cache.step(Nanos(0), event, &mut self.actions);
        self.run();
    }

    fn run(&mut self) {
        while !self.actions.is_empty() {
            let file = self.file.as_file();
            let (token, done) = match self.actions.remove(0) {
                Action::CacheRead {
                    token,
                    offset,
                    mut buf,
                } => {
                    file.read_exact_at(&mut buf, offset).unwrap();
                    (token, Done::Read(buf))
                }
                Action::CacheWrite {
                    token,
                    mut offset,
                    data,
                    ..
                } => {
                    for buf in data {
                        file.write_all_at(&buf, offset).unwrap();
                        offset += buf.len() as u64;
                    }
                    (token, Done::Written)
                }
                other => panic!("not of a cache: {other:?}"),
            };
            let result = Ok(done);
            let event = CacheEvent::Completed(Completion { token, result });
            self.cache.step(Nanos(0), event, &mut self.actions);
        }
    }

    /// Fill lines of a volume, each with bytes of its own.
    fn fill(&mut self, volume: u32, lines: u64) {
        for line in 0..lines {
            let mut data = self.pool.alloc(LINE_BLOCKS * BLOCK_BYTES).unwrap();
            for (block, bytes) in data.chunks_exact_mut(BLOCK_BYTES).enumerate() {
                bytes.fill(block as u8);
                bytes[..8].copy_from_slice(&line.to_le_bytes());
                bytes[8..12].copy_from_slice(&volume.to_le_bytes());
            }
            let key = BlockKey::new(volume, line * LINE_BLOCKS as u64);
            self.cache.fill(key, &data.freeze());
            self.step(CacheEvent::Poll);
        }
    }

    fn close(mut self) -> tempfile::NamedTempFile {
        self.step(CacheEvent::Close);
        assert!(self.cache.is_closed());
        self.file
    }

    /// Two volumes, of the first of which a part was invalidated.
    fn sample() -> tempfile::NamedTempFile {
        let mut rig = Self::new();
        rig.fill(3, 70);
        rig.fill(9, 60);
        rig.cache.invalidate(BlockKey::new(3, 5), 6);
        rig.cache.barrier();
        rig.step(CacheEvent::Poll);
        rig.close()
    }
}

fn summary(file: &tempfile::NamedTempFile) -> CacheSummary {
    summarize(file.as_file(), Some(UUID), Use::Offline).unwrap()
}

fn checked(file: &tempfile::NamedTempFile) -> CheckReport {
    check(file.path(), Some(UUID), Use::Offline, &mut |_, _| {})
}

fn flip(file: &tempfile::NamedTempFile, offset: u64) {
    let mut byte = [0];
    file.as_file().read_exact_at(&mut byte, offset).unwrap();
    file.as_file().write_all_at(&[byte[0] ^ 4], offset).unwrap();
}

fn layout() -> Layout {
    Layout::new(CACHE_BYTES_MIN, LINE_BLOCKS).unwrap()
}

#[test]
fn cache_is_summarized_by_volume_without_what_was_invalidated() {
    let file = Rig::sample();
    assert!(is_cache(file.as_file()).unwrap());
    let found = summary(&file);
    assert_eq!(found.problems, Vec::<String>::new());
    assert!(found.warm);
    let volumes: Vec<_> = found.volumes.iter().map(|v| (v.number, v.lines)).collect();
    // Blocks 5 to 10 touch the second and the third line.
    assert_eq!(volumes, [(3, 68), (9, 60)]);
    assert_eq!((found.used_segments, found.void_lines), (3, 2));
    assert_eq!(found.cached_bytes, 128 * 16384);
    let journal = found.journal.unwrap();
    assert_eq!((journal.used_blocks, journal.ranges), (1, 1));
    let report = checked(&file);
    assert_eq!(report.problems, Vec::<String>::new());
    assert_eq!((report.segments, report.blocks), (3, 128 * 4));
}

#[test]
fn cache_damage_is_found_wherever_it_is() {
    let good = Rig::sample();
    let places = [
        (0, "superblock 0"),
        (16 * 4096 + 50, "superblock 1"),
        (
            layout().journal_offset(1, 0) + 70,
            "journal: epoch 1, block 0",
        ),
        (layout().segment_offset(0), "segment 0: 1 of 61 lines"),
        (
            layout().segment_offset(1) + 6 * 16384 - 1,
            "segment 1: 1 of 63 lines",
        ),
        (layout().footer_offset(2), "segment 2: its footer"),
        (layout().footer_offset(2) + 4095, "segment 2: its footer"),
    ];
    for (offset, place) in places {
        flip(&good, offset);
        let report = checked(&good);
        assert_eq!(report.problems.len(), 1, "{place}: {report:?}");
        let problem = &report.problems[0];
        assert!(problem.contains(place), "{place}: {problem}");
        assert!(problem.contains("nothing is lost"), "{problem}");
        assert!(is_cache(good.as_file()).unwrap(), "{place}");
        flip(&good, offset);
    }
    assert_eq!(checked(&good).problems, Vec::<String>::new());
}

#[test]
fn cache_of_another_node_or_without_content_is_no_damage() {
    let file = Rig::sample();
    let other = Uuid::from_bytes([8; 16]);
    let report = check(file.path(), Some(other), Use::Offline, &mut |_, _| {});
    assert!(report.problems.is_empty() && report.segments == 0);
    assert!(report.note.unwrap().contains(&UUID.to_string()));
    // Nobody to compare with: it is what it says.
    let report = check(file.path(), None, Use::Offline, &mut |_, _| {});
    assert_eq!((report.segments, report.note), (3, None));
    let empty = tempfile::NamedTempFile::new().unwrap();
    assert!(checked(&empty).problems.is_empty());
    assert!(!is_cache(empty.as_file()).unwrap());
    assert!(!summary(&empty).warm);
}

#[test]
fn cache_that_was_cut_short_is_told() {
    let file = Rig::sample();
    for bytes in [CACHE_BYTES_MIN - 1, layout().segment_offset(1), 5000] {
        file.as_file().set_len(bytes).unwrap();
        let report = checked(&file);
        assert_eq!(report.problems.len(), 1, "{report:?}");
        assert!(report.problems[0].contains("cut short"), "{report:?}");
    }
}

#[test]
fn cache_rotten_all_over_is_told_in_bounded_words() {
    let mut problems = Problems::default();
    (0..PROBLEMS_MAX + 7).for_each(|number| problems.push(number.to_string()));
    let told = problems.told();
    assert_eq!(told.len(), PROBLEMS_MAX + 1);
    assert!(told[PROBLEMS_MAX].starts_with("and 7 more"));
}
