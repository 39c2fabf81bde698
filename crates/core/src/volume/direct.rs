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

mod queue;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::op::Op;
use super::port::Kind;
use super::read::{block_of, whole_blocks_of};
use super::{Context, Phase, Policy, Volume, Waiter};
use crate::base::buf::Buf;
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, Nanos, Reply, Request, RequestId, SectorRange};
use crate::base::limits::{SECTOR_BYTES, STEP_WORK_MAX};
use crate::base::work::Work;
use crate::cache::{Barrier, ReadCache, Tie};
use crate::log::destage::Stage;
use crate::log::extent_index::{ExtentIndex, Sequence};

/// Writes are held back for the rest of a drain once the log has no more blocks than these, or than
/// destage frees in this time.
const LAST_BLOCKS: u64 = 64;
const LAST_SECONDS: f64 = 0.005;
/// While it drains, writes are admitted as if the log were filled so far between the threshold and its
/// end: at a third of the rate of destage.
pub(super) const DRAIN_FILL: f64 = 0.75;
/// The rate of destage that is assumed at least while it drains: what was measured on a few small
/// generations says little.
pub(super) const DRAIN_RATE_BLOCKS_MIN: f64 = 2048.0;
/// The backend is flushed when more than this is not: as much as destage writes between two flushes.
const UNFLUSHED_BYTES_MAX: u64 = 64 << 20;
const UNFLUSHED_RUNS_MAX: usize = 8 << 10;
/// From so many runs on that a failed flush may have lost, the cache forgets what lies between them as well: it is
/// one range.
const LOST_RUNS_MAX: usize = 16;
/// First and longest pause after a flush that nobody waits for has failed.
const RETRY_MIN: Nanos = Nanos::from_millis(10);
const RETRY_MAX: Nanos = Nanos::from_millis(2000);

/// How far the log is from empty.
#[derive(Clone, Copy, Debug)]
struct Drain {
    /// The round ends when everything before this is retired.
    until: Sequence,
    /// Log blocks that may still be admitted in this round: half of what there was at its beginning.
    quota: u64,
    /// What is left is so little that writes wait for its end.
    last: bool,
}

/// Where writes go; see the module.
#[derive(Clone, Copy, Debug)]
enum Path {
    Logged,
    Draining(Drain),
    Direct,
    Returning,
}

#[derive(Debug)]
enum What {
    Data(Buf),
    Zero { unmap: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteStage {
    /// An earlier one overlaps it, or enough are under way.
    Waiting,
    /// The cache makes durable that it has forgotten the range, and the log that such writes began.
    Preparing(Barrier),
    /// The backend has it.
    Submitted,
}

/// A direct write that has not ended.
#[derive(Debug)]
struct Write {
    id: RequestId,
    kind: Kind,
    range: SectorRange,
    what: What,
    fua: bool,
    stage: WriteStage,
    /// Earlier ones that overlap it and have not ended.
    blockers: usize,
}

/// Who waits for a flush of the backend.
#[derive(Clone, Copy, Debug)]
struct Flusher {
    id: RequestId,
    kind: Kind,
    /// What of the log has to be durable as well.
    until: Sequence,
}

/// A flush of the backend under way.
#[derive(Debug)]
struct Running {
    flushers: Vec<Flusher>,
    /// It makes durable what was numbered before this.
    covers: Sequence,
    wanted: bool,
}

/// What the log's superblock says of the backend, on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    /// Nothing, as far as it is known.
    Unset,
    /// It is being written, to one superblock and then to the other: what damages one does not hide it.
    Writing {
        /// Whether it is the second one.
        again: bool,
    },
    /// The backend may hold writes past the log that it has not flushed.
    Set,
}

/// The direct side of a volume.
#[derive(Debug)]
pub(super) struct Direct {
    path: Path,
    /// The last one that was direct.
    policy: Policy,
    /// By order of arrival.
    writes: BTreeMap<u64, Write>,
    next: u64,
    /// Of them, those that wait for nothing but their turn.
    ready: BTreeSet<u64>,
    /// Those that do not wait.
    started: usize,
    /// What the backend was given and has not flushed, each run with a number that grows.
    unflushed: ExtentIndex,
    unflushed_bytes: u64,
    next_run: Sequence,
    mark: Mark,
    /// Since when the oldest of it is there.
    since: Nanos,
    flushers: Vec<Flusher>,
    running: Option<Running>,
    /// Looks at other writes.
    work: Work,
    /// A flush has failed that nobody waited for.
    lost: bool,
    /// The volume itself wants a flush.
    wanted: bool,
    /// A `DestageAll` waits until what was numbered before this is flushed.
    destage_all: Option<Sequence>,
    retry_at: Nanos,
    pause: Nanos,
    /// The flush of a close was tried.
    closed: bool,
}

impl Default for Direct {
    fn default() -> Self {
        Self {
            path: Path::Logged,
            policy: Policy::WriteThrough,
            writes: BTreeMap::new(),
            next: 0,
            ready: BTreeSet::new(),
            started: 0,
            unflushed: ExtentIndex::default(),
            unflushed_bytes: 0,
            next_run: 0,
            mark: Mark::Unset,
            since: Nanos(0),
            flushers: Vec::new(),
            running: None,
            work: Work::default(),
            lost: false,
            wanted: false,
            destage_all: None,
            retry_at: Nanos(0),
            pause: RETRY_MIN,
            closed: false,
        }
    }
}

impl Direct {
    /// Whether writes go past the log.
    pub(super) fn is_direct(&self) -> bool {
        matches!(self.path, Path::Direct)
    }

