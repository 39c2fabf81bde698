//! What is on the device of a read cache, without a daemon.
//!
//! Invariants:
//! 1. Superblocks, journal and footers are read by the code that starts from them
//!    ([`hdcs_core::cache`]), so that what counts here counts there.
//! 2. Memory is bounded by the journal (about 100 bytes per entry) and one segment, whatever the region's size.
//! 3. Everything in a cache is clean: what is damaged costs a read of the backend, never data.
//!    Every problem says so.
//!
//! After a crash an address that two segments name counts twice in a summary; the next start
//! decides for the newer one. A segment whose write a crash cut short shows as damaged.
//!
//! A cache that is in use moves while it is read: what fails is read again a few times before it
//! is believed.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use hdcs_api::CheckReport;
use hdcs_core::base::error::FormatError;
use hdcs_core::base::io::BlockKey;
use hdcs_core::base::limits::{BLOCK_BYTES, SEGMENT_BYTES};
use hdcs_core::cache::{
    Entry, FooterFound, FooterLine, JournalScan, Layout, Root, SegmentVoid, SsdConfig, Verdict,
    VoidRanges, read_footer,
};
use hdcs_core::format::{
    CACHE_FOOTER_MAGIC, CACHE_MAGIC, CACHE_SUPERBLOCK_BLOCKS, CacheSuperblock, block_checksum,
};
use serde::Serialize;
use uuid::Uuid;

use super::Use;

/// Blocks of the journal that are read at once.
const JOURNAL_BLOCKS: u64 = 64;
/// Problems that are told one by one; a medium that is rotten all over has one per segment.
const PROBLEMS_MAX: usize = 100;
/// How often something in use is read at most: writes of a cache are short.
const LIVE_TRIES: usize = 6;
/// The first pause before something in use is read again; it doubles.
const LIVE_PAUSE: Duration = Duration::from_millis(20);
/// Damaged segments after which no more is read again: the medium is bad, and the pauses add up.
const LIVE_DAMAGED_MAX: usize = 16;
/// What the loss of clean data means.
const COST: &str = "clean data: fetched again from the backend; nothing is lost";
/// What the loss of a superblock or of the journal means.
const COST_ALL: &str = "the next start of the cache is cold: clean data: fetched again from the \
                        backend; nothing is lost";

/// One superblock of a cache.
#[derive(Clone, Debug, Serialize)]
pub struct CacheSuperblockSummary {
    /// Which of the two.
    pub block: u64,
    /// Why it cannot be used.
    pub problem: Option<String>,
    /// Identity of the cache.
    pub uuid: Option<Uuid>,
    /// Counts superblock writes; the higher one counts.
    pub sequence: Option<u64>,
    /// Counts starts.
    pub incarnation: Option<u64>,
    /// Counts the times that all content was declared void.
    pub format: Option<u64>,
    /// Whether the region was being made.
    pub forming: Option<bool>,
}

/// The journal of invalidations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct JournalSummary {
    /// First epoch that counts.
    pub first_epoch: u64,
    /// Last epoch: the one that is appended to.
    pub last_epoch: u64,
    /// Which half it is appended to.
    pub half: u64,
    /// Blocks of one half.
    pub half_blocks: u64,
    /// Blocks of entries in the half that is appended to.
    pub used_blocks: u64,
    /// Entries that void a range of addresses.
    pub ranges: u64,
    /// Entries that void a segment or lines of it.
    pub segments: u64,
}

/// What a volume has in a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CachedVolume {
    /// Number of the volume on its node.
    pub number: u32,
    /// Lines.
    pub lines: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What is on the device of a read cache.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CacheSummary {
    /// The two superblocks.
    pub superblocks: Vec<CacheSuperblockSummary>,
    /// Bytes of the region.
    pub region_bytes: u64,
    /// Bytes of one line.
    pub line_bytes: u64,
    /// Whether the next start uses the content.
    pub warm: bool,
    /// Why it does not.
    pub cold_reason: Option<String>,
    /// The journal, if the content counts.
    pub journal: Option<JournalSummary>,
    /// Segments of the region.
    pub segments: u64,
    /// Segments with a footer that counts.
    pub used_segments: u64,
    /// Segments whose footer is void: from an earlier format, or being reused.
    pub void_segments: u64,
    /// Segments whose footer is damaged.
    pub damaged_segments: u64,
    /// Lines that count.
    pub lines: u64,
    /// Lines of used segments that the journal has voided.
    pub void_lines: u64,
    /// Bytes of the lines that count.
    pub cached_bytes: u64,
    /// What they take on the device: less, if some are compressed.
    pub stored_bytes: u64,
    /// The same by volume.
    pub volumes: Vec<CachedVolume>,
    /// What is wrong, one sentence each.
    pub problems: Vec<String>,
}

