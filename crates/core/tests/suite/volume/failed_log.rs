//! A log whose device takes no writes any more is emptied and given up.

use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, Nanos, Request, RequestId, SectorRange, Token};
use hdcs_core::cache::{CacheEvent, SsdConfig};
use hdcs_core::format::{LOG_UNFLUSHED, LogSuperblock};
use hdcs_core::volume::{Event, LogFailure, Persist, Policy, Volume};
use hdcs_kit::volume::{BYTES, World};
use zerocopy::IntoBytes;

/// Far from everything else, so that nothing takes it along.
const APART: SectorRange = SectorRange::new(12_000, 8);

fn world() -> World {
    let mut config = hdcs_kit::volume::config(Persist::OnWrite);
    config.log_failure = LogFailure::PassThrough;
    World::with(config, None)
}

fn backend(world: &World) -> &[u8] {
    &world.backend[APART.byte_offset() as usize..][..APART.bytes()]
}

fn complete(world: &mut World, token: Token, result: Result<Done, IoError>) {
    world.step(Event::Completed(Completion { token, result }));
}

/// Send a write whose log entry the device does not take.
fn write_that_fails(world: &mut World, range: SectorRange, mark: u8) {
    let mut data = world.pool.alloc_for(range).expect("memory");
    data.fill(mark);
    let request = Request::Write {
        range,
        data: data.freeze(),
        fua: false,
    };
    world.log_silent = Some(Vec::new());
    let id = RequestId(9);
    world.step(Event::Request { id, request });
    let written = world.log_silent.take().expect("it is held back");
    complete(world, written[0], Err(IoError::Failed));
}

/// What only memory has may be lost while the log is emptied: it takes the place of nothing older that is durable.
#[test]
fn failed_log_keeps_what_is_durable_though_memory_has_newer_data() {
    let mut world = world();
    world.backend_silent = Some(Vec::new());
    world.write(APART.start, &[1; 4096]);
    // More than one generation, without a flush between them.
    let ring_blocks = world.volume.stats(world.now).log_ring_blocks;
    for number in 0..ring_blocks / 12 {
        world.write(number * 16, &[2; 4096]);
    }
    let nothing = world.backend_silent.take();
    assert_eq!(nothing, Some(Vec::new()), "destage waits for more");
    world.flush_silent = Some(Vec::new());
    write_that_fails(&mut world, APART, 3);
    while world.flush_silent == Some(Vec::new()) {
        world.step(Event::Poll);
    }
    let flushes = world.flush_silent.replace(Vec::new());
    let flushes = flushes.expect("the first generation is written");
    assert!(backend(&world) == [1; 4096]);
    // The node ends when the first generation is retired, and the device is well again.
    world.backend_silent = Some(Vec::new());
    complete(&mut world, flushes[0], Ok(Done::Written));
    while world.kept.is_none_or(|kept| kept.tail.get() == 0) {
        world.step(Event::Poll);
    }
    let kept = world.kept.expect("just looked");
    assert!(kept.tail != kept.clean_head);
    (world.backend_silent, world.flush_silent) = (None, None);
    world.reopen();
    assert!(*world.read(APART) == [1; 4096]);
}

/// After a crash the backend has what only memory had, or not, and no replay lies over what the cache holds.
#[test]
fn failed_log_says_that_no_cache_is_new_enough_before_the_backend_has_what_only_memory_had() {
    let mut world = world();
    world.backend_silent = Some(Vec::new());
    write_that_fails(&mut world, APART, 3);
    let unknown = u64::MAX;
    for _ in 0..10 {
        let begun = world
            .backend_silent
            .as_ref()
            .is_some_and(|begun| !begun.is_empty());
        let kept = world.kept.map(|kept| kept.cache.get());
        assert!(!begun || kept == Some(unknown), "{kept:?}");
        if begun {
            break;
        }
        world.step(Event::Poll);
    }
    let begun = world.backend_silent.take().expect("none is answered");
    complete(&mut world, begun[0], Ok(Done::Written));
    // Until writes go past the log, which say the same.
    for _ in 0..20 {
        world.step(Event::Poll);
        assert_eq!(world.kept.expect("it was kept").cache.get(), unknown);
    }
    assert!(
        world
            .replies
            .iter()
            .any(|(id, result)| *id == RequestId(9) && result.is_ok())
    );
}

fn ssd() -> SsdConfig {
    SsdConfig {
        bytes: 32 << 20,
        uuid: [3; 16],
        line_blocks: 4,
    }
}

/// A volume whose log was made in place of one that was given up: its superblock says that the backend may be unflushed,
/// and nothing of caches. All of the backend is cached, and no block is like another.
fn world_of_carried_mark() -> World {
    let mut config = hdcs_kit::volume::config(Persist::OnWrite);
    config.log_failure = LogFailure::PassThrough;
    let mut world = World::with(config, Some(ssd()));
    world.config.number = 2;
    let mut block = Volume::format_log(&world.config, 1234);
    let mut superblock = LogSuperblock::parse(&block).expect("just made");
    superblock.flags = LOG_UNFLUSHED.into();
    superblock.seal();
    block.copy_from_slice(superblock.as_bytes());
    world.log.fill(0);
    world.log[..4096].copy_from_slice(&block);
    restart(&mut world);
    for (number, block) in world.backend.chunks_exact_mut(4096).enumerate() {
        block.fill(number as u8);
        block[..8].copy_from_slice(&(number as u64).to_le_bytes());
    }
    world
}

