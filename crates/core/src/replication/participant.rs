//! One node's part in a group, with data: its copy of the log, and while it leads, what stands on that log.
//!
//! ```text
//!  what stands on the log          Participant                                   others
//!  ── span, superblock ──►  [`Replica`] ──► own medium
//!                                │ durable
//!                             part: Follows ──record names it──► Takes ──► Serves ──── spans, changes ───► members
//!                                ▲                                 │          │                           │
//!                                └──a higher epoch was promised────┴──────────┘ ◄── durable, promises ────┘
//!  ◄─ ended: committed ──────────┘
//! ```
//!
//! The machines decide; here their messages get the data that goes with them, their writes a place on the medium, and
//! their deadlines a clock. A volume needs to know nothing of a group: its write of a span ends when the span is committed,
//! and its write of a superblock when what that says is durable at enough members. So what a volume calls durable is
//! committed, and it acknowledges, shows and destages no more.
//!
//! Invariants:
//! 1. Whatever the part, the copy is written through [`Replica`] alone. Nobody else writes to the log's medium.
//! 2. An operation of what stands on the log ends exactly once; with [`IoError::Fenced`] once the part is over.
//! 3. Data of a span is held until it is on this medium. What others need later is read from there.
//! 4. While something is written again in its place ([`repairs`], a scrub), no write of a span begins.
//! 5. What is held for a member that does not listen is bounded ([`outbox`]): it is asked for nothing more, and others go on.
//! 6. Every request of another node is answered, or gives way to another one of the same node ([`replica`](super::replica)).
//! 7. The copy promises no epoch, and is cut in none, but one for which a record that was seen names who asks ([`gate`]).
//! 8. Reads of what stands on the log are right while there is a lease ([`leases`]): it is told until when.

mod deadlines;
mod gate;
mod going_on;
mod healing;
mod leases;
mod meeting;
mod outbox;
mod pace;
mod reads;
mod repairs;
mod standing;
mod superblocks;
mod taking;
#[cfg(test)]
mod tests;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

pub use deadlines::Times;
use deadlines::{Deadlines, RETRY_PAUSE};
use gate::Gate;
pub use going_on::end_group;
use healing::Healing;
use leases::Leases;
use outbox::Outbox;
use pace::Pace;
use reads::SpanReads;
use repairs::Repairs;
use slab::Slab;
use standing::{Announced, Standing};
use superblocks::Superblocks;
pub use taking::{Taking, Waits};

use super::group::{Group, OtherCopy, Stage};
use super::message::Message;
use super::record::{GroupRecord, Phase, Shape};
use super::replica::Replica;
use super::takeover::{Stop, Takeover};
use super::{Member, Point, SpanId, Spans};
use crate::base::buf::{Buf, BufMut, Pool};
use crate::base::cipher::{Authenticator, LogKeys};
use crate::base::error::IoError;
use crate::base::io::{Completion, Done, DurableWay, Nanos, Token};
use crate::base::limits::BLOCK_BYTES;
use crate::format::{LogSuperblock, SpanHeader};
use crate::log::replay::SpanFound;

/// How much a joiner is sent in a second beside what is written, unless it is said.
const RESYNC_BYTES_S: u64 = 64 << 20;
/// What is to be done for it.
#[derive(Debug)]
pub enum Act {
    /// Write to the log's medium, durably: [`Participant::finished`].
    Write {
        /// Of the participant.
        token: Token,
        /// Where on the log's region.
        offset: u64,
        /// Written one after another.
        data: Vec<Buf>,
        /// How it is made durable; none: as the driver pleases.
        way: Option<DurableWay>,
    },
    /// Read from the log's medium: [`Participant::finished`].
    Read {
        /// Of the participant.
        token: Token,
        /// Where on the log's region.
        offset: u64,
        /// To be filled with what is there: the participant decrypts it, if the log is encrypted.
        buf: BufMut,
    },
    /// An operation of what stands on the log has ended.
    Ended(Completion),
    /// [`Participant::repair`] has done what it can: what stands on the log may read again.
    Repaired(Token),
    /// Answer what another node asked of this copy.
    Answer {
        /// Who asked.
        to: Member,
        /// In which epoch.
        epoch: u64,
        /// The answer.
        message: Message,
        /// What goes with it.
        data: Vec<Buf>,
    },
    /// Ask the store for this record in the place of the one before it: [`Participant::see`] or
    /// [`Participant::ask_again`].
    Ask(GroupRecord),
    /// Break the link over which this node leads that one, and make it anew.
    Break(Member),
    /// A node cannot be brought up: on this medium this span is not as it should be, and no member has it whole. Said once
    /// for each span.
    Blocked {
        /// The node.
        member: Member,
        /// What it needs.
        span: SpanId,
    },
    /// Break the link over which that node leads this one: it sent what it must not.
    Drop(Member),
    /// The group is this node's: what stands on the log may be opened.
    Began,
    /// What stands on the log may answer reads until then. It may be earlier than what was said before.
    Lease {
        /// Of the clock that the participant is told of; the end of all time if no other node can take the group unasked.
        until: Nanos,
    },
    /// It is no more: what stands on the log must end.
    Fenced,
    /// Whether fewer members are there than a write needs and writes are to end with an error: what stands on the log
    /// refuses them, or does not any more.
    Short(bool),
    /// This node could not take the group.
    Stopped(Stop),
    /// A write to this node's medium failed: the copy is of no use any more.
    Failed(IoError),
}

