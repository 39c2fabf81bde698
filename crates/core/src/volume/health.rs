//! What is wrong with a volume, and since when.
//!
//! A backend is *silent* while one of its operations has been under way for longer than
//! [`VolumeConfig::backend_answer_max`], and a log while one of its device's has been for longer than
//! [`VolumeConfig::log_answer_max`] (`silent_log` says what follows from that); a backend's writes *fail* from the first one that fails until a
//! flush succeeds after all were repeated, for only then the backend holds what it refused; its
//! reads fail until one succeeds or a flush does, or for a while, since nobody may read again. The log is *unreadable*
//! from the first read for destage that fails until the backend has flushed the generation that needs it.
//!
//! [`VolumeConfig::backend_answer_max`]: super::VolumeConfig::backend_answer_max
//! [`VolumeConfig::log_answer_max`]: super::VolumeConfig::log_answer_max

use alloc::vec::Vec;

use super::op::Op;
use super::port::{Overdue, Performer, Port};
use super::{Context, Nanos, Phase, RequestError, Volume, WhenFull};
use crate::base::error::IoError;

/// How long a failed read of the backend shows, if no other read follows.
const READ_TROUBLE_SHOWN: Nanos = Nanos::from_millis(30_000);

/// The states of a core. The first three serve, the last three refuse writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// All is well.
    Healthy,
    /// Serving with the backend failing or not answering: data is kept in the log; with a log that does not answer or
    /// cannot be read for destage, or without one; with sectors that were lost, whose reads fail until they are
    /// written; with fewer copies of the log than there should be; with reads that wait for a lease.
    Degraded,
    /// A log write failed: reads and destage go on, writes are refused until it is reopened. Or there are too few copies
    /// of the log: writes wait for more.
    ReadOnly,
    /// Dirty data in the log is damaged: writes are refused until it reads well; reads go on, and destage of
    /// what lies before the damage. Of a copy of another node's log: it is not whole, and cannot take over.
    Inconsistent,
    /// Not open here: another node serves it, or may, and this one has a whole copy of its log.
    Standby,
    /// Not open, or another owner has taken the backend over: everything is refused.
    Error,
}

/// What is wrong with an open volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Another owner has taken the backend over.
    Fenced,
    /// The log is not replayed on, since there is no memory for what it may hold until others have destaged theirs.
    MemoryShort,
    /// Reads wait, since this node cannot tell whether another one serves the volume.
    NoLease,
    /// Dirty data in the log is corrupt.
    LogCorrupt,
    /// A log write failed.
    LogFailed,
    /// Fewer nodes have a copy of the log than writes need: they wait.
    CopiesTooFew,
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
    /// Fewer nodes have a copy of the log than should.
    CopiesShort,
    /// The backend has not answered for too long.
    BackendSilent,
    /// The backend does not take what is written.
    BackendWrites(IoError),
    /// The backend does not give what is read.
    BackendReads(IoError),
}

/// How many nodes have a copy of a volume's log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Copies {
    /// As many as should, or nobody asked for copies.
    #[default]
    All,
    /// Fewer.
    Short,
    /// Fewer than writes need.
    TooFew,
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
    /// Since when the operation of the backend is under way that is too old.
    silent: Option<Nanos>,
    /// The same of the log's operations.
    log_silent: Option<Nanos>,
    /// Whether what is too old of the log is what writes wait for, too.
    log_writes_silent: bool,
    /// Since when a replay waits for memory.
    memory_short: Option<Nanos>,
    /// Whether writes are refused, since too few nodes have copies of the log.
    refuses_for_copies: bool,
    /// Destage could not read what it needs of the log, and has not got there since.
    log_unreadable: bool,
    writes: Option<Failing>,
    reads: Option<Failing>,
    copies: Copies,
    /// Since when there have been as many.
    copies_since: Nanos,
    /// Since when something was wrong at the end of every poll, whatever it was.
    troubled: Option<Nanos>,
}

