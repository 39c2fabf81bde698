//! The read cache case by case, on a device that does what it is told.

use std::sync::Arc;

use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::io::{Action, BlockKey, Nanos};
use hdcs_core::base::limits::{BLOCK_BYTES, CACHE_INVALIDATIONS_MAX};
use hdcs_core::cache::{
    CacheConfig, CacheEvent, Corrupt, FillMarks, Lookup, PinRefused, ReadCache, SsdConfig,
    SsdFailure, SsdState, Tier, Tiering,
};
use hdcs_core::format::{CACHE_HEADER_BLOCKS, block_checksum};
use hdcs_kit::cache::Rig;

pub(super) const REGION: usize = 16 << 20;
pub(super) const LINES_PER_SEGMENT: u64 = 63;

pub(super) fn is_write(action: &Action) -> bool {
    matches!(action, Action::CacheWrite { .. })
}

/// A write of superblocks.
fn is_root(action: &Action) -> bool {
    matches!(action, Action::CacheWrite { offset, .. } if *offset < CACHE_HEADER_BLOCKS * BLOCK_BYTES as u64)
}

/// A write of a whole segment.
fn is_segment(action: &Action) -> bool {
    matches!(action, Action::CacheWrite { data, .. } if data[0].len() == 1 << 20)
}

pub(super) fn key(line: u64) -> BlockKey {
    hdcs_kit::cache::key(1, line)
}

#[test]
fn cache_serves_lines_from_memory_and_medium() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..100);
    for line in 0..100 {
        for block in 0..4 {
            assert_eq!(rig.byte(line, block), Some(Ok((line + block) as u8)));
        }
    }
    assert_eq!(rig.byte(100, 0), None);
    assert_eq!(rig.cache.stats().filled_lines, 100);
    assert_eq!(rig.cache.stats().ssd_used_lines, 100);
}

#[test]
fn cache_forgets_in_dram_what_changes_elsewhere_and_nothing_else() {
    let mut rig = Rig::new(REGION);
    rig.config.dram_blocks = 64;
    rig.restart();
    rig.fill_lines(0..4);
    let (mine, other) = (key(50), hdcs_kit::cache::key(2, 50));
    for block in [mine, other] {
        rig.cache.fill_block(block, &[7; BLOCK_BYTES]);
        assert_eq!(rig.cache.probe(block), Tier::Dram);
    }
    rig.cache.forget_in_dram(1);
    rig.run();
    assert_eq!(rig.cache.probe(mine), Tier::Absent);
    assert_eq!(rig.cache.probe(other), Tier::Dram);
    assert_eq!(rig.present(0..4), 4);
    // What comes after is found again.
    rig.cache.fill_block(mine, &[8; BLOCK_BYTES]);
    assert_eq!(rig.cache.probe(mine), Tier::Dram);
}

#[test]
fn cache_drops_nothing_while_the_ssd_is_free() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..12 * LINES_PER_SEGMENT);
    assert_eq!(
        rig.present(0..12 * LINES_PER_SEGMENT),
        12 * LINES_PER_SEGMENT as usize
    );
    rig.fill_lines(1000..1000 + 20 * LINES_PER_SEGMENT);
    assert!(rig.cache.stats().ssd_evicted_lines > 0);
}

#[test]
fn cache_is_emptied_to_its_health_mark_ahead_of_demand() {
    let mut rig = Rig::new(REGION);
    rig.cache.set_fill_marks(FillMarks {
        ratio_max: 80,
        ratio_health: 40,
        ..FillMarks::default()
    });
    let lines = rig.cache.stats().ssd_lines;
    rig.fill_lines(0..lines * 7 / 10);
    assert_eq!(rig.cache.stats().ssd_evicted_lines, 0, "below the mark");
    rig.fill_lines(1000..1000 + lines * 2 / 10);
    rig.run();
    let used = rig.cache.stats().ssd_used_lines;
    assert!(used <= lines * 6 / 10, "{used} of {lines} lines");
    // A burst finds room at once.
    let evicted = rig.cache.stats().ssd_evicted_lines;
    rig.fill_lines(2000..2000 + lines * 2 / 10);
    assert_eq!(rig.cache.stats().ssd_evicted_lines, evicted);
}

