//! How the process's memory cap is split. Everything large is allocated or bounded at start, so
//! the cap is kept by construction and not by watching.
//!
//! ```text
//! memory_max = fixed + connections + pool + cache index + volumes + DRAM frames
//! ```
//!
//! What is for volumes is reserved by each before it is opened ([`hdcs_backend::memory`]). Of several shards each has an even
//! part of the connections' memory, of the pool and of the DRAM frames.
//!
//! Invariants:
//! 1. The parts' sum is at most the cap.
//! 2. No part is below what the node needs to make progress; a cap that is too small is refused
//!    with the sum that was needed.

use hdcs_backend::memory::{Kind, Needs};
use hdcs_core::base::limits::{BLOCK_BYTES, REQUEST_BYTES_MAX};

use super::{ConfigError, NodeSettings, VolumeSettings};

const MIB: u64 = 1 << 20;

/// Program text, stacks, ring memory, control plane.
const FIXED_BYTES: u64 = 32 * MIB;
/// Stacks and ring memory of each further shard.
const SHARD_BYTES: u64 = 4 * MIB;
/// Memory for NBD connections, data left out: a sixteenth of the cap, for some hundred connections at
/// least. More than enough for as many as can be is of no use. Each shard has some, whichever clients come to it.
const CONNECTIONS_BYTES_MIN: u64 = 16 * MIB;
const SHARD_CONNECTIONS_BYTES_MIN: u64 = 8 * MIB;
const CONNECTIONS_BYTES_MAX: u64 = 256 * MIB;
/// The pool of a shard that is smaller than this cannot hold a few of the largest requests beside destage.
const POOL_BYTES_MIN: u64 = 32 * REQUEST_BYTES_MAX as u64;
/// A larger pool brings nothing: more is in flight than any device takes.
const POOL_BYTES_MAX: u64 = 1024 * MIB;
/// The smallest DRAM tier of a shard worth its code path.
const FRAMES_BYTES_MIN: u64 = 8 * MIB;
/// The read cache's promise: index bytes per cached block, DRAM and SSD alike.
const INDEX_BYTES_PER_BLOCK: u64 = 16;
/// Of what is left when an eighth of the cap is for volumes, so many fifths more are for them, if nothing is said. The
/// DRAM tier has the rest.
const VOLUMES_FIFTHS: u64 = 2;

/// The parts of the process's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Shards that the parts are split between.
    pub shards: usize,
    /// Program, stacks, control plane.
    pub fixed_bytes: u64,
    /// Inboxes, tables and replies of NBD connections.
    pub connections_bytes: u64,
    /// Buffers of requests, spans and segments.
    pub pool_bytes: u64,
    /// Index of the SSD tier.
    pub cache_index_bytes: u64,
    /// What all volumes may reserve together.
    pub volumes_bytes: u64,
    /// Frames of the DRAM tier, their index included.
    pub frames_bytes: u64,
}

impl Budget {
    /// Split the cap of `node`.
    pub fn of(node: &NodeSettings, volume: &VolumeSettings) -> Result<Self, ConfigError> {
        let cap = node.memory_max_mib * MIB;
        let shards = node.shards.count() as u64;
        let fixed_bytes = FIXED_BYTES + (shards - 1) * SHARD_BYTES;
        let pool_bytes = (cap / 4).clamp(shards * POOL_BYTES_MIN, shards * POOL_BYTES_MAX);
        let frames_bytes_min = shards * FRAMES_BYTES_MIN;
        let cache_index_bytes =
            node.cache_total_size_mib * MIB / BLOCK_BYTES as u64 * INDEX_BYTES_PER_BLOCK;
        let connections_bytes = (cap / 16)
            .clamp(CONNECTIONS_BYTES_MIN, CONNECTIONS_BYTES_MAX)
            .max(shards * SHARD_CONNECTIONS_BYTES_MIN);
        let shared = fixed_bytes + connections_bytes + pool_bytes + cache_index_bytes;
        // A volume with the usual log always fits.
        let one = Needs {
            bytes: 0,
            log_bytes: node.log_size_mib * MIB,
            home_bytes: None,
            kind: Kind::File,
            encrypted: false,
            compressed: volume.compression.is_some(),
        };
        let least = (cap / 8).max(one.share_bytes_of(node.shards.count()));
        let volumes_bytes = match node.volumes_memory_mib {
            0 => {
                let left = cap.saturating_sub(shared + least);
                let more = left / 5 * VOLUMES_FIFTHS;
                least + more.min(left.saturating_sub(frames_bytes_min))
            }
            mib => mib * MIB,
        };
        let taken = shared + volumes_bytes;
        if taken + frames_bytes_min > cap {
            let (of_shards, fewer) = match shards {
                1 => (String::new(), ""),
                _ => (format!(" by {shards} shards"), ", `shards` among them"),
            };
            return Err(ConfigError::Relation(format!(
                "`memory_max_mib` is {}, but {} MiB are needed{of_shards}: {} for the program, {} for connections, \
                 {} for buffers, {} to index the SSD tier (cache_total_size_mib), {} for volumes (volumes_memory_mib, or \
                 one with a log of log_size_mib), {} for the DRAM tier: raise it, or lower the others{fewer}",
                node.memory_max_mib,
                (taken + frames_bytes_min).div_ceil(MIB),
                fixed_bytes / MIB,
                connections_bytes / MIB,
                pool_bytes / MIB,
                cache_index_bytes.div_ceil(MIB),
                volumes_bytes.div_ceil(MIB),
                frames_bytes_min / MIB,
            )));
        }
        let budget = Self {
            shards: node.shards.count(),
            fixed_bytes,
            connections_bytes,
            pool_bytes,
            cache_index_bytes,
            volumes_bytes,
            frames_bytes: cap - taken,
        };
        budget.check_unpersisted(volume)?;
        Ok(budget)
    }

