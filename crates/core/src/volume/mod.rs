//! One volume: routes requests over the write log, the read cache and the backend.
//!
//! ```text
//!  Opening ──replayed──► Open ──Close──► Closing ──all in place──► Closed
//!     └──not openable──► Failed
//! ```
//!
//! Invariants:
//! 1. Every request is answered exactly once.
//! 2. The index names, for each dirty sector, the last write accepted for it; a sector that it does
//!    not name is in the backend as a reader shall see it.
//! 3. What is acknowledged as durable lies below the log's durable position.
//! 4. A generation is retired only when the backend holds it durably, the cache has durably
//!    forgotten what it overwrote, and the superblock is durable that says so, and how far the cache has come
//!    ([`crate::cache::Tie`]).
//! 5. Log space that a read in flight needs is not written over.
//! 6. Once the backend has said that another owner has it, nothing more is asked of it, nothing is
//!    answered but that, and the log's tail stays where it is.
//!
//! A failed log write latches: writes are refused, reads and destage of what is durable go on; or, if so
//! configured, the log is given up and writes go past it. Dirty data that is bad on the log's device stops
//! writes, and destage before it.
//! A backend or a log's device that does not answer is waited for, and shows, but a close waits for the log's device
//! no longer than it is allowed to take; a cache device that does not answer is waited for no longer than the cache
//! allows, and then read around.
//! Where no buffer is free, work waits for the next poll; destage and the log's control parts have
//! memory of their own, so that they can always go on.
//!
//! The volume ties machines together, each of which keeps its state for itself:
//!
//! * `port`: what is under way outside, and who waits for an answer;
//! * `opening`: the replay of the log;
//! * `open_log`: the log and its device; `damage`: what of it is bad, or was lost with it; `compression`;
//! * `cached`: the volume as the read cache knows it, with `inherited`; `filling`: pins and warm-ups;
//! * `read`: the read side, from the lookup to the fetch and the promotion;
//! * `lease`: reads that wait until this node may answer them;
//! * `write`: the write side, from admission to acknowledgement;
//! * `direct`: the direct side, writes past the log and the way there and back;
//! * `destaging`: the backend side;
//! * `health`: what is wrong, and since when.
//!
//! `failed_log` (going on without the log), `silent_log` (a log that does not answer), `extents` and `scrub` are rules
//! that concern several of them. A machine gets what it needs of the others as arguments, the four sides in a struct.

mod cached;
mod compression;
mod config;
mod damage;
mod destaging;
mod direct;
mod extents;
mod failed_log;
mod filling;
mod health;
mod inherited;
pub mod lease;
mod log_chunks;
mod op;
mod open_log;
mod opening;
mod port;
mod read;
mod scrub;
pub mod sharing;
mod silent_log;
mod stats;
pub mod streams;
#[cfg(test)]
mod tests;
mod write;

use alloc::sync::Arc;
use alloc::vec::Vec;

pub use cached::CachedBlocks;
use compression::Compression;
pub use config::{Discard, LogFailure, Persist, Policy, VolumeConfig, WhenFull};
pub use health::{Copies, State, Trouble};
pub use inherited::Inherited;
use op::Op;
use open_log::OpenLog;
use opening::Opening;
use port::{Kind, Port, Running};
pub use stats::VolumeStats;
pub use write::durable_ways::DurableWays;
use zerocopy::IntoBytes;

use crate::base::buf::Pool;
use crate::base::cipher::Authenticator;
use crate::base::error::{IoError, OpenError, RequestError};
use crate::base::io::{
    Action, Completion, Done, ExtentKind, Nanos, Reply, Request, RequestId, SectorRange,
};
use crate::base::limits::{
    BLOCK_BYTES, BLOCK_SECTORS, REQUEST_BYTES_MAX, SECTOR_BYTES, STEP_WORK_MAX,
};
use crate::cache::ReadCache;
use crate::format::LogSuperblock;
use crate::log::destage::Stage;
use crate::log::extent_index::ExtentIndex;
use crate::log::replay::Found;

