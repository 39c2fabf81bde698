//! A log whose device does not answer.
//!
//! ```text
//!  answering ──an operation is older than `log_answer_max`──► silent ──all that is as old has ended──► answering
//!                                                               └── the volume closes ──► closed, with late operations
//! ```
//!
//! The device is waited for, as a silent backend is. Whoever waits for the log waits too under
//! [`WhenFull::Wait`], and is told of an error under [`WhenFull::Error`]. A close does not wait for it.
//! Writes and flushes are told only once something is too old that is not a read: a bad sector may be
//! read for a minute by a device that goes on to write. What a log still has that was given up is waited for by
//! them all, so then a read for destage counts, too.
//!
//! Invariants:
//! 1. Nothing is acknowledged as durable before the device has acknowledged it, however late that is.
//! 2. What was appended stays in the log and in the index when whoever waited for it is told of an error: it may
//!    become durable later, and in order.
//! 3. An operation that is given up keeps its token until the device ends it. The memory of it stays in use that
//!    long, and what it brings is not used.
//! 4. After a close that gave operations up, nothing begins any more. Until they have ended
//!    ([`Volume::is_idle`]) the log must not be opened: what is late may still be written to it.
//!
//! A silent device is not a failed one, so [`super::LogFailure::PassThrough`] does not give the log up: the device may
//! answer a moment later, to empty the log it would have to be read, and a write that is late could reach the device
//! at any time, even after another node has opened the log. A device that has failed ends its operations with an
//! error.

use alloc::vec::Vec;

use super::{Context, Nanos, Op, Phase, Volume, WhenFull};
use crate::base::error::RequestError;

impl Op {
    /// Whether the log's device performs it, or whoever keeps a superblock beside it.
    pub(super) fn is_of_log(&self) -> bool {
        matches!(
            self,
            Self::Replay { .. }
                | Self::OpeningSuperblock
                | Self::Span { .. }
                | Self::ReadLog { .. }
                | Self::DestageRead { .. }
                | Self::DestageChunk { .. }
                | Self::DirectMark
                | Self::EndMark
                | Self::Superblock
                | Self::ClosingSuperblock
                | Self::ScrubLog(_)
                | Self::ScrubHeal(_)
                | Self::LateLog
        )
    }

    /// Whether it is a read of the log's device for what is served or destaged, or was one before it was given up.
    pub(super) fn is_read_of_log(&self) -> bool {
        matches!(
            self,
            Self::ReadLog { .. }
                | Self::DestageRead { .. }
                | Self::DestageChunk { .. }
                | Self::ScrubLog(_)
                | Self::LateLog
        )
    }

    /// Whether destage waits for it, and with destage whoever waits for what a log has that was given up.
    pub(super) fn is_read_for_destage(&self) -> bool {
        matches!(self, Self::DestageRead { .. } | Self::DestageChunk { .. })
    }
}

impl Volume {
    /// How long an operation of the log may take.
    pub(super) fn log_answer_max(&self, op: &Op) -> Option<Nanos> {
        // The largest time is none.
        let is_watched = op.is_of_log() && self.config.log_answer_max < Nanos(u64::MAX);
        is_watched.then_some(self.config.log_answer_max)
    }

    /// Whether whoever waits for writes to the log is told of an error.
    pub(super) fn refuses_writes_for_silent_log(&self) -> bool {
        self.health.log_writes_silent && self.refuses_for_silent_log()
    }

    /// Whether an operation of the log is of no use any more, since the log was given up.
    pub(super) fn is_abandoned(&self, op: &Op) -> bool {
        self.log_is_given_up() && matches!(op, Op::Span { .. } | Op::EndMark | Op::LateLog)
    }

    /// Whether whoever waits for the log is told of an error.
    pub(super) fn refuses_for_silent_log(&self) -> bool {
        self.health.log_silent.is_some() && self.config.when_full == WhenFull::Error
    }

