//! How a participant goes on: the machines are asked for what follows until nothing does without anybody else.

use alloc::vec::Vec;

use smallvec::SmallVec;

use super::healing;
use super::reads::{self, Purpose};
use super::repairs;
use super::{Act, Operation, Outbox, Part, Participant, meeting};
use crate::base::buf::Buf;
use crate::base::error::IoError;
use crate::base::io::{Done, Nanos, Token};
use crate::base::limits::BLOCK_BYTES;
use crate::replication::group::Group;
use crate::replication::message::{Message, Question};
use crate::replication::record::WhenShort;
use crate::replication::takeover::{Step, Takeover};
use crate::replication::{Member, SpanId, Spans};

/// The group was removed: its members let go of their copies, and confirm nothing any more. What stands on the log ends now,
/// and does not wait for them.
pub fn end_group(this: &mut Participant, now: Nanos) {
    this.now = now;
    this.begin_part(Part::Follows);
    this.pump();
}

impl Participant {
    /// Go on as far as it goes without anybody else.
    pub(super) fn pump(&mut self) {
        self.pace.begin_turn();
        loop {
            step_down(self);
            // A copy that is not good lets go of what it has taken.
            self.verify();
            drop_unheld(self);
            self.write_spans();
            self.write_superblock();
            if self.answer() {
                continue;
            }
            self.tell_part();
            if self.change_part() {
                continue;
            }
            send_beats(self);
            if !self.fill_outboxes() {
                break;
            }
        }
        healing::go_on(self);
        repairs::go_on(self);
        // A change of the record may be written once it is asked for: a lease that it makes shorter is so before.
        self.tell_lease();
        self.ask_record();
        self.complete();
        self.start_reads();
    }

    /// The part is over.
    pub(super) fn fence(&mut self) {
        let served = matches!(self.part, Part::Serves(_));
        self.begin_part(Part::Follows);
        if served {
            self.acts.push(Act::Fenced);
        }
    }

    pub(super) fn begin_part(&mut self, part: Part) {
        for token in self.standing.end_all(self.superblocks.forget_asked()) {
            self.end(token, Err(IoError::Fenced));
        }
        for member in self.links.clone() {
            meeting::renew_outbox(self, member);
        }
        let given_up = self.repairs.give_up_all();
        self.acts.extend(given_up.map(Act::Repaired));
        self.healing.begin_anew();
        (self.stands, self.refuses) = (false, false);
        self.leases.begin_part();
        self.deadlines.begin(self.now);
        self.part = part;
        for member in &self.links {
            match &mut self.part {
                Part::Follows => {}
                Part::Takes(takeover) => takeover.connected(*member),
                Part::Serves(group) => group.connected(*member),
            }
        }
    }

    pub(super) fn begin(&mut self, operation: Operation) -> Token {
        self.rewrites += usize::from(operation.rewrites());
        Token(self.operations.insert(operation) as u64)
    }

    fn write_spans(&mut self) {
        // What is written again has its place to itself until that has ended: where the copy is cut, another span may
        // take that place.
        while !self.has_failed
            && self.rewrites == 0
            && let Some(span) = self.replica.next_write()
        {
            let end = span.end.position;
            let index = self
                .find_held(end)
                .expect("its data is held until it is written");
            let held = &self.held[index];
            let (data, way) = (held.data.clone(), held.way);
            let offset = self.reads.offset_of(&span);
            let token = self.begin(Operation::Span { end });
            self.acts.push(Act::Write {
                token,
                offset,
                data,
                way,
            });
        }
    }

    fn write_superblock(&mut self) {
        if self.has_failed || self.superblocks.is_writing() {
            return;
        }
        let wanted = self.replica.next_superblock();
        let durable = self.replica.durable().position;
        let last = *self.replica.superblock();
        if let Some((offset, block)) = self.superblocks.next(wanted, last, durable) {
            let token = self.begin(Operation::Superblock);
            self.acts.push(Act::Write {
                token,
                offset,
                data: Vec::from([block]),
                way: None,
            });
        }
    }