#[test]
fn cache_keeps_used_lines_through_a_scan() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..60);
    for line in 0..60 {
        rig.byte(line, 0);
    }
    rig.fill_lines(1000..3000);
    // Half of a segment is kept at most.
    assert!(rig.present(0..60) >= 31, "{} kept", rig.present(0..60));
    assert!(rig.cache.stats().ssd_used_lines <= rig.cache.stats().ssd_lines);
}

#[test]
fn cache_by_benefit_keeps_what_is_dear_through_a_cheap_scan() {
    for (tiering, kept) in [(Tiering::Recency, 0..10), (Tiering::Benefit, 150..200)] {
        let mut rig = Rig::new(REGION);
        rig.cache.set_tiering(tiering);
        rig.costs(Nanos::from_millis(20), Nanos::from_micros(300));
        rig.fill_neighbour(0..600);
        for line in 0..200 {
            rig.fill_lines(line..line + 1);
            rig.fill_neighbour(1000 + 3 * line..1003 + 3 * line);
        }
        rig.fill_neighbour(2000..4000);
        let found = rig.present(0..200);
        assert!(kept.contains(&found), "{tiering:?}: {found} of 200");
    }
}

#[test]
fn cache_by_benefit_of_equal_volumes_is_what_it_is_by_recency() {
    let [recency, benefit] = [Tiering::Recency, Tiering::Benefit].map(|tiering| {
        let mut rig = Rig::new(REGION);
        rig.cache.set_tiering(tiering);
        rig.costs(Nanos::from_millis(3), Nanos::from_millis(4));
        for line in 0..700 {
            rig.fill_lines(line..line + 1);
            rig.fill_neighbour(2 * line..2 * line + 2);
            rig.byte(line / 2, 0);
        }
        rig.medium
    });
    assert!(recency == benefit, "the same lines are in the same places");
}

#[test]
fn cache_takes_nothing_that_saves_nothing_while_it_is_full_of_what_is_dear() {
    let mut rig = Rig::new(REGION);
    rig.costs(Nanos::from_millis(20), Nanos::from_micros(90));
    for _ in 0..100 {
        rig.cache
            .note_ssd_hit(BlockKey::new(1, 0), Nanos::from_micros(100));
    }
    assert!(rig.cache.is_worth_taking(2), "there is room");
    rig.fill_lines(0..2000);
    assert!(rig.cache.is_worth_taking(1) && !rig.cache.is_worth_taking(2));
    // Whoever fills it all the same has it taken.
    let filled = rig.cache.stats().filled_lines;
    rig.fill_neighbour(0..10);
    assert_eq!(rig.cache.stats().filled_lines, filled + 10);
    rig.cache.set_tiering(Tiering::Recency);
    assert!(rig.cache.is_worth_taking(2));
}

#[test]
fn cache_is_warm_after_a_clean_stop_and_cold_for_another_identity() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..200);
    rig.close();
    rig.restart();
    assert_eq!(rig.cache.stats().warm_lines, 200);
    for line in 0..200 {
        assert_eq!(rig.byte(line, 3), Some(Ok((line + 3) as u8)));
    }
    rig.config.ssd.as_mut().unwrap().uuid = [2; 16];
    rig.restart();
    assert_eq!(rig.present(0..200), 0);
    rig.config.ssd.as_mut().unwrap().uuid = [1; 16];
    rig.restart();
    assert_eq!(
        rig.present(0..200),
        0,
        "the identity came back, the content not"
    );
}

