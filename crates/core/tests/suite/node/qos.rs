//! The scheduler of requests under random load, on a clock and a device that are made up.

use std::collections::VecDeque;

use hdcs_core::base::io::{Nanos, Request, SectorRange};
use hdcs_core::node::qos::{Cost, FlowId, Qos, Scheduler, Ticket, WAIT_MAX, WEIGHT_DEFAULT};

pub(super) const SECOND: u64 = 1_000_000_000;
const MIB: u64 = 1 << 20;
pub(super) const SMALL: Cost = Cost {
    requests: 1,
    bytes: 4096,
};
pub(super) const LARGE: Cost = Cost {
    requests: 1,
    bytes: 65536,
};

/// A bug between the scheduler and what uses it, which the checks below have to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    None,
    /// Limits are not told.
    Limitless,
    /// More may be saved up than was said.
    Hoard,
    /// Reservations are not told.
    Unreserved,
    /// Weights are not told.
    Weightless,
    /// A change is not told.
    Stale,
    /// Now and then, two requests change places.
    Reordered,
    /// What has ended is not told.
    Forgetful,
    /// Nobody comes back when it is time.
    Timeless,
}

/// How a client asks.
#[derive(Clone, Copy)]
enum Load {
    /// So many unanswered requests, always.
    Depth(usize),
    /// One request each so many nanoseconds, on average.
    Every(u64),
    /// The same without chance, and with at most so many unanswered requests: what it could not ask for in time it asks
    /// for as soon as it can.
    Paced(usize, u64),
    /// So many unanswered requests, but it looks for answers only each so many nanoseconds.
    Waves(usize, u64),
}

struct Client {
    flow: FlowId,
    load: Load,
    cost: Cost,
    next_at: u64,
    unanswered: usize,
    sent: u64,
    admitted: u64,
    /// Numbers of what was admitted, which are to be in order.
    expected: u64,
    answered: u64,
    bytes: u64,
    /// From arrival to answer.
    times: Vec<u64>,
}

/// Under way on the device.
struct Running {
    end: u64,
    client: usize,
    since: u64,
    ticket: Ticket,
}

/// A scheduler before a device that serves one request after another.
struct World {
    plant: Plant,
    scheduler: Scheduler<(usize, u64, u64)>,
    clients: Vec<Client>,
    now: u64,
    /// Until when the device is busy.
    busy: u64,
    /// Time that the device takes for a request, and for a KiB.
    request_nanos: u64,
    kib_nanos: u64,
    /// Time that passes beside the device's queue.
    latency: u64,
    running: VecDeque<Running>,
    random: fastrand::Rng,
    /// Between arrival and admission, at most.
    waited_max: u64,
}

impl World {
    fn new(seed: u64, plant: Plant) -> Self {
        Self {
            plant,
            scheduler: Scheduler::default(),
            clients: Vec::new(),
            now: 0,
            busy: 0,
            request_nanos: 16_000,
            kib_nanos: 1_000,
            latency: 100_000,
            running: VecDeque::new(),
            random: fastrand::Rng::with_seed(seed),
            waited_max: 0,
        }
    }

    fn add(&mut self, qos: Qos, load: Load, cost: Cost) -> usize {
        let flow = self.scheduler.add(Nanos(self.now), self.told(qos));
        self.clients.push(Client {
            flow,
            load,
            cost,
            next_at: self.now,
            unanswered: 0,
            sent: 0,
            admitted: 0,
            expected: 0,
            answered: 0,
            bytes: 0,
            times: Vec::new(),
        });
        self.clients.len() - 1
    }

    /// What the scheduler is told.
    fn told(&self, qos: Qos) -> Qos {
        let mut told = qos;
        match self.plant {
            Plant::Limitless => (told.iops_max, told.bandwidth_max) = (0, 0),
            Plant::Hoard => told.iops_burst = 2 * qos.iops_burst + 1_000,
            Plant::Unreserved => (told.iops_min, told.bandwidth_min) = (0, 0),
            Plant::Weightless => told.weight = qos.weight.min(1),
            _ => {}
        }
        told
    }

