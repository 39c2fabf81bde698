//! Members that this node leads: when they are reached, lost, and begun with anew.

use super::outbox::Outbox;
use super::{Act, Part, Participant};
use crate::base::io::Nanos;
use crate::replication::Member;
use crate::replication::message::Question;

/// How long a member that had nothing to say is left alone.
pub(super) const MEET_PAUSE: Nanos = Nanos::from_millis(500);

/// A member is reached.
pub(super) fn meet(this: &mut Participant, to: Member) {
    this.paused.remove(&to);
    this.links.insert(to);
    renew_outbox(this, to);
    match &mut this.part {
        Part::Follows => {}
        Part::Takes(takeover) => takeover.connected(to),
        Part::Serves(group) => group.connected(to),
    }
}

/// It is not reached any more.
pub(super) fn lose(this: &mut Participant, from: Member) {
    this.links.remove(&from);
    this.outboxes.remove(&from);
    this.repairs.give_up_on(from);
    this.repairs.forget_sends(from);
    this.reads.forget_sends(from);
    this.leases.disconnected(from);
    match &mut this.part {
        Part::Follows => {}
        Part::Takes(takeover) => takeover.disconnected(from),
        Part::Serves(group) => group.disconnected(from),
    }
}

/// Begin with a member as if it was reached anew, but not at once: it would come to the same again.
pub(super) fn pause(this: &mut Participant, member: Member, time: Nanos) {
    lose(this, member);
    this.paused.insert(member, this.now.plus(time));
}

/// What was to go to a member does not.
pub(super) fn renew_outbox(this: &mut Participant, to: Member) {
    this.reads.forget_sends(to);
    this.repairs.forget_sends(to);
    this.lives += 1;
    this.outboxes.insert(to, Outbox::new(this.lives));
}

/// A member has nothing to say to what it was asked.
pub(super) fn hear_nothing(this: &mut Participant, from: Member, question: Question) {
    match question {
        Question::ReadLog if matches!(this.part, Part::Serves(_)) || this.repairs.asks(from) => {
            // It has not what is to be repaired, and is of use all the same.
            this.repairs.give_up_on(from);
        }
        Question::Attach
        | Question::Beat
        | Question::Join
        | Question::Promise
        | Question::ReadLog => pause(this, from, MEET_PAUSE),
        // More was sent after it, and what is said to that must not be taken for what is said later.
        Question::Superblock | Question::JoinAt | Question::Verify => {
            this.acts.push(Act::Break(from));
        }
    }
}
