//! What no restart may bring back: the queue of invalidations, their entries, and where they lie.
//!
//! Invariants:
//! 1. Entries become durable in the order in which they were queued; [`Queue::durable`] counts them.
//! 2. An entry says less than everything about segments that are sealed later: its sequence number
//!    is that of the last one sealed before. So it does not matter whether the write of a segment
//!    ends before or after that of the entry, or is lost.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use zerocopy::FromZeros;

use crate::base::limits::{
    BLOCK_BYTES, CACHE_BYTES_MAX, CACHE_BYTES_MIN, CACHE_LINE_BLOCKS_MAX, CACHE_LINE_BLOCKS_MIN,
    SEGMENT_BYTES,
};
use crate::cache::root::Root;
use crate::format::{
    CACHE_ENTRY_RANGE, CACHE_ENTRY_SEGMENT, CACHE_HEADER_BLOCKS, CACHE_JOURNAL_ENTRIES_MAX,
    CACHE_JOURNAL_MAGIC, CACHE_START_SHIFT, CACHE_VERSION, CacheFooter, CacheJournalEntry,
    CacheJournalHeader,
};

const SEGMENT_BLOCKS: u64 = (SEGMENT_BYTES / BLOCK_BYTES) as u64;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// Where things lie in the region of the SSD tier. Offsets are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Segments that fit the region.
    pub segments: usize,
    /// Blocks of one line.
    pub line_blocks: usize,
    /// Lines that fit a segment as they are.
    pub plain_lines: usize,
    /// Lines of a segment at most, if they are compressed.
    pub lines_per_segment: usize,
    /// Blocks of one half of the journal: room for two snapshots and as much again as is worth a
    /// checkpoint.
    pub half_blocks: u64,
}

impl Layout {
    /// The layout of a region, or `None` if it is out of bounds.
    pub fn new(bytes: u64, line_blocks: usize) -> Option<Self> {
        if !(CACHE_BYTES_MIN..=CACHE_BYTES_MAX).contains(&bytes)
            || !(CACHE_LINE_BLOCKS_MIN..=CACHE_LINE_BLOCKS_MAX).contains(&line_blocks)
            || !line_blocks.is_power_of_two()
        {
            return None;
        }
        let blocks = bytes / BLOCK;
        let snapshot_blocks = (blocks / SEGMENT_BLOCKS).div_ceil(CACHE_JOURNAL_ENTRIES_MAX as u64);
        let half_blocks = 64 + 2 * snapshot_blocks;
        let segments = (blocks - CACHE_HEADER_BLOCKS - 2 * half_blocks) / SEGMENT_BLOCKS;
        Some(Self {
            segments: segments as usize,
            line_blocks,
            plain_lines: CacheFooter::lines(line_blocks),
            lines_per_segment: CacheFooter::lines_max(line_blocks),
            half_blocks,
        })
    }

    /// Bytes of one line.
    pub fn line_bytes(&self) -> usize {
        self.line_blocks * BLOCK_BYTES
    }

    /// Where a block of an epoch of the journal lies.
    pub fn journal_offset(&self, epoch: u64, index: u64) -> u64 {
        (CACHE_HEADER_BLOCKS + epoch % 2 * self.half_blocks + index) * BLOCK
    }

    /// Where a segment begins.
    pub fn segment_offset(&self, segment: usize) -> u64 {
        (CACHE_HEADER_BLOCKS + 2 * self.half_blocks) * BLOCK + segment as u64 * SEGMENT_BYTES as u64
    }

    /// Where a segment's footer lies.
    pub fn footer_offset(&self, segment: usize) -> u64 {
        self.segment_offset(segment) + (SEGMENT_BYTES - BLOCK_BYTES) as u64
    }

    /// Blocks of a segment that lines may take.
    pub fn room_blocks(&self) -> usize {
        self.plain_lines * self.line_blocks
    }

    /// Whether more lines fit a segment if they are compressed.
    pub fn can_pack(&self) -> bool {
        self.lines_per_segment > self.plain_lines
    }
}

/// One invalidation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Lines that hold part of a range of addresses, in segments sealed up to `upto`.
    Range {
        /// Key of the first block.
        first: u64,
        /// How many blocks.
        blocks: u64,
        /// Highest sequence number of the segments that it is about.
        upto: u64,
    },
    /// Footers of this segment below `sequence`; of that with `sequence`, the slots in `void`.
    Segment {
        /// Number of the segment.
        segment: u32,
        /// Sequence number of a footer.
        sequence: u64,
        /// One bit per slot.
        void: u128,
    },
}

