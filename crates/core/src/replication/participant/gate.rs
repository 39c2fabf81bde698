//! Who may ask this copy for what, by the record.
//!
//! A promise and a cut raise the epoch that the copy has promised, durably and for good. A node that asks for a high
//! epoch without being the candidate of one, by mistake or on purpose, would shut out everybody else. So the copy looks at the
//! record first:
//!
//! | the last record that was seen | what is asked in an epoch is |
//! |---|---|
//! | is of this epoch, and names the sender candidate or primary | handed to the copy |
//! | is of this epoch, and names another node | refused |
//! | is of a lower epoch, or there is none | kept until the next record, [`WAIT_MAX`] at most; then refused |
//! | is of a higher epoch | handed to the copy if it has promised that epoch before; else refused |
//!
//! The record is written before its candidate asks, and this node may see it a little later: that is why it waits. Who was
//! refused asks again.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::{Act, Participant};
use crate::base::io::Nanos;
use crate::replication::Member;
use crate::replication::message::{Message, Question};
use crate::replication::record::{GroupRecord, Phase};

/// How long the record is waited for that names who asks.
const WAIT_MAX: Nanos = Nanos::from_millis(1_000);

#[derive(Debug)]
struct Waiting {
    epoch: u64,
    message: Message,
    until: Nanos,
}

/// What waits for a record: one request of each node.
#[derive(Debug, Default)]
pub(super) struct Gate {
    waiting: BTreeMap<Member, Waiting>,
}

impl Gate {
    /// When something has waited for too long.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.waiting.values().map(|waiting| waiting.until).min()
    }

    /// This node asks no more.
    pub(super) fn forget(&mut self, from: Member) {
        self.waiting.remove(&from);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    May,
    MayNot,
    Unknown,
}

/// Whether a node may ask in an epoch, for what a copy that has promised another one does only by the record.
fn judge(record: Option<&GroupRecord>, from: Member, epoch: u64, promised: u64) -> Verdict {
    let Some(record) = record.filter(|record| record.epoch >= epoch) else {
        return Verdict::Unknown;
    };
    let (Phase::Taking { candidate: named } | Phase::Serving { primary: named }) = record.phase;
    let may = if record.epoch == epoch {
        named == from
    } else {
        epoch <= promised
    };
    if may { Verdict::May } else { Verdict::MayNot }
}

/// Another node asks the copy for something.
pub(super) fn ask(this: &mut Participant, from: Member, epoch: u64, message: &Message) {
    let Some(question) = Question::of(message) else {
        return;
    };
    if this.has_failed {
        return refuse(this, from, epoch, question);
    }
    // The others are taken only of the epoch that was promised.
    let begins = matches!(
        question,
        Question::Attach | Question::Join | Question::JoinAt | Question::Promise
    );
    let promised = this.replica.promised();
    match judge(this.record.as_ref(), from, epoch, promised) {
        Verdict::MayNot => refuse(this, from, epoch, question),
        Verdict::Unknown if begins && epoch >= promised => {
            let until = this.now.plus(WAIT_MAX);
            let before = this.gate.waiting.insert(
                from,
                Waiting {
                    epoch,
                    message: message.clone(),
                    until,
                },
            );
            let gives_way = |before: &Waiting| {
                let other = Question::of(&before.message);
                other.is_some_and(|other| other.gives_way_to(question))
            };
            if let Some(before) = before.filter(|before| !gives_way(before)) {
                refuse_waiting(this, from, &before);
            }
        }
        Verdict::May | Verdict::Unknown => this.replica.receive(from, epoch, message),
    }
}

/// There is another record: what waited for it may be asked now.
pub(super) fn ask_again(this: &mut Participant) {
    for (from, waiting) in core::mem::take(&mut this.gate.waiting) {
        let promised = this.replica.promised();
        let verdict = judge(this.record.as_ref(), from, waiting.epoch, promised);
        if verdict == Verdict::Unknown {
            this.gate.waiting.insert(from, waiting);
        } else {
            ask(this, from, waiting.epoch, &waiting.message);
        }
    }
}

/// What has waited for too long is refused.
pub(super) fn end_waiting(this: &mut Participant) {
    let now = this.now;
    let is_over = |_: &Member, waiting: &mut Waiting| waiting.until <= now;
    let over = this.gate.waiting.extract_if(.., is_over);
    for (from, waiting) in over.collect::<Vec<_>>() {
        refuse_waiting(this, from, &waiting);
    }
}

fn refuse_waiting(this: &mut Participant, from: Member, waiting: &Waiting) {
    if let Some(question) = Question::of(&waiting.message) {
        refuse(this, from, waiting.epoch, question);
    }
}

fn refuse(this: &mut Participant, to: Member, epoch: u64, question: Question) {
    this.acts.push(Act::Answer {
        to,
        epoch,
        message: Message::Nothing(question),
        data: Vec::new(),
    });
}
