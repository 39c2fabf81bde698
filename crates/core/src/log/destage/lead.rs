//! How long writes beyond the generation may stand in for those in it.
//!
//! A sector that is overwritten all the time would never reach the backend. So from the first write
//! that is left out this goes on for half of the greatest age, and then everything that is in the log
//! by then is destaged before it begins again.

use crate::base::io::Nanos;
use crate::log::extent_index::Sequence;
use crate::log::write_log::WriteLog;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lead {
    /// When the oldest write was accepted that may have been left out and not been made up for.
    pub(super) since: Option<Nanos>,
    /// Nothing is left out until the log begins here: then all is made up for.
    settles_at: Option<Sequence>,
}

impl Lead {
    /// Whether a generation that begins now may leave out what is covered beyond it.
    pub(super) fn allows(&mut self, now: Nanos, log: &WriteLog, age_max: Nanos) -> bool {
        if self.settles_at.is_none()
            && self
                .since
                .is_some_and(|since| now >= since.plus(Nanos(age_max.0 / 2)))
        {
            self.settles_at = Some(log.next_sequence());
        }
        self.settles_at.is_none()
    }

    /// The log begins later than it did.
    pub(super) fn retired(&mut self, log: &WriteLog) {
        let first = log.first_sequence();
        if self.settles_at.is_some_and(|at| first >= at) || first == log.next_sequence() {
            *self = Self::default();
        }
    }
}
