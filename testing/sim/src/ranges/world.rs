//! The driver of one large volume. It decides nothing about what is right.

use std::collections::BTreeMap;
use std::sync::Arc;

use fastrand::Rng;
use hdcs_core::base::buf::{BufMut, Pool};
use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{
    Action, Completion, Done, ExtentKind, Nanos, Reply, Request, RequestId, SectorRange, Token,
};
use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, LOG_BYTES_MIN, SECTOR_BYTES};
use hdcs_core::cache::{CacheConfig, CacheEvent, ReadCache, SsdConfig};
use hdcs_core::volume::{
    Context, Discard, Event, LogFailure, Persist, Phase, Policy, Volume, VolumeConfig, WhenFull,
};

use super::{Coverage, Options, Plant};
use crate::check_cost::Cost;
use crate::content::mix;
use crate::disk::joined;
use crate::engine::{Ended, Engine, Simulated};
use crate::lz4::LZ4;
use crate::scenario::draw_behaviour;
use crate::trace::Trace;
use crate::violation::Violation;

/// Events of one batch at most.
const BATCH_MAX: usize = 24;
/// The longest pause between two turns, and the longest that a device takes.
const PAUSE_MICROS: u64 = 200;
const LATENCY_MICROS: u64 = 250;
/// Everything that was asked for ends in this time, once nothing more is asked.
const PATIENCE: Nanos = Nanos::from_millis(40_000);
/// Ranges from this length on are called long.
const LONG_SECTORS: u64 = (1 << 30) / SECTOR_BYTES as u64;
/// Sectors of the longest zeroing that a planted bug lets through.
const SHORT_SECTORS: u64 = (4 << 30) / SECTOR_BYTES as u64;
/// Sectors of the longest promotion.
const PROMOTED_SECTORS_MAX: u64 = 16 << 11;
/// Frames of the DRAM tier.
const FRAMES: usize = 2048;
/// Bytes of the SSD tier.
const SSD_BYTES: u64 = 24 << 20;

/// Which write holds which sectors; 0 where none does.
#[derive(Debug, Default)]
struct Sparse(BTreeMap<u64, (u64, u64)>);

impl Sparse {
    fn set(&mut self, range: SectorRange, write: u64) {
        let before = self.0.range(..range.start).next_back();
        if let Some((&start, &(end, held))) = before.filter(|(_, (end, _))| *end > range.start) {
            self.0.insert(start, (range.start, held));
            self.0.insert(range.start, (end, held));
        }
        while let Some((&start, &(end, held))) = self.0.range(range.start..range.end()).next() {
            self.0.remove(&start);
            if end > range.end() {
                self.0.insert(range.end(), (end, held));
            }
        }
        if write > 0 {
            self.0.insert(range.start, (range.end(), write));
        }
    }

    fn get(&self, sector: u64) -> u64 {
        let run = self.0.range(..=sector).next_back();
        run.filter(|(_, (end, _))| *end > sector)
            .map_or(0, |(_, (_, write))| *write)
    }

    fn fill(&self, range: SectorRange, bytes: &mut [u8]) {
        for (sector, bytes) in (range.start..).zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
            fill(self.get(sector), sector, bytes);
        }
    }
}

fn fill(write: u64, sector: u64, bytes: &mut [u8]) {
    bytes.fill(0);
    if write > 0 {
        bytes[..8].copy_from_slice(&write.to_le_bytes());
        bytes[8..16].copy_from_slice(&sector.to_le_bytes());
    }
}

/// What the sender of a request remembers.
#[derive(Debug)]
enum Waiting {
    Read(SectorRange),
    Write(SectorRange),
    Other,
}

/// What a device was asked for is done.
#[derive(Debug)]
struct Happening {
    is_of_cache: bool,
    action: Action,
}

