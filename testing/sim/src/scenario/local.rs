//! Volumes in storage mode.

use fastrand::Rng;
use hdcs_core::base::limits::{BLOCK_SECTORS, SECTOR_BYTES};

use super::{LocalStoreScenario, Scenario, Stream, pick};

impl Scenario {
    /// A scenario of a seed in which volumes are in storage mode.
    pub fn draw_for_local_stores(seed: u64) -> Self {
        let mut scenario = Self::draw_without_local_stores(seed);
        scenario.draw_local_stores(&mut Stream::StorageModes.of(seed));
        scenario
    }

    /// Some of the volumes are in storage mode, without what has a world of its own for it.
    pub(super) fn draw_local_stores(&mut self, random: &mut Rng) {
        let of_both = random.u8(..3);
        for (index, volume) in self.volumes.iter_mut().enumerate() {
            if of_both == 1 && index == 0 && random.bool() {
                continue;
            }
            let sectors = volume.base.len() as u64 / BLOCK_SECTORS * BLOCK_SECTORS;
            volume.base.truncate(sectors as usize);
            volume.config.bytes = sectors * SECTOR_BYTES as u64;
            volume.local = Some(LocalStoreScenario {
                atomic: volume.config.backend_atomic,
                flush_every_blocks: pick(random, &[4, 30, 400, 1 << 20]),
                turn_blocks: pick(random, &[1, 3, 64]),
            });
            volume.config.backend_atomic = false;
        }
        self.faults.backend_fence = false;
        self.faults.log_rot = false;
        self.faults.log_death = false;
        self.faults.keep_one_in = 0;
        self.faults.log_write_one_in = 0;
        self.resizes = false;
        self.shrinks = false;
        self.origin = None;
        self.lost_logs.clear();
    }
}
