//! Opening a write log: choose a superblock, read the ring from its tail, rebuild [`WriteLog`].
//!
//! ```text
//!  superblocks ──► spans ──(a span is not valid here)──► next lap? ──no──► evidence, and a second look ──► done
//!                    ▲ │ valid: take it                     │ valid there        │         │
//!                    ├─┴──────────────────────────────────◄─┴────────────────────┘         ├──► corrupt
//!                    └──────────(what is good of a span whose control part holds)──────────┘
//! ```
//!
//! Blocks are parsed one by one in order of position, from chunks that are read ahead in parallel.
//!
//! Invariants:
//! 1. A span counts only if its magic, version, position, log number, chain, incarnation, control
//!    checksum and every data checksum agree.
//! 2. All allocation follows from the spans that counted; nothing else of the device is believed.
//! 3. Compressed entries are checked as they are stored, like any others: nothing is unpacked here, and
//!    whether one can be unpacked does not decide where the log ends.
//! 4. Where the spans end, the blocks that follow are searched for a span which says that the end
//!    had been durable, or which an opening wrote that the superblock does not know. If there is
//!    one, acknowledged data (or the newer superblock) has rotted. If the control part holds that follows in the
//!    chain, its span is taken but for its bad data blocks, and what was in these is lost ([`WriteLog::lost`]).
//!    Else nobody knows what is lost, or it is more than can be recorded: the log refuses to open.
//! 5. Of a span that counts, what nobody here can read, a kind of entry or a compression, is no reason to forget it:
//!    the log refuses to open. Records are told, and are for who asked to judge.
//! 6. A newer superblock that was kept beside the device says where replay begins, whatever the device holds.
//! 7. No single bad read decides anything. Where the spans end is looked at twice, each time from the device: a span
//!    that is whole at either look counts. If the looks differ, or if the log would be refused, both are taken again,
//!    [`LOG_READ_TRIES_MAX`] times in all. So are the superblocks while one is not valid.
//! 8. With keys, no superblock counts without its tag, whatever the other one says: one whose checksum is right and
//!    whose tag is not was written by somebody, and not by an accident.
//! 9. What one opening has found to have been durable, no later one takes for a torn end, whatever of the evidence is
//!    written over: the superblock of an opening names its end.
//! 10. A span that was cut off ([`crate::format::Membership::voids`]) is as good as not there, wherever one is looked for:
//!     behind the last span, at the next lap, at the second look, and as evidence. What the superblock calls known to have
//!     been durable never lies behind a cut, so a log that ends before that has lost something, cut or not.
//! 11. What lies behind the cut of a copy that is being brought up was written in any order, and is no evidence
//!     ([`crate::format::Membership::proves`]), but for a span of an opening that the superblock does not know: a newer
//!     superblock was durable before that was written, and is lost.
//!
//! It must not write: a failed opening leaves the device as it was. A replay needs no volume: one of a member's copy is
//! asked for its spans ([`Found::Span`]) and its [superblock](Replay::superblock), and its log is dropped.

mod looks;

use alloc::collections::{BTreeSet, VecDeque};
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use self::looks::{Looks, Next, Seen};
use crate::base::buf::{BufMut, Pool};
use crate::base::cipher::Authenticator;
use crate::base::codec::Method;
use crate::base::error::{FormatError, IoError, OpenError};
use crate::base::io::{Nanos, SectorRange};
use crate::base::limits::{
    BLOCK_BYTES, BLOCK_SECTORS, LOG_ENTRY_PARTS, LOG_INDEX_BYTES_LEAST, LOG_PART_BYTES,
    LOG_PIECE_BYTES_MAX, LOG_READ_TRIES_MAX, LOST_RANGES_MAX, REQUEST_BLOCKS_MAX,
    REQUEST_BYTES_MAX, SECTOR_BYTES, VOLUME_BYTES_MAX,
};
use crate::format::{
    EntryKind, LOG_HEADER_BLOCKS, LOG_HOLDS_VOLUME, LOG_SUPERBLOCKS, LogSuperblock, SpanEntry,
    SpanHeader, block_checksum,
};
use crate::log::ahead::blocks_to_search;
use crate::log::budget::{IndexBudget, Share};
use crate::log::checksums::PAGE_BYTES;
use crate::log::extent_index::Sequence;
use crate::log::packing::Stored;
use crate::log::write_log::WriteLog;