/// What happens to a volume.
#[derive(Debug)]
pub enum Event {
    /// A client asks. One [`Action::Reply`] follows, now or later.
    Request {
        /// Echoed in the reply.
        id: RequestId,
        /// What is asked.
        request: Request,
    },
    /// One of the volume's actions ended.
    Completed(Completion),
    /// The end of a batch of events, or [`Volume::next_wakeup`] has come. The volume does its
    /// group work here: a driver must poll after every batch.
    Poll,
    /// Destage all that is dirty now, at full speed. Progress is in [`VolumeStats`].
    DestageAll,
    /// Return to destaging by policy.
    CancelDestageAll,
    /// Have both superblocks of the log say the same: what the log does not hold any more comes back with neither.
    TellTail,
    /// Another owner has the volume: nothing is answered any more but that.
    Fenced,
    /// Whether too few nodes have copies of the log for a write, and whoever waits for one is to be told of an error.
    RefuseForCopies(bool),
    /// Reads may be answered until then, if the volume needs a lease for that ([`lease::need`]).
    Lease {
        /// Of the clock that [`Volume::step`] is told of. It may be earlier than what was said before.
        until: Nanos,
    },
    /// Stop taking requests, make everything durable, with `destage` also destage everything, and
    /// close the log cleanly; the phase becomes [`Phase::Closed`].
    Close {
        /// Whether the backend must hold everything first.
        destage: bool,
    },
    /// Change the size. While the log holds something beyond the smaller of both ends nothing changes, as
    /// the configuration shows: destage first. When it shrinks that is dirty data; when it grows, what an
    /// earlier cut took away ([`Volume::cut`]). What was asked and has not begun is refused if it
    /// reaches beyond the new end.
    Resize {
        /// The new size, a multiple of 512.
        bytes: u64,
    },
    /// Change the behaviour; identity and sizes are kept.
    Reconfigure(VolumeConfig),
    /// Keep these ranges, and no others, in the SSD tier. Progress is in [`VolumeStats`].
    Pin(Vec<SectorRange>),
    /// Bring these ranges into the SSD tier once, in this order; with none, what was left of the last
    /// warm-up is given up. Progress is in [`VolumeStats`].
    WarmUp(Vec<SectorRange>),
    /// As [`Event::WarmUp`], but only if the cache, once it is ready, holds next to nothing of these ranges, and
    /// only as far as nothing else has to go for them.
    WarmUpIfCold(Vec<SectorRange>),
}

/// Where a volume is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Replaying the log; requests wait.
    Opening,
    /// It could not be opened; requests are refused.
    Failed(OpenError),
    /// Serving.
    Open,
    /// Finishing what was asked before `Close`.
    Closing,
    /// Everything is in place; the volume can be dropped.
    Closed,
}

/// What a volume works with during one step.
#[derive(Debug)]
pub struct Context<'a> {
    /// The node's read cache.
    pub cache: &'a mut ReadCache,
    /// Where buffers come from.
    pub pool: &'a Arc<Pool>,
    /// Where effects go.
    pub actions: &'a mut Vec<Action>,
}

/// The step has ended: other shards may have the cache's SSD tier.
impl Drop for Context<'_> {
    #[inline]
    fn drop(&mut self) {
        self.cache.release();
    }
}

/// What the log of a volume knows of what was cut off with its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// It holds some of that: the volume was opened with a smaller size than it was written with.
    Held,
    /// It holds none, and both superblocks are about to say so, as they were asked to.
    Pending,
    /// It cannot say so: its device is given no superblock, or does not answer.
    Untold,
    /// Nothing. Of a device that was given up, no superblock counts any more.
    Gone,
}

/// How soon work that found no buffer is tried again.
const MEMORY_WAIT: Nanos = Nanos::from_millis(1);
/// The same where a replay waits until others have destaged: whoever has the budget polls it when that changes.
const BUDGET_WAIT: Nanos = Nanos::from_millis(100);

/// The state of one open volume: its machines, and the rules that concern several of them.
#[derive(Debug)]
pub struct Volume {
    config: VolumeConfig,
    phase: Phase,
    opening: Opening,
    log: OpenLog,
    index: ExtentIndex,
    cached: CachedBlocks,
    port: Port,
    writes: write::Writes,
    direct: direct::Direct,
    compression: Compression,
    filling: filling::Filling,
    reads: read::Reads,
    lease: lease::Lease,
    destaging: destaging::Destaging,
    damage: damage::Damage,
    close: Option<bool>,
    closing_superblock: bool,
    /// Work waits for memory that others will give back: poll again then.
    memory_wait: Option<Nanos>,
    health: health::Health,
}

impl Volume {
    /// The first block of a new log's region; the rest of the region is zero. `log` is a random
    /// number that no other log has.
    pub fn format_log(config: &VolumeConfig, log: u64) -> [u8; 4096] {
        let superblock = LogSuperblock::new(config.uuid, log, config.log_bytes);
        superblock
            .as_bytes()
            .try_into()
            .expect("a superblock is one block")
    }

