//! What the control plane asks of a shard, carried out on its thread.
//!
//! Nothing here blocks: files are opened and resized on the ring's worker, and an answer is sent
//! when what was asked has ended. An answer whose receiver has gone is dropped.

use std::any::Any;
use std::os::fd::AsRawFd;

use hdcs_core::error::IoError;
use hdcs_core::format::LogSuperblock;
use hdcs_core::io::{BlockKey, Nanos, SectorRange, Token};
use hdcs_core::limits::{BLOCK_BYTES, SECTOR_BYTES, VOLUME_BYTES_MAX, VOLUME_BYTES_MIN};
use hdcs_core::read_cache::CacheEvent;
use hdcs_core::volume::{Context, Event, Phase, Volume, VolumeConfig};

use super::command::{Answer, Command, SessionFactory, ShardReport, VolumeSpec};
use super::jobs::{Job, Move};
use super::served::{self, ResizeStep, Resizing, Served};
use super::turn::{Listener, RESIZE_TOKEN, Shard, Stopping, Works};
use crate::backends::{self, Absent, Ask, Operation};
use crate::device::durability::Durability;
use crate::device::file::Device;
use crate::device::ring::Owner;
use crate::device::worker::JobOutput;
use crate::frontends::VolumeNumber;

/// Time that connections get to take their last answers when the shard stops.
const STOP_PATIENCE: Nanos = Nanos::from_millis(5_000);
/// Time that volumes get to close without destage: much longer than the log needs, so what is left
/// waits for a backend that hangs.
const CLOSE_PATIENCE: Nanos = Nanos::from_millis(5_000);
/// Why something cannot be done to a volume.
const NOT_OPEN: &str = "the volume is not open on this node";

/// A volume's files, opened on the worker.
struct Opened {
    log: Device,
    backend: backends::Prepared,
}

fn tell<T>(answer: Answer<T>, result: Result<T, String>) {
    // Whoever asked may have gone.
    let _ = answer.send(result);
}

