//! `hdcs events`: what was done to the node and its volumes, what was refused, and by whom.

use std::time::Duration;

use clap::Args;
use hdcs_api::events::Event;
use hdcs_api::time::utc;
use hdcs_server::catalogue::VolumeName;

use super::client::Client;
use super::{Failure, output};

/// How often new events are looked for.
const FOLLOW_PERIOD: Duration = Duration::from_millis(500);
/// Events that are asked for at once while following.
const FOLLOW_LIMIT: u64 = 1000;

#[derive(Args, Debug)]
pub struct Arguments {
    /// Only events of this volume
    volume: Option<VolumeName>,
    /// Show so many of the newest
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=4096))]
    limit: u64,
    /// Go on with what happens from now on, until Ctrl-C
    #[arg(long)]
    follow: bool,
    /// Print JSON: a list, or with --follow one event a line
    #[arg(long)]
    json: bool,
}

/// The rest of a query for one volume, if one is asked for; a name needs no escapes.
fn of_volume(arguments: &Arguments) -> String {
    let volume = arguments.volume.as_ref();
    volume.map_or(String::new(), |name| format!("&volume={name}"))
}

fn show(event: &Event) -> String {
    let mut line = format!(
        "{}  {} {}",
        utc(event.at_ms),
        event.kind,
        event.outcome.word()
    );
    let mut more = |name: &str, text: &str| {
        if !text.is_empty() {
            line.push_str(&format!("  {name}{text}"));
        }
    };
    more("volume ", event.volume.as_deref().unwrap_or_default());
    more("by ", &event.who);
    more("", &event.what);
    more("why: ", &event.why);
    if event.count > 1 {
        line.push_str(&format!("  ({} times)", event.count));
    }
    line
}

pub async fn run(client: &Client, arguments: &Arguments) -> Result<(), Failure> {
    let volume = of_volume(arguments);
    let path = format!("/v1/events?limit={}{volume}", arguments.limit);
    let events: Vec<Event> = client.get(&path).await?;
    if !arguments.follow {
        if arguments.json {
            return output::json(&events);
        }
        for event in &events {
            output::line(&show(event));
        }
        return Ok(());
    }
    let mut last = events.last().map_or(0, |event| event.number);
    let mut next = events;
    loop {
        for event in &next {
            last = event.number;
            if arguments.json {
                let line = serde_json::to_string(event);
                output::line(&line.map_err(|error| Failure::failed(error.to_string()))?);
            } else {
                output::line(&show(event));
            }
        }
        tokio::time::sleep(FOLLOW_PERIOD).await;
        let path = format!("/v1/events?after={last}&limit={FOLLOW_LIMIT}{volume}");
        next = client.get(&path).await?;
    }
}
