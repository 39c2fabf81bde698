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
    /// The record gets a joiner that was only cut.
    JoinerCountedEarly,
    /// A tail counts as retired when only the primary has it.
    TailOfOne,
    /// Spans go to the medium whatever is durable before them.
    SpanPastEvidence,
    /// The superblock does not say what was cut off.
    ForgottenCut,
    /// What was cut off is void by the present opening.
    CutByPresentOpening,
    /// A new and empty copy calls itself whole.
    NewIsWhole,
    /// An opening is not made known before its spans.
    UnknownOpening,
    /// A candidate takes somebody's word for a promise that was not made.
    ForgedPromise,
    /// A candidate serves without asking the store.
    ServesUnasked,
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
            Self::CutByPresentOpening if superblock.void_before > 0 => Superblock {
                void_before: superblock.incarnation,
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
