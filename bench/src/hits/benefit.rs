//! What it gains to weigh blocks by what reading them again costs: two volumes, one on a faster and one on a
//! slower backend, share one tier of the cache as it ships.
//!
//! Nothing is measured but hits; times are made up, by a seeded clock. A backend's read takes half to one and a
//! half of its mean. "Best fixed content" is what a cache would reach that knew beforehand how often each block is
//! read, and kept those that save most: nothing that has to learn gets there, unless what is read moves.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;

use fastrand::Rng;
use hdcs_core::base::io::{BlockKey, Nanos};
use hdcs_core::cache::Tiering;
use serde::Serialize;

use super::policy::Tier;
use super::policy::shipped::Shipped;
use super::policy::shipped_ssd::ShippedSsd;
use super::trace::{self, BLOCKS};
use crate::failure::Result;
use crate::results::Directory;

/// The cache, in percent of the two volumes together.
const PERCENT: usize = 10;
/// What a hit takes, in DRAM and on the SSD.
const DRAM_HIT: Nanos = Nanos::from_micros(2);
const SSD_HIT: Nanos = Nanos::from_micros(100);

/// A read: the volume, and its block.
type Read = (u32, u64);

/// What two volumes read.
struct Mix {
    name: &'static str,
    reads: Vec<Read>,
}

/// Mean reads of the two backends.
struct Backends {
    name: &'static str,
    cost: [Nanos; 2],
}

const BACKENDS: [Backends; 3] = [
    Backends {
        name: "0.3 ms, 20 ms",
        cost: [Nanos::from_micros(300), Nanos::from_millis(20)],
    },
    Backends {
        name: "0.5 ms, 3 ms",
        cost: [Nanos::from_micros(500), Nanos::from_millis(3)],
    },
    Backends {
        name: "3 ms, 3 ms",
        cost: [Nanos::from_millis(3), Nanos::from_millis(3)],
    },
];

/// What came of one mix, before two backends, in one tier.
#[derive(Debug, Serialize)]
pub struct Row {
    mix: &'static str,
    backends: &'static str,
    tier: &'static str,
    /// By recency, and by benefit.
    found: [Found; 2],
    /// Mean time of a read with the best fixed content.
    best_fixed_ms: f64,
}

/// What came of one policy.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Found {
    mean_ms: f64,
    /// Hits of each volume in percent of its reads.
    hits: [f64; 2],
}

/// Run all of it.
pub fn run(requests: usize, results: &Path) -> Result<()> {
    let mut rows = Vec::new();
    for mix in mixes(requests) {
        for backends in &BACKENDS {
            eprintln!("bench: {}, {}", mix.name, backends.name);
            rows.extend(["DRAM", "SSD"].map(|tier| row(&mix, backends, tier)));
        }
    }
    let results = Directory::create(results)?;
    results.report(&table(&rows), &rows)
}

fn row(mix: &Mix, backends: &Backends, tier: &'static str) -> Row {
    let size = 2 * BLOCKS * PERCENT / 100;
    let hit = if tier == "DRAM" { DRAM_HIT } else { SSD_HIT };
    let found = [Tiering::Recency, Tiering::Benefit].map(|tiering| {
        let mut made: Box<dyn Tier> = match tier {
            "DRAM" => Box::new(Shipped::new(size)),
            _ => Box::new(ShippedSsd::new(size)),
        };
        made.cache().set_tiering(tiering);
        replay(&mut *made, &mix.reads, backends, hit)
    });
    Row {
        mix: mix.name,
        backends: backends.name,
        tier,
        found,
        best_fixed_ms: best_fixed_ms(&mix.reads, backends, hit, size),
    }
}

fn replay(tier: &mut dyn Tier, reads: &[Read], backends: &Backends, hit: Nanos) -> Found {
    let mut clock = Rng::with_seed(20_261_122);
    let (mut time, mut of_volume, mut hits) = (0, [0u64; 2], [0u64; 2]);
    for &(volume, block) in reads {
        let index = volume as usize - 1;
        of_volume[index] += 1;
        let is_hit = tier.read(volume, block);
        hits[index] += u64::from(is_hit);
        let key = BlockKey::new(volume, block);
        if is_hit {
            time += hit.0;
            if hit == SSD_HIT {
                tier.cache().note_ssd_hit(key, hit);
            }
        } else {
            let mean = backends.cost[index].0;
            let took = Nanos(clock.u64(mean / 2..=mean * 3 / 2));
            time += took.0;
            tier.cache().note_miss(key, 1, took);
        }
    }
    let percent = |index: usize| 100.0 * hits[index] as f64 / of_volume[index].max(1) as f64;
    Found {
        mean_ms: time as f64 / reads.len() as f64 / 1e6,
        hits: [percent(0), percent(1)],
    }
}