    /// At every poll: answer those who wait for a log that is silent, if they are not to wait for it.
    pub(super) fn answer_for_silent_log(&mut self, cx: &mut Context<'_>) {
        if !self.refuses_for_silent_log() {
            return;
        }
        if self.phase == Phase::Opening {
            return self.refuse_early(RequestError::Io, cx);
        }
        if self.refuses_writes_for_silent_log() {
            self.refuse_undurable_reads(RequestError::Io, cx);
            self.refuse_acknowledgements(RequestError::Io, cx);
            self.refuse_waiting_writes(RequestError::Io, cx);
            self.refuse_what_mark_delays(RequestError::Io, cx);
        }
        self.refuse_flushes_behind_destage(RequestError::Io, cx);
    }

    /// Whether a client waits for this operation alone, and is not to wait for a silent log. A write to the ring is
    /// waited for: where it lies nothing else may be written before.
    pub(super) fn is_given_up_when_late(&self, op: &Op) -> bool {
        self.config.when_full == WhenFull::Error
            && matches!(op, Op::ReadLog { .. } | Op::ScrubLog(_))
    }

    /// The volume closes, and its log is silent: let go of it, as if a write to it had failed.
    pub(super) fn part_from_silent_log(&mut self, cx: &mut Context<'_>) {
        if self.health.log_silent.is_none() {
            return;
        }
        match self.phase {
            Phase::Opening | Phase::Failed(_) => {
                self.replay = None;
                self.refuse_early(RequestError::Closing, cx);
            }
            Phase::Open | Phase::Closing => {
                // It may become durable, or not: it is not shown.
                self.refuse_undurable_reads(RequestError::Io, cx);
                self.fail_writes(cx);
                self.closing_superblock = false;
            }
            Phase::Closed => {}
        }
        let under_way = self.ops.iter();
        let left: Vec<usize> = under_way
            .filter(|(_, running)| running.op.is_of_log())
            .map(|(key, _)| key)
            .collect();
        for key in left {
            self.give_up_log_operation(key, cx);
        }
    }

    /// Let an operation of the log end whenever it will, and answer whoever waits for it.
    pub(super) fn give_up_log_operation(&mut self, key: usize, cx: &mut Context<'_>) {
        let Some(running) = self.ops.get_mut(key) else {
            return;
        };
        if matches!(running.op, Op::LateLog) {
            return;
        }
        // In its place, so that the token stays the same.
        let op = core::mem::replace(&mut running.op, Op::LateLog);
        self.late_operations += 1;
        match op {
            Op::ReadLog { read, position, .. } => {
                self.unpin(position);
                self.fail_read(read, RequestError::Io, cx);
            }
            Op::DestageRead { position, .. } | Op::DestageChunk { position } => {
                self.unpin(position);
            }
            Op::ScrubLog(piece) | Op::ScrubHeal(piece) => self.give_up_scrub(&piece, cx),
            Op::EndMark => self.writes.marks_end = false,
            // Whoever waits for these was answered with everybody else.
            Op::Replay { .. }
            | Op::OpeningSuperblock
            | Op::Span { .. }
            | Op::DirectMark
            | Op::Superblock
            | Op::ClosingSuperblock => {}
            other => unreachable!("{other:?} is not of the log"),
        }
    }

    /// Give back the memory of a volume that is closed and waits for late operations alone.
    ///
    /// # Panics
    /// If something else is under way.
    pub fn shed(&mut self) {
        assert!(
            self.phase == Phase::Closed || matches!(self.phase, Phase::Failed(_)),
            "a volume sheds its memory once it is closed"
        );
        assert!(
            self.awaits_nothing(),
            "nothing is under way but what is late"
        );
        self.log = None;
        self.index = super::ExtentIndex::default();
        self.writes = super::write::Writes::default();
        self.direct = super::direct::Direct::default();
        self.destage = super::Destage::default();
        self.destaging = super::destaging::Destaging::default();
        self.health.watch_at = None;
    }

    /// Whether nothing of it is under way but operations that were given up.
    pub fn awaits_nothing(&self) -> bool {
        self.ops.len() == self.late_operations
    }

    /// An operation of the log has ended.
    pub(super) fn note_log_answer(&mut self) {
        if self.health.log_silent.is_some() {
            // It may have been the one that was waited for.
            self.health.watch_at = Some(self.now);
        }
    }
}
