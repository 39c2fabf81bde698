//! Reads: the dirty index, the read cache, fetches from the backend.
//!
//! A read is cut into pieces. What memory holds is copied at once; each other piece becomes an
//! action, and the reply follows the last one. A read with a piece for which there was no buffer starts over
//! later. One at a time, the *keeper*, does not: it keeps what has arrived and goes on with what is missing,
//! until its reply. Since a block of a compressed entry takes a buffer for all of it, there may never be memory
//! for all pieces at once.
//!
//! Under persist-on-write nothing is shown that is not durable yet. A read takes what is there when it comes,
//! and its reply waits until that is durable. It never looks again: a block that is rewritten all the time
//! always has a newer version that is not durable.
//!
//! A *fetch* reads whole cache lines from the backend. Reads that miss the same line share one. A
//! fetch that overlaps a retired generation is *stale*: it still serves those who came before, but
//! nobody may join it and it does not fill the cache.

mod narrow;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use slab::Slab;

use super::compression::Packed;
use super::op::Op;
use super::port::{GivenUp, Kind};
use super::promotion::Promotion;
use super::{Context, Policy, Volume, VolumeConfig, scrub};
use crate::base::buf::{Buf, BufMut, Pool};
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, Nanos, Reply, RequestId, SectorRange};
use crate::base::limits::{
    BLOCK_BYTES, BLOCK_SECTORS, LOG_READ_TRIES_MAX, SECTOR_BYTES, STEP_WORK_MAX,
};
use crate::cache::read_counts::ReadCounts;
use crate::cache::{Lookup, SsdRead, SsdTaken, Tier};
use crate::format::EntryKind;
use crate::log::extent_index::Sequence;
use crate::volume::streams::{StreamConfig, StreamDetector};

/// Largest fetch in blocks: large enough for a sequential stream, small enough to find a buffer.
pub(super) const FETCH_BLOCKS_MAX: u64 = 64;

/// A read under way.
#[derive(Debug)]
struct Read {
    id: RequestId,
    range: SectorRange,
    fill: Fill,
    buf: BufMut,
    pending: usize,
    /// Answered once every entry before this sequence is durable.
    until: Sequence,
    error: Option<RequestError>,
    /// Pieces that found no buffer.
    missing: Vec<SectorRange>,
}

/// Where fetched blocks are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fill {
    /// Both tiers: they were asked for, and are taken for used.
    Both,
    /// DRAM, and the SSD tier as far as they were read often enough.
    ByUse,
    /// DRAM alone: a long stream will read them once, soon.
    Dram,
    /// Nowhere: a long stream has read them.
    Nowhere,
}

/// A backend read of whole blocks.
#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) first_block: u64,
    pub(super) blocks: u64,
    stale: bool,
    pub(super) fill: Fill,
    waiters: Vec<(usize, SectorRange)>,
    promotion: Option<usize>,
}

/// The read side of a volume.
#[derive(Debug)]
pub(super) struct Reads {
    active: Slab<Read>,
    pub(super) fetches: Slab<Fetch>,
    /// Fetches by their first block; a stale one may have been replaced.
    by_block: BTreeMap<u64, usize>,
    pub(super) promotions: Slab<Promotion>,
    /// Blocks that promotions may look at until the next poll.
    pub(super) looks_left: usize,
    /// The promotion that was the first to go on at the last poll.
    pub(super) promoted_last: usize,
    streams: StreamDetector,
    /// How often lines were read, if that decides where they go.
    counts: Option<ReadCounts>,
    /// Reads that have everything, some of which is not durable yet.
    undurable: VecDeque<Read>,
    /// Reads that found no buffer.
    starved: VecDeque<(RequestId, SectorRange, Fill)>,
    /// The read that keeps what has arrived. No other one takes its place before its reply: two that did so in
    /// turn would never end.
    keeper: Option<RequestId>,
    /// The keeper, while it waits for memory.
    kept: Option<Read>,
}

impl Reads {
    /// Whether a read waits for memory.
    pub(super) fn has_starved(&self) -> bool {
        !self.starved.is_empty() || self.kept.is_some()
    }

    /// Whether a promotion waits for memory, or for room in the cache.
    pub(super) fn has_stalled_promotion(&self) -> bool {
        let mut promotions = self.promotions.iter();
        promotions.any(|(_, promotion)| promotion.fetches == 0)
    }

