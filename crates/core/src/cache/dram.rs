//! The DRAM tier: 4 KiB frames with a scan-resistant, list-free eviction.
//!
//! The policy is S3-FIFO laid over places instead of queues, with a border that moves. The first
//! frames are the *small* ring, where a block starts; the rest is the *main* ring, for blocks that
//! were used again. A hand goes round in each; a frame's place in its ring is its age, so no queue is
//! stored and a hit only raises a two-bit count that lies in the word which had to be read to verify
//! the key.
//!
//! ```text
//! insert ── remembered by the ghost, and a main frame gives way? ── no ──► small ──(used again)──► main ◄──┐ used:
//!                    └───────────────────── yes ────────────────────────────────────────────────────►│     │ count - 1
//!                                              small ──(not used)──► ghost ◄──(not used)── main ───────────┘
//! ```
//!
//! What the ghost remembers says which ring is too short. A block that comes back after it left the
//! small ring moves the border up, if the main ring had an unused frame for it; one that comes back
//! after it left the main ring moves it down. Both count more the rarer evictions from their ring
//! are, as in ARC. A block that comes back takes a main frame only if one of a few under the hand was not
//! used: so a loop that is larger than the cache keeps a part of itself in, instead of turning
//! the whole ring over.
//!
//! Where volumes differ in what their reads cost, the hands weigh what they pass; see `benefit`.
//!
//! Invariants:
//! 1. A frame is in the table under its key, or it is empty.
//! 2. A frame is written only while nobody holds it (`Arena::claim` refuses otherwise); a frame that
//!    is held is passed over by the hands.
//! 3. Empty main frames are in the free list or were never used; empty small frames wait for the hand.
//!    So the border never moves up over an empty frame, and not before all frames were used.
//! 4. Moving from small to main copies 4 KiB. That is paid only by blocks that have proved useful,
//!    and spares 4 bytes per frame and a write to shared lines on every hit.
//!
//! Memory per frame: 8 key and count, 4.9 table, 2 reference count, 1 ghost.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ptr::NonNull;

use super::benefit::{Worths, unproven};
use super::forgetting::Forgetting;
use super::ghost::{Ghost, Ring};
use super::table::{Table, mix};
use crate::base::buf::{Arena, Buf};
use crate::base::io::BlockKey;
use crate::base::limits::{BLOCK_BYTES, DRAM_SWEEP_FRAMES_MAX, VOLUME_BYTES_MAX};

/// Two bits of a key that no block number uses: 0 for an empty frame, else the use count plus 1.
const COUNT_SHIFT: u32 = 38;
const COUNT_MASK: u64 = 3 << COUNT_SHIFT;
const COUNT_ONE: u64 = 1 << COUNT_SHIFT;
const _: () = assert!(VOLUME_BYTES_MAX / BLOCK_BYTES as u64 <= COUNT_ONE);

/// One frame in so many belongs to the small ring at the start, at least, and to the main ring at least.
const SMALL_SHARE: usize = 50;
const SMALL_SHARE_MIN: usize = 100;
const MAIN_SHARE_MIN: usize = 10;
/// Frames under the main hand that one may give way to a block that comes back to the small ring, or
/// to the main ring. More would let a loop turn the main ring over; fewer would hold on to what
/// nobody reads any more.
const LOOKS_FROM_SMALL: usize = 3;
const LOOKS_FROM_MAIN: usize = 1;
/// Frames that the border moves up, or down, at a time.
const BORDER_UP_MAX: usize = 16;
const BORDER_DOWN_MAX: usize = 64;
/// How far into the free list to look for a frame that nobody holds.
const FREE_LOOK: usize = 64;
/// The end of the free list.
const NONE: u32 = u32::MAX;

