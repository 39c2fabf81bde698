//! A log whose device takes no writes any more is emptied and given up.

use hdcs_core::error::IoError;
use hdcs_core::io::{Completion, Done, Request, RequestId, SectorRange, Token};
use hdcs_core::volume::{Event, LogFailure, Persist};

use crate::world::{self, World};

/// Far from everything else, so that nothing takes it along.
const APART: SectorRange = SectorRange::new(12_000, 8);

fn world() -> World {
    let mut config = world::config(Persist::OnWrite);
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
