//! Everything that a seed decides before a run begins.

use fastrand::Rng;
use hdcs_core::base::codec::Method;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{
    BLOCK_BYTES, CACHE_BYTES_MIN, LOG_BYTES_MIN, SECTOR_BYTES, SEGMENT_BYTES,
};
use hdcs_core::cache::{CacheConfig, FillMarks, SsdConfig, Tiering};
use hdcs_core::volume::{Discard, LogFailure, Persist, Policy, VolumeConfig, WhenFull};

use crate::content::{Content, mix};
use crate::disk::Lie;
use crate::engine::Latency;
use crate::lz4::LZ4;
use crate::workload::Behaviour;

mod clones;
mod log_space;
mod open_loops;
mod rots;
mod stacks;
mod streams;

pub use open_loops::OpenLoopScenario;
pub use streams::Stream;

/// How one opening of a node ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Power is cut after so many steps, wherever that is.
    PowerCut(u64),
    /// The process is killed after so many steps; devices keep their caches.
    Kill(u64),
    /// Once the clients have had what they asked for, nobody asks for anything for a while. Then the end of a log rots, and
    /// the process is killed or power is cut.
    Rest,
    /// The volumes are closed, destaged or not.
    Close {
        /// Whether the backends must hold everything first.
        destage: bool,
    },
}

/// What goes wrong, beside crashes. "One in" is per operation, 0 for never.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Faults {
    /// Log writes that fail.
    pub log_write_one_in: u32,
    /// Log reads that fail.
    pub log_read_one_in: u32,
    /// Bits of the logs rot.
    pub log_rot: bool,
    /// All that rots of it is its newest superblock, as a node goes down.
    pub rots_superblocks: bool,
    /// Reads of the log that bring wrong bytes, once.
    pub log_spoils_one_in: u32,
    /// The same while an opening replays it.
    pub replay_spoils_one_in: u32,
    /// A log's device dies, until the node starts again.
    pub log_death: bool,
    /// Superblocks that cannot be kept beside the log's device.
    pub keep_one_in: u32,
    /// Cache device operations that fail.
    pub cache_one_in: u32,
    /// The cache device dies.
    pub cache_death: bool,
    /// Bits of the cache device rot.
    pub cache_rot: bool,
    /// The cache device lies once, after so many operations of the kind.
    pub cache_lie: Option<(Lie, u64)>,
    /// The first volume's log device does. No scenario has it of itself.
    pub log_lie: Option<(Lie, u64)>,
    /// Backend operations that fail.
    pub backend_one_in: u32,
    /// Backend writes find no space, for a while.
    pub backend_full: bool,
    /// The backend is not reachable, for a while.
    pub backend_outage: bool,
    /// The backend's host loses power.
    pub backend_power: bool,
    /// The cache device is another, empty one after a crash.
    pub cache_wiped: bool,
    /// The cache device does not answer, for a while or for good.
    pub cache_hang: bool,
    /// The backend does not answer, for a while.
    pub backend_hang: bool,
    /// The logs' devices do not answer, for a while or until all is well.
    pub log_hang: bool,
    /// Another owner takes the backend over.
    pub backend_fence: bool,
}

impl Faults {
    /// Whether what the cache device holds may become something else.
    pub const fn spoil_cache(&self) -> bool {
        self.cache_rot || self.cache_lie.is_some()
    }
}

/// A lie that a device tells in a run of so many power cuts, and when.
fn draw_lie(random: &mut Rng, cuts: u64) -> (Lie, u64) {
    let lie = pick(random, &Lie::ALL);
    let skip = match lie {
        Lie::NewestWriteLost | Lie::DamagedNeighbour => random.u64(..cuts.max(1)),
        _ => {
            let scale = pick(random, &[3, 30, 300, 3000]);
            random.u64(..scale)
        }
    };
    (lie, skip)
}

/// A local store between a volume and its backend.
#[derive(Clone, Copy, Debug)]
pub struct LocalStoreScenario {
    /// Whether what is written to the backend shows at a flush only.
    pub is_atomic: bool,
    /// A tier flushes the backend after so many blocks.
    pub flush_every_blocks: u64,
    /// Blocks that become zero in one turn at most.
    pub turn_blocks: u64,
}

/// An object volume below a volume or its local store.
#[derive(Clone, Copy, Debug)]
pub struct ObjectsScenario {
    /// Blocks of a page of its map.
    pub page_blocks: u32,
    /// Blocks that a data object gathers.
    pub batch_blocks: usize,
    /// Memory for pages of its map.
    pub map_cache_bytes: usize,
    /// Puts of data in flight at most.
    pub puts: usize,
    /// Gets in flight at most.
    pub gets: usize,
}

