//! The read cache against a model of the backend, on a device that lies as devices may.
//!
//! Each seed is one life story: reads, fills, destaged writes, polls, completions in any order,
//! I/O errors, bit rot, crashes that keep, lose or tear what was not durable, and restarts. The rule
//! is one: what a lookup returns is the backend's present content. Only an invalidation whose
//! barrier was not reached may be undone by a crash; the volume, which still has that data in its log,
//! invalidates again before it reads (as destage does).
//!
//! `HDCS_SEEDS=n` runs n seeds instead of a few; `HDCS_SEED=n` runs one.

use std::collections::BTreeMap;
use std::sync::Arc;

use fastrand::Rng;
use hdcs_core::base::buf::{Buf, BufMut, Pool};
use hdcs_core::base::codec::Method;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Action, BlockKey, Completion, Done, Nanos, Token};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::{
    Barrier, CacheConfig, CacheEvent, CacheStats, Lookup, ReadCache, SsdConfig, SsdRead, SsdState,
};
use hdcs_kit::lz4::Lz4;

const REGION: usize = 16 << 20;
const LINES: u64 = 1500;

/// The faults of one life story.
#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    /// In 1000.
    error: u32,
    /// In 1000 steps.
    rot: u32,
    /// In 1000 steps.
    crash: u32,
    /// Whether a burst of errors can take the whole device away.
    dies: bool,
}

struct Device {
    durable: Vec<u8>,
    view: Vec<u8>,
    unsynced: Vec<(usize, Vec<u8>)>,
    random: Rng,
    error: u32,
    dead: bool,
}

impl Device {
    fn fails(&mut self) -> bool {
        self.dead || self.random.u32(..1000) < self.error
    }

