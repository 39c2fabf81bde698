//! What a shard's sessions and volumes share, and how a volume's actions are performed.
//!
//! Invariants: see [`super::turn`].

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use hdcs_backend::memory::Share;
use hdcs_backend::{Ask, Operation, Port};
use hdcs_core::base::buf::{BufMut, Pool};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{
    Action, Completion, Done, Nanos, Request, RequestId, SectorRange, Token,
};
use hdcs_core::base::limits::VOLUME_REQUESTS_MAX;
use hdcs_core::cache::{CacheEvent, ReadCache};
use hdcs_core::log::budget::IndexBudget;
use hdcs_core::log::index_cap::IndexPart;
use hdcs_core::volume::{Context, Event, Volume, sharing};
use hdcs_device::Errno;
use hdcs_device::ring::{Outcome, Owner, Ring};
use hdcs_device::worker::JobOutput;
use hdcs_frontend::access::{Allow, Peer};
use hdcs_frontend::{Allowance, Export, Held, Host, Unopened, VolumeNumber, work_of};

use super::ciphered_log::Write;
use super::closed_volumes::{ClosedVolumes, Late};
use super::command::Transport;
use super::directory::{Directory, Refusal};
use super::due::Due;
use super::groups::Groups;
use super::requests::Requests;
use super::served::{Ended, Origin, Served, Submitted};
use super::shared_cache::SharedCache;
use super::shares::ClientShares;
use super::slots::Slots;
use super::turn::NEVER;
use crate::events::Recorder;

/// Between two lines in the log about clients that were refused a volume.
const REFUSAL_PAUSE: Nanos = Nanos::from_millis(1_000);

/// What sessions and volumes share: everything but the connections.
pub struct ShardState {
    pub ring: Ring,
    pub pool: Arc<Pool>,
    pub cache: ReadCache,
    pub shared_cache: Arc<SharedCache>,
    pub cache_operations: usize,
    pub cache_touched: bool,
    pub volumes: Slots<Served>,
    pub closed_volumes: ClosedVolumes,
    pub numbers: BTreeMap<VolumeNumber, u32>,
    /// Which of the node's shards this is.
    pub shard: usize,
    /// What clients are told of all of the node's volumes.
    pub directory: Arc<Directory>,
    /// When the log may say again that a client was refused a volume.
    pub refusal_said: Cell<Nanos>,
    /// Where clients' comings and goings are noted.
    pub events: Recorder,
    /// When volumes must be polled.
    pub due: Due,
    pub touched: Vec<u32>,
    /// Volumes that were touched, or open, close or change, to be settled in this turn.
    pub settling: Vec<u32>,
    /// Volumes that an operation of the cache's device may let go on when it ends.
    pub cache_followers: Vec<u32>,
    pub requests: Requests,
    pub actions: Vec<Action>,
    pub completions: Vec<Completion>,
    pub shares: ClientShares,
    /// Memory for the indexes of this shard's write logs.
    pub index_budget: Rc<IndexBudget>,
    /// What of that others reserve, and are told.
    pub memory: Arc<Share>,
    /// The shard's part of what all shards have for that.
    pub index_part: IndexPart,
    /// Shards that were given another part, a bit for each, and are to be told.
    pub index_to_tell: u64,
    /// Copies of replicated logs, if this shard has them.
    pub groups: Option<Groups>,
    pub now: Nanos,
}

/// What a session sees of its shard.
pub struct SessionHost<'a> {
    pub state: &'a mut ShardState,
    pub connection: u32,
    pub client: Transport,
    pub requests: usize,
    pub allowance: Allowance,
    /// Work that was submitted.
    pub worked: usize,
}

impl Host for SessionHost<'_> {
    fn exports(&self) -> Vec<Export> {
        self.state.directory.exports()
    }

    fn export(&self, name: &str) -> Option<Export> {
        self.state.directory.export(name)
    }

    fn why_not(&self, name: &str) -> Option<Unopened> {
        self.state.directory.why_not(name)
    }

    fn moves(&self, name: &str) -> Option<Allow> {
        self.state.directory.moves(name, self.state.now)
    }

    fn refused(&self, name: &str, peer: &Peer) {
        self.state.note_refused(name, self.client, peer);
        let refusal = self.state.directory.refusal(name, peer);
        let (now, said) = (self.state.now, &self.state.refusal_said);
        if refusal == (Refusal::Denied { is_open: true }) && said.get() <= now {
            said.set(now.plus(REFUSAL_PAUSE));
            tracing::warn!(
                volume = name,
                "denied to {peer}: it is not in `allow` (hdcs volume set {name} allow=...)"
            );
        }
    }

    fn allowance(&self) -> Allowance {
        self.allowance
    }

    fn alloc(&mut self, range: SectorRange) -> Option<BufMut> {
        self.state.pool.alloc_for(range)
    }

    fn charge(&mut self, work: usize) {
        self.worked += work;
        self.allowance.work = self.allowance.work.saturating_sub(work);
    }

    fn volumes(&self) -> usize {
        self.state.directory.count()
    }

    fn serves(&self, volume: VolumeNumber) -> bool {
        self.state.numbers.contains_key(&volume)
    }

    fn submit(&mut self, volume: VolumeNumber, id: RequestId, request: Request) {
        self.requests += 1;
        self.charge(work_of(&request));
        self.state.requests.submit(Submitted {
            origin: Origin::Connection(self.connection, id),
            volume,
            arrived: self.state.now,
            ticket: None,
            request,
        });
    }
}

