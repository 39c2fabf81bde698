//! A volume on memory: every action is performed at once and in order. What happens under faults,
//! reordering and power cuts is the simulator's.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use hdcs_core::base::buf::{Buf, BufMut, Pool};
use hdcs_core::base::cipher::Authenticator;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{
    Action, Completion, Done, Nanos, Reply, Request, RequestId, SectorRange, Token,
};
use hdcs_core::base::limits::{
    CACHE_BYTES_MIN, LOG_BLOCK_ENTRIES_MAX, LOG_BYTES_MIN, SECTOR_BYTES,
};
use hdcs_core::cache::{CacheConfig, CacheEvent, ReadCache, SsdConfig};
use hdcs_core::format::{LOG_HEADER_BLOCKS, LogSuperblock};
use hdcs_core::log::budget::IndexBudget;
use hdcs_core::volume::sharing;
use hdcs_core::volume::{
    Context, Event, Inherited, Persist, Phase, Policy, Volume, VolumeConfig, WhenFull,
};

use crate::lz4::Lz4;

/// Size of the volume.
pub const BYTES: usize = 8 << 20;

/// The usual SSD tier: a small one, of lines of 16 KiB.
pub const SSD: SsdConfig = SsdConfig {
    bytes: CACHE_BYTES_MIN,
    uuid: [3; 16],
    line_blocks: 4,
};

/// See the module.
pub struct World {
    /// What the next opening makes the volume with.
    pub config: VolumeConfig,
    /// Reads of the log that were performed.
    pub log_reads: usize,
    /// Writes of data to the backend that were performed.
    pub backend_writes: u64,
    /// Writes to the backend are kept here, unanswered, while there is such a place.
    pub backend_silent: Option<Vec<Token>>,
    /// The data of those.
    pub backend_holds: Vec<Buf>,
    /// Superblocks cannot be kept beside the log's device.
    pub keep_fails: bool,
    /// Flushes of it, in the same way.
    pub flush_silent: Option<Vec<Token>>,
    /// Writes of the log, in the same way.
    pub log_silent: Option<Vec<Token>>,
    /// Reads of the log, in the same way.
    pub log_reads_silent: Option<Vec<Token>>,
    /// Reads of the log fail.
    pub log_mute: bool,
    /// So many reads of the log bring wrong bytes.
    pub log_spoils: usize,
    /// Flushes of the backend that were performed.
    pub backend_flushes: usize,
    /// Reads of the backend that it was asked for.
    pub backend_reads: Vec<SectorRange>,
    /// The backend refuses what reads one of these sectors, as a local store does that finds them rotten.
    pub backend_rotten: Option<SectorRange>,
    /// What was kept of the log's superblock beside its device.
    pub kept: Option<LogSuperblock>,
    /// What authenticates superblocks of the log, if something does.
    pub keys: Option<Arc<dyn Authenticator>>,
    /// What the next opening has inherited.
    pub inherited: Option<Inherited>,
    /// Where buffers come from.
    pub pool: Arc<Pool>,
    /// Memory for the index of its log.
    pub budget: Rc<IndexBudget>,
    /// The read cache.
    pub cache: ReadCache,
    /// The volume.
    pub volume: Volume,
    /// The log's device.
    pub log: Vec<u8>,
    /// The cache's device.
    pub cache_device: Vec<u8>,
    /// The backend.
    pub backend: Vec<u8>,
    /// The time that the volume is told.
    pub now: Nanos,
    /// Replies, oldest first.
    pub replies: Vec<(
        RequestId,
        Result<Reply, hdcs_core::base::error::RequestError>,
    )>,
}

