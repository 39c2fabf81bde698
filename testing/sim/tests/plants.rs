//! Planted bugs: every one is caught within a bounded number of seeds, by a checker that is meant to.

use hdcs_sim::outcome;
use hdcs_sim::plant::Plant;
use hdcs_sim::run::{Options, run, run_scenario};
use hdcs_sim::scenario::Scenario;

/// Seeds that a bug may survive.
const SEEDS_MAX: u64 = 300;

fn assert_caught(plant: Plant, rules: &[&str]) {
    outcome::assert_caught(plant, rules, SEEDS_MAX, run);
}

/// What a log that lost something shows: on reading back, at the next opening, in the backend.
const LOG_RULES: &[&str] = &[
    "error-without-cause",
    "open-refused",
    "read-stale",
    "crash-not-a-prefix",
    "backend-incomplete",
];
/// What a backend that was deceived shows.
const BACKEND_RULES: &[&str] = &[
    "backend-order",
    "backend-fua-order",
    "backend-incomplete",
    "read-stale",
    "policy-early-ack",
    "policy-flush",
];

#[test]
fn plant_of_an_early_acknowledgement_is_caught() {
    assert_caught(Plant::EarlyLogAck, LOG_RULES);
}

#[test]
fn plant_of_a_log_write_without_its_sync_is_caught() {
    assert_caught(Plant::UnsyncedLogWrite, LOG_RULES);
}

#[test]
fn plant_of_a_lost_log_write_is_caught() {
    assert_caught(Plant::LostLogWrite, LOG_RULES);
}

#[test]
fn plant_of_a_torn_log_write_is_caught() {
    assert_caught(Plant::TornLogWrite, LOG_RULES);
}

#[test]
fn plant_of_a_flush_that_lies_is_caught() {
    assert_caught(Plant::FlushLie, BACKEND_RULES);
}

#[test]
fn plant_of_a_write_with_fua_that_orders_nothing_is_caught() {
    assert_caught(Plant::ForgottenFua, &["backend-fua-order"]);
}

#[test]
fn plant_of_a_late_backend_write_is_caught() {
    assert_caught(Plant::LateBackendWrite, BACKEND_RULES);
}

#[test]
fn plant_of_a_torn_backend_write_is_caught() {
    assert_caught(Plant::TornBackendWrite, BACKEND_RULES);
}

#[test]
fn plant_of_an_early_commit_is_caught() {
    assert_caught(
        Plant::EarlyCommit,
        &["backend-not-a-prefix", "backend-fua-order"],
    );
}

#[test]
fn plant_of_a_false_atomicity_is_caught() {
    assert_caught(Plant::FalseAtomicity, &["backend-order"]);
}

#[test]
fn plant_of_zeroes_that_are_lost_is_caught() {
    assert_caught(Plant::LostZero, BACKEND_RULES);
}

#[test]
fn plant_of_a_lost_invalidation_is_caught() {
    assert_caught(Plant::LostInvalidation, &["read-stale"]);
}

#[test]
fn plant_of_a_log_that_does_not_say_what_the_cache_has_forgotten_is_caught() {
    assert_caught(Plant::ForgottenTie, &["read-stale"]);
}

#[test]
fn plant_of_a_corrupt_reply_is_caught() {
    assert_caught(Plant::CorruptReply, &["read-foreign"]);
}

#[test]
fn plant_of_a_stale_reply_is_caught() {
    assert_caught(Plant::StaleReply, &["read-stale"]);
}

#[test]
fn plant_of_a_second_reply_is_caught() {
    assert_caught(Plant::ReplyTwice, &["reply-unexpected"]);
}

#[test]
fn plant_of_a_forgotten_reply_is_caught() {
    assert_caught(Plant::ReplyNever, &["stall", "volume-out-of-bounds"]);
}

#[test]
fn plant_of_replies_behind_arrivals_is_caught_by_clients_that_do_not_wait_alone() {
    let rules = ["waits-for-long", "read-starved"];
    assert_caught(Plant::ArrivalsFirst, &rules);
    let options = Options {
        plant: Some(Plant::ArrivalsFirst),
        ..Options::default()
    };
    for seed in 0..5 {
        let mut scenario = Scenario::draw_for_light_loads(seed);
        for volume in &mut scenario.volumes {
            volume.open_loop = None;
        }
        run_scenario(&scenario, options).assert_held(" (by hand)");
    }
}

