//! Memory for tables that grow with what they tell of, within one bound for all machines of a process.
//!
//! A [`Share`] is so many bytes. A machine has a [`Lease`] of it, which it makes larger before its tables grow; if that
//! is refused, the tables stay as they are. What a lease has goes back with it.
//!
//! Invariants:
//! 1. Leases have no more together than the share had when they last grew.
//! 2. A lease that goes, for whatever reason, gives back all that it has.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

/// Leases grow and shrink in steps of so many bytes: small enough for what a machine needs at least.
const STEP_BYTES: u64 = 1024;

/// The whole steps that have so many bytes.
const fn steps(bytes: u64) -> u64 {
    bytes.div_ceil(STEP_BYTES).saturating_mul(STEP_BYTES)
}

/// Memory that several machines share, in bytes. They may run in different threads.
#[derive(Debug)]
pub struct Share {
    bytes: AtomicU64,
    leased: AtomicU64,
}

impl Share {
    /// So many bytes.
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes: AtomicU64::new(bytes),
            leased: AtomicU64::new(0),
        })
    }

    /// Without a bound, for tools and tests.
    pub fn unlimited() -> Arc<Self> {
        Self::new(u64::MAX)
    }

    /// From now on there are so many bytes. What is leased stays so, even if that is more.
    pub fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// How many bytes there are.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// How many of them are leased.
    pub fn leased_bytes(&self) -> u64 {
        self.leased.load(Ordering::Relaxed)
    }

    fn claim(&self, more: u64) -> bool {
        let bytes = self.bytes();
        let claimed = |leased: u64| leased.checked_add(more).filter(|&sum| sum <= bytes);
        let order = Ordering::Relaxed;
        self.leased.fetch_update(order, order, claimed).is_ok()
    }
}

/// What a machine has of a [`Share`].
#[derive(Debug)]
pub struct Lease {
    share: Arc<Share>,
    bytes: u64,
}

impl Lease {
    /// Nothing of a share, for now.
    pub const fn of(share: Arc<Share>) -> Self {
        Self { share, bytes: 0 }
    }

    /// Have at least so many bytes; false, and nothing changes, if there are not so many.
    pub fn reach(&mut self, bytes: u64) -> bool {
        if bytes <= self.bytes {
            return true;
        }
        // Near the end of the share a step may be too much.
        let stepped = steps(bytes);
        for wanted in [stepped, bytes] {
            if self.share.claim(wanted - self.bytes) {
                self.bytes = wanted;
                return true;
            }
        }
        false
    }

    /// Give back what is not needed beyond so many bytes, but for a step.
    pub fn shrink(&mut self, bytes: u64) {
        let kept = steps(bytes).saturating_add(STEP_BYTES);
        if kept < self.bytes {
            self.share
                .leased
                .fetch_sub(self.bytes - kept, Ordering::Relaxed);
            self.bytes = kept;
        }
    }

    /// What it has.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.share.leased.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_have_no_more_than_their_share_and_give_it_back() {
        let share = Share::new(10_000);
        let [mut a, mut b] = [Lease::of(Arc::clone(&share)), Lease::of(Arc::clone(&share))];
        assert!(a.reach(8000) && a.bytes() == 8192);
        assert!(
            b.reach(1800) && b.bytes() == 1800,
            "less than a step is left"
        );
        assert!(!b.reach(1809) && b.bytes() == 1800);
        assert_eq!(share.leased_bytes(), 9992);
        a.shrink(100);
        assert_eq!((a.bytes(), share.leased_bytes()), (2048, 3848));
        assert!(a.reach(8192));
        assert!(b.reach(1808) && !b.reach(u64::MAX));
        drop(a);
        assert_eq!(share.leased_bytes(), 1808);
        assert!(b.reach(10_000));
        b.shrink(0);
        assert_eq!((b.bytes(), share.leased_bytes()), (1024, 1024));
        share.set_bytes(1000);
        assert!(b.reach(1024) && !b.reach(1025), "what there is stays");
    }

    #[test]
    fn lease_of_an_unlimited_share_is_never_refused() {
        let mut lease = Lease::of(Share::unlimited());
        assert!(lease.reach(1 << 62));
    }
}
