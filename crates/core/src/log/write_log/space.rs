//! What of the ring may be used, and how much of that is free.
//!
//! The ring has its full size from the beginning. What of it is *prepared*, that is taken from the file system, zeroed and
//! durable, is one run from its beginning. Spans lie only there: where that run ends, the head goes on with the next lap,
//! as it does at the ring's end.
//!
//! ```text
//!                      tail ↓              ↓ head
//!  one lap     ├───────────┼███████████████┼─────────┤ · · · · · · · · · ┤
//!              0     free                    free    prepared        ring
//!                      head ↓              ↓ tail
//!  two laps    ├███████████┼───────────────┼█████████┤ · · · · · · · · · ┤
//!                                free         jumped over, if more was prepared since: free with the next lap
//! ```
//!
//! Invariants:
//! 1. No span is written beyond what is prepared, and what is live lies within it.
//! 2. Less is prepared only while the log is at rest: it is empty, and both superblocks say that it is. So nothing that
//!    is given back is needed, whichever of them counts.
//! 3. Nobody waits for more to be prepared. Until it is, the log is a smaller ring.

use super::{ADMISSION_BYTES, CONTROL_BLOCKS_MAX, SPAN_BLOCKS_MAX, Span, WriteLog};
use crate::base::limits::{BLOCK_BYTES, LOG_BYTES_MIN, SPAN_ENTRIES_MAX};
use crate::format::LOG_HEADER_BLOCKS;

/// Blocks of the ring of the smallest log: so many are prepared at least.
pub const PREPARED_BLOCKS_LEAST: u64 = LOG_BYTES_MIN / BLOCK_BYTES as u64 - LOG_HEADER_BLOCKS;

/// Bytes of a region that begins with so many blocks of a ring.
pub const fn region_bytes(ring_blocks: u64) -> u64 {
    (LOG_HEADER_BLOCKS + ring_blocks) * BLOCK_BYTES as u64
}

/// The blocks of a ring, as spans may lie in them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring {
    /// All.
    pub(super) blocks: u64,
    /// Of them, from the first one on, those that may be used.
    pub(super) prepared: u64,
}

impl Ring {
    /// One that may be used whole.
    pub(super) fn new(blocks: u64) -> Self {
        Self {
            blocks,
            prepared: blocks,
        }
    }

    /// The blocks of the ring in so many bytes of the region, but no fewer than the smallest log has.
    fn blocks_of(&self, bytes: u64) -> u64 {
        let blocks = (bytes / BLOCK_BYTES as u64).saturating_sub(LOG_HEADER_BLOCKS);
        blocks.max(PREPARED_BLOCKS_LEAST).min(self.blocks)
    }

    /// The block behind a span.
    pub(super) fn end_slot(&self, span: &Span) -> u64 {
        span.position % self.blocks + span.blocks
    }

    /// A span was found on the device: whatever was said, so much is there.
    pub(super) fn note_found(&mut self, span: &Span) {
        self.prepared = self.prepared.max(self.end_slot(span));
    }

    /// Where a span of so many blocks goes: at the head, or at the next lap if it does not fit there.
    pub(super) fn place(&self, head: u64, blocks: u64) -> u64 {
        let slot = head % self.blocks;
        if slot + blocks <= self.prepared {
            head
        } else {
            head - slot + self.blocks
        }
    }

    /// Blocks that spans may be written to from the head on without covering what lies at `from` or after it.
    fn free_blocks(&self, head: u64, from: u64) -> u64 {
        let (slot, first) = (head % self.blocks, from % self.blocks);
        let until = first.min(self.prepared);
        if head / self.blocks == from / self.blocks {
            self.prepared.saturating_sub(slot) + until
        } else {
            until.saturating_sub(slot)
        }
    }
}

impl WriteLog {
    /// Blocks in the ring.
    pub fn ring_blocks(&self) -> u64 {
        self.ring.blocks
    }

    /// Blocks of the ring, from its beginning on, that are prepared: its size for all that goes by how full it is.
    pub fn prepared_blocks(&self) -> u64 {
        self.ring.prepared
    }

    /// What an opening found prepared: so many bytes of the region. Never less than what is live.
    pub(crate) fn found_prepared(&mut self, bytes: u64) {
        self.ring.prepared = self.ring.blocks_of(bytes);
    }

    /// So many bytes of the region are prepared now, if that is more than before.
    pub fn prepare(&mut self, bytes: u64) {
        self.ring.prepared = self.ring.prepared.max(self.ring.blocks_of(bytes));
    }

    /// Use no more than so many bytes of the region from now on. Only at rest.
    pub fn give_back(&mut self, bytes: u64) {
        assert!(self.is_at_rest(), "what may be needed is not given back");
        self.ring.prepared = self.ring.prepared.min(self.ring.blocks_of(bytes));
    }

    /// Whether nothing of the ring is needed, by what is in memory or by either superblock.
    pub fn is_at_rest(&self) -> bool {
        self.is_empty() && self.superblocks.both_name(self.head)
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.head == self.tail && self.spans.is_empty() && self.open.entries.is_empty()
    }

    /// Whether an entry with so many data blocks can be appended and sealed without covering live
    /// space from `oldest` (a position that readers still need) or the tail.
    pub fn has_room(&self, data_blocks: u64, oldest: Option<u64>) -> bool {
        let slack = SPAN_ENTRIES_MAX as u64;
        if self.entries.len() as u64 + slack > self.entries_max
            || self.parts() + slack > self.parts_max()
            || !self.share.takes(ADMISSION_BYTES)
        {
            return false;
        }
        let from = oldest.map_or(self.tail, |oldest| oldest.min(self.tail));
        // The open span and this entry may become two spans, one of them after a jump to the next
        // lap over less than its own length.
        self.open_blocks() + data_blocks + 2 * CONTROL_BLOCKS_MAX + SPAN_BLOCKS_MAX
            <= self.ring.free_blocks(self.head, from)
    }

    /// Blocks of what is prepared that are in use, jumps and what is open included, also if that has no data.
    pub fn occupied_blocks(&self) -> u64 {
        let open = u64::from(!self.open.entries.is_empty()) + self.open_blocks();
        self.ring.prepared - self.ring.free_blocks(self.head, self.tail) + open
    }

    /// The same; more if it is the number of entries, or of all that is in memory for them, that fills the log. 0: the log
    /// is empty.
    pub fn used_blocks(&self) -> u64 {
        let share = |count: u64, of: u64| {
            let blocks = u128::from(self.ring.prepared) * u128::from(count);
            (blocks / u128::from(of)).min(self.ring.prepared.into()) as u64
        };
        let entries = share(self.entries.len() as u64, self.entries_max);
        let parts = share(self.parts(), self.parts_max());
        let used = self.occupied_blocks();
        let memory = if used == 0 { 0.0 } else { self.share.fill() };
        let memory = (self.ring.prepared as f64 * memory) as u64;
        used.max(entries).max(parts).max(memory)
    }
}

const _: () = assert!(
    PREPARED_BLOCKS_LEAST > 3 * SPAN_BLOCKS_MAX + 2 * CONTROL_BLOCKS_MAX,
    "an empty log takes the largest request beside a full open span, whatever is prepared"
);
