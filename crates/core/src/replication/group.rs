//! The primary's side of replication: what is committed, what each member is sent, who leaves and who joins.
//!
//! ```text
//!                  ┌────────── leave, join, configure: the record says so ────────┐
//!                  ▼                                                              │
//!  begin ──► serves ──a member is late, a joiner is whole, it is asked──► changes ┤ commits satisfy both records
//!                  │        (it asks once all that is committed is so           ▲ │
//!                  │         by the new record too)                             └─┘ outcome unknown: the record is looked at
//!                  ▼
//!               fenced: a member has promised a higher epoch, or the record is another one's
//! ```
//!
//! | link of a member | sent | goes to |
//! |---|---|---|
//! | Away | – | Attaching: connected |
//! | Attaching | Attach | InStep: it has what it said, all of it ours; Cuts: that ends before the tail; else it leaves |
//! | Cuts | JoinAt the tail | Attaching: its copy goes on there |
//! | InStep | changes, spans | Attaching: what it needs next has gone; Away: disconnected |
//!
//! A joiner's is in [`super::resync`].
//!
//! Invariants:
//! 1. `committed` is on the media of [`copies_to_commit`](super::record::Config::copies_to_commit) members, this one
//!    among them; while a change of the record is wanted or its outcome is not known, of both records' members.
//! 2. A change of the record is asked for only when all that is committed is so by the new record too. Without this,
//!    a majority of three that commits with one of two, and loses that one, would leave the other one to promise alone.
//! 3. A change is retired when it is durable on as many members; a takeover needs one of them. One that a member was not
//!    told does not count for it, whatever it says.
//! 4. A member counts for commits until the record without it is written, and a joiner counts from before the record
//!    with it is.
//! 5. Once fenced, nothing is committed any more.
//! 6. What the group is asked to be is known here alone until the record says it. Who takes the group in between goes on
//!    with what is written.

mod shape;

use alloc::collections::BTreeMap;

use smallvec::SmallVec;

use super::message::{Change, Message};
use super::record::{Config, GroupRecord, Nodes, Phase, Seat, Shape};
use super::resync::{self, Step};
use super::{Member, Point, Spans};
use crate::base::limits::JOIN_LAG_BLOCKS_MAX;

/// How a member or joiner is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Link {
    Away,
    Attaching { is_sent: bool },
    InStep,
    Joining(Step),
}

/// Where another node stands, as the primary sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It is not reached.
    Away,
    /// A member that is asked what it has.
    Attaches,
    /// A member that is sent what comes.
    InStep,
    /// A joiner whose copy is being cut to what all have.
    Begins,
    /// A joiner that takes what it lacks.
    Streams,
    /// A joiner that reads back what it has.
    ReadsBack,
    /// A joiner that is to become a member.
    Whole,
    /// One that needs a part of the log which is damaged here, and which no member has whole.
    Blocked,
}

/// What the primary sees of another node's copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherCopy {
    /// The node.
    pub member: Member,
    /// Where it stands.
    pub stage: Stage,
    /// Up to where it has said that its copy is durable, as far as that is known.
    pub durable: u64,
}

/// What is known of another one's copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Progress {
    link: Link,
    /// Where what it was sent ends.
    sent: u64,
    /// Number of the change that it was told.
    told: u64,
    durable: u64,
    /// Number of the change that its superblock says.
    named: u64,
    /// Of a joiner: under which revision of the record it is brought up.
    joined: u64,
}

impl Progress {
    const UNKNOWN: Self = Self {
        link: Link::Away,
        sent: 0,
        told: 0,
        durable: 0,
        named: 0,
        joined: 0,
    };
}

/// A change of the record.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Pending {
    kind: Kind,
    to: GroupRecord,
    /// It was handed out and its outcome is waited for.
    is_asked: bool,
    /// It was handed out some time: the store may have it, whatever is known.
    may_be_written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Leave(Member),
    Join(Member),
    /// On the way to [`Group::shape`].
    Configure,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    me: Member,
    record: GroupRecord,
    pending: Option<Pending>,
    /// What it is asked to be, and is not yet.
    shape: Option<Shape>,
    others: BTreeMap<Member, Progress>,
    /// What superblocks shall say.
    change: Change,
    /// Of this node's own copy.
    durable: u64,
    named: u64,
    committed: u64,
    retired: u64,
    is_fenced: bool,
}