impl Shard {
    /// Carry out the commands that wait.
    pub fn take_commands(&mut self) {
        while let Ok(command) = self.commands.try_recv() {
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
            Command::Open(spec, answer) => self.open(spec, answer),
            Command::Close {
                volume,
                destage,
                answer,
            } => self.close(volume, destage, answer),
            Command::DestageAll(volume, answer) => {
                tell(answer, self.step_open(volume, Event::DestageAll));
            }
            Command::CancelDestageAll(volume, answer) => {
                tell(answer, self.step_open(volume, Event::CancelDestageAll));
            }
            Command::Resize(volume, bytes, answer) => self.resize(volume, bytes, answer),
            Command::Reconfigure(config, answer) => {
                tell(answer, self.reconfigure(*config));
            }
            Command::Promote(volume, range, answer) => {
                self.job(volume, Move::Promote, range, answer);
            }
            Command::Evict(volume, range, answer) => self.job(volume, Move::Evict, range, answer),
            Command::Forget(volume, answer) => {
                let result = if self.works.numbers.contains_key(&volume) {
                    Err("the volume is open; close it first".to_owned())
                } else {
                    self.works.cache.forget_volume(volume.0);
                    self.works.cache_touched = true;
                    Ok(())
                };
                tell(answer, result);
            }
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
        let slot = self.listeners.insert(Listener {
            socket: socket.into(),
            sessions,
            accepting: None,
            again: None,
            tcp,
        });
        if let Some(listener) = self.listeners.get_mut(slot) {
            let fd = listener.socket.as_raw_fd();
            listener.accepting = Some(self.works.ring.accept(Owner::Listener(slot), fd));
        }
    }

    fn open(&mut self, spec: Box<VolumeSpec>, answer: Answer<()>) {
        let number = VolumeNumber(spec.config.number);
        let opening = self.openings.iter().any(|(_, (other, _))| {
            other.name == spec.name || other.config.number == spec.config.number
        });
        let mut volumes = self.works.volumes.iter();
        let open = volumes.any(|(_, served)| served.name == spec.name || served.number == number);
        if open || opening {
            return tell(
                answer,
                Err(format!("volume `{}` is open already", spec.name)),
            );
        }
        if self.stopping.is_some() {
            return tell(answer, Err("the node is stopping".to_owned()));
        }
        let (for_worker, durability) = (spec.clone(), self.config.durability);
        let token = Token(u64::from(self.openings.insert((spec, answer))));
        let job = move || JobOutput::Any(Box::new(open_files(&for_worker, durability)));
        self.works.ring.job(Owner::Shard, token, Box::new(job));
    }

    /// The worker has opened a volume's files, or not.
    pub fn opened(&mut self, token: Token, opened: Box<dyn Any + Send>) {
        let opened = opened
            .downcast::<Result<Opened, String>>()
            .expect("the worker opens volumes, nothing else");
        let Some((spec, answer)) = self.openings.remove(token.0 as u32) else {
            return;
        };
        let opened = match *opened {
            Ok(opened) if self.stopping.is_none() => opened,
            Ok(_) => return tell(answer, Err("the node is stopping".to_owned())),
            Err(error) => return tell(answer, Err(error)),
        };
        let backend = opened.backend.build();
        let mut config = spec.config;
        config.backend_extents = backend.has_extents();
        let number = VolumeNumber(config.number);
        let works = &mut self.works;
        let (volume, actions) = works.open_volume(config);
        let slot = works.volumes.insert(Served {
            name: spec.name,
            number,
            volume,
            log: opened.log,
            backend,
            device_operations: 0,
            requests: 0,
            waiting: std::collections::VecDeque::new(),
            listed: false,
            opening: Some(answer),
            closing: Vec::new(),
            resizing: None,
            held: Vec::new(),
            latencies: std::array::from_fn(|_| served::histogram()),
        });
        works.numbers.insert(number, slot);
        works.perform_opening(slot, actions);
    }

    /// A volume is closed or could not be opened, and nothing of it is under way.
    pub fn drop_volume(&mut self, slot: u32) {
        let Some(mut served) = self.works.volumes.remove(slot) else {
            return;
        };
        self.works.numbers.remove(&served.number);
        if let Some(due) = self.works.due.get_mut(slot as usize) {
            *due = Nanos(u64::MAX);
        }
        let failed = match served.volume.phase() {
            Phase::Failed(error) => Some(format!("volume `{}`: {error}", served.name)),
            _ => None,
        };
        if let Some(answer) = served.opening.take() {
            let closed = || "the volume was closed while it opened".to_owned();
            tell(answer, Err(failed.unwrap_or_else(closed)));
        }
        if let Some(resizing) = served.resizing.take() {
            tell(resizing.answer, Err("the volume was closed".to_owned()));
        }
        for one in served.waiting.drain(..) {
            let closing = Err(hdcs_core::error::RequestError::Closing);
            self.works.ended.push((one.origin, closing));
        }
        self.abort_connections(served.number);
        for answer in served.closing {
            tell(answer, Ok(()));
        }
    }

    fn abort_connections(&mut self, number: VolumeNumber) {
        for slot in 0..self.connections.end() {
            if let Some(connection) = self.connections.get_mut(slot)
                && connection.volume() == Some(number)
            {
                connection.abort();
                self.list(slot);
            }
        }
    }

    fn close(&mut self, number: VolumeNumber, destage: bool, answer: Answer<()>) {
        let Some(&slot) = self.works.numbers.get(&number) else {
            return tell(answer, Err(NOT_OPEN.to_owned()));
        };
        if let Some(served) = self.works.volumes.get_mut(slot) {
            served.closing.push(answer);
        }
        self.abort_connections(number);
        self.works.step(slot, Event::Close { destage });
    }

    /// Step a volume that is open.
    fn step_open(&mut self, number: VolumeNumber, event: Event) -> Result<(), String> {
        let slot = self.works.open_slot(number)?;
        self.works.step(slot, event);
        Ok(())
    }

    fn reconfigure(&mut self, mut config: VolumeConfig) -> Result<(), String> {
        let slot = self.works.open_slot(VolumeNumber(config.number))?;
        if let Some(served) = self.works.volumes.get(slot) {
            config.backend_extents = served.backend.has_extents();
        }
        self.works.step(slot, Event::Reconfigure(config));
        Ok(())
    }

    fn job(&mut self, number: VolumeNumber, way: Move, range: SectorRange, answer: Answer<()>) {
        let slot = match self.works.open_slot(number) {
            Ok(slot) => slot,
            Err(error) => return tell(answer, Err(error)),
        };
        let sectors = self.works.volumes.get(slot).map_or(0, |served| {
            served.volume.config().bytes / SECTOR_BYTES as u64
        });
        let inside = range.start.checked_add(range.count);
        if range.is_empty() || inside.is_none_or(|end| end > sectors) {
            let error = format!("the range is empty or beyond the volume's {sectors} sectors");
            return tell(answer, Err(error));
        }
        self.jobs.insert(Job::new(number, way, range, answer));
    }

    fn resize(&mut self, number: VolumeNumber, bytes: u64, answer: Answer<()>) {
        match self.works.check_resize(number, bytes) {
            Ok(slot) => self.works.begin_resize(slot, bytes, answer),
            Err(error) => tell(answer, Err(error)),
        }
    }

    fn report(&self) -> ShardReport {
        let works = &self.works;
        let mut volumes: Vec<_> = works
            .volumes
            .iter()
            .map(|(_, served)| {
                let connections = self
                    .connections
                    .iter()
                    .filter(|(_, connection)| connection.volume() == Some(served.number));
                served.report(works.now, connections.count())
            })
            .collect();
        volumes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        ShardReport {
            volumes,
            cache: works.cache.stats(),
            cache_identity_error: self.identity.error().map(str::to_owned),
            pool_bytes: works.pool.total_bytes() as u64,
            pool_free_bytes: works.pool.free_bytes() as u64,
            connections: self.connections.len(),
        }
    }

    fn stop(&mut self, destage: bool, answer: Answer<()>) {
        if let Some(stopping) = &mut self.stopping {
            // Asked again, it may be content with less: nobody should have to wait for a dead
            // backend for ever.
            stopping.destage &= destage;
            stopping.answers.push(answer);
            stopping.volumes_closing = false;
            return;
        }
        self.stopping = Some(Stopping {
            destage,
            answers: vec![answer],
            deadline: self.works.now.plus(STOP_PATIENCE),
            volumes_closing: false,
            give_up: Nanos(u64::MAX),
            cache_closing: false,
        });
        for slot in 0..self.listeners.end() {
            match self.listeners.get_mut(slot).map(|one| one.accepting) {
                Some(Some(key)) => self.works.ring.cancel(key),
                Some(None) => drop(self.listeners.remove(slot)),
                None => {}
            }
        }
        for slot in 0..self.connections.end() {
            if let Some(connection) = self.connections.get_mut(slot) {
                connection.shut_down(&mut self.works.ring);
                self.list(slot);
            }
        }
    }

    /// The next step of a stop: connections, volumes, the cache.
    pub fn go_on_stopping(&mut self) {
        let Some(stopping) = &mut self.stopping else {
            return;
        };
        if stopping.deadline <= self.works.now {
            stopping.deadline = Nanos(u64::MAX);
            for slot in 0..self.connections.end() {
                if let Some(connection) = self.connections.get_mut(slot) {
                    connection.abort();
                    if !connection.listed {
                        connection.listed = true;
                        self.listed.push(slot);
                    }
                }
            }
        }
        let answered = self.connections.is_empty() || stopping.deadline == Nanos(u64::MAX);
        if answered && !stopping.volumes_closing {
            stopping.volumes_closing = true;
            let destage = stopping.destage;
            if !destage {
                stopping.give_up = self.works.now.plus(CLOSE_PATIENCE);
            }
            for slot in 0..self.works.volumes.end() {
                self.works.step(slot, Event::Close { destage });
            }
        }
        if self.works.volumes.is_empty() {
            stopping.give_up = Nanos(u64::MAX);
        }
        if stopping.volumes_closing
            && self.works.volumes.is_empty()
            && self.openings.is_empty()
            && !stopping.cache_closing
        {
            stopping.cache_closing = true;
            self.works.step_cache(CacheEvent::Close);
            self.works.cache_touched = true;
        }
    }

    /// Whether a stop has come to its end; whoever asked for it is told.
    pub fn has_stopped(&mut self) -> bool {
        let works = &self.works;
        let Some(stopping) = &self.stopping else {
            return false;
        };
        let cache_closed = works.cache.is_closed() && works.cache_operations == 0;
        let result = if stopping.cache_closing && cache_closed {
            Ok(())
        } else if stopping.give_up <= works.now && !works.volumes.is_empty() {
            // As after a crash: the logs hold all that was acknowledged as durable.
            let names: Vec<&str> = works
                .volumes
                .iter()
                .map(|(_, served)| &*served.name)
                .collect();
            let names = names.join(", ");
            tracing::warn!(volumes = names, "stopped without closing volumes that hang");
            Err(format!(
                "these volumes did not close in time: {names}; their backend hangs, and their logs \
                 are replayed at the next start"
            ))
        } else {
            return false;
        };
        if let Some(stopping) = self.stopping.take() {
            for answer in stopping.answers {
                tell(answer, result.clone());
            }
        }
        true
    }
}

impl Works {
    fn open_slot(&self, number: VolumeNumber) -> Result<u32, String> {
        let slot = *self.numbers.get(&number).ok_or(NOT_OPEN)?;
        match self.volumes.get(slot).map(|served| served.volume.phase()) {
            Some(Phase::Open) => Ok(slot),
            Some(Phase::Opening) => Err("the volume is still replaying its log".to_owned()),
            _ => Err(NOT_OPEN.to_owned()),
        }
    }

