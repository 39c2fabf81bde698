//! Heat maps, and warm-ups from them.

use std::collections::BTreeSet;

use hdcs_core::cache::Tiering;

use super::{Event, Phase, Plant, SectorRange, Violation, World};
use crate::check_heat;
use crate::check_promotion::whole_blocks;

impl World {
    /// Whether volumes are warmed up from heat maps.
    pub fn warms_up(&self) -> bool {
        self.scenario.warm_ups
    }

    /// Whether what is cached of a volume may have to go for what another one has that is dearer to read again.
    pub fn weighs_beside(&self) -> bool {
        self.units() > 1 && self.scenario.tiering() == Tiering::Benefit
    }

    /// What the heat map of a volume says, the hottest first.
    pub fn heat(&self, unit: usize) -> Vec<SectorRange> {
        let (Some(node), Some(volume)) = (&self.node, self.volume(unit)) else {
            return Vec::new();
        };
        let mut gathering = volume.cached().begin_gathering(node.look_at_cache_of(unit));
        while volume
            .cached()
            .gather(&mut gathering, node.look_at_cache_of(unit))
        {}
        let map = gathering.finish();
        map.plan(volume.config().bytes, u64::MAX).ranges
    }

    /// The node goes down: what was hot is remembered for the next opening.
    pub(super) fn keep_heat(&mut self) {
        for unit in 0..self.volumes() {
            if self.scenario.warm_ups {
                self.units[unit].heat = self.heat(unit);
            }
        }
    }

    /// A volume opens: it is warmed up from what was hot when the node went down.
    pub(super) fn warm_up_if_cold(&mut self, unit: usize) -> Result<(), Violation> {
        let ranges = std::mem::take(&mut self.units[unit].heat);
        if ranges.is_empty() {
            return Ok(());
        }
        self.engine
            .note("warm up if cold", [unit as u64, ranges.len() as u64, 0, 0]);
        self.step_volume(unit, Event::WarmUpIfCold(ranges))
    }

    /// Warm a volume up with ranges of a heat map.
    pub fn warm_up(&mut self, unit: usize, mut ranges: Vec<SectorRange>) -> Result<(), Violation> {
        self.engine
            .note("warm up", [unit as u64, ranges.len() as u64, 0, 0]);
        if self.planted.strikes(Plant::ForgottenWarmUp) {
            ranges.pop();
        }
        self.step_volume(unit, Event::WarmUp(ranges))?;
        self.tick();
        Ok(())
    }

    /// Whether nothing is left of a volume's warm-up.
    pub fn is_warmed_up(&self, unit: usize) -> bool {
        let Some(volume) = self.volume(unit) else {
            return true;
        };
        volume.phase() != Phase::Open || volume.stats(self.engine.now()).warm_left_bytes == 0
    }

    /// All of a range was brought into the cache: it is in these ranges of the volume's heat map, as far as it is still
    /// there. These are the blocks.
    pub fn check_heat(
        &self,
        unit: usize,
        range: SectorRange,
        ranges: &[SectorRange],
    ) -> Result<Vec<u64>, Violation> {
        let sectors = self.sectors(unit);
        let blocks = whole_blocks(range, sectors);
        let hot = blocks.filter(|&block| !self.weighs_beside() || self.is_promoted(unit, block));
        let hot = hot.collect::<Vec<_>>();
        check_heat::check_seen(&hot, ranges)?;
        Ok(hot)
    }

    /// Lines that the SSD tier has driven out so far.
    pub fn evicted_lines(&self) -> u64 {
        let node = self.node.as_ref();
        node.map_or(0, |node| node.cache().stats().ssd_evicted_lines)
    }

    /// A warm-up has ended that was to bring these blocks back beside what is dearer; so many lines had been driven out
    /// before.
    pub fn check_warmed_up_beside(
        &mut self,
        unit: usize,
        hot: &[u64],
        evicted: u64,
    ) -> Result<(), Violation> {
        self.coverage.warm_ups += 1;
        let line_blocks = self
            .node
            .as_ref()
            .map_or(1, |node| node.cache().line_blocks());
        let missing = hot.iter().filter(|&&block| !self.is_promoted(unit, block));
        let missing: BTreeSet<u64> = missing.map(|block| block / line_blocks).collect();
        check_heat::check_driven_out(missing.len() as u64, self.evicted_lines() - evicted)
    }

    /// A warm-up has ended that was to bring a range back.
    pub fn check_warmed_up(&mut self, unit: usize, range: SectorRange) -> Result<(), Violation> {
        self.coverage.warm_ups += 1;
        let is_there = |block| self.is_promoted(unit, block);
        check_heat::check_back(range, self.sectors(unit), is_there)
    }
}
