//! Scrubbing: the log's live spans and the volume's lines in the SSD tier are read and checked against
//! their checksums, a piece at a time.
//!
//! Of the log a piece is the control part of a span, or blocks of its data. One that is bad is read once
//! more; if it still is, and memory has its data, the same bytes are written to the same place, where
//! they are durable already as far as anybody knows: a write that is cut short changes nothing. A control
//! part is not in memory; the way to be rid of it is to destage what it describes, and so it is where a write
//! does not help. Data whose only copy is bad is told, and latches as if a client had read it. What cannot be
//! read is told too, but does not latch: it may be read later, as destage tries.

use core::ops::Range;

use super::op::Op;
use super::open_log::OpenLog;
use super::port::{Kind, Port};
use super::{Context, Volume};
use crate::base::buf::Buf;
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, Reply, RequestId, SectorRange};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS};
use crate::cache::{ScrubLine, SsdRead};
use crate::format::{EntryKind, SpanHeader, block_checksum};
use crate::log::extent_index::{ExtentIndex, Sequence};
use crate::log::write_log::WriteLog;
use crate::node::scrub::{PIECE_BYTES, ScrubAt, Scrubbed};

/// Blocks of the log that are read at once.
const PIECE_BLOCKS: u64 = (PIECE_BYTES / BLOCK_BYTES) as u64;

/// A piece of the log that is being read, or written again.
#[derive(Debug)]
pub(super) struct LogPiece {
    id: RequestId,
    /// Its entry; `None`: the control part of a span.
    sequence: Option<Sequence>,
    /// Checksum of that.
    control: u64,
    position: u64,
    blocks: u64,
    end: u64,
    tries: u8,
    /// What is passed that need not be read.
    skipped: u64,
    bad: u64,
    /// It was not read: what it holds is not known.
    unread: bool,
}

impl LogPiece {
    fn next(&self, tries: u8) -> ScrubAt {
        let position = match tries {
            0 => self.position + self.blocks,
            _ => self.position,
        };
        ScrubAt::Log {
            position,
            end: self.end,
            tries,
        }
    }

    /// The first piece of a live span from a position on.
    fn first(log: &WriteLog, id: RequestId, position: u64, end: u64) -> Option<Self> {
        let (span, entries) = log.span_after(position, end)?;
        let from = if position == 0 {
            span.position
        } else {
            position
        };
        let piece = |sequence, at: u64, until: u64| Self {
            id,
            sequence,
            control: span.checksum,
            position: at,
            blocks: (until - at).min(PIECE_BLOCKS),
            end,
            tries: 0,
            skipped: at.saturating_sub(from),
            bad: 0,
            unread: false,
        };
        if position <= span.position {
            return Some(piece(None, span.position, span.data_position));
        }
        let (sequence, data) = entry_after(log, &entries, position)?;
        Some(piece(Some(sequence), position.max(data.start), data.end))
    }

    /// It was read, if there is data. Returns which of its blocks are bad, from the first to the last.
    fn check(&mut self, data: Option<&[u8]>, log: &WriteLog) -> Range<u64> {
        self.unread = data.is_none();
        let is_bad = |index: u64| match data {
            None => true,
            Some(data) => {
                let start = index as usize * BLOCK_BYTES;
                let sum = log.checksum(self.position + index);
                block_checksum(&data[start..start + BLOCK_BYTES]) != sum
            }
        };
        let bad: Range<u64> = if self.sequence.is_some() {
            let first = (0..self.blocks).find(|&index| is_bad(index));
            let last = (0..self.blocks).rev().find(|&index| is_bad(index));
            first.map_or(0..0, |first| first..last.unwrap_or(first) + 1)
        } else {
            let found = data.map(SpanHeader::verify);
            let is_good = found.is_some_and(|header| {
                header.is_ok_and(|header| header.checksum.get() == self.control)
            });
            0..if is_good { 0 } else { self.blocks }
        };
        self.bad = match self.sequence {
            Some(_) => bad.clone().filter(|&index| is_bad(index)).count() as u64,
            None => bad.end,
        };
        bad
    }

