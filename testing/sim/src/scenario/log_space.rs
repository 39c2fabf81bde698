//! Scenarios of logs that share the space of their file system.

use hdcs_core::base::io::Nanos;

use super::{Ending, Faults, Rng, Scenario, Stream, pick};

impl Scenario {
    /// Logs are larger than what is prepared of them.
    pub(super) fn draw_log_space(&mut self, random: &mut Rng) {
        self.log_space = true;
        for volume in &mut self.volumes {
            volume.config.log_bytes += random.u64(1..=8) << 20;
        }
    }

    /// A scenario of a seed in which space of logs comes and goes all the time, and nothing fails.
    pub fn draw_for_sound_log_space(seed: u64) -> Self {
        let mut scenario = Self::draw_for_log_space(seed);
        scenario.faults = Faults::default();
        scenario
    }

    /// A scenario of a seed in which space of logs comes and goes all the time, and their newest superblocks rot as the
    /// node goes down.
    pub fn draw_for_log_space(seed: u64) -> Self {
        let mut scenario = Self::draw_for_rotten_superblocks(seed);
        let random = &mut Stream::SharedLogs.of(seed);
        scenario.draw_log_space(random);
        scenario.resizes = false;
        scenario.director_pause = Nanos::from_micros(200);
        let kill = |random: &mut Rng| Ending::Kill(random.u64(200..3000));
        scenario.endings = (0..6).map(|_| kill(random)).collect();
        for volume in &mut scenario.volumes {
            volume.config.dirty_age_max = Nanos::from_millis(pick(random, &[1, 5, 50]));
            volume.behaviour.sectors_max = volume.behaviour.sectors_max.max(512);
            volume.behaviour.read_percent = 20;
        }
        scenario
    }
}
