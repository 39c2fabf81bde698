//! Keeps what happens again and again from filling the log.

use std::time::{Duration, Instant};

/// Lets one line pass in a period, and counts the others.
#[derive(Debug)]
pub struct LogLimit {
    period: Duration,
    next: Option<Instant>,
    left_out: u64,
}

impl LogLimit {
    /// One line in `period`.
    pub const fn new(period: Duration) -> Self {
        Self {
            period,
            next: None,
            left_out: 0,
        }
    }

    /// Whether it may be said now; if so, how often it was not since the last time.
    pub fn pass(&mut self) -> Option<u64> {
        let now = Instant::now();
        if self.next.is_some_and(|next| now < next) {
            self.left_out += 1;
            return None;
        }
        self.next = Some(now + self.period);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_limit_passes_one_and_counts_the_rest() {
        let mut limit = LogLimit::new(Duration::from_secs(3600));
        assert_eq!(limit.pass(), Some(0));
        assert_eq!((limit.pass(), limit.pass()), (None, None));
        limit.next = None;
        assert_eq!(limit.pass(), Some(2));
        let mut eager = LogLimit::new(Duration::ZERO);
        assert_eq!((eager.pass(), eager.pass()), (Some(0), Some(0)));
    }
}
