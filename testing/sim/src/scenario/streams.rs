//! The streams of randomness that a seed has.

use fastrand::Rng;

use crate::content::mix;

/// What a seed decides. Each has randomness of its own, so that one more decision in one place changes no other, and no
/// two are drawn alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Who falls silent.
    Silence = 1,
    /// Which logs are lost.
    LostLogs = 2,
    /// Whether policies change, and how volumes begin.
    Policies = 3,
    /// Whether the volumes are clones.
    Clones = 4,
    /// Whether the node crashes while writes go past the log.
    PastLog = 5,
    /// Whether volumes are scrubbed, and what discards do.
    Scrubs = 6,
    /// What is pinned.
    Pins = 7,
    /// Whether volumes are warmed up.
    WarmUps = 8,
    /// By what the cache chooses.
    Tiering = 9,
    /// Whether logs fail, and whether compression comes and goes.
    FailedLogs = 12,
    /// Whether flushes fail.
    FailedFlushes = 13,
    /// Whether sizes change.
    Resizes = 14,
    /// Whether pins change.
    Repins = 15,
    /// Whether compressed lines rot.
    PackedRots = 16,
    /// Whether the cache is filled before a scrub.
    FillsBeforeScrub = 17,
    /// How often reads of a log bring wrong bytes.
    SpoiledReads = 18,
    /// How often those for a replay do.
    SpoiledReplays = 20,
    /// The scenarios of damaged logs.
    DamagedLogs = 21,
    /// Whether logs do not answer.
    SilentLogs = 23,
    /// The scenarios of logs that are damaged at their ends.
    DamagedEnds = 24,
    /// How the cache's device lies.
    CacheLies = 25,
    /// In what steps the cache forgets.
    CacheSteps = 26,
    /// The scenarios of writes that are undone.
    UndoneWrites = 27,
    /// Which logs are made in place of one that was given up.
    CarriedMarks = 28,
    /// Whether logs come to rest before they rot.
    Rests = 29,
    /// What lies below the volumes.
    Stacks = 30,
    /// Whether clients send without waiting for answers.
    OpenLoops = 31,
    /// The scenarios of light loads.
    LightLoads = 32,
    /// How many shards the node has, and where its volumes are.
    Shards = 33,
    /// Whether logs share space, and where they begin.
    LogSpace = 34,
    /// The scenarios of logs that share space.
    SharedLogs = 50,
    /// What the cache's device does.
    CacheDisk = 101,
    /// What happens in the world.
    World = 102,
    /// When a planted bug strikes.
    Plant = 103,
    /// What the devices of logs do: one for each volume, from here on.
    LogDisks = 1000,
    /// What backends do.
    Backends = 2000,
    /// What logs are formatted with.
    LogFormats = 3000,
    /// What clients do.
    Workloads = 4000,
    /// What local stores and the backends below them do.
    LocalStores = 5000,
    /// What object volumes and their stores do.
    ObjectVolumes = 6000,
    /// What clients do that do not wait for answers, and when.
    Arrivals = 7000,
}

impl Stream {
    /// Where it begins for a seed.
    pub const fn seed(self, seed: u64) -> u64 {
        self.seed_of(seed, 0)
    }

    /// The same for one of several.
    pub const fn seed_of(self, seed: u64, index: u64) -> u64 {
        mix(seed ^ mix(self as u64 + index))
    }

    pub(super) fn of(self, seed: u64) -> Rng {
        Rng::with_seed(self.seed(seed))
    }
}