/// What a replay found.
#[derive(Clone, Debug)]
pub struct Found {
    /// The superblock in force.
    pub superblock: LogSuperblock,
    /// The spans behind its tail, in order.
    pub spans: Vec<SpanId>,
}

impl From<SpanFound> for SpanId {
    fn from(found: SpanFound) -> Self {
        Self {
            start: Point {
                position: found.start,
                chain: found.chain,
            },
            end: Point {
                position: found.end(),
                chain: found.checksum,
            },
            blocks: found.blocks,
            incarnation: found.incarnation,
            evidence: found.durable,
        }
    }
}

/// The part that the node plays.
#[derive(Debug)]
enum Part {
    Follows,
    Takes(Takeover),
    Serves(Group),
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

/// An operation on the medium that has not ended.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Span {
        end: u64,
    },
    Superblock,
    /// What stands on the log writes a part of it again.
    Rewrite {
        token: Token,
    },
    Read {
        piece: reads::Piece,
    },
    /// What another node had of it.
    Repair {
        asker: repairs::Asker,
        span: SpanId,
    },
}

impl Operation {
    /// Whether it writes again what the log has already.
    fn rewrites(&self) -> bool {
        matches!(self, Self::Rewrite { .. } | Self::Repair { .. })
    }
}

/// Data of a span that is not on this medium yet.
#[derive(Debug)]
struct Held {
    end: u64,
    data: Vec<Buf>,
    way: Option<DurableWay>,
}

/// See the module.
#[derive(Debug)]
pub struct Participant {
    me: Member,
    now: Nanos,
    replica: Replica,
    part: Part,
    /// The last record that was seen.
    record: Option<GroupRecord>,
    /// Who served before the present taking, as far as records were seen, or serves now.
    last_primary: Option<Member>,
    superblocks: Superblocks,
    /// In order.
    held: VecDeque<Held>,
    standing: Standing,
    /// Whether something stands on the log in this part: what stood on it before is fenced.
    stands: bool,
    /// Whether that was told to refuse writes ([`Act::Short`]).
    refuses: bool,
    /// Members that are reached, as a leader reaches them.
    links: BTreeSet<Member>,
    /// Members that could be reached and had nothing to say, and when they are met again.
    paused: BTreeMap<Member, Nanos>,
    outboxes: BTreeMap<Member, Outbox>,
    /// Counts outboxes.
    lives: u64,
    gate: Gate,
    pace: Pace,
    reads: SpanReads,
    repairs: Repairs,
    healing: Healing,
    operations: Slab<Operation>,
    /// How many of them write again what the log has already.
    rewrites: usize,
    deadlines: Deadlines,
    leases: Leases,
    /// Once something could not be written: nothing is any more.
    has_failed: bool,
    acts: Vec<Act>,
}

/// What others may know of it.
#[derive(Clone, Debug)]
pub struct Status {
    /// Follows, takes or serves.
    pub role: Role,
    /// Where the copy ends.
    pub head: u64,
    /// Up to where that is durable.
    pub durable: u64,
    /// Where it begins.
    pub tail: u64,
    /// Up to where the log is committed, if this node serves.
    pub committed: Option<u64>,
    /// The epoch that it has promised.
    pub promised: u64,
    /// Under which revision of the record the copy was brought up.
    pub joined: u64,
    /// Whether the copy may be a source.
    pub is_whole: bool,
    /// It may not, since some of its data is damaged; as a candidate, it gets that from others who have it.
    pub may_heal: bool,
    /// Of a candidate: what it found damaged and got from nobody, the first of it, in blocks from where to where.
    pub missing: Vec<(u64, u64)>,
    /// Who is reached, if this node leads.
    pub links: Vec<Member>,
    /// The copies of the others, if this node serves.
    pub others: Vec<OtherCopy>,
}