impl Entry {
    /// The entry as the medium has it.
    pub fn encode(self) -> CacheJournalEntry {
        let mut entry = CacheJournalEntry::new_zeroed();
        match self {
            Self::Range {
                first,
                blocks,
                upto,
            } => {
                entry.kind = CACHE_ENTRY_RANGE;
                entry.sequence.set(upto);
                entry.first.set(first);
                entry.second.set(blocks);
            }
            Self::Segment {
                segment,
                sequence,
                void,
            } => {
                entry.kind = CACHE_ENTRY_SEGMENT;
                entry.sequence.set(sequence);
                entry.first.set(void as u64);
                entry.second.set((void >> 64) as u64);
                entry.segment.set(segment);
            }
        }
        entry
    }

    /// The entry of the medium, or `None` if it makes no sense.
    pub fn decode(entry: &CacheJournalEntry) -> Option<Self> {
        let (first, second) = (entry.first.get(), entry.second.get());
        match entry.kind {
            CACHE_ENTRY_RANGE => Some(Self::Range {
                first,
                blocks: second,
                upto: entry.sequence.get(),
            }),
            CACHE_ENTRY_SEGMENT => Some(Self::Segment {
                segment: entry.segment.get(),
                sequence: entry.sequence.get(),
                void: u128::from(second) << 64 | u128::from(first),
            }),
            _ => None,
        }
    }
}

/// Which block of the journal.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// That of the superblock.
    pub format: u64,
    /// The epoch that it belongs to.
    pub epoch: u64,
    /// Its place within that.
    pub index: u64,
}

/// Write one block of the journal, with which a stamp is reached.
pub fn write_block(at: At, stamp: u64, entries: &[Entry], block: &mut [u8]) {
    let mut header = CacheJournalHeader::new_zeroed();
    header.magic = CACHE_JOURNAL_MAGIC;
    header.version.set(CACHE_VERSION);
    header.entries.set(entries.len() as u16);
    header.format.set(at.format);
    header.epoch.set(at.epoch);
    header.index.set(at.index);
    header.stamp.set(stamp);
    let entries: Vec<_> = entries.iter().map(|entry| entry.encode()).collect();
    header.write(&entries, block);
}

/// What a block of the journal turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// Entries of the epoch that was looked for, at their place, and the stamp that was reached with them.
    Entries(u64, Vec<Entry>),
    /// Nothing of this epoch was written here.
    Blank,
    /// It cannot be told what was written here.
    Damaged,
}

/// Read one block of the journal.
fn read_block(at: At, block: &[u8]) -> Found {
    if block.iter().all(|&byte| byte == 0) {
        return Found::Blank;
    }
    let Ok((header, entries)) = CacheJournalHeader::parse(block) else {
        return Found::Damaged;
    };
    if header.format.get() != at.format || header.epoch.get() < at.epoch {
        return Found::Blank;
    }
    if header.epoch.get() != at.epoch || header.index.get() != at.index {
        return Found::Damaged;
    }
    entries
        .iter()
        .map(Entry::decode)
        .collect::<Option<_>>()
        .map_or(Found::Damaged, |entries| {
            Found::Entries(header.stamp.get(), entries)
        })
}

/// The journal that superblocks tell of, read block by block and in order, one epoch after the other.
#[derive(Debug)]
pub struct JournalScan {
    layout: Layout,
    format: u64,
    /// The start that the superblocks tell of.
    incarnation: u64,
    epoch: u64,
    last_epoch: u64,
    next: u64,
    stamp: u64,
    /// Blocks of entries of the epoch, once a blank one was found behind them.
    end: Option<u64>,
}

impl JournalScan {
    /// From the first epoch that counts.
    pub fn new(root: &Root, layout: &Layout) -> Self {
        Self {
            layout: *layout,
            format: root.format,
            incarnation: root.incarnation,
            epoch: root.journal_first,
            last_epoch: root.journal_last,
            next: 0,
            stamp: root.stamp,
            end: None,
        }
    }

    /// The stamp that was reached so far.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// The epoch of the next block, and its place within that.
    pub fn next(&self) -> (u64, u64) {
        (self.epoch, self.next)
    }

    /// Where the next blocks lie, and bytes of so many at most; `None` at the end.
    pub fn next_read(&self, blocks_max: u64) -> Option<(u64, usize)> {
        let left = self.layout.half_blocks - self.next;
        let offset = self.layout.journal_offset(self.epoch, self.next);
        (left > 0).then(|| (offset, blocks_max.min(left) as usize * BLOCK_BYTES))
    }

    /// Blocks of entries so far in the epoch.
    pub fn used_blocks(&self) -> u64 {
        self.end.unwrap_or(self.next)
    }