    /// Whether it is still needed.
    fn is_live(&self, log: &WriteLog) -> bool {
        match self.sequence {
            Some(sequence) => sequence >= log.first_sequence(),
            None => (log.spans().front()).is_some_and(|span| span.position <= self.position),
        }
    }

    /// The bytes of bad blocks of a piece, if memory has them as they are stored.
    fn healing(&self, bad: &Range<u64>, log: &OpenLog) -> Option<Buf> {
        let entry = log.get().entry(self.sequence?);
        if entry.stored.is_some() {
            return None;
        }
        let held = entry.data.as_ref()?.covering_blocks();
        let at = self.position + bad.start;
        let start = (at - entry.position) as usize * BLOCK_BYTES;
        let end = start + (bad.end - bad.start) as usize * BLOCK_BYTES;
        let data = held.slice(start..end);
        let may_write = !log.has_failed() && !log.is_given_up();
        (may_write && log.blocks_match(&data, at)).then_some(data)
    }

    /// What is lost with bad blocks at these positions, and whether a part of it is needed: what a later write
    /// covers is nobody's loss, if destage comes to leave it out. Compressed entries may share a block; what lies
    /// between two that are lost is counted too.
    fn damaged_by(
        &self,
        positions: &Range<u64>,
        log: &OpenLog,
        index: &ExtentIndex,
    ) -> (Option<SectorRange>, bool) {
        let span = log.get().span_after(positions.start, self.end);
        let (Some(_), Some((_, entries))) = (self.sequence, span) else {
            return (None, false);
        };
        let (mut damaged, mut is_needed) = (None::<SectorRange>, false);
        for (sequence, data) in entries_with_data(log.get(), &entries) {
            let (first, end) = (positions.start.max(data.start), positions.end.min(data.end));
            if first >= end || is_held(log, sequence, &data, first..end) {
                continue;
            }
            let entry = log.get().entry(sequence);
            let range = if entry.stored.is_some() {
                entry.range
            } else {
                let block = entry.range.first_block();
                let sector = |position| (block + position - data.start) * BLOCK_SECTORS;
                SectorRange::between(sector(first), sector(end)).intersect(entry.range)
            };
            let mut parts = index.overlaps(range);
            is_needed |= parts.any(|(_, found)| found == sequence);
            damaged = Some(damaged.map_or(range, |other| {
                let start = other.start.min(range.start);
                SectorRange::between(start, other.end().max(range.end()))
            }));
        }
        (damaged, is_needed)
    }
}

impl Volume {
    pub(super) fn scrub(&mut self, id: RequestId, at: ScrubAt, cx: &mut Context<'_>) {
        match at {
            ScrubAt::Log {
                position,
                end,
                tries,
            } => self.scrub_log(id, position, end, tries, cx),
            ScrubAt::Cache { line } => {
                let volumes = self.cached.numbers();
                scrub_cache(id, line, volumes, &mut self.port, cx);
            }
            // That is the local store's.
            ScrubAt::Home { .. } => answer_done(id, &mut self.port, cx),
        }
    }

    /// The log's device has not answered for too long: nothing more of the log is scrubbed.
    pub(super) fn give_up_scrub(&mut self, piece: &LogPiece, cx: &mut Context<'_>) {
        self.log.unpin(piece.position);
        let error = if self.port.is_fenced() {
            RequestError::Fenced
        } else {
            RequestError::Io
        };
        self.port.reply(piece.id, Kind::Other, Err(error), cx);
    }

