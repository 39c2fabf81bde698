//! `hdcs-bench storage`: what random overwrites of a full volume in storage mode write to the device.
//!
//! The volume and its write log share a device nine to one. Every block is written once; then each load
//! overwrites twice the volume's size at random. What reached the device is counted twice: by the node (log,
//! home, map, checksums) and by the kernel (`write_bytes` of the process). The count ends when the log is empty again,
//! so that nothing is left to write.

use std::fmt::Write as _;
use std::{fs, thread, time::Duration};

use clap::Args;
use serde::Serialize;
use serde_json::Value;

use crate::failure::{Context, Failure, Result};
use crate::fio::{Latency, Load};
use crate::node::Node;
use crate::options::Places;
use crate::results::Directory;

/// What to measure.
#[derive(Args, Debug)]
pub struct Options {
    /// A small volume: to see that everything works, not to measure.
    #[arg(long)]
    quick: bool,
    /// Size of the volume in MiB.
    #[arg(long, default_value_t = 2304)]
    size_mib: u64,
    #[command(flatten)]
    places: Places,
}

/// What one load gave.
#[derive(Debug, Serialize)]
struct Finding {
    load: &'static str,
    client_bytes: u64,
    log_bytes: u64,
    home_bytes: u64,
    map_bytes: u64,
    checksum_bytes: u64,
    coalesced_bytes: u64,
    kernel_bytes: u64,
    iops: f64,
    latency: Latency,
    /// Slowest request, in milliseconds. No completion came for at most so long.
    slowest_ms: f64,
}

impl Finding {
    fn amplification(&self) -> f64 {
        let written = self.log_bytes + self.home_bytes + self.map_bytes + self.checksum_bytes;
        written as f64 / self.client_bytes as f64
    }
}

/// Bytes written by now.
struct Written {
    client: u64,
    log: u64,
    home: u64,
    map: u64,
    checksums: u64,
    coalesced: u64,
    kernel: u64,
}

/// Run it.
pub fn run(options: &Options) -> Result<()> {
    let bytes = if options.quick {
        288 << 20
    } else {
        options.size_mib << 20
    };
    let scratch = options.places.data.join("storage");
    fs::create_dir_all(&scratch).context(scratch.display())?;
    let results = Directory::create(&options.places.results)?;
    let config = "memory_max_mib = 1024\ncache_total_size_mib = 0\n";
    let node = Node::start(&options.places.hdcs, &scratch.join("node"), Some(config))?;
    let (size, log) = (bytes.to_string(), (bytes / 9).to_string());
    let image = format!(
        "file:{}",
        fs::canonicalize(&scratch)
            .context(scratch.display())?
            .join("image")
            .display()
    );
    node.command(&[
        "volume",
        "create",
        "v",
        "--mode",
        "storage",
        "--size",
        &size,
        "--log-size",
        &log,
        "--persist",
        "on-write",
        "--backend",
        &image,
    ])?;
    Load::fill(bytes).run(&node.target("v"), &results.raw("fill"))?;
    let mut findings = Vec::new();
    for (name, zipf, depth) in [
        ("random", None, 32),
        ("random, depth 1", None, 1),
        ("zipf 1.1", Some(1.1), 32),
    ] {
        settle(&node)?;
        let before = written(&node)?;
        let load = Load {
            depth,
            zipf,
            bytes_max: Some(if depth == 1 { bytes / 2 } else { bytes * 2 }),
            seconds: Some(600),
            ..Load::random("randwrite", bytes)
        };
        let outcome = load.run(
            &node.target("v"),
            &results.raw(&name.replace([' ', ','], "-")),
        )?;
        settle(&node)?;
        let after = written(&node)?;
        let slowest = outcome.histogram.iter().filter(|(_, count)| *count > 0);
        findings.push(Finding {
            load: name,
            client_bytes: after.client - before.client,
            log_bytes: after.log - before.log,
            home_bytes: after.home - before.home,
            map_bytes: after.map - before.map,
            checksum_bytes: after.checksums - before.checksums,
            coalesced_bytes: after.coalesced - before.coalesced,
            kernel_bytes: after.kernel - before.kernel,
            iops: outcome.iops,
            latency: outcome.latency,
            slowest_ms: slowest.map(|(ns, _)| *ns).max().unwrap_or(0) as f64 / 1e6,
        });
    }
    node.stop()?;
    fs::remove_dir_all(&scratch).context(scratch.display())?;
    results.report(&table(bytes, &findings), &findings)
}