#[test]
fn light_loads_wait_for_nothing() {
    for seed in 0..20 {
        let scenario = Scenario::draw_for_light_loads(seed);
        let outcome = run_scenario(&scenario, Options::default());
        outcome.assert_held(" (by hand)");
        assert!(outcome.coverage.arrivals > 800, "{}", outcome.coverage);
    }
}

#[test]
fn plant_of_a_leaked_buffer_is_caught() {
    assert_caught(Plant::LeakBuffer, &["buffer-leak"]);
}

#[test]
fn plant_of_a_read_of_the_log_that_stays_wrong_is_caught() {
    assert_caught(Plant::StuckRead, &["error-without-cause"]);
}

#[test]
fn plant_of_a_replay_that_believes_its_first_look_is_caught() {
    assert_caught(Plant::StuckReplay, LOG_RULES);
}

#[test]
fn plant_of_a_tail_past_damage_that_is_not_recorded_is_caught() {
    let rules = ["lost-forgotten", "lost-shown", "read-stale"];
    assert_caught(Plant::ForgottenLoss, &rules);
}

#[test]
fn plant_of_a_loss_that_only_one_superblock_records_is_caught() {
    assert_caught(Plant::LoneLoss, &["lost-told-once"]);
}

#[test]
fn plant_of_an_end_that_is_not_recorded_is_caught() {
    assert_caught(
        Plant::ForgottenHead,
        &["end-not-recorded", "saved-forgotten"],
    );
}

#[test]
fn plant_of_a_log_at_rest_that_does_not_say_where_it_ends_is_caught() {
    assert_caught(Plant::UnmarkedEnd, &["rest-forgotten"]);
}

#[test]
fn plant_of_a_forged_superblock_of_a_log_that_is_taken_is_caught() {
    assert_caught(Plant::ForgedLogTaken, &["forged-taken"]);
}

#[test]
fn plant_of_a_shard_that_keeps_memory_for_indexes_is_caught() {
    assert_caught(Plant::HoardedIndex, &["indexes-beyond-cap"]);
}

#[test]
fn plant_of_a_shard_that_is_not_told_of_what_its_volumes_wait_for_is_caught() {
    assert_caught(Plant::UntoldShard, &["untold"]);
}

#[test]
fn plant_of_frames_that_stay_when_a_volume_leaves_its_shard_is_caught() {
    assert_caught(Plant::StayingFrames, &["read-stale"]);
}

#[test]
fn plant_of_a_lost_sector_that_is_shown_is_caught() {
    // Beside a lost sector it shows others, of which the backend has an older version than the log.
    assert_caught(Plant::ShownLoss, &["lost-shown", "read-stale"]);
}

#[test]
fn plant_of_a_starved_read_is_caught() {
    assert_caught(Plant::StarvedRead, &["read-starved"]);
}

#[test]
fn plant_of_an_ignored_fence_is_caught() {
    assert_caught(Plant::IgnoredFence, &["fenced-asked", "fenced-answer"]);
}

#[test]
fn plant_of_a_stale_readmission_is_caught() {
    assert_caught(Plant::StaleReadmission, &["read-stale"]);
}

#[test]
fn plant_of_a_promotion_that_brings_nothing_is_caught() {
    assert_caught(Plant::IdlePromotion, &["promoted-not-there"]);
}

#[test]
fn plant_of_a_stale_promotion_is_caught() {
    assert_caught(Plant::StalePromotion, &["read-stale"]);
}

#[test]
fn plant_of_a_pin_that_is_forgotten_is_caught() {
    assert_caught(Plant::ForgottenPin, &["pinned-not-kept"]);
}

#[test]
fn plant_of_pins_beyond_their_share_is_caught() {
    // They drive out what is promoted, too.
    let rules = [
        "pinned-not-kept",
        "heat-not-seen",
        "warmed-not-there",
        "promoted-not-there",
    ];
    assert_caught(Plant::HoardedPins, &rules);
}

#[test]
fn plant_of_a_warm_up_that_leaves_something_out_is_caught() {
    assert_caught(Plant::ForgottenWarmUp, &["warmed-not-there"]);
}

#[test]
fn plant_of_weights_that_are_not_used_is_caught() {
    assert_caught(Plant::BlindWeights, &["benefit-not-kept"]);
}

#[test]
fn plant_of_marks_that_are_ignored_is_caught() {
    assert_caught(Plant::IgnoredMarks, &["fill-beyond-mark"]);
}

#[test]
fn plant_of_reads_that_are_not_counted_is_caught() {
    assert_caught(Plant::UncountedReads, &["taken-uncounted"]);
}