fn best_fixed_ms(reads: &[Read], backends: &Backends, hit: Nanos, size: usize) -> f64 {
    let mut counts: HashMap<Read, u64> = HashMap::new();
    for read in reads {
        *counts.entry(*read).or_default() += 1;
    }
    let saved = |volume: u32| backends.cost[volume as usize - 1].0.saturating_sub(hit.0);
    let mut savings: Vec<u64> = counts
        .iter()
        .map(|(&(volume, _), &count)| count * saved(volume))
        .collect();
    savings.sort_unstable_by(|a, b| b.cmp(a));
    let all: u64 = reads
        .iter()
        .map(|&(volume, _)| backends.cost[volume as usize - 1].0)
        .sum();
    let kept: u64 = savings.iter().take(size).sum();
    (all - kept) as f64 / reads.len() as f64 / 1e6
}

/// The models of the other table, two by two: the first volume is on the faster backend.
fn mixes(requests: usize) -> Vec<Mix> {
    let models = trace::models(requests);
    let of = |name: &str| {
        let found = models.iter().find(|trace| trace.name == name);
        &found.expect("a model has this name").blocks
    };
    let mix = |name, faster: &[u64], slower: &[u64], slower_percent| {
        let mut random = Rng::with_seed(20_261_123);
        let (mut faster, mut slower) = (faster.iter(), slower.iter());
        let reads = (0..requests).map_while(|_| {
            if random.u32(..100) < slower_percent {
                slower.next().map(|&block| (2, block))
            } else {
                faster.next().map(|&block| (1, block))
            }
        });
        Mix {
            name,
            reads: reads.collect(),
        }
    };
    vec![
        mix("zipf 0.9 and zipf 0.9", of("zipf 0.9"), of("zipf 0.9"), 50),
        mix(
            "zipf 1.2, and one read in ten zipf 0.9",
            of("zipf 1.2"),
            of("zipf 0.9"),
            10,
        ),
        mix(
            "server and virtual disk",
            of("server"),
            of("virtual disk"),
            50,
        ),
        mix(
            "zipf 1.2, and zipf 0.9 + scans",
            of("zipf 1.2"),
            of("zipf 0.9 + scans"),
            50,
        ),
    ]
}

fn table(rows: &[Row]) -> String {
    let mut out = String::from(
        "| reads of the faster and the slower volume | backends | tier | mean by recency | by benefit | | \
         hits by recency | by benefit | best fixed content |\n|---|---|---|---|---|---|---|---|---|",
    );
    for row in rows {
        let [recency, benefit] = row.found;
        let hits = |found: Found| format!("{:.1}, {:.1}", found.hits[0], found.hits[1]);
        let _ = write!(
            out,
            "\n| {} | {} | {} | {:.3} ms | {:.3} ms | {:+.1} % | {} | {} | {:.3} ms |",
            row.mix,
            row.backends,
            row.tier,
            recency.mean_ms,
            benefit.mean_ms,
            100.0 * (benefit.mean_ms / recency.mean_ms - 1.0),
            hits(recency),
            hits(benefit),
            row.best_fixed_ms,
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benefit_is_faster_before_unequal_backends_and_the_same_before_equal_ones() {
        for (number, mix) in mixes(100_000).iter().enumerate() {
            // Of two volumes that are read alike it is much faster; with few reads, or scans, by chance a little slower.
            let most = if number == 0 { 0.96 } else { 1.01 };
            for tier in ["DRAM", "SSD"] {
                let [recency, benefit] = row(mix, &BACKENDS[0], tier).found;
                let share = benefit.mean_ms / recency.mean_ms;
                assert!(share < most, "{}, {tier}: {share}", mix.name);
                let [recency, benefit] = row(mix, &BACKENDS[2], tier).found;
                let pairs = recency.hits.iter().zip(benefit.hits);
                for (before, after) in pairs {
                    assert!((before - after).abs() < 0.1, "{}, {tier}", mix.name);
                }
            }
        }
    }
}
