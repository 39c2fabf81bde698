//! Planted bugs: the driver between core and fake world misbehaves in one way.
//!
//! Each stands for a bug that the core could have. That the checkers catch every one of them is a
//! test. Here is only when a bug strikes; what it does is where it is planted, in `world.rs`.

use clap::ValueEnum;
use fastrand::Rng;

/// One way to misbehave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Plant {
    /// A log write is said to be done long before it is durable: an early acknowledgement.
    EarlyLogAck,
    /// A log write whose sync is still to come is said to be durable.
    UnsyncedLogWrite,
    /// A log write is said to be done and never happens.
    LostLogWrite,
    /// What a volume in storage mode reads comes from the backend below its store.
    ReadPastStore,
    /// A flush of a volume in storage mode ends before its store has made anything durable.
    FlushPastStore,
    /// A local store tiers out while its volume is opened, before the log has written again what a crash took.
    HastyTier,
    /// After a log was lost, the local store is opened as if that were still before it.
    StaleBefore,
    /// The allocation of a volume in storage mode is that of the backend below its store.
    ExtentsPastStore,
    /// A local store that a cut which was left has kept larger than its volume is said to be cut, and is not.
    UncutStore,
    /// A volume in storage mode that is to close once all is tiered out closes when all is destaged.
    UntieredClose,
    /// The same closes after one tier, whatever has come meanwhile.
    DirtyClose,
    /// A snapshot of a volume in storage mode is taken without a tier.
    UntieredSnapshot,
    /// A local store is let go before the backend has taken the snapshot for which it is held.
    UnheldSnapshot,
    /// The object of a snapshot is said to be stored, and is not.
    SwallowedSnapshot,
    /// Objects with data are removed that only snapshots need.
    SweptSnapshot,
    /// A log write is said to be done when only its first half is.
    TornLogWrite,
    /// A backend flush is said to be done and flushes nothing: retired before it was durable.
    FlushLie,
    /// A write with FUA is acknowledged when it is durable, and orders nothing.
    ForgottenFua,
    /// A backend write is said to be done and happens much later, past the flush.
    LateBackendWrite,
    /// A backend write is said to be done when only its first half is.
    TornBackendWrite,
    /// Zeroes never reach the backend.
    LostZero,
    /// Durable writes to the cache device are swallowed, and logs do not say what they wait for: invalidations are
    /// forgotten.
    LostInvalidation,
    /// Logs do not say which invalidations they have waited for.
    ForgottenTie,
    /// A byte of a reply is wrong: a skipped checksum.
    CorruptReply,
    /// A read is answered from the backend, past the log.
    StaleReply,
    /// A request is answered twice.
    ReplyTwice,
    /// A request is never answered.
    ReplyNever,
    /// A buffer is never given back.
    LeakBuffer,
    /// A completion never arrives.
    LostCompletion,
    /// That another owner has the backend is taken for a failure that passes.
    IgnoredFence,
    /// The SSD tier is readmitted under the identity that its medium carries.
    StaleReadmission,
    /// What is written to an atomic backend is durable there before a flush.
    EarlyCommit,
    /// A backend is said to be atomic and is not.
    FalseAtomicity,
    /// A promotion is answered and brings nothing.
    IdlePromotion,
    /// A promotion brings what the backend held when it began.
    StalePromotion,
    /// A volume whose log is lost keeps its number in the cache.
    KeptNumber,
    /// A volume is opened with another key than before.
    OtherKey,
    /// What is decompressed is something else.
    ConfusedCodec,
    /// What was unpacked of the SSD tier is not compared with what was packed.
    UnseenDamage,
    /// Of a packed segment another line is unpacked.
    SwappedLines,
    /// A snapshot is taken before what it has to hold is destaged.
    HastySnapshot,
    /// The backend is said to have a write that went past the log, and gets it much later.
    EarlyDirectAck,
    /// Writes are said to go past the log while it still holds something.
    HastySwitch,
    /// After the return to write-back, a flush forgets what went past the log.
    ForgottenFlush,
    /// A client's flush that fails is said to be done.
    DeafFlush,
    /// A flush that a client waits for fails, which the client is told, and takes what destage has written beside it.
    UndoubtedFlush,
    /// The log is said to say that writes go past it, and does not.
    ForgottenMark,
    /// An opening takes back that the backend may hold what is not flushed, before it is.
    HastyUnmark,
    /// An invalidation for a write that goes past the log is said to be durable long before it is.
    LateInvalidation,
    /// A snapshot shows what an atomic backend has not made durable yet.
    LooseSnapshot,
    /// While a backend without atomic flushes takes a snapshot, writes go on to it.
    LeakySnapshot,
    /// A clone is said to have inherited what it has written.
    GuessedLineage,
    /// What a clone has written is cached as its origin's.
    MisplacedFill,
    /// A scrub is answered and has looked at nothing.
    IdleScrub,
    /// A discard that is to be ignored zeroes what it names.
    ForcedDiscard,
    /// A pin is accepted and forgotten.
    ForgottenPin,
    /// Pins are taken beyond what they may have.
    HoardedPins,
    /// A warm-up leaves something out.
    ForgottenWarmUp,
    /// A superblock is said to be kept beside the log's failed device, and is not.
    LostKeeping,
    /// It is said to be kept long before it is.
    LateKeeping,
    /// An opening does not look for a superblock beside the log's device.
    StaleLog,
    /// What is dear to read again is not held on to.
    BlindWeights,
    /// The SSD tier is filled beyond its marks.
    IgnoredMarks,
    /// Another shard is not told of what its volumes wait for.
    UntoldShard,
    /// A shard uses memory for indexes that it has said it does not use any more.
    HoardedIndex,
    /// A volume that goes to another shard leaves what the DRAM tier has of it.
    StayingFrames,
    /// Lines go to the SSD tier whose reads were not counted.
    UncountedReads,
    /// What is cut off with the end of a volume stays in the cache.
    KeptCut,
    /// A volume grows while the older superblock of its log still names what was cut off.
    OlderTail,
    /// A read waits until nothing of its range is being written.
    StarvedRead,
    /// Replies wait for as long as requests go on arriving.
    ArrivalsFirst,
    /// A read of the log that has brought wrong bytes once does so again.
    StuckRead,
    /// Nobody watches how long a log's device takes.
    UnwatchedLog,
    /// Clients wait for a log that does not answer, though they are to be told of an error.
    UntoldWaiters,
    /// While the reads of a log are not answered, its writes are not either, and clients are told of an error.
    ReadsHoldWrites,
    /// A volume that closes waits for its log however long that takes.
    PatientClose,
    /// A volume is opened again while its log's device owes answers.
    HastyReopen,
    /// A read of an opening that has brought wrong bytes once does so again: the first look is believed.
    StuckReplay,
    /// A log moves its tail past what is damaged and does not record what was lost.
    ForgottenLoss,
    /// Only one of the superblocks of an opening records what its damaged log has lost.
    LoneLoss,
    /// The opening of a damaged log does not record how far it is known to reach.
    ForgottenHead,
    /// A log at rest does not say where it ends.
    UnmarkedEnd,
    /// The tags of superblocks of a log are not compared.
    ForgedLogTaken,
    /// A read of what is lost is answered with what the backend has.
    ShownLoss,
    /// A log is told of more space before that is prepared.
    HastyPreparation,
    /// What is taken from a log is needed by its older superblock.
    HastyGift,
}