#[test]
fn cache_shares_lines_with_the_same_bytes() {
    let mut rig = Rig::new(REGION);
    let fill = |rig: &mut Rig, address: u64| {
        rig.put(2, address, |data| data.fill(9));
        rig.run();
    };
    fill(&mut rig, 0);
    fill(&mut rig, 5);
    rig.fill_lines(0..LINES_PER_SEGMENT);
    fill(&mut rig, 7);
    assert_eq!(rig.cache.stats().shared_lines, 2);
    assert_eq!(rig.cache.stats().filled_lines, LINES_PER_SEGMENT + 1);
    rig.cache.invalidate(BlockKey::new(2, 0), 1);
    assert_eq!(rig.cache.probe(BlockKey::new(2, 0)), Tier::Absent);
    for address in [5, 7] {
        assert_eq!(rig.cache.probe(BlockKey::new(2, address * 4)), Tier::Ssd);
    }
    rig.cache.forget_volume(2);
    assert_eq!(rig.cache.probe(BlockKey::new(2, 28)), Tier::Absent);
    assert_eq!(
        rig.present(0..LINES_PER_SEGMENT),
        LINES_PER_SEGMENT as usize
    );
}

#[test]
fn cache_does_not_share_lines_that_only_collide() {
    // The generator polynomial of CRC-32C, which every checksum ignores.
    const IGNORED: [u8; 5] = [0xf1, 0x76, 0xec, 0x05, 0x01];
    let line = |pool: &Pool, collide: bool| -> Buf {
        let mut data = pool.alloc(4 * BLOCK_BYTES).unwrap();
        data.fill(3);
        for (byte, ignored) in data[200..].iter_mut().zip(IGNORED) {
            *byte ^= if collide { ignored } else { 0 };
        }
        data.freeze()
    };
    for segments_between in [0, 1] {
        let mut rig = Rig::new(REGION);
        let (one, two) = (line(&rig.pool, false), line(&rig.pool, true));
        assert!(one[..] != two[..]);
        assert_eq!(block_checksum(&one[..4096]), block_checksum(&two[..4096]));
        rig.cache.fill(BlockKey::new(2, 0), &one);
        rig.fill_lines(0..segments_between * LINES_PER_SEGMENT);
        rig.cache.fill(BlockKey::new(2, 4), &two);
        rig.run();
        assert_eq!(rig.cache.stats().shared_lines, 0);
        for (block, expected) in [(0, &one), (4, &two)] {
            match rig.cache.lookup(BlockKey::new(2, block)) {
                Lookup::Dram(found) => assert_eq!(found[..], expected[..4096]),
                Lookup::Ssd(read) => {
                    let at = read.offset as usize;
                    assert_eq!(rig.medium[at..at + 4096], expected[..4096]);
                    let mut data = rig.medium[at..at + 4096].to_vec();
                    rig.cache.finish_ssd_read(read, Some(&mut data)).unwrap();
                }
                Lookup::Miss => panic!("block {block} is not there"),
            }
        }
    }
}

#[test]
fn cache_reports_rot_once_and_drops_the_line() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..LINES_PER_SEGMENT);
    let Lookup::Ssd(read) = rig.cache.lookup(key(5)) else {
        panic!("line 5 is on the medium");
    };
    let at = read.offset as usize;
    let mut data = rig.medium[at..at + BLOCK_BYTES].to_vec();
    data[77] ^= 16;
    assert_eq!(
        rig.cache.finish_ssd_read(read, Some(&mut data)),
        Err(Corrupt)
    );
    assert_eq!(rig.byte(5, 0), None);
    assert_eq!(rig.cache.stats().corrupt_blocks, 1);
}

#[test]
fn cache_permission_survives_invalidation_and_eviction() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..LINES_PER_SEGMENT);
    let Lookup::Ssd(read) = rig.cache.lookup(key(5)) else {
        panic!("line 5 is on the medium");
    };
    rig.cache.invalidate(key(5), 4);
    rig.fill_lines(1000..3000);
    let at = read.offset as usize;
    let mut data = rig.medium[at..at + BLOCK_BYTES].to_vec();
    assert_eq!(data[100], 5, "the segment was reused under a reader");
    assert!(rig.cache.finish_ssd_read(read, Some(&mut data)).is_ok());
    rig.fill_lines(4000..5500);
    assert_ne!(rig.medium[at + 100], 5, "the segment is reused afterwards");
}