    pub(super) fn new(config: &VolumeConfig, line_blocks: u64) -> Self {
        Self {
            active: Slab::new(),
            fetches: Slab::new(),
            by_block: BTreeMap::new(),
            promotions: Slab::new(),
            looks_left: STEP_WORK_MAX,
            promoted_last: 0,
            streams: StreamDetector::new(stream_config(config, line_blocks)),
            counts: (config.promote_hits > 1).then(ReadCounts::default),
            undurable: VecDeque::new(),
            starved: VecDeque::new(),
            keeper: None,
            kept: None,
        }
    }
}

fn stream_config(config: &VolumeConfig, line_blocks: u64) -> StreamConfig {
    StreamConfig {
        sequential_cutoff_bytes: config.sequential_cutoff_bytes,
        read_ahead_bytes_max: config.read_ahead_bytes_max,
        volume_bytes: config.bytes,
        line_blocks,
    }
}

/// Where a piece of a read comes from, if not from memory.
enum Source {
    Done,
    Log {
        position: u64,
        packed: Option<Packed>,
    },
}

impl Volume {
    /// The configuration or the size has changed.
    pub(super) fn reconfigure_reads(&mut self, cx: &Context<'_>) {
        let config = stream_config(&self.config, cx.cache.line_blocks());
        self.reads.streams.reconfigure(config);
        if self.config.promote_hits <= 1 {
            self.reads.counts = None;
        } else if self.reads.counts.is_none() {
            self.reads.counts = Some(ReadCounts::default());
        }
    }

    /// The size has changed: what is being fetched may end before the new end of its last block, or
    /// lie beyond it. Nobody joins it, and it is not kept.
    pub(super) fn forget_fetches(&mut self) {
        for (_, fetch) in &mut self.reads.fetches {
            fetch.stale = true;
        }
        self.reads.by_block.clear();
    }

    /// A read that has just come.
    pub(super) fn read(&mut self, id: RequestId, range: SectorRange, cx: &mut Context<'_>) {
        if self.damage.lost().overlaps(range) {
            let kind = Kind::Read(range.bytes() as u64);
            return self.port.reply(id, kind, Err(RequestError::Corrupt), cx);
        }
        let advice = self.reads.streams.observe(range);
        if self.config.policy == Policy::PassThrough {
            return self.start_read(id, range, Fill::Nowhere, cx);
        }
        if let Some(counts) = &mut self.reads.counts {
            let line_blocks = cx.cache.line_blocks();
            let last = range.first_block() + range.block_count().saturating_sub(1);
            (range.first_block() / line_blocks..=last / line_blocks)
                .for_each(|line| counts.add(line));
        }
        self.start_read(
            id,
            range,
            if advice.fill {
                Fill::ByUse
            } else {
                Fill::Nowhere
            },
            cx,
        );
        if let Some(ahead) = advice.read_ahead {
            let fill = if advice.fill { Fill::ByUse } else { Fill::Dram };
            self.read_ahead(ahead, fill, cx);
        }
    }

    /// Fetch what a stream will ask for next, as far as it is not here and memory is plentiful.
    fn read_ahead(&mut self, range: SectorRange, fill: Fill, cx: &mut Context<'_>) {
        let end = (range.first_block() + range.block_count()).min(self.cached.whole_blocks());
        let mut block = range.first_block();
        while block < end && cx.pool.free_bytes() > cx.pool.total_bytes() / 2 {
            if self.cached.probe(block, cx) != Tier::Absent || self.joinable(block).is_some() {
                block += 1;
                continue;
            }
            let run = SectorRange::between(block * BLOCK_SECTORS, end * BLOCK_SECTORS);
            let Some(fetch) = self.begin_fetch(run, fill, None, cx) else {
                return;
            };
            let fetch = &self.reads.fetches[fetch];
            self.port.stats.read_ahead_blocks += fetch.blocks;
            block = fetch.first_block + fetch.blocks;
        }
    }

