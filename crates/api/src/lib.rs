//! The vocabulary of the control API: what goes over the control socket as JSON.
//!
//! docs/openapi.json is generated from these types and the routes. A field is added, never given
//! another meaning.

mod benefit;
mod change;
pub mod events;
pub mod groups;
mod shards;
mod start;
pub mod time;
pub mod value;

use std::collections::BTreeMap;

pub use benefit::VolumeBenefit;
pub use change::{Auto, ResizeVolume, SetVolume, ShardChoice};
use serde::{Deserialize, Serialize};
pub use shards::{ShardCounters, SpanCounters};
pub use start::StartProgress;
use utoipa::ToSchema;
use value::Value;

/// Why a request was refused or failed, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// The request has not the form that the API has.
    Malformed,
    /// The path knows no such method.
    NoMethod,
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

/// Where a volume's data lives: in its backend, or in its local store.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The backend; the node is a cache.
    #[default]
    Cache,
    /// The node's store; the backend gets what is dirty when that is asked for, or scheduled.
    Storage,
}

/// A new volume.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct CreateVolume {
    /// Its name.
    pub name: String,
    /// Its size. May be left out if the backend exists.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Backend URL; left out, a sparse file in the data directory.
    #[serde(default)]
    pub backend: Option<String>,
    /// Refuse a backend at whose place something is already, whatever that holds, before anything is touched.
    #[serde(default)]
    pub must_be_new: bool,
    /// Take a backend although what is there looks like an image of another format: all of it will be written over.
    #[serde(default)]
    pub backend_overwrite: bool,
    /// Size of its write log; left out, the node's `log_size_mib`.
    #[serde(default)]
    pub log_bytes: Option<u64>,
    /// File or block device for its write log; left out, the node's `log_path`.
    #[serde(default)]
    pub log_path: Option<String>,
    /// Take a block device for the log although it holds something.
    #[serde(default)]
    pub log_overwrite: bool,
    /// Encrypt it, with a data key that is wrapped with the key from there; left out, it is plain.
    #[serde(default)]
    pub encryption: Option<KeyPlace>,
    /// Where its data lives: in its backend, or in its local store.
    #[serde(default)]
    pub mode: Mode,
    /// File or block device for its local store; left out, a file in the data directory.
    #[serde(default)]
    pub store_path: Option<String>,
    /// Take a block device for the local store although it holds something.
    #[serde(default)]
    pub store_overwrite: bool,
    /// The thread of the data path (shard) that it is opened on, now and at each start; left out, wherever there is least
    /// to do.
    #[serde(default)]
    pub shard: Option<u64>,
    /// Nodes that have copies of its write log; left out, this node alone has it.
    #[serde(default)]
    pub group: Option<groups::GroupRequest>,
    /// Settings that differ from the node's.
    #[serde(default)]
    pub settings: BTreeMap<String, Value>,
}

/// Where a key-encryption key comes from: a file or a command, not both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeyPlace {
    /// Absolute path of a file with 32 bytes, as they are, in hexadecimal digits or in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_file: Option<String>,
    /// A command that prints the same; words between blanks, without a shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_command: Option<String>,
}

/// How a volume is encrypted.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VolumeEncryption {
    /// Where the key-encryption key comes from.
    pub place: KeyPlace,
    /// Which key that has to be: its fingerprint.
    pub wrapped_with: String,
    /// Which data key it has; clones have their parent's.
    pub data_key: String,
}

/// Which events.
#[derive(Clone, Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventQuery {
    /// Only events with higher numbers, the oldest first.
    pub after: Option<u64>,
    /// How many at most.
    #[param(minimum = 1, maximum = 4096)]
    pub limit: Option<u16>,
    /// Only those of this volume.
    pub volume: Option<String>,
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

/// The heat map that is kept of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SavedHeat {
    /// When it was written last: Unix time in milliseconds; none: not yet.
    pub saved_ms: Option<u64>,
    /// Why it was not, or could not be used, the last time.
    pub trouble: Option<String>,
}

