//! How a line is stored that is compressed: [`CacheLineHeader`], the compressed bytes, zeroes up to whole blocks.
//!
//! Invariants:
//! 1. A line is compressed only if that saves a block; so fewer blocks than a line has say that it is.
//! 2. Of a volume with a cipher, the stored blocks are encrypted, header and all, under numbers that no block of a volume
//!    has. Checksums in footers and in memory are of what is on the medium, so that it is judged, copied and compared
//!    without key and codec.
//! 3. What is unpacked has the checksum of what was packed, or it is not used. Nothing in the stored bytes is believed
//!    before its bounds are checked.

use alloc::vec::Vec;

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::buf::{Buf, Pool};
use crate::base::cipher::BlockCipher;
use crate::base::codec::{Codec, Method};
use crate::base::io::BlockKey;
use crate::base::limits::{BLOCK_BYTES, CACHE_LINE_BLOCKS_MAX};
use crate::format::{Field, Structure, block_checksum, on_disk};

/// Added to the number of a line's first block for the cipher: blocks of volumes are numbered below.
const PACKED_NUMBERS: u64 = 1 << 40;

on_disk! {
    /// The beginning of a compressed line of the read cache; the compressed bytes follow.
    CacheLineHeader: 8 bytes {
        /// CRC-32C of the whole line before it was compressed.
        checksum: U32,
        /// How many bytes follow.
        bytes: U16,
        /// 1 LZ4, 2 Zstandard.
        method: u8,
        /// Zero.
        reserved: u8,
    }
}

const HEADER_BYTES: usize = size_of::<CacheLineHeader>();
const _: () = assert!(
    (CACHE_LINE_BLOCKS_MAX - 1) * BLOCK_BYTES <= u16::MAX as usize,
    "a header has 16 bits for the length of a compressed line"
);

/// Room for what any codec makes of a line, of noise too: LZ4 asks for a tenth more.
const fn scratch_bytes(line_bytes: usize) -> usize {
    HEADER_BYTES + line_bytes + line_bytes / 8
}

/// What packing and unpacking need from one line to the next.
#[derive(Debug, Default)]
pub struct Packing {
    pub codec: Option<&'static dyn Codec>,
    /// One line, packed or unpacked; there once it is needed.
    scratch: Vec<u8>,
    /// The stored blocks of a line that is unpacked from memory, where they stay encrypted.
    stored: Vec<u8>,
}

impl Packing {
    /// The line `plain` that begins at `first` as it is stored compressed; `None` if that saves no block, or there is
    /// no memory for it.
    pub fn pack(
        &mut self,
        method: Method,
        plain: &[u8],
        first: BlockKey,
        cipher: Option<&dyn BlockCipher>,
        pool: &Pool,
    ) -> Option<Buf> {
        self.scratch.resize(scratch_bytes(plain.len()), 0);
        let (head, rest) = self.scratch.split_at_mut(HEADER_BYTES);
        let bytes = self.codec?.compress(method, plain, rest)?;
        let used = HEADER_BYTES + bytes;
        let stored_bytes = used.next_multiple_of(BLOCK_BYTES);
        if stored_bytes >= plain.len() {
            return None;
        }
        let header = CacheLineHeader {
            checksum: U32::new(block_checksum(plain)),
            bytes: U16::new(bytes as u16),
            method: method as u8,
            reserved: 0,
        };
        head.copy_from_slice(header.as_bytes());
        let mut buf = pool.alloc(stored_bytes)?;
        buf[..used].copy_from_slice(&self.scratch[..used]);
        buf[used..].fill(0);
        if let Some(cipher) = cipher {
            for (number, block) in numbers(first).zip(buf.chunks_exact_mut(BLOCK_BYTES)) {
                cipher.encrypt(number, block);
            }
        }
        Some(buf.freeze())
    }

    /// Unpack the line of so many bytes that begins at `first` from its stored blocks, which are decrypted in place;
    /// false if they are not what was stored. [`Self::unpacked`] has it.
    #[must_use]
    pub fn unpack(
        &mut self,
        stored: &mut [u8],
        first: BlockKey,
        cipher: Option<&dyn BlockCipher>,
        line_bytes: usize,
    ) -> bool {
        if let Some(cipher) = cipher {
            for (number, block) in numbers(first).zip(stored.chunks_exact_mut(BLOCK_BYTES)) {
                cipher.decrypt(number, block);
            }
        }
        let Ok((header, rest)) = CacheLineHeader::read_from_prefix(stored) else {
            return false;
        };
        let bytes = rest.get(..usize::from(header.bytes.get()));
        let (Some(codec), Some(method), Some(bytes)) =
            (self.codec, Method::of_number(header.method), bytes)
        else {
            return false;
        };
        self.scratch.resize(scratch_bytes(line_bytes), 0);
        let plain = &mut self.scratch[..line_bytes];
        codec.decompress(method, bytes, plain) && block_checksum(plain) == header.checksum.get()
    }

    /// The same, from stored blocks that stay as they are.
    #[must_use]
    pub fn unpack_copy(
        &mut self,
        stored: &[u8],
        first: BlockKey,
        cipher: Option<&dyn BlockCipher>,
        line_bytes: usize,
    ) -> bool {
        let mut copy = core::mem::take(&mut self.stored);
        copy.clear();
        copy.extend_from_slice(stored);
        let is_whole = self.unpack(&mut copy, first, cipher, line_bytes);
        self.stored = copy;
        is_whole
    }

    /// What was unpacked last, and whatever lies behind it.
    pub fn unpacked(&self) -> &[u8] {
        &self.scratch
    }

    pub fn memory_bytes(&self) -> usize {
        self.scratch.capacity() + self.stored.capacity()
    }
}

/// The numbers that the cipher is given for the stored blocks of a line.
fn numbers(first: BlockKey) -> impl Iterator<Item = u64> {
    PACKED_NUMBERS + first.block()..
}