    fn start_read(&mut self, id: RequestId, range: SectorRange, fill: Fill, cx: &mut Context<'_>) {
        if range.end() > self.sectors() {
            // The volume has become smaller while it waited.
            let kind = Kind::Read(range.bytes() as u64);
            return self.port.reply(id, kind, Err(RequestError::BadRange), cx);
        }
        if range.block_count() == 1 && self.index.is_clear(range) {
            // The common case: one block, from memory, without a copy.
            let block = range.first_block();
            match self.find_cached(block, cx) {
                Lookup::Dram(data) => {
                    self.port.stats.dram_hit_blocks += 1;
                    let start = range.offset_in_block();
                    let data = data.narrow(start..start + range.bytes());
                    let kind = Kind::Read(range.bytes() as u64);
                    return self.port.reply(id, kind, Ok(Reply::Data(data)), cx);
                }
                Lookup::Ssd(mut permission) => {
                    permission.blocks = 1;
                    let Some(read) = self.begin_read(id, range, fill, cx) else {
                        return cx.cache.cancel_ssd_read(permission);
                    };
                    self.read_ssd(read, range, permission, cx);
                    return self.finish_read(read, cx);
                }
                Lookup::Miss => {}
            }
        }
        let Some(read) = self.begin_read(id, range, fill, cx) else {
            return;
        };
        self.read_pieces(read, range, cx);
        self.finish_read(read, cx);
    }

    fn read_pieces(&mut self, read: usize, range: SectorRange, cx: &mut Context<'_>) {
        let pieces: Vec<_> = self.index.pieces(range).collect();
        for (piece, sequence) in pieces {
            match sequence {
                Some(sequence) => self.read_dirty(read, piece, sequence, cx),
                None => self.read_clean(read, piece, cx),
            }
        }
    }

    /// Go on with the read that keeps what has arrived.
    fn retry_kept(&mut self, cx: &mut Context<'_>) {
        let Some(mut state) = self.reads.kept.take() else {
            return;
        };
        if state.range.end() > self.sectors() {
            self.reads.keeper = None;
            let kind = Kind::Read(state.range.bytes() as u64);
            return self
                .port
                .reply(state.id, kind, Err(RequestError::BadRange), cx);
        }
        for &piece in &state.missing {
            state.until = state.until.max(self.undurable_in(piece));
        }
        state.pending = 1;
        let mut missing = core::mem::take(&mut state.missing).into_iter();
        let read = self.reads.active.insert(state);
        while self.reads.active[read].missing.is_empty()
            && let Some(piece) = missing.next()
        {
            self.read_pieces(read, piece, cx);
        }
        self.reads.active[read].missing.extend(missing);
        self.finish_read(read, cx);
    }

    /// A block in the cache, if it is to be looked for there.
    fn find_cached(&self, block: u64, cx: &mut Context<'_>) -> Lookup {
        match self.config.policy {
            Policy::PassThrough => Lookup::Miss,
            _ => self.cached.look_up(block, cx),
        }
    }

    /// The sequence after the last write in `range`, if a read of it may have to wait until that is durable.
    fn undurable_in(&self, range: SectorRange) -> Sequence {
        let durable = self.log.get().durable_sequence();
        if self.shows_undurable() || durable == self.log.get().next_sequence() {
            return 0;
        }
        let last = self.index.overlaps(range).map(|(_, sequence)| sequence + 1);
        last.max().unwrap_or(0)
    }

    /// Whether what is not durable is shown: nobody was promised more, or it will not become durable.
    fn shows_undurable(&self) -> bool {
        self.log.refuses_writes() || !self.is_on_write()
    }

    /// A place for a read's data, or the read waits for memory.
    fn begin_read(
        &mut self,
        id: RequestId,
        range: SectorRange,
        fill: Fill,
        cx: &mut Context<'_>,
    ) -> Option<usize> {
        let Some(buf) = cx.pool.alloc(range.bytes()) else {
            self.reads.starved.push_back((id, range, fill));
            return None;
        };
        let read = Read {
            id,
            range,
            fill,
            buf,
            pending: 1,
            until: self.undurable_in(range),
            error: None,
            missing: Vec::new(),
        };
        Some(self.reads.active.insert(read))
    }

