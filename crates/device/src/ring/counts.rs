//! What a ring has counted since it was made. Plain integers: nothing is measured for their sake.

use super::Ring;

/// Counters of one ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingCounts {
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Completions that the kernel has queued, those that belong to no operation included.
    pub completions: u64,
}

impl Ring {
    /// What was counted so far.
    pub fn counts(&self) -> RingCounts {
        self.counts
    }
}