#[test]
fn plant_of_a_number_kept_without_its_log_is_caught() {
    assert_caught(Plant::KeptNumber, &["read-stale"]);
}

#[test]
fn plant_of_a_snapshot_before_its_destage_is_caught() {
    assert_caught(Plant::HastySnapshot, &["snapshot-incomplete"]);
}

#[test]
fn plant_of_a_snapshot_of_what_is_not_flushed_is_caught() {
    // Few seeds have a snapshot at such a moment: these have.
    let later = |seed, options| run(seed + 900, options);
    outcome::assert_caught(
        Plant::LooseSnapshot,
        &["snapshot-not-a-prefix"],
        SEEDS_MAX,
        later,
    );
}

#[test]
fn plant_of_writes_beside_a_snapshot_is_caught() {
    assert_caught(Plant::LeakySnapshot, &["snapshot-not-a-prefix"]);
}

#[test]
fn plant_of_a_guessed_lineage_is_caught() {
    assert_caught(Plant::GuessedLineage, &["read-stale", "read-foreign"]);
}

#[test]
fn plant_of_a_clones_data_under_its_origin_is_caught() {
    assert_caught(Plant::MisplacedFill, &["read-foreign", "read-stale"]);
}

#[test]
fn plant_of_an_acknowledgement_before_the_backend_is_caught() {
    assert_caught(Plant::EarlyDirectAck, &["policy-early-ack", "policy-flush"]);
}

#[test]
fn plant_of_a_switch_before_the_drain_is_caught() {
    assert_caught(Plant::HastySwitch, &["policy-hasty"]);
}

#[test]
fn plant_of_a_flush_that_forgets_direct_writes_is_caught() {
    assert_caught(
        Plant::ForgottenFlush,
        &["policy-flush", "backend-incomplete"],
    );
}

#[test]
fn plant_of_a_failed_flush_that_is_not_told_is_caught() {
    assert_caught(Plant::DeafFlush, &["policy-flush"]);
}

#[test]
fn plant_of_a_failed_flush_that_destage_is_not_told_of_is_caught() {
    // Those who waited for it are told, so that nothing is missed but what destage has written.
    // It shows in the backend, at the latest when writes begin to go past a log that has let go of them.
    assert_caught(
        Plant::UndoubtedFlush,
        &[BACKEND_RULES, &["policy-hasty"]].concat(),
    );
}

#[test]
fn plant_of_a_cut_that_the_cache_does_not_forget_is_caught() {
    assert_caught(Plant::KeptCut, &["read-stale"]);
}

#[test]
fn plant_of_an_older_superblock_that_names_what_is_cut_off_is_caught() {
    let rules = [
        "read-stale",
        "read-foreign",
        "extents-dirty",
        "backend-foreign",
        "backend-goes-back",
    ];
    assert_caught(Plant::OlderTail, &rules);
}

#[test]
fn superblocks_that_rot_bring_nothing_back_that_is_cut_off() {
    let mut again = 0;
    let resizes: u64 = (0..15)
        .map(|seed| {
            let outcome = run_scenario(
                &Scenario::draw_for_rotten_superblocks(seed),
                Options::default(),
            );
            // An older superblock names an older tail: what was destaged since goes to the backend once more, in the same
            // order. The rules of order take that for going back.
            match &outcome.violation {
                Some(violation) if violation.rule == "backend-goes-back" => again += 1,
                violation => assert_eq!(*violation, None, "seed {seed}"),
            }
            outcome.coverage.resizes
        })
        .sum();
    assert!(resizes > 0);
    assert!(again <= 1, "{again} runs of 15");
}

#[test]
fn plant_of_a_log_that_does_not_say_what_went_past_it_is_caught() {
    assert_caught(
        Plant::ForgottenMark,
        &["policy-flush", "backend-incomplete"],
    );
}

#[test]
fn plant_of_a_log_that_takes_that_back_too_early_is_caught() {
    assert_caught(Plant::HastyUnmark, &["policy-flush", "backend-incomplete"]);
}

#[test]
fn plant_of_an_invalidation_after_a_write_past_the_log_is_caught() {
    assert_caught(Plant::LateInvalidation, &["read-stale"]);
}

#[test]
fn plant_of_a_lost_completion_is_caught() {
    assert_caught(Plant::LostCompletion, &["stall"]);
}

#[test]
fn plant_of_another_key_is_caught() {
    // What is in the SSD tier since before is what its checksums say, but not what was written.
    assert_caught(Plant::OtherKey, &["read-foreign"]);
}

