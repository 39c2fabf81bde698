//! The vocabulary between a state machine and whoever performs its effects.
//!
//! A state machine pushes [`Action`]s; the driver (the node's shard, or the simulator) performs
//! them and returns one [`Completion`] for each action that carries a [`Token`]. Completions may
//! arrive in any order. A driver never returns a short transfer: it continues one until it is
//! whole or reports [`IoError`].

use alloc::vec::Vec;

use crate::base::buf::{Buf, BufMut};
use crate::base::error::{IoError, RequestError};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use crate::node::scrub::{ScrubAt, Scrubbed};
use crate::objects::io::SnapshotError;

/// Monotonic time in nanoseconds since an origin that the driver chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// A duration of so many milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis * 1_000_000)
    }
    /// A duration of so many microseconds.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros * 1_000)
    }
    /// This instant moved by a duration; saturates.
    #[must_use]
    pub const fn plus(self, duration: Self) -> Self {
        Self(self.0.saturating_add(duration.0))
    }
    /// The time from `earlier` to this instant; zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
    /// In whole microseconds.
    pub const fn as_micros(self) -> u64 {
        self.0 / 1_000
    }
    /// In whole milliseconds.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }
}

/// Names one outstanding action of one state machine; echoed in its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Names one request of a frontend; echoed in its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A run of sectors of a volume. Never empty in a request that was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SectorRange {
    /// First sector.
    pub start: u64,
    /// Number of sectors.
    pub count: u64,
}

impl SectorRange {
    /// The run of `count` sectors from `start`.
    pub const fn new(start: u64, count: u64) -> Self {
        Self { start, count }
    }
    /// The run from `start` up to but not including `end`; empty if `end` is not beyond `start`.
    pub const fn between(start: u64, end: u64) -> Self {
        Self {
            start,
            count: end.saturating_sub(start),
        }
    }
    /// The first sector after the run.
    pub const fn end(self) -> u64 {
        self.start + self.count
    }
    /// Whether the run has no sector.
    pub const fn is_empty(self) -> bool {
        self.count == 0
    }
    /// Length in bytes.
    pub const fn bytes(self) -> usize {
        self.count as usize * SECTOR_BYTES
    }
    /// Offset of the first byte on the volume.
    pub const fn byte_offset(self) -> u64 {
        self.start * SECTOR_BYTES as u64
    }
    /// Whether the two runs share a sector.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }
    /// The sectors of both runs.
    #[must_use]
    pub fn intersect(self, other: Self) -> Self {
        Self::between(self.start.max(other.start), self.end().min(other.end()))
    }
    /// First block that the run touches.
    pub const fn first_block(self) -> u64 {
        self.start / BLOCK_SECTORS
    }
    /// Number of blocks that the run touches.
    pub const fn block_count(self) -> u64 {
        if self.count == 0 {
            0
        } else {
            self.end().div_ceil(BLOCK_SECTORS) - self.first_block()
        }
    }
    /// Offset of the run's first byte within its first block.
    pub const fn offset_in_block(self) -> usize {
        (self.start % BLOCK_SECTORS) as usize * SECTOR_BYTES
    }
}

/// Identity of one 4 KiB block of one volume: 24 bits of volume number, 40 bits of block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub u64);

impl BlockKey {
    /// The key of `block` of volume number `volume`; both are within limits.rs.
    pub const fn new(volume: u32, block: u64) -> Self {
        debug_assert!(block < 1 << 40 && volume <= crate::base::limits::VOLUME_NUMBER_MAX);
        Self((volume as u64) << 40 | block)
    }
    /// The volume number.
    pub const fn volume(self) -> u32 {
        (self.0 >> 40) as u32
    }
    /// The block within the volume.
    pub const fn block(self) -> u64 {
        self.0 & ((1 << 40) - 1)
    }
}

