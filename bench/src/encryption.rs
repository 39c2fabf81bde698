//! What encryption costs: two volumes of one node, one of them encrypted, under the same loads in turn.
//!
//! Each turn is on volumes of its own, so that every log begins empty and none is overrun.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::failure::{Context, Failure, Result};
use crate::fio::Load;
use crate::node::{Node, VolumeOptions};
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
/// Durable random writes keep at least this part of what they reach plain.
const RATIO_MIN: f64 = 0.7;

/// How it runs.
#[derive(Args, Debug)]
pub struct Options {
    /// The program.
    #[arg(long, default_value = "target/release/hdcs")]
    hdcs: PathBuf,
    /// Where the data lies meanwhile, about 5 GB.
    #[arg(long, default_value = "target/bench-data")]
    data: PathBuf,
    /// Where results go.
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
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
}

/// One load on both.
#[derive(Clone, Copy, Debug, Serialize)]
struct Pair {
    plain: Turn,
    encrypted: Turn,
}

#[derive(Debug, Serialize)]
struct Row {
    load: &'static str,
    pairs: Vec<Pair>,
    /// Requests a second, encrypted by plain.
    ratio: f64,
    /// The server's processor time for a request, encrypted less plain, in microseconds.
    more_cpu_us: f64,
}

fn loads() -> [(&'static str, Load); 3] {
    let random = |rw, span| Load {
        depth: 32,
        ..Load::random(rw, span)
    };
    let write = |load| Load {
        bytes_max: Some(WRITTEN_BYTES_MAX),
        seconds: Some(SECONDS_MAX),
        ..load
    };
    [
        (
            "durable 4k randwrite QD32",
            write(random("randwrite", DISK_BYTES)),
        ),
        (
            "durable 4k randwrite QD1",
            write(Load {
                seconds: Some(READ_SECONDS),
                ..Load::random("randwrite", DISK_BYTES)
            }),
        ),
        (
            "4k randread QD32, SSD tier",
            Load {
                seconds: Some(READ_SECONDS),
                ..random("randread", READ_SPAN_BYTES)
            },
        ),
    ]
}

/// Measure it.
pub fn run(options: &Options) -> Result<()> {
    fs::create_dir_all(&options.data).context(options.data.display())?;
    let scratch = tempfile::Builder::new()
        .prefix("encryption-")
        .tempdir_in(&options.data)
        .context(options.data.display())?;
    let directory = std::path::absolute(scratch.path()).context("scratch directory")?;
    let results = Directory::create(&options.results)?;
    let key = directory.join("key");
    fs::write(&key, "5c".repeat(32)).context(key.display())?;
    let node = Node::start(&options.hdcs, &directory.join("node"), Some(CONFIG))?;
    let mut rows = Vec::new();
    for (load, job) in loads() {
        let mut pairs = Vec::new();
        for repetition in 0..options.repeat {
            let name = format!("{}-{repetition}", job.rw);
            let turn = |key| turn(&node, &name, &job, key, &results);
            // The second one finds the device as the first one left it: they take turns.
            let pair = if repetition.is_multiple_of(2) {
                let plain = turn(None)?;
                let encrypted = turn(Some(&*key))?;
                Pair { plain, encrypted }
            } else {
                let encrypted = turn(Some(&*key))?;
                let plain = turn(None)?;
                Pair { plain, encrypted }
            };
            pairs.push(pair);
        }
        let ratios = pairs
            .iter()
            .map(|pair| pair.encrypted.iops / pair.plain.iops);
        let more = |pair: &Pair| pair.encrypted.server_cpu_us - pair.plain.server_cpu_us;
        rows.push(Row {
            load,
            ratio: median(ratios.collect()),
            more_cpu_us: median(pairs.iter().map(more).collect()),
            pairs,
        });
    }
    node.stop()?;
    let lines: Vec<String> = rows.iter().map(line).collect();
    results.report(&lines.join("\n"), &rows)?;
    match rows.first() {
        Some(first) if first.ratio < RATIO_MIN => Err(Failure::new(format!(
            "encrypted writes reach {:.2} of plain ones, and should reach {RATIO_MIN}",
            first.ratio
        ))),
        _ => Ok(()),
    }
}

/// One load on a new volume.
fn turn(
    node: &Node,
    name: &str,
    load: &Load,
    key: Option<&Path>,
    results: &Directory,
) -> Result<Turn> {
    let kind = if key.is_some() { "encrypted" } else { "plain" };
    let volume = format!("{kind}-{name}");
    node.create_with(
        &VolumeOptions {
            name: volume.clone(),
            bytes: DISK_BYTES,
            log_bytes: LOG_BYTES,
            persist: "on-write",
            backend: None,
        },
        key,
    )?;
    let target = node.target(&volume);
    if load.rw == "randread" {
        Load::fill(READ_SPAN_BYTES).run(&target, &results.raw(&format!("{volume}-fill")))?;
        node.flush(&volume)?;
        node.command(&["volume", "evict", &volume])?;
        let length = READ_SPAN_BYTES.to_string();
        node.command(&["volume", "promote", &volume, "--length", &length])?;
    }
    let before = node.usage()?;
    let outcome = load.run(&target, &results.raw(&volume))?;
    let cpu_us = node.usage()?.cpu_us - before.cpu_us;
    node.discard(&volume)?;
    Ok(Turn {
        iops: outcome.iops,
        p50_us: outcome.latency.p50,
        p99_us: outcome.latency.p99,
        server_cpu_us: cpu_us / outcome.requests as f64,
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn line(row: &Row) -> String {
    let of = |pick: fn(&Pair) -> f64| median(row.pairs.iter().map(pick).collect());
    format!(
        "{:<28} plain {:>7.0} IOPS, p99 {:>6.0} µs, {:>5.1} µs CPU | encrypted {:>7.0} IOPS, p99 {:>6.0} µs, \
         {:>5.1} µs CPU | {:.2}, {:+.1} µs",
        row.load,
        of(|pair| pair.plain.iops),
        of(|pair| pair.plain.p99_us),
        of(|pair| pair.plain.server_cpu_us),
        of(|pair| pair.encrypted.iops),
        of(|pair| pair.encrypted.p99_us),
        of(|pair| pair.encrypted.server_cpu_us),
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