/// One volume of a run.
#[derive(Clone, Debug)]
pub struct VolumeScenario {
    /// How it is configured at first.
    pub config: VolumeConfig,
    /// What the backend holds at first.
    pub base: Vec<Content>,
    /// What its client does.
    pub behaviour: Behaviour,
    /// The client beside that one that does not wait for answers, if there is one.
    pub open_loop: Option<OpenLoopScenario>,
    /// How fast its log is.
    pub log_latency: Latency,
    /// How fast its backend is.
    pub backend_latency: Latency,
    /// Its local store, in storage mode.
    pub local: Option<LocalStoreScenario>,
    /// The object volume that it lies over.
    pub objects: Option<ObjectsScenario>,
}

/// Everything about one run.
#[expect(clippy::struct_excessive_bools, reason = "each is drawn on its own")]
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Where everything comes from.
    pub seed: u64,
    /// The volumes.
    pub volumes: Vec<VolumeScenario>,
    /// The read cache they share.
    pub cache: CacheConfig,
    /// How fast the cache device is.
    pub cache_latency: Latency,
    /// The buffers they share.
    pub pool_bytes: usize,
    /// What goes wrong.
    pub faults: Faults,
    /// How each opening ends; after the last, everything is verified.
    pub endings: Vec<Ending>,
    /// Requests of each client in each opening.
    pub requests: u32,
    /// Events of one batch at most.
    pub batch: usize,
    /// Mean time between what the director does.
    pub director_pause: Nanos,
    /// Before the end of an opening, a volume is closed and opened again beside the cache.
    pub reopens: bool,
    /// Before a close, volumes are shrunk and grown again.
    pub shrinks: bool,
    /// Volumes become smaller and larger while clients go on.
    pub resizes: bool,
    /// A power cut takes the backends' hosts as well.
    pub shared_power: bool,
    /// Policies change.
    pub switches: bool,
    /// Volumes are scrubbed,
    pub scrubs: bool,
    /// in the end once the SSD tier has all of them that it takes.
    pub fills_before_scrub: bool,
    /// Compression of the logs is turned on or off before every opening.
    pub flips_compression: bool,
    /// After which endings the first volume's log is lost.
    pub lost_logs: Vec<bool>,
    /// What the volumes have begun as, if they are clones.
    pub origin: Option<Vec<Content>>,
    /// Of every volume, the share in percent of its sectors that is pinned: from where to where.
    pub pins: Option<(u64, u64)>,
    /// Somebody changes what is pinned.
    pub repins: bool,
    /// Volumes are warmed up from what was hot before.
    pub warm_ups: bool,
    /// In the end, lines that the SSD tier has compressed rot.
    pub packed_rots: bool,
    /// Logs are larger than what is prepared of them, and that changes.
    pub log_space: bool,
    /// Nothing fails, and load is so light that no request waits for longer than this.
    pub wait_max: Option<Nanos>,
}

fn pick<T: Copy>(random: &mut Rng, of: &[T]) -> T {
    of[random.usize(..of.len())]
}

fn latency(random: &mut Rng, micros: &[u64]) -> Latency {
    let max = pick(random, micros);
    Latency {
        min: Nanos::from_micros(max / pick(random, &[2, 10, 100])),
        max: Nanos::from_micros(max),
        slow_one_in: pick(random, &[0, 0, 20, 500]),
        slow: Nanos::from_micros(max * pick(random, &[5, 50])),
    }
}

/// A configuration that a volume may have; identity and sizes are given.
pub fn draw_behaviour(random: &mut Rng, config: &mut VolumeConfig) {
    config.persist = pick(random, &[Persist::OnWrite, Persist::OnFlush, Persist::Auto]);
    config.when_full = pick(random, &[WhenFull::Wait, WhenFull::Error]);
    config.unpersisted_bytes_max = pick(random, &[64 << 10, 1 << 20, 8 << 20]);
    config.unpersisted_age_max = Nanos::from_millis(pick(random, &[1, 20, 1000]));
    config.dirty_age_max = Nanos::from_millis(pick(random, &[1, 50, 1000, 30_000]));
    config.dirty_ratio_min = pick(random, &[0, 5, 20]);
    config.dirty_ratio_max = pick(random, &[30, 60, 80]);
    config.destage_depth_max = pick(random, &[1, 4, 16]);
    config.sequential_cutoff_bytes = pick(random, &[64 << 10, 1 << 20, 1 << 40]);
    // Of a copy, so that what else a seed draws is what it always was.
    config.promote_hits = pick(&mut random.clone(), &[1, 1, 2, 4]);
    let methods = [None, None, Some(Method::Lz4), Some(Method::Zstd)];
    config.compression = pick(&mut Rng::with_seed(mix(random.clone().u64(..))), &methods);
    let per_block = pick(&mut Rng::with_seed(mix(random.clone().u64(..))), &[1, 2, 4]);
    config.log_entries_max = config.log_bytes / BLOCK_BYTES as u64 * per_block;
    config.read_ahead_bytes_max = pick(random, &[0, 64 << 10, 256 << 10, 1 << 20]);
    config.resident_bytes_max = pick(random, &[0, 64 << 10, 1 << 20, 8 << 20]);
}

