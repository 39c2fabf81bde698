//! The order in which the files of a volume are opened, what they have to do with each other, and when an opening that
//! failed is tried again.
//!
//! ```text
//!  Log ─► Records ─┬─ storage mode ─► Local ─┬─► Backend ─► Sync ─► Begin ─► Done
//!                  └─────────────────────────┘
//! ```
//!
//! | step | what is done | what it is told, and what it may find |
//! |---|---|---|
//! | Log | read both superblocks of the write log | they must be this volume's, and encrypted with its key |
//! | Records | read what the node has recorded of the log | it must be that log, and no older copy; one that failed was gone past |
//! | Local | open the local store | which log is before it, and whether that has everything |
//! | Backend | open the backend | – |
//! | Sync | make durable what replay will read | – |
//! | Begin | record that the log is in use | – |
//!
//! Invariants:
//! 1. A log is named by superblocks that were authenticated. So nothing that follows from its name (its keys, whether
//!    the local store belongs to it) is chosen by somebody who has the device, but not the key.
//! 2. The local store learns of every write that may have gone past the log, before it decides which of its checksums
//!    still hold: from the log, or from the superblock that was kept when the log failed.
//! 3. The log is recorded as in use only when everything that it needs is there: until then a log that is missing later
//!    has lost nothing. What is recorded of it is durable in it by then: else a power cut would leave a log that seems
//!    to be an older copy.
//!
//! Failure: what was opened is closed, and [`Failure`] says what may be done about it.

use crate::base::cipher::Authenticator;
use crate::base::error::{FormatError, OpenError};
use crate::base::io::Nanos;
use crate::base::limits::BLOCK_BYTES;
use crate::format::{LOG_UNFLUSHED, LogSuperblock};

/// Why a volume could not be opened, by what can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Its backend cannot be reached at present: try again later.
    Unreachable,
    /// Its write log is gone, damaged or another one: what is dirty in it may be lost.
    LogLost,
    /// The local store of a volume in storage mode is gone, damaged or another one, and what is dirty in it.
    LocalLost,
    /// What it had at its backend was given up: nobody can open it any more.
    Gone,
    /// There is too little memory for it at present: try again later.
    Shortage,
    /// Somebody still uses its write log or local store: an opening of it that is just ending, or another program. Try
    /// again a few times.
    InUse,
    /// The node stops: it is opened at the next start.
    Stopping,
    /// Trying again changes nothing before somebody has put something right.
    Refused,
}

/// Openings in a row of a volume that somebody uses, half a minute in all: who lets go by himself has done so by then.
const IN_USE_ATTEMPTS_MAX: u32 = 6;

impl Failure {
    /// Whether something is lost without which the volume can be opened, with what its backend has.
    pub const fn is_loss(self) -> bool {
        matches!(self, Self::LogLost | Self::LocalLost)
    }

    /// Whether it is tried again by itself after so many attempts in a row have failed like this.
    pub const fn is_tried_again(self, attempts: u32) -> bool {
        match self {
            Self::Unreachable | Self::Shortage => true,
            Self::InUse => attempts < IN_USE_ATTEMPTS_MAX,
            Self::LogLost | Self::LocalLost | Self::Gone | Self::Stopping | Self::Refused => false,
        }
    }
}

impl From<OpenError> for Failure {
    /// Whatever is wrong with the content of a log, the content is lost, unless a newer program, or another part of
    /// one, can read it.
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Superblock(FormatError::Newer { .. } | FormatError::Holds { .. })
            | OpenError::Method { .. }
            | OpenError::Record { .. }
            | OpenError::Kind { .. } => Self::Refused,
            _ => Self::LogLost,
        }
    }
}

/// Pauses between attempts, doubled from the first to the last.
const RETRY_PAUSE_MIN: Nanos = Nanos::from_millis(1_000);
const RETRY_PAUSE_MAX: Nanos = Nanos::from_millis(30_000);

/// The pause after so many attempts have failed.
pub fn retry_pause(attempts: u32) -> Nanos {
    let doubled = RETRY_PAUSE_MIN.0 << attempts.saturating_sub(1).min(16);
    Nanos(doubled).min(RETRY_PAUSE_MAX)
}

/// What is to be opened next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read the superblocks of the write log: [`Opening::log_read`], then [`Opening::authenticate`].
    Log,
    /// Look what is recorded of this log: [`Opening::recorded`], then [`Opening::kept`].
    Records,
    /// Open the local store, before which this log stands: [`Opening::done`].
    Local,
    /// Open the backend: [`Opening::done`].
    Backend,
    /// Make durable what replay will read of the log: [`Opening::done`].
    Sync,
    /// Record that the log is in use: [`Opening::done`].
    Begin,
    /// Everything is open.
    Done,
}

/// Of the copy that the first record of a group names: it was never brought up.
const FIRST_JOINED: u64 = 1;

/// A write log, by its superblocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundLog {
    /// Its number.
    pub log: u64,
    /// How often it was opened.
    pub incarnation: u64,
    /// Whether no write went past it that the backend has not flushed.
    pub is_whole: bool,
    /// Whether it is new: nobody has opened it, or of a group nobody but the first primary.
    pub is_new: bool,
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct Opening {
    step: Step,
    volume: [u8; 16],
    has_local: bool,
    found: Option<FoundLog>,
    /// Which key the log is encrypted with.
    data_key: [u8; 16],
}

impl Opening {
    /// Begin to open a volume of that UUID, in storage mode or not.
    pub const fn begin(volume: [u8; 16], has_local: bool) -> Self {
        Self {
            step: Step::Log,
            volume,
            has_local,
            found: None,
            data_key: [0; 16],
        }
    }

    /// What is next.
    pub const fn step(&self) -> Step {
        self.step
    }

