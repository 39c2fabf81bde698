//! What a node that takes a group waits for, for whoever watches it.

use alloc::vec::Vec;

use super::{Part, Participant};
use crate::base::io::Nanos;
use crate::replication::Member;
use crate::replication::takeover::Step;

/// A takeover that has not come to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taking {
    /// Members that have promised with a whole copy.
    pub promised: Vec<Member>,
    /// Members that have not answered.
    pub silent: Vec<Member>,
    /// How many promises it takes.
    pub needed: usize,
    /// What is waited for.
    pub waits: Waits,
}

/// See [`Taking`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Enough promises, and for a moment those of the others.
    Promises,
    /// Members that promised get, or give, what others have.
    Copies,
    /// The last primary may still answer reads.
    Lease {
        /// For so long.
        left: Nanos,
    },
    /// The record is written.
    Record,
}

impl Taking {
    /// What a node waits for, if it takes its group.
    pub fn of(participant: &Participant, now: Nanos) -> Option<Self> {
        let Part::Takes(takeover) = &participant.part else {
            return None;
        };
        let waits = match takeover.step() {
            Step::Gathers => Waits::Promises,
            Step::Fetches { .. } | Step::Levels { .. } => Waits::Copies,
            Step::Asks { .. } => {
                let last = participant.last_primary;
                let over = participant.leases.over_at(takeover, last);
                match over.since(now) {
                    Nanos(0) => Waits::Record,
                    left => Waits::Lease { left },
                }
            }
            Step::Serves { .. } | Step::Stopped(_) => return None,
        };
        Some(Self {
            promised: takeover.whole().map(|(member, _)| member).collect(),
            silent: takeover.silent().collect(),
            needed: takeover.record().config.promises_to_take(),
            waits,
        })
    }
}
