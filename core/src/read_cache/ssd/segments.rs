//! Filling, sealing, comparing and evicting segments. See the module above.

use super::super::ghost::Ring;
use super::{
    Action, BLOCK_BYTES, Buf, BufMut, CACHE_READS_MAX, CACHE_SEGMENT_WRITES_MAX, Entry, Line, Op,
    SEGMENT_BYTES, SegmentState, Ssd, Stream, Token, Vec, block_checksum, mix, vec,
};
use crate::format::{CACHE_FOOTER_MAGIC, CACHE_VERSION, CacheFooter};
use crate::io::BlockKey;
use crate::limits::CACHE_LINE_BLOCKS_MAX;
use zerocopy::FromZeros;

/// One segment in so many belongs to the small stream.
const SMALL_SHARE: usize = 10;
/// Lines whose bytes are being compared, and the buffers that they hold.
const COMPARES_MAX: usize = CACHE_READS_MAX / 2;

/// A segment that collects lines.
#[derive(Debug)]
pub(super) struct Open {
    segment: usize,
    slots: usize,
    buf: BufMut,
}

/// A line that may have the same bytes as one on the medium.
#[derive(Debug)]
pub(super) struct Compare {
    pub(super) key: u64,
    candidate: Line,
    data: Buf,
    token: Option<Token>,
    /// Its address was invalidated meanwhile.
    pub(super) cancelled: bool,
}

/// The segment that is being evicted.
#[derive(Debug)]
pub(super) struct Emptying {
    segment: usize,
    next_slot: usize,
    reads: usize,
    /// Lines that were used so often are kept,
    uses_min: u8,
    /// and so many of those that were used once less,
    others_left: usize,
    /// but no more than this.
    keep_left: usize,
}

fn line_checksums(data: &[u8]) -> ([u32; CACHE_LINE_BLOCKS_MAX], usize) {
    let mut sums = [0; CACHE_LINE_BLOCKS_MAX];
    let mut blocks = 0;
    for (sum, block) in sums.iter_mut().zip(data.chunks_exact(BLOCK_BYTES)) {
        *sum = block_checksum(block);
        blocks += 1;
    }
    (sums, blocks)
}

impl Ssd {
    pub(super) fn offset_in_segment(&self, line: Line) -> usize {
        line.0 as usize % self.layout.lines_per_segment * self.layout.line_bytes()
    }

    pub(super) fn line_offset(&self, line: Line) -> u64 {
        let slot = line.0 as usize % self.layout.lines_per_segment;
        self.layout.line_offset(self.index.segment_of(line), slot)
    }

    /// The bytes of a line that is not on the medium yet.
    pub(super) fn line_in_memory(&self, line: Line) -> Option<&[u8]> {
        let segment = self.index.segment_of(line);
        let start = self.offset_in_segment(line);
        let range = start..start + self.layout.line_bytes();
        if let Some(buf) = self.writing.get(&(segment as u32)) {
            return Some(&buf[range]);
        }
        let mut open = self.open.iter().flatten();
        open.find(|open| open.segment == segment)
            .map(|open| &open.buf[range])
    }

    /// Take the complete lines among consecutive blocks.
    pub fn fill(&mut self, first: BlockKey, data: &Buf) {
        if !self.is_ready_phase() || self.closing {
            return;
        }
        let line_blocks = self.layout.line_blocks as u64;
        let bytes = self.layout.line_bytes();
        let mut key = first.0.next_multiple_of(line_blocks);
        let mut start = (key - first.0) as usize * BLOCK_BYTES;
        while start + bytes <= data.len() {
            self.fill_line(key, data.slice(start..start + bytes));
            key += line_blocks;
            start += bytes;
        }
    }

    fn fill_line(&mut self, key: u64, data: Buf) {
        let (sums, blocks) = line_checksums(&data);
        let sums = &sums[..blocks];
        if let Some(line) = self.index.find(key) {
            if self.index.checksums(line) == sums {
                return;
            }
            // The content has changed, and the invalidation is still to come.
            self.invalidate(BlockKey(key), blocks as u64);
        }
        if let Some(compare) = self.compares.iter_mut().find(|compare| compare.key == key) {
            compare.cancelled = true;
            return;
        }
        let candidate = self.index.find_content(sums);
        if let Some(candidate) = candidate {
            match self
                .line_in_memory(candidate)
                .map(|bytes| bytes == &data[..])
            {
                Some(true) if self.index.add_alias(key, candidate) => {
                    self.counters.shared_lines += 1;
                    return;
                }
                None if self.compares.len() < COMPARES_MAX => {
                    let segment = self.index.segment_of(candidate);
                    let pins = self.segments[segment].pins;
                    if let Some(pins) = pins.checked_add(1) {
                        self.segments[segment].pins = pins;
                        self.compares.push(Compare {
                            key,
                            candidate,
                            data,
                            token: None,
                            cancelled: false,
                        });
                        return;
                    }
                }
                _ => {}
            }
        }
        self.fill_unshared(key, &data, sums, candidate.is_none());
    }

