//! The read cache in a program of one's own: DRAM over an SSD tier whose device is a vector, and a warm restart.
//! `cargo run -p hdcs-core --example cache_by_hand`

use std::sync::Arc;

use hdcs_core::base::buf::{BufMut, Pool};
use hdcs_core::base::io::{Action, BlockKey, Completion, Done, Nanos, SectorRange};
use hdcs_core::base::limits::BLOCK_SECTORS;
use hdcs_core::cache::{CacheConfig, CacheEvent, Lookup, ReadCache, SsdConfig};

/// Blocks that are filled: four times what DRAM holds.
const BLOCKS: u64 = 256;

/// A cache with its device.
struct Node {
    pool: Arc<Pool>,
    device: Vec<u8>,
    cache: ReadCache,
    now: Nanos,
}

fn config() -> CacheConfig {
    CacheConfig {
        dram_blocks: 64,
        ssd: Some(SsdConfig {
            bytes: 32 << 20,
            uuid: *b"an example alone",
            line_blocks: 4,
        }),
        ssd_answer_max: Nanos::from_millis(5_000),
    }
}

impl Node {
    /// Start over what the device holds.
    fn start(device: Vec<u8>) -> Self {
        let pool = Pool::new(16 << 20);
        let mut actions = Vec::new();
        let cache = ReadCache::new(config(), Nanos(0), Arc::clone(&pool), &mut actions);
        let mut node = Self {
            pool,
            device,
            cache,
            now: Nanos(0),
        };
        node.perform(actions);
        while !node.cache.is_ready() {
            node.step(CacheEvent::Poll);
        }
        node
    }

    fn step(&mut self, event: CacheEvent) {
        let mut actions = Vec::new();
        self.now = self.now.plus(Nanos::from_micros(10));
        self.cache.step(self.now, event, &mut actions);
        self.perform(actions);
    }

    /// Perform what the cache asks of its device.
    fn perform(&mut self, actions: Vec<Action>) {
        for action in actions {
            let (token, done) = match action {
                Action::CacheRead { token, offset, buf } => (token, self.read(offset, buf)),
                Action::CacheWrite {
                    token,
                    offset,
                    data,
                    ..
                } => {
                    let mut at = offset as usize;
                    for part in &data {
                        self.device[at..][..part.len()].copy_from_slice(part);
                        at += part.len();
                    }
                    (token, Done::Written)
                }
                other => unreachable!("a cache does not ask for {other:?}"),
            };
            let result = Ok(done);
            self.step(CacheEvent::Completed(Completion { token, result }));
        }
    }

    fn read(&self, offset: u64, mut buf: BufMut) -> Done {
        let bytes = buf.len();
        buf.copy_from_slice(&self.device[offset as usize..][..bytes]);
        Done::Read(buf)
    }

    /// Where a block is found, and its first byte.
    fn find(&mut self, block: u64) -> Option<(&'static str, u8)> {
        match self.cache.lookup(BlockKey::new(1, block)) {
            Lookup::Dram(data) => Some(("DRAM", data[0])),
            Lookup::Ssd(permission) => {
                // Reading is the driver's; the cache compares what was read with its checksum.
                let mut buf = self.pool.alloc(permission.bytes)?;
                let from = &self.device[permission.offset as usize..];
                buf.copy_from_slice(&from[..permission.bytes]);
                let found = self
                    .cache
                    .finish_ssd_read(permission, Some(&mut buf))
                    .ok()?;
                Some(("SSD", found[0]))
            }
            Lookup::Miss => None,
        }
    }
}

fn main() {
    let mut node = Node::start(vec![0; 32 << 20]);
    for first in (0..BLOCKS).step_by(4) {
        let range = SectorRange::new(first * BLOCK_SECTORS, 4 * BLOCK_SECTORS);
        let mut data = node
            .pool
            .alloc_for(range)
            .expect("the pool is large enough");
        data.fill(first as u8);
        node.cache.fill(BlockKey::new(1, first), &data.freeze());
        node.step(CacheEvent::Poll);
    }
    println!(
        "block 252 is in {:?}, block 0 in {:?}",
        node.find(252),
        node.find(0)
    );

    // What a write changes is forgotten, durably from this barrier on.
    node.cache.invalidate(BlockKey::new(1, 8), 4);
    let barrier = node.cache.barrier();
    while node.cache.persisted() < barrier {
        node.step(CacheEvent::Poll);
    }
    assert_eq!(node.find(8), None);

    node.step(CacheEvent::Close);
    while !node.cache.is_closed() {
        node.step(CacheEvent::Poll);
    }
    let mut node = Node::start(node.device);
    assert_eq!(node.find(8), None, "nor does it come back");
    assert_eq!(node.find(0), Some(("SSD", 0)));
    assert_eq!(node.find(128), Some(("SSD", 128)));
    println!("after a restart block 128 is in {:?}", node.find(128));
}

#[test]
fn example_runs() {
    main();
}
