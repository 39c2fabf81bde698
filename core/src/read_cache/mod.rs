//! The read cache of a node: a DRAM tier over content-addressed segments on SSD.

mod dram;
mod ghost;
mod table;

use alloc::rc::Rc;
use alloc::vec::Vec;

use crate::buf::{Buf, Pool};
use crate::io::{Action, BlockKey, Completion, Nanos};
use crate::limits::BLOCK_BYTES;
use dram::Dram;

/// Sizes of a read cache.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// 4 KiB frames of the DRAM tier; 0 turns it off.
    pub dram_blocks: usize,
    /// The SSD tier, if the node has one.
    pub ssd: Option<SsdConfig>,
}

/// Size and identity of the SSD tier.
#[derive(Clone, Debug)]
pub struct SsdConfig {
    /// Bytes of the cache device's region.
    pub bytes: u64,
    /// Identity of the node's cache; another one's content is discarded, never used.
    pub uuid: [u8; 16],
    /// Blocks of one line, the unit of filling and evicting: 2, 4, 8 or 16.
    pub line_blocks: usize,
}

/// What happens to the cache.
#[derive(Debug)]
pub enum CacheEvent {
    /// One of the cache's own actions ended.
    Completed(Completion),
    /// The end of a batch: background work.
    Poll,
    /// Write everything that makes the next start warm; [`ReadCache::is_closed`] tells the end.
    Close,
}

/// Where a block was found.
#[derive(Debug)]
pub enum Lookup {
    /// In memory: the whole block.
    Dram(Buf),
    /// On the SSD: perform the read, then [`ReadCache::finish_ssd_read`].
    Ssd(SsdRead),
    /// Not here.
    Miss,
}

/// Permission to read one block from the SSD tier. The block stays in place until it is given
/// back through [`ReadCache::finish_ssd_read`], which must happen exactly once.
#[derive(Debug)]
pub struct SsdRead {
    /// Which block was asked for.
    pub key: BlockKey,
    /// Where it lies on the cache device; one block long.
    pub offset: u64,
}

/// Where a block lives, without touching its standing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// In memory.
    Dram,
    /// On the SSD.
    Ssd,
    /// In neither.
    Absent,
}

/// The cached data did not match its checksum; the block was dropped and must be fetched again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// A point in the stream of invalidations; see [`ReadCache::barrier`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Barrier(pub u64);

/// Counters and gauges of the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Frames in use of the DRAM tier.
    pub dram_used_blocks: u64,
    /// Frames of the DRAM tier.
    pub dram_blocks: u64,
    /// Lines in use of the SSD tier.
    pub ssd_used_lines: u64,
    /// Lines that fit the SSD tier.
    pub ssd_lines: u64,
    /// Blocks of one line.
    pub line_blocks: u64,
    /// Bytes of memory in the indexes of both tiers.
    pub index_bytes: u64,
    /// Lines filled.
    pub filled_lines: u64,
    /// Lines that were there already under another address.
    pub shared_lines: u64,
    /// Blocks dropped from the DRAM tier to make room.
    pub dram_evicted_blocks: u64,
    /// Lines dropped from the SSD tier to make room.
    pub ssd_evicted_lines: u64,
    /// Bytes written to the cache device.
    pub ssd_written_bytes: u64,
    /// Blocks that failed their checksum.
    pub corrupt_blocks: u64,
    /// I/O errors of the cache device; after too many the SSD tier is off.
    pub device_errors: u64,
    /// Whether the SSD tier serves.
    pub ssd_online: bool,
    /// Lines that the last start found on the SSD.
    pub warm_lines: u64,
}

/// The read cache of one shard.
#[derive(Debug)]
pub struct ReadCache {
    config: CacheConfig,
    dram: Dram,
}

impl ReadCache {
    /// A cache with an empty DRAM tier that begins to read its SSD tier, if it has one. Until
    /// that is read, lookups miss and fills go to DRAM alone.
    pub fn new(config: CacheConfig, pool: Rc<Pool>, actions: &mut Vec<Action>) -> Self {
        let _ = (pool, actions);
        let dram = Dram::new(config.dram_blocks);
        Self { config, dram }
    }

    /// Take one event; push what follows from it.
    pub fn step(&mut self, now: Nanos, event: CacheEvent, actions: &mut Vec<Action>) {
        let _ = (now, event, actions);
    }

    /// Whether the SSD tier has been read and serves, or there is none.
    pub fn is_ready(&self) -> bool {
        true
    }

    /// Whether [`CacheEvent::Close`] is done.
    pub fn is_closed(&self) -> bool {
        true
    }

    /// Blocks of one line: what a miss fetches, aligned to its size.
    pub fn line_blocks(&self) -> u64 {
        self.config
            .ssd
            .as_ref()
            .map_or(4, |ssd| ssd.line_blocks as u64)
    }

    /// Find a block for a client's read; counts as a use.
    pub fn lookup(&mut self, key: BlockKey) -> Lookup {
        match self.dram.lookup(key) {
            Some(buf) => Lookup::Dram(buf),
            None => Lookup::Miss,
        }
    }

    /// Find a block without counting a use.
    pub fn probe(&self, key: BlockKey) -> Tier {
        if self.dram.contains(key) {
            return Tier::Dram;
        }
        Tier::Absent
    }

    /// Give a read permission back, with the block that was read or `None` if the device failed.
    /// The data is checked against its checksum.
    pub fn finish_ssd_read(&mut self, read: SsdRead, data: Option<&[u8]>) -> Result<(), Corrupt> {
        let _ = (read, data);
        Ok(())
    }

    /// Take consecutive whole blocks from the backend, starting at `first`. Complete lines among
    /// them may go to the SSD tier; blocks go to the DRAM tier.
    pub fn fill(&mut self, first: BlockKey, data: &Buf) {
        for (index, block) in data.chunks_exact(BLOCK_BYTES).enumerate() {
            self.dram.insert(BlockKey(first.0 + index as u64), block);
        }
    }

    /// Take one whole block that was just destaged, into the DRAM tier only.
    pub fn fill_block(&mut self, key: BlockKey, data: &[u8]) {
        self.dram.insert(key, data);
    }

    /// Forget `blocks` blocks from `first`: the backend's content has changed.
    pub fn invalidate(&mut self, first: BlockKey, blocks: u64) {
        let end = first.0.saturating_add(blocks);
        if blocks > self.dram.frames() as u64 {
            self.dram
                .invalidate_where(|key| (first.0..end).contains(&key.0));
        } else {
            (first.0..end).for_each(|key| self.dram.invalidate(BlockKey(key)));
        }
    }

    /// Forget every block of a volume.
    pub fn forget_volume(&mut self, volume: u32) {
        self.dram.invalidate_where(|key| key.volume() == volume);
    }

    /// The point after all invalidations so far. Once [`Self::persisted`] has reached it, no
    /// restart brings back what they dropped.
    pub fn barrier(&mut self) -> Barrier {
        Barrier(0)
    }

    /// Up to which point invalidations are durable.
    pub fn persisted(&self) -> Barrier {
        Barrier(0)
    }

    /// Counters and gauges.
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            dram_used_blocks: self.dram.used() as u64,
            dram_blocks: self.dram.frames() as u64,
            dram_evicted_blocks: self.dram.evicted(),
            line_blocks: self.line_blocks(),
            index_bytes: self.dram.index_bytes() as u64,
            ..CacheStats::default()
        }
    }

    /// Assert what must always hold; for tests and the simulator.
    pub fn check_invariants(&self) {
        self.dram.check_invariants();
    }
}