    /// One piece is in place (or the beginning is done); reply after the last.
    fn finish_read(&mut self, read: usize, cx: &mut Context<'_>) {
        let state = &mut self.reads.active[read];
        state.pending -= 1;
        if state.pending > 0 {
            return;
        }
        let state = self.reads.active.remove(read);
        let id = state.id;
        let goes_on = !state.missing.is_empty() && state.error.is_none() && !self.port.is_fenced();
        if goes_on {
            if *self.reads.keeper.get_or_insert(id) == id {
                self.reads.kept = Some(state);
            } else {
                let waiting = (id, state.range, state.fill);
                self.reads.starved.push_back(waiting);
            }
            return;
        }
        self.reads.keeper.take_if(|keeper| *keeper == id);
        let waits = state.error.is_none()
            && state.until > self.log.get().durable_sequence()
            && !self.shows_undurable()
            && !self.port.is_fenced();
        if waits {
            self.reads.undurable.push_back(state);
        } else {
            self.answer_read(state, cx);
        }
    }

    fn answer_read(&mut self, state: Read, cx: &mut Context<'_>) {
        let (id, kind) = (state.id, Kind::Read(state.range.bytes() as u64));
        let result = match state.error {
            _ if self.port.is_fenced() => Err(RequestError::Fenced),
            Some(error) => Err(error),
            None => Ok(Reply::Data(state.buf.freeze())),
        };
        self.port.reply(id, kind, result, cx);
    }

    /// The place of `piece` in the read's data.
    fn place(&mut self, read: usize, piece: SectorRange) -> &mut [u8] {
        let state = &mut self.reads.active[read];
        let start = (piece.start - state.range.start) as usize * SECTOR_BYTES;
        &mut state.buf[start..start + piece.bytes()]
    }

    fn read_dirty(
        &mut self,
        read: usize,
        piece: SectorRange,
        sequence: Sequence,
        cx: &mut Context<'_>,
    ) {
        self.port.stats.log_hit_blocks += piece.block_count();
        let entry = self.log.get().entry(sequence);
        let source = match (&entry.data, entry.kind) {
            (Some(data), _) => {
                let start = (piece.start - entry.range.start) as usize * SECTOR_BYTES;
                let data = data.slice(start..start + piece.bytes());
                self.place(read, piece).copy_from_slice(&data);
                Source::Done
            }
            (None, EntryKind::Write) => Source::Log {
                position: entry.positions(piece).start,
                packed: Packed::of(entry),
            },
            (None, _) => {
                self.place(read, piece).fill(0);
                Source::Done
            }
        };
        if let Source::Log { position, packed } = source {
            if self.health.refuses_for_silent_log(self.config.when_full) {
                // Each read that is given up holds its memory until the device answers.
                self.reads.active[read]
                    .error
                    .get_or_insert(RequestError::Io);
                return;
            }
            let blocks = packed.map_or(piece.block_count(), |packed| packed.stored.block_count());
            let bytes = blocks as usize * BLOCK_BYTES;
            let Some(buf) = cx.pool.alloc(bytes) else {
                self.reads.active[read].missing.push(piece);
                return;
            };
            self.reads.active[read].pending += 1;
            let op = Op::ReadLog {
                read,
                range: piece,
                position,
                packed,
                tries: 0,
            };
            self.log.read(position, op, buf, &mut self.port, cx);
        }
    }

    pub(super) fn log_was_read(
        &mut self,
        read: usize,
        piece: SectorRange,
        (position, packed): (u64, Option<Packed>),
        tries: u8,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let tries = tries + 1;
        match result {
            Ok(Done::Read(data)) => {
                let is_good = self.log.blocks_match(&data, position);
                if !is_good && tries < LOG_READ_TRIES_MAX {
                    let token = self.port.begin(Op::ReadLog {
                        read,
                        range: piece,
                        position,
                        packed,
                        tries,
                    });
                    return self.log.read_again(token, position, data, cx);
                }
                if is_good && self.place_logged(read, piece, packed, &data) {
                    let blocks = (data.len() / BLOCK_BYTES) as u64;
                    self.damage.found_good(&(position..position + blocks));
                } else {
                    self.damage
                        .found_bad(position, &data, self.log.get(), &mut self.port.stats);
                    self.refuse_for_damage(cx);
                    self.reads.active[read].error = Some(RequestError::Corrupt);
                }
            }
            _ => self.reads.active[read].error = Some(RequestError::Io),
        }
        self.log.unpin(position);
        self.finish_read(read, cx);
    }

