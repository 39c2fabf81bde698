//! `hdcs-bench qos`: a volume with a reservation beside four noisy neighbours, shares by weight, and how
//! close limits are kept.

use std::fmt::Write as _;

use serde::Serialize;

use super::{DISK_BYTES, Neighbours, Options};
use crate::bars::{Bar, list, median};
use crate::failure::Result;
use crate::fio::Load;
use crate::results::Directory;

/// What is reserved, and asked for: 4k writes a second.
const RESERVED: u32 = 4000;
/// The neighbours, `v1` and so on; `v0` has the reservation.
const NEIGHBOURS: u32 = 4;
/// Requests under way of a client that asks for as much as it gets.
const DEPTH: u32 = 32;
/// Weights of `v0`, `v1`, `v2`.
const WEIGHTS: [u32; 3] = [100, 200, 400];
/// Limits of requests and of MiB a second.
const IOPS_MAX: u32 = 2000;
const BANDWIDTH_MAX_MIB_S: u32 = 40;

/// The volume with the reservation in one run.
#[derive(Debug, Serialize)]
struct Guest {
    repetition: u32,
    neighbours: &'static str,
    reserved: bool,
    iops: f64,
    p99_us: f64,
    /// p99 by that of the run alone, of the same repetition.
    p99_ratio: f64,
    /// What the neighbours got, in MB/s.
    others_mb_s: f64,
}

/// Everything that was found.
#[derive(Debug, Default, Serialize)]
struct Findings {
    guests: Vec<Guest>,
    /// Share of each volume by its weight's, of each repetition.
    shares: Vec<[f64; 3]>,
    /// Requests, and bytes, by what is allowed.
    limits: Vec<[f64; 2]>,
}

/// Run it.
pub fn run(options: &Options) -> Result<()> {
    let results = Directory::create(&options.places.results)?;
    let mut nodes = Neighbours::up(options, NEIGHBOURS + 1, &results)?;
    let mut findings = Findings::default();
    for repetition in 0..options.repetitions() {
        reservation(options, &mut nodes, repetition, &mut findings)?;
        findings.shares.push(shares(options, &mut nodes)?);
        findings.limits.push(limits(options, &mut nodes)?);
    }
    nodes.node.stop()?;
    results.report(&render(&findings), &findings)
}

fn noise(options: &Options, volume: u32, block_bytes: u64) -> Load {
    Load {
        block_bytes,
        depth: DEPTH,
        seconds: Some(options.seconds()),
        seed: u64::from(volume + 1),
        ..Load::random("randwrite", DISK_BYTES)
    }
}

fn reservation(
    options: &Options,
    nodes: &mut Neighbours<'_>,
    repetition: u32,
    findings: &mut Findings,
) -> Result<()> {
    let paced = Load {
        rate: Some(RESERVED),
        ..noise(options, 0, 4096)
    };
    let mut alone_us = 0.0;
    for (neighbours, block_bytes, reserved) in [
        ("none", 0, true),
        ("4k", 4096, true),
        ("64k", 65536, true),
        ("4k", 4096, false),
        ("64k", 65536, false),
    ] {
        let iops_min = if reserved { RESERVED } else { 0 };
        nodes.set(0, &[&format!("iops_min={iops_min}")])?;
        let mut loads = vec![(0, paced.clone())];
        if block_bytes > 0 {
            let noise = |volume| (volume, noise(options, volume, block_bytes));
            loads.extend((1..=NEIGHBOURS).map(noise));
        }
        let word = if reserved { "reserved" } else { "plain" };
        let outcomes = nodes.together(&format!("{word}-beside-{neighbours}"), loads)?;
        let p99_us = outcomes[0].latency.p99;
        if neighbours == "none" {
            alone_us = p99_us;
        }
        let others = outcomes[1..].iter().map(|one| one.iops).sum::<f64>();
        let one = Guest {
            repetition,
            neighbours,
            reserved,
            iops: outcomes[0].iops,
            p99_us,
            p99_ratio: p99_us / alone_us,
            others_mb_s: others * block_bytes as f64 / 1e6,
        };
        eprintln!("bench: {one:?}");
        findings.guests.push(one);
        nodes.settle(NEIGHBOURS + 1)?;
    }
    nodes.set(0, &["iops_min=0"])
}

