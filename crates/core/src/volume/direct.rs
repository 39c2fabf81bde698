//! Writes past the log, for every policy but write-back: straight to the backend, which is what
//! acknowledges them, as a disk with a cache does. And the way from one to the other.
//!
//! ```text
//!           direct policy              log empty
//!  Logged ────────────────► Draining ────────────► Direct ◄───┐ direct policy
//!    ▲ ▲                       │                      │        │
//!    │ └───── write-back ──────┘           write-back └──► Returning
//!    └──────────── no direct write is under way ───────────────┘
//! ```
//!
//! Invariants:
//! 1. A direct write begins only while the log holds nothing: so the backend stays a prefix.
//! 2. Before it is submitted, the cache has forgotten its range, durably: no restart brings back what
//!    it replaces. From then until it ends, what is fetched of its range is not cached.
//! 3. Direct writes that overlap follow one another in the order of arrival.
//! 4. A client's flush ends after a flush of the backend that began after every direct write which was
//!    acknowledged before, whatever the policy is by then. A flush that failed is told once to whoever
//!    waits for it, or else to the next one who flushes, and what it was to cover leaves the cache.
//! 5. What the backend was given and has not flushed is not put on the SSD tier, which would keep it when
//!    the backend loses it.
//! 6. Before the first is submitted, the log's superblock says durably that the backend may hold what it has
//!    not flushed, and says so until a flush has covered them all: an opening that finds that begins as if
//!    all was written and not flushed.
//!
//! While the log drains, writes still go through it and are acknowledged by it: admitted at a share of
//! the rate of destage, so that what is left shrinks, and a quota for each round makes that certain. For
//! the last step they wait, for about one generation of destage.

mod flushes;
mod mark;
mod path;
mod queue;

use flushes::{BackendFlushes, Flusher};
use mark::UnflushedMark;
pub(super) use path::WritePath;
use queue::{DirectWrites, What, Write};

use super::port::Kind;
use super::read::{block_of, whole_blocks_of};
use super::write::Waiter;
use super::{Context, Phase, Policy, Volume};
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Done, Nanos, Reply, Request, RequestId, SectorRange};
use crate::cache::{ReadCache, Tie};
use crate::log::destage::Stage;
use crate::log::extent_index::Sequence;

/// While it drains, writes are admitted as if the log were filled so far between the threshold and its
/// end: at a third of the rate of destage.
pub(super) const DRAIN_FILL: f64 = 0.75;
/// The rate of destage that is assumed at least while it drains: what was measured on a few small
/// generations says little.
pub(super) const DRAIN_RATE_BLOCKS_MIN: f64 = 2048.0;
/// The direct side of a volume.
#[derive(Debug, Default)]
pub(super) struct Direct {
    path: WritePath,
    writes: DirectWrites,
    flushes: BackendFlushes,
    mark: UnflushedMark,
}

impl Direct {
    /// Where writes go.
    pub(super) fn path(&self) -> &WritePath {
        &self.path
    }

    /// Whether writes go past the log.
    pub(super) fn is_direct(&self) -> bool {
        self.path.is_direct()
    }

    /// Whether a write overlaps a range and has not ended.
    pub(super) fn overlaps(&self, range: SectorRange) -> bool {
        self.writes.overlaps(range)
    }

    /// Whether what is fetched of a range now may be replaced before it comes.
    pub(super) fn is_changing(&self, range: SectorRange) -> bool {
        self.writes.is_changing(range)
    }

    /// Whether the backend may still lose what it holds of a range.
    pub(super) fn is_unflushed(&self, range: SectorRange) -> bool {
        self.flushes.is_unflushed(range)
    }

    /// What taking a write costs: it is compared with all that have not ended.
    pub(super) fn push_looks(&self) -> usize {
        self.writes.push_looks()
    }

    /// So many blocks were admitted to the log.
    pub(super) fn count_drained(&mut self, blocks: u64) {
        self.path.count_drained(blocks);
    }

    /// Whether a superblock is being written that says that the backend may hold what it has not flushed.
    pub(super) fn is_being_marked(&self) -> bool {
        self.mark.is_being_written()
    }

    /// A `DestageAll` covers what was written past the log.
    pub(super) fn want_destage_all(&mut self) {
        self.flushes.want_destage_all();
    }

    /// Whether a `DestageAll` waits for a flush.
    pub(super) fn is_destaging_all(&self) -> bool {
        self.flushes.is_destaging_all()
    }