    fn set(&mut self, index: usize, qos: Qos) {
        if self.plant != Plant::Stale {
            let (flow, qos) = (self.clients[index].flow, self.told(qos));
            self.scheduler.set(Nanos(self.now), flow, qos);
        }
    }

    fn arrive(&mut self) {
        for index in 0..self.clients.len() {
            loop {
                let client = &mut self.clients[index];
                match client.load {
                    Load::Depth(depth) if client.unanswered < depth => {}
                    Load::Every(pause) if client.next_at <= self.now => {
                        client.next_at += self.random.u64(0..=2 * pause);
                    }
                    Load::Paced(depth, pause) if client.next_at <= self.now => {
                        if client.unanswered == depth {
                            break;
                        }
                        client.next_at += pause;
                    }
                    Load::Waves(depth, pause) if client.next_at <= self.now => {
                        if client.unanswered == depth {
                            client.next_at = self.now + pause;
                            break;
                        }
                    }
                    Load::Depth(_) | Load::Every(_) | Load::Paced(..) | Load::Waves(..) => break,
                }
                client.unanswered += 1;
                client.sent += 1;
                let swap = self.plant == Plant::Reordered && client.sent % 100 < 2;
                let number = client.sent - 1;
                let item = (index, if swap { number ^ 1 } else { number }, self.now);
                let (flow, cost) = (client.flow, client.cost);
                self.scheduler.submit(Nanos(self.now), flow, cost, item);
            }
        }
    }

    fn admit(&mut self) {
        while let Some(((index, number, since), ticket)) = self.scheduler.next(Nanos(self.now)) {
            let client = &mut self.clients[index];
            assert_eq!(
                number, client.expected,
                "requests of a flow keep their order"
            );
            client.expected += 1;
            client.admitted += 1;
            self.waited_max = self.waited_max.max(self.now - since);
            let took = self.request_nanos + client.cost.bytes / 1024 * self.kib_nanos;
            self.busy = self.busy.max(self.now) + took;
            self.running.push_back(Running {
                end: self.busy + self.latency,
                client: index,
                since,
                ticket,
            });
        }
    }

    /// Go on to the next moment at which something happens, as a shard does.
    fn step(&mut self, until: u64) {
        self.arrive();
        self.admit();
        let arrival = self.clients.iter().filter_map(|client| match client.load {
            Load::Every(_) | Load::Waves(..) => Some(client.next_at),
            Load::Paced(depth, _) => (client.unanswered < depth).then_some(client.next_at),
            Load::Depth(_) => None,
        });
        let end = self.running.front().map(|running| running.end);
        let timer = self.scheduler.next_wakeup().map(|at| at.0);
        let timer = timer.filter(|_| self.plant != Plant::Timeless);
        let next = arrival.chain(end).chain(timer).min();
        let next = next.unwrap_or(until);
        assert!(
            next > self.now || end.is_some_and(|end| end <= self.now),
            "it spins"
        );
        self.now = next.min(until).max(self.now);
        while let Some(running) = self.running.pop_front_if(|running| running.end <= self.now) {
            let client = &mut self.clients[running.client];
            client.unanswered -= 1;
            client.answered += 1;
            client.bytes += client.cost.bytes;
            client.times.push(self.now - running.since);
            if self.plant != Plant::Forgetful {
                self.scheduler.ended(Nanos(self.now), running.ticket);
            }
        }
    }

    fn run(&mut self, nanos: u64) {
        let until = self.now + nanos;
        while self.now < until {
            self.step(until);
        }
    }

    /// Forget what was counted, so that a beginning does not count.
    fn forget(&mut self) {
        for client in &mut self.clients {
            (client.admitted, client.answered, client.bytes) = (0, 0, 0);
            client.times.clear();
        }
        self.waited_max = 0;
    }

    fn p99(&mut self, index: usize) -> u64 {
        p99(&mut self.clients[index].times)
    }
}

