//! How often the lines of one volume were read of late: a counting sketch of fixed size.
//!
//! A line has four counters of four bits in one cache line, and its count is the smallest of them:
//! others may have raised it, never lowered it. Of the four only the smallest are raised, so that
//! they are raised little by others. After as many reads as there are counters all are halved: what is not
//! read any more is forgotten.
//!
//! Invariant: until the next halving a count is at least the number of reads, up to [`COUNT_MAX`].

use alloc::vec;
use alloc::vec::Vec;

use crate::cache::mix;

/// Counters of one volume: a quarter of a mebibyte, for about 100,000 lines at a time.
const COUNTERS: usize = 1 << 19;
/// Counters in one word, and the words of one cache line.
const WORD_COUNTERS: usize = 16;
const BUCKET_WORDS: usize = 8;
const ROWS: usize = 4;
/// The largest count.
pub const COUNT_MAX: u8 = 15;
/// Every counter's bits but its highest.
const HALVED: u64 = 0x7777_7777_7777_7777;

/// See the module.
#[derive(Clone, Debug)]
pub struct ReadCounts {
    buckets: Vec<[u64; BUCKET_WORDS]>,
    /// Reads since the last halving.
    reads: usize,
}

impl Default for ReadCounts {
    fn default() -> Self {
        Self {
            buckets: vec![[0; BUCKET_WORDS]; COUNTERS / WORD_COUNTERS / BUCKET_WORDS],
            reads: 0,
        }
    }
}

impl ReadCounts {
    /// Word and shift of each of a line's counters, in its bucket.
    fn places(&self, line: u64) -> (usize, [(usize, u32); ROWS]) {
        let hash = mix(line);
        let bucket = hash as usize % self.buckets.len();
        let places = core::array::from_fn(|row| {
            // Two words for each row, so that the four counters differ.
            let bits = (hash >> (32 + 5 * row)) as usize % (2 * WORD_COUNTERS);
            let word = 2 * row + bits / WORD_COUNTERS;
            (word, (bits % WORD_COUNTERS) as u32 * 4)
        });
        (bucket, places)
    }

    /// A line was read.
    pub fn add(&mut self, line: u64) {
        let count = self.count(line);
        let (bucket, places) = self.places(line);
        if count < COUNT_MAX {
            for (word, shift) in places {
                let word = &mut self.buckets[bucket][word];
                if (*word >> shift) as u8 & COUNT_MAX == count {
                    *word += 1 << shift;
                }
            }
        }
        self.reads += 1;
        if self.reads == COUNTERS {
            self.reads = 0;
            for word in self.buckets.iter_mut().flatten() {
                *word = (*word >> 1) & HALVED;
            }
        }
    }

    /// How often a line was read of late.
    pub fn count(&self, line: u64) -> u8 {
        let (bucket, places) = self.places(line);
        let counters = places.map(|(word, shift)| (self.buckets[bucket][word] >> shift) as u8);
        counters
            .into_iter()
            .map(|counter| counter & COUNT_MAX)
            .min()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;

    use super::*;

    #[test]
    fn read_counts_are_never_too_low_and_seldom_too_high() {
        let mut counts = ReadCounts::default();
        let mut random = fastrand::Rng::with_seed(8);
        let mut model: BTreeMap<u64, u8> = BTreeMap::new();
        for _ in 0..200_000 {
            let line = random.u64(..100_000);
            counts.add(line);
            *model.entry(line).or_default() += 1;
        }
        let mut high = 0;
        for (&line, &reads) in &model {
            let count = counts.count(line);
            assert!(count >= reads.min(COUNT_MAX), "line {line}");
            high += usize::from(count > reads);
        }
        assert!(high * 20 < model.len(), "{high} of {} lines", model.len());
        let unread = (200_000..210_000).filter(|&line| counts.count(line) > 1);
        assert!(unread.count() < 1_000);
    }

    #[test]
    fn read_counts_halve_what_is_not_read_any_more() {
        let mut counts = ReadCounts::default();
        (0..20).for_each(|_| counts.add(7));
        assert_eq!(counts.count(7), COUNT_MAX);
        (0..COUNTERS).for_each(|_| counts.add(8));
        assert_eq!(counts.count(7), COUNT_MAX / 2);
        assert!(counts.count(8) >= COUNT_MAX / 2);
    }
}
