//! The SSD tier of the cache as it ships, without DRAM before it, on a device in memory. A block of
//! the trace is a line.

use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::io::{Action, BlockKey, Completion, Done, Nanos};
use hdcs_core::base::limits::{BLOCK_BYTES, CACHE_BYTES_MIN, SEGMENT_BYTES};
use hdcs_core::cache::{CacheConfig, CacheEvent, Lookup, ReadCache, SsdConfig};

use super::{Policy, Tier};

/// The smallest lines: the least to copy.
const LINE_BLOCKS: usize = 2;
/// Lines of the smallest tier, about; a smaller cache cannot be compared with.
pub const LINES_MIN: usize = 2_000;

/// See the module.
pub struct ShippedSsd {
    pool: Arc<Pool>,
    cache: ReadCache,
    medium: Vec<u8>,
    actions: Vec<Action>,
}

impl ShippedSsd {
    /// The largest tier of no more than `size` lines.
    pub fn new(size: usize) -> Self {
        let mut found = Self::of_bytes(CACHE_BYTES_MIN);
        loop {
            let next = Self::of_bytes((found.medium.len() + SEGMENT_BYTES) as u64);
            if next.cache.stats().ssd_lines > size as u64 {
                return found;
            }
            found = next;
        }
    }

    fn of_bytes(bytes: u64) -> Self {
        let ssd = SsdConfig {
            bytes,
            uuid: [1; 16],
            line_blocks: LINE_BLOCKS,
        };
        let config = CacheConfig {
            dram_blocks: 0,
            ssd: Some(ssd),
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        let (pool, mut actions) = (Pool::new(32 << 20), Vec::new());
        let cache = ReadCache::new(config, Nanos(0), Arc::clone(&pool), &mut actions);
        let mut this = Self {
            pool,
            cache,
            medium: vec![0; bytes as usize],
            actions,
        };
        this.perform();
        this
    }

    /// The device does everything at once.
    fn perform(&mut self) {
        self.cache
            .step(Nanos(0), CacheEvent::Poll, &mut self.actions);
        while let Some(action) = self.actions.pop() {
            let (token, done) = match action {
                Action::CacheRead {
                    token,
                    offset,
                    mut buf,
                } => {
                    let bytes = buf.len();
                    buf.copy_from_slice(&self.medium[offset as usize..][..bytes]);
                    (token, Done::Read(buf))
                }
                Action::CacheWrite {
                    token,
                    offset,
                    data,
                    ..
                } => {
                    let mut at = offset as usize;
                    for part in data {
                        self.medium[at..at + part.len()].copy_from_slice(&part);
                        at += part.len();
                    }
                    (token, Done::Written)
                }
                other => panic!("not the cache's: {other:?}"),
            };
            let completion = Completion {
                token,
                result: Ok(done),
            };
            let event = CacheEvent::Completed(completion);
            self.cache.step(Nanos(0), event, &mut self.actions);
        }
    }
}

impl Tier for ShippedSsd {
    fn cache(&mut self) -> &mut ReadCache {
        &mut self.cache
    }

    fn read(&mut self, volume: u32, key: u64) -> bool {
        let first = BlockKey::new(volume, key * LINE_BLOCKS as u64);
        match self.cache.lookup(first) {
            Lookup::Dram(_) => return true,
            Lookup::Ssd(permission) => {
                self.cache.cancel_ssd_read(permission);
                return true;
            }
            Lookup::Miss => {}
        }
        let buf = self.pool.alloc(LINE_BLOCKS * BLOCK_BYTES);
        let mut buf = buf.expect("nothing holds memory for long");
        buf.fill(0);
        // Lines of the same bytes would share one place.
        buf[..8].copy_from_slice(&first.0.to_le_bytes());
        self.cache.fill(first, &buf.freeze());
        self.perform();
        false
    }
}

impl Policy for ShippedSsd {
    fn access(&mut self, key: u64) -> bool {
        self.read(1, key)
    }
}
