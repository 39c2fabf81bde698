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
//! * `busy` are clients that keep every get busy.
//! * `dead_clones` are creations of clones that die or are slow.
//! * [`plant`] are bugs that prove that the checkers bite.

mod busy;
mod check;
pub mod compressed;
mod dead_clones;
mod effects;
mod lineage;
pub mod model;
pub mod plant;
pub mod reader;
pub mod scenario;
pub mod store;
pub mod world;

use plant::Plant;
use scenario::Coverage;
use world::ObjectsWorld;

use crate::outcome;

/// How to run a seed. The crash of the short variant is the death of its first owner.
pub type Options = outcome::Options<Plant>;
/// What came of a run.
pub type Outcome = outcome::Outcome<Coverage>;

/// Run one seed.
pub fn run(seed: u64, options: Options) -> Outcome {
    let world = ObjectsWorld::new(seed, options);
    Outcome::of(seed, world, ObjectsWorld::run, |world| world.coverage)
}
