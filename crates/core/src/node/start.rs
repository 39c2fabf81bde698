//! How many volumes a start opens at a time: enough to keep the devices busy, and so few that the first ones are open
//! long before the last ones are. Begun all at once, a thousand replays share the disk evenly, and end together.
//!
//! ```text
//!  begin ─► has a place ──┬──► end
//!                         └──► late, has none ──► end
//! ```
//!
//! Invariants:
//! 1. So many volumes have a place at most, and whoever begins when nobody told it to wait has one.
//! 2. A volume keeps its place while that is no longer than opening takes here. So one whose log or backend hangs costs the
//!    others a part of a second, and no volume waits for it to answer.
//!
//! It decides; whoever opens volumes asks it. There are no failures: an opening that fails ends like any other.

use alloc::collections::BTreeMap;

use crate::base::io::Nanos;

/// Volumes with a place at once.
pub const PLACES: usize = 32;
/// How long a volume keeps its place at least, and at most.
const PATIENCE_MIN: Nanos = Nanos::from_millis(200);
const PATIENCE_MAX: Nanos = Nanos::from_millis(5_000);
/// How many times as long as others took: then it is late.
const LATE_FACTOR: u64 = 4;
/// A share of one opening in what they take, as a divisor.
const SMOOTHING: u64 = 8;

/// See the module.
#[derive(Debug, Default)]
pub struct Starting {
    /// Since when volumes are being opened.
    under_way: BTreeMap<u32, Nanos>,
    /// What those that have ended took, about.
    typical: Option<Nanos>,
}

impl Starting {
    /// Whether one more may begin at `now`.
    ///
    /// # Errors
    /// Not now: look again when one has ended, and at that time at the latest.
    pub fn look(&self, now: Nanos) -> Result<(), Nanos> {
        let patience = self.patience();
        let with_place = self.under_way.values().map(|began| began.plus(patience));
        let (mut count, mut first) = (0, Nanos(u64::MAX));
        for until in with_place.filter(|&until| until > now) {
            count += 1;
            first = first.min(until);
        }
        if count < PLACES { Ok(()) } else { Err(first) }
    }

    /// The opening of a volume begins.
    pub fn begin(&mut self, now: Nanos, volume: u32) {
        self.under_way.insert(volume, now);
    }

    /// It has ended, well or not.
    pub fn end(&mut self, now: Nanos, volume: u32) {
        let Some(began) = self.under_way.remove(&volume) else {
            return;
        };
        let took = now.since(began);
        self.typical = Some(self.typical.map_or(took, |typical| {
            Nanos((typical.0 * (SMOOTHING - 1) + took.0) / SMOOTHING)
        }));
    }

    fn patience(&self) -> Nanos {
        let typical = self.typical.unwrap_or(Nanos(0));
        Nanos(typical.0.saturating_mul(LATE_FACTOR))
            .max(PATIENCE_MIN)
            .min(PATIENCE_MAX)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    /// When each of these volumes begins, which take so long; `None`: it hangs.
    fn run(takes: &[Option<Nanos>]) -> (Vec<Nanos>, usize) {
        let mut starting = Starting::default();
        let mut began: Vec<Nanos> = Vec::new();
        let (mut now, mut most) = (Nanos(0), 0);
        while began.len() < takes.len() {
            let ends = |volume: u32| Some(began[volume as usize].plus(takes[volume as usize]?));
            let under_way = starting.under_way.keys().copied();
            let next = under_way.filter_map(|one| Some((ends(one)?, one))).min();
            match (starting.look(now), next) {
                (_, Some((at, volume))) if at <= now => starting.end(now, volume),
                (Ok(()), _) => {
                    starting.begin(now, began.len() as u32);
                    began.push(now);
                    most = most.max(starting.under_way.len());
                }
                (Err(until), next) => {
                    assert!(until > now, "else it is asked for ever");
                    now = next.map_or(until, |(at, _)| at.min(until));
                }
            }
        }
        (began, most)
    }

    #[test]
    fn so_many_are_opened_at_a_time_and_in_order() {
        for took_ms in [1, 10, 300, 1_000] {
            let took = Nanos::from_millis(took_ms);
            let (began, most) = run(&[Some(took); 1_000]);
            // Until one has ended, nobody knows that it is slow and not hanging.
            let at_first = 1 + took_ms as usize / 200;
            assert!(most <= PLACES * at_first, "{took_ms} ms: {most}");
            assert!(began.is_sorted());
            let ideal = took.0 * 1_000 / PLACES as u64;
            assert!(began[999].0 <= ideal, "{took_ms} ms: {:?}", began[999]);
        }
    }

    #[test]
    fn volumes_that_hang_hold_up_the_others_for_a_moment() {
        let (began, _) = run(&[None; 500]);
        let bound = PATIENCE_MIN.0 * (500 / PLACES as u64);
        assert!(began[499].0 <= bound, "{:?}", began[499]);
        let every_other: Vec<_> = (0..1_000)
            .map(|one| (one % 2 == 0).then_some(Nanos::from_millis(20)))
            .collect();
        let (began, _) = run(&every_other);
        assert!(began[999].0 <= 2 * bound, "{:?}", began[999]);
    }

    #[test]
    fn volume_that_ends_late_counts_like_any_other() {
        let mut starting = Starting::default();
        starting.begin(Nanos(0), 1);
        starting.end(Nanos::from_millis(60_000), 1);
        assert_eq!(starting.patience(), PATIENCE_MAX);
        starting.end(Nanos::from_millis(60_000), 1);
        assert!(starting.under_way.is_empty());
    }
}
