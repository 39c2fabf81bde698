//! The write log of one volume: an append-only ring of spans. Format: [`crate::format`].
//!
//! ```text
//!   tail            durable            head
//!    │ durable spans  │ spans in flight  │ open span (in memory)
//!    ├────────────────┼──────────────────┼ ─ ─ ─ ─
//!  append → open ──seal──► sealed ──submit──► in flight ──all before it complete──► durable
//!  durable ──generation destaged, superblock written──► retired (space free again)
//! ```
//!
//! Invariants:
//! 1. `tail <= durable <= head <= tail + ring`: a span is written only over space before the tail
//!    that the superblock on the device names, and only into what is prepared (`space`).
//! 2. Spans become durable in order of position, whatever the order in which their writes end.
//! 3. A span holds no sync point but as its first entry, so generations are whole spans.
//! 4. Every span is written once; a failed log write latches: nothing is appended any more.
//! 5. A discard or write-zeroes that starts where the last entry of the open span ends, and is of the same kind,
//!    extends that entry, up to [`ZERO_SECTORS_MAX`]. So a long range that a client sends in pieces does not fill the
//!    log.
//!
//! The log does not know what the entries mean to readers; [`crate::volume`] indexes them.

mod counts;
mod parts;
mod space;
mod superblocks;

use alloc::collections::{BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

pub use counts::SpanCounts;
pub use parts::{Entry, Span};
use space::Ring;
pub use space::{PREPARED_BLOCKS_LEAST, region_bytes};
pub use superblocks::Superblocks;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::base::buf::{Buf, Pool};
use crate::base::cipher::Authenticator;
use crate::base::io::{Nanos, SectorRange};
use crate::base::limits::{
    BLOCK_BYTES, BLOCK_SECTORS, LOG_ENTRY_PARTS, LOG_INDEX_BYTES_LEAST, LOG_PART_BYTES,
    LOG_PIECE_BYTES_MAX, REQUEST_BYTES_MAX, SPAN_CONTROL_BLOCKS, SPAN_DATA_BLOCKS_MAX,
    SPAN_ENTRIES_MAX, SPANS_IN_FLIGHT_MAX, ZERO_SECTORS_MAX,
};
use crate::format::{
    ENTRY_NO_HOLE, EntryKind, LOG_HEADER_BLOCKS, LogSuperblock, SPAN_MAGIC, SPAN_VERSION,
    SpanEntry, SpanHeader, block_checksum,
};
use crate::log::ahead::Ahead;
use crate::log::budget::{IndexBudget, Share};
use crate::log::checksums::{Checksums, PAGE_BYTES};
use crate::log::extent_index::Sequence;
use crate::log::packing::{Compressed, Packing, Stored};
use crate::log::queue::Queue;

/// Blocks of the largest control part.
pub const CONTROL_BLOCKS_MAX: u64 =
    SpanHeader::control_blocks_for(SPAN_ENTRIES_MAX, SPAN_DATA_BLOCKS_MAX) as u64;
/// Blocks of the largest span.
pub const SPAN_BLOCKS_MAX: u64 = SPAN_DATA_BLOCKS_MAX as u64 + CONTROL_BLOCKS_MAX;
/// Memory for control parts and superblocks.
const CONTROL_POOL_BLOCKS: usize = 32;
/// Memory that has to be there for a write to be admitted: its parts and those of runs that are still to be cut, and
/// pages of checksums.
pub const ADMISSION_BYTES: u64 = SPAN_ENTRIES_MAX as u64 * LOG_PART_BYTES + 2 * PAGE_BYTES;
/// Spans sealed and not yet durable at most: the caller appends nothing beyond, so that the
/// control pool covers them.
pub const FLIGHTS_MAX: usize = 2 * SPANS_IN_FLIGHT_MAX;

/// The span that collects entries in memory.
#[derive(Debug, Default)]
struct OpenSpan {
    entries: Vec<SpanEntry>,
    checksums: Vec<u32>,
    data: Vec<Buf>,
    packing: Packing,
    first_sequence: Sequence,
    since: Nanos,
    /// Entries of clients', and how long after `since` they were accepted, all together.
    accepted: u64,
    later: Nanos,
}

/// A sealed span on its way to the device.
#[derive(Debug)]
struct Flight {
    end: u64,
    span_blocks: u64,
    end_sequence: Sequence,
    offset: u64,
    blocks: Vec<Buf>,
    /// Entries of clients', how long they had been in it when it was sealed, all together, and when that was.
    entries: u64,
    entry_bytes: u64,
    open_time: Nanos,
    sealed: Nanos,
    issued: bool,
    done: bool,
}

/// A log write for the driver.
#[derive(Debug)]
pub struct SpanWrite {
    /// Names the span in [`WriteLog::span_written`].
    pub end: u64,
    /// Offset in bytes on the log's region.
    pub offset: u64,
    /// Control part and data.
    pub data: Vec<Buf>,
    /// Entries of clients' in it.
    pub entries: u64,
    /// The bytes that they brought.
    pub entry_bytes: u64,
}

/// The write log of one open volume.
#[derive(Debug)]
pub struct WriteLog {
    superblocks: Superblocks,
    ring: Ring,
    head: u64,
    durable: u64,
    /// The tail that the device's superblock names, or the beginning of a lap behind it with nothing between.
    tail: u64,
    ahead: Ahead,
    /// Blocks that are sealed and not durable.
    sealed_blocks: u64,
    chain: u64,
    sync_points: u64,
    /// A flush came after the last entry: the next entry begins a generation.
    sync_pending: bool,
    open: OpenSpan,
    open_bytes: usize,
    flights: VecDeque<Flight>,
    spans: Queue<Span>,
    entries: Queue<Entry>,
    /// Sequence of `entries[0]`.
    first: Sequence,
    durable_sequence: Sequence,
    /// Entries that it holds at most.
    entries_max: u64,
    /// Runs that the index has of its entries.
    runs: u64,
    counts: SpanCounts,
    bytes_appended: u64,
    bytes_retired: u64,
    bytes_durable: u64,
    /// CRC-32C of each ring block that holds live data.
    checksums: Checksums,
    /// Where the checksums begin that may still be asked for.
    checksums_from: u64,
    /// Memory for all of this.
    share: Share,
    /// Entries from this one on take from what is lost when they are retired.
    lost_from: Sequence,
    /// Control parts and superblocks come from here, so that a full pool cannot stop the log.
    control_pool: Arc<Pool>,
}

impl WriteLog {
    /// An empty log at the tail of `superblock`, whose later ones get tags of these keys, if there are any; replay fills
    /// it through [`Self::replay_span`].
    pub fn new(superblock: LogSuperblock, keys: Option<Arc<dyn Authenticator>>) -> Self {
        let ring_blocks = superblock.ring_blocks.get();
        let tail = superblock.tail.get();
        let control_pool = Pool::small(CONTROL_POOL_BLOCKS);
        Self {
            superblocks: Superblocks::new(&superblock, keys, Arc::clone(&control_pool)),
            ring: Ring::new(ring_blocks),
            head: tail,
            durable: tail,
            tail,
            ahead: Ahead::found(superblock.named_ahead()),
            sealed_blocks: 0,
            chain: superblock.tail_chain.get(),
            sync_points: superblock.sync_points.get(),
            sync_pending: false,
            open: OpenSpan::default(),
            open_bytes: 0,
            flights: VecDeque::new(),
            spans: Queue::default(),
            entries: Queue::default(),
            first: 0,
            durable_sequence: 0,
            entries_max: u64::MAX,
            runs: 0,
            counts: SpanCounts::default(),
            bytes_appended: 0,
            bytes_retired: 0,
            bytes_durable: 0,
            checksums: Checksums::new(ring_blocks),
            checksums_from: tail,
            share: Share::new(&IndexBudget::unlimited(), LOG_INDEX_BYTES_LEAST),
            lost_from: 0,
            control_pool,
        }
    }

    /// Take a span that replay found valid, with the checksums of its data blocks, but for what lies in the blocks
    /// at the positions `bad`: that is lost. Returns the sequences of its entries; there is none for what is lost.
    pub fn replay_span(
        &mut self,
        now: Nanos,
        header: &SpanHeader,
        entries: &[SpanEntry],
        checksums: &[u32],
        bad: &BTreeSet<u64>,
    ) -> core::ops::Range<Sequence> {
        let position = header.position.get();
        let data_position = position + u64::from(header.control_blocks.get());
        let from = self.next_sequence();
        self.superblocks.damaged_blocks += bad.len() as u64;
        self.sync_points = header.sync_points.get();
        for entry in entries {
            let kind = EntryKind::from_code(entry.kind).expect("replay checked the kind");
            match kind {
                EntryKind::SyncPoint => {
                    self.sync_points += 1;
                    continue;
                }
                EntryKind::Record => continue,
                EntryKind::Write | EntryKind::WriteZeroes | EntryKind::Discard => {}
            }
            let range = SectorRange::new(entry.start.get(), entry.sectors.get());
            self.replay_entry(
                Entry {
                    range,
                    kind,
                    no_hole: entry.flags & ENTRY_NO_HOLE != 0,
                    position: data_position + u64::from(entry.data_block.get()),
                    stored: (kind == EntryKind::Write)
                        .then(|| Stored::of(entry))
                        .flatten(),
                    data: None,
                    held_blocks: 0,
                },
                bad,
            );
        }
        for (block, checksum) in (data_position..).zip(checksums) {
            self.checksums.set(block, *checksum);
        }
        let span = Span {
            position,
            data_position,
            blocks: u64::from(header.control_blocks.get()) + u64::from(header.data_blocks.get()),
            checksum: header.checksum.get(),
            end_sequence: self.next_sequence(),
            sync_points: self.sync_points,
            since: now,
            bytes_end: self.bytes_appended,
        };
        self.ahead = Ahead::found(header.ahead.get());
        self.head = span.end();
        self.durable = self.head;
        self.durable_sequence = span.end_sequence;
        self.bytes_durable = self.bytes_appended;
        self.chain = span.checksum;
        self.ring.note_found(&span);
        if self.spans.is_empty() {
            // Nothing lies between the tail and a lap that the first span begins.
            self.tail = position;
        }
        self.spans.push_back(span);
        from..self.next_sequence()
    }

    /// Take an entry of a replayed span, as far as it is not in the blocks at the positions `bad`.
    fn replay_entry(&mut self, entry: Entry, bad: &BTreeSet<u64>) {
        let (range, has_data) = (entry.range, entry.kind == EntryKind::Write);
        let positions = entry.positions(range);
        if !has_data || bad.range(positions.clone()).next().is_none() {
            return self.replay_piece(entry);
        }
        if entry.stored.is_some() {
            return self.superblocks.lost.add(range);
        }
        let mut at = range.first_block();
        while at < range.first_block() + range.block_count() {
            let position = positions.start + at - range.first_block();
            let is_bad = bad.contains(&position);
            let alike = (position..positions.end).take_while(|at| bad.contains(at) == is_bad);
            let blocks = alike.count() as u64;
            let piece = SectorRange::new(at * BLOCK_SECTORS, blocks * BLOCK_SECTORS);
            let range = piece.intersect(range);
            if is_bad {
                self.superblocks.lost.add(range);
            } else {
                self.replay_piece(Entry {
                    range,
                    kind: entry.kind,
                    no_hole: entry.no_hole,
                    position,
                    stored: None,
                    data: None,
                    held_blocks: 0,
                });
            }
            at += blocks;
        }
    }

    fn replay_piece(&mut self, entry: Entry) {
        if entry.kind == EntryKind::Write {
            self.bytes_appended += entry.range.bytes() as u64;
        }
        self.superblocks.lost.remove(entry.range);
        self.entries.push_back(entry);
    }

    /// Have the next entries, of so many data blocks, go into one span: they are one write.
    pub fn keep_together(&mut self, now: Nanos, entries: usize, data_blocks: usize) {
        if !self.fits_open_span(entries, data_blocks) {
            self.seal(now);
        }
    }

    /// Whether so many more entries, with so many data blocks, fit the open span.
    fn fits_open_span(&self, entries: usize, data_blocks: usize) -> bool {
        let entries = self.open.entries.len() + entries;
        let data_blocks = self.open_blocks() as usize + data_blocks;
        entries <= SPAN_ENTRIES_MAX
            && data_blocks <= SPAN_DATA_BLOCKS_MAX
            && SpanHeader::control_blocks_for(entries, data_blocks) <= SPAN_CONTROL_BLOCKS
    }

    /// Accept an entry into the open span, with what its data is stored as if that is not itself, and
    /// where buffers for that come from. Its data mirrors the range within its blocks. The caller has
    /// checked [`Self::has_room`]. Returns how many bytes of data are stored.
    pub fn append(
        &mut self,
        now: Nanos,
        mut entry: Entry,
        compressed: Option<(Compressed<'_>, &Arc<Pool>)>,
    ) -> usize {
        if self.extend_last(&entry) {
            return 0;
        }
        let data_blocks = if entry.data.is_some() {
            entry.range.block_count() as usize
        } else {
            0
        };
        begin_entry(self, now, data_blocks);
        let flags = if entry.no_hole { ENTRY_NO_HOLE } else { 0 };
        let data_block = self.open.checksums.len() as u32;
        let mut on_device = span_entry(entry.kind, entry.range, data_block, flags);
        let mut stored_bytes = data_blocks * BLOCK_BYTES;
        if let Some(data) = &entry.data {
            debug_assert_eq!(data.len(), entry.range.bytes());
            let blocks = data.covering_blocks();
            debug_assert_eq!(blocks.len(), data_blocks * BLOCK_BYTES);
            let packed =
                compressed.and_then(|(compressed, pool)| self.open.packing.put(&compressed, pool));
            if let Some((block, stored)) = packed {
                debug_assert!(blocks.len() <= LOG_PIECE_BYTES_MAX);
                // Among the compressed ones, until it is known how many blocks lie before them.
                on_device.data_block = U32::new(block);
                stored.describe(&mut on_device);
                stored_bytes = usize::from(stored.bytes);
                entry.stored = Some(stored);
            } else {
                let checksums = blocks.chunks_exact(BLOCK_BYTES).map(block_checksum);
                self.open.checksums.extend(checksums);
                self.open.data.push(blocks);
            }
            self.open_bytes += data.len();
            self.bytes_appended += data.len() as u64;
        }
        self.open.note_accepted(now);
        self.open.entries.push(on_device);
        self.entries.push_back(entry);
        stored_bytes
    }

    /// Accept a record of so many bytes, which `data` begins with; zeroes follow up to the end of the last block. It is one
    /// entry of one span, and means nothing to the log. The caller has checked [`Self::has_room`]. Returns the position at
    /// which its span follows: the record is durable, or committed, once more than that is.
    pub fn append_record(&mut self, now: Nanos, bytes: usize, data: Buf) -> u64 {
        let blocks = bytes.div_ceil(BLOCK_BYTES);
        debug_assert_eq!(data.len(), blocks * BLOCK_BYTES);
        begin_entry(self, now, blocks);
        let data_block = self.open.checksums.len() as u32;
        let range = SectorRange::new(0, bytes as u64);
        let entry = span_entry(EntryKind::Record, range, data_block, 0);
        let checksums = data.chunks_exact(BLOCK_BYTES).map(block_checksum);
        self.open.checksums.extend(checksums);
        self.open.data.push(data);
        self.open_bytes += bytes;
        self.open.note_accepted(now);
        self.open.entries.push(entry);
        self.head
    }

    /// Extend the last entry of the open span by an adjacent discard or write-zeroes of the same kind. Returns whether
    /// that was possible; a pending sync point prevents it.
    fn extend_last(&mut self, entry: &Entry) -> bool {
        let (Some(on_device), Some(last)) = (self.open.entries.last_mut(), self.entries.back_mut())
        else {
            return false;
        };
        let sectors = last.range.count + entry.range.count;
        let is_part = !self.sync_pending
            && on_device.kind == entry.kind.code()
            && entry.kind != EntryKind::Write
            && last.no_hole == entry.no_hole
            && last.range.end() == entry.range.start
            && sectors <= ZERO_SECTORS_MAX;
        if is_part {
            last.range.count = sectors;
            on_device.sectors = U64::new(sectors);
        }
        is_part
    }

    /// Put a sync point before the next entry, if anything was accepted since the last one.
    pub fn sync_point(&mut self) {
        if !self.open.entries.is_empty()
            || self
                .spans
                .back()
                .is_some_and(|span| span.sync_points == self.sync_points)
        {
            self.sync_pending = true;
        }
    }

    /// Close the open span, if it has entries, and queue it for writing.
    pub fn seal(&mut self, now: Nanos) {
        if self.open.entries.is_empty() {
            return;
        }
        let mut open = core::mem::take(&mut self.open);
        let entry_bytes = core::mem::take(&mut self.open_bytes) as u64;
        open.lay_out();
        let open_time = open.open_time(now);
        let (entries, data_blocks) = (open.entries.len(), open.checksums.len());
        let control_blocks = SpanHeader::control_blocks_for(entries, data_blocks);
        let blocks = (control_blocks + data_blocks) as u64;
        let position = self.ring.place(self.head, blocks);
        self.sealed_blocks += blocks;
        self.ahead.sealed(position + blocks, self.sealed_blocks);
        let leads_with_sync = open.entries[0].kind == EntryKind::SyncPoint.code();
        let header = SpanHeader {
            magic: SPAN_MAGIC,
            version: U16::new(SPAN_VERSION),
            control_blocks: U16::new(control_blocks as u16),
            data_blocks: U16::new(data_blocks as u16),
            entries: U16::new(entries as u16),
            checksum: U64::new(0),
            chain: U64::new(self.chain),
            log: self.superblocks.last.log,
            incarnation: self.superblocks.last.incarnation,
            epoch: self.superblocks.last.epoch,
            position: U64::new(position),
            durable: U64::new(self.durable),
            sync_points: U64::new(self.sync_points - u64::from(leads_with_sync)),
            ahead: U64::new(self.ahead.named()),
            reserved: [0; 40],
        };
        let mut control = self
            .control_pool
            .alloc(control_blocks * BLOCK_BYTES)
            .expect("the control pool covers every span that may be sealed at once");
        write_control(&mut control, &header, &open.entries, &open.checksums);
        self.chain = SpanHeader::seal(&mut control);
        self.place_entries(&open, position + control_blocks as u64);
        let mut data = Vec::with_capacity(1 + open.data.len());
        data.push(control.freeze());
        data.extend(open.data);
        let end_sequence = self.next_sequence();
        self.flights.push_back(Flight {
            end: position + blocks,
            span_blocks: blocks,
            end_sequence,
            offset: (LOG_HEADER_BLOCKS + position % self.ring.blocks) * BLOCK_BYTES as u64,
            blocks: data,
            entries: open.accepted,
            entry_bytes,
            open_time,
            sealed: now,
            issued: false,
            done: false,
        });
        let span = Span {
            position,
            data_position: position + control_blocks as u64,
            blocks,
            checksum: self.chain,
            end_sequence,
            sync_points: self.sync_points,
            since: open.since,
            bytes_end: self.bytes_appended,
        };
        self.spans.push_back(span);
        self.head = position + blocks;
        assert!(
            self.head - self.tail <= self.ring.blocks,
            "a span never covers live space"
        );
        assert!(
            (self.head - 1) % self.ring.blocks < self.ring.prepared,
            "a span lies in what is prepared"
        );
    }

    /// Tell each entry of the span where its data is, and each ring block its checksum.
    fn place_entries(&mut self, open: &OpenSpan, data_position: u64) {
        let others = [EntryKind::SyncPoint.code(), EntryKind::Record.code()];
        let written = (open.entries.iter()).filter(|entry| !others.contains(&entry.kind));
        for (sequence, entry) in (open.first_sequence..).zip(written) {
            let index = (sequence - self.first) as usize;
            self.entries[index].position = data_position + u64::from(entry.data_block.get());
        }
        for (block, &checksum) in (data_position..).zip(&open.checksums) {
            self.checksums.set(block, checksum);
        }
    }

    /// The next sealed span to write, while fewer than `in_flight_max` are being written.
    pub fn next_write(&mut self, in_flight_max: usize) -> Option<SpanWrite> {
        let issued = self
            .flights
            .iter()
            .filter(|flight| flight.issued && !flight.done)
            .count();
        if issued >= in_flight_max.min(SPANS_IN_FLIGHT_MAX) {
            return None;
        }
        let flight = self.flights.iter_mut().find(|flight| !flight.issued)?;
        flight.issued = true;
        self.counts.begun(issued + 1);
        Some(SpanWrite {
            end: flight.end,
            offset: flight.offset,
            data: core::mem::take(&mut flight.blocks),
            entries: flight.entries,
            entry_bytes: flight.entry_bytes,
        })
    }

    /// The span that ends at `end` is on the device. Returns whether more became durable.
    pub fn span_written(&mut self, now: Nanos, end: u64) -> bool {
        let flight = self
            .flights
            .iter_mut()
            .find(|flight| flight.end == end)
            .expect("a completed span was in flight");
        flight.done = true;
        let before = self.durable;
        while let Some(flight) = self.flights.front().filter(|flight| flight.done) {
            self.durable = flight.end;
            self.durable_sequence = flight.end_sequence;
            self.sealed_blocks -= flight.span_blocks;
            self.counts.durable(flight, now);
            self.flights.pop_front();
        }
        if let Some(span) = self
            .spans
            .iter()
            .rev()
            .find(|span| span.end() == self.durable)
        {
            self.bytes_durable = span.bytes_end;
        }
        self.ahead.durable(self.durable);
        self.durable != before
    }

    /// Its superblocks.
    pub fn superblocks(&self) -> &Superblocks {
        &self.superblocks
    }

    /// The same, to have the next one say something.
    pub fn superblocks_mut(&mut self) -> &mut Superblocks {
        &mut self.superblocks
    }

    /// What lies before `tail` and was written since the opening is not lost any more.
    fn find_written(&mut self, tail: u64) {
        if self.superblocks.lost.is_empty() {
            return;
        }
        let spans = self.spans.partition_point(|span| span.end() <= tail);
        let last = spans.checked_sub(1).map(|last| &self.spans[last]);
        let end = last.map_or(self.first, |last| last.end_sequence);
        for sequence in self.lost_from.max(self.first)..end {
            let range = self.entry(sequence).range;
            self.superblocks.lost.remove(range);
        }
        self.lost_from = self.lost_from.max(end);
    }

    /// Hold so many entries at most from now on, but no fewer than there are blocks.
    pub fn set_entries_max(&mut self, entries_max: u64) {
        self.entries_max = entries_max.max(self.ring.blocks);
    }

    /// Entries that it holds at most.
    pub fn entries_max(&self) -> u64 {
        self.entries_max
    }

    /// Nothing goes to the device any more: what is in memory alone may be destaged from there, and counts as
    /// durable once it is retired.
    pub fn abandon(&mut self) {
        self.flights.clear();
        self.seal(self.open.since);
        self.flights.clear();
        self.sealed_blocks = 0;
        self.durable = self.head;
        self.ahead.durable(self.durable);
    }

    /// The tail after the first `spans` spans.
    pub fn tail_after(&self, spans: usize) -> Tail {
        match spans.checked_sub(1).map(|last| &self.spans[last]) {
            Some(last) => Tail {
                position: last.end(),
                chain: last.checksum,
                sync_points: last.sync_points,
            },
            None => Tail {
                position: self.superblocks.last.tail.get(),
                chain: self.superblocks.last.tail_chain.get(),
                sync_points: self.superblocks.last.sync_points.get(),
            },
        }
    }

    /// Forget the first `spans` spans: a superblock with the tail after them is durable. Returns
    /// their entries.
    pub fn retire(&mut self, spans: usize) -> impl Iterator<Item = Entry> + '_ {
        let last = self.spans.drain_front(spans).last();
        let last = last.expect("something to retire");
        assert!(last.end() <= self.durable, "only durable spans are retired");
        self.tail = last.end();
        self.bytes_retired = last.bytes_end;
        let count = (last.end_sequence - self.first) as usize;
        self.first = last.end_sequence;
        // Of a log that was abandoned, this is what makes it durable.
        self.bytes_durable = self.bytes_durable.max(last.bytes_end);
        self.durable_sequence = self.durable_sequence.max(last.end_sequence);
        self.entries.drain_front(count)
    }

    /// The checksum that the data block at `position` must have.
    pub fn checksum(&self, position: u64) -> u32 {
        self.checksums.get(position)
    }

    /// Forget the checksums of what is retired, but for what lies behind `oldest`, which a read still needs.
    pub fn forget_checksums(&mut self, oldest: Option<u64>) {
        let to = oldest.map_or(self.tail, |oldest| oldest.min(self.tail));
        if to > self.checksums_from {
            self.checksums.forget(self.checksums_from..to, self.head);
            self.checksums_from = to;
            self.charge();
        }
    }

    /// Offset in bytes on the log's region of the block at `position`, and how many blocks follow
    /// it before the ring's end.
    pub fn locate(&self, position: u64) -> (u64, u64) {
        let slot = position % self.ring.blocks;
        (
            (LOG_HEADER_BLOCKS + slot) * BLOCK_BYTES as u64,
            self.ring.blocks - slot,
        )
    }

    /// Whether an entry with so many data blocks has to wait until more is durable.
    pub fn is_far_ahead(&self, data_blocks: u64) -> bool {
        let ahead = self.sealed_blocks + self.open_blocks();
        self.ahead.is_full(ahead, data_blocks)
    }

    fn open_blocks(&self) -> u64 {
        (self.open.checksums.len() + self.open.packing.blocks()) as u64
    }

    /// The entry of a sequence that is not retired.
    pub fn entry(&self, sequence: Sequence) -> &Entry {
        &self.entries[(sequence - self.first) as usize]
    }

    /// As [`Self::entry`].
    pub fn entry_mut(&mut self, sequence: Sequence) -> &mut Entry {
        &mut self.entries[(sequence - self.first) as usize]
    }

    /// The sealed spans that are not retired, oldest first.
    pub fn spans(&self) -> &Queue<Span> {
        &self.spans
    }

    /// Sequence of the oldest entry that is not retired.
    pub fn first_sequence(&self) -> Sequence {
        self.first
    }

    /// Sequence that the next entry gets.
    pub fn next_sequence(&self) -> Sequence {
        self.first + self.entries.len() as u64
    }

    /// Every entry before this sequence is durable.
    pub fn durable_sequence(&self) -> Sequence {
        self.durable_sequence
    }

    /// The first durable span that ends after `position` and before `end`, and its entries.
    pub fn span_after(
        &self,
        position: u64,
        end: u64,
    ) -> Option<(&Span, core::ops::Range<Sequence>)> {
        let index = self.spans.partition_point(|span| span.end() <= position);
        let span = self.spans.get(index)?;
        let before = index.checked_sub(1).map(|before| &self.spans[before]);
        let from = before.map_or(self.first, |before| before.end_sequence);
        (span.end() <= end.min(self.durable)).then_some((span, from..span.end_sequence))
    }

    /// Position before which everything is durable.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// Position after the last sealed span.
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Where the last of its sealed spans ends; 0 if there is none.
    pub fn sealed_end(&self) -> u64 {
        self.spans.back().map_or(0, Span::end)
    }

    /// Where it begins, as a superblock on the device says.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Memory that it has of the budget.
    pub fn share_mut(&mut self) -> &mut Share {
        &mut self.share
    }

    /// Memory that it has of the budget.
    pub fn share(&self) -> &Share {
        &self.share
    }

    fn charge(&mut self) {
        let bytes = self.parts() * LOG_PART_BYTES + self.checksums.page_bytes();
        self.share.set(bytes);
    }

    /// The index has so many runs of its entries.
    pub fn note_runs(&mut self, runs: usize) {
        self.runs = runs as u64;
        self.charge();
    }

    /// What is in memory of the log: entries, spans, runs. Each takes [`LOG_PART_BYTES`] at most.
    fn parts(&self) -> u64 {
        (self.entries.len() + self.spans.len()) as u64 + self.runs
    }

    /// How many there may be: those of writes that do not cut others, or are not a span each.
    fn parts_max(&self) -> u64 {
        self.entries_max.saturating_mul(LOG_ENTRY_PARTS)
    }

    /// Data bytes in the open span.
    pub fn open_bytes(&self) -> usize {
        self.open_bytes
    }

    /// Entries of the open span.
    pub fn open_entries(&self) -> usize {
        self.open.entries.len()
    }

    /// When the open span's oldest entry was accepted, if it has one.
    pub fn open_since(&self) -> Option<Nanos> {
        (!self.open.entries.is_empty()).then_some(self.open.since)
    }

    /// When the oldest entry that is not retired was accepted, if there is one.
    pub fn oldest_since(&self) -> Option<Nanos> {
        self.spans
            .front()
            .map(|span| span.since)
            .or_else(|| self.open_since())
    }

    /// Spans sealed and not yet durable.
    pub fn flights(&self) -> usize {
        self.flights.len()
    }

    /// Data bytes accepted, durable, and retired since the log was opened.
    pub fn bytes(&self) -> LogBytes {
        LogBytes {
            appended: self.bytes_appended,
            durable: self.bytes_durable,
            retired: self.bytes_retired,
        }
    }

    /// What it has counted since it was opened.
    pub fn counts(&self) -> SpanCounts {
        self.counts
    }

    /// Sync points since the log was made.
    pub fn sync_points(&self) -> u64 {
        self.sync_points
    }

    /// Memory of the log's tables in bytes, data not included.
    pub fn memory_bytes(&self) -> usize {
        self.checksums.memory_bytes()
            + self.entries.memory_bytes()
            + self.spans.memory_bytes()
            + self.control_pool.total_bytes()
    }

    /// Assert what must always hold.
    pub fn check_invariants(&self) {
        assert!(self.tail <= self.durable && self.durable <= self.head);
        assert!(self.head - self.tail <= self.ring.blocks);
        assert!(self.ring.prepared <= self.ring.blocks);
        assert!(self.durable_sequence <= self.next_sequence());
        assert!(self.bytes_retired <= self.bytes_durable);
        assert!(self.bytes_durable <= self.bytes_appended);
    }

    /// Assert, by going through every span, that allocation follows from the spans alone.
    pub fn check_allocation(&self) {
        let (mut at, mut sync_points) = (self.tail, 0);
        let mut sequence = self.first;
        for span in self.spans.iter() {
            let lap = at.next_multiple_of(self.ring.blocks);
            assert!(
                span.position == at || span.position == lap,
                "spans follow one another"
            );
            assert!(self.ring.end_slot(span) <= self.ring.prepared);
            assert!(span.end_sequence >= sequence && span.sync_points >= sync_points);
            (at, sequence, sync_points) = (span.end(), span.end_sequence, span.sync_points);
        }
        assert_eq!(at, self.head, "the head follows the last span");
        assert!(self.head - self.tail <= self.ring.blocks);
    }
}

/// Where replay begins.
#[derive(Clone, Copy, Debug)]
pub struct Tail {
    /// Position of the first span that counts.
    pub position: u64,
    /// Checksum of the span before it.
    pub chain: u64,
    /// Sync points before it.
    pub sync_points: u64,
}

/// Data bytes since the log was opened.
#[derive(Clone, Copy, Debug)]
pub struct LogBytes {
    /// Accepted.
    pub appended: u64,
    /// Durable.
    pub durable: u64,
    /// Retired.
    pub retired: u64,
}

impl OpenSpan {
    /// Put the compressed entries behind the others.
    fn lay_out(&mut self) {
        if self.packing.is_empty() {
            return;
        }
        let plain_blocks = self.checksums.len() as u32;
        for entry in self.entries.iter_mut().filter(|entry| entry.method != 0) {
            entry.data_block = U32::new(plain_blocks + entry.data_block.get());
        }
        for blocks in core::mem::take(&mut self.packing).into_blocks() {
            let checksums = blocks.chunks_exact(BLOCK_BYTES).map(block_checksum);
            self.checksums.extend(checksums);
            self.data.push(blocks);
        }
    }
}

/// Have the open span take an entry with so many data blocks, behind the sync point that is pending.
fn begin_entry(log: &mut WriteLog, now: Nanos, data_blocks: usize) {
    let sync = core::mem::take(&mut log.sync_pending);
    if sync || !log.fits_open_span(1, data_blocks) {
        log.seal(now);
    }
    if log.open.entries.is_empty() {
        log.open.since = now;
        log.open.first_sequence = log.next_sequence();
    }
    if sync {
        log.sync_points += 1;
        let none = SectorRange::new(0, 0);
        let entry = span_entry(EntryKind::SyncPoint, none, 0, 0);
        log.open.entries.push(entry);
    }
}

fn span_entry(kind: EntryKind, range: SectorRange, data_block: u32, flags: u8) -> SpanEntry {
    SpanEntry {
        start: U64::new(range.start),
        sectors: U64::new(range.count),
        data_block: U32::new(data_block),
        kind: kind.code(),
        flags,
        stored_offset: U16::new(0),
        stored_bytes: U16::new(0),
        method: 0,
        reserved: 0,
        checksum: U32::new(0),
    }
}

/// Lay out a control part; its checksum is still to be sealed.
fn write_control(out: &mut [u8], header: &SpanHeader, entries: &[SpanEntry], checksums: &[u32]) {
    let used = SpanHeader::control_bytes(entries.len(), checksums.len());
    let (head, rest) = out.split_at_mut(size_of::<SpanHeader>());
    head.copy_from_slice(header.as_bytes());
    let (list, rest) = rest.split_at_mut(size_of_val(entries));
    list.copy_from_slice(entries.as_bytes());
    for (place, checksum) in rest.chunks_exact_mut(4).zip(checksums) {
        place.copy_from_slice(&checksum.to_le_bytes());
    }
    out[used..].fill(0);
}

// Every span that may be sealed at once, the one that an append seals, and a superblock.
const _: () = assert!(
    (FLIGHTS_MAX + 4) * SPAN_CONTROL_BLOCKS <= CONTROL_POOL_BLOCKS,
    "the control pool covers the spans in flight"
);
const _: () = assert!(
    SpanHeader::control_blocks_for(
        2 + REQUEST_BYTES_MAX / LOG_PIECE_BYTES_MAX,
        REQUEST_BYTES_MAX / BLOCK_BYTES + 1
    ) <= SPAN_CONTROL_BLOCKS,
    "a span holds the largest request in pieces, behind a sync point"
);
const _: () = assert!(
    2 * ADMISSION_BYTES <= LOG_INDEX_BYTES_LEAST,
    "a volume has room for some writes, whatever others hold"
);
