//! What the home has of each block, in memory, and sets of blocks.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::ops::Range;

use super::format::{HomePage, PAGE_BLOCKS, PAGE_STATE_BYTES};

/// The lower bits of the four states in a byte.
const LOW_BITS: u8 = 0x55;

/// What the home has of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Nothing: the backend has it.
    Absent,
    /// The same as the backend.
    Clean,
    /// What the backend lacks.
    Dirty,
    /// It reads as zeroes, and the backend lacks that.
    Zero,
}

impl BlockState {
    const ALL: [Self; 4] = [Self::Absent, Self::Clean, Self::Dirty, Self::Zero];

    /// Whether its bytes are in the home.
    pub const fn is_here(self) -> bool {
        matches!(self, Self::Clean | Self::Dirty)
    }
}

const _: () = assert!(
    PAGE_BLOCKS.is_multiple_of(64),
    "a word of a set is of one page"
);

#[derive(Debug)]
struct Page {
    generation: u64,
    states: Box<[u8; PAGE_STATE_BYTES]>,
}

/// The map of a home.
#[derive(Debug)]
pub struct Map {
    pages: Vec<Page>,
    blocks: u64,
    counts: [u64; 4],
    /// Pages that differ from what was written, or is being written, last.
    pub changed: BTreeSet<u32>,
}

impl Map {
    /// A map of `blocks` blocks from its pages in order. What a page calls clean is absent if it was
    /// written under another write log than `log`: a write that only that log had may be in its place. So it is
    /// if this log let writes past it; then its pages are written anew, since the next opening may not know.
    pub fn load(pages: Vec<Box<HomePage>>, blocks: u64, log: u64, is_log_whole: bool) -> Self {
        let mut this = Self {
            pages: Vec::with_capacity(pages.len()),
            blocks,
            counts: [0; 4],
            changed: BTreeSet::new(),
        };
        for (page, number) in pages.into_iter().zip(0..) {
            let mut states = Box::new(page.states);
            if page.log.get() != log || !is_log_whole {
                for byte in states.iter_mut() {
                    // The lower bit alone is "clean".
                    *byte &= !(*byte & LOW_BITS & !(*byte >> 1));
                }
            }
            if *states != page.states && !is_log_whole {
                this.changed.insert(number);
            }
            this.pages.push(Page {
                generation: page.generation.get(),
                states,
            });
        }
        // What no page of this size has is not to be found.
        let last = this.pages.len() as u64 * PAGE_BLOCKS;
        for block in blocks..last {
            this.put(block, BlockState::Absent);
        }
        let mut owed = 0;
        let (mut odd, mut here) = (0, 0);
        for states in this.pages.iter().flat_map(|page| page.states.iter()) {
            let (low, high) = (states & LOW_BITS, states >> 1 & LOW_BITS);
            owed += u64::from(high.count_ones());
            odd += u64::from((low & high).count_ones());
            here += u64::from((low & !high).count_ones());
        }
        this.counts = [blocks - owed - here, here, owed - odd, odd];
        this
    }

    /// Blocks of the volume.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// How many blocks are in a state.
    pub fn count(&self, state: BlockState) -> u64 {
        self.counts[state as usize]
    }

    /// The state of a block.
    pub fn get(&self, block: u64) -> BlockState {
        let at = (block % PAGE_BLOCKS) as usize;
        let byte = self.pages[(block / PAGE_BLOCKS) as usize].states[at / 4];
        BlockState::ALL[usize::from(byte >> (at % 4 * 2) & 3)]
    }

    /// Change the state of a block.
    pub fn set(&mut self, block: u64, state: BlockState) {
        let before = self.get(block);
        if before == state {
            return;
        }
        self.put(block, state);
        self.counts[before as usize] -= 1;
        self.counts[state as usize] += 1;
        self.changed.insert((block / PAGE_BLOCKS) as u32);
    }

    fn put(&mut self, block: u64, state: BlockState) {
        let at = (block % PAGE_BLOCKS) as usize;
        let byte = &mut self.pages[(block / PAGE_BLOCKS) as usize].states[at / 4];
        let shift = at % 4 * 2;
        *byte = *byte & !(3 << shift) | (state as u8) << shift;
    }

    /// The end of the run from `block` of blocks for which `class` says the same, within the page and
    /// before `end`.
    pub fn run_end<T: PartialEq>(
        &self,
        block: u64,
        end: u64,
        class: impl Fn(BlockState) -> T,
    ) -> u64 {
        let of = class(self.get(block));
        let end = end.min((block / PAGE_BLOCKS + 1) * PAGE_BLOCKS);
        let mut blocks = block + 1..end;
        blocks
            .find(|&next| class(self.get(next)) != of)
            .unwrap_or(end)
    }

    /// The states of a page.
    pub fn states(&self, page: u32) -> &[u8; PAGE_STATE_BYTES] {
        &self.pages[page as usize].states
    }

    /// The number of the last write of a page.
    pub fn generation(&self, page: u32) -> u64 {
        self.pages[page as usize].generation
    }

