//! `hdcs inspect` and `hdcs check`: offline, and for a volume that a daemon has open, through it.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use hdcs_api::{CheckReport, ErrorKind, Volume};
use hdcs_server::catalogue::{self, VolumeName};
use hdcs_server::data_dir::Layout;
use hdcs_server::inspect::home::LocalStoreSummary;
use hdcs_server::inspect::{self, CacheSummary, Inspection, LogSummary, SuperblockSummary, Use};
use hyper::Method;
use indicatif::{ProgressBar, ProgressStyle};

use super::client::{Client, ClientError};
use super::size::{Size, show};
use super::volume::api_path;
use super::{Failure, backend_check, output};

/// How often a line of progress is printed where there is no terminal.
const LINE_PERIOD: Duration = Duration::from_secs(1);

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// A path (with a `/`), the name of a volume, or the URL of a backend, such as s3://BUCKET/PREFIX
    #[arg(value_name = "PATH|VOLUME|URL")]
    target: String,
    /// Of a volume or data directory: leave out what is in the backends
    #[arg(long)]
    no_backend: bool,
    /// Read at most so much of a backend in a second
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    rate: Option<Size>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_rate(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error| format!("{error}"))?;
    if size.0 == 0 {
        return Err("at least 1".to_owned());
    }
    Ok(size)
}

/// `hdcs inspect PATH`.
pub fn inspect(path: &Path, json: bool) -> Result<(), Failure> {
    let found = inspect::inspect(path).map_err(|error| Failure::failed(error.to_string()))?;
    if json {
        return output::json(&found);
    }
    match &found {
        Inspection::Log { path, log } => {
            output::line(&format!("write log {path}"));
            describe_log(log);
        }
        Inspection::Home { path, home } => {
            output::line(&format!("local store {path}"));
            describe_home(home);
        }
        Inspection::Cache { path, cache } => {
            output::line(&format!("read cache {path}"));
            describe_cache(cache, |_| None);
        }
        Inspection::DataDirectory {
            path,
            daemon,
            problem,
            volumes,
            cache_bytes,
            cache,
        } => {
            output::line(&format!("data directory {path}"));
            let daemon = daemon.map_or("none".to_owned(), |pid| format!("process {pid}"));
            output::line(&format!("daemon: {daemon}"));
            if let Some(problem) = problem {
                output::line(&format!("PROBLEM: {problem}"));
            }
            if let Some(bytes) = cache_bytes {
                output::line(&format!("cache file: {}", show(*bytes)));
            }
            if let Some(cache) = cache {
                describe_cache(cache, |number| {
                    let named = volumes.iter().find(|volume| volume.number == Some(number));
                    named.map(|volume| volume.name.as_str())
                });
            }
            for volume in volumes {
                output::line(&format!("\nvolume {}", volume.name));
                if let Some(bytes) = volume.bytes {
                    output::line(&format!("size: {}", show(bytes)));
                }
                if let Some(backend) = &volume.backend {
                    output::line(&format!("backend: {backend}"));
                }
                if let Some(problem) = &volume.problem {
                    output::line(&format!("PROBLEM: {problem}"));
                }
                if let Some(log) = &volume.log {
                    describe_log(log);
                }
                if let Some(home) = &volume.home {
                    describe_home(home);
                }
            }
        }
    }
    Ok(())
}

fn describe_home(home: &LocalStoreSummary) {
    output::line(&format!(
        "local store of volume {}: {}, sequence {}, map of {} pages, {} damaged copies{}",
        home.volume,
        show(home.bytes),
        home.sequence,
        home.pages,
        home.damaged_copies,
        if home.backend_between {
            ", the backend is between two states"
        } else {
            ""
        }
    ));
    output::line(&format!(
        "local store: {} dirty, {} zero, {} clean, {} only in the backend",
        show(home.dirty_bytes),
        show(home.zero_bytes),
        show(home.clean_bytes),
        show(home.absent_bytes)
    ));
    if let Some(key) = &home.data_key {
        output::line(&format!("local store: encrypted with data key {key}"));
    }
    for problem in &home.problems {
        output::line(&format!("PROBLEM: {problem}"));
    }
}

