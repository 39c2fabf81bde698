//! A cluster in virtual time: nodes with replicated copies of one log, the production volume on that of whoever serves, and
//! one backend behind all.
//!
//! ```text
//!  client ──► volume ──► participant ──► own disk            store ◄── managers
//!               │            ▲  │                              │ ▲
//!               ▼            │  └─────────► other nodes        └─┴── participants
//!            backend         └───────────── (links)
//! ```
//!
//! What goes wrong: power and processes of nodes, one or all; nodes that stand still and go on; clocks at rates of their own;
//! links that break in mid-stream, or let nothing through in one direction or both, and in some worlds repeat, exchange or
//! lose messages, or send in the clear what is encrypted; a store whose answers are lost, or that does late what it was asked
//! for; managers that take the group for no reason, or do not know that another one has their key; media that are lost, rot, also
//! while they are in use, take no more writes, or do not read. In some worlds an operator asks for other groups meanwhile, and
//! in some the log is encrypted.
//!
//! * [`world`](self) drives it, `faults` has things go wrong, `effects` has what nodes ask of devices.
//! * `media` has what happens to the media of copies, and what is done about it.
//! * `cipher` is what stands between an encrypted log and its medium.
//! * `link`, `store`, `shared` (the backend), `clock`, `manager`, `keys`, `shapes` (the operator), `client` and `reader` are
//!   what the world is made of.
//! * `check_logs`, `check_serving`, `check_leases` and the histories of [`crate::model`] say what must hold.
//! * [`Plant`] are bugs that prove that the checkers bite.

mod check_leases;
mod check_logs;
mod check_serving;
mod cipher;
mod client;
mod clock;
mod effects;
mod faults;
mod keys;
mod link;
mod links;
mod manager;
mod media;
mod node;
mod plant;
mod reader;
mod scenario;
mod shapes;
mod shared;
mod store;
mod stores;
mod world;

use std::fmt;

pub use plant::Plant;
use world::ClusterWorld;

use crate::outcome;

/// How to run a seed.
pub type Options = outcome::Options<Plant>;
/// What came of a run.
pub type Outcome = outcome::Outcome<Coverage>;

/// What a run saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Requests answered.
    pub replies: u64,
    /// Of them, those that failed.
    pub errors: u64,
    /// Writes acknowledged.
    pub acked: u64,
    /// Nodes that began to serve.
    pub takeovers: u64,
    /// Nodes that ceased to.
    pub fenced: u64,
    /// Candidates that gave up.
    pub stopped: u64,
    /// Nodes that went down, with or without power.
    pub crashes: u64,
    /// Nodes that stood still.
    pub pauses: u64,
    /// Directions in which nothing got through.
    pub cuts: u64,
    /// Connections made.
    pub connections: u64,
    /// Members that joined.
    pub joins: u64,
    /// Members that left.
    pub leaves: u64,
    /// Questions to the store that ended in an unknown way.
    pub unknown: u64,
    /// Messages that arrived.
    pub messages: u64,
    /// Reads of an opening that the client had left for one of a higher epoch.
    pub old_reads: u64,
    /// Media that were lost.
    pub lost_media: u64,
    /// Bits of copies that rotted.
    pub rots: u64,
    /// Copies that were found to be damaged.
    pub damaged: u64,
    /// Copies that took no more writes.
    pub failed_writes: u64,
    /// Reads of copies that failed.
    pub failed_reads: u64,
    /// Writes past the log that were acknowledged.
    pub direct_writes: u64,
    /// Times that what commits need was changed.
    pub configured: u64,
    /// Times that writes failed for want of members.
    pub shortages: u64,
    /// Times that a manager found that it has the key no more.
    pub keys_lost: u64,
    /// Records of managers that the store did not take since they had not the key.
    pub keyless: u64,
    /// Leaders that the store got.
    pub leader_changes: u64,
    /// Messages that came twice or in another order.
    pub unruly: u64,
    /// Messages that were lost on connections that stayed.
    pub lost_messages: u64,
    /// Spans that were sent as they were before they were encrypted.
    pub clear: u64,
    /// Runs of an encrypted log.
    pub encrypted: u64,
    /// Blocks that a primary has fetched from a member since they had rotted.
    pub repairs: u64,
    /// Reads that failed since no member had what had rotted.
    pub corrupt: u64,
    /// Laps of the ring, in thousandths, of the log that went furthest.
    pub laps: u64,
}

impl Coverage {
    /// Add what another run saw.
    pub fn add(&mut self, other: &Self) {
        self.replies += other.replies;
        self.errors += other.errors;
        self.acked += other.acked;
        self.takeovers += other.takeovers;
        self.fenced += other.fenced;
        self.stopped += other.stopped;
        self.crashes += other.crashes;
        self.pauses += other.pauses;
        self.cuts += other.cuts;
        self.connections += other.connections;
        self.joins += other.joins;
        self.leaves += other.leaves;
        self.unknown += other.unknown;
        self.messages += other.messages;
        self.old_reads += other.old_reads;
        self.lost_media += other.lost_media;
        self.rots += other.rots;
        self.damaged += other.damaged;
        self.failed_writes += other.failed_writes;
        self.failed_reads += other.failed_reads;
        self.direct_writes += other.direct_writes;
        self.configured += other.configured;
        self.shortages += other.shortages;
        self.keys_lost += other.keys_lost;
        self.keyless += other.keyless;
        self.leader_changes += other.leader_changes;
        self.unruly += other.unruly;
        self.lost_messages += other.lost_messages;
        self.clear += other.clear;
        self.encrypted += other.encrypted;
        self.repairs += other.repairs;
        self.corrupt += other.corrupt;
        self.laps = self.laps.max(other.laps);
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} replies ({} errors, {} writes), {} takeovers, {} fenced, {} given up, {} crashes, {} pauses, {} cuts, \
             {} connections, {} joins, {} leaves, {} unknown answers of the store, {} messages, {} reads of old openings, {} media \
             lost, {} rotten ({} found damaged), {} failing to write, {} reads failed, {} past the log, {} \
             configured ({} short), {} keys lost ({} refused), {} leaders of the store, {} unruly messages, {} lost, {} in the clear ({} encrypted), {} repaired ({} not), \
             {}.{:03} laps at most",
            self.replies,
            self.errors,
            self.acked,
            self.takeovers,
            self.fenced,
            self.stopped,
            self.crashes,
            self.pauses,
            self.cuts,
            self.connections,
            self.joins,
            self.leaves,
            self.unknown,
            self.messages,
            self.old_reads,
            self.lost_media,
            self.rots,
            self.damaged,
            self.failed_writes,
            self.failed_reads,
            self.direct_writes,
            self.configured,
            self.shortages,
            self.keys_lost,
            self.keyless,
            self.leader_changes,
            self.unruly,
            self.lost_messages,
            self.clear,
            self.encrypted,
            self.repairs,
            self.corrupt,
            self.laps / 1000,
            self.laps % 1000,
        )
    }
}

/// Run one seed.
pub fn run(seed: u64, options: Options) -> Outcome {
    Outcome::of(
        seed,
        ClusterWorld::new(seed, options),
        ClusterWorld::run,
        |world| world.coverage,
    )
}
