//! `hdcs volume flush`: progress, rate and ETA while client I/O goes on; Ctrl-C cancels it.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use hdcs_api::{Counters, Volume};
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_server::catalogue::VolumeName;
use hyper::Method;
use indicatif::{ProgressBar, ProgressStyle};

use super::client::Client;
use super::interrupts::Interrupts;
use super::size::show;
use super::volume::api_path;
use super::{Failure, output};

/// How often progress is looked at.
pub(super) const WATCH_PERIOD: Duration = Duration::from_millis(100);
/// How often a line is printed where there is no terminal.
const LINE_PERIOD: Duration = Duration::from_secs(1);

#[derive(Args, Debug)]
pub struct Arguments {
    /// Name of the volume
    name: VolumeName,
    /// Give up after so many seconds; the flush is cancelled
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u64>,
}

/// How a flush ended.
enum End {
    /// The volume as it was then.
    Done(Box<Volume>),
    Interrupted,
    TimedOut,
}

pub async fn run(client: &Client, arguments: &Arguments) -> Result<(), Failure> {
    let mut interrupts = Interrupts::watch()?;
    let flushed = flush(client, &arguments.name, arguments.timeout, &mut interrupts);
    let (flushed, took) = flushed.await?;
    output::line(&format!(
        "volume {} is flushed: {} in {:.1} s",
        arguments.name,
        show(flushed),
        took.as_secs_f64()
    ));
    Ok(())
}

/// Write everything dirty to the backend; how much that was, and how long it took.
pub(super) async fn flush(
    client: &Client,
    name: &VolumeName,
    timeout: Option<u64>,
    interrupts: &mut Interrupts,
) -> Result<(u64, Duration), Failure> {
    let path = format!("{}/flush", api_path(name));
    let before: Volume = client.get(&api_path(name)).await?;
    let volume: Volume = client.request(Method::POST, &path, &()).await?;
    let mut progress = Progress::new(remaining(&volume), "flushed");
    let deadline = async {
        match timeout {
            Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds)).await,
            None => std::future::pending().await,
        }
    };
    let end = tokio::select! {
        ended = watch(client, name, volume, &mut progress) => End::Done(ended?),
        () = interrupts.wait() => End::Interrupted,
        () = deadline => End::TimedOut,
    };
    progress.finish();
    let (why, failure): (_, fn(String) -> Failure) = match end {
        End::Done(after) => {
            let flushed = match (tiered(&before), tiered(&after)) {
                (Some(before), Some(after)) => after.saturating_sub(before),
                _ => progress.total,
            };
            return Ok((whole(flushed), progress.started.elapsed()));
        }
        End::Interrupted => ("interrupted", Failure::interrupted),
        End::TimedOut => ("out of time", Failure::failed),
    };
    let () = client.request(Method::DELETE, &path, &()).await?;
    Err(failure(format!(
        "flush is {why}: volume {name}: {} of {} are still to go; they stay safe on this node: run \
         it again to go on",
        show(whole(progress.left)),
        show(whole(progress.total))
    )))
}

fn remaining(volume: &Volume) -> u64 {
    volume
        .counters
        .as_ref()
        .map_or(0, |counters| counters.flush_remaining_bytes)
}

/// Bytes without what stands for work that has none, such as the flush at the end: less than a sector.
fn whole(bytes: u64) -> u64 {
    bytes - bytes % SECTOR_BYTES as u64
}

/// Bytes that the backend has got of the volume's local store, if there is one.
fn tiered(volume: &Volume) -> Option<u64> {
    let counters = volume.counters.as_ref()?;
    Some(counters.home.as_ref()?.tiered_bytes)
}

/// Of the bytes that are to reach the backend, those that have; `None` if the volume has no local store. What is
/// destaged into that has still all the way to go.
fn reached(volume: &Volume) -> Option<u64> {
    let home = volume.counters.as_ref()?.home.as_ref()?;
    let is_copied = matches!(home.tier.as_str(), "copying" | "finishing");
    Some(if is_copied {
        home.tier_bytes.saturating_sub(home.tier_left_bytes)
    } else {
        0
    })
}