/// What a superblock says of a copy in a group; nothing without one.
fn describe_copy(superblock: &SuperblockSummary) -> String {
    let Some(copy) = &superblock.group else {
        return String::new();
    };
    let promised = superblock.epoch.unwrap_or(0);
    let mut text = format!(
        ", copy in a group: promised epoch {promised}, joined under revision {}",
        copy.joined
    );
    if copy.void_before > 0 {
        text += &format!(
            ", cut at {} (void there before incarnation {})",
            copy.cut_position, copy.void_before
        );
    }
    if !copy.whole {
        text += ", not whole";
    }
    text
}

fn describe_log(log: &LogSummary) {
    for superblock in &log.superblocks {
        let block = superblock.block;
        match (&superblock.problem, superblock.volume) {
            (None, Some(volume)) => output::line(&format!(
                "superblock {block}: volume {volume}, sequence {}, incarnation {}, tail {}, {}{}{}",
                superblock.sequence.unwrap_or(0),
                superblock.incarnation.unwrap_or(0),
                superblock.tail.unwrap_or(0),
                superblock
                    .clean_head
                    .map_or("not closed cleanly".to_owned(), |head| format!(
                        "closed cleanly at {head}"
                    )),
                if superblock.unflushed == Some(true) {
                    ", writes past the log may not be flushed"
                } else {
                    ""
                },
                describe_copy(superblock),
            )),
            (problem, _) => output::line(&format!(
                "superblock {block}: {}",
                problem.as_deref().unwrap_or("unknown")
            )),
        }
    }
    output::line(&format!(
        "ring: {} blocks, {} prepared, {} in use, head at {}",
        log.ring_blocks, log.prepared_blocks, log.used_blocks, log.head
    ));
    output::line(&format!(
        "spans: {}, entries: {}, dirty: {} ({} bytes), sync points: {}",
        log.spans,
        log.entries,
        show(log.data_bytes),
        log.data_bytes,
        log.sync_points
    ));
    let compressed = &log.compressed;
    if compressed.entries > 0 {
        output::line(&format!(
            "compressed: {} of the entries, {} to {}",
            compressed.entries,
            show(compressed.plain_bytes),
            show(compressed.stored_bytes)
        ));
    }
    if log.records > 0 {
        output::line(&format!("records: {}", log.records));
    }
    for request in &log.requests {
        output::line(&format!(
            "request {} of client {}: {} bytes of effect, {} of result",
            request.number, request.client, request.effect_bytes, request.result_bytes
        ));
    }
    if let Some(position) = log.broken_position {
        output::line(&format!("first broken span: position {position}"));
    }
    if let Some(problem) = &log.problem {
        output::line(&format!("PROBLEM: {problem}"));
    }
}

fn describe_cache<'a>(cache: &CacheSummary, name: impl Fn(u32) -> Option<&'a str>) {
    for superblock in &cache.superblocks {
        let block = superblock.block;
        match (&superblock.problem, superblock.uuid) {
            (None, Some(uuid)) => output::line(&format!(
                "superblock {block}: cache {uuid}, sequence {}, incarnation {}, format {}",
                superblock.sequence.unwrap_or(0),
                superblock.incarnation.unwrap_or(0),
                superblock.format.unwrap_or(0),
            )),
            (problem, _) => output::line(&format!(
                "superblock {block}: {}",
                problem.as_deref().unwrap_or("unknown")
            )),
        }
    }
    output::line(&format!(
        "region: {}, {} segments, lines of {}",
        show(cache.region_bytes),
        cache.segments,
        show(cache.line_bytes)
    ));
    if let Some(why) = &cache.cold_reason {
        output::line(&format!("the next start is cold: {why}"));
    }
    if let Some(journal) = &cache.journal {
        output::line(&format!(
            "journal: epochs {} to {}, half {}, {} of {} blocks in use, {} ranges, {} segments voided",
            journal.first_epoch,
            journal.last_epoch,
            journal.half,
            journal.used_blocks,
            journal.half_blocks,
            journal.ranges,
            journal.segments
        ));
        output::line(&format!(
            "segments: {} in use, {} void, {} damaged; lines: {}, void: {}; cached: {}, stored in {}",
            cache.used_segments,
            cache.void_segments,
            cache.damaged_segments,
            cache.lines,
            cache.void_lines,
            show(cache.cached_bytes),
            show(cache.stored_bytes)
        ));
    }
    for volume in &cache.volumes {
        let number = volume.number;
        let name = name(number).map_or(String::new(), |name| format!(" ({name})"));
        output::line(&format!(
            "cached of volume number {number}{name}: {} in {} lines",
            show(volume.bytes),
            volume.lines
        ));
    }
    for problem in &cache.problems {
        output::line(&format!("PROBLEM: {problem}"));
    }
}

