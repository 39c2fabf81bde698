//! Checker: what a promotion promises.
//!
//! 1. When it is answered with nothing else going on, every whole block of its range is in the cache,
//!    if the range is a small part of the SSD tier.
//! 2. It ends: it asks the backend for each sector of it once, and some more often, boundedly, since the
//!    tier could not take them when they came.
//! 3. Then reads of the range need the backend for nothing.
//! 4. What was promoted reads as what the volume holds, whatever was written or destaged meanwhile:
//!    that is what [`crate::check_reads`] says of every read, and of those that follow a promotion.

use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::BLOCK_SECTORS;

use crate::violation::Violation;

/// What a promotion may fetch in vain: 64 times at most, a quarter of a mebibyte each.
const AGAIN_SECTORS_MAX: u64 = 64 * 512;

/// The whole blocks of a range of a volume of so many sectors.
pub fn whole_blocks(range: SectorRange, sectors: u64) -> std::ops::Range<u64> {
    let end = range
        .end()
        .div_ceil(BLOCK_SECTORS)
        .min(sectors / BLOCK_SECTORS);
    range.start / BLOCK_SECTORS..end
}

/// Every whole block of a range of a volume of so many sectors is there, or `rule` is broken, and `what` says of
/// the first one that is not what it is.
pub fn check_blocks(
    range: SectorRange,
    sectors: u64,
    is_there: impl Fn(u64) -> bool,
    rule: &'static str,
    what: &str,
) -> Result<(), Violation> {
    match whole_blocks(range, sectors).find(|&block| !is_there(block)) {
        None => Ok(()),
        Some(block) => Err(Violation::new(
            rule,
            format!("block {block} of {range:?} {what}"),
        )),
    }
}

/// A promotion of `range` that had the volume for itself was answered; `is_cached` tells of each block
/// of the volume.
pub fn check_there(
    range: SectorRange,
    sectors: u64,
    is_cached: impl Fn(u64) -> bool,
) -> Result<(), Violation> {
    let what = "was promoted and is in no tier";
    check_blocks(range, sectors, is_cached, "promoted-not-there", what)
}

/// It has read so many sectors of it of the backend.
pub fn check_effort(range: SectorRange, sectors_read: u64) -> Result<(), Violation> {
    if sectors_read <= range.count + AGAIN_SECTORS_MAX {
        return Ok(());
    }
    Err(Violation::new(
        "promotion-endless",
        format!("promoting {range:?} has read {sectors_read} sectors of the backend"),
    ))
}

/// Reading what was promoted has read so many sectors of it of the backend.
pub fn check_used(range: SectorRange, sectors_read: u64) -> Result<(), Violation> {
    if sectors_read == 0 {
        return Ok(());
    }
    Err(Violation::new(
        "promoted-not-used",
        format!(
            "{range:?} was promoted, and reading it took {sectors_read} sectors of the backend"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotion_that_leaves_a_block_out_is_caught() {
        let range = SectorRange::new(4, 20);
        assert_eq!(whole_blocks(range, 100), 0..3);
        assert_eq!(whole_blocks(range, 23), 0..2, "the last block is not whole");
        assert!(check_there(range, 100, |block| block < 3).is_ok());
        assert!(check_there(range, 23, |block| block < 2).is_ok());
        let missing = check_there(range, 100, |block| block != 1).unwrap_err();
        assert_eq!(missing.rule, "promoted-not-there");
    }

    #[test]
    fn promotion_that_reads_more_than_its_range_is_caught() {
        let range = SectorRange::new(0, 4096);
        assert!(check_effort(range, 4096 + AGAIN_SECTORS_MAX).is_ok());
        let endless = check_effort(range, 4097 + AGAIN_SECTORS_MAX);
        assert_eq!(endless.unwrap_err().rule, "promotion-endless");
        assert!(check_used(range, 0).is_ok());
        assert_eq!(check_used(range, 8).unwrap_err().rule, "promoted-not-used");
    }
}
