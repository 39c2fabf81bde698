//! Flushes of the backend: what it was given past the log and has not flushed, and who waits for that.
//!
//! ```text
//!  flushed ──a write begins──► unflushed ──begin──► running ──it covers all──► flushed
//!                                  ▲                   └──more was written, or it failed──┐
//!                                  └──────────────────────────────────────────────────────┘
//! ```
//!
//! Invariants:
//! 1. One flush is under way at a time; who comes meanwhile shares the next one.
//! 2. A flush that failed is told once to whoever waits for it, or else to the next one who flushes.

use alloc::rc::Rc;
use alloc::vec::Vec;

use crate::base::error::RequestError;
use crate::base::io::{Action, Nanos, RequestId, SectorRange};
use crate::base::limits::{RUN_BYTES, STEP_WORK_MAX, UNFLUSHED_BYTES_LEAST};
use crate::log::budget::{IndexBudget, Share};
use crate::log::extent_index::{ExtentIndex, Sequence};
use crate::volume::Context;
use crate::volume::op::Op;
use crate::volume::port::{Kind, Port};

/// The backend is flushed when more than this is not: as much as destage writes between two flushes.
const UNFLUSHED_BYTES_MAX: u64 = 64 << 20;
const UNFLUSHED_RUNS_MAX: usize = 8 << 10;
/// The same where memory is short.
const UNFLUSHED_RUNS_LEAST: usize = 256;
/// From so many runs on that a failed flush may have lost, the cache forgets what lies between them as well: it is
/// one range.
const LOST_RUNS_MAX: usize = 16;
/// First and longest pause after a flush that nobody waits for has failed.
const RETRY_MIN: Nanos = Nanos::from_millis(10);
const RETRY_MAX: Nanos = Nanos::from_millis(2000);

/// Who waits for a flush of the backend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flusher {
    pub(super) id: RequestId,
    pub(super) kind: Kind,
    /// What of the log has to be durable as well.
    pub(super) until: Sequence,
}

/// A flush of the backend under way.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) flushers: Vec<Flusher>,
    /// It makes durable what was numbered before this.
    pub(super) covers: Sequence,
    pub(super) wanted: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct BackendFlushes {
    /// What the backend was given and has not flushed, each run with a number that grows.
    unflushed: ExtentIndex,
    unflushed_bytes: u64,
    next_run: Sequence,
    /// Since when the oldest of it is there.
    since: Nanos,
    flushers: Vec<Flusher>,
    running: Option<Running>,
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
    /// Memory for what is not flushed.
    share: Share,
}

impl Default for BackendFlushes {
    fn default() -> Self {
        Self {
            unflushed: ExtentIndex::default(),
            unflushed_bytes: 0,
            next_run: 0,
            since: Nanos(0),
            flushers: Vec::new(),
            running: None,
            lost: false,
            wanted: false,
            destage_all: None,
            retry_at: Nanos(0),
            pause: RETRY_MIN,
            closed: false,
            share: Share::default(),
        }
    }
}

