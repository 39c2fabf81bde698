//! Aligned memory with a hard cap: the only place in `core` with unsafe code.
//!
//! An [`Arena`] is one allocation of 4 KiB blocks with a reference count per block. Memory leaves
//! it as a [`BufMut`] (one owner, writable: what a device reads into) and becomes a [`Buf`]
//! (shared, read-only: what is sent, logged and cached without a copy).
//!
//! Invariants:
//! 1. A block with count 0 is reachable through the arena alone.
//! 2. A `BufMut` is the sole handle of its run of blocks: every count in the run is `EXCLUSIVE`.
//! 3. `Buf`s of one run share the count of the run's first block; the others stay `EXCLUSIVE` until
//!    it reaches 0, so no run overlaps another and no part of one can be shared on its own.
//! 4. Blocks are zeroed when the arena is made and hold whatever was last written thereafter.
//! 5. Any number of handles may share a run: what a count of 16 bits cannot say is in `surplus`.
//!    Clients decide how many handles there are, so a count must never run out.
//!
//! 6. A count leaves `SATURATED` and 0 leaves a run's blocks only as below, so that handles may be cloned and dropped by
//!    any thread: a count falls from `SATURATED` under the lock of `surplus` alone, and a run is named in `freed` after
//!    all of its counts are 0.
//!
//! A shard owns its memory; buffers that it lends to the cache's shared tier, or that travel with a connection, come back
//! from other threads. No I/O, no growth.
#![allow(unsafe_code)]

use alloc::alloc::{alloc_zeroed, dealloc, handle_alloc_error};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::alloc::Layout;
use core::fmt;
use core::ops::{Deref, DerefMut, Range};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::base::io::SectorRange;
use crate::base::limits::{BLOCK_BYTES, REQUEST_BLOCKS_MAX};

/// The count of a block that is being written, or that belongs to the block before it.
const EXCLUSIVE: u16 = u16::MAX;
/// The largest count of a block itself: from here on, further handles are counted in the surplus.
/// Two bytes suffice for every block but a few, and the index of the DRAM tier is bounded.
const SATURATED: u16 = EXCLUSIVE - 1;

/// A fixed array of 4 KiB blocks, aligned to 4 KiB, with a reference count each.
pub struct Arena {
    allocation: NonNull<u8>,
    /// The first block.
    base: NonNull<u8>,
    references: Box<[AtomicU16]>,
    /// Handles beyond [`SATURATED`], by block. Blocks without any are not in it.
    surplus: Mutex<BTreeMap<u32, u64>>,
    /// Runs given back since the pool last looked; unused by an arena without a pool.
    freed: Option<Mutex<Vec<Run>>>,
    /// Blocks in them.
    freed_blocks: AtomicUsize,
}

// SAFETY: the allocation is reached through handles alone. Of a `BufMut` there is one for its blocks (invariant 2), and
// what `Buf`s share nobody writes; counts say which, and are atomic.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

#[derive(Clone, Copy)]
struct Run {
    block: u32,
    blocks: u32,
}

impl Arena {
    /// An arena of `blocks` zeroed blocks. The operating system provides pages as they are used.
    pub fn new(blocks: usize) -> Arc<Self> {
        Arc::new(Self::with(blocks, false))
    }

    fn with(blocks: usize, pooled: bool) -> Self {
        assert!(blocks > 0 && u32::try_from(blocks).is_ok(), "arena size");
        let layout = Self::layout(blocks);
        // SAFETY: the layout's size is not zero.
        let allocation = unsafe { alloc_zeroed(layout) };
        let allocation = NonNull::new(allocation).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: the allocation is one block larger than what is used of it.
        let base = unsafe { allocation.add(allocation.as_ptr().align_offset(BLOCK_BYTES)) };
        Self {
            allocation,
            base,
            references: (0..blocks).map(|_| AtomicU16::new(0)).collect(),
            surplus: Mutex::default(),
            freed: pooled.then(Mutex::default),
            freed_blocks: AtomicUsize::new(0),
        }
    }

    /// One block more than is used, to align the base by hand: asked for aligned memory, an
    /// allocator may write its zeroes itself instead of taking untouched pages from the system.
    fn layout(blocks: usize) -> Layout {
        Layout::from_size_align((blocks + 1) * BLOCK_BYTES, 16).expect("arena layout")
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.references.len()
    }