#[test]
fn cache_segment_written_after_the_invalidation_does_not_bring_it_back() {
    let mut rig = Rig::new(REGION);
    for line in 0..LINES_PER_SEGMENT {
        rig.fill_with(line, |block| (line + block) as u8);
    }
    rig.event(CacheEvent::Poll);
    let segment = rig.actions.iter().position(is_segment).unwrap();
    let late = rig.actions.remove(segment);
    rig.cache.invalidate(key(7), 1);
    let barrier = rig.cache.barrier();
    assert!(rig.cache.persisted() < barrier);
    rig.run();
    assert!(rig.cache.persisted() >= barrier);
    rig.perform(late);
    rig.restart();
    assert_eq!(
        rig.present(0..LINES_PER_SEGMENT),
        LINES_PER_SEGMENT as usize - 1
    );
    assert_eq!(rig.byte(7, 0), None);
}

#[test]
fn cache_with_a_rotten_journal_starts_cold() {
    // Blocks of the journal: all that was written, and the first that was not.
    for block in 0..4 {
        let mut rig = Rig::new(REGION);
        rig.fill_lines(0..LINES_PER_SEGMENT);
        for line in 0..3 {
            rig.cache.invalidate(key(line), 4);
            rig.cache.barrier();
            rig.run();
        }
        // The first epoch fills the second half of the journal.
        rig.medium[(CACHE_HEADER_BLOCKS as usize + 66 + block) * BLOCK_BYTES + 50] ^= 1;
        rig.restart();
        assert_eq!(rig.present(0..LINES_PER_SEGMENT), 0, "block {block}");
    }
}

#[test]
fn cache_invalidated_while_it_is_compared_is_not_shared() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..LINES_PER_SEGMENT);
    let mut data = rig.pool.alloc(4 * BLOCK_BYTES).unwrap();
    for (index, block) in data.chunks_exact_mut(BLOCK_BYTES).enumerate() {
        block.fill(5 + index as u8);
        block[..8].copy_from_slice(&5u64.to_le_bytes());
    }
    rig.cache.fill(BlockKey::new(2, 0), &data.freeze());
    rig.event(CacheEvent::Poll);
    rig.cache.invalidate(BlockKey::new(2, 3), 1);
    rig.run();
    assert_eq!(rig.cache.stats().shared_lines, 0);
    assert_eq!(rig.cache.probe(BlockKey::new(2, 0)), Tier::Absent);
}

#[test]
fn cache_that_never_held_it_waits_for_no_barrier() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..10);
    rig.cache.invalidate(key(5), 4);
    rig.cache.invalidate(key(500), 4000);
    let barrier = rig.cache.barrier();
    assert!(
        rig.cache.persisted() >= barrier,
        "nothing is on the medium yet"
    );
    assert_eq!(rig.present(0..10), 9);
}

#[test]
fn cache_checkpoints_its_journal_and_stays_warm() {
    let mut rig = Rig::new(REGION);
    let lines = 10 * LINES_PER_SEGMENT;
    rig.fill_lines(0..lines);
    let mut roots = 0;
    for line in 0..lines / 2 {
        rig.cache.invalidate(key(2 * line), 4);
        let barrier = rig.cache.barrier();
        rig.event(CacheEvent::Poll);
        while !rig.actions.is_empty() {
            let action = rig.actions.remove(0);
            roots += u32::from(is_root(&action));
            rig.perform(action);
        }
        assert!(rig.cache.persisted() >= barrier);
        if line % 50 == 0 {
            rig.restart();
            let present = (2 * (line + 1)..lines).chain((0..line).map(|line| 2 * line + 1));
            assert!(present.clone().all(|line| rig.present(line..line + 1) == 1));
            let gone = (0..=line).map(|line| 2 * line);
            assert!(gone.clone().all(|line| rig.present(line..line + 1) == 0));
        }
    }
    assert!(roots >= 4, "{roots} superblock writes");
}