/// What a warm-up from a heat map does.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct WarmedFrom {
    /// The volume; `warm_left_bytes` of its counters tells how far it is.
    pub volume: Volume,
    /// Size of the volume that the map is of.
    pub map_volume_bytes: u64,
    /// Bytes that are looked at and, if they are not there, fetched.
    pub warm_bytes: u64,
    /// Bytes of the map that are left out because they lie beyond the end of the volume.
    pub beyond_bytes: u64,
    /// Bytes, the coolest ones, that are left out because the cache does not hold more.
    pub over_bytes: u64,
}

/// A range of a volume that stays in the SSD tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumePin {
    /// First byte.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// What reading the TLS files again did.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Reloaded {
    /// Connected clients whose certificates are not good any more, and whose connections were ended.
    pub ended_clients: usize,
}

/// How a volume is deleted.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
pub struct DeleteOptions {
    /// Lose what the backend does not have yet, instead of writing it there first.
    #[serde(default)]
    pub discard_dirty: bool,
    /// Keep a backing file that HDCS made (one of the user's is always kept), and a clone as a volume
    /// that can be opened again; snapshots and clones of the volume are no hindrance then.
    #[serde(default)]
    pub keep_data: bool,
    /// Remove what the volume has at its backend's place too, of which everything stays otherwise: the file, the
    /// image, the objects. Nothing is removed of a volume that is not open, that another node has taken over, or
    /// that has snapshots or clones.
    #[serde(default)]
    pub remove_data: bool,
}

/// What deleting a volume did.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Deleted {
    /// Its name.
    pub name: String,
    /// Dirty bytes at most that were lost because `discard_dirty` said so.
    pub discarded_dirty_bytes: u64,
    /// Where its data is now, if it was kept, or could not be removed.
    pub data: Option<String>,
    /// What is wrong with that: it is not there, or not whole.
    #[serde(default)]
    pub data_trouble: Option<String>,
}

/// How a volume is detached.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DetachOptions {
    /// Leave dirty data behind in the log, instead of writing it to the backend first.
    #[serde(default)]
    pub discard_dirty: bool,
}

/// What detaching a volume did.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Detached {
    /// Its name.
    pub name: String,
    /// Dirty bytes at most that its log holds and its backend does not.
    pub dirty_bytes_left: u64,
    /// Its backend's URL.
    pub backend: String,
    /// Where its write log is now, if it is there.
    pub log: String,
    /// Where its directory is now.
    pub directory: String,
}

/// How a volume that is not open is opened.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenVolume {
    /// If its write log is lost, open it with a new one from its backend, or in storage mode its local store; if its
    /// local store is lost, open it from its backend alone, with a new one and a new write log.
    #[serde(default)]
    pub discard_dirty: bool,
    /// File or block device for that new log; left out, the place of the lost one.
    #[serde(default)]
    pub log_path: Option<String>,
    /// Size of that new log; left out, that of the lost one, or what fits at `log_path`.
    #[serde(default)]
    pub log_bytes: Option<u64>,
    /// Take a block device for the new log although it holds something.
    #[serde(default)]
    pub log_overwrite: bool,
}

/// What was lost with a write log or a local store.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Lost {
    /// Whether it was the local store; else the write log.
    #[serde(default)]
    pub is_home: bool,
    /// Dirty bytes at most; in storage mode without those in the local store, if that was not lost.
    pub dirty_bytes_max: u64,
    /// The backend, or the local store if only the write log was lost, has everything that was written before this time,
    /// if that was recorded.
    pub complete_until: Option<String>,
    /// The same for people.
    pub said: String,
    /// Where the old log is kept, if there was a file in its place.
    pub log_kept: Option<String>,
    /// Where what was in the local store's place is kept, if that was given up and there was a file.
    #[serde(default)]
    pub home_kept: Option<String>,
}

