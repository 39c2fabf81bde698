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
//! 4. One connection gets one receive and one send per turn.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use hdcs_core::buf::{BufMut, Pool};
use hdcs_core::error::{IoError, RequestError};
use hdcs_core::io::{Action, Completion, Nanos, Request, RequestId, SectorRange, Token};
use hdcs_core::limits::VOLUME_REQUESTS_MAX;
use hdcs_core::read_cache::{CacheEvent, ReadCache};
use hdcs_core::volume::{Context, Event, Phase, Volume};

use super::ShardConfig;
use super::cache_place::Started;
use super::command::{
    Answer, ClosedVolume, Command, LogIdentity, OpenFailure, OpenedAs, SessionFactory, VolumeSpec,
};
use super::connection::{Connection, introduce};
use super::identity::{self, Identity};
use super::jobs::Job;
use super::readmission::{self, Readmission};
use super::served::{Class, Ended, Origin, Pending, Served, Submitted};
use super::slots::Slots;
use crate::backends::{Ask, Operation, Port};
use crate::device::Errno;
use crate::device::file::Device;
use crate::device::ring::{Finished, Key, Outcome, Owner, Ring};
use crate::device::worker::{JobOutput, Waker};
use crate::device::writers::raise_priority;
use crate::frontends::{Export, Host, VolumeNumber};

/// Between two lines in the log about connections that were too many.
const REFUSAL_PAUSE: Nanos = Nanos::from_millis(1_000);
/// Rounds of serving and stepping within one turn: lets a request that a session had kept back be
/// answered in the turn in which another one ended.
const ROUNDS_MAX: usize = 4;
/// After a failure to accept (no descriptors, no memory), the next attempt.
const ACCEPT_PAUSE: Nanos = Nanos::from_millis(100);
/// Tokens of the shard's own backend operations; the core counts from zero.
pub const RESIZE_TOKEN: Token = Token(u64::MAX);
/// See [`RESIZE_TOKEN`].
pub const KEEP_TOKEN: Token = Token(u64::MAX - 1);
/// A time that never comes.
const NEVER: Nanos = Nanos(u64::MAX);

/// A socket that accepts.
pub struct Listener {
    pub socket: OwnedFd,
    pub sessions: SessionFactory,
    pub accepting: Option<Key>,
    pub again: Option<Nanos>,
    pub tcp: bool,
}

/// How far a stop has come.
pub struct Stopping {
    pub destage: bool,
    pub answers: Vec<Answer<Vec<ClosedVolume>>>,
    pub closed: Vec<ClosedVolume>,
    /// When connections that are left are broken off.
    pub deadline: Nanos,
    pub volumes_closing: bool,
    /// When volumes that are left are given up, unless they are to be destaged.
    pub give_up: Nanos,
    pub cache_closing: bool,
}

/// A volume that has left its slot while the cache device owes it the end of reads. It takes them,
/// and does nothing else.
pub struct Husk {
    pub volume: Volume,
    pub cache_reads: usize,
}

/// What sessions and volumes share: everything but the connections.
pub struct Works {
    pub ring: Ring,
    pub pool: Rc<Pool>,
    pub cache: ReadCache,
    pub cache_device: Option<Device>,
    pub cache_operations: usize,
    pub cache_touched: bool,
    pub volumes: Slots<Served>,
    /// By the slot that they were in.
    pub husks: HashMap<u32, Husk>,
    pub numbers: HashMap<VolumeNumber, u32>,
    /// Why volumes that the node has are not open, by name.
    pub explained: HashMap<String, String>,
    /// By volume slot: when it must be polled.
    pub due: Vec<Nanos>,
    pub touched: Vec<u32>,
    pub requests: Slots<Pending>,
    pub submitted: Vec<Submitted>,
    /// Requests that ended, for their origins.
    pub ended: Vec<(Origin, Ended)>,
    actions: Vec<Action>,
    completions: Vec<Completion>,
    pub now: Nanos,
}