impl Group {
    /// Begin to serve under `record`. This node's log ends at `head` and begins where `change` says, both durably at all
    /// members.
    pub fn new(me: Member, record: GroupRecord, head: Point, change: Change) -> Self {
        assert_eq!(record.primary(), Some(me));
        let (durable, named) = (head.position, change.number);
        let levelled = Progress {
            durable,
            named,
            ..Progress::UNKNOWN
        };
        let members = record.config.members.iter().filter(|member| *member != me);
        let mut others: BTreeMap<_, _> = members.map(|member| (member, levelled)).collect();
        for joiner in &record.joiners {
            others.insert(*joiner, Progress::UNKNOWN);
        }
        Self {
            me,
            record,
            pending: None,
            shape: None,
            others,
            change,
            durable,
            named,
            committed: durable,
            retired: named,
            is_fenced: false,
        }
    }

    /// The record under which it serves, as far as is known.
    pub fn record(&self) -> &GroupRecord {
        &self.record
    }

    /// The epoch in which it acts.
    pub fn epoch(&self) -> u64 {
        self.record.epoch
    }

    /// The opening that writes its spans.
    pub fn incarnation(&self) -> u64 {
        self.change.incarnation
    }

    /// Everything before this position may be acknowledged, shown and destaged.
    pub fn committed(&self) -> u64 {
        self.committed
    }

    /// Number of the newest change that is durable at enough members: whoever takes the group meets one that knows it.
    /// The next generation may begin behind its tail.
    pub fn retired(&self) -> u64 {
        self.retired
    }

    /// Whether the last change is retired, so that the next one may be set.
    pub fn is_retired(&self) -> bool {
        self.retired == self.change.number
    }

    /// What superblocks shall say.
    pub fn change(&self) -> Change {
        self.change
    }

    /// Whether somebody else has taken the group, or is about to.
    pub fn is_fenced(&self) -> bool {
        self.is_fenced
    }

    /// Somebody else has taken the group, or is about to.
    pub fn fence(&mut self) {
        self.is_fenced = true;
    }

    /// A link to a node is there.
    pub fn connected(&mut self, to: Member) {
        let is_member = self.is_member(to);
        if let Some(other) = self.others.get_mut(&to) {
            other.link = if is_member {
                Link::Attaching { is_sent: false }
            } else {
                Link::Joining(Step::FIRST)
            };
        }
    }

    /// It is no more.
    pub fn disconnected(&mut self, from: Member) {
        if let Some(other) = self.others.get_mut(&from) {
            other.link = Link::Away;
        }
        self.drop_join(from);
        self.advance();
    }

    /// Whether a node is a member. One that is perhaps one already is treated as one: it must not be cut.
    fn is_member(&self, node: Member) -> bool {
        self.record.config.members.contains(node) || self.may_have_joined(node)
    }

    /// Whether the record may name a joiner a member by now.
    fn may_have_joined(&self, joiner: Member) -> bool {
        (self.pending.as_ref())
            .is_some_and(|pending| pending.kind == Kind::Join(joiner) && pending.may_be_written)
    }

    /// A joiner is not to join any more. Nobody relies on it before the store was asked.
    fn drop_join(&mut self, joiner: Member) {
        let is_it =
            |pending: &mut Pending| pending.kind == Kind::Join(joiner) && !pending.may_be_written;
        self.pending.take_if(is_it);
    }

    /// Begin again with a joiner that is reached, unless it may be a member.
    fn bring_up_anew(&mut self, joiner: Member) {
        if self.may_have_joined(joiner) {
            return;
        }
        self.drop_join(joiner);
        if let Some(other) = self.others.get_mut(&joiner)
            && other.link != Link::Away
        {
            other.link = Link::Joining(Step::FIRST);
        }
    }

    /// What is durable of this node's own copy.
    pub fn own_durable(&mut self, durable: u64) {
        self.durable = durable;
        self.advance();
    }

    /// This node's own superblock says what the change of this number says, or a later one.
    pub fn own_named(&mut self, number: u64) {
        self.named = self.named.max(number.min(self.change.number));
        self.advance();
    }

    /// Have superblocks say this, and return its number, which this node's own copy is to be asked for too. Only once the
    /// last change is retired. Everything before the tail is committed and need not be replayed, since it is in the
    /// backend. An opening that is raised writes no span before the change is retired: or who takes the group may not
    /// know of it, and number its own one the same.
    pub fn set_change(&mut self, change: Change) -> u64 {
        let last = self.change;
        assert!(self.is_retired() && change.tail.position <= self.committed);
        assert!(change.tail.position >= last.tail.position);
        assert!(change.incarnation >= last.incarnation);
        let is_raised = change.incarnation > last.incarnation;
        self.change = Change {
            number: last.number + 1,
            opens_at: if is_raised {
                change.opens_at
            } else {
                last.opens_at
            },
            ..change
        };
        self.change.number
    }

