//! A volume in trouble, and its clients meanwhile.

use hdcs_core::base::error::{IoError, RequestError};
use hdcs_core::base::io::{Completion, Done, Nanos, Reply, Request, RequestId, SectorRange, Token};
use hdcs_core::volume::{Copies, Event, Persist, State, Trouble, WhenFull};
use hdcs_kit::volume::World;

const BLOCK: SectorRange = SectorRange::new(8, 8);

fn send_write(world: &mut World, id: u64, mark: u8) {
    let mut data = world.pool.alloc_for(BLOCK).expect("room");
    data.fill(mark);
    let request = Request::Write {
        range: BLOCK,
        data: data.freeze(),
        fua: false,
    };
    let id = RequestId(id);
    world.step(Event::Request { id, request });
}

/// A write to the log that was kept unanswered ends now.
fn answer(world: &mut World, token: Token, result: Result<Done, IoError>) {
    world.step(Event::Completed(Completion { token, result }));
}

#[test]
fn read_of_a_block_that_is_rewritten_all_the_time_is_answered() {
    let mut world = World::new(Persist::OnWrite);
    world.log_silent = Some(Vec::new());
    send_write(&mut world, 1, 1);
    let request = Request::Read { range: BLOCK };
    let id = RequestId(1000);
    world.step(Event::Request { id, request });
    assert!(world.replies.is_empty(), "what is not durable is not shown");
    // There is always one more write that is not durable yet.
    let mut answered = None;
    for round in 2..100 {
        send_write(&mut world, round, round as u8);
        let token = world.log_silent.as_mut().expect("set").remove(0);
        answer(&mut world, token, Ok(Done::Written));
        if let Some(at) = world.replies.iter().position(|(id, _)| id.0 == 1000) {
            answered = Some((round, world.replies.remove(at).1));
            break;
        }
    }
    let Some((2, Ok(Reply::Data(data)))) = answered else {
        panic!("not answered when what was there became durable: {answered:?}");
    };
    assert_eq!(data[..], [1; 4096], "no newer version than is durable");
}

#[test]
fn trouble_counts_from_when_the_volume_ceased_to_be_healthy() {
    let mut world = World::new(Persist::OnWrite);
    world.write(8, &[1; 4096]);
    // Memory has nothing of it any more.
    world.reopen();
    world.log_mute = true;
    world.step(Event::DestageAll);
    let Some((Trouble::LogUnreadable, since)) = world.volume.trouble() else {
        panic!("not {:?}", world.volume.trouble());
    };
    world.now = world.now.plus(Nanos::from_millis(60_000));
    world.log_silent = Some(Vec::new());
    send_write(&mut world, 1, 2);
    let token = world.log_silent.as_mut().expect("set").remove(0);
    answer(&mut world, token, Err(IoError::Failed));
    let trouble = world.volume.trouble();
    assert_eq!(trouble, Some((Trouble::LogFailed, since)));
}

/// Two generations in the log alone, then something newer: blocks 1, 2 and 3.
fn dirty(when_full: WhenFull) -> World {
    let mut world = World::new(Persist::OnWrite);
    world.config.resident_bytes_max = 0;
    world.config.when_full = when_full;
    world.step(Event::Reconfigure(world.config.clone()));
    for block in 1..4 {
        world.write(8 * block, &[block as u8; 4096]);
        world.ask(Request::Flush);
    }
    world
}

/// Where the log has the block of a mark.
fn in_log(world: &World, mark: u8) -> usize {
    let mut blocks = world.log.chunks_exact(4096);
    4096 * blocks
        .position(|block| block == [mark; 4096])
        .expect("it is there")
}

fn ask(world: &mut World, request: Request) -> Result<Reply, RequestError> {
    let id = RequestId(7);
    world.step(Event::Request { id, request });
    for _ in 0..100 {
        if let Some((_, result)) = world.replies.pop() {
            return result;
        }
        world.now = world.now.plus(Nanos::from_millis(10));
        world.step(Event::Poll);
    }
    panic!("no reply");
}

fn read(world: &mut World, block: u64) -> Result<u8, RequestError> {
    let range = SectorRange::new(8 * block, 8);
    let reply = ask(world, Request::Read { range })?;
    let Reply::Data(data) = reply else {
        panic!("not data: {reply:?}");
    };
    assert!(data.iter().all(|&byte| byte == data[0]));
    Ok(data[0])
}

fn write(world: &mut World, block: u64, mark: u8) -> Result<(), RequestError> {
    let range = SectorRange::new(8 * block, 8);
    let mut data = world.pool.alloc_for(range).expect("room");
    data.fill(mark);
    let (data, fua) = (data.freeze(), false);
    ask(world, Request::Write { range, data, fua }).map(drop)
}

