//! What the tier holds, and where: lines by their addresses, in segments, some of which are not on the medium yet.
//!
//! Invariants:
//! 1. An address leads to a line in a segment that is not free, or nowhere. What is to be forgotten it does not lead to,
//!    though the index still has it.
//! 2. Whatever turns the address of a line in a sealed segment elsewhere gives the entry that voids it: whoever asked
//!    records that.
//! 3. A permission to read keeps its segment as it is; it counts until it is given back, also when the tier was given up
//!    meanwhile.

use alloc::sync::Arc;
use alloc::vec::Vec;

use zerocopy::FromZeros;

use super::segments::{SegmentState, Segments, Stream};
use super::writer::{Open, SegmentWriter};
use super::{Counters, Found};
use crate::base::buf::{Buf, Pool};
use crate::base::cipher::BlockCipher;
use crate::base::io::BlockKey;
use crate::base::limits::{BLOCK_BYTES, CACHE_LINE_BLOCKS_MAX, SEGMENT_BYTES};
use crate::cache::SsdRead;
use crate::cache::footer;
use crate::cache::forgetting::Forgetting;
use crate::cache::index::{Index, Line};
use crate::cache::journal::{Entry, Layout};
use crate::cache::packed::Packing;
use crate::format::{CacheFooter, block_checksum, control_checksum};

/// What a footer says it belongs to: a cache, and which of the times that its content was declared void.
#[derive(Clone, Copy, Debug)]
pub struct Content {
    pub uuid: [u8; 16],
    pub format: u64,
}

impl Content {
    /// A short name of it.
    pub fn checksum(self) -> u64 {
        let mut name = [0; 24];
        name[..16].copy_from_slice(&self.uuid);
        name[16..].copy_from_slice(&self.format.to_le_bytes());
        control_checksum(&name)
    }
}

/// A line that is to be put into a segment.
#[derive(Clone, Copy, Debug)]
pub struct NewLine<'a> {
    pub key: u64,
    /// As it is stored.
    pub data: &'a [u8],
    pub checksums: &'a [u32],
    /// Whether other addresses with the same bytes may lead to it.
    pub shareable: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Store {
    pub layout: Layout,
    pub index: Index,
    pub segments: Segments,
    pub writer: SegmentWriter,
    /// What no address leads to any more, though the index still has it.
    forgetting: Forgetting,
    pool: Arc<Pool>,
    /// Permissions that were given and are not back.
    permissions: usize,
    pub counters: Counters,
}

/// The checksums of a line's blocks, and how many there are.
pub fn line_checksums(data: &[u8]) -> ([u32; CACHE_LINE_BLOCKS_MAX], usize) {
    let mut sums = [0; CACHE_LINE_BLOCKS_MAX];
    let mut blocks = 0;
    for (sum, block) in sums.iter_mut().zip(data.chunks_exact(BLOCK_BYTES)) {
        *sum = block_checksum(block);
        blocks += 1;
    }
    (sums, blocks)
}

impl Store {
    /// A store of which nothing is known yet.
    pub fn new(layout: Layout, pool: Arc<Pool>) -> Self {
        Self {
            layout,
            index: Index::new(layout.segments, &layout),
            segments: Segments::new(layout.segments),
            writer: SegmentWriter::new(Arc::clone(&pool)),
            forgetting: Forgetting::default(),
            pool,
            permissions: 0,
            counters: Counters::default(),
        }
    }

    /// Nothing on the medium counts any more.
    pub fn clear(&mut self) {
        self.index = Index::new(self.layout.segments, &self.layout);
        self.segments.clear();
        self.writer.clear();
        self.forgetting = Forgetting::default();
    }

    /// Nothing is stored any more, so no memory is needed.
    pub fn give_up(&mut self) {
        self.index = Index::new(0, &self.layout);
        self.segments = Segments::new(0);
        self.writer.clear();
        self.forgetting = Forgetting::default();
    }

    /// Whether nothing is stored any more: not even checksums are there.
    pub fn is_given_up(&self) -> bool {
        self.segments.len() == 0
    }

    /// Lines that fit as they are.
    pub fn lines(&self) -> usize {
        self.segments.len() * self.layout.plain_lines
    }

    pub fn bytes(&self) -> usize {
        self.index.bytes() + self.segments.bytes()
    }

    // Finding lines.

    /// The address of the line that has this block.
    pub fn line_key(&self, key: BlockKey) -> u64 {
        key.0 & !(self.layout.line_blocks as u64 - 1)
    }

    /// Whether the whole line of a block lies below `end`, so that it can be taken.
    pub fn is_whole(&self, key: BlockKey, end: BlockKey) -> bool {
        self.line_key(key) + self.layout.line_blocks as u64 <= end.0
    }

