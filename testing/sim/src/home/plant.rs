//! Planted bugs: the driver between the local store and its fakes misbehaves in one way. Each stands for a bug that
//! the local store could have; what it does is where it is planted, in `world.rs` and `world/planted.rs`.

use clap::ValueEnum;

/// One way to misbehave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Plant {
    /// Pages of the map are written before the data that they name is durable.
    MapBeforeData,
    /// The backend is said to be flushed and is not: blocks become clean before they are there.
    CleanBeforeFlush,
    /// A copy has what is in the local store when it is written to the backend.
    NoCopyFirst,
    /// Of a block that is written in part, the rest is not filled.
    NoFill,
    /// A page is written together with its copy.
    CopyAtOnce,
    /// What is clean is trusted although the write log is another one.
    TrustClean,
    /// That the backend is between two states is never recorded.
    BetweenUnsaid,
    /// An end never arrives.
    LostEnd,
    /// A sync does nothing.
    SyncLie,
    /// Checksums get to the store only when the flush was answered that covers them.
    SumsAfterAnswer,
    /// Some changes of the table of checksums are lost.
    SumsLost,
    /// Data is not compared with its checksums.
    NoVerify,
    /// The checksums are believed although the write log is another one, or let writes past it.
    TrustSums,
    /// The local store is not told what the log writes again.
    UnsettledUnsaid,
    /// A flush that no client has asked for makes a moment of the middle of a generation: what two tiers
    /// once did to each other.
    FlushOfNobody,
    /// A snapshot is made of what the backend has when it is asked for.
    HeldBeforeTier,
    /// Another tier begins while a snapshot is made.
    HeldAndWritten,
    /// Some sectors are not encrypted.
    StoredPlain,
    /// Some sectors are decrypted as if they were others.
    DecryptedAsAnother,
    /// Pages of the map that a local store grows by are not written.
    NewPagesLost,
    /// The backend is cut before the superblock of the local store says so.
    BackendCutFirst,
    /// The backend is said to be cut, and keeps what was there.
    BackendKeepsTail,
    /// A change of size waits for no tier to a backend that shows with it what it was given.
    ResizeShowsPart,
    /// A local store that nobody asks for anything is not woken.
    SleepsThrough,
    /// A flush is answered when the pages are durable, and their copies are written later.
    AnsweredBeforeCopies,
    /// Nobody compares the pages of the map with what the superblock knows of them.
    MapUnchecked,
    /// Tags of superblocks and pages are not compared.
    ForgedMapTaken,
    /// Tags of sectors are not compared.
    ForgedSectorsTaken,
}

impl Plant {
    /// Every bug.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }

    /// Whether it is in changes of size.
    pub fn is_of_sizes(self) -> bool {
        matches!(
            self,
            Self::NewPagesLost
                | Self::BackendCutFirst
                | Self::BackendKeepsTail
                | Self::ResizeShowsPart
        )
    }

    /// Whether a write that the device has lost shows it.
    pub fn is_of_lies(self) -> bool {
        matches!(self, Self::AnsweredBeforeCopies | Self::MapUnchecked)
    }

    /// Whether it is in snapshots.
    pub fn is_of_holds(self) -> bool {
        matches!(self, Self::HeldBeforeTier | Self::HeldAndWritten)
    }
}
