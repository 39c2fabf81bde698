//! The decisions of HDCS: state machines and formats that do no I/O.
//!
//! `#![no_std]` is the boundary: without `std` there is no file, socket, thread, clock or source
//! of randomness to reach for. Everything that happens outside arrives as an event with a
//! timestamp, and everything that should happen outside leaves as an [`base::io::Action`].
//!
//! Unsafe code is confined to [`base::buf`], which owns the aligned memory that devices read and write.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;

pub mod base;
pub mod cache;
pub mod format;
pub mod local;
pub mod log;
pub mod node;
pub mod objects;
pub mod replication;
pub mod volume;
pub mod wire;
