//! Replay: a full log, a killed node, and the time until the restarted one serves.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::failure::{Context, Result};
use crate::fio::Load;
use crate::node::{Node, VolumeOptions};

/// The log that is replayed.
const LOG_BYTES: u64 = 1 << 30;
/// Memory for the index of such a log, and writes are slowed only when it is all but full.
const CONFIG: &str = "memory_max_mib = 1024\ndirty_ratio_max = 95\n";
/// The volume.
const DISK_BYTES: u64 = 4 << 30;
/// A backend so slow that next to nothing leaves the log.
const BACKEND_DELAY_US: u64 = 2_000_000;
/// Filling ends when writes have been slowed to nothing for so long.
const FILL_SECONDS: u32 = 40;

/// What a run gave.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Replay {
    /// From the start of the program to its line that it is ready.
    pub restart_seconds: f64,
    /// Bytes that were in the log.
    pub written_bytes: u64,
    /// What the volume says of its replay, in seconds.
    pub volume_seconds: Option<f64>,
    /// What the node says of the volume after the restart.
    pub volume: Value,
}

impl fmt::Display for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "replay after SIGKILL with {} MiB of data in the log: ready after {:.2} s",
            self.written_bytes >> 20,
            self.restart_seconds
        )?;
        self.volume_seconds.map_or(Ok(()), |seconds| {
            write!(f, ", of which replay {seconds:.2} s")
        })
    }
}

/// The first value of this name anywhere in a document.
fn find<'a>(document: &'a Value, name: &str) -> Option<&'a Value> {
    match document {
        Value::Object(fields) => fields
            .get(name)
            .or_else(|| fields.values().find_map(|value| find(value, name))),
        _ => None,
    }
}

/// Fill a log, kill the node, restart it.
pub fn run(binary: &Path, directory: &Path, quick: bool) -> Result<Replay> {
    fs::create_dir_all(directory).context(directory.display())?;
    let log_bytes = if quick { LOG_BYTES / 4 } else { LOG_BYTES };
    let data = directory.join("node");
    let node = Node::start(binary, &data, Some(CONFIG))?;
    node.create(&VolumeOptions {
        name: "replay".into(),
        bytes: DISK_BYTES,
        log_bytes,
        persist: "on-write",
        backend: Some(format!(
            "file:{}?delay_us={BACKEND_DELAY_US}",
            directory.join("backend.img").display()
        )),
    })?;
    // More than fits, so that the log is full; the time bounds what waits for room.
    let load = Load {
        depth: 32,
        bytes_max: Some(log_bytes),
        seconds: Some(FILL_SECONDS),
        ..Load::random("randwrite", DISK_BYTES)
    };
    let outcome = load.run(&node.target("replay"), &directory.join("fill.json"))?;
    node.kill()?;
    let begin = Instant::now();
    let node = Node::start(binary, &data, Some(CONFIG))?;
    let restart_seconds = begin.elapsed().as_secs_f64();
    let volume = node.show("replay")?;
    // The backend would take hours to be brought up to date.
    node.kill()?;
    fs::remove_dir_all(directory).context(directory.display())?;
    let volume_seconds = find(&volume, "replay_ms")
        .and_then(Value::as_f64)
        .map(|ms| ms / 1000.0);
    Ok(Replay {
        volume_seconds,
        restart_seconds,
        written_bytes: outcome.requests * load.block_bytes,
        volume,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_is_found_at_any_depth() {
        let document = serde_json::json!({"a": 1, "counters": {"replay_ms": 7}});
        assert_eq!(
            find(&document, "replay_ms").and_then(Value::as_u64),
            Some(7)
        );
        assert!(find(&document, "b").is_none());
    }
}
