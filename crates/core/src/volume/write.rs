//! Writes: admission into the log, group commit, acknowledgement.
//!
//! A write waits in `admission` while the log has no room, too much is not durable, or its turn
//! has not come under throttling. It is acknowledged when durable, or under persist-on-flush at
//! once. Its acknowledgement orders the backend as that of a flush does if the client asked for FUA: what
//! is accepted from then on goes there after it. Throttling starts at `dirty_ratio_max` of the log: the admitted rate is the rate at which
//! destage frees space times `(1 - f) / f`, where `f` runs from 0 there to 1 at a full log; so it
//! falls without a step and settles where both rates are equal.

use alloc::collections::VecDeque;

use super::direct::{DRAIN_FILL, DRAIN_RATE_BLOCKS_MIN};
use super::op::Op;
use super::port::Kind;
use super::{Context, Persist, Phase, Policy, Volume, Waiter, WhenFull};
use crate::base::buf::Buf;
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, Nanos, Reply, Request, RequestId, SectorRange};
use crate::base::limits::{BLOCK_BYTES, SPANS_IN_FLIGHT_MAX, STEP_WORK_MAX};
use crate::format::EntryKind;
use crate::log::extent_index::Sequence;
use crate::log::write_log::{Entry, FLIGHTS_MAX, WriteLog};

/// Comparisons in one step of writes that had to wait until they can go past the log: some ten microseconds.
const DRAINED_LOOKS_MAX: usize = 8 * STEP_WORK_MAX;
/// With a span in flight, another is begun only for so many bytes: small writes gather.
const SECOND_SPAN_BYTES: usize = 32 << 10;
/// Spans in flight at most while they are small.
const SMALL_SPANS_IN_FLIGHT_MAX: usize = 4;
/// A span that nobody waits for is written when it has so many bytes.
const LAZY_SPAN_BYTES: usize = 512 << 10;
/// Whoever flushes after no more than so many bytes has what is written between two flushes written
/// early, from this size of a span on: the flush then waits for a short span only.
const FLUSH_OFTEN_BYTES: u64 = 1 << 20;
const EARLY_SPAN_BYTES: usize = 32 << 10;
/// Throttled admissions run ahead of their schedule by the time that destage needs for so many log
/// blocks, and then wait until they are back on it: let in one by one, each would be a span of its
/// own, which costs twice the log space and many times the CPU of a span for several.
const BURST_BLOCKS: f64 = 32.0;
/// Bounds of that time: a timer's granularity, and what a client may notice.
const BURST_MIN: Nanos = Nanos::from_micros(500);
const BURST_MAX: Nanos = Nanos::from_millis(5);
/// When nothing has become durable for so long, a superblock says what had been. Until then a span at the end of the log
/// that is damaged cannot be told from one that was never acknowledged.
const END_MARK_AGE: Nanos = Nanos::from_millis(1_000);
/// Log blocks a second that are admitted above the threshold while nothing is known of destage.
const RATE_BLOCKS_MIN: f64 = 256.0;

/// A write that waits to be admitted.
#[derive(Debug)]
pub(super) struct Pending {
    id: RequestId,
    request: Request,
    since: Nanos,
}

/// The write side of a volume.
#[derive(Debug, Default)]
pub(super) struct Writes {
    pub(super) admission: VecDeque<Pending>,
    /// In order of `until`.
    waiters: VecDeque<Waiter>,
    /// When something became durable the last time.
    pub(super) durable_since: Nanos,
    /// A superblock is being written that says where the log ends.
    pub(super) marks_end: bool,
    /// When the next throttled write may go, and since when it is known.
    next_admission: Nanos,
    /// Admissions have run ahead as far as they may, and wait for their schedule.
    held: bool,
    /// A client has flushed: it knows barriers.
    barrier_seen: bool,
    /// Bytes accepted when the last flush came, and between it and the one before.
    flushed_at: u64,
    flush_interval: u64,
    /// Data of entries from this sequence on may be in memory.
    pub(super) resident_from: Sequence,
    pub(super) resident_bytes: u64,
}