/// What a node is in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It has a copy.
    Follows,
    /// It is about to be the primary.
    Takes,
    /// It is the primary.
    Serves,
}

/// Whether a message is for the copy, and not an answer for who leads.
fn is_for_copy(message: &Message) -> bool {
    matches!(
        message,
        Message::Attach
            | Message::Append(_)
            | Message::Superblock(_)
            | Message::Promise { .. }
            | Message::ReadLog { .. }
            | Message::Beat { .. }
            | Message::Join
            | Message::JoinAt(_)
            | Message::Verify { .. }
    )
}

/// Remember who has served last. A record that was missed may have named another one.
fn note_primary(this: &mut Participant, next: &GroupRecord) {
    let follows = this.record.as_ref().is_some_and(|last| {
        let served = last.primary().is_some();
        next.epoch <= last.epoch + u64::from(served) || next.revision == last.revision + 1
    });
    let known = this.last_primary.filter(|_| follows);
    this.last_primary = next.primary().or(known);
}

/// The same with the first part, which describes the others, in memory of its own. Links hold what they send for as long
/// as they like, and who writes the log has memory for this part of those spans alone whose writes have not ended.
fn with_own_control(mut data: Vec<Buf>) -> Vec<Buf> {
    if let Some(first) = data.first_mut() {
        let blocks = first.len().div_ceil(BLOCK_BYTES).next_power_of_two();
        let pool = Pool::small(blocks);
        let mut copy = pool
            .alloc(first.len())
            .expect("the pool is as large, and free");
        copy.copy_from_slice(first);
        *first = copy.freeze();
    }
    data
}

impl Participant {
    /// The part of node `me`, which starts now and follows at first, with the copy that a replay has found. `keys` are those of a log
    /// that is encrypted: superblocks get tags of them, and spans are decrypted to see whether they are what they are said
    /// to be. What others need of the log is read into buffers of `pool`.
    pub fn new(
        me: Member,
        now: Nanos,
        found: Found,
        keys: Option<Arc<dyn LogKeys>>,
        pool: Arc<Pool>,
        times: Times,
    ) -> Self {
        let Found { superblock, spans } = found;
        let ring_blocks = superblock.ring_blocks.get();
        let says = superblocks::of_copy(&superblock);
        let tags = keys.clone().map(|keys| -> Arc<dyn Authenticator> { keys });
        let replica = Replica::new(says, ring_blocks, spans);
        let replayed = replica.head().position;
        Self {
            me,
            now,
            replica,
            part: Part::Follows,
            record: None,
            last_primary: None,
            superblocks: Superblocks::new(Box::new(superblock), tags),
            held: VecDeque::new(),
            standing: Standing::default(),
            stands: false,
            refuses: false,
            links: BTreeSet::new(),
            paused: BTreeMap::new(),
            outboxes: BTreeMap::new(),
            lives: 0,
            gate: Gate::default(),
            reads: SpanReads::new(pool, ring_blocks, keys, replayed, now),
            repairs: Repairs::default(),
            healing: Healing::default(),
            pace: Pace::new(RESYNC_BYTES_S),
            operations: Slab::new(),
            rewrites: 0,
            deadlines: Deadlines::new(times),
            leases: Leases::new(now, times),
            has_failed: false,
            acts: Vec::new(),
        }
    }

    /// The replay of the copy has met blocks that are not as they should be: it is no source before it was brought up
    /// anew, or has got them from others as a candidate.
    pub fn doubt(&mut self) {
        self.replica.doubt();
        self.reads.suspect(0);
    }

    /// Have the group become this. Returns whether it may: only who serves has it change, and stays in it.
    pub fn configure(&mut self, now: Nanos, shape: Shape) -> bool {
        self.now = now;
        let is_begun = match &mut self.part {
            Part::Follows | Part::Takes(_) => false,
            Part::Serves(group) => group.configure(shape),
        };
        self.pump();
        is_begun
    }

