//! A log of which only a part is prepared: it lies in that part, whatever becomes of it, and is found again.

use hdcs_core::base::error::{IoError, OpenError};
use hdcs_core::base::io::{Completion, Done, Nanos, RequestId, SectorRange, Token};
use hdcs_core::base::limits::{
    BLOCK_BYTES, LOG_BYTES_MIN, REQUEST_BLOCKS_MAX, SPAN_DATA_BLOCKS_MAX,
};
use hdcs_core::format::{LOG_HEADER_BLOCKS, LogSuperblock};
use hdcs_core::log::write_log::{PREPARED_BLOCKS_LEAST, region_bytes};
use hdcs_core::volume::sharing::{
    GivenBack, give_log_back, log_bytes, set_log_prepared, share_log_space,
};
use hdcs_core::volume::{Event, LogFailure, Persist, Phase, VolumeConfig};
use hdcs_kit::volume::{World, config};

use super::evidence::Bench;

const LEAST: u64 = LOG_BYTES_MIN;

/// A log of four times the least size, of which the least is prepared.
fn bench() -> Bench {
    let mut bench = Bench::new(4 * LEAST as usize);
    bench.log.give_back(LEAST);
    bench
}

/// Write spans until one lies in the next lap; how many are not retired.
fn fill_lap(bench: &mut Bench) -> usize {
    let lap = bench.log.head() / bench.log.ring_blocks();
    while bench.log.head() / bench.log.ring_blocks() == lap {
        if !bench.log.has_room(256, None) {
            bench.retire(1);
        }
        bench.write_span(&[256]);
        bench.log.check_allocation();
    }
    bench.log.spans().len()
}

#[test]
fn log_goes_on_with_the_next_lap_where_what_is_prepared_ends() {
    let mut bench = bench();
    bench.write_span(&[100]);
    let ring = bench.log.ring_blocks();
    assert_eq!(bench.log.prepared_blocks(), PREPARED_BLOCKS_LEAST);
    bench.write_span(&[256]);
    bench.retire(2);
    assert_eq!(bench.log.used_blocks(), 0);
    let spans = fill_lap(&mut bench);
    assert!(bench.log.head() > ring && bench.log.head() < ring + 300 && spans > 9);
    assert_eq!(bench.replay(), Ok(bench.log.head()));
    // What was jumped over is neither free nor full for ever.
    bench.retire(spans);
    assert_eq!(bench.log.used_blocks(), 0);
}

#[test]
fn log_that_is_full_has_no_room_before_its_tail_moves() {
    let mut bench = bench();
    let mut spans = 0;
    while bench.log.has_room(256, None) {
        bench.write_span(&[256]);
        spans += 1;
    }
    let used = bench.log.used_blocks();
    assert!(used > PREPARED_BLOCKS_LEAST * 3 / 4 && used <= PREPARED_BLOCKS_LEAST);
    bench.retire(spans / 2);
    assert!(bench.log.has_room(256, None));
    let mut more = 0;
    while bench.log.has_room(256, None) {
        bench.write_span(&[256]);
        bench.log.check_allocation();
        more += 1;
    }
    assert!(more >= spans / 2 - 4, "{more} of {spans}");
    assert_eq!(bench.replay(), Ok(bench.log.head()));
}

#[test]
fn growth_is_used_in_the_lap_that_is_under_way() {
    let mut bench = bench();
    while bench.log.head() + 1600 < PREPARED_BLOCKS_LEAST {
        bench.write_span(&[256]);
    }
    let fill = bench.log.used_blocks();
    bench.log.prepare(3 * LEAST);
    assert_eq!(bench.log.used_blocks(), fill);
    for _ in 0..12 {
        bench.write_span(&[256]);
    }
    assert!(
        bench.log.head() > PREPARED_BLOCKS_LEAST && bench.log.head() < 2 * PREPARED_BLOCKS_LEAST
    );
    assert_eq!(bench.replay(), Ok(bench.log.head()));
    // Less than there is, or more than the ring has, changes nothing.
    let prepared = bench.log.prepared_blocks();
    bench.log.prepare(2 * LEAST);
    assert_eq!(bench.log.prepared_blocks(), prepared);
    bench.log.prepare(u64::MAX);
    assert_eq!(bench.log.prepared_blocks(), bench.log.ring_blocks());
}

