//! Reading the tier at start: what the medium holds, entered into the store.
//!
//! ```text
//! Superblocks ──► Footers ──► Journal ──► warm
//!   │   └────────────┴───────────┴──────► cold: the medium is made anew
//!   └───────────────────────────────────► newer: it is left alone
//! ```
//!
//! Footers come first and fill the index; then the journal is read once, in order. What it voids of segments is
//! applied as it comes; ranges are gathered, some ten bytes for each, and applied in one walk over the lines, in
//! bounded steps: so a start takes no longer for many of them, or for long ones.
//!
//! Invariants:
//! 1. Each superblock has a read of its own, so that none that goes wrong hides them both.
//! 2. Whatever cannot be told for sure makes the start cold: a damaged superblock, a journal block that may have held
//!    entries, a gap. A footer that cannot be read is voided by an entry, in case it can be read next time.
//! 3. A start writes nothing. What it finds to be void beyond what the medium says, it records in the queue of the
//!    journal.
//! 4. No more than [`CACHE_READS_MAX`] reads are under way.

use alloc::vec::Vec;

use super::device::{Device, Op};
use super::journal::Journal;
use super::segments::Stream;
use super::store::Store;
use crate::base::error::FormatError;
use crate::base::io::Action;
use crate::base::limits::{
    BLOCK_BYTES, CACHE_FOOTERS_DOUBTED, CACHE_READS_MAX, CACHE_STEP_PLACES_MAX,
};
use crate::cache::footer::{self, FooterLine, FooterLines};
use crate::cache::index::Line;
use crate::cache::journal::{Entry, JournalScan, Layout};
use crate::cache::root::{Root, Verdict};
use crate::cache::void::{SegmentVoid, VoidRanges};
use crate::format::{CACHE_START_SHIFT, CACHE_SUPERBLOCK_BLOCKS};

/// Blocks of the journal that are read at once.
const CHUNK_BLOCKS: u64 = 16;
const INCARNATION_MAX: u64 = (1 << (64 - CACHE_START_SHIFT)) - 2;

/// What a start comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// What counts of the medium is in the store.
    Warm,
    /// Nothing of it counts. A format of this number was never used here.
    Cold { format: u64 },
    /// A newer program has made it: it is not to be overwritten.
    Newer,
}

impl Loaded {
    /// Cold, though the superblocks are good: the format after theirs.
    fn anew(journal: &Journal) -> Self {
        Self::Cold {
            format: journal.root().format + 1,
        }
    }
}

/// What is being read.
#[derive(Debug)]
enum Stage {
    /// The blocks of those that were read, one behind the other.
    Superblocks(Vec<u8>),
    Footers {
        next: usize,
        /// Those that seem blank before the end of what was written are read again: it may have been the read.
        again: bool,
    },
    Journal {
        scan: JournalScan,
        waiting: bool,
    },
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

impl Footer {
    /// Enter the lines of a footer into the store.
    fn enter(number: usize, data: &[u8], store: &mut Store, journal: &mut Journal) -> Self {
        let found = read_footer(
            &store.layout,
            journal.config().uuid,
            journal.root(),
            number,
            data,
        );
        let (sequence, stream, lines) = match found {
            FooterFound::Blank | FooterFound::Void => return Self::Known,
            FooterFound::Damaged(_) => return Self::Unknown,
            FooterFound::Ahead => return Self::Ahead,
            FooterFound::Lines {
                sequence,
                stream,
                lines,
            } => (sequence, stream, lines),
        };
        let line_blocks = store.layout.line_blocks;
        let stream = if stream == 0 {
            Stream::Small
        } else {
            Stream::Main
        };
        store.segments.found(number, sequence, stream);
        for (slot, found) in lines.used() {
            let FooterLine {
                key,
                place,
                checksums,
            } = found;
            let line = store.index.line_at(number, slot);
            let sums: Vec<u32> = checksums.iter().map(|sum| sum.get()).collect();
            // Two footers name the address: one of a segment that was being reused. The older
            // line would come back unnoticed if the newer one went first.
            if let Some(other) = store.index.find(key) {
                let rival = store.segments.sequence(store.index.segment_of(other));
                journal.record(Entry::Range {
                    first: key,
                    blocks: line_blocks as u64,
                    upto: rival.min(sequence),
                });
                if rival >= sequence {
                    store.index.place_void(line, key, place.first, &sums);
                    continue;
                }
                store.index.unmap_primary(other);
            }
            let shareable = store.index.find_content(&sums).is_none();
            store.index.place(line, key, place.first, &sums, shareable);
        }
        Self::Known
    }
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
    let is_key = |key: u64| key.is_multiple_of(line_blocks as u64);
    if !lines.used().all(|(_, line)| is_key(line.key)) {
        return field("key");
    }
    FooterFound::Lines {
        sequence,
        stream: footer.stream,
        lines,
    }
}

/// See the module.
#[derive(Debug)]
pub struct Load {
    stage: Stage,
    /// The ranges that the journal which is being read voids.
    voids: VoidRanges,
    /// Once all of that is known, the line at which the walk goes on that voids it.
    void_at: Option<usize>,
}

impl Load {
    /// Nothing is read yet.
    pub fn new() -> Self {
        Self {
            stage: Stage::Superblocks(Vec::new()),
            voids: VoidRanges::default(),
            void_at: None,
        }
    }

