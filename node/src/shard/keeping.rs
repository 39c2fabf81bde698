//! Snapshots on a shard's thread: everything that was acknowledged is destaged, then the backend keeps
//! that, while clients go on.
//!
//! ```text
//!  Destage ─► Drain ─► Asked ─► (Copying) ─► answered
//!     │         │                   │
//!     └─────────┴── given up ───────┘
//! ```
//!
//! Invariants:
//! 1. What is kept is an exact prefix of what was written through the log. The generation that ends a
//!    destage of everything leaves nothing out and takes nothing from behind it; and nothing of the next
//!    one reaches a backend that would show it before the state is kept ([`Served::holds`]).
//! 2. Reads wait only until the backend was asked, writes until it has answered, and nothing for a copy.
//! 3. A snapshot that was given up before the backend was asked has done nothing.
//!
//! [`Served::holds`]: super::served::Served::holds

use hdcs_core::error::IoError;
use hdcs_core::io::Done;
use hdcs_core::volume::Event;

use super::command::{Answer, KeepFailure};
use super::control::{NOT_OPEN, tell};
use super::served::{KeepStep, Keeping};
use super::turn::KEEP_TOKEN;
use super::works::Works;
use crate::backends::{Ask, Keep, Operation};
use crate::frontends::VolumeNumber;

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
        let keeping = slot.and_then(|slot| self.volumes.get(slot)?.keeping.as_ref());
        if keeping.is_some_and(|keeping| keeping.step == KeepStep::Destage) {
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
        served.keeping = Some(Keeping {
            keep,
            step: if is_snapshot {
                KeepStep::Destage
            } else {
                KeepStep::Asked
            },
            given_up: None,
            answer,
        });
        if is_snapshot {
            self.step(slot, Event::DestageAll);
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
        let Some(keeping) = &mut served.keeping else {
            return;
        };
        if keeping.step == KeepStep::Drain && is_drained {
            keeping.step = KeepStep::Asked;
            let keep = keeping.keep;
            self.ask_to_keep(slot, keep);
            // What only reads need not wait for the answer.
            self.release_held(slot);
        }
    }

    /// Ask the backend again for what was held back.
    fn release_held(&mut self, slot: u32) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
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
        match keeping.step {
            KeepStep::Destage | KeepStep::Drain => {
                if let Some(keeping) = served.keeping.take() {
                    tell(keeping.answer, Err(why));
                }
                self.release_held(slot);
            }
            KeepStep::Asked | KeepStep::Copying => keeping.given_up = Some(why),
        }
    }

    /// The backend has done it, or not.
    pub(super) fn backend_kept(&mut self, slot: u32, result: Result<Done, IoError>) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let copies = served.backend.copying().is_some();
        let Some(keeping) = &mut served.keeping else {
            return;
        };
        if keeping.step == KeepStep::Asked && matches!(result, Ok(Done::Written)) && copies {
            keeping.step = KeepStep::Copying;
            if keeping.given_up.is_some()
                && let Some(copying) = served.backend.copying()
            {
                copying.cancel();
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
        self.release_held(slot);
    }
}
