//! Evicting segments, and what stays: lines that were used, and lines that are pinned. See the module
//! above.
//!
//! What was used is kept, weighed by what it is worth (`benefit`), up to half of what is not pinned, of the
//! blocks and of the lines of the segment. Pinned lines are kept all; a segment of which they are most is
//! passed over, as if it had been sealed anew. So each segment that is emptied gives an eighth of itself back
//! at least. When all are passed over and room is short, which pins of clones beside what they inherited
//! can bring about, a segment is emptied as if nothing were pinned: the tier never runs out of room for the
//! sake of pins.

use super::super::benefit::{GAIN_MAX, unproven};
use super::super::ghost::Ring;
use super::super::marks::FREE_SEGMENTS_MIN;
use super::super::pins::{PinRefused, whole_lines};
use super::segments::SegmentState;
use super::store::{NewLine, line_checksums};
use super::{Action, BLOCK_BYTES, CACHE_READS_MAX, Line, Op, Ssd, Stream, Vec, mix};
use crate::base::io::BlockKey;
use crate::base::limits::CACHE_PASS_OVER_RATIO;

/// One segment in so many belongs to the small stream.
const SMALL_SHARE: usize = 10;
/// The largest number of uses that is counted of a line.
const USES_MAX: u8 = 3;
/// Segments of one stream that are passed over at once: bounds the time of a poll.
const PASSES_MAX: usize = 64;

/// The segment that is being evicted.
#[derive(Debug)]
pub(super) struct Emptying {
    segment: usize,
    next_slot: usize,
    reads: usize,
    /// Whether pinned lines are kept.
    keeps_pins: bool,
    /// For each slot, what its line's worth adds to the number of its uses.
    bonuses: Vec<i8>,
    /// Lines that were used so often are kept,
    uses_min: u8,
    /// and of those that were used once less such a share,
    others_left: usize,
    /// but no larger share than this.
    keep_left: usize,
}

impl Ssd {
    fn pinned_blocks_max(&self) -> u64 {
        let layout = &self.store.layout;
        let blocks = layout.segments * layout.room_blocks();
        (blocks * usize::from(self.eviction.marks.pin_ratio_max) / 100) as u64
    }

    pub fn may_pin(&self, volume: u32, ranges: &[(u64, u64)]) -> Result<(), PinRefused> {
        let lines = whole_lines(ranges, self.store.layout.line_blocks as u64);
        let asked: u64 = lines.iter().map(|(first, end)| end - first).sum();
        let others = self.pins.blocks_beside(volume);
        let max = self.pinned_blocks_max();
        if asked > 0 && asked + others > max {
            let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
            return Err(PinRefused::TooMuch {
                asked_bytes: bytes(asked),
                others_bytes: bytes(others),
                max_bytes: bytes(max),
            });
        }
        Ok(())
    }

    pub fn pin(&mut self, volume: u32, origin: Option<u32>, ranges: &[(u64, u64)]) {
        let lines = whole_lines(ranges, self.store.layout.line_blocks as u64);
        let max = self.pinned_blocks_max();
        let pinned = self.pins.set(volume, origin, lines, max);
        assert!(pinned.is_ok(), "whoever pins has asked whether it may");
        self.passed_over = [0; 2];
        self.all_pinned_at = 0;
    }

    /// The address under which a line is pinned, if it is.
    fn pinned_key(&self, line: Line) -> Option<u64> {
        if self.pins.is_empty() {
            return None;
        }
        let primary = self.store.index.primary(line);
        primary.filter(|&key| self.pins.contains(key)).or_else(|| {
            let mut aliases = self
                .store
                .index
                .aliases_of(self.store.index.segment_of(line));
            let found = aliases.find(|&(key, of)| of == line && self.pins.contains(key));
            found.map(|(key, _)| key)
        })
    }

