//! The loop of a shard.
//!
//! A turn: wait for completions; hand them to volumes, cache and sessions; step what the sessions
//! submitted; poll what was touched or is due; serve the connections that have something to send
//! or may receive again. Everything that this starts goes to the kernel with the next wait.
//!
//! Invariants:
//! 1. A volume that was stepped, or whose time has come, is polled in the same turn.
//! 2. A request is answered exactly once, to the connection or job that submitted it.
//! 3. A volume leaves its slot only when nothing of it is under way, so no completion ever meets
//!    another volume in its place.
//! 4. One connection gets one receive and one send per turn, and submits no more work than [`Turns`] lets it: so a turn
//!    is short, and whoever asks for little waits for a turn or two.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Nanos, Token};
use hdcs_core::cache::{CacheEvent, ReadCache, dram_memory};
use hdcs_core::log::index_cap::IndexPart;
use hdcs_core::node::stop::{Hung, Stop};
use hdcs_core::node::turns::Turns;
use hdcs_core::volume::{Event, Phase};
use hdcs_device::ring::{Finished, Key, Outcome, Owner, Ring};
use hdcs_device::worker::{JobOutput, Waker};
use hdcs_device::writers::raise_priority;
use hdcs_device::{Errno, memory};
use hdcs_frontend::access::Peer;
use hdcs_frontend::{Ending, Held, Host, VolumeNumber};

use super::cache_place::Started;
use super::clients::NO_MEMORY;
use super::clock;
use super::closed_volumes::{ClosedVolumes, Late};
use super::command::{
    Answer, ClosedReport, Command, OpenFailure, OpenedAs, SessionFactory, SnapshotFailure,
    VolumeSpec,
};
use super::connection::{Connection, introduce};
use super::control::NOT_OPEN;
use super::counts::ShardCounts;
use super::due::Due;
use super::groups::{self, Groups};
use super::handover::Station;
use super::heat::Gatherings;
use super::identity::{self, Identity};
use super::jobs::Job;
use super::leavers::Leaver;
use super::places::{NO_PLACE, Places};
use super::readmission::{self, Readmission};
use super::requests::Requests;
use super::scrub::Scrub;
use super::served::{Origin, Served, Submitted};
use super::shares::{ClientShares, as_counted};
use super::slots::Slots;
use super::state::{SessionHost, ShardState};
use super::visits::{error_of, note_accepting};
use super::{ACCEPT_PAUSE, ShardConfig};
use crate::data_dir::dirty::LogIdentity;
use crate::log_limit::LogLimit;

/// Between two lines in the log about connections that were too many.
const REFUSAL_PAUSE: Nanos = Nanos::from_millis(1_000);
/// Rounds of serving and stepping within one turn: lets a request that a session had kept back be
/// answered in the turn in which another one ended.
const ROUNDS_MAX: usize = 4;
/// Unanswered requests from which on a client is not woken for by each of its requests: below, what
/// it waits for is the answer.
const HOLD_REQUESTS_MIN: usize = 8;
/// Unanswered requests up to which a connection submits more while its volume has more than it takes
/// at once: so what waits before the volume is not all of one client.
const CONGESTED_REQUESTS_MAX: usize = 16;
/// Share of the pool that clients' data may take up, as a divisor: the rest is for destage, for the
/// caches, and for what the core reads beside.
const CLIENTS_SHARE: u64 = 2;
/// The longest turn is looked for in this period and in the one before.
const TURN_PERIOD: Nanos = Nanos::from_millis(30_000);
/// Tokens of the shard's own backend operations; the core counts from zero.
pub const RESIZE_TOKEN: Token = Token(u64::MAX);
/// See [`RESIZE_TOKEN`].
pub const SNAPSHOT_TOKEN: Token = Token(u64::MAX - 1);
/// A time that never comes.
pub const NEVER: Nanos = Nanos(u64::MAX);

/// A socket that accepts.
pub struct Listener {
    pub socket: OwnedFd,
    pub sessions: SessionFactory,
    pub accepting: Option<Key>,
    pub again: Option<Nanos>,
    /// What its clients can have.
    pub places: Arc<Places>,
    pub faults: LogLimit,
    /// Whether the last attempt to accept failed.
    pub failing: bool,
    /// Where it listens, in words.
    pub address: String,
    pub tcp: bool,
}