    /// Take the next block: its entries, or `None` if entries may be lost, since it is damaged, or has
    /// some where an earlier one has none, or of a start that the superblocks do not know.
    pub fn take(&mut self, block: &[u8]) -> Option<Vec<Entry>> {
        let at = At {
            format: self.format,
            epoch: self.epoch,
            index: self.next,
        };
        let entries = match read_block(at, block) {
            Found::Entries(stamp, entries)
                if self.end.is_none() && stamp >> CACHE_START_SHIFT <= self.incarnation =>
            {
                self.stamp = self.stamp.max(stamp);
                entries
            }
            Found::Blank => {
                self.end.get_or_insert(self.next);
                Vec::new()
            }
            Found::Entries(..) | Found::Damaged => return None,
        };
        let is_sound = |entry: &Entry| match *entry {
            Entry::Range { .. } => true,
            Entry::Segment { segment, .. } => (segment as usize) < self.layout.segments,
        };
        if !entries.iter().all(is_sound) {
            return None;
        }
        self.next += 1;
        if self.next == self.layout.half_blocks && self.epoch < self.last_epoch {
            (self.epoch, self.next, self.end) = (self.epoch + 1, 0, None);
        }
        Some(entries)
    }
}

/// Invalidations on their way to the journal.
#[derive(Debug, Default)]
pub struct Queue {
    pending: VecDeque<Entry>,
    queued: u64,
    durable: u64,
    wanted: u64,
}

impl Queue {
    pub fn push(&mut self, entry: Entry) {
        if let (
            Some(Entry::Range {
                first,
                blocks,
                upto,
            }),
            Entry::Range {
                first: next,
                blocks: more,
                upto: same,
            },
        ) = (self.pending.back_mut(), entry)
            && first.checked_add(*blocks) == Some(next)
            && *upto == same
            && let Some(sum) = blocks.checked_add(more)
        {
            // It has the number of the entry that it extends, which is not durable yet.
            *blocks = sum;
            return;
        }
        self.pending.push_back(entry);
        self.queued += 1;
    }

    /// Count an invalidation that cannot be recorded; only [`Self::settle`] makes it durable.
    pub fn count_unrecorded(&mut self) {
        self.queued += 1;
    }

    /// Ask for everything so far to become durable.
    pub fn want(&mut self) -> u64 {
        self.wanted = self.queued;
        self.queued
    }

    pub fn queued(&self) -> u64 {
        self.queued
    }

    pub fn durable(&self) -> u64 {
        self.durable
    }

    pub fn is_settled(&self) -> bool {
        self.durable == self.queued
    }

    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether a block should be written now.
    pub fn is_due(&self) -> bool {
        self.wanted > self.durable || self.pending.len() >= CACHE_JOURNAL_ENTRIES_MAX
    }

    pub fn take(&mut self, entries: usize) -> Vec<Entry> {
        let entries = entries.min(self.pending.len());
        self.pending.drain(..entries).collect()
    }

    /// So many more of those that were taken are durable.
    pub fn advance(&mut self, entries: u64) {
        self.durable += entries;
        assert!(
            self.durable <= self.queued,
            "only what was queued is durable"
        );
    }

    /// Forget what is pending; the number that is durable once something made it needless.
    pub fn supersede(&mut self) -> u64 {
        self.pending.clear();
        self.queued
    }

    /// Everything up to a number that [`Self::supersede`] gave is durable.
    pub fn settle(&mut self, upto: u64) {
        self.durable = self.durable.max(upto);
    }

    pub fn pending_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.pending.iter_mut()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn journal_block_round_trips_and_damage_is_seen() {
        let entries = vec![
            Entry::Range {
                first: 7,
                blocks: 1 << 40,
                upto: 9,
            },
            Entry::Segment {
                segment: 5,
                sequence: 11,
                void: 1 << 127 | 1,
            },
        ];
        let at = |format, epoch, index| At {
            format,
            epoch,
            index,
        };
        let mut block = [0; BLOCK_BYTES];
        assert_eq!(read_block(at(1, 2, 3), &block), Found::Blank);
        write_block(at(1, 2, 3), 17, &entries, &mut block);
        let read = |format, epoch, index| read_block(at(format, epoch, index), &block);
        assert_eq!(read(1, 2, 3), Found::Entries(17, entries));
        assert_eq!(read(2, 2, 3), Found::Blank, "another format");
        assert_eq!(read(1, 4, 3), Found::Blank, "a later epoch");
        assert_eq!(read(1, 0, 3), Found::Damaged, "an earlier epoch");
        assert_eq!(read(1, 2, 4), Found::Damaged, "another place");
        block[100] ^= 1;
        assert_eq!(read_block(at(1, 2, 3), &block), Found::Damaged);
    }

