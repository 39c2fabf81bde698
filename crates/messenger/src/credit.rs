//! How much one side may ask of the other, in bytes.
//!
//! Both sides count in all since the connection began, so no message about it can be lost or counted twice: what was
//! *spent*, and what was *granted*. The side that answers grants anew what a request has cost once its answer is on its way:
//! so what it holds for requests and their answers is its window at most, and what waits in the socket.
//!
//! Invariants: `spent <= granted` on both sides; `granted` never goes back.

use crate::error::Violation;

/// What the other side has granted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Credit {
    granted: u64,
    spent: u64,
}

impl Credit {
    /// To begin with.
    pub fn new(granted: u64) -> Self {
        Self { granted, spent: 0 }
    }

    /// Spend so much, if it is there.
    pub fn spend(&mut self, cost: u64) -> bool {
        let is_there = cost <= self.granted - self.spent;
        if is_there {
            self.spent += cost;
        }
        is_there
    }

    /// Take back what was spent on something that was never sent.
    pub fn take_back(&mut self, cost: u64) {
        self.spent -= cost;
    }

    /// The other side has granted so much in all.
    pub fn grant(&mut self, total: u64) -> Result<(), Violation> {
        if total < self.granted {
            return Err(Violation::Granted {
                found: total,
                before: self.granted,
            });
        }
        self.granted = total;
        Ok(())
    }
}

/// What this side has granted.
#[derive(Clone, Copy, Debug)]
pub struct Grants {
    window: u64,
    /// As the other side was told.
    granted: u64,
    asked: u64,
    answered: u64,
}

impl Grants {
    /// What is not answered may cost `window`.
    pub fn new(window: u64) -> Self {
        Self {
            window,
            granted: window,
            asked: 0,
            answered: 0,
        }
    }

    /// A request of this cost has come.
    pub fn ask(&mut self, cost: u64) -> Result<(), Violation> {
        let asked = self.asked.saturating_add(cost);
        if asked > self.granted {
            return Err(Violation::Credit {
                asked,
                granted: self.granted,
            });
        }
        self.asked = asked;
        Ok(())
    }

    /// The answer to a request of this cost is being sent.
    pub fn answer(&mut self, cost: u64) {
        self.answered += cost;
    }

    /// From here on what is not answered may cost `window`. A smaller one comes into force as requests are answered.
    pub fn set_window(&mut self, window: u64) {
        self.window = window;
    }

    /// What is granted in all, to be told now.
    pub fn tell(&mut self) -> u64 {
        self.granted = self.granted.max(self.answered.saturating_add(self.window));
        self.granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_is_never_more_than_the_window() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut credit, mut grants) = (Credit::new(1000), Grants::new(1000));
        let mut open = Vec::new();
        for _ in 0..10_000 {
            let cost = random.u64(1..400);
            if random.bool() && credit.spend(cost) {
                grants.ask(cost).unwrap();
                open.push(cost);
            } else if !open.is_empty() {
                let cost = open.swap_remove(random.usize(..open.len()));
                grants.answer(cost);
                if random.bool() {
                    credit.grant(grants.tell()).unwrap();
                }
            }
            assert!(open.iter().sum::<u64>() <= 1000);
        }
        while let Some(cost) = open.pop() {
            grants.answer(cost);
        }
        credit.grant(grants.tell()).unwrap();
        assert!(credit.spend(1000) && !credit.spend(1));
    }

    #[test]
    fn peer_that_spends_more_or_grants_less_is_noticed() {
        let mut grants = Grants::new(10);
        grants.ask(10).unwrap();
        grants.answer(10);
        // It was not told.
        let (asked, granted) = (11, 10);
        assert_eq!(grants.ask(1), Err(Violation::Credit { asked, granted }));
        assert_eq!(grants.tell(), 20);
        assert_eq!(grants.ask(10), Ok(()));
        assert!(grants.ask(u64::MAX).is_err());
        let mut credit = Credit::new(10);
        let (found, before) = (9, 10);
        assert_eq!(credit.grant(9), Err(Violation::Granted { found, before }));
    }

    #[test]
    fn window_that_shrinks_takes_nothing_back() {
        let mut grants = Grants::new(100);
        grants.ask(60).unwrap();
        grants.set_window(50);
        grants.answer(60);
        assert_eq!(grants.tell(), 110);
        grants.set_window(500);
        assert_eq!(grants.tell(), 560);
    }
}
