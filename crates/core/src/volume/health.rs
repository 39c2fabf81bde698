//! What is wrong with a volume, and since when.
//!
//! A backend is *silent* while one of its operations has been under way for longer than
//! [`VolumeConfig::backend_answer_max`], and a log while one of its device's has been for longer than
//! [`VolumeConfig::log_answer_max`] (`silent_log` says what follows from that); a backend's writes *fail* from the first one that fails until a
//! flush succeeds after all were repeated, for only then the backend holds what it refused; its
//! reads fail until one succeeds or a flush does, or for a while, since nobody may read again. The log is *unreadable*
//! from the first read for destage that fails until the backend has flushed the generation that needs it.
//!
//! Operations are looked through when the oldest may have become too old, not when they begin or
//! end: a look costs as much as there is under way, and comes once in the time allowed.
//!
//! [`VolumeConfig::backend_answer_max`]: super::VolumeConfig::backend_answer_max
//! [`VolumeConfig::log_answer_max`]: super::VolumeConfig::log_answer_max

use super::{Context, Nanos, Op, Phase, RequestError, Volume};
use crate::base::error::IoError;

/// How long a failed read of the backend shows, if no other read follows.
const READ_TROUBLE_SHOWN: Nanos = Nanos::from_millis(30_000);

/// The five states of a core. The first three serve, the last two refuse writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// All is well.
    Healthy,
    /// Serving with the backend failing or not answering: data is kept in the log; with a log that does not answer or
    /// cannot be read for destage, or without one; with sectors that were lost, whose reads fail until they are
    /// written.
    Degraded,
    /// A log write failed: reads and destage go on, writes are refused until it is reopened.
    ReadOnly,
    /// Dirty data in the log is damaged: writes are refused until it reads well; reads go on, and destage of
    /// what lies before the damage.
    Inconsistent,
    /// Not open, or another owner has taken the backend over: everything is refused.
    Error,
}

/// What is wrong with an open volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Another owner has taken the backend over.
    Fenced,
    /// Dirty data in the log is corrupt.
    LogCorrupt,
    /// A log write failed.
    LogFailed,
    /// The log's device has not answered for too long.
    LogSilent,
    /// The log's device failed: what it holds is on its way to the backend, and writes wait.
    LogEmptying,
    /// The log's device failed: the volume goes on without it.
    LogGivenUp,
    /// Dirty data that only the log's device has cannot be read: destage tries it again.
    LogUnreadable,
    /// Sectors were lost with the log, and not all of them were written since.
    SectorsLost,
    /// The backend has not answered for too long.
    BackendSilent,
    /// The backend does not take what is written.
    BackendWrites(IoError),
    /// The backend does not give what is read.
    BackendReads(IoError),
}

/// Who performs an operation that is watched.
#[derive(Clone, Copy, Debug)]
enum Performer {
    Ssd,
    Backend,
    Log,
}

