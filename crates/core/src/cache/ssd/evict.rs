//! Evicting: which segment is emptied next, and how that goes, line by line.
//!
//! ```text
//! idle ──too few segments free──► emptying ──every line looked at, no read of one under way, nobody reads──► idle
//! ```
//!
//! Segments go in the order in which they were sealed, from the small stream while it is larger than its share. Of what
//! is not pinned up to half is kept, of the blocks and of the lines of the segment, the most used first; a segment that
//! is mostly pinned is passed over, as if it had been sealed anew. So each segment that is emptied gives an eighth of
//! itself back at least. When all are passed over and room is short, which pins of clones beside what they inherited
//! can bring about, a segment is emptied as if nothing were pinned: the tier never runs out of room for the
//! sake of pins.
//!
//! Invariants:
//! 1. One segment is emptied at a time. It is void durably, or that is in the queue of the journal, before any of its
//!    addresses is turned elsewhere.
//! 2. No more than [`CACHE_READS_MAX`] lines that are kept are being read.
//! 3. A line that is not pinned and cannot be kept now is evicted; one that is pinned waits, unless waiting does not
//!    help.
//! 4. A segment is released once nobody reads it: permissions that were given stay good.

use alloc::vec::Vec;

use super::device::{Device, Op};
use super::journal::Journal;
use super::retention::{Retention, USES_MAX};
use super::segments::{SegmentState, Stream};
use super::store::{Content, NewLine, Store, line_checksums};
use crate::base::io::Action;
use crate::base::limits::CACHE_READS_MAX;
use crate::cache::benefit::GAIN_MAX;
use crate::cache::index::Line;
use crate::cache::journal::Layout;
use crate::cache::marks::{Eviction, FREE_SEGMENTS_MIN, FillMarks};

/// One segment in so many belongs to the small stream.
const SMALL_SHARE: usize = 10;
/// Segments of one stream that are passed over at once: bounds the time of a poll.
const PASSES_MAX: usize = 64;

/// A line that is being kept: it is read, to be put into another segment.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    line: Line,
    /// The address for which it is kept.
    key: u64,
    /// How often it was used when its read began.
    uses: u8,
}

/// The segment that is being emptied.
#[derive(Debug)]
struct Emptying {
    segment: usize,
    next_slot: usize,
    /// Reads of lines that are kept, under way.
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

impl Emptying {
    /// Whether a line that is not pinned is one of the most used ones; counts it among them.
    fn is_worth_keeping(&mut self, line: Line, store: &Store) -> bool {
        let slot = store.index.slot_of(line);
        let (uses, share) = (store.index.uses(line), store.share_of(line));
        let uses = uses.saturating_add_signed(self.bonuses[slot]);
        let is_other = uses > 0 && uses + 1 == self.uses_min && self.others_left >= share;
        if (uses < self.uses_min && !is_other) || self.keep_left < share {
            return false;
        }
        self.others_left -= if is_other { share } else { 0 };
        self.keep_left -= share;
        true
    }