/// Whether a write can be admitted.
enum Admission {
    Now,
    At(Nanos),
    /// Once more is durable.
    Blocked,
    /// Once destage has freed space.
    Full,
}

impl Volume {
    pub(super) fn accept_write(
        &mut self,
        now: Nanos,
        id: RequestId,
        request: Request,
        cx: &mut Context<'_>,
    ) {
        if self.log.refuses_writes() {
            return self
                .port
                .reply(id, Kind::Other, Err(RequestError::ReadOnly), cx);
        }
        if self.damage.is_damaged() {
            return self
                .port
                .reply(id, Kind::Other, Err(RequestError::Inconsistent), cx);
        }
        if self.config.policy == Policy::ReadOnly {
            return self
                .port
                .reply(id, Kind::Other, Err(RequestError::Policy), cx);
        }
        if self
            .health
            .refuses_writes_for_silent_log(self.config.when_full)
            && !self.direct.is_direct()
        {
            // It would fill the log, and be told of an error all the same.
            return self.port.reply(id, Kind::Other, Err(RequestError::Io), cx);
        }
        if self.direct.is_direct() && self.writes.admission.is_empty() {
            return self.write_directly(id, request, cx);
        }
        if self.writes.admission.is_empty()
            && matches!(self.admission(now, &request), Admission::Now)
        {
            return self.admit(now, id, request, cx);
        }
        self.writes.admission.push_back(Pending {
            id,
            request,
            since: now,
        });
    }

    /// Admit what may be admitted, in order.
    pub(super) fn admit_writes(&mut self, now: Nanos, cx: &mut Context<'_>) {
        // All that waited for the log to be empty: what this step has no time for goes on in the next one.
        let mut looks_left = DRAINED_LOOKS_MAX;
        while self.direct.is_direct()
            && looks_left > 0
            && let Some(pending) = self.writes.admission.pop_front()
        {
            looks_left = looks_left.saturating_sub(self.direct.push_looks());
            let waited = now.since(pending.since);
            self.port.stats.throttled_time = self.port.stats.throttled_time.plus(waited);
            self.write_directly(pending.id, pending.request, cx);
        }
        if self.direct.is_direct() {
            return;
        }
        while let Some(pending) = self.writes.admission.front() {
            match self.admission(now, &pending.request) {
                Admission::Now => {}
                Admission::At(_) | Admission::Blocked => break,
                Admission::Full => {
                    if self.config.when_full == WhenFull::Error && self.destage_gets_nowhere() {
                        self.refuse_waiting_writes(RequestError::LogFull, cx);
                    }
                    break;
                }
            }
            let pending = self.writes.admission.pop_front().expect("looked at");
            let waited = now.since(pending.since);
            self.port.stats.throttled_time = self.port.stats.throttled_time.plus(waited);
            self.admit(now, pending.id, pending.request, cx);
        }
    }

    /// Whether the backend fails what is destaged, or gives no answer.
    pub(super) fn backend_takes_nothing(&self) -> bool {
        self.destaging.generation().is_failing() || self.health.backend_is_silent()
    }

    /// The same, or the log does not give what is to be destaged.
    pub(super) fn destage_gets_nowhere(&self) -> bool {
        self.backend_takes_nothing() || self.health.log_is_silent()
    }

    pub(super) fn refuse_waiting_writes(&mut self, error: RequestError, cx: &mut Context<'_>) {
        for pending in core::mem::take(&mut self.writes.admission) {
            self.port.reply(pending.id, Kind::Other, Err(error), cx);
        }
    }

    /// Refuse what waits and reaches beyond the end of the volume.
    pub(super) fn refuse_writes_beyond(&mut self, sectors: u64, cx: &mut Context<'_>) {
        for pending in core::mem::take(&mut self.writes.admission) {
            let range = match &pending.request {
                Request::Write { range, .. }
                | Request::WriteZeroes { range, .. }
                | Request::Discard { range, .. } => *range,
                _ => unreachable!("only writes are admitted"),
            };
            if range.end() <= sectors {
                self.writes.admission.push_back(pending);
            } else {
                self.port
                    .reply(pending.id, Kind::Other, Err(RequestError::BadRange), cx);
            }
        }
    }

