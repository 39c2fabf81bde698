//! What the local store has of each block, in memory, and sets of blocks.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use super::format::{HomePage, PAGE_BLOCKS, PAGE_STATE_BYTES, page_digest};
use crate::base::limits::BLOCK_BYTES;

/// The lower bits of the four states in a byte.
const LOW_BITS: u8 = 0x55;

/// What the local store has of a block.
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

    /// Whether its bytes are in the local store.
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
    /// Sets of blocks share them until they change.
    states: Arc<States>,
    /// Blocks that the backend lacks.
    owed: u16,
}

/// Two bits for each block of a page.
type States = [u8; PAGE_STATE_BYTES];

/// How many blocks there are in the four states, in whole bytes of them.
fn counts_of(states: &[u8]) -> [u64; 4] {
    let (mut owed, mut odd, mut here) = (0, 0, 0);
    for byte in states {
        let (low, high) = (byte & LOW_BITS, byte >> 1 & LOW_BITS);
        owed += u64::from(high.count_ones());
        odd += u64::from((low & high).count_ones());
        here += u64::from((low & !high).count_ones());
    }
    [states.len() as u64 * 4 - owed - here, here, owed - odd, odd]
}

/// The map of a local store.
#[derive(Debug)]
pub struct Map {
    pages: Vec<Page>,
    blocks: u64,
    counts: [u64; 4],
    /// What the superblock says of these pages.
    digest: u64,
    /// Pages that differ from what was written, or is being written, last.
    pub changed: BTreeSet<u32>,
}

