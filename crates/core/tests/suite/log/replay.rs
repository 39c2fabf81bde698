//! Opening a log that something has happened to: what was acknowledged is there, or the log says
//! that it is not.

use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::cipher::{Authenticator, TAG_BYTES};
use hdcs_core::base::error::{FormatError, OpenError, RequestError};
use hdcs_core::base::io::{ExtentKind, ExtentState, Nanos, Reply, Request, RequestId, SectorRange};
use hdcs_core::base::limits::{BLOCK_BYTES, LOST_RANGES_MAX, VOLUME_BYTES_MAX};
use hdcs_core::format::{
    EntryKind, LOG_HEADER_BLOCKS, LogSuperblock, SpanEntry, SpanHeader, block_checksum, seal,
};
use hdcs_core::log::replay::{Found, Record, Replay};
use hdcs_core::log::write_log::WriteLog;
use hdcs_core::volume::{Event, Persist, Phase, Policy, State};
use hdcs_kit::volume::World;
use zerocopy::FromBytes;

const RING_START: usize = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;
/// Where the second superblock is.
const SECOND: usize = RING_START / 2;
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
fn replay_refuses_rot_in_a_control_part_that_was_durable() {
    let rotten = RING_START + 4 * SPAN_BYTES + 40;
    let mut world = world_with_ten_spans();
    world.log[rotten] ^= 1;
    world.try_reopen();
    let expected = Phase::Failed(OpenError::CorruptLog { position: 8 });
    assert_eq!(world.volume.phase(), expected);
    world.log[rotten] ^= 1;
    world.reopen();
    holds(&mut world, 9, 10);
}

fn is_lost(world: &mut World, block: u64) -> bool {
    let (id, range) = (RequestId(7), SectorRange::new(block * 8, 8));
    let request = Request::Read { range };
    world.step(Event::Request { id, request });
    loop {
        match world.replies.pop() {
            Some((_, Err(RequestError::Corrupt))) => return true,
            Some((_, Ok(Reply::Data(_)))) => return false,
            Some((_, other)) => panic!("a read is answered with {other:?}"),
            None => {
                world.now = world
                    .now
                    .max(world.volume.next_wakeup().expect("a read waits"));
                world.step(Event::Poll);
            }
        }
    }
}

/// The block of the log that holds the data of the i-th of the ten spans.
fn data_of(span: usize) -> usize {
    RING_START + span * SPAN_BYTES + BLOCK_BYTES
}

#[test]
fn replay_saves_all_but_a_damaged_block() {
    let mut world = world_with_ten_spans();
    world.write(4 * 8, &[77; BLOCK_BYTES]);
    // What is written again later is not lost with its first version.
    for span in [2, 4, 5] {
        world.log[data_of(span) + 1000] ^= 1;
    }
    // It is in the cache and in the backend as it was before: neither is shown.
    world.backend.fill(0x55);
    for _ in 0..2 {
        world.reopen();
        assert_eq!(world.volume.state(), State::Degraded);
        let stats = world.volume.stats(world.now);
        assert_eq!((stats.lost_ranges, stats.lost_bytes), (2, 8192));
        assert_eq!(stats.log_corrupt_blocks, 3);
        for block in 0..10 {
            assert_eq!(is_lost(&mut world, block), [2, 5].contains(&block));
        }
        holds(&mut world, 4, 77);
        holds(&mut world, 9, 10);
    }
    // Destaged, and read from the backend: they still are lost.
    world.close(true);
    assert_eq!(
        world.backend[2 * BLOCK_BYTES..][..BLOCK_BYTES],
        [0x55; BLOCK_BYTES]
    );
    assert_eq!(
        world.backend[9 * BLOCK_BYTES..][..BLOCK_BYTES],
        [10; BLOCK_BYTES]
    );
    world.reopen();
    assert!(is_lost(&mut world, 2) && is_lost(&mut world, 5));
    holds(&mut world, 4, 77);
    // Sector by sector they come back, and stay.
    world.write(2 * 8, &[7; BLOCK_BYTES]);
    world.write(5 * 8, &[8; 512]);
    world.reopen();
    holds(&mut world, 2, 7);
    assert!(is_lost(&mut world, 5));
    let first = world.read(SectorRange::new(5 * 8, 1));
    assert!(first.iter().all(|&byte| byte == 8));
    world.ask(Request::Discard {
        range: SectorRange::new(5 * 8 + 1, 7),
        fua: true,
    });
    assert_eq!(world.volume.state(), State::Healthy);
    world.close(true);
    world.reopen();
    assert_eq!(world.volume.state(), State::Healthy);
    assert!(!is_lost(&mut world, 5));
    holds(&mut world, 2, 7);
}