#[test]
fn growth_while_the_tail_is_in_the_lap_before_covers_nothing() {
    let mut bench = bench();
    for _ in 0..8 {
        bench.write_span(&[256]);
    }
    bench.retire(6);
    let mut spans = 2;
    while bench.log.has_room(REQUEST_BLOCKS_MAX as u64, None) {
        bench.write_span(&[256]);
        spans += 1;
    }
    assert!(bench.log.head() > bench.log.ring_blocks());
    bench.log.prepare(2 * LEAST);
    assert!(!bench.log.has_room(REQUEST_BLOCKS_MAX as u64, None));
    assert_eq!(bench.replay(), Ok(bench.log.head()));
    // Once the tail has followed, there is more room than before.
    bench.retire(spans);
    let mut blocks = 0;
    while bench.log.has_room(256, None) {
        bench.write_span(&[256]);
        blocks += 256;
    }
    assert!(blocks > PREPARED_BLOCKS_LEAST, "{blocks}");
    assert_eq!(bench.replay(), Ok(bench.log.head()));
}

#[test]
fn least_that_is_prepared_takes_the_largest_request_beside_a_full_open_span() {
    let mut bench = bench();
    for position in 0..40 {
        assert!(bench.log.has_room(REQUEST_BLOCKS_MAX as u64 + 1, None));
        bench.write_span(&[200 + position]);
        bench.retire(1);
    }
    bench.accept(256);
    bench.accept(SPAN_DATA_BLOCKS_MAX - 257);
    assert!(bench.log.has_room(REQUEST_BLOCKS_MAX as u64 + 1, None));
    // What is said to be less is the least all the same.
    let mut tiny = Bench::new(4 * LEAST as usize);
    tiny.log.give_back(0);
    assert_eq!(tiny.log.prepared_blocks(), PREPARED_BLOCKS_LEAST);
}

#[test]
fn log_is_at_rest_once_both_superblocks_say_that_it_is_empty() {
    let mut bench = bench();
    assert!(bench.log.is_at_rest());
    bench.write_span(&[10]);
    assert!(!bench.log.is_at_rest());
    bench.retire(1);
    // The older one names the tail of before.
    assert!(bench.log.is_empty() && !bench.log.is_at_rest());
    bench.retire(0);
    assert!(bench.log.is_at_rest());
}

#[test]
#[should_panic(expected = "what may be needed is not given back")]
fn log_that_the_older_superblock_needs_gives_nothing_back() {
    let mut bench = bench();
    bench.write_span(&[10]);
    bench.retire(1);
    bench.log.give_back(LEAST);
}

#[test]
fn log_that_has_given_back_goes_on_from_behind_what_is_left() {
    let mut bench = bench();
    bench.log.prepare(3 * LEAST);
    let mut spans = 0;
    while bench.log.head() < 2 * PREPARED_BLOCKS_LEAST {
        bench.write_span(&[256]);
        spans += 1;
    }
    bench.retire(spans);
    bench.retire(0);
    bench.log.give_back(LEAST);
    bench.punch();
    assert_eq!(bench.log.used_blocks(), 0);
    assert_eq!(bench.replay(), Ok(bench.log.head()));
    bench.write_span(&[256]);
    assert_eq!(bench.log.head() % bench.log.ring_blocks(), 257);
    assert_eq!(bench.log.used_blocks(), 257);
    assert_eq!(bench.replay(), Ok(bench.log.head()));
    let newest = bench.retire(1);
    assert_eq!(bench.log.used_blocks(), 0);
    bench.device[newest + 100] ^= 1;
    assert_eq!(bench.replay(), Ok(bench.log.head()));
}

#[test]
fn what_proves_an_end_wrong_is_found_in_the_next_lap() {
    // Where the lap ends is moved on, block by block of what a span has.
    let mut jumps = 0;
    for blocks in [1, 30, 100, 256] {
        for before in (0..600).step_by(37) {
            let mut bench = bench();
            while bench.log.head() + 700 + before < PREPARED_BLOCKS_LEAST {
                bench.write_span(&[256]);
                bench.retire(1);
            }
            let end = bench.log.head();
            let rotten = bench.append(blocks);
            bench.end(&[rotten]);
            let mut torn = Vec::new();
            while bench.log.head() < bench.log.ring_blocks() {
                let spans = bench.fill(blocks);
                assert!(!spans.is_empty());
                bench.end(&spans);
                torn = spans;
                if bench.log.head() - end > 1000 && bench.log.head() < bench.log.ring_blocks() {
                    break;
                }
            }
            let Some(last) = torn
                .pop()
                .filter(|_| bench.log.head() > bench.log.ring_blocks())
            else {
                continue;
            };
            jumps += 1;
            bench.write(&last);
            let found = bench.replay();
            assert_eq!(
                found,
                Err(OpenError::CorruptLog { position: end }),
                "{blocks} {before}"
            );
        }
    }
    assert!(jumps > 20, "{jumps}");
}

