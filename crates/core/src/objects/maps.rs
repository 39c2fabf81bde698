//! The objects of the map: how many of their pages the directory points to.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::format::{MapEntry, index_bytes};
use super::map::directory::{Directory, Entry};
use crate::base::limits::{OBJECT_MAP_BYTES_MAX, OBJECT_MAP_PAGES_MAX};

/// Objects of the map that are less than a quarter full, beyond which they are stored again.
const SMALL_MAPS_MAX: usize = 8;
const SMALL_MAP_BYTES: u32 = OBJECT_MAP_BYTES_MAX as u32 / 4;
/// One of many pages is as full as it gets, however small they are.
const SMALL_MAP_PAGES: u32 = OBJECT_MAP_PAGES_MAX as u32 / 4;
/// Pages that are stored again by one checkpoint at most, for the sake of what else is in their objects.
const AGAIN_PAGES_MAX: u32 = 64 << 10;

/// An object of the map.
#[derive(Clone, Copy, Debug)]
pub(super) struct MapObject {
    pub(super) number: u64,
    bytes: u32,
    /// Pages in it.
    pages: u32,
    /// Pages to which the directory points.
    live: u32,
    /// Of two objects with the same page, that with the higher one counts.
    order: u64,
}

/// See the module. Objects have slots, which entries of the directory name.
#[derive(Debug, Default)]
pub(super) struct MapObjects {
    slots: Vec<Option<MapObject>>,
    free: Vec<u32>,
    numbers: BTreeMap<u64, u32>,
    next_order: u64,
    /// Pages that the directory does not point to, and those that it does.
    dead_pages: u64,
    live_pages: u64,
}

impl MapObjects {
    /// An object of which the directory has no page yet; later ones count before earlier ones. Its slot.
    pub(super) fn insert(&mut self, entry: MapEntry) -> u32 {
        self.next_order += 1;
        let object = MapObject {
            number: entry.number,
            bytes: entry.bytes,
            pages: entry.entries,
            live: 0,
            order: self.next_order,
        };
        self.dead_pages += u64::from(entry.entries);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[slot as usize] = Some(object);
        self.numbers.insert(entry.number, slot);
        slot
    }

    pub(super) fn get(&self, slot: u32) -> Option<&MapObject> {
        self.slots.get(slot as usize)?.as_ref()
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        self.numbers.contains_key(&number)
    }

    /// Let the directory point to another place of a page, or to none.
    pub(super) fn point(&mut self, directory: &mut Directory, page: u64, entry: Option<Entry>) {
        if let Some(before) = directory.set(page, entry) {
            self.count(before, false);
        }
        if let Some(entry) = entry {
            self.count(entry, true);
        }
    }

    /// The same unless the directory points to a later object.
    pub(super) fn point_if_newer(&mut self, directory: &mut Directory, page: u64, entry: Entry) {
        let order = |entry: Entry| self.get(entry.slot()).map(|object| object.order);
        if directory
            .get(page)
            .is_none_or(|before| order(before) < order(entry))
        {
            self.point(directory, page, Some(entry));
        }
    }

    fn count(&mut self, entry: Entry, more: bool) {
        if let Some(Some(object)) = self.slots.get_mut(entry.slot() as usize) {
            if more {
                object.live += 1;
                self.live_pages += 1;
                self.dead_pages -= 1;
            } else {
                object.live -= 1;
                self.live_pages -= 1;
                self.dead_pages += 1;
            }
        }
    }

    /// Those with a page that counts, in their order.
    pub(super) fn live(&self) -> Vec<MapEntry> {
        let live = self.slots.iter().flatten().filter(|object| object.live > 0);
        let mut live: Vec<&MapObject> = live.collect();
        live.sort_unstable_by_key(|object| object.order);
        let entry = |object: &MapObject| MapEntry {
            number: object.number,
            bytes: object.bytes,
            entries: object.pages,
        };
        live.into_iter().map(entry).collect()
    }

    /// Forget those without a page that counts, but for such that `stays` says; tells their numbers.
    pub(super) fn forget_dead(&mut self, stays: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut gone = Vec::new();
        for (slot, place) in self.slots.iter_mut().enumerate() {
            if let Some(object) = place
                && object.live == 0
                && !stays(object.number)
            {
                gone.push(object.number);
                self.dead_pages -= u64::from(object.pages);
                self.numbers.remove(&object.number);
                self.free.push(slot as u32);
                *place = None;
            }
        }
        gone
    }

