//! `hdcs-bench scale`: how much more several shards do than one, each with an equal small share of a processor.
//!
//! A machine has few processors, and the client needs some. So the kernel lets each shard's thread, and what it has the
//! kernel do, have the same small part of one processor: where shards share nothing, twice as many do twice as much until
//! the client or the processors are the limit. Logs and the SSD tier lie in memory, so that no disk is. Each shard has one
//! volume, and each volume one client at depth 32.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{Options, usage::Meter};
use crate::bars::{Bar, list, median};
use crate::cost::{self, Cost};
use crate::failure::{Context, Failure, Result};
use crate::fio::Load;
use crate::lab::{self, Lab};
use crate::node::{Node, VolumeOptions};
use crate::performance;
use crate::results::Directory;

/// Shards of each run.
const SHARDS: [u32; 4] = [1, 2, 4, 8];
/// What of a processor each has, in a hundred.
const PERCENT: u32 = 8;
/// The kernel counts that within so many microseconds.
const PERIOD_US: u32 = 20_000;
/// Small, so that what all of them read fits the processor's cache as well as what one does.
const DISK_BYTES: u64 = 8 << 20;
/// For hits of the SSD tier: of this a DRAM tier holds little.
const SSD_DISK_BYTES: u64 = 128 << 20;
const LOG_BYTES: u64 = 256 << 20;
/// Of the reads, at least so many have to come from the SSD tier if it is that which is measured.
const SSD_HITS_MIN: f64 = 0.75;

/// What is asked of the shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Kind {
    Writes,
    DramHits,
    SsdHits,
}

const KINDS: [Kind; 3] = [Kind::Writes, Kind::DramHits, Kind::SsdHits];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Writes => "writes",
            Self::DramHits => "DRAM hits",
            Self::SsdHits => "SSD hits",
        }
    }

    /// What a request may cost in messages between threads, and what would be better. That somebody reads the metrics is
    /// among them.
    fn messages_max(self) -> [f64; 2] {
        match self {
            Self::Writes | Self::DramHits => [0.001, 0.001],
            Self::SsdHits => [2.0, 0.5],
        }
    }

    fn load(self, number: usize, seconds: u32) -> Load {
        let (rw, bytes) = match self {
            Self::Writes => ("randwrite", DISK_BYTES),
            Self::DramHits => ("randread", DISK_BYTES),
            Self::SsdHits => ("randread", SSD_DISK_BYTES),
        };
        Load {
            depth: 32,
            seconds: Some(seconds),
            seed: number as u64 + 1,
            // As much as a log takes without destage.
            bytes_max: (self == Self::Writes).then_some(LOG_BYTES / 2),
            ..Load::random(rw, bytes)
        }
    }
}

/// One run.
#[derive(Debug, Serialize)]
struct Sample {
    shards: u32,
    kind: Kind,
    repetition: u32,
    iops: f64,
    p99_us: f64,
    cpu_us: f64,
    /// What else a request cost.
    cost: Cost,
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
            for kinds in [&[Kind::Writes, Kind::DramHits][..], &[Kind::SsdHits]] {
                run_with(options, shards, kinds, repetition, &results, &mut findings)?;
            }
        }
    }
    options.conclude(performance::SHARDS, &results, &render(&findings), &findings)
}

