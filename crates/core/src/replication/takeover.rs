//! How a candidate takes a group: promises, the longest log, everybody on one level, and the record.
//!
//! ```text
//!  Gathers ──enough promises, and time is over or all have answered──► Fetches ──has the longest log──► Levels
//!     │                                                                                                    │
//!     │ its own copy is not whole, too few are, a higher epoch,        all that promised have it, or time is over
//!     │ another record                                                                                     │
//!     ▼                                                                                                    ▼
//!  Stopped ◄────────────────────────────another record───────────────────────────────────────────────── Asks ──► Serves
//! ```
//!
//! | step | sent | waits for |
//! |---|---|---|
//! | Gathers | Promise to every member of the record, itself too; ReadLog to those who have what is damaged here ([healing](super::participant)) | as many promises of whole copies as a takeover needs |
//! | Fetches | ReadLog to one that has the longest log; to its own copy the Superblock, which may make room | it is durable here; Gathers again if nobody has it any more |
//! | Levels | Superblock: the highest tail, and an opening that nobody knows, with where it begins; Append what a copy lacks | Ack and Named |
//! | Asks | – | the record `serving`, with those that are level |
//!
//! Invariants:
//! 1. What was committed is in the longest log: of the members that promised, one at least has it, and logs of members
//!    of one record are prefixes of one another.
//! 2. Nothing of a lower epoch is committed once enough have promised: fewer than it takes are left.
//! 3. The members of the new record hold the same log durably, know the tail, and know the opening and where it begins
//!    before it writes its first span.
//! 4. The new opening is higher than any that a member of the record knows, and so than any that wrote a span.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use super::message::{Change, Copy, Message};
use super::record::{GroupRecord, Nodes, Phase};
use super::{Member, Point, SpanId, Spans};

/// Where it stands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Promises come in.
    Gathers,
    /// Spans that this node lacks come from another one.
    Fetches {
        /// Where the longest log ends.
        up_to: Point,
    },
    /// Others get what they lack.
    Levels {
        /// Where the log ends.
        head: Point,
    },
    /// The record may be written.
    Asks {
        /// It.
        record: GroupRecord,
        /// Where the log ends.
        head: Point,
        /// The store was asked.
        is_asked: bool,
    },
    /// It is written.
    Serves {
        /// It.
        record: GroupRecord,
        /// Where the log ends.
        head: Point,
    },
    /// The group is another one's, or this node's copy cannot be its log.
    Stopped(Stop),
}

/// Why a takeover stopped.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Error)]
pub enum Stop {
    /// Somebody takes the group in a higher epoch.
    #[error(
        "a member has promised epoch {promised}, and this takeover is of epoch {epoch}: another node takes the group, or has it; leave it to that one, or begin another takeover"
    )]
    Fenced {
        /// What the member has promised.
        promised: u64,
        /// In which this node takes the group.
        epoch: u64,
    },
    /// The record is another one by now.
    #[error(
        "the record of the group was replaced by revision {revision} meanwhile: see there who has the group; if nobody has it, begin another takeover"
    )]
    Record {
        /// Its revision.
        revision: u64,
    },
    /// This node's own copy has damaged data that no member has whole.
    #[error(
        "this node's copy of the log is damaged at {}, and no member has given that whole. If another member's \
         copy is whole, have that one take over; or put the device of one right that has them, and begin another takeover; or \
         give up what the backend does not have: delete the volume (`hdcs volume delete --discard-dirty`), and make it anew over its \
         backend",
        Spots(.missing, *.count)
    )]
    OwnDamaged {
        /// How many spans.
        count: usize,
        /// The first of them: from where to where they lie, in blocks; [`DAMAGED_MAX`] at most.
        missing: Vec<(u64, u64)>,
    },
    /// This node's own copy is not whole, or is not that of the member that the record names.
    #[error(
        "this node's copy of the log is not whole or damaged, or was brought up for another record than the one that names it: make another member the candidate; this one joins then"
    )]
    OwnNotWhole,
    /// All have answered, and too few copies are whole.
    #[error(
        "{whole} of the members have promised with a whole copy, and a takeover needs {needed}: have more of them start, with their media, and begin another takeover"
    )]
    TooFew {
        /// Members that have promised with a whole copy.
        whole: usize,
        /// How many it takes.
        needed: usize,
    },
    /// The log of this node ends before the highest tail.
    #[error(
        "this node's log ends at block {own} and the group's log begins at block {tail}, and what lies between is in nobody's log any more: make one of these the candidate: {}",
        Listed(.could)
    )]
    OwnLacks {
        /// Where the own log ends, in blocks.
        own: u64,
        /// Where the log of the group begins, in blocks.
        tail: u64,
        /// Members that could take the group.
        could: Nodes,
    },
    /// No higher number is left for an opening.
    #[error("the numbers of openings are used up: make a new volume and copy the data there")]
    NoOpening,
}

