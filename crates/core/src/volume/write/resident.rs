//! What memory holds of the data in the log: the oldest durable data goes first.

use crate::base::buf::Pool;
use crate::base::limits::BLOCK_BYTES;
use crate::log::extent_index::Sequence;
use crate::log::write_log::WriteLog;

/// See the module.
#[derive(Debug, Default)]
pub(in crate::volume) struct Resident {
    /// Data of entries from this sequence on may be in memory.
    from: Sequence,
    bytes: u64,
}

impl Resident {
    /// Of what was replayed nothing is in memory.
    pub(in crate::volume) fn begin(&mut self, next: Sequence) {
        self.from = next;
    }

    /// Bytes of buffers.
    pub(in crate::volume) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// An entry was appended whose data holds so many blocks.
    pub(super) fn add(&mut self, held_blocks: u16) {
        self.bytes += u64::from(held_blocks) * BLOCK_BYTES as u64;
    }

    /// Entries that held so much are retired.
    pub(in crate::volume) fn retired(&mut self, bytes: usize) {
        self.bytes -= bytes as u64;
    }

    /// Drop the oldest durable data from memory until at most `bytes_max` are left.
    pub(in crate::volume) fn trim(&mut self, bytes_max: u64, log: &mut WriteLog) {
        self.from = self.from.max(log.first_sequence());
        while self.bytes > bytes_max && self.from < log.durable_sequence() {
            let entry = log.entry_mut(self.from);
            if entry.data.take().is_some() {
                let held = usize::from(entry.held_blocks) * BLOCK_BYTES;
                self.bytes -= held as u64;
            }
            self.from += 1;
        }
    }

    /// Give memory back while the pool is short of it.
    pub(in crate::volume) fn relieve(&mut self, pool: &Pool, log: &mut WriteLog) {
        let reserve = pool.total_bytes() / 4;
        let free = pool.free_bytes();
        if free < reserve && self.bytes > 0 {
            let keep = self.bytes.saturating_sub((reserve - free) as u64);
            self.trim(keep, log);
        }
    }
}