    /// A page is being written once more.
    pub fn begin_write(&mut self, page: u32) {
        self.pages[page as usize].generation += 1;
    }
}

/// A set of blocks.
#[derive(Debug, Default)]
pub struct Blocks {
    words: Vec<u64>,
    count: u64,
}

impl Blocks {
    /// What the backend lacks.
    pub fn owed(map: &Map) -> Self {
        let mut words = Vec::with_capacity(map.pages.len() * PAGE_STATE_BYTES / 16);
        for page in &map.pages {
            // 64 blocks are 16 bytes, of whose states the upper bits count.
            for states in page.states.as_chunks::<16>().0 {
                let nibbles = states.iter().enumerate().map(|(index, &byte)| {
                    let bits = byte >> 1 & LOW_BITS;
                    let nibble = bits & 1 | bits >> 1 & 2 | bits >> 2 & 4 | bits >> 3 & 8;
                    u64::from(nibble) << (index * 4)
                });
                words.push(nibbles.sum());
            }
        }
        let count = map.count(BlockState::Dirty) + map.count(BlockState::Zero);
        Self { words, count }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether a block is one of them.
    pub fn contains(&self, block: u64) -> bool {
        let word = self.words.get((block / 64) as usize);
        word.is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    /// Take blocks out.
    pub fn remove(&mut self, blocks: Range<u64>) {
        let mut next = blocks.start;
        while let Some(block) = self.next(next..blocks.end) {
            self.words[(block / 64) as usize] &= !(1 << (block % 64));
            self.count -= 1;
            next = block + 1;
        }
    }

    /// The first one of these. Takes time by how many are looked at, so callers bound them.
    pub fn next(&self, blocks: Range<u64>) -> Option<u64> {
        if self.count == 0 || blocks.is_empty() {
            return None;
        }
        let first = (blocks.start / 64) as usize;
        let last = (blocks.end.div_ceil(64) as usize).min(self.words.len());
        let words = self.words.get(first..last)?.iter().copied();
        let mut mask = !0 << (blocks.start % 64);
        for (word, number) in words.zip(first as u64..) {
            let masked = word & mask;
            mask = !0;
            if masked != 0 {
                let block = number * 64 + u64::from(masked.trailing_zeros());
                return Some(block).filter(|block| blocks.contains(block));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::home::format::{format_page, pages};
    use crate::limits::BLOCK_BYTES;

    fn map(blocks: u64, log: u64, set: &[(u64, BlockState)]) -> Map {
        let empty = pages(blocks * BLOCK_BYTES as u64);
        let empty = (0..empty).map(|page| Box::new(format_page(1, page)));
        let mut map = Map::load(empty.collect(), blocks, 5, true);
        for &(block, state) in set {
            map.set(block, state);
        }
        let written = (0..map.pages.len() as u32)
            .map(|page| Box::new(HomePage::sealed(1, 5, 2, page.into(), map.states(page))));
        Map::load(written.collect(), blocks, log, true)
    }

    #[test]
    fn map_keeps_states_and_counts() {
        use BlockState::{Absent, Clean, Dirty, Zero};
        let set = [(0, Clean), (1, Dirty), (2, Zero), (PAGE_BLOCKS, Dirty)];
        let map = map(PAGE_BLOCKS + 3, 5, &set);
        for (block, state) in set {
            assert_eq!(map.get(block), state);
        }
        let counts = [Absent, Clean, Dirty, Zero].map(|state| map.count(state));
        assert_eq!(counts, [PAGE_BLOCKS - 1, 1, 2, 1]);
        assert_eq!(map.run_end(0, PAGE_BLOCKS, BlockState::is_here), 2);
        assert_eq!(map.run_end(3, u64::MAX, |state| state), PAGE_BLOCKS);
        assert!(map.changed.is_empty());
    }

    #[test]
    fn map_takes_nothing_for_clean_under_another_log() {
        use BlockState::{Absent, Clean, Dirty, Zero};
        let set = [(0, Clean), (1, Dirty), (2, Zero), (3, Clean), (7, Clean)];
        let map = map(8, 6, &set);
        let states = [0, 1, 2, 3, 7].map(|block| map.get(block));
        assert_eq!(states, [Absent, Dirty, Zero, Absent, Absent]);
    }

    #[test]
    fn blocks_are_found_in_order_and_taken_out() {
        let map = map(
            300,
            5,
            &[
                (3, BlockState::Dirty),
                (64, BlockState::Zero),
                (299, BlockState::Dirty),
            ],
        );
        let mut blocks = Blocks::owed(&map);
        assert_eq!(blocks.count(), 3);
        assert_eq!(blocks.next(4..300), Some(64));
        assert_eq!(blocks.next(4..64), None);
        assert_eq!(blocks.next(65..u64::MAX), Some(299));
        assert_eq!(blocks.next(65..299), None);
        assert_eq!(blocks.next(1000..2000), None);
        blocks.remove(64..300);
        assert_eq!((blocks.count(), blocks.next(4..300)), (1, None));
        assert!(blocks.contains(3) && !blocks.contains(64));
    }
}