/// How long the longest turn took in this period and in the one before: for so long everybody has waited at least once.
#[derive(Clone, Copy, Debug, Default)]
pub struct LongestTurn {
    period: u64,
    longest: [Nanos; 2],
}

impl LongestTurn {
    /// A turn took so long.
    fn note(&mut self, begin: Nanos, end: Nanos) {
        let period = begin.0 / TURN_PERIOD.0;
        if period != self.period {
            let before = if period == self.period + 1 {
                self.longest[0]
            } else {
                Nanos(0)
            };
            self.longest = [Nanos(0), before];
            self.period = period;
        }
        self.longest[0] = self.longest[0].max(end.since(begin));
    }

    /// How long that was.
    pub fn get(&self) -> Nanos {
        self.longest[0].max(self.longest[1])
    }
}

/// How far a stop has come.
pub struct Stopping {
    pub stop: Stop,
    pub answers: Vec<Answer<Vec<ClosedReport>>>,
    pub closed: Vec<ClosedReport>,
    /// How it has ended, once other nodes alone are still to be told.
    pub ended: Option<Result<(), Hung>>,
}

/// See the module.
pub struct Shard {
    pub state: ShardState,
    pub connections: Slots<Connection>,
    /// By the slots of their connections.
    pub leavers: HashMap<u32, Leaver>,
    /// Connections to be served in this turn.
    pub listed: Vec<u32>,
    /// Connections that wait for buffers, for what they have in flight or for their turn, in the order in which they
    /// began to.
    waiters: VecDeque<u32>,
    /// Connections that nothing is received from until the log is written, or this time has come.
    pub held: Vec<u32>,
    /// Connections that broke off, whose requests are still to be withdrawn.
    broken: Vec<(VolumeNumber, u32)>,
    held_until: Nanos,
    /// When shards that were busy are asked again to take connections.
    pub hand_over_at: Nanos,
    /// How long volumes that are on their way out are waited for.
    pub departures_until: Nanos,
    /// How much work connections may submit. See [`hdcs_frontend::work_of`].
    turns: Turns,
    /// The longest turn of late.
    pub longest_turn: LongestTurn,
    pub counts: ShardCounts,
    /// Whether a connection has more to submit than it may in this turn, or may have now what it waits for.
    pressed: bool,
    pub listeners: Slots<Listener>,
    /// When connections are looked at again.
    look_at: Nanos,
    /// Connections that were closed because they were too many, and when that is said again.
    refused: u64,
    refused_said: Nanos,
    pub jobs: Slots<Job>,
    pub scrubs: Slots<Scrub>,
    pub gatherings: Gatherings,
    pub openings: Slots<(Box<VolumeSpec>, Answer<OpenedAs, OpenFailure>)>,
    pub stopping: Option<Stopping>,
    /// Of the cache.
    pub identity: Identity,
    pub readmission: Readmission,
    pub commands: Receiver<Command>,
    pub config: ShardConfig,
    origin: Nanos,
}