/// Blocks of one page as those before, in and behind whole bytes of states.
fn parts(blocks: &Range<u64>) -> (Range<u64>, Range<usize>, Range<u64>) {
    let first = blocks.start / PAGE_BLOCKS * PAGE_BLOCKS;
    let (from, to) = ((blocks.start - first).div_ceil(4), (blocks.end - first) / 4);
    if from >= to {
        return (blocks.clone(), 0..0, 0..0);
    }
    let whole = first + from * 4..first + to * 4;
    let bytes = from as usize..to as usize;
    (blocks.start..whole.start, bytes, whole.end..blocks.end)
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
            digest: 0,
            changed: BTreeSet::new(),
        };
        for (page, number) in pages.into_iter().zip(0..) {
            let mut states = page.states;
            if page.log.get() != log || !is_log_whole {
                for byte in &mut states {
                    // The lower bit alone is "clean".
                    *byte &= !(*byte & LOW_BITS & !(*byte >> 1));
                }
            }
            if states != page.states && !is_log_whole {
                this.changed.insert(number);
            }
            let generation = page.generation.get();
            let term = page_digest(number.into(), generation);
            this.digest = this.digest.wrapping_add(term);
            this.pages.push(Page {
                generation,
                states: Arc::new(states),
                owed: 0,
            });
        }
        // What is behind the end was cut off. It is durably not there before there are blocks again.
        let last = this.pages.len() as u64 * PAGE_BLOCKS;
        if blocks < last && !this.is_all(blocks..last, BlockState::Absent) {
            for block in blocks..last {
                this.put(block, BlockState::Absent);
            }
            this.changed.insert((last / PAGE_BLOCKS) as u32 - 1);
        }
        for page in &mut this.pages {
            let counts = counts_of(&page.states[..]);
            page.owed =
                (counts[BlockState::Dirty as usize] + counts[BlockState::Zero as usize]) as u16;
            for (sum, count) in this.counts.iter_mut().zip(counts) {
                *sum += count;
            }
        }
        // Those that are behind the end.
        this.counts[BlockState::Absent as usize] -= last.saturating_sub(blocks);
        this
    }

    /// A map of one page alone that says what this says, of a volume of so many bytes: its blocks are numbered within
    /// the page.
    pub fn of_page(page: Box<HomePage>, bytes: u64) -> Self {
        let blocks = bytes / BLOCK_BYTES as u64 - page.page.get() * PAGE_BLOCKS;
        let log = page.log.get();
        Self::load(Vec::from([page]), blocks.min(PAGE_BLOCKS), log, true)
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

    /// Whether all of these blocks, which are of one page, are in a state.
    pub fn is_all(&self, blocks: Range<u64>, state: BlockState) -> bool {
        let (head, bytes, tail) = parts(&blocks);
        let states = &self.pages[(blocks.start / PAGE_BLOCKS) as usize].states;
        let pattern = state as u8 * LOW_BITS;
        head.chain(tail).all(|block| self.get(block) == state)
            && states[bytes].iter().all(|&byte| byte == pattern)
    }

    /// Change the state of blocks, which are of one page and some of them in another state.
    pub fn fill(&mut self, blocks: Range<u64>, state: BlockState) {
        let owed = |counts: &[u64; 4]| {
            counts[BlockState::Dirty as usize] + counts[BlockState::Zero as usize]
        };
        let before = owed(&self.counts);
        let (head, bytes, tail) = parts(&blocks);
        let number = blocks.start / PAGE_BLOCKS;
        for block in head.chain(tail) {
            let old = self.get(block);
            self.counts[old as usize] -= 1;
            self.counts[state as usize] += 1;
            self.put(block, state);
        }
        let page = &mut self.pages[number as usize];
        let states = &mut Arc::make_mut(&mut page.states)[bytes];
        for (count, old) in self.counts.iter_mut().zip(counts_of(states)) {
            *count -= old;
        }
        self.counts[state as usize] += states.len() as u64 * 4;
        states.fill(state as u8 * LOW_BITS);
        page.owed = (u64::from(page.owed) + owed(&self.counts) - before) as u16;
        self.changed.insert(number as u32);
    }

    /// Have more blocks, of which nothing is here. Both copies of new pages are as [`empty_page`] makes them.
    ///
    /// [`empty_page`]: super::format::empty_page
    pub fn grow(&mut self, blocks: u64, generation: u64) {
        let empty = Arc::new([0; PAGE_STATE_BYTES]);
        self.digest = self.digest_of(blocks, generation);
        let page = || Page {
            generation,
            states: Arc::clone(&empty),
            owed: 0,
        };
        let pages = blocks.div_ceil(PAGE_BLOCKS) as usize;
        self.pages.resize_with(pages, page);
        self.counts[BlockState::Absent as usize] += blocks - self.blocks;
        self.blocks = blocks;
    }

    /// Have so many blocks, and no page of others.
    pub fn cut(&mut self, blocks: u64) {
        while self.blocks > blocks {
            let page = (self.blocks - 1) / PAGE_BLOCKS;
            let gone = blocks.max(page * PAGE_BLOCKS)..self.blocks;
            if !self.is_all(gone.clone(), BlockState::Absent) {
                self.fill(gone.clone(), BlockState::Absent);
            }
            self.counts[BlockState::Absent as usize] -= gone.end - gone.start;
            self.blocks = gone.start;
            if gone.start == page * PAGE_BLOCKS {
                self.digest = self.digest_of(gone.start, 0);
                self.pages.pop();
                self.changed.remove(&(page as u32));
            }
        }
    }

    fn put(&mut self, block: u64, state: BlockState) {
        let at = (block % PAGE_BLOCKS) as usize;
        let byte =
            &mut Arc::make_mut(&mut self.pages[(block / PAGE_BLOCKS) as usize].states)[at / 4];
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

    /// The number of the commit that wrote a page last.
    pub fn generation(&self, page: u32) -> u64 {
        self.pages[page as usize].generation
    }

    /// A page is being written by the commit with this number.
    pub fn begin_write(&mut self, page: u32, commit: u64) {
        let before = core::mem::replace(&mut self.pages[page as usize].generation, commit);
        let term = |generation| page_digest(page.into(), generation);
        let others = self.digest.wrapping_sub(term(before));
        self.digest = others.wrapping_add(term(commit));
    }

    /// What a superblock says of the pages of so many blocks; those that are not there yet are of this generation.
    /// Takes time by how many pages more or less these are.
    pub fn digest_of(&self, blocks: u64, generation: u64) -> u64 {
        let (has, needs) = (self.pages.len(), blocks.div_ceil(PAGE_BLOCKS));
        let term = |page: u64, generation| page_digest(page, generation);
        let gone = (needs.min(has as u64)..).zip(&self.pages[has.min(needs as usize)..]);
        let gone = gone.map(|(number, page)| term(number, page.generation));
        let added = (has as u64..needs).map(|number| term(number, generation));
        let without = gone.fold(self.digest, u64::wrapping_sub);
        added.fold(without, u64::wrapping_add)
    }
}

/// Words of a page of a set, of 64 blocks each.
const PAGE_WORDS: usize = (PAGE_BLOCKS / 64) as usize;

/// What a set has of a page.
#[derive(Debug)]
enum Part {
    Nothing,
    /// What these states say that the backend lacks, which are so many blocks.
    Owed(Arc<States>, u16),
    /// One bit for each block, and how many there are.
    Some(Box<[u64; PAGE_WORDS]>, u16),
}

impl Part {
    /// Which of 64 blocks there are.
    fn word(&self, index: usize) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Owed(states, _) => {
                // 64 blocks are 16 bytes, of whose states the upper bits count.
                let states = &states.as_chunks::<16>().0[index];
                let nibbles = states.iter().enumerate().map(|(index, &byte)| {
                    let bits = byte >> 1 & LOW_BITS;
                    let nibble = bits & 1 | bits >> 1 & 2 | bits >> 2 & 4 | bits >> 3 & 8;
                    u64::from(nibble) << (index * 4)
                });
                nibbles.sum()
            }
            Self::Some(words, _) => words[index],
        }
    }

    fn count(&self) -> u16 {
        match self {
            Self::Nothing => 0,
            Self::Owed(_, count) | Self::Some(_, count) => *count,
        }
    }

    /// Take out the blocks from `from` up to but not including `to`; how many there were.
    fn remove(&mut self, from: u64, to: u64) -> u16 {
        let before = self.count();
        if before == 0 || (from, to) == (0, PAGE_BLOCKS) {
            *self = Self::Nothing;
            return before;
        }
        if let Self::Owed(..) = self {
            let mut words = Box::new([0; PAGE_WORDS]);
            for (index, word) in words.iter_mut().enumerate() {
                *word = self.word(index);
            }
            *self = Self::Some(words, before);
        }
        let Self::Some(words, count) = self else {
            return 0;
        };
        for index in from / 64..to.div_ceil(64) {
            let word = &mut words[index as usize];
            let gone = *word & mask(from..to, index);
            *word &= !gone;
            *count -= gone.count_ones() as u16;
        }
        let gone = before - *count;
        if *count == 0 {
            *self = Self::Nothing;
        }
        gone
    }
}

