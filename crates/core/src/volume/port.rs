//! The side of a volume that faces outward: actions that are under way, and requests that wait for an answer.
//!
//! ```text
//!  begin ──► under way ──completion──► end
//!               └──given up──► late ──completion──► end, of use to nobody
//! ```
//!
//! Invariants:
//! 1. A token names one action until that ends, also when it was given up.
//! 2. Every request that was accepted is answered once, and counted.
//! 3. Actions are looked through when the oldest may have become too old, not when they begin or end: a look costs
//!    as much as there is under way, and comes once in the time allowed.

use alloc::vec::Vec;

use slab::Slab;

use super::op::Op;
use super::{Context, VolumeConfig, VolumeStats};
use crate::base::error::RequestError;
use crate::base::io::{Action, Nanos, Reply, RequestId, SectorRange, Token};
use crate::base::work::Work;

/// Which request a reply is for, so that its counters can be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read(u64),
    Write(u64),
    Trim,
    Flush,
    Other,
}

/// An outstanding action.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) op: Op,
    pub(super) since: Nanos,
}

/// Who performs an operation that is watched.
#[derive(Clone, Copy, Debug)]
pub(super) enum Performer {
    Ssd,
    Backend,
    Log,
}

/// How long an action may take.
#[derive(Clone, Copy, Debug)]
struct AnswerMax {
    /// Of the cache: how long a read of its device may take.
    ssd: Nanos,
    backend: Nanos,
    /// The largest time is none.
    log: Nanos,
}

/// What has been under way for too long.
#[derive(Debug, Default)]
pub(super) struct Overdue {
    /// Since when the backend has not answered.
    pub(super) silent: Option<Nanos>,
    /// The same of the log's device.
    pub(super) log_silent: Option<Nanos>,
    /// Whether what is too old of the log is what writes wait for, too.
    pub(super) log_writes_silent: bool,
    /// What is to be given up.
    pub(super) late: Vec<(usize, Performer)>,
}

/// Who waits for a read of the cache device that was given up.
#[derive(Debug)]
pub(super) enum GivenUp {
    Read { read: usize, range: SectorRange },
    Scrub(RequestId),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Port {
    /// The time of the present step.
    pub(super) now: Nanos,
    running: Slab<Running>,
    /// Of them, those that were given up: nobody waits for them.
    late: usize,
    answer_max: AnswerMax,
    /// When what is under way must be looked through.
    watch_at: Option<Nanos>,
    /// Another owner has the backend: nothing is answered but that.
    fenced: bool,
    pub(super) stats: VolumeStats,
    /// What was looked at, where that is counted.
    pub(super) work: Work,
}

/// Move a time forward to `to`, if it is later.
fn hasten(time: &mut Option<Nanos>, to: Nanos) {
    *time = Some(time.map_or(to, |time| time.min(to)));
}

impl Port {
    /// Nothing is under way. A read of the cache device may take so long.
    pub(super) fn new(config: &VolumeConfig, ssd_answer_max: Nanos, now: Nanos) -> Self {
        Self {
            now,
            running: Slab::new(),
            late: 0,
            answer_max: AnswerMax {
                ssd: ssd_answer_max,
                backend: config.backend_answer_max,
                log: config.log_answer_max,
            },
            watch_at: None,
            fenced: false,
            stats: VolumeStats::default(),
            work: Work::default(),
        }
    }

    /// The configuration has changed.
    pub(super) fn reconfigure(&mut self, config: &VolumeConfig) {
        self.answer_max.backend = config.backend_answer_max;
        self.answer_max.log = config.log_answer_max;
        self.look_now();
    }

    // Actions.

    /// An action begins: from now on it may come to take too long.
    #[inline]
    pub(super) fn begin(&mut self, op: Op) -> Token {
        if let Some((_, limit)) = self.answer_max(&op) {
            hasten(&mut self.watch_at, self.now.plus(limit));
        }
        let since = self.now;
        Token(self.running.insert(Running { op, since }) as u64)
    }

    /// An action has ended.
    #[inline]
    pub(super) fn end(&mut self, token: Token) -> Running {
        let running = self.running.remove(token.0 as usize);
        if matches!(running.op, Op::LateSsd { .. } | Op::LateLog) {
            self.late -= 1;
        }
        running
    }

    /// Whether nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Whether nothing is under way but what was given up.
    pub(super) fn awaits_nothing(&self) -> bool {
        self.running.len() == self.late
    }

    /// What is under way at the log's device.
    pub(super) fn log_operations(&self) -> Vec<usize> {
        let under_way = self.running.iter();
        under_way
            .filter(|(_, running)| running.op.is_of_log())
            .map(|(key, _)| key)
            .collect()
    }

    /// Let an operation of the log end whenever it will. Returns what it was for, unless it was given up before.
    pub(super) fn give_up_log_operation(&mut self, key: usize) -> Option<Op> {
        let running = self.running.get_mut(key)?;
        if matches!(running.op, Op::LateLog) {
            return None;
        }
        self.late += 1;
        // In its place, so that the token stays the same.
        Some(core::mem::replace(&mut running.op, Op::LateLog))
    }

