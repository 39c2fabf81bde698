//! `s3_server ADDRESS DIRECTORY`: an S3 server for tests, over the directory's subdirectories as
//! buckets. Its key is that of `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`. It prints a line
//! when it serves, and ends with its standard input.

mod server;

use std::io::{Read, Write};
use std::process::ExitCode;

fn run() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let (Some(address), Some(root)) = (arguments.next(), arguments.next()) else {
        return Err("usage: s3_server ADDRESS DIRECTORY".to_owned());
    };
    let variable = |name: &str| std::env::var(name).map_err(|error| format!("{name}: {error}"));
    let (key, secret) = (
        variable("AWS_ACCESS_KEY_ID")?,
        variable("AWS_SECRET_ACCESS_KEY")?,
    );
    let listener =
        std::net::TcpListener::bind(&address).map_err(|error| format!("{address}: {error}"))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    println!("s3_server: ready at http://{address}");
    std::io::stdout()
        .flush()
        .map_err(|error| error.to_string())?;
    // The parent's end of the pipe goes with the parent, however it ends.
    std::thread::spawn(|| {
        let mut rest = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut rest);
        std::process::exit(0);
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    runtime
        .block_on(server::serve(root.as_ref(), listener, &key, &secret))
        .map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