    /// Bytes of the pool of one shard.
    pub fn shard_pool_bytes(&self) -> u64 {
        match self.shards {
            1 => self.pool_bytes,
            shards => self.pool_bytes / shards as u64 / MIB * MIB,
        }
    }

    /// What of that it touches at the start.
    pub fn shard_touched_bytes(&self, node: &NodeSettings) -> u64 {
        let share = node.buffers_touched_mib * MIB / self.shards as u64;
        share.min(self.shard_pool_bytes() / 2)
    }

    /// Memory for the NBD connections of one shard.
    pub fn shard_connections_bytes(&self) -> u64 {
        self.connections_bytes / self.shards as u64
    }

    /// Data that is not yet durable lives in the pool of a shard and must leave room for everything else.
    pub fn check_unpersisted(&self, volume: &VolumeSettings) -> Result<(), ConfigError> {
        let max_kib = self.shard_pool_bytes() / 4 / 1024;
        if volume.unpersisted_max_kib > max_kib {
            return Err(ConfigError::Relation(format!(
                "`unpersisted_max_kib` is {}, but at most a quarter of the buffers{} ({max_kib}) may be \
                 not yet durable: lower it, or raise memory_max_mib",
                volume.unpersisted_max_kib,
                if self.shards > 1 { " of a shard" } else { "" },
            )));
        }
        Ok(())
    }

    /// Blocks of the DRAM tier of one shard.
    pub fn shard_dram_blocks(&self) -> usize {
        let frames_bytes = self.frames_bytes / self.shards as u64;
        (frames_bytes / (BLOCK_BYTES as u64 + INDEX_BYTES_PER_BLOCK)) as usize
    }