/// What opening a volume did.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct OpenedVolume {
    /// The volume.
    pub volume: Volume,
    /// What was lost, if it was opened without its log.
    pub lost: Option<Lost>,
}

/// A new snapshot.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MakeSnapshot {
    /// Its name: 1 to 64 characters of `A-Z a-z 0-9 . _ -`.
    pub name: String,
    /// Whether data may be copied for it where the backend cannot share any (a file on a file system
    /// without reflinks); else it is refused there.
    #[serde(default)]
    pub copy: bool,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// When it was made: milliseconds since 1970.
    pub made_ms: u64,
    /// The clones that begin with it: volumes of this node by name, others by their place.
    pub clones: Vec<String>,
    /// Backend URL of a volume over it, which can only be read; none: it can only be cloned.
    #[serde(default)]
    pub backend: Option<String>,
}

/// What depends on a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Snapshots {
    /// Its snapshots, in the order in which they were made.
    pub snapshots: Vec<Snapshot>,
    /// Clones that were made without a snapshot of their own, or whose snapshot is gone.
    pub clones: Vec<String>,
    /// Bytes that a snapshot or clone would have to copy at most; 0 where data is shared.
    #[serde(default)]
    pub copy_bytes: u64,
}

/// A new volume that begins as a snapshot of another one.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CloneVolume {
    /// Which snapshot; left out, the present state.
    #[serde(default)]
    pub snapshot: Option<String>,
    /// The new volume: without a size, and with a backend in the same store; only a volume whose data is in the data
    /// directory has clones without a backend, which are there too.
    pub clone: CreateVolume,
    /// Whether data may be copied for it where the backend cannot share any.
    #[serde(default)]
    pub copy: bool,
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
    /// Bytes that are pinned in the SSD tier.
    #[serde(default)]
    pub pinned_bytes: u64,
    /// Of them, what is still to be looked at or fetched.
    #[serde(default)]
    pub pinned_left_bytes: u64,
    /// All bytes of the warm-up that is under way; 0: there is none.
    #[serde(default)]
    pub warm_bytes: u64,
    /// Of them, those still to be looked at or fetched.
    #[serde(default)]
    pub warm_left_bytes: u64,
    /// Cached blocks that failed their checksum and were fetched again.
    pub cache_corrupt_blocks: u64,
    /// Dirty blocks that failed their checksum.
    pub log_corrupt_blocks: u64,
    /// Ranges that were lost with a damaged write log and not written since: reads of them fail.
    #[serde(default)]
    pub lost_ranges: u64,
    /// Bytes of them.
    #[serde(default)]
    pub lost_bytes: u64,
    /// Bytes of the log in use.
    pub log_used_bytes: u64,
    /// Bytes of the log that can be in use at most.
    pub log_ring_bytes: u64,
    /// Bytes of it that are prepared, which can be in use now.
    #[serde(default)]
    pub log_prepared_bytes: u64,
    /// Bytes written to the log's device.
    pub log_written_bytes: u64,
    /// Spans written.
    pub log_spans: u64,
    /// Bytes of data blocks that the log has taken, before they were compressed.
    #[serde(default)]
    pub log_plain_bytes: u64,
    /// Bytes that they have in the log.
    #[serde(default)]
    pub log_stored_bytes: u64,
    /// Bytes of lines that the SSD tier has taken, before they were compressed.
    #[serde(default)]
    pub ssd_plain_bytes: u64,
    /// Bytes that they have there.
    #[serde(default)]
    pub ssd_stored_bytes: u64,
    /// Bytes in the log that the backend does not have.
    pub dirty_bytes: u64,
    /// Age of the oldest of them. In storage mode it counts from the latest of these: the volume was opened; something
    /// became dirty while nothing was; the last tier that has ended took its state.
    pub dirty_age_ms: u64,
    /// Bytes acknowledged and not yet durable.
    pub unpersisted_bytes: u64,
    /// Bytes written to the backend by destage.
    pub destaged_bytes: u64,
    /// The same, per second, over the last second or so.
    pub destage_bytes_per_s: u64,
    /// Bytes written to the backend past the log, under a policy other than write-back.
    #[serde(default)]
    pub direct_bytes: u64,
    /// The policy in effect. That of the settings comes into effect once the log is empty.
    #[serde(default)]
    pub policy: String,
    /// While the policy changes: dirty bytes still to go, at least 1; 0: it is that of the settings.
    #[serde(default)]
    pub policy_remaining_bytes: u64,
    /// Dirty bytes that needed no backend write because a later write covered them.
    pub coalesced_bytes: u64,
    /// Sync points in the log since it was made.
    pub sync_points: u64,
    /// Of a running flush: bytes of data still to go, at least 1 until it has ended.
    pub flush_remaining_bytes: u64,
    /// Of a snapshot or clone that has to copy data: bytes still to go.
    #[serde(default)]
    pub copy_remaining_bytes: u64,
    /// Requests waiting for room in the log.
    pub throttled_requests: u64,
    /// Time that requests have waited for room, in all.
    pub throttled_ms: u64,
    /// Requests not answered yet.
    pub requests_in_flight: u64,
    /// Backend operations that failed.
    pub backend_errors: u64,
    /// Bytes that are still as in the snapshot that the volume began as, and that clones of it share in
    /// the cache.
    #[serde(default)]
    pub inherited_bytes: u64,
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
    /// Requests to the object store behind it; none: its backend is no object store.
    pub store: Option<StoreCounters>,
    /// Of entries in spans of the write log.
    #[serde(default)]
    pub spans: SpanCounters,
    /// How long requests waited for their turn, or for one of those that the volume works on at once to end.
    #[serde(default)]
    pub queued_us: u64,
    /// Quality of service.
    #[serde(default)]
    pub qos: QosCounters,
    /// Its local store; none: it is in cache mode. What is dirty there is part of `dirty_bytes`.
    #[serde(default)]
    pub home: Option<HomeCounters>,
}