    /// Whether the superblocks were read. Without them, no number is known that would void them for sure.
    pub fn has_superblocks(&self) -> bool {
        !matches!(self.stage, Stage::Superblocks(_))
    }

    /// Whether lines are still to be voided.
    pub fn is_voiding(&self) -> bool {
        self.void_at.is_some()
    }

    /// What was looked at so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.voids.work()
    }

    /// Read what can be read now.
    pub fn drive(
        &mut self,
        store: &mut Store,
        journal: &mut Journal,
        device: &mut Device,
        actions: &mut Vec<Action>,
    ) -> Option<Loaded> {
        match self.stage {
            Stage::Superblocks(_) => {
                self.read_superblocks(device, actions);
                None
            }
            // Too much was invalidated meanwhile to be recorded.
            _ if journal.renews() => Some(Loaded::anew(journal)),
            Stage::Footers { .. } => self.read_footers(store, journal, device, actions),
            Stage::Journal { .. } => self.read_journal(store, journal, device, actions),
        }
    }

    /// One of its reads has ended; without data, it has failed.
    pub fn completed(
        &mut self,
        op: &Op,
        data: Option<&[u8]>,
        store: &mut Store,
        journal: &mut Journal,
    ) -> Option<Loaded> {
        match op {
            Op::Superblock => self.superblock_read(data, store, journal),
            Op::Footer(segment) => self.footer_read(*segment, data, store, journal),
            Op::Journal => self.journal_read(data, store, journal),
            _ => None,
        }
    }

    fn read_superblocks(&mut self, device: &mut Device, actions: &mut Vec<Action>) {
        if let Stage::Superblocks(blocks) = &self.stage
            && let Some(place) = CACHE_SUPERBLOCK_BLOCKS.get(blocks.len() / BLOCK_BYTES)
            && device.under_way() == 0
        {
            let offset = place * BLOCK_BYTES as u64;
            device.read(Op::Superblock, offset, BLOCK_BYTES, actions);
        }
    }

    fn superblock_read(
        &mut self,
        data: Option<&[u8]>,
        store: &mut Store,
        journal: &mut Journal,
    ) -> Option<Loaded> {
        let (Stage::Superblocks(blocks), Some(data)) = (&mut self.stage, data) else {
            return None;
        };
        blocks.extend_from_slice(data);
        if blocks.len() < CACHE_SUPERBLOCK_BLOCKS.len() * BLOCK_BYTES {
            return None;
        }
        match Root::judge(journal.config(), blocks) {
            Verdict::Warm(root) if root.incarnation < INCARNATION_MAX => {
                store.clear();
                journal.restart();
                journal.found(root);
                self.stage = Stage::Footers {
                    next: 0,
                    again: false,
                };
                None
            }
            Verdict::Newer => Some(Loaded::Newer),
            Verdict::Warm(root) => Some(Loaded::Cold {
                format: root.format + 1,
            }),
            Verdict::Cold { format } => Some(Loaded::Cold { format }),
        }
    }