    /// The line that an address leads to, unless that is to be forgotten.
    pub fn find(&self, key: u64) -> Option<Line> {
        if self.forgetting.covers(key) {
            return None;
        }
        self.index.find(key)
    }

    /// Where a line lies on the device.
    pub fn line_offset(&self, line: Line) -> u64 {
        let segment = self.layout.segment_offset(self.index.segment_of(line));
        segment + self.index.place_of(line).offset() as u64
    }

    /// The bytes of a line that is not on the medium yet, as they are stored.
    pub fn line_in_memory(&self, line: Line) -> Option<&[u8]> {
        let place = self.index.place_of(line);
        let range = place.offset()..place.offset() + place.bytes();
        self.writer.bytes(self.index.segment_of(line), range)
    }

    /// Whether the blocks of `data` are as many as the checksums that a read expects, and have them.
    pub fn is_sound(&self, read: &SsdRead, data: &[u8]) -> bool {
        let line = Line(read.line);
        let expected = self.index.checksums(line);
        let block = (read.key.0 - self.line_key(read.key)) as usize;
        let expected = if self.index.is_packed(line) {
            expected
        } else {
            &expected[block..block + read.blocks as usize]
        };
        has_checksums(data, expected)
    }

    // How much of a segment lines take.

    /// The share that is a whole segment.
    pub fn whole_segment(&self) -> usize {
        self.layout.room_blocks() * self.layout.lines_per_segment
    }

    /// The share of a segment that a line has: of its blocks or of its lines, whichever is more.
    pub fn share_of(&self, line: Line) -> usize {
        let blocks = usize::from(self.index.place_of(line).blocks);
        (blocks * self.layout.lines_per_segment).max(self.layout.room_blocks())
    }

    /// The share of a segment that the lines have whose bits are set.
    pub fn share_of_bits(&self, segment: usize, bits: u128) -> usize {
        (0..self.layout.lines_per_segment)
            .filter(|&slot| bits >> slot & 1 == 1)
            .map(|slot| self.share_of(self.index.line_at(segment, slot)))
            .sum()
    }

    // Reading.

    /// Find a block and count a use of its line; what is in memory is decrypted, what is on the device is not.
    pub fn lookup(
        &mut self,
        key: BlockKey,
        cipher: Option<&dyn BlockCipher>,
        packing: &mut Packing,
    ) -> Found {
        let first = self.line_key(key);
        let Some(line) = self.find(first) else {
            return Found::Absent;
        };
        let uses = self.index.uses(line);
        self.index.set_uses(line, uses + 1);
        let block = (key.0 - first) as usize;
        match self.segments.state(self.index.segment_of(line)) {
            SegmentState::Open | SegmentState::Sealing => self
                .find_in_memory(line, key, cipher, packing)
                .map_or(Found::Absent, Found::Memory),
            SegmentState::Sealed | SegmentState::Emptying => {
                if self.permit(line) {
                    Found::Device(self.read_of(line, key, block))
                } else {
                    Found::Absent
                }
            }
            SegmentState::Free => unreachable!("no address leads to a free segment"),
        }
    }

    /// A block of a line that is not on the medium yet.
    fn find_in_memory(
        &self,
        line: Line,
        key: BlockKey,
        cipher: Option<&dyn BlockCipher>,
        packing: &mut Packing,
    ) -> Option<Buf> {
        let first = BlockKey(self.line_key(key));
        let start = (key.0 - first.0) as usize * BLOCK_BYTES;
        let is_packed = self.index.is_packed(line);
        let sealed = self.writer.sealed(self.index.segment_of(line));
        if let Some(buf) = sealed.filter(|_| !is_packed && cipher.is_none()) {
            let start = self.index.place_of(line).offset() + start;
            return Some(buf.slice(start..start + BLOCK_BYTES));
        }
        let mut copy = self.pool.alloc(BLOCK_BYTES)?;
        if !is_packed {
            copy.copy_from_slice(&self.line_in_memory(line)?[start..][..BLOCK_BYTES]);
            if let Some(cipher) = cipher {
                cipher.decrypt(key.block(), &mut copy);
            }
            return Some(copy.freeze());
        }
        let line_bytes = self.layout.line_bytes();
        let is_whole = (self.line_in_memory(line))
            .is_some_and(|stored| packing.unpack_copy(stored, first, cipher, line_bytes));
        copy.copy_from_slice(packing.unpacked().get(start..start + BLOCK_BYTES)?);
        is_whole.then(|| copy.freeze())
    }

