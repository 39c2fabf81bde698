//! How fast destage frees the log, and how much of it a generation takes therefore.
//!
//! Admission slows writes by the rate, so it must be that of now: it changes with each generation, the more the longer
//! that took, and falls while one takes much longer than it should. The log's fill has the last word: a rate that is
//! wrong by some factor makes the log settle at another fill, not at another speed.
//!
//! A generation gives its space back all at once. So it takes what is freed in [`GENERATION_TIME`]; longer only where
//! what no write goes on in, the flush and the commit, would take up more than a share of it.
//!
//! It only counts: [`super`] says what has happened, and when.

use crate::base::io::Nanos;

/// What a generation is meant to take.
const GENERATION_TIME: Nanos = Nanos::from_millis(100);
/// It is to take so many times what its flush and commit take.
const STILL_FACTOR: u64 = 20;
/// Smallest bound of a generation: less is not worth a flush.
const GENERATION_BLOCKS_MIN: u64 = 256;
/// A generation counts as much as all before it if it took so long.
const MEMORY: Nanos = Nanos::from_millis(200);
/// It counts so much at least.
const WEIGHT_MIN: f64 = 0.25;
/// Nothing is faster: what takes no time says little.
const TIME_MIN: Nanos = Nanos::from_micros(100);
/// A generation that has taken so many times what it should is slower than those before it.
const LATE_FACTOR: f64 = 2.0;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Rate {
    /// 0: nothing was freed yet.
    blocks_s: f64,
    /// What flush and commit take.
    still: Nanos,
}

impl Rate {
    /// A generation has freed so many blocks in so long a time, at the end of which its flush and its commit took `still`.
    pub(super) fn freed(&mut self, blocks: u64, took: Nanos, still: Nanos) {
        let seconds = seconds(took.max(TIME_MIN));
        let rate = blocks as f64 / seconds;
        if self.blocks_s == 0.0 {
            (self.blocks_s, self.still) = (rate, still);
            return;
        }
        let weight = (seconds / (seconds + seconds_of_memory())).max(WEIGHT_MIN);
        self.blocks_s += (rate - self.blocks_s) * weight;
        self.still = Nanos((self.still.0 * 3 + still.0) / 4);
    }

    /// Log blocks that are freed a second, while a generation of so many blocks is under way for so long.
    pub(super) fn blocks_s(&self, under_way: u64, since: Nanos) -> f64 {
        let (blocks, seconds) = (under_way as f64, seconds(since));
        if blocks > 0.0 && seconds * self.blocks_s > blocks * LATE_FACTOR {
            return blocks * LATE_FACTOR / seconds;
        }
        self.blocks_s
    }

    /// The most blocks that a generation is to take, of `most` that it may.
    pub(super) fn generation_blocks(&self, most: u64) -> u64 {
        let time = GENERATION_TIME
            .0
            .max(self.still.0.saturating_mul(STILL_FACTOR));
        let blocks = (self.blocks_s * seconds(Nanos(time))) as u64;
        blocks.max(GENERATION_BLOCKS_MIN).min(most)
    }
}

fn seconds(time: Nanos) -> f64 {
    time.0 as f64 / 1e9
}

fn seconds_of_memory() -> f64 {
    seconds(MEMORY)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Nanos = Nanos::from_millis;

    fn close(is: f64, should_be: f64) -> bool {
        (is - should_be).abs() < should_be * 1e-6
    }

    #[test]
    fn rate_is_that_of_the_first_generation_and_then_of_the_last_ones() {
        let mut rate = Rate::default();
        assert!(rate.blocks_s(0, MS(0)) == 0.0, "nothing is known");
        rate.freed(1000, MS(100), MS(1));
        assert!(close(rate.blocks_s(0, MS(0)), 10_000.0));
        // A third of a fifth of a second and a tenth.
        rate.freed(400, MS(100), MS(1));
        assert!(close(rate.blocks_s(0, MS(0)), 8_000.0));
        // As long as the memory: half.
        rate.freed(800, MS(200), MS(1));
        assert!(close(rate.blocks_s(0, MS(0)), 6_000.0));
        // A short one counts a quarter.
        rate.freed(10, MS(1), MS(1));
        assert!(close(rate.blocks_s(0, MS(0)), 7_000.0));
        let before = rate.blocks_s(0, MS(0));
        rate.freed(7, Nanos(0), MS(1));
        assert!(close(
            rate.blocks_s(0, MS(0)),
            before + (70_000.0 - before) / 4.0
        ));
    }

    #[test]
    fn rate_falls_while_a_generation_takes_too_long() {
        let mut rate = Rate::default();
        rate.freed(1000, MS(100), MS(1));
        for (blocks, millis, is) in [
            (1000, 0, 10_000.0),
            (1000, 200, 10_000.0),
            (1000, 400, 5_000.0),
            (1000, 2_000, 1_000.0),
            (0, 2_000, 10_000.0),
        ] {
            let found = rate.blocks_s(blocks, MS(millis));
            assert!(close(found, is), "{blocks} after {millis} ms: {found}");
        }
    }

    #[test]
    fn generation_takes_a_tenth_of_a_second_or_many_times_its_flush() {
        let mut rate = Rate::default();
        assert_eq!(rate.generation_blocks(8192), GENERATION_BLOCKS_MIN);
        assert_eq!(rate.generation_blocks(64), 64);
        rate.freed(1000, MS(100), MS(1));
        assert_eq!(rate.generation_blocks(8192), 1000);
        for _ in 0..40 {
            rate.freed(1000, MS(100), MS(10));
        }
        let blocks = rate.generation_blocks(8192);
        assert!((1990..=2000).contains(&blocks), "{blocks}");
        assert_eq!(rate.generation_blocks(1500), 1500);
    }
}
