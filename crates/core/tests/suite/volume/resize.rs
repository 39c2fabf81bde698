//! A volume becomes smaller while requests wait that reach beyond the new end, and grows over a log that holds what was
//! cut off.

use hdcs_core::base::buf::BufMut;
use hdcs_core::base::error::{IoError, RequestError};
use hdcs_core::base::io::{Action, BlockKey, Completion, Nanos, Request, RequestId, SectorRange};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::Tier;
use hdcs_core::format::LOG_HEADER_BLOCKS;
use hdcs_core::volume::{Cut, Event, Persist, VolumeConfig};
use hdcs_kit::volume::{BYTES, SSD, World};

const HALF: u64 = BYTES as u64 / 2;
/// Begins before the new end, and reaches beyond it.
const ACROSS: SectorRange = SectorRange::new(HALF / 512 - 8, 64);
const BEYOND: SectorRange = SectorRange::new(HALF / 512 + 800, 64);
const BEFORE: SectorRange = SectorRange::new(64, 64);

fn with_ssd() -> World {
    World::with(hdcs_kit::volume::config(Persist::OnWrite), Some(SSD))
}

/// All of the pool.
fn take_memory(world: &World) -> Vec<BufMut> {
    let mut taken = Vec::new();
    for bytes in [1 << 20, 64 << 10, 4096] {
        taken.extend(core::iter::from_fn(|| world.pool.alloc(bytes)));
    }
    taken
}

fn ask(world: &mut World, id: u64, request: Request) {
    world.step(Event::Request {
        id: RequestId(id),
        request,
    });
}

/// The answers by number: whether it was done, or why not.
fn answers(world: &mut World) -> Vec<(u64, Option<RequestError>)> {
    let replies = world.replies.drain(..);
    let mut answers: Vec<_> = replies.map(|(id, result)| (id.0, result.err())).collect();
    answers.sort_unstable_by_key(|answer| answer.0);
    answers
}

fn pass(world: &mut World) {
    for _ in 0..10 {
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
    }
}

#[test]
fn resize_refuses_reads_that_wait_for_memory_and_cuts_promotions() {
    let mut world = with_ssd();
    let taken = take_memory(&world);
    for (id, range) in [(1, ACROSS), (2, BEYOND), (3, BEFORE)] {
        ask(&mut world, id, Request::Read { range });
        ask(&mut world, 10 + id, Request::Promote { range });
    }
    assert!(world.replies.is_empty(), "there is no memory");
    world.step(Event::Resize { bytes: HALF });
    assert_eq!(world.volume.config().bytes, HALF);
    drop(taken);
    pass(&mut world);
    let refused = Some(RequestError::BadRange);
    let expected = [(1, refused), (2, refused), (3, None)];
    assert_eq!(answers(&mut world)[..3], expected);
    assert_eq!(world.volume.stats(world.now).requests_in_flight, 0);
}

#[test]
fn resize_refuses_a_read_whose_cached_copy_turns_out_bad_afterwards() {
    let mut world = with_ssd();
    let all = SectorRange::new(0, 2 * HALF / 512);
    world.ask(Request::Promote { range: all });
    // DRAM has few of them.
    let on_ssd = |&block: &u64| world.cache.probe(BlockKey::new(1, block)) == Tier::Ssd;
    let block = (HALF / 4096..2 * HALF / 4096)
        .find(on_ssd)
        .expect("it holds all");
    let range = SectorRange::new(block * 8, 8);
    let event = Event::Request {
        id: RequestId(1),
        request: Request::Read { range },
    };
    let actions = world.step_alone([event]);
    let [Action::CacheRead { token, .. }] = &actions[..] else {
        panic!("not from the SSD tier: {actions:?}");
    };
    world.step(Event::Resize { bytes: HALF });
    let completion = Completion {
        token: *token,
        result: Err(IoError::Failed),
    };
    world.step(Event::Completed(completion));
    assert_eq!(answers(&mut world), [(1, Some(RequestError::BadRange))]);
}

#[test]
fn resize_refuses_writes_that_wait_for_room_in_the_log() {
    let mut world = World::new(Persist::OnWrite);
    world.backend_silent = Some(Vec::new());
    let write = |world: &mut World, id, range: SectorRange| {
        let data = world.pool.alloc_for(range).expect("memory").freeze();
        let request = Request::Write {
            range,
            data,
            fua: false,
        };
        ask(world, id, request);
    };
    let mut id = 100;
    while world.volume.stats(world.now).requests_in_flight == 0 {
        write(&mut world, id, BEFORE);
        id += 1;
    }
    world.replies.clear();
    write(&mut world, 1, ACROSS);
    write(&mut world, 2, BEYOND);
    ask(
        &mut world,
        3,
        Request::Discard {
            range: BEYOND,
            fua: false,
        },
    );
    world.step(Event::Resize { bytes: HALF });
    assert_eq!(world.volume.config().bytes, HALF);
    let refused = Some(RequestError::BadRange);
    let expected = [(1, refused), (2, refused), (3, refused)];
    assert_eq!(answers(&mut world), expected, "at once");
    assert_eq!(
        world.volume.stats(world.now).requests_in_flight,
        1,
        "what lies before the end waits on"
    );
}