impl BackendFlushes {
    /// Whether the backend has flushed all that it was given.
    pub(super) fn is_flushed(&self) -> bool {
        self.unflushed.is_empty()
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
    pub(super) fn want_flush(&mut self) -> bool {
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

    /// The backend is given these sectors.
    pub(super) fn note_unflushed(&mut self, range: SectorRange, now: Nanos) {
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

    /// The backend is given a write, whose bytes count.
    pub(super) fn note_write(&mut self, range: SectorRange, now: Nanos) {
        self.note_unflushed(range, now);
        self.unflushed_bytes += range.bytes() as u64;
    }

    /// What was numbered before this is flushed.
    pub(super) fn flushed(&mut self, covers: Sequence, now: Nanos) {
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

    /// The backend has flushed all that it was given.
    pub(super) fn all_flushed(&mut self, now: Nanos) {
        self.flushed(self.next_run, now);
    }

    /// What was looked at so far, where that is counted.
    pub(super) fn work(&self) -> u64 {
        self.unflushed.work()
    }

    /// Its memory is of this budget.
    pub(super) fn set_budget(&mut self, budget: &Rc<IndexBudget>) {
        self.share = Share::new(budget, UNFLUSHED_BYTES_LEAST);
    }

    /// Memory of its tables in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.unflushed.memory_bytes()
    }

    // Who waits.

    /// Have somebody wait for the next flush.
    pub(super) fn wait(&mut self, flusher: Flusher) {
        self.flushers.push(flusher);
    }

    /// Whoever waits for the next flush; they wait no longer.
    pub(super) fn take_waiting(&mut self) -> Vec<Flusher> {
        core::mem::take(&mut self.flushers)
    }

    /// Tell whoever waits for the next flush of an error.
    pub(super) fn refuse(&mut self, error: RequestError, port: &mut Port, cx: &mut Context<'_>) {
        for flusher in self.take_waiting() {
            port.reply(flusher.id, flusher.kind, Err(error), cx);
        }
    }

    /// Whether somebody waits for the next flush.
    pub(super) fn is_awaited(&self) -> bool {
        !self.flushers.is_empty()
    }

    /// Whether a direct write waits for a flush.
    pub(super) fn fua_waits(&self) -> bool {
        let running = self.running.iter().flat_map(|run| &run.flushers);
        let mut flushers = self.flushers.iter().chain(running);
        flushers.any(|flusher| flusher.kind != Kind::Flush)
    }

    /// Whether a flush has failed that nobody was told of; from now on somebody was.
    pub(super) fn take_lost(&mut self) -> bool {
        core::mem::take(&mut self.lost)
    }

    // The flush.

    /// Whether a flush is under way.
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Flush the backend. What is under way may end before the flush does, and is not covered by it.
    pub(super) fn begin(
        &mut self,
        under_way: impl Iterator<Item = SectorRange>,
        port: &mut Port,
        cx: &mut Context<'_>,
    ) {
        let covers = self.next_run;
        for range in under_way {
            self.note_unflushed(range, port.now);
        }
        self.running = Some(Running {
            flushers: core::mem::take(&mut self.flushers),
            covers,
            wanted: core::mem::take(&mut self.wanted),
        });
        let token = port.begin(Op::DirectFlush);
        cx.actions.push(Action::BackendFlush { token });
    }

    /// The flush under way has ended.
    pub(super) fn end(&mut self) -> Running {
        self.running.take().expect("a flush was under way")
    }

    /// A flush has failed, and whoever waits for the next one waits for what this one may have lost as well. Returns
    /// these, and whether nobody else is told.
    pub(super) fn failed(&mut self, running: &Running) -> (Vec<Flusher>, bool) {
        let waiting = self.take_waiting();
        let newer = self.next_run > running.covers;
        let nobody = running.flushers.is_empty() || newer;
        let tell_next = waiting.is_empty() && nobody;
        (waiting, tell_next)
    }

    /// After a failure: the next one comes after a pause.
    pub(super) fn pause(&mut self, running_wanted: bool, now: Nanos) {
        self.wanted |= running_wanted;
        self.retry_at = now.plus(self.pause);
        self.pause = Nanos((self.pause.0 * 2).min(RETRY_MAX.0));
    }

    /// What the backend was given and had not flushed may be gone. Returns where that may be; the next one who
    /// flushes may have to be told.
    pub(super) fn lose(&mut self, tell_next: bool) -> Vec<SectorRange> {
        if self.unflushed.is_empty() {
            return Vec::new();
        }
        self.lost |= tell_next;
        let unflushed = self.unflushed.iter().map(|(range, _)| range);
        let mut unflushed: Vec<SectorRange> = unflushed.take(LOST_RUNS_MAX).collect();
        if let [first, .., last] = unflushed[..]
            && unflushed.len() == LOST_RUNS_MAX
        {
            let end = self.unflushed.end().unwrap_or(last.end());
            unflushed = Vec::from([SectorRange::between(first.start, end)]);
        }
        unflushed
    }

    // When.

    /// At every poll of a volume of so many sectors: whether a flush of the volume's own is to begin, if one may.
    pub(super) fn poll(&mut self, sectors: u64, age_max: Nanos, now: Nanos) -> bool {
        self.unflushed.settle(STEP_WORK_MAX);
        let bytes = |runs: usize| runs as u64 * RUN_BYTES;
        self.share.set(bytes(self.unflushed.len()));
        let runs_max = if self.share.takes(bytes(STEP_WORK_MAX)) {
            UNFLUSHED_RUNS_MAX
        } else {
            UNFLUSHED_RUNS_LEAST
        };
        if self.unflushed.len() > 2 * runs_max {
            // No more is remembered of it than that it is not flushed.
            self.note_unflushed(SectorRange::new(0, sectors), now);
        }
        if self.unflushed.is_empty() {
            (self.wanted, self.destage_all) = (false, None);
            return false;
        }
        self.wanted |= self.unflushed_bytes > UNFLUSHED_BYTES_MAX
            || self.unflushed.len() > runs_max
            || now >= self.deadline(age_max);
        self.wanted && now >= self.retry_at
    }

    /// When what the backend has not flushed is old enough to be.
    fn deadline(&self, age_max: Nanos) -> Nanos {
        self.since.plus(Nanos(age_max.0 / 2))
    }

    /// When a flush of the volume's own is to begin, if nothing stands in its way.
    pub(super) fn wakeup(&self, age_max: Nanos, now: Nanos) -> Option<Nanos> {
        if self.running.is_some() || self.unflushed.is_empty() {
            return None;
        }
        let due = if self.wanted {
            Nanos(0)
        } else {
            self.deadline(age_max)
        };
        Some(due.max(self.retry_at).max(now))
    }

    /// The volume closes: whether a flush is to be tried. It is tried once: nobody was promised more.
    pub(super) fn may_close(&self) -> bool {
        !self.closed && !self.unflushed.is_empty()
    }

    /// The flush of a close is tried.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }
}