/// What is lost is recorded as of the tail: a write that a crash takes leaves it lost.
#[test]
fn replay_keeps_what_is_lost_until_the_write_over_it_is_durable() {
    let mut world = world_with_ten_spans();
    world.log[data_of(3) + 9] ^= 1;
    world.reopen();
    let before = world.log.clone();
    world.write(3 * 8, &[7; BLOCK_BYTES]);
    holds(&mut world, 3, 7);
    // The power goes before it is durable.
    let ring = RING_START + 10 * SPAN_BYTES;
    world.log[ring..].copy_from_slice(&before[ring..]);
    world.reopen();
    assert!(is_lost(&mut world, 3));
}

#[test]
fn replay_saves_what_is_good_of_a_damaged_span() {
    let mut world = World::new(Persist::OnWrite);
    // One span of one write, which begins and ends within a block.
    let data: Vec<u8> = (0..30u8).flat_map(|sector| [sector + 1; 512]).collect();
    world.write(4, &data);
    world.write(80, &[9; BLOCK_BYTES]);
    world.write(88, &[9; BLOCK_BYTES]);
    world.log[RING_START + 2 * BLOCK_BYTES + 9] ^= 1;
    world.reopen();
    let lost: Vec<_> = world.volume.lost().iter().collect();
    assert_eq!(lost, [SectorRange::new(8, 8)]);
    for (start, count) in [(4, 4), (16, 18)] {
        let read = world.read(SectorRange::new(start, count));
        let from = (start as usize - 4) * 512;
        assert_eq!(read[..], data[from..from + count as usize * 512]);
    }
    world.close(true);
    assert_eq!(world.backend[4 * 512..8 * 512], data[..4 * 512]);
    assert_eq!(world.backend[8 * 512..16 * 512], [0; 8 * 512]);
    assert_eq!(world.backend[16 * 512..34 * 512], data[12 * 512..]);
}

/// Extents may not call a hole what cannot be read.
#[test]
fn replay_calls_what_is_lost_data() {
    let mut world = world_with_ten_spans();
    world.log[data_of(3) + 9] ^= 1;
    world.reopen();
    let (range, kind) = (SectorRange::new(0, 80), ExtentKind::Allocation);
    let Reply::Extents(extents) = world.ask(Request::Extents { range, kind }) else {
        panic!("extents are answered with extents");
    };
    assert!(
        extents
            .iter()
            .all(|extent| extent.state == ExtentState::Data)
    );
}

/// One write of 30 sectors from sector 4 on, whose span has five data blocks of which the third is damaged.
fn world_with_a_damaged_span() -> (World, Vec<u8>) {
    let mut world = World::new(Persist::OnWrite);
    let data: Vec<u8> = (0..30u8).flat_map(|sector| [sector + 1; 512]).collect();
    world.write(4, &data);
    (world, data)
}

/// All of that write is there but sectors 16 to 23.
fn holds_what_is_good(world: &mut World, data: &[u8]) {
    let lost: Vec<_> = world.volume.lost().iter().collect();
    assert_eq!(lost, [SectorRange::new(16, 8)]);
    for (start, count) in [(4, 12), (24, 10)] {
        let read = world.read(SectorRange::new(start, count));
        let from = (start as usize - 4) * 512;
        assert_eq!(read[..], data[from..from + count as usize * 512]);
    }
}

/// A superblock of a clean close says that the last span was durable; that of the next opening does not take it back.
#[test]
fn replay_keeps_what_it_saved_of_the_last_span() {
    let (mut world, data) = world_with_a_damaged_span();
    world.close(false);
    world.log[RING_START + 3 * BLOCK_BYTES + 9] ^= 1;
    for _ in 0..3 {
        world.reopen();
        holds_what_is_good(&mut world, &data);
    }
    world.close(true);
    world.reopen();
    holds_what_is_good(&mut world, &data);
}

