//! CLOCK: a ring with a count of up to three uses per place.

use super::{Map, Policy};

/// See the module.
pub struct Clock {
    size: usize,
    places: Map<usize>,
    ring: Vec<(u64, u8)>,
    hand: usize,
}

impl Clock {
    pub fn new(size: usize) -> Self {
        Self {
            size,
            places: Map::default(),
            ring: Vec::new(),
            hand: 0,
        }
    }
}

impl Policy for Clock {
    fn access(&mut self, key: u64) -> bool {
        if let Some(&place) = self.places.get(&key) {
            self.ring[place].1 = (self.ring[place].1 + 1).min(3);
            return true;
        }
        if self.ring.len() < self.size {
            self.places.insert(key, self.ring.len());
            self.ring.push((key, 0));
            return false;
        }
        while self.ring[self.hand].1 > 0 {
            self.ring[self.hand].1 -= 1;
            self.hand = (self.hand + 1) % self.size;
        }
        self.places.remove(&self.ring[self.hand].0);
        self.ring[self.hand] = (key, 0);
        self.places.insert(key, self.hand);
        self.hand = (self.hand + 1) % self.size;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hits::policy::hits;

    #[test]
    fn clock_passes_over_what_was_used() {
        let mut clock = Clock::new(3);
        // 1 was used: the hand takes 2 for 4, and 3 for 5.
        assert_eq!(
            hits(&mut clock, &[1, 2, 3, 1, 4, 5, 1, 4, 5, 2]),
            "...h..hhh."
        );
    }
}