impl Health {
    /// What is under way was looked through. Returns what is to be given up.
    fn note_overdue(&mut self, overdue: Overdue, port: &mut Port) -> Vec<(usize, Performer)> {
        if let Some(reads) = self.reads {
            let until = reads.last.plus(READ_TROUBLE_SHOWN);
            if until > port.now {
                port.look_until(until);
            } else {
                self.reads = None;
            }
        }
        self.silent = overdue.silent;
        self.log_silent = overdue.log_silent;
        self.log_writes_silent = overdue.log_writes_silent;
        overdue.late
    }

    /// Whether a replay waits for memory.
    pub(super) fn note_memory(&mut self, waits: bool, now: Nanos) {
        self.memory_short = waits.then(|| self.memory_short.unwrap_or(now));
    }

    /// The backend has ended an operation. Returns whether another owner has it.
    pub(super) fn backend_answered(
        &mut self,
        op: &Op,
        error: Option<IoError>,
        port: &mut Port,
    ) -> bool {
        if self.silent.is_some() {
            // It may have been the one that was waited for.
            port.look_now();
        }
        let is_read = matches!(
            op,
            Op::Fetch { .. } | Op::FetchPart { .. } | Op::Extents { .. }
        );
        match error {
            Some(IoError::Fenced) => return true,
            // It answers as it should: what it has is bad.
            Some(IoError::Corrupt) if is_read => {}
            Some(error) if is_read => {
                note(&mut self.reads, port.now, error);
                port.look_until(port.now.plus(READ_TROUBLE_SHOWN));
            }
            Some(error) => note(&mut self.writes, port.now, error),
            None if is_read => self.reads = None,
            None if matches!(op, Op::DestageFlush | Op::DirectFlush) => {
                // It works; whether that read would, the next one tells.
                (self.writes, self.reads) = (None, None);
            }
            // There is nothing to repeat: whoever wrote knows.
            None if matches!(op, Op::DirectWrite { .. }) => self.writes = None,
            None => {}
        }
        false
    }

    /// The log's device has ended an operation.
    pub(super) fn log_answered(&self, port: &mut Port) {
        if self.log_silent.is_some() {
            // It may have been the one that was waited for.
            port.look_now();
        }
    }

    /// Whether the backend has not answered for too long.
    pub(super) fn backend_is_silent(&self) -> bool {
        self.silent.is_some()
    }

    /// Whether the log's device has not answered for too long.
    pub(super) fn log_is_silent(&self) -> bool {
        self.log_silent.is_some()
    }

    /// Whether whoever waits for the log is told of an error.
    pub(super) fn refuses_for_silent_log(&self, when_full: WhenFull) -> bool {
        self.log_silent.is_some() && when_full == WhenFull::Error
    }

    /// Whether whoever waits for writes to the log is told of an error.
    pub(super) fn refuses_writes_for_silent_log(&self, when_full: WhenFull) -> bool {
        self.log_writes_silent && self.refuses_for_silent_log(when_full)
    }

    /// Too few nodes have copies of the log, and writes are refused for that, or not any more.
    pub(super) fn refuse_for_copies(&mut self, refuses: bool) {
        self.refuses_for_copies = refuses;
    }

    /// Whether whoever waits for writes to the log is told of an error, since too few nodes have copies of it.
    pub(super) fn refuses_writes_for_copies(&self) -> bool {
        self.refuses_for_copies
    }

    /// Destage could not read what it needs of the log. Returns whether it could not before either.
    pub(super) fn log_is_unreadable(&mut self) -> bool {
        core::mem::replace(&mut self.log_unreadable, true)
    }

