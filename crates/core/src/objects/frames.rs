//! How a compressed data object stores its slots: in frames of 16, each compressed for itself.
//!
//! ```text
//! FrameHeader, 256 lengths (U16)  │  frame 0  │  frame 1  │ ··· │  zeroes  │  DataRuns, DataFooter
//! ```
//!
//! A frame is 16 slots (the last one may have fewer) as one piece: 64 KiB compress better than 4 KiB, and
//! destage writes runs. The slot that the map names tells the frame, and the lengths tell where that is,
//! so a place stays what it is, and a read is one ranged get once the lengths are known. They stand at
//! the beginning, where they are found without knowing the size of the object.
//!
//! Invariants:
//! 1. Of a frame whose length is 0, the slots are stored as they are: compressing saved too little.
//! 2. The size of the whole object and the number of its slots leave the same rest when divided by 4096;
//!    the zeroes see to that. So a listing tells how many slots an object has, of which the map may have
//!    only a few: without that nobody would know how much of it is garbage.
//! 3. What a frame that cannot be decompressed leaves are zeroes, which the checksums of its slots tell: it
//!    is damage like any other.
//!
//! The driver compresses and decompresses, since it has the algorithms and the threads; here is how.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::rc::Rc;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::format::{OBJECT_VERSION, SLOT_BYTES};
use crate::base::codec::{Codec, Method};
use crate::base::error::FormatError;
use crate::base::limits::{OBJECT_BATCH_BLOCKS_MAX, OBJECT_FRAMES_MEMORY_BYTES};
use crate::format::{Field, Structure, on_disk, seal, verify};

/// First bytes of a compressed data object.
pub const FRAMES_MAGIC: [u8; 8] = *b"HDCSOFRM";
/// Slots of a frame.
pub const FRAME_SLOTS: u32 = 16;
/// Frames of an object at most.
const FRAMES_MAX: usize = OBJECT_BATCH_BLOCKS_MAX / FRAME_SLOTS as usize;
/// Bytes before the first frame.
pub const FRAMES_OFFSET: usize = size_of::<FrameHeader>() + FRAMES_MAX * size_of::<U16>();
/// Objects of fewer slots are not compressed: what stands beside the frames would eat what is saved.
pub const COMPRESSED_SLOTS_MIN: u32 = 4;
/// Size and slots leave the same rest when divided by this.
const SIZE_UNIT: usize = OBJECT_BATCH_BLOCKS_MAX;
/// The shortest unit that the cipher of encrypted volumes takes.
const STORED_BYTES_MIN: usize = 16;

const _: () = assert!(OBJECT_BATCH_BLOCKS_MAX.is_multiple_of(FRAME_SLOTS as usize));
const _: () = assert!(
    FRAME_SLOTS as usize * SLOT_BYTES / 8 * 7 <= u16::MAX as usize,
    "a length has 16 bits"
);

on_disk! {
    /// The beginning of a compressed data object.
    FrameHeader: 64 bytes {
        /// `HDCSOFRM`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// 1: LZ4 blocks; 2: Zstandard.
        method: u8,
        /// Zero.
        reserved_a: u8,
        /// Slots of the object.
        slots: U32,
        /// CRC-64/NVME of this header and the 256 lengths after it with this field zero.
        checksum: U64,
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of the object.
        number: U64,
        /// Zero.
        reserved_b: [u8; 16],
    }
}

/// Where the frames of an object are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frames {
    method: Method,
    slots: u32,
    /// Of each frame; 0: its slots are stored as they are.
    lengths: Box<[u16]>,
}

impl Frames {
    /// From the first [`FRAMES_OFFSET`] bytes of an object.
    pub fn parse(volume: &[u8; 16], number: u64, bytes: &[u8]) -> Result<Self, FormatError> {
        let length = FormatError::Field("length");
        let bytes = bytes.get(..FRAMES_OFFSET).ok_or(length)?;
        let (header, lengths) = FrameHeader::read_from_prefix(bytes).map_err(|_| length)?;
        verify(bytes, FRAMES_MAGIC, OBJECT_VERSION)?;
        if header.volume != *volume || header.number.get() != number {
            return Err(FormatError::Identity);
        }
        let method = Method::of_number(header.method).ok_or(FormatError::Field("method"))?;
        let slots = header.slots.get();
        if slots == 0 || slots as usize > OBJECT_BATCH_BLOCKS_MAX {
            return Err(FormatError::Field("slots"));
        }
        let lengths = <[U16]>::ref_from_bytes(lengths).map_err(|_| length)?;
        let frames = slots.div_ceil(FRAME_SLOTS) as usize;
        let this = Self {
            method,
            slots,
            lengths: lengths[..frames].iter().map(|l| l.get()).collect(),
        };
        let good = |(frame, &length): (u32, &u16)| {
            length == 0
                || (STORED_BYTES_MIN..this.plain_bytes(frame)).contains(&usize::from(length))
        };
        let rest_is_zero = lengths[frames..].iter().all(|length| length.get() == 0);
        if !(0..).zip(&this.lengths).all(good) || !rest_is_zero {
            return Err(FormatError::Field("lengths"));
        }
        Ok(this)
    }