#[test]
fn cache_with_too_many_invalidations_makes_the_next_start_cold_instead() {
    let mut rig = Rig::new(REGION);
    let lines = 4 * LINES_PER_SEGMENT;
    rig.fill_lines(0..lines);
    let mut actions = Vec::new();
    for _ in 0..=CACHE_INVALIDATIONS_MAX / 100 {
        for line in 0..lines / 2 {
            rig.cache.invalidate(key(2 * line), 4);
        }
        // Refill what was dropped, so that there is always something to drop.
        for line in 0..lines / 2 {
            rig.fill_with(2 * line, |block| block as u8);
        }
        rig.cache.step(Nanos(0), CacheEvent::Poll, &mut actions);
        let (root, rest): (Vec<_>, Vec<_>) = actions
            .drain(..)
            .partition(|action| matches!(action, Action::CacheWrite { durable: true, .. }));
        // The journal hangs; the rest goes on.
        for action in rest {
            rig.perform(action);
        }
        rig.actions.extend(root);
        rig.cache.check_invariants();
    }
    let barrier = rig.cache.barrier();
    rig.run();
    assert!(rig.cache.persisted() >= barrier);
    assert!(rig.present(0..lines) > 0, "it goes on serving");
    rig.restart();
    assert_eq!(rig.present(1..2), 0, "the next start is cold");
}

#[test]
fn cache_goes_offline_and_voids_its_superblocks() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..LINES_PER_SEGMENT);
    rig.fails = |action| is_write(action) && !is_root(action);
    rig.cache.invalidate(key(3), 4);
    let barrier = rig.cache.barrier();
    rig.run();
    assert_eq!(rig.cache.stats().ssd_state, SsdState::Offline);
    assert!(rig.cache.is_ready());
    assert!(!rig.cache.must_reset() && rig.cache.persisted() >= barrier);
    assert_eq!(rig.byte(4, 0), None, "everything misses");
    rig.fails = |_| false;
    rig.restart();
    assert_eq!(rig.cache.stats().ssd_state, SsdState::Online);
    assert_eq!(rig.present(0..LINES_PER_SEGMENT), 0);
}

#[test]
fn cache_that_cannot_void_its_superblocks_asks_for_a_new_identity() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..LINES_PER_SEGMENT);
    rig.fails = |_| true;
    rig.cache.invalidate(key(3), 4);
    let barrier = rig.cache.barrier();
    rig.run();
    assert!(rig.cache.must_reset());
    assert!(
        rig.cache.persisted() < barrier,
        "line 3 could still come back"
    );
    rig.cache.invalidate(key(4), 4);
    let later = rig.cache.barrier();
    rig.cache.reset_recorded();
    assert!(!rig.cache.must_reset() && rig.cache.persisted() >= later);
    rig.close();
}

#[test]
fn cache_failed_segment_write_costs_its_lines_only() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..LINES_PER_SEGMENT);
    rig.fails = is_segment;
    rig.fill_lines(100..100 + LINES_PER_SEGMENT);
    rig.fails = |_| false;
    rig.fill_lines(200..200 + LINES_PER_SEGMENT);
    assert_eq!(rig.present(100..200), 0);
    assert_eq!(rig.cache.stats().device_errors, 1);
    rig.close();
    rig.restart();
    assert_eq!(rig.present(0..300), 2 * LINES_PER_SEGMENT as usize);
}

#[test]
fn cache_indexes_are_within_16_bytes_per_block() {
    let config = CacheConfig {
        dram_blocks: 1 << 14,
        ssd: Some(SsdConfig {
            bytes: 1 << 30,
            uuid: [1; 16],
            line_blocks: 4,
        }),
        ssd_answer_max: Nanos::from_millis(5_000),
    };
    let cache = ReadCache::new(config, Nanos(0), Pool::new(1 << 20), &mut Vec::new());
    let mut rig = Rig::new(REGION);
    rig.cache = cache;
    let stats = rig.cache.stats();
    // Offline, the index would be gone; it is made before the medium is read.
    let blocks = stats.dram_blocks + stats.ssd_lines * stats.line_blocks;
    assert!(stats.ssd_lines > 60_000);
    assert!(
        stats.index_bytes <= 16 * blocks,
        "{} bytes for {blocks} blocks",
        stats.index_bytes
    );
}

