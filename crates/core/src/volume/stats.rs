//! What a volume has counted.

use super::write::unpersisted_bytes;
use super::{Policy, Volume};
use crate::base::io::Nanos;
use crate::base::limits::SECTOR_BYTES;
use crate::log::write_log::SpanCounts;

/// Counters and gauges of one volume. Counters only grow while it is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeStats {
    /// Requests answered: read, write, write-zeroes, discard, flush.
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
    /// 4 KiB blocks read from the log's data in memory or on its device.
    pub log_hit_blocks: u64,
    /// 4 KiB blocks read from DRAM.
    pub dram_hit_blocks: u64,
    /// 4 KiB blocks read from the SSD cache.
    pub ssd_hit_blocks: u64,
    /// 4 KiB blocks read from the backend for a client.
    pub miss_blocks: u64,
    /// 4 KiB blocks read ahead.
    pub read_ahead_blocks: u64,
    /// Bytes that are pinned.
    pub pinned_bytes: u64,
    /// Of them, what may not be in the SSD tier and is still to be looked at or fetched.
    pub pinned_left_bytes: u64,
    /// All bytes of the warm-up that is under way; 0: there is none.
    pub warm_bytes: u64,
    /// Of them, those still to be looked at or fetched.
    pub warm_left_bytes: u64,
    /// Clean cached blocks that failed their checksum and were fetched again.
    pub cache_corrupt_blocks: u64,
    /// Dirty blocks that failed their checksum.
    pub log_corrupt_blocks: u64,
    /// Ranges that were lost with the log and not written since.
    pub lost_ranges: u64,
    /// Bytes of them.
    pub lost_bytes: u64,
    /// Blocks of the ring in use, control and padding included.
    pub log_used_blocks: u64,
    /// Blocks of the ring that may be used.
    pub log_prepared_blocks: u64,
    /// Blocks of the ring.
    pub log_ring_blocks: u64,
    /// Bytes written to the log's device.
    pub log_written_bytes: u64,
    /// Spans written.
    pub log_spans: u64,
    /// Of entries in spans.
    pub log_counts: SpanCounts,
    /// Bytes of data blocks that the log has taken, before they were compressed.
    pub log_plain_bytes: u64,
    /// Bytes that they have in the log.
    pub log_stored_bytes: u64,
    /// Bytes of lines that the SSD tier has taken, before they were compressed.
    pub ssd_plain_bytes: u64,
    /// Bytes that they have there.
    pub ssd_stored_bytes: u64,
    /// Bytes in the log that the backend does not have.
    pub dirty_bytes: u64,
    /// Age of the oldest of them.
    pub dirty_age: Nanos,
    /// Bytes acknowledged and not yet durable.
    pub unpersisted_bytes: u64,
    /// Bytes written to the backend by destage.
    pub destaged_bytes: u64,
    /// Bytes written to the backend past the log.
    pub direct_bytes: u64,
    /// The policy in effect.
    pub policy: Policy,
    /// While the policy changes: dirty bytes still to go, at least 1.
    pub policy_remaining_bytes: u64,
    /// Dirty bytes that needed no backend write because a later write covered them.
    pub coalesced_bytes: u64,
    /// Sync points in the log since it was made.
    pub sync_points: u64,
    /// Of a running [`Event::DestageAll`]: bytes still to go.
    pub destage_all_remaining_bytes: u64,
    /// Requests waiting for room in the log.
    pub throttled_requests: u64,
    /// Time that requests have waited for room, in all.
    pub throttled_time: Nanos,
    /// Requests not answered yet.
    pub requests_in_flight: u64,
    /// Backend operations that failed.
    pub backend_errors: u64,
    /// Blocks that are still as in the volume's origin, and cached under its number.
    pub inherited_blocks: u64,
    /// Bytes of memory in the volume's indexes.
    pub index_bytes: u64,
    /// Bytes of buffers held for recently logged data.
    pub resident_bytes: u64,
    /// What the last opening replayed: entries.
    pub replayed_entries: u64,
    /// What the last opening replayed: bytes of data.
    pub replayed_bytes: u64,
    /// How long the last opening took.
    pub replay_time: Nanos,
}

impl Volume {
    /// Counters and gauges.
    pub fn stats(&self, now: Nanos) -> VolumeStats {
        let mut stats = self.port.stats.clone();
        stats.throttled_requests = self.writes.waiting() as u64;
        stats.index_bytes = self.index.memory_bytes() as u64;
        if let Some(inherited) = self.cached.inherited() {
            stats.inherited_blocks = inherited.blocks();
            stats.index_bytes += inherited.memory_bytes() as u64;
        }
        stats.pinned_bytes = self.filling.pinned_bytes();
        stats.pinned_left_bytes = self.filling.pinned_left_bytes();
        stats.warm_bytes = self.filling.warm_bytes();
        stats.warm_left_bytes = self.filling.warm_left_bytes();
        stats.resident_bytes = self.writes.resident.bytes();
        stats.policy = self.policy();
        stats.policy_remaining_bytes =
            (self.direct).policy_remaining_bytes(self.config.policy, &self.log);
        if let Some(log) = self.log.if_open() {
            let bytes = log.bytes();
            stats.log_used_blocks = log.used_blocks();
            stats.lost_ranges = self.damage.lost().count() as u64;
            stats.lost_bytes = self.damage.lost().sectors() * SECTOR_BYTES as u64;
            stats.log_prepared_blocks = log.prepared_blocks();
            stats.log_ring_blocks = log.ring_blocks();
            stats.dirty_bytes = bytes.appended - bytes.retired;
            // What was left out for something newer is as old as it was.
            let left_out = self.destaging.generation().left_out_since().unwrap_or(now);
            stats.dirty_age = log
                .oldest_since()
                .map_or(Nanos(0), |since| now.since(since.min(left_out)));
            stats.unpersisted_bytes = unpersisted_bytes(log);
            stats.sync_points = log.sync_points();
            stats.log_counts = log.counts();
            stats.index_bytes += (log.memory_bytes()
                + self.direct.memory_bytes()
                + self.compression.memory_bytes()) as u64;
            stats.destage_all_remaining_bytes = self
                .destaging
                .target_remaining_bytes(log)
                .max(u64::from(self.direct.is_destaging_all()));
        }
        stats
    }
}