/// Chunks read ahead at once.
const CHUNKS_IN_FLIGHT_MAX: usize = 4;
/// Blocks of the first chunks; each that was worth its reading lets the next ones be twice as large. So little is read
/// behind the end of a log that holds little.
const CHUNK_BLOCKS_FIRST: u64 = 32;
/// What share of the blocks that were found to hold spans is read ahead of them.
const AHEAD_DIVISOR: u64 = 2;
/// Memory that the index takes of what a chunk holds, about: an entry and a run for each block, and a page of checksums.
const CHUNK_INDEX_BYTES: u64 =
    (REQUEST_BYTES_MAX / BLOCK_BYTES) as u64 * LOG_ENTRY_PARTS * LOG_PART_BYTES + PAGE_BYTES;

/// A read that the replay wants.
#[derive(Debug)]
pub struct ReplayRead {
    /// Names the chunk in [`Replay::read_done`].
    pub chunk: u64,
    /// Offset in bytes on the log's region.
    pub offset: u64,
    /// To be filled.
    pub buf: BufMut,
}

/// What a step of the replay found.
#[derive(Debug)]
pub enum Found {
    /// One more span. Its records and entries follow.
    Span(SpanFound),
    /// The entries of that span, in order; they are in the log already. Its records were told before.
    Entries(Range<Sequence>),
    /// A record. The log knows nothing more of it.
    Record(Record),
    /// The log is whole.
    Done,
}

/// A span that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanFound {
    /// Position at which the span before it ends, or at which the log begins.
    pub start: u64,
    /// Checksum of the span before it.
    pub chain: u64,
    /// Position of its first block: `start`, or one behind it at which a lap begins.
    pub position: u64,
    /// Its blocks.
    pub blocks: u32,
    /// Its checksum, which is the chain at its end.
    pub checksum: u64,
    /// Opening that wrote it.
    pub incarnation: u64,
    /// Every span below this position was durable when it was sealed, at whoever sealed it.
    pub durable: u64,
    /// Data blocks of it that are damaged; what they held is lost.
    pub damaged_blocks: u32,
}

impl SpanFound {
    /// The first position after it.
    pub const fn end(&self) -> u64 {
        self.position + self.blocks as u64
    }
}

/// Where a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Position of its span.
    pub span: u64,
    /// Position of the block in which it begins.
    pub position: u64,
    /// Its first byte there.
    pub offset: u16,
    /// How many bytes it has.
    pub bytes: u64,
}

#[derive(Debug)]
struct Chunk {
    id: u64,
    position: u64,
    blocks: u64,
    data: Option<BufMut>,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Mode {
    /// A span should begin at the cursor; `end` is where the last one ended, if this is the next
    /// lap's start.
    Span { end: Option<u64> },
    /// Collecting a control part.
    Control { end: Option<u64> },
    /// Checking the data blocks of the span in `control`.
    Data { end: Option<u64>, index: usize },
    /// Looking for proof that the end at `end` had been durable, and once more for a span there.
    Evidence { end: u64 },
    /// Collecting the control part of a possible proof.
    EvidenceControl { end: u64 },
}

/// The opening of one write log.
#[derive(Debug)]
pub struct Replay {
    volume: [u8; 16],
    region_blocks: u64,
    log: Option<WriteLog>,
    superblock: Option<LogSuperblock>,
    kept: Option<LogSuperblock>,
    keys: Option<Arc<dyn Authenticator>>,
    /// Where the memory of the log is from.
    budget: Option<Rc<IndexBudget>>,
    chunks: VecDeque<Chunk>,
    next_chunk: u64,
    /// Blocks of the next chunk at most.
    chunk_blocks: u64,
    /// Position of the next block to parse, and of the next to read.
    cursor: u64,
    ahead: u64,
    /// No block at or after this position is wanted.
    limit: u64,
    /// What is to be searched behind that for what proves an end wrong.
    searched_next: Option<Range<u64>>,
    /// Bytes of the region that are prepared; none: all.
    prepared: Option<u64>,
    mode: Mode,
    incarnation: u64,
    chain: u64,
    /// What the last span names, or the superblock ([`blocks_to_search`]).
    named_ahead: u64,
    control: Vec<u8>,
    checksums: Vec<u32>,
    /// Where the spans seem to end.
    looks: Looks,
    /// Times that the superblocks were read.
    superblock_tries: u8,
    /// Whether there may have been a newer superblock than the one in force.
    may_be_older: bool,
    /// The damaged span that is being read for what is good in it.
    salvage: Option<Salvage>,
    /// Position before which the log is known to have been durable.
    known_head: u64,
    /// Times that the control part of a damaged span did not hold any more when its data was read: a device that goes
    /// on like that is not followed for ever.
    salvages_failed: u8,
}

/// What is bad in a span that is known to have been durable, and whose control part holds.
#[derive(Debug)]
struct Salvage {
    /// Where it begins.
    position: u64,
    /// How often all its data was read.
    passes: u8,
    /// Positions of the data blocks that were bad each time.
    bad: BTreeSet<u64>,
    /// The same of the pass that is under way.
    now: BTreeSet<u64>,
}

impl Replay {
    /// Begin to open the log of `volume` in a region of so many bytes.
    pub fn new(volume: [u8; 16], region_bytes: u64) -> Self {
        Self {
            volume,
            region_blocks: region_bytes / BLOCK_BYTES as u64,
            log: None,
            superblock: None,
            kept: None,
            keys: None,
            budget: None,
            chunks: VecDeque::new(),
            next_chunk: 0,
            chunk_blocks: CHUNK_BLOCKS_FIRST,
            cursor: 0,
            ahead: 0,
            limit: 0,
            searched_next: None,
            prepared: None,
            mode: Mode::Span { end: None },
            incarnation: 0,
            chain: 0,
            named_ahead: 0,
            control: Vec::new(),
            checksums: Vec::new(),
            looks: Looks::default(),
            superblock_tries: 0,
            may_be_older: false,
            salvage: None,
            known_head: 0,
            salvages_failed: 0,
        }
    }