impl Shard {
    pub fn new(
        config: ShardConfig,
        cache_start: Option<Started>,
        commands: Receiver<Command>,
    ) -> io::Result<Self> {
        let ring = Ring::new(config.ring)?;
        // After the ring's threads were started, which would inherit it.
        if config.ring.raise_priority {
            raise_priority();
        }
        if let Some(processor) = config.processor {
            keep_to(processor);
        }
        let pool = Pool::new(config.pool_bytes);
        settle_memory(pool.memory(), config.touched_bytes);
        config.peers.note_pool(config.number, &pool);
        let mut cache_config = config.cache.clone();
        let (mut actions, memory) = (Vec::new(), Arc::clone(&pool));
        let mut readmission = Readmission::default();
        let (number, shared) = (config.number, &config.shared_cache);
        let dram_blocks = cache_config.dram_blocks;
        let mut cache = match cache_start {
            _ if let Some(tier) = shared.tier() => {
                ReadCache::sharing(dram_blocks, tier, number as u32)
            }
            None => {
                cache_config.ssd = None;
                ReadCache::new(cache_config, Nanos(0), memory, &mut actions)
            }
            Some(Started { uuid, device }) => {
                if let Some(ssd) = &mut cache_config.ssd {
                    ssd.uuid = uuid;
                }
                match device {
                    Ok(device) => {
                        shared.set_device(Some(device));
                        ReadCache::new(cache_config, Nanos(0), memory, &mut actions)
                    }
                    Err(why) => {
                        readmission = Readmission::after(why);
                        ReadCache::without_device(cache_config, memory)
                    }
                }
            }
        };
        if let Some(frames) = dram_memory(&cache) {
            settle_memory(frames, 0);
        }
        cache.set_fill_marks(config.cache_fill);
        cache.set_tiering(config.cache_tiering);
        let index_part = IndexPart::new(config.volumes.index(), number);
        let mut state = ShardState {
            ring,
            pool,
            cache,
            shared_cache: Arc::clone(&config.shared_cache),
            cache_operations: 0,
            cache_touched: true,
            volumes: Slots::default(),
            closed_volumes: ClosedVolumes::default(),
            numbers: BTreeMap::new(),
            shard: config.number,
            directory: Arc::clone(config.peers.directory()),
            refusal_said: Cell::new(Nanos(0)),
            events: config.events.clone(),
            due: Due::default(),
            touched: Vec::new(),
            settling: Vec::new(),
            cache_followers: Vec::new(),
            requests: Requests::new(config.peers.window(), number),
            actions,
            completions: Vec::new(),
            shares: ClientShares::new(
                config.pool_bytes as u64 / CLIENTS_SHARE,
                config.connections.heap_bytes,
            ),
            index_budget: index_part.budget(),
            index_part,
            index_to_tell: 0,
            memory: Arc::clone(&config.volumes),
            groups: None,
            now: Nanos(0),
        };
        state.perform_cache();
        state.cache.release();
        if number == 0 {
            state.shared_cache.made(state.cache.tier());
        }
        Ok(Self {
            state,
            connections: Slots::default(),
            leavers: HashMap::new(),
            listed: Vec::new(),
            waiters: VecDeque::new(),
            held: Vec::new(),
            broken: Vec::new(),
            held_until: NEVER,
            hand_over_at: NEVER,
            departures_until: NEVER,
            turns: Turns::default(),
            longest_turn: LongestTurn::default(),
            counts: ShardCounts::default(),
            pressed: false,
            listeners: Slots::default(),
            look_at: NEVER,
            refused: 0,
            refused_said: Nanos(0),
            jobs: Slots::default(),
            scrubs: Slots::default(),
            gatherings: Gatherings::default(),
            openings: Slots::default(),
            stopping: None,
            identity: Identity::default(),
            readmission,
            commands,
            origin: config.origin,
            config,
        })
    }

    pub fn waker(&self) -> Waker {
        self.state.ring.waker()
    }

    /// Turn until it has stopped.
    pub fn run(mut self) {
        self.turn_until_stopped();
        // One that was stopped has said how it ended.
        let ShardConfig { number, peers, .. } = &self.config;
        peers.note_end(*number, false);
        if !self.state.ring.quiesce() {
            // The kernel may still write to their buffers, however long it takes.
            std::mem::forget(std::mem::take(&mut self.connections));
            std::mem::forget(self.state.groups.take());
        }
    }

    fn turn_until_stopped(&mut self) {
        let mut finished = Vec::new();
        let mut end = self.read_clock();
        let mut has_stopped = false;
        while !has_stopped {
            let timeout = self.timeout(end);
            self.state.cache.release();
            if let Err(error) = self.state.ring.submit_and_wait(timeout) {
                tracing::error!(%error, "io_uring failed; the shard cannot go on");
                return;
            }
            let began = self.read_clock();
            self.state.now = began;
            self.counts.turns += 1;
            self.begin_turn();
            self.state.ring.reap(&mut finished);
            for one in finished.drain(..) {
                self.dispatch(one);
            }
            has_stopped = self.turn();
            end = self.read_clock();
            self.longest_turn.note(began, end);
        }
    }

    fn read_clock(&self) -> Nanos {
        clock::now().since(self.origin)
    }

    /// Those that wait for their turn come before what others have sent since.
    fn begin_turn(&mut self) {
        self.turns.begin();
        self.pressed = false;
        while !self.turns.is_spent()
            && let Some(slot) = self.waiters.pop_front()
        {
            let number = self.connections.get(slot).and_then(Connection::volume);
            if self.state.is_flooded(number) || self.held.contains(&slot) {
                self.list(slot);
            } else {
                // Where it wants to receive it says again when it is served.
                self.with_session(slot, |connection, host| {
                    connection.ask_receive(host);
                });
            }
        }
        self.turns.open();
    }