pub(super) fn p99(times: &mut [u64]) -> u64 {
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

pub(super) fn weighted(weight: u64) -> Qos {
    Qos {
        weight,
        ..Qos::default()
    }
}

pub(super) fn reserved(iops_min: u64) -> Qos {
    Qos {
        iops_min,
        ..Qos::default()
    }
}

fn limits_hold_over_any_time(plant: Plant) {
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut world = World::new(seed, plant);
        let iops_max = random.u64(1..30_000);
        let bandwidth_max = random.u64(1..100) * MIB;
        let qos = Qos {
            iops_max,
            bandwidth_max,
            iops_burst: random.u64(0..5_000),
            bandwidth_burst: random.u64(0..50) * MIB,
            ..Qos::default()
        };
        let cost = if random.bool() { SMALL } else { LARGE };
        let load = if random.bool() {
            Load::Depth(random.usize(1..64))
        } else {
            Load::Every(random.u64(1_000..1_000_000))
        };
        let limited = world.add(qos, load, cost);
        world.add(weighted(random.u64(0..3)), Load::Depth(8), LARGE);
        // Timers mean at least so much; see `BURST_TIME_MIN`.
        let burst = (qos.iops_burst as f64).max(iops_max as f64 / 100.0) + 1.0;
        let burst_bytes = (qos.bandwidth_burst as f64).max(bandwidth_max as f64 / 100.0);
        let burst_bytes = burst_bytes + cost.bytes as f64;
        for _ in 0..20 {
            // Idle for a while, and then as much as goes: the burst is bounded whatever was saved.
            let before = world.clients[limited].load;
            world.clients[limited].load = Load::Depth(0);
            world.run(random.u64(1..SECOND));
            world.clients[limited].load = before;
            world.clients[limited].next_at = world.now;
            world.forget();
            let time = random.u64(1..SECOND / 4);
            world.run(time);
            let (admitted, seconds) = (world.clients[limited].admitted as f64, time as f64 / 1e9);
            let requests_max = iops_max as f64 * seconds + burst;
            let bytes_max = bandwidth_max as f64 * seconds + burst_bytes;
            assert!(
                admitted <= requests_max,
                "seed {seed}: {admitted} > {requests_max}"
            );
            let bytes = admitted * cost.bytes as f64;
            assert!(bytes <= bytes_max, "seed {seed}: {bytes} > {bytes_max}");
        }
    }
}

fn limits_are_reached(plant: Plant) {
    for (qos, cost) in [
        (
            Qos {
                iops_max: 1_000,
                ..Qos::default()
            },
            SMALL,
        ),
        (
            Qos {
                iops_max: 7,
                ..Qos::default()
            },
            LARGE,
        ),
        (
            Qos {
                bandwidth_max: 50 * MIB,
                ..Qos::default()
            },
            LARGE,
        ),
        (
            Qos {
                bandwidth_max: MIB,
                iops_max: 5_000,
                ..Qos::default()
            },
            SMALL,
        ),
    ] {
        let mut world = World::new(1, plant);
        let limited = world.add(qos, Load::Depth(32), cost);
        world.run(SECOND);
        world.forget();
        world.run(10 * SECOND);
        let admitted = world.clients[limited].admitted;
        let wanted = if qos.bandwidth_max > 0 {
            qos.bandwidth_max * 10 / cost.bytes
        } else {
            qos.iops_max * 10
        };
        assert!(admitted >= wanted * 99 / 100, "{admitted} of {wanted}");
    }
}

fn burst_is_what_was_saved(plant: Plant) {
    let mut world = World::new(1, plant);
    let qos = Qos {
        iops_max: 100,
        iops_burst: 2_000,
        ..Qos::default()
    };
    let limited = world.add(qos, Load::Depth(64), SMALL);
    world.run(SECOND);
    let first = world.clients[limited].admitted;
    assert!((2_000..=2_101).contains(&first), "{first}");
    world.forget();
    world.run(SECOND);
    let second = world.clients[limited].admitted;
    assert!((98..=101).contains(&second), "{second}");
    // Five seconds save five hundred requests, of which those that wait take some.
    world.clients[limited].load = Load::Depth(0);
    world.run(5 * SECOND);
    world.forget();
    world.clients[limited].load = Load::Depth(64);
    world.run(SECOND / 10);
    let third = world.clients[limited].admitted;
    assert!((430..=510).contains(&third), "{third}");
}