    fn admission(&self, now: Nanos, request: &Request) -> Admission {
        let log = self.log.get();
        let data_blocks = match request {
            Request::Write { range, .. } => range.block_count(),
            _ => 0,
        };
        if self.log.is_given_up() {
            return Admission::Full;
        }
        if self
            .direct
            .path()
            .is_held_back(1 + data_blocks, self.drains())
        {
            return Admission::Blocked;
        }
        if data_blocks == 0 && !self.index.takes_long() {
            return Admission::Blocked;
        }
        let oldest_pin = self.log.oldest_pin();
        if !log.has_room(data_blocks, oldest_pin) {
            // What is free but being read is there in a moment, unless the device is silent.
            let is_read = log.has_room(data_blocks, None) && !self.health.log_is_silent();
            return if is_read {
                Admission::Blocked
            } else {
                Admission::Full
            };
        }
        let lazy = !self.is_on_write();
        if log.flights() >= FLIGHTS_MAX
            || (lazy
                && self.unpersisted_bytes() > 0
                && self.unpersisted_bytes() + data_blocks * BLOCK_BYTES as u64
                    > self.config.unpersisted_bytes_max)
        {
            return Admission::Blocked;
        }
        let fill = self.throttle();
        if fill > 0.0 && self.writes.held && self.writes.next_admission > now {
            return Admission::At(self.writes.next_admission);
        }
        Admission::Now
    }

    /// How far throttled admissions may run ahead of their schedule.
    fn burst(&self) -> Nanos {
        let nanos = BURST_BLOCKS
            / self
                .destaging
                .generation()
                .rate_blocks()
                .max(RATE_BLOCKS_MIN)
            * 1e9;
        Nanos((nanos as u64).clamp(BURST_MIN.0, BURST_MAX.0))
    }

    /// 0 below the throttling threshold, rising to 1 at a full log.
    fn fill_above_threshold(&self) -> f64 {
        let threshold = f64::from(self.config.dirty_ratio_max.min(95)) / 100.0;
        ((log_fill(self.log.get()) - threshold) / (1.0 - threshold)).clamp(0.0, 1.0)
    }

    /// The same, while the log drains no less than makes it empty in the end.
    fn throttle(&self) -> f64 {
        let fill = self.fill_above_threshold();
        if self.drains() && self.destaging.generation().rate_blocks() > 0.0 {
            return fill.max(DRAIN_FILL);
        }
        fill
    }

    fn admit(&mut self, now: Nanos, id: RequestId, request: Request, cx: &mut Context<'_>) {
        let fill = self.throttle();
        let (kind, range, no_hole, fua, data) = match request {
            Request::Write { range, data, fua } => {
                (EntryKind::Write, range, false, fua, Some(data))
            }
            Request::WriteZeroes {
                range,
                fua,
                no_hole,
            } => (EntryKind::WriteZeroes, range, no_hole, fua, None),
            Request::Discard { range, fua } => (EntryKind::Discard, range, false, fua, None),
            _ => unreachable!("only writes are admitted"),
        };
        let reply_kind = if kind == EntryKind::Write {
            Kind::Write(range.bytes() as u64)
        } else {
            Kind::Trim
        };
        if let Some(error) = self.damage.refusal_for_lost(range, self.direct.is_direct()) {
            return self.port.reply(id, reply_kind, Err(error), cx);
        }
        self.damage.note_written(range);
        let stored_before = self.port.stats.log_stored_bytes;
        let sequence = self.append(now, kind, range, no_hole, data, cx);
        let stored = self.port.stats.log_stored_bytes - stored_before;
        let blocks = 1 + stored.div_ceil(BLOCK_BYTES as u64);
        self.direct.count_drained(blocks);
        if fill > 0.0 {
            self.schedule_next(now, fill, blocks);
        }
        if fua || self.is_on_write() {
            self.writes.waiters.push_back(Waiter {
                until: sequence + 1,
                id,
                kind: reply_kind,
                fua,
            });
        } else {
            self.port.reply(id, reply_kind, Ok(Reply::Done), cx);
        }
    }

