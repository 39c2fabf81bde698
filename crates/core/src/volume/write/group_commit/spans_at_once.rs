//! How many spans are worth being written at once, found out by trying.
//!
//! Time goes in windows of so many spans. In some of them, one span more or one fewer is written at once. If clients were
//! answered clearly faster in [`WINS`] such windows in a row than in the windows before them, that is how it goes on; if
//! they were not, the other direction is tried, and trials become rarer. So they cost little, and a moment in which
//! clients happened to ask for more decides nothing.

use crate::base::io::Nanos;

/// Bounds of how many spans are written at once while they are small.
const AT_ONCE_MAX: usize = 4;
/// To begin with.
const AT_ONCE_FIRST: usize = 2;
/// Spans of a window, and those at its beginning that are left out, since what was before is still under way.
const WINDOW_SPANS: u32 = 96;
const LEFT_OUT_SPANS: u32 = 32;
/// One window in so many is a trial: at first, and if trials are lost.
const WINDOWS_MIN: u32 = 4;
const WINDOWS_MAX: u32 = 64;
/// Trials that must be won in a row, and by how much: so many hundredths more answers in a time.
const WINS: u32 = 3;
const WIN_PERCENT: u128 = 103;

/// What was answered in which time.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    answered: u128,
    nanos: u128,
}

impl Rate {
    /// Whether this is clearly more than the other.
    fn beats(self, other: Self) -> bool {
        self.answered * other.nanos * 100 > other.answered * self.nanos * WIN_PERCENT
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct SpansAtOnce {
    now: usize,
    /// What is tried next, or is being tried.
    other: usize,
    wins: u32,
    /// Windows since the last trial, and in how many the next one is.
    window: u32,
    windows: u32,
    /// Of the present window: spans, and since when so many requests were answered.
    spans: u32,
    since: Nanos,
    answered: usize,
    /// Of the window before.
    before: Rate,
}

impl Default for SpansAtOnce {
    fn default() -> Self {
        Self {
            now: AT_ONCE_FIRST,
            other: AT_ONCE_FIRST + 1,
            wins: 0,
            window: 0,
            windows: WINDOWS_MIN,
            spans: 0,
            since: Nanos(0),
            answered: 0,
            before: Rate::default(),
        }
    }
}

impl SpansAtOnce {
    /// How many.
    pub(super) fn get(&self) -> usize {
        if self.is_trial() {
            self.other
        } else {
            self.now
        }
    }

    fn is_trial(&self) -> bool {
        self.window + 1 == self.windows
    }

    /// So many requests were answered.
    pub(super) fn answered(&mut self, requests: usize) {
        self.answered += requests;
    }

    /// Another span is written.
    pub(super) fn begun(&mut self, now: Nanos) {
        self.spans += 1;
        if self.spans == LEFT_OUT_SPANS {
            self.since = now;
            self.answered = 0;
        }
        if self.spans < WINDOW_SPANS {
            return;
        }
        let rate = Rate {
            answered: self.answered as u128,
            nanos: u128::from(now.since(self.since).0),
        };
        if self.is_trial() {
            self.judge(rate);
            self.window = 0;
        } else {
            self.window += 1;
        }
        self.before = rate;
        self.spans = 0;
    }

    /// A trial has brought this.
    fn judge(&mut self, rate: Rate) {
        let is_more = self.other > self.now;
        if !rate.beats(self.before) {
            self.wins = 0;
            self.other = self.next(!is_more);
            self.windows = (2 * self.windows).min(WINDOWS_MAX);
            return;
        }
        self.wins += 1;
        self.windows = WINDOWS_MIN;
        if self.wins >= WINS {
            self.wins = 0;
            self.now = self.other;
            self.other = self.next(is_more);
        }
    }

    /// The next number in that direction, or in the other one where there is none.
    fn next(&self, more: bool) -> usize {
        let has_more = self.now < AT_ONCE_MAX;
        if has_more && (more || self.now == 1) {
            self.now + 1
        } else {
            self.now - 1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found after so many windows, if `rate` requests a second are answered with so many spans at once.
    fn found(windows: u32, rate: impl Fn(usize, u32) -> f64) -> usize {
        let (mut at_once, mut now) = (SpansAtOnce::default(), Nanos(1));
        for window in 0..windows {
            for _ in 0..WINDOW_SPANS {
                let requests = 16;
                let nanos = f64::from(requests) / rate(at_once.get(), window) * 1e9;
                now = now.plus(Nanos(nanos as u64));
                at_once.answered(requests as usize);
                at_once.begun(now);
            }
        }
        at_once.now
    }

    #[test]
    fn what_answers_more_in_a_time_is_found_wherever_it_lies() {
        for best in 1..=AT_ONCE_MAX {
            let rate = |at_once: usize, _| 1e5 / (1.0 + at_once.abs_diff(best) as f64 / 8.0);
            assert_eq!(found(1000, rate), best);
        }
    }

    #[test]
    fn what_makes_no_difference_changes_nothing() {
        assert_eq!(found(2000, |_, _| 1e5), AT_ONCE_FIRST);
        // Load that comes and goes, whatever is done.
        let waves = |_, window: u32| 1e5 * (1.0 + f64::from(window % 3));
        assert_eq!(found(2000, waves), AT_ONCE_FIRST);
    }

    #[test]
    fn a_few_lucky_trials_change_nothing() {
        let lucky = |at_once: usize, window: u32| {
            let is_lucky = !(window / WINDOWS_MIN).is_multiple_of(WINS) && at_once != AT_ONCE_FIRST;
            if is_lucky { 2e5 } else { 1e5 }
        };
        assert_eq!(found(2000, lucky), AT_ONCE_FIRST);
    }
}
