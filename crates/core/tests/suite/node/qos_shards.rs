//! Schedulers of several shards before one device: each has turns of its own, and knows of the others what is in the
//! window that they share.

use std::collections::VecDeque;
use std::sync::Arc;

use hdcs_core::base::io::Nanos;
use hdcs_core::node::common_window::CommonWindow;
use hdcs_core::node::qos::{Cost, FlowId, Qos, Scheduler, Ticket};

use super::qos::{LARGE, SECOND, SMALL, p99, reserved, weighted};

/// A client of a volume on one of the shards.
struct Client {
    shard: usize,
    flow: FlowId,
    cost: Cost,
    /// Unanswered requests, always; or one each so many nanoseconds.
    depth: usize,
    every: u64,
    next_at: u64,
    unanswered: usize,
    answered: u64,
    times: Vec<u64>,
}

struct Running {
    end: u64,
    client: usize,
    since: u64,
    ticket: Ticket,
}

/// Shards before a device that serves one request after another.
struct World {
    schedulers: Vec<Scheduler<(usize, u64)>>,
    clients: Vec<Client>,
    now: u64,
    busy: u64,
    running: VecDeque<Running>,
}

impl World {
    fn new(shards: usize, know_each_other: bool) -> Self {
        let window = CommonWindow::of(shards);
        let schedulers = (0..shards).map(|shard| {
            let mut scheduler = Scheduler::default();
            if know_each_other {
                scheduler.join(&window, shard);
            } else {
                scheduler.join(&CommonWindow::of(1), 0);
            }
            scheduler
        });
        Self {
            schedulers: schedulers.collect(),
            clients: Vec::new(),
            now: 0,
            busy: 0,
            running: VecDeque::new(),
        }
    }

    fn add(&mut self, shard: usize, qos: Qos, depth: usize, cost: Cost) -> usize {
        let flow = self.schedulers[shard].add(Nanos(self.now), qos);
        self.clients.push(Client {
            shard,
            flow,
            cost,
            depth,
            every: 0,
            next_at: self.now,
            unanswered: 0,
            answered: 0,
            times: Vec::new(),
        });
        self.clients.len() - 1
    }

    /// A turn of a shard: what has come to it, and what goes.
    fn turn(&mut self, shard: usize) {
        for (index, client) in self.clients.iter_mut().enumerate() {
            while client.shard == shard
                && (client.unanswered < client.depth
                    || client.every > 0 && client.next_at <= self.now)
            {
                if client.every > 0 {
                    client.next_at += client.every;
                }
                client.unanswered += 1;
                let scheduler = &mut self.schedulers[shard];
                scheduler.submit(Nanos(self.now), client.flow, client.cost, (index, self.now));
            }
        }
        while let Some(((client, since), ticket)) = self.schedulers[shard].next(Nanos(self.now)) {
            let took = 16_000 + self.clients[client].cost.bytes / 1024 * 1_000;
            self.busy = self.busy.max(self.now) + took;
            self.running.push_back(Running {
                end: self.busy + 100_000,
                client,
                since,
                ticket,
            });
        }
    }

    fn run(&mut self, nanos: u64) {
        let until = self.now + nanos;
        for shard in 0..self.schedulers.len() {
            self.turn(shard);
        }
        while self.now < until {
            let end = self.running.front().map(|running| running.end);
            let timers = self.schedulers.iter().enumerate();
            let timers = timers.filter_map(|(shard, one)| Some((one.next_wakeup()?.0, shard)));
            let asks = self.clients.iter().filter(|client| client.every > 0);
            let asks = asks.map(|client| (client.next_at, client.shard));
            let timer = timers.chain(asks).min();
            let next = end.into_iter().chain(timer.map(|(at, _)| at)).min();
            let next = next.unwrap_or(until).max(self.now);
            self.now = next.min(until);
            if self.now == until {
                break;
            }
            // Only the shard to which something happens has a turn.
            if let Some(running) = self.running.pop_front_if(|running| running.end <= next) {
                let client = &mut self.clients[running.client];
                client.unanswered -= 1;
                client.answered += 1;
                client.times.push(next - running.since);
                let shard = client.shard;
                self.schedulers[shard].ended(Nanos(next), running.ticket);
                self.turn(shard);
            } else if let Some((_, shard)) = timer {
                self.turn(shard);
            }
        }
    }

    /// Answers of each client in so many nanoseconds, once all have run for a while.
    fn answers(&mut self, nanos: u64) -> Vec<u64> {
        self.run(2 * SECOND);
        for client in &mut self.clients {
            client.answered = 0;
            client.times.clear();
        }
        self.run(nanos);
        self.clients.iter().map(|client| client.answered).collect()
    }

    fn p99(&mut self, client: usize) -> u64 {
        p99(&mut self.clients[client].times)
    }
}