    fn write(&self, volume: [u8; 16], number: u64, out: &mut [u8]) {
        let mut header = FrameHeader::new_zeroed();
        header.magic = FRAMES_MAGIC;
        header.version.set(OBJECT_VERSION);
        header.method = self.method as u8;
        header.slots.set(self.slots);
        header.volume = volume;
        header.number.set(number);
        out.fill(0);
        let (head, lengths) = out.split_at_mut(size_of::<FrameHeader>());
        head.copy_from_slice(header.as_bytes());
        for (place, &length) in lengths.chunks_exact_mut(2).zip(&self.lengths) {
            place.copy_from_slice(&length.to_le_bytes());
        }
        seal(out);
    }

    /// Slots of the object.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    fn slots_of(&self, frame: u32) -> Range<u32> {
        frame * FRAME_SLOTS..((frame + 1) * FRAME_SLOTS).min(self.slots)
    }

    fn plain_bytes(&self, frame: u32) -> usize {
        self.slots_of(frame).len() * SLOT_BYTES
    }

    fn stored_bytes(&self, frame: u32) -> usize {
        match self.lengths[frame as usize] {
            0 => self.plain_bytes(frame),
            length => usize::from(length),
        }
    }

    /// Where a frame begins; that after the last one is the end.
    fn offset(&self, frame: u32) -> usize {
        FRAMES_OFFSET + (0..frame).map(|f| self.stored_bytes(f)).sum::<usize>()
    }

    /// Where the runs of the object begin, if these and the footer have so many bytes.
    pub fn table_offset(&self, table_bytes: usize) -> usize {
        let end = self.offset(self.lengths.len() as u32);
        let rest =
            (self.slots as usize + SIZE_UNIT * 2 - (end + table_bytes) % SIZE_UNIT) % SIZE_UNIT;
        end + rest
    }

    /// What has to be read for `count` slots from `first` on. Slots beyond the end are left out.
    pub fn part(&self, first: u32, count: u32) -> Part {
        let last = self.lengths.len() as u32 - 1;
        let from = (first / FRAME_SLOTS).min(last);
        let to = ((first + count - 1) / FRAME_SLOTS).min(last);
        let mut offset = self.offset(from);
        let mut pieces = Vec::with_capacity((to - from + 1) as usize);
        for frame in from..=to {
            let whole = self.slots_of(frame);
            let wanted = whole.start.max(first)..whole.end.min(first + count);
            let is_compressed = self.lengths[frame as usize] != 0;
            // What is stored as it is can be had slot by slot.
            let slots = if is_compressed || wanted.is_empty() {
                whole
            } else {
                if pieces.is_empty() {
                    offset += (wanted.start - whole.start) as usize * SLOT_BYTES;
                }
                wanted
            };
            let bytes = match self.lengths[frame as usize] {
                0 => slots.len() * SLOT_BYTES,
                length => usize::from(length),
            };
            pieces.push(Piece {
                frame,
                slots,
                bytes,
                is_compressed,
            });
        }
        Part {
            method: self.method,
            first,
            offset: offset as u64,
            pieces,
        }
    }

    fn memory_bytes(&self) -> usize {
        self.lengths.len() * 2 + TABLE_OVERHEAD_BYTES
    }
}

/// How many slots a compressed object of a size has.
pub const fn slots_of_size(bytes: u64) -> u32 {
    match bytes % SIZE_UNIT as u64 {
        0 => SIZE_UNIT as u32,
        rest => rest as u32,
    }
}

/// Stored bytes of one frame, or some of its slots.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    frame: u32,
    slots: Range<u32>,
    bytes: usize,
    is_compressed: bool,
}

/// Consecutive bytes of a compressed object, and what is in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    method: Method,
    /// The first slot that is wanted.
    first: u32,
    offset: u64,
    pieces: Vec<Piece>,
}

/// What is encrypted for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// A slot that is stored as it is, by its number.
    Slot(u32),
    /// A compressed frame, by its number.
    Frame(u32),
}

impl Part {
    /// Where in the object it begins.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes that are stored.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    /// What of these bytes an encrypted volume encrypts for itself, in order and without gaps.
    pub fn units(&self) -> impl Iterator<Item = (Unit, Range<usize>)> {
        let mut at = 0;
        self.pieces.iter().flat_map(move |piece| {
            let begin = at;
            at += piece.bytes;
            let (count, bytes) = if piece.is_compressed {
                (1, piece.bytes)
            } else {
                (piece.slots.len(), SLOT_BYTES)
            };
            (0..count).map(move |index| {
                let unit = if piece.is_compressed {
                    Unit::Frame(piece.frame)
                } else {
                    Unit::Slot(piece.slots.start + index as u32)
                };
                let from = begin + index * bytes;
                (unit, from..from + bytes)
            })
        })
    }

