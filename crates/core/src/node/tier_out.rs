//! Tiering out what a volume in storage mode has dirty, perhaps before it is closed: the log is destaged into the local
//! store, then that tiers out. A volume in cache mode is destaged, and that is all.
//!
//! ```text
//!            ┌──────────── something is dirty again ────────────┐
//!            ▼                                                  │
//! begin ─► Destage ─► Tier ─► end, or, before a close: ─► look ─┴─► close
//! ```
//!
//! | step | waits for | leaves with |
//! |---|---|---|
//! | Destage | nothing is left of destaging everything | the local store begins to tier out |
//! | Tier | the local store has ended | the end; before a close Destage again if something is dirty that came meanwhile |
//!
//! Invariants:
//! 1. A local store tiers out a moment that a flush has left. If there is none and the volume owes one, it is destaged,
//!    which flushes: nobody else need ask for a flush for long.
//! 2. A close ends with nothing dirty, but when what is to be destaged first is stuck in the log; or it does not happen,
//!    since the local store failed.

use crate::base::error::IoError;
use crate::local::{Status, TierState};

/// What tiering out looks at.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// What is left of destaging everything.
    pub destage_left_bytes: u64,
    /// Blocks of the log in use.
    pub log_used_blocks: u64,
    /// Whether the volume has something in its backend that no flush has followed.
    pub owes_flush: bool,
    /// Whether nothing goes on in its log: the device does not answer or has failed, what it holds is damaged, or the
    /// backend belongs to another owner.
    pub log_is_stuck: bool,
    /// The local store.
    pub local: Status,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Have the volume destage everything.
    DestageAll,
    /// Have the local store begin to tier out.
    Begin,
    /// It has ended.
    End(Ending),
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// What was dirty is tiered out, or was given up.
    Done,
    /// Nothing is dirty: the volume is to close.
    Close,
    /// The local store is to stop tiering out, and the volume to close with what is dirty.
    CancelAndClose,
    /// The local store has failed, so the volume does not close.
    Failed(IoError),
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct TierOut {
    /// Whether the local store was asked; before that it has to have everything.
    is_asked: bool,
    /// Whether the volume is closed then. Nobody connects to it any more.
    then_close: bool,
}

impl TierOut {
    /// Begin, after the volume was told to destage everything; instead of `before`, if that is under way.
    pub fn begin(then_close: bool, before: Option<Self>) -> Self {
        Self {
            is_asked: false,
            then_close: then_close || before.is_some_and(|before| before.then_close),
        }
    }

    /// Whether the local store was asked.
    pub fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// Whether the volume is closed at the end.
    pub fn then_closes(&self) -> bool {
        self.then_close
    }