    /// Take a message of another node, which answers what was sent in this epoch.
    pub fn receive(&mut self, from: Member, message: &Message, log: &impl Spans) {
        let is_member = self.is_member(from);
        let Some(other) = self.others.get_mut(&from) else {
            return;
        };
        match (message, other.link) {
            // A joiner may have promised that in a group that is no more.
            (Message::Fenced { promised }, _) if is_member && *promised > self.record.epoch => {
                self.fence();
            }
            (Message::Attached(copy), Link::Attaching { is_sent: true }) => {
                let next = log.span_after(copy.head.position);
                let follows = match next {
                    Some(next) => next.start == copy.head,
                    None => log.head() == copy.head,
                };
                let seat = self.record.config.members.joined(from);
                let joined = seat.unwrap_or(other.joined);
                let is_ours = copy.promised == self.record.epoch
                    && copy.joined == joined
                    && copy.is_whole
                    && copy.head.position >= other.durable;
                if is_ours && follows {
                    other.link = Link::InStep;
                    other.sent = copy.head.position;
                    other.durable = copy.head.position;
                    // It is told again what its superblock does not say.
                    let says = copy.says(&self.change);
                    other.named = if says { self.change.number } else { 0 };
                    other.told = other.named;
                } else if is_ours && copy.head.position < self.change.tail.position {
                    // To leave it might have to wait for others that cannot be had, and it lost nothing.
                    let cut = resync::cut(&[], log, self.change, joined);
                    other.link = Link::Joining(Step::Cuts {
                        cut,
                        is_sent: false,
                    });
                } else {
                    // It stays like this until the record without it is there, and joins then.
                    self.suspect(from);
                }
            }
            (Message::Ack { durable }, Link::InStep) => {
                other.durable = other.durable.max(*durable).min(other.sent);
                // It answers: it need not leave, if the store was not asked yet.
                self.pending.take_if(|pending| {
                    pending.kind == Kind::Leave(from) && !pending.may_be_written
                });
            }
            (Message::Named { number }, Link::InStep) => other.take_named(*number),
            (_, Link::Joining(step)) => self.receive_of_joiner(from, step, message, log),
            // It answers something that it was not asked on this link.
            _ => {}
        }
        self.advance();
    }

    fn receive_of_joiner(&mut self, from: Member, step: Step, message: &Message, log: &impl Spans) {
        let (change, revision) = (self.change, self.record.revision);
        let is_member = self.is_member(from);
        let Some(other) = self.others.get_mut(&from) else {
            return;
        };
        let next = match (message, step) {
            (Message::NotWhole { up_to: read }, Step::Verifies { up_to }) if *read == up_to => {
                Step::FIRST
            }
            (Message::Joining { points }, Step::Asks { is_sent: true }) => {
                other.joined = revision;
                Step::Cuts {
                    cut: resync::cut(points, log, change, revision),
                    is_sent: false,
                }
            }
            (Message::HasCut(has), Step::Cuts { cut, is_sent: true }) if *has == cut => {
                other.sent = cut.at.position;
                other.durable = cut.at.position;
                other.named = cut.change.number;
                other.told = other.named;
                if is_member {
                    // Whether its copy is whole there is what it says then.
                    other.link = Link::Attaching { is_sent: false };
                    return;
                }
                let least = log.head().position;
                Step::Streams { least }
            }
            (Message::Ack { durable }, step) if step.takes_spans() => {
                other.durable = other.durable.max(*durable).min(other.sent);
                step
            }
            (Message::Named { number }, step) if step.takes_spans() => {
                other.take_named(*number);
                step
            }
            (Message::Verified { up_to: read }, Step::Verifies { up_to }) if *read == up_to => {
                Step::Whole
            }
            _ => step,
        };
        other.link = Link::Joining(next);
    }

    /// Go on with what depends on what others have.
    fn advance(&mut self) {
        if self.is_fenced {
            return;
        }
        let mut committed = self.committed_by(&self.record.config);
        let mut retired = self.retired_by(&self.record.config);
        if let Some(pending) = &self.pending {
            committed = committed.min(self.committed_by(&pending.to.config));
            retired = retired.min(self.retired_by(&pending.to.config));
        }
        self.committed = self.committed.max(committed);
        self.retired = self.retired.max(retired);
        self.go_toward_shape();
        self.bring_up();
    }

