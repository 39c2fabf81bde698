//! The home of a volume in storage mode in virtual time: the production state machine on a fake store and
//! a fake backend.
//!
//! In front of it stands what a write log does: a generation of writes, all of them ended, then a flush;
//! after a crash the last generation is written again, unless the log was lost.
//!
//! Most homes have checksums, some of which rot, as the data does: a read is then refused, and only then.
//! Half of them are encrypted, by a toy.
//!
//! * [`world`] drives one home after another on one store, and checks every rule as things happen.
//! * [`plant`] are bugs that prove that the checkers bite.

mod encryption;
pub mod plant;
mod sums;
pub mod world;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::violation::Violation;
use plant::Plant;
use world::World;

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Print everything that happens.
    pub verbose: bool,
    /// Plant a bug.
    pub plant: Option<Plant>,
    /// A short variant in which power is cut after so many steps (never if beyond its end).
    pub crash_at: Option<u64>,
    /// Only homes without checksums, as seeds were run before there were any.
    pub without_sums: bool,
}

/// What a run saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Flushes that were answered well.
    pub flushes: u64,
    /// Tiers that ended well.
    pub tiers: u64,
    /// Tiers that were cancelled or failed.
    pub tiers_given_up: u64,
    /// Writes that waited for a copy.
    pub waits: u64,
    /// Blocks that were filled.
    pub fills: u64,
    /// Crashes.
    pub crashes: u64,
    /// Openings that wrote pages anew from their copies.
    pub repairs: u64,
    /// Openings that found the backend between two states.
    pub betweens: u64,
    /// Logs that were lost.
    pub lost_logs: u64,
    /// Homes that had to be opened anew because their store failed.
    pub failed: u64,
    /// Sectors that rotted.
    pub rots: u64,
    /// Reads that were refused for a checksum.
    pub refused: u64,
    /// Openings after which the checksums were made anew.
    pub rebuilds: u64,
    /// Whether the short variant's power was cut.
    pub cut: bool,
}

impl Coverage {
    /// Add what another run saw.
    pub fn add(&mut self, other: &Self) {
        self.flushes += other.flushes;
        self.tiers += other.tiers;
        self.tiers_given_up += other.tiers_given_up;
        self.waits += other.waits;
        self.fills += other.fills;
        self.crashes += other.crashes;
        self.repairs += other.repairs;
        self.betweens += other.betweens;
        self.lost_logs += other.lost_logs;
        self.failed += other.failed;
        self.rots += other.rots;
        self.refused += other.refused;
        self.rebuilds += other.rebuilds;
        self.cut |= other.cut;
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} flushes, {} tiers ({} given up), {} waits for copies, {} fills, {} crashes, {} repairs, \
             {} times between, {} lost logs, {} failed stores, {} rotten sectors, {} reads refused, \
             {} rebuilds of checksums",
            self.flushes,
            self.tiers,
            self.tiers_given_up,
            self.waits,
            self.fills,
            self.crashes,
            self.repairs,
            self.betweens,
            self.lost_logs,
            self.failed,
            self.rots,
            self.refused,
            self.rebuilds
        )
    }
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Equal runs have equal hashes.
    pub trace_hash: u64,
    /// The rule that was broken, if one was.
    pub violation: Option<Violation>,
    /// The last things that happened.
    pub tail: Vec<String>,
    /// What the run saw.
    pub coverage: Coverage,
}

/// Run one seed.
pub fn run(seed: u64, options: Options) -> Outcome {
    let mut world = World::new(seed, options);
    let result = catch_unwind(AssertUnwindSafe(|| world.run()));
    let violation = match result {
        Ok(result) => result.err(),
        Err(panic) => {
            let message = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Some(Violation::new("assertion", message.unwrap_or_default()))
        }
    };
    Outcome {
        trace_hash: world.trace.hash(),
        violation,
        tail: world.trace.tail(),
        coverage: world.coverage,
    }
}
