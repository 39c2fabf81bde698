//! The driver: one node with the production core on fake devices, in virtual time.
//!
//! Performs every action after a time drawn from the seed and returns its completion; polls after
//! every batch as a shard does; keeps the history of what clients did, and hands everything that
//! happens to the checkers. It decides nothing about what is right.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

pub use coverage::Coverage;
use fastrand::Rng;
use hdcs_core::base::buf::{Buf, BufMut, Pool};
use hdcs_core::base::error::{IoError, OpenError, RequestError};
use hdcs_core::base::io::{
    Action, BlockKey, Completion, Done, ExtentKind, Nanos, Reply, Request, RequestId, SectorRange,
    Token,
};
use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use hdcs_core::cache::{CacheEvent, ReadCache, SsdState};
use hdcs_core::format::{LOG_HEADER_BLOCKS, LogSuperblock};
use hdcs_core::node::cache_identity::CacheIdentity;
use hdcs_core::node::readmission::Readmission;
use hdcs_core::node::resize::Resize;
use hdcs_core::node::scrub::ScrubAt;
use hdcs_core::node::stop::{Hung, Stop};
use hdcs_core::node::tier_out::TierOut;
use hdcs_core::volume::{
    Context, Discard, Event, Phase, Policy, State, Trouble, Volume, VolumeConfig,
};

use crate::backend::Backend;
use crate::check_backend::{self, BackendOrder};
use crate::check_bounds::{self, WritesInFlight};
use crate::check_cost::Cost;
use crate::check_log;
use crate::check_lost;
use crate::check_policy;
use crate::check_progress::Requests;
use crate::check_promotion;
use crate::check_reads;
use crate::check_recovery::{self, Durability};
use crate::check_snapshot::Snapshot;
use crate::check_trouble::{self, Fence};
use crate::content::{Content, WriteId, mix};
use crate::disk::{Disk, OpId};
use crate::engine::{Ended, Engine, Latency, Simulated};
use crate::model::{FlushOp, History, ReadOp, Seq};
use crate::plant::{Plant, Planted};
use crate::scenario::{self, Scenario, Stream};
use crate::trace::Trace;
use crate::violation::Violation;
use crate::workload::{Ask, Workload};
use audits::Watched;
use indexes::Indexes;
use local::SimulatedStore;
use object_volume::Objects;
use open_loops::OpenClient;
use shards::Shards;
use snapshots::Snapshotting;

/// Longest virtual time that anything may take once nothing goes wrong any more. Far beyond what a
/// full log needs on the slowest devices drawn, far below for ever.
const CALM_TIME_MAX: Nanos = Nanos::from_millis(900_000);
/// How much later than its deadline a write may become durable: batching and a slow device.
const AGE_SLACK: Nanos = Nanos::from_millis(50);
/// How soon a log at rest says where it ends, at most, if its device is quick.
const END_TIME_MAX: Nanos = Nanos::from_millis(1_500);
/// Logs are at rest after this, if anything.
const REST_TIME: Nanos = Nanos::from_millis(4_000);
/// Actions of the director after which an opening is calmed.
const DIRECTOR_ACTIONS_MAX: u64 = 3000;
/// What may be lost beyond the bound on unpersisted bytes: the request that reached it.
const UNPERSISTED_SLACK_BYTES: u64 = 1 << 20;
/// How long after a backend's failure a volume may still answer with an error.
const BACKEND_TROUBLE: Nanos = Nanos::from_millis(120_000);
/// Free blocks with which a log may say that it is full: the largest request, the largest span, its
/// control parts, and what a jump to the next lap wastes.
const FREE_BLOCKS_WHEN_FULL_MAX: u64 = 1100;
/// A pool of at most this may run dry: requests of a single client fill it.
const SMALL_POOL_BYTES: usize = 16 << 20;

