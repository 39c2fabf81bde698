//! The shards of a node: each has some of the volumes, a DRAM tier of its own over the SSD tier of all, and turns of its own.
//!
//! A shard has a turn when something of it has happened, its time has come, or another one has told it that what its
//! volumes wait for has changed. Until then nothing of it is polled: what it is not told of, it does not see.

use std::collections::BTreeMap;

use fastrand::Rng;
use hdcs_core::base::io::Nanos;
use hdcs_core::cache::ReadCache;
use hdcs_core::volume::{Phase, Volume, sharing};

use super::{Happening, Node, World};
use crate::plant::Plant;
use crate::scenario::Stream;
use crate::violation::Violation;

/// How long a message to another shard takes at most.
const MESSAGE_TIME_MAX: Nanos = Nanos::from_micros(300);

/// See the module.
#[derive(Debug)]
pub(super) struct Shards {
    caches: Vec<ReadCache>,
    /// The shard of each volume.
    of_units: Vec<usize>,
    /// The shard that each closed volume was on.
    of_closed: Vec<usize>,
    /// A bit for each shard that has a turn now.
    awake: u64,
    /// Since when volumes could go on that wait for the tier.
    untold: BTreeMap<usize, Nanos>,
    random: Rng,
}

impl Shards {
    /// So many shards over the SSD tier of this cache, which the first one keeps.
    pub fn new(cache: ReadCache, count: usize, dram_blocks: usize, seed: u64) -> Self {
        cache.release();
        let tier = cache.tier();
        let mut caches = vec![cache];
        for (number, tier) in (1..count as u32).zip(std::iter::repeat(&tier)) {
            let Some(tier) = tier else { break };
            caches.push(ReadCache::sharing(dram_blocks, tier, number));
        }
        Self {
            caches,
            of_units: Vec::new(),
            of_closed: Vec::new(),
            awake: u64::MAX,
            untold: BTreeMap::new(),
            random: Rng::with_seed(Stream::Shards.seed(seed)),
        }
    }

    /// The caches of all, one after the other.
    pub fn each(&mut self) -> impl Iterator<Item = &mut ReadCache> {
        self.caches.iter_mut()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.caches.len()
    }

    /// Which has this volume.
    pub fn of(&self, unit: usize) -> usize {
        self.of_units.get(unit).copied().unwrap_or(0)
    }

    /// Put a volume that opens on one of them; whether it has left another one.
    pub fn place(&mut self, unit: usize, number: u32, forgets: bool) {
        let to = self.random.usize(..self.caches.len());
        if unit >= self.of_units.len() {
            self.of_units.resize(unit + 1, to);
        }
        let from = std::mem::replace(&mut self.of_units[unit], to);
        if from != to && forgets {
            self.cache(from).forget_in_dram(number);
        }
    }

    /// Another volume has taken the place of one that was closed on this shard.
    pub fn closed_on(&mut self, shard: usize) {
        self.of_closed.push(shard);
    }

    /// Where a volume was that is closed.
    pub fn of_closed(&self, closed: usize) -> usize {
        self.of_closed[closed]
    }

    /// The cache of a shard. It alone has the lock of the tier from now on.
    pub fn cache(&mut self, shard: usize) -> &mut ReadCache {
        self.release_others(shard);
        &mut self.caches[shard]
    }

    /// The same, to look at.
    pub fn look(&self, shard: usize) -> &ReadCache {
        self.release_others(shard);
        &self.caches[shard]
    }

    fn release_others(&self, shard: usize) {
        for (other, cache) in self.caches.iter().enumerate() {
            if other != shard {
                cache.release();
            }
        }
    }

    /// A shard has a turn.
    pub fn wake(&mut self, shard: usize) {
        self.awake |= 1 << shard;
    }

    fn take_awake(&mut self) -> u64 {
        std::mem::take(&mut self.awake)
    }
}

impl Node {
    /// The cache of the shard that keeps the SSD tier.
    pub(super) fn cache(&self) -> &ReadCache {
        self.shards.look(0)
    }

    /// The same, to change it.
    pub(super) fn cache_mut(&mut self) -> &mut ReadCache {
        self.shards.wake(0);
        self.shards.cache(0)
    }

