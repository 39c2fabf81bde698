//! Several volumes whose logs share the memory for their indexes.

use std::rc::Rc;

use hdcs_core::base::buf::BufMut;
use hdcs_core::base::io::{Nanos, Request, RequestId, SectorRange};
use hdcs_core::log::budget::{IndexBudget, Share};
use hdcs_core::volume::{Event, Persist, Phase, Trouble, VolumeConfig};
use hdcs_kit::volume::{BYTES, World};

const BLOCKS: u64 = (BYTES / 4096) as u64;
/// Some thousand writes, each of which is a span, beside the least of each.
const BUDGET_BYTES: u64 = 256 << 10;

fn config() -> VolumeConfig {
    VolumeConfig {
        // Nothing is so old that it is destaged for that.
        dirty_age_max: Nanos::from_millis(1 << 40),
        unpersisted_bytes_max: 1 << 30,
        resident_bytes_max: 0,
        ..hdcs_kit::volume::config(Persist::OnWrite)
    }
}

fn sharing(budget: &Rc<IndexBudget>) -> World {
    World::sharing(config(), None, budget)
}

fn begin(world: &mut World, number: u64) {
    let range = SectorRange::new(number * 7 % BLOCKS * 8, 8);
    let data = world.pool.alloc_for(range).unwrap().freeze();
    let fua = false;
    let request = Request::Write { range, data, fua };
    let id = RequestId(number);
    world.step(Event::Request { id, request });
}

/// Whether a write is answered, as time passes in which `turn` is taken.
fn is_answered(world: &mut World, mut turn: impl FnMut(&mut World)) -> bool {
    for _ in 0..2000 {
        if !world.replies.is_empty() {
            world.replies.clear();
            return true;
        }
        world.now = world.now.plus(Nanos::from_millis(1));
        world.step(Event::Poll);
        turn(world);
    }
    false
}

/// Write blocks one after the other until one waits for good, or so many are written.
fn write(world: &mut World, blocks: u64) -> u64 {
    for number in 0..blocks {
        begin(world, number);
        if !is_answered(world, |_| ()) {
            return number;
        }
    }
    blocks
}

#[test]
fn budget_that_an_idle_volume_holds_is_given_back_to_one_that_needs_it() {
    let budget = IndexBudget::new(BUDGET_BYTES);
    let (mut idle, mut busy) = (sharing(&budget), sharing(&budget));
    idle.backend_silent = Some(Vec::new());
    let held = write(&mut idle, 100_000);
    assert!(
        held > 700,
        "{held} writes, and the plan of those that are on their way, take most of it"
    );
    let before = budget.used();
    assert!(
        (BUDGET_BYTES / 2..=BUDGET_BYTES).contains(&before),
        "{budget:?}"
    );
    // Its backend answers again, but nothing polls it unless memory becomes short.
    idle.heal_backend();
    idle.now = idle.now.plus(Nanos::from_millis(10_000));
    for number in 0..4000 {
        begin(&mut busy, number);
        let answered = is_answered(&mut busy, |busy| {
            // As a driver does.
            if budget.has_changed() || idle.volume.next_wakeup().is_some_and(|at| at <= idle.now) {
                idle.step(Event::Poll);
                busy.step(Event::Poll);
            }
            idle.now = idle.now.plus(Nanos::from_millis(1));
        });
        assert!(answered, "write {number} waits: {budget:?}");
        assert!(budget.used() <= BUDGET_BYTES + (64 << 10), "{budget:?}");
    }
    let left = idle.volume.stats(idle.now).dirty_bytes;
    assert!(
        left < held * 4096 * 9 / 10,
        "{left} bytes are left of {held} blocks"
    );
}

#[test]
fn budget_that_another_volume_has_used_up_leaves_each_its_least() {
    let budget = IndexBudget::new(0);
    let mut stuck = sharing(&budget);
    stuck.backend_silent = Some(Vec::new());
    let held = write(&mut stuck, 10_000);
    assert!((200..1000).contains(&held), "{held}");
    // The other one has as much, and goes on, since its backend takes what it has.
    let mut other = sharing(&budget);
    assert_eq!(write(&mut other, 5000), 5000);
    assert_eq!(budget.used(), 0);
}