fn draw_base(random: &mut Rng, sectors: u64) -> Vec<Content> {
    let mut base = Vec::with_capacity(sectors as usize);
    let empty = random.u32(..3) == 0;
    // Few patterns make equal lines, many make different ones.
    let patterns = pick(random, &[4, 1 << 20]);
    while base.len() < sectors as usize {
        let content = if empty || random.u32(..4) == 0 {
            Content::Zero
        } else {
            Content::Pattern(random.u32(..patterns))
        };
        let run = pick(random, &[1, 8, 32, 128, 1024]).min(sectors as usize - base.len());
        base.extend(std::iter::repeat_n(content, run));
    }
    base
}

fn draw_faults(random: &mut Rng) -> Faults {
    let mut faults = Faults {
        cache_wiped: random.u32(..10) == 0,
        cache_rot: random.u32(..4) == 0,
        ..Faults::default()
    };
    if random.u32(..100) < 45 {
        return faults;
    }
    let one_in = [30, 200, 1000];
    let maybe = |random: &mut Rng| {
        let yes = random.u32(..4) == 0;
        if yes { pick(random, &one_in) } else { 0 }
    };
    faults.log_write_one_in = maybe(random) * 5;
    faults.log_read_one_in = maybe(random);
    faults.cache_one_in = maybe(random);
    faults.backend_one_in = maybe(random);
    faults.log_rot = random.u32(..6) == 0;
    faults.cache_death = random.u32(..10) == 0;
    faults.backend_full = random.u32(..5) == 0;
    faults.backend_outage = random.u32(..4) == 0;
    faults.backend_power = random.u32(..4) == 0;
    faults
}

fn draw_ending(random: &mut Rng, scales: &[u64]) -> Ending {
    // Often soon, so that recovery itself is hit; sometimes late.
    let scale = pick(random, scales);
    let steps = random.u64(..scale);
    match random.u8(..10) {
        0..=4 => Ending::PowerCut(steps),
        5..=6 => Ending::Kill(steps),
        _ => Ending::Close {
            destage: random.bool(),
        },
    }
}

impl Scenario {
    /// Memory that its volumes share for the indexes of their logs, beyond the least of each. What else a seed draws is
    /// what it always was.
    pub fn index_bytes(&self) -> u64 {
        let mut random = Rng::with_seed(mix(self.seed ^ 0x0069_6e64_6578));
        pick(&mut random, &[u64::MAX, u64::MAX, 0, 32 << 10, 256 << 10])
    }

