//! Changes of size while clients go on, as [`Resize`] decides them: what is asked of the backend meanwhile is held back if
//! that says so.
//!
//! A smaller size is recorded before the volume is told of it: if the node goes down before all is done, the next
//! opening has it, and may find what lies beyond it in its log, and in a backend that is larger. What is asked of the
//! backend beyond its end is left out.

use hdcs_core::node::resize::{Act, Resize, View};
use hdcs_core::volume::Cut;

use super::{
    Action, BLOCK_BYTES, BLOCK_SECTORS, BlockKey, CacheEvent, Event, Happening, Nanos, Owner,
    Phase, Plant, SECTOR_BYTES, Violation, World,
};

/// A volume is not made smaller than that, in sectors,
const SECTORS_MIN: u64 = 64;
/// nor larger than that.
const SECTORS_MAX: u64 = 200_000;
/// How often it is looked whether a backend that is away can be resized.
const AGAIN: Nanos = Nanos::from_millis(1);

impl World {
    /// Somebody asks for another size.
    pub(super) fn begin_resize(&mut self, unit: usize) -> Result<(), Violation> {
        if !self.scenario.resizes || self.phase(unit) != Some(Phase::Open) {
            return Ok(());
        }
        let state = &self.units[unit];
        let is_busy = state.shrink.is_some() || state.snapshotting.is_some();
        if state.resizing.is_some() || is_busy || self.random.u8(..4) > 0 {
            return Ok(());
        }
        let before = state.history.sectors();
        let at_first = self.sectors_at_first(unit);
        let to = match self.random.u8(..4) {
            0 => before + self.random.u64(1..=256),
            // What was cut off must not come back.
            1 => at_first,
            _ => SECTORS_MIN.max(self.random.u64(before / 2..before)),
        };
        if to > SECTORS_MAX.max(at_first) {
            return Ok(());
        }
        self.resize_online(unit, to)
    }

    /// Give a volume another size, unless it has it or is busy.
    pub fn resize_online(&mut self, unit: usize, sectors: u64) -> Result<(), Violation> {
        let state = &self.units[unit];
        let to = match state.local {
            // A local store has whole blocks.
            Some(_) => sectors.next_multiple_of(BLOCK_SECTORS),
            None => sectors,
        };
        let before = state.history.sectors();
        let is_busy = state.resizing.is_some() || state.snapshotting.is_some();
        if to == before || is_busy || self.phase(unit) != Some(Phase::Open) {
            return Ok(());
        }
        let holds_cut = self
            .volume(unit)
            .is_some_and(|volume| volume.cut() == Cut::Held);
        self.coverage.cut_logs += u64::from(to > before && holds_cut);
        self.engine
            .note("begin resize", [unit as u64, before, to, 0]);
        let state = &self.units[unit];
        let (number, is_atomic) = (state.config.number, state.config.backend_atomic);
        let Some(view) = self.resize_view(unit) else {
            return Ok(());
        };
        let bytes = to * SECTOR_BYTES as u64;
        self.units[unit].resizing = Some(Resize::begin(number, bytes, is_atomic, &view));
        self.go_on_resizing(unit)
    }

    fn resize_view(&self, unit: usize) -> Option<View> {
        let volume = self.volume(unit)?;
        let asked = self.in_flight.values();
        Some(View {
            bytes: volume.config().bytes,
            destage_left_bytes: volume.stats(self.engine.now()).destage_all_remaining_bytes,
            cut: volume.cut(),
            is_flushed: volume.backend_is_flushed(),
            is_in_trouble: volume.trouble().is_some(),
            under_way: asked.filter(|one| one.io.backend() == Some(unit)).count(),
            persisted: self.node.as_ref()?.cache().persisted(),
        })
    }

    /// The size of a volume in the beginning, in sectors.
    pub fn sectors_at_first(&self, unit: usize) -> u64 {
        self.scenario.volumes[unit].base.len() as u64
    }

    /// Whether a volume's size is being changed.
    pub fn is_resizing(&self) -> bool {
        self.units.iter().any(|unit| unit.resizing.is_some())
    }

