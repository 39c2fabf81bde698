//! A hash table of small numbers that are verified elsewhere: the index of both tiers.
//!
//! It maps a 64-bit hash to an *id*, a number below a bound fixed at the start. The keys live with
//! the caller, who confirms a candidate; the table holds 4 bytes per id: the id, and above it as
//! many bits of the hash as are left, which spare nearly every needless look at a key.
//!
//! Invariants:
//! 1. A bucket is one cache line: 15 slots and the number of ids that passed it by because it was
//!    full. A search ends at the first bucket that nobody passed by.
//! 2. So removal leaves no tombstone and moves nothing, and the table never degrades with age.
//! 3. There are always free slots: ids are distinct and fewer than slots.

use alloc::vec;
use alloc::vec::Vec;

use crate::base::work::Work;

const SLOTS: usize = 15;

#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Bucket {
    /// 0 is free; else the tag above `id_bits`, and the id plus 1.
    slots: [u32; SLOTS],
    overflow: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Table {
    buckets: Vec<Bucket>,
    id_bits: u32,
    len: usize,
    work: Work,
}

/// A bijective mixer (the finalizer of splitmix64): fixed, so that runs can be replayed.
pub fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Table {
    /// A table for ids below `ids`, filled to seven eighths when all are in.
    pub fn new(ids: usize) -> Self {
        assert!(ids < u32::MAX as usize, "ids fit 32 bits");
        let buckets = (ids * 8).div_ceil(SLOTS * 7).max(1);
        Self {
            buckets: vec![
                Bucket {
                    slots: [0; SLOTS],
                    overflow: 0
                };
                buckets
            ],
            id_bits: usize::BITS - ids.leading_zeros(),
            len: 0,
            work: Work::default(),
        }
    }

    /// Searches and removals so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.work.units()
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.buckets.len() * size_of::<Bucket>()
    }

    /// Ids in the table.
    pub fn len(&self) -> usize {
        self.len
    }

    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.buckets.len() as u128) >> 64) as usize
    }

    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() {
            0
        } else {
            bucket + 1
        }
    }

    fn slot(&self, hash: u64, id: u32) -> u32 {
        (hash as u32).unbounded_shl(self.id_bits) | (id + 1)
    }

    /// The id of this hash that `confirm` accepts.
    pub fn find(&self, hash: u64, mut confirm: impl FnMut(u32) -> bool) -> Option<u32> {
        self.work.add(1);
        let id_mask = u32::MAX.unbounded_shr(32 - self.id_bits);
        let tag = (hash as u32).unbounded_shl(self.id_bits);
        let mut index = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[index];
            // All slots at once, without a branch: this is the hot loop of every lookup.
            let mut matches = 0u32;
            for (place, &slot) in bucket.slots.iter().enumerate() {
                matches |= u32::from(slot & !id_mask == tag) << place;
            }
            while matches != 0 {
                let slot = bucket.slots[matches.trailing_zeros() as usize];
                matches &= matches - 1;
                if slot != 0 && confirm((slot & id_mask) - 1) {
                    return Some((slot & id_mask) - 1);
                }
            }
            if bucket.overflow == 0 {
                return None;
            }
            index = self.after(index);
        }
        None
    }

    /// Add an id that is not in the table.
    pub fn insert(&mut self, hash: u64, id: u32) {
        let slot = self.slot(hash, id);
        let mut index = self.home(hash);
        loop {
            let bucket = &mut self.buckets[index];
            if let Some(free) = bucket.slots.iter_mut().find(|slot| **slot == 0) {
                *free = slot;
                self.len += 1;
                return;
            }
            bucket.overflow += 1;
            index = self.after(index);
        }
    }

    /// Take an id out that is in the table under this hash.
    pub fn remove(&mut self, hash: u64, id: u32) {
        self.work.add(1);
        let slot = self.slot(hash, id);
        let mut index = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &mut self.buckets[index];
            if let Some(found) = bucket.slots.iter_mut().find(|found| **found == slot) {
                *found = 0;
                self.len -= 1;
                return;
            }
            bucket.overflow -= 1;
            index = self.after(index);
        }
        unreachable!("an id that is removed is in the table");
    }

    /// Put `new` in the place of `old`, which is in the table under this hash.
    pub fn replace(&mut self, hash: u64, old: u32, new: u32) {
        let (old, new) = (self.slot(hash, old), self.slot(hash, new));
        let mut index = self.home(hash);
        for _ in 0..self.buckets.len() {
            if let Some(found) = self.buckets[index].slots.iter_mut().find(|s| **s == old) {
                *found = new;
                return;
            }
            index = self.after(index);
        }
        unreachable!("an id that is replaced is in the table");
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;

    use super::*;

    #[test]
    fn table_agrees_with_a_map_when_full_and_through_churn() {
        for ids in [1usize, 2, 14, 15, 16, 1000, 5000] {
            let mut random = fastrand::Rng::with_seed(ids as u64);
            let mut table = Table::new(ids);
            let mut keys = vec![0u64; ids];
            let mut model: BTreeMap<u64, u32> = BTreeMap::new();
            let mut free: Vec<u32> = (0..ids as u32).collect();
            for step in 0..40_000 {
                let key = random.u64(..2 * ids as u64);
                // A weak hash now and then, so that tags and local stores collide.
                let hash = |key: u64| mix(if ids == 1000 { key % 400 } else { key });
                let found = table.find(hash(key), |id| keys[id as usize] == key);
                assert_eq!(found, model.get(&key).copied(), "{ids} ids, step {step}");
                match found {
                    Some(id) if random.u8(..4) == 0 && !free.is_empty() => {
                        let new = free.pop().unwrap();
                        keys[new as usize] = key;
                        table.replace(hash(key), id, new);
                        model.insert(key, new);
                        free.push(id);
                    }
                    Some(id) if random.bool() => {
                        table.remove(hash(key), id);
                        model.remove(&key);
                        free.push(id);
                    }
                    Some(_) => {}
                    None => {
                        if let Some(id) = free.pop() {
                            keys[id as usize] = key;
                            table.insert(hash(key), id);
                            model.insert(key, id);
                        }
                    }
                }
            }
            assert_eq!(table.len(), model.len());
            for (key, id) in model {
                let hash = mix(if ids == 1000 { key % 400 } else { key });
                table.remove(hash, id);
            }
            assert!(table.buckets.iter().all(|bucket| bucket.overflow == 0));
        }
    }
}