    /// The scenario of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut scenario = Self::draw_without_stacks(seed);
        let random = &mut Stream::Stacks.of(seed);
        if random.u32(..6) == 0 {
            scenario.draw_stacks(random);
        }
        let random = &mut Stream::LogSpace.of(seed);
        if random.u32(..3) == 0 {
            scenario.draw_log_space(random);
        }
        scenario
    }

    /// The same with nothing between volumes and their backends.
    pub fn draw_without_stacks(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let random = &mut random;
        let mut scenario = if random.u32(..6) == 0 {
            Self::draw_for_cache(seed, random)
        } else {
            Self::draw_for_volumes(seed, random)
        };
        scenario.draw_silence(&mut Stream::Silence.of(seed));
        let random = &mut Stream::LostLogs.of(seed);
        let loses = random.u32(..5) == 0;
        let endings = scenario.endings.iter();
        scenario.lost_logs = endings.map(|_| loses && random.bool()).collect();
        let random = &mut Stream::Policies.of(seed);
        if random.u32(..3) == 0 {
            scenario.draw_policies(random);
        }
        let random = &mut Stream::Clones.of(seed);
        if random.u32(..6) == 0 {
            scenario.make_clones(random);
        }
        let random = &mut Stream::PastLog.of(seed);
        if random.u32(..12) == 0 {
            scenario.crash_past_log(random);
        }
        let random = &mut Stream::Scrubs.of(seed);
        scenario.scrubs = random.u32(..3) == 0;
        for volume in &mut scenario.volumes {
            if random.u32(..6) == 0 {
                volume.config.discard = Discard::Ignore;
            }
        }
        let random = &mut Stream::Pins.of(seed);
        if random.u32(..4) == 0 {
            let first = random.u64(..100);
            scenario.pins = Some((first, random.u64(first..=100)));
        }
        let random = &mut Stream::WarmUps.of(seed);
        scenario.warm_ups = random.u32(..3) == 0;
        let random = &mut Stream::FailedLogs.of(seed);
        if random.u32(..4) == 0 {
            scenario.fail_logs(random);
        }
        if random.u32(..12) == 0 {
            scenario.flip_compression(random);
        }
        let random = &mut Stream::FailedFlushes.of(seed);
        if random.u32(..12) == 0 {
            scenario.fail_flushes(random);
        }
        let random = &mut Stream::SpoiledReads.of(seed);
        // Where rot is met as well, it could be taken for what has passed.
        if random.u32(..5) == 0 && !scenario.faults.log_rot {
            scenario.faults.log_spoils_one_in = pick(random, &[3, 20]);
        }
        let one_in = |stream: Stream, count| stream.of(seed).u32(..count) == 0;
        scenario.resizes = one_in(Stream::Resizes, 6);
        scenario.repins = one_in(Stream::Repins, 6);
        scenario.packed_rots = one_in(Stream::PackedRots, 3);
        scenario.fills_before_scrub = one_in(Stream::FillsBeforeScrub, 2);
        let random = &mut Stream::CacheLies.of(seed);
        // What clones share is looked at where nothing spoils it.
        if random.u32(..4) == 0 && scenario.origin.is_none() {
            scenario.faults.cache_lie = Some(draw_lie(random, 3));
        }
        let random = &mut Stream::SilentLogs.of(seed);
        if random.u32(..8) == 0 {
            scenario.hang_logs(random);
        }
        let random = &mut Stream::SpoiledReplays.of(seed);
        if random.u32(..8) == 0 && !scenario.faults.log_rot {
            scenario.faults.replay_spoils_one_in = pick(random, &[1, 3]);
        }
        let random = &mut Stream::Rests.of(seed);
        for ending in &mut scenario.endings {
            if scenario.faults.log_rot && random.u32(..3) == 0 {
                *ending = Ending::Rest;
            }
        }
        let random = &mut Stream::OpenLoops.of(seed);
        if random.u32(..4) == 0 {
            scenario.draw_open_loops(random);
        }
        scenario
    }

    /// A scenario of a seed in which logs do not answer, whoever waits is told of an error, and a volume is closed and
    /// opened again beside that.
    pub fn draw_for_silent_logs(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let random = &mut random;
        let mut scenario = Self::draw_for_volumes(seed, random);
        scenario.draw_silence(random);
        scenario.faults = Faults::default();
        scenario.hang_logs(random);
        let ending = |random: &mut Rng| draw_ending(random, &[2000, 20_000]);
        scenario.endings = (0..4).map(|_| ending(random)).collect();
        scenario.reopens = true;
        scenario.shrinks = false;
        scenario.director_pause = Nanos::from_millis(5);
        for volume in &mut scenario.volumes {
            volume.config.log_answer_max = Nanos::from_millis(200);
            volume.config.when_full = WhenFull::Error;
        }
        scenario
    }

    fn hang_logs(&mut self, random: &mut Rng) {
        self.faults.log_hang = true;
        for volume in &mut self.volumes {
            let millis = pick(random, &[200, 1000, 5000]);
            volume.config.log_answer_max = Nanos::from_millis(millis);
        }
    }

    /// A scenario of a seed in which the device of the cache lies once, and what comes back from it after power cuts
    /// matters.
    pub fn draw_for_cache_lies(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let random = &mut random;
        let mut scenario = Self::draw_for_cache(seed, random);
        scenario.draw_silence(random);
        scenario.faults.cache_hang = false;
        scenario.faults.cache_rot = false;
        scenario.faults.backend_fence = false;
        let cut = |random: &mut Rng| Ending::PowerCut(random.u64(500..5000));
        scenario.endings = (0..4).map(|_| cut(random)).collect();
        scenario.faults.cache_lie = Some(draw_lie(random, 4));
        if random.u32(..3) == 0 {
            scenario.draw_policies(random);
        }
        if random.bool() {
            // Another volume shares the cache, and what one is told is none of the other's business.
            let mut second = scenario.volumes[0].clone();
            second.config.number = 2;
            second.config.uuid = [2; 16];
            second.behaviour = Behaviour::draw(random);
            scenario.volumes.push(second);
        }
        scenario
    }

    /// The same, and the lie is that the newest durable write is gone after a power cut.
    pub fn draw_for_undone_writes(seed: u64) -> Self {
        let mut scenario = Self::draw_for_cache_lies(seed);
        let random = &mut Stream::UndoneWrites.of(seed);
        // Not before there are lines on the device.
        scenario.faults.cache_lie = Some((Lie::NewestWriteLost, random.u64(1..4)));
        scenario.faults.cache_wiped = false;
        scenario.switches = false;
        scenario.requests = 1000;
        for volume in &mut scenario.volumes {
            volume.config.policy = Policy::WriteBack;
            volume.behaviour.read_percent = random.u32(50..80);
            volume.behaviour.sectors_max = 64;
            volume.behaviour.hot_percent = 0;
        }
        scenario
    }

    /// Compression comes and goes, with crashes in between: logs hold both kinds of entries.
    fn flip_compression(&mut self, random: &mut Rng) {
        self.flips_compression = true;
        for volume in &mut self.volumes {
            volume.config.compression = Some(Method::Lz4);
            volume.behaviour.read_percent = volume.behaviour.read_percent.min(30);
        }
        let kill = |random: &mut Rng| Ending::Kill(random.u64(3..150));
        let pairs = (0..6).map(|_| [Ending::Close { destage: true }, kill(random)]);
        self.endings = pairs.flatten().collect();
        self.requests = self.requests.min(100);
        self.reopens = false;
        self.shrinks = false;
        self.lost_logs.clear();
    }

    /// A scenario of a seed in which a small hot volume goes on without a log whose device dies, and crashes
    /// after that.
    pub fn draw_for_failed_logs(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let random = &mut random;
        let mut scenario = Self::draw_for_cache(seed, random);
        scenario.draw_silence(random);
        scenario.faults.backend_fence = false;
        scenario.fail_logs(random);
        scenario.faults.log_death = true;
        scenario.faults.keep_one_in = 0;
        scenario.shared_power = false;
        let volume = &mut scenario.volumes[0];
        volume.behaviour.read_percent = random.u32(5..30);
        volume.config.log_failure = LogFailure::PassThrough;
        volume.config.backend_atomic = false;
        let ending = |random: &mut Rng| Ending::Kill(random.u64(200..4000));
        scenario.endings = (0..5).map(|_| ending(random)).collect();
        scenario
    }

    fn fail_logs(&mut self, random: &mut Rng) {
        self.faults.log_death = random.u8(..4) > 0;
        self.faults.keep_one_in = pick(random, &[0, 0, 0, 5]);
        if random.u8(..3) == 0 {
            self.faults.log_write_one_in = pick(random, &[50, 500]);
        }
        for volume in &mut self.volumes {
            if random.u8(..8) > 0 {
                volume.config.log_failure = LogFailure::PassThrough;
            }
        }
    }

    /// A scenario of a seed in which a small hot volume loses its log after every ending, and what the
    /// cache has kept matters.
    pub fn draw_for_lost_logs(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let mut scenario = Self::draw_for_cache(seed, &mut random);
        scenario.draw_silence(&mut random);
        scenario.lost_logs = vec![true; scenario.endings.len()];
        scenario
    }

    /// A scenario of a seed in which the node crashes again and again while writes go past the log, over
    /// backends that stay.
    pub fn draw_for_direct_crashes(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let random = &mut random;
        let mut scenario = Self::draw_for_volumes(seed, random);
        scenario.draw_silence(random);
        scenario.crash_past_log(random);
        scenario
    }

    /// The same of a small hot volume, of which the cache on SSD holds much.
    pub fn draw_for_cached_direct_crashes(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let random = &mut random;
        let mut scenario = Self::draw_for_cache(seed, random);
        scenario.draw_silence(random);
        scenario.faults.cache_hang = false;
        scenario.crash_past_log(random);
        scenario
    }

    /// A scenario of a seed in which logs are read much, and now and then a read brings wrong bytes.
    pub fn draw_for_spoiled_reads(seed: u64) -> Self {
        let mut scenario = Self::draw(seed);
        scenario.faults.log_rot = false;
        scenario.faults.log_spoils_one_in = 3;
        for volume in &mut scenario.volumes {
            volume.config.resident_bytes_max = 0;
        }
        scenario
    }

    /// A scenario of a seed in which logs are replayed much, and some of the reads for it bring wrong bytes.
    pub fn draw_for_spoiled_replays(seed: u64) -> Self {
        let mut random = Stream::SpoiledReplays.of(seed);
        let random = &mut random;
        let mut scenario = Self::draw_for_volumes(seed, random);
        scenario.draw_silence(random);
        scenario.faults = Faults {
            replay_spoils_one_in: pick(random, &[1, 2]),
            ..Faults::default()
        };
        let cut = |random: &mut Rng| Ending::PowerCut(random.u64(50..1500));
        scenario.endings = (0..5).map(|_| cut(random)).collect();
        scenario
    }

    /// A scenario of a seed in which a block is rewritten all the time.
    pub fn draw_for_hot_blocks(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let random = &mut random;
        let mut scenario = Self::draw_for_volumes(seed, random);
        scenario.draw_silence(random);
        scenario.faults = Faults::default();
        scenario.endings = vec![Ending::Close { destage: false }];
        scenario.requests = 1000;
        scenario.pool_bytes = 64 << 20;
        for volume in &mut scenario.volumes {
            volume.base.truncate(8);
            volume.base.resize(8, Content::Zero);
            volume.config.bytes = BLOCK_BYTES as u64;
            volume.config.persist = Persist::OnWrite;
            volume.behaviour.depth = pick(random, &[4, 8, 16]);
            volume.behaviour.read_percent = 5;
            volume.behaviour.flush_one_in = 0;
            volume.behaviour.odd_one_in = 100;
        }
        scenario
    }

    /// A scenario of a seed in which a small volume that is cached much becomes smaller and larger again.
    pub fn draw_for_cuts(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let mut scenario = Self::draw_for_cache(seed, &mut random);
        scenario.draw_silence(&mut random);
        scenario.faults = Faults::default();
        scenario.resizes = true;
        scenario
    }

    /// A scenario of a seed in which a small volume is scrubbed that is read from the SSD tier.
    pub fn draw_for_scrubs(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let mut scenario = Self::draw_for_cache(seed, &mut random);
        scenario.draw_silence(&mut random);
        scenario.scrubs = true;
        scenario.fills_before_scrub = true;
        scenario
    }

    /// A scenario of a seed in which flushes fail beside one another.
    pub fn draw_for_failing_flushes(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let random = &mut random;
        let mut scenario = Self::draw_for_volumes(seed, random);
        scenario.draw_silence(random);
        scenario.fail_flushes(random);
        scenario
    }

    /// Over backends that are slow now and then and fail, flushes of clients for what went past the log last as
    /// long as generations of destage, with theirs.
    fn fail_flushes(&mut self, random: &mut Rng) {
        self.draw_policies(random);
        self.faults.backend_one_in = pick(random, &[10, 30]);
        for volume in &mut self.volumes {
            volume.config.backend_atomic = false;
            volume.config.dirty_age_max = Nanos::from_millis(1);
            volume.behaviour.flush_one_in = pick(random, &[4, 20]);
            volume.backend_latency.slow_one_in = 4;
        }
    }

    fn crash_past_log(&mut self, random: &mut Rng) {
        self.draw_policies(random);
        self.shared_power = false;
        for volume in &mut self.volumes {
            volume.config.backend_atomic = false;
        }
        // After one that comes late, one that comes before the next opening has flushed anything.
        let late = |random: &mut Rng| Ending::Kill(random.u64(50..1500));
        let soon = |random: &mut Rng| Ending::Kill(random.u64(..50));
        let pairs = (0..4).map(|_| [late(random), soon(random)]);
        self.endings = pairs.flatten().collect();
    }

    /// Policies change, and need not begin with write-back.
    pub fn draw_policies(&mut self, random: &mut Rng) {
        self.switches = true;
        for volume in &mut self.volumes {
            volume.config.policy = pick(
                random,
                &[
                    Policy::WriteBack,
                    Policy::WriteBack,
                    Policy::WriteThrough,
                    Policy::WriteAround,
                    Policy::PassThrough,
                ],
            );
        }
    }

    /// Who may fall silent, after which time that counts, and what the backends are.
    fn draw_silence(&mut self, random: &mut Rng) {
        let millis = [200, 1000, 5000];
        self.cache.ssd_answer_max = Nanos::from_millis(pick(random, &millis));
        for volume in &mut self.volumes {
            volume.config.backend_answer_max = Nanos::from_millis(pick(random, &millis));
        }
        // With little DRAM, much is read from the SSD tier.
        let one_in = if self.cache.dram_blocks <= 8 { 2 } else { 6 };
        self.faults.cache_hang = random.u32(..one_in) == 0;
        self.faults.backend_hang = random.u32(..5) == 0;
        self.faults.backend_fence = random.u32(..8) == 0;
        for volume in &mut self.volumes {
            volume.config.backend_atomic = random.u32(..3) == 0;
        }
    }

    /// A scenario of a seed in which the cache device fails, and what comes back from it matters.
    pub fn draw_for_cache_trouble(seed: u64) -> Self {
        let mut random = Rng::with_seed(mix(seed));
        let mut scenario = Self::draw_for_cache(seed, &mut random);
        scenario.draw_silence(&mut random);
        scenario.cache.ssd_answer_max = Nanos::from_millis(200);
        scenario.faults.cache_hang = true;
        scenario
    }

    fn draw_for_volumes(seed: u64, random: &mut Rng) -> Self {
        let volumes = if random.u32(..4) == 0 { 2 } else { 1 };
        let laps = random.u32(..8) == 0;
        let mut volumes: Vec<_> = (1..=volumes)
            .map(|number| Self::draw_volume(random, number))
            .collect();
        if laps {
            // Large writes fill the log again and again; destage holds them back.
            for behaviour in volumes.iter_mut().map(|volume| &mut volume.behaviour) {
                behaviour.read_percent = random.u32(5..30);
                behaviour.sectors_max = pick(random, &[512, 2048]);
            }
        }
        let ssd = (random.u32(..4) > 0).then(|| SsdConfig {
            bytes: CACHE_BYTES_MIN + (pick(random, &[0, 4, 16]) * SEGMENT_BYTES) as u64,
            uuid: [7; 16],
            line_blocks: pick(random, &[2, 4, 8, 16]),
        });
        Self {
            seed,
            volumes,
            cache: CacheConfig {
                dram_blocks: pick(random, &[0, 8, 64, 512]),
                ssd,
                ssd_answer_max: Nanos(0),
            },
            cache_latency: latency(random, &[50, 200, 2000]),
            pool_bytes: pick(random, &[6 << 20, 8 << 20, 16 << 20, 64 << 20, 64 << 20]),
            faults: draw_faults(random),
            endings: (0..random.usize(1..5))
                .map(|_| draw_ending(random, &[20, 200, 2000, 20_000]))
                .collect(),
            requests: pick(random, &[20, 100, 300, 1000]),
            batch: pick(random, &[1, 4, 32]),
            director_pause: Nanos::from_micros(pick(random, &[300, 3000, 30_000])),
            reopens: random.u32(..3) == 0,
            shrinks: random.u32(..4) == 0,
            resizes: false,
            shared_power: random.bool(),
            switches: false,
            scrubs: false,
            fills_before_scrub: false,
            flips_compression: false,
            lost_logs: Vec::new(),
            origin: None,
            pins: None,
            repins: false,
            warm_ups: false,
            packed_rots: false,
            log_space: false,
            wait_max: None,
        }
    }

    /// A small hot volume whose lines are cached, overwritten and looked at again after restarts.
    fn draw_for_cache(seed: u64, random: &mut Rng) -> Self {
        let mut volume = Self::draw_volume(random, 1);
        let sectors = pick(random, &[2048, 8192, 16_384]);
        volume.base = draw_base(random, sectors);
        volume.config.bytes = sectors * SECTOR_BYTES as u64;
        volume.config.promote_hits = 1;
        volume.config.dirty_ratio_min = 0;
        volume.config.dirty_age_max = Nanos::from_millis(1);
        volume.config.sequential_cutoff_bytes = 1 << 40;
        volume.behaviour.read_percent = random.u32(60..95);
        volume.behaviour.sectors_max = volume.behaviour.sectors_max.clamp(64, 512);
        volume.behaviour.sequential_percent = pick(random, &[0, 50]);
        // Promotions fill segments, which only then reach the device.
        volume.behaviour.odd_one_in = 15;
        volume.behaviour.hot_percent = random.u32(..50);
        Self {
            seed,
            volumes: vec![volume],
            cache: CacheConfig {
                dram_blocks: pick(random, &[0, 8]),
                ssd: Some(SsdConfig {
                    bytes: CACHE_BYTES_MIN,
                    uuid: [7; 16],
                    line_blocks: pick(random, &[2, 4, 8]),
                }),
                ssd_answer_max: Nanos(0),
            },
            cache_latency: latency(random, &[20, 100]),
            pool_bytes: 16 << 20,
            faults: Faults {
                cache_rot: random.u32(..4) == 0,
                ..Faults::default()
            },
            endings: (0..random.usize(2..6))
                .map(|_| draw_ending(random, &[2000, 10_000]))
                .collect(),
            requests: pick(random, &[300, 1000]),
            batch: pick(random, &[1, 4, 32]),
            director_pause: Nanos::from_micros(3000),
            reopens: random.u32(..3) == 0,
            shrinks: random.u32(..4) == 0,
            resizes: false,
            shared_power: random.bool(),
            switches: false,
            scrubs: false,
            fills_before_scrub: false,
            flips_compression: false,
            lost_logs: Vec::new(),
            origin: None,
            pins: None,
            repins: false,
            warm_ups: false,
            packed_rots: false,
            log_space: false,
            wait_max: None,
        }
    }

    fn draw_volume(random: &mut Rng, number: u32) -> VolumeScenario {
        let size = pick(
            random,
            &[4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20],
        );
        let odd = if random.bool() {
            random.u64(..8) * SECTOR_BYTES as u64
        } else {
            0
        };
        let bytes = size + odd;
        let mut config = VolumeConfig {
            number,
            uuid: [number as u8; 16],
            bytes,
            log_bytes: LOG_BYTES_MIN + random.u64(..64) * BLOCK_BYTES as u64,
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
            log_entries_max: 0,
            resident_bytes_max: 0,
            backend_extents: random.bool(),
            backend_atomic: false,
            log_failure: LogFailure::ReadOnly,
            discard: Discard::Pass,
            backend_answer_max: Nanos(0),
            log_answer_max: Nanos(u64::MAX),
        };
        draw_behaviour(random, &mut config);
        VolumeScenario {
            base: draw_base(random, bytes / SECTOR_BYTES as u64),
            config,
            behaviour: Behaviour::draw(random),
            open_loop: None,
            log_latency: latency(random, &[20, 100, 1000]),
            backend_latency: latency(random, &[50, 1000, 10_000]),
            local: None,
            objects: None,
        }
    }

    /// How full the SSD tier becomes: for one seed in four less than it could.
    pub fn fill_marks(&self) -> FillMarks {
        if self.seed.is_multiple_of(4) {
            FillMarks {
                ratio_max: 80,
                ratio_health: 60,
                ..FillMarks::default()
            }
        } else {
            FillMarks::default()
        }
    }

    /// The steps in which the cache forgets long ranges: for half of the seeds so small that it takes many.
    pub fn cache_steps(&self) -> Option<(usize, usize)> {
        let random = &mut Stream::CacheSteps.of(self.seed);
        let steps = (pick(random, &[1, 8, 64]), pick(random, &[5, 50, 1000]));
        random.bool().then_some(steps)
    }

    /// Shards of the node, for two seeds in three of those with several volumes more than one.
    pub fn shards(&self) -> usize {
        let random = &mut Stream::Shards.of(self.seed);
        let shards = random.usize(1..=3);
        shards.min(self.volumes.len().max(usize::from(self.reopens) * 2))
    }

    /// By what the cache chooses what it keeps: for one seed in two by benefit.
    pub fn tiering(&self) -> Tiering {
        match Stream::Tiering.seed(self.seed) % 2 {
            0 => Tiering::Benefit,
            _ => Tiering::Recency,
        }
    }

    /// Whether the log of a volume was made in place of one that was given up, and says of that one that the backend may be
    /// unflushed.
    pub fn carries_mark(&self, index: u64) -> bool {
        Stream::CarriedMarks
            .seed_of(self.seed, index)
            .is_multiple_of(8)
    }

    /// A variant that is cheap to run once for every step of it.
    #[must_use]
    pub fn shortened(mut self) -> Self {
        self.volumes.truncate(1);
        self.origin = None;
        let volume = &mut self.volumes[0];
        let sectors = volume.base.len().min(2048);
        volume.base.truncate(sectors);
        volume.config.bytes = (sectors * SECTOR_BYTES) as u64;
        volume.behaviour.sectors_max = volume.behaviour.sectors_max.min(64);
        // It crashes at that step and nowhere else, which a cut of a stack may add.
        self.shrinks &= volume.local.is_none() && volume.objects.is_none();
        self.requests = self.requests.min(40);
        self.faults = Faults::default();
        self.endings = vec![Ending::Close { destage: false }];
        self
    }
}
