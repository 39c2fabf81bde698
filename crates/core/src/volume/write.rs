//! Writes: admission into the log, group commit, acknowledgement.
//!
//! A write waits in `admission` while the log has no room, too much is not durable, or its turn
//! has not come under throttling. It is acknowledged when durable, or under persist-on-flush at
//! once. Its acknowledgement orders the backend as that of a flush does if the client asked for FUA: what
//! is accepted from then on goes there after it. Throttling starts at `dirty_ratio_max` of the log: the admitted rate is the rate at which
//! destage frees space times `(1 - f) / f`, where `f` runs from 0 there to 1 at a full log; so it
//! falls without a step and settles where both rates are equal.

pub(super) mod durable_ways;
mod flush_habit;
mod group_commit;
mod resident;
mod sources;
mod throttle;
mod waiters;

use alloc::collections::VecDeque;

use durable_ways::DurableWays;
use flush_habit::FlushHabit;
use group_commit::{Gathered, GroupCommit};
use resident::Resident;
use sources::{Room, WriteSources};
use throttle::Throttle;
pub(super) use waiters::Waiter;
use waiters::Waiters;

use super::op::Op;
use super::port::{Kind, Port};
use super::{Context, Persist, Phase, Policy, Volume, VolumeConfig, WhenFull};
use crate::base::buf::Buf;
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, DurableWay, Nanos, Reply, Request, RequestId, SectorRange};
use crate::base::limits::{BLOCK_BYTES, SPANS_IN_FLIGHT_MAX, STEP_WORK_MAX};
use crate::format::EntryKind;
use crate::log::extent_index::Sequence;
use crate::log::write_log::{Entry, FLIGHTS_MAX, WriteLog};

/// Comparisons in one step of writes that had to wait until they can go past the log: some ten microseconds.
const DRAINED_LOOKS_MAX: usize = 8 * STEP_WORK_MAX;
/// A span that nobody waits for is written when it has so many bytes.
const LAZY_SPAN_BYTES: usize = 512 << 10;
/// The same of a client that flushes often: the flush then waits for a short span only.
const EARLY_SPAN_BYTES: usize = 32 << 10;
/// When nothing has become durable for so long, a superblock says what had been. Until then a span at the end of the log
/// that is damaged cannot be told from one that was never acknowledged.
const END_MARK_AGE: Nanos = Nanos::from_millis(1_000);

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
    admission: VecDeque<Pending>,
    throttle: Throttle,
    pub(super) waiters: Waiters,
    flush_habit: FlushHabit,
    group_commit: GroupCommit,
    pub(super) resident: Resident,
    /// When something became durable the last time.
    durable_since: Nanos,
    /// A superblock is being written that says where the log ends.
    marks_end: bool,
    /// Superblocks that are still to be written so that both say the same.
    same_superblocks_left: u8,
    /// The one that is being written is one of them.
    is_same: bool,
}

impl Writes {
    /// Writes that wait to be admitted.
    pub(super) fn waiting(&self) -> usize {
        self.admission.len()
    }

    /// Whether one of them waits for room, which destage makes, and not only until more is durable.
    pub(super) fn waits_for_room(&self, log: &WriteLog) -> bool {
        self.admission
            .front()
            .is_some_and(|pending| !log.is_far_ahead(data_blocks(&pending.request)))
    }

    /// Something has become durable now, or is found to be.
    pub(super) fn note_durable(&mut self, now: Nanos) {
        self.durable_since = now;
    }

    /// Whether an acknowledgement waits for durability at present.
    pub(super) fn is_on_write(&self, persist: Persist) -> bool {
        self.flush_habit.is_on_write(persist)
    }

    /// Spans may be made durable in these ways.
    pub(super) fn set_durable_ways(&mut self, ways: DurableWays) {
        self.group_commit.set_ways(ways);
    }

    /// How spans are made durable at present.
    pub(super) fn durable_way(&self) -> Option<DurableWay> {
        self.group_commit.way()
    }

    /// Whether a superblock is being written that says where the log ends.
    pub(super) fn marks_end(&self) -> bool {
        self.marks_end
    }

