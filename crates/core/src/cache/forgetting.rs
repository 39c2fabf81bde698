//! What a tier has to forget and has not come to yet.
//!
//! A range of any length is forgotten at once as far as anybody can see: from then on nothing of it is found,
//! and nothing of it is taken. What is there of it gives its place back while the tier walks over all of its
//! places, a bounded part in each step. So the cost of a step does not depend on the length of a range, and
//! any number of ranges cost one walk.
//!
//! Invariants:
//! 1. Ranges are in order and apart, and at most [`CACHE_FORGETTING_RANGES_MAX`] in each list. Beyond it, the
//!    gap between two goes too: the cache may lose anything.
//! 2. A range that comes while a walk is under way waits for the next one, since a part of the places is passed.

use alloc::vec::Vec;

use crate::base::limits::CACHE_FORGETTING_RANGES_MAX;
use crate::base::work::Work;

/// First key and end of each range: in order, apart.
#[derive(Debug, Default)]
struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    fn overlaps(&self, first: u64, end: u64) -> bool {
        let behind = self.0.partition_point(|&(start, _)| start < end);
        behind > 0 && self.0[behind - 1].1 > first
    }

    fn covers(&self, first: u64, end: u64) -> bool {
        let behind = self.0.partition_point(|&(start, _)| start <= first);
        behind > 0 && self.0[behind - 1].1 >= end
    }

    /// Returns the range that two of them became, if what lies between them goes with them.
    fn add(&mut self, first: u64, end: u64) -> Option<(u64, u64)> {
        let from = self.0.partition_point(|&(_, stop)| stop < first);
        let to = self.0.partition_point(|&(start, _)| start <= end);
        if from < to {
            let joined = (first.min(self.0[from].0), end.max(self.0[to - 1].1));
            self.0.splice(from..to, [joined]);
            return None;
        }
        self.0.insert(from, (first, end));
        if self.0.len() <= CACHE_FORGETTING_RANGES_MAX {
            return None;
        }
        let gap = |index: usize| self.0[index + 1].0 - self.0[index].1;
        let before = from.checked_sub(1);
        let after = Some(from).filter(|&index| index + 1 < self.0.len());
        let narrowest = before.into_iter().chain(after).min_by_key(|&at| gap(at));
        let at = narrowest.expect("there is another range");
        self.0[at].1 = self.0[at + 1].1;
        self.0.remove(at + 1);
        Some(self.0[at])
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Forgetting {
    /// The walk under way is about these.
    present: Ranges,
    /// The next one is.
    waiting: Ranges,
    /// The place at which the walk goes on.
    at: usize,
    work: Work,
}

impl Forgetting {
    /// Whether there is nothing to forget.
    pub fn is_empty(&self) -> bool {
        self.present.0.is_empty()
    }

    /// Whether a key is to be forgotten.
    pub fn covers(&self, key: u64) -> bool {
        !self.is_empty() && self.overlaps(key, key + 1)
    }

    /// Whether a part of a range is to be forgotten.
    pub fn overlaps(&self, first: u64, end: u64) -> bool {
        !self.is_empty() && (self.present.overlaps(first, end) || self.waiting.overlaps(first, end))
    }

    /// Forget a range, too. Returns what is forgotten instead if that is more: it is as if that had been asked for.
    pub fn add(&mut self, first: u64, end: u64) -> Option<(u64, u64)> {
        if self.at == 0 {
            self.present.add(first, end)
        } else if self.waiting.covers(first, end) {
            None
        } else {
            self.waiting.add(first, end)
        }
    }

    /// The next places of a tier with so many that a walk passes in this step.
    pub fn next(&mut self, places: usize, places_max: usize) -> core::ops::Range<usize> {
        let from = self.at.min(places);
        let to = places.min(from.saturating_add(places_max));
        self.at = to;
        self.work.add((to - from) as u64);
        from..to
    }

    /// Places that were passed so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.work.units()
    }

    /// Whether a walk over so many places is at its end; then what came meanwhile is next.
    pub fn end_walk(&mut self, places: usize) {
        if self.at >= places {
            self.present = core::mem::take(&mut self.waiting);
            self.at = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn forgetting_agrees_with_an_array() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..200 {
            let (mut ranges, mut model) = (Ranges::default(), vec![false; 400]);
            for _ in 0..30 {
                let first = random.usize(..399);
                let end = random.usize(first + 1..=400.min(first + 30));
                assert_eq!(ranges.add(first as u64, end as u64), None);
                model[first..end].fill(true);
                assert!(ranges.0.windows(2).all(|pair| pair[0].1 < pair[1].0));
                for _ in 0..20 {
                    let first = random.usize(..399);
                    let end = random.usize(first + 1..=400);
                    let (from, to) = (first as u64, end as u64);
                    let held = &model[first..end];
                    assert_eq!(ranges.overlaps(from, to), held.contains(&true));
                    assert_eq!(ranges.covers(from, to), !held.contains(&false));
                }
            }
        }
    }

    #[test]
    fn forgetting_is_bounded_and_then_forgets_more() {
        let mut forgetting = Forgetting::default();
        for index in 0..2 * CACHE_FORGETTING_RANGES_MAX as u64 {
            let more = forgetting.add(index * 10, index * 10 + 5);
            assert_eq!(more.is_some(), index >= CACHE_FORGETTING_RANGES_MAX as u64);
            // All of it is told, so that it can be recorded.
            if let Some((first, end)) = more {
                assert!((first..end).contains(&(index * 10)) && end - first > 5);
            }
            assert!(forgetting.covers(index * 10) && !forgetting.covers(index * 10 + 5));
        }
        assert_eq!(forgetting.present.0.len(), CACHE_FORGETTING_RANGES_MAX);
    }

    #[test]
    fn forgetting_walks_once_more_for_what_comes_during_a_walk() {
        let mut forgetting = Forgetting::default();
        forgetting.add(0, 10);
        assert_eq!(forgetting.next(100, 60), 0..60);
        forgetting.end_walk(100);
        forgetting.add(20, 30);
        assert!(forgetting.covers(5) && forgetting.covers(25));
        assert_eq!(forgetting.next(100, 60), 60..100);
        forgetting.end_walk(100);
        assert!(!forgetting.covers(5) && forgetting.covers(25));
        assert_eq!(forgetting.next(100, 100), 0..100);
        forgetting.end_walk(100);
        assert!(forgetting.is_empty());
    }
}
