//! Long ranges on large volumes: a short seeded set, and planted bugs.

use hdcs_sim::outcome;
use hdcs_sim::ranges::{Coverage, Options, Plant, run};

/// Seeds that a bug may survive.
const SEEDS_MAX: u64 = 60;

#[test]
fn ranges_seeds_hold_and_cover() {
    let mut coverage = Coverage::default();
    for seed in 0..40 {
        let outcome = run(seed, Options::default());
        outcome.assert_held(" --world ranges");
        coverage.add(&outcome.coverage);
    }
    // A set in which nothing takes several steps proves nothing.
    assert!(
        coverage.long > 1000
            && coverage.settling > 100
            && coverage.forgetting > 1000
            && coverage.zeroings > 500
            && coverage.openings > 100,
        "{coverage}"
    );
}

#[test]
fn plant_of_a_long_range_that_is_looked_up_at_once_is_caught() {
    outcome::assert_caught(Plant::LongProbe, &["step-too-long"], SEEDS_MAX, run);
}

#[test]
fn plant_of_zeroes_that_end_early_is_caught() {
    let rules = ["read-stale", "backend-incomplete"];
    outcome::assert_caught(Plant::ShortZero, &rules, SEEDS_MAX, run);
}