    /// Take the next steps of what is under way.
    pub(super) fn go_on_resizing(&mut self, unit: usize) -> Result<(), Violation> {
        while self.units[unit].resizing.is_some()
            && let Some(view) = self.resize_view(unit)
            && let Some(resize) = &mut self.units[unit].resizing
            && let Some(act) = resize.go_on(&view)
        {
            let bytes = resize.bytes();
            self.engine
                .note("resize goes on", [unit as u64, bytes, 0, 0]);
            self.perform_resize(unit, act)?;
        }
        Ok(())
    }

    pub(super) fn perform_resize(&mut self, unit: usize, act: Act) -> Result<(), Violation> {
        match act {
            Act::Tell(bytes) => self.step_volume(unit, Event::Resize { bytes }),
            Act::DestageAll => self.destage_all(unit),
            Act::TellTail if self.planted.is(Plant::OlderTail) => Ok(()),
            Act::TellTail => self.step_volume(unit, Event::TellTail),
            Act::Forget(first, blocks) => {
                let Some(node) = &mut self.node else {
                    return Ok(());
                };
                let cache = node.cache_of(unit);
                cache.invalidate(first, blocks);
                let barrier = cache.barrier();
                if let Some(resize) = &mut self.units[unit].resizing {
                    resize.forgotten(barrier);
                }
                self.step_cache_of(unit, CacheEvent::Poll)
            }
            Act::Backend(bytes) if self.units[unit].is_stacked() => self.size_stack(unit, bytes),
            Act::Backend(_) => {
                let state = &mut self.units[unit];
                let mut at = self.engine.now();
                // Where it is cut before it grows takes no time of its own.
                if (state.resizing).is_some_and(|resize| resize.is_at_backend()) {
                    at = at.plus(state.backend_latency.draw(&mut self.random));
                }
                self.engine.at(at, Happening::BackendResized(unit));
                Ok(())
            }
            Act::End(result) => self.end_resize(unit, result.is_ok()),
        }
    }

    fn end_resize(&mut self, unit: usize, is_done: bool) -> Result<(), Violation> {
        let Some(resize) = self.units[unit].resizing.take() else {
            return Ok(());
        };
        let sectors = resize.bytes() / SECTOR_BYTES as u64;
        if is_done {
            self.coverage.resizes += 1;
            let bytes = resize.bytes();
            self.step_volume(unit, Event::Resize { bytes })?;
            if !resize.shrinks() {
                self.fill_cut(unit);
            }
        } else {
            self.engine
                .note("resize given up", [unit as u64, sectors, 0, 0]);
        }
        let held = std::mem::take(&mut self.units[unit].held);
        held.into_iter()
            .try_for_each(|action| self.perform_now(Owner::Volume(unit), action))
    }

    /// A volume may have taken another size: what is said of it goes by that from now on, its replies included.
    pub(super) fn notice_size(&mut self, unit: usize) {
        let Some(bytes) = self.volume(unit).map(|volume| volume.config().bytes) else {
            return;
        };
        let state = &self.units[unit];
        if bytes < state.config.bytes && state.resizing.is_some() {
            self.coverage.cuts += 1;
            self.coverage.cut_requests += state.requests.len() as u64;
        }
        if bytes != state.config.bytes {
            self.units[unit].has_size(bytes / SECTOR_BYTES as u64);
        }
    }

