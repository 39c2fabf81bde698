//! Compression of what goes to the log: which writes, in which pieces, and back.
//!
//! A write is cut at multiples of [`LOG_PIECE_BYTES_MAX`] on the volume; each piece is an entry of its own, stored
//! compressed if that saves enough. What does not is stored as it is, and after misses only one piece in so
//! many is tried. Destage and reads take the data from memory as long as that has it.
//!
//! Invariants:
//! 1. The pieces of a write are in one span: it is durable, or destaged, as a whole or not at all.
//! 2. What is unpacked has the checksum of what was packed, or it is not used.

use alloc::rc::Rc;
use alloc::vec::Vec;

use super::{Context, Volume};
use crate::base::buf::{Buf, Pool};
use crate::base::codec::{Codec, Method};
use crate::base::io::{Nanos, SectorRange};
use crate::base::limits::{
    BLOCK_BYTES, LOG_PIECE_BYTES_MAX, LOG_PIECE_SAVING_DIVISOR, SECTOR_BYTES,
};
use crate::format::{EntryKind, block_checksum};
use crate::log::extent_index::Sequence;
use crate::log::packing::{Compressed, Stored};
use crate::log::write_log::Entry;

/// After so many misses in a row the pause before the next try grows no more.
const MISSES_MAX: u32 = 6;
/// Room for what any codec makes of the largest piece, of noise too: LZ4 asks for a tenth more.
const SCRATCH_BYTES: usize = LOG_PIECE_BYTES_MAX + LOG_PIECE_BYTES_MAX / 8;

/// A compressed entry, for who reads a part of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    pub(super) stored: Stored,
    /// The whole of it.
    range: SectorRange,
}

impl Packed {
    /// `entry`, if it is compressed.
    pub(super) fn of(entry: &Entry) -> Option<Self> {
        entry.stored.map(|stored| Self {
            stored,
            range: entry.range,
        })
    }
}

/// What compressing needs from one piece to the next.
#[derive(Debug, Default)]
pub(super) struct Compression {
    /// One piece, packed or unpacked; there once it is needed.
    scratch: Vec<u8>,
    /// Pieces in a row that were not worth it.
    misses: u32,
    /// Pieces that are not tried before the next.
    skip: u32,
}

impl Compression {
    /// `plain` compressed, if it is tried and saves enough.
    fn compress(
        &mut self,
        codec: &dyn Codec,
        method: Method,
        plain: &[u8],
    ) -> Option<Compressed<'_>> {
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        self.scratch.resize(SCRATCH_BYTES, 0);
        let worth = plain.len() - plain.len() / LOG_PIECE_SAVING_DIVISOR;
        let bytes = codec
            .compress(method, plain, &mut self.scratch)
            .filter(|&bytes| bytes > 0 && bytes <= worth);
        let Some(bytes) = bytes else {
            self.misses = (self.misses + 1).min(MISSES_MAX);
            self.skip = (1 << self.misses) - 1;
            return None;
        };
        self.misses = 0;
        Some(Compressed {
            method,
            checksum: block_checksum(plain),
            bytes: &self.scratch[..bytes],
        })
    }

    /// `part` out of the blocks that hold a compressed entry; `None` if they are not what was stored.
    pub(super) fn unpack(
        &mut self,
        codec: &dyn Codec,
        packed: &Packed,
        part: SectorRange,
        blocks: &[u8],
    ) -> Option<&[u8]> {
        self.scratch.resize(SCRATCH_BYTES, 0);
        let plain = &mut self.scratch[..packed.range.block_count() as usize * BLOCK_BYTES];
        if !packed.stored.unpack(codec, blocks, plain) {
            return None;
        }
        let blocks_before = (part.first_block() - packed.range.first_block()) as usize;
        let start = blocks_before * BLOCK_BYTES + part.offset_in_block();
        Some(&plain[start..start + part.bytes()])
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.scratch.capacity()
    }
}

impl Volume {
    /// Put a write into the log in pieces. Returns the sequence of the last.
    pub(super) fn append_compressed(
        &mut self,
        now: Nanos,
        range: SectorRange,
        data: Buf,
        method: Method,
        cx: &Context<'_>,
    ) -> Sequence {
        let piece_sectors = (LOG_PIECE_BYTES_MAX / SECTOR_BYTES) as u64;
        let (first, last) = (
            range.start / piece_sectors,
            (range.end() - 1) / piece_sectors,
        );
        let mut pieces_left = (last - first + 1) as u16;
        let mut held_left = data.held_blocks();
        self.log
            .get_mut()
            .keep_together(usize::from(pieces_left), range.block_count() as usize);
        let mut sequence = 0;
        for piece in first..=last {
            let whole = SectorRange::new(piece * piece_sectors, piece_sectors);
            let part = whole.intersect(range);
            let start = (part.start - range.start) as usize * SECTOR_BYTES;
            let data = data.slice(start..start + part.bytes());
            let held_blocks = held_left / pieces_left;
            (held_left, pieces_left) = (held_left - held_blocks, pieces_left - 1);
            let plain = data.covering_blocks();
            let entry = Entry {
                range: part,
                kind: EntryKind::Write,
                no_hole: false,
                position: u64::MAX,
                stored: None,
                held_blocks,
                data: Some(data),
            };
            let mut compression = core::mem::take(&mut self.compression);
            let compressed = compression.compress(self.config.codec, method, &plain);
            let compressed = compressed.map(|compressed| (compressed, cx.pool));
            sequence = self.append_entry(now, entry, plain.len(), compressed);
            self.compression = compression;
        }
        sequence
    }

    /// Put one entry into the log, whose data blocks have so many bytes, and into the index.
    pub(super) fn append_entry(
        &mut self,
        now: Nanos,
        entry: Entry,
        data_bytes: usize,
        compressed: Option<(Compressed<'_>, &Rc<Pool>)>,
    ) -> Sequence {
        let (range, is_data) = (entry.range, entry.kind == EntryKind::Write);
        let stored_bytes = self.log.get_mut().append(now, entry, compressed);
        self.port.stats.log_plain_bytes += data_bytes as u64;
        self.port.stats.log_stored_bytes += stored_bytes as u64;
        let sequence = self.log.get().next_sequence() - 1;
        if is_data {
            self.index.insert(range, sequence);
        } else {
            self.index.insert_long(range, sequence);
        }
        self.log.note_runs(self.index.len());
        sequence
    }
}