    /// What is to be done next, once a turn; none: something has to happen first.
    pub fn go_on(&mut self, view: &View) -> Option<Act> {
        if self.then_close && view.log_is_stuck {
            return Some(Act::End(Ending::CancelAndClose));
        }
        if let Some(error) = view.local.failed {
            // What is only asked to be flushed stays so: it must not look done.
            return self.then_close.then_some(Act::End(Ending::Failed(error)));
        }
        let is_destaged = view.destage_left_bytes == 0;
        if !self.is_asked {
            self.is_asked = is_destaged;
            return is_destaged.then_some(Act::Begin);
        }
        let local = &view.local;
        match local.tier {
            TierState::Waiting if is_destaged && view.owes_flush => Some(Act::DestageAll),
            TierState::Idle if !self.then_close => Some(Act::End(Ending::Done)),
            TierState::Idle => {
                let is_dirty = local.dirty_bytes + local.zero_bytes > 0;
                if view.log_used_blocks == 0 && !is_dirty {
                    return Some(Act::End(Ending::Close));
                }
                // What came in before its connections were closed.
                self.is_asked = false;
                Some(Act::DestageAll)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(tier: TierState) -> View {
        View {
            destage_left_bytes: 0,
            log_used_blocks: 0,
            owes_flush: false,
            log_is_stuck: false,
            local: Status {
                tier,
                ..Status::default()
            },
        }
    }

    #[test]
    fn tier_begins_once_everything_is_destaged_and_ends_with_the_local_store() {
        let mut one = TierOut::begin(false, None);
        let dirty = View {
            destage_left_bytes: 1,
            ..view(TierState::Idle)
        };
        assert_eq!(one.go_on(&dirty), None);
        assert!(!one.is_asked());
        assert_eq!(one.go_on(&view(TierState::Idle)), Some(Act::Begin));
        assert_eq!(one.go_on(&view(TierState::Copying)), None);
        let end = Act::End(Ending::Done);
        assert_eq!(one.go_on(&view(TierState::Idle)), Some(end));
    }

    #[test]
    fn tier_that_waits_for_a_flush_that_nobody_asks_for_has_the_volume_flush() {
        let mut one = TierOut::begin(false, None);
        assert_eq!(one.go_on(&view(TierState::Idle)), Some(Act::Begin));
        assert_eq!(one.go_on(&view(TierState::Waiting)), None);
        let owes = View {
            owes_flush: true,
            ..view(TierState::Waiting)
        };
        assert_eq!(one.go_on(&owes), Some(Act::DestageAll));
        let destaging = View {
            destage_left_bytes: 1,
            ..owes
        };
        assert_eq!(one.go_on(&destaging), None);
    }

    #[test]
    fn close_tiers_out_again_what_came_meanwhile() {
        let mut one = TierOut::begin(true, None);
        assert_eq!(one.go_on(&view(TierState::Idle)), Some(Act::Begin));
        let mut dirty = view(TierState::Idle);
        dirty.local.zero_bytes = 4096;
        assert_eq!(one.go_on(&dirty), Some(Act::DestageAll));
        assert_eq!(one.go_on(&dirty), Some(Act::Begin));
        let logged = View {
            log_used_blocks: 1,
            ..view(TierState::Idle)
        };
        assert_eq!(one.go_on(&logged), Some(Act::DestageAll));
        assert_eq!(one.go_on(&view(TierState::Idle)), Some(Act::Begin));
        let end = Act::End(Ending::Close);
        assert_eq!(one.go_on(&view(TierState::Idle)), Some(end));
    }

    #[test]
    fn close_ends_without_a_log_that_answers_and_not_without_a_local_store() {
        let mut one = TierOut::begin(false, Some(TierOut::begin(true, None)));
        assert!(one.then_closes(), "a close is not taken back");
        assert_eq!(one.go_on(&view(TierState::Idle)), Some(Act::Begin));
        let mut failed = view(TierState::Idle);
        failed.local.failed = Some(IoError::NoSpace);
        let end = Act::End(Ending::Failed(IoError::NoSpace));
        assert_eq!(one.go_on(&failed), Some(end));
        let silent = View {
            log_is_stuck: true,
            destage_left_bytes: 1,
            ..view(TierState::Copying)
        };
        let end = Act::End(Ending::CancelAndClose);
        assert_eq!(one.go_on(&silent), Some(end));
        let mut open = TierOut::begin(false, None);
        assert_eq!(open.go_on(&silent), None);
    }

    #[test]
    fn flush_of_a_local_store_that_failed_is_not_done_and_a_close_ends() {
        let mut failed = view(TierState::Idle);
        failed.local.failed = Some(IoError::Failed);
        failed.local.dirty_bytes = 1 << 20;
        let mut flush = TierOut::begin(false, None);
        assert_eq!(flush.go_on(&failed), None);
        let mut flush = TierOut::begin(false, None);
        assert_eq!(flush.go_on(&view(TierState::Idle)), Some(Act::Begin));
        assert_eq!(flush.go_on(&failed), None);
        // Nothing of the log will ever get into the local store.
        failed.destage_left_bytes = 4096;
        let mut close = TierOut::begin(true, None);
        let end = Act::End(Ending::Failed(IoError::Failed));
        assert_eq!(close.go_on(&failed), Some(end));
    }
}
