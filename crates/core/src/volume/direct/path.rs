//! Where writes go: to the log, or past it, and the way from one to the other. See the diagram of the module above.

use crate::base::io::Nanos;
use crate::base::limits::BLOCK_BYTES;
use crate::log::destage::{Destage, Stage};
use crate::log::extent_index::Sequence;
use crate::log::write_log::WriteLog;
use crate::volume::Policy;

/// Writes are held back for the rest of a drain once the log has no more blocks than these, or than
/// destage frees in this time.
const LAST_BLOCKS: u64 = 64;
const LAST_SECONDS: f64 = 0.005;
/// How far the log is from empty.
#[derive(Clone, Copy, Debug)]
struct Drain {
    /// The round ends when everything before this is retired.
    until: Sequence,
    /// Log blocks that may still be admitted in this round: half of what there was at its beginning.
    quota: u64,
    /// What is left is so little that writes wait for its end.
    last: bool,
}

/// Where writes go.
#[derive(Clone, Copy, Debug)]
enum Path {
    Logged,
    Draining(Drain),
    Direct,
    Returning,
}

/// See the module.
#[derive(Debug)]
pub(in crate::volume) struct WritePath {
    path: Path,
    /// The last policy that was direct.
    policy: Policy,
}

impl Default for WritePath {
    fn default() -> Self {
        Self {
            path: Path::Logged,
            policy: Policy::WriteThrough,
        }
    }
}

impl WritePath {
    /// Whether writes go past the log.
    pub(in crate::volume) fn is_direct(&self) -> bool {
        matches!(self.path, Path::Direct)
    }

    /// Whether the log is being emptied.
    pub(in crate::volume) fn is_draining(&self) -> bool {
        matches!(self.path, Path::Draining(_))
    }

    /// Whether direct writes end before writes go to the log again.
    pub(super) fn is_returning(&self) -> bool {
        matches!(self.path, Path::Returning)
    }

    /// The policy in effect.
    pub(super) fn policy(&self) -> Policy {
        match self.path {
            Path::Logged | Path::Draining(_) => Policy::WriteBack,
            Path::Direct | Path::Returning => self.policy,
        }
    }

    /// The last policy that was direct.
    pub(super) fn direct_policy(&self) -> Policy {
        self.policy
    }

    /// This is the policy once writes go past the log.
    pub(super) fn set_direct_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Dirty bytes that are to be destaged before the policy `asked` for is in effect; at least 1 until it is.
    pub(super) fn remaining_bytes(
        &self,
        asked: Policy,
        is_given_up: bool,
        log: Option<&WriteLog>,
    ) -> u64 {
        match self.path {
            Path::Draining(_) => {
                let bytes = log.map(WriteLog::bytes);
                bytes.map_or(1, |bytes| (bytes.appended - bytes.retired).max(1))
            }
            Path::Returning => 1,
            Path::Logged => u64::from(asked.is_direct()),
            Path::Direct => u64::from(asked == Policy::WriteBack && !is_given_up),
        }
    }

    /// Take the next steps towards where writes are to go. The last one back to the log is [`Self::return_to_log`].
    pub(super) fn switch(&mut self, wants_direct: bool, log: &WriteLog, destage: &Destage) {
        if let Path::Logged = self.path
            && wants_direct
        {
            self.path = Path::Draining(Self::drain_round(log));
        }
        match self.path {
            Path::Draining(_) if !wants_direct => self.path = Path::Logged,
            Path::Draining(drain) => self.drain(drain, log, destage),
            Path::Direct if !wants_direct => self.path = Path::Returning,
            Path::Returning if wants_direct => self.path = Path::Direct,
            _ => {}
        }
    }

    /// The last direct write has ended.
    pub(super) fn return_to_log(&mut self) {
        self.path = Path::Logged;
    }

    fn drain_round(log: &WriteLog) -> Drain {
        Drain {
            until: log.next_sequence(),
            quota: lying_blocks(log) / 2,
            last: false,
        }
    }

    fn drain(&mut self, mut drain: Drain, log: &WriteLog, destage: &Destage) {
        let idle = destage.stage() == Stage::Idle;
        let is_empty = log.spans().is_empty() && log.open_since().is_none();
        if idle && is_empty {
            self.path = Path::Direct;
            return;
        }
        if log.first_sequence() >= drain.until {
            drain = Drain {
                last: drain.last,
                ..Self::drain_round(log)
            };
        }
        // What is held back from the beginning of a generation goes to the backend with it.
        if idle {
            // None is under way that could be late.
            let soon = (destage.rate_blocks(Nanos(0)) * LAST_SECONDS) as u64;
            drain.last = lying_blocks(log) <= soon.max(LAST_BLOCKS);
        }
        self.path = Path::Draining(drain);
    }

    /// Whether a write for so many log blocks has to wait for the policy to change.
    pub(in crate::volume) fn is_held_back(&self, blocks: u64, drains: bool) -> bool {
        match self.path {
            Path::Logged | Path::Direct => false,
            Path::Draining(drain) => drains && (drain.last || blocks > drain.quota),
            Path::Returning => true,
        }
    }

    /// Whether the last generation of a drain waits for what is on its way to the log, so as to be the
    /// last.
    pub(super) fn awaits_last_spans(&self, log: &WriteLog) -> bool {
        matches!(self.path, Path::Draining(Drain { last: true, .. }))
            && (log.flights() > 0 || log.open_since().is_some())
    }

    /// So many blocks were admitted to the log.
    pub(in crate::volume) fn count_drained(&mut self, blocks: u64) {
        if let Path::Draining(drain) = &mut self.path {
            drain.quota = drain.quota.saturating_sub(blocks);
        }
    }

    /// Assert what must always hold.
    pub(super) fn check(&self, log: &WriteLog, writes_directly: bool) {
        if let Path::Direct | Path::Returning = self.path {
            assert!(
                log.spans().is_empty() && log.open_since().is_none(),
                "the log holds nothing while writes go past it"
            );
        } else {
            assert!(
                !writes_directly,
                "nothing goes past the log that holds something"
            );
        }
    }
}
/// Blocks that lie in the log. What memory there is for its index makes a log full early, but has no say here: it would
/// leave something to drain of a log that is all but empty.
fn lying_blocks(log: &WriteLog) -> u64 {
    let sealed = (log.spans().front()).map_or(0, |first| log.sealed_end() - first.position);
    let open = log.open_bytes().div_ceil(BLOCK_BYTES) + log.open_entries().min(1);
    sealed + open as u64
}
