//! How a candidate takes a group: promises, the longest log, everybody on one level, and the record.
//!
//! ```text
//!  Gathers ──enough promises, and time is over or all have answered──► Fetches ──has the longest log──► Levels
//!     │                                                                                                    │
//!     │ its own copy is not whole, a higher epoch, another record      all that promised have it, or time is over
//!     ▼                                                                                                    ▼
//!  Stopped ◄────────────────────────────another record───────────────────────────────────────────────── Asks ──► Serves
//! ```
//!
//! | step | sent | waits for |
//! |---|---|---|
//! | Gathers | Promise to every member of the record, itself too | as many promises of whole copies as a takeover needs |
//! | Fetches | ReadLog to one that has the longest log | it is durable here |
//! | Levels | Append what a copy lacks, then Superblock: the highest tail, and an opening that nobody knows | Ack and Named |
//! | Asks | – | the record `serving`, with those that are level |
//!
//! Invariants:
//! 1. What was committed is in the longest log: of the members that promised, one at least has it, and logs of members
//!    of one record are prefixes of one another.
//! 2. Nothing of a lower epoch is committed once enough have promised: fewer than it takes are left.
//! 3. The members of the new record hold the same log durably, know the tail, and know the opening before it writes its
//!    first span.
//! 4. The new opening is higher than any that a member of the record knows, and so than any that wrote a span.

use alloc::collections::BTreeMap;

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
    Stopped,
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
                self.step = Step::Stopped;
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
                    if !copy.is_whole || joined != Some(copy.joined) {
                        self.step = Step::Stopped;
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

    /// Members that have promised with a whole copy.
    fn whole(&self) -> impl Iterator<Item = (Member, &Copy)> {
        let answers = self.answers.iter();
        answers.filter_map(|(member, answer)| {
            let joined = self.record.config.members.joined(*member);
            let copy = answer.copy.as_ref().filter(|copy| copy.is_whole)?;
            (joined == Some(copy.joined)).then_some((*member, copy))
        })
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
        let heads = self.whole().map(|(_, copy)| copy.head);
        let longest = heads.max_by_key(|head| head.position);
        let tails = self.whole().map(|(_, copy)| (copy.tail, copy.sync_points));
        let tail = tails.max_by_key(|(tail, sync_points)| (tail.position, *sync_points));
        let is_unflushed = self.whole().any(|(_, copy)| copy.is_unflushed);
        let copies = self.answers.values().filter_map(|answer| answer.copy);
        let known = copies.map(|copy| copy.incarnation).max();
        let (Some(up_to), Some((tail, sync_points)), Some(incarnation)) =
            (longest, tail, known.and_then(|known| known.checked_add(1)))
        else {
            self.step = Step::Stopped;
            return;
        };
        self.change = Change {
            number: 1,
            tail,
            sync_points,
            incarnation,
            is_unflushed,
        };
        // What lies before the tail is not to be had from anybody: another one of those that promised has to take it.
        self.step = if self.own.position < tail.position {
            Step::Stopped
        } else {
            Step::Fetches { up_to }
        };
        self.go_on();
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

    fn is_level(&self, member: Member, head: Point) -> bool {
        let answer = self.answers.get(&member);
        answer.is_some_and(|answer| answer.is_named && answer.durable >= head.position)
    }

    /// Go on if everybody has what a step waits for.
    pub fn go_on(&mut self) {
        if self.step == Step::Gathers && self.answers.values().all(|answer| answer.copy.is_some()) {
            self.end_gathering();
        }
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

    /// The next message to send, of this node's log; one to itself is for its own copy. `head` is where that ends,
    /// durable or not.
    pub fn next_message(&mut self, log: &impl Spans, head: Point) -> Option<(Member, Message)> {
        if self.step == Step::Stopped {
            return None;
        }
        let floor = self.record.floor;
        for (member, answer) in &mut self.answers {
            if let Link::Asked { is_sent } = &mut answer.link
                && !core::mem::replace(is_sent, true)
            {
                return Some((*member, Message::Promise { floor }));
            }
        }
        match self.step {
            Step::Fetches { up_to } if head != up_to && self.reads.is_none() => {
                let is_open = |member| {
                    self.answers
                        .get(&member)
                        .is_some_and(|a| a.link == Link::Open)
                };
                let sources = self.whole().filter(|(_, copy)| copy.head == up_to);
                let mut sources = sources.map(|(member, _)| member);
                let from = sources.find(|member| is_open(*member));
                drop(sources);
                let from = from?;
                self.reads = Some((from, head));
                Some((from, Message::ReadLog { after: head }))
            }
            Step::Levels { head } => self.next_levelling(log, head),
            _ => None,
        }
    }

    fn next_levelling(&mut self, log: &impl Spans, head: Point) -> Option<(Member, Message)> {
        let (me, change) = (self.me, self.change);
        let members = &self.record.config.members;
        let mut open = (self.answers.iter_mut()).filter(|(member, answer)| {
            let joined = members.joined(**member);
            let is_source = |copy: Copy| copy.is_whole && joined == Some(copy.joined);
            answer.link == Link::Open && answer.copy.is_some_and(is_source)
        });
        open.find_map(|(member, answer)| {
            if *member != me && answer.sent != head {
                let next = log.span_after(answer.sent.position)?;
                if next.start != answer.sent {
                    return None;
                }
                answer.sent = next.end;
                return Some((*member, Message::Append(next)));
            }
            let is_told = core::mem::replace(&mut answer.is_told, true);
            (!is_told).then_some((*member, Message::Superblock(change)))
        })
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
            _ => self.step = Step::Stopped,
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
