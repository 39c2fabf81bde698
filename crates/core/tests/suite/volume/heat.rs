//! A heat map says what the cache holds; a warm-up from it needs a cold cache and takes free room only.

use hdcs_core::base::io::{BlockKey, Nanos, Request, SectorRange};
use hdcs_core::cache::Tier;
use hdcs_core::cache::heat_map::{Heat, HeatMap};
use hdcs_core::volume::{CachedBlocks, Event, Persist};
use hdcs_kit::volume::{SSD, World};

fn world(ssd: bool) -> World {
    let mut config = hdcs_kit::volume::config(Persist::OnWrite);
    config.read_ahead_bytes_max = 0;
    let mut world = World::with(config, ssd.then_some(SSD));
    fastrand::Rng::with_seed(6).fill(&mut world.backend);
    world
}

fn gathered(world: &World) -> HeatMap {
    let mut gathering = world.volume.cached().begin_gathering(&world.cache);
    while world.volume.cached().gather(&mut gathering, &world.cache) {}
    gathering.finish()
}

/// First block, end and heat of what is not cold.
fn seen(world: &World) -> Vec<(u64, u64, Heat)> {
    let map = gathered(world);
    let runs = map
        .runs()
        .map(|(first, end, heat)| (first / 4096, end / 4096, heat));
    runs.filter(|(.., heat)| *heat != Heat::Cold).collect()
}

fn cached(world: &World) -> usize {
    let all = 0..world.config.bytes / 4096;
    let is_there = |block: &u64| world.cache.probe(BlockKey::new(1, *block)) != Tier::Absent;
    all.filter(is_there).count()
}

/// Let time pass in steps of a millisecond.
fn pass(world: &mut World, millis: u64) {
    for _ in 0..millis {
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
    }
}

fn blocks(first: u64, end: u64) -> SectorRange {
    SectorRange::between(first * 8, end * 8)
}

#[test]
fn heat_map_tells_what_was_read_once_and_what_was_read_again() {
    let mut world = world(true);
    assert_eq!(seen(&world), vec![]);
    world.read(blocks(400, 404));
    assert_eq!(seen(&world), vec![(400, 404, Heat::Warm)]);
    world.read(blocks(400, 404));
    assert_eq!(seen(&world), vec![(400, 404, Heat::Hot)]);
    // DRAM has 64 blocks: what is not read any more leaves it.
    world.ask(Request::Promote {
        range: blocks(800, 1000),
    });
    let seen = seen(&world);
    assert!(seen.contains(&(400, 404, Heat::Hot)), "{seen:?}");
    let of = |heat| seen.iter().filter(move |run| run.0 >= 800 && run.2 == heat);
    let blocks_of = |heat| of(heat).map(|run| run.1 - run.0).sum::<u64>();
    assert_eq!(blocks_of(Heat::Warm) + blocks_of(Heat::Cool), 200);
    assert!((1..=64).contains(&blocks_of(Heat::Warm)), "{seen:?}");
    world.ask(Request::Evict {
        range: blocks(0, 2048),
    });
    assert_eq!(self::seen(&world), vec![]);
}

#[test]
fn warm_up_of_a_cold_cache_begins_by_itself_and_of_another_does_not() {
    let mut world = world(true);
    let ranges = vec![blocks(1024, 1280), blocks(0, 4)];
    world.step(Event::WarmUpIfCold(ranges.clone()));
    pass(&mut world, 50);
    assert_eq!(cached(&world), 260);
    assert_eq!(world.volume.stats(world.now).warm_bytes, 0, "it is over");
    // Most of it is there: what is not, was evicted since.
    world.ask(Request::Evict {
        range: blocks(1024, 1280),
    });
    let ranges = vec![blocks(0, 4), blocks(1024, 1280)];
    world.step(Event::WarmUpIfCold(ranges.clone()));
    pass(&mut world, 50);
    assert_eq!(cached(&world), 4);
    // Asked for by hand it is brought all the same.
    world.step(Event::WarmUp(ranges));
    pass(&mut world, 50);
    assert_eq!(cached(&world), 260);
}

#[test]
fn warm_up_by_itself_ends_where_something_would_have_to_go() {
    let mut world = world(true);
    // A neighbour has all but a few segments.
    let line = SectorRange::new(0, 32);
    for number in 0..world.cache.room_bytes() / 4096 / 4 {
        let mut buf = world.pool.alloc(line.bytes()).unwrap();
        buf.fill(number as u8);
        buf[..8].copy_from_slice(&number.to_le_bytes());
        world
            .cache
            .fill(BlockKey::new(9, number * 4), &buf.freeze());
        world.step(Event::Poll);
    }
    let before = world.cache.stats();
    assert_eq!(before.ssd_evicted_lines, 0);
    assert!(!world.cache.has_free_room(4));
    world.step(Event::WarmUpIfCold(vec![blocks(0, 2048)]));
    pass(&mut world, 50);
    assert_eq!(world.volume.stats(world.now).warm_left_bytes, 0);
    assert_eq!(cached(&world), 0);
    assert_eq!(world.cache.stats().ssd_evicted_lines, 0);
}

#[test]
fn warm_up_without_an_ssd_tier_fills_dram_up_to_its_size() {
    let mut world = world(false);
    world.step(Event::WarmUpIfCold(vec![
        blocks(100, 140),
        blocks(0, 16),
        blocks(300, 340),
    ]));
    pass(&mut world, 50);
    let evicted = world.cache.stats().dram_evicted_blocks;
    assert_eq!((cached(&world), evicted), (56, 0));
    assert_eq!(world.volume.stats(world.now).warm_left_bytes, 0);
    assert_eq!(world.cache.room_bytes(), 64 * 4096);
    assert_eq!(CachedBlocks::GATHER_PAUSE, Nanos::from_millis(1));
}