    /// A superblock that was kept beside the device, which took no more writes. It counts if it is of the same log,
    /// and is newer than those there.
    pub fn keep(&mut self, superblock: LogSuperblock) {
        self.kept = Some(superblock);
    }

    /// A superblock counts only with a tag of these keys, and the log writes none without.
    pub fn authenticate(&mut self, keys: Arc<dyn Authenticator>) {
        self.keys = Some(keys);
    }

    /// Only so many bytes of the region are prepared, from its beginning on.
    pub fn set_prepared(&mut self, bytes: u64) {
        self.prepared = Some(bytes);
    }

    /// The memory of the log is of this budget.
    pub fn set_budget(&mut self, budget: &Rc<IndexBudget>) {
        self.budget = Some(Rc::clone(budget));
    }

    /// Whether there is memory for what the next chunk may hold.
    pub fn has_memory(&mut self) -> bool {
        // Which chunks are under way may bring as much.
        let more = CHUNK_INDEX_BYTES * (1 + self.chunks.len() as u64);
        let log = self.log.as_mut();
        log.is_none_or(|log| log.share_mut().may_replay(more))
    }

    /// So many runs of an index name what was found so far.
    pub fn note_runs(&mut self, runs: usize) {
        if let Some(log) = &mut self.log {
            log.note_runs(runs);
        }
    }

    /// The next read to perform, if there is room for one. Without a free buffer there is none;
    /// ask again later.
    pub fn next_read(&mut self, pool: &Arc<Pool>) -> Option<ReplayRead> {
        let Some(superblock) = &self.superblock else {
            return self.superblock_read(pool);
        };
        if self.chunks.len() >= CHUNKS_IN_FLIGHT_MAX || self.ahead >= self.limit {
            return None;
        }
        let slot = self.ahead % superblock.ring_blocks.get();
        let left = (superblock.ring_blocks.get() - slot).min(self.limit - self.ahead);
        let want = left.min(self.chunk_blocks).min(self.reach());
        if want == 0 {
            return None;
        }
        let buf = [want, want.min(16), 1]
            .into_iter()
            .find_map(|blocks| pool.alloc(blocks as usize * BLOCK_BYTES))?;
        let blocks = (buf.len() / BLOCK_BYTES) as u64;
        let position = self.ahead;
        self.ahead += blocks;
        let offset = (LOG_HEADER_BLOCKS + slot) * BLOCK_BYTES as u64;
        Some(self.issue(position, blocks, offset, buf))
    }

    /// How many more blocks may be read ahead. While spans are looked for, that is half of what they took so far: so
    /// little is read for nothing behind the end of a log that holds little, and a log that holds much is read as fast
    /// as it can be. What is searched for evidence is read to its end.
    fn reach(&self) -> u64 {
        let tail = self.chosen().tail.get();
        match self.mode {
            Mode::Span { .. } | Mode::Control { .. } | Mode::Data { .. } => {
                let found = (self.cursor - tail) / AHEAD_DIVISOR;
                (self.cursor + found.max(CHUNK_BLOCKS_FIRST)).saturating_sub(self.ahead)
            }
            Mode::Evidence { .. } | Mode::EvidenceControl { .. } => u64::MAX,
        }
    }

    /// The superblocks, one by one.
    fn superblock_read(&mut self, pool: &Arc<Pool>) -> Option<ReplayRead> {
        let index = self.chunks.len() as u64;
        if index == LOG_SUPERBLOCKS {
            return None;
        }
        let buf = pool.alloc(BLOCK_BYTES)?;
        Some(self.issue(index, 1, LogSuperblock::offset_of(index), buf))
    }

