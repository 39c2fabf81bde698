//! A stand-in for an operator, who asks now and then for another group: another ack level, one to three copies on other nodes,
//! more or fewer members to write at all, or that writes fail with fewer.
//!
//! It asks at the node that serves, as the daemon does, and that reaches it record by record
//! ([`GroupRecord::toward`]). If another node takes the group in between, the operator asks that one for the rest, with that
//! node among those that stay. Once nothing goes wrong any more it asks until the group is what it asked for last.
//!
//! Checked in [`super::world`]: what is committed satisfies the record that a primary goes by and the one that the store has,
//! also while one takes the place of the other; and with fewer members than a write needs nothing is acknowledged.
//!
//! [`GroupRecord::toward`]: hdcs_core::replication::record::GroupRecord::toward

use fastrand::Rng;
use hdcs_core::base::io::Nanos;
use hdcs_core::replication::Member;
use hdcs_core::replication::record::{AckLevel, GroupRecord, Nodes, Shape, WhenShort};

use super::world::{ClusterWorld, Happening};

/// Copies of a log at most, as the daemon has it.
const COPIES_MAX: usize = 3;
/// It looks again after so long whether the group is what it asked for.
const LOOK_AGAIN: Nanos = Nanos::from_millis(200);

/// See the module.
#[derive(Debug)]
pub(super) struct Operator {
    random: Rng,
    nodes: usize,
    /// What it asked for last.
    wanted: Option<Shape>,
}

impl Operator {
    /// One of a group on so many nodes.
    pub(super) fn new(nodes: usize, seed: u64) -> Self {
        Self {
            random: Rng::with_seed(seed),
            nodes,
            wanted: None,
        }
    }

    /// Where the copies are to be, if it has ever asked.
    pub(super) fn places(&self) -> Option<&Nodes> {
        self.wanted.as_ref().map(|shape| &shape.nodes)
    }

    /// Whether the group is what it asked for.
    pub(super) fn is_content(&self, record: &GroupRecord) -> bool {
        let Some(shape) = &self.wanted else {
            return true;
        };
        let mut members = record.config.members.iter();
        record.toward(shape).is_none() && members.all(|member| shape.nodes.contains(&member))
    }

    /// Ask for something else.
    fn draw(&mut self, record: &GroupRecord, primary: Member) {
        let random = &mut self.random;
        let copies = random.usize(1..=COPIES_MAX.min(self.nodes));
        let mut nodes = Nodes::from([primary]);
        let present = record.config.members.iter();
        let stay = present.filter(|_| random.bool()).collect::<Vec<_>>();
        nodes.extend(stay.into_iter().take(copies - 1));
        while nodes.len() < copies {
            nodes.insert(Member(random.u16(..self.nodes as u16)));
        }
        let acks = [AckLevel::One, AckLevel::Majority, AckLevel::All];
        let copies_min = random.u8(1..=copies as u8);
        let stay = record.config.members.iter();
        let stay = stay.filter(|member| nodes.contains(member)).count();
        // The daemon does not let all writes fail until others have joined.
        let may_fail = random.bool() && stay >= usize::from(copies_min);
        self.wanted = Some(Shape {
            ack: acks[random.usize(..acks.len())],
            copies_min,
            when_short: if may_fail {
                WhenShort::Error
            } else {
                WhenShort::Wait
            },
            nodes,
        });
    }

    /// What a primary is to be asked for, which is among the nodes of that: it takes the place of one that is no member.
    fn asks(&mut self, record: &GroupRecord, primary: Member) -> Option<Shape> {
        let shape = self.wanted.as_mut()?;
        if !shape.nodes.contains(&primary) {
            let members = &record.config.members;
            let spare = shape.nodes.iter().find(|node| !members.contains(**node));
            let spare = spare.or(shape.nodes.first()).copied();
            shape.nodes.retain(|node| Some(*node) != spare);
            shape.nodes.insert(primary);
        }
        self.wanted.clone()
    }
}

/// The operator looks at the group, and asks who serves it for what it is to be.
pub(super) fn operator_looks(world: &mut ClusterWorld) {
    let Some(pause_max) = world.scenario.shape_pause else {
        return;
    };
    let pause = if world.is_calm || world.operator.random.bool() {
        LOOK_AGAIN
    } else {
        Nanos(world.operator.random.u64(1..pause_max.0))
    };
    world.engine.after(pause, Happening::Operator);
    let Some((node, _)) = world.primary() else {
        return;
    };
    let primary = Member(node as u16);
    let record = world.store.record().clone();
    // An operator does with no fewer copies while some are not what they were.
    if !world.is_calm && pause != LOOK_AGAIN && !world.media.has_hurt() {
        world.operator.draw(&record, primary);
    }
    if world.operator.is_content(&record) {
        return;
    }
    let asked = world.operator.asks(&record, primary);
    let now = world.nodes[node].now(world.engine.now());
    if let Some((shape, up)) = asked.zip(world.nodes[node].running())
        && up.participant.configure(now, shape)
    {
        world.touched.insert(node);
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::replication::record::{Config, Seat};

    use super::*;

    #[test]
    fn operator_asks_for_groups_that_who_serves_may_become() {
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
        let record = GroupRecord::first(Member(0), config, Nodes::new());
        let mut operator = Operator::new(5, 1);
        let mut seen = Nodes::new();
        for _ in 0..100 {
            operator.draw(&record, Member(0));
            let shape = operator.asks(&record, Member(0)).unwrap();
            assert!(shape.nodes.contains(&Member(0)));
            assert!((1..=shape.nodes.len()).contains(&usize::from(shape.copies_min)));
            let next = record.toward(&shape);
            assert!(next.is_none_or(|next| record.check_next(&next).is_ok()));
            seen.extend(&shape.nodes);
            let copies = shape.nodes.len();
            let other = operator.asks(&record, Member(4)).unwrap();
            assert!(other.nodes.contains(&Member(4)) && other.nodes.len() == copies);
        }
        assert_eq!(seen.len(), 5);
    }
}
