//! Short seeded sets: what `make sim` does at length.

use hdcs_sim::outcome::assert_held_at_every_step;
use hdcs_sim::run::{Options, run};

#[test]
fn seeds_that_found_something_hold() {
    let list = include_str!("../seeds.txt");
    let seeds = list
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_whitespace().next());
    for seed in seeds {
        let seed = seed
            .parse()
            .expect("a line of seeds.txt begins with a seed");
        run(seed, Options::default()).assert_held("");
    }
}

#[test]
fn seeds_of_a_short_set_hold_and_cover() {
    let mut coverage = hdcs_sim::world::Coverage::default();
    for seed in 1000..1100 {
        let outcome = run(seed, Options::default());
        outcome.assert_held("");
        coverage.add(&outcome.coverage);
    }
    // A set that no longer crashes, replays, destages or hits proves nothing.
    assert!(
        coverage.crashes > 50
            && coverage.replayed > 2000
            && coverage.destaged_bytes > 32 << 20
            && coverage.ssd_hits > 100
            && coverage.dram_hits > 1000
            && coverage.refusals > 0
            && coverage.cache_failures > 5
            && coverage.fences > 0
            && coverage.silent_rounds > 100
            && coverage.log_laps > 5000
            && coverage.log_syncs > 1000
            && coverage.compressed_bytes > 8 << 20
            && coverage.packed_bytes > 1 << 20
            && coverage.crossings > 30
            && coverage.snapshots > 10
            && coverage.shrinks > 2
            && coverage.resizes > 10
            && coverage.cut_requests > 20
            && coverage.packed_rots > 3
            && coverage.weighed > 10
            && coverage.counted > 30
            && coverage.shared_sectors > 1000
            && coverage.switches > 50
            && coverage.direct_writes > 500
            && coverage.forged_logs > 10
            && coverage.lies > 3
            && coverage.arrivals > 10_000,
        "{coverage}"
    );
}

#[test]
fn seeds_hold_with_power_cut_at_every_step() {
    let steps = assert_held_at_every_step(3, "", run, |saw| saw.crashes > 0);
    assert!(steps > 50, "the run has only {steps} steps");
}

#[test]
fn seeds_replay_exactly() {
    for seed in 0..12 {
        let (first, second) = (run(seed, Options::default()), run(seed, Options::default()));
        assert_eq!(first.trace_hash, second.trace_hash, "seed {seed}");
        let other = run(seed + 100, Options::default());
        assert_ne!(first.trace_hash, other.trace_hash, "seed {seed}");
    }
}
