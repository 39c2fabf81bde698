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
    /// A primary goes by the record without a member before the store has it.
    EarlyLeave,
    /// A primary goes by a lower level before the store has it.
    EarlyLevel,
    /// A primary acknowledges writes with fewer members than they need.
    ForgottenMin,
    /// The store takes what a manager writes whether it has the key or not.
    KeylessManager,
    /// A copy that is made anew after its medium was lost says what the old one said.
    FreshVote,
    /// A damaged copy is opened as far as it is good.
    DamagedVote,
    /// A disk that could not write says that it has.
    HiddenFailure,
    /// A backend that fences takes what older owners write.
    Unfenced,
    /// A backend says that it has flushed, and has not.
    LazyFlush,
    /// A node that serves again still has in its cache what it had when it served before.
    StaleCache,
    /// Members are not told that the backend may hold what it has not flushed.
    LostMark,
    /// The manager has its record written over one that it has not seen.
    BlindManager,
    /// A driver encrypts spans by their position in the log, not by their place on the medium: that differs after a lap.
    TweakOfPosition,
    /// A member encrypts once more what comes encrypted.
    EncryptedTwice,
}

impl Plant {
    /// Every bug.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }
}
