//! Blocks of this medium that are not as they should be: a member is asked for their span, and they are written again.
//!
//! ```text
//!  what stands on the log                 member                        this medium
//!  reads bad blocks ── repair ──► ReadLog ────► LogData ──► is it whole? ──► written ──► Repaired: reads again
//!                                    │ none of it, or it is no better: the next member; none is left ──► Repaired
//! ```
//!
//! Invariants:
//! 1. One is asked for at a time, since a member answers one such request at a time. Each ends, whether it helped or not: after [`Repairs::deadline`], or when the part ends.
//! 2. Only the blocks that were asked for are written: who stands on the log keeps their places from being used again, and
//!    those of no others.
//! 3. What a member sends is written only if it is the span, whole, by its checksums.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::{Act, Operation, Part, Participant};
use crate::base::buf::Buf;
use crate::base::io::{Nanos, Token};
use crate::base::limits::BLOCK_BYTES;
use crate::format::LOG_HEADER_BLOCKS;
use crate::replication::message::Message;
use crate::replication::{Member, SpanId, Spans};

/// A member that gives nothing for so long is not waited for.
const ANSWER_MAX: Nanos = Nanos::from_millis(1_000);

/// Some blocks of a span.
#[derive(Debug)]
struct Repair {
    token: Token,
    span: SpanId,
    /// The first one, counted from where the span lies.
    first: u64,
    blocks: u64,
    /// Who is asked, and until when that is waited for.
    asked: Option<(Member, Nanos)>,
    /// Who has been asked, or cannot be.
    tried: BTreeSet<Member>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Repairs(VecDeque<Repair>);

impl Repairs {
    /// When somebody has not answered in time.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        let asked = self.0.iter().filter_map(|repair| repair.asked);
        asked.map(|(_, until)| until).min()
    }

    /// This member gives nothing any more.
    pub(super) fn give_up_on(&mut self, member: Member) {
        for repair in &mut self.0 {
            repair.asked.take_if(|(asked, _)| *asked == member);
        }
    }

    /// Nobody is asked any more. Returns whose repairs end.
    pub(super) fn give_up_all(&mut self) -> impl Iterator<Item = Token> {
        let all = core::mem::take(&mut self.0);
        all.into_iter().map(|repair| repair.token)
    }

    fn look_at_time(&mut self, now: Nanos) {
        for repair in &mut self.0 {
            repair.asked.take_if(|(_, until)| *until <= now);
        }
    }

    /// The one for which this member was asked for this span.
    fn take(&mut self, from: Member, span: &SpanId) -> Option<Repair> {
        let is_it = |repair: &Repair| {
            repair.span == *span && repair.asked.is_some_and(|(asked, _)| asked == from)
        };
        let index = self.0.iter().position(is_it)?;
        self.0.remove(index)
    }
}

impl Participant {
    /// What stands on the log has read blocks from `offset` on, in bytes on the log's region, and they are not as they
    /// should be. Have them written again as a member has them, if one does; ends with [`Act::Repaired`] either way. Until
    /// then the log is not to use their places again.
    pub fn repair(&mut self, now: Nanos, token: Token, offset: u64, blocks: u64) {
        self.now = now;
        match find_blocks(self, offset, blocks) {
            Some((span, first)) if self.stands => self.repairs.0.push_back(Repair {
                token,
                span,
                first,
                blocks,
                asked: None,
                tried: BTreeSet::new(),
            }),
            _ => self.acts.push(Act::Repaired(token)),
        }
        self.pump();
    }
}

/// The span of the log in which these blocks lie, and which of its blocks is the first of them.
fn find_blocks(this: &Participant, offset: u64, blocks: u64) -> Option<(SpanId, u64)> {
    let at = (offset / BLOCK_BYTES as u64).checked_sub(LOG_HEADER_BLOCKS)?;
    let position = this
        .reads
        .position_at(at, this.replica.superblock().tail.position);
    let span = this.replica.span_after(position)?;
    let from = span.end.position - u64::from(span.blocks);
    let first = position.checked_sub(from)?;
    (position + blocks <= span.end.position).then_some((span, first))
}

/// Ask members for what is not as it should be.
pub(super) fn go_on(this: &mut Participant) {
    this.repairs.look_at_time(this.now);
    let Part::Serves(group) = &this.part else {
        return;
    };
    let unasked = |repair: &&mut Repair| repair.asked.is_none();
    while let Some(repair) = this.repairs.0.front_mut().filter(unasked) {
        let mut sources = group.having(repair.span.end.position);
        let next = sources
            .find(|member| !repair.tried.contains(member) && this.outboxes.contains_key(member));
        let outbox = next.and_then(|member| this.outboxes.get_mut(&member));
        let Some((member, outbox)) = next.zip(outbox) else {
            let token = repair.token;
            this.repairs.0.pop_front();
            this.acts.push(Act::Repaired(token));
            continue;
        };
        if outbox.takes_more() {
            repair.tried.insert(member);
            let after = repair.span.start;
            outbox.push(Message::ReadLog { after }, Vec::new());
        }
        // A full one is looked at again once it has room, or then.
        repair.asked = Some((member, this.now.plus(ANSWER_MAX)));
    }
}

/// A member has sent a span that it was asked for, unless it lies.
pub(super) fn take(this: &mut Participant, from: Member, span: &SpanId, data: &[Buf]) {
    let Some(mut repair) = this.repairs.take(from, span) else {
        return;
    };
    let is_good = this.is_its_data(span, data) && this.reads.is_whole(span, data);
    // What rots at the writing end must not take the place of anything.
    let is_live = this.replica.span_after(span.end.position - 1) == Some(*span);
    if !is_good || !is_live || this.has_failed {
        repair.asked = None;
        return this.repairs.0.push_front(repair);
    }
    let from = span.end.position - u64::from(span.blocks) + repair.first;
    let token = this.begin(Operation::Repair {
        token: repair.token,
    });
    this.acts.push(Act::Write {
        token,
        offset: this.reads.offset_at(from),
        data: blocks_of(data, repair.first, repair.blocks),
        way: None,
    });
}

/// Some of the blocks that lie in these buffers one after another.
fn blocks_of(data: &[Buf], first: u64, blocks: u64) -> Vec<Buf> {
    let (start, end) = (
        first as usize * BLOCK_BYTES,
        (first + blocks) as usize * BLOCK_BYTES,
    );
    let mut at = 0;
    let mut parts = Vec::new();
    for part in data {
        let (from, to) = (start.max(at), end.min(at + part.len()));
        if from < to {
            parts.push(part.clone().narrow(from - at..to - at));
        }
        at += part.len();
    }
    parts
}