    /// Put `piece` in its place, out of the blocks that hold it. Returns whether these can be unpacked.
    fn place_logged(
        &mut self,
        read: usize,
        piece: SectorRange,
        packed: Option<Packed>,
        blocks: &[u8],
    ) -> bool {
        let start = (piece.start - self.reads.active[read].range.start) as usize * SECTOR_BYTES;
        let place = &mut self.reads.active[read].buf[start..start + piece.bytes()];
        let Some(packed) = packed else {
            let start = piece.offset_in_block();
            place.copy_from_slice(&blocks[start..start + piece.bytes()]);
            return true;
        };
        let unpacked = self
            .compression
            .unpack(self.config.codec, &packed, piece, blocks);
        unpacked.map(|data| place.copy_from_slice(data)).is_some()
    }

    /// Read a piece that is not dirty: block by block from the cache, what is missing in fetches.
    fn read_clean(&mut self, read: usize, piece: SectorRange, cx: &mut Context<'_>) {
        let mut missing: Option<SectorRange> = None;
        let end = piece.first_block() + piece.block_count();
        let mut next = piece.first_block();
        while next < end {
            let block = next;
            let part = block_range(block).intersect(piece);
            next += 1;
            match self.find_cached(block, cx) {
                Lookup::Dram(data) => {
                    self.port.stats.dram_hit_blocks += 1;
                    let start = part.offset_in_block();
                    let data = &data[start..start + part.bytes()];
                    self.place(read, part).copy_from_slice(data);
                }
                Lookup::Ssd(mut permission) => {
                    // A compressed line is read once for all of its blocks that are wanted.
                    let wanted = permission.blocks.min(end - block);
                    permission.blocks = self.cached.blocks_of_line(block, permission.key, wanted);
                    next = block + permission.blocks;
                    let sectors = permission.blocks * BLOCK_SECTORS;
                    let part = SectorRange::new(block * BLOCK_SECTORS, sectors).intersect(piece);
                    self.read_ssd(read, part, permission, cx);
                }
                Lookup::Miss => {
                    self.port.stats.miss_blocks += 1;
                    missing = match missing {
                        Some(run) if run.end() == part.start => {
                            Some(SectorRange::between(run.start, part.end()))
                        }
                        Some(run) => {
                            self.read_missing(read, run, cx);
                            Some(part)
                        }
                        None => Some(part),
                    };
                }
            }
        }
        if let Some(run) = missing {
            self.read_missing(read, run, cx);
        }
    }

    fn read_ssd(
        &mut self,
        read: usize,
        part: SectorRange,
        permission: SsdRead,
        cx: &mut Context<'_>,
    ) {
        let Some(buf) = cx.pool.alloc(permission.bytes) else {
            self.reads.active[read].missing.push(part);
            return cx.cache.cancel_ssd_read(permission);
        };
        self.reads.active[read].pending += 1;
        let offset = permission.offset;
        let token = self.port.begin(Op::ReadSsd {
            read,
            range: part,
            permission,
        });
        cx.actions.push(Action::CacheRead { token, offset, buf });
    }

    pub(super) fn ssd_was_read(
        &mut self,
        read: usize,
        part: SectorRange,
        permission: SsdRead,
        mut result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let data = match &mut result {
            Ok(Done::Read(data)) => Some(&mut **data),
            _ => None,
        };
        if let Ok(data) = cx.cache.finish_ssd_read(permission, data) {
            self.port.stats.ssd_hit_blocks += part.block_count();
            let start = part.offset_in_block();
            self.place(read, part)
                .copy_from_slice(&data[start..start + part.bytes()]);
        } else {
            // Clean data has another copy: the backend's.
            self.port.stats.cache_corrupt_blocks += part.block_count();
            self.port.stats.miss_blocks += part.block_count();
            self.read_missing(read, part, cx);
        }
        self.finish_read(read, cx);
    }

    /// The cache device has kept a read for too long: take the block from the backend. What the
    /// device brings in the end is not used.
    pub(super) fn give_up_ssd_read(&mut self, key: usize, cx: &mut Context<'_>) {
        let Some(waiting) = self.port.give_up_ssd_read(key) else {
            return;
        };
        cx.cache.ssd_read_is_late();
        let (read, range) = match waiting {
            GivenUp::Read { read, range } => (read, range),
            GivenUp::Scrub(id) => return scrub::answer_done(id, &mut self.port, cx),
        };
        self.port.stats.miss_blocks += range.block_count();
        self.read_missing(read, range, cx);
        self.finish_read(read, cx);
    }

