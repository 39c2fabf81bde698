//! Pins and warm-ups of volumes: what the read cache is asked to keep and to take, and why it may not.

use hdcs_core::base::io::SectorRange;
use hdcs_core::cache::{PinRefused, SsdState};
use hdcs_core::volume::Event;
use hdcs_frontend::VolumeNumber;

use super::state::ShardState;

/// Why pins are refused, and what to do.
fn words(refused: PinRefused) -> String {
    match refused {
        PinRefused::NoTier => {
            "this node has no SSD tier, where pins are kept: set cache_total_size_mib and restart \
             the daemon"
                .to_owned()
        }
        PinRefused::TooMuch {
            asked_bytes,
            others_bytes,
            max_bytes,
        } => format!(
            "its pins would take {asked_bytes} bytes of the SSD tier in whole lines, beside \
             {others_bytes} of other volumes, and all may take {max_bytes}: pin less, unpin something, or \
             raise cache_pin_ratio_max or cache_total_size_mib"
        ),
    }
}

impl ShardState {
    /// Pin these ranges of a volume instead of what is.
    pub fn pin(&mut self, number: VolumeNumber, ranges: Vec<SectorRange>) -> Result<(), String> {
        let slot = self.open_slot(number)?;
        self.pin_slot(slot, ranges)
    }

    /// Warm these ranges of a volume up instead of what is left of an earlier warm-up.
    pub fn warm_up(
        &mut self,
        number: VolumeNumber,
        ranges: Vec<SectorRange>,
    ) -> Result<(), String> {
        let slot = self.open_slot(number)?;
        if !ranges.is_empty() && self.cache.stats().ssd_state == SsdState::Off {
            return Err(
                "this node has no SSD tier to warm up: set cache_total_size_mib and restart the daemon"
                    .to_owned(),
            );
        }
        self.step(slot, Event::WarmUp(ranges));
        Ok(())
    }

    /// Pin what the catalogue says of a volume that begins to open. What is refused now, since the tier has
    /// become smaller, shows.
    pub fn pin_at_opening(&mut self, slot: u32, ranges: Vec<SectorRange>) {
        let pinned = self.pin_slot(slot, ranges);
        if let (Err(why), Some(served)) = (pinned, self.volumes.get_mut(slot)) {
            tracing::warn!(volume = served.name, "nothing of it is pinned: {why}");
            served.pin_trouble = Some(why);
        }
    }

    fn pin_slot(&mut self, slot: u32, ranges: Vec<SectorRange>) -> Result<(), String> {
        let Some(served) = self.volumes.get_mut(slot) else {
            return Ok(());
        };
        let blocks: Vec<(u64, u64)> = ranges
            .iter()
            .map(|range| {
                let first = range.first_block();
                (first, first + range.block_count())
            })
            .collect();
        self.cache
            .may_pin(served.number.0, &blocks)
            .map_err(words)?;
        served.pin_trouble = None;
        self.step(slot, Event::Pin(ranges));
        Ok(())
    }
}