/// Whether the file or device begins like a cache: by either superblock, since the other may be
/// damaged.
pub fn is_cache(file: &File) -> io::Result<bool> {
    let blocks = superblock_blocks(file)?;
    Ok(blocks
        .chunks_exact(BLOCK_BYTES)
        .any(|block| block.starts_with(&CACHE_MAGIC)))
}

/// The blocks of both superblocks, one behind the other.
pub fn superblock_blocks(file: &File) -> io::Result<Vec<u8>> {
    let mut blocks = vec![0; CACHE_SUPERBLOCK_BLOCKS.len() * BLOCK_BYTES];
    let places = blocks.chunks_exact_mut(BLOCK_BYTES);
    for (place, number) in places.zip(CACHE_SUPERBLOCK_BLOCKS) {
        read_padded(file, number * BLOCK_BYTES as u64, place)?;
    }
    Ok(blocks)
}

/// Why a newer program is needed for the cache on a file or device, if one made it.
pub fn made_newer(file: &File) -> io::Result<Option<FormatError>> {
    let blocks = superblock_blocks(file)?;
    let (one, other) = blocks.split_at(BLOCK_BYTES);
    Ok(CacheSuperblock::refuse_newer(&[one, other]).err())
}

/// Read what is there; beyond the end there are zeroes.
fn read_padded(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < buf.len() {
        match file.read_at(&mut buf[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    buf[filled..].fill(0);
    Ok(())
}

/// Why the content of a cache does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Cold {
    /// As it should be: never used, being made, another node's.
    Because(String),
    /// Something is damaged.
    Damaged(String),
}

/// A cache whose content counts.
struct Cache<'a> {
    file: &'a File,
    uuid: [u8; 16],
    layout: Layout,
    root: Root,
    journal: JournalSummary,
    void_segments: HashMap<usize, SegmentVoid>,
    void_ranges: VoidRanges,
}

type Superblocks = [Result<CacheSuperblock, FormatError>; 2];

fn superblocks(file: &File) -> io::Result<(Vec<u8>, Superblocks)> {
    let blocks = superblock_blocks(file)?;
    let (first, second) = blocks.split_at(BLOCK_BYTES);
    let parsed = [first, second].map(CacheSuperblock::parse);
    Ok((blocks, parsed))
}

/// The newer of the superblocks that can be read.
fn newest(superblocks: &Superblocks) -> Option<&CacheSuperblock> {
    let readable = superblocks.iter().flatten();
    readable.max_by_key(|found| (found.format.get(), found.sequence.get()))
}

/// The size and identity that the cache itself claims.
fn claimed(superblock: &CacheSuperblock) -> SsdConfig {
    SsdConfig {
        bytes: superblock.region_bytes.get(),
        uuid: superblock.uuid,
        line_blocks: usize::from(superblock.line_blocks.get()),
    }
}

impl<'a> Cache<'a> {
    /// Read superblocks and journal as a start would.
    fn open(file: &'a File, expected: Option<Uuid>) -> io::Result<Result<Self, Cold>> {
        let (blocks, found) = superblocks(file)?;
        if blocks.iter().all(|&byte| byte == 0) {
            return Ok(Err(Cold::Because("nothing was ever written".to_owned())));
        }
        if let Some(why) = made_newer(file)? {
            return Ok(Err(Cold::Damaged(why.to_string())));
        }
        let size = file.metadata()?;
        let was = newest(&found).map_or(0, |superblock| superblock.region_bytes.get());
        if size.is_file() && size.len() < was {
            let is = size.len();
            let why = format!("it was cut short: {is} of {was} bytes are left: {COST_ALL}");
            return Ok(Err(Cold::Damaged(why)));
        }
        for (block, superblock) in found.iter().enumerate() {
            if let Err(why) = superblock {
                let why = format!("superblock {block}: {why}: {COST_ALL}");
                return Ok(Err(Cold::Damaged(why)));
            }
        }
        let Some(superblock) = newest(&found) else {
            unreachable!("both superblocks were parsed");
        };
        let config = claimed(superblock);
        let because = |why: &str| Ok(Err(Cold::Because(why.to_owned())));
        let uuid = Uuid::from_bytes(config.uuid);
        if let Some(expected) = expected.filter(|&expected| expected != uuid) {
            return because(&format!("it is the cache {uuid}, not {expected}"));
        }
        let Some(layout) = Layout::new(config.bytes, config.line_blocks) else {
            let why = format!("superblocks: size or line are out of bounds: {COST_ALL}");
            return Ok(Err(Cold::Damaged(why)));
        };
        if superblock.forming != 0 {
            return because("it was being made, or was given up after failures of its device");
        }
        let root = match Root::judge(&config, &blocks) {
            Verdict::Warm(root) => root,
            Verdict::Cold { .. } | Verdict::Newer => {
                return because("its superblocks do not follow one another");
            }
        };
        let mut this = Self {
            file,
            uuid: config.uuid,
            layout,
            root,
            journal: JournalSummary {
                first_epoch: root.journal_first,
                last_epoch: root.journal_last,
                half: root.journal_last % 2,
                half_blocks: layout.half_blocks,
                ..JournalSummary::default()
            },
            void_segments: HashMap::new(),
            void_ranges: VoidRanges::default(),
        };
        Ok(this
            .read_journal()?
            .map(|()| this)
            .map_err(|why| Cold::Damaged(format!("{why}: {COST_ALL}"))))
    }

    fn read_journal(&mut self) -> io::Result<Result<(), String>> {
        let mut ranges = Vec::new();
        let mut buf = vec![0; JOURNAL_BLOCKS as usize * BLOCK_BYTES];
        let mut scan = JournalScan::new(&self.root, &self.layout);
        while let Some((offset, bytes)) = scan.next_read(JOURNAL_BLOCKS) {
            let chunk = &mut buf[..bytes];
            read_padded(self.file, offset, chunk)?;
            for block in chunk.chunks_exact(BLOCK_BYTES) {
                let Some(entries) = scan.take(block) else {
                    let (epoch, index) = scan.next();
                    return Ok(Err(format!(
                        "journal: epoch {epoch}, block {index} is damaged"
                    )));
                };
                for entry in entries {
                    self.void(entry, &mut ranges);
                }
            }
        }
        self.journal.used_blocks = scan.used_blocks();
        self.journal.ranges = ranges.len() as u64;
        self.void_ranges = VoidRanges::of(ranges);
        Ok(Ok(()))
    }

    fn void(&mut self, entry: Entry, ranges: &mut Vec<(u64, u64, u64)>) {
        match entry {
            Entry::Range {
                first,
                blocks,
                upto,
            } => ranges.push((first, blocks, upto)),
            Entry::Segment {
                segment,
                sequence,
                void: lines,
            } => {
                self.journal.segments += 1;
                let void = self.void_segments.entry(segment as usize).or_default();
                void.add(SegmentVoid { sequence, lines });
            }
        }
    }

    /// What the footer of a segment says.
    fn segment<'b>(&self, number: usize, footer: &'b [u8]) -> Segment<'b> {
        match self.footer(number, footer) {
            FooterFound::Void => Segment::Void,
            FooterFound::Damaged(why) => Segment::Damaged(why),
            FooterFound::Ahead => Segment::Damaged(FormatError::Field("sequence")),
            FooterFound::Blank => {
                // Without its magic a footer looks like anything; with it, it proves itself.
                let mut mended = footer.to_vec();
                mended[..8].copy_from_slice(&CACHE_FOOTER_MAGIC);
                match self.footer(number, &mended) {
                    FooterFound::Lines { .. } => Segment::Damaged(FormatError::Magic),
                    _ => Segment::Blank,
                }
            }
            FooterFound::Lines {
                sequence,
                lines: found,
                ..
            } => {
                let void = self.void_segments.get(&number).copied().unwrap_or_default();
                if void.is_footer_void(sequence) {
                    return Segment::Void;
                }
                let line_blocks = self.layout.line_blocks;
                let is_void = |slot, key| {
                    void.is_line_void(sequence, slot)
                        || self.void_ranges.is_line_void(key, line_blocks, sequence)
                };
                let (void_lines, lines): (Vec<_>, Vec<_>) = found
                    .used()
                    .partition(|&(slot, line)| is_void(slot, line.key));
                Segment::Lines {
                    lines: lines.into_iter().map(|(_, line)| line).collect(),
                    void_lines: void_lines.len() as u64,
                }
            }
        }
    }

    fn footer<'b>(&self, number: usize, block: &'b [u8]) -> FooterFound<'b> {
        read_footer(&self.layout, self.uuid, &self.root, number, block)
    }

    /// Verify one segment; `buf` has its size.
    fn verify(&self, number: usize, buf: &mut [u8]) -> Result<Verified, String> {
        read_padded(self.file, self.layout.segment_offset(number), buf)
            .map_err(|error| format!("cannot read it: {error}: up to 1 MiB of {COST}"))?;
        match self.segment(number, &buf[SEGMENT_BYTES - BLOCK_BYTES..]) {
            Segment::Blank | Segment::Void => Ok(Verified::default()),
            Segment::Damaged(why) => Err(format!("its footer: {why}: up to 1 MiB of {COST}")),
            Segment::Lines { lines, .. } => {
                let is_good = |line: &&FooterLine<'_>| {
                    let bytes = &buf[line.place.offset()..][..line.place.bytes()];
                    let blocks = bytes.chunks_exact(BLOCK_BYTES).map(block_checksum);
                    blocks.eq(line.checksums.iter().map(|sum| sum.get()))
                };
                let good = lines.iter().filter(is_good).count();
                let bad = lines.len() - good;
                if bad > 0 {
                    return Err(format!(
                        "{bad} of {} lines do not match their checksums: {} KiB of {COST}",
                        lines.len(),
                        bad * self.layout.line_bytes() / 1024
                    ));
                }
                Ok(Verified {
                    segments: 1,
                    blocks: stored_blocks(&lines),
                })
            }
        }
    }
}

