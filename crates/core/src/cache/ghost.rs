//! What was evicted a short while ago, by 15-bit fingerprint, and from which ring.
//!
//! A set-associative FIFO: a fingerprint enters at the front of its set and pushes the oldest out.
//! A false positive (about 1 in 1,000) promotes a block needlessly, which costs nothing but room.

use alloc::vec;
use alloc::vec::Vec;

const WAYS: usize = 32;
/// Set in what was evicted from the main ring.
const FROM_MAIN: u16 = 1 << 15;

/// The ring that a block was evicted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// For what is new.
    Small,
    /// For what was used again.
    Main,
}

/// One cache line of fingerprints, newest first; 0 is none.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Set([u16; WAYS]);

/// See the module.
#[derive(Debug)]
pub struct Ghost {
    sets: Vec<Set>,
}

impl Ghost {
    /// Room for about `entries` fingerprints.
    pub fn new(entries: usize) -> Self {
        Self {
            sets: vec![Set([0; WAYS]); entries / WAYS + usize::from(entries < WAYS)],
        }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.sets.len() * size_of::<Set>()
    }

    fn place(&self, hash: u64) -> (usize, u16) {
        let set = ((u128::from(hash) * self.sets.len() as u128) >> 64) as usize;
        (set, (hash as u16 & !FROM_MAIN).max(1))
    }

    /// Remember what has this hash.
    pub fn insert(&mut self, hash: u64, ring: Ring) {
        let (set, fingerprint) = self.place(hash);
        let ways = &mut self.sets[set].0;
        ways.copy_within(..WAYS - 1, 1);
        ways[0] = match ring {
            Ring::Small => fingerprint,
            Ring::Main => fingerprint | FROM_MAIN,
        };
    }

    /// Forget what has this hash; where it was evicted from, if it was remembered.
    pub fn remove(&mut self, hash: u64) -> Option<Ring> {
        let (set, fingerprint) = self.place(hash);
        let ways = &mut self.sets[set].0;
        let way = ways
            .iter()
            .position(|&way| way & !FROM_MAIN == fingerprint)?;
        let ring = if ways[way] & FROM_MAIN == 0 {
            Ring::Small
        } else {
            Ring::Main
        };
        ways.copy_within(way + 1.., way);
        ways[WAYS - 1] = 0;
        Some(ring)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::table::mix;

    #[test]
    fn ghost_remembers_the_recent_and_forgets_the_old() {
        let mut ghost = Ghost::new(1024);
        let ring = |key: u64| {
            if key.is_multiple_of(3) {
                Ring::Main
            } else {
                Ring::Small
            }
        };
        (0..10_000).for_each(|key| ghost.insert(mix(key), ring(key)));
        let recent = (9_700..10_000)
            .filter(|&key| ghost.remove(mix(key)) == Some(ring(key)))
            .count();
        assert!(recent >= 290, "{recent} of the last 300");
        let again = (9_700..10_000)
            .filter(|&key| ghost.remove(mix(key)).is_some())
            .count();
        assert!(again <= 6, "{again} of them twice");
        let old = (0..5_000)
            .filter(|&key| ghost.remove(mix(key)).is_some())
            .count();
        assert!(old <= 20, "{old} of the first 5000");
    }
}