/// See the module.
#[derive(Debug)]
pub struct Dram {
    arena: Option<Arc<Arena>>,
    /// Key and count of each frame; of an empty main frame, the next one of the free list.
    keys: Vec<u64>,
    table: Table,
    ghost: Ghost,
    /// Frames of the small ring: `0..small`.
    small: usize,
    /// Evictions of late from each ring, halved now and then.
    evicted_of_late: [usize; 2],
    small_hand: usize,
    main_hand: usize,
    free: u32,
    /// Frames from here on were never used; the main ring is taken in order.
    fresh: usize,
    evicted: u64,
    forgetting: Forgetting,
    pub worths: Worths,
}

impl Dram {
    pub fn new(frames: usize) -> Self {
        let small = (frames / SMALL_SHARE).max(1).min(frames);
        Self {
            arena: (frames > 0).then(|| Arena::new(frames)),
            keys: vec![0; frames],
            table: Table::new(frames),
            ghost: Ghost::new(frames / 2),
            small,
            evicted_of_late: [1; 2],
            small_hand: 0,
            main_hand: small,
            free: NONE,
            fresh: small,
            evicted: 0,
            forgetting: Forgetting::default(),
            worths: Worths::default(),
        }
    }

    pub fn frames(&self) -> usize {
        self.keys.len()
    }

    /// Where the frames lie, if there are any.
    pub fn memory(&self) -> Option<(NonNull<u8>, usize)> {
        self.arena.as_ref().map(|arena| arena.memory())
    }

    pub fn used(&self) -> usize {
        self.table.len()
    }

    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// The doublings by which a volume's frames are worth more than the mean of the main ring.
    pub fn gain(&self, volume: u32) -> i32 {
        self.worths.gain(volume, Ring::Main as usize)
    }

    pub fn index_bytes(&self) -> usize {
        self.keys.len() * 8
            + self.table.bytes()
            + self.ghost.bytes()
            + self
                .arena
                .as_ref()
                .map_or(0, |arena| arena.overhead_bytes())
    }

    fn find(&self, key: BlockKey, hash: u64) -> Option<usize> {
        // A key that uses the bits of the count names no block; it must not match another's.
        if key.0 & COUNT_MASK != 0 || self.forgetting.covers(key.0) {
            return None;
        }
        self.find_frame(key, hash)
    }

    /// The frame of a block, also if that is to be forgotten.
    fn find_frame(&self, key: BlockKey, hash: u64) -> Option<usize> {
        self.table
            .find(hash, |id| self.keys[id as usize] & !COUNT_MASK == key.0)
            .map(|id| id as usize)
    }

    /// The block in a frame, and how often it was used since it came, or of late.
    pub fn used_at(&self, frame: usize) -> Option<(BlockKey, u8)> {
        let word = *self.keys.get(frame)?;
        let count = (word & COUNT_MASK) >> COUNT_SHIFT;
        (count > 0).then(|| (BlockKey(word & !COUNT_MASK), count as u8 - 1))
    }

    pub fn contains(&self, key: BlockKey) -> bool {
        self.find(key, mix(key.0)).is_some()
    }

    /// The block, shared; counts as a use.
    pub fn lookup(&mut self, key: BlockKey) -> Option<Buf> {
        let frame = self.find(key, mix(key.0))?;
        if self.keys[frame] & COUNT_MASK != COUNT_MASK {
            self.keys[frame] += COUNT_ONE;
        }
        self.arena.as_ref()?.share(frame)
    }

    /// Take one whole block; refused when every frame in reach is held, or while its place is being forgotten.
    pub fn insert(&mut self, key: BlockKey, data: &[u8]) {
        if self.arena.is_none() || key.0 & COUNT_MASK != 0 || self.forgetting.covers(key.0) {
            return;
        }
        let hash = mix(key.0);
        if let Some(frame) = self.find(key, hash) {
            if self.write(frame, data) {
                return;
            }
            self.vacate(frame);
        }
        let Some(frame) = self.take_frame(key, hash) else {
            return;
        };
        let written = self.write(frame, data);
        assert!(written, "a frame that was taken is not held");
        self.keys[frame] = key.0 | COUNT_ONE;
        self.table.insert(hash, frame as u32);
        let ring = if frame < self.small {
            Ring::Small
        } else {
            Ring::Main
        };
        self.worths.note(key.volume(), ring as usize);
    }