    fn append(
        &mut self,
        now: Nanos,
        kind: EntryKind,
        range: SectorRange,
        no_hole: bool,
        data: Option<Buf>,
        cx: &Context<'_>,
    ) -> Sequence {
        let held_blocks = data.as_ref().map_or(0, Buf::held_blocks);
        self.writes.resident_bytes += u64::from(held_blocks) * BLOCK_BYTES as u64;
        self.cached.own(range);
        let data = match (self.config.compression, data) {
            (Some(method), Some(data)) => {
                return self.append_compressed(now, range, data, method, cx);
            }
            (_, data) => data,
        };
        let data_bytes = data.as_ref().map_or(0, |data| data.covering_blocks().len());
        let entry = Entry {
            range,
            kind,
            no_hole,
            position: u64::MAX,
            stored: None,
            held_blocks,
            data,
        };
        self.append_entry(now, entry, data_bytes, None)
    }

    /// Move the next admission back by the time that destage needs for so many blocks.
    fn schedule_next(&mut self, now: Nanos, fill: f64, blocks: u64) {
        let rate_min = if self.drains() {
            DRAIN_RATE_BLOCKS_MIN
        } else {
            RATE_BLOCKS_MIN
        };
        let rate = self.destaging.generation().rate_blocks().max(rate_min) * (1.0 - fill) / fill;
        let nanos = (blocks as f64 / rate.max(1.0) * 1e9).min(1e9) as u64;
        self.writes.next_admission = self.writes.next_admission.max(now).plus(Nanos(nanos));
        self.writes.held = self.writes.next_admission > now.plus(self.burst());
    }

    pub(super) fn flush(&mut self, id: RequestId, cx: &mut Context<'_>) {
        if self.log.refuses_writes() {
            return self
                .port
                .reply(id, Kind::Flush, Err(RequestError::ReadOnly), cx);
        }
        if self.damage.is_damaged() {
            return self
                .port
                .reply(id, Kind::Flush, Err(RequestError::Inconsistent), cx);
        }
        let appended = self.log.get().bytes().appended;
        self.writes.flush_interval = appended - self.writes.flushed_at;
        self.writes.flushed_at = appended;
        self.writes.barrier_seen = true;
        let log = self.log.get_mut();
        log.sync_point();
        let until = log.next_sequence();
        if self.flush_directly(id, until, cx) {
            return;
        }
        if self.log.get().durable_sequence() >= until {
            return self.port.reply(id, Kind::Flush, Ok(Reply::Done), cx);
        }
        self.writes.waiters.push_back(Waiter {
            until,
            id,
            kind: Kind::Flush,
            fua: false,
        });
    }

    /// Acknowledge a flush once the log is durable up to what it covers.
    pub(super) fn await_durable(&mut self, mut waiter: Waiter) {
        // Others that came after it may wait for more already; they are answered in order.
        let last = self.writes.waiters.back();
        waiter.until = last.map_or(waiter.until, |last| last.until.max(waiter.until));
        self.writes.waiters.push_back(waiter);
    }

    /// Whether an acknowledgement waits for durability at present.
    pub(super) fn is_on_write(&self) -> bool {
        match self.config.persist {
            Persist::OnWrite => true,
            Persist::OnFlush => false,
            Persist::Auto => !self.writes.barrier_seen,
        }
    }

    pub(super) fn unpersisted_bytes(&self) -> u64 {
        let bytes = self.log.get().bytes();
        bytes.appended - bytes.durable
    }

    /// Seal and write spans as the policy of group commit says.
    pub(super) fn write_spans(&mut self, now: Nanos, cx: &mut Context<'_>) {
        if self.log.has_failed() || self.log.is_given_up() {
            return;
        }
        if self.should_seal(now) {
            self.log.get_mut().seal();
        }
        while let Some(write) = self.log.get_mut().next_write(SPANS_IN_FLIGHT_MAX) {
            self.port.stats.log_spans += 1;
            self.port.stats.log_written_bytes += write
                .data
                .iter()
                .map(|block| block.len() as u64)
                .sum::<u64>();
            let token = self.port.begin(Op::Span { end: write.end });
            cx.actions.push(Action::LogWrite {
                token,
                offset: write.offset,
                data: write.data,
            });
        }
    }