    /// How a block of a line on the medium is read: alone, or with all that the line is made of.
    fn read_of(&self, line: Line, key: BlockKey, block: usize) -> SsdRead {
        let (place, offset) = (self.index.place_of(line), self.line_offset(line));
        let is_packed = self.index.is_packed(line);
        let reach = self.layout.line_blocks - block;
        let (before, bytes, blocks) = if is_packed {
            (0, place.bytes(), reach)
        } else {
            (block * BLOCK_BYTES, BLOCK_BYTES, 1)
        };
        SsdRead {
            key,
            offset: offset + before as u64,
            bytes,
            blocks: blocks as u64,
            reach: reach as u64,
            is_packed,
            line: line.0,
        }
    }

    /// Permit a read of a line on the medium; false if too many read there.
    pub fn permit(&mut self, line: Line) -> bool {
        let is_pinned = self.segments.pin(self.index.segment_of(line));
        self.permissions += usize::from(is_pinned);
        is_pinned
    }

    /// A permission is given back: its segment may be reused once none is left.
    pub fn cancel(&mut self, read: &SsdRead) {
        let permissions = self.permissions.checked_sub(1);
        self.permissions = permissions.expect("a permission is given back once");
        if !self.is_given_up() {
            self.segments.unpin(self.index.segment_of(Line(read.line)));
        }
    }

    /// Permissions that were given and are not back.
    pub fn permissions(&self) -> usize {
        self.permissions
    }

    // Forgetting.

    /// Drop a line whose bytes cannot be had.
    pub fn distrust(&mut self, line: Line) -> Option<Entry> {
        let segment = self.index.segment_of(line);
        let entry = self.index.primary(line).map(|_| Entry::Segment {
            segment: segment as u32,
            sequence: self.segments.sequence(segment),
            void: 1 << self.index.slot_of(line),
        });
        self.index.unmap_line(line);
        self.counters.losses += 1;
        entry
    }

    /// Let no address of a short range lead anywhere, from now on and after a restart.
    pub fn unmap(&mut self, first: BlockKey, blocks: u64) -> Option<Entry> {
        let upto = self.segments.next_sequence() - 1;
        let mut sealed = false;
        for key in self
            .index
            .addresses_in(first.0, first.0.saturating_add(blocks))
        {
            if let Some(line) = self.index.unmap(key) {
                let state = self.segments.state(self.index.segment_of(line));
                sealed |= state != SegmentState::Open;
            }
        }
        sealed.then_some(Entry::Range {
            first: first.0,
            blocks,
            upto,
        })
    }

    /// Let no address of a long range lead anywhere. It is recorded at once, for what is in a sealed segment; what is
    /// in an open one is dropped when that is sealed, if not before.
    pub fn forget(&mut self, first: BlockKey, end: u64, is_emptying: bool) -> Option<Entry> {
        if self.index.used_lines() == 0 {
            return None;
        }
        let joined = self.forget_lines(first.0, end);
        let sealed = self.segments.sealed(Stream::Small) + self.segments.sealed(Stream::Main);
        let is_on_medium = sealed > 0 || is_emptying;
        // What goes with it is recorded, too: nothing is, once no line is found there any more.
        let (first, end) = joined.unwrap_or((first.0, end));
        is_on_medium.then(|| Entry::Range {
            first,
            blocks: end - first,
            upto: self.segments.next_sequence() - 1,
        })
    }

    /// Whole lines, so that none is found by a part of it. Returns what is forgotten instead if that is more.
    pub fn forget_lines(&mut self, first: u64, end: u64) -> Option<(u64, u64)> {
        let line_blocks = self.layout.line_blocks as u64;
        let first = first / line_blocks * line_blocks;
        let end = end.checked_next_multiple_of(line_blocks).unwrap_or(end);
        let joined = self.forgetting.add(first, end);
        // Of what lies between two ranges, something may be pinned.
        self.counters.losses += u64::from(joined.is_some());
        joined
    }

    /// Whether an address is to be forgotten.
    pub fn forgets(&self, key: u64) -> bool {
        self.forgetting.covers(key)
    }

    /// Whether nothing is left to forget.
    pub fn has_forgotten(&self) -> bool {
        self.forgetting.is_empty()
    }

    /// Whether a part of a range is being forgotten.
    pub fn refuses(&self, first: u64, end: u64) -> bool {
        let line_blocks = self.layout.line_blocks as u64;
        let end = end.checked_next_multiple_of(line_blocks).unwrap_or(end);
        (self.forgetting).overlaps(first / line_blocks * line_blocks, end)
    }

