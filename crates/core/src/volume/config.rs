//! What a volume is and how it behaves.

use crate::base::codec::{Codec, Method};
use crate::base::io::Nanos;

/// When a write counts as durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persist {
    /// Before its acknowledgement.
    OnWrite,
    /// At the client's next flush; what is not yet durable is bounded in bytes and age.
    OnFlush,
    /// On write until the client's first flush shows that it knows barriers, then on flush.
    Auto,
}

/// What a write gets when the log is full and the backend takes no data, and what everybody who waits for the log gets
/// while its device does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It waits.
    Wait,
    /// It fails: with [`crate::base::error::RequestError::LogFull`], or with [`crate::base::error::RequestError::Io`] if it is the
    /// log's device that does not answer.
    Error,
}

/// What becomes of a volume whose log's device takes no writes any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFailure {
    /// It refuses writes.
    #[default]
    ReadOnly,
    /// What the log holds goes to the backend, and then what is written, past the log.
    PassThrough,
}

/// What becomes of a discard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discard {
    /// The range reads as zeroes from then on, and the backend gets its space back.
    #[default]
    Pass,
    /// It is acknowledged, and changes nothing.
    Ignore,
}

/// What the cache does with what is written and read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Writes are acknowledged from the log and destaged later.
    #[default]
    WriteBack,
    /// Writes are acknowledged by the backend, and kept in the cache.
    WriteThrough,
    /// Writes are acknowledged by the backend, and not kept.
    WriteAround,
    /// Writes are refused; reads are cached.
    ReadOnly,
    /// Writes are acknowledged by the backend; reads neither look into the cache nor fill it.
    PassThrough,
}

impl Policy {
    /// Whether writes go past the log.
    pub const fn is_direct(self) -> bool {
        !matches!(self, Self::WriteBack)
    }
}

/// What a volume is and how it behaves.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// Number of the volume on its node, never reused: its identity in the read cache.
    pub number: u32,
    /// Identity of the volume everywhere.
    pub uuid: [u8; 16],
    /// Size, a multiple of 512.
    pub bytes: u64,
    /// Size of the log's region on its device, a multiple of 4096.
    pub log_bytes: u64,
    /// What the cache does with what is written and read. A change takes its time: see
    /// [`super::Volume::policy`].
    pub policy: Policy,
    /// When a write counts as durable, under write-back.
    pub persist: Persist,
    /// How data is compressed in the write log, if it is.
    pub compression: Option<Method>,
    /// The algorithms.
    pub codec: &'static dyn Codec,
    /// What a write gets when nothing can be taken.
    pub when_full: WhenFull,
    /// What becomes of it when its log's device takes no writes any more.
    pub log_failure: LogFailure,
    /// What becomes of a discard.
    pub discard: Discard,
    /// Most bytes acknowledged but not durable, under persist-on-flush.
    pub unpersisted_bytes_max: u64,
    /// Longest time that an acknowledged write stays not durable, under persist-on-flush.
    pub unpersisted_age_max: Nanos,
    /// Deadline of destage: the oldest dirty data is never meant to be older.
    pub dirty_age_max: Nanos,
    /// Below this share of the log in use, in percent, destage waits for data to age.
    pub dirty_ratio_min: u8,
    /// At this share of the log in use, in percent, writes begin to be slowed.
    pub dirty_ratio_max: u8,
    /// Backend writes in flight at most during destage.
    pub destage_depth_max: usize,
    /// A sequential read stream longer than this stops filling the read cache.
    pub sequential_cutoff_bytes: u64,
    /// A line goes to the SSD tier once it was read so often of late; 1 is at the first read.
    pub promote_hits: u8,
    /// Pins and warm-ups are filled no faster than this many bytes a second.
    pub fill_rate_max_bytes_s: u64,
    /// Largest read-ahead of a sequential stream; 0 turns it off.
    pub read_ahead_bytes_max: u64,
    /// Entries that the log holds at most, however small they are stored: bounds its index. Not fewer than it
    /// has blocks.
    pub log_entries_max: u64,
    /// Memory for recently logged data, so that reading or destaging it needs no device.
    pub resident_bytes_max: u64,
    /// Whether the backend answers `BackendExtents`.
    pub backend_extents: bool,
    /// Whether what is written to the backend becomes visible to others and durable all at once, at
    /// a flush: then a generation of destage may hold sync points.
    pub backend_atomic: bool,
    /// The volume counts as degraded while a backend operation has taken longer than this.
    pub backend_answer_max: Nanos,
    /// The same of an operation of the log's device. A volume that closes waits for none of them longer than this, and
    /// under [`WhenFull::Error`] no client does. The largest time is none.
    pub log_answer_max: Nanos,
}