/// A later span says so, and is then written over by one that tears.
#[test]
fn replay_keeps_what_it_saved_when_the_evidence_is_gone() {
    let (mut world, data) = world_with_a_damaged_span();
    world.write(80, &[9; BLOCK_BYTES]);
    let next = RING_START + 6 * BLOCK_BYTES;
    world.log[RING_START + 3 * BLOCK_BYTES + 9] ^= 1;
    world.log[next + BLOCK_BYTES] ^= 1;
    world.reopen();
    holds_what_is_good(&mut world, &data);
    holds(&mut world, 10, 0);
    world.log[next..][..2 * BLOCK_BYTES].fill(0x5a);
    world.reopen();
    holds_what_is_good(&mut world, &data);
}

/// What is lost is told by both superblocks before anything depends on it.
#[test]
fn replay_opens_a_damaged_log_with_either_superblock() {
    for destage in [false, true] {
        let mut world = world_with_ten_spans();
        world.log[data_of(3) + 9] ^= 1;
        world.reopen();
        if destage {
            world.step(Event::DestageAll);
            while world.volume.stats(world.now).dirty_bytes > 0 {
                world.now = world.now.plus(Nanos::from_millis(10));
                world.step(Event::Poll);
            }
        } else {
            world.write(12 * 8, &[77; BLOCK_BYTES]);
        }
        let log = world.log.clone();
        for torn in [0, SECOND] {
            world.log.copy_from_slice(&log);
            world.log[torn + 100] ^= 1;
            world.reopen();
            assert!(is_lost(&mut world, 3));
            holds(&mut world, 4, 5);
            if !destage {
                holds(&mut world, 12, 77);
            }
        }
    }
}

/// Every second of so many blocks from the first one on is written, and damaged.
fn world_with_losses(count: u64) -> World {
    let mut world = World::new(Persist::OnWrite);
    for block in 0..count {
        world.write(block * 2 * 8, &[1 + (block % 200) as u8; BLOCK_BYTES]);
    }
    world.write(8, &[9; BLOCK_BYTES]);
    for span in 0..count as usize {
        world.log[data_of(span)] ^= 1;
    }
    world
}

#[test]
fn replay_refuses_more_losses_than_it_can_record() {
    let mut world = world_with_losses(LOST_RANGES_MAX as u64 + 1);
    let before = world.log.clone();
    world.try_reopen();
    let ranges = LOST_RANGES_MAX + 1;
    let expected = Phase::Failed(OpenError::LostTooMuch { ranges });
    assert_eq!(world.volume.phase(), expected);
    assert!(world.log == before, "a refused log is left as it is");
    // One of them reads well again.
    world.log[data_of(7)] ^= 1;
    world.reopen();
    assert_eq!(world.volume.lost().count(), LOST_RANGES_MAX);
    holds(&mut world, 14, 8);
}

/// A list that is full takes no write that would split one of its ranges; and all others.
#[test]
fn lost_sectors_are_never_more_than_can_be_recorded() {
    let mut world = world_with_losses(LOST_RANGES_MAX as u64);
    world.reopen();
    let inside = world.write_request(16 + 3, &[5; 512], false);
    let id = RequestId(9);
    for request in [
        inside,
        Request::Discard {
            range: SectorRange::new(16 + 1, 6),
            fua: false,
        },
    ] {
        world.step(Event::Request { id, request });
        assert!(matches!(
            world.replies.pop(),
            Some((_, Err(RequestError::Io)))
        ));
    }
    assert!(is_lost(&mut world, 2));
    world.write(16, &[5; 512]);
    world.write(23, &[6; 512]);
    world.write(0, &[7; BLOCK_BYTES]);
    // Now there is room for one more.
    world.write(16 + 3, &[8; 512]);
    world.close(true);
    world.reopen();
    let lost = world.volume.lost();
    assert_eq!((lost.count(), lost.sectors()), (128, 127 * 8 - 3));
    holds(&mut world, 0, 7);
    let read = world.read(SectorRange::new(19, 1));
    assert!(read.iter().all(|&byte| byte == 8));
}

