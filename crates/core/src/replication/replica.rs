//! One member's copy of a log: what it takes, when that may go to the medium, and what it promises.
//!
//! ```text
//!            Append, of the promised epoch, where the copy ends
//!               ┌────────┐
//!               ▼        │
//!  ┌────────► takes ─────┘◄───────────────── superblock durable: Promised, HasCut, Verified ───┐
//!  │            │ Promise of a higher epoch, JoinAt                                            │
//!  │            ▼                                                                              │
//!  │         settles ──nothing is on its way to the medium──► superblock being written ────────┘
//!  │            │ a higher promise takes the place of a lower one
//!  └─restart────┘
//! ```
//!
//! | message | taken if | answer |
//! |---|---|---|
//! | Attach | not of a lower epoch | Attached |
//! | Append | of the promised epoch, where the copy ends | Ack once it is durable |
//! | Superblock | of the promised epoch, no lower number than the last one | Named once it is durable, and all before its opening too |
//! | Promise | of a higher epoch, or of the one that was promised | Promised once it is durable |
//! | ReadLog | of the promised epoch | LogData, if there is more |
//! | Join | not of a lower epoch | Joining |
//! | JoinAt | not of a lower epoch | HasCut once it is durable |
//! | Verify | of the promised epoch | Verified once it was read back and that is durable; NotWhole once it is given up, durably |
//!
//! What is of a lower epoch is answered with Fenced. Every other request that is not taken, or that gives way to that of
//! another node, is answered with Nothing, so that nobody waits for it; a span that is not taken is dropped. What the same
//! node asks anew in the same epoch takes the place of what it had asked, without a word.
//!
//! Invariants:
//! 1. A promise is durable before it is told, and nothing that was taken before is on its way to the medium then: where
//!    the copy ends does not change any more behind the back of whoever was told.
//! 2. A span goes to the medium only when everything below its evidence is durable here, and when the superblock knows
//!    its incarnation (a replay takes either for rot); and only where it covers nothing at the durable tail or behind it.
//!    In a copy that is not whole no span behind the cut proves anything, so those go there in any order, until it was
//!    read back. It is whole only once it has all of them.
//! 3. A truncation is durable before the first span that takes the place of what was cut off, and nothing of that is on
//!    its way to the medium any more.
//! 4. A copy that is being brought up says so durably (`is_whole`) from its cut on until it was read back.
//! 5. The superblock of a whole copy voids what older openings wrote from where the present one begins on. It says so once
//!    all before that point is durable. A crash may have left spans there that follow again when what lies before
//!    them is written again.
//! 6. What was read back and is not good is given up: the superblock voids all spans, until the copy is whole again.
//! 7. Whatever waits for room in the ring does not keep the tail from moving: it moves as far as the copy is durable.
//! 8. Neither the promise, the incarnation nor the tail goes back, but that a copy without anything in common with the
//!    others takes their tail.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::message::{Change, Copy, Cut, Message, Question};
use super::{Member, Point, SpanId, Spans};
use crate::base::limits::JOIN_POINTS_MAX;

/// As `void_before`: of every opening.
const VOID: u64 = u64::MAX;

/// What a member's superblock says for replication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Superblock {
    /// The highest epoch that was promised.
    pub promised: u64,
    /// The highest opening whose spans it takes.
    pub incarnation: u64,
    /// Where the log begins.
    pub tail: Point,
    /// Sync points before the tail.
    pub sync_points: u64,
    /// The backend may hold writes past the log that it has not flushed.
    pub is_unflushed: bool,
    /// From this position on, spans of openings before `void_before` are void.
    pub cut_position: u64,
    /// See `cut_position`.
    pub void_before: u64,
    /// Under which revision of the record it was brought up.
    pub joined: u64,
    /// Whether the copy may be a source.
    pub is_whole: bool,
}

impl Superblock {
    /// That of a new and empty log: of a member of the first record, or of a node that has nothing yet.
    pub fn new(is_whole: bool) -> Self {
        Self {
            promised: u64::from(is_whole),
            incarnation: u64::from(is_whole),
            tail: Point::default(),
            sync_points: 0,
            is_unflushed: false,
            cut_position: 0,
            void_before: 0,
            joined: u64::from(is_whole),
            is_whole,
        }
    }

    /// Whether no span counts: what the copy had was given up, and it has not become whole since.
    pub fn is_void(&self) -> bool {
        self.void_before == VOID
    }

