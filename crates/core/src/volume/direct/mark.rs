//! What the log's superblock says of the backend: whether that may hold writes past the log that it has not flushed.

use crate::cache::Tie;
use crate::volume::Context;
use crate::volume::op::Op;
use crate::volume::open_log::OpenLog;
use crate::volume::port::Port;

/// What it says, on the device.
#[derive(Default, Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    /// Nothing, as far as it is known.
    #[default]
    Unset,
    /// It is being written, to one superblock and then to the other: what damages one does not hide it.
    Writing {
        /// Whether it is the second one.
        again: bool,
    },
    /// The backend may hold writes past the log that it has not flushed.
    Set,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct UnflushedMark {
    mark: Mark,
}

impl UnflushedMark {
    /// Whether it says so durably.
    pub(super) fn is_set(&self) -> bool {
        self.mark == Mark::Set
    }

    /// Whether that is being written.
    pub(super) fn is_being_written(&self) -> bool {
        matches!(self.mark, Mark::Writing { .. })
    }

    /// It was found to say so.
    pub(super) fn found(&mut self) {
        self.mark = Mark::Set;
    }

    /// Have the log say so, unless it does.
    pub(super) fn write(&mut self, log: &mut OpenLog, port: &mut Port, cx: &mut Context<'_>) {
        if self.mark != Mark::Unset {
            return;
        }
        self.mark = Mark::Writing { again: false };
        let superblocks = log.get_mut().superblocks_mut();
        superblocks.mark_unflushed(true);
        // No superblock follows each of these writes that could say what the cache has forgotten for them.
        superblocks.set_tie(Tie::UNKNOWN);
        let superblock = superblocks.next();
        log.write_superblock(Op::DirectMark, superblock, port, cx);
    }

    /// A superblock says so. The other one follows, where the log is whole.
    pub(super) fn written(
        &mut self,
        is_whole: bool,
        log: &mut OpenLog,
        port: &mut Port,
        cx: &mut Context<'_>,
    ) {
        if self.mark == (Mark::Writing { again: false }) && is_whole {
            self.mark = Mark::Writing { again: true };
            let superblock = log.get_mut().superblocks_mut().next();
            return log.write_superblock(Op::DirectMark, superblock, port, cx);
        }
        self.mark = Mark::Set;
    }

    /// It does not say so any more, or it is not known whether it does.
    pub(super) fn unset(&mut self) {
        self.mark = Mark::Unset;
    }
}