    /// Whether the log is being emptied.
    pub(super) fn is_draining(&self) -> bool {
        matches!(self.path, Path::Draining(_))
    }

    /// Whether a write overlaps a range and has not ended.
    pub(super) fn overlaps(&self, range: SectorRange) -> bool {
        let mut writes = self.writes.values();
        writes.any(|write| write.range.overlaps(range))
    }

    /// Whether what is fetched of a range now may be replaced before it comes.
    pub(super) fn is_changing(&self, range: SectorRange) -> bool {
        let mut writes = self.writes.values();
        self.started > 0
            && writes.any(|write| write.stage != WriteStage::Waiting && write.range.overlaps(range))
    }

    /// Whether the backend may still lose what it holds of a range.
    pub(super) fn is_unflushed(&self, range: SectorRange) -> bool {
        !self.unflushed.is_clear(range)
    }

    /// Whether a `DestageAll` waits for a flush.
    pub(super) fn is_destaging_all(&self) -> bool {
        self.destage_all.is_some()
    }

    pub(super) fn cancel_destage_all(&mut self) {
        self.destage_all = None;
    }

    /// The volume wants the backend flushed, if anything is not.
    fn want_flush(&mut self) -> bool {
        if self.unflushed.is_empty() {
            return false;
        }
        self.wanted = true;
        self.retry_at = Nanos(0);
        true
    }

    /// A `DestageAll` covers what was written past the log.
    pub(super) fn want_destage_all(&mut self) {
        self.destage_all = self.want_flush().then_some(self.next_run);
    }

    fn note_unflushed(&mut self, range: SectorRange, now: Nanos) {
        if self.unflushed.is_empty() {
            self.since = now;
        }
        if self.unflushed.takes_long() {
            self.unflushed.insert_long(range, self.next_run);
        } else {
            self.unflushed.insert(range, self.next_run);
        }
        self.next_run += 1;
    }

    /// What was looked at so far, where that is counted.
    pub(super) fn work(&self) -> u64 {
        self.unflushed.work() + self.work.units()
    }

    /// What was numbered before this is flushed.
    fn flushed(&mut self, covers: Sequence, now: Nanos) {
        if covers == self.next_run {
            self.unflushed = ExtentIndex::default();
        } else {
            let all = SectorRange::between(0, u64::MAX);
            self.unflushed.remove_some_before(all, covers, usize::MAX);
        }
        self.unflushed_bytes = 0;
        self.since = now;
        self.destage_all = self.destage_all.filter(|&upto| covers < upto);
        self.pause = RETRY_MIN;
    }
}

impl Volume {
    /// The policy in effect. It differs from the configuration's while the log is still being emptied, or
    /// direct writes end.
    pub fn policy(&self) -> Policy {
        match self.direct.path {
            Path::Logged | Path::Draining(_) => Policy::WriteBack,
            Path::Direct | Path::Returning => self.direct.policy,
        }
    }

