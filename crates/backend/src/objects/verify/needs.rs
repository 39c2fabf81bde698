//! What a volume needs of its data objects: runs of blocks, of as many objects as fit into memory.
//!
//! It begins with all objects from a number on. When memory is full, what several manifests need is put
//! together, and then the objects with the highest numbers are left for the next pass. Thus one walk over the
//! maps finds out how far a pass reaches, and what it has is complete.
//!
//! Invariants: of the objects in [`Needs::range`] every run that was added is there; of others there is none.

use std::ops::Range;

use hdcs_core::base::limits::OBJECT_BATCH_BLOCKS_MAX;
use hdcs_core::objects::map::Place;

use super::BLOCKS_MAX;

const _: () = assert!(
    BLOCKS_MAX <= 1 << 32,
    "a packed run has 32 bits for its block"
);
/// Runs of one object that are kept, whatever their bound: more than it has slots. If there were more, two
/// blocks would be in one slot, and one of them is bad among these already.
const OBJECT_RUNS_KEPT_MIN: usize = OBJECT_BATCH_BLOCKS_MAX + 1;

/// A run of blocks that somebody needs of an object: consecutive blocks in consecutive slots. Of none if an
/// object is only to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub place: Place,
    pub block: u64,
    pub count: u32,
}

impl Run {
    /// In 16 bytes, which sort by object, slot and block.
    const fn packed(self) -> u128 {
        (self.place.0 as u128) << 64 | (self.block as u128) << 32 | self.count as u128
    }

    const fn unpacked(packed: u128) -> Self {
        Self {
            place: Place((packed >> 64) as u64),
            block: (packed >> 32) as u64 & 0xffff_ffff,
            count: packed as u32,
        }
    }

    /// Take in a run that does not begin before it; false if that is about other blocks, slots or objects.
    fn extend(&mut self, next: &Self) -> bool {
        let slots = next.place.0 - self.place.0;
        let is_continued = next.place.number() == self.place.number()
            && slots <= u64::from(self.count)
            && next.block.checked_sub(self.block) == Some(slots);
        if is_continued {
            self.count = self.count.max(slots as u32 + next.count);
        }
        is_continued
    }
}

/// See the module.
pub(super) struct Needs {
    range: Range<u64>,
    runs: Vec<u128>,
    /// How many of them there may be.
    runs_max: usize,
    /// How many there may be before they are put together.
    full_at: usize,
}

impl Needs {
    /// Nothing yet of the objects with these numbers, with room for so many runs.
    pub fn new(range: Range<u64>, runs_max: usize) -> Self {
        Self {
            range,
            runs: Vec::new(),
            runs_max,
            full_at: runs_max,
        }
    }

    /// Numbers of the objects of which it is complete.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// A run is needed.
    pub fn add(&mut self, run: Run) {
        if !self.range.contains(&run.place.number()) {
            return;
        }
        if self.runs.len() >= self.full_at {
            self.make_room();
            if !self.range.contains(&run.place.number()) {
                return;
            }
        }
        if self.runs.capacity() == 0 {
            // Doubling would take half as much again while it copies.
            self.runs.reserve_exact(self.runs_max);
        }
        self.runs.push(run.packed());
    }

    /// Put together what continues or repeats something else, so that nothing is verified twice.
    pub fn merge(&mut self) {
        self.runs.sort_unstable();
        let mut kept: usize = 0;
        for index in 0..self.runs.len() {
            let run = Run::unpacked(self.runs[index]);
            if let Some(last) = kept.checked_sub(1) {
                let mut before = Run::unpacked(self.runs[last]);
                if before.extend(&run) {
                    self.runs[last] = before.packed();
                    continue;
                }
            }
            self.runs[kept] = run.packed();
            kept += 1;
        }
        self.runs.truncate(kept);
    }

    /// Leave objects for later until an eighth is free, so that it is not full again at once.
    fn make_room(&mut self) {
        self.merge();
        let room = self.runs_max / 8 * 7;
        if self.runs.len() > room {
            let number = |packed: u128| Run::unpacked(packed).place.number();
            // An object is there as a whole or not at all.
            let first = number(self.runs[0]);
            let end = number(self.runs[room]).max(first + 1);
            self.range.end = end;
            let mut kept = self.runs.partition_point(|&run| number(run) < end);
            if end == first + 1 {
                kept = kept.min(room.max(OBJECT_RUNS_KEPT_MIN));
            }
            self.runs.truncate(kept);
        }
        let more = (self.runs_max / 8).max(1);
        self.full_at = self.runs_max.max(self.runs.len() + more);
    }

