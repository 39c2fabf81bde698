//! Tables of a comparison, and what it had to reach.

use std::fmt::Write as _;

use crate::bars::{Bar, list, median, ratio_within};
use crate::compare::{Findings, Sample};
use crate::cost::Cost;
use crate::peers::Peer;
use crate::profiles;

impl Findings {
    fn samples_of(&self, profile: &str, peer: Peer) -> impl Iterator<Item = &Sample> {
        self.samples
            .iter()
            .filter(move |s| s.profile == profile && s.peer == peer.name())
    }

    fn median_of(&self, profile: &str, peer: Peer, value: impl Fn(&Sample) -> f64) -> Option<f64> {
        self.samples_of(profile, peer).next()?;
        Some(median(self.samples_of(profile, peer).map(value)))
    }

    /// Median over the repetitions of one peer's value by another's.
    fn ratio(
        &self,
        profile: &str,
        peers: [Peer; 2],
        value: impl Fn(&Sample) -> f64,
    ) -> Option<f64> {
        let [ours, theirs] = peers.map(|peer| -> Vec<(u32, f64)> {
            self.samples_of(profile, peer)
                .map(|sample| (sample.repetition, value(sample)))
                .collect()
        });
        ratio_within(&ours, &theirs)
    }

    /// Latency of a write by the sum of what it cannot do without: NBD, and a durable write.
    fn write_latency_ratio(&self) -> Option<f64> {
        let pairs: Vec<f64> = self
            .samples_of("randwrite-qd1", Peer::OnWrite)
            .filter_map(|ours| {
                let nbd = self
                    .samples_of("randwrite-qd1", Peer::Nbdkit)
                    .find(|s| s.repetition == ours.repetition)?;
                let durable = self.durable_write_us.get(ours.repetition as usize)?;
                Some(ours.outcome.latency.mean / (nbd.outcome.latency.mean + durable))
            })
            .collect();
        (!pairs.is_empty()).then(|| median(pairs))
    }

    fn bars(&self) -> Vec<Bar> {
        use Peer::{Device, DramHit, Nbdkit, OnWrite, Qemu, SsdHit};
        let iops = |s: &Sample| s.outcome.iops;
        let cpu = |s: &Sample| s.server_cpu_us;
        let steady = |value: fn(&crate::steady::Steady) -> f64| {
            (!self.steady.is_empty()).then(|| median(self.steady.iter().map(value)))
        };
        let replay = (!self.replay.is_empty())
            .then(|| median(self.replay.iter().map(|r| r.restart_seconds)));
        vec![
            Bar::at_least(
                "randwrite QD32 on-write / qemu-nbd, IOPS",
                self.ratio("randwrite-qd32", [OnWrite, Qemu], iops),
                2.0,
                None,
            ),
            Bar::at_least(
                "randwrite QD32 on-write / device floor, IOPS",
                self.ratio("randwrite-qd32", [OnWrite, Device], iops),
                0.7,
                Some(1.0),
            ),
            Bar::at_most(
                "randwrite QD1 on-write / (nbdkit + durable write), latency",
                self.write_latency_ratio(),
                1.5,
                Some(1.2),
            ),
            Bar::at_least(
                "randread QD32 DRAM hit / nbdkit, IOPS",
                self.ratio("randread-qd32", [DramHit, Nbdkit], iops),
                0.9,
                Some(1.2),
            ),
            Bar::at_least(
                "randread QD32 SSD hit / device floor, IOPS",
                self.ratio("randread-qd32", [SsdHit, Device], iops),
                0.7,
                Some(0.9),
            ),
            Bar::at_most(
                "randwrite QD32 on-write / nbdkit, server CPU",
                self.ratio("randwrite-qd32", [OnWrite, Nbdkit], cpu),
                2.0,
                Some(1.2),
            ),
            Bar::at_most(
                "randread QD32 DRAM hit / nbdkit, server CPU",
                self.ratio("randread-qd32", [DramHit, Nbdkit], cpu),
                1.3,
                Some(0.8),
            ),
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
        ]
    }
}