    #[test]
    fn journal_of_a_start_that_the_superblocks_do_not_know_is_not_believed() {
        let root = Root::fresh(1, false);
        let at = At {
            format: 1,
            epoch: 1,
            index: 0,
        };
        let mut block = [0; BLOCK_BYTES];
        write_block(at, root.stamp + 1, &[], &mut block);
        let layout = Layout::new(CACHE_BYTES_MIN, 4).unwrap();
        let mut scan = JournalScan::new(&root, &layout);
        assert_eq!(scan.take(&block), Some(Vec::new()));
        assert_eq!(scan.stamp(), root.stamp + 1);
        write_block(
            at,
            (root.incarnation + 1) << CACHE_START_SHIFT,
            &[],
            &mut block,
        );
        assert_eq!(JournalScan::new(&root, &layout).take(&block), None);
    }

    #[test]
    fn journal_scan_reads_one_epoch_after_the_other() {
        let root = Root {
            journal_last: 2,
            ..Root::fresh(1, false)
        };
        let layout = Layout::new(CACHE_BYTES_MIN, 4).unwrap();
        let entry = |segment| Entry::Segment {
            segment,
            sequence: 1,
            void: 0,
        };
        let mut scan = JournalScan::new(&root, &layout);
        let mut block = [0; BLOCK_BYTES];
        let mut seen = Vec::new();
        while let Some((offset, bytes)) = scan.next_read(16) {
            let (epoch, first) = scan.next();
            assert_eq!(offset, layout.journal_offset(epoch, first));
            for index in first..first + bytes as u64 / BLOCK {
                let at = At {
                    format: 1,
                    epoch,
                    index,
                };
                block.fill(0);
                // The first epoch has two blocks of entries, the second has three.
                if index < epoch + 1 {
                    let stamp = root.stamp + 10 * epoch;
                    write_block(at, stamp, &[entry(epoch as u32)], &mut block);
                }
                seen.extend(scan.take(&block).unwrap());
            }
        }
        assert_eq!(seen, [1, 1, 2, 2, 2].map(entry));
        assert_eq!((scan.used_blocks(), scan.stamp()), (3, root.stamp + 20));
    }

    #[test]
    fn journal_scan_does_not_believe_a_segment_that_is_not_there() {
        let root = Root::fresh(1, false);
        let layout = Layout::new(CACHE_BYTES_MIN, 4).unwrap();
        let at = At {
            format: 1,
            epoch: 1,
            index: 0,
        };
        for (segment, is_believed) in [(layout.segments - 1, true), (layout.segments, false)] {
            let entry = Entry::Segment {
                segment: segment as u32,
                sequence: 1,
                void: 0,
            };
            let mut block = [0; BLOCK_BYTES];
            write_block(at, root.stamp, &[entry], &mut block);
            let taken = JournalScan::new(&root, &layout).take(&block);
            assert_eq!(taken.is_some(), is_believed);
        }
    }

    #[test]
    fn layout_holds_its_parts_without_overlap() {
        for line_blocks in [2, 4, 8, 16] {
            for bytes in [CACHE_BYTES_MIN, 100_000_000, 1 << 40, CACHE_BYTES_MAX] {
                let layout = Layout::new(bytes, line_blocks).unwrap();
                assert!(layout.segments >= 8);
                assert!(layout.segment_offset(layout.segments) <= bytes);
                let last = layout.segments - 1;
                let end = layout.segment_offset(last) + layout.room_blocks() as u64 * BLOCK;
                assert!(end <= layout.footer_offset(last));
                assert!(layout.journal_offset(1, layout.half_blocks) <= layout.segment_offset(0));
                assert!(layout.plain_lines <= layout.lines_per_segment);
                assert_eq!(layout.can_pack(), line_blocks > 2);
            }
        }
        assert!(Layout::new(CACHE_BYTES_MIN - 1, 4).is_none());
        assert!(Layout::new(CACHE_BYTES_MIN, 3).is_none());
    }

    #[test]
    fn queue_joins_neighbours_and_numbers_in_order() {
        let mut queue = Queue::default();
        queue.push(Entry::Range {
            first: 0,
            blocks: 4,
            upto: 1,
        });
        queue.push(Entry::Range {
            first: 4,
            blocks: 4,
            upto: 1,
        });
        queue.push(Entry::Range {
            first: 8,
            blocks: 4,
            upto: 2,
        });
        assert_eq!((queue.want(), queue.len()), (2, 2));
        assert!(queue.is_due());
        assert_eq!(
            queue.take(1),
            [Entry::Range {
                first: 0,
                blocks: 8,
                upto: 1
            }]
        );
        queue.advance(1);
        assert_eq!(queue.durable(), 1);
        let all = queue.supersede();
        queue.settle(all);
        assert!(queue.is_settled() && !queue.is_due());
    }
}
