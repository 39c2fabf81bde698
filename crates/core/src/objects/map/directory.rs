//! Where the pages of the map are stored: 8 bytes for each.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;

use crate::base::limits::{OBJECT_MAP_BYTES_MAX, OBJECT_MAPS_MAX, OBJECT_PAGE_BYTES_MAX};

/// Pages begin at multiples of this in their object, so that an entry has room for everything.
pub const PAGE_ALIGN: usize = 64;

const PRESENT: u64 = 1 << 63;
const FULL: u64 = 1 << 62;
const INHERITED: u64 = 1 << 61;
const OFFSET_BITS: u32 = 20;
const LENGTH_BITS: u32 = 12;

const _: () = assert!(
    OBJECT_MAP_BYTES_MAX / PAGE_ALIGN < 1 << OFFSET_BITS
        && OBJECT_PAGE_BYTES_MAX / PAGE_ALIGN < 1 << LENGTH_BITS
        && OBJECT_MAPS_MAX * 4 < 1 << 28,
    "an entry has room for a page anywhere in any object"
);

/// Where a page is: the slot of its object in the list of objects, its offset there, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(u64);

impl Entry {
    /// No page is there.
    pub const NONE: Self = Self(0);

    /// A page of `bytes` at `offset` of an object; none: the object says that nothing is in the page any more.
    pub const fn new(slot: u32, offset: usize, bytes: usize) -> Self {
        debug_assert!(offset.is_multiple_of(PAGE_ALIGN));
        let length = bytes.div_ceil(PAGE_ALIGN) as u64;
        let offset = (offset / PAGE_ALIGN) as u64;
        Self(
            PRESENT | (slot as u64) << (OFFSET_BITS + LENGTH_BITS) | offset << LENGTH_BITS | length,
        )
    }

    /// The same page, of which every block is somewhere, or which is of an ancestor as a whole.
    #[must_use]
    pub const fn with(self, is_full: bool, is_inherited: bool) -> Self {
        let full = if is_full { FULL } else { 0 };
        let inherited = if is_inherited { INHERITED } else { 0 };
        Self(self.0 | full | inherited)
    }

    /// Slot of its object.
    pub const fn slot(self) -> u32 {
        (self.0 >> (OFFSET_BITS + LENGTH_BITS)) as u32 & ((1 << 28) - 1)
    }

    /// Offset in its object.
    pub const fn offset(self) -> usize {
        (self.0 >> LENGTH_BITS) as usize % (1 << OFFSET_BITS) * PAGE_ALIGN
    }

    /// Bytes from there on that it takes, filled up to a multiple of [`PAGE_ALIGN`].
    pub const fn bytes(self) -> usize {
        self.0 as usize % (1 << LENGTH_BITS) * PAGE_ALIGN
    }

    /// Whether nothing is in it, so that there is nothing to read.
    pub const fn is_empty(self) -> bool {
        self.bytes() == 0
    }

    /// Whether every block of it is somewhere.
    pub const fn is_full(self) -> bool {
        self.0 & FULL != 0
    }

    /// Whether no object of the volume that stored it has changed it.
    pub const fn is_inherited(self) -> bool {
        self.0 & INHERITED != 0
    }

    /// Whether `next` lies right behind it.
    pub const fn is_followed_by(self, next: Self) -> bool {
        self.slot() == next.slot()
            && self.offset() + self.bytes() == next.offset()
            && !next.is_empty()
    }
}

/// Pages of one chunk of the directory.
const CHUNK_PAGES: u64 = 512;

/// See the module.
#[derive(Debug, Default)]
pub struct Directory {
    chunks: BTreeMap<u64, Chunk>,
    pages: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Chunk {
    pages: u32,
    /// Zero: no such page.
    entries: Box<[u64; CHUNK_PAGES as usize]>,
}

/// Memory of a chunk: its entries, and its place in a tree.
const CHUNK_BYTES: usize = CHUNK_PAGES as usize * 8 + 48;

impl Directory {
    /// Where a page is.
    pub fn get(&self, page: u64) -> Option<Entry> {
        let chunk = self.chunks.get(&(page / CHUNK_PAGES))?;
        let entry = chunk.entries[(page % CHUNK_PAGES) as usize];
        (entry != 0).then_some(Entry(entry))
    }

