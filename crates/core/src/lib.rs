//! The decisions of HDCS: state machines and formats that do no I/O.
//!
//! `#![no_std]` is the boundary: without `std` there is no file, socket, thread, clock or source
//! of randomness to reach for. Everything that happens outside arrives as an event with a
//! timestamp, and everything that should happen outside leaves as an [`io::Action`].
//!
//! Unsafe code is confined to [`buf`], which owns the aligned memory that devices read and write.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;

pub mod buf;
pub mod cipher;
pub mod codec;
pub mod destage;
pub mod error;
pub mod extent_index;
pub mod format;
pub mod heat;
pub mod home;
pub mod io;
pub mod limits;
pub mod lost;
pub mod objects;
pub mod packing;
pub mod qos;
pub mod read_cache;
pub mod read_counts;
pub mod replay;
pub mod scrub;
pub mod shares;
pub mod tiering;
pub mod turns;
pub mod volume;
pub mod work;
pub mod write_log;
