//! Tables of a run before a store, and what it had to reach.

use std::fmt::Write as _;

use super::peers::Peer;
use super::requests::{Requests, for_each_gib};
use super::{Findings, Profile, Sample, Store, profiles};
use crate::bars::{Bar, list, median, ratio_within};

/// The rate that is asked for, less what fio's own pacing leaves out.
const PACED_IOPS_MIN: f64 = 3980.0;

impl Findings {
    fn values(&self, profile: &str, peer: Peer, value: impl Fn(&Sample) -> f64) -> Vec<(u32, f64)> {
        self.samples
            .iter()
            .filter(|s| s.profile == profile && s.peer == peer.name(self.store))
            .map(|s| (s.repetition, value(s)))
            .collect()
    }

    fn median_of(&self, profile: &str, peer: Peer, value: impl Fn(&Sample) -> f64) -> Option<f64> {
        let values = self.values(profile, peer, value);
        (!values.is_empty()).then(|| median(values.into_iter().map(|(_, value)| value)))
    }

    /// HDCS before the store, as `peer`, by another peer.
    fn ratio(
        &self,
        profile: &str,
        peer: Peer,
        other: Peer,
        value: impl Fn(&Sample) -> f64,
    ) -> Option<f64> {
        ratio_within(
            &self.values(profile, peer, &value),
            &self.values(profile, other, &value),
        )
    }

    /// What writes must reach, for the peer that treats them as `how` says.
    fn write_bars(&self, peer: Peer, how: &str) -> Vec<Bar> {
        let iops = |s: &Sample| s.outcome.iops;
        let direct = |profile| self.ratio(profile, peer, Peer::Direct, iops);
        let device = |value: fn(&Sample) -> f64| self.ratio("paced", peer, Peer::Device, value);
        let named = |what: &str| format!("{how}, {what}");
        let (burst, sustained) = match self.store {
            Store::Ceph => ((15.0, 30.0), (1.3, Some(2.0))),
            Store::S3 | Store::Hdfs => ((12.0, 20.0), (1.0, None)),
        };
        vec![
            Bar::at_least(
                named("randwrite QD32, log takes the burst / direct, IOPS"),
                direct("burst"),
                burst.0,
                Some(burst.1),
            ),
            Bar::at_least(
                named("randwrite QD32, log overrun / direct, IOPS"),
                direct("sustained"),
                sustained.0,
                sustained.1,
            ),
            Bar::at_least(
                named("zipf 1.2 QD32, log overrun / direct, IOPS"),
                direct("zipf"),
                5.0,
                Some(10.0),
            ),
            Bar::at_least(
                named("4000 IOPS, sync every 32: IOPS reached"),
                self.median_of("paced", peer, iops),
                PACED_IOPS_MIN,
                None,
            ),
            Bar::at_most(
                named("4000 IOPS, sync every 32: mean / device"),
                device(|s| s.outcome.latency.mean),
                1.5,
                Some(1.1),
            ),
            Bar::at_most(
                named("4000 IOPS, sync every 32: p99 / device"),
                device(|s| s.outcome.latency.p99),
                3.0,
                Some(1.5),
            ),
            Bar::at_most(
                named("4000 IOPS, sync every 32: p99.99 / device"),
                device(|s| s.outcome.latency.p9999),
                1.5,
                Some(1.0),
            ),
            Bar::at_most(
                named("4000 IOPS, sync every 32: mean sync, µs"),
                self.median_of("paced", peer, |s| s.outcome.sync_mean.unwrap_or(0.0)),
                300.0,
                Some(150.0),
            ),
        ]
    }

    fn bars(&self) -> Vec<Bar> {
        let iops = |s: &Sample| s.outcome.iops;
        let mut bars = self.write_bars(Peer::Hdcs, "on-write");
        bars.extend(self.write_bars(Peer::OnFlush, "on-flush"));
        let cached = match self.store {
            Store::Ceph => (15.0, 25.0),
            Store::S3 | Store::Hdfs => (5.0, 7.0),
        };
        bars.push(Bar::at_least(
            "randread QD32, cached / direct, IOPS",
            self.ratio("randread", Peer::Hdcs, Peer::Direct, iops),
            cached.0,
            Some(cached.1),
        ));
        bars.push(Bar::at_least(
            "randread QD32, cached / node over a file, IOPS",
            self.ratio("randread", Peer::Hdcs, Peer::File, iops),
            0.9,
            None,
        ));
        if self.store.has_objects() {
            bars.push(Bar::at_most(
                "4k random writes, log overrun: PUTs for a GiB",
                self.median_of("sustained", Peer::Hdcs, |s| {
                    s.requests.map_or(f64::INFINITY, |requests| {
                        for_each_gib(requests.puts, s.client_bytes)
                    })
                }),
                300.0,
                Some(150.0),
            ));
        }
        bars
    }

    /// Who ran a profile.
    fn peers_of(&self, profile: &Profile) -> Vec<Peer> {
        let ran = |peer: &Peer| {
            let name = peer.name(self.store);
            let is_it = |s: &Sample| s.profile == profile.name && s.peer == name;
            self.samples.iter().any(is_it)
        };
        Peer::ALL.into_iter().filter(ran).collect()
    }
}

/// One of the volume's counters at the end of the run, in MiB.
fn counted_mib(sample: &Sample, counter: &str) -> f64 {
    sample.volume["counters"][counter].as_f64().unwrap_or(0.0) / f64::from(1 << 20)
}

/// One run in one line.
pub fn one_line(sample: &Sample) -> String {
    let latency = sample.outcome.latency;
    format!(
        "{:<10} {:<16} #{} {:>8.0} IOPS  p50 {:>6.0} p99 {:>6.0} p99.99 {:>7.0} µs  CPU {:>5.1}+{:.1}+{:.1} µs",
        sample.profile,
        sample.peer,
        sample.repetition,
        sample.outcome.iops,
        latency.p50,
        latency.p99,
        latency.p9999,
        sample.outcome.client_cpu_us,
        sample.node_cpu_us,
        sample.store_cpu_us
    )
}