    /// The backend has the size that it was asked for, or is away.
    pub(super) fn backend_resized(&mut self, unit: usize) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let Some(mut resize) = state.resizing.filter(Resize::awaits_backend) else {
            return Ok(());
        };
        if state.backend_down.is_some() || state.backend_silent > self.engine.now() {
            self.engine.at(
                self.engine.now().plus(AGAIN),
                Happening::BackendResized(unit),
            );
            return Ok(());
        }
        if state.fence.is_up() {
            return self.end_resize(unit, false);
        }
        let bytes = if resize.is_at_backend() {
            resize.bytes()
        } else {
            resize.before()
        };
        let sectors = bytes / SECTOR_BYTES as u64;
        if resize.shrinks() && self.planted.is(Plant::KeptCut) {
            state.keep_cut(sectors);
        }
        state.backend.resize(sectors);
        self.engine
            .note("backend resized", [unit as u64, sectors, 0, 0]);
        self.check_commits(unit)?;
        let act = resize.backend_resized(Ok(()));
        self.units[unit].resizing = Some(resize);
        self.perform_resize(unit, act)
    }

    /// A planted bug has the cache keep what was cut off: blocks of it are found once the volume has them again.
    fn fill_cut(&mut self, unit: usize) {
        let state = &mut self.units[unit];
        let (Some((start, contents)), Some(node)) = (state.kept_cut.take(), &mut self.node) else {
            return;
        };
        let whole = (state.history.sectors() / BLOCK_SECTORS * BLOCK_SECTORS).saturating_sub(start);
        let block_sectors = BLOCK_SECTORS as usize;
        for (index, block) in contents.chunks_exact(block_sectors).enumerate() {
            let first = index * block_sectors;
            if first as u64 >= whole {
                break;
            }
            let mut data = [0; BLOCK_BYTES];
            for (sector, bytes) in (start + first as u64..).zip(data.chunks_mut(SECTOR_BYTES)) {
                block[(sector - start) as usize - first].fill(state.volume, sector, bytes);
            }
            let key = BlockKey::new(state.config.number, start / BLOCK_SECTORS + index as u64);
            node.cache_of(unit).fill_block(key, &data);
        }
    }

    /// Whether what a volume asks of its backend waits for the end of a change of size, or for a snapshot.
    pub(super) fn holds(&mut self, unit: usize, action: &Action) -> bool {
        if self.units[unit].snapshotting.is_some() {
            return self.snapshot_holds(unit, action);
        }
        let is_read = matches!(action, Action::BackendRead { .. });
        let resize = self.units[unit].resizing;
        resize.is_some_and(|resize| resize.holds(is_read))
    }
}

impl super::Unit {
    /// How much of so many sectors from one on lies within the backend: what was accepted before a cut is left out
    /// beyond it.
    pub(super) fn within_backend(&self, start: u64, count: u64) -> u64 {
        let shrinks = self
            .resizing
            .filter(|one| one.is_at_backend() && one.shrinks());
        let end = self.backend.sectors();
        let end = shrinks.map_or(end, |one| end.min(one.bytes() / SECTOR_BYTES as u64));
        count.min(end.saturating_sub(start))
    }

    /// The volume has so many sectors from now on.
    pub(super) fn has_size(&mut self, sectors: u64) {
        self.history.resize(sectors);
        for before in &mut self.before_losses {
            before.resize(sectors);
        }
        // What is cut off is zero when it is there again.
        self.lost.split_off(&sectors);
        self.order.resized(sectors);
        for snapshot in &mut self.snapshots {
            snapshot.resized(sectors);
        }
        self.config.bytes = sectors * SECTOR_BYTES as u64;
        self.postponed = None;
    }

    /// What the backend has from the first whole block beyond so many sectors on, if there is such a thing.
    pub(super) fn keep_cut(&mut self, sectors: u64) {
        let start = sectors.next_multiple_of(BLOCK_SECTORS);
        if start < self.backend.sectors() {
            let kept = (start..self.backend.sectors()).map(|sector| self.backend.visible(sector));
            self.kept_cut = Some((start, kept.collect()));
        }
    }

    /// The backend gets another size. It has nothing beyond the present end then, where a change of size that was
    /// under way when the volume was left may have left something.
    pub(super) fn resize_backend(&mut self, sectors: u64) {
        if sectors > self.history.sectors() {
            self.backend.resize(self.history.sectors());
        }
        self.backend.resize(sectors);
    }

    /// The volume is gone: of a change of size that was under way the next opening knows what was recorded.
    pub(super) fn leave_resizing(&mut self) {
        self.held.clear();
        if let Some(resize) = self.resizing.take()
            && resize.shrinks()
        {
            self.has_size(resize.bytes() / SECTOR_BYTES as u64);
        }
    }
}
