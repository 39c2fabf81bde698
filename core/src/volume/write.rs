//! Writes: admission into the log, group commit, acknowledgement.
//!
//! A write waits in `admission` while the log has no room, too much is not durable, or its turn
//! has not come under throttling. It is acknowledged when durable, or under persist-on-flush at
//! once. Throttling starts at `dirty_ratio_max` of the log: the admitted rate is the rate at which
//! destage frees space times `(1 - f) / f`, where `f` runs from 0 there to 1 at a full log; so it
//! falls without a step and settles where both rates are equal.

use alloc::collections::VecDeque;

use super::{Context, Kind, Op, Persist, Phase, Volume, Waiter, WhenFull};
use crate::buf::Buf;
use crate::error::{IoError, RequestError};
use crate::extent_index::Sequence;
use crate::format::EntryKind;
use crate::io::{Action, Done, Nanos, Reply, Request, RequestId, SectorRange};
use crate::limits::{BLOCK_BYTES, SPANS_IN_FLIGHT_MAX};
use crate::write_log::FLIGHTS_MAX;

/// With a span in flight, another is begun only for so many bytes: small writes gather.
const SECOND_SPAN_BYTES: usize = 32 << 10;
/// Spans in flight at most while they are small.
const SMALL_SPANS_IN_FLIGHT_MAX: usize = 4;
/// A span that nobody waits for is written when it has so many bytes.
const LAZY_SPAN_BYTES: usize = 512 << 10;
/// Throttled admissions may run ahead of their schedule by this much, so that a timer's
/// granularity does not cost throughput.
const BURST: Nanos = Nanos::from_micros(500);
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
    /// When the next throttled write may go, and since when it is known.
    next_admission: Nanos,
    /// A client has flushed: it knows barriers.
    barrier_seen: bool,
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
        if self.log_failed {
            return self.reply(id, Kind::Other, Err(RequestError::ReadOnly), cx);
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
        while let Some(pending) = self.writes.admission.front() {
            match self.admission(now, &pending.request) {
                Admission::Now => {}
                Admission::At(_) | Admission::Blocked => break,
                Admission::Full => {
                    if self.config.when_full == WhenFull::Error && self.destage.is_failing() {
                        self.refuse_waiting_writes(RequestError::LogFull, cx);
                    }
                    break;
                }
            }
            let pending = self.writes.admission.pop_front().expect("looked at");
            let waited = now.since(pending.since);
            self.stats.throttled_time = self.stats.throttled_time.plus(waited);
            self.admit(now, pending.id, pending.request, cx);
        }
    }

    pub(super) fn refuse_waiting_writes(&mut self, error: RequestError, cx: &mut Context<'_>) {
        for pending in core::mem::take(&mut self.writes.admission) {
            self.reply(pending.id, Kind::Other, Err(error), cx);
        }
    }

    fn admission(&self, now: Nanos, request: &Request) -> Admission {
        let log = self.log();
        let data_blocks = match request {
            Request::Write { range, .. } => range.block_count(),
            _ => 0,
        };
        let oldest_pin = self.log_pins.keys().next().copied();
        if !log.has_room(data_blocks, oldest_pin) {
            return Admission::Full;
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
        let fill = self.fill_above_threshold();
        if fill > 0.0 && self.writes.next_admission > now.plus(BURST) {
            return Admission::At(self.writes.next_admission);
        }
        Admission::Now
    }

    /// 0 below the throttling threshold, rising to 1 at a full log.
    fn fill_above_threshold(&self) -> f64 {
        let log = self.log();
        let threshold = f64::from(self.config.dirty_ratio_max.min(95)) / 100.0;
        let used = log.used_blocks() as f64 / log.ring_blocks() as f64;
        ((used - threshold) / (1.0 - threshold)).clamp(0.0, 1.0)
    }

    fn admit(&mut self, now: Nanos, id: RequestId, request: Request, cx: &mut Context<'_>) {
        let fill = self.fill_above_threshold();
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
        if fill > 0.0 {
            self.schedule_next(
                now,
                fill,
                data.as_ref().map_or(1, |_| 1 + range.block_count()),
            );
        }
        let reply_kind = if kind == EntryKind::Write {
            Kind::Write(range.bytes() as u64)
        } else {
            Kind::Trim
        };
        let sequence = self.append(now, kind, range, no_hole, data);
        if fua || self.is_on_write() {
            self.writes.waiters.push_back(Waiter {
                until: sequence + 1,
                id,
                kind: reply_kind,
            });
        } else {
            self.reply(id, reply_kind, Ok(Reply::Done), cx);
        }
    }

    fn append(
        &mut self,
        now: Nanos,
        kind: EntryKind,
        range: SectorRange,
        no_hole: bool,
        data: Option<Buf>,
    ) -> Sequence {
        self.writes.resident_bytes += data.as_ref().map_or(0, |data| data.held_bytes() as u64);
        let sequence = self.log_mut().append(now, kind, range, no_hole, data);
        self.index.insert(range, sequence);
        sequence
    }

    /// Move the next admission back by the time that destage needs for so many blocks.
    fn schedule_next(&mut self, now: Nanos, fill: f64, blocks: u64) {
        let rate = self.destage.rate_blocks().max(RATE_BLOCKS_MIN) * (1.0 - fill) / fill;
        let nanos = (blocks as f64 / rate.max(1.0) * 1e9).min(1e9) as u64;
        self.writes.next_admission = self.writes.next_admission.max(now).plus(Nanos(nanos));
    }

    pub(super) fn flush(&mut self, id: RequestId, cx: &mut Context<'_>) {
        if self.log_failed {
            return self.reply(id, Kind::Flush, Err(RequestError::ReadOnly), cx);
        }
        self.writes.barrier_seen = true;
        let log = self.log_mut();
        log.sync_point();
        let until = log.next_sequence();
        if log.durable_sequence() >= until {
            return self.reply(id, Kind::Flush, Ok(Reply::Done), cx);
        }
        self.writes.waiters.push_back(Waiter {
            until,
            id,
            kind: Kind::Flush,
        });
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
        let bytes = self.log().bytes();
        bytes.appended - bytes.durable
    }

    /// Seal and write spans as the policy of group commit says.
    pub(super) fn write_spans(&mut self, now: Nanos, cx: &mut Context<'_>) {
        if self.log_failed {
            return;
        }
        if self.should_seal(now) {
            self.log_mut().seal();
        }
        while let Some(write) = self.log_mut().next_write(SPANS_IN_FLIGHT_MAX) {
            self.stats.log_spans += 1;
            self.stats.log_written_bytes += write
                .data
                .iter()
                .map(|block| block.len() as u64)
                .sum::<u64>();
            let token = self.token(Op::Span { end: write.end });
            cx.actions.push(Action::LogWrite {
                token,
                offset: write.offset,
                data: write.data,
            });
        }
    }

    fn should_seal(&self, now: Nanos) -> bool {
        let log = self.log();
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
            || self.phase == Phase::Closing;
        (awaited && gathered)
            || bytes >= LAZY_SPAN_BYTES
            || now >= since.plus(self.lazy_age())
            || (!self.writes.admission.is_empty() && gathered)
    }

    /// Whether the entry before `until` is in the open span.
    fn is_open(&self, until: Sequence) -> bool {
        let log = self.log();
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
        if self.log_failed || !self.log_mut().span_written(end) {
            return;
        }
        let durable = self.log().durable_sequence();
        while let Some(waiter) = self
            .writes
            .waiters
            .pop_front_if(|next| next.until <= durable)
        {
            self.reply(waiter.id, waiter.kind, Ok(Reply::Done), cx);
        }
        self.trim_resident(self.config.resident_bytes_max);
        self.wake_durable_reads(durable, cx);
    }

    /// What the log holds from here on is unknown: refuse every write until it is reopened.
    pub(super) fn fail_log(&mut self, cx: &mut Context<'_>) {
        self.log_failed = true;
        for waiter in core::mem::take(&mut self.writes.waiters) {
            self.reply(waiter.id, waiter.kind, Err(RequestError::Io), cx);
        }
        self.refuse_waiting_writes(RequestError::ReadOnly, cx);
        // What these reads wait for will not become durable; memory has it.
        self.wake_durable_reads(Sequence::MAX, cx);
    }

    /// Drop the oldest durable data from memory until at most `bytes_max` are left.
    pub(super) fn trim_resident(&mut self, bytes_max: u64) {
        let first = self.log().first_sequence();
        self.writes.resident_from = self.writes.resident_from.max(first);
        while self.writes.resident_bytes > bytes_max
            && self.writes.resident_from < self.log().durable_sequence()
        {
            let sequence = self.writes.resident_from;
            if let Some(data) = self.log_mut().entry_mut(sequence).data.take() {
                self.writes.resident_bytes -= data.held_bytes() as u64;
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

    pub(super) fn write_wakeup(&self) -> Option<Nanos> {
        let log = self.log();
        if self.log_failed {
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
        [lazy, admission].into_iter().flatten().min()
    }
}
