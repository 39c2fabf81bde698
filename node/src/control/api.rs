//! The vocabulary of the control API: what goes over the control socket as JSON.
//!
//! docs/openapi.json is generated from these types and the routes. A field is added, never given
//! another meaning.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::value::Value;

/// Why a request was refused or failed, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// The request itself is wrong; it will never succeed.
    Invalid,
    /// The volume does not exist.
    NotFound,
    /// What is there forbids it: a name in use, dirty data, another operation under way.
    Conflict,
    /// No space or memory for it.
    NoSpace,
    /// The node is starting or stopping.
    Unavailable,
    /// It took longer than it may.
    Timeout,
    /// It was tried and failed.
    Failed,
}

/// An error: what was wrong, where, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// For programs.
    pub kind: ErrorKind,
    /// For people.
    pub message: String,
}

impl ApiError {
    /// An error of this kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}

/// A new volume.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// Its name.
    pub name: String,
    /// Its size. May be left out if the backend exists.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Backend URL; left out, a sparse file in the data directory.
    #[serde(default)]
    pub backend: Option<String>,
    /// Size of its write log; left out, the node's `log_size_mib`.
    #[serde(default)]
    pub log_bytes: Option<u64>,
    /// File or block device for its write log; left out, the node's `log_path`.
    #[serde(default)]
    pub log_path: Option<String>,
    /// Take a block device for the log although it holds something.
    #[serde(default)]
    pub log_overwrite: bool,
    /// Settings that differ from the node's.
    #[serde(default)]
    pub settings: BTreeMap<String, Value>,
}

/// A change of settings; `null` returns a key to the node's.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetVolume {
    /// What to change.
    pub settings: BTreeMap<String, Option<Value>>,
}

/// A change of size.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeVolume {
    /// The new size.
    pub bytes: u64,
    /// Whether data beyond the new size may be lost.
    #[serde(default)]
    pub shrink: bool,
}

/// A range of a volume.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeRange {
    /// First byte.
    #[serde(default)]
    pub offset: u64,
    /// How many bytes; left out, to the end.
    #[serde(default)]
    pub bytes: Option<u64>,
}

/// How a volume is deleted.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
pub struct DeleteOptions {
    /// Lose what the backend does not have yet, instead of writing it there first.
    #[serde(default)]
    pub discard_dirty: bool,
    /// Keep a backing file that HDCS made. One of the user's is always kept.
    #[serde(default)]
    pub keep_data: bool,
}

/// What deleting a volume did.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Deleted {
    /// Its name.
    pub name: String,
    /// Dirty bytes that were lost because `discard_dirty` said so.
    pub discarded_dirty_bytes: u64,
    /// Where its data is now, if it was kept.
    pub data: Option<String>,
}

/// Percentiles of a latency, in microseconds, since the volume was opened.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// Requests.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p99_9_us: f64,
    /// 99.99th percentile.
    pub p99_99_us: f64,
    /// Largest.
    pub max_us: f64,
}

/// Latencies by kind of request.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Latencies {
    /// Reads.
    pub read: Latency,
    /// Writes.
    pub write: Latency,
    /// Flushes.
    pub flush: Latency,
}

/// Counters (since the volume was opened) and gauges of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Counters {
    /// Reads answered.
    pub reads: u64,
    /// Writes answered.
    pub writes: u64,
    /// Write-zeroes and discards answered.
    pub trims: u64,
    /// Flushes answered.
    pub flushes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Bytes read by clients.
    pub read_bytes: u64,
    /// Bytes written by clients.
    pub write_bytes: u64,
    /// 4 KiB blocks read from the write log.
    pub log_hit_blocks: u64,
    /// 4 KiB blocks read from the DRAM tier.
    pub dram_hit_blocks: u64,
    /// 4 KiB blocks read from the SSD tier.
    pub ssd_hit_blocks: u64,
    /// 4 KiB blocks read from the backend for a client.
    pub miss_blocks: u64,
    /// 4 KiB blocks read ahead.
    pub read_ahead_blocks: u64,
    /// Cached blocks that failed their checksum and were fetched again.
    pub cache_corrupt_blocks: u64,
    /// Dirty blocks that failed their checksum.
    pub log_corrupt_blocks: u64,
    /// Bytes of the log in use.
    pub log_used_bytes: u64,
    /// Bytes of the log that can be in use.
    pub log_ring_bytes: u64,
    /// Bytes written to the log's device.
    pub log_written_bytes: u64,
    /// Spans written.
    pub log_spans: u64,
    /// Bytes in the log that the backend does not have.
    pub dirty_bytes: u64,
    /// Age of the oldest of them.
    pub dirty_age_ms: u64,
    /// Bytes acknowledged and not yet durable.
    pub unpersisted_bytes: u64,
    /// Bytes written to the backend by destage.
    pub destaged_bytes: u64,
    /// The same, per second, over the last second or so.
    pub destage_bytes_per_s: u64,
    /// Dirty bytes that needed no backend write because a later write covered them.
    pub coalesced_bytes: u64,
    /// Sync points in the log since it was made.
    pub sync_points: u64,
    /// Of a running flush: bytes still to go.
    pub flush_remaining_bytes: u64,
    /// Requests waiting for room in the log.
    pub throttled_requests: u64,
    /// Time that requests have waited for room, in all.
    pub throttled_ms: u64,
    /// Requests not answered yet.
    pub requests_in_flight: u64,
    /// Backend operations that failed.
    pub backend_errors: u64,
    /// Memory of the volume's indexes.
    pub index_bytes: u64,
    /// Buffers held for recently logged data.
    pub resident_bytes: u64,
    /// Entries that the last opening replayed.
    pub replayed_entries: u64,
    /// Bytes of data that the last opening replayed.
    pub replayed_bytes: u64,
    /// How long the last opening took.
    pub replay_ms: u64,
}