    /// Have both superblocks say the same.
    pub(super) fn tell_tail(&mut self) {
        self.same_superblocks_left = 2;
        // One that is under way was made before.
        self.is_same = false;
    }

    /// Whether they are still to.
    pub(super) fn tells_tail(&self) -> bool {
        self.same_superblocks_left > 0
    }

    /// That superblock is not waited for any more.
    pub(super) fn end_mark_ended(&mut self) {
        self.marks_end = false;
    }

    /// Refuse what waits to be admitted.
    pub(super) fn refuse_admission(
        &mut self,
        error: RequestError,
        port: &mut Port,
        cx: &mut Context<'_>,
    ) {
        for pending in core::mem::take(&mut self.admission) {
            port.reply(pending.id, Kind::Other, Err(error), cx);
        }
    }

    /// Refuse what waits and reaches beyond the end of the volume.
    pub(super) fn refuse_beyond(&mut self, sectors: u64, port: &mut Port, cx: &mut Context<'_>) {
        for pending in core::mem::take(&mut self.admission) {
            let range = match &pending.request {
                Request::Write { range, .. }
                | Request::WriteZeroes { range, .. }
                | Request::Discard { range, .. } => *range,
                _ => unreachable!("only writes are admitted"),
            };
            if range.end() <= sectors {
                self.admission.push_back(pending);
            } else {
                port.reply(pending.id, Kind::Other, Err(RequestError::BadRange), cx);
            }
        }
    }

    // Admission.

    /// Admit a write, or have it wait until it can be.
    fn accept(
        &mut self,
        now: Nanos,
        id: RequestId,
        request: Request,
        from: &mut WriteSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if self.admission.is_empty()
            && matches!(self.admission(now, &request, &from.room()), Admission::Now)
        {
            return self.admit(now, id, request, from, cx);
        }
        self.admission.push_back(Pending {
            id,
            request,
            since: now,
        });
    }

    /// Admit what may be admitted, in order.
    fn admit_waiting(&mut self, now: Nanos, from: &mut WriteSources<'_>, cx: &mut Context<'_>) {
        while let Some(pending) = self.admission.front() {
            match self.admission(now, &pending.request, &from.room()) {
                Admission::Now => {}
                Admission::At(_) | Admission::Blocked => break,
                Admission::Full => {
                    if from.config.when_full == WhenFull::Error
                        && from.destaging.gets_nowhere(from.health)
                    {
                        self.refuse_admission(RequestError::LogFull, from.port, cx);
                    }
                    break;
                }
            }
            let pending = self.admission.pop_front().expect("looked at");
            let waited = now.since(pending.since);
            let stats = &mut from.port.stats;
            stats.throttled_time = stats.throttled_time.plus(waited);
            self.admit(now, pending.id, pending.request, from, cx);
        }
    }

    fn admission(&self, now: Nanos, request: &Request, room: &Room<'_>) -> Admission {
        let log = room.log.get();
        let data_blocks = data_blocks(request);
        if room.log.is_given_up() {
            return Admission::Full;
        }
        if room.path.is_held_back(1 + data_blocks, room.pace.drains) {
            return Admission::Blocked;
        }
        if data_blocks == 0 && !room.index.takes_long() {
            return Admission::Blocked;
        }
        let oldest_pin = room.log.oldest_pin();
        if !log.has_room(data_blocks, oldest_pin) {
            // What is free but being read is there in a moment, unless the device is silent.
            let is_read = log.has_room(data_blocks, None) && !room.log_is_silent;
            return if is_read {
                Admission::Blocked
            } else {
                Admission::Full
            };
        }
        let lazy = !self.is_on_write(room.config.persist);
        let unpersisted = unpersisted_bytes(log);
        if log.flights() >= FLIGHTS_MAX
            || log.is_far_ahead(data_blocks)
            || (lazy
                && unpersisted > 0
                && unpersisted + data_blocks * BLOCK_BYTES as u64
                    > room.config.unpersisted_bytes_max)
        {
            return Admission::Blocked;
        }
        if room.throttle() > 0.0
            && let Some(at) = self.throttle.holds_until(now)
        {
            return Admission::At(at);
        }
        Admission::Now
    }

