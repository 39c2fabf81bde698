//! Changes of size while clients go on, in the steps and the order of a node: a volume is told before its backend
//! shrinks, and once that has grown. Before that nothing of it is under way there, and the cache has forgotten for good
//! what is cut off. What the volume asks of its backend meanwhile is held back.
//!
//! What the cache has beyond the end of a volume that grows was cut off by a node that went down before that was
//! forgotten for good.
//!
//! A smaller size is recorded before the volume is told of it: if the node goes down before all is done, the next
//! opening has it, and may find what lies beyond it in its log, and in a backend that is larger. Before such a volume
//! grows its log is emptied and its backend is cut: what they hold would come back. What is asked of the backend beyond
//! its end is left out.

use hdcs_core::cache::Barrier;

use super::{
    Action, BLOCK_BYTES, BLOCK_SECTORS, BlockKey, CacheEvent, Event, Happening, Nanos, Node, Owner,
    Phase, Plant, SECTOR_BYTES, Violation, Volume, World,
};

/// A volume is not made smaller than that, in sectors,
const SECTORS_MIN: u64 = 64;
/// nor larger than that.
const SECTORS_MAX: u64 = 200_000;
/// How often it is looked whether a backend that is away can be resized.
const AGAIN: Nanos = Nanos::from_millis(1);

/// What a change of size waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Everything is destaged (when shrinking, and when the log holds what was cut off before).
    Destage,
    /// An atomic backend has flushed what it was given: a resize would show it.
    Whole,
    /// Nothing is under way in the backend.
    Drain,
    /// The cache has forgotten for good what lies beyond the smaller end.
    Void(Barrier),
    /// The backend has the new size.
    Backend,
}

/// A change of size that is under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resizing {
    step: Step,
    before: u64,
    to: u64,
}

impl Resizing {
    fn shrinks(&self) -> bool {
        self.to < self.before
    }
}

impl World {
    /// Somebody asks for another size.
    pub(super) fn begin_resize(&mut self, unit: usize) -> Result<(), Violation> {
        if !self.scenario.resizes || self.phase(unit) != Some(Phase::Open) {
            return Ok(());
        }
        let state = &self.units[unit];
        let is_busy = state.shrink.is_some() || state.snapshot_asked.is_some();
        if state.resizing.is_some() || is_busy || self.random.u8(..4) > 0 {
            return Ok(());
        }
        let before = state.history.sectors();
        let at_first = self.scenario.volumes[unit].base.len() as u64;
        let to = match self.random.u8(..4) {
            0 => before + self.random.u64(1..=256),
            // What was cut off must not come back.
            1 => at_first,
            _ => SECTORS_MIN.max(self.random.u64(before / 2..before)),
        };
        if to == before || to > SECTORS_MAX.max(at_first) {
            return Ok(());
        }
        let holds_cut = self.volume(unit).is_some_and(Volume::holds_cut);
        self.coverage.cut_logs += u64::from(to > before && holds_cut);
        self.note("begin resize", [unit as u64, before, to, 0]);
        let step = match (to < before, self.units[unit].config.backend_atomic) {
            _ if holds_cut => Step::Destage,
            (true, _) => Step::Destage,
            (false, true) => Step::Whole,
            (false, false) => match self.forget_cut(unit, before, to)? {
                Some(barrier) => Step::Void(barrier),
                None => return Ok(()),
            },
        };
        self.units[unit].resizing = Some(Resizing { step, before, to });
        match step {
            Step::Destage => {
                if to < before {
                    self.tell_size(unit, to)?;
                }
                self.destage_all(unit)
            }
            _ => self.go_on_resizing(unit),
        }
    }

    /// Whether a volume's size is being changed.
    pub fn is_resizing(&self) -> bool {
        self.units.iter().any(|unit| unit.resizing.is_some())
    }

    /// Take the next steps of what is under way.
    pub(super) fn go_on_resizing(&mut self, unit: usize) -> Result<(), Violation> {
        while let Some(resizing) = self.units[unit].resizing
            && let Some(step) = self.next_step(unit, resizing)?
        {
            self.note("resize goes on", [unit as u64, resizing.to, 0, 0]);
            self.units[unit].resizing = Some(Resizing { step, ..resizing });
            if step == Step::Backend {
                self.ask_for_size(unit);
            }
        }
        Ok(())
    }