/// The usual configuration.
pub fn config(persist: Persist) -> VolumeConfig {
    VolumeConfig {
        number: 1,
        uuid: [7; 16],
        bytes: BYTES as u64,
        log_bytes: LOG_BYTES_MIN + LOG_HEADER_BLOCKS * 4096,
        policy: Policy::WriteBack,
        persist,
        compression: None,
        codec: &Lz4,
        when_full: WhenFull::Wait,
        unpersisted_bytes_max: 4 << 20,
        unpersisted_age_max: Nanos::from_millis(50),
        dirty_age_max: Nanos::from_millis(5000),
        dirty_ratio_min: 30,
        dirty_ratio_max: 70,
        destage_depth_max: 16,
        sequential_cutoff_bytes: 4 << 20,
        promote_hits: 1,
        fill_rate_max_bytes_s: 1 << 30,
        read_ahead_bytes_max: 1 << 20,
        log_entries_max: LOG_BYTES_MIN / 4096 * LOG_BLOCK_ENTRIES_MAX,
        resident_bytes_max: 1 << 20,
        backend_extents: false,
        backend_atomic: false,
        log_failure: hdcs_core::volume::LogFailure::ReadOnly,
        discard: hdcs_core::volume::Discard::Pass,
        backend_answer_max: Nanos::from_millis(5_000),
        log_answer_max: Nanos::from_millis(5_000),
    }
}

/// A small cache in memory, over what the device of its SSD tier holds.
pub fn cache(
    ssd: Option<SsdConfig>,
    now: Nanos,
    pool: &Arc<Pool>,
    actions: &mut Vec<Action>,
) -> ReadCache {
    let config = CacheConfig {
        dram_blocks: 64,
        ssd,
        ssd_answer_max: Nanos::from_millis(5_000),
    };
    ReadCache::new(config, now, Arc::clone(pool), actions)
}

impl World {
    /// An open volume on a log that was just made.
    pub fn new(persist: Persist) -> Self {
        Self::with(config(persist), None)
    }

    /// A volume over a cache that may have an SSD tier.
    pub fn with(config: VolumeConfig, ssd: Option<SsdConfig>) -> Self {
        Self::sharing(config, ssd, &IndexBudget::unlimited())
    }

    /// A volume over the usual SSD tier, with random data in its backend.
    pub fn over_ssd(config: VolumeConfig) -> Self {
        let mut world = Self::with(config, Some(SSD));
        fastrand::Rng::with_seed(6).fill(&mut world.backend);
        world
    }

    /// The same, whose memory for the index of its log is of a budget.
    pub fn sharing(config: VolumeConfig, ssd: Option<SsdConfig>, budget: &Rc<IndexBudget>) -> Self {
        let pool = Pool::new(32 << 20);
        let mut log = vec![0; config.log_bytes as usize];
        log[..4096].copy_from_slice(&Volume::format_log(&config, 99));
        let mut actions = Vec::new();
        let cache_device = vec![0; ssd.as_ref().map_or(0, |ssd| ssd.bytes as usize)];
        let mut cache = cache(ssd, Nanos(0), &pool, &mut actions);
        let of_cache = core::mem::take(&mut actions);
        let mut cx = Context {
            cache: &mut cache,
            pool: &pool,
            actions: &mut actions,
        };
        let mut volume = Volume::open(config.clone(), Nanos(0), &mut cx);
        drop(cx);
        sharing::set_index_budget(&mut volume, budget);
        let backend = vec![0; BYTES];
        let replies = Vec::new();
        let mut world = Self {
            config,
            pool,
            cache,
            volume,
            log,
            cache_device,
            backend,
            log_reads: 0,
            backend_writes: 0,
            backend_silent: None,
            backend_holds: Vec::new(),
            flush_silent: None,
            keep_fails: false,
            log_silent: None,
            log_reads_silent: None,
            log_mute: false,
            log_spoils: 0,
            backend_flushes: 0,
            backend_reads: Vec::new(),
            backend_rotten: None,
            kept: None,
            keys: None,
            inherited: None,
            now: Nanos(1),
            replies,
            budget: Rc::clone(budget),
        };
        world.perform_for_cache(of_cache);
        world.perform(actions);
        assert_eq!(world.volume.phase(), Phase::Open);
        world
    }

    /// Steps of the volume alone: what it asks for, of which nothing is performed.
    pub fn step_alone(&mut self, events: impl IntoIterator<Item = Event>) -> Vec<Action> {
        let mut actions = Vec::new();
        let mut cx = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        for event in events {
            self.volume.step(self.now, event, &mut cx);
        }
        drop(cx);
        actions
    }

