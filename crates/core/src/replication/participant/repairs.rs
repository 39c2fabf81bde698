//! Blocks of this medium that are not as they should be: a member is asked for their span, and they are written again.
//!
//! ```text
//!  what stands on the log                 member                        this medium
//!  reads bad blocks ── repair ──► ReadLog ────► LogData ──► is it whole? ──► written ──► Repaired: reads again
//!  a message to a joiner ─ want ─────┤                              └──► sent to the joiner too
//!                                    │ none of it, or it is no better: the next member; none is left ──► Repaired
//!                                    └──────────────────────────────── for a joiner: Blocked, and met again after a pause
//! ```
//!
//! Invariants:
//! 1. One is asked for at a time, since a member answers one such request at a time. Each ends, whether it helped or not: after [`Repairs::deadline`], or when the part ends.
//! 2. Only the blocks that were asked for are written, while the log has their span. Until that write has ended, no write of
//!    a span begins (invariant 4 of [`super`]), so that nothing newer can be in their place.
//! 3. What a member sends is written only if it is the span, whole, by its checksums.
//! 4. What a joiner needs and nobody has whole is looked for again after [`BLOCKED_PAUSE`], not sooner, and said once.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::{Act, Operation, Part, Participant, healing, meeting};
use crate::base::buf::Buf;
use crate::base::io::{Nanos, Token};
use crate::base::limits::BLOCK_BYTES;
use crate::format::LOG_HEADER_BLOCKS;
use crate::replication::message::Message;
use crate::replication::{Member, SpanId, Spans};

/// A member that gives nothing for so long is not waited for.
const ANSWER_MAX: Nanos = Nanos::from_millis(1_000);
/// The same while the group is taken, and nobody waits for reads.
const ANSWER_OF_TAKING_MAX: Nanos = Nanos::from_millis(10_000);
/// How long a joiner is left alone that needs what nobody has whole. Meanwhile the log may let go of it, or a member that
/// has it may be back.
const BLOCKED_PAUSE: Nanos = Nanos::from_millis(10_000);

/// For whom blocks are repaired.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asker {
    /// What stands on the log.
    Standing(Token),
    /// The message at this place of what goes to a member, in its outbox of this life.
    Send { to: Member, life: u64, place: u64 },
    /// This node itself, in this attempt to heal its copy as it takes the group.
    Heal { attempt: u64 },
}

/// Some blocks of a span.
#[derive(Debug)]
struct Repair {
    asker: Asker,
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
pub(super) struct Repairs {
    wanted: VecDeque<Repair>,
    /// Who cannot be brought up, and the span that nobody has whole.
    blocked: BTreeMap<Member, SpanId>,
}

impl Repairs {
    /// Whether a node cannot be brought up since nobody has what it needs whole.
    pub(super) fn is_blocked(&self, member: Member) -> bool {
        self.blocked.contains_key(&member)
    }

    /// A message with this span was filled for a member.
    pub(super) fn filled(&mut self, to: Member, span: &SpanId) {
        if self.blocked.get(&to) == Some(span) {
            self.blocked.remove(&to);
        }
    }

    /// What goes to a member is not waited for any more. What was asked for comes, and is written all the same.
    pub(super) fn forget_sends(&mut self, member: Member) {
        self.wanted.retain(|repair| {
            let is_its = matches!(repair.asker, Asker::Send { to, .. } if to == member);
            !is_its || repair.asked.is_some()
        });
    }

    /// When somebody has not answered in time.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        let asked = self.wanted.iter().filter_map(|repair| repair.asked);
        asked.map(|(_, until)| until).min()
    }

    /// Whether this member is asked for something.
    pub(super) fn asks(&self, member: Member) -> bool {
        let asked = self.wanted.iter().filter_map(|repair| repair.asked);
        asked.into_iter().any(|(asked, _)| asked == member)
    }

    /// This member gives nothing any more.
    pub(super) fn give_up_on(&mut self, member: Member) {
        for repair in &mut self.wanted {
            repair.asked.take_if(|(asked, _)| *asked == member);
        }
    }

    /// Nobody is asked any more, and nobody is brought up. Returns whose repairs end.
    pub(super) fn give_up_all(&mut self) -> impl Iterator<Item = Token> {
        let all = core::mem::take(self);
        (all.wanted.into_iter()).filter_map(|repair| match repair.asker {
            Asker::Standing(token) => Some(token),
            Asker::Send { .. } | Asker::Heal { .. } => None,
        })
    }

    /// Who was asked has its time anew.
    pub(super) fn await_anew(&mut self, now: Nanos) {
        for repair in &mut self.wanted {
            let max = answer_max(&repair.asker);
            if let Some((_, until)) = &mut repair.asked {
                *until = now.plus(max);
            }
        }
    }

    /// Who has not answered in time is not waited for.
    pub(super) fn give_up_on_late(&mut self, now: Nanos) {
        for repair in &mut self.wanted {
            repair.asked.take_if(|(_, until)| *until <= now);
        }
    }

    /// The one for which this member was asked for this span.
    fn take(&mut self, from: Member, span: &SpanId) -> Option<Repair> {
        let is_it = |repair: &Repair| {
            repair.span == *span && repair.asked.is_some_and(|(asked, _)| asked == from)
        };
        let index = self.wanted.iter().position(is_it)?;
        self.wanted.remove(index)
    }
}

