//! Filling, sealing and comparing segments. See the module above.

use zerocopy::FromZeros;

use super::{
    Action, BLOCK_BYTES, Buf, BufMut, CACHE_READS_MAX, CACHE_SEGMENT_WRITES_MAX, Entry, Line, Op,
    SEGMENT_BYTES, SegmentState, Ssd, Stream, Token, Vec, block_checksum, mix, vec,
};
use crate::base::cipher::BlockCipher;
use crate::base::codec::Method;
use crate::base::io::BlockKey;
use crate::base::limits::CACHE_LINE_BLOCKS_MAX;
use crate::cache::SsdTaken;
use crate::cache::footer;
use crate::cache::journal::Layout;
use crate::format::CacheFooter;

/// Lines whose bytes are being compared, and the buffers that they hold.
const COMPARES_MAX: usize = CACHE_READS_MAX / 2;

/// A segment that collects lines.
#[derive(Debug)]
pub(super) struct Open {
    segment: usize,
    slots: usize,
    /// Blocks that they take.
    blocks: usize,
    buf: BufMut,
}

impl Open {
    /// Lines that fit beside those that are in it, if they are not compressed.
    fn lines_left(&self, layout: &Layout) -> usize {
        let blocks = layout.room_blocks() - self.blocks;
        (blocks / layout.line_blocks).min(layout.lines_per_segment - self.slots)
    }
}

/// A line that may have the same bytes as one on the medium.
#[derive(Debug)]
pub(super) struct Compare {
    pub(super) key: u64,
    candidate: Line,
    data: Buf,
    is_promoted: bool,
    token: Option<Token>,
    /// Its address was invalidated meanwhile.
    pub(super) cancelled: bool,
}

pub(super) fn line_checksums(data: &[u8]) -> ([u32; CACHE_LINE_BLOCKS_MAX], usize) {
    let mut sums = [0; CACHE_LINE_BLOCKS_MAX];
    let mut blocks = 0;
    for (sum, block) in sums.iter_mut().zip(data.chunks_exact(BLOCK_BYTES)) {
        *sum = block_checksum(block);
        blocks += 1;
    }
    (sums, blocks)
}

impl Ssd {
    pub(super) fn line_offset(&self, line: Line) -> u64 {
        let segment = self.layout.segment_offset(self.index.segment_of(line));
        segment + self.index.place_of(line).offset() as u64
    }

    /// The bytes of a line that is not on the medium yet, as they are stored.
    pub(super) fn line_in_memory(&self, line: Line) -> Option<&[u8]> {
        let segment = self.index.segment_of(line);
        let place = self.index.place_of(line);
        let range = place.offset()..place.offset() + place.bytes();
        if let Some(buf) = self.writing.get(&(segment as u32)) {
            return Some(&buf[range]);
        }
        let mut open = self.open.iter().flatten();
        open.find(|open| open.segment == segment)
            .map(|open| &open.buf[range])
    }

    /// Take the complete lines among consecutive blocks, compressed by `method` if that saves something, and encrypted
    /// if the volume has a cipher, as far as there is memory. What is promoted is taken for used: in the small stream of
    /// a full tier a promotion of more than that one's share would drive itself out.
    pub fn fill(
        &mut self,
        first: BlockKey,
        data: &Buf,
        method: Option<Method>,
        cipher: Option<&dyn BlockCipher>,
        is_promoted: bool,
    ) -> SsdTaken {
        let mut taken = SsdTaken::default();
        let blocks = (data.len() / BLOCK_BYTES) as u64;
        if !self.takes_lines() || self.refuses(first.0, first.0 + blocks) {
            return taken;
        }
        let line_blocks = self.layout.line_blocks as u64;
        let bytes = self.layout.line_bytes();
        let method = method.filter(|_| self.layout.can_pack());
        let mut key = first.0.next_multiple_of(line_blocks);
        let mut start = (key - first.0) as usize * BLOCK_BYTES;
        while start + bytes <= data.len() {
            let line = data.slice(start..start + bytes);
            if let Some(stored) = self.stored_line(BlockKey(key), line, method, cipher) {
                let stored_bytes = stored.len() as u64;
                if self.fill_line(key, stored, is_promoted) {
                    taken.plain_bytes += bytes as u64;
                    taken.stored_bytes += stored_bytes;
                }
            }
            key += line_blocks;
            start += bytes;
        }
        taken
    }