    /// One step, and everything that it asks for.
    pub fn step(&mut self, event: Event) {
        let actions = self.step_alone([event, Event::Poll]);
        self.perform(actions);
        self.volume.check_invariants();
        let mut of_cache = Vec::new();
        self.cache.step(self.now, CacheEvent::Poll, &mut of_cache);
        self.perform_for_cache(of_cache);
    }

    /// What the cache asks of its device on its own.
    pub fn perform_for_cache(&mut self, mut actions: Vec<Action>) {
        while let Some(action) = actions.pop() {
            let (token, result) = match action {
                Action::CacheRead { token, offset, buf } => {
                    (token, Done::Read(self.read_cache_device(offset, buf)))
                }
                Action::CacheWrite {
                    token,
                    offset,
                    data,
                    ..
                } => {
                    write(&mut self.cache_device, offset, &data);
                    (token, Done::Written)
                }
                other => panic!("not the cache's: {other:?}"),
            };
            let completion = Completion {
                token,
                result: Ok(result),
            };
            let event = CacheEvent::Completed(completion);
            self.cache.step(self.now, event, &mut actions);
        }
    }

    fn read_cache_device(&self, offset: u64, mut buf: BufMut) -> BufMut {
        let bytes = buf.len();
        buf.copy_from_slice(&self.cache_device[offset as usize..][..bytes]);
        buf
    }

    /// Perform actions of the volume, and what follows from them.
    pub fn perform(&mut self, actions: Vec<Action>) {
        let mut queue = VecDeque::from(actions);
        while let Some(action) = queue.pop_front() {
            self.now = self.now.plus(Nanos::from_micros(10));
            let (token, result) = match action {
                Action::LogRead { token, .. } if self.log_reads_silent.is_some() => {
                    let silent = self.log_reads_silent.as_mut();
                    silent.expect("looked at").push(token);
                    continue;
                }
                Action::LogRead {
                    token,
                    offset,
                    mut buf,
                    ..
                } => {
                    self.log_reads += 1;
                    if self.log_mute {
                        queue.extend(self.end(token, Err(IoError::Failed)));
                        continue;
                    }
                    let bytes = buf.len();
                    buf.copy_from_slice(&self.log[offset as usize..][..bytes]);
                    if self.log_spoils > 0 {
                        self.log_spoils -= 1;
                        buf.iter_mut().step_by(512).for_each(|byte| *byte ^= 1);
                    }
                    (token, Done::Read(buf))
                }
                Action::BackendRead {
                    token,
                    offset,
                    mut buf,
                } => {
                    let bytes = buf.len();
                    let sector = SECTOR_BYTES as u64;
                    let range = SectorRange::new(offset / sector, bytes as u64 / sector);
                    self.backend_reads.push(range);
                    if self.backend_rotten.is_some_and(|bad| bad.overlaps(range)) {
                        queue.extend(self.end(token, Err(IoError::Corrupt)));
                        continue;
                    }
                    buf.copy_from_slice(&self.backend[offset as usize..][..bytes]);
                    (token, Done::Read(buf))
                }
                Action::CacheRead { token, offset, buf } => {
                    (token, Done::Read(self.read_cache_device(offset, buf)))
                }
                Action::KeepSuperblock { token, .. } if self.keep_fails => {
                    queue.extend(self.end(token, Err(IoError::Failed)));
                    continue;
                }
                Action::KeepSuperblock { token, block } => {
                    self.kept = Some(LogSuperblock::parse(&block).expect("a superblock"));
                    (token, Done::Written)
                }
                Action::LogWrite { token, .. } if self.log_silent.is_some() => {
                    self.log_silent.as_mut().expect("looked at").push(token);
                    continue;
                }
                Action::LogWrite {
                    token,
                    offset,
                    data,
                    ..
                } => {
                    write(&mut self.log, offset, &data);
                    (token, Done::Written)
                }
                Action::BackendWrite { token, data, .. } if self.backend_silent.is_some() => {
                    self.backend_silent.as_mut().expect("looked at").push(token);
                    self.backend_holds.extend(data);
                    continue;
                }
                Action::BackendWrite {
                    token,
                    offset,
                    data,
                } => {
                    self.backend_writes += 1;
                    write(&mut self.backend, offset, &data);
                    (token, Done::Written)
                }
                Action::BackendZero {
                    token,
                    offset,
                    bytes,
                    ..
                } => {
                    self.backend[offset as usize..][..bytes as usize].fill(0);
                    (token, Done::Written)
                }
                Action::BackendFlush { token } if self.flush_silent.is_some() => {
                    self.flush_silent.as_mut().expect("looked at").push(token);
                    continue;
                }
                Action::BackendFlush { token } => {
                    self.backend_flushes += 1;
                    (token, Done::Written)
                }
                Action::Reply { request, result } => {
                    self.replies.push((request, result));
                    continue;
                }
                Action::BackendUnsettled { .. } => continue,
                other => panic!("not expected without a cache device: {other:?}"),
            };
            queue.extend(self.end(token, Ok(result)));
        }
    }

