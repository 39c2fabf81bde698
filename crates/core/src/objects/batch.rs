//! Blocks that are gathered for one data object, and the object while it is being put.
//!
//! The memory of a batch is laid out as the object will be: slots of a block and its checksum, so
//! that sealing copies nothing. A block that is written again while it is gathered is overwritten
//! in place.
//!
//! Invariants of [`Gathering`]:
//! 1. `owners[slot]` is the block whose slot it is in `slots`; a slot without an owner is in `free`.
//! 2. A block in `partial` has a slot, of which only the sectors in its mask are valid.
//! 3. Sealing needs `partial` to be empty.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use zerocopy::little_endian::{U32, U64};

use super::COVERED_MAX;
use super::format::{DataRun, SLOT_BYTES, SLOT_NONE, slot_checksum};
use super::map::Place;
use crate::base::buf::{Buf, BufMut, Pool};
use crate::base::codec::Method;
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, OBJECT_UNMAPPED_MAX, SECTOR_BYTES};

/// Slots in one buffer of a batch at most.
const CHUNK_SLOTS_MAX: usize = (1 << 20) / SLOT_BYTES;
/// The owner of a slot that nobody has.
const NOBODY: u64 = u64::MAX;
/// All sectors of a block.
pub const WHOLE: u8 = u8::MAX;

/// Why a block was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The batch has as many blocks as it may.
    Full,
    /// There is no memory at present.
    Memory,
}

/// A block of which only some sectors were written yet; the others are being fetched.
#[derive(Debug)]
pub struct Partial {
    /// Which sectors are valid.
    pub mask: u8,
    /// Where the others are, once that is known.
    pub base: Option<Place>,
    /// Writes that wait for it.
    pub writers: Vec<u64>,
    /// Tells the fetch that was begun for it from those for earlier ones of the same block.
    pub fetch: Option<u64>,
}

/// What is gathered.
#[derive(Debug)]
pub struct Gathering {
    chunk_slots: usize,
    blocks_max: usize,
    chunks: Vec<BufMut>,
    slots: BTreeMap<u64, u32>,
    owners: Vec<u64>,
    free: Vec<u32>,
    /// Ranges of blocks that are unmapped: start and end. What is in `slots` comes after.
    unmapped: BTreeMap<u64, u64>,
    /// Blocks that are not whole yet.
    pub partial: BTreeMap<u64, Partial>,
    /// Whether anything of it was asked for from above; the rest are copies.
    pub user: bool,
    /// Changes of the map that what is unmapped covers: sealing takes them out of it.
    pub covered: usize,
}

impl Gathering {
    /// Nothing, for batches of `blocks_max` blocks.
    pub fn new(blocks_max: usize) -> Self {
        Self {
            chunk_slots: blocks_max.min(CHUNK_SLOTS_MAX),
            blocks_max,
            chunks: Vec::new(),
            slots: BTreeMap::new(),
            owners: Vec::new(),
            free: Vec::new(),
            unmapped: BTreeMap::new(),
            partial: BTreeMap::new(),
            user: false,
            covered: 0,
        }
    }