    fn open_volume(&mut self, config: VolumeConfig) -> (Volume, Vec<hdcs_core::io::Action>) {
        let mut actions = Vec::new();
        let mut context = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        let volume = Volume::open(config, self.now, &mut context);
        (volume, actions)
    }

    /// Whether a volume may get a new size; its slot.
    fn check_resize(&self, number: VolumeNumber, bytes: u64) -> Result<u32, String> {
        let slot = self.open_slot(number)?;
        let sizes = VOLUME_BYTES_MIN..=VOLUME_BYTES_MAX;
        if !bytes.is_multiple_of(SECTOR_BYTES as u64) || !sizes.contains(&bytes) {
            return Err(format!(
                "size {bytes}: must be a multiple of {SECTOR_BYTES} from {VOLUME_BYTES_MIN} to \
                 {VOLUME_BYTES_MAX}"
            ));
        }
        let served = self.volumes.get(slot).ok_or(NOT_OPEN)?;
        if served.resizing.is_some() {
            return Err("a resize is under way already; wait for its end".to_owned());
        }
        Ok(slot)
    }

    /// The backend grows before the volume and shrinks after it, so that it always holds all of
    /// the volume.
    fn begin_resize(&mut self, slot: u32, bytes: u64, answer: Answer<()>) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let before = served.volume.config().bytes;
        let shrinks = bytes < before;
        served.resizing = Some(Resizing {
            step: if shrinks {
                ResizeStep::Destage
            } else {
                ResizeStep::Backend
            },
            bytes,
            before,
            answer,
        });
        if shrinks {
            self.step(slot, Event::Resize { bytes });
            self.step(slot, Event::DestageAll);
        } else {
            self.resize_backend(slot, bytes);
        }
    }

