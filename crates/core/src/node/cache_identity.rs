//! A new identity for a cache whose device can no longer say what is void.
//!
//! Until the identity is durable, no invalidation counts as recorded and no log's tail moves, so
//! this is tried until it works.
//!
//! ```text
//! Idle ──device given up──► Recording ──recorded──► Idle: the cache is told
//!                               │ ▲
//!                             failed └──── Paused ──pause over──┘
//! ```
//!
//! | transition | function |
//! |---|---|
//! | Idle → Recording, Paused → Recording | [`CacheIdentity::go_on`] |
//! | Recording → Idle, Recording → Paused | [`CacheIdentity::recorded`] |
//!
//! Invariant: the cache is told only after the identity is durable.
//!
//! Failure: a data directory that takes no writes leaves destage waiting.

use crate::base::io::Nanos;

/// Between two attempts to record the identity.
const PAUSE: Nanos = Nanos::from_millis(1_000);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Idle,
    Recording,
    Paused(Nanos),
}

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheIdentity {
    state: State,
}

impl CacheIdentity {
    /// Whether a new identity is to be recorded now; then [`Self::recorded`]. `must_reset` is whether the cache needs one.
    pub fn go_on(&mut self, now: Nanos, must_reset: bool) -> bool {
        let begins = match self.state {
            State::Idle => must_reset,
            State::Paused(until) => until <= now,
            State::Recording => false,
        };
        if begins {
            self.state = State::Recording;
        }
        begins
    }

    /// An attempt has ended: whether the cache is to be told that it has another identity.
    pub fn recorded(&mut self, now: Nanos, is_recorded: bool) -> bool {
        debug_assert_eq!(self.state, State::Recording, "it was to be recorded");
        self.state = if is_recorded {
            State::Idle
        } else {
            State::Paused(now.plus(PAUSE))
        };
        is_recorded
    }

    /// Whether an identity is being recorded.
    pub fn is_recording(&self) -> bool {
        self.state == State::Recording
    }

    /// When to try again.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        match self.state {
            State::Paused(until) => Some(until),
            State::Idle | State::Recording => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_recorded_again_until_that_works() {
        let mut one = CacheIdentity::default();
        assert!(!one.go_on(Nanos(0), false));
        assert!(one.go_on(Nanos(0), true) && one.is_recording());
        assert!(!one.go_on(Nanos(0), true), "once at a time");
        assert!(!one.recorded(Nanos(0), false));
        assert_eq!(one.next_wakeup(), Some(PAUSE));
        assert!(!one.go_on(Nanos(PAUSE.0 - 1), true));
        assert!(one.go_on(PAUSE, true));
        assert!(one.recorded(PAUSE, true));
        assert_eq!(one.next_wakeup(), None);
        assert!(!one.go_on(PAUSE, false));
    }
}
