//! Compressed entries of a span: what is known of each, and how they are laid one behind the other.
//!
//! Invariants:
//! 1. An entry lies in one buffer, so it can be read at once. A buffer that has no room for the next
//!    one ends at a block.
//! 2. Packed entries take no more blocks than they would as they are: each saves a part, so the blocks
//!    of a buffer are fewer than those it stands for, or as many.

use alloc::sync::Arc;
use alloc::vec::Vec;

use zerocopy::little_endian::{U16, U32};

use crate::base::buf::{Buf, BufMut, Pool};
use crate::base::codec::{Codec, Method};
use crate::base::limits::{BLOCK_BYTES, LOG_PIECE_BYTES_MAX};
use crate::format::{SpanEntry, block_checksum};

/// How an entry is stored that is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Byte of its first data block at which it begins.
    pub offset: u16,
    /// Bytes that it has there.
    pub bytes: u16,
    /// How it is compressed.
    pub method: Method,
    /// CRC-32C of its blocks before that.
    pub checksum: u32,
}

impl Stored {
    /// What `entry` of a span says; `None` if it is not compressed. The method is known.
    pub fn of(entry: &SpanEntry) -> Option<Self> {
        Some(Self {
            offset: entry.stored_offset.get(),
            bytes: entry.stored_bytes.get(),
            method: Method::of_number(entry.method)?,
            checksum: entry.checksum.get(),
        })
    }

    /// Have `entry` of a span say it.
    pub fn describe(&self, entry: &mut SpanEntry) {
        entry.stored_offset = U16::new(self.offset);
        entry.stored_bytes = U16::new(self.bytes);
        entry.method = self.method as u8;
        entry.checksum = U32::new(self.checksum);
    }

    /// Data blocks that it touches.
    pub fn block_count(&self) -> u64 {
        (u64::from(self.offset) + u64::from(self.bytes)).div_ceil(BLOCK_BYTES as u64)
    }

    /// Fill `plain`, the entry's blocks, from those data blocks; false if that is not what was stored.
    #[must_use]
    pub fn unpack(&self, codec: &dyn Codec, blocks: &[u8], plain: &mut [u8]) -> bool {
        let start = usize::from(self.offset);
        let bytes = blocks.get(start..start + usize::from(self.bytes));
        bytes.is_some_and(|bytes| codec.decompress(self.method, bytes, plain))
            && block_checksum(plain) == self.checksum
    }
}

/// An entry's data, compressed.
#[derive(Clone, Copy, Debug)]
pub struct Compressed<'a> {
    /// By which method.
    pub method: Method,
    /// CRC-32C of its blocks before that.
    pub checksum: u32,
    /// What is to be stored.
    pub bytes: &'a [u8],
}

/// The compressed entries of the open span.
#[derive(Debug, Default)]
pub struct Packing {
    full: Vec<Buf>,
    full_blocks: usize,
    /// The buffer that is being filled, and how far it is.
    filling: Option<(BufMut, usize)>,
}

impl Packing {
    /// Lay `compressed` behind what is here. Returns the index of its first block here and how it is
    /// stored; `None` if there is no buffer for it.
    pub fn put(&mut self, compressed: &Compressed<'_>, pool: &Arc<Pool>) -> Option<(u32, Stored)> {
        let bytes = compressed.bytes;
        let room = self
            .filling
            .as_ref()
            .map_or(0, |(buf, used)| buf.len() - used);
        if bytes.len() > room {
            // A quarter is left to clients: what is written needs no such buffer.
            let scarce = pool.free_bytes() <= pool.total_bytes() / 4;
            let next = (!scarce).then(|| pool.alloc(LOG_PIECE_BYTES_MAX))??;
            self.end_buffer();
            self.filling = Some((next, 0));
        }
        let (buf, used) = self.filling.as_mut()?;
        buf[*used..*used + bytes.len()].copy_from_slice(bytes);
        let block = self.full_blocks + *used / BLOCK_BYTES;
        let stored = Stored {
            offset: (*used % BLOCK_BYTES) as u16,
            bytes: bytes.len() as u16,
            method: compressed.method,
            checksum: compressed.checksum,
        };
        *used += bytes.len();
        Some((block as u32, stored))
    }

    /// Blocks so far.
    pub fn blocks(&self) -> usize {
        let filling = self
            .filling
            .as_ref()
            .map_or(0, |(_, used)| used.div_ceil(BLOCK_BYTES));
        self.full_blocks + filling
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.filling.is_none()
    }

    fn end_buffer(&mut self) {
        let Some((mut buf, used)) = self.filling.take() else {
            return;
        };
        let end = used.next_multiple_of(BLOCK_BYTES);
        buf[used..end].fill(0);
        self.full_blocks += end / BLOCK_BYTES;
        self.full.push(buf.narrow(0..end).freeze());
    }

    /// The blocks, in order.
    pub fn into_blocks(mut self) -> Vec<Buf> {
        self.end_buffer();
        self.full
    }
}
