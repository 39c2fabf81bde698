//! `hdcs-bench policies`: what each cache policy costs, and what a change of it does to the clients.
//!
//! One client keeps 16 requests of 4 KiB in flight, seven writes to three reads at random, and notes
//! when each ends. Under each policy it runs for a while; then every ordered pair of policies is
//! switched, and the longest time in which nothing ended counts, from before the command until the policy
//! is in effect and a moment after. Under read-only it reads alone.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use clap::Args;
use fastrand::Rng;
use serde::Serialize;

use crate::failure::{Context, Failure, Result};
use crate::nbd::{self, Command, Receiver, Sender};
use crate::node::{Node, VolumeOptions};
use crate::options::Places;
use crate::results::Directory;

const POLICIES: [&str; 5] = [
    "write-back",
    "write-through",
    "write-around",
    "read-only",
    "pass-through",
];
const READ_ONLY: &str = "read-only";
const DISK_BYTES: u64 = 1 << 30;
const LOG_BYTES: u64 = 256 << 20;
const BLOCK_BYTES: u64 = 4096;
const DEPTH: u64 = 16;
/// Of ten requests, so many write.
const WRITES_IN_TEN: u32 = 7;
/// How long a change is watched once it is in effect.
const AFTER: Duration = Duration::from_millis(300);
/// Longest gap that a change may bring about, and what it is meant to be.
const GAP_MAX_MS: f64 = 100.0;
const GAP_AIM_MS: f64 = 10.0;

/// How the policies are measured.
#[derive(Args, Debug)]
pub struct Options {
    /// Short runs: to see that everything works, not to measure.
    #[arg(long)]
    quick: bool,
    /// Seconds under each policy, and before each change.
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    #[command(flatten)]
    places: Places,
}

/// Requests under one policy.
#[derive(Clone, Debug, Serialize)]
struct Steady {
    policy: &'static str,
    iops: f64,
    p50_us: f64,
    p9999_us: f64,
    longest_gap_ms: f64,
}

/// One change of policy.
#[derive(Clone, Debug, Serialize)]
struct Change {
    from: &'static str,
    to: &'static str,
    /// Longest time without a completion.
    longest_gap_ms: f64,
    /// From the command until the policy was in effect.
    took_ms: f64,
}

#[derive(Debug, Serialize)]
struct Findings {
    steady: Vec<Steady>,
    changes: Vec<Change>,
}

/// What the client has seen since somebody looked.
#[derive(Debug)]
struct Seen {
    last: Instant,
    longest_gap: Duration,
    latencies_us: Vec<u32>,
    failed: Option<String>,
}

/// What client and driver share.
#[derive(Debug)]
struct Shared {
    seen: Mutex<Seen>,
    writes: AtomicBool,
    ended: AtomicBool,
}

impl Shared {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begin to look; what was seen before does not count.
    fn begin(&self) {
        let mut seen = self.seen();
        seen.longest_gap = Duration::ZERO;
        seen.latencies_us.clear();
    }

    /// The longest gap, that which is going on included, and the latencies.
    fn end(&self) -> Result<(Duration, Vec<u32>)> {
        let mut seen = self.seen();
        if let Some(why) = &seen.failed {
            return Err(Failure::new(why.clone()));
        }
        let gap = seen.longest_gap.max(seen.last.elapsed());
        Ok((gap, std::mem::take(&mut seen.latencies_us)))
    }
}

/// Keep requests in flight until it is told to end.
fn client(mut sender: Sender, mut receiver: Receiver, shared: &Shared) -> Result<()> {
    let mut random = Rng::with_seed(1);
    let data = vec![0x5a; BLOCK_BYTES as usize];
    let mut buffer = data.clone();
    let mut sent: BTreeMap<u64, (Instant, bool)> = BTreeMap::new();
    let mut next = 0;
    loop {
        while sent.len() < DEPTH as usize && !shared.ended.load(Ordering::Relaxed) {
            let writes = shared.writes.load(Ordering::Relaxed) && random.u32(..10) < WRITES_IN_TEN;
            let offset = random.u64(..DISK_BYTES / BLOCK_BYTES) * BLOCK_BYTES;
            let (command, payload) = if writes {
                (Command::Write, &data[..])
            } else {
                (Command::Read, &[][..])
            };
            sent.insert(next, (Instant::now(), !writes));
            sender
                .send(command, 0, next, offset, BLOCK_BYTES as u32, payload)
                .context("sending a request")?;
            next += 1;
        }
        if sent.is_empty() {
            return Ok(());
        }
        let (cookie, error) = receiver.reply().context("a reply")?;
        let (since, is_read) = sent.remove(&cookie).context("a reply to nothing")?;
        // Writes that were sent before the volume became read-only are refused.
        if error != 0 && (is_read || error != libc::EPERM as u32) {
            return Err(Failure::new(format!("a request failed with error {error}")));
        }
        if is_read {
            receiver.data(&mut buffer)?;
        }
        let now = Instant::now();
        let mut seen = shared.seen();
        let gap = now - seen.last;
        seen.longest_gap = seen.longest_gap.max(gap);
        seen.last = now;
        seen.latencies_us.push((now - since).as_micros() as u32);
    }
}

/// Each ordered pair of policies once, as a walk that begins with the first one.
fn walk() -> Vec<&'static str> {
    let mut left: Vec<Vec<usize>> = (0..POLICIES.len())
        .map(|from| (0..POLICIES.len()).filter(|&to| to != from).collect())
        .collect();
    let (mut stack, mut walk) = (vec![0], Vec::new());
    while let Some(&at) = stack.last() {
        match left[at].pop() {
            Some(to) => stack.push(to),
            None => walk.extend(stack.pop()),
        }
    }
    walk.into_iter().rev().map(|at| POLICIES[at]).collect()
}