    /// Whether there is nothing to seal.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty() && self.unmapped.is_empty()
    }

    /// Whether it should be put without waiting for more.
    pub fn is_full(&self) -> bool {
        self.slots.len() >= self.blocks_max
            || self.unmapped.len() >= OBJECT_UNMAPPED_MAX
            || self.covered >= COVERED_MAX
    }

    /// Memory that one buffer of a batch takes.
    pub fn chunk_bytes(&self) -> usize {
        (self.chunk_slots * SLOT_BYTES)
            .div_ceil(BLOCK_BYTES)
            .next_power_of_two()
            * BLOCK_BYTES
    }

    /// What the block is here: its bytes if it is whole; zeroes if it is unmapped.
    pub fn find(&self, block: u64) -> Option<Found<'_>> {
        if let Some(&slot) = self.slots.get(&block) {
            if self.partial.contains_key(&block) {
                // Nobody was told yet that it was written.
                return self.is_unmapped(block).then_some(Found::Zero);
            }
            return Some(Found::Data(&self.slot(slot)[..BLOCK_BYTES]));
        }
        self.is_unmapped(block).then_some(Found::Zero)
    }

    /// Whether the block is here in any way.
    pub fn holds(&self, block: u64) -> bool {
        self.slots.contains_key(&block) || self.is_unmapped(block)
    }

    fn is_unmapped(&self, block: u64) -> bool {
        let before = self.unmapped.range(..=block).next_back();
        before.is_some_and(|(_, &end)| end > block)
    }

    fn slot(&self, slot: u32) -> &[u8] {
        let (chunk, at) = self.locate(slot);
        &self.chunks[chunk][at..at + SLOT_BYTES]
    }

    fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        let (chunk, at) = self.locate(slot);
        &mut self.chunks[chunk][at..at + SLOT_BYTES]
    }

    fn locate(&self, slot: u32) -> (usize, usize) {
        let slot = slot as usize;
        (
            slot / self.chunk_slots,
            slot % self.chunk_slots * SLOT_BYTES,
        )
    }

    /// The bytes of the block, to be written; as they are if it is here already, else anything.
    pub fn block_mut(&mut self, block: u64, pool: &Arc<Pool>) -> Result<&mut [u8], Refused> {
        let slot = match self.slots.get(&block) {
            Some(&slot) => slot,
            None => self.take_slot(block, pool)?,
        };
        Ok(&mut self.slot_mut(slot)[..BLOCK_BYTES])
    }

    fn take_slot(&mut self, block: u64, pool: &Arc<Pool>) -> Result<u32, Refused> {
        let slot = if let Some(slot) = self.free.pop() {
            slot
        } else {
            if self.owners.len() >= self.blocks_max {
                return Err(Refused::Full);
            }
            if self.owners.len() == self.chunks.len() * self.chunk_slots {
                let bytes = self.chunk_slots * SLOT_BYTES;
                self.chunks.push(pool.alloc(bytes).ok_or(Refused::Memory)?);
            }
            self.owners.push(NOBODY);
            self.owners.len() as u32 - 1
        };
        self.owners[slot as usize] = block;
        self.slots.insert(block, slot);
        Ok(slot)
    }

    /// Forget a block; tells which writes waited for it.
    pub fn remove(&mut self, block: u64) -> Vec<u64> {
        if let Some(slot) = self.slots.remove(&block) {
            self.owners[slot as usize] = NOBODY;
            self.free.push(slot);
        }
        let partial = self.partial.remove(&block);
        partial.map_or_else(Vec::new, |partial| partial.writers)
    }

    /// A block is whole; tells which writes waited for it.
    pub fn drop_partial(&mut self, block: u64) -> Vec<u64> {
        let partial = self.partial.remove(&block);
        partial.map_or_else(Vec::new, |partial| partial.writers)
    }

    /// Forget what is gathered of `count` blocks from `block`; tells which writes waited for it.
    pub fn forget(&mut self, block: u64, count: u64) -> Vec<u64> {
        let range = block..block + count;
        let gone: Vec<u64> = self.slots.range(range).map(|(&at, _)| at).collect();
        let mut writers = Vec::new();
        for at in gone {
            writers.extend(self.remove(at));
        }
        writers
    }

    /// The first block from `block` on that is here in any way.
    pub fn next_held(&self, block: u64) -> u64 {
        if self.is_unmapped(block) {
            return block;
        }
        let slot = self.slots.range(block..).next().map(|(&at, _)| at);
        let unmapped = self.unmapped.range(block..).next().map(|(&at, _)| at);
        slot.into_iter().chain(unmapped).min().unwrap_or(u64::MAX)
    }

    /// Unmap `count` blocks from `block`; tells which writes waited for some of them.
    pub fn unmap(&mut self, block: u64, count: u64) -> Vec<u64> {
        let end = block + count;
        let writers = self.forget(block, count);
        let (mut start, mut stop) = (block, end);
        if let Some((&before, &before_end)) = self.unmapped.range(..=block).next_back()
            && before_end >= block
        {
            start = before;
            stop = stop.max(before_end);
        }
        while let Some((&at, &at_end)) = self.unmapped.range(start..=stop).next() {
            self.unmapped.remove(&at);
            stop = stop.max(at_end);
        }
        self.unmapped.insert(start, stop);
        writers
    }

    /// The fetched bytes of a block of which some sectors were written meanwhile; tells which writes
    /// waited for them.
    pub fn complete(&mut self, block: u64, base: &[u8]) -> Vec<u64> {
        let Some(partial) = self.partial.remove(&block) else {
            return Vec::new();
        };
        let slot = self.slots[&block];
        let bytes = self.slot_mut(slot);
        for sector in 0..BLOCK_SECTORS as usize {
            if partial.mask & 1 << sector == 0 {
                let at = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
                bytes[at.clone()].copy_from_slice(&base[at]);
            }
        }
        partial.writers
    }

    /// What the object maps and unmaps.
    pub fn runs(&self) -> Vec<DataRun> {
        let mut runs: Vec<DataRun> = Vec::with_capacity(self.unmapped.len() + 16);
        for (&start, &end) in &self.unmapped {
            let mut at = start;
            while at < end {
                let count = (end - at).min(u64::from(u32::MAX));
                runs.push(run(at, count as u32, SLOT_NONE));
                at += count;
            }
        }
        let data = runs.len();
        for (&block, &slot) in &self.slots {
            if let Some(last) = runs.get_mut(data..).and_then(<[DataRun]>::last_mut)
                && last.block.get() + u64::from(last.count.get()) == block
                && last.slot.get() + last.count.get() == slot
            {
                last.count.set(last.count.get() + 1);
            } else {
                runs.push(run(block, 1, slot));
            }
        }
        runs
    }

    /// Slots in use.
    pub fn slot_count(&self) -> u32 {
        self.owners.len() as u32
    }

    /// The buffers of the object, with checksums; nothing is gathered afterwards.
    pub fn seal(&mut self, volume: &[u8; 16], number: u64) -> Vec<Buf> {
        assert!(self.partial.is_empty(), "a batch with holes is not sealed");
        for slot in 0..self.owners.len() {
            let block = self.owners[slot];
            let bytes = self.slot_mut(slot as u32);
            let (data, checksum) = bytes.split_at_mut(BLOCK_BYTES);
            if block == NOBODY {
                data.fill(0);
            }
            let sum = slot_checksum(volume, number, block, data);
            checksum.copy_from_slice(&sum.to_le_bytes());
        }
        let mut slots = self.owners.len();
        let chunk_slots = self.chunk_slots;
        let empty = Self::new(self.blocks_max);
        let chunks = core::mem::replace(self, empty).chunks;
        let mut buffers = Vec::with_capacity(chunks.len() + 1);
        for chunk in chunks {
            let used = slots.min(chunk_slots);
            slots -= used;
            buffers.push(chunk.narrow(0..used * SLOT_BYTES).freeze());
        }
        buffers
    }

    /// Forget everything.
    pub fn clear(&mut self) {
        *self = Self::new(self.blocks_max);
    }

    /// Stop at what cannot be.
    pub fn check_invariants(&self) {
        assert!(self.owners.len() <= self.blocks_max);
        assert_eq!(self.slots.len() + self.free.len(), self.owners.len());
        assert!(
            self.partial
                .keys()
                .all(|block| self.slots.contains_key(block))
        );
    }
}