/// Wait until the log is empty.
fn settle(node: &Node) -> Result<()> {
    node.command(&["volume", "set", "v", "destage_age_max_ms=1"])?;
    for _ in 0..6000 {
        if number(&node.show("v")?, "/counters/log_used_bytes")? == 0 {
            return node
                .command(&["volume", "set", "v", "destage_age_max_ms=default"])
                .map(drop);
        }
        thread::sleep(Duration::from_millis(50));
    }
    Err(Failure::new(
        "the log was not empty after five minutes".to_owned(),
    ))
}

fn written(node: &Node) -> Result<Written> {
    let volume = node.show("v")?;
    let path = format!("/proc/{}/io", node.pid());
    let io = fs::read_to_string(&path).context(&path)?;
    let kernel = io
        .lines()
        .find_map(|line| line.strip_prefix("write_bytes: ")?.parse().ok());
    Ok(Written {
        client: number(&volume, "/counters/write_bytes")?,
        log: number(&volume, "/counters/log_written_bytes")?,
        home: number(&volume, "/counters/home/data_written_bytes")?,
        map: number(&volume, "/counters/home/map_written_bytes")?,
        checksums: number(&volume, "/counters/home/checksums_written_bytes")?,
        coalesced: number(&volume, "/counters/coalesced_bytes")?,
        kernel: kernel.ok_or_else(|| Failure::new(format!("{path}: no write_bytes")))?,
    })
}

fn number(volume: &Value, pointer: &str) -> Result<u64> {
    let value = volume.pointer(pointer).and_then(Value::as_u64);
    value.ok_or_else(|| Failure::new(format!("hdcs volume show: no number at {pointer}")))
}

fn table(bytes: u64, findings: &[Finding]) -> String {
    let mut text = format!(
        "Overwriting a volume of {} MiB in storage mode, log {} MiB (volume: 90 % of both).\n\
         Written to the device for each byte of the clients:\n\n\
         {:<16} {:>6} {:>6} {:>6} {:>6} {:>7} {:>7} {:>10} {:>8} {:>9} {:>9} {:>12}\n",
        bytes >> 20,
        (bytes / 9) >> 20,
        "load",
        "log",
        "home",
        "map",
        "sums",
        "all",
        "kernel",
        "coalesced",
        "IOPS",
        "p50 µs",
        "p99.9 µs",
        "slowest ms",
    );
    for one in findings {
        let by = |bytes: u64| bytes as f64 / one.client_bytes as f64;
        let _infallible = writeln!(
            text,
            "{:<16} {:>6.3} {:>6.3} {:>6.3} {:>6.3} {:>7.3} {:>7.3} {:>9.1}% {:>8.0} {:>9.0} {:>9.0} {:>12.1}",
            one.load,
            by(one.log_bytes),
            by(one.home_bytes),
            by(one.map_bytes),
            by(one.checksum_bytes),
            one.amplification(),
            by(one.kernel_bytes),
            by(one.coalesced_bytes) * 100.0,
            one.iops,
            one.latency.p50,
            one.latency.p999,
            one.slowest_ms
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amplification_counts_everything_that_was_written() {
        let finding = Finding {
            load: "random",
            client_bytes: 100,
            log_bytes: 103,
            home_bytes: 90,
            map_bytes: 1,
            checksum_bytes: 1,
            coalesced_bytes: 10,
            kernel_bytes: 200,
            iops: 1.0,
            latency: Latency::default(),
            slowest_ms: 1.0,
        };
        assert!((finding.amplification() - 1.95).abs() < 1e-9);
        assert!(table(900 << 20, &[finding]).contains("1.950"));
    }
}
