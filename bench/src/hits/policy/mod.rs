//! Eviction policies to compare with: small reference implementations that keep keys only, and the
//! cache as it ships, through its public interface.

mod arc;
mod clock;
mod lru;
mod order;
mod s3_fifo;
pub mod shipped;
pub mod shipped_ssd;
mod sieve;
mod tiny_lfu;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use hdcs_core::cache::ReadCache;

/// One access; true on a hit. A miss brings the key in.
pub trait Policy {
    /// Access `key`.
    fn access(&mut self, key: u64) -> bool;
}

/// A tier of the cache as it ships, read by several volumes.
pub trait Tier {
    /// The cache that it is the only tier of.
    fn cache(&mut self) -> &mut ReadCache;
    /// Read a block; true on a hit. A miss brings it in.
    fn read(&mut self, volume: u32, key: u64) -> bool;
}

/// A policy of the comparison: its name, and how to make one of so many blocks.
pub struct Entry {
    /// As the table says it.
    pub name: &'static str,
    /// It cannot be made of less.
    pub blocks_min: usize,
    /// Make an empty cache.
    pub make: fn(usize) -> Box<dyn Policy>,
}

/// All of them; what ships is last.
pub const ALL: &[Entry] = &[
    Entry {
        name: "LRU",
        blocks_min: 1,
        make: |size| Box::new(lru::Lru::new(size)),
    },
    Entry {
        name: "CLOCK, 2 bits",
        blocks_min: 1,
        make: |size| Box::new(clock::Clock::new(size)),
    },
    Entry {
        name: "SIEVE",
        blocks_min: 1,
        make: |size| Box::new(sieve::Sieve::new(size)),
    },
    Entry {
        name: "ARC",
        blocks_min: 1,
        make: |size| Box::new(arc::Arc::new(size)),
    },
    Entry {
        name: S3_FIFO,
        blocks_min: 1,
        make: |size| Box::new(s3_fifo::S3Fifo::new(size)),
    },
    Entry {
        name: "W-TinyLFU",
        blocks_min: 1,
        make: |size| Box::new(tiny_lfu::WTinyLfu::new(size)),
    },
    Entry {
        name: SHIPPED,
        blocks_min: 1,
        make: |size| Box::new(shipped::Shipped::new(size)),
    },
    Entry {
        name: SHIPPED_SSD,
        blocks_min: shipped_ssd::LINES_MIN,
        make: |size| Box::new(shipped_ssd::ShippedSsd::new(size)),
    },
];

/// Name of the published policy that the shipped one must not fall behind.
pub const S3_FIFO: &str = "S3-FIFO";
/// Names of the cache's own tiers.
pub const SHIPPED: &str = "shipped";
const SHIPPED_SSD: &str = "shipped, SSD";

/// Keys are numbers: one multiplication spreads them.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers");
    }
    fn write_u64(&mut self, key: u64) {
        self.0 = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

type Map<V> = HashMap<u64, V, BuildHasherDefault<KeyHasher>>;

#[cfg(test)]
fn hits(policy: &mut dyn Policy, keys: &[u64]) -> String {
    keys.iter()
        .map(|&key| if policy.access(key) { 'h' } else { '.' })
        .collect()
}
