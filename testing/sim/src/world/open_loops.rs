//! Clients that send at random times, whatever has been answered, beside those that wait for answers: queues grow, and
//! who is overtaken for ever shows.
//!
//! Checker: where little arrives and nothing fails, no request waits for longer than the scenario says.

use std::collections::BTreeSet;

use fastrand::Rng;

use super::{Happening, Nanos, Plant, Reply, RequestError, RequestId, Violation, Workload, World};
use crate::scenario::{OpenLoopScenario, Stream};

/// A planted bug answers once nothing has arrived for so long.
const LULL: Nanos = Nanos::from_millis(200);

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

    /// The time to the next arrival: as of one that remembers nothing.
    fn next_pause(&mut self) -> Nanos {
        let mean = self.scenario.pause.0 as f64;
        let share = 1.0 - self.random.f64();
        Nanos((-mean * share.ln()) as u64 + 1)
    }
}

impl World {
    /// The next arrival of a volume's client that does not wait, if that has something to send.
    pub(super) fn await_arrival(&mut self, unit: usize) {
        let Some(client) = &mut self.units[unit].open_loop else {
            return;
        };
        if client.is_done() || client.is_coming {
            return;
        }
        client.is_coming = true;
        let pause = client.next_pause();
        self.engine.after(pause, Happening::Arrival(unit));
    }

    /// Requests arrive, unless there are too many already, no memory is left, or clients hold back.
    pub(super) fn arrive(&mut self, unit: usize) -> Result<(), Violation> {
        let Some(client) = &mut self.units[unit].open_loop else {
            return Ok(());
        };
        client.is_coming = false;
        let burst = client.random.usize(1..=client.scenario.burst_max);
        self.await_arrival(unit);
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

    /// Whether a planted bug keeps a reply, as requests go on arriving.
    pub(super) fn keeps_for_arrivals(&mut self, unit: usize) -> bool {
        if !self.planted.is(Plant::ArrivalsFirst) || self.units[unit].requests.is_empty() {
            return false;
        }
        let newest = self.units[unit].requests.newest();
        newest.is_some_and(|since| self.engine.now().since(since) < LULL)
    }

    /// A request was sent: what a planted bug keeps is looked at again some time after.
    pub(super) fn look_after_lull(&mut self) {
        if self.planted.is(Plant::ArrivalsFirst) {
            self.engine.after(LULL, Happening::Tick);
        }
    }

    /// Where nothing is a reason to wait for long, nobody does.
    pub(super) fn check_waits(&self, unit: usize) -> Result<(), Violation> {
        let Some(max) = self.scenario.wait_max else {
            return Ok(());
        };
        let Some((since, what)) = self.units[unit].requests.oldest() else {
            return Ok(());
        };
        let waited = self.engine.now().since(since);
        if waited <= max {
            return Ok(());
        }
        Err(Violation::new(
            "waits-for-long",
            format!("{what:?} of volume {unit} has waited for {waited:?} under a light load"),
        ))
    }

    /// A planted bug keeps a reply.
    pub(super) fn keep_reply(
        &mut self,
        unit: usize,
        id: RequestId,
        result: Result<Reply, RequestError>,
    ) {
        self.units[unit].starved.push((id, result));
    }
}