    /// Begin to open a volume whose log was made by [`Self::format_log`].
    pub fn open(config: VolumeConfig, now: Nanos, cx: &mut Context<'_>) -> Self {
        cx.cache.set_codec(config.codec);
        let mut volume = Self {
            opening: Opening::new(config.uuid, config.log_bytes, now),
            log: OpenLog::default(),
            phase: Phase::Opening,
            index: ExtentIndex::default(),
            cached: CachedBlocks::new(config.number, config.bytes),
            port: Port::new(&config, cx.cache.ssd_answer_max(), now),
            writes: write::Writes::default(),
            direct: direct::Direct::default(),
            compression: Compression::default(),
            filling: filling::Filling::default(),
            reads: read::Reads::new(&config, cx.cache.line_blocks()),
            lease: lease::Lease::default(),
            destaging: destaging::Destaging::default(),
            damage: damage::Damage::default(),
            close: None,
            closing_superblock: false,
            memory_wait: None,
            health: health::Health::default(),
            config,
        };
        volume.opening.read_ahead(&mut volume.port, cx);
        volume
    }

    /// What was kept of the log's superblock beside its device, if anything was: to be said at once after
    /// [`Self::open`].
    pub fn keep_superblock(&mut self, superblock: LogSuperblock) {
        if let Some(replay) = self.opening.replay() {
            replay.keep(superblock);
        }
    }

    /// The superblocks of its log are authenticated with these keys: to be said at once after [`Self::open`].
    pub fn authenticate_log(&mut self, keys: Arc<dyn Authenticator>) {
        if let Some(replay) = self.opening.replay() {
            replay.authenticate(keys);
        }
    }

    /// Take one event; push what follows from it.
    pub fn step(&mut self, now: Nanos, event: Event, cx: &mut Context<'_>) {
        self.port.now = now;
        match event {
            Event::Request { id, request } => self.request(now, id, request, cx),
            Event::Completed(completion) => self.completed(now, completion, cx),
            Event::Poll => self.poll(now, cx),
            Event::DestageAll => self.destage_all(),
            Event::TellTail => self.writes.tell_tail(),
            Event::Fenced => self.fence(cx),
            Event::RefuseForCopies(refuses) => self.health.refuse_for_copies(refuses),
            Event::Lease { until } => self.lease.grant(until),
            Event::CancelDestageAll => {
                self.destaging.forget_target();
                self.direct.cancel_destage_all();
            }
            Event::Close { destage } => self.close = Some(destage),
            Event::Resize { bytes } => {
                self.resize(bytes, cx);
                self.reads.reconfigure(&self.config, cx);
                self.reads.forget_fetches();
                self.reads.cut_promotions(self.cached.whole_blocks());
                self.filling.look_at_all();
            }
            Event::Pin(ranges) => {
                let now = self.port.now;
                self.filling.pin_ranges(&ranges, &self.cached, now, cx);
            }
            Event::WarmUp(ranges) => self.filling.warm_up(&ranges, filling::Asked::ByHand),
            Event::WarmUpIfCold(ranges) => self.filling.warm_up(&ranges, filling::Asked::IfCold),
            Event::Reconfigure(config) => {
                let (number, uuid) = (self.config.number, self.config.uuid);
                let (bytes, log_bytes) = (self.config.bytes, self.config.log_bytes);
                self.config = VolumeConfig {
                    number,
                    uuid,
                    bytes,
                    log_bytes,
                    ..config
                };
                self.reads.reconfigure(&self.config, cx);
                if self.log.if_open().is_some() {
                    let entries_max = self.config.log_entries_max;
                    self.log.get_mut().set_entries_max(entries_max);
                    let bytes_max = self.config.resident_bytes_max;
                    (self.writes.resident).trim(bytes_max, self.log.get_mut());
                    let (direct, mut from) = self.direct_side();
                    direct.policy_changed(&mut from, cx);
                }
                self.port.reconfigure(&self.config);
            }
        }
        self.log.note_runs(self.index.len());
        // It shows in the time that a request takes; the simulator and the tests have it on.
        if cfg!(debug_assertions)
            && let Some(log) = self.log.if_open()
        {
            log.check_invariants();
        }
    }

