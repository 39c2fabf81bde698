//! The store: one record with compare-and-swap, as etcd has it.
//!
//! Who asks may not be told how that ended; what it asked for may come about much later, or never. Who was not told reads
//! the record. Watches bring each record in order to each node, late.
//!
//! Checked here: a record follows the one before it by [`GroupRecord::check_next`]; nothing but its revision decides
//! whether it is taken.

use std::collections::{BTreeSet, VecDeque};

use hdcs_core::replication::record::GroupRecord;

use super::plant::Plant;
use crate::violation::Violation;

/// What becomes of asking for a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is done, or refused, and that is told.
    Told,
    /// It is done, or refused, and nobody is told.
    AnswerLost,
    /// It never arrives.
    Lost,
    /// It arrives when whoever asked has given up.
    Late,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Store {
    record: GroupRecord,
    /// Records that each node is still to see.
    watches: Vec<VecDeque<GroupRecord>>,
    /// Nodes that do not reach it.
    cut: Vec<bool>,
    /// Revisions with fewer members than a write needs.
    short: BTreeSet<u64>,
    plant: Option<Plant>,
}

impl Store {
    /// One with the first record.
    pub(super) fn new(record: GroupRecord, nodes: usize, plant: Option<Plant>) -> Self {
        let short = (record.config.is_short()).then_some(record.revision);
        Self {
            short: short.into_iter().collect(),
            record,
            watches: vec![VecDeque::new(); nodes],
            cut: vec![false; nodes],
            plant,
        }
    }

    /// The record that it has.
    pub(super) fn record(&self) -> &GroupRecord {
        &self.record
    }

    /// Put a record in the place of the one before it. Returns whether that was the one that is there.
    pub(super) fn swap(&mut self, next: &GroupRecord) -> Result<bool, Violation> {
        let is_late = next.revision <= self.record.revision;
        // Of two that ask at the same time, the second one wins too.
        let is_planted =
            self.plant == Some(Plant::TwoWinners) && next.revision == self.record.revision;
        if is_late && !is_planted {
            return Ok(false);
        }
        if let Err(error) = self.record.check_next(next) {
            let message = format!("{error}: {next:?} after {:?}", self.record);
            return Err(Violation::new("record", message));
        }
        self.record = next.clone();
        if next.config.is_short() {
            self.short.insert(next.revision);
        }
        for watch in &mut self.watches {
            watch.push_back(next.clone());
        }
        Ok(true)
    }

    /// Whether a record of this revision had fewer members than a write needs.
    pub(super) fn was_short(&self, revision: u64) -> bool {
        self.short.contains(&revision)
    }

    /// The next record that a node is to see.
    pub(super) fn next_seen(&mut self, node: usize) -> Option<GroupRecord> {
        self.watches[node].pop_front()
    }

    /// Records that a node is still to see.
    pub(super) fn unseen(&self, node: usize) -> usize {
        self.watches[node].len()
    }

    /// A node watches from now on.
    pub(super) fn watch_anew(&mut self, node: usize) {
        self.watches[node].clear();
    }

    /// A node reaches it no more, or again.
    pub(super) fn cut(&mut self, node: usize, is_cut: bool) {
        self.cut[node] = is_cut;
    }

    /// Whether a node reaches it.
    pub(super) fn is_reached(&self, node: usize) -> bool {
        !self.cut[node]
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::replication::Member;
    use hdcs_core::replication::record::{AckLevel, Config, Nodes, Seat, WhenShort};

    use super::*;

    fn first() -> GroupRecord {
        let member = Member(0);
        let config = Config {
            members: [Seat { member, joined: 1 }].into_iter().collect(),
            replicas: 1,
            ack: AckLevel::All,
            copies_min: 1,
            when_short: WhenShort::Wait,
        };
        GroupRecord::first(member, config, Nodes::new())
    }

    #[test]
    fn store_takes_one_of_two_and_shows_it_to_everybody() {
        let mut store = Store::new(first(), 2, None);
        let (one, other) = (
            first().taking(Member(0)),
            first().with_joiners(Nodes::new()),
        );
        assert_eq!(store.swap(&one), Ok(true));
        assert_eq!(store.swap(&other), Ok(false));
        assert_eq!(store.next_seen(1), Some(one));
        assert_eq!((store.unseen(0), store.unseen(1)), (1, 0));
    }

    #[test]
    fn record_that_may_not_follow_is_a_violation() {
        let mut store = Store::new(first(), 1, None);
        let mut next = first().taking(Member(0));
        next.epoch += 1;
        assert_eq!(store.swap(&next).unwrap_err().rule, "record");
    }

    #[test]
    fn store_that_lets_two_win_is_noticed() {
        let mut store = Store::new(first(), 1, Some(Plant::TwoWinners));
        let (one, other) = (
            first().taking(Member(0)),
            first().with_joiners(Nodes::new()),
        );
        assert_eq!(store.swap(&one), Ok(true));
        assert_eq!(store.swap(&other).unwrap_err().rule, "record");
    }
}
