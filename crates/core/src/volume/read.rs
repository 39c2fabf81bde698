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
//! The parts: `fetches` (reads of the backend, and where their data is kept), `narrow` (reads of the backend once more),
//! `promotion`.

mod fetches;
mod narrow;
mod promotion;
mod sources;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use promotion::Promotion;
use slab::Slab;
pub(super) use sources::ReadSources;

use super::compression::Packed;
use super::op::Op;
use super::port::{GivenUp, Kind, Port};
use super::{Context, Policy, VolumeConfig, scrub};
use crate::base::buf::{Buf, BufMut};
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, Reply, RequestId, SectorRange};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES, STEP_WORK_MAX};
use crate::cache::read_counts::ReadCounts;
use crate::cache::{Lookup, SsdRead, Tier};
use crate::format::EntryKind;
use crate::log::extent_index::Sequence;
use crate::volume::streams::{StreamConfig, StreamDetector};

/// Largest fetch in blocks: large enough for a sequential stream, small enough to find a buffer.
const FETCH_BLOCKS_MAX: u64 = 64;

/// Why a read that is not at the cache device as a whole has a place for its data.
const HAS_PLACE: &str = "a read whose buffer was lost with the device begins anew";

/// A read under way.
#[derive(Debug)]
struct Read {
    id: RequestId,
    range: SectorRange,
    fill: Fill,
    /// The place for its data; none while the cache device reads all of it into that.
    buf: Option<BufMut>,
    pending: usize,
    /// Answered once every entry before this sequence is durable.
    until: Sequence,
    error: Option<RequestError>,
    /// Pieces that found no buffer.
    missing: Vec<SectorRange>,
}

impl Read {
    /// Everything is in place, or will not come.
    fn answer(self, port: &mut Port, cx: &mut Context<'_>) {
        let (id, kind) = (self.id, Kind::Read(self.range.bytes() as u64));
        let result = match self.error {
            _ if port.is_fenced() => Err(RequestError::Fenced),
            Some(error) => Err(error),
            None => Ok(Reply::Data(self.buf.expect(HAS_PLACE).freeze())),
        };
        port.reply(id, kind, result, cx);
    }
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
struct Fetch {
    first_block: u64,
    blocks: u64,
    stale: bool,
    fill: Fill,
    waiters: Vec<(usize, SectorRange)>,
    promotion: Option<usize>,
}

/// The read side of a volume: see the module.
#[derive(Debug)]
pub(super) struct Reads {
    active: Slab<Read>,
    fetches: Slab<Fetch>,
    /// Fetches by their first block; a stale one may have been replaced.
    by_block: BTreeMap<u64, usize>,
    promotions: Slab<Promotion>,
    /// Blocks that promotions may look at until the next poll.
    looks_left: usize,
    /// The promotion that was the first to go on at the last poll.
    promoted_last: usize,
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
    /// Fetches under way.
    pub(super) fn fetches_under_way(&self) -> usize {
        self.fetches.len()
    }

    /// A poll begins. Returns whether something waits that may go on.
    pub(super) fn begin_turn(&mut self) -> bool {
        let is_stalled = self.begin_turn_of_promotions();
        is_stalled || !self.undurable.is_empty() || self.has_starved()
    }

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

impl Reads {
    /// The configuration or the size has changed.
    pub(super) fn reconfigure(&mut self, config: &VolumeConfig, cx: &Context<'_>) {
        let streams = stream_config(config, cx.cache.line_blocks());
        self.streams.reconfigure(streams);
        if config.promote_hits <= 1 {
            self.counts = None;
        } else if self.counts.is_none() {
            self.counts = Some(ReadCounts::default());
        }
    }

    /// A read that has just come.
    pub(super) fn read(
        &mut self,
        id: RequestId,
        range: SectorRange,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if from.lost.overlaps(range) {
            let kind = Kind::Read(range.bytes() as u64);
            return from.port.reply(id, kind, Err(RequestError::Corrupt), cx);
        }
        let advice = self.streams.observe(range);
        if from.config.policy == Policy::PassThrough {
            return self.start_read(id, range, Fill::Nowhere, from, cx);
        }
        if let Some(counts) = &mut self.counts {
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
            from,
            cx,
        );
        if let Some(ahead) = advice.read_ahead {
            let fill = if advice.fill { Fill::ByUse } else { Fill::Dram };
            self.read_ahead(ahead, fill, from, cx);
        }
    }