/// A read of which a part is lost fails; zeroes heal as writes do, and a discard that is ignored does not.
#[test]
fn lost_sectors_fail_reads_until_something_takes_their_place() {
    let mut world = world_with_ten_spans();
    for span in [3, 5] {
        world.log[data_of(span) + 9] ^= 1;
    }
    world.config.discard = hdcs_core::volume::Discard::Ignore;
    world.backend.fill(0x55);
    world.reopen();
    for (start, count, fails) in [(16, 9, true), (31, 2, true), (0, 80, true), (16, 8, false)] {
        let range = SectorRange::new(start, count);
        let request = Request::Read { range };
        let id = RequestId(8);
        world.step(Event::Request { id, request });
        while world.replies.is_empty() {
            world.now = world.volume.next_wakeup().expect("a read waits");
            world.step(Event::Poll);
        }
        let (_, result) = world.replies.pop().expect("just looked");
        assert_eq!(
            matches!(result, Err(RequestError::Corrupt)),
            fails,
            "{range:?}"
        );
    }
    let range = SectorRange::new(40, 8);
    world.ask(Request::Discard { range, fua: true });
    assert!(is_lost(&mut world, 5));
    for no_hole in [false, true] {
        world.ask(Request::WriteZeroes {
            range: SectorRange::new(40 + 4 * u64::from(no_hole), 4),
            fua: true,
            no_hole,
        });
    }
    holds(&mut world, 5, 0);
    world.close(true);
    world.reopen();
    holds(&mut world, 5, 0);
    assert!(is_lost(&mut world, 3));
}

/// What goes past the log would not be recorded: a policy that asks for that waits.
#[test]
fn lost_sectors_keep_writes_in_the_log_until_they_are_written() {
    let mut world = world_with_ten_spans();
    world.log[data_of(3) + 9] ^= 1;
    world.config.policy = Policy::WriteThrough;
    world.reopen();
    world.write(11 * 8, &[7; BLOCK_BYTES]);
    assert!(is_lost(&mut world, 3));
    let settle = |world: &mut World| {
        for _ in 0..200 {
            world.now = world.now.plus(Nanos::from_millis(10));
            world.step(Event::Poll);
        }
    };
    settle(&mut world);
    let in_backend = |world: &World, block: usize| world.backend[block * BLOCK_BYTES] == 9;
    world.write(12 * 8, &[9; BLOCK_BYTES]);
    assert!(!in_backend(&world, 12), "it went into the log");
    world.write(3 * 8, &[7; BLOCK_BYTES]);
    settle(&mut world);
    world.write(13 * 8, &[9; BLOCK_BYTES]);
    assert!(in_backend(&world, 13), "it went past the log");
    assert_eq!(world.volume.state(), State::Healthy);
    // A crash brings nothing back.
    world.reopen();
    holds(&mut world, 3, 7);
    assert!(world.volume.lost().is_empty());
}

/// What is cut off is not lost, but gone.
#[test]
fn lost_sectors_that_are_cut_off_are_zero_when_the_volume_grows_again() {
    let mut world = world_with_ten_spans();
    for span in [3, 9] {
        world.log[data_of(span) + 9] ^= 1;
    }
    world.reopen();
    world.close(true);
    world.reopen();
    let (small, large) = (8 * BLOCK_BYTES as u64, world.config.bytes);
    for bytes in [small, large] {
        world.step(Event::Resize { bytes });
    }
    assert!(is_lost(&mut world, 3) && !is_lost(&mut world, 9));
    world.write(40 * 8, &[7; BLOCK_BYTES]);
    world.close(true);
    world.reopen();
    assert!(is_lost(&mut world, 3) && !is_lost(&mut world, 9));
}

/// A sealed superblock is believed only as far as its table makes sense.
#[test]
fn replay_refuses_a_table_of_losses_that_makes_no_sense() {
    type Lost = (u64, &'static [[u64; 2]], &'static str);
    let beyond = VOLUME_BYTES_MAX / 512;
    let beyond: &'static [[u64; 2]] = Box::leak(Box::new([[beyond - 1, 2]]));
    let cases: [Lost; 7] = [
        (129, &[], "lost_ranges"),
        (u64::MAX, &[], "lost_ranges"),
        (1, &[[8, 0]], "lost"),
        (2, &[[8, 8], [0, 4]], "lost"),
        (2, &[[8, 8], [16, 4]], "lost"),
        (1, &[[u64::MAX, 2]], "lost"),
        (1, beyond, "lost"),
    ];
    for (count, ranges, field) in cases {
        let mut world = world_with_ten_spans();
        for block in [0, SECOND] {
            let block = &mut world.log[block..block + BLOCK_BYTES];
            let superblock = LogSuperblock::mut_from_bytes(block).unwrap();
            superblock.lost_ranges = count.into();
            for (place, range) in superblock.lost.iter_mut().zip(ranges) {
                *place = range.map(Into::into);
            }
            superblock.seal();
        }
        world.try_reopen();
        let refused = OpenError::Superblock(FormatError::Field(field));
        assert_eq!(world.volume.phase(), Phase::Failed(refused), "{ranges:?}");
    }
}

