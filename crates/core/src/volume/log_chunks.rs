//! The log as destage reads it: in chunks of neighbouring blocks, most of which it needs, instead
//! of one read for each entry.
//!
//! Items come in the order of the log, so a chunk is read once, serves the items that need it
//! within a short time, and gives way to the ones behind it. A chunk of which little is needed,
//! because most of it was overwritten since, is not worth reading: its parts are read one by one. So are parts far behind
//! the first of their item, which neighbour it in the volume alone: their chunk would be dropped before its turn, and
//! drop those whose turn it is.
//!
//! Invariants:
//! 1. Memory is bounded: [`CHUNKS_MAX`] chunks; one that is being read is never dropped.
//! 2. A chunk lies within one lap of the ring and within the spans of its plan.
//! 3. Nothing here is trusted: every part is checked against its checksums when it is taken out.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

use crate::base::buf::Buf;
use crate::base::limits::BLOCK_BYTES;
use crate::log::destage::Item;
use crate::log::write_log::WriteLog;

/// Blocks of one chunk.
const CHUNK_BLOCKS: u64 = 64;
/// A chunk is read if one block in so many is needed.
const NEEDED_DIVISOR: u64 = 4;
/// Chunks in memory at most.
const CHUNKS_MAX: usize = 8;
/// A part is read with its chunk if that begins within so many blocks of its item's first part: a largest item that was
/// written in one go, and half of what may be in memory.
const NEAR_BLOCKS: u64 = CHUNK_BLOCKS * CHUNKS_MAX as u64 / 2;

/// A part of an item that waits for its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) item: usize,
    pub(super) part: usize,
}

#[derive(Debug)]
enum Chunk {
    Reading(Vec<Waiting>),
    Ready(Buf),
}

/// Where the blocks of a part can be had.
#[derive(Debug)]
pub(super) enum Source {
    /// Here.
    Data(Buf),
    /// From the chunk at this position, which is being read: see [`LogChunks::wait`].
    Later(u64),
    /// From this chunk, if it is asked for with [`LogChunks::reading`].
    Chunk(Range<u64>),
    /// From a read of its own.
    Alone,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct LogChunks {
    /// By first position: how many of its blocks the plan needs from the log.
    needed: BTreeMap<u64, u64>,
    chunks: BTreeMap<u64, Chunk>,
    /// Positions of the plan's spans.
    bounds: Range<u64>,
}

impl LogChunks {
    /// A new plan, of so many of the log's spans.
    pub(super) fn begin(&mut self, spans: usize, log: &WriteLog) {
        self.clear();
        let last = spans.checked_sub(1).and_then(|last| log.spans().get(last));
        if let (Some(first), Some(last)) = (log.spans().front(), last) {
            self.bounds = first.position..last.end();
        }
    }

    /// The plan needs these items.
    pub(super) fn need(&mut self, items: &[Item], log: &WriteLog) {
        for part in items.iter().flat_map(|item| &item.parts) {
            let entry = log.entry(part.sequence);
            if entry.data.is_some() {
                continue;
            }
            let blocks = entry.positions(part.range);
            if blocks.start >= self.bounds.end {
                continue;
            }
            let chunk = self.chunk_of(blocks.start, log);
            // What crosses the end of a chunk is read alone.
            if blocks.end <= chunk.end {
                *self.needed.entry(chunk.start).or_default() += blocks.end - blocks.start;
            }
        }
    }

    /// Forget the plan. What is still being read is dropped when it comes.
    pub(super) fn clear(&mut self) {
        self.needed.clear();
        self.chunks.clear();
    }

    /// The chunk that a position lies in was read and is bad in part: nothing is taken from it, and it is not read
    /// as a whole again.
    pub(super) fn distrust(&mut self, position: u64, log: &WriteLog) {
        let chunk = self.chunk_of(position, log);
        self.needed.remove(&chunk.start);
        if let Some(Chunk::Ready(_)) = self.chunks.get(&chunk.start) {
            self.chunks.remove(&chunk.start);
        }
    }

