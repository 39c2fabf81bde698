//! What the SSD tier keeps, and how full it becomes: neighbours that are dear and cheap to read again, and lines that were
//! read too rarely.

use hdcs_core::cache::Tiering;

use super::{
    BLOCK_BYTES, BLOCK_SECTORS, BlockKey, Event, Happening, Nanos, Plant, SMALL_POOL_BYTES,
    SectorRange, SsdState, Violation, World,
};
use crate::check_benefit;
use crate::engine::Simulated;

/// Blocks of a segment.
const SEGMENT_BLOCKS: u64 = 256;
/// Volumes of which nothing is known but what they fill; no other has such a number.
const CHEAP: u32 = 5001;
const DEAR: u32 = 5002;
/// Of the lines that both fill, one in so many is dear.
const DEAR_ONE_IN: u64 = 4;
/// The time in which the tier writes what was filled at once.
const PAUSE: Nanos = Nanos::from_millis(20);
/// Lines that are filled at once: less than a segment.
const BURST: u64 = 16;
/// Reads that make a cost known.
const READS: u32 = 200;

impl World {
    /// Let a dear and a cheap neighbour fill the tier, then the cheap one alone, and see what is left.
    pub fn weigh(&mut self) -> Result<(), Violation> {
        if self.has_pins() {
            // They may leave no room for half of what is dear.
            return Ok(());
        }
        let is_blind = self.planted.strikes(Plant::BlindWeights);
        let marks = self.scenario.fill_marks();
        let is_tight = self.pool.total_bytes() <= SMALL_POOL_BYTES;
        let Some(node) = self.node.as_mut().filter(|_| !is_tight) else {
            return Ok(());
        };
        let stats = node.cache().stats();
        if stats.ssd_state != SsdState::Online {
            return Ok(());
        }
        if is_blind {
            node.cache_mut().set_tiering(Tiering::Recency);
        }
        // What counts is how much longer that takes than a read of the tier.
        let ssd_hit = node.cache().benefit(DEAR).ssd_hit.unwrap_or(Nanos(0));
        let dear = Nanos::from_millis(20).plus(ssd_hit);
        let cheap = Nanos::from_micros(300);
        for _ in 0..READS {
            let blocks = stats.line_blocks;
            node.cache_mut()
                .note_miss(BlockKey::new(CHEAP, 0), blocks, cheap);
            node.cache_mut()
                .note_miss(BlockKey::new(DEAR, 0), blocks, dear);
        }
        let both = stats.ssd_lines / 2;
        self.fill_as(stats.ssd_lines, |line| BlockKey::new(CHEAP, line))?;
        let of_both = |line: u64| match line % DEAR_ONE_IN {
            0 => BlockKey::new(DEAR, line),
            _ => BlockKey::new(CHEAP, stats.ssd_lines + line),
        };
        self.fill_as(both, of_both)?;
        let then = stats.ssd_lines + both;
        self.fill_as(2 * stats.ssd_lines, |line| {
            BlockKey::new(CHEAP, then + line)
        })?;
        self.settle()?;
        let Some(node) = &self.node else {
            return Ok(());
        };
        let after = node.cache().stats();
        if after.ssd_state != SsdState::Online || after.ssd_failures != stats.ssd_failures {
            return Ok(());
        }
        self.coverage.weighed += 1;
        let dear = (0..both).step_by(DEAR_ONE_IN as usize);
        let kept = dear.clone().filter(|line| {
            let key = BlockKey::new(DEAR, line * stats.line_blocks);
            node.cache()
                .is_promoted(key, BlockKey::new(DEAR, u64::from(u32::MAX)))
        });
        if self.scenario.tiering() == Tiering::Benefit {
            check_benefit::check_dear(kept.count(), dear.count())?;
        }
        // Where lines are compressed, a segment has room for less than another line beside its plain ones.
        let segments = after.ssd_lines / (SEGMENT_BLOCKS / after.line_blocks - 1).max(1);
        let room = (after.ssd_lines + segments) * after.line_blocks;
        check_benefit::check_marks(after.ssd_used_blocks, room, marks.ratio_max)
    }

    /// Let somebody fill so many lines: of each, which line of which volume. How many were offered.
    pub(super) fn fill_as(
        &mut self,
        lines: u64,
        line_of: impl Fn(u64) -> BlockKey,
    ) -> Result<u64, Violation> {
        let line_blocks = self
            .node
            .as_ref()
            .map_or(1, |node| node.cache().line_blocks());
        let mut filled = 0;
        for line in 0..lines {
            if line % BURST == 0 {
                let until = self.engine.now().plus(PAUSE);
                self.engine.at(until, Happening::Tick);
                self.run_until(|world| world.engine.now() >= until)?;
            }
            let bytes = line_blocks as usize * BLOCK_BYTES;
            let (Some(mut buf), Some(node)) = (self.pool.alloc(bytes), &mut self.node) else {
                continue;
            };
            buf.fill(7);
            // No two lines are the same.
            buf[..8].copy_from_slice(&(self.engine.now().0 ^ line).to_le_bytes());
            buf[8..16].copy_from_slice(&line.to_le_bytes());
            let of = line_of(line);
            let key = BlockKey::new(of.volume(), of.block() * line_blocks);
            node.cache_mut().fill(key, &buf.freeze());
            filled += 1;
        }
        Ok(filled)
    }

    /// From now on a line of the volume goes to the tier once it was read so often from now on.
    pub fn count_from_now(&mut self, unit: usize, promote_hits: u8) -> Result<(), Violation> {
        let is_eager = self.planted.strikes(Plant::UncountedReads);
        for hits in [1, if is_eager { 1 } else { promote_hits }] {
            let mut config = self.units[unit].config.clone();
            config.promote_hits = hits;
            self.step_volume(unit, Event::Reconfigure(config))?;
        }
        self.tick();
        Ok(())
    }

    /// A range was read so often since counting began.
    pub fn check_counted(
        &mut self,
        unit: usize,
        range: SectorRange,
        reads: u8,
        asked: u8,
    ) -> Result<(), Violation> {
        self.coverage.counted += 1;
        let state = self
            .node
            .as_ref()
            .map(|node| node.cache().stats().ssd_state);
        if state != Some(SsdState::Online) {
            return Ok(());
        }
        let mut blocks = range.start / BLOCK_SECTORS..range.end().div_ceil(BLOCK_SECTORS);
        blocks.try_for_each(|block| {
            check_benefit::check_counted(self.is_promoted(unit, block), reads, asked)
        })
    }
}
