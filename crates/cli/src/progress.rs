//! Progress of a long command on standard error: a bar on a terminal, else a line a second.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::output;
use super::size::show;

/// How often a line is printed where there is no terminal.
const LINE_PERIOD: Duration = Duration::from_secs(1);

/// Bytes done of bytes to do.
pub struct Progress {
    bar: Option<ProgressBar>,
    /// What is being done to them: `exported`.
    done_word: &'static str,
    total: u64,
    started: Instant,
    printed: Instant,
}

impl Progress {
    /// Begin with nothing done of `total`.
    pub fn new(total: u64, done_word: &'static str) -> Self {
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
            done_word,
            total,
            started: now,
            printed: now,
        }
    }

    /// There is so much to do, as is known now.
    pub fn set_total(&mut self, total: u64) {
        self.total = total;
        if let Some(bar) = &self.bar {
            bar.set_length(total);
        }
    }

    /// So much is done.
    pub fn update(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if self.printed.elapsed() >= LINE_PERIOD {
            self.printed = Instant::now();
            output::note(&self.line(done, self.started.elapsed()));
        }
    }

    fn line(&self, done: u64, elapsed: Duration) -> String {
        let rate = done as f64 / elapsed.as_secs_f64().max(0.001);
        let eta = if rate > 0.0 {
            format!("{:.0} s", self.total.saturating_sub(done) as f64 / rate)
        } else {
            "unknown".to_owned()
        };
        format!(
            "{} of {} {}, {}/s, ETA {eta}",
            show(done),
            show(self.total),
            self.done_word,
            show(rate as u64)
        )
    }

    /// Time since the begin.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Take the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_line_tells_what_rate_and_eta() {
        let progress = Progress::new(4 << 20, "exported");
        let line = progress.line(1 << 20, Duration::from_secs(2));
        assert_eq!(line, "1 MiB of 4 MiB exported, 512 KiB/s, ETA 6 s");
        let line = progress.line(0, Duration::from_secs(2));
        assert!(line.contains("ETA unknown"), "{line}");
    }
}