    /// Where `blocks` of the log can be had, for an item whose parts in the log begin at `first`.
    pub(super) fn find(&mut self, blocks: &Range<u64>, first: u64, log: &WriteLog) -> Source {
        // What goes along from behind the plan's spans is read alone.
        if blocks.start >= self.bounds.end {
            return Source::Alone;
        }
        let chunk = self.chunk_of(blocks.start, log);
        if blocks.end > chunk.end {
            return Source::Alone;
        }
        match self.chunks.get(&chunk.start) {
            Some(Chunk::Ready(data)) => {
                let start = (blocks.start - chunk.start) as usize * BLOCK_BYTES;
                let end = (blocks.end - chunk.start) as usize * BLOCK_BYTES;
                return Source::Data(data.slice(start..end));
            }
            Some(Chunk::Reading(_)) => return Source::Later(chunk.start),
            None => {}
        }
        let is_near = chunk.start < first + NEAR_BLOCKS;
        if is_near && self.is_worth_reading(&chunk) && self.make_room() {
            Source::Chunk(chunk)
        } else {
            Source::Alone
        }
    }

    /// The chunk behind this one, if it is to be read ahead.
    pub(super) fn next(&mut self, chunk: &Range<u64>, log: &WriteLog) -> Option<Range<u64>> {
        let (&start, _) = self.needed.range(chunk.end..).next()?;
        let next = self.chunk_of(start, log);
        let wanted = !self.chunks.contains_key(&start) && self.is_worth_reading(&next);
        (wanted && self.make_room()).then_some(next)
    }

    /// A chunk was asked for.
    pub(super) fn reading(&mut self, chunk: &Range<u64>) {
        self.chunks.insert(chunk.start, Chunk::Reading(Vec::new()));
    }

    /// Have a part wait for the chunk at `first`, which is being read.
    pub(super) fn wait(&mut self, first: u64, part: Waiting) {
        match self.chunks.get_mut(&first) {
            Some(Chunk::Reading(parts)) => parts.push(part),
            _ => unreachable!("a chunk that is being read is never dropped"),
        }
    }

    /// A chunk was read, or (`None`) could not be. Returns the parts that wait for it.
    pub(super) fn was_read(&mut self, first: u64, data: Option<Buf>) -> Vec<Waiting> {
        let Some(Chunk::Reading(waiting)) = self.chunks.remove(&first) else {
            return Vec::new();
        };
        if let Some(data) = data {
            self.chunks.insert(first, Chunk::Ready(data));
        }
        waiting
    }

    /// The chunk that a position lies in: aligned within its lap, cut at the end of the lap and to
    /// the plan's spans.
    fn chunk_of(&self, position: u64, log: &WriteLog) -> Range<u64> {
        let slot = position % log.ring_blocks();
        let (start, lap_end) = (
            position - slot % CHUNK_BLOCKS,
            position - slot + log.ring_blocks(),
        );
        let end = (start + CHUNK_BLOCKS).min(lap_end).min(self.bounds.end);
        start.max(self.bounds.start)..end
    }

    fn is_worth_reading(&self, chunk: &Range<u64>) -> bool {
        let needed = self.needed.get(&chunk.start).copied().unwrap_or(0);
        needed > 1 && needed * NEEDED_DIVISOR >= chunk.end - chunk.start
    }

    /// Make room for one more chunk; items come in the order of the log, so the first goes.
    fn make_room(&mut self) -> bool {
        if self.chunks.len() < CHUNKS_MAX {
            return true;
        }
        let ready = |chunk: &Chunk| matches!(chunk, Chunk::Ready(_));
        let first = self.chunks.iter().find(|(_, chunk)| ready(chunk));
        let Some(first) = first.map(|(&first, _)| first) else {
            return false;
        };
        self.chunks.remove(&first);
        true
    }
}