    fn issue(&mut self, position: u64, blocks: u64, offset: u64, buf: BufMut) -> ReplayRead {
        let id = self.next_chunk;
        self.next_chunk += 1;
        self.chunks.push_back(Chunk {
            id,
            position,
            blocks,
            data: None,
        });
        ReplayRead {
            chunk: id,
            offset,
            buf,
        }
    }

    /// A read ended. `found` is told what follows from it, in order.
    pub fn read_done(
        &mut self,
        now: Nanos,
        chunk: u64,
        result: Result<BufMut, IoError>,
        mut found: impl FnMut(&WriteLog, Found),
    ) -> Result<(), OpenError> {
        // A chunk that the parser jumped over is no longer wanted.
        let Some(place) = self.chunks.iter_mut().find(|waiting| waiting.id == chunk) else {
            return Ok(());
        };
        place.data = Some(result.map_err(OpenError::Io)?);
        if self.superblock.is_none() {
            let read = self.chunks.iter().filter(|chunk| chunk.data.is_some());
            if read.count() as u64 == LOG_SUPERBLOCKS {
                return self.choose();
            }
            return Ok(());
        }
        while let Some(chunk) = self.chunks.pop_front_if(|chunk| chunk.data.is_some()) {
            let data = chunk.data.as_ref().expect("checked");
            for (position, block) in (chunk.position..).zip(data.chunks_exact(BLOCK_BYTES)) {
                debug_assert_eq!(position, self.cursor);
                if self.block(now, block, &mut found)? {
                    found(self.settle()?, Found::Done);
                    self.limit = 0;
                    self.chunks.clear();
                    return Ok(());
                }
                if self.cursor != position + 1 {
                    self.jump();
                    break;
                }
            }
            debug_assert!(chunk.blocks > 0);
            self.chunk_blocks = (2 * self.chunk_blocks).min(REQUEST_BLOCKS_MAX as u64);
        }
        Ok(())
    }

    /// The superblock in force, once both were read, also if the log was refused since. Once [`Found::Done`] was told, it
    /// names as `known_head` what was found to have been durable.
    pub fn superblock(&self) -> Option<&LogSuperblock> {
        self.superblock.as_ref()
    }

    /// The log, once [`Found::Done`] was told.
    pub fn into_log(self) -> WriteLog {
        let mut log = self.log.expect("done");
        log.share_mut().replayed();
        log
    }

    /// Start reading anew at the cursor.
    fn jump(&mut self) {
        self.chunks.clear();
        self.ahead = self.cursor;
    }

    fn choose(&mut self) -> Result<(), OpenError> {
        let blocks = core::mem::take(&mut self.chunks);
        let copies: Vec<&[u8]> = blocks
            .iter()
            .filter_map(|chunk| Some(&chunk.data.as_ref()?[..]))
            .collect();
        self.superblock_tries += 1;
        self.may_be_older = !superblocks_hold(&copies);
        if self.superblock_tries < LOG_READ_TRIES_MAX && self.may_be_older {
            return Ok(());
        }
        LogSuperblock::refuse_newer(&copies).map_err(OpenError::Superblock)?;
        let fitting = copies.iter().map(|block| {
            LogSuperblock::parse(block)
                .and_then(|superblock| self.fits(&superblock).map(|()| superblock))
        });
        let found = LogSuperblock::in_force(fitting).map_err(OpenError::Superblock)?;
        let keys = self.keys.as_deref();
        LogSuperblock::authenticate_all(&copies, self.volume, keys)?;
        let kept = self.kept.filter(|kept| kept.log == found.log);
        if let Some(kept) = kept {
            kept.authenticate(keys).map_err(|_| OpenError::Forged)?;
        }
        let newer = kept.filter(|kept| kept.sequence.get() > found.sequence.get());
        let superblock = newer.unwrap_or(found);
        self.cursor = superblock.tail.get();
        self.ahead = self.cursor;
        self.limit = superblock.tail.get() + superblock.ring_blocks.get();
        self.chain = superblock.tail_chain.get();
        self.named_ahead = superblock.named_ahead();
        self.known_head = superblock.known_head.get();
        if superblock.clean_head.get() != u64::MAX {
            self.known_head = self.known_head.max(superblock.clean_head.get());
        }
        let mut log = WriteLog::new(superblock, self.keys.clone());
        if let Some(budget) = &self.budget {
            *log.share_mut() = Share::new(budget, LOG_INDEX_BYTES_LEAST);
        }
        if let Some(bytes) = self.prepared {
            log.found_prepared(bytes);
        }
        self.log = Some(log);
        self.superblock = Some(superblock);
        Ok(())
    }

