//! A write with FUA that was acknowledged is in the backend before what was sent after that.

use hdcs_core::base::error::{IoError, RequestError};
use hdcs_core::base::io::{Completion, Done, Nanos, Reply, Request, RequestId, SectorRange};
use hdcs_core::volume::{Event, Persist, Policy};
use hdcs_kit::volume::{BYTES, World};

/// The three kinds of write that may have FUA, onto one block.
fn kinds(world: &World) -> [Request; 3] {
    let range = SectorRange::new(0, 8);
    let fua = true;
    [
        world.write_request(0, &[1; 4096], fua),
        Request::WriteZeroes {
            range,
            fua,
            no_hole: false,
        },
        Request::Discard { range, fua },
    ]
}

/// A backend full of ones over a log that is empty.
fn world(persist: Persist) -> World {
    let mut world = World::new(persist);
    world.backend = vec![0xff; BYTES];
    world
}

fn destage(world: &mut World) {
    world.step(Event::DestageAll);
    for _ in 0..10 {
        world.step(Event::Poll);
    }
}

#[test]
fn fua_write_reaches_the_backend_before_what_follows_its_acknowledgement() {
    for persist in [Persist::OnWrite, Persist::OnFlush] {
        for kind in 0..3 {
            let mut world = world(persist);
            let [write, zeroes, discard] = kinds(&world);
            world.ask([write, zeroes, discard].into_iter().nth(kind).unwrap());
            // Beside it in the volume, where destage would gather it, and far away.
            world.write(8, &[2; 4096]);
            world.write(4096, &[2; 4096]);
            world.flush_silent = Some(Vec::new());
            destage(&mut world);
            assert_ne!(world.backend[..4096], [0xff; 4096], "{persist:?} {kind}");
            assert_eq!(
                world.backend[4096..8192],
                [0xff; 4096],
                "{persist:?} {kind}"
            );
            assert_eq!(world.backend[4096 * 512], 0xff, "{persist:?} {kind}");
            let flushes = world.flush_silent.take().expect("none is answered");
            assert_eq!(flushes.len(), 1);
            let result = Ok(Done::Written);
            world.step(Event::Completed(Completion {
                token: flushes[0],
                result,
            }));
            destage(&mut world);
            assert_eq!(world.backend[4096..8192], [2; 4096]);
        }
    }
}

/// Zeroes that were accepted before the acknowledgement, and others behind them that were sent after it, do not become one.
#[test]
fn zeroes_are_not_one_across_the_acknowledgement_of_a_fua_write() {
    let mut world = world(Persist::OnFlush);
    let discard = |block: u64| Request::Discard {
        range: SectorRange::new(block * 8, 8),
        fua: false,
    };
    world.log_silent = Some(Vec::new());
    let request = world.write_request(0, &[1; 4096], true);
    let id = RequestId(9);
    world.step(Event::Request { id, request });
    world.ask(discard(1));
    world.ask(discard(2));
    let silent = world.log_silent.take().expect("none is answered");
    assert!(silent.len() == 1 && world.replies.is_empty());
    let result = Ok(Done::Written);
    world.step(Event::Completed(Completion {
        token: silent[0],
        result,
    }));
    assert!(world.replies.drain(..).all(|(answered, _)| answered == id));
    world.ask(discard(3));
    world.flush_silent = Some(Vec::new());
    destage(&mut world);
    let first = |world: &World| [0, 1, 2, 3].map(|block| world.backend[block * 4096]);
    assert_eq!(first(&world), [1, 0, 0, 0xff]);
    let flushes = world.flush_silent.take().expect("none is answered");
    world.step(Event::Completed(Completion {
        token: flushes[0],
        result: Ok(Done::Written),
    }));
    destage(&mut world);
    assert_eq!(first(&world), [1, 0, 0, 0]);
}

/// What a later write covers is left out only if nothing was sent in between that may rely on it.
#[test]
fn fua_write_that_is_overwritten_is_not_left_out() {
    let mut world = world(Persist::OnWrite);
    let journal = world.write_request(0, &[1; 4096], true);
    world.ask(journal);
    world.write(4096, &[2; 4096]);
    world.write(0, &[3; 4096]);
    world.flush_silent = Some(Vec::new());
    destage(&mut world);
    assert_eq!(world.backend[0], 1);
    assert_eq!(world.backend[4096 * 512], 0xff);
}

/// What was sent before the acknowledgement need not wait, and many acknowledgements are one boundary.
#[test]
fn fua_writes_acknowledged_together_make_one_sync_point() {
    let mut world = world(Persist::OnWrite);
    world.log_silent = Some(Vec::new());
    let mut number = 0;
    let mut send = |world: &mut World, fua| {
        number += 1;
        let request = world.write_request(number * 64, &[1; 4096], fua);
        let id = RequestId(number);
        world.step(Event::Request { id, request });
    };
    send(&mut world, false);
    for index in 0..6 {
        send(&mut world, index % 2 == 0);
    }
    for spans in [2, 1] {
        let tokens = world.log_silent.replace(Vec::new()).expect("silent");
        assert_eq!(
            tokens.len(),
            spans,
            "two spans are written, and then all that waited"
        );
        for token in tokens {
            let result = Ok(Done::Written);
            world.step(Event::Completed(Completion { token, result }));
        }
    }
    let replies: Vec<Result<Reply, RequestError>> =
        world.replies.drain(..).map(|(_, result)| result).collect();
    assert!(replies.len() == 7 && replies.iter().all(Result::is_ok));
    let sync_points = |world: &World| world.volume.stats(world.now).sync_points;
    assert_eq!(sync_points(&world), 0, "nothing follows yet");
    for _ in 0..3 {
        send(&mut world, false);
    }
    assert_eq!(sync_points(&world), 1);
}

