//! Storage mode: short seeded sets, a crash at every step, and planted bugs.

use hdcs_sim::home::plant::Plant;
use hdcs_sim::home::{Coverage, Options, run};
use hdcs_sim::outcome::{self, assert_held_at_every_step};

/// What replays a seed in this world.
const WORLD: &str = " --world home";
/// Seeds that a bug may survive.
const SEEDS_MAX: u64 = 400;

#[test]
fn home_seeds_hold_and_cover() {
    let mut coverage = Coverage::default();
    for seed in 0..400 {
        let outcome = run(seed, Options::default());
        outcome.assert_held(WORLD);
        coverage.add(&outcome.coverage);
    }
    // A set that no longer tiers, waits, fills, crashes or repairs proves nothing.
    assert!(
        coverage.flushes > 5000
            && coverage.tiers > 1200
            && coverage.tiers_given_up > 700
            && coverage.waits > 2500
            && coverage.fills > 12_000
            && coverage.crashes > 900
            && coverage.repairs > 90
            && coverage.betweens > 300
            && coverage.lost_logs > 25
            && coverage.failed > 15
            && coverage.holds > 150
            && coverage.grown > 250
            && coverage.shrunk > 150
            && coverage.resizes_cut > 80
            && coverage.lingered > 20
            && coverage.lost_map_writes_survived > 60
            && coverage.lost_map_writes_noticed > 0
            && coverage.forged > 80
            && coverage.forged_sectors > 15
            && coverage.lost_map_writes_noticed < coverage.lost_map_writes_survived / 3,
        "{coverage}"
    );
}

/// The checksums that one write needed drove each other out of the little memory for them, for ever.
#[test]
fn home_write_over_two_blocks_of_the_table_ends() {
    run(16_692, Options::default()).assert_held(WORLD);
}

#[test]
fn home_seed_is_the_same_every_time() {
    let hash = |seed| run(seed, Options::default()).trace_hash;
    assert_eq!(hash(3), hash(3));
    assert_ne!(hash(3), hash(4));
}

#[test]
fn home_crash_at_every_step_holds() {
    let at_every_step = |seed| assert_held_at_every_step(seed, WORLD, run, |saw| saw.cut);
    let steps: u64 = (0..12).map(at_every_step).sum();
    assert!(steps > 500, "the runs have only {steps} steps");
}

fn assert_caught(plant: Plant, rules: &[&str]) {
    outcome::assert_caught(plant, rules, SEEDS_MAX, run);
}

#[test]
fn home_plant_of_a_map_before_its_data_is_caught() {
    assert_caught(
        Plant::MapBeforeData,
        &[
            "read-wrong",
            "foreign",
            "between-shown",
            "tier-state",
            "good-refused",
        ],
    );
}

#[test]
fn home_plant_of_clean_before_the_backend_is_flushed_is_caught() {
    assert_caught(
        Plant::CleanBeforeFlush,
        &["tier-state", "between-unsaid", "between-shown"],
    );
}

#[test]
fn home_plant_of_no_copy_before_a_write_is_caught() {
    assert_caught(Plant::NoCopyFirst, &["tier-state", "between-shown"]);
}

#[test]
fn home_plant_of_a_partial_write_without_a_fill_is_caught() {
    assert_caught(
        Plant::NoFill,
        &[
            "read-wrong",
            "foreign",
            "between-shown",
            "tier-state",
            "good-refused",
        ],
    );
}

#[test]
fn home_plant_of_a_page_written_with_its_copy_is_caught() {
    // Only a power cut in that very moment tears both.
    let mut cuts = (0..40).flat_map(|seed| (0..400).map(move |step| (seed, step)));
    let violation = cuts.find_map(|(seed, step)| {
        let options = Options {
            plant: Some(Plant::CopyAtOnce),
            crash_at: Some(step),
            ..Options::default()
        };
        run(seed, options).violation
    });
    let violation = violation.expect("it is caught at some step of some seed");
    assert_eq!(violation.rule, "open-refused", "{violation}");
}

#[test]
fn home_plant_of_clean_blocks_under_another_log_is_caught() {
    assert_caught(
        Plant::TrustClean,
        &["tier-state", "between-unsaid", "between-shown"],
    );
}

