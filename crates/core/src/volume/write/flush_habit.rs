//! How often a client flushes, as far as that says what it expects.

use crate::volume::Persist;

/// Whoever flushes after no more than so many bytes has what is written between two flushes written
/// early.
const FLUSH_OFTEN_BYTES: u64 = 1 << 20;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct FlushHabit {
    /// A client has flushed: it knows barriers.
    barrier_seen: bool,
    /// Bytes accepted when the last flush came, and between it and the one before.
    flushed_at: u64,
    interval: u64,
}

impl FlushHabit {
    /// A flush has come after so many bytes in all.
    pub(super) fn note_flush(&mut self, appended: u64) {
        self.interval = appended - self.flushed_at;
        self.flushed_at = appended;
        self.barrier_seen = true;
    }

    /// Whether an acknowledgement waits for durability at present.
    pub(super) fn is_on_write(&self, persist: Persist) -> bool {
        match persist {
            Persist::OnWrite => true,
            Persist::OnFlush => false,
            Persist::Auto => !self.barrier_seen,
        }
    }

    /// Whether the next flush is to be expected before much more is written.
    pub(super) fn is_often(&self, appended: u64) -> bool {
        let since = appended - self.flushed_at;
        self.barrier_seen && self.interval.max(since) <= FLUSH_OFTEN_BYTES
    }
}
