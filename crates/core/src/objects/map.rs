//! Which slot of which object holds which block of the volume.
//!
//! ```text
//!            newest                                                            oldest
//!  find ──► changes.fresh ──gap──► changes.frozen ──gap──► directory ──► page, from the cache or the store
//!               ▲ sealed objects        │ merged into pages that are stored      ▲
//!               └───────────────────────┴────────────────────────────────────────┘ a checkpoint
//! ```
//!
//! The map is cut into pages of consecutive blocks. A page is a sorted list of runs of 12 bytes, lies in an
//! object of the map, and is read alone. In memory there are the directory, 8 bytes a page; pages that were
//! used lately ([`cache`]); and what has changed since the pages were stored ([`changes`]).
//!
//! Invariants:
//! 1. Runs of a page ascend, do not overlap, and are not empty; neighbours that continue each other are one run.
//! 2. What the changes say counts, then what the page says to which the directory points.
//! 3. A page in the cache is the one to which the directory points.
//! 4. Memory is bounded: changes by their number, the cache by its bytes, the directory by the volume's size.

pub mod cache;
pub mod changes;
pub mod directory;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use cache::PageCache;
use changes::Changes;
use directory::{Directory, Entry};

use crate::base::limits::OBJECT_PAGE_BLOCKS_MAX;

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

/// The runs of one page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    runs: Vec<Run>,
}

impl Page {
    /// A page with these runs, which are as invariant 1 says but for neighbours.
    pub const fn new(runs: Vec<Run>) -> Self {
        Self { runs }
    }

    /// A page of so many blocks of which nobody knows where they are: at places, from this one on, of an object that there
    /// is not.
    pub fn lost(blocks: u64, place: Place) -> Self {
        Self::new(alloc::vec![Run::new(0, blocks as u16, place)])
    }

    /// Its runs.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Blocks that it maps.
    pub fn blocks(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.count)).sum()
    }

    /// Where the block `at` of the page is, and how many blocks from it on are at consecutive places, or
    /// nowhere; of a gap at the end, all that may be.
    pub fn find(&self, at: u32) -> (Option<Place>, u64) {
        let index = self.runs.partition_point(|run| run.end() <= at);
        match self.runs.get(index) {
            Some(run) if u32::from(run.first) <= at => {
                let part = run.part(at, run.end());
                (Some(part.place()), u64::from(part.count))
            }
            Some(run) => (None, u64::from(u32::from(run.first) - at)),
            None => (None, u64::MAX),
        }
    }

    /// Let `from..to` be at `place` on, or nowhere; tells where it was before, run by run.
    pub fn set(
        &mut self,
        from: u32,
        to: u32,
        place: Option<Place>,
        mut freed: impl FnMut(Place, u32),
    ) {
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
        self.runs.splice(begin..end, parts.into_iter().flatten());
    }

    /// Stop at what cannot be.
    pub fn check_invariants(&self) {
        for pair in self.runs.windows(2) {
            assert!(
                pair[0].end() <= u32::from(pair[1].first) && !pair[0].continues(&pair[1]),
                "runs of a page: {pair:?}"
            );
        }
        assert!(self.runs.iter().all(|run| run.count > 0));
    }
}

/// What is known of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It and so many blocks in all from it on are at consecutive places, or nowhere.
    Here(Option<Place>, u64),
    /// Its page has to be read first.
    Page(u64),
}

/// The map of a volume.
#[derive(Debug)]
pub struct Map {
    page_blocks: u64,
    /// What was sealed since the last checkpoint began.
    pub fresh: Changes,
    /// What the checkpoint under way merges into the pages.
    pub frozen: Changes,
    /// What is merged, and forgotten in bounded steps.
    merged: VecDeque<Changes>,
    /// Where the pages are.
    pub directory: Directory,
    /// Pages that were used lately.
    pub cache: PageCache,
    /// Changes that wait to be merged, at which writes wait.
    changes_max: usize,
}

