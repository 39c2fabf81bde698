//! A scrub of a log whose device fails, or keeps nothing right.

use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Action, Completion, Done, Reply, Request, RequestId, Token};
use hdcs_core::node::scrub::{ScrubAt, Scrubbed};
use hdcs_core::volume::{Event, Persist};
use hdcs_kit::volume::World;

/// Scrub the log over a device that reads all ones and keeps no write, or whose reads fail.
fn scrub(world: &mut World, fails: bool) -> Vec<Scrubbed> {
    let mut found = Vec::new();
    let mut next = Some(ScrubAt::LOG);
    while let Some(at) = next {
        let request = Request::Scrub { at };
        let id = RequestId(1);
        let mut actions = world.step_alone([Event::Request { id, request }]);
        next = loop {
            assert_eq!(actions.len(), 1);
            let ended = |token: Token, result| Event::Completed(Completion { token, result });
            let event = match actions.pop().expect("one") {
                Action::LogRead { token, .. } if fails => ended(token, Err(IoError::Failed)),
                Action::LogRead { token, mut buf, .. } => {
                    buf.fill(0xff);
                    ended(token, Ok(Done::Read(buf)))
                }
                Action::LogWrite { token, .. } => ended(token, Ok(Done::Written)),
                Action::Reply { result, .. } => {
                    let Ok(Reply::Scrubbed(one)) = result else {
                        panic!("not scrubbed: {result:?}");
                    };
                    found.push(one);
                    break one.next;
                }
                other => panic!("not a scrub's: {other:?}"),
            };
            actions = world.step_alone([event]);
        };
    }
    found
}

fn is_destaged(world: &mut World) -> bool {
    world.close(true);
    world.backend[4096..][..8192] == [7; 8192]
}

#[test]
fn scrub_of_what_cannot_be_read_tells_it_and_destage_goes_on() {
    let mut world = World::new(Persist::OnWrite);
    world.config.resident_bytes_max = 0;
    world.step(Event::Reconfigure(world.config.clone()));
    world.write(8, &[7; 8192]);
    let found = scrub(&mut world, true);
    assert!(found.iter().any(|one| one.damaged.is_some()));
    assert_eq!(world.volume.stats(world.now).log_corrupt_blocks, 0);
    assert!(is_destaged(&mut world));
}

#[test]
fn scrub_has_destaged_what_is_in_memory_where_a_write_does_not_help() {
    for fails in [false, true] {
        let mut world = World::new(Persist::OnWrite);
        world.write(8, &[7; 8192]);
        let found = scrub(&mut world, fails);
        assert!(found.iter().any(|one| one.bad_blocks > 0));
        assert!(found.iter().all(|one| one.damaged.is_none()));
        assert_eq!(world.volume.stats(world.now).log_corrupt_blocks, 0);
        assert!(is_destaged(&mut world));
    }
}

#[test]
fn scrub_tells_what_nothing_has_right() {
    let mut world = World::new(Persist::OnWrite);
    world.config.resident_bytes_max = 0;
    world.step(Event::Reconfigure(world.config.clone()));
    world.write(8, &[7; 8192]);
    let found = scrub(&mut world, false);
    assert!(found.iter().any(|one| one.damaged.is_some()));
    assert_eq!(world.volume.stats(world.now).log_corrupt_blocks, 2);
}
