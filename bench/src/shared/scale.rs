//! `hdcs-bench scale`: how much more several shards do than one, each with an equal small share of a processor.
//!
//! A machine has few processors, and the client needs some. So the kernel lets each shard's thread, and what it has the
//! kernel do, have the same small part of one processor: where shards share nothing, twice as many do twice as much until
//! the client or the processors are the limit. Logs lie in memory, so that no disk is. Each shard has one volume, and each
//! volume one client at depth 32.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Options, usage::Meter};
use crate::bars::{Bar, list, median};
use crate::failure::{Context, Failure, Result};
use crate::fio::Load;
use crate::lab::{self, Lab};
use crate::node::{Node, VolumeOptions};
use crate::results::Directory;

/// Shards of each run.
const SHARDS: [u32; 4] = [1, 2, 4, 8];
/// What of a processor each has, in a hundred.
const PERCENT: u32 = 8;
/// The kernel counts that within so many microseconds.
const PERIOD_US: u32 = 20_000;
/// Small, so that what all of them read fits the processor's cache as well as what one does.
const DISK_BYTES: u64 = 8 << 20;
const LOG_BYTES: u64 = 256 << 20;
const LOADS: [&str; 2] = ["randwrite", "randread"];

/// One run.
#[derive(Debug, Serialize)]
struct Sample {
    shards: u32,
    rw: &'static str,
    repetition: u32,
    iops: f64,
    p99_us: f64,
    cpu_us: f64,
    /// Of all processors, with the clients'.
    processors: f64,
}

#[derive(Debug, Default, Serialize)]
struct Findings {
    percent: u32,
    samples: Vec<Sample>,
}

/// Run it.
pub fn run(options: &Options) -> Result<()> {
    let results = Directory::create(&options.places.results)?;
    let mut findings = Findings {
        percent: PERCENT,
        ..Findings::default()
    };
    for repetition in 0..options.repetitions() {
        for shards in SHARDS {
            run_with(options, shards, repetition, &results, &mut findings)?;
        }
    }
    results.report(&render(&findings), &findings)
}

fn run_with(
    options: &Options,
    shards: u32,
    repetition: u32,
    results: &Directory,
    findings: &mut Findings,
) -> Result<()> {
    let lab = Lab::at(&options.places.hdcs, Path::new("/dev/shm"))?;
    let config = format!("shards = {shards}\nmemory_max_mib = 2048\ncache_total_size_mib = 0\n");
    let node = lab.node("node", Some(&config))?;
    let names: Vec<String> = (0..shards).map(|number| format!("v{number}")).collect();
    for name in &names {
        let volume = VolumeOptions {
            backend: None,
            ..VolumeOptions::over_file(name, Path::new(""), DISK_BYTES, LOG_BYTES)
        };
        node.create(&volume)?;
        // So that reads are hits, and nothing is destaged beside them.
        lab.fill(&node.target(name), DISK_BYTES)?;
        node.flush(name)?;
        lab.warm(&node.target(name), DISK_BYTES)?;
    }
    let quotas = Quotas::set(&node, shards)?;
    for rw in LOADS {
        let load = |number: usize| Load {
            depth: 32,
            seconds: Some(options.seconds()),
            seed: number as u64 + 1,
            // As much as a log takes without destage.
            bytes_max: (rw == "randwrite").then_some(LOG_BYTES / 2),
            ..Load::random(rw, DISK_BYTES)
        };
        let run = format!("{shards}-{rw}-{repetition}");
        let loads: Vec<_> = (names.iter().enumerate())
            .map(|(number, name)| (name.clone(), format!("{run}-{name}"), load(number)))
            .collect();
        let before = Meter::read(node.pid(), lab.directory())?;
        let used = node.usage()?.cpu_us;
        let outcomes = lab::together(&node, results, &loads)?;
        let used = node.usage()?.cpu_us - used;
        let usage = before.until(&Meter::read(node.pid(), lab.directory())?);
        let requests: u64 = outcomes.iter().map(|one| one.requests).sum();
        let sample = Sample {
            shards,
            rw,
            repetition,
            iops: outcomes.iter().map(|one| one.iops).sum(),
            p99_us: median(outcomes.iter().map(|one| one.latency.p99)),
            cpu_us: used / requests.max(1) as f64,
            processors: usage.processors,
        };
        eprintln!("bench: {sample:?}");
        findings.samples.push(sample);
    }
    drop(quotas);
    node.stop()
}

/// Groups of the kernel's processor controller, one for each shard's thread. They go with this.
struct Quotas(Vec<PathBuf>);