    fn write(&self, frame: usize, data: &[u8]) -> bool {
        let claimed = self.arena.as_ref().and_then(|arena| arena.claim(frame, 1));
        claimed.is_some_and(|mut buf| {
            buf.copy_from_slice(data);
            true
        })
    }

    fn is_held(&self, frame: usize) -> bool {
        !self
            .arena
            .as_ref()
            .is_some_and(|arena| arena.is_free(frame))
    }

    /// An empty frame that nobody holds and that is in no list.
    fn take_frame(&mut self, key: BlockKey, hash: u64) -> Option<usize> {
        let remembered = self.ghost.remove(hash);
        if let Some(frame) = self.take_free() {
            return Some(frame);
        }
        let gain = self.gain(key.volume());
        if let Some(ring) = remembered
            && self.worths.is_drawn(-gain)
        {
            let looks = match ring {
                Ring::Small => LOOKS_FROM_SMALL,
                Ring::Main => LOOKS_FROM_MAIN,
            };
            // What is worth more may drive out what was used, if that is worth less.
            let looks = (looks << gain.max(0)).min(DRAM_SWEEP_FRAMES_MAX);
            let frame = self.sweep_main(looks);
            self.move_border(ring, frame.is_some());
            if frame.is_some() {
                return frame;
            }
        }
        self.sweep_small()
            .or_else(|| self.sweep_main(DRAM_SWEEP_FRAMES_MAX))
    }

    /// A block came back that `ring` had let go: it could do with more frames, unless all of the
    /// other's are used.
    fn move_border(&mut self, ring: Ring, gave_way: bool) {
        let [from_small, from_main] = self.evicted_of_late;
        match ring {
            Ring::Small if gave_way => {
                let main_min = (self.frames() / MAIN_SHARE_MIN).max(1);
                for _ in 0..(from_main / from_small).clamp(1, BORDER_UP_MAX) {
                    let is_empty = self.keys[self.small] & COUNT_MASK == 0;
                    if is_empty || self.small + main_min >= self.frames() {
                        break;
                    }
                    self.small += 1;
                }
                self.main_hand = self.main_hand.max(self.small);
            }
            Ring::Small => {}
            Ring::Main => {
                let small_min = (self.frames() / SMALL_SHARE_MIN).max(1);
                for _ in 0..(from_small / from_main).clamp(1, BORDER_DOWN_MAX) {
                    if self.small <= small_min {
                        break;
                    }
                    self.small -= 1;
                    if self.keys[self.small] & COUNT_MASK == 0 {
                        self.keys[self.small] = u64::from(self.free);
                        self.free = self.small as u32;
                    }
                }
                if self.small_hand >= self.small {
                    self.small_hand = 0;
                }
            }
        }
    }

    /// Take note of an eviction.
    fn evict(&mut self, key: u64, ring: Ring) {
        self.ghost.insert(mix(key), ring);
        self.evicted += 1;
        self.evicted_of_late[ring as usize] += 1;
        if self.evicted_of_late.iter().sum::<usize>() > self.frames() + 2 {
            self.evicted_of_late = self.evicted_of_late.map(|count| count.div_ceil(2));
        }
    }

    fn take_free(&mut self) -> Option<usize> {
        if self.fresh < self.frames() {
            self.fresh += 1;
            return Some(self.fresh - 1);
        }
        // What was invalidated while a reply holds it is free with the reply; until then others
        // behind it in the list serve.
        let (mut before, mut frame) = (NONE, self.free);
        for _ in 0..FREE_LOOK {
            if frame == NONE {
                break;
            }
            let next = self.keys[frame as usize];
            if !self.is_held(frame as usize) {
                match before {
                    NONE => self.free = next as u32,
                    _ => self.keys[before as usize] = next,
                }
                self.keys[frame as usize] = 0;
                return Some(frame as usize);
            }
            (before, frame) = (frame, next as u32);
        }
        None
    }

