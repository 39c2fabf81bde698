//! What the shards of a node report, put together.
//!
//! Each shard has its own DRAM tier, buffers and connections, so these are summed up. The SSD tier is one for all of them:
//! what the first shard says of it, which keeps it, is what there is.

use std::time::Instant;

use hdcs_core::base::io::Nanos;
use hdcs_core::cache::CacheStats;
use hdcs_core::replication::Member;
use hdcs_frontend::VolumeNumber;

use crate::shard::command::{ShardReport, VolumeReport};
use crate::shard::counts::LoopReport;

/// One shard's part.
#[derive(Clone, Copy, Debug)]
pub struct ShardPart {
    /// Which.
    pub number: usize,
    /// The processor that it keeps to, if it does.
    pub processor: Option<usize>,
    /// Its volumes.
    pub volumes: usize,
    /// Connections open there.
    pub connections: usize,
    /// For how many more there is memory.
    pub connections_left: usize,
    /// Its longest turn of the last 30 to 60 seconds.
    pub longest_turn: Nanos,
    /// Bytes that the tier holds that promotions of its volumes fill.
    pub cache_room_bytes: u64,
    /// What it has done since the start.
    pub counts: LoopReport,
}

/// The node as a whole.
#[derive(Clone, Debug)]
pub struct NodeReport {
    /// When it was asked for: each shard has answered after that.
    pub asked: Instant,
    /// Its volumes, by name.
    pub volumes: Vec<VolumeReport>,
    /// The nodes of the cluster that it speaks with.
    pub peers: Vec<Member>,
    /// Its read cache.
    pub cache: CacheStats,
    /// Why the cache has no new identity yet although it needs one; destage waits for that.
    pub cache_identity_error: Option<String>,
    /// Why the cache device could not be used when it was last tried, if it could not.
    pub cache_trouble: Option<String>,
    /// How long the SSD tier has been in its state.
    pub cache_state_age: Nanos,
    /// Bytes of the buffer pools in all.
    pub pool_bytes: u64,
    /// Bytes of the buffer pools that are free.
    pub pool_free_bytes: u64,
    /// Memory that connections have, data left out.
    pub connections_used_bytes: u64,
    /// Connections open.
    pub connections: usize,
    /// The longest turn of any shard in the last 30 to 60 seconds.
    pub longest_turn: Nanos,
    /// The shards that have answered.
    pub shards: Vec<ShardPart>,
    /// Those that have not.
    pub silent: Vec<usize>,
}

impl NodeReport {
    /// Of what each shard has reported since it was asked, by its number; `None` if no shard has.
    pub fn of(asked: Instant, reports: Vec<Option<ShardReport>>) -> Option<Self> {
        let reports = reports.into_iter().enumerate();
        let (found, silent): (Vec<_>, Vec<_>) = reports.partition(|(_, report)| report.is_some());
        let silent = silent.into_iter().map(|(number, _)| number).collect();
        let mut found = found.into_iter().filter_map(|(_, report)| report);
        let mut all = Self::of_one(asked, found.next()?, silent);
        for report in found {
            all.add(report);
        }
        // One shard's are in order.
        if all.shards.len() > 1 {
            all.volumes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        }
        Some(all)
    }

    fn of_one(asked: Instant, report: ShardReport, silent: Vec<usize>) -> Self {
        let shards = vec![part(&report)];
        Self {
            asked,
            volumes: report.volumes,
            peers: report.peers,
            cache: report.cache,
            cache_identity_error: report.cache_identity_error,
            cache_trouble: report.cache_trouble,
            cache_state_age: report.cache_state_age,
            pool_bytes: report.pool_bytes,
            pool_free_bytes: report.pool_free_bytes,
            connections_used_bytes: report.connections_used_bytes,
            connections: report.connections,
            longest_turn: report.longest_turn,
            shards,
            silent,
        }
    }

    fn add(&mut self, report: ShardReport) {
        self.shards.push(part(&report));
        self.volumes.extend(report.volumes);
        self.peers.extend(report.peers);
        let (cache, other) = (&mut self.cache, &report.cache);
        cache.dram_used_blocks += other.dram_used_blocks;
        cache.dram_blocks += other.dram_blocks;
        cache.dram_evicted_blocks += other.dram_evicted_blocks;
        cache.index_bytes += other.index_bytes;
        self.pool_bytes += report.pool_bytes;
        self.pool_free_bytes += report.pool_free_bytes;
        self.connections_used_bytes += report.connections_used_bytes;
        self.connections += report.connections;
        self.longest_turn = self.longest_turn.max(report.longest_turn);
    }

    /// What is known of a volume.
    pub fn find(&self, number: VolumeNumber) -> Option<&VolumeReport> {
        let mut volumes = self.volumes.iter();
        volumes.find(|volume| volume.config.number == number.0)
    }

    /// Bytes that the tier holds that promotions of a volume fill.
    pub fn cache_room_bytes(&self, number: VolumeNumber) -> u64 {
        let shard = self.find(number).map_or(0, |volume| volume.shard);
        let mut parts = self.shards.iter();
        let part = parts.find(|part| part.number == shard);
        part.map_or(0, |part| part.cache_room_bytes)
    }
}

fn part(report: &ShardReport) -> ShardPart {
    ShardPart {
        number: report.number,
        processor: report.processor,
        volumes: report.volumes.len(),
        connections: report.connections,
        connections_left: report.connections_left,
        longest_turn: report.longest_turn,
        cache_room_bytes: report.cache_room_bytes,
        counts: report.counts,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(number: usize, dram_blocks: u64, connections: usize) -> ShardReport {
        ShardReport {
            number,
            processor: None,
            volumes: Vec::new(),
            peers: Vec::new(),
            cache: CacheStats {
                dram_blocks,
                ssd_lines: 7,
                ..CacheStats::default()
            },
            cache_room_bytes: dram_blocks,
            cache_identity_error: None,
            cache_trouble: None,
            cache_state_age: Nanos(0),
            pool_bytes: 10,
            pool_free_bytes: 4,
            connections_used_bytes: 3,
            connections,
            connections_left: 9,
            longest_turn: Nanos(connections as u64),
            counts: LoopReport::default(),
        }
    }

    #[test]
    fn node_report_sums_what_each_shard_has_and_takes_the_tier_of_all_once() {
        let parts = vec![Some(report(0, 10, 1)), Some(report(1, 20, 5)), None];
        let node = NodeReport::of(Instant::now(), parts).unwrap();
        assert_eq!((node.cache.dram_blocks, node.cache.ssd_lines), (30, 7));
        assert_eq!((node.connections, node.longest_turn), (6, Nanos(5)));
        assert_eq!((node.pool_bytes, node.pool_free_bytes), (20, 8));
        let numbers: Vec<usize> = node.shards.iter().map(|part| part.number).collect();
        assert_eq!((numbers, node.silent), (vec![0, 1], vec![2]));
        assert!(NodeReport::of(Instant::now(), vec![None]).is_none());
    }
}
