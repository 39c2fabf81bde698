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
use super::port::Kind;
use super::{Context, Volume};
use crate::base::buf::Buf;
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, Reply, RequestId, SectorRange};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS};
use crate::cache::{ScrubLine, SsdRead};
use crate::format::{EntryKind, SpanHeader, block_checksum};
use crate::log::extent_index::Sequence;
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
}

impl Volume {
    pub(super) fn scrub(&mut self, id: RequestId, at: ScrubAt, cx: &mut Context<'_>) {
        match at {
            ScrubAt::Log {
                position,
                end,
                tries,
            } => self.scrub_log(id, position, end, tries, cx),
            ScrubAt::Cache { line } => self.scrub_cache(id, line, cx),
            // That is the home's.
            ScrubAt::Home { .. } => self.end_scrub(id, cx),
        }
    }

    fn scrubbed(&mut self, id: RequestId, found: Scrubbed, cx: &mut Context<'_>) {
        let result = if self.port.is_fenced() {
            Err(RequestError::Fenced)
        } else {
            Ok(Reply::Scrubbed(found))
        };
        self.port.reply(id, Kind::Other, result, cx);
    }

    /// Nothing more can be scrubbed of this part.
    pub(super) fn end_scrub(&mut self, id: RequestId, cx: &mut Context<'_>) {
        self.scrubbed(id, Scrubbed::default(), cx);
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
            return self.end_scrub(id, cx);
        }
        if self.health.refuses_for_silent_log(self.config.when_full) {
            return self.port.reply(id, Kind::Other, Err(RequestError::Io), cx);
        }
        let end = end.min(self.log.get().durable());
        let Some(mut piece) = self.log_piece(id, position, end) else {
            return self.end_scrub(id, cx);
        };
        // It may be another one than that which was bad: the log goes on.
        piece.tries = if piece.position == position { tries } else { 0 };
        let Some(buf) = cx.pool.alloc(piece.blocks as usize * BLOCK_BYTES) else {
            let next = Some(ScrubAt::Log {
                position,
                end,
                tries,
            });
            return self.scrubbed(
                id,
                Scrubbed {
                    next,
                    ..Scrubbed::default()
                },
                cx,
            );
        };
        let position = piece.position;
        let op = Op::ScrubLog(piece);
        self.log.read(position, op, buf, &mut self.port, cx);
    }

    /// The first piece of a live span from a position on.
    fn log_piece(&self, id: RequestId, position: u64, end: u64) -> Option<LogPiece> {
        let (span, entries) = self.log.get().span_after(position, end)?;
        let from = if position == 0 {
            span.position
        } else {
            position
        };
        let piece = |sequence, at: u64, until: u64| LogPiece {
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
        let (sequence, data) = self.entry_after(&entries, position)?;
        Some(piece(Some(sequence), position.max(data.start), data.end))
    }

    /// The entry of a span whose data is first from a position on, and where that is. Compressed ones lie
    /// after the others.
    fn entry_after(
        &self,
        entries: &Range<Sequence>,
        position: u64,
    ) -> Option<(Sequence, Range<u64>)> {
        self.entries_with_data(entries)
            .filter(|(_, data)| data.end > position)
            .min_by_key(|(_, data)| data.start)
    }

    /// The entries that have data, and its positions.
    fn entries_with_data(
        &self,
        entries: &Range<Sequence>,
    ) -> impl Iterator<Item = (Sequence, Range<u64>)> + '_ {
        entries.clone().filter_map(|sequence| {
            let entry = self.log.get().entry(sequence);
            (entry.kind == EntryKind::Write).then(|| (sequence, entry.positions(entry.range)))
        })
    }

    pub(super) fn scrubbed_log(
        &mut self,
        mut piece: LogPiece,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let data = match result {
            Ok(Done::Read(data)) => Some(data),
            _ => None,
        };
        piece.unread = data.is_none();
        let is_bad = |index: u64| match &data {
            None => true,
            Some(data) => {
                let start = index as usize * BLOCK_BYTES;
                let sum = self.log.get().checksum(piece.position + index);
                block_checksum(&data[start..start + BLOCK_BYTES]) != sum
            }
        };
        let bad: Range<u64> = if piece.sequence.is_some() {
            let first = (0..piece.blocks).find(|&index| is_bad(index));
            let last = (0..piece.blocks).rev().find(|&index| is_bad(index));
            first.map_or(0..0, |first| first..last.unwrap_or(first) + 1)
        } else {
            let found = data.as_ref().map(|data| SpanHeader::verify(data));
            let is_good = found.is_some_and(|header| {
                header.is_ok_and(|header| header.checksum.get() == piece.control)
            });
            0..if is_good { 0 } else { piece.blocks }
        };
        piece.bad = match piece.sequence {
            Some(_) => bad.clone().filter(|&index| is_bad(index)).count() as u64,
            None => bad.end,
        };
        let read_bytes = piece.blocks * BLOCK_BYTES as u64;
        drop(data);
        // What was retired meanwhile is not needed any more.
        let first = self.log.get().first_sequence();
        let is_live = match piece.sequence {
            Some(sequence) => sequence >= first,
            None => {
                (self.log.get().spans().front()).is_some_and(|span| span.position <= piece.position)
            }
        };
        if bad.is_empty() || !is_live {
            self.log.unpin(piece.position);
            if piece.sequence.is_some() && !piece.unread {
                self.found_good(&(piece.position..piece.position + piece.blocks));
            }
            let found = Scrubbed {
                next: Some(piece.next(0)),
                read_bytes,
                passed_bytes: (piece.skipped + piece.blocks) * BLOCK_BYTES as u64,
                ..Scrubbed::default()
            };
            return self.scrubbed(piece.id, found, cx);
        }
        if piece.tries == 0 {
            // What was wrong may have been the way, and not the medium.
            self.log.unpin(piece.position);
            let found = Scrubbed {
                next: Some(piece.next(1)),
                read_bytes,
                ..Scrubbed::default()
            };
            return self.scrubbed(piece.id, found, cx);
        }
        if let Some(data) = self.healing(&piece, &bad)
            && piece.tries == 1
        {
            let (offset, _) = self.log.get().locate(piece.position + bad.start);
            let token = self.port.begin(Op::ScrubHeal(piece));
            let data = alloc::vec![data];
            cx.actions.push(Action::LogWrite {
                token,
                offset,
                data,
            });
            return;
        }
        self.tell_damage(&piece, bad, read_bytes, cx);
    }

    /// The bytes of bad blocks of a piece, if memory has them as they are stored.
    fn healing(&self, piece: &LogPiece, bad: &Range<u64>) -> Option<Buf> {
        let entry = self.log.get().entry(piece.sequence?);
        if entry.stored.is_some() {
            return None;
        }
        let held = entry.data.as_ref()?.covering_blocks();
        let at = piece.position + bad.start;
        let start = (at - entry.position) as usize * BLOCK_BYTES;
        let end = start + (bad.end - bad.start) as usize * BLOCK_BYTES;
        let data = held.slice(start..end);
        let may_write = !self.log.has_failed() && !self.log.is_given_up();
        (may_write && self.log.blocks_match(&data, at)).then_some(data)
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
        self.scrubbed(piece.id, found, cx);
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
        let (damaged, is_needed) = self.damaged_by(piece, &positions);
        if damaged.is_none() {
            // Its data is good, or in memory. Once that is destaged, no replay needs what is bad.
            self.destage_all();
            found.healed_blocks = piece.bad;
        }
        if is_needed && !piece.unread {
            self.note_bad(positions, cx);
        }
        found.damaged = damaged;
        self.scrubbed(piece.id, found, cx);
    }

    /// What is lost with bad blocks at these positions, and whether a part of it is needed: what a later write
    /// covers is nobody's loss, if destage comes to leave it out. Compressed entries may share a block; what lies
    /// between two that are lost is counted too.
    fn damaged_by(&self, piece: &LogPiece, positions: &Range<u64>) -> (Option<SectorRange>, bool) {
        let span = self.log.get().span_after(positions.start, piece.end);
        let (Some(_), Some((_, entries))) = (piece.sequence, span) else {
            return (None, false);
        };
        let (mut damaged, mut is_needed) = (None::<SectorRange>, false);
        for (sequence, data) in self.entries_with_data(&entries) {
            let (first, end) = (positions.start.max(data.start), positions.end.min(data.end));
            if first >= end || self.is_held(sequence, &data, first..end) {
                continue;
            }
            let entry = self.log.get().entry(sequence);
            let range = if entry.stored.is_some() {
                entry.range
            } else {
                let block = entry.range.first_block();
                let sector = |position| (block + position - data.start) * BLOCK_SECTORS;
                SectorRange::between(sector(first), sector(end)).intersect(entry.range)
            };
            let mut parts = self.index.overlaps(range);
            is_needed |= parts.any(|(_, found)| found == sequence);
            damaged = Some(damaged.map_or(range, |other| {
                let start = other.start.min(range.start);
                SectorRange::between(start, other.end().max(range.end()))
            }));
        }
        (damaged, is_needed)
    }

    /// Whether memory has, as it was written, what an entry stores at some of its positions.
    fn is_held(&self, sequence: Sequence, data: &Range<u64>, positions: Range<u64>) -> bool {
        let entry = self.log.get().entry(sequence);
        match (&entry.data, entry.stored) {
            (None, _) => false,
            (Some(_), Some(_)) => true,
            (Some(held), None) => {
                let at = |position: u64| (position - data.start) as usize * BLOCK_BYTES;
                let blocks = &held.covering_blocks()[at(positions.start)..at(positions.end)];
                self.log.blocks_match(blocks, positions.start)
            }
        }
    }

    fn scrub_cache(&mut self, id: RequestId, from: u64, cx: &mut Context<'_>) {
        let number = self.config.number;
        let volumes = [number, self.cached.origin().unwrap_or(number)];
        match cx.cache.next_to_scrub(volumes, from) {
            ScrubLine::End => self.end_scrub(id, cx),
            ScrubLine::Further(next) => self.scrubbed(id, further(from, next, cx), cx),
            ScrubLine::Line { read, next } => {
                let Some(buf) = cx.pool.alloc(read.bytes) else {
                    cx.cache.cancel_ssd_read(read);
                    return self.scrubbed(id, further(from, from, cx), cx);
                };
                let offset = read.offset;
                let token = self.port.begin(Op::ScrubCache {
                    id,
                    permission: read,
                    next: ScrubAt::Cache { line: next },
                });
                cx.actions.push(Action::CacheRead { token, offset, buf });
            }
        }
    }

    pub(super) fn scrubbed_cache(
        &mut self,
        id: RequestId,
        permission: SsdRead,
        next: ScrubAt,
        result: Result<Done, IoError>,
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
        self.scrubbed(id, found, cx);
    }
}

/// Nothing was read from the line `from` to the line `next`.
fn further(from: u64, next: u64, cx: &Context<'_>) -> Scrubbed {
    Scrubbed {
        next: Some(ScrubAt::Cache { line: next }),
        passed_bytes: cx.cache.scrubbed_bytes(from, next),
        ..Scrubbed::default()
    }
}
