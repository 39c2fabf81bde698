//! The command line.
pub mod size;