    /// Whether a span that lies there counts.
    pub fn counts(&self, span: &SpanId) -> bool {
        span.start.position < self.cut_position || span.incarnation >= self.void_before
    }
}

/// Who waits for what, and in which epoch it asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Asked<T> {
    by: Member,
    epoch: u64,
    what: T,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Verify {
    up_to: Point,
    state: Reading,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Reading {
    Waits,
    Reads,
    Good,
}

/// What is known of what a copy holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Content {
    /// Nothing bad.
    Sound,
    /// Some of it may not be as it should be: it is no source before it was read back.
    Doubtful,
    /// It is not as it should be. It is given up as soon as the superblock says so.
    Rotten,
    /// Nothing that it had counts any more: it takes nothing before it was cut.
    GivenUp,
}

/// A span, and whether it is on the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Held {
    span: SpanId,
    is_written: bool,
}

/// A message that is to be sent: to whom, the epoch of what it answers, and the message.
pub type Outgoing = (Member, u64, Message);

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    /// The one that is durable.
    superblock: Superblock,
    writing: Option<Superblock>,
    /// What the next one shall say.
    wanted: Superblock,
    /// Size of the ring that the spans lie in.
    ring_blocks: u64,
    /// From the tail on.
    spans: VecDeque<Held>,
    /// How many of them were handed out to be written, the oldest ones.
    submitted: usize,
    /// How many of these are not on the medium yet.
    in_flight: usize,
    /// Where the last of those ends that did not wait for their evidence.
    unordered: u64,
    head: Point,
    durable: Point,
    /// Who gets to know what is durable.
    leader: Option<Asked<()>>,
    promise: Option<Asked<Point>>,
    change: Option<Asked<Change>>,
    /// The last change that it was told in this epoch, whether it is durable or not.
    told: Change,
    cut: Option<Asked<Cut>>,
    verify: Option<Asked<Verify>>,
    content: Content,
    /// Who is told of that.
    not_whole: Option<Asked<Point>>,
    /// Something is being read back, for `verify` or for somebody who does not ask any more.
    is_reading: bool,
    outgoing: VecDeque<Outgoing>,
}

impl Spans for Replica {
    fn span_after(&self, position: u64) -> Option<SpanId> {
        let index = self.ended_by(position);
        self.spans.get(index).map(|held| held.span)
    }

    fn head(&self) -> Point {
        self.head
    }

    fn has(&self, point: Point) -> bool {
        point == self.superblock.tail
            || point.position < self.superblock.tail.position
            || self
                .ending_at(point.position)
                .is_some_and(|index| self.spans[index].span.end == point)
    }
}

impl Replica {
    /// The copy as a replay found it, in a ring of so many blocks.
    pub fn new(
        superblock: Superblock,
        ring_blocks: u64,
        spans: impl IntoIterator<Item = SpanId>,
    ) -> Self {
        let found = |span| Held {
            span,
            is_written: true,
        };
        let spans: VecDeque<Held> = spans.into_iter().map(found).collect();
        let head = spans.back().map_or(superblock.tail, |last| last.span.end);
        Self {
            superblock,
            writing: None,
            wanted: superblock,
            ring_blocks,
            submitted: spans.len(),
            in_flight: 0,
            unordered: 0,
            spans,
            head,
            durable: head,
            leader: None,
            promise: None,
            change: None,
            told: Change::default(),
            cut: None,
            verify: None,
            content: if superblock.is_void() {
                Content::GivenUp
            } else {
                Content::Sound
            },
            not_whole: None,
            is_reading: false,
            outgoing: VecDeque::new(),
        }
    }

    /// The copy whose replay failed: it lost something of what it had said. It gives up the rest, durably, and is
    /// brought up anew.
    pub fn damaged(superblock: Superblock, ring_blocks: u64) -> Self {
        let mut replica = Self::new(superblock, ring_blocks, []);
        replica.content = Content::Rotten;
        replica.settle();
        replica
    }

    /// Its replay has met blocks that are not as they should be. Until it was brought up anew, or [healed](Self::healed),
    /// it is no source; nothing is given up before, since it may be all that is left.
    pub fn doubt(&mut self) {
        if self.content == Content::Sound {
            self.content = Content::Doubtful;
        }
    }

    /// Whether it would be a source, but for blocks of data that are not as they should be.
    pub fn may_heal(&self) -> bool {
        self.superblock.is_whole && self.content == Content::Doubtful
    }

