//! docs/PERFORMANCE.md, made of what a comparison found: the ratios with what limits them, what a request costs, the
//! figures, and two pictures.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::bars::median;
use crate::compare::{Findings, Sample};
use crate::cost::Cost;
use crate::failure::{Context, Result};
use crate::peers::{Peer, Place};
use crate::plot::{self, Panel, PanelBar};
use crate::process;
use crate::profiles::{self, Profile};
use crate::results::Directory;
use crate::rows::{self, Row, spread};

/// The document.
const DOCUMENT: &str = "PERFORMANCE.md";

/// Pictures: the name among the results, that among the documentation, and what they show.
const PICTURES: [(&str, &str, &str); 2] = [
    ("iops", "bench-iops", "Requests a second, by load"),
    (
        "write-time",
        "bench-write-time",
        "Where the mean time of a durable write goes, as its client sees it",
    ),
];

/// A page of a benchmark that has its own, below `figures` in the documentation.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    name: &'static str,
    title: &'static str,
    command: &'static str,
}

/// Of `hdcs-bench scale`.
pub const SHARDS: Page = Page {
    name: "shards",
    title: "Several shards beside one",
    command: "make bench-scale",
};
/// Of `hdcs-bench volumes`.
pub const VOLUMES: Page = Page {
    name: "volumes",
    title: "Four volumes beside one",
    command: "make bench-volumes",
};
/// Of `hdcs-bench ceph`.
pub const CEPH: Page = Page {
    name: "ceph",
    title: "Before a real Ceph",
    command: "make bench-ceph",
};

impl Page {
    fn path(&self, docs: &Path) -> PathBuf {
        docs.join("figures").join(format!("{}.md", self.name))
    }

    /// Write it of a report.
    pub fn write(&self, docs: &Path, report: &str) -> Result<()> {
        let path = self.path(docs);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).context(directory.display())?;
        }
        let text = format!(
            "# {}\n\n`{}` measures this and writes this page. How: [TESTING](../TESTING.md#benchmark).\n\n\
             Measured: {}.\n\n```text\n{}\n```\n",
            self.title,
            self.command,
            machine()?,
            report.trim_end()
        );
        fs::write(&path, text).context(path.display())?;
        eprintln!("bench: wrote {}", path.display());
        Ok(())
    }
}

/// From which results to make the document.
#[derive(Args, Debug)]
pub struct Options {
    /// `results.json` of one run or several.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// The directory of the documentation.
    #[arg(long, default_value = "docs")]
    docs: PathBuf,
}

/// Make the document of results that are there.
pub fn run(options: &Options) -> Result<()> {
    let mut findings = Findings::default();
    for file in &options.files {
        let text = fs::read_to_string(file).context(file.display())?;
        let found: Findings = serde_json::from_str(&text).context(file.display())?;
        findings.take_over(found);
    }
    let scratch = tempfile::tempdir().context("a directory for pictures")?;
    let results = Directory::at(scratch.path().to_path_buf())?;
    plot::comparison(&findings, &results)?;
    write(&findings, &options.docs, &results)
}

impl Findings {
    /// Take over what another run found. Its repetitions come after those that are there: a ratio is never one of two
    /// runs.
    fn take_over(&mut self, mut other: Self) {
        let used = self.samples.iter().map(|s| s.repetition + 1);
        let next = used.max().unwrap_or(0);
        for sample in &mut other.samples {
            sample.repetition += next;
        }
        for (repetition, _) in &mut other.durable_write_us {
            *repetition += next;
        }
        self.seconds = other.seconds;
        self.samples.extend(other.samples);
        self.repeated.extend(other.repeated);
        self.durable_write_us.extend(other.durable_write_us);
        self.steady.extend(other.steady);
        self.replay.extend(other.replay);
    }

    fn of(&self, profile: &Profile, peer: Peer, place: Place) -> Vec<&Sample> {
        let samples = self.samples.iter();
        samples
            .filter(|s| s.profile == profile.name && s.peer == peer.name() && s.place == place)
            .collect()
    }
}

