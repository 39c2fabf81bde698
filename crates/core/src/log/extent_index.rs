//! Which write of the log holds which sectors: an ordered map of runs that do not overlap.
//!
//! A write that covers many runs does not take them out at once: it is *long*, and lies over them until
//! [`ExtentIndex::settle`] has been through, a bounded part at a time. So no step depends on what lies below a
//! range.
//!
//! Invariants:
//! 1. Runs are not empty and do not overlap. Inserting a run replaces what it covers, so a sector always
//!    names the last write that was inserted for it.
//! 2. Long ones do not overlap each other. Below one, what is older is void, and what is newer holds; where it
//!    has settled it is made of runs, and no longer long.
//! 3. There are at most [`INDEX_LONG_MAX`] long ones, and two more for the rest of those that a newer one covers.

use alloc::collections::BTreeMap;
use alloc::collections::btree_map::Entry;
use alloc::vec::Vec;

use crate::base::io::SectorRange;
use crate::base::limits::{INDEX_LONG_MAX, INDEX_RUNS_AT_ONCE_MAX};
use crate::base::work::Work;

/// Number of a write in its log, in order of acceptance.
pub type Sequence = u64;

#[derive(Clone, Copy, Debug)]
struct Run {
    count: u64,
    sequence: Sequence,
}

/// Memory of a run, about, if they came in order, which leaves nodes of a B-tree half full.
const RUN_BYTES: usize = size_of::<(u64, Run)>() * 9 / 4;

/// Runs of sectors, each with the sequence number of the write that holds it.
#[derive(Debug, Default)]
pub struct ExtentIndex {
    runs: BTreeMap<u64, Run>,
    /// In the order of the volume.
    long: Vec<(SectorRange, Sequence)>,
    work: Work,
}

impl ExtentIndex {
    /// Let `range` name `sequence`, whatever it named before.
    pub fn insert(&mut self, range: SectorRange, sequence: Sequence) {
        debug_assert!(!range.is_empty());
        self.work.add(1);
        if let Some(run) = self.runs.get_mut(&range.start)
            && run.count == range.count
        {
            // The common case of a hot block: one descent of the tree instead of four.
            run.sequence = sequence;
            return;
        }
        self.remove_if(range, |_| true);
        self.insert_run(range, sequence);
    }

    fn insert_run(&mut self, range: SectorRange, sequence: Sequence) {
        let run = Run {
            count: range.count,
            sequence,
        };
        self.runs.insert(range.start, run);
    }

    /// The same for a range of any length, newer than all before or a part of the newest, in bounded time.
    pub fn insert_long(&mut self, range: SectorRange, sequence: Sequence) {
        if self.prefix(range, INDEX_RUNS_AT_ONCE_MAX) == range {
            self.work.add(1);
            self.remove_if(range, |_| true);
            return self.extend(range, sequence);
        }
        self.cut_long(range);
        let at = self
            .long
            .partition_point(|(other, _)| other.start < range.start);
        self.long.insert(at, (range, sequence));
    }

    /// Whether another long range may be inserted.
    pub fn takes_long(&self) -> bool {
        self.long.len() < INDEX_LONG_MAX
    }

    /// Whether every long range has settled.
    pub fn is_settled(&self) -> bool {
        self.long.is_empty()
    }

    /// Take so many runs out, or pass them by, that lie below long ones.
    pub fn settle(&mut self, runs_max: usize) {
        let mut left = runs_max;
        while left > 0
            && let Some(&(range, sequence)) = self.long.first()
        {
            let piece = self.prefix(range, left);
            self.work.add(1);
            left = left.saturating_sub(1 + self.runs.range(piece.start..piece.end()).count());
            self.remove_if(piece, |other| other < sequence);
            let mut at = piece.start;
            while at < piece.end() {
                let next = self.runs.range(self.start_over(at)..piece.end()).next();
                let (to, end) = next.map_or((piece.end(), piece.end()), |(&start, run)| {
                    (start.max(at), start + run.count)
                });
                if to > at {
                    self.extend(SectorRange::between(at, to), sequence);
                }
                at = end.max(to);
            }
            let rest = SectorRange::between(piece.end(), range.end());
            if rest.is_empty() {
                self.long.remove(0);
            } else {
                self.long[0].0 = rest;
            }
        }
    }