    /// All of it was read, and is as it should be.
    pub fn healed(&mut self) {
        if self.may_heal() {
            self.content = Content::Sound;
        }
    }

    /// Whether it may be a source.
    pub fn is_whole(&self) -> bool {
        self.superblock.is_whole && matches!(self.content, Content::Sound | Content::GivenUp)
    }

    /// The superblock that is durable.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Where what is durable ends.
    pub fn durable(&self) -> Point {
        self.durable
    }

    /// How many spans end at this position or before it.
    fn ended_by(&self, position: u64) -> usize {
        self.spans
            .partition_point(|held| held.span.end.position <= position)
    }

    /// Which span ends at this position.
    fn ending_at(&self, position: u64) -> Option<usize> {
        let index = self.ended_by(position).checked_sub(1)?;
        (self.spans[index].span.end.position == position).then_some(index)
    }

    /// The highest epoch that was promised, or is about to be.
    pub fn promised(&self) -> u64 {
        let promise = self.promise.map_or(0, |promise| promise.epoch);
        let cut = self.cut.map_or(0, |cut| cut.epoch);
        self.superblock.promised.max(promise).max(cut)
    }

    /// Whether it follows who acts in this epoch: it has promised that, durably, and is not asked for a higher one.
    pub fn follows(&self, epoch: u64) -> bool {
        epoch == self.superblock.promised && self.promised() == epoch
    }

    /// What it says of itself, to whoever asked for a floor.
    pub fn copy(&self, floor: Point) -> Copy {
        Copy {
            promised: self.superblock.promised,
            head: self.durable,
            tail: self.superblock.tail,
            sync_points: self.superblock.sync_points,
            incarnation: self.superblock.incarnation,
            is_unflushed: self.superblock.is_unflushed,
            joined: self.superblock.joined,
            is_whole: self.is_whole() && self.has(floor),
            // The machine knows no time.
            lease_left_ms: 0,
        }
    }

    /// Where its durable spans end, from the tail on; not each of them if there are many, but always the last one.
    fn points(&self) -> Vec<Point> {
        if self.content == Content::Rotten {
            return Vec::new();
        }
        let spans = self.spans.iter().map(|held| held.span.end);
        let durable = spans.filter(|end| end.position <= self.durable.position);
        let ends: Vec<Point> = [self.superblock.tail].into_iter().chain(durable).collect();
        let step = ends.len().div_ceil(JOIN_POINTS_MAX);
        let mut points: Vec<Point> = ends.iter().rev().step_by(step).copied().collect();
        points.reverse();
        points
    }

    /// Whether it takes what is appended in this epoch.
    fn takes(&self, epoch: u64) -> bool {
        self.follows(epoch)
            && self.cut.is_none()
            && matches!(self.content, Content::Sound | Content::Doubtful)
    }

    /// Take a message that came from `from`, which acts in `epoch`.
    pub fn receive(&mut self, from: Member, epoch: u64, message: &Message) {
        if epoch < self.promised() {
            let promised = self.promised();
            self.send(from, epoch, Message::Fenced { promised });
            return;
        }
        let by = |what| Asked {
            by: from,
            epoch,
            what,
        };
        match message {
            Message::Attach => {
                self.leader = Some(by(()));
                let copy = self.copy(Point::default());
                self.send(from, epoch, Message::Attached(copy));
            }
            Message::Append(span) => self.append(epoch, *span),
            Message::Superblock(change)
                if self.takes(epoch) && change.number >= self.told.number =>
            {
                self.told = *change;
                let before = self.change.replace(Asked {
                    by: from,
                    epoch,
                    what: *change,
                });
                self.refuse_other(from, before, Question::Superblock);
            }
            Message::Promise { floor } => {
                self.leader = Some(by(()));
                // Of a lower epoch: what was done of it stays, and nobody waits for the rest.
                let cut = self.cut.take_if(|cut| cut.epoch < epoch);
                let before = self.promise.replace(Asked {
                    by: from,
                    epoch,
                    what: *floor,
                });
                self.refuse_other(from, cut, Question::JoinAt);
                self.refuse_other(from, before, Question::Promise);
                self.forget_asked(from);
                // A candidate that starts anew counts anew.
                self.told = Change::default();
            }
            Message::ReadLog { after } if self.takes(epoch) => {
                let next = self.span_after(after.position);
                let next = next.filter(|next| next.end.position <= self.durable.position);
                let next = next.filter(|next| next.start == *after);
                let answer = next.map_or(Message::Nothing(Question::ReadLog), Message::LogData);
                self.send(from, epoch, answer);
            }
            Message::Join => {
                let points = self.points();
                self.send(from, epoch, Message::Joining { points });
            }
            Message::JoinAt(cut) if cut.change.tail.position <= cut.at.position => {
                self.leader = Some(by(()));
                let promise = self.promise.take();
                let before = self.cut.replace(Asked {
                    by: from,
                    epoch,
                    what: *cut,
                });
                self.refuse_other(from, promise, Question::Promise);
                self.refuse_other(from, before, Question::JoinAt);
                self.forget_asked(from);
                self.told = cut.change;
            }
            Message::Verify { up_to } if self.takes(epoch) => {
                let before = self.verify.take();
                self.refuse_other(from, before, Question::Verify);
                self.verify = Some(Asked {
                    by: from,
                    epoch,
                    what: Verify {
                        up_to: *up_to,
                        state: Reading::Waits,
                    },
                });
            }
            // Of another epoch than was promised, or nothing that a copy is asked.
            _ => {
                if let Some(question) = Question::of(message) {
                    self.send(from, epoch, Message::Nothing(question));
                }
            }
        }
        self.settle();
    }

