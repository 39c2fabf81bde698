//! `hdcs inspect` and `hdcs check`: offline, and for a volume that a daemon has open, through it.

use std::path::Path;

use hyper::Method;

use super::client::{Client, ClientError};
use super::size::show;
use super::volume::api_path;
use super::{Failure, output};
use crate::catalogue::VolumeName;
use crate::control::api::{CheckReport, ErrorKind};
use crate::data_dir::Layout;
use crate::inspect::{self, Inspection, LogSummary, Use};

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
        Inspection::DataDirectory {
            path,
            daemon,
            problem,
            volumes,
            cache_bytes,
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
            }
        }
    }
    Ok(())
}

fn describe_log(log: &LogSummary) {
    for superblock in &log.superblocks {
        let block = superblock.block;
        match (&superblock.problem, superblock.volume) {
            (None, Some(volume)) => output::line(&format!(
                "superblock {block}: volume {volume}, sequence {}, incarnation {}, tail {}, {}",
                superblock.sequence.unwrap_or(0),
                superblock.incarnation.unwrap_or(0),
                superblock.tail.unwrap_or(0),
                superblock
                    .clean_head
                    .map_or("not closed cleanly".to_owned(), |head| format!(
                        "closed cleanly at {head}"
                    )),
            )),
            (problem, _) => output::line(&format!(
                "superblock {block}: {}",
                problem.as_deref().unwrap_or("unknown")
            )),
        }
    }
    output::line(&format!(
        "ring: {} blocks, {} in use, head at {}",
        log.ring_blocks, log.used_blocks, log.head
    ));
    output::line(&format!(
        "spans: {}, entries: {}, dirty: {} ({} bytes), sync points: {}",
        log.spans,
        log.entries,
        show(log.data_bytes),
        log.data_bytes,
        log.sync_points
    ));
    if let Some(position) = log.broken_position {
        output::line(&format!("first broken span: position {position}"));
    }
    if let Some(problem) = &log.problem {
        output::line(&format!("PROBLEM: {problem}"));
    }
}

/// `hdcs check PATH|VOLUME`.
pub async fn check(client: &Client, target: &str, json: bool) -> Result<(), Failure> {
    let reports = reports(client, target).await?;
    if json {
        output::json(&reports)?;
    } else {
        for report in &reports {
            let verdict = if report.problems.is_empty() {
                "good"
            } else {
                "BAD"
            };
            output::line(&format!(
                "{verdict}  {}: {} spans, {} blocks",
                report.path, report.spans, report.blocks
            ));
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
            "check found {problems} problem{}: {target}: restore what is damaged from a replica or backup",
            if problems == 1 { "" } else { "s" }
        )))
    }
}

async fn reports(client: &Client, target: &str) -> Result<Vec<CheckReport>, Failure> {
    let path = Path::new(target);
    let name = match target.parse::<VolumeName>() {
        Ok(name) if !target.contains('/') => name,
        _ => return check_path(path),
    };
    let request = format!("{}/check", api_path(&name));
    match client.request(Method::POST, &request, &()).await {
        Ok(report) => Ok(vec![report]),
        Err(ClientError::Api(error)) if error.kind == ErrorKind::NotFound && path.exists() => {
            check_path(path)
        }
        Err(ClientError::NoDaemon(_)) if path.exists() => check_path(path),
        Err(ClientError::NoDaemon(why)) => {
            let directory = crate::catalogue::directory(client.layout(), &name);
            if directory.exists() {
                check_path(&directory)
            } else {
                Err(Failure::failed(format!(
                    "no file and no volume of this name: {target}: {why}"
                )))
            }
        }
        Err(error) => Err(error.into()),
    }
}

fn check_path(path: &Path) -> Result<Vec<CheckReport>, Failure> {
    let fail = |error: inspect::InspectError| Failure::failed(error.to_string());
    if path.is_dir() {
        let layout = Layout::new(path);
        if layout.volumes().is_dir() {
            return inspect::check_data_directory(&layout).map_err(fail);
        }
        let log = path.join(crate::catalogue::LOG_FILE);
        if inspect::is_log(&log) {
            return Ok(vec![inspect::check_log(&log, None, Use::Live)]);
        }
    }
    // What is not recognisable is told apart from what is damaged.
    inspect::inspect(path).map_err(fail)?;
    // Whether somebody has it open cannot be told from a path alone.
    Ok(vec![inspect::check_log(path, None, Use::Live)])
}