    /// Fill `out` with the slots that are wanted, from the stored bytes as they were put.
    pub fn unpack(&self, codec: &dyn Codec, stored: &[u8], out: &mut [u8]) {
        out.fill(0);
        let wanted = self.first..self.first + (out.len() / SLOT_BYTES) as u32;
        let mut plain = Vec::new();
        let mut rest = stored;
        for piece in &self.pieces {
            let Some((stored, after)) = rest.split_at_checked(piece.bytes) else {
                return;
            };
            rest = after;
            let slots = if piece.is_compressed {
                plain.resize(piece.slots.len() * SLOT_BYTES, 0);
                if !codec.decompress(self.method, stored, &mut plain) {
                    continue;
                }
                &plain[..]
            } else {
                stored
            };
            let from = piece.slots.start.max(wanted.start);
            let to = piece.slots.end.min(wanted.end);
            if from < to {
                let bytes = (to - from) as usize * SLOT_BYTES;
                let source = (from - piece.slots.start) as usize * SLOT_BYTES;
                let target = (from - wanted.start) as usize * SLOT_BYTES;
                out[target..target + bytes].copy_from_slice(&slots[source..source + bytes]);
            }
        }
    }
}

/// Make the bytes of a compressed object from its slots, and from its runs and footer. Equal arguments
/// give equal bytes. What of them are frames is [`Frames::part`] of all slots.
pub fn pack(
    codec: &dyn Codec,
    method: Method,
    volume: [u8; 16],
    number: u64,
    slots: &[u8],
    table: &[u8],
) -> (Vec<u8>, Frames) {
    let count = slots.len() / SLOT_BYTES;
    assert!(
        count > 0 && count <= OBJECT_BATCH_BLOCKS_MAX && slots.len() == count * SLOT_BYTES,
        "whole slots"
    );
    let frame_bytes = FRAME_SLOTS as usize * SLOT_BYTES;
    // An algorithm may ask for more room than it will need.
    let mut scratch = vec![0; frame_bytes + frame_bytes / 4];
    let mut object = Vec::with_capacity(FRAMES_OFFSET + slots.len() / 2 + table.len());
    object.resize(FRAMES_OFFSET, 0);
    let mut lengths = Vec::with_capacity(count.div_ceil(FRAME_SLOTS as usize));
    for plain in slots.chunks(frame_bytes) {
        let stored = codec.compress(method, plain, &mut scratch);
        let good = STORED_BYTES_MIN..=plain.len() / 8 * 7;
        if let Some(bytes) = stored.filter(|bytes| good.contains(bytes)) {
            object.extend_from_slice(&scratch[..bytes]);
            lengths.push(bytes as u16);
        } else {
            object.extend_from_slice(plain);
            lengths.push(0);
        }
    }
    let frames = Frames {
        method,
        slots: count as u32,
        lengths: lengths.into(),
    };
    frames.write(volume, number, &mut object[..FRAMES_OFFSET]);
    object.resize(frames.table_offset(table.len()), 0);
    object.extend_from_slice(table);
    (object, frames)
}

/// Memory of one table beside its lengths, about: two entries of trees and the table itself.
const TABLE_OVERHEAD_BYTES: usize = 144;

/// The tables that were needed last, within [`OBJECT_FRAMES_MEMORY_BYTES`].
#[derive(Debug, Default)]
pub(super) struct FrameCache {
    tables: BTreeMap<u64, (u64, Rc<Frames>)>,
    /// Numbers of objects by when they were used last.
    ages: BTreeMap<u64, u64>,
    uses: u64,
    bytes: usize,
}

impl FrameCache {
    /// The table of an object, if it is here.
    pub(super) fn get(&mut self, number: u64) -> Option<Rc<Frames>> {
        let (used, frames) = self.tables.get_mut(&number)?;
        self.ages.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.ages.insert(self.uses, number);
        Some(Rc::clone(frames))
    }

    /// Keep a table.
    pub(super) fn insert(&mut self, number: u64, frames: Frames) -> Rc<Frames> {
        self.remove(number);
        let frames = Rc::new(frames);
        self.bytes += frames.memory_bytes();
        self.uses += 1;
        self.ages.insert(self.uses, number);
        self.tables.insert(number, (self.uses, Rc::clone(&frames)));
        while self.bytes > OBJECT_FRAMES_MEMORY_BYTES
            && let Some((_, oldest)) = self.ages.pop_first()
        {
            self.remove(oldest);
        }
        frames
    }

    /// Forget the table of an object.
    pub(super) fn remove(&mut self, number: u64) {
        if let Some((used, frames)) = self.tables.remove(&number) {
            self.ages.remove(&used);
            self.bytes -= frames.memory_bytes();
        }
    }

    /// Memory in bytes, about.
    pub(super) fn memory_bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests;
