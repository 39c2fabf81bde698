//! What a volume asks of the outside, and who performs it.

use super::compression::Packed;
use super::scrub;
use crate::base::io::{RequestId, SectorRange};
use crate::cache::SsdRead;
use crate::node::scrub::ScrubAt;

/// What an outstanding action is for.
#[derive(Debug)]
pub(super) enum Op {
    Replay {
        chunk: u64,
    },
    OpeningSuperblock,
    Span {
        end: u64,
    },
    ReadLog {
        read: usize,
        range: SectorRange,
        position: u64,
        packed: Option<Packed>,
        /// How often it was read before.
        tries: u8,
    },
    ReadSsd {
        read: usize,
        range: SectorRange,
        permission: SsdRead,
    },
    /// A read that was given up; what it brings is not used.
    LateSsd {
        permission: SsdRead,
    },
    /// An operation of the log that was given up.
    LateLog,
    Fetch {
        fetch: usize,
    },
    FetchPart {
        read: usize,
        part: SectorRange,
    },
    Extents {
        id: RequestId,
        range: SectorRange,
    },
    DestageRead {
        item: usize,
        part: usize,
        position: u64,
        /// How often it was read before.
        tries: u8,
    },
    DestageChunk {
        position: u64,
    },
    DestageWrite {
        item: usize,
    },
    DestageFlush,
    DirectWrite {
        number: u64,
    },
    DirectFlush,
    DirectMark,
    EndMark,
    Superblock,
    ClosingSuperblock,
    ScrubLog(scrub::LogPiece),
    ScrubHeal(scrub::LogPiece),
    ScrubCache {
        id: RequestId,
        permission: SsdRead,
        next: ScrubAt,
    },
}

impl Op {
    /// Whether the backend performs it.
    pub(super) fn is_of_backend(&self) -> bool {
        matches!(
            self,
            Self::Fetch { .. }
                | Self::FetchPart { .. }
                | Self::Extents { .. }
                | Self::DestageWrite { .. }
                | Self::DestageFlush
                | Self::DirectWrite { .. }
                | Self::DirectFlush
        )
    }

    /// Whether the log's device performs it, or whoever keeps a superblock beside it.
    pub(super) fn is_of_log(&self) -> bool {
        matches!(
            self,
            Self::Replay { .. }
                | Self::OpeningSuperblock
                | Self::Span { .. }
                | Self::ReadLog { .. }
                | Self::DestageRead { .. }
                | Self::DestageChunk { .. }
                | Self::DirectMark
                | Self::EndMark
                | Self::Superblock
                | Self::ClosingSuperblock
                | Self::ScrubLog(_)
                | Self::ScrubHeal(_)
                | Self::LateLog
        )
    }

    /// Whether it is a read of the log's device for what is served or destaged, or was one before it was given up.
    pub(super) fn is_read_of_log(&self) -> bool {
        matches!(
            self,
            Self::ReadLog { .. }
                | Self::DestageRead { .. }
                | Self::DestageChunk { .. }
                | Self::ScrubLog(_)
                | Self::LateLog
        )
    }

    /// Whether destage waits for it, and with destage whoever waits for what a log has that was given up.
    pub(super) fn is_read_for_destage(&self) -> bool {
        matches!(self, Self::DestageRead { .. } | Self::DestageChunk { .. })
    }

    /// Whether it is of no use any more once the log was given up.
    pub(super) fn is_of_no_use_once_given_up(&self) -> bool {
        matches!(self, Self::Span { .. } | Self::EndMark | Self::LateLog)
    }

    /// Whether a client waits for it alone, and is not to wait for a silent log. A write to the ring is waited for:
    /// where it lies nothing else may be written before.
    pub(super) fn is_given_up_when_late(&self) -> bool {
        matches!(self, Self::ReadLog { .. } | Self::ScrubLog(_))
    }
}
