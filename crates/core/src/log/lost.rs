//! Sectors of a volume whose data was lost with the write log, and that were not written since.
//!
//! Invariants: the ranges are in order, none is empty, and no two touch.

use alloc::collections::BTreeMap;

use zerocopy::little_endian::U64;

use crate::base::io::SectorRange;
use crate::base::limits::LOST_RANGES_MAX;
use crate::format::LogSuperblock;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LostSectors {
    /// The end of each range by its start.
    ranges: BTreeMap<u64, u64>,
}

impl LostSectors {
    /// What a superblock has recorded.
    pub(crate) fn recorded(superblock: &LogSuperblock) -> Self {
        let mut lost = Self::default();
        let count = superblock.lost_ranges.get() as usize;
        for [start, sectors] in superblock.lost.iter().take(count) {
            let end = start.get().saturating_add(sectors.get());
            lost.add(SectorRange::between(start.get(), end));
        }
        lost
    }

    /// Record it. There are no more than [`LOST_RANGES_MAX`] ranges.
    pub(crate) fn record(&self, superblock: &mut LogSuperblock) {
        assert!(self.ranges.len() <= LOST_RANGES_MAX, "whoever adds looks");
        superblock.lost = [[U64::ZERO; 2]; LOST_RANGES_MAX];
        superblock.lost_ranges = U64::new(self.ranges.len() as u64);
        for (place, range) in superblock.lost.iter_mut().zip(self.iter()) {
            *place = [U64::new(range.start), U64::new(range.count)];
        }
    }

    /// Whether nothing is lost.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// How many ranges it has.
    pub fn count(&self) -> usize {
        self.ranges.len()
    }

    /// How many sectors are lost.
    pub fn sectors(&self) -> u64 {
        self.iter().map(|range| range.count).sum()
    }

    /// The ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = SectorRange> + '_ {
        let ranges = self.ranges.iter();
        ranges.map(|(&start, &end)| SectorRange::between(start, end))
    }

    /// The parts of `range` that are lost, in order.
    pub fn pieces(&self, range: SectorRange) -> impl Iterator<Item = SectorRange> + '_ {
        let before = self.ranges.range(..=range.start).next_back();
        let from = before.map_or(range.start, |(&start, _)| start);
        let ranges = self.ranges.range(from..range.end().max(from));
        let ranges = ranges.map(|(&start, &end)| SectorRange::between(start, end));
        ranges
            .filter(move |lost| lost.overlaps(range))
            .map(move |lost| lost.intersect(range))
    }

    /// Whether something of `range` is lost.
    pub fn overlaps(&self, range: SectorRange) -> bool {
        !self.is_empty() && self.pieces(range).next().is_some()
    }

    /// These are lost.
    pub(crate) fn add(&mut self, range: SectorRange) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end());
        while let Some((&first, &last)) = self.ranges.range(..=end).next_back()
            && last >= start
        {
            (start, end) = (start.min(first), end.max(last));
            self.ranges.remove(&first);
        }
        self.ranges.insert(start, end);
    }

    /// These hold something again.
    pub(crate) fn remove(&mut self, range: SectorRange) {
        if range.is_empty() {
            return;
        }
        while let Some((&first, &last)) = self.ranges.range(..range.end()).next_back()
            && last > range.start
        {
            self.ranges.remove(&first);
            if first < range.start {
                self.ranges.insert(first, range.start);
            }
            if last > range.end() {
                self.ranges.insert(range.end(), last);
            }
        }
    }

    /// Whether too many ranges would be left without these.
    pub(crate) fn splits_too_far(&self, range: SectorRange) -> bool {
        let is_inside = |lost: SectorRange| lost.start < range.start && range.end() < lost.end();
        self.ranges.len() >= LOST_RANGES_MAX && self.iter().any(is_inside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against one flag for each sector.
    #[test]
    fn lost_sectors_are_those_that_were_added_and_not_removed() {
        let (mut lost, mut flags) = (LostSectors::default(), [false; 64]);
        let mut random: u64 = 1;
        let mut next = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..2000 {
            let start = next(60);
            let range = SectorRange::new(start, next(64 - start));
            let adds = next(2) == 0;
            if adds {
                lost.add(range);
            } else {
                lost.remove(range);
            }
            flags[range.start as usize..range.end() as usize].fill(adds);
            let of = |at: u64| SectorRange::new(at, 1);
            for (at, &is_lost) in (0..).zip(&flags) {
                assert_eq!(lost.overlaps(of(at)), is_lost);
            }
            let ranges: alloc::vec::Vec<_> = lost.iter().collect();
            assert!(ranges.windows(2).all(|two| two[0].end() < two[1].start));
            assert_eq!(
                lost.sectors(),
                flags.iter().filter(|flag| **flag).count() as u64
            );
            let within = SectorRange::new(10, 30);
            let pieces: u64 = lost.pieces(within).map(|piece| piece.count).sum();
            let expected = flags[10..40].iter().filter(|flag| **flag).count();
            assert_eq!(pieces, expected as u64);
        }
    }
}
