//! The benchmark suite of HDCS: side-by-side runs against peers and the device's floor, the demo,
//! and the crash test of the real program.
//!
//! Everything that it starts is its child and ends with it. Figures of one run compare with each
//! other; figures of two runs do not.

mod bars;
mod before;
mod compare;
mod crash;
mod demo;
mod failure;
mod fio;
mod nbd;
mod node;
mod peers;
mod plot;
mod process;
mod profiles;
mod replay;
mod report;
mod results;
mod steady;
mod storage;

use std::process::ExitCode;

use before::Store;
use clap::Parser;

/// Measure, show and torture HDCS.
#[derive(Parser)]
#[command(name = "hdcs-bench")]
enum Job {
    /// Every peer under every profile, side by side.
    Compare(compare::Options),
    /// HDCS before a real Ceph, beside librbd straight to it.
    Ceph(before::Options),
    /// HDCS before a real S3, beside its client; what it costs in requests.
    S3(before::Options),
    /// HDCS before a real HDFS, beside its client; what it costs in requests.
    Hdfs(before::Options),
    /// What storage mode writes to the device when a full volume is overwritten.
    Storage(storage::Options),
    /// HDCS beside its slow backend, then a crash.
    Demo(demo::Options),
    /// Kill the node in mid-write, again and again, and verify what it promised.
    Crash(crash::Options),
}

fn main() -> ExitCode {
    let result = match Job::parse() {
        Job::Compare(options) => compare::run(&options),
        Job::Ceph(options) => before::run(Store::Ceph, &options),
        Job::S3(options) => before::run(Store::S3, &options),
        Job::Hdfs(options) => before::run(Store::Hdfs, &options),
        Job::Storage(options) => storage::run(&options),
        Job::Demo(options) => demo::run(&options),
        Job::Crash(options) => crash::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("hdcs-bench: {failure}");
            ExitCode::FAILURE
        }
    }
}
