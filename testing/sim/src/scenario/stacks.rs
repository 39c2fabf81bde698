//! What lies between volumes and their backends: local stores and object volumes.

use fastrand::Rng;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{BLOCK_SECTORS, SECTOR_BYTES};

use super::{
    Ending, Faults, LocalStoreScenario, ObjectsScenario, Scenario, Stream, VolumeScenario, pick,
};

/// Sectors of the largest volume over objects, all of whose objects are read whenever it is compared.
const OBJECT_SECTORS_MAX: usize = 8192;

impl Scenario {
    /// A scenario of a seed in which volumes are in storage mode, over images alone.
    pub fn draw_for_local_stores(seed: u64) -> Self {
        let mut scenario = Self::draw_without_stacks(seed);
        let random = &mut Stream::Stacks.of(seed);
        for volume in &mut scenario.volumes {
            volume.add_local_store(random);
        }
        scenario.suit_stacks(random);
        scenario
    }

    /// The same in which the first volume loses its log after every ending.
    pub fn draw_for_lost_logs_of_stores(seed: u64) -> Self {
        let mut scenario = Self::draw_for_local_stores(seed);
        scenario.lost_logs = vec![true; scenario.endings.len()];
        scenario
    }

    /// A scenario of a seed in which volumes in storage mode become smaller and larger again, and crash meanwhile.
    pub fn draw_for_sizes_of_stores(seed: u64) -> Self {
        let mut scenario = Self::draw_for_local_stores(seed);
        scenario.resizes = true;
        scenario.faults = Faults::default();
        scenario.director_pause = Nanos::from_micros(300);
        scenario
    }

    /// A scenario of a seed in which volumes in storage mode are closed once all is tiered out, beside clients.
    pub fn draw_for_closes_of_stores(seed: u64) -> Self {
        let mut scenario = Self::draw_for_local_stores(seed);
        scenario.faults = Faults::default();
        scenario.reopens = true;
        scenario.endings = vec![Ending::Close { destage: false }; 2];
        scenario.requests = 100;
        for volume in &mut scenario.volumes {
            volume.behaviour.read_percent = volume.behaviour.read_percent.min(30);
        }
        scenario
    }

    /// A scenario of a seed in which snapshots of volumes in storage mode are made all the time, over images alone.
    pub fn draw_for_snapshots_of_stores(seed: u64) -> Self {
        let mut scenario = Self::draw_for_local_stores(seed);
        scenario.make_snapshots();
        scenario
    }

    /// The same of volumes over objects.
    pub fn draw_for_snapshots_of_objects(seed: u64) -> Self {
        let mut scenario = Self::draw_without_stacks(seed);
        let random = &mut Stream::Stacks.of(seed);
        for volume in &mut scenario.volumes {
            volume.add_objects(random);
        }
        scenario.suit_stacks(random);
        scenario.make_snapshots();
        scenario
    }

    fn make_snapshots(&mut self) {
        self.faults = Faults::default();
        self.director_pause = Nanos::from_millis(1);
        self.requests = 1000;
        for volume in &mut self.volumes {
            // So that there is always something to destage beside them, and they end before they are given up.
            volume.config.dirty_ratio_min = 0;
            volume.config.dirty_age_max = Nanos::from_millis(1);
            volume.behaviour.read_percent = volume.behaviour.read_percent.min(30);
            volume.behaviour.flush_one_in = 20;
            volume.backend_latency.max = Nanos::from_micros(100);
            volume.backend_latency.min = Nanos::from_micros(20);
            volume.backend_latency.slow_one_in = 0;
        }
    }

    /// The same, and volumes are left before a cut is done.
    pub fn draw_for_cut_short_sizes_of_stores(seed: u64) -> Self {
        let mut scenario = Self::draw_for_sizes_of_stores(seed);
        scenario.shrinks = true;
        scenario.endings = vec![Ending::Close { destage: false }; 4];
        scenario.requests = scenario.requests.min(100);
        scenario
    }

    /// A scenario of a seed in which local stores and object volumes lie below the volumes.
    pub fn draw_for_stacks(seed: u64) -> Self {
        let mut scenario = Self::draw_without_stacks(seed);
        scenario.draw_stacks(&mut Stream::Stacks.of(seed));
        scenario
    }

    /// Local stores and object volumes lie below some of the volumes.
    pub(super) fn draw_stacks(&mut self, random: &mut Rng) {
        for volume in &mut self.volumes {
            match random.u8(..8) {
                0..=2 => volume.add_local_store(random),
                3 | 4 => volume.add_objects(random),
                5 | 6 => {
                    volume.add_objects(random);
                    volume.add_local_store(random);
                }
                _ => {}
            }
        }
        self.suit_stacks(random);
    }

    /// Sizes change more often than elsewhere.
    fn suit_stacks(&mut self, random: &mut Rng) {
        self.resizes |= random.u8(..4) == 0 || self.shrinks;
    }
}

impl VolumeScenario {
    fn cut_to(&mut self, sectors: usize) {
        self.base.truncate(sectors);
        self.config.bytes = (sectors * SECTOR_BYTES) as u64;
    }

    fn add_objects(&mut self, random: &mut Rng) {
        self.cut_to(self.base.len().min(OBJECT_SECTORS_MAX));
        self.config.backend_atomic = true;
        self.objects = Some(ObjectsScenario {
            page_blocks: pick(random, &[8, 64, 1024]),
            batch_blocks: pick(random, &[8, 16, 64]),
            map_cache_bytes: pick(random, &[0, 4096, 1 << 20]),
            puts: random.usize(1..=4),
            gets: random.usize(1..=8),
        });
    }

    fn add_local_store(&mut self, random: &mut Rng) {
        let blocks = self.base.len() as u64 / BLOCK_SECTORS;
        self.cut_to((blocks * BLOCK_SECTORS) as usize);
        self.local = Some(LocalStoreScenario {
            is_atomic: self.config.backend_atomic,
            flush_every_blocks: pick(random, &[4, 30, 400, 1 << 20]),
            turn_blocks: pick(random, &[1, 3, 64]),
        });
        self.config.backend_atomic = false;
    }
}