    /// Begin to read a line that is to be kept; false if there is no memory for it.
    fn keep(
        &mut self,
        line: Line,
        key: u64,
        store: &Store,
        device: &mut Device,
        actions: &mut Vec<Action>,
    ) -> bool {
        let uses = store.index.uses(line);
        let op = Op::Keep(Kept { line, key, uses });
        let (offset, bytes) = (store.line_offset(line), store.index.place_of(line).bytes());
        let is_begun = device.read(op, offset, bytes, actions).is_some();
        self.reads += usize::from(is_begun);
        is_begun
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Evictor {
    eviction: Eviction,
    /// Segments of each stream that were passed over since one was found, and the sequence number at which all of them
    /// were found to be pinned.
    passed_over: [usize; 2],
    all_pinned_at: u64,
    emptying: Option<Emptying>,
}

impl Evictor {
    /// The same marks for a tier that begins anew.
    pub fn renewed(&self) -> Self {
        let mut this = Self::default();
        this.eviction.marks = self.eviction.marks;
        this
    }

    /// How full the tier becomes from now on.
    pub fn set_marks(&mut self, marks: FillMarks) {
        self.eviction.marks = marks;
    }

    /// Nothing is stored any more that could be evicted.
    pub fn stop(&mut self) {
        self.emptying = None;
    }

    /// Whether a segment is being emptied.
    pub fn is_emptying(&self) -> bool {
        self.emptying.is_some()
    }

    /// With fewer free segments, of so many, eviction begins.
    pub fn free_min(&self, segments: usize) -> usize {
        self.eviction.free_min(segments)
    }

    /// Blocks that pins of all volumes may take.
    pub fn pinned_blocks_max(&self, layout: &Layout) -> u64 {
        let blocks = layout.segments * layout.room_blocks();
        (blocks * usize::from(self.eviction.marks.pin_ratio_max) / 100) as u64
    }

    /// Pins have changed: what was passed over may go now.
    pub fn look_again(&mut self) {
        self.passed_over = [0; 2];
        self.all_pinned_at = 0;
    }

    /// Begin to empty a segment if too few are free.
    pub fn begin_if_due(
        &mut self,
        store: &mut Store,
        retention: &mut Retention,
        journal: &mut Journal,
    ) {
        if self.emptying.is_none()
            && (self.eviction).is_due(store.segments.free(), store.segments.len())
            && let Some((stream, segment, keeps_pins)) = self.next_to_empty(store, retention)
        {
            store.segments.empty_oldest(stream);
            // Before any of its addresses is turned elsewhere.
            journal.record(store.segments.void(segment));
            self.begin(stream, segment, keeps_pins, store, retention);
        }
    }

    /// Whether a later drive may go further although nothing that is under way has ended: each begins with one segment and
    /// passes over few, and waits for memory that nobody says is free.
    pub fn may_go_on(&mut self, store: &Store) -> bool {
        match &self.emptying {
            Some(emptying) => emptying.reads == 0,
            None => {
                self.all_pinned_at != store.segments.next_sequence()
                    && (self.eviction).is_due(store.segments.free(), store.segments.len())
            }
        }
    }

    /// Look at the lines of the segment that is being emptied, and keep them or not, as far as there is memory.
    pub fn drive(
        &mut self,
        store: &mut Store,
        retention: &mut Retention,
        device: &mut Device,
        actions: &mut Vec<Action>,
    ) {
        while let Some(emptying) = &mut self.emptying {
            if emptying.reads >= CACHE_READS_MAX {
                return;
            }
            if emptying.next_slot == store.layout.lines_per_segment {
                if emptying.reads == 0 {
                    self.finish(store);
                }
                return;
            }
            let line = store.index.line_at(emptying.segment, emptying.next_slot);
            let pinned = retention.pinned_key(line, store);
            if let Some(key) = pinned.filter(|_| emptying.keeps_pins) {
                // It waits for memory, or for a segment to be written, rather than be lost.
                if !can_keep(store) || !emptying.keep(line, key, store, device, actions) {
                    return;
                }
            } else if let Some(key) = store.index.primary(line)
                && !(emptying.is_worth_keeping(line, store)
                    && emptying.keep(line, key, store, device, actions))
            {
                retention.evicted(store.segments.stream(emptying.segment), key);
                store.index.unmap_primary(line);
                store.counters.evicted_lines += 1;
            }
            emptying.next_slot += 1;
        }
    }

    /// The segment to be emptied next, its stream, and whether its pinned lines are kept.
    fn next_to_empty(
        &mut self,
        store: &mut Store,
        retention: &Retention,
    ) -> Option<(Stream, usize, bool)> {
        if self.all_pinned_at == store.segments.next_sequence() {
            return None;
        }
        let segments = &store.segments;
        let small_first = segments.sealed(Stream::Small) > segments.len() / SMALL_SHARE
            || segments.sealed(Stream::Main) == 0;
        let order = if small_first {
            [Stream::Small, Stream::Main]
        } else {
            [Stream::Main, Stream::Small]
        };
        for stream in order {
            for _ in 0..store.segments.sealed(stream).min(PASSES_MAX) {
                let number = store.segments.oldest(stream)?;
                if store.segments.state(number) != SegmentState::Sealed {
                    break;
                }
                if !retention.is_mostly_pinned(number, store) {
                    self.passed_over = [0; 2];
                    return Some((stream, number, true));
                }
                store.segments.pass_over(stream);
                self.passed_over[stream as usize] += 1;
            }
        }
        let passed =
            |stream: Stream| self.passed_over[stream as usize] >= store.segments.sealed(stream);
        if store.writer.is_writing() || !order.into_iter().all(passed) {
            return None;
        }
        if store.segments.free() >= FREE_SEGMENTS_MIN {
            // Until another segment is sealed, looking again finds nothing else.
            self.all_pinned_at = store.segments.next_sequence();
            return None;
        }
        let oldest = |stream: Stream| {
            let number = store.segments.oldest(stream)?;
            Some((stream, number, false))
        };
        order.into_iter().find_map(oldest)
    }

    fn begin(
        &mut self,
        stream: Stream,
        segment: usize,
        keeps_pins: bool,
        store: &mut Store,
        retention: &mut Retention,
    ) {
        let lines = store.layout.lines_per_segment;
        let pinned = if keeps_pins {
            retention.pinned_bits(segment, store)
        } else {
            store.counters.losses += 1;
            0
        };
        let pinned_share = store.share_of_bits(segment, pinned);
        let keep = store.whole_segment().saturating_sub(pinned_share) / 2;
        let bonuses = retention.bonuses(stream, segment, store);
        let used = |least: u8| -> usize {
            (0..lines)
                .filter(|&slot| pinned >> slot & 1 == 0)
                .map(|slot| (store.index.line_at(segment, slot), bonuses[slot]))
                .filter(|&(line, bonus)| {
                    store.index.uses(line).saturating_add_signed(bonus) >= least
                })
                .map(|(line, _)| store.share_of(line))
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

    /// A line that is kept was read; without data, that has failed.
    pub fn line_read(
        &mut self,
        kept: Kept,
        data: Option<&[u8]>,
        store: &mut Store,
        retention: &mut Retention,
        content: Content,
    ) {
        let Some(emptying) = &mut self.emptying else {
            return;
        };
        emptying.reads -= 1;
        let Kept { line, key, uses } = kept;
        if store.find(key) != Some(line) {
            return;
        }
        let (sums, blocks) = line_checksums(data.unwrap_or_default());
        let sums = &sums[..blocks];
        let sound = store.index.checksums(line) == sums;
        if data.is_some() && !sound {
            store.counters.corrupt_blocks += 1;
        }
        let is_pinned = retention.is_pinned(key);
        let Some(data) = data.filter(|_| sound) else {
            store.index.unmap_line(line);
            store.counters.losses += u64::from(is_pinned);
            return;
        };
        let segment = store.index.segment_of(line);
        let aliases = retention.pinned_aliases(line, key, store);
        let was_small = store.segments.stream(segment) == Stream::Small;
        store.index.unmap_line(line);
        let shareable = store.index.find_content(sums).is_none();
        let new = NewLine {
            key,
            data,
            checksums: sums,
            shareable,
        };
        if let Some(line) = store.append(Stream::Main, new, content) {
            retention.taken(Stream::Main, key);
            let uses = if was_small { 0 } else { uses.saturating_sub(1) };
            store.index.set_uses(line, uses);
            for alias in aliases {
                if !store.index.add_alias(alias, line) {
                    store.counters.losses += 1;
                }
            }
        } else {
            store.counters.evicted_lines += 1;
            store.counters.losses += u64::from(is_pinned);
        }
    }

    fn finish(&mut self, store: &mut Store) {
        let Some(emptying) = &self.emptying else {
            return;
        };
        let segment = emptying.segment;
        // Permissions that were given stay good: checksums go only when the last is back.
        if store.segments.is_read(segment) {
            return;
        }
        store.index.clear_segment(segment);
        store.segments.release(segment);
        self.emptying = None;
    }
}

/// Whether a line that is kept now finds a place, or none will come by waiting.
fn can_keep(store: &Store) -> bool {
    let writer = &store.writer;
    writer.is_open(Stream::Main) || store.segments.free() == 0 || writer.can_open()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::io::BlockKey;
    use crate::cache::ssd::rig;

    struct Rig {
        evictor: Evictor,
        retention: Retention,
        store: Store,
        journal: Journal,
        device: Device,
        actions: Vec<Action>,
    }

    impl Rig {
        /// A tier with so many segments of the main stream on the medium, of which eviction is to keep all free.
        fn new(segments: u64) -> Self {
            let mut store = rig::store();
            let lines = store.layout.plain_lines as u64;
            for number in 0..segments {
                rig::seal_segment(&mut store, Stream::Main, number * lines);
            }
            let mut evictor = Evictor::default();
            evictor.set_marks(FillMarks {
                ratio_max: 0,
                ratio_health: 0,
                ..FillMarks::default()
            });
            Self {
                evictor,
                retention: Retention::new(0),
                store,
                journal: rig::journal(),
                device: rig::device(),
                actions: Vec::new(),
            }
        }

        fn step(&mut self) {
            let (store, retention) = (&mut self.store, &mut self.retention);
            (self.evictor).begin_if_due(store, retention, &mut self.journal);
            (self.evictor).drive(store, retention, &mut self.device, &mut self.actions);
        }

        /// Answer the reads that are under way with what was written; how many there were.
        fn answer(&mut self) -> usize {
            let asked = core::mem::take(&mut self.actions);
            for action in &asked {
                let &Action::CacheRead { token, .. } = action else {
                    panic!("{action:?}");
                };
                let Some(Op::Keep(kept)) = self.device.end(token) else {
                    panic!("only what is kept is read");
                };
                let data = rig::line(BlockKey(kept.key).block() / 4);
                let (store, retention) = (&mut self.store, &mut self.retention);
                (self.evictor).line_read(kept, Some(&data), store, retention, rig::content());
            }
            asked.len()
        }

        fn is_here(&self, number: u64) -> bool {
            self.store.find(rig::key(number)).is_some()
        }
    }

    #[test]
    fn evictor_empties_the_oldest_segment_of_what_nobody_used() {
        let mut rig = Rig::new(2);
        let lines = rig.store.layout.plain_lines as u64;
        rig.step();
        assert!(rig.actions.is_empty() && !rig.evictor.is_emptying());
        assert_eq!(rig.journal.queued(), 1, "the segment is void");
        assert!((0..lines).all(|number| !rig.is_here(number)));
        assert!((lines..2 * lines).all(|number| rig.is_here(number)));
        assert_eq!(rig.store.counters.evicted_lines, lines);
    }

    #[test]
    fn evictor_keeps_half_of_what_was_used_and_bounds_its_reads() {
        let mut rig = Rig::new(1);
        let lines = rig.store.layout.plain_lines as u64;
        for number in 0..lines {
            let line = rig.store.find(rig::key(number)).unwrap();
            rig.store.index.set_uses(line, 1);
        }
        let mut kept = 0;
        rig.step();
        while rig.evictor.is_emptying() {
            let reads = rig.answer();
            assert!(reads <= CACHE_READS_MAX);
            kept += reads as u64;
            rig.step();
        }
        assert_eq!(kept, lines / 2);
        assert_eq!(rig.store.index.used_lines() as u64, kept);
    }

    #[test]
    fn evictor_passes_pinned_segments_over_and_looks_again_when_pins_change() {
        let mut rig = Rig::new(2);
        let lines = rig.store.layout.plain_lines as u64;
        (rig.retention).pin(1, None, &[(0, 8 * lines)], 4, u64::MAX);
        rig.step();
        rig.step();
        assert!(!rig.evictor.is_emptying() && rig.journal.queued() == 0);
        (rig.retention).pin(1, None, &[(0, 4 * lines)], 4, u64::MAX);
        rig.step();
        assert!(!rig.evictor.is_emptying(), "nobody has said so");
        rig.evictor.look_again();
        rig.step();
        rig.step();
        assert!(rig.is_here(0) && !rig.is_here(lines));
        assert_eq!(rig.store.counters.losses, 0);
    }
}
