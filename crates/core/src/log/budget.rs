//! Memory for the indexes of write logs: one budget for all volumes of a shard, of which each takes what it needs as it
//! needs it.
//!
//! ```text
//!   ┌ least ┬ least ┬ least ┬────────────── budget ──────────────┐
//!   │  a    │  b    │  c    │ a beyond │ c beyond │     free     │
//!   └───────┴───────┴───────┴────────────────────────────────────┘
//! ```
//!
//! Invariants:
//! 1. What a share holds up to its least is its own: it is set apart before the volume is opened, and no other volume can
//!    take it. So every volume can accept a largest request and destage it, whatever others hold.
//! 2. Beyond their least, shares hold no more than the budget together, but for one at a time that a replay takes beyond
//!    it ([`Share::may_replay`]). Until what that brought is given back, no other does.
//! 3. Beyond its least a share takes at most [`FREE_SHARES`] times what is free. So no volume takes everything, whoever
//!    comes later finds some, and those that hold much are full, and destage, before those that hold little.
//!
//! 4. One reserve of memory to read logs is set apart, for whoever needs it first. A volume whose backend gives no answer does
//!    not keep that one: what it holds is of the budget from then on, as further reserves are, if need be beyond it. Only one
//!    at a time goes beyond it, and only if all of them together are no more than the budget: so the others repay it.
//!
//! A budget that becomes smaller takes nothing back by itself: shares are over it until they have destaged.

use alloc::rc::Rc;
use core::cell::Cell;

/// A share takes beyond its least at most so many times what is free: one alone has four fifths of the budget.
const FREE_SHARES: u64 = 4;
/// A change of what is free by this part of it, as a divisor, is told.
const TOLD_DIVISOR: u64 = 8;

/// See the module.
#[derive(Debug)]
pub struct IndexBudget {
    total: Cell<u64>,
    used: Cell<u64>,
    /// What was free when that was told.
    told_free: Cell<u64>,
    overdraft: Cell<Overdraft>,
    /// Reserves of memory to read logs that are in use, but for those that silent backends keep.
    reserves: Cell<u64>,
    /// What those are.
    kept_bytes: Cell<u64>,
}

/// Whether more is taken than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overdraft {
    No,
    /// By a replay that is under way.
    Replaying,
    /// By what a replay has brought, or by a reserve that a silent backend keeps.
    Repaying,
}

impl IndexBudget {
    /// So many bytes beyond the least of every share.
    pub fn new(total: u64) -> Rc<Self> {
        Rc::new(Self {
            total: Cell::new(total),
            used: Cell::new(0),
            told_free: Cell::new(total),
            overdraft: Cell::new(Overdraft::No),
            reserves: Cell::new(0),
            kept_bytes: Cell::new(0),
        })
    }

    /// Without a bound, for tools and tests.
    pub fn unlimited() -> Rc<Self> {
        Self::new(u64::MAX)
    }

    /// There are so many bytes from now on.
    pub fn set_total(&self, total: u64) {
        self.total.set(total);
        self.note_repaid();
    }

    /// What there is beyond the least of every share.
    pub fn total(&self) -> u64 {
        self.total.get()
    }

    /// What shares hold beyond their least.
    pub fn used(&self) -> u64 {
        self.used.get()
    }

    /// What is left.
    pub fn free(&self) -> u64 {
        self.total().saturating_sub(self.used())
    }

    /// Whether a replay has taken more than there was, and that is not given back yet.
    pub fn is_overdrawn(&self) -> bool {
        self.overdraft.get() != Overdraft::No
    }

    /// Whether what is free has changed much since this last said so. Then volumes that hold some, or wait for some,
    /// have to be polled.
    pub fn has_changed(&self) -> bool {
        let (free, told) = (self.free(), self.told_free.get());
        let has_changed = free.abs_diff(told) > told.max(free) / TOLD_DIVISOR;
        if has_changed {
            self.told_free.set(free);
        }
        has_changed
    }

    fn change(&self, from: u64, to: u64) {
        self.used.set(self.used() - from + to);
        self.note_repaid();
    }

    /// What a replay had taken beyond what there was may fit by now.
    fn note_repaid(&self) {
        if self.overdraft.get() == Overdraft::Repaying && self.used() <= self.total() {
            self.overdraft.set(Overdraft::No);
        }
    }

    /// Take a reserve of so many bytes to read a log with, if there is one. One is set apart; more are of the budget.
    pub fn take_reserve(&self, bytes: u64) -> bool {
        let reserves = self.reserves.get();
        if reserves > 0 {
            if self.free() < bytes {
                return false;
            }
            self.change(0, bytes);
        }
        self.reserves.set(reserves + 1);
        true
    }

