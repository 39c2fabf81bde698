//! `hdcs-bench clones`: the first reads of a clone, of which another clone has read everything before,
//! beside those of a volume that has read it all itself.
//!
//! Every turn of a clone has a fresh one, which has never read anything: fio reads each block of the
//! range once. What it asked of the backend is counted: it should be nothing. Turns are interleaved and
//! ratios formed within a repetition. Everything is in DRAM, where a lookup that costs more would show most.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use serde_json::Value;

use crate::bars::{self, Bar};
use crate::before::{Behind, Store};
use crate::failure::Result;
use crate::fio::{Load, Outcome};
use crate::lab::{self, Lab};
use crate::node::{Node, VolumeOptions};
use crate::options::Places;
use crate::results::Directory;

/// DRAM for the range of two volumes and of what the clones began as.
const CONFIG: &str = "memory_max_mib = 4096\ncache_total_size_mib = 1024\nlog_size_mib = 64\n";
/// A clone's first reads are at least so fast, as a share of those of a cached volume.
const MUST: f64 = 0.95;
const LOG_BYTES: u64 = 64 << 20;
/// Volumes that have read everything themselves, and the snapshot of the first that clones begin as.
const CACHED: [&str; 2] = ["golden", "other"];
const SNAPSHOT: &str = "golden@image";

/// What to measure.
#[derive(Args, Debug)]
pub struct Options {
    /// One repetition over little: to see that everything works, not to measure.
    #[arg(long)]
    quick: bool,
    /// Repetitions.
    #[arg(long, default_value_t = 5)]
    repeat: u32,
    /// Where the S3 lives: a short path on the same disk; removed at the end.
    #[arg(long, default_value = "/var/tmp")]
    cluster: PathBuf,
    /// Where the scripts are that bring it up and remove it.
    #[arg(long, default_value = "testenv")]
    scripts: PathBuf,
    #[command(flatten)]
    places: Places,
}

/// One load, on one volume or two at once.
struct Profile {
    name: &'static str,
    title: &'static str,
    volumes: usize,
    rw: &'static str,
    block_bytes: u64,
    depth: u32,
}

const PROFILES: [Profile; 4] = [
    Profile {
        name: "randread",
        title: "4k random read, depth 32",
        volumes: 1,
        rw: "randread",
        block_bytes: 4096,
        depth: 32,
    },
    Profile {
        name: "read",
        title: "1M sequential read, depth 4",
        volumes: 1,
        rw: "read",
        block_bytes: 1 << 20,
        depth: 4,
    },
    Profile {
        name: "randread-two",
        title: "4k random read, depth 32, two volumes at once",
        volumes: 2,
        rw: "randread",
        block_bytes: 4096,
        depth: 32,
    },
    Profile {
        name: "read-two",
        title: "1M sequential read, depth 4, two volumes at once",
        volumes: 2,
        rw: "read",
        block_bytes: 1 << 20,
        depth: 4,
    },
];

/// One turn.
#[derive(Debug, Serialize)]
struct Sample {
    profile: &'static str,
    /// `cached` or `clone`.
    peer: &'static str,
    repetition: u32,
    /// Of all volumes together.
    mib_per_s: f64,
    /// What fio saw, for each volume.
    outcomes: Vec<Outcome>,
    /// The node's CPU time for one request, in microseconds.
    node_cpu_us: f64,
    /// What the turn's volumes asked of their backends: blocks, and requests to the store.
    miss_blocks: u64,
    gets: u64,
}

/// Everything that a run found.
#[derive(Debug, Serialize)]
struct Findings {
    span_bytes: u64,
    /// What the first clone, which found nothing, asked the store for.
    first_gets: u64,
    samples: Vec<Sample>,
}

/// A node over a store.
struct Clones {
    node: Node,
    behind: Box<dyn Behind>,
    span_bytes: u64,
    made: u32,
}