    fn fill_unshared(&mut self, key: u64, data: &[u8], sums: &[u32], shareable: bool) {
        let stream = if self.ghost.remove(mix(key)).is_some() {
            Stream::Main
        } else {
            Stream::Small
        };
        if self.append(stream, key, data, sums, shareable).is_some() {
            self.counters.filled_lines += 1;
        }
    }

    /// Put a line into a stream's open segment; its address leads nowhere yet.
    fn append(
        &mut self,
        stream: Stream,
        key: u64,
        data: &[u8],
        sums: &[u32],
        shareable: bool,
    ) -> Option<Line> {
        if self.open[stream as usize].is_none() {
            self.open[stream as usize] = self.open_segment(stream);
        }
        let open = self.open[stream as usize].as_mut()?;
        let line = self.index.line_at(open.segment, open.slots);
        let start = open.slots * data.len();
        open.buf[start..start + data.len()].copy_from_slice(data);
        open.slots += 1;
        let full = open.slots == self.layout.lines_per_segment;
        self.index.place(line, key, sums, shareable);
        if full {
            self.seal(stream);
        }
        Some(line)
    }

    /// Whether lines are taken at all.
    pub fn takes_lines(&self) -> bool {
        self.is_ready_phase() && !self.closing
    }

    fn lines_for(&self, blocks: u64) -> usize {
        blocks.div_ceil(self.layout.line_blocks as u64) as usize
    }

    /// Whether so many blocks can be taken beside those that are promised, before any of the
    /// writes under way ends. With nothing under way there is no use in waiting.
    pub fn has_room(&self, blocks: u64) -> bool {
        if !self.takes_lines() || (self.writing.is_empty() && self.promised_lines == 0) {
            return true;
        }
        let open = self.open[Stream::Small as usize].as_ref();
        let left = open.map_or(0, |open| self.layout.lines_per_segment - open.slots);
        let memory = self
            .pool
            .free_bytes()
            .saturating_sub(self.pool.total_bytes() / 4);
        let segments = CACHE_SEGMENT_WRITES_MAX
            .saturating_sub(self.writing.len() + usize::from(open.is_some()))
            .min(self.free.len())
            .min(memory / SEGMENT_BYTES);
        let room = left + segments * self.layout.lines_per_segment;
        self.promised_lines + self.lines_for(blocks) <= room
    }

    /// So many blocks are being fetched for the tier.
    pub fn promise(&mut self, blocks: u64) {
        self.promised_lines += self.lines_for(blocks);
    }

    /// They are here, or do not come.
    pub fn end_promise(&mut self, blocks: u64) {
        self.promised_lines = self.promised_lines.saturating_sub(self.lines_for(blocks));
    }

    /// Whether a line is here, or will be once it was compared with another.
    pub fn has_taken(&self, key: BlockKey) -> bool {
        let first = self.line_key(key);
        self.contains(key) || self.compares.iter().any(|compare| compare.key == first)
    }

    /// Whether the whole line of a block lies below `end`, so that it can be taken.
    pub fn is_whole(&self, key: BlockKey, end: BlockKey) -> bool {
        self.line_key(key) + self.layout.line_blocks as u64 <= end.0
    }

    fn open_segment(&mut self, stream: Stream) -> Option<Open> {
        // The cache takes no memory that requests may need soon.
        if self.writing.len() >= CACHE_SEGMENT_WRITES_MAX
            || self.pool.free_bytes() < self.pool.total_bytes() / 4
        {
            return None;
        }
        let segment = *self.free.front()? as usize;
        let buf = self.pool.alloc(SEGMENT_BYTES)?;
        self.free.pop_front();
        self.segments[segment].state = SegmentState::Open;
        self.segments[segment].stream = stream;
        Some(Open {
            segment,
            slots: 0,
            buf,
        })
    }

    pub(super) fn has_open(&self) -> bool {
        self.open.iter().any(Option::is_some)
    }