    /// What so many members have, this one among them, of which each other one has `of`.
    fn had_by(&self, config: &Config, own: u64, of: impl Fn(Member) -> u64) -> u64 {
        let others = config.members.iter().filter(|member| *member != self.me);
        let mut all: SmallVec<[u64; 8]> = others.map(of).collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        match config.copies_to_commit().checked_sub(2) {
            None => own,
            Some(last) => own.min(all[last]),
        }
    }

    fn committed_by(&self, config: &Config) -> u64 {
        let durable = |other| self.others.get(&other).map_or(0, |other| other.durable);
        self.had_by(config, self.durable, durable)
    }

    fn retired_by(&self, config: &Config) -> u64 {
        let named = |other| self.others.get(&other).map_or(0, |other| other.named);
        self.had_by(config, self.named, named)
    }

    /// What as many members have as a commit needs, of which each other one has `of`: of both records' members while a
    /// change of the record is wanted. The highest number there is if this one alone is enough.
    pub fn held_by_enough(&self, of: impl Fn(Member) -> u64) -> u64 {
        let held = self.had_by(&self.record.config, u64::MAX, &of);
        let pending = self.pending.as_ref();
        pending.map_or(held, |pending| {
            held.min(self.had_by(&pending.to.config, u64::MAX, &of))
        })
    }

    /// Members that are in step, and joiners that are whole: they follow this node in its epoch.
    pub fn followers(&self) -> impl Iterator<Item = Member> {
        let is_one = |link: Link| matches!(link, Link::InStep | Link::Joining(Step::Whole));
        let others = self.others.iter();
        others.filter_map(move |(member, other)| is_one(other.link).then_some(*member))
    }

    /// Have a joiner that is whole join, if nothing else is to change.
    fn bring_up(&mut self) {
        // Without the floor its promise would count for nothing.
        let floor = self.record.floor.position;
        let mut others = self.others.iter();
        let whole = others
            .find(|(_, other)| other.link == Link::Joining(Step::Whole) && other.durable >= floor);
        if let (Some((member, _)), None) = (whole, &self.pending) {
            self.want(Kind::Join(*member));
        }
    }

    /// Who owes an answer, if this node's log ends at `head`: who answers nothing for long has missed a deadline. Not
    /// those who cannot be reached.
    pub fn owing(&self, head: u64) -> impl Iterator<Item = Member> {
        let others = self
            .others
            .iter()
            .filter(move |(_, other)| match other.link {
                Link::Away => false,
                Link::Attaching { .. } | Link::Joining(_) => true,
                Link::InStep => other.durable < head || other.named < self.change.number,
            });
        others.map(|(member, _)| *member)
    }

    /// Whether a joiner takes spans that others have had for long.
    pub fn streams_to(&self, member: Member) -> bool {
        let other = self.others.get(&member);
        other.is_some_and(|other| matches!(other.link, Link::Joining(Step::Streams { .. })))
    }

    /// Whether every member is in step, nobody is to join, and no change of the record is wanted.
    pub fn is_settled(&self) -> bool {
        let mut others = self.others.values();
        self.pending.is_none()
            && self.shape.is_none()
            && self.record.joiners.is_empty()
            && others.all(|other| other.link == Link::InStep)
    }

    /// A member missed a deadline: it is to leave, unless a change of the record is under way. Not this node itself. Of a
    /// joiner the link is broken instead: what it still answers would be taken for an answer to what it is asked anew.
    pub fn suspect(&mut self, member: Member) {
        let is_member = self.record.config.members.contains(member);
        if member == self.me || self.is_fenced || !is_member {
            return;
        }
        let is_free = (self.pending.as_ref()).is_none_or(|pending| {
            // Of several that are late at once, one may have what was committed, and cannot leave before another one has.
            let is_leave = matches!(pending.kind, Kind::Leave(_));
            !(pending.may_be_written || is_leave && self.is_covered(&pending.to.config))
        });
        if is_free {
            self.want(Kind::Leave(member));
            self.advance();
        }
    }

    /// Whether so many of these have what was committed and retired as they need for that.
    fn is_covered(&self, config: &Config) -> bool {
        self.committed_by(config) >= self.committed && self.retired_by(config) >= self.retired
    }