/// Write the document, and its pictures, which lie among the results or are drawn there.
pub fn write(findings: &Findings, docs: &Path, results: &Directory) -> Result<()> {
    draw_write_time(findings, results)?;
    for (from, to, _) in PICTURES {
        let (from, to) = (
            results.file(&format!("{from}.svg")),
            docs.join("pictures").join(format!("{to}.svg")),
        );
        if from.exists() {
            fs::copy(&from, &to).context(to.display())?;
        }
    }
    let path = docs.join(DOCUMENT);
    let mut pages = vec![SHARDS, VOLUMES, CEPH];
    pages.retain(|page| page.path(docs).exists());
    fs::write(&path, render(findings, &pages, &machine()?)).context(path.display())?;
    eprintln!("bench: wrote {}", path.display());
    Ok(())
}

/// What it was measured on.
fn machine() -> Result<String> {
    let kernel = process::output_of(Command::new("uname").arg("-r"))?;
    let date = process::output_of(Command::new("date").arg("+%F"))?;
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown", |(_, name)| name);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(format!(
        "{}, {processors} processors ({model}), Linux {}",
        date.trim(),
        kernel.trim()
    ))
}

fn render(findings: &Findings, pages: &[Page], machine: &str) -> String {
    let mut out = String::from(
        "# Performance\n\n`make bench` measures this and writes this page. Ratios are what to look at: each is formed \
         within a repetition, from runs\nthat follow one another on one machine, and the median counts, with the least \
         and the most in parentheses. How it is\nmeasured: [TESTING](TESTING.md#benchmark). Figures of two machines, or \
         of two days, do not compare.\n\n",
    );
    if !pages.is_empty() {
        out.push_str("Pages of their own have:\n\n");
    }
    for Page {
        name,
        title,
        command,
    } in pages
    {
        let _ = writeln!(out, "* [{title}](figures/{name}.md), by `{command}`");
    }
    if !pages.is_empty() {
        out.push('\n');
    }
    let _ = writeln!(out, "Measured: {machine}; {}.\n", repetitions(findings));
    ratios(&mut out, findings);
    for (_, name, title) in PICTURES {
        let _ = writeln!(out, "![{title}](pictures/{name}.svg)\n");
    }
    costs(&mut out, findings);
    figures(&mut out, findings);
    stalls(&mut out, findings);
    let text = out.trim_end();
    format!("{text}\n")
}

fn repetitions(findings: &Findings) -> String {
    let cells = cells(findings);
    let counts = || cells.iter().map(|(.., samples)| samples.len());
    let [least, most] = [counts().min(), counts().max()].map(Option::unwrap_or_default);
    let seconds = findings.seconds;
    if least == most {
        format!("{most} repetitions of {seconds} s")
    } else {
        format!("{least} to {most} repetitions of {seconds} s")
    }
}

/// A processor time; results of before it was taken have none.
fn known(micros: f64) -> String {
    if micros > 0.0 {
        format!("{micros:.1}")
    } else {
        String::new()
    }
}

/// A median with the least and the most.
fn cell(values: Option<[f64; 3]>, digits: usize) -> String {
    values.map_or_else(String::new, |[middle, least, most]| {
        format!("{middle:.digits$} ({least:.digits$}–{most:.digits$})")
    })
}

fn ratios(out: &mut String, findings: &Findings) {
    let [disk, memory] = Place::ALL.map(|place| rows::rows(findings, place));
    out.push_str(
        "## Ratios\n\nBelow *in memory* logs, backends and the cache device lie on tmpfs: no device is in the way, and \
         what is left is the\nprocessor.\n\n| what | wanted | on the disk | in memory |\n|---|---|---|---|\n",
    );
    let both = || disk.iter().zip(&memory);
    for (on_disk, in_memory) in both() {
        let (sign, [must, _]) = (if on_disk.more { "≥" } else { "≤" }, on_disk.wanted);
        let [on_disk_cell, in_memory_cell] =
            [on_disk, in_memory].map(|row: &Row| cell(row.spread(), 2));
        let _ = writeln!(
            out,
            "| {} | {sign} {must} | {on_disk_cell} | {in_memory_cell} |",
            on_disk.what
        );
    }
    out.push('\n');
    let mut limits = disk
        .iter()
        .filter_map(|row| Some((row.what, row.limit()?)))
        .peekable();
    if limits.peek().is_some() {
        out.push_str("What limits them:\n\n");
        for (what, limit) in limits {
            let _ = writeln!(out, "* {what}: {limit}");
        }
        out.push('\n');
    }
}