    /// Fetch what a stream will ask for next, as far as it is not here and memory is plentiful.
    fn read_ahead(
        &mut self,
        range: SectorRange,
        fill: Fill,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let end = (range.first_block() + range.block_count()).min(from.cached.whole_blocks());
        let mut block = range.first_block();
        while block < end && cx.pool.free_bytes() > cx.pool.total_bytes() / 2 {
            if from.cached.probe(block, cx) != Tier::Absent || self.joinable(block).is_some() {
                block += 1;
                continue;
            }
            let run = SectorRange::between(block * BLOCK_SECTORS, end * BLOCK_SECTORS);
            let Some(fetch) = self.begin_fetch(run, fill, None, from, cx) else {
                return;
            };
            let fetch = &self.fetches[fetch];
            from.port.stats.read_ahead_blocks += fetch.blocks;
            block = fetch.first_block + fetch.blocks;
        }
    }

    fn start_read(
        &mut self,
        id: RequestId,
        range: SectorRange,
        fill: Fill,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if range.end() > from.sectors() {
            // The volume has become smaller while it waited.
            let kind = Kind::Read(range.bytes() as u64);
            return from.port.reply(id, kind, Err(RequestError::BadRange), cx);
        }
        if range.block_count() == 1 && from.index.is_clear(range) {
            // The common case: one block, from memory, without a copy.
            let block = range.first_block();
            match from.find_cached(block, cx) {
                Lookup::Dram(data) => {
                    from.port.stats.dram_hit_blocks += 1;
                    let start = range.offset_in_block();
                    let data = data.narrow(start..start + range.bytes());
                    let kind = Kind::Read(range.bytes() as u64);
                    return from.port.reply(id, kind, Ok(Reply::Data(data)), cx);
                }
                Lookup::Ssd(mut permission) => {
                    permission.take(1);
                    let Some(read) = self.begin_read(id, range, fill, from, cx) else {
                        return cx.cache.cancel_ssd_read(permission);
                    };
                    self.read_ssd(read, range, permission, from, cx);
                    return self.finish_read(read, from, cx);
                }
                Lookup::Miss => {
                    let Some(read) = self.begin_read(id, range, fill, from, cx) else {
                        return;
                    };
                    from.port.stats.miss_blocks += 1;
                    self.read_missing(read, range, from, cx);
                    return self.finish_read(read, from, cx);
                }
            }
        }
        let Some(read) = self.begin_read(id, range, fill, from, cx) else {
            return;
        };
        self.read_pieces(read, range, from, cx);
        self.finish_read(read, from, cx);
    }

    fn read_pieces(
        &mut self,
        read: usize,
        range: SectorRange,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let pieces: Vec<_> = from.index.pieces(range).collect();
        for (piece, sequence) in pieces {
            match sequence {
                Some(sequence) => self.read_dirty(read, piece, sequence, from, cx),
                None => self.read_clean(read, piece, from, cx),
            }
        }
    }

    /// Go on with the read that keeps what has arrived.
    fn retry_kept(&mut self, from: &mut ReadSources<'_>, cx: &mut Context<'_>) {
        let Some(mut state) = self.kept.take() else {
            return;
        };
        if state.range.end() > from.sectors() {
            self.keeper = None;
            let kind = Kind::Read(state.range.bytes() as u64);
            return from
                .port
                .reply(state.id, kind, Err(RequestError::BadRange), cx);
        }
        for &piece in &state.missing {
            state.until = state.until.max(from.undurable_in(piece));
        }
        state.pending = 1;
        let mut missing = core::mem::take(&mut state.missing).into_iter();
        let read = self.active.insert(state);
        while self.active[read].missing.is_empty()
            && let Some(piece) = missing.next()
        {
            self.read_pieces(read, piece, from, cx);
        }
        self.active[read].missing.extend(missing);
        self.finish_read(read, from, cx);
    }

