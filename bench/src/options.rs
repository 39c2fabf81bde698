//! Options that every measurement takes.

use std::path::PathBuf;

use clap::Args;

/// What is measured, and where.
#[derive(Args, Debug)]
pub struct Places {
    /// The program.
    #[arg(long, default_value = "target/release/hdcs")]
    pub hdcs: PathBuf,
    /// Where the data lies meanwhile, up to 40 GB; removed at the end.
    #[arg(long, default_value = "target/bench-data")]
    pub data: PathBuf,
    /// Where the results go, in a directory of their own.
    #[arg(long, default_value = "bench/results")]
    pub results: PathBuf,
}
