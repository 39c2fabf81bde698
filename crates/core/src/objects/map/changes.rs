//! What has changed since the pages of the map were stored: ranges of blocks and where they are now, or that
//! they are nowhere.
//!
//! Invariants: ranges ascend, are not empty, and do not overlap.

use alloc::collections::BTreeMap;

use super::Place;

/// Blocks from the one under which it is kept on.
#[derive(Clone, Copy, Debug)]
struct Change {
    count: u32,
    /// The place of the first one in halves, since a `u64` would cost four bytes of padding; zero: nowhere.
    halves: [u32; 2],
}

/// Memory of a change, about: 20 bytes in a tree whose nodes are two thirds full.
const CHANGE_BYTES: usize = 32;

impl Change {
    const fn new(count: u32, place: Option<Place>) -> Self {
        let place = match place {
            Some(place) => place.0,
            None => 0,
        };
        Self {
            count,
            halves: [place as u32, (place >> 32) as u32],
        }
    }

    fn place(self) -> Option<Place> {
        let place = u64::from(self.halves[0]) | u64::from(self.halves[1]) << 32;
        (place != 0).then_some(Place(place))
    }

    /// What is left of it from its block `from` on up to its block `to`.
    fn part(self, from: u64, to: u64) -> Self {
        let place = self.place().map(|place| place.plus(from as u32));
        Self::new((to - from) as u32, place)
    }
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    changes: BTreeMap<u64, Change>,
}

impl Changes {
    /// Let `count` blocks from `block` be at `place` on, or nowhere.
    pub fn set(&mut self, block: u64, count: u64, place: Option<Place>) {
        let end = block + count;
        if let Some((&first, before)) = self.changes.range_mut(..block).next_back() {
            let before_end = first + u64::from(before.count);
            if before_end > block {
                let whole = *before;
                *before = whole.part(0, block - first);
                if before_end > end {
                    let rest = whole.part(end - first, before_end - first);
                    self.changes.insert(end, rest);
                }
            }
        }
        while let Some((&first, &change)) = self.changes.range(block..end).next() {
            self.changes.remove(&first);
            let change_end = first + u64::from(change.count);
            if change_end > end {
                let rest = change.part(end - first, change_end - first);
                self.changes.insert(end, rest);
            }
        }
        let mut at = block;
        while at < end {
            // Only what is nowhere can be so long: an object has few slots.
            let count = (end - at).min(u64::from(u32::MAX));
            self.changes.insert(at, Change::new(count as u32, place));
            at += count;
        }
    }

    /// What has become of `block`, if it has changed, and of how many blocks from it on, at most `limit`, the same
    /// is true: they are at consecutive places, or nowhere, or have not changed.
    pub fn find(&self, block: u64, limit: u64) -> (Option<Option<Place>>, u64) {
        if let Some((&first, change)) = self.changes.range(..=block).next_back()
            && block - first < u64::from(change.count)
        {
            let part = change.part(block - first, u64::from(change.count));
            return (Some(part.place()), u64::from(part.count).min(limit));
        }
        let next = self.changes.range(block..).next();
        let gap = next.map_or(limit, |(&next, _)| next - block);
        (None, gap.min(limit))
    }