    fn scrub_log(
        &mut self,
        id: RequestId,
        position: u64,
        end: u64,
        tries: u8,
        cx: &mut Context<'_>,
    ) {
        if self.log.is_given_up() {
            return answer_done(id, &mut self.port, cx);
        }
        if self.health.refuses_for_silent_log(self.config.when_full) {
            return self.port.reply(id, Kind::Other, Err(RequestError::Io), cx);
        }
        let end = end.min(self.log.get().durable());
        let Some(mut piece) = LogPiece::first(self.log.get(), id, position, end) else {
            return answer_done(id, &mut self.port, cx);
        };
        // It may be another one than that which was bad: the log goes on.
        piece.tries = if piece.position == position { tries } else { 0 };
        let Some(buf) = cx.pool.alloc(piece.blocks as usize * BLOCK_BYTES) else {
            let next = Some(ScrubAt::Log {
                position,
                end,
                tries,
            });
            return answer(
                id,
                Scrubbed {
                    next,
                    ..Scrubbed::default()
                },
                &mut self.port,
                cx,
            );
        };
        let (position, is_bad) = (piece.position, piece.tries > 0);
        self.log.pin(position);
        let token = self.port.begin(Op::ScrubLog(piece));
        self.log.read_pinned(token, position, buf, is_bad, cx);
    }

    pub(super) fn scrubbed_log(
        &mut self,
        mut piece: LogPiece,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let data = match &result {
            Ok(Done::Read(data)) => Some(&**data),
            _ => None,
        };
        let bad = piece.check(data, self.log.get());
        let read_bytes = piece.blocks * BLOCK_BYTES as u64;
        drop(result);
        // What was retired meanwhile is not needed any more.
        let is_live = piece.is_live(self.log.get());
        if bad.is_empty() || !is_live {
            self.log.unpin(piece.position);
            if piece.sequence.is_some() && !piece.unread {
                self.damage
                    .found_good(&(piece.position..piece.position + piece.blocks));
            }
            let found = Scrubbed {
                next: Some(piece.next(0)),
                read_bytes,
                passed_bytes: (piece.skipped + piece.blocks) * BLOCK_BYTES as u64,
                ..Scrubbed::default()
            };
            return answer(piece.id, found, &mut self.port, cx);
        }
        if piece.tries == 0 {
            // What was wrong may have been the way, and not the medium.
            self.log.unpin(piece.position);
            let found = Scrubbed {
                next: Some(piece.next(1)),
                read_bytes,
                ..Scrubbed::default()
            };
            return answer(piece.id, found, &mut self.port, cx);
        }
        if let Some(data) = piece.healing(&bad, &self.log)
            && piece.tries == 1
        {
            let (offset, _) = self.log.get().locate(piece.position + bad.start);
            let token = self.port.begin(Op::ScrubHeal(piece));
            let data = alloc::vec![data];
            cx.actions.push(Action::LogWrite {
                token,
                offset,
                data,
                way: None,
            });
            return;
        }
        self.tell_damage(&piece, bad, read_bytes, cx);
    }

    /// Bad blocks were written again. The next piece is the same once more: it says whether that helped.
    pub(super) fn scrub_healed(&mut self, piece: LogPiece, is_ok: bool, cx: &mut Context<'_>) {
        self.log.unpin(piece.position);
        let healed_blocks = if is_ok { piece.bad } else { 0 };
        let found = Scrubbed {
            next: Some(piece.next(2)),
            read_bytes: piece.blocks * BLOCK_BYTES as u64,
            bad_blocks: healed_blocks,
            healed_blocks,
            ..Scrubbed::default()
        };
        answer(piece.id, found, &mut self.port, cx);
    }

    fn tell_damage(
        &mut self,
        piece: &LogPiece,
        bad: Range<u64>,
        read_bytes: u64,
        cx: &mut Context<'_>,
    ) {
        self.log.unpin(piece.position);
        let mut found = Scrubbed {
            next: Some(piece.next(0)),
            read_bytes,
            passed_bytes: (piece.skipped + piece.blocks) * BLOCK_BYTES as u64,
            bad_blocks: piece.bad,
            ..Scrubbed::default()
        };
        let positions = piece.position + bad.start..piece.position + bad.end;
        let (damaged, is_needed) = piece.damaged_by(&positions, &self.log, &self.index);
        if damaged.is_none() {
            // Its data is good, or in memory. Once that is destaged, no replay needs what is bad.
            self.destage_all();
            found.healed_blocks = piece.bad;
        }
        if is_needed && !piece.unread {
            self.damage
                .note_bad(positions, self.log.get(), &mut self.port.stats);
            self.refuse_for_damage(cx);
        }
        found.damaged = damaged;
        answer(piece.id, found, &mut self.port, cx);
    }
}