impl Map {
    /// An empty map whose cache has so much memory and never fewer than so many pages, and which takes so many changes.
    pub fn new(cache_bytes: usize, cache_pages_min: usize, changes_max: usize) -> Self {
        Self {
            page_blocks: u64::from(OBJECT_PAGE_BLOCKS_MAX),
            fresh: Changes::default(),
            frozen: Changes::default(),
            merged: VecDeque::new(),
            directory: Directory::default(),
            cache: PageCache::new(cache_bytes, cache_pages_min),
            changes_max,
        }
    }

    /// Blocks of a page.
    pub const fn page_blocks(&self) -> u64 {
        self.page_blocks
    }

    /// Say how many blocks a page has, while the map is empty.
    pub fn set_page_blocks(&mut self, blocks: u32) {
        assert!(self.directory.is_empty() && blocks > 0);
        self.page_blocks = u64::from(blocks);
    }

    /// Where `block` is, and how many blocks from it on, at most `limit`, are at consecutive places or nowhere.
    pub fn find(&self, block: u64, limit: u64) -> Found {
        let mut limit = limit;
        for changes in [&self.fresh, &self.frozen] {
            let (change, count) = changes.find(block, limit);
            match change {
                Some(place) => return Found::Here(place, count),
                None => limit = count,
            }
        }
        let page = block / self.page_blocks;
        let Some(entry) = self.directory.get(page) else {
            // A gap may be many pages long.
            let next = self.directory.next(page);
            let gap = next.map_or(limit, |next| next * self.page_blocks - block);
            return Found::Here(None, gap.min(limit));
        };
        let rest = (page + 1) * self.page_blocks - block;
        if entry.is_empty() {
            return Found::Here(None, rest.min(limit));
        }
        match self.cache.get(page, entry) {
            Some(content) => {
                let (place, count) = content.find((block % self.page_blocks) as u32);
                Found::Here(place, count.min(rest).min(limit))
            }
            None => Found::Page(page),
        }
    }

    /// Whether it is known without reading anything that `count` blocks from `block` are nowhere.
    pub fn is_clear(&self, block: u64, count: u64) -> bool {
        self.find(block, count) == Found::Here(None, count)
    }

    /// Whether there are so many changes that they should be merged, however large the map is.
    pub fn has_many_changes(&self) -> bool {
        self.fresh.len() >= self.changes_max / 2
    }

    /// Whether there are so many changes that writes have to wait.
    pub fn has_too_many_changes(&self) -> bool {
        self.fresh.len() + self.frozen.len() >= self.changes_max
    }

    /// Whether copies leave clients enough of the changes that there may be.
    pub fn has_room_for_copies(&self) -> bool {
        self.fresh.len() + self.frozen.len() < self.changes_max.div_ceil(2)
    }

    /// The pages have what was frozen.
    pub fn thaw(&mut self) {
        self.merged.push_back(core::mem::take(&mut self.frozen));
    }

    /// Forget up to so many changes that are merged; true if there are more.
    pub fn forget_merged(&mut self, most: usize) -> bool {
        if let Some(merged) = self.merged.front_mut() {
            merged.forget_some(most);
            if merged.is_empty() {
                self.merged.pop_front();
            }
        }
        !self.merged.is_empty()
    }

    /// What a page becomes whose content the store does not give any more, in a volume of so many blocks: nothing if all of
    /// it is written over by what is frozen; else its blocks are lost, if they may be, or if all of them were written over
    /// since. `number` is that of the object that had it, and of no data object.
    pub fn without(&self, page: u64, blocks: u64, number: u64, may_lose: bool) -> Option<Page> {
        let begin = page * self.page_blocks;
        let count = blocks.saturating_sub(begin).min(self.page_blocks);
        let end = begin + count;
        let covers = |changes: &Changes| {
            let changed = changes.range(begin, end).map(|(_, count, _)| count);
            changed.sum::<u64>() == count
        };
        if covers(&self.frozen) {
            return Some(Page::default());
        }
        let mut both = Changes::default();
        for changes in [&self.frozen, &self.fresh] {
            for (block, count, place) in changes.range(begin, end) {
                both.set(block, count, place);
            }
        }
        let is_lost = may_lose || covers(&both);
        is_lost.then(|| Page::lost(count, Place::new(number, 0)))
    }