    fn read_footers(
        &mut self,
        store: &mut Store,
        journal: &mut Journal,
        device: &mut Device,
        actions: &mut Vec<Action>,
    ) -> Option<Loaded> {
        let Stage::Footers { mut next, again } = self.stage else {
            return None;
        };
        let end = if again {
            // Segments are written in this order at first, so what is blank behind them was not written.
            let used = store.segments.found_end();
            store.segments.len().min(used + CACHE_FOOTERS_DOUBTED)
        } else {
            store.segments.len()
        };
        while next < end && device.under_way() < CACHE_READS_MAX {
            if again && store.segments.sequence(next) > 0 {
                next += 1;
                continue;
            }
            let offset = store.layout.footer_offset(next);
            let op = Op::Footer(next);
            if (device.read(op, offset, BLOCK_BYTES, actions)).is_none() {
                break;
            }
            next += 1;
        }
        self.stage = Stage::Footers { next, again };
        if next < end || device.under_way() > 0 {
            return None;
        }
        if again {
            self.stage = Stage::Journal {
                scan: JournalScan::new(journal.root(), &store.layout),
                waiting: false,
            };
            self.read_journal(store, journal, device, actions)
        } else {
            self.stage = Stage::Footers {
                next: 0,
                again: true,
            };
            self.read_footers(store, journal, device, actions)
        }
    }

    fn footer_read(
        &self,
        number: usize,
        data: Option<&[u8]>,
        store: &mut Store,
        journal: &mut Journal,
    ) -> Option<Loaded> {
        if !matches!(self.stage, Stage::Footers { .. }) {
            return None;
        }
        let found = data.map_or(Footer::Unknown, |data| {
            Footer::enter(number, data, store, journal)
        });
        if found == Footer::Ahead {
            return Some(Loaded::anew(journal));
        }
        if found == Footer::Unknown {
            // In case it is readable next time.
            let sequence = (journal.root().incarnation + 1) << CACHE_START_SHIFT;
            store.segments.found_void(number, sequence);
            journal.record(Entry::Segment {
                segment: number as u32,
                sequence,
                void: 0,
            });
        }
        None
    }

    fn read_journal(
        &mut self,
        store: &mut Store,
        journal: &mut Journal,
        device: &mut Device,
        actions: &mut Vec<Action>,
    ) -> Option<Loaded> {
        let Stage::Journal { scan, waiting } = &mut self.stage else {
            return None;
        };
        if *waiting || device.under_way() > 0 {
            return None;
        }
        let Some((offset, bytes)) = scan.next_read(CHUNK_BLOCKS) else {
            journal.found_end(scan.used_blocks(), scan.stamp());
            // What this step does not come to follows in the next ones.
            self.void_at.get_or_insert(0);
            return self.void_some(CACHE_STEP_PLACES_MAX, store);
        };
        let read = device.read(Op::Journal, offset, bytes, actions);
        *waiting = read.is_some();
        None
    }

    fn journal_read(
        &mut self,
        data: Option<&[u8]>,
        store: &mut Store,
        journal: &Journal,
    ) -> Option<Loaded> {
        let Stage::Journal { scan, waiting } = &mut self.stage else {
            return None;
        };
        *waiting = false;
        let Some(data) = data else {
            return Some(Loaded::anew(journal));
        };
        let blocks = data.chunks_exact(BLOCK_BYTES);
        let entries: Option<Vec<Vec<Entry>>> = blocks.map(|block| scan.take(block)).collect();
        let Some(entries) = entries else {
            return Some(Loaded::anew(journal));
        };
        for entry in entries.into_iter().flatten() {
            self.apply(entry, store);
        }
        None
    }

    /// Void what an entry of the journal voids.
    fn apply(&mut self, entry: Entry, store: &mut Store) {
        match entry {
            Entry::Range {
                first,
                blocks,
                upto,
            } => self.voids.add(first, blocks, upto),
            Entry::Segment {
                segment,
                sequence,
                void,
            } => {
                let number = segment as usize;
                let found = store.segments.sequence(number);
                let void = SegmentVoid {
                    sequence,
                    lines: void,
                };
                if void.is_footer_void(found) {
                    store.segments.found_void(number, sequence);
                    store.index.clear_segment(number);
                    return;
                }
                let slots = 0..store.layout.lines_per_segment;
                for slot in slots.filter(|&slot| void.is_line_void(found, slot)) {
                    store.index.unmap_primary(store.index.line_at(number, slot));
                }
            }
        }
    }

