//! What is pinned is brought to the SSD tier and back to it; a warm-up fills what it names, in order.

use hdcs_core::base::io::{BlockKey, Nanos, Request, SectorRange};
use hdcs_core::cache::Tier;
use hdcs_core::volume::{Event, Persist, Policy};
use hdcs_kit::volume::World;

const MIB_SECTORS: u64 = 2048;

fn world(rate: u64) -> World {
    let mut config = hdcs_kit::volume::config(Persist::OnWrite);
    config.fill_rate_max_bytes_s = rate;
    World::over_ssd(config)
}

fn on_ssd(world: &World, blocks: std::ops::Range<u64>) -> usize {
    let found = blocks.filter(|&block| {
        // Beside DRAM, which is small and looked at first.
        let key = BlockKey::new(1, block);
        world.cache.is_promoted(key, BlockKey::new(1, 2048))
            && world.cache.probe(key) != Tier::Absent
    });
    found.count()
}

/// Let time pass in steps of a millisecond.
fn pass(world: &mut World, millis: u64) {
    for _ in 0..millis {
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
    }
}

#[test]
fn pin_fills_its_range_and_fills_it_again_after_a_destaged_write() {
    let mut world = world(1 << 30);
    world.step(Event::Pin(vec![SectorRange::new(0, 2 * MIB_SECTORS)]));
    assert_eq!(world.volume.stats(world.now).pinned_bytes, 2 << 20);
    assert!(
        world.volume.stats(world.now).pinned_left_bytes > 0,
        "a piece at a time"
    );
    pass(&mut world, 50);
    assert_eq!(world.volume.stats(world.now).pinned_left_bytes, 0);
    assert_eq!(on_ssd(&world, 0..512), 512);
    assert_eq!(on_ssd(&world, 512..2048), 0);
    world.write(800, &[9; 4096]);
    world.step(Event::DestageAll);
    let blocks = 100..104;
    assert_eq!(on_ssd(&world, blocks.clone()), 0, "the old line is dropped");
    assert!(world.volume.stats(world.now).pinned_left_bytes > 0);
    pass(&mut world, 1100);
    assert_eq!(on_ssd(&world, blocks), 4);
    assert_eq!(world.volume.stats(world.now).pinned_left_bytes, 0);
    assert!(
        world
            .read(SectorRange::new(800, 8))
            .iter()
            .all(|&byte| byte == 9)
    );
    // What is evicted by hand comes back, as long as it is pinned.
    let all = SectorRange::new(0, 2 * MIB_SECTORS);
    world.ask(Request::Evict { range: all });
    assert_eq!(on_ssd(&world, 0..512), 0);
    pass(&mut world, 1100);
    assert_eq!(on_ssd(&world, 0..512), 512);
    world.step(Event::Pin(Vec::new()));
    world.ask(Request::Evict { range: all });
    pass(&mut world, 2000);
    assert_eq!(on_ssd(&world, 0..512), 0);
    assert_eq!(world.volume.stats(world.now).pinned_bytes, 0);
}

#[test]
fn warm_up_fills_in_order_no_faster_than_its_rate_and_can_be_given_up() {
    // A MiB in 100 ms.
    let mut world = world(10 << 20);
    let piece = |mib: u64| SectorRange::new(mib * MIB_SECTORS, MIB_SECTORS);
    world.step(Event::WarmUp(vec![piece(5), piece(2), piece(7)]));
    assert_eq!(on_ssd(&world, 5 * 256..6 * 256), 256, "the first at once");
    pass(&mut world, 95);
    assert_eq!(on_ssd(&world, 0..2048), 256);
    assert_eq!(world.volume.stats(world.now).warm_left_bytes, 2 << 20);
    pass(&mut world, 10);
    assert_eq!(on_ssd(&world, 2 * 256..3 * 256), 256);
    assert_eq!(world.volume.stats(world.now).warm_left_bytes, 1 << 20);
    world.step(Event::WarmUp(Vec::new()));
    pass(&mut world, 200);
    assert_eq!(on_ssd(&world, 0..2048), 512, "given up");
    assert_eq!(world.volume.stats(world.now).warm_left_bytes, 0);
}

#[test]
fn pin_of_a_volume_that_leaves_the_cache_out_waits() {
    let mut world = world(1 << 30);
    world.config.policy = Policy::PassThrough;
    world.step(Event::Reconfigure(world.config.clone()));
    world.step(Event::Pin(vec![SectorRange::new(0, MIB_SECTORS)]));
    pass(&mut world, 3000);
    assert_eq!(on_ssd(&world, 0..256), 0);
    world.config.policy = Policy::WriteBack;
    world.step(Event::Reconfigure(world.config.clone()));
    pass(&mut world, 1100);
    assert_eq!(on_ssd(&world, 0..256), 256);
}
