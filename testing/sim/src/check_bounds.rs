//! Checker: effects stay within their device, memory within its bounds.
//!
//! 1. Offsets and lengths are multiples of the unit, not empty, and within the device.
//! 2. No two writes in flight to one device overlap: their outcome would be undefined.
//! 3. One flush of a backend is under way at a time: if two were and one failed, the other would not tell what both
//!    were to cover and the first has lost.
//! 4. What a volume and a cache report of themselves is within what they were given.
//! 5. When everything is dropped, every buffer is back in the pool.

use std::rc::Rc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::limits::{BLOCK_BYTES, LOG_BLOCK_ENTRIES_MAX, log_memory_bytes};
use hdcs_core::cache::{CacheConfig, CacheStats};
use hdcs_core::log::budget::IndexBudget;
use hdcs_core::volume::{VolumeConfig, VolumeStats};

use crate::violation::Violation;

/// Index memory that a volume may have whatever its log holds: memory for control parts, and for runs that its backend
/// may not have flushed.
const VOLUME_INDEX_BYTES_BASE: u64 = 2 << 20;
/// What a volume may have beyond the budget: runs that were cut since it admitted the last writes, and a plan for the
/// entries of a span.
const BUDGET_SLACK_BYTES: u64 = 64 << 10;
/// Index memory that a cache may have whatever its size: tables are sized for power-of-two counts.
const CACHE_INDEX_BYTES_BASE: u64 = 1 << 20;
/// Index memory for one cached block.
const CACHE_INDEX_BYTES_PER_BLOCK: u64 = 16;

/// Check one effect on a device of `device_bytes`, addressed in units of `unit`.
pub fn check_range(
    device: &'static str,
    offset: u64,
    bytes: u64,
    unit: usize,
    device_bytes: u64,
) -> Result<(), Violation> {
    let unit = unit as u64;
    let aligned = offset.is_multiple_of(unit) && bytes.is_multiple_of(unit);
    let inside = offset
        .checked_add(bytes)
        .is_some_and(|end| end <= device_bytes);
    if aligned && inside && bytes > 0 {
        return Ok(());
    }
    Err(Violation::new(
        "effect-out-of-bounds",
        format!("{device}: {bytes} bytes at {offset} of {device_bytes}"),
    ))
}

/// The writes in flight of one device.
#[derive(Debug, Default)]
pub struct WritesInFlight {
    ranges: Vec<(u64, u64)>,
}

impl WritesInFlight {
    /// One begins.
    pub fn begin(
        &mut self,
        device: &'static str,
        offset: u64,
        bytes: u64,
    ) -> Result<(), Violation> {
        let end = offset + bytes;
        if let Some(other) = self
            .ranges
            .iter()
            .find(|other| offset < other.1 && other.0 < end)
        {
            return Err(Violation::new(
                "effect-overlap",
                format!("{device}: a write of {offset}..{end} while one of {other:?} is in flight"),
            ));
        }
        self.ranges.push((offset, end));
        Ok(())
    }