    /// An action has ended; what follows from that.
    fn end(&mut self, token: Token, result: Result<Done, IoError>) -> Vec<Action> {
        let mut actions = Vec::new();
        let mut cx = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        let completion = Completion { token, result };
        self.volume
            .step(self.now, Event::Completed(completion), &mut cx);
        self.volume.step(self.now, Event::Poll, &mut cx);
        drop(cx);
        actions
    }

    /// The backend answers again: what it was asked for meanwhile fails, and is tried again.
    pub fn heal_backend(&mut self) {
        self.backend_holds.clear();
        for token in self.backend_silent.take().into_iter().flatten() {
            let actions = self.end(token, Err(IoError::Failed));
            self.perform(actions);
        }
    }

    /// Submit a request, and return its reply.
    pub fn ask(&mut self, request: Request) -> Reply {
        self.step(Event::Request {
            id: RequestId(5),
            request,
        });
        for _ in 0..100_000 {
            if let Some((id, result)) = self.replies.pop() {
                assert_eq!(id, RequestId(5));
                return result.expect("no faults here");
            }
            self.now = self
                .now
                .max(self.volume.next_wakeup().expect("a request waits"));
            self.step(Event::Poll);
        }
        panic!("no reply");
    }

    /// Write bytes at a sector.
    pub fn write(&mut self, start: u64, bytes: &[u8]) {
        let request = self.write_request(start, bytes, false);
        self.ask(request);
    }

    /// A request that writes them.
    pub fn write_request(&self, start: u64, bytes: &[u8], fua: bool) -> Request {
        let range = SectorRange::new(start, (bytes.len() / SECTOR_BYTES) as u64);
        let mut data = self.pool.alloc_for(range).unwrap();
        data.copy_from_slice(bytes);
        let data = data.freeze();
        Request::Write { range, data, fua }
    }

    /// Read sectors.
    pub fn read(&mut self, range: SectorRange) -> Buf {
        match self.ask(Request::Read { range }) {
            Reply::Data(data) => data,
            other => panic!("not data: {other:?}"),
        }
    }

    /// Close the volume.
    pub fn close(&mut self, destage: bool) {
        self.step(Event::Close { destage });
        for _ in 0..1000 {
            if self.volume.phase() == Phase::Closed {
                return;
            }
            self.now = self.now.plus(Nanos::from_millis(10));
            self.step(Event::Poll);
        }
        panic!("did not close");
    }

    /// Drop the volume as a crash would and open its log again.
    pub fn reopen(&mut self) {
        self.try_reopen();
        assert_eq!(self.volume.phase(), Phase::Open);
        self.volume.check_invariants();
    }

    /// Open it again; it may be lost.
    pub fn try_reopen(&mut self) {
        let mut actions = Vec::new();
        let mut cx = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut actions,
        };
        self.volume = Volume::open(self.config.clone(), self.now, &mut cx);
        drop(cx);
        sharing::set_index_budget(&mut self.volume, &self.budget);
        if let Some(inherited) = self.inherited.take() {
            self.volume.inherit(inherited);
        }
        if let Some(kept) = self.kept {
            self.volume.keep_superblock(kept);
        }
        if let Some(keys) = &self.keys {
            self.volume.authenticate_log(Arc::clone(keys));
        }
        self.perform(actions);
    }
}

fn write(to: &mut [u8], offset: u64, data: &[Buf]) {
    let mut at = offset as usize;
    for part in data {
        to[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
}
