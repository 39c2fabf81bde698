//! Scenarios with clients that do not wait for answers.

use fastrand::Rng;
use hdcs_core::base::io::Nanos;
use hdcs_core::volume::{Persist, Policy};

use super::{Behaviour, Ending, Faults, Scenario, Stream, mix, pick};

/// Sectors of a request at most: with many unanswered, memory holds them.
const SECTORS_MAX: u64 = 64;

/// A client that sends at random times, whatever has been answered.
#[derive(Clone, Debug)]
pub struct OpenLoopScenario {
    /// What it asks; its depth means nothing.
    pub behaviour: Behaviour,
    /// Mean time between two arrivals.
    pub pause: Nanos,
    /// Requests that arrive at once at most.
    pub burst_max: usize,
    /// With so many unanswered it sends no more.
    pub unanswered_max: usize,
    /// Its requests for each one of the client that waits.
    pub share: u32,
}

impl OpenLoopScenario {
    fn draw(random: &mut Rng) -> Self {
        let mut behaviour = Behaviour::draw(random);
        behaviour.sectors_max = behaviour.sectors_max.min(SECTORS_MAX);
        Self {
            behaviour,
            pause: Nanos::from_micros(pick(random, &[50, 300, 2000, 20_000])),
            burst_max: pick(random, &[1, 1, 8, 32]),
            unanswered_max: pick(random, &[16, 64, 256]),
            share: pick(random, &[1, 1, 3]),
        }
    }
}

impl Scenario {
    /// Some volumes have such a client, at least one.
    pub(super) fn draw_open_loops(&mut self, random: &mut Rng) {
        let always = random.usize(..self.volumes.len());
        for (index, volume) in self.volumes.iter_mut().enumerate() {
            let client = OpenLoopScenario::draw(random);
            volume.open_loop = (index == always || random.bool()).then_some(client);
        }
    }

    /// A scenario of a seed in which little arrives, steadily, at a node where nothing fails: so nothing waits for long.
    pub fn draw_for_light_loads(seed: u64) -> Self {
        let mut scenario = Self::draw_for_volumes(seed, &mut Rng::with_seed(mix(seed)));
        let random = &mut Stream::LightLoads.of(seed);
        scenario.faults = Faults::default();
        scenario.endings = vec![Ending::Close { destage: false }];
        scenario.director_pause = Nanos::from_millis(3_600_000);
        scenario.requests = 300;
        scenario.pool_bytes = 64 << 20;
        scenario.reopens = false;
        scenario.shrinks = false;
        scenario.wait_max = Some(Nanos::from_millis(2500));
        scenario.cache_latency.slow_one_in = 0;
        scenario.cache.ssd_answer_max = Nanos::from_millis(5000);
        scenario.draw_open_loops(random);
        for volume in &mut scenario.volumes {
            volume.config.policy = Policy::WriteBack;
            volume.config.persist = pick(random, &[Persist::OnWrite, Persist::OnFlush]);
            volume.config.backend_answer_max = Nanos::from_millis(5000);
            volume.behaviour.sectors_max = volume.behaviour.sectors_max.min(SECTORS_MAX);
            for latency in [&mut volume.log_latency, &mut volume.backend_latency] {
                latency.slow_one_in = 0;
                latency.max = latency.max.min(Nanos::from_micros(1000));
                latency.min = latency.min.min(latency.max);
            }
            if let Some(client) = &mut volume.open_loop {
                client.pause = Nanos::from_millis(20);
                client.burst_max = 1;
                client.unanswered_max = 256;
                client.share = 3;
            }
        }
        scenario
    }
}