/// Who asked for an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Volume(usize),
    /// A volume that was closed while its cache device did not answer.
    ClosedVolume(usize),
    /// The cache, by a step of this shard.
    Cache(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskId {
    Log(usize),
    Cache,
}

/// An effect under way.
#[derive(Debug)]
enum Io {
    DiskRead(DiskId, OpId, u64, BufMut),
    DiskWrite {
        disk: DiskId,
        op: OpId,
        offset: u64,
        held: Vec<Buf>,
        plant: Option<Plant>,
        /// Whether a sync of the disk follows before it counts as written.
        syncs: bool,
    },
    /// The sync behind a write to a log.
    LogSync(usize),
    BackendRead(usize, OpId, BufMut),
    BackendWrite {
        volume: usize,
        op: OpId,
        offset: u64,
        held: Vec<Buf>,
        plant: Option<Plant>,
    },
    BackendFlush(usize, OpId),
    BackendExtents(usize, SectorRange),
    /// A volume reads of what lies between it and its backend.
    StackRead(usize),
    /// What is asked of a backend beyond its end.
    BackendNothing(usize),
    /// A superblock that is kept beside the log's device.
    Keep(usize, Buf),
}

#[derive(Debug)]
struct InFlight {
    owner: Owner,
    token: Token,
    since: Nanos,
    io: Io,
    fails: Option<IoError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Happening {
    Io(u64),
    /// What the local store of a volume has asked for.
    OfStore(usize, u64),
    /// What the object volume of a volume has asked for.
    OfObjects(usize, u64),
    /// A planted bug performs late what it said was done.
    LateDiskWrite(DiskId, OpId),
    LateBackendWrite(usize, OpId),
    LateKeep(usize),
    Client(usize),
    /// Requests of a client that does not wait for answers.
    Arrival(usize),
    /// Nothing; but the machines are polled.
    Tick,
    /// A shard is told that the SSD tier has changed.
    TierChanged(usize),
    Director,
    /// More of a log is prepared, or is not.
    LogPrepared(usize),
    /// The node has recorded a new identity for its cache.
    CacheIdentityRecorded,
    /// The node looks whether the cache device is well again.
    CacheProbed,
    BackendReturns(usize),
    BackendResized(usize),
    /// What lies below a volume has another size, or has not.
    StackResized(usize, Result<(), IoError>),
    /// What lies below a volume has done what a snapshot asks of it, or has not.
    StackKept(usize, Result<(), IoError>),
    /// The next piece of a scrub.
    Scrub(usize, ScrubAt),
    /// A backend takes the snapshot that was asked for at a moment of the history.
    Snapshot(usize, u64),
}

impl Happening {
    /// The volume whose shard it happens on, if it is about one.
    fn unit(&self) -> Option<usize> {
        match *self {
            Self::OfStore(unit, _)
            | Self::OfObjects(unit, _)
            | Self::BackendReturns(unit)
            | Self::BackendResized(unit)
            | Self::StackResized(unit, _)
            | Self::StackKept(unit, _)
            | Self::Scrub(unit, _)
            | Self::LogPrepared(unit)
            | Self::Snapshot(unit, _) => Some(unit),
            _ => None,
        }
    }
}

/// What the sender of a request remembers.
#[derive(Debug)]
enum Waiting {
    Read(ReadOp),
    Write(WriteId, bool),
    Flush(FlushOp),
    Extents(ReadOp, ExtentKind),
    /// With what the backend held then, where that matters.
    Promote(SectorRange, Vec<Content>),
    Scrub(ScrubAt),
    /// A discard that changes nothing.
    Ignored,
    Other,
    Bad,
}

/// One volume with everything that belongs to it.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct Unit {
    config: VolumeConfig,
    /// Which volume its content says that it belongs to; its number in the cache may change.
    volume: u32,
    log: Disk,
    log_writes: WritesInFlight,
    /// What of the log's region is prepared.
    space: log_space::LogSpace,
    /// What lies below it promises this, if something does: see [`stack`].
    backend: Backend,
    local: Option<SimulatedStore>,
    objects: Option<Objects>,
    /// What these have ended of what the volume asked, until it is delivered.
    ended: BTreeMap<u64, Result<Done, IoError>>,
    tier_out: Option<TierOut>,
    /// It was asked to close, which it may not do before all is destaged.
    is_leaving: bool,
    /// It is closed since all was tiered out that had been acknowledged before that.
    tiered_to_close: Option<Seq>,
    /// What a volume in storage mode was, each time that its log was lost since the last tier.
    before_losses: Vec<History>,
    backend_writes: WritesInFlight,
    backend_down: Option<IoError>,
    /// Until when it does not answer.
    backend_silent: Nanos,
    fence: Fence,
    history: History,
    order: BackendOrder,
    durability: Durability,
    requests: Requests<Waiting>,
    workload: Workload,
    asks_left: u32,
    /// The client beside that one that does not wait for answers.
    open_loop: Option<OpenClient>,
    /// The client goes on when it gets an answer.
    client_waits: bool,
    /// An ask that found no buffer.
    postponed: Option<Ask>,
    log_latency: Latency,
    backend_latency: Latency,
    log_trouble: bool,
    /// The log's device has died; whether nothing can be read from it either.
    log_dead: Option<bool>,
    /// A read of it has failed, or a superblock could not be kept: then nobody goes on without it.
    log_stuck: bool,
    /// What is kept of its superblock beside it.
    kept: Option<LogSuperblock>,
    /// What a planted bug keeps late.
    kept_late: Option<LogSuperblock>,
    log_slow: bool,
    /// Until when its device does not answer, and whether it has not in this opening.
    log_silent: Nanos,
    log_hung: bool,
    /// Only reads of the log are not answered.
    log_reads_only: bool,
    /// As `log_hung`, of what writes wait for.
    log_writes_hung: bool,
    /// Clients were told of an error because of that.
    log_told: bool,
    log_writes_told: bool,
    log_rotten: bool,
    /// Sectors of which the log has held data in a block that has rotted.
    rotten: BTreeSet<u64>,
    /// What an independent reader made of the log when its opening began.
    rot: Option<check_log::LogView>,
    /// One of its superblocks had rotted then, which the opening writes again.
    superblock_rotted: bool,
    /// Sectors that are known to be lost, and that nobody has asked to write since.
    lost: BTreeSet<u64>,
    /// Sectors that somebody has asked to write in this opening before the volume was open.
    asked_early: BTreeSet<u64>,
    /// Position that its log was known to reach when it was opened with rot in it.
    log_known: u64,
    /// When a write of its log began last.
    log_written: Nanos,
    /// Its log had been at rest for long when the node crashed.
    rested: bool,
    /// An opening has found that something is lost, and may show it as long as there is this log.
    has_lost: bool,
    /// Since when the volume is inconsistent.
    inconsistent_since: Option<u64>,
    /// Blocks of the log of which a read has brought wrong bytes in this opening.
    spoiled: BTreeSet<u64>,
    /// The opening ended with the log being refused.
    refused: bool,
    backend_trouble: Option<Nanos>,
    /// The largest bound on unpersisted bytes of this opening.
    unpersisted_bytes_max: u64,
    /// How much the last crash may have taken, if that can be said.
    lost_bytes_max: Option<u64>,
    opened: bool,
    destage_all: Option<u64>,
    snapshotting: Option<Snapshotting>,
    snapshots: Vec<Snapshot>,
    shrink: Option<snapshots::Shrink>,
    resizing: Option<Resize>,
    /// What waits for the end of that, or for a snapshot.
    held: Vec<Action>,
    /// What was cut off, which a planted bug keeps: from a sector on.
    kept_cut: Option<(u64, Vec<Content>)>,
    /// A planted bug has told those alone who waited for a flush that it had failed, when.
    flush_failed: u64,
    /// Since when writes are refused because of the policy, and until when they last were.
    read_only_since: Option<u64>,
    read_only_until: u64,
    /// Writes have gone past the log in this opening, or in one whose log says so.
    was_direct: bool,
    scrub: scrubs::Progress,
    starving: Option<starvation::Starving>,
    /// Replies that planted bugs keep.
    starved: Vec<(RequestId, Result<Reply, RequestError>)>,
    /// What was hot when the node last went down.
    heat: Vec<SectorRange>,
}

#[derive(Debug)]
struct Node {
    shards: Shards,
    volumes: Vec<Volume>,
    closed_volumes: Vec<Volume>,
    /// Memory for the indexes of all their logs.
    indexes: Indexes,
}

/// Everything there is.
#[derive(Debug)]
pub struct World {
    scenario: Scenario,
    engine: Engine<Happening>,
    random: Rng,
    in_flight: BTreeMap<u64, InFlight>,
    next_io: u64,
    units: Vec<Unit>,
    cache_disk: Disk,
    cache_writes: WritesInFlight,
    cache_dead: bool,
    /// Until when the cache device does not answer.
    cache_silent: Nanos,
    readmission: Readmission,
    cache_identity: CacheIdentity,
    stop: Option<Stop>,
    /// Something has not answered since it began.
    is_stop_held_up: bool,
    /// How it ended.
    stopped: Option<Result<(), Hung>>,
    /// Compressed lines of the SSD tier that were let rot, by their offsets, and whether a volume has read them since.
    rotten: BTreeMap<u64, bool>,
    pool: Arc<Pool>,
    node: Option<Node>,
    /// Reads of a range of a backend are counted.
    watched: Watched,
    planted: Planted,
    leaked: Vec<Buf>,
    cost: Cost,
    calm_since: Option<Nanos>,
    /// When it is enough: an opening whose work does not end by itself is calmed.
    calm_at: Nanos,
    crash_at: Option<u64>,
    step_in_opening: u64,
    /// What the run saw.
    pub coverage: Coverage,
}

impl World {
    /// The world of a scenario, with everything formatted and nothing started.
    pub fn new(scenario: Scenario, plant: Option<Plant>, verbose: bool) -> Self {
        let seed = scenario.seed;
        let units = (scenario.volumes.iter().zip(0..))
            .map(|(volume, index)| {
                let config = volume.config.clone();
                let log_bytes = config.log_bytes;
                let mut log = Disk::new(log_bytes, Stream::LogDisks.seed_of(seed, index));
                if let Some((lie, skip)) = scenario.faults.log_lie.filter(|_| index == 0) {
                    log.lie_once(lie, skip);
                }
                let keys = forgery::log_keys(seed, index as usize);
                let block = Volume::format_log(&config, Stream::LogFormats.seed_of(seed, index));
                let block = log_space::begin_late(&scenario, index, &block);
                let carries_mark = scenario.carries_mark(index);
                log.put(
                    0,
                    &forgery::first_block(&block, carries_mark, keys.as_deref()),
                );
                let sectors = volume.base.len() as u64;
                let history = History::new(volume.base.clone());
                let objects = volume.objects.map(|objects| {
                    let (number, uuid) = (config.number, config.uuid);
                    Objects::new(objects, index, number, uuid, &volume.base, seed)
                });
                let local = volume.local.map(|local| {
                    let image = objects.is_none().then(|| volume.base.clone());
                    SimulatedStore::new(local, index, &config, image, (&log, seed))
                });
                Unit {
                    local,
                    objects,
                    ended: BTreeMap::new(),
                    tier_out: None,
                    is_leaving: false,
                    tiered_to_close: None,
                    before_losses: Vec::new(),
                    durability: Durability::opened(config.persist, history.now()),
                    backend: Backend::new(
                        config.number,
                        volume.base.clone(),
                        config.backend_atomic && plant != Some(Plant::FalseAtomicity),
                        Stream::Backends.seed_of(seed, index),
                    ),
                    workload: Workload::new(
                        volume.behaviour.clone(),
                        sectors,
                        Stream::Workloads.seed_of(seed, index),
                    ),
                    log_slow: volume.log_latency.slow_one_in > 0,
                    log_latency: volume.log_latency,
                    volume: config.number,
                    backend_latency: volume.backend_latency,
                    config,
                    log,
                    history,
                    log_writes: WritesInFlight::default(),
                    space: log_space::LogSpace::of(&scenario, log_bytes),
                    backend_writes: WritesInFlight::default(),
                    backend_down: None,
                    backend_silent: Nanos(0),
                    fence: Fence::default(),
                    order: BackendOrder::default(),
                    requests: Requests::default(),
                    asks_left: 0,
                    open_loop: (volume.open_loop.clone())
                        .map(|client| OpenClient::new(client, sectors, index, seed)),
                    client_waits: false,
                    postponed: None,
                    log_trouble: false,
                    log_dead: None,
                    log_silent: Nanos(0),
                    log_hung: false,
                    log_reads_only: false,
                    log_writes_hung: false,
                    log_told: false,
                    log_writes_told: false,
                    log_stuck: false,
                    kept: None,
                    kept_late: None,
                    log_rotten: false,
                    rotten: BTreeSet::new(),
                    rot: None,
                    superblock_rotted: false,
                    inconsistent_since: None,
                    lost: BTreeSet::new(),
                    asked_early: BTreeSet::new(),
                    log_known: 0,
                    log_written: Nanos(0),
                    rested: false,
                    has_lost: false,
                    spoiled: BTreeSet::new(),
                    refused: false,
                    backend_trouble: None,
                    unpersisted_bytes_max: 0,
                    lost_bytes_max: None,
                    opened: false,
                    destage_all: None,
                    snapshotting: None,
                    snapshots: Vec::new(),
                    shrink: None,
                    resizing: None,
                    held: Vec::new(),
                    kept_cut: None,
                    flush_failed: 0,
                    read_only_since: None,
                    read_only_until: 0,
                    was_direct: false,
                    scrub: scrubs::Progress::default(),
                    starving: None,
                    starved: Vec::new(),
                    heat: Vec::new(),
                }
            })
            .collect();
        let cache_bytes = scenario.cache.ssd.as_ref().map_or(0, |ssd| ssd.bytes);
        let mut cache_disk = Disk::new(cache_bytes, Stream::CacheDisk.seed(seed));
        if let Some((lie, skip)) = scenario.faults.cache_lie {
            cache_disk.lie_once(lie, skip);
        }
        Self {
            cache_disk,
            random: Rng::with_seed(Stream::World.seed(seed)),
            planted: Planted::new(plant, Stream::Plant.seed(seed)),
            pool: Pool::new(scenario.pool_bytes),
            engine: Engine::new(Nanos(1_000_000), verbose),
            in_flight: BTreeMap::new(),
            next_io: 0,
            units,
            cache_writes: WritesInFlight::default(),
            cache_dead: false,
            cache_silent: Nanos(0),
            readmission: Readmission::default(),
            cache_identity: CacheIdentity::default(),
            stop: None,
            is_stop_held_up: false,
            stopped: None,
            rotten: BTreeMap::new(),
            node: None,
            watched: Watched::default(),
            leaked: Vec::new(),
            cost: Cost::default(),
            calm_since: None,
            calm_at: Nanos(0),
            crash_at: None,
            step_in_opening: 0,
            coverage: Coverage::default(),
            scenario,
        }
    }

    /// One of these, by the seed.
    pub fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.random.usize(..of.len())]
    }

    /// Let time pass that is long enough for logs to be at rest.
    pub fn rest(&mut self) -> Result<(), Violation> {
        let until = self.engine.now().plus(REST_TIME);
        loop {
            let next = [self.engine.next_time(), self.next_wakeup()];
            let next = next.into_iter().flatten().min();
            if next.is_none_or(|next| next > until) {
                self.engine.pass_until(until);
                return Ok(());
            }
            if self.go_on()? != Some(Ended::Reached) {
                return Ok(());
            }
        }
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        let node = self.node.as_ref()?;
        let volumes = node.volumes.iter().filter_map(Volume::next_wakeup);
        let stop = self.stop.as_ref().and_then(Stop::next_wakeup);
        let stacks = self.units.iter().flat_map(|unit| {
            let store = unit
                .local
                .as_ref()
                .and_then(|local| local.next_wakeup(self.engine.now()));
            let objects = unit.objects.as_ref();
            [
                store,
                objects.and_then(|objects| objects.next_wakeup(self.engine.now())),
            ]
        });
        let stores = stacks.flatten();
        volumes
            .chain(stores)
            .chain(node.caches_wakeup())
            .chain(stop)
            .min()
    }

    fn deliver(&mut self, happening: Happening) -> Result<(), Violation> {
        if let (Some(unit), Some(node)) = (happening.unit(), &mut self.node) {
            node.shards.wake(node.shards.of(unit));
        }
        match happening {
            Happening::Io(io) => self.complete(io),
            Happening::OfStore(unit, number) => self.done_for_store(unit, number),
            Happening::OfObjects(unit, number) => self.done_for_objects(unit, number),
            Happening::LateDiskWrite(disk, op) => {
                self.disk(disk).complete_write(op);
                Ok(())
            }
            Happening::LateKeep(unit) => {
                let unit = &mut self.units[unit];
                unit.kept = unit.kept_late.take().or(unit.kept);
                Ok(())
            }
            Happening::LateBackendWrite(unit, op) => {
                self.units[unit].backend.complete_write(op);
                self.check_commits(unit)
            }
            Happening::Client(unit) => self.client(unit),
            Happening::Arrival(unit) => self.arrive(unit),
            Happening::Tick => Ok(()),
            Happening::TierChanged(shard) => {
                if let Some(node) = &mut self.node {
                    node.shards.wake(shard);
                }
                Ok(())
            }
            Happening::Director => self.direct(),
            Happening::LogPrepared(unit) => {
                self.log_was_prepared(unit);
                Ok(())
            }
            Happening::CacheIdentityRecorded => {
                self.cache_identity_recorded();
                Ok(())
            }
            Happening::CacheProbed => self.probe_cache(),
            Happening::BackendResized(unit) => self.backend_resized(unit),
            Happening::StackResized(unit, result) => self.stack_resized(unit, result),
            Happening::StackKept(unit, result) => self.stack_kept(unit, result),
            Happening::Snapshot(unit, asked) => self.take_snapshot(unit, asked),
            Happening::Scrub(unit, at) => self.scrub(unit, at),
            Happening::BackendReturns(unit) => {
                self.units[unit].backend_down = None;
                self.engine.note("backend returns", [unit as u64, 0, 0, 0]);
                Ok(())
            }
        }
    }

    fn poll_all(&mut self) -> Result<(), Violation> {
        for unit in 0..self.volumes() {
            self.release_starved(unit)?;
        }
        let turning = self.turning();
        let changes = (self.node.as_ref()).map_or(0, |node| node.cache().changes());
        for &shard in &turning {
            self.poll_volumes_of(shard)?;
        }
        self.poll_stacks()?;
        for &shard in &turning {
            self.poll_cache_of(shard, changes)?;
        }
        self.look_after_cache();
        (0..self.volumes()).try_for_each(|unit| self.go_on_with(unit))?;
        self.go_on_stopping()?;
        self.tell_shards();
        // There may be no further turn.
        (0..self.volumes()).try_for_each(|unit| self.release_starved(unit))
    }

    /// The second half of a shard's turn, which began when the tier had changed so often.
    fn poll_cache_of(&mut self, shard: usize, changes: u64) -> Result<(), Violation> {
        let persisted = |world: &Self| {
            let node = world.node.as_ref();
            node.map(|node| node.shards.look(shard).persisted())
        };
        let before = persisted(self);
        self.step_cache(shard, CacheEvent::Poll)?;
        if persisted(self) != before {
            self.poll_volumes_of(shard)?;
        }
        self.wait_for_tier(shard, changes);
        Ok(())
    }

    fn poll_volumes_of(&mut self, shard: usize) -> Result<(), Violation> {
        for unit in 0..self.volumes() {
            let node = self.node.as_ref();
            if node.is_some_and(|node| node.shards.of(unit) == shard) {
                self.step_volume(unit, Event::Poll)?;
            }
        }
        Ok(())
    }

    /// What goes on with a volume beside its clients, one after another, as a shard has it.
    fn go_on_with(&mut self, unit: usize) -> Result<(), Violation> {
        let (state, volume) = (&self.units[unit], self.volume(unit));
        let awaits_tier = state
            .snapshotting
            .as_ref()
            .map(Snapshotting::awaits_tier_out);
        match volume.map(Volume::phase) {
            Some(Phase::Closing) => {
                self.give_up_snapshot(unit)?;
                self.go_on_resizing(unit)
            }
            // A change of size or a snapshot would wait for the same for ever.
            Some(Phase::Open) if volume.is_some_and(|volume| state.is_to_close_stuck(volume)) => {
                self.go_on_tiering(unit)
            }
            Some(Phase::Open) => match awaits_tier {
                Some(awaits) => {
                    if awaits {
                        self.go_on_tiering(unit)?;
                    }
                    self.go_on_snapshotting(unit)
                }
                None if state.resizing.is_some() => self.go_on_resizing(unit),
                None => self.go_on_tiering(unit),
            },
            _ => Ok(()),
        }
    }

    fn volumes(&self) -> usize {
        self.node.as_ref().map_or(0, |node| node.volumes.len())
    }

    fn volume(&self, unit: usize) -> Option<&Volume> {
        self.node.as_ref()?.volumes.get(unit)
    }

    fn phase(&self, unit: usize) -> Option<Phase> {
        self.volume(unit).map(Volume::phase)
    }

    fn step_volume(&mut self, unit: usize, event: Event) -> Result<(), Violation> {
        let mut actions = Vec::new();
        let Some(Node {
            shards, volumes, ..
        }) = &mut self.node
        else {
            return Ok(());
        };
        let Some(volume) = volumes.get_mut(unit) else {
            return Ok(());
        };
        let shard = shards.of(unit);
        if !matches!(event, Event::Poll) {
            shards.wake(shard);
        }
        let cache = shards.cache(shard);
        let mut cx = Context {
            cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        let before = cx.cache.work() + volume.work();
        volume.step(self.engine.now(), event, &mut cx);
        self.cost.step(
            "a step of a volume",
            before,
            cx.cache.work() + volume.work(),
        )?;
        drop(cx);
        // Before the first reply of an opening is judged.
        self.notice_opening(unit)?;
        self.notice_size(unit);
        self.notice_policy(unit)?;
        self.perform_all(Owner::Volume(unit), actions)
    }

    fn step_cache(&mut self, shard: usize, event: CacheEvent) -> Result<(), Violation> {
        let mut actions = Vec::new();
        if let Some(node) = &mut self.node {
            if !matches!(event, CacheEvent::Poll) {
                node.shards.wake(shard);
            }
            let cache = node.shards.cache(shard);
            let before = cache.work();
            cache.step(self.engine.now(), event, &mut actions);
            self.cost
                .step("a step of the cache", before, cache.work())?;
        }
        self.perform_all(Owner::Cache(shard), actions)
    }

    fn step_cache_of(&mut self, unit: usize, event: CacheEvent) -> Result<(), Violation> {
        let shard = self.node.as_ref().map_or(0, |node| node.shards.of(unit));
        self.step_cache(shard, event)
    }

    /// A closed volume gets the end of what it had left behind.
    fn step_closed(&mut self, closed: usize, event: Event) -> Result<(), Violation> {
        let mut actions = Vec::new();
        if let Some(Node {
            shards,
            closed_volumes,
            ..
        }) = &mut self.node
        {
            let cache = shards.cache(shards.of_closed(closed));
            let mut cx = Context {
                cache,
                pool: &self.pool,
                actions: &mut actions,
            };
            closed_volumes[closed].step(self.engine.now(), event, &mut cx);
        }
        if actions.is_empty() {
            return Ok(());
        }
        Err(Violation::new(
            "closed-acts",
            format!("a volume that is closed asks for {actions:?}"),
        ))
    }

    fn disk(&mut self, disk: DiskId) -> &mut Disk {
        match disk {
            DiskId::Log(unit) => &mut self.units[unit].log,
            DiskId::Cache => &mut self.cache_disk,
        }
    }

    /// What must hold whenever the machines rest.
    fn check_state(&mut self) -> Result<(), Violation> {
        let thorough = self.engine.turns().is_multiple_of(64);
        for unit in 0..self.volumes() {
            let Some(volume) = self.volume(unit) else {
                break;
            };
            if thorough {
                volume.check_invariants();
            }
            let waiting = self.units[unit].requests.len();
            let stats = volume.stats(self.engine.now());
            check_bounds::check_volume(volume.config(), &stats, waiting)?;
            check_policy::check_clean(&stats)?;
            self.check_prepared(unit, volume)?;
            if let Some(max) = self.scenario.wait_max {
                self.units[unit].check_waits(self.engine.now(), max)?;
            }
            self.notice_damage(unit);
            self.units[unit].notice_destaged(stats.destage_all_remaining_bytes)?;
            let Unit {
                backend, history, ..
            } = &self.units[unit];
            // Large ones less often: every sector is looked at.
            let seldom = if backend.sectors() <= 8192 { 64 } else { 2048 };
            if self.engine.turns().is_multiple_of(seldom) {
                if backend.is_atomic() {
                    check_backend::check_whole(history, |sector| backend.durable(sector))?;
                }
                self.check_bottom(unit)?;
            }
        }
        self.share_indexes()?;
        self.check_silence()?;
        self.check_told()?;
        if let Some(node) = &self.node
            && thorough
        {
            for shard in 0..node.shards.count() {
                node.shards.look(shard).check_invariants();
            }
            check_bounds::check_cache(&self.scenario.cache, &node.cache().stats())?;
        }
        Ok(())
    }

    /// Who has not answered for too long shows.
    fn check_silence(&mut self) -> Result<(), Violation> {
        let Some(node) = &self.node else {
            return Ok(());
        };
        let oldest = |of: &dyn Fn(&Io) -> bool| {
            let theirs = self.in_flight.values().filter(|one| of(&one.io));
            let since = theirs.map(|one| one.since).min();
            since.map_or(Nanos(0), |since| self.engine.now().since(since))
        };
        let age = oldest(&Io::is_of_cache);
        let state = node.cache().stats().ssd_state;
        check_trouble::check_given_up(age, self.scenario.cache.ssd_answer_max, state)?;
        for (unit, volume) in node.volumes.iter().enumerate() {
            if volume.phase() != Phase::Open {
                continue;
            }
            let age = oldest(&|io| io.backend() == Some(unit));
            let max = volume.config().backend_answer_max;
            check_trouble::check_shown(unit, age, max, volume.state())?;
            self.coverage.silent_rounds += u64::from(age > max);
        }
        (0..self.volumes()).try_for_each(|unit| self.check_silent_log(unit))
    }

    /// Whatever an atomic backend has made durable is a state that the client could have seen.
    fn check_commits(&mut self, unit: usize) -> Result<(), Violation> {
        let Unit {
            history,
            order,
            backend,
            ..
        } = &mut self.units[unit];
        for commit in backend.take_commits() {
            let passed = order.commit(history, &commit, |sector| backend.durable(sector))?;
            self.coverage.commits += 1;
            self.coverage.crossings += u64::from(passed > 1);
            let numbers = [unit as u64, commit.len() as u64, passed as u64, 0];
            self.engine.note("backend commit", numbers);
        }
        Ok(())
    }
}

