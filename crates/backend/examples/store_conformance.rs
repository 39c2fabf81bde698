//! The conformance suite of the object stores over the place that a URL names. It deletes what is
//! there. Usage:
//!
//! ```text
//! cargo run --example store_conformance -- s3://BUCKET/PREFIX?endpoint=…
//! ```

use std::process::ExitCode;

use hdcs_backend::objects;
use hdcs_backend::stores::{conformance, runtime};

fn run(url: &str) -> Result<(), String> {
    let client = objects::client(url).map_err(|error| error.to_string())?;
    for line in runtime().block_on(conformance::conformance(&client))? {
        println!("{line}");
    }
    println!("{:?}", client.counters().counts());
    println!("{} conforms", client.place());
    Ok(())
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(url), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: store_conformance URL");
        return ExitCode::from(2);
    };
    match run(&url) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
