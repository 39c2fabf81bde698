//! A node's medium: the superblock and the ring of its copy, with what is on its way to both.
//!
//! A write that a crash meets has happened or has not; that a torn one is none is the log format's affair. In most scopes
//! the ring is as large as the log ever gets, so that only truncations leave something behind the end.

use std::collections::BTreeMap;

use hdcs_core::replication::replica::Superblock;
use hdcs_core::replication::{Point, SpanId};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Disk {
    /// The superblock that is durable.
    pub superblock: Superblock,
    /// Spans by where they begin.
    pub ring: BTreeMap<u64, SpanId>,
    /// Its size. Each span is one block.
    pub ring_blocks: u64,
    /// Spans in it that cannot be read back.
    pub rotten: Vec<SpanId>,
    /// The node that stopped had given up what is in it.
    pub is_given_up: bool,
    /// Writes that were begun.
    pub in_flight: Vec<Write>,
    /// It took the place of one that was lost.
    pub was_lost: bool,
}

/// A write that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Write {
    /// Of a span.
    Span(SpanId),
    /// Of the superblock.
    Superblock(Superblock),
}

/// A log that lost something of what it says was durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rot;

impl Disk {
    /// An empty one.
    pub fn new(superblock: Superblock, ring_blocks: u64) -> Self {
        Self {
            superblock,
            ring: BTreeMap::new(),
            ring_blocks,
            rotten: Vec::new(),
            is_given_up: false,
            in_flight: Vec::new(),
            was_lost: false,
        }
    }

    /// The write of this index ends.
    pub fn finish(&mut self, index: usize) -> Write {
        let write = self.in_flight.remove(index);
        match write {
            Write::Span(span) => {
                let place = |span: &SpanId| span.start.position % self.ring_blocks;
                self.ring.retain(|_, other| place(other) != place(&span));
                self.rotten.retain(|other| place(other) != place(&span));
                self.ring.insert(span.start.position, span);
            }
            Write::Superblock(superblock) => self.superblock = superblock,
        }
        write
    }

    /// The node stops: of the writes in flight those happen whose bit is set.
    pub fn crash(&mut self, happened: u32) {
        for index in (0..self.in_flight.len()).rev() {
            if happened & 1 << index == 0 {
                self.in_flight.remove(index);
            } else {
                self.finish(index);
            }
        }
    }

    /// What a replay finds: as the core's does it, invariants 1 and 4 there, and passing over what is void.
    pub fn replay(&self) -> Result<Vec<SpanId>, Rot> {
        let superblock = &self.superblock;
        let mut found = Vec::new();
        let mut at = superblock.tail;
        while let Some(span) = self.ring.get(&at.position).filter(|span| {
            span.start == at
                && span.incarnation <= superblock.incarnation
                && superblock.counts(span)
        }) {
            found.push(*span);
            at = span.end;
        }
        let is_proof = |span: &SpanId| {
            superblock.counts(span)
                && (superblock.is_whole || span.start.position < superblock.cut_position)
                && (span.evidence > at.position || span.incarnation > superblock.incarnation)
        };
        if self
            .ring
            .range(at.position..)
            .any(|(_, span)| is_proof(span))
        {
            return Err(Rot);
        }
        Ok(found)
    }

    /// Whether a span covers something at the durable tail or behind it.
    pub fn overruns(&self, span: &SpanId) -> bool {
        span.end.position - self.superblock.tail.position > self.ring_blocks
    }

    /// What is in the ring cannot be read back any more.
    pub fn rot(&mut self) {
        self.rotten = self.ring.values().copied().collect();
    }

    /// Whether a replay finds what could not be read back.
    pub fn offers_rot(&self) -> bool {
        (self.replay()).is_ok_and(|found| found.iter().any(|span| self.rotten.contains(span)))
    }

    /// Whether the log would have this point after a replay, or has it behind it.
    pub fn has(&self, point: Point) -> bool {
        let tail = self.superblock.tail;
        point == tail
            || point.position < tail.position
            || (self.replay()).is_ok_and(|found| found.iter().any(|span| span.end == point))
    }
}
