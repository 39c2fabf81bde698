//! Filling, sealing and comparing segments. See the module above.

use super::segments::SegmentState;
use super::store::{NewLine, Store, line_checksums};
use super::{Action, BLOCK_BYTES, Buf, CACHE_READS_MAX, Line, Op, Ssd, Stream, Token, Vec, mix};
use crate::base::cipher::BlockCipher;
use crate::base::codec::Method;
use crate::base::io::BlockKey;
use crate::cache::SsdTaken;

/// Lines whose bytes are being compared, and the buffers that they hold.
const COMPARES_MAX: usize = CACHE_READS_MAX / 2;

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

impl Ssd {
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
        let line_blocks = self.store.layout.line_blocks as u64;
        let bytes = self.store.layout.line_bytes();
        let method = method.filter(|_| self.store.layout.can_pack());
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
        self.compares.len() < COMPARES_MAX
            && self.store.index.find_content(&sums[..blocks]).is_some()
    }

    /// Returns whether the line is new and is taken, or will be if it is shared.
    fn fill_line(&mut self, key: u64, data: Buf, is_promoted: bool) -> bool {
        let (sums, blocks) = line_checksums(&data);
        let sums = &sums[..blocks];
        if let Some(line) = self.store.index.find(key) {
            if self.store.index.checksums(line) == sums {
                return false;
            }
            // The content has changed, and the invalidation is still to come.
            let line_blocks = self.store.layout.line_blocks as u64;
            if let Some(entry) = self.store.unmap(BlockKey(key), line_blocks) {
                self.journal.record(entry);
            }
        }
        let candidate = self.store.index.find_content(sums);
        let new = |candidate: Option<Line>| NewLine {
            key,
            data: &data,
            checksums: sums,
            shareable: candidate.is_none(),
        };
        if let Some(compare) = self.compares.iter_mut().find(|compare| compare.key == key) {
            if !compare.cancelled && compare.data[..] == data[..] {
                return true;
            }
            // What it is compared for is out of date. It has ended by the time that this could be compared.
            compare.cancelled = true;
            let stream = self.stream_of_new(key, is_promoted);
            return self.fill_unshared(stream, new(candidate));
        }
        if let Some(candidate) = candidate {
            match self
                .store
                .line_in_memory(candidate)
                .map(|bytes| bytes == &data[..])
            {
                Some(true) if self.store.index.add_alias(key, candidate) => {
                    self.store.counters.shared_lines += 1;
                    return true;
                }
                None if self.compares.len() < COMPARES_MAX => {
                    let segment = self.store.index.segment_of(candidate);
                    if self.store.segments.pin(segment) {
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
        self.fill_unshared(stream, new(candidate))
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

    fn fill_unshared(&mut self, stream: Stream, new: NewLine<'_>) -> bool {
        let is_new = !self.store.writer.is_open(stream);
        if self.store.segments.free() < self.kept_free() + usize::from(is_new)
            && !self.pins.is_empty()
        {
            return false;
        }
        let is_taken = self.append(stream, new).is_some();
        self.store.counters.filled_lines += u64::from(is_taken);
        is_taken
    }

    /// Put a line into a stream's open segment; its address leads nowhere yet.
    pub(super) fn append(&mut self, stream: Stream, new: NewLine<'_>) -> Option<Line> {
        let line = self.store.append(stream, new, self.journal.content())?;
        let volume = BlockKey(new.key).volume();
        self.worths.note(volume, stream as usize);
        Some(line)
    }

    /// Whether lines are taken at all.
    pub fn takes_lines(&self) -> bool {
        self.is_ready_phase() && !self.closing
    }

    fn lines_for(&self, blocks: u64) -> usize {
        blocks.div_ceil(self.store.layout.line_blocks as u64) as usize
    }

    /// Whether so many blocks can be promoted beside those that are promised, before any of the
    /// writes under way ends. With nothing under way there is no use in waiting.
    pub fn has_room(&self, blocks: u64) -> bool {
        // What is being emptied is waited for where nothing else is free, and beside pins, since lines that are kept come
        // first there.
        let needs_emptying = !self.pins.is_empty() || self.store.segments.free() == 0;
        let is_emptying = needs_emptying && self.emptying.is_some();
        let is_under_way = self.store.writer.is_writing() || self.promised_lines > 0 || is_emptying;
        if !self.takes_lines() || !is_under_way {
            return true;
        }
        let free = self.store.segments.free().saturating_sub(self.kept_free());
        let Store { layout, writer, .. } = &self.store;
        let left = writer.lines_left(Stream::Main, layout);
        let left = left.filter(|_| self.store.segments.free() >= self.kept_free());
        let segments = writer.openable(left.is_some()).min(free);
        let room = left.unwrap_or(0) + segments * self.store.layout.plain_lines;
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
        let first = self.store.line_key(key);
        let is_compared = |compare: &Compare| compare.key == first && !compare.cancelled;
        self.contains(key) || self.compares.iter().any(is_compared)
    }

    pub(super) fn drive_compares(&mut self, actions: &mut Vec<Action>) {
        let mut index = 0;
        while index < self.compares.len() {
            if self.compares[index].token.is_some() {
                index += 1;
                continue;
            }
            let candidate = self.compares[index].candidate;
            let bytes = self.store.index.place_of(candidate).bytes();
            let offset = self.store.line_offset(candidate);
            let Some(token) = self.device.read(Op::Compare, offset, bytes, actions) else {
                let given_up = self.compares.swap_remove(index);
                let segment = self.store.index.segment_of(candidate);
                self.store.segments.unpin(segment);
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
        let segment = self.store.index.segment_of(compare.candidate);
        self.store.segments.unpin(segment);
        if self.closing || self.store.index.find(compare.key).is_some() {
            return;
        }
        if compare.cancelled {
            return self.note_untaken(compare.key);
        }
        let (sums, blocks) = line_checksums(&compare.data);
        // The candidate may have lost its last address meanwhile.
        let still = self.store.index.find_content(&sums[..blocks]);
        if still == Some(compare.candidate)
            && self.store.segments.state(segment) == SegmentState::Sealed
            && stored == Some(&compare.data[..])
            && self.store.index.add_alias(compare.key, compare.candidate)
        {
            self.store.counters.shared_lines += 1;
            return;
        }
        let stream = self.stream_of_new(compare.key, compare.is_promoted);
        let new = NewLine {
            key: compare.key,
            data: &compare.data,
            checksums: &sums[..blocks],
            shareable: still.is_none(),
        };
        if !self.fill_unshared(stream, new) {
            self.note_untaken(compare.key);
        }
    }

    /// A line that whoever filled it takes for taken is not here after all: if it is pinned, it is filled again.
    fn note_untaken(&mut self, key: u64) {
        self.store.counters.losses += u64::from(self.pins.contains(key));
    }
}
