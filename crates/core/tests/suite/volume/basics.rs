//! A volume agrees with plain memory, and refuses what it must.

use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{
    Completion, Extent, ExtentKind, ExtentState, Nanos, Reply, Request, RequestId, SectorRange,
};
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_core::volume::{Event, Persist, State, Trouble};
use hdcs_kit::volume::{BYTES, World};

fn random_range(random: &mut fastrand::Rng) -> SectorRange {
    let sectors = (BYTES / SECTOR_BYTES) as u64;
    let count = if random.u8(0..10) == 0 {
        random.u64(1..=1024)
    } else {
        random.u64(1..=32)
    };
    let start = if random.bool() {
        random.u64(0..256)
    } else {
        random.u64(0..sectors - count)
    };
    SectorRange::new(start, count)
}

fn agrees_with_memory(persist: Persist, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut world = World::new(persist);
    let mut model = vec![0u8; BYTES];
    for step in 0..6000u32 {
        let range = random_range(&mut random);
        let bytes = range.byte_offset() as usize..range.byte_offset() as usize + range.bytes();
        match random.u8(0..100) {
            0..50 => {
                let content: Vec<u8> = (0..range.bytes())
                    .map(|i| (step as usize + i / 512) as u8)
                    .collect();
                world.write(range.start, &content);
                model[bytes].copy_from_slice(&content);
            }
            50..58 => {
                world.ask(Request::Discard { range, fua: false });
                model[bytes].fill(0);
            }
            58..62 => {
                world.ask(Request::WriteZeroes {
                    range,
                    fua: true,
                    no_hole: random.bool(),
                });
                model[bytes].fill(0);
            }
            62..90 => assert!(*world.read(range) == model[bytes], "step {step}"),
            90..95 => drop(world.ask(Request::Flush)),
            95..97 => drop(world.ask(Request::Promote { range })),
            97 => world.step(Event::DestageAll),
            _ if random.u8(0..4) > 0 => {}
            _ => {
                let destage = random.bool();
                world.close(destage);
                if destage {
                    assert!(
                        world.backend == model,
                        "step {step}: the backend holds everything"
                    );
                }
                world.reopen();
            }
        }
    }
    world.close(true);
    assert!(world.backend == model);
    drop((world.volume, world.replies, world.cache));
    assert_eq!(
        world.pool.free_bytes(),
        world.pool.total_bytes(),
        "every buffer came back"
    );
}

#[test]
fn volume_agrees_with_memory_on_write() {
    agrees_with_memory(Persist::OnWrite, 1);
}

#[test]
fn volume_agrees_with_memory_on_flush() {
    agrees_with_memory(Persist::OnFlush, 2);
}

#[test]
fn volume_agrees_with_memory_auto() {
    agrees_with_memory(Persist::Auto, 3);
}

#[test]
fn volume_shows_that_its_log_cannot_be_read_until_destage_has_what_it_needs() {
    let mut world = World::new(Persist::OnWrite);
    world.write(8, &[1; 4096]);
    // Memory has nothing of it any more.
    world.reopen();
    world.log_mute = true;
    world.step(Event::DestageAll);
    let trouble = |world: &World| world.volume.trouble().map(|(trouble, _)| trouble);
    let pass = |world: &mut World| {
        for _ in 0..100 {
            world.now = world.now.plus(Nanos::from_millis(100));
            world.step(Event::Poll);
            if world.log_mute {
                assert_eq!(trouble(world), Some(Trouble::LogUnreadable));
                assert_eq!(world.volume.state(), State::Degraded);
            }
        }
    };
    pass(&mut world);
    world.log_mute = false;
    pass(&mut world);
    assert_eq!(
        (trouble(&world), world.volume.state()),
        (None, State::Healthy)
    );
    assert_eq!(world.backend[4096..8192], [1; 4096]);
}

#[test]
fn volume_extents_tell_dirty_from_cold() {
    let mut world = World::new(Persist::OnWrite);
    world.write(8, &[1; 4096]);
    let range = SectorRange::new(0, 64);
    let reply = world.ask(Request::Extents {
        range,
        kind: ExtentKind::Cache,
    });
    let Reply::Extents(extents) = reply else {
        panic!("not extents")
    };
    let cold = |range| Extent {
        range,
        state: ExtentState::Cold,
    };
    let dirty = Extent {
        range: SectorRange::new(8, 8),
        state: ExtentState::Dirty,
    };
    let expected = [
        cold(SectorRange::new(0, 8)),
        dirty,
        cold(SectorRange::new(16, 48)),
    ];
    assert_eq!(extents, expected);
}