    /// A piece of a read will not come.
    pub(super) fn fail_read(&mut self, read: usize, error: RequestError, cx: &mut Context<'_>) {
        self.reads.active[read].error = Some(error);
        self.finish_read(read, cx);
    }

    /// Refuse the reads of what is not durable; those that still wait for something else, once that is there.
    pub(super) fn refuse_undurable_reads(&mut self, error: RequestError, cx: &mut Context<'_>) {
        let durable = self.log.get().durable_sequence();
        let active = self.reads.active.iter_mut().map(|(_, read)| read);
        for read in active.chain(&mut self.reads.kept) {
            if read.until > durable {
                read.error.get_or_insert(error);
            }
        }
        for Read { id, range, .. } in core::mem::take(&mut self.reads.undurable) {
            self.port
                .reply(id, Kind::Read(range.bytes() as u64), Err(error), cx);
        }
    }

    /// Everything that waits before its first action, and everything under way once it ends, is
    /// refused.
    pub(super) fn refuse_waiting_reads(&mut self, error: RequestError, cx: &mut Context<'_>) {
        self.refuse_undurable_reads(error, cx);
        self.refuse_starved_reads(error, cx);
    }

    /// Refuse the reads that wait for memory.
    pub(super) fn refuse_starved_reads(&mut self, error: RequestError, cx: &mut Context<'_>) {
        if let Some(Read { id, range, .. }) = self.reads.kept.take() {
            self.reads.keeper = None;
            self.port
                .reply(id, Kind::Read(range.bytes() as u64), Err(error), cx);
        }
        for (id, range, _) in core::mem::take(&mut self.reads.starved) {
            self.port
                .reply(id, Kind::Read(range.bytes() as u64), Err(error), cx);
        }
    }

    /// Let `read` have `run` from the backend, through fetches that others may share.
    fn read_missing(&mut self, read: usize, run: SectorRange, cx: &mut Context<'_>) {
        if run.end() > self.sectors() {
            // The volume has become smaller while another copy was tried.
            self.reads.active[read].error = Some(RequestError::BadRange);
            return;
        }
        let mut at = run.start;
        while at < run.end() {
            let rest = SectorRange::between(at, run.end());
            let fetch = match self.joinable(rest.first_block()) {
                Some(fetch) => Some(fetch),
                None => self.begin_fetch(rest, self.reads.active[read].fill, None, cx),
            };
            let Some(fetch) = fetch else {
                self.reads.active[read].missing.push(rest);
                return;
            };
            let fetch = &mut self.reads.fetches[fetch];
            let covered = SectorRange::new(
                fetch.first_block * BLOCK_SECTORS,
                fetch.blocks * BLOCK_SECTORS,
            );
            let part = rest.intersect(covered);
            fetch.waiters.push((read, part));
            self.reads.active[read].pending += 1;
            at = part.end();
        }
    }

    /// A fetch under way that covers `block` and is not stale.
    pub(super) fn joinable(&self, block: u64) -> Option<usize> {
        let (_, &key) = self.reads.by_block.range(..=block).next_back()?;
        let fetch = &self.reads.fetches[key];
        (!fetch.stale && block < fetch.first_block + fetch.blocks).then_some(key)
    }

    /// Fetch at least the first block of `run`, in whole lines, bounded.
    pub(super) fn begin_fetch(
        &mut self,
        run: SectorRange,
        fill: Fill,
        promotion: Option<usize>,
        cx: &mut Context<'_>,
    ) -> Option<usize> {
        if self.port.is_fenced() {
            return None;
        }
        let line = if fill == Fill::Nowhere {
            1
        } else {
            cx.cache.line_blocks()
        };
        let volume_blocks = self.sectors().div_ceil(BLOCK_SECTORS);
        let first_block = run.first_block() / line * line;
        let end = (run.first_block() + run.block_count())
            .next_multiple_of(line)
            .min(first_block + FETCH_BLOCKS_MAX.max(line))
            .min(volume_blocks)
            .min(self.next_fetch_after(run.first_block()));
        let (buf, first_block, blocks) =
            fetch_buffer(cx.pool, first_block, end, run.first_block())?;
        // A fetch before it may reach into the line, if that one was cut short.
        let range = SectorRange::new(first_block * BLOCK_SECTORS, blocks * BLOCK_SECTORS)
            .intersect(SectorRange::new(0, self.sectors()));
        let buf = buf.narrow(0..range.bytes());
        let fetch = self.reads.fetches.insert(Fetch {
            first_block,
            blocks,
            stale: self.direct.is_changing(range),
            fill,
            waiters: Vec::new(),
            promotion,
        });
        self.reads.by_block.insert(first_block, fetch);
        let token = self.port.begin(Op::Fetch { fetch });
        cx.actions.push(Action::BackendRead {
            token,
            offset: range.byte_offset(),
            buf,
        });
        Some(fetch)
    }