    /// No `DestageAll` waits any more.
    pub(super) fn cancel_destage_all(&mut self) {
        self.flushes.cancel_destage_all();
    }

    /// Whether destage's flush has to wait for one that is under way.
    pub(super) fn is_flushing(&self) -> bool {
        self.flushes.is_running()
    }

    /// What was looked at so far, where that is counted.
    pub(super) fn work(&self) -> u64 {
        self.flushes.work() + self.writes.work()
    }

    /// Memory of its tables in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.flushes.memory_bytes()
    }
}

impl Volume {
    /// The policy in effect. It differs from the configuration's while the log is still being emptied, or
    /// direct writes end.
    pub fn policy(&self) -> Policy {
        self.direct.path.policy()
    }

    /// Whether the backend was given writes past the log that it has not flushed.
    pub fn owes_flush(&self) -> bool {
        !self.direct.flushes.is_flushed()
    }

    /// Dirty bytes that are to be destaged before the policy of the configuration is in effect; at least
    /// 1 until it is.
    pub(super) fn policy_remaining_bytes(&self) -> u64 {
        let is_given_up = self.log.is_given_up();
        (self.direct.path).remaining_bytes(self.config.policy, is_given_up, self.log.if_open())
    }

    /// The configuration has changed.
    pub(super) fn policy_changed(&mut self, cx: &mut Context<'_>) {
        if self.config.policy.is_direct() {
            self.direct.path.set_direct_policy(self.config.policy);
        } else if self.log.is_given_up() {
            self.direct.path.set_direct_policy(Policy::WriteThrough);
        }
        if self.config.policy == Policy::ReadOnly {
            self.writes
                .refuse_admission(RequestError::Policy, &mut self.port, cx);
        }
    }

    /// The volume was opened. What an earlier opening has written past the log may not be flushed: its
    /// superblock says so, or under such a policy may be of a program that did not know how.
    pub(super) fn open_policy(&mut self, cx: &mut Context<'_>) {
        self.policy_changed(cx);
        let is_marked = self.log.get().superblocks().is_marked_unflushed();
        // A log that was made in place of another one says of that one that it may be unflushed, and nothing of caches.
        if is_marked && self.log.get().superblocks().tie() == Tie::UNKNOWN {
            self.direct.mark.found();
        }
        if is_marked || self.config.policy.is_direct() {
            let whole = SectorRange::new(0, self.sectors());
            self.direct.flushes.note_unflushed(whole, self.port.now);
            self.direct.flushes.want_flush();
        }
        self.switch_path();
    }

    /// The log's device has failed: once the log is empty, writes go past it, as under write-through.
    pub(super) fn leave_write_back(&mut self) {
        if !self.config.policy.is_direct() {
            self.direct.path.set_direct_policy(Policy::WriteThrough);
        }
        self.switch_path();
    }

    /// Take the next steps towards the policy of the configuration.
    pub(super) fn switch_path(&mut self) {
        let asks_direct = self.config.policy.is_direct() && self.damage.lost().is_empty();
        let wants_direct = asks_direct || self.log.is_given_up();
        let destage = self.destaging.generation();
        (self.direct.path).switch(wants_direct, self.log.get(), destage);
        if self.direct.path.is_returning()
            && self.direct.writes.is_empty()
            && !self.direct.flushes.fua_waits()
        {
            self.direct.path.return_to_log();
            self.direct.flushes.want_flush();
        }
    }

    /// Whether the log is being emptied, and can be.
    pub(super) fn drains(&self) -> bool {
        self.direct.path.is_draining() && !self.damage.is_damaged() && !self.destage_gets_nowhere()
    }

    /// Whether the last generation of a drain waits for what is on its way to the log.
    pub(super) fn awaits_last_spans(&self) -> bool {
        self.direct.path.awaits_last_spans(self.log.get())
            && self.drains()
            && !self.log.has_failed()
            && !self.log.is_given_up()
    }

    // Writes.