/// A table under a title: its columns' heads, and rows of a name and cells.
fn table(out: &mut String, title: &str, heads: &[&str], rows: &[(&str, Vec<String>)]) {
    let _ = writeln!(out, "{title}");
    let mut line = |name: &str, cells: &[String]| {
        let _ = write!(out, "  {name:<16}");
        for cell in cells {
            let _ = write!(out, " {cell:>9}");
        }
        out.push('\n');
    };
    let heads: Vec<String> = heads.iter().map(ToString::to_string).collect();
    line("", &heads);
    for (name, cells) in rows {
        line(name, cells);
    }
    out.push('\n');
}

/// How fast a profile was on each peer.
fn speed(out: &mut String, findings: &Findings, profile: &Profile) {
    let cells = |peer: Peer| {
        let of = |value: &dyn Fn(&Sample) -> f64| {
            findings.median_of(profile.name, peer, value).unwrap_or(0.0)
        };
        let sync = of(&|s| s.outcome.sync_mean.unwrap_or(0.0));
        vec![
            format!("{:.0}", of(&|s| s.outcome.iops)),
            format!("{:.0}", of(&|s| s.outcome.latency.mean)),
            format!("{:.0}", of(&|s| s.outcome.latency.p50)),
            format!("{:.0}", of(&|s| s.outcome.latency.p99)),
            format!("{:.0}", of(&|s| s.outcome.latency.p9999)),
            format!("{:.1}", of(&|s| s.outcome.client_cpu_us)),
            format!("{:.1}", of(&|s| s.node_cpu_us)),
            format!("{:.1}", of(&|s| s.store_cpu_us)),
            format!("{:.0}", of(&|s| counted_mib(s, "write_bytes"))),
            format!("{:.0}", of(&|s| counted_mib(s, "destaged_bytes"))),
            format!("{:.0}", of(&|s| counted_mib(s, "coalesced_bytes"))),
            if sync > 0.0 {
                format!("{sync:.0}")
            } else {
                "-".into()
            },
        ]
    };
    let peers = findings.peers_of(profile);
    let rows: Vec<_> = peers
        .into_iter()
        .map(|peer| (peer.name(findings.store), cells(peer)))
        .collect();
    let title = format!(
        "{} (medians; latency in µs, CPU in µs for one request, volume in MiB)",
        profile.title
    );
    table(out, &title, &SPEED_HEADS, &rows);
}

/// What a profile asked of a store with objects, for each GiB that clients moved.
fn costs(out: &mut String, findings: &Findings, profile: &Profile) {
    let row = |peer: Peer| {
        let of = |count: fn(&Requests) -> u64| {
            let value = |s: &Sample| {
                let counted = s.requests.as_ref().map_or(0, count);
                for_each_gib(counted, s.client_bytes)
            };
            findings.median_of(profile.name, peer, value).unwrap_or(0.0)
        };
        let a_byte = |count| format!("{:.2}", of(count) / f64::from(1 << 30));
        let whole = |count| format!("{:.0}", of(count));
        vec![
            whole(|r| r.puts),
            whole(|r| r.puts_data),
            whole(|r| r.puts_map),
            whole(|r| r.puts_manifest),
            whole(|r| r.gets),
            whole(|r| r.deletes),
            whole(|r| r.lists),
            a_byte(|r| r.put_bytes),
            a_byte(|r| r.get_bytes),
        ]
    };
    let has_counted = |peer: &Peer| {
        let name = peer.name(findings.store);
        let counted =
            |s: &Sample| s.profile == profile.name && s.peer == name && s.requests.is_some();
        findings.samples.iter().any(counted)
    };
    let peers = findings.peers_of(profile).into_iter().filter(has_counted);
    let rows: Vec<_> = peers
        .map(|peer| (peer.name(findings.store), row(peer)))
        .collect();
    table(out, profile.title, &COST_HEADS, &rows);
}

/// The whole report.
pub fn render(findings: &Findings) -> String {
    let store = findings.store;
    let mut all = profiles(store);
    all.retain(|profile| !findings.peers_of(profile).is_empty());
    let mut out = String::new();
    if let Some(note) = store.direct_does() {
        let _ = writeln!(out, "{note}\n");
    }
    for profile in &all {
        speed(&mut out, findings, profile);
    }
    if !findings.durable_write_us.is_empty() {
        let micros = median(findings.durable_write_us.iter().copied());
        let _ = writeln!(
            out,
            "durable 4k write by fio (write, fdatasync): {micros:.0} µs\n"
        );
    }
    if store.has_objects() {
        let _ = writeln!(
            out,
            "Requests to {} for each GiB that clients moved, until the store had all of it; bytes put and got for a byte \
             moved\n",
            store.title()
        );
        for profile in &all {
            costs(&mut out, findings, profile);
        }
    }
    let title = format!(
        "What it must reach over NBD with {} behind (medians of ratios within a repetition)",
        store.title()
    );
    list(&mut out, &title, &findings.bars());
    out
}

/// Heads of the columns of speed.
const SPEED_HEADS: [&str; 12] = [
    "IOPS",
    "mean",
    "p50",
    "p99",
    "p99.99",
    "client",
    "node",
    "store",
    "written",
    "destaged",
    "coalesced",
    "sync",
];

/// Heads of the columns of costs.
const COST_HEADS: [&str; 9] = [
    "PUTs", "data", "map", "manifest", "GETs", "DELETEs", "LISTs", "put/byte", "got/byte",
];
