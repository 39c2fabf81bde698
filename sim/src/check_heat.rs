//! Checker: what a heat map and a warm-up from it promise.
//!
//! 1. What is cached when a map is gathered with nothing else going on, is in it.
//! 2. A warm-up from it has brought all of that back when it ends, if that is a small part of the SSD tier.
//! 3. What was brought back reads as what the volume holds: that is what [`crate::check_reads`] says of every read.

use hdcs_core::io::SectorRange;
use hdcs_core::limits::BLOCK_SECTORS;

use crate::check_promotion::check_blocks;
use crate::violation::Violation;

/// All of a range was cached when a map was gathered, and these ranges are what the map has.
pub fn check_seen(
    range: SectorRange,
    sectors: u64,
    ranges: &[SectorRange],
) -> Result<(), Violation> {
    let is_seen = |block: u64| {
        let block = SectorRange::new(block * BLOCK_SECTORS, BLOCK_SECTORS);
        ranges
            .iter()
            .any(|range| range.start <= block.start && block.end() <= range.end())
    };
    let what = "is cached and not in the heat map";
    check_blocks(range, sectors, is_seen, "heat-not-seen", what)
}

/// A warm-up from such a map has ended; `is_there` tells of each block.
pub fn check_back(
    range: SectorRange,
    sectors: u64,
    is_there: impl Fn(u64) -> bool,
) -> Result<(), Violation> {
    let what = "was warmed up and is not in the cache";
    check_blocks(range, sectors, is_there, "warmed-not-there", what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_map_without_a_cached_block_is_caught() {
        let range = SectorRange::new(4, 20);
        let map = [SectorRange::new(16, 8), SectorRange::new(0, 16)];
        assert!(check_seen(range, 100, &map).is_ok());
        let lost = check_seen(range, 100, &map[..1]).unwrap_err();
        assert_eq!(lost.rule, "heat-not-seen");
    }

    #[test]
    fn warm_up_that_brought_too_little_is_caught() {
        let range = SectorRange::new(4, 20);
        assert!(check_back(range, 100, |block| block < 3).is_ok());
        let lost = check_back(range, 100, |block| block != 2).unwrap_err();
        assert_eq!(lost.rule, "warmed-not-there");
    }
}
