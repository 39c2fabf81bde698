//! Which addresses are pinned: their lines stay in the SSD tier while they are valid.
//!
//! Invariants:
//! 1. The lines of all pins together are no more than the tier's share for them, so that there is always
//!    something to evict.
//! 2. A pin of a volume covers the same blocks of its origin: which of both holds a block now is the
//!    volume's knowledge. At worst a line of each stays.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::base::io::BlockKey;

/// Why a pin was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinRefused {
    /// There is no SSD tier.
    NoTier,
    /// Pins would take more of the tier than they may.
    TooMuch {
        /// What this volume's pins would take.
        asked_bytes: u64,
        /// What those of other volumes take.
        others_bytes: u64,
        /// What all may take.
        max_bytes: u64,
    },
}

/// What is pinned of one volume.
#[derive(Debug)]
struct Pinned {
    origin: Option<u32>,
    /// First block and end of each range: whole lines, in order, apart.
    ranges: Vec<(u64, u64)>,
}

impl Pinned {
    fn blocks(&self) -> u64 {
        self.ranges.iter().map(|(first, end)| end - first).sum()
    }

    fn contains(&self, block: u64) -> bool {
        let index = self.ranges.partition_point(|&(first, _)| first <= block);
        index > 0 && block < self.ranges[index - 1].1
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Pins(BTreeMap<u32, Pinned>);

/// Ranges of blocks as whole lines: in order, apart, none of them empty.
pub fn whole_lines(ranges: &[(u64, u64)], line_blocks: u64) -> Vec<(u64, u64)> {
    let mut lines: Vec<(u64, u64)> = ranges
        .iter()
        .filter(|(first, end)| first < end)
        .map(|&(first, end)| {
            let first = first / line_blocks * line_blocks;
            (first, end.next_multiple_of(line_blocks))
        })
        .collect();
    lines.sort_unstable();
    lines.dedup_by(|next, before| {
        let touches = next.0 <= before.1;
        if touches {
            before.1 = before.1.max(next.1);
        }
        touches
    });
    lines
}

impl Pins {
    /// Pin these ranges of a volume and nothing else of it, if with the others' pins they take no more
    /// than `blocks_max`; else, what those take.
    pub fn set(
        &mut self,
        volume: u32,
        origin: Option<u32>,
        ranges: Vec<(u64, u64)>,
        blocks_max: u64,
    ) -> Result<(), u64> {
        let pinned = Pinned { origin, ranges };
        let others = self.blocks_beside(volume);
        if pinned.ranges.is_empty() {
            self.0.remove(&volume);
        } else if others + pinned.blocks() > blocks_max {
            return Err(others);
        } else {
            self.0.insert(volume, pinned);
        }
        Ok(())
    }

    /// What the pins of other volumes take.
    pub fn blocks_beside(&self, volume: u32) -> u64 {
        let others = self.0.iter().filter(|(other, _)| **other != volume);
        others.map(|(_, pinned)| pinned.blocks()).sum()
    }

    /// Whether nothing is pinned.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether an address is pinned.
    pub fn contains(&self, key: u64) -> bool {
        let (number, block) = (BlockKey(key).volume(), BlockKey(key).block());
        let mut pins = self.0.iter();
        pins.any(|(&volume, pinned)| {
            (volume == number || pinned.origin == Some(number)) && pinned.contains(block)
        })
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn pins_are_whole_lines_and_apart() {
        let ranges = [(9, 9), (13, 14), (3, 5), (8, 12), (40, 41)];
        assert_eq!(whole_lines(&ranges, 4), vec![(0, 16), (40, 44)]);
    }

    #[test]
    fn pins_cover_a_volume_and_its_origin() {
        let mut pins = Pins::default();
        let key = |volume, block| BlockKey::new(volume, block).0;
        assert_eq!(pins.set(1, Some(9), vec![(4, 8), (16, 20)], 100), Ok(()));
        for block in [4, 7, 16, 19] {
            assert!(pins.contains(key(1, block)) && pins.contains(key(9, block)));
        }
        for block in [0, 3, 8, 15, 20] {
            assert!(!pins.contains(key(1, block)) && !pins.contains(key(9, block)));
        }
        assert!(!pins.contains(key(2, 4)));
    }

    #[test]
    fn pins_of_all_volumes_are_bounded() {
        let mut pins = Pins::default();
        assert_eq!(pins.set(1, None, vec![(0, 60)], 100), Ok(()));
        assert_eq!(pins.set(2, None, vec![(0, 44)], 100), Err(60));
        assert!(!pins.contains(BlockKey::new(2, 0).0));
        assert_eq!(pins.set(2, None, vec![(0, 40)], 100), Ok(()));
        // What a volume had does not count against what it gets.
        assert_eq!(pins.set(1, None, vec![(100, 160)], 100), Ok(()));
        assert!(!pins.contains(BlockKey::new(1, 0).0));
        assert_eq!(pins.set(1, None, vec![], 100), Ok(()));
        assert_eq!(pins.set(2, None, vec![], 100), Ok(()));
        assert!(pins.is_empty());
    }
}
