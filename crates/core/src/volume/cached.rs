//! The volume as the read cache knows it: under which keys its blocks lie there, how hot they are, and what of them
//! is there.
//!
//! A block that is inherited (see [`Inherited`]) lies under the number of the origin, or under the volume's own; every
//! other one under the volume's own alone.

use super::read::Fill;
use super::{Context, Inherited};
use crate::base::buf::Buf;
use crate::base::codec::Method;
use crate::base::io::{BlockKey, Nanos, SectorRange};
use crate::base::limits::BLOCK_BYTES;
use crate::cache::heat_map::Gathering;
use crate::cache::{Lookup, ReadCache, SsdTaken, Tier, VolumeBenefit};

/// Places of the cache that one step looks at: some 10 microseconds, or some 100 where all are aliases.
const STEP_PLACES: usize = 4096;
/// Pieces of a heat map that are looked for to see whether the cache still has it.
const SAMPLES: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct CachedBlocks {
    /// Number of the volume in the cache.
    number: u32,
    /// Size of the volume.
    bytes: u64,
    inherited: Option<Inherited>,
}

impl CachedBlocks {
    /// Until the next step of a gathering may be taken: a walk takes a small share of the time.
    pub const GATHER_PAUSE: Nanos = Nanos::from_millis(1);

    pub(super) fn new(number: u32, bytes: u64) -> Self {
        Self {
            number,
            bytes,
            inherited: None,
        }
    }

    /// The volume has this size from now on.
    pub(super) fn resize(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    /// Whole blocks of the volume; a last partial block is not cached.
    #[inline]
    pub(super) fn whole_blocks(&self) -> u64 {
        self.bytes / BLOCK_BYTES as u64
    }

    /// The numbers that its blocks lie under: its own and the origin's, which may be the same.
    pub(super) fn numbers(&self) -> [u32; 2] {
        [self.number, self.origin().unwrap_or(self.number)]
    }

    /// This is what the volume has inherited.
    pub(super) fn inherit(&mut self, inherited: Inherited) {
        self.inherited = Some(inherited);
    }

    /// What is still inherited, if the volume has an origin.
    pub(super) fn inherited(&self) -> Option<&Inherited> {
        self.inherited.as_ref()
    }

    /// The cache is to forget what it has of these sectors as the volume's. What is inherited stays for others.
    pub(super) fn invalidate(&self, range: SectorRange, cx: &mut Context<'_>) {
        let first = self.own_key(range.first_block());
        cx.cache.invalidate(first, range.block_count());
    }

    /// Number in the cache of what the volume began as, if it is known.
    pub fn origin(&self) -> Option<u32> {
        self.inherited.as_ref().map(Inherited::origin)
    }

    /// Whether a block is still as in the origin, and is cached under its number.
    pub fn inherits(&self, block: u64) -> bool {
        self.origin_key(block).is_some()
    }

    /// What reading the volume costs, and how its blocks are weighed for it: its own, or, of a clone that has read
    /// nothing else, what it has inherited.
    pub fn benefit(&self, cache: &ReadCache) -> VolumeBenefit {
        let own = cache.benefit(self.number);
        match self.origin() {
            Some(origin) if own.miss.is_none() => cache.benefit(origin),
            _ => own,
        }
    }

    /// A heat map of the volume in the making, of which nothing is gathered yet.
    pub fn begin_gathering(&self, cache: &ReadCache) -> Gathering {
        Gathering::new(self.bytes, cache.line_blocks())
    }

    /// Gather a bounded part more; false: that was the last one.
    pub fn gather(&self, gathering: &mut Gathering, cache: &ReadCache) -> bool {
        let mut at = gathering.at;
        let more = cache.walk(&mut at, STEP_PLACES, |key, blocks, heat| {
            // What lies under the origin's number is the volume's where it was not written since.
            let is_own = key.volume() == self.number;
            let is_origins = Some(key.volume()) == self.origin();
            let first = key.block();
            if is_own || (is_origins && (first..first + blocks).any(|block| self.inherits(block))) {
                // A unit is no smaller than a line.
                gathering.see(first, heat);
            }
        });
        gathering.at = at;
        more
    }

    /// Whether the cache holds so little of these blocks, of which the first ones are the hottest, that it
    /// cannot be the one that they were hot in.
    pub(super) fn is_cold<'a>(
        &self,
        ranges: impl ExactSizeIterator<Item = &'a (u64, u64)>,
        cx: &Context<'_>,
    ) -> bool {
        let step = ranges.len().div_ceil(SAMPLES).max(1);
        let firsts = ranges.map(|range| range.0).step_by(step);
        let (mut looked, mut there) = (0, 0);
        for block in firsts.filter(|&block| block < self.whole_blocks()) {
            looked += 1;
            there += usize::from(self.is_promoted(block, cx));
        }
        there * 2 < looked
    }

    /// A write of any kind of these sectors was accepted or replayed.
    pub(super) fn own(&mut self, range: SectorRange) {
        if let Some(inherited) = &mut self.inherited {
            inherited.remove(range.first_block(), range.block_count());
        }
    }

