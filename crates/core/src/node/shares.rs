//! Who may hold how much of a fixed amount of memory.
//!
//! Nobody has memory of its own, and nobody can take all of it: a holder may have at most a fixed
//! multiple (its *share*) of what is left. One holder alone gets most of it; many get the same each,
//! and what is left shrinks with their number but does not vanish, so whoever comes next is served.
//! These are the dynamic thresholds of shared-memory switches (Choudhury, Hahne: *Dynamic Queue
//! Length Thresholds for Shared-Memory Packet Switches*, IEEE/ACM Transactions on Networking, 1998).
//!
//! With a share of a/b, `n` holders that want all they can get have `a / (b + n a)` of it each, and
//! `b / (b + n a)` is left.
//!
//! Invariants:
//! 1. What is held is the sum of what holders were said to hold.
//! 2. A holder that keeps to [`Shares::most`] leaves at least `b / a` times what it holds.
//!
//! There are no failures. Memory that is held beyond the total (it was given before others came) is
//! counted, and nobody gets more meanwhile.

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    total: u64,
    held: u64,
}

impl Shares {
    /// So much memory, of which nobody holds anything.
    pub const fn new(total: u64) -> Self {
        Self { total, held: 0 }
    }

    /// Memory in all.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// What all hold together.
    pub const fn held(&self) -> u64 {
        self.held
    }

    /// What nobody holds.
    pub const fn left(&self) -> u64 {
        self.total.saturating_sub(self.held)
    }

    /// A holder had `before`, and has `after` now.
    pub fn update(&mut self, before: u64, after: u64) {
        assert!(before <= self.held, "what is given back was held");
        self.held = self.held - before + after;
    }

    /// The most that a holder of `held` may hold, with a share of `a / b`: what it may take more,
    /// it leaves `b / a` times as much of. Not less than it holds already.
    pub const fn most(&self, held: u64, (a, b): (u64, u64)) -> u64 {
        // held + more <= (left - more) * a / b, solved for more.
        let more = (self.left() * a).saturating_sub(held * b) / (a + b);
        held + more
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn shares_are_alike_for_all_and_leave_something() {
        for (count, share) in [(1, (1, 2)), (7, (1, 2)), (900, (1, 2)), (40, (1, 1))] {
            let mut shares = Shares::new(64 << 20);
            let mut held = vec![0; count];
            // They take in turns, in small steps, all that they can get.
            for _ in 0..10_000 {
                for one in &mut held {
                    let more = (shares.most(*one, share) - *one).min(4096);
                    shares.update(*one, *one + more);
                    *one += more;
                }
            }
            let (a, b) = share;
            let each = (64 << 20) * a / (b + count as u64 * a);
            for one in held {
                assert!(one.abs_diff(each) < 8192, "{one}, not {each}");
            }
            assert!(shares.left() >= (64 << 20) * b / (b + count as u64 * a) - 4096);
        }
    }

    #[test]
    fn shares_leave_something_whoever_takes_and_gives() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut shares = Shares::new(1 << 20);
        let mut held = vec![0u64; 50];
        for _ in 0..20_000 {
            let one = &mut held[random.usize(..50)];
            let after = if random.bool() {
                random.u64(..=*one)
            } else {
                shares.most(*one, (1, 2))
            };
            if after > *one {
                assert!(after <= (shares.left() - (after - *one)) / 2 + 1);
            }
            shares.update(*one, after);
            *one = after;
            assert!(shares.left() > 0, "somebody else is served");
        }
        assert_eq!(shares.held(), held.iter().sum::<u64>());
    }

    #[test]
    fn shares_give_nothing_while_too_much_is_held() {
        let mut shares = Shares::new(100);
        shares.update(0, 120);
        assert_eq!((shares.left(), shares.most(0, (1, 2))), (0, 0));
        assert_eq!(shares.most(120, (1, 2)), 120);
        shares.update(120, 40);
        assert_eq!(shares.most(0, (1, 2)), 20);
    }
}
