//! Options that every measurement takes.

use std::path::PathBuf;

use clap::Args;

/// What is measured, and where.
#[derive(Args, Debug)]
pub struct Places {
    /// The program; by default the one that was built with this.
    #[arg(long, default_value_os_t = hdcs_beside())]
    pub hdcs: PathBuf,
    /// Where the data lies meanwhile, up to 40 GB; removed at the end.
    #[arg(long, default_value = "target/bench-data")]
    pub data: PathBuf,
    /// Where the results go, in a directory of their own.
    #[arg(long, default_value = "bench/results")]
    pub results: PathBuf,
    /// The directory of the documentation: a whole run writes its page there, if it has one.
    #[arg(long, default_value = "docs")]
    pub docs: PathBuf,
}

/// The `hdcs` that was built with this program.
pub fn hdcs_beside() -> PathBuf {
    // Only a system without /proc does not know where a program is; there the name says what is missing.
    std::env::current_exe()
        .unwrap_or_default()
        .with_file_name("hdcs")
}
