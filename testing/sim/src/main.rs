//! `hdcs-sim`: run seeds through the simulator.
//!
//! Exit status: 0 when every run held, 1 when one broke a rule, 2 for misuse.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use hdcs_sim::outcome::{self, Outcome};
use hdcs_sim::{cluster, home, objects, plant, ranges, run, world};

/// What is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A node: volumes, log, cache and backend.
    Node,
    /// A node with local stores and object volumes below its volumes.
    Stack,
    /// A volume over an object store.
    Objects,
    /// A local store alone.
    Home,
    /// Long ranges on a large volume.
    Ranges,
    /// Nodes with copies of one log.
    Cluster,
}

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
    /// Which world: a node, one with local stores and object volumes, a volume over an object store, a local store alone, long ranges, or a cluster.
    #[arg(long, default_value = "node")]
    world: Kind,
    /// Plant a bug: every seed that survives it is one that the checkers missed.
    #[arg(long)]
    plant: Option<String>,
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

/// How to run a seed in either world.
#[derive(Clone, Copy)]
struct Options<'a> {
    world: Kind,
    verbose: bool,
    plant: Option<&'a str>,
    crash_at: Option<u64>,
}

impl Options<'_> {
    /// The same in a world with bugs of kind `P`.
    fn of<P: ValueEnum>(self) -> outcome::Options<P> {
        let plant = self.plant.and_then(|name| P::from_str(name, true).ok());
        outcome::Options {
            verbose: self.verbose,
            plant,
            crash_at: self.crash_at,
        }
    }
}

/// What a set of runs saw.
#[derive(Default)]
struct Summary {
    runs: u64,
    failures: u64,
    node: world::Coverage,
    objects: objects::scenario::Coverage,
    home: home::Coverage,
    ranges: ranges::Coverage,
    cluster: cluster::Coverage,
}

impl Summary {
    /// Run a seed and add what it saw; the outcome has the number of its crashes.
    fn run(&mut self, seed: u64, options: Options<'_>) -> Outcome<u64> {
        self.runs += 1;
        let outcome = match options.world {
            Kind::Node => run::run(seed, options.of()).map(|saw| {
                self.node.add(&saw);
                saw.crashes
            }),
            Kind::Stack => run::run_stacked(seed, options.of()).map(|saw| {
                self.node.add(&saw);
                saw.crashes
            }),
            Kind::Objects => objects::run(seed, options.of()).map(|saw| {
                self.objects.add(&saw);
                u64::from(saw.cut)
            }),
            Kind::Home => home::run(seed, options.of()).map(|saw| {
                self.home.add(&saw);
                u64::from(saw.cut)
            }),
            Kind::Ranges => ranges::run(seed, options.of()).map(|saw| {
                self.ranges.add(&saw);
                0
            }),
            Kind::Cluster => cluster::run(seed, options.of()).map(|saw| {
                self.cluster.add(&saw);
                0
            }),
        };
        self.failures += u64::from(outcome.violation.is_some());
        outcome
    }
}

/// The names of the bugs that can be planted in a world.
fn plants(world: Kind) -> Vec<String> {
    fn names<T: ValueEnum>() -> Vec<String> {
        let values = T::value_variants().iter();
        let values = values.filter_map(ValueEnum::to_possible_value);
        values.map(|value| value.get_name().to_string()).collect()
    }
    match world {
        Kind::Node | Kind::Stack => names::<plant::Plant>(),
        Kind::Objects => names::<objects::plant::Plant>(),
        Kind::Home => names::<home::plant::Plant>(),
        Kind::Ranges => names::<ranges::Plant>(),
        Kind::Cluster => names::<cluster::Plant>(),
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let known = plants(arguments.world);
    if let Some(plant) = &arguments.plant
        && !known.contains(plant)
    {
        eprintln!(
            "no bug is called `{plant}` in this world; there are: {}",
            known.join(", ")
        );
        return ExitCode::from(2);
    }
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
    let Summary { runs, failures, .. } = summary;
    let coverage = match arguments.world {
        Kind::Node | Kind::Stack => summary.node.to_string(),
        Kind::Objects => summary.objects.to_string(),
        Kind::Home => summary.home.to_string(),
        Kind::Ranges => summary.ranges.to_string(),
        Kind::Cluster => summary.cluster.to_string(),
    };
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
        world: arguments.world,
        verbose: arguments.seed.is_some() && !arguments.quiet,
        plant: arguments.plant.as_deref(),
        crash_at: None,
    };
    if !arguments.every_step {
        return run_one(seed, options, summary).is_some();
    }
    if arguments.step.is_some() {
        options.crash_at = arguments.step;
        return run_one(seed, options, summary).is_some();
    }
    options.verbose = false;
    for step in 0.. {
        options.crash_at = Some(step);
        match run_one(seed, options, summary) {
            None => return false,
            Some(0) => break,
            Some(_) => {}
        }
    }
    true
}

/// Run one seed; how many crashes it had, or `None` if it failed.
fn run_one(seed: u64, options: Options<'_>, summary: &mut Summary) -> Option<u64> {
    if options.verbose {
        println!("seed {seed}");
    }
    let outcome = summary.run(seed, options);
    if let Some(violation) = &outcome.violation {
        if !options.verbose {
            for line in &outcome.tail[outcome.tail.len().saturating_sub(25)..] {
                println!("{line}");
            }
        }
        let world = match options.world {
            Kind::Node => "",
            Kind::Stack => " --world stack",
            Kind::Objects => " --world objects",
            Kind::Home => " --world home",
            Kind::Ranges => " --world ranges",
            Kind::Cluster => " --world cluster",
        };
        let plant = options.plant.map(|plant| format!(" --plant {plant}"));
        let step = options
            .crash_at
            .map(|step| format!(" --every-step --step {step}"));
        println!("seed {seed} failed: {violation}");
        println!(
            "replay: hdcs-sim{world} --seed {seed}{}{}",
            plant.unwrap_or_default(),
            step.unwrap_or_default()
        );
    }
    if options.verbose {
        println!("trace hash {:016x}", outcome.trace_hash);
    }
    outcome.violation.is_none().then_some(outcome.coverage)
}