    fn request(&mut self, now: Nanos, id: RequestId, request: Request, cx: &mut Context<'_>) {
        match self.phase {
            Phase::Opening if self.close.is_none() => {
                self.port.accept();
                self.opening.wait(id, request);
            }
            Phase::Open if self.close.is_none() => {
                self.port.accept();
                if self.opening.has_waiting() {
                    return self.opening.wait(id, request);
                }
                self.serve(now, id, request, cx);
            }
            _ => cx.actions.push(Action::Reply {
                request: id,
                result: Err(RequestError::Closing),
            }),
        }
    }

    fn serve(&mut self, now: Nanos, id: RequestId, request: Request, cx: &mut Context<'_>) {
        if self.port.is_fenced() {
            return self
                .port
                .reply(id, Kind::Other, Err(RequestError::Fenced), cx);
        }
        if !is_valid(&request, self.sectors()) {
            return self
                .port
                .reply(id, Kind::Other, Err(RequestError::BadRange), cx);
        }
        if self.lease.holds(now, &request, self.direct.is_direct()) {
            return self.lease.wait(now, id, request);
        }
        match request {
            Request::Read { range } => {
                let (reads, mut from) = self.read_side();
                reads.read(id, range, &mut from, cx);
            }
            Request::Discard { .. }
                if self.config.discard == Discard::Ignore
                    && self.config.policy != Policy::ReadOnly =>
            {
                self.port.reply(id, Kind::Trim, Ok(Reply::Done), cx);
            }
            Request::Write { .. } | Request::WriteZeroes { .. } | Request::Discard { .. } => {
                self.accept_write(now, id, request, cx);
            }
            Request::Flush => self.flush(id, cx),
            Request::Promote { range } => {
                let (reads, mut from) = self.read_side();
                reads.promote(id, range, &mut from, cx);
            }
            Request::Evict { range } => {
                // What is inherited stays for others.
                self.cached.invalidate(range, cx);
                self.filling.note_forgotten(range, now);
                self.port.reply(id, Kind::Other, Ok(Reply::Done), cx);
            }
            Request::Extents {
                range,
                kind: ExtentKind::Cache,
            } => {
                let extents = extents::cache_extents(range, &self.index, &self.cached, cx);
                self.port
                    .reply(id, Kind::Other, Ok(Reply::Extents(extents)), cx);
            }
            Request::Extents {
                range,
                kind: ExtentKind::Allocation,
            } => {
                self.allocation_extents(id, range, cx);
            }
            Request::Scrub { at } => self.scrub(id, at, cx),
        }
    }

    fn completed(&mut self, now: Nanos, completion: Completion, cx: &mut Context<'_>) {
        let Completion { token, result } = completion;
        let Running { op, since } = self.port.end(token);
        if op.is_of_backend() {
            let error = result.as_ref().err().copied();
            if self.health.backend_answered(&op, error, &mut self.port) {
                self.fence(cx);
            }
        } else if op.is_of_log() {
            self.health.log_answered(&mut self.port);
            if matches!(result, Err(IoError::Fenced)) {
                // Its group is another node's.
                self.fence(cx);
            }
        }
        if result.is_ok() {
            self.reads
                .note_cost(&op, now.since(since), &self.cached, cx);
        }
        match op {
            Op::Replay { chunk } => self.replayed(now, chunk, result, cx),
            Op::OpeningSuperblock => self.opened(now, result, cx),
            Op::Span { end } => self.span_written(end, result, cx),
            Op::ReadLog {
                read,
                range,
                position,
                packed,
                tries,
            } => {
                let place = (position, packed);
                self.log_was_read(read, range, place, tries, result, cx);
            }
            Op::ReadSsd {
                read,
                range,
                permission,
            } => {
                let (reads, mut from) = self.read_side();
                reads.ssd_was_read(read, range, permission, result, &mut from, cx);
            }
            Op::LateSsd { permission } => cx.cache.cancel_ssd_read(permission),
            Op::LateLog => {}
            Op::Fetch { fetch } => {
                let (reads, mut from) = self.read_side();
                reads.fetched(fetch, result, &mut from, cx);
            }
            Op::FetchPart { read, part } => {
                let (reads, mut from) = self.read_side();
                reads.part_was_fetched(read, part, result, &mut from, cx);
            }
            Op::Extents { id, range } => self.backend_extents(id, range, result, cx),
            Op::DestageRead {
                item,
                part,
                position,
                tries,
            } => {
                self.destage_was_read((item, part), position, tries, result, cx);
            }
            Op::DestageChunk { position } => self.destage_chunk_was_read(position, result, cx),
            Op::DestageWrite { item } => {
                let (destaging, mut from) = self.destage_side();
                destaging.was_written(now, item, result, &mut from);
            }
            Op::DestageFlush => self.destage_was_flushed(now, result, cx),
            Op::DirectWrite { number } => {
                let (direct, mut from) = self.direct_side();
                direct.was_written(number, result, &mut from, cx);
            }
            Op::DirectFlush => {
                let (direct, mut from) = self.direct_side();
                direct.was_flushed(result, &mut from, cx);
            }
            Op::DirectMark if result.is_ok() => {
                let (direct, mut from) = self.direct_side();
                direct.marked(&mut from, cx);
            }
            Op::DirectMark => {
                if self.superblock_failed(cx) {
                    self.direct.mark_failed();
                }
            }
            Op::EndMark => self.end_was_marked(result, cx),
            Op::Superblock => self.superblock_written(result, cx),
            Op::ScrubLog(piece) => self.scrubbed_log(piece, result, cx),
            Op::ScrubHeal(piece) => self.scrub_healed(piece, result.is_ok(), cx),
            Op::ScrubCache {
                id,
                permission,
                next,
            } => scrub::scrubbed_cache(id, permission, next, result, &mut self.port, cx),
            Op::ClosingSuperblock => {
                self.log.superblock_ended();
                if result.is_err() {
                    self.log.fail();
                }
                self.phase = Phase::Closed;
            }
        }
    }