fn reservation_is_served_beside_noisy_neighbours(plant: Plant) {
    for seed in 0..10 {
        let alone = {
            let mut world = World::new(seed, plant);
            let one = world.add(reserved(4_000), Load::Every(SECOND / 4_000), SMALL);
            world.run(5 * SECOND);
            world.p99(one)
        };
        for cost in [SMALL, LARGE] {
            let mut world = World::new(seed, plant);
            let one = world.add(reserved(4_000), Load::Every(SECOND / 4_000), SMALL);
            for _ in 0..4 {
                world.add(Qos::default(), Load::Depth(32), cost);
            }
            world.run(5 * SECOND);
            world.forget();
            world.run(10 * SECOND);
            let answered = world.clients[one].answered;
            assert!(answered >= 39_000, "seed {seed}: {answered} of 40000");
            let p99 = world.p99(one);
            assert!(
                p99 <= 2 * alone,
                "seed {seed}: {p99} ns beside, {alone} ns alone"
            );
            // The others get what the device has left: it is busy most of the time.
            let others: u64 = world.clients[1..]
                .iter()
                .map(|client| client.answered)
                .sum();
            let nanos = world.request_nanos + cost.bytes / 1024 * world.kib_nanos;
            let busy = others * nanos + answered * 20_000;
            assert!(
                busy >= 5 * SECOND,
                "seed {seed}: the device was busy for {busy} ns"
            );
        }
    }
}

fn reservation_of_a_closed_loop_is_served_and_leaves_the_rest(plant: Plant) {
    let mut world = World::new(1, plant);
    // The device serves 50,000 small requests.
    let one = world.add(reserved(30_000), Load::Depth(64), SMALL);
    for _ in 0..4 {
        world.add(Qos::default(), Load::Depth(64), SMALL);
    }
    world.run(2 * SECOND);
    world.forget();
    world.run(4 * SECOND);
    let answered = world.clients[one].answered;
    assert!(answered >= 117_000, "{answered} of 120000");
    let flow = world.clients[one].flow;
    let stats = world.scheduler.stats(Nanos(world.now), flow);
    assert!(!stats.short && stats.served_iops >= 29_000, "{stats:?}");
    for other in &world.clients[1..] {
        assert!(
            (16_000..=24_000).contains(&other.answered),
            "{}",
            other.answered
        );
    }
}

#[test]
fn qos_reservation_that_is_not_reached_shows() {
    let mut world = World::new(1, Plant::None);
    let one = world.add(reserved(100_000), Load::Depth(64), SMALL);
    let other = world.add(Qos::default(), Load::Depth(64), SMALL);
    world.run(3 * SECOND);
    world.forget();
    world.run(3 * SECOND);
    let flow = world.clients[one].flow;
    let stats = world.scheduler.stats(Nanos(world.now), flow);
    assert!(stats.short && stats.served_iops < 60_000, "{stats:?}");
    // What is reserved may be more than there is: the other one is not starved.
    let least = 3 * SECOND / WAIT_MAX.0 - 1;
    assert!(
        world.clients[other].answered >= least,
        "{}",
        world.clients[other].answered
    );
    let flow = world.clients[other].flow;
    assert!(!world.scheduler.stats(Nanos(world.now), flow).short);
}

fn weights_divide_what_there_is(plant: Plant) {
    for costs in [
        [SMALL; 3],
        [LARGE; 3],
        [SMALL, LARGE, SMALL],
        [LARGE, SMALL, LARGE],
    ] {
        let mut world = World::new(1, plant);
        for (weight, cost) in [100, 200, 400].into_iter().zip(costs) {
            world.add(weighted(weight), Load::Depth(32), cost);
        }
        world.run(SECOND);
        world.forget();
        world.run(10 * SECOND);
        let shares: Vec<f64> = world
            .clients
            .iter()
            .map(|client| {
                let nanos = world.request_nanos + client.cost.bytes / 1024 * world.kib_nanos;
                (client.answered * nanos) as f64
            })
            .collect();
        let total: f64 = shares.iter().sum();
        assert!(
            total >= 9.5 * SECOND as f64,
            "the device is kept busy: {total}"
        );
        for (share, weight) in shares.iter().zip([1.0, 2.0, 4.0]) {
            let ratio = share / total * 7.0 / weight;
            assert!((0.95..1.05).contains(&ratio), "{shares:?}");
        }
    }
}

