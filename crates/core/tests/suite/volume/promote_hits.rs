//! What is read seldom does not reach the SSD tier.

use hdcs_core::base::io::{Request, SectorRange};
use hdcs_core::volume::{Event, Persist};
use hdcs_kit::volume::{BYTES, World};

/// A line of 16 KiB.
const LINE_SECTORS: u64 = 32;
/// Lines of the volume: more than the DRAM tier of the world holds.
const LINES: u64 = BYTES as u64 / 512 / LINE_SECTORS;

fn world(promote_hits: u8) -> World {
    let mut config = hdcs_kit::volume::config(Persist::OnWrite);
    config.promote_hits = promote_hits;
    config.read_ahead_bytes_max = 0;
    World::over_ssd(config)
}

/// Read every line once, in an order that is no stream; how many lines the SSD tier took since.
fn read_all(world: &mut World) -> u64 {
    let before = world.cache.stats().filled_lines;
    for line in (0..LINES).map(|line| line * 7 % LINES) {
        let range = SectorRange::new(line * LINE_SECTORS, 8);
        let data = world.read(range);
        assert!(data[..] == world.backend[range.byte_offset() as usize..][..range.bytes()]);
    }
    world.cache.stats().filled_lines - before
}

#[test]
fn promote_hits_of_one_takes_what_is_read_at_once() {
    assert_eq!(read_all(&mut world(1)), LINES);
}

#[test]
fn promote_hits_of_three_takes_what_is_read_three_times() {
    let mut world = world(3);
    assert_eq!(read_all(&mut world), 0, "read once");
    assert_eq!(read_all(&mut world), 0, "read twice");
    let taken = read_all(&mut world);
    // What DRAM still held was not fetched again.
    assert!(
        taken > LINES * 3 / 4,
        "{taken} of {LINES} at the third read"
    );
}

#[test]
fn promote_hits_that_are_changed_hold_from_then_on() {
    let mut world = world(1);
    let mut config = world.config.clone();
    config.promote_hits = 2;
    world.step(Event::Reconfigure(config.clone()));
    assert_eq!(read_all(&mut world), 0, "read once");
    config.promote_hits = 1;
    world.step(Event::Reconfigure(config));
    assert!(read_all(&mut world) > LINES * 3 / 4);
}

#[test]
fn promotion_does_not_ask_how_often_a_line_was_read() {
    let mut world = world(3);
    let range = SectorRange::new(0, BYTES as u64 / 512);
    world.ask(Request::Promote { range });
    assert_eq!(world.cache.stats().filled_lines, LINES);
}
