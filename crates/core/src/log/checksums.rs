//! The checksums of a log's live data blocks, by their place in the ring. Memory follows what is live: a page of them is
//! there from the first block of its stretch of the ring to the last.
//!
//! ```text
//!  ring    │ stretch 0 │ stretch 1 │ stretch 2 │ …      of 1,024 blocks each
//!            tail ↑ live ──────────► head ↑
//!  pages         page        page        –
//! ```

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

/// Blocks of one page's stretch of the ring.
const PAGE_BLOCKS: u64 = 1024;
/// Memory of one page.
pub const PAGE_BYTES: u64 = PAGE_BLOCKS * 4;

/// See the module.
#[derive(Debug)]
pub struct Checksums {
    pages: Vec<Option<Box<[u32]>>>,
    held: usize,
    ring_blocks: u64,
}

impl Checksums {
    /// Of a ring of so many blocks, none of which is live.
    pub fn new(ring_blocks: u64) -> Self {
        let pages = ring_blocks.div_ceil(PAGE_BLOCKS) as usize;
        Self {
            pages: vec![None; pages],
            held: 0,
            ring_blocks,
        }
    }

    fn place(&self, position: u64) -> (usize, usize) {
        let slot = position % self.ring_blocks;
        ((slot / PAGE_BLOCKS) as usize, (slot % PAGE_BLOCKS) as usize)
    }

    /// The block at `position` has this one.
    pub fn set(&mut self, position: u64, checksum: u32) {
        let (page, place) = self.place(position);
        let held = &mut self.held;
        let page = self.pages[page].get_or_insert_with(|| {
            *held += 1;
            vec![0; PAGE_BLOCKS as usize].into_boxed_slice()
        });
        page[place] = checksum;
    }

    /// What the block at `position` has.
    pub fn get(&self, position: u64) -> u32 {
        let (page, place) = self.place(position);
        self.pages[page].as_ref().map_or(0, |page| page[place])
    }

    /// Nothing of `gone` is live any more, and what of the ring is, lies between the end of it and `head`.
    pub fn forget(&mut self, gone: core::ops::Range<u64>, head: u64) {
        let mut at = gone.start;
        while at < gone.end {
            let (page, place) = self.place(at);
            // Where the stretch of this page begins and ends, in this lap.
            let first = at - place as u64;
            let end =
                (first + PAGE_BLOCKS).min(first + self.ring_blocks - page as u64 * PAGE_BLOCKS);
            let is_dead = end <= gone.end || gone.end == head;
            // The head may have come round to the same stretch.
            let comes_round = head > first + self.ring_blocks;
            if is_dead && !comes_round && self.pages[page].take().is_some() {
                self.held -= 1;
            }
            at = end;
        }
    }

    /// Memory of the pages in bytes.
    pub fn page_bytes(&self) -> u64 {
        self.held as u64 * PAGE_BYTES
    }

    /// All of its memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.pages.len() * size_of::<Option<Box<[u32]>>>() + self.held * PAGE_BYTES as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_what_is_live_are_kept_and_pages_of_the_rest_go() {
        let ring = 10 * PAGE_BLOCKS + 300;
        let mut random = fastrand::Rng::with_seed(5);
        let mut sums = Checksums::new(ring);
        let (mut tail, mut head) = (12_345u64, 12_345u64);
        for _ in 0..4000 {
            let room = ring - (head - tail);
            let more = random.u64(..=room.min(700));
            for at in head..head + more {
                sums.set(at, at as u32);
            }
            head += more;
            let less = random.u64(..=(head - tail).min(700));
            sums.forget(tail..tail + less, head);
            tail += less;
            for at in [tail, head.saturating_sub(1), tail + (head - tail) / 2] {
                if (tail..head).contains(&at) {
                    assert_eq!(sums.get(at), at as u32);
                }
            }
            let pages = (head - tail) / PAGE_BLOCKS + 3;
            assert!(sums.page_bytes() <= pages * PAGE_BYTES, "{tail}..{head}");
        }
        sums.forget(tail..head, head);
        assert_eq!(sums.page_bytes(), 0);
    }
}
