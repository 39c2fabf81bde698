//! How the process's memory cap is split. Everything large is allocated or bounded at start, so
//! the cap is kept by construction and not by watching.
//!
//! ```text
//! memory_max = fixed + connections + pool + cache index + log indexes + tables of backends + DRAM frames
//! ```
//!
//! Invariants:
//! 1. The parts' sum is at most the cap.
//! 2. No part is below what the node needs to make progress; a cap that is too small is refused
//!    with the sum that was needed.

use hdcs_core::limits::{BLOCK_BYTES, LOG_BLOCK_ENTRIES_MAX, REQUEST_BYTES_MAX};

use super::{ConfigError, NodeSettings, VolumeSettings};

const MIB: u64 = 1 << 20;

/// Program text, stacks, ring memory, control plane.
const FIXED_BYTES: u64 = 32 * MIB;
/// Memory for NBD connections, data left out: a sixteenth of the cap, for some hundred connections at
/// least. More than enough for as many as can be is of no use.
const CONNECTIONS_BYTES_MIN: u64 = 16 * MIB;
const CONNECTIONS_BYTES_MAX: u64 = 256 * MIB;
/// A pool smaller than this cannot hold a few of the largest requests beside destage.
const POOL_BYTES_MIN: u64 = 32 * REQUEST_BYTES_MAX as u64;
/// A larger pool brings nothing: more is in flight than any device takes.
const POOL_BYTES_MAX: u64 = 1024 * MIB;
/// The smallest DRAM tier worth its code path.
const FRAMES_BYTES_MIN: u64 = 8 * MIB;
/// The read cache's promise: index bytes per cached block, DRAM and SSD alike.
const INDEX_BYTES_PER_BLOCK: u64 = 16;
/// Index memory of the write logs, per entry at most; a log may have one for each of its blocks.
pub const LOG_INDEX_BYTES_PER_BLOCK: u64 = 108;

/// The parts of the process's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Program, stacks, control plane.
    pub fixed_bytes: u64,
    /// Inboxes, tables and replies of NBD connections.
    pub connections_bytes: u64,
    /// Buffers of requests, spans and segments.
    pub pool_bytes: u64,
    /// Index of the SSD tier.
    pub cache_index_bytes: u64,
    /// Indexes of all write logs together, at most.
    pub log_index_bytes: u64,
    /// Tables of backends ([`crate::backends::memory`]) together, at most.
    pub tables_bytes: u64,
    /// Frames of the DRAM tier, their index included.
    pub frames_bytes: u64,
}

impl Budget {
    /// Split the cap of `node`.
    pub fn of(node: &NodeSettings, volume: &VolumeSettings) -> Result<Self, ConfigError> {
        let cap = node.memory_max_mib * MIB;
        let pool_bytes = (cap / 4).clamp(POOL_BYTES_MIN, POOL_BYTES_MAX);
        let cache_index_bytes =
            node.cache_total_size_mib * MIB / BLOCK_BYTES as u64 * INDEX_BYTES_PER_BLOCK;
        // An eighth of the cap indexes 0.65 GiB of log per 128 MiB of cap, even if every logged
        // write is a single block; a default log always fits.
        let one_log = log_index_bytes(node.log_size_mib * MIB);
        let log_index_bytes = (cap / 8).max(one_log);
        let connections_bytes = (cap / 16).clamp(CONNECTIONS_BYTES_MIN, CONNECTIONS_BYTES_MAX);
        let others =
            FIXED_BYTES + connections_bytes + pool_bytes + cache_index_bytes + log_index_bytes;
        let tables_bytes = match node.tables_memory_mib {
            0 => {
                (cap.saturating_sub(others) / 4).min(cap.saturating_sub(others + FRAMES_BYTES_MIN))
            }
            mib => mib * MIB,
        };
        let taken = others + tables_bytes;
        if taken + FRAMES_BYTES_MIN > cap {
            return Err(ConfigError::Relation(format!(
                "`memory_max_mib` is {}, but {} MiB are needed: {} for the program, {} for connections, \
                 {} for buffers, {} to index the SSD tier (cache_total_size_mib), {} to index write logs \
                 (log_size_mib), {} for the tables of backends (tables_memory_mib), {} for the DRAM tier: raise it, or \
                 lower the others",
                node.memory_max_mib,
                (taken + FRAMES_BYTES_MIN).div_ceil(MIB),
                FIXED_BYTES / MIB,
                connections_bytes / MIB,
                pool_bytes / MIB,
                cache_index_bytes.div_ceil(MIB),
                log_index_bytes.div_ceil(MIB),
                tables_bytes.div_ceil(MIB),
                FRAMES_BYTES_MIN / MIB,
            )));
        }
        let budget = Self {
            fixed_bytes: FIXED_BYTES,
            connections_bytes,
            pool_bytes,
            cache_index_bytes,
            log_index_bytes,
            tables_bytes,
            frames_bytes: cap - taken,
        };
        budget.check_unpersisted(volume)?;
        Ok(budget)
    }

