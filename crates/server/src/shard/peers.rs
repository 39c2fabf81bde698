//! What shards of one node know of each other: how to send each other commands, and who has come to its end.
//!
//! Invariants:
//! 1. A shard ends once, cleanly or not, and stays ended.
//! 2. Whenever a shard ends, the keeper of the cache is woken, which may wait for that.
//! 3. A shard that waits for memory is woken when another one has given some back that it had taken there.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use hdcs_core::base::buf::Pool;
use hdcs_core::cache::ReadCache;
use hdcs_core::node::common_window::CommonWindow;
use hdcs_core::node::stop::Others;

use super::ShardHandle;
use super::directory::Directory;

/// The shard that closes the cache.
const KEEPER: usize = 0;

const RUNS: u8 = 0;
const CLOSED: u8 = 1;
const GAVE_UP: u8 = 2;

/// All shards of a node.
#[derive(Debug)]
pub struct Peers {
    /// Known once all of them have been started.
    handles: OnceLock<Vec<ShardHandle>>,
    directory: Arc<Directory>,
    ends: Vec<AtomicU8>,
    /// Whether a shard has to look at the cache's SSD tier again.
    cache_changed: Vec<AtomicBool>,
    /// Whether the keeper of the tier has something to do for it, as it was last seen.
    needs_keeper: AtomicU8,
    /// The buffers of each shard, once it has them.
    pools: Vec<OnceLock<Arc<Pool>>>,
    /// What their schedulers know of each other.
    window: Arc<CommonWindow>,
}

impl Peers {
    /// Of so many shards, one at least, which are to be started.
    pub fn of(count: usize) -> Self {
        Self {
            handles: OnceLock::new(),
            directory: Arc::default(),
            ends: (0..count.max(1)).map(|_| AtomicU8::new(RUNS)).collect(),
            cache_changed: (0..count.max(1)).map(|_| AtomicBool::new(false)).collect(),
            needs_keeper: AtomicU8::new(0),
            pools: (0..count.max(1)).map(|_| OnceLock::new()).collect(),
            window: CommonWindow::of(count.max(1)),
        }
    }

    /// A shard has these buffers. Others may hold some of them: what the SSD tier holds is the keeper's, whoever's turn
    /// gives it back.
    pub(super) fn note_pool(&self, number: usize, pool: &Arc<Pool>) {
        let first = self.pools[number].set(Arc::clone(pool)).is_ok();
        assert!(first, "a shard has one pool");
    }

    /// The volumes of all of them.
    pub(super) fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// What lets requests go on all of them.
    pub(super) fn window(&self) -> &Arc<CommonWindow> {
        &self.window
    }

    /// How many shards there are.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// All have been started.
    pub(super) fn introduce(&self, handles: Vec<ShardHandle>) {
        let first = self.handles.set(handles).is_ok();
        assert!(first, "shards are started once");
    }

    /// How to reach a shard; `None` while shards are being started.
    pub fn get(&self, number: usize) -> Option<&ShardHandle> {
        self.handles.get()?.get(number)
    }

    /// Tell these shards, a bit each, that what they wait for may have happened to the SSD tier.
    pub(super) fn tell_cache_changed(&self, shards: u64) {
        for (number, changed) in self.cache_changed.iter().enumerate() {
            if shards >> number & 1 == 1 {
                changed.store(true, Ordering::SeqCst);
                if let Some(shard) = self.get(number) {
                    shard.waker.wake();
                }
            }
        }
    }

    /// At the end of a shard's turn: give the SSD tier back, tell the shards that wait for what was done to it, and its
    /// keeper if that has to do something.
    pub(super) fn pass_on(&self, number: usize, cache: &ReadCache) {
        cache.release();
        let waiting = cache.take_waiting();
        if waiting != 0 {
            self.tell_cache_changed(waiting);
        }
        let needs_keeper = u8::from(cache.must_reset()) | u8::from(cache.can_readmit()) << 1;
        self.tell_of_memory(number);
        // Whoever sees it first says so, the keeper as well, which may have looked before.
        if self.needs_keeper.load(Ordering::Relaxed) != needs_keeper
            && self.needs_keeper.swap(needs_keeper, Ordering::SeqCst) != needs_keeper
            && needs_keeper != 0
        {
            self.tell_cache_changed(1 << KEEPER);
        }
    }

