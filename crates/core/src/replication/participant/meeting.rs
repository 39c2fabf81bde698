//! Whom this node reaches, and who reaches it.
//!
//! A member that has nothing to say to what it was asked is left alone for [`MEET_PAUSE`], over the same link.

use super::{Act, Outbox, Part, Participant};
use crate::base::io::Nanos;
use crate::replication::Member;
use crate::replication::message::Question;

/// How long a member that had nothing to say is left alone.
const MEET_PAUSE: Nanos = Nanos::from_millis(500);

impl Participant {
    /// A member is reached.
    pub fn connected(&mut self, now: Nanos, to: Member) {
        self.now = now;
        self.meet(to);
        self.pump();
    }

    /// It is not any more.
    pub fn disconnected(&mut self, now: Nanos, from: Member) {
        self.now = now;
        self.paused.remove(&from);
        self.lose(from);
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
            self.pause(from);
        }
        self.pump();
    }

    pub(super) fn meet(&mut self, to: Member) {
        self.paused.remove(&to);
        self.links.insert(to);
        self.renew_outbox(to);
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.connected(to),
            Part::Serves(group) => group.connected(to),
        }
    }

    pub(super) fn lose(&mut self, from: Member) {
        self.links.remove(&from);
        self.outboxes.remove(&from);
        self.repairs.give_up_on(from);
        self.reads.forget_sends(from);
        self.leases.disconnected(from);
        match &mut self.part {
            Part::Follows => {}
            Part::Takes(takeover) => takeover.disconnected(from),
            Part::Serves(group) => group.disconnected(from),
        }
    }

    /// Begin with a member as if it was reached anew, but not at once: it would come to the same again.
    pub(super) fn pause(&mut self, member: Member) {
        self.lose(member);
        self.paused.insert(member, self.now.plus(MEET_PAUSE));
    }

    pub(super) fn renew_outbox(&mut self, to: Member) {
        self.reads.forget_sends(to);
        self.lives += 1;
        self.outboxes.insert(to, Outbox::new(self.lives));
    }

    /// A member has nothing to say to what it was asked.
    pub(super) fn hear_nothing(&mut self, from: Member, question: Question) {
        match question {
            Question::ReadLog if matches!(self.part, Part::Serves(_)) => {
                // It has not what is to be repaired, and is in step all the same.
                self.repairs.give_up_on(from);
            }
            Question::Attach
            | Question::Beat
            | Question::Join
            | Question::Promise
            | Question::ReadLog => {
                self.pause(from);
            }
            // More was sent after it, and what is said to that must not be taken for what is said later.
            Question::Superblock | Question::JoinAt | Question::Verify => {
                self.acts.push(Act::Break(from));
            }
        }
    }

    /// Who led, or wanted to, does not reach this node any more.
    pub fn leader_gone(&mut self, now: Nanos, leader: Member) {
        self.now = now;
        self.gate.forget(leader);
        self.reads.forget_answers(leader);
        self.replica.disconnected(leader);
        self.pump();
    }
}
