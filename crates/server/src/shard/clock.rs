//! The clock of all shards.
//!
//! It goes on while the machine is suspended: a lease ([`hdcs_core::volume::lease`]) that was had before is over after a
//! long sleep.

use hdcs_core::base::io::Nanos;
use rustix::time::{ClockId, clock_gettime};

/// What it shows.
pub fn now() -> Nanos {
    let time = clock_gettime(ClockId::Boottime);
    // Neither is negative: it counts from the boot on.
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn clock_counts_nanoseconds_and_does_not_go_back() {
        let (since, before) = (Instant::now(), now());
        std::thread::sleep(Duration::from_millis(5));
        let after = now();
        let (shown, passed) = (after.since(before).0, since.elapsed().as_nanos() as u64);
        assert!(
            (5_000_000..=passed + 1).contains(&shown),
            "{shown} of {passed}"
        );
    }
}