    /// First block after `block` that a fetch under way covers, so that fetches do not overlap.
    fn next_fetch_after(&self, block: u64) -> u64 {
        self.reads
            .by_block
            .range(block + 1..)
            .next()
            .map_or(u64::MAX, |(&first, _)| first)
    }

    pub(super) fn fetched(
        &mut self,
        key: usize,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let fetch = self.reads.fetches.remove(key);
        if self.reads.by_block.get(&fetch.first_block) == Some(&key) {
            self.reads.by_block.remove(&fetch.first_block);
        }
        let is_corrupt = matches!(result, Err(IoError::Corrupt));
        let data = if let Ok(Done::Read(data)) = result {
            Some(data.freeze())
        } else {
            None
        };
        self.port.stats.backend_errors += u64::from(data.is_none());
        let whole = SectorRange::new(
            fetch.first_block * BLOCK_SECTORS,
            fetch.blocks * BLOCK_SECTORS,
        );
        for (read, part) in fetch.waiters {
            if let Some(data) = &data {
                let start =
                    (part.start - fetch.first_block * BLOCK_SECTORS) as usize * SECTOR_BYTES;
                self.place(read, part)
                    .copy_from_slice(&data[start..start + part.bytes()]);
            } else if is_corrupt {
                self.read_narrowly(read, part, whole, cx);
            } else {
                self.reads.active[read].error = Some(RequestError::Io);
            }
            self.finish_read(read, cx);
        }
        if fetch.promotion.is_some() {
            cx.cache.end_promise(fetch.blocks);
        }
        let failed = data.is_none();
        if let Some(data) = data.filter(|_| !fetch.stale) {
            let taken = self.fill_cache(fetch.first_block, &data, fetch.fill, cx);
            self.port.stats.ssd_plain_bytes += taken.plain_bytes;
            self.port.stats.ssd_stored_bytes += taken.stored_bytes;
        }
        if let Some(promotion) = fetch.promotion {
            let state = &mut self.reads.promotions[promotion];
            state.fetches -= 1;
            state.failed |= failed;
            if !failed {
                self.return_to_untaken(promotion, fetch.first_block, fetch.blocks, cx);
            }
            self.go_on_promoting(promotion, cx);
        }
    }

    /// An action of a read took so long: what the cache weighs blocks by.
    pub(super) fn note_cost(&self, op: &Op, took: Nanos, cx: &mut Context<'_>) {
        match op {
            Op::ReadSsd { permission, .. } => cx.cache.note_ssd_hit(permission.key, took),
            Op::Fetch { fetch } => {
                let fetch = &self.reads.fetches[*fetch];
                // Nobody has waited for what was read ahead in time, or promoted.
                if fetch.fill != Fill::Nowhere && !fetch.waiters.is_empty() {
                    let key = self.cached.fill_key(fetch.first_block, cx);
                    cx.cache.note_miss(key, fetch.blocks, took);
                }
            }
            _ => {}
        }
    }

    /// Keep what was fetched; a last partial block of the volume is not cached. Returns what the SSD tier took.
    fn fill_cache(
        &self,
        first_block: u64,
        data: &Buf,
        fill: Fill,
        cx: &mut Context<'_>,
    ) -> SsdTaken {
        let whole = data.len() / BLOCK_BYTES * BLOCK_BYTES;
        if whole == 0 || fill == Fill::Nowhere {
            return SsdTaken::default();
        }
        let data = data.slice(0..whole);
        let range = SectorRange::new(
            first_block * BLOCK_SECTORS,
            (data.len() / SECTOR_BYTES) as u64,
        );
        let fill = match fill {
            // The SSD tier would keep what the backend may lose.
            Fill::Both | Fill::ByUse if self.direct.is_unflushed(range) => Fill::Dram,
            Fill::ByUse if !self.cached.is_worth_taking(first_block, cx) => Fill::Dram,
            other => other,
        };
        match (fill, &self.reads.counts) {
            (Fill::ByUse, Some(counts)) => self.fill_by_use(first_block, &data, counts, cx),
            (fill, _) => {
                let method = self.config.compression;
                self.cached.fill(first_block, &data, fill, method, cx)
            }
        }
    }