/// What quality of service did to a volume's requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QosCounters {
    /// Requests that wait for their turn.
    pub waiting_requests: u64,
    /// Requests that had to wait for it.
    pub delayed_requests: u64,
    /// How long they waited, in all.
    pub delayed_ms: u64,
    /// Requests answered in the last whole second, while a volume of the node has limits, reservations or a weight.
    pub served_iops: u64,
    /// Bytes of them.
    pub served_bytes_per_s: u64,
    /// Requests a second that are reserved.
    pub reserved_iops: u64,
    /// Bytes a second that are reserved.
    pub reserved_bytes_per_s: u64,
    /// Whether less was served than is reserved, although there was always something to do.
    pub short: bool,
}

/// The local store of a volume in storage mode; counters since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HomeCounters {
    /// Bytes that the backend does not have.
    pub dirty_bytes: u64,
    /// Bytes that read as zeroes, which the backend does not have yet.
    pub zero_bytes: u64,
    /// Bytes that the backend has as well.
    pub clean_bytes: u64,
    /// Bytes that only the backend has, or nobody.
    pub absent_bytes: u64,
    /// What tiering out is doing: `idle`, `waiting`, `pausing`, `copying`, `finishing`, or `held` while a snapshot is
    /// made of what it has left.
    pub tier: String,
    /// Of a running one: bytes of data in all.
    pub tier_bytes: u64,
    /// Of a running one: bytes of data still to go.
    pub tier_left_bytes: u64,
    /// Whether the backend is between two states, because tiering out has begun and not ended. Never
    /// so over an object store.
    pub backend_between: bool,
    /// How often tiering out has ended well.
    pub tiers: u64,
    /// Bytes of data that were tiered out; zeroes do not count.
    pub tiered_bytes: u64,
    /// What the last try failed with, if it failed.
    pub trouble: Option<String>,
    /// Why nothing is tiered out any more before the volume is opened again: the local store failed, or another owner
    /// has taken the backend over.
    #[serde(default)]
    pub failed: Option<String>,
    /// Bytes of data written to the local store.
    pub data_written_bytes: u64,
    /// Bytes of its map written.
    pub map_written_bytes: u64,
    /// Bytes of the checksums of its data written.
    #[serde(default)]
    pub checksums_written_bytes: u64,
    /// Bytes of these checksums that are in memory.
    #[serde(default)]
    pub checksums_memory_bytes: u64,
    /// While they are made anew: bytes of the volume still to go.
    #[serde(default)]
    pub checksums_rebuild_left_bytes: u64,
    /// Sectors that were read and did not match.
    #[serde(default)]
    pub damaged_reads: u64,
    /// Sectors that did not, and were not written since: they cannot be read.
    #[serde(default)]
    pub damaged_sectors: u64,
    /// 4 KiB blocks fetched from the backend because a part of them was written.
    pub filled_blocks: u64,
}