/// The newest superblock rots. The one before names a tail where nothing follows any more: the log went on with the next
/// lap, and has come as far as that tail and beyond it.
#[test]
fn replay_from_an_older_tail_goes_beyond_its_place_in_the_next_lap() {
    let mut bench = bench();
    while bench.log.head() + 257 <= PREPARED_BLOCKS_LEAST {
        bench.write_span(&[256]);
        bench.retire(1);
    }
    let older = bench.log.head();
    assert!(older < PREPARED_BLOCKS_LEAST);
    bench.write_span(&[256]);
    assert_eq!(bench.log.spans()[0].position, bench.log.ring_blocks());
    bench.write_span(&[200]);
    let newest = bench.retire(1);
    bench.log.prepare(2 * LEAST);
    while bench.log.head() < older + bench.log.ring_blocks() + 600 {
        bench.write_span(&[200]);
    }
    let head = bench.log.head();
    assert_eq!(bench.replay(), Ok(head));
    bench.device[newest + 100] ^= 1;
    assert_eq!(bench.replay(), Ok(head));
    bench.reopen();
    bench.log.check_allocation();
    bench.write_span(&[100]);
    assert_eq!(bench.replay(), Ok(bench.log.head()));
}

/// What is done to a log, at random. Whatever it is, an opening finds all that was written, and where the newest superblock
/// has rotted, the one before brings back all of it or says that it cannot.
#[test]
fn log_is_found_again_however_it_grows_gives_back_and_crashes() {
    let (mut jumps, mut gifts, mut grown, mut older) = (0, 0, 0, 0);
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let all = LEAST * random.u64(2..6) + random.u64(..256) * BLOCK_BYTES as u64;
        let mut bench = Bench::new(all as usize);
        bench.log.give_back(LEAST);
        for _ in 0..120 {
            match random.u32(..100) {
                0..60 => {
                    let blocks = random.usize(1..=REQUEST_BLOCKS_MAX);
                    if bench.log.has_room(blocks as u64, None) {
                        let lap = bench.log.head() / bench.log.ring_blocks();
                        bench.write_span(&[blocks]);
                        jumps += bench.log.head() / bench.log.ring_blocks() - lap;
                    } else {
                        let spans = bench.log.spans().len();
                        bench.retire(random.usize(1..=spans));
                    }
                }
                60..72 => {
                    let spans = bench.log.spans().len();
                    bench.retire(random.usize(..=spans));
                }
                72..80 => {
                    let spans = bench.log.spans().len();
                    bench.retire(spans);
                    bench.retire(0);
                    let to = random.u64(..=all);
                    bench.log.give_back(to);
                    // The crash may come before the hole is made.
                    if random.bool() {
                        bench.punch();
                    }
                    gifts += 1;
                }
                80..90 => {
                    let before = bench.log.prepared_blocks();
                    let to = region_bytes(before) + random.u64(..LEAST);
                    bench.punch();
                    bench.log.prepare(to);
                    grown += u32::from(bench.log.prepared_blocks() > before);
                }
                90..95 => {
                    let (mine, head) = (bench.log.prepared_blocks(), bench.log.head());
                    bench.reopen();
                    assert_eq!(bench.log.head(), head, "seed {seed}");
                    assert_eq!(bench.log.prepared_blocks(), mine, "seed {seed}");
                }
                _ => {
                    let newest = bench.newest_superblock();
                    bench.device[newest + 100] ^= 1;
                    match bench.replay() {
                        Ok(found) => assert_eq!(found, bench.log.head(), "seed {seed}"),
                        Err(OpenError::CorruptLog { .. }) => {}
                        Err(error) => panic!("seed {seed}: {error}"),
                    }
                    older += 1;
                    bench.device[newest + 100] ^= 1;
                }
            }
            bench.log.check_allocation();
            bench.log.check_invariants();
        }
        assert_eq!(bench.replay(), Ok(bench.log.head()), "seed {seed}");
    }
    assert!(
        jumps > 60 && gifts > 60 && grown > 60 && older > 60,
        "{jumps} {gifts} {grown} {older}"
    );
}

