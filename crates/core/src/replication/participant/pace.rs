//! How fast a joiner is brought up beside clients.
//!
//! What a joiner lacks is read from this node's medium and takes the place of what clients do there. So while something is
//! written to the log, joiners are sent as much as that and [`Pace::rate`] beside it: they come nearer however much is
//! written. Nobody waits while nothing is written.

use crate::base::io::Nanos;

/// What may be sent at once, in bytes.
const BURST_BYTES: i64 = 8 << 20;
/// After so long without a write nobody is in the way.
const QUIET: Nanos = Nanos::from_millis(200);

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    /// Bytes in a second beside what is written.
    rate: u64,
    /// What may be sent; less than nothing after a large span.
    bytes: i64,
    at: Nanos,
    written_at: Option<Nanos>,
    /// Somebody waits.
    waits: bool,
}

impl Pace {
    pub(super) fn new(rate: u64) -> Self {
        Self {
            rate: rate.max(1),
            bytes: BURST_BYTES,
            at: Nanos(0),
            written_at: None,
            waits: false,
        }
    }

    /// So many bytes are written to the log.
    pub(super) fn written(&mut self, now: Nanos, bytes: u64) {
        self.written_at = Some(now);
        self.earn(bytes);
    }

    fn earn(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(BURST_BYTES);
        self.bytes = self.bytes.saturating_add(bytes).min(BURST_BYTES);
    }

    /// It is seen anew who waits: who did may have gone, or have no room.
    pub(super) fn begin_turn(&mut self) {
        self.waits = false;
    }

    /// Whether a joiner may be sent more now.
    pub(super) fn may_send(&mut self, now: Nanos) -> bool {
        let is_quiet = (self.written_at).is_none_or(|at| now.since(at) > QUIET);
        let micros = now.since(self.at).0 / 1_000;
        let earned = micros.saturating_mul(self.rate) / 1_000_000;
        if earned > 0 {
            self.at = now;
            self.earn(earned);
        }
        let may = is_quiet || self.bytes > 0;
        self.waits |= !may;
        may
    }

    /// A joiner is sent so many.
    pub(super) fn sent(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(BURST_BYTES);
        self.bytes = self.bytes.saturating_sub(bytes).max(-BURST_BYTES);
    }

    /// When somebody who waits may be sent more.
    pub(super) fn next(&self) -> Option<Nanos> {
        let missing = u64::try_from(1 - self.bytes).unwrap_or(1);
        let micros = missing.saturating_mul(1_000_000) / self.rate + 1;
        self.waits
            .then(|| self.at.plus(Nanos(micros.saturating_mul(1_000))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joiner_gets_what_is_written_and_the_rate_beside_it() {
        let rate = 1 << 20;
        let mut pace = Pace::new(rate);
        let (mut now, mut sent) = (Nanos::from_millis(1), 0);
        for _ in 0..1_000 {
            pace.written(now, 10 << 10);
            while pace.may_send(now) {
                pace.sent(64 << 10);
                sent += 64 << 10;
            }
            let next = pace.next().unwrap();
            assert!(next > now);
            now = now.plus(Nanos::from_millis(10));
        }
        // Ten seconds.
        let (written, beside) = (10_000 << 10, 10 * rate);
        let least = written + beside;
        let most = least + BURST_BYTES as u64 + (1 << 20);
        assert!((least..most).contains(&sent), "{sent}: {least} to {most}");
    }

    #[test]
    fn nobody_waits_while_nothing_is_written() {
        let mut pace = Pace::new(1);
        pace.written(Nanos::from_millis(1), 1);
        pace.sent(1 << 40);
        assert!(!pace.may_send(Nanos::from_millis(100)));
        assert!(pace.next().is_some());
        // Whoever waited may not want to any more.
        pace.begin_turn();
        assert_eq!(pace.next(), None);
        assert!(pace.may_send(Nanos::from_millis(202)));
        assert_eq!(pace.next(), None);
    }
}