/// What a client asks of a volume. Ranges are within [`crate::base::limits::REQUEST_BYTES_MAX`] and
/// within the volume, except for discard, write-zeroes, promote, evict and extents, which may be
/// of any length within the volume.
#[derive(Debug)]
pub enum Request {
    /// Read; answered by [`Reply::Data`].
    Read {
        /// What to read.
        range: SectorRange,
    },
    /// Write. `data` comes from [`crate::base::buf::Pool::alloc_for`], so that its place within its
    /// blocks mirrors the range's.
    Write {
        /// Where to write.
        range: SectorRange,
        /// `range.bytes()` bytes.
        data: Buf,
        /// Durable before the reply, whatever the volume's persist mode.
        fua: bool,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// What to zero.
        range: SectorRange,
        /// Durable before the reply.
        fua: bool,
        /// Keep the backend's space allocated.
        no_hole: bool,
    },
    /// Give the range back; it reads as zeroes afterwards.
    Discard {
        /// What to discard.
        range: SectorRange,
        /// Durable before the reply.
        fua: bool,
    },
    /// Everything acknowledged before is durable when this is answered, and destage keeps it
    /// before everything that follows.
    Flush,
    /// Bring the range into the read cache.
    Promote {
        /// What to bring.
        range: SectorRange,
    },
    /// Drop the clean part of the range from the read cache.
    Evict {
        /// What to drop.
        range: SectorRange,
    },
    /// Describe the range; answered by [`Reply::Extents`].
    Extents {
        /// What to describe.
        range: SectorRange,
        /// In which terms.
        kind: ExtentKind,
    },
    /// Verify a piece of what the volume has on the node's devices; answered by [`Reply::Scrubbed`].
    Scrub {
        /// Which piece: [`ScrubAt::LOG`], [`ScrubAt::CACHE`], or where the last answer says.
        at: ScrubAt,
    },
}

impl Request {
    /// What it is about, if that is a range.
    pub fn range(&self) -> Option<SectorRange> {
        match self {
            Self::Read { range }
            | Self::Write { range, .. }
            | Self::WriteZeroes { range, .. }
            | Self::Discard { range, .. }
            | Self::Promote { range }
            | Self::Evict { range }
            | Self::Extents { range, .. } => Some(*range),
            Self::Flush | Self::Scrub { .. } => None,
        }
    }
}

/// The terms of an extent request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Allocated or not: `base:allocation`.
    Allocation,
    /// Where the data lives: `hdcs:cache`.
    Cache,
}

/// What a run of sectors is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentState {
    /// Holds data.
    Data,
    /// A hole; reads as zeroes.
    Hole,
    /// Allocated; reads as zeroes.
    Zero,
    /// In the write log, not yet in the backend.
    Dirty,
    /// In the read cache, equal to the backend.
    Clean,
    /// Only in the backend.
    Cold,
}

/// One run of sectors in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Which sectors.
    pub range: SectorRange,
    /// In which state.
    pub state: ExtentState,
}

/// The answer to a request.
#[derive(Debug)]
pub enum Reply {
    /// Done, nothing to return.
    Done,
    /// The bytes read.
    Data(Buf),
    /// Consecutive runs from the start of the range asked for; at least one, perhaps not all.
    Extents(Vec<Extent>),
    /// What a piece was found to be.
    Scrubbed(Scrubbed),
}

/// By which call a write is made durable. What that does is up to the device: it bypasses a volatile cache (FUA), or flushes
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// `RWF_DSYNC` on the write.
    #[default]
    Dsync,
    /// The write, then `fdatasync`.
    Fdatasync,
}

impl core::fmt::Display for Durability {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Dsync => "RWF_DSYNC",
            Self::Fdatasync => "write + fdatasync",
        })
    }
}

/// How a write is made durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurableWay {
    /// By which call.
    pub call: Durability,
    /// Whether a thread of its own waits in that call, instead of the kernel's workers.
    pub by_thread: bool,
}

impl core::fmt::Display for DurableWay {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let by = if self.by_thread {
            "writer threads"
        } else {
            "io_uring"
        };
        write!(f, "{} by {by}", self.call)
    }
}

