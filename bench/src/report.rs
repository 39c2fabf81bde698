//! Tables of a comparison, and what it had to reach.

use std::fmt::Write as _;

use crate::bars::{Bar, list, median};
use crate::compare::{Findings, Sample};
use crate::cost::Cost;
use crate::peers::{Peer, Place};
use crate::performance;
use crate::profiles::{self, Profile};
use crate::rows::{self, Row, spread};

impl Findings {
    fn samples_of(&self, profile: &str, peer: Peer, place: Place) -> impl Iterator<Item = &Sample> {
        self.samples
            .iter()
            .filter(move |s| s.profile == profile && s.peer == peer.name() && s.place == place)
    }

    fn bars(&self) -> Vec<Bar> {
        let steady = |value: fn(&crate::steady::Steady) -> f64| {
            (!self.steady.is_empty()).then(|| median(self.steady.iter().map(value)))
        };
        let replay = (!self.replay.is_empty())
            .then(|| median(self.replay.iter().map(|r| r.restart_seconds)));
        let of_rows = rows::rows(self, Place::Disk);
        let mut bars: Vec<Bar> = of_rows.iter().map(Row::bar).collect();
        bars.extend([
            Bar::at_least(
                "steady state: slowest second / mean",
                steady(|s| s.slowest_ratio),
                0.5,
                None,
            ),
            Bar::at_most(
                "steady state: p99.99 / p50",
                steady(|s| s.tail_ratio),
                20.0,
                None,
            ),
            Bar::at_most("replay of a full 1 GiB log, seconds", replay, 2.0, None),
        ]);
        bars
    }
}

/// One run in one line.
pub fn one_line(sample: &Sample) -> String {
    let latency = sample.outcome.latency;
    format!(
        "{:<6} {:<21} {:<14} #{} {:>8.0} IOPS  p50 {:>6.0} p99 {:>6.0} p99.99 {:>7.0} µs  CPU {:>5.1}+{:<5.1} µs",
        sample.place.name(),
        sample.profile,
        sample.peer,
        sample.repetition,
        sample.outcome.iops,
        latency.p50,
        latency.p99,
        latency.p9999,
        sample.outcome.client_cpu_us,
        sample.server_cpu_us
    )
}

/// The whole report.
pub fn render(findings: &Findings) -> String {
    let mut out = String::new();
    for place in Place::ALL {
        for profile in profiles::all() {
            runs(&mut out, findings, &profile, place);
        }
    }
    if !findings.durable_write_us.is_empty() {
        let micros = median(findings.durable_write_us.iter().map(|(_, micros)| *micros));
        let _ = writeln!(
            out,
            "durable 4k write by fio (write, fdatasync): {micros:.0} µs\n"
        );
    }
    for steady in &findings.steady {
        let _ = writeln!(out, "{steady}");
    }
    for replay in &findings.replay {
        let _ = writeln!(out, "{replay}");
    }
    ratios(&mut out, findings);
    performance::stalls(&mut out, findings);
    let _ = writeln!(out);
    list(
        &mut out,
        "What it must reach (medians of ratios within a repetition)",
        &findings.bars(),
    );
    out
}

/// The runs of one profile.
fn runs(out: &mut String, findings: &Findings, profile: &Profile, place: Place) {
    let peers: Vec<Peer> = Peer::ALL
        .into_iter()
        .filter(|peer| {
            findings
                .samples_of(profile.name, *peer, place)
                .next()
                .is_some()
        })
        .collect();
    if peers.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "{}, {} (medians, IOPS with least and most; latency in µs, CPU in µs for one request)",
        profile.title,
        match place {
            Place::Disk => "on the disk",
            Place::Memory => "in memory",
        }
    );
    let _ = writeln!(
        out,
        "  {:<14} {:>9} {:>17} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>8} {:>8} {:>7}",
        "",
        "IOPS",
        "least–most",
        "mean",
        "p50",
        "p99",
        "p99.9",
        "p99.99",
        "client",
        "server",
        "settled",
        "RSS MiB",
        "sync"
    );
    for peer in peers {
        let of = |value: fn(&Sample) -> f64| {
            median(findings.samples_of(profile.name, peer, place).map(value))
        };
        let iops = findings.samples_of(profile.name, peer, place);
        let [iops, least, most] = spread(iops.map(|s| s.outcome.iops)).unwrap_or_default();
        let sync = of(|s| s.outcome.sync_mean.unwrap_or(0.0));
        let _ = writeln!(
            out,
            "  {:<14} {iops:>9.0} {:>17} {:>8.0} {:>8.0} {:>8.0} {:>8.0} {:>8.0} {:>7.1} {:>7.1} {:>8.1} {:>8.0} {:>7}",
            peer.name(),
            format!("{least:.0}–{most:.0}"),
            of(|s| s.outcome.latency.mean),
            of(|s| s.outcome.latency.p50),
            of(|s| s.outcome.latency.p99),
            of(|s| s.outcome.latency.p999),
            of(|s| s.outcome.latency.p9999),
            of(|s| s.outcome.client_cpu_us),
            of(|s| s.server_cpu_us),
            of(|s| s.server_cpu_settled_us),
            of(|s| s.server_rss_bytes as f64 / f64::from(1 << 20)),
            if sync > 0.0 {
                format!("{sync:.0}")
            } else {
                "-".into()
            },
        );
    }
    costs(out, findings, profile.name, place);
    out.push('\n');
}

/// Every ratio that was measured.
fn ratios(out: &mut String, findings: &Findings) {
    for place in Place::ALL {
        let measured = rows::rows(findings, place);
        let mut measured = measured
            .iter()
            .filter_map(|row| Some((row, row.spread()?)))
            .peekable();
        if measured.peek().is_none() {
            continue;
        }
        let _ = writeln!(out, "Ratios, {} (median, least, most)", place.name());
        for (row, [middle, least, most]) in measured {
            let _ = writeln!(
                out,
                "  {:<78} {middle:>7.2} {least:>7.2} {most:>7.2}",
                row.what
            );
        }
        out.push('\n');
    }
}

/// What a request cost each face of HDCS.
fn costs(out: &mut String, findings: &Findings, profile: &str, place: Place) {
    let mut has_title = false;
    for peer in Peer::ALL {
        let costs: Vec<Cost> = findings
            .samples_of(profile, peer, place)
            .filter_map(|sample| sample.cost)
            .collect();
        if costs.is_empty() {
            continue;
        }
        if !has_title {
            let _ = writeln!(
                out,
                "  {:<14} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>8} {:>7} {:>8} {:>7}",
                "for a request",
                "turns",
                "enters",
                "wakeups",
                "receives",
                "w./span",
                "spans",
                "open",
                "device",
                "send",
                "shard",
                "threads",
                "iou"
            );
            has_title = true;
        }
        let cost = Cost::median(&costs);
        let _ = writeln!(
            out,
            "  {:<14} {:>9.2} {:>8.2} {:>8.2} {:>8.2} {:>8.1} {:>8.2} {:>7.0} {:>7.0} {:>8.0} {:>7.1} {:>8.1} {:>7.1}",
            peer.name(),
            cost.turns,
            cost.enters,
            cost.wakeups,
            cost.receives,
            cost.span_writes,
            cost.spans_in_flight,
            cost.open_us,
            cost.device_us,
            cost.send_us,
            cost.shard_cpu_us,
            cost.threads_cpu_us,
            cost.workers_cpu_us,
        );
    }
}
