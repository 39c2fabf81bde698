//! Reads of a volume whose write log has copies on other nodes: they are answered while this node has a *lease*.
//!
//! ```text
//!  a read ──lease──► served
//!     │ none             ▲
//!     ▼                  │ Event::Lease
//!   waits ───────────────┘───fenced, closed──► refused
//! ```
//!
//! Without a lease another node may serve the volume, and may have acknowledged writes that are not here. A read is right if
//! there was a lease at any moment between its arrival and its answer. Until that moment nobody else has acknowledged
//! anything, so what this volume showed from the arrival on is at least as new as whatever was acknowledged by then; later
//! looks show no older data. So it is enough to ask once, when a read is served, and however long its data then takes. What
//! the clock showed then must have been read after the read had come: whoever drives the volume sees to that.
//!
//! What tells a client that there is nothing to read is a read too. Writes past the log are acknowledged without any other
//! member, so they wait as well. Writes to the log need no lease, since members commit them.
//!
//! Invariants:
//! 1. A volume of one node alone never has a read wait here.
//! 2. What waits is served in the order in which it came, a bounded part in each poll.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::port::{Kind, Port};
use super::{Context, Volume};
use crate::base::error::RequestError;
use crate::base::io::{ExtentKind, Nanos, Request, RequestId};

/// For how long a read waits before that shows: with the first echo of a new primary it is over.
const SHOWN_AFTER: Nanos = Nanos::from_millis(1_000);
/// Requests that one poll serves: more of them come in the next one.
const SERVED_AT_ONCE: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lease {
    /// `None`: it needs none.
    until: Option<Nanos>,
    /// Since when, and what.
    waiting: VecDeque<(Nanos, RequestId, Request)>,
}

/// A volume answers reads only while it is told that it may ([`super::Event::Lease`]): to be said at once after
/// [`Volume::open`].
pub fn need(volume: &mut Volume) {
    volume.lease.until = Some(Nanos(0));
}

impl Lease {
    /// There is a lease until then.
    pub(super) fn grant(&mut self, until: Nanos) {
        if let Some(last) = &mut self.until {
            *last = until;
        }
    }

    /// Whether a request has to wait. `is_direct`: writes go past the log.
    #[inline]
    pub(super) fn holds(&self, now: Nanos, request: &Request, is_direct: bool) -> bool {
        self.until
            .is_some_and(|until| now >= until && needs_lease(request, is_direct))
    }

    /// Have it wait.
    pub(super) fn wait(&mut self, now: Nanos, id: RequestId, request: Request) {
        self.waiting.push_back((now, id, request));
    }

    /// Since when a read has waited, if it has for so long that it shows.
    pub(super) fn missed_since(&self, now: Nanos) -> Option<Nanos> {
        let (since, ..) = self.waiting.front()?;
        (now >= since.plus(SHOWN_AFTER)).then_some(*since)
    }

    /// When the volume is to be polled for what waits.
    pub(super) fn wakeup(&self, now: Nanos) -> Option<Nanos> {
        let (since, ..) = self.waiting.front()?;
        let shown = since.plus(SHOWN_AFTER);
        if self.has_due(now) {
            return Some(now);
        }
        (shown > now).then_some(shown)
    }

    /// Whether some of those that wait may be served.
    fn has_due(&self, now: Nanos) -> bool {
        !self.waiting.is_empty() && self.until.is_none_or(|until| now < until)
    }

    /// The first of them.
    pub(super) fn take_due(&mut self, now: Nanos) -> Vec<(RequestId, Request)> {
        if !self.has_due(now) {
            return Vec::new();
        }
        let count = self.waiting.len().min(SERVED_AT_ONCE);
        let due = self.waiting.drain(..count);
        due.map(|(_, id, request)| (id, request)).collect()
    }

    /// Refuse those that wait.
    pub(super) fn refuse(&mut self, error: RequestError, port: &mut Port, cx: &mut Context<'_>) {
        for (_, id, _) in core::mem::take(&mut self.waiting) {
            port.reply(id, Kind::Other, Err(error), cx);
        }
    }
}

fn needs_lease(request: &Request, is_direct: bool) -> bool {
    match request {
        Request::Read { .. }
        | Request::Extents {
            kind: ExtentKind::Allocation,
            ..
        } => true,
        Request::Write { .. } | Request::WriteZeroes { .. } | Request::Discard { .. } => is_direct,
        Request::Flush
        | Request::Promote { .. }
        | Request::Evict { .. }
        | Request::Extents {
            kind: ExtentKind::Cache,
            ..
        }
        | Request::Scrub { .. } => false,
    }
}