    fn should_seal(&self, now: Nanos) -> bool {
        let log = self.log.get();
        let Some(since) = log.open_since() else {
            return false;
        };
        let (flights, bytes) = (log.flights(), log.open_bytes());
        if flights >= SPANS_IN_FLIGHT_MAX {
            return false;
        }
        let gathered =
            flights == 0 || (bytes >= SECOND_SPAN_BYTES && flights < SMALL_SPANS_IN_FLIGHT_MAX);
        let awaited = self
            .writes
            .waiters
            .back()
            .is_some_and(|last| self.is_open(last.until))
            || self.destaging.wants_seal(log)
            || self.direct.path().is_draining()
            || self.phase == Phase::Closing;
        (awaited && gathered)
            || (flights == 0 && bytes >= EARLY_SPAN_BYTES && self.is_flushed_often())
            || bytes >= LAZY_SPAN_BYTES
            || now >= since.plus(self.lazy_age())
            || (!self.writes.admission.is_empty() && gathered)
    }

    /// Whether the next flush is to be expected before much more is written.
    fn is_flushed_often(&self) -> bool {
        let since = self.log.get().bytes().appended - self.writes.flushed_at;
        self.writes.barrier_seen && self.writes.flush_interval.max(since) <= FLUSH_OFTEN_BYTES
    }

    /// Whether the entry before `until` is in the open span.
    fn is_open(&self, until: Sequence) -> bool {
        let log = self.log.get();
        until
            > log
                .spans()
                .back()
                .map_or(log.first_sequence(), |span| span.end_sequence)
    }

    /// A span that nobody waits for is written at this age: early enough to be durable in time.
    fn lazy_age(&self) -> Nanos {
        Nanos(self.config.unpersisted_age_max.0 / 2)
    }

    pub(super) fn span_written(
        &mut self,
        end: u64,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        if result.is_err() {
            return self.fail_log(cx);
        }
        if self.log.has_failed() || self.log.is_given_up() || !self.log.get_mut().span_written(end)
        {
            return;
        }
        self.writes.durable_since = self.port.now;
        self.answer_durable(cx);
        self.trim_resident(self.config.resident_bytes_max);
    }

    /// Answer what waited for what is durable now.
    pub(super) fn answer_durable(&mut self, cx: &mut Context<'_>) {
        let durable = self.log.get().durable_sequence();
        let mut promised = false;
        while let Some(waiter) = self
            .writes
            .waiters
            .pop_front_if(|next| next.until <= durable)
        {
            promised |= waiter.fua;
            self.port.reply(waiter.id, waiter.kind, Ok(Reply::Done), cx);
        }
        if promised {
            // The client counts on it from now on: what it sends next must not be in the backend without it. One sync
            // point is enough for all that are acknowledged together, and there is none if nothing follows.
            self.log.get_mut().sync_point();
        }
        let (reads, mut from) = self.read_side();
        reads.wake_durable_reads(durable, &mut from, cx);
    }

    /// A write to the log's device has failed: what it holds from here on is unknown.
    pub(super) fn fail_log(&mut self, cx: &mut Context<'_>) {
        if !self.begin_giving_up_log() {
            self.fail_writes(cx);
        }
    }

    /// Refuse every write until the volume is reopened.
    pub(super) fn fail_writes(&mut self, cx: &mut Context<'_>) {
        self.log.fail();
        self.refuse_what_waits(cx);
        self.refuse_unmarked(cx);
        if self.log.is_given_up() {
            self.refuse_direct(RequestError::ReadOnly, cx);
        }
    }

    /// Refuse what waits for the log.
    pub(super) fn refuse_what_waits(&mut self, cx: &mut Context<'_>) {
        self.refuse_acknowledgements(RequestError::Io, cx);
        self.refuse_waiting_writes(RequestError::ReadOnly, cx);
        // What these reads wait for will not become durable; memory has it.
        let (reads, mut from) = self.read_side();
        reads.wake_durable_reads(Sequence::MAX, &mut from, cx);
    }