impl Participant {
    /// What stands on the log has read blocks from `offset` on, in bytes on the log's region, and they are not as they
    /// should be. Have them written again as a member has them, if one does; ends with [`Act::Repaired`] either way. Until
    /// then the log is not to use their places again.
    pub fn repair(&mut self, now: Nanos, token: Token, offset: u64, blocks: u64) {
        self.now = now;
        let found = find_blocks(self, offset, blocks);
        if let Some((span, _)) = &found {
            self.reads.suspect(span.start.position);
        }
        match found {
            Some((span, first)) if self.stands => self.repairs.wanted.push_back(Repair {
                asker: Asker::Standing(token),
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

/// A message to a member waits for this span, which is not as it should be on this medium, or has gone from the log.
pub(super) fn want(this: &mut Participant, to: Member, life: u64, place: u64, span: SpanId) {
    if !matches!(this.part, Part::Serves(_)) || !is_live(this, &span) {
        // Who waits for it begins anew.
        return this.acts.push(Act::Break(to));
    }
    want_whole(this, Asker::Send { to, life, place }, span);
}

/// A span of a candidate's own copy is not as it should be.
pub(super) fn want_to_heal(this: &mut Participant, attempt: u64, span: SpanId) {
    want_whole(this, Asker::Heal { attempt }, span);
}

fn want_whole(this: &mut Participant, asker: Asker, span: SpanId) {
    this.repairs.wanted.push_back(Repair {
        asker,
        span,
        first: 0,
        blocks: u64::from(span.blocks),
        asked: None,
        tried: BTreeSet::new(),
    });
}

fn answer_max(asker: &Asker) -> Nanos {
    match asker {
        Asker::Standing(_) | Asker::Send { .. } => ANSWER_MAX,
        Asker::Heal { .. } => ANSWER_OF_TAKING_MAX,
    }
}

/// Who may have everything before this position.
fn sources(part: &Part, position: u64) -> Vec<Member> {
    match part {
        Part::Follows => Vec::new(),
        Part::Takes(takeover) => takeover.having(position).collect(),
        Part::Serves(group) => group.having(position).collect(),
    }
}

/// Whether the log has this span.
fn is_live(this: &Participant, span: &SpanId) -> bool {
    this.replica.span_after(span.end.position - 1) == Some(*span)
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
    let mut blocked = core::mem::take(&mut this.repairs.blocked);
    blocked.retain(|_, span| is_live(this, span));
    this.repairs.blocked = blocked;
    let unasked = |repair: &&mut Repair| repair.asked.is_none();
    while let Some(repair) = this.repairs.wanted.front_mut().filter(unasked) {
        let is_next =
            |member: &Member| !repair.tried.contains(member) && this.outboxes.contains_key(member);
        let next = sources(&this.part, repair.span.end.position)
            .into_iter()
            .find(is_next);
        let outbox = next.and_then(|member| this.outboxes.get_mut(&member));
        let Some((member, outbox)) = next.zip(outbox) else {
            let (asker, span) = (repair.asker, repair.span);
            this.repairs.wanted.pop_front();
            fail(this, asker, span);
            continue;
        };
        if outbox.takes_more() {
            repair.tried.insert(member);
            let after = repair.span.start;
            outbox.push(Message::ReadLog { after }, Vec::new());
        }
        // A full one is looked at again once it has room, or then.
        let max = answer_max(&repair.asker);
        repair.asked = Some((member, this.now.plus(max)));
    }
}

/// Nobody has a span whole.
fn fail(this: &mut Participant, asker: Asker, span: SpanId) {
    let (to, life) = match asker {
        Asker::Standing(token) => return this.acts.push(Act::Repaired(token)),
        Asker::Heal { attempt } => return healing::failed(this, attempt, span),
        Asker::Send { to, life, .. } => (to, life),
    };
    if (this.outboxes.get(&to)).is_none_or(|outbox| outbox.life() != life) {
        return;
    }
    if !is_live(this, &span) {
        return this.acts.push(Act::Break(to));
    }
    if this.repairs.blocked.insert(to, span) != Some(span) {
        this.acts.push(Act::Blocked { member: to, span });
    }
    meeting::pause(this, to, BLOCKED_PAUSE);
}

/// A member has sent a span that it was asked for, unless it lies.
pub(super) fn take(this: &mut Participant, from: Member, span: &SpanId, data: &[Buf]) {
    let Some(mut repair) = this.repairs.take(from, span) else {
        return;
    };
    let is_good = this.is_its_data(span, data) && this.reads.is_whole(span, data);
    // What rots at the writing end must not take the place of anything.
    if !is_good || !is_live(this, span) || this.has_failed {
        repair.asked = None;
        return this.repairs.wanted.push_front(repair);
    }
    let asker = repair.asker;
    if let Asker::Send { to, life, place } = asker {
        this.fill_send((to, life, place), span, data.to_vec());
    }
    let from = span.end.position - u64::from(span.blocks) + repair.first;
    let token = this.begin(Operation::Repair { asker, span: *span });
    this.acts.push(Act::Write {
        token,
        offset: this.reads.offset_at(from),
        data: blocks_of(data, repair.first, repair.blocks),
        way: None,
    });
}

/// What a member had is written, or could not be: who reads it again sees that.
pub(super) fn written(this: &mut Participant, asker: Asker, span: SpanId) {
    match asker {
        Asker::Standing(token) => this.acts.push(Act::Repaired(token)),
        Asker::Send { .. } => {}
        Asker::Heal { attempt } => healing::written(this, attempt, span),
    }
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
