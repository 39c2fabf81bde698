//! What encryption and compression of the log cost: volumes of one node, some of them encrypted, some compressed,
//! under the same loads in turn.
//!
//! Each turn is on volumes of its own, so that every log begins empty and none is overrun.

use std::fs;
use std::path::Path;

use clap::Args;
use serde::Serialize;

use crate::failure::{Context, Failure, Result};
use crate::fio::Load;
use crate::lab::Lab;
use crate::node::{Node, VolumeOptions};
use crate::options::Places;
use crate::results::Directory;

/// The volumes.
const DISK_BYTES: u64 = 1 << 30;
/// Room for what a turn writes.
const LOG_BYTES: u64 = 1 << 30;
/// What a turn writes at most.
const WRITTEN_BYTES_MAX: u64 = 512 << 20;
/// A turn of writes that takes longer is cut off.
const SECONDS_MAX: u32 = 20;
/// A turn of reads.
const READ_SECONDS: u32 = 6;
/// The range of reads: more than the DRAM tier has, less than the SSD tier.
const READ_SPAN_BYTES: u64 = 512 << 20;
/// No destage beside the turns, little DRAM, nothing read ahead.
const CONFIG: &str = "memory_max_mib = 384\nlog_size_mib = 1024\ncache_total_size_mib = 2048\n\
                      destage_age_max_ms = 86400000\ndirty_ratio_min = 80\ndirty_ratio_max = 90\n";
/// Durable random writes at depth keep at least this part of what they reach plain.
const RATIO_MIN: f64 = 0.7;

/// How it runs.
#[derive(Args, Debug)]
pub struct Options {
    #[command(flatten)]
    places: Places,
    /// Turns of each; the median of their ratios counts.
    #[arg(long, default_value_t = 3)]
    repeat: u32,
}

/// One load on one volume.
#[derive(Clone, Copy, Debug, Serialize)]
struct Turn {
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    server_cpu_us: f64,
    /// What the log stores of its data.
    stored: f64,
}

/// What a volume is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Kind {
    Plain,
    Encrypted,
    Lz4,
    EncryptedLz4,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Encrypted => "encrypted",
            Self::Lz4 => "lz4",
            Self::EncryptedLz4 => "encrypted-lz4",
        }
    }

    fn is_encrypted(self) -> bool {
        matches!(self, Self::Encrypted | Self::EncryptedLz4)
    }

    fn is_compressed(self) -> bool {
        matches!(self, Self::Lz4 | Self::EncryptedLz4)
    }
}

/// One load, on volumes of these kinds, the first of which is what the others are compared with.
struct Comparison {
    load: &'static str,
    job: Load,
    /// Percent of the data that compression takes away, if that matters.
    compressible: Option<u32>,
    kinds: &'static [Kind],
    /// Whether a ratio that is too low is a failure.
    counts: bool,
}

/// What one kind of volume reached.
#[derive(Debug, Serialize)]
struct Row {
    load: &'static str,
    kind: Kind,
    counts: bool,
    turns: Vec<Turn>,
    /// Requests a second, by those of the plain one.
    ratio: f64,
    /// The server's processor time for a request, less that of the plain one, in microseconds.
    more_cpu_us: f64,
}

fn comparisons() -> Vec<Comparison> {
    let random = |rw, span| Load {
        depth: 32,
        ..Load::random(rw, span)
    };
    let write = |load| Load {
        bytes_max: Some(WRITTEN_BYTES_MAX),
        seconds: Some(SECONDS_MAX),
        ..load
    };
    let both: &[Kind] = &[Kind::Plain, Kind::Encrypted];
    let all: &[Kind] = &[Kind::Plain, Kind::Encrypted, Kind::Lz4, Kind::EncryptedLz4];
    let deep = write(random("randwrite", DISK_BYTES));
    let single = write(Load {
        seconds: Some(READ_SECONDS),
        ..Load::random("randwrite", DISK_BYTES)
    });
    let reads = Load {
        seconds: Some(READ_SECONDS),
        ..random("randread", READ_SPAN_BYTES)
    };
    let compare = |load, job: &Load, compressible, kinds| Comparison {
        load,
        job: job.clone(),
        compressible,
        kinds,
        counts: job.depth > 1 && job.rw == "randwrite",
    };
    vec![
        compare("durable 4k randwrite QD32", &deep, None, both),
        compare("the same, 50 % compressible", &deep, Some(50), all),
        compare("the same, incompressible", &deep, Some(0), all),
        compare("durable 4k randwrite QD1", &single, None, both),
        compare("4k randread QD32, SSD tier", &reads, None, both),
    ]
}

