//! A node with local stores and object volumes below its volumes, stacked as a node stacks them.

use hdcs_sim::outcome::{self, assert_held_at_every_step};
use hdcs_sim::plant::Plant;
use hdcs_sim::run::{Options, run, run_scenario, run_stacked};
use hdcs_sim::scenario::Scenario;
use hdcs_sim::world::Coverage;

/// What replays a seed here.
const WORLD: &str = " --world stack";
/// Seeds that a bug may survive.
const SEEDS_MAX: u64 = 300;

#[test]
fn stack_seeds_hold_and_cover() {
    let mut coverage = Coverage::default();
    for seed in 0..100 {
        let outcome = run_stacked(seed, Options::default());
        outcome.assert_held(WORLD);
        coverage.add(&outcome.coverage);
    }
    // A set that no longer crashes, replays, tiers or goes past the log proves nothing.
    assert!(
        coverage.crashes > 150
            && coverage.replayed > 10_000
            && coverage.tiers > 1000
            && coverage.tiered_bytes > 100 << 20
            && coverage.commits > 1000
            && coverage.direct_writes > 3000
            && coverage.ssd_hits > 10_000
            && coverage.arrivals > 10_000
            && coverage.arrivals_refused > 1000
            && coverage.lost_logs > 10
            && coverage.kept_superblocks > 30
            && coverage.idle_rots > 0
            && coverage.fences > 0
            && coverage.shared_sectors > 1000
            && coverage.resizes > 100
            && coverage.cuts > 50
            && coverage.stores_cut > 3
            && coverage.snapshots_of_stores > 50
            && coverage.snapshots_of_objects > 50
            && coverage.snapshots_forgotten > 20
            && coverage.tiered_closes > 5
            && coverage.tiered_again > 2,
        "{coverage}"
    );
}

/// Each once found something.
const SEEDS: [u64; 3] = [
    // The superblock that said where a log at rest ended had rotted, and was written again before that was asked.
    412,
    // A question about extents that waited while another owner took the backend over was answered all the same.
    205,
    // A read for whose rest there was no buffer began again and again, over a local store that answered at once.
    2006,
];

#[test]
fn stack_seeds_that_found_something_hold() {
    for seed in SEEDS {
        run_stacked(seed, Options::default()).assert_held(WORLD);
    }
}

#[test]
fn stack_seed_is_the_same_every_time() {
    let hash = |seed| run_stacked(seed, Options::default()).trace_hash;
    assert_eq!(hash(3), hash(3));
    assert_ne!(hash(3), hash(4));
}

#[test]
fn stack_crash_at_every_step_holds() {
    let run = run_stacked;
    let steps = assert_held_at_every_step(5, WORLD, run, |saw| saw.crashes > 0);
    assert!(steps > 50, "the run has only {steps} steps");
}

fn assert_caught(plant: Plant, rules: &[&str]) {
    outcome::assert_caught(plant, rules, SEEDS_MAX, run);
}

#[test]
fn plant_of_a_read_past_the_store_is_caught() {
    assert_caught(Plant::ReadPastStore, &["read-stale"]);
}

#[test]
fn plant_of_a_flush_past_the_store_is_caught() {
    let rules = [
        "backend-fua-order",
        "backend-not-a-prefix",
        "backend-order",
        "policy-hasty",
        "read-stale",
        "stall",
        "store-damaged",
    ];
    assert_caught(Plant::FlushPastStore, &rules);
}

#[test]
fn plant_of_extents_past_the_store_is_caught() {
    assert_caught(Plant::ExtentsPastStore, &["extents-hide-data"]);
}

#[test]
fn plant_of_a_store_that_is_opened_behind_a_lost_log_is_caught() {
    // A store that is damaged by it may not be tiered out ever after.
    let rules = [
        "store-damaged",
        "backend-not-a-prefix",
        "read-stale",
        "stall",
    ];
    assert_caught(Plant::StaleBefore, &rules);
}

#[test]
fn plant_of_what_is_cut_off_and_stays_is_caught() {
    let options = Options {
        plant: Some(Plant::KeptCut),
        ..Options::default()
    };
    let violation = (0..SEEDS_MAX).find_map(|seed| {
        let scenario = Scenario::draw_for_sizes_of_stores(seed);
        run_scenario(&scenario, options).violation
    });
    assert_eq!(
        violation.map(|violation| violation.rule),
        Some("read-stale")
    );
}

#[test]
fn plant_of_a_tier_during_an_opening_is_caught() {
    let rules = [
        "store-damaged",
        "backend-not-a-prefix",
        "backend-incomplete",
    ];
    assert_caught(Plant::HastyTier, &rules);
}

#[test]
fn plant_of_a_snapshot_without_a_tier_is_caught() {
    assert_caught(Plant::UntieredSnapshot, &["snapshot-incomplete"]);
}

#[test]
fn plant_of_a_store_that_is_let_go_before_the_snapshot_is_caught() {
    assert_caught(Plant::UnheldSnapshot, &["snapshot-unheld"]);
}

#[test]
fn plant_of_a_snapshot_that_is_not_stored_is_caught() {
    assert_caught(Plant::SwallowedSnapshot, &["snapshot-dangling"]);
}

#[test]
fn plant_of_objects_that_only_snapshots_need_and_that_go_is_caught() {
    assert_caught(Plant::SweptSnapshot, &["snapshot-dangling"]);
}

#[test]
fn plant_of_a_hasty_snapshot_is_caught_below_stores_and_of_objects() {
    let options = Options {
        plant: Some(Plant::HastySnapshot),
        ..Options::default()
    };
    let draws = [
        Scenario::draw_for_snapshots_of_stores,
        Scenario::draw_for_snapshots_of_objects,
    ];
    for draw in draws {
        let mut runs = (0..SEEDS_MAX).map(|seed| run_scenario(&draw(seed), options));
        let violation = runs.find_map(|outcome| outcome.violation);
        let rule = violation.map(|violation| violation.rule);
        assert_eq!(rule, Some("snapshot-incomplete"));
    }
}

#[test]
fn plant_of_a_close_without_a_tier_is_caught() {
    assert_caught(Plant::UntieredClose, &["backend-incomplete"]);
}

#[test]
fn plant_of_a_close_that_leaves_what_came_meanwhile_is_caught() {
    assert_caught(Plant::DirtyClose, &["backend-incomplete"]);
}

#[test]
fn plant_of_a_store_that_stays_larger_after_a_cut_that_was_left_is_caught() {
    let rules = [
        "backend-foreign",
        "error-without-cause",
        "read-stale",
        "store-damaged",
    ];
    assert_caught(Plant::UncutStore, &rules);
}