    fn admit(
        &mut self,
        now: Nanos,
        id: RequestId,
        request: Request,
        from: &mut WriteSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let room = from.room();
        let (fill, pace) = (room.throttle(), room.pace);
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
        if let Some(error) = from.damage.refusal_for_lost(range, from.direct.is_direct()) {
            return from.port.reply(id, reply_kind, Err(error), cx);
        }
        from.damage.note_written(range);
        let stored_before = from.port.stats.log_stored_bytes;
        let sequence = self.append(now, (kind, no_hole), range, data, from, cx);
        let stored = from.port.stats.log_stored_bytes - stored_before;
        let blocks = 1 + stored.div_ceil(BLOCK_BYTES as u64);
        from.direct.count_drained(blocks);
        if fill > 0.0 {
            self.throttle.schedule_next(now, fill, blocks, pace);
        }
        if fua || self.is_on_write(from.config.persist) {
            self.group_commit.came();
            self.waiters.wait(Waiter {
                until: sequence + 1,
                id,
                kind: reply_kind,
                fua,
            });
        } else {
            from.port.reply(id, reply_kind, Ok(Reply::Done), cx);
        }
    }

    fn append(
        &mut self,
        now: Nanos,
        (kind, no_hole): (EntryKind, bool),
        range: SectorRange,
        data: Option<Buf>,
        from: &mut WriteSources<'_>,
        cx: &Context<'_>,
    ) -> Sequence {
        let held_blocks = data.as_ref().map_or(0, Buf::held_blocks);
        self.resident.add(held_blocks);
        from.cached.own(range);
        let data = match (from.config.compression, data) {
            (Some(method), Some(data)) => {
                return from.append_compressed(now, range, data, method, cx);
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
        from.append_entry(now, entry, data_bytes, None)
    }

    // Spans.

    /// Seal and write spans as the policy of group commit says.
    pub(super) fn write_spans(
        &mut self,
        now: Nanos,
        from: &mut WriteSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if from.log.has_failed() || from.log.is_given_up() {
            return;
        }
        if self.should_seal(now, from) {
            from.log.get_mut().seal(now);
        }
        while let Some(write) = from.log.get_mut().next_write(SPANS_IN_FLIGHT_MAX) {
            from.port.stats.log_spans += 1;
            let bytes: usize = write.data.iter().map(|block| block.len()).sum();
            from.port.stats.log_written_bytes += bytes as u64;
            let way = self.group_commit.begun(now, write.end, bytes);
            (self.group_commit).brought(write.entries, write.entry_bytes);
            let token = from.port.begin(Op::Span { end: write.end });
            cx.actions.push(Action::LogWrite {
                token,
                offset: write.offset,
                data: write.data,
                way,
            });
        }
    }

    fn should_seal(&self, now: Nanos, from: &WriteSources<'_>) -> bool {
        let log = from.log.get();
        let Some(since) = log.open_since() else {
            return false;
        };
        let (flights, bytes) = (log.flights(), log.open_bytes());
        if flights >= SPANS_IN_FLIGHT_MAX {
            return false;
        }
        let is_client_waiting = (self.waiters.until()).is_some_and(|until| is_open(until, log));
        let is_awaited = from.destaging.wants_seal(log)
            || from.direct.path().is_draining()
            || from.phase == Phase::Closing
            || !self.admission.is_empty();
        let gathered = || {
            self.group_commit.is_enough(
                now,
                Gathered {
                    entries: log.open_entries(),
                    bytes,
                    since,
                    flights,
                    waiting: self.waiters.len(),
                },
            )
        };
        (is_awaited && flights == 0)
            || ((is_client_waiting || is_awaited) && gathered())
            || (flights == 0
                && bytes >= EARLY_SPAN_BYTES
                && self.flush_habit.is_often(log.bytes().appended))
            || bytes >= LAZY_SPAN_BYTES
            || now >= since.plus(lazy_age(from.config))
    }

    /// When the open span is written though nothing more comes, if a client waits for it.
    fn gathers_until(&self, log: &WriteLog) -> Option<Nanos> {
        let since = log.open_since().filter(|_| log.flights() == 0)?;
        let until = self.waiters.until()?;
        is_open(until, log).then(|| self.group_commit.until(since))
    }
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
        let health = &self.health;
        let refuses = health.refuses_writes_for_silent_log(self.config.when_full)
            || health.refuses_writes_for_copies();
        if refuses && !self.direct.is_direct() {
            // It would fill the log, and be told of an error all the same.
            return self.port.reply(id, Kind::Other, Err(RequestError::Io), cx);
        }
        if self.direct.is_direct() && self.writes.admission.is_empty() {
            let (direct, mut from) = self.direct_side();
            return direct.write(id, request, &mut from, cx);
        }
        let (writes, mut from) = self.write_side();
        writes.accept(now, id, request, &mut from, cx);
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
            let (direct, mut from) = self.direct_side();
            direct.write(pending.id, pending.request, &mut from, cx);
        }
        if self.direct.is_direct() {
            return;
        }
        if self.writes.waiting() > 0 {
            let (writes, mut from) = self.write_side();
            writes.admit_waiting(now, &mut from, cx);
        }
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
        self.writes.flush_habit.note_flush(appended);
        let log = self.log.get_mut();
        log.sync_point();
        let until = log.next_sequence();
        let (direct, mut from) = self.direct_side();
        if direct.flush(id, until, &mut from, cx) {
            return;
        }
        if self.log.get().durable_sequence() >= until {
            return self.port.reply(id, Kind::Flush, Ok(Reply::Done), cx);
        }
        self.writes.group_commit.came();
        self.writes.waiters.wait(Waiter {
            until,
            id,
            kind: Kind::Flush,
            fua: false,
        });
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
        let now = self.port.now;
        self.writes.group_commit.ended(now, end);
        if self.log.has_failed()
            || self.log.is_given_up()
            || !self.log.get_mut().span_written(now, end)
        {
            return;
        }
        self.writes.note_durable(now);
        self.answer_durable(cx);
        let bytes_max = self.config.resident_bytes_max;
        (self.writes.resident).trim(bytes_max, self.log.get_mut());
    }

