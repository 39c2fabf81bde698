//! ARC (FAST 2003): what was used once and what was used again, each with a ghost that moves the
//! border between them.

use super::Policy;
use super::order::Order;

/// See the module.
pub struct Arc {
    size: usize,
    /// How much of the cache is meant for what was used once.
    target: usize,
    once: Order,
    again: Order,
    once_ghost: Order,
    again_ghost: Order,
}

impl Arc {
    pub fn new(size: usize) -> Self {
        Self {
            size,
            target: 0,
            once: Order::default(),
            again: Order::default(),
            once_ghost: Order::default(),
            again_ghost: Order::default(),
        }
    }

    /// REPLACE of the paper.
    fn replace(&mut self, in_again_ghost: bool) {
        let once = self.once.len();
        if once > 0 && (once > self.target || (in_again_ghost && once == self.target)) {
            if let Some(key) = self.once.take_oldest() {
                self.once_ghost.put(key);
            }
        } else if let Some(key) = self.again.take_oldest() {
            self.again_ghost.put(key);
        }
    }
}

impl Policy for Arc {
    fn access(&mut self, key: u64) -> bool {
        if self.once.remove(key) || self.again.contains(key) {
            self.again.put(key);
            return true;
        }
        let (b1, b2) = (self.once_ghost.len(), self.again_ghost.len());
        if self.once_ghost.remove(key) {
            self.target = (self.target + (b2 / b1).max(1)).min(self.size);
            self.replace(false);
            self.again.put(key);
            return false;
        }
        if self.again_ghost.remove(key) {
            self.target = self.target.saturating_sub((b1 / b2).max(1));
            self.replace(true);
            self.again.put(key);
            return false;
        }
        let once = self.once.len() + b1;
        if once == self.size {
            if self.once.len() < self.size {
                self.once_ghost.take_oldest();
                self.replace(false);
            } else {
                self.once.take_oldest();
            }
        } else {
            let all = once + self.again.len() + b2;
            if all >= self.size {
                if all == 2 * self.size {
                    self.again_ghost.take_oldest();
                }
                self.replace(false);
            }
        }
        self.once.put(key);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hits::policy::hits;

    #[test]
    fn arc_keeps_what_was_used_again_through_a_scan() {
        let mut arc = Arc::new(4);
        assert_eq!(hits(&mut arc, &[1, 1, 2, 2]), ".h.h");
        let scan: Vec<u64> = (10..100).collect();
        assert_eq!(hits(&mut arc, &scan), ".".repeat(90));
        assert_eq!(hits(&mut arc, &[1, 2]), "hh");
    }

    #[test]
    fn arc_moves_its_border_by_the_ghosts() {
        let mut arc = Arc::new(2);
        // 1 is used again; 2 goes to the ghost for 3, and comes back: more room for what is new.
        assert_eq!(hits(&mut arc, &[1, 1, 2, 3, 2]), ".h...");
        assert_eq!(arc.target, 1);
        // 1 went for it, and comes back: less room.
        assert_eq!(hits(&mut arc, &[1]), ".");
        assert_eq!(arc.target, 0);
    }
}
