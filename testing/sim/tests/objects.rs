//! Volumes over object stores: short seeded sets, a crash at every step, and planted bugs.

use hdcs_sim::objects::plant::Plant;
use hdcs_sim::objects::scenario::Coverage;
use hdcs_sim::objects::{Options, run};
use hdcs_sim::outcome::{self, assert_held_at_every_step};

/// What replays a seed in this world.
const WORLD: &str = " --world objects";
/// Seeds that a bug may survive.
const SEEDS_MAX: u64 = 200;

#[test]
fn objects_seeds_hold_and_cover() {
    let mut coverage = Coverage::default();
    for seed in 0..80 {
        let outcome = run(seed, Options::default());
        outcome.assert_held(WORLD);
        coverage.add(&outcome.coverage);
    }
    // A set that no longer commits, copies, crashes or is fenced proves nothing.
    assert!(
        coverage.commits > 2000
            && coverage.copied_blocks > 1000
            && coverage.maps > 300
            && coverage.page_gets > 1000
            && coverage.crashes > 150
            && coverage.fenced > 10
            && coverage.late > 100
            && coverage.refused > 500
            && coverage.freed_when_full > 50
            && coverage.snapshots > 10
            && coverage.clones > 5
            && coverage.given_up > 2
            && coverage.inherited_blocks > 500
            && coverage.compressed > 500
            && coverage.frames > coverage.compressed * 5 / 4
            && coverage.frame_gets > 1000
            && coverage.flushes_beside_readers > 100
            && coverage.dead_clones > 5
            && coverage.slow_clones > 1,
        "{coverage}"
    );
}

#[test]
fn objects_seed_is_the_same_every_time() {
    let hash = |seed| run(seed, Options::default()).trace_hash;
    assert_eq!(hash(3), hash(3));
    assert_ne!(hash(3), hash(4));
}

#[test]
fn objects_crash_at_every_step_holds() {
    let at_every_step = |seed| assert_held_at_every_step(seed, WORLD, run, |saw| saw.cut);
    let steps: u64 = (0..12).map(at_every_step).sum();
    assert!(steps > 200, "the runs have only {steps} steps");
}

fn assert_caught(plant: Plant, rules: &[&str]) {
    outcome::assert_caught(plant, rules, SEEDS_MAX, run);
}

#[test]
fn objects_plant_of_a_delete_before_the_commit_is_caught() {
    assert_caught(Plant::DeleteBeforeCommit, &["delete-needed"]);
}

#[test]
fn objects_plant_of_a_manifest_before_its_data_is_caught() {
    assert_caught(
        Plant::ManifestBeforeData,
        &["manifest-dangling", "read-lost"],
    );
}

#[test]
fn objects_plant_of_a_removed_beginning_is_caught() {
    assert_caught(Plant::DeleteBeginning, &["beginning-deleted"]);
}

#[test]
fn objects_plant_of_a_skipped_checksum_is_caught() {
    assert_caught(Plant::SkipChecksum, &["read-foreign"]);
}

#[test]
fn objects_plant_of_an_unknown_end_taken_for_success_is_caught() {
    assert_caught(
        Plant::UnknownIsSuccess,
        &["not-a-boundary", "manifest-dangling", "delete-needed"],
    );
}

#[test]
fn objects_plant_of_an_unknown_end_taken_for_failure_is_caught() {
    assert_caught(Plant::UnknownIsFailure, &["fenced-without-cause"]);
}

#[test]
fn objects_plant_of_a_missing_fence_is_caught() {
    assert_caught(Plant::NoFence, &["fenced-commit", "not-a-boundary"]);
}

#[test]
fn objects_plant_of_a_removed_unknown_object_is_caught() {
    assert_caught(
        Plant::DeleteUnknown,
        &["manifest-dangling", "read-lost", "delete-needed"],
    );
}

#[test]
fn objects_plant_of_a_lost_end_is_caught() {
    assert_caught(Plant::LostEnd, &["stall", "memory"]);
}

#[test]
fn objects_plant_of_frames_off_by_one_is_caught() {
    assert_caught(Plant::FramesOffByOne, &["error-without-cause"]);
}

#[test]
fn objects_plant_of_frames_of_another_object_is_caught() {
    assert_caught(Plant::ForeignFrames, &["units", "error-without-cause"]);
}

#[test]
fn objects_plant_of_a_checksum_of_what_is_stored_is_caught() {
    assert_caught(Plant::SkipFrameChecksum, &["read-foreign"]);
}

#[test]
fn objects_plant_of_a_block_that_frames_leave_out_is_caught() {
    assert_caught(
        Plant::DroppedBlock,
        &["manifest-dangling", "error-without-cause"],
    );
}

#[test]
fn objects_plant_of_a_torn_block_is_caught() {
    assert_caught(
        Plant::TornBlock,
        &["manifest-dangling", "not-a-boundary", "read-stale"],
    );
}

#[test]
fn objects_plant_of_a_refused_put_taken_for_done_is_caught() {
    assert_caught(
        Plant::FullIsDone,
        &[
            "manifest-dangling",
            "not-a-boundary",
            "read-lost",
            "delete-needed",
        ],
    );
}

#[test]
fn objects_plant_of_a_bucket_that_is_full_for_good_is_caught() {
    assert_caught(Plant::FullForGood, &["error-without-cause", "stall"]);
}

#[test]
fn objects_plant_of_room_at_any_price_is_caught() {
    assert_caught(Plant::RoomAtAnyPrice, &["delete-needed"]);
}

#[test]
fn objects_plant_of_a_full_bucket_that_is_not_read_is_caught() {
    assert_caught(Plant::FullForReads, &["error-without-cause"]);
}

#[test]
fn objects_plant_of_a_silent_end_of_a_clone_is_caught() {
    assert_caught(Plant::SilentEnd, &["delete-needed"]);
}

#[test]
fn objects_plant_of_a_guessed_lineage_is_caught() {
    assert_caught(Plant::GuessedLineage, &["inherited"]);
}

#[test]
fn plant_of_slots_that_are_not_marked_is_caught() {
    assert_caught(Plant::UnmarkedSlots, &["slots"]);
}

#[test]
fn objects_plant_of_fills_that_come_last_is_caught() {
    assert_caught(Plant::FillsLast, &["starved", "stall"]);
}

#[test]
fn objects_plant_of_a_reference_removed_without_a_tombstone_is_caught() {
    assert_caught(Plant::NoTombstone, &["dead-clone", "delete-needed"]);
}

#[test]
fn objects_plant_of_old_pages_is_caught() {
    assert_caught(
        Plant::OldPages,
        &["manifest-dangling", "delete-needed", "not-a-boundary"],
    );
}

#[test]
fn objects_plant_of_a_wrong_usage_is_caught() {
    assert_caught(Plant::WrongUsage, &["manifest-dangling", "delete-needed"]);
}

#[test]
fn objects_plant_of_pages_that_come_last_is_caught() {
    assert_caught(Plant::PagesLast, &["starved", "stall"]);
}
