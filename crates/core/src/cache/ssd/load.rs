//! Reading the tier at start: superblocks, footers, journal. See the module above.
//!
//! Footers come first and fill the index; then the journal is read once, in order. What it voids of segments is
//! applied as it comes; ranges are gathered, some ten bytes for each, and applied in one walk over the lines, in
//! bounded steps: so a start takes no longer for many of them, or for long ones.
//!
//! Whatever cannot be told for sure makes the start cold: a damaged superblock, a journal block
//! that may have held entries, a gap. A footer that cannot be read is voided by an entry, in
//! case it can be read next time.

use super::{
    Action, BLOCK_BYTES, Burn, CACHE_READS_MAX, Entry, ExtentIndex, Line, Op, Phase, Ssd,
    SsdFailure, Stream, Vec,
};
use crate::base::error::FormatError;
use crate::base::io::SectorRange;
use crate::base::limits::{CACHE_FOOTERS_DOUBTED, CACHE_STEP_PLACES_MAX, STEP_WORK_MAX};
use crate::cache::footer::{self, FooterLine, FooterLines};
use crate::cache::journal::{EpochScan, Layout};
use crate::cache::root::{Root, Verdict};
use crate::format::{CACHE_START_SHIFT, CACHE_SUPERBLOCK_BLOCKS};

/// Blocks of the journal that are read at once.
const CHUNK_BLOCKS: u64 = 16;
const INCARNATION_MAX: u64 = (1 << (64 - CACHE_START_SHIFT)) - 2;

/// How far the journal is read.
#[derive(Debug)]
pub(super) struct Scan {
    epoch: EpochScan,
    waiting: bool,
}

impl Scan {
    fn new(root: &Root, epoch: u64) -> Self {
        Self {
            epoch: EpochScan::new(root, epoch),
            waiting: false,
        }
    }
}

/// What a start makes of a footer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Footer {
    /// What it says is entered, if it says anything.
    Known,
    /// The segment may hold anything.
    Unknown,
    /// See [`FooterFound::Ahead`].
    Ahead,
}

/// What the last block of a segment turned out to be.
#[derive(Debug)]
pub enum FooterFound<'a> {
    /// No footer.
    Blank,
    /// A footer of another cache or of an earlier format: nothing of it counts.
    Void,
    /// It cannot be told what the segment holds.
    Damaged(FormatError),
    /// It was sealed after a start that the superblocks do not know: they are not those that were written last.
    Ahead,
    /// A footer; the journal may void it or some of its lines.
    Lines {
        /// Order in which segments were sealed.
        sequence: u64,
        /// The queue that the segment waits in.
        stream: u8,
        /// Its lines.
        lines: FooterLines<'a>,
    },
}

/// Read the footer of segment `number` of the cache `uuid`.
pub fn read_footer<'a>(
    layout: &Layout,
    uuid: [u8; 16],
    root: &Root,
    number: usize,
    block: &'a [u8],
) -> FooterFound<'a> {
    let (footer, lines) = match footer::parse(block) {
        Ok(found) => found,
        Err(FormatError::Magic) => return FooterFound::Blank,
        Err(why) => return FooterFound::Damaged(why),
    };
    if footer.uuid != uuid || footer.format.get() != root.format {
        return FooterFound::Void;
    }
    let sequence = footer.sequence.get();
    let line_blocks = layout.line_blocks;
    let field = |name| FooterFound::Damaged(FormatError::Field(name));
    if footer.segment.get() as usize != number {
        return field("segment");
    }
    if usize::from(footer.line_blocks.get()) != line_blocks {
        return field("line_blocks");
    }
    if sequence >> CACHE_START_SHIFT > root.incarnation {
        return FooterFound::Ahead;
    }
    let is_key = |key: u64| key == u64::MAX || key.is_multiple_of(line_blocks as u64);
    if !lines.iter().all(|line| is_key(line.key)) {
        return field("key");
    }
    FooterFound::Lines {
        sequence,
        stream: footer.stream,
        lines,
    }
}

impl Ssd {
    pub(super) fn read_superblocks(&mut self, actions: &mut Vec<Action>) {
        if let Phase::Superblocks(blocks) = &self.phase
            && let Some(place) = CACHE_SUPERBLOCK_BLOCKS.get(blocks.len() / BLOCK_BYTES)
            && self.device.under_way() == 0
        {
            let offset = place * BLOCK_BYTES as u64;
            (self.device).read(Op::Superblock, offset, BLOCK_BYTES, actions);
        }
    }

    pub(super) fn superblock_read(&mut self, data: Option<&[u8]>) {
        let (Phase::Superblocks(blocks), Some(data)) = (&mut self.phase, data) else {
            return;
        };
        blocks.extend_from_slice(data);
        if blocks.len() < CACHE_SUPERBLOCK_BLOCKS.len() * BLOCK_BYTES {
            return;
        }
        match Root::judge(self.journal.config(), blocks) {
            Verdict::Warm(root) if root.incarnation < INCARNATION_MAX => {
                self.forget_all();
                self.journal.found(root);
                self.phase = Phase::Footers {
                    next: 0,
                    again: false,
                };
            }
            // Nothing is written, not even to say that it does not count: it gets another identity.
            Verdict::Newer => self.give_up(SsdFailure::Newer, Burn::Wanted(0)),
            Verdict::Warm(root) => self.start_forming(root.format + 1),
            Verdict::Cold { format } => self.start_forming(format),
        }
    }