/// One node with so many shards, and these loads after each other.
fn run_with(
    options: &Options,
    shards: u32,
    kinds: &[Kind],
    repetition: u32,
    results: &Directory,
    findings: &mut Findings,
) -> Result<()> {
    let lab = Lab::at(&options.places.hdcs, Path::new("/dev/shm"))?;
    let on_ssd = kinds.contains(&Kind::SsdHits);
    let (memory_mib, cache_mib, bytes) = if on_ssd {
        // So that DRAM holds 20 MiB of each volume at most.
        (72 + 90 * shards, 1536, SSD_DISK_BYTES)
    } else {
        (2048, 0, DISK_BYTES)
    };
    let config = format!(
        "shards = {shards}\nmemory_max_mib = {memory_mib}\ncache_total_size_mib = {cache_mib}\n"
    );
    let node = lab.node("node", Some(&config))?;
    let names: Vec<String> = (0..shards).map(|number| format!("v{number}")).collect();
    for name in &names {
        let volume = VolumeOptions {
            backend: None,
            ..VolumeOptions::over_file(name, Path::new(""), bytes, LOG_BYTES)
        };
        node.create(&volume)?;
        // So that reads are hits, and nothing is destaged beside them.
        lab.fill(&node.target(name), bytes)?;
        node.flush(name)?;
        lab.warm(&node.target(name), bytes)?;
    }
    let quotas = Quotas::set(&node, shards)?;
    for &kind in kinds {
        let run = format!("{shards}-{kind:?}-{repetition}");
        let loads: Vec<_> = (names.iter().enumerate())
            .map(|(number, name)| {
                let load = kind.load(number, options.seconds());
                (name.clone(), format!("{run}-{name}"), load)
            })
            .collect();
        let before = Meter::read(node.pid(), lab.directory())?;
        let used = node.usage()?.cpu_us;
        let hits = ssd_hits(&node, &names)?;
        let meter = cost::Meter::read(&node)?;
        let outcomes = lab::together(&node, results, &loads)?;
        let meter_after = cost::Meter::read(&node)?;
        let used = node.usage()?.cpu_us - used;
        let usage = before.until(&Meter::read(node.pid(), lab.directory())?);
        let requests: u64 = outcomes.iter().map(|one| one.requests).sum();
        let hits = (ssd_hits(&node, &names)? - hits) / requests.max(1) as f64;
        if kind == Kind::SsdHits && hits < SSD_HITS_MIN {
            return Err(Failure::new(format!(
                "only {:.0} % of the reads came from the SSD tier",
                hits * 100.0
            )));
        }
        let sample = Sample {
            shards,
            kind,
            repetition,
            iops: outcomes.iter().map(|one| one.iops).sum(),
            p99_us: median(outcomes.iter().map(|one| one.latency.p99)),
            cpu_us: used / requests.max(1) as f64,
            cost: meter.until(&meter_after, requests),
            processors: usage.processors,
        };
        eprintln!(
            "bench: {shards} shards, {}: {:.0} IOPS, p99 {:.0} µs, CPU {:.1} µs",
            kind.name(),
            sample.iops,
            sample.p99_us,
            sample.cpu_us
        );
        findings.samples.push(sample);
    }
    drop(quotas);
    node.stop()
}

/// Blocks that the SSD tier gave to all of these.
fn ssd_hits(node: &Node, names: &[String]) -> Result<f64> {
    let mut hits = 0.0;
    for name in names {
        let shown = node.show(name)?;
        hits += shown["counters"]["ssd_hit_blocks"].as_f64().unwrap_or(0.0);
    }
    Ok(hits)
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
    let of = |shards: u32, kind: Kind, value: fn(&Sample) -> f64| {
        let samples = findings.samples.iter();
        median(
            samples
                .filter(|sample| (sample.shards, sample.kind) == (shards, kind))
                .map(value),
        )
    };
    let mut out = format!(
        "4k at depth 32, a volume and a client for each shard, {} % of a processor for each shard, logs and cache in \
         memory (medians; turns and messages for one request)\n",
        findings.percent
    );
    let _ = writeln!(
        out,
        "  {:<10} {:>6} {:>9} {:>8} {:>8} {:>9} {:>8} {:>9} {:>11}",
        "load", "shards", "IOPS", "/ linear", "p99 µs", "CPU µs", "turns", "messages", "processors"
    );
    let linear = |shards: u32, kind: Kind| {
        of(shards, kind, |s| s.iops) / f64::from(shards) / of(1, kind, |s| s.iops)
    };
    for kind in KINDS {
        for shards in SHARDS {
            let _ = writeln!(
                out,
                "  {:<10} {shards:>6} {:>9.0} {:>8.2} {:>8.0} {:>9.1} {:>8.2} {:>9.4} {:>10.0}%",
                kind.name(),
                of(shards, kind, |s| s.iops),
                linear(shards, kind),
                of(shards, kind, |s| s.p99_us),
                of(shards, kind, |s| s.cpu_us),
                of(shards, kind, |s| s.cost.turns),
                of(shards, kind, |s| s.cost.messages),
                of(shards, kind, |s| s.processors * 100.0),
            );
        }
    }
    let last = SHARDS[SHARDS.len() - 1];
    let mut bars = Vec::new();
    for kind in KINDS {
        let what = kind.name();
        if kind != Kind::SsdHits {
            // The worst of them counts.
            let worst = SHARDS.into_iter().map(|shards| linear(shards, kind));
            bars.push(Bar::at_least(
                format!("{what}: 2, 4 and 8 shards / linear, the least, IOPS"),
                worst.reduce(f64::min),
                0.9,
                Some(0.97),
            ));
            let cpu = of(last, kind, |s| s.cpu_us) / of(1, kind, |s| s.cpu_us);
            bars.push(Bar::at_most(
                format!("{what}: {last} shards / 1, CPU of a request"),
                Some(cpu),
                1.15,
                Some(1.05),
            ));
        }
        let [must, aim] = kind.messages_max();
        bars.push(Bar::at_most(
            format!("{what}: {last} shards, messages for a request"),
            Some(of(last, kind, |s| s.cost.messages)),
            must,
            Some(aim),
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
