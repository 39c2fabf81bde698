//! `hdcs-sim`: run seeds through the simulator.
//!
//! Exit status: 0 when every run held, 1 when one broke a rule, 2 for misuse.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use hdcs_sim::plant::Plant;
use hdcs_sim::run::{Options, Outcome, run};
use hdcs_sim::world::Coverage;

/// Run the core in simulated worlds, one for each seed.
#[derive(Debug, Parser)]
#[command(name = "hdcs-sim", version, about)]
struct Arguments {
    /// Seeds to run: `N` for 0..N, or `A..B`.
    #[arg(long, value_parser = parse_seeds, default_value = "1000")]
    seeds: (u64, u64),
    /// Stop after so many seconds, wherever that is.
    #[arg(long, value_name = "SECONDS")]
    time: Option<u64>,
    /// Replay one seed and print everything that happens.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Plant a bug: every seed that survives it is one that the checkers missed.
    #[arg(long)]
    plant: Option<Plant>,
    /// Run a short variant of each seed once for every step of it, with power cut at that step.
    #[arg(long)]
    every_step: bool,
    /// With --every-step and --seed: only the crash at this step.
    #[arg(long, requires = "every_step", requires = "seed")]
    step: Option<u64>,
    /// With --seed: do not print the trace.
    #[arg(long)]
    quiet: bool,
    /// Go on after a failure, and count.
    #[arg(long)]
    keep_going: bool,
}

fn parse_seeds(text: &str) -> Result<(u64, u64), String> {
    let number = |part: &str| {
        part.parse::<u64>()
            .map_err(|_| format!("`{text}` is neither a number nor `A..B`"))
    };
    match text.split_once("..") {
        Some((from, to)) => Ok((number(from)?, number(to)?)),
        None => Ok((0, number(text)?)),
    }
}

/// What a set of runs saw.
#[derive(Default)]
struct Summary {
    runs: u64,
    failures: u64,
    coverage: Coverage,
}

impl Summary {
    fn add(&mut self, outcome: &Outcome) {
        self.runs += 1;
        self.failures += u64::from(outcome.violation.is_some());
        self.coverage.add(&outcome.coverage);
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // A panic is a finding like any other; it is reported with its seed.
    std::panic::set_hook(Box::new(|panic| {
        if let Some(place) = panic.location() {
            eprintln!("assertion at {place}");
        }
    }));
    let started = Instant::now();
    let deadline = arguments
        .time
        .map(|seconds| started + Duration::from_secs(seconds));
    let (from, to) = arguments
        .seed
        .map_or(arguments.seeds, |seed| (seed, seed + 1));
    let mut summary = Summary::default();
    let mut shown = Instant::now();
    for seed in from..to {
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            break;
        }
        if !run_seed(&arguments, seed, &mut summary) && !arguments.keep_going {
            break;
        }
        if std::io::stderr().is_terminal() && shown.elapsed() > Duration::from_millis(500) {
            shown = Instant::now();
            eprint!(
                "\rseed {seed}, {} runs, {} failed ",
                summary.runs, summary.failures
            );
            let _ = std::io::stderr().flush();
        }
    }
    let Summary {
        runs,
        failures,
        coverage,
    } = summary;
    println!(
        "{runs} runs in {:.1} s, {failures} failed: {coverage}",
        started.elapsed().as_secs_f64()
    );
    // Under a planted bug a failure is what is wanted.
    ExitCode::from(u8::from(failures > 0))
}

/// Run one seed, in every variant that was asked for; false if one failed.
fn run_seed(arguments: &Arguments, seed: u64, summary: &mut Summary) -> bool {
    let mut options = Options {
        verbose: arguments.seed.is_some() && !arguments.quiet,
        plant: arguments.plant,
        crash_at: None,
    };
    if !arguments.every_step {
        return run_one(seed, options, summary);
    }
    if arguments.step.is_some() {
        options.crash_at = arguments.step;
        return run_one(seed, options, summary);
    }
    options.verbose = false;
    for step in 0.. {
        options.crash_at = Some(step);
        let crashes = summary.coverage.crashes;
        if !run_one(seed, options, summary) {
            return false;
        }
        if summary.coverage.crashes == crashes {
            break;
        }
    }
    true
}

fn run_one(seed: u64, options: Options, summary: &mut Summary) -> bool {
    if options.verbose {
        println!("seed {seed}");
    }
    let outcome = run(seed, options);
    summary.add(&outcome);
    if let Some(violation) = &outcome.violation {
        if !options.verbose {
            for line in &outcome.tail[outcome.tail.len().saturating_sub(25)..] {
                println!("{line}");
            }
        }
        let plant = options.plant.and_then(|plant| {
            use clap::ValueEnum;
            Some(format!(
                " --plant {}",
                plant.to_possible_value()?.get_name()
            ))
        });
        let step = options
            .crash_at
            .map(|step| format!(" --every-step --step {step}"));
        println!("seed {seed} failed: {violation}");
        println!(
            "replay: hdcs-sim --seed {seed}{}{}",
            plant.unwrap_or_default(),
            step.unwrap_or_default()
        );
    }
    if options.verbose {
        println!(
            "trace hash {:016x}, {}",
            outcome.trace_hash, outcome.coverage
        );
    }
    outcome.violation.is_none()
}
