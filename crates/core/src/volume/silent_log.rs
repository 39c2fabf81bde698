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
//! A log of which too few nodes have copies does not end its writes either. If those are to end with an error then
//! ([`super::Event::RefuseForCopies`]), invariants 1 and 2 hold for them, too.
//!
//! A silent device is not a failed one, so [`super::LogFailure::PassThrough`] does not give the log up: the device may
//! answer a moment later, to empty the log it would have to be read, and a write that is late could reach the device
//! at any time, even after another node has opened the log. A device that has failed ends its operations with an
//! error.

use super::op::Op;
use super::{Context, Phase, Volume};
use crate::base::error::RequestError;

/// Tell those of an error who wait for writes to the log, or for room in it.
fn refuse_log_writes(volume: &mut Volume, cx: &mut Context<'_>) {
    let (reads, mut from) = volume.read_side();
    reads.refuse_undurable_reads(RequestError::Io, &mut from, cx);
    let (writes, port) = (&mut volume.writes, &mut volume.port);
    writes.waiters.refuse(RequestError::Io, port, cx);
    writes.refuse_admission(RequestError::Io, port, cx);
}

impl Volume {
    /// At every poll: answer those who wait for a log that is silent, if they are not to wait for it.
    pub(super) fn answer_for_silent_log(&mut self, cx: &mut Context<'_>) {
        if self.health.refuses_writes_for_copies() && self.phase != Phase::Opening {
            refuse_log_writes(self, cx);
        }
        if !self.health.refuses_for_silent_log(self.config.when_full) {
            return;
        }
        if self.phase == Phase::Opening {
            return self.opening.refuse(RequestError::Io, &mut self.port, cx);
        }
        if self
            .health
            .refuses_writes_for_silent_log(self.config.when_full)
        {
            refuse_log_writes(self, cx);
            (self.direct).refuse_what_mark_delays(RequestError::Io, &mut self.port, cx);
        }
        let (direct, mut from) = self.direct_side();
        direct.refuse_flushes_behind_destage(RequestError::Io, &mut from, cx);
    }

    /// The volume closes, and its log is silent: let go of it, as if a write to it had failed.
    pub(super) fn part_from_silent_log(&mut self, cx: &mut Context<'_>) {
        if !self.health.log_is_silent() {
            return;
        }
        match self.phase {
            Phase::Opening | Phase::Failed(_) => {
                self.opening.give_up();
                self.opening
                    .refuse(RequestError::Closing, &mut self.port, cx);
            }
            Phase::Open | Phase::Closing => {
                // It may become durable, or not: it is not shown.
                let (reads, mut from) = self.read_side();
                reads.refuse_undurable_reads(RequestError::Io, &mut from, cx);
                self.fail_writes(cx);
                self.closing_superblock = false;
            }
            Phase::Closed => {}
        }
        for key in self.port.log_operations() {
            self.give_up_log_operation(key, cx);
        }
    }

    /// Let an operation of the log end whenever it will, and answer whoever waits for it.
    pub(super) fn give_up_log_operation(&mut self, key: usize, cx: &mut Context<'_>) {
        let Some(op) = self.port.give_up_log_operation(key) else {
            return;
        };
        match op {
            Op::ReadLog { read, position, .. } => {
                self.log.unpin(position);
                let (reads, mut from) = self.read_side();
                reads.fail_read(read, RequestError::Io, &mut from, cx);
            }
            Op::DestageRead { position, .. } | Op::DestageChunk { position } => {
                self.log.unpin(position);
            }
            Op::ScrubLog(piece) | Op::ScrubHeal(piece) => self.give_up_scrub(&piece, cx),
            Op::EndMark => self.writes.end_mark_ended(),
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
            self.port.awaits_nothing(),
            "nothing is under way but what is late"
        );
        self.log.shed();
        self.index = super::ExtentIndex::default();
        self.writes = super::write::Writes::default();
        self.direct = super::direct::Direct::default();
        self.destaging = super::destaging::Destaging::default();
        self.port.stop_watching();
    }

    /// Whether nothing of it is under way but operations that were given up.
    pub fn awaits_nothing(&self) -> bool {
        self.port.awaits_nothing()
    }
}
