//! What the entries of the journal void, for a start of the tier and for whoever looks at its device.
//!
//! An entry says up to which sequence number it holds. So entries may come in any order: of several about one segment
//! or one address, the highest number counts.

use alloc::vec::Vec;

use crate::base::io::SectorRange;
use crate::base::limits::STEP_WORK_MAX;
use crate::log::extent_index::ExtentIndex;

/// What the journal says of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentVoid {
    /// Footers below this number are void,
    pub sequence: u64,
    /// and of the footer that has it these lines: one bit per slot.
    pub lines: u128,
}

impl SegmentVoid {
    /// Whether the whole of a footer is void.
    pub fn is_footer_void(&self, sequence: u64) -> bool {
        sequence < self.sequence
    }

    /// Whether a line of a footer is void that is not void itself.
    pub fn is_line_void(&self, sequence: u64, slot: usize) -> bool {
        sequence == self.sequence && self.lines >> slot & 1 == 1
    }

    /// Another entry says this of the same segment.
    pub fn add(&mut self, other: Self) {
        if other.is_footer_void(self.sequence) {
            *self = other;
        } else if other.sequence == self.sequence {
            self.lines |= other.lines;
        }
    }
}

/// Ranges of addresses, and up to which sequence number their lines are void: some ten bytes for each range.
#[derive(Debug, Default)]
pub struct VoidRanges(ExtentIndex);

impl VoidRanges {
    /// An entry voids so many blocks from the key `first` on, in segments up to a number.
    pub fn add(&mut self, first: u64, blocks: u64, upto: u64) {
        let pieces = self.0.pieces(range(first, blocks));
        let pieces: Vec<_> = pieces.filter(|&(_, had)| had < Some(upto)).collect();
        for (piece, _) in pieces {
            self.0.insert_long(piece, upto);
            while !self.0.takes_long() {
                self.0.settle(STEP_WORK_MAX);
            }
        }
    }

    /// All of these at once: first keys, blocks, numbers. However they overlap, each is looked at a few times.
    pub fn of(mut ranges: Vec<(u64, u64, u64)>) -> Self {
        // Of two that overlap, the one with the higher number comes later and takes the other's place.
        ranges.sort_unstable_by_key(|&(first, _, upto)| (upto, first));
        let mut all = Self::default();
        let mut ranges = ranges.into_iter().peekable();
        while let Some((first, blocks, upto)) = ranges.next() {
            let mut end = first.saturating_add(blocks);
            while let Some((from, blocks, _)) =
                ranges.next_if(|&(from, _, other)| other == upto && from <= end)
            {
                end = end.max(from.saturating_add(blocks));
            }
            all.add(first, end - first, upto);
        }
        all
    }

    /// Whether a line of so many blocks is void in a segment with this number.
    pub fn is_line_void(&self, key: u64, line_blocks: usize, sequence: u64) -> bool {
        let mut voids = self.0.overlaps(range(key, line_blocks as u64));
        voids.any(|(_, upto)| sequence <= upto)
    }

    /// What was looked at so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.0.work()
    }
}

fn range(first: u64, blocks: u64) -> SectorRange {
    SectorRange::new(first, blocks.min(u64::MAX - first))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::limits::INDEX_RUNS_AT_ONCE_MAX;

    #[test]
    fn void_ranges_agree_with_a_plain_list() {
        let mut random = fastrand::Rng::with_seed(11);
        // The second size has long ranges over many short ones.
        for (tries, many, keys) in [(200, 12, 80), (6, 8 * INDEX_RUNS_AT_ONCE_MAX, 8000)] {
            for _ in 0..tries {
                let ranges: Vec<(u64, u64, u64)> = (0..random.usize(many / 2..many))
                    .map(|_| {
                        let blocks = random.choice([4, 20, keys / 2]).unwrap();
                        let first = random.u64(..keys * 3 / 4);
                        (first, random.u64(..blocks), random.u64(..5))
                    })
                    .collect();
                let mut void = VoidRanges::default();
                for &(first, blocks, upto) in &ranges {
                    void.add(first, blocks, upto);
                }
                let at_once = VoidRanges::of(ranges.clone());
                for key in (0..keys).step_by(4) {
                    let here = ranges.iter().filter(|&&(first, blocks, _)| {
                        blocks > 0 && first < key + 4 && key < first + blocks
                    });
                    let upto = here.map(|&(.., upto)| upto).max();
                    for sequence in 0..6 {
                        for void in [&void, &at_once] {
                            let found = void.is_line_void(key, 4, sequence);
                            assert_eq!(found, upto >= Some(sequence), "{key} {sequence}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn void_ranges_end_with_the_last_key() {
        let mut void = VoidRanges::default();
        void.add(u64::MAX - 9, u64::MAX, 3);
        void.add(u64::MAX, 1, 3);
        assert!(void.is_line_void(u64::MAX - 7, 8, 3) && !void.is_line_void(u64::MAX - 31, 16, 3));
    }

    #[test]
    fn void_segment_entries_keep_the_highest_number() {
        let mut void = SegmentVoid::default();
        let said = |sequence, lines| SegmentVoid { sequence, lines };
        void.add(said(5, 0b01));
        void.add(said(5, 0b10));
        assert!(void.is_line_void(5, 0) && void.is_line_void(5, 1) && !void.is_line_void(5, 2));
        assert!(void.is_footer_void(4) && !void.is_footer_void(5));
        void.add(said(7, 0));
        void.add(said(6, 0b100));
        assert_eq!(void, said(7, 0));
        assert!(void.is_footer_void(6) && !void.is_footer_void(7) && !void.is_line_void(6, 2));
    }
}
