//! Bugs that prove that the checkers of the cluster bite: each changes from outside what a node's part does.

use clap::ValueEnum;

/// One way to misbehave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Plant {
    /// A disk says that spans are written before they are.
    EarlySpan,
    /// A disk says that superblocks are written before they are.
    EarlySuperblock,
    /// A member says that it has what it was just sent.
    EarlyAck,
    /// A span's write ends for the volume before it is committed.
    HastyEnd,
    /// A superblock's write ends for the volume before others have what it says.
    TailOfOne,
    /// A joiner is taken to be whole that has read nothing back.
    ForgedVerify,
    /// Superblocks do not say where a copy was cut.
    ForgottenCut,
    /// A candidate does not wait for the store.
    ServesUnasked,
    /// The store lets a second one win.
    TwoWinners,
    /// A volume goes on when its node does not serve any more.
    DeafVolume,
    /// A volume answers reads whether there is a lease or not.
    ReadPastLease,
    /// A member forgets what it has echoed, and what it may have before it started, so that nobody waits for it.
    PromiseWithoutWaiting,
}

impl Plant {
    /// Every bug.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }
}
