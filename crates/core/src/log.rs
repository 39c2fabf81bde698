//! The write log: appending and group commit, replay, the index of what is dirty, and destage in order.

pub mod ahead;
pub mod budget;
mod checksums;
pub mod destage;
pub mod extent_index;
pub mod index_cap;
pub mod lost;
pub mod packing;
pub mod queue;
pub mod replay;
pub mod write_log;
