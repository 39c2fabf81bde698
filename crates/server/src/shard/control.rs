//! What the control plane asks of a shard, carried out on its thread.
//!
//! Nothing here blocks: each volume is opened on a thread of its own, so that one whose backend
//! hangs holds up no other; files are resized on the ring's worker; and an answer is sent when what
//! was asked has ended. An answer whose receiver has gone is dropped.

use std::any::Any;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use hdcs_backend::Capabilities;
use hdcs_core::base::cipher::Authenticator;
use hdcs_core::base::io::{Completion, DurableWay, Nanos, SectorRange, Token};
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_core::cache::{CacheEvent, SsdState};
use hdcs_core::format::LogSuperblock;
use hdcs_core::node::opening::Failure;
use hdcs_core::node::qos::Qos;
use hdcs_core::node::stop::{Act, Hung, Stop, View};
use hdcs_core::volume::{
    Context, DurableWays, Event, Inherited, Phase, Volume, VolumeConfig, lease, sharing,
};
use hdcs_device::ring::Owner;
use hdcs_device::worker::JobOutput;
use hdcs_frontend::{Ending, VolumeNumber};
use uuid::Uuid;

use super::ciphered_log::CipheredLog;
use super::clients::REVOKED;
use super::command::{
    Answer, ClosedReport, Command, OpenFailure, OpenedAs, SessionFactory, ShardReport,
    SnapshotFailure, VolumeSpec,
};
use super::counts::{LoopReport, ThreadCounts};
use super::groups::{self, Groups};
use super::jobs::{Job, Move};
use super::log_space;
use super::opening::{Opened, not_replayed, open_files};
use super::places::Places;
use super::served::{Listed, Served, Terms};
use super::state::ShardState;
use super::turn::{Listener, NEVER, RESIZE_TOKEN, SNAPSHOT_TOKEN, Shard, Stopping};
use super::visits::CLOSED;
use super::{ACCEPT_FAULT_PERIOD, ShardConfig};
use crate::data_dir::dirty::Left;
use crate::log_limit::LogLimit;

/// Why something cannot be done to a volume.
pub(super) const NOT_OPEN: &str = "the volume is not open on this node";
const NO_COPY: &str = "this node has no copy of its log";
const NOT_SERVED: &str = "this node does not serve its group any more, or would be left out";
/// Why nothing is begun any more.
pub(super) const STOPPING: &str = "the node is stopping";

pub(super) fn tell<T, E>(answer: Answer<T, E>, result: Result<T, E>) {
    // Whoever asked may have gone.
    let _ = answer.send(result);
}