/// See the module.
pub struct Shard {
    // The ring in here is dropped before the connections, whose memory it may use.
    pub works: Works,
    pub connections: Slots<Connection>,
    /// Connections to be served in this turn.
    pub listed: Vec<u32>,
    /// Connections that wait for buffers or for what they have in flight.
    waiters: Vec<u32>,
    pub listeners: Slots<Listener>,
    /// When connections are looked at again.
    look_at: Nanos,
    /// Connections that were closed because they were too many, and when that is said again.
    refused: u64,
    refused_said: Nanos,
    pub jobs: Slots<Job>,
    pub openings: Slots<(Box<VolumeSpec>, Answer<OpenedAs, OpenFailure>)>,
    pub stopping: Option<Stopping>,
    /// Of the cache.
    pub identity: Identity,
    pub readmission: Readmission,
    pub commands: Receiver<Command>,
    pub config: ShardConfig,
    origin: Instant,
}

/// What a session sees of its shard.
struct SessionHost<'a> {
    works: &'a mut Works,
    connection: u32,
    requests: usize,
}

impl Host for SessionHost<'_> {
    fn exports(&self) -> Vec<Export> {
        let mut exports: Vec<Export> = self
            .works
            .volumes
            .iter()
            .filter_map(|(_, served)| served.export())
            .collect();
        exports.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        exports
    }

    fn export(&self, name: &str) -> Option<Export> {
        let mut served = self.works.volumes.iter().map(|(_, served)| served);
        served.find(|served| served.name == name)?.export()
    }

    fn why_not(&self, name: &str) -> Option<String> {
        self.works.explained.get(name).cloned()
    }

    fn alloc(&mut self, range: SectorRange) -> Option<BufMut> {
        self.works.pool.alloc_for(range)
    }

    fn submit(&mut self, volume: VolumeNumber, id: RequestId, request: Request) {
        self.requests += 1;
        self.works.submitted.push(Submitted {
            origin: Origin::Connection(self.connection, id),
            volume,
            arrived: self.works.now,
            request,
        });
    }
}

impl Works {
    /// Mark a volume for a poll in this turn.
    pub fn touch(&mut self, slot: u32) {
        if let Some(served) = self.volumes.get_mut(slot)
            && !served.listed
        {
            served.listed = true;
            self.touched.push(slot);
        }
    }

