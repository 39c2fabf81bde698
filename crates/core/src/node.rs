//! What the volumes of a node share, and who of their clients gets how much of it.

pub mod qos;
pub mod resize;
pub mod scrub;
pub mod shares;
pub mod turns;
