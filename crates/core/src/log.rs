//! The write log: appending and group commit, replay, the index of what is dirty, destage in order, and the
//! table of clients of a log of records.

pub mod ahead;
pub mod budget;
mod checksums;
pub mod clients;
pub mod destage;
pub mod extent_index;
pub mod index_cap;
pub mod lost;
pub mod packing;
pub mod queue;
pub mod replay;
pub mod write_log;
