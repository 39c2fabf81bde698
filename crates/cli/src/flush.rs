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
    Done,
    Interrupted,
    TimedOut,
}

pub async fn run(client: &Client, arguments: &Arguments) -> Result<(), Failure> {
    let mut interrupts = Interrupts::watch()?;
    let flushed = flush(client, &arguments.name, arguments.timeout, &mut interrupts);
    let (total, took) = flushed.await?;
    output::line(&format!(
        "volume {} is flushed: {} in {:.1} s",
        arguments.name,
        show(total),
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
    let volume: Volume = client.request(Method::POST, &path, &()).await?;
    let total = remaining(&volume);
    let mut progress = Progress::new(total, "flushed");
    let deadline = async {
        match timeout {
            Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds)).await,
            None => std::future::pending().await,
        }
    };
    let end = tokio::select! {
        ended = watch(client, name, &mut progress) => ended.map(|()| End::Done)?,
        () = interrupts.wait() => End::Interrupted,
        () = deadline => End::TimedOut,
    };
    progress.finish();
    let (why, failure): (_, fn(String) -> Failure) = match end {
        End::Done => {
            // Work that has no bytes, such as the flush at its end, counts as less than a sector.
            let flushed = total - total % SECTOR_BYTES as u64;
            return Ok((flushed, progress.started.elapsed()));
        }
        End::Interrupted => ("interrupted", Failure::interrupted),
        End::TimedOut => ("out of time", Failure::failed),
    };
    let () = client.request(Method::DELETE, &path, &()).await?;
    Err(failure(format!(
        "flush is {why}: volume {name}: {} of {} are still to go; they stay safe on this node: run \
         it again to go on",
        show(progress.left),
        show(total)
    )))
}

fn remaining(volume: &Volume) -> u64 {
    volume
        .counters
        .as_ref()
        .map_or(0, |counters| counters.flush_remaining_bytes)
}

async fn watch(client: &Client, name: &VolumeName, progress: &mut Progress) -> Result<(), Failure> {
    while progress.left > 0 {
        tokio::time::sleep(WATCH_PERIOD).await;
        let volume: Volume = client.get(&api_path(name)).await?;
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
        progress.update(remaining(&volume), volume.reason.as_deref());
    }
    Ok(())
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

    pub(super) fn update(&mut self, left: u64, trouble: Option<&str>) {
        self.left = left;
        let done = self.total.saturating_sub(left);
        if let Some(bar) = &self.bar {
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
            show(done),
            show(self.total),
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