    fn fits(&self, superblock: &LogSuperblock) -> Result<(), FormatError> {
        if superblock.volume != self.volume {
            return Err(FormatError::Identity);
        }
        let holds = superblock.holds.get();
        if holds != LOG_HOLDS_VOLUME {
            return Err(FormatError::Holds { found: holds });
        }
        if superblock.ring_blocks.get() + LOG_HEADER_BLOCKS > self.region_blocks {
            return Err(FormatError::Field("ring_blocks"));
        }
        Ok(())
    }

    /// No span lies at or after this position: it would cover the first one.
    fn end_of_ring(&self) -> u64 {
        let log = self.log.as_ref().expect("superblock chosen");
        log.tail() + log.ring_blocks()
    }

    fn chosen(&self) -> &LogSuperblock {
        self.superblock
            .as_ref()
            .expect("chosen before any block is parsed")
    }

    /// Parse the block at the cursor and move the cursor. Returns whether the log is whole.
    fn block(
        &mut self,
        now: Nanos,
        block: &[u8],
        found: &mut impl FnMut(&WriteLog, Found),
    ) -> Result<bool, OpenError> {
        match self.mode {
            Mode::Span { end } => {
                if !self.is_next(block) {
                    self.not_a_span(self.cursor, end, Seen::block(block));
                    return Ok(false);
                }
                self.control.clear();
                self.mode = Mode::Control { end };
                self.block(now, block, found)
            }
            Mode::Control { end } => {
                self.control.extend_from_slice(block);
                self.cursor += 1;
                let header = self.header();
                if self.control.len() < usize::from(header.control_blocks.get()) * BLOCK_BYTES {
                    return Ok(false);
                }
                let position = header.position.get();
                if SpanHeader::verify(&self.control).is_err() {
                    self.not_a_span(position, end, Seen::control(&self.control));
                    return Ok(false);
                }
                entries_are_known(&self.control)?;
                if !entries_fit(&self.control) {
                    self.not_a_span(position, end, Seen::control(&self.control));
                    return Ok(false);
                }
                if header.data_blocks.get() == 0 {
                    return Ok(self.accept(now, found));
                }
                self.checksums = stored_checksums(&self.control, &header);
                self.mode = Mode::Data { end, index: 0 };
                Ok(false)
            }
            Mode::Data { end, index } => {
                let is_bad = block_checksum(block) != self.checksums[index];
                if let Some(salvage) = self.salvage.as_mut().filter(|_| is_bad) {
                    salvage.now.insert(self.cursor);
                } else if is_bad {
                    let position = self.header().position.get();
                    self.not_a_span(position, end, Seen::data(index, block));
                    return Ok(false);
                }
                self.cursor += 1;
                self.mode = Mode::Data {
                    end,
                    index: index + 1,
                };
                if index + 1 < self.checksums.len() || self.salvages_on() {
                    return Ok(false);
                }
                Ok(self.accept(now, found))
            }
            Mode::Evidence { end } => {
                if self.look_again(block)? {
                    return Ok(self.accept_next(now, found));
                }
                if self.may_prove(block) {
                    self.control.clear();
                    self.mode = Mode::EvidenceControl { end };
                    return self.evidence_control(block, end);
                }
                self.cursor += 1;
                self.evidence_ends(end)
            }
            Mode::EvidenceControl { end } => {
                if self.look_again(block)? {
                    return Ok(self.accept_next(now, found));
                }
                self.evidence_control(block, end)
            }
        }
    }

    /// One more block of the control part of a possible proof.
    fn evidence_control(&mut self, block: &[u8], end: u64) -> Result<bool, OpenError> {
        self.control.extend_from_slice(block);
        self.cursor += 1;
        let header = self.header();
        if self.control.len() < usize::from(header.control_blocks.get()) * BLOCK_BYTES {
            return self.evidence_ends(end);
        }
        let incarnation = self.chosen().incarnation.get();
        if SpanHeader::verify(&self.control).is_ok() {
            self.known_head = self.known_head.max(header.durable.get());
            self.looks.newer |= header.incarnation.get() > incarnation;
            if header.durable.get() > end || self.looks.newer {
                return self.judge(end, true);
            }
        }
        self.mode = Mode::Evidence { end };
        self.evidence_ends(end)
    }