impl Shard {
    /// Carry out the commands that wait.
    pub fn take_commands(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
            self.counts.messages += 1;
            self.command(command);
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Listen {
                socket,
                sessions,
                answer,
            } => {
                self.listen(socket, sessions);
                tell(answer, Ok(()));
            }
            Command::Adopt(adopted) => self.adopt(*adopted),
            Command::EndRevoked => {
                self.end_connections(REVOKED, |connection| connection.peer().is_revoked());
            }
            Command::Open(spec, answer) => self.open(spec, answer),
            Command::GiveUpOpening(volume, answer) => tell(answer, self.give_up_opening(volume)),
            Command::Close {
                volume,
                destage,
                answer,
            } => self.close(volume, destage, answer),
            Command::DestageAll(volume, answer) => {
                tell(answer, self.state.begin_tiering(volume, false));
            }
            Command::CancelDestageAll(volume, answer) => {
                self.state.cancel_flush_of_snapshot(volume);
                self.state.cancel_tiering(volume);
                tell(answer, self.step_open(volume, Event::CancelDestageAll));
            }
            Command::Snapshot(volume, command, answer) => {
                self.state.begin_snapshot(volume, command, answer);
            }
            Command::CancelSnapshot(volume, answer) => {
                self.state.cancel_snapshot(volume);
                tell(answer, self.step_open(volume, Event::CancelDestageAll));
            }
            Command::Resize(volume, bytes, answer) => self.state.resize(volume, bytes, answer),
            Command::Grow(volume, bytes, answer) => tell(answer, self.state.grow(volume, bytes)),
            Command::Depart {
                volume,
                patience,
                answer,
            } => self.depart(volume, patience, answer),
            Command::Follow(volume, answer) => {
                self.follow(volume);
                tell(answer, Ok(()));
            }
            Command::Reconfigure(config, answer) => {
                tell(answer, self.reconfigure(*config));
            }
            Command::LogPrepared(volume, bytes, answer) => {
                tell(
                    answer,
                    log_space::log_prepared(&mut self.state, volume, bytes),
                );
            }
            Command::GiveBackLog(volume, bytes, answer) => {
                tell(
                    answer,
                    log_space::give_log_back(&mut self.state, volume, bytes),
                );
            }
            Command::SetQos(volume, qos, answer) => tell(answer, self.set_qos(volume, qos)),
            Command::SetAllow(volume, allow, answer) => tell(answer, self.set_allow(volume, allow)),
            Command::Promote(volume, range, answer) => {
                self.job(volume, Move::Promote, range, answer);
            }
            Command::Pin(volume, ranges, answer) => tell(answer, self.state.pin(volume, ranges)),
            Command::WarmUp(volume, ranges, answer) => {
                tell(answer, self.state.warm_up(volume, ranges));
            }
            Command::WarmUpLike {
                volume,
                ranges,
                if_cold,
                answer,
            } => {
                let result = self.state.warm_up_like(volume, ranges, if_cold);
                tell(answer, result);
            }
            Command::Heat(volume, answer) => self.gatherings.ask(volume, answer),
            Command::Evict(volume, range, answer) => self.job(volume, Move::Evict, range, answer),
            Command::Scrub(volume, progress, answer) => self.begin_scrub(volume, progress, answer),
            Command::VerifyHome(volume, block, answer) => {
                self.state.verify_home(volume, block, answer);
            }
            Command::Forget(volume, answer) => {
                let result = if self.state.numbers.contains_key(&volume) {
                    Err("the volume is open; close it first".to_owned())
                } else {
                    self.state.cache.forget_volume(volume.0);
                    self.state.cache_touched = true;
                    Ok(())
                };
                tell(answer, result);
            }
            Command::JoinCluster(config) => {
                let groups = Groups::new(*config);
                groups.accept(&mut self.state.ring);
                self.state.groups = Some(groups);
            }
            Command::OpenCopy(spec, answer) => groups::open_copy(self, spec, answer),
            Command::CloseCopy(volume, answer) => tell(answer, groups::close_copy(self, volume)),
            Command::ForgetCopy(volume, revision, answer) => {
                tell(answer, groups::forget_copy(self, volume, revision));
            }
            Command::SeeRecord(volume, record) => {
                if let Some(groups) = &mut self.state.groups {
                    groups.see(self.state.now, volume, &record);
                }
            }
            Command::Configure(volume, shape, answer) => {
                let now = self.state.now;
                let groups = self.state.groups.as_mut();
                let is_begun = groups.is_some_and(|groups| groups.configure(now, volume, *shape));
                tell(
                    answer,
                    is_begun.then_some(()).ok_or_else(|| NOT_SERVED.to_owned()),
                );
            }
            Command::EndGroup(volume, answer) => {
                if let Some(groups) = &mut self.state.groups {
                    groups.end_group(self.state.now, volume);
                }
                tell(answer, Ok(()));
            }
            Command::AskAgain(volume) => {
                if let Some(groups) = &mut self.state.groups {
                    groups.ask_again(self.state.now, volume);
                }
            }
            Command::CopyStatus(volume, answer) => {
                let groups = self.state.groups.as_ref();
                let seen = groups.and_then(|groups| groups.look(self.state.now, volume));
                tell(answer, seen.ok_or_else(|| NO_COPY.to_owned()));
            }
            Command::Explain(name, unopened) => self.state.directory.explain(name, unopened),
            Command::Report(answer) => {
                let _ = answer.send(Box::new(self.report()));
            }
            Command::Stop { destage, answer } => self.stop(destage, answer),
        }
    }

    fn listen(&mut self, socket: std::os::fd::OwnedFd, sessions: SessionFactory) {
        let socket = std::net::TcpListener::from(socket);
        // Only an internet socket has such an address.
        let tcp = socket.local_addr().is_ok();
        let address = socket
            .local_addr()
            .map_or_else(|_| "the unix socket".to_owned(), |at| format!("tcp {at}"));
        let slot = self.listeners.insert(Listener {
            socket: socket.into(),
            sessions,
            accepting: None,
            again: None,
            places: Places::new(self.config.connections.count_max),
            faults: LogLimit::new(ACCEPT_FAULT_PERIOD),
            failing: false,
            address,
            tcp,
        });
        if let Some(listener) = self.listeners.get_mut(slot) {
            let fd = listener.socket.as_raw_fd();
            listener.accepting = Some(self.state.ring.accept(Owner::Listener(slot), fd));
        }
    }

    fn open(&mut self, mut spec: Box<VolumeSpec>, answer: Answer<OpenedAs, OpenFailure>) {
        let refuse = |answer, why: String| {
            tell(answer, Err(OpenFailure::new(Failure::Refused, why)));
        };
        let number = VolumeNumber(spec.config.number);
        let opening = self.openings.iter().any(|(_, (other, _))| {
            other.name == spec.name || other.config.number == spec.config.number
        });
        let mut volumes = self.state.volumes.iter();
        let open = volumes.any(|(_, served)| served.name == spec.name || served.number == number);
        if open || opening {
            return refuse(answer, "it is open already".to_owned());
        }
        if self.stopping.is_some() {
            return tell(answer, Err(OpenFailure::new(Failure::Stopping, STOPPING)));
        }
        if let Some(why) = self.state.closed_volumes.hindrance(&spec) {
            return refuse(answer, why.to_owned());
        }
        let copies = self.state.groups.as_ref();
        spec.copy = copies.and_then(|groups| groups.device_of(Uuid::from_bytes(spec.config.uuid)));
        if spec.is_replicated && spec.copy.is_none() {
            return refuse(answer, NO_COPY.to_owned());
        }
        let (for_thread, durability) = (spec.clone(), self.config.durability);
        let measurements = Arc::clone(&self.config.measurements);
        let token = Token(u64::from(self.openings.insert((spec, answer))));
        let remote = self.state.ring.remote(Owner::Shard);
        let thread = std::thread::Builder::new().name("hdcs-open".into());
        let spawned = thread.spawn(move || {
            let opened = open_files(&for_thread, durability, &measurements);
            // Before anybody is told: it keeps what was reserved for the volume, and where the volume stays.
            drop(for_thread);
            remote.end(token, JobOutput::Any(Box::new(opened)));
        });
        match spawned {
            Ok(_) => self.state.ring.begin_remote(),
            Err(error) => {
                if let Some((_, answer)) = self.openings.remove(token.0 as u32) {
                    refuse(answer, format!("cannot start a thread for it: {error}"));
                }
            }
        }
    }

    /// A volume's files are open, or not.
    pub fn opened(&mut self, token: Token, opened: Box<dyn Any + Send>) {
        let opened = opened
            .downcast::<Result<Opened, OpenFailure>>()
            .expect("opening a volume says how it ended");
        let Some((spec, answer)) = self.openings.remove(token.0 as u32) else {
            // It was given up. Closing may take as long as opening did.
            self.openings.release(token.0 as u32);
            return hdcs_backend::closing::close("an opening given up".to_owned(), move || {
                drop(opened);
            });
        };
        let opened = match *opened {
            Ok(opened) => opened,
            Err(error) => {
                // Before anybody can ask for it again.
                drop(spec);
                return tell(answer, Err(error));
            }
        };
        let identity = opened.backend.identity();
        let backend = opened.backend.build();
        let mut config = spec.config;
        backend.set_compression(config.compression);
        tell_capabilities(&mut config, backend.capabilities());
        let (number, uuid) = (VolumeNumber(config.number), config.uuid);
        let state = &mut self.state;
        let unlocked = opened.unlocked;
        let cache_cipher = unlocked.as_ref().map(|keys| Arc::clone(&keys.cache));
        state.cache.set_cipher(number.0, cache_cipher);
        if let Some(inherited) = &opened.inherited {
            let cipher = unlocked.as_ref().map(|keys| Arc::clone(&keys.cache));
            state.cache.set_cipher(inherited.origin(), cipher);
        }
        let flow = state.requests.scheduler.add(state.now, spec.qos);
        let log_cipher = unlocked.map(|keys| keys.log(opened.log_identity.log));
        let log_keys = log_cipher
            .clone()
            .map(|keys| Arc::new(keys) as Arc<dyn Authenticator>);
        let mut volume = state.open_volume(config, opened.inherited, opened.kept.as_ref());
        sharing::set_log_prepared(&mut volume, opened.log_prepared_bytes);
        if let Some(keys) = log_keys {
            volume.authenticate_log(keys);
        }
        if spec.is_replicated {
            lease::need(&mut volume);
        }
        let log = &opened.log;
        let way = DurableWay {
            call: log.durability(),
            by_thread: false,
        };
        let has_threads = self.config.ring.writer_threads > 0;
        volume.set_durable_ways(DurableWays::new(way, log.has_calls(), has_threads));
        let opening_id =
            state
                .directory
                .enter(state.shard, number, &spec.name, &spec.allow, spec.continues);
        let slot = state.volumes.insert(Served {
            name: spec.name,
            number,
            allow: spec.allow,
            volume,
            log: opened.log,
            copy: None,
            log_cipher: log_cipher.map(|cipher| CipheredLog::new(cipher, spec.is_replicated)),
            backend,
            identity,
            log_operations: 0,
            cache_reads: 0,
            flow,
            data_bytes: 0,
            requests: 0,
            queued: Nanos(0),
            waiting: std::collections::VecDeque::new(),
            hurry: false,
            listed: Listed::default(),
            opening_id,
            published: Terms::default(),
            opening: Some(answer),
            log_identity: opened.log_identity,
            admission: spec.admission,
            log_given_up: false,
            closing: Vec::new(),
            departing: None,
            resizing: None,
            grown: None,
            snapshotting: None,
            tier_out: None,
            pin_trouble: None,
            held: Vec::new(),
            latencies: Default::default(),
            space: spec.space,
            memory: spec.memory,
            residence: spec.residence,
        });
        state.numbers.insert(number, slot);
        if spec.is_replicated
            && let (Some(groups), Some(served)) = (&mut state.groups, state.volumes.get_mut(slot))
        {
            served.copy = groups.stands(Uuid::from_bytes(uuid), slot);
        }
        state.publish(slot);
        state.perform(slot);
        state.pin_at_opening(slot, spec.pins);
    }

    /// A volume is closed or could not be opened, and nothing of it is under way.
    pub fn drop_volume(&mut self, slot: u32) {
        let removed = match self.state.volumes.get(slot) {
            // What a device brings in the end must not meet another volume.
            Some(served) if served.is_owed() => self.state.volumes.vacate(slot),
            _ => self.state.volumes.remove(slot),
        };
        let Some(mut served) = removed else {
            return;
        };
        self.state.numbers.remove(&served.number);
        if let (Some(copy), Some(groups)) = (served.copy, &mut self.state.groups) {
            groups.left(copy);
        }
        let goes_on = served.goes_on();
        self.state.directory.leave(served.number, goes_on);
        // Its pins go with it; none is always allowed.
        let _ = self.state.cache.pin(served.number.0, None, &[]);
        // What follows frees memory and closes files, which may take as long as a device does.
        self.state.cache.release();
        if self.config.peers.count() > 1 {
            // Another shard may have it next, and what is written there is not said here.
            self.state.cache.forget_in_dram(served.number.0);
            self.state.cache_touched = true;
        }
        self.state.due.set(slot, NEVER);
        let failed = match served.volume.phase() {
            Phase::Failed(error) => Some(not_replayed(error)),
            _ => None,
        };
        let opening = served.opening.take();
        let closing = std::mem::take(&mut served.closing);
        if let Some(resizing) = served.resizing.take() {
            resizing.closed();
        }
        if let Some(snapshotting) = served.snapshotting.take() {
            snapshotting.closed();
        }
        let waiting = self.state.requests.scheduler.remove(served.flow);
        for one in served.waiting.drain(..).chain(waiting) {
            self.state.requests.refuse(self.state.now, one);
        }
        let has_left = self.has_left(&mut served);
        if !goes_on {
            self.abort_connections(served.number);
        }
        let left = served.left(self.state.now);
        if let Some(stopping) = &mut self.stopping {
            stopping.closed.push(ClosedReport {
                volume: served.number,
                left,
                log_failed: served.volume.log_failed(),
            });
        }
        if served.log_operations > 0 {
            tracing::warn!(
                volume = served.name,
                "closed while the device of its write log does not answer: its log is in use until it does"
            );
        }
        // Before anybody is told, who may ask for it again: its files, its memory, and its stay here go with it.
        if served.is_owed() {
            self.state.keep_closed(slot, served);
        } else {
            self.state.forget_ciphers(&served.volume);
            drop(served);
        }
        if let Some(answer) = opening {
            let closed = || {
                let why = "the volume was closed while it opened";
                OpenFailure::new(Failure::Refused, why)
            };
            tell(answer, Err(failed.unwrap_or_else(closed)));
        }
        for answer in closing {
            tell(answer, Ok(left));
        }
        if let Some(tell_whoever_moves_it) = has_left {
            tell_whoever_moves_it();
        }
    }

    /// Let go of an opening whose thread hangs, which nobody can end. Its place is kept for what it
    /// brings in the end.
    fn give_up_opening(&mut self, number: VolumeNumber) -> Result<(), String> {
        let is_it = |(slot, (spec, _)): (u32, &(Box<VolumeSpec>, _))| {
            (spec.config.number == number.0).then_some(slot)
        };
        let slot = self.openings.iter().find_map(is_it);
        let Some((spec, answer)) = slot.and_then(|slot| self.openings.vacate(slot)) else {
            return Err("its files are not being opened".to_owned());
        };
        tracing::warn!(
            volume = spec.name,
            "its opening is given up; its log is in use until the thread that opens it ends"
        );
        let why = "its opening was given up while its write log or its backend did not answer";
        tell(answer, Err(OpenFailure::new(Failure::Refused, why)));
        Ok(())
    }

    fn abort_connections(&mut self, number: VolumeNumber) {
        for slot in 0..self.connections.end() {
            if let Some(connection) = self.connections.get_mut(slot)
                && connection.volume() == Some(number)
            {
                connection.abort(CLOSED);
                self.list(slot);
            }
        }
    }

    fn close(&mut self, number: VolumeNumber, destage: bool, answer: Answer<Option<Left>>) {
        let Some(&slot) = self.state.numbers.get(&number) else {
            return tell(answer, Err(NOT_OPEN.to_owned()));
        };
        self.stay(slot, NOT_OPEN);
        if let Some(served) = self.state.volumes.get_mut(slot) {
            served.closing.push(answer);
            // A log that failed is emptied all the same, since some of it may be in memory alone.
            if !destage && served.volume.stats(self.state.now).policy_remaining_bytes == 0 {
                served.backend.end_retries();
            }
        }
        self.state
            .give_up_snapshot(slot, SnapshotFailure::Now(NOT_OPEN));
        self.abort_connections(number);
        if !destage || !self.state.tier_and_close(number) {
            self.state.step(slot, Event::Close { destage });
        }
        self.state.publish(slot);
    }

    /// Step a volume that is open.
    fn step_open(&mut self, number: VolumeNumber, event: Event) -> Result<(), String> {
        let slot = self.state.open_slot(number)?;
        self.state.step(slot, event);
        Ok(())
    }

    fn reconfigure(&mut self, mut config: VolumeConfig) -> Result<(), String> {
        let slot = self.state.open_slot(VolumeNumber(config.number))?;
        if let Some(served) = self.state.volumes.get(slot) {
            tell_capabilities(&mut config, served.backend.capabilities());
            served.backend.set_compression(config.compression);
        }
        self.state.step(slot, Event::Reconfigure(config));
        self.state.publish(slot);
        Ok(())
    }

    fn set_qos(&mut self, number: VolumeNumber, qos: Qos) -> Result<(), String> {
        let slot = self.state.open_slot(number)?;
        let served = self.state.volumes.get(slot).ok_or(NOT_OPEN)?;
        self.state
            .requests
            .scheduler
            .set(self.state.now, served.flow, qos);
        Ok(())
    }

    fn job(&mut self, number: VolumeNumber, way: Move, range: SectorRange, answer: Answer<()>) {
        let slot = match self.state.open_slot(number) {
            Ok(slot) => slot,
            Err(error) => return tell(answer, Err(error)),
        };
        let sectors = self.state.volumes.get(slot).map_or(0, |served| {
            served.volume.config().bytes / SECTOR_BYTES as u64
        });
        let inside = range.start.checked_add(range.count);
        if range.is_empty() || inside.is_none_or(|end| end > sectors) {
            let error = format!("the range is empty or beyond the volume's {sectors} sectors");
            return tell(answer, Err(error));
        }
        self.jobs.insert(Job::new(number, way, range, answer));
    }

    fn report(&self) -> ShardReport {
        let state = &self.state;
        let mut volumes: Vec<_> = state
            .volumes
            .iter()
            .map(|(_, served)| {
                let connections = self
                    .connections
                    .iter()
                    .filter(|(_, connection)| connection.volume() == Some(served.number));
                let qos = state.requests.scheduler.stats(state.now, served.flow);
                let shard = self.config.number;
                served.report(state.now, shard, connections.count(), qos, &state.cache)
            })
            .collect();
        volumes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let cache = state.cache.stats();
        ShardReport {
            number: self.config.number,
            processor: self.config.processor,
            volumes,
            peers: (state.groups.as_ref())
                .map(Groups::peers)
                .unwrap_or_default(),
            cache_state_age: state.now.since(cache.ssd_since),
            cache,
            cache_room_bytes: self.state.cache.room_bytes(),
            cache_identity_error: self.identity.error().map(str::to_owned),
            cache_trouble: self.readmission.trouble().map(str::to_owned),
            pool_bytes: state.pool.total_bytes() as u64,
            pool_free_bytes: state.pool.free_bytes() as u64,
            connections_used_bytes: state.shares.heap().held(),
            connections: self.connections.len(),
            connections_left: state.shares.connections_left(),
            longest_turn: self.longest_turn.get(),
            counts: LoopReport {
                shard: self.counts,
                ring: self.state.ring.counts(),
                thread: ThreadCounts::of_this_thread(),
            },
        }
    }

    fn stop(&mut self, destage: bool, answer: Answer<Vec<ClosedReport>>) {
        if let Some(stopping) = &mut self.stopping {
            stopping.stop.asked_again(self.state.now, destage);
            stopping.answers.push(answer);
            return;
        }
        self.stopping = Some(Stopping {
            stop: Stop::begin(self.state.now, destage),
            answers: vec![answer],
            closed: Vec::new(),
            ended: None,
        });
        self.end_those_that_wait();
        // Nobody waits for a limit's sake while the node stops.
        self.state.requests.scheduler.open();
        // Their threads may hang for as long as their backends do; nobody waits for them.
        for slot in 0..self.openings.end() {
            if let Some((_, answer)) = self.openings.vacate(slot) {
                let stopping = OpenFailure::new(Failure::Stopping, STOPPING);
                tell(answer, Err(stopping));
            }
        }
        for slot in 0..self.listeners.end() {
            match self.listeners.get_mut(slot).map(|one| one.accepting) {
                Some(Some(key)) => self.state.ring.cancel(key),
                Some(None) => drop(self.listeners.remove(slot)),
                None => {}
            }
        }
        for slot in 0..self.connections.end() {
            if let Some(connection) = self.connections.get_mut(slot) {
                connection.shut_down(&mut self.state.ring);
                self.list(slot);
            }
        }
    }

    /// Do what [`Stop`] decides. Whether a stop has come to its end; then whoever asked for it was told.
    pub fn go_on_stopping(&mut self) -> bool {
        while let Some(stopping) = &mut self.stopping {
            if let Some(result) = stopping.ended {
                let has_left = groups::take_leave(&mut self.state);
                if has_left {
                    self.stopped(result);
                }
                return has_left;
            }
            let state = &self.state;
            // A device that does not answer is not waited for.
            let given_up = state.cache.stats().ssd_state == SsdState::Offline;
            let open = state.volumes.iter();
            let log_patience = open.map(|(_, served)| served.volume.config().log_answer_max);
            let number = self.config.number;
            let view = View {
                connections: self.connections.len(),
                volumes: state.volumes.len(),
                log_patience: log_patience.max().unwrap_or(Nanos(0)),
                others: self.config.peers.others(self.config.number),
                // The others leave the cache to its keeper, once nothing of it is under way here.
                is_cache_closed: (number > 0 || state.cache.is_closed())
                    && (state.cache_operations == 0 || given_up),
            };
            match stopping.stop.next(state.now, &view) {
                None => return false,
                Some(Act::Abort) => self.abort_all_connections(),
                Some(Act::CloseVolumes { destage }) => {
                    for slot in 0..self.state.volumes.end() {
                        self.state
                            .give_up_snapshot(slot, SnapshotFailure::Now(NOT_OPEN));
                        self.state.step(slot, Event::Close { destage });
                        self.state.publish(slot);
                    }
                }
                Some(Act::CloseCache) if number > 0 => {}
                Some(Act::CloseCache) => {
                    self.state.step_cache(CacheEvent::Close);
                    self.state.cache_touched = true;
                }
                Some(Act::End(result)) => stopping.ended = Some(result),
            }
        }
        false
    }

    fn abort_all_connections(&mut self) {
        for slot in 0..self.connections.end() {
            if let Some(connection) = self.connections.get_mut(slot) {
                connection.abort(Ending::NodeStops);
                if !connection.listed {
                    connection.listed = true;
                    self.listed.push(slot);
                }
            }
        }
    }

    fn stopped(&mut self, result: Result<(), Hung>) {
        let Some(stopping) = self.stopping.take() else {
            return;
        };
        let ShardConfig { number, peers, .. } = &self.config;
        peers.note_end(*number, result.is_ok());
        let volumes = self.state.volumes.iter();
        let names: Vec<&str> = volumes.map(|(_, served)| &*served.name).collect();
        // Where none is left here, it was a volume of another shard, which says so.
        let result = if result.is_ok() || names.is_empty() {
            Ok(stopping.closed)
        } else {
            let names = names.join(", ");
            tracing::warn!(volumes = names, "stopped without closing volumes that hang");
            Err(format!(
                "these volumes did not close in time: {names}; their backend hangs, or the device of \
                 their write log, and their logs are replayed at the next start"
            ))
        };
        for answer in stopping.answers {
            tell(answer, result.clone());
        }
    }
}