    /// Say where a page is, or that there is none; tells where it was.
    pub fn set(&mut self, page: u64, entry: Option<Entry>) -> Option<Entry> {
        let number = page / CHUNK_PAGES;
        if entry.is_none() && !self.chunks.contains_key(&number) {
            return None;
        }
        let chunk = self.chunks.entry(number).or_insert_with(|| Chunk {
            pages: 0,
            entries: Box::new([0; CHUNK_PAGES as usize]),
        });
        let place = &mut chunk.entries[(page % CHUNK_PAGES) as usize];
        let before = (*place != 0).then_some(Entry(*place));
        *place = entry.map_or(0, |entry| entry.0);
        if let Some(before) = before {
            chunk.pages -= 1;
            self.pages -= 1;
            self.bytes -= before.bytes() as u64;
        }
        if let Some(entry) = entry {
            chunk.pages += 1;
            self.pages += 1;
            self.bytes += entry.bytes() as u64;
        }
        if chunk.pages == 0 {
            self.chunks.remove(&number);
        }
        before
    }

    /// The first page from `page` on that there is.
    pub fn next(&self, page: u64) -> Option<u64> {
        self.iter(page).next().map(|(page, _)| page)
    }

    /// Every page from `page` on, in order.
    pub fn iter(&self, page: u64) -> impl Iterator<Item = (u64, Entry)> + '_ {
        let chunks = self.chunks.range(page / CHUNK_PAGES..);
        chunks.flat_map(move |(&number, chunk)| {
            let first = number * CHUNK_PAGES;
            let skipped = page.saturating_sub(first) as usize;
            let entries = chunk.entries.iter().enumerate().skip(skipped);
            entries
                .filter(|(_, entry)| **entry != 0)
                .map(move |(index, &entry)| (first + index as u64, Entry(entry)))
        })
    }

    /// Number of pages.
    pub const fn len(&self) -> u64 {
        self.pages
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Bytes of all pages in the store.
    pub const fn stored_bytes(&self) -> u64 {
        self.bytes
    }

    /// Approximate memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.chunks.len() * CHUNK_BYTES
    }

    /// Stop at what cannot be. Costs the directory.
    pub fn check_invariants(&self) {
        let bytes = self.iter(0).map(|(_, entry)| entry.bytes() as u64);
        assert_eq!(bytes.sum::<u64>(), self.bytes, "bytes of pages are counted");
        assert_eq!(self.iter(0).count() as u64, self.pages);
        assert!(self.chunks.values().all(|chunk| chunk.pages > 0));
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn entry_has_room_for_everything() {
        let slot = (1 << 28) - 1;
        let offset = OBJECT_MAP_BYTES_MAX - PAGE_ALIGN;
        let entry = Entry::new(slot, offset, OBJECT_PAGE_BYTES_MAX).with(true, false);
        assert_eq!((entry.slot(), entry.offset()), (slot, offset));
        assert!(entry.bytes() >= OBJECT_PAGE_BYTES_MAX && entry.is_full());
        assert!(!entry.is_empty() && Entry::new(7, 0, 0).is_empty());
        assert!(!Entry::new(1, 0, 100).is_followed_by(Entry::new(1, 128, 0)));
        assert!(!entry.is_inherited() && Entry::new(0, 0, 1).with(false, true).is_inherited());
        assert!(Entry::new(1, 0, 100).is_followed_by(Entry::new(1, 128, 7)));
        assert!(!Entry::new(1, 0, 100).is_followed_by(Entry::new(2, 128, 7)));
    }

    #[test]
    fn directory_agrees_with_a_tree() {
        let mut random = fastrand::Rng::with_seed(2);
        let mut directory = Directory::default();
        let mut model = BTreeMap::new();
        for _ in 0..4000 {
            let page = random.u64(0..5) * 100_000 + random.u64(0..700);
            let entry = (random.u8(0..3) > 0)
                .then(|| Entry::new(random.u32(0..9), random.usize(0..99) * PAGE_ALIGN, 100));
            let before = directory.set(page, entry);
            let expected = match entry {
                Some(entry) => model.insert(page, entry),
                None => model.remove(&page),
            };
            assert_eq!(before, expected);
            let from = random.u64(0..600_000);
            let next = model.range(from..).next().map(|(&page, _)| page);
            assert_eq!(directory.next(from), next);
        }
        directory.check_invariants();
        let all: Vec<_> = directory.iter(0).collect();
        assert_eq!(all, model.into_iter().collect::<Vec<_>>());
        for (page, _) in all {
            directory.set(page, None);
        }
        assert_eq!(directory.memory_bytes(), 0);
    }
}
