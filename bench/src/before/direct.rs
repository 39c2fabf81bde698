//! Load on a store by its own client, as fio loads a disk: the same depth, order, rate and end, the same
//! figures. What the store takes and how is its [`Lane`]'s.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastrand::Rng;
use tokio::runtime::{Builder, Runtime};

use crate::failure::{Context, Failure, Result};
use crate::fio::{Latency, Load, Outcome};
use crate::process;

/// What makes one request after another.
pub trait Lane: Send + Sized + 'static {
    /// Make the request about the block at `offset`, and wait for its end.
    fn request(&mut self, offset: u64) -> impl Future<Output = Result<()>> + Send;
    /// There are no more. Not measured.
    fn finish(self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }
}

/// Where the client runs: one thread, as in the node.
pub fn runtime() -> Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("a thread for the direct client")
}

/// Whether a load reads.
pub fn reads(load: &Load) -> bool {
    load.rw.ends_with("read")
}

/// Bytes that do not compress.
pub fn random(bytes: u64, seed: u64) -> Bytes {
    let mut random = Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(..))
        .take(bytes as usize)
        .collect()
}

/// What all lanes share.
struct Plan {
    load: Load,
    begin: Instant,
    requests_max: u64,
    /// Requests that were begun.
    begun: AtomicU64,
    has_failed: AtomicBool,
}

impl Plan {
    fn new(load: &Load) -> Self {
        let blocks = |bytes: u64| bytes / load.block_bytes;
        Self {
            requests_max: match (load.bytes_max, load.seconds) {
                (Some(bytes), _) => blocks(bytes),
                (None, Some(_)) => u64::MAX,
                (None, None) => blocks(load.span_bytes),
            },
            load: load.clone(),
            begin: Instant::now(),
            begun: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
        }
    }

    /// The number of the next request, unless that was the last one.
    fn next(&self) -> Option<u64> {
        let late = |seconds: u32| self.begin.elapsed() >= Duration::from_secs(seconds.into());
        if self.load.seconds.is_some_and(late) || self.has_failed.load(Ordering::Relaxed) {
            return None;
        }
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        (number < self.requests_max).then_some(number)
    }

    /// When it is due.
    fn due(&self, number: u64) -> Option<Instant> {
        let rate = self.load.rate?;
        Some(self.begin + Duration::from_secs_f64(number as f64 / f64::from(rate)))
    }

    /// What it is about.
    fn offset(&self, number: u64, random: &mut Rng) -> u64 {
        let blocks = (self.load.span_bytes / self.load.block_bytes).max(1);
        let block = match (self.load.rw.starts_with("rand"), self.load.zipf) {
            (false, _) => number % blocks,
            (true, None) => random.u64(..blocks),
            (true, Some(theta)) => zipf(random.f64(), blocks, theta),
        };
        block * self.load.block_bytes
    }
}

/// A rank below `count`, distributed as Zipf's law with an exponent above 1 says; `draw` is uniform in 0..1.
/// This is the inverse of the continuous distribution, close enough for a load.
fn zipf(draw: f64, count: u64, theta: f64) -> u64 {
    let exponent = 1.0 - theta;
    let tail = (count as f64 + 1.0).powf(exponent);
    let rank = (1.0 - draw * (1.0 - tail)).powf(1.0 / exponent);
    ((rank - 1.0) as u64).min(count - 1)
}

/// What one lane did: the latency of each request, and when the last one ended.
type Ran = (Vec<Duration>, Instant);

async fn drive<L: Lane>(mut lane: L, index: u64, plan: Arc<Plan>) -> Result<Ran> {
    let mut random = Rng::with_seed(plan.load.seed << 16 | index);
    let (mut latencies, mut end) = (Vec::new(), plan.begin);
    while let Some(number) = plan.next() {
        if let Some(due) = plan.due(number) {
            tokio::time::sleep_until(due.into()).await;
        }
        let offset = plan.offset(number, &mut random);
        let begin = Instant::now();
        if let Err(failure) = lane.request(offset).await {
            plan.has_failed.store(true, Ordering::Relaxed);
            return Err(failure);
        }
        end = Instant::now();
        latencies.push(end - begin);
    }
    lane.finish().await?;
    Ok((latencies, end))
}

