//! A small, fixed cluster: nodes that a file names, and records of groups in a directory that all of them see. It is
//! experimental.
//!
//! ```text
//!   [cluster] of each node ──► which nodes there are (`crate::config::cluster`)
//!   DIR/VOLUME/spec-N.json ──► what a node needs to hold a copy and to serve ([`spec`])
//!   DIR/VOLUME/record-N.json ► whose copies count, and who may open the log ([`records`])
//! ```

pub mod joining;
pub mod names;
pub mod records;
pub mod spec;

use hdcs_api::groups::{Ack, WhenShort as ShortWord};
use hdcs_core::replication::record::{AckLevel, WhenShort};

/// An ack level as files and the API name it.
pub const fn ack_word(level: AckLevel) -> Ack {
    match level {
        AckLevel::One => Ack::One,
        AckLevel::Majority => Ack::Majority,
        AckLevel::All => Ack::All,
    }
}

/// The ack level that is named so.
pub const fn ack_level(word: Ack) -> AckLevel {
    match word {
        Ack::One => AckLevel::One,
        Ack::Majority => AckLevel::Majority,
        Ack::All => AckLevel::All,
    }
}

/// What becomes of writes for want of members, as files and the API name it.
pub const fn short_word(what: WhenShort) -> ShortWord {
    match what {
        WhenShort::Wait => ShortWord::Wait,
        WhenShort::Error => ShortWord::Error,
    }
}

/// What is named so.
pub const fn when_short(word: ShortWord) -> WhenShort {
    match word {
        ShortWord::Wait => WhenShort::Wait,
        ShortWord::Error => WhenShort::Error,
    }
}
