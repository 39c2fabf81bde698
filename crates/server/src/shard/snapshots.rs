//! Snapshots: performs what [`SnapshotOperation`] decides.

use hdcs_backend::home::Tiers;
use hdcs_backend::{Ask, Operation, SnapshotCommand};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, Nanos};
use hdcs_core::node::snapshot::{Act, Ending, SnapshotOperation, TierEnd, View};
use hdcs_core::volume::Event;
use hdcs_frontend::VolumeNumber;

use super::command::{Answer, SnapshotFailure};
use super::control::{NOT_OPEN, tell};
use super::served::Served;
use super::state::ShardState;
use super::turn::SNAPSHOT_TOKEN;

/// A snapshot that is being made, or whatever else the backend does with its snapshots.
#[derive(Debug)]
pub struct Snapshotting {
    /// Where it is.
    pub operation: SnapshotOperation,
    command: SnapshotCommand,
    /// Why it is not wanted any more.
    given_up: Option<SnapshotFailure>,
    answer: Answer<(), SnapshotFailure>,
}

impl Snapshotting {
    /// It ends, since its volume was closed.
    pub fn closed(self) {
        tell(self.answer, Err(SnapshotFailure::Now(NOT_OPEN)));
    }
}

impl Served {
    fn snapshot_view(&self, now: Nanos) -> View {
        let local = self.home();
        let has_failed = local.is_some_and(|local| local.failed.is_some());
        View {
            destage_left_bytes: self.volume.stats(now).destage_all_remaining_bytes,
            under_way: self.backend.under_way(),
            local,
            is_tiering_out: self.tier_out.is_some_and(|one| one.is_asked()) && !has_failed,
        }
    }
}

impl ShardState {
    /// Make a snapshot, or remove one.
    pub(super) fn begin_snapshot(
        &mut self,
        number: VolumeNumber,
        command: SnapshotCommand,
        answer: Answer<(), SnapshotFailure>,
    ) {
        let slot = match self.check_snapshot(number) {
            Ok(slot) => slot,
            Err(failure) => return tell(answer, Err(failure)),
        };
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let operation = if matches!(command, SnapshotCommand::Snapshot { .. }) {
            match served.home() {
                Some(_) => SnapshotOperation::make_local(),
                None => SnapshotOperation::make(served.backend.capabilities().atomic_flush),
            }
        } else {
            SnapshotOperation::other()
        };
        served.snapshotting = Some(Snapshotting {
            operation,
            command,
            given_up: None,
            answer,
        });
        self.settle_later(slot);
        self.go_on_snapshotting(slot);
    }

    /// Whether the backend of a volume may be asked to make or remove a snapshot; the volume's slot.
    fn check_snapshot(&self, number: VolumeNumber) -> Result<u32, SnapshotFailure> {
        let Ok(slot) = self.open_slot(number) else {
            return Err(SnapshotFailure::Now(NOT_OPEN));
        };
        match self.volumes.get(slot) {
            None => Err(SnapshotFailure::Now(NOT_OPEN)),
            Some(served) if !served.backend.capabilities().snapshots => {
                Err(SnapshotFailure::Incapable)
            }
            Some(served) if served.resizing.is_some() || served.snapshotting.is_some() => Err(
                SnapshotFailure::Now("another snapshot or a resize is under way; wait for its end"),
            ),
            Some(_) => Ok(slot),
        }
    }

    /// The snapshot that is being made is not wanted any more.
    pub(super) fn cancel_snapshot(&mut self, number: VolumeNumber) {
        if let Ok(slot) = self.open_slot(number) {
            self.give_up_snapshot(slot, SnapshotFailure::Cancelled);
        }
    }

    /// A flush is cancelled, and with it a snapshot that has not come further than that.
    pub(super) fn cancel_flush_of_snapshot(&mut self, number: VolumeNumber) {
        let slot = self.open_slot(number).ok();
        let served = slot.and_then(|slot| self.volumes.get(slot));
        let snapshotting = served.and_then(|served| served.snapshotting.as_ref());
        if snapshotting.is_some_and(|one| one.operation.is_flushing()) {
            self.cancel_snapshot(number);
        }
    }

