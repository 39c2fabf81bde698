//! Memory for what backends keep in tables that grow with what they hold: the maps of volumes over object stores, and
//! the maps and checksums of homes.
//!
//! There is one share for the process. The daemon bounds it at its start ([`crate::config::budget`]); a tool that runs
//! alone has no bound. A backend that finds too little is not opened, or refuses what would make its tables grow.

use std::sync::{Arc, LazyLock};

use hdcs_core::home::format::pages;
use hdcs_core::limits::{BLOCK_BYTES, HOME_SUMS_BYTES};
use hdcs_core::memory::{Lease, Share};

static TABLES: LazyLock<Arc<Share>> = LazyLock::new(Share::unlimited);

/// The least that a home has for checksums: it works with less of them at hand, and reads more.
const HOME_SUMS_BYTES_MIN: u64 = 256 << 10;
/// Bytes of data for each byte of checksums.
const SUMS_RATIO: u64 = 128;

/// What to do if there is too little, for messages.
pub const REMEDY: &str = "raise `tables_memory_mib` or `memory_max_mib`, and restart the daemon";

/// The share.
pub fn tables() -> &'static Arc<Share> {
    &TABLES
}

/// Bytes of memory that the map of a home of so many bytes takes at most: two bits for each block, and three more while
/// it is tiered out.
pub fn home_map_bytes(bytes: u64) -> u64 {
    let page = BLOCK_BYTES as u64;
    pages(bytes) * (page + page * 3 / 2)
}

/// What a home of so many bytes has of a share, and how much of that is for checksums; else how much it needs at least.
pub fn lease_home(share: &Arc<Share>, bytes: u64) -> Result<(Lease, usize), u64> {
    let map = home_map_bytes(bytes);
    // All checksums, and a third as much for what the log writes again.
    let all = (bytes / SUMS_RATIO * 4 / 3).next_multiple_of(BLOCK_BYTES as u64);
    let mut sums = all.clamp(HOME_SUMS_BYTES_MIN, HOME_SUMS_BYTES as u64);
    let mut lease = Lease::of(Arc::clone(share));
    loop {
        if lease.reach(map + sums) {
            return Ok((lease, sums as usize));
        }
        if sums == HOME_SUMS_BYTES_MIN {
            return Err(map + sums);
        }
        sums = (sums / 2).max(HOME_SUMS_BYTES_MIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn home_has_all_its_checksums_or_what_there_is() {
        let share = Share::new(100 * MIB);
        let (small, sums) = lease_home(&share, 64 * MIB).unwrap();
        assert!(sums as u64 >= MIB / 2 && share.leased_bytes() < MIB);
        let (large, sums) = lease_home(&share, 64 << 30).unwrap();
        assert_eq!(sums, HOME_SUMS_BYTES);
        let (third, sums) = lease_home(&share, 64 << 30).unwrap();
        assert!((HOME_SUMS_BYTES_MIN as usize..HOME_SUMS_BYTES).contains(&sums));
        assert!(share.leased_bytes() <= share.bytes());
        // The map alone is too much.
        let needs = lease_home(&share, 16 << 40).unwrap_err();
        assert!(needs > 2 << 30, "{needs}");
        drop((small, large, third));
        assert_eq!(share.leased_bytes(), 0);
    }
}