    /// Group work: what many events together allow.
    fn poll(&mut self, now: Nanos, cx: &mut Context<'_>) {
        match self.phase {
            Phase::Opening => {
                self.watch(cx);
                self.answer_for_silent_log(cx);
                if self.close.is_some() {
                    self.part_from_silent_log(cx);
                }
                if self.close.is_some() && self.port.awaits_nothing() {
                    self.opening
                        .refuse(RequestError::Closing, &mut self.port, cx);
                    self.phase = Phase::Closed;
                } else {
                    self.opening.read_ahead(&mut self.port, cx);
                }
            }
            Phase::Failed(_) => {
                self.watch(cx);
                self.part_from_silent_log(cx);
                if self.close.is_some() && self.port.awaits_nothing() {
                    self.phase = Phase::Closed;
                }
            }
            Phase::Closed => {}
            Phase::Open | Phase::Closing => {
                if self.close.is_some() {
                    self.begin_close(cx);
                }
                for (id, request) in self.opening.take_piece() {
                    self.serve(now, id, request, cx);
                }
                for (id, request) in self.lease.take_due(now) {
                    self.serve(now, id, request, cx);
                }
                (self.writes.resident).relieve(cx.pool, self.log.get_mut());
                self.watch(cx);
                self.answer_for_silent_log(cx);
                if self.close.is_some() {
                    self.part_from_silent_log(cx);
                }
                self.index.settle(STEP_WORK_MAX);
                self.switch_path();
                {
                    let holds_in_vain = self.holds_flushes_in_vain();
                    let (direct, mut from) = self.direct_side();
                    direct.poll(holds_in_vain, &mut from, cx);
                }
                self.admit_writes(now, cx);
                {
                    let (writes, mut from) = self.write_side();
                    writes.write_spans(now, &mut from, cx);
                }
                // Most polls find none, and what a read takes of the rest is not put together for nothing.
                if self.reads.begin_turn() {
                    let (reads, mut from) = self.read_side();
                    reads.retry_reads(&mut from, cx);
                }
                if self.close.is_none() && !self.port.is_fenced() {
                    let (policy, now) = (self.config.policy, self.port.now);
                    let piece = (self.filling).begin_piece(policy, &self.cached, now, cx);
                    if let Some((first, end)) = piece {
                        let (reads, mut from) = self.read_side();
                        reads.promote_unasked(first, end, &mut from, cx);
                    }
                }
                self.destage_poll(now, cx);
                // Destage may have given back the space that writes wait for, or all of it.
                self.admit_writes(now, cx);
                {
                    let (writes, mut from) = self.write_side();
                    writes.write_spans(now, &mut from, cx);
                }
                self.mark_end(now, cx);
                if self.close.is_some() {
                    self.finish_close(cx);
                }
                self.note_trouble();
            }
        }
        let awaits_budget = self.phase == Phase::Opening && self.opening.awaits_memory();
        self.health.note_memory(awaits_budget, now);
        let waits = match self.phase {
            Phase::Opening => self.opening.is_replaying() && self.port.is_idle(),
            Phase::Open | Phase::Closing => {
                self.reads.has_starved()
                    || self.reads.has_stalled_promotion()
                    || (self.destaging.generation().is_postponed()
                        && !self.port.is_fenced()
                        && !self.direct.awaits_mark(&self.log))
            }
            Phase::Failed(_) | Phase::Closed => false,
        };
        let wait = if awaits_budget {
            BUDGET_WAIT
        } else {
            MEMORY_WAIT
        };
        self.memory_wait = waits.then(|| now.plus(wait));
    }

