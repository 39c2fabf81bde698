//! Devices that lie once, and logs that rot: no client is ever given what it did not write.

use hdcs_sim::run::{Options, run_scenario};
use hdcs_sim::scenario::Scenario;
use hdcs_sim::world::Coverage;

fn hold(seeds: std::ops::Range<u64>, draw: fn(u64) -> Scenario) -> Coverage {
    let mut coverage = Coverage::default();
    for seed in seeds {
        let scenario = draw(seed);
        let outcome = run_scenario(&scenario, Options::default());
        let lie = scenario.faults.cache_lie;
        assert!(
            outcome.violation.is_none(),
            "seed {seed}, {lie:?}: {}\n{}",
            outcome.violation.expect("just seen"),
            outcome.tail.join("\n")
        );
        coverage.add(&outcome.coverage);
    }
    coverage
}

#[test]
fn lies_of_the_cache_device_never_show() {
    let coverage = hold(0..150, Scenario::draw_for_cache_lies);
    assert!(
        coverage.lies > 50 && coverage.ssd_hits > 10_000,
        "{coverage}"
    );
}

#[test]
fn lies_about_the_newest_write_of_the_cache_device_never_show() {
    let coverage = hold(0..60, Scenario::draw_for_undone_writes);
    assert!(coverage.lies > 20 && coverage.ssd_hits > 4000, "{coverage}");
}

#[test]
fn reads_of_a_replay_that_lie_once_never_show() {
    let coverage = hold(0..100, Scenario::draw_for_spoiled_replays);
    assert!(
        coverage.spoiled_replays > 300 && coverage.replayed > 10_000,
        "{coverage}"
    );
}

#[test]
fn damaged_logs_lose_no_more_than_what_is_damaged() {
    let coverage = hold(0..100, Scenario::draw_for_damaged_logs);
    assert!(
        coverage.saved_logs > 50 && coverage.lost_sectors > 200,
        "{coverage}"
    );
}

#[test]
fn damaged_ends_of_logs_lose_no_more_when_they_are_opened_again() {
    let coverage = hold(0..100, Scenario::draw_for_damaged_ends);
    assert!(
        coverage.saved_logs > 50 && coverage.lost_sectors > 100,
        "{coverage}"
    );
}
