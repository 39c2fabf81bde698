//! What is filled and promoted: lines that are new go into open segments, or are found to be here already.
//!
//! ```text
//! new line ──same bytes in memory──────────────────────────────────────────► shared
//!    │ └────same checksums on the medium──► compared ──same bytes────────────►┘
//!    │                                         │ others, or none
//!    └─────────────────────────────────────────┴────────────────────────────► appended, or not taken
//! ```
//!
//! Invariants:
//! 1. Bytes are shared only once they were compared, never for their checksums alone.
//! 2. A comparison keeps its segment as it is, and its address may be filled or invalidated meanwhile: then nothing
//!    comes of it.
//! 3. While anything is pinned, one segment is left to lines that are kept.
//! 4. What promotions fetch is promised before; no more is promised than there is room for, unless nothing is under way
//!    that would make room.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::device::{Device, Op};
use super::journal::Journal;
use super::retention::Retention;
use super::segments::{SegmentState, Stream};
use super::store::{Content, NewLine, Store, line_checksums};
use crate::base::buf::{Buf, Pool};
use crate::base::cipher::BlockCipher;
use crate::base::codec::Method;
use crate::base::io::{Action, BlockKey, Token};
use crate::base::limits::{BLOCK_BYTES, CACHE_READS_MAX};
use crate::cache::SsdTaken;
use crate::cache::index::Line;
use crate::cache::packed::Packing;

/// Lines whose bytes are being compared, and the buffers that they hold.
const COMPARES_MAX: usize = CACHE_READS_MAX / 2;

/// Consecutive blocks that the tier may take.
#[derive(Clone, Copy, Debug)]
pub struct Fill<'a> {
    /// The address of the first one.
    pub first: BlockKey,
    /// Whole blocks, plain.
    pub data: &'a Buf,
    /// Compress them so, where that saves something.
    pub method: Option<Method>,
    /// The volume's, if it has one.
    pub cipher: Option<&'a dyn BlockCipher>,
    /// Whether a promotion asked for them.
    pub is_promoted: bool,
}

/// A line that may have the same bytes as one on the medium.
#[derive(Debug)]
struct Compare {
    key: u64,
    candidate: Line,
    data: Buf,
    is_promoted: bool,
    token: Option<Token>,
    /// Its address was invalidated meanwhile.
    cancelled: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Filler {
    pool: Arc<Pool>,
    line_blocks: u64,
    compares: Vec<Compare>,
    /// Lines that promotions are fetching.
    promised_lines: usize,
}

impl Filler {
    /// Nothing is under way. What is encrypted goes to buffers of the pool.
    pub fn new(pool: Arc<Pool>, line_blocks: usize) -> Self {
        Self {
            pool,
            line_blocks: line_blocks as u64,
            compares: Vec::new(),
            promised_lines: 0,
        }
    }

    /// Nothing is stored any more that could be compared.
    pub fn stop(&mut self) {
        self.compares.clear();
    }

    /// Take the complete lines among consecutive blocks, compressed if that saves something, and encrypted if the
    /// volume has a cipher, as far as there is memory. What is promoted is taken for used: in the small stream of
    /// a full tier a promotion of more than that one's share would drive itself out.
    pub fn fill(
        &mut self,
        fill: &Fill<'_>,
        store: &mut Store,
        retention: &mut Retention,
        journal: &mut Journal,
        packing: &mut Packing,
    ) -> SsdTaken {
        let mut taken = SsdTaken::default();
        let bytes = store.layout.line_bytes();
        let mut key = fill.first.0.next_multiple_of(self.line_blocks);
        let mut start = (key - fill.first.0) as usize * BLOCK_BYTES;
        while start + bytes <= fill.data.len() {
            let line = fill.data.slice(start..start + bytes);
            if let Some(stored) = self.stored_line(BlockKey(key), line, fill, store, packing) {
                let stored_bytes = stored.len() as u64;
                if self.fill_line(key, stored, fill.is_promoted, store, retention, journal) {
                    taken.plain_bytes += bytes as u64;
                    taken.stored_bytes += stored_bytes;
                }
            }
            key += self.line_blocks;
            start += bytes;
        }
        taken
    }