#[test]
fn plant_of_a_codec_that_gives_back_something_else_is_caught() {
    assert_caught(Plant::ConfusedCodec, &["error-without-cause"]);
}

#[test]
fn plant_of_an_unpacked_line_that_is_not_compared_is_caught() {
    assert_caught(Plant::UnseenDamage, &["read-foreign"]);
}

#[test]
fn plant_of_another_line_of_a_packed_segment_is_caught() {
    // Where they were the same once, one of them looks like what the other was then.
    assert_caught(Plant::SwappedLines, &["read-foreign", "read-stale"]);
}

#[test]
fn plant_of_a_scrub_that_looks_at_nothing_is_caught() {
    assert_caught(Plant::IdleScrub, &["scrub-missed"]);
}

#[test]
fn plant_of_a_discard_that_is_not_ignored_is_caught() {
    let rules = ["backend-goes-back", "read-stale", "backend-fua-order"];
    assert_caught(Plant::ForcedDiscard, &rules);
}

#[test]
fn plant_of_a_log_that_nobody_watches_is_caught() {
    assert_caught(Plant::UnwatchedLog, &["hang-not-shown"]);
}

#[test]
fn plant_of_waiters_that_are_not_told_is_caught() {
    assert_caught(Plant::UntoldWaiters, &["silent-log-waits"]);
}

#[test]
fn plant_of_slow_reads_of_a_log_that_fail_writes_is_caught() {
    assert_caught(Plant::ReadsHoldWrites, &["error-without-cause"]);
}

#[test]
fn plant_of_a_close_that_waits_for_its_log_is_caught() {
    assert_caught(Plant::PatientClose, &["silent-log-close"]);
}

#[test]
fn plant_of_a_log_that_is_opened_before_it_has_answered_is_caught() {
    let overlap = [&["effect-overlap", "replay-incomplete"][..], LOG_RULES].concat();
    assert_caught(Plant::HastyReopen, &overlap);
}

#[test]
fn silent_logs_hold_up_nobody_for_longer_than_they_may() {
    let (mut rounds, mut closes) = (0, 0);
    for seed in 0..60 {
        let scenario = Scenario::draw_for_silent_logs(seed);
        let outcome = run_scenario(&scenario, Options::default());
        outcome.assert_held(" (with silent logs)");
        rounds += outcome.coverage.log_silent_rounds;
        closes += outcome.coverage.late_closes;
    }
    assert!(
        rounds > 1000 && closes > 10,
        "{rounds} rounds, {closes} closes"
    );
}

/// What a log that is replayed though it was given up shows.
const GIVEN_UP_RULES: &[&str] = &[
    "read-stale",
    "backend-fua-order",
    "extents-hide-data",
    "backend-goes-back",
    "backend-order",
    "backend-incomplete",
    "policy-flush",
];

#[test]
fn plant_of_a_superblock_that_is_not_kept_is_caught() {
    assert_caught(Plant::LostKeeping, GIVEN_UP_RULES);
}

#[test]
fn plant_of_a_superblock_that_is_kept_late_is_caught() {
    assert_caught(Plant::LateKeeping, GIVEN_UP_RULES);
}

#[test]
fn plant_of_a_stale_log_is_caught() {
    assert_caught(Plant::StaleLog, GIVEN_UP_RULES);
}

#[test]
fn plant_of_a_log_that_is_told_of_space_before_it_is_there_is_caught() {
    let rules = ["log-write-unprepared", "log-prepared-unknown"];
    assert_caught(Plant::HastyPreparation, &rules);
}

#[test]
fn plant_of_space_taken_that_the_older_superblock_needs_is_caught() {
    assert_caught(Plant::HastyGift, &["log-hole-needed"]);
}

#[test]
fn space_of_logs_that_comes_and_goes_is_held_beside_older_superblocks() {
    let (mut again, mut gifts, mut growths) = (0, 0, 0);
    for seed in 0..40 {
        let outcome = run_scenario(&Scenario::draw_for_log_space(seed), Options::default());
        match &outcome.violation {
            // As above: an older superblock names an older tail.
            Some(violation) if violation.rule == "backend-goes-back" => again += 1,
            violation => assert_eq!(*violation, None, "seed {seed}"),
        }
        gifts += outcome.coverage.log_gifts;
        growths += outcome.coverage.log_growths;
    }
    assert!(gifts > 10 && growths > 150, "{gifts} {growths}");
    assert!(again <= 4, "{again} runs of 40");
}