    /// One turn; whether a stop has come to its end.
    fn turn(&mut self) -> bool {
        if self.held_until <= self.state.now {
            self.release();
        }
        self.accept_again();
        self.hand_over_again();
        self.look_at_connections();
        // Whatever ended may have freed the buffer that one of them waits for. They keep their places before others.
        if !self.waiters.is_empty() {
            self.list_waiters_first();
        }
        for _ in 0..ROUNDS_MAX {
            if self.state.groups.is_some() {
                // Whether there is a lease is asked by a clock that was read after what asks for it had come.
                self.state.now = self.read_clock();
            }
            self.state.step_submitted();
            self.withdraw();
            groups::run(&mut self.state);
            self.state.poll();
            groups::run(&mut self.state);
            self.settle();
            self.deliver();
            self.run_jobs();
            self.run_scrubs();
            self.state.ring.submit_transfers();
            self.serve();
            if !self.state.requests.has_more() {
                break;
            }
        }
        if !self.state.requests.has_submitted() {
            self.withdraw();
        }
        self.run_gatherings();
        let has_stopped = self.go_on_stopping();
        // With many volumes it would cost more than all else.
        let checks_every = 1 + self.state.volumes.len() as u64 / 16;
        if cfg!(debug_assertions) && self.counts.turns.is_multiple_of(checks_every) {
            self.state.check_directory();
        }
        if let Some(device) = &self.config.cache_device {
            self.identity.go_on(&mut self.state, &device.place);
            if self.stopping.is_none() {
                self.readmission.go_on(&mut self.state, device);
            }
        }
        if self.config.peers.count() > 1 {
            let ShardConfig { peers, .. } = &self.config;
            peers.pass_on(self.config.number, &self.state.cache);
            let others = std::mem::take(&mut self.state.index_to_tell);
            if others != 0 {
                // Their parts are looked at in the turn that this brings.
                peers.tell_cache_changed(others);
            }
        }
        has_stopped
    }

    /// List those that wait before those that are listed.
    fn list_waiters_first(&mut self) {
        let newer = std::mem::take(&mut self.listed);
        for &slot in &newer {
            if let Some(connection) = self.connections.get_mut(slot) {
                connection.listed = false;
            }
        }
        while let Some(slot) = self.waiters.pop_front() {
            self.list(slot);
        }
        for slot in newer {
            self.list(slot);
        }
    }

    /// How long to wait at most, `now`.
    fn timeout(&self, now: Nanos) -> Option<Duration> {
        if self.pressed || self.state.requests.has_more() || !self.state.touched.is_empty() {
            return Some(Duration::ZERO);
        }
        let listeners = self.listeners.iter().filter_map(|(_, one)| one.again);
        let stopping = self.stopping.as_ref();
        let stop = stopping.and_then(|stopping| stopping.stop.next_wakeup());
        let groups = self.state.groups.as_ref();
        let groups = groups.and_then(Groups::next_wakeup);
        let due = self.state.due.next().into_iter().chain(groups);
        let identity = self.identity.next_wakeup();
        let cache = self.state.cache.next_wakeup();
        let retry = self.readmission.next_wakeup();
        let retry = retry.filter(|_| self.stopping.is_none());
        let turns = self.state.requests.scheduler.next_wakeup();
        let cache = cache.into_iter().chain(retry).chain(turns);
        let others = [
            self.look_at,
            self.held_until,
            self.hand_over_at,
            self.departures_until,
            self.scrub_wakeup(),
            self.gatherings_wakeup(),
        ];
        let others = others.into_iter().chain(identity).chain(cache);
        let next = due.chain(listeners).chain(stop).chain(others).min()?;
        (next != NEVER).then(|| Duration::from_nanos(next.since(now).0))
    }

