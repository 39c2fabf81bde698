//! Verifying lines that nobody reads. A bad one is dropped as if a read had found it: its next read
//! fetches it again.

use super::segments::SegmentState;
use super::store::has_checksums;
use super::{BlockKey, Line, Ssd, SsdRead};
use crate::base::limits::BLOCK_BYTES;
use crate::format::block_checksum;

/// Lines that are looked at in one step: bounds its time, for most of them may be other volumes'.
const LOOKS_MAX: u64 = 4096;

/// What a scrub has to do next.
#[derive(Debug)]
pub enum ScrubLine {
    /// Read this line, whole, and give the permission back.
    Line {
        /// Where.
        read: SsdRead,
        /// The number after it.
        next: u64,
    },
    /// Look on from this number.
    Further(u64),
    /// There is no more.
    End,
}

impl Ssd {
    /// See [`super::super::ReadCache::next_to_scrub`]. What is not on the medium yet is passed over.
    pub fn next_to_scrub(&mut self, volumes: [u32; 2], from: u64) -> ScrubLine {
        let end = self.store.index.lines() as u64;
        if !self.is_ready_phase() || from >= end {
            return ScrubLine::End;
        }
        let until = end.min(from + LOOKS_MAX);
        for number in from..until {
            let line = Line(number as u32);
            let segment = self.store.index.segment_of(line);
            let state = self.store.segments.state(segment);
            let is_there = matches!(state, SegmentState::Sealed | SegmentState::Emptying);
            if !is_there || !self.store.index.leads_to(line, volumes) {
                continue;
            }
            if !self.store.permit(line) {
                continue;
            }
            let key = BlockKey(self.store.index.primary(line).unwrap_or_default());
            let blocks = self.store.layout.line_blocks as u64;
            let read = SsdRead {
                key,
                offset: self.store.line_offset(line),
                bytes: self.store.index.place_of(line).bytes(),
                blocks,
                reach: blocks,
                is_packed: self.store.index.is_packed(line),
                line: line.0,
            };
            return ScrubLine::Line {
                read,
                next: number + 1,
            };
        }
        ScrubLine::Further(until)
    }

    /// See [`super::super::ReadCache::scrubbed_bytes`].
    pub fn scrubbed_bytes(&self, from: u64, next: u64) -> u64 {
        let position = |number: u64| {
            let (room, lines) = (
                self.store.layout.room_blocks(),
                self.store.layout.lines_per_segment,
            );
            number * room as u64 / lines as u64 * BLOCK_BYTES as u64
        };
        position(next) - position(from)
    }

    /// See [`super::super::ReadCache::finish_scrub`].
    pub fn finish_scrub(&mut self, read: &SsdRead, data: Option<&[u8]>) -> u64 {
        if self.store.is_given_up() {
            self.store.cancel(read);
            return 0;
        }
        let line = Line(read.line);
        // Of a compressed line a bad block is the whole line.
        let bad = match data {
            Some(data) if self.store.index.is_packed(line) => {
                let is_sound = has_checksums(data, self.store.index.checksums(line));
                u64::from(!is_sound) * self.store.layout.line_blocks as u64
            }
            Some(data) => {
                let blocks = data
                    .chunks_exact(BLOCK_BYTES)
                    .zip(self.store.index.checksums(line));
                blocks
                    .filter(|&(block, &sum)| block_checksum(block) != sum)
                    .count() as u64
            }
            None => self.store.layout.line_blocks as u64,
        };
        self.store.cancel(read);
        self.count_outcome(false, data.is_some());
        if bad > 0 {
            self.store.counters.corrupt_blocks += if data.is_some() { bad } else { 0 };
            self.is_bad(line);
        }
        bad
    }
}