/// Take what is left of a world's buffers, but for so many bytes.
fn fill_pool(world: &World, left: usize) -> Vec<BufMut> {
    let mut held = Vec::new();
    while world.pool.free_bytes() > left {
        held.extend(world.pool.alloc(4096));
    }
    held
}

#[test]
fn reserve_is_not_kept_by_a_volume_whose_backend_hangs() {
    const MIB: u64 = 1 << 20;
    // No second reserve fits beside what others hold.
    let budget = IndexBudget::new(7 * MIB);
    let mut third = Share::new(&budget, 0);
    third.set(2 * MIB);
    let config = VolumeConfig {
        backend_answer_max: Nanos::from_millis(5_000),
        ..config()
    };
    let sharing = || World::sharing(config.clone(), None, &budget);
    let (mut stuck, mut other) = (sharing(), sharing());
    stuck.backend_silent = Some(Vec::new());
    assert_eq!(write(&mut stuck, 64), 64);
    assert_eq!(write(&mut other, 64), 64);
    let _held = [&stuck, &other].map(|world| fill_pool(world, 2 << 20));
    for world in [&mut stuck, &mut other] {
        world.step(Event::DestageAll);
        world.step(Event::Poll);
    }
    assert!(!stuck.backend_holds.is_empty());
    let dirty = |world: &World| world.volume.stats(world.now).dirty_bytes;
    assert!(dirty(&other) > 0, "the reserve is not its");
    let used = budget.used();
    for _ in 0..10 {
        for world in [&mut stuck, &mut other] {
            world.now = world.now.plus(Nanos::from_millis(1_000));
            world.step(Event::Poll);
        }
    }
    assert!(dirty(&stuck) > 0);
    assert_eq!(
        dirty(&other),
        0,
        "it goes on as soon as the backend counts as silent"
    );
    assert!(budget.is_overdrawn() && budget.used() > used);
    stuck.heal_backend();
    for _ in 0..10 {
        stuck.now = stuck.now.plus(Nanos::from_millis(1_000));
        stuck.step(Event::Poll);
    }
    assert_eq!(dirty(&stuck), 0);
    assert!(!budget.is_overdrawn());
    assert_eq!(budget.used(), third.held());
}

#[test]
fn budget_that_became_too_small_has_logs_replayed_one_after_the_other() {
    let budget = IndexBudget::unlimited();
    let mut worlds: Vec<World> = (0..3).map(|_| sharing(&budget)).collect();
    for world in &mut worlds {
        world.backend_silent = Some(Vec::new());
        assert_eq!(write(world, 1500), 1500);
    }
    // The crash: all that was in memory is gone, and there is less of it.
    let small = IndexBudget::new(64 << 10);
    for world in &mut worlds {
        world.budget = Rc::clone(&small);
        world.backend_silent = None;
        world.try_reopen();
    }
    let is_open = |world: &World| world.volume.phase() == Phase::Open;
    let mut has_said_so = false;
    for turns in 0.. {
        let waits =
            |world: &World| matches!(world.volume.trouble(), Some((Trouble::MemoryShort, _)));
        has_said_so |= worlds.iter().any(|world| waits(world) && !is_open(world));
        assert!(!worlds.iter().any(|world| waits(world) && is_open(world)));
        let open = worlds.iter().filter(|world| is_open(world)).count();
        if open == worlds.len() {
            break;
        }
        // What one log holds is there at once, and never that of two.
        assert!(small.used() < 1500 * 240 + (128 << 10), "{small:?}");
        for world in &mut worlds {
            world.now = world.now.plus(Nanos::from_millis(100));
            world.step(Event::Poll);
        }
        assert!(turns < 1000, "{open} are open: {small:?}");
    }
    assert!(has_said_so, "whoever waits for memory says so");
    for world in &mut worlds {
        assert_eq!(world.volume.stats(world.now).replayed_entries, 1500);
    }
}