/// Write to a volume's log as it is on its device: there, or through the copy that the volume stands on.
fn write_log(state: &mut ShardState, slot: u32, write: Write) {
    let Some(served) = state.volumes.get(slot) else {
        return;
    };
    let Write {
        token,
        offset,
        data,
        way,
    } = write;
    if let (Some(copy), Some(groups)) = (served.copy, &mut state.groups) {
        return groups.write(state.now, copy, token, data, way);
    }
    let owner = Owner::Volume(slot);
    served
        .log
        .write_urgently(&mut state.ring, owner, token, offset, data, way);
}

impl ShardState {
    /// The volume of a number.
    pub fn served(&self, number: VolumeNumber) -> Option<&Served> {
        self.volumes.get(*self.numbers.get(&number)?)
    }

    /// Have the directory say what is exported of a volume, if that has changed. It costs next to nothing if not.
    pub fn publish(&mut self, slot: u32) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let terms = served.terms();
        if std::mem::replace(&mut served.published, terms) != terms {
            self.directory.publish(served.number, served.export());
        }
    }

    /// See the invariants of [`super::directory`].
    pub fn check_directory(&self) {
        for (_, served) in self.volumes.iter() {
            let home = self.directory.home(served.number);
            let home = home.expect("the directory has every volume");
            assert_eq!((home.shard, home.opening), (self.shard, served.opening_id));
            assert_eq!(self.directory.exported(served.number), served.export());
        }
    }

    /// Count what a connection to a volume holds now.
    pub fn count(&mut self, volume: Option<VolumeNumber>, counted: &mut Held, held: Held) {
        if *counted == held {
            return;
        }
        self.shares.update(*counted, held);
        let slot = volume.and_then(|number| self.numbers.get(&number));
        if let Some(served) = slot.and_then(|&slot| self.volumes.get_mut(slot)) {
            let (before, after) = (counted.data_bytes as u64, held.data_bytes as u64);
            // A volume that was closed and opened anew knows nothing of before.
            served.data_bytes = (served.data_bytes + after).saturating_sub(before);
        }
        *counted = held;
    }

    /// Mark a volume for a poll in this turn.
    pub fn touch(&mut self, slot: u32) {
        if let Some(served) = self.volumes.get_mut(slot)
            && !served.listed.to_poll
        {
            served.listed.to_poll = true;
            self.touched.push(slot);
        }
        self.settle_later(slot);
    }

    /// Have a volume looked at when volumes are settled.
    pub fn settle_later(&mut self, slot: u32) {
        if let Some(served) = self.volumes.get_mut(slot)
            && !std::mem::replace(&mut served.listed.to_settle, true)
        {
            self.settling.push(slot);
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
        drop(context);
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
            Action::LogRead {
                token,
                offset,
                buf,
                is_bad,
            } => {
                served.log_operations += 1;
                if let Some(cipher) = &mut served.log_cipher {
                    cipher.reads(token, offset);
                }
                if let (true, Some(copy), Some(groups)) = (is_bad, served.copy, &mut self.groups) {
                    return groups.repair(self.now, copy, token, offset, buf);
                }
                return served.log.read(&mut self.ring, owner, token, offset, buf);
            }
            Action::LogWrite {
                token,
                offset,
                data,
                way,
            } => {
                served.log_operations += 1;
                if let (Some(copy), Some(groups)) = (served.copy, &mut self.groups) {
                    groups.announce(copy, token, offset, &data);
                }
                let write = Write {
                    token,
                    offset,
                    data,
                    way,
                };
                if let Some(cipher) = &mut served.log_cipher {
                    cipher.writes(write);
                    return self.write_ciphered(slot);
                }
                return write_log(self, slot, write);
            }
            Action::KeepSuperblock { token, block } => {
                served.log_operations += 1;
                if !std::mem::replace(&mut served.log_given_up, true) {
                    tracing::warn!(
                        volume = served.name,
                        "a write to the device of its write log failed: what the log holds goes to the backend, and \
                         then what clients write"
                    );
                }
                let (admission, block) = (Arc::clone(&served.admission), block.to_vec());
                let job = move || {
                    let kept = admission.keep(&block).map_err(|error| {
                        tracing::warn!("the superblock of a write log cannot be kept: {error}");
                        Errno(error.raw_os_error().unwrap_or(libc::EIO))
                    });
                    JobOutput::Unit(kept)
                };
                return self.ring.job(owner, token, Box::new(job));
            }
            Action::CacheRead { token, offset, buf } => {
                let device = self.shared_cache.device();
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
            Action::BackendUnsettled { range } => {
                return served.backend.unsettled(range);
            }
            Action::BackendExtents { token, range } => Operation {
                token,
                ask: Ask::Extents { range },
            },
        };
        self.ask_backend(slot, operation);
    }

    /// Begin the writes to an encrypted log that there is memory for.
    fn write_ciphered(&mut self, slot: u32) {
        if let Some(served) = self.volumes.get_mut(slot)
            && let Some(cipher) = &mut served.log_cipher
        {
            let writes: Vec<Write> = std::iter::from_fn(|| cipher.next()).collect();
            for write in writes {
                write_log(self, slot, write);
            }
        }
    }

    /// An operation on a volume's log ended.
    pub fn log_finished(&mut self, slot: u32, token: Token, mut result: Result<Done, IoError>) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return self.ended_late(slot, Late::Log, Completion { token, result });
        };
        served.log_operations -= 1;
        if let Some(cipher) = &mut served.log_cipher {
            cipher.ended(token, &mut result);
            self.write_ciphered(slot);
        }
        self.step(slot, Event::Completed(Completion { token, result }));
    }

    /// A superblock was kept beside a volume's log, or could not be.
    pub fn superblock_kept(&mut self, slot: u32, token: Token, result: Result<(), Errno>) {
        let result = result.map(|()| Done::Written).map_err(IoError::from);
        let Some(served) = self.volumes.get_mut(slot) else {
            return self.ended_late(slot, Late::Log, Completion { token, result });
        };
        served.log_operations -= 1;
        self.step(slot, Event::Completed(Completion { token, result }));
    }

    /// A volume, and what its backend performs operations with.
    pub(super) fn backend_of(&mut self, slot: u32) -> Option<(&mut Served, Port<'_>)> {
        let served = self.volumes.get_mut(slot)?;
        let port = Port {
            ring: &mut self.ring,
            owner: Owner::Backend(slot),
            done: &mut self.completions,
        };
        Some((served, port))
    }

    /// Hand an operation to a volume's backend; what ends at once waits in `completions`.
    pub fn ask_backend(&mut self, slot: u32, operation: Operation) {
        let now = self.now;
        let Some((served, mut port)) = self.backend_of(slot) else {
            return;
        };
        served.note_destaged(now);
        if served.holds(&operation.ask) {
            served.held.push(operation);
            return;
        }
        served.backend.submit(now, operation, &mut port);
    }

    /// A ring operation of a volume's backend ended.
    pub fn backend_finished(&mut self, slot: u32, token: Token, outcome: Outcome) {
        let now = self.now;
        let Some((served, mut port)) = self.backend_of(slot) else {
            return;
        };
        served.backend.completed(now, token, outcome, &mut port);
        self.perform(slot);
    }

    /// Perform the cache's own actions.
    pub fn perform_cache(&mut self) {
        if self.actions.is_empty() {
            return;
        }
        let device = self.shared_cache.device();
        let device = device.expect("a cache without a device does no I/O");
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

    /// Something has happened to the SSD tier: volumes may wait for it, for example for what has just become durable.
    pub fn follow_cache(&mut self) {
        for slot in std::mem::take(&mut self.cache_followers) {
            if let Some(served) = self.volumes.get_mut(slot) {
                served.listed.with_cache = false;
            }
            self.touch(slot);
        }
    }

    /// Hand the cache an event, and perform what follows.
    pub fn step_cache(&mut self, event: CacheEvent) {
        self.cache.step(self.now, event, &mut self.actions);
        self.perform_cache();
    }

    /// A volume has gone: so does what encrypts it in the cache, and its origin, if it was the last one.
    pub fn forget_ciphers(&mut self, volume: &Volume) {
        self.cache.set_cipher(volume.config().number, None);
        let served = self.volumes.iter().map(|(_, served)| &served.volume);
        let mut others = served.chain(self.closed_volumes.volumes());
        if let Some(origin) = volume.cached().origin()
            && !others.any(|other| other.cached().origin() == Some(origin))
        {
            self.cache.set_cipher(origin, None);
        }
    }

    fn reply(&mut self, slot: u32, request: RequestId, result: Ended) {
        let (class, arrived) = self.requests.end(self.now, request, result);
        if let Some(served) = self.volumes.get_mut(slot) {
            served.requests -= 1;
            served.record(class, self.now.since(arrived));
        }
    }

    /// Put what was submitted, and whose turn it is, into the queues of its volumes.
    pub fn step_submitted(&mut self) {
        let flow_of = |number| {
            let served = self.volumes.get(*self.numbers.get(&number)?)?;
            Some(served.flow)
        };
        self.requests.schedule(self.now, flow_of);
        while let Some(one) = self.requests.next(self.now) {
            let slot = self.numbers.get(&one.volume).copied();
            let served = slot.and_then(|slot| Some((slot, self.volumes.get_mut(slot)?)));
            match served {
                Some((slot, served)) => {
                    served.waiting.push_back(one);
                    self.touch(slot);
                }
                None => self.requests.refuse(self.now, one),
            }
        }
    }

    /// Whether so much of a volume waits for its turn that its clients have to wait with more.
    pub fn is_flooded(&self, volume: Option<VolumeNumber>) -> bool {
        let served = volume.and_then(|number| self.served(number));
        let pool_bytes = self.pool.total_bytes() as u64;
        served.is_some_and(|served| self.requests.is_flooded(served.flow, pool_bytes))
    }

    /// Take back what waits for its turn and came from these connections, in order, to one volume.
    pub fn withdraw(&mut self, connections: &[(VolumeNumber, u32)]) {
        let slot = connections
            .first()
            .and_then(|(number, _)| self.numbers.get(number));
        let Some(served) = slot.and_then(|&slot| self.volumes.get_mut(slot)) else {
            return;
        };
        let is_theirs = |one: &Submitted| match one.origin {
            Origin::Connection(slot, _) => connections
                .binary_search_by_key(&slot, |&(_, slot)| slot)
                .is_ok(),
            Origin::Job(_) | Origin::Scrub(_) => false,
        };
        self.requests
            .withdraw(self.now, served.flow, &mut served.waiting, is_theirs);
    }

    /// Let a volume have what waits for it, as far as it takes that.
    fn admit(&mut self, slot: u32) {
        while let Some(served) = self.volumes.get_mut(slot)
            && served.requests < VOLUME_REQUESTS_MAX
            && let Some(one) = served.waiting.pop_front()
        {
            served.requests += 1;
            served.queued = served.queued.plus(self.now.since(one.arrived));
            let (id, request) = self.requests.begin(one);
            self.step(slot, Event::Request { id, request });
        }
    }

    /// Poll the volumes that were touched or whose time has come, then the cache.
    pub fn poll(&mut self) {
        let changes = self.cache.changes();
        let come: Vec<u32> = self.due.come(self.now).collect();
        for slot in come {
            self.touch(slot);
        }
        let mut touched = std::mem::take(&mut self.touched);
        for &slot in &touched {
            let now = self.now;
            let Some((served, mut port)) = self.backend_of(slot) else {
                continue;
            };
            served.backend.poll(now, &mut port);
            self.perform(slot);
            // A poll may answer requests and so let others in, which need a poll of their own.
            loop {
                self.admit(slot);
                if let Some(served) = self.volumes.get_mut(slot) {
                    // What ended at once up to here is what the poll goes on with.
                    served.hurry = false;
                }
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
        if !self.cache_followers.is_empty() {
            self.cache.wait_for_changes();
            if self.cache.changes() != changes {
                self.follow_cache();
            }
        }
        // Memory for indexes may have become less, or more: volumes that hold some, or wait for some, look at it again.
        self.index_to_tell |= self.index_part.follow(&self.index_budget);
        let used = self.index_budget.used();
        self.memory.note_index_used(self.shard, used);
        if self.index_budget.has_changed() {
            let volumes = self.volumes.iter();
            let follow = volumes.filter(|(_, served)| sharing::follows_budget(&served.volume));
            let slots: Vec<u32> = follow.map(|(slot, _)| slot).collect();
            for slot in slots {
                self.touch(slot);
            }
        }
    }

    /// Note when a volume must be polled next.
    fn note_due(&mut self, slot: u32) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        served.listed.to_poll = false;
        served.space.note(&served.volume);
        let volume = served.volume.next_wakeup().unwrap_or(NEVER);
        let backend = served.backend.next_wakeup().unwrap_or(NEVER);
        if sharing::follows_cache(&served.volume)
            && !std::mem::replace(&mut served.listed.with_cache, true)
        {
            self.cache_followers.push(slot);
        }
        // What ended at once while the volume was polled, it has yet to go on with.
        let due = if std::mem::take(&mut served.hurry) {
            self.now
        } else {
            volume.min(backend)
        };
        self.due.set(slot, due);
    }
}
