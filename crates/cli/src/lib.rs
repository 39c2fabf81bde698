//! The command line: `hdcs serve`, and everything that speaks to a node or reads what it left.
//!
//! Exit status: 0 done, 1 failed, 2 misused, 130 interrupted in work that is undone then (`volume import`,
//! `export`, `flush`, `snapshot` and `clone`). Errors go to standard error as
//! `error: what: where: what to do`. Results go to standard output, as tables or with `--json`.

mod attach;
mod backend_check;
mod check;
mod client;
mod events;
mod flush;
mod generate;
mod group;
mod heat;
mod interrupts;
mod output;
mod pin;
mod policy;
mod progress;
mod scrub;
pub mod size;
mod snapshot;
mod top;
mod transfer;
mod volume;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand};
use client::Client;
use hdcs_api::{ApiError, ErrorKind, Reloaded};
use hdcs_backend::closing;
use hdcs_server::control::serve::{self, ServeError};
use hdcs_server::data_dir::Layout;
use hdcs_server::logging;
use hyper::Method;

/// Where the data directory is if nothing says so.
const DATA_DEFAULT: &str = "hdcs-data";
/// What a command returns that Ctrl-C or SIGTERM has ended, as shells have it.
const STATUS_INTERRUPTED: u8 = 128 + 2;
/// How long a node that has stopped waits for its backends to close.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(10);

/// HDCS: a crash-consistent block cache for slow storage.
#[derive(Debug, Parser)]
#[command(name = "hdcs", version, arg_required_else_help = true)]
struct Cli {
    /// Data directory of the node [default: $HDCS_DATA, else ./hdcs-data]
    #[arg(long, global = true, value_name = "DIR")]
    data: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the node daemon in the foreground
    Serve {
        /// Configuration file (TOML)
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Create, list, show, change, flush and delete volumes
    #[command(subcommand)]
    Volume(volume::Command),
    /// Show the nodes that have copies of volumes' dirty data (experimental)
    #[command(subcommand)]
    Group(group::Command),
    /// Show the node: memory, cache, volumes by state
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// What concerns the node as a whole
    #[command(subcommand)]
    Node(NodeCommand),
    /// Show live rates of every volume (q or Ctrl-C ends it)
    Top(top::Arguments),
    /// Show what was done, refused and seen, when and by whom
    Events(events::Arguments),
    /// Say what is on a write log, read cache, volume directory or data directory, without a daemon
    Inspect {
        /// What to inspect
        path: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Verify every checksum of a log, read cache, volume, data directory or backend; exit status 1 if one is wrong
    Check(check::Arguments),
    /// Print what a shell needs to complete these commands, such as for `source <(hdcs completions bash)`
    Completions(generate::Completions),
    /// Write manual pages
    Man(generate::Man),
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// Read certificates, authorities and lists of what is revoked again, as SIGHUP does; clients whose certificates
    /// are still good stay connected
    Reload {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Why a command did not succeed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What the process returns.
    status: u8,
    /// What is printed after `error: `; empty if everything is said already.
    message: String,
}

impl Failure {
    /// Something was tried and failed.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self {
            status: 1,
            message: message.into(),
        }
    }
    /// It was asked for in a way that can never succeed.
    pub(crate) fn misused(message: impl Into<String>) -> Self {
        Self {
            status: 2,
            message: message.into(),
        }
    }
    /// Somebody wanted it to end, and it is undone.
    pub(crate) fn interrupted(message: impl Into<String>) -> Self {
        Self {
            status: STATUS_INTERRUPTED,
            message: message.into(),
        }
    }
    /// Whether it is that.
    pub(crate) fn is_interrupt(&self) -> bool {
        self.status == STATUS_INTERRUPTED
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        match error.kind {
            ErrorKind::Malformed | ErrorKind::NoMethod | ErrorKind::Invalid => {
                Self::misused(error.message)
            }
            _ => Self::failed(error.message),
        }
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::Config(_) => Self::misused(error.to_string()),
            _ => Self::failed(error.to_string()),
        }
    }
}

/// Run the command of this process's arguments.
pub fn run() -> ExitCode {
    logging::end_on_panic();
    let cli = Cli::parse();
    let data = cli
        .data
        .or_else(|| std::env::var_os("HDCS_DATA").map(PathBuf::from))
        .unwrap_or_else(|| PathBuf::from(DATA_DEFAULT));
    let result = match cli.command {
        Command::Serve { config } => return serve_node(config.as_deref(), &data),
        Command::Inspect { path, json } => check::inspect(&path, json),
        Command::Volume(command) => {
            online(&data, async |client| volume::run(&client, command).await)
        }
        Command::Group(command) => online(&data, async |client| group::run(&client, command).await),
        Command::Status { json } => {
            online(&data, async |client| output::status(&client, json).await)
        }
        Command::Node(NodeCommand::Reload { json }) => {
            online(&data, async |client| reload(&client, json).await)
        }
        Command::Top(arguments) => {
            online(&data, async |client| top::run(&client, &arguments).await)
        }
        Command::Events(arguments) => {
            online(&data, async |client| events::run(&client, &arguments).await)
        }
        Command::Completions(arguments) => {
            generate::completions(Cli::command(), &arguments);
            Ok(())
        }
        Command::Man(arguments) => generate::man(Cli::command(), &arguments),
        Command::Check(arguments) => online(&data, async |client| {
            check::check(&client, &arguments).await
        }),
    };
    let status = match result {
        Ok(()) => 0,
        Err(failure) => {
            if !failure.message.is_empty() {
                output::note(&format!("error: {}", failure.message));
            }
            failure.status
        }
    };
    closing::leave(status, CLOSE_TIME_MAX);
    ExitCode::from(status)
}

async fn reload(client: &Client, json: bool) -> Result<(), Failure> {
    let nothing = serde_json::Value::Null;
    let done: Reloaded = client.request(Method::POST, "/v1/reload", &nothing).await?;
    volume::said(json, &done, || {
        let ended = done.ended_clients;
        format!("the TLS files were read again; {ended} connected clients were ended")
    })
}

/// Run the daemon. Nothing here waits for whoever reads standard error.
fn serve_node(config: Option<&std::path::Path>, data: &std::path::Path) -> ExitCode {
    let log = logging::to_stderr();
    let result = serve::run(config, data).map_err(Failure::from);
    let closed = closing::wait(None, CLOSE_TIME_MAX);
    if !closed {
        closing::say_unclosed();
    }
    // The lines that wait come before the last words.
    drop(log);
    let status = result.map_or_else(
        |failure| {
            logging::last_words(&format!("error: {}", failure.message));
            failure.status
        },
        |()| 0,
    );
    if !closed {
        closing::exit_now(status);
    }
    ExitCode::from(status)
}

/// Run a command that speaks to a daemon.
fn online(
    data: &std::path::Path,
    work: impl AsyncFnOnce(Client) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::failed(format!("cannot run: {error}")))?;
    runtime.block_on(work(Client::new(Layout::new(data))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cli_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn data_is_accepted_before_and_after_the_command() {
        for arguments in [
            ["hdcs", "--data", "/d", "volume", "list"],
            ["hdcs", "volume", "list", "--data", "/d"],
        ] {
            let cli = Cli::try_parse_from(arguments).unwrap();
            assert_eq!(cli.data, Some(PathBuf::from("/d")));
        }
    }
}
