//! Scenarios of logs that rot.

use hdcs_core::base::io::Nanos;

use super::{Ending, Faults, Rng, Scenario, Stream, mix, pick};

impl Scenario {
    /// A scenario of a seed in which logs come to rest before they rot.
    pub fn draw_for_rests(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let random = &mut random;
        let mut scenario = Self::draw_for_volumes(seed, random);
        scenario.draw_silence(random);
        scenario.faults = Faults::default();
        // It rots at rest alone.
        scenario.faults.log_rot = true;
        scenario.director_pause = Nanos::from_millis(3_600_000);
        scenario.endings = vec![Ending::Rest; 8];
        scenario.requests = 20;
        for volume in &mut scenario.volumes {
            volume.config.dirty_age_max = Nanos::from_millis(30_000);
        }
        scenario
    }

    /// A scenario of a seed in which logs rot under much dirty data, and are opened again.
    pub fn draw_for_damaged_logs(seed: u64) -> Self {
        let mut random = Stream::DamagedLogs.of(seed);
        let random = &mut random;
        let mut scenario = Self::draw_for_volumes(seed, random);
        scenario.draw_silence(random);
        scenario.faults = Faults {
            log_rot: true,
            ..Faults::default()
        };
        scenario.director_pause = Nanos::from_micros(300);
        scenario.requests = scenario.requests.max(100);
        let kill = |random: &mut Rng| Ending::Kill(random.u64(200..3000));
        let pairs = (0..4).map(|_| [kill(random), Ending::Close { destage: true }]);
        scenario.endings = pairs.flatten().collect();
        for volume in &mut scenario.volumes {
            volume.config.resident_bytes_max = 0;
            volume.config.dirty_age_max = Nanos::from_millis(pick(random, &[50, 30_000]));
            volume.behaviour.read_percent = volume.behaviour.read_percent.clamp(20, 60);
        }
        scenario
    }

    /// A scenario of a seed in which superblocks of logs rot while sizes change.
    pub fn draw_for_rotten_superblocks(seed: u64) -> Self {
        let mut scenario = Self::draw_for_damaged_logs(seed);
        scenario.faults.rots_superblocks = true;
        scenario.resizes = true;
        for volume in &mut scenario.volumes {
            volume.config.dirty_age_max = Nanos::from_millis(30_000);
        }
        scenario
    }

    /// A scenario of a seed in which logs rot at their ends, and are opened again and again before anything is written.
    pub fn draw_for_damaged_ends(seed: u64) -> Self {
        let mut random = Stream::DamagedEnds.of(seed);
        let random = &mut random;
        let mut scenario = Self::draw_for_damaged_logs(seed);
        scenario.requests = 20;
        let kill = |random: &mut Rng| Ending::Kill(random.u64(3..60));
        let rounds = (0..6).map(|_| [Ending::Close { destage: false }, kill(random), kill(random)]);
        scenario.endings = rounds.flatten().collect();
        for volume in &mut scenario.volumes {
            volume.config.dirty_age_max = Nanos::from_millis(30_000);
        }
        scenario
    }
}
