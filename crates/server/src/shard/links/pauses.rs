//! How long to wait before a node is connected to again.
//!
//! Each pause is twice as long as the one before, up to a bound, and drawn between half of that and the whole: nodes that
//! were cut off together do not come back together. A connection that has held for a while makes the next pause short again;
//! one that was only made does not, since it may break each time.

use hdcs_core::base::io::Nanos;

/// The first pause.
pub const PAUSE_MIN: Nanos = Nanos::from_millis(100);
/// The longest one; and how long a connection has to hold to make the next one short.
pub const PAUSE_MAX: Nanos = Nanos::from_millis(1_000);

/// See the module.
#[derive(Debug)]
pub struct Pauses {
    random: fastrand::Rng,
    next: Nanos,
}

impl Pauses {
    /// Pauses that depend on nothing but the seed.
    pub fn new(seed: u64) -> Self {
        Self {
            random: fastrand::Rng::with_seed(seed),
            next: PAUSE_MIN,
        }
    }

    /// The next pause, after a connection that held for so long; `None`: it was never made.
    pub fn next(&mut self, held: Option<Nanos>) -> Nanos {
        if held.is_some_and(|held| held >= PAUSE_MAX) {
            self.next = PAUSE_MIN;
        }
        let whole = self.next.0;
        self.next = Nanos(whole.saturating_mul(2)).min(PAUSE_MAX);
        Nanos(self.random.u64(whole / 2..=whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_begin_anew_after_a_connection_that_held() {
        let mut pauses = Pauses::new(7);
        let mut whole = PAUSE_MIN.0;
        for _ in 0..20 {
            let pause = pauses.next(None).0;
            assert!((whole / 2..=whole).contains(&pause), "{pause} of {whole}");
            whole = (2 * whole).min(PAUSE_MAX.0);
        }
        assert_eq!(whole, PAUSE_MAX.0);
        assert!(pauses.next(Some(PAUSE_MIN)).0 >= PAUSE_MAX.0 / 2);
        assert!(pauses.next(Some(PAUSE_MAX)).0 <= PAUSE_MIN.0);
    }

    #[test]
    fn pauses_differ_by_their_seeds() {
        let draw = |seed| {
            let mut pauses = Pauses::new(seed);
            [(); 5].map(|()| pauses.next(None))
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