    /// Data that is not yet durable lives in the pool and must leave room for everything else.
    pub fn check_unpersisted(&self, volume: &VolumeSettings) -> Result<(), ConfigError> {
        let max_kib = self.pool_bytes / 4 / 1024;
        if volume.unpersisted_max_kib > max_kib {
            return Err(ConfigError::Relation(format!(
                "`unpersisted_max_kib` is {}, but at most a quarter of the buffers ({max_kib}) may be \
                 not yet durable: lower it, or raise memory_max_mib",
                volume.unpersisted_max_kib
            )));
        }
        Ok(())
    }

    /// Blocks of the DRAM tier.
    pub fn dram_blocks(&self) -> usize {
        (self.frames_bytes / (BLOCK_BYTES as u64 + INDEX_BYTES_PER_BLOCK)) as usize
    }

    /// Entries of a log of so many bytes at most, when all logs together have `all_bytes`: one for each block, which
    /// each log was promised, or more, for compressed data, if there is memory for all to have as many.
    pub fn log_entries_max(&self, bytes: u64, all_bytes: u64) -> u64 {
        let per_block = self.log_index_bytes / log_index_bytes(all_bytes.max(bytes)).max(1);
        bytes / BLOCK_BYTES as u64 * per_block.clamp(1, LOG_BLOCK_ENTRIES_MAX)
    }

    /// Memory for recently logged data of one volume, when so many share the pool.
    pub fn resident_bytes_max(&self, volumes: usize) -> u64 {
        let share = self.pool_bytes / 4 / volumes.max(1) as u64;
        share / BLOCK_BYTES as u64 * BLOCK_BYTES as u64
    }
}

/// Index memory that a write log of so many bytes needs at most.
pub const fn log_index_bytes(log_bytes: u64) -> u64 {
    log_bytes / BLOCK_BYTES as u64 * LOG_INDEX_BYTES_PER_BLOCK
}

#[cfg(test)]
mod tests {
    use super::*;

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
                + budget.log_index_bytes
                + budget.tables_bytes
                + budget.frames_bytes;
            assert_eq!(sum, memory * MIB);
            assert!(budget.frames_bytes >= FRAMES_BYTES_MIN);
            assert!(budget.dram_blocks() as u64 * BLOCK_BYTES as u64 <= budget.frames_bytes);
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
    fn budget_has_the_tables_that_were_asked_for() {
        let mut settings = node(1024, 0, 16);
        let of = |settings: &NodeSettings| Budget::of(settings, &VolumeSettings::default());
        let before = of(&settings).unwrap();
        assert_eq!(
            before.tables_bytes,
            (before.tables_bytes + before.frames_bytes) / 4
        );
        settings.tables_memory_mib = 256;
        let asked = of(&settings).unwrap();
        assert_eq!(asked.tables_bytes, 256 * MIB);
        assert_eq!(
            asked.tables_bytes + asked.frames_bytes,
            before.tables_bytes + before.frames_bytes
        );
        settings.tables_memory_mib = 1000;
        let error = of(&settings).unwrap_err().to_string();
        assert!(error.contains("1000 for the tables of backends"), "{error}");
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
    fn budget_resident_memory_is_shared() {
        let budget = Budget::of(&NodeSettings::default(), &VolumeSettings::default()).unwrap();
        assert!(budget.resident_bytes_max(4) * 4 <= budget.pool_bytes / 4);
        assert_eq!(budget.resident_bytes_max(3) % BLOCK_BYTES as u64, 0);
    }
}
