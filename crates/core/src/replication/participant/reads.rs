//! Spans that are read from this medium: for members that need them later than they were written, for a candidate, and to
//! be compared with their checksums.
//!
//! A span is read in pieces, since a buffer has a largest size. What was read counts only if the log still has the span then:
//! its place may have been written over.
//!
//! Spans of a log that is encrypted go to others as they are on the medium, and are decrypted here only to see whether they
//! are whole.

use alloc::borrow::Cow;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use slab::Slab;

use crate::base::buf::{Buf, BufMut, Pool};
use crate::base::cipher::LogKeys;
use crate::base::error::IoError;
use crate::base::io::Nanos;
use crate::base::limits::{BLOCK_BYTES, REQUEST_BLOCKS_MAX};
use crate::format::{LOG_HEADER_BLOCKS, SpanHeader, block_checksum};
use crate::log::replay::stored_checksums;
use crate::replication::replica::Replica;
use crate::replication::{Member, SpanId, Spans};

/// How long what was compared is taken for good without being read again. What rots later is found as in any other copy:
/// when it is read, by a scrub, or by the next replay.
const COMPARED_MAX: Nanos = Nanos::from_millis(300_000);
/// Spans that are read at once.
const READS_MAX: usize = 4;

/// What a span is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The message at this place of what goes to a member, in its outbox of this life.
    Send { to: Member, life: u64, place: u64 },
    /// A candidate has asked for it.
    Answer { to: Member, epoch: u64 },
    /// To be compared with its checksums.
    Verify,
    /// The same, by a candidate whose copy is damaged, in this attempt to heal it.
    Heal { attempt: u64 },
}

/// A piece of a span that is being read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    read: usize,
    index: usize,
}

#[derive(Debug)]
struct Reading {
    purpose: Purpose,
    span: SpanId,
    pieces: Vec<Option<Buf>>,
    /// For the pieces that are to be begun.
    memory: VecDeque<BufMut>,
    begun: usize,
    missing: usize,
    has_failed: bool,
}

/// A copy that is read back.
#[derive(Clone, Copy, Debug)]
struct Verify {
    /// Spans that end before it were read, or are being read.
    next: u64,
    up_to: u64,
    is_bad: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct SpanReads {
    pool: Arc<Pool>,
    ring_blocks: u64,
    keys: Option<Arc<dyn LogKeys>>,
    wanted: VecDeque<(Purpose, SpanId)>,
    reading: Slab<Reading>,
    verify: Option<Verify>,
    /// Spans that are being compared, for `verify` or before that is asked for.
    comparing: usize,
    /// One of them was bad, and nobody has asked yet.
    was_bad: bool,
    /// Up to here everything was as it should be when it was read last, by the replay or to be compared; or is being read.
    compared: u64,
    /// When the first of it was.
    compared_at: Nanos,
    /// When some of it was last, while the copy is being brought up.
    compared_last: Option<Nanos>,
    is_starved: bool,
}

/// A span that was read: for what, and its blocks if the log still has it.
pub(super) type Read = (Purpose, SpanId, Option<Vec<Buf>>);

impl SpanReads {
    /// `replayed` is the position up to which a replay has just found everything as it should be.
    pub(super) fn new(
        pool: Arc<Pool>,
        ring_blocks: u64,
        keys: Option<Arc<dyn LogKeys>>,
        replayed: u64,
        now: Nanos,
    ) -> Self {
        Self {
            keys,
            pool,
            ring_blocks,
            wanted: VecDeque::new(),
            reading: Slab::new(),
            verify: None,
            comparing: 0,
            was_bad: false,
            compared: replayed,
            compared_at: now,
            compared_last: None,
            is_starved: false,
        }
    }

    /// Offset in bytes on the log's region of a span.
    pub(super) fn offset_of(&self, span: &SpanId) -> u64 {
        self.offset_at(span.end.position - u64::from(span.blocks))
    }

    /// The same of a position.
    pub(super) fn offset_at(&self, position: u64) -> u64 {
        (LOG_HEADER_BLOCKS + position % self.ring_blocks) * BLOCK_BYTES as u64
    }

    /// The position, from the tail on, that lies so many blocks behind where the ring begins.
    pub(super) fn position_at(&self, block: u64, tail: u64) -> u64 {
        let (block, begin) = (block % self.ring_blocks, tail % self.ring_blocks);
        tail + (block + self.ring_blocks - begin) % self.ring_blocks
    }