    /// Look once more for a span at the places where there was none, with the block at the cursor. Returns whether
    /// there is one, which ends with this block.
    fn look_again(&mut self, block: &[u8]) -> Result<bool, OpenError> {
        let cursor = self.cursor;
        if self.looks.is_place(cursor) {
            if !self.is_next(block) {
                self.looks.next = None;
                self.looks.note_second(cursor, Seen::block(block));
                return Ok(false);
            }
            self.looks.next = Some(Next {
                position: cursor,
                control: Vec::new(),
                checksums: None,
                data_blocks: 0,
            });
        }
        let Some(mut next) = self.looks.next.take() else {
            return Ok(false);
        };
        if let Some(checksums) = &next.checksums {
            let index = next.data_blocks;
            if block_checksum(block) != checksums[index] {
                (self.looks).note_second(next.position, Seen::data(index, block));
                return Ok(false);
            }
            next.data_blocks += 1;
        } else {
            next.control.extend_from_slice(block);
            let header = header_of(&next.control);
            if next.control.len() == usize::from(header.control_blocks.get()) * BLOCK_BYTES {
                let is_whole = SpanHeader::verify(&next.control).is_ok();
                if is_whole {
                    entries_are_known(&next.control)?;
                }
                if !is_whole || !entries_fit(&next.control) {
                    (self.looks).note_second(next.position, Seen::control(&next.control));
                    return Ok(false);
                }
                next.checksums = Some(stored_checksums(&next.control, &header));
            }
        }
        let checksums = next.checksums.as_ref();
        let is_whole = checksums.is_some_and(|checksums| checksums.len() == next.data_blocks);
        self.looks.next = Some(next);
        Ok(is_whole)
    }

    /// Take the span that the second look has found, and go on behind it.
    fn accept_next(&mut self, now: Nanos, found: &mut impl FnMut(&WriteLog, Found)) -> bool {
        let next = self.looks.next.take().expect("it was found whole");
        self.cursor += 1;
        self.control = next.control;
        self.checksums = next.checksums.expect("it was found whole");
        self.limit = self.end_of_ring();
        self.searched_next = None;
        self.accept(now, found)
    }

    fn header(&self) -> SpanHeader {
        header_of(&self.control)
    }

    /// Whether `block` begins the span that follows in the chain.
    fn is_next(&self, block: &[u8]) -> bool {
        let superblock = self.chosen();
        let ring_blocks = superblock.ring_blocks.get();
        SpanHeader::peek(block).is_ok_and(|header| {
            let blocks =
                u64::from(header.control_blocks.get()) + u64::from(header.data_blocks.get());
            header.position.get() == self.cursor
                && header.log == superblock.log
                && !superblock.voids(self.cursor, header.incarnation.get())
                && header.chain.get() == self.chain
                && (self.incarnation..=superblock.incarnation.get())
                    .contains(&header.incarnation.get())
                && self.cursor % ring_blocks + blocks <= ring_blocks
                && self.cursor + blocks <= self.end_of_ring()
        })
    }

    /// Whether `block` may begin a span of this log that was written at or after the cursor; also
    /// one of a later lap, which a superblock older than the device's last one would miss.
    fn may_prove(&self, block: &[u8]) -> bool {
        let superblock = self.chosen();
        SpanHeader::peek(block).is_ok_and(|header| {
            let position = header.position.get();
            header.log == superblock.log
                && !superblock.voids(position, header.incarnation.get())
                && (superblock.proves(position)
                    || header.incarnation.get() > superblock.incarnation.get())
                && position >= self.cursor
                && (position - self.cursor).is_multiple_of(superblock.ring_blocks.get())
        })
    }

    /// All data of a span was read. If it is one that is damaged, and this may not be all that can be saved of it, it
    /// is read again.
    fn salvages_on(&mut self) -> bool {
        let Some(salvage) = &mut self.salvage else {
            return false;
        };
        let now = core::mem::take(&mut salvage.now);
        if salvage.passes == 0 {
            salvage.bad = now;
        } else {
            salvage.bad.retain(|position| now.contains(position));
        }
        salvage.passes += 1;
        if salvage.bad.is_empty() || salvage.passes >= LOG_READ_TRIES_MAX {
            return false;
        }
        self.cursor = salvage.position;
        self.mode = Mode::Span { end: None };
        true
    }

    /// The log is whole, but for what it has lost. If that cannot be recorded, nothing is forgotten: it refuses to open.
    fn settle(&mut self) -> Result<&WriteLog, OpenError> {
        let log = self.log.as_mut().expect("superblock chosen");
        let (ranges, position) = (log.superblocks().lost().count(), log.head());
        if position < self.known_head {
            return Err(OpenError::CorruptLog { position });
        }
        if ranges > LOST_RANGES_MAX {
            return Err(OpenError::LostTooMuch { ranges });
        }
        log.know_head(self.known_head);
        if let Some(superblock) = &mut self.superblock {
            superblock.known_head = U64::new(self.known_head);
        }
        Ok(log)
    }