/// Requests to an object store since the volume was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreCounters {
    /// Requests that put an object.
    pub puts: u64,
    /// How many of them put a batch of written blocks.
    pub puts_data: u64,
    /// How many of them put a part of the map.
    pub puts_map: u64,
    /// How many of them put a manifest, which is the commit of a flush.
    pub puts_manifest: u64,
    /// Requests that got an object or a part of one.
    pub gets: u64,
    /// Requests that deleted one.
    pub deletes: u64,
    /// Requests for a page of a listing.
    pub lists: u64,
    /// Those of all these that repeated one that had failed.
    pub retries: u64,
    /// Bytes put.
    pub put_bytes: u64,
    /// Bytes got.
    pub get_bytes: u64,
    /// Reads of a page of the map that was not what it should be.
    #[serde(default)]
    pub damaged_map_pages: u64,
    /// Pages of the map that were given up as damaged: what was there and has not been written since cannot be read.
    #[serde(default)]
    pub lost_map_pages: u64,
    /// What the last request failed with, if it failed.
    pub trouble: Option<String>,
}

/// A volume.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// `healthy`, `degraded`, `read-only`, `inconsistent`, `standby` (another node serves it) or `error`.
    pub state: String,
    /// `opening`, `open`, `closing`, `closed`, `failed`, `copy`: of its log, `moving`: to another shard, shown as before that,
    /// or `waiting`: its backend cannot be reached, or there is too little memory for it, and it is tried again.
    pub phase: String,
    /// Why it is not `healthy`, and what to do.
    pub reason: Option<String>,
    /// How long the volume has not been healthy, if something is wrong, whatever it was first.
    #[serde(default)]
    pub trouble_ms: Option<u64>,
    /// Its number on this node.
    pub number: u32,
    /// Its identity everywhere.
    pub uuid: String,
    /// Its size.
    pub bytes: u64,
    /// Its backend's URL.
    pub backend: String,
    /// Space that the backend says it takes, where it can tell and answers: of a file what is allocated, on an
    /// object store all data objects, what waits to be freed included. What is only in the log is not in it.
    #[serde(default)]
    pub allocated_bytes: Option<u64>,
    /// Whether its backend can only be read, being a snapshot: what would write is refused.
    #[serde(default)]
    pub read_only: bool,
    /// Where its data lives: in its backend, or in its local store.
    #[serde(default)]
    pub mode: Mode,
    /// The file or device of its local store, if it is in storage mode.
    #[serde(default)]
    pub home_path: Option<String>,
    /// Its write log's file or device.
    pub log_path: String,
    /// Size of the write log.
    pub log_bytes: u64,
    /// How writes to it are made durable at present, and what that means to its device, if it is open.
    #[serde(default)]
    pub log_durability: Option<String>,
    /// How it is encrypted, if it is.
    #[serde(default)]
    pub encryption: Option<VolumeEncryption>,
    /// Who has copies of its write log, if other nodes have.
    #[serde(default)]
    pub group: Option<groups::VolumeGroup>,
    /// What stays in the SSD tier.
    #[serde(default)]
    pub pins: Vec<VolumePin>,
    /// Why nothing of that is kept at present, if so.
    #[serde(default)]
    pub pin_trouble: Option<String>,
    /// What reading it costs, and how the read cache weighs its blocks for it, if it is open.
    #[serde(default)]
    pub benefit: Option<VolumeBenefit>,
    /// NBD connections that have it open.
    pub connections: u64,
    /// The thread of the data path (shard) that it is on, where the node has several, or one was set.
    #[serde(default)]
    pub shard: Option<u64>,
    /// The shard that was set for it, if one was: it is opened there, if there is one of this number.
    #[serde(default)]
    pub shard_set: Option<u64>,
    /// Its settings, the node's included.
    pub settings: BTreeMap<String, Value>,
    /// Which of them were set for this volume.
    pub overridden: Vec<String>,
    /// Counters and gauges, if it is open.
    pub counters: Option<Counters>,
    /// Latencies, if it is open.
    pub latency: Option<Latencies>,
    /// Its scrubs.
    #[serde(default)]
    pub scrub: Option<Scrub>,
    /// The heat map that is kept of it for `cache_warm_up`, if there is anything to say.
    #[serde(default)]
    pub heat: Option<SavedHeat>,
}