/// A volume.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// `healthy`, `degraded`, `read-only`, `inconsistent` or `error`.
    pub state: String,
    /// `opening`, `open`, `closing`, `closed` or `failed`.
    pub phase: String,
    /// Why it is in state `error`, and what to do.
    pub reason: Option<String>,
    /// Its number on this node.
    pub number: u32,
    /// Its identity everywhere.
    pub uuid: String,
    /// Its size.
    pub bytes: u64,
    /// Its backend's URL.
    pub backend: String,
    /// Its write log's file or device.
    pub log_path: String,
    /// Size of the write log.
    pub log_bytes: u64,
    /// NBD connections that have it open.
    pub connections: u64,
    /// Its settings, the node's included.
    pub settings: BTreeMap<String, Value>,
    /// Which of them were set for this volume.
    pub overridden: Vec<String>,
    /// Counters and gauges, if it is open.
    pub counters: Option<Counters>,
    /// Latencies, if it is open.
    pub latency: Option<Latencies>,
}

/// The read cache of the node.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Cache {
    /// Bytes in use of the DRAM tier.
    pub dram_used_bytes: u64,
    /// Bytes of the DRAM tier.
    pub dram_bytes: u64,
    /// Bytes in use of the SSD tier.
    pub ssd_used_bytes: u64,
    /// Bytes that fit the SSD tier.
    pub ssd_bytes: u64,
    /// `off`, `warming` (what the last run left is being read), `online`, or `offline` (given up).
    pub ssd_state: String,
    /// Why it is offline, and what to do.
    pub ssd_reason: Option<String>,
    /// Lines filled.
    pub filled_lines: u64,
    /// Lines that were there already under another address.
    pub shared_lines: u64,
    /// Blocks dropped from DRAM to make room.
    pub dram_evicted_blocks: u64,
    /// Lines dropped from the SSD tier to make room.
    pub ssd_evicted_lines: u64,
    /// Bytes written to the cache device.
    pub ssd_written_bytes: u64,
    /// Blocks that failed their checksum.
    pub corrupt_blocks: u64,
    /// I/O errors of the cache device.
    pub device_errors: u64,
    /// Lines that the last start found on the SSD.
    pub warm_lines: u64,
}

/// Memory of the process by part.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Memory {
    /// The cap.
    pub max_bytes: u64,
    /// What the operating system counts (resident set).
    pub rss_bytes: u64,
    /// Buffer pool in all.
    pub pool_bytes: u64,
    /// Buffer pool, free part.
    pub pool_free_bytes: u64,
    /// Frames of the DRAM tier.
    pub frames_bytes: u64,
    /// Index of the read cache.
    pub cache_index_bytes: u64,
    /// Indexes of the write logs.
    pub log_index_bytes: u64,
    /// Recently logged data, held in the pool.
    pub resident_bytes: u64,
}

/// The node.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Version of the program.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Identity of the node.
    pub node: String,
    /// Its data directory.
    pub data: String,
    /// Time since the start.
    pub uptime_ms: u64,
    /// Where NBD clients connect.
    pub nbd_listen: Vec<String>,
    /// Connections open.
    pub connections: u64,
    /// Volumes.
    pub volumes: u64,
    /// Volumes by state.
    pub volumes_by_state: BTreeMap<String, u64>,
    /// Bytes that backends do not have yet.
    pub dirty_bytes: u64,
    /// Memory.
    pub memory: Memory,
    /// Read cache.
    pub cache: Cache,
}

/// What a check found. Counts are of what was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckReport {
    /// What was checked.
    pub path: String,
    /// Spans of the write log whose control part and chain are good.
    pub spans: u64,
    /// Segments of the read cache whose footer and lines are good.
    #[serde(default)]
    pub segments: u64,
    /// Data blocks whose checksum is good.
    pub blocks: u64,
    /// Whether it is the read cache, whose loss costs time and no data.
    #[serde(default)]
    pub is_cache: bool,
    /// What is worth knowing and no problem.
    #[serde(default)]
    pub note: Option<String>,
    /// What is wrong, one sentence each; empty if all is well.
    pub problems: Vec<String>,
}