    /// The step that follows, once there is nothing to wait for.
    fn next_step(&mut self, unit: usize, resizing: Resizing) -> Result<Option<Step>, Violation> {
        let Some(volume) = self.volume(unit) else {
            return Ok(None);
        };
        let is_atomic = volume.config().backend_atomic;
        Ok(match resizing.step {
            Step::Destage => {
                if volume.stats(self.now).destage_all_remaining_bytes > 0 {
                    return Ok(None);
                }
                let refused = if resizing.shrinks() {
                    self.tell_size(unit, resizing.to)?;
                    // What lies beyond the new end is being written.
                    self.units[unit].history.sectors() != resizing.to
                } else {
                    // It was cancelled.
                    volume.holds_cut()
                };
                if refused {
                    self.note("resize given up", [unit as u64, resizing.to, 0, 0]);
                    self.units[unit].resizing = None;
                    return Ok(None);
                }
                Some(Step::Whole)
            }
            Step::Whole if !is_atomic || volume.backend_is_flushed() => Some(Step::Drain),
            Step::Whole => {
                if !resizing.shrinks() && volume.trouble().is_some() {
                    self.units[unit].resizing = None;
                }
                None
            }
            Step::Drain => {
                let mut asked = self.in_flight.values();
                if asked.any(|one| one.io.backend() == Some(unit)) {
                    None
                } else {
                    let Resizing { before, to, .. } = resizing;
                    self.forget_cut(unit, before, to)?.map(Step::Void)
                }
            }
            Step::Void(barrier) => self.is_persisted(Some(barrier)).then_some(Step::Backend),
            Step::Backend => None,
        })
    }

    /// The cache forgets what lies beyond the smaller end; when it has for good. The block with that end is a part
    /// of it.
    fn forget_cut(
        &mut self,
        unit: usize,
        before: u64,
        to: u64,
    ) -> Result<Option<Barrier>, Violation> {
        let number = self.units[unit].config.number;
        let Some(Node { cache, .. }) = &mut self.node else {
            return Ok(None);
        };
        let first = before.min(to) / BLOCK_SECTORS;
        let blocks = before.max(to).div_ceil(BLOCK_SECTORS) - first;
        cache.invalidate(BlockKey::new(number, first), blocks);
        let barrier = cache.barrier();
        self.step_cache(CacheEvent::Poll)?;
        Ok(Some(barrier))
    }

    fn tell_size(&mut self, unit: usize, sectors: u64) -> Result<(), Violation> {
        let bytes = sectors * SECTOR_BYTES as u64;
        self.step_volume(unit, Event::Resize { bytes })
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

    /// Ask the backend for the new size.
    fn ask_for_size(&mut self, unit: usize) {
        let random = &mut self.random;
        let latency = self.units[unit].backend_latency.draw(random);
        let at = self.now.plus(latency);
        self.queue.add(at, Happening::BackendResized(unit));
    }

    /// The backend has the new size, or is away.
    pub(super) fn backend_resized(&mut self, unit: usize) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let Some(Resizing { to, .. }) = state.resizing.filter(|one| one.step == Step::Backend)
        else {
            return Ok(());
        };
        if state.backend_down.is_some() || state.backend_silent > self.now {
            self.queue
                .add(self.now.plus(AGAIN), Happening::BackendResized(unit));
            return Ok(());
        }
        let before = state.history.sectors();
        state.resizing = None;
        if !state.fence.is_up() {
            if self.planted.is(Plant::KeptCut) {
                state.keep_cut(to);
            }
            state.resize_backend(to);
            self.note("backend resized", [unit as u64, to, 0, 0]);
            self.coverage.resizes += 1;
            self.check_commits(unit)?;
            self.tell_size(unit, to)?;
            if before < to {
                self.fill_cut(unit);
            }
        }
        let held = std::mem::take(&mut self.units[unit].held);
        held.into_iter()
            .try_for_each(|action| self.perform_now(Owner::Volume(unit), action))
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
            node.cache.fill_block(key, &data);
        }
    }

    /// Whether what a volume asks of its backend waits for the end of a change of size.
    pub(super) fn holds(&self, unit: usize, action: &Action) -> bool {
        let state = &self.units[unit];
        match state.resizing.map(|resizing| resizing.step) {
            None | Some(Step::Destage | Step::Whole) => false,
            Some(Step::Drain) => true,
            Some(Step::Void(_)) => {
                state.config.backend_atomic
                    || state.resizing.is_some_and(|resizing| resizing.shrinks())
            }
            // A read shows nothing to anybody.
            Some(Step::Backend) => {
                state.config.backend_atomic && !matches!(action, Action::BackendRead { .. })
            }
        }
    }

    /// How much of so many sectors from one on lies within the backend: what was accepted before a cut is left out
    /// beyond it.
    pub(super) fn within_backend(&self, unit: usize, start: u64, count: u64) -> u64 {
        let state = &self.units[unit];
        let shrinks = state
            .resizing
            .filter(|one| one.step == Step::Backend && one.shrinks());
        let end = state.backend.sectors();
        let end = shrinks.map_or(end, |one| end.min(one.to));
        if self.scenario.resizes {
            count.min(end.saturating_sub(start))
        } else {
            count
        }
    }
}

impl super::Unit {
    /// The volume has so many sectors from now on.
    pub(super) fn has_size(&mut self, sectors: u64) {
        self.history.resize(sectors);
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
    fn keep_cut(&mut self, sectors: u64) {
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
        if let Some(resizing) = self.resizing.take()
            && resizing.shrinks()
        {
            self.has_size(resizing.to);
        }
    }
}