    fn sweep_small(&mut self) -> Option<usize> {
        for _ in 0..self.small.min(DRAM_SWEEP_FRAMES_MAX) {
            let frame = self.small_hand;
            self.small_hand = (frame + 1) % self.small;
            if self.is_held(frame) {
                continue;
            }
            let word = self.keys[frame];
            if word & COUNT_MASK == 0 {
                return Some(frame);
            }
            let gain = self.pass(word, Ring::Small);
            let stays = if word & COUNT_MASK == COUNT_ONE {
                !self.worths.is_drawn(unproven(gain))
            } else {
                self.worths.is_drawn(-gain)
            };
            if !stays || !self.promote(frame) {
                self.vacate(frame);
                self.evict(word & !COUNT_MASK, Ring::Small);
            }
            return Some(frame);
        }
        None
    }

    /// Copy a small frame into the main ring; its old frame becomes empty.
    fn promote(&mut self, from: usize) -> bool {
        let Some(to) = self
            .take_free()
            .or_else(|| self.sweep_main(DRAM_SWEEP_FRAMES_MAX))
        else {
            return false;
        };
        let source = self.arena.as_ref().and_then(|arena| arena.share(from));
        if !source.is_some_and(|source| self.write(to, &source)) {
            return false;
        }
        let key = self.keys[from] & !COUNT_MASK;
        self.table.replace(mix(key), from as u32, to as u32);
        self.keys[to] = key | COUNT_ONE;
        self.keys[from] = 0;
        self.worths
            .note(BlockKey(key).volume(), Ring::Main as usize);
        true
    }

    /// Evict the first of the next `looks` main frames that was not used; all of them lose a use.
    fn sweep_main(&mut self, looks: usize) -> Option<usize> {
        let main = self.frames() - self.small;
        // A second chance has been paid for by a hit, so the sweep is short on average; its bound
        // keeps one insert from paying for all of them.
        for step in 0..(3 * main).min(looks) {
            let frame = self.main_hand;
            self.main_hand = if frame + 1 == self.frames() {
                self.small
            } else {
                frame + 1
            };
            let word = self.keys[frame];
            if word & COUNT_MASK == 0 || self.is_held(frame) {
                continue;
            }
            let gain = self.pass(word, Ring::Main);
            let is_last = step + 1 == DRAM_SWEEP_FRAMES_MAX;
            if !is_last && !self.worths.is_drawn(gain) {
                continue;
            }
            if word & COUNT_MASK > COUNT_ONE && !is_last && self.worths.is_drawn(-gain) {
                self.keys[frame] -= COUNT_ONE;
                continue;
            }
            let key = word & !COUNT_MASK;
            self.table.remove(mix(key), frame as u32);
            self.keys[frame] = 0;
            self.evict(key, Ring::Main);
            return Some(frame);
        }
        None
    }

    /// The hand of a ring passes a frame with this word.
    fn pass(&mut self, word: u64, ring: Ring) -> i32 {
        let volume = BlockKey(word & !COUNT_MASK).volume();
        self.worths.pass(volume, ring as usize)
    }

    /// Take a frame out of the table; it becomes empty.
    fn vacate(&mut self, frame: usize) {
        let key = self.keys[frame] & !COUNT_MASK;
        self.table.remove(mix(key), frame as u32);
        if frame < self.small {
            self.keys[frame] = 0;
        } else {
            self.keys[frame] = u64::from(self.free);
            self.free = frame as u32;
        }
    }

    /// Drop the blocks from `first` to `end`; of more than `probes_max` the frames are found later.
    pub fn invalidate(&mut self, first: u64, end: u64, probes_max: usize) {
        let blocks = end.saturating_sub(first);
        if self.table.len() == 0 {
            return;
        }
        if blocks > probes_max as u64 {
            self.forgetting.add(first, end);
            return;
        }
        for key in (first..end).map(BlockKey) {
            if let Some(frame) = self.find(key, mix(key.0)) {
                self.vacate(frame);
            }
        }
    }

    /// Whether a part of a range is being forgotten.
    pub fn refuses(&self, first: u64, end: u64) -> bool {
        self.forgetting.overlaps(first, end)
    }