/// Measure, and write the results.
pub fn run(options: &Options) -> Result<()> {
    let (span_bytes, repetitions) = if options.quick {
        (32 << 20, 1)
    } else {
        (512 << 20, options.repeat.max(1))
    };
    let results = Directory::create(&options.places.results)?;
    let lab = Lab::new(&options.places)?;
    eprintln!("bench: starting S3 below {}", options.cluster.display());
    let behind = Store::S3.up(&options.scripts, &options.cluster)?;
    let node = lab.node("node", Some(CONFIG))?;
    let mut clones = Clones {
        node,
        behind,
        span_bytes,
        made: 0,
    };
    let first_gets = clones.prepare(&results)?;
    let mut samples = Vec::new();
    for repetition in 0..repetitions {
        for profile in &PROFILES {
            for peer in ["cached", "clone"] {
                let sample = clones.measure(profile, peer, repetition, &results)?;
                eprintln!("bench: {}", one_line(&sample));
                samples.push(sample);
            }
        }
    }
    clones.down()?;
    let findings = Findings {
        span_bytes,
        first_gets,
        samples,
    };
    results.report(&render(&findings), &findings)
}

impl Clones {
    /// Make the volumes, have the cached ones read everything, and one clone; what that asked the store
    /// for.
    fn prepare(&mut self, results: &Directory) -> Result<u64> {
        for name in CACHED {
            eprintln!("bench: writing {} MiB to {name}", self.span_bytes >> 20);
            self.node.create(&VolumeOptions {
                name: name.to_owned(),
                bytes: self.span_bytes,
                log_bytes: LOG_BYTES,
                persist: "on-flush",
                backend: Some(self.behind.url(name)),
            })?;
            Load::fill(self.span_bytes).run(&self.node.target(name), &results.raw("fill"))?;
            self.node.flush(name)?;
            self.node.command(&["volume", "evict", name])?;
            self.node.command(&["volume", "promote", name])?;
        }
        self.node
            .command(&["volume", "snapshot", "golden", "image"])?;
        let first = self.clone_image()?;
        self.node.command(&["volume", "promote", &first])?;
        let gets = asked(&self.node.show(&first)?).1;
        // Whatever is read once by each below was read once by each before.
        for name in CACHED.into_iter().chain([&*first]) {
            let load = PROFILES[1].load(self.span_bytes, 1);
            load.run(&self.node.target(name), &results.raw("warm"))?;
        }
        Ok(gets)
    }

    fn clone_image(&mut self) -> Result<String> {
        self.made += 1;
        let name = format!("clone{}", self.made);
        let url = self.behind.url(&name);
        let arguments = ["volume", "clone", SNAPSHOT, &name, "--backend", &url];
        self.node.command(&arguments)?;
        Ok(name)
    }

    fn measure(
        &mut self,
        profile: &Profile,
        peer: &'static str,
        repetition: u32,
        results: &Directory,
    ) -> Result<Sample> {
        let is_clone = peer == "clone";
        let mut volumes = Vec::new();
        for name in &CACHED[..profile.volumes] {
            volumes.push(if is_clone {
                self.clone_image()?
            } else {
                (*name).to_owned()
            });
        }
        let before = self.asked_by(&volumes)?;
        let cpu_before = self.node.usage()?.cpu_us;
        let of = |(volume, index): (&String, u32)| {
            let name = format!("{}-{peer}-{repetition}-{index}", profile.name);
            let load = profile.load(self.span_bytes, u64::from(repetition * 2 + index) + 1);
            (volume.clone(), name, load)
        };
        let loads: Vec<_> = volumes.iter().zip(0u32..).map(of).collect();
        let outcomes = lab::together(&self.node, results, &loads)?;
        let cpu_us = self.node.usage()?.cpu_us - cpu_before;
        let after = self.asked_by(&volumes)?;
        if is_clone {
            for volume in &volumes {
                self.node.discard(volume)?;
            }
        }
        let requests: u64 = outcomes.iter().map(|outcome| outcome.requests).sum();
        let iops: f64 = outcomes.iter().map(|outcome| outcome.iops).sum();
        Ok(Sample {
            profile: profile.name,
            peer,
            repetition,
            mib_per_s: iops * profile.block_bytes as f64 / f64::from(1 << 20),
            outcomes,
            node_cpu_us: cpu_us / requests as f64,
            miss_blocks: after.0 - before.0,
            gets: after.1 - before.1,
        })
    }

    fn asked_by(&self, volumes: &[String]) -> Result<(u64, u64)> {
        volumes.iter().try_fold((0, 0), |sum, volume| {
            let (blocks, gets) = asked(&self.node.show(volume)?);
            Ok((sum.0 + blocks, sum.1 + gets))
        })
    }

    fn down(self) -> Result<()> {
        self.node.stop()?;
        self.behind.down()
    }
}

