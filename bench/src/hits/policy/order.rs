//! Keys in the order in which they were put last: what the lists of a policy are made of.

use std::collections::BTreeMap;

use super::Map;

/// See the module.
#[derive(Default)]
pub struct Order {
    time: u64,
    by_key: Map<u64>,
    by_time: BTreeMap<u64, u64>,
}

impl Order {
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    pub fn contains(&self, key: u64) -> bool {
        self.by_key.contains_key(&key)
    }

    /// Make `key` the newest; whether it was there.
    pub fn put(&mut self, key: u64) -> bool {
        self.time += 1;
        let before = self.by_key.insert(key, self.time);
        if let Some(before) = before {
            self.by_time.remove(&before);
        }
        self.by_time.insert(self.time, key);
        before.is_some()
    }

    pub fn remove(&mut self, key: u64) -> bool {
        let before = self.by_key.remove(&key);
        before.is_some_and(|before| self.by_time.remove(&before).is_some())
    }

    pub fn oldest(&self) -> Option<u64> {
        self.by_time.first_key_value().map(|(_, &key)| key)
    }

    pub fn take_oldest(&mut self) -> Option<u64> {
        let (_, key) = self.by_time.pop_first()?;
        self.by_key.remove(&key);
        Some(key)
    }
}
