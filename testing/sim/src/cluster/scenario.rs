//! What a seed decides before anything happens.

use fastrand::Rng;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{BLOCK_BYTES, LOG_BYTES_MIN, SECTOR_BYTES};
use hdcs_core::format::LOG_HEADER_BLOCKS;
use hdcs_core::replication::participant::Times;
use hdcs_core::replication::record::AckLevel;
use hdcs_core::volume::{Discard, LogFailure, Persist, Policy, VolumeConfig, WhenFull};

use super::cipher::LogCipher;
use crate::content::mix;
use crate::engine::Latency;
use crate::lz4::LZ4;
use crate::scenario::draw_behaviour;
use crate::workload::Behaviour;

/// Requests that the client sends at once, at most.
pub(super) const ASKS_AT_ONCE_MAX: u64 = 4;

/// Blocks of the ring.
pub(super) const RING_BLOCKS: u64 = LOG_BYTES_MIN / BLOCK_BYTES as u64 - LOG_HEADER_BLOCKS;
/// Blocks that are left of the lap in which a log begins, if it does not begin with one.
const BLOCKS_BEFORE_LAP_MAX: u64 = 400;

/// What the clock of a node does while the node stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StandingClocks {
    /// It goes on.
    GoOn,
    /// It may stand still, too. Then a lease means nothing, and none is checked.
    MayStop,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) nodes: usize,
    /// How many members there should be; the other nodes stand by.
    pub(super) replicas: usize,
    pub(super) ack: AckLevel,
    /// There are as many members as there should be from the start; else the first one is, and others join.
    pub(super) is_complete: bool,
    /// An older owner of the backend is fenced; else there is a lock.
    pub(super) fences: bool,
    pub(super) config: VolumeConfig,
    pub(super) behaviour: Behaviour,
    pub(super) times: Times,
    /// Nodes' clocks run at one of these rates, in thousandths.
    pub(super) rates: &'static [u64],
    pub(super) clocks: StandingClocks,
    pub(super) disk: Latency,
    pub(super) link: Latency,
    pub(super) store: Latency,
    pub(super) backend: Latency,
    /// Messages to a member that a link takes at once.
    pub(super) window: usize,
    /// For how long things go wrong, and how much time is between two of them on average.
    pub(super) trouble: Nanos,
    pub(super) fault_pause: Nanos,
    /// Requests of the client meanwhile.
    pub(super) asks: u32,
    /// One ask of the store in so many ends in an unknown way.
    pub(super) unknown_one_in: u32,
    /// A manager acts for no reason once in so many of its looks.
    pub(super) whim_one_in: u32,
    /// Whether something happens to media.
    pub(super) hurts_media: bool,
    /// Time between two groups that are asked for, at most, if anybody asks for others.
    pub(super) shape_pause: Option<Nanos>,
    /// One message in so many comes twice or in another order; 0 for none.
    pub(super) unruly_one_in: u32,
    /// One message in so many is lost, and the connection stays; 0 for none.
    pub(super) lost_one_in: u32,
    /// What encrypts the log, in some worlds.
    pub(super) cipher: LogCipher,
    /// Position at which the log begins: near the end of a lap, so that runs get to the next one, or 0.
    pub(super) first_tail: u64,
}

fn pick<T: Copy>(random: &mut Rng, choices: &[T]) -> T {
    choices[random.usize(..choices.len())]
}

fn latency(random: &mut Rng, micros: &[u64]) -> Latency {
    let max = pick(random, micros);
    Latency {
        min: Nanos::from_micros(max / 10 + 1),
        max: Nanos::from_micros(max),
        slow_one_in: pick(random, &[0, 30, 200]),
        slow: Nanos::from_micros(max * 20),
    }
}

fn volume(random: &mut Rng) -> VolumeConfig {
    let log_bytes = LOG_BYTES_MIN;
    let mut config = VolumeConfig {
        number: super::client::VOLUME,
        uuid: [7; 16],
        bytes: pick(random, &[64 << 10, 256 << 10, 1 << 20, 4 << 20]),
        log_bytes,
        policy: Policy::WriteBack,
        persist: Persist::OnWrite,
        compression: None,
        codec: &LZ4,
        when_full: WhenFull::Wait,
        unpersisted_bytes_max: 0,
        unpersisted_age_max: Nanos(0),
        dirty_age_max: Nanos(0),
        dirty_ratio_min: 0,
        dirty_ratio_max: 0,
        destage_depth_max: 1,
        sequential_cutoff_bytes: 0,
        promote_hits: 1,
        fill_rate_max_bytes_s: 64 << 20,
        read_ahead_bytes_max: 0,
        log_entries_max: log_bytes / BLOCK_BYTES as u64,
        resident_bytes_max: 0,
        backend_extents: false,
        backend_atomic: false,
        log_failure: LogFailure::ReadOnly,
        discard: Discard::Pass,
        backend_answer_max: Nanos::from_millis(1 << 40),
        log_answer_max: Nanos(u64::MAX),
    };
    draw_behaviour(random, &mut config);
    config.when_full = WhenFull::Wait;
    if random.bool() {
        config.persist = Persist::OnWrite;
    }
    // Of a copy, so that what else a seed draws is what it always was.
    config.policy = pick(
        &mut random.clone(),
        &[
            Policy::WriteBack,
            Policy::WriteBack,
            Policy::WriteBack,
            Policy::WriteBack,
            Policy::WriteBack,
            Policy::WriteThrough,
            Policy::WriteAround,
            Policy::PassThrough,
        ],
    );
    config
}

