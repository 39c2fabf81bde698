//! One node: its medium, and while it is up its copy of the log and the part that it plays.

use std::collections::VecDeque;

use hdcs_core::format::control_checksum;
use hdcs_core::replication::group::Group;
use hdcs_core::replication::message::{Change, Message};
use hdcs_core::replication::record::{GroupRecord, Phase};
use hdcs_core::replication::replica::{Outgoing, Replica};
use hdcs_core::replication::takeover::{Step, Takeover};
use hdcs_core::replication::{Member, Point, SpanId, Spans};

use crate::clients::Service;
use crate::disk::{Disk, Rot, Write};
use crate::plant::Plant;
use crate::world::Scope;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    /// Its medium.
    pub disk: Disk,
    /// `None`: it is down.
    pub up: Option<Up>,
}

/// What a node has in memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Up {
    /// Its copy.
    pub replica: Replica,
    /// Its part.
    pub part: Part,
    /// The last record that it has seen.
    pub seen: u64,
    /// It reads back what it has.
    pub is_reading: bool,
    /// What stands on its log, if it serves and there are requests.
    pub service: Option<Service>,
}

/// The part that a node plays.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// A member that follows, or none.
    Follows,
    /// It takes the group.
    Takes(Takeover),
    /// It serves.
    Serves(Group),
}

/// What a node did that others get to know.
#[derive(Debug)]
pub enum Effect {
    /// A message for another node.
    Send(Outgoing),
    /// A record for the store.
    Ask(GroupRecord),
    /// It began to serve.
    Began,
    /// It writes a span over what its superblock needs.
    Overran,
}

impl Part {
    fn epoch(&self) -> Option<u64> {
        match self {
            Self::Follows => None,
            Self::Takes(takeover) => Some(takeover.epoch()),
            Self::Serves(group) => Some(group.epoch()),
        }
    }
}

/// Whether a message is for the copy, and not an answer for who leads.
fn is_for_replica(message: &Message) -> bool {
    match message {
        Message::Attach
        | Message::Append(_)
        | Message::Superblock(_)
        | Message::Promise { .. }
        | Message::ReadLog { .. }
        | Message::Beat { .. }
        | Message::Join
        | Message::JoinAt(_)
        | Message::Verify { .. } => true,
        Message::Attached(_)
        | Message::Ack { .. }
        | Message::Named { .. }
        | Message::Fenced { .. }
        | Message::Promised(_)
        | Message::LogData(_)
        | Message::Joining { .. }
        | Message::HasCut(_)
        | Message::NotWhole { .. }
        | Message::Echo { .. }
        | Message::Verified { .. }
        | Message::Nothing(_) => false,
    }
}

impl Up {
    /// What a node has in memory when it has started over this medium.
    pub fn start(disk: &Disk, plant: Option<Plant>) -> Result<Self, Rot> {
        let ring_blocks = match plant {
            Some(Plant::RingOverrun) => u64::MAX,
            _ => disk.ring_blocks,
        };
        let replica = match disk.replay() {
            Ok(found) => Replica::new(disk.superblock, ring_blocks, found),
            // What is brought up may be of two logs until it is whole.
            Err(Rot) if !disk.superblock.is_whole => Replica::damaged(disk.superblock, ring_blocks),
            Err(Rot) => return Err(Rot),
        };
        Ok(Self {
            replica,
            part: Part::Follows,
            seen: 0,
            is_reading: false,
            service: None,
        })
    }

