//! Checker: what a pin promises.
//!
//! 1. Once it is filled, every whole block of it is in the SSD tier, whatever others fill meanwhile.
//! 2. The tier goes on taking what others fill.
//! 3. What is pinned reads as what the volume holds: that is what [`crate::check_reads`] says of every read.

use hdcs_core::base::io::SectorRange;

use crate::check_promotion::check_blocks;
use crate::violation::Violation;

/// A range of a volume of so many sectors is pinned and filled; `is_there` tells of each block.
pub fn check_kept(
    range: SectorRange,
    sectors: u64,
    is_there: impl Fn(u64) -> bool,
) -> Result<(), Violation> {
    let what = "is pinned and not in the SSD tier";
    check_blocks(range, sectors, is_there, "pinned-not-kept", what)
}

/// Others have filled so many lines of a tier of so many, and so many were taken.
pub fn check_taken(filled: u64, taken: u64, lines: u64) -> Result<(), Violation> {
    if filled < lines || taken >= lines / 2 {
        return Ok(());
    }
    Err(Violation::new(
        "pins-stop-tier",
        format!("beside pins, {taken} of {filled} lines were taken by a tier of {lines}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pin_that_lost_a_block_is_caught() {
        let range = SectorRange::new(4, 20);
        assert!(check_kept(range, 100, |block| block < 3).is_ok());
        let lost = check_kept(range, 100, |block| block != 2).unwrap_err();
        assert_eq!(lost.rule, "pinned-not-kept");
    }

    #[test]
    fn pins_that_stop_the_tier_are_caught() {
        assert!(check_taken(1800, 900, 900).is_ok());
        assert!(check_taken(10, 0, 900).is_ok(), "too few to tell");
        assert_eq!(
            check_taken(1800, 100, 900).unwrap_err().rule,
            "pins-stop-tier"
        );
    }
}
