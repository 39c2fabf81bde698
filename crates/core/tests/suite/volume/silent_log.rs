//! A log whose device does not answer, and who waits for it.

use hdcs_core::base::error::{IoError, RequestError};
use hdcs_core::base::io::{Completion, Done, Nanos, Reply, Request, RequestId, SectorRange, Token};
use hdcs_core::volume::{Event, LogFailure, Persist, Phase, Policy, State, Trouble, WhenFull};
use hdcs_kit::volume::{World, config};

/// Longer than the device may take.
const TOO_LONG: Nanos = Nanos::from_millis(5_001);
const BLOCK: SectorRange = SectorRange::new(8, 8);

fn world(when_full: WhenFull) -> World {
    let mut config = config(Persist::OnWrite);
    config.when_full = when_full;
    World::with(config, None)
}

fn send(world: &mut World, id: u64, request: Request) {
    let id = RequestId(id);
    world.step(Event::Request { id, request });
}

fn send_write(world: &mut World, id: u64, mark: u8) {
    let request = world.write_request(BLOCK.start, &[mark; 4096], false);
    send(world, id, request);
}

fn pass(world: &mut World, time: Nanos) {
    world.now = world.now.plus(time);
    world.step(Event::Poll);
}

fn errors(world: &mut World) -> Vec<(u64, Option<RequestError>)> {
    let replies = world.replies.drain(..);
    let mut errors: Vec<_> = replies.map(|(id, result)| (id.0, result.err())).collect();
    errors.sort_unstable_by_key(|(id, _)| *id);
    errors
}

fn trouble(world: &World) -> Option<Trouble> {
    world.volume.trouble().map(|(trouble, _)| trouble)
}

fn end(world: &mut World, token: Token, result: Result<Done, IoError>) {
    world.step(Event::Completed(Completion { token, result }));
}

#[test]
fn silent_log_shows_and_is_waited_for() {
    let mut world = world(WhenFull::Wait);
    world.log_silent = Some(Vec::new());
    let began = world.now;
    send_write(&mut world, 1, 1);
    send(&mut world, 2, Request::Read { range: BLOCK });
    pass(&mut world, Nanos::from_millis(4_900));
    assert_eq!(world.volume.state(), State::Healthy);
    let wakeup = world.volume.next_wakeup().expect("the device is watched");
    assert!(wakeup <= began.plus(TOO_LONG), "{wakeup:?}");
    pass(&mut world, Nanos::from_millis(200));
    assert_eq!(world.volume.state(), State::Degraded);
    let Some((Trouble::LogSilent, since)) = world.volume.trouble() else {
        panic!("not silent: {:?}", world.volume.trouble());
    };
    assert_eq!(since, began);
    pass(&mut world, Nanos::from_millis(600_000));
    assert!(world.replies.is_empty(), "they wait");
    let token = world.log_silent.take().expect("set").remove(0);
    end(&mut world, token, Ok(Done::Written));
    assert_eq!(errors(&mut world), [(1, None), (2, None)]);
    pass(&mut world, Nanos(1));
    assert_eq!(world.volume.state(), State::Healthy);
}

#[test]
fn silent_log_is_an_error_to_those_who_are_not_to_wait() {
    let mut world = world(WhenFull::Error);
    world.log_silent = Some(Vec::new());
    send_write(&mut world, 1, 1);
    send(&mut world, 2, Request::Flush);
    send(&mut world, 3, Request::Read { range: BLOCK });
    pass(&mut world, Nanos::from_millis(4_900));
    assert!(world.replies.is_empty());
    pass(&mut world, Nanos::from_millis(200));
    let io = Some(RequestError::Io);
    assert_eq!(errors(&mut world), [(1, io), (2, io), (3, io)]);
    // Nor does anybody wait who comes now.
    send_write(&mut world, 4, 2);
    send(&mut world, 5, Request::Flush);
    send(&mut world, 6, Request::Read { range: BLOCK });
    world.step(Event::Poll);
    assert_eq!(errors(&mut world), [(4, io), (5, io), (6, io)]);
    // What is clean is read.
    send(
        &mut world,
        7,
        Request::Read {
            range: SectorRange::new(800, 8),
        },
    );
    assert_eq!(errors(&mut world), [(7, None)]);
    // What was appended before becomes durable late; what came after was not taken.
    let token = world.log_silent.take().expect("set").remove(0);
    end(&mut world, token, Ok(Done::Written));
    world.step(Event::Poll);
    assert_eq!(world.volume.state(), State::Healthy);
    assert_eq!(world.read(BLOCK)[..], [1; 4096]);
    send(&mut world, 8, Request::Flush);
    assert_eq!(errors(&mut world), [(8, None)]);
}