    /// Make the region anew: nothing on it counts.
    pub(super) fn start_forming(&mut self, format: u64) {
        self.forget_all();
        self.journal.form(format);
        self.phase = Phase::Forming { begun: false };
    }

    pub(super) fn read_footers(&mut self, actions: &mut Vec<Action>) {
        let Phase::Footers { mut next, again } = self.phase else {
            return;
        };
        let end = if again {
            // Segments are written in this order at first, so what is blank behind them was not written.
            let used = self.store.segments.found_end();
            self.store.segments.len().min(used + CACHE_FOOTERS_DOUBTED)
        } else {
            self.store.segments.len()
        };
        while next < end && self.device.under_way() < CACHE_READS_MAX {
            if again && self.store.segments.sequence(next) > 0 {
                next += 1;
                continue;
            }
            let offset = self.store.layout.footer_offset(next);
            let op = Op::Footer(next);
            if (self.device.read(op, offset, BLOCK_BYTES, actions)).is_none() {
                break;
            }
            next += 1;
        }
        self.phase = Phase::Footers { next, again };
        if next < end || self.device.under_way() > 0 {
            return;
        }
        if again {
            self.phase = Phase::Journal(Scan::new(
                self.journal.root(),
                self.journal.root().journal_first,
            ));
            self.read_journal(actions);
        } else {
            self.phase = Phase::Footers {
                next: 0,
                again: true,
            };
            self.read_footers(actions);
        }
    }

    pub(super) fn footer_read(&mut self, number: usize, data: Option<&[u8]>) {
        if !matches!(self.phase, Phase::Footers { .. }) {
            return;
        }
        let found = data.map_or(Footer::Unknown, |data| self.take_footer(number, data));
        if found == Footer::Ahead {
            return self.start_forming(self.journal.root().format + 1);
        }
        if found == Footer::Unknown {
            // In case it is readable next time.
            let sequence = (self.journal.root().incarnation + 1) << CACHE_START_SHIFT;
            self.store.segments.found_void(number, sequence);
            self.journal.record(Entry::Segment {
                segment: number as u32,
                sequence,
                void: 0,
            });
        }
    }

    /// Enter the lines of a footer.
    fn take_footer(&mut self, number: usize, data: &[u8]) -> Footer {
        let found = read_footer(
            &self.store.layout,
            self.journal.config().uuid,
            self.journal.root(),
            number,
            data,
        );
        let (sequence, stream, lines) = match found {
            FooterFound::Blank | FooterFound::Void => return Footer::Known,
            FooterFound::Damaged(_) => return Footer::Unknown,
            FooterFound::Ahead => return Footer::Ahead,
            FooterFound::Lines {
                sequence,
                stream,
                lines,
            } => (sequence, stream, lines),
        };
        let line_blocks = self.store.layout.line_blocks;
        let stream = if stream == 0 {
            Stream::Small
        } else {
            Stream::Main
        };
        self.store.segments.found(number, sequence, stream);
        for (
            slot,
            FooterLine {
                key,
                place,
                checksums,
            },
        ) in lines.iter().enumerate()
        {
            if key == u64::MAX {
                continue;
            }
            let line = self.store.index.line_at(number, slot);
            let sums: Vec<u32> = checksums.iter().map(|sum| sum.get()).collect();
            // Two footers name the address: one of a segment that was being reused. The older
            // line would come back unnoticed if the newer one went first.
            if let Some(other) = self.store.index.find(key) {
                let rival = self
                    .store
                    .segments
                    .sequence(self.store.index.segment_of(other));
                self.journal.record(Entry::Range {
                    first: key,
                    blocks: line_blocks as u64,
                    upto: rival.min(sequence),
                });
                if rival >= sequence {
                    self.store.index.place_void(line, key, place.first, &sums);
                    continue;
                }
                self.store.index.unmap_primary(other);
            }
            let shareable = self.store.index.find_content(&sums).is_none();
            self.store
                .index
                .place(line, key, place.first, &sums, shareable);
        }
        Footer::Known
    }

    pub(super) fn read_journal(&mut self, actions: &mut Vec<Action>) {
        let half_blocks = self.store.layout.half_blocks;
        let Phase::Journal(scan) = &mut self.phase else {
            return;
        };
        if scan.waiting || self.device.under_way() > 0 {
            return;
        }
        if scan.epoch.next() >= half_blocks {
            self.journal
                .found_end(scan.epoch.used_blocks(), scan.epoch.stamp());
            if scan.epoch.epoch() < self.journal.root().journal_last {
                *scan = Scan::new(self.journal.root(), scan.epoch.epoch() + 1);
            } else {
                // What this step does not come to follows in the next ones.
                self.void_at.get_or_insert(0);
                self.void_some(CACHE_STEP_PLACES_MAX);
                return;
            }
        }
        let blocks = CHUNK_BLOCKS.min(half_blocks - scan.epoch.next());
        let (epoch, index) = (scan.epoch.epoch(), scan.epoch.next());
        let offset = self.store.layout.journal_offset(epoch, index);
        let bytes = blocks as usize * BLOCK_BYTES;
        let read = self.device.read(Op::Journal, offset, bytes, actions);
        scan.waiting = read.is_some();
    }

