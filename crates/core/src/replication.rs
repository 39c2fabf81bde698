//! Replication of a write log: state machines that know positions, epochs and members, and neither data nor time.
//!
//! ```text
//!                       record (in a store that compares and swaps)
//!            ┌───────────────────┬──────────┴────────┐
//!   taking   ▼                   ▼ serving           ▼
//!  [`takeover`] ──serving──► [`group`] ──joins──► [`resync`]
//!      │ promises, levels        │ spans, tails      │ cut, spans, verify
//!      └──────────────┬──────────┴───────────────────┘
//!                     ▼
//!               [`replica`]: one member's copy of the log
//! ```
//!
//! The machines exchange [`message::Message`]s over links that keep their order and may break at any time. Who drives them
//! moves the data of the spans, and tells them of deadlines: a machine that is told that a member missed one does not
//! know by how much. What is promised, and why it holds, is in docs/CLUSTER.md.

pub mod group;
pub mod message;
pub mod participant;
pub mod record;
pub mod replica;
pub mod resync;
pub mod takeover;

use core::fmt;

/// A node that has, or may have, a copy of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member(pub u16);

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// A place between two spans of a log, and what the log holds up to there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Point {
    /// Position of the next span, in blocks since the log was made.
    pub position: u64,
    /// Checksum of the span before it, which covers the one before that, and so on; 0 at the beginning of a log.
    pub chain: u64,
}

/// A sealed span, as far as replication knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId {
    /// Where it begins, and what is before it.
    pub start: Point,
    /// Where it ends; the chain there is its own checksum.
    pub end: Point,
    /// How long it is. It lies at `end.position - blocks`: where it begins, or further on if it did not fit before the
    /// ring's end.
    pub blocks: u32,
    /// The opening that wrote it.
    pub incarnation: u64,
    /// Every span below this position was durable at the primary when it was sealed. A replay takes that for proof.
    pub evidence: u64,
}

/// The spans of a log that can still be read.
pub trait Spans {
    /// The first one that ends after `position`.
    fn span_after(&self, position: u64) -> Option<SpanId>;

    /// Where they end, durable or not.
    fn head(&self) -> Point;

    /// Whether the log holds at this point exactly what the point says.
    fn has(&self, point: Point) -> bool;
}
