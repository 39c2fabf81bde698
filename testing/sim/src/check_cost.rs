//! Checker: no step costs more than a bound, whatever the length of a range, the number of extents below it and
//! what waits. So nobody else who is served by the same shard waits longer than that.
//!
//! What is counted is what the machines look at ([`hdcs_core::base::work`]): runs of an index, entries, parts of items,
//! blocks and places of the cache.

use hdcs_core::base::limits::{CACHE_STEP_PLACES_MAX, STEP_WORK_MAX};

use crate::violation::Violation;

/// Looks in one step at most: a few kinds of work, each of which takes its share of them, and a request of the
/// largest size at whose sectors somebody has to look one by one.
pub const STEP_LOOKS_MAX: u64 = (2 * CACHE_STEP_PLACES_MAX + 16 * STEP_WORK_MAX) as u64;

/// What of a step was the dearest so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Looks of the dearest step.
    pub step_max: u64,
}

impl Cost {
    /// A step was taken, which has brought the count from `before` to `after`.
    pub fn step(&mut self, what: &'static str, before: u64, after: u64) -> Result<(), Violation> {
        let looks = after.saturating_sub(before);
        self.step_max = self.step_max.max(looks);
        if looks <= STEP_LOOKS_MAX {
            return Ok(());
        }
        let message = format!("{what} took {looks} looks, and {STEP_LOOKS_MAX} are the most");
        Err(Violation::new("step-too-long", message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_of_a_step_is_bounded() {
        let mut cost = Cost::default();
        assert_eq!(cost.step("a poll", 1000, 1000 + STEP_LOOKS_MAX), Ok(()));
        let broken = cost.step("a poll", 0, STEP_LOOKS_MAX + 1).unwrap_err();
        assert_eq!(broken.rule, "step-too-long");
        assert_eq!(cost.step_max, STEP_LOOKS_MAX + 1);
    }
}