    fn dispatch(&mut self, finished: Finished) {
        if groups::is_of_links(finished.owner) {
            return groups::link_finished(&mut self.state, finished);
        }
        let Finished {
            owner,
            token,
            outcome,
        } = finished;
        match (owner, outcome) {
            (Owner::Volume(slot), Outcome::Device(result)) => {
                let result = result.map_err(IoError::from);
                self.state.log_finished(slot, token, result);
                self.release();
            }
            (Owner::Volume(slot), Outcome::Job(JobOutput::Unit(result))) => {
                self.state.superblock_kept(slot, token, result);
            }
            (Owner::CacheOf(slot), Outcome::Device(result)) => {
                let result = result.map_err(IoError::from);
                let completion = Completion { token, result };
                if let Some(served) = self.state.volumes.get_mut(slot) {
                    served.cache_reads -= 1;
                    self.state.step(slot, Event::Completed(completion));
                } else {
                    self.state.ended_late(slot, Late::Cache, completion);
                }
            }
            (Owner::Cache, Outcome::Device(result)) => {
                self.state.cache_operations -= 1;
                let result = result.map_err(IoError::from);
                let event = CacheEvent::Completed(Completion { token, result });
                self.state.step_cache(event);
                self.state.cache_touched = true;
                self.state.follow_cache();
            }
            (Owner::Copy(group), Outcome::Device(result)) => {
                let result = result.map_err(IoError::from);
                groups::finished(&mut self.state, group, token, result);
            }
            (Owner::Copies, Outcome::Job(JobOutput::Any(opened))) => {
                groups::copy_opened(self, token, opened);
            }
            (Owner::Backend(slot), outcome) => self.state.backend_finished(slot, token, outcome),
            (Owner::Receive(slot), Outcome::Count(result)) => {
                self.counts.receives += 1;
                self.with_session(slot, |connection, host| connection.received(result, host));
                self.hold(slot);
            }
            (Owner::Send(slot), Outcome::Count(result)) => {
                if let Some(connection) = self.connections.get_mut(slot) {
                    connection.sent(self.state.now, result, &mut self.counts);
                }
                self.list(slot);
            }
            (Owner::Listener(slot), Outcome::Accepted(connection)) => {
                self.accepted(slot, connection);
            }
            (Owner::Shard, Outcome::Woken) => {
                if self.config.peers.take_cache_changed(self.config.number) {
                    self.counts.messages += 1;
                    self.state.follow_cache();
                }
                self.take_commands();
            }
            (Owner::Shard, Outcome::Job(JobOutput::Any(recorded))) if token == identity::TOKEN => {
                let recorded = recorded.downcast().expect("the job says how it ended");
                self.identity.recorded(&mut self.state, *recorded);
            }
            (Owner::Shard, Outcome::Job(JobOutput::Any(tried))) if token == readmission::TOKEN => {
                let tried = tried.downcast().expect("the probe says what it found");
                self.readmission.tried(&mut self.state, *tried);
            }
            (Owner::Shard, Outcome::Job(JobOutput::Any(opened))) => self.opened(token, opened),
            (owner, outcome) => unreachable!("{owner:?} starts nothing that ends in {outcome:?}"),
        }
    }

    /// Call into a connection's session, and note what it submitted.
    fn with_session(&mut self, slot: u32, call: impl FnOnce(&mut Connection, &mut dyn Host)) {
        let work = self.work_left(slot);
        let Some(connection) = self.connections.get_mut(slot) else {
            return;
        };
        let mut host = host(&mut self.state, slot, connection, work);
        call(connection, &mut host);
        let (requests, worked) = (host.requests, host.worked);
        connection.requests += requests;
        self.turns.note(&mut connection.account, worked);
        // Most have no volume before, so what they take of it is counted with the volume they have now.
        let (volume, held) = (connection.volume(), as_counted(connection.held()));
        self.state.count(volume, &mut connection.counted, held);
        self.look_for_volume(slot);
        self.list(slot);
    }

    /// What a connection may still submit in this turn.
    fn work_left(&self, slot: u32) -> usize {
        let Some(connection) = self.connections.get(slot) else {
            return 0;
        };
        if connection.requests >= CONGESTED_REQUESTS_MAX
            && (connection.volume())
                .and_then(|number| self.state.served(number))
                .is_some_and(|served| !served.waiting.is_empty())
        {
            return 0;
        }
        self.turns.left(&connection.account)
    }