/// Without a superblock nobody knows what is lost, nor where the log begins.
#[test]
fn replay_refuses_a_damaged_log_without_a_superblock() {
    let mut world = world_with_ten_spans();
    world.log[data_of(3) + 9] ^= 1;
    world.reopen();
    for block in [0, SECOND] {
        world.log[block + 2100] ^= 1;
    }
    world.try_reopen();
    let refused = OpenError::Superblock(FormatError::Checksum);
    assert_eq!(world.volume.phase(), Phase::Failed(refused));
}

/// What a full table says is split by a span that was not there when it was written.
#[test]
fn replay_refuses_a_table_that_its_log_splits_too_far() {
    let mut world = World::new(Persist::OnWrite);
    world.write(8, &[9; BLOCK_BYTES]);
    let superblock = LogSuperblock::mut_from_bytes(&mut world.log[SECOND..][..BLOCK_BYTES]);
    let superblock = superblock.unwrap();
    superblock.lost_ranges = (LOST_RANGES_MAX as u64).into();
    for (index, place) in (0..).zip(&mut superblock.lost) {
        *place = [(index * 32).into(), 24.into()];
    }
    superblock.seal();
    world.try_reopen();
    let ranges = LOST_RANGES_MAX + 1;
    let refused = Phase::Failed(OpenError::LostTooMuch { ranges });
    assert_eq!(world.volume.phase(), refused);
}

