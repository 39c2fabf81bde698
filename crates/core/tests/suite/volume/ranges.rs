//! What a step costs does not depend on the length of a range, nor what a range takes on how it is cut.

use hdcs_core::base::io::{Completion, Done, Reply, Request, RequestId, SectorRange};
use hdcs_core::base::limits::STEP_WORK_MAX;
use hdcs_core::cache::SsdConfig;
use hdcs_core::volume::{Event, Persist, Policy};
use hdcs_kit::volume::{BYTES, World};

#[test]
fn promotion_passes_by_what_is_there_in_bounded_steps() {
    let ssd = SsdConfig {
        bytes: 32 << 20,
        uuid: [3; 16],
        line_blocks: 4,
    };
    let mut world = World::with(hdcs_kit::volume::config(Persist::OnWrite), Some(ssd));
    for (index, bytes) in world.backend.chunks_exact_mut(4096).enumerate() {
        bytes.fill(index as u8);
        bytes[..8].copy_from_slice(&index.to_le_bytes());
    }
    let range = SectorRange::new(0, BYTES as u64 / 512);
    world.ask(Request::Promote { range });
    let reads = world.backend_reads.len();
    // Several at once share what may be looked at from one poll to the next.
    for id in 0..4 {
        let before = world.volume.work();
        let (id, request) = (RequestId(id), Request::Promote { range });
        world.step(Event::Request { id, request });
        assert!(world.volume.work() - before <= 3 * STEP_WORK_MAX as u64);
    }
    let mut steps = 0;
    while world.replies.len() < 4 {
        let before = world.volume.work();
        world.step(Event::Poll);
        assert!(world.volume.work() - before <= 3 * STEP_WORK_MAX as u64);
        steps += 1;
    }
    assert!(steps > 4, "{steps} steps for {} blocks", 4 * BYTES / 4096);
    let all_done = world
        .replies
        .drain(..)
        .all(|(_, result)| matches!(result, Ok(Reply::Done)));
    assert!(all_done && world.backend_reads.len() == reads);
}

#[test]
fn zeroes_that_follow_one_another_are_one_in_the_log() {
    let mut world = World::new(Persist::OnFlush);
    world.backend.fill(7);
    let ask = |world: &mut World, at: u64, no_hole: Option<bool>| {
        let range = SectorRange::new(at * 8, 8);
        let fua = false;
        world.ask(match no_hole {
            None => Request::Discard { range, fua },
            Some(no_hole) => Request::WriteZeroes {
                range,
                fua,
                no_hole,
            },
        });
    };
    let before = world.volume.stats(world.now).log_used_blocks;
    (0..1000).for_each(|at| ask(&mut world, at, None));
    // Each of them of its own: it is of another kind, or does not follow, or comes after a flush.
    ask(&mut world, 1000, Some(false));
    ask(&mut world, 1001, Some(true));
    ask(&mut world, 1003, Some(true));
    world.ask(Request::Flush);
    ask(&mut world, 1004, Some(true));
    world.ask(Request::Flush);
    // A block for each of two spans.
    assert_eq!(world.volume.stats(world.now).log_used_blocks - before, 2);
    let is_zero = |block: usize| block <= 1001 || block == 1003 || block == 1004;
    let right = |bytes: &[u8]| {
        let mut blocks = bytes.chunks_exact(4096).enumerate();
        blocks.all(|(block, bytes)| bytes == [if is_zero(block) { 0 } else { 7 }; 4096])
    };
    let some = SectorRange::new(990 * 8, 30 * 8);
    for is_reopened in [false, true] {
        if is_reopened {
            world.reopen();
        }
        let read = world.read(some);
        let mut blocks = (990..).zip(read.chunks_exact(4096));
        assert!(blocks.all(|(block, bytes)| bytes[0] == if is_zero(block) { 0 } else { 7 }));
    }
    world.close(true);
    assert!(right(&world.backend));
}

/// Each of many writes that wait for one another past the log costs a look at the others, not one at each pair of them.
#[test]
fn writes_that_overlap_past_the_log_cost_no_more_than_a_look_at_each() {
    const COUNT: u64 = 1000;
    let mut config = hdcs_kit::volume::config(Persist::OnWrite);
    config.policy = Policy::WriteThrough;
    let mut world = World::with(config, None);
    world.write(0, &[1; 4096]);
    world.backend_silent = Some(Vec::new());
    let look = |world: &mut World, event| {
        let before = world.volume.work();
        world.step(event);
        world.volume.work() - before
    };
    for number in 0..COUNT {
        let request = world.write_request(number * 8, &[number as u8; 8192], false);
        let id = RequestId(number);
        assert!(look(&mut world, Event::Request { id, request }) < 2 * COUNT);
    }
    assert!(world.replies.is_empty());
    for number in 0..COUNT {
        let silent = world.backend_silent.as_mut().expect("none is answered");
        assert_eq!(silent.len(), 1, "they go one after the other");
        let token = silent.remove(0);
        let result = Ok(Done::Written);
        let ended = Event::Completed(Completion { token, result });
        assert!(look(&mut world, ended) < 2 * COUNT);
        assert_eq!(
            world.replies.pop().map(|(id, _)| id),
            Some(RequestId(number))
        );
    }
}
