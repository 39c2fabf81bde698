//! Dirty blocks of the log that do not match their checksums, and the sectors that were lost with such.
//!
//! ```text
//!            a block is read bad, and again                every bad block was read well, or is not needed
//!  Healthy ────────────────────────────────► Inconsistent ────────────────────────────────────────────────► Healthy
//!                                                 └── the volume is opened again ──► what is bad still is lost
//!
//!           an opening finds that sectors are lost       all of them were written again
//!  Healthy ──────────────────────────────────────► Degraded ──────────────────────────► Healthy
//! ```
//!
//! Invariants:
//! 1. A block that is read bad is read again, [`LOG_READ_TRIES_MAX`] times in all, before it counts as bad.
//! 2. While one is bad, the volume refuses writes and flushes. Nothing of the span that holds the first bad block,
//!    or behind it, is taken up by destage; a generation that was taken up before is written but for that, and neither
//!    flushed nor retired. So the backend gets all that lies before the damage, and stays a prefix.
//! 3. A block that is read well is not bad any more, whatever it was.
//! 4. An opening takes what is bad out of the log, and records which sectors are lost before anything else happens:
//!    in the superblock of the opening, and from then on in each that moves the tail. No backend is given what is bad.
//! 5. A lost sector is never shown, not as the backend or the cache had it before: a read of it fails, until it is
//!    written, zeroed or discarded. Such a write goes through the log, whose superblock forgets the loss
//!    when it forgets the write; so no path past the log is taken while something is lost.
//!
//! Memory is bounded: of more than [`LOG_BAD_BLOCKS_MAX`] bad blocks the first ones are known. A read that
//! fails is another matter: destage tries it again, see [`super::health`].

use alloc::collections::BTreeSet;
use core::ops::Range;

use super::{Context, Volume, VolumeStats};
use crate::base::error::RequestError;
use crate::base::io::SectorRange;
use crate::base::limits::{BLOCK_BYTES, LOG_BAD_BLOCKS_MAX};
use crate::format::block_checksum;
use crate::log::extent_index::Sequence;
use crate::log::lost::LostSectors;
use crate::log::write_log::WriteLog;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Damage {
    /// Positions of the bad blocks.
    bad: BTreeSet<u64>,
    /// What is lost, as of the last write that was accepted.
    lost: LostSectors,
    /// Where the log had ended when something was cut off of what is lost.
    cut_end: u64,
}

impl Damage {
    /// An opening has found that these are lost.
    pub(super) fn know_lost(&mut self, lost: LostSectors) {
        self.lost = lost;
    }

    /// What was lost with the log and has not been written since.
    pub(super) fn lost(&self) -> &LostSectors {
        &self.lost
    }

    /// These sectors are not part of the volume any more, and what is lost of them is forgotten.
    pub(super) fn cut(&mut self, range: SectorRange, log: &mut WriteLog) {
        if log.superblocks().lost().overlaps(range) {
            self.cut_end = log.sealed_end();
        }
        log.superblocks_mut().forget_lost(range);
        self.lost.remove(range);
    }

    /// Whether the log may still hold some of what is lost and was cut off: at the next opening it may read well.
    pub(super) fn holds_cut(&self, log: &WriteLog) -> bool {
        log.tail() < self.cut_end
    }

    /// Why a write cannot be taken for the sake of what is lost: what goes past the log would not be recorded, nor more
    /// pieces than there is room for.
    pub(super) fn refusal_for_lost(
        &self,
        range: SectorRange,
        is_direct: bool,
    ) -> Option<RequestError> {
        if self.lost.is_empty() {
            return None;
        }
        let refused = if is_direct {
            self.lost.overlaps(range)
        } else {
            self.lost.splits_too_far(range)
        };
        refused.then_some(RequestError::Io)
    }

    /// A write was accepted.
    pub(super) fn note_written(&mut self, range: SectorRange) {
        if !self.lost.is_empty() {
            self.lost.remove(range);
        }
    }

    /// Whether dirty data in the log is bad.
    pub(super) fn is_damaged(&self) -> bool {
        !self.bad.is_empty()
    }

    /// Blocks of the log from `position` on were read, and read again: those that do not match are bad. If all
    /// match, they cannot be unpacked, and all are bad.
    pub(super) fn found_bad(
        &mut self,
        position: u64,
        data: &[u8],
        log: &WriteLog,
        stats: &mut VolumeStats,
    ) {
        let blocks = (position..).zip(data.chunks_exact(BLOCK_BYTES));
        let is_bad = |(at, block): &(u64, &[u8])| block_checksum(block) != log.checksum(*at);
        let mut bad: BTreeSet<u64> = blocks.filter(is_bad).map(|(at, _)| at).collect();
        if bad.is_empty() {
            bad = (position..).take(data.len() / BLOCK_BYTES).collect();
        }
        self.note_bad(bad, log, stats);
    }

    /// The only copy of these blocks is bad.
    pub(super) fn note_bad(
        &mut self,
        bad: impl IntoIterator<Item = u64>,
        log: &WriteLog,
        stats: &mut VolumeStats,
    ) {
        // What was retired meanwhile is not needed any more.
        let front = log.spans().front().map(|span| span.position);
        let is_needed = |at: &u64| front.is_some_and(|front| front <= *at);
        for position in bad.into_iter().filter(is_needed) {
            let is_new = self.bad.insert(position);
            stats.log_corrupt_blocks += u64::from(is_new);
        }
        while self.bad.len() > LOG_BAD_BLOCKS_MAX {
            self.bad.pop_last();
        }
    }

    /// These blocks were read well.
    pub(super) fn found_good(&mut self, positions: &Range<u64>) {
        if self.is_damaged() {
            let is_other = |position: &u64| !positions.contains(position);
            self.bad.retain(is_other);
        }
    }

    /// What lies before the log's tail is not needed any more.
    pub(super) fn forget_bad(&mut self, log: &WriteLog) {
        if self.is_damaged() {
            let front = log.spans().front();
            let tail = front.map_or(u64::MAX, |span| span.position);
            self.bad = self.bad.split_off(&tail);
        }
    }

    /// The first bad block, and the first entry of the span that holds it: what destage stops before.
    pub(super) fn destage_end(&self, log: &WriteLog) -> Option<(u64, Sequence)> {
        let position = *self.bad.first()?;
        let spans = log.spans();
        let before = spans.partition_point(|span| span.end() <= position);
        let last = before.checked_sub(1).map(|last| &spans[last]);
        let sequence = last.map_or(log.first_sequence(), |span| span.end_sequence);
        Some((position, sequence))
    }
}

impl Volume {
    /// After something was found to be bad: whoever waits for the log is told.
    pub(super) fn refuse_for_damage(&mut self, cx: &mut Context<'_>) {
        if self.damage.is_damaged() {
            self.writes
                .refuse_admission(RequestError::Inconsistent, &mut self.port, cx);
        }
    }

    /// What was lost with the log and has not been written since. Reads of it fail.
    pub fn lost(&self) -> &LostSectors {
        self.damage.lost()
    }
}