/// A position that no log can have reached is no reason to panic.
#[test]
fn replay_refuses_an_end_that_it_cannot_find() {
    for known in [1, 21, u64::MAX] {
        let mut world = world_with_ten_spans();
        let superblock = LogSuperblock::mut_from_bytes(&mut world.log[SECOND..][..BLOCK_BYTES]);
        let superblock = superblock.unwrap();
        superblock.known_head = known.into();
        superblock.seal();
        world.try_reopen();
        let refused = Phase::Failed(OpenError::CorruptLog { position: 20 });
        let expected = if known == 1 { Phase::Open } else { refused };
        assert_eq!(world.volume.phase(), expected);
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
    // The format is in the first one, the opening in the second.
    world.log[100] ^= 1;
    world.reopen();
    holds(&mut world, 9, 10);
    // A superblock that tears while it is written leaves the other one in force.
    let before = world.log.clone();
    world.reopen();
    let written = usize::from(world.log[..BLOCK_BYTES] == before[..BLOCK_BYTES]) * SECOND;
    world.log[written + 100] ^= 1;
    world.reopen();
    holds(&mut world, 9, 10);
}

#[test]
fn replay_refuses_a_superblock_that_is_older_than_the_log() {
    let mut world = world_with_ten_spans();
    world.log[SECOND + 100] ^= 1;
    world.try_reopen();
    assert_eq!(
        world.volume.phase(),
        Phase::Failed(OpenError::CorruptLog { position: 0 })
    );
}

#[test]
fn replay_refuses_what_is_not_its_log() {
    type Damage = fn(&mut World);
    let cases: [(Damage, FormatError); 4] = [
        (|world| world.log.fill(0), FormatError::Magic),
        (|world| world.config.uuid = [9; 16], FormatError::Identity),
        (
            |world| {
                for block in [0, SECOND] {
                    world.log[block + 8] = 3;
                }
            },
            FormatError::Newer {
                found: 3,
                supported: 2,
            },
        ),
        (
            |world| {
                for block in [0, SECOND] {
                    let block = &mut world.log[block..block + BLOCK_BYTES];
                    block[core::mem::offset_of!(LogSuperblock, holds)] = 2;
                    seal(block);
                }
            },
            FormatError::Holds { found: 2 },
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
    let closed = world.log.clone();
    world.log[RING_START + 9 * SPAN_BYTES + 4200] ^= 1;
    world.reopen();
    assert!(is_lost(&mut world, 9));
    world.close(false);
    world.log.copy_from_slice(&closed);
    world.log[RING_START + 9 * SPAN_BYTES + 40] ^= 1;
    world.try_reopen();
    let expected = Phase::Failed(OpenError::CorruptLog { position: 18 });
    assert_eq!(world.volume.phase(), expected);
}

/// Have the first span, whose write fills one block, hold something else instead.
fn change_first_entry(world: &mut World, change: impl FnOnce(&mut SpanEntry, &mut [u8])) {
    let (control, rest) = world.log[RING_START..].split_at_mut(BLOCK_BYTES);
    let data = &mut rest[..BLOCK_BYTES];
    let at = size_of::<SpanHeader>();
    let (entry, rest) = SpanEntry::mut_from_prefix(&mut control[at..]).unwrap();
    change(entry, data);
    rest[..4].copy_from_slice(&block_checksum(data).to_le_bytes());
    SpanHeader::seal(control);
}

fn become_record(entry: &mut SpanEntry, data: &mut [u8]) {
    *entry = SpanEntry {
        start: 0x1234.into(),
        sectors: 1001.into(),
        data_block: 0.into(),
        kind: EntryKind::Record.code(),
        flags: 0,
        stored_offset: 2000.into(),
        stored_bytes: 0.into(),
        method: 0,
        reserved: 0,
        checksum: 0.into(),
    };
    data[2000..3001].fill(0x77);
}

/// A log of one span.
fn world_with_one_span() -> World {
    let mut world = World::new(Persist::OnWrite);
    world.write(0, &[1; BLOCK_BYTES]);
    world
}

fn replayed(world: &World) -> Result<(WriteLog, Vec<Record>), OpenError> {
    replayed_through(world, |_, _| ())
}

/// The same, with what each read has brought passed through `way`, which is told its offset.
fn replayed_through(
    world: &World,
    mut way: impl FnMut(usize, &mut [u8]),
) -> Result<(WriteLog, Vec<Record>), OpenError> {
    let mut replay = Replay::new(world.config.uuid, world.config.log_bytes);
    let pool = Pool::new(8 << 20);
    let (mut done, mut records) = (false, Vec::new());
    while !done {
        let mut read = replay.next_read(&pool).expect("a read");
        let bytes = read.buf.len();
        read.buf
            .copy_from_slice(&world.log[read.offset as usize..][..bytes]);
        way(read.offset as usize, &mut read.buf);
        replay.read_done(Nanos(0), read.chunk, Ok(read.buf), |_, found| match found {
            Found::Span(_) | Found::Entries(_) => {}
            Found::Record(record) => records.push(record),
            Found::Done => done = true,
        })?;
    }
    Ok((replay.into_log(), records))
}

#[test]
fn replay_tells_of_a_record_and_a_volume_refuses_it() {
    let mut world = world_with_one_span();
    change_first_entry(&mut world, become_record);
    let (log, records) = replayed(&world).unwrap();
    let record = Record {
        span: 0,
        position: 1,
        offset: 2000,
        bytes: 1001,
    };
    assert_eq!(records, [record]);
    assert_eq!((log.spans().len(), log.next_sequence()), (1, 0));
    let before = world.log.clone();
    world.try_reopen();
    let expected = Phase::Failed(OpenError::Record { position: 0 });
    assert_eq!(world.volume.phase(), expected);
    assert!(world.log == before, "a refused log is left as it is");
}

/// A record whose blocks are not what was written is a torn end like any other.
#[test]
fn replay_verifies_records() {
    let mut world = world_with_one_span();
    change_first_entry(&mut world, become_record);
    world.log[RING_START + BLOCK_BYTES + 2500] ^= 1;
    let (log, records) = replayed(&world).unwrap();
    assert!(records.is_empty() && log.spans().is_empty());
    world.reopen();
}

#[test]
fn replay_takes_no_record_beyond_its_span() {
    for (offset, bytes) in [(2000, 2097), (4096, 0), (0, u64::MAX)] {
        let mut world = world_with_one_span();
        change_first_entry(&mut world, |entry, data| {
            become_record(entry, data);
            entry.stored_offset = offset.into();
            entry.sectors = bytes.into();
        });
        let (_, records) = replayed(&world).unwrap();
        assert!(records.is_empty(), "{offset} {bytes}");
    }
    for (offset, bytes) in [(2000, 2096), (4095, 1), (0, 0), (0, 4096)] {
        let mut world = world_with_one_span();
        change_first_entry(&mut world, |entry, data| {
            become_record(entry, data);
            entry.stored_offset = offset.into();
            entry.sectors = bytes.into();
        });
        let (_, records) = replayed(&world).unwrap();
        assert_eq!(records.len(), 1, "{offset} {bytes}");
    }
}

/// What was acknowledged is not forgotten because this program cannot read it.
#[test]
fn replay_refuses_an_entry_of_an_unknown_kind() {
    let mut world = world_with_one_span();
    change_first_entry(&mut world, |entry, _| entry.kind = 6);
    world.try_reopen();
    let expected = OpenError::Kind {
        position: 0,
        kind: 6,
    };
    assert_eq!(world.volume.phase(), Phase::Failed(expected));
}

/// What a volume does not know of its superblock it carries on.
#[test]
fn superblock_fields_outlast_openings() {
    let mut world = world_with_one_span();
    for block in [0, SECOND] {
        let block = &mut world.log[block..block + BLOCK_BYTES];
        let superblock = LogSuperblock::mut_from_bytes(block).unwrap();
        superblock.backend_commit = [5; 64];
        superblock.seal();
    }
    world.reopen();
    world.close(true);
    world.reopen();
    for block in [0, SECOND] {
        let superblock = LogSuperblock::parse(&world.log[block..block + BLOCK_BYTES]).unwrap();
        assert_eq!(superblock.backend_commit, [5; 64]);
    }
}

/// A drive that is cut off while it writes may damage as much as 64 KiB.
#[test]
fn superblocks_share_no_unit_of_a_drive_with_anything() {
    let unit = 64 << 10;
    assert_eq!(LogSuperblock::offset_of(0), 0);
    assert!(LogSuperblock::offset_of(1) >= unit && SECOND as u64 == LogSuperblock::offset_of(1));
    assert!(RING_START as u64 - LogSuperblock::offset_of(1) >= unit);
    assert!((RING_START as u64).is_multiple_of(unit));
}

/// A way on which the byte at `at` is wrong the first `times` times that it is read, each time differently.
fn bad_way(at: usize, times: u8) -> impl FnMut(usize, &mut [u8]) {
    let mut met = 0;
    move |offset, buf| {
        let byte = at.checked_sub(offset).and_then(|at| buf.get_mut(at));
        if let Some(byte) = byte.filter(|_| met < times) {
            met += 1;
            *byte ^= met;
        }
    }
}

#[test]
fn replay_believes_no_single_bad_read() {
    let mut closed = world_with_ten_spans();
    closed.close(false);
    for world in [Box::new(world_with_ten_spans()), Box::new(closed)] {
        let ring = (0..20).map(|block| RING_START + block * BLOCK_BYTES);
        for block in [0, SECOND].into_iter().chain(ring) {
            for at in [block + 40, block + 100] {
                for times in 1..=2 {
                    let (log, _) = replayed_through(&world, bad_way(at, times)).unwrap();
                    assert_eq!(log.spans().len(), 10, "byte {at} read badly {times} times");
                }
            }
        }
    }
}

/// What a read brings from elsewhere is bytes that were written, too.
#[test]
fn replay_believes_no_single_misdirected_read() {
    let mut world = world_with_ten_spans();
    // Both superblocks were written: one that was not reads as zeroes.
    world.reopen();
    let blocks = (0..20).map(|block| RING_START + block * BLOCK_BYTES);
    for block in [0, SECOND].into_iter().chain(blocks) {
        for other in [0, SECOND, RING_START + 40 * BLOCK_BYTES, RING_START] {
            let mut met = false;
            let way = |offset: usize, buf: &mut [u8]| {
                let at = block.checked_sub(offset);
                let to = at.and_then(|at| buf.get_mut(at..at + BLOCK_BYTES));
                if let Some(to) = to.filter(|_| !met) {
                    met = true;
                    to.copy_from_slice(&world.log[other..][..BLOCK_BYTES]);
                }
            };
            let (log, _) = replayed_through(&world, way).unwrap();
            assert_eq!(log.spans().len(), 10, "{block} read as {other}");
        }
    }
}

/// Where nothing says otherwise, two reads that bring the same are enough, so that an opening is not slowed down.
#[test]
fn replay_reads_the_end_of_the_log_twice() {
    let world = world_with_ten_spans();
    let end = RING_START + 10 * SPAN_BYTES;
    let mut reads = 0;
    let way = |offset: usize, buf: &mut [u8]| {
        reads += u32::from((offset..offset + buf.len()).contains(&end));
    };
    replayed_through(&world, way).unwrap();
    assert_eq!(reads, 2);
}

/// Makes tags that nobody makes by accident.
#[derive(Debug)]
struct Toy;

impl Authenticator for Toy {
    fn tag(&self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        let mut tag = [0x5a_u8; TAG_BYTES];
        for (at, byte) in bytes.iter().enumerate() {
            let place = at % TAG_BYTES;
            tag[place] = tag[place].rotate_left(3) ^ byte.wrapping_add(at as u8);
        }
        tag
    }
}

/// A log with ten spans whose superblocks have tags, and the place of the newest of them.
fn authenticated_world() -> (World, usize) {
    let mut world = World::new(Persist::OnWrite);
    let first = LogSuperblock::mut_from_bytes(&mut world.log[..BLOCK_BYTES]).unwrap();
    first.seal_with(Some(&Toy));
    let second = &mut world.log[SECOND..][..BLOCK_BYTES];
    LogSuperblock::mut_from_bytes(second)
        .unwrap()
        .seal_with(Some(&Toy));
    world.keys = Some(Arc::new(Toy));
    world.reopen();
    for block in 0..10u8 {
        world.write(u64::from(block) * 8, &[block + 1; BLOCK_BYTES]);
    }
    let newest = [0, SECOND].into_iter().max_by_key(|&place| {
        let block = &world.log[place..][..BLOCK_BYTES];
        LogSuperblock::parse(block).unwrap().sequence.get()
    });
    let newest = newest.unwrap();
    (world, newest)
}

/// Who moves the tail past what is not destaged drops it, if the checksum is all that is compared.
#[test]
fn replay_refuses_a_superblock_that_somebody_without_the_key_has_written() {
    for has_keys in [true, false] {
        for (is_newest, change) in [(true, 0), (true, 1), (true, 2), (false, 0)] {
            let (mut world, newest) = authenticated_world();
            if !has_keys {
                world.keys = None;
            }
            let place = if is_newest { newest } else { SECOND - newest };
            let block = &mut world.log[place..][..BLOCK_BYTES];
            let superblock = LogSuperblock::mut_from_bytes(block).unwrap();
            match change {
                0 => superblock.tail = 20.into(),
                1 => superblock.flags = 1.into(),
                _ => superblock.data_key = [0; 16],
            }
            superblock.tag[0] ^= u8::from(change == 2);
            superblock.seal();
            let before = world.log.clone();
            world.try_reopen();
            if has_keys {
                assert_eq!(world.volume.phase(), Phase::Failed(OpenError::Forged));
                assert!(world.log == before, "a refused opening writes nothing");
            } else {
                assert_ne!(world.volume.phase(), Phase::Failed(OpenError::Forged));
            }
        }
    }
}

#[test]
fn replay_takes_what_holders_of_the_key_have_written() {
    let (mut world, newest) = authenticated_world();
    world.reopen();
    for block in 0..10 {
        holds(&mut world, block, block + 1);
    }
    for place in [0, SECOND] {
        let superblock = LogSuperblock::parse(&world.log[place..][..BLOCK_BYTES]).unwrap();
        assert_eq!(superblock.authenticate(Some(&Toy)), Ok(()));
    }
    // One that is torn is nobody's work.
    let (mut torn, at) = authenticated_world();
    torn.log[SECOND - at + 100] ^= 1;
    torn.reopen();
    holds(&mut torn, 9, 10);
    // One that is kept beside the device is asked for its tag, too.
    let mut kept = LogSuperblock::parse(&world.log[newest..][..BLOCK_BYTES]).unwrap();
    kept.sequence = (kept.sequence.get() + 2).into();
    for (tail, is_forged) in [(kept.tail, false), (2.into(), true)] {
        kept.seal_with(Some(&Toy));
        if is_forged {
            kept.tail = tail;
            kept.seal();
        }
        world.kept = Some(kept);
        world.try_reopen();
        let refused = world.volume.phase() == Phase::Failed(OpenError::Forged);
        assert_eq!(refused, is_forged);
    }
}