impl Simulated for World {
    fn now(&self) -> Nanos {
        self.engine.now()
    }

    fn trace(&self) -> &Trace {
        &self.engine.trace
    }

    fn advance(&mut self) -> Result<bool, Violation> {
        let wakeup = self.next_wakeup();
        self.engine.go_on(wakeup)
    }

    fn turn(&mut self) -> Result<Ended, Violation> {
        if self.calm_since.is_none() && self.engine.now() > self.calm_at {
            self.calm();
        }
        for _ in 0..self.random.usize(1..=self.scenario.batch) {
            let Some(happening) = self.engine.take_due() else {
                break;
            };
            self.coverage.steps += 1;
            self.step_in_opening += 1;
            if self
                .crash_at
                .is_some_and(|step| self.step_in_opening > step)
            {
                return Ok(Ended::Crash);
            }
            self.deliver(happening)?;
        }
        self.poll_all()?;
        self.check_state()?;
        Ok(Ended::Reached)
    }

    fn deadline(&self, _: Nanos) -> Option<Nanos> {
        self.calm_since.map(|since| since.plus(CALM_TIME_MAX))
    }

    fn waiting(&self) -> String {
        let mut message = format!("at {} us", self.engine.now().0 / 1000);
        for (index, unit) in self.units.iter().enumerate() {
            let oldest = unit.requests.oldest();
            message += &format!(
                "; volume {index}: {} requests wait, the oldest {oldest:?}",
                unit.requests.len()
            );
            if let Some(volume) = self.node.as_ref().and_then(|node| node.volumes.get(index)) {
                let stats = volume.stats(self.engine.now());
                message += &format!(
                    ", phase {:?}, state {:?}, wakeup {:?}, dirty {} bytes, log {} of {}, pool {:?}",
                    volume.phase(),
                    volume.state(),
                    volume.next_wakeup(),
                    stats.dirty_bytes,
                    stats.log_used_blocks,
                    stats.log_prepared_blocks,
                    self.pool
                );
            }
            if let Some(local) = &unit.local {
                message += &format!(", tiering {:?}, {:?}", unit.tier_out, local.status());
            }
        }
        message
    }
}

mod audits;
mod benefit;
mod bucket_snapshots;
mod clients;
mod clones;
mod coverage;
mod damage;
mod director;
mod effects;
mod failed_logs;
mod forgery;
mod heat;
mod indexes;
mod lifecycle;
mod local;
mod log_space;
mod object_volume;
mod open_loops;
mod packed;
mod pins;
mod policies;
mod resizes;
mod scrubs;
mod shards;
mod silent_logs;
mod snapshots;
mod stack;
mod stack_sizes;
mod starvation;