/// One run in one line.
pub fn one_line(sample: &Sample) -> String {
    let latency = sample.outcome.latency;
    format!(
        "{:<16} {:<14} #{} {:>8.0} IOPS  p50 {:>6.0} p99 {:>6.0} p99.99 {:>7.0} µs  CPU {:>5.1}+{:<5.1} µs",
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
    for profile in profiles::all() {
        let peers: Vec<Peer> = Peer::ALL
            .into_iter()
            .filter(|peer| findings.samples_of(profile.name, *peer).next().is_some())
            .collect();
        if peers.is_empty() {
            continue;
        }
        let of = |peer, value: &dyn Fn(&Sample) -> f64| {
            findings.median_of(profile.name, peer, value).unwrap_or(0.0)
        };
        let _ = writeln!(
            out,
            "{} (medians; latency in µs, CPU in µs for one request)",
            profile.title
        );
        let _ = writeln!(
            out,
            "  {:<14} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>8} {:>8} {:>7}",
            "",
            "IOPS",
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
            let sync = of(peer, &|s| s.outcome.sync_mean.unwrap_or(0.0));
            let _ = writeln!(
                out,
                "  {:<14} {:>9.0} {:>8.0} {:>8.0} {:>8.0} {:>8.0} {:>8.0} {:>7.1} {:>7.1} {:>8.1} {:>8.0} {:>7}",
                peer.name(),
                of(peer, &|s| s.outcome.iops),
                of(peer, &|s| s.outcome.latency.mean),
                of(peer, &|s| s.outcome.latency.p50),
                of(peer, &|s| s.outcome.latency.p99),
                of(peer, &|s| s.outcome.latency.p999),
                of(peer, &|s| s.outcome.latency.p9999),
                of(peer, &|s| s.outcome.client_cpu_us),
                of(peer, &|s| s.server_cpu_us),
                of(peer, &|s| s.server_cpu_settled_us),
                of(peer, &|s| s.server_rss_bytes as f64 / f64::from(1 << 20)),
                if sync > 0.0 {
                    format!("{sync:.0}")
                } else {
                    "-".into()
                },
            );
        }
        costs(&mut out, findings, profile.name);
        out.push('\n');
    }
    if !findings.durable_write_us.is_empty() {
        let micros = median(findings.durable_write_us.iter().copied());
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
    let _ = writeln!(out);
    list(
        &mut out,
        "What it must reach (medians of ratios within a repetition)",
        &findings.bars(),
    );
    out
}

/// What a request cost each face of HDCS.
fn costs(out: &mut String, findings: &Findings, profile: &str) {
    let mut has_title = false;
    for peer in Peer::ALL {
        let costs: Vec<Cost> = findings
            .samples_of(profile, peer)
            .filter_map(|sample| sample.cost)
            .collect();
        if costs.is_empty() {
            continue;
        }
        if !has_title {
            let _ = writeln!(
                out,
                "  {:<14} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>8} {:>8} {:>7}",
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
                "threads",
                "iou"
            );
            has_title = true;
        }
        let of = |value: fn(&Cost) -> f64| median(costs.iter().map(value));
        let _ = writeln!(
            out,
            "  {:<14} {:>9.2} {:>8.2} {:>8.2} {:>8.2} {:>8.1} {:>8.2} {:>7.0} {:>7.0} {:>8.0} {:>8.1} {:>7.1}",
            peer.name(),
            of(|c| c.turns),
            of(|c| c.enters),
            of(|c| c.wakeups),
            of(|c| c.receives),
            of(|c| c.span_writes),
            of(|c| c.spans_in_flight),
            of(|c| c.open_us),
            of(|c| c.device_us),
            of(|c| c.send_us),
            of(|c| c.threads_cpu_us),
            of(|c| c.workers_cpu_us),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fio::Outcome;

    fn sample(peer: Peer, repetition: u32, iops: f64) -> Sample {
        Sample {
            profile: "randwrite-qd32",
            peer: peer.name(),
            repetition,
            outcome: Outcome {
                iops,
                ..Outcome::default()
            },
            server_cpu_us: 1.0,
            server_cpu_settled_us: 1.0,
            server_rss_bytes: 0,
            cost: None,
            volume: None,
        }
    }

    #[test]
    fn ratio_is_formed_within_a_repetition() {
        // The machine is ten times slower in the second repetition; the ratio is the same.
        let findings = Findings {
            samples: vec![
                sample(Peer::OnWrite, 0, 200.0),
                sample(Peer::Qemu, 0, 100.0),
                sample(Peer::OnWrite, 1, 20.0),
                sample(Peer::Qemu, 1, 10.0),
            ],
            ..Findings::default()
        };
        let ratio = findings.ratio("randwrite-qd32", [Peer::OnWrite, Peer::Qemu], |s| {
            s.outcome.iops
        });
        assert!((ratio.unwrap() - 2.0).abs() < 1e-9);
        assert!(
            findings
                .ratio("randwrite-qd32", [Peer::OnWrite, Peer::Device], |s| s
                    .outcome
                    .iops)
                .is_none()
        );
    }
}