    /// Let a read of the cache device end whenever it will. What it brings in the end is not used.
    pub(super) fn give_up_ssd_read(&mut self, key: usize) -> Option<GivenUp> {
        let since = self.running.get(key)?.since;
        let (waiting, permission) = match self.running.remove(key).op {
            Op::ReadSsd {
                read,
                range,
                permission,
            } => (GivenUp::Read { read, range }, permission),
            Op::ScrubCache { id, permission, .. } => (GivenUp::Scrub(id), permission),
            _ => unreachable!("only reads of the cache device are given up"),
        };
        // The slot that was just emptied is the next to be filled: the token stays the same.
        let op = Op::LateSsd { permission };
        let same = self.running.insert(Running { op, since });
        assert_eq!(same, key, "a token names one action until it ends");
        self.late += 1;
        Some(waiting)
    }

    // Time.

    /// Who performs an operation, and how long that may take.
    fn answer_max(&self, op: &Op) -> Option<(Performer, Nanos)> {
        let limits = &self.answer_max;
        match op {
            Op::ReadSsd { .. } | Op::ScrubCache { .. } => Some((Performer::Ssd, limits.ssd)),
            _ if op.is_of_backend() => Some((Performer::Backend, limits.backend)),
            _ => {
                let is_watched = op.is_of_log() && limits.log < Nanos(u64::MAX);
                is_watched.then_some((Performer::Log, limits.log))
            }
        }
    }

    /// When what is under way must be looked through.
    pub(super) fn watch_at(&self) -> Option<Nanos> {
        self.watch_at
    }

    /// What is under way must be looked through at this time, or before.
    pub(super) fn look_until(&mut self, at: Nanos) {
        hasten(&mut self.watch_at, at);
    }

    /// Something that was waited for may have ended.
    pub(super) fn look_now(&mut self) {
        self.watch_at = Some(self.now);
    }

    /// Nothing is watched any more.
    pub(super) fn stop_watching(&mut self) {
        self.watch_at = None;
    }

    /// Since when the oldest operation is under way, given up or not.
    pub(super) fn oldest(&self) -> Option<Nanos> {
        self.running.iter().map(|(_, running)| running.since).min()
    }

    /// Look through what is under way, if something may have become too old. The log may be given up, and a client
    /// may not be `patient` with one that is silent.
    pub(super) fn look_through(&mut self, is_given_up: bool, is_patient: bool) -> Option<Overdue> {
        if self.watch_at.is_none_or(|at| at > self.now) {
            return None;
        }
        let mut next = None;
        let mut overdue = Overdue::default();
        for (key, running) in &self.running {
            let op = &running.op;
            let Some((performer, limit)) = self.answer_max(op) else {
                continue;
            };
            let deadline = running.since.plus(limit);
            if deadline > self.now {
                hasten(&mut next, deadline);
                continue;
            }
            match performer {
                Performer::Ssd => overdue.late.push((key, performer)),
                Performer::Backend => hasten(&mut overdue.silent, running.since),
                Performer::Log if is_given_up && op.is_of_no_use_once_given_up() => {
                    overdue.late.push((key, performer));
                }
                Performer::Log => {
                    hasten(&mut overdue.log_silent, running.since);
                    overdue.log_writes_silent |=
                        !op.is_read_of_log() || is_given_up && op.is_read_for_destage();
                    if !is_patient && op.is_given_up_when_late() {
                        overdue.late.push((key, performer));
                    }
                }
            }
        }
        self.watch_at = next;
        Some(overdue)
    }

    // Requests.

    /// Whether another owner has the backend.
    #[inline]
    pub(super) fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Another owner has the backend. Returns whether that was known.
    pub(super) fn fence(&mut self) -> bool {
        core::mem::replace(&mut self.fenced, true)
    }

    /// A request was accepted: one answer follows.
    #[inline]
    pub(super) fn accept(&mut self) {
        self.stats.requests_in_flight += 1;
    }

    /// Whether a request was accepted and not answered.
    pub(super) fn owes_answer(&self) -> bool {
        self.stats.requests_in_flight > 0
    }

    #[inline]
    pub(super) fn reply(
        &mut self,
        id: RequestId,
        kind: Kind,
        result: Result<Reply, RequestError>,
        cx: &mut Context<'_>,
    ) {
        self.stats.requests_in_flight -= 1;
        match (kind, &result) {
            (_, Err(_)) => self.stats.errors += 1,
            (Kind::Read(bytes), Ok(_)) => {
                self.stats.reads += 1;
                self.stats.read_bytes += bytes;
            }
            (Kind::Write(bytes), Ok(_)) => {
                self.stats.writes += 1;
                self.stats.write_bytes += bytes;
            }
            (Kind::Trim, Ok(_)) => self.stats.trims += 1,
            (Kind::Flush, Ok(_)) => self.stats.flushes += 1,
            (Kind::Other, Ok(_)) => {}
        }
        cx.actions.push(Action::Reply {
            request: id,
            result,
        });
    }
}
