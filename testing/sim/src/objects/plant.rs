//! Planted bugs: the driver between machine and fake store misbehaves in one way. Each stands for a
//! bug that the machine could have; what it does is where it is planted, in `world.rs`.

use clap::ValueEnum;

/// One way to misbehave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Plant {
    /// What a new manifest does not need is removed before it is there.
    DeleteBeforeCommit,
    /// A put of data is said to be done and happens after the manifest.
    ManifestBeforeData,
    /// A manifest that begins an epoch is removed.
    DeleteBeginning,
    /// A damaged block comes with a good checksum: the check is skipped.
    SkipChecksum,
    /// A manifest that may be there or not is taken to be there.
    UnknownIsSuccess,
    /// A manifest that is there is taken for another owner's.
    UnknownIsFailure,
    /// A manifest replaces that of another owner.
    NoFence,
    /// An object that is not known is removed, whoever put it.
    DeleteUnknown,
    /// An end never arrives.
    LostEnd,
    /// A part of a block is written over the rest of it.
    TornBlock,
    /// A clone's reference is removed without a manifest that says that the clone is given up.
    SilentEnd,
    /// A put that a full bucket refused is said to be done.
    FullIsDone,
    /// Once a bucket was full, nothing is put any more.
    FullForGood,
    /// When a bucket is full, an object is removed to make room, whoever needs it.
    RoomAtAnyPrice,
    /// A get of slots does not say that it is one.
    UnmarkedSlots,
    /// A frame of a compressed object is said to begin one byte before it does.
    FramesOffByOne,
    /// The lengths of frames are those of another object.
    ForeignFrames,
    /// The checksum of what is stored is looked at, and not that of the block.
    SkipFrameChecksum,
    /// A block is left out when slots become frames.
    DroppedBlock,
    /// When a bucket is full, it is not read either.
    FullForReads,
    /// A clone says that it has inherited what it has written.
    GuessedLineage,
    /// What a write of a part of a block waits for is not got while more reads wait than there are gets.
    FillsLast,
    /// The reference of a clone that is not there is removed without a tombstone.
    NoTombstone,
    /// Of two objects of the map with the same page the earlier one counts.
    OldPages,
    /// A usage table says that more of an object is needed than is.
    WrongUsage,
    /// A page of the map that a write waits for is not got while more reads wait than there are gets.
    PagesLast,
}

impl Plant {
    /// Every bug.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }
}