#[test]
fn writes_are_an_error_while_too_few_nodes_have_copies_of_the_log() {
    let mut world = world(WhenFull::Wait);
    world.log_silent = Some(Vec::new());
    send_write(&mut world, 1, 1);
    send(&mut world, 2, Request::Flush);
    world.step(Event::Poll);
    assert!(world.replies.is_empty());
    world.step(Event::RefuseForCopies(true));
    world.step(Event::Poll);
    let io = Some(RequestError::Io);
    // They may be there some time, or not.
    assert_eq!(errors(&mut world), [(1, io), (2, io)]);
    send_write(&mut world, 3, 2);
    send(&mut world, 4, Request::Flush);
    world.step(Event::Poll);
    assert_eq!(errors(&mut world), [(3, io), (4, io)]);
    send(
        &mut world,
        5,
        Request::Read {
            range: SectorRange::new(800, 8),
        },
    );
    assert_eq!(errors(&mut world), [(5, None)]);
    let token = world.log_silent.take().expect("set").remove(0);
    end(&mut world, token, Ok(Done::Written));
    world.step(Event::RefuseForCopies(false));
    assert_eq!(world.read(BLOCK)[..], [1; 4096]);
    world.write(8, &[3; 4096]);
    assert_eq!(world.read(BLOCK)[..], [3; 4096]);
}

#[test]
fn silent_log_does_not_keep_a_read_that_is_not_to_wait() {
    for when_full in [WhenFull::Wait, WhenFull::Error] {
        let mut world = world(when_full);
        world.write(8, &[1; 4096]);
        // Memory has nothing of it any more.
        world.reopen();
        world.log_reads_silent = Some(Vec::new());
        send(&mut world, 1, Request::Read { range: BLOCK });
        pass(&mut world, TOO_LONG);
        assert_eq!(trouble(&world), Some(Trouble::LogSilent));
        let token = world.log_reads_silent.take().expect("set").remove(0);
        if when_full == WhenFull::Error {
            assert_eq!(errors(&mut world), [(1, Some(RequestError::Io))]);
            // The next one holds no memory until the device answers.
            let free = world.pool.free_bytes();
            send(&mut world, 2, Request::Read { range: BLOCK });
            assert_eq!(errors(&mut world), [(2, Some(RequestError::Io))]);
            assert_eq!(world.pool.free_bytes(), free);
        } else {
            assert!(world.replies.is_empty());
        }
        let mut buf = world.pool.alloc(4096).expect("room");
        buf.fill(1);
        end(&mut world, token, Ok(Done::Read(buf)));
        world.step(Event::Poll);
        if when_full == WhenFull::Wait {
            let (_, result) = world.replies.remove(0);
            assert!(matches!(result, Ok(Reply::Data(data)) if data[..] == [1; 4096]));
        }
        assert!(world.replies.is_empty(), "answered once");
        assert_eq!(world.volume.state(), State::Healthy);
        assert_eq!(world.read(BLOCK)[..], [1; 4096]);
    }
}

/// A device may try a bad sector for a minute, and go on to write beside that.
#[test]
fn silent_read_of_a_log_fails_no_write() {
    let mut world = world(WhenFull::Error);
    world.write(8, &[1; 4096]);
    world.reopen();
    world.log_reads_silent = Some(Vec::new());
    send(&mut world, 1, Request::Read { range: BLOCK });
    pass(&mut world, TOO_LONG);
    assert_eq!(errors(&mut world), [(1, Some(RequestError::Io))]);
    assert_eq!(trouble(&world), Some(Trouble::LogSilent));
    send_write(&mut world, 2, 2);
    send(&mut world, 3, Request::Flush);
    pass(&mut world, TOO_LONG);
    assert_eq!(errors(&mut world), [(2, None), (3, None)]);
    assert_eq!(world.read(BLOCK)[..], [2; 4096]);
}

#[test]
fn silent_log_does_not_keep_a_volume_from_closing() {
    for destage in [false, true] {
        let mut world = world(WhenFull::Wait);
        world.write(8, &[1; 4096]);
        world.log_silent = Some(Vec::new());
        send_write(&mut world, 1, 2);
        send(&mut world, 2, Request::Read { range: BLOCK });
        world.step(Event::Close { destage });
        pass(&mut world, Nanos::from_millis(4_900));
        assert_eq!(world.volume.phase(), Phase::Closing);
        pass(&mut world, Nanos::from_millis(200));
        assert_eq!(world.volume.phase(), Phase::Closed);
        let io = Some(RequestError::Io);
        assert_eq!(errors(&mut world), [(1, io), (2, io)]);
        assert!(world.volume.log_failed(), "its log was not closed");
        assert!(world.volume.awaits_nothing() && !world.volume.is_idle());
        world.volume.shed();
        assert_eq!(world.volume.next_wakeup(), None);
        let late = world.log_silent.take().expect("set");
        for token in late {
            end(&mut world, token, Ok(Done::Written));
        }
        assert!(world.volume.is_idle() && world.replies.is_empty());
        world.reopen();
        assert_eq!(world.read(BLOCK)[..], [1; 4096], "the late write never was");
    }
}