    /// Give one of so many bytes back.
    pub fn give_reserve(&self, bytes: u64) {
        let reserves = self.reserves.get() - 1;
        if reserves > 0 {
            self.change(bytes, 0);
        }
        self.reserves.set(reserves);
    }

    /// A reserve of so many bytes that is in use is kept by a backend that gives no answer. Whether it counts as that from
    /// now on, so that another volume may have the one that is set apart.
    pub fn keep_reserve(&self, bytes: u64) -> bool {
        let reserves = self.reserves.get();
        if reserves == 1 {
            let overdraws = self.free() < bytes;
            let is_repaid = self.kept_bytes.get() + bytes <= self.total();
            if overdraws && (self.is_overdrawn() || !is_repaid) {
                return false;
            }
            if overdraws {
                self.overdraft.set(Overdraft::Repaying);
            }
            self.change(0, bytes);
        }
        // Of several, all but one are of the budget already.
        self.reserves.set(reserves - 1);
        self.kept_bytes.set(self.kept_bytes.get() + bytes);
        true
    }

    /// Give one back that counted so.
    pub fn give_kept_reserve(&self, bytes: u64) {
        self.kept_bytes.set(self.kept_bytes.get() - bytes);
        self.change(bytes, 0);
    }
}

/// What one volume has of an [`IndexBudget`].
#[derive(Debug)]
pub struct Share {
    budget: Rc<IndexBudget>,
    least: u64,
    held: u64,
    /// A replay was let go beyond the budget.
    may_replay: bool,
}

impl Default for Share {
    /// Of no budget that anybody has said.
    fn default() -> Self {
        Self::new(&IndexBudget::unlimited(), 0)
    }
}

impl Share {
    /// None yet, with so many bytes that are its own.
    pub fn new(budget: &Rc<IndexBudget>, least: u64) -> Self {
        Self {
            budget: Rc::clone(budget),
            least,
            held: 0,
            may_replay: false,
        }
    }

    /// The budget that it is of.
    pub fn budget(&self) -> &Rc<IndexBudget> {
        &self.budget
    }

    /// What it holds.
    pub fn held(&self) -> u64 {
        self.held
    }

    fn beyond(&self, held: u64) -> u64 {
        held.saturating_sub(self.least)
    }

    /// It holds so much now.
    pub fn set(&mut self, held: u64) {
        if held == self.held {
            return;
        }
        let (before, after) = (self.beyond(self.held), self.beyond(held));
        self.held = held;
        if before != after {
            self.budget.change(before, after);
        }
    }

    /// What it may hold at most as things are.
    fn capacity(&self) -> u64 {
        let free = self.budget.free().saturating_mul(FREE_SHARES);
        self.least.saturating_add(free)
    }

    /// Whether it may hold so much more.
    pub fn takes(&self, more: u64) -> bool {
        let held = self.held + more;
        let beyond = self.beyond(held) - self.beyond(self.held);
        beyond == 0 || beyond <= self.budget.free() && held <= self.capacity()
    }

    /// How much it holds of what it may, from 0 to 1.
    pub fn fill(&self) -> f64 {
        if self.held == 0 {
            return 0.0;
        }
        (self.held as f64 / self.capacity().max(1) as f64).min(1.0)
    }

    /// The same, for destage: a share beyond its least gives way when the budget is used up, however little it holds.
    pub fn pressure(&self) -> f64 {
        if self.beyond(self.held) == 0 {
            return self.fill();
        }
        let used = self.budget.used() as f64 / self.budget.total().max(1) as f64;
        self.fill().max(used.min(1.0))
    }

    /// Whether a replay may go on that takes up to so much more. One goes on beyond the budget, since nothing of a log
    /// can be destaged before all of it is known; others wait until what that one brought is given back.
    pub fn may_replay(&mut self, more: u64) -> bool {
        let held = self.held + more;
        let beyond = self.beyond(held) - self.beyond(self.held);
        if self.may_replay || beyond <= self.budget.free() {
            return true;
        }
        if self.budget.overdraft.get() == Overdraft::No {
            self.budget.overdraft.set(Overdraft::Replaying);
            self.may_replay = true;
        }
        self.may_replay
    }

