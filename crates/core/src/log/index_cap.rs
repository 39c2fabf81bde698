//! Memory for the indexes of all write logs of a node, as its shards share it: each has a part, and what one does not need
//! another one gets.
//!
//! ```text
//!  ├──── part of shard 0 ────┼ part of 1 ┼─────────── part of shard 2 ───────────┼ spare ┤ cap
//!   used ▒▒▒▒▒▒▒▒             used ▒      used ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
//! ```
//!
//! At first parts are even. A shard *wants* four times what it uses, so that it destages no earlier than it has to, and a
//! quarter of the even part in any case. Who has less than that gets what is spare, then what others have and do not want.
//! Who has less than the even part gets it from those who have more, whatever they want: these destage then, as after any
//! budget that became smaller.
//!
//! A shard says what it uses when that has changed by an eighth, and when it is given another part. At other
//! times it looks at its part, which is one load: so no write waits for another shard.
//!
//! Invariants:
//! 1. Parts together are no more than the cap.
//! 2. What is taken from a shard is given to another one only once the first has said that it uses no more than what it
//!    has left: so shards together use no more than the cap, but for what each may go beyond its own budget.
//! 3. A cap that becomes smaller makes parts smaller at once. Until these are used no more, shards are over it.
//!
//! Nothing here fails. What each volume needs at least is set apart, and not part of this.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::budget::IndexBudget;

/// A shard wants so many times what it uses.
const WANTED_FACTOR: u64 = 4;
/// And this part, as a divisor, of the even part.
const WANTED_LEAST_DIVISOR: u64 = 4;
/// A change of what is used by this part of that, or of a quarter of the shard's part, as a divisor, is said.
const SAID_DIVISOR: u64 = 8;

/// Rounds in which a shard settles at most: in the first it may lose something, in the second somebody gets it.
const SETTLING_ROUNDS: usize = 4;

/// See the module.
#[derive(Debug)]
pub struct IndexCap {
    /// What each shard may use: those of the ledger, to be looked at without its lock.
    parts: Box<[AtomicU64]>,
    ledger: Mutex<Ledger>,
}

#[derive(Debug)]
struct Ledger {
    cap: u64,
    shards: Vec<Account>,
}

/// What is known of a shard.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// What it may use.
    part: u64,
    /// What it may be using until it says less: its part, or an earlier one.
    bound: u64,
    wants: u64,
}

impl Account {
    /// Give it so much more, of which what it may be using anyway is nobody else's.
    fn give(&mut self, more: u64) {
        self.part += more;
        self.bound = self.bound.max(self.part);
    }
}

impl IndexCap {
    /// So many bytes for so many shards, one at least.
    pub fn new(cap: u64, shards: usize) -> Arc<Self> {
        let shards = shards.max(1);
        let even = cap / shards as u64;
        let account = Account {
            part: even,
            bound: even,
            wants: even / WANTED_LEAST_DIVISOR,
        };
        Arc::new(Self {
            parts: (0..shards).map(|_| AtomicU64::new(even)).collect(),
            ledger: Mutex::new(Ledger {
                cap,
                shards: vec![account; shards],
            }),
        })
    }

    /// How many bytes there are.
    pub fn cap(&self) -> u64 {
        self.ledger.lock().cap
    }

    /// What a shard may use.
    pub fn part(&self, shard: usize) -> u64 {
        self.parts[shard].load(Ordering::Relaxed)
    }

    /// What a shard may be using, as far as it has said.
    pub fn bound(&self, shard: usize) -> u64 {
        self.ledger.lock().shards[shard].bound
    }

    /// There are so many bytes from now on. Whose part that has changed, a bit for each shard.
    pub fn set_cap(&self, cap: u64) -> u64 {
        let mut ledger = self.ledger.lock();
        ledger.cap = cap;
        ledger.shrink();
        ledger.deal();
        self.publish(&ledger)
    }

    /// A shard uses so much, and no more than that or its part from now on, which may have become another one. Whose part
    /// is another one now, a bit for each shard.
    fn settle(&self, shard: usize, used: u64) -> u64 {
        let mut ledger = self.ledger.lock();
        let least = ledger.even() / WANTED_LEAST_DIVISOR;
        ledger.shards[shard].wants = used.saturating_mul(WANTED_FACTOR).max(least);
        // What is taken from it while it settles it lets go of at once, and somebody else may have that.
        for _ in 0..SETTLING_ROUNDS {
            let account = &mut ledger.shards[shard];
            let part = account.part;
            account.bound = part.max(used);
            ledger.deal();
            if ledger.shards[shard].part == part {
                break;
            }
        }
        let account = &mut ledger.shards[shard];
        account.bound = account.part.max(used);
        self.publish(&ledger)
    }

    fn publish(&self, ledger: &Ledger) -> u64 {
        let mut changed = 0;
        for (shard, (part, account)) in self.parts.iter().zip(&ledger.shards).enumerate() {
            if part.swap(account.part, Ordering::Relaxed) != account.part {
                changed |= 1 << shard;
            }
        }
        changed
    }
}