/// Each profile with its peers that were measured, by place.
fn cells(findings: &Findings) -> Vec<(Place, Profile, Peer, Vec<&Sample>)> {
    let mut found = Vec::new();
    for place in Place::ALL {
        for profile in profiles::all() {
            for peer in Peer::ALL {
                let samples = findings.of(&profile, peer, place);
                if !samples.is_empty() {
                    found.push((place, profile.clone(), peer, samples));
                }
            }
        }
    }
    found
}

fn costs(out: &mut String, findings: &Findings) {
    out.push_str(
        "## What a request costs\n\nMedians, as HDCS counts them (`hdcs_shard_…`, `hdcs_volume_log_…` in \
         [REFERENCE](REFERENCE.md)). Turns, calls of\n`io_uring_enter`, wakeups and receives are for one request. Times \
         are in µs: of a write in the open span, from there\nuntil it is durable, and of sending its reply; processor \
         time of the data path's thread, of all threads of the node\n(writers of the log among them), and of the \
         kernel's workers for its io_uring.\n\n| where | load | face | turns | \
         enters | wakeups | receives | writes per span | spans in flight | open | device | send | shard | threads | workers |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for (place, profile, peer, samples) in cells(findings) {
        let costs: Vec<Cost> = samples.iter().filter_map(|sample| sample.cost).collect();
        if costs.is_empty() {
            continue;
        }
        let cost = Cost::median(&costs);
        let _ = writeln!(
            out,
            "| {} | {} | {} | {:.2} | {:.2} | {:.2} | {:.2} | {:.1} | {:.2} | {:.0} | {:.0} | {:.0} | {} | {:.1} | {:.1} |",
            place.name(),
            profile.name,
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
            known(cost.shard_cpu_us),
            cost.threads_cpu_us,
            cost.workers_cpu_us,
        );
    }
    out.push('\n');
}

fn figures(out: &mut String, findings: &Findings) {
    out.push_str(
        "## Figures\n\nRequests a second, latency in µs, and processor time of the server for one request in µs.\n\n\
         | where | load | who | IOPS | mean | p50 | p99 | p99.99 | server CPU |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for (place, profile, peer, samples) in cells(findings) {
        let of = |value: fn(&Sample) -> f64| median(samples.iter().map(|sample| value(sample)));
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {:.0} | {:.0} | {:.0} | {:.0} | {:.1} |",
            place.name(),
            profile.name,
            peer.name(),
            cell(spread(samples.iter().map(|s| s.outcome.iops)), 0),
            of(|s| s.outcome.latency.mean),
            of(|s| s.outcome.latency.p50),
            of(|s| s.outcome.latency.p99),
            of(|s| s.outcome.latency.p9999),
            of(|s| s.server_cpu_us),
        );
    }
    out.push('\n');
}

/// Which runs were repeated since the device had stalled, and which had to stay although it had.
pub fn stalls(out: &mut String, findings: &Findings) {
    let stayed = findings.samples.iter().filter(|s| s.stalled.is_some());
    let stayed = stayed.count();
    if findings.repeated.is_empty() && stayed == 0 {
        out.push_str("The device did not stall in any run.\n");
        return;
    }
    let _ = writeln!(
        out,
        "Runs that were repeated since the device itself had stalled: {}. Runs that stayed although it had: {stayed}.\n",
        findings.repeated.len()
    );
    for one in &findings.repeated {
        let _ = writeln!(
            out,
            "* {} on {}, repetition {} ({:.0} IOPS): {}",
            one.profile,
            one.peer,
            one.repetition + 1,
            one.iops,
            one.why
        );
    }
}

