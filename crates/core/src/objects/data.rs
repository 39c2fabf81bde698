//! The data objects that are known: how large they are, and how much of them the map needs.
//!
//! What the map needs is counted when changes are merged into its pages, not before: until then nobody has looked
//! which blocks a write has taken from which objects. So an object that is newer than the pages counts as needed,
//! and one whose last block was written over is dead only once that is merged.
//!
//! There may be two million of them, so they are small.

use alloc::collections::BTreeMap;

use super::format::{SLOT_BYTES, TailEntry, Usage, table_bytes};
use super::frames;

/// A data object that is known to be in the store, or on its way there.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Object {
    /// Size in bytes; 0 while it is not known.
    pub(super) bytes: u32,
    /// Blocks that the pages of the map have there.
    pub(super) live: u16,
    /// Its slots, if it is compressed and that is known.
    pub(super) slots: u16,
    /// Its runs.
    pub(super) runs: u16,
    flags: u8,
}

const _: () = assert!(size_of::<Object>() == 12);

/// It is compressed.
const COMPRESSED: u8 = 1;
/// The pages of the map have its blocks: then `live` means something.
const MERGED: u8 = 2;
/// A block of it is damaged: it is not copied forward any more.
const DAMAGED: u8 = 4;
/// What was needed of it is copied forward, which is not merged yet.
const COPIED: u8 = 8;

/// Memory of an object, about: a little more than half of each node of the tree is used when numbers ascend.
const OBJECT_BYTES: usize = 38;

impl Object {
    /// One of the tail.
    pub(super) fn of(entry: &TailEntry, is_compressed: bool) -> Self {
        Self {
            bytes: match (is_compressed, entry.compressed_bytes) {
                // It is known once it is put.
                (true, 0) => 0,
                _ => entry.bytes() as u32,
            },
            slots: if is_compressed { entry.slots as u16 } else { 0 },
            runs: entry.runs as u16,
            flags: if is_compressed { COMPRESSED } else { 0 },
            live: 0,
        }
    }

    /// Whether it is compressed.
    pub(super) fn is_compressed(&self) -> bool {
        self.flags & COMPRESSED != 0
    }

    /// Whether the pages of the map have its blocks: then `live` means something.
    pub(super) fn is_merged(&self) -> bool {
        self.flags & MERGED != 0
    }

    /// Whether it may be copied forward: it is merged, not damaged, and not copied already.
    pub(super) fn is_worth_a_look(&self) -> bool {
        self.flags & (MERGED | DAMAGED | COPIED) == MERGED && self.live > 0 && self.bytes > 0
    }

    /// Where its runs begin.
    pub(super) fn table_offset(&self) -> Option<u64> {
        let table = table_bytes(self.runs.into()) as u64;
        u64::from(self.bytes).checked_sub(table)
    }

    /// Its size is known: so is the number of its slots, if it is compressed.
    fn count_slots(&mut self) {
        if self.is_compressed() && self.bytes > 0 {
            self.slots = frames::slots_of_size(self.bytes.into()) as u16;
            if self.slots < self.live {
                // The store has another object than the map speaks of.
                self.flags |= DAMAGED;
            }
        }
    }

    /// Bytes that it would have if it were not compressed.
    pub(super) fn plain_bytes(&self) -> u64 {
        match self.slots {
            0 => self.bytes.into(),
            slots => u64::from(slots) * SLOT_BYTES as u64,
        }
    }