    /// Answer others, and this node itself. Returns whether there was something for itself.
    fn answer(&mut self) -> bool {
        let mut own = Vec::new();
        while let Some((to, epoch, mut message)) = self.replica.next_message() {
            if let Message::Promised(copy) = &mut message {
                copy.lease_left_ms = self.leases.left_ms(self.now);
            }
            if to == self.me {
                own.push((epoch, message));
            } else if let Message::LogData(span) = message {
                // It waits for one at a time.
                self.reads.forget_answers(to);
                self.reads.want(Purpose::Answer { to, epoch }, span);
            } else {
                self.acts.push(Act::Answer {
                    to,
                    epoch,
                    message,
                    data: Vec::new(),
                });
            }
        }
        let has_some = !own.is_empty();
        for (epoch, message) in own {
            if self.part.epoch() == Some(epoch) {
                self.hear(self.me, epoch, &message, Vec::new());
            }
        }
        has_some
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
            Part::Serves(group) => group.own_durable(durable.position),
        }
    }

    /// Serve, if the group is taken; follow, if that was given up.
    fn change_part(&mut self) -> bool {
        let Part::Takes(takeover) = &self.part else {
            return false;
        };
        match takeover.step() {
            Step::Serves { record, head } => {
                let group = Group::new(self.me, record.clone(), *head, takeover.change());
                self.begin_part(Part::Serves(group));
                self.acts.push(Act::Began);
                true
            }
            Step::Stopped(why) => {
                self.acts.push(Act::Stopped(why.clone()));
                self.begin_part(Part::Follows);
                true
            }
            Step::Gathers | Step::Fetches { .. } | Step::Levels { .. } | Step::Asks { .. } => false,
        }
    }

    /// Ask the part for messages to whoever has room for them. Returns whether there was one for this node itself.
    fn fill_outboxes(&mut self) -> bool {
        let head = self.replica.head();
        let epoch = self.part.epoch().unwrap_or(0);
        let mut has_own = false;
        let others: SmallVec<[Member; 4]> = match &self.part {
            Part::Follows => return false,
            Part::Takes(takeover) => takeover.members().collect(),
            Part::Serves(group) => group.others().collect(),
        };
        for member in others {
            while self.has_room_for(member) && is_in_pace(self, member) {
                let next = match &mut self.part {
                    Part::Follows => None,
                    Part::Takes(takeover) => takeover.next_message(member, &self.replica, head),
                    Part::Serves(group) => group.next_message(member, &self.replica),
                };
                let Some(message) = next else { break };
                if member == self.me {
                    has_own = true;
                    self.replica.receive(self.me, epoch, &message);
                } else {
                    self.enqueue(member, message);
                }
            }
        }
        has_own
    }

    /// Tell what stands on the log until when it may answer reads, if that is news.
    pub(super) fn tell_lease(&mut self) {
        if let Part::Serves(group) = &self.part
            && self.stands
            && let Some(until) = self.leases.news(group)
        {
            self.acts.push(Act::Lease { until });
        }
    }

    fn has_room_for(&self, member: Member) -> bool {
        let outbox = self.outboxes.get(&member);
        member == self.me || outbox.is_some_and(Outbox::takes_more)
    }

    fn enqueue(&mut self, to: Member, message: Message) {
        let Some(outbox) = self.outboxes.get_mut(&to) else {
            return;
        };
        let Message::Append(span) = message else {
            return outbox.push(message, Vec::new());
        };
        let index = self
            .held
            .partition_point(|held| held.end < span.end.position);
        match self.held.get(index) {
            Some(held) if held.end == span.end.position => {
                outbox.push(message, held.data.clone());
            }
            _ => {
                let (life, place) = (outbox.life(), outbox.push_unread(message, span.blocks));
                self.reads.want(Purpose::Send { to, life, place }, span);
                let bytes = u64::from(span.blocks) * BLOCK_BYTES as u64;
                self.pace.sent(bytes);
            }
        }
    }

    fn ask_record(&mut self) {
        let is_due = match &self.part {
            Part::Takes(takeover) => (record_due(self, takeover)).is_some_and(|at| at <= self.now),
            Part::Follows | Part::Serves(_) => true,
        };
        let record = match &mut self.part {
            Part::Follows => None,
            Part::Takes(takeover) => is_due.then(|| takeover.next_record()).flatten(),
            Part::Serves(group) => group.next_record(),
        };
        self.acts.extend(record.map(Act::Ask));
    }

    /// End what is committed of what stands on the log.
    fn complete(&mut self) {
        let Part::Serves(group) = &self.part else {
            return;
        };
        let config = &group.record().config;
        let is_short = config.is_short();
        let refuses = self.stands && is_short && config.when_short == WhenShort::Error;
        let (committed, retired) = (group.committed(), group.retired());
        // What a superblock says keeps nobody's data: it opens, destages and closes with fewer.
        while !is_short && let Some(token) = self.standing.next_committed(committed) {
            self.end(token, Ok(()));
        }
        if let Some(token) = self.superblocks.next_retired(retired) {
            self.end(token, Ok(()));
        }
        if core::mem::replace(&mut self.refuses, refuses) != refuses {
            self.acts.push(Act::Short(refuses));
        }
    }

    // Reading the log.

    fn verify(&mut self) {
        if let Some(up_to) = self.replica.next_verify() {
            let tail = self.replica.superblock().tail;
            self.reads.verify(self.now, tail.position, up_to.position);
        }
        if let Some(is_good) = self.reads.next_verified(self.now, &self.replica) {
            self.replica.verified(is_good);
        }
        let superblock = self.replica.superblock();
        if superblock.is_whole {
            self.reads.is_brought_up();
        } else {
            let tail = superblock.tail.position;
            self.reads.compare_ahead(self.now, tail, &self.replica);
        }
    }

    /// Begin the reads that there is memory for.
    fn start_reads(&mut self) {
        while let Some((piece, offset, buf)) = self.reads.next(&self.replica) {
            let token = self.begin(Operation::Read { piece });
            self.acts.push(Act::Read { token, offset, buf });
        }
    }

    pub(super) fn read_piece(&mut self, piece: reads::Piece, result: Result<Done, IoError>) {
        let buf = match result {
            Ok(Done::Read(buf)) => Ok(buf),
            Ok(_) => Err(IoError::Failed),
            Err(error) => Err(error),
        };
        let Some((purpose, span, data)) = self.reads.done(piece, buf, &self.replica) else {
            return;
        };
        match (purpose, data) {
            (Purpose::Send { to, life, place }, data) => {
                let outbox = self.outboxes.get(&to);
                match (outbox.is_some_and(|outbox| outbox.life() == life), data) {
                    (true, Some(data)) => self.fill_send((to, life, place), &span, data),
                    (true, None) => repairs::want(self, to, life, place, span),
                    (false, _) => {}
                }
            }
            (Purpose::Answer { to, epoch }, Some(data)) => self.acts.push(Act::Answer {
                to,
                epoch,
                message: Message::LogData(span),
                data,
            }),
            (Purpose::Answer { to, epoch }, None) => self.acts.push(Act::Answer {
                to,
                epoch,
                message: Message::Nothing(Question::ReadLog),
                data: Vec::new(),
            }),
            (Purpose::Verify, _) => {}
            (Purpose::Heal { attempt }, data) => {
                healing::read(self, attempt, span, data.as_deref());
            }
        }
    }

    /// The data is there of a message that waits for it, unless that does not go any more.
    pub(super) fn fill_send(
        &mut self,
        (to, life, place): (Member, u64, u64),
        span: &SpanId,
        data: Vec<Buf>,
    ) {
        let outbox = self.outboxes.get_mut(&to);
        if let Some(outbox) = outbox.filter(|outbox| outbox.life() == life) {
            outbox.fill(place, data);
            self.repairs.filled(to, span);
        }
    }
}

