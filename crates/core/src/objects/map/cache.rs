//! Pages of the map that were used lately: the clock algorithm, by bytes.
//!
//! It never has fewer pages than a given number, however large they are: a page that was fetched for somebody
//! stays until its turn comes, since between two gets of one kind only so many others begin.

use alloc::collections::{BTreeMap, VecDeque};
use core::cell::Cell;

use super::directory::Entry;
use super::{Page, Run};

/// Memory of a page beside its runs: its places in a tree and in a queue.
const OVERHEAD_BYTES: usize = 96;

#[derive(Debug)]
struct Cached {
    entry: Entry,
    page: Page,
    was_used: Cell<bool>,
}

/// See the module.
#[derive(Debug)]
pub struct PageCache {
    pages: BTreeMap<u64, Cached>,
    /// Every page, the one that is looked at next in front.
    clock: VecDeque<u64>,
    bytes: usize,
    bytes_max: usize,
    pages_min: usize,
}

fn bytes_of(page: &Page) -> usize {
    page.runs.capacity() * size_of::<Run>() + OVERHEAD_BYTES
}

impl PageCache {
    /// A cache of so many bytes, and of so many pages at least.
    pub const fn new(bytes_max: usize, pages_min: usize) -> Self {
        Self {
            pages: BTreeMap::new(),
            clock: VecDeque::new(),
            bytes: 0,
            bytes_max,
            pages_min,
        }
    }

    /// A page, if it is here as it is at `entry`.
    pub fn get(&self, number: u64, entry: Entry) -> Option<&Page> {
        let cached = self.pages.get(&number)?;
        if cached.entry != entry {
            return None;
        }
        cached.was_used.set(true);
        Some(&cached.page)
    }

    /// A page has another content now, which is not known here.
    pub fn forget(&mut self, number: u64) {
        if let Some(cached) = self.pages.get_mut(&number) {
            self.bytes -= bytes_of(&cached.page);
            cached.entry = Entry::NONE;
            cached.page = Page::default();
            cached.was_used.set(false);
            self.bytes += bytes_of(&cached.page);
        }
    }

    /// Whether a page is here, in any version.
    pub fn holds(&self, number: u64) -> bool {
        self.pages.contains_key(&number)
    }

    /// Whether there is room for more without giving up anything.
    pub const fn has_room(&self) -> bool {
        self.bytes < self.bytes_max / 8 * 7
    }

    /// Keep a page.
    pub fn insert(&mut self, number: u64, entry: Entry, page: Page) {
        self.bytes += bytes_of(&page);
        let cached = Cached {
            entry,
            page,
            was_used: Cell::new(false),
        };
        match self.pages.insert(number, cached) {
            Some(before) => self.bytes -= bytes_of(&before.page),
            None => self.clock.push_back(number),
        }
        while self.bytes > self.bytes_max && self.pages.len() > self.pages_min {
            self.evict();
        }
    }

    fn evict(&mut self) {
        while let Some(number) = self.clock.pop_front() {
            match self.pages.get(&number) {
                Some(cached) if cached.was_used.take() => self.clock.push_back(number),
                Some(cached) => {
                    self.bytes -= bytes_of(&cached.page);
                    self.pages.remove(&number);
                    return;
                }
                None => {}
            }
        }
    }

    /// Approximate memory in bytes.
    pub const fn memory_bytes(&self) -> usize {
        self.bytes
    }

    /// Stop at what cannot be. Costs the cache.
    pub fn check_invariants(&self) {
        let bytes = self.pages.values().map(|cached| bytes_of(&cached.page));
        assert_eq!(
            bytes.sum::<usize>(),
            self.bytes,
            "bytes of pages are counted"
        );
        assert_eq!(self.pages.len(), self.clock.len());
        for cached in self.pages.values() {
            cached.page.check_invariants();
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::super::Place;
    use super::*;

    fn page(runs: u16) -> Page {
        let run = |index| Run::new(index * 2, 1, Place::new(1, 0));
        Page::new((0..runs).map(run).collect())
    }

    #[test]
    fn cache_is_bounded_and_keeps_what_is_used() {
        let entry = Entry::new(1, 0, 64);
        let mut cache = PageCache::new(100 * (OVERHEAD_BYTES + 120), 4);
        for number in 0..1000 {
            cache.insert(number, entry, page(10));
            assert!(cache.get(0, entry).is_some(), "used all the time");
            assert!(cache.memory_bytes() <= 100 * (OVERHEAD_BYTES + 120));
        }
        assert!(cache.get(1, entry).is_none() && cache.get(999, entry).is_some());
        cache.check_invariants();
    }

    #[test]
    fn cache_keeps_a_few_pages_of_any_size_and_knows_their_version() {
        let mut cache = PageCache::new(0, 3);
        let entry = |offset| Entry::new(1, offset, 64);
        for number in 0..9 {
            cache.insert(number, entry(0), page(100));
        }
        let kept: vec::Vec<u64> = (0..9).filter(|&number| cache.holds(number)).collect();
        assert_eq!(kept, [6, 7, 8]);
        assert!(cache.get(8, entry(64)).is_none());
        cache.insert(8, entry(64), page(1));
        assert!(cache.get(8, entry(64)).is_some());
        cache.check_invariants();
        cache.forget(8);
        assert!(cache.get(8, entry(64)).is_none());
        cache.check_invariants();
    }
}