impl Ledger {
    fn even(&self) -> u64 {
        self.cap / self.shards.len() as u64
    }

    /// What nobody has or may be using.
    fn spare(&self) -> u64 {
        self.cap.saturating_sub(self.bounds())
    }

    fn bounds(&self) -> u64 {
        let bounds = self.shards.iter().map(|account| account.bound);
        bounds.fold(0, u64::saturating_add)
    }

    /// Take from those who have more than the even part until parts are within the cap.
    fn shrink(&mut self) {
        let parts = self.shards.iter().map(|account| account.part);
        let mut over = parts.fold(0, u64::saturating_add).saturating_sub(self.cap);
        let even = self.even();
        while over > 0 {
            let most = self.shards.iter_mut().max_by_key(|account| account.part);
            let most = most.expect("there is a shard");
            let cut = (most.part - even).min(over);
            most.part -= cut;
            over -= cut;
        }
    }

    /// Give those who want more what is to be had, up to the even part first, and take for them what others have too much.
    fn deal(&mut self) {
        let even = self.even();
        self.give(|account| account.wants.min(even), true);
        self.give(|account| account.wants, false);
        let lack = |account: &Account, to: u64| to.min(account.wants).saturating_sub(account.part);
        let lacks = |ledger: &Self, to: u64| -> u64 {
            let lacks = ledger.shards.iter().map(|account| lack(account, to));
            lacks.fold(0, u64::saturating_add)
        };
        // What was taken already will be there.
        let coming = self
            .shards
            .iter()
            .map(|account| account.bound - account.part);
        let coming = coming.fold(0, u64::saturating_add);
        let wanted = lacks(self, u64::MAX).saturating_sub(coming);
        let taken = self.take(wanted, |account| account.wants);
        let needed = lacks(self, even).saturating_sub(coming.saturating_add(taken));
        self.take(needed, |_| even);
    }

    /// Give each up to so much of what is spare, or also of what was taken from it and it has not let go of yet.
    fn give(&mut self, up_to: impl Fn(&Account) -> u64, also_own: bool) {
        for shard in 0..self.shards.len() {
            let spare = self.spare();
            let others = self.bounds().saturating_sub(self.shards[shard].bound);
            let account = &mut self.shards[shard];
            let room = if also_own {
                // What it uses beyond its budget, as a replay may, was never its own.
                (self.cap.saturating_sub(others)).saturating_sub(account.part)
            } else {
                spare
            };
            let more = up_to(account).saturating_sub(account.part);
            account.give(more.min(room));
        }
    }

    /// Take so much from those who have more than what they are left. Returns how much of it was there.
    fn take(&mut self, wanted: u64, left: impl Fn(&Account) -> u64) -> u64 {
        let mut missing = wanted;
        while missing > 0 {
            let too_much = |account: &Account| account.part.saturating_sub(left(account));
            let most = self
                .shards
                .iter_mut()
                .max_by_key(|account| too_much(account));
            let most = most.expect("there is a shard");
            let cut = too_much(most).min(missing);
            if cut == 0 {
                break;
            }
            most.part -= cut;
            missing -= cut;
        }
        wanted - missing
    }
}

/// The part of one shard, which follows from what its budget says.
#[derive(Debug)]
pub struct IndexPart {
    cap: Arc<IndexCap>,
    shard: usize,
    /// What it was last said to use.
    said: u64,
}

impl IndexPart {
    /// Of a shard, none of whose logs holds anything yet.
    pub fn new(cap: &Arc<IndexCap>, shard: usize) -> Self {
        Self {
            cap: Arc::clone(cap),
            shard,
            said: 0,
        }
    }

    /// A budget of it.
    pub fn budget(&self) -> alloc::rc::Rc<IndexBudget> {
        IndexBudget::new(self.cap.part(self.shard))
    }