/// A backend that fails.
#[derive(Clone, Copy, Debug)]
struct Failing {
    error: IoError,
    since: Nanos,
    last: Nanos,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Health {
    pub(super) fenced: bool,
    /// Of the cache: how long a read of its device may take.
    pub(super) ssd_answer_max: Nanos,
    /// When the operations must be looked through.
    pub(super) watch_at: Option<Nanos>,
    /// Since when the operation is under way that is too old.
    pub(super) silent: Option<Nanos>,
    /// The same of the log's operations.
    pub(super) log_silent: Option<Nanos>,
    /// Whether what is too old of the log is what writes wait for, too.
    pub(super) log_writes_silent: bool,
    /// Destage could not read what it needs of the log, and has not got there since.
    pub(super) log_unreadable: bool,
    writes: Option<Failing>,
    reads: Option<Failing>,
    /// Since when something was wrong at the end of every poll, whatever it was.
    troubled: Option<Nanos>,
}

impl Health {
    /// All is well. A read of the cache device may take so long.
    pub(super) fn new(ssd_answer_max: Nanos) -> Self {
        Self {
            ssd_answer_max,
            ..Self::default()
        }
    }
}

fn note(failing: &mut Option<Failing>, now: Nanos, error: IoError) {
    let since = failing.map_or(now, |failing| failing.since);
    *failing = Some(Failing {
        error,
        since,
        last: now,
    });
}

/// Move a time forward to `to`, if it is later.
fn hasten(time: &mut Option<Nanos>, to: Nanos) {
    *time = Some(time.map_or(to, |time| time.min(to)));
}

impl Op {
    /// Whether the backend performs it.
    pub(super) fn is_of_backend(&self) -> bool {
        matches!(
            self,
            Self::Fetch { .. }
                | Self::FetchPart { .. }
                | Self::Extents { .. }
                | Self::DestageWrite { .. }
                | Self::DestageFlush
                | Self::DirectWrite { .. }
                | Self::DirectFlush
        )
    }
}

impl Volume {
    /// An action begins: from now on it may come to take too long.
    pub(super) fn watch_from_now(&mut self, op: &Op) {
        if let Some((_, limit)) = self.answer_max(op) {
            hasten(&mut self.health.watch_at, self.now.plus(limit));
        }
    }

    /// Who performs an operation, and how long that may take.
    fn answer_max(&self, op: &Op) -> Option<(Performer, Nanos)> {
        match op {
            Op::ReadSsd { .. } | Op::ScrubCache { .. } => {
                Some((Performer::Ssd, self.health.ssd_answer_max))
            }
            _ if op.is_of_backend() => Some((Performer::Backend, self.config.backend_answer_max)),
            _ => Some((Performer::Log, self.log_answer_max(op)?)),
        }
    }

    /// Look through what is under way, if something may have become too old.
    pub(super) fn watch(&mut self, cx: &mut Context<'_>) {
        if self.health.watch_at.is_none_or(|at| at > self.now) {
            return;
        }
        let (mut next, mut silent, mut log_silent) = (None, None, None);
        let mut log_writes_silent = false;
        let mut late = alloc::vec::Vec::new();
        for (key, running) in &self.ops {
            let Some((performer, limit)) = self.answer_max(&running.op) else {
                continue;
            };
            let deadline = running.since.plus(limit);
            if deadline > self.now {
                hasten(&mut next, deadline);
                continue;
            }
            match performer {
                Performer::Ssd => late.push((key, performer)),
                Performer::Backend => hasten(&mut silent, running.since),
                Performer::Log if self.is_abandoned(&running.op) => late.push((key, performer)),
                Performer::Log => {
                    hasten(&mut log_silent, running.since);
                    log_writes_silent |= !running.op.is_read_of_log()
                        || self.log_is_given_up() && running.op.is_read_for_destage();
                    if self.is_given_up_when_late(&running.op) {
                        late.push((key, performer));
                    }
                }
            }
        }
        if let Some(reads) = self.health.reads {
            let until = reads.last.plus(READ_TROUBLE_SHOWN);
            if until > self.now {
                hasten(&mut next, until);
            } else {
                self.health.reads = None;
            }
        }
        self.health.silent = silent;
        self.health.log_silent = log_silent;
        self.health.log_writes_silent = log_writes_silent;
        self.health.watch_at = next;
        for (key, performer) in late {
            match performer {
                Performer::Log => self.give_up_log_operation(key, cx),
                _ => self.give_up_ssd_read(key, cx),
            }
        }
    }

