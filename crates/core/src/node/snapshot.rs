//! A snapshot of an open volume, or the removal of one, while clients go on: everything that was acknowledged is
//! destaged, then the backend keeps that.
//!
//! ```text
//! cache mode     Destage ─► Drain ─► Asked ─► (Copying) ─► end
//! storage mode   TierOut ─► Destage ─► Drain ─► Flush ─► Tier ─► Asked ─► (Copying) ─► end
//! a removal      Asked ─► end
//! ```
//!
//! | step | waits for | leaves with |
//! |---|---|---|
//! | TierOut | no tier-out of an earlier moment is under way | the volume is told to destage everything |
//! | Destage | nothing is left of that | – |
//! | Drain | nothing is under way in the backend; not needed if its flushes are atomic | cache mode: the backend is asked; storage mode: the local store is asked to flush |
//! | Flush | the local store has flushed ([`SnapshotOperation::flushed`]) | it begins to tier that moment out, and is to hold the backend there |
//! | Tier | it holds the backend there | the backend is asked |
//! | Asked | the backend has answered ([`SnapshotOperation::answered`]) | the end, or the backend is asked to complete a copy |
//! | Copying | the backend has copied | the end |
//!
//! Invariants:
//! 1. What is kept is an exact prefix of what was written through the log. The generation that ends a destage of
//!    everything leaves nothing out and takes nothing from behind it, and none begins while only a flush of what went
//!    past the log is waited for; and nothing of the next one reaches a backend that would show it before the state is
//!    kept ([`SnapshotOperation::holds`]). A backend with atomic flushes keeps what its last flush left, so nothing has
//!    to be held back from it.
//! 2. Reads wait only until the backend was asked, writes until it has answered, and nothing for a copy.
//! 3. A snapshot that was given up before the backend was asked has done nothing. After that, only a copy can be given
//!    up, and the backend's answer is waited for.
//! 4. A local store tiers out the state that Drain has left, and nothing else until the backend has answered. What was
//!    held back goes on as soon as the local store has that moment.
//!
//! Failure: a flush or a tier that fails ends the snapshot, and nothing was made.

use crate::base::error::IoError;
use crate::local::{Status, TierState};

/// What a snapshot looks at.
#[derive(Clone, Copy, Debug, Default)]
pub struct View {
    /// What is left of destaging everything.
    pub destage_left_bytes: u64,
    /// Operations under way in the backend.
    pub under_way: usize,
    /// The local store, if the volume is in storage mode.
    pub local: Option<Status>,
    /// Whether the local store was asked to tier out for somebody else, and that has not ended.
    pub is_tiering_out: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Have the volume destage everything.
    DestageAll,
    /// Have the backend, where the data lives, flush, whatever is held back, and say how that ended
    /// ([`SnapshotOperation::flushed`]).
    Flush,
    /// Have the local store tier out this moment, and leave the backend as that leaves it.
    TierAndHold,
    /// Ask the backend, whatever is held back, and say how that ended ([`SnapshotOperation::answered`]).
    Ask,
    /// Ask the backend again for what was held back.
    ReleaseHeld,
    /// The state is kept, and is to be copied: give the copy up if `is_given_up`, [`Act::ReleaseTier`] in storage mode,
    /// release what was held back, and ask the backend to complete the copy ([`SnapshotOperation::answered`]).
    Copy {
        /// Whether the copy is not wanted any more.
        is_given_up: bool,
        /// Whether the local store need not leave the backend as it is any more.
        releases_tier: bool,
    },
    /// It has ended: tell whoever asked, then settle with the local store, then release what was held back.
    End(Ending, TierEnd),
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// As the backend has answered.
    Answered,
    /// It was given up, and nothing was made.
    GivenUp,
    /// The local store failed, and nothing was made.
    LocalFailed(IoError),
    /// The local store could not tier out what is dirty, and nothing was made.
    NotTiered(IoError),
}

/// What an operation's end means for the local store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierEnd {
    /// Nothing.
    Nothing,
    /// It is to stop tiering out.
    Cancel,
    /// It need not leave the backend as it is any more.
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Start,
    TierOut,
    Destage,
    Drain,
    Flush,
    Tier,
    Asked,
    Copying,
}

/// What the operation has to care for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A snapshot of a volume in cache mode, over a backend whose flushes are atomic or not.
    Snapshot { is_atomic: bool },
    /// A snapshot of a volume in storage mode.
    LocalSnapshot,
    /// No snapshot is made.
    Other,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotOperation {
    step: Step,
    kind: Kind,
    /// Whether what was held back until this step was released.
    is_released: bool,
    is_given_up: bool,
}