/// A bar on a terminal, else a line a second on standard error.
struct Progress {
    bar: Option<ProgressBar>,
    printed: Instant,
}

impl Progress {
    fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            let template = "{bar:30} {percent}% {binary_bytes}/{binary_total_bytes} ETA {eta}";
            // A template that does not parse costs the bar its looks, and is seen at once.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar
        });
        Self {
            bar,
            printed: Instant::now(),
        }
    }

    fn update(&mut self, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            if done == total {
                bar.finish_and_clear();
            }
        } else if self.printed.elapsed() >= LINE_PERIOD {
            self.printed = Instant::now();
            eprintln!(
                "{} of {} of the read cache checked",
                show(done),
                show(total)
            );
        }
    }
}

/// `hdcs check PATH|VOLUME|URL`.
pub(crate) async fn check(client: &Client, arguments: &Arguments) -> Result<(), Failure> {
    let target = &arguments.target;
    let reports = reports(client, arguments).await?;
    if arguments.json {
        output::json(&reports)?;
    } else {
        for report in &reports {
            let verdict = if report.problems.is_empty() {
                "good"
            } else {
                "BAD"
            };
            output::line(&format!("{verdict}  {}: {}", report.path, verified(report)));
            if let Some(note) = &report.note {
                output::line(&format!("     {note}"));
            }
            for problem in &report.problems {
                output::line(&format!("     {problem}"));
            }
        }
    }
    let problems: usize = reports.iter().map(|report| report.problems.len()).sum();
    if problems == 0 {
        Ok(())
    } else {
        Err(Failure::failed(format!(
            "check found {problems} problem{}: {target}: {}",
            if problems == 1 { "" } else { "s" },
            remedy(&reports)
        )))
    }
}

fn verified(report: &CheckReport) -> String {
    let parts = [
        ("spans", report.spans),
        ("segments", report.segments),
        ("objects", report.objects),
        ("blocks", report.blocks),
    ];
    let parts = parts
        .into_iter()
        // A log without spans and a cache without segments still say what they have none of.
        .filter(|&(what, count)| count > 0 || what == "blocks");
    let parts: Vec<_> = parts
        .map(|(what, count)| format!("{count} {what}"))
        .chain((report.bytes > 0).then(|| format!("{} read", show(report.bytes))))
        .collect();
    parts.join(", ")
}

fn remedy(reports: &[CheckReport]) -> &'static str {
    let bad = || reports.iter().filter(|report| !report.problems.is_empty());
    // What is damaged was read at least in part.
    let is_unread = |report: &CheckReport| {
        backend_check::is_url(&report.path) && report.bytes + report.blocks + report.objects == 0
    };
    if bad().all(is_unread) {
        "nothing of it could be read: put right what is said above, and check it again"
    } else if bad().all(|report| report.is_cache) {
        "only the read cache is damaged: nothing is to be restored; look at the health of its device"
    } else {
        "do what is said with each problem; where nothing is said, restore from a replica or backup"
    }
}