    /// Where the blocks lie, and how many bytes they are.
    pub fn memory(&self) -> (NonNull<u8>, usize) {
        (self.base, self.blocks() * BLOCK_BYTES)
    }

    /// Bytes of bookkeeping beside the blocks themselves.
    pub fn overhead_bytes(&self) -> usize {
        core::mem::size_of_val(&*self.references)
    }

    /// Whether nobody holds `block`.
    pub fn is_free(&self, block: usize) -> bool {
        self.references[block].load(Ordering::Acquire) == 0
    }

    /// The run of `blocks` from `block` as one writable buffer, or `None` if somebody holds part
    /// of it.
    pub fn claim(self: &Arc<Self>, block: usize, blocks: usize) -> Option<BufMut> {
        let run = &self.references[block..block + blocks];
        if blocks == 0 {
            return None;
        }
        for (taken, count) in run.iter().enumerate() {
            let claimed =
                count.compare_exchange(0, EXCLUSIVE, Ordering::Acquire, Ordering::Relaxed);
            if claimed.is_err() {
                for count in &run[..taken] {
                    count.store(0, Ordering::Release);
                }
                return None;
            }
        }
        Some(BufMut {
            handle: Handle {
                arena: Arc::clone(self),
                block: block as u32,
                blocks: blocks as u32,
            },
            start: 0,
            len: (blocks * BLOCK_BYTES) as u32,
        })
    }

    /// The present content of one block, shared; `None` if somebody can write it, or if it is an
    /// inner part of a longer run. This is how the owner of an arena hands
    /// out what it keeps there without holding a handle for each block. Meant for arenas that are
    /// claimed one block at a time: of the first block of a longer run it would keep the rest.
    pub fn share(self: &Arc<Self>, block: usize) -> Option<Buf> {
        self.retain(block as u32).then(|| Buf {
            handle: Handle {
                arena: Arc::clone(self),
                block: block as u32,
                blocks: 1,
            },
            start: 0,
            len: BLOCK_BYTES as u32,
        })
    }

    /// Count one more handle of a block that is free or shared; false if somebody can write it.
    fn retain(&self, block: u32) -> bool {
        let count = &self.references[block as usize];
        let mut seen = count.load(Ordering::Relaxed);
        loop {
            let result = match seen {
                EXCLUSIVE => return false,
                SATURATED => {
                    let mut surplus = self.surplus.lock();
                    seen = count.load(Ordering::Acquire);
                    if seen == SATURATED {
                        *surplus.entry(block).or_default() += 1;
                        return true;
                    }
                    continue;
                }
                _ => count.compare_exchange_weak(
                    seen,
                    seen + 1,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                ),
            };
            match result {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
    }

    /// Count one handle less of a block; whether that was the last one.
    fn release(&self, block: u32) -> bool {
        let count = &self.references[block as usize];
        let mut seen = count.load(Ordering::Relaxed);
        loop {
            let result = match seen {
                EXCLUSIVE => {
                    count.store(0, Ordering::Release);
                    return true;
                }
                SATURATED => {
                    let mut surplus = self.surplus.lock();
                    seen = count.load(Ordering::Acquire);
                    if seen != SATURATED {
                        continue;
                    }
                    match surplus.get_mut(&block) {
                        Some(1) => drop(surplus.remove(&block)),
                        Some(handles) => *handles -= 1,
                        None => count.store(SATURATED - 1, Ordering::Release),
                    }
                    return false;
                }
                // What others have read of it comes before whatever is written to it next.
                _ => {
                    count.compare_exchange_weak(seen, seen - 1, Ordering::AcqRel, Ordering::Relaxed)
                }
            };
            match result {
                Ok(_) => return seen == 1,
                Err(now) => seen = now,
            }
        }
    }

    fn address(&self, block: u32) -> *mut u8 {
        // SAFETY: handles are only made for blocks within the allocation.
        unsafe { self.base.as_ptr().add(block as usize * BLOCK_BYTES) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: same pointer and layout as in `with`; every handle holds an `Arc` to the arena.
        unsafe {
            dealloc(
                self.allocation.as_ptr(),
                Self::layout(self.references.len()),
            );
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} blocks)", self.blocks())
    }
}

/// One counted reference to a run of blocks.
struct Handle {
    arena: Arc<Arena>,
    block: u32,
    blocks: u32,
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        let is_shared = self.arena.retain(self.block);
        debug_assert!(is_shared, "what can be written has one handle");
        Self {
            arena: Arc::clone(&self.arena),
            ..*self
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.arena.release(self.block) {
            return;
        }
        // The first block may have another owner already.
        let start = self.block as usize;
        for count in &self.arena.references[start + 1..start + self.blocks as usize] {
            count.store(0, Ordering::Release);
        }
        if let Some(freed) = &self.arena.freed {
            let mut freed = freed.lock();
            freed.push(Run {
                block: self.block,
                blocks: self.blocks,
            });
            let blocks = self.blocks as usize;
            self.arena.freed_blocks.fetch_add(blocks, Ordering::Relaxed);
        }
    }
}

/// A writable run of memory with one owner.
pub struct BufMut {
    handle: Handle,
    start: u32,
    len: u32,
}

impl BufMut {
    /// Share the bytes; nobody can write them any more.
    pub fn freeze(self) -> Buf {
        let arena = &self.handle.arena;
        arena.references[self.handle.block as usize].store(1, Ordering::Release);
        Buf {
            start: self.start,
            len: self.len,
            handle: self.handle,
        }
    }

    /// Bytes of memory that it has, in view or not.
    pub fn held_bytes(&self) -> usize {
        self.handle.blocks as usize * BLOCK_BYTES
    }

    /// The view of all its memory.
    #[must_use]
    pub fn widen(mut self) -> Self {
        self.start = 0;
        self.len = self.handle.blocks * BLOCK_BYTES as u32;
        self
    }

    /// Narrow the view to `range` of its present bytes.
    #[must_use]
    pub fn narrow(mut self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len as usize,
            "narrow out of range"
        );
        self.start += range.start as u32;
        self.len = (range.end - range.start) as u32;
        self
    }
}

impl Deref for BufMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let address = self.handle.arena.address(self.handle.block);
        // SAFETY: the view lies within the run; the run is initialised and held by this handle.
        unsafe { core::slice::from_raw_parts(address.add(self.start as usize), self.len as usize) }
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        let address = self.handle.arena.address(self.handle.block);
        // SAFETY: as for `deref`, and by invariant 2 nobody else sees the run.
        unsafe {
            core::slice::from_raw_parts_mut(address.add(self.start as usize), self.len as usize)
        }
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} bytes)", self.len)
    }
}

