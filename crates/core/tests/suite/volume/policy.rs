//! What each policy does with a write and a read, and how one becomes another.

use hdcs_core::base::buf::Buf;
use hdcs_core::base::codec::Method;
use hdcs_core::base::error::{IoError, RequestError};
use hdcs_core::base::io::{
    Action, Completion, Done, Nanos, Reply, Request, RequestId, SectorRange, Token,
};
use hdcs_core::volume::{Event, Persist, Policy, State};
use hdcs_kit::volume::World;

const ONE: SectorRange = SectorRange::new(8, 8);

fn set(world: &mut World, policy: Policy) {
    world.config.policy = policy;
    world.step(Event::Reconfigure(world.config.clone()));
    for _ in 0..1000 {
        if world.volume.policy() == policy {
            return;
        }
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
    }
    panic!("{policy:?} is not in effect");
}

fn backend(world: &World) -> &[u8] {
    &world.backend[ONE.byte_offset() as usize..][..ONE.bytes()]
}

fn dram_hits(world: &World) -> u64 {
    world.volume.stats(world.now).dram_hit_blocks
}

/// A volume goes back to write-back, and fails to flush what went past the log, which a client's flush is told.
fn leave_unflushed(world: &mut World) {
    set(world, Policy::WriteAround);
    world.write(ONE.start, &[1; 4096]);
    world.flush_silent = Some(Vec::new());
    set(world, Policy::WriteBack);
    let of_volume = flushes(world);
    complete(world, of_volume[0], Err(IoError::Failed));
    send(world, Request::Flush);
    let told = answer(world).expect("it is told");
    assert_eq!(told.unwrap_err(), RequestError::Io);
}

/// Such a volume over an atomic backend, with another write. No data of its log stays in memory.
fn unflushed_over_atomic() -> World {
    let mut config = hdcs_kit::volume::config(Persist::OnWrite);
    (config.backend_atomic, config.resident_bytes_max) = (true, 0);
    let mut world = World::with(config, None);
    leave_unflushed(&mut world);
    world.write(ONE.start, &[2; 4096]);
    world
}

/// A write of the first block.
fn write_one(world: &World, mark: u8) -> Request {
    let mut data = world.pool.alloc_for(ONE).expect("it is all free");
    data.fill(mark);
    Request::Write {
        range: ONE,
        data: data.freeze(),
        fua: false,
    }
}

/// What is asked while what it needs is held back.
fn send(world: &mut World, request: Request) {
    let id = RequestId(9);
    world.step(Event::Request { id, request });
}

/// How that was answered.
fn answer(world: &mut World) -> Option<Result<Reply, RequestError>> {
    let place = world.replies.iter().position(|(id, _)| *id == RequestId(9));
    place.map(|place| world.replies.remove(place).1)
}

/// What was held back ends.
fn complete(world: &mut World, token: Token, result: Result<Done, IoError>) {
    world.step(Event::Completed(Completion { token, result }));
}

/// What is dirty is destaged from now on, before its age calls for it.
fn hasten_destage(world: &mut World) {
    world.config.dirty_ratio_min = 0;
    world.step(Event::Reconfigure(world.config.clone()));
    world.step(Event::Poll);
}

/// The flushes of the backend that are held back.
fn flushes(world: &mut World) -> Vec<Token> {
    core::mem::take(world.flush_silent.as_mut().expect("they are held back"))
}

#[test]
fn policy_says_where_a_write_is_when_it_is_acknowledged() {
    for (policy, is_there, is_kept) in [
        (Policy::WriteBack, false, false),
        (Policy::WriteThrough, true, true),
        (Policy::WriteAround, true, false),
        (Policy::PassThrough, true, false),
    ] {
        let mut world = World::new(Persist::OnWrite);
        set(&mut world, policy);
        world.write(ONE.start, &[7; 4096]);
        assert_eq!(backend(&world) == [7; 4096], is_there, "{policy:?}");
        let stats = world.volume.stats(world.now);
        assert_eq!(stats.dirty_bytes == 0, is_there, "{policy:?}");
        assert!(*world.read(ONE) == [7; 4096], "{policy:?}");
        assert_eq!(dram_hits(&world) > 0, is_kept, "{policy:?}");
        let before = dram_hits(&world);
        assert!(*world.read(ONE) == [7; 4096], "{policy:?}");
        let caches = is_there && policy != Policy::PassThrough;
        assert_eq!(dram_hits(&world) > before, caches, "{policy:?}");
    }
}