    /// A line as it is to be stored; `None` if there is no memory.
    fn stored_line(
        &self,
        first: BlockKey,
        line: Buf,
        fill: &Fill<'_>,
        store: &Store,
        packing: &mut Packing,
    ) -> Option<Buf> {
        if let Some(method) = fill.method.filter(|_| store.layout.can_pack())
            && !(fill.cipher.is_none() && self.can_share_plain(&line, store))
            && let Some(packed) = packing.pack(method, &line, first, fill.cipher, &self.pool)
        {
            return Some(packed);
        }
        let Some(cipher) = fill.cipher else {
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
    fn can_share_plain(&self, line: &[u8], store: &Store) -> bool {
        let (sums, blocks) = line_checksums(line);
        self.compares.len() < COMPARES_MAX && store.index.find_content(&sums[..blocks]).is_some()
    }

    /// Returns whether the line is new and is taken, or will be if it is shared.
    fn fill_line(
        &mut self,
        key: u64,
        data: Buf,
        is_promoted: bool,
        store: &mut Store,
        retention: &mut Retention,
        journal: &mut Journal,
    ) -> bool {
        let (sums, blocks) = line_checksums(&data);
        let sums = &sums[..blocks];
        if let Some(line) = store.index.find(key) {
            if store.index.checksums(line) == sums {
                return false;
            }
            // The content has changed, and the invalidation is still to come.
            if let Some(entry) = store.unmap(BlockKey(key), self.line_blocks) {
                journal.record(entry);
            }
        }
        let candidate = store.index.find_content(sums);
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
            let stream = retention.stream_of_new(key, is_promoted);
            return append(stream, new(candidate), store, retention, journal.content());
        }
        if let Some(candidate) = candidate {
            match (store.line_in_memory(candidate)).map(|bytes| bytes == &data[..]) {
                Some(true) if store.index.add_alias(key, candidate) => {
                    store.counters.shared_lines += 1;
                    return true;
                }
                None if self.compares.len() < COMPARES_MAX => {
                    let segment = store.index.segment_of(candidate);
                    if store.segments.pin(segment) {
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
        let stream = retention.stream_of_new(key, is_promoted);
        append(stream, new(candidate), store, retention, journal.content())
    }

    // Promotions.

    fn lines_for(&self, blocks: u64) -> usize {
        blocks.div_ceil(self.line_blocks) as usize
    }

    /// Whether so many blocks can be promoted beside those that are promised, before any of the
    /// writes under way ends. With nothing under way there is no use in waiting.
    pub fn has_room(
        &self,
        blocks: u64,
        is_emptying: bool,
        store: &Store,
        retention: &Retention,
    ) -> bool {
        // What is being emptied is waited for where nothing else is free, and beside pins, since lines that are kept come
        // first there.
        let needs_emptying = retention.has_pins() || store.segments.free() == 0;
        let is_emptying = needs_emptying && is_emptying;
        if !store.writer.is_writing() && self.promised_lines == 0 && !is_emptying {
            return true;
        }
        let kept = retention.segments_kept();
        let free = store.segments.free().saturating_sub(kept);
        let left = store.writer.lines_left(Stream::Main, &store.layout);
        let left = left.filter(|_| store.segments.free() >= kept);
        let segments = store.writer.openable(left.is_some()).min(free);
        let room = left.unwrap_or(0) + segments * store.layout.plain_lines;
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

    // Comparisons.

    /// Whether the line of an address will be here once it was compared with another.
    pub fn is_compared(&self, key: u64) -> bool {
        let mut compares = self.compares.iter();
        compares.any(|compare| compare.key == key && !compare.cancelled)
    }

    /// Blocks from `first` to `end` were invalidated: what is compared for them is not taken.
    pub fn invalidate(&mut self, first: u64, end: u64) {
        for compare in &mut self.compares {
            let key = compare.key;
            compare.cancelled |= key < end && first < key + self.line_blocks;
        }
    }

    /// Read what is to be compared, as far as there is memory.
    pub fn drive(
        &mut self,
        store: &mut Store,
        retention: &Retention,
        device: &mut Device,
        actions: &mut Vec<Action>,
    ) {
        let mut index = 0;
        while index < self.compares.len() {
            if self.compares[index].token.is_some() {
                index += 1;
                continue;
            }
            let candidate = self.compares[index].candidate;
            let bytes = store.index.place_of(candidate).bytes();
            let offset = store.line_offset(candidate);
            let Some(token) = device.read(Op::Compare, offset, bytes, actions) else {
                let given_up = self.compares.swap_remove(index);
                store.segments.unpin(store.index.segment_of(candidate));
                note_untaken(given_up.key, store, retention);
                continue;
            };
            self.compares[index].token = Some(token);
            index += 1;
        }
    }

    /// A line was read to be compared; without data, that has failed.
    pub fn line_read(
        &mut self,
        token: Token,
        stored: Option<&[u8]>,
        is_closing: bool,
        store: &mut Store,
        retention: &mut Retention,
        content: Content,
    ) {
        let mut compares = self.compares.iter();
        let Some(index) = compares.position(|compare| compare.token == Some(token)) else {
            return;
        };
        let compare = self.compares.swap_remove(index);
        let segment = store.index.segment_of(compare.candidate);
        store.segments.unpin(segment);
        if is_closing || store.index.find(compare.key).is_some() {
            return;
        }
        if compare.cancelled {
            return note_untaken(compare.key, store, retention);
        }
        let (sums, blocks) = line_checksums(&compare.data);
        // The candidate may have lost its last address meanwhile.
        let still = store.index.find_content(&sums[..blocks]);
        if still == Some(compare.candidate)
            && store.segments.state(segment) == SegmentState::Sealed
            && stored == Some(&compare.data[..])
            && store.index.add_alias(compare.key, compare.candidate)
        {
            store.counters.shared_lines += 1;
            return;
        }
        let stream = retention.stream_of_new(compare.key, compare.is_promoted);
        let new = NewLine {
            key: compare.key,
            data: &compare.data,
            checksums: &sums[..blocks],
            shareable: still.is_none(),
        };
        if !append(stream, new, store, retention, content) {
            note_untaken(compare.key, store, retention);
        }
    }

    pub fn check_invariants(&self) {
        assert!(self.compares.len() <= COMPARES_MAX);
    }
}

/// Put a line that is not shared into a stream's open segment; whether there was room.
fn append(
    stream: Stream,
    new: NewLine<'_>,
    store: &mut Store,
    retention: &mut Retention,
    content: Content,
) -> bool {
    let is_new = !store.writer.is_open(stream);
    let needed = retention.segments_kept() + usize::from(is_new);
    if retention.has_pins() && store.segments.free() < needed {
        return false;
    }
    let is_taken = store.append(stream, new, content).is_some();
    if is_taken {
        retention.taken(stream, new.key);
        store.counters.filled_lines += 1;
    }
    is_taken
}

/// A line that whoever filled it takes for taken is not here after all: if it is pinned, it is filled again.
fn note_untaken(key: u64, store: &mut Store, retention: &Retention) {
    store.counters.losses += u64::from(retention.is_pinned(key));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::ssd::rig;

    struct Rig {
        filler: Filler,
        retention: Retention,
        store: Store,
        journal: Journal,
        device: Device,
        actions: Vec<Action>,
    }

    impl Rig {
        /// A tier with lines from number 0 on in a segment of the main stream on the medium.
        fn new() -> Self {
            let mut store = rig::store();
            rig::seal_segment(&mut store, Stream::Main, 0);
            Self {
                filler: Filler::new(rig::pool(), rig::CONFIG.line_blocks),
                retention: Retention::new(0),
                store,
                journal: rig::journal(),
                device: rig::device(),
                actions: Vec::new(),
            }
        }

        /// Fill the line of an address with the bytes of a number; whether it is taken.
        fn fill(&mut self, address: u64, number: u64) -> bool {
            let mut buf = rig::pool().alloc(self.store.layout.line_bytes()).unwrap();
            buf.copy_from_slice(&rig::line(number));
            let fill = Fill {
                first: BlockKey(rig::key(address)),
                data: &buf.freeze(),
                method: None,
                cipher: None,
                is_promoted: false,
            };
            let (store, retention) = (&mut self.store, &mut self.retention);
            let mut packing = Packing::default();
            let taken =
                (self.filler).fill(&fill, store, retention, &mut self.journal, &mut packing);
            taken.plain_bytes > 0
        }

        /// Read what is compared, and find the bytes of these numbers.
        fn compare(&mut self, found: &[u64]) {
            let (store, retention) = (&mut self.store, &mut self.retention);
            (self.filler).drive(store, retention, &mut self.device, &mut self.actions);
            let asked = core::mem::take(&mut self.actions);
            assert_eq!(asked.len(), found.len());
            for (action, &number) in asked.iter().zip(found) {
                let &Action::CacheRead { token, .. } = action else {
                    panic!("{action:?}");
                };
                let (store, retention) = (&mut self.store, &mut self.retention);
                let (data, content) = (rig::line(number), rig::content());
                (self.filler).line_read(token, Some(&data), false, store, retention, content);
            }
        }

        fn find(&self, address: u64) -> Option<Line> {
            self.store.find(rig::key(address))
        }
    }

    #[test]
    fn filler_shares_a_line_once_its_bytes_were_compared() {
        let mut rig = Rig::new();
        assert!(rig.fill(1_000, 5) && rig.fill(1_001, 6) && rig.fill(1_002, 7));
        assert!(rig.find(1_000).is_none() && rig.filler.is_compared(rig::key(1_000)));
        rig.filler.invalidate(rig::key(1_002) + 3, rig::key(1_003));
        assert!(!rig.filler.is_compared(rig::key(1_002)));
        // The second has the checksums of what is on the medium, and not its bytes.
        rig.compare(&[5, 9, 7]);
        assert_eq!(rig.find(1_000), rig.find(5));
        assert!(rig.find(1_001).is_some() && rig.find(1_001) != rig.find(6));
        assert_eq!(rig.find(1_002), None);
        assert_eq!(rig.store.counters.shared_lines, 1);
    }

    #[test]
    fn filler_compares_no_more_lines_than_it_may() {
        let mut rig = Rig::new();
        for number in 0..=COMPARES_MAX as u64 {
            assert!(rig.fill(1_000 + number, number));
            rig.filler.check_invariants();
        }
        assert!(
            rig.find(1_000 + COMPARES_MAX as u64).is_some(),
            "not shared"
        );
        rig.filler.stop();
        assert!(!rig.filler.is_compared(rig::key(1_000)));
    }

    #[test]
    fn filler_promises_no_more_than_there_is_room_for() {
        let mut rig = Rig::new();
        let has_room = |rig: &Rig, blocks| {
            let (store, retention) = (&rig.store, &rig.retention);
            (rig.filler).has_room(blocks, false, store, retention)
        };
        assert!(has_room(&rig, u64::MAX), "nothing is under way");
        rig.filler.promise(4);
        let segment = rig.store.layout.room_blocks() as u64;
        let room = segment * rig.store.writer.openable(false) as u64;
        assert!(has_room(&rig, room - 4) && !has_room(&rig, room));
        rig.filler.end_promise(4);
        assert!(has_room(&rig, room + 4));
    }
}