    /// Every object with its runs, ascending. They were merged.
    pub fn objects(&self) -> impl Iterator<Item = (u64, &[u128])> {
        let number = |packed: u128| Run::unpacked(packed).place.number();
        self.runs
            .chunk_by(move |&a, &b| number(a) == number(b))
            .map(move |runs| (number(runs[0]), runs))
    }
}

/// The runs of an object.
pub(super) fn unpacked(runs: &[u128]) -> impl Iterator<Item = Run> {
    runs.iter().map(|&packed| Run::unpacked(packed))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn run(number: u64, slot: u32, block: u64, count: u32) -> Run {
        let place = Place::new(number, slot);
        Run {
            place,
            block,
            count,
        }
    }

    #[test]
    fn needs_are_merged_so_that_nothing_is_verified_twice_and_nothing_forgotten() {
        let mut needs = Needs::new(0..u64::MAX, 100);
        for (number, slot, block, count) in [
            (1, 8, 8, 56),
            (1, 0, 0, 64),
            (1, 10, 10, 2),
            (1, 70, 70, 1),
            (1, 90, 70, 1),
            (1, 64, 64, 2),
            (2, 66, 66, 3),
        ] {
            needs.add(run(number, slot, block, count));
        }
        needs.add(run(2, 0, 0, 0));
        needs.merge();
        let found: Vec<Vec<Run>> = needs
            .objects()
            .map(|(_, of)| unpacked(of).collect())
            .collect();
        let first = vec![run(1, 0, 0, 66), run(1, 70, 70, 1), run(1, 90, 70, 1)];
        assert_eq!(found, [first, vec![run(2, 0, 0, 0), run(2, 66, 66, 3)]]);
    }

    #[test]
    fn passes_find_what_one_finds_within_their_bound() {
        let mut random = fastrand::Rng::with_seed(3);
        // Runs of 40 objects, each needed by some of three manifests.
        let mut all = Vec::new();
        for number in 0..40 {
            for slot in 0..random.u32(1..30) {
                let wanted = run(
                    number * 7 + 1,
                    slot * 3,
                    random.u64(..1 << 32),
                    random.u32(1..3),
                );
                all.extend(std::iter::repeat_n(wanted, random.usize(1..4)));
            }
        }
        random.shuffle(&mut all);
        let walk = |from: u64, runs_max: usize| {
            let mut needs = Needs::new(from..1000, runs_max);
            let mut most = 0;
            for &run in &all {
                needs.add(run);
                most = most.max(needs.runs.len());
            }
            needs.merge();
            (needs, most)
        };
        let collect = |needs: &Needs| -> BTreeMap<u64, Vec<Run>> {
            let objects = needs.objects();
            objects
                .map(|(number, of)| (number, unpacked(of).collect()))
                .collect()
        };
        let whole = collect(&walk(0, 1 << 20).0);
        assert_eq!(whole.len(), 40);
        let (mut found, mut from, mut passes) = (BTreeMap::new(), 0, 0);
        while from < 1000 {
            let (needs, most) = walk(from, 64);
            assert!(most <= 64, "{most} runs");
            assert!(needs.range().start == from && needs.range().end > from);
            found.extend(collect(&needs));
            (from, passes) = (needs.range().end, passes + 1);
        }
        assert_eq!(found, whole);
        assert!((5..40).contains(&passes), "{passes} passes");
    }

    #[test]
    fn needs_of_one_object_beyond_all_bounds_keep_more_than_it_has_slots() {
        let mut needs = Needs::new(0..u64::MAX, 64);
        needs.add(run(9, 0, 0, 1));
        // No sound map says so: every block in one slot.
        for block in 0..50_000 {
            needs.add(run(5, 1, block * 2, 1));
        }
        needs.merge();
        let counts: Vec<_> = needs
            .objects()
            .map(|(number, of)| (number, of.len()))
            .collect();
        let [(5, kept)] = counts[..] else {
            panic!("{counts:?}");
        };
        assert!((OBJECT_RUNS_KEPT_MIN..6000).contains(&kept), "{kept}");
        assert_eq!(needs.range(), 0..6);
    }
}
