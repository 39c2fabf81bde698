//! Clients that send at random times, whatever has been answered, beside those that wait for answers: queues grow, and
//! who is overtaken for ever shows.
//!
//! Checker: where little arrives and nothing fails, no request waits for longer than the scenario says.

use std::collections::BTreeSet;

use fastrand::Rng;

use super::{Happening, Nanos, RequestId, Unit, Violation, Workload, World};
use crate::scenario::{OpenLoopScenario, Stream};

/// A planted bug answers once nothing has arrived for so long.
pub(super) const LULL: Nanos = Nanos::from_millis(200);

/// A client that does not wait.
#[derive(Debug)]
pub(super) struct OpenClient {
    scenario: OpenLoopScenario,
    workload: Workload,
    asks_left: u32,
    unanswered: BTreeSet<u64>,
    /// Whether its next arrival is on its way.
    is_coming: bool,
    random: Rng,
}

impl OpenClient {
    /// The client of a volume of `sectors`, which is the one with this index.
    pub(super) fn new(scenario: OpenLoopScenario, sectors: u64, index: u64, seed: u64) -> Self {
        let mut random = Rng::with_seed(Stream::Arrivals.seed_of(seed, index));
        let workload = Workload::new(scenario.behaviour.clone(), sectors, random.u64(..));
        Self {
            scenario,
            workload,
            asks_left: 0,
            unanswered: BTreeSet::new(),
            is_coming: false,
            random,
        }
    }

    /// Let it send so many more for each request of the one that waits.
    pub(super) fn give_work(&mut self, requests: u32) {
        self.asks_left = requests * self.scenario.share;
    }

    /// It sends nothing any more.
    pub(super) fn stop(&mut self) {
        self.asks_left = 0;
    }

    /// Whether it has sent everything.
    pub(super) fn is_done(&self) -> bool {
        self.asks_left == 0
    }

    /// Its requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.unanswered.len()
    }

    /// One was answered. Returns whether it was one of its own.
    pub(super) fn answered(&mut self, id: RequestId) -> bool {
        self.unanswered.remove(&id.0)
    }

    /// The node is gone.
    pub(super) fn forget(&mut self) {
        self.unanswered.clear();
        self.is_coming = false;
        self.asks_left = 0;
    }

    /// The time to the next arrival, as of one that remembers nothing, if it is not on its way and there is something
    /// to send.
    pub(super) fn next_arrival(&mut self) -> Option<Nanos> {
        if self.is_done() || self.is_coming {
            return None;
        }
        self.is_coming = true;
        let mean = self.scenario.pause.0 as f64;
        let share = 1.0 - self.random.f64();
        Some(Nanos((-mean * share.ln()) as u64 + 1))
    }
}

impl World {
    /// Requests arrive, unless there are too many already, no memory is left, or clients hold back.
    pub(super) fn arrive(&mut self, unit: usize) -> Result<(), Violation> {
        let Some(client) = &mut self.units[unit].open_loop else {
            return Ok(());
        };
        client.is_coming = false;
        let burst = client.random.usize(1..=client.scenario.burst_max);
        if let Some(pause) = client.next_arrival() {
            self.engine.after(pause, Happening::Arrival(unit));
        }
        if self.volumes() <= unit || self.units[unit].shrink.is_some() {
            return Ok(());
        }
        for _ in 0..burst {
            let state = &mut self.units[unit];
            let sectors = state.history.sectors();
            let Some(client) = &mut state.open_loop else {
                return Ok(());
            };
            if client.is_done() {
                return Ok(());
            }
            if client.waiting() >= client.scenario.unanswered_max {
                self.coverage.arrivals_refused += 1;
                return Ok(());
            }
            let ask = client.workload.next(sectors);
            if !self.ask(unit, ask)? {
                return Ok(());
            }
            self.coverage.arrivals += 1;
            let state = &mut self.units[unit];
            let id = state.requests.last();
            if let Some(client) = &mut state.open_loop {
                client.asks_left = client.asks_left.saturating_sub(1);
                if state.requests.get(id).is_some() {
                    client.unanswered.insert(id.0);
                }
            }
        }
        Ok(())
    }
}

impl Unit {
    /// Whether the newest of the requests that wait has just come.
    pub(super) fn is_arriving(&self, now: Nanos) -> bool {
        let newest = self.requests.newest();
        newest.is_some_and(|since| now.since(since) < LULL)
    }

    /// Nobody has waited for longer than that.
    pub(super) fn check_waits(&self, now: Nanos, max: Nanos) -> Result<(), Violation> {
        let Some((since, what)) = self.requests.oldest() else {
            return Ok(());
        };
        let waited = now.since(since);
        if waited <= max {
            return Ok(());
        }
        let volume = self.volume;
        Err(Violation::new(
            "waits-for-long",
            format!("{what:?} of volume {volume} has waited for {waited:?} under a light load"),
        ))
    }
}
