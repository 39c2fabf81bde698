//! Planted bugs: each breaks a rule, and the model has to find it.

use hdcs_core::replication::replica::Superblock;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Plant {
    /// A member acknowledges what it has only taken.
    AckBeforeDurable,
    /// A promise is told before it is durable.
    PromiseNotDurable,
    /// Commits do without a member that the record still has.
    LeaverDroppedEarly,
    /// The record loses a member while what it committed is not held by enough of the others.
    LeaveNotCovered,
    /// The record says another level or other members while what was committed is not so by them.
    ConfigNotCovered,
    /// Another level and other members count alone before the record says them.
    ConfigCountedEarly,
    /// The record gets a joiner that was only cut.
    JoinerCountedEarly,
    /// A tail counts as retired when only the primary has it.
    TailOfOne,
    /// Spans go to the medium whatever is durable before them.
    SpanPastEvidence,
    /// The same while a copy is read back, and so is about to be whole.
    JoinerPastEvidence,
    /// The superblock does not say what was cut off.
    ForgottenCut,
    /// Superblocks do not say where an opening begins, so what older ones left behind there counts.
    OpeningNotCut,
    /// An opening writes spans before enough superblocks know it.
    OpeningOfOne,
    /// A member writes over what its superblock does not let go.
    RingOverrun,
    /// A copy that was read back and is not whole forgets that when it starts anew.
    ForgottenRot,
    /// What older openings wrote is void wherever it lies, not only where the present one begins.
    CutByPresentOpening,
    /// A new and empty copy calls itself whole.
    NewIsWhole,
    /// An opening is not made known before its spans.
    UnknownOpening,
    /// A candidate takes somebody's word for a promise that was not made.
    ForgedPromise,
    /// A candidate serves without asking the store.
    ServesUnasked,
    /// A checkpoint has the clients, and not their last results.
    ResultNotCarried,
    /// The tail moves past results that stand in a checkpoint which is not committed.
    CarriedUncommitted,
    /// A request is answered when its record is not committed.
    AnsweredUncommitted,
    /// Who takes over knows the clients, and not what their requests were answered with.
    TableNotRebuilt,
}

impl Plant {
    /// What goes to the medium in place of a superblock.
    pub fn superblock(self, superblock: Superblock) -> Superblock {
        match self {
            Self::ForgottenCut => Superblock {
                cut_position: 0,
                void_before: 0,
                ..superblock
            },
            Self::ForgottenRot if superblock.is_void() => Superblock {
                cut_position: 0,
                void_before: 0,
                ..superblock
            },
            Self::OpeningNotCut if superblock.is_whole => Superblock {
                cut_position: 0,
                void_before: 0,
                ..superblock
            },
            Self::CutByPresentOpening => Superblock {
                cut_position: 0,
                ..superblock
            },
            Self::UnknownOpening => Superblock {
                incarnation: superblock.incarnation.min(1),
                ..superblock
            },
            _ => superblock,
        }
    }
}
