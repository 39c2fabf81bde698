//! A group that is asked to be another one: more or fewer copies, on other nodes, or another level.
//!
//! What is asked for is reached record by record ([`GroupRecord::toward`]), each a change like any other one: who is late
//! leaves first, and a joiner joins once nothing is left to configure. It is not written down as a whole. If another node
//! takes the group in between, it has what was written, and the rest is to be asked for again.
//!
//! [`GroupRecord::toward`]: crate::replication::record::GroupRecord::toward

use super::{Group, Kind, Pending};
use crate::replication::record::Shape;

impl Group {
    /// Have the group become this, record by record, in place of what it was asked to be before. Returns whether it may:
    /// not without this node, nor once it is another one's.
    pub fn configure(&mut self, shape: Shape) -> bool {
        if self.is_fenced || !shape.nodes.contains(&self.me) {
            return false;
        }
        let is_configured =
            |pending: &mut Pending| pending.kind == Kind::Configure && !pending.may_be_written;
        self.pending.take_if(is_configured);
        self.shape = Some(shape);
        self.advance();
        true
    }

    /// The next change on the way to what the group is asked to be, if nothing else is to change.
    pub(super) fn go_toward_shape(&mut self) {
        let (None, Some(shape)) = (&self.pending, &self.shape) else {
            return;
        };
        if let Some(to) = self.record.toward(shape) {
            return self.pend(Kind::Configure, to);
        }
        // Who is to go may wait for who takes its place.
        let mut members = self.record.config.members.iter();
        if members.all(|member| shape.nodes.contains(&member)) {
            self.shape = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{append, attach, group, messages};
    use super::*;
    use crate::replication::Member;
    use crate::replication::message::Message;
    use crate::replication::record::{AckLevel, WhenShort};

    fn shape(nodes: impl IntoIterator<Item = u16>, ack: AckLevel) -> Shape {
        Shape {
            nodes: nodes.into_iter().map(Member).collect(),
            ack,
            copies_min: 1,
            when_short: WhenShort::Wait,
        }
    }

    #[test]
    fn level_is_raised_once_what_was_committed_is_so_by_the_new_one() {
        let (mut group, mut log) = group(AckLevel::One);
        attach(&mut group, &log, 1);
        attach(&mut group, &log, 2);
        append(&mut log);
        messages(&mut group, &log);
        group.own_durable(1);
        assert_eq!(group.committed(), 1);
        assert!(group.configure(shape(0..3, AckLevel::All)));
        assert_eq!(group.next_record(), None);
        group.receive(Member(1), &Message::Ack { durable: 1 }, &log);
        assert_eq!(group.next_record(), None);
        // From here on both count.
        append(&mut log);
        messages(&mut group, &log);
        group.own_durable(2);
        assert_eq!(group.committed(), 1);
        group.receive(Member(2), &Message::Ack { durable: 1 }, &log);
        let record = group.next_record().unwrap();
        assert_eq!(record.config.ack, AckLevel::All);
        group.seen(&record);
        assert_eq!(group.committed(), 1);
        for member in [1, 2] {
            group.receive(Member(member), &Message::Ack { durable: 2 }, &log);
        }
        assert_eq!(group.committed(), 2);
        assert!(group.is_settled());
    }

    #[test]
    fn lower_level_counts_once_it_is_written() {
        let (mut group, mut log) = group(AckLevel::All);
        attach(&mut group, &log, 1);
        attach(&mut group, &log, 2);
        assert!(group.configure(shape(0..3, AckLevel::One)));
        let record = group.next_record().unwrap();
        append(&mut log);
        messages(&mut group, &log);
        group.own_durable(1);
        assert_eq!(group.committed(), 0, "the record may say the higher one");
        group.seen(&record);
        assert_eq!(group.committed(), 1);
    }

    #[test]
    fn node_that_is_taken_out_is_no_joiner_and_gets_nothing_more() {
        let (mut group, mut log) = group(AckLevel::All);
        attach(&mut group, &log, 1);
        attach(&mut group, &log, 2);
        assert!(
            !group.configure(shape(1..3, AckLevel::All)),
            "not without the primary"
        );
        assert!(group.configure(shape([0, 2], AckLevel::All)));
        let record = group.next_record().unwrap();
        assert!(record.joiners.is_empty() && record.config.replicas == 2);
        group.seen(&record);
        append(&mut log);
        let told: alloc::vec::Vec<Member> = messages(&mut group, &log)
            .into_iter()
            .map(|(to, _)| to)
            .collect();
        assert_eq!(told, [Member(2)]);
    }

    #[test]
    fn member_that_is_late_leaves_before_the_rest_is_changed() {
        let (mut group, log) = group(AckLevel::All);
        attach(&mut group, &log, 1);
        attach(&mut group, &log, 2);
        let mut log = log;
        append(&mut log);
        messages(&mut group, &log);
        group.own_durable(1);
        for member in [1, 2] {
            group.receive(Member(member), &Message::Ack { durable: 1 }, &log);
        }
        // What a new node lacks is no hindrance: it is a joiner.
        assert!(group.configure(shape([0, 1, 2, 5], AckLevel::Majority)));
        group.suspect(Member(1));
        let leave = group.next_record().unwrap();
        assert!(leave.joiners.contains(&Member(1)) && leave.config.ack == AckLevel::All);
        group.seen(&leave);
        let record = group.next_record().unwrap();
        assert_eq!(record.config.ack, AckLevel::Majority);
        assert_eq!(record.joiners.len(), 2);
    }

    #[test]
    fn configuration_goes_on_from_what_the_manager_wrote_meanwhile() {
        let (mut group, log) = group(AckLevel::All);
        attach(&mut group, &log, 1);
        attach(&mut group, &log, 2);
        assert!(group.configure(shape([0, 1], AckLevel::All)));
        group.next_record().unwrap();
        let others = group
            .record()
            .with_joiners([Member(7)].into_iter().collect());
        group.seen(&others);
        let record = group.next_record().unwrap();
        assert_eq!(record.revision, others.revision + 1);
        assert!(record.joiners.is_empty() && record.config.members.count() == 2);
        group.seen(&record);
        assert!(group.is_settled() && group.next_record().is_none());
    }
}
