//! The node daemon: shards that carry the data path, the control plane, and what a node keeps in its data
//! directory. Drivers around the state machines of `hdcs-core`: decisions are there.

pub mod abort_report;
pub mod acceptor;
pub mod catalogue;
pub mod cluster;
pub mod config;
pub mod control;
pub mod data_dir;
pub mod descriptors;
pub mod events;
pub mod inspect;
mod log_limit;
pub mod logging;
pub mod metrics;
pub mod scrub;
pub mod shard;