    /// A snapshot is not wanted any more.
    pub(super) fn give_up_snapshot(&mut self, slot: u32, why: SnapshotFailure) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        if let Some(copying) = served.backend.copying() {
            copying.cancel();
        }
        if let Some(snapshotting) = &mut served.snapshotting {
            snapshotting.given_up = Some(why);
            let act = snapshotting.operation.give_up();
            self.perform_snapshot(slot, act, None);
        }
    }

    /// The next steps of a volume's snapshot.
    pub fn go_on_snapshotting(&mut self, slot: u32) {
        loop {
            let Some(served) = self.volumes.get_mut(slot) else {
                return;
            };
            let view = served.snapshot_view(self.now);
            let Some(snapshotting) = &mut served.snapshotting else {
                return;
            };
            let act = snapshotting.operation.go_on(&view);
            if act.is_none() {
                return;
            }
            self.perform_snapshot(slot, act, None);
        }
    }

    /// The backend has done what it was asked for, or the local store has flushed; or not.
    pub(super) fn snapshot_answered(&mut self, slot: u32, result: Result<Done, IoError>) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let copies = matches!(result, Ok(Done::Written)) && served.backend.copying().is_some();
        let Some(snapshotting) = &mut served.snapshotting else {
            return;
        };
        let operation = &mut snapshotting.operation;
        if operation.awaits_flush() {
            let act = operation.flushed(result.map(drop));
            self.perform_snapshot(slot, Some(act), None);
            return self.go_on_snapshotting(slot);
        }
        let act = operation.answered(copies);
        self.perform_snapshot(slot, Some(act), Some(result));
    }

    fn perform_snapshot(
        &mut self,
        slot: u32,
        act: Option<Act>,
        answered: Option<Result<Done, IoError>>,
    ) {
        match act {
            None => {}
            Some(Act::DestageAll) => self.step(slot, Event::DestageAll),
            Some(Act::Flush) => self.ask_for_snapshot(slot, Ask::Flush),
            Some(Act::TierAndHold) => self.ask_home(slot, Tiers::BeginAndHold),
            Some(Act::Ask) => {
                let served = self.volumes.get(slot);
                let snapshotting = served.and_then(|served| served.snapshotting.as_ref());
                if let Some(Snapshotting { command, .. }) = snapshotting {
                    self.ask_for_snapshot(slot, Ask::Snapshot(*command));
                }
            }
            Some(Act::ReleaseHeld) => self.release_held(slot),
            Some(Act::Copy {
                is_given_up,
                releases_tier,
            }) => {
                let served = self.volumes.get(slot);
                let copying = served.and_then(|served| served.backend.copying());
                if let (true, Some(copying)) = (is_given_up, copying) {
                    copying.cancel();
                }
                if releases_tier {
                    self.ask_home(slot, Tiers::Release);
                }
                self.release_held(slot);
                self.ask_for_snapshot(slot, Ask::Snapshot(SnapshotCommand::Complete));
            }
            Some(Act::End(ending, tier)) => self.end_snapshot(slot, ending, tier, answered),
        }
    }

    /// Ask the backend for what is not held back.
    fn ask_for_snapshot(&mut self, slot: u32, ask: Ask) {
        let now = self.now;
        let Some((served, mut port)) = self.backend_of(slot) else {
            return;
        };
        let token = SNAPSHOT_TOKEN;
        let operation = Operation { token, ask };
        served.backend.submit(now, operation, &mut port);
        self.perform(slot);
    }

    fn end_snapshot(
        &mut self,
        slot: u32,
        ending: Ending,
        tier: TierEnd,
        answered: Option<Result<Done, IoError>>,
    ) {
        let served = self.volumes.get_mut(slot);
        let Some(ended) = served.and_then(|served| served.snapshotting.take()) else {
            return;
        };
        let given_up = ended.given_up;
        let result = match (ending, answered) {
            (Ending::LocalFailed(error), _) => Err(SnapshotFailure::LocalStoreFailed(error)),
            (Ending::NotTiered(error), _) => Err(SnapshotFailure::Untiered(error)),
            (Ending::GivenUp, _) | (Ending::Answered, None) => {
                Err(given_up.unwrap_or(SnapshotFailure::Cancelled))
            }
            (Ending::Answered, Some(Ok(Done::Refused(why)))) => Err(why.into()),
            (Ending::Answered, Some(Ok(_))) => Ok(()),
            (Ending::Answered, Some(Err(error))) => Err(given_up.unwrap_or(error.into())),
        };
        tell(ended.answer, result);
        match tier {
            TierEnd::Nothing => {}
            TierEnd::Cancel => self.ask_home(slot, Tiers::Cancel),
            TierEnd::Release => self.ask_home(slot, Tiers::Release),
        }
        self.release_held(slot);
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
}
