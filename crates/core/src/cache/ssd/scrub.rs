//! Verifying lines that nobody reads. A bad one is dropped as if a read had found it: its next read
//! fetches it again.

use super::{BlockKey, Line, SegmentState, Ssd, SsdRead, block_checksum, has_checksums};
use crate::base::limits::BLOCK_BYTES;

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
        let end = self.index.lines() as u64;
        if !self.is_ready_phase() || from >= end {
            return ScrubLine::End;
        }
        let until = end.min(from + LOOKS_MAX);
        for number in from..until {
            let line = Line(number as u32);
            let segment = self.index.segment_of(line);
            let state = self.segments[segment].state;
            let is_there = matches!(state, SegmentState::Sealed | SegmentState::Emptying);
            if !is_there || !self.index.leads_to(line, volumes) {
                continue;
            }
            let Some(pins) = self.segments[segment].pins.checked_add(1) else {
                continue;
            };
            self.segments[segment].pins = pins;
            self.permissions += 1;
            let key = BlockKey(self.index.primary(line).unwrap_or_default());
            let read = SsdRead {
                key,
                offset: self.line_offset(line),
                bytes: self.index.place_of(line).bytes(),
                blocks: self.layout.line_blocks as u64,
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
            let (room, lines) = (self.layout.room_blocks(), self.layout.lines_per_segment);
            number * room as u64 / lines as u64 * BLOCK_BYTES as u64
        };
        position(next) - position(from)
    }

    /// See [`super::super::ReadCache::finish_scrub`].
    pub fn finish_scrub(&mut self, read: &SsdRead, data: Option<&[u8]>) -> u64 {
        if self.segments.is_empty() {
            // Offline: the checksums are gone.
            self.cancel(read);
            return 0;
        }
        let line = Line(read.line);
        // Of a compressed line a bad block is the whole line.
        let bad = match data {
            Some(data) if self.index.is_packed(line) => {
                let is_sound = has_checksums(data, self.index.checksums(line));
                u64::from(!is_sound) * self.layout.line_blocks as u64
            }
            Some(data) => {
                let blocks = data
                    .chunks_exact(BLOCK_BYTES)
                    .zip(self.index.checksums(line));
                blocks
                    .filter(|&(block, &sum)| block_checksum(block) != sum)
                    .count() as u64
            }
            None => self.layout.line_blocks as u64,
        };
        self.cancel(read);
        self.count_outcome(false, data.is_some());
        if bad > 0 {
            self.counters.corrupt_blocks += if data.is_some() { bad } else { 0 };
            if self.is_ready_phase() {
                self.distrust(line);
            }
        }
        bad
    }
}