    /// Keep each line where its reads of late have earned it a place.
    fn fill_by_use(
        &self,
        first_block: u64,
        data: &Buf,
        counts: &ReadCounts,
        cx: &mut Context<'_>,
    ) -> SsdTaken {
        let mut taken = SsdTaken::default();
        let method = self.config.compression;
        let line_blocks = cx.cache.line_blocks();
        let end = first_block + (data.len() / BLOCK_BYTES) as u64;
        let mut block = first_block;
        while block < end {
            let line = block / line_blocks;
            let next = end.min((line + 1) * line_blocks);
            let bytes = |block: u64| (block - first_block) as usize * BLOCK_BYTES;
            let part = data.slice(bytes(block)..bytes(next));
            let is_used = counts.count(line) >= self.config.promote_hits;
            let fill = if is_used { Fill::ByUse } else { Fill::Dram };
            taken += self.cached.fill(block, &part, fill, method, cx);
            block = next;
        }
        taken
    }

    /// The backend's content of `range` has changed: fetches that overlap it are stale.
    pub(super) fn mark_fetches_stale(&mut self, range: SectorRange) {
        for (_, fetch) in &mut self.reads.fetches {
            let covered = SectorRange::new(
                fetch.first_block * BLOCK_SECTORS,
                fetch.blocks * BLOCK_SECTORS,
            );
            fetch.stale |= covered.overlaps(range);
        }
        self.filling.note_forgotten(range, self.port.now);
    }

    pub(super) fn wake_durable_reads(&mut self, durable: Sequence, cx: &mut Context<'_>) {
        for _ in 0..self.reads.undurable.len() {
            let read = self.reads.undurable.pop_front().expect("counted");
            if read.until <= durable {
                self.answer_read(read, cx);
            } else {
                self.reads.undurable.push_back(read);
            }
        }
    }

    /// Try again what found no buffer, and what waits for durability no longer.
    pub(super) fn retry_reads(&mut self, cx: &mut Context<'_>) {
        if !self.is_on_write() && !self.reads.undurable.is_empty() {
            self.wake_durable_reads(Sequence::MAX, cx);
        }
        self.retry_kept(cx);
        for _ in 0..self.reads.starved.len() {
            let (id, range, fill) = self.reads.starved.pop_front().expect("counted");
            if cx.pool.free_bytes() < 2 * range.bytes() {
                self.reads.starved.push_front((id, range, fill));
                break;
            }
            self.start_read(id, range, fill, cx);
        }
        self.go_on_with_stalled(cx);
    }
}

/// The sectors of one block.
pub(super) fn block_range(block: u64) -> SectorRange {
    SectorRange::new(block * BLOCK_SECTORS, BLOCK_SECTORS)
}

/// A buffer for the blocks from `first` to `end`, or for fewer from `wanted` on while memory is
/// short.
fn fetch_buffer(pool: &Pool, first: u64, end: u64, wanted: u64) -> Option<(BufMut, u64, u64)> {
    let mut blocks = end - first;
    while first + blocks > wanted && blocks > 0 {
        if let Some(buf) = pool.alloc(blocks as usize * BLOCK_BYTES) {
            return Some((buf, first, blocks));
        }
        blocks /= 2;
    }
    pool.alloc(BLOCK_BYTES).map(|buf| (buf, wanted, 1))
}

/// Whether a read-only view of destaged data may be kept: all of one block.
pub(super) fn whole_blocks_of(range: SectorRange) -> core::ops::Range<u64> {
    range.start.div_ceil(BLOCK_SECTORS)..range.end() / BLOCK_SECTORS
}

/// The bytes of one block within the data of an entry that covers it.
pub(super) fn block_of(data: &Buf, range: SectorRange, block: u64) -> Buf {
    let start = (block * BLOCK_SECTORS - range.start) as usize * SECTOR_BYTES;
    data.slice(start..start + BLOCK_BYTES)
}