    /// Let the requests of a client gather that sends them one by one, while its volume's log is
    /// being written: they go out with the next span, and a wakeup for each costs more than they do.
    fn hold(&mut self, slot: u32) {
        let Some(connection) = self.connections.get_mut(slot) else {
            return;
        };
        if connection.requests < HOLD_REQUESTS_MIN || self.held.contains(&slot) {
            return;
        }
        let number = connection.volume();
        let served = number.and_then(|number| self.state.served(number));
        let deaf_time = served.map_or(Nanos(0), |served| served.volume.deaf_time());
        if deaf_time > Nanos(0) {
            self.held.push(slot);
            self.held_until = self.held_until.min(self.state.now.plus(deaf_time));
        }
    }

    /// Receive again from everyone.
    fn release(&mut self) {
        while let Some(slot) = self.held.pop() {
            self.list(slot);
        }
        self.held_until = NEVER;
    }

    /// Serve a connection later in this turn.
    pub fn list(&mut self, slot: u32) {
        if let Some(connection) = self.connections.get_mut(slot)
            && !connection.listed
        {
            connection.listed = true;
            self.listed.push(slot);
        }
    }

    /// Tell sessions and jobs what ended.
    fn deliver(&mut self) {
        let mut ended = self.state.requests.take_ended();
        for (origin, result) in ended.drain(..) {
            match origin {
                Origin::Connection(slot, id) => {
                    if let Some(connection) = self.connections.get_mut(slot) {
                        connection.answered(id, result);
                        self.list(slot);
                    } else {
                        self.request_of_leaver_ended(slot);
                    }
                }
                Origin::Job(slot) => {
                    if let Some(job) = self.jobs.get_mut(slot) {
                        job.ended(result.map(drop));
                    }
                }
                Origin::Scrub(slot) => self.scrub_ended(slot, result),
            }
        }
        self.state.requests.keep_emptied(ended);
    }

    fn run_jobs(&mut self) {
        for slot in 0..self.jobs.end() {
            let Some(job) = self.jobs.get_mut(slot) else {
                continue;
            };
            while let Some(request) = job.next() {
                self.state.requests.submit(Submitted {
                    origin: Origin::Job(slot),
                    volume: job.volume,
                    arrived: self.state.now,
                    ticket: None,
                    request,
                });
            }
            if job.is_over()
                && let Some(job) = self.jobs.remove(slot)
            {
                job.answer();
            }
        }
    }

    /// Take back what waits for its turn and came from connections that broke off: once for each of them, and for all
    /// of a volume's together, since each time costs as much as there waits. What they submitted has been taken in.
    fn withdraw(&mut self) {
        let mut broken = std::mem::take(&mut self.broken);
        broken.sort_unstable_by_key(|&(volume, slot)| (volume.0, slot));
        for theirs in broken.chunk_by(|one, other| one.0 == other.0) {
            self.state.withdraw(theirs);
        }
    }

    /// Send and receive on the listed connections; drop those that are over.
    fn serve(&mut self) {
        let mut listed = std::mem::take(&mut self.listed);
        let count = listed.len();
        let mut has_freed = false;
        for slot in listed.drain(..) {
            let work = self.work_left(slot);
            let Some(connection) = self.connections.get_mut(slot) else {
                continue;
            };
            connection.listed = false;
            let number = connection.volume();
            let flooded = self.state.is_flooded(number);
            let mut host = host(&mut self.state, slot, connection, work);
            let place = if flooded || self.held.contains(&slot) {
                None
            } else {
                connection.ask_receive(&mut host)
            };
            let (requests, worked) = (host.requests, host.worked);
            connection.requests += requests;
            self.turns.note(&mut connection.account, worked);
            let ring = &mut self.state.ring;
            has_freed |=
                connection.serve(self.state.now, slot, place, count, ring, &mut self.counts);
            self.look_for_volume(slot);
            self.note_visit(slot);
            self.hand_over(slot);
            let Some(connection) = self.connections.get_mut(slot) else {
                continue;
            };
            let (number, held) = (connection.volume(), as_counted(connection.held()));
            self.state.count(number, &mut connection.counted, held);
            if connection.breaks_off() && connection.requests > 0 {
                self.broken.extend(number.map(|number| (number, slot)));
            }
            if connection.is_over() {
                let none = Held::default();
                self.state.count(number, &mut connection.counted, none);
                self.connections.remove(slot);
            } else if connection.is_left() {
                self.part_from(slot);
            } else if connection.waits() || flooded {
                self.waiters.push_back(slot);
            }
            // A volume that is on its way out may wait for the last of its requests.
            let leaves = (self.connections.get(slot)).is_some_and(|one| {
                one.station == Station::Waits && one.is_still() && self.departures_until != NEVER
            });
            self.pressed |= leaves;
            // It may be its next turn that it waits for.
            let connection = self.connections.get(slot);
            self.pressed |= connection.is_some_and(|connection| {
                connection.waits() && self.turns.left(&connection.account) == 0
            });
        }
        // What it was that one of them waits for may have become free.
        self.pressed |= has_freed && !self.waiters.is_empty();
        self.listed = listed;
    }

