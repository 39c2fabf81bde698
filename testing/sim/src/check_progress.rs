//! Checker: every request is answered exactly once, and everything comes to an end.
//!
//! 1. A reply names a request that is waiting; so none is answered twice.
//! 2. When nothing can happen any more, nothing waits; so none is forgotten.
//! 3. With devices and backend working, what waits ends within a bound of virtual time.

use std::collections::BTreeMap;

use hdcs_core::base::io::{Nanos, RequestId};

use crate::violation::Violation;

/// The requests that wait, each with what its sender remembers.
#[derive(Debug)]
pub struct Requests<T> {
    waiting: BTreeMap<u64, (Nanos, T)>,
    next: u64,
}

impl<T> Default for Requests<T> {
    fn default() -> Self {
        Self {
            waiting: BTreeMap::new(),
            next: 0,
        }
    }
}

impl<T> Requests<T> {
    /// A request is sent.
    pub fn sent(&mut self, now: Nanos, what: T) -> RequestId {
        self.next += 1;
        self.waiting.insert(self.next, (now, what));
        RequestId(self.next)
    }

    /// It is answered; returns since when it waited.
    pub fn answered(&mut self, id: RequestId) -> Result<(Nanos, T), Violation> {
        match self.waiting.remove(&id.0) {
            Some(waiting) => Ok(waiting),
            None => Err(Violation::new(
                "reply-unexpected",
                format!("request {} was answered twice or never sent", id.0),
            )),
        }
    }

    /// The one that was sent last.
    pub fn last(&self) -> RequestId {
        RequestId(self.next)
    }

    /// When the newest of those that wait was sent.
    pub fn newest(&self) -> Option<Nanos> {
        self.waiting.values().next_back().map(|(since, _)| *since)
    }

    /// What the sender of one that waits remembers.
    pub fn get(&self, id: RequestId) -> Option<&T> {
        self.waiting.get(&id.0).map(|(_, what)| what)
    }

    /// The first one sent of those that are such.
    pub fn first(&self, is: impl Fn(&T) -> bool) -> Option<RequestId> {
        let mut waiting = self.waiting.iter();
        let first = waiting.find(|(_, (_, what))| is(what));
        first.map(|(&id, _)| RequestId(id))
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether one of them is such.
    pub fn any(&self, is: impl Fn(&T) -> bool) -> bool {
        self.waiting.values().any(|(_, what)| is(what))
    }

    /// The one that has waited longest, and since when.
    pub fn oldest(&self) -> Option<(Nanos, &T)> {
        let oldest = self.waiting.values().min_by_key(|(since, _)| *since)?;
        Some((oldest.0, &oldest.1))
    }

    /// Everybody who waits is gone; returns what they remember, in the order of sending.
    pub fn forget_all(&mut self) -> Vec<T> {
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_values().map(|(_, what)| what).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_answered_twice_or_never_are_caught() {
        let mut requests = Requests::default();
        let first = requests.sent(Nanos(1), 'a');
        let second = requests.sent(Nanos(2), 'b');
        assert_eq!(requests.answered(first), Ok((Nanos(1), 'a')));
        assert_eq!(
            requests.answered(first).unwrap_err().rule,
            "reply-unexpected"
        );
        assert_eq!(requests.oldest(), Some((Nanos(2), &'b')));
        assert_eq!(requests.answered(second), Ok((Nanos(2), 'b')));
        assert!(requests.is_empty());
    }
}