    /// Answer what waited for what is durable now.
    pub(super) fn answer_durable(&mut self, cx: &mut Context<'_>) {
        let durable = self.log.get().durable_sequence();
        let waited = self.writes.waiters.len();
        let promised = (self.writes.waiters).answer(durable, &mut self.port, cx);
        let answered = waited - self.writes.waiters.len();
        self.writes.group_commit.answered(self.port.now, answered);
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
        self.direct.refuse_unmarked(&mut self.port, cx);
        if self.log.is_given_up() {
            (self.direct).refuse(RequestError::ReadOnly, &mut self.port, cx);
        }
    }

    /// Refuse what waits for the log.
    pub(super) fn refuse_what_waits(&mut self, cx: &mut Context<'_>) {
        self.writes
            .waiters
            .refuse(RequestError::Io, &mut self.port, cx);
        self.writes
            .refuse_admission(RequestError::ReadOnly, &mut self.port, cx);
        // What these reads wait for will not become durable; memory has it.
        let (reads, mut from) = self.read_side();
        reads.wake_durable_reads(Sequence::MAX, &mut from, cx);
    }

    /// Refuse every write and flush that is not answered yet.
    pub(super) fn refuse_unanswered_writes(&mut self, error: RequestError, cx: &mut Context<'_>) {
        self.writes.waiters.refuse(error, &mut self.port, cx);
        self.writes.refuse_admission(error, &mut self.port, cx);
        self.direct.refuse(error, &mut self.port, cx);
    }

    /// When a superblock is to say where the log ends; none: nothing has to be said, or it cannot be now.
    fn end_mark_at(&self) -> Option<Nanos> {
        let can_be_now = self.phase == Phase::Open
            && self.log.takes_superblocks()
            && !self.port.is_fenced()
            && !self.direct.writes_superblock(&self.writes, &self.destaging);
        if can_be_now && self.writes.tells_tail() {
            return Some(self.port.now);
        }
        let is_due = can_be_now && self.log.get().end_is_unproven();
        is_due.then(|| self.writes.durable_since.plus(END_MARK_AGE))
    }