    /// One bit for each slot of a segment whose line is pinned.
    fn pinned_bits(&self, segment: usize) -> u128 {
        if self.pins.is_empty() {
            return 0;
        }
        let primaries = (0..self.store.layout.lines_per_segment).filter(|&slot| {
            let key = self
                .store
                .index
                .primary(self.store.index.line_at(segment, slot));
            key.is_some_and(|key| self.pins.contains(key))
        });
        let aliases = self.store.index.aliases_of(segment);
        let aliases = aliases.filter(|&(key, _)| self.pins.contains(key));
        primaries
            .chain(aliases.map(|(_, line)| self.store.index.slot_of(line)))
            .fold(0, |bits, slot| bits | 1 << slot)
    }

    /// The share of a segment that the lines have whose bits are set.
    fn share_of_bits(&self, segment: usize, bits: u128) -> usize {
        (0..self.store.layout.lines_per_segment)
            .filter(|&slot| bits >> slot & 1 == 1)
            .map(|slot| self.share_of(self.store.index.line_at(segment, slot)))
            .sum()
    }

    /// The share of a segment that a line has: of its blocks or of its lines, whichever is more.
    fn share_of(&self, line: Line) -> usize {
        let blocks = usize::from(self.store.index.place_of(line).blocks);
        (blocks * self.store.layout.lines_per_segment).max(self.store.layout.room_blocks())
    }

    /// The share that is a whole segment.
    fn whole_segment(&self) -> usize {
        self.store.layout.room_blocks() * self.store.layout.lines_per_segment
    }

    fn is_mostly_pinned(&self, segment: usize) -> bool {
        let pinned = self.share_of_bits(segment, self.pinned_bits(segment));
        pinned * 100 >= self.whole_segment() * CACHE_PASS_OVER_RATIO
    }

    pub(super) fn drive_emptying(&mut self, actions: &mut Vec<Action>) {
        if self.emptying.is_none()
            && !self.closing
            && self
                .eviction
                .is_due(self.store.segments.free(), self.store.segments.len())
        {
            self.begin_emptying();
        }
        while let Some(emptying) = &self.emptying {
            if emptying.reads >= CACHE_READS_MAX {
                return;
            }
            let segment = emptying.segment;
            if emptying.next_slot == self.store.layout.lines_per_segment {
                if emptying.reads == 0 {
                    self.finish_emptying();
                }
                return;
            }
            let line = self.store.index.line_at(segment, emptying.next_slot);
            let keeps_pins = emptying.keeps_pins;
            if let Some(key) = self.pinned_key(line).filter(|_| keeps_pins) {
                // It waits for memory, or for a segment to be written, rather than be lost.
                if !self.can_keep() || !self.keep(line, key, actions) {
                    return;
                }
            } else if let Some(key) = self.store.index.primary(line)
                && !(self.is_worth_keeping(line) && self.keep(line, key, actions))
            {
                self.evict(line, key);
            }
            if let Some(emptying) = &mut self.emptying {
                emptying.next_slot += 1;
            }
        }
    }

    /// The doublings by which a volume's lines are worth more than the mean of the main stream.
    pub fn gain(&self, volume: u32) -> i32 {
        self.worths.gain(volume, Stream::Main as usize)
    }

    /// Whether taking a line of this volume drives out what is worth more.
    pub fn drives_out_for(&self, volume: u32) -> bool {
        self.takes_lines()
            && self.store.segments.free() <= FREE_SEGMENTS_MIN
            && self.gain(volume) < 0
    }

    /// For each slot of a segment, what its line's worth adds to the number of its uses: of what is worth
    /// more, enough to be kept before others, now and then nothing, so that it ages; of what is worth less, now and then
    /// nothing, else so little that its uses do not count.
    fn bonuses(&mut self, stream: Stream, segment: usize) -> Vec<i8> {
        let bonus = |slot| {
            let line = self.store.index.line_at(segment, slot);
            let (key, uses) = (self.store.index.primary(line), self.store.index.uses(line));
            let gain = key.map_or(0, |key| {
                self.worths.pass(BlockKey(key).volume(), stream as usize)
            });
            let is_new = uses == 0 && stream == Stream::Small;
            let gain = if is_new { unproven(gain) } else { gain };
            let counts_fully = self.worths.is_drawn(gain.abs());
            match gain {
                _ if counts_fully => 0,
                1.. => gain as i8,
                _ => -(USES_MAX as i8),
            }
        };
        (0..self.store.layout.lines_per_segment)
            .map(bonus)
            .collect()
    }