    fn seal(&mut self, stream: Stream) {
        let Some(Open {
            segment,
            slots,
            mut buf,
        }) = self.open[stream as usize].take()
        else {
            return;
        };
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.segments[segment].sequence = sequence;
        self.segments[segment].state = SegmentState::Sealing;
        let mut footer = CacheFooter::new_zeroed();
        footer.magic = CACHE_FOOTER_MAGIC;
        footer.version.set(CACHE_VERSION);
        footer.line_blocks.set(self.layout.line_blocks as u16);
        footer.stream = stream as u8;
        footer.uuid = self.config.uuid;
        footer.format.set(self.root.format);
        footer.sequence.set(sequence);
        footer.segment.set(segment as u32);
        let lines =
            || (0..self.layout.lines_per_segment).map(|slot| self.index.line_at(segment, slot));
        let keys = lines().map(|line| self.index.primary(line).unwrap_or(u64::MAX));
        let sums = lines().flat_map(|line| self.index.checksums(line).iter().copied());
        let (data, last) = buf.split_at_mut(SEGMENT_BYTES - BLOCK_BYTES);
        data[slots * self.layout.line_bytes()..].fill(0);
        footer.write(keys, sums, last);
        self.writing.insert(segment as u32, buf.freeze());
        self.unsent.push_back(segment as u32);
        self.sealed[stream as usize].push_back(segment as u32);
    }

    pub(super) fn drive_writes(&mut self, actions: &mut Vec<Action>) {
        if self.closing {
            for stream in [Stream::Small, Stream::Main] {
                self.seal(stream);
            }
        }
        while let Some(segment) = self.unsent.pop_front() {
            let Some(buf) = self.writing.get(&segment).cloned() else {
                continue;
            };
            let token = self.token(Op::Segment(segment as usize));
            actions.push(Action::CacheWrite {
                token,
                offset: self.layout.segment_offset(segment as usize),
                data: vec![buf],
                durable: self.closing,
            });
        }
    }

    pub(super) fn segment_written(&mut self, segment: usize, ok: bool) {
        if self.writing.remove(&(segment as u32)).is_none() {
            return;
        }
        if ok {
            self.segments[segment].state = SegmentState::Sealed;
            self.counters.written_bytes += SEGMENT_BYTES as u64;
            return;
        }
        // The medium may hold the old footer, the new one, or neither.
        let stream = self.segments[segment].stream;
        self.sealed[stream as usize].retain(|&number| number as usize != segment);
        self.void_segment(segment);
        self.index.clear_segment(segment);
        self.segments[segment].state = SegmentState::Free;
        self.free.push_back(segment as u32);
    }

    /// Void every footer that the segment may have on the medium.
    fn void_segment(&mut self, segment: usize) {
        self.segments[segment].sequence += 1;
        self.record(Entry::Segment {
            segment: segment as u32,
            sequence: self.segments[segment].sequence,
            void: 0,
        });
    }

    pub(super) fn unpin(&mut self, segment: usize) {
        let pins = &mut self.segments[segment].pins;
        *pins = pins.checked_sub(1).expect("a pin is taken before");
    }

    pub(super) fn drive_compares(&mut self, actions: &mut Vec<Action>) {
        let mut index = 0;
        while index < self.compares.len() {
            if self.compares[index].token.is_some() {
                index += 1;
                continue;
            }
            let candidate = self.compares[index].candidate;
            let Some(buf) = self.pool.alloc(self.layout.line_bytes()) else {
                self.compares.swap_remove(index);
                self.unpin(self.index.segment_of(candidate));
                continue;
            };
            let token = self.token(Op::Compare);
            self.compares[index].token = Some(token);
            actions.push(Action::CacheRead {
                token,
                offset: self.line_offset(candidate),
                buf,
            });
            index += 1;
        }
    }

    pub(super) fn compare_read(&mut self, token: Token, stored: Option<&[u8]>) {
        let mut compares = self.compares.iter();
        let Some(index) = compares.position(|compare| compare.token == Some(token)) else {
            return;
        };
        let compare = self.compares.swap_remove(index);
        let segment = self.index.segment_of(compare.candidate);
        self.unpin(segment);
        if compare.cancelled || self.closing || self.index.find(compare.key).is_some() {
            return;
        }
        let (sums, blocks) = line_checksums(&compare.data);
        // The candidate may have lost its last address meanwhile.
        let still = self.index.find_content(&sums[..blocks]);
        if still == Some(compare.candidate)
            && self.segments[segment].state == SegmentState::Sealed
            && stored == Some(&compare.data[..])
            && self.index.add_alias(compare.key, compare.candidate)
        {
            self.counters.shared_lines += 1;
            return;
        }
        self.fill_unshared(compare.key, &compare.data, &sums[..blocks], still.is_none());
    }

