//! Places for connections: so many on each listener, and none of them for another one's clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why a client is refused for which there is none.
pub const NO_PLACE: &str = "too many connections: raise nbd_connections_max if they are needed";

/// The places of one listener.
#[derive(Debug)]
pub struct Places {
    max: usize,
    taken: AtomicUsize,
}

/// One of them, given back when it is dropped.
#[derive(Debug)]
pub struct Place(Arc<Places>);

impl Places {
    /// So many, all free.
    pub fn new(max: usize) -> Arc<Self> {
        let taken = AtomicUsize::new(0);
        Arc::new(Self { max, taken })
    }

    /// How many there are.
    pub fn max(&self) -> usize {
        self.max
    }

    /// A place, if one is free.
    pub fn take(self: &Arc<Self>) -> Option<Place> {
        let order = Ordering::Relaxed;
        let free = |taken| (taken < self.max).then_some(taken + 1);
        let taken = self.taken.fetch_update(order, order, free);
        taken.is_ok().then(|| Place(Arc::clone(self)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_as_many_as_there_are() {
        let places = Places::new(2);
        let first = places.take().unwrap();
        let _second = places.take().unwrap();
        assert!(places.take().is_none());
        drop(first);
        assert!(places.take().is_some());
    }
}
