//! Which write of the log holds which sectors: an ordered map of runs that do not overlap.
//!
//! Invariants: runs are not empty and do not overlap; inserting a run replaces what it covers, so
//! a sector always names the last write that was inserted for it.

use alloc::collections::BTreeMap;
use alloc::collections::btree_map::Entry;

use crate::io::SectorRange;

/// Number of a write in its log, in order of acceptance.
pub type Sequence = u64;

#[derive(Clone, Copy, Debug)]
struct Run {
    count: u64,
    sequence: Sequence,
}

/// Runs of sectors, each with the sequence number of the write that holds it.
#[derive(Debug, Default)]
pub struct ExtentIndex {
    runs: BTreeMap<u64, Run>,
}

impl ExtentIndex {
    /// Let `range` name `sequence`, whatever it named before.
    pub fn insert(&mut self, range: SectorRange, sequence: Sequence) {
        debug_assert!(!range.is_empty());
        if let Some(run) = self.runs.get_mut(&range.start)
            && run.count == range.count
        {
            // The common case of a hot block: one descent of the tree instead of four.
            run.sequence = sequence;
            return;
        }
        self.remove_if(range, |_| true);
        self.runs.insert(
            range.start,
            Run {
                count: range.count,
                sequence,
            },
        );
    }

    /// Forget the parts of `range` that name a write before `limit`.
    pub fn remove_before(&mut self, range: SectorRange, limit: Sequence) {
        self.remove_if(range, |sequence| sequence < limit);
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

    /// The runs that overlap `range`, clipped to it, in order.
    pub fn overlaps(
        &self,
        range: SectorRange,
    ) -> impl Iterator<Item = (SectorRange, Sequence)> + '_ {
        self.runs
            .range(self.first_start(range)..range.end().max(range.start))
            .filter_map(move |(&start, run)| {
                let clipped = SectorRange::new(start, run.count).intersect(range);
                (!clipped.is_empty()).then_some((clipped, run.sequence))
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
        match self.runs.range(..range.start).next_back() {
            Some((&start, run)) if start + run.count > range.start => start,
            _ => range.start,
        }
    }

    /// Number of runs.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether there is no run.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Approximate memory in bytes: keys and values at the usual fill of a B-tree's nodes.
    pub fn memory_bytes(&self) -> usize {
        self.runs.len() * size_of::<(u64, Run)>() * 3 / 2
    }

    /// Every run in order.
    pub fn iter(&self) -> impl Iterator<Item = (SectorRange, Sequence)> + '_ {
        self.runs
            .iter()
            .map(|(&start, run)| (SectorRange::new(start, run.count), run.sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn extent_index_agrees_with_an_array() {
        let mut random = fastrand::Rng::with_seed(2);
        let mut index = ExtentIndex::default();
        let mut model = vec![None; 256];
        for sequence in 0..5000u64 {
            let start = random.u64(0..255);
            let range = SectorRange::new(start, random.u64(1..=(256 - start).min(40)));
            let sectors = range.start as usize..range.end() as usize;
            if random.u8(0..4) == 0 {
                let limit = random.u64(0..=sequence);
                index.remove_before(range, limit);
                for slot in &mut model[sectors] {
                    *slot = slot.filter(|&held| held >= limit);
                }
            } else {
                index.insert(range, sequence);
                model[sectors].fill(Some(sequence));
            }
            let mut seen = Vec::new();
            for (piece, held) in index.pieces(SectorRange::new(0, 256)) {
                assert!(!piece.is_empty() && piece.start == seen.len() as u64);
                seen.extend(core::iter::repeat_n(held, piece.count as usize));
            }
            assert_eq!(seen, model);
        }
    }
}
