//! `hdcs-bench guide`: which mode and policy for which load, measured.
//!
//! Each load runs under each arrangement, before the same backend: a file that answers after
//! [`DELAY_US`] and takes [`RATE_MIB`] a second, as a store across a network does. A volume is made for
//! each run, with an SSD tier that has not seen it. What a load does not do itself (writing what it
//! reads back, reading once what is to be hot) is done before it and not counted.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, mem};

use clap::Args;
use serde::Serialize;

use crate::failure::{Context, Result};
use crate::fio::{Load, Outcome, Target};
use crate::node::Node;
use crate::options::Places;
use crate::plot::{self, Panel, PanelBar, thousands};
use crate::results::Directory;

/// How long the backend takes.
const DELAY_US: u32 = 1000;
/// What it takes a second.
const RATE_MIB: u32 = 80;
const MIB: u64 = 1 << 20;
const VOLUME: &str = "v";

/// What to measure.
#[derive(Args, Debug)]
pub struct Options {
    /// Short runs: to see that everything works, not to measure.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    places: Places,
}

/// A mode and a policy.
#[derive(Clone, Copy, Debug)]
struct Arrangement {
    name: &'static str,
    colour: &'static str,
    create: [&'static str; 2],
}

/// Cache mode under a policy.
const fn policy(name: &'static str, colour: &'static str) -> Arrangement {
    Arrangement {
        name,
        colour,
        create: ["--policy", name],
    }
}

const ARRANGEMENTS: [Arrangement; 5] = [
    policy("write-back", "#1565c0"),
    policy("write-through", "#2e9e5b"),
    policy("write-around", "#c8a25a"),
    policy("pass-through", "#999999"),
    Arrangement {
        name: "storage mode",
        colour: "#7b1fa2",
        create: ["--mode", "storage"],
    },
];

/// A load, and what is to be seen of it.
#[derive(Clone, Debug)]
struct Work {
    name: &'static str,
    title: &'static str,
    /// What goes before it.
    before: Vec<Load>,
    load: Load,
    /// Whether what it moves tells more than how often.
    in_bytes: bool,
}

/// One load under one arrangement.
#[derive(Debug, Serialize)]
struct Finding {
    work: &'static str,
    arrangement: &'static str,
    iops: f64,
    mib_s: f64,
    p50_us: f64,
    p99_us: f64,
    p9999_us: f64,
    sync_mean_us: Option<f64>,
}

/// Sizes of a run.
struct Scale {
    disk: u64,
    log: u64,
    seconds: u32,
}

fn works(scale: &Scale) -> Vec<Work> {
    let (disk, seconds) = (scale.disk, Some(scale.seconds));
    let hot = disk / 8;
    let small = |rw, span| Load {
        depth: 16,
        seconds,
        ..Load::random(rw, span)
    };
    let large = |rw| Load {
        block_bytes: MIB,
        depth: 4,
        seconds: Some(scale.seconds * 4),
        bytes_max: Some(disk / 2),
        ..Load::random(rw, disk / 2)
    };
    let work = |name, title, load| Work {
        name,
        title,
        before: Vec::new(),
        load,
        in_bytes: false,
    };
    vec![
        work(
            "commits",
            "Commits of a database: 4k writes, a sync after each",
            Load {
                depth: 1,
                fsync_every: Some(1),
                zipf: Some(1.1),
                ..small("randwrite", hot)
            },
        ),
        work(
            "burst",
            "A burst that the log holds: 4k random writes, depth 16",
            Load {
                bytes_max: Some(scale.log / 2),
                ..small("randwrite", disk)
            },
        ),
        work(
            "long",
            "Writes for long: four times the log, 4k random, depth 16",
            Load {
                bytes_max: Some(scale.log * 4),
                seconds: Some(scale.seconds * 8),
                ..small("randwrite", disk)
            },
        ),
        Work {
            in_bytes: true,
            ..work(
                "stream",
                "A stream that is written once: 1M, depth 4",
                large("write"),
            )
        },
        Work {
            before: vec![Load::fill(hot)],
            ..work(
                "read-back",
                "Reading what was just written: 4k random, depth 16",
                small("randread", hot),
            )
        },
        Work {
            before: vec![Load {
                zipf: Some(1.2),
                ..small("randread", disk)
            }],
            ..work(
                "hot",
                "Reading a hot set again: 4k, zipf 1.2, depth 16",
                Load {
                    zipf: Some(1.2),
                    ..small("randread", disk)
                },
            )
        },
        Work {
            in_bytes: true,
            ..work(
                "scan",
                "A scan that is read once: 1M, depth 4",
                large("read"),
            )
        },
    ]
}

fn measure(
    node: &Node,
    scale: &Scale,
    image: &Path,
    arrangement: Arrangement,
    work: &Work,
    raw: &Path,
) -> Result<Outcome> {
    let (size, log) = (scale.disk.to_string(), scale.log.to_string());
    let backend = format!(
        "file:{}?delay_us={DELAY_US}&rate_mib={RATE_MIB}",
        image.display()
    );
    let mut create = vec!["volume", "create", VOLUME, "--size", &size];
    create.extend(["--log-size", &log, "--persist", "on-write"]);
    create.extend(["--backend", &backend]);
    create.extend(arrangement.create);
    node.command(&create)?;
    let target = node.target(VOLUME);
    for load in &work.before {
        load.run(&target, raw)?;
    }
    let outcome = work.load.run(&target, raw)?;
    node.discard(VOLUME)?;
    Ok(outcome)
}

/// The picture of one load.
fn draw(work: &Work, findings: &[Finding], results: &Directory) -> Result<()> {
    let bars = |value: fn(&Finding) -> f64, label: fn(f64) -> String| {
        let bars = findings.iter().zip(ARRANGEMENTS);
        bars.map(|(finding, arrangement)| PanelBar {
            name: arrangement.name,
            colour: arrangement.colour,
            value: value(finding),
            label: label(value(finding)),
        })
        .collect()
    };
    let rate = if work.in_bytes {
        Panel {
            title: "MiB a second",
            bars: bars(|finding| finding.mib_s, |mib| format!("{mib:.0}")),
        }
    } else {
        Panel {
            title: "requests a second",
            bars: bars(|finding| finding.iops, thousands),
        }
    };
    let latency = Panel {
        title: "99 % were answered within",
        bars: bars(
            |finding| finding.p99_us / 1000.0,
            |ms| format!("{ms:.2} ms"),
        ),
    };
    plot::panels(
        Some(work.title),
        &[rate, latency],
        results,
        &format!("guide-{}", work.name),
    )
}

fn table(findings: &[Vec<Finding>], works: &[Work]) -> String {
    let mut text = format!(
        "Before a backend that answers after {} ms and takes {RATE_MIB} MiB a second.\n",
        DELAY_US / 1000
    );
    for (work, rows) in works.iter().zip(findings) {
        let _infallible = writeln!(
            text,
            "\n{}\n{:<16}{:>12}{:>10}{:>12}{:>12}{:>12}",
            work.title, "", "requests/s", "MiB/s", "p50 µs", "p99 µs", "p99.99 µs"
        );
        for row in rows {
            let _infallible = writeln!(
                text,
                "{:<16}{:>12.0}{:>10.1}{:>12.0}{:>12.0}{:>12.0}",
                row.arrangement, row.iops, row.mib_s, row.p50_us, row.p99_us, row.p9999_us
            );
        }
    }
    text
}

/// Run it.
pub fn run(options: &Options) -> Result<()> {
    let scale = if options.quick {
        Scale {
            disk: 64 * MIB,
            log: 16 * MIB,
            seconds: 1,
        }
    } else {
        Scale {
            disk: 1024 * MIB,
            log: 128 * MIB,
            seconds: 6,
        }
    };
    let results = Directory::create(&options.places.results)?;
    let scratch = options.places.data.join("guide");
    fs::create_dir_all(&scratch).context(scratch.display())?;
    let scratch_whole = fs::canonicalize(&scratch).context(scratch.display())?;
    let image = scratch_whole.join("image");
    Load::fill(scale.disk).run(&Target::File(image.clone()), &results.raw("fill"))?;
    let config = "memory_max_mib = 512\ncache_total_size_mib = 512\n";
    let node = Node::start(&options.places.hdcs, &scratch.join("node"), Some(config))?;
    let works = works(&scale);
    let mut findings = Vec::new();
    for work in &works {
        let mut rows = Vec::new();
        for arrangement in ARRANGEMENTS {
            let raw = results.raw(&format!("{}-{}", work.name, arrangement.name));
            let outcome = measure(&node, &scale, &image, arrangement, work, &raw)?;
            eprintln!(
                "bench: {:<10} {:<14} {:>8.0} a second",
                work.name, arrangement.name, outcome.iops
            );
            rows.push(Finding {
                work: work.name,
                arrangement: arrangement.name,
                iops: outcome.iops,
                mib_s: outcome.iops * work.load.block_bytes as f64 / MIB as f64,
                p50_us: outcome.latency.p50,
                p99_us: outcome.latency.p99,
                p9999_us: outcome.latency.p9999,
                sync_mean_us: outcome.sync_mean,
            });
        }
        draw(work, &rows, &results)?;
        findings.push(mem::take(&mut rows));
    }
    node.stop()?;
    fs::remove_dir_all(&scratch).context(scratch.display())?;
    results.report(&table(&findings, &works), &findings)
}
