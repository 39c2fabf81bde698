//! Reads of a volume whose log has copies on other nodes, with a lease and without.

use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{ExtentKind, Nanos, Reply, Request, RequestId, SectorRange};
use hdcs_core::volume::{Event, Persist, Phase, Policy, State, Trouble, lease};
use hdcs_kit::volume::{World, config};

const BLOCK: SectorRange = SectorRange::new(8, 8);

/// A volume that needs a lease and has none, with a block that says 1.
fn world() -> World {
    let mut world = World::new(Persist::OnWrite);
    world.write(8, &[1; 4096]);
    lease::need(&mut world.volume);
    world
}

fn send(world: &mut World, id: u64, request: Request) {
    let id = RequestId(id);
    world.step(Event::Request { id, request });
}

fn grant(world: &mut World, until: u64) {
    let until = Nanos(until);
    world.step(Event::Lease { until });
}

fn replies(world: &mut World) -> Vec<(u64, bool)> {
    let replies = world.replies.drain(..);
    let mut all: Vec<_> = replies.map(|(id, result)| (id.0, result.is_ok())).collect();
    all.sort_unstable();
    all
}

#[test]
fn read_waits_until_there_is_a_lease_and_is_answered_while_there_is() {
    let mut world = world();
    send(&mut world, 1, Request::Read { range: BLOCK });
    assert_eq!(replies(&mut world), []);
    let end = world.now.0 + 100;
    grant(&mut world, end);
    assert_eq!(replies(&mut world), [(1, true)]);
    world.now = Nanos(end - 1);
    send(&mut world, 2, Request::Read { range: BLOCK });
    assert_eq!(replies(&mut world), [(2, true)]);
    world.now = Nanos(end);
    send(&mut world, 3, Request::Read { range: BLOCK });
    assert_eq!(replies(&mut world), [], "it has just ended");
    grant(&mut world, end - 1);
    assert_eq!(replies(&mut world), [], "an old one is none");
    grant(&mut world, end + 1);
    assert_eq!(replies(&mut world), [(3, true)]);
}

#[test]
fn lease_that_is_taken_back_is_over() {
    let mut world = world();
    grant(&mut world, u64::MAX);
    send(&mut world, 1, Request::Read { range: BLOCK });
    grant(&mut world, 0);
    send(&mut world, 2, Request::Read { range: BLOCK });
    assert_eq!(replies(&mut world), [(1, true)]);
}

#[test]
fn writes_to_the_log_and_flushes_need_no_lease_but_what_tells_of_holes_does() {
    let mut world = world();
    let write = world.write_request(8, &[2; 4096], false);
    send(&mut world, 1, write);
    send(&mut world, 2, Request::Flush);
    let extents = |kind| Request::Extents { range: BLOCK, kind };
    send(&mut world, 3, extents(ExtentKind::Cache));
    send(&mut world, 4, extents(ExtentKind::Allocation));
    assert_eq!(replies(&mut world), [(1, true), (2, true), (3, true)]);
    grant(&mut world, u64::MAX);
    assert_eq!(replies(&mut world), [(4, true)]);
}

#[test]
fn writes_past_the_log_need_a_lease() {
    let mut config = config(Persist::OnWrite);
    config.policy = Policy::PassThrough;
    let mut world = World::with(config, None);
    lease::need(&mut world.volume);
    let write = world.write_request(8, &[2; 4096], false);
    send(&mut world, 1, write);
    assert_eq!(replies(&mut world), []);
    grant(&mut world, u64::MAX);
    assert_eq!(replies(&mut world), [(1, true)]);
}

#[test]
fn reads_that_wait_for_a_lease_end_when_the_volume_is_another_nodes_or_closes() {
    let mut fenced = world();
    send(&mut fenced, 1, Request::Read { range: BLOCK });
    fenced.step(Event::Fenced);
    assert!(matches!(
        fenced.replies[..],
        [(RequestId(1), Err(RequestError::Fenced))]
    ));
    let mut closed = world();
    send(&mut closed, 1, Request::Read { range: BLOCK });
    closed.close(false);
    assert_eq!(closed.volume.phase(), Phase::Closed);
    assert!(matches!(
        closed.replies[..],
        [(RequestId(1), Err(RequestError::Closing))]
    ));
}

#[test]
fn reads_that_wait_for_long_show_as_trouble() {
    let mut world = world();
    send(&mut world, 1, Request::Read { range: BLOCK });
    assert_eq!(
        world.volume.state(),
        State::Healthy,
        "it may be the first echo"
    );
    let since = world.now;
    let shown = since.plus(Nanos::from_millis(1_000));
    assert!(world.volume.next_wakeup().is_some_and(|at| at <= shown));
    world.now = shown;
    world.step(Event::Poll);
    assert_eq!(world.volume.state(), State::Degraded);
    assert_eq!(world.volume.trouble(), Some((Trouble::NoLease, since)));
    grant(&mut world, u64::MAX);
    assert_eq!(world.volume.state(), State::Healthy);
}

#[test]
fn reads_that_have_waited_are_all_answered_in_parts() {
    let mut world = world();
    for id in 1..=200 {
        send(&mut world, id, Request::Read { range: BLOCK });
    }
    let until = Nanos(u64::MAX);
    world.step(Event::Lease { until });
    assert!(world.replies.len() < 200);
    while world.replies.len() < 200 {
        let at = world.volume.next_wakeup();
        assert!(at.is_some_and(|at| at <= world.now), "{at:?}");
        world.step(Event::Poll);
    }
    let is_data = |(_, result): &(RequestId, Result<Reply, RequestError>)| matches!(result, Ok(Reply::Data(data)) if data[..] == [1; 4096]);
    assert!(world.replies.iter().all(is_data));
}