    /// Drop what is to be forgotten in the next `places_max` places. Nothing of it comes to another place
    /// meanwhile: what is filled, shared or kept is looked at before.
    pub fn forget_some(&mut self, places_max: usize) {
        if self.forgetting.is_empty() {
            return;
        }
        let places = self.index.places();
        for place in self.forgetting.next(places, places_max) {
            if let Some((key, _)) = self.index.address_at(place)
                && self.forgetting.covers(key)
            {
                self.index.unmap(key);
            }
        }
        self.forgetting.end_walk(self.index.places());
    }

    /// What was looked at so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.index.work() + self.forgetting.work()
    }

    /// One bit for each slot of a segment whose line is to be forgotten under its primary address.
    fn forgotten_bits(&self, segment: usize) -> u128 {
        if self.forgetting.is_empty() {
            return 0;
        }
        (0..self.layout.lines_per_segment).fold(0, |bits, slot| {
            let key = self.index.primary(self.index.line_at(segment, slot));
            let is_one = key.is_some_and(|key| self.forgetting.covers(key));
            bits | u128::from(is_one) << slot
        })
    }

    /// What voids everything of a segment that is void now.
    pub fn voids_of(&self, segment: usize) -> Option<Entry> {
        let sequence = self.segments.sequence(segment);
        let state = self.segments.state(segment);
        let on_medium = matches!(state, SegmentState::Sealing | SegmentState::Sealed);
        (sequence > 0).then(|| Entry::Segment {
            segment: segment as u32,
            sequence,
            void: if on_medium {
                // What was recorded for what is to be forgotten goes with the other half of the journal.
                self.index.void_bits(segment) | self.forgotten_bits(segment)
            } else {
                0
            },
        })
    }

    // Writing.

    /// Put a line into a stream's open segment; its address leads nowhere yet.
    pub fn append(&mut self, stream: Stream, new: NewLine<'_>, content: Content) -> Option<Line> {
        let (layout, segments) = (&self.layout, &mut self.segments);
        let put = self.writer.put(stream, new.data, layout, segments)?;
        let line = self.index.line_at(put.segment, put.slot);
        self.index
            .place(line, new.key, put.first, new.checksums, new.shareable);
        if put.is_full {
            self.seal(stream, content);
        }
        Some(line)
    }

    /// Write the open segment of a stream, as far as it is filled.
    pub fn seal(&mut self, stream: Stream, content: Content) {
        let Some(Open {
            segment,
            blocks,
            mut buf,
            ..
        }) = self.writer.take_open(stream)
        else {
            return;
        };
        self.drop_forgotten(segment);
        let mut footer = CacheFooter::new_zeroed();
        footer.line_blocks.set(self.layout.line_blocks as u16);
        footer.stream = stream as u8;
        footer.uuid = content.uuid;
        footer.format.set(content.format);
        footer.sequence.set(self.segments.seal(segment));
        footer.segment.set(segment as u32);
        let lines: Vec<(u64, u8)> = (self.index.placed(segment))
            .map(|(key, place)| (key.unwrap_or(u64::MAX), place.blocks))
            .collect();
        let sums = self.index.block_checksums(segment, blocks).iter().copied();
        let (data, last) = buf.split_at_mut(SEGMENT_BYTES - BLOCK_BYTES);
        data[blocks * BLOCK_BYTES..].fill(0);
        footer::write(footer, &lines, sums, last);
        self.writer.write(segment, buf.freeze());
    }

    /// What is to be forgotten does not get into a footer: it was recorded for earlier ones.
    fn drop_forgotten(&mut self, segment: usize) {
        let bits = self.forgotten_bits(segment);
        for slot in (0..self.layout.lines_per_segment).filter(|&slot| bits >> slot & 1 == 1) {
            self.index.unmap_primary(self.index.line_at(segment, slot));
        }
    }

    /// The write of a segment has ended.
    pub fn segment_written(&mut self, segment: usize, ok: bool) -> Option<Entry> {
        if !self.writer.ended(segment) {
            return None;
        }
        if ok {
            self.segments.written(segment);
            self.counters.written_bytes += SEGMENT_BYTES as u64;
            return None;
        }
        // The medium may hold the old footer, the new one, or neither.
        self.segments.lost(segment);
        let entry = self.segments.void(segment);
        self.index.clear_segment(segment);
        self.counters.losses += 1;
        self.segments.release(segment);
        Some(entry)
    }

    pub fn check_invariants(&self, is_emptying: bool) {
        self.index.check_invariants();
        self.writer.check_invariants();
        let others = self.writer.opened() + usize::from(is_emptying);
        self.segments.check_invariants(others);
    }
}

/// Whether the blocks of `data` are as many as the checksums, and have them.
pub fn has_checksums(data: &[u8], checksums: &[u32]) -> bool {
    let blocks = data.chunks_exact(BLOCK_BYTES).map(block_checksum);
    blocks.eq(checksums.iter().copied())
}