/// Send the beats that are due. There is one under way to a member at most, so it needs no room.
fn send_beats(this: &mut Participant) {
    let Part::Serves(group) = &this.part else {
        return;
    };
    this.leases.forget_awaited(group);
    for member in group.followers() {
        if let Some(outbox) = this.outboxes.get_mut(&member)
            && let Some(beat) = this.leases.next_beat(this.now, member)
        {
            outbox.push(beat, Vec::new());
        }
    }
}

/// When a candidate that has everything else may ask for its record; `None`: it has not, or has asked.
pub(super) fn record_due(this: &Participant, takeover: &Takeover) -> Option<Nanos> {
    let Step::Asks {
        is_asked: false, ..
    } = takeover.step()
    else {
        return None;
    };
    Some(this.leases.over_at(takeover, this.last_primary))
}

/// Whether a member may be sent more, as far as clients are concerned.
fn is_in_pace(this: &mut Participant, member: Member) -> bool {
    let streams = matches!(&this.part, Part::Serves(group) if group.streams_to(member));
    !streams || this.pace.may_send(this.now)
}

/// Follow, if a higher epoch than that of the part was promised.
fn step_down(this: &mut Participant) {
    let promised = this.replica.promised();
    if this.part.epoch().is_some_and(|epoch| promised > epoch) {
        this.fence();
    }
}

/// What the copy has let go of is not written.
fn drop_unheld(this: &mut Participant) {
    let head = this.replica.head().position;
    while this.held.back().is_some_and(|held| held.end > head) {
        this.held.pop_back();
    }
    // A cut may lie ahead of what was taken and not written.
    let durable = this.replica.durable().position;
    while this.held.front().is_some_and(|held| held.end <= durable) {
        this.held.pop_front();
    }
}
