//! Snapshots while clients, destage and faults go on, as [`SnapshotOperation`] decides them: what is asked of the backend
//! meanwhile is held back if that says so. An atomic backend keeps what its last flush has made durable, another one what
//! it shows.
//!
//! Volumes over atomic backends also become smaller while their clients hold back.

use hdcs_core::cache::Barrier;
use hdcs_core::node::snapshot::{Act, Ending, SnapshotOperation, View};

use super::{
    Action, BLOCK_SECTORS, BlockKey, Happening, Nanos, Node, Owner, Phase, Plant, Violation, World,
    check_backend,
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
    /// It has to hold what was acknowledged before.
    asked: u64,
    /// Whether the backend has taken it.
    is_taken: bool,
}

impl World {
    /// Once a `DestageAll` is done, what was acknowledged before it is durable in the backend.
    pub(super) fn notice_destaged(&mut self, unit: usize, remaining: u64) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let Some(asked) = state.destage_all else {
            return Ok(());
        };
        if remaining > 0 {
            return Ok(());
        }
        state.destage_all = None;
        let backend = &state.backend;
        check_backend::check_complete(&state.history, asked, |sector| backend.durable(sector))?;
        state.history.settle_before(asked);
        Ok(())
    }

    /// Somebody asks for a snapshot, or for a smaller volume.
    pub(super) fn snapshot_or_shrink(&mut self, unit: usize) -> Result<(), Violation> {
        let state = &self.units[unit];
        let is_free = self.phase(unit) == Some(Phase::Open) && state.resizing.is_none();
        if !is_free || state.is_stacked() {
            return Ok(());
        }
        if state.config.backend_atomic && self.random.u8(..3) == 0 {
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
        let is_atomic = self.units[unit].config.backend_atomic;
        self.units[unit].snapshotting = Some(Snapshotting {
            operation: SnapshotOperation::make(is_atomic),
            asked: 0,
            is_taken: false,
        });
        self.go_on_snapshotting(unit)
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
        Some(View {
            destage_left_bytes: volume.stats(self.engine.now()).destage_all_remaining_bytes,
            under_way: asked.filter(|one| one.io.backend() == Some(unit)).count(),
            ..View::default()
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
            Act::Ask => {
                if let Some(Snapshotting { asked, .. }) = self.units[unit].snapshotting {
                    let longest = self.random.choice([5000, 200_000]).unwrap_or(5000);
                    let pause = Nanos::from_micros(self.random.u64(1..longest));
                    let taken = Happening::Snapshot(unit, asked);
                    self.engine.at(self.engine.now().plus(pause), taken);
                }
                Ok(())
            }
            Act::ReleaseHeld => self.release_held(unit),
            Act::End(ending, _) => {
                let ended = self.units[unit].snapshotting.take();
                let is_taken = ended.is_some_and(|one| one.is_taken);
                self.coverage.snapshots_given_up += u64::from(ending == Ending::GivenUp);
                self.engine
                    .note("snapshot ends", [unit as u64, u64::from(is_taken), 0, 0]);
                self.release_held(unit)
            }
            Act::Flush | Act::TierAndHold | Act::Copy { .. } => {
                unreachable!("only a local store flushes and tiers, and no backend here copies")
            }
        }
    }

    /// Ask the backend for what was held back.
    fn release_held(&mut self, unit: usize) -> Result<(), Violation> {
        let held = std::mem::take(&mut self.units[unit].held);
        held.into_iter()
            .try_for_each(|action| self.perform_or_hold(unit, action))
    }

    fn perform_or_hold(&mut self, unit: usize, action: Action) -> Result<(), Violation> {
        if self.holds(unit, &action) {
            self.units[unit].held.push(action);
            return Ok(());
        }
        self.perform_now(Owner::Volume(unit), action)
    }

    /// Whether what a volume asks of its backend waits for a snapshot.
    pub(super) fn snapshot_holds(&mut self, unit: usize, action: &Action) -> bool {
        let left = self
            .volume(unit)
            .map(|volume| volume.stats(self.engine.now()).destage_all_remaining_bytes);
        let (Some(left), Some(one)) = (left, &mut self.units[unit].snapshotting) else {
            return false;
        };
        one.operation.note_destaged(left);
        let changes = !matches!(
            action,
            Action::BackendRead { .. } | Action::BackendExtents { .. }
        );
        let holds = one.operation.holds(changes, None);
        if holds && self.planted.is(Plant::LeakySnapshot) {
            return false;
        }
        self.coverage.held_for_snapshots += u64::from(holds);
        holds
    }

    /// The backend takes it, or cannot.
    pub(super) fn take_snapshot(&mut self, unit: usize, asked: u64) -> Result<(), Violation> {
        let is_open = self.phase(unit) == Some(Phase::Open);
        let state = &mut self.units[unit];
        let awaited = state.snapshotting.filter(|one| {
            one.asked == asked && !one.operation.is_before_backend() && !one.is_taken
        });
        if awaited.is_none() {
            return Ok(());
        }
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
        // A change of size that was cut short may have left more there.
        let sectors = backend.sectors().min(state.history.sectors());
        let contents = (0..sectors).map(holds).collect();
        let snapshot = Snapshot::take(&state.history, asked, contents)?;
        if state.snapshots.len() == SNAPSHOTS_MAX {
            state.snapshots.remove(0);
        }
        state.snapshots.push(snapshot);
        self.coverage.snapshots += 1;
        self.coverage.snapshots_of_files += u64::from(!is_atomic);
        self.engine.note("snapshot", [unit as u64, asked, 0, 0]);
        self.snapshot_answered(unit, true)
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
        let persisted = self.node.as_ref().map(|node| node.cache.persisted());
        if is_idle && at_rest && !asked && to < sectors {
            if forgotten.is_some_and(|barrier| Some(barrier) <= persisted) {
                state.shrink = None;
                self.coverage.shrinks += 1;
                self.resize(unit, to)?;
                return Ok(false);
            }
            if forgotten.is_none() {
                self.forget_beyond(unit, to);
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

    /// Have the cache forget what lies beyond a new end; what it will have forgotten then shows in a
    /// barrier.
    fn forget_beyond(&mut self, unit: usize, sectors: u64) {
        let state = &mut self.units[unit];
        let Some(Node { cache, .. }) = &mut self.node else {
            return;
        };
        let first = sectors / BLOCK_SECTORS;
        let blocks = state.history.sectors().div_ceil(BLOCK_SECTORS) - first;
        cache.invalidate(BlockKey::new(state.config.number, first), blocks);
        state.shrink = Some(Shrink {
            to: sectors,
            forgotten: Some(cache.barrier()),
        });
    }
}
