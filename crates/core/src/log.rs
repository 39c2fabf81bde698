//! The write log: appending and group commit, replay, the index of what is dirty, and destage in order.

pub mod destage;
pub mod extent_index;
pub mod lost;
pub mod packing;
pub mod replay;
pub mod write_log;