#[test]
fn policy_of_direct_writes_flushes_the_backend_only_when_a_flush_asks_for_it() {
    let mut world = World::new(Persist::OnWrite);
    set(&mut world, Policy::WriteThrough);
    let before = world.backend_flushes;
    world.write(ONE.start, &[1; 4096]);
    assert_eq!(world.backend_flushes, before);
    world.ask(Request::Flush);
    assert_eq!(world.backend_flushes, before + 1);
    world.ask(Request::Flush);
    assert_eq!(world.backend_flushes, before + 1, "all is flushed");
    world.ask(Request::Discard {
        range: ONE,
        fua: true,
    });
    assert_eq!(world.backend_flushes, before + 2);
    assert_eq!(backend(&world), [0; 4096]);
}

#[test]
fn policy_read_only_refuses_writes_and_destages_what_is_dirty() {
    let mut world = World::new(Persist::OnWrite);
    world.write(ONE.start, &[3; 4096]);
    assert_eq!(backend(&world), [0; 4096]);
    set(&mut world, Policy::ReadOnly);
    assert_eq!(backend(&world), [3; 4096]);
    let mut data = world.pool.alloc_for(ONE).expect("it is all free");
    data.fill(4);
    let data: Buf = data.freeze();
    for request in [
        Request::Write {
            range: ONE,
            data,
            fua: false,
        },
        Request::Discard {
            range: ONE,
            fua: false,
        },
    ] {
        let id = RequestId(9);
        world.step(Event::Request { id, request });
        let (_, result) = world.replies.pop().expect("it is refused at once");
        assert_eq!(result.unwrap_err(), RequestError::Policy);
    }
    assert!(*world.read(ONE) == [3; 4096]);
}

#[test]
fn policy_changes_keep_every_write_and_begin_with_an_empty_log() {
    let all = [
        Policy::WriteBack,
        Policy::WriteThrough,
        Policy::WriteAround,
        Policy::PassThrough,
    ];
    let mut world = World::new(Persist::OnWrite);
    let mut mark = 0;
    for from in all {
        for to in all {
            set(&mut world, from);
            mark += 1;
            world.write(ONE.start, &[mark; 4096]);
            set(&mut world, to);
            if to.is_direct() {
                assert_eq!(world.volume.stats(world.now).log_used_blocks, 0);
                assert!(backend(&world) == [mark; 4096], "{from:?} to {to:?}");
            }
            assert!(*world.read(ONE) == [mark; 4096], "{from:?} to {to:?}");
        }
    }
}

#[test]
fn policy_of_a_flush_after_the_return_covers_direct_writes() {
    let mut world = World::new(Persist::OnWrite);
    set(&mut world, Policy::WriteAround);
    world.ask(Request::Flush);
    world.write(ONE.start, &[1; 4096]);
    let before = world.backend_flushes;
    set(&mut world, Policy::WriteBack);
    world.ask(Request::Flush);
    assert_eq!(world.backend_flushes, before + 1);
    world.write(ONE.start, &[2; 4096]);
    world.ask(Request::Flush);
    assert_eq!(world.backend_flushes, before + 1, "the log has this one");
}

/// A client that comes back after a crash has its direct writes covered by its flush, whatever the policy is by then.
#[test]
fn policy_of_a_flush_after_a_crash_covers_direct_writes_of_before() {
    let mut world = World::new(Persist::OnWrite);
    set(&mut world, Policy::WriteAround);
    world.write(ONE.start, &[1; 4096]);
    world.config.policy = Policy::WriteBack;
    for _ in 0..2 {
        let before = world.backend_flushes;
        world.reopen();
        world.ask(Request::Flush);
        assert!(world.backend_flushes > before, "it is not known to be done");
    }
    // The next superblock takes it back, here that of the destage.
    world.write(ONE.start, &[2; 4096]);
    world.step(Event::DestageAll);
    while world.volume.stats(world.now).log_used_blocks > 0 {
        world.step(Event::Poll);
    }
    let before = world.backend_flushes;
    world.reopen();
    world.ask(Request::Flush);
    assert_eq!(world.backend_flushes, before, "nothing went past the log");
}

#[test]
fn policy_of_an_opening_after_a_clean_close_has_nothing_to_flush() {
    let mut world = World::new(Persist::OnWrite);
    set(&mut world, Policy::WriteThrough);
    world.write(ONE.start, &[1; 4096]);
    world.config.policy = Policy::WriteBack;
    world.close(false);
    let before = world.backend_flushes;
    world.reopen();
    world.ask(Request::Flush);
    assert_eq!(world.backend_flushes, before);
}

