//! What keeping a block saves: what the reads that it spares would cost.
//!
//! Of each volume the cost of clients' reads is measured: of a line from the backend (a *miss*), and of
//! whatever DRAM did not have, from the SSD or the backend. A frame in DRAM saves the second, a line on
//! the SSD the first less what a read of the SSD costs. The logarithm of that is a volume's *worth* in the
//! tier, and all that the tier knows: there is nothing of it in a line or a frame.
//!
//! The hand of a ring (or the eviction of a stream) compares the worth of what it passes with the mean of what the
//! ring has taken and the hand has passed of late, its *level*. What is worth 2^n times as much ages 2^n times as slowly: the
//! hand passes it over all but once in 2^n times. What is worth less is held on to for its uses only
//! once in 2^n times. What is new and was not read again goes to the main ring if it is worth much more. So a
//! cache of equal volumes, or of one, is what it would be without.
//!
//! Invariants:
//! 1. A volume that was not measured counts as the mean of the others: nothing is held against it.
//! 2. Less than a factor of two makes no difference: it may be chance.
//! 3. No more than [`GAIN_MAX`] doublings count, so everything ages in the end.

use alloc::collections::BTreeMap;

use super::table::mix;
use crate::base::io::Nanos;

/// By what the tiers choose what they keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tiering {
    /// By how recently and how often it was read.
    Recency,
    /// By that, weighed with what reading it again would cost.
    #[default]
    Benefit,
}

/// What reads of a volume cost, and how its cached blocks are weighed for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeBenefit {
    /// Mean time of a client's read of one line from the backend, of late; `None`: not measured.
    pub miss: Option<Nanos>,
    /// Mean time of reading one block from the SSD tier, of all volumes.
    pub ssd_hit: Option<Nanos>,
    /// The doublings by which a block in DRAM is worth more than the mean there.
    pub dram_gain: i32,
    /// The same of a line in the SSD tier.
    pub ssd_gain: i32,
}

/// A block that is new and was not read again has to be worth so many doublings more than others: it may be one that
/// nobody reads again.
const UNPROVEN: i32 = 2;
/// Doublings that count at most.
pub const GAIN_MAX: i32 = 6;
/// Steps of worth in one doubling.
const STEPS: i32 = 16;
/// Reads that make up a mean.
const READS_OF_LATE: u64 = 64;
/// What saves less is not worth a line on the SSD.
const SAVING_MIN_NANOS: u64 = 1_000;
/// Of a level, in parts of a step; and the passes that make it up.
const LEVEL_PARTS: i32 = 256;

/// A mean that forgets.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    nanos: u64,
    reads: u64,
}

impl Mean {
    fn add(&mut self, took: Nanos) {
        self.reads = (self.reads + 1).min(READS_OF_LATE);
        let sum = u128::from(self.nanos) * u128::from(self.reads - 1) + u128::from(took.0);
        self.nanos = u64::try_from(sum / u128::from(self.reads)).unwrap_or(u64::MAX);
    }

    fn get(&self) -> Option<Nanos> {
        (self.reads > 0).then_some(Nanos(self.nanos))
    }
}

/// The logarithm of a time to the base of two, in steps; not below one.
fn worth(nanos: u64) -> i32 {
    let nanos = nanos.max(SAVING_MIN_NANOS);
    let whole = nanos.ilog2();
    let fraction = (nanos << (63 - whole) >> (63 - STEPS.ilog2())) as i32 % STEPS;
    whole as i32 * STEPS + fraction
}

/// The measured costs of one volume.
#[derive(Clone, Copy, Debug, Default)]
struct Costs {
    /// A line from the backend.
    miss: Mean,
    /// What DRAM did not have.
    beyond_dram: Mean,
}

/// What was measured.
#[derive(Debug, Default)]
pub struct Benefit {
    volumes: BTreeMap<u32, Costs>,
    ssd_hit: Mean,
}

impl Benefit {
    /// A client's read has fetched a line of the volume from the backend in this time.
    pub fn missed(&mut self, volume: u32, took: Nanos) {
        let costs = self.volumes.entry(volume).or_default();
        costs.miss.add(took);
        costs.beyond_dram.add(took);
    }

    /// A client's read has had a block of the volume from the SSD in this time.
    pub fn read_ssd(&mut self, volume: u32, took: Nanos) {
        self.ssd_hit.add(took);
        let costs = self.volumes.entry(volume).or_default();
        costs.beyond_dram.add(took);
    }

    pub fn forget(&mut self, volume: u32) {
        self.volumes.remove(&volume);
    }

    fn costs(&self, volume: u32) -> Costs {
        self.volumes.get(&volume).copied().unwrap_or_default()
    }

    pub fn miss(&self, volume: u32) -> Option<Nanos> {
        self.costs(volume).miss.get()
    }

    pub fn ssd_hit(&self) -> Option<Nanos> {
        self.ssd_hit.get()
    }

    /// What a frame of the volume in DRAM is worth.
    pub fn dram_worth(&self, volume: u32) -> Option<i32> {
        let beyond = self.costs(volume).beyond_dram.get()?;
        Some(worth(beyond.0))
    }

    /// What a line of the volume on the SSD is worth.
    pub fn ssd_worth(&self, volume: u32) -> Option<i32> {
        let miss = self.miss(volume)?;
        let ssd_hit = self.ssd_hit.get().unwrap_or(Nanos(0));
        Some(worth(miss.since(ssd_hit.min(miss)).0))
    }

    /// Whether the backend gives a line of the volume as soon as the SSD would.
    pub fn saves_nothing(&self, volume: u32) -> bool {
        self.ssd_worth(volume) == Some(worth(0))
    }
}