    /// What another node than `from` has asked gives way to what that one asks now.
    fn refuse_other<T>(&mut self, from: Member, asked: Option<Asked<T>>, question: Question) {
        if let Some(asked) = asked.filter(|asked| asked.by != from) {
            self.refuse(asked.by, asked.epoch, question);
        }
    }

    fn refuse(&mut self, by: Member, epoch: u64, question: Question) {
        let promised = self.promised();
        let is_fenced = epoch < promised;
        self.send(
            by,
            epoch,
            if is_fenced {
                Message::Fenced { promised }
            } else {
                Message::Nothing(question)
            },
        );
    }

    /// Changes and reading back are not asked for any more, since `from` asks for something else.
    fn forget_asked(&mut self, from: Member) {
        let (change, verify) = (self.change.take(), self.verify.take());
        self.refuse_other(from, change, Question::Superblock);
        self.refuse_other(from, verify, Question::Verify);
    }

    /// Nothing can be written any more: nobody waits for what needs that.
    pub fn refuse_all(&mut self) {
        let promise = self.promise.take().map(|asked| (asked.by, asked.epoch));
        let change = self.change.take().map(|asked| (asked.by, asked.epoch));
        let cut = self.cut.take().map(|asked| (asked.by, asked.epoch));
        let verify = self.verify.take().map(|asked| (asked.by, asked.epoch));
        let not_whole = self.not_whole.take().map(|asked| (asked.by, asked.epoch));
        for (asked, question) in [
            (promise, Question::Promise),
            (change, Question::Superblock),
            (cut, Question::JoinAt),
            (verify.or(not_whole), Question::Verify),
        ] {
            if let Some((by, epoch)) = asked {
                self.send(by, epoch, Message::Nothing(question));
            }
        }
    }

    /// Take a span in this epoch, from whoever may write in it.
    pub fn append(&mut self, epoch: u64, span: SpanId) {
        if !self.takes(epoch) || span.start != self.head || !self.fits(&span) {
            return;
        }
        self.spans.push_back(Held {
            span,
            is_written: false,
        });
        self.head = span.end;
        // A change may wait for it.
        self.settle();
    }

    /// Whether a span lies behind its start, and could be written if everything before it had gone.
    fn fits(&self, span: &SpanId) -> bool {
        let (start, end) = (span.start.position, span.end.position);
        let at = end.checked_sub(u64::from(span.blocks));
        span.blocks > 0 && at.is_some_and(|at| at >= start) && end - start <= self.ring_blocks
    }

    /// Have the next superblock say this, as if the primary had asked for it.
    pub fn change_own(&mut self, me: Member, epoch: u64, change: Change) {
        self.receive(me, epoch, &Message::Superblock(change));
    }

    /// Promise an epoch that this node takes the group in, as if a candidate had asked for it.
    pub fn promise_own(&mut self, me: Member, epoch: u64, floor: Point) {
        self.receive(me, epoch, &Message::Promise { floor });
    }

