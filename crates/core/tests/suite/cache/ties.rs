//! What ties the cache to the logs of its volumes, and what one lie of its device does to a start.

use std::sync::Arc;

use hdcs_core::base::io::{Action, BlockKey, Nanos};
use hdcs_core::base::limits::{BLOCK_BYTES, CACHE_INVALIDATIONS_MAX};
use hdcs_core::cache::{CacheEvent, Layout, ReadCache, Tie, Tier};
use hdcs_core::format::CACHE_SUPERBLOCK_BLOCKS;
use hdcs_kit::cache::Rig;

use super::read_cache::{LINES_PER_SEGMENT, REGION, is_write, key};

/// A cache with a segment of lines of the volumes 1 and 2 on the device.
fn shared_by_two() -> Rig {
    let mut rig = Rig::new(REGION);
    for line in 0..2 * LINES_PER_SEGMENT {
        rig.fill_numbered(1 + (line % 2) as u32, line / 2, 7, line);
        rig.run();
    }
    rig.close();
    rig.restart();
    rig
}

/// Have a volume's first line forgotten, durably; what its log says then.
fn forget_first(rig: &mut Rig, volume: u32) -> Tie {
    rig.cache.invalidate(BlockKey::new(volume, 0), 1);
    let barrier = rig.cache.barrier();
    rig.run();
    assert!(rig.cache.persisted() >= barrier);
    rig.cache.tie_of(volume)
}

fn lines_of(rig: &mut Rig, volume: u32) -> usize {
    let lines = 0..LINES_PER_SEGMENT;
    lines
        .filter(|&line| rig.read(volume, line, 0).is_some())
        .count()
}

#[test]
fn cache_that_lost_its_newest_journal_block_serves_nothing_of_a_newer_log() {
    let mut rig = shared_by_two();
    let all = LINES_PER_SEGMENT as usize;
    let other = rig.cache.tie_of(2);
    let before = rig.medium.clone();
    let tie = forget_first(&mut rig, 1);
    // The device has acknowledged it, and it is gone.
    rig.medium = before;
    rig.restart();
    rig.cache.tie(1, tie);
    rig.cache.tie(2, other);
    assert_eq!(lines_of(&mut rig, 1), 0);
    assert_eq!(lines_of(&mut rig, 2), all, "whose log has missed nothing");
    assert_eq!(rig.cache.stats().forgotten_volumes, 1);
    // Until that is durable, no log may say that the cache has come so far.
    assert_eq!(rig.cache.tie_of(1), Tie::UNKNOWN);
    rig.cache.barrier();
    rig.run();
    let tie = rig.cache.tie_of(1);
    assert_ne!(tie, Tie::UNKNOWN);
    rig.restart();
    rig.cache.tie(1, tie);
    assert_eq!(
        (lines_of(&mut rig, 1), rig.cache.stats().forgotten_volumes),
        (0, 0)
    );
}

#[test]
fn cache_that_drops_all_at_its_start_ties_no_log_before_that_is_durable() {
    let mut rig = shared_by_two();
    let missed = Tie {
        stamp: rig.cache.tie_of(1).stamp + (1 << 20),
        ..rig.cache.tie_of(1)
    };
    rig.actions.clear();
    let pool = Arc::clone(&rig.pool);
    rig.cache = ReadCache::new(rig.config.clone(), Nanos(0), pool, &mut rig.actions);
    rig.cache.tie(1, missed);
    while !rig.actions.iter().any(is_write) {
        let action = rig.actions.remove(0);
        rig.perform(action);
    }
    // While the start is being noted, more is forgotten than can be recorded.
    for line in 0..=CACHE_INVALIDATIONS_MAX as u64 {
        rig.cache.invalidate(key(2 * line), 4);
    }
    while !rig.cache.is_ready() {
        let action = rig.actions.remove(0);
        rig.perform(action);
    }
    assert_eq!(rig.cache.tie_of(1), Tie::UNKNOWN);
    rig.cache.barrier();
    rig.run();
    assert_ne!(rig.cache.tie_of(1), Tie::UNKNOWN);
    assert_eq!(lines_of(&mut rig, 1), 0);
}

/// The same of a log that is opened once the cache serves: before its superblocks are on their way, and while they are.
#[test]
fn cache_that_drops_all_at_its_start_ties_no_log_that_comes_later_before_that_is_durable() {
    for is_on_its_way in [false, true] {
        let mut rig = shared_by_two();
        let missed = Tie {
            stamp: rig.cache.tie_of(1).stamp + (1 << 20),
            ..rig.cache.tie_of(1)
        };
        rig.actions.clear();
        let pool = Arc::clone(&rig.pool);
        rig.cache = ReadCache::new(rig.config.clone(), Nanos(0), pool, &mut rig.actions);
        while !rig.actions.iter().any(is_write) {
            let action = rig.actions.remove(0);
            rig.perform(action);
        }
        for line in 0..=CACHE_INVALIDATIONS_MAX as u64 {
            rig.cache.invalidate(key(2 * line), 4);
        }
        while !rig.cache.is_ready() {
            let action = rig.actions.remove(0);
            rig.perform(action);
        }
        if is_on_its_way {
            rig.event(CacheEvent::Poll);
            assert!(rig.actions.iter().any(is_write), "{:?}", rig.actions);
        }
        rig.cache.tie(1, missed);
        let tie = rig.cache.tie_of(1);
        // A crash, and what the log says then.
        rig.restart();
        rig.cache.tie(1, tie);
        assert_eq!(lines_of(&mut rig, 1), 0, "{is_on_its_way}");
        assert_eq!(tie, Tie::UNKNOWN);
    }
}

