//! Long ranges on large volumes in virtual time: the production volume and read cache over a backend of up to
//! 1 TiB that holds nothing but what was written.
//!
//! One client discards, zeroes, promotes and evicts up to the whole volume at once; another one writes and reads
//! a little, also in between. Nothing fails here, and the node is killed now and then: what faults bring about is the
//! matter of the other worlds. What counts is that each step costs no more than a bound ([`crate::check_cost`]),
//! and that reads, and the backend in the end, have what was written last.
//!
//! * [`world`] drives it.
//! * [`Plant`] are bugs that prove that the checkers bite.

pub mod world;

use std::fmt;

use clap::ValueEnum;
use world::RangesWorld;

use crate::outcome;

/// How to run a seed.
pub type Options = outcome::Options<Plant>;
/// What came of a run.
pub type Outcome = outcome::Outcome<Coverage>;

/// One way to misbehave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Plant {
    /// The cache looks long ranges up block by block, in one step.
    LongProbe,
    /// Zeroes reach the backend up to 4 GiB only.
    ShortZero,
}

impl Plant {
    /// Every bug.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }
}

/// What a run saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Requests answered.
    pub replies: u64,
    /// Of them, those about ranges of 1 GiB and more.
    pub long: u64,
    /// Steps in which the index had still to settle.
    pub settling: u64,
    /// Steps in which the cache had still to forget something.
    pub forgetting: u64,
    /// Openings after a kill.
    pub openings: u64,
    /// Bytes of the volume's indexes at most.
    pub index_bytes_max: u64,
    /// The dearest step, in looks.
    pub step_max: u64,
    /// Zeroings that the backend was asked for.
    pub zeroings: u64,
}

impl Coverage {
    /// Add what another run saw.
    pub fn add(&mut self, other: &Self) {
        self.replies += other.replies;
        self.long += other.long;
        self.settling += other.settling;
        self.forgetting += other.forgetting;
        self.openings += other.openings;
        self.index_bytes_max = self.index_bytes_max.max(other.index_bytes_max);
        self.step_max = self.step_max.max(other.step_max);
        self.zeroings += other.zeroings;
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} replies ({} about long ranges), {} steps while the index settled and {} while the cache forgot, \
             {} openings, {} zeroings, {} KiB of an index at most, {} looks in a step at most",
            self.replies,
            self.long,
            self.settling,
            self.forgetting,
            self.openings,
            self.zeroings,
            self.index_bytes_max >> 10,
            self.step_max
        )
    }
}

/// Run one seed.
pub fn run(seed: u64, options: Options) -> Outcome {
    Outcome::of(
        seed,
        RangesWorld::new(seed, options),
        RangesWorld::run,
        |world| world.coverage,
    )
}