impl ShardState {
    pub(super) fn open_slot(&self, number: VolumeNumber) -> Result<u32, String> {
        let slot = *self.numbers.get(&number).ok_or(NOT_OPEN)?;
        let served = self.volumes.get(slot);
        if served.is_some_and(|served| served.departing.is_some()) {
            return Err("the volume is being moved to another shard".to_owned());
        }
        match served.map(|served| served.volume.phase()) {
            Some(Phase::Open) => Ok(slot),
            Some(Phase::Opening) => Err("the volume is still replaying its log".to_owned()),
            _ => Err(NOT_OPEN.to_owned()),
        }
    }

    /// Begin to open a volume; what that asks for waits in `actions`.
    fn open_volume(
        &mut self,
        config: VolumeConfig,
        inherited: Option<Inherited>,
        kept: Option<&LogSuperblock>,
    ) -> Volume {
        let mut context = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut self.actions,
        };
        let mut volume = Volume::open(config, self.now, &mut context);
        sharing::set_index_budget(&mut volume, &self.index_budget);
        if let Some(inherited) = inherited {
            volume.inherit(inherited);
        }
        if let Some(kept) = kept {
            volume.keep_superblock(*kept);
        }
        volume
    }

    /// Take the end of what the shard itself has asked a backend; another's comes back.
    pub fn take_own(&mut self, slot: u32, completion: Completion) -> Option<Completion> {
        match completion.token {
            RESIZE_TOKEN => self.backend_resized(slot, completion.result.map(drop)),
            SNAPSHOT_TOKEN => self.snapshot_answered(slot, completion.result),
            _ => return Some(completion),
        }
        None
    }
}

/// What a volume is to know of its backend.
fn tell_capabilities(config: &mut VolumeConfig, capabilities: Capabilities) {
    config.backend_extents = capabilities.extents;
    config.backend_atomic = capabilities.atomic_flush;
}
