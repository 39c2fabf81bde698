//! SIEVE (NSDI 2024): a queue with one visited bit and a hand that moves from old to new.

use super::{Map, Policy};

/// See the module.
pub struct Sieve {
    size: usize,
    nodes: Vec<(u64, bool, usize, usize)>,
    free: Vec<usize>,
    places: Map<usize>,
    newest: usize,
    oldest: usize,
    hand: usize,
}

const NONE: usize = usize::MAX;

impl Sieve {
    pub fn new(size: usize) -> Self {
        Self {
            size,
            nodes: Vec::new(),
            free: Vec::new(),
            places: Map::default(),
            newest: NONE,
            oldest: NONE,
            hand: NONE,
        }
    }
}

impl Policy for Sieve {
    fn access(&mut self, key: u64) -> bool {
        if let Some(&place) = self.places.get(&key) {
            self.nodes[place].1 = true;
            return true;
        }
        if self.places.len() == self.size {
            let mut at = if self.hand == NONE {
                self.oldest
            } else {
                self.hand
            };
            while self.nodes[at].1 {
                self.nodes[at].1 = false;
                at = if self.nodes[at].2 == NONE {
                    self.oldest
                } else {
                    self.nodes[at].2
                };
            }
            let (old, _, newer, older) = self.nodes[at];
            self.hand = newer;
            match newer {
                NONE => self.newest = older,
                _ => self.nodes[newer].3 = older,
            }
            match older {
                NONE => self.oldest = newer,
                _ => self.nodes[older].2 = newer,
            }
            self.places.remove(&old);
            self.free.push(at);
        }
        let node = (key, false, NONE, self.newest);
        let at = if let Some(at) = self.free.pop() {
            self.nodes[at] = node;
            at
        } else {
            self.nodes.push(node);
            self.nodes.len() - 1
        };
        match self.newest {
            NONE => self.oldest = at,
            newest => self.nodes[newest].2 = at,
        }
        self.newest = at;
        self.places.insert(key, at);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hits::policy::hits;

    #[test]
    fn sieve_keeps_its_place_between_evictions() {
        let mut sieve = Sieve::new(3);
        // The hand passes 1, which was used, takes 2, and goes on at 3, not at 1 again.
        assert_eq!(hits(&mut sieve, &[1, 2, 3, 1, 4, 5, 1, 4, 5]), "...h..hhh");
    }
}
