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
mod sources;

use alloc::rc::Rc;

use flushes::{BackendFlushes, Flusher};
use mark::UnflushedMark;
pub(super) use path::WritePath;
use queue::{DirectWrites, What, Write};
use sources::DirectSources;

use super::damage::Damage;
use super::destaging::Destaging;
use super::health::Health;
use super::open_log::OpenLog;
use super::port::{Kind, Port};
use super::read::{block_of, whole_blocks_of};
use super::write::Writes;
use super::{Context, Phase, Policy, VolumeConfig};
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Done, Nanos, Reply, Request, RequestId, SectorRange};
use crate::cache::{ReadCache, Tie};
use crate::log::budget::IndexBudget;
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

    /// Its memory is of this budget.
    pub(super) fn set_budget(&mut self, budget: &Rc<IndexBudget>) {
        self.flushes.set_budget(budget);
    }

    /// Memory of its tables in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.flushes.memory_bytes()
    }

    // The policy.

    /// The policy in effect. It differs from the configuration's while the log is still being emptied, or
    /// direct writes end.
    pub(super) fn policy(&self) -> Policy {
        self.path.policy()
    }

    /// Whether the backend was given writes past the log that it has not flushed.
    pub(super) fn owes_flush(&self) -> bool {
        !self.flushes.is_flushed()
    }

    /// Dirty bytes that are to be destaged before the policy of the configuration is in effect; at least
    /// 1 until it is.
    pub(super) fn policy_remaining_bytes(&self, policy: Policy, log: &OpenLog) -> u64 {
        (self.path).remaining_bytes(policy, log.is_given_up(), log.if_open())
    }

    /// The configuration has changed.
    pub(super) fn policy_changed(&mut self, from: &mut DirectSources<'_>, cx: &mut Context<'_>) {
        if from.config.policy.is_direct() {
            self.path.set_direct_policy(from.config.policy);
        } else if from.log.is_given_up() {
            self.path.set_direct_policy(Policy::WriteThrough);
        }
        if from.config.policy == Policy::ReadOnly {
            from.writes
                .refuse_admission(RequestError::Policy, from.port, cx);
        }
    }

    /// The volume was opened. What an earlier opening has written past the log may not be flushed: its
    /// superblock says so, or under such a policy may be of a program that did not know how.
    pub(super) fn opened(&mut self, from: &mut DirectSources<'_>, cx: &mut Context<'_>) {
        self.policy_changed(from, cx);
        let is_marked = from.log.get().superblocks().is_marked_unflushed();
        // A log that was made in place of another one says of that one that it may be unflushed, and nothing of caches.
        if is_marked && from.log.get().superblocks().tie() == Tie::UNKNOWN {
            self.mark.found();
        }
        if is_marked || from.config.policy.is_direct() {
            let whole = SectorRange::new(0, from.sectors());
            self.flushes.note_unflushed(whole, from.port.now);
            self.flushes.want_flush();
        }
        self.switch_path(from);
    }

    /// The log's device has failed: once the log is empty, writes go past it, as under write-through.
    pub(super) fn leave_write_back(&mut self, from: &DirectSources<'_>) {
        if !from.config.policy.is_direct() {
            self.path.set_direct_policy(Policy::WriteThrough);
        }
        self.switch_path(from);
    }

    /// Take the next steps towards the policy of the configuration.
    pub(super) fn switch_path(&mut self, from: &DirectSources<'_>) {
        let asks_direct = from.config.policy.is_direct() && from.damage.lost().is_empty();
        let wants_direct = asks_direct || from.log.is_given_up();
        let destage = from.destaging.generation();
        (self.path).switch(wants_direct, from.log.get(), destage);
        if self.path.is_returning() && self.writes.is_empty() && !self.flushes.fua_waits() {
            self.path.return_to_log();
            self.flushes.want_flush();
        }
    }

    /// Whether the log is being emptied, and can be.
    pub(super) fn drains(&self, damage: &Damage, destaging: &Destaging, health: &Health) -> bool {
        self.path.is_draining() && !damage.is_damaged() && !destaging.gets_nowhere(health)
    }

    /// Whether the last generation of a drain waits for what is on its way to the log.
    pub(super) fn awaits_last_spans(
        &self,
        log: &OpenLog,
        damage: &Damage,
        destaging: &Destaging,
        health: &Health,
    ) -> bool {
        self.path.awaits_last_spans(log.get())
            && self.drains(damage, destaging, health)
            && !log.has_failed()
            && !log.is_given_up()
    }

    /// Whether what a failed log has is still on its way to the backend.
    pub(super) fn is_emptying_failed_log(&self, log: &OpenLog) -> bool {
        log.is_given_up() && !self.is_direct()
    }

    // Writes.

    /// Take a write, past the log.
    pub(super) fn write(
        &mut self,
        id: RequestId,
        request: Request,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) {
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
        if let Some(error) = from.damage.refusal_for_lost(range, self.is_direct()) {
            return from.port.reply(id, kind, Err(error), cx);
        }
        let write = Write::new(id, kind, range, what, fua);
        self.writes.push(write);
        self.start_ready(from, cx);
    }

    fn start(
        &mut self,
        number: u64,
        range: SectorRange,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) {
        self.flushes.note_write(range, from.port.now);
        from.cached.own(range);
        from.cached.invalidate(range, cx);
        (from.reads).mark_fetches_stale(range, from.filling, from.port.now);
        let barrier = cx.cache.barrier();
        if cx.cache.persisted() >= barrier && self.mark.is_set() {
            return self.writes.submit(number, from.port, cx);
        }
        self.writes.prepare(number, barrier);
        self.mark_log(from.writes, from.destaging, from.log, from.port, cx);
    }

    /// Have the log say that the backend may hold what it has not flushed, unless it does.
    pub(super) fn mark_log(
        &mut self,
        writes: &Writes,
        destaging: &Destaging,
        log: &mut OpenLog,
        port: &mut Port,
        cx: &mut Context<'_>,
    ) {
        if !self.writes_superblock(writes, destaging) {
            self.mark.write(log, port, cx);
        }
    }

    /// Whether a superblock is being written: the next one waits for it, so that one is whole whatever happens.
    pub(super) fn writes_superblock(&self, writes: &Writes, destaging: &Destaging) -> bool {
        self.mark.is_being_written()
            || writes.marks_end()
            || destaging.generation().stage() == Stage::Committing
    }

    /// Whether destage has to wait until the superblock of a failed log says the same: what only memory has is not
    /// replayed over what the cache holds.
    pub(super) fn awaits_mark(&self, log: &OpenLog) -> bool {
        self.is_emptying_failed_log(log) && !self.mark.is_set()
    }

    /// The log says so. The writes that wait go on at the next poll.
    pub(super) fn marked(&mut self, from: &mut DirectSources<'_>, cx: &mut Context<'_>) {
        from.log.superblock_ended();
        // Another owner may have the log of a volume that is fenced.
        let is_whole = !from.log.is_given_up() && !from.port.is_fenced();
        (self.mark).written(is_whole, from.log, from.port, cx);
    }

    /// It is not known what the log says: the writes wait until it can be kept.
    pub(super) fn mark_failed(&mut self) {
        self.mark.unset();
    }

    /// The log takes no mark any more: what waits for it is refused.
    pub(super) fn refuse_unmarked(&mut self, port: &mut Port, cx: &mut Context<'_>) {
        if !self.mark.is_set() {
            self.refuse(RequestError::ReadOnly, port, cx);
        }
    }

    /// Before a superblock is made for another reason: it says what is so now of the backend and of the cache.
    pub(super) fn keep_mark(&mut self, volume: u32, log: &mut OpenLog, cache: &ReadCache) {
        // What only memory has of a failed log is in the backend before a superblock can follow that says so.
        let is_unflushed = !self.flushes.is_flushed() || self.is_emptying_failed_log(log);
        let tie = if is_unflushed {
            Tie::UNKNOWN
        } else {
            cache.tie_of(volume)
        };
        let superblocks = log.get_mut().superblocks_mut();
        superblocks.mark_unflushed(is_unflushed);
        superblocks.set_tie(tie);
        if !log.is_given_up() {
            log.get_mut().name_durable();
        }
        if !is_unflushed {
            self.mark.unset();
        }
    }

    /// A write has ended.
    pub(super) fn was_written(
        &mut self,
        number: u64,
        result: Result<Done, IoError>,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let write = self.writes.pop(number);
        let Write { id, kind, fua, .. } = write;
        if from.port.is_fenced() {
            from.port.reply(id, kind, Err(RequestError::Fenced), cx);
        } else if result.is_err() {
            from.port.stats.backend_errors += 1;
            from.port.reply(id, kind, Err(RequestError::Io), cx);
        } else {
            self.keep_written(&write, from, cx);
            if fua {
                let until = 0;
                self.flushes.wait(Flusher { id, kind, until });
                self.begin_flush(from, cx);
            } else {
                from.port.reply(id, kind, Ok(Reply::Done), cx);
            }
        }
        self.start_ready(from, cx);
    }

    /// What write-through has written is what the backend shows now.
    fn keep_written(&self, write: &Write, from: &mut DirectSources<'_>, cx: &mut Context<'_>) {
        let What::Data(data) = &write.what else {
            return;
        };
        from.port.stats.direct_bytes += write.range.bytes() as u64;
        let policy = if from.log.is_given_up() {
            self.path.direct_policy()
        } else {
            from.config.policy
        };
        if policy != Policy::WriteThrough {
            return;
        }
        for block in whole_blocks_of(write.range) {
            let data = block_of(data, write.range, block);
            cx.cache.fill_block(from.cached.own_key(block), &data);
        }
    }

    /// Start what waits for nothing but its turn.
    fn start_ready(&mut self, from: &mut DirectSources<'_>, cx: &mut Context<'_>) {
        let started_max = from.config.destage_depth_max.max(1);
        while let Some((number, range)) = self.writes.start_next(started_max) {
            self.start(number, range, from, cx);
        }
    }

    /// Refuse the writes that wait until the log says that they go past it.
    pub(super) fn refuse_what_mark_delays(
        &mut self,
        error: RequestError,
        port: &mut Port,
        cx: &mut Context<'_>,
    ) {
        if !self.mark.is_set() {
            (self.writes).refuse_unsubmitted(error, port, cx);
        }
    }

    /// Refuse the flushes that wait for a generation of which the backend has a part, and destage not all yet.
    pub(super) fn refuse_flushes_behind_destage(
        &mut self,
        error: RequestError,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let is_flushing = from.destaging.generation().stage() == Stage::Flushing;
        if from.destaging.holds_flushes(from.config) && !is_flushing {
            (self.flushes).refuse(error, from.port, cx);
        }
    }

    /// Refuse what the backend was not asked for yet.
    pub(super) fn refuse(&mut self, error: RequestError, port: &mut Port, cx: &mut Context<'_>) {
        (self.writes).refuse_unsubmitted(error, port, cx);
        for flusher in self.flushes.take_waiting() {
            let error = match (flusher.kind, error) {
                (Kind::Flush, _) | (_, RequestError::Fenced) => error,
                // The backend has this write, perhaps not durably: it must not pass for one that never was.
                _ => RequestError::Io,
            };
            port.reply(flusher.id, flusher.kind, Err(error), cx);
        }
    }

    // Flushes.

    /// A client's flush has to flush the backend too, or to say what an earlier one has lost.
    pub(super) fn flush(
        &mut self,
        id: RequestId,
        until: Sequence,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) -> bool {
        let kind = Kind::Flush;
        if self.flushes.take_lost() {
            from.port.reply(id, kind, Err(RequestError::Io), cx);
            return true;
        }
        if self.flushes.is_flushed() {
            return false;
        }
        self.flushes.wait(Flusher { id, kind, until });
        self.begin_flush(from, cx);
        true
    }

    /// Whether destage writes nothing more for now: it waits for a flush that would show a part of what it writes, or
    /// for the mark of a failed log.
    pub(super) fn holds_destage(&self, config: &VolumeConfig, log: &OpenLog) -> bool {
        (config.backend_atomic && self.flushes.is_running()) || self.awaits_mark(log)
    }

    /// Flush the backend, unless that is under way: what comes meanwhile shares the next one.
    fn begin_flush(&mut self, from: &mut DirectSources<'_>, cx: &mut Context<'_>) {
        let waits = self.flushes.is_running() || from.destaging.holds_flushes(from.config);
        if !waits && !from.port.is_fenced() {
            let under_way = self.writes.ranges_under_way();
            (self.flushes).begin(under_way, from.port, cx);
        }
    }

    /// The flush under way has ended.
    pub(super) fn was_flushed(
        &mut self,
        result: Result<Done, IoError>,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let running = self.flushes.end();
        if from.port.is_fenced() {
            for Flusher { id, kind, .. } in running.flushers {
                from.port.reply(id, kind, Err(RequestError::Fenced), cx);
            }
            return;
        }
        if result.is_ok() {
            (self.flushes).flushed(running.covers, from.port.now);
            for flusher in running.flushers {
                from.end_flush(flusher, cx);
            }
        } else {
            from.port.stats.backend_errors += 1;
            // Whoever waits for the next flush waits for what this one may have lost as well.
            let (waiting, tell_next) = self.flushes.failed(&running);
            self.lose_unflushed(tell_next, from, cx);
            from.destaging.generation_mut().doubt();
            let is_wanted = running.wanted;
            for Flusher { id, kind, .. } in running.flushers.into_iter().chain(waiting) {
                from.port.reply(id, kind, Err(RequestError::Io), cx);
            }
            self.flushes.pause(is_wanted, from.port.now);
        }
        if self.flushes.is_awaited() {
            self.begin_flush(from, cx);
        }
    }

    /// A flush of the backend has failed: what it was given and had not flushed may be gone.
    fn lose_unflushed(
        &mut self,
        tell_next: bool,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let lost = self.flushes.lose(tell_next);
        if lost.is_empty() {
            return;
        }
        for range in lost {
            from.cached.invalidate(range, cx);
            from.filling.note_forgotten(range, from.port.now);
        }
        from.reads.forget_fetches();
    }

    /// Destage has flushed the backend, or could not. No direct write was under way.
    pub(super) fn destage_flush_ended(
        &mut self,
        ok: bool,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if ok && !self.flushes.is_running() && self.writes.is_empty() {
            self.flushes.all_flushed(from.port.now);
            for flusher in self.flushes.take_waiting() {
                from.end_flush(flusher, cx);
            }
        } else if !ok {
            let waiting = self.flushes.take_waiting();
            self.lose_unflushed(waiting.is_empty(), from, cx);
            for Flusher { id, kind, .. } in waiting {
                from.port.reply(id, kind, Err(RequestError::Io), cx);
            }
        }
    }

    // Polling, closing.

    /// Submit what is prepared; flush what is due. `holds_in_vain`: flushes wait for a generation that is not flushed any
    /// more.
    pub(super) fn poll(
        &mut self,
        holds_in_vain: bool,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if from.port.is_fenced() {
            return;
        }
        if holds_in_vain {
            let error = if from.damage.is_damaged() {
                RequestError::Inconsistent
            } else {
                RequestError::Closing
            };
            (self.flushes).refuse(error, from.port, cx);
        }
        if self.writes.has_started() && !from.log.has_failed() {
            // It may have had to wait for another superblock.
            self.mark_log(from.writes, from.destaging, from.log, from.port, cx);
        }
        let persisted = cx.cache.persisted();
        if self.writes.has_started() && self.mark.is_set() {
            for number in self.writes.prepared(persisted) {
                self.writes.submit(number, from.port, cx);
            }
        }
        let (sectors, age_max) = (from.sectors(), from.config.dirty_age_max);
        let is_due = (self.flushes).poll(sectors, age_max, from.port.now);
        if is_due && from.phase == Phase::Open {
            self.begin_flush(from, cx);
        }
    }

    /// When a poll of an open volume is due for its sake.
    pub(super) fn wakeup(
        &self,
        config: &VolumeConfig,
        destaging: &Destaging,
        port: &Port,
    ) -> Option<Nanos> {
        if port.is_fenced() || destaging.holds_flushes(config) {
            return None;
        }
        (self.flushes).wakeup(config.dirty_age_max, port.now)
    }

    /// Whether a close has to wait for the backend's flush. It is tried once: nobody was promised more.
    pub(super) fn flushes_at_close(
        &mut self,
        from: &mut DirectSources<'_>,
        cx: &mut Context<'_>,
    ) -> bool {
        let waits = from.port.is_fenced() || from.destaging.holds_flushes(from.config);
        if waits || !self.flushes.may_close() {
            return false;
        }
        self.flushes.close();
        self.begin_flush(from, cx);
        true
    }

    /// Assert what must always hold.
    pub(super) fn check(&self, log: &OpenLog) {
        self.writes.check(self.mark.is_set());
        self.path.check(log.get(), !self.writes.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::base::buf::Pool;
    use crate::base::io::Action;
    use crate::cache::CacheConfig;
    use crate::format::LogSuperblock;
    use crate::log::write_log::WriteLog;
    use crate::volume::tests::config;

    /// A direct side beside a log that holds nothing.
    struct Rig {
        direct: Direct,
        log: OpenLog,
        port: Port,
        config: VolumeConfig,
        actions: Vec<Action>,
    }

    impl Rig {
        fn new() -> Self {
            let config = config();
            let superblock = LogSuperblock::new(config.uuid, 1, config.log_bytes);
            let mut log = OpenLog::default();
            log.opened(WriteLog::new(superblock, None));
            Self {
                direct: Direct::default(),
                log,
                port: Port::new(&config, Nanos(1_000), Nanos(0)),
                config,
                actions: Vec::new(),
            }
        }

        /// What a step has asked for.
        fn with(&mut self, step: impl FnOnce(&mut Self, &mut Context<'_>)) -> Vec<Action> {
            let pool = Pool::new(1 << 20);
            let cache = CacheConfig {
                dram_blocks: 0,
                ssd: None,
                ssd_answer_max: Nanos(1_000),
            };
            let mut actions = core::mem::take(&mut self.actions);
            let mut cache = ReadCache::new(cache, Nanos(0), pool.clone(), &mut actions);
            let mut cx = Context {
                cache: &mut cache,
                pool: &pool,
                actions: &mut actions,
            };
            step(self, &mut cx);
            drop(cx);
            actions
        }

        fn mark(&mut self) -> Vec<Action> {
            self.with(|rig, cx| {
                let (writes, destaging) = (Writes::default(), Destaging::default());
                (rig.direct).mark_log(&writes, &destaging, &mut rig.log, &mut rig.port, cx);
            })
        }
    }

    #[test]
    fn direct_refuses_a_write_that_the_backend_has_as_doubtful() {
        for (error, of_write) in [
            (RequestError::ReadOnly, RequestError::Io),
            (RequestError::Fenced, RequestError::Fenced),
        ] {
            let mut rig = Rig::new();
            for (id, kind) in [(1, Kind::Flush), (2, Kind::Write(512))] {
                rig.port.accept();
                let id = RequestId(id);
                rig.direct.flushes.wait(Flusher { id, kind, until: 0 });
            }
            let replies = rig.with(|rig, cx| rig.direct.refuse(error, &mut rig.port, cx));
            let results: Vec<_> = replies
                .into_iter()
                .map(|action| match action {
                    Action::Reply { request, result } => (request, result.err()),
                    other => panic!("{other:?}"),
                })
                .collect();
            let expected = [(RequestId(1), Some(error)), (RequestId(2), Some(of_write))];
            assert_eq!(results, expected);
        }
    }

    #[test]
    fn direct_holds_destage_of_a_failed_log_until_it_is_marked() {
        let mut rig = Rig::new();
        assert!(!rig.direct.holds_destage(&rig.config, &rig.log));
        rig.log.give_up();
        assert!(rig.direct.is_emptying_failed_log(&rig.log));
        assert!(rig.direct.holds_destage(&rig.config, &rig.log));
        let asked = rig.mark();
        assert!(
            matches!(asked[..], [Action::KeepSuperblock { .. }]),
            "{asked:?}"
        );
        let (writes, destaging) = (Writes::default(), Destaging::default());
        assert!(rig.direct.writes_superblock(&writes, &destaging));
        assert!(rig.mark().is_empty(), "one superblock is written at a time");
        rig.direct.mark_failed();
        assert_eq!(rig.mark().len(), 1, "it is tried again");
    }

    #[test]
    fn direct_holds_destage_of_an_atomic_backend_while_it_flushes() {
        let mut rig = Rig::new();
        rig.with(|rig, cx| {
            let none = core::iter::empty();
            rig.direct.flushes.begin(none, &mut rig.port, cx);
        });
        assert!(rig.direct.is_flushing());
        assert!(!rig.direct.holds_destage(&rig.config, &rig.log));
        rig.config.backend_atomic = true;
        assert!(rig.direct.holds_destage(&rig.config, &rig.log));
    }
}
