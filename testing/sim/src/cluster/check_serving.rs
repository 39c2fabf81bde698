//! Checker: who serves does so by the record.
//!
//! 1. In an epoch one node begins to serve, once.
//! 2. The store names it the primary of that epoch.
//! 3. A member that the record names anew has a copy that calls itself whole, and was brought up for it.

use std::collections::BTreeMap;

use hdcs_core::format::LogSuperblock;
use hdcs_core::replication::Member;
use hdcs_core::replication::record::GroupRecord;

use crate::violation::Violation;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Serving {
    /// Who has served, by epoch.
    served: BTreeMap<u64, usize>,
    /// Whom the store has named, by epoch.
    named: BTreeMap<u64, Member>,
}

impl Serving {
    /// The store has this record; those are members that the one before it had not, and what their media say.
    pub(super) fn record(
        &mut self,
        next: &GroupRecord,
        come: impl Iterator<Item = (Member, Option<LogSuperblock>)>,
    ) -> Result<(), Violation> {
        if let Some(primary) = next.primary() {
            self.named.insert(next.epoch, primary);
        }
        for (member, superblock) in come {
            let membership = superblock.and_then(|superblock| superblock.membership());
            let joined = next.config.members.joined(member);
            let is_whole =
                membership.is_some_and(|says| says.is_whole && Some(says.joined) == joined);
            if !is_whole {
                let message = format!("{member} is a member, and its copy says {membership:?}");
                return Err(Violation::new("joined-not-whole", message));
            }
        }
        Ok(())
    }

    /// A node begins to serve.
    pub(super) fn begin(&mut self, node: usize, epoch: u64) -> Result<(), Violation> {
        if let Some(other) = self.served.insert(epoch, node) {
            let message = format!("{other} and {node} serve in epoch {epoch}");
            return Err(Violation::new("two-primaries", message));
        }
        if self.named.get(&epoch) != Some(&Member(node as u16)) {
            let message = format!(
                "{node} serves in epoch {epoch}, and the store names {:?}",
                self.named.get(&epoch)
            );
            return Err(Violation::new("serves-unasked", message));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::replication::record::{AckLevel, Config, Nodes, Seat, WhenShort};

    use super::*;

    #[test]
    fn second_primary_of_an_epoch_and_one_that_nobody_named_are_noticed() {
        let seat = |node| Seat {
            member: Member(node),
            joined: 1,
        };
        let config = Config {
            members: [seat(0), seat(1)].into_iter().collect(),
            replicas: 2,
            ack: AckLevel::All,
            copies_min: 1,
            when_short: WhenShort::Wait,
        };
        let first = GroupRecord::first(Member(0), config, Nodes::new());
        let mut serving = Serving::default();
        serving.record(&first, [].into_iter()).unwrap();
        assert_eq!(serving.begin(0, 1), Ok(()));
        assert_eq!(serving.begin(1, 1).unwrap_err().rule, "two-primaries");
        assert_eq!(serving.begin(1, 2).unwrap_err().rule, "serves-unasked");
        let left = first.leave(Member(1));
        let joined = left.join(seat(1));
        let come = [(Member(1), None)].into_iter();
        let rule = serving.record(&joined, come).unwrap_err().rule;
        assert_eq!(rule, "joined-not-whole");
    }
}