/// What a segment holds.
enum Segment<'a> {
    Blank,
    Void,
    Damaged(FormatError),
    /// The lines that count, and how many do not.
    Lines {
        lines: Vec<FooterLine<'a>>,
        void_lines: u64,
    },
}

/// Blocks that lines take on the device.
fn stored_blocks(lines: &[FooterLine<'_>]) -> u64 {
    lines.iter().map(|line| u64::from(line.place.blocks)).sum()
}

#[derive(Default)]
struct Verified {
    segments: u64,
    blocks: u64,
}

/// Try again while something may be writing.
fn persist<T, E>(how: Use, mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let tries = if how == Use::Live { LIVE_TRIES } else { 1 };
    let mut pause = LIVE_PAUSE;
    for _ in 1..tries {
        if let Ok(done) = attempt() {
            return Ok(done);
        }
        std::thread::sleep(pause);
        pause *= 2;
    }
    attempt()
}

/// [`Cache::open`], and again if something is damaged that may be in the making.
fn open(file: &File, expected: Option<Uuid>, how: Use) -> io::Result<Result<Cache<'_>, Cold>> {
    let opened = persist(how, || match Cache::open(file, expected) {
        Ok(Err(Cold::Damaged(why))) => Err(Ok(Cold::Damaged(why))),
        Ok(other) => Ok(other),
        Err(error) => Err(Err(error)),
    });
    match opened {
        Ok(opened) => Ok(opened),
        Err(Ok(cold)) => Ok(Err(cold)),
        Err(Err(error)) => Err(error),
    }
}

