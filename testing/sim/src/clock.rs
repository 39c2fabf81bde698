//! Virtual time: a queue of what happens when. Nothing here looks at a real clock.

use std::collections::BTreeMap;

use hdcs_core::base::io::Nanos;

/// Events in the order of their time; those of one instant in the order in which they were added.
#[derive(Debug)]
pub struct Schedule<T> {
    events: BTreeMap<(Nanos, u64), T>,
    added: u64,
}

impl<T> Default for Schedule<T> {
    fn default() -> Self {
        Self {
            events: BTreeMap::new(),
            added: 0,
        }
    }
}

impl<T> Schedule<T> {
    /// Let `event` happen at `time`.
    pub fn add(&mut self, time: Nanos, event: T) {
        self.added += 1;
        self.events.insert((time, self.added), event);
    }

    /// When the next event happens.
    pub fn next_time(&self) -> Option<Nanos> {
        self.events.keys().next().map(|&(time, _)| time)
    }

    /// Take the next event if it happens no later than `time`.
    pub fn take_until(&mut self, time: Nanos) -> Option<T> {
        let entry = self.events.first_entry()?;
        (entry.key().0 <= time).then(|| entry.remove())
    }

    /// Keep the events that `keep` says.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        self.events.retain(|_, event| keep(event));
    }
}

/// How long an operation takes.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// At least.
    pub min: Nanos,
    /// Usually at most.
    pub max: Nanos,
    /// One in so many takes [`Self::slow`]; 0 for never.
    pub slow_one_in: u32,
    /// What a slow one takes.
    pub slow: Nanos,
}

impl Latency {
    /// The latency of one operation.
    pub fn draw(&self, random: &mut fastrand::Rng) -> Nanos {
        if self.slow_one_in > 0 && random.u32(..self.slow_one_in) == 0 {
            return self.slow;
        }
        Nanos(random.u64(self.min.0..=self.max.0))
    }

    /// The longest.
    pub fn longest(&self) -> Nanos {
        if self.slow_one_in > 0 {
            self.max.max(self.slow)
        } else {
            self.max
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedule_is_ordered_by_time_then_by_arrival() {
        let mut schedule = Schedule::default();
        for (time, name) in [(5, 'a'), (3, 'b'), (5, 'c'), (4, 'd')] {
            schedule.add(Nanos(time), name);
        }
        schedule.retain(|&name| name != 'd');
        assert_eq!(schedule.next_time(), Some(Nanos(3)));
        assert_eq!(schedule.take_until(Nanos(2)), None);
        let order: Vec<_> = std::iter::from_fn(|| schedule.take_until(Nanos(9))).collect();
        assert_eq!(order, ['b', 'a', 'c']);
    }
}