async fn reports(client: &Client, arguments: &Arguments) -> Result<Vec<CheckReport>, Failure> {
    let target = &arguments.target;
    let path = Path::new(target);
    if backend_check::is_url(target) {
        let report = backend_check::check(target, None, arguments.rate).await?;
        return Ok(vec![report]);
    }
    let name = match target.parse::<VolumeName>() {
        Ok(name) if !target.contains('/') => name,
        _ => return path_reports(path, arguments).await,
    };
    let request = format!("{}/check", api_path(&name));
    match client.request(Method::POST, &request, &()).await {
        Ok(report) => {
            let mut reports = vec![report];
            let volume: Volume = client.get(&api_path(&name)).await?;
            if let Some(path) = &volume.home_path {
                let uuid = volume.uuid.parse().ok();
                reports.push(inspect::home::check(Path::new(path), uuid, Use::Live, None));
            }
            reports.extend(cache_report(client.layout()));
            if !arguments.no_backend {
                let directory = catalogue::directory(client.layout(), &name);
                let here = inspect::backends(&directory).pop();
                let encryption = here.and_then(|(_, encryption)| encryption);
                let report = backend_check::check(&volume.backend, encryption, arguments.rate);
                reports.push(report.await?);
            }
            Ok(reports)
        }
        Err(ClientError::Api(error)) if error.kind == ErrorKind::NotFound && path.exists() => {
            path_reports(path, arguments).await
        }
        Err(ClientError::NoDaemon(_)) if path.exists() => path_reports(path, arguments).await,
        Err(ClientError::NoDaemon(why)) => {
            let directory = hdcs_server::catalogue::directory(client.layout(), &name);
            if directory.exists() {
                path_reports(&directory, arguments).await
            } else {
                Err(Failure::failed(format!(
                    "no file and no volume of this name: {target}: {why}"
                )))
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// The read cache of a node at work, where the volume's lines are among the others.
fn cache_report(layout: &Layout) -> Option<CheckReport> {
    let (cache, mut progress) = (layout.cache(), Progress::new());
    let mut update = |done, total| progress.update(done, total);
    cache
        .exists()
        .then(|| inspect::check_cache(&cache, layout.cache_uuid(), Use::Live, &mut update))
}

/// What is at a path, and the backends of the volumes there.
async fn path_reports(path: &Path, arguments: &Arguments) -> Result<Vec<CheckReport>, Failure> {
    // The backends of a data directory may be in it, and their URLs name absolute paths.
    let path = &std::path::absolute(path).map_err(|error| Failure::failed(error.to_string()))?;
    let mut reports = check_path(path)?;
    if !arguments.no_backend {
        for (url, encryption) in inspect::backends(path) {
            reports.push(backend_check::check(&url, encryption, arguments.rate).await?);
        }
    }
    Ok(reports)
}

fn check_path(path: &Path) -> Result<Vec<CheckReport>, Failure> {
    let fail = |error: inspect::InspectError| Failure::failed(error.to_string());
    if path.is_dir() {
        let layout = Layout::new(path);
        if layout.volumes().is_dir() {
            let mut progress = Progress::new();
            return inspect::check_data_directory(&layout, &mut |done, total| {
                progress.update(done, total);
            })
            .map_err(fail);
        }
        let log = path.join(catalogue::LOG_FILE);
        // A log of which nothing can be recognised is damaged.
        if inspect::is_log(&log) || catalogue::is_volume_directory(path) && log.exists() {
            let encryption = catalogue::encryption_beside(&log);
            let report = inspect::check_log(&log, None, encryption.as_ref(), Use::Live);
            let home = path.join(catalogue::HOME_FILE);
            let owner = inspect::log_owner(&log);
            let home = (home.exists()).then(|| inspect::home::check(&home, owner, Use::Live, None));
            return Ok(std::iter::once(report).chain(home).collect());
        }
    }
    if inspect::is_cache(path) {
        let mut progress = Progress::new();
        let mut update = |done, total| progress.update(done, total);
        return Ok(vec![inspect::check_cache(
            path,
            None,
            Use::of_file(path),
            &mut update,
        )]);
    }
    let is_home =
        std::fs::File::open(path).is_ok_and(|file| inspect::home::is_home(&file).unwrap_or(false));
    if is_home {
        return Ok(vec![inspect::home::check(path, None, Use::Live, None)]);
    }
    // What is not recognisable is told apart from what is damaged.
    inspect::inspect(path).map_err(fail)?;
    // Whether somebody has it open cannot be told from a path alone.
    let encryption = catalogue::encryption_beside(path);
    let report = inspect::check_log(path, None, encryption.as_ref(), Use::Live);
    Ok(vec![report])
}
