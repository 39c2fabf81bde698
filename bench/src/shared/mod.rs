//! Several volumes on one node: `hdcs-bench qos`, `hdcs-bench volumes` and `hdcs-bench scale`.
//!
//! All volumes of a run are on one node and one device. Loads that run at once are processes of fio,
//! one for each volume. What is compared is run within a repetition, one after the other, and the
//! median of the repetitions counts.

pub mod qos;
pub mod scale;
mod usage;
pub mod volumes;

use clap::Args;
use serde::Serialize;

use crate::failure::Result;
use crate::fio::{Load, Outcome};
use crate::lab::{self, Lab};
use crate::node::{Node, VolumeOptions};
use crate::options::Places;
use crate::performance::Page;
use crate::results::Directory;

/// Size of a volume.
const DISK_BYTES: u64 = 1 << 30;
/// Size of its log: what a run writes fits, so that the log is measured and not the backend.
const LOG_BYTES: u64 = 2 << 30;
/// Memory for the indexes of such logs.
const CONFIG: &str = "memory_max_mib = 4096\ncache_total_size_mib = 0\n";

/// How to run it.
#[derive(Args, Debug)]
pub struct Options {
    /// One short repetition: to see that everything works, not to measure.
    #[arg(long)]
    quick: bool,
    /// Repetitions.
    #[arg(long, default_value_t = 3)]
    repeat: u32,
    /// Seconds of one run.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    #[command(flatten)]
    places: Places,
}

impl Options {
    fn repetitions(&self) -> u32 {
        if self.quick { 1 } else { self.repeat }
    }

    fn seconds(&self) -> u32 {
        if self.quick { 2 } else { self.seconds }
    }

    /// Say what was found; what was measured, and not only looked at, becomes a page of the documentation.
    fn conclude(
        &self,
        page: Page,
        results: &Directory,
        report: &str,
        findings: &impl Serialize,
    ) -> Result<()> {
        results.report(report, findings)?;
        if self.quick {
            return Ok(());
        }
        page.write(&self.places.docs, report)
    }
}

/// A node with volumes `v0`, `v1`, …, each of which is written.
struct Neighbours<'a> {
    node: Node,
    lab: Lab,
    results: &'a Directory,
    /// Of the runs, so that each has a name.
    runs: u32,
}

impl<'a> Neighbours<'a> {
    fn up(options: &Options, volumes: u32, results: &'a Directory) -> Result<Self> {
        let lab = Lab::new(&options.places)?;
        let node = lab.node("node", Some(CONFIG))?;
        for number in 0..volumes {
            let image = lab.disk(&format!("backend{number}.img"), DISK_BYTES)?;
            let name = format!("v{number}");
            let volume = VolumeOptions::over_file(&name, &image, DISK_BYTES, LOG_BYTES);
            node.create(&volume)?;
        }
        Ok(Self {
            node,
            lab,
            results,
            runs: 0,
        })
    }

    /// Change the quality of service of a volume.
    fn set(&self, volume: u32, keys: &[&str]) -> Result<()> {
        let name = format!("v{volume}");
        let mut arguments = vec!["volume", "set", &name];
        arguments.extend(keys);
        self.node.command(&arguments).map(drop)
    }

    /// Run loads at once, each on its volume; what each gave, in their order.
    fn together(&mut self, name: &str, loads: Vec<(u32, Load)>) -> Result<Vec<Outcome>> {
        self.runs += 1;
        let run = self.runs;
        let of = |(volume, load)| {
            let (volume, raw) = (format!("v{volume}"), format!("{run:03}-{name}-v{volume}"));
            (volume, raw, load)
        };
        let loads: Vec<_> = loads.into_iter().map(of).collect();
        lab::together(&self.node, self.results, &loads)
    }

    /// Bring everything home, so that no run pays for another one's destage.
    fn settle(&self, volumes: u32) -> Result<()> {
        for volume in 0..volumes {
            self.node.flush(&format!("v{volume}"))?;
        }
        Ok(())
    }
}