#[test]
fn home_plant_of_a_backend_between_states_unsaid_is_caught() {
    assert_caught(Plant::BetweenUnsaid, &["between-unsaid"]);
}

#[test]
fn home_plant_of_a_lost_end_is_caught() {
    assert_caught(Plant::LostEnd, &["stall"]);
}

#[test]
fn home_plant_of_a_sync_that_lies_is_caught() {
    assert_caught(
        Plant::SyncLie,
        &["read-wrong", "foreign", "open-refused", "good-refused"],
    );
}

#[test]
fn home_plant_of_checksums_after_the_answer_is_caught() {
    assert_caught(Plant::SumsAfterAnswer, &["good-refused"]);
}

#[test]
fn home_plant_of_lost_checksums_is_caught() {
    assert_caught(Plant::SumsLost, &["good-refused"]);
}

#[test]
fn home_plant_of_data_that_is_not_compared_is_caught() {
    assert_caught(Plant::NoVerify, &["read-wrong", "foreign"]);
}

#[test]
fn home_plant_of_writes_of_the_last_life_that_nobody_names_is_caught() {
    assert_caught(Plant::UnsettledUnsaid, &["good-refused", "tier-state"]);
}

#[test]
fn home_plant_of_checksums_under_another_log_is_caught() {
    assert_caught(Plant::TrustSums, &["good-refused"]);
}

#[test]
fn home_plant_of_a_flush_that_nobody_asked_for_is_caught() {
    assert_caught(
        Plant::FlushOfNobody,
        &["tier-state", "between-unsaid", "between-shown"],
    );
}

#[test]
fn home_plant_of_a_snapshot_before_its_tier_is_caught() {
    assert_caught(Plant::HeldBeforeTier, &["held-state"]);
}

#[test]
fn home_plant_of_a_tier_beside_a_snapshot_is_caught() {
    assert_caught(Plant::HeldAndWritten, &["held-changed"]);
}

#[test]
fn home_plant_of_sectors_that_are_stored_plain_is_caught() {
    assert_caught(Plant::StoredPlain, &["stored-plain"]);
}

#[test]
fn home_plant_of_sectors_that_are_decrypted_as_others_is_caught() {
    assert_caught(Plant::DecryptedAsAnother, &["foreign"]);
}

#[test]
fn home_plant_of_new_pages_that_are_lost_is_caught() {
    assert_caught(
        Plant::NewPagesLost,
        &["open-refused", "read-wrong", "foreign", "tier-state"],
    );
}

#[test]
fn home_plant_of_a_backend_that_is_cut_before_its_home_is_caught() {
    assert_caught(
        Plant::BackendCutFirst,
        &["size", "beyond-end", "between-shown"],
    );
}

#[test]
fn home_plant_of_a_backend_that_is_not_cut_is_caught() {
    assert_caught(
        Plant::BackendKeepsTail,
        &[
            "read-wrong",
            "tier-state",
            "between-unsaid",
            "between-shown",
        ],
    );
}

#[test]
fn home_plant_of_a_resize_that_shows_a_part_of_a_tier_is_caught() {
    assert_caught(Plant::ResizeShowsPart, &["between-shown"]);
}

#[test]
fn home_plant_of_a_home_that_is_not_woken_is_caught() {
    assert_caught(Plant::SleepsThrough, &["read-wrong", "tier-state"]);
}

#[test]
fn home_plant_of_a_flush_that_is_answered_before_its_copies_is_caught() {
    assert_caught(
        Plant::AnsweredBeforeCopies,
        &[
            "read-wrong",
            "tier-state",
            "between-unsaid",
            "between-shown",
        ],
    );
}

#[test]
fn home_plant_of_pages_that_nobody_counts_is_caught() {
    assert_caught(
        Plant::MapUnchecked,
        &[
            "read-wrong",
            "tier-state",
            "between-unsaid",
            "between-shown",
        ],
    );
}

#[test]
fn home_plant_of_a_forged_map_that_is_taken_is_caught() {
    assert_caught(Plant::ForgedMapTaken, &["forged-taken"]);
}

#[test]
fn home_plant_of_forged_sectors_that_are_taken_is_caught() {
    assert_caught(Plant::ForgedSectorsTaken, &["read-wrong", "foreign"]);
}