    /// Whether the backend was given writes past the log that it has not flushed.
    pub fn owes_flush(&self) -> bool {
        !self.direct.unflushed.is_empty()
    }

    /// Dirty bytes that are to be destaged before the policy of the configuration is in effect; at least
    /// 1 until it is.
    pub(super) fn policy_remaining_bytes(&self) -> u64 {
        match self.direct.path {
            Path::Draining(_) => {
                let bytes = self.log.if_open().map(super::WriteLog::bytes);
                bytes.map_or(1, |bytes| (bytes.appended - bytes.retired).max(1))
            }
            Path::Returning => 1,
            Path::Logged => u64::from(self.config.policy.is_direct()),
            Path::Direct => {
                let returns = self.config.policy == Policy::WriteBack && !self.log.is_given_up();
                u64::from(returns)
            }
        }
    }

    /// The configuration has changed.
    pub(super) fn policy_changed(&mut self, cx: &mut Context<'_>) {
        if self.config.policy.is_direct() {
            self.direct.policy = self.config.policy;
        } else if self.log.is_given_up() {
            self.direct.policy = Policy::WriteThrough;
        }
        if self.config.policy == Policy::ReadOnly {
            self.refuse_waiting_writes(RequestError::Policy, cx);
        }
    }

    /// The volume was opened. What an earlier opening has written past the log may not be flushed: its
    /// superblock says so, or under such a policy may be of a program that did not know how.
    pub(super) fn open_policy(&mut self, cx: &mut Context<'_>) {
        self.policy_changed(cx);
        let is_marked = self.log.get().is_marked_unflushed();
        // A log that was made in place of another one says of that one that it may be unflushed, and nothing of caches.
        if is_marked && self.log.get().tie() == Tie::UNKNOWN {
            self.direct.mark = Mark::Set;
        }
        if is_marked || self.config.policy.is_direct() {
            let sectors = self.config.bytes / SECTOR_BYTES as u64;
            self.direct
                .note_unflushed(SectorRange::new(0, sectors), self.port.now);
            self.direct.want_flush();
        }
        self.switch_path();
    }

    /// The log's device has failed: once the log is empty, writes go past it, as under write-through.
    pub(super) fn leave_write_back(&mut self) {
        if !self.config.policy.is_direct() {
            self.direct.policy = Policy::WriteThrough;
        }
        self.switch_path();
    }

    /// Take the next steps towards the policy of the configuration.
    pub(super) fn switch_path(&mut self) {
        let asks_direct = self.config.policy.is_direct() && self.damage.lost().is_empty();
        let wants_direct = asks_direct || self.log.is_given_up();
        if let Path::Logged = self.direct.path
            && wants_direct
        {
            self.direct.path = Path::Draining(self.drain_round());
        }
        match self.direct.path {
            Path::Draining(_) if !wants_direct => self.direct.path = Path::Logged,
            Path::Draining(drain) => self.drain(drain),
            Path::Direct if !wants_direct => self.direct.path = Path::Returning,
            Path::Returning if wants_direct => self.direct.path = Path::Direct,
            _ => {}
        }
        if let Path::Returning = self.direct.path
            && self.direct.writes.is_empty()
            && !self.fua_waits()
        {
            self.direct.path = Path::Logged;
            self.direct.want_flush();
        }
    }

    /// Whether a direct write waits for a flush.
    fn fua_waits(&self) -> bool {
        let running = self.direct.running.iter().flat_map(|run| &run.flushers);
        let mut flushers = self.direct.flushers.iter().chain(running);
        flushers.any(|flusher| flusher.kind != Kind::Flush)
    }

    fn drain_round(&self) -> Drain {
        Drain {
            until: self.log.get().next_sequence(),
            quota: self.log.get().used_blocks() / 2,
            last: false,
        }
    }

    fn drain(&mut self, mut drain: Drain) {
        let log = self.log.get();
        let idle = self.destaging.generation().stage() == Stage::Idle;
        let is_empty = log.spans().is_empty() && log.open_since().is_none();
        if idle && is_empty {
            self.direct.path = Path::Direct;
            return;
        }
        if log.first_sequence() >= drain.until {
            drain = Drain {
                last: drain.last,
                ..self.drain_round()
            };
        }
        // What is held back from the beginning of a generation goes to the backend with it.
        if idle {
            let soon = (self.destaging.generation().rate_blocks() * LAST_SECONDS) as u64;
            drain.last = self.log.get().used_blocks() <= soon.max(LAST_BLOCKS);
        }
        self.direct.path = Path::Draining(drain);
    }