    pub(super) fn journal_read(&mut self, data: Option<&[u8]>) {
        let Phase::Journal(scan) = &mut self.phase else {
            return;
        };
        scan.waiting = false;
        let Some(data) = data else {
            return self.start_forming(self.journal.root().format + 1);
        };
        let blocks = data.chunks_exact(BLOCK_BYTES);
        let entries: Option<Vec<Vec<Entry>>> = blocks.map(|b| scan.epoch.take(b)).collect();
        let sound = entries
            .is_some_and(|blocks| blocks.into_iter().flatten().all(|entry| self.apply(entry)));
        if !sound {
            self.start_forming(self.journal.root().format + 1);
        }
    }

    /// Void what an entry of the journal voids; false if it makes no sense.
    fn apply(&mut self, entry: Entry) -> bool {
        match entry {
            Entry::Range {
                first,
                blocks,
                upto,
            } => {
                let blocks = blocks.min(u64::MAX - first);
                let pieces = self.voids.pieces(SectorRange::new(first, blocks));
                let pieces: Vec<_> = pieces.filter(|&(_, had)| had < Some(upto)).collect();
                for (piece, _) in pieces {
                    self.voids.insert_long(piece, upto);
                    while !self.voids.takes_long() {
                        self.voids.settle(STEP_WORK_MAX);
                    }
                }
            }
            Entry::Segment {
                segment,
                sequence,
                void,
            } => {
                let number = segment as usize;
                if number >= self.store.segments.len() {
                    return false;
                }
                let found = self.store.segments.sequence(number);
                if found < sequence {
                    self.store.segments.found_void(number, sequence);
                    self.store.index.clear_segment(number);
                } else if found == sequence {
                    for slot in (0..self.store.layout.lines_per_segment)
                        .filter(|slot| void >> slot & 1 == 1)
                    {
                        self.store
                            .index
                            .unmap_primary(self.store.index.line_at(number, slot));
                    }
                }
            }
        }
        true
    }

    /// Void what the journal says in so many lines more: one walk for all of its entries.
    pub(super) fn void_some(&mut self, lines_max: usize) {
        let Some(from) = self
            .void_at
            .filter(|_| matches!(self.phase, Phase::Journal(_)))
        else {
            return;
        };
        let lines = self.store.index.lines();
        let to = lines.min(from.saturating_add(lines_max));
        let line_blocks = self.store.layout.line_blocks as u64;
        for line in (from..to).map(|number| Line(number as u32)) {
            let Some(key) = self.store.index.primary(line) else {
                continue;
            };
            let sequence = self
                .store
                .segments
                .sequence(self.store.index.segment_of(line));
            let mut voids = self.voids.overlaps(SectorRange::new(key, line_blocks));
            if voids.any(|(_, upto)| sequence <= upto) {
                drop(voids);
                self.store.index.unmap_primary(line);
            }
        }
        self.void_at = Some(to);
        if to == lines {
            (self.voids, self.void_at) = (ExtentIndex::default(), None);
            self.finish_loading();
        }
    }

    fn finish_loading(&mut self) {
        self.store.segments.queue_found();
        self.phase = Phase::Starting;
    }

    pub(super) fn serve_cold(&mut self) {
        self.journal.begin_empty();
        self.ties.begin_empty();
        self.store.segments.begin(self.journal.root().incarnation);
        self.phase = Phase::Ready;
    }

    pub(super) fn serve_warm(&mut self) {
        self.store.segments.begin(self.journal.root().incarnation);
        self.phase = Phase::Ready;
        if self.journal.renews() {
            // Too many invalidations came meanwhile to be recorded: none of the content is used.
            self.forget_all();
            // The medium holds what their logs know better until the superblocks say that all of it is void.
            self.ties.begin_forgotten(self.journal.queued());
            return;
        }
        // What was invalidated since the start.
        for (first, blocks) in self.journal.take_early() {
            let end = first.saturating_add(blocks);
            if blocks > self.probes_max as u64 {
                if let Some((first, end)) = self.store.forget_lines(first, end) {
                    self.journal.record(Entry::Range {
                        first,
                        blocks: end - first,
                        upto: self.store.segments.next_sequence() - 1,
                    });
                }
                continue;
            }
            for key in self.store.index.addresses_in(first, end) {
                self.store.index.unmap(key);
            }
        }
        self.store.counters.warm_lines = self.store.index.used_lines() as u64;
        self.journal.resume_checkpoint();
        for volume in self.ties.take_untied(&self.journal) {
            self.forget_untied(volume);
        }
    }
}