/// Wait until nothing is left to flush. Returns the volume as it is then.
async fn watch(
    client: &Client,
    name: &VolumeName,
    mut volume: Volume,
    progress: &mut Progress,
) -> Result<Box<Volume>, Failure> {
    while progress.left > 0 {
        tokio::time::sleep(WATCH_PERIOD).await;
        volume = client.get(&api_path(name)).await?;
        if volume.counters.is_none() {
            return Err(Failure::failed(format!(
                "flush has ended: volume {name}: it is not open any more: see `hdcs volume show {name}`"
            )));
        }
        let has_failed = |counters: &Counters| {
            let local = counters.home.as_ref();
            local.is_some_and(|local| local.failed.is_some())
        };
        if volume.state == "error" || volume.counters.as_ref().is_some_and(has_failed) {
            let why = volume.reason.unwrap_or_default();
            return Err(Failure::failed(format!(
                "flush has ended: volume {name}: {why}"
            )));
        }
        let (left, trouble) = (remaining(&volume), volume.reason.as_deref());
        match reached(&volume) {
            // The last look finds nothing under way.
            Some(done) if left > 0 => progress.restate(done, left, trouble),
            _ => progress.update(left, trouble),
        }
    }
    Ok(Box::new(volume))
}

/// A bar on a terminal, else a line a second on standard error.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    /// What is done to the bytes.
    done: &'static str,
    total: u64,
    left: u64,
    started: Instant,
    printed: Instant,
}

impl Progress {
    pub(super) fn new(total: u64, done: &'static str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total);
            let template = "{bar:30} {percent}% {binary_bytes}/{binary_total_bytes} \
                            {binary_bytes_per_sec} ETA {eta} {msg}";
            // A template that does not parse costs the bar its looks, and is seen at once.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar
        });
        let now = Instant::now();
        Self {
            bar,
            done,
            total,
            left: total,
            started: now,
            printed: now,
        }
    }

    /// So much is left. If that is more than before, more is to be done than was known.
    pub(super) fn update(&mut self, left: u64, trouble: Option<&str>) {
        let done = self.total - left.min(self.left);
        self.restate(done, left, trouble);
    }

    /// So much is done, and so much is left, as is known now.
    fn restate(&mut self, done: u64, left: u64, trouble: Option<&str>) {
        (self.total, self.left) = (done + left, left);
        if let Some(bar) = &self.bar {
            bar.set_length(self.total);
            bar.set_position(done);
            bar.set_message(trouble.unwrap_or_default().to_owned());
        } else if self.printed.elapsed() >= LINE_PERIOD {
            self.printed = Instant::now();
            output::note(&self.line(done, self.started.elapsed(), trouble));
        }
    }

    fn line(&self, done: u64, elapsed: Duration, trouble: Option<&str>) -> String {
        let rate = done as f64 / elapsed.as_secs_f64().max(0.001);
        // What went well before says nothing of when the backend takes the rest.
        let eta = if rate > 0.0 && trouble.is_none() {
            format!("{:.0} s", self.left as f64 / rate)
        } else {
            "unknown".to_owned()
        };
        let trouble = trouble.map_or(String::new(), |trouble| format!(" ({trouble})"));
        format!(
            "{} of {} {}, {}/s, ETA {eta}{trouble}",
            show(whole(done)),
            show(whole(self.total)),
            self.done,
            show(rate as u64)
        )
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_never_has_more_left_than_there_is_in_all() {
        let mut progress = Progress::new(4 << 20, "flushed");
        let mut seen = |left: u64| {
            progress.update(left, None);
            (progress.total >> 20, progress.left >> 20)
        };
        assert_eq!(seen(3 << 20), (4, 3));
        assert_eq!(seen(9 << 20), (10, 9), "more came, and one is done");
        assert_eq!(seen(0), (10, 0));
        // What is destaged into a local store is not done, and is copied from there.
        progress.restate(0, 2 << 20, None);
        assert_eq!((progress.total, progress.left), (2 << 20, 2 << 20));
        progress.restate(1 << 20, 1 << 20, None);
        assert_eq!((progress.total, progress.left), (2 << 20, 1 << 20));
    }

    #[test]
    fn flush_line_tells_progress_rate_and_eta() {
        let mut progress = Progress::new(4 << 20, "flushed");
        progress.left = 3 << 20;
        let line = progress.line(1 << 20, Duration::from_secs(2), None);
        assert_eq!(line, "1 MiB of 4 MiB flushed, 512 KiB/s, ETA 6 s");
        let line = progress.line(1 << 20, Duration::from_secs(2), Some("full"));
        assert_eq!(
            line,
            "1 MiB of 4 MiB flushed, 512 KiB/s, ETA unknown (full)"
        );
        progress.left = 4 << 20;
        assert!(
            progress
                .line(0, Duration::from_secs(2), None)
                .contains("ETA unknown")
        );
    }
}
