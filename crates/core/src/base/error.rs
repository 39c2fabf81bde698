//! Every error of the core. A bug asserts instead; what input, device or peer can cause is here.

use thiserror::Error;

use crate::base::limits::LOST_RANGES_MAX;

/// How a device or backend failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IoError {
    /// The medium or transport reported a failure; what it holds now is unknown.
    #[error("input/output error")]
    Failed,
    /// What it gave back does not match its checksum.
    #[error("data failed its checksum")]
    Corrupt,
    /// No space left on the device or in the quota.
    #[error("no space left on device")]
    NoSpace,
    /// The device or backend is not there at present.
    #[error("device or backend is not reachable")]
    Unreachable,
    /// Another owner has taken the backend or the group of the log over, or it is gone for good: nothing that this one asks
    /// will ever be done.
    #[error("another owner has taken the volume over, or it is gone for good")]
    Fenced,
}

/// Why a request was refused or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    /// The range is empty, unaligned, or beyond the end of the volume.
    #[error("range is outside the volume or not a whole number of 512-byte sectors")]
    BadRange,
    /// The data could not be read or made durable.
    #[error("input/output error")]
    Io,
    /// A checksum did not match and no good copy is left.
    #[error("data failed its checksum and no good copy is left")]
    Corrupt,
    /// The log is full, the backend does not take data, and the volume's choice is `error`.
    #[error("the write log is full and the backend takes no data")]
    LogFull,
    /// The volume refuses writes because an earlier log write failed; reopen it to recover.
    #[error("the volume is read-only after a failed log write; reopen it to recover")]
    ReadOnly,
    /// The volume refuses writes because dirty data in its log is damaged.
    #[error(
        "the volume is inconsistent: dirty data in its write log is damaged; writes are refused until it reads well"
    )]
    Inconsistent,
    /// The volume's policy is read-only.
    #[error("the volume's policy is read-only")]
    Policy,
    /// Another owner has taken the backend over, or it is gone for good.
    #[error(
        "the backend is lost to this node: another owner has taken it over, or it is gone for good"
    )]
    Fenced,
    /// The volume is closing.
    #[error("the volume is closing")]
    Closing,
    /// No memory for another buffer within the cap; try again.
    #[error("out of buffers")]
    NoBuffers,
}

/// Why an on-disk structure was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    /// The magic is not ours: the place was never formatted, or belongs to something else.
    #[error("not an HDCS structure (magic does not match)")]
    Magic,
    /// Written by a newer program.
    #[error(
        "made by a newer program (format {found}, this program knows {supported}): use that program"
    )]
    Newer {
        /// On the medium.
        found: u16,
        /// The newest that this program reads.
        supported: u16,
    },
    /// A checksum does not match its content.
    #[error("checksum does not match")]
    Checksum,
    /// A field is outside its bounds.
    #[error("field `{0}` is out of bounds")]
    Field(&'static str),
    /// It is a log, and not of a volume.
    #[error("what stands on the log is of kind {found}, not a volume")]
    Holds {
        /// What it says.
        found: u16,
    },
    /// What was acknowledged last is not there.
    #[error(
        "it is older than another structure says: the device has lost a write that it had acknowledged"
    )]
    Stale,
    /// Its checksum is right, and nobody who has the key has written it.
    #[error("it does not authenticate: somebody without the volume's key has written it")]
    Forged,
    /// It belongs to another volume or device.
    #[error("identity does not match: it belongs to another volume or device")]
    Identity,
}

/// Why a volume could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum OpenError {
    /// Neither superblock of the log can be used; the first one's reason.
    #[error("write log: no usable superblock: {0}")]
    Superblock(FormatError),
    /// The checksum of a superblock is right, and nobody who has the key has written it.
    #[error(
        "write log: its superblock does not authenticate: somebody without the volume's key has written it: find out who \
         can write to its device, and put the superblocks back that were there; or give up what was not destaged \
         (`hdcs volume open NAME --discard-dirty`)"
    )]
    Forged,
    /// Acknowledged data in the middle of the log does not match its checksum.
    #[error("write log: acknowledged data at log position {position} is corrupt")]
    CorruptLog {
        /// Log position in blocks of the first span that is lost.
        position: u64,
    },
    /// So much of the log is damaged that what was lost cannot be recorded.
    #[error(
        "write log: its data is damaged in too many places: {ranges} ranges of sectors are lost, of which {max} can be \
         recorded", max = LOST_RANGES_MAX
    )]
    LostTooMuch {
        /// How many.
        ranges: usize,
    },
    /// A newer program has written to the log.
    #[error(
        "write log: data at log position {position} is compressed by method {method}, which this version does not \
         know: open the volume with the version that wrote it"
    )]
    Method {
        /// Log position in blocks of its span.
        position: u64,
        /// Its number.
        method: u8,
    },
    /// The log holds what a volume cannot read.
    #[error(
        "write log: log position {position} holds a record, which is not a volume's: open it with the program that \
         wrote it"
    )]
    Record {
        /// Log position in blocks of its span.
        position: u64,
    },
    /// A newer program has written to the log.
    #[error(
        "write log: log position {position} holds an entry of kind {kind}, which this version does not know: open the \
         volume with the version that wrote it"
    )]
    Kind {
        /// Log position in blocks of its span.
        position: u64,
        /// Its number.
        kind: u8,
    },
    /// The log could not be read or written.
    #[error("write log: {0}")]
    Io(IoError),
}
