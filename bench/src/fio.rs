//! fio as the client: jobs, runs, results.
//!
//! Pitfalls that shape the jobs (fio 3.33): `fsync=N` on an asynchronous engine at depths above 1
//! sends far too many syncs, so a profile with syncs has depth 1; fio's own usr/sys leaves out
//! threads of libraries, so CPU time is taken from the kernel when the process has ended. A job is a
//! process of its own, which is fio's default: as a thread (`--thread`) it reaches half as many durable
//! writes over NBD at depth 32, since its requests come one by one and each wakes the server.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::failure::{Context, Failure, Result};
use crate::process;

/// What is read or written.
#[derive(Clone, Debug)]
pub enum Target {
    /// A file, with `O_DIRECT` and io_uring.
    File(PathBuf),
    /// An NBD export behind a unix socket.
    Nbd {
        /// The socket.
        socket: PathBuf,
        /// The export's name.
        export: String,
    },
    /// An image on Ceph, with librbd in fio's process; `O_DIRECT` keeps librbd from caching.
    #[cfg(feature = "stores")]
    Rbd {
        /// Configuration of the cluster.
        conf: PathBuf,
        /// The pool.
        pool: String,
        /// The image.
        image: String,
    },
}

/// One load.
#[derive(Clone, Debug, Serialize)]
pub struct Load {
    /// fio's `rw`: `randread`, `randwrite`, `write`.
    pub rw: &'static str,
    /// Bytes of one request.
    pub block_bytes: u64,
    /// Alignment of requests, if it is more than their size.
    pub align_bytes: Option<u64>,
    /// Requests in flight.
    pub depth: u32,
    /// Exponent of a Zipf distribution instead of a uniform one.
    pub zipf: Option<f64>,
    /// Requests a second, if bounded.
    pub rate: Option<u32>,
    /// A sync after so many writes.
    pub fsync_every: Option<u32>,
    /// The range that is touched, from the beginning.
    pub span_bytes: u64,
    /// Stop after so many bytes, if the time does not stop it before.
    pub bytes_max: Option<u64>,
    /// Stop after so many seconds; `None`: when the range has been covered once.
    pub seconds: Option<u32>,
    /// Each write durable when it ends (`O_DSYNC`), of a file.
    pub durable: bool,
    /// As a thread of fio's instead of a process: see the module.
    pub thread: bool,
    /// Seed of offsets and data.
    pub seed: u64,
}

/// Latency in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Latency {
    /// Mean.
    pub mean: f64,
    /// Half of the requests took at most so long.
    pub p50: f64,
    /// 99 %.
    pub p99: f64,
    /// 99.9 %.
    pub p999: f64,
    /// 99.99 %.
    pub p9999: f64,
}

/// What one run gave.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Requests a second.
    pub iops: f64,
    /// Requests in all.
    pub requests: u64,
    /// Of reads or writes.
    pub latency: Latency,
    /// Of syncs, if the load has any: the mean.
    pub sync_mean: Option<f64>,
    /// Client's CPU time for one request, in microseconds.
    pub client_cpu_us: f64,
    /// Latency distribution: nanoseconds and how many requests.
    #[serde(skip)]
    pub histogram: Vec<(u64, u64)>,
}

impl Load {
    /// Uniformly random requests of 4 KiB, depth 1, over `span_bytes`.
    pub fn random(rw: &'static str, span_bytes: u64) -> Self {
        Self {
            rw,
            block_bytes: 4096,
            align_bytes: None,
            depth: 1,
            zipf: None,
            rate: None,
            fsync_every: None,
            span_bytes,
            bytes_max: None,
            seconds: None,
            durable: false,
            thread: false,
            seed: 1,
        }
    }

    /// Write the whole range once, with data that does not repeat.
    pub fn fill(span_bytes: u64) -> Self {
        Self {
            block_bytes: 1 << 20,
            depth: 4,
            ..Self::random("write", span_bytes)
        }
    }