/// How many times as much the second of two volumes on two shards gets.
fn ratio(weights: [u64; 2], costs: [Cost; 2], know_each_other: bool) -> f64 {
    let mut world = World::new(2, know_each_other);
    for shard in 0..2 {
        world.add(shard, weighted(weights[shard]), 64, costs[shard]);
    }
    let answers = world.answers(10 * SECOND);
    let weighed = |shard: usize| (answers[shard] * (16 + costs[shard].bytes / 1024)) as f64;
    weighed(1) / weighed(0)
}

#[test]
fn weights_hold_between_volumes_on_different_shards() {
    for (weights, costs, wanted) in [
        ([100, 300], [SMALL, SMALL], 3.0),
        // One without a weight counts as 100.
        ([0, 300], [SMALL, SMALL], 3.0),
        ([300, 100], [SMALL, SMALL], 1.0 / 3.0),
        ([100, 100], [SMALL, SMALL], 1.0),
        ([100, 300], [LARGE, LARGE], 3.0),
        ([100, 300], [SMALL, LARGE], 3.0),
    ] {
        let found = ratio(weights, costs, true);
        assert!(
            (wanted * 0.75..wanted * 1.34).contains(&found),
            "{weights:?} {costs:?}: {found}"
        );
    }
    let found = ratio([100, 300], [SMALL, SMALL], false);
    assert!((0.9..1.1).contains(&found), "on their own: {found}");
}

#[test]
fn shard_of_many_volumes_has_the_part_of_all_of_them() {
    let mut world = World::new(3, true);
    for (shard, weight) in [(0, 100), (0, 100), (0, 200), (1, 100), (2, 300)] {
        world.add(shard, weighted(weight), 32, SMALL);
    }
    let answers = world.answers(10 * SECOND);
    let all: u64 = answers.iter().sum();
    for (answered, part) in answers.iter().zip([0.125, 0.125, 0.25, 0.125, 0.375]) {
        let found = *answered as f64 / all as f64;
        assert!((part * 0.75..part * 1.34).contains(&found), "{answers:?}");
    }
}

#[test]
fn what_a_shard_does_not_use_is_lent() {
    let alone = {
        let mut world = World::new(2, true);
        world.add(0, weighted(100), 64, SMALL);
        world.answers(5 * SECOND)[0]
    };
    // The other one is there, with a large weight and next to nothing to do.
    let mut world = World::new(2, true);
    world.add(0, weighted(100), 64, SMALL);
    let idle = world.add(1, weighted(10_000), 0, SMALL);
    world.clients[idle].every = SECOND / 100;
    let answers = world.answers(5 * SECOND);
    assert!(answers[0] >= alone * 95 / 100, "{answers:?} of {alone}");
    assert!(answers[1] >= 490, "{answers:?}");
}

#[test]
fn reservation_is_served_beside_noisy_neighbours_on_other_shards() {
    let run = |noisy: bool, know_each_other: bool| {
        let mut world = World::new(3, know_each_other);
        let one = world.add(0, reserved(4_000), 0, SMALL);
        world.clients[one].every = SECOND / 4_000;
        for shard in [1, 1, 2, 2].into_iter().filter(|_| noisy) {
            world.add(shard, Qos::default(), 32, LARGE);
        }
        let answers = world.answers(10 * SECOND);
        (answers[one], world.p99(one), answers)
    };
    let (_, alone, _) = run(false, true);
    let (answered, p99, all) = run(true, true);
    assert!(answered >= 39_000, "{all:?}");
    assert!(p99 <= 3 * alone, "{p99} ns beside, {alone} ns alone");
    let (_, without, _) = run(true, false);
    assert!(
        without > 3 * alone,
        "{without} ns beside those that do not know of it"
    );
}

#[test]
fn nothing_is_asked_of_shards_while_no_volume_of_the_node_has_a_weight() {
    let window = CommonWindow::of(2);
    let [mut one, mut other] = [0, 1].map(|shard| {
        let mut scheduler = Scheduler::<()>::default();
        scheduler.join(&Arc::clone(&window), shard);
        scheduler
    });
    let flow = one.add(Nanos(0), Qos::default());
    other.add(Nanos(0), Qos::default());
    assert!(!one.is_on() && !other.is_on());
    one.set(Nanos(0), flow, weighted(7));
    assert!(one.is_on() && other.is_on());
    let limited = Qos {
        iops_max: 7,
        ..Qos::default()
    };
    one.set(Nanos(0), flow, limited);
    assert!(one.is_on() && !other.is_on(), "a limit is its own");
    one.set(Nanos(0), flow, weighted(7));
    assert_eq!(one.remove(flow).count(), 0);
    assert!(!one.is_on() && !other.is_on());
}