/// A volume whose log shares the space of its file system.
fn sharing_world() -> World {
    let config = VolumeConfig {
        log_bytes: 4 * LEAST,
        ..config(Persist::OnWrite)
    };
    let mut world = World::with(config, None);
    // Nobody has asked for it.
    assert_eq!(give_log_back(&mut world.volume, LEAST), GivenBack::No);
    for index in 0..2 {
        let at = LogSuperblock::offset_of(index) as usize;
        let block = &mut world.log[at..at + BLOCK_BYTES];
        share_log_space(block.try_into().unwrap());
    }
    world.reopen();
    world
}

fn complete(world: &mut World, token: Token, result: Result<Done, IoError>) {
    world.step(Event::Completed(Completion { token, result }));
}

#[test]
fn log_that_is_given_up_or_whose_backend_has_another_owner_neither_grows_nor_gives() {
    for is_fenced in [false, true] {
        let mut world = sharing_world();
        world.config.log_failure = LogFailure::PassThrough;
        world.reopen();
        give_log_back(&mut world.volume, LEAST);
        world.write(0, &[1; BLOCK_BYTES]);
        let before = log_bytes(&world.volume).unwrap();
        assert!(before.is_shared && before.prepared < before.all);
        world.backend_silent = Some(Vec::new());
        if is_fenced {
            world.step(Event::DestageAll);
            let written = world.backend_silent.take().expect("it is held back");
            complete(&mut world, written[0], Err(IoError::Fenced));
        } else {
            world.log_silent = Some(Vec::new());
            let request = world.write_request(8, &[2; BLOCK_BYTES], false);
            let id = RequestId(9);
            world.step(Event::Request { id, request });
            let written = world.log_silent.take().expect("it is held back");
            complete(&mut world, written[0], Err(IoError::Failed));
            assert!(world.volume.log_is_given_up());
        }
        let after = log_bytes(&world.volume).unwrap();
        assert_eq!(after.prepared, before.prepared);
        assert!(!after.is_shared && after.all == after.prepared, "{after:?}");
    }
}

fn rest(world: &mut World, millis: u64) {
    world.now = world.now.plus(Nanos::from_millis(millis));
    world.step(Event::Poll);
}

#[test]
fn volume_gives_back_once_its_log_is_destaged_and_both_superblocks_say_so() {
    let mut world = sharing_world();
    assert_eq!(give_log_back(&mut world.volume, 2 * LEAST), GivenBack::Yes);
    assert_eq!(log_bytes(&world.volume).unwrap().prepared, 2 * LEAST);
    world.write(0, &[1; BLOCK_BYTES]);
    assert_eq!(give_log_back(&mut world.volume, LEAST), GivenBack::No);
    world.step(Event::DestageAll);
    for _ in 0..100 {
        rest(&mut world, 10);
    }
    assert_eq!(log_bytes(&world.volume).unwrap().used, 0);
    assert_eq!(give_log_back(&mut world.volume, LEAST), GivenBack::Soon);
    rest(&mut world, 10);
    rest(&mut world, 10);
    assert_eq!(give_log_back(&mut world.volume, LEAST), GivenBack::Yes);
    let found = log_bytes(&world.volume).unwrap();
    assert_eq!((found.all, found.prepared), (4 * LEAST, LEAST));
    world.write(8, &[2; BLOCK_BYTES]);
    set_log_prepared(&mut world.volume, 3 * LEAST);
    assert_eq!(log_bytes(&world.volume).unwrap().prepared, 3 * LEAST);
    world.reopen();
    assert_eq!(world.volume.phase(), Phase::Open);
    assert!(
        world
            .read(SectorRange::new(8, 8))
            .iter()
            .all(|&byte| byte == 2)
    );
}

#[test]
fn volume_fills_what_is_prepared_and_destages_by_that() {
    let mut world = sharing_world();
    assert_eq!(give_log_back(&mut world.volume, LEAST), GivenBack::Yes);
    let least = LEAST - LOG_HEADER_BLOCKS * BLOCK_BYTES as u64;
    for round in 0..40u64 {
        world.write(round % 3 * 2048, &vec![round as u8; 1 << 20]);
        let stats = world.volume.stats(world.now);
        assert_eq!(stats.log_prepared_blocks * BLOCK_BYTES as u64, least);
        assert!(stats.log_used_blocks <= stats.log_prepared_blocks);
    }
    assert!(world.log[LEAST as usize..].iter().all(|&byte| byte == 0));
}
