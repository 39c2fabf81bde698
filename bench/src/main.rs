//! The benchmark suite of HDCS: side-by-side runs against peers and the device's floor, the demo,
//! and the crash test of the real program.
//!
//! Everything that it starts is its child and ends with it. Figures of one run compare with each
//! other; figures of two runs do not.

mod bars;
#[cfg(feature = "stores")]
mod before;
#[cfg(feature = "stores")]
mod clones;
mod compare;
mod cost;
mod crash;
mod demo;
mod disk;
mod encryption;
mod failure;
mod fio;
mod guide;
mod hits;
mod lab;
mod nbd;
mod node;
mod options;
mod peers;
mod performance;
mod plot;
mod policies;
mod process;
mod profiles;
mod replay;
mod replication;
mod report;
mod results;
mod rows;
mod shared;
mod steady;
mod storage;

use std::process::ExitCode;

#[cfg(feature = "stores")]
use before::Store;
use clap::Parser;

/// Measure, show and torture HDCS.
#[derive(Parser)]
#[command(name = "hdcs-bench")]
enum Job {
    /// Every peer under every profile, side by side.
    Compare(compare::Options),
    /// Make docs/PERFORMANCE.md of the results of comparisons.
    Performance(performance::Options),
    /// HDCS before a real Ceph, beside librbd straight to it.
    #[cfg(feature = "stores")]
    Ceph(before::Options),
    /// HDCS before a real S3, beside its client; what it costs in requests.
    #[cfg(feature = "stores")]
    S3(before::Options),
    /// HDCS before a real HDFS, beside its client; what it costs in requests.
    #[cfg(feature = "stores")]
    Hdfs(before::Options),
    /// A clone's first reads of what another clone has read, beside those of a cached volume.
    #[cfg(feature = "stores")]
    Clones(clones::Options),
    /// Which mode and policy for which load.
    Guide(guide::Options),
    /// How many reads a cache answers, by policy, trace and size.
    Hits(hits::Options),
    /// Every cache policy, and every change of one to another, under load.
    Policies(policies::Options),
    /// Encrypted volumes beside plain ones.
    Encryption(encryption::Options),
    /// Volumes with copies on another node beside those without.
    Replication(replication::Options),
    /// Quality of service: a reservation beside noisy neighbours, weights, limits.
    Qos(shared::Options),
    /// Four volumes of a node beside one.
    Volumes(shared::Options),
    /// Several shards beside one, each with an equal small share of a processor.
    Scale(shared::Options),
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
        Job::Performance(options) => performance::run(&options),
        #[cfg(feature = "stores")]
        Job::Ceph(options) => before::run(Store::Ceph, &options),
        #[cfg(feature = "stores")]
        Job::S3(options) => before::run(Store::S3, &options),
        #[cfg(feature = "stores")]
        Job::Hdfs(options) => before::run(Store::Hdfs, &options),
        #[cfg(feature = "stores")]
        Job::Clones(options) => clones::run(&options),
        Job::Guide(options) => guide::run(&options),
        Job::Hits(options) => hits::run(&options),
        Job::Policies(options) => policies::run(&options),
        Job::Encryption(options) => encryption::run(&options),
        Job::Replication(options) => replication::run(&options),
        Job::Qos(options) => shared::qos::run(&options),
        Job::Volumes(options) => shared::volumes::run(&options),
        Job::Scale(options) => shared::scale::run(&options),
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
