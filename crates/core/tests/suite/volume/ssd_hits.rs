//! Hits of the SSD tier: read once, to where they are sent from.

use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{
    Action, BlockKey, Completion, Done, Reply, Request, RequestId, SectorRange, Token,
};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::Tier;
use hdcs_core::volume::{Event, Persist};
use hdcs_kit::volume::{BYTES, World};

/// Sectors of a line of 16 KiB.
const LINE: u64 = 32;

/// A world whose SSD tier has every line of the volume, and whose DRAM tier has next to none.
fn world() -> World {
    let mut config = hdcs_kit::volume::config(Persist::OnWrite);
    config.read_ahead_bytes_max = 0;
    let mut world = World::over_ssd(config);
    let lines = BYTES as u64 / 512 / LINE;
    for line in (0..lines).map(|line| line * 7 % lines) {
        world.read(SectorRange::new(line * LINE, 8));
    }
    world.backend_reads.clear();
    world
}

/// Lines of which no block is in memory.
fn lines_on_ssd(world: &World) -> Vec<u64> {
    let is_on_ssd = |block: u64| world.cache.probe(BlockKey::new(1, block)) == Tier::Ssd;
    // The last ones to be read are in a segment that is not written yet.
    let lines = 0..BYTES as u64 / 512 / LINE;
    let last = lines.end;
    let read_early = lines.filter(|line| (0..last / 2).any(|at| at * 7 % last == *line));
    read_early
        .filter(|line| (line * 4..line * 4 + 4).all(is_on_ssd))
        .collect()
}

fn step(world: &mut World, event: Event) -> Vec<Action> {
    let actions = world.step_alone([event, Event::Poll]);
    world.volume.check_invariants();
    actions
}

fn ask(world: &mut World, range: SectorRange) -> Vec<Action> {
    let (id, request) = (RequestId(5), Request::Read { range });
    step(world, Event::Request { id, request })
}

/// The only action, a read of the cache's device.
fn cache_read(actions: Vec<Action>) -> (Token, u64, BufMut) {
    let mut actions = actions.into_iter();
    match (actions.next(), actions.next()) {
        (Some(Action::CacheRead { token, offset, buf }), None) => (token, offset, buf),
        other => panic!("{other:?}"),
    }
}

fn read(world: &World, offset: u64, mut buf: BufMut) -> BufMut {
    let bytes = buf.len();
    buf.copy_from_slice(&world.cache_device[offset as usize..][..bytes]);
    buf
}

fn end(world: &mut World, token: Token, result: Result<Done, IoError>) -> Vec<Action> {
    step(world, Event::Completed(Completion { token, result }))
}

fn reply(actions: Vec<Action>) -> Buf {
    let replies = actions.into_iter().filter_map(|action| match action {
        Action::Reply {
            result: Ok(Reply::Data(data)),
            ..
        } => Some(data),
        _ => None,
    });
    let replies: Vec<Buf> = replies.collect();
    let [data] = &replies[..] else {
        panic!("one reply: {replies:?}");
    };
    data.clone()
}

fn content(world: &World, range: SectorRange) -> Vec<u8> {
    world.backend[range.byte_offset() as usize..][..range.bytes()].to_vec()
}

#[test]
fn ssd_hit_is_read_once_to_where_it_is_sent_from() {
    let mut world = world();
    let lines = lines_on_ssd(&world);
    // A block, a part of one, some of a line, all of it.
    for (line, from, sectors, blocks) in [
        (lines[0], 8, 8, 1),
        (lines[1], 19, 3, 1),
        (lines[2], 8, 24, 3),
        (lines[3], 1, 30, 4),
        (lines[4], 0, 32, 4),
    ] {
        let range = SectorRange::new(line * LINE + from, sectors);
        let free = world.pool.free_bytes();
        let actions = ask(&mut world, range);
        let (token, offset, buf) = cache_read(actions);
        assert_eq!(buf.len(), blocks * BLOCK_BYTES, "one read: {range:?}");
        let held = buf.held_bytes();
        assert_eq!(free - world.pool.free_bytes(), held, "no other buffer");
        let place = buf.as_ptr();
        let buf = read(&world, offset, buf);
        let data = reply(end(&mut world, token, Ok(Done::Read(buf))));
        assert_eq!(data[..], content(&world, range));
        let within = range.offset_in_block();
        assert_eq!(data.as_ptr(), place.wrapping_add(within), "no copy");
        drop(data);
        assert_eq!(world.pool.free_bytes(), free);
    }
    assert_eq!(
        world.volume.stats(world.now).miss_blocks,
        BYTES as u64 / 512 / LINE
    );
}

#[test]
fn ssd_hit_of_several_lines_takes_a_read_for_each() {
    let mut world = world();
    let lines = lines_on_ssd(&world);
    let pairs = || lines.windows(2).filter(|pair| pair[0] + 1 == pair[1]);
    let line = pairs().next().expect("two lines side by side")[0];
    let range = SectorRange::new(line * LINE + 11, LINE);
    let actions = ask(&mut world, range);
    assert_eq!(actions.len(), 2);
    let mut replied = Vec::new();
    for action in actions {
        let (token, offset, buf) = cache_read(vec![action]);
        let buf = read(&world, offset, buf);
        replied.extend(end(&mut world, token, Ok(Done::Read(buf))));
    }
    assert_eq!(reply(replied)[..], content(&world, range));
}

/// What follows of a hit that the device does not bring, or spoils, with the pool as it is then.
#[test]
fn ssd_hit_that_fails_comes_from_the_backend() {
    for is_read in [false, true] {
        let mut world = world();
        let line = lines_on_ssd(&world)[0];
        let range = SectorRange::new(line * LINE + 2, 12);
        let actions = ask(&mut world, range);
        let (token, offset, buf) = cache_read(actions);
        let result = if is_read {
            let mut buf = read(&world, offset, buf);
            buf[5000] ^= 1;
            Ok(Done::Read(buf))
        } else {
            drop(buf);
            Err(IoError::Failed)
        };
        let actions = end(&mut world, token, result);
        world.perform(actions);
        let (_, result) = world.replies.pop().expect("it is answered");
        let Ok(Reply::Data(data)) = result else {
            panic!("{result:?}");
        };
        assert_eq!(data[..], content(&world, range));
        assert_eq!(world.backend_reads.len(), 1);
    }
}

/// The device kept its buffer, and there is no other: it begins anew once there is.
#[test]
fn ssd_hit_that_fails_without_memory_waits_for_it() {
    let mut world = world();
    let line = lines_on_ssd(&world)[0];
    let range = SectorRange::new(line * LINE, 8);
    let actions = ask(&mut world, range);
    let (token, _, buf) = cache_read(actions);
    let mut bytes = 1 << 20;
    let mut held = Vec::new();
    while bytes >= BLOCK_BYTES {
        match world.pool.alloc(bytes) {
            Some(buf) => held.push(buf),
            None => bytes /= 2,
        }
    }
    let actions = end(&mut world, token, Err(IoError::Failed));
    assert!(actions.is_empty(), "{actions:?}");
    drop(held);
    drop(buf);
    let actions = step(&mut world, Event::Poll);
    world.perform(actions);
    let (_, result) = world.replies.pop().expect("it is answered");
    let Ok(Reply::Data(data)) = result else {
        panic!("{result:?}");
    };
    assert_eq!(data[..], content(&world, range));
}
