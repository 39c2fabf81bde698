//! Everything that may happen to three members, and that each planted bug is found.

use std::time::Instant;

use hdcs_core::replication::record::AckLevel;
use hdcs_model::plant::Plant;
use hdcs_model::world::{NODES, RULE, Scope};
use stateright::{Checker, Model};

/// Nothing goes wrong.
const QUIET: Scope = Scope {
    ack: AckLevel::All,
    members: 3,
    spans: 4,
    slow: [true; NODES],
    window: 2,
    crashes: 0,
    crashing: [true; NODES],
    takings: 0,
    candidates: [true; NODES],
    suspicions: 0,
    breaks: 0,
    tails: 0,
    losses: 0,
    retries: 0,
    namings: 0,
    configurations: 0,
    shapes: &[],
    openings: 0,
    rots: 0,
    ring_blocks: 1 << 16,
    burst: 1,
    requests: 0,
    unanswered: 0,
    plant: None,
};

/// A member loses the first of two spans that are under way, and not the second one.
const TORN: Scope = Scope {
    ack: AckLevel::Majority,
    spans: 3,
    burst: 2,
    slow: [false, true, false],
    crashes: 1,
    crashing: [false, true, false],
    takings: 1,
    candidates: [false, false, true],
    ..QUIET
};

/// Rings have room for two spans.
const RING: Scope = Scope {
    ack: AckLevel::Majority,
    ring_blocks: 2,
    tails: 2,
    slow: [false, false, true],
    ..QUIET
};

/// A member leaves, joins again, and stops at some moment, when it leaves some of what it was writing.
const JOINING: Scope = Scope {
    ack: AckLevel::Majority,
    spans: 3,
    window: 3,
    suspicions: 1,
    crashes: 2,
    crashing: [false, false, true],
    slow: [false, false, true],
    ..QUIET
};

/// A member that joins anew cannot read back what it has.
const ROT: Scope = Scope {
    ack: AckLevel::Majority,
    spans: 2,
    suspicions: 1,
    crashes: 1,
    rots: 1,
    slow: [false; NODES],
    ..QUIET
};

/// A client repeats its requests to whoever serves.
const REQUESTS: Scope = Scope {
    ack: AckLevel::Majority,
    requests: 2,
    spans: 3,
    window: 1,
    takings: 1,
    candidates: [false, true, false],
    slow: [false; NODES],
    ..QUIET
};

/// The same, and the tail moves past what it was answered with.
const REQUESTS_AND_TAILS: Scope = Scope {
    requests: 1,
    unanswered: 1,
    spans: 2,
    tails: 1,
    ..REQUESTS
};

fn explore(name: &str, scope: Scope) {
    let begun = Instant::now();
    let checker = scope.checker().threads(2).spawn_bfs().join();
    println!(
        "{name}: {} states, depth {}, {:.1} s",
        checker.unique_state_count(),
        checker.max_depth(),
        begun.elapsed().as_secs_f64()
    );
    checker.assert_properties();
}

#[test]
fn group_under_crashes() {
    explore(
        "crashes",
        Scope {
            crashes: 1,
            ..QUIET
        },
    );
}

#[test]
fn takeover_at_each_level() {
    for ack in [AckLevel::One, AckLevel::Majority, AckLevel::All] {
        let scope = Scope {
            ack,
            spans: 1,
            takings: 1,
            ..QUIET
        };
        explore(&format!("takeover, {ack:?}"), scope);
    }
}

#[test]
fn takeover_of_four_spans() {
    let scope = Scope {
        ack: AckLevel::Majority,
        takings: 1,
        window: 1,
        slow: [false; NODES],
        ..QUIET
    };
    explore("takeover of four spans", scope);
}

#[test]
fn takeover_under_crashes_and_slow_writes_of_the_primary() {
    let scope = Scope {
        ack: AckLevel::One,
        spans: 1,
        crashes: 1,
        takings: 1,
        slow: [true, false, false],
        ..QUIET
    };
    explore("takeover under crashes", scope);
}