    /// Memory for recently logged data of one volume, when so many share the pools. Placement gives a shard twice its
    /// even part of them at most.
    pub fn resident_bytes_max(&self, volumes: usize) -> u64 {
        let of_shard = volumes.div_ceil(self.shards).saturating_mul(2).min(volumes);
        let share = self.shard_pool_bytes() / 4 / of_shard.max(1) as u64;
        share / BLOCK_BYTES as u64 * BLOCK_BYTES as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::value::Shards;

    fn node(memory_max_mib: u64, cache_total_size_mib: u64, log_size_mib: u64) -> NodeSettings {
        NodeSettings {
            memory_max_mib,
            cache_total_size_mib,
            log_size_mib,
            ..NodeSettings::default()
        }
    }

    #[test]
    fn budget_parts_add_up_to_the_cap() {
        for (memory, cache, log) in [
            (128, 0, 64),
            (512, 1024, 512),
            (4096, 1 << 17, 1024),
            (1 << 20, 0, 16),
        ] {
            let settings = node(memory, cache, log);
            let volume = VolumeSettings {
                unpersisted_max_kib: 4096,
                ..VolumeSettings::default()
            };
            let budget = Budget::of(&settings, &volume).unwrap();
            let sum = budget.fixed_bytes
                + budget.connections_bytes
                + budget.pool_bytes
                + budget.cache_index_bytes
                + budget.volumes_bytes
                + budget.frames_bytes;
            assert_eq!(sum, memory * MIB);
            assert!(budget.frames_bytes >= FRAMES_BYTES_MIN);
            assert!(budget.shard_dram_blocks() as u64 * BLOCK_BYTES as u64 <= budget.frames_bytes);
        }
    }

    #[test]
    fn budget_of_shards_adds_up_and_is_split_evenly() {
        for (memory, shards) in [(512, 2), (1024, 3), (4096, 64), (1 << 20, 7)] {
            let mut settings = node(memory, 0, 16);
            settings.shards = Shards::of(shards);
            let volume = VolumeSettings {
                unpersisted_max_kib: 4096,
                ..VolumeSettings::default()
            };
            let budget = Budget::of(&settings, &volume).unwrap();
            let parts = [
                budget.fixed_bytes,
                budget.connections_bytes,
                budget.pool_bytes,
                budget.volumes_bytes,
                budget.frames_bytes,
            ];
            assert_eq!(parts.iter().sum::<u64>(), memory * MIB);
            let count = shards as u64;
            assert!(budget.shard_pool_bytes() * count <= budget.pool_bytes);
            assert!(budget.shard_pool_bytes() >= POOL_BYTES_MIN);
            let of_all = budget.shard_dram_blocks() as u64 * count * BLOCK_BYTES as u64;
            assert!(of_all <= budget.frames_bytes);
            assert!(budget.shard_connections_bytes() >= SHARD_CONNECTIONS_BYTES_MIN);
            // A shard that has twice its part of the volumes is within a quarter of its pool.
            let volumes = 8 * shards;
            assert!(budget.resident_bytes_max(volumes) * 16 <= budget.shard_pool_bytes() / 4);
        }
    }

    #[test]
    fn budget_without_room_for_so_many_shards_says_what_they_need() {
        let mut settings = node(512, 0, 16);
        settings.shards = Shards::of(16);
        let error = Budget::of(&settings, &VolumeSettings::default()).unwrap_err();
        let error = error.to_string();
        for part in [
            "MiB are needed by 16 shards",
            "`shards` among them",
            "512 for buffers",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn budget_too_small_says_what_is_needed() {
        let error = Budget::of(&node(128, 1 << 20, 512), &VolumeSettings::default()).unwrap_err();
        assert!(
            error.to_string().contains("4096 to index the SSD tier"),
            "{error}"
        );
    }

    #[test]
    fn budget_has_what_was_asked_for_volumes() {
        let mut settings = node(1024, 0, 16);
        let of = |settings: &NodeSettings| Budget::of(settings, &VolumeSettings::default());
        let before = of(&settings).unwrap();
        assert!(before.volumes_bytes > 256 * MIB && before.frames_bytes > 256 * MIB);
        settings.volumes_memory_mib = 100;
        let asked = of(&settings).unwrap();
        assert_eq!(asked.volumes_bytes, 100 * MIB);
        assert_eq!(
            asked.volumes_bytes + asked.frames_bytes,
            before.volumes_bytes + before.frames_bytes
        );
        settings.volumes_memory_mib = 1000;
        let error = of(&settings).unwrap_err().to_string();
        assert!(error.contains("1000 for volumes"), "{error}");
    }

    #[test]
    fn budget_of_any_cap_has_room_for_a_volume_with_the_usual_log() {
        for (memory, log) in [(128, 16), (128, 64), (512, 512), (4096, 4096)] {
            let budget = Budget::of(&node(memory, 0, log), &VolumeSettings::default()).unwrap();
            let needs = Needs {
                bytes: 0,
                log_bytes: log * MIB,
                home_bytes: None,
                kind: Kind::File,
                encrypted: false,
                compressed: false,
            };
            assert!(
                needs.least_parts().total() <= budget.volumes_bytes,
                "{memory}, {log}"
            );
        }
    }

    #[test]
    fn budget_bounds_what_is_not_durable() {
        let volume = VolumeSettings {
            unpersisted_max_kib: 1 << 20,
            ..VolumeSettings::default()
        };
        let error = Budget::of(&node(512, 0, 16), &volume).unwrap_err();
        assert!(error.to_string().contains("unpersisted_max_kib"), "{error}");
    }

    #[test]
    fn budget_of_the_default_cap_has_for_volumes_what_the_documentation_says() {
        let budget = Budget::of(&NodeSettings::default(), &VolumeSettings::default()).unwrap();
        assert_eq!(budget.volumes_bytes / MIB, 344);
    }

    #[test]
    fn budget_resident_memory_is_shared() {
        let budget = Budget::of(&NodeSettings::default(), &VolumeSettings::default()).unwrap();
        assert!(budget.resident_bytes_max(4) * 4 <= budget.pool_bytes / 4);
        assert_eq!(budget.resident_bytes_max(3) % BLOCK_BYTES as u64, 0);
    }
}