    // Opening and closing.

    fn replayed(
        &mut self,
        now: Nanos,
        chunk: u64,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let Some(replay) = self.opening.replay() else {
            return;
        };
        let result = result.map(|done| match done {
            Done::Read(buf) => buf,
            _ => unreachable!("a read brings a buffer"),
        });
        let (index, cached) = (&mut self.index, &mut self.cached);
        let stats = &mut self.port.stats;
        let (mut whole, mut record) = (false, None);
        let actions = &mut *cx.actions;
        let mut runs = 0;
        let outcome = replay.read_done(now, chunk, result, |log, found| match found {
            Found::Entries(sequences) => {
                for sequence in sequences {
                    let range = log.entry(sequence).range;
                    actions.push(Action::BackendUnsettled { range });
                    index.insert_long(range, sequence);
                    // Each write is passed once, so this is no more than twice the work of its insertion.
                    while !index.takes_long() {
                        index.settle(STEP_WORK_MAX);
                    }
                    cached.own(range);
                    stats.replayed_entries += 1;
                }
                runs = index.len();
            }
            // It says something to somebody: to leave it out would be to lose it.
            Found::Record(found) => record = record.or(Some(found.span)),
            Found::Span(_) => {}
            Found::Done => whole = true,
        });
        if runs > 0 {
            replay.note_runs(runs);
        }
        let refused = record.map(|position| OpenError::Record { position });
        match outcome.and_then(|()| refused.map_or(Ok(()), Err)) {
            Err(error) => {
                self.opening.give_up();
                self.index = ExtentIndex::default();
                self.phase = Phase::Failed(error);
                self.opening.refuse(RequestError::Io, &mut self.port, cx);
            }
            Ok(()) if whole => {
                let mut log = self.opening.take_log();
                if log.superblocks().is_damaged_copy() {
                    // Another copy has that whole: a tail that moves on would take it away there.
                    let position = log.head();
                    self.index = ExtentIndex::default();
                    self.phase = Phase::Failed(OpenError::CorruptLog { position });
                    return self.opening.refuse(RequestError::Io, &mut self.port, cx);
                }
                log.check_allocation();
                // A flush may have been the last that was acknowledged; the log does not tell. So
                // what is found goes to the backend before what is written from now on.
                log.sync_point();
                self.port.stats.replayed_bytes = log.bytes().appended;
                self.port.stats.log_corrupt_blocks = log.superblocks().damaged_blocks();
                log.set_entries_max(self.config.log_entries_max);
                self.damage.cut(beyond(self.config.bytes), &mut log);
                let lost = log.superblocks().lost().clone();
                for range in lost.iter() {
                    self.cached.own(range);
                }
                self.damage.know_lost(lost);
                cx.cache.tie(self.config.number, log.superblocks().tie());
                let superblock = log.superblock_for_opening();
                self.writes.note_durable(self.port.now);
                self.log.opened(log);
                opening::write_superblock(superblock, &mut self.port, cx);
            }
            Ok(()) => self.opening.read_ahead(&mut self.port, cx),
        }
    }

    fn opened(&mut self, now: Nanos, result: Result<Done, IoError>, cx: &mut Context<'_>) {
        if let Err(error) = result {
            self.phase = Phase::Failed(OpenError::Io(error));
            return self.opening.refuse(RequestError::Io, &mut self.port, cx);
        }
        if let Some(superblock) = self.log.get_mut().superblocks_mut().beside_opening() {
            return opening::write_superblock(superblock, &mut self.port, cx);
        }
        self.phase = Phase::Open;
        self.port.stats.replay_time = now.since(self.opening.started());
        self.writes.resident.begin(self.log.get().next_sequence());
        let (direct, mut from) = self.direct_side();
        direct.opened(&mut from, cx);
        for (id, request) in self.opening.take_piece() {
            self.serve(now, id, request, cx);
        }
    }

    /// Whether destage has done what it can do with what the log holds, and more may be left.
    fn is_stuck(&self) -> bool {
        let log = self.log.get();
        let destage = self.destaging.is_stuck(&self.config, &self.damage, log);
        self.log.has_failed() || destage || self.port.is_fenced()
    }