/// The entry of a span whose data is first from a position on, and where that is. Compressed ones lie
/// after the others.
fn entry_after(
    log: &WriteLog,
    entries: &Range<Sequence>,
    position: u64,
) -> Option<(Sequence, Range<u64>)> {
    entries_with_data(log, entries)
        .filter(|(_, data)| data.end > position)
        .min_by_key(|(_, data)| data.start)
}

/// The entries that have data, and its positions.
fn entries_with_data(
    log: &WriteLog,
    entries: &Range<Sequence>,
) -> impl Iterator<Item = (Sequence, Range<u64>)> {
    entries.clone().filter_map(|sequence| {
        let entry = log.entry(sequence);
        (entry.kind == EntryKind::Write).then(|| (sequence, entry.positions(entry.range)))
    })
}

/// Whether memory has, as it was written, what an entry stores at some of its positions.
fn is_held(log: &OpenLog, sequence: Sequence, data: &Range<u64>, positions: Range<u64>) -> bool {
    let entry = log.get().entry(sequence);
    match (&entry.data, entry.stored) {
        (None, _) => false,
        (Some(_), Some(_)) => true,
        (Some(held), None) => {
            let at = |position: u64| (position - data.start) as usize * BLOCK_BYTES;
            let blocks = &held.covering_blocks()[at(positions.start)..at(positions.end)];
            log.blocks_match(blocks, positions.start)
        }
    }
}

/// A piece was looked at.
fn answer(id: RequestId, found: Scrubbed, port: &mut Port, cx: &mut Context<'_>) {
    let result = if port.is_fenced() {
        Err(RequestError::Fenced)
    } else {
        Ok(Reply::Scrubbed(found))
    };
    port.reply(id, Kind::Other, result, cx);
}

/// Nothing more can be scrubbed of this part.
pub(super) fn answer_done(id: RequestId, port: &mut Port, cx: &mut Context<'_>) {
    answer(id, Scrubbed::default(), port, cx);
}

/// Read the next line of the cache that is one of these volumes'.
fn scrub_cache(id: RequestId, from: u64, volumes: [u32; 2], port: &mut Port, cx: &mut Context<'_>) {
    match cx.cache.next_to_scrub(volumes, from) {
        ScrubLine::End => answer_done(id, port, cx),
        ScrubLine::Further(next) => answer(id, further(from, next, cx), port, cx),
        ScrubLine::Line { read, next } => {
            let Some(buf) = cx.pool.alloc(read.bytes) else {
                cx.cache.cancel_ssd_read(read);
                return answer(id, further(from, from, cx), port, cx);
            };
            let offset = read.offset;
            let token = port.begin(Op::ScrubCache {
                id,
                permission: read,
                next: ScrubAt::Cache { line: next },
            });
            cx.actions.push(Action::CacheRead { token, offset, buf });
        }
    }
}

/// A line of the cache was read.
pub(super) fn scrubbed_cache(
    id: RequestId,
    permission: SsdRead,
    next: ScrubAt,
    result: Result<Done, IoError>,
    port: &mut Port,
    cx: &mut Context<'_>,
) {
    let data = match &result {
        Ok(Done::Read(data)) => Some(&**data),
        _ => None,
    };
    let read_bytes = permission.bytes as u64;
    let bad = cx.cache.finish_scrub(permission, data);
    let passed_bytes = match next {
        ScrubAt::Cache { line } => cx.cache.scrubbed_bytes(line - 1, line),
        _ => read_bytes,
    };
    let found = Scrubbed {
        next: Some(next),
        read_bytes,
        passed_bytes,
        bad_blocks: bad,
        healed_blocks: bad,
        damaged: None,
    };
    answer(id, found, port, cx);
}

/// Nothing was read from the line `from` to the line `next`.
fn further(from: u64, next: u64, cx: &Context<'_>) -> Scrubbed {
    Scrubbed {
        next: Some(ScrubAt::Cache { line: next }),
        passed_bytes: cx.cache.scrubbed_bytes(from, next),
        ..Scrubbed::default()
    }
}
