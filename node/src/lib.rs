//! The effects of HDCS: thin drivers around the state machines of `hdcs-core`, the frontends that
//! clients speak to, and the control plane. Decisions are in `core`; nothing here makes one.

pub mod backends;
pub mod device;
pub mod filters;
pub mod frontends;
pub mod shard;