    /// Whether what is left in the log is not destaged, or not before its device answers again.
    pub fn log_is_stuck(&self) -> bool {
        self.log.if_open().is_some() && (self.is_stuck() || self.health.log_is_silent())
    }

    fn begin_close(&mut self, cx: &mut Context<'_>) {
        self.phase = Phase::Closing;
        self.opening
            .refuse(RequestError::Closing, &mut self.port, cx);
        self.lease.refuse(RequestError::Closing, &mut self.port, cx);
        self.writes
            .refuse_admission(RequestError::Closing, &mut self.port, cx);
        let (reads, mut from) = self.read_side();
        reads.cancel_promotions(&mut from, cx);
    }

    fn finish_close(&mut self, cx: &mut Context<'_>) {
        let stuck = self.is_stuck();
        if self.log.has_failed() && self.port.awaits_nothing() {
            // What is not durable keeps its memory, which may be all that there is.
            let (reads, mut from) = self.read_side();
            reads.refuse_starved_reads(RequestError::Closing, &mut from, cx);
        }
        let destage = self.close == Some(true) && !stuck;
        let idle = self.destaging.generation().stage() == Stage::Idle || stuck;
        let answered = !self.port.owes_answer();
        let ended = self.port.awaits_nothing();
        if self.closing_superblock || !idle || !answered || !ended {
            return;
        }
        let (direct, mut from) = self.direct_side();
        if direct.flushes_at_close(&mut from, cx) {
            return;
        }
        if self.direct.is_emptying_failed_log(&self.log) && !stuck {
            return;
        }
        if self.log.has_failed() {
            self.phase = Phase::Closed;
            return;
        }
        if self.log.get().flights() > 0 || (destage && !self.log.get().spans().is_empty()) {
            return;
        }
        if self.port.is_fenced() {
            // The log stays as it is.
            self.phase = Phase::Closed;
            return;
        }
        debug_assert!(
            self.log.get().open_since().is_none(),
            "closing seals what is open"
        );
        let tail = self.log.get().tail_after(0);
        (self.direct).keep_mark(self.config.number, &mut self.log, cx.cache);
        let superblock = self.log.get_mut().superblock_for(&tail, true);
        self.closing_superblock = true;
        self.log
            .write_superblock(Op::ClosingSuperblock, superblock, &mut self.port, cx);
    }

    /// Take the new size, unless the log holds something beyond the smaller end. What waits and reaches beyond is
    /// refused: writes here, reads when their turn comes.
    fn resize(&mut self, bytes: u64, cx: &mut Context<'_>) {
        let (from, to) = (bytes.min(self.config.bytes), bytes.max(self.config.bytes));
        let beyond = beyond(from);
        let grows = bytes > self.config.bytes;
        if !self.index.is_clear(beyond)
            || self.direct.overlaps(beyond)
            || grows && self.damage.holds_cut(self.log.get())
        {
            return;
        }
        // What is cut off must not come back when the volume grows again.
        let first = from / BLOCK_BYTES as u64;
        let end = to.div_ceil(BLOCK_BYTES as u64);
        let cut = SectorRange::between(first * BLOCK_SECTORS, end * BLOCK_SECTORS);
        self.cached.invalidate(cut, cx);
        self.cached.own(cut);
        self.cached.resize(bytes);
        self.damage.cut(beyond, self.log.get_mut());
        self.config.bytes = bytes;
        let sectors = self.sectors();
        (self.writes).refuse_beyond(sectors, &mut self.port, cx);
    }

    fn sectors(&self) -> u64 {
        self.config.bytes / SECTOR_BYTES as u64
    }

    // What others see.