fn pass(world: &mut World) {
    for _ in 0..100 {
        world.now = world.now.plus(Nanos::from_millis(100));
        world.step(Event::Poll);
    }
}

#[test]
fn bad_read_of_the_log_that_passes_does_no_harm() {
    for spoiled in 1..3 {
        let mut world = dirty(WhenFull::Wait);
        world.log_spoils = spoiled;
        assert_eq!(read(&mut world, 2), Ok(2));
        assert_eq!(world.volume.state(), State::Healthy);
        world.log_spoils = spoiled;
        world.step(Event::DestageAll);
        pass(&mut world);
        assert_eq!(world.volume.state(), State::Healthy);
        for block in 1..4 {
            assert_eq!(world.backend[4096 * block..][..4096], [block as u8; 4096]);
        }
    }
}

#[test]
fn damage_in_the_log_stops_writes_and_the_destage_behind_it() {
    for (when_full, is_read) in [(WhenFull::Wait, true), (WhenFull::Error, false)] {
        let mut world = dirty(when_full);
        let bad = in_log(&world, 2);
        world.log[bad + 100] ^= 1;
        if is_read {
            assert_eq!(read(&mut world, 2), Err(RequestError::Corrupt));
            assert_eq!(world.volume.state(), State::Inconsistent);
        }
        world.step(Event::DestageAll);
        pass(&mut world);
        assert_eq!(world.volume.state(), State::Inconsistent);
        assert_eq!(world.backend[4096..8192], [1; 4096], "what lies before it");
        assert_eq!(
            world.backend[8192..16_384],
            [0; 8192],
            "what lies behind it"
        );
        assert_eq!(write(&mut world, 1, 9), Err(RequestError::Inconsistent));
        let flushed = ask(&mut world, Request::Flush).map(drop);
        assert_eq!(flushed, Err(RequestError::Inconsistent));
        assert_eq!(read(&mut world, 1), Ok(1));
        assert_eq!(read(&mut world, 2), Err(RequestError::Corrupt));
        assert_eq!(read(&mut world, 3), Ok(3));
        // It was the way, and not the medium: all goes on.
        world.log[bad + 100] ^= 1;
        assert_eq!(read(&mut world, 2), Ok(2));
        assert_eq!(world.volume.state(), State::Healthy);
        assert_eq!(write(&mut world, 1, 9), Ok(()));
        world.close(true);
        for (block, mark) in [(1, 9), (2, 2), (3, 3)] {
            assert_eq!(world.backend[4096 * block..][..4096], [mark; 4096]);
        }
    }
}

#[test]
fn damage_in_the_log_does_not_keep_a_volume_from_closing() {
    for destage in [false, true] {
        let mut world = dirty(WhenFull::Wait);
        let bad = in_log(&world, 2);
        world.log[bad + 100] ^= 1;
        world.close(destage);
    }
}

#[test]
fn destage_that_failed_asks_for_a_poll_when_it_is_to_go_on() {
    let mut world = World::new(Persist::OnWrite);
    world.write(8, &[1; 4096]);
    world.backend_silent = Some(Vec::new());
    world.step(Event::DestageAll);
    let token = world.backend_silent.as_mut().expect("set").remove(0);
    answer(&mut world, token, Err(IoError::Failed));
    let at = world.volume.next_wakeup().expect("it goes on by itself");
    // The first pause is short; other things that it may wake for are later.
    assert!(at > world.now && at <= world.now.plus(Nanos::from_millis(10)));
    world.now = at;
    world.step(Event::Poll);
    assert_eq!(world.backend_silent.as_ref().map(Vec::len), Some(1));
}

#[test]
fn copies_that_are_missing_show_and_too_few_of_them_more_than_what_waits_for_them() {
    let mut world = World::new(Persist::OnWrite);
    let second = |count: u64| Nanos::from_millis(count * 1000);
    let shown = |world: &World| {
        (
            world.volume.state(),
            world.volume.trouble().map(|(what, _)| what),
        )
    };
    world.volume.set_copies(Copies::Short, second(1));
    assert_eq!(shown(&world), (State::Degraded, Some(Trouble::CopiesShort)));
    // What is written waits for copies, and the log looks silent.
    world.volume.set_copies(Copies::TooFew, second(2));
    world.log_silent = Some(Vec::new());
    send_write(&mut world, 1, 1);
    world.now = world.now.plus(second(3600));
    world.step(Event::Poll);
    assert_eq!(
        shown(&world),
        (State::ReadOnly, Some(Trouble::CopiesTooFew))
    );
    assert!(world.replies.is_empty());
    let token = world.log_silent.take().expect("set").remove(0);
    world.volume.set_copies(Copies::All, second(3));
    answer(&mut world, token, Ok(Done::Written));
    assert_eq!(shown(&world), (State::Healthy, None));
    assert_eq!(world.replies.len(), 1);
}
