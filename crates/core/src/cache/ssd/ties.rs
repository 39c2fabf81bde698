//! What ties the tier to the write logs of its volumes: a cache that has lost what a log waited for is found out, and
//! what it holds of that volume is not served. See the module above.

use super::{Phase, Ssd};
use crate::cache::{BlockKey, Tie};
use crate::format::CACHE_START_SHIFT;

/// What the log of a volume has said of the cache.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tied {
    /// What the medium holds is not known yet.
    Untried(Tie),
    /// The volume's lines are forgotten; that is durable once the queue has come so far.
    Forgotten(u64),
}

impl Ssd {
    /// The log of a volume that opens says what it has waited for. If that is not there, nothing of the volume is
    /// served.
    pub fn tie(&mut self, volume: u32, tie: Tie) {
        match self.phase {
            Phase::Ready => {
                if !self.has(tie) {
                    self.forget_untied(volume);
                }
            }
            // It begins, or will begin anew.
            Phase::Forming { .. } | Phase::Offline(_) => {}
            _ => {
                self.ties.insert(volume, Tied::Untried(tie));
            }
        }
    }

    /// What the log of a volume is to say: everything that was forgotten so far durably.
    pub fn tie_of(&self, volume: u32) -> Tie {
        let is_sound = match self.ties.get(&volume) {
            None => true,
            Some(Tied::Untried(_)) => false,
            Some(Tied::Forgotten(upto)) => self.queue.durable() >= *upto,
        };
        // Until the superblocks void what the medium holds, they vouch for it as they did before.
        let is_voided = !self.renew && !self.is_renewing();
        if self.is_ready_phase() && is_sound && is_voided && self.stamp < self.last_stamp() {
            Tie {
                cache: self.cache_id(),
                stamp: self.stamp,
            }
        } else {
            Tie::UNKNOWN
        }
    }

    /// Names the content: identity and format.
    fn cache_id(&self) -> u64 {
        self.content().checksum()
    }

    /// The last stamp of this start; it says nothing.
    pub(super) fn last_stamp(&self) -> u64 {
        self.root.incarnation << CACHE_START_SHIFT | ((1 << CACHE_START_SHIFT) - 1)
    }

    /// The stamp after the present one.
    pub(super) fn next_stamp(&self) -> u64 {
        (self.stamp + 1).min(self.last_stamp())
    }

    fn has(&self, tie: Tie) -> bool {
        self.began_empty
            || tie == Tie::NONE
            || (tie.cache == self.cache_id() && self.root.has(tie.stamp, self.stamp))
    }

    /// What the medium holds of a volume is older than its log.
    fn forget_untied(&mut self, volume: u32) {
        if self.store.index.used_lines() > 0 {
            self.invalidate(BlockKey::new(volume, 0), 1 << 40);
            self.store.counters.forgotten_volumes += 1;
            self.store.counters.losses += 1;
        }
        self.ties
            .insert(volume, Tied::Forgotten(self.queue.queued()));
    }

    /// The medium is read: judge those that came before.
    pub(super) fn try_ties(&mut self) {
        for (volume, tied) in core::mem::take(&mut self.ties) {
            if let Tied::Untried(tie) = tied
                && !self.has(tie)
            {
                self.forget_untied(volume);
            }
        }
    }
}