impl SnapshotOperation {
    /// Make a snapshot of a volume in cache mode, over a backend whose flushes are atomic or not.
    pub fn make(is_atomic: bool) -> Self {
        Self::begin(Kind::Snapshot { is_atomic })
    }

    /// Make one of a volume in storage mode.
    pub fn make_local() -> Self {
        Self::begin(Kind::LocalSnapshot)
    }

    /// Have the backend do anything else with its snapshots.
    pub fn other() -> Self {
        Self::begin(Kind::Other)
    }

    fn begin(kind: Kind) -> Self {
        Self {
            step: Step::Start,
            kind,
            is_released: false,
            is_given_up: false,
        }
    }

    /// Whether the backend has not been asked yet.
    pub fn is_before_backend(&self) -> bool {
        self.step < Step::Asked
    }

    /// Whether it waits for the end of a destage.
    pub fn awaits_destage(&self) -> bool {
        self.step == Step::Destage
    }

    /// Whether it waits for the end of a tier-out that somebody else has asked for.
    pub fn awaits_tier_out(&self) -> bool {
        self.step == Step::TierOut
    }

    /// Whether whoever cancels a flush cancels this: it has not come further than that.
    pub fn is_flushing(&self) -> bool {
        match self.kind {
            Kind::LocalSnapshot => self.is_before_backend(),
            Kind::Snapshot { .. } | Kind::Other => self.step == Step::Destage,
        }
    }

    /// As soon as everything is destaged nothing of what came later may reach the backend: to be told before anything is
    /// asked of that.
    pub fn note_destaged(&mut self, destage_left_bytes: u64) {
        if self.step == Step::Destage && destage_left_bytes == 0 {
            self.step = Step::Drain;
        }
    }

    fn enter(&mut self, step: Step) {
        self.step = step;
        self.is_released = false;
    }

    /// What is to be done next; none: something has to happen first.
    pub fn go_on(&mut self, view: &View) -> Option<Act> {
        self.note_destaged(view.destage_left_bytes);
        let tier = view.local.map_or(TierState::Idle, |local| local.tier);
        let is_drained = match self.kind {
            Kind::Snapshot { is_atomic: true } => true,
            _ => view.under_way == 0,
        };
        match self.step {
            Step::Start if self.kind == Kind::Other => {
                self.enter(Step::Asked);
                Some(Act::Ask)
            }
            Step::Start | Step::TierOut if self.kind == Kind::LocalSnapshot => {
                let rests = view.local.is_some_and(|local| local.tier_rests);
                if tier == TierState::Idle && rests && !view.is_tiering_out {
                    self.enter(Step::Destage);
                    return Some(Act::DestageAll);
                }
                self.enter(Step::TierOut);
                None
            }
            Step::Start => {
                self.enter(Step::Destage);
                Some(Act::DestageAll)
            }
            Step::Drain if is_drained && self.kind == Kind::LocalSnapshot => {
                self.enter(Step::Flush);
                Some(Act::Flush)
            }
            Step::Drain if is_drained => {
                self.enter(Step::Asked);
                Some(Act::Ask)
            }
            Step::Tier => match tier {
                TierState::Waiting => None,
                TierState::Copying | TierState::Finishing => self.release(),
                TierState::Held => {
                    self.enter(Step::Asked);
                    Some(Act::Ask)
                }
                // It failed, and the next one would be of another moment.
                TierState::Idle | TierState::Pausing => {
                    let failed = view.local.and_then(|local| local.failed);
                    let trouble = view.local.and_then(|local| local.tier_trouble);
                    let ending = match failed {
                        Some(error) => Ending::LocalFailed(error),
                        None => Ending::NotTiered(trouble.unwrap_or(IoError::Failed)),
                    };
                    Some(Act::End(ending, TierEnd::Cancel))
                }
            },
            // What only reads need not wait for the answer.
            Step::Asked if self.kind != Kind::Other => self.release(),
            Step::TierOut
            | Step::Destage
            | Step::Drain
            | Step::Flush
            | Step::Asked
            | Step::Copying => None,
        }
    }

    fn release(&mut self) -> Option<Act> {
        if self.is_released {
            return None;
        }
        self.is_released = true;
        Some(Act::ReleaseHeld)
    }

    /// The local store has flushed, or not.
    pub fn flushed(&mut self, result: Result<(), IoError>) -> Act {
        debug_assert_eq!(self.step, Step::Flush, "it was asked to");
        match result {
            Ok(()) if !self.is_given_up => {
                self.enter(Step::Tier);
                Act::TierAndHold
            }
            Err(error) if !self.is_given_up => {
                Act::End(Ending::LocalFailed(error), TierEnd::Nothing)
            }
            _ => Act::End(Ending::GivenUp, TierEnd::Nothing),
        }
    }