impl Quotas {
    /// Give each shard its part of a processor.
    fn set(node: &Node, shards: u32) -> Result<Self> {
        // The first version of control groups takes single threads as they are.
        let root = Path::new("/sys/fs/cgroup/cpu");
        if !root.join("cpu.cfs_quota_us").exists() {
            return Err(Failure::new(
                "shares of a processor for single threads need the cpu controller of control groups, version 1, at \
                 /sys/fs/cgroup/cpu",
            ));
        }
        let mut quotas = Self(Vec::new());
        for shard in 0..shards {
            let group = root.join(format!("hdcs-bench-{}-{shard}", node.pid()));
            fs::create_dir(&group).context(group.display())?;
            quotas.0.push(group.clone());
            let write = |file: &str, value: u32| {
                let path = group.join(file);
                fs::write(&path, value.to_string()).context(path.display())
            };
            write("cpu.cfs_period_us", PERIOD_US)?;
            write("cpu.cfs_quota_us", PERIOD_US * PERCENT / 100)?;
            for thread in threads_of(node.pid(), shard, shards)? {
                write("tasks", thread)?;
            }
        }
        Ok(quotas)
    }
}

impl Drop for Quotas {
    fn drop(&mut self) {
        for group in &self.0 {
            // Its threads go to the group above.
            let tasks = fs::read_to_string(group.join("tasks")).unwrap_or_default();
            for thread in tasks.lines() {
                let _ = fs::write("/sys/fs/cgroup/cpu/tasks", thread);
            }
            let _ = fs::remove_dir(group);
        }
    }
}

/// The thread of a shard.
fn threads_of(pid: u32, shard: u32, shards: u32) -> Result<Vec<u32>> {
    let wanted = if shards == 1 {
        "hdcs-shard".to_owned()
    } else {
        format!("hdcs-shard-{shard}")
    };
    let tasks = format!("/proc/{pid}/task");
    let mut found = Vec::new();
    for task in fs::read_dir(&tasks).context(&tasks)? {
        let path = task.context(&tasks)?.path();
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
        if name.trim_end() == wanted
            && let Some(number) = path
                .file_name()
                .and_then(|name| name.to_str()?.parse().ok())
        {
            found.push(number);
        }
    }
    match found.len() {
        1 => Ok(found),
        count => Err(Failure::new(format!(
            "{count} threads of the node are called {wanted}"
        ))),
    }
}

fn render(findings: &Findings) -> String {
    let of = |shards: u32, rw: &str, value: fn(&Sample) -> f64| {
        let samples = findings.samples.iter();
        median(
            samples
                .filter(|sample| (sample.shards, sample.rw) == (shards, rw))
                .map(value),
        )
    };
    let mut out = format!(
        "4k at depth 32, a volume and a client for each shard, {} % of a processor for each shard, logs in memory \
         (medians)\n",
        findings.percent
    );
    let _ = writeln!(
        out,
        "  {:<10} {:>6} {:>9} {:>8} {:>8} {:>9} {:>11}",
        "load", "shards", "IOPS", "/ linear", "p99 µs", "CPU µs", "processors"
    );
    let linear = |shards: u32, rw: &str| {
        of(shards, rw, |s| s.iops) / f64::from(shards) / of(1, rw, |s| s.iops)
    };
    for rw in LOADS {
        for shards in SHARDS {
            let _ = writeln!(
                out,
                "  {rw:<10} {shards:>6} {:>9.0} {:>8.2} {:>8.0} {:>9.1} {:>10.0}%",
                of(shards, rw, |s| s.iops),
                linear(shards, rw),
                of(shards, rw, |s| s.p99_us),
                of(shards, rw, |s| s.cpu_us),
                of(shards, rw, |s| s.processors * 100.0),
            );
        }
    }
    let last = SHARDS[SHARDS.len() - 1];
    let mut bars = Vec::new();
    for (rw, what) in LOADS.into_iter().zip(["writes", "DRAM hits"]) {
        bars.push(Bar::at_least(
            format!("{what}: {last} shards / linear, IOPS"),
            Some(linear(last, rw)),
            0.9,
            Some(0.97),
        ));
        let cpu = of(last, rw, |s| s.cpu_us) / of(1, rw, |s| s.cpu_us);
        bars.push(Bar::at_most(
            format!("{what}: {last} shards / 1, CPU of a request"),
            Some(cpu),
            1.15,
            Some(1.05),
        ));
    }
    out.push('\n');
    list(
        &mut out,
        "What it must reach, unless the processors are full",
        &bars,
    );
    out
}