    /// The replay has ended.
    pub fn replayed(&mut self) {
        if core::mem::take(&mut self.may_replay) {
            self.budget.overdraft.set(Overdraft::Repaying);
            self.budget.change(0, 0);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
        self.replayed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_has_its_least_whatever_others_hold() {
        let budget = IndexBudget::new(1000);
        let (mut one, mut other) = (Share::new(&budget, 100), Share::new(&budget, 100));
        one.set(900);
        assert_eq!((budget.used(), budget.free()), (800, 200));
        assert!(!one.takes(1), "it has four times what is free");
        assert!(other.takes(300) && !other.takes(301));
        one.set(1100);
        assert_eq!(budget.free(), 0);
        assert!(other.takes(100) && !other.takes(101));
        other.set(50);
        assert!((other.fill() - 0.5).abs() < 1e-9, "of its own");
        drop(one);
        assert_eq!(budget.free(), 1000);
        assert!(other.fill() < 0.02);
    }

    #[test]
    fn share_that_holds_much_is_full_before_one_that_holds_little() {
        let budget = IndexBudget::new(1000);
        let (mut idle, mut busy) = (Share::new(&budget, 0), Share::new(&budget, 0));
        idle.set(700);
        let before = idle.fill();
        busy.set(150);
        assert!(idle.fill() > before && idle.fill() >= 1.0);
        assert!(busy.fill() < 0.3);
        assert!(busy.pressure() > 0.8, "all that hold some give way");
    }

    #[test]
    fn budget_tells_of_changes_that_matter() {
        let budget = IndexBudget::new(1000);
        let mut share = Share::new(&budget, 10);
        share.set(50);
        assert!(!budget.has_changed());
        share.set(200);
        assert!(budget.has_changed() && !budget.has_changed());
        share.set(0);
        assert!(budget.has_changed() && !budget.has_changed());
        budget.set_total(0);
        assert!(budget.has_changed() && !budget.has_changed());
    }

    #[test]
    fn reserve_is_there_once_whatever_shares_hold() {
        let budget = IndexBudget::new(100);
        let mut share = Share::new(&budget, 0);
        share.set(95);
        assert!(budget.take_reserve(10) && !budget.take_reserve(10));
        share.set(90);
        assert!(budget.take_reserve(10) && budget.free() == 0);
        budget.give_reserve(10);
        budget.give_reserve(10);
        assert_eq!(budget.free(), 10);
    }

    #[test]
    fn reserve_that_a_silent_backend_keeps_is_of_the_budget() {
        let budget = IndexBudget::new(100);
        let mut share = Share::new(&budget, 0);
        share.set(20);
        assert!(budget.take_reserve(40) && budget.used() == 20);
        assert!(budget.keep_reserve(40));
        assert_eq!(budget.used(), 60, "there was room");
        share.set(55);
        assert!(budget.take_reserve(40) && !budget.take_reserve(40));
        assert!(budget.keep_reserve(40), "beyond it");
        assert!(budget.is_overdrawn() && budget.used() == 135);
        assert!(budget.take_reserve(40), "others go on");
        assert!(!budget.keep_reserve(40), "one at a time goes beyond it");
        share.set(20);
        assert!(!budget.is_overdrawn() && budget.used() == 100);
        assert!(!budget.keep_reserve(40), "nobody could repay it");
        budget.give_kept_reserve(40);
        budget.give_kept_reserve(40);
        assert_eq!(budget.used(), 20);
        // Of two in use, one is of the budget: that is the one that is kept.
        assert!(budget.take_reserve(40) && budget.used() == 60);
        assert!(budget.keep_reserve(40) && budget.used() == 60);
        budget.give_reserve(40);
        assert_eq!(budget.used(), 60);
        budget.give_kept_reserve(40);
        drop(share);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn what_a_replay_took_too_much_is_repaid_once_there_is_more() {
        let budget = IndexBudget::new(100);
        let (mut one, mut other) = (Share::new(&budget, 0), Share::new(&budget, 0));
        assert!(one.may_replay(150));
        one.set(150);
        one.replayed();
        assert!(budget.is_overdrawn() && !other.may_replay(1));
        budget.set_total(150);
        assert!(!budget.is_overdrawn() && other.may_replay(1));
    }

    #[test]
    fn replay_goes_beyond_the_budget_one_at_a_time() {
        let budget = IndexBudget::new(100);
        let (mut one, mut other) = (Share::new(&budget, 0), Share::new(&budget, 0));
        assert!(one.may_replay(60));
        one.set(60);
        assert!(other.may_replay(40) && !one.takes(41));
        other.set(40);
        assert!(one.may_replay(1000), "the first to need more has it");
        one.set(1060);
        assert!(one.may_replay(1000) && !other.may_replay(1));
        one.set(50);
        assert!(!other.may_replay(11), "the first one goes on");
        one.set(1000);
        one.replayed();
        assert!(!other.may_replay(11), "what it brought is there");
        one.set(60);
        assert!(other.may_replay(11), "now it is the one");
        assert!(!one.may_replay(11));
        drop(other);
        assert!(one.may_replay(11));
    }
}