    /// A place for a read's data, or the read waits for memory.
    fn begin_read(
        &mut self,
        id: RequestId,
        range: SectorRange,
        fill: Fill,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) -> Option<usize> {
        let Some(buf) = cx.pool.alloc(range.bytes()) else {
            self.starved.push_back((id, range, fill));
            return None;
        };
        let read = Read {
            id,
            range,
            fill,
            buf: Some(buf),
            pending: 1,
            until: from.undurable_in(range),
            error: None,
            missing: Vec::new(),
        };
        Some(self.active.insert(read))
    }

    /// One piece is in place (or the beginning is done); reply after the last.
    pub(super) fn finish_read(
        &mut self,
        read: usize,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let state = &mut self.active[read];
        state.pending -= 1;
        if state.pending > 0 {
            return;
        }
        let state = self.active.remove(read);
        let id = state.id;
        let goes_on = !state.missing.is_empty() && state.error.is_none() && !from.port.is_fenced();
        if goes_on {
            // One that has lost its buffer has nothing to keep.
            let has_place = state.buf.is_some();
            self.keeper.take_if(|keeper| *keeper == id && !has_place);
            if has_place && *self.keeper.get_or_insert(id) == id {
                self.kept = Some(state);
            } else {
                let waiting = (id, state.range, state.fill);
                self.starved.push_back(waiting);
            }
            return;
        }
        self.keeper.take_if(|keeper| *keeper == id);
        let waits = state.error.is_none()
            && state.until > from.log.get().durable_sequence()
            && !from.shows_undurable()
            && !from.port.is_fenced();
        if waits {
            self.undurable.push_back(state);
        } else {
            state.answer(from.port, cx);
        }
    }

    /// The place of `piece` in the read's data.
    fn place(&mut self, read: usize, piece: SectorRange) -> &mut [u8] {
        let state = &mut self.active[read];
        let start = (piece.start - state.range.start) as usize * SECTOR_BYTES;
        &mut state.buf.as_mut().expect(HAS_PLACE)[start..start + piece.bytes()]
    }

    fn read_dirty(
        &mut self,
        read: usize,
        piece: SectorRange,
        sequence: Sequence,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        from.port.stats.log_hit_blocks += piece.block_count();
        let entry = from.log.get().entry(sequence);
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
            if from.refuses_for_silent_log {
                // Each read that is given up holds its memory until the device answers.
                self.active[read].error.get_or_insert(RequestError::Io);
                return;
            }
            let blocks = packed.map_or(piece.block_count(), |packed| packed.stored.block_count());
            let bytes = blocks as usize * BLOCK_BYTES;
            let Some(buf) = cx.pool.alloc(bytes) else {
                self.active[read].missing.push(piece);
                return;
            };
            self.active[read].pending += 1;
            let op = Op::ReadLog {
                read,
                range: piece,
                position,
                packed,
                tries: 0,
            };
            from.log.read(position, op, buf, from.port, cx);
        }
    }

    /// Put `piece` in its place, out of the blocks that hold it. Returns whether these can be unpacked.
    pub(super) fn place_logged(
        &mut self,
        read: usize,
        piece: SectorRange,
        packed: Option<Packed>,
        blocks: &[u8],
        from: &mut ReadSources<'_>,
    ) -> bool {
        let place = self.place(read, piece);
        let Some(packed) = packed else {
            let start = piece.offset_in_block();
            place.copy_from_slice(&blocks[start..start + piece.bytes()]);
            return true;
        };
        let unpacked = from
            .compression
            .unpack(from.config.codec, &packed, piece, blocks);
        unpacked.map(|data| place.copy_from_slice(data)).is_some()
    }

