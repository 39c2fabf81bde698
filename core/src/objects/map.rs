//! Which slot of which object holds which block of the volume.
//!
//! The map is cut into pages of 4096 blocks; a page is a sorted list of runs of 12 bytes, so a block
//! of a volume that was written at random costs 12 bytes (13.5 with the slack of growing), and one of
//! a volume that was written in large pieces next to nothing.
//!
//! Invariants: runs of a page ascend, do not overlap, and are not empty; neighbours that continue
//! each other are one run.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Blocks of one page.
pub const PAGE_BLOCKS: u32 = 4096;

/// Set in the places of compressed objects, above every slot.
const COMPRESSED: u64 = 1 << 15;

/// Where a block lies: number of the object and slot in it, and whether the object is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(pub u64);

impl Place {
    /// A slot of an object.
    pub const fn new(number: u64, slot: u32) -> Self {
        debug_assert!(number < 1 << 48 && (slot as u64) < COMPRESSED);
        Self(number << 16 | slot as u64)
    }
    /// The same slot of an object that is compressed.
    #[must_use]
    pub const fn compressed(self) -> Self {
        Self(self.0 | COMPRESSED)
    }
    /// Whether the object is compressed.
    pub const fn is_compressed(self) -> bool {
        self.0 & COMPRESSED != 0
    }
    /// Number of the object.
    pub const fn number(self) -> u64 {
        self.0 >> 16
    }
    /// Slot in it.
    pub const fn slot(self) -> u32 {
        (self.0 & (COMPRESSED - 1)) as u32
    }
    /// The place so many slots later.
    #[must_use]
    pub const fn plus(self, slots: u32) -> Self {
        Self(self.0 + slots as u64)
    }
}

/// Consecutive blocks of a page in consecutive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First block, counted from the beginning of the page.
    pub first: u16,
    /// Number of blocks.
    pub count: u16,
    /// The place, in halves: a `u64` would cost four bytes of padding.
    halves: [u32; 2],
}

const _: () = assert!(size_of::<Run>() == 12);

impl Run {
    /// A run of `count` blocks.
    pub const fn new(first: u16, count: u16, place: Place) -> Self {
        Self {
            first,
            count,
            halves: [place.0 as u32, (place.0 >> 32) as u32],
        }
    }
    /// Place of the first block.
    pub const fn place(&self) -> Place {
        Place(self.halves[0] as u64 | (self.halves[1] as u64) << 32)
    }
    /// The first block after it.
    pub const fn end(&self) -> u32 {
        self.first as u32 + self.count as u32
    }
    /// The part from `from` up to but not including `to`, which it covers.
    const fn part(&self, from: u32, to: u32) -> Self {
        let place = self.place().plus(from - self.first as u32);
        Self::new(from as u16, (to - from) as u16, place)
    }
    /// Whether `next` continues it.
    fn continues(&self, next: &Self) -> bool {
        self.end() == u32::from(next.first)
            && self.place().plus(u32::from(self.count)) == next.place()
    }
}

/// 4096 blocks of the volume.
#[derive(Debug, Default)]
pub struct Page {
    runs: Vec<Run>,
    /// Whether it differs from what is stored.
    pub dirty: bool,
    /// Number of the object that has it stored; 0: none has.
    pub stored_in: u64,
    /// Whether an object of the volume itself was found to change it when it was opened.
    pub is_changed: bool,
}

