//! `cargo xtask`: generated documents and tidy checks. The same checks run as tests, so `make test`
//! is all that anybody has to run.
//!
//! On failure every finding is printed as `path:line: what is wrong`, and the exit status is 1.

mod formats;
mod methods;
mod tidy;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Developer tasks of HDCS.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Task {
    /// Write docs/FORMATS.md anew from the on-disk structures.
    Formats,
    /// Check what every file of the tree has to keep to.
    Tidy,
}

/// The top of the source tree.
fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(&manifest).to_path_buf()
}

fn main() -> ExitCode {
    match Task::parse() {
        Task::Formats => match formats::write(&root()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{}: {error}", formats::PATH);
                ExitCode::FAILURE
            }
        },
        Task::Tidy => {
            let findings = tidy::check(&root());
            for finding in &findings {
                eprintln!("{finding}");
            }
            if findings.is_empty() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
    }
}
