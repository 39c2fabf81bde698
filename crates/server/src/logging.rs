//! The daemon's log on standard error, and whoever reads it is never waited for.
//!
//! A thread of its own writes the lines. The queue before it is bounded: when the reader of standard error has stopped
//! reading, further lines are dropped and counted, and the count is logged once lines are taken again.
//!
//! Invariants:
//! 1. No thread but the writer's ever writes to standard error while the daemon serves.
//! 2. The end of the process waits for the last lines for a bounded time only.

use std::io::{IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use hdcs_backend::stores;
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

/// Lines that wait to be written, at most: some seconds of a busy daemon's log.
const LINES_MAX: usize = 1024;
/// How long the last words of a process may take to be written.
const LAST_WORDS_TIME_MAX: Duration = Duration::from_secs(1);

static DROPPED: OnceLock<ErrorCounter> = OnceLock::new();
static DROPPED_SAID: AtomicU64 = AtomicU64::new(0);

/// The log; lines that wait are written when it is dropped, in bounded time.
#[must_use]
pub struct Log {
    _writer: WorkerGuard,
}

/// From now on a panic ends the process, unless it is in the client of HDFS.
pub fn end_on_panic() {
    // The default hook writes to standard error by itself, and a process that is to abort would hang there.
    std::panic::set_hook(Box::new(|panic| {
        if std::thread::current().name() == Some(stores::HDFS_THREADS) {
            tracing::error!("the HDFS client gave an operation up: {panic}");
            return;
        }
        let backtrace = std::backtrace::Backtrace::capture();
        last_words(&format!("{panic}\n{backtrace}"));
        // Nothing of ours goes on after what it did not think of.
        std::process::abort();
    }));
}

/// Log to standard error from now on.
pub fn to_stderr() -> Log {
    let filter = EnvFilter::try_from_env("HDCS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let (queue, writer) = NonBlockingBuilder::default()
        .buffered_lines_limit(LINES_MAX)
        .lossy(true)
        .thread_name("hdcs-log")
        .finish(std::io::stderr());
    // A process has one log.
    let _ = DROPPED.set(queue.error_counter());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(queue)
        .with_target(false)
        .init();
    Log { _writer: writer }
}

/// Lines that were dropped so far because nobody read standard error.
pub fn dropped_lines() -> u64 {
    DROPPED
        .get()
        .map_or(0, |dropped| dropped.dropped_lines() as u64)
}

/// Log how many lines were dropped since this was last asked, if any were.
pub fn say_dropped() {
    let dropped = dropped_lines();
    let said = DROPPED_SAID.load(Ordering::Relaxed);
    if dropped == said {
        return;
    }
    tracing::warn!(
        lines = dropped - said,
        "lines of this log were dropped: whoever reads standard error had stopped reading"
    );
    // If this line was dropped as well, the count has grown and it is said again.
    if dropped_lines() == dropped {
        DROPPED_SAID.store(dropped, Ordering::Relaxed);
    }
}

/// Write to standard error before the process ends, unless that takes too long.
pub fn last_words(text: &str) {
    let line = format!("{text}\n");
    let (written, wait) = sync_channel(1);
    let writer = std::thread::Builder::new().spawn(move || {
        // Nobody may be listening any more.
        let _ = std::io::stderr().write_all(line.as_bytes());
        let _ = written.send(());
    });
    if writer.is_ok() {
        let _ = wait.recv_timeout(LAST_WORDS_TIME_MAX);
    }
}