    /// What was looked at so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.table.work() + self.forgetting.work()
    }

    /// Whether nothing is left to forget.
    pub fn has_forgotten(&self) -> bool {
        self.forgetting.is_empty()
    }

    /// Drop what is to be forgotten in the next `places_max` frames. A block moves to a higher frame only, from the
    /// small ring to the main one, so a walk upwards misses none.
    pub fn forget_some(&mut self, places_max: usize) {
        if self.forgetting.is_empty() {
            return;
        }
        let frames = self.frames();
        for frame in self.forgetting.next(frames, places_max) {
            let word = self.keys[frame];
            if word & COUNT_MASK != 0 && self.forgetting.covers(word & !COUNT_MASK) {
                self.vacate(frame);
            }
        }
        self.forgetting.end_walk(frames);
    }

    pub fn check_invariants(&self) {
        let mut used = 0;
        for (frame, &word) in self.keys.iter().enumerate() {
            if word & COUNT_MASK != 0 {
                used += 1;
                let key = BlockKey(word & !COUNT_MASK);
                let found = self.find_frame(key, mix(key.0));
                assert_eq!(found, Some(frame), "frame and table");
            }
        }
        assert_eq!(used, self.table.len(), "frames in the table");
        let (mut free, mut next) = (0, self.free);
        while next != NONE {
            let word = self.keys[next as usize];
            assert!(word & COUNT_MASK == 0 && next as usize >= self.small);
            free += 1;
            assert!(free <= self.frames(), "the free list ends");
            next = word as u32;
        }
        let empty = (self.small..self.fresh)
            .filter(|&frame| self.keys[frame] & COUNT_MASK == 0)
            .count();
        assert_eq!(empty, free, "empty main frames are in the free list");
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;

    use super::*;

    fn key(block: u64) -> BlockKey {
        BlockKey::new(3, block)
    }

    #[test]
    fn dram_returns_what_was_last_filled_or_misses() {
        for frames in [0, 1, 2, 7, 64, 1000] {
            let mut random = fastrand::Rng::with_seed(frames as u64);
            let mut dram = Dram::new(frames);
            let mut model: BTreeMap<u64, u8> = BTreeMap::new();
            let mut held: Vec<(Buf, u8)> = Vec::new();
            let mut hits = 0;
            for step in 0..20_000u32 {
                let block = random.u64(..2 * frames as u64 + 2);
                match random.u8(..10) {
                    0..3 => {
                        dram.insert(key(block), &[step as u8; BLOCK_BYTES]);
                        model.insert(block, step as u8);
                    }
                    3 => {
                        dram.invalidate(key(block).0, key(block + 1).0, 1);
                        model.remove(&block);
                        assert!(!dram.contains(key(block)));
                    }
                    4 if random.u8(..50) == 0 => {
                        let end = random.u64(block..=2 * frames as u64 + 2);
                        dram.invalidate(key(block).0, key(end).0, random.usize(..=frames));
                        model.retain(|found, _| !(block..end).contains(found));
                    }
                    5 => dram.forget_some(random.usize(..20)),
                    _ => {
                        if let Some(found) = dram.lookup(key(block)) {
                            assert!(found.iter().all(|byte| Some(byte) == model.get(&block)));
                            hits += 1;
                            held.push((found, model[&block]));
                        }
                    }
                }
                if held.len() > frames / 2 {
                    let (buf, mark) = held.swap_remove(random.usize(..held.len()));
                    assert!(buf.iter().all(|&byte| byte == mark), "held data changed");
                }
                if step % 1000 == 0 {
                    dram.check_invariants();
                }
            }
            assert!(frames < 7 || hits > 500, "{hits} hits with {frames} frames");
        }
    }

    #[test]
    fn dram_keeps_what_is_used_through_a_scan() {
        let mut dram = Dram::new(1000);
        for _ in 0..3 {
            for block in 0..500 {
                if dram.lookup(key(block)).is_none() {
                    dram.insert(key(block), &[1; BLOCK_BYTES]);
                }
            }
        }
        (10_000..20_000).for_each(|block| dram.insert(key(block), &[2; BLOCK_BYTES]));
        let kept = (0..500).filter(|&block| dram.contains(key(block))).count();
        assert!(kept >= 450, "{kept} of 500 used blocks survived the scan");
    }

    #[test]
    fn dram_keeps_a_part_of_a_loop_that_does_not_fit() {
        let mut dram = Dram::new(1000);
        let mut hits = 0;
        for step in 0..30_000 {
            match dram.lookup(key(step % 1200)) {
                Some(_) => hits += 1,
                None => dram.insert(key(step % 1200), &[1; BLOCK_BYTES]),
            }
        }
        dram.check_invariants();
        assert!(hits > 20_000, "{hits} of 30,000, where LRU has none");
    }

    #[test]
    fn dram_gives_the_small_ring_what_the_reads_need() {
        let mut dram = Dram::new(1000);
        let read = |dram: &mut Dram, block: u64| {
            if dram.lookup(key(block)).is_none() {
                dram.insert(key(block), &[1; BLOCK_BYTES]);
            }
        };
        // What is read comes back once, after 300 others, and never again.
        for step in 300..20_000 {
            read(&mut dram, step);
            read(&mut dram, step - 300);
        }
        dram.check_invariants();
        let long = dram.small;
        assert!(long > 300, "{long} frames are for what is new");
        // A steady set that is larger than what is left needs them back.
        let mut random = fastrand::Rng::with_seed(5);
        for step in 100_000..200_000 {
            read(&mut dram, random.u64(..1100));
            read(&mut dram, random.u64(..1100));
            read(&mut dram, step);
        }
        dram.check_invariants();
        assert!(dram.small < long / 2, "{} of {long} frames", dram.small);
    }

    #[test]
    fn dram_holds_on_to_what_is_worth_more() {
        for (dear, kept) in [(None, 0..50), (Some(400), 300..500)] {
            let mut dram = Dram::new(1000);
            dram.worths.set(3, Some(300));
            dram.worths.set(4, dear);
            let mut random = fastrand::Rng::with_seed(7);
            for step in 0..20_000 {
                if step < 500 {
                    dram.insert(BlockKey::new(4, step), &[1; BLOCK_BYTES]);
                }
                // The cheap set is twice the tier.
                let cheap = key(random.u64(..2000));
                if dram.lookup(cheap).is_none() {
                    dram.insert(cheap, &[2; BLOCK_BYTES]);
                }
            }
            dram.check_invariants();
            let found = (0..500).filter(|&block| dram.contains(BlockKey::new(4, block)));
            let found = found.count();
            assert!(kept.contains(&found), "{dear:?}: {found} of 500");
        }
    }

    #[test]
    fn dram_uses_every_frame_before_it_drops_one() {
        let mut dram = Dram::new(1000);
        (0..900).for_each(|block| dram.insert(key(block), &[1; BLOCK_BYTES]));
        assert_eq!((dram.used(), dram.evicted()), (900, 0));
        (900..1000).for_each(|block| dram.insert(key(block), &[1; BLOCK_BYTES]));
        assert_eq!((dram.used(), dram.evicted()), (1000, 0));
    }

    #[test]
    fn dram_never_matches_a_key_beyond_the_largest_volume() {
        let mut dram = Dram::new(10);
        dram.insert(key(5), &[1; BLOCK_BYTES]);
        let beyond = BlockKey(key(5).0 | COUNT_ONE);
        assert!(dram.lookup(beyond).is_none());
        dram.insert(beyond, &[2; BLOCK_BYTES]);
        assert_eq!(dram.lookup(key(5)).unwrap()[0], 1);
        assert_eq!(dram.used(), 1);
    }

    #[test]
    fn dram_index_is_within_16_bytes_per_frame() {
        let frames = 1 << 16;
        let bytes = Dram::new(frames).index_bytes();
        assert!(bytes <= 16 * frames, "{bytes} bytes for {frames} frames");
    }
}
