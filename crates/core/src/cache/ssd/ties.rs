//! What ties the tier to the write logs of its volumes: a cache that has lost what a log waited for is found out, and
//! what it holds of that volume is not served.
//!
//! ```text
//!         what the medium holds is not known yet          it is, and the cache has less
//! Free ───────────────────────────────────────► Untried ────────────────────────────────► Forgotten
//!  ▲                                              │ it has as much                            │ a later start
//!  └──────────────────────────────────────────────┴───────────────────────────────────────────┘
//! ```

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::journal::Journal;
use crate::cache::Tie;

/// What the log of a volume has said of the cache.
#[derive(Clone, Copy, Debug)]
enum Tied {
    /// What the medium holds is not known yet.
    Untried(Tie),
    /// The volume's lines are forgotten; that is durable once the queue has come so far.
    Forgotten(u64),
}

/// See the module.
#[derive(Debug, Default)]
pub struct Ties {
    /// Volumes whose logs cannot be told yet that the cache has what they have waited for.
    volumes: BTreeMap<u32, Tied>,
    /// Whether nothing that a start has found is in use, so that no log can be newer.
    began_empty: bool,
}

impl Ties {
    /// Nothing that a start has found is in use.
    pub fn begin_empty(&mut self) {
        self.volumes.clear();
        self.began_empty = true;
    }

    /// The same, but the medium holds it until the queue has come so far: until then it holds what logs know better.
    pub fn begin_forgotten(&mut self, upto: u64) {
        for tied in self.volumes.values_mut() {
            *tied = Tied::Forgotten(upto);
        }
        self.began_empty = true;
    }

    /// A log has said this before the medium is read.
    pub fn untried(&mut self, volume: u32, tie: Tie) {
        self.volumes.insert(volume, Tied::Untried(tie));
    }

    /// What the medium holds of a volume is forgotten, durably once the queue has come so far.
    pub fn forgotten(&mut self, volume: u32, upto: u64) {
        self.volumes.insert(volume, Tied::Forgotten(upto));
    }

    /// Whether the cache has what a log has waited for.
    pub fn has(&self, tie: Tie, journal: &Journal) -> bool {
        self.began_empty || tie == Tie::NONE || journal.has(tie)
    }

    /// The medium is read: the volumes whose logs have waited for more, with what those have said.
    pub fn take_untied(&mut self, journal: &Journal) -> Vec<(u32, Tie)> {
        let tied = core::mem::take(&mut self.volumes).into_iter();
        tied.filter_map(|(volume, tied)| match tied {
            Tied::Untried(tie) if !self.has(tie, journal) => Some((volume, tie)),
            _ => None,
        })
        .collect()
    }

    /// What the log of a volume is to say: everything that was forgotten so far durably.
    pub fn tie_of(&self, volume: u32, journal: &Journal) -> Option<Tie> {
        let is_sound = match self.volumes.get(&volume) {
            None => true,
            Some(Tied::Untried(_)) => false,
            Some(Tied::Forgotten(upto)) => journal.durable() >= *upto,
        };
        journal.tie().filter(|_| is_sound)
    }
}