#[test]
fn resize_has_what_is_pinned_filled_again() {
    let mut world = with_ssd();
    let filled = |world: &World| {
        let is_there = |block| {
            let key = BlockKey::new(1, block);
            world
                .cache
                .is_promoted(key, BlockKey::new(1, BYTES as u64 / 4096))
        };
        (BEYOND.first_block()..BEYOND.first_block() + BEYOND.block_count()).all(is_there)
    };
    let wait = |world: &mut World| {
        for _ in 0..3000 {
            world.now = world.now.plus(Nanos::from_millis(1));
            world.step(Event::Poll);
        }
    };
    world.step(Event::Pin(vec![BEYOND]));
    wait(&mut world);
    assert!(filled(&world));
    world.step(Event::Resize { bytes: HALF });
    wait(&mut world);
    assert!(!filled(&world));
    world.step(Event::Resize {
        bytes: BYTES as u64,
    });
    wait(&mut world);
    assert!(filled(&world));
}

/// A volume of which half was cut while its log held what lies beyond, as a node leaves it that goes down before it
/// has destaged that.
fn cut_beside_its_log() -> World {
    let mut world = World::new(Persist::OnWrite);
    world.backend_silent = Some(Vec::new());
    for range in [BEFORE, ACROSS, BEYOND] {
        world.write(range.start, &vec![7; range.bytes()]);
    }
    world.config.bytes = HALF;
    world.reopen();
    world
}

#[test]
fn resize_waits_until_the_log_has_nothing_of_what_was_cut_off() {
    let mut world = cut_beside_its_log();
    for bytes in [2 * HALF, HALF + 4096, HALF / 2] {
        world.step(Event::Resize { bytes });
        assert_eq!(world.volume.config().bytes, HALF, "{bytes}");
    }
    assert_eq!(world.volume.cut(), Cut::Held);
    world.backend_silent = None;
    world.step(Event::DestageAll);
    pass(&mut world);
    assert_eq!(world.volume.cut(), Cut::Gone);
    world.step(Event::Resize { bytes: 2 * HALF });
    assert_eq!(world.volume.config().bytes, 2 * HALF);
    world.config.bytes = 2 * HALF;
    for reopened in [false, true] {
        let end = HALF as usize;
        let mut expected = vec![0; 2 * end];
        for range in [BEFORE, ACROSS] {
            let start = range.byte_offset() as usize;
            expected[start..end.min(start + range.bytes())].fill(7);
        }
        for start in (0..2 * end / 512).step_by(2048) {
            let read = world.read(SectorRange::new(start as u64, 2048));
            assert!(
                *read == expected[start * 512..][..1 << 20],
                "{start} {reopened}"
            );
        }
        assert!(world.backend[end..].iter().all(|&byte| byte == 0));
        world.reopen();
    }
}

/// What lies beyond a smaller end and reads badly at one opening may read well at the next.
#[test]
fn lost_sectors_that_are_cut_off_hold_the_volume_small_until_the_log_has_let_go_of_them() {
    for told_while_open in [false, true] {
        let mut world = World::new(Persist::OnWrite);
        // The second one is beyond the smaller end. Something follows it: what is bad is no torn end.
        for block in [8, 9, 0] {
            world.write(block * 8, &[block as u8; BLOCK_BYTES]);
        }
        let (small, large) = (9 * BLOCK_BYTES as u64, world.config.bytes);
        // Each is a span of a control block and a data block.
        let rotten = (LOG_HEADER_BLOCKS as usize + 3) * BLOCK_BYTES + 9;
        world.log[rotten] ^= 1;
        if told_while_open {
            world.reopen();
            world.step(Event::Resize { bytes: small });
            world.config.bytes = small;
        } else {
            world.config.bytes = small;
            world.reopen();
        }
        assert_eq!(world.volume.config().bytes, small);
        assert_eq!(world.volume.cut(), Cut::Held);
        world.step(Event::Resize { bytes: large });
        assert_eq!(
            world.volume.config().bytes,
            small,
            "the log may bring it back"
        );
        world.step(Event::DestageAll);
        pass(&mut world);
        assert_eq!(world.volume.cut(), Cut::Gone);
        world.step(Event::Resize { bytes: large });
        world.config.bytes = large;
        world.log[rotten] ^= 1;
        for _ in 0..2 {
            assert_eq!(world.volume.config().bytes, large);
            let read = world.read(SectorRange::new(8 * 8, 16));
            let (before, cut) = read.split_at(BLOCK_BYTES);
            assert!(before.iter().all(|&byte| byte == 8) && cut.iter().all(|&byte| byte == 0));
            world.reopen();
        }
    }
}

#[test]
fn lost_sectors_that_are_all_that_the_log_holds_are_let_go_of_by_a_flush() {
    let config = VolumeConfig {
        dirty_age_max: Nanos::from_millis(3_600_000),
        ..hdcs_kit::volume::config(Persist::OnWrite)
    };
    let mut world = World::with(config, None);
    let (small, large) = (8 * BLOCK_BYTES as u64, world.config.bytes);
    world.write(8 * 8, &[8; BLOCK_BYTES]);
    // A superblock says that it is no torn end.
    world.now = world.now.plus(Nanos::from_millis(60_000));
    pass(&mut world);
    let rotten = (LOG_HEADER_BLOCKS as usize + 1) * BLOCK_BYTES + 9;
    world.log[rotten] ^= 1;
    world.config.bytes = small;
    world.reopen();
    assert_eq!(world.volume.stats(world.now).lost_ranges, 0);
    assert_eq!(world.volume.cut(), Cut::Held);
    world.step(Event::DestageAll);
    pass(&mut world);
    assert_eq!(world.volume.stats(world.now).destage_all_remaining_bytes, 0);
    assert_eq!(world.volume.cut(), Cut::Gone);
    world.step(Event::Resize { bytes: large });
    assert_eq!(world.volume.config().bytes, large);
    world.config.bytes = large;
    world.log[rotten] ^= 1;
    world.reopen();
    let read = world.read(SectorRange::new(8 * 8, 8));
    assert!(read.iter().all(|&byte| byte == 0));
}