#[test]
fn destage_joins_only_so_many_writes() {
    let mut world = World::new(Persist::OnWrite);
    let mark = |sector: usize| [(sector % 251) as u8 + 1; SECTOR_BYTES];
    for sector in 0..300 {
        world.write(sector as u64, &mark(sector));
    }
    assert_eq!(world.backend_writes, 0);
    world.step(Event::DestageAll);
    for _ in 0..100 {
        world.now = world.now.plus(Nanos::from_millis(10));
        world.step(Event::Poll);
    }
    assert_eq!(world.backend_writes, 2, "256 and the rest");
    for (sector, found) in world.backend.chunks(SECTOR_BYTES).take(300).enumerate() {
        assert_eq!(found, mark(sector), "sector {sector}");
    }
}

#[test]
fn volume_extents_of_what_only_the_log_has() {
    let mut world = World::new(Persist::OnWrite);
    world.write(8, &[1; 4096]);
    for (start, no_hole) in [(16, true), (24, false)] {
        let range = SectorRange::new(start, 8);
        world.ask(Request::WriteZeroes {
            range,
            no_hole,
            fua: false,
        });
    }
    let reply = world.ask(Request::Extents {
        range: SectorRange::new(8, 24),
        kind: ExtentKind::Allocation,
    });
    let Reply::Extents(extents) = reply else {
        panic!("not extents")
    };
    let states: Vec<_> = extents.iter().map(|extent| extent.state).collect();
    let all = [ExtentState::Data, ExtentState::Zero, ExtentState::Hole];
    assert_eq!(states, all);
}

#[test]
fn volume_refuses_what_is_outside() {
    let mut world = World::new(Persist::OnWrite);
    let sectors = (BYTES / SECTOR_BYTES) as u64;
    for range in [
        SectorRange::new(sectors, 1),
        SectorRange::new(sectors - 1, 2),
        SectorRange::new(0, 0),
        SectorRange::new(u64::MAX, 2),
        SectorRange::new(0, 4096),
    ] {
        world.step(Event::Request {
            id: RequestId(1),
            request: Request::Read { range },
        });
        let (_, result) = world.replies.pop().unwrap();
        assert_eq!(
            result.unwrap_err(),
            hdcs_core::base::error::RequestError::BadRange,
            "{range:?}"
        );
    }
}

/// What a crash took from memory is destaged by reading the log in chunks, not entry by entry; and
/// what most was overwritten of is not read in vain.
#[test]
fn volume_destages_a_replayed_log_in_few_reads() {
    for (blocks, reads_max) in [(512u64, 24), (8, 64)] {
        let mut world = World::new(Persist::OnWrite);
        let mut random = fastrand::Rng::with_seed(blocks);
        for round in 0..400u32 {
            let block = if blocks == 512 {
                // Every second block, so that nothing is merged.
                u64::from(round * 2 % 512)
            } else {
                random.u64(..blocks) * 2
            };
            world.write(block * 8, &[round as u8; 4096]);
        }
        let expected: Vec<u8> = (0..512)
            .flat_map(|block| world.read(SectorRange::new(block * 8, 8)).to_vec())
            .collect();
        world.reopen();
        world.log_reads = 0;
        world.close(true);
        assert!(world.backend[..expected.len()] == expected[..]);
        assert!(
            world.log_reads <= reads_max,
            "{} reads of the log for {blocks} blocks",
            world.log_reads
        );
    }
}

/// A flush of each write makes a generation of each, unless the backend shows nothing before it is
/// flushed itself.
#[test]
fn volume_flushes_an_atomic_backend_once_for_many_sync_points() {
    for (atomic, flushes) in [(false, 60), (true, 1)] {
        let mut world = World::new(Persist::OnFlush);
        world.config.backend_atomic = atomic;
        world.reopen();
        let mut model = vec![0u8; BYTES];
        for round in 0..60u8 {
            // Some are overwritten past sync points: the last one is what counts.
            let at = usize::from(round % 23) * 4096;
            model[at..at + 4096].fill(round + 1);
            world.write(at as u64 / 512, &[round + 1; 4096]);
            world.ask(Request::Flush);
        }
        assert_eq!(world.backend_flushes, 0, "nothing is old yet");
        world.close(true);
        assert_eq!(world.backend_flushes, flushes, "atomic: {atomic}");
        assert!(world.backend == model);
        assert!(world.volume.backend_is_flushed());
    }
}

/// A generation takes a part of the log at most, sync points or not.
#[test]
fn volume_destages_to_an_atomic_backend_in_bounded_generations() {
    let mut world = World::new(Persist::OnFlush);
    world.config.backend_atomic = true;
    world.reopen();
    for round in 0..200u64 {
        world.write(round % 100 * 64, &vec![round as u8; 32768]);
        world.ask(Request::Flush);
    }
    world.close(true);
    let (eighth, written) = (world.config.log_bytes / 8, 200 * 32768);
    let fewest = written / eighth;
    assert!(
        (fewest..fewest + 20).contains(&(world.backend_flushes as u64)),
        "{} flushes, at least {fewest}",
        world.backend_flushes
    );
}