    /// One ended.
    pub fn end(&mut self, offset: u64) {
        self.ranges.retain(|&(start, _)| start != offset);
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// All are gone.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }
}

/// A flush of a backend begins while so many are under way there.
pub fn check_flush(under_way: usize) -> Result<(), Violation> {
    if under_way == 0 {
        return Ok(());
    }
    Err(Violation::new(
        "flushes-overlap",
        format!("a backend is flushed while {under_way} flushes of it are under way"),
    ))
}

/// Check what a volume says of itself.
pub fn check_volume(
    config: &VolumeConfig,
    stats: &VolumeStats,
    waiting: usize,
) -> Result<(), Violation> {
    let over = |what, value: u64, bound: u64| {
        if value <= bound {
            return Ok(());
        }
        Err(Violation::new(
            "volume-out-of-bounds",
            format!("{what} is {value}, at most {bound} is allowed"),
        ))
    };
    let ring_blocks = config.log_bytes / BLOCK_BYTES as u64;
    // An earlier opening may have let it hold the most that any may.
    let entries = ring_blocks * LOG_BLOCK_ENTRIES_MAX;
    over(
        "index_bytes",
        stats.index_bytes,
        VOLUME_INDEX_BYTES_BASE + log_memory_bytes(config.log_bytes, entries),
    )?;
    // What is not durable yet has to be in memory, whatever the bound says.
    if waiting == 0 && stats.unpersisted_bytes == 0 {
        over(
            "resident_bytes",
            stats.resident_bytes,
            config.resident_bytes_max,
        )?;
    }
    over(
        "log_used_blocks",
        stats.log_used_blocks,
        stats.log_prepared_blocks,
    )?;
    over(
        "log_prepared_blocks",
        stats.log_prepared_blocks,
        stats.log_ring_blocks,
    )?;
    over("log_ring_blocks", stats.log_ring_blocks, ring_blocks)?;
    over(
        "requests_in_flight",
        stats.requests_in_flight,
        waiting as u64,
    )?;
    over(
        "throttled_requests",
        stats.throttled_requests,
        waiting as u64,
    )
}

/// Check what the volumes of a shard have of the memory for their indexes beyond the least of each, where they may have so
/// much as far as the shard has said.
pub fn check_budget(budget: &IndexBudget, bound: u64, volumes: usize) -> Result<(), Violation> {
    let most = bound.saturating_add(volumes as u64 * BUDGET_SLACK_BYTES);
    if budget.used() <= most || budget.is_overdrawn() {
        return Ok(());
    }
    Err(Violation::new(
        "budget-out-of-bounds",
        format!("{budget:?}, at most {bound}, of {volumes} volumes"),
    ))
}

/// Check that shards together take no more for that than there is.
pub fn check_budgets(budgets: &[Rc<IndexBudget>], cap: u64) -> Result<(), Violation> {
    let totals = budgets.iter().map(|budget| budget.total());
    let total = totals.fold(0, u64::saturating_add);
    if total <= cap {
        return Ok(());
    }
    Err(Violation::new(
        "indexes-beyond-cap",
        format!("{total} bytes of {cap}: {budgets:?}"),
    ))
}

/// Check what a cache says of itself.
pub fn check_cache(config: &CacheConfig, stats: &CacheStats) -> Result<(), Violation> {
    let ssd_blocks = config
        .ssd
        .as_ref()
        .map_or(0, |ssd| ssd.bytes / BLOCK_BYTES as u64);
    let blocks = config.dram_blocks as u64 + ssd_blocks;
    let bound = CACHE_INDEX_BYTES_BASE + blocks * CACHE_INDEX_BYTES_PER_BLOCK;
    let fits = stats.index_bytes <= bound
        && stats.dram_used_blocks <= config.dram_blocks as u64
        && stats.ssd_used_blocks <= stats.ssd_lines * stats.line_blocks
        && stats.ssd_used_blocks <= stats.ssd_used_lines * stats.line_blocks
        && stats.ssd_lines * stats.line_blocks <= ssd_blocks;
    if fits {
        return Ok(());
    }
    Err(Violation::new(
        "cache-out-of-bounds",
        format!("{stats:?} with at most {bound} bytes of index, {config:?}"),
    ))
}

/// Check that nobody holds a buffer.
pub fn check_pool_is_free(pool: &Pool) -> Result<(), Violation> {
    if pool.free_bytes() == pool.total_bytes() {
        return Ok(());
    }
    Err(Violation::new(
        "buffer-leak",
        format!("{pool:?} after everything was dropped"),
    ))
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::io::Nanos;

    use super::*;

    #[test]
    fn bounds_of_a_device_are_checked() {
        let rule = |offset, bytes| check_range("log", offset, bytes, 4096, 16384).is_ok();
        assert!(rule(0, 4096) && rule(12288, 4096));
        assert!(!rule(0, 0) && !rule(512, 4096) && !rule(0, 512) && !rule(12288, 8192));
        assert!(!rule(u64::MAX - 4095, 4096), "overflow");
    }

    #[test]
    fn bounds_of_writes_in_flight_are_checked() {
        let mut writes = WritesInFlight::default();
        writes.begin("log", 0, 8192).expect("first");
        writes.begin("log", 8192, 4096).expect("beside it");
        assert_eq!(
            writes.begin("log", 4096, 4096).unwrap_err().rule,
            "effect-overlap"
        );
        writes.end(0);
        writes.begin("log", 4096, 4096).expect("it ended");
    }

    #[test]
    fn bounds_of_memory_are_checked() {
        let config = CacheConfig {
            dram_blocks: 4,
            ssd: None,
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        let mut stats = CacheStats {
            dram_used_blocks: 4,
            ..CacheStats::default()
        };
        check_cache(&config, &stats).expect("within bounds");
        stats.index_bytes = CACHE_INDEX_BYTES_BASE + 4 * CACHE_INDEX_BYTES_PER_BLOCK + 1;
        assert_eq!(
            check_cache(&config, &stats).unwrap_err().rule,
            "cache-out-of-bounds"
        );
        let pool = Pool::new(1 << 20);
        let held = pool.alloc(4096);
        assert_eq!(check_pool_is_free(&pool).unwrap_err().rule, "buffer-leak");
        drop(held);
        check_pool_is_free(&pool).expect("free again");
    }
}