#[test]
fn qos_flow_whose_client_comes_in_waves_catches_up() {
    // Its queue is empty for a moment in each wave; without what it may catch up it has 0.85.
    for (pause, least) in [(200_000, 0.99), (700_000, 0.88)] {
        let mut world = World::new(1, Plant::None);
        for weight in [100, 200, 400] {
            world.add(weighted(weight), Load::Waves(32, pause), SMALL);
        }
        world.run(SECOND);
        world.forget();
        world.run(10 * SECOND);
        let answered = world.clients.iter().map(|client| client.answered as f64);
        let total: f64 = answered.clone().sum();
        let share = world.clients[2].answered as f64 / total * 7.0 / 4.0;
        assert!((least..1.01).contains(&share), "{pause}: {share}");
    }
}

#[test]
fn qos_reservation_catches_up_after_a_hiccup() {
    let mut world = World::new(1, Plant::None);
    world.request_nanos = 60_000;
    let paced = world.add(reserved(4_000), Load::Paced(32, 250_000), SMALL);
    for _ in 0..4 {
        world.add(Qos::default(), Load::Depth(32), SMALL);
    }
    world.run(3 * SECOND);
    world.forget();
    world.run(SECOND);
    let before = world.p99(paced);
    world.busy = world.now + 300_000_000;
    world.run(500_000_000);
    world.forget();
    world.run(200_000_000);
    let after = world.p99(paced);
    // Every request would wait for the 31 before it, 8 ms.
    assert!(after < 2 * before, "{after} ns, {before} ns before");
}

#[test]
fn qos_idle_flow_takes_no_share_and_gets_it_back() {
    let mut world = World::new(1, Plant::None);
    let one = world.add(weighted(1_000), Load::Depth(0), SMALL);
    let two = world.add(weighted(WEIGHT_DEFAULT), Load::Depth(32), SMALL);
    world.run(10 * SECOND);
    let alone = world.clients[two].answered;
    assert!(
        alone >= 480_000,
        "nothing is kept for one that is idle: {alone}"
    );
    // It has saved nothing up: its share is that of its weight from the first moment on.
    world.clients[one].load = Load::Depth(32);
    world.forget();
    world.run(SECOND);
    let answered = world.clients[two].answered;
    assert!((3_500..6_000).contains(&answered), "{answered}");
}

fn change_takes_effect_at_once(plant: Plant) {
    let mut world = World::new(1, plant);
    let qos = Qos {
        iops_max: 1,
        ..Qos::default()
    };
    let one = world.add(qos, Load::Depth(64), SMALL);
    world.run(5 * SECOND);
    assert!(world.clients[one].admitted <= 7);
    for (iops_max, least, most) in [
        (1_000, 95, 115),
        (10, 0, 12),
        (5_000, 480, 560),
        (0, 4_000, 5_200),
    ] {
        let qos = Qos {
            iops_max,
            ..Qos::default()
        };
        world.set(one, qos);
        world.forget();
        world.run(SECOND / 10);
        let admitted = world.clients[one].admitted;
        assert!((least..=most).contains(&admitted), "{iops_max}: {admitted}");
    }
}