    fn accepted(&mut self, slot: u32, connection: Result<OwnedFd, Errno>) {
        let stopping = self.stopping.is_some();
        let now = self.state.now;
        let Some(listener) = self.listeners.get_mut(slot) else {
            return;
        };
        listener.accepting = None;
        if stopping {
            self.listeners.remove(slot);
            return;
        }
        listener.again = Some(now.plus(if connection.is_ok() {
            Nanos(0)
        } else {
            Nanos(ACCEPT_PAUSE.as_nanos() as u64)
        }));
        match connection {
            Ok(socket) => {
                if std::mem::take(&mut listener.failing) {
                    note_accepting(&self.state.events, &listener.address, Ok(()));
                }
                let place = listener.places.take();
                let has_room = self.state.shares.has_room_for_connection(!listener.tcp);
                let Some((socket, client)) = introduce(socket, listener.tcp) else {
                    return;
                };
                match place {
                    Some(place) if has_room => {
                        let session = (listener.sessions.0)(client);
                        self.insert(Connection::new(socket, session, client, place));
                    }
                    place => {
                        drop(socket);
                        let why = place.map_or(NO_PLACE, |_| NO_MEMORY);
                        self.note_refused_entry(client, &Peer::Unnamed, why);
                        self.refuse_connection();
                    }
                }
            }
            Err(Errno(libc::ECANCELED | libc::ECONNABORTED)) => {}
            Err(errno) => {
                listener.failing = true;
                note_accepting(&self.state.events, &listener.address, Err(&error_of(errno)));
                if let Some(left_out) = listener.faults.pass() {
                    tracing::warn!(error = %errno, left_out, "cannot accept a connection");
                }
            }
        }
    }

    /// Begin to serve a client.
    pub fn insert(&mut self, connection: Connection) -> u32 {
        let slot = self.connections.insert(connection);
        self.recount(slot);
        if self.look_at == NEVER {
            let period = self.config.connections.look_period();
            self.look_at = self.state.now.plus(period);
        }
        self.list(slot);
        slot
    }

    /// Count what a connection holds that is new here.
    pub fn recount(&mut self, slot: u32) {
        if let Some(connection) = self.connections.get_mut(slot) {
            let (number, held) = (connection.volume(), as_counted(connection.held()));
            self.state.count(number, &mut connection.counted, held);
        }
    }

    /// A connection was one too many. Whoever tries again and again does not fill the log.
    pub fn refuse_connection(&mut self) {
        self.refused += 1;
        let now = self.state.now;
        if self.refused_said <= now {
            tracing::warn!(
                max = self.config.connections.count_max,
                refused = self.refused,
                memory = self.state.shares.heap().total(),
                memory_left = self.state.shares.heap().left(),
                "too many connections: closed the newest; raise nbd_connections_max or memory_max_mib if they are needed"
            );
            self.refused_said = now.plus(REFUSAL_PAUSE);
        }
    }

    /// End the connections whose clients have owed something for too long.
    fn look_at_connections(&mut self) {
        let now = self.state.now;
        if now < self.look_at {
            return;
        }
        self.look_for_leavers();
        for slot in 0..self.connections.end() {
            let Some(connection) = self.connections.get_mut(slot) else {
                continue;
            };
            let Some(why) = connection.look(now, &self.config.connections) else {
                continue;
            };
            let visit = connection.visit.as_ref();
            let volume = visit.map_or("none", |visit| &visit.name);
            tracing::warn!(
                volume,
                client = %connection.client,
                "ended the connection of a client that stalls: {why}"
            );
            // After the line, so that whoever sees the end finds it.
            if let Some(connection) = self.connections.get_mut(slot) {
                connection.abort(Ending::Ended(why));
            }
            self.note_visit(slot);
            self.list(slot);
        }
        self.look_at = if self.connections.is_empty() {
            NEVER
        } else {
            now.plus(self.config.connections.look_period())
        };
    }

