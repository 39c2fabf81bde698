//! How the primary brings up the copy of a joiner.
//!
//! ```text
//!  Away ──connected──► Asks ──Joining──► Cuts ──HasCut──► Streams ──has nearly all that is committed──► Verifies ──Verified──► Whole
//!   ▲                   ▲ what was read back is not good, or it does not follow                      │
//!   └──disconnected     └────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! | step | sent | waits for |
//! |---|---|---|
//! | Asks | Join | where the joiner's spans end |
//! | Cuts | JoinAt the last of these points that this log has, or at its tail | the cut is durable |
//! | Streams | the spans behind it | the joiner has durably all but little of what is committed here, all before the present opening, and all that there was when it was cut |
//! | Verifies | Verify, and what comes | it was read back, and the copy is no longer marked as one that is brought up |
//! | Whole | what comes | the record with it ([`super::group`]) |
//!
//! Invariants:
//! 1. What is kept of a joiner's copy is what this log has: a point says what is before it.
//! 2. Spans that the joiner has beyond the cut are older than the first one that takes their place: in an opening
//!    there is one log, and what follows on another one there was written by a later opening. So `void_before` is the
//!    opening of that span, and of the next one to come where there is none. The present opening would be too high:
//!    it voids spans of the openings between, which the joiner gets too. If the points were a sample, the cut lies before
//!    the last point in common, and spans that the joiner wrote behind that one may count until it is whole. Then its
//!    superblock says where the present opening begins ([`super::replica`]).
//! 3. A copy that is whole is so under the revision of the record under which it was cut, and the record with it says so.
//!    Whoever brings up a copy without acting for the group any more, since its medium is new and has promised nothing,
//!    does not make it a member's.
//! 4. It is never more than the log: what lies before the tail is in the backend.
//! 5. A joiner writes spans in any order, and so a crash may leave some behind one that it lacks. They prove that this one
//!    was there once the copy is whole. So it is whole only when it has all that it may have been given before its last
//!    cut, in this opening: what the log had then. Those of older openings are void.

use super::message::{Change, Cut};
use super::{Point, Spans};

/// How far a joiner is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// It is to be asked what it has, or was.
    Asks {
        /// It was.
        is_sent: bool,
    },
    /// It is to cut its copy, or was told to.
    Cuts {
        /// Where.
        cut: Cut,
        /// It was told.
        is_sent: bool,
    },
    /// It takes spans.
    Streams {
        /// It is not told to read back before it has all up to here.
        least: u64,
    },
    /// It was told to read back.
    Verifies {
        /// Up to here.
        up_to: Point,
    },
    /// It is as good as a member's.
    Whole,
}

impl Step {
    /// The first one.
    pub const FIRST: Self = Self::Asks { is_sent: false };

    /// Whether the joiner takes spans.
    pub fn takes_spans(&self) -> bool {
        matches!(
            self,
            Self::Streams { .. } | Self::Verifies { .. } | Self::Whole
        )
    }
}

/// Where the copy of a joiner is cut whose spans end at `points`, if the log is `log` and begins at what `change` calls its
/// tail; the revision of the record is `joined`. Without points, as for a member that ends before the tail, that is the tail.
pub fn cut(points: &[Point], log: &impl Spans, change: Change, joined: u64) -> Cut {
    let tail = change.tail;
    let is_common = |point: &&Point| point.position >= tail.position && log.has(**point);
    let at = points.iter().rev().find(is_common).copied().unwrap_or(tail);
    let next = log.span_after(at.position);
    Cut {
        at,
        void_before: next.map_or(change.incarnation, |next| next.incarnation),
        joined,
        change,
    }
}

#[cfg(test)]
mod tests {
    use super::super::SpanId;
    use super::super::replica::{Replica, Superblock};
    use super::*;

    fn point(position: u64, chain: u64) -> Point {
        Point { position, chain }
    }

    /// A log of spans of a block each, of these openings; the chain is the opening, and then where it ends.
    fn log(tail: Point, openings: &[u64]) -> Replica {
        let mut start = tail;
        let spans: alloc::vec::Vec<SpanId> = (openings.iter())
            .map(|&incarnation| {
                let position = start.position + 1;
                let end = point(position, incarnation << 32 | position);
                SpanId {
                    start: core::mem::replace(&mut start, end),
                    end,
                    blocks: 1,
                    incarnation,
                    evidence: 0,
                }
            })
            .collect();
        let superblock = Superblock {
            tail,
            ..Superblock::new(true)
        };
        Replica::new(superblock, 64, spans)
    }

    fn change(tail: Point) -> Change {
        Change {
            number: 1,
            tail,
            incarnation: 9,
            ..Change::default()
        }
    }

    #[test]
    fn cut_is_at_the_last_point_in_common() {
        let tail = point(0, 0);
        // The joiner was the primary of opening 1, and wrote a third span that nobody else has.
        let points = [
            tail,
            point(1, 1 << 32 | 1),
            point(2, 1 << 32 | 2),
            point(3, 1 << 32 | 3),
        ];
        let cut = cut(&points, &log(tail, &[1, 1, 4, 6]), change(tail), 3);
        assert_eq!(cut.at, points[2]);
        assert_eq!(
            cut.void_before, 4,
            "spans of openings 4 and 6 come, and count"
        );
    }

    #[test]
    fn cut_at_the_head_voids_all_openings_before_this_one() {
        let tail = point(0, 0);
        let points = [tail, point(1, 1 << 32 | 1), point(2, 1 << 32 | 2)];
        let cut = cut(&points, &log(tail, &[1]), change(tail), 3);
        assert_eq!((cut.at, cut.void_before), (points[1], 9));
    }

    #[test]
    fn cut_without_anything_in_common_is_at_the_tail() {
        let tail = point(5, 77);
        for points in [&[][..], &[point(0, 0), point(3, 3)], &[point(6, 1)]] {
            let cut = cut(points, &log(tail, &[2, 3]), change(tail), 3);
            assert_eq!((cut.at, cut.void_before), (tail, 2), "{points:?}");
        }
    }
}
