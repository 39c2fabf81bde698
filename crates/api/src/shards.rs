//! What shards and the spans of write logs are counted by: for whoever asks what a request costs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What one thread of the data path has done since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShardCounters {
    /// Its number.
    #[serde(default)]
    pub number: u64,
    /// The processor that it keeps to, if it does.
    #[serde(default)]
    pub processor: Option<u64>,
    /// Volumes on it.
    #[serde(default)]
    pub volumes: u64,
    /// NBD connections open there.
    #[serde(default)]
    pub connections: u64,
    /// The longest turn of its loop in the last 30 to 60 seconds.
    #[serde(default)]
    pub longest_turn_us: u64,
    /// Turns of its loop.
    pub turns: u64,
    /// How often it slept and was woken.
    pub wakeups: u64,
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Completions that these brought.
    pub completions: u64,
    /// What other threads told it: commands of the control plane and of other shards, and that the SSD tier or memory
    /// has changed.
    #[serde(default)]
    pub messages: u64,
    /// Receives of NBD connections that ended; each may bring several requests.
    pub receives: u64,
    /// Sends that ended; each may carry several replies.
    pub sends: u64,
    /// Replies that were sent.
    pub replies: u64,
    /// From the turns in which the sending of replies began until those in which it ended, all replies together.
    pub reply_us: u64,
    /// Processor time of the thread in the program. Workers that the kernel has for it are not in it.
    pub cpu_user_us: u64,
    /// The same in the kernel.
    pub cpu_system_us: u64,
}

/// Entries of a write log, and the time that they spent in spans.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SpanCounters {
    /// Writes, zeroes and discards whose spans became durable.
    pub entries: u64,
    /// At the beginning of each span's write: spans that were being written, this one included, all together.
    pub in_flight: u64,
    /// From when entries were accepted until their span was sealed, all together.
    pub open_us: u64,
    /// From when their span was sealed until it was durable, all together.
    pub device_us: u64,
}
