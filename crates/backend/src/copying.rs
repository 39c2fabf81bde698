//! A copy that a snapshot or clone has to make where the place cannot share data: how far it is, and a
//! way to end it. Shared by whoever copies, whoever waits, and whoever looks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// See the module. One at a time.
#[derive(Debug, Default)]
pub struct Copying {
    is_allowed: bool,
    is_running: AtomicBool,
    is_cancelled: AtomicBool,
    total_bytes: AtomicU64,
    copied_bytes: AtomicU64,
}

/// How far a copy is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// What there is to copy, as far as that is known.
    pub total_bytes: u64,
    /// What is left of it.
    pub left_bytes: u64,
}

impl Copying {
    /// For somebody who allows a copy, or wants none.
    pub fn new(is_allowed: bool) -> Self {
        Self {
            is_allowed,
            ..Self::default()
        }
    }

    /// Whether data may be copied at all.
    pub fn is_allowed(&self) -> bool {
        self.is_allowed
    }

    /// A copy of about so many bytes begins.
    pub fn begin(&self, total_bytes: u64) {
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
        self.copied_bytes.store(0, Ordering::Relaxed);
        self.is_running.store(true, Ordering::Release);
    }

    /// So much more of it is copied.
    pub fn add(&self, bytes: u64) {
        self.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// It has ended, somehow.
    pub fn end(&self) {
        self.is_cancelled.store(false, Ordering::Relaxed);
        self.is_running.store(false, Ordering::Release);
    }

    /// Whether one is under way.
    pub fn is_running(&self) -> bool {
        self.is_running.load(Ordering::Acquire)
    }

    /// Have it end soon, without a result.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether it was cancelled, perhaps before it began.
    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    /// How far it is; nothing is left if none is under way.
    pub fn progress(&self) -> Progress {
        if !self.is_running() {
            return Progress::default();
        }
        let total_bytes = self.total_bytes.load(Ordering::Relaxed);
        let copied_bytes = self.copied_bytes.load(Ordering::Relaxed);
        Progress {
            total_bytes,
            // Until it has ended, something is left.
            left_bytes: total_bytes.saturating_sub(copied_bytes).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_has_something_left_until_it_has_ended() {
        let copying = Copying::new(true);
        assert_eq!(copying.progress(), Progress::default());
        copying.begin(8);
        copying.add(6);
        assert_eq!(copying.progress().left_bytes, 2);
        copying.add(6);
        assert_eq!(copying.progress().left_bytes, 1);
        copying.cancel();
        assert!(copying.is_cancelled() && copying.is_running());
        copying.end();
        assert_eq!(copying.progress(), Progress::default());
        copying.begin(1);
        assert!(!copying.is_cancelled(), "that was the one before");
    }
}