    fn accept(&mut self, now: Nanos, found: &mut impl FnMut(&WriteLog, Found)) -> bool {
        let header = self.header();
        let data_position = header.position.get() + u64::from(header.control_blocks.get());
        let bad = self
            .salvage
            .take()
            .map_or_else(BTreeSet::new, |salvage| salvage.bad);
        let log = self.log.as_mut().expect("superblock chosen");
        found(log, Found::Span(span_found(&header, log.head(), bad.len())));
        for entry in entries(&self.control, &header) {
            if entry.kind == EntryKind::Record.code() {
                let record = Record {
                    span: header.position.get(),
                    position: data_position + u64::from(entry.data_block.get()),
                    offset: entry.stored_offset.get(),
                    bytes: entry.sectors.get(),
                };
                found(log, Found::Record(record));
            }
        }
        self.known_head = self.known_head.max(header.durable.get());
        let sequences = log.replay_span(
            now,
            &header,
            entries(&self.control, &header),
            &self.checksums,
            &bad,
        );
        found(log, Found::Entries(sequences));
        // The first one may begin with a lap, and so may have left room for later ones.
        self.limit = self.end_of_ring();
        self.checksums.clear();
        self.chain = header.checksum.get();
        self.named_ahead = header.ahead.get();
        self.incarnation = header.incarnation.get();
        self.mode = Mode::Span { end: None };
        self.looks = Looks::default();
        self.cursor == self.limit
    }

    /// No valid span begins at `position`: try the next lap, then take the end for the end.
    fn not_a_span(&mut self, position: u64, end: Option<u64>, seen: Seen) {
        self.checksums.clear();
        self.salvages_failed += u8::from(self.salvage.take().is_some());
        self.looks.note_first(position, seen);
        let ring_blocks = self.chosen().ring_blocks.get();
        let lap = position.next_multiple_of(ring_blocks);
        if end.is_none() && lap != position && lap < self.limit {
            self.cursor = lap;
            self.mode = Mode::Span {
                end: Some(position),
            };
            return;
        }
        let end = end.unwrap_or(position);
        let clean_head = self.chosen().clean_head.get();
        // Behind the end of a log that was closed nothing was written before another superblock.
        self.looks.more = clean_head != u64::MAX && clean_head < end;
        self.mode = Mode::Evidence { end };
        self.cursor = end;
        // A later lap covers the tail first, so where a span is found there, it covers nothing behind; unless a crash has
        // torn it.
        let may_be_covered = self.may_be_older || end == self.chosen().tail.get();
        let search = blocks_to_search(self.named_ahead, end, ring_blocks, may_be_covered);
        let lap = end.next_multiple_of(ring_blocks);
        let goes_on = search.next_lap > 0 && lap != end;
        self.searched_next = goes_on.then(|| lap..lap + search.next_lap);
        let behind = end + search.behind;
        let behind = if goes_on { behind.min(lap) } else { behind };
        self.limit = self.limit.min(behind);
    }

    fn evidence_ends(&mut self, end: u64) -> Result<bool, OpenError> {
        if self.cursor < self.limit {
            return Ok(false);
        }
        if let Some(searched) = self.searched_next.take() {
            // What begins before the gap does not go on behind it.
            self.looks.next = None;
            self.mode = Mode::Evidence { end };
            (self.cursor, self.limit) = (searched.start, searched.end);
            return Ok(false);
        }
        let more = self.looks.more || end < self.known_head;
        self.judge(end, more)
    }

