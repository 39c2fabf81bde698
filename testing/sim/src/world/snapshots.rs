//! Snapshots while clients, destage and faults go on, as [`SnapshotOperation`] decides them: what is asked of the backend
//! meanwhile is held back if that says so. An atomic backend keeps what its last flush has made durable, another one what
//! it shows. Below a volume in storage mode that is its local store's backend, which gets nothing until it has kept what a
//! tier has left there; an object volume keeps its own ([`super::bucket_snapshots`]).
//!
//! Volumes over atomic backends also become smaller while their clients hold back.

use hdcs_core::cache::Barrier;
use hdcs_core::local::{Ask as StoreAsk, Event as StoreEvent};
use hdcs_core::node::snapshot::{Act, Ending, SnapshotOperation, TierEnd, View};

use super::bucket_snapshots::Command;
use super::local::SimulatedStore;
use super::stack::KEEP;
use super::{
    Action, BLOCK_SECTORS, BlockKey, Content, Coverage, Happening, IoError, Nanos, Node, Owner,
    Phase, Plant, Token, Unit, Violation, World, check_backend,
};
use crate::check_snapshot::Snapshot;

/// Snapshots of a volume that are kept and compared: the newest ones.
const SNAPSHOTS_MAX: usize = 4;
/// A volume is not made smaller than that, in sectors.
const SECTORS_MIN: u64 = 64;

/// A volume is to become smaller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shrink {
    /// So many sectors.
    to: u64,
    /// What the cache has to have made durable first, once it was told.
    forgotten: Option<Barrier>,
}

/// A snapshot that is being made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Snapshotting {
    operation: SnapshotOperation,
    /// What an object volume is asked.
    command: Option<Command>,
    /// It has to hold what was acknowledged before.
    asked: u64,
    /// Whether the backend has taken it.
    is_taken: bool,
}

impl Snapshotting {
    /// Whether it waits for the end of a tier-out that somebody else has asked for.
    pub(super) fn awaits_tier_out(&self) -> bool {
        self.operation.awaits_tier_out()
    }
}

impl Unit {
    /// Once a `DestageAll` is done, what was acknowledged before it is durable in the backend.
    pub(super) fn notice_destaged(&mut self, remaining: u64) -> Result<(), Violation> {
        let Some(asked) = self.destage_all else {
            return Ok(());
        };
        if remaining > 0 {
            return Ok(());
        }
        self.destage_all = None;
        let backend = &self.backend;
        check_backend::check_complete(&self.history, asked, |sector| backend.durable(sector))?;
        self.history.settle_before(asked);
        Ok(())
    }

    /// The backend has taken a snapshot that was asked for at `asked`.
    fn keep_snapshot(
        &mut self,
        asked: u64,
        contents: Vec<Content>,
        coverage: &mut Coverage,
    ) -> Result<(), Violation> {
        let snapshot = Snapshot::take(&self.history, asked, contents)?;
        if self.snapshots.len() == SNAPSHOTS_MAX {
            self.snapshots.remove(0);
        }
        self.snapshots.push(snapshot);
        coverage.snapshots += 1;
        coverage.snapshots_of_files += u64::from(!self.config.backend_atomic);
        coverage.snapshots_of_stores += u64::from(self.local.is_some());
        coverage.snapshots_of_objects += u64::from(self.objects.is_some());
        Ok(())
    }
}

impl World {
    /// Somebody asks for a snapshot, or for a smaller volume.
    pub(super) fn snapshot_or_shrink(&mut self, unit: usize) -> Result<(), Violation> {
        let state = &self.units[unit];
        let is_free = self.phase(unit) == Some(Phase::Open) && state.resizing.is_none();
        if !is_free {
            return Ok(());
        }
        let shrinks = state.config.backend_atomic && !state.is_stacked();
        if shrinks && self.random.u8(..3) == 0 {
            // Or gives that up.
            let sectors = self.units[unit].history.sectors();
            let wanted = self.units[unit].shrink.is_none() && sectors > SECTORS_MIN;
            self.units[unit].shrink = wanted.then(|| Shrink {
                to: self.random.u64(SECTORS_MIN.max(sectors / 2)..sectors),
                forgotten: None,
            });
            return Ok(());
        }
        if self.units[unit].snapshotting.is_some() {
            if self.random.u8(..16) == 0 {
                return self.give_up_snapshot(unit);
            }
            return Ok(());
        }
        let is_to_forget = self.units[unit].objects.is_some() && self.random.u8(..4) == 0;
        self.begin_snapshot(unit, is_to_forget)
    }