/// Measure it.
pub fn run(options: &Options) -> Result<()> {
    let places = &options.places;
    let lab = Lab::new(places)?;
    let results = Directory::create(&places.results)?;
    let key = lab.path("key");
    fs::write(&key, "5c".repeat(32)).context(key.display())?;
    let node = lab.node("node", Some(CONFIG))?;
    let mut rows: Vec<Row> = Vec::new();
    for comparison in comparisons() {
        let (load, kinds) = (comparison.load, comparison.kinds);
        let mut turns = vec![Vec::new(); kinds.len()];
        for repetition in 0..options.repeat {
            // One finds the device as the one before left it: they take turns.
            for index in 0..kinds.len() {
                let index = (index + repetition as usize) % kinds.len();
                let name = format!("{}-{}-{repetition}", kinds[index].name(), rows.len());
                let turn = turn(&node, &name, &comparison, kinds[index], &key, &results)?;
                turns[index].push(turn);
            }
        }
        let plain = turns[0].clone();
        for (&kind, turns) in kinds.iter().zip(turns) {
            let pairs = || turns.iter().zip(&plain);
            rows.push(Row {
                load,
                kind,
                counts: comparison.counts,
                ratio: median(pairs().map(|(one, plain)| one.iops / plain.iops).collect()),
                more_cpu_us: median(
                    pairs()
                        .map(|(one, plain)| one.server_cpu_us - plain.server_cpu_us)
                        .collect(),
                ),
                turns,
            });
        }
    }
    node.stop()?;
    let lines: Vec<String> = rows.iter().map(line).collect();
    results.report(&lines.join("\n"), &rows)?;
    let slow = rows.iter().find(|row| row.counts && row.ratio < RATIO_MIN);
    match slow {
        Some(row) => Err(Failure::new(format!(
            "{}: {} volumes reach {:.2} of plain ones, and should reach {RATIO_MIN}",
            row.load,
            row.kind.name(),
            row.ratio
        ))),
        None => Ok(()),
    }
}

/// One load on a new volume.
fn turn(
    node: &Node,
    volume: &str,
    comparison: &Comparison,
    kind: Kind,
    key: &Path,
    results: &Directory,
) -> Result<Turn> {
    let load = &comparison.job;
    node.create_with(
        &VolumeOptions {
            name: volume.to_owned(),
            bytes: DISK_BYTES,
            log_bytes: LOG_BYTES,
            persist: "on-write",
            backend: None,
        },
        kind.is_encrypted().then_some(key),
    )?;
    if kind.is_compressed() {
        node.command(&["volume", "set", volume, "compression=lz4"])?;
    }
    let target = node.target(volume);
    if load.rw == "randread" {
        Load::fill(READ_SPAN_BYTES).run(&target, &results.raw(&format!("{volume}-fill")))?;
        node.flush(volume)?;
        node.command(&["volume", "evict", volume])?;
        let length = READ_SPAN_BYTES.to_string();
        node.command(&["volume", "promote", volume, "--length", &length])?;
    }
    let data = comparison.compressible.map(|percent| {
        // Data anew for each request, else fio repeats what does not repeat itself in a block.
        vec![
            "--refill_buffers".to_owned(),
            format!("--buffer_compress_percentage={percent}"),
        ]
    });
    let before = node.usage()?;
    let outcome = load.run_with(&target, &results.raw(volume), &data.unwrap_or_default())?;
    let cpu_us = node.usage()?.cpu_us - before.cpu_us;
    let counters = &node.show(volume)?["counters"];
    let bytes = |key: &str| counters[key].as_f64().unwrap_or(0.0);
    let stored = bytes("log_stored_bytes") / bytes("log_plain_bytes").max(1.0);
    node.discard(volume)?;
    Ok(Turn {
        iops: outcome.iops,
        p50_us: outcome.latency.p50,
        p99_us: outcome.latency.p99,
        server_cpu_us: cpu_us / outcome.requests as f64,
        stored,
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn line(row: &Row) -> String {
    let of = |pick: fn(&Turn) -> f64| median(row.turns.iter().map(pick).collect());
    format!(
        "{:<28} {:<14} {:>7.0} IOPS, p99 {:>6.0} µs, {:>5.1} µs CPU, stored {:>3.0} % | {:.2}, {:+.1} µs",
        row.load,
        row.kind.name(),
        of(|turn| turn.iops),
        of(|turn| turn.p99_us),
        of(|turn| turn.server_cpu_us),
        of(|turn| turn.stored * 100.0),
        row.ratio,
        row.more_cpu_us
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]).to_bits(), 2.0f64.to_bits());
        assert_eq!(median(Vec::new()).to_bits(), 0.0f64.to_bits());
    }
}