impl Profile {
    /// Every block of the range once.
    fn load(&self, span_bytes: u64, seed: u64) -> Load {
        Load {
            block_bytes: self.block_bytes,
            depth: self.depth,
            seed,
            ..Load::random(self.rw, span_bytes)
        }
    }
}

/// Blocks that a volume read of its backend for clients, and gets of its store.
fn asked(volume: &Value) -> (u64, u64) {
    let counters = &volume["counters"];
    let count = |value: &Value| value.as_u64().unwrap_or(0);
    (
        count(&counters["miss_blocks"]),
        count(&counters["store"]["gets"]),
    )
}

fn one_line(sample: &Sample) -> String {
    let latency = sample.outcomes[0].latency;
    format!(
        "{:<13} {:<7} #{} {:>8.0} MiB/s  p50 {:>6.0} p99 {:>6.0} µs  CPU {:>5.2} µs  {} blocks missed, {} gets",
        sample.profile,
        sample.peer,
        sample.repetition,
        sample.mib_per_s,
        latency.p50,
        latency.p99,
        sample.node_cpu_us,
        sample.miss_blocks,
        sample.gets
    )
}

fn render(findings: &Findings) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "Clones of one snapshot on S3, {} MiB each, read once: the first one asked the store for {} gets.\n",
        findings.span_bytes >> 20,
        findings.first_gets
    );
    let of = |profile: &Profile, peer: &str, value: &dyn Fn(&Sample) -> f64| {
        let samples = findings.samples.iter();
        let theirs = samples.filter(|s| s.profile == profile.name && s.peer == peer);
        theirs
            .map(|sample| (sample.repetition, value(sample)))
            .collect::<Vec<_>>()
    };
    let median = |values: Vec<(u32, f64)>| bars::median(values.into_iter().map(|(_, v)| v));
    let _ = writeln!(
        out,
        "{:<14} {:<8} {:>10} {:>8} {:>8} {:>10} {:>8} {:>6}",
        "profile", "volume", "MiB/s", "p50 µs", "p99 µs", "CPU µs/req", "misses", "gets"
    );
    let mut all = Vec::new();
    for profile in &PROFILES {
        for peer in ["cached", "clone"] {
            let one = |value: &dyn Fn(&Sample) -> f64| median(of(profile, peer, value));
            let _ = writeln!(
                out,
                "{:<14} {:<8} {:>10.0} {:>8.0} {:>8.0} {:>10.2} {:>8.0} {:>6.0}",
                profile.name,
                peer,
                one(&|s| s.mib_per_s),
                one(&|s| s.outcomes[0].latency.p50),
                one(&|s| s.outcomes[0].latency.p99),
                one(&|s| s.node_cpu_us),
                one(&|s| s.miss_blocks as f64),
                one(&|s| s.gets as f64)
            );
        }
        let speed = |peer| of(profile, peer, &|sample| sample.mib_per_s);
        all.push(Bar::at_least(
            format!("{}: clone / cached", profile.title),
            bars::ratio_within(&speed("clone"), &speed("cached")),
            MUST,
            None,
        ));
    }
    let asked = findings.samples.iter().filter(|s| s.peer == "clone");
    let asked: u64 = asked.map(|s| s.miss_blocks + s.gets).sum();
    all.push(Bar::at_most(
        "what fresh clones asked of their backends, in all",
        Some(asked as f64),
        0.0,
        None,
    ));
    out.push('\n');
    bars::list(&mut out, "Bars", &all);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(profile: &'static str, peer: &'static str, mib_per_s: f64, gets: u64) -> Sample {
        Sample {
            profile,
            peer,
            repetition: 0,
            mib_per_s,
            outcomes: vec![Outcome::default()],
            node_cpu_us: 1.0,
            miss_blocks: 0,
            gets,
        }
    }

    #[test]
    fn clones_report_tells_slow_and_asking_ones() {
        let findings = |speed, gets| Findings {
            span_bytes: 1 << 20,
            first_gets: 7,
            samples: vec![
                sample("randread", "cached", 100.0, 0),
                sample("randread", "clone", speed, gets),
            ],
        };
        let misses = |text: String| text.matches("MISS").count();
        assert_eq!(misses(render(&findings(96.0, 0))), 0);
        assert_eq!(misses(render(&findings(90.0, 0))), 1);
        assert_eq!(misses(render(&findings(96.0, 1))), 1);
        assert!(render(&findings(96.0, 0)).contains("not run"));
    }
}