    /// Whether a line that is not pinned is one of the most used ones; counts it among them.
    fn is_worth_keeping(&mut self, line: Line) -> bool {
        let slot = self.store.index.slot_of(line);
        let (uses, share) = (self.store.index.uses(line), self.share_of(line));
        let Some(emptying) = &mut self.emptying else {
            return false;
        };
        let uses = uses.saturating_add_signed(emptying.bonuses[slot]);
        let is_other = uses > 0 && uses + 1 == emptying.uses_min && emptying.others_left >= share;
        if (uses < emptying.uses_min && !is_other) || emptying.keep_left < share {
            return false;
        }
        emptying.others_left -= if is_other { share } else { 0 };
        emptying.keep_left -= share;
        true
    }

    /// Begin to read a line that is to be kept; false if there is no memory for it.
    fn keep(&mut self, line: Line, key: u64, actions: &mut Vec<Action>) -> bool {
        let uses = self.store.index.uses(line);
        let op = Op::Keep { line, key, uses };
        let (offset, bytes) = (
            self.store.line_offset(line),
            self.store.index.place_of(line).bytes(),
        );
        let is_begun = self.device.read(op, offset, bytes, actions).is_some();
        if let Some(emptying) = &mut self.emptying {
            emptying.reads += usize::from(is_begun);
        }
        is_begun
    }

    /// Whether a line that is kept now finds a place, or none will come by waiting.
    fn can_keep(&self) -> bool {
        let writer = &self.store.writer;
        writer.is_open(Stream::Main) || self.store.segments.free() == 0 || writer.can_open()
    }

    /// The segment to be emptied next, its stream, and whether its pinned lines are kept.
    fn next_to_empty(&mut self) -> Option<(Stream, usize, bool)> {
        if self.all_pinned_at == self.store.segments.next_sequence() {
            return None;
        }
        let segments = &self.store.segments;
        let small_first = segments.sealed(Stream::Small) > segments.len() / SMALL_SHARE
            || segments.sealed(Stream::Main) == 0;
        let order = if small_first {
            [Stream::Small, Stream::Main]
        } else {
            [Stream::Main, Stream::Small]
        };
        for stream in order {
            for _ in 0..self.store.segments.sealed(stream).min(PASSES_MAX) {
                let number = self.store.segments.oldest(stream)?;
                if self.store.segments.state(number) != SegmentState::Sealed {
                    break;
                }
                if !self.is_mostly_pinned(number) {
                    self.passed_over = [0; 2];
                    return Some((stream, number, true));
                }
                self.store.segments.pass_over(stream);
                self.passed_over[stream as usize] += 1;
            }
        }
        let passed = |stream: Stream| {
            self.passed_over[stream as usize] >= self.store.segments.sealed(stream)
        };
        if self.store.writer.is_writing() || !order.into_iter().all(passed) {
            return None;
        }
        if self.store.segments.free() >= FREE_SEGMENTS_MIN {
            // Until another segment is sealed, looking again finds nothing else.
            self.all_pinned_at = self.store.segments.next_sequence();
            return None;
        }
        let oldest = |stream: Stream| {
            let number = self.store.segments.oldest(stream)?;
            Some((stream, number, false))
        };
        order.into_iter().find_map(oldest)
    }