    /// Have the shard's budget be its part, and say what is used if that has changed much. Returns which other shards were
    /// given another part, and are to be told, a bit for each.
    pub fn follow(&mut self, budget: &IndexBudget) -> u64 {
        let (part, used) = (self.cap.part(self.shard), budget.used());
        let has_changed = used.abs_diff(self.said) > self.said.max(part / 4) / SAID_DIVISOR;
        let is_within_again = self.said > part && used <= part;
        if part == budget.total() && !has_changed && !is_within_again {
            return 0;
        }
        // Before it is said that it uses no more than that.
        budget.set_total(part);
        self.said = used;
        let changed = self.cap.settle(self.shard, used);
        budget.set_total(self.cap.part(self.shard));
        changed & !(1 << self.shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::budget::Share;

    /// A replay may use more than its shard has; that does not become its part.
    #[test]
    fn what_a_replay_uses_beyond_its_budget_is_no_part_of_it() {
        let cap = IndexCap::new(CAP, 2);
        cap.settle(1, 700);
        cap.settle(0, 100);
        assert_eq!(parts(&cap), [1200, 2800]);
        cap.settle(0, 1900);
        assert!(sum(&cap) <= CAP, "{:?}", parts(&cap));
        // The other one has not let go of anything yet.
        assert!(cap.part(0) <= CAP - cap.bound(1), "{:?}", parts(&cap));
    }

    const CAP: u64 = 4000;

    fn parts(cap: &IndexCap) -> Vec<u64> {
        (0..cap.parts.len()).map(|shard| cap.part(shard)).collect()
    }

    fn sum(cap: &IndexCap) -> u64 {
        parts(cap).iter().sum()
    }

    #[test]
    fn shard_alone_has_everything_whatever_it_uses() {
        let cap = IndexCap::new(CAP, 1);
        for used in [0, 10, CAP, 2 * CAP, 0] {
            assert_eq!(cap.settle(0, used), 0);
            assert_eq!(parts(&cap), [CAP]);
        }
        assert_eq!(cap.set_cap(10), 1);
        assert_eq!(parts(&cap), [10]);
    }

    #[test]
    fn busy_shard_gets_what_others_leave_free_and_they_get_it_back() {
        let cap = IndexCap::new(CAP, 4);
        assert_eq!(parts(&cap), [1000; 4]);
        cap.settle(0, 200);
        assert_eq!(parts(&cap), [1000; 4], "it has what it wants");
        assert_eq!(cap.settle(0, 600), 0b1100);
        assert_eq!(cap.part(0), 1000, "they have not said yet what they use");
        for other in 1..4 {
            cap.settle(other, 0);
        }
        assert_eq!(cap.part(0), 2400);
        assert_eq!(sum(&cap), CAP);
        cap.settle(0, 2000);
        for other in 1..4 {
            cap.settle(other, 0);
        }
        assert_eq!(parts(&cap), [3250, 250, 250, 250]);
        // One of the others wants its own.
        cap.settle(3, 240);
        assert_eq!(cap.part(3), 250);
        assert_eq!(cap.part(0), 3250 - 710, "it is to give that back");
        cap.settle(0, 3250);
        assert_eq!(cap.part(3), 250, "it still uses it");
        cap.settle(0, 2700);
        assert_eq!(cap.part(3), 250 + 550);
        cap.settle(0, 2500);
        assert_eq!(parts(&cap), [2540, 250, 250, 960]);
    }

    #[test]
    fn shards_that_all_want_everything_have_even_parts() {
        let cap = IndexCap::new(CAP, 4);
        for _ in 0..8 {
            for shard in 0..4 {
                cap.settle(shard, cap.part(shard));
            }
        }
        assert_eq!(parts(&cap), [1000; 4]);
    }

    #[test]
    fn cap_that_shrinks_takes_from_those_who_have_most() {
        let cap = IndexCap::new(CAP, 4);
        cap.settle(0, 1000);
        for other in 1..4 {
            cap.settle(other, 0);
        }
        assert_eq!(cap.part(0), 3250);
        cap.set_cap(2000);
        assert_eq!(parts(&cap), [1250, 250, 250, 250]);
        assert_eq!(cap.bound(0), 3250, "until it says that it uses less");
        cap.settle(0, 1000);
        cap.set_cap(0);
        assert_eq!(parts(&cap), [0; 4]);
        cap.set_cap(u64::MAX);
        cap.settle(0, 1000);
        assert!(cap.part(0) >= 4000);
    }

    #[test]
    fn shards_use_no_more_than_the_cap_whatever_they_do_and_whoever_comes_last_gets_some() {
        let mut random = 7_u64;
        let mut next = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..200 {
            let count = 1 + next(5) as usize;
            let cap = IndexCap::new(CAP, count);
            let mut shards: Vec<_> = (0..count)
                .map(|shard| {
                    let part = IndexPart::new(&cap, shard);
                    let budget = part.budget();
                    let logs = [Share::new(&budget, 10), Share::new(&budget, 10)];
                    (part, budget, logs)
                })
                .collect();
            for _ in 0..300 {
                let (part, budget, logs) = &mut shards[next(count as u64) as usize];
                let share = &mut logs[next(2) as usize];
                let more = next(300);
                if next(3) > 0 && share.takes(more) {
                    share.set(share.held() + more);
                } else {
                    share.set(share.held() - next(share.held() + 1));
                }
                part.follow(budget);
                assert!(sum(&cap) <= CAP);
                let used: u64 = shards.iter().map(|(_, budget, _)| budget.used()).sum();
                let totals: u64 = shards.iter().map(|(_, budget, _)| budget.total()).sum();
                assert!(used <= CAP && totals <= CAP, "{shards:?}");
            }
            // All but one become idle: that one may have nearly everything.
            for (part, budget, logs) in &mut shards {
                for share in logs.iter_mut() {
                    share.set(0);
                }
                part.follow(budget);
            }
            for _ in 0..200 {
                let (part, budget, [share, _]) = &mut shards[0];
                if share.takes(10) {
                    share.set(share.held() + 10);
                }
                part.follow(budget);
                for (part, budget, _) in &mut shards[1..] {
                    part.follow(budget);
                }
            }
            let held = shards[0].2[0].held();
            assert!(held >= CAP / 2, "{held} of {count} shards: {cap:?}");
        }
    }
}
