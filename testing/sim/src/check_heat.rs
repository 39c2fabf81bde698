//! Checker: what a heat map and a warm-up from it promise.
//!
//! 1. What is cached when a map is gathered with nothing else going on, is in it.
//! 2. A warm-up from it has brought all of that back when it ends, if that is a small part of the SSD tier. Where volumes
//!    are weighed beside one another, some may have gone again for what is dearer: no more than went at all.
//! 3. What was brought back reads as what the volume holds: that is what [`crate::check_reads`] says of every read.

use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::BLOCK_SECTORS;

use crate::check_promotion::check_blocks;
use crate::violation::Violation;

/// These blocks were cached when a map was gathered, and these ranges are what the map has.
pub fn check_seen(cached: &[u64], ranges: &[SectorRange]) -> Result<(), Violation> {
    let is_seen = |block: &u64| {
        let block = SectorRange::new(block * BLOCK_SECTORS, BLOCK_SECTORS);
        ranges
            .iter()
            .any(|range| range.start <= block.start && block.end() <= range.end())
    };
    match cached.iter().find(|block| !is_seen(block)) {
        None => Ok(()),
        Some(block) => Err(Violation::new(
            "heat-not-seen",
            format!("block {block} is cached and not in the heat map"),
        )),
    }
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

/// A warm-up has ended beside volumes that may be worth more: so many of its lines are not there, and so many of
/// anybody's were driven out meanwhile.
pub fn check_driven_out(missing: u64, driven_out: u64) -> Result<(), Violation> {
    if missing <= driven_out {
        return Ok(());
    }
    Err(Violation::new(
        "warmed-not-there",
        format!(
            "{missing} lines that were warmed up are not in the cache, which has driven out {driven_out}"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_map_without_a_cached_block_is_caught() {
        let map = [SectorRange::new(16, 8), SectorRange::new(0, 16)];
        assert!(check_seen(&[0, 1, 2], &map).is_ok());
        let lost = check_seen(&[0, 1, 2], &map[..1]).unwrap_err();
        assert_eq!(lost.rule, "heat-not-seen");
    }

    #[test]
    fn warm_up_that_brought_too_little_is_caught() {
        let range = SectorRange::new(4, 20);
        assert!(check_back(range, 100, |block| block < 3).is_ok());
        let lost = check_back(range, 100, |block| block != 2).unwrap_err();
        assert_eq!(lost.rule, "warmed-not-there");
        assert!(check_driven_out(3, 3).is_ok());
        let lost = check_driven_out(4, 3).unwrap_err();
        assert_eq!(lost.rule, "warmed-not-there");
    }
}
