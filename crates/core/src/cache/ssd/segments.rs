//! The segments of the tier: in which state each is, in which order they go, and whether anybody reads them.
//!
//! ```text
//! Free ──open──► Open ──seal──► Sealing ──written──► Sealed ──empty──► Emptying ──release──► Free
//!                                  └──────────── lost ───────────────────────────────────────►┘
//! ```
//!
//! Invariants:
//! 1. A segment is free, or open, or in the queue of its stream, or being emptied.
//! 2. A sequence number is given when a segment is sealed and never twice in one format: its upper part counts starts,
//!    durably, before anything is written.
//! 3. A segment is released only when nobody reads it: `pins` counts permissions and reads.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use crate::cache::journal::Entry;
use crate::format::CACHE_START_SHIFT;

/// The streams of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Small,
    Main,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentState {
    Free,
    Open,
    Sealing,
    Sealed,
    Emptying,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    /// Footers on the medium with a lower number are void; a sealed segment's own number.
    sequence: u64,
    /// Permissions and reads that are not given back.
    pins: u16,
    state: SegmentState,
    stream: Stream,
}

impl Segment {
    const NEW: Self = Self {
        sequence: 0,
        pins: 0,
        state: SegmentState::Free,
        stream: Stream::Small,
    };
}

/// See the module.
#[derive(Debug)]
pub struct Segments {
    all: Vec<Segment>,
    free: VecDeque<u32>,
    /// Sealed segments of each stream, oldest first.
    sealed: [VecDeque<u32>; 2],
    next_sequence: u64,
}

impl Segments {
    /// So many, none of which is to be opened yet: what they hold is not known.
    pub fn new(count: usize) -> Self {
        Self {
            all: vec![Segment::NEW; count],
            free: VecDeque::new(),
            sealed: [const { VecDeque::new() }; 2],
            next_sequence: 0,
        }
    }

    /// All are free: nothing on the medium counts any more.
    pub fn clear(&mut self) {
        self.all.fill(Segment::NEW);
        self.free = (0..self.all.len() as u32).collect();
        self.sealed = [const { VecDeque::new() }; 2];
    }