    /// The backend has ended an operation.
    pub(super) fn backend_answered(
        &mut self,
        op: &Op,
        error: Option<IoError>,
        cx: &mut Context<'_>,
    ) {
        let (now, health) = (self.now, &mut self.health);
        if health.silent.is_some() {
            // It may have been the one that was waited for.
            health.watch_at = Some(now);
        }
        if error == Some(IoError::Fenced) {
            return self.fence(cx);
        }
        let is_read = matches!(
            op,
            Op::Fetch { .. } | Op::FetchPart { .. } | Op::Extents { .. }
        );
        match error {
            // It answers as it should: what it has is bad.
            Some(IoError::Corrupt) if is_read => {}
            Some(error) if is_read => {
                note(&mut health.reads, now, error);
                hasten(&mut health.watch_at, now.plus(READ_TROUBLE_SHOWN));
            }
            Some(error) => note(&mut health.writes, now, error),
            None if is_read => health.reads = None,
            None if matches!(op, Op::DestageFlush | Op::DirectFlush) => {
                // It works; whether that read would, the next one tells.
                (health.writes, health.reads) = (None, None);
            }
            // There is nothing to repeat: whoever wrote knows.
            None if matches!(op, Op::DirectWrite { .. }) => health.writes = None,
            None => {}
        }
    }

    /// Another owner has the backend: this one asks it for nothing any more, moves no tail, and
    /// answers nothing but that.
    fn fence(&mut self, cx: &mut Context<'_>) {
        if core::mem::replace(&mut self.health.fenced, true) {
            return;
        }
        self.refuse_unanswered_writes(RequestError::Fenced, cx);
        self.refuse_waiting_reads(RequestError::Fenced, cx);
        self.cancel_promotions(cx);
    }

    fn trouble_now(&self) -> Option<(Trouble, Option<Nanos>)> {
        let health = &self.health;
        if health.fenced {
            Some((Trouble::Fenced, None))
        } else if self.is_damaged() {
            Some((Trouble::LogCorrupt, None))
        } else if self.refuses_writes() {
            Some((Trouble::LogFailed, None))
        } else if let Some(since) = health.log_silent {
            Some((Trouble::LogSilent, Some(since)))
        } else if self.is_emptying_failed_log() {
            Some((Trouble::LogEmptying, None))
        } else if health.log_unreadable {
            Some((Trouble::LogUnreadable, None))
        } else if !self.lost.is_empty() {
            Some((Trouble::SectorsLost, None))
        } else if let Some(since) = health.silent {
            Some((Trouble::BackendSilent, Some(since)))
        } else if let Some(failing) = health.writes {
            Some((Trouble::BackendWrites(failing.error), Some(failing.since)))
        } else if let Some(failing) = health.reads {
            Some((Trouble::BackendReads(failing.error), Some(failing.since)))
        } else {
            self.log_is_given_up()
                .then_some((Trouble::LogGivenUp, None))
        }
    }

    /// At the end of a poll: since when something has been wrong.
    pub(super) fn note_trouble(&mut self) {
        self.health.troubled = self.trouble().map(|(_, since)| since);
    }

    /// What is wrong (the worst, if more than one thing is), and since when the volume has not been healthy.
    pub fn trouble(&self) -> Option<(Trouble, Nanos)> {
        let (trouble, since) = self.trouble_now()?;
        let since = since.unwrap_or(self.now);
        let troubled = self.health.troubled.unwrap_or(since);
        Some((trouble, since.min(troubled)))
    }

    /// Which of the five states it is in.
    pub fn state(&self) -> State {
        match self.phase {
            Phase::Failed(_) | Phase::Opening | Phase::Closed => return State::Error,
            Phase::Open | Phase::Closing => {}
        }
        match self.trouble_now().map(|(trouble, _)| trouble) {
            None => State::Healthy,
            Some(Trouble::Fenced) => State::Error,
            Some(Trouble::LogCorrupt) => State::Inconsistent,
            Some(Trouble::LogFailed) => State::ReadOnly,
            Some(
                Trouble::LogSilent
                | Trouble::LogEmptying
                | Trouble::LogGivenUp
                | Trouble::LogUnreadable
                | Trouble::SectorsLost
                | Trouble::BackendSilent
                | Trouble::BackendWrites(_)
                | Trouble::BackendReads(_),
            ) => State::Degraded,
        }
    }
}