    /// Whether a member is to leave, and cannot before others have what it has.
    pub fn is_leave_held_up(&self) -> bool {
        self.pending.as_ref().is_some_and(|pending| {
            let is_leave = matches!(pending.kind, Kind::Leave(_));
            is_leave && !pending.may_be_written && !self.is_covered(&pending.to.config)
        })
    }

    fn want(&mut self, kind: Kind) {
        let to = match kind {
            Kind::Leave(member) => self.record.leave(member),
            Kind::Join(member) => {
                let joined = self.others.get(&member).map_or(0, |other| other.joined);
                self.record.join(Seat { member, joined })
            }
            // It is seen anew what follows.
            Kind::Configure => return,
        };
        self.pend(kind, to);
    }

    fn pend(&mut self, kind: Kind, to: GroupRecord) {
        self.pending = Some(Pending {
            kind,
            to,
            is_asked: false,
            may_be_written: false,
        });
    }

    /// The record that is to take the place of [`Self::record`], when it may be asked for. Asking twice does no harm.
    pub fn next_record(&mut self) -> Option<GroupRecord> {
        if self.is_fenced {
            return None;
        }
        let is_covered = self.is_covered(&self.pending.as_ref()?.to.config);
        let pending = self.pending.as_mut()?;
        if !is_covered || pending.is_asked {
            return None;
        }
        pending.is_asked = true;
        pending.may_be_written = true;
        Some(pending.to.clone())
    }

    /// It is not known how asking for it ended, and the record that is there is still [`Self::record`]: it may be asked
    /// for again.
    pub fn ask_again(&mut self) {
        if let Some(pending) = &mut self.pending {
            pending.is_asked = false;
        }
    }

    /// The store has this record.
    pub fn seen(&mut self, record: &GroupRecord) {
        if self.is_fenced || record.revision <= self.record.revision {
            return;
        }
        let is_mine = record.phase == Phase::Serving { primary: self.me };
        if record.epoch != self.record.epoch || !is_mine {
            self.fence();
            return;
        }
        let pending = self.pending.take();
        self.record = record.clone();
        if let Some(pending) = pending
            && pending.to.config != record.config
        {
            // The manager named other joiners meanwhile: what was asked for cannot come about any more.
            self.want(pending.kind);
        }
        self.follow_record();
        self.advance();
    }

    /// Forget who is neither member nor joiner any more, and have others play the part that the record gives them.
    fn follow_record(&mut self) {
        let (members, joiners) = (&self.record.config.members, &self.record.joiners);
        let all: Nodes = members.iter().chain(joiners.iter().copied()).collect();
        self.others.retain(|member, _| all.contains(member));
        let is_to_join = match self.pending {
            Some(Pending {
                kind: Kind::Join(member),
                ..
            }) => Some(member),
            _ => None,
        };
        for member in all.iter().copied().filter(|member| *member != self.me) {
            let other = self.others.entry(member).or_insert(Progress::UNKNOWN);
            other.link = match (other.link, members.contains(member)) {
                (Link::Joining(Step::Whole), true) => Link::InStep,
                // What it has is good under the revision that is asked for again.
                (link @ (Link::Attaching { .. } | Link::InStep), false)
                    if is_to_join == Some(member) =>
                {
                    link
                }
                // So does a member that was to go on at the tail.
                (
                    Link::Attaching { .. } | Link::InStep | Link::Joining(Step::Cuts { .. }),
                    false,
                ) => Link::Joining(Step::FIRST),
                (Link::Joining(_), true) => Link::Attaching { is_sent: false },
                (link, _) => link,
            };
        }
        if let Some(Pending {
            kind: Kind::Join(member) | Kind::Leave(member),
            ..
        }) = self.pending
            && !all.contains(&member)
        {
            self.pending = None;
        }
    }

    /// Members in step that have everything before this position.
    pub fn having(&self, position: u64) -> impl Iterator<Item = Member> {
        let has = move |other: &Progress| other.link == Link::InStep && other.durable >= position;
        let others = self.others.iter().filter(move |(_, other)| has(other));
        others.map(|(member, _)| *member)
    }