    /// Read a piece that is not dirty: block by block from the cache, what is missing in fetches.
    fn read_clean(
        &mut self,
        read: usize,
        piece: SectorRange,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let mut missing: Option<SectorRange> = None;
        let end = piece.first_block() + piece.block_count();
        let mut next = piece.first_block();
        while next < end {
            let block = next;
            let part = block_range(block).intersect(piece);
            next += 1;
            match from.find_cached(block, cx) {
                Lookup::Dram(data) => {
                    from.port.stats.dram_hit_blocks += 1;
                    let start = part.offset_in_block();
                    let data = &data[start..start + part.bytes()];
                    self.place(read, part).copy_from_slice(data);
                }
                Lookup::Ssd(mut permission) => {
                    // A line is read once for all of its blocks that are wanted.
                    let wanted = permission.reach().min(end - block);
                    permission.take(from.cached.blocks_of_line(block, permission.key, wanted));
                    next = block + permission.blocks;
                    let sectors = permission.blocks * BLOCK_SECTORS;
                    let part = SectorRange::new(block * BLOCK_SECTORS, sectors).intersect(piece);
                    self.read_ssd(read, part, permission, from, cx);
                }
                Lookup::Miss => {
                    from.port.stats.miss_blocks += 1;
                    missing = match missing {
                        Some(run) if run.end() == part.start => {
                            Some(SectorRange::between(run.start, part.end()))
                        }
                        Some(run) => {
                            self.read_missing(read, run, from, cx);
                            Some(part)
                        }
                        None => Some(part),
                    };
                }
            }
        }
        if let Some(run) = missing {
            self.read_missing(read, run, from, cx);
        }
    }