    /// So many bytes in a second a joiner is sent beside what is written.
    pub fn set_resync_rate(&mut self, bytes_s: u64) {
        self.pace = Pace::new(bytes_s);
    }

    /// What is to be done now, in order.
    pub fn take_acts(&mut self) -> Vec<Act> {
        core::mem::take(&mut self.acts)
    }

    /// The last record that was seen.
    pub fn record(&self) -> Option<&GroupRecord> {
        self.record.as_ref()
    }

    /// What may be known of it.
    pub fn status(&self) -> Status {
        let superblock = self.replica.superblock();
        let (role, committed) = match &self.part {
            Part::Follows => (Role::Follows, None),
            Part::Takes(_) => (Role::Takes, None),
            Part::Serves(group) => (Role::Serves, Some(group.committed())),
        };
        Status {
            role,
            head: self.replica.head().position,
            durable: self.replica.durable().position,
            tail: superblock.tail.position,
            committed,
            promised: superblock.promised,
            joined: superblock.joined,
            is_whole: self.replica.is_whole(),
            may_heal: self.replica.may_heal(),
            missing: self.healing.missing(),
            links: self.links.iter().copied().collect(),
            others: match &self.part {
                Part::Serves(group) => group.copies().map(|copy| self.as_seen(copy)).collect(),
                Part::Follows | Part::Takes(_) => Vec::new(),
            },
        }
    }

    fn as_seen(&self, copy: OtherCopy) -> OtherCopy {
        let stage = if self.repairs.is_blocked(copy.member) {
            Stage::Blocked
        } else {
            copy.stage
        };
        OtherCopy { stage, ..copy }
    }

    /// Whether nothing of it is under way on the medium.
    pub fn is_idle(&self) -> bool {
        self.operations.is_empty()
    }

    /// Up to where the log is committed, if this node serves.
    pub fn committed(&self) -> u64 {
        match &self.part {
            Part::Follows | Part::Takes(_) => 0,
            Part::Serves(group) => group.committed(),
        }
    }

    /// Whether it was said that this member is reached.
    pub fn reaches(&self, member: Member) -> bool {
        self.links.contains(&member) || self.paused.contains_key(&member)
    }

    /// Whom this node is to reach, as it leads or is about to.
    pub fn peers(&self) -> Vec<Member> {
        let record = match &self.part {
            Part::Follows => return Vec::new(),
            Part::Takes(_) => self.record.as_ref(),
            Part::Serves(group) => Some(group.record()),
        };
        let Some(record) = record else {
            return Vec::new();
        };
        let all = (record.config.members.iter()).chain(record.joiners.iter().copied());
        let mut others: Vec<Member> = all.filter(|member| *member != self.me).collect();
        others.sort_unstable();
        others.dedup();
        others
    }

    // Links.

    /// A member is reached.
    pub fn connected(&mut self, now: Nanos, to: Member) {
        self.now = now;
        meeting::meet(self, to);
        self.pump();
    }

    /// It is not any more.
    pub fn disconnected(&mut self, now: Nanos, from: Member) {
        self.now = now;
        self.paused.remove(&from);
        meeting::lose(self, from);
        self.pump();
    }

    /// A member stops: it is not waited for.
    pub fn left(&mut self, now: Nanos, member: Member) {
        self.now = now;
        if let Part::Serves(group) = &mut self.part {
            group.suspect(member);
        }
        self.pump();
    }

    /// A member that is reached has no such log yet: it is met again after a while.
    pub fn no_log(&mut self, now: Nanos, from: Member) {
        self.now = now;
        if self.links.contains(&from) {
            meeting::pause(self, from, meeting::MEET_PAUSE);
        }
        self.pump();
    }

    /// Who led, or wanted to, does not reach this node any more.
    pub fn leader_gone(&mut self, now: Nanos, leader: Member) {
        self.now = now;
        self.gate.forget(leader);
        self.reads.forget_answers(leader);
        self.replica.disconnected(leader);
        self.pump();
    }

    /// A message came: for this copy, or an answer to who leads.
    pub fn receive(
        &mut self,
        now: Nanos,
        from: Member,
        epoch: u64,
        message: &Message,
        data: Vec<Buf>,
    ) {
        self.now = now;
        if is_for_copy(message) {
            self.receive_for_copy(from, epoch, message, data);
        } else if self.part.epoch() == Some(epoch) && self.links.contains(&from) {
            if let Message::Nothing(question) = message {
                meeting::hear_nothing(self, from, *question);
            } else {
                if !matches!(message, Message::Echo { .. }) {
                    self.deadlines.heard(now, from, message.waited_for_medium());
                }
                self.hear(from, epoch, message, data);
            }
        }
        self.pump();
    }