/// The stages of an on-write write, a panel for each load.
fn draw_write_time(findings: &Findings, results: &Directory) -> Result<()> {
    type Stage = fn(&Cost) -> f64;
    let stages: [(&str, &str, Stage); 3] = [
        ("open span", "#c8a25a", |cost| cost.open_us),
        ("device", "#999999", |cost| cost.device_us),
        ("send", "#1565c0", |cost| cost.send_us),
    ];
    let mut panels = Vec::new();
    for (place, profile, peer, samples) in cells(findings) {
        let costs: Vec<Cost> = samples.iter().filter_map(|sample| sample.cost).collect();
        if place != Place::Disk || peer != Peer::OnWrite || costs.is_empty() {
            continue;
        }
        let bar = |name, colour, value: f64| PanelBar {
            name,
            colour,
            value,
            label: format!("{value:.0} µs"),
        };
        let mut bars: Vec<PanelBar<'_>> = stages
            .iter()
            .map(|(name, colour, value)| bar(*name, *colour, median(costs.iter().map(value))))
            .collect();
        let mean = median(samples.iter().map(|s| s.outcome.latency.mean));
        let rest = mean - bars.iter().map(|bar| bar.value).sum::<f64>();
        // What the client waits beside: its own side, and the way to the server.
        bars.push(bar("all else", "#8d6e63", rest.max(0.0)));
        panels.push(Panel {
            title: profile.title,
            bars,
        });
    }
    if panels.is_empty() {
        return Ok(());
    }
    plot::panels(None, &panels, results, "write-time")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::Repeated;
    use crate::rows::tests::sample;

    fn findings() -> Findings {
        let (ours, theirs) = (
            ("randwrite-qd32", Peer::OnWrite),
            ("randwrite-qd32", Peer::Qemu),
        );
        Findings {
            seconds: 5,
            samples: vec![
                sample(ours, Place::Disk, 0, 300.0),
                sample(theirs, Place::Disk, 0, 100.0),
                sample(ours, Place::Disk, 1, 100.0),
                sample(theirs, Place::Disk, 1, 100.0),
                sample(ours, Place::Memory, 0, 900.0),
            ],
            repeated: vec![Repeated {
                profile: "randwrite-qd32".into(),
                peer: "qemu-nbd".into(),
                repetition: 1,
                iops: 18.0,
                why: "it ended nothing for 350 ms".into(),
            }],
            ..Findings::default()
        }
    }

    #[test]
    fn document_has_median_least_and_most_and_what_was_repeated() {
        let text = render(&findings(), &[SHARDS], "a machine");
        assert!(
            text.contains(
                "* [Several shards beside one](figures/shards.md), by `make bench-scale`"
            )
        );
        assert!(text.contains(
            "| 4k randwrite QD32, on-write / qemu-nbd raw, IOPS | ≥ 1.8 | 2.00 (1.00–3.00) |  |"
        ));
        assert!(text.contains("| disk | randwrite-qd32 | hdcs-on-write | 200 (100–300) |"));
        assert!(text.contains("| memory | randwrite-qd32 | hdcs-on-write | 900 (900–900) |"));
        assert!(text.contains("repetition 2 (18 IOPS): it ended nothing for 350 ms"));
        assert!(text.contains("Measured: a machine; 1 to 2 repetitions of 5 s."));
    }

    #[test]
    fn ratios_of_several_runs_are_each_of_one() {
        let mut all = findings();
        let qemu = sample(("randwrite-qd32", Peer::Qemu), Place::Disk, 0, 1.0);
        all.take_over(Findings {
            samples: vec![qemu],
            durable_write_us: vec![(0, 7.0)],
            ..Findings::default()
        });
        assert_eq!(all.durable_write_us, [(2, 7.0)]);
        let text = render(&all, &[], "a machine");
        assert!(text.contains("qemu-nbd raw, IOPS | ≥ 1.8 | 2.00 (1.00–3.00) |"));
        assert!(text.contains("| disk | randwrite-qd32 | qemu-nbd | 100 (1–100) |"));
    }

    #[test]
    fn results_can_be_read_back() {
        let json = serde_json::to_string(&findings()).unwrap();
        let found: Findings = serde_json::from_str(&json).unwrap();
        assert_eq!(render(&found, &[], "m"), render(&findings(), &[], "m"));
    }
}
