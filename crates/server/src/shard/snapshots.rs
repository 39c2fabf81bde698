//! Snapshots on a shard's thread: everything that was acknowledged is destaged, then the backend keeps
//! that, while clients go on.
//!
//! ```text
//!  Destage ─► Drain ─► Asked ─► (Copying) ─► answered
//!     │         │                   │
//!     └─────────┴── given up ───────┘
//! ```
//!
//! In storage mode the backend lacks what the home has: that is tiered out between Drain and Asked.
//!
//! ```text
//!  Tiers ─► Destage ─► Drain ─► Flush ─► Tier ─► Asked ─► …
//! ```
//!
//! Invariants:
//! 1. What is kept is an exact prefix of what was written through the log. The generation that ends a
//!    destage of everything leaves nothing out and takes nothing from behind it; and nothing of the next
//!    one reaches a backend that would show it before the state is kept ([`Served::holds`]).
//! 2. Reads wait only until the backend was asked, writes until it has answered, and nothing for a copy.
//! 3. A snapshot that was given up before the backend was asked has done nothing.
//! 4. A home tiers out the state that Drain has left, and nothing else until the backend has answered. What
//!    was held back goes on as soon as the home has that moment.
//!
//! [`Served::holds`]: super::served::Served::holds

use hdcs_backend::home::Tiers;
use hdcs_backend::{Ask, Keep, Operation, Port};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::Done;
use hdcs_core::local::{Status, TierState};
use hdcs_core::volume::Event;
use hdcs_device::ring::Owner;
use hdcs_frontend::VolumeNumber;

use super::command::{Answer, KeepFailure};
use super::control::{NOT_OPEN, tell};
use super::served::{KeepStep, Keeping, Served};
use super::turn::KEEP_TOKEN;
use super::works::Works;

impl Works {
    /// Keep or forget something.
    pub(super) fn keep(
        &mut self,
        number: VolumeNumber,
        keep: Keep,
        answer: Answer<(), KeepFailure>,
    ) {
        match self.check_keep(number) {
            Ok(slot) => self.begin_keeping(slot, keep, answer),
            Err(failure) => tell(answer, Err(failure)),
        }
    }

    /// The snapshot that is being made is not wanted any more.
    pub(super) fn cancel_keeping(&mut self, number: VolumeNumber) {
        if let Ok(slot) = self.open_slot(number) {
            self.give_up_keeping(slot, KeepFailure::Cancelled);
        }
    }

    /// A flush is cancelled, and with it a snapshot that has not come further than that.
    pub(super) fn cancel_destage_to_keep(&mut self, number: VolumeNumber) {
        let slot = self.open_slot(number).ok();
        let served = slot.and_then(|slot| self.volumes.get(slot));
        let is_flushing = |served: &Served| match &served.keeping {
            Some(keeping) if served.home().is_some() => keeping.step < KeepStep::Asked,
            Some(keeping) => keeping.step == KeepStep::Destage,
            None => false,
        };
        if served.is_some_and(is_flushing) {
            self.cancel_keeping(number);
        }
    }

    /// Whether the backend of a volume may be asked to keep something; the volume's slot.
    fn check_keep(&self, number: VolumeNumber) -> Result<u32, KeepFailure> {
        let Ok(slot) = self.open_slot(number) else {
            return Err(KeepFailure::Now(NOT_OPEN));
        };
        match self.volumes.get(slot) {
            None => Err(KeepFailure::Now(NOT_OPEN)),
            Some(served) if !served.backend.capabilities().snapshots => Err(KeepFailure::Incapable),
            Some(served) if served.resizing.is_some() || served.keeping.is_some() => Err(
                KeepFailure::Now("another snapshot or a resize is under way; wait for its end"),
            ),
            Some(_) => Ok(slot),
        }
    }