    /// What is known of the copies of the others.
    pub fn copies(&self) -> impl Iterator<Item = OtherCopy> {
        let stage = |link: Link| match link {
            Link::Away => Stage::Away,
            Link::Attaching { .. } => Stage::Attaches,
            Link::InStep => Stage::InStep,
            Link::Joining(Step::Asks { .. } | Step::Cuts { .. }) => Stage::Begins,
            Link::Joining(Step::Streams { .. }) => Stage::Streams,
            Link::Joining(Step::Verifies { .. }) => Stage::ReadsBack,
            Link::Joining(Step::Whole) => Stage::Whole,
        };
        self.others.iter().map(move |(member, other)| OtherCopy {
            member: *member,
            stage: stage(other.link),
            durable: other.durable,
        })
    }

    /// Whom there may be a message for.
    pub fn others(&self) -> impl Iterator<Item = Member> {
        self.others.keys().copied()
    }

    /// The next message to send to a member or joiner, of a log that holds `log`. It counts as sent: it is asked for while
    /// the link has room.
    pub fn next_message(&mut self, to: Member, log: &impl Spans) -> Option<Message> {
        if self.is_fenced {
            return None;
        }
        let other = self.others.get(&to)?;
        let takes = matches!(other.link, Link::Joining(step) if step.takes_spans());
        if takes && !follows(log, other.sent) {
            // What a joiner needs next has gone: a point further on is agreed upon.
            self.bring_up_anew(to);
        }
        let (change, committed) = (self.change, self.committed);
        let other = self.others.get_mut(&to)?;
        other.next_message(log, change, committed)
    }

    /// Assert what must always hold.
    pub fn check_invariants(&self) {
        assert!(self.committed <= self.durable);
        assert!(self.retired <= self.named && self.named <= self.change.number);
        assert!(self.change.tail.position <= self.committed);
        assert!(!self.others.contains_key(&self.me));
        for other in self.others.values() {
            assert!(other.link != Link::InStep || other.durable <= other.sent);
        }
    }
}

impl Progress {
    /// Its superblock says what the change of this number says. One that it was not told does not count.
    fn take_named(&mut self, number: u64) {
        if number <= self.told {
            self.named = self.named.max(number);
        }
    }

    /// The next message to it.
    fn next_message(
        &mut self,
        log: &impl Spans,
        change: Change,
        committed: u64,
    ) -> Option<Message> {
        match &mut self.link {
            Link::Away => None,
            Link::Attaching { is_sent } => {
                (!core::mem::replace(is_sent, true)).then_some(Message::Attach)
            }
            Link::Joining(Step::Asks { is_sent }) => {
                (!core::mem::replace(is_sent, true)).then_some(Message::Join)
            }
            Link::Joining(Step::Cuts { cut, is_sent }) => {
                (!core::mem::replace(is_sent, true)).then_some(Message::JoinAt(*cut))
            }
            Link::Joining(step @ Step::Streams { .. })
                if let Step::Streams { least } = *step
                    && self.durable + JOIN_LAG_BLOCKS_MAX >= committed
                    && self.durable >= change.opens_at.max(least)
                    && let Some(up_to) = point_at(log, self.durable, change.tail) =>
            {
                *step = Step::Verifies { up_to };
                Some(Message::Verify { up_to })
            }
            Link::InStep | Link::Joining(_) => {
                // Before the spans: they may be of the opening that it names, and wait for room behind its tail.
                if self.told < change.number {
                    self.told = change.number;
                    return Some(Message::Superblock(change));
                }
                self.next_span(log)
            }
        }
    }

    fn next_span(&mut self, log: &impl Spans) -> Option<Message> {
        let next = log.span_after(self.sent);
        let start = next.map_or_else(|| log.head(), |next| next.start);
        if start.position != self.sent {
            // It has gone. A member is asked anew what it has; a joiner that may be one misses its deadline.
            let is_member = self.link == Link::InStep;
            return is_member.then(|| {
                self.link = Link::Attaching { is_sent: true };
                Message::Attach
            });
        }
        let next = next?;
        self.sent = next.end.position;
        Some(Message::Append(next))
    }
}

/// Whether the log still has what comes behind this position, or ends there.
fn follows(log: &impl Spans, position: u64) -> bool {
    match log.span_after(position) {
        Some(next) => next.start.position == position,
        None => log.head().position == position,
    }
}

/// What a log that begins at `tail` says at the end of one of its spans.
fn point_at(log: &impl Spans, position: u64, tail: Point) -> Option<Point> {
    if position == tail.position {
        return Some(tail);
    }
    let span = log.span_after(position.checked_sub(1)?)?;
    (span.end.position == position).then_some(span.end)
}

#[cfg(test)]
pub(super) mod tests;
