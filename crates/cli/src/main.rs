//! The HDCS program.

fn main() -> std::process::ExitCode {
    hdcs_cli::run()
}