    /// Objects that are worth storing again, as a bit for each slot: many small ones, or, if most pages in objects
    /// are old, those with the most of these. Empty: none.
    pub(super) fn crowd(&self) -> Vec<bool> {
        let objects = self.slots.iter().enumerate();
        let mut found: Vec<(u64, u32, u32)> = Vec::new();
        let all = objects.filter_map(|(slot, object)| Some((slot as u32, object.as_ref()?)));
        let all = all.filter(|(_, object)| object.live > 0);
        let small = all
            .clone()
            .filter(|(_, object)| object.bytes < SMALL_MAP_BYTES && object.pages < SMALL_MAP_PAGES);
        if small.clone().count() > SMALL_MAPS_MAX {
            found.extend(small.map(|(slot, object)| (0, slot, object.live)));
        }
        if self.dead_pages > self.live_pages {
            let permille =
                |object: &MapObject| u64::from(object.live) * 1000 / u64::from(object.pages);
            let sparse = all.map(|(slot, object)| (permille(object), slot, object.live));
            found.extend(sparse.filter(|(permille, ..)| *permille < 500));
        }
        found.sort_unstable();
        let mut bits = Vec::new();
        let mut pages = 0;
        for (_, slot, live) in found {
            pages += live;
            if pages > AGAIN_PAGES_MAX {
                break;
            }
            bits.resize(self.slots.len(), false);
            bits[slot as usize] = true;
        }
        bits
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Approximate memory in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.len() * size_of::<Option<MapObject>>() + self.numbers.len() * 24
    }

    /// Compare with the directory. Costs it.
    pub(super) fn check_invariants(&self, directory: &Directory) {
        let mut live = alloc::vec![0; self.slots.len()];
        for (page, entry) in directory.iter(0) {
            let object = self.get(entry.slot()).expect("an entry names an object");
            assert!(
                entry.offset() + entry.bytes() <= object.bytes as usize,
                "page {page}"
            );
            live[entry.slot() as usize] += 1;
        }
        for (object, live) in self.slots.iter().zip(live) {
            assert_eq!(object.map_or(0, |object| object.live), live);
        }
        let pages = self.slots.iter().flatten();
        let pages: u64 = pages.map(|object| u64::from(object.pages)).sum();
        assert_eq!(pages, self.live_pages + self.dead_pages);
    }
}

/// Bytes of a map object whose pages take so many.
pub(super) const fn object_bytes(pages_bytes: usize, pages: usize) -> usize {
    pages_bytes + index_bytes(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_objects_know_what_the_directory_needs() {
        let mut directory = Directory::default();
        let mut maps = MapObjects::default();
        let entry = |number| MapEntry {
            number,
            bytes: 4096,
            entries: 2,
        };
        let (old, new) = (maps.insert(entry(9)), maps.insert(entry(3)));
        let at = |slot, offset| Entry::new(slot, offset, 100);
        maps.point_if_newer(&mut directory, 7, at(new, 0));
        maps.point_if_newer(&mut directory, 7, at(old, 0));
        maps.point_if_newer(&mut directory, 8, at(old, 128));
        assert_eq!(directory.get(7), Some(at(new, 0)), "order, not number");
        let live = maps.live();
        let live: Vec<u64> = live.iter().map(|entry| entry.number).collect();
        assert_eq!(live, [9, 3]);
        maps.point(&mut directory, 8, None);
        maps.check_invariants(&directory);
        assert!(maps.forget_dead(|_| true).is_empty());
        assert_eq!(maps.forget_dead(|_| false), [9]);
        assert!(!maps.contains(9) && maps.contains(3));
        maps.check_invariants(&directory);
        assert_eq!(maps.insert(entry(12)), old, "a slot is used again");
        maps.check_invariants(&directory);
    }

    #[test]
    fn map_objects_that_are_small_or_old_are_stored_again() {
        let mut directory = Directory::default();
        let mut maps = MapObjects::default();
        let slots: Vec<u32> = (1..=SMALL_MAPS_MAX as u64 + 1)
            .map(|number| {
                maps.insert(MapEntry {
                    number,
                    bytes: 4096,
                    entries: 1,
                })
            })
            .collect();
        for (page, &slot) in slots.iter().enumerate() {
            assert!(maps.crowd().is_empty() || page > SMALL_MAPS_MAX);
            maps.point(&mut directory, page as u64, Some(Entry::new(slot, 0, 64)));
        }
        assert!(maps.crowd().iter().all(|&again| again));
        let large = maps.insert(MapEntry {
            number: 50,
            bytes: SMALL_MAP_BYTES,
            entries: 100,
        });
        maps.point(&mut directory, 99, Some(Entry::new(large, 0, 64)));
        assert!(maps.crowd()[large as usize], "one page of a hundred counts");
    }
}
