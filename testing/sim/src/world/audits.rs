//! What is looked at closely when nothing else goes on, and what is done to a node that is down.

use super::{
    BLOCK_BYTES, BLOCK_SECTORS, BackendOrder, BlockKey, Disk, Happening, Nanos, Plant, Policy,
    SMALL_POOL_BYTES, SectorRange, SsdState, Violation, Volume, World, check_lost, check_promotion,
    mix,
};
use crate::engine::Simulated;

/// Longer than the slowest device needs for what the cache still compares.
const SETTLE_TIME: Nanos = Nanos::from_millis(2000);
/// What lost logs begin again with: no volume of a scenario has such a number.
const NUMBERS_AFTER_LOSS: u32 = 1000;

/// What is read of a range of a backend.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Watched {
    of: Option<(usize, SectorRange)>,
    /// Sectors so far.
    pub(super) sectors: u64,
}

impl Watched {
    /// A volume reads so much of its backend.
    pub(super) fn count(&mut self, unit: usize, range: SectorRange) {
        if let Some((_, watched)) = self.of.filter(|(of, _)| *of == unit) {
            self.sectors += range.intersect(watched).count;
        }
    }
}

impl World {
    /// A range of a volume that takes a small part of the SSD tier, if that serves.
    pub fn promotable(&mut self, unit: usize) -> Option<SectorRange> {
        let stats = self.node.as_ref()?.cache().stats();
        // With little memory it takes what it can.
        let is_tight = self.pool.total_bytes() <= SMALL_POOL_BYTES;
        let policy = self.units[unit].config.policy;
        let is_served = !matches!(policy, Policy::PassThrough | Policy::ReadOnly);
        if stats.ssd_state != SsdState::Online || is_tight || !is_served {
            return None;
        }
        let blocks = stats.ssd_lines * stats.line_blocks / 8;
        // A last line that is not whole has its place in DRAM alone, if anywhere.
        let line = stats.line_blocks * BLOCK_SECTORS;
        let sectors = self.sectors(unit) / line * line;
        if sectors == 0 {
            return None;
        }
        let start = self.random.u64(..sectors);
        let count = 1 + self
            .random
            .u64(..(blocks * BLOCK_SECTORS).min(sectors - start));
        Some(SectorRange::new(start, count))
    }

    /// Let everything that is under way come to its end, with time to spare.
    pub fn settle(&mut self) -> Result<(), Violation> {
        let until = self.engine.now().plus(SETTLE_TIME);
        self.engine.at(until, Happening::Tick);
        self.run_until(|world| world.engine.now() >= until)
            .map(|_| ())
    }

    /// Count what is read of a range of a backend from now on.
    pub fn watch(&mut self, unit: usize, range: SectorRange) {
        self.watched = Watched {
            of: Some((unit, range)),
            sectors: 0,
        };
    }

    /// Whether a block of a volume is where a promotion brings it.
    pub(super) fn is_promoted(&self, unit: usize, block: u64) -> bool {
        let number = self.units[unit].config.number;
        let end = BlockKey::new(number, self.sectors(unit) / BLOCK_SECTORS);
        let node = self.node.as_ref();
        node.is_some_and(|node| node.cache().is_promoted(BlockKey::new(number, block), end))
    }

    /// A promotion that had the node for itself was answered, and was watched.
    pub fn check_promoted(&mut self, unit: usize, range: SectorRange) -> Result<(), Violation> {
        self.coverage.promotions += 1;
        let is_cached = |block| self.is_promoted(unit, block);
        check_promotion::check_there(range, self.sectors(unit), is_cached)?;
        check_promotion::check_effort(range, self.watched.sectors)
    }

    /// What was promoted has been read, which was watched.
    pub fn check_promotion_used(&self, unit: usize, range: SectorRange) -> Result<(), Violation> {
        let blocks = check_promotion::whole_blocks(range, self.sectors(unit));
        let is_whole = blocks.end * BLOCK_SECTORS >= range.end();
        // What rots on the cache's device is fetched again.
        if self.scenario.faults.spoil_cache() || !is_whole {
            return Ok(());
        }
        check_promotion::check_used(range, self.watched.sectors)
    }

    /// The node is down, and the log of a volume is lost: it gets a new one, with a new number, over
    /// what the backend holds.
    pub fn lose_log(&mut self, unit: usize) -> Result<(), Violation> {
        self.engine.note("log lost", [unit as u64, 0, 0, 0]);
        self.coverage.lost_logs += 1;
        let keeps_number = self.planted.strikes(Plant::KeptNumber);
        let keeps_before = self.planted.strikes(Plant::StaleBefore);
        let lost = self.coverage.lost_logs;
        let state = &mut self.units[unit];
        state.backend.opened();
        if !state.is_stacked() {
            check_lost::give_up_log(&mut state.history, |sector| state.backend.visible(sector))?;
        }
        if !keeps_number {
            state.config.number = NUMBERS_AFTER_LOSS + lost as u32;
        }
        if let Some(local) = state.local.as_mut().filter(|_| keeps_before) {
            local.pretend(&state.log, state.kept.as_ref());
        }
        let seed = mix(self.scenario.seed ^ mix(100 + lost));
        state.log = Disk::new(state.config.log_bytes, seed);
        state.space = super::log_space::LogSpace::whole(state.config.log_bytes);
        let first: [u8; BLOCK_BYTES] = Volume::format_log(&state.config, mix(seed));
        let keys = super::forgery::log_keys(self.scenario.seed, unit);
        let carries_mark = self.scenario.carries_mark(100 + lost);
        let first = super::forgery::first_block(&first, carries_mark, keys.as_deref());
        state.log.put(0, &first);
        if state.is_stacked() {
            // Which log is before it decides what a local store shows.
            state.lose_log_of_stack()?;
        }
        state.log_rotten = false;
        state.rotten.clear();
        state.lost.clear();
        state.has_lost = false;
        state.log_known = 0;
        state.order = BackendOrder::default();
        state.snapshots.clear();
        // What it took was stated, and accepted.
        state.lost_bytes_max = None;
        Ok(())
    }
}