    /// Insert where nothing is, as a part of the run before if that names the same.
    fn extend(&mut self, range: SectorRange, sequence: Sequence) {
        if let Some((&start, run)) = self.runs.range_mut(..range.start).next_back()
            && run.sequence == sequence
            && start + run.count == range.start
        {
            run.count += range.count;
            return;
        }
        self.insert_run(range, sequence);
    }

    /// The first part of `range` that overlaps so many runs at most.
    pub fn prefix(&self, range: SectorRange, runs_max: usize) -> SectorRange {
        let mut runs = self.runs.range(self.first_start(range)..range.end());
        // The first run may begin before the range; the end of the prefix lies behind it in any case.
        match runs.nth(runs_max.max(1)) {
            Some((&start, _)) => {
                self.work.add(runs_max as u64);
                SectorRange::between(range.start, start)
            }
            None => range,
        }
    }

    /// Long ones no longer cover any of `range`.
    fn cut_long(&mut self, range: SectorRange) {
        if !self.long.iter().any(|(long, _)| long.overlaps(range)) {
            return;
        }
        let cut = |&(long, sequence): &(SectorRange, Sequence)| {
            let before = SectorRange::between(long.start, long.end().min(range.start));
            let after = SectorRange::between(long.start.max(range.end()), long.end());
            [(before, sequence), (after, sequence)]
        };
        let parts = self.long.iter().flat_map(cut);
        self.long = parts.filter(|(part, _)| !part.is_empty()).collect();
    }

    /// Forget the parts of `range` that name a write before `limit`.
    pub fn remove_before(&mut self, range: SectorRange, limit: Sequence) {
        debug_assert!(self.long.is_empty());
        self.remove_if(range, |sequence| sequence < limit);
    }

    /// The same, as far as so many runs have been looked at; what of `range` is left.
    pub fn remove_some_before(
        &mut self,
        range: SectorRange,
        limit: Sequence,
        runs_max: usize,
    ) -> SectorRange {
        let piece = self.prefix(range, runs_max);
        self.remove_if(piece, |sequence| sequence < limit);
        if self.long.iter().any(|&(_, sequence)| sequence < limit) {
            let (old, new): (Vec<_>, Vec<_>) = (self.long.iter())
                .copied()
                .partition(|&(_, sequence)| sequence < limit);
            self.long = old;
            self.cut_long(piece);
            self.long.extend(new);
            self.long.sort_unstable_by_key(|(range, _)| range.start);
        }
        SectorRange::between(piece.end(), range.end())
    }

    fn remove_if(&mut self, range: SectorRange, remove: impl Fn(Sequence) -> bool) {
        if let Entry::Occupied(run) = self.runs.entry(range.start)
            && run.get().count == range.count
        {
            if remove(run.get().sequence) {
                run.remove();
            }
            return;
        }
        let mut from = self.first_start(range);
        while let Some((&start, &run)) = self.runs.range(from.min(range.end())..range.end()).next()
        {
            self.work.add(1);
            let end = start + run.count;
            from = end.max(from);
            if !remove(run.sequence) {
                continue;
            }
            self.runs.remove(&start);
            if start < range.start {
                self.runs.insert(
                    start,
                    Run {
                        count: range.start - start,
                        ..run
                    },
                );
            }
            if end > range.end() {
                self.runs.insert(
                    range.end(),
                    Run {
                        count: end - range.end(),
                        ..run
                    },
                );
            }
        }
    }

