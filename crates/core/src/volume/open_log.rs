//! The volume's log while the volume is open: who needs what of it, and how far its device can be written.
//!
//! ```text
//!  Whole ──a write fails──► Failed: nothing is written to it any more
//!    └─────a write fails, and the volume may go on without it──► GivenUp ──superblocks are kept beside it
//!                                                                   └── one cannot be kept ──► Failed
//! ```
//!
//! Invariant: a position that a read in flight needs is pinned, and not written over.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::Context;
use super::op::Op;
use super::port::Port;
use crate::base::buf::{Buf, BufMut};
use crate::base::io::{Action, Token};
use crate::base::limits::BLOCK_BYTES;
use crate::format::block_checksum;
use crate::log::write_log::WriteLog;

/// Whether the log's device is written.
#[derive(Clone, Copy, Debug, Default)]
enum Device {
    #[default]
    Whole,
    /// A write has failed, and the volume goes on without it, or is about to.
    GivenUp,
    /// A write has failed, and nothing is written to the volume any more.
    Failed {
        /// The volume was to go on without the device.
        given_up: bool,
    },
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct OpenLog {
    log: Option<WriteLog>,
    /// Positions that reads in flight need, with their number.
    pins: BTreeMap<u64, u32>,
    device: Device,
    /// A superblock is being kept beside the device.
    keeping: bool,
    /// Dirty data could not be read back from a device that was given up.
    unreadable: bool,
}

impl OpenLog {
    /// It was replayed.
    pub(super) fn opened(&mut self, log: WriteLog) {
        self.log = Some(log);
    }

    /// It is not needed any more.
    pub(super) fn shed(&mut self) {
        self.log = None;
    }

    /// It, once the volume is open.
    #[inline]
    pub(super) fn if_open(&self) -> Option<&WriteLog> {
        self.log.as_ref()
    }

    /// It, of a volume that is open.
    #[inline]
    pub(super) fn get(&self) -> &WriteLog {
        self.log
            .as_ref()
            .expect("the log is there once the volume is open")
    }

    /// It, of a volume that is open.
    #[inline]
    pub(super) fn get_mut(&mut self) -> &mut WriteLog {
        self.log
            .as_mut()
            .expect("the log is there once the volume is open")
    }

    /// Let the log know how many runs its entries have in memory.
    #[inline]
    pub(super) fn note_runs(&mut self, runs: usize) {
        if let Some(log) = &mut self.log {
            log.note_runs(runs);
        }
    }

    // Reading.

    /// Read from a position on, which stays in place until [`Self::unpin`].
    pub(super) fn read(
        &mut self,
        position: u64,
        op: Op,
        buf: BufMut,
        port: &mut Port,
        cx: &mut Context<'_>,
    ) {
        self.pin(position);
        let token = port.begin(op);
        self.read_pinned(token, position, buf, false, cx);
    }

    /// What lies from a position on stays in place until [`Self::unpin`].
    pub(super) fn pin(&mut self, position: u64) {
        *self.pins.entry(position).or_default() += 1;
    }

    /// Read what stays in place. If it was read before and `is_bad`: what was wrong may have been the way, and not the
    /// medium, and another node may have it.
    pub(super) fn read_pinned(
        &self,
        token: Token,
        position: u64,
        buf: BufMut,
        is_bad: bool,
        cx: &mut Context<'_>,
    ) {
        let (offset, _) = self.get().locate(position);
        cx.actions.push(Action::LogRead {
            token,
            offset,
            buf,
            is_bad,
        });
    }

    /// A read has ended.
    pub(super) fn unpin(&mut self, position: u64) {
        let count = self.pins.get_mut(&position).expect("a pinned position");
        *count -= 1;
        if *count == 0 {
            self.pins.remove(&position);
            self.forget_checksums();
        }
    }

    /// Forget the checksums of what is retired and not being read.
    pub(super) fn forget_checksums(&mut self) {
        let oldest = self.oldest_pin();
        self.get_mut().forget_checksums(oldest);
    }

    /// The first position that a read needs.
    pub(super) fn oldest_pin(&self) -> Option<u64> {
        self.pins.keys().next().copied()
    }

    /// Whether every block of `data`, read from the log at `position`, has its checksum.
    pub(super) fn blocks_match(&self, data: &[u8], position: u64) -> bool {
        (position..)
            .zip(data.chunks_exact(BLOCK_BYTES))
            .all(|(at, block)| block_checksum(block) == self.get().checksum(at))
    }

    // Its device.

    /// Whether a write has failed, and the volume does not go on without it.
    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        matches!(self.device, Device::Failed { .. })
    }

    /// A write has failed, and the volume does not go on without it.
    pub(super) fn fail(&mut self) {
        self.device = Device::Failed {
            given_up: self.is_given_up(),
        };
    }

    /// Whether the device failed and the volume goes on without it, or is about to.
    #[inline]
    pub(super) fn is_given_up(&self) -> bool {
        matches!(
            self.device,
            Device::GivenUp | Device::Failed { given_up: true }
        )
    }

    /// The volume goes on without the device.
    pub(super) fn give_up(&mut self) {
        self.device = Device::GivenUp;
        self.get_mut().abandon();
    }

    /// Whether dirty data could not be read back from a device that was given up.
    pub(super) fn is_unreadable(&self) -> bool {
        self.unreadable
    }

    /// Whether dirty data can be read back from a device that was given up.
    pub(super) fn set_unreadable(&mut self, unreadable: bool) {
        self.unreadable = unreadable;
    }

    /// Whether its device is given superblocks that are for their own sake alone.
    pub(super) fn takes_superblocks(&self) -> bool {
        !self.has_failed() && !self.is_given_up()
    }

    /// Whether nothing can be written, for the log's sake.
    pub(super) fn refuses_writes(&self) -> bool {
        self.has_failed() || self.unreadable
    }

    /// Have a superblock made durable: on the log's device, or once that has failed beside it.
    pub(super) fn write_superblock(
        &mut self,
        op: Op,
        (offset, block): (u64, Buf),
        port: &mut Port,
        cx: &mut Context<'_>,
    ) {
        let token = port.begin(op);
        self.keeping = self.is_given_up();
        cx.actions.push(if self.keeping {
            Action::KeepSuperblock { token, block }
        } else {
            Action::LogWrite {
                token,
                offset,
                data: Vec::from([block]),
                way: None,
            }
        });
    }

    /// Whether a superblock was being kept beside the device; its end is known.
    pub(super) fn superblock_ended(&mut self) -> bool {
        core::mem::take(&mut self.keeping)
    }
}
