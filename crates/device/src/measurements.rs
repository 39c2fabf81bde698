//! What was measured of devices a moment ago, for the logs that are opened together: a node with a thousand volumes
//! would measure one device a thousand times at its start, each time beside all the others.
//!
//! ```text
//!  nothing, or too old ──► under way ──┬──► known (for a while) ──► too old
//!                  ▲                   └──► nothing (it failed)
//!                  └── under way for too long: whoever waits measures as well
//! ```
//!
//! Invariants:
//! 1. Nobody waits for the measurement of another longer than [`WAIT_MAX`]: its device may hang.
//! 2. What is known of one device is never told of another.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Errno;
use crate::durability::Probe;

/// How long a measurement stands for others of the same device. Once a log is used, its own writes are measured.
const FRESH: Duration = Duration::from_secs(10);
/// How long one that is under way is waited for: twice what it may take.
const WAIT_MAX: Duration = Duration::from_millis(400);

/// Where a file lies, and how it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Medium {
    /// The number of the block device, or of the file system.
    pub device: u64,
    /// Whether the page cache is bypassed.
    pub is_direct: bool,
}

#[derive(Clone, Copy, Debug)]
enum State {
    UnderWay { since: Instant },
    Known { since: Instant, probe: Probe },
}

/// See the module.
#[derive(Debug, Default)]
pub struct Measurements {
    media: Mutex<HashMap<Medium, State>>,
    ended: Condvar,
}

impl Measurements {
    /// What is known of a medium, or is found by `measure` now. Returns whether it was measured now. Blocks.
    pub(crate) fn of(
        &self,
        medium: Medium,
        measure: impl FnOnce() -> Result<Probe, Errno>,
    ) -> Result<(Probe, bool), Errno> {
        if let Some(probe) = self.known_or_begun(medium) {
            return Ok((probe, false));
        }
        let measured = measure();
        let mut media = self.lock();
        match measured {
            Ok(probe) => {
                let since = Instant::now();
                media.insert(medium, State::Known { since, probe });
            }
            Err(_) => {
                media.remove(&medium);
            }
        }
        drop(media);
        self.ended.notify_all();
        Ok((measured?, true))
    }

    /// What is known, after a wait if need be. If nothing is, the caller is to measure.
    fn known_or_begun(&self, medium: Medium) -> Option<Probe> {
        let mut media = self.lock();
        loop {
            match media.get(&medium) {
                Some(State::Known { since, probe }) if since.elapsed() < FRESH => {
                    return Some(*probe);
                }
                Some(State::UnderWay { since }) if since.elapsed() < WAIT_MAX => {
                    let left = WAIT_MAX.saturating_sub(since.elapsed());
                    let waited = self.ended.wait_timeout(media, left);
                    media = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                // Whoever comes later does not wait for this one in turn.
                Some(State::UnderWay { .. }) => return None,
                Some(State::Known { .. }) | None => {
                    let since = Instant::now();
                    media.insert(medium, State::UnderWay { since });
                    return None;
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Medium, State>> {
        self.media.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::durability::Times;

    fn medium(device: u64) -> Medium {
        Medium {
            device,
            is_direct: true,
        }
    }

    fn probe(micros: u64) -> Probe {
        let took = Duration::from_micros(micros);
        let times = Times {
            alone: took,
            together: took,
        };
        Probe {
            dsync: None,
            fdatasync: times,
        }
    }

    fn micros(found: Result<(Probe, bool), Errno>) -> (u128, bool) {
        let (probe, is_new) = found.unwrap();
        (probe.fdatasync.alone.as_micros(), is_new)
    }

    #[test]
    fn measurement_stands_for_its_medium_alone() {
        let known = Measurements::default();
        assert_eq!(micros(known.of(medium(1), || Ok(probe(7)))), (7, true));
        assert_eq!(micros(known.of(medium(1), || Ok(probe(8)))), (7, false));
        assert_eq!(micros(known.of(medium(2), || Ok(probe(9)))), (9, true));
        let buffered = Medium {
            is_direct: false,
            ..medium(1)
        };
        assert_eq!(micros(known.of(buffered, || Ok(probe(10)))), (10, true));
    }

    #[test]
    fn measurement_that_failed_or_is_old_is_taken_again() {
        let known = Measurements::default();
        assert_eq!(known.of(medium(1), || Err(Errno(5))).unwrap_err(), Errno(5));
        assert_eq!(micros(known.of(medium(1), || Ok(probe(8)))), (8, true));
        let old = State::Known {
            since: Instant::now().checked_sub(FRESH).unwrap(),
            probe: probe(8),
        };
        known.lock().insert(medium(1), old);
        assert_eq!(micros(known.of(medium(1), || Ok(probe(9)))), (9, true));
    }

    #[test]
    fn those_who_come_together_share_one_measurement_and_wait_for_none_that_hangs() {
        let (known, measured) = (Measurements::default(), AtomicU32::new(0));
        let begun = Barrier::new(2);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                known.of(medium(1), || {
                    begun.wait();
                    measured.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(20));
                    Ok(probe(7))
                })
            });
            begun.wait();
            for _ in 0..8 {
                scope.spawn(|| {
                    let found = known.of(medium(1), || Ok(probe(8)));
                    assert_eq!(micros(found), (7, false));
                });
            }
            assert_eq!(micros(first.join().unwrap()), (7, true));
        });
        assert_eq!(measured.into_inner(), 1);
        let hangs = State::UnderWay {
            since: Instant::now().checked_sub(WAIT_MAX).unwrap(),
        };
        known.lock().insert(medium(3), hangs);
        let found = known.of(medium(3), || {
            let state = known.lock()[&medium(3)];
            let is_waited_for =
                matches!(state, State::UnderWay { since } if since.elapsed() < WAIT_MAX);
            assert!(!is_waited_for, "nor do others wait for this one");
            Ok(probe(9))
        });
        assert_eq!(micros(found), (9, true));
    }
}
