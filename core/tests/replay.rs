//! Opening a log that something has happened to: what was acknowledged is there, or the log says
//! that it is not.

mod world;

use hdcs_core::error::{FormatError, OpenError};
use hdcs_core::format::LOG_HEADER_BLOCKS;
use hdcs_core::io::SectorRange;
use hdcs_core::limits::BLOCK_BYTES;
use hdcs_core::volume::{Persist, Phase};
use world::World;

const RING_START: usize = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;
/// One 4 KiB write of its own makes a span of a control block and a data block.
const SPAN_BYTES: usize = 2 * BLOCK_BYTES;

/// A volume with ten spans in its log, the i-th holding i + 1 at block i.
fn world_with_ten_spans() -> World {
    let mut world = World::new(Persist::OnWrite);
    for block in 0..10u8 {
        world.write(u64::from(block) * 8, &[block + 1; BLOCK_BYTES]);
    }
    world
}

fn holds(world: &mut World, block: u8, value: u8) {
    let data = world.read(SectorRange::new(u64::from(block) * 8, 8));
    assert!(
        data.iter().all(|&byte| byte == value),
        "block {block} holds {}",
        data[0]
    );
}

#[test]
fn replay_brings_back_every_acknowledged_write() {
    let mut world = world_with_ten_spans();
    world.reopen();
    for block in 0..10 {
        holds(&mut world, block, block + 1);
    }
    assert_eq!(world.volume.stats(world.now).replayed_entries, 10);
}

#[test]
fn replay_ends_at_a_torn_last_span() {
    for torn in [
        RING_START + 9 * SPAN_BYTES,
        RING_START + 10 * SPAN_BYTES - 1,
    ] {
        let mut world = world_with_ten_spans();
        world.log[torn] ^= 1;
        world.reopen();
        holds(&mut world, 8, 9);
        holds(&mut world, 9, 0);
        // The place is written again, by another opening, and holds.
        world.write(72, &[77; BLOCK_BYTES]);
        world.reopen();
        holds(&mut world, 9, 77);
    }
}

#[test]
fn replay_refuses_rot_in_what_was_durable() {
    for rotten in [
        RING_START + 4 * SPAN_BYTES + 40,
        RING_START + 4 * SPAN_BYTES + 5000,
    ] {
        let mut world = world_with_ten_spans();
        world.log[rotten] ^= 1;
        world.try_reopen();
        let expected = Phase::Failed(OpenError::CorruptLog { position: 8 });
        assert_eq!(world.volume.phase(), expected);
        world.log[rotten] ^= 1;
        world.reopen();
        holds(&mut world, 9, 10);
    }
}

#[test]
fn replay_takes_no_span_of_an_earlier_opening() {
    let mut world = world_with_ten_spans();
    let before = world.log.clone();
    // The last two spans are lost, the log is reopened and the same bytes are written again.
    world.log[RING_START + 8 * SPAN_BYTES..RING_START + 10 * SPAN_BYTES].fill(0);
    world.reopen();
    world.write(64, &[9; BLOCK_BYTES]);
    // Now the old last span appears behind the new one: it must not count.
    let last = RING_START + 9 * SPAN_BYTES..RING_START + 10 * SPAN_BYTES;
    world.log[last.clone()].copy_from_slice(&before[last]);
    world.reopen();
    holds(&mut world, 8, 9);
    holds(&mut world, 9, 0);
}

#[test]
fn replay_uses_the_other_superblock_when_one_is_torn() {
    let mut world = world_with_ten_spans();
    // The format is in block 0, the opening in block 1.
    world.log[100] ^= 1;
    world.reopen();
    holds(&mut world, 9, 10);
    // A superblock that tears while it is written leaves the other one in force.
    let before = world.log.clone();
    world.reopen();
    let written = usize::from(world.log[..BLOCK_BYTES] == before[..BLOCK_BYTES]) * BLOCK_BYTES;
    world.log[written + 100] ^= 1;
    world.reopen();
    holds(&mut world, 9, 10);
}

#[test]
fn replay_refuses_a_superblock_that_is_older_than_the_log() {
    let mut world = world_with_ten_spans();
    world.log[BLOCK_BYTES + 100] ^= 1;
    world.try_reopen();
    assert_eq!(
        world.volume.phase(),
        Phase::Failed(OpenError::CorruptLog { position: 0 })
    );
}

#[test]
fn replay_refuses_what_is_not_its_log() {
    type Damage = fn(&mut World);
    let cases: [(Damage, FormatError); 3] = [
        (|world| world.log.fill(0), FormatError::Magic),
        (|world| world.config.uuid = [9; 16], FormatError::Identity),
        (
            |world| {
                for block in [0, BLOCK_BYTES] {
                    world.log[block + 8] = 3;
                }
            },
            FormatError::Newer {
                found: 3,
                supported: 2,
            },
        ),
    ];
    for (damage, reason) in cases {
        let mut world = world_with_ten_spans();
        damage(&mut world);
        let before = world.log.clone();
        world.try_reopen();
        assert_eq!(
            world.volume.phase(),
            Phase::Failed(OpenError::Superblock(reason))
        );
        assert!(world.log == before, "a refused log is left as it is");
    }
}

#[test]
fn replay_after_a_clean_close_expects_the_whole_log() {
    let mut world = world_with_ten_spans();
    world.close(false);
    world.log[RING_START + 9 * SPAN_BYTES + 4200] ^= 1;
    world.try_reopen();
    let expected = Phase::Failed(OpenError::CorruptLog { position: 18 });
    assert_eq!(world.volume.phase(), expected);
}