    /// How many blocks from `block` on, at most `limit`, are what their pages say.
    pub fn unchanged(&self, block: u64, limit: u64) -> u64 {
        let fresh = self.fresh.find(block, limit).1;
        self.frozen.find(block, fresh).1
    }

    /// Whether it is known without reading its page that all blocks of a page are somewhere.
    pub fn is_full(&self, page: u64) -> bool {
        self.directory.get(page).is_some_and(Entry::is_full)
    }

    /// Approximate memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        let merged = self.merged.iter().map(Changes::memory_bytes);
        self.fresh.memory_bytes()
            + self.frozen.memory_bytes()
            + merged.sum::<usize>()
            + self.directory.memory_bytes()
            + self.cache.memory_bytes()
    }

    /// Stop at what cannot be. Costs the directory and the cache.
    pub fn check_invariants(&self) {
        self.fresh.check_invariants();
        self.frozen.check_invariants();
        self.directory.check_invariants();
        self.cache.check_invariants();
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn page_agrees_with_an_array() {
        let mut random = fastrand::Rng::with_seed(4);
        let blocks = 1024;
        for round in 0..4 {
            let mut page = Page::default();
            let mut model = vec![None; blocks];
            for number in 1..600u64 {
                let longest = if round % 2 == 0 { 40 } else { 1000 };
                let first = random.usize(0..blocks);
                let count = random.usize(1..=longest).min(blocks - first);
                let place =
                    (random.u8(0..4) > 0).then(|| Place::new(number / 3 + 1, random.u32(0..1000)));
                let mut freed = Vec::new();
                page.set(
                    first as u32,
                    (first + count) as u32,
                    place,
                    |place, blocks| {
                        freed.extend((0..blocks).map(|slot| place.plus(slot)));
                    },
                );
                let old = model[first..first + count].iter().flatten();
                assert_eq!(freed, old.copied().collect::<Vec<_>>());
                for (index, slot) in model[first..first + count].iter_mut().enumerate() {
                    *slot = place.map(|place| place.plus(index as u32));
                }
            }
            page.check_invariants();
            for (block, slot) in model.iter().enumerate() {
                let (place, count) = page.find(block as u32);
                assert_eq!(place, *slot, "block {block}");
                assert!(count > 0);
            }
            assert_eq!(page.blocks(), model.iter().flatten().count() as u64);
        }
    }

    #[test]
    fn map_finds_the_newest_first_and_asks_for_pages() {
        let mut map = Map::new(1 << 20, 4, 1000);
        map.set_page_blocks(64);
        let entry = Entry::new(3, 0, 128);
        map.directory.set(2, Some(entry));
        let at = |number, slot| Some(Place::new(number, slot));
        assert_eq!(map.find(0, 1000), Found::Here(None, 128), "up to the page");
        assert_eq!(map.find(130, 1000), Found::Page(2));
        let runs = vec![Run::new(0, 10, Place::new(5, 0))];
        map.cache.insert(2, entry, Page::new(runs));
        assert_eq!(map.find(130, 1000), Found::Here(at(5, 2), 8));
        map.frozen.set(132, 2, at(6, 0));
        map.fresh.set(133, 1, None);
        assert_eq!(map.find(130, 1000), Found::Here(at(5, 2), 2));
        assert_eq!(map.find(132, 1000), Found::Here(at(6, 0), 1));
        assert_eq!(map.find(133, 1000), Found::Here(None, 1));
        assert_eq!(map.find(134, 1000), Found::Here(at(5, 6), 4));
        assert_eq!(map.find(138, 1000), Found::Here(None, 54));
        assert!(map.is_clear(138, 54) && !map.is_clear(138, 55));
        map.directory.set(2, Some(Entry::new(4, 0, 128)));
        assert_eq!(map.find(138, 1000), Found::Page(2), "another page by now");
        map.check_invariants();
    }
}
