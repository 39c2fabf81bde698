//! `hdcs-model`: explore a scope, and print the shortest way to a violation.

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use hdcs_core::replication::record::AckLevel;
use hdcs_model::plant::Plant;
use hdcs_model::world::{NODES, RULE, Scope};
use stateright::{Checker, Model};

/// Everything that may happen to the members of a replicated log.
#[derive(Parser)]
struct Options {
    /// How many copies a write has before it is acknowledged.
    #[arg(long, value_enum, default_value = "majority")]
    ack: Ack,
    /// Nodes that are members at the beginning; the others are to join.
    #[arg(long, default_value_t = NODES)]
    members: usize,
    /// Spans that are appended.
    #[arg(long, default_value_t = 4)]
    spans: u64,
    /// Spans under way at once.
    #[arg(long, default_value_t = 2)]
    window: u64,
    /// Nodes whose writes take time, by comma.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2")]
    slow: Vec<usize>,
    /// No write takes time.
    #[arg(long)]
    at_once: bool,
    /// Crashes.
    #[arg(long, default_value_t = 1)]
    crashes: u8,
    /// Takeovers that begin.
    #[arg(long, default_value_t = 1)]
    takings: u8,
    /// Members that miss a deadline.
    #[arg(long, default_value_t = 0)]
    suspicions: u8,
    /// Links that break.
    #[arg(long, default_value_t = 0)]
    breaks: u8,
    /// Tails that move.
    #[arg(long, default_value_t = 0)]
    tails: u8,
    /// Media that are lost.
    #[arg(long, default_value_t = 0)]
    losses: u8,
    /// Changes of the record that are asked for again.
    #[arg(long, default_value_t = 0)]
    retries: u8,
    /// Times that the joiners are named anew.
    #[arg(long, default_value_t = 0)]
    namings: u8,
    /// Times that the group is asked to be another one: with two or three copies, at `majority` or `all`.
    #[arg(long, default_value_t = 0)]
    configurations: u8,
    /// Openings that a primary raises.
    #[arg(long, default_value_t = 0)]
    openings: u8,
    /// Copies that are read back and are not whole.
    #[arg(long, default_value_t = 0)]
    rots: u8,
    /// Blocks of the ring of each copy.
    #[arg(long, default_value_t = 1 << 16)]
    ring_blocks: u64,
    /// Spans that are sealed together.
    #[arg(long, default_value_t = 1)]
    burst: u64,
    /// Requests of a client, one in each span.
    #[arg(long, default_value_t = 0)]
    requests: u8,
    /// A bug to find.
    #[arg(long, value_enum)]
    plant: Option<Plant>,
    /// Stop after so many states.
    #[arg(long)]
    states: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Ack {
    One,
    Majority,
    All,
}

/// What the group may be asked to be.
const SHAPES: &[(u16, AckLevel)] = &[
    (2, AckLevel::Majority),
    (3, AckLevel::Majority),
    (2, AckLevel::All),
    (3, AckLevel::All),
];

fn main() -> ExitCode {
    let options = Options::parse();
    let scope = Scope {
        ack: match options.ack {
            Ack::One => AckLevel::One,
            Ack::Majority => AckLevel::Majority,
            Ack::All => AckLevel::All,
        },
        members: options.members.clamp(1, NODES),
        spans: options.spans,
        slow: std::array::from_fn(|node| !options.at_once && options.slow.contains(&node)),
        window: options.window,
        crashes: options.crashes,
        crashing: [true; NODES],
        takings: options.takings,
        candidates: [true; NODES],
        suspicions: options.suspicions,
        breaks: options.breaks,
        tails: options.tails,
        losses: options.losses,
        retries: options.retries,
        namings: options.namings,
        configurations: options.configurations,
        shapes: SHAPES,
        openings: options.openings,
        rots: options.rots,
        ring_blocks: options.ring_blocks,
        burst: options.burst,
        requests: options.requests,
        unanswered: 0,
        plant: options.plant,
    };
    let begun = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut builder = scope.checker().threads(threads);
    if let Some(states) = options.states {
        builder = builder.target_state_count(states);
    }
    let checker = builder.spawn_bfs().join();
    println!(
        "{} states, at most {} steps, {:.1} s",
        checker.unique_state_count(),
        checker.max_depth(),
        begun.elapsed().as_secs_f64()
    );
    let Some(path) = checker.discovery(RULE) else {
        return ExitCode::SUCCESS;
    };
    println!("{:?} after", path.last_state().broken());
    for act in path.into_actions() {
        println!("  {act:?}");
    }
    ExitCode::FAILURE
}