    /// The next span to write. Any number may be under way.
    pub fn next_write(&mut self) -> Option<SpanId> {
        let next = self.spans.get(self.submitted)?.span;
        let waits = next.evidence > self.durable.position;
        if (waits && self.is_ordered())
            || next.incarnation > self.superblock.incarnation
            || !self.has_room(&next)
        {
            return None;
        }
        if waits {
            self.unordered = next.end.position;
        }
        self.submitted += 1;
        self.in_flight += 1;
        Some(next)
    }

    /// Whether what is on the medium may be taken for proof that all below its evidence was there.
    fn is_ordered(&self) -> bool {
        let is_whole = |superblock: &Superblock| superblock.is_whole;
        is_whole(&self.superblock)
            || is_whole(&self.wanted)
            || self.writing.as_ref().is_some_and(is_whole)
            || (self.verify).is_some_and(|verify| verify.what.state == Reading::Good)
    }

    /// Whether a span covers nothing in the ring that is at the durable tail or behind it.
    fn has_room(&self, span: &SpanId) -> bool {
        let tail = self.superblock.tail.position;
        span.end.position.saturating_sub(tail) <= self.ring_blocks
    }

    /// Whether a span that was taken waits until the tail has moved.
    fn lacks_room(&self) -> bool {
        let next = self.spans.get(self.submitted);
        next.is_some_and(|held| !self.has_room(&held.span))
    }

    /// The span that ends at this position is on the medium.
    pub fn written(&mut self, end: u64) {
        let index = self.ending_at(end).filter(|index| *index < self.submitted);
        if let Some(index) = index
            && !core::mem::replace(&mut self.spans[index].is_written, true)
        {
            self.in_flight -= 1;
        }
        let before = self.durable;
        let mut next = self.ended_by(self.durable.position);
        while let Some(held) = self.spans.get(next).filter(|held| held.is_written) {
            self.durable = held.span.end;
            next += 1;
        }
        if self.durable != before {
            self.acknowledge();
        }
        self.settle();
    }

    fn acknowledge(&mut self) {
        if let Some(leader) = self.leader {
            let durable = self.durable.position;
            self.send(leader.by, leader.epoch, Message::Ack { durable });
        }
    }

    /// The next superblock to write, while none is being written.
    pub fn next_superblock(&mut self) -> Option<Superblock> {
        if self.writing.is_some() || self.wanted == self.superblock {
            return None;
        }
        self.writing = Some(self.wanted);
        self.writing
    }

    /// The superblock that was being written is durable.
    pub fn superblock_written(&mut self) {
        self.superblock = self.writing.take().expect("one was being written");
        let tail = self.superblock.tail.position;
        while (self.spans.front()).is_some_and(|held| held.span.end.position <= tail) {
            self.spans.pop_front();
            self.submitted -= 1;
        }
        self.settle();
    }

    /// What is to be read back and compared with its checksums, up to there.
    pub fn next_verify(&mut self) -> Option<Point> {
        if self.is_reading {
            return None;
        }
        let durable = self.durable.position;
        let verify = self.verify.as_mut()?;
        let up_to = verify.what.up_to;
        if verify.what.state != Reading::Waits || up_to.position > durable {
            return None;
        }
        verify.what.state = Reading::Reads;
        self.is_reading = true;
        Some(up_to)
    }

    /// It was read back; `is_good` if everything was as it should be.
    pub fn verified(&mut self, is_good: bool) {
        self.is_reading = false;
        let Some(verify) = self.verify.as_mut() else {
            return;
        };
        if verify.what.state != Reading::Reads {
            return;
        }
        if is_good {
            verify.what.state = Reading::Good;
            self.content = Content::Sound;
        } else {
            let (by, epoch, up_to) = (verify.by, verify.epoch, verify.what.up_to);
            self.verify = None;
            if let Some(change) = self.change.take() {
                self.refuse(change.by, change.epoch, Question::Superblock);
            }
            self.content = Content::Rotten;
            self.not_whole = Some(Asked {
                by,
                epoch,
                what: up_to,
            });
        }
        self.settle();
    }

    /// The next message to send.
    pub fn next_message(&mut self) -> Option<Outgoing> {
        self.outgoing.pop_front()
    }

    /// The link to a node broke: what it asked for is not answered.
    pub fn disconnected(&mut self, from: Member) {
        self.outgoing.retain(|(to, ..)| *to != from);
        self.leader.take_if(|asked| asked.by == from);
        self.change.take_if(|asked| asked.by == from);
        self.verify.take_if(|asked| asked.by == from);
        self.not_whole.take_if(|asked| asked.by == from);
    }