    fn resize_backend(&mut self, slot: u32, bytes: u64) {
        let token = RESIZE_TOKEN;
        let ask = Ask::Resize { bytes };
        self.ask_backend(slot, Operation { token, ask });
        self.perform(slot);
    }

    /// The next step of a volume's resize.
    pub fn go_on_resizing(&mut self, slot: u32) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let Some(resizing) = &mut served.resizing else {
            return;
        };
        if resizing.step == ResizeStep::Destage
            && served.volume.stats(self.now).destage_all_remaining_bytes == 0
        {
            resizing.step = ResizeStep::Drain;
        }
        if resizing.step == ResizeStep::Drain && served.backend.under_way() == 0 {
            // The block in which the new end lies is among them: it is not cached while it is a
            // part of one, but found again once the volume has grown.
            let first = resizing.bytes / BLOCK_BYTES as u64;
            let blocks = resizing.before.div_ceil(BLOCK_BYTES as u64) - first;
            let first = BlockKey::new(served.number.0, first);
            self.cache.invalidate(first, blocks);
            resizing.step = ResizeStep::Void(self.cache.barrier());
            // What makes it durable begins now, since the turn has polled the cache already.
            self.step_cache(CacheEvent::Poll);
            return self.go_on_resizing(slot);
        }
        if let ResizeStep::Void(barrier) = resizing.step
            && barrier <= self.cache.persisted()
        {
            resizing.step = ResizeStep::Backend;
            let bytes = resizing.bytes;
            self.resize_backend(slot, bytes);
        }
    }

    /// The backend has changed its size, or could not.
    pub fn backend_resized(&mut self, slot: u32, result: Result<(), IoError>) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let Some(resizing) = served.resizing.take() else {
            return;
        };
        let bytes = resizing.bytes;
        let held = std::mem::take(&mut served.held);
        if result.is_ok() {
            served.backend.resized(bytes);
            self.step(slot, Event::Resize { bytes });
        } else {
            // A shrunk volume keeps its new size over a backend that is larger than it.
            served.backend.resized(bytes.min(resizing.before));
        }
        for operation in held {
            self.ask_backend(slot, operation);
        }
        let result = result.map_err(|error| format!("the backend cannot be resized: {error}"));
        tell(resizing.answer, result);
    }
}

/// Open a volume's log and backend; on the worker, since it blocks.
fn open_files(spec: &VolumeSpec, durability: Option<Durability>) -> Result<Opened, String> {
    let name = &spec.name;
    let log = Device::open(&spec.log, durability)
        .map_err(|error| format!("volume `{name}`: write log: {error}"))?;
    let superblocks = log
        .read_superblocks()
        .map_err(|error| format!("volume `{name}`: write log: {error}"))?;
    // Only the backend of a volume that was never opened may be missing: an image that was there
    // and has gone must not be replaced by an empty one.
    let openings = superblocks.iter().filter_map(|block| {
        let superblock = LogSuperblock::parse(block).ok()?;
        Some(superblock.incarnation.get())
    });
    let new = openings.max() == Some(0);
    let absent = if new { Absent::Create } else { Absent::Refuse };
    let backend = backends::open(&spec.backend, spec.config.bytes, absent)
        .map_err(|error| format!("volume `{name}`: {error}"))?;
    Ok(Opened { log, backend })
}