/// How a volume is to be scrubbed.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScrubVolume {
    /// Bytes that are read a second at most; left out, `scrub_rate_mib_s`.
    #[serde(default)]
    pub rate_bytes_per_s: Option<u64>,
}

/// The scrub of a volume that is under way, and the last one that came to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Scrub {
    /// Whether one is under way.
    pub running: bool,
    /// Where it is: `write log`, `SSD tier`, `home` or `backend`.
    pub part: String,
    /// Bytes of that part, as far as that is known.
    pub part_bytes: u64,
    /// Bytes of that part that are still to be passed.
    pub part_left_bytes: u64,
    /// Bytes that it has read.
    pub read_bytes: u64,
    /// Bytes that it reads a second at most.
    pub rate_bytes_per_s: u64,
    /// 4 KiB blocks that were bad.
    pub bad_blocks: u64,
    /// Those of them that were made good: written again, or dropped where another copy is.
    pub healed_blocks: u64,
    /// What is wrong and was not made good, one sentence each.
    pub problems: Vec<String>,
    /// The last one that came to its end.
    pub last: Option<LastScrub>,
}

/// A scrub that came to its end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LastScrub {
    /// When: milliseconds since 1970.
    pub ended_ms: u64,
    /// How long it took.
    pub took_ms: u64,
    /// Bytes that it has read.
    pub read_bytes: u64,
    /// 4 KiB blocks that were bad.
    pub bad_blocks: u64,
    /// Those of them that were made good.
    pub healed_blocks: u64,
    /// What is wrong and was not made good, one sentence each.
    pub problems: Vec<String>,
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
    /// Bytes of the lines that it holds: more than are in use, if some are compressed.
    #[serde(default)]
    pub ssd_cached_bytes: u64,
    /// Bytes that fit the SSD tier.
    pub ssd_bytes: u64,
    /// `off`, `warming` (what the last run left is being read), `online`, or `offline` (given up).
    pub ssd_state: String,
    /// How long it has been in that state.
    #[serde(default)]
    pub ssd_state_ms: u64,
    /// How often it was given up since the start.
    #[serde(default)]
    pub ssd_failures: u64,
    /// How often it came back since the start.
    #[serde(default)]
    pub ssd_readmissions: u64,
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
    /// Volumes of which it used none of them, since the cache's device had lost something that they needed.
    #[serde(default)]
    pub forgotten_volumes: u64,
}

