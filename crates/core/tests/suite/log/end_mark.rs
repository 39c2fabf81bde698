//! A log at rest says where it ends: what was acknowledged a while ago and is damaged since is never taken for a write
//! that was under way.

use hdcs_core::base::error::OpenError;
use hdcs_core::base::io::{Nanos, SectorRange};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_HEADER_BLOCKS, LogSuperblock};
use hdcs_core::volume::{Event, Persist, Phase, State};
use hdcs_kit::volume::World;
use zerocopy::FromBytes;

const RING_START: usize = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;
/// One 4 KiB write of its own makes a span of a control block and a data block.
const SPAN_BYTES: usize = 2 * BLOCK_BYTES;
const SPANS: u64 = 3;

/// A volume with three spans in its log, whose data nobody has asked to destage.
fn world() -> World {
    let mut world = World::new(Persist::OnWrite);
    // What is destaged is not in the log any more.
    world.backend_silent = Some(Vec::new());
    for block in 0..SPANS {
        world.write(block * 8, &[block as u8 + 1; BLOCK_BYTES]);
    }
    world
}

fn rest(world: &mut World, millis: u64) {
    world.now = world.now.plus(Nanos::from_millis(millis));
    world.step(Event::Poll);
}

/// Sequence of the superblock that counts, and where it says that the log ends at least.
fn superblock(world: &World) -> (u64, u64) {
    [0, RING_START / 2]
        .map(|at| LogSuperblock::read_from_bytes(&world.log[at..at + BLOCK_BYTES]).unwrap())
        .map(|found| (found.sequence.get(), found.known_head.get()))
        .into_iter()
        .max()
        .unwrap()
}

#[test]
fn last_span_is_known_after_a_second_at_rest() {
    let mut world = world();
    let (before, known) = superblock(&world);
    assert_eq!(known, 0);
    rest(&mut world, 900);
    assert_eq!(superblock(&world), (before, 0), "too early");
    assert!(world.volume.next_wakeup().is_some());
    rest(&mut world, 200);
    assert_eq!(superblock(&world), (before + 1, 2 * SPANS));
    // Once is enough.
    rest(&mut world, 5_000);
    assert_eq!(superblock(&world), (before + 1, 2 * SPANS));
    world.write(0, &[9; BLOCK_BYTES]);
    rest(&mut world, 1_100);
    assert_eq!(superblock(&world), (before + 2, 2 * SPANS + 2));
}

#[test]
fn log_that_is_written_all_the_time_needs_no_mark() {
    let mut world = world();
    let before = superblock(&world);
    for _ in 0..20 {
        rest(&mut world, 500);
        world.write(0, &[9; BLOCK_BYTES]);
    }
    assert_eq!(superblock(&world), before);
}

#[test]
fn damage_of_the_last_spans_is_told_after_a_rest() {
    for span in 0..SPANS as usize {
        let control = RING_START + span * SPAN_BYTES;
        let mut world = world();
        rest(&mut world, 1_100);
        world.log[control + 40] ^= 1;
        world.try_reopen();
        let position = 2 * span as u64;
        let expected = Phase::Failed(OpenError::CorruptLog { position });
        assert_eq!(world.volume.phase(), expected);
        world.log[control + 40] ^= 1;
        world.log[control + BLOCK_BYTES] ^= 1;
        world.reopen();
        assert_eq!(world.volume.state(), State::Degraded);
        let lost: Vec<_> = world.volume.lost().iter().collect();
        assert_eq!(lost, [SectorRange::new(8 * span as u64, 8)]);
    }
}

#[test]
fn what_is_found_at_an_opening_is_known_after_a_rest() {
    let mut world = world();
    world.reopen();
    rest(&mut world, 1_100);
    assert_eq!(superblock(&world).1, 2 * SPANS);
}

#[test]
fn only_what_is_durable_is_named() {
    let mut world = World::new(Persist::OnFlush);
    world.log_silent = Some(Vec::new());
    world.write(0, &[1; BLOCK_BYTES]);
    rest(&mut world, 60_000);
    assert_eq!(superblock(&world).1, 0);
    world.log_silent = None;
}