    /// The log, once it was read.
    ///
    /// # Panics
    /// Before that.
    pub const fn log(&self) -> FoundLog {
        self.found.expect("the log was read")
    }

    /// Both superblocks of the log.
    ///
    /// Replay chooses between them in the same way; here it is only found out whether there is anything to choose from,
    /// and what others have to know before the replay.
    ///
    /// # Errors
    /// It is not this volume's, or nobody knows whose.
    pub fn log_read(&mut self, blocks: &[[u8; BLOCK_BYTES]; 2]) -> Result<FoundLog, LogRefused> {
        LogSuperblock::refuse_newer(&blocks.each_ref().map(|block| &block[..]))?;
        let found = blocks.each_ref().map(|block| {
            let superblock = LogSuperblock::parse(block)?;
            if superblock.volume != self.volume {
                return Err(FormatError::Identity);
            }
            Ok(superblock)
        });
        let newest = found.iter().flatten().max_by_key(|s| s.sequence.get());
        let newest = match (newest, &found) {
            (Some(newest), _) => newest,
            // The second block of a new log is empty, which says nothing; the first one's reason counts.
            (None, [Err(error), _]) => return Err((*error).into()),
            (None, [Ok(_), _]) => unreachable!("the first one would be the newest"),
        };
        self.data_key = newest.data_key;
        let log = FoundLog {
            log: newest.log.get(),
            incarnation: newest.incarnation.get(),
            is_whole: newest.flags.get() & LOG_UNFLUSHED == 0,
            is_new: match newest.membership() {
                None => newest.incarnation.get() == 0,
                Some(membership) => {
                    let is_empty = newest.tail.get() == 0 && newest.known_head.get() == 0;
                    // Its making, and the takeover with which it is opened the first time.
                    let is_first = newest.incarnation.get() <= 2 && membership.promised <= 2;
                    membership.joined == FIRST_JOINED && is_empty && is_first
                }
            },
        };
        self.found = Some(log);
        Ok(log)
    }

    /// With the keys of this log, if the volume is encrypted, and the UUID of the key that they derive from, or zero.
    /// Replay authenticates, too, but before that others are told what the superblocks say.
    ///
    /// # Errors
    /// The log is encrypted with another key, or somebody without the keys has written its superblocks.
    pub fn authenticate(
        &mut self,
        blocks: &[[u8; BLOCK_BYTES]; 2],
        data_key: [u8; 16],
        keys: Option<&dyn Authenticator>,
    ) -> Result<(), LogRefused> {
        if self.data_key != data_key {
            return Err(LogRefused::OtherKey);
        }
        let blocks = blocks.each_ref().map(|block| &block[..]);
        LogSuperblock::authenticate_all(&blocks, self.volume, keys)
            .map_err(|_| LogRefused::Forged)?;
        self.step = Step::Records;
        Ok(())
    }

    /// What the node has recorded of the volume's log: its number and incarnation, if the volume was ever opened. Returns whether the backend may be made if it is absent:
    /// only that of a volume that was never opened, since an image that was there and has gone must not be replaced by
    /// an empty one.
    ///
    /// # Errors
    /// It is not the log that was recorded, or not the newest state of it.
    pub fn recorded(&self, record: Option<(u64, u64)>) -> Result<bool, LogRefused> {
        let found = self.log();
        match record {
            Some((recorded, _)) if recorded != found.log => Err(LogRefused::Another { recorded }),
            Some((_, recorded)) if found.incarnation < recorded => {
                Err(LogRefused::Older { recorded })
            }
            _ => Ok(record.is_none() && found.is_new),
        }
    }

    /// The superblock that is kept beside a log whose device failed, if there is one.
    pub fn kept(&mut self, kept: Option<&LogSuperblock>) {
        let mut found = self.log();
        // Its device does not say that the log was gone past.
        found.is_whole &= kept.is_none_or(|kept| kept.log.get() != found.log);
        self.found = Some(found);
        self.step = if self.has_local {
            Step::Local
        } else {
            Step::Backend
        };
    }

    /// What was asked for is done.
    ///
    /// # Panics
    /// Where more is to be told than that.
    pub fn done(&mut self) {
        self.step = match self.step {
            Step::Log | Step::Records => unreachable!("that is told what was found"),
            Step::Local => Step::Backend,
            Step::Backend => Step::Sync,
            Step::Sync => Step::Begin,
            Step::Begin | Step::Done => Step::Done,
        };
    }
}

/// Why a log is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogRefused {
    /// What its superblocks are.
    Superblock(FormatError),
    /// It is encrypted with another key than the volume, or only one of them is.
    OtherKey,
    /// Somebody without the volume's keys has written a superblock.
    Forged,
    /// It is another log of the volume, one that was given up for the one with this number.
    Another {
        /// The number.
        recorded: u64,
    },
    /// It is an older copy of the log: the volume was opened so many times.
    Older {
        /// How many.
        recorded: u64,
    },
}

impl From<FormatError> for LogRefused {
    fn from(error: FormatError) -> Self {
        Self::Superblock(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_that_somebody_uses_is_tried_again_for_half_a_minute() {
        let mut waited = Nanos(0);
        let mut attempts = 1;
        while Failure::InUse.is_tried_again(attempts) {
            waited = waited.plus(retry_pause(attempts));
            attempts += 1;
        }
        assert_eq!(waited, Nanos::from_millis(31_000));
        for kind in [Failure::Unreachable, Failure::Shortage] {
            assert!(kind.is_tried_again(1_000), "{kind:?}");
        }
        for kind in [
            Failure::Refused,
            Failure::LogLost,
            Failure::LocalLost,
            Failure::Gone,
        ] {
            assert!(!kind.is_tried_again(1), "{kind:?}");
        }
    }
}
