//! One SSD tier under the caches of several shards.

use std::sync::Arc;

use hdcs_core::base::io::{Action, BlockKey, Completion, Done, Nanos};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::{CacheEvent, Lookup, ReadCache, SsdState, Tier};
use hdcs_kit::cache::{LINE_BYTES, Rig};

use super::read_cache::{REGION, is_write, key};

/// A rig, whose cache is that of shard 0, and the cache of another shard.
fn two() -> (Rig, ReadCache) {
    let rig = Rig::new(REGION);
    let tier = rig.cache.tier().expect("the rig has an SSD tier");
    let other = ReadCache::sharing(64, &tier, 1);
    rig.cache.release();
    (rig, other)
}

fn line(rig: &Rig, byte: u8) -> hdcs_core::base::buf::Buf {
    let mut data = rig.pool.alloc(LINE_BYTES).unwrap();
    data.fill(byte);
    data.freeze()
}

#[test]
fn what_one_shard_fills_another_finds_until_either_invalidates_it() {
    let (mut rig, mut other) = two();
    rig.fill_lines(0..100);
    rig.cache.release();
    assert_eq!(other.probe(key(7)), Tier::Ssd);
    let Lookup::Ssd(read) = other.lookup(key(7)) else {
        panic!("it is on the device");
    };
    other.release();
    let mut data = rig.medium[read.offset as usize..][..read.bytes].to_vec();
    let found = other.finish_ssd_read(read, Some(&mut data)).unwrap();
    assert_eq!(found[0], 7);
    assert_eq!(other.probe(key(7)), Tier::Dram, "of its own shard");
    other.release();
    assert_eq!(rig.cache.probe(key(7)), Tier::Ssd);
    rig.cache.release();
    other.invalidate(key(7), 4);
    other.release();
    assert_eq!(rig.cache.probe(key(7)), Tier::Absent);
    rig.cache.invalidate(key(8), 4);
    rig.cache.release();
    assert_eq!(other.probe(key(8)), Tier::Absent);
}

#[test]
fn equal_content_of_two_shards_is_stored_once() {
    let (mut rig, mut other) = two();
    rig.fill_lines(5..6);
    rig.cache.release();
    let mut same = rig.pool.alloc(LINE_BYTES).unwrap();
    for (block, bytes) in same.chunks_exact_mut(BLOCK_BYTES).enumerate() {
        bytes.fill(5 + block as u8);
    }
    other.fill(BlockKey::new(2, 40), &same.freeze());
    other.release();
    rig.run();
    let stats = rig.cache.stats();
    assert_eq!((stats.shared_lines, stats.ssd_used_lines), (1, 1));
    rig.cache.release();
    assert_eq!(other.probe(BlockKey::new(2, 40)), Tier::Dram);
}

#[test]
fn a_write_or_a_hit_in_memory_takes_no_lock() {
    let (mut rig, mut other) = two();
    let data = line(&rig, 3);
    other.fill_block(key(1), &data[..BLOCK_BYTES]);
    other.step(Nanos(0), CacheEvent::Poll, &mut Vec::new());
    // Shard 0 has the lock. Whoever asked for it now would wait for ever, being the same thread.
    assert!(rig.cache.takes_lines());
    assert!(matches!(other.lookup(key(1)), Lookup::Dram(_)));
    other.fill_block(key(2), &data[..BLOCK_BYTES]);
    other.step(Nanos(0), CacheEvent::Poll, &mut Vec::new());
    let _ = (other.persisted(), other.losses(), other.next_wakeup());
    let _ = (other.must_reset(), other.can_readmit());
    assert_eq!(other.forgotten_volumes(), 0);
    rig.cache.release();
    rig.run();
}

#[test]
fn a_shard_performs_what_its_own_steps_ask_for() {
    let (mut rig, mut other) = two();
    rig.fill_lines(0..10);
    rig.cache.release();
    other.invalidate(key(3), 4);
    let barrier = other.barrier();
    other.release();
    let mut actions = Vec::new();
    other.step(Nanos(0), CacheEvent::Poll, &mut actions);
    assert!(!actions.is_empty() && actions.iter().all(is_write));
    assert!(rig.actions.is_empty());
    assert!(other.persisted() < barrier);
    // Shard 0 waits for the same, and is told by whoever brings it.
    assert_eq!(rig.cache.take_waiting(), 0);
    rig.cache.wait_for_changes();
    let seen = rig.cache.changes();
    while !actions.is_empty() {
        let Action::CacheWrite {
            token,
            offset,
            data,
            ..
        } = actions.remove(0)
        else {
            panic!("it writes alone");
        };
        let mut at = offset as usize;
        for part in data {
            rig.medium[at..at + part.len()].copy_from_slice(&part);
            at += part.len();
        }
        let result = Ok(Done::Written);
        let ended = CacheEvent::Completed(Completion { token, result });
        other.step(Nanos(0), ended, &mut actions);
    }
    assert!(other.persisted() >= barrier && rig.cache.persisted() >= barrier);
    assert!(rig.cache.changes() > seen);
    assert_eq!(other.take_waiting(), 1, "shard 0, once");
    assert_eq!(other.take_waiting(), 0);
    rig.close();
}

#[test]
fn all_shards_see_that_the_tier_is_given_up() {
    let (mut rig, mut other) = two();
    rig.fill_lines(0..10);
    other.wait_for_changes();
    rig.cache.ssd_read_is_late();
    rig.cache.release();
    assert_eq!(rig.cache.take_waiting(), 0b10);
    assert_eq!(other.stats().ssd_state, SsdState::Offline);
    assert!(matches!(other.lookup(key(3)), Lookup::Miss));
    other.release();
    rig.run();
    assert!(rig.cache.can_readmit() && other.can_readmit());
}

#[test]
fn a_volume_that_left_a_shard_is_not_found_in_its_memory() {
    let (rig, mut other) = two();
    let data = line(&rig, 3);
    other.fill_block(key(1), &data[..BLOCK_BYTES]);
    other.fill_block(BlockKey::new(2, 1), &data[..BLOCK_BYTES]);
    other.forget_in_dram(1);
    assert_eq!(other.probe(key(1)), Tier::Absent);
    assert_eq!(other.probe(BlockKey::new(2, 1)), Tier::Dram);
}

#[test]
fn shards_on_threads_of_their_own_find_what_they_have_filled() {
    let (rig, other) = two();
    let tier = rig.cache.tier().unwrap();
    drop(other);
    let pool = Arc::clone(&rig.pool);
    // Nothing is written: the tier is as large as what it may have in memory.
    let work = |shard: u32| {
        let mut cache = ReadCache::sharing(0, &tier, shard);
        for round in 0..2_000u64 {
            let volume = shard + 10;
            let first = BlockKey::new(volume, round % 16 * 4);
            cache.invalidate(first, 4);
            if let Some(mut data) = pool.alloc(LINE_BYTES) {
                data.fill((round % 251) as u8 ^ shard as u8);
                cache.fill(first, &data.freeze());
            }
            if let Lookup::Dram(found) = cache.lookup(first) {
                let wanted = (round % 251) as u8 ^ shard as u8;
                assert!(found.iter().all(|&byte| byte == wanted));
            }
            cache.release();
        }
    };
    rig.cache.release();
    std::thread::scope(|scope| {
        for shard in 1..=3 {
            scope.spawn(move || work(shard));
        }
    });
    rig.cache.check_invariants();
}