/// The superblock is written before the first write past the log, and not for each.
#[test]
fn policy_of_direct_writes_marks_the_log_once() {
    let mut world = World::new(Persist::OnWrite);
    set(&mut world, Policy::WriteThrough);
    let clean = world.log.clone();
    world.write(ONE.start, &[1; 4096]);
    let marked = world.log.clone();
    assert_ne!(clean[..8192], marked[..8192]);
    for number in 2..5 {
        world.write(ONE.start, &[number; 4096]);
        world.ask(Request::Flush);
    }
    assert!(world.log == marked);
}

#[test]
fn policy_of_a_volume_whose_log_was_left_dirty_destages_it_first() {
    let mut world = World::new(Persist::OnWrite);
    world.write(ONE.start, &[5; 4096]);
    world.config.policy = Policy::PassThrough;
    world.reopen();
    world.write(ONE.start + 8, &[6; 4096]);
    assert_eq!(world.volume.policy(), Policy::PassThrough);
    assert_eq!(backend(&world), [5; 4096]);
    world.close(false);
    world.reopen();
    assert!(*world.read(ONE) == [5; 4096]);
    assert_eq!(world.volume.stats(world.now).replayed_entries, 0);
}

/// A failure is told to one flush: a client's beside destage's could succeed though what it covers is lost.
#[test]
fn policy_of_a_flush_keeps_that_of_destage_waiting() {
    let mut world = World::new(Persist::OnWrite);
    set(&mut world, Policy::WriteAround);
    world.write(ONE.start, &[1; 4096]);
    world.flush_silent = Some(Vec::new());
    send(&mut world, Request::Flush);
    let of_client = flushes(&mut world);
    set(&mut world, Policy::WriteBack);
    world.write(ONE.start + 8, &[2; 4096]);
    let written = world.backend_writes;
    hasten_destage(&mut world);
    assert!(world.backend_writes > written, "destage goes on beside it");
    assert_eq!(flushes(&mut world), [], "but does not flush");
    let wakeup = world.volume.next_wakeup();
    assert!(
        wakeup.is_none_or(|at| at > world.now),
        "nor turn in circles"
    );
    complete(&mut world, of_client[0], Ok(Done::Written));
    assert!(matches!(answer(&mut world), Some(Ok(Reply::Done))));
    let of_destage = flushes(&mut world);
    assert_eq!(of_destage.len(), 1);
    complete(&mut world, of_destage[0], Ok(Done::Written));
    for _ in 0..10 {
        world.step(Event::Poll);
    }
    assert_eq!(world.volume.stats(world.now).dirty_bytes, 0);
}

/// A volume whose log was empty when all was to be destaged. That waits for a flush of what went past the log, which is
/// held back, while the log has something again that is due.
fn destaging_all_beside_the_log(is_atomic: bool) -> (World, Token) {
    let mut config = hdcs_kit::volume::config(Persist::OnWrite);
    config.backend_atomic = is_atomic;
    let mut world = World::with(config, None);
    set(&mut world, Policy::WriteAround);
    world.write(ONE.start, &[1; 4096]);
    world.flush_silent = Some(Vec::new());
    world.step(Event::DestageAll);
    let flush = flushes(&mut world)[0];
    set(&mut world, Policy::WriteBack);
    world.write(ONE.start + 8, &[2; 4096]);
    hasten_destage(&mut world);
    (world, flush)
}

/// Whether the backend was given what that log has.
fn has_destaged(world: &World) -> bool {
    world.backend[ONE.end() as usize * 512..][..4096] == [2; 4096]
}

fn destage_all_remaining(world: &World) -> u64 {
    let stats = world.volume.stats(world.now);
    stats.destage_all_remaining_bytes
}

/// What is kept of the backend when all is destaged would hold a part of a generation that had begun meanwhile.
#[test]
fn policy_of_destaging_all_past_the_log_takes_up_nothing_of_the_log() {
    for fails in [false, true] {
        let (mut world, mut flush) = destaging_all_beside_the_log(false);
        if fails {
            complete(&mut world, flush, Err(IoError::Failed));
            assert_eq!(flushes(&mut world), [], "it is tried again after a pause");
            let retry = world.volume.next_wakeup().expect("it is tried again");
            assert!(retry > world.now, "it turns in no circles");
            world.now = retry;
            world.step(Event::Poll);
            flush = flushes(&mut world)[0];
        }
        world.step(Event::Poll);
        assert!(!has_destaged(&world), "it waits for the flush");
        assert!(destage_all_remaining(&world) > 0);
        let wakeup = world.volume.next_wakeup();
        assert!(
            wakeup.is_none_or(|at| at > world.now),
            "it turns in no circles"
        );
        let result = Ok(Done::Written);
        let ended = Event::Completed(Completion {
            token: flush,
            result,
        });
        let asked = world.step_alone([ended, Event::Poll]);
        assert_eq!(destage_all_remaining(&world), 0);
        let goes_on = |action: &Action| matches!(action, Action::BackendWrite { .. });
        assert!(asked.iter().any(goes_on), "then destage goes on: {asked:?}");
    }
}