    /// Destage has read all that it needed.
    pub(super) fn log_was_read(&mut self) {
        self.log_unreadable = false;
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

impl Volume {
    /// Look through what is under way, if something may have become too old.
    pub(super) fn watch(&mut self, cx: &mut Context<'_>) {
        let is_patient = self.config.when_full != WhenFull::Error;
        let is_given_up = self.log.is_given_up();
        let Some(overdue) = self.port.look_through(is_given_up, is_patient) else {
            return;
        };
        for (key, performer) in self.health.note_overdue(overdue, &mut self.port) {
            if let Performer::Log = performer {
                self.give_up_log_operation(key, cx);
            } else {
                let (reads, mut from) = self.read_side();
                reads.give_up_ssd_read(key, &mut from, cx);
            }
        }
    }

    /// Another owner has the backend: this one asks it for nothing any more, moves no tail, and
    /// answers nothing but that.
    pub(super) fn fence(&mut self, cx: &mut Context<'_>) {
        if self.port.fence() {
            return;
        }
        self.refuse_unanswered_writes(RequestError::Fenced, cx);
        self.lease.refuse(RequestError::Fenced, &mut self.port, cx);
        let (reads, mut from) = self.read_side();
        reads.refuse_waiting_reads(RequestError::Fenced, &mut from, cx);
        let (reads, mut from) = self.read_side();
        reads.cancel_promotions(&mut from, cx);
    }

    /// So many nodes have a copy of the log now.
    pub fn set_copies(&mut self, copies: Copies, now: Nanos) {
        if self.health.copies != copies {
            (self.health.copies, self.health.copies_since) = (copies, now);
        }
    }

    fn trouble_now(&self) -> Option<(Trouble, Option<Nanos>)> {
        let health = &self.health;
        if self.port.is_fenced() {
            Some((Trouble::Fenced, None))
        } else if let Some(since) = health.memory_short {
            Some((Trouble::MemoryShort, Some(since)))
        } else if self.damage.is_damaged() {
            Some((Trouble::LogCorrupt, None))
        } else if self.log.refuses_writes() {
            Some((Trouble::LogFailed, None))
        } else if health.copies == Copies::TooFew {
            // What waits for copies makes the log look silent.
            Some((Trouble::CopiesTooFew, Some(health.copies_since)))
        } else if let Some(since) = health.log_silent {
            Some((Trouble::LogSilent, Some(since)))
        } else if self.direct.is_emptying_failed_log(&self.log) {
            Some((Trouble::LogEmptying, None))
        } else if health.log_unreadable {
            Some((Trouble::LogUnreadable, None))
        } else if !self.damage.lost().is_empty() {
            Some((Trouble::SectorsLost, None))
        } else if let Some(since) = self.lease.missed_since(self.port.now) {
            Some((Trouble::NoLease, Some(since)))
        } else if let Some(since) = health.silent {
            Some((Trouble::BackendSilent, Some(since)))
        } else if let Some(failing) = health.writes {
            Some((Trouble::BackendWrites(failing.error), Some(failing.since)))
        } else if let Some(failing) = health.reads {
            Some((Trouble::BackendReads(failing.error), Some(failing.since)))
        } else if self.log.is_given_up() {
            Some((Trouble::LogGivenUp, None))
        } else {
            let is_short = health.copies == Copies::Short;
            is_short.then_some((Trouble::CopiesShort, Some(health.copies_since)))
        }
    }

    /// At the end of a poll: since when something has been wrong.
    pub(super) fn note_trouble(&mut self) {
        self.health.troubled = self.trouble().map(|(_, since)| since);
    }

    /// What is wrong (the worst, if more than one thing is), and since when the volume has not been healthy.
    pub fn trouble(&self) -> Option<(Trouble, Nanos)> {
        let (trouble, since) = self.trouble_now()?;
        let since = since.unwrap_or(self.port.now);
        let troubled = self.health.troubled.unwrap_or(since);
        Some((trouble, since.min(troubled)))
    }

    /// Which of the states it is in.
    pub fn state(&self) -> State {
        match self.phase {
            Phase::Failed(_) | Phase::Opening | Phase::Closed => return State::Error,
            Phase::Open | Phase::Closing => {}
        }
        match self.trouble_now().map(|(trouble, _)| trouble) {
            None => State::Healthy,
            Some(Trouble::Fenced) => State::Error,
            Some(Trouble::LogCorrupt) => State::Inconsistent,
            Some(Trouble::LogFailed | Trouble::CopiesTooFew) => State::ReadOnly,
            Some(
                Trouble::MemoryShort
                | Trouble::NoLease
                | Trouble::LogSilent
                | Trouble::LogEmptying
                | Trouble::LogGivenUp
                | Trouble::LogUnreadable
                | Trouble::SectorsLost
                | Trouble::CopiesShort
                | Trouble::BackendSilent
                | Trouble::BackendWrites(_)
                | Trouble::BackendReads(_),
            ) => State::Degraded,
        }
    }
}
