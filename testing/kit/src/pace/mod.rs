//! How fast volumes are: real volumes of the core in virtual time, with clients, devices and a processor that are made up.
//!
//! ```text
//!  clients ──requests──► processor: one turn after another ──actions──► log's device, backend
//!     ▲                       │  ▲                                            │
//!     └──────replies──────────┘  └───────────────completions──────────────────┘
//! ```
//!
//! The processor is the loop of a shard: a turn takes what has come by its beginning, steps the volumes, polls them, and
//! performs what they ask for. It lasts as long as [`Costs`] say; what comes meanwhile waits for the next one. Clients are
//! closed loops: each keeps so many requests under way. A run is the same every time.
//!
//! [`Model`] says what there is, [`Model::run`] runs it, and [`Report`] says what came of it.
//! `cargo run --profile checked -p hdcs-kit --example pace -- --help` is the same by hand, as a table over time.
//!
//! What it leaves out, so that its figures compare with each other and with no machine's:
//!
//! * Costs are those of a kind of work, however much a volume looks at for it; memory, its cache and the kernel's
//!   threads cost nothing. Planning, forgetting and retiring cost a turn for each step, no more.
//! * Devices have no bad moments: no variance, no garbage collection, no other users, no difference between
//!   near and far, read and write.
//! * Every block is zeroes, so nothing is stored: a log cannot be opened again, and nothing is compared.
//! * No SSD tier, no compression, no encryption, no faults, no weights or limits of volumes.
//! * A connection takes any number of requests at a time; a reply is on its way for a fixed time.

mod device;
mod report;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use device::{DeviceModel, Durability};
use fastrand::Rng;
use hdcs_core::base::buf::{BufMut, Pool};
use hdcs_core::base::io::{
    Action, Completion, Done, Durability as Call, DurableWay, Nanos, Reply, Request, RequestId,
    SectorRange, Token,
};
use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, LOG_BLOCK_ENTRIES_MAX};
use hdcs_core::cache::{CacheConfig, CacheEvent, ReadCache};
use hdcs_core::format::LOG_HEADER_BLOCKS;
use hdcs_core::volume::{
    Context, DurableWays, Event, Persist, Phase, Policy, Volume, VolumeConfig, WhenFull,
};
use report::Answer;
pub use report::{Report, WINDOW, Window, variation};

use self::device::Device;
use crate::lz4::Lz4;

/// What the processor needs.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// Of a turn.
    pub turn: Nanos,
    /// Of a request, from its receipt to its reply.
    pub request: Nanos,
    /// Of each 4 KiB of its data.
    pub request_block: Nanos,
    /// Of a span or superblock.
    pub span: Nanos,
    /// Of a sync behind it.
    pub sync: Nanos,
    /// Of a read of the log.
    pub log_read: Nanos,
    /// Of a read, write or flush of the backend.
    pub backend: Nanos,
    /// Of each 4 KiB of it that is destaged.
    pub destaged_block: Nanos,
}

impl Default for Costs {
    /// Measured on a server processor.
    fn default() -> Self {
        Self {
            turn: Nanos::from_micros(8),
            request: Nanos::from_micros(5),
            request_block: Nanos::from_micros(1),
            span: Nanos::from_micros(25),
            sync: Nanos::from_micros(15),
            log_read: Nanos::from_micros(8),
            backend: Nanos::from_micros(6),
            destaged_block: Nanos::from_micros(3),
        }
    }
}

/// Where volumes destage to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The log's device.
    Shared,
    /// A device of its own.
    Apart(DeviceModel),
}

/// What one client does.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// To which volume, from 0.
    pub volume: usize,
    /// Requests under way.
    pub depth: usize,
    /// 4 KiB blocks of a request, at a random multiple of itself.
    pub blocks: u64,
    /// Of a hundred requests, those that read.
    pub reads: u8,
    /// A flush follows each so many writes; 0: none does.
    pub flush_every: u64,
    /// When it begins and ends.
    pub from: Nanos,
    /// See `from`.
    pub until: Nanos,
    /// A reply takes so long to become the next request, beside the client's processor.
    pub latency: Nanos,
    /// What its processor needs for a request.
    pub cost: Nanos,
}

impl Default for Load {
    /// Random writes of 4 KiB, 32 at a time.
    fn default() -> Self {
        Self {
            volume: 0,
            depth: 32,
            blocks: 1,
            reads: 0,
            flush_every: 0,
            from: Nanos(0),
            until: Nanos(u64::MAX),
            latency: Nanos::from_micros(15),
            cost: Nanos::from_micros(5),
        }
    }
}