fn any_load_goes_in_order_and_in_bounded_time(plant: Plant) {
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut world = World::new(seed, plant);
        for _ in 0..random.usize(1..8) {
            let mut rate = |most: u64| random.u64(..=most) * random.u64(..2);
            let qos = Qos {
                iops_max: 0,
                iops_min: rate(40_000),
                bandwidth_min: rate(200) * MIB,
                weight: rate(5_000),
                ..Qos::default()
            };
            let cost = if random.bool() { SMALL } else { LARGE };
            world.add(qos, Load::Depth(random.usize(1..32)), cost);
        }
        for _ in 0..20 {
            world.run(SECOND / 10);
            let one = random.usize(..world.clients.len());
            let qos = [
                weighted(random.u64(0..100)),
                reserved(random.u64(0..50_000)),
                Qos::default(),
            ];
            let qos = qos[random.usize(..3)];
            world.set(one, qos);
        }
        // Each of up to 32 that wait goes WAIT_MAX after the one before, at the latest.
        let bound = 33 * WAIT_MAX.0;
        assert!(
            world.waited_max <= bound,
            "seed {seed}: {} ns",
            world.waited_max
        );
        let open: usize = world.clients.iter().map(|client| client.unanswered).sum();
        assert!(open <= 8 * 32);
        for client in &world.clients {
            let least = 2 * SECOND / WAIT_MAX.0 / 2;
            assert!(client.admitted >= least, "seed {seed}: {}", client.admitted);
        }
    }
}

#[test]
fn qos_device_that_answers_nothing_holds_nobody_up() {
    let mut world = World::new(1, Plant::None);
    world.add(weighted(100), Load::Depth(16), LARGE);
    world.add(weighted(100), Load::Depth(16), LARGE);
    // A backend far away: the window would be full for a minute.
    world.latency = 60 * SECOND;
    world.run(SECOND / 2);
    for client in &world.clients {
        assert_eq!(client.admitted, 16, "all that was sent has gone");
    }
}

#[test]
fn qos_that_is_not_set_is_not_asked() {
    let mut scheduler: Scheduler<()> = Scheduler::default();
    let one = scheduler.add(Nanos(0), Qos::default());
    let two = scheduler.add(Nanos(0), Qos::default());
    assert!(!scheduler.is_on());
    scheduler.set(Nanos(1), two, weighted(5));
    assert!(scheduler.is_on());
    scheduler.submit(Nanos(1), one, SMALL, ());
    scheduler.submit(Nanos(1), two, SMALL, ());
    assert_eq!(scheduler.remove(two).count(), 1, "what waits comes back");
    assert!(scheduler.is_on(), "something waits");
    assert!(scheduler.next(Nanos(1)).is_some());
    assert!(!scheduler.is_on());
    assert!(scheduler.next(Nanos(1)).is_none());
}

#[test]
fn qos_nobody_is_woken_for_what_was_taken_back() {
    let limited = Qos {
        iops_max: 1,
        ..Qos::default()
    };
    let waiting = || {
        let mut scheduler = Scheduler::default();
        let flow = scheduler.add(Nanos(0), limited);
        for number in 0..100 {
            scheduler.submit(Nanos(0), flow, SMALL, number);
        }
        while scheduler.next(Nanos(0)).is_some() {}
        assert!(scheduler.next_wakeup().is_some(), "some wait for the limit");
        (scheduler, flow)
    };
    let (mut scheduler, flow) = waiting();
    assert!(scheduler.remove(flow).count() > 0);
    assert_eq!(scheduler.next_wakeup(), None, "the flow is gone");

    let (mut scheduler, flow) = waiting();
    assert!(!scheduler.withdraw(flow, |_| true).is_empty());
    scheduler.set(Nanos(0), flow, Qos::default());
    assert_eq!(scheduler.next_wakeup(), None, "nothing waits in the flow");
}

#[test]
fn qos_opened_lets_everything_go() {
    let mut scheduler = Scheduler::default();
    let qos = Qos {
        iops_max: 1,
        ..Qos::default()
    };
    let flow = scheduler.add(Nanos(0), qos);
    for number in 0..100 {
        scheduler.submit(Nanos(0), flow, SMALL, number);
    }
    assert!(scheduler.next(Nanos(0)).is_some());
    assert!(scheduler.next(Nanos(0)).is_none());
    assert_eq!(
        scheduler.withdraw(flow, |number| *number < 50),
        (1..50).collect::<Vec<_>>()
    );
    assert_eq!(scheduler.queued_bytes(flow), 50 * 4096);
    scheduler.open();
    for number in 50..100 {
        assert_eq!(scheduler.next(Nanos(0)).map(|(item, _)| item), Some(number));
    }
    assert_eq!(scheduler.queued_bytes(flow), 0);
    assert_eq!(scheduler.queued_bytes_of_all(), 0);
}

