//! `hdcs-bench hits`: how many reads a cache answers, by policy, trace and size.
//!
//! No volume and no device takes part: the requests of a trace go to each policy in turn. The models
//! are seeded, so their table can be repeated to the last digit.

mod benefit;
mod policy;
mod read;
mod trace;

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use read::Format;
use serde::Serialize;
use trace::Trace;

use crate::failure::Result;
use crate::plot;
use crate::results::Directory;

/// Requests of a model.
const REQUESTS: usize = 600_000;
/// Sizes of the cache, in percent of the volume (of a file's trace: of the blocks that it touches).
const PERCENTS: [usize; 4] = [1, 5, 10, 20];

/// What to run.
#[derive(Args, Debug)]
pub struct Options {
    /// Requests of each model.
    #[arg(long, default_value_t = REQUESTS)]
    requests: usize,
    /// A trace from a file instead of the models; may be given several times. The cache of the table's
    /// last column takes as much memory as the trace at 20 %.
    #[arg(long)]
    trace: Vec<PathBuf>,
    /// How the files are written; without it, by their names: .csv, oracleGeneral, else plain.
    #[arg(long)]
    format: Option<Format>,
    /// Leave out the writes of a file.
    #[arg(long)]
    reads_only: bool,
    /// Instead, what it gains to weigh blocks by what reading them again costs: volumes on a fast and a slow
    /// backend that share a cache.
    #[arg(long, conflicts_with_all = ["trace", "format", "reads_only"])]
    benefit: bool,
    /// Where the results go, in a directory of their own.
    #[arg(long, default_value = "bench/results")]
    results: PathBuf,
}

/// The hit rates of one trace in a cache of one size.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Name of the trace.
    pub trace: String,
    /// Requests in it.
    pub requests: usize,
    /// Size of the cache in percent.
    pub percent: usize,
    /// Size of the cache in blocks.
    pub blocks: usize,
    /// Each policy and its hits in percent of the requests, if it can be made so small.
    pub hits: Vec<(&'static str, Option<f64>)>,
}

/// Run what was asked for.
pub fn run(options: &Options) -> Result<()> {
    if options.benefit {
        return benefit::run(options.requests, &options.results);
    }
    let mut traces = Vec::new();
    for path in &options.trace {
        traces.push(read::trace(path, options.format, options.reads_only)?);
    }
    if traces.is_empty() {
        traces = trace::models(options.requests);
    }
    let rows: Vec<Row> = traces.iter().flat_map(rows).collect();
    let results = Directory::create(&options.results)?;
    plot::hits(&rows, &results)?;
    results.report(&table(&rows), &rows)
}

fn rows(trace: &Trace) -> Vec<Row> {
    PERCENTS
        .iter()
        .map(|&percent| {
            let blocks = (trace.footprint * percent / 100).max(1);
            eprintln!("bench: {}, {percent} %", trace.name);
            Row {
                trace: trace.name.clone(),
                requests: trace.blocks.len(),
                percent,
                blocks,
                hits: policy::ALL
                    .iter()
                    .map(|entry| {
                        let fits = blocks >= entry.blocks_min;
                        (entry.name, fits.then(|| hit_percent(entry, trace, blocks)))
                    })
                    .collect(),
            }
        })
        .collect()
}

fn hit_percent(entry: &policy::Entry, trace: &Trace, blocks: usize) -> f64 {
    let mut policy = (entry.make)(blocks);
    let hits = trace.blocks.iter().filter(|&&key| policy.access(key));
    100.0 * hits.count() as f64 / trace.blocks.len() as f64
}

fn table(rows: &[Row]) -> String {
    let mut out = String::from("| trace | cache |");
    for entry in policy::ALL {
        let _ = write!(out, " {} |", entry.name);
    }
    let _ = write!(out, "\n|---|---|{}", "---|".repeat(policy::ALL.len()));
    for row in rows {
        let _ = write!(out, "\n| {} | {} % |", row.trace, row.percent);
        for (_, hits) in &row.hits {
            let _ = match hits {
                Some(hits) => write!(out, " {hits:.1} |"),
                None => write!(out, " |"),
            };
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published S3-FIFO keeps exact keys in its ghost; a tenth of a point is what chance does.
    const EPSILON: f64 = 0.1;

    #[test]
    fn hits_of_the_shipped_cache_are_those_of_s3_fifo_or_more_at_a_tenth() {
        let entry = |name| policy::ALL.iter().find(|entry| entry.name == name).unwrap();
        for trace in trace::models(300_000) {
            let size = trace.footprint / 10;
            let shipped = hit_percent(entry(policy::SHIPPED), &trace, size);
            let published = hit_percent(entry(policy::S3_FIFO), &trace, size);
            assert!(
                shipped >= published - EPSILON,
                "{}: {shipped:.2} against {published:.2}",
                trace.name
            );
        }
    }

    #[test]
    fn table_has_a_row_for_each_size() {
        let trace = Trace {
            name: "t".into(),
            blocks: vec![1, 2, 1, 1],
            footprint: 2,
        };
        let rows = rows(&trace);
        assert_eq!(rows.len(), PERCENTS.len());
        assert_eq!(rows[0].hits[0], ("LRU", Some(25.0)));
        assert_eq!(table(&rows).lines().count(), 2 + PERCENTS.len());
    }
}
