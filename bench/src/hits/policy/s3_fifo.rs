//! S3-FIFO as published (SOSP 2023): queues, and a ghost of exact keys as long as the main queue.

use std::collections::VecDeque;

use super::order::Order;
use super::{Map, Policy};

/// See the module.
pub struct S3Fifo {
    size: usize,
    uses: Map<u8>,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    ghost: Order,
}

impl S3Fifo {
    pub fn new(size: usize) -> Self {
        Self {
            size,
            uses: Map::default(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: Order::default(),
        }
    }

    fn evict(&mut self) {
        if self.small.len() > self.size / 10 || self.main.is_empty() {
            while let Some(key) = self.small.pop_front() {
                if self.uses[&key] > 1 {
                    self.main.push_back(key);
                    continue;
                }
                self.uses.remove(&key);
                self.ghost.put(key);
                if self.ghost.len() > self.size * 9 / 10 {
                    self.ghost.take_oldest();
                }
                return;
            }
        }
        while let Some(key) = self.main.pop_front() {
            let uses = self.uses.get_mut(&key).expect("what is queued is counted");
            if *uses == 0 {
                self.uses.remove(&key);
                return;
            }
            *uses -= 1;
            self.main.push_back(key);
        }
    }
}

impl Policy for S3Fifo {
    fn access(&mut self, key: u64) -> bool {
        if let Some(uses) = self.uses.get_mut(&key) {
            *uses = (*uses + 1).min(3);
            return true;
        }
        while self.uses.len() >= self.size {
            self.evict();
        }
        self.uses.insert(key, 0);
        if self.ghost.remove(key) {
            self.main.push_back(key);
        } else {
            self.small.push_back(key);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hits::policy::hits;

    #[test]
    fn s3_fifo_promotes_after_two_uses_and_from_the_ghost() {
        let mut cache = S3Fifo::new(10);
        // 1 is used twice more: it goes to main. The others pass through small once.
        assert_eq!(hits(&mut cache, &[1, 1, 1]), ".hh");
        let others: Vec<u64> = (2..=30).collect();
        assert_eq!(hits(&mut cache, &others), ".".repeat(29));
        assert!(cache.access(1) && cache.main.contains(&1));
        // The ghost remembers 9 of those that went.
        assert_eq!(cache.ghost.len(), 9);
        assert!(!cache.access(20) && cache.main.contains(&20));
        assert!(!cache.access(3) && cache.small.contains(&3));
    }
}