impl Page {
    /// Its runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Let `from..to` name `place` on, or nothing; tells what was named there.
    fn set(
        &mut self,
        from: u32,
        to: u32,
        place: Option<Place>,
        freed: &mut impl FnMut(Place, u32),
    ) -> bool {
        let mut begin = self.runs.partition_point(|run| run.end() <= from);
        let mut end = begin;
        let mut left = None;
        let mut right = None;
        while let Some(run) = self.runs.get(end)
            && u32::from(run.first) < to
        {
            let (a, b) = (u32::from(run.first).max(from), run.end().min(to));
            freed(run.part(a, b).place(), b - a);
            if u32::from(run.first) < from {
                left = Some(run.part(u32::from(run.first), from));
            }
            if run.end() > to {
                right = Some(run.part(to, run.end()));
            }
            end += 1;
        }
        if place.is_none() && begin == end {
            return false;
        }
        let mut new = place.map(|place| Run::new(from as u16, (to - from) as u16, place));
        if let Some(run) = &mut new {
            if left.is_none() && begin > 0 && self.runs[begin - 1].continues(run) {
                begin -= 1;
                let before = self.runs[begin];
                *run = Run::new(before.first, before.count + run.count, before.place());
            }
            if right.is_none()
                && let Some(after) = self.runs.get(end)
                && run.continues(after)
            {
                *run = Run::new(run.first, run.count + after.count, run.place());
                end += 1;
            }
        }
        let parts = [left, new, right];
        let added = parts.iter().flatten().count();
        let needed = self.runs.len() - (end - begin) + added;
        if needed > self.runs.capacity() {
            // Growing by an eighth keeps the memory of a full page near that of its runs; by no more than some runs, it
            // is known before a change what it can cost.
            let more = needed - self.runs.len() + (needed / 8).min(SLACK_RUNS_MAX);
            self.runs.reserve_exact(more);
        }
        self.runs.splice(begin..end, parts.into_iter().flatten());
        if self.runs.len() * 2 < self.runs.capacity() {
            self.runs.shrink_to(self.runs.len() + self.runs.len() / 8);
        }
        true
    }
}

/// The map of a volume.
#[derive(Debug, Default)]
pub struct Map {
    pages: BTreeMap<u64, Page>,
    live_blocks: u64,
    memory_bytes: usize,
}

/// Memory of a page beside its runs, about: its entry in a tree.
const PAGE_OVERHEAD_BYTES: usize = 72;
/// Runs that a page that grows gets more room for than it needs, at most.
const SLACK_RUNS_MAX: usize = 32;
/// Memory that one change of one page can cost at most: the page, two runs more than there were, and room for others.
pub const CHANGE_BYTES_MAX: usize = PAGE_OVERHEAD_BYTES + (SLACK_RUNS_MAX + 2) * size_of::<Run>();

impl Map {
    /// Let `count` blocks from `block` be at `place` on, or nowhere. What they were at before goes
    /// to `freed`, run by run.
    pub fn set(
        &mut self,
        block: u64,
        count: u64,
        place: Option<Place>,
        mut freed: impl FnMut(Place, u32),
    ) {
        let page_blocks = u64::from(PAGE_BLOCKS);
        let end = block + count;
        let mut live = self.live_blocks;
        let mut freed = |place: Place, blocks: u32| {
            live -= u64::from(blocks);
            freed(place, blocks);
        };
        if let Some(place) = place {
            let mut at = block;
            while at < end {
                let number = at / page_blocks;
                let to = end.min((number + 1) * page_blocks);
                let page = self.pages.entry(number).or_insert_with(|| {
                    self.memory_bytes += PAGE_OVERHEAD_BYTES;
                    Page::default()
                });
                let capacity = page.runs.capacity();
                let first = number * page_blocks;
                let place = place.plus((at - block) as u32);
                page.set(
                    (at - first) as u32,
                    (to - first) as u32,
                    Some(place),
                    &mut freed,
                );
                page.dirty = true;
                self.memory_bytes -= capacity * size_of::<Run>();
                self.memory_bytes += page.runs.capacity() * size_of::<Run>();
                at = to;
            }
            live += count;
        } else {
            let numbers = block / page_blocks..end.div_ceil(page_blocks);
            for (&number, page) in self.pages.range_mut(numbers) {
                let first = number * page_blocks;
                let from = block.saturating_sub(first) as u32;
                let to = (end - first).min(page_blocks) as u32;
                let capacity = page.runs.capacity();
                page.dirty |= page.set(from, to, None, &mut freed);
                self.memory_bytes -= capacity * size_of::<Run>();
                self.memory_bytes += page.runs.capacity() * size_of::<Run>();
            }
        }
        self.live_blocks = live;
    }

    /// Where `block` is, and how many blocks from it on, at most `limit`, are at consecutive places
    /// (or nowhere).
    pub fn find(&self, block: u64, limit: u64) -> (Option<Place>, u64) {
        let page_blocks = u64::from(PAGE_BLOCKS);
        let number = block / page_blocks;
        let rest = (number + 1) * page_blocks - block;
        let Some(page) = self.pages.get(&number) else {
            // A gap may be many pages long.
            let next = self.pages.range(number..).next();
            let gap = next.map_or(limit, |(&next, _)| next * page_blocks - block);
            return (None, gap.min(limit));
        };
        let at = (block % page_blocks) as u32;
        let index = page.runs.partition_point(|run| run.end() <= at);
        match page.runs.get(index) {
            Some(run) if u32::from(run.first) <= at => {
                let part = run.part(at, run.end());
                (Some(part.place()), u64::from(part.count).min(limit))
            }
            Some(run) => (None, u64::from(u32::from(run.first) - at).min(limit)),
            None => (None, rest.min(limit)),
        }
    }

