//! The engine under every world: virtual time, what happens when, the trace, and the loop that waits. Nothing here looks
//! at a real clock.
//!
//! 1. Time only goes forward: to the next event, or to when a machine wants to be polled.
//! 2. Events of one instant happen in the order in which they were added.
//! 3. What waits while nothing will happen any more is a stall; so are turns without end at one instant.

use std::collections::BTreeMap;

use hdcs_core::base::io::Nanos;

use crate::trace::Trace;
use crate::violation::Violation;

/// Turns at one instant that count as spinning.
const TURNS_AT_ONCE_MAX: u32 = 20_000;

/// Virtual time, and the events `T` that are to come.
#[derive(Debug)]
pub struct Engine<T> {
    now: Nanos,
    events: BTreeMap<(Nanos, u64), T>,
    added: u64,
    turns: u64,
    turns_at_once: u32,
    /// What has happened.
    pub trace: Trace,
}

impl<T> Engine<T> {
    /// An engine whose time begins at `now`; a verbose one prints what happens.
    pub fn new(now: Nanos, verbose: bool) -> Self {
        Self {
            now,
            events: BTreeMap::new(),
            added: 0,
            turns: 0,
            turns_at_once: 0,
            trace: Trace::new(verbose),
        }
    }

    /// The time.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// How often it went on.
    pub fn turns(&self) -> u64 {
        self.turns
    }

    /// Let `event` happen at `time`.
    pub fn at(&mut self, time: Nanos, event: T) {
        self.added += 1;
        self.events.insert((time, self.added), event);
    }

    /// Let `event` happen after `pause`.
    pub fn after(&mut self, pause: Nanos, event: T) {
        self.at(self.now.plus(pause), event);
    }

    /// Let time pass in which nothing happens.
    pub fn pass_until(&mut self, time: Nanos) {
        self.now = self.now.max(time);
    }

    /// When the next event happens.
    pub fn next_time(&self) -> Option<Nanos> {
        self.events.keys().next().map(|&(time, _)| time)
    }

    /// Take the next event, if it is due.
    pub fn take_due(&mut self) -> Option<T> {
        let entry = self.events.first_entry()?;
        (entry.key().0 <= self.now).then(|| entry.remove())
    }

    /// Keep the events that `keep` says.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        self.events.retain(|_, event| keep(event));
    }

    /// Something has happened.
    pub fn note(&mut self, what: &'static str, numbers: [u64; 4]) {
        self.trace.add(self.turns, self.now, what, numbers);
    }

    /// Go on to the next event, or to `wakeup`; false if there is neither.
    pub fn go_on(&mut self, wakeup: Option<Nanos>) -> Result<bool, Violation> {
        let Some(next) = self.next_time().into_iter().chain(wakeup).min() else {
            return Ok(false);
        };
        self.turns += 1;
        self.turns_at_once += 1;
        if next > self.now {
            self.now = next;
            self.turns_at_once = 0;
        }
        if self.turns_at_once > TURNS_AT_ONCE_MAX {
            let message = format!("{TURNS_AT_ONCE_MAX} turns at {} ns and no end", self.now.0);
            return Err(Violation::new("spinning", message));
        }
        Ok(true)
    }
}

/// How a stretch of a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// What was waited for is there.
    Reached,
    /// The step of a crash came first, or what was to do it has failed.
    Crash,
}

/// A world on an engine.
pub(crate) trait Simulated {
    /// Its time.
    fn now(&self) -> Nanos;

    /// What has happened in it.
    fn trace(&self) -> &Trace;

    /// Have its engine go on to the next event, or to when a machine wants to be polled; false if there is neither.
    fn advance(&mut self) -> Result<bool, Violation>;

    /// Let what is due happen, poll the machines, do what they ask, and check what must hold.
    fn turn(&mut self) -> Result<Ended, Violation>;

    /// Until when something has to be there that is waited for since `began`, if anybody can say.
    fn deadline(&self, began: Nanos) -> Option<Nanos>;

    /// What waits, for whoever reads of a stall.
    fn waiting(&self) -> String;

    /// Go on by one turn, if anything will ever happen.
    fn go_on(&mut self) -> Result<Option<Ended>, Violation> {
        match self.advance() {
            Ok(true) => self.turn().map(Some),
            Ok(false) => Ok(None),
            Err(spins) => Err(Violation::new(
                "stall",
                format!("{spins}: {}", self.waiting()),
            )),
        }
    }

    /// Go on until `reached`, or until a crash.
    fn run_until(&mut self, mut reached: impl FnMut(&mut Self) -> bool) -> Result<Ended, Violation>
    where
        Self: Sized,
    {
        let began = self.now();
        loop {
            if reached(self) {
                return Ok(Ended::Reached);
            }
            match self.go_on()? {
                None => return Err(self.stalled("nothing will happen")),
                Some(Ended::Crash) => return Ok(Ended::Crash),
                Some(Ended::Reached) => {}
            }
            if self
                .deadline(began)
                .is_some_and(|deadline| self.now() > deadline)
            {
                return Err(self.stalled("it does not end"));
            }
        }
    }

    /// The violation that something waits.
    fn stalled(&self, why: &str) -> Violation {
        Violation::new("stall", format!("{why}: {}", self.waiting()))
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
    fn events_are_ordered_by_time_then_by_arrival() {
        let mut engine = Engine::new(Nanos(1), false);
        for (time, name) in [(5, 'a'), (3, 'b'), (5, 'c'), (4, 'd')] {
            engine.at(Nanos(time), name);
        }
        engine.retain(|&name| name != 'd');
        assert_eq!(engine.next_time(), Some(Nanos(3)));
        assert_eq!(engine.take_due(), None, "not yet");
        let mut order = Vec::new();
        while engine.go_on(None).unwrap() {
            order.extend(std::iter::from_fn(|| engine.take_due()));
        }
        assert_eq!(order, ['b', 'a', 'c']);
        assert_eq!((engine.now(), engine.turns()), (Nanos(5), 2));
    }

    #[test]
    fn turns_without_end_at_one_instant_are_caught() {
        let mut engine: Engine<()> = Engine::new(Nanos(1), false);
        for _ in 0..TURNS_AT_ONCE_MAX {
            assert_eq!(engine.go_on(Some(Nanos(1))), Ok(true));
        }
        assert_eq!(engine.go_on(Some(Nanos(1))).unwrap_err().rule, "spinning");
        assert_eq!(engine.go_on(Some(Nanos(2))), Ok(true), "time goes on");
        assert_eq!(engine.go_on(None), Ok(false), "nothing is to come");
    }
}