fn percentile(sorted: &[u32], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    let at = (last as f64 * share).ceil() as usize;
    sorted.get(at).copied().map_or(0.0, f64::from)
}

/// Change the policy; the client writes only where it may.
fn set(node: &Node, shared: &Shared, policy: &str) -> Result<()> {
    if policy == READ_ONLY {
        shared.writes.store(false, Ordering::Relaxed);
    }
    node.command(&["volume", "set", "v", &format!("policy={policy}")])?;
    shared.writes.store(policy != READ_ONLY, Ordering::Relaxed);
    Ok(())
}

fn measure(node: &Node, shared: &Shared, time: Duration) -> Result<Findings> {
    let mut findings = Findings {
        steady: Vec::new(),
        changes: Vec::new(),
    };
    for policy in POLICIES {
        set(node, shared, policy)?;
        thread::sleep(time / 4);
        shared.begin();
        thread::sleep(time);
        let (gap, mut latencies) = shared.end()?;
        latencies.sort_unstable();
        findings.steady.push(Steady {
            policy,
            iops: latencies.len() as f64 / time.as_secs_f64(),
            p50_us: percentile(&latencies, 0.5),
            p9999_us: percentile(&latencies, 0.9999),
            longest_gap_ms: gap.as_secs_f64() * 1e3,
        });
    }
    let walk = walk();
    set(node, shared, walk[0])?;
    for pair in walk.windows(2) {
        thread::sleep(time / 2);
        shared.begin();
        let begun = Instant::now();
        set(node, shared, pair[1])?;
        let took = begun.elapsed();
        thread::sleep(AFTER);
        let (gap, _) = shared.end()?;
        findings.changes.push(Change {
            from: pair[0],
            to: pair[1],
            longest_gap_ms: gap.as_secs_f64() * 1e3,
            took_ms: took.as_secs_f64() * 1e3,
        });
    }
    Ok(findings)
}

fn table(findings: &Findings) -> String {
    let mut text =
        String::from("policy          requests/s     p50 µs  p99.99 µs  longest gap ms\n");
    for steady in &findings.steady {
        let _ = writeln!(
            text,
            "{:<15} {:>10.0} {:>10.0} {:>10.0} {:>15.1}",
            steady.policy, steady.iops, steady.p50_us, steady.p9999_us, steady.longest_gap_ms
        );
    }
    text += "\nchange                            longest gap ms   in effect after ms\n";
    for change in &findings.changes {
        let _ = writeln!(
            text,
            "{:<33} {:>14.1} {:>20.0}",
            format!("{} to {}", change.from, change.to),
            change.longest_gap_ms,
            change.took_ms
        );
    }
    let gaps = findings.changes.iter().map(|change| change.longest_gap_ms);
    let longest = gaps.fold(0.0, f64::max);
    let _ = writeln!(
        text,
        "\nlongest gap of any change: {longest:.1} ms (at most {GAP_MAX_MS:.0}, meant to be {GAP_AIM_MS:.0}): {}",
        if longest <= GAP_MAX_MS {
            "held"
        } else {
            "MISSED"
        }
    );
    text
}

/// Measure every policy and every change.
pub fn run(options: &Options) -> Result<()> {
    let results = Directory::create(&options.places.results)?;
    let directory = options.places.data.join("policies");
    fs::create_dir_all(&directory).context(directory.display())?;
    let node = Node::start(&options.places.hdcs, &directory.join("node"), None)?;
    let image = directory.join("backend.img");
    node.create(&VolumeOptions {
        name: "v".into(),
        bytes: DISK_BYTES,
        log_bytes: LOG_BYTES,
        persist: "on-write",
        backend: Some(format!("file:{}", image.display())),
    })?;
    let (sender, receiver, _) = nbd::connect(&node.socket(), "v")?;
    let shared = Shared {
        seen: Mutex::new(Seen {
            last: Instant::now(),
            longest_gap: Duration::ZERO,
            latencies_us: Vec::new(),
            failed: None,
        }),
        writes: AtomicBool::new(true),
        ended: AtomicBool::new(false),
    };
    let seconds = if options.quick { 1 } else { options.seconds };
    let findings = thread::scope(|scope| {
        scope.spawn(|| {
            if let Err(failure) = client(sender, receiver, &shared) {
                shared.seen().failed = Some(format!("the client: {failure}"));
            }
        });
        let findings = measure(&node, &shared, Duration::from_secs(seconds));
        shared.ended.store(true, Ordering::Relaxed);
        findings
    })?;
    node.stop()?;
    fs::remove_dir_all(&directory).context(directory.display())?;
    results.report(&table(&findings), &findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn walk_takes_each_ordered_pair_once() {
        let walk = walk();
        let mut pairs: Vec<_> = walk.windows(2).map(|pair| (pair[0], pair[1])).collect();
        pairs.sort_unstable();
        pairs.dedup();
        assert_eq!((walk.len(), pairs.len()), (21, 20));
        assert!(pairs.iter().all(|(from, to)| from != to));
    }

    #[test]
    fn percentile_is_of_sorted_values() {
        let values: Vec<u32> = (0..=10_000).collect();
        assert!((percentile(&values, 0.5) - 5000.0).abs() < 0.5);
        assert!((percentile(&values, 0.9999) - 9999.0).abs() < 0.5);
        assert!((percentile(&[], 0.5) - 0.0).abs() < 0.5);
    }
}