    /// Take a write, past the log.
    pub(super) fn write_directly(&mut self, id: RequestId, request: Request, cx: &mut Context<'_>) {
        let (range, fua, what) = match request {
            Request::Write { range, data, fua } => (range, fua, What::Data(data)),
            Request::WriteZeroes {
                range,
                fua,
                no_hole,
            } => (range, fua, What::Zero { unmap: !no_hole }),
            Request::Discard { range, fua } => (range, fua, What::Zero { unmap: true }),
            _ => unreachable!("only writes are written"),
        };
        let kind = match what {
            What::Data(_) => Kind::Write(range.bytes() as u64),
            What::Zero { .. } => Kind::Trim,
        };
        if let Some(error) = self.damage.refusal_for_lost(range, self.direct.is_direct()) {
            return self.port.reply(id, kind, Err(error), cx);
        }
        let write = Write::new(id, kind, range, what, fua);
        self.direct.writes.push(write);
        self.start_ready(cx);
    }

    fn start_direct(&mut self, number: u64, range: SectorRange, cx: &mut Context<'_>) {
        self.direct.flushes.note_write(range, self.port.now);
        self.cached.own(range);
        self.cached.invalidate(range, cx);
        self.mark_fetches_stale(range);
        let barrier = cx.cache.barrier();
        if cx.cache.persisted() >= barrier && self.direct.mark.is_set() {
            return self.direct.writes.submit(number, &mut self.port, cx);
        }
        self.direct.writes.prepare(number, barrier);
        self.mark_log(cx);
    }

    /// Have the log say that the backend may hold what it has not flushed, unless it does.
    pub(super) fn mark_log(&mut self, cx: &mut Context<'_>) {
        if !self.writes_superblock() {
            (self.direct.mark).write(&mut self.log, &mut self.port, cx);
        }
    }

    /// Whether destage has to wait until the superblock of a failed log says the same: what only memory has is not
    /// replayed over what the cache holds.
    pub(super) fn awaits_mark(&self) -> bool {
        self.is_emptying_failed_log() && !self.direct.mark.is_set()
    }

    /// The log says so, or it cannot be known what it says. The writes that wait go on at the next poll.
    pub(super) fn direct_was_marked(
        &mut self,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        if result.is_ok() {
            self.log.superblock_ended();
            // Another owner may have the log of a volume that is fenced.
            let is_whole = !self.log.is_given_up() && !self.port.is_fenced();
            return (self.direct.mark).written(is_whole, &mut self.log, &mut self.port, cx);
        }
        if self.superblock_failed(cx) {
            // The writes wait until it can be kept.
            self.direct.mark.unset();
        }
    }

    /// The log takes no mark any more: what waits for it is refused.
    pub(super) fn refuse_unmarked(&mut self, cx: &mut Context<'_>) {
        if !self.direct.mark.is_set() {
            self.refuse_direct(RequestError::ReadOnly, cx);
        }
    }

    /// Before a superblock is made for another reason: it says what is so now of the backend and of the cache.
    pub(super) fn keep_mark(&mut self, cache: &ReadCache) {
        // What only memory has of a failed log is in the backend before a superblock can follow that says so.
        let is_unflushed = !self.direct.flushes.is_flushed() || self.is_emptying_failed_log();
        let tie = if is_unflushed {
            Tie::UNKNOWN
        } else {
            cache.tie_of(self.config.number)
        };
        let superblocks = self.log.get_mut().superblocks_mut();
        superblocks.mark_unflushed(is_unflushed);
        superblocks.set_tie(tie);
        if !self.is_emptying_failed_log() && !self.log.is_given_up() {
            self.log.get_mut().name_durable();
        }
        if !is_unflushed {
            self.direct.mark.unset();
        }
    }

    pub(super) fn direct_was_written(
        &mut self,
        number: u64,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let write = self.direct.writes.pop(number);
        let Write { id, kind, fua, .. } = write;
        if self.port.is_fenced() {
            self.port.reply(id, kind, Err(RequestError::Fenced), cx);
        } else if result.is_err() {
            self.port.stats.backend_errors += 1;
            self.port.reply(id, kind, Err(RequestError::Io), cx);
        } else {
            self.keep_written(&write, cx);
            if fua {
                let until = 0;
                self.direct.flushes.wait(Flusher { id, kind, until });
                self.begin_flush(cx);
            } else {
                self.port.reply(id, kind, Ok(Reply::Done), cx);
            }
        }
        self.start_ready(cx);
    }