    fn receive_for_copy(&mut self, from: Member, epoch: u64, message: &Message, data: Vec<Buf>) {
        let span = match message {
            Message::Append(span) => span,
            Message::Beat { number, lease_ms }
                if !self.has_failed && self.replica.follows(epoch) =>
            {
                return self.echo(from, epoch, *number, *lease_ms);
            }
            _ => return gate::ask(self, from, epoch, message),
        };
        if self.has_failed {
            return;
        }
        if !self.is_its_data(span, &data) {
            // Whoever sends that has another log, or lies: it is not listened to on this link.
            return self.acts.push(Act::Drop(from));
        }
        self.take_span(*span, data, None, |replica| {
            replica.receive(from, epoch, message);
        });
    }

    /// Tell the primary that this node follows it, and remember for how long that is relied on.
    fn echo(&mut self, to: Member, epoch: u64, number: u64, lease_ms: u32) {
        self.leases.echo(self.now, lease_ms);
        self.acts.push(Act::Answer {
            to,
            epoch,
            message: Message::Echo { number },
            data: Vec::new(),
        });
    }

    /// Have the copy take a span, and hold its data if it does.
    fn take_span(
        &mut self,
        span: SpanId,
        data: Vec<Buf>,
        way: Option<DurableWay>,
        append: impl FnOnce(&mut Replica),
    ) -> bool {
        let before = self.replica.head();
        append(&mut self.replica);
        let is_taken = self.replica.head() == span.end && before == span.start;
        if is_taken {
            self.reads.suspect(span.start.position);
            self.held.push_back(Held {
                end: span.end.position,
                data,
                way,
            });
        }
        is_taken
    }

    /// Whether so many blocks are what the span says that they are, as far as their head tells.
    fn is_its_data(&self, span: &SpanId, data: &[Buf]) -> bool {
        let bytes: usize = data.iter().map(|part| part.len()).sum();
        let blocks = u64::from(span.blocks);
        let Some(position) = span.end.position.checked_sub(blocks) else {
            return false;
        };
        let is_whole = blocks > 0 && bytes == span.blocks as usize * BLOCK_BYTES;
        let first = data.first().and_then(|part| part.get(..BLOCK_BYTES));
        let Some(first) = first.filter(|_| is_whole) else {
            return false;
        };
        let head = self
            .reads
            .in_the_clear(self.reads.offset_at(position), first);
        SpanHeader::peek(&head).is_ok_and(|header| {
            header.log == self.superblocks.last().log
                && header.chain.get() == span.start.chain
                && header.checksum.get() == span.end.chain
                && header.incarnation.get() == span.incarnation
                && header.durable.get() == span.evidence
                && header.position.get() == position
        })
    }

    /// An answer for who leads.
    fn hear(&mut self, from: Member, epoch: u64, message: &Message, data: Vec<Buf>) {
        match &mut self.part {
            Part::Follows => {}
            Part::Serves(group) if from == self.me => {
                if let Message::Named { number } = message {
                    group.own_named(*number);
                }
            }
            Part::Serves(_) | Part::Takes(_)
                if let Message::LogData(span) = message
                    && self.repairs.asks(from) =>
            {
                repairs::take(self, from, span, &data);
            }
            Part::Serves(group) => {
                if let Message::Echo { number } = message {
                    self.leases.echoed(from, *number);
                }
                group.receive(from, message, &self.replica);
            }
            Part::Takes(takeover) => {
                let span = takeover.receive(from, message);
                if let Message::Promised(copy) = message
                    && copy.promised == epoch
                {
                    let is_whole = takeover.whole().any(|(member, _)| member == from);
                    let left_ms = copy.lease_left_ms;
                    (self.leases).promised(self.now, from, left_ms, is_whole);
                    healing::look_again(self);
                }
                let Some(span) = span else {
                    return;
                };
                if self.is_its_data(&span, &data) {
                    self.take_span(span, data, None, |replica| replica.append(epoch, span));
                } else {
                    self.acts.push(Act::Break(from));
                }
            }
        }
    }