    fn send(&mut self, to: Member, epoch: u64, message: Message) {
        if let Message::Ack { .. } = message {
            // One says what those before it said.
            (self.outgoing)
                .retain(|(other, _, last)| *other != to || !matches!(last, Message::Ack { .. }));
        }
        self.outgoing.push_back((to, epoch, message));
    }

    /// Whether something of it is on its way to the medium.
    fn is_busy(&self) -> bool {
        self.in_flight > 0
    }

    /// Go on with what waited.
    fn settle(&mut self) {
        self.settle_rot();
        self.settle_promise();
        self.settle_cut();
        self.settle_change();
        self.settle_verify();
    }

    fn is_settled(&self) -> bool {
        self.writing.is_none() && self.wanted == self.superblock
    }

    /// Give up what is rotten.
    fn settle_rot(&mut self) {
        if self.content != Content::Rotten {
            return;
        }
        self.drop_unsubmitted();
        if self.is_busy() || self.writing.is_some() {
            return;
        }
        self.spans.clear();
        self.submitted = 0;
        self.head = self.wanted.tail;
        self.durable = self.wanted.tail;
        self.unordered = 0;
        self.wanted.cut_position = self.wanted.tail.position;
        self.wanted.void_before = VOID;
        self.wanted.is_whole = false;
        if self.is_settled() {
            self.content = Content::GivenUp;
            if let Some(asked) = self.not_whole.take() {
                let up_to = asked.what;
                self.send(asked.by, asked.epoch, Message::NotWhole { up_to });
            }
        }
    }

    fn settle_change(&mut self) {
        let Some(asked) = self.change else { return };
        let change = asked.what;
        if !self.agrees_with(&change) {
            // Of another log than this one.
            self.change = None;
            self.send(
                asked.by,
                asked.epoch,
                Message::Nothing(Question::Superblock),
            );
            return;
        }
        self.wanted.is_unflushed = change.is_unflushed;
        self.settle_opening(&change);
        if change.tail.position > self.durable.position {
            if self.lacks_room() && self.durable.position > self.wanted.tail.position {
                // They wait for the tail, and it for them: it moves as far as they are here. A replay takes the sync
                // points from the span that follows.
                self.wanted.tail = self.durable;
            }
            return;
        }
        if change.tail.position >= self.wanted.tail.position {
            self.wanted.tail = change.tail;
            self.wanted.sync_points = change.sync_points;
        }
        if self.is_settled() && self.durable.position >= change.opens_at {
            self.change = None;
            let number = change.number;
            self.send(asked.by, asked.epoch, Message::Named { number });
        }
    }

    /// Whether the log that a change is about can be this one.
    fn agrees_with(&self, change: &Change) -> bool {
        let is_behind = change.tail.position > self.durable.position;
        let next = self.span_after(change.opens_at);
        (is_behind || self.has(change.tail))
            && next.is_none_or(|next| next.incarnation >= change.incarnation)
    }

    /// Have the superblock know the opening of a change, once everything before it is durable.
    fn settle_opening(&mut self, change: &Change) {
        if self.durable.position >= change.opens_at {
            self.wanted.incarnation = self.wanted.incarnation.max(change.incarnation);
            if self.wanted.is_whole && change.incarnation > self.wanted.void_before {
                self.wanted.cut_position = change.opens_at;
                self.wanted.void_before = change.incarnation;
            }
        } else if let Some(next) = self.spans.get(self.submitted) {
            // Of an opening between: in an epoch no opening takes the place of what another one wrote.
            let incarnation = next.span.incarnation.min(change.incarnation);
            self.wanted.incarnation = self.wanted.incarnation.max(incarnation);
        }
    }

    fn settle_verify(&mut self) {
        let Some(asked) = self.verify else { return };
        let told = self.told;
        let least = told.opens_at.max(self.unordered);
        if asked.what.state != Reading::Good || self.durable.position < least {
            return;
        }
        self.wanted.is_whole = true;
        self.wanted.cut_position = told.opens_at;
        self.wanted.void_before = told.incarnation;
        if self.is_settled() {
            self.verify = None;
            let up_to = asked.what.up_to;
            self.send(asked.by, asked.epoch, Message::Verified { up_to });
        }
    }