/// Nobody waits for that any more, or for what the log has as well; or the backend shows no part of a generation.
#[test]
fn policy_of_destaging_all_past_the_log_holds_destage_no_longer_than_needed() {
    for event in [
        Event::CancelDestageAll,
        Event::DestageAll,
        Event::Close { destage: true },
    ] {
        let (mut world, _) = destaging_all_beside_the_log(false);
        let name = format!("{event:?}");
        world.step(event);
        assert!(has_destaged(&world), "{name}");
    }
    let (mut world, flush) = destaging_all_beside_the_log(true);
    complete(&mut world, flush, Err(IoError::Failed));
    assert!(has_destaged(&world), "before that is tried again");
}

#[test]
fn policy_of_a_flush_beside_that_of_destage_shares_its_end() {
    for ok in [true, false] {
        let mut world = World::new(Persist::OnWrite);
        leave_unflushed(&mut world);
        world.write(ONE.start + 8, &[2; 4096]);
        hasten_destage(&mut world);
        let of_destage = flushes(&mut world);
        assert_eq!(of_destage.len(), 1);
        send(&mut world, Request::Flush);
        assert_eq!(flushes(&mut world), [], "not beside destage's");
        assert!(answer(&mut world).is_none());
        let result = if ok {
            Ok(Done::Written)
        } else {
            Err(IoError::Failed)
        };
        complete(&mut world, of_destage[0], result);
        assert_eq!(answer(&mut world).expect("it has ended").is_ok(), ok);
    }
}

/// A write waits to have the log marked until another superblock is written; that one fails.
#[test]
fn policy_of_a_write_past_a_log_that_fails_before_the_mark_is_refused() {
    let mut world = World::new(Persist::OnWrite);
    set(&mut world, Policy::WriteThrough);
    world.log_silent = Some(Vec::new());
    world.config.compression = Some(Method::Lz4);
    world.step(Event::Reconfigure(world.config.clone()));
    let write = write_one(&world, 1);
    send(&mut world, write);
    let declaring = world.log_silent.take().expect("they are held back");
    assert_eq!(declaring.len(), 1, "one superblock is written at a time");
    assert!(answer(&mut world).is_none());
    complete(&mut world, declaring[0], Err(IoError::Failed));
    let refused = answer(&mut world).expect("nothing can mark the log any more");
    assert_eq!(refused.unwrap_err(), RequestError::ReadOnly);
    assert_eq!(backend(&world), [0; 4096]);
    set(&mut world, Policy::WriteBack);
    world.close(false);
}

/// A flush that would show a part of a generation waits for destage's own, which does not come.
#[test]
fn policy_of_a_flush_over_a_corrupt_log_is_answered() {
    let mut world = unflushed_over_atomic();
    let block = world.log.chunks(4096).position(|block| block == [2; 4096]);
    world.log[block.expect("it was logged") * 4096] ^= 1;
    hasten_destage(&mut world);
    assert_eq!(world.volume.state(), State::Inconsistent);
    send(&mut world, Request::Flush);
    let refused = answer(&mut world).expect("destage has stopped");
    assert_eq!(refused.unwrap_err(), RequestError::Inconsistent);
    assert_eq!(flushes(&mut world), [], "half of it would show");
    world.close(true);
}

#[test]
fn policy_of_a_flush_is_answered_by_a_close_over_a_failed_log() {
    let mut world = unflushed_over_atomic();
    world.backend_silent = Some(Vec::new());
    hasten_destage(&mut world);
    let of_destage = world.backend_silent.take().expect("they are held back");
    assert_eq!(of_destage.len(), 1);
    send(&mut world, Request::Flush);
    assert!(answer(&mut world).is_none());
    world.log_silent = Some(Vec::new());
    let id = RequestId(7);
    let request = write_one(&world, 3);
    world.step(Event::Request { id, request });
    let of_log = world.log_silent.take().expect("they are held back");
    complete(&mut world, of_log[0], Err(IoError::Failed));
    assert_eq!(world.volume.state(), State::ReadOnly);
    world.step(Event::Close { destage: true });
    complete(&mut world, of_destage[0], Err(IoError::Failed));
    let refused = answer(&mut world).expect("destage is given up");
    assert_eq!(refused.unwrap_err(), RequestError::Closing);
    world.close(true);
}