/// What a block is in a batch.
#[derive(Debug)]
pub enum Found<'a> {
    /// These bytes.
    Data(&'a [u8]),
    /// Zeroes.
    Zero,
}

fn run(block: u64, count: u32, slot: u32) -> DataRun {
    DataRun {
        block: U64::new(block),
        count: U32::new(count),
        slot: U32::new(slot),
    }
}

/// A sealed batch until its put has ended well.
#[derive(Debug)]
pub struct Batch {
    /// Its place in the order of sealed objects.
    pub position: u64,
    /// What is put: the slots, then runs and footer.
    pub data: Vec<Buf>,
    /// How many bytes of that are slots.
    pub slot_bytes: usize,
    /// Slots in each buffer but the last ones.
    pub chunk_slots: usize,
    /// How it is compressed when it is put.
    pub method: Option<Method>,
    /// Whether its put is under way.
    pub in_flight: bool,
}

impl Batch {
    /// The block in a slot.
    pub fn block(&self, slot: u32) -> &[u8] {
        let slot = slot as usize;
        let at = slot % self.chunk_slots * SLOT_BYTES;
        &self.data[slot / self.chunk_slots][at..at + BLOCK_BYTES]
    }
}

/// Slots in one buffer of a batch of `blocks_max` blocks.
pub fn chunk_slots(blocks_max: usize) -> usize {
    blocks_max.min(CHUNK_SLOTS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: [u8; 16] = [1; 16];

    #[test]
    fn gathering_overwrites_in_place_and_reuses_slots() {
        let pool = Pool::new(1 << 20);
        let mut gathering = Gathering::new(8);
        for block in [5, 6, 5, 9] {
            gathering.block_mut(block, &pool).unwrap().fill(block as u8);
        }
        assert_eq!(gathering.slot_count(), 3);
        assert!(gathering.unmap(6, 1).is_empty());
        gathering.block_mut(10, &pool).unwrap().fill(10);
        assert_eq!(
            gathering.slot_count(),
            3,
            "the slot of block 6 is used again"
        );
        let runs = gathering.runs();
        let as_tuples: Vec<_> = runs
            .iter()
            .map(|run| (run.block.get(), run.count.get(), run.slot.get()))
            .collect();
        assert_eq!(
            as_tuples,
            [(6, 1, SLOT_NONE), (5, 1, 0), (9, 1, 2), (10, 1, 1)]
        );
        assert!(matches!(gathering.find(6), Some(Found::Zero)));
        assert!(matches!(gathering.find(9), Some(Found::Data(data)) if data[0] == 9));
        let data = gathering.seal(&VOLUME, 3);
        assert!(gathering.is_empty());
        let slot = &data[0][SLOT_BYTES..2 * SLOT_BYTES];
        assert_eq!(
            slot_checksum(&VOLUME, 3, 10, &slot[..BLOCK_BYTES]).to_le_bytes(),
            slot[BLOCK_BYTES..]
        );
    }

    #[test]
    fn gathering_is_bounded_by_blocks_and_memory() {
        let pool = Pool::new(1 << 20);
        let mut small = Gathering::new(8);
        for block in 0..8 {
            small.block_mut(block, &pool).unwrap();
        }
        assert!(small.is_full());
        assert_eq!(small.block_mut(8, &pool).err(), Some(Refused::Full));
        let held = pool.alloc(512 << 10);
        let mut large = Gathering::new(4096);
        assert_eq!(large.block_mut(8, &pool).err(), Some(Refused::Memory));
        large.check_invariants();
        drop(held);
    }

    #[test]
    fn gathering_merges_what_is_unmapped() {
        let mut gathering = Gathering::new(8);
        for (block, count) in [(10, 5), (20, 5), (15, 5), (0, 2), (8, 100)] {
            gathering.unmap(block, count);
        }
        let unmapped: Vec<_> = gathering.unmapped.iter().map(|(&a, &b)| (a, b)).collect();
        assert_eq!(unmapped, [(0, 2), (8, 108)]);
        assert!(gathering.holds(107) && !gathering.holds(108) && !gathering.holds(2));
    }

    #[test]
    fn gathering_completes_a_block_around_what_was_written() {
        let pool = Pool::new(1 << 20);
        let mut gathering = Gathering::new(8);
        gathering.block_mut(3, &pool).unwrap()[512..1024].fill(7);
        let partial = Partial {
            mask: 2,
            base: None,
            writers: alloc::vec![42],
            fetch: None,
        };
        gathering.partial.insert(3, partial);
        assert!(gathering.find(3).is_none(), "not shown before it is whole");
        assert_eq!(gathering.complete(3, &[9; BLOCK_BYTES]), [42]);
        let Some(Found::Data(data)) = gathering.find(3) else {
            panic!("whole");
        };
        assert!(data[512..1024].iter().all(|&byte| byte == 7));
        assert!(
            data[..512]
                .iter()
                .chain(&data[1024..])
                .all(|&byte| byte == 9)
        );
    }
}