/// See the module.
#[derive(Debug)]
pub struct RangesWorld {
    random: Rng,
    engine: Engine<Happening>,
    config: VolumeConfig,
    cache_config: CacheConfig,
    plant: Option<Plant>,
    pool: Arc<Pool>,
    node: Option<(ReadCache, Volume)>,
    log: Vec<u8>,
    ssd: Vec<u8>,
    backend: Sparse,
    model: Sparse,
    waiting: BTreeMap<u64, Waiting>,
    next_request: u64,
    next_write: u64,
    requests_left: u32,
    cost: Cost,
    /// What the run saw.
    pub coverage: Coverage,
}

impl Simulated for RangesWorld {
    fn now(&self) -> Nanos {
        self.engine.now()
    }

    fn trace(&self) -> &Trace {
        &self.engine.trace
    }

    fn advance(&mut self) -> Result<bool, Violation> {
        // It is polled often, whatever its machines want.
        let pause = Nanos::from_micros(self.random.u64(1..PAUSE_MICROS));
        let wakeup = self.engine.now().plus(pause);
        self.engine.go_on(Some(wakeup))
    }

    /// One batch, and a poll behind it, as a shard does.
    fn turn(&mut self) -> Result<Ended, Violation> {
        for _ in 0..self.random.usize(..=BATCH_MAX) {
            if self.requests_left > 0 && self.waiting.len() < 32 && self.random.bool() {
                self.ask()?;
            } else if let Some(done) = self.engine.take_due() {
                self.complete(done.is_of_cache, done.action)?;
            }
        }
        self.step_volume(Event::Poll)?;
        self.step_cache(CacheEvent::Poll)?;
        if let Some((cache, volume)) = &self.node {
            self.coverage.forgetting += u64::from(cache.is_forgetting());
            let stats = volume.stats(self.engine.now());
            self.coverage.index_bytes_max = self.coverage.index_bytes_max.max(stats.index_bytes);
            if self.engine.turns().is_multiple_of(64) {
                volume.check_invariants();
                cache.check_invariants();
            }
        }
        Ok(Ended::Reached)
    }

    fn deadline(&self, began: Nanos) -> Option<Nanos> {
        (self.requests_left == 0).then(|| began.plus(PATIENCE))
    }

    fn waiting(&self) -> String {
        format!("{:?} wait", self.waiting)
    }
}

impl RangesWorld {
    /// The world of a seed, with everything formatted and nothing started.
    pub fn new(seed: u64, options: Options) -> Self {
        let mut random = Rng::with_seed(mix(seed ^ mix(77)));
        let bytes = [1 << 30, 1 << 36, 1 << 40, 1 << 40][random.usize(..4)];
        let mut config = VolumeConfig {
            number: 1,
            uuid: [1; 16],
            bytes,
            log_bytes: LOG_BYTES_MIN,
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
            backend_extents: false,
            backend_atomic: false,
            log_failure: LogFailure::ReadOnly,
            discard: Discard::Pass,
            backend_answer_max: Nanos::from_millis(1 << 40),
            log_answer_max: Nanos(u64::MAX),
        };
        draw_behaviour(&mut random, &mut config);
        config.persist = Persist::OnWrite;
        config.when_full = WhenFull::Wait;
        if random.u8(..3) == 0 {
            config.policy = Policy::WriteThrough;
        }
        if random.bool() {
            // As much as fits is dirty before anything is destaged, so that a long range covers it.
            (config.dirty_ratio_min, config.dirty_ratio_max) = (90, 95);
            config.dirty_age_max = Nanos::from_millis(1 << 30);
        }
        let cache_config = CacheConfig {
            dram_blocks: FRAMES,
            ssd: random.bool().then(|| SsdConfig {
                bytes: SSD_BYTES,
                uuid: [7; 16],
                line_blocks: [2, 4, 16][random.usize(..3)],
            }),
            ssd_answer_max: Nanos::from_millis(1 << 40),
        };
        let mut log = vec![0; config.log_bytes as usize];
        log[..BLOCK_BYTES].copy_from_slice(&Volume::format_log(&config, seed + 1));
        Self {
            engine: Engine::new(Nanos(1), options.verbose),
            config,
            cache_config,
            plant: options.plant,
            pool: Pool::new(64 << 20),
            node: None,
            log,
            ssd: vec![0; SSD_BYTES as usize],
            backend: Sparse::default(),
            model: Sparse::default(),
            waiting: BTreeMap::new(),
            next_request: 0,
            next_write: 0,
            requests_left: 0,
            cost: Cost::default(),
            coverage: Coverage::default(),
            random,
        }
    }