/// End the node as a crash would: the cache is what its device holds, and the log is opened again.
fn restart(world: &mut World) {
    let mut actions = Vec::new();
    world.cache = hdcs_kit::volume::cache(Some(ssd()), world.now, &world.pool, &mut actions);
    world.perform_for_cache(actions);
    for _ in 0..200 {
        let mut actions = Vec::new();
        (world.cache).step(world.now, CacheEvent::Poll, &mut actions);
        world.perform_for_cache(actions);
    }
    world.reopen();
}

fn promote_all(world: &mut World) {
    let range = SectorRange::new(0, BYTES as u64 / 512);
    world.ask(Request::Promote { range });
}

#[test]
fn mark_of_the_log_before_vouches_for_no_cache_when_a_log_fails() {
    let mut world = world_of_carried_mark();
    promote_all(&mut world);
    // The backend has what only memory had, and has not flushed it when the node ends.
    world.flush_silent = Some(Vec::new());
    write_that_fails(&mut world, APART, 3);
    for _ in 0..20 {
        world.step(Event::Poll);
    }
    assert!(backend(&world) == [3; 4096]);
    world.flush_silent = None;
    restart(&mut world);
    assert!(*world.read(APART) == [3; 4096]);
}

#[test]
fn mark_of_the_log_before_vouches_for_no_cache_when_writes_go_past_the_log() {
    let mut world = world_of_carried_mark();
    world.config.policy = Policy::WriteAround;
    world.step(Event::Reconfigure(world.config.clone()));
    while world.volume.policy() != Policy::WriteAround {
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
    }
    promote_all(&mut world);
    let before = world.cache_device.clone();
    world.write(APART.start, &[3; 4096]);
    world.ask(Request::Flush);
    // The device of the cache loses what it has acknowledged since.
    world.cache_device = before;
    restart(&mut world);
    assert!(*world.read(APART) == [3; 4096]);
}

/// A superblock that destage waits for wakes the volume when it ends; if it cannot be kept, nothing does.
#[test]
fn destage_that_waits_for_a_superblock_of_a_failed_log_does_not_spin() {
    for is_retried in [false, true] {
        let mut world = world();
        if is_retried {
            world.write(APART.start, &[1; 4096]);
            world.backend_silent = Some(Vec::new());
            destage(&mut world);
            let begun = world.backend_silent.replace(Vec::new());
            let begun = begun.expect("it is answered here");
            complete(&mut world, begun[0], Err(IoError::Failed));
        }
        world.keep_fails = true;
        write_that_fails(&mut world, APART, 3);
        let (end, mut polls) = (world.now.plus(Nanos::from_millis(10_000)), 0);
        while let Some(at) = world.volume.next_wakeup().filter(|&at| at < end) {
            world.now = world.now.max(at).plus(Nanos::from_micros(5));
            world.step(Event::Poll);
            polls += 1;
            assert!(polls < 100, "by {:?}", world.now);
        }
    }
}

fn destage(world: &mut World) {
    world.step(Event::DestageAll);
    for _ in 0..5 {
        world.step(Event::Poll);
    }
}

/// All that waits for the log to be empty overlaps.
#[test]
fn writes_that_waited_for_a_log_to_be_empty_go_on_in_bounded_steps() {
    const WRITES: u64 = 1000;
    let mut world = world();
    world.flush_silent = Some(Vec::new());
    write_that_fails(&mut world, APART, 1);
    for number in 0..WRITES {
        let request = world.write_request(number % 64 * 8, &[number as u8; 4096], false);
        let id = RequestId(100 + number);
        world.step(Event::Request { id, request });
    }
    for _ in 0..10 {
        world.step(Event::Poll);
    }
    let flushes = world.flush_silent.take().expect("it is held back");
    world.backend_silent = Some(Vec::new());
    let mut tokens = flushes;
    for _ in 0..10 * WRITES {
        let result = Ok(Done::Written);
        let event = match tokens.pop() {
            Some(token) => Event::Completed(Completion { token, result }),
            None => Event::Poll,
        };
        let before = world.volume.work();
        world.step(event);
        let looks = world.volume.work() - before;
        assert!(looks < 16 << 10, "{looks} looks in a step");
        let begun = world.backend_silent.replace(Vec::new());
        tokens.extend(begun.expect("it is answered here"));
    }
    let answered = |(id, reply): &&(RequestId, _)| id.0 >= 100 && Result::is_ok(reply);
    let answered = world.replies.iter().filter(answered).count();
    assert_eq!(answered as u64, WRITES);
}