    /// The cache of a volume.
    pub(super) fn cache_of(&mut self, unit: usize) -> &mut ReadCache {
        let shard = self.shards.of(unit);
        self.shards.wake(shard);
        self.shards.cache(shard)
    }

    /// The same, to look at.
    pub(super) fn look_at_cache_of(&self, unit: usize) -> &ReadCache {
        self.shards.look(self.shards.of(unit))
    }

    /// When the first of the caches is to be polled.
    pub(super) fn caches_wakeup(&self) -> Option<Nanos> {
        let shards = 0..self.shards.count();
        shards
            .filter_map(|shard| self.shards.look(shard).next_wakeup())
            .min()
    }

    fn is_due(&self, shard: usize, now: Nanos) -> bool {
        let volumes = self.volumes.iter().enumerate();
        let mut theirs = volumes.filter(|(unit, _)| self.shards.of(*unit) == shard);
        let cache = self.shards.look(shard).next_wakeup();
        cache.is_some_and(|due| due <= now)
            || theirs.any(|(_, volume)| volume.next_wakeup().is_some_and(|due| due <= now))
    }
}

impl World {
    /// The shards that have a turn now.
    pub(super) fn turning(&mut self) -> Vec<usize> {
        let now = self.engine.now();
        let Some(node) = &mut self.node else {
            return Vec::new();
        };
        let awake = node.shards.take_awake();
        let count = node.shards.count();
        let is_turning =
            |&shard: &usize| count == 1 || awake >> shard & 1 == 1 || node.is_due(shard, now);
        (0..count).filter(is_turning).collect()
    }

    /// At the end of a shard's turn: its volumes wait for the tier, if they do.
    pub(super) fn wait_for_tier(&mut self, shard: usize, changes: u64) {
        let Some(node) = &mut self.node else { return };
        let of = |unit| node.shards.of(unit);
        let mut theirs = (node.volumes.iter().enumerate()).filter(|(unit, _)| of(*unit) == shard);
        if node.shards.count() == 1 || !theirs.any(|(_, volume)| follows(volume)) {
            return;
        }
        let cache = node.shards.look(shard);
        cache.wait_for_changes();
        if cache.changes() != changes {
            node.shards.wake(shard);
        }
    }

    /// Whoever waits for the tier is told in time that it does not have to any more.
    pub(super) fn check_told(&mut self) -> Result<(), Violation> {
        let now = self.engine.now();
        let Some(node) = &mut self.node else {
            return Ok(());
        };
        for (unit, volume) in node.volumes.iter().enumerate() {
            let persisted = node.shards.look(node.shards.of(unit)).persisted();
            let waits = volume.phase() == Phase::Open
                && sharing::awaited(volume).is_some_and(|barrier| barrier <= persisted);
            if !waits {
                node.shards.untold.remove(&unit);
                continue;
            }
            let since = *node.shards.untold.entry(unit).or_insert(now);
            if now.since(since) > MESSAGE_TIME_MAX {
                let why = format!(
                    "volume {unit} waits for what was durable at {} us",
                    since.0 / 1000
                );
                return Err(Violation::new("untold", why));
            }
        }
        Ok(())
    }

    /// Tell the shards that wait for what this one has changed. A message takes its time.
    pub(super) fn tell_shards(&mut self) {
        let Some(node) = &mut self.node else {
            return;
        };
        if node.shards.count() == 1 {
            return;
        }
        let mut waiting = 0;
        for cache in &node.shards.caches {
            cache.release();
            waiting |= cache.take_waiting();
        }
        for shard in (0..node.shards.count()).filter(|shard| waiting >> shard & 1 == 1) {
            let time = Nanos(node.shards.random.u64(1..=MESSAGE_TIME_MAX.0));
            if self.planted.strikes(Plant::UntoldShard) {
                continue;
            }
            self.coverage.messages += 1;
            self.engine.after(time, Happening::TierChanged(shard));
        }
        // What was woken in this turn has the next one.
        if node.shards.awake != 0 {
            self.engine.after(Nanos(0), Happening::Tick);
        }
    }
}

fn follows(volume: &Volume) -> bool {
    sharing::follows_cache(volume)
}