    /// Void what the journal says in so many lines more: one walk for all of its entries.
    pub fn void_some(&mut self, lines_max: usize, store: &mut Store) -> Option<Loaded> {
        let from = self.void_at?;
        let lines = store.index.lines();
        let to = lines.min(from.saturating_add(lines_max));
        let line_blocks = store.layout.line_blocks;
        for line in (from..to).map(|number| Line(number as u32)) {
            let Some(key) = store.index.primary(line) else {
                continue;
            };
            let sequence = store.segments.sequence(store.index.segment_of(line));
            if self.voids.is_line_void(key, line_blocks, sequence) {
                store.index.unmap_primary(line);
            }
        }
        self.void_at = Some(to);
        (to == lines).then(|| {
            (self.voids, self.void_at) = (VoidRanges::default(), None);
            store.segments.queue_found();
            Loaded::Warm
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::io::Token;
    use crate::cache::ssd::rig;

    /// The reads that a load asks for, answered one after the other.
    struct Rig {
        load: Load,
        store: Store,
        journal: Journal,
        device: Device,
        actions: Vec<Action>,
    }

    impl Rig {
        fn new() -> Self {
            Self {
                load: Load::new(),
                store: rig::store(),
                journal: rig::journal(),
                device: rig::device(),
                actions: Vec::new(),
            }
        }

        fn drive(&mut self) -> Option<Loaded> {
            let (store, journal) = (&mut self.store, &mut self.journal);
            (self.load).drive(store, journal, &mut self.device, &mut self.actions)
        }

        /// Answer all that is asked; `medium` says what lies at an offset, if that can be read. What the load came to,
        /// and how many reads were under way at most.
        fn run(&mut self, medium: impl Fn(u64, &mut [u8]) -> bool) -> (Loaded, usize) {
            let mut most = 0;
            loop {
                if let Some(loaded) = self.drive() {
                    return (loaded, most);
                }
                most = most.max(self.device.under_way());
                let asked = core::mem::take(&mut self.actions);
                for action in asked {
                    if let Some(loaded) = self.answer(action, &medium) {
                        return (loaded, most);
                    }
                }
            }
        }

        fn answer(
            &mut self,
            action: Action,
            medium: &impl Fn(u64, &mut [u8]) -> bool,
        ) -> Option<Loaded> {
            let Action::CacheRead {
                token: Token(token),
                offset,
                mut buf,
            } = action
            else {
                panic!("a start writes nothing: {action:?}");
            };
            buf.fill(0);
            let is_good = medium(offset, &mut buf);
            let op = self.device.end(Token(token)).unwrap();
            let data = is_good.then_some(&buf[..]);
            (self.load).completed(&op, data, &mut self.store, &mut self.journal)
        }
    }

    /// Good superblocks in front of a medium that is blank.
    fn blank(offset: u64, buf: &mut [u8]) -> bool {
        let place = offset / BLOCK_BYTES as u64;
        if let Some(number) = CACHE_SUPERBLOCK_BLOCKS.iter().position(|&b| b == place) {
            let root = Root::fresh(3, false);
            let sequence = root.sequence + number as u64;
            Root { sequence, ..root }.write(&rig::CONFIG, buf);
        }
        true
    }

    #[test]
    fn load_of_no_superblocks_is_cold() {
        let mut rig = Rig::new();
        let (loaded, most) = rig.run(|_, _| true);
        assert_eq!((loaded, most), (Loaded::Cold { format: 1 }, 1));
        assert!(!rig.load.has_superblocks());
    }

    #[test]
    fn load_reads_footers_then_journal_and_bounds_its_reads() {
        let mut rig = Rig::new();
        let (loaded, most) = rig.run(blank);
        assert_eq!((loaded, most), (Loaded::Warm, CACHE_READS_MAX));
        assert!(rig.load.has_superblocks() && !rig.load.is_voiding());
        assert_eq!(rig.store.segments.free(), rig.store.segments.len());
        assert_eq!(rig.journal.queued(), 0, "nothing is void");
    }

    #[test]
    fn load_without_its_journal_is_cold_and_without_a_footer_voids_a_segment() {
        let footer = rig::layout().footer_offset(2);
        let mut rig = Rig::new();
        let (loaded, _) = rig.run(|offset, buf| blank(offset, buf) && offset != footer);
        assert_eq!((loaded, rig.journal.queued()), (Loaded::Warm, 1));
        assert!(rig.store.segments.sequence(2) > 0);
        let journal = rig::layout().journal_offset(1, 0);
        let mut rig = Rig::new();
        let (loaded, _) = rig.run(|offset, buf| blank(offset, buf) && offset != journal);
        assert_eq!(loaded, Loaded::Cold { format: 4 });
    }
}
