//! `hdcs volume pin`, with progress while the range is filled (Ctrl-C stops the watching; filling goes on),
//! `hdcs volume unpin` and `hdcs volume warm`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use hdcs_api::{Counters, Volume};
use hdcs_server::catalogue::VolumeName;
use hyper::Method;
use tokio::signal::unix::{SignalKind, signal};

use super::client::Client;
use super::progress::Progress;
use super::size::show;
use super::volume::{Range, api_path};
use super::{Failure, heat, output};

/// How often progress is looked at.
const WATCH_PERIOD: Duration = Duration::from_millis(100);
/// After so long without any, it is not waited for any more.
const STALL_TIME_MAX: Duration = Duration::from_secs(60);

#[derive(Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    range: Range,
    /// Do not wait until it is filled
    #[arg(long)]
    no_wait: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub struct UnpinArguments {
    #[command(flatten)]
    range: Range,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub struct WarmArguments {
    #[command(flatten)]
    range: Range,
    /// What was hot when this heat map was saved, the hottest first: see `hdcs volume heat`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["offset", "length"])]
    from: Option<PathBuf>,
    /// Wait until it is done, with progress; Ctrl-C ends the waiting alone
    #[arg(long)]
    wait: bool,
    /// Give up what is left of it
    #[arg(long, conflicts_with_all = ["offset", "length", "from", "wait"])]
    cancel: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn left(volume: &Volume, of: fn(&Counters) -> u64) -> u64 {
    volume.counters.as_ref().map_or(0, of)
}

pub async fn pin(client: &Client, arguments: Arguments) -> Result<(), Failure> {
    let name = &arguments.range.name;
    let mut volume: Volume = arguments.range.ask(client, "pin").await?;
    if !arguments.no_wait {
        let of = |counters: &Counters| counters.pinned_left_bytes;
        volume = filled(client, name, volume, of, "pinned").await?;
    }
    say(name, &volume, arguments.json, in_words)
}

pub async fn unpin(client: &Client, arguments: UnpinArguments) -> Result<(), Failure> {
    let volume: Volume = arguments.range.ask(client, "unpin").await?;
    say(&arguments.range.name, &volume, arguments.json, in_words)
}

pub async fn warm(client: &Client, arguments: WarmArguments) -> Result<(), Failure> {
    let name = &arguments.range.name;
    let mut volume: Volume = if arguments.cancel {
        let path = format!("{}/warm", api_path(name));
        client.request(Method::DELETE, &path, &()).await?
    } else if let Some(from) = &arguments.from {
        let warmed = heat::warm_from(client, name, from).await?;
        if let Some(left_out) = heat::left_out(&warmed) {
            eprintln!("volume {name}: {left_out}");
        }
        warmed.volume
    } else {
        arguments.range.ask(client, "warm").await?
    };
    if arguments.wait {
        let of = |counters: &Counters| counters.warm_left_bytes;
        volume = filled(client, name, volume, of, "warmed up").await?;
    }
    say(name, &volume, arguments.json, |volume| {
        let left = show(left(volume, |counters| counters.warm_left_bytes));
        format!("{left} are left to warm up")
    })
}

/// Print a volume, or what is to be said of it.
fn say(
    name: &VolumeName,
    volume: &Volume,
    json: bool,
    words: impl Fn(&Volume) -> String,
) -> Result<(), Failure> {
    if json {
        return output::json(volume);
    }
    output::line(&format!("volume {name}: {}", words(volume)));
    Ok(())
}

/// What is pinned of a volume, and how much of it is there.
pub fn in_words(volume: &Volume) -> String {
    if volume.pins.is_empty() {
        return "nothing is pinned".to_owned();
    }
    let bytes: u64 = volume.pins.iter().map(|pin| pin.bytes).sum();
    let ranges = match volume.pins.len() {
        1 => "1 range".to_owned(),
        many => format!("{many} ranges"),
    };
    let state = match (&volume.pin_trouble, &volume.counters) {
        (Some(why), _) => format!("not kept: {why}"),
        (None, Some(counters)) => {
            let there = counters
                .pinned_bytes
                .saturating_sub(counters.pinned_left_bytes);
            let share = output::percent(there, counters.pinned_bytes);
            format!("{share} in the SSD tier")
        }
        (None, None) => "not open".to_owned(),
    };
    format!("{} in {ranges} pinned, {state}", show(bytes))
}

/// Wait until nothing is left to be filled. Returns the volume as it is then.
async fn filled(
    client: &Client,
    name: &VolumeName,
    mut volume: Volume,
    of: fn(&Counters) -> u64,
    word: &'static str,
) -> Result<Volume, Failure> {
    let mut interrupts = signal(SignalKind::interrupt())
        .map_err(|error| Failure::failed(format!("cannot watch for Ctrl-C: {error}")))?;
    let total = left(&volume, of);
    let mut progress = Progress::new(total, word);
    let (mut least, mut moved_at) = (total, Instant::now());
    while left(&volume, of) > 0 {
        let interrupted = tokio::select! {
            () = tokio::time::sleep(WATCH_PERIOD) => false,
            _ = interrupts.recv() => true,
        };
        let now = left(&volume, of);
        if now < least {
            (least, moved_at) = (now, Instant::now());
        }
        if interrupted || moved_at.elapsed() > STALL_TIME_MAX {
            progress.finish();
            let why = volume.reason.as_deref();
            let why = why.map_or(String::new(), |why| format!(" ({why})"));
            return Err(Failure::failed(format!(
                "no longer watched: volume {name}: {} are still to be fetched{why}, which goes on: see \
                 `hdcs volume show {name}` and `hdcs status`",
                show(now)
            )));
        }
        volume = client.get(&api_path(name)).await?;
        progress.update(total.saturating_sub(left(&volume, of)));
    }
    progress.finish();
    Ok(volume)
}
