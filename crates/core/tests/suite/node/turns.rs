//! Turns of clients that ask for all they can get, beside some that ask for little.

use std::collections::VecDeque;

use hdcs_core::base::limits::{TURN_WORK, TURN_WORK_MIN};
use hdcs_core::node::turns::{Account, Turns};

/// A client that wants one request after the other, each of so much work.
struct Client {
    cost: usize,
    /// Turns between an answer and the next request; 0: there is always one more.
    pause: u64,
    account: Account,
    /// Since when its request waits.
    since: Option<u64>,
    work: usize,
    longest_wait: u64,
}

impl Client {
    fn new(cost: usize, pause: u64) -> Self {
        Self {
            cost,
            pause,
            account: Account::default(),
            since: None,
            work: 0,
            longest_wait: 0,
        }
    }
}

/// Clients of a shard, as it serves them.
struct Rig {
    turns: Turns,
    clients: Vec<Client>,
    waiting: VecDeque<usize>,
    turn: u64,
    most_work: usize,
}

impl Rig {
    fn new(clients: Vec<Client>) -> Self {
        Self {
            turns: Turns::default(),
            clients,
            waiting: VecDeque::new(),
            turn: 0,
            most_work: 0,
        }
    }

    /// A client submits what it may; whether it has to wait.
    fn serve(&mut self, number: usize) -> bool {
        let client = &mut self.clients[number];
        let (mut left, mut work) = (self.turns.left(&client.account), 0);
        while client.since.is_some() && left > 0 {
            work += client.cost;
            left = left.saturating_sub(client.cost);
            let waited = self.turn - client.since.take().unwrap_or(self.turn);
            client.longest_wait = client.longest_wait.max(waited);
            if client.pause == 0 {
                client.since = Some(self.turn);
            }
        }
        client.work += work;
        self.turns.note(&mut client.account, work);
        client.since.is_some()
    }

    fn run(&mut self, turns: u64) {
        for _ in 0..turns {
            self.turn += 1;
            self.turns.begin();
            for _ in 0..self.waiting.len() {
                if self.turns.is_spent() {
                    break;
                }
                let number = self.waiting.pop_front().unwrap();
                if self.serve(number) {
                    self.waiting.push_back(number);
                }
            }
            self.turns.open();
            for number in 0..self.clients.len() {
                let client = &mut self.clients[number];
                let is_due = self.turn.is_multiple_of(client.pause.max(1));
                if client.since.is_some() || !is_due {
                    continue;
                }
                client.since = Some(self.turn);
                if self.serve(number) {
                    self.waiting.push_back(number);
                }
            }
            let waiting = std::mem::take(&mut self.waiting);
            for number in waiting {
                if self.serve(number) {
                    self.waiting.push_back(number);
                }
            }
            self.most_work = self.most_work.max(self.turns.spent());
        }
    }
}

/// The most that is asked at once, as descriptions of extents are.
const LARGE: usize = 64;

#[test]
fn turn_is_bounded_however_many_ask_for_much() {
    for (count, cost) in [
        (1, LARGE),
        (16, LARGE),
        (40, LARGE),
        (1000, LARGE),
        (1000, 1),
        (300, 17),
    ] {
        let mut rig = Rig::new((0..count).map(|_| Client::new(cost, 0)).collect());
        rig.run(2000);
        assert!(
            rig.most_work < TURN_WORK + cost,
            "{count} clients: {} in a turn",
            rig.most_work
        );
        // No turn is wasted, and nobody gets much more than another.
        let work = || rig.clients.iter().map(|client| client.work);
        assert!(
            work().sum::<usize>() > 2000 * TURN_WORK * 3 / 4,
            "{count} clients"
        );
        let (least, most) = (work().min().unwrap(), work().max().unwrap());
        assert!(most <= 2 * (least + cost), "{least} to {most} of {count}");
    }
}

#[test]
fn turn_gives_as_much_to_who_asks_for_little_at_a_time() {
    let mut rig = Rig::new([1, LARGE, 17, 4].map(|cost| Client::new(cost, 0)).into());
    rig.run(1000);
    for client in &rig.clients {
        let part = 1000 * TURN_WORK / 4;
        let off = client.work.abs_diff(part);
        assert!(
            off < part / 10,
            "{} of {part} by {}",
            client.work,
            client.cost
        );
    }
}

/// A client that asks now and then is served in the turn in which it asks while there is a part for each, and never
/// waits for more than a round of all.
#[test]
fn turn_serves_a_quiet_client_beside_many_that_ask_for_all() {
    for (count, cost) in [(16, LARGE), (40, LARGE), (30, 1), (900, 1), (900, LARGE)] {
        let mut clients: Vec<_> = (0..count).map(|_| Client::new(cost, 0)).collect();
        clients.insert(count / 2, Client::new(1, 7));
        let mut rig = Rig::new(clients);
        rig.run(3000);
        let quiet = &rig.clients[count / 2];
        let round = (count * cost.max(TURN_WORK_MIN)).div_ceil(TURN_WORK) as u64;
        let most = if count * TURN_WORK_MIN <= TURN_WORK {
            1
        } else {
            2 * round
        };
        assert!(
            quiet.longest_wait <= most,
            "{} turns beside {count} with {cost}",
            quiet.longest_wait
        );
        assert!(quiet.work > 400 / most as usize, "{}", quiet.work);
    }
}

/// A thousand that each ask for the next thing at once when they are answered do not pass those that wait.
#[test]
fn turn_lets_nobody_pass_who_waits() {
    let mut rig = Rig::new((0..1000).map(|_| Client::new(1, 1)).collect());
    rig.run(2000);
    for client in &rig.clients {
        assert!(client.longest_wait <= 9, "{} turns", client.longest_wait);
    }
}