/// Describe the cache in `file`, expected to be the one of this identity.
pub fn summarize(file: &File, expected: Option<Uuid>, how: Use) -> io::Result<CacheSummary> {
    let (_, found) = superblocks(file)?;
    let mut summary = CacheSummary {
        superblocks: (0..).zip(&found).map(describe).collect(),
        ..CacheSummary::default()
    };
    if let Some(superblock) = newest(&found) {
        let config = claimed(superblock);
        summary.region_bytes = config.bytes;
        summary.line_bytes = (config.line_blocks * BLOCK_BYTES) as u64;
        summary.segments = Layout::new(config.bytes, config.line_blocks)
            .map_or(0, |layout| layout.segments as u64);
    }
    match open(file, expected, how)? {
        Ok(cache) => summary.content(&cache)?,
        Err(Cold::Because(why)) => summary.cold_reason = Some(why),
        Err(Cold::Damaged(why)) => {
            summary.cold_reason = Some("it is damaged".to_owned());
            summary.problems.push(why);
        }
    }
    Ok(summary)
}

fn describe(
    (block, found): (u64, &Result<CacheSuperblock, FormatError>),
) -> CacheSuperblockSummary {
    let good = found.as_ref().ok();
    CacheSuperblockSummary {
        block,
        problem: found.as_ref().err().map(ToString::to_string),
        uuid: good.map(|s| Uuid::from_bytes(s.uuid)),
        sequence: good.map(|s| s.sequence.get()),
        incarnation: good.map(|s| s.incarnation.get()),
        format: good.map(|s| s.format.get()),
        forming: good.map(|s| s.forming != 0),
    }
}

