//! A scrub reads what nobody reads, so that damage is found while there is another copy. It goes piece by
//! piece: one operation at a time, no faster than its rate, and behind the clients.
//!
//! Where it is lies in what it asks for next ([`ScrubAt`]) and nowhere else, so it may stop at any time
//! and leaves nothing behind.

use crate::base::io::{Nanos, SectorRange};
use crate::base::limits::REQUEST_BYTES_MAX;

/// Bytes of one piece at most: small beside what a client waits for.
pub const PIECE_BYTES: usize = 256 << 10;
/// The shortest pause between two pieces: most of a large cache may be other volumes'.
const PAUSE_MIN: Nanos = Nanos::from_micros(500);
/// Unanswered requests of the volume from which on the scrub lets them go first.
const BUSY_REQUESTS: usize = 8;
/// How soon it looks again then,
const BUSY_PAUSE: Nanos = Nanos::from_millis(10);
/// and after how long it takes its turn all the same: a volume that is always busy is scrubbed too.
const BUSY_MAX: Nanos = Nanos::from_millis(1_000);

const _: () = assert!(PIECE_BYTES <= REQUEST_BYTES_MAX, "a piece is one buffer");

/// Where a scrub is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubAt {
    /// In the write log.
    Log {
        /// From this position on,
        position: u64,
        /// up to this one: what was durable when it began.
        end: u64,
        /// How often this piece was found bad.
        tries: u8,
    },
    /// In the SSD tier.
    Cache {
        /// From this line on.
        line: u64,
    },
    /// In the local store of a volume in storage mode.
    Home {
        /// From this page of the map on,
        page: u64,
        /// and this block that it describes; `None`: the page itself.
        block: Option<u64>,
    },
}

impl ScrubAt {
    /// The beginning of the write log.
    pub const LOG: Self = Self::Log {
        position: 0,
        end: u64::MAX,
        tries: 0,
    };
    /// The beginning of the SSD tier.
    pub const CACHE: Self = Self::Cache { line: 0 };
    /// The beginning of the local store.
    pub const HOME: Self = Self::Home {
        page: 0,
        block: None,
    };
}

/// What a piece was found to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Where to go on; `None`: all of this part was scrubbed.
    pub next: Option<ScrubAt>,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that need not be looked at any more, read or not.
    pub passed_bytes: u64,
    /// 4 KiB blocks that were bad,
    pub bad_blocks: u64,
    /// and of them those that were made good: written again, or dropped where another copy is.
    pub healed_blocks: u64,
    /// Sectors whose only copy is bad.
    pub damaged: Option<SectorRange>,
}

/// When the next piece may begin.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    bytes_per_s: u64,
    ready_at: Nanos,
    /// Since when clients go first.
    yields_since: Option<Nanos>,
}

impl Pace {
    /// So many bytes a second at most; nothing is saved up.
    pub fn new(bytes_per_s: u64, now: Nanos) -> Self {
        Self {
            bytes_per_s: bytes_per_s.max(1),
            ready_at: now,
            yields_since: None,
        }
    }

    /// Whether a piece may begin now, with so many requests of clients unanswered.
    pub fn may_begin(&mut self, now: Nanos, requests: usize) -> bool {
        if now < self.ready_at {
            return false;
        }
        if requests >= BUSY_REQUESTS {
            let since = *self.yields_since.get_or_insert(now);
            if now.since(since) < BUSY_MAX {
                self.ready_at = now.plus(BUSY_PAUSE);
                return false;
            }
        }
        self.yields_since = None;
        true
    }

    /// A piece has ended that read so much.
    pub fn ended(&mut self, now: Nanos, bytes: u64) {
        let takes = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
        let takes = Nanos(u64::try_from(takes).unwrap_or(u64::MAX));
        self.ready_at = now.plus(takes.max(PAUSE_MIN));
    }

    /// When it is worth to look again.
    pub fn ready_at(&self) -> Nanos {
        self.ready_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrub_pace_keeps_its_rate_and_saves_nothing_up() {
        let mut random = fastrand::Rng::with_seed(3);
        for rate in [1 << 20, 7 << 20] {
            let (mut now, mut bytes) = (Nanos(5), 0);
            let mut pace = Pace::new(rate, now);
            let began = now;
            for _ in 0..1000 {
                now = now.plus(Nanos(random.u64(..50_000_000)));
                if pace.may_begin(now, 0) {
                    let allowed = u128::from(rate) * u128::from(now.since(began).0) / 1_000_000_000;
                    assert!(u128::from(bytes) <= allowed, "{bytes} of {allowed}");
                    let piece = random.u64(..=PIECE_BYTES as u64);
                    bytes += piece;
                    pace.ended(now, piece);
                }
            }
            assert!(bytes > 0);
        }
    }

    #[test]
    fn scrub_pace_lets_clients_go_first_but_not_for_ever() {
        let mut pace = Pace::new(1 << 30, Nanos(0));
        let (mut now, mut begun, mut looks) = (Nanos(0), 0, 0);
        while now < Nanos::from_millis(10_000) {
            looks += 1;
            if pace.may_begin(now, BUSY_REQUESTS) {
                begun += 1;
                pace.ended(now, 4096);
            }
            now = pace.ready_at();
        }
        assert!((8..=10).contains(&begun), "{begun} in ten seconds");
        assert!(looks < 1100, "it does not spin: {looks}");
        assert!(pace.may_begin(now, 0));
    }
}
