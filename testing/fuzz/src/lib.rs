//! Fuzz targets: functions of bytes that must not panic, hang, or leave anything behind.
//!
//! `fuzz_targets/` gives them to libFuzzer (`run.sh`); `tests/seeded.rs` gives them seeded
//! mutations of good input, on a stable compiler, in bounded time.

mod clients;
mod formats;
mod heat;
mod messenger;
mod nbd;
mod objects;
mod replay;

pub use clients::{clients, clients_example};
pub use formats::formats;
pub use heat::heat;
pub use messenger::{messages, messages_example, messenger, messenger_example};
pub use nbd::{nbd, nbd_example};
pub use objects::objects;
pub use replay::{replay, replay_config};