    /// Wake the other shards that have found too little memory if some was given back since: what waits for it there is
    /// looked at in each turn, and else there might be none.
    fn tell_of_memory(&self, number: usize) {
        let pools = self.pools.iter().enumerate();
        let others = pools.filter(|&(other, _)| other != number);
        let relieved = others.filter(|(_, pool)| pool.get().is_some_and(|pool| pool.take_relief()));
        let shards = relieved.fold(0, |shards, (other, _)| shards | 1 << other);
        if shards != 0 {
            self.tell_cache_changed(shards);
        }
    }

    /// Whether a shard was told that, once.
    pub(super) fn take_cache_changed(&self, number: usize) -> bool {
        self.cache_changed[number].swap(false, Ordering::SeqCst)
    }

    /// A shard has ended: with everything closed, or having given up volumes. What it said first counts.
    pub(super) fn note_end(&self, number: usize, all_closed: bool) {
        let end = if all_closed { CLOSED } else { GAVE_UP };
        let order = Ordering::SeqCst;
        let _ = self.ends[number].compare_exchange(RUNS, end, order, order);
        if let Some(keeper) = self.get(KEEPER)
            && number != KEEPER
        {
            keeper.waker.wake();
        }
    }

    /// What a shard that stops has to wait for before it closes its cache: the keeper for all others, these for nobody.
    pub(super) fn others(&self, number: usize) -> Others {
        if number != KEEPER {
            return Others::Closed;
        }
        let ends = self.ends.iter().enumerate();
        let ends = ends.filter(|&(other, _)| other != number);
        let ends: Vec<u8> = ends.map(|(_, end)| end.load(Ordering::SeqCst)).collect();
        if ends.contains(&RUNS) {
            Others::Open
        } else if ends.contains(&GAVE_UP) {
            Others::Hung
        } else {
            Others::Closed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeper_waits_for_all_others_and_they_for_nobody() {
        let peers = Peers::of(3);
        assert_eq!(peers.others(0), Others::Open);
        assert_eq!(peers.others(1), Others::Closed);
        peers.note_end(1, true);
        assert_eq!(peers.others(0), Others::Open);
        peers.note_end(2, true);
        assert_eq!(peers.others(0), Others::Closed);
        peers.note_end(2, false);
        assert_eq!(peers.others(0), Others::Closed, "the first end counts");
        assert_eq!(Peers::of(1).others(0), Others::Closed);
    }

    #[test]
    fn shard_is_told_once_that_the_tier_has_changed() {
        let peers = Peers::of(3);
        peers.tell_cache_changed(0b101);
        assert!(peers.take_cache_changed(0) && !peers.take_cache_changed(0));
        assert!(!peers.take_cache_changed(1));
        assert!(peers.take_cache_changed(2));
    }

    #[test]
    fn shard_is_told_once_of_memory_that_another_one_gives_back() {
        let peers = Peers::of(2);
        let pool = Pool::small(1);
        peers.note_pool(0, &pool);
        let held = pool.alloc(1).unwrap();
        peers.tell_of_memory(1);
        assert!(!peers.take_cache_changed(0), "nobody waits");
        assert!(pool.alloc(1).is_none());
        peers.tell_of_memory(1);
        assert!(!peers.take_cache_changed(0), "there is still none");
        drop(held);
        peers.tell_of_memory(0);
        assert!(!peers.take_cache_changed(0), "it looks at it itself");
        peers.tell_of_memory(1);
        assert!(peers.take_cache_changed(0));
        peers.tell_of_memory(1);
        assert!(!peers.take_cache_changed(0));
    }

    #[test]
    fn keeper_learns_of_a_shard_that_gave_up() {
        let peers = Peers::of(3);
        peers.note_end(1, false);
        assert_eq!(peers.others(0), Others::Open, "another still runs");
        peers.note_end(2, true);
        assert_eq!(peers.others(0), Others::Hung);
    }
}
