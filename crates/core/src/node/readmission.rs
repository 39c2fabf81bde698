//! Brings the SSD tier back after it was given up.
//!
//! ```text
//! Well ──tier given up, nothing of it under way──► Waiting ──pause over──► Trying
//!   ▲                                                 ▲                      │ │
//!   │                                                 └──────── failed ──────┘ │
//!   └───────────── open, under a new identity: the cache begins anew ──────────┘
//! ```
//!
//! | transition | function |
//! |---|---|
//! | Well → Waiting, Waiting → Trying | [`Readmission::go_on`] |
//! | Trying → Waiting, Trying → Well | [`Readmission::tried`] |
//!
//! Invariants, which the driver keeps when it tries:
//! 1. The device is closed before it is opened again, and closed only when nothing is under way on
//!    it. So what an old operation does late meets neither a new file nor a new cache.
//! 2. The new identity is durable before the cache begins to use the device.
//!
//! Failure: a device that cannot be used is tried again after a pause, which doubles each time up to
//! a bound, and begins anew after the tier has served for as long as the last one.

use crate::base::io::Nanos;

/// How often the pause doubles.
const DOUBLINGS_MAX: u32 = 5;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Well,
    Waiting(Nanos),
    Trying,
}

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct Readmission {
    state: State,
    first_pause: Nanos,
    /// The last pause.
    pause: Nanos,
    /// Pauses since the tier last served for as long as one.
    pauses: u32,
    /// When the device was last brought back.
    back: Nanos,
}

impl Readmission {
    /// Whether the device is to be tried now: closed, opened again, and given a new identity; then
    /// [`Self::tried`]. `can_readmit` is whether the tier is given up and nothing of it is under way, `first_pause` is the
    /// shortest pause.
    pub fn go_on(&mut self, now: Nanos, can_readmit: bool, first_pause: Nanos) -> bool {
        match self.state {
            State::Well if can_readmit => {
                self.first_pause = first_pause;
                if now.since(self.back) >= self.pause {
                    self.pauses = 0;
                }
                self.wait(now);
                false
            }
            State::Waiting(until) if can_readmit && until <= now => {
                self.state = State::Trying;
                true
            }
            State::Well | State::Waiting(_) | State::Trying => false,
        }
    }

    fn wait(&mut self, now: Nanos) {
        self.pause = Nanos(self.first_pause.0 << self.pauses.min(DOUBLINGS_MAX));
        self.pauses += 1;
        self.state = State::Waiting(now.plus(self.pause));
    }

    /// A try has ended: whether the cache is to use the device. It is not if it closes meanwhile: whoever comes next finds
    /// the device, and starts empty.
    pub fn tried(&mut self, now: Nanos, is_open: bool, can_readmit: bool) -> bool {
        debug_assert_eq!(self.state, State::Trying, "it was to be tried");
        if !is_open {
            self.wait(now);
            return false;
        }
        self.state = State::Well;
        if can_readmit {
            self.back = now;
        }
        can_readmit
    }

    /// Whether a try is under way.
    pub fn is_trying(&self) -> bool {
        self.state == State::Trying
    }

    /// When to try again.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        match self.state {
            State::Waiting(until) => Some(until),
            State::Well | State::Trying => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Nanos = Nanos::from_millis(100);

    fn at(millis: u64) -> Nanos {
        Nanos::from_millis(millis)
    }

    #[test]
    fn pause_doubles_up_to_a_bound() {
        let mut one = Readmission::default();
        let mut now = at(1000);
        assert!(!one.go_on(now, false, PAUSE), "it is in use");
        assert!(!one.go_on(now, true, PAUSE));
        for doublings in [0, 1, 2, 3, 4, 5, 5] {
            let until = one.next_wakeup().expect("it waits");
            assert_eq!(until, now.plus(Nanos(PAUSE.0 << doublings)));
            assert!(!one.go_on(Nanos(until.0 - 1), true, PAUSE));
            now = until;
            assert!(one.go_on(now, true, PAUSE) && one.is_trying());
            assert!(!one.go_on(now, true, PAUSE), "once");
            assert!(!one.tried(now, false, true));
        }
    }

    #[test]
    fn pause_begins_anew_after_the_tier_has_served_as_long() {
        for (served, pause) in [(99, 200), (100, 100)] {
            let mut one = Readmission::default();
            assert!(!one.go_on(at(0), true, PAUSE));
            assert!(one.go_on(at(100), true, PAUSE));
            assert!(one.tried(at(100), true, true));
            assert!(!one.go_on(at(100 + served), true, PAUSE));
            assert_eq!(one.next_wakeup(), Some(at(100 + served + pause)));
        }
    }

    #[test]
    fn device_that_comes_back_to_a_cache_that_closes_is_not_used() {
        let mut one = Readmission::default();
        assert!(!one.go_on(at(0), true, PAUSE));
        assert!(one.go_on(at(100), true, PAUSE));
        assert!(!one.tried(at(100), true, false));
        assert_eq!(one.next_wakeup(), None);
    }
}