/// Memory of the process by part.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Memory {
    /// The cap: the sum of the parts that begin with `budget_`.
    pub max_bytes: u64,
    /// What the operating system counts (resident set).
    pub rss_bytes: u64,
    /// The most that it has counted since the start.
    #[serde(default)]
    pub rss_max_bytes: u64,
    /// Of the cap: the program, stacks, the control plane.
    #[serde(default)]
    pub budget_fixed_bytes: u64,
    /// Of the cap: NBD connections, without data.
    #[serde(default)]
    pub budget_connections_bytes: u64,
    /// Of the cap: buffers of requests.
    #[serde(default)]
    pub budget_pool_bytes: u64,
    /// Of the cap: the index of the SSD tier.
    #[serde(default)]
    pub budget_cache_index_bytes: u64,
    /// Of the cap: what volumes need each.
    #[serde(default)]
    pub budget_volumes_bytes: u64,
    /// Of the cap: the DRAM tier, with its index.
    #[serde(default)]
    pub budget_frames_bytes: u64,
    /// What NBD connections have of theirs.
    #[serde(default)]
    pub connections_used_bytes: u64,
    /// What volumes have reserved for their write logs: the least for the index of each, and for what is destaged of it.
    #[serde(default)]
    pub volumes_log_bytes: u64,
    /// What they have reserved for tables: maps and checksums of local stores, maps of volumes on S3 and HDFS.
    #[serde(default)]
    pub volumes_tables_bytes: u64,
    /// What they have reserved for buffers of their own.
    #[serde(default)]
    pub volumes_buffers_bytes: u64,
    /// What the indexes of write logs have beyond that, of what no volume has reserved.
    #[serde(default)]
    pub volumes_index_bytes: u64,
    /// What they may have of it together.
    #[serde(default)]
    pub volumes_index_max_bytes: u64,
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

/// Something that is not as it should be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Which part: `volume NAME`, `SSD tier` or `records of groups`.
    pub part: String,
    /// The state that it is in.
    pub state: String,
    /// How long it has been wrong, if that is known.
    pub for_ms: Option<u64>,
    /// What is wrong, and what to do.
    pub reason: String,
}

/// The node.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Version of the program.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// `healthy`, or `degraded` if something is not as it should be.
    #[serde(default)]
    pub state: String,
    /// What is not as it should be.
    #[serde(default)]
    pub problems: Vec<Problem>,
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
    /// The longest turn of the data path in the last 30 to 60 seconds: for so long each client has waited at least
    /// once.
    #[serde(default)]
    pub longest_turn_us: u64,
    /// What each thread of the data path has done.
    #[serde(default)]
    pub shards: Vec<ShardCounters>,
    /// Volumes.
    pub volumes: u64,
    /// Volumes by state.
    pub volumes_by_state: BTreeMap<String, u64>,
    /// Volumes that are being opened: most of them for a while after a start.
    #[serde(default)]
    pub volumes_opening: u64,
    /// How far the start is with opening volumes; null once that is over.
    #[serde(default)]
    pub start: Option<StartProgress>,
    /// The cluster that it is a node of; null: it is alone.
    #[serde(default)]
    pub cluster: Option<groups::ClusterStatus>,
    /// Bytes that backends do not have yet.
    pub dirty_bytes: u64,
    /// How often more space for a write log was not to be had, or could not be given back.
    #[serde(default)]
    pub log_space_failures: u64,
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
    /// Objects of an object store that are there and good.
    #[serde(default)]
    pub objects: u64,
    /// Bytes that were read of a backend.
    #[serde(default)]
    pub bytes: u64,
    /// Whether it is the read cache, whose loss costs time and no data.
    #[serde(default)]
    pub is_cache: bool,
    /// What is worth knowing and no problem.
    #[serde(default)]
    pub note: Option<String>,
    /// What is wrong, one sentence each; empty if all is well.
    pub problems: Vec<String>,
}