/// Nodes for a sentence.
struct Listed<'a>(&'a Nodes);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, node) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{node}")?;
        }
        Ok(())
    }
}

/// Damaged spans that are named; of more it is said how many.
pub const DAMAGED_MAX: usize = 8;

/// Places of the log for a sentence, of so many in all.
struct Spots<'a>(&'a [(u64, u64)], usize);

impl fmt::Display for Spots<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (from, to)) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}blocks {from} to {to}")?;
        }
        let more = self.1.saturating_sub(self.0.len());
        if more > 0 {
            write!(f, ", and {more} more")?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Link {
    Away,
    Asked { is_sent: bool },
    Open,
}

/// What is known of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Answer {
    link: Link,
    copy: Option<Copy>,
    /// Where what it was sent ends.
    sent: Point,
    durable: u64,
    is_told: bool,
    is_named: bool,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Takeover {
    me: Member,
    record: GroupRecord,
    answers: BTreeMap<Member, Answer>,
    /// Where this node's durable log ends.
    own: Point,
    /// Its copy may count once what is damaged of it has come from others.
    may_heal: bool,
    step: Step,
    /// What superblocks shall say.
    change: Change,
    /// What was asked for by ReadLog and has not come, and of whom.
    reads: Option<(Member, Point)>,
}

impl Takeover {
    /// Begin under a record that names this node the candidate. Its own copy is asked for its promise like any other.
    pub fn new(me: Member, record: GroupRecord) -> Self {
        assert_eq!(record.phase, Phase::Taking { candidate: me });
        let members = record.config.members.iter();
        let none = Answer {
            link: Link::Away,
            copy: None,
            sent: Point::default(),
            durable: 0,
            is_told: false,
            is_named: false,
        };
        let mut answers: BTreeMap<Member, Answer> = members.map(|member| (member, none)).collect();
        if let Some(own) = answers.get_mut(&me) {
            own.link = Link::Asked { is_sent: false };
        }
        Self {
            me,
            record,
            answers,
            own: Point::default(),
            may_heal: false,
            step: Step::Gathers,
            change: Change::default(),
            reads: None,
        }
    }

    /// Where it stands.
    pub fn step(&self) -> &Step {
        &self.step
    }

    /// The epoch that it takes the group in.
    pub fn epoch(&self) -> u64 {
        self.record.epoch
    }

    /// What superblocks of the members say when it serves.
    pub fn change(&self) -> Change {
        self.change
    }

    /// A link to a node is there.
    pub fn connected(&mut self, to: Member) {
        if let Some(answer) = self.answers.get_mut(&to) {
            answer.link = Link::Asked { is_sent: false };
        }
    }

    /// It is no more.
    pub fn disconnected(&mut self, from: Member) {
        if let Some(answer) = self.answers.get_mut(&from) {
            answer.link = Link::Away;
            answer.is_told = false;
            self.reads.take_if(|(source, _)| *source == from);
        }
    }

    /// Take a message of a member, or of this node's own copy, that answers what was sent in this epoch. Returns a
    /// span that this node lacked.
    pub fn receive(&mut self, from: Member, message: &Message) -> Option<SpanId> {
        let answer = self.answers.get_mut(&from)?;
        match (message, answer.link) {
            (Message::Fenced { promised }, _) if *promised > self.record.epoch => {
                self.step = Step::Stopped(Stop::Fenced {
                    promised: *promised,
                    epoch: self.record.epoch,
                });
            }
            (Message::Promised(copy), Link::Asked { is_sent: true })
                if copy.promised == self.record.epoch =>
            {
                // Who answers late is not one of those that the longest log was looked for among.
                if self.step != Step::Gathers && answer.copy.is_none() {
                    return None;
                }
                answer.link = Link::Open;
                answer.copy = Some(*copy);
                answer.sent = copy.head;
                answer.durable = copy.head.position;
                if from == self.me {
                    self.own = copy.head;
                    let joined = self.record.config.members.joined(from);
                    if !(copy.is_whole || self.may_heal) || joined != Some(copy.joined) {
                        self.step = Step::Stopped(Stop::OwnNotWhole);
                    }
                }
            }
            (Message::Ack { durable }, Link::Open) => {
                let durable = (*durable).min(answer.sent.position);
                answer.durable = answer.durable.max(durable);
            }
            (Message::Named { number }, Link::Open) if answer.is_told => {
                answer.is_named = *number == self.change.number;
            }
            (Message::LogData(span), Link::Open) if self.reads == Some((from, span.start)) => {
                self.reads = None;
                return Some(*span);
            }
            _ => {}
        }
        None
    }

    /// This node's own copy is durable up to there.
    pub fn own_durable(&mut self, own: Point) {
        self.own = own;
        if let Some(answer) = self.answers.get_mut(&self.me) {
            answer.durable = own.position;
        }
    }

    /// The same, whose own copy may be one that has to be [healed](Self::own_healed) before it counts.
    #[must_use]
    pub fn healing(self, may_heal: bool) -> Self {
        Self { may_heal, ..self }
    }

    /// Whether what is damaged of its own copy is to come from others now: that has promised, and does not count yet.
    pub fn is_to_heal(&self) -> bool {
        let own = self.answers.get(&self.me).and_then(|own| own.copy);
        self.may_heal && self.step == Step::Gathers && own.is_some_and(|copy| !copy.is_whole)
    }

    /// Nothing of it is damaged any more: this is what it says of itself.
    pub fn own_healed(&mut self, copy: Copy) {
        self.may_heal = false;
        if !copy.is_whole {
            return self.stop(Stop::OwnNotWhole);
        }
        if let Some(own) = self.answers.get_mut(&self.me) {
            own.copy = Some(copy);
        }
    }

    /// It does not come about.
    pub fn stop(&mut self, why: Stop) {
        self.step = Step::Stopped(why);
    }

    /// Whether all but this node have answered, and are reached: one whose link breaks for a moment will promise anew.
    pub fn others_have_answered(&self) -> bool {
        let mut others = self
            .answers
            .iter()
            .filter(|(member, _)| **member != self.me);
        others.all(|(_, answer)| answer.copy.is_some() && answer.link == Link::Open)
    }

    /// Who has promised, is reached, and has all before this position, damaged or not.
    pub fn having(&self, position: u64) -> impl Iterator<Item = Member> {
        let has = move |(member, answer): &(&Member, &Answer)| {
            **member != self.me
                && answer.link == Link::Open
                && answer
                    .copy
                    .is_some_and(|copy| copy.head.position >= position)
        };
        self.answers.iter().filter(has).map(|(member, _)| *member)
    }

    /// The record under which the group is taken.
    pub fn record(&self) -> &GroupRecord {
        &self.record
    }

    /// Members that have promised with a whole copy.
    pub fn whole(&self) -> impl Iterator<Item = (Member, &Copy)> {
        let answers = self.answers.iter();
        answers.filter_map(|(member, answer)| {
            let joined = self.record.config.members.joined(*member);
            let copy = answer.copy.as_ref().filter(|copy| copy.is_whole)?;
            (joined == Some(copy.joined)).then_some((*member, copy))
        })
    }

    /// Members that have not answered.
    pub fn silent(&self) -> impl Iterator<Item = Member> {
        let answers = self.answers.iter();
        answers.filter_map(|(member, answer)| answer.copy.is_none().then_some(*member))
    }

    /// Who was asked for its promise, or for a part of the log, and has not answered. Not those who may answer too late.
    pub fn owing(&self) -> impl Iterator<Item = Member> {
        let others = (self.answers.iter()).filter(|(member, _)| **member != self.me);
        let owes = move |(member, answer): &(&Member, &Answer)| {
            let counts = self.step == Step::Gathers || answer.copy.is_some();
            let is_read = self.reads.is_some_and(|(source, _)| source == **member);
            is_read || counts && answer.link == Link::Asked { is_sent: true }
        };
        others.filter(owes).map(|(member, _)| *member)
    }

    /// Whether enough have promised to go on without the others.
    pub fn has_enough(&self) -> bool {
        let has_own = self.whole().any(|(member, _)| member == self.me);
        has_own && self.whole().count() >= self.record.config.promises_to_take()
    }

    /// Those who have not answered are not waited for any longer.
    pub fn end_gathering(&mut self) {
        if self.step != Step::Gathers || !self.has_enough() {
            return;
        }
        self.step = match self.choose() {
            Ok(up_to) => Step::Fetches { up_to },
            Err(stop) => Step::Stopped(stop),
        };
        self.go_on();
    }

    /// Choose the log and what superblocks shall say, of the copies of those that promised. Returns where the log ends.
    fn choose(&mut self) -> Result<Point, Stop> {
        let heads = self.whole().map(|(_, copy)| copy.head);
        let up_to = heads.max_by_key(|head| head.position).unwrap_or(self.own);
        let tails = self.whole().map(|(_, copy)| (copy.tail, copy.sync_points));
        let (tail, sync_points) = tails
            .max_by_key(|(tail, sync_points)| (tail.position, *sync_points))
            .unwrap_or_default();
        let is_unflushed = self.whole().any(|(_, copy)| copy.is_unflushed);
        let copies = self.answers.values().filter_map(|answer| answer.copy);
        let known = copies.map(|copy| copy.incarnation).max().unwrap_or(0);
        let incarnation = known.checked_add(1).ok_or(Stop::NoOpening)?;
        for answer in self.answers.values_mut() {
            (answer.is_told, answer.is_named) = (false, false);
        }
        self.change = Change {
            number: self.change.number + 1,
            tail,
            sync_points,
            incarnation,
            opens_at: up_to.position,
            is_unflushed,
        };
        if self.own.position < tail.position {
            // What lies before the tail is not to be had from anybody.
            let reaches = |(_, copy): &(Member, &Copy)| copy.head.position >= tail.position;
            return Err(Stop::OwnLacks {
                own: self.own.position,
                tail: tail.position,
                could: (self.whole().filter(reaches))
                    .map(|(member, _)| member)
                    .collect(),
            });
        }
        Ok(up_to)
    }

    /// Who is not level yet is left out.
    pub fn end_levelling(&mut self) {
        let Step::Levels { head } = self.step else {
            return;
        };
        if !self.is_level(self.me, head) {
            return;
        }
        let whole: Nodes = self.whole().map(|(member, _)| member).collect();
        let members = &self.record.config.members;
        let level = members.only(|member| whole.contains(&member) && self.is_level(member, head));
        self.step = Step::Asks {
            record: self.record.serving(self.me, level, head),
            head,
            is_asked: false,
        };
    }

    /// Whether somebody who is reached, or this node itself, is not on the level yet.
    pub fn levels_some(&self) -> bool {
        let Step::Levels { head } = self.step else {
            return false;
        };
        let is_away = |member| {
            let answer: Option<&Answer> = self.answers.get(&member);
            answer.is_none_or(|answer| answer.link == Link::Away)
        };
        self.whole()
            .any(|(member, _)| !self.is_level(member, head) && !is_away(member))
    }

    fn is_level(&self, member: Member, head: Point) -> bool {
        let answer = self.answers.get(&member);
        answer.is_some_and(|answer| {
            // One that says of itself, when it is reached again, that it ends elsewhere is not.
            let ends_there = member == self.me || answer.sent == head;
            ends_there && answer.is_named && answer.durable >= head.position
        })
    }

    /// Go on if everybody has promised, and begin again if nobody reaches as far any more as what is fetched.
    fn gather(&mut self) {
        if let Step::Fetches { up_to } = self.step
            && !self.whole().any(|(_, copy)| copy.head == up_to)
            && self.own != up_to
        {
            self.step = Step::Gathers;
            for answer in self.answers.values_mut() {
                // Who answered too late is asked again.
                if let (Link::Asked { is_sent }, None) = (&mut answer.link, answer.copy) {
                    *is_sent = false;
                }
            }
        }
        if self.step != Step::Gathers || self.answers.values().any(|answer| answer.copy.is_none()) {
            return;
        }
        if self.has_enough() {
            self.end_gathering();
        } else if !self.is_to_heal() {
            self.step = Step::Stopped(Stop::TooFew {
                whole: self.whole().count(),
                needed: self.record.config.promises_to_take(),
            });
        }
    }

    /// Go on if everybody has what a step waits for.
    pub fn go_on(&mut self) {
        self.gather();
        if let Step::Fetches { up_to } = self.step
            && self.own == up_to
        {
            self.step = Step::Levels { head: up_to };
        }
        if let Step::Levels { head } = self.step
            && self.whole().all(|(member, _)| self.is_level(member, head))
        {
            self.end_levelling();
        }
    }

    /// Whom there may be a message for; one to this node is for its own copy.
    pub fn members(&self) -> impl Iterator<Item = Member> {
        self.answers.keys().copied()
    }

    /// The next message to send to a member, of this node's log, which ends at `head`, durable or not. It counts as sent:
    /// it is asked for while the link has room.
    pub fn next_message(&mut self, to: Member, log: &impl Spans, head: Point) -> Option<Message> {
        if matches!(self.step, Step::Stopped(_)) {
            return None;
        }
        let floor = self.record.floor;
        let answer = self.answers.get_mut(&to)?;
        if let Link::Asked { is_sent } = &mut answer.link {
            return (!core::mem::replace(is_sent, true)).then_some(Message::Promise { floor });
        }
        match self.step {
            // Its own ring may have no room for what is fetched before its tail has moved.
            Step::Fetches { .. } if to == self.me => self.next_change(to),
            Step::Fetches { up_to } if head != up_to && self.reads.is_none() => {
                let is_source =
                    |(member, copy): (Member, &Copy)| member == to && copy.head == up_to;
                if answer.link != Link::Open || !self.whole().any(is_source) {
                    return None;
                }
                self.reads = Some((to, head));
                Some(Message::ReadLog { after: head })
            }
            Step::Levels { head } => {
                let is_whole = self.whole().any(|(member, _)| member == to);
                if !is_whole {
                    return None;
                }
                self.next_change(to)
                    .or_else(|| self.next_span(to, log, head))
            }
            _ => None,
        }
    }

    fn next_change(&mut self, to: Member) -> Option<Message> {
        let answer = self.answers.get_mut(&to)?;
        let is_open = answer.link == Link::Open;
        let is_told = is_open && core::mem::replace(&mut answer.is_told, true);
        (is_open && !is_told).then_some(Message::Superblock(self.change))
    }

    fn next_span(&mut self, to: Member, log: &impl Spans, head: Point) -> Option<Message> {
        let answer = self.answers.get_mut(&to)?;
        if to == self.me || answer.link != Link::Open || answer.sent == head {
            return None;
        }
        let next = log.span_after(answer.sent.position)?;
        if next.start != answer.sent {
            return None;
        }
        answer.sent = next.end;
        Some(Message::Append(next))
    }

    /// The record to ask the store for, which takes the place of the one that named this node the candidate.
    pub fn next_record(&mut self) -> Option<GroupRecord> {
        match &mut self.step {
            Step::Asks {
                record,
                is_asked: is_asked @ false,
                ..
            } => {
                *is_asked = true;
                Some(record.clone())
            }
            _ => None,
        }
    }

    /// It is not known how asking for it ended, and the record that is there is still the one that named this node.
    pub fn ask_again(&mut self) {
        if let Step::Asks { is_asked, .. } = &mut self.step {
            *is_asked = false;
        }
    }

    /// The store has this record.
    pub fn seen(&mut self, seen: &GroupRecord) {
        if seen.revision <= self.record.revision || matches!(self.step, Step::Serves { .. }) {
            return;
        }
        match &mut self.step {
            Step::Asks { record, head, .. } if record == seen => {
                self.step = Step::Serves {
                    record: seen.clone(),
                    head: *head,
                };
            }
            step if (seen.epoch, seen.phase) == (self.record.epoch, self.record.phase) => {
                // The manager named other joiners: what was asked for cannot come about any more.
                self.record = seen.clone();
                if let Step::Asks {
                    record,
                    head,
                    is_asked,
                } = step
                {
                    *record = seen.serving(self.me, record.config.members.clone(), *head);
                    *is_asked = false;
                }
            }
            _ => {
                self.step = Step::Stopped(Stop::Record {
                    revision: seen.revision,
                });
            }
        }
    }

    /// Assert what must always hold.
    pub fn check_invariants(&self) {
        if let Step::Asks { record, .. } | Step::Serves { record, .. } = &self.step {
            assert!(record.config.members.contains(self.me));
            assert!(record.config.members.are_among(&self.record.config.members));
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::super::record::{AckLevel, Config, Seat, WhenShort};
    use super::super::replica::{Replica, Superblock};
    use super::*;

    const ME: Member = Member(0);

    /// This node takes a group of three, whose commits are of two.
    fn takeover() -> Takeover {
        let seats = (0..3).map(|node| Seat {
            member: Member(node),
            joined: 1,
        });
        let config = Config {
            members: seats.collect(),
            replicas: 3,
            ack: AckLevel::Majority,
            copies_min: 1,
            when_short: WhenShort::Wait,
        };
        let record = GroupRecord::first(Member(1), config, Nodes::new()).taking(ME);
        Takeover::new(ME, record)
    }

    fn point(position: u64) -> Point {
        Point {
            position,
            chain: position * 10,
        }
    }

    fn copy(tail: u64, head: u64) -> Copy {
        Copy {
            promised: 2,
            head: point(head),
            tail: point(tail),
            sync_points: tail,
            incarnation: 4,
            is_unflushed: false,
            joined: 1,
            is_whole: true,
            lease_left_ms: 0,
        }
    }

    fn log() -> Replica {
        Replica::new(Superblock::new(true), 64, [])
    }

    fn promise(takeover: &mut Takeover, from: u16, copy: Copy) {
        let from = Member(from);
        takeover.connected(from);
        let floor = Point::default();
        let asked = takeover.next_message(from, &log(), point(0));
        assert_eq!(asked, Some(Message::Promise { floor }));
        takeover.receive(from, &Message::Promised(copy));
        takeover.check_invariants();
    }

    fn stop(takeover: &Takeover) -> Stop {
        match takeover.step() {
            Step::Stopped(stop) => stop.clone(),
            step => panic!("{step:?}"),
        }
    }

    #[test]
    fn change_is_of_the_highest_tail_and_of_any_unflushed_mark() {
        let mut takeover = takeover();
        let unflushed = Copy {
            is_unflushed: true,
            ..copy(0, 3)
        };
        promise(&mut takeover, 0, copy(0, 3));
        promise(&mut takeover, 1, unflushed);
        promise(&mut takeover, 2, copy(2, 5));
        takeover.go_on();
        assert_eq!(*takeover.step(), Step::Fetches { up_to: point(5) });
        let change = Change {
            number: 1,
            tail: point(2),
            sync_points: 2,
            incarnation: 5,
            opens_at: 5,
            is_unflushed: true,
        };
        assert_eq!(takeover.change(), change);
        // Its own tail moves at once; what it lacks comes from who has it.
        let mut next = |to, head| takeover.next_message(Member(to), &log(), point(head));
        assert_eq!(next(0, 3), Some(Message::Superblock(change)));
        assert_eq!(next(1, 3), None);
        assert_eq!(next(2, 3), Some(Message::ReadLog { after: point(3) }));
    }

    #[test]
    fn candidate_that_lacks_what_has_gone_names_who_could_take_the_group() {
        let mut takeover = takeover();
        promise(&mut takeover, 0, copy(0, 1));
        promise(&mut takeover, 1, copy(0, 2));
        promise(&mut takeover, 2, copy(2, 5));
        takeover.go_on();
        let could = [Member(1), Member(2)].into();
        let lacks = Stop::OwnLacks {
            own: 1,
            tail: 2,
            could,
        };
        assert_eq!(stop(&takeover), lacks);
        assert!(lacks.to_string().ends_with("the candidate: node 1, node 2"));
        assert_eq!(takeover.next_message(Member(1), &log(), point(1)), None);
    }

    #[test]
    fn candidate_stops_when_all_have_answered_and_too_few_are_whole() {
        let mut takeover = takeover();
        let lost = Copy {
            is_whole: false,
            ..copy(0, 0)
        };
        promise(&mut takeover, 0, copy(0, 1));
        promise(&mut takeover, 1, lost);
        takeover.go_on();
        assert_eq!(*takeover.step(), Step::Gathers);
        promise(&mut takeover, 2, lost);
        takeover.go_on();
        let few = Stop::TooFew {
            whole: 1,
            needed: 2,
        };
        assert_eq!(stop(&takeover), few);
    }

    /// The primary alone commits, and so may have raised an opening that nobody else knows, and written spans of it.
    #[test]
    fn opening_that_the_primary_raised_alone_is_waited_for_and_not_numbered_again() {
        let mut takeover = takeover();
        takeover.record.config.ack = AckLevel::One;
        promise(&mut takeover, 0, copy(0, 3));
        promise(&mut takeover, 1, copy(0, 3));
        takeover.go_on();
        takeover.end_gathering();
        assert_eq!(*takeover.step(), Step::Gathers, "its promise is needed");
        let raised_alone = Copy {
            incarnation: 9,
            ..copy(0, 5)
        };
        promise(&mut takeover, 2, raised_alone);
        takeover.go_on();
        assert_eq!(*takeover.step(), Step::Fetches { up_to: point(5) });
        let change = takeover.change();
        assert_eq!((change.incarnation, change.opens_at), (10, 5));
    }

    #[test]
    fn candidate_levels_nobody_any_more_once_the_others_are_away() {
        let mut takeover = takeover();
        promise(&mut takeover, 0, copy(0, 3));
        promise(&mut takeover, 1, copy(0, 3));
        promise(&mut takeover, 2, copy(0, 1));
        takeover.go_on();
        assert_eq!(*takeover.step(), Step::Levels { head: point(3) });
        let number = takeover.change().number;
        for member in [ME, Member(1)] {
            takeover.next_message(member, &log(), point(3));
            takeover.receive(member, &Message::Named { number });
        }
        takeover.go_on();
        assert!(
            takeover.levels_some(),
            "one lacks something, and is reached"
        );
        takeover.disconnected(Member(2));
        assert!(!takeover.levels_some());
        assert_eq!(*takeover.step(), Step::Levels { head: point(3) });
    }

    #[test]
    fn candidate_gathers_anew_when_the_longest_log_is_lost() {
        let mut takeover = takeover();
        promise(&mut takeover, 0, copy(0, 3));
        promise(&mut takeover, 2, copy(0, 5));
        takeover.end_gathering();
        assert_eq!(*takeover.step(), Step::Fetches { up_to: point(5) });
        takeover.disconnected(Member(2));
        let lost = Copy {
            is_whole: false,
            ..copy(0, 0)
        };
        promise(&mut takeover, 2, lost);
        takeover.go_on();
        assert_eq!(*takeover.step(), Step::Gathers);
        promise(&mut takeover, 1, copy(0, 3));
        takeover.go_on();
        assert_eq!(*takeover.step(), Step::Levels { head: point(3) });
        assert_eq!(takeover.change().number, 2, "it replaces the first choice");
    }

    #[test]
    fn candidate_stops_for_a_higher_epoch_another_record_or_a_copy_that_is_not_its_own() {
        let mut fenced = takeover();
        fenced.receive(Member(1), &Message::Fenced { promised: 7 });
        let higher = Stop::Fenced {
            promised: 7,
            epoch: 2,
        };
        assert_eq!(stop(&fenced), higher);

        let mut replaced = takeover();
        let record = replaced.record.taking(Member(2));
        replaced.seen(&record);
        assert_eq!(stop(&replaced), Stop::Record { revision: 3 });

        let mut other = takeover();
        let joined = Copy {
            joined: 9,
            ..copy(0, 1)
        };
        promise(&mut other, 0, joined);
        assert_eq!(stop(&other), Stop::OwnNotWhole);
    }
}
