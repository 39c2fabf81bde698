//! Heat maps, and warm-ups from them.

use hdcs_core::read_cache::Tiering;

use super::{Event, Phase, Plant, SectorRange, Violation, World};
use crate::check_heat;

impl World {
    /// Whether volumes are warmed up from heat maps.
    pub fn warms_up(&self) -> bool {
        self.scenario.warm_ups
    }

    /// Whether tiers weigh volumes by what reading them costs.
    pub fn weighs(&self) -> bool {
        self.scenario.tiering() == Tiering::Benefit
    }

    /// What the heat map of a volume says, the hottest first.
    pub fn heat(&self, unit: usize) -> Vec<SectorRange> {
        let (Some(node), Some(volume)) = (&self.node, self.volume(unit)) else {
            return Vec::new();
        };
        let mut gathering = volume.begin_gathering(&node.cache);
        while volume.gather(&mut gathering, &node.cache) {}
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
        self.note("warm up if cold", [unit as u64, ranges.len() as u64, 0, 0]);
        self.step_volume(unit, Event::WarmUpIfCold(ranges))
    }

    /// Warm a volume up with ranges of a heat map.
    pub fn warm_up(&mut self, unit: usize, mut ranges: Vec<SectorRange>) -> Result<(), Violation> {
        self.note("warm up", [unit as u64, ranges.len() as u64, 0, 0]);
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
        volume.phase() != Phase::Open || volume.stats(self.now).warm_left_bytes == 0
    }

    /// All of a range is cached: it is in these ranges of the volume's heat map.
    pub fn check_heat(
        &self,
        unit: usize,
        range: SectorRange,
        ranges: &[SectorRange],
    ) -> Result<(), Violation> {
        check_heat::check_seen(range, self.sectors(unit), ranges)
    }

    /// A warm-up has ended that was to bring a range back.
    pub fn check_warmed_up(&mut self, unit: usize, range: SectorRange) -> Result<(), Violation> {
        self.coverage.warm_ups += 1;
        let is_there = |block| self.is_promoted(unit, block);
        check_heat::check_back(range, self.sectors(unit), is_there)
    }
}