    /// The next message to a member, and what goes with it, if it is ready: [`Self::sent`] says that it went.
    pub fn next_send(&self, to: Member) -> Option<(u64, &Message, &[Buf])> {
        let epoch = self.part.epoch()?;
        let (message, data) = self.outboxes.get(&to)?.front()?;
        Some((epoch, message, data))
    }

    /// The message that [`Self::next_send`] named was taken by the link.
    pub fn sent(&mut self, now: Nanos, to: Member) {
        self.now = now;
        if let Some(outbox) = self.outboxes.get_mut(&to) {
            outbox.pop();
        }
        self.pump();
    }

    // The store.

    /// The store has this record.
    pub fn see(&mut self, now: Nanos, record: &GroupRecord) {
        self.now = now;
        let is_new = (self.record.as_ref()).is_none_or(|last| last.revision < record.revision);
        if !is_new {
            return;
        }
        let before = self.peers();
        note_primary(self, record);
        self.record = Some(record.clone());
        gate::ask_again(self);
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.seen(record),
            Part::Serves(group) => {
                group.seen(record);
                if group.is_fenced() {
                    self.fence();
                } else {
                    self.meet_anew(&before);
                }
            }
        }
        let names_me = record.phase == Phase::Taking { candidate: self.me };
        let begins = names_me
            && record.epoch >= self.replica.promised()
            && self.part.epoch() != Some(record.epoch);
        if begins {
            let may_heal = self.replica.may_heal();
            let takeover = Takeover::new(self.me, record.clone());
            self.begin_part(Part::Takes(takeover.healing(may_heal)));
        }
        self.pump();
    }

    /// Of those who were not among the peers before, links are made anew: one that was a peer once may still answer what
    /// it was asked then.
    fn meet_anew(&mut self, before: &[Member]) {
        let peers = self.peers();
        let is_met = |peer: &&Member| !before.contains(peer) && self.links.contains(peer);
        let met = peers.iter().filter(is_met);
        self.acts.extend(met.map(|peer| Act::Break(*peer)));
    }

    /// It is not known how asking for a record ended, and the one that was last seen is still there.
    pub fn ask_again(&mut self, now: Nanos) {
        self.now = now;
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.ask_again(),
            Part::Serves(group) => group.ask_again(),
        }
        self.pump();
    }

    // What stands on the log.

    /// Something stands on the log from now on, until the part ends: it was opened after [`Act::Began`].
    pub fn stand(&mut self) {
        self.stands = matches!(self.part, Part::Serves(_));
        self.refuses = false;
        self.leases.forget_told();
        self.pump();
    }

    /// What stands on the log is about to write this in the clear; the same, perhaps encrypted, comes with [`Self::write`].
    pub fn announce(&mut self, token: Token, offset: u64, data: &[Buf]) {
        self.standing.announce(token, Announced::of(offset, data));
    }

    /// What stands on the log writes to it; ends with [`Act::Ended`].
    pub fn write(&mut self, now: Nanos, token: Token, data: Vec<Buf>, way: Option<DurableWay>) {
        self.now = now;
        let announced = self.standing.take_announced(token);
        let is_taken = match announced {
            // It may stand on an earlier part of this node's.
            _ if !self.stands => false,
            Some(Announced::Superblock(block)) => self.write_change(token, block),
            Some(Announced::Ring { offset, header }) => {
                let (log, head) = (self.superblocks.last().log.get(), self.replica.head());
                let span = header.filter(|header| {
                    header.follows(log, head) && self.reads.offset_at(header.position) == offset
                });
                if let Some(header) = span {
                    self.write_span(token, header.id(head), data, way)
                } else {
                    let token = self.begin(Operation::Rewrite { token });
                    self.acts.push(Act::Write {
                        token,
                        offset,
                        data,
                        way,
                    });
                    true
                }
            }
            None => false,
        };
        if !is_taken {
            self.end(token, Err(IoError::Fenced));
        }
        self.pump();
    }

    fn write_change(&mut self, token: Token, block: Box<LogSuperblock>) -> bool {
        let Part::Serves(group) = &mut self.part else {
            return false;
        };
        let last = group.change();
        let head = self.replica.head().position;
        let change = superblocks::change_of(&block, last, head);
        // What is for this medium alone asks nothing of others.
        let is_news = change != last;
        let goes_back = change.tail.position < last.tail.position
            || change.incarnation < last.incarnation
            || change.tail.position > group.committed();
        if goes_back || is_news && !group.is_retired() {
            return false;
        }
        let number = if is_news {
            group.set_change(change)
        } else {
            last.number
        };
        self.superblocks.ask(token, block, number);
        if is_news {
            let (epoch, change) = (group.epoch(), group.change());
            self.replica.change_own(self.me, epoch, change);
        }
        true
    }

    fn write_span(
        &mut self,
        token: Token,
        span: SpanId,
        data: Vec<Buf>,
        way: Option<DurableWay>,
    ) -> bool {
        let Part::Serves(group) = &self.part else {
            return false;
        };
        let epoch = group.epoch();
        let data = if self.outboxes.is_empty() {
            data
        } else {
            with_own_control(data)
        };
        let is_taken = self.take_span(span, data, way, |replica| replica.append(epoch, span));
        if is_taken {
            self.standing.span(span.end.position, token);
            let bytes = u64::from(span.blocks) * BLOCK_BYTES as u64;
            self.pace.written(self.now, bytes);
        }
        is_taken
    }

    fn end(&mut self, token: Token, result: Result<(), IoError>) {
        let result = result.map(|()| Done::Written);
        self.acts.push(Act::Ended(Completion { token, result }));
    }

    // The medium.

    /// An operation on the medium has ended.
    pub fn finished(&mut self, now: Nanos, token: Token, result: Result<Done, IoError>) {
        self.now = now;
        let Some(operation) = self.operations.try_remove(token.0 as usize) else {
            return;
        };
        self.rewrites -= usize::from(operation.rewrites());
        match (operation, result) {
            (Operation::Repair { asker, span }, _) => repairs::written(self, asker, span),
            (Operation::Read { piece }, result) => self.read_piece(piece, result),
            (Operation::Span { end }, Ok(_)) => {
                if let Some(index) = self.find_held(end) {
                    self.held.remove(index);
                }
                self.replica.written(end);
            }
            (Operation::Superblock, Ok(_)) => {
                if self.superblocks.written() {
                    self.replica.superblock_written();
                }
            }
            (Operation::Rewrite { token }, result) => self.end(token, result.map(drop)),
            (_, Err(error)) => self.fail(error),
        }
        self.pump();
    }

    /// A write to the medium failed.
    fn fail(&mut self, error: IoError) {
        if core::mem::replace(&mut self.has_failed, true) {
            return;
        }
        self.acts.push(Act::Failed(error));
        self.replica.refuse_all();
        for token in self.standing.end_all(self.superblocks.forget_asked()) {
            self.end(token, Err(error));
        }
    }

    fn find_held(&self, end: u64) -> Option<usize> {
        let index = self.held.partition_point(|held| held.end < end);
        let held = self.held.get(index)?;
        (held.end == end).then_some(index)
    }

    // Time.

    /// It is so late.
    pub fn poll(&mut self, now: Nanos) {
        self.now = now;
        deadlines::look(self);
        let is_over = |_: &Member, at: &mut Nanos| *at <= now;
        let again: Vec<Member> = (self.paused.extract_if(.., is_over))
            .map(|(member, _)| member)
            .collect();
        for member in again {
            meeting::meet(self, member);
        }
        gate::end_waiting(self);
        self.pump();
    }

    /// When [`Self::poll`] is to be called, if nothing else happens.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let starved = self.reads.is_starved();
        let starved = starved.then(|| self.now.plus(RETRY_PAUSE));
        let lease = match &self.part {
            Part::Follows => None,
            Part::Takes(takeover) => {
                going_on::record_due(self, takeover).filter(|at| *at > self.now)
            }
            Part::Serves(group) => self.leases.next_of_group(group),
        };
        let paused = self.paused.values().copied();
        let others = [
            self.deadlines.next(),
            starved,
            lease,
            self.gate.next(),
            self.repairs.deadline(),
            self.pace.next(),
        ];
        others.into_iter().flatten().chain(paused).min()
    }

    /// Assert what must always hold.
    pub fn check_invariants(&self) {
        self.replica.check_invariants();
        match &self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.check_invariants(),
            Part::Serves(group) => group.check_invariants(),
        }
        assert!(self.held.iter().is_sorted_by_key(|held| held.end));
        let last = self.held.back().map_or(0, |held| held.end);
        assert!(last <= self.replica.head().position);
        let durable = self.replica.durable().position;
        assert!(self.held.front().is_none_or(|held| held.end > durable));
    }
}
