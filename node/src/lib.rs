//! The effects of HDCS: thin drivers around the state machines of `hdcs-core`, the frontends that
//! clients speak to, and the control plane. Decisions are in `core`; nothing here makes one.

pub mod abort_report;
pub mod acceptor;
pub mod access;
pub mod backends;
pub mod catalogue;
pub mod cli;
pub mod codec;
pub mod config;
pub mod control;
pub mod crypt;
pub mod data_dir;
pub mod descriptors;
pub mod device;
pub mod events;
pub mod filters;
pub mod frontends;
mod image_format;
pub mod inspect;
mod log_limit;
pub mod logging;
pub mod memory;
pub mod metrics;
pub mod scrub;
pub mod shard;
pub mod stores;