    pub(super) fn drive_emptying(&mut self, actions: &mut Vec<Action>) {
        if self.emptying.is_none()
            && !self.closing
            && self.eviction.is_due(self.free.len(), self.segments.len())
        {
            self.begin_emptying();
        }
        while let Some(emptying) = &mut self.emptying {
            if emptying.reads >= CACHE_READS_MAX {
                return;
            }
            let segment = emptying.segment;
            if emptying.next_slot == self.layout.lines_per_segment {
                if emptying.reads == 0 {
                    self.finish_emptying();
                }
                return;
            }
            let line = self.index.line_at(segment, emptying.next_slot);
            emptying.next_slot += 1;
            let Some(key) = self.index.primary(line) else {
                continue;
            };
            let uses = self.index.uses(line);
            let is_other = uses > 0 && uses + 1 == emptying.uses_min && emptying.others_left > 0;
            if (uses >= emptying.uses_min || is_other)
                && emptying.keep_left > 0
                && let Some(buf) = self.pool.alloc(self.layout.line_bytes())
            {
                emptying.others_left -= usize::from(is_other);
                emptying.keep_left -= 1;
                emptying.reads += 1;
                let token = self.token(Op::Keep { line, key, uses });
                let offset = self.line_offset(line);
                actions.push(Action::CacheRead { token, offset, buf });
            } else {
                self.evict(line, key);
            }
        }
    }

    fn begin_emptying(&mut self) {
        let [small, main] = &self.sealed;
        let small_first = small.len() > self.segments.len() / SMALL_SHARE || main.is_empty();
        let order = if small_first {
            [Stream::Small, Stream::Main]
        } else {
            [Stream::Main, Stream::Small]
        };
        let oldest = |stream: Stream| {
            let number = *self.sealed[stream as usize].front()?;
            let state = self.segments[number as usize].state;
            (state == SegmentState::Sealed).then_some((stream, number as usize))
        };
        let Some((stream, segment)) = order.into_iter().find_map(oldest) else {
            return;
        };
        self.sealed[stream as usize].pop_front();
        // Before any of its addresses is turned elsewhere.
        self.void_segment(segment);
        self.segments[segment].state = SegmentState::Emptying;
        let lines = self.layout.lines_per_segment;
        let keep = lines / 2;
        let used = |least: u8| {
            (0..lines)
                .map(|slot| self.index.line_at(segment, slot))
                .filter(|&line| self.index.uses(line) >= least)
                .count()
        };
        // At most half is kept, the most used, so that eviction always makes room.
        let uses_min = (1..4).find(|&least| used(least) <= keep).unwrap_or(4);
        let others_left = keep - used(uses_min);
        self.emptying = Some(Emptying {
            segment,
            next_slot: 0,
            reads: 0,
            uses_min,
            others_left,
            keep_left: keep,
        });
    }

    fn evict(&mut self, line: Line, key: u64) {
        let segment = self.index.segment_of(line);
        if self.segments[segment].stream == Stream::Small {
            self.ghost.insert(mix(key), Ring::Small);
        }
        self.index.unmap_primary(line);
        self.counters.evicted_lines += 1;
    }

    pub(super) fn keep_read(&mut self, line: Line, key: u64, uses: u8, data: Option<&[u8]>) {
        let Some(emptying) = &mut self.emptying else {
            return;
        };
        emptying.reads -= 1;
        if self.index.primary(line) != Some(key) {
            return;
        }
        let (sums, blocks) = line_checksums(data.unwrap_or_default());
        let sums = &sums[..blocks];
        let sound = self.index.checksums(line) == sums;
        if data.is_some() && !sound {
            self.counters.corrupt_blocks += 1;
        }
        let Some(data) = data.filter(|_| sound) else {
            self.index.unmap_line(line);
            return;
        };
        let was_small = self.segments[self.index.segment_of(line)].stream == Stream::Small;
        self.index.unmap_line(line);
        let shareable = self.index.find_content(sums).is_none();
        match self.append(Stream::Main, key, data, sums, shareable) {
            Some(kept) => {
                let uses = if was_small { 0 } else { uses - 1 };
                self.index.set_uses(kept, uses);
            }
            None => self.counters.evicted_lines += 1,
        }
    }

    fn finish_emptying(&mut self) {
        let Some(emptying) = &self.emptying else {
            return;
        };
        let segment = emptying.segment;
        // Permissions that were given stay good: checksums go only when the last is back.
        if self.segments[segment].pins > 0 {
            return;
        }
        self.index.clear_segment(segment);
        self.segments[segment].state = SegmentState::Free;
        self.free.push_back(segment as u32);
        self.emptying = None;
    }
}