/// A write with FUA that nothing follows costs what another one costs.
#[test]
fn fua_write_alone_is_a_generation_like_any_other() {
    let mut world = world(Persist::OnFlush);
    let journal = world.write_request(0, &[1; 4096], true);
    world.ask(journal);
    world.ask(Request::Flush);
    destage(&mut world);
    assert_eq!(world.backend_flushes, 1);
    assert_eq!(world.volume.stats(world.now).sync_points, 0);
}

/// Writes that succeed between flushes that fail do not make destage repeat a generation without a pause.
#[test]
fn flushes_that_fail_are_tried_again_ever_less_often() {
    let mut world = world(Persist::OnWrite);
    world.write(0, &[1; 4096]);
    world.flush_silent = Some(Vec::new());
    world.step(Event::DestageAll);
    let (begin, mut failed) = (world.now, 0);
    while world.now.since(begin) < Nanos::from_millis(20_000) {
        let flushes = core::mem::take(world.flush_silent.as_mut().expect("none is answered"));
        for token in flushes {
            failed += 1;
            let result = Err(IoError::Failed);
            world.step(Event::Completed(Completion { token, result }));
        }
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
    }
    // Pauses of 10 ms, doubled up to 2 s.
    assert!((10..=20).contains(&failed), "{failed} flushes");
    world.flush_silent = None;
    world.now = world.now.plus(Nanos::from_millis(2000));
    destage(&mut world);
    assert_eq!(world.backend[..4096], [1; 4096]);
    assert_eq!(world.volume.stats(world.now).log_used_blocks, 0);
}

fn ended(fails: bool) -> Result<Done, IoError> {
    if fails {
        Err(IoError::Failed)
    } else {
        Ok(Done::Written)
    }
}

fn answer_flushes(world: &mut World, fail: bool) {
    let flushes = core::mem::take(world.flush_silent.as_mut().expect("none is answered"));
    for token in flushes {
        let result = ended(fail);
        world.step(Event::Completed(Completion { token, result }));
    }
}

fn wait_for_policy(world: &mut World, policy: Policy) {
    world.config.policy = policy;
    world.step(Event::Reconfigure(world.config.clone()));
    while world.volume.policy() != policy {
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
    }
}

/// Nor do flushes of clients that fail, after each of which destage writes all that is not flushed again.
#[test]
fn flushes_of_others_that_fail_do_not_make_destage_repeat_itself_without_a_pause() {
    let mut world = world(Persist::OnWrite);
    wait_for_policy(&mut world, Policy::WriteAround);
    world.write(8, &[1; 4096]);
    world.flush_silent = Some(Vec::new());
    wait_for_policy(&mut world, Policy::WriteBack);
    for number in 0..100 {
        let request = world.write_request(number * 16, &[2; 4096], false);
        let id = RequestId(1000 + number);
        world.step(Event::Request { id, request });
    }
    world.step(Event::DestageAll);
    let (begin, before, mut id) = (world.now, world.backend_writes, 5000);
    while world.now.since(begin) < Nanos::from_millis(20_000) {
        answer_flushes(&mut world, true);
        id += 1;
        world.step(Event::Request {
            id: RequestId(id),
            request: Request::Flush,
        });
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
    }
    let writes = world.backend_writes - before;
    assert!((100..=2500).contains(&writes), "{writes}");
}

/// A flush that failed once does not lengthen the pauses after writes that fail.
#[test]
fn writes_that_fail_now_and_then_after_a_flush_that_failed_are_tried_again_soon() {
    let mut config = hdcs_kit::volume::config(Persist::OnFlush);
    config.log_bytes = 512 << 20;
    config.log_entries_max = config.log_bytes / 1024;
    let mut world = World::with(config, None);
    for number in 0..4000 {
        world.write(number * 4, &[1; 512]);
    }
    (world.backend_silent, world.flush_silent) = (Some(Vec::new()), Some(Vec::new()));
    world.step(Event::DestageAll);
    let (begin, mut flushes, mut writes) = (world.now, 0, 0);
    while world.volume.stats(world.now).log_used_blocks > 0 {
        let tokens = world.backend_silent.replace(Vec::new());
        for token in tokens.expect("none is answered") {
            writes += 1;
            let result = ended(flushes > 0 && writes % 100 == 0);
            world.step(Event::Completed(Completion { token, result }));
        }
        if world.flush_silent != Some(Vec::new()) {
            answer_flushes(&mut world, flushes == 0);
            flushes += 1;
        }
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
        let took = world.now.since(begin);
        assert!(took < Nanos::from_millis(5_000), "{writes} writes");
    }
    assert!(flushes > 1 && writes > 4000);
}