    /// What write-through has written is what the backend shows now.
    fn keep_written(&mut self, write: &Write, cx: &mut Context<'_>) {
        let What::Data(data) = &write.what else {
            return;
        };
        self.port.stats.direct_bytes += write.range.bytes() as u64;
        let policy = if self.log.is_given_up() {
            self.direct.path.direct_policy()
        } else {
            self.config.policy
        };
        if policy != Policy::WriteThrough {
            return;
        }
        for block in whole_blocks_of(write.range) {
            let data = block_of(data, write.range, block);
            cx.cache.fill_block(self.cached.own_key(block), &data);
        }
    }

    /// Start what waits for nothing but its turn.
    fn start_ready(&mut self, cx: &mut Context<'_>) {
        let started_max = self.config.destage_depth_max.max(1);
        while let Some((number, range)) = self.direct.writes.start_next(started_max) {
            self.start_direct(number, range, cx);
        }
    }

    /// Refuse the writes that wait until the log says that they go past it.
    pub(super) fn refuse_what_mark_delays(&mut self, error: RequestError, cx: &mut Context<'_>) {
        if !self.direct.mark.is_set() {
            (self.direct.writes).refuse_unsubmitted(error, &mut self.port, cx);
        }
    }

    /// Refuse the flushes that wait for a generation of which the backend has a part, and destage not all yet.
    pub(super) fn refuse_flushes_behind_destage(
        &mut self,
        error: RequestError,
        cx: &mut Context<'_>,
    ) {
        if self.awaits_destage_flush() && self.destaging.generation().stage() != Stage::Flushing {
            (self.direct.flushes).refuse(error, &mut self.port, cx);
        }
    }

    /// Refuse what the backend was not asked for yet.
    pub(super) fn refuse_direct(&mut self, error: RequestError, cx: &mut Context<'_>) {
        (self.direct.writes).refuse_unsubmitted(error, &mut self.port, cx);
        for flusher in self.direct.flushes.take_waiting() {
            let error = match (flusher.kind, error) {
                (Kind::Flush, _) | (_, RequestError::Fenced) => error,
                // The backend has this write, perhaps not durably: it must not pass for one that never was.
                _ => RequestError::Io,
            };
            self.port.reply(flusher.id, flusher.kind, Err(error), cx);
        }
    }

    // Flushes.

    /// A client's flush has to flush the backend too, or to say what an earlier one has lost.
    pub(super) fn flush_directly(
        &mut self,
        id: RequestId,
        until: Sequence,
        cx: &mut Context<'_>,
    ) -> bool {
        let kind = Kind::Flush;
        if self.direct.flushes.take_lost() {
            self.port.reply(id, kind, Err(RequestError::Io), cx);
            return true;
        }
        if self.direct.flushes.is_flushed() {
            return false;
        }
        self.direct.flushes.wait(Flusher { id, kind, until });
        self.begin_flush(cx);
        true
    }

    /// Whether a flush has to wait for destage's own: one of the backend is under way at a time, for a failure is
    /// told to one of them and may have lost what both were to cover. And of an atomic backend it would show a
    /// part of a generation, which destage's will show as a whole.
    fn awaits_destage_flush(&self) -> bool {
        self.destaging.generation().stage() == Stage::Flushing
            || self.config.backend_atomic && self.destaging.generation().has_unflushed()
    }

    /// Whether destage waits for a flush that would show a part of what it writes.
    pub(super) fn holds_destage(&self) -> bool {
        self.config.backend_atomic && self.direct.flushes.is_running()
    }

    /// Flush the backend, unless that is under way: what comes meanwhile shares the next one.
    fn begin_flush(&mut self, cx: &mut Context<'_>) {
        let waits = self.direct.flushes.is_running() || self.awaits_destage_flush();
        if !waits && !self.port.is_fenced() {
            let under_way = self.direct.writes.ranges_under_way();
            (self.direct.flushes).begin(under_way, &mut self.port, cx);
        }
    }

    pub(super) fn direct_was_flushed(
        &mut self,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let running = self.direct.flushes.end();
        if self.port.is_fenced() {
            for Flusher { id, kind, .. } in running.flushers {
                self.port.reply(id, kind, Err(RequestError::Fenced), cx);
            }
            return;
        }
        if result.is_ok() {
            (self.direct.flushes).flushed(running.covers, self.port.now);
            for flusher in running.flushers {
                self.end_flush(flusher, cx);
            }
        } else {
            self.port.stats.backend_errors += 1;
            // Whoever waits for the next flush waits for what this one may have lost as well.
            let (waiting, tell_next) = self.direct.flushes.failed(&running);
            self.lose_unflushed(tell_next, cx);
            self.destaging.generation_mut().doubt();
            let is_wanted = running.wanted;
            for Flusher { id, kind, .. } in running.flushers.into_iter().chain(waiting) {
                self.port.reply(id, kind, Err(RequestError::Io), cx);
            }
            self.direct.flushes.pause(is_wanted, self.port.now);
        }
        if self.direct.flushes.is_awaited() {
            self.begin_flush(cx);
        }
    }

