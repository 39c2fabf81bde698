//! Who may submit how much work in a turn of a shard: so that a turn is short however many clients there are and
//! whatever they ask, and each of them has its part.
//!
//! Work is counted in the units of whoever submits it. All clients together submit no more than [`TURN_WORK`] in a
//! turn, and each no more than an equal part of that, at least [`TURN_WORK_MIN`]. The last request of a part, and the last
//! one of a turn, may be larger than what is left. A client *owes* what it went beyond its part, and pays with the
//! parts of the turns that follow: so one that asks for little at a time gets as much as one that asks for much.
//!
//! When a turn is spent, clients wait for a later one. They are served in the order in which they began to wait, and
//! before what comes in: [`Turns::begin`] opens half of a turn for them; [`Turns::open`] opens the rest for everybody, so
//! that a client that did not wait is not kept waiting by those that do.
//!
//! Invariants:
//! 1. In a turn less than `TURN_WORK` and one request is submitted.
//! 2. Over any number of turns a client submits less than its parts of them and one request.
//!
//! There are no failures.

use crate::base::limits::{TURN_WORK, TURN_WORK_MIN};

/// What a client has submitted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Account {
    /// When it submitted something last, or was looked at,
    turn: u64,
    /// and what counted against its part then.
    work: usize,
}

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turns {
    turn: u64,
    /// What all have submitted in this turn, and how much that may be at present.
    spent: usize,
    limit: usize,
    /// Clients that have submitted something in this turn, or owe something, and in the one before.
    active: usize,
    active_before: usize,
}

impl Turns {
    /// A turn begins, half of which is open.
    pub fn begin(&mut self) {
        self.turn += 1;
        self.spent = 0;
        self.limit = TURN_WORK / 2;
        self.active_before = self.active;
        self.active = 0;
    }

    /// All of the turn is open.
    pub fn open(&mut self) {
        self.limit = TURN_WORK;
    }

    /// Whether nobody may submit anything at present.
    pub fn is_spent(&self) -> bool {
        self.spent >= self.limit
    }

    /// What all have submitted in this turn.
    pub fn spent(&self) -> usize {
        self.spent
    }

    /// The part of each client.
    fn part(&self) -> usize {
        let clients = self.active_before.max(self.active).max(1);
        (TURN_WORK / clients).max(TURN_WORK_MIN)
    }

    /// What counts against a client's part of this turn.
    fn counted(&self, account: &Account) -> usize {
        let turns = usize::try_from(self.turn - account.turn).unwrap_or(usize::MAX);
        account
            .work
            .saturating_sub(turns.saturating_mul(self.part()))
    }

    /// What a client may still submit at present; a request may be larger unless this is 0.
    pub fn left(&self, account: &Account) -> usize {
        let part = self.part().saturating_sub(self.counted(account));
        part.min(self.limit.saturating_sub(self.spent))
    }

    /// A client was asked, and has submitted so much.
    pub fn note(&mut self, account: &mut Account, work: usize) {
        let is_counted = account.turn == self.turn && account.work > 0;
        account.work = self.counted(account) + work;
        account.turn = self.turn;
        self.spent += work;
        if account.work > 0 && !is_counted {
            self.active += 1;
        }
    }
}