#[test]
fn cache_knows_what_a_start_has_missed_though_its_numbers_are_used_again() {
    let mut rig = shared_by_two();
    let before = rig.medium.clone();
    forget_first(&mut rig, 2);
    let tie = forget_first(&mut rig, 1);
    rig.medium = before;
    // The volume is not opened at the next start, at which others come further than it had.
    rig.restart();
    for _ in 0..3 {
        rig.fill_numbered(2, 0, 8, 1);
        rig.cache.fill(
            BlockKey::new(2, 0),
            &rig.pool.alloc(4 * BLOCK_BYTES).unwrap().freeze(),
        );
        for line in 0..LINES_PER_SEGMENT {
            rig.fill_numbered(3, line, 1, line);
        }
        rig.run();
        forget_first(&mut rig, 3);
    }
    rig.close();
    rig.restart();
    rig.cache.tie(1, tie);
    assert_eq!(lines_of(&mut rig, 1), 0);
}

#[test]
fn cache_serves_a_log_that_says_nothing_and_none_that_cannot_tell() {
    let mut rig = shared_by_two();
    rig.cache.tie(1, Tie::NONE);
    rig.cache.tie(2, Tie::UNKNOWN);
    assert_eq!(lines_of(&mut rig, 1), LINES_PER_SEGMENT as usize);
    assert_eq!(lines_of(&mut rig, 2), 0);
    let forgotten = rig.cache.stats().forgotten_volumes;
    assert_eq!(forgotten, 0, "the device has lost nothing");
}

#[test]
fn cache_that_began_empty_owes_nothing_to_older_logs() {
    let mut rig = Rig::new(REGION);
    rig.fill_numbered(1, 0, 7, 0);
    rig.cache.tie(1, Tie { cache: 5, stamp: 6 });
    rig.run();
    assert_eq!(lines_of(&mut rig, 1), 1);
    assert_ne!(rig.cache.tie_of(1), Tie::UNKNOWN);
}

#[test]
fn cache_reads_a_footer_again_that_seems_blank_among_others() {
    let mut rig = shared_by_two();
    let layout = Layout::new(REGION as u64, 4).unwrap();
    let footer = layout.footer_offset(0) as usize;
    rig.actions.clear();
    let pool = Arc::clone(&rig.pool);
    rig.cache = ReadCache::new(rig.config.clone(), Nanos(0), pool, &mut rig.actions);
    rig.event(CacheEvent::Poll);
    let mut misread = 0;
    while !rig.actions.is_empty() {
        let action = rig.actions.remove(0);
        let at = match &action {
            Action::CacheRead { offset, .. } => *offset as usize,
            _ => 0,
        };
        if at == footer && misread == 0 {
            misread += 1;
            let mut saved = vec![0; BLOCK_BYTES];
            saved.swap_with_slice(&mut rig.medium[footer..footer + BLOCK_BYTES]);
            rig.perform(action);
            rig.medium[footer..footer + BLOCK_BYTES].copy_from_slice(&saved);
        } else {
            rig.perform(action);
        }
    }
    assert_eq!(misread, 1);
    // What it holds is known, so that whatever of it is invalidated is recorded.
    assert_eq!(lines_of(&mut rig, 1), LINES_PER_SEGMENT as usize);
}

#[test]
fn cache_whose_superblock_of_a_start_is_lost_begins_anew() {
    let mut rig = shared_by_two();
    let places = CACHE_SUPERBLOCK_BLOCKS.map(|block| block as usize * BLOCK_BYTES);
    let superblocks = places.map(|at| rig.medium[at..at + BLOCK_BYTES].to_vec());
    rig.close();
    rig.restart();
    for line in 0..LINES_PER_SEGMENT {
        rig.fill_numbered(3, line, 9, 1000 + line);
        rig.run();
    }
    rig.close();
    for (at, superblock) in places.iter().zip(superblocks) {
        rig.medium[*at..at + BLOCK_BYTES].copy_from_slice(&superblock);
    }
    rig.restart();
    // A segment that was sealed after it would be found at the start after this one.
    assert_eq!(rig.cache.stats().warm_lines, 0);
}

/// More long ranges at once than are kept apart: what lies between two of them is forgotten as well. It was not
/// invalidated, so nothing was recorded of it; when it is, a restart must not bring it back.
#[test]
fn cache_brings_nothing_back_that_was_forgotten_between_two_ranges() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(1000..1000 + LINES_PER_SEGMENT);
    let (line, blocks) = (1030, 2000);
    let first = line * 4;
    for range in 0..1023 {
        let far = BlockKey::new(1, 1_000_000 + range * 2 * blocks);
        rig.cache.invalidate(far, blocks);
    }
    rig.cache
        .invalidate(BlockKey::new(1, first - blocks), blocks);
    rig.cache.invalidate(BlockKey::new(1, first + 4), blocks);
    while rig.cache.is_forgetting() {
        rig.run();
    }
    rig.cache.barrier();
    rig.run();
    assert_eq!(rig.cache.probe(key(line)), Tier::Absent, "the gap went too");
    // Now it is overwritten in the backend, and destage waits for the cache before it moves the tail.
    rig.cache.invalidate(key(line), 4);
    let barrier = rig.cache.barrier();
    rig.run();
    assert!(rig.cache.persisted() >= barrier);
    rig.close();
    rig.restart();
    assert_eq!(rig.byte(line, 0), None, "what was overwritten is back");
}