    /// When [`Event::Poll`] is due at the latest, if nothing happens before.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        match self.phase {
            Phase::Open | Phase::Closing => {}
            Phase::Opening | Phase::Failed(_) => {
                return self
                    .memory_wait
                    .into_iter()
                    .chain(self.port.watch_at())
                    .min();
            }
            Phase::Closed => return self.memory_wait,
        }
        let goes_on = self.close.is_none() && !self.port.is_fenced();
        let wakeups = [
            self.write_wakeup(),
            self.destage_wakeup(),
            (self.phase == Phase::Open)
                .then(|| (self.direct).wakeup(&self.config, &self.destaging, &self.port))
                .flatten(),
            self.memory_wait,
            self.port.watch_at(),
            goes_on.then(|| self.filling.wakeup()).flatten(),
            self.reads.promotion_wakeup(self.port.now),
            (!self.index.is_settled()).then_some(self.port.now),
            self.opening.has_waiting().then_some(self.port.now),
            self.lease.wakeup(self.port.now),
        ];
        wakeups.into_iter().flatten().min()
    }

    /// The policy in effect. It differs from the configuration's while the log is still being emptied, or
    /// direct writes end.
    pub fn policy(&self) -> Policy {
        self.direct.policy()
    }

    /// Whether the backend was given writes past the log that it has not flushed.
    pub fn owes_flush(&self) -> bool {
        self.direct.owes_flush()
    }

    /// Where the volume is in its life.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether nothing of it is under way, so that it may be dropped once it is closed, and its log opened again.
    /// Operations of devices that do not answer may outlast the close.
    pub fn is_idle(&self) -> bool {
        self.port.is_idle()
    }

    /// Whether a write to the log has failed since it was opened.
    pub fn log_failed(&self) -> bool {
        self.log.has_failed()
    }

    /// Whether every write that the backend was asked for is flushed there. What makes an atomic
    /// backend show what it has, beside a flush, is right only then.
    pub fn backend_is_flushed(&self) -> bool {
        !self.destaging.generation().has_unflushed()
    }

    /// What the log knows of what was cut off. That would come back if the volume grew, also in the next opening, so it
    /// does not until everything is destaged, and both superblocks say so ([`Event::TellTail`]).
    pub fn cut(&self) -> Cut {
        let cannot = self.log.has_failed() || self.port.is_fenced() || self.health.log_is_silent();
        let open = self.log.if_open();
        let holds_lost = open.is_some_and(|log| self.damage.holds_cut(log));
        if !self.index.is_clear(beyond(self.config.bytes)) || holds_lost && !cannot {
            Cut::Held
        } else if holds_lost {
            Cut::Untold
        } else if !self.writes.tells_tail() || self.log.is_given_up() {
            Cut::Gone
        } else if cannot {
            Cut::Untold
        } else {
            Cut::Pending
        }
    }

    /// What it has looked at so far, in builds with assertions: whoever tests bounds what a step costs.
    pub fn work(&self) -> u64 {
        let own = self.port.work.units() + self.index.work();
        own + self.destaging.generation().work() + self.direct.work()
    }

    /// Whether what lies below long ranges has been taken out of the index.
    pub fn is_settled(&self) -> bool {
        self.index.is_settled()
    }

    /// The volume as the read cache knows it.
    pub fn cached(&self) -> &CachedBlocks {
        &self.cached
    }

    /// Ranges that are left of a warm-up: they take memory.
    pub fn warm_up_ranges(&self) -> usize {
        self.filling.warm_up_ranges()
    }

    /// What it is and how it behaves.
    pub fn config(&self) -> &VolumeConfig {
        &self.config
    }

    /// Assert what must always hold. Builds with assertions run the cheap checks after every step;
    /// this runs them all.
    pub fn check_invariants(&self) {
        let Some(log) = self.log.if_open() else {
            return;
        };
        log.check_invariants();
        log.check_allocation();
        self.direct.check(&self.log);
        for (range, sequence) in self.index.iter() {
            let entry = log.entry(sequence);
            assert!(
                entry.range.start <= range.start && range.end() <= entry.range.end(),
                "the index names entries that hold the sectors"
            );
        }
        let resident: usize = (log.first_sequence()..log.next_sequence())
            .map(|sequence| log.entry(sequence))
            .filter(|entry| entry.data.is_some())
            .map(|entry| usize::from(entry.held_blocks) * BLOCK_BYTES)
            .sum();
        assert_eq!(
            resident as u64,
            self.writes.resident.bytes(),
            "resident data is counted"
        );
    }
}

/// Whether a request is one that a volume of so many sectors can be asked.
fn is_valid(request: &Request, sectors: u64) -> bool {
    let Some(range) = request.range() else {
        return true;
    };
    let bounded = matches!(request, Request::Read { .. } | Request::Write { .. });
    let inside = !range.is_empty() && range.start < sectors && range.count <= sectors - range.start;
    // Only of a range inside is the length known to be computable.
    let sized = || !bounded || range.block_count() as usize * BLOCK_BYTES <= REQUEST_BYTES_MAX;
    let data = match request {
        Request::Write { data, .. } => inside && data.len() == range.bytes(),
        _ => true,
    };
    inside && sized() && data
}

/// All sectors from an end in bytes on.
fn beyond(bytes: u64) -> SectorRange {
    SectorRange::between(bytes / SECTOR_BYTES as u64, u64::MAX)
}
