//! How far a log is written ahead of what is durable, so that an opening knows how far behind an end to look for what
//! proves that it is none.
//!
//! ```text
//!        end        it became durable: what had      the first span after that, torn by
//!         │         been accepted until then         the crash, and what was written beside it
//!   ──────┼─────────────────────────────────────────┼─────────────────────────────────────────┼──
//!    last │ lost │ ··· at most a window from the end │ ··· at most another one from there      │
//! ```
//!
//! A span that says that the lost one had been durable was sealed after it was. So it begins within two windows from the
//! end, if it is on the device at all.
//!
//! Invariants:
//! 1. From the durable position on, no more blocks are accepted than a durable span has named, or one request.
//! 2. What a span names is at most twice what the one before it did, or the superblock before the first one.
//! 3. What is named becomes less only while the log is empty, with a superblock.

use crate::base::limits::REQUEST_BLOCKS_MAX;
use crate::log::write_log::{CONTROL_BLOCKS_MAX, PREPARED_BLOCKS_LEAST, SPAN_BLOCKS_MAX};

/// Blocks that a new log names: enough for 64 small requests at once.
pub const AHEAD_BLOCKS_LEAST: u64 = 128;
/// Blocks that are named at most: enough to keep any device busy, and little to search.
const AHEAD_BLOCKS_MAX: u64 = 2048;
/// Where a program wrote that named none, so many blocks are searched: far beyond what it can have had in flight.
const SEARCH_BLOCKS_MAX: u64 = 32 * SPAN_BLOCKS_MAX;

/// What is allowed, and what is on its way to be.
#[derive(Debug)]
pub struct Ahead {
    /// Blocks that may be accepted beyond the durable position.
    usable: u64,
    /// What the next span names.
    named: u64,
    /// Where the first span ends that names this, while it is not durable.
    named_from: Option<u64>,
}

impl Ahead {
    /// What the superblock names, or a span that replay has found.
    pub fn found(named: u64) -> Self {
        Self {
            usable: named,
            named,
            named_from: None,
        }
    }

    /// What the next span and superblock name.
    pub fn named(&self) -> u64 {
        self.named
    }

    /// Whether so many more blocks have to wait for what is accepted and not durable, `ahead` blocks.
    pub fn is_full(&self, ahead: u64, more: u64) -> bool {
        // What named none was written by a program without this bound; so is what comes before the log is empty.
        self.usable > 0 && ahead > 0 && ahead + more > self.usable
    }

    /// A span is sealed that ends at `end`, so many blocks ahead of what is durable. It may name more than the last one.
    pub fn sealed(&mut self, end: u64, ahead: u64) {
        let is_short = 2 * ahead > self.usable && self.usable < AHEAD_BLOCKS_MAX;
        if self.usable > 0 && self.named_from.is_none() && is_short {
            self.named = 2 * self.usable;
            self.named_from = Some(end);
        }
    }

    /// All before this position is durable.
    pub fn durable(&mut self, durable: u64) {
        if self.named_from.take_if(|end| *end <= durable).is_some() {
            self.usable = self.named;
        }
    }

    /// The log is empty, and a superblock is made.
    pub fn emptied(&mut self) {
        *self = Self::found(AHEAD_BLOCKS_LEAST);
    }
}

/// Where the control part may be of a span that says that more had been durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Search {
    /// Blocks from the end on.
    pub behind: u64,
    /// Blocks from the beginning of the next lap on. The log may have gone on there from wherever what was prepared of
    /// it has ended.
    pub next_lap: u64,
}

