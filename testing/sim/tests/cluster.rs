//! Clusters: a seeded set, and planted bugs.

use hdcs_sim::cluster::{Coverage, Options, Plant, run};
use hdcs_sim::outcome;

/// Seeds that a bug may survive.
const SEEDS_MAX: u64 = 1000;

#[test]
fn cluster_seeds_hold_and_cover() {
    let mut coverage = Coverage::default();
    for seed in 0..300 {
        let outcome = run(seed, Options::default());
        outcome.assert_held(" --world cluster");
        coverage.add(&outcome.coverage);
    }
    // A set in which nothing goes wrong proves nothing.
    assert!(
        coverage.takeovers > 600
            && coverage.fenced > 30
            && coverage.joins > 300
            && coverage.leaves > 200
            && coverage.crashes > 1000
            && coverage.pauses > 500
            && coverage.cuts > 1000
            && coverage.unknown > 100
            && coverage.direct_writes > 1000
            && coverage.configured > 100
            && coverage.shortages > 2
            && coverage.keys_lost > 20
            && coverage.keyless > 5
            && coverage.leader_changes > 50
            && coverage.unruly > 200
            && coverage.lost_messages > 200
            && coverage.clear > 5
            && coverage.encrypted > 60
            && coverage.repairs > 0
            && coverage.old_reads > 50
            && coverage.lost_media > 60
            && coverage.damaged > 4
            && coverage.failed_writes > 30
            && coverage.failed_reads > 4
            && coverage.acked > 20_000,
        "{coverage}"
    );
}

/// Seeds that once found something.
const SEEDS: &[u64] = &[
    // A copy that had rotted was removed while the record was on its way that left its node alone.
    1_016_245,
    // Of three members one had damage and one ended before the tail: neither could leave before the other was there.
    6_000_330,
    // What rotted lay behind the cut of a joiner, where nothing is proof.
    20_000_322,
    // Two members had not got messages on links that stayed, each another one, and neither could leave.
    20_009_365,
];

#[test]
fn cluster_seeds_that_found_something_hold() {
    for &seed in SEEDS {
        run(seed, Options::default()).assert_held(" --world cluster");
    }
}

#[test]
fn cluster_run_is_the_same_every_time() {
    let [one, other] = [(); 2].map(|()| run(7, Options::default()));
    assert_eq!(one.trace_hash, other.trace_hash);
}

fn assert_caught(plant: Plant, rules: &[&str]) {
    outcome::assert_caught(plant, rules, SEEDS_MAX, run);
}

#[test]
fn plant_of_a_disk_that_ends_spans_early_is_caught() {
    assert_caught(Plant::EarlySpan, &["committed-too-few"]);
}

#[test]
fn plant_of_a_disk_that_ends_superblocks_early_is_caught() {
    assert_caught(
        Plant::EarlySuperblock,
        &["retired-too-few", "cut-not-durable", "joined-not-whole"],
    );
}

#[test]
fn plant_of_a_member_that_acknowledges_early_is_caught() {
    assert_caught(Plant::EarlyAck, &["committed-too-few"]);
}

#[test]
fn plant_of_a_write_that_ends_before_it_is_committed_is_caught() {
    assert_caught(Plant::HastyEnd, &["committed-too-few"]);
}

#[test]
fn plant_of_a_tail_that_one_member_has_is_caught() {
    // The group asserts that no tail is set before the last one is retired.
    assert_caught(
        Plant::TailOfOne,
        &["retired-too-few", "tail-taken-back", "assertion"],
    );
}

#[test]
fn plant_of_a_joiner_that_reads_nothing_back_is_caught() {
    assert_caught(Plant::ForgedVerify, &["joined-not-whole"]);
}

#[test]
fn plant_of_a_cut_that_is_forgotten_is_caught() {
    assert_caught(Plant::ForgottenCut, &["cut-not-durable"]);
}

#[test]
fn plant_of_a_candidate_that_does_not_ask_is_caught() {
    assert_caught(Plant::ServesUnasked, &["serves-unasked"]);
}

#[test]
fn plant_of_a_store_that_lets_two_win_is_caught() {
    assert_caught(Plant::TwoWinners, &["record"]);
}

#[test]
fn plant_of_a_volume_that_goes_on_is_caught() {
    // Its client may be told to talk to a volume that has gone.
    assert_caught(Plant::DeafVolume, &["stall", "assertion"]);
}

#[test]
fn plant_of_a_volume_that_reads_without_a_lease_is_caught() {
    assert_caught(Plant::ReadPastLease, &["read-past-lease"]);
}

#[test]
fn plant_of_a_member_that_forgets_what_it_has_echoed_is_caught() {
    assert_caught(Plant::PromiseWithoutWaiting, &["read-past-lease"]);
}

#[test]
fn plant_of_a_member_that_is_left_out_before_the_record_says_so_is_caught() {
    // It may also ask for what follows a record that the store never had.
    assert_caught(Plant::EarlyLeave, &["committed-too-few", "record"]);
}

#[test]
fn plant_of_a_level_that_counts_before_the_record_says_so_is_caught() {
    // It may also ask for what follows a record that the store never had. What superblocks say counts early, too.
    assert_caught(
        Plant::EarlyLevel,
        &["committed-too-few", "mark-too-few", "record"],
    );
}

#[test]
fn plant_of_writes_with_fewer_members_than_they_need_is_caught() {
    assert_caught(Plant::ForgottenMin, &["committed-short"]);
}

#[test]
fn plant_of_a_manager_without_its_key_is_caught() {
    assert_caught(Plant::KeylessManager, &["manager-keyless"]);
}

#[test]
fn plant_of_a_mark_that_members_do_not_have_is_caught() {
    assert_caught(Plant::LostMark, &["mark-too-few"]);
}

#[test]
fn plant_of_a_new_copy_that_counts_is_caught() {
    assert_caught(Plant::FreshVote, &["committed-lost", "no-prefix"]);
}

#[test]
fn plant_of_a_damaged_copy_that_counts_is_caught() {
    // What it writes where its copy seems to end it does not find there.
    assert_caught(Plant::DamagedVote, &["committed-lost", "rot-unnoticed"]);
}

#[test]
fn plant_of_a_failed_write_that_is_hidden_is_caught() {
    assert_caught(Plant::HiddenFailure, &["committed-too-few"]);
}

#[test]
fn plant_of_a_backend_that_takes_what_older_owners_write_is_caught() {
    assert_caught(
        Plant::Unfenced,
        &[
            "backend-goes-back",
            "backend-incomplete",
            "backend-order",
            "read-stale",
        ],
    );
}

#[test]
fn plant_of_a_backend_that_does_not_flush_is_caught() {
    assert_caught(
        Plant::LazyFlush,
        &[
            "policy-early-ack",
            "policy-flush",
            "backend-fua-order",
            "backend-order",
        ],
    );
}

#[test]
fn plant_of_a_manager_that_has_not_seen_the_record_is_caught() {
    assert_caught(Plant::BlindManager, &["record"]);
}

#[test]
fn plant_of_a_cache_that_has_forgotten_nothing_is_caught() {
    assert_caught(Plant::StaleCache, &["read-stale"]);
}

#[test]
fn plant_of_a_driver_that_encrypts_for_another_place_is_caught() {
    assert_caught(Plant::TweakOfPosition, &["span-foreign"]);
}

#[test]
fn plant_of_a_member_that_encrypts_once_more_is_caught() {
    assert_caught(Plant::EncryptedTwice, &["span-foreign"]);
}