    /// Whether the log is being emptied, and can be.
    pub(super) fn drains(&self) -> bool {
        self.direct.is_draining() && !self.damage.is_damaged() && !self.destage_gets_nowhere()
    }

    /// Whether a write for so many log blocks has to wait for the policy to change.
    pub(super) fn is_held_back(&self, blocks: u64) -> bool {
        match self.direct.path {
            Path::Logged | Path::Direct => false,
            Path::Draining(drain) => self.drains() && (drain.last || blocks > drain.quota),
            Path::Returning => true,
        }
    }

    /// Whether the last generation of a drain waits for what is on its way to the log, so as to be the
    /// last.
    pub(super) fn awaits_last_spans(&self) -> bool {
        let log = self.log.get();
        matches!(self.direct.path, Path::Draining(Drain { last: true, .. }))
            && (log.flights() > 0 || log.open_since().is_some())
            && self.drains()
            && !self.log.has_failed()
            && !self.log.is_given_up()
    }

    /// So many blocks were admitted to the log.
    pub(super) fn count_drained(&mut self, blocks: u64) {
        if let Path::Draining(drain) = &mut self.direct.path {
            drain.quota = drain.quota.saturating_sub(blocks);
        }
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
        self.direct.push(Write {
            id,
            kind,
            range,
            what,
            fua,
            stage: WriteStage::Waiting,
            blockers: 0,
        });
        self.start_ready(cx);
    }

    fn start_direct(&mut self, number: u64, cx: &mut Context<'_>) {
        let range = self.direct.writes[&number].range;
        self.direct.started += 1;
        self.direct.note_unflushed(range, self.port.now);
        self.direct.unflushed_bytes += range.bytes() as u64;
        self.cached.own(range);
        self.cached.invalidate(range, cx);
        self.mark_fetches_stale(range);
        let barrier = cx.cache.barrier();
        if cx.cache.persisted() >= barrier && self.direct.mark == Mark::Set {
            return self.submit_direct(number, cx);
        }
        self.set_stage(number, WriteStage::Preparing(barrier));
        self.mark_log(cx);
    }

    /// Have the log say that the backend may hold what it has not flushed, unless it does.
    fn mark_log(&mut self, cx: &mut Context<'_>) {
        if self.direct.mark != Mark::Unset || self.writes_superblock() {
            return;
        }
        self.direct.mark = Mark::Writing { again: false };
        self.log.get_mut().mark_unflushed(true);
        // No superblock follows each of these writes that could say what the cache has forgotten for them.
        self.log.get_mut().set_tie(Tie::UNKNOWN);
        let superblock = self.log.get_mut().next_superblock();
        self.log
            .write_superblock(Op::DirectMark, superblock, &mut self.port, cx);
    }

    /// Whether destage has to wait until the superblock of a failed log says the same: what only memory has is not
    /// replayed over what the cache holds.
    pub(super) fn awaits_mark(&self) -> bool {
        self.is_emptying_failed_log() && self.direct.mark != Mark::Set
    }

    /// Have that superblock kept.
    pub(super) fn mark_failed_log(&mut self, cx: &mut Context<'_>) {
        if self.awaits_mark() && !self.log.has_failed() {
            self.mark_log(cx);
        }
    }

    /// Whether that is being written.
    pub(super) fn is_being_marked(&self) -> bool {
        matches!(self.direct.mark, Mark::Writing { .. })
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
            let goes_on = !self.log.is_given_up() && !self.port.is_fenced();
            if self.direct.mark == (Mark::Writing { again: false }) && goes_on {
                self.direct.mark = Mark::Writing { again: true };
                let superblock = self.log.get_mut().next_superblock();
                return self
                    .log
                    .write_superblock(Op::DirectMark, superblock, &mut self.port, cx);
            }
            self.direct.mark = Mark::Set;
            return;
        }
        if self.superblock_failed(cx) {
            // The writes wait until it can be kept.
            self.direct.mark = Mark::Unset;
        }
    }