    /// Everything was looked at twice: the end at `end` is the end, or it is not, if that is `proven`. Then a span
    /// whose control part holds is read for what is good in it; without one it is not known what is lost.
    fn judge(&mut self, end: u64, proven: bool) -> Result<bool, OpenError> {
        self.searched_next = None;
        let damaged = self.looks.damaged();
        if self.looks.again(proven) {
            self.cursor = end;
            self.limit = self.end_of_ring();
            self.mode = Mode::Span { end: None };
            return Ok(false);
        }
        if !proven {
            return Ok(true);
        }
        let is_followed = self.salvages_failed < LOG_READ_TRIES_MAX;
        let Some(position) = damaged.filter(|_| is_followed) else {
            return Err(OpenError::CorruptLog { position: end });
        };
        self.salvage = Some(Salvage {
            position,
            passes: 0,
            bad: BTreeSet::new(),
            now: BTreeSet::new(),
        });
        self.looks = Looks::default();
        self.cursor = position;
        self.limit = self.end_of_ring();
        self.mode = Mode::Span { end: None };
        Ok(false)
    }
}

/// Whether what was read of the superblocks holds: each is valid in its place, or was never written. If not, they are
/// to be read again, [`LOG_READ_TRIES_MAX`] times in all.
pub fn superblocks_hold(copies: &[&[u8]]) -> bool {
    let sequence = |copy| LogSuperblock::parse(copy).map(|found| found.sequence.get());
    let is_first = copies.iter().any(|copy| sequence(copy) == Ok(0));
    (0..).zip(copies).all(|(index, copy)| match sequence(copy) {
        Ok(sequence) => sequence % LOG_SUPERBLOCKS == index,
        Err(_) => is_first && copy.iter().all(|&byte| byte == 0),
    })
}

fn header_of(control: &[u8]) -> SpanHeader {
    let (header, _) = SpanHeader::read_from_prefix(control).expect("a control part has a header");
    header
}

/// The span with this header, which counts, behind a log that ends at `start`.
fn span_found(header: &SpanHeader, start: u64, damaged_blocks: usize) -> SpanFound {
    SpanFound {
        start,
        chain: header.chain.get(),
        position: header.position.get(),
        blocks: u32::from(header.control_blocks.get()) + u32::from(header.data_blocks.get()),
        checksum: header.checksum.get(),
        incarnation: header.incarnation.get(),
        durable: header.durable.get(),
        damaged_blocks: damaged_blocks as u32,
    }
}

/// What nobody here can unpack or read is no reason to forget it.
fn entries_are_known(control: &[u8]) -> Result<(), OpenError> {
    let header = header_of(control);
    let position = header.position.get();
    for entry in entries(control, &header) {
        let SpanEntry { kind, method, .. } = *entry;
        if EntryKind::from_code(kind).is_none() {
            return Err(OpenError::Kind { position, kind });
        }
        if method != 0 && Method::of_number(method).is_none() {
            return Err(OpenError::Method { position, method });
        }
    }
    Ok(())
}

/// Whether every entry of the control part is within bounds.
fn entries_fit(control: &[u8]) -> bool {
    let header = header_of(control);
    let data_blocks = u64::from(header.data_blocks.get());
    entries(control, &header)
        .iter()
        .enumerate()
        .all(|(index, entry)| {
            let range = SectorRange::new(entry.start.get(), entry.sectors.get());
            let in_volume = range
                .start
                .checked_add(range.count)
                .is_some_and(|end| end <= VOLUME_BYTES_MAX / SECTOR_BYTES as u64);
            match EntryKind::from_code(entry.kind) {
                Some(EntryKind::SyncPoint) => index == 0,
                Some(EntryKind::Record) => record_fits(entry, data_blocks),
                Some(EntryKind::Write) if entry.method != 0 => {
                    in_volume && !range.is_empty() && packed_fits(entry, range, data_blocks)
                }
                Some(EntryKind::Write) => {
                    in_volume
                        && !range.is_empty()
                        && range.count <= data_blocks * BLOCK_SECTORS
                        && u64::from(entry.data_block.get()) + range.block_count() <= data_blocks
                }
                Some(_) => in_volume && !range.is_empty(),
                None => false,
            }
        })
}

/// Whether a record is within bounds.
fn record_fits(entry: &SpanEntry, data_blocks: u64) -> bool {
    let block_bytes = BLOCK_BYTES as u64;
    let offset = u64::from(entry.stored_offset.get());
    let start = u64::from(entry.data_block.get()) * block_bytes + offset;
    let end = start.checked_add(entry.sectors.get());
    entry.method == 0
        && offset < block_bytes
        && end.is_some_and(|end| end <= data_blocks * block_bytes)
}

/// Whether a compressed entry is within bounds.
fn packed_fits(entry: &SpanEntry, range: SectorRange, data_blocks: u64) -> bool {
    let pieces_max = (LOG_PIECE_BYTES_MAX / BLOCK_BYTES) as u64;
    Stored::of(entry).is_some_and(|stored| {
        range.count <= pieces_max * BLOCK_SECTORS
            && range.block_count() <= pieces_max
            && stored.bytes > 0
            && usize::from(stored.offset) < BLOCK_BYTES
            && u64::from(entry.data_block.get()) + stored.block_count() <= data_blocks
    })
}

/// The entries of a control part whose counts were checked.
pub fn entries<'a>(control: &'a [u8], header: &SpanHeader) -> &'a [SpanEntry] {
    let count = usize::from(header.entries.get());
    let bytes = &control[size_of::<SpanHeader>()..];
    <[SpanEntry]>::ref_from_bytes(&bytes[..count * size_of::<SpanEntry>()])
        .expect("entries have no alignment")
}

/// The data checksums of a control part whose counts were checked.
pub(crate) fn stored_checksums(control: &[u8], header: &SpanHeader) -> Vec<u32> {
    let start = SpanHeader::control_bytes(usize::from(header.entries.get()), 0);
    control[start..][..usize::from(header.data_blocks.get()) * 4]
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four bytes")))
        .collect()
}
