//! Operations that wait for their time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hdcs_core::base::io::Nanos;

use crate::Operation;

struct Entry {
    due: Nanos,
    /// Keeps the order of those that are due at once.
    sequence: u64,
    operation: Operation,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.sequence == other.sequence
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.sequence).cmp(&(other.due, other.sequence))
    }
}

/// See the module.
#[derive(Default)]
pub struct Later {
    waiting: BinaryHeap<Reverse<Entry>>,
    sequence: u64,
}

impl Later {
    /// Keep an operation until `due`.
    pub fn push(&mut self, due: Nanos, operation: Operation) {
        self.sequence += 1;
        self.waiting.push(Reverse(Entry {
            due,
            sequence: self.sequence,
            operation,
        }));
    }

    /// One whose time has come.
    pub fn pop(&mut self, now: Nanos) -> Option<Operation> {
        self.due().filter(|&due| due <= now)?;
        self.waiting.pop().map(|Reverse(entry)| entry.operation)
    }

    /// When the next one is due.
    pub fn due(&self) -> Option<Nanos> {
        self.waiting.peek().map(|Reverse(entry)| entry.due)
    }
}

/// The earlier of two times.
pub fn earlier(a: Option<Nanos>, b: Option<Nanos>) -> Option<Nanos> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