    /// Whether `count` blocks from `block` are nowhere.
    pub fn is_clear(&self, block: u64, count: u64) -> bool {
        let page_blocks = u64::from(PAGE_BLOCKS);
        let end = block + count;
        let numbers = block / page_blocks..end.div_ceil(page_blocks);
        self.pages.range(numbers).all(|(&number, page)| {
            let first = number * page_blocks;
            let from = block.saturating_sub(first) as u32;
            let to = (end - first).min(page_blocks) as u32;
            let index = page.runs.partition_point(|run| run.end() <= from);
            page.runs
                .get(index)
                .is_none_or(|run| u32::from(run.first) >= to)
        })
    }

    /// Memory that [`Self::load`] of a page with so many runs takes at most.
    pub const fn load_bytes(runs: usize) -> usize {
        PAGE_OVERHEAD_BYTES + runs * size_of::<Run>()
    }

    /// Take over a page that is stored in object `number`, unless a later one has it.
    pub fn load(&mut self, page: u64, runs: Vec<Run>, number: u64) {
        let entry = self.pages.entry(page).or_insert_with(|| {
            self.memory_bytes += PAGE_OVERHEAD_BYTES;
            Page::default()
        });
        if entry.stored_in > number {
            return;
        }
        let blocks = |runs: &[Run]| runs.iter().map(|run| u64::from(run.count)).sum::<u64>();
        self.live_blocks -= blocks(&entry.runs);
        self.live_blocks += blocks(&runs);
        self.memory_bytes -= entry.runs.capacity() * size_of::<Run>();
        self.memory_bytes += runs.capacity() * size_of::<Run>();
        *entry = Page {
            runs,
            dirty: false,
            stored_in: number,
            is_changed: false,
        };
    }

    /// Forget the pages from `page` on.
    pub fn truncate(&mut self, page: u64) {
        for gone in self.pages.split_off(&page).into_values() {
            self.memory_bytes -= PAGE_OVERHEAD_BYTES + gone.runs.capacity() * size_of::<Run>();
            self.live_blocks -= (gone.runs.iter())
                .map(|run| u64::from(run.count))
                .sum::<u64>();
        }
    }

    /// The volume itself has changed what is within `count` blocks from `block`.
    pub fn mark_changed(&mut self, block: u64, count: u64) {
        let page_blocks = u64::from(PAGE_BLOCKS);
        let numbers = block / page_blocks..(block + count).div_ceil(page_blocks);
        for (_, page) in self.pages.range_mut(numbers) {
            page.is_changed = true;
        }
    }

    /// Every page from `first` on, in order.
    pub fn pages(&self, first: u64) -> impl Iterator<Item = (u64, &Page)> {
        self.pages
            .range(first..)
            .map(|(&number, page)| (number, page))
    }

    /// A page.
    pub fn page(&self, number: u64) -> Option<&Page> {
        self.pages.get(&number)
    }

    /// A page, to change what is known of how it is stored.
    pub fn page_mut(&mut self, number: u64) -> Option<&mut Page> {
        self.pages.get_mut(&number)
    }

    /// Blocks that are somewhere.
    pub fn live_blocks(&self) -> u64 {
        self.live_blocks
    }