/// Shares of three volumes that all want everything, by those of their weights. Large requests: with small
/// ones it is the clients' processors that say how much each gets.
fn shares(options: &Options, nodes: &mut Neighbours<'_>) -> Result<[f64; 3]> {
    let mut loads = Vec::new();
    for (volume, weight) in (0..).zip(WEIGHTS) {
        nodes.set(volume, &[&format!("qos_weight={weight}")])?;
        loads.push((volume, noise(options, volume, 64 << 10)));
    }
    let outcomes = nodes.together("weights", loads)?;
    let total: f64 = outcomes.iter().map(|one| one.iops).sum();
    let weights = f64::from(WEIGHTS.iter().sum::<u32>());
    let mut shares = [0.0; 3];
    for (volume, weight) in WEIGHTS.into_iter().enumerate() {
        shares[volume] = outcomes[volume].iops / total * weights / f64::from(weight);
        nodes.set(volume as u32, &["qos_weight=0"])?;
    }
    eprintln!("bench: shares by weight {shares:?} of {total:.0} IOPS");
    nodes.settle(NEIGHBOURS + 1)?;
    Ok(shares)
}

/// What limited volumes reach, by their limits.
fn limits(options: &Options, nodes: &mut Neighbours<'_>) -> Result<[f64; 2]> {
    nodes.set(0, &[&format!("iops_max={IOPS_MAX}")])?;
    nodes.set(1, &[&format!("bandwidth_max_mib_s={BANDWIDTH_MAX_MIB_S}")])?;
    let loads = [
        (0, noise(options, 0, 4096)),
        (1, noise(options, 1, 64 << 10)),
    ];
    let outcomes = nodes.together("limits", loads.into())?;
    nodes.set(0, &["iops_max=0"])?;
    nodes.set(1, &["bandwidth_max_mib_s=0"])?;
    let bytes = outcomes[1].iops * 65536.0;
    let found = [
        outcomes[0].iops / f64::from(IOPS_MAX),
        bytes / (f64::from(BANDWIDTH_MAX_MIB_S) * 1_048_576.0),
    ];
    eprintln!("bench: limits kept to {found:?}");
    nodes.settle(NEIGHBOURS + 1)?;
    Ok(found)
}

fn render(findings: &Findings) -> String {
    let of = |neighbours: &str, reserved: bool, value: fn(&Guest) -> f64| {
        let runs = findings.guests.iter();
        median(
            runs.filter(|one| one.neighbours == neighbours && one.reserved == reserved)
                .map(value),
        )
    };
    let mut out = format!(
        "4k random write, {RESERVED} a second, beside {NEIGHBOURS} volumes with random writes at depth {DEPTH} \
         (medians)\n"
    );
    let _ = writeln!(
        out,
        "  {:<12} {:<12} {:>8} {:>8} {:>10} {:>12}",
        "neighbours", "reserved", "IOPS", "p99 µs", "p99 ratio", "others MB/s"
    );
    for (neighbours, reserved) in [
        ("none", true),
        ("4k", true),
        ("64k", true),
        ("4k", false),
        ("64k", false),
    ] {
        let _ = writeln!(
            out,
            "  {neighbours:<12} {:<12} {:>8.0} {:>8.0} {:>10.2} {:>12.0}",
            if reserved { "yes" } else { "no" },
            of(neighbours, reserved, |one| one.iops),
            of(neighbours, reserved, |one| one.p99_us),
            of(neighbours, reserved, |one| one.p99_ratio),
            of(neighbours, reserved, |one| one.others_mb_s),
        );
    }
    let mut bars = Vec::new();
    for neighbours in ["4k", "64k"] {
        let iops = of(neighbours, true, |one| one.iops) / f64::from(RESERVED);
        bars.push(Bar::at_least(
            format!("reserved volume beside {neighbours}, IOPS by reservation"),
            Some(iops),
            0.95,
            None,
        ));
        bars.push(Bar::at_most(
            format!("reserved volume beside {neighbours}, p99 by p99 alone"),
            Some(of(neighbours, true, |one| one.p99_ratio)),
            2.0,
            None,
        ));
    }
    for (volume, weight) in WEIGHTS.into_iter().enumerate() {
        let shares = findings.shares.iter().map(|shares| shares[volume]);
        let _ = writeln!(
            out,
            "share of weight {weight}, by its due: {:.3}",
            median(shares)
        );
    }
    for (kind, what) in ["requests", "bytes"].into_iter().enumerate() {
        let limits = findings.limits.iter().map(|limits| limits[kind]);
        bars.push(Bar::at_most(
            format!("{what} a second by their limit"),
            Some(median(limits)),
            1.02,
            None,
        ));
    }
    out.push('\n');
    list(&mut out, "What it must reach", &bars);
    out
}
