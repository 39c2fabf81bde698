//! The local store of a volume in storage mode in virtual time: the production state machine on a fake store and
//! a fake backend.
//!
//! In front of it stands what a write log does: a generation of writes, all of them ended, then a flush;
//! after a crash the last generation is written again, unless the log was lost.
//!
//! Data and checksums rot: a read is then refused, and only then.
//! Half of them are encrypted, by a toy; of these, somebody without the key forges the map and data.
//!
//! Many get other sizes meanwhile. The device of some loses a write that it has acknowledged.
//!
//! * [`world`] drives one local store after another on one store, and checks every rule as things happen.
//! * [`plant`] are bugs that prove that the checkers bite.

mod encryption;
mod forgery;
mod hold;
mod lies;
pub mod plant;
mod size;
mod sums;
pub mod world;

use std::fmt;

use plant::Plant;
use world::StoreWorld;

use crate::outcome;

/// How to run a seed.
pub type Options = outcome::Options<Plant>;
/// What came of a run.
pub type Outcome = outcome::Outcome<Coverage>;

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
    /// Local stores that had to be opened anew because their store failed.
    pub failed: u64,
    /// Sectors that rotted.
    pub rots: u64,
    /// Reads that were refused for a checksum.
    pub refused: u64,
    /// Openings after which the checksums were made anew.
    pub rebuilds: u64,
    /// Backends that were held for a snapshot.
    pub holds: u64,
    /// Volumes that have grown.
    pub grown: u64,
    /// Volumes that have shrunk.
    pub shrunk: u64,
    /// Changes of size that failed.
    pub resizes_refused: u64,
    /// Changes of size that a crash has interrupted.
    pub resizes_cut: u64,
    /// Processes that were killed some time after writes past the log that nobody had flushed.
    pub lingered: u64,
    /// Writes of the map that the device has acknowledged and lost, local stores that then opened, and those that were
    /// refused.
    pub lost_map_writes: u64,
    /// See [`Self::lost_map_writes`].
    pub lost_map_writes_survived: u64,
    /// See [`Self::lost_map_writes`].
    pub lost_map_writes_noticed: u64,
    /// Pages and superblocks that were forged, and refused.
    pub forged: u64,
    /// Sectors that were forged.
    pub forged_sectors: u64,
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
        self.holds += other.holds;
        self.grown += other.grown;
        self.shrunk += other.shrunk;
        self.resizes_refused += other.resizes_refused;
        self.resizes_cut += other.resizes_cut;
        self.lingered += other.lingered;
        self.lost_map_writes += other.lost_map_writes;
        self.lost_map_writes_survived += other.lost_map_writes_survived;
        self.lost_map_writes_noticed += other.lost_map_writes_noticed;
        self.forged += other.forged;
        self.forged_sectors += other.forged_sectors;
        self.cut |= other.cut;
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} flushes, {} tiers ({} given up), {} waits for copies, {} fills, {} crashes, {} repairs, \
             {} times between, {} lost logs, {} failed stores, {} rotten sectors, {} reads refused, \
             {} rebuilds of checksums, {} backends held, grown {} times, shrunk {} times ({} changes of size refused, \
             {} interrupted), {} killed with writes past the log, {} writes of the map lost ({} survived, {} noticed), \
             {} forgeries of the map, {} of sectors",
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
            self.rebuilds,
            self.holds,
            self.grown,
            self.shrunk,
            self.resizes_refused,
            self.resizes_cut,
            self.lingered,
            self.lost_map_writes,
            self.lost_map_writes_survived,
            self.lost_map_writes_noticed,
            self.forged,
            self.forged_sectors
        )
    }
}

/// Run one seed.
pub fn run(seed: u64, options: Options) -> Outcome {
    let world = StoreWorld::new(seed, options);
    Outcome::of(seed, world, StoreWorld::run, |world| world.coverage)
}