    /// Whether the answer that is waited for is that of [`Act::Flush`].
    pub fn awaits_flush(&self) -> bool {
        self.step == Step::Flush
    }

    /// The backend has answered; `copies`: it has kept the state, and the snapshot is there only once that is copied.
    pub fn answered(&mut self, copies: bool) -> Act {
        let holds_tier = self.kind == Kind::LocalSnapshot;
        if self.step == Step::Asked && copies {
            self.enter(Step::Copying);
            return Act::Copy {
                is_given_up: self.is_given_up,
                releases_tier: holds_tier,
            };
        }
        let tier = if holds_tier {
            TierEnd::Release
        } else {
            TierEnd::Nothing
        };
        Act::End(Ending::Answered, tier)
    }

    /// It is not wanted any more: what is to be done now, if anything. A copy that is under way is given up beside this.
    pub fn give_up(&mut self) -> Option<Act> {
        match self.step {
            Step::Start | Step::TierOut | Step::Destage | Step::Drain => {
                Some(Act::End(Ending::GivenUp, TierEnd::Nothing))
            }
            Step::Tier => Some(Act::End(Ending::GivenUp, TierEnd::Cancel)),
            Step::Flush | Step::Asked | Step::Copying => {
                self.is_given_up = true;
                None
            }
        }
    }

