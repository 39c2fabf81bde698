//! Nanoseconds per hit, miss and fill of the DRAM tier, and per line filled into the SSD tier.
//!
//! `cargo run --release -p hdcs-core --example read_cache_speed [frames]`. A figure is the best of
//! five rounds; compare figures of one run only.

use std::sync::Arc;
use std::time::Instant;

use fastrand::Rng;
use hdcs_core::base::buf::Pool;
use hdcs_core::base::io::{Action, BlockKey, Completion, Done, Nanos};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::{CacheConfig, CacheEvent, Lookup, ReadCache, SsdConfig};

const OPERATIONS: usize = 1 << 18;

fn best(name: &str, mut round: impl FnMut()) {
    let nanos = (0..5)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed().as_nanos() as f64 / OPERATIONS as f64
        })
        .fold(f64::MAX, f64::min);
    println!("{name:<28} {nanos:8.1} ns");
}

/// Answer every action at once: reads with zeroes, writes with success.
fn answer(cache: &mut ReadCache, actions: &mut Vec<Action>) {
    cache.step(Nanos(0), CacheEvent::Poll, actions);
    while let Some(action) = actions.pop() {
        let (token, done) = match action {
            Action::CacheRead { token, mut buf, .. } => {
                buf.fill(0);
                (token, Done::Read(buf))
            }
            Action::CacheWrite { token, .. } => (token, Done::Written),
            other => panic!("the cache asked for {other:?}"),
        };
        let completion = Completion {
            token,
            result: Ok(done),
        };
        cache.step(Nanos(0), CacheEvent::Completed(completion), actions);
    }
}

fn main() {
    let frames: usize = std::env::args()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(1 << 16);
    let config = CacheConfig {
        dram_blocks: frames,
        ssd: None,
        ssd_answer_max: Nanos::from_millis(5_000),
    };
    let pool = Pool::new(64 << 20);
    let mut cache = ReadCache::new(config, Nanos(0), Arc::clone(&pool), &mut Vec::new());
    let block = [7; BLOCK_BYTES];
    (0..frames as u64).for_each(|key| cache.fill_block(BlockKey::new(1, key), &block));
    let mut random = Rng::with_seed(1);
    let keys: Vec<u64> = (0..OPERATIONS)
        .map(|_| random.u64(..frames as u64))
        .collect();

    println!("{frames} frames, random order");
    let mut hits = 0;
    best("DRAM hit (a counted buffer)", || {
        for &key in &keys {
            hits += usize::from(matches!(
                cache.lookup(BlockKey::new(1, key)),
                Lookup::Dram(_)
            ));
        }
    });
    assert_eq!(hits, 5 * OPERATIONS);
    best("miss", || {
        for &key in &keys {
            hits += usize::from(matches!(
                cache.lookup(BlockKey::new(2, key)),
                Lookup::Dram(_)
            ));
        }
    });
    assert_eq!(hits, 5 * OPERATIONS);
    let mut next = 0;
    best("DRAM fill (4 KiB, evicting)", || {
        for _ in 0..OPERATIONS {
            cache.fill_block(BlockKey::new(3, next), &block);
            next += 1;
        }
    });

    let config = CacheConfig {
        dram_blocks: 0,
        ssd: Some(SsdConfig {
            bytes: 8 << 30,
            uuid: [1; 16],
            line_blocks: 4,
        }),
        ssd_answer_max: Nanos::from_millis(5_000),
    };
    let mut actions = Vec::new();
    let mut cache = ReadCache::new(config, Nanos(0), Arc::clone(&pool), &mut actions);
    while !cache.is_ready() {
        answer(&mut cache, &mut actions);
    }
    let mut next = 0u64;
    best("SSD fill (line of 16 KiB)", || {
        for _ in 0..OPERATIONS {
            let mut data = pool.alloc(4 * BLOCK_BYTES).expect("memory");
            data.chunks_exact_mut(BLOCK_BYTES)
                .for_each(|block| block[..8].copy_from_slice(&next.to_le_bytes()));
            cache.fill(BlockKey::new(1, next * 4), &data.freeze());
            next += 1;
            answer(&mut cache, &mut actions);
        }
    });
    println!("{:?}", cache.stats());
}