    fn arguments(&self, target: &Target) -> Vec<String> {
        let mut arguments: Vec<String> = vec![
            "--name=load".into(),
            "--direct=1".into(),
            "--percentile_list=50:99:99.9:99.99".into(),
            "--lat_percentiles=1".into(),
            "--clat_percentiles=0".into(),
            format!("--rw={}", self.rw),
            format!("--bs={}", self.block_bytes),
            format!("--iodepth={}", self.depth),
            format!("--size={}", self.span_bytes),
            format!("--randseed={}", self.seed),
        ];
        match target {
            Target::File(path) => {
                arguments.push("--ioengine=io_uring".into());
                arguments.push(format!("--filename={}", path.display()));
            }
            Target::Nbd { socket, export } => {
                arguments.push("--ioengine=nbd".into());
                arguments.push(format!(
                    "--uri=nbd+unix:///{export}?socket={}",
                    socket.display()
                ));
            }
            #[cfg(feature = "stores")]
            Target::Rbd { pool, image, .. } => {
                arguments.push("--ioengine=rbd".into());
                arguments.push("--clientname=admin".into());
                arguments.push(format!("--pool={pool}"));
                arguments.push(format!("--rbdname={image}"));
            }
        }
        let mut option = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                arguments.push(format!("--{name}={value}"));
            }
        };
        option(
            "blockalign",
            self.align_bytes.map(|bytes| bytes.to_string()),
        );
        option(
            "random_distribution",
            self.zipf.map(|theta| format!("zipf:{theta}")),
        );
        option("rate_iops", self.rate.map(|rate| rate.to_string()));
        option("fsync", self.fsync_every.map(|count| count.to_string()));
        option("io_size", self.bytes_max.map(|bytes| bytes.to_string()));
        option("runtime", self.seconds.map(|seconds| seconds.to_string()));
        if self.seconds.is_some() && self.bytes_max.is_none() {
            arguments.push("--time_based".into());
        }
        if self.durable {
            arguments.push("--sync=dsync".into());
        }
        if self.thread {
            arguments.push("--thread".into());
        }
        if self.rw == "write" {
            arguments.push("--refill_buffers".into());
        }
        arguments
    }

    /// Run it; fio's own report is kept in `raw`.
    pub fn run(&self, target: &Target, raw: &Path) -> Result<Outcome> {
        self.run_with(target, raw, &[])
    }

    /// Run it with further options of fio.
    pub fn run_with(&self, target: &Target, raw: &Path, further: &[String]) -> Result<Outcome> {
        let mut command = Command::new("fio");
        #[cfg(feature = "stores")]
        if let Target::Rbd { conf, .. } = target {
            // The engine has no option for it.
            command.env("CEPH_CONF", conf);
        }
        command
            .args(self.arguments(target))
            .args(further)
            .args([
                "--output-format=json+",
                &format!("--output={}", raw.display()),
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let cpu_us =
            process::run_measured(&mut command).context(format_args!("see {}", raw.display()))?;
        let text = fs::read_to_string(raw).context(raw.display())?;
        // fio may put notes before the document.
        let json = text.find('{').map_or("", |begin| &text[begin..]);
        let report: Value = serde_json::from_str(json).context(raw.display())?;
        let mut outcome = outcome_of(&report, self.rw).context(raw.display())?;
        outcome.client_cpu_us = cpu_us / outcome.requests.max(1) as f64;
        Ok(outcome)
    }
}

/// Loads that ran at once, as one: what they did together, and the latency of the slowest.
pub fn together(outcomes: &[Outcome]) -> Outcome {
    let sum = |value: &dyn Fn(&Outcome) -> f64| outcomes.iter().map(value).sum::<f64>();
    let most = |value: fn(&Latency) -> f64| {
        let values = outcomes.iter().map(|one| value(&one.latency));
        values.fold(0.0, f64::max)
    };
    let requests: u64 = outcomes.iter().map(|one| one.requests).sum();
    let mean = |value: &dyn Fn(&Outcome) -> f64| {
        sum(&|one| value(one) * one.requests as f64) / requests.max(1) as f64
    };
    let mut histogram: BTreeMap<u64, u64> = BTreeMap::new();
    for (ns, count) in outcomes.iter().flat_map(|one| &one.histogram) {
        *histogram.entry(*ns).or_default() += count;
    }
    Outcome {
        iops: sum(&|one| one.iops),
        requests,
        latency: Latency {
            mean: mean(&|one| one.latency.mean),
            p50: most(|latency| latency.p50),
            p99: most(|latency| latency.p99),
            p999: most(|latency| latency.p999),
            p9999: most(|latency| latency.p9999),
        },
        sync_mean: None,
        client_cpu_us: mean(&|one| one.client_cpu_us),
        histogram: histogram.into_iter().collect(),
    }
}

/// Read fio's report of a single job.
fn outcome_of(report: &Value, rw: &str) -> Result<Outcome> {
    let job = &report["jobs"][0];
    if job["error"].as_i64() != Some(0) {
        return Err(Failure::new(format!("fio reports error {}", job["error"])));
    }
    let side = &job[if rw.ends_with("read") {
        "read"
    } else {
        "write"
    }];
    let lat = &side["lat_ns"];
    let percentile = |key: &str| lat["percentile"][key].as_f64().unwrap_or(0.0) / 1000.0;
    let mut histogram: Vec<(u64, u64)> = lat["bins"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(ns, count)| Some((ns.parse().ok()?, count.as_u64()?)))
        .collect();
    histogram.sort_unstable();
    let sync = &job["sync"]["lat_ns"];
    let requests = side["total_ios"].as_u64().context("no count of requests")?;
    if requests == 0 {
        return Err(Failure::new("fio did nothing"));
    }
    Ok(Outcome {
        iops: side["iops"].as_f64().context("no IOPS")?,
        requests,
        latency: Latency {
            mean: lat["mean"].as_f64().unwrap_or(0.0) / 1000.0,
            p50: percentile("50.000000"),
            p99: percentile("99.000000"),
            p999: percentile("99.900000"),
            p9999: percentile("99.990000"),
        },
        sync_mean: (sync["N"].as_u64().unwrap_or(0) > 0)
            .then(|| sync["mean"].as_f64().unwrap_or(0.0) / 1000.0),
        client_cpu_us: 0.0,
        histogram,
    })
}

/// The floor of a durable write without any server: write and fdatasync of 4 KiB, one after
/// another, on a file that was written before. Mean of both together, in microseconds.
pub fn durable_write_us(file: &Path, span_bytes: u64, seconds: u32, raw: &Path) -> Result<f64> {
    let load = Load {
        seconds: Some(seconds),
        ..Load::random("randwrite", span_bytes)
    };
    let outcome = load.run_with(
        &Target::File(file.to_path_buf()),
        raw,
        &["--ioengine=psync".into(), "--fdatasync=1".into()],
    )?;
    Ok(outcome.latency.mean + outcome.sync_mean.context("fio did not report its syncs")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_read() {
        let report = serde_json::json!({"jobs": [{"error": 0,
            "write": {"iops": 100.0, "total_ios": 500, "lat_ns": {"mean": 2000.0,
                "percentile": {"50.000000": 1000, "99.000000": 3000, "99.900000": 4000, "99.990000": 5000},
                "bins": {"2000": 3, "1000": 497}}},
            "sync": {"lat_ns": {"mean": 7000.0, "N": 3}}}]});
        let outcome = outcome_of(&report, "randwrite").unwrap();
        assert_eq!(outcome.requests, 500);
        assert!((outcome.latency.p9999 - 5.0).abs() < 1e-9);
        assert!((outcome.sync_mean.unwrap() - 7.0).abs() < 1e-9);
        assert_eq!(outcome.histogram, [(1000, 497), (2000, 3)]);
    }

    #[test]
    fn loads_that_ran_at_once_are_one() {
        let outcome = |requests, mean, p99| Outcome {
            iops: 10.0,
            requests,
            latency: Latency {
                mean,
                p99,
                ..Latency::default()
            },
            client_cpu_us: 2.0,
            histogram: vec![(5, requests)],
            ..Outcome::default()
        };
        let all = together(&[outcome(30, 1.0, 7.0), outcome(10, 5.0, 9.0)]);
        assert_eq!((all.requests, all.histogram), (40, vec![(5, 40)]));
        assert!((all.iops - 20.0).abs() < 1e-9);
        assert!((all.latency.mean - 2.0).abs() < 1e-9);
        assert!((all.latency.p99 - 9.0).abs() < 1e-9);
        assert!((all.client_cpu_us - 2.0).abs() < 1e-9);
    }

    #[test]
    fn failed_or_empty_run_is_an_error() {
        let failed = serde_json::json!({"jobs": [{"error": 5}]});
        assert!(outcome_of(&failed, "randwrite").is_err());
        let empty =
            serde_json::json!({"jobs": [{"error": 0, "read": {"iops": 0.0, "total_ios": 0}}]});
        assert!(outcome_of(&empty, "randread").is_err());
    }

    #[test]
    fn time_bound_runs_repeat_the_range() {
        let target = Target::File("x".into());
        let timed = Load {
            seconds: Some(3),
            ..Load::random("randread", 1 << 20)
        };
        assert!(
            timed
                .arguments(&target)
                .contains(&"--time_based".to_owned())
        );
        let sized = Load {
            bytes_max: Some(1 << 20),
            ..timed
        };
        assert!(
            !sized
                .arguments(&target)
                .contains(&"--time_based".to_owned())
        );
    }

    #[cfg(feature = "stores")]
    #[test]
    fn image_is_named_to_librbd() {
        let target = Target::Rbd {
            conf: "/c".into(),
            pool: "p".into(),
            image: "i".into(),
        };
        let arguments = Load::random("randread", 1 << 20).arguments(&target);
        for expected in [
            "--ioengine=rbd",
            "--pool=p",
            "--rbdname=i",
            // Without it librbd's own cache is on.
            "--direct=1",
        ] {
            assert!(arguments.contains(&expected.to_owned()), "{expected}");
        }
    }
}