    /// Approximate memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Stop at what cannot be. Costs the whole map.
    pub fn check_invariants(&self) {
        let mut live = 0;
        let mut memory = 0;
        for page in self.pages.values() {
            memory += PAGE_OVERHEAD_BYTES + page.runs.capacity() * size_of::<Run>();
            for pair in page.runs.windows(2) {
                assert!(
                    pair[0].end() <= u32::from(pair[1].first) && !pair[0].continues(&pair[1]),
                    "runs of a page: {pair:?}"
                );
            }
            for run in &page.runs {
                assert!(run.count > 0 && run.end() <= PAGE_BLOCKS, "a run: {run:?}");
                live += u64::from(run.count);
            }
        }
        assert_eq!(live, self.live_blocks, "live blocks are counted");
        assert_eq!(memory, self.memory_bytes, "memory is counted");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn map_agrees_with_an_array() {
        let mut random = fastrand::Rng::with_seed(4);
        let blocks = 3 * PAGE_BLOCKS as usize;
        for round in 0..4 {
            let mut map = Map::default();
            let mut model = vec![None; blocks];
            for number in 1..600u64 {
                let longest = if round % 2 == 0 { 40 } else { 3000 };
                let first = random.usize(0..blocks);
                let count = random.usize(1..=longest).min(blocks - first);
                let place =
                    (random.u8(0..4) > 0).then(|| Place::new(number / 3 + 1, random.u32(0..1000)));
                let mut freed = Vec::new();
                map.set(first as u64, count as u64, place, |place, blocks| {
                    freed.extend((0..blocks).map(|slot| place.plus(slot)));
                });
                let old: Vec<_> = model[first..first + count]
                    .iter()
                    .flatten()
                    .copied()
                    .collect();
                assert_eq!(freed, old);
                for (index, slot) in model[first..first + count].iter_mut().enumerate() {
                    *slot = place.map(|place| place.plus(index as u32));
                }
                let (first, count) = (random.usize(0..blocks), random.usize(1..100));
                let count = count.min(blocks - first);
                let clear = model[first..first + count].iter().all(Option::is_none);
                assert_eq!(map.is_clear(first as u64, count as u64), clear);
            }
            map.check_invariants();
            let mut at = 0;
            while at < blocks as u64 {
                let (place, count) = map.find(at, blocks as u64 - at);
                assert!(count > 0);
                for index in 0..count {
                    let expected = model[(at + index) as usize];
                    assert_eq!(place.map(|place| place.plus(index as u32)), expected);
                }
                at += count;
            }
        }
    }

    #[test]
    fn map_of_random_writes_costs_at_most_14_bytes_a_block() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut map = Map::default();
        let mut order: Vec<u64> = (0..16 * u64::from(PAGE_BLOCKS)).collect();
        random.shuffle(&mut order);
        for (index, &block) in order.iter().enumerate() {
            let place = Place::new(1 + index as u64 / 4096, index as u32 % 4096);
            map.set(block, 1, Some(place), |_, _| {});
        }
        let bytes = map.memory_bytes() as u64;
        assert!(bytes <= 14 * map.live_blocks(), "{bytes} bytes");
    }

    #[test]
    fn map_grows_by_no_more_than_it_is_said_to() {
        let mut random = fastrand::Rng::with_seed(6);
        let mut map = Map::default();
        for number in 1..40_000_u64 {
            let block = random.u64(0..2 * u64::from(PAGE_BLOCKS));
            let count = random.u64(1..=3);
            let place = (random.u8(0..5) > 0).then(|| Place::new(number, 0));
            let before = map.memory_bytes();
            map.set(block, count, place, |_, _| {});
            let pages =
                block / u64::from(PAGE_BLOCKS)..=(block + count - 1) / u64::from(PAGE_BLOCKS);
            let most = pages.count() * CHANGE_BYTES_MAX;
            assert!(map.memory_bytes() <= before + most, "change {number}");
        }
        map.check_invariants();
    }

    #[test]
    fn map_takes_the_later_of_two_stored_pages() {
        let mut map = Map::default();
        let runs = |number| vec![Run::new(0, 2, Place::new(number, 0))];
        map.load(1, runs(10), 8);
        map.load(1, runs(5), 6);
        assert_eq!(map.find(4096, 9), (Some(Place::new(10, 0)), 2));
        map.load(1, Vec::new(), 9);
        assert_eq!(map.find(4096, 9).0, None);
        map.check_invariants();
    }

    #[test]
    fn map_forgets_its_last_pages() {
        let mut map = Map::default();
        for page in 0..4 {
            map.set(page * 4096 + 7, 3, Some(Place::new(5, 0)), |_, _| {});
        }
        map.truncate(2);
        assert_eq!(
            (map.find(4096 + 7, 9).1, map.find(8192 + 7, 9).0),
            (3, None)
        );
        assert_eq!((map.live_blocks(), map.pages(0).count()), (6, 2));
        map.check_invariants();
    }
}