    pub(super) fn refuse_acknowledgements(&mut self, error: RequestError, cx: &mut Context<'_>) {
        for waiter in core::mem::take(&mut self.writes.waiters) {
            self.port.reply(waiter.id, waiter.kind, Err(error), cx);
        }
    }

    /// Refuse every write and flush that is not answered yet.
    pub(super) fn refuse_unanswered_writes(&mut self, error: RequestError, cx: &mut Context<'_>) {
        self.refuse_acknowledgements(error, cx);
        self.refuse_waiting_writes(error, cx);
        self.refuse_direct(error, cx);
    }

    /// Drop the oldest durable data from memory until at most `bytes_max` are left.
    pub(super) fn trim_resident(&mut self, bytes_max: u64) {
        let first = self.log.get().first_sequence();
        self.writes.resident_from = self.writes.resident_from.max(first);
        while self.writes.resident_bytes > bytes_max
            && self.writes.resident_from < self.log.get().durable_sequence()
        {
            let sequence = self.writes.resident_from;
            let entry = self.log.get_mut().entry_mut(sequence);
            if entry.data.take().is_some() {
                let held = usize::from(entry.held_blocks) * BLOCK_BYTES;
                self.writes.resident_bytes -= held as u64;
            }
            self.writes.resident_from += 1;
        }
    }

    /// Give memory back while the pool is short of it.
    pub(super) fn relieve_pool(&mut self, cx: &mut Context<'_>) {
        let reserve = cx.pool.total_bytes() / 4;
        let free = cx.pool.free_bytes();
        if free < reserve && self.writes.resident_bytes > 0 {
            let keep = self
                .writes
                .resident_bytes
                .saturating_sub((reserve - free) as u64);
            self.trim_resident(keep);
        }
    }

    /// When a superblock is to say where the log ends; none: nothing has to be said, or it cannot be now.
    fn end_mark_at(&self) -> Option<Nanos> {
        let is_well = self.phase == Phase::Open
            && !self.log.has_failed()
            && !self.log.is_given_up()
            && !self.port.is_fenced();
        let is_due = is_well && !self.writes_superblock() && self.log.get().end_is_unproven();
        is_due.then(|| self.writes.durable_since.plus(END_MARK_AGE))
    }

    /// Have a superblock say where the log ends, once nothing that follows will.
    pub(super) fn mark_end(&mut self, now: Nanos, cx: &mut Context<'_>) {
        if self.end_mark_at().is_none_or(|at| now < at) {
            return;
        }
        self.writes.marks_end = true;
        let log = self.log.get_mut();
        log.name_durable();
        let superblock = log.next_superblock();
        self.log
            .write_superblock(Op::EndMark, superblock, &mut self.port, cx);
    }

    pub(super) fn end_was_marked(&mut self, result: Result<Done, IoError>, cx: &mut Context<'_>) {
        self.writes.marks_end = false;
        if result.is_ok() {
            self.log.superblock_ended();
        } else {
            self.superblock_failed(cx);
        }
    }

    pub(super) fn write_wakeup(&self) -> Option<Nanos> {
        let log = self.log.get();
        if self.direct.is_direct() && !self.writes.admission.is_empty() {
            return Some(self.port.now);
        }
        if self.log.has_failed() || self.log.is_given_up() {
            return None;
        }
        let lazy = log
            .open_since()
            .filter(|_| log.flights() < SPANS_IN_FLIGHT_MAX)
            .map(|since| since.plus(self.lazy_age()));
        let admission = self.writes.admission.front().and_then(|pending| {
            match self.admission(Nanos(0), &pending.request) {
                Admission::At(when) => Some(when),
                Admission::Now | Admission::Blocked | Admission::Full => None,
            }
        });
        [lazy, admission, self.end_mark_at()]
            .into_iter()
            .flatten()
            .min()
    }
}

/// Share of the log in use, from 0 to 1.
pub(super) fn log_fill(log: &WriteLog) -> f64 {
    log.used_blocks() as f64 / log.ring_blocks() as f64
}