/// Rates of clocks, by how many thousandths one may be faster than another, and how long leases are then: whoever waits for
/// one with clocks that differ so much waits many times as long.
const DRIFTS: [(u32, &[u64], &[u64]); 2] = [
    (100, &[954, 977, 1000, 1000, 1024, 1048], &[200, 1000, 4000]),
    (3000, &[500, 900, 1000, 1000, 1100, 2000], &[100, 200]),
];

impl Scenario {
    /// The longest pause of the client, so that it goes on for as long as things go wrong.
    pub(super) fn client_pause(&self) -> Nanos {
        Nanos(self.trouble.0 * ASKS_AT_ONCE_MAX / u64::from(self.asks))
    }

    /// Whether a node is a member from the start.
    pub(super) fn is_member(&self, node: usize) -> bool {
        node == 0 || (self.is_complete && node < self.replicas)
    }

    /// That of a seed.
    pub(super) fn new(seed: u64) -> Self {
        let random = &mut Rng::with_seed(mix(seed ^ mix(0xc1)));
        let config = volume(random);
        let mut behaviour = Behaviour::draw(random);
        behaviour.depth = behaviour.depth.min(16);
        behaviour.sectors_max = behaviour.sectors_max.min(pick(random, &[16, 64, 256]));
        let sectors = config.bytes / SECTOR_BYTES as u64;
        behaviour.sectors_max = behaviour.sectors_max.min(sectors);
        let (drift_permille, rates, leases) = pick(random, &DRIFTS);
        let millis = |random: &mut Rng, choices: &[u64]| Nanos::from_millis(pick(random, choices));
        let (nodes, replicas) = pick(
            random,
            &[
                (3, 3),
                (3, 3),
                (3, 3),
                (2, 2),
                (3, 2),
                (4, 3),
                (5, 3),
                (5, 5),
                (7, 3),
            ],
        );
        Self {
            nodes,
            replicas,
            ack: pick(
                random,
                &[
                    AckLevel::Majority,
                    AckLevel::Majority,
                    AckLevel::All,
                    AckLevel::All,
                    AckLevel::One,
                ],
            ),
            is_complete: random.bool(),
            fences: random.bool(),
            config,
            behaviour,
            times: Times {
                member_max: millis(random, &[200, 500, 2000]),
                joiner_max: millis(random, &[2000, 10_000]),
                gathering_max: millis(random, &[50, 200, 1000]),
                levelling_max: millis(random, &[500, 2000, 5000]),
                lease: millis(random, leases),
                drift_permille,
            },
            rates,
            clocks: if random.u8(..4) > 0 {
                StandingClocks::GoOn
            } else {
                StandingClocks::MayStop
            },
            disk: latency(random, &[100, 500, 4000]),
            link: latency(random, &[50, 500, 4000]),
            store: latency(random, &[2000, 20_000]),
            backend: latency(random, &[200, 2000, 20_000]),
            window: pick(random, &[2, 16, 64]),
            trouble: millis(random, &[3000, 8000, 15_000]),
            fault_pause: millis(random, &[150, 400, 1000]),
            asks: pick(random, &[200, 500, 1500]),
            unknown_one_in: pick(random, &[0, 3, 10]),
            whim_one_in: pick(random, &[0, 10, 50]),
            hurts_media: random.u8(..4) > 0,
            shape_pause: Some(millis(random, &[500, 2000, 6000])).filter(|_| random.bool()),
            unruly_one_in: pick(random, &[0, 0, 0, 0, 20, 100, 500]),
            cipher: LogCipher::new(seed, random.u8(..3) == 0),
            lost_one_in: pick(random, &[0, 0, 0, 0, 20, 100, 500]),
            first_tail: if random.bool() {
                RING_BLOCKS - random.u64(1..BLOCKS_BEFORE_LAP_MAX)
            } else {
                0
            },
        }
    }
}
