//! Snapshots of an atomic backend, as a node makes them, and changes of size beside them: everything is
//! destaged, then the backend is asked, which keeps what its last flush has made durable. Clients,
//! destage and faults go on meanwhile; only while a volume becomes smaller its client holds back.

use hdcs_core::cache::Barrier;

use super::{
    BLOCK_SECTORS, BlockKey, Happening, Nanos, Node, Phase, Plant, Violation, World, check_backend,
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
        self.ask_for_snapshot(unit);
        Ok(())
    }

    /// Somebody asks for a snapshot, or for a smaller volume.
    pub(super) fn snapshot_or_shrink(&mut self, unit: usize) -> Result<(), Violation> {
        let state = &self.units[unit];
        let is_free = self.phase(unit) == Some(Phase::Open) && state.resizing.is_none();
        if !state.config.backend_atomic || !is_free {
            return Ok(());
        }
        if self.random.u8(..3) == 0 {
            // Or gives that up.
            let sectors = self.units[unit].history.sectors();
            let wanted = self.units[unit].shrink.is_none() && sectors > SECTORS_MIN;
            self.units[unit].shrink = wanted.then(|| Shrink {
                to: self.random.u64(SECTORS_MIN.max(sectors / 2)..sectors),
                forgotten: None,
            });
            return Ok(());
        }
        if self.units[unit].snapshot_asked.is_some() {
            return Ok(());
        }
        self.destage_all(unit)?;
        let state = &mut self.units[unit];
        state.snapshot_asked = state.destage_all;
        if self.planted.strikes(Plant::HastySnapshot) {
            self.ask_for_snapshot(unit);
        }
        Ok(())
    }

    /// Everything that it has to hold is destaged: the backend is asked for it.
    pub(super) fn ask_for_snapshot(&mut self, unit: usize) {
        if let Some(asked) = self.units[unit].snapshot_asked.take() {
            let longest = self.random.choice([5000, 200_000]).unwrap_or(5000);
            let pause = Nanos::from_micros(self.random.u64(1..longest));
            let taken = Happening::Snapshot(unit, asked);
            self.queue.add(self.now.plus(pause), taken);
        }
    }

    /// The backend takes it, or cannot.
    pub(super) fn take_snapshot(&mut self, unit: usize, asked: u64) -> Result<(), Violation> {
        let is_open = self.phase(unit) == Some(Phase::Open);
        let state = &mut self.units[unit];
        let is_away = state.backend_down.is_some() || state.fence.is_up();
        if !is_open || is_away || state.resizing.is_some() || state.log_rotten {
            return Ok(());
        }
        let loose = self.planted.is(Plant::LooseSnapshot);
        if loose && self.calm_since.is_none() {
            // It has its moments.
            let again = self.now.plus(Nanos::from_micros(500));
            self.queue.add(again, Happening::Snapshot(unit, asked));
            if !state.backend.has_staged() {
                return Ok(());
            }
        }
        let backend = &state.backend;
        let holds = |sector| {
            if loose {
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
        self.note("snapshot", [unit as u64, asked, 0, 0]);
        Ok(())
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
            !is_staged && volume.backend_is_flushed() && volume.stats(self.now).log_used_blocks == 0
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
        let again = self.now.plus(Nanos::from_millis(1));
        self.queue.add(again, Happening::Client(unit));
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