impl Plant {
    /// Every bug.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }

    /// It strikes one time in so many.
    fn one_in(self) -> u32 {
        match self {
            Self::LostInvalidation
            | Self::ForgottenFua
            | Self::ForgottenTie
            | Self::IgnoredFence
            | Self::StaleReadmission
            | Self::FalseAtomicity
            | Self::IdlePromotion
            | Self::StalePromotion
            | Self::KeptNumber
            | Self::OtherKey
            | Self::ConfusedCodec
            | Self::UnseenDamage
            | Self::SwappedLines
            | Self::HastySnapshot
            | Self::LooseSnapshot
            | Self::LeakySnapshot
            | Self::GuessedLineage
            | Self::MisplacedFill
            | Self::ForgottenPin
            | Self::HoardedPins
            | Self::ForgottenWarmUp
            | Self::LateKeeping
            | Self::StaleLog
            | Self::BlindWeights
            | Self::IgnoredMarks
            | Self::UntoldShard
            | Self::HoardedIndex
            | Self::StayingFrames
            | Self::UncountedReads
            | Self::HastySwitch
            | Self::IdleScrub
            | Self::ForcedDiscard
            | Self::ForgottenFlush
            | Self::DeafFlush
            | Self::UndoubtedFlush
            | Self::KeptCut
            | Self::OlderTail
            | Self::StarvedRead
            | Self::ArrivalsFirst
            | Self::StuckRead
            | Self::UnwatchedLog
            | Self::UntoldWaiters
            | Self::ReadsHoldWrites
            | Self::PatientClose
            | Self::HastyReopen
            | Self::StuckReplay
            | Self::ForgottenLoss
            | Self::ShownLoss
            | Self::HastyPreparation
            | Self::HastyGift
            | Self::LoneLoss
            | Self::ForgottenHead
            | Self::UnmarkedEnd
            | Self::ForgedLogTaken
            | Self::ForgottenMark
            | Self::FlushPastStore
            | Self::ExtentsPastStore
            | Self::HastyTier
            | Self::StaleBefore
            | Self::UncutStore
            | Self::UntieredClose
            | Self::DirtyClose
            | Self::UntieredSnapshot
            | Self::UnheldSnapshot
            | Self::SwallowedSnapshot
            | Self::SweptSnapshot
            | Self::HastyUnmark
            | Self::LateInvalidation => 1,
            Self::FlushLie | Self::LostZero | Self::EarlyLogAck | Self::UnsyncedLogWrite => 2,
            Self::LostLogWrite
            | Self::TornLogWrite
            | Self::LateBackendWrite
            | Self::TornBackendWrite
            | Self::EarlyCommit
            | Self::EarlyDirectAck
            | Self::LostKeeping
            | Self::ReadPastStore
            | Self::StaleReply => 10,
            Self::CorruptReply
            | Self::ReplyTwice
            | Self::ReplyNever
            | Self::LeakBuffer
            | Self::LostCompletion => 50,
        }
    }
}

/// The bug of one run, if any, with its own randomness.
#[derive(Debug)]
pub struct Planted {
    plant: Option<Plant>,
    random: Rng,
}

impl Planted {
    /// The bug of this run.
    pub fn new(plant: Option<Plant>, seed: u64) -> Self {
        Self {
            plant,
            random: Rng::with_seed(seed),
        }
    }

    /// Whether `plant` is this run's bug.
    pub fn is(&self, plant: Plant) -> bool {
        self.plant == Some(plant)
    }

    /// Whether `plant` is this run's bug and strikes now.
    pub fn strikes(&mut self, plant: Plant) -> bool {
        self.plant == Some(plant) && self.random.u32(..plant.one_in()) == 0
    }
}