    /// Blocks of the ring, the first of which lies at this offset, as they were before they were encrypted.
    pub(super) fn in_the_clear<'a>(&self, offset: u64, blocks: &'a [u8]) -> Cow<'a, [u8]> {
        let Some(keys) = &self.keys else {
            return Cow::Borrowed(blocks);
        };
        let mut clear = blocks.to_vec();
        let numbers = offset / BLOCK_BYTES as u64..;
        for (number, block) in numbers.zip(clear.chunks_exact_mut(BLOCK_BYTES)) {
            keys.decrypt(number, block);
        }
        Cow::Owned(clear)
    }

    /// Read a span.
    pub(super) fn want(&mut self, purpose: Purpose, span: SpanId) {
        self.wanted.push_back((purpose, span));
    }

    /// What goes to a member is not waited for any more.
    pub(super) fn forget_sends(&mut self, member: Member) {
        (self.wanted)
            .retain(|(purpose, _)| !matches!(purpose, Purpose::Send { to, .. } if *to == member));
    }

    /// The same of what a candidate has asked for.
    pub(super) fn forget_answers(&mut self, member: Member) {
        (self.wanted)
            .retain(|(purpose, _)| !matches!(purpose, Purpose::Answer { to, .. } if *to == member));
    }

    /// A span that begins here is going to be written, or is not as it should be.
    pub(super) fn suspect(&mut self, start: u64) {
        self.compared = self.compared.min(start);
    }

    /// Read back what lies between two positions, but for what was compared a moment ago and has not been written since.
    pub(super) fn verify(&mut self, now: Nanos, from: u64, up_to: u64) {
        self.forget_old(now, from);
        self.verify = Some(Verify {
            next: from.max(self.compared),
            up_to,
            is_bad: false,
        });
        self.compared = self.compared.max(up_to);
        self.was_bad = false;
    }

    /// Compare what a copy that is being brought up has taken, from its tail on, while more comes: then little is left when
    /// it is to be read back. One span at a time, since clients need the memory too. After something that was bad, which is
    /// read again then, the rest can wait as well.
    pub(super) fn compare_ahead(&mut self, now: Nanos, tail: u64, log: &Replica) {
        let up_to = log.durable().position;
        let next = |reads: &Self| span_between(tail.max(reads.compared), up_to, log);
        if self.was_bad || self.verify.is_some() || self.comparing > 0 || next(self).is_none() {
            return;
        }
        self.forget_old(now, tail);
        if let Some(span) = next(self) {
            self.compared_last = Some(now);
            self.compared = span.end.position;
            self.begin(Purpose::Verify, span);
        }
    }

    /// The copy is whole, or was never brought up: what is compared from now on was so at the time of the first of it.
    pub(super) fn is_brought_up(&mut self) {
        self.compared_last = None;
    }

    /// What lies behind a position is going to be compared, but for what is no longer ago than it may be. As long as a copy is
    /// brought up, which may take long, that counts from the last time that something was.
    fn forget_old(&mut self, now: Nanos, from: u64) {
        let since = self.compared_last.unwrap_or(self.compared_at);
        if now.since(since) > COMPARED_MAX {
            self.compared = 0;
        }
        if self.compared <= from {
            self.compared_at = now;
        }
    }

    /// Whether something waits for memory.
    pub(super) fn is_starved(&self) -> bool {
        self.is_starved
    }

    /// Whether all was read back, and is as it should be.
    pub(super) fn next_verified(&mut self, now: Nanos, log: &Replica) -> Option<bool> {
        let verify = self.verify?;
        self.compared_last = self.compared_last.map(|_| now);
        if self.comparing > 0 {
            return None;
        }
        let is_over = verify.is_bad || span_between(verify.next, verify.up_to, log).is_none();
        is_over.then(|| {
            self.verify = None;
            if verify.is_bad {
                self.compared = 0;
            }
            !verify.is_bad
        })
    }

    /// The next piece to read: where, and into what.
    pub(super) fn next(&mut self, log: &Replica) -> Option<(Piece, u64, BufMut)> {
        self.is_starved = false;
        let unbegun = |(_, one): &(usize, &Reading)| one.begun < one.pieces.len();
        let read = match self.reading.iter().find(unbegun) {
            Some((read, _)) => read,
            None => self.begin_next(log)?,
        };
        if !self.has_memory(read) {
            self.is_starved = true;
            return None;
        }
        let reading = &mut self.reading[read];
        let index = reading.begun;
        let buf = reading.memory.pop_front().expect("it has some of each");
        reading.begun += 1;
        let span = reading.span;
        let offset = self.offset_of(&span) + (index * REQUEST_BLOCKS_MAX * BLOCK_BYTES) as u64;
        Some((Piece { read, index }, offset, buf))
    }

    /// Have memory for the pieces of a span that are not begun: for all of them or for none, or several spans may wait for
    /// what others hold.
    fn has_memory(&mut self, read: usize) -> bool {
        let reading = &mut self.reading[read];
        if reading.begun > 0 {
            return true;
        }
        let blocks = reading.span.blocks as usize;
        let pieces = (0..blocks).step_by(REQUEST_BLOCKS_MAX);
        let sizes = pieces.map(|first| (blocks - first).min(REQUEST_BLOCKS_MAX) * BLOCK_BYTES);
        let memory: Option<VecDeque<BufMut>> = sizes.map(|bytes| self.pool.alloc(bytes)).collect();
        let has_some = memory.is_some();
        reading.memory = memory.unwrap_or_default();
        has_some
    }

    fn begin_next(&mut self, log: &Replica) -> Option<usize> {
        if self.reading.len() >= READS_MAX {
            return None;
        }
        let (purpose, span) = if let Some(wanted) = self.wanted.pop_front() {
            wanted
        } else {
            let is_free = self.comparing == 0;
            let verify = (self.verify.as_mut()).filter(|verify| is_free && !verify.is_bad)?;
            let span = span_between(verify.next, verify.up_to, log)?;
            verify.next = span.end.position;
            (Purpose::Verify, span)
        };
        Some(self.begin(purpose, span))
    }

    fn begin(&mut self, purpose: Purpose, span: SpanId) -> usize {
        self.comparing += usize::from(purpose == Purpose::Verify);
        let pieces = (span.blocks as usize).div_ceil(REQUEST_BLOCKS_MAX);
        self.reading.insert(Reading {
            purpose,
            span,
            pieces: (0..pieces).map(|_| None).collect(),
            memory: VecDeque::new(),
            begun: 0,
            missing: pieces,
            has_failed: false,
        })
    }

    /// A piece was read. Returns the span, once it was read whole.
    pub(super) fn done(
        &mut self,
        piece: Piece,
        result: Result<BufMut, IoError>,
        log: &Replica,
    ) -> Option<Read> {
        let reading = self.reading.get_mut(piece.read)?;
        reading.missing -= 1;
        match result {
            Ok(buf) => reading.pieces[piece.index] = Some(buf.freeze()),
            Err(_) => reading.has_failed = true,
        }
        if reading.missing > 0 || reading.begun < reading.pieces.len() {
            return None;
        }
        let Reading {
            purpose,
            span,
            pieces,
            has_failed,
            ..
        } = self.reading.remove(piece.read);
        let is_there = log.span_after(span.end.position - 1) == Some(span);
        let data: Option<Vec<Buf>> = pieces.into_iter().collect();
        // What rots here must not be taken for the log elsewhere.
        let data = data.filter(|data| !has_failed && self.is_whole(&span, data));
        if data.is_none() {
            self.suspect(span.start.position);
        }
        if purpose == Purpose::Verify {
            let is_bad = is_there && data.is_none();
            self.comparing -= 1;
            match &mut self.verify {
                Some(verify) => verify.is_bad |= is_bad,
                None => self.was_bad |= is_bad,
            }
        }
        Some((purpose, span, data.filter(|_| is_there)))
    }

    /// Whether blocks as they are on the medium are those of a span, all of them as they were sealed.
    pub(super) fn is_whole(&self, span: &SpanId, data: &[Buf]) -> bool {
        let offset = self.offset_of(span);
        let blocks = data.iter().flat_map(|part| part.chunks_exact(BLOCK_BYTES));
        let Some(first) = blocks.clone().next() else {
            return false;
        };
        let Ok(header) = SpanHeader::peek(&self.in_the_clear(offset, first)) else {
            return false;
        };
        let control_blocks = usize::from(header.control_blocks.get());
        let control: Vec<u8> = blocks
            .clone()
            .take(control_blocks)
            .flatten()
            .copied()
            .collect();
        let control = self.in_the_clear(offset, &control);
        let is_it =
            header.checksum.get() == span.end.chain && header.chain.get() == span.start.chain;
        if !is_it || SpanHeader::verify(&control).is_err() {
            return false;
        }
        let checksums = stored_checksums(&control, &header);
        let offsets = (offset..).step_by(BLOCK_BYTES);
        let blocks = offsets.zip(blocks).skip(control_blocks);
        blocks.clone().count() == checksums.len()
            && blocks.zip(&checksums).all(|((at, block), checksum)| {
                block_checksum(&self.in_the_clear(at, block)) == *checksum
            })
    }
}

/// The first span that ends between two positions.
fn span_between(from: u64, up_to: u64, log: &Replica) -> Option<SpanId> {
    let next = log.span_after(from)?;
    (next.end.position <= up_to).then_some(next)
}
