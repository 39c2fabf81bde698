//! The HDCS program.

fn main() -> std::process::ExitCode {
    hdcs_node::cli::run()
}