/// The bits of the word with a number that are in a range.
fn mask(range: Range<u64>, word: u64) -> u64 {
    let from = range.start.saturating_sub(word * 64);
    let to = range.end.saturating_sub(word * 64);
    let below = |bits: u64| if bits < 64 { (1 << bits) - 1 } else { !0 };
    below(to) & !below(from)
}

/// A set of blocks. Of pages that nothing was taken from it has what the map shares with it.
#[derive(Debug, Default)]
pub struct Blocks {
    pages: Vec<Part>,
    count: u64,
}

impl Blocks {
    /// What the backend lacks. Takes time by the number of pages, whatever is in them.
    pub fn owed(map: &Map) -> Self {
        let pages = map.pages.iter().map(|page| match page.owed {
            0 => Part::Nothing,
            owed => Part::Owed(Arc::clone(&page.states), owed),
        });
        Self {
            pages: pages.collect(),
            count: map.count(BlockState::Dirty) + map.count(BlockState::Zero),
        }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether a block is one of them.
    pub fn contains(&self, block: u64) -> bool {
        let page = self.pages.get((block / PAGE_BLOCKS) as usize);
        let at = block % PAGE_BLOCKS;
        page.is_some_and(|page| page.word((at / 64) as usize) >> (at % 64) & 1 == 1)
    }

    /// Take blocks out.
    pub fn remove(&mut self, blocks: Range<u64>) {
        if self.count == 0 || blocks.is_empty() {
            return;
        }
        let last = (blocks.end.div_ceil(PAGE_BLOCKS) as usize).min(self.pages.len());
        for number in (blocks.start / PAGE_BLOCKS) as usize..last {
            let first = number as u64 * PAGE_BLOCKS;
            let from = blocks.start.saturating_sub(first);
            let to = (blocks.end - first).min(PAGE_BLOCKS);
            self.count -= u64::from(self.pages[number].remove(from, to));
        }
    }

    /// The first one of these. Takes time by how many pages are looked at, and at most one page's blocks.
    pub fn next(&self, blocks: Range<u64>) -> Option<u64> {
        if self.count == 0 {
            return None;
        }
        let mut at = blocks.start;
        while at < blocks.end
            && let Some(page) = self.pages.get((at / PAGE_BLOCKS) as usize)
        {
            let first = at / PAGE_BLOCKS * PAGE_BLOCKS;
            let (from, to) = (at - first, (blocks.end - first).min(PAGE_BLOCKS));
            let words = if page.count() == 0 {
                0..0
            } else {
                from / 64..to.div_ceil(64)
            };
            for index in words {
                let word = page.word(index as usize) & mask(from..to, index);
                if word != 0 {
                    return Some(first + index * 64 + u64::from(word.trailing_zeros()));
                }
            }
            at = first + PAGE_BLOCKS;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::local::format::{format_page, pages};

    fn map(blocks: u64, log: u64, set: &[(u64, BlockState)]) -> Map {
        let empty = pages(blocks * BLOCK_BYTES as u64);
        let empty = (0..empty).map(|page| Box::new(format_page(1, page, None)));
        let mut map = Map::load(empty.collect(), blocks, 5, true);
        for &(block, state) in set {
            map.fill(block..block + 1, state);
        }
        let written = (0..map.pages.len() as u32)
            .map(|page| Box::new(HomePage::sealed(1, 5, 2, page.into(), map.states(page))));
        Map::load(written.collect(), blocks, log, true)
    }

    #[test]
    fn map_of_one_page_says_what_that_says() {
        use BlockState::{Absent, Clean, Dirty, Zero};
        let mut states = [0; PAGE_STATE_BYTES];
        states[..2].copy_from_slice(&[0b11_10_01_00, 0b10_10_10_01]);
        // Whatever log it was written under, what it calls clean is.
        let page = Box::new(HomePage::sealed(1, 77, 2, 1, &states));
        let map = Map::of_page(page, (PAGE_BLOCKS + 6) * BLOCK_BYTES as u64);
        let found = (0..map.blocks()).map(|block| map.get(block));
        assert!(found.eq([Absent, Clean, Dirty, Zero, Clean, Dirty]));
        assert_eq!(BlockState::ALL.map(|state| map.count(state)), [1, 2, 2, 1]);
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

    #[test]
    fn map_and_sets_agree_with_an_array() {
        let mut random = fastrand::Rng::with_seed(6);
        let blocks = 2 * PAGE_BLOCKS + 77;
        let mut map = map(blocks, 5, &[]);
        let mut model = vec![BlockState::Absent; blocks as usize];
        let mut range = |longest: u64| {
            let first = random.u64(..blocks);
            let end = (first + random.u64(1..=longest)).min(blocks);
            (first..end, random.usize(..4))
        };
        for round in 0..40 {
            for _ in 0..20 {
                let (range, state) = range(if round % 2 == 0 { 30 } else { 9000 });
                let end = range.end.min((range.start / PAGE_BLOCKS + 1) * PAGE_BLOCKS);
                let (range, state) = (range.start..end, BlockState::ALL[state]);
                let part = &mut model[range.start as usize..range.end as usize];
                assert_eq!(
                    map.is_all(range.clone(), state),
                    part.iter().all(|s| *s == state)
                );
                part.fill(state);
                map.fill(range, state);
            }
            for state in BlockState::ALL {
                let count = model.iter().filter(|s| **s == state).count();
                assert_eq!(map.count(state), count as u64);
            }
            let mut set = Blocks::owed(&map);
            let owed = |state: &BlockState| matches!(state, BlockState::Dirty | BlockState::Zero);
            let mut wanted: Vec<bool> = model.iter().map(owed).collect();
            // What changes in the map from now on does not change the set.
            let (gone, _) = range(9000);
            for block in gone {
                map.fill(block..block + 1, BlockState::Clean);
                model[block as usize] = BlockState::Clean;
            }
            for longest in [1, 30, 9000, 40_000] {
                let (gone, _) = range(longest);
                wanted[gone.start as usize..gone.end as usize].fill(false);
                set.remove(gone);
                let (among, _) = range(longest);
                let next = among.clone().find(|&block| wanted[block as usize]);
                assert_eq!(set.next(among), next);
                let count = wanted.iter().filter(|is_in| **is_in).count();
                assert_eq!(set.count(), count as u64);
            }
            let is_in = (0..blocks).map(|block| set.contains(block));
            assert!(is_in.eq(wanted.iter().copied()));
        }
    }

    #[test]
    fn blocks_owed_share_the_pages_of_the_map_until_one_changes() {
        let mut map = map(3 * PAGE_BLOCKS, 5, &[]);
        for page in [0, 2] {
            map.fill(
                page * PAGE_BLOCKS..page * PAGE_BLOCKS + 9,
                BlockState::Dirty,
            );
        }
        let mut set = Blocks::owed(&map);
        let held = |map: &Map| [0, 1, 2].map(|page| Arc::strong_count(&map.pages[page].states));
        assert_eq!(held(&map), [2, 1, 2]);
        map.fill(0..1, BlockState::Clean);
        assert_eq!((held(&map), set.contains(0)), ([1, 1, 2], true));
        set.remove(2 * PAGE_BLOCKS..2 * PAGE_BLOCKS + 1);
        assert_eq!((held(&map), set.count()), ([1, 1, 1], 17));
    }
}