    /// Key of a block of this volume in the read cache, as its own.
    #[inline]
    pub(super) fn own_key(&self, block: u64) -> BlockKey {
        BlockKey::new(self.number, block)
    }

    /// Key of a block that is inherited, in the origin.
    fn origin_key(&self, block: u64) -> Option<BlockKey> {
        let inherited = self.inherited.as_ref()?;
        (inherited.contains(block)).then(|| BlockKey::new(inherited.origin(), block))
    }

    /// Whether all of the line around a block is inherited, as far as the volume has whole blocks.
    fn is_line_inherited(&self, block: u64, cx: &Context<'_>) -> bool {
        let Some(inherited) = &self.inherited else {
            return false;
        };
        let line = cx.cache.line_blocks();
        let first = block / line * line;
        let end = (first + line).min(self.whole_blocks());
        block < end && (first..end).all(|block| inherited.contains(block))
    }

    /// The key under which a block is filled.
    pub(super) fn fill_key(&self, block: u64, cx: &Context<'_>) -> BlockKey {
        match self.origin_key(block) {
            Some(key) if self.is_line_inherited(block, cx) => key,
            _ => self.own_key(block),
        }
    }

    /// Find a block in the cache for a client's read.
    #[inline]
    pub(super) fn look_up(&self, block: u64, cx: &mut Context<'_>) -> Lookup {
        if let Some(key) = self.origin_key(block) {
            let found = cx.cache.lookup(key);
            if !matches!(found, Lookup::Miss) || self.is_line_inherited(block, cx) {
                return found;
            }
        }
        cx.cache.lookup(self.own_key(block))
    }

    /// Of so many blocks that the line of `key` has for `block` and those behind it, how many are this volume's.
    pub(super) fn blocks_of_line(&self, block: u64, key: BlockKey, blocks: u64) -> u64 {
        if key.volume() == self.number {
            return blocks;
        }
        let is_inherited = |&at: &u64| self.origin_key(block + at) == Some(BlockKey(key.0 + at));
        (0..blocks).take_while(is_inherited).count() as u64
    }

    /// Find a block in the cache without counting a use.
    pub(super) fn probe(&self, block: u64, cx: &Context<'_>) -> Tier {
        let origin = (self.origin_key(block)).map_or(Tier::Absent, |key| cx.cache.probe(key));
        match origin {
            Tier::Absent => cx.cache.probe(self.own_key(block)),
            found => found,
        }
    }

    /// Whether a block is where a promotion brings it.
    pub(super) fn is_promoted(&self, block: u64, cx: &Context<'_>) -> bool {
        let key = self.fill_key(block, cx);
        let end = BlockKey::new(key.volume(), self.whole_blocks());
        cx.cache.is_promoted(key, end)
    }

    /// Whether the SSD tier is to take what clients read around a block.
    pub(super) fn is_worth_taking(&self, block: u64, cx: &Context<'_>) -> bool {
        cx.cache.is_worth_taking(self.fill_key(block, cx).volume())
    }

    /// Keep whole blocks that were fetched where `fill` says, with both tiers for what was used, each run of lines
    /// under its key. Returns what the SSD tier took.
    pub(super) fn fill(
        &self,
        first: u64,
        data: &Buf,
        fill: Fill,
        method: Option<Method>,
        cx: &mut Context<'_>,
    ) -> SsdTaken {
        let mut taken = SsdTaken::default();
        let end = first + (data.len() / BLOCK_BYTES) as u64;
        let mut at = first;
        while at < end {
            let key = self.fill_key(at, cx);
            let mut to = at + 1;
            while to < end && self.fill_key(to, cx) == BlockKey(key.0 + (to - at)) {
                to += 1;
            }
            let bytes = |block: u64| (block - first) as usize * BLOCK_BYTES;
            let run = data.slice(bytes(at)..bytes(to));
            match fill {
                Fill::Both => taken += cx.cache.fill_promoted(key, &run, method),
                Fill::ByUse => taken += cx.cache.fill_compressed(key, &run, method),
                Fill::Dram => {
                    for (block, content) in (key.0..).zip(run.chunks_exact(BLOCK_BYTES)) {
                        cx.cache.fill_block(BlockKey(block), content);
                    }
                }
                Fill::Nowhere => {}
            }
            at = to;
        }
        taken
    }

    /// Whether every whole line of these blocks is where a promotion brings it.
    pub(super) fn are_promoted(&self, first: u64, end: u64, cx: &Context<'_>) -> bool {
        let line = cx.cache.line_blocks();
        let whole = self.whole_blocks() / line * line;
        (first / line * line..end.min(whole))
            .step_by(line as usize)
            .all(|block| self.is_promoted(block, cx))
    }

    /// Keep these blocks in the SSD tier, and no others. Returns whether the cache takes that.
    pub(super) fn pin(&self, blocks: &[(u64, u64)], cx: &mut Context<'_>) -> bool {
        cx.cache.pin(self.number, self.origin(), blocks).is_ok()
    }
}