    /// Apply some of the sectors of a write.
    fn tear(random: &mut Rng, target: &mut [u8], offset: usize, data: &[u8], keep: u32) {
        for (index, sector) in data.chunks(512).enumerate() {
            if random.u32(..100) < keep {
                let at = offset + index * 512;
                target[at..at + sector.len()].copy_from_slice(sector);
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[Buf], durable: bool) -> Result<Done, IoError> {
        let offset = offset as usize;
        let bytes: Vec<u8> = data.iter().flat_map(|buf| buf.iter().copied()).collect();
        assert!(offset + bytes.len() <= REGION && offset.is_multiple_of(BLOCK_BYTES));
        if self.fails() {
            let keep = [0, 50, 100][self.random.usize(..3)];
            Self::tear(&mut self.random, &mut self.view, offset, &bytes, keep);
            self.unsynced
                .push((offset, self.view[offset..offset + bytes.len()].to_vec()));
            return Err(IoError::Failed);
        }
        self.view[offset..offset + bytes.len()].copy_from_slice(&bytes);
        if durable {
            self.durable[offset..offset + bytes.len()].copy_from_slice(&bytes);
            // What was written here before cannot come back.
            for (start, old) in &mut self.unsynced {
                let from = offset.max(*start);
                let to = (offset + bytes.len()).min(*start + old.len());
                if from < to {
                    old[from - *start..to - *start]
                        .copy_from_slice(&bytes[from - offset..to - offset]);
                }
            }
        } else {
            self.unsynced.push((offset, bytes));
        }
        Ok(Done::Written)
    }

    fn read(&mut self, offset: u64, mut buf: BufMut) -> Result<Done, IoError> {
        let offset = offset as usize;
        assert!(offset + buf.len() <= REGION);
        if self.fails() {
            return Err(IoError::Failed);
        }
        let len = buf.len();
        buf.copy_from_slice(&self.view[offset..offset + len]);
        Ok(Done::Read(buf))
    }

    fn crash(&mut self, in_flight: Vec<Action>) {
        for action in in_flight {
            if let Action::CacheWrite { offset, data, .. } = action {
                let bytes = data.iter().flat_map(|buf| buf.iter().copied()).collect();
                self.unsynced.push((offset as usize, bytes));
            }
        }
        let mut unsynced = std::mem::take(&mut self.unsynced);
        self.random.shuffle(&mut unsynced);
        for (offset, bytes) in unsynced {
            let keep = [0, 100, 100, 50][self.random.usize(..4)];
            Self::tear(&mut self.random, &mut self.durable, offset, &bytes, keep);
        }
        self.view.copy_from_slice(&self.durable);
    }

    fn rot(&mut self) {
        let at = match self.random.u8(..10) {
            0 => self.random.usize(..BLOCK_BYTES) + [0, 16 * BLOCK_BYTES][self.random.usize(..2)],
            1 | 2 => 32 * BLOCK_BYTES + self.random.usize(..132 * BLOCK_BYTES),
            _ => self.random.usize(..REGION),
        };
        let bit = 1 << self.random.u8(..8);
        self.view[at] ^= bit;
        self.durable[at] ^= bit;
        for (offset, bytes) in &mut self.unsynced {
            if (*offset..*offset + bytes.len()).contains(&at) {
                bytes[at - *offset] ^= bit;
            }
        }
    }
}

/// A read permission with the content that was present when it was given.
struct Reading {
    read: SsdRead,
    version: u64,
}

struct Story {
    /// Of the cache's steps, where long ranges are to take many.
    step_max: Option<(usize, usize)>,
    random: Rng,
    pool: Arc<Pool>,
    config: CacheConfig,
    cache: ReadCache,
    device: Device,
    in_flight: Vec<Action>,
    actions: Vec<Action>,
    readings: Vec<Reading>,
    /// Content and version of each line, counted by writes.
    present: BTreeMap<u64, (u64, u64)>,
    /// Written ranges (first line, lines) that the log still has, and their barriers.
    unretired: Vec<(Option<Barrier>, u64, u64)>,
    faults: Faults,
    versions: u64,
    last_filled: u64,
    seen: Seen,
}

/// What happened, so that a story that tests nothing is noticed.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    dram: u64,
    ssd: u64,
    packed: u64,
    corrupt: u64,
    warm: u64,
    shared: u64,
    evicted: u64,
    restarts: u64,
    offline: u64,
    resets: u64,
}

fn block_content(line_seed: u64, block: u64) -> u64 {
    (line_seed << 8 | block).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn fill_block(content: u64, block: &mut [u8]) {
    // Some is noise, some can be compressed, more or less.
    let factor = [1, 1, 0, 0x9e37_79b9_7f4a_7c15][(content >> 60) as usize % 4];
    for (index, word) in block.chunks_exact_mut(8).enumerate() {
        let value = content.wrapping_add((index as u64).wrapping_mul(factor));
        word.copy_from_slice(&value.to_le_bytes());
    }
}

impl Story {
    fn new(seed: u64, faults: Faults) -> Self {
        let mut random = Rng::with_seed(seed);
        let line_blocks = [2, 4, 4, 8, 16][random.usize(..5)];
        let pool = Pool::new(12 << 20);
        let config = CacheConfig {
            dram_blocks: [0, 64, 500][random.usize(..3)],
            ssd: Some(SsdConfig {
                bytes: REGION as u64,
                uuid: [random.u8(..); 16],
                line_blocks,
            }),
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        let mut device = Device {
            durable: vec![0; REGION],
            view: vec![0; REGION],
            unsynced: Vec::new(),
            random: random.fork(),
            error: faults.error,
            dead: false,
        };
        if random.bool() {
            // A device that was used for something else before.
            device.random.fill(&mut device.view[..4 << 20]);
            device.durable.copy_from_slice(&device.view);
        }
        let mut actions = Vec::new();
        let mut cache = ReadCache::new(config.clone(), Nanos(0), Arc::clone(&pool), &mut actions);
        cache.set_codec(&Lz4);
        let step_max = [None, Some((1, 7)), Some((8, 300))][random.usize(..3)];
        if let Some((probes, places)) = step_max {
            cache.set_step_max(probes, places);
        }
        Self {
            random,
            step_max,
            pool,
            config,
            cache,
            device,
            in_flight: Vec::new(),
            actions,
            readings: Vec::new(),
            present: BTreeMap::new(),
            unretired: Vec::new(),
            faults,
            versions: 0,
            last_filled: 0,
            seen: Seen::default(),
        }
    }

    fn line_blocks(&self) -> u64 {
        self.cache.line_blocks()
    }

    fn key(&self, line: u64) -> BlockKey {
        let volume = u32::from(line >= LINES / 2);
        BlockKey::new(volume, (line % (LINES / 2)) * self.line_blocks())
    }

    fn content(&self, line: u64) -> (u64, u64) {
        let first = (1_000_000 + line, 0);
        self.present.get(&line).copied().unwrap_or(first)
    }

    fn check(&self, line: u64, block: u64, data: &[u8], tier: &str) {
        let mut expected = [0; BLOCK_BYTES];
        fill_block(block_content(self.content(line).0, block), &mut expected);
        assert!(
            data == expected,
            "{tier}: block {block} of line {line} is not the backend's present content"
        );
    }

    fn is_unknown(&self, line: u64) -> bool {
        let mut waiting = self
            .unretired
            .iter()
            .filter(|(barrier, ..)| barrier.is_none());
        waiting.any(|&(_, first, lines)| (first..first + lines).contains(&line))
    }

    fn event(&mut self, event: CacheEvent) {
        self.cache.step(Nanos(0), event, &mut self.actions);
        self.in_flight.append(&mut self.actions);
    }

    fn complete_one(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        let index = self.random.usize(..self.in_flight.len());
        let (token, result): (Token, _) = match self.in_flight.swap_remove(index) {
            Action::CacheRead { token, offset, buf } => (token, self.device.read(offset, buf)),
            Action::CacheWrite {
                token,
                offset,
                data,
                durable,
            } => (token, self.device.write(offset, &data, durable)),
            other => panic!("the cache asked for {other:?}"),
        };
        self.event(CacheEvent::Completed(Completion { token, result }));
    }

    fn read(&mut self) {
        // A hot set, so that lines are used more than once.
        let line = match self.random.u8(..4) {
            0 => self.random.u64(..LINES),
            _ => self.random.u64(..LINES / 8),
        };
        if self.is_unknown(line) {
            return;
        }
        let block = self.random.u64(..self.line_blocks());
        let key = BlockKey(self.key(line).0 + block);
        match self.cache.lookup(key) {
            Lookup::Dram(data) => {
                self.seen.dram += 1;
                self.check(line, block, &data, "memory");
            }
            Lookup::Ssd(read) => {
                let version = self.content(line).1;
                self.readings.push(Reading { read, version });
            }
            Lookup::Miss => self.fill(line),
        }
    }

    fn fill(&mut self, line: u64) {
        let lines = self.random.u64(1..=8);
        let last = if line < LINES / 2 { LINES / 2 } else { LINES };
        let lines = lines.min(last - line);
        if (line..line + lines).any(|line| self.is_unknown(line)) {
            return;
        }
        let line_bytes = self.line_blocks() as usize * BLOCK_BYTES;
        let Some(mut data) = self.pool.alloc(lines as usize * line_bytes) else {
            return;
        };
        for (index, block) in data.chunks_exact_mut(BLOCK_BYTES).enumerate() {
            let (line, block_index) = (
                line + index as u64 / self.line_blocks(),
                index as u64 % self.line_blocks(),
            );
            fill_block(block_content(self.content(line).0, block_index), block);
        }
        let data = data.freeze();
        let skip = u64::from(self.random.u8(..8) == 0);
        self.last_filled = line;
        let first = BlockKey(self.key(line).0 + skip);
        let method = [None, Some(Method::Lz4)][self.random.usize(..2)];
        let data = data.slice(skip as usize * BLOCK_BYTES..data.len());
        self.cache.fill_compressed(first, &data, method);
    }

    fn finish_one_reading(&mut self) {
        if self.readings.is_empty() {
            return;
        }
        let index = self.random.usize(..self.readings.len());
        let Reading { mut read, version } = self.readings.swap_remove(index);
        let Some(buf) = self.pool.alloc(read.bytes) else {
            self.readings.push(Reading { read, version });
            return;
        };
        let (key, offset) = (read.key, read.offset);
        let block = key.block() % self.line_blocks();
        let line = u64::from(key.volume()) * (LINES / 2) + key.block() / self.line_blocks();
        let mut data = match self.device.read(offset, buf) {
            Ok(Done::Read(buf)) => Some(buf),
            _ => None,
        };
        let is_packed = read.bytes != BLOCK_BYTES || read.blocks > 1;
        read.blocks = self.random.u64(1..=read.blocks);
        let plain = self.cache.finish_ssd_read(read, data.as_deref_mut());
        match plain.map(<[u8]>::to_vec) {
            Ok(plain) if self.content(line).1 == version => {
                self.seen.ssd += 1;
                self.seen.packed += u64::from(is_packed);
                for (block, data) in (block..).zip(plain.chunks_exact(BLOCK_BYTES)) {
                    self.check(line, block, data, "ssd");
                }
            }
            Ok(_) => {}
            Err(_) => self.seen.corrupt += 1,
        }
    }

    /// A generation is destaged: the backend's content changes, the cache is told.
    fn write(&mut self) {
        let first = match self.random.u8(..8) {
            0..2 => self.last_filled,
            2..5 => self.random.u64(..LINES / 8),
            _ => self.random.u64(..LINES),
        };
        let lines = match self.random.u16(..400) {
            0 => LINES - first,
            _ => self.random.u64(1..=3).min(LINES - first),
        };
        for line in first..first + lines {
            self.versions += 1;
            // Some contents are everywhere, so that lines are shared.
            let seed = match self.random.u8(..3) {
                0 => self.random.u64(1..6),
                _ => self.versions + 1000,
            };
            self.present.insert(line, (seed, self.versions));
        }
        self.unretired.push((None, first, lines));
        self.invalidate_last();
    }

    /// Tell the cache about the last of the ranges that it does not know of.
    fn invalidate_last(&mut self) {
        let Some(index) = self
            .unretired
            .iter()
            .rposition(|(barrier, ..)| barrier.is_none())
        else {
            return;
        };
        let (_, first, lines) = self.unretired[index];
        if self.key(first).volume() == self.key(first + lines - 1).volume() && self.random.bool() {
            let blocks = lines * self.line_blocks();
            self.cache.invalidate(self.key(first), blocks);
        } else {
            for line in first..first + lines {
                let blocks = self.random.u64(1..=self.line_blocks());
                let key = self.key(line);
                self.cache.invalidate(key, blocks);
                let rest = self.line_blocks() - blocks;
                self.cache.invalidate(BlockKey(key.0 + blocks), rest);
            }
        }
        self.unretired[index].0 = Some(self.cache.barrier());
    }

    fn retire(&mut self) {
        let persisted = self.cache.persisted();
        self.unretired
            .retain(|(barrier, ..)| barrier.is_none_or(|barrier| barrier > persisted));
    }

    fn crash(&mut self) {
        self.retire();
        self.note();
        let in_flight = std::mem::take(&mut self.in_flight);
        self.device.crash(in_flight);
        self.start();
    }

    fn note(&mut self) {
        if self.cache.stats().ssd_state == SsdState::Offline {
            self.seen.offline += 1;
        }
        let CacheStats {
            shared_lines,
            ssd_evicted_lines,
            warm_lines,
            ..
        } = self.cache.stats();
        self.seen.shared += shared_lines;
        self.seen.evicted += ssd_evicted_lines;
        self.seen.warm += warm_lines;
    }

    fn start(&mut self) {
        self.readings.clear();
        self.seen.restarts += 1;
        self.device.dead = false;
        // The log is replayed: what is not retired is dirty, and invalidated again later.
        for (barrier, ..) in &mut self.unretired {
            *barrier = None;
        }
        self.actions.clear();
        self.cache = ReadCache::new(
            self.config.clone(),
            Nanos(0),
            Arc::clone(&self.pool),
            &mut self.actions,
        );
        self.cache.set_codec(&Lz4);
        if let Some((probes, places)) = self.step_max {
            self.cache.set_step_max(probes, places);
        }
        self.in_flight.append(&mut self.actions);
        if self.random.bool() {
            self.settle("start", |story| story.cache.is_ready());
        }
    }

    /// What the node does about a cache whose device cannot even be voided.
    fn obey_reset(&mut self) {
        if self.cache.must_reset() {
            let uuid = self.random.u8(..);
            let ssd = self.config.ssd.as_mut().unwrap();
            ssd.uuid = [uuid ^ ssd.uuid[0].wrapping_add(1); 16];
            ssd.uuid[1] = self.seen.resets as u8;
            self.cache.reset_recorded();
            self.seen.resets += 1;
        }
    }

    fn settle(&mut self, what: &str, done: impl Fn(&mut Self) -> bool) {
        for _ in 0..20_000 {
            if done(self) {
                return;
            }
            self.event(CacheEvent::Poll);
            self.complete_one();
            self.finish_one_reading();
            self.obey_reset();
        }
        panic!("{what}: the cache got stuck: {:?}", self.cache.stats());
    }

    fn run(&mut self, steps: u32) -> Seen {
        for _ in 0..steps {
            match self.random.u8(..100) {
                0..30 => self.read(),
                30..40 => self.write(),
                40..55 => self.event(CacheEvent::Poll),
                55..85 => self.complete_one(),
                85..97 => self.finish_one_reading(),
                _ => self.invalidate_last(),
            }
            self.retire();
            self.obey_reset();
            if self.random.u32(..1000) < self.faults.rot {
                self.device.rot();
            }
            if self.faults.dies && self.random.u32(..2000) == 0 {
                self.device.dead = true;
            }
            if self.random.u32(..1000) < self.faults.crash {
                self.crash();
            }
            if self.random.u32(..1000) < self.faults.crash / 2 {
                self.close();
                self.start();
            }
            if self.random.u32(..64) == 0 {
                self.cache.check_invariants();
            }
        }
        self.close();
        self.note();
        self.seen
    }

    /// Everything that was asked for ends, and nothing is left behind.
    fn close(&mut self) {
        while self.unretired.iter().any(|(barrier, ..)| barrier.is_none()) {
            self.invalidate_last();
        }
        self.settle("barrier", |story| {
            story.retire();
            story.unretired.is_empty() && story.readings.is_empty()
        });
        self.event(CacheEvent::Close);
        self.settle("close", |story| story.cache.is_closed());
        self.cache.check_invariants();
        assert!(self.in_flight.is_empty(), "closed with work in flight");
        let Self { pool, .. } = self;
        assert_eq!(
            pool.free_bytes(),
            pool.total_bytes(),
            "memory is given back"
        );
    }
}

fn run_seeds(default: u64, steps: u32, faults: Faults) -> Seen {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let seeds = match number("HDCS_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("HDCS_SEEDS").unwrap_or(default),
    };
    let mut all = Seen::default();
    for seed in seeds {
        let guard = SeedOnPanic(seed);
        let seen = Story::new(seed, faults).run(steps);
        std::mem::forget(guard);
        all.dram += seen.dram;
        all.ssd += seen.ssd;
        all.packed += seen.packed;
        all.corrupt += seen.corrupt;
        all.warm += seen.warm;
        all.shared += seen.shared;
        all.evicted += seen.evicted;
        all.restarts += seen.restarts;
        all.offline += seen.offline;
        all.resets += seen.resets;
    }
    println!("{all:?}");
    all
}

struct SeedOnPanic(u64);

impl Drop for SeedOnPanic {
    fn drop(&mut self) {
        eprintln!("repeat with HDCS_SEED={}", self.0);
    }
}

#[test]
fn cache_without_faults_serves_and_evicts() {
    let seen = run_seeds(6, 6000, Faults::default());
    assert!(seen.dram > 0 && seen.ssd > 0 && seen.shared > 0 && seen.evicted > 0);
    assert!(seen.packed > 0 && seen.packed < seen.ssd);
    assert_eq!((seen.corrupt, seen.offline), (0, 0));
}

#[test]
fn cache_is_never_stale_after_crashes() {
    let faults = Faults {
        crash: 3,
        ..Faults::default()
    };
    let seen = run_seeds(16, 5000, faults);
    assert!(seen.restarts > 0 && seen.warm > 0 && seen.packed > 0 && seen.evicted > 0);
    assert_eq!(seen.offline, 0);
}

#[test]
fn cache_is_never_wrong_with_rot_and_crashes() {
    let faults = Faults {
        crash: 3,
        rot: 6,
        ..Faults::default()
    };
    let seen = run_seeds(12, 5000, faults);
    assert!(seen.warm > 0 && seen.ssd > 0 && seen.packed > 0 && seen.corrupt > 0);
}

#[test]
fn cache_survives_errors_of_its_device() {
    let faults = Faults {
        crash: 2,
        rot: 3,
        error: 100,
        dies: false,
    };
    let seen = run_seeds(12, 5000, faults);
    assert!(seen.ssd > 0 && seen.corrupt > 0);
}

#[test]
fn cache_survives_the_death_of_its_device() {
    let faults = Faults {
        crash: 2,
        rot: 0,
        error: 5,
        dies: true,
    };
    let seen = run_seeds(12, 5000, faults);
    assert!(seen.offline > 0 && seen.resets > 0 && seen.ssd > 0);
}