    fn accept_again(&mut self) {
        for slot in 0..self.listeners.end() {
            if let Some(listener) = self.listeners.get_mut(slot)
                && listener.again.is_some_and(|again| again <= self.state.now)
            {
                listener.again = None;
                let fd = listener.socket.as_raw_fd();
                listener.accepting = Some(self.state.ring.accept(Owner::Listener(slot), fd));
            }
        }
    }

    /// Volumes that have come to the end of opening or closing.
    fn settle(&mut self) {
        let mut settling = std::mem::take(&mut self.state.settling);
        for slot in settling.drain(..) {
            if let Some(served) = self.state.volumes.get_mut(slot) {
                served.listed.to_settle = false;
            }
            self.state.publish(slot);
            self.settle_one(slot);
            self.state.publish(slot);
            let served = self.state.volumes.get(slot);
            if served.is_some_and(Served::is_changing) {
                self.state.settle_later(slot);
            }
        }
        self.note_departures();
        settling.append(&mut self.state.settling);
        self.state.settling = settling;
    }

    fn settle_one(&mut self, slot: u32) {
        let Some(served) = self.state.volumes.get_mut(slot) else {
            return;
        };
        match served.volume.phase() {
            Phase::Opening => {}
            // What the backend has to do may wait for the end of a resize, or of a snapshot that was asked for when the
            // volume was already told to close.
            Phase::Closing => {
                self.state
                    .give_up_snapshot(slot, SnapshotFailure::Now(NOT_OPEN));
                self.state.go_on_resizing(slot);
            }
            Phase::Open if served.departing.is_some() => self.go_on_departing(slot),
            Phase::Open => {
                // A resize or a snapshot would wait for the same for ever; the close ends it.
                if served.is_to_close_stuck() {
                    self.state.go_on_tiering(slot);
                    return;
                }
                if let Some(snapshotting) = &served.snapshotting {
                    if snapshotting.operation.awaits_tier_out() {
                        self.state.go_on_tiering(slot);
                    }
                    self.state.go_on_snapshotting(slot);
                    return;
                }
                if served.resizing.is_some() {
                    self.state.go_on_resizing(slot);
                    return;
                }
                if served.tier_out.is_some() {
                    self.state.go_on_tiering(slot);
                    return;
                }
                if let Some(answer) = served.opening.take() {
                    let found = served.log_identity;
                    let incarnation = found.incarnation + 1;
                    // Whoever asked may have gone.
                    let _ = answer.send(Ok(OpenedAs {
                        log: LogIdentity {
                            incarnation,
                            ..found
                        },
                        backend: served.identity.clone(),
                    }));
                }
            }
            Phase::Failed(_) | Phase::Closed => {
                if served.is_idle() && served.backend.finish() {
                    self.drop_volume(slot);
                }
            }
        }
    }
}

/// What a session sees of its shard when it is called.
fn host<'a>(
    state: &'a mut ShardState,
    slot: u32,
    connection: &Connection,
    work: usize,
) -> SessionHost<'a> {
    let (counted, queued) = (connection.counted, connection.queued());
    let volume = connection.volume();
    let served = volume.and_then(|number| state.served(number));
    let of_volume = served.map_or(0, |served| served.data_bytes);
    let allowance = state.shares.allowance(of_volume, counted, queued, work);
    SessionHost {
        state,
        connection: slot,
        client: connection.client,
        requests: 0,
        allowance,
        worked: 0,
    }
}

/// Have memory of this shard's lie in huge pages, of which so much is there at once.
fn settle_memory((address, bytes): (NonNull<u8>, usize), touched_bytes: usize) {
    // SAFETY: whoever has it has just made it.
    unsafe { memory::prepare(address, bytes, touched_bytes) };
}

fn keep_to(processor: usize) {
    // SAFETY: all zeroes is a valid, empty set; the call reads it before it returns.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor % libc::CPU_SETSIZE as usize, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if result < 0 {
        let error = io::Error::last_os_error();
        tracing::warn!(processor, %error, "cannot keep the shard to its processor");
    }
}