/// Run a load with as many requests in flight as there are lanes.
pub fn run<L: Lane>(runtime: &Runtime, load: &Load, lanes: Vec<L>, raw: &Path) -> Result<Outcome> {
    let cpu_before = process::own_cpu_us()?;
    let plan = Arc::new(Plan::new(load));
    let tasks: Vec<_> = (0..)
        .zip(lanes)
        .map(|(index, lane)| runtime.spawn(drive(lane, index, Arc::clone(&plan))))
        .collect();
    let mut ran = Vec::new();
    for task in tasks {
        ran.push(runtime.block_on(task).context("the direct client")??);
    }
    let cpu_us = process::own_cpu_us()? - cpu_before;
    let end = ran.iter().map(|(_, end)| *end).max();
    let seconds = end.map_or(0.0, |end| (end - plan.begin).as_secs_f64());
    let latencies = ran.into_iter().flat_map(|(latencies, _)| latencies);
    let outcome = outcome_of(latencies.collect(), seconds, cpu_us)?;
    let text = serde_json::to_string_pretty(&(load, &outcome)).context("results as JSON")?;
    std::fs::write(raw, text).context(raw.display())?;
    Ok(outcome)
}

fn outcome_of(mut latencies: Vec<Duration>, seconds: f64, cpu_us: f64) -> Result<Outcome> {
    latencies.sort_unstable();
    let requests = latencies.len();
    if requests == 0 {
        return Err(Failure::new("the direct client did nothing"));
    }
    let micros = |latency: Duration| latency.as_secs_f64() * 1e6;
    // The smallest that so many of a hundred requests did not exceed.
    let percentile = |percent: f64| {
        let rank = (percent / 100.0 * requests as f64).ceil() as usize;
        micros(latencies[rank.clamp(1, requests) - 1])
    };
    Ok(Outcome {
        iops: requests as f64 / seconds,
        requests: requests as u64,
        latency: Latency {
            mean: latencies.iter().copied().map(micros).sum::<f64>() / requests as f64,
            p50: percentile(50.0),
            p99: percentile(99.0),
            p999: percentile(99.9),
            p9999: percentile(99.99),
        },
        client_cpu_us: cpu_us / requests as f64,
        ..Outcome::default()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Notes what it is asked for, and fails at one offset.
    struct Noting(Arc<Mutex<Vec<u64>>>, Option<u64>);

    impl Lane for Noting {
        async fn request(&mut self, offset: u64) -> Result<()> {
            self.0.lock().unwrap().push(offset);
            match self.1 {
                Some(bad) if bad == offset => Err(Failure::new("a bad block")),
                _ => Ok(()),
            }
        }
    }

    fn ran(load: &Load, bad: Option<u64>) -> (Result<Outcome>, Vec<u64>) {
        let noted = Arc::default();
        let lanes = (0..load.depth)
            .map(|_| Noting(Arc::clone(&noted), bad))
            .collect();
        let raw = tempfile::NamedTempFile::new().unwrap();
        let outcome = run(&runtime().unwrap(), load, lanes, raw.path());
        let mut offsets = noted.lock().unwrap().clone();
        offsets.sort_unstable();
        (outcome, offsets)
    }

    #[test]
    fn direct_load_without_a_time_covers_the_range_once() {
        let load = Load {
            depth: 3,
            ..Load::random("write", 10 * 4096)
        };
        let (outcome, offsets) = ran(&load, None);
        assert_eq!(outcome.unwrap().requests, 10);
        let all: Vec<u64> = (0..10).map(|block| block * 4096).collect();
        assert_eq!(offsets, all);
    }

    #[test]
    fn direct_load_ends_with_its_bytes_and_stays_in_its_range() {
        for zipf in [None, Some(1.2)] {
            let load = Load {
                depth: 4,
                zipf,
                bytes_max: Some(1000 * 4096),
                ..Load::random("randwrite", 100 * 4096)
            };
            let (outcome, offsets) = ran(&load, None);
            assert_eq!(outcome.unwrap().requests, 1000);
            let inside = |offset: &u64| *offset < load.span_bytes && offset.is_multiple_of(4096);
            assert!(offsets.iter().all(inside));
            // A few blocks get most of it, if that is asked for.
            let first = offsets.iter().filter(|offset| **offset == 0).count();
            assert!(if zipf.is_some() {
                first > 100
            } else {
                first < 50
            });
        }
    }

    #[test]
    fn direct_load_that_fails_is_an_error() {
        let load = Load {
            depth: 2,
            ..Load::random("read", 1000 * 4096)
        };
        let (outcome, offsets) = ran(&load, Some(5 * 4096));
        assert!(outcome.unwrap_err().to_string().contains("a bad block"));
        assert!(offsets.len() < 1000);
    }

    #[test]
    fn percentiles_are_of_the_requests() {
        let latencies = (1..=100).map(Duration::from_micros).rev().collect();
        let outcome = outcome_of(latencies, 2.0, 500.0).unwrap();
        let close = |value: f64, expected: f64| (value - expected).abs() < 1e-6;
        assert!(close(outcome.iops, 50.0) && close(outcome.client_cpu_us, 5.0));
        assert!(close(outcome.latency.p50, 50.0) && close(outcome.latency.p99, 99.0));
        assert!(close(outcome.latency.p9999, 100.0) && close(outcome.latency.mean, 50.5));
    }
}
