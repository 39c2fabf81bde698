//! A candidate whose own copy has damaged data: it gets that from those who have promised, before its copy counts.
//!
//! ```text
//!  own promise is durable ──► each span is read ── whole ─────────────────► all are: the copy is sound, and counts
//!                                   ▲     └ damaged: repairs asks who has promised
//!                                   │          ├ written in its place: read once more
//!                                   │          └ nobody has it whole: it is missing
//!                                   └── another member has promised ───────────┤
//!                                                                              └ all members have answered: the takeover stops
//! ```
//!
//! The control parts of a copy that was opened are whole, or its replay had failed: they say what each span has to be. So
//! two copies that are damaged at different places make one that is not, and what is not whole comes from nobody.
//!
//! Invariants:
//! 1. The copy counts only once each of its spans was read from this medium, and is whole.
//! 2. A span is written again once in a taking: a medium that does not keep it makes it a missing one.
//! 3. [`READS_MAX`] spans are under way at a time.
//! 4. What was begun in one attempt counts in no other: attempts are numbered, since one epoch may have several.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::reads::Purpose;
use super::{Part, Participant, repairs};
use crate::base::buf::Buf;
use crate::replication::takeover::{DAMAGED_MAX, Stop};
use crate::replication::{SpanId, Spans};

/// Spans that are read or got at once.
const READS_MAX: usize = 4;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Healing {
    /// Which attempt of this process it is.
    attempt: u64,
    /// Spans that end before it, or there, were begun with.
    next: u64,
    under_way: usize,
    /// Where those end that were written again.
    rewritten: BTreeSet<u64>,
    /// Those that nobody has whole, by where they end.
    missing: BTreeMap<u64, SpanId>,
}

impl Healing {
    /// Nothing of what was begun counts any more.
    pub(super) fn begin_anew(&mut self) {
        *self = Self {
            attempt: self.attempt + 1,
            ..Self::default()
        };
    }

    /// The first of those that nobody who has promised has whole: from where to where they lie, in blocks.
    pub(super) fn missing(&self) -> Vec<(u64, u64)> {
        let missing = self.missing.values().take(DAMAGED_MAX);
        missing
            .map(|span| {
                (
                    span.end.position - u64::from(span.blocks),
                    span.end.position,
                )
            })
            .collect()
    }
}

/// The attempt in which the own copy is to be healed, if that is so.
fn attempt(this: &Participant) -> Option<u64> {
    match &this.part {
        Part::Takes(takeover) if takeover.is_to_heal() => Some(this.healing.attempt),
        _ => None,
    }
}

/// Begin with spans that were not looked at, and see whether all are whole.
pub(super) fn go_on(this: &mut Participant) {
    let Some(attempt) = attempt(this) else {
        return;
    };
    let heal = &mut this.healing;
    while heal.under_way < READS_MAX
        && let Some(span) = this.replica.span_after(heal.next)
    {
        heal.next = span.end.position;
        heal.under_way += 1;
        this.reads.want(Purpose::Heal { attempt }, span);
    }
    if heal.under_way > 0 {
        return;
    }
    let (missing, count) = (heal.missing(), heal.missing.len());
    let Part::Takes(takeover) = &mut this.part else {
        return;
    };
    if count == 0 {
        this.replica.healed();
        let copy = this.replica.copy(takeover.record().floor);
        takeover.own_healed(copy);
        let left_ms = this.leases.left_ms(this.now);
        (this.leases).promised(this.now, this.me, left_ms, copy.is_whole);
    } else if takeover.others_have_answered() {
        takeover.stop(Stop::OwnDamaged { count, missing });
    }
}

/// A span was read: its blocks if they are whole.
pub(super) fn read(this: &mut Participant, of: u64, span: SpanId, data: Option<&[Buf]>) {
    if attempt(this) != Some(of) {
        return;
    }
    let end = span.end.position;
    if data.is_some() {
        this.healing.under_way -= 1;
    } else if this.healing.rewritten.contains(&end) {
        failed(this, of, span);
    } else {
        repairs::want_to_heal(this, of, span);
    }
}

/// It is written again.
pub(super) fn written(this: &mut Participant, of: u64, span: SpanId) {
    if attempt(this) == Some(of) {
        this.healing.rewritten.insert(span.end.position);
        this.reads.want(Purpose::Heal { attempt: of }, span);
    }
}

/// Nobody has it whole.
pub(super) fn failed(this: &mut Participant, of: u64, span: SpanId) {
    if attempt(this) == Some(of) {
        this.healing.under_way -= 1;
        this.healing.missing.insert(span.end.position, span);
    }
}

/// Another member has promised: it may have what is missing.
pub(super) fn look_again(this: &mut Participant) {
    let Some(attempt) = attempt(this) else {
        return;
    };
    let rewritten = &this.healing.rewritten;
    let again = |end: &u64, _: &mut SpanId| !rewritten.contains(end);
    for (_, span) in this.healing.missing.extract_if(.., again) {
        this.healing.under_way += 1;
        this.reads.want(Purpose::Heal { attempt }, span);
    }
}