    /// Hand a volume an event, and perform what follows.
    pub fn step(&mut self, slot: u32, event: Event) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let mut context = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut self.actions,
        };
        served.volume.step(self.now, event, &mut context);
        self.perform(slot);
    }

    /// Perform what opening a volume has asked for.
    pub fn perform_opening(&mut self, slot: u32, mut actions: Vec<Action>) {
        self.actions.append(&mut actions);
        self.perform(slot);
    }

    /// Perform the volume's actions; what ends at once is fed back.
    pub fn perform(&mut self, slot: u32) {
        self.touch(slot);
        self.feed(slot);
        while !self.actions.is_empty() {
            let mut actions = std::mem::take(&mut self.actions);
            for action in actions.drain(..) {
                self.act(slot, action);
            }
            self.actions = actions;
            self.feed(slot);
        }
    }

    /// Step the volume with what its backend ended at once.
    fn feed(&mut self, slot: u32) {
        while !self.completions.is_empty() {
            let mut completions = std::mem::take(&mut self.completions);
            for completion in completions.drain(..) {
                let Some(completion) = self.take_own(slot, completion) else {
                    continue;
                };
                let Some(served) = self.volumes.get_mut(slot) else {
                    continue;
                };
                served.hurry = true;
                let mut context = Context {
                    cache: &mut self.cache,
                    pool: &self.pool,
                    actions: &mut self.actions,
                };
                let event = Event::Completed(completion);
                served.volume.step(self.now, event, &mut context);
            }
            // What a resize had held back may have ended at once: it is next.
            if self.completions.is_empty() {
                self.completions = completions;
            }
        }
    }

    fn act(&mut self, slot: u32, action: Action) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let owner = Owner::Volume(slot);
        let operation = match action {
            Action::Reply { request, result } => return self.reply(slot, request, result),
            Action::LogRead { token, offset, buf } => {
                served.log_operations += 1;
                return served.log.read(&mut self.ring, owner, token, offset, buf);
            }
            Action::LogWrite {
                token,
                offset,
                data,
            } => {
                served.log_operations += 1;
                let ring = &mut self.ring;
                return served.log.write_urgently(ring, owner, token, offset, data);
            }
            Action::CacheRead { token, offset, buf } => {
                let device = self.cache_device.as_ref();
                let device = device.expect("a cache without a device reads nothing from it");
                served.cache_reads += 1;
                let owner = Owner::CacheOf(slot);
                return device.read(&mut self.ring, owner, token, offset, buf);
            }
            Action::CacheWrite { .. } => unreachable!("volumes do not write to the cache device"),
            Action::BackendRead { token, offset, buf } => Operation {
                token,
                ask: Ask::Read { offset, buf },
            },
            Action::BackendWrite {
                token,
                offset,
                data,
            } => Operation {
                token,
                ask: Ask::Write { offset, data },
            },
            Action::BackendZero {
                token,
                offset,
                bytes,
                unmap,
            } => Operation {
                token,
                ask: Ask::Zero {
                    offset,
                    bytes,
                    unmap,
                },
            },
            Action::BackendFlush { token } => Operation {
                token,
                ask: Ask::Flush,
            },
            Action::BackendExtents { token, range } => Operation {
                token,
                ask: Ask::Extents { range },
            },
        };
        self.ask_backend(slot, operation);
    }

    /// Hand an operation to a volume's backend; what ends at once waits in `completions`.
    pub fn ask_backend(&mut self, slot: u32, operation: Operation) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let mut port = Port {
            ring: &mut self.ring,
            owner: Owner::Backend(slot),
            done: &mut self.completions,
        };
        if served.holds(&operation.ask) {
            served.held.push(operation);
            return;
        }
        served.backend.submit(self.now, operation, &mut port);
    }

    /// A ring operation of a volume's backend ended.
    fn backend_finished(&mut self, slot: u32, token: Token, outcome: Outcome) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let mut port = Port {
            ring: &mut self.ring,
            owner: Owner::Backend(slot),
            done: &mut self.completions,
        };
        served
            .backend
            .completed(self.now, token, outcome, &mut port);
        self.perform(slot);
    }

    /// Perform the cache's own actions.
    fn perform_cache(&mut self) {
        let Some(device) = &self.cache_device else {
            assert!(
                self.actions.is_empty(),
                "a cache without a device does no I/O"
            );
            return;
        };
        for action in self.actions.drain(..) {
            self.cache_operations += 1;
            match action {
                Action::CacheRead { token, offset, buf } => {
                    device.read(&mut self.ring, Owner::Cache, token, offset, buf);
                }
                Action::CacheWrite {
                    token,
                    offset,
                    data,
                    durable,
                } => {
                    device.write(&mut self.ring, Owner::Cache, token, offset, data, durable);
                }
                other => unreachable!("the cache touches its device alone, not {other:?}"),
            }
        }
    }

    /// Hand the cache an event, and perform what follows.
    pub fn step_cache(&mut self, event: CacheEvent) {
        self.cache.step(self.now, event, &mut self.actions);
        self.perform_cache();
    }

    /// The cache device has brought a volume what it waits for no longer.
    fn step_husk(&mut self, slot: u32, completion: Completion) {
        let Some(husk) = self.husks.get_mut(&slot) else {
            return;
        };
        let mut context = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut self.actions,
        };
        let event = Event::Completed(completion);
        husk.volume.step(self.now, event, &mut context);
        assert!(
            self.actions.is_empty(),
            "a volume that is closed does nothing"
        );
        husk.cache_reads -= 1;
        if husk.cache_reads == 0 {
            self.husks.remove(&slot);
            self.volumes.release(slot);
        }
    }

    fn reply(&mut self, slot: u32, request: RequestId, result: Ended) {
        let pending = self.requests.remove(request.0 as u32);
        let pending = pending.expect("a volume answers what it was asked, once");
        if let Some(served) = self.volumes.get_mut(slot) {
            served.requests -= 1;
            served.record(pending.class, self.now.since(pending.arrived));
        }
        self.ended.push((pending.origin, result));
    }

    /// Step the volumes with what was submitted.
    fn step_submitted(&mut self) {
        let mut submitted = std::mem::take(&mut self.submitted);
        for one in submitted.drain(..) {
            let slot = self.numbers.get(&one.volume).copied();
            let served = slot.and_then(|slot| Some((slot, self.volumes.get_mut(slot)?)));
            let Some((slot, served)) = served else {
                self.ended.push((one.origin, Err(RequestError::Closing)));
                continue;
            };
            if served.requests >= VOLUME_REQUESTS_MAX || !served.waiting.is_empty() {
                served.waiting.push_back(one);
                continue;
            }
            self.request(slot, one);
        }
        self.submitted = submitted;
    }

    /// Let waiting requests in, as far as the volume takes them.
    fn admit(&mut self, slot: u32) {
        while let Some(served) = self.volumes.get_mut(slot)
            && served.requests < VOLUME_REQUESTS_MAX
            && let Some(one) = served.waiting.pop_front()
        {
            self.request(slot, one);
        }
    }

    fn request(&mut self, slot: u32, one: Submitted) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        served.requests += 1;
        let id = self.requests.insert(Pending {
            origin: one.origin,
            arrived: one.arrived,
            class: Class::of(&one.request),
        });
        let id = RequestId(u64::from(id));
        let request = one.request;
        self.step(slot, Event::Request { id, request });
    }

    /// Poll the volumes that were touched or whose time has come, then the cache.
    fn poll(&mut self) {
        for slot in 0..self.due.len() as u32 {
            if self.due[slot as usize] <= self.now {
                self.touch(slot);
            }
        }
        let mut touched = std::mem::take(&mut self.touched);
        for &slot in &touched {
            let Some(served) = self.volumes.get_mut(slot) else {
                continue;
            };
            let mut port = Port {
                ring: &mut self.ring,
                owner: Owner::Backend(slot),
                done: &mut self.completions,
            };
            served.backend.poll(self.now, &mut port);
            self.perform(slot);
            if let Some(served) = self.volumes.get_mut(slot) {
                served.hurry = false;
            }
            // A poll may answer requests and so let others in, which need a poll of their own.
            loop {
                self.admit(slot);
                self.step(slot, Event::Poll);
                let more = self.volumes.get(slot).is_some_and(|served| {
                    !served.waiting.is_empty() && served.requests < VOLUME_REQUESTS_MAX
                });
                if !more {
                    break;
                }
            }
        }
        let cache_due = self.cache.next_wakeup().is_some_and(|due| due <= self.now);
        if !touched.is_empty() || self.cache_touched || cache_due {
            self.cache_touched = false;
            self.step_cache(CacheEvent::Poll);
        }
        for &slot in &touched {
            self.note_due(slot);
        }
        // Those that were touched while they were polled are among them.
        self.touched.clear();
        touched.clear();
        self.touched = touched;
    }

    /// Note when a volume must be polled next.
    fn note_due(&mut self, slot: u32) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        served.listed = false;
        let volume = served.volume.next_wakeup().unwrap_or(NEVER);
        let backend = served.backend.next_wakeup().unwrap_or(NEVER);
        let index = slot as usize;
        if self.due.len() <= index {
            self.due.resize(index + 1, NEVER);
        }
        // What ended at once while the volume was polled, it has yet to go on with.
        self.due[index] = if std::mem::take(&mut served.hurry) {
            self.now
        } else {
            volume.min(backend)
        };
    }
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
        let mut cache_config = config.cache.clone();
        let (mut actions, memory) = (Vec::new(), Rc::clone(&pool));
        let mut readmission = Readmission::default();
        let mut cache_device = None;
        let cache = match cache_start {
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
                        cache_device = Some(device);
                        ReadCache::new(cache_config, Nanos(0), memory, &mut actions)
                    }
                    Err(why) => {
                        readmission = Readmission::after(why);
                        ReadCache::without_device(cache_config, memory)
                    }
                }
            }
        };
        let mut works = Works {
            ring,
            pool,
            cache,
            cache_device,
            cache_operations: 0,
            cache_touched: true,
            volumes: Slots::default(),
            husks: HashMap::new(),
            numbers: HashMap::new(),
            explained: HashMap::new(),
            due: Vec::new(),
            touched: Vec::new(),
            requests: Slots::default(),
            submitted: Vec::new(),
            ended: Vec::new(),
            actions,
            completions: Vec::new(),
            now: Nanos(0),
        };
        works.perform_cache();
        Ok(Self {
            works,
            connections: Slots::default(),
            listed: Vec::new(),
            waiters: Vec::new(),
            listeners: Slots::default(),
            look_at: NEVER,
            refused: 0,
            refused_said: Nanos(0),
            jobs: Slots::default(),
            openings: Slots::default(),
            stopping: None,
            identity: Identity::default(),
            readmission,
            commands,
            config,
            origin: Instant::now(),
        })
    }

    pub fn waker(&self) -> Waker {
        self.works.ring.waker()
    }

    /// Turn until it has stopped.
    pub fn run(mut self) {
        let mut finished = Vec::new();
        while !self.has_stopped() {
            let timeout = self.timeout();
            if let Err(error) = self.works.ring.submit_and_wait(timeout) {
                tracing::error!(%error, "io_uring failed; the shard cannot go on");
                return;
            }
            self.works.now = Nanos(self.origin.elapsed().as_nanos() as u64);
            self.works.ring.reap(&mut finished);
            for one in finished.drain(..) {
                self.dispatch(one);
            }
            self.turn();
        }
    }

    fn turn(&mut self) {
        self.accept_again();
        self.look_at_connections();
        // Whatever ended may have freed the buffer that one of them waits for.
        while let Some(slot) = self.waiters.pop() {
            self.list(slot);
        }
        for _ in 0..ROUNDS_MAX {
            self.works.step_submitted();
            self.works.poll();
            self.settle();
            self.deliver();
            self.run_jobs();
            self.serve();
            if self.works.submitted.is_empty() {
                break;
            }
        }
        self.go_on_stopping();
        if let Some(device) = &self.config.cache_device {
            self.identity.go_on(&mut self.works, &device.place);
            if self.stopping.is_none() {
                self.readmission.go_on(&mut self.works, device);
            }
        }
    }

    /// How long to wait at most.
    fn timeout(&self) -> Option<Duration> {
        if !self.works.submitted.is_empty() || !self.works.touched.is_empty() {
            return Some(Duration::ZERO);
        }
        let listeners = self.listeners.iter().filter_map(|(_, one)| one.again);
        let stopping = self.stopping.as_ref();
        let stop = stopping.map(|stopping| stopping.deadline.min(stopping.give_up));
        let due = self.works.due.iter().copied();
        let identity = self.identity.next_wakeup();
        let cache = self.works.cache.next_wakeup();
        let retry = self.readmission.next_wakeup();
        let retry = retry.filter(|_| self.stopping.is_none());
        let cache = cache.into_iter().chain(retry);
        let others = [self.look_at].into_iter().chain(identity).chain(cache);
        let next = due.chain(listeners).chain(stop).chain(others).min()?;
        (next != NEVER).then(|| {
            let now = Nanos(self.origin.elapsed().as_nanos() as u64);
            Duration::from_nanos(next.since(now).0)
        })
    }

    fn dispatch(&mut self, finished: Finished) {
        let Finished {
            owner,
            token,
            outcome,
        } = finished;
        match (owner, outcome) {
            (Owner::Volume(slot), Outcome::Device(result)) => {
                if let Some(served) = self.works.volumes.get_mut(slot) {
                    served.log_operations -= 1;
                }
                let result = result.map_err(IoError::from);
                let event = Event::Completed(Completion { token, result });
                self.works.step(slot, event);
            }
            (Owner::CacheOf(slot), Outcome::Device(result)) => {
                let result = result.map_err(IoError::from);
                let completion = Completion { token, result };
                if let Some(served) = self.works.volumes.get_mut(slot) {
                    served.cache_reads -= 1;
                    self.works.step(slot, Event::Completed(completion));
                } else {
                    self.works.step_husk(slot, completion);
                }
            }
            (Owner::Cache, Outcome::Device(result)) => {
                self.works.cache_operations -= 1;
                let result = result.map_err(IoError::from);
                let event = CacheEvent::Completed(Completion { token, result });
                self.works.step_cache(event);
                self.works.cache_touched = true;
                // A volume may wait for what has just become durable.
                for slot in 0..self.works.volumes.end() {
                    self.works.touch(slot);
                }
            }
            (Owner::Backend(slot), outcome) => self.works.backend_finished(slot, token, outcome),
            (Owner::Receive(slot), Outcome::Count(result)) => {
                self.with_session(slot, |connection, host| connection.received(result, host));
            }
            (Owner::Send(slot), Outcome::Count(result)) => {
                if let Some(connection) = self.connections.get_mut(slot) {
                    connection.sent(result);
                }
                self.list(slot);
            }
            (Owner::Listener(slot), Outcome::Accepted { connection, last }) => {
                self.accepted(slot, connection, last);
            }
            (Owner::Shard, Outcome::Woken) => self.take_commands(),
            (Owner::Shard, Outcome::Job(JobOutput::Any(recorded))) if token == identity::TOKEN => {
                let recorded = recorded.downcast().expect("the job says how it ended");
                self.identity.recorded(&mut self.works, *recorded);
            }
            (Owner::Shard, Outcome::Job(JobOutput::Any(tried))) if token == readmission::TOKEN => {
                let tried = tried.downcast().expect("the probe says what it found");
                self.readmission.tried(&mut self.works, *tried);
            }
            (Owner::Shard, Outcome::Job(JobOutput::Any(opened))) => self.opened(token, opened),
            (owner, outcome) => unreachable!("{owner:?} starts nothing that ends in {outcome:?}"),
        }
    }

    /// Call into a connection's session, and note what it submitted.
    fn with_session(&mut self, slot: u32, call: impl FnOnce(&mut Connection, &mut dyn Host)) {
        let Some(connection) = self.connections.get_mut(slot) else {
            return;
        };
        let mut host = SessionHost {
            works: &mut self.works,
            connection: slot,
            requests: 0,
        };
        call(connection, &mut host);
        connection.requests += host.requests;
        self.list(slot);
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
        let mut ended = std::mem::take(&mut self.works.ended);
        for (origin, result) in ended.drain(..) {
            match origin {
                Origin::Connection(slot, id) => {
                    if let Some(connection) = self.connections.get_mut(slot) {
                        connection.requests -= 1;
                        connection.session().completed(id, result);
                    }
                    self.list(slot);
                }
                Origin::Job(slot) => {
                    if let Some(job) = self.jobs.get_mut(slot) {
                        job.ended(result.map(drop));
                    }
                }
            }
        }
        self.works.ended = ended;
    }

    fn run_jobs(&mut self) {
        for slot in 0..self.jobs.end() {
            let Some(job) = self.jobs.get_mut(slot) else {
                continue;
            };
            while let Some(request) = job.next() {
                self.works.submitted.push(Submitted {
                    origin: Origin::Job(slot),
                    volume: job.volume,
                    arrived: self.works.now,
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

    /// Send and receive on the listed connections; drop those that are over.
    fn serve(&mut self) {
        let mut listed = std::mem::take(&mut self.listed);
        for slot in listed.drain(..) {
            let Some(connection) = self.connections.get_mut(slot) else {
                continue;
            };
            connection.listed = false;
            let mut host = SessionHost {
                works: &mut self.works,
                connection: slot,
                requests: 0,
            };
            let place = connection.ask_receive(&mut host);
            connection.requests += host.requests;
            connection.serve(slot, place, &mut self.works.ring);
            if connection.is_over() {
                self.connections.remove(slot);
            } else if connection.waits() {
                self.waiters.push(slot);
            }
        }
        self.listed = listed;
    }

    fn accepted(&mut self, slot: u32, connection: Result<OwnedFd, Errno>, last: bool) {
        let stopping = self.stopping.is_some();
        let now = self.works.now;
        let Some(listener) = self.listeners.get_mut(slot) else {
            return;
        };
        if last {
            listener.accepting = None;
            if stopping {
                self.listeners.remove(slot);
                return;
            }
            listener.again = Some(now.plus(if connection.is_ok() {
                Nanos(0)
            } else {
                ACCEPT_PAUSE
            }));
        }
        match connection {
            Ok(socket) => {
                if self.connections.len() >= self.config.connections.count_max {
                    drop(socket);
                    return self.refuse_connection();
                }
                let Some((socket, transport)) = introduce(socket, listener.tcp) else {
                    return;
                };
                let session = (listener.sessions.0)(transport);
                let connection = Connection::new(socket, session);
                let slot = self.connections.insert(connection);
                if self.look_at == NEVER {
                    self.look_at = now.plus(self.config.connections.look_period());
                }
                self.list(slot);
            }
            Err(Errno(libc::ECANCELED | libc::ECONNABORTED)) => {}
            Err(errno) => tracing::warn!(error = %errno, "cannot accept a connection"),
        }
    }

    /// A connection was one too many. Whoever tries again and again does not fill the log.
    fn refuse_connection(&mut self) {
        self.refused += 1;
        let now = self.works.now;
        if self.refused_said <= now {
            tracing::warn!(
                max = self.config.connections.count_max,
                refused = self.refused,
                "too many connections: closed the newest; raise nbd_connections_max if they are needed"
            );
            self.refused_said = now.plus(REFUSAL_PAUSE);
        }
    }

    /// End the connections whose clients have owed something for too long.
    fn look_at_connections(&mut self) {
        let now = self.works.now;
        if now < self.look_at {
            return;
        }
        for slot in 0..self.connections.end() {
            let Some(connection) = self.connections.get_mut(slot) else {
                continue;
            };
            let Some(why) = connection.look(now, &self.config.connections) else {
                continue;
            };
            let number = connection.volume();
            let served = number.and_then(|number| self.works.numbers.get(&number));
            let served = served.and_then(|&slot| self.works.volumes.get(slot));
            let volume = served.map_or("none", |served| &served.name);
            tracing::warn!(
                volume,
                "ended the connection of a client that stalls: {why}"
            );
            // After the line, so that whoever sees the end finds it.
            if let Some(connection) = self.connections.get_mut(slot) {
                connection.abort();
            }
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
                && listener.again.is_some_and(|again| again <= self.works.now)
            {
                listener.again = None;
                let fd = listener.socket.as_raw_fd();
                listener.accepting = Some(self.works.ring.accept(Owner::Listener(slot), fd));
            }
        }
    }

    /// Volumes that have come to the end of opening or closing.
    fn settle(&mut self) {
        for slot in 0..self.works.volumes.end() {
            let Some(served) = self.works.volumes.get_mut(slot) else {
                continue;
            };
            match served.volume.phase() {
                Phase::Opening => {}
                // What the backend has to do may wait for the end of a resize.
                Phase::Closing => self.works.go_on_resizing(slot),
                Phase::Open => {
                    if served.keeping.is_some() {
                        self.works.go_on_keeping(slot);
                        continue;
                    }
                    if served.resizing.is_some() {
                        self.works.go_on_resizing(slot);
                        continue;
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
