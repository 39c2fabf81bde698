//! The DRAM tier of the cache as it ships.

use hdcs_core::base::buf::Pool;
use hdcs_core::base::io::{BlockKey, Nanos};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::{CacheConfig, Lookup, ReadCache};

use super::{Policy, Tier};

/// See the module.
pub struct Shipped(ReadCache);

impl Shipped {
    pub fn new(size: usize) -> Self {
        let config = CacheConfig {
            dram_blocks: size,
            ssd: None,
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        let pool = Pool::new(1 << 20);
        Self(ReadCache::new(config, Nanos(0), pool, &mut Vec::new()))
    }
}

impl Tier for Shipped {
    fn cache(&mut self) -> &mut ReadCache {
        &mut self.0
    }

    fn read(&mut self, volume: u32, key: u64) -> bool {
        let key = BlockKey::new(volume, key);
        if matches!(self.0.lookup(key), Lookup::Dram(_)) {
            return true;
        }
        self.0.fill_block(key, &[0; BLOCK_BYTES]);
        false
    }
}

impl Policy for Shipped {
    fn access(&mut self, key: u64) -> bool {
        self.read(1, key)
    }
}
