//! Objects that nobody needs any more, until they are removed: a few at a time, since it is never urgent. A removal that
//! failed is repeated; one that a crash interrupts is found by the next opening ([`super::scan`]).

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::io::{Action, Name, StoreError, Stored};
use super::port::{Port, Purpose};

/// Deletes under way at most: they are never urgent.
const IN_FLIGHT_MAX: usize = 4;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Deletions {
    /// Names to remove.
    queue: VecDeque<Name>,
    /// How many are being removed.
    in_flight: usize,
}

impl Deletions {
    pub(super) fn push(&mut self, name: Name) {
        self.queue.push_back(name);
    }

    /// Remove some.
    pub(super) fn pump(&mut self, port: &mut Port, actions: &mut Vec<Action>) {
        while self.in_flight < IN_FLIGHT_MAX
            && port.may_try()
            && let Some(name) = self.queue.pop_front()
        {
            self.in_flight += 1;
            port.stats.deletes += 1;
            let token = port.issue(Purpose::Delete(name));
            actions.push(Action::Delete { token, name });
        }
    }

    pub(super) fn ended(
        &mut self,
        name: Name,
        result: Result<Stored, StoreError>,
        port: &mut Port,
    ) {
        self.in_flight -= 1;
        if let Err(StoreError::Io(_)) = result {
            self.queue.push_back(name);
            port.back_off();
        }
    }

    /// Nothing more is removed.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }
}