#[test]
fn cache_of_a_region_out_of_bounds_works_without_it() {
    for (bytes, line_blocks) in [(1 << 20, 4), (1 << 30, 3), (1 << 30, 1), (u64::MAX, 4)] {
        let ssd = SsdConfig {
            bytes,
            uuid: [1; 16],
            line_blocks,
        };
        let config = CacheConfig {
            dram_blocks: 10,
            ssd: Some(ssd),
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        let mut actions = Vec::new();
        let mut cache = ReadCache::new(config, Nanos(0), Pool::new(1 << 20), &mut actions);
        assert_eq!(cache.stats().ssd_state, SsdState::Off);
        assert!(actions.is_empty() && cache.is_ready());
        cache.fill_block(key(1), &[7; BLOCK_BYTES]);
        assert!(matches!(cache.lookup(key(1)), Lookup::Dram(_)));
        let barrier = cache.barrier();
        assert!(cache.persisted() >= barrier);
    }
}

#[test]
fn cache_whose_device_does_not_answer_is_given_up_and_comes_back_empty() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..LINES_PER_SEGMENT);
    rig.cache.invalidate(key(3), 4);
    let barrier = rig.cache.barrier();
    rig.event(CacheEvent::Poll);
    // The invalidation and a client's read are under way, and do not end.
    let Lookup::Ssd(permission) = rig.cache.lookup(key(4)) else {
        panic!("line 4 is on the medium");
    };
    let held = core::mem::take(&mut rig.actions);
    assert!(!held.is_empty());
    let deadline = rig.cache.next_wakeup().expect("the device owes an answer");
    assert_eq!(deadline, Nanos::from_millis(5_000));
    let mut now = Nanos(deadline.0 - 1);
    rig.cache.step(now, CacheEvent::Poll, &mut rig.actions);
    assert_eq!(rig.cache.stats().ssd_state, SsdState::Online);
    now = deadline;
    rig.cache.step(now, CacheEvent::Poll, &mut rig.actions);
    let stats = rig.cache.stats();
    assert_eq!(
        (stats.ssd_state, stats.ssd_failure, stats.ssd_since),
        (SsdState::Offline, Some(SsdFailure::Silent), now)
    );
    assert!(rig.actions.is_empty(), "nothing more is asked of it");
    assert!(rig.cache.must_reset() && rig.cache.persisted() < barrier);
    assert_eq!(rig.cache.next_wakeup(), None);
    rig.cache.reset_recorded();
    assert!(rig.cache.persisted() >= barrier, "destage goes on");
    // It answers after all: first what the cache asked, then what the client did.
    assert!(!rig.cache.can_readmit());
    for action in held {
        rig.perform(action);
    }
    assert!(!rig.cache.can_readmit(), "a read is under way");
    rig.cache.cancel_ssd_read(permission);
    assert!(rig.cache.can_readmit());
    rig.event(CacheEvent::Readmit { uuid: [2; 16] });
    rig.run();
    let stats = rig.cache.stats();
    assert_eq!(stats.ssd_state, SsdState::Online);
    assert_eq!((stats.ssd_failures, stats.ssd_readmissions), (1, 1));
    assert_eq!(stats.ssd_failure, None);
    assert_eq!(rig.present(0..LINES_PER_SEGMENT), 0, "nothing old counts");
    // Barriers go on where they were.
    rig.fill_lines(0..LINES_PER_SEGMENT);
    rig.cache.invalidate(key(5), 4);
    let later = rig.cache.barrier();
    assert!(later > barrier && rig.cache.persisted() < later);
    rig.run();
    assert!(rig.cache.persisted() >= later);
    rig.close();
}

#[test]
fn cache_whose_late_read_is_reported_by_a_volume_is_given_up() {
    let mut rig = Rig::new(REGION);
    rig.fill_lines(0..LINES_PER_SEGMENT);
    let Lookup::Ssd(permission) = rig.cache.lookup(key(4)) else {
        panic!("line 4 is on the medium");
    };
    rig.cache.ssd_read_is_late();
    rig.cache.ssd_read_is_late();
    assert_eq!(rig.cache.stats().ssd_failures, 1);
    assert!(rig.cache.must_reset());
    // A close does not wait for it.
    rig.cache.reset_recorded();
    rig.close();
    rig.cache.cancel_ssd_read(permission);
}