    /// From now on segments are sealed in this start.
    pub fn begin(&mut self, incarnation: u64) {
        self.next_sequence = (incarnation << CACHE_START_SHIFT) + 1;
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn bytes(&self) -> usize {
        self.all.len() * (size_of::<Segment>() + size_of::<u32>())
    }

    pub fn state(&self, segment: usize) -> SegmentState {
        self.all[segment].state
    }

    pub fn stream(&self, segment: usize) -> Stream {
        self.all[segment].stream
    }

    pub fn sequence(&self, segment: usize) -> u64 {
        self.all[segment].sequence
    }

    /// The number that the next segment gets which is sealed.
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// How many are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// How many of a stream are sealed.
    pub fn sealed(&self, stream: Stream) -> usize {
        self.sealed[stream as usize].len()
    }

    /// Somebody reads of a segment from now on; false if too many do already.
    #[must_use]
    pub fn pin(&mut self, segment: usize) -> bool {
        let pins = &mut self.all[segment].pins;
        let more = pins.checked_add(1);
        *pins = more.unwrap_or(*pins);
        more.is_some()
    }

    /// That has ended.
    pub fn unpin(&mut self, segment: usize) {
        let pins = &mut self.all[segment].pins;
        *pins = pins.checked_sub(1).expect("a pin is taken before");
    }

    pub fn is_read(&self, segment: usize) -> bool {
        self.all[segment].pins > 0
    }

    /// Take a free one for a stream.
    pub fn open(&mut self, stream: Stream) -> Option<usize> {
        let number = self.free.pop_front()? as usize;
        self.all[number].state = SegmentState::Open;
        self.all[number].stream = stream;
        Some(number)
    }

    /// An open one is full: its sequence number.
    pub fn seal(&mut self, segment: usize) -> u64 {
        let sealed = &mut self.all[segment];
        sealed.sequence = self.next_sequence;
        sealed.state = SegmentState::Sealing;
        self.sealed[sealed.stream as usize].push_back(segment as u32);
        self.next_sequence += 1;
        sealed.sequence
    }

    /// A sealed one is on the medium.
    pub fn written(&mut self, segment: usize) {
        self.all[segment].state = SegmentState::Sealed;
    }

    /// A sealed one is not on the medium.
    pub fn lost(&mut self, segment: usize) {
        let queue = &mut self.sealed[self.all[segment].stream as usize];
        queue.retain(|&number| number as usize != segment);
    }

    /// Void every footer that a segment may have on the medium.
    #[must_use]
    pub fn void(&mut self, segment: usize) -> Entry {
        self.all[segment].sequence += 1;
        Entry::Segment {
            segment: segment as u32,
            sequence: self.all[segment].sequence,
            void: 0,
        }
    }

    /// The one of a stream that was sealed first, or passed over first since.
    pub fn oldest(&self, stream: Stream) -> Option<usize> {
        (self.sealed[stream as usize].front()).map(|&number| number as usize)
    }

    /// As if the oldest one had been sealed anew.
    pub fn pass_over(&mut self, stream: Stream) {
        self.sealed[stream as usize].rotate_left(1);
    }

    /// The oldest one of a stream is being emptied.
    pub fn empty_oldest(&mut self, stream: Stream) {
        if let Some(number) = self.sealed[stream as usize].pop_front() {
            self.all[number as usize].state = SegmentState::Emptying;
        }
    }

    /// A segment is free again.
    pub fn release(&mut self, segment: usize) {
        self.all[segment].state = SegmentState::Free;
        self.free.push_back(segment as u32);
    }

    // What a start finds.

    /// One has a footer.
    pub fn found(&mut self, segment: usize, sequence: u64, stream: Stream) {
        let found = &mut self.all[segment];
        found.sequence = sequence;
        found.state = SegmentState::Sealed;
        found.stream = stream;
    }

    /// Footers of one below a number do not count.
    pub fn found_void(&mut self, segment: usize, sequence: u64) {
        self.all[segment].sequence = sequence;
        self.all[segment].state = SegmentState::Free;
    }

    /// One above the last of which anything was found.
    pub fn found_end(&self) -> usize {
        let last = self.all.iter().rposition(|segment| segment.sequence > 0);
        last.map_or(0, |last| last + 1)
    }

    /// Everything is found: those that are sealed go in the order in which they were.
    pub fn queue_found(&mut self) {
        let all = &self.all;
        let mut sealed: Vec<u32> = (0..all.len() as u32)
            .filter(|&number| all[number as usize].state == SegmentState::Sealed)
            .collect();
        sealed.sort_unstable_by_key(|&number| all[number as usize].sequence);
        for number in sealed {
            self.sealed[all[number as usize].stream as usize].push_back(number);
        }
        self.free
            .retain(|&number| all[number as usize].state == SegmentState::Free);
    }

    /// So many are open or being emptied.
    pub fn check_invariants(&self, others: usize) {
        let queued = self.sealed.iter().map(VecDeque::len).sum::<usize>();
        assert_eq!(
            self.free.len() + queued + others,
            self.all.len(),
            "every segment is in one place"
        );
        for &segment in &self.free {
            let segment = self.all[segment as usize];
            assert!(segment.state == SegmentState::Free && segment.pins == 0);
        }
        for segment in &self.all {
            let sealed = matches!(segment.state, SegmentState::Sealing | SegmentState::Sealed);
            assert!(!sealed || segment.sequence < self.next_sequence);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_go_in_the_order_in_which_they_were_sealed() {
        let mut segments = Segments::new(4);
        assert_eq!(segments.open(Stream::Main), None, "nothing is known yet");
        segments.clear();
        segments.begin(3);
        for number in 0..3 {
            assert_eq!(segments.open(Stream::Main), Some(number));
        }
        segments.check_invariants(3);
        let first = segments.seal(1);
        assert_eq!(first >> CACHE_START_SHIFT, 3);
        assert_eq!((segments.seal(2), segments.seal(0)), (first + 1, first + 2));
        segments.check_invariants(0);
        (0..3).for_each(|number| segments.written(number));
        assert_eq!(segments.oldest(Stream::Main), Some(1));
        segments.pass_over(Stream::Main);
        assert_eq!(segments.oldest(Stream::Main), Some(2));
        segments.lost(0);
        segments.release(0);
        segments.empty_oldest(Stream::Main);
        assert_eq!(segments.state(2), SegmentState::Emptying);
        segments.check_invariants(1);
        segments.release(2);
        assert_eq!((segments.free(), segments.sealed(Stream::Main)), (3, 1));
    }

    #[test]
    fn segments_of_the_last_run_are_queued_by_their_numbers() {
        let mut segments = Segments::new(4);
        segments.clear();
        segments.found(0, 9, Stream::Small);
        segments.found(2, 7, Stream::Small);
        segments.found_void(1, 8);
        assert_eq!(segments.found_end(), 3);
        segments.queue_found();
        segments.begin(1);
        assert_eq!(segments.oldest(Stream::Small), Some(2));
        assert_eq!((segments.free(), segments.sealed(Stream::Small)), (2, 2));
        segments.check_invariants(0);
    }
}