#[test]
fn qos_limits_hold_over_any_time() {
    limits_hold_over_any_time(Plant::None);
}

#[test]
fn qos_limits_are_reached() {
    limits_are_reached(Plant::None);
}

#[test]
fn qos_burst_is_what_was_saved() {
    burst_is_what_was_saved(Plant::None);
}

#[test]
fn qos_reservation_is_served_beside_noisy_neighbours() {
    reservation_is_served_beside_noisy_neighbours(Plant::None);
}

#[test]
fn qos_reservation_of_a_closed_loop_is_served_and_leaves_the_rest() {
    reservation_of_a_closed_loop_is_served_and_leaves_the_rest(Plant::None);
}

#[test]
fn qos_weights_divide_what_there_is() {
    weights_divide_what_there_is(Plant::None);
}

#[test]
fn qos_change_takes_effect_at_once() {
    change_takes_effect_at_once(Plant::None);
}

#[test]
fn qos_any_load_goes_in_order_and_in_bounded_time() {
    any_load_goes_in_order_and_in_bounded_time(Plant::None);
}

/// Each planted bug is found by the check that is meant to.
#[test]
fn qos_checks_find_planted_bugs() {
    let planted: [(Plant, fn(Plant)); 9] = [
        (Plant::Limitless, limits_hold_over_any_time),
        (Plant::Hoard, limits_hold_over_any_time),
        (Plant::Hoard, burst_is_what_was_saved),
        (
            Plant::Unreserved,
            reservation_of_a_closed_loop_is_served_and_leaves_the_rest,
        ),
        (Plant::Weightless, weights_divide_what_there_is),
        (Plant::Stale, change_takes_effect_at_once),
        (Plant::Reordered, any_load_goes_in_order_and_in_bounded_time),
        (Plant::Forgetful, weights_divide_what_there_is),
        (Plant::Timeless, limits_are_reached),
    ];
    for (plant, check) in planted {
        let found = std::panic::catch_unwind(|| check(plant)).is_err();
        assert!(found, "{plant:?} is not found");
    }
}

#[test]
fn qos_reservation_is_short_only_if_there_was_something_to_do() {
    // A flow that is new has asked for nothing.
    let mut scheduler: Scheduler<u32> = Scheduler::default();
    let flow = scheduler.add(Nanos(SECOND * 9 / 10), reserved(100_000));
    for second in 1..4 {
        assert!(!scheduler.stats(Nanos(second * SECOND), flow).short);
    }
    // All requests are answered at once, by one write of the log: for a moment there is none.
    for (busy, idle, short) in [(900_000, 100_000, true), (100_000, 900_000, false)] {
        let mut scheduler = Scheduler::default();
        let flow = scheduler.add(Nanos(0), reserved(100_000));
        let mut now = 0;
        while now < 3 * SECOND {
            for number in 0..32 {
                scheduler.submit(Nanos(now), flow, SMALL, number);
            }
            let mut tickets = Vec::new();
            while let Some((_, ticket)) = scheduler.next(Nanos(now)) {
                tickets.push(ticket);
            }
            assert_eq!(tickets.len(), 32, "a reservation waits for nobody");
            now += busy;
            for ticket in tickets {
                scheduler.ended(Nanos(now), ticket);
            }
            now += idle;
        }
        assert_eq!(scheduler.stats(Nanos(now), flow).short, short);
    }
}

#[test]
fn qos_promotion_of_any_length_costs_no_more_than_the_largest_read() {
    let cost = |bytes: u64| {
        let range = SectorRange::new(0, bytes / 512);
        Cost::of(&Request::Promote { range })
    };
    assert_eq!(cost(65536), LARGE);
    assert_eq!(cost(4 << 30).bytes, MIB);
}