/// The gain of a block that is new and was not read again.
pub fn unproven(gain: i32) -> i32 {
    (gain - UNPROVEN).max(0)
}

/// What one tier knows of the worth of its content. See the module.
#[derive(Debug, Default)]
pub struct Worths {
    volumes: BTreeMap<u32, i32>,
    /// Of each of its two rings, or streams, in parts of a step; 0: nothing was passed yet.
    levels: [i32; 2],
    draws: u64,
}

impl Worths {
    /// What a block of this volume is worth from now on, if it is known.
    pub fn set(&mut self, volume: u32, worth: Option<i32>) {
        match worth {
            Some(worth) => self.volumes.insert(volume, worth),
            None => self.volumes.remove(&volume),
        };
    }

    /// Everything is worth the same.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The doublings by which a volume's blocks are worth more than what the hand of `ring` has passed of
    /// late; less than 0 if they are worth less.
    pub fn gain(&self, volume: u32, ring: usize) -> i32 {
        let (level, worth) = (self.levels[ring], self.volumes.get(&volume));
        match worth {
            Some(&worth) if level != 0 => {
                let above = worth - level / LEVEL_PARTS;
                (above / STEPS).clamp(-GAIN_MAX, GAIN_MAX)
            }
            _ => 0,
        }
    }

    /// `ring` takes a block of this volume, or its hand passes one.
    pub fn note(&mut self, volume: u32, ring: usize) {
        let Some(&worth) = self.volumes.get(&volume) else {
            return;
        };
        let (level, worth) = (&mut self.levels[ring], worth * LEVEL_PARTS);
        if *level == 0 {
            *level = worth;
        }
        *level += (worth - *level) / LEVEL_PARTS;
    }

    /// The hand of `ring` passes a block of this volume: its gain.
    pub fn pass(&mut self, volume: u32, ring: usize) -> i32 {
        let gain = self.gain(volume, ring);
        self.note(volume, ring);
        gain
    }

    /// True once in 2^`doublings` times, in no order.
    pub fn is_drawn(&mut self, doublings: i32) -> bool {
        if doublings <= 0 {
            return true;
        }
        self.draws += 1;
        mix(self.draws) & ((1 << doublings) - 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worth_is_a_logarithm() {
        for nanos in [1_000, 1_500, 20_000, 300_000, 20_000_000, 3_600_000_000_000] {
            assert_eq!(worth(2 * nanos), worth(nanos) + STEPS, "{nanos}");
            assert!(worth(nanos + nanos / 8) > worth(nanos), "{nanos}");
        }
        assert_eq!(worth(0), worth(SAVING_MIN_NANOS));
        assert!(worth(u64::MAX) < 64 * STEPS);
    }

    #[test]
    fn mean_forgets_what_was() {
        let mut mean = Mean::default();
        assert_eq!(mean.get(), None);
        for took in [10, 20, 30] {
            mean.add(Nanos(took));
        }
        assert_eq!(mean.get(), Some(Nanos(20)));
        (0..2000).for_each(|_| mean.add(Nanos(1_000_000)));
        assert!(mean.nanos > 990_000, "{}", mean.nanos);
        mean.add(Nanos(u64::MAX));
    }

    #[test]
    fn benefit_of_the_ssd_is_what_it_saves() {
        let mut benefit = Benefit::default();
        assert_eq!((benefit.dram_worth(1), benefit.ssd_worth(1)), (None, None));
        benefit.missed(1, Nanos(400_000));
        assert_eq!(benefit.ssd_worth(1), Some(worth(400_000)));
        benefit.read_ssd(2, Nanos(100_000));
        assert_eq!(benefit.ssd_worth(1), Some(worth(300_000)));
        assert_eq!((benefit.ssd_worth(2), benefit.miss(2)), (None, None));
        assert_eq!(benefit.dram_worth(2), Some(worth(100_000)));
        assert_eq!(benefit.ssd_hit(), Some(Nanos(100_000)));
        benefit.missed(3, Nanos(90_000));
        assert!(benefit.saves_nothing(3) && !benefit.saves_nothing(1));
        assert!(!benefit.saves_nothing(2), "it was not measured");
        benefit.forget(3);
        assert_eq!(benefit.ssd_worth(3), None);
    }

    #[test]
    fn worths_gain_over_what_was_passed() {
        let mut worths = Worths::default();
        worths.set(1, Some(worth(300_000)));
        worths.set(2, Some(worth(20_000_000)));
        worths.set(3, Some(worth(500_000)));
        assert_eq!(worths.gain(2, 0), 0, "there is nothing to compare with");
        (0..1000).for_each(|_| assert_eq!(worths.pass(1, 0), 0));
        assert_eq!((worths.gain(2, 0), worths.gain(3, 0)), (6, 0));
        assert_eq!((worths.gain(4, 0), worths.pass(4, 0)), (0, 0), "not known");
        // Once it is all there is, it is the measure.
        for _ in 0..4000 {
            worths.pass(2, 0);
        }
        assert_eq!((worths.gain(2, 0), worths.gain(1, 0)), (0, -6));
        assert_eq!(worths.gain(2, 1), 0, "the other ring has passed nothing");
        worths.clear();
        assert_eq!(worths.gain(1, 0), 0);
    }

    #[test]
    fn worths_draw_as_often_as_they_say() {
        let mut worths = Worths::default();
        for doublings in 1..=GAIN_MAX {
            let times = 1000 << doublings;
            let drawn = (0..times).filter(|_| worths.is_drawn(doublings)).count();
            assert!((900..1100).contains(&drawn), "{doublings}: {drawn}");
        }
        assert!(worths.is_drawn(0) && worths.is_drawn(-3));
    }
}
