//! `hdcs-bench volumes`: 64k random writes to one volume, and to four at once. What saturates is
//! beside it.

use std::fmt::Write as _;

use serde::Serialize;

use super::usage::{Meter, Usage};
use super::{DISK_BYTES, Neighbours, Options};
use crate::bars::{Bar, list, median};
use crate::failure::Result;
use crate::fio::Load;
use crate::performance;
use crate::results::Directory;

/// Volumes of the larger run.
const VOLUMES: u32 = 4;
/// Depths: one request under way says how a volume waits, sixteen how much it can.
const DEPTHS: [u32; 3] = [1, 4, 16];

/// One run.
#[derive(Debug, Serialize)]
struct Sample {
    volumes: u32,
    depth: u32,
    repetition: u32,
    mb_s: f64,
    p99_us: f64,
    usage: Usage,
}

/// Everything that was found.
#[derive(Debug, Default, Serialize)]
struct Findings {
    samples: Vec<Sample>,
}

/// Run it.
pub fn run(options: &Options) -> Result<()> {
    let results = Directory::create(&options.places.results)?;
    let mut neighbours = Neighbours::up(options, VOLUMES, &results)?;
    let mut findings = Findings::default();
    for repetition in 0..options.repetitions() {
        for depth in DEPTHS {
            for volumes in [1, VOLUMES] {
                let load = |volume: u32| Load {
                    block_bytes: 64 << 10,
                    depth,
                    seconds: Some(options.seconds()),
                    seed: u64::from(volume + 1),
                    ..Load::random("randwrite", DISK_BYTES)
                };
                let loads: Vec<_> = (0..volumes).map(|volume| (volume, load(volume))).collect();
                let before = Meter::read(neighbours.node.pid(), neighbours.lab.directory())?;
                let outcomes = neighbours.together(&format!("{volumes}-depth{depth}"), loads)?;
                let usage = before.until(&Meter::read(
                    neighbours.node.pid(),
                    neighbours.lab.directory(),
                )?);
                let sample = Sample {
                    volumes,
                    depth,
                    repetition,
                    mb_s: outcomes.iter().map(|one| one.iops).sum::<f64>() * 65536.0 / 1e6,
                    p99_us: median(outcomes.iter().map(|one| one.latency.p99)),
                    usage,
                };
                eprintln!("bench: {sample:?}");
                findings.samples.push(sample);
                neighbours.settle(VOLUMES)?;
            }
        }
    }
    neighbours.node.stop()?;
    options.conclude(
        performance::VOLUMES,
        &results,
        &render(&findings),
        &findings,
    )
}

fn render(findings: &Findings) -> String {
    let of = |volumes: u32, depth: u32, value: fn(&Sample) -> f64| {
        let samples = findings.samples.iter();
        median(
            samples
                .filter(|sample| (sample.volumes, sample.depth) == (volumes, depth))
                .map(value),
        )
    };
    let mut out = String::from("64k random write, persist on-write (medians)\n");
    let _ = writeln!(
        out,
        "  {:<10} {:>6} {:>8} {:>8} {:>7} {:>11} {:>8} {:>12}",
        "volumes", "depth", "MB/s", "p99 µs", "shard", "processors", "device", "device MB/s"
    );
    for depth in DEPTHS {
        for volumes in [1, VOLUMES] {
            let _ = writeln!(
                out,
                "  {volumes:<10} {depth:>6} {:>8.0} {:>8.0} {:>6.0}% {:>10.0}% {:>7.0}% {:>12.0}",
                of(volumes, depth, |s| s.mb_s),
                of(volumes, depth, |s| s.p99_us),
                of(volumes, depth, |s| s.usage.shard * 100.0),
                of(volumes, depth, |s| s.usage.processors * 100.0),
                of(volumes, depth, |s| s.usage.device * 100.0),
                of(volumes, depth, |s| s.usage.device_mb_s),
            );
        }
    }
    let bars: Vec<Bar> = DEPTHS
        .into_iter()
        .map(|depth| {
            let mb_s = |volumes| of(volumes, depth, |s| s.mb_s);
            Bar::at_least(
                format!("{VOLUMES} volumes / 1, depth {depth} each, MB/s"),
                Some(mb_s(VOLUMES) / mb_s(1)),
                1.5,
                None,
            )
        })
        .collect();
    out.push('\n');
    list(
        &mut out,
        "What it must reach, unless a processor or the device is saturated",
        &bars,
    );
    out
}