    fn begin_emptying(&mut self) {
        let Some((stream, segment, keeps_pins)) = self.next_to_empty() else {
            return;
        };
        self.store.segments.empty_oldest(stream);
        // Before any of its addresses is turned elsewhere.
        let entry = self.store.segments.void(segment);
        self.journal.record(entry);
        let lines = self.store.layout.lines_per_segment;
        let pinned = if keeps_pins {
            self.pinned_bits(segment)
        } else {
            self.store.counters.losses += 1;
            0
        };
        let pinned_share = self.share_of_bits(segment, pinned);
        let keep = self.whole_segment().saturating_sub(pinned_share) / 2;
        let bonuses = self.bonuses(stream, segment);
        let used = |least: u8| -> usize {
            (0..lines)
                .filter(|&slot| pinned >> slot & 1 == 0)
                .map(|slot| (self.store.index.line_at(segment, slot), bonuses[slot]))
                .filter(|&(line, bonus)| {
                    self.store.index.uses(line).saturating_add_signed(bonus) >= least
                })
                .map(|(line, _)| self.share_of(line))
                .sum()
        };
        // At most half is kept, the most used, so that eviction always makes room.
        let uses_max = USES_MAX + GAIN_MAX as u8;
        let uses_min = (1..=uses_max).find(|&least| used(least) <= keep);
        let uses_min = uses_min.unwrap_or(uses_max + 1);
        let others_left = keep - used(uses_min);
        self.emptying = Some(Emptying {
            segment,
            next_slot: 0,
            reads: 0,
            keeps_pins,
            bonuses,
            uses_min,
            others_left,
            keep_left: keep,
        });
    }

    fn evict(&mut self, line: Line, key: u64) {
        let segment = self.store.index.segment_of(line);
        if self.store.segments.stream(segment) == Stream::Small {
            self.ghost.insert(mix(key), Ring::Small);
        }
        self.store.index.unmap_primary(line);
        self.store.counters.evicted_lines += 1;
    }

    pub(super) fn keep_read(&mut self, line: Line, key: u64, uses: u8, data: Option<&[u8]>) {
        let Some(emptying) = &mut self.emptying else {
            return;
        };
        emptying.reads -= 1;
        if self.store.find(key) != Some(line) {
            return;
        }
        let (sums, blocks) = line_checksums(data.unwrap_or_default());
        let sums = &sums[..blocks];
        let sound = self.store.index.checksums(line) == sums;
        if data.is_some() && !sound {
            self.store.counters.corrupt_blocks += 1;
        }
        let is_pinned = self.pins.contains(key);
        let Some(data) = data.filter(|_| sound) else {
            self.store.index.unmap_line(line);
            self.store.counters.losses += u64::from(is_pinned);
            return;
        };
        let segment = self.store.index.segment_of(line);
        let aliases = self.store.index.aliases_of(segment);
        let aliases: Vec<u64> = aliases
            .filter(|&(other, of)| of == line && other != key && self.pins.contains(other))
            .filter(|&(other, _)| !self.store.forgets(other))
            .map(|(other, _)| other)
            .collect();
        let was_small = self.store.segments.stream(segment) == Stream::Small;
        self.store.index.unmap_line(line);
        let shareable = self.store.index.find_content(sums).is_none();
        let kept = NewLine {
            key,
            data,
            checksums: sums,
            shareable,
        };
        if let Some(kept) = self.append(Stream::Main, kept) {
            let uses = if was_small { 0 } else { uses.saturating_sub(1) };
            self.store.index.set_uses(kept, uses);
            for alias in aliases {
                if !self.store.index.add_alias(alias, kept) {
                    self.store.counters.losses += 1;
                }
            }
        } else {
            self.store.counters.evicted_lines += 1;
            self.store.counters.losses += u64::from(is_pinned);
        }
    }

    fn finish_emptying(&mut self) {
        let Some(emptying) = &self.emptying else {
            return;
        };
        let segment = emptying.segment;
        // Permissions that were given stay good: checksums go only when the last is back.
        if self.store.segments.is_read(segment) {
            return;
        }
        self.store.index.clear_segment(segment);
        self.store.segments.release(segment);
        self.emptying = None;
    }
}