    /// The log takes no mark any more: what waits for it is refused.
    pub(super) fn refuse_unmarked(&mut self, cx: &mut Context<'_>) {
        if self.direct.mark != Mark::Set {
            self.refuse_direct(RequestError::ReadOnly, cx);
        }
    }

    /// Before a superblock is made for another reason: it says what is so now of the backend and of the cache.
    pub(super) fn keep_mark(&mut self, cache: &ReadCache) {
        // What only memory has of a failed log is in the backend before a superblock can follow that says so.
        let is_unflushed = !self.direct.unflushed.is_empty() || self.is_emptying_failed_log();
        let tie = if is_unflushed {
            Tie::UNKNOWN
        } else {
            cache.tie_of(self.config.number)
        };
        self.log.get_mut().mark_unflushed(is_unflushed);
        self.log.get_mut().set_tie(tie);
        if !self.is_emptying_failed_log() && !self.log.is_given_up() {
            self.log.get_mut().name_durable();
        }
        if !is_unflushed {
            self.direct.mark = Mark::Unset;
        }
    }

    fn set_stage(&mut self, number: u64, stage: WriteStage) {
        let write = self.direct.writes.get_mut(&number);
        write.expect("it has not ended").stage = stage;
    }

    fn submit_direct(&mut self, number: u64, cx: &mut Context<'_>) {
        self.set_stage(number, WriteStage::Submitted);
        let token = self.port.begin(Op::DirectWrite { number });
        let write = &self.direct.writes[&number];
        let offset = write.range.byte_offset();
        cx.actions.push(match &write.what {
            What::Data(data) => Action::BackendWrite {
                token,
                offset,
                data: Vec::from([data.clone()]),
            },
            What::Zero { unmap } => Action::BackendZero {
                token,
                offset,
                bytes: write.range.count * SECTOR_BYTES as u64,
                unmap: *unmap,
            },
        });
    }

    pub(super) fn direct_was_written(
        &mut self,
        number: u64,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let write = self.direct.pop(number);
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
                self.direct.flushers.push(Flusher { id, kind, until });
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
            self.direct.policy
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
        while self.direct.started < self.config.destage_depth_max.max(1)
            && let Some(number) = self.direct.ready.pop_first()
        {
            self.start_direct(number, cx);
        }
    }

    /// Refuse the writes that wait until the log says that they go past it.
    pub(super) fn refuse_what_mark_delays(&mut self, error: RequestError, cx: &mut Context<'_>) {
        if self.direct.mark != Mark::Set {
            self.refuse_unsubmitted(error, cx);
        }
    }

    /// Refuse the flushes that wait for a generation of which the backend has a part, and destage not all yet.
    pub(super) fn refuse_flushes_behind_destage(
        &mut self,
        error: RequestError,
        cx: &mut Context<'_>,
    ) {
        if self.awaits_destage_flush() && self.destaging.generation().stage() != Stage::Flushing {
            for flusher in core::mem::take(&mut self.direct.flushers) {
                self.port.reply(flusher.id, flusher.kind, Err(error), cx);
            }
        }
    }

    fn refuse_unsubmitted(&mut self, error: RequestError, cx: &mut Context<'_>) {
        let submitted = |write: &Write| write.stage == WriteStage::Submitted;
        let writes = core::mem::take(&mut self.direct.writes);
        let (kept, refused): (BTreeMap<_, _>, BTreeMap<_, _>) =
            writes.into_iter().partition(|(_, write)| submitted(write));
        self.direct.started = kept.len();
        self.direct.writes = kept;
        self.direct.ready.clear();
        for write in refused.into_values() {
            self.port.reply(write.id, write.kind, Err(error), cx);
        }
    }