#[test]
fn members_leave_and_join() {
    let scope = Scope {
        ack: AckLevel::Majority,
        spans: 1,
        takings: 1,
        suspicions: 1,
        slow: [false; NODES],
        ..QUIET
    };
    explore("leaves, and a takeover", scope);
    let scope = Scope {
        members: 2,
        crashes: 1,
        slow: [false, false, true],
        ..QUIET
    };
    explore("a join, and a crash", scope);
}

#[test]
fn group_that_is_asked_to_be_another_one() {
    const TO_ONE: &[(u16, AckLevel)] = &[(2, AckLevel::One), (3, AckLevel::One)];
    const TO_MAJORITY: &[(u16, AckLevel)] = &[(2, AckLevel::Majority), (3, AckLevel::Majority)];
    const TO_ALL: &[(u16, AckLevel)] = &[(2, AckLevel::All), (3, AckLevel::All)];
    let scope = Scope {
        spans: 1,
        configurations: 1,
        slow: [false; NODES],
        ..QUIET
    };
    for (from, shapes) in [
        (AckLevel::One, TO_ALL),
        (AckLevel::All, TO_ONE),
        (AckLevel::Majority, TO_ALL),
        (AckLevel::All, TO_MAJORITY),
    ] {
        let levels = Scope {
            ack: from,
            takings: 1,
            shapes,
            ..scope.clone()
        };
        explore(
            &format!("{from:?} to another level, and a takeover"),
            levels,
        );
    }
    let more = Scope {
        ack: AckLevel::Majority,
        members: 1,
        configurations: 2,
        takings: 1,
        shapes: &[(1, AckLevel::Majority), (2, AckLevel::All)],
        ..scope.clone()
    };
    explore("more and fewer copies", more);
    let troubled = Scope {
        ack: AckLevel::Majority,
        suspicions: 1,
        breaks: 1,
        retries: 1,
        namings: 1,
        shapes: &[(2, AckLevel::All)],
        ..scope
    };
    explore(
        "fewer copies, and what else may change the record",
        troubled,
    );
}

#[test]
fn store_that_answers_late_and_a_manager_that_changes_its_mind() {
    let scope = Scope {
        ack: AckLevel::Majority,
        spans: 1,
        suspicions: 2,
        tails: 1,
        slow: [false; NODES],
        ..QUIET
    };
    explore(
        "links, while members leave and join",
        Scope {
            breaks: 1,
            ..scope.clone()
        },
    );
    explore(
        "joiners named anew",
        Scope {
            namings: 1,
            ..scope.clone()
        },
    );
    explore(
        "records asked for again",
        Scope {
            suspicions: 1,
            breaks: 1,
            retries: 1,
            ..scope
        },
    );
}

#[test]
fn tails_and_links_and_media() {
    let scope = Scope {
        ack: AckLevel::Majority,
        spans: 1,
        takings: 1,
        slow: [false; NODES],
        ..QUIET
    };
    explore(
        "tails",
        Scope {
            crashes: 1,
            tails: 1,
            ..scope.clone()
        },
    );
    explore(
        "links",
        Scope {
            breaks: 1,
            ..scope.clone()
        },
    );
    explore("media", Scope { losses: 1, ..scope });
}

#[test]
fn spans_that_nobody_was_told_of() {
    explore("torn windows", TORN);
}

#[test]
fn openings_of_a_primary() {
    let scope = Scope {
        ack: AckLevel::Majority,
        spans: 1,
        openings: 1,
        takings: 1,
        slow: [false; NODES],
        ..QUIET
    };
    explore("openings", scope);
}

#[test]
fn rings_that_are_full() {
    explore("rings", RING);
    explore(
        "rings and links",
        Scope {
            spans: 3,
            tails: 1,
            breaks: 1,
            ..RING
        },
    );
}

#[test]
fn what_a_joiner_leaves_when_it_stops() {
    explore("joining", JOINING);
}

