//! The conformance suite of the backends over whatever a URL names, such as an image on a real
//! cluster. It writes to the place, at which nothing may be yet, and leaves its image there. Usage:
//!
//! ```text
//! cargo run --example conformance -- URL
//! ```

use std::process::ExitCode;

use hdcs_backend::conformance;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(url), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: conformance URL");
        return ExitCode::from(2);
    };
    match conformance::run_url(&url, &mut |what| println!("{what}")) {
        Ok(()) => {
            println!("{url} conforms");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