    /// The runs that overlap `range`, clipped to it, in order. A long one comes in several parts.
    pub fn overlaps(
        &self,
        range: SectorRange,
    ) -> impl Iterator<Item = (SectorRange, Sequence)> + '_ {
        let end = range.end().max(range.start);
        let mut runs = (self.runs.range(self.first_start(range)..end))
            .filter_map(move |(&start, run)| {
                let clipped = SectorRange::new(start, run.count).intersect(range);
                self.work.add(1);
                (!clipped.is_empty()).then_some((clipped, run.sequence))
            })
            .peekable();
        let mut at = range.start;
        let mut long = self.long.partition_point(|(long, _)| long.end() <= at);
        core::iter::from_fn(move || {
            loop {
                // What of the next long one is still to come.
                let above = self.long.get(long).map(|&(above, sequence)| {
                    let above = SectorRange::between(above.start.max(at), above.end().min(end));
                    (above, sequence)
                });
                let Some((above, sequence)) = above.filter(|(above, _)| !above.is_empty()) else {
                    let (run, newest) = runs.next()?;
                    let rest = SectorRange::between(run.start.max(at), run.end());
                    if rest.is_empty() {
                        continue;
                    }
                    at = rest.end();
                    return Some((rest, newest));
                };
                let Some(&(run, newest)) = runs.peek() else {
                    (at, long) = (above.end(), long + 1);
                    return Some((above, sequence));
                };
                let run = SectorRange::between(run.start.max(at), run.end());
                if run.is_empty() {
                    runs.next();
                } else if run.start < above.start {
                    // Up to the long one nothing lies over it.
                    at = run.end().min(above.start);
                    return Some((SectorRange::between(run.start, at), newest));
                } else if newest > sequence && run.start == above.start {
                    at = run.end().min(above.end());
                    long += usize::from(at == above.end());
                    return Some((SectorRange::between(run.start, at), newest));
                } else {
                    // It is void, or lies behind a part that the long one holds.
                    let holds = if newest > sequence {
                        run.start
                    } else {
                        run.end()
                    };
                    at = holds.min(above.end());
                    long += usize::from(at == above.end());
                    return Some((SectorRange::between(above.start, at), sequence));
                }
            }
        })
    }

    /// `range` cut into consecutive pieces, each either in one run or (`None`) in no run.
    pub fn pieces(
        &self,
        range: SectorRange,
    ) -> impl Iterator<Item = (SectorRange, Option<Sequence>)> + '_ {
        let mut runs = self.overlaps(range).peekable();
        let mut at = range.start;
        core::iter::from_fn(move || {
            if at == range.end() {
                return None;
            }
            let piece = match runs.peek() {
                Some(&(run, sequence)) if run.start == at => {
                    runs.next();
                    (run, Some(sequence))
                }
                Some(&(run, _)) => (SectorRange::between(at, run.start), None),
                None => (SectorRange::between(at, range.end()), None),
            };
            at = piece.0.end();
            Some(piece)
        })
    }

    /// Whether no sector of `range` is in a run.
    pub fn is_clear(&self, range: SectorRange) -> bool {
        self.overlaps(range).next().is_none()
    }

    /// Start of the first run that may overlap `range`.
    fn first_start(&self, range: SectorRange) -> u64 {
        self.start_over(range.start)
    }

    /// Start of the run over a sector, or that sector.
    fn start_over(&self, sector: u64) -> u64 {
        match self.runs.range(..sector).next_back() {
            Some((&start, run)) if start + run.count > sector => start,
            _ => sector,
        }
    }

    /// Take the first run out; there is no long one.
    pub fn pop_first(&mut self) -> Option<(SectorRange, Sequence)> {
        debug_assert!(self.long.is_empty());
        self.work.add(1);
        let (start, run) = self.runs.pop_first()?;
        Some((SectorRange::new(start, run.count), run.sequence))
    }

    /// Number of runs.
    pub fn len(&self) -> usize {
        self.runs.len() + self.long.len()
    }

    /// The end of the last run.
    pub fn end(&self) -> Option<u64> {
        let run = self
            .runs
            .last_key_value()
            .map(|(start, run)| start + run.count);
        let long = self.long.last().map(|(range, _)| range.end());
        run.max(long)
    }

    /// Whether there is no run.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty() && self.long.is_empty()
    }

    /// Memory in bytes, about: keys and values in the nodes of a B-tree that are a little more than half full.
    pub fn memory_bytes(&self) -> usize {
        self.runs.len() * RUN_BYTES
    }

    /// Every run in order.
    pub fn iter(&self) -> impl Iterator<Item = (SectorRange, Sequence)> + '_ {
        self.overlaps(SectorRange::between(0, u64::MAX))
    }

    /// Runs that were looked at so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.work.units()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn extent_index_agrees_with_an_array() {
        let mut random = fastrand::Rng::with_seed(2);
        let mut index = ExtentIndex::default();
        let mut model = vec![None; 256];
        for sequence in 0..5000u64 {
            let start = random.u64(0..255);
            let range = SectorRange::new(start, random.u64(1..=(256 - start).min(40)));
            let sectors = range.start as usize..range.end() as usize;
            match random.u8(0..8) {
                0 | 1 if index.is_settled() => {
                    let limit = random.u64(0..=sequence);
                    index.remove_before(range, limit);
                    for slot in &mut model[sectors] {
                        *slot = slot.filter(|&held| held >= limit);
                    }
                }
                2 if index.takes_long() => {
                    index.insert_long(range, sequence);
                    model[sectors].fill(Some(sequence));
                    assert!(index.long.len() <= INDEX_LONG_MAX + 2);
                }
                3 => index.settle(random.usize(1..8)),
                _ => {
                    index.insert(range, sequence);
                    model[sectors].fill(Some(sequence));
                }
            }
            let mut seen = Vec::new();
            for (piece, held) in index.pieces(SectorRange::new(0, 256)) {
                assert!(!piece.is_empty() && piece.start == seen.len() as u64);
                seen.extend(core::iter::repeat_n(held, piece.count as usize));
            }
            assert_eq!(seen, model);
        }
    }

    #[test]
    fn extent_index_forgets_a_long_range_with_what_is_below() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..200 {
            let mut index = ExtentIndex::default();
            let long = SectorRange::new(random.u64(0..50), 2000);
            let limit = 1500 + random.u64(0..200);
            (0..1000).for_each(|at| index.insert(SectorRange::new(at * 2, 1), at));
            index.insert_long(long, 1000);
            assert!(!index.is_settled());
            (1001..1700).for_each(|sequence| {
                index.insert(SectorRange::new(random.u64(0..2000), 3), sequence);
            });
            let mut rest = SectorRange::new(0, 2100);
            let mut steps = 0;
            while !rest.is_empty() {
                let before = index.work();
                rest = index.remove_some_before(rest, limit, 20);
                assert!(index.work() - before < 100);
                if random.bool() {
                    index.settle(10);
                }
                steps += 1;
            }
            assert!(steps > 20 && index.is_settled());
            assert!(index.iter().all(|(_, sequence)| sequence >= limit));
        }
    }

    #[test]
    fn extent_index_makes_one_run_of_the_parts_of_a_write() {
        let mut index = ExtentIndex::default();
        index.insert(SectorRange::new(0, 8), 1);
        index.insert(SectorRange::new(25, 2), 2);
        for part in 1..6 {
            index.insert_long(SectorRange::new(part * 8, 8), 3);
        }
        let runs: Vec<_> = index.iter().collect();
        let range = SectorRange::new(8, 40);
        assert_eq!(runs, [(SectorRange::new(0, 8), 1), (range, 3)]);
    }

    #[test]
    fn extent_index_works_the_same_however_much_lies_below() {
        let mut index = ExtentIndex::default();
        let runs = 100_000;
        (0..runs).for_each(|at| index.insert(SectorRange::new(at * 2, 1), at));
        let all = SectorRange::new(0, 1 << 40);
        let before = index.work();
        index.insert_long(all, runs);
        assert!(index.work() - before < 4 * INDEX_RUNS_AT_ONCE_MAX as u64);
        while !index.is_settled() {
            let before = index.work();
            index.settle(100);
            assert!(index.work() - before < 400);
            let before = index.work();
            assert_eq!(index.overlaps(all).next().map(|(_, held)| held), Some(runs));
            assert!(index.work() - before < 10);
        }
        assert_eq!(index.iter().collect::<Vec<_>>(), vec![(all, runs)]);
    }
}