    fn begin_keeping(&mut self, slot: u32, keep: Keep, answer: Answer<(), KeepFailure>) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let is_snapshot = matches!(keep, Keep::Snapshot { .. });
        let has_home = served.home().is_some();
        served.keeping = Some(Keeping {
            keep,
            step: match (is_snapshot, has_home) {
                (true, true) => KeepStep::Tiers,
                (true, false) => KeepStep::Destage,
                (false, _) => KeepStep::Asked,
            },
            given_up: None,
            answer,
        });
        if is_snapshot {
            if !has_home {
                self.step(slot, Event::DestageAll);
            }
            self.go_on_keeping(slot);
        } else {
            self.ask_to_keep(slot, keep);
        }
    }

    fn ask_to_keep(&mut self, slot: u32, keep: Keep) {
        let ask = Ask::Keep(keep);
        let token = KEEP_TOKEN;
        self.ask_backend(slot, Operation { token, ask });
        self.perform(slot);
    }

    /// Ask the backend once it has everything. What one with atomic flushes keeps is the state of its
    /// last one: that of destage, so nothing of what came since is in it by halves. Another one gets
    /// nothing else meanwhile.
    pub fn go_on_keeping(&mut self, slot: u32) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        served.note_destaged(self.now);
        let is_atomic = served.backend.capabilities().atomic_flush;
        let is_drained = is_atomic || served.backend.under_way() == 0;
        let home = served.home();
        let Some(keeping) = &mut served.keeping else {
            return;
        };
        if let Some(home) = home {
            return self.go_on_at_home(slot, home);
        }
        if keeping.step == KeepStep::Drain && is_drained {
            keeping.step = KeepStep::Asked;
            let keep = keeping.keep;
            self.ask_to_keep(slot, keep);
            // What only reads need not wait for the answer.
            self.release_held(slot);
        }
    }

    /// The same in storage mode.
    fn go_on_at_home(&mut self, slot: u32, home: Status) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let (under_way, tiering) = (served.backend.under_way(), served.tiering);
        let Some(keeping) = &mut served.keeping else {
            return;
        };
        match keeping.step {
            KeepStep::Tiers => {
                let is_over = home.tier == TierState::Idle && home.tier_rests;
                if is_over && tiering.is_none_or(|tiering| !tiering.asked) {
                    keeping.step = KeepStep::Destage;
                    self.step(slot, Event::DestageAll);
                }
            }
            KeepStep::Drain if under_way == 0 => {
                keeping.step = KeepStep::Flush;
                let (token, ask) = (KEEP_TOKEN, Ask::Flush);
                let mut port = Port {
                    ring: &mut self.ring,
                    owner: Owner::Backend(slot),
                    done: &mut self.completions,
                };
                // Whatever else is asked is held back.
                let operation = Operation { token, ask };
                served.backend.submit(self.now, operation, &mut port);
                self.perform(slot);
            }
            KeepStep::Tier => match home.tier {
                TierState::Waiting => {}
                TierState::Copying | TierState::Finishing => self.release_held(slot),
                TierState::Held => {
                    keeping.step = KeepStep::Asked;
                    let keep = keeping.keep;
                    self.ask_to_keep(slot, keep);
                    self.release_held(slot);
                }
                // It failed, and the next one would be of another moment.
                TierState::Idle | TierState::Pausing => {
                    let why = match (home.failed, home.tier_trouble) {
                        (Some(error), _) => KeepFailure::HomeFailed(error),
                        (None, trouble) => {
                            KeepFailure::Untiered(trouble.unwrap_or(IoError::Failed))
                        }
                    };
                    self.give_up_keeping(slot, why);
                }
            },
            _ => {}
        }
    }

    /// Ask the backend again for what was held back.
    fn release_held(&mut self, slot: u32) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        if served.held.is_empty() {
            return;
        }
        for operation in std::mem::take(&mut served.held) {
            self.ask_backend(slot, operation);
        }
        self.perform(slot);
    }

    /// A snapshot is not wanted any more. Once the backend was asked, only a copy can be given up.
    pub(super) fn give_up_keeping(&mut self, slot: u32, why: KeepFailure) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        if let Some(copying) = served.backend.copying() {
            copying.cancel();
        }
        let Some(keeping) = &mut served.keeping else {
            return;
        };
        let step = keeping.step;
        match step {
            KeepStep::Tiers | KeepStep::Destage | KeepStep::Drain | KeepStep::Tier => {
                if let Some(keeping) = served.keeping.take() {
                    tell(keeping.answer, Err(why));
                }
                if step == KeepStep::Tier {
                    self.ask_home(slot, Tiers::Cancel);
                }
                self.release_held(slot);
            }
            KeepStep::Flush | KeepStep::Asked | KeepStep::Copying => {
                keeping.given_up = Some(why);
            }
        }
    }

    /// The home has flushed what is to be tiered out, or not.
    fn home_flushed(&mut self, slot: u32, result: Result<Done, IoError>) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        if let Some(keeping) = &mut served.keeping
            && keeping.given_up.is_none()
            && result.is_ok()
        {
            keeping.step = KeepStep::Tier;
            self.ask_home(slot, Tiers::BeginAndHold);
            return self.go_on_keeping(slot);
        }
        if let Some(keeping) = served.keeping.take() {
            let failed = result.err().map(KeepFailure::HomeFailed);
            let why = keeping.given_up.or(failed);
            tell(keeping.answer, Err(why.unwrap_or(KeepFailure::Cancelled)));
        }
        self.release_held(slot);
    }

    /// The backend has done it, or not.
    pub(super) fn backend_kept(&mut self, slot: u32, result: Result<Done, IoError>) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let copies = served.backend.copying().is_some();
        let has_home = served.home().is_some();
        let Some(keeping) = &mut served.keeping else {
            return;
        };
        if keeping.step == KeepStep::Flush {
            return self.home_flushed(slot, result);
        }
        let is_snapshot = matches!(keeping.keep, Keep::Snapshot { .. });
        if keeping.step == KeepStep::Asked && matches!(result, Ok(Done::Written)) && copies {
            keeping.step = KeepStep::Copying;
            if keeping.given_up.is_some()
                && let Some(copying) = served.backend.copying()
            {
                copying.cancel();
            }
            if has_home {
                self.ask_home(slot, Tiers::Release);
            }
            self.release_held(slot);
            return self.ask_to_keep(slot, Keep::Complete);
        }
        if let Some(keeping) = served.keeping.take() {
            let result = match (result, keeping.given_up) {
                (Ok(Done::Refused(why)), _) => Err(why.into()),
                (Ok(_), _) => Ok(()),
                (Err(_), Some(why)) => Err(why),
                (Err(error), None) => Err(error.into()),
            };
            tell(keeping.answer, result);
        }
        if has_home && is_snapshot {
            self.ask_home(slot, Tiers::Release);
        }
        self.release_held(slot);
    }
}
