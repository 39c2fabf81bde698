//! `hdcs check` of a backend: by this process, beside whoever has it open, with a rate, progress and a cancel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdcs_api::CheckReport;
use hdcs_backend::SnapshotStore;
use hdcs_backend::crypt::Encryption;
use hdcs_backend::url::BackendUrl;
use hdcs_backend::verify::{Verified, Watch};
use tokio::signal::unix::{SignalKind, signal};

use super::Failure;
use super::progress::Progress;
use super::size::{Size, show};

/// How often progress is looked at, and a pause that the rate demands is looked up from.
const WATCH_PERIOD: Duration = Duration::from_millis(100);

/// What the verification and its watcher share.
#[derive(Default)]
struct Shared {
    total_bytes: AtomicU64,
    done_bytes: AtomicU64,
    cancelled: AtomicBool,
}

/// The side of the verification.
struct Pace {
    shared: Arc<Shared>,
    bytes_per_s: Option<u64>,
    started: Instant,
    read_bytes: u64,
}

impl Watch for Pace {
    fn total(&mut self, bytes: u64) {
        self.shared.total_bytes.store(bytes, Ordering::Relaxed);
    }

    fn skipped(&mut self, bytes: u64) {
        self.shared.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn passed(&mut self, bytes: u64) -> bool {
        self.shared.done_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.read_bytes += bytes;
        let due = (self.bytes_per_s).map_or(Duration::ZERO, |rate| {
            Duration::from_secs_f64(self.read_bytes as f64 / rate as f64)
        });
        while !self.shared.cancelled.load(Ordering::Relaxed) {
            let early = due.saturating_sub(self.started.elapsed());
            if early.is_zero() {
                return true;
            }
            std::thread::sleep(early.min(WATCH_PERIOD));
        }
        false
    }
}

/// Whether a target of the check is the URL of a backend, or is meant to be one.
pub fn is_url(target: &str) -> bool {
    let Some((scheme, _)) = target.split_once(':') else {
        return false;
    };
    let is_word = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    ["dir", "file", "rbd", "s3", "hdfs"].contains(&scheme)
        || is_word && !std::path::Path::new(target).exists()
}

/// Verify what is at a URL, which may be encrypted: without its key, what needs none.
pub async fn check(
    url: &str,
    encryption: Option<Encryption>,
    rate: Option<Size>,
) -> Result<CheckReport, Failure> {
    let backend = BackendUrl::parse(url).map_err(|error| Failure::misused(error.to_string()))?;
    let mut target = backend.place;
    // What is kept in plain needs none, and says so.
    let is_objects = target
        .snapshot_store()
        .is_some_and(SnapshotStore::is_objects);
    let mut keyless = None;
    if let Some(encryption) = encryption.filter(|_| is_objects) {
        match encryption.unlock() {
            Ok(unlocked) => target.encrypt(unlocked.objects),
            Err(error) => keyless = Some(error),
        }
    }
    let mut interrupts = signal(SignalKind::interrupt())
        .map_err(|error| Failure::failed(format!("cannot watch for Ctrl-C: {error}")))?;
    let shared = Arc::new(Shared::default());
    let mut pace = Pace {
        shared: Arc::clone(&shared),
        bytes_per_s: rate.map(|rate| rate.0),
        started: Instant::now(),
        read_bytes: 0,
    };
    let mut work = tokio::task::spawn_blocking(move || target.verify(&mut pace));
    let mut progress: Option<Progress> = None;
    let ended = loop {
        tokio::select! {
            ended = &mut work => break ended,
            () = tokio::time::sleep(WATCH_PERIOD) => {}
            _ = interrupts.recv() => shared.cancelled.store(true, Ordering::Relaxed),
        }
        let total = shared.total_bytes.load(Ordering::Relaxed);
        if total > 0 {
            let progress = progress.get_or_insert_with(|| Progress::new(total, "checked"));
            progress.set_total(total);
            progress.update(shared.done_bytes.load(Ordering::Relaxed));
        }
    };
    if let Some(progress) = progress {
        progress.finish();
    }
    let verified =
        ended.map_err(|error| Failure::failed(format!("cannot check {url}: {error}")))?;
    let mut verified = verified.unwrap_or_else(|error| Verified {
        problems: vec![error.to_string()],
        ..Verified::default()
    });
    match keyless {
        Some(error) if error.is_keyless() => {
            verified.note = Some(match verified.note {
                Some(note) => format!("{note}: {error}"),
                None => error.to_string(),
            });
        }
        Some(error) => verified.problems.push(format!("{url}: {error}")),
        None => {}
    }
    report(url, verified)
}

fn report(url: &str, mut verified: Verified) -> Result<CheckReport, Failure> {
    if verified.more_problems > 0 {
        let more = format!("{} more problems are not listed", verified.more_problems);
        verified.problems.push(more);
    }
    if let Some(why) = &verified.ended_by {
        let rest = format!("{url}: the rest is not verified: {why}");
        verified.problems.push(rest);
    }
    if verified.is_cut_short {
        let found = match verified.problems.as_slice() {
            [] => "no problem in that".to_owned(),
            problems => problems.join("; "),
        };
        return Err(Failure::failed(format!(
            "check is interrupted: {url}: {} were read: {found}",
            show(verified.bytes)
        )));
    }
    Ok(CheckReport {
        path: url.to_owned(),
        blocks: verified.blocks,
        objects: verified.objects,
        bytes: verified.bytes,
        note: verified.note,
        problems: verified.problems,
        ..CheckReport::default()
    })
}