#[test]
fn cache_without_its_device_serves_memory_until_there_is_one() {
    let mut rig = Rig::new(REGION);
    let config = CacheConfig {
        dram_blocks: 64,
        ..rig.config.clone()
    };
    rig.cache = ReadCache::without_device(config, Arc::clone(&rig.pool));
    let stats = rig.cache.stats();
    assert_eq!(stats.ssd_failure, Some(SsdFailure::Absent));
    assert_eq!(stats.ssd_state, SsdState::Offline);
    assert!(rig.cache.is_ready() && rig.cache.can_readmit() && !rig.cache.must_reset());
    rig.cache.invalidate(key(3), 4);
    let barrier = rig.cache.barrier();
    assert!(rig.cache.persisted() >= barrier, "there is nothing to void");
    rig.fill_with(1, |_| 7);
    assert_eq!(rig.byte(1, 0), Some(Ok(7)));
    rig.event(CacheEvent::Readmit { uuid: [2; 16] });
    rig.run();
    assert_eq!(rig.cache.stats().ssd_state, SsdState::Online);
    rig.close();
}

#[test]
fn cache_has_room_only_for_what_its_writes_leave() {
    let mut rig = Rig::new(REGION);
    assert!(rig.cache.has_room(64));
    // With segments being written, the rest of the room is promised away piece by piece.
    rig.fill_with(0, |_| 1);
    let mut promised = 0;
    while rig.cache.has_room(64) {
        rig.cache.promise(64);
        promised += 64;
        assert!(promised < 10_000, "the room ends");
    }
    for line in 1..=promised / 4 {
        rig.promote(1, line, |data| {
            data.fill(line as u8);
            data[..8].copy_from_slice(&line.to_le_bytes());
        });
    }
    assert_eq!(rig.present(0..promised / 4), promised as usize / 4);
    rig.cache.end_promise(promised);
    rig.run();
    assert!(rig.cache.has_room(64));
}

#[test]
fn promoted_lines_stay_where_a_scan_of_new_ones_drives_itself_out() {
    // Lines that are read behind the scan of others fill all but the small stream's share.
    let full = || {
        let mut rig = Rig::new(REGION);
        let lines = rig.cache.stats().ssd_lines;
        for line in 0..3 * lines {
            rig.fill_lines(line..line + 1);
            rig.byte(line, 0);
        }
        rig
    };
    let lines = full().cache.stats().ssd_lines / 4;
    let asked = 50_000..50_000 + lines;
    let mut scanned = full();
    scanned.fill_lines(asked.clone());
    let left = scanned.present(asked.clone()) as u64;
    assert!(left < lines * 2 / 3, "{left} of {lines} lines");
    let mut promoted = full();
    for line in asked.clone() {
        promoted.promote(1, line, |data| {
            data.fill(7);
            data[..8].copy_from_slice(&line.to_le_bytes());
        });
        promoted.run();
    }
    assert_eq!(promoted.present(asked) as u64, lines);
}

/// Pin lines of volume 1.
fn pin(rig: &mut Rig, lines: std::ops::Range<u64>) -> Result<(), PinRefused> {
    rig.cache.pin(1, None, &[(lines.start * 4, lines.end * 4)])
}

