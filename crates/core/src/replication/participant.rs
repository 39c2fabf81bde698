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
//! 4. What is held for a member that does not listen is bounded ([`outbox`]): it is asked for nothing more, and others go on.

mod deadlines;
mod going_on;
mod outbox;
mod reads;
mod standing;
mod superblocks;
#[cfg(test)]
mod tests;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

pub use deadlines::Times;
use deadlines::{Deadlines, Late, RETRY_PAUSE};
use outbox::Outbox;
use reads::SpanReads;
use slab::Slab;
use standing::{Announced, Standing};
use superblocks::Superblocks;

use super::group::Group;
use super::message::Message;
use super::record::{GroupRecord, Phase};
use super::replica::Replica;
use super::takeover::{Step, Stop, Takeover};
use super::{Member, Point, SpanId, Spans};
use crate::base::buf::{Buf, BufMut, Pool};
use crate::base::cipher::Authenticator;
use crate::base::error::IoError;
use crate::base::io::{Completion, Done, DurableWay, Nanos, Token};
use crate::base::limits::BLOCK_BYTES;
use crate::format::{LogSuperblock, SpanHeader};
use crate::log::replay::SpanFound;

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
        /// To be filled.
        buf: BufMut,
        /// What was read is to be decrypted, if the log is encrypted.
        decrypt: bool,
    },
    /// An operation of what stands on the log has ended.
    Ended(Completion),
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
    /// Break the link over which that node leads this one: it sent what it must not.
    Drop(Member),
    /// The group is this node's: what stands on the log may be opened.
    Began,
    /// It is no more: what stands on the log must end.
    Fenced,
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
    /// Below so many members nothing is committed.
    copies_min: usize,
    replica: Replica,
    part: Part,
    /// The last record that was seen.
    record: Option<GroupRecord>,
    superblocks: Superblocks,
    /// In order.
    held: VecDeque<Held>,
    standing: Standing,
    /// Whether something stands on the log in this part: what stood on it before is fenced.
    stands: bool,
    /// Members that are reached, as a leader reaches them.
    links: BTreeSet<Member>,
    outboxes: BTreeMap<Member, Outbox>,
    reads: SpanReads,
    operations: Slab<Operation>,
    deadlines: Deadlines,
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
    /// Whether the copy may be a source.
    pub is_whole: bool,
    /// Who is reached, if this node leads.
    pub links: Vec<Member>,
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
            | Message::Join
            | Message::JoinAt(_)
            | Message::Verify { .. }
    )
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
    /// The part of node `me`, which follows at first, with the copy that a replay has found. Superblocks get tags of
    /// these keys, if there are any. What others need of the log is read into buffers of `pool`.
    pub fn new(
        me: Member,
        found: Found,
        keys: Option<Arc<dyn Authenticator>>,
        pool: Arc<Pool>,
        times: Times,
    ) -> Self {
        let Found { superblock, spans } = found;
        let ring_blocks = superblock.ring_blocks.get();
        let is_encrypted = superblock.data_key != [0; 16];
        let says = superblocks::of_copy(&superblock);
        let replica = Replica::new(says, ring_blocks, spans);
        Self {
            me,
            now: Nanos(0),
            copies_min: 1,
            replica,
            part: Part::Follows,
            record: None,
            superblocks: Superblocks::new(Box::new(superblock), keys),
            held: VecDeque::new(),
            standing: Standing::default(),
            stands: false,
            links: BTreeSet::new(),
            outboxes: BTreeMap::new(),
            reads: SpanReads::new(pool, ring_blocks, is_encrypted),
            operations: Slab::new(),
            deadlines: Deadlines::new(times),
            has_failed: false,
            acts: Vec::new(),
        }
    }

    /// Below so many members nothing is committed: writes wait.
    pub fn set_copies_min(&mut self, copies_min: usize) {
        self.copies_min = copies_min.max(1);
        self.pump();
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
            is_whole: superblock.is_whole,
            links: self.links.iter().copied().collect(),
        }
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

    /// Whether this member is reached.
    pub fn reaches(&self, member: Member) -> bool {
        self.links.contains(&member)
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
        let others: BTreeSet<Member> = all.filter(|member| *member != self.me).collect();
        others.into_iter().collect()
    }

    // Links.

    /// A member is reached.
    pub fn connected(&mut self, now: Nanos, to: Member) {
        self.now = now;
        self.links.insert(to);
        self.outboxes.insert(to, Outbox::default());
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.connected(to),
            Part::Serves(group) => group.connected(to),
        }
        self.pump();
    }

    /// It is not any more.
    pub fn disconnected(&mut self, now: Nanos, from: Member) {
        self.now = now;
        self.links.remove(&from);
        self.outboxes.remove(&from);
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.disconnected(from),
            Part::Serves(group) => group.disconnected(from),
        }
        self.pump();
    }

    /// Who led, or wanted to, does not reach this node any more.
    pub fn leader_gone(&mut self, now: Nanos, leader: Member) {
        self.now = now;
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
            self.deadlines.heard(now, from);
            self.hear(from, epoch, message, data);
        }
        self.pump();
    }

    fn receive_for_copy(&mut self, from: Member, epoch: u64, message: &Message, data: Vec<Buf>) {
        let Message::Append(span) = message else {
            return self.replica.receive(from, epoch, message);
        };
        if !self.is_its_data(span, &data) {
            // Whoever sends that has another log, or lies: it is not listened to on this link.
            return self.acts.push(Act::Drop(from));
        }
        self.take_span(*span, data, None, |replica| {
            replica.receive(from, epoch, message);
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
            self.held.push_back(Held {
                end: span.end.position,
                data,
                way,
            });
        }
        is_taken
    }

    /// Whether so many blocks are what the span says that they are, as far as their head tells; that of a log that is
    /// encrypted tells nothing.
    fn is_its_data(&self, span: &SpanId, data: &[Buf]) -> bool {
        let bytes: usize = data.iter().map(|part| part.len()).sum();
        let is_whole = bytes == span.blocks as usize * BLOCK_BYTES;
        let superblock = self.superblocks.last();
        let is_plain = superblock.data_key == [0; 16];
        is_whole
            && span.blocks > 0
            && (!is_plain
                || data.first().is_some_and(|block| {
                    SpanHeader::peek(block).is_ok_and(|header| {
                        header.log == superblock.log
                            && header.chain.get() == span.start.chain
                            && header.checksum.get() == span.end.chain
                            && header.incarnation.get() == span.incarnation
                            && header.durable.get() == span.evidence
                            && header.position.get() + u64::from(span.blocks) == span.end.position
                    })
                }))
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
            Part::Serves(group) => group.receive(from, message, &self.replica),
            Part::Takes(takeover) => {
                let Some(span) = takeover.receive(from, message) else {
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
        self.record = Some(record.clone());
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
            self.begin_part(Part::Takes(Takeover::new(self.me, record.clone())));
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
        match (operation, result) {
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
        self.look_at_deadlines();
        self.pump();
    }

    /// When [`Self::poll`] is to be called, if nothing else happens.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let starved = self.reads.is_starved();
        let starved = starved.then(|| self.now.plus(RETRY_PAUSE));
        self.deadlines.next().into_iter().chain(starved).min()
    }

    fn look_at_deadlines(&mut self) {
        let head = self.replica.head().position;
        let late = match &self.part {
            Part::Follows => {
                self.deadlines.clear();
                Late::default()
            }
            Part::Takes(takeover) => {
                let levels = matches!(takeover.step(), Step::Levels { .. });
                (self.deadlines).of_takeover(self.now, levels, takeover.levels_some())
            }
            Part::Serves(group) => {
                let members = &group.record().config.members;
                let owing: BTreeSet<Member> = group.owing(head).collect();
                let all = members.iter().filter(|member| *member != self.me);
                let away = all.filter(|member| !self.links.contains(member));
                let owing = owing.iter().copied().chain(away);
                let owing: BTreeMap<Member, bool> = owing
                    .map(|member| (member, members.contains(member)))
                    .collect();
                self.deadlines.of_members(self.now, &owing)
            }
        };
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => {
                if late.gathering {
                    takeover.end_gathering();
                }
                if late.levelling {
                    takeover.end_levelling();
                }
            }
            Part::Serves(group) => {
                for member in late.members {
                    group.suspect(member);
                }
                for joiner in late.joiners {
                    self.acts.push(Act::Break(joiner));
                }
            }
        }
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
    }
}
