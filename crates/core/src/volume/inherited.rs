//! What of a volume is still as in its origin, and is cached once for everybody who began there.
//!
//! An *origin* is an immutable state, such as a snapshot, that volumes begin as. It has a number of
//! its own in the read cache. A block that a volume has never written is *inherited*: it is looked up
//! and filled under the origin's number, so that what one clone has read is there for all of them.
//!
//! Invariants:
//! 1. What the cache holds under an origin's number is the origin's content, for ever. So nothing is
//!    invalidated there, and only what was fetched while its block was inherited is filled there.
//! 2. A block stops to be inherited when a write of any sector of it is accepted or replayed, before
//!    the backend can be given anything of it, and when it is cut off. It never becomes so again while
//!    the volume is open. Whoever opens the volume says what is inherited, and says too little rather
//!    than too much.
//! 3. What the cache holds under the volume's own number is the backend's present content, inherited
//!    or not, as without an origin. So a block may stop to be inherited at any time.
//!
//! The SSD tier takes whole lines. A line of which only a part is inherited is *mixed*, and is filled
//! whole under the volume's own number; a block of it is looked for under both.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::Volume;
use crate::base::limits::INHERITED_PAGES_MIXED_MAX;

/// Blocks of one page: 16 MiB of the volume.
const PAGE_BLOCKS: u64 = 4096;
const WORDS: usize = PAGE_BLOCKS as usize / 64;

/// Which of 4096 blocks are inherited.
#[derive(Clone, Debug, Default)]
enum Page {
    #[default]
    None,
    All,
    Some(Box<[u64; WORDS]>),
}

/// The blocks of a volume that are still as in its origin.
#[derive(Clone, Debug)]
pub struct Inherited {
    origin: u32,
    pages: Vec<Page>,
    /// Pages of which a part is inherited.
    mixed: usize,
    blocks: u64,
}

impl Inherited {
    /// Nothing yet, of the origin with this number in the cache.
    pub const fn new(origin: u32) -> Self {
        Self {
            origin,
            pages: Vec::new(),
            mixed: 0,
            blocks: 0,
        }
    }

    /// Number of the origin in the cache.
    pub const fn origin(&self) -> u32 {
        self.origin
    }

    /// Blocks that are inherited.
    pub const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Bytes of memory that it takes.
    pub fn memory_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Page>() + self.mixed * size_of::<[u64; WORDS]>()
    }

    /// Whether a block is inherited.
    pub fn contains(&self, block: u64) -> bool {
        match self.pages.get((block / PAGE_BLOCKS) as usize) {
            Some(Page::Some(words)) => {
                let at = block % PAGE_BLOCKS;
                words[(at / 64) as usize] & 1 << (at % 64) != 0
            }
            Some(Page::All) => true,
            Some(Page::None) | None => false,
        }
    }

    /// Blocks from `first` on are inherited, as far as there is memory to note it. Not for a volume
    /// that is in use.
    pub fn insert(&mut self, first: u64, count: u64) {
        self.change(first, count, true);
    }

    /// Blocks from `first` on are not inherited.
    pub fn remove(&mut self, first: u64, count: u64) {
        self.change(first, count, false);
    }

    fn change(&mut self, first: u64, count: u64, inherited: bool) {
        let end = first + count;
        let pages = if inherited {
            let needed = end.div_ceil(PAGE_BLOCKS) as usize;
            if count > 0 && needed > self.pages.len() {
                self.pages.resize_with(needed, Page::default);
            }
            end
        } else {
            end.min(self.pages.len() as u64 * PAGE_BLOCKS)
        };
        let mut at = first;
        while at < pages {
            let number = at / PAGE_BLOCKS;
            let to = pages.min((number + 1) * PAGE_BLOCKS);
            let within = at - number * PAGE_BLOCKS..to - number * PAGE_BLOCKS;
            self.change_page(number as usize, within, inherited);
            at = to;
        }
    }

    fn change_page(&mut self, number: usize, within: core::ops::Range<u64>, inherited: bool) {
        let page = &mut self.pages[number];
        let before = page.blocks();
        let was_mixed = matches!(page, Page::Some(_));
        if within.end - within.start == PAGE_BLOCKS {
            *page = if inherited { Page::All } else { Page::None };
        } else {
            let fill = match (&*page, inherited) {
                (Page::All, true) | (Page::None, false) => return,
                (Page::All, false) => u64::MAX,
                (Page::None, true) | (Page::Some(_), _) => 0,
            };
            if !was_mixed {
                *page = if self.mixed < INHERITED_PAGES_MIXED_MAX {
                    Page::Some(Box::new([fill; WORDS]))
                } else {
                    Page::None
                };
            }
            if let Page::Some(words) = page {
                for at in within {
                    let (word, bit) = (&mut words[(at / 64) as usize], 1 << (at % 64));
                    *word = if inherited { *word | bit } else { *word & !bit };
                }
                if words.iter().all(|&word| word == u64::MAX) {
                    *page = Page::All;
                } else if words.iter().all(|&word| word == 0) {
                    *page = Page::None;
                }
            }
        }
        let is_mixed = matches!(page, Page::Some(_));
        self.blocks = self.blocks - before + page.blocks();
        self.mixed = self.mixed + usize::from(is_mixed) - usize::from(was_mixed);
    }
}