#[test]
fn silent_log_that_takes_no_last_superblock_does_not_keep_a_volume_from_closing() {
    let mut world = world(WhenFull::Wait);
    world.write(8, &[1; 4096]);
    world.log_silent = Some(Vec::new());
    world.step(Event::Close { destage: false });
    assert_eq!(world.volume.phase(), Phase::Closing);
    pass(&mut world, TOO_LONG);
    assert_eq!(world.volume.phase(), Phase::Closed);
    assert!(!world.volume.is_idle());
}

#[test]
fn silent_log_does_not_keep_an_opening_from_closing() {
    for reads in [true, false] {
        let mut world = world(WhenFull::Wait);
        world.write(8, &[1; 4096]);
        if reads {
            world.log_reads_silent = Some(Vec::new());
        } else {
            world.log_silent = Some(Vec::new());
        }
        world.try_reopen();
        assert_eq!(world.volume.phase(), Phase::Opening);
        send_write(&mut world, 1, 2);
        pass(&mut world, TOO_LONG);
        assert_eq!(trouble(&world), Some(Trouble::LogSilent));
        assert!(world.replies.is_empty(), "it waits");
        world.step(Event::Close { destage: false });
        assert_eq!(world.volume.phase(), Phase::Closed);
        assert_eq!(errors(&mut world), [(1, Some(RequestError::Closing))]);
    }
}

#[test]
fn silent_log_is_not_given_up() {
    let mut config = config(Persist::OnWrite);
    config.log_failure = LogFailure::PassThrough;
    let mut world = World::with(config, None);
    world.log_silent = Some(Vec::new());
    send_write(&mut world, 1, 1);
    pass(&mut world, TOO_LONG);
    assert_eq!(trouble(&world), Some(Trouble::LogSilent));
    assert!(world.kept.is_none(), "its superblock stays on its device");
    // A failure that is told later is one.
    let token = world.log_silent.take().expect("set").remove(0);
    end(&mut world, token, Err(IoError::Failed));
    for _ in 0..100 {
        pass(&mut world, Nanos::from_millis(10));
    }
    assert_eq!(trouble(&world), Some(Trouble::LogGivenUp));
    assert_eq!(errors(&mut world), [(1, None)]);
}

#[test]
fn silent_log_keeps_no_write_that_waits_for_its_mark() {
    let mut config = config(Persist::OnWrite);
    config.policy = Policy::WriteAround;
    config.when_full = WhenFull::Error;
    let mut world = World::with(config, None);
    // What an opening under such a policy takes for unflushed is flushed, and the mark goes.
    world.step(Event::Poll);
    world.close(false);
    world.reopen();
    world.log_silent = Some(Vec::new());
    send_write(&mut world, 1, 1);
    assert!(
        !world.log_silent.as_ref().is_some_and(Vec::is_empty),
        "the log is marked before the write"
    );
    pass(&mut world, TOO_LONG);
    assert_eq!(errors(&mut world), [(1, Some(RequestError::Io))]);
    assert_eq!(world.backend[4096..8192], [0; 4096]);
}

#[test]
fn silent_log_that_was_given_up_keeps_nothing() {
    let mut config = config(Persist::OnWrite);
    config.log_failure = LogFailure::PassThrough;
    let mut world = World::with(config, None);
    world.log_silent = Some(Vec::new());
    send_write(&mut world, 1, 1);
    // Enough for a span beside the first.
    for id in 0..32 {
        let request = world.write_request(800 + 8 * id, &[2; 4096], false);
        send(&mut world, 100 + id, request);
    }
    let mut tokens = world.log_silent.take().expect("set");
    assert!(tokens.len() > 1, "{tokens:?}");
    end(&mut world, tokens.remove(0), Err(IoError::Failed));
    for _ in 0..100 {
        pass(&mut world, Nanos::from_millis(10));
    }
    assert_eq!(trouble(&world), Some(Trouble::LogGivenUp));
    pass(&mut world, TOO_LONG);
    assert_eq!(
        trouble(&world),
        Some(Trouble::LogGivenUp),
        "nobody waits for the rest"
    );
    world.close(false);
    assert!(!world.volume.is_idle());
    assert_eq!(world.backend[4096..8192], [1; 4096]);
}