    /// Bytes of it that are needed: of a compressed one, its blocks count the same.
    pub(super) fn live_bytes(&self) -> u64 {
        let (live, bytes) = (u64::from(self.live), u64::from(self.bytes));
        match self.slots {
            0 => (live * SLOT_BYTES as u64).min(bytes),
            slots => (bytes * live / u64::from(slots)).min(bytes),
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct DataObjects {
    objects: BTreeMap<u64, Object>,
    stored_bytes: u64,
    live_blocks: u64,
    /// Objects without a live block, and the position after which they were.
    dead: BTreeMap<u64, u64>,
}

impl DataObjects {
    pub(super) fn get(&self, number: u64) -> Option<&Object> {
        self.objects.get(&number)
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        self.objects.contains_key(&number)
    }

    /// Those from a number on.
    pub(super) fn range(&self, first: u64) -> impl Iterator<Item = (u64, &Object)> {
        self.objects
            .range(first..)
            .map(|(&number, object)| (number, object))
    }

    /// An object is known.
    pub(super) fn insert(&mut self, number: u64, object: Object) {
        self.stored_bytes += u64::from(object.bytes);
        self.live_blocks += u64::from(object.live);
        if let Some(before) = self.objects.insert(number, object) {
            self.stored_bytes -= u64::from(before.bytes);
            self.live_blocks -= u64::from(before.live);
        }
    }

    pub(super) fn remove(&mut self, number: u64) {
        self.dead.remove(&number);
        if let Some(gone) = self.objects.remove(&number) {
            self.stored_bytes -= u64::from(gone.bytes);
            self.live_blocks -= u64::from(gone.live);
        }
    }

    /// The size of an object is known.
    pub(super) fn set_bytes(&mut self, number: u64, bytes: u64) {
        if let Some(object) = self.objects.get_mut(&number) {
            self.stored_bytes -= u64::from(object.bytes);
            // No object of ours is so large.
            object.bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
            self.stored_bytes += u64::from(object.bytes);
            object.count_slots();
        }
    }

    pub(super) fn mark_damaged(&mut self, number: u64) {
        if let Some(object) = self.objects.get_mut(&number) {
            object.flags |= DAMAGED;
        }
    }

    pub(super) fn mark_copied(&mut self, number: u64) {
        if let Some(object) = self.objects.get_mut(&number) {
            object.flags |= COPIED;
        }
    }

    /// The pages of the map have so many blocks in it, by a usage table.
    pub(super) fn load(&mut self, usage: &Usage) {
        let compressed = if usage.is_compressed { COMPRESSED } else { 0 };
        let object = Object {
            live: usage.live,
            runs: usage.runs,
            flags: MERGED | compressed,
            ..Object::default()
        };
        self.insert(usage.number, object);
    }

    /// A page of the map has `blocks` more in it.
    pub(super) fn use_more(&mut self, number: u64, blocks: u32) {
        if let Some(object) = self.objects.get_mut(&number) {
            // More than an object has is a table that is wrong.
            let blocks = blocks.min(u32::from(u16::MAX - object.live)) as u16;
            object.live += blocks;
            self.live_blocks += u64::from(blocks);
        }
    }

    /// A page of the map had `blocks` in it that are elsewhere after `position`.
    pub(super) fn use_less(&mut self, number: u64, blocks: u32, position: u64) {
        if let Some(object) = self.objects.get_mut(&number) {
            // More than a usage table said is a table that is wrong.
            let blocks = u32::from(object.live).min(blocks) as u16;
            object.live -= blocks;
            self.live_blocks -= u64::from(blocks);
            if object.live == 0 && object.is_merged() {
                self.dead.insert(number, position);
            }
        }
    }

    /// All of it that is needed is in the pages, as they are at `position`.
    pub(super) fn merged(&mut self, number: u64, position: u64) {
        if let Some(object) = self.objects.get_mut(&number) {
            object.flags |= MERGED;
            if object.live == 0 {
                self.dead.insert(number, position);
            }
        }
    }

    /// An object that the map never knew is in the store.
    pub(super) fn insert_stray(&mut self, number: u64, bytes: u64) {
        let object = Object {
            flags: MERGED,
            ..Object::default()
        };
        self.insert(number, object);
        self.set_bytes(number, bytes);
        self.dead.insert(number, 0);
    }

    /// Objects from a number on without a live block, and the position after which they were.
    pub(super) fn dead(&self, first: u64) -> impl Iterator<Item = (u64, u64)> {
        self.dead.range(first..).map(|(&number, &by)| (number, by))
    }

    /// Bytes of all of them.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    /// Blocks that the pages of the map have.
    pub(super) fn live_blocks(&self) -> u64 {
        self.live_blocks
    }

    /// Approximate memory in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        (self.objects.len() + self.dead.len()) * OBJECT_BYTES
    }

    /// Stop at what cannot be. Costs all of them.
    pub(super) fn check_invariants(&self) {
        let bytes = self.objects.values().map(|object| u64::from(object.bytes));
        assert_eq!(bytes.sum::<u64>(), self.stored_bytes);
        let live = self.objects.values().map(|object| u64::from(object.live));
        assert_eq!(live.sum::<u64>(), self.live_blocks);
        let is_dead = |object: &Object| object.is_merged() && object.live == 0;
        let dead = self.objects.iter().filter(|(_, object)| is_dead(object));
        assert!(
            dead.map(|(number, _)| number).eq(self.dead.keys()),
            "the dead are known, and dead"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(number: u64, live: u16, is_compressed: bool) -> Usage {
        Usage {
            number,
            live,
            runs: 1,
            is_compressed,
        }
    }

    #[test]
    fn object_of_another_size_than_the_map_says_needs_no_more_than_it_has() {
        let of = |live| {
            let mut objects = DataObjects::default();
            objects.load(&usage(1, live, true));
            objects.set_bytes(1, 8192);
            *objects.get(1).expect("it is known")
        };
        let slots = of(1).slots;
        assert!(slots > 0);
        let whole = of(slots);
        assert_eq!((whole.live_bytes(), whole.is_worth_a_look()), (8192, true));
        let short = of(slots + 100);
        assert_eq!((short.live_bytes(), short.is_worth_a_look()), (8192, false));
    }

    #[test]
    fn object_is_dead_once_nothing_of_it_is_in_the_pages() {
        let mut objects = DataObjects::default();
        objects.insert(5, Object::default());
        objects.use_more(5, 2);
        objects.use_less(5, 2, 7);
        assert_eq!(objects.dead(0).count(), 0, "more of it may come");
        objects.merged(5, 8);
        assert_eq!(objects.dead(0).collect::<alloc::vec::Vec<_>>(), [(5, 8)]);
        objects.load(&usage(6, 3, false));
        objects.use_less(6, 9, 9);
        assert_eq!(objects.dead(6).next(), Some((6, 9)), "a table was wrong");
        objects.check_invariants();
        objects.remove(5);
        objects.remove(6);
        objects.check_invariants();
        assert_eq!(objects.live_blocks(), 0);
    }
}
