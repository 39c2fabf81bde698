//! Compression of what goes to the log: which writes, in which pieces, and back.
//!
//! A write is cut at multiples of [`LOG_PIECE_BYTES_MAX`] on the volume; each piece is an entry of its own, stored
//! compressed if that saves enough. What does not is stored as it is, and after misses only one piece in so
//! many is tried. Destage and reads take the data from memory as long as that has it.
//!
//! Invariants:
//! 1. The pieces of a write are in one span: it is durable, or destaged, as a whole or not at all.
//! 2. What is unpacked has the checksum of what was packed, or it is not used.

use alloc::vec::Vec;

use crate::base::codec::{Codec, Method};
use crate::base::io::SectorRange;
use crate::base::limits::{BLOCK_BYTES, LOG_PIECE_BYTES_MAX, LOG_PIECE_SAVING_DIVISOR};
use crate::format::block_checksum;
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
    pub(super) fn compress(
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