    /// Whether what the volume asks of its backend waits for the state to be kept: something that `changes` the backend,
    /// or only reads.
    pub fn holds(&self, changes: bool, local: Option<&Status>) -> bool {
        if matches!(self.kind, Kind::Snapshot { is_atomic: true } | Kind::Other) {
            return false;
        }
        match self.step {
            Step::Start | Step::TierOut | Step::Destage | Step::Copying => false,
            Step::Drain | Step::Flush => true,
            // Once the local store has its moment, it copies before it writes.
            Step::Tier => local.is_some_and(|local| local.tier == TierState::Waiting),
            Step::Asked => self.kind != Kind::LocalSnapshot && changes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING_LEFT: View = View {
        destage_left_bytes: 0,
        under_way: 0,
        local: None,
        is_tiering_out: false,
    };
    const DIRTY: View = View {
        destage_left_bytes: 1,
        ..NOTHING_LEFT
    };

    fn local(tier: TierState) -> View {
        View {
            local: Some(Status {
                tier,
                tier_rests: tier == TierState::Idle,
                ..Status::default()
            }),
            ..NOTHING_LEFT
        }
    }

    #[test]
    fn snapshot_holds_everything_back_until_nothing_is_under_way_then_only_changes() {
        let mut one = SnapshotOperation::make(false);
        assert_eq!(one.go_on(&DIRTY), Some(Act::DestageAll));
        assert_eq!(one.go_on(&DIRTY), None);
        assert!(!one.holds(true, None), "destage goes on");
        one.note_destaged(0);
        assert!(one.holds(true, None) && one.holds(false, None));
        let busy = View {
            under_way: 1,
            ..NOTHING_LEFT
        };
        assert_eq!(one.go_on(&busy), None);
        assert!(one.is_before_backend());
        assert_eq!(one.go_on(&NOTHING_LEFT), Some(Act::Ask));
        assert!(one.holds(true, None) && !one.holds(false, None));
        assert_eq!(one.go_on(&NOTHING_LEFT), Some(Act::ReleaseHeld));
        assert_eq!(one.go_on(&NOTHING_LEFT), None);
        let end = Act::End(Ending::Answered, TierEnd::Nothing);
        assert_eq!(one.answered(false), end);
    }

    #[test]
    fn snapshot_over_atomic_flushes_holds_nothing_back() {
        let mut one = SnapshotOperation::make(true);
        assert_eq!(one.go_on(&DIRTY), Some(Act::DestageAll));
        let busy = View {
            under_way: 7,
            ..NOTHING_LEFT
        };
        assert_eq!(one.go_on(&busy), Some(Act::Ask));
        assert!(!one.holds(true, None));
    }

    #[test]
    fn snapshot_that_copies_releases_what_it_held_and_can_be_given_up() {
        let mut one = SnapshotOperation::make(false);
        for act in [Act::DestageAll, Act::Ask, Act::ReleaseHeld] {
            assert_eq!(one.go_on(&NOTHING_LEFT), Some(act));
        }
        assert_eq!(one.give_up(), None, "the backend was asked");
        let copy = Act::Copy {
            is_given_up: true,
            releases_tier: false,
        };
        assert_eq!(one.answered(true), copy);
        assert!(!one.holds(true, None));
        let end = Act::End(Ending::Answered, TierEnd::Nothing);
        assert_eq!(one.answered(true), end, "a copy is not copied");
    }

    #[test]
    fn snapshot_of_a_local_store_tiers_out_the_moment_that_was_flushed() {
        let mut one = SnapshotOperation::make_local();
        let earlier = View {
            is_tiering_out: true,
            ..local(TierState::Idle)
        };
        assert_eq!(one.go_on(&earlier), None);
        assert!(one.awaits_tier_out() && one.is_flushing());
        assert_eq!(one.go_on(&local(TierState::Copying)), None);
        let idle = local(TierState::Idle);
        assert_eq!(one.go_on(&idle), Some(Act::DestageAll));
        assert_eq!(one.go_on(&idle), Some(Act::Flush));
        assert!(one.awaits_flush() && one.holds(false, idle.local.as_ref()));
        assert_eq!(one.flushed(Ok(())), Act::TierAndHold);
        let waiting = local(TierState::Waiting);
        assert_eq!(one.go_on(&waiting), None);
        assert!(one.holds(true, waiting.local.as_ref()));
        let copying = local(TierState::Copying);
        assert_eq!(one.go_on(&copying), Some(Act::ReleaseHeld));
        assert_eq!(one.go_on(&copying), None);
        assert!(!one.holds(true, copying.local.as_ref()));
        let held = local(TierState::Held);
        assert_eq!(one.go_on(&held), Some(Act::Ask));
        assert_eq!(one.go_on(&held), Some(Act::ReleaseHeld));
        assert!(!one.holds(true, held.local.as_ref()));
        let end = Act::End(Ending::Answered, TierEnd::Release);
        assert_eq!(one.answered(false), end);
    }

    #[test]
    fn snapshot_of_a_local_store_fails_with_its_flush_or_its_tier() {
        let idle = local(TierState::Idle);
        let mut one = SnapshotOperation::make_local();
        assert_eq!(one.go_on(&idle), Some(Act::DestageAll));
        assert_eq!(one.go_on(&idle), Some(Act::Flush));
        let mut given_up = one;
        let failed = Ending::LocalFailed(IoError::NoSpace);
        let end = Act::End(failed, TierEnd::Nothing);
        assert_eq!(one.flushed(Err(IoError::NoSpace)), end);

        assert_eq!(given_up.give_up(), None);
        let end = Act::End(Ending::GivenUp, TierEnd::Nothing);
        let mut flushed = given_up;
        assert_eq!(flushed.flushed(Ok(())), end);
        assert_eq!(given_up.flushed(Err(IoError::NoSpace)), end);

        let mut one = SnapshotOperation::make_local();
        assert_eq!(one.go_on(&idle), Some(Act::DestageAll));
        assert_eq!(one.go_on(&idle), Some(Act::Flush));
        assert_eq!(one.flushed(Ok(())), Act::TierAndHold);
        let mut given_up = one;
        let end = Act::End(Ending::NotTiered(IoError::Failed), TierEnd::Cancel);
        assert_eq!(one.go_on(&local(TierState::Pausing)), Some(end));
        let end = Act::End(Ending::GivenUp, TierEnd::Cancel);
        assert_eq!(given_up.give_up(), Some(end));
    }

    #[test]
    fn snapshot_that_is_given_up_before_the_backend_was_asked_ends_at_once() {
        let end = Some(Act::End(Ending::GivenUp, TierEnd::Nothing));
        let mut one = SnapshotOperation::make(false);
        assert_eq!(one.give_up(), end);
        assert_eq!(one.go_on(&DIRTY), Some(Act::DestageAll));
        assert!(one.is_flushing());
        assert_eq!(one.give_up(), end);
        one.note_destaged(0);
        assert!(!one.is_flushing());
        assert_eq!(one.give_up(), end);
    }

    #[test]
    fn removal_asks_at_once_and_holds_nothing_back() {
        let mut one = SnapshotOperation::other();
        assert_eq!(one.go_on(&DIRTY), Some(Act::Ask));
        assert!(!one.holds(true, None));
        assert_eq!(one.go_on(&DIRTY), None);
        let end = Act::End(Ending::Answered, TierEnd::Nothing);
        assert_eq!(
            one.answered(true),
            Act::Copy {
                is_given_up: false,
                releases_tier: false
            }
        );
        assert_eq!(one.answered(false), end);
    }
}
