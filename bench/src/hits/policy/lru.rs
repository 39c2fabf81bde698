//! The least recently used goes.

use super::Policy;
use super::order::Order;

/// See the module.
pub struct Lru {
    size: usize,
    order: Order,
}

impl Lru {
    pub fn new(size: usize) -> Self {
        Self {
            size,
            order: Order::default(),
        }
    }
}

impl Policy for Lru {
    fn access(&mut self, key: u64) -> bool {
        let hit = self.order.put(key);
        if self.order.len() > self.size {
            self.order.take_oldest();
        }
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hits::policy::hits;

    #[test]
    fn lru_drops_what_was_used_longest_ago() {
        let mut lru = Lru::new(2);
        assert_eq!(hits(&mut lru, &[1, 2, 1, 3, 1, 2]), "..h.h.");
    }
}