/// A block that is overwritten all the time is left out again and again, but not for longer than the
/// age allows.
#[test]
fn volume_destages_a_hot_block_in_time_and_seldom() {
    let mut world = World::new(Persist::OnWrite);
    let mut random = fastrand::Rng::with_seed(3);
    let stamp = |now: Nanos| now.0.to_le_bytes();
    let mut destaged = (0, 0);
    for round in 0..1500u64 {
        world.now = world.now.plus(Nanos::from_millis(24));
        let now = world.now;
        let mut data = [7; 4096];
        data[..8].copy_from_slice(&stamp(now));
        world.write(0, &data);
        for _ in 0..96 {
            world.write(random.u64(8..1024) * 8, &[round as u8; 4096]);
        }
        let held = u64::from_le_bytes(world.backend[..8].try_into().unwrap());
        if held != destaged.1 {
            destaged = (destaged.0 + 1, held);
        }
        let age = Nanos(now.0 - held);
        assert!(
            held == 0 && round < 250 || age <= world.config.dirty_age_max,
            "after {round} writes the backend is behind by {age:?}"
        );
        // The first write that the backend lacks came with the round after.
        let told = world
            .volume
            .stats(now)
            .dirty_age
            .plus(Nanos::from_millis(50));
        assert!(
            held == 0 || age <= told,
            "it is said to be behind by {told:?}, and is by {age:?}"
        );
    }
    // Of 1500 writes of it.
    assert!(
        (5..300).contains(&destaged.0),
        "destaged {} times",
        destaged.0
    );
}

/// What lies side by side in the volume and far apart in the log goes to the backend in one write.
#[test]
fn volume_destages_neighbours_together_however_far_apart_they_were_written() {
    let mut world = World::new(Persist::OnWrite);
    let mut random = fastrand::Rng::with_seed(4);
    let mut model = vec![0u8; BYTES];
    let blocks = BYTES / 4096;
    for _ in 0..3 {
        let mut order: Vec<usize> = (0..blocks).collect();
        random.shuffle(&mut order);
        for block in order {
            let data = [random.u8(1..); 4096];
            world.write(block as u64 * 8, &data);
            model[block * 4096..][..4096].copy_from_slice(&data);
        }
    }
    world.step(Event::DestageAll);
    world.close(true);
    assert!(world.backend == model, "the last write of each block won");
    let destaged_blocks = world.volume.stats(world.now).destaged_bytes / 4096;
    assert!(
        world.backend_writes * 4 < destaged_blocks * 3,
        "{} writes for {destaged_blocks} blocks",
        world.backend_writes,
    );
}

/// A backend that is silent, and then refuses, is away since it fell silent.
#[test]
fn volume_tells_since_when_the_backend_is_away() {
    let mut world = World::new(Persist::OnWrite);
    world.backend_silent = Some(Vec::new());
    world.write(0, &[1; 4096]);
    world.step(Event::DestageAll);
    let away = world.now;
    world.now = away.plus(Nanos::from_millis(10_000));
    world.step(Event::Poll);
    let (trouble, since) = world.volume.trouble().expect("it does not answer");
    assert_eq!(trouble, Trouble::BackendSilent);
    assert!(since <= away);
    let unanswered = world.backend_silent.replace(Vec::new()).expect("silent");
    for token in unanswered {
        let result = Err(IoError::Unreachable);
        world.step(Event::Completed(Completion { token, result }));
    }
    let refused = (Trouble::BackendWrites(IoError::Unreachable), since);
    assert_eq!(world.volume.trouble(), Some(refused));
}

#[test]
fn volume_hands_one_cached_block_to_more_readers_than_16_bits_can_count() {
    let mut world = World::new(Persist::OnWrite);
    world.backend[..4096].fill(9);
    let block = SectorRange::new(0, 8);
    drop(world.read(block));
    let fetched = world.backend_reads.len();
    let held: Vec<_> = (0..70_000)
        .map(|_| world.read(SectorRange::new(3, 1)))
        .collect();
    assert!(held.iter().all(|data| data[..] == [9; 512]));
    assert_eq!(world.backend_reads.len(), fetched, "all are hits");
    // What is held is not what others write and read.
    world.write(0, &[4; 4096]);
    assert_eq!(world.read(block)[..], [4; 4096]);
    assert!(held.iter().all(|data| data[..] == [9; 512]));
    drop(held);
    assert_eq!(world.read(block)[..], [4; 4096]);
}
