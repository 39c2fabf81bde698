//! Compare eviction policies on synthetic traces: the hit rates behind docs/decisions.
//!
//! `cargo run --release -p hdcs-core --example eviction` prints a table in Markdown. The shipped
//! policy runs through the public interface of the cache; the others keep keys only. The seed is
//! fixed, so the table can be repeated.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use fastrand::Rng;
use hdcs_core::buf::Pool;
use hdcs_core::io::{BlockKey, Nanos};
use hdcs_core::limits::BLOCK_BYTES;
use hdcs_core::read_cache::{CacheConfig, Lookup, ReadCache};

const KEYS: usize = 50_000;
const REQUESTS: usize = 600_000;

#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers");
    }
    fn write_u64(&mut self, key: u64) {
        self.0 = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

type Hash = BuildHasherDefault<KeyHasher>;

/// One access; true on a hit. A miss brings the key in.
trait Policy {
    fn access(&mut self, key: u64) -> bool;
}

struct Lru {
    size: usize,
    time: u64,
    by_key: HashMap<u64, u64, Hash>,
    by_time: BTreeMap<u64, u64>,
}

impl Policy for Lru {
    fn access(&mut self, key: u64) -> bool {
        self.time += 1;
        let before = self.by_key.insert(key, self.time);
        if let Some(before) = before {
            self.by_time.remove(&before);
        } else if self.by_key.len() > self.size
            && let Some((_, oldest)) = self.by_time.pop_first()
        {
            self.by_key.remove(&oldest);
        }
        self.by_time.insert(self.time, key);
        before.is_some()
    }
}

/// A ring with a count of up to three uses per place.
struct Clock {
    size: usize,
    places: HashMap<u64, usize, Hash>,
    ring: Vec<(u64, u8)>,
    hand: usize,
}

impl Policy for Clock {
    fn access(&mut self, key: u64) -> bool {
        if let Some(&place) = self.places.get(&key) {
            self.ring[place].1 = (self.ring[place].1 + 1).min(3);
            return true;
        }
        if self.ring.len() < self.size {
            self.places.insert(key, self.ring.len());
            self.ring.push((key, 0));
            return false;
        }
        while self.ring[self.hand].1 > 0 {
            self.ring[self.hand].1 -= 1;
            self.hand = (self.hand + 1) % self.size;
        }
        self.places.remove(&self.ring[self.hand].0);
        self.ring[self.hand] = (key, 0);
        self.places.insert(key, self.hand);
        self.hand = (self.hand + 1) % self.size;
        false
    }
}

/// SIEVE (NSDI 2024): a queue with one visited bit and a hand that moves from old to new.
struct Sieve {
    size: usize,
    nodes: Vec<(u64, bool, usize, usize)>,
    free: Vec<usize>,
    places: HashMap<u64, usize, Hash>,
    newest: usize,
    oldest: usize,
    hand: usize,
}

const NONE: usize = usize::MAX;

impl Policy for Sieve {
    fn access(&mut self, key: u64) -> bool {
        if let Some(&place) = self.places.get(&key) {
            self.nodes[place].1 = true;
            return true;
        }
        if self.places.len() == self.size {
            let mut at = if self.hand == NONE {
                self.oldest
            } else {
                self.hand
            };
            while self.nodes[at].1 {
                self.nodes[at].1 = false;
                at = if self.nodes[at].2 == NONE {
                    self.oldest
                } else {
                    self.nodes[at].2
                };
            }
            let (old, _, newer, older) = self.nodes[at];
            self.hand = newer;
            match newer {
                NONE => self.newest = older,
                _ => self.nodes[newer].3 = older,
            }
            match older {
                NONE => self.oldest = newer,
                _ => self.nodes[older].2 = newer,
            }
            self.places.remove(&old);
            self.free.push(at);
        }
        let node = (key, false, NONE, self.newest);
        let at = if let Some(at) = self.free.pop() {
            self.nodes[at] = node;
            at
        } else {
            self.nodes.push(node);
            self.nodes.len() - 1
        };
        match self.newest {
            NONE => self.oldest = at,
            newest => self.nodes[newest].2 = at,
        }
        self.newest = at;
        self.places.insert(key, at);
        false
    }
}

/// S3-FIFO as published (SOSP 2023): queues, and a ghost of exact keys as long as the main queue.
struct S3Fifo {
    size: usize,
    uses: HashMap<u64, u8, Hash>,
    small: VecDeque<u64>,
    main: VecDeque<u64>,
    ghost: VecDeque<u64>,
    in_ghost: HashSet<u64, Hash>,
}

impl S3Fifo {
    fn evict(&mut self) {
        if self.small.len() > self.size / 10 || self.main.is_empty() {
            while let Some(key) = self.small.pop_front() {
                if self.uses[&key] > 1 {
                    self.main.push_back(key);
                    continue;
                }
                self.uses.remove(&key);
                if self.in_ghost.insert(key) {
                    self.ghost.push_back(key);
                }
                if self.ghost.len() > self.size * 9 / 10
                    && let Some(old) = self.ghost.pop_front()
                {
                    self.in_ghost.remove(&old);
                }
                return;
            }
        }
        while let Some(key) = self.main.pop_front() {
            let uses = self.uses.get_mut(&key).expect("what is queued is counted");
            if *uses == 0 {
                self.uses.remove(&key);
                return;
            }
            *uses -= 1;
            self.main.push_back(key);
        }
    }
}

impl Policy for S3Fifo {
    fn access(&mut self, key: u64) -> bool {
        if let Some(uses) = self.uses.get_mut(&key) {
            *uses = (*uses + 1).min(3);
            return true;
        }
        while self.uses.len() >= self.size {
            self.evict();
        }
        self.uses.insert(key, 0);
        if self.in_ghost.remove(&key) {
            self.ghost.retain(|&ghost| ghost != key);
            self.main.push_back(key);
        } else {
            self.small.push_back(key);
        }
        false
    }
}

struct Shipped(ReadCache);

impl Policy for Shipped {
    fn access(&mut self, key: u64) -> bool {
        let key = BlockKey::new(1, key);
        if matches!(self.0.lookup(key), Lookup::Dram(_)) {
            return true;
        }
        self.0.fill_block(key, &[0; BLOCK_BYTES]);
        false
    }
}

struct Zipf(Vec<f64>);

impl Zipf {
    fn new(exponent: f64) -> Self {
        let mut sum = 0.0;
        let mut cumulative: Vec<f64> = (1..=KEYS)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        for part in &mut cumulative {
            *part /= sum;
        }
        Self(cumulative)
    }

    fn draw(&self, random: &mut Rng) -> u64 {
        let point = random.f64();
        let rank = self.0.partition_point(|&part| part < point);
        // Spread the ranks over the volume.
        (rank.min(KEYS - 1) as u64 * 7919) % KEYS as u64
    }
}

fn traces() -> Vec<(&'static str, Vec<u64>)> {
    let mut random = Rng::with_seed(20_261_121);
    let mut draw = |exponent: f64| -> Vec<u64> {
        let zipf = Zipf::new(exponent);
        (0..REQUESTS).map(|_| zipf.draw(&mut random)).collect()
    };
    let (mild, steep) = (draw(0.9), draw(1.2));
    // Every other burst of 5,000 requests is part of a backup that reads each block once.
    let mut next = 1_000_000;
    let scan = mild
        .chunks(5_000)
        .enumerate()
        .flat_map(|(burst, requests)| {
            let scanned: Vec<u64> = (next..next + requests.len() as u64).collect();
            next += requests.len() as u64;
            if burst % 2 == 0 {
                requests.to_vec()
            } else {
                scanned
            }
        })
        .collect();
    let around = (0..REQUESTS as u64).map(|request| request % (KEYS as u64 * 12 / 100));
    // The working set moves on by a tenth of the volume now and then.
    let shifting = steep
        .iter()
        .enumerate()
        .map(|(request, &key)| (key + (request / 100_000 * KEYS / 10) as u64) % KEYS as u64);
    vec![
        ("zipf 0.9", mild.clone()),
        ("zipf 1.2", steep.clone()),
        ("zipf 0.9 + scans", scan),
        ("zipf 1.2, shifting", shifting.collect()),
        ("loop over 12 %", around.collect()),
    ]
}

fn policies(size: usize) -> [Box<dyn Policy>; 5] {
    let config = CacheConfig {
        dram_blocks: size,
        ssd: None,
        ssd_answer_max: Nanos::from_millis(5_000),
    };
    [
        Box::new(Lru {
            size,
            time: 0,
            by_key: HashMap::default(),
            by_time: BTreeMap::new(),
        }),
        Box::new(Clock {
            size,
            places: HashMap::default(),
            ring: Vec::new(),
            hand: 0,
        }),
        Box::new(Sieve {
            size,
            nodes: Vec::new(),
            free: Vec::new(),
            places: HashMap::default(),
            newest: NONE,
            oldest: NONE,
            hand: NONE,
        }),
        Box::new(S3Fifo {
            size,
            uses: HashMap::default(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: VecDeque::new(),
            in_ghost: HashSet::default(),
        }),
        Box::new(Shipped(ReadCache::new(
            config,
            Nanos(0),
            Pool::new(1 << 20),
            &mut Vec::new(),
        ))),
    ]
}

fn main() {
    println!("| trace | cache | LRU | CLOCK, 2 bits | SIEVE | S3-FIFO | shipped |");
    println!("|---|---|---|---|---|---|---|");
    for (name, trace) in traces() {
        for percent in [1, 5, 10, 20] {
            print!("| {name} | {percent} % |");
            for mut policy in policies(KEYS * percent / 100) {
                let hits = trace.iter().filter(|&&key| policy.access(key)).count();
                print!(" {:.1} |", 100.0 * hits as f64 / trace.len() as f64);
            }
            println!();
        }
    }
}