impl CacheSummary {
    fn content(&mut self, cache: &Cache<'_>) -> io::Result<()> {
        let mut block = vec![0; BLOCK_BYTES];
        let mut by_volume: BTreeMap<u32, u64> = BTreeMap::new();
        let mut problems = Problems::default();
        self.warm = true;
        self.journal = Some(cache.journal.clone());
        for number in 0..cache.layout.segments {
            read_padded(cache.file, cache.layout.footer_offset(number), &mut block)?;
            match cache.segment(number, &block) {
                Segment::Blank => {}
                Segment::Void => self.void_segments += 1,
                Segment::Damaged(why) => {
                    self.damaged_segments += 1;
                    problems.push(format!(
                        "segment {number}: its footer: {why}: up to 1 MiB of {COST}"
                    ));
                }
                Segment::Lines { lines, void_lines } => {
                    self.used_segments += 1;
                    self.void_lines += void_lines;
                    self.lines += lines.len() as u64;
                    self.stored_bytes += stored_blocks(&lines) * BLOCK_BYTES as u64;
                    for line in lines {
                        *by_volume.entry(BlockKey(line.key).volume()).or_default() += 1;
                    }
                }
            }
        }
        self.cached_bytes = self.lines * self.line_bytes;
        self.volumes = by_volume
            .into_iter()
            .map(|(number, lines)| CachedVolume {
                number,
                lines,
                bytes: lines * self.line_bytes,
            })
            .collect();
        self.problems.extend(problems.told());
        Ok(())
    }
}

/// Problems, of which only so many are kept.
#[derive(Default)]
struct Problems {
    first: Vec<String>,
    more: u64,
}

impl Problems {
    fn push(&mut self, problem: String) {
        if self.first.len() < PROBLEMS_MAX {
            self.first.push(problem);
        } else {
            self.more += 1;
        }
    }

    fn told(mut self) -> Vec<String> {
        if self.more > 0 {
            self.first.push(format!(
                "and {} more segments are damaged: {COST}",
                self.more
            ));
        }
        self.first
    }
}

/// Verify every checksum of the cache at `path`, expected to be the one of this identity; `progress`
/// gets the bytes done and in all.
pub fn check(
    path: &Path,
    expected: Option<Uuid>,
    how: Use,
    progress: &mut dyn FnMut(u64, u64),
) -> CheckReport {
    let mut report = CheckReport {
        path: path.display().to_string(),
        is_cache: true,
        ..CheckReport::default()
    };
    if let Err(error) = check_into(path, expected, how, progress, &mut report) {
        report.problems.push(format!("{}: {error}", path.display()));
    }
    report
}

fn check_into(
    path: &Path,
    expected: Option<Uuid>,
    how: Use,
    progress: &mut dyn FnMut(u64, u64),
    report: &mut CheckReport,
) -> io::Result<()> {
    let shown = path.display();
    let file = File::open(path)?;
    let cache = match open(&file, expected, how)? {
        Ok(cache) => cache,
        Err(Cold::Because(why)) => {
            report.note = Some(format!("nothing in it counts: {why}"));
            return Ok(());
        }
        Err(Cold::Damaged(why)) => {
            report.problems.push(format!("{shown}: {why}"));
            return Ok(());
        }
    };
    let mut buf = vec![0; SEGMENT_BYTES];
    let mut problems = Problems::default();
    let segments = cache.layout.segments;
    for number in 0..segments {
        let how = match problems.first.len() {
            LIVE_DAMAGED_MAX.. => Use::Offline,
            _ => how,
        };
        match persist(how, || cache.verify(number, &mut buf)) {
            Ok(verified) => {
                report.segments += verified.segments;
                report.blocks += verified.blocks;
            }
            Err(why) => problems.push(format!("{shown}: segment {number}: {why}")),
        }
        let done = |segments: usize| (segments * SEGMENT_BYTES) as u64;
        progress(done(number + 1), done(segments));
    }
    report.problems.extend(problems.told());
    Ok(())
}

#[cfg(test)]
mod tests;