    /// Ask for a snapshot, or to forget one of an object volume.
    pub fn begin_snapshot(&mut self, unit: usize, is_to_forget: bool) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let command = state
            .objects
            .as_mut()
            .map(|objects| objects.snapshots.next(is_to_forget));
        if let (Some(objects), true) = (&mut state.objects, self.planted.is(Plant::SweptSnapshot)) {
            objects.sweep()?;
        }
        let operation = match command {
            Some(Command::Forget(_)) => SnapshotOperation::other(),
            _ if state.local.is_some() => SnapshotOperation::make_local(),
            _ => SnapshotOperation::make(state.config.backend_atomic),
        };
        state.snapshotting = Some(Snapshotting {
            operation,
            command,
            asked: 0,
            is_taken: false,
        });
        self.go_on_snapshotting(unit)
    }

    /// Whether a snapshot of a volume is being made.
    pub fn is_snapshotting(&self, unit: usize) -> bool {
        self.units[unit].snapshotting.is_some()
    }

    /// It is not wanted any more.
    pub(super) fn give_up_snapshot(&mut self, unit: usize) -> Result<(), Violation> {
        let Some(Snapshotting { operation, .. }) = &mut self.units[unit].snapshotting else {
            return Ok(());
        };
        match operation.give_up() {
            Some(act) => self.perform_snapshot(unit, act),
            None => Ok(()),
        }
    }

    /// A flush is cancelled, and with it a snapshot that has not come further than that.
    pub(super) fn cancel_flush_of_snapshot(&mut self, unit: usize) -> Result<(), Violation> {
        let snapshotting = self.units[unit].snapshotting.as_ref();
        if snapshotting.is_some_and(|one| one.operation.is_flushing()) {
            return self.give_up_snapshot(unit);
        }
        Ok(())
    }

    fn snapshot_view(&self, unit: usize) -> Option<View> {
        let volume = self.volume(unit)?;
        let asked = self.in_flight.values();
        let state = &self.units[unit];
        Some(View {
            destage_left_bytes: volume.stats(self.engine.now()).destage_all_remaining_bytes,
            under_way: asked.filter(|one| one.io.backend() == Some(unit)).count(),
            local: state.local.as_ref().map(SimulatedStore::status),
            is_tiering_out: state.tier_out.is_some_and(|one| one.is_asked()),
        })
    }

    /// Take the next steps of what is under way.
    pub(super) fn go_on_snapshotting(&mut self, unit: usize) -> Result<(), Violation> {
        while let Some(view) = self.snapshot_view(unit)
            && let Some(Snapshotting { operation, .. }) = &mut self.units[unit].snapshotting
            && let Some(act) = operation.go_on(&view)
        {
            self.perform_snapshot(unit, act)?;
        }
        Ok(())
    }

    fn perform_snapshot(&mut self, unit: usize, act: Act) -> Result<(), Violation> {
        match act {
            Act::DestageAll => {
                self.destage_all(unit)?;
                let hasty = self.planted.strikes(Plant::HastySnapshot);
                let state = &mut self.units[unit];
                if let (Some(one), Some(asked)) = (&mut state.snapshotting, state.destage_all) {
                    one.asked = asked;
                    if hasty {
                        one.operation.note_destaged(0);
                    }
                }
                Ok(())
            }
            Act::Flush => self.submit(unit, KEEP, StoreAsk::Flush),
            Act::TierAndHold if self.planted.is(Plant::UntieredSnapshot) => {
                let asked = self.units[unit].snapshotting.map_or(0, |one| one.asked);
                self.take_snapshot(unit, asked)
            }
            Act::TierAndHold => self.step_store(unit, StoreEvent::TierAndHold),
            Act::Ask => self.ask_for_snapshot(unit),
            Act::ReleaseHeld => self.release_held(unit),
            Act::End(ending, tier) => {
                let ended = self.units[unit].snapshotting.take();
                let is_taken = ended.is_some_and(|one| one.is_taken);
                self.coverage.snapshots_given_up += u64::from(ending == Ending::GivenUp);
                self.engine
                    .note("snapshot ends", [unit as u64, u64::from(is_taken), 0, 0]);
                match tier {
                    TierEnd::Nothing => {}
                    TierEnd::Cancel => self.step_store(unit, StoreEvent::CancelTier)?,
                    TierEnd::Release => self.step_store(unit, StoreEvent::Release)?,
                }
                self.release_held(unit)
            }
            Act::Copy { .. } => unreachable!("no backend here copies"),
        }
    }

    /// Ask the backend: an object volume at once, and another one takes some time.
    fn ask_for_snapshot(&mut self, unit: usize) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let Some(Snapshotting { asked, command, .. }) = state.snapshotting else {
            return Ok(());
        };
        if let Some(local) = &mut state.local {
            local.begin_keeping()?;
        }
        if let (Some(objects), Some(command)) = (&mut state.objects, command) {
            let ask = objects.snapshots.begin(command);
            return self.submit_to_objects(unit, Token(KEEP), ask);
        }
        let is_let_go = state.local.is_some() && self.planted.is(Plant::UnheldSnapshot);
        let longest = self.random.choice([5000, 200_000]).unwrap_or(5000);
        let pause = Nanos::from_micros(self.random.u64(1..longest));
        let taken = Happening::Snapshot(unit, asked);
        self.engine.at(self.engine.now().plus(pause), taken);
        if is_let_go {
            self.step_store(unit, StoreEvent::Release)?;
            self.step_store(unit, StoreEvent::Tier)?;
        }
        Ok(())
    }

    /// Ask the backend for what was held back.
    fn release_held(&mut self, unit: usize) -> Result<(), Violation> {
        for action in std::mem::take(&mut self.units[unit].held) {
            if self.holds(unit, &action) {
                self.units[unit].held.push(action);
            } else {
                self.perform_now(Owner::Volume(unit), action)?;
            }
        }
        Ok(())
    }

    /// Whether what a volume asks of its backend waits for a snapshot.
    pub(super) fn snapshot_holds(&mut self, unit: usize, action: &Action) -> bool {
        let left = self
            .volume(unit)
            .map(|volume| volume.stats(self.engine.now()).destage_all_remaining_bytes);
        let state = &mut self.units[unit];
        let local = state.local.as_ref().map(SimulatedStore::status);
        let (Some(left), Some(one)) = (left, &mut state.snapshotting) else {
            return false;
        };
        one.operation.note_destaged(left);
        let changes = !matches!(
            action,
            Action::BackendRead { .. } | Action::BackendExtents { .. }
        );
        let holds = one.operation.holds(changes, local.as_ref());
        if holds && self.planted.is(Plant::LeakySnapshot) {
            return false;
        }
        self.coverage.held_for_snapshots += u64::from(holds);
        holds
    }

    /// The backend takes it, or cannot.
    pub(super) fn take_snapshot(&mut self, unit: usize, asked: u64) -> Result<(), Violation> {
        let is_open = self.phase(unit) == Some(Phase::Open);
        let is_untiered = self.planted.is(Plant::UntieredSnapshot);
        let state = &mut self.units[unit];
        let awaited = state.snapshotting.filter(|one| {
            let is_asked = !one.operation.is_before_backend() || is_untiered;
            one.asked == asked && is_asked && !one.is_taken
        });
        if awaited.is_none() {
            return Ok(());
        }
        if state.backend_silent > self.engine.now() {
            let again = state.backend_silent;
            self.engine.at(again, Happening::Snapshot(unit, asked));
            return Ok(());
        }
        let kept = state.local.as_mut().map(SimulatedStore::end_keeping);
        let kept = kept.transpose()?;
        let is_away = state.backend_down.is_some() || state.fence.is_up();
        if !is_open || is_away || state.log_rotten {
            return self.snapshot_answered(unit, false);
        }
        let loose = self.planted.is(Plant::LooseSnapshot);
        if loose && self.calm_since.is_none() && !state.backend.has_staged() {
            // It has its moments.
            let again = self.engine.now().plus(Nanos::from_micros(500));
            self.engine.at(again, Happening::Snapshot(unit, asked));
            return Ok(());
        }
        let backend = &state.backend;
        let is_atomic = state.config.backend_atomic;
        let holds = |sector| {
            if loose || !is_atomic {
                backend.visible(sector)
            } else {
                backend.durable(sector)
            }
        };
        let mut contents = kept.unwrap_or_else(|| (0..backend.sectors()).map(holds).collect());
        // A change of size that was cut short may have left more there.
        contents.truncate(state.history.sectors() as usize);
        state.keep_snapshot(asked, contents, &mut self.coverage)?;
        self.engine.note("snapshot", [unit as u64, asked, 0, 0]);
        self.snapshot_answered(unit, true)
    }

    /// What lies below a volume has done what a snapshot asks of it, or has not.
    pub(super) fn stack_kept(
        &mut self,
        unit: usize,
        result: Result<(), IoError>,
    ) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let Some(one) = &mut state.snapshotting else {
            return Ok(());
        };
        if one.operation.awaits_flush() {
            let act = one.operation.flushed(result);
            return self.perform_snapshot(unit, act);
        }
        let (Some(command), asked, is_done) = (one.command, one.asked, result.is_ok()) else {
            return Ok(());
        };
        let is_rotten = state.log_rotten;
        if let (Some(objects), true) = (&mut state.objects, is_done) {
            match objects.snapshot_ended(command)? {
                Some(mut contents) if !is_rotten => {
                    contents.truncate(state.history.sectors() as usize);
                    state.keep_snapshot(asked, contents, &mut self.coverage)?;
                }
                Some(_) => {}
                None => self.coverage.snapshots_forgotten += 1,
            }
        }
        self.engine
            .note("bucket kept", [unit as u64, asked, u64::from(is_done), 0]);
        self.snapshot_answered(unit, is_done)
    }

    fn snapshot_answered(&mut self, unit: usize, is_taken: bool) -> Result<(), Violation> {
        let Some(one) = &mut self.units[unit].snapshotting else {
            return Ok(());
        };
        one.is_taken = is_taken;
        let act = one.operation.answered(false);
        self.perform_snapshot(unit, act)
    }

    /// Check every snapshot against what has become known.
    pub fn check_snapshots(&self) -> Result<(), Violation> {
        for unit in &self.units {
            for snapshot in &unit.snapshots {
                snapshot.check(&unit.history)?;
            }
        }
        Ok(())
    }

    /// Whether a client holds back because its volume is about to become smaller. It does so once
    /// nothing is dirty or under way, and the cache has forgotten for good what is cut off.
    pub(super) fn shrinks(&mut self, unit: usize) -> Result<bool, Violation> {
        let Some(Shrink { to, forgotten }) = self.units[unit].shrink else {
            return Ok(false);
        };
        let asked = (self.in_flight.values()).any(|one| one.io.backend() == Some(unit));
        // What went past the log is flushed by what destages everything.
        let is_staged = self.units[unit].backend.has_staged();
        let at_rest = self.volume(unit).is_some_and(|volume| {
            !is_staged
                && volume.backend_is_flushed()
                && volume.stats(self.engine.now()).log_used_blocks == 0
        });
        let state = &mut self.units[unit];
        let is_idle = state.requests.is_empty();
        let sectors = state.history.sectors();
        let persisted = self.node.as_ref().map(|node| node.cache().persisted());
        if is_idle && at_rest && !asked && to < sectors {
            if forgotten.is_some_and(|barrier| Some(barrier) <= persisted) {
                state.shrink = None;
                self.coverage.shrinks += 1;
                self.resize(unit, to)?;
                return Ok(false);
            }
            if let (None, Some(node)) = (forgotten, &mut self.node) {
                let barrier = node.forget_beyond(unit, state.config.number, sectors, to);
                let forgotten = Some(barrier);
                state.shrink = Some(Shrink { to, forgotten });
            }
        }
        let state = &mut self.units[unit];
        state.client_waits = false;
        let again = self.engine.now().plus(Nanos::from_millis(1));
        self.engine.at(again, Happening::Client(unit));
        if is_idle && !at_rest && state.destage_all.is_none() {
            self.destage_all(unit)?;
        }
        Ok(true)
    }
}

impl Node {
    /// Have the cache forget what lies beyond a new end of a volume; what it will have forgotten then shows in a barrier.
    fn forget_beyond(&mut self, unit: usize, number: u32, before: u64, sectors: u64) -> Barrier {
        let first = sectors / BLOCK_SECTORS;
        let blocks = before.div_ceil(BLOCK_SECTORS) - first;
        let cache = self.cache_of(unit);
        cache.invalidate(BlockKey::new(number, first), blocks);
        cache.barrier()
    }
}