#[test]
fn copies_that_are_rotten() {
    explore("rot", ROT);
}

#[test]
fn requests_that_a_client_repeats() {
    explore("requests", REQUESTS);
    explore("requests and tails", REQUESTS_AND_TAILS);
    let crashes = Scope {
        requests: 1,
        spans: 2,
        crashes: 1,
        crashing: [true, false, false],
        ..REQUESTS
    };
    explore("requests and crashes", crashes);
}

/// Where each bug shows.
fn with_plant(plant: Plant) -> Scope {
    let scope = Scope {
        ack: AckLevel::Majority,
        spans: 1,
        takings: 1,
        slow: [false; NODES],
        plant: Some(plant),
        ..QUIET
    };
    match plant {
        Plant::AckBeforeDurable => Scope {
            slow: [true; NODES],
            ..scope
        },
        Plant::PromiseNotDurable => Scope {
            crashes: 1,
            slow: [false, false, true],
            ..scope
        },
        Plant::LeaverDroppedEarly
        | Plant::LeaveNotCovered
        | Plant::JoinerCountedEarly
        | Plant::CutByPresentOpening => Scope {
            suspicions: 1,
            ..scope
        },
        Plant::ConfigNotCovered => Scope {
            ack: AckLevel::One,
            takings: 0,
            configurations: 1,
            shapes: &[(3, AckLevel::All)],
            ..scope
        },
        Plant::ConfigCountedEarly => Scope {
            ack: AckLevel::All,
            takings: 0,
            configurations: 1,
            shapes: &[(3, AckLevel::One)],
            ..scope
        },
        Plant::ForgottenCut => Scope {
            spans: 2,
            crashes: 1,
            ..scope
        },
        Plant::TailOfOne => Scope {
            tails: 1,
            slow: [false, true, true],
            ..scope
        },
        Plant::SpanPastEvidence => Scope {
            spans: 2,
            crashes: 1,
            takings: 0,
            slow: [true; NODES],
            ..scope
        },
        Plant::JoinerPastEvidence => Scope {
            plant: Some(plant),
            ..JOINING
        },
        Plant::NewIsWhole => Scope { losses: 1, ..scope },
        Plant::ServesUnasked => Scope {
            takings: 2,
            ..scope
        },
        Plant::OpeningNotCut => Scope {
            plant: Some(plant),
            ..TORN
        },
        Plant::OpeningOfOne => Scope {
            spans: 2,
            openings: 1,
            ..scope
        },
        Plant::RingOverrun => Scope {
            plant: Some(plant),
            ..RING
        },
        Plant::ForgottenRot => Scope {
            plant: Some(plant),
            ..ROT
        },
        Plant::ResultNotCarried => Scope {
            plant: Some(plant),
            ..REQUESTS_AND_TAILS
        },
        Plant::CarriedUncommitted => Scope {
            plant: Some(plant),
            crashes: 1,
            crashing: [true, false, false],
            slow: [true, false, false],
            ..REQUESTS_AND_TAILS
        },
        Plant::AnsweredUncommitted | Plant::TableNotRebuilt => Scope {
            plant: Some(plant),
            ..REQUESTS
        },
        Plant::UnknownOpening | Plant::ForgedPromise => scope,
    }
}

#[test]
fn every_planted_bug_is_found() {
    for plant in <Plant as clap::ValueEnum>::value_variants() {
        let begun = Instant::now();
        let checker = with_plant(*plant).checker().threads(2).spawn_bfs().join();
        let found = checker.discovery(RULE);
        println!(
            "{plant:?}: {} states, {:.1} s, {}",
            checker.unique_state_count(),
            begun.elapsed().as_secs_f64(),
            found.clone().map_or_else(
                || "NOT FOUND".into(),
                |path| {
                    let broken = path.last_state().broken();
                    format!("{broken:?} after {} steps", path.into_actions().len())
                }
            )
        );
        assert!(found.is_some(), "{plant:?} is not found");
    }
}