    /// The run.
    pub fn run(&mut self) -> Result<(), Violation> {
        for opening in 0..3 {
            self.open()?;
            self.requests_left = [200, 2000, 6000][self.random.usize(..3)];
            self.run_until(|world| world.requests_left == 0)?;
            self.run_until(|world| world.waiting.is_empty())?;
            if opening == 2 {
                self.step_volume(Event::Close { destage: true })?;
                self.run_until(|world| world.phase() == Some(Phase::Closed))?;
            }
            self.node = None;
            self.engine.retain(|_| false);
        }
        for (&start, &(_, write)) in &self.model.0 {
            let found = self.backend.get(start);
            if found != write {
                let message = format!("sector {start} has write {found}, and not {write}");
                return Err(Violation::new("backend-incomplete", message));
            }
        }
        for (&start, &(_, write)) in &self.backend.0 {
            if self.model.get(start) != write {
                let message = format!("sector {start} has write {write}, which is no more");
                return Err(Violation::new("backend-incomplete", message));
            }
        }
        Ok(())
    }

    fn open(&mut self) -> Result<(), Violation> {
        let mut actions = Vec::new();
        let pool = Arc::clone(&self.pool);
        let config = self.cache_config.clone();
        let mut cache = ReadCache::new(config, self.engine.now(), pool, &mut actions);
        match self.plant {
            Some(Plant::LongProbe) => cache.set_step_max(1 << 20, 1 << 12),
            _ if self.random.bool() => {
                cache.set_step_max(self.random.usize(1..64), self.random.usize(1..512));
            }
            _ => {}
        }
        for action in actions.drain(..) {
            self.begin(true, action);
        }
        let mut cx = Context {
            cache: &mut cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        let volume = Volume::open(self.config.clone(), self.engine.now(), &mut cx);
        drop(cx);
        for action in actions {
            self.begin(false, action);
        }
        self.node = Some((cache, volume));
        self.coverage.openings += 1;
        self.run_until(|world| world.phase() == Some(Phase::Open))
            .map(drop)
    }

    fn phase(&self) -> Option<Phase> {
        self.node.as_ref().map(|(_, volume)| volume.phase())
    }

    /// A device is asked for something.
    fn begin(&mut self, is_of_cache: bool, action: Action) {
        let pause = Nanos::from_micros(self.random.u64(1..LATENCY_MICROS));
        let happening = Happening {
            is_of_cache,
            action,
        };
        self.engine.after(pause, happening);
    }

    fn step_volume(&mut self, event: Event) -> Result<(), Violation> {
        let Some((cache, volume)) = &mut self.node else {
            return Ok(());
        };
        let what = match &event {
            Event::Request { .. } => "a request",
            Event::Completed(_) => "an end",
            _ => "a poll",
        };
        let before = cache.work() + volume.work();
        let mut actions = Vec::new();
        let mut cx = Context {
            cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        volume.step(self.engine.now(), event, &mut cx);
        drop(cx);
        self.coverage.settling += u64::from(!volume.is_settled());
        let after = cache.work() + volume.work();
        let judged = self.cost.step(what, before, after);
        self.coverage.step_max = self.cost.step_max;
        judged?;
        for action in actions {
            if let Action::Reply { request, result } = action {
                self.answered(request, result)?;
            } else {
                self.begin(false, action);
            }
        }
        Ok(())
    }

    fn step_cache(&mut self, event: CacheEvent) -> Result<(), Violation> {
        let Some((cache, _)) = &mut self.node else {
            return Ok(());
        };
        let before = cache.work();
        let mut actions = Vec::new();
        cache.step(self.engine.now(), event, &mut actions);
        let judged = self.cost.step("a step of the cache", before, cache.work());
        self.coverage.step_max = self.cost.step_max;
        for action in actions {
            self.begin(true, action);
        }
        judged
    }

    // Clients.

    fn ask(&mut self) -> Result<(), Violation> {
        let sectors = self.config.bytes / SECTOR_BYTES as u64;
        let is_long = self.random.u8(..16) == 0;
        let range = if is_long {
            let count = match self.random.u8(..4) {
                0 => sectors,
                1 => sectors / 2,
                _ => 1 << self.random.u32(11..40).min(sectors.ilog2()),
            };
            SectorRange::new(self.random.u64(..=sectors - count), count)
        } else {
            // All over the volume, or close together.
            let block = match self.random.u8(..3) {
                0 => self.random.u64(..sectors / BLOCK_SECTORS),
                1 => sectors / BLOCK_SECTORS / 3 + self.random.u64(..20_000),
                _ => self.random.u64(..2000),
            };
            let start = block * BLOCK_SECTORS;
            let count = [1, 8, 8, 64][self.random.usize(..4)];
            SectorRange::new(start, count).intersect(SectorRange::new(0, sectors))
        };
        let overlaps = |other: &Waiting, with_reads: bool| match other {
            Waiting::Read(other) => with_reads && other.overlaps(range),
            Waiting::Write(other) => other.overlaps(range),
            Waiting::Other => false,
        };
        let kind = self.random.u8(..if is_long { 6 } else { 12 });
        let writes = is_long && kind < 3 || !is_long && kind < 8;
        let mut waiting = self.waiting.values();
        if waiting.any(|other| overlaps(other, writes)) {
            return Ok(());
        }
        let (request, what) = match kind {
            _ if writes && is_long => {
                self.model.set(range, 0);
                let (fua, no_hole) = (self.random.u8(..10) == 0, self.random.u8(..4) == 0);
                let request = if self.random.bool() {
                    Request::Discard { range, fua }
                } else {
                    Request::WriteZeroes {
                        range,
                        fua,
                        no_hole,
                    }
                };
                (request, Waiting::Write(range))
            }
            _ if writes => {
                let Some(mut data) = self.pool.alloc_for(range) else {
                    return Ok(());
                };
                self.next_write += 1;
                self.model.set(range, self.next_write);
                self.model.fill(range, &mut data);
                let data = data.freeze();
                let fua = false;
                (Request::Write { range, data, fua }, Waiting::Write(range))
            }
            3 if is_long => {
                // To fetch all of the volume would take for ever.
                let range = SectorRange::new(range.start, range.count.min(PROMOTED_SECTORS_MAX));
                (Request::Promote { range }, Waiting::Other)
            }
            4 if is_long => (Request::Evict { range }, Waiting::Other),
            5 if is_long => {
                let kind = [ExtentKind::Cache, ExtentKind::Allocation][self.random.usize(..2)];
                (Request::Extents { range, kind }, Waiting::Other)
            }
            8 if self.random.u8(..10) == 0 => (Request::Flush, Waiting::Other),
            _ => (Request::Read { range }, Waiting::Read(range)),
        };
        self.requests_left = self.requests_left.saturating_sub(1);
        self.coverage.long += u64::from(range.count >= LONG_SECTORS);
        self.next_request += 1;
        let numbers = [self.next_request, range.start, range.count, kind.into()];
        self.engine.note("request", numbers);
        let id = RequestId(self.next_request);
        self.waiting.insert(id.0, what);
        self.step_volume(Event::Request { id, request })
    }

    fn answered(
        &mut self,
        id: RequestId,
        result: Result<Reply, RequestError>,
    ) -> Result<(), Violation> {
        self.coverage.replies += 1;
        self.engine.note("reply", [id.0, 0, 0, 0]);
        let Some(waiting) = self.waiting.remove(&id.0) else {
            let message = format!("request {} was answered twice or never sent", id.0);
            return Err(Violation::new("reply-unexpected", message));
        };
        match (waiting, result) {
            (_, Err(error)) => {
                let message = format!("request {}: {error:?}", id.0);
                Err(Violation::new("error-without-cause", message))
            }
            (Waiting::Read(range), Ok(Reply::Data(data))) => {
                let mut expected = vec![0; range.bytes()];
                self.model.fill(range, &mut expected);
                if data[..] == expected[..] {
                    return Ok(());
                }
                let message = format!("{range:?} is not what was written last");
                Err(Violation::new("read-stale", message))
            }
            _ => Ok(()),
        }
    }

    // Devices.

    fn complete(&mut self, is_of_cache: bool, action: Action) -> Result<(), Violation> {
        let read = |device: &[u8], offset: u64, mut buf: BufMut| {
            let len = buf.len();
            buf.copy_from_slice(&device[offset as usize..offset as usize + len]);
            Done::Read(buf)
        };
        let sectors = |offset: u64, bytes: u64| {
            SectorRange::new(offset / SECTOR_BYTES as u64, bytes / SECTOR_BYTES as u64)
        };
        let (token, done) = match action {
            Action::LogRead {
                token, offset, buf, ..
            } => (token, read(&self.log, offset, buf)),
            Action::CacheRead { token, offset, buf } => (token, read(&self.ssd, offset, buf)),
            Action::LogWrite {
                token,
                offset,
                data,
                ..
            } => {
                let bytes = joined(&data);
                self.log[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                (token, Done::Written)
            }
            Action::CacheWrite {
                token,
                offset,
                data,
                ..
            } => {
                let bytes = joined(&data);
                self.ssd[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                (token, Done::Written)
            }
            Action::BackendRead {
                token,
                offset,
                mut buf,
            } => {
                self.backend
                    .fill(sectors(offset, buf.len() as u64), &mut buf);
                (token, Done::Read(buf))
            }
            Action::BackendWrite {
                token,
                offset,
                data,
            } => {
                let bytes = joined(&data);
                let first = sectors(offset, 0).start;
                for (sector, bytes) in (first..).zip(bytes.chunks_exact(SECTOR_BYTES)) {
                    let write = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
                    self.backend.set(SectorRange::new(sector, 1), write);
                }
                (token, Done::Written)
            }
            Action::BackendZero {
                token,
                offset,
                bytes,
                ..
            } => {
                self.coverage.zeroings += 1;
                let mut range = sectors(offset, bytes);
                if self.plant == Some(Plant::ShortZero) {
                    range.count = range.count.min(SHORT_SECTORS / 2);
                }
                self.backend.set(range, 0);
                (token, Done::Written)
            }
            Action::BackendFlush { token } => (token, Done::Written),
            // It is for local stores.
            Action::BackendUnsettled { .. } => return Ok(()),
            other => unreachable!("nothing asks for {other:?} here"),
        };
        self.ended(is_of_cache, token, done)
    }

    fn ended(&mut self, is_of_cache: bool, token: Token, done: Done) -> Result<(), Violation> {
        self.engine.note("end", [token.0, is_of_cache.into(), 0, 0]);
        let completion = Completion {
            token,
            result: Ok(done),
        };
        // A volume's reads of the cache device are its own.
        if is_of_cache {
            self.step_cache(CacheEvent::Completed(completion))
        } else {
            self.step_volume(Event::Completed(completion))
        }
    }
}
