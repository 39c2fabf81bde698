//! Volumes that began as one origin and share what the cache has of it.

use hdcs_core::cache::{SsdState, Tier};
use hdcs_core::volume::{Inherited, Policy};

use super::{
    BLOCK_BYTES, BLOCK_SECTORS, BlockKey, Content, Phase, Plant, ReadOp, SMALL_POOL_BYTES,
    SectorRange, Violation, World,
};

/// Number of the origin in the cache: no volume of a scenario has it, nor gets it after a loss.
const ORIGIN: u32 = 900;

impl World {
    /// What a volume that is about to be opened has inherited: what its backend holds as the origin
    /// does. Sometimes less of that: not every backend can tell it of each block.
    pub(super) fn inherited(&mut self, unit: usize) -> Option<Inherited> {
        let origin = self.scenario.origin.as_ref()?;
        let backend = &self.units[unit].backend;
        let guesses = self.planted.is(Plant::GuessedLineage);
        let held = |sector: u64| origin.get(sector as usize).copied();
        let is_as_held = |sector| backend.visible(sector) == held(sector).unwrap_or(Content::Zero);
        let coarse = self.random.u8(..4) == 0;
        let mut inherited = Inherited::new(ORIGIN);
        for block in 0..backend.sectors() / BLOCK_SECTORS {
            let mut sectors = block * BLOCK_SECTORS..(block + 1) * BLOCK_SECTORS;
            let told = !coarse || self.random.u8(..4) > 0;
            if guesses || told && sectors.all(is_as_held) {
                inherited.insert(block, 1);
            }
        }
        Some(inherited)
    }

    /// A planted bug keeps what a clone has read, whatever it is, as the origin's.
    pub(super) fn misplace(&mut self, unit: usize, read: ReadOp, data: &[u8]) {
        if self.scenario.origin.is_none() || !self.planted.strikes(Plant::MisplacedFill) {
            return;
        }
        let Some(node) = &mut self.node else { return };
        let first = read.range.start.next_multiple_of(BLOCK_SECTORS);
        let skip = (first - read.range.start) as usize * data.len() / read.range.count as usize;
        let blocks = data.get(skip..).unwrap_or_default();
        for (index, block) in (0..).zip(blocks.chunks_exact(BLOCK_BYTES)) {
            let key = BlockKey::new(ORIGIN, first / BLOCK_SECTORS + index);
            node.cache_of(unit).fill_block(key, block);
        }
    }

    /// A range that the first two volumes have both inherited, of which the first may promote as much
    /// as the cache takes.
    pub fn common(&self) -> Option<SectorRange> {
        let stats = self.node.as_ref()?.cache().stats();
        let is_tight = self.pool.total_bytes() <= SMALL_POOL_BYTES;
        if self.scenario.origin.is_none()
            || self.scenario.faults.spoil_cache()
            || stats.ssd_state != SsdState::Online
            || is_tight
            || (0..2).any(|unit| self.units[unit].config.policy == Policy::PassThrough)
        {
            return None;
        }
        let lines = (stats.ssd_lines / 8).min(256);
        self.longest_run(stats.line_blocks * lines, |block| self.is_common(block))
    }

    /// The lines of a range that the cache has of the origin, as a whole: to have the rest of one that
    /// it has in part, all of it is fetched.
    pub fn cached_of_origin(&self, range: SectorRange) -> Option<SectorRange> {
        let node = self.node.as_ref()?;
        let blocks = range.first_block()..range.first_block() + range.block_count();
        let cached = self.longest_run(range.block_count(), |block| {
            blocks.contains(&block)
                && node.cache().probe(BlockKey::new(ORIGIN, block)) != Tier::Absent
        })?;
        let line = node.cache().line_blocks() * BLOCK_SECTORS;
        let (start, end) = (
            cached.start.next_multiple_of(line),
            cached.end() / line * line,
        );
        (start < end).then(|| SectorRange::between(start, end))
    }

    fn is_common(&self, block: u64) -> bool {
        (0..2).all(|unit| {
            self.phase(unit) == Some(Phase::Open)
                && self
                    .volume(unit)
                    .is_some_and(|v| v.cached().inherits(block))
        })
    }

    fn longest_run(&self, blocks_max: u64, of: impl Fn(u64) -> bool) -> Option<SectorRange> {
        let blocks = self.units.iter().map(|unit| unit.history.sectors()).min()? / BLOCK_SECTORS;
        let mut best = 0..0;
        let mut run = 0..0;
        for block in 0..blocks {
            if !of(block) || run.end - run.start == blocks_max {
                run = block + 1..block + 1;
            } else {
                run.end = block + 1;
            }
            if run.end - run.start > best.end - best.start {
                best = run.clone();
            }
        }
        let sectors = |block: u64| block * BLOCK_SECTORS;
        (!best.is_empty()).then(|| SectorRange::between(sectors(best.start), sectors(best.end)))
    }

    /// A clone has read what the cache had of its origin, which was watched.
    pub fn check_shared(&mut self, range: SectorRange) -> Result<(), Violation> {
        self.coverage.shared_sectors += range.count;
        if self.watched.sectors == 0 {
            return Ok(());
        }
        Err(Violation::new(
            "origin-read-again",
            format!(
                "{range:?} of the origin was in the cache, and a clone had {} sectors of it read of its backend",
                self.watched.sectors
            ),
        ))
    }
}