/// What there is. The default is one volume with a log of 64 MiB on a disk of a cloud, over a backend on the same disk.
#[derive(Clone, Debug)]
pub struct Model {
    /// Of where clients write.
    pub seed: u64,
    /// The device of all logs.
    pub log: DeviceModel,
    /// By which call a log is made durable to begin with, and whether the other one is tried.
    pub call: Call,
    /// See `call`.
    pub tries_calls: bool,
    /// Where all volumes destage to.
    pub backend: Backend,
    /// The processor.
    pub costs: Costs,
    /// Volumes.
    pub volumes: usize,
    /// What each of them is; number and identity are given.
    pub config: VolumeConfig,
    /// Memory for requests and recent data.
    pub pool_bytes: usize,
    /// The clients.
    pub loads: Vec<Load>,
}

impl Default for Model {
    fn default() -> Self {
        let ring_bytes = 64 << 20;
        Self {
            seed: 1,
            log: DeviceModel::flushed(),
            call: Call::Dsync,
            tries_calls: false,
            backend: Backend::Shared,
            costs: Costs::default(),
            volumes: 1,
            config: VolumeConfig {
                bytes: 1 << 30,
                dirty_age_max: Nanos::from_millis(30_000),
                dirty_ratio_min: 50,
                dirty_ratio_max: 70,
                destage_depth_max: 64,
                ..Self::config(ring_bytes)
            },
            pool_bytes: 32 << 20,
            loads: vec![Load::default()],
        }
    }
}

impl Model {
    /// A volume with such a log that is durable on write, and keeps an eighth of that in memory.
    fn config(ring_bytes: u64) -> VolumeConfig {
        VolumeConfig {
            policy: Policy::WriteBack,
            when_full: WhenFull::Wait,
            codec: &Lz4,
            log_bytes: ring_bytes + LOG_HEADER_BLOCKS * BLOCK_BYTES as u64,
            log_entries_max: ring_bytes / BLOCK_BYTES as u64 * LOG_BLOCK_ENTRIES_MAX,
            resident_bytes_max: ring_bytes / 8,
            ..crate::volume::config(Persist::OnWrite)
        }
    }

    /// The same with another log.
    #[must_use]
    pub fn with_log_bytes(mut self, ring_bytes: u64) -> Self {
        let other = Self::config(ring_bytes);
        self.config.log_bytes = other.log_bytes;
        self.config.log_entries_max = other.log_entries_max;
        self.config.resident_bytes_max = other.resident_bytes_max;
        self.pool_bytes = 4 * other.resident_bytes_max as usize;
        self
    }

    /// What happens in so long a time.
    pub fn run(&self, time: Nanos) -> Report {
        let mut world = World::new(self);
        world.open();
        world.run(time);
        world.report
    }
}

/// What comes at some time.
#[derive(Debug)]
enum Coming {
    Request {
        load: usize,
    },
    Completion {
        volume: usize,
        token: Token,
        done: Done,
    },
    /// A write has ended that a flush is to make durable.
    FlushLog {
        volume: usize,
        token: Token,
    },
}

/// A request under way.
#[derive(Clone, Copy, Debug)]
struct Asked {
    load: usize,
    since: Nanos,
    is_write: bool,
    is_flush: bool,
}

struct Served {
    volume: Volume,
    superblock: [u8; BLOCK_BYTES],
    touched: bool,
}

/// A client's processor, and what it has sent.
#[derive(Debug, Default)]
struct Client {
    free: Nanos,
    writes: u64,
}

struct World<'a> {
    model: &'a Model,
    random: Rng,
    /// By time, and then in the order in which they were added.
    coming: BTreeMap<(Nanos, u64), Coming>,
    added: u64,
    log: Device,
    apart: Option<Device>,
    pool: Arc<Pool>,
    cache: ReadCache,
    volumes: Vec<Served>,
    clients: Vec<Client>,
    asked: BTreeMap<u64, Asked>,
    next_id: u64,
    /// Requests that found no memory.
    starved: Vec<(usize, Nanos)>,
    /// The present turn: when it began, and how far it has come.
    began: Nanos,
    now: Nanos,
    replies: Vec<Asked>,
    report: Report,
    destaged_bytes: u64,
    /// Beginning of time for clients: the volumes are open.
    origin: Nanos,
}

