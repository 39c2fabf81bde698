//! Going on without the log once its device takes no writes any more, if the volume is configured so.
//!
//! ```text
//!  Whole ──a write of it fails──► Emptying ──everything is retired──► writes go past the log
//!                                    └── a superblock cannot be kept, or the volume closes ──► writes are refused
//! ```
//!
//! The log is given up, its superblock is not: that is kept in another place from then on, which every opening
//! looks into.
//!
//! Invariants:
//! 1. From the failure on nothing is written to the log's device. Superblocks are kept beside it; the one with the
//!    higher sequence counts, wherever it is.
//! 2. What the log holds goes to the backend from the device and from memory, generation by generation, and the tail
//!    is kept durably after each: a replay of the device, if it comes back, takes nothing back in the backend.
//! 3. Writes go past the log only after the tail is kept durably that lies behind everything that the device can
//!    have. So nothing of it is ever replayed over them, however old or new it is.
//! 4. Before anything of it goes to the backend, the superblock says that it cannot be told what a cache has to have
//!    forgotten: what only memory had is in the backend after a crash, or not, and no replay lies over a cached line.
//! 5. What waited for the log to be durable is answered once it is durable in the backend.
//!
//! Failure: dirty data that is only on the device and cannot be read is tried again, and writes are refused until
//! it could be. A superblock that cannot be kept ends it: the volume is read-only.

use super::{Context, LogFailure, Phase, Volume};
use crate::base::error::RequestError;

impl Volume {
    /// Whether the log's device failed and the volume goes on without it, or is about to.
    pub fn log_is_given_up(&self) -> bool {
        self.log.is_given_up()
    }

    /// A write to the log's device has failed. Returns whether the volume can go on without it.
    pub(super) fn begin_giving_up_log(&mut self) -> bool {
        if self.log.has_failed() || self.log.is_given_up() {
            return !self.log.has_failed();
        }
        if self.config.log_failure != LogFailure::PassThrough || self.phase != Phase::Open {
            return false;
        }
        self.log.give_up();
        let (direct, from) = self.direct_side();
        direct.leave_write_back(&from);
        true
    }

    /// At every poll: look whether what the log holds can still get to the backend.
    pub(super) fn watch_failed_log(&mut self, cx: &mut Context<'_>) {
        if !self.direct.is_emptying_failed_log(&self.log) {
            self.log.set_unreadable(false);
            return;
        }
        if self.log.has_failed() || self.port.is_fenced() {
            return;
        }
        if self.damage.is_damaged() {
            self.failed_log_is_unreadable(cx);
        }
        let ends = match self.close {
            None => false,
            Some(true) => self.log.refuses_writes(),
            Some(false) => {
                self.log.refuses_writes() || self.destaging.backend_takes_nothing(&self.health)
            }
        };
        if ends {
            self.fail_writes(cx);
        }
    }

    /// Dirty data could not be read from the device, perhaps only for now.
    pub(super) fn failed_log_is_unreadable(&mut self, cx: &mut Context<'_>) {
        if !self.direct.is_emptying_failed_log(&self.log) || self.log.is_unreadable() {
            return;
        }
        self.log.set_unreadable(true);
        self.refuse_what_waits(cx);
        (self.direct).refuse(RequestError::ReadOnly, &mut self.port, cx);
    }

    // Superblocks.

    /// A superblock could not be made durable. Returns whether the next one can be kept beside the device.
    pub(super) fn superblock_failed(&mut self, cx: &mut Context<'_>) -> bool {
        if self.log.superblock_ended() {
            self.fail_writes(cx);
        } else {
            self.fail_log(cx);
        }
        !self.log.has_failed()
    }
}
