//! Every interleaving of a replicated log's machines, for three nodes and a few spans: what the machines in
//! `hdcs_core::replication` do is explored as it is, over media, links and a store that may do whatever real ones may.
//!
//! What is explored is a [`world::Scope`]. That the checks see something is shown by planted bugs ([`plant::Plant`]).

pub mod checks;
pub mod clients;
pub mod disk;
pub mod node;
pub mod plant;
pub mod world;