/// A shared, read-only run of memory. Cloning counts a reference and copies nothing.
#[derive(Clone)]
pub struct Buf {
    handle: Handle,
    start: u32,
    len: u32,
}

impl Buf {
    /// The bytes of `range`, shared.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len as usize,
            "slice out of range"
        );
        let len = (range.end - range.start) as u32;
        Self {
            handle: self.handle.clone(),
            start: self.start + range.start as u32,
            len,
        }
    }

    /// The bytes of `range` alone, by the same handle.
    #[must_use]
    pub fn narrow(mut self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len as usize,
            "narrow out of range"
        );
        self.start += range.start as u32;
        self.len = (range.end - range.start) as u32;
        self
    }

    /// The whole blocks that the view touches, shared: what goes to a device. For a buffer from
    /// [`Pool::alloc_for`] the bytes around the payload are zero.
    #[must_use]
    pub fn covering_blocks(&self) -> Self {
        let start = self.start as usize / BLOCK_BYTES * BLOCK_BYTES;
        let end = (self.start as usize + self.len as usize).next_multiple_of(BLOCK_BYTES);
        Self {
            handle: self.handle.clone(),
            start: start as u32,
            len: (end - start) as u32,
        }
    }

    /// Bytes of memory that this buffer keeps alive.
    pub fn held_bytes(&self) -> usize {
        self.handle.blocks as usize * BLOCK_BYTES
    }

    /// The same in blocks; a buffer of a pool has at most [`REQUEST_BLOCKS_MAX`].
    pub fn held_blocks(&self) -> u16 {
        self.handle.blocks as u16
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let address = self.handle.arena.address(self.handle.block);
        // SAFETY: the view lies within the run, which nobody can write while handles are shared.
        unsafe { core::slice::from_raw_parts(address.add(self.start as usize), self.len as usize) }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

/// Power-of-two runs: order `k` has `1 << k` blocks; the largest holds one whole request.
const ORDERS: usize = REQUEST_BLOCKS_MAX.ilog2() as usize + 1;

/// A buddy allocator over an arena: the buffers of requests, spans and segments.
pub struct Pool {
    arena: Arc<Arena>,
    lists: Mutex<Lists>,
    /// One more than the bytes that were free when there was too little, until [`Self::take_relief`]; 0: there was not.
    short_at: AtomicUsize,
}

/// Free runs by order. `free` decides; a stack may name runs that are free no longer.
struct Lists {
    free: [Box<[bool]>; ORDERS],
    stacks: [Vec<u32>; ORDERS],
    free_blocks: usize,
}

impl Pool {
    /// A pool of at least `bytes`, rounded up to whole runs of the largest order.
    pub fn new(bytes: usize) -> Arc<Self> {
        let runs = bytes.div_ceil(REQUEST_BLOCKS_MAX * BLOCK_BYTES).max(1);
        Self::of_runs(runs, ORDERS - 1)
    }

    /// A pool of a single run of so many blocks, a power of two, which is the largest buffer that it has.
    pub fn small(blocks: usize) -> Arc<Self> {
        assert!(blocks.is_power_of_two() && blocks <= REQUEST_BLOCKS_MAX);
        Self::of_runs(1, blocks.ilog2() as usize)
    }

    fn of_runs(runs: usize, order: usize) -> Arc<Self> {
        let blocks = runs << order;
        let mut lists = Lists {
            free: core::array::from_fn(|order| vec![false; blocks >> order].into_boxed_slice()),
            stacks: core::array::from_fn(|_| Vec::new()),
            free_blocks: 0,
        };
        for run in (0..runs).rev() {
            lists.give(run << order, order);
        }
        Arc::new(Self {
            arena: Arc::new(Arena::with(blocks, true)),
            lists: Mutex::new(lists),
            short_at: AtomicUsize::new(0),
        })
    }

    /// A buffer of `bytes` (at most one largest run), block-aligned, with unspecified content; or
    /// `None` while the pool has no such run.
    pub fn alloc(&self, bytes: usize) -> Option<BufMut> {
        let blocks = bytes.div_ceil(BLOCK_BYTES).max(1);
        let order = blocks.next_power_of_two().ilog2() as usize;
        let mut lists = self.lists.lock();
        self.collect(&mut lists);
        let Some(block) = lists.take(order) else {
            let free = lists.free_blocks * BLOCK_BYTES;
            self.short_at.store(free + 1, Ordering::Relaxed);
            return None;
        };
        let claimed = self
            .arena
            .claim(block, 1 << order)
            .expect("a free run has no holder");
        Some(claimed.narrow(0..bytes))
    }

    /// A buffer for the bytes of `range`, placed within its blocks as the range is within the
    /// volume's, with zeroes around it: what [`crate::base::io::Request::Write`] takes.
    pub fn alloc_for(&self, range: SectorRange) -> Option<BufMut> {
        let whole = range.block_count() as usize * BLOCK_BYTES;
        let mut buf = self.alloc(whole)?;
        let start = range.offset_in_block();
        let end = start + range.bytes();
        buf[..start].fill(0);
        buf[end..].fill(0);
        Some(buf.narrow(start..end))
    }

    /// Bytes that are free now. Two counts: what was given back is put in its place when memory is
    /// next taken.
    pub fn free_bytes(&self) -> usize {
        let freed = self.arena.freed_blocks.load(Ordering::Relaxed);
        (self.lists.lock().free_blocks + freed) * BLOCK_BYTES
    }

    /// Where its memory lies, and how much it is. Buffers are taken from its beginning as long as there are any.
    pub fn memory(&self) -> (NonNull<u8>, usize) {
        self.arena.memory()
    }

    /// Whether more is free than when there was too little for somebody, once. For whoever has given memory back on another
    /// thread than that which waits for it; costs one load as long as nobody has found too little.
    pub fn take_relief(&self) -> bool {
        let short_at = self.short_at.load(Ordering::Relaxed);
        let order = Ordering::Relaxed;
        short_at != 0
            && self.free_bytes() >= short_at
            && (self.short_at.compare_exchange(short_at, 0, order, order)).is_ok()
    }

    /// Bytes in all.
    pub fn total_bytes(&self) -> usize {
        self.arena.blocks() * BLOCK_BYTES
    }

    fn collect(&self, lists: &mut Lists) {
        let arena = &self.arena;
        if arena.freed_blocks.load(Ordering::Relaxed) == 0 {
            return;
        }
        let freed = arena.freed.as_ref().expect("a pool's arena collects");
        let mut freed = freed.lock();
        arena.freed_blocks.store(0, Ordering::Relaxed);
        for run in freed.drain(..) {
            lists.give(run.block as usize, run.blocks.ilog2() as usize);
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Pool({} of {} bytes free)",
            self.free_bytes(),
            self.total_bytes()
        )
    }
}

impl Lists {
    /// Take a run of `order`, splitting a larger one if need be.
    fn take(&mut self, order: usize) -> Option<usize> {
        let (found, index) = (order..ORDERS).find_map(|k| Some((k, self.pop(k)?)))?;
        let block = index << found;
        for k in (order..found).rev() {
            self.push((block >> k) + 1, k);
        }
        self.free_blocks -= 1 << order;
        Some(block)
    }

    /// Give a run back, merging it with its buddy as far as that is free.
    fn give(&mut self, block: usize, order: usize) {
        self.free_blocks += 1 << order;
        let (mut index, mut k) = (block >> order, order);
        while k + 1 < ORDERS && self.free[k].get(index ^ 1) == Some(&true) {
            self.free[k][index ^ 1] = false;
            index >>= 1;
            k += 1;
        }
        self.push(index, k);
    }

    fn push(&mut self, index: usize, order: usize) {
        self.free[order][index] = true;
        if self.stacks[order].len() >= 2 * self.free[order].len() {
            self.rebuild(order);
        } else {
            self.stacks[order].push(index as u32);
        }
    }

    fn pop(&mut self, order: usize) -> Option<usize> {
        while let Some(index) = self.stacks[order].pop() {
            if core::mem::take(&mut self.free[order][index as usize]) {
                return Some(index as usize);
            }
        }
        None
    }

    /// Drop the stale names, which bounds a stack at twice its runs.
    fn rebuild(&mut self, order: usize) {
        let free = &self.free[order];
        self.stacks[order].clear();
        self.stacks[order].extend((0..free.len() as u32).filter(|&index| free[index as usize]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_that_is_small_is_whole_again_when_all_is_given_back() {
        let pool = Pool::small(8);
        assert_eq!(
            (pool.total_bytes(), pool.free_bytes()),
            (8 * 4096, 8 * 4096)
        );
        assert!(pool.alloc(9 * 4096).is_none());
        let all: Vec<_> = (0..8).map(|_| pool.alloc(1).unwrap()).collect();
        assert!(pool.alloc(1).is_none());
        drop(all);
        assert!(pool.alloc(8 * 4096).is_some());
    }

    #[test]
    fn arena_claim_is_exclusive_until_every_share_is_gone() {
        let arena = Arena::new(4);
        let mut held = arena.claim(1, 2).unwrap();
        held.fill(7);
        assert!(arena.claim(0, 2).is_none() && arena.claim(2, 1).is_none());
        let shared = held.freeze();
        let part = shared.slice(4096..4100);
        drop(shared);
        assert!(arena.claim(1, 1).is_none() && !arena.is_free(2));
        assert_eq!(&*part, &[7; 4]);
        drop(part);
        assert!(arena.claim(0, 4).is_some());
    }

    #[test]
    fn arena_share_needs_no_writer_and_holds_the_block() {
        let arena = Arena::new(2);
        let mut held = arena.claim(0, 1).unwrap();
        assert!(arena.share(0).is_none(), "a writer has it");
        held.fill(3);
        drop(held);
        assert!(
            arena.is_free(0),
            "the owner keeps the content without a handle"
        );
        let (one, two) = (arena.share(0).unwrap(), arena.share(0).unwrap());
        assert!(one.iter().chain(&two[..]).all(|&byte| byte == 3));
        assert!(arena.claim(0, 1).is_none(), "readers have it");
        drop(one);
        assert!(!arena.is_free(0));
        drop(two);
        let run = arena.claim(0, 2).unwrap().freeze();
        assert!(arena.share(1).is_none(), "an inner block goes with its run");
        drop(run);
        assert!(arena.share(1).is_some());
    }

    #[test]
    fn arena_counts_more_handles_than_16_bits_can_say() {
        let arena = Arena::new(2);
        arena.claim(0, 1).unwrap().fill(5);
        let mut held: Vec<Buf> = (0..70_000)
            .map(|_| arena.share(0).expect("a block may be shared without end"))
            .collect();
        let copies: Vec<Buf> = held
            .iter()
            .take(70_000)
            .map(|one| one.slice(8..16))
            .collect();
        held.extend(copies);
        let mut random = fastrand::Rng::with_seed(1);
        while held.len() > 1 {
            let one = held.swap_remove(random.usize(..held.len()));
            assert_eq!(one[0], 5);
            drop(one);
            assert!(!arena.is_free(0), "somebody holds it");
        }
        assert!(arena.surplus.lock().is_empty());
        drop(held);
        assert!(arena.claim(0, 2).is_some());
    }

    #[test]
    fn buffers_of_a_pool_are_shared_and_given_back_by_any_thread() {
        extern crate std;
        let pool = Pool::new(1 << 20);
        let arena = Arena::new(1);
        arena.claim(0, 1).unwrap().fill(9);
        std::thread::scope(|scope| {
            for mark in 1..=4u8 {
                let (pool, arena) = (Arc::clone(&pool), Arc::clone(&arena));
                scope.spawn(move || {
                    let (send, receive) = std::sync::mpsc::channel::<Buf>();
                    let reader = std::thread::spawn(move || {
                        for buf in receive {
                            let copy = buf.clone();
                            drop(buf);
                            assert!(copy.iter().all(|&byte| byte == mark));
                        }
                    });
                    // Together they pass what 16 bits can say.
                    let held: Vec<Buf> = (0..30_000).map(|_| arena.share(0).unwrap()).collect();
                    for round in 0..5_000usize {
                        if let Some(mut buf) = pool.alloc(1 + round % 20_000) {
                            buf.fill(mark);
                            let buf = buf.freeze();
                            send.send(buf.slice(0..1)).unwrap();
                            send.send(buf).unwrap();
                        }
                    }
                    drop(send);
                    reader.join().unwrap();
                    assert!(held.iter().all(|buf| buf[0] == 9));
                });
            }
        });
        assert_eq!(pool.free_bytes(), pool.total_bytes());
        assert!(pool.alloc(1 << 20).is_some(), "all runs were merged");
        assert!(arena.surplus.lock().is_empty() && arena.is_free(0));
    }

    #[test]
    fn pool_says_once_that_there_is_more_than_when_there_was_too_little() {
        extern crate std;
        let pool = Pool::small(4);
        let held = pool.alloc(3 * BLOCK_BYTES).unwrap();
        assert!(!pool.take_relief(), "nobody has found too little");
        assert!(pool.alloc(BLOCK_BYTES).is_none());
        assert!(!pool.take_relief(), "nothing was given back");
        std::thread::scope(|scope| scope.spawn(|| drop(held)).join().unwrap());
        assert!(pool.take_relief() && !pool.take_relief());
        assert!(pool.alloc(BLOCK_BYTES).is_some());
    }

    #[test]
    fn pool_splits_merges_and_never_overlaps() {
        let pool = Pool::new(2 << 20);
        let mut random = fastrand::Rng::with_seed(1);
        let mut held: Vec<(BufMut, u8)> = Vec::new();
        for step in 0..20_000u32 {
            if random.bool() {
                let bytes = 1usize << random.u32(0..=20);
                if let Some(mut buf) = pool.alloc(bytes) {
                    buf.fill(step as u8);
                    held.push((buf, step as u8));
                }
            } else if !held.is_empty() {
                let (buf, mark) = held.swap_remove(random.usize(..held.len()));
                assert!(buf.iter().all(|&byte| byte == mark));
            }
        }
        drop(held);
        assert_eq!(pool.free_bytes(), pool.total_bytes());
        let whole: Vec<_> = core::iter::from_fn(|| pool.alloc(1 << 20)).collect();
        assert_eq!(whole.len(), 2);
        assert!(pool.alloc(1).is_none());
    }

    #[test]
    fn pool_alloc_for_mirrors_the_place_in_the_block() {
        let pool = Pool::new(1 << 20);
        pool.alloc(1 << 20).unwrap().fill(0xff);
        let mut buf = pool.alloc_for(SectorRange::new(9, 8)).unwrap();
        buf.fill(1);
        let whole = buf.freeze().covering_blocks();
        assert_eq!(whole.len(), 2 * BLOCK_BYTES);
        assert!(
            whole[..512]
                .iter()
                .chain(&whole[512 + 4096..])
                .all(|&byte| byte == 0)
        );
        assert!(whole[512..512 + 4096].iter().all(|&byte| byte == 1));
    }
}