    fn settle_promise(&mut self) {
        let Some(asked) = self.promise else { return };
        if asked.epoch > self.superblock.promised {
            // What was taken and not submitted was acknowledged by nobody here.
            self.drop_unsubmitted();
            if !self.is_busy() {
                self.wanted.promised = self.wanted.promised.max(asked.epoch);
            }
        } else if self.writing.is_none() && !self.is_busy() {
            self.promise = None;
            let copy = self.copy(asked.what);
            self.send(asked.by, asked.epoch, Message::Promised(copy));
        }
    }

    fn settle_cut(&mut self) {
        let Some(asked) = self.cut else { return };
        self.drop_unsubmitted();
        if self.is_busy() || self.writing.is_some() || self.content == Content::Rotten {
            return;
        }
        let cut = asked.what;
        if self.superblock.promised == asked.epoch && self.is_cut(&cut) {
            self.has_cut(asked);
            return;
        }
        let goes_on = self.goes_on_at(&cut);
        let keeps = self.has(cut.at) && cut.at.position >= self.superblock.tail.position;
        if keeps {
            self.spans.truncate(self.ended_by(cut.at.position));
        } else {
            self.spans.clear();
        }
        self.submitted = self.spans.len();
        self.head = cut.at;
        self.durable = cut.at;
        self.unordered = 0;
        let (last, change) = (&self.superblock, &cut.change);
        // An opening that begins further on becomes known once all before that is there, as to any member.
        let knows = !goes_on || cut.at.position >= change.opens_at;
        let (tail, sync_points) = if keeps && last.tail.position > change.tail.position {
            (last.tail, last.sync_points)
        } else {
            (change.tail, change.sync_points)
        };
        self.wanted = Superblock {
            promised: asked.epoch,
            incarnation: if knows {
                last.incarnation.max(change.incarnation)
            } else {
                last.incarnation
            },
            tail,
            sync_points,
            is_unflushed: change.is_unflushed,
            cut_position: cut.at.position,
            // What was given up does not count again before the copy is whole: openings that are given wrote it.
            void_before: if last.is_void() {
                VOID
            } else {
                cut.void_before
            },
            joined: cut.joined,
            is_whole: goes_on,
        };
        if self.is_settled() {
            // The superblock had said so before.
            self.has_cut(asked);
        }
    }

    fn has_cut(&mut self, asked: Asked<Cut>) {
        self.cut = None;
        if self.content == Content::GivenUp {
            self.content = Content::Sound;
        }
        self.send(asked.by, asked.epoch, Message::HasCut(asked.what));
    }

    /// Whether a whole copy is still whole after this cut: it goes on at the tail, before which it may lack something, since all
    /// of that is in the backend. What it has behind the tail is given again, and is the same there, or void.
    fn goes_on_at(&self, cut: &Cut) -> bool {
        let last = &self.superblock;
        last.is_whole
            && self.content == Content::Sound
            && self.cut.is_some_and(|asked| asked.epoch == last.promised)
            && last.joined == cut.joined
            && cut.at == cut.change.tail
    }

    /// Whether the durable superblock and the spans say that it was cut there.
    fn is_cut(&self, cut: &Cut) -> bool {
        let last = &self.superblock;
        last.cut_position == cut.at.position
            && (last.is_void() || last.void_before == cut.void_before)
            && last.is_whole == self.goes_on_at(cut)
            && self.durable == cut.at
            && last.joined == cut.joined
            && last.incarnation >= cut.change.incarnation
            && last.is_unflushed == cut.change.is_unflushed
            && last.tail.position >= cut.change.tail.position
    }

    fn drop_unsubmitted(&mut self) {
        self.spans.truncate(self.submitted);
        let end = self.spans.back().map_or(self.durable, |last| last.span.end);
        self.head = end;
    }

    /// Assert what must always hold.
    pub fn check_invariants(&self) {
        assert!(self.superblock.promised <= self.wanted.promised);
        assert!(self.superblock.incarnation <= self.wanted.incarnation);
        assert!(self.durable.position <= self.head.position);
        assert!(self.unordered <= self.head.position);
        assert!(self.in_flight <= self.submitted && self.submitted <= self.spans.len());
        let mut at = None;
        for held in &self.spans {
            let span = &held.span;
            assert!(
                at.is_none_or(|at| at == span.start),
                "spans follow one another"
            );
            assert!(span.end.position > span.start.position);
            at = Some(span.end);
        }
        assert_eq!(self.head, at.unwrap_or(self.head));
    }
}

#[cfg(test)]
mod tests;
