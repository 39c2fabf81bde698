//! Volumes over object stores in virtual time: the production state machine on a fake store.
//!
//! A seed decides configuration, requests, latencies, faults, crashes and take-overs. One volume has
//! one owner after another; the one before may still be there, and what it has asked of the store
//! may happen long after it is gone.
//!
//! * [`store`] is the fake: an action may fail, happen and be reported as failed, happen late, or
//!   happen twice.
//! * [`reader`] reads a bucket alone, without the machine: what it holds, and what it needs.
//! * [`model`] knows what each sector may hold, and at which flushes.
//! * [`world`] drives owners and checks every rule as things happen.
//! * [`compressed`] is what the driver does with compressed objects.
//! * [`plant`] are bugs that prove that the checkers bite.

mod check;
pub mod compressed;
mod effects;
mod lineage;
pub mod model;
pub mod plant;
pub mod reader;
pub mod scenario;
pub mod store;
pub mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::violation::Violation;
use plant::Plant;
use scenario::Coverage;
use world::World;

/// How to run a seed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Print everything that happens.
    pub verbose: bool,
    /// Plant a bug.
    pub plant: Option<Plant>,
    /// A short variant in which the first owner dies after so many steps (none if beyond its end).
    pub crash_at: Option<u64>,
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
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
    let outcome = Outcome {
        seed,
        trace_hash: world.trace.hash(),
        violation,
        tail: world.trace.tail(),
        coverage: world.coverage,
    };
    if let Some(violation) = &outcome.violation
        && violation.rule == "assertion"
    {
        // What a panic left behind cannot be trusted to drop well.
        std::mem::forget(world);
    }
    outcome
}
