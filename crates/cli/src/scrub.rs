//! `hdcs volume scrub`: progress, rate and ETA while client I/O goes on; Ctrl-C cancels it.

use std::time::Duration;

use clap::Args;
use hdcs_api::{LastScrub, Scrub, ScrubVolume, Volume};
use hdcs_server::catalogue::VolumeName;
use hyper::Method;
use tokio::signal::unix::{SignalKind, signal};

use super::client::Client;
use super::progress::Progress;
use super::size::{Size, show};
use super::volume::{api_path, said};
use super::{Failure, output};

/// How often progress is looked at.
const WATCH_PERIOD: Duration = Duration::from_millis(100);

#[derive(Args, Debug)]
pub struct Arguments {
    /// Name of the volume
    name: VolumeName,
    /// Read at most so much in a second [default: the volume's `scrub_rate_mib_s`]
    #[arg(long, value_name = "SIZE")]
    rate: Option<Size>,
    /// End the scrub that is under way, whoever has begun it
    #[arg(long, conflicts_with = "rate")]
    cancel: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub async fn run(client: &Client, arguments: &Arguments) -> Result<(), Failure> {
    let name = &arguments.name;
    let path = format!("{}/scrub", api_path(name));
    if arguments.cancel {
        let () = client.request(Method::DELETE, &path, &()).await?;
        return said(arguments.json, &(), || {
            format!("volume {name}: its scrub is cancelled")
        });
    }
    // Before it begins, so that there is no moment in which Ctrl-C leaves it running.
    let mut interrupts = signal(SignalKind::interrupt())
        .map_err(|error| Failure::failed(format!("cannot watch for Ctrl-C: {error}")))?;
    let before: Volume = client.get(&api_path(name)).await?;
    let before = before.scrub.and_then(|scrub| scrub.last);
    let request = ScrubVolume {
        rate_bytes_per_s: arguments.rate.map(|rate| rate.0),
    };
    let _: Volume = client.request(Method::POST, &path, &request).await?;
    let ended = tokio::select! {
        ended = watch(client, name) => Some(ended?),
        _ = interrupts.recv() => None,
    };
    let Some(scrub) = ended else {
        let () = client.request(Method::DELETE, &path, &()).await?;
        return Err(Failure::failed(format!(
            "scrub is interrupted: volume {name}: the next one begins again"
        )));
    };
    let Some(last) = scrub.last.filter(|last| before.as_ref() != Some(last)) else {
        return Err(Failure::failed(format!(
            "scrub did not come to its end: volume {name}: it was cancelled or could not read everything; the \
             log of the daemon says which"
        )));
    };
    if arguments.json {
        output::json(&last)?;
    } else {
        output::line(&format!("volume {name} is scrubbed: {}", in_words(&last)));
        for problem in &last.problems {
            output::line(&format!("     {problem}"));
        }
    }
    if last.problems.is_empty() {
        return Ok(());
    }
    let count = last.problems.len();
    Err(Failure::failed(format!(
        "scrub found {count} problem{}: volume {name}: put right what is named above, and scrub it again",
        if count == 1 { "" } else { "s" }
    )))
}

/// What a scrub found.
pub fn in_words(last: &LastScrub) -> String {
    let damage = match (last.bad_blocks, last.problems.len()) {
        (0, 0) => "all good".to_owned(),
        (bad, 0) => format!("{bad} bad blocks, {} made good", last.healed_blocks),
        (bad, problems) => format!(
            "DAMAGED: {bad} bad blocks, {} made good, {problems} problems",
            last.healed_blocks
        ),
    };
    format!("{} read, {damage}", show(last.read_bytes))
}

/// Wait for its end.
async fn watch(client: &Client, name: &VolumeName) -> Result<Scrub, Failure> {
    let mut shown: Option<(String, u64, Progress)> = None;
    loop {
        tokio::time::sleep(WATCH_PERIOD).await;
        let volume: Volume = client.get(&api_path(name)).await?;
        let scrub = volume.scrub.unwrap_or_default();
        let is_same = |(part, bytes, _): &(String, u64, Progress)| {
            scrub.running && *part == scrub.part && *bytes == scrub.part_bytes
        };
        if !shown.as_ref().is_some_and(is_same)
            && let Some((_, _, progress)) = shown.take()
        {
            progress.finish();
        }
        if !scrub.running {
            return Ok(scrub);
        }
        let (_, _, progress) = shown.get_or_insert_with(|| {
            let word = match scrub.part.as_str() {
                "write log" => "of the write log scrubbed",
                "SSD tier" => "of the SSD tier scrubbed",
                "home" => "of the local store scrubbed",
                _ => "of the backend scrubbed",
            };
            let bytes = scrub.part_bytes;
            (scrub.part.clone(), bytes, Progress::new(bytes, word))
        });
        progress.update(scrub.part_bytes.saturating_sub(scrub.part_left_bytes));
    }
}
