//! The steady state: random writes until the log has been overrun several times, with destage
//! running, one figure for each second.

use std::fmt;
use std::fs;

use serde::{Deserialize, Serialize};

use crate::failure::{Context, Failure, Result};
use crate::fio::{Latency, Load};
use crate::lab::Lab;
use crate::node::VolumeOptions;
use crate::plot;
use crate::results::Directory;

/// The volume's log.
const LOG_BYTES: u64 = 1 << 30;
/// Memory for the index of such a log; all else as it comes.
const CONFIG: &str = "memory_max_mib = 1024\n";
/// How often the log is overrun.
const OVERRUN: u64 = 4;
/// The volume.
const DISK_BYTES: u64 = 4 << 30;
/// A run that takes longer is cut off, and says so.
const SECONDS_MAX: u32 = 300;

/// What a run gave.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Steady {
    /// Requests in each second, the last incomplete one left out.
    pub per_second: Vec<f64>,
    /// Their mean.
    pub mean_iops: f64,
    /// The slowest second by the mean.
    pub slowest_ratio: f64,
    /// Latency of the whole run.
    pub latency: Latency,
    /// p99.99 by p50.
    pub tail_ratio: f64,
    /// Bytes written by the size of the log.
    pub overrun: f64,
}

impl fmt::Display for Steady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slowest = self
            .per_second
            .iter()
            .copied()
            .fold(f64::INFINITY, f64::min);
        write!(
            f,
            "steady state, log overrun {:.1} times: mean {:.0} IOPS, slowest second {slowest:.0} of {}; \
             p50 {:.0} µs, p99 {:.0} µs, p99.99 {:.0} µs",
            self.overrun,
            self.mean_iops,
            self.per_second.len(),
            self.latency.p50,
            self.latency.p99,
            self.latency.p9999
        )
    }
}

/// Write until the log is overrun.
pub fn run(lab: &Lab, repetition: u32, quick: bool, results: &Directory) -> Result<Steady> {
    let image = lab.disk("steady.img", DISK_BYTES)?;
    let node = lab.node("steady", Some(CONFIG))?;
    let log_bytes = if quick { LOG_BYTES / 4 } else { LOG_BYTES };
    node.create(&VolumeOptions::over_file(
        "steady", &image, DISK_BYTES, log_bytes,
    ))?;
    let load = Load {
        depth: 32,
        bytes_max: Some(log_bytes * OVERRUN),
        seconds: Some(SECONDS_MAX),
        ..Load::random("randwrite", DISK_BYTES)
    };
    let name = format!("steady-{repetition}");
    let log = results.file(&format!("raw/{name}"));
    let outcome = load.run_with(
        &node.target("steady"),
        &results.raw(&name),
        &[
            format!("--write_iops_log={}", log.display()),
            "--log_avg_msec=1000".into(),
        ],
    )?;
    node.stop()?;
    lab.clear()?;

    let path = log.with_file_name(format!("{name}_iops.1.log"));
    let text = fs::read_to_string(&path).context(path.display())?;
    let per_second = complete_seconds(&text);
    if per_second.is_empty() {
        return Err(Failure::new(format!(
            "{}: the run was shorter than a second",
            path.display()
        )));
    }
    let mean_iops = per_second.iter().sum::<f64>() / per_second.len() as f64;
    let slowest = per_second.iter().copied().fold(f64::INFINITY, f64::min);
    plot::seconds(&per_second, mean_iops, results, &name)?;
    let written = outcome.requests * load.block_bytes;
    Ok(Steady {
        mean_iops,
        slowest_ratio: slowest / mean_iops,
        latency: outcome.latency,
        tail_ratio: outcome.latency.p9999 / outcome.latency.p50,
        overrun: written as f64 / log_bytes as f64,
        per_second,
    })
}

/// The seconds of fio's log (`milliseconds, IOPS, …`) without the last, which is not complete.
fn complete_seconds(text: &str) -> Vec<f64> {
    let mut seconds: Vec<f64> = text
        .lines()
        .filter_map(|line| line.split(',').nth(1)?.trim().parse().ok())
        .collect();
    seconds.pop();
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_second_is_left_out() {
        assert_eq!(
            complete_seconds("1000, 50, 1, 4096, 0\n2000, 40, 1, 4096, 0\n2100, 3, 1, 4096, 0\n"),
            [50.0, 40.0]
        );
        assert!(complete_seconds("").is_empty());
    }
}
