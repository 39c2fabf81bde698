//! What the volumes of a node share, and who of their clients gets how much of it.

pub mod cache_identity;
pub mod common_window;
pub mod log_space;
pub mod opening;
pub mod placement;
pub mod qos;
pub mod readmission;
pub mod resize;
pub mod scrub;
pub mod shares;
pub mod snapshot;
pub mod start;
pub mod stop;
pub mod tier_out;
pub mod turns;