    /// Refuse what the backend was not asked for yet.
    pub(super) fn refuse_direct(&mut self, error: RequestError, cx: &mut Context<'_>) {
        self.refuse_unsubmitted(error, cx);
        for flusher in core::mem::take(&mut self.direct.flushers) {
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
        if core::mem::take(&mut self.direct.lost) {
            self.port.reply(id, kind, Err(RequestError::Io), cx);
            return true;
        }
        if self.direct.unflushed.is_empty() {
            return false;
        }
        self.direct.flushers.push(Flusher { id, kind, until });
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

    /// Whether destage's flush has to wait for one that is under way.
    pub(super) fn holds_destage_flush(&self) -> bool {
        self.direct.running.is_some()
    }

    /// Whether destage waits for a flush that would show a part of what it writes.
    pub(super) fn holds_destage(&self) -> bool {
        self.config.backend_atomic && self.direct.running.is_some()
    }

    /// Flush the backend, unless that is under way: what comes meanwhile shares the next one.
    fn begin_flush(&mut self, cx: &mut Context<'_>) {
        if self.direct.running.is_some() || self.port.is_fenced() || self.awaits_destage_flush() {
            return;
        }
        let (direct, now) = (&mut self.direct, self.port.now);
        let covers = direct.next_run;
        // What is under way may end before the flush does, and is not covered by it.
        let started = |write: &&Write| write.stage != WriteStage::Waiting;
        let under_way = direct.writes.values().filter(started);
        let ranges: Vec<_> = under_way.map(|write| write.range).collect();
        for range in ranges {
            direct.note_unflushed(range, now);
        }
        direct.running = Some(Running {
            flushers: core::mem::take(&mut direct.flushers),
            covers,
            wanted: core::mem::take(&mut direct.wanted),
        });
        let token = self.port.begin(Op::DirectFlush);
        cx.actions.push(Action::BackendFlush { token });
    }

    pub(super) fn direct_was_flushed(
        &mut self,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let running = self.direct.running.take().expect("a flush was under way");
        if self.port.is_fenced() {
            for Flusher { id, kind, .. } in running.flushers {
                self.port.reply(id, kind, Err(RequestError::Fenced), cx);
            }
            return;
        }
        if result.is_ok() {
            self.direct.flushed(running.covers, self.port.now);
            for flusher in running.flushers {
                self.end_flush(flusher, cx);
            }
        } else {
            self.port.stats.backend_errors += 1;
            // Whoever waits for the next flush waits for what this one may have lost as well.
            let waiting = core::mem::take(&mut self.direct.flushers);
            let newer = self.direct.next_run > running.covers;
            let nobody = running.flushers.is_empty() || newer;
            self.lose_unflushed(waiting.is_empty() && nobody, cx);
            self.destaging.generation_mut().doubt();
            for Flusher { id, kind, .. } in running.flushers.into_iter().chain(waiting) {
                self.port.reply(id, kind, Err(RequestError::Io), cx);
            }
            self.direct.wanted |= running.wanted;
            self.direct.retry_at = self.port.now.plus(self.direct.pause);
            self.direct.pause = Nanos((self.direct.pause.0 * 2).min(RETRY_MAX.0));
        }
        if !self.direct.flushers.is_empty() {
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
        self.await_durable(Waiter {
            until,
            id,
            kind,
            fua: false,
        });
    }

    /// A flush of the backend has failed: what it was given and had not flushed may be gone.
    pub(super) fn lose_unflushed(&mut self, tell_next: bool, cx: &mut Context<'_>) {
        if self.direct.unflushed.is_empty() {
            return;
        }
        self.direct.lost |= tell_next;
        let unflushed = self.direct.unflushed.iter().map(|(range, _)| range);
        let mut unflushed: Vec<SectorRange> = unflushed.take(LOST_RUNS_MAX).collect();
        if let [first, .., last] = unflushed[..]
            && unflushed.len() == LOST_RUNS_MAX
        {
            let end = self.direct.unflushed.end().unwrap_or(last.end());
            unflushed = Vec::from([SectorRange::between(first.start, end)]);
        }
        for range in unflushed {
            self.cached.invalidate(range, cx);
            self.filling.note_forgotten(range, self.port.now);
        }
        self.reads.forget_fetches();
    }

    /// Destage has flushed the backend, or could not. No direct write was under way.
    pub(super) fn destage_flush_ended(&mut self, ok: bool, cx: &mut Context<'_>) {
        if ok && self.direct.running.is_none() && self.direct.writes.is_empty() {
            self.direct.flushed(self.direct.next_run, self.port.now);
            for flusher in core::mem::take(&mut self.direct.flushers) {
                self.end_flush(flusher, cx);
            }
        } else if !ok {
            let waiting = core::mem::take(&mut self.direct.flushers);
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
            for Flusher { id, kind, .. } in core::mem::take(&mut self.direct.flushers) {
                self.port.reply(id, kind, Err(error), cx);
            }
        }
        if self.direct.started > 0 && !self.log.has_failed() {
            // It may have had to wait for another superblock.
            self.mark_log(cx);
        }
        let persisted = cx.cache.persisted();
        if self.direct.started > 0 && self.direct.mark == Mark::Set {
            let forgotten = |write: &Write| matches!(write.stage, WriteStage::Preparing(barrier) if barrier <= persisted);
            let ready = self.direct.writes.iter();
            let ready: Vec<u64> = ready
                .filter(|(_, write)| forgotten(write))
                .map(|(&number, _)| number)
                .collect();
            for number in ready {
                self.submit_direct(number, cx);
            }
        }
        let sectors = self.config.bytes / SECTOR_BYTES as u64;
        let direct = &mut self.direct;
        direct.unflushed.settle(STEP_WORK_MAX);
        if direct.unflushed.len() > 2 * UNFLUSHED_RUNS_MAX {
            // No more is remembered of it than that it is not flushed.
            direct.note_unflushed(SectorRange::new(0, sectors), self.port.now);
        }
        if direct.unflushed.is_empty() {
            (direct.wanted, direct.destage_all) = (false, None);
            return;
        }
        let due = direct.unflushed_bytes > UNFLUSHED_BYTES_MAX
            || direct.unflushed.len() > UNFLUSHED_RUNS_MAX
            || self.port.now >= self.unflushed_deadline();
        let direct = &mut self.direct;
        direct.wanted |= due;
        if direct.wanted && self.port.now >= direct.retry_at && self.phase == Phase::Open {
            self.begin_flush(cx);
        }
    }

    /// When what the backend has not flushed is old enough to be.
    fn unflushed_deadline(&self) -> Nanos {
        let age = Nanos(self.config.dirty_age_max.0 / 2);
        self.direct.since.plus(age)
    }

    pub(super) fn direct_wakeup(&self) -> Option<Nanos> {
        let direct = &self.direct;
        let waits =
            direct.running.is_some() || direct.unflushed.is_empty() || self.port.is_fenced();
        if waits || self.phase != Phase::Open || self.awaits_destage_flush() {
            return None;
        }
        let due = if direct.wanted {
            Nanos(0)
        } else {
            self.unflushed_deadline()
        };
        Some(due.max(direct.retry_at).max(self.port.now))
    }

    /// Whether a close has to wait for the backend's flush. It is tried once: nobody was promised more.
    pub(super) fn flushes_at_close(&mut self, cx: &mut Context<'_>) -> bool {
        if self.direct.closed
            || self.direct.unflushed.is_empty()
            || self.port.is_fenced()
            || self.awaits_destage_flush()
        {
            return false;
        }
        self.direct.closed = true;
        self.begin_flush(cx);
        true
    }

    /// Memory of its tables in bytes.
    pub(super) fn direct_memory_bytes(&self) -> usize {
        self.direct.unflushed.memory_bytes()
    }

    /// Assert what must always hold.
    pub(super) fn check_direct(&self) {
        let direct = &self.direct;
        let started = |write: &&Write| write.stage != WriteStage::Waiting;
        assert_eq!(
            direct.writes.values().filter(started).count(),
            direct.started,
            "direct writes under way are counted"
        );
        let waits = |write: &Write| write.stage == WriteStage::Waiting && write.blockers == 0;
        let ready = direct.writes.iter().filter(|(_, write)| waits(write));
        assert!(ready.map(|(number, _)| number).eq(&direct.ready));
        let submitted = |write: &Write| write.stage == WriteStage::Submitted;
        assert!(
            direct.mark == Mark::Set || !direct.writes.values().any(submitted),
            "the log says that writes go past it"
        );
        if let Path::Direct | Path::Returning = direct.path {
            assert!(
                self.log.get().spans().is_empty() && self.log.get().open_since().is_none(),
                "the log holds nothing while writes go past it"
            );
        } else {
            assert!(
                direct.writes.is_empty(),
                "nothing goes past the log that holds something"
            );
        }
    }
}
