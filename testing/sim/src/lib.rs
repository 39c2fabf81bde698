//! The deterministic simulator: the production core on fake devices, a fake backend and a fake clock.
//!
//! One seed decides everything: how volumes are configured, what clients ask, what fails when, in
//! which order completions arrive, and where power is cut. A run of a seed is the same every time;
//! the hash of its trace says so. See docs/TESTING.md for what is simulated and what is checked.
//!
//! * [`scenario`] draws a run from a seed, [`run`] performs it, [`world`] drives the core; [`outcome`] is what
//!   comes of it.
//! * [`disk`], [`backend`] and [`engine`] are what the world is made of; they lie only as real ones may.
//! * [`model`] keeps the history of what clients did.
//! * `check_*` say what may be seen; each is a file of its own and tested by itself.
//! * [`objects`] is another world: volumes over object stores. [`home`] is a third: a local store alone. [`ranges`] is a
//!   fourth: long ranges on large volumes. [`cluster`] is a fifth: nodes with copies of one log.
//! * [`plant`] are bugs that prove that the checkers bite.

pub mod backend;
pub mod check_backend;
pub mod check_benefit;
pub mod check_bounds;
pub mod check_cost;
pub mod check_heat;
pub mod check_log;
pub mod check_lost;
pub mod check_pins;
pub mod check_policy;
pub mod check_progress;
pub mod check_promotion;
pub mod check_reads;
pub mod check_recovery;
pub mod check_snapshot;
pub mod check_trouble;
pub mod cluster;
pub mod content;
pub mod disk;
pub mod engine;
pub mod home;
pub mod lz4;
pub mod model;
pub mod objects;
pub mod outcome;
pub mod plant;
pub mod ranges;
pub mod run;
pub mod scenario;
pub mod toy_cipher;
pub mod trace;
pub mod violation;
pub mod workload;
pub mod world;