#[test]
fn pinned_lines_stay_through_scans_of_many_times_the_tier() {
    let mut rig = Rig::new(REGION);
    let lines = rig.cache.stats().ssd_lines;
    let pinned = 300..300 + lines * 4 / 10;
    pin(&mut rig, pinned.clone()).unwrap();
    // Not in a row: each segment that takes them has others, too.
    for line in pinned.clone() {
        rig.fill_lines(line..line + 1);
        rig.fill_lines(10_000 + line..10_001 + line);
    }
    let mut others = 20_000;
    for round in 0..4 {
        rig.fill_lines(others..others + 2 * lines);
        let kept = rig.present(pinned.clone());
        assert_eq!(kept as u64, pinned.end - pinned.start, "round {round}");
        // What is not pinned is taken all the same.
        let fresh = others + 2 * lines - 100..others + 2 * lines;
        assert_eq!(rig.present(fresh), 100, "round {round}");
        others += 2 * lines;
    }
    assert_eq!(rig.cache.losses(), 0);
    for line in pinned.clone() {
        assert_eq!(rig.byte(line, 2), Some(Ok((line + 2) as u8)));
    }
    // An invalidation drops them as it does any others, and their room goes to others.
    rig.cache.invalidate(key(pinned.start), 40);
    assert_eq!(rig.present(pinned.start..pinned.start + 10), 0);
    // Without pins the same scans leave nothing of them.
    let mut rig = Rig::new(REGION);
    rig.fill_lines(pinned.clone());
    rig.fill_lines(20_000..20_000 + 2 * lines);
    assert_eq!(rig.present(pinned), 0);
}

#[test]
fn pinned_aliases_stay_with_their_bytes() {
    let mut rig = Rig::new(REGION);
    let lines = rig.cache.stats().ssd_lines;
    // The same bytes at three addresses of each four, of which the second and third are pinned.
    for line in 0..40 {
        for alias in [0, 1000, 2000] {
            rig.put(1, line + alias, |data| data.fill(line as u8 + 1));
            rig.run();
        }
    }
    assert!(rig.cache.stats().shared_lines >= 70);
    pin(&mut rig, 1000..1040).unwrap();
    rig.cache
        .pin(1, None, &[(4000, 4160), (8000, 8160)])
        .unwrap();
    rig.cache.invalidate(key(0), 10 * 4);
    rig.fill_lines(10_000..10_000 + 4 * lines);
    assert_eq!(rig.present(1000..1040), 40);
    assert_eq!(rig.present(2000..2040), 40);
    assert_eq!(rig.present(0..40), 0);
    assert_eq!(rig.cache.losses(), 0);
    assert_eq!(rig.byte(1020, 3), Some(Ok(21)));
    assert_eq!(rig.byte(2020, 0), Some(Ok(21)));
}

#[test]
fn pins_beyond_their_share_of_the_tier_are_refused_with_the_figures() {
    let mut rig = Rig::new(REGION);
    let max = rig.cache.stats().ssd_lines * 4 * 50 / 100;
    let most = max / 4;
    pin(&mut rig, 0..most).unwrap();
    let line_bytes = 4 * BLOCK_BYTES as u64;
    let refused = rig.cache.pin(2, None, &[(0, 5)]);
    let expected = PinRefused::TooMuch {
        asked_bytes: 2 * line_bytes,
        others_bytes: most * line_bytes,
        max_bytes: max * BLOCK_BYTES as u64,
    };
    assert_eq!(refused, Err(expected));
    assert!(pin(&mut rig, 0..most + 1).is_err(), "instead of its own");
    pin(&mut rig, 5..10).unwrap();
    rig.cache.pin(2, None, &[(0, 5)]).unwrap();
    rig.config.ssd = None;
    rig.restart();
    assert_eq!(pin(&mut rig, 0..1), Err(PinRefused::NoTier));
    assert_eq!(pin(&mut rig, 0..0), Ok(()));
}

#[test]
fn pins_of_all_of_the_tier_do_not_stop_it() {
    let mut rig = Rig::new(REGION);
    let lines = rig.cache.stats().ssd_lines;
    // A clone and what it inherited: twice half of the tier.
    rig.cache.pin(7, Some(1), &[(0, lines / 2 * 4)]).unwrap();
    rig.fill_lines(0..lines / 2);
    for line in 0..lines / 2 {
        rig.fill_numbered(7, line, (line % 200) as u8, line + 50_000);
    }
    // What is new is taken, and nothing goes on for ever: `run` ends.
    rig.fill_lines(10_000..10_000 + 2 * lines);
    assert!(rig.present(10_000..10_000 + 2 * lines) > 0);
    assert!(rig.cache.losses() > 0, "whoever pinned is told");
}