    /// Changes of `block..end`, in order, cut to it: first block, number of blocks, place.
    pub fn range(
        &self,
        block: u64,
        end: u64,
    ) -> impl Iterator<Item = (u64, u64, Option<Place>)> + '_ {
        let before = self.changes.range(..block).next_back();
        let rest = self.changes.range(block..end.max(block));
        let all = before.into_iter().chain(rest);
        all.filter_map(move |(&first, change)| {
            let to = (first + u64::from(change.count)).min(end);
            let from = first.max(block);
            (from < to).then(|| {
                let part = change.part(from - first, to - first);
                (from, to - from, part.place())
            })
        })
    }

    /// The first block from `block` on that has changed.
    pub fn next(&self, block: u64) -> Option<u64> {
        self.range(block, u64::MAX).next().map(|(first, ..)| first)
    }

    /// How many blocks from `block` on, at most `count`, are covered by `most` changes or fewer, and how many changes begin
    /// in them.
    pub fn covered(&self, block: u64, count: u64, most: usize) -> (u64, usize) {
        let mut changes = self.changes.range(block..block + count);
        let covered = changes.by_ref().take(most).count();
        let next = changes.next();
        (next.map_or(count, |(&first, _)| first - block), covered)
    }

    /// Forget up to so many changes, the first ones.
    pub fn forget_some(&mut self, most: usize) {
        for _ in 0..most {
            if self.changes.pop_first().is_none() {
                return;
            }
        }
    }

    /// Forget what has changed from `block` on.
    pub fn truncate(&mut self, block: u64) {
        self.set(block, 1, None);
        drop(self.changes.split_off(&block));
    }

    /// Number of changes.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The change with this index, in the order of blocks. Costs the index.
    pub fn nth(&self, index: usize) -> Option<u64> {
        self.changes.keys().nth(index).copied()
    }

    /// Approximate memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.changes.len() * CHANGE_BYTES
    }

    /// Stop at what cannot be.
    pub fn check_invariants(&self) {
        let mut end = 0;
        for (&first, change) in &self.changes {
            assert!(
                first >= end && change.count > 0,
                "changes do not overlap: {first}"
            );
            end = first + u64::from(change.count);
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn changes_agree_with_an_array() {
        let mut random = fastrand::Rng::with_seed(9);
        let blocks = 500;
        for round in 0..4 {
            let mut changes = Changes::default();
            let mut model: Vec<Option<Option<Place>>> = vec![None; blocks];
            for number in 1..400u64 {
                let longest = if round % 2 == 0 { 8 } else { 200 };
                let first = random.usize(0..blocks);
                let count = random.usize(1..=longest).min(blocks - first);
                let place = (random.u8(0..4) > 0).then(|| Place::new(number, random.u32(0..1000)));
                changes.set(first as u64, count as u64, place);
                for (index, slot) in model[first..first + count].iter_mut().enumerate() {
                    *slot = Some(place.map(|place| place.plus(index as u32)));
                }
                changes.check_invariants();
                let at = random.usize(0..blocks);
                let (found, count) = changes.find(at as u64, 50);
                assert_eq!(found, model[at]);
                for index in 0..count as usize {
                    let expected = model.get(at + index).copied().flatten();
                    let here = found.map(|found| found.map(|place| place.plus(index as u32)));
                    assert_eq!(here, expected);
                }
                let end = random.usize(at..=blocks);
                let mut seen = vec![None; blocks];
                for (block, count, place) in changes.range(at as u64, end as u64) {
                    for index in 0..count {
                        let place = place.map(|place| place.plus(index as u32));
                        seen[(block + index) as usize] = Some(place);
                    }
                }
                assert_eq!(seen[at..end], model[at..end]);
                assert!(seen[..at].iter().all(Option::is_none));
                let (covered, most) = changes.covered(at as u64, (end - at) as u64, 3);
                let begin = changes.range(at as u64, at as u64 + covered);
                let begin = begin.filter(|&(first, ..)| {
                    first > at as u64 || at == 0 || changes.changes.contains_key(&first)
                });
                assert_eq!(begin.count(), most);
                assert!(most <= 3 && (most == 3 || covered == (end - at) as u64));
                let next = (at..blocks).find(|&block| model[block].is_some());
                assert_eq!(changes.next(at as u64), next.map(|block| block as u64));
            }
            let mut fewer = changes.clone();
            fewer.forget_some(2);
            assert_eq!(fewer.len(), changes.len() - 2);
            assert!(fewer.next(0) > changes.next(0));
            changes.truncate(250);
            assert_eq!(changes.next(250), None);
            assert_eq!(
                changes
                    .range(0, 250)
                    .map(|(_, count, _)| count)
                    .sum::<u64>(),
                model[..250].iter().flatten().count() as u64
            );
        }
    }

    #[test]
    fn changes_take_ranges_of_any_length() {
        let mut changes = Changes::default();
        let all = 1 << 32;
        changes.set(0, all, None);
        assert!(changes.len() <= 2);
        changes.set(7, 1, Some(Place::new(1, 0)));
        assert_eq!(changes.find(6, 9), (Some(None), 1));
        assert_eq!(changes.find(7, 9), (Some(Some(Place::new(1, 0))), 1));
        assert_eq!(changes.find(all - 1, 9), (Some(None), 1));
        assert_eq!(changes.find(all, 9), (None, 9));
        changes.check_invariants();
    }
}
