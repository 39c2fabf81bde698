//! Segments that are not on the medium yet: two that collect lines, and those that are being written whole.
//!
//! Invariants:
//! 1. Of each stream one segment is open at most.
//! 2. The bytes of a line are here from the time that it is taken until its segment was written: they are read from
//!    here meanwhile.
//! 3. The cache leaves a quarter of the pool to requests.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::device::{Device, Op};
use super::segments::{Segments, Stream};
use crate::base::buf::{Buf, BufMut, Pool};
use crate::base::io::Action;
use crate::base::limits::{BLOCK_BYTES, CACHE_SEGMENT_WRITES_MAX, SEGMENT_BYTES};
use crate::cache::journal::Layout;

/// A segment that collects lines.
#[derive(Debug)]
pub struct Open {
    pub segment: usize,
    /// Lines that are in it.
    slots: usize,
    /// Blocks that they take.
    pub blocks: usize,
    pub buf: BufMut,
}

impl Open {
    /// Lines that fit beside those that are in it, if they are not compressed.
    fn lines_left(&self, layout: &Layout) -> usize {
        let blocks = layout.room_blocks() - self.blocks;
        (blocks / layout.line_blocks).min(layout.lines_per_segment - self.slots)
    }
}

/// Where a line was put.
#[derive(Clone, Copy, Debug)]
pub struct Put {
    pub segment: usize,
    pub slot: usize,
    /// Its first block in the segment.
    pub first: u8,
    /// Whether nothing more fits.
    pub is_full: bool,
}

/// See the module.
#[derive(Debug)]
pub struct SegmentWriter {
    pool: Arc<Pool>,
    open: [Option<Open>; 2],
    /// Sealed segments whose write was not handed out yet.
    unsent: VecDeque<u32>,
    /// Sealed segments whose write has not ended: their bytes.
    writing: BTreeMap<u32, Buf>,
}

impl SegmentWriter {
    pub fn new(pool: Arc<Pool>) -> Self {
        Self {
            pool,
            open: [None, None],
            unsent: VecDeque::new(),
            writing: BTreeMap::new(),
        }
    }

    /// Nothing is written any more.
    pub fn clear(&mut self) {
        *self = Self::new(Arc::clone(&self.pool));
    }

    /// What a client may need soon is not taken.
    pub fn has_memory(&self) -> bool {
        self.pool.free_bytes() >= self.pool.total_bytes() / 4
    }

    /// Whether another segment may be opened, if one is free.
    pub fn can_open(&self) -> bool {
        self.writing.len() < CACHE_SEGMENT_WRITES_MAX && self.has_memory()
    }

    /// Segments that may be opened beside those under way, and that one if it is open.
    pub fn openable(&self, with_open: bool) -> usize {
        let memory = (self.pool.free_bytes()).saturating_sub(self.pool.total_bytes() / 4);
        CACHE_SEGMENT_WRITES_MAX
            .saturating_sub(self.writing.len() + usize::from(with_open))
            .min(memory / SEGMENT_BYTES)
    }

    pub fn is_open(&self, stream: Stream) -> bool {
        self.open[stream as usize].is_some()
    }

    /// How many segments collect lines.
    pub fn opened(&self) -> usize {
        self.open.iter().flatten().count()
    }

    /// Whether a write of a segment is under way, or about to be.
    pub fn is_writing(&self) -> bool {
        !self.writing.is_empty()
    }

    /// Lines that the open segment of a stream still takes, if they are not compressed; `None`: none is open.
    pub fn lines_left(&self, stream: Stream, layout: &Layout) -> Option<usize> {
        let open = self.open[stream as usize].as_ref();
        open.map(|open| open.lines_left(layout))
    }

    /// Bytes of a segment that is not on the medium yet.
    pub fn bytes(&self, segment: usize, range: Range<usize>) -> Option<&[u8]> {
        if let Some(buf) = self.sealed(segment) {
            return Some(&buf[range]);
        }
        let mut open = self.open.iter().flatten();
        open.find(|open| open.segment == segment)
            .map(|open| &open.buf[range])
    }

    /// A segment that is being written.
    pub fn sealed(&self, segment: usize) -> Option<&Buf> {
        self.writing.get(&(segment as u32))
    }

    /// Put a line's blocks into the open segment of a stream, or else into a new one.
    pub fn put(
        &mut self,
        stream: Stream,
        data: &[u8],
        layout: &Layout,
        segments: &mut Segments,
    ) -> Option<Put> {
        if self.open[stream as usize].is_none() {
            self.open[stream as usize] = self.open_segment(stream, segments);
        }
        let open = self.open[stream as usize].as_mut()?;
        let (slot, first) = (open.slots, open.blocks);
        open.buf[first * BLOCK_BYTES..][..data.len()].copy_from_slice(data);
        open.slots += 1;
        open.blocks += data.len() / BLOCK_BYTES;
        Some(Put {
            segment: open.segment,
            slot,
            first: first as u8,
            is_full: open.lines_left(layout) == 0,
        })
    }

    fn open_segment(&self, stream: Stream, segments: &mut Segments) -> Option<Open> {
        if !self.can_open() || segments.free() == 0 {
            return None;
        }
        let buf = self.pool.alloc(SEGMENT_BYTES)?;
        Some(Open {
            segment: segments.open(stream)?,
            slots: 0,
            blocks: 0,
            buf,
        })
    }

    /// The segment that a stream has open, to be sealed.
    pub fn take_open(&mut self, stream: Stream) -> Option<Open> {
        self.open[stream as usize].take()
    }

    /// It is sealed: write it.
    pub fn write(&mut self, segment: usize, buf: Buf) {
        self.writing.insert(segment as u32, buf);
        self.unsent.push_back(segment as u32);
    }

    /// Hand out the writes of what was sealed.
    pub fn drive(
        &mut self,
        is_closing: bool,
        layout: &Layout,
        device: &mut Device,
        actions: &mut Vec<Action>,
    ) {
        while let Some(segment) = self.unsent.pop_front() {
            let Some(buf) = self.writing.get(&segment).cloned() else {
                continue;
            };
            let offset = layout.segment_offset(segment as usize);
            let op = Op::Segment(segment as usize);
            device.write(op, offset, vec![buf], is_closing, actions);
        }
    }

    /// A write has ended; whether anybody knows of it.
    pub fn ended(&mut self, segment: usize) -> bool {
        self.writing.remove(&(segment as u32)).is_some()
    }

    pub fn check_invariants(&self) {
        assert!(self.unsent.len() <= self.writing.len());
    }
}