impl Page {
    fn blocks(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::All => PAGE_BLOCKS,
            Self::Some(words) => words.iter().map(|word| u64::from(word.count_ones())).sum(),
        }
    }
}

impl Volume {
    /// Say what the volume has inherited; before its first event, and at most once.
    pub fn inherit(&mut self, inherited: Inherited) {
        debug_assert!(self.log.if_open().is_none() && self.index.iter().next().is_none());
        self.cached.inherit(inherited);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn inherited_agrees_with_an_array() {
        let mut random = fastrand::Rng::with_seed(6);
        let blocks = 3 * PAGE_BLOCKS as usize;
        let mut inherited = Inherited::new(9);
        let mut model = vec![false; blocks];
        for round in 0..2000 {
            let first = random.usize(0..blocks);
            let longest = if round % 7 == 0 { blocks } else { 300 };
            let count = random.usize(0..=longest).min(blocks - first);
            let insert = random.bool();
            if insert {
                inherited.insert(first as u64, count as u64);
            } else {
                inherited.remove(first as u64, count as u64);
            }
            model[first..first + count].fill(insert);
            let held = model.iter().filter(|&&held| held).count();
            assert_eq!(inherited.blocks(), held as u64);
            for _ in 0..20 {
                let block = random.usize(0..blocks);
                assert_eq!(inherited.contains(block as u64), model[block]);
            }
        }
        assert!(!inherited.contains(u64::MAX / 2), "beyond all pages");
        inherited.remove(0, 1 << 40);
        assert_eq!((inherited.blocks(), inherited.mixed), (0, 0));
    }

    #[test]
    fn inherited_says_too_little_when_its_memory_is_used_up() {
        let mut inherited = Inherited::new(9);
        let pages = INHERITED_PAGES_MIXED_MAX as u64;
        for page in 0..pages + 10 {
            inherited.insert(page * PAGE_BLOCKS, 5);
        }
        assert_eq!(inherited.blocks(), pages * 5);
        // A page that is inherited whole needs none, but to forget a part of it.
        let whole = (pages + 20) * PAGE_BLOCKS;
        inherited.insert(whole, PAGE_BLOCKS);
        assert!(inherited.contains(whole + 7));
        inherited.remove(whole + 8, 1);
        assert!(!inherited.contains(whole + 7) && !inherited.contains(whole + 8));
        assert_eq!(inherited.blocks(), pages * 5);
        assert!(inherited.memory_bytes() < 3 << 20);
    }
}