    /// The backend has flushed; what of the log goes with it has to be durable too.
    fn end_flush(&mut self, flusher: Flusher, cx: &mut Context<'_>) {
        let Flusher { id, kind, until } = flusher;
        let log = self.log.get();
        if self.log.has_failed() {
            let error = match kind {
                Kind::Flush => RequestError::ReadOnly,
                // The backend has this write.
                _ => RequestError::Io,
            };
            return self.port.reply(id, kind, Err(error), cx);
        }
        if log.durable_sequence() >= until {
            return self.port.reply(id, kind, Ok(Reply::Done), cx);
        }
        self.writes.waiters.wait(Waiter {
            until,
            id,
            kind,
            fua: false,
        });
    }

    /// A flush of the backend has failed: what it was given and had not flushed may be gone.
    pub(super) fn lose_unflushed(&mut self, tell_next: bool, cx: &mut Context<'_>) {
        let lost = self.direct.flushes.lose(tell_next);
        if lost.is_empty() {
            return;
        }
        for range in lost {
            self.cached.invalidate(range, cx);
            self.filling.note_forgotten(range, self.port.now);
        }
        self.reads.forget_fetches();
    }

    /// Destage has flushed the backend, or could not. No direct write was under way.
    pub(super) fn destage_flush_ended(&mut self, ok: bool, cx: &mut Context<'_>) {
        if ok && !self.direct.flushes.is_running() && self.direct.writes.is_empty() {
            self.direct.flushes.all_flushed(self.port.now);
            for flusher in self.direct.flushes.take_waiting() {
                self.end_flush(flusher, cx);
            }
        } else if !ok {
            let waiting = self.direct.flushes.take_waiting();
            self.lose_unflushed(waiting.is_empty(), cx);
            for Flusher { id, kind, .. } in waiting {
                self.port.reply(id, kind, Err(RequestError::Io), cx);
            }
        }
    }

    // Polling, closing.

    /// Submit what is prepared; flush what is due.
    pub(super) fn poll_direct(&mut self, cx: &mut Context<'_>) {
        if self.port.is_fenced() {
            return;
        }
        if self.never_flushes_destaged() && self.awaits_destage_flush() {
            let error = if self.damage.is_damaged() {
                RequestError::Inconsistent
            } else {
                RequestError::Closing
            };
            (self.direct.flushes).refuse(error, &mut self.port, cx);
        }
        if self.direct.writes.has_started() && !self.log.has_failed() {
            // It may have had to wait for another superblock.
            self.mark_log(cx);
        }
        let persisted = cx.cache.persisted();
        if self.direct.writes.has_started() && self.direct.mark.is_set() {
            for number in self.direct.writes.prepared(persisted) {
                self.direct.writes.submit(number, &mut self.port, cx);
            }
        }
        let (sectors, age_max) = (self.sectors(), self.config.dirty_age_max);
        let is_due = (self.direct.flushes).poll(sectors, age_max, self.port.now);
        if is_due && self.phase == Phase::Open {
            self.begin_flush(cx);
        }
    }

    pub(super) fn direct_wakeup(&self) -> Option<Nanos> {
        if self.port.is_fenced() || self.phase != Phase::Open || self.awaits_destage_flush() {
            return None;
        }
        (self.direct.flushes).wakeup(self.config.dirty_age_max, self.port.now)
    }

    /// Whether a close has to wait for the backend's flush. It is tried once: nobody was promised more.
    pub(super) fn flushes_at_close(&mut self, cx: &mut Context<'_>) -> bool {
        let waits = self.port.is_fenced() || self.awaits_destage_flush();
        if waits || !self.direct.flushes.may_close() {
            return false;
        }
        self.direct.flushes.close();
        self.begin_flush(cx);
        true
    }

    /// Assert what must always hold.
    pub(super) fn check_direct(&self) {
        let direct = &self.direct;
        direct.writes.check(direct.mark.is_set());
        (direct.path).check(self.log.get(), !direct.writes.is_empty());
    }
}