impl<'a> World<'a> {
    fn new(model: &'a Model) -> Self {
        let pool = Pool::new(model.pool_bytes);
        let mut actions = Vec::new();
        let config = CacheConfig {
            dram_blocks: 1024,
            ssd: None,
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        let mut cache = ReadCache::new(config, Nanos(0), Arc::clone(&pool), &mut actions);
        let volumes = (0..model.volumes).map(|number| {
            let mut config = model.config.clone();
            (config.number, config.uuid) = (number as u32 + 1, [number as u8 + 1; 16]);
            let superblock = Volume::format_log(&config, number as u64 + 7);
            let mut cx = Context {
                cache: &mut cache,
                pool: &pool,
                actions: &mut Vec::new(),
            };
            // What it asks for at once, it asks for again at its first poll.
            let mut volume = Volume::open(config, Nanos(0), &mut cx);
            let by_thread = false;
            let way = DurableWay {
                call: model.call,
                by_thread,
            };
            volume.set_durable_ways(DurableWays::new(way, model.tries_calls, false));
            (volume, superblock, core::mem::take(cx.actions))
        });
        let opened: Vec<_> = volumes.collect();
        let mut world = Self {
            model,
            random: Rng::with_seed(model.seed),
            coming: BTreeMap::new(),
            added: 0,
            log: Device::new(model.log),
            apart: match model.backend {
                Backend::Shared => None,
                Backend::Apart(apart) => Some(Device::new(apart)),
            },
            pool,
            cache,
            volumes: Vec::new(),
            clients: model.loads.iter().map(|_| Client::default()).collect(),
            asked: BTreeMap::new(),
            next_id: 0,
            starved: Vec::new(),
            began: Nanos(0),
            now: Nanos(0),
            replies: Vec::new(),
            report: Report::default(),
            destaged_bytes: 0,
            origin: Nanos(0),
        };
        for (number, (volume, superblock, actions)) in opened.into_iter().enumerate() {
            world.volumes.push(Served {
                volume,
                superblock,
                touched: true,
            });
            for action in actions {
                world.perform(number, action);
            }
        }
        world
    }

    /// Open the volumes; only then does time count.
    fn open(&mut self) {
        while self
            .volumes
            .iter()
            .any(|one| one.volume.phase() != Phase::Open)
        {
            let next = self.next_time().expect("an opening goes on");
            self.turn(next);
        }
        // What is still to come of the opening comes before the clients.
        self.origin = Nanos((self.now.0 / WINDOW.0 + 1) * WINDOW.0);
        let (busy, turns) = (Nanos(0), 0);
        self.report = Report {
            busy,
            turns,
            ..Report::default()
        };
        for (load, what) in self.model.loads.iter().enumerate() {
            for _ in 0..what.depth {
                self.client_sends(load, self.origin.plus(what.from));
            }
        }
    }

    fn run(&mut self, time: Nanos) {
        let end = self.origin.plus(time);
        let mut window_ends = self.origin.plus(WINDOW);
        while let Some(next) = self.next_time() {
            let next = next.max(self.now);
            while window_ends <= next && window_ends <= end {
                self.end_window();
                window_ends = window_ends.plus(WINDOW);
            }
            if next >= end {
                break;
            }
            self.turn(next);
        }
        for one in &self.volumes {
            let stats = one.volume.stats(self.now);
            self.report.spans += stats.log_spans;
            self.report.throttled = self.report.throttled.plus(stats.throttled_time);
        }
        // What was answered is counted where it belongs, late as a turn may have ended.
        let windows = &mut self.report.windows;
        for answer in &self.report.answers {
            if let Some(window) = windows.get_mut((answer.at.0 / WINDOW.0) as usize) {
                *(if answer.is_write {
                    &mut window.writes
                } else {
                    &mut window.reads
                }) += 1;
            }
        }
    }

    fn end_window(&mut self) {
        let stats = self.volumes[0].volume.stats(self.now);
        let destaged: u64 = self
            .volumes
            .iter()
            .map(|one| one.volume.stats(self.now).destaged_bytes)
            .sum();
        self.report.windows.push(Window {
            destaged_bytes: destaged - self.destaged_bytes,
            fill: (stats.log_used_blocks * 1000 / stats.log_prepared_blocks) as u32,
            ..Window::default()
        });
        self.destaged_bytes = destaged;
    }

    /// When something happens next.
    fn next_time(&self) -> Option<Nanos> {
        let coming = self.coming.keys().next().map(|&(time, _)| time);
        let wakeups = self
            .volumes
            .iter()
            .filter_map(|one| one.volume.next_wakeup());
        coming.into_iter().chain(wakeups).min()
    }

    fn add(&mut self, time: Nanos, coming: Coming) {
        self.added += 1;
        self.coming.insert((time, self.added), coming);
    }

    /// One turn of the processor, which begins then.
    fn turn(&mut self, begin: Nanos) {
        self.began = begin.max(self.now);
        self.now = self.began;
        let mut is_turn = false;
        for (load, since) in std::mem::take(&mut self.starved) {
            self.request(load, since);
        }
        while let Some(entry) = self.coming.first_entry()
            && entry.key().0 <= self.began
        {
            let ((time, _), coming) = entry.remove_entry();
            match coming {
                Coming::Request { load } => {
                    is_turn = true;
                    self.request(load, time);
                }
                Coming::Completion {
                    volume,
                    token,
                    done,
                } => {
                    is_turn = true;
                    let result = Ok(done);
                    self.step(volume, Event::Completed(Completion { token, result }));
                }
                // The device's doing, not the processor's.
                Coming::FlushLog { volume, token } => {
                    let end = self.log.flush(time);
                    self.complete(end, volume, token, Done::Written);
                }
            }
        }
        for number in 0..self.volumes.len() {
            let due = self.volumes[number].volume.next_wakeup();
            if due.is_some_and(|due| due <= self.began) || self.volumes[number].touched {
                self.volumes[number].touched = false;
                is_turn = true;
                self.step(number, Event::Poll);
                self.volumes[number].touched = false;
            }
        }
        if !is_turn {
            return;
        }
        let mut of_cache = Vec::new();
        self.cache.step(self.began, CacheEvent::Poll, &mut of_cache);
        assert!(of_cache.is_empty(), "there is no SSD tier");
        self.now = self.now.plus(self.model.costs.turn);
        self.report.turns += 1;
        self.report.busy = self.report.busy.plus(self.now.since(self.began));
        for asked in std::mem::take(&mut self.replies) {
            if !asked.is_flush {
                self.report.answers.push(Answer {
                    at: self.now.since(self.origin),
                    took: self.now.since(asked.since),
                    volume: self.model.loads[asked.load].volume,
                    is_write: asked.is_write,
                });
            }
            self.client_sends(asked.load, self.now);
        }
    }

    /// A client has had a reply at this time, or begins: its next request.
    fn client_sends(&mut self, load: usize, at: Nanos) {
        let what = self.model.loads[load];
        let client = &mut self.clients[load];
        client.free = client.free.max(at).plus(what.cost);
        let arrives = client.free.plus(what.latency);
        if arrives < self.origin.plus(what.until) {
            self.add(arrives, Coming::Request { load });
        }
    }

    fn request(&mut self, load: usize, since: Nanos) {
        let what = self.model.loads[load];
        let places = self.model.config.bytes / BLOCK_BYTES as u64 / what.blocks;
        let start = self.random.u64(..places) * what.blocks * BLOCK_SECTORS;
        let range = SectorRange::new(start, what.blocks * BLOCK_SECTORS);
        let reads = self.random.u8(..100) < what.reads;
        let client = &mut self.clients[load];
        let is_flush = !reads
            && what.flush_every > 0
            && client.writes % (what.flush_every + 1) == what.flush_every;
        let request = if is_flush {
            Request::Flush
        } else if reads {
            Request::Read { range }
        } else {
            let Some(data) = self.pool.alloc_for(range) else {
                self.starved.push((load, since));
                return;
            };
            let data = data.freeze();
            let fua = false;
            Request::Write { range, data, fua }
        };
        client.writes += u64::from(!reads);
        let costs = self.model.costs;
        let of_data = costs.request_block.0 * what.blocks * u64::from(!is_flush);
        self.now = self.now.plus(costs.request).plus(Nanos(of_data));
        self.next_id += 1;
        self.asked.insert(
            self.next_id,
            Asked {
                load,
                since,
                is_write: !reads && !is_flush,
                is_flush,
            },
        );
        let id = RequestId(self.next_id);
        self.step(what.volume, Event::Request { id, request });
    }

    /// Step a volume, and perform what it asks for.
    fn step(&mut self, number: usize, event: Event) {
        let mut actions = Vec::new();
        let mut cx = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        self.volumes[number].volume.step(self.began, event, &mut cx);
        drop(cx);
        self.volumes[number].touched = true;
        for action in actions {
            self.perform(number, action);
        }
    }

    fn complete(&mut self, time: Nanos, volume: usize, token: Token, done: Done) {
        self.add(
            time,
            Coming::Completion {
                volume,
                token,
                done,
            },
        );
    }

    fn backend(&mut self) -> &mut Device {
        self.apart.as_mut().unwrap_or(&mut self.log)
    }

    fn perform(&mut self, number: usize, action: Action) {
        let costs = self.model.costs;
        match action {
            Action::LogRead {
                token, offset, buf, ..
            } => {
                self.now = self.now.plus(costs.log_read);
                self.report.log_read_bytes += buf.len() as u64;
                let end = self.log.transfer(self.now, buf.len() as u64, false);
                let done = Done::Read(self.read_log(number, offset, buf));
                self.complete(end, number, token, done);
            }
            Action::LogWrite {
                token, data, way, ..
            } => {
                let syncs = way.is_some_and(|way| way.call == Call::Fdatasync);
                let more = if syncs { costs.sync } else { Nanos(0) };
                self.now = self.now.plus(costs.span).plus(more);
                let bytes = data.iter().map(|buf| buf.len() as u64).sum();
                let (end, wants_flush) = self.log.write_durably(self.now, bytes, syncs);
                if wants_flush {
                    let volume = number;
                    self.add(end, Coming::FlushLog { volume, token });
                } else {
                    self.complete(end, number, token, Done::Written);
                }
            }
            Action::BackendRead { token, buf, .. } => {
                self.now = self.now.plus(costs.backend);
                let (now, bytes) = (self.now, buf.len() as u64);
                let end = self.backend().transfer(now, bytes, false);
                self.complete(end, number, token, Done::Read(buf));
            }
            Action::BackendWrite { token, data, .. } => {
                let bytes: u64 = data.iter().map(|buf| buf.len() as u64).sum();
                let blocks = bytes.div_ceil(BLOCK_BYTES as u64);
                let of_blocks = Nanos(costs.destaged_block.0 * blocks);
                self.now = self.now.plus(costs.backend).plus(of_blocks);
                let now = self.now;
                let end = self.backend().transfer(now, bytes, true);
                self.complete(end, number, token, Done::Written);
            }
            Action::BackendFlush { token } => {
                self.now = self.now.plus(costs.backend);
                let now = self.now;
                let end = self.backend().flush(now);
                self.complete(end, number, token, Done::Written);
            }
            Action::Reply { request, result } => {
                let reply = result.expect("nothing fails here");
                debug_assert!(matches!(reply, Reply::Done | Reply::Data(_)));
                let asked = self.asked.remove(&request.0).expect("it was asked");
                self.replies.push(asked);
            }
            Action::BackendUnsettled { .. } => {}
            other => panic!("not expected here: {other:?}"),
        }
    }

    fn read_log(&self, number: usize, offset: u64, mut buf: BufMut) -> BufMut {
        buf.fill(0);
        if offset == 0 {
            buf[..BLOCK_BYTES].copy_from_slice(&self.volumes[number].superblock);
        }
        buf
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_runs_the_same_every_time_and_differs_by_its_seed() {
        let model = Model::default();
        let time = Nanos::from_millis(200);
        let first = model.run(time);
        assert_eq!(first, model.run(time));
        assert_ne!(first, Model { seed: 2, ..model }.run(time));
    }

    #[test]
    fn model_serves_as_many_as_its_processor_allows() {
        let model = Model::default();
        let report = model.run(Nanos::from_millis(100));
        let busy = report.busy.0 as f64 / 1e8;
        assert!((0.3..=1.01).contains(&busy), "{busy}");
        assert_eq!(report.windows.len(), 10);
        let slower = Costs {
            request: Nanos::from_micros(100),
            ..Costs::default()
        };
        let slower = Model {
            costs: slower,
            ..model
        };
        let report = slower.run(Nanos::from_millis(100));
        let iops = report.write_iops(0..100);
        assert!((8_000.0..10_000.0).contains(&iops), "{iops}");
    }

    #[test]
    fn model_keeps_a_clients_depth() {
        let load = Load {
            depth: 1,
            reads: 50,
            flush_every: 8,
            ..Load::default()
        };
        let model = Model {
            loads: vec![load],
            ..Model::default()
        };
        let report = model.run(Nanos::from_millis(100));
        // A write waits for transfer and flush, a read for a transfer, and each for the client.
        let took = report.write_latency(0..100, 500);
        assert!((160.0..300.0).contains(&took), "{took}");
        let rate = report.write_iops(0..100) + report.read_iops(0..100);
        assert!((3_000.0..10_000.0).contains(&rate), "{rate}");
    }
}
