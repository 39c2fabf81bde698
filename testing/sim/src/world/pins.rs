//! Pins, and the neighbour that would drive out what is not pinned.

use super::{BLOCK_BYTES, BlockKey, Event, Phase, Plant, Policy, SectorRange, Violation, World};
use crate::check_pins;

/// A volume of which nothing is known but what it fills; no other has such a number.
const NEIGHBOUR: u32 = 5000;

impl World {
    /// What the scenario has pinned of a volume.
    pub(super) fn pins(&self, unit: usize) -> Vec<SectorRange> {
        let sectors = self.units[unit].config.bytes / 512;
        let share = |percent: u64| sectors * percent / 100;
        let range = |(first, end)| SectorRange::between(share(first), share(end));
        let pins = self.scenario.pins.map(range);
        pins.into_iter().filter(|range| !range.is_empty()).collect()
    }

    /// Whether anything was pinned from the start.
    pub fn has_pins(&self) -> bool {
        self.scenario.pins.is_some()
    }

    /// Somebody may pin another range of a volume, whatever is promoted or filled meanwhile.
    pub(super) fn repin(&mut self, unit: usize) -> Result<(), Violation> {
        if !self.scenario.repins || self.random.u8(..6) > 0 {
            return Ok(());
        }
        let sectors = self.sectors(unit);
        let first = self.random.u64(..sectors);
        let end = self.random.u64(first..=sectors);
        self.engine.note("repin", [unit as u64, first, end, 0]);
        let ranges = Vec::from([SectorRange::between(first, end)]);
        self.step_volume(unit, Event::Pin(ranges))
    }

    /// Nothing is pinned any more of this volume and those behind it.
    pub fn unpin_from(&mut self, unit: usize) -> Result<(), Violation> {
        for unit in unit..self.volumes() {
            if self.phase(unit) == Some(Phase::Open) {
                self.step_volume(unit, Event::Pin(Vec::new()))?;
            }
        }
        Ok(())
    }

    /// Pin a range of a volume and nothing else of it.
    pub fn pin(&mut self, unit: usize, range: SectorRange) -> Result<(), Violation> {
        self.engine
            .note("pin", [unit as u64, range.start, range.count, 0]);
        let is_forgotten = self.planted.strikes(Plant::ForgottenPin);
        let ranges = if is_forgotten {
            Vec::new()
        } else {
            vec![range]
        };
        if self.planted.strikes(Plant::HoardedPins)
            && let Some(node) = &mut self.node
        {
            let mut marks = self.scenario.fill_marks();
            marks.pin_ratio_max = 255;
            node.cache_mut().set_fill_marks(marks);
            let all = self.scenario.cache.ssd.as_ref().map_or(0, |ssd| ssd.bytes);
            let pinned = [(0, 2 * all / BLOCK_BYTES as u64)];
            let taken = node.cache_mut().pin(NEIGHBOUR, None, &pinned);
            assert!(taken.is_ok(), "the bound was lifted");
        }
        self.step_volume(unit, Event::Pin(ranges))?;
        self.tick();
        Ok(())
    }

    /// Whether everything that is pinned of a volume was looked at and fetched, or nothing will be: a volume that
    /// passes the cache by fills nothing before it has another policy.
    pub fn is_filled(&self, unit: usize) -> bool {
        let Some(volume) = self.volume(unit) else {
            return true;
        };
        let is_served = volume.config().policy != Policy::PassThrough;
        let is_left = volume.stats(self.engine.now()).pinned_left_bytes > 0;
        volume.phase() != Phase::Open || !is_served || !is_left
    }

    /// Let a neighbour fill the SSD tier twice over.
    pub fn crowd(&mut self) -> Result<(), Violation> {
        let Some(stats) = self.node.as_ref().map(|node| node.cache().stats()) else {
            return Ok(());
        };
        let line_of = |line| BlockKey::new(NEIGHBOUR, line);
        let filled = self.fill_as(2 * stats.ssd_lines, line_of)?;
        let taken = self
            .node
            .as_ref()
            .map_or(0, |node| node.cache().stats().filled_lines);
        check_pins::check_taken(filled, taken - stats.filled_lines, stats.ssd_lines)
    }

    /// A range is pinned and was filled, and nothing has happened since but that a neighbour filled the tier.
    pub fn check_pinned_at_once(
        &mut self,
        unit: usize,
        range: SectorRange,
    ) -> Result<(), Violation> {
        // What rots on the cache's device is lost when it is looked at, and fetched again.
        if self.scenario.faults.spoil_cache() {
            return Ok(());
        }
        self.check_pinned(unit, range)
    }

    /// A range is pinned and was filled.
    pub fn check_pinned(&mut self, unit: usize, range: SectorRange) -> Result<(), Violation> {
        self.coverage.pins += 1;
        let is_there = |block| self.is_promoted(unit, block);
        check_pins::check_kept(range, self.sectors(unit), is_there)
    }
}