    /// A line as it is to be stored; `None` if there is no memory.
    fn stored_line(
        &mut self,
        first: BlockKey,
        line: Buf,
        method: Option<Method>,
        cipher: Option<&dyn BlockCipher>,
    ) -> Option<Buf> {
        if let Some(method) = method
            && !(cipher.is_none() && self.can_share_plain(&line))
            && let Some(packed) = (self.packing).pack(method, &line, first, cipher, &self.pool)
        {
            return Some(packed);
        }
        let Some(cipher) = cipher else {
            return Some(line);
        };
        let mut copy = self.pool.alloc(line.len())?;
        copy.copy_from_slice(&line);
        for (number, block) in (first.block()..).zip(copy.chunks_exact_mut(BLOCK_BYTES)) {
            cipher.encrypt(number, block);
        }
        Some(copy.freeze())
    }

    /// Whether a line may be here that is not compressed: it is shared then, or found to be here already.
    fn can_share_plain(&self, line: &[u8]) -> bool {
        let (sums, blocks) = line_checksums(line);
        self.compares.len() < COMPARES_MAX && self.index.find_content(&sums[..blocks]).is_some()
    }

    /// Returns whether the line is new and is taken, or will be if it is shared.
    fn fill_line(&mut self, key: u64, data: Buf, is_promoted: bool) -> bool {
        let (sums, blocks) = line_checksums(&data);
        let sums = &sums[..blocks];
        if let Some(line) = self.index.find(key) {
            if self.index.checksums(line) == sums {
                return false;
            }
            // The content has changed, and the invalidation is still to come.
            self.unmap(BlockKey(key), self.layout.line_blocks as u64);
        }
        let candidate = self.index.find_content(sums);
        if let Some(compare) = self.compares.iter_mut().find(|compare| compare.key == key) {
            if !compare.cancelled && compare.data[..] == data[..] {
                return true;
            }
            // What it is compared for is out of date. It has ended by the time that this could be compared.
            compare.cancelled = true;
            let stream = self.stream_of_new(key, is_promoted);
            return self.fill_unshared(stream, key, &data, sums, candidate.is_none());
        }
        if let Some(candidate) = candidate {
            match self
                .line_in_memory(candidate)
                .map(|bytes| bytes == &data[..])
            {
                Some(true) if self.index.add_alias(key, candidate) => {
                    self.counters.shared_lines += 1;
                    return true;
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
                            is_promoted,
                            token: None,
                            cancelled: false,
                        });
                        return true;
                    }
                }
                _ => {}
            }
        }
        let stream = self.stream_of_new(key, is_promoted);
        self.fill_unshared(stream, key, &data, sums, candidate.is_none())
    }

    /// While anything is pinned, one segment is for lines that are kept, which would be lost otherwise.
    fn kept_free(&self) -> usize {
        usize::from(!self.pins.is_empty())
    }

    fn stream_of_new(&mut self, key: u64, is_promoted: bool) -> Stream {
        let gain = self.gain(BlockKey(key).volume());
        let is_remembered = self.ghost.remove(mix(key)).is_some() && self.worths.is_drawn(-gain);
        if is_remembered || is_promoted || self.pins.contains(key) {
            Stream::Main
        } else {
            Stream::Small
        }
    }

    fn fill_unshared(
        &mut self,
        stream: Stream,
        key: u64,
        data: &[u8],
        sums: &[u32],
        shareable: bool,
    ) -> bool {
        let is_new = self.open[stream as usize].is_none();
        if self.free.len() < self.kept_free() + usize::from(is_new) && !self.pins.is_empty() {
            return false;
        }
        let is_taken = self.append(stream, key, data, sums, shareable).is_some();
        self.counters.filled_lines += u64::from(is_taken);
        is_taken
    }

    /// Put a line into a stream's open segment; its address leads nowhere yet.
    pub(super) fn append(
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
        let (first, start) = (open.blocks as u8, open.blocks * BLOCK_BYTES);
        open.buf[start..start + data.len()].copy_from_slice(data);
        open.slots += 1;
        open.blocks += sums.len();
        let full = open.lines_left(&self.layout) == 0;
        self.index.place(line, key, first, sums, shareable);
        self.worths.note(BlockKey(key).volume(), stream as usize);
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

    /// Whether so many blocks can be promoted beside those that are promised, before any of the
    /// writes under way ends. With nothing under way there is no use in waiting.
    pub fn has_room(&self, blocks: u64) -> bool {
        // What is being emptied is waited for where nothing else is free, and beside pins, since lines that are kept come
        // first there.
        let needs_emptying = !self.pins.is_empty() || self.free.is_empty();
        let is_emptying = needs_emptying && self.emptying.is_some();
        let is_under_way = !self.writing.is_empty() || self.promised_lines > 0 || is_emptying;
        if !self.takes_lines() || !is_under_way {
            return true;
        }
        let free = self.free.len().saturating_sub(self.kept_free());
        let open = self.open[Stream::Main as usize].as_ref();
        let open = open.filter(|_| self.free.len() >= self.kept_free());
        let left = open.map_or(0, |open| open.lines_left(&self.layout));
        let memory = self
            .pool
            .free_bytes()
            .saturating_sub(self.pool.total_bytes() / 4);
        let segments = CACHE_SEGMENT_WRITES_MAX
            .saturating_sub(self.writing.len() + usize::from(open.is_some()))
            .min(free)
            .min(memory / SEGMENT_BYTES);
        let room = left + segments * self.layout.plain_lines;
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
        let is_compared = |compare: &Compare| compare.key == first && !compare.cancelled;
        self.contains(key) || self.compares.iter().any(is_compared)
    }

    /// Whether the whole line of a block lies below `end`, so that it can be taken.
    pub fn is_whole(&self, key: BlockKey, end: BlockKey) -> bool {
        self.line_key(key) + self.layout.line_blocks as u64 <= end.0
    }

    /// The cache takes no memory that requests may need soon.
    pub(super) fn has_memory(&self) -> bool {
        self.pool.free_bytes() >= self.pool.total_bytes() / 4
    }

    fn open_segment(&mut self, stream: Stream) -> Option<Open> {
        if self.writing.len() >= CACHE_SEGMENT_WRITES_MAX || !self.has_memory() {
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
            blocks: 0,
            buf,
        })
    }

    pub(super) fn has_open(&self) -> bool {
        self.open.iter().any(Option::is_some)
    }

    fn seal(&mut self, stream: Stream) {
        let Some(Open {
            segment,
            blocks,
            mut buf,
            ..
        }) = self.open[stream as usize].take()
        else {
            return;
        };
        self.drop_forgotten(segment);
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.segments[segment].sequence = sequence;
        self.segments[segment].state = SegmentState::Sealing;
        let mut footer = CacheFooter::new_zeroed();
        footer.line_blocks.set(self.layout.line_blocks as u16);
        footer.stream = stream as u8;
        footer.uuid = self.config.uuid;
        footer.format.set(self.root.format);
        footer.sequence.set(sequence);
        footer.segment.set(segment as u32);
        let lines: Vec<(u64, u8)> = (self.index.placed(segment))
            .map(|(key, place)| (key.unwrap_or(u64::MAX), place.blocks))
            .collect();
        let sums = self.index.block_checksums(segment, blocks).iter().copied();
        let (data, last) = buf.split_at_mut(SEGMENT_BYTES - BLOCK_BYTES);
        data[blocks * BLOCK_BYTES..].fill(0);
        footer::write(footer, &lines, sums, last);
        self.writing.insert(segment as u32, buf.freeze());
        self.unsent.push_back(segment as u32);
        self.sealed[stream as usize].push_back(segment as u32);
    }

    /// What is to be forgotten does not get into a footer: it was recorded for earlier ones.
    fn drop_forgotten(&mut self, segment: usize) {
        let bits = self.forgotten_bits(segment);
        for slot in (0..self.layout.lines_per_segment).filter(|&slot| bits >> slot & 1 == 1) {
            self.index.unmap_primary(self.index.line_at(segment, slot));
        }
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
            let op = Op::Segment(segment as usize);
            let offset = self.layout.segment_offset(segment as usize);
            self.device
                .write(op, offset, vec![buf], self.closing, actions);
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
        self.counters.losses += 1;
        self.segments[segment].state = SegmentState::Free;
        self.free.push_back(segment as u32);
    }

    /// Void every footer that the segment may have on the medium.
    pub(super) fn void_segment(&mut self, segment: usize) {
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
            let bytes = self.index.place_of(candidate).bytes();
            let offset = self.line_offset(candidate);
            let Some(token) = self.device.read(Op::Compare, offset, bytes, actions) else {
                let given_up = self.compares.swap_remove(index);
                self.unpin(self.index.segment_of(candidate));
                self.note_untaken(given_up.key);
                continue;
            };
            self.compares[index].token = Some(token);
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
        if self.closing || self.index.find(compare.key).is_some() {
            return;
        }
        if compare.cancelled {
            return self.note_untaken(compare.key);
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
        let (key, data, sums) = (compare.key, &compare.data, &sums[..blocks]);
        let stream = self.stream_of_new(key, compare.is_promoted);
        if !self.fill_unshared(stream, key, data, sums, still.is_none()) {
            self.note_untaken(key);
        }
    }

    /// A line that whoever filled it takes for taken is not here after all: if it is pinned, it is filled again.
    fn note_untaken(&mut self, key: u64) {
        self.counters.losses += u64::from(self.pins.contains(key));
    }
}
