//! Checker: what the policy of the SSD tier promises.
//!
//! 1. By benefit: of what is dear to read again most stays, whatever a cheap neighbour fills.
//! 2. By recency nothing of that is promised: both are treated alike.
//! 3. Once all is quiet, no more of the tier is in use than the upper mark allows.
//! 4. A line that was read less often than asked for is not in the tier.

use crate::violation::Violation;

/// Of so many lines that are dear, so many are left after a cheap neighbour has filled the tier.
pub fn check_dear(kept: usize, of: usize) -> Result<(), Violation> {
    if 2 * kept >= of {
        return Ok(());
    }
    Err(Violation::new(
        "benefit-not-kept",
        format!("{kept} of {of} dear lines are left after a cheap neighbour has filled the tier"),
    ))
}

/// So many blocks of a tier of so many are in use, whose upper mark is at so many percent.
pub fn check_marks(used: u64, blocks: u64, ratio_max: u8) -> Result<(), Violation> {
    if used * 100 <= blocks * u64::from(ratio_max) {
        return Ok(());
    }
    Err(Violation::new(
        "fill-beyond-mark",
        format!("{used} of {blocks} blocks are in use, the mark is at {ratio_max} %"),
    ))
}

/// A line is in the tier or not, that was read so often where so often is asked for.
pub fn check_counted(is_there: bool, reads: u8, asked: u8) -> Result<(), Violation> {
    if reads >= asked || !is_there {
        return Ok(());
    }
    Err(Violation::new(
        "taken-uncounted",
        format!("a line that was read {reads} times is in the tier, {asked} are asked for"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benefit_that_loses_what_is_dear_is_caught() {
        assert!(check_dear(50, 100).is_ok() && check_dear(0, 0).is_ok());
        assert_eq!(check_dear(49, 100).unwrap_err().rule, "benefit-not-kept");
    }

    #[test]
    fn marks_that_are_passed_are_caught() {
        assert!(check_marks(800, 1000, 80).is_ok());
        let beyond = check_marks(801, 1000, 80).unwrap_err();
        assert_eq!(beyond.rule, "fill-beyond-mark");
    }

    #[test]
    fn counts_that_are_not_waited_for_are_caught() {
        assert!(check_counted(true, 3, 3).is_ok() && check_counted(false, 1, 3).is_ok());
        let early = check_counted(true, 2, 3).unwrap_err();
        assert_eq!(early.rule, "taken-uncounted");
    }
}
