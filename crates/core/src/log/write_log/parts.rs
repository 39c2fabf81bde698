//! What a log has in memory of each write and each span.
//!
//! Each is a part of at most [`crate::base::limits::LOG_PART_BYTES`] bytes, by whose number the log's memory is bounded.

use core::ops::Range;

use crate::base::buf::Buf;
use crate::base::io::{Nanos, SectorRange};
use crate::format::EntryKind;
use crate::log::extent_index::Sequence;
use crate::log::packing::Stored;

/// One accepted write, zeroing or discard that is not retired.
#[derive(Debug)]
pub struct Entry {
    /// Which sectors.
    pub range: SectorRange,
    /// What it is; never [`EntryKind::SyncPoint`] nor [`EntryKind::Record`].
    pub kind: EntryKind,
    /// Whether a zeroing keeps the backend's space.
    pub no_hole: bool,
    /// Position of its first data block; known once its span is sealed.
    pub position: u64,
    /// How its data is stored there, if it is compressed.
    pub stored: Option<Stored>,
    /// Its data, while memory holds it: exactly the bytes of `range`.
    pub data: Option<Buf>,
    /// Blocks of its share of the memory that `data` keeps alive.
    pub held_blocks: u16,
}

impl Entry {
    /// Positions of the blocks that hold `part` of a write.
    pub fn positions(&self, part: SectorRange) -> Range<u64> {
        if let Some(stored) = &self.stored {
            return self.position..self.position + stored.block_count();
        }
        let first = self.position + part.first_block() - self.range.first_block();
        first..first + part.block_count()
    }
}

/// One sealed span that is not retired.
#[derive(Clone, Debug)]
pub struct Span {
    /// Position of its first block.
    pub position: u64,
    /// Position of its first data block.
    pub data_position: u64,
    /// Its blocks.
    pub blocks: u64,
    /// Checksum of its control part.
    pub checksum: u64,
    /// Sequence of the first entry after it.
    pub end_sequence: Sequence,
    /// Sync points in the log up to and including this span's first entry.
    pub sync_points: u64,
    /// When its oldest entry was accepted.
    pub since: Nanos,
    /// Data bytes accepted by the log up to the end of this span.
    pub bytes_end: u64,
}

impl Span {
    /// The first position after it.
    pub fn end(&self) -> u64 {
        self.position + self.blocks
    }
}

const _: () = assert!(
    size_of::<Entry>() <= 72 && size_of::<Span>() <= 64,
    "see LOG_PART_BYTES"
);