/// An effect for the driver to perform. Offsets and lengths are in bytes. Log and cache offsets
/// and lengths are multiples of [`BLOCK_BYTES`]; backend ones of [`SECTOR_BYTES`].
#[derive(Debug)]
pub enum Action {
    /// Fill `buf` from the write log's device.
    LogRead {
        /// Echoed.
        token: Token,
        /// Where on the log's region.
        offset: u64,
        /// Returned in [`Done::Read`].
        buf: BufMut,
        /// What was read there before is not as it should be. Where others have the same log, it may be got from them.
        is_bad: bool,
    },
    /// Write to the log's device; complete only when durable.
    LogWrite {
        /// Echoed.
        token: Token,
        /// Where on the log's region.
        offset: u64,
        /// Written one after another.
        data: Vec<Buf>,
        /// How it is made durable; none: as the driver pleases.
        way: Option<DurableWay>,
    },
    /// Keep the log's superblock in another place than its device, which takes no writes any more; complete
    /// only when durable. It replaces the one that was kept before.
    KeepSuperblock {
        /// Echoed.
        token: Token,
        /// One block.
        block: Buf,
    },
    /// Fill `buf` from the cache device.
    CacheRead {
        /// Echoed.
        token: Token,
        /// Where on the cache device.
        offset: u64,
        /// Returned in [`Done::Read`].
        buf: BufMut,
    },
    /// Write to the cache device; complete only when durable if `durable`.
    CacheWrite {
        /// Echoed.
        token: Token,
        /// Where on the cache device.
        offset: u64,
        /// Written one after another.
        data: Vec<Buf>,
        /// Whether completion means durability.
        durable: bool,
    },
    /// Fill `buf` from the backend.
    BackendRead {
        /// Echoed.
        token: Token,
        /// Where on the volume.
        offset: u64,
        /// Returned in [`Done::Read`].
        buf: BufMut,
    },
    /// Write to the backend; durable after a later [`Action::BackendFlush`].
    BackendWrite {
        /// Echoed.
        token: Token,
        /// Where on the volume.
        offset: u64,
        /// Written one after another.
        data: Vec<Buf>,
    },
    /// Make a range of the backend read as zeroes; with `unmap`, give its space back.
    BackendZero {
        /// Echoed.
        token: Token,
        /// Where on the volume.
        offset: u64,
        /// How many bytes.
        bytes: u64,
        /// Whether its space may be given back.
        unmap: bool,
    },
    /// Make every completed write to the backend durable.
    BackendFlush {
        /// Echoed.
        token: Token,
    },
    /// Ask the backend for its allocation; answered by [`Done::Extents`].
    BackendExtents {
        /// Echoed.
        token: Token,
        /// Which sectors.
        range: SectorRange,
    },
    /// A log that is being replayed writes these sectors to the backend again; the last life may have begun that. Carries
    /// no token; nothing comes back.
    BackendUnsettled {
        /// Which sectors.
        range: SectorRange,
    },
    /// Answer a request. Carries no token; nothing comes back.
    Reply {
        /// Which request.
        request: RequestId,
        /// The answer.
        result: Result<Reply, RequestError>,
    },
}

/// What an action brought.
#[derive(Debug)]
pub enum Done {
    /// A write, zero or flush.
    Written,
    /// A read: the buffer of the action, filled.
    Read(BufMut),
    /// The backend's allocation: consecutive [`ExtentState::Data`], `Hole` or `Zero` runs.
    Extents(Vec<Extent>),
    /// A snapshot was not made or forgotten; nothing failed.
    Refused(SnapshotError),
}

/// The end of one action.
#[derive(Debug)]
pub struct Completion {
    /// Of which action.
    pub token: Token,
    /// How it ended.
    pub result: Result<Done, IoError>,
}

const _: () = assert!(BLOCK_BYTES == BLOCK_SECTORS as usize * SECTOR_BYTES);