    /// Have a superblock say where the log ends, once nothing that follows will.
    pub(super) fn mark_end(&mut self, now: Nanos, cx: &mut Context<'_>) {
        if self.end_mark_at().is_none_or(|at| now < at) {
            return;
        }
        self.writes.marks_end = true;
        self.writes.is_same = self.writes.tells_tail();
        let log = self.log.get_mut();
        log.name_durable();
        let superblock = log.superblocks_mut().next();
        self.log
            .write_superblock(Op::EndMark, superblock, &mut self.port, cx);
    }

    pub(super) fn end_was_marked(&mut self, result: Result<Done, IoError>, cx: &mut Context<'_>) {
        self.writes.marks_end = false;
        if result.is_ok() {
            let same = u8::from(core::mem::take(&mut self.writes.is_same));
            self.writes.same_superblocks_left -= same;
            self.log.superblock_ended();
        } else {
            self.superblock_failed(cx);
        }
    }

    /// Whether an acknowledgement waits for durability at present.
    pub(super) fn is_on_write(&self) -> bool {
        self.writes.is_on_write(self.config.persist)
    }

    /// Spans may be made durable in these ways from now on; before this is said, as the driver pleases.
    pub fn set_durable_ways(&mut self, ways: DurableWays) {
        self.writes.set_durable_ways(ways);
    }

    /// How spans are made durable at present, but for trials.
    pub fn durable_way(&self) -> Option<DurableWay> {
        self.writes.durable_way()
    }

    /// How long clients with much under way need not be heard, while a span is being written that some of them wait for;
    /// 0 if there is none.
    pub fn deaf_time(&self) -> Nanos {
        let is_written = self.log.if_open().is_some_and(|log| log.flights() > 0);
        if !is_written || self.writes.waiters.len() == 0 {
            return Nanos(0);
        }
        self.writes.group_commit.deaf_time()
    }

    pub(super) fn write_wakeup(&self) -> Option<Nanos> {
        let log = self.log.get();
        if self.direct.is_direct() && !self.writes.admission.is_empty() {
            return Some(self.port.now);
        }
        if self.log.has_failed() || self.log.is_given_up() {
            return None;
        }
        let gathers = self.writes.gathers_until(log);
        let lazy = log
            .open_since()
            .filter(|_| log.flights() < SPANS_IN_FLIGHT_MAX)
            .map(|since| since.plus(lazy_age(&self.config)));
        let admission = self.writes.admission.front().and_then(|pending| {
            match self
                .writes
                .admission(Nanos(0), &pending.request, &self.room())
            {
                Admission::At(when) => Some(when),
                Admission::Now | Admission::Blocked | Admission::Full => None,
            }
        });
        [gathers, lazy, admission, self.end_mark_at()]
            .into_iter()
            .flatten()
            .min()
    }
}

/// Blocks of data that a request brings.
fn data_blocks(request: &Request) -> u64 {
    match request {
        Request::Write { range, .. } => range.block_count(),
        _ => 0,
    }
}

/// Bytes acknowledged, or about to be, that are not durable.
pub(super) fn unpersisted_bytes(log: &WriteLog) -> u64 {
    let bytes = log.bytes();
    bytes.appended - bytes.durable
}

/// A span that nobody waits for is written at this age: early enough to be durable in time.
fn lazy_age(config: &VolumeConfig) -> Nanos {
    Nanos(config.unpersisted_age_max.0 / 2)
}

/// Whether the entry before `until` is in the open span.
fn is_open(until: Sequence, log: &WriteLog) -> bool {
    until
        > log
            .spans()
            .back()
            .map_or(log.first_sequence(), |span| span.end_sequence)
}

/// Share of the log in use, from 0 to 1.
pub(super) fn log_fill(log: &WriteLog) -> f64 {
    log.used_blocks() as f64 / log.prepared_blocks() as f64
}