    fn read_ssd(
        &mut self,
        read: usize,
        part: SectorRange,
        permission: SsdRead,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let state = &mut self.active[read];
        // What brings all of the read is read to where it is sent from.
        let is_all = part == state.range && permission.is_plain();
        let buf = if is_all && has_room(state.buf.as_ref(), permission.bytes) {
            let whole = state.buf.take().map(BufMut::widen);
            whole.map(|buf| buf.narrow(0..permission.bytes))
        } else {
            cx.pool.alloc(permission.bytes)
        };
        let Some(buf) = buf else {
            state.missing.push(part);
            return cx.cache.cancel_ssd_read(permission);
        };
        state.pending += 1;
        let offset = permission.offset;
        let token = from.port.begin(Op::ReadSsd {
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
        result: Result<Done, IoError>,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let mut data = match result {
            Ok(Done::Read(data)) => Some(data),
            _ => None,
        };
        let found = (cx.cache).finish_ssd_read(permission, data.as_deref_mut());
        if let Ok(found) = found {
            from.port.stats.ssd_hit_blocks += part.block_count();
            let start = part.offset_in_block();
            let bytes = start..start + part.bytes();
            if self.active[read].buf.is_some() {
                self.place(read, part).copy_from_slice(&found[bytes]);
            } else {
                self.active[read].buf = data.map(|data| data.narrow(bytes));
            }
            return self.finish_read(read, from, cx);
        }
        // Clean data has another copy: the backend's.
        from.port.stats.cache_corrupt_blocks += part.block_count();
        self.active[read].buf = self.active[read].buf.take().or_else(|| {
            let data = data?.widen();
            Some(data.narrow(0..part.bytes()))
        });
        self.read_instead(read, part, from, cx);
    }

    /// The cache device has not brought a piece of a read: have it from the backend. If the read's buffer is gone, and
    /// there is no other, it begins anew when there is.
    fn read_instead(
        &mut self,
        read: usize,
        part: SectorRange,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        from.port.stats.miss_blocks += part.block_count();
        let state = &mut self.active[read];
        state.buf = (state.buf.take()).or_else(|| cx.pool.alloc(part.bytes()));
        if state.buf.is_some() {
            self.read_missing(read, part, from, cx);
        } else {
            state.missing.push(part);
        }
        self.finish_read(read, from, cx);
    }

    /// The cache device has kept a read for too long: take the block from the backend. What the
    /// device brings in the end is not used.
    pub(super) fn give_up_ssd_read(
        &mut self,
        key: usize,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let Some(waiting) = from.port.give_up_ssd_read(key) else {
            return;
        };
        cx.cache.ssd_read_is_late();
        let (read, range) = match waiting {
            GivenUp::Read { read, range } => (read, range),
            GivenUp::Scrub(id) => return scrub::answer_done(id, from.port, cx),
        };
        self.read_instead(read, range, from, cx);
    }

    /// A piece of a read will not come.
    pub(super) fn fail_read(
        &mut self,
        read: usize,
        error: RequestError,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        self.active[read].error = Some(error);
        self.finish_read(read, from, cx);
    }

    /// Refuse the reads of what is not durable; those that still wait for something else, once that is there.
    pub(super) fn refuse_undurable_reads(
        &mut self,
        error: RequestError,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let durable = from.log.get().durable_sequence();
        let active = self.active.iter_mut().map(|(_, read)| read);
        for read in active.chain(&mut self.kept) {
            if read.until > durable {
                read.error.get_or_insert(error);
            }
        }
        for Read { id, range, .. } in core::mem::take(&mut self.undurable) {
            from.port
                .reply(id, Kind::Read(range.bytes() as u64), Err(error), cx);
        }
    }

    /// Everything that waits before its first action, and everything under way once it ends, is
    /// refused.
    pub(super) fn refuse_waiting_reads(
        &mut self,
        error: RequestError,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        self.refuse_undurable_reads(error, from, cx);
        self.refuse_starved_reads(error, from, cx);
    }

    /// Refuse the reads that wait for memory.
    pub(super) fn refuse_starved_reads(
        &mut self,
        error: RequestError,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if let Some(Read { id, range, .. }) = self.kept.take() {
            self.keeper = None;
            from.port
                .reply(id, Kind::Read(range.bytes() as u64), Err(error), cx);
        }
        for (id, range, _) in core::mem::take(&mut self.starved) {
            from.port
                .reply(id, Kind::Read(range.bytes() as u64), Err(error), cx);
        }
    }

    /// Let `read` have `run` from the backend, through fetches that others may share.
    fn read_missing(
        &mut self,
        read: usize,
        run: SectorRange,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if run.end() > from.sectors() {
            // The volume has become smaller while another copy was tried.
            self.active[read].error = Some(RequestError::BadRange);
            return;
        }
        let mut at = run.start;
        while at < run.end() {
            let rest = SectorRange::between(at, run.end());
            let fetch = match self.joinable(rest.first_block()) {
                Some(fetch) => Some(fetch),
                None => self.begin_fetch(rest, self.active[read].fill, None, from, cx),
            };
            let Some(fetch) = fetch else {
                self.active[read].missing.push(rest);
                return;
            };
            let fetch = &mut self.fetches[fetch];
            let covered = SectorRange::new(
                fetch.first_block * BLOCK_SECTORS,
                fetch.blocks * BLOCK_SECTORS,
            );
            let part = rest.intersect(covered);
            fetch.waiters.push((read, part));
            self.active[read].pending += 1;
            at = part.end();
        }
    }

    pub(super) fn wake_durable_reads(
        &mut self,
        durable: Sequence,
        from: &mut ReadSources<'_>,
        cx: &mut Context<'_>,
    ) {
        for _ in 0..self.undurable.len() {
            let read = self.undurable.pop_front().expect("counted");
            if read.until <= durable {
                read.answer(from.port, cx);
            } else {
                self.undurable.push_back(read);
            }
        }
    }

    /// Try again what found no buffer, and what waits for durability no longer.
    pub(super) fn retry_reads(&mut self, from: &mut ReadSources<'_>, cx: &mut Context<'_>) {
        if !from.is_on_write && !self.undurable.is_empty() {
            self.wake_durable_reads(Sequence::MAX, from, cx);
        }
        self.retry_kept(from, cx);
        for _ in 0..self.starved.len() {
            let (id, range, fill) = self.starved.pop_front().expect("counted");
            if cx.pool.free_bytes() < 2 * range.bytes() {
                self.starved.push_front((id, range, fill));
                break;
            }
            self.start_read(id, range, fill, from, cx);
        }
        self.go_on_with_stalled(from, cx);
    }
}

/// Whether a place for data has so many bytes, with what its memory has around it.
fn has_room(place: Option<&BufMut>, bytes: usize) -> bool {
    place.is_some_and(|place| place.held_bytes() >= bytes)
}

/// The sectors of one block.
pub(super) fn block_range(block: u64) -> SectorRange {
    SectorRange::new(block * BLOCK_SECTORS, BLOCK_SECTORS)
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