    /// A link to another node is there.
    pub fn connected(&mut self, to: Member) {
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.connected(to),
            Part::Serves(group) => group.connected(to),
        }
    }

    /// It is no more.
    pub fn disconnected(&mut self, from: Member) {
        self.replica.disconnected(from);
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.disconnected(from),
            Part::Serves(group) => group.disconnected(from),
        }
    }

    /// A write has ended.
    pub fn finished(&mut self, write: Write) {
        match write {
            Write::Span(span) => self.replica.written(span.end.position),
            Write::Superblock(_) => self.replica.superblock_written(),
        }
    }

    /// Whether a message makes a difference: an answer does to who asked in that epoch.
    pub fn hears(&self, epoch: u64, message: &Message) -> bool {
        is_for_replica(message) || self.part.epoch() == Some(epoch)
    }

    /// Take a message.
    pub fn receive(&mut self, me: Member, from: Member, epoch: u64, message: &Message) {
        if is_for_replica(message) {
            self.replica.receive(from, epoch, message);
        } else if self.part.epoch() == Some(epoch) {
            match &mut self.part {
                Part::Follows => {}
                Part::Takes(takeover) => {
                    if let Some(span) = takeover.receive(from, message) {
                        self.replica.append(epoch, span);
                    }
                }
                Part::Serves(group) => match message {
                    Message::Named { number } if from == me => group.own_named(*number),
                    _ => group.receive(from, message, &self.replica),
                },
            }
        }
    }

    /// See the record that the store has. Returns whether this node begins to take the group.
    pub fn see(&mut self, me: Member, record: &GroupRecord) -> bool {
        self.seen = record.revision;
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.seen(record),
            Part::Serves(group) => group.seen(record),
        }
        let names_me = record.phase == Phase::Taking { candidate: me };
        let begins = names_me
            && record.epoch >= self.replica.promised()
            && self.part.epoch() != Some(record.epoch);
        if begins {
            self.part = Part::Takes(Takeover::new(me, record.clone()));
        }
        begins
    }

    /// Change what superblocks say, if this node serves.
    pub fn change(&mut self, me: Member, change: impl FnOnce(Change) -> Change) {
        if let Part::Serves(group) = &mut self.part {
            group.set_change(change(group.change()));
            (self.replica).change_own(me, group.epoch(), group.change());
        }
    }

    /// The span that the primary would append next; with this in it.
    pub fn next_span(&self, me: Member, content: &[u8]) -> Option<SpanId> {
        let Part::Serves(group) = &self.part else {
            return None;
        };
        let start = self.replica.head();
        let position = start.position + 1;
        let written = position << 16 | u64::from(me.0) << 8 | group.incarnation();
        let written = written ^ control_checksum(content);
        let chain = (start.chain.rotate_left(7) ^ written).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        Some(SpanId {
            start,
            end: Point { position, chain },
            blocks: 1,
            incarnation: group.incarnation(),
            evidence: self.replica.durable().position,
        })
    }

    /// Let everything happen in this node that needs nobody else.
    pub fn settle(
        &mut self,
        me: Member,
        disk: &mut Disk,
        scope: &Scope,
        effects: &mut Vec<Effect>,
    ) {
        let mut own = VecDeque::new();
        loop {
            if self
                .part
                .epoch()
                .is_some_and(|epoch| self.replica.promised() > epoch)
            {
                self.part = Part::Follows;
            }
            while let Some(span) = self.replica.next_write() {
                if !disk.in_flight.contains(&Write::Span(span)) {
                    if disk.overruns(&span) {
                        effects.push(Effect::Overran);
                    }
                    disk.in_flight.push(Write::Span(span));
                }
            }
            if self.replica.next_verify().is_some() {
                if scope.rots > 0 {
                    self.is_reading = true;
                } else {
                    self.replica.verified(true);
                }
            }
            while let Some(superblock) = self.replica.next_superblock() {
                let plant = scope.plant;
                let superblock = plant.map_or(superblock, |plant| plant.superblock(superblock));
                disk.in_flight.push(Write::Superblock(superblock));
            }
            while let Some((to, epoch, message)) = self.replica.next_message() {
                match message {
                    // Links break whenever they like, which is what comes of it.
                    Message::Nothing(_) => {}
                    _ if to == me => own.push_back((epoch, message)),
                    _ => effects.push(Effect::Send((to, epoch, message))),
                }
            }
            if let Some((epoch, message)) = own.pop_front() {
                self.receive(me, me, epoch, &message);
                continue;
            }
            self.tell_part();
            if self.take_over(me, effects) {
                continue;
            }
            let Some((to, message)) = self.next_of_part() else {
                break;
            };
            let epoch = self.part.epoch().unwrap_or(0);
            if to == me {
                self.replica.receive(me, epoch, &message);
            } else {
                effects.push(Effect::Send((to, epoch, message)));
            }
        }
        if let Some(record) = match &mut self.part {
            Part::Follows => None,
            Part::Takes(takeover) => takeover.next_record(),
            Part::Serves(group) => group.next_record(),
        } {
            effects.push(Effect::Ask(record));
        }
        match (&self.part, &mut self.service) {
            (Part::Serves(group), Some(service)) => service.committed(group.committed()),
            _ => self.service = None,
        }
        self.check();
    }

    /// Tell the part what is durable here.
    fn tell_part(&mut self) {
        let durable = self.replica.durable();
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => {
                if matches!(takeover.step(), Step::Fetches { .. } | Step::Levels { .. }) {
                    takeover.own_durable(durable);
                }
                takeover.go_on();
            }
            Part::Serves(group) => {
                group.own_durable(durable.position);
            }
        }
    }

    /// Serve, if the group is taken; follow, if that was given up.
    fn take_over(&mut self, me: Member, effects: &mut Vec<Effect>) -> bool {
        let Part::Takes(takeover) = &self.part else {
            return false;
        };
        match takeover.step() {
            Step::Serves { record, head } => {
                let group = Group::new(me, record.clone(), *head, takeover.change());
                self.part = Part::Serves(group);
                effects.push(Effect::Began);
                true
            }
            Step::Stopped(_) => {
                self.part = Part::Follows;
                true
            }
            Step::Gathers | Step::Fetches { .. } | Step::Levels { .. } | Step::Asks { .. } => false,
        }
    }

    fn next_of_part(&mut self) -> Option<(Member, Message)> {
        let head = self.replica.head();
        match &mut self.part {
            Part::Follows => None,
            Part::Takes(takeover) => {
                let members: Vec<Member> = takeover.members().collect();
                let next = |to| Some((to, takeover.next_message(to, &self.replica, head)?));
                members.into_iter().find_map(next)
            }
            Part::Serves(group) => {
                if group.is_fenced() {
                    self.part = Part::Follows;
                    return None;
                }
                let others: Vec<Member> = group.others().collect();
                let next = |to| Some((to, group.next_message(to, &self.replica)?));
                others.into_iter().find_map(next)
            }
        }
    }

    /// The points of its log up to what is committed, if it serves.
    pub fn committed(&self) -> Vec<Point> {
        let Part::Serves(group) = &self.part else {
            return Vec::new();
        };
        let mut points = Vec::new();
        let mut at = 0;
        while let Some(span) = self.replica.span_after(at) {
            at = span.end.position;
            if at > group.committed() {
                break;
            }
            points.push(span.end);
        }
        points
    }

    fn check(&self) {
        self.replica.check_invariants();
        if let Some(service) = &self.service {
            service.check_invariants();
        }
        match &self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.check_invariants(),
            Part::Serves(group) => group.check_invariants(),
        }
    }
}