/// Where to look behind `end`, if what comes before it names so much. `may_be_covered` says whether a later lap may have
/// covered what lies there.
pub fn blocks_to_search(named: u64, end: u64, ring_blocks: u64, may_be_covered: bool) -> Search {
    if named == 0 {
        // A program that knows nothing of this, nor of what is prepared: but the log may be one of which this one had
        // prepared a part.
        return Search {
            behind: SEARCH_BLOCKS_MAX,
            next_lap: SEARCH_BLOCKS_MAX,
        };
    }
    // What is accepted may become two spans, of which the first is open; the control part that is looked for is a third.
    let window = named
        .saturating_mul(2)
        .max(REQUEST_BLOCKS_MAX as u64 + 1)
        .saturating_add(3 * CONTROL_BLOCKS_MAX);
    let mut blocks = window.saturating_mul(2);
    if may_be_covered {
        // If the later lap ends with the span that covers the end, the next span that has its head begins behind that
        // one, and one of the earlier lap that has lost its own.
        blocks = blocks.max(2 * SPAN_BLOCKS_MAX + CONTROL_BLOCKS_MAX);
    }
    let behind = blocks.min(SEARCH_BLOCKS_MAX);
    // A span that would not fit what is prepared leaves the rest of the lap out.
    let slot = end % ring_blocks;
    let may_jump = slot + behind + SPAN_BLOCKS_MAX >= ring_blocks.min(PREPARED_BLOCKS_LEAST);
    Search {
        behind,
        next_lap: if may_jump { behind } else { 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ahead_grows_by_what_durable_spans_have_named() {
        let mut ahead = Ahead::found(AHEAD_BLOCKS_LEAST);
        let mut position = 0;
        while ahead.usable < AHEAD_BLOCKS_MAX {
            let before = ahead.usable;
            let blocks = before / 2 + 1;
            position += blocks;
            ahead.sealed(position, blocks);
            assert_eq!((ahead.usable, ahead.named()), (before, 2 * before));
            // However much more is sealed, nothing more is named before this is durable.
            ahead.sealed(position + blocks, 2 * blocks);
            ahead.durable(position - 1);
            assert_eq!((ahead.usable, ahead.named()), (before, 2 * before));
            ahead.durable(position);
            assert_eq!(ahead.usable, 2 * before);
        }
        ahead.sealed(position, AHEAD_BLOCKS_MAX);
        assert_eq!(ahead.named(), AHEAD_BLOCKS_MAX);
        ahead.emptied();
        assert_eq!(ahead.named(), AHEAD_BLOCKS_LEAST);
    }

    #[test]
    fn ahead_lets_one_request_through_whatever_is_allowed() {
        let ahead = Ahead::found(AHEAD_BLOCKS_LEAST);
        assert!(!ahead.is_full(0, REQUEST_BLOCKS_MAX as u64));
        assert!(ahead.is_full(1, REQUEST_BLOCKS_MAX as u64));
        assert!(!ahead.is_full(1, AHEAD_BLOCKS_LEAST - 1));
        assert!(ahead.is_full(1, AHEAD_BLOCKS_LEAST));
    }

    #[test]
    fn search_is_bounded_whatever_a_span_names() {
        let ring = 1 << 20;
        let blocks_to_search = |named, end| blocks_to_search(named, end, ring, true);
        for named in [0, AHEAD_BLOCKS_MAX, 1 << 40, u64::MAX] {
            let search = blocks_to_search(named, 7);
            assert!(search.behind.max(search.next_lap) <= SEARCH_BLOCKS_MAX);
        }
        let early = blocks_to_search(AHEAD_BLOCKS_LEAST, 0);
        assert!(early.behind < 3 * SPAN_BLOCKS_MAX && early.next_lap == 0);
        // From here on the log may have jumped.
        let first = PREPARED_BLOCKS_LEAST - SPAN_BLOCKS_MAX - early.behind;
        assert_eq!(blocks_to_search(AHEAD_BLOCKS_LEAST, first - 1), early);
        for end in [first, PREPARED_BLOCKS_LEAST, ring / 2, ring - 1] {
            let late = blocks_to_search(AHEAD_BLOCKS_LEAST, ring + end);
            assert_eq!((late.behind, late.next_lap), (early.behind, early.behind));
        }
        let short = super::blocks_to_search(AHEAD_BLOCKS_LEAST, 0, ring, false);
        assert!(short.behind < 5 * AHEAD_BLOCKS_LEAST);
    }
}
