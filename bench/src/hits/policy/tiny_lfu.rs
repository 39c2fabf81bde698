//! W-TinyLFU (ACM ToS 2017) with the hill climber of Caffeine: a window in LRU order before a
//! segmented LRU; what leaves the window replaces a victim that is less frequent, by a counting
//! sketch of four bits that is halved after ten times the cache's size.

use super::Policy;
use super::order::Order;

const ROWS: usize = 4;
const COUNT_MAX: u8 = 15;
/// Accesses between halvings, and between steps of the climber, in sizes of the cache.
const SAMPLE: usize = 10;
/// A step of the climber, its decay, and the change of the hit rate that starts it anew.
const STEP: f64 = 0.0625;
const STEP_DECAY: f64 = 0.98;
const RESTART: f64 = 0.05;

struct Sketch {
    counts: Vec<u8>,
    mask: u64,
    additions: usize,
    halve_at: usize,
}

impl Sketch {
    fn new(size: usize) -> Self {
        let width = (4 * size).next_power_of_two();
        Self {
            counts: vec![0; ROWS * width],
            mask: width as u64 - 1,
            additions: 0,
            halve_at: SAMPLE * size,
        }
    }

    fn places(&self, key: u64) -> [usize; ROWS] {
        let mut hash = key;
        std::array::from_fn(|row| {
            hash = (hash ^ (hash >> 31)).wrapping_add(0x9e37_79b9_7f4a_7c15);
            hash = hash.wrapping_mul(0xbf58_476d_1ce4_e5b9);
            row * (self.mask as usize + 1) + ((hash >> 24) & self.mask) as usize
        })
    }

    fn add(&mut self, key: u64) {
        for place in self.places(key) {
            self.counts[place] = (self.counts[place] + 1).min(COUNT_MAX);
        }
        self.additions += 1;
        if self.additions >= self.halve_at {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.additions /= 2;
        }
    }

    fn count(&self, key: u64) -> u8 {
        let places = self.places(key).into_iter();
        places.map(|place| self.counts[place]).min().unwrap_or(0)
    }
}

/// See the module.
pub struct WTinyLfu {
    size: usize,
    /// How much of the cache is the window.
    window_max: f64,
    window: Order,
    probation: Order,
    protected: Order,
    sketch: Sketch,
    accesses: usize,
    hits: usize,
    hit_rate: f64,
    step: f64,
}

impl WTinyLfu {
    pub fn new(size: usize) -> Self {
        Self {
            size,
            window_max: (size as f64 / 100.0).max(1.0),
            window: Order::default(),
            probation: Order::default(),
            protected: Order::default(),
            sketch: Sketch::new(size),
            accesses: 0,
            hits: 0,
            hit_rate: 0.0,
            step: -STEP,
        }
    }

    fn find(&mut self, key: u64) -> bool {
        if self.window.contains(key) {
            self.window.put(key);
        } else if self.protected.contains(key) || self.probation.remove(key) {
            self.protected.put(key);
            self.demote();
        } else {
            return false;
        }
        true
    }

    /// Four fifths of what is not the window are for what was used again.
    fn demote(&mut self) {
        let main = self.size as f64 - self.window_max;
        while self.protected.len() as f64 > 0.8 * main {
            if let Some(key) = self.protected.take_oldest() {
                self.probation.put(key);
            }
        }
    }

    fn evict(&mut self) {
        let mut candidate = None;
        while self.window.len() > self.window_max as usize {
            candidate = self.window.take_oldest();
            if let Some(key) = candidate {
                self.probation.put(key);
            }
        }
        while self.window.len() + self.probation.len() + self.protected.len() > self.size {
            let victim = self.probation.oldest().or(self.protected.oldest());
            let Some(victim) = victim.or(self.window.oldest()) else {
                return;
            };
            let loser = match candidate.take() {
                Some(candidate) if self.sketch.count(candidate) <= self.sketch.count(victim) => {
                    candidate
                }
                _ => victim,
            };
            let _ = self.probation.remove(loser)
                || self.protected.remove(loser)
                || self.window.remove(loser);
        }
    }

    fn climb(&mut self) {
        if self.accesses < SAMPLE * self.size {
            return;
        }
        let rate = self.hits as f64 / self.accesses as f64;
        let change = rate - self.hit_rate;
        let step = if change >= 0.0 { self.step } else { -self.step };
        self.step = if change.abs() >= RESTART {
            STEP.copysign(step)
        } else {
            step * STEP_DECAY
        };
        (self.hit_rate, self.accesses, self.hits) = (rate, 0, 0);
        let size = self.size as f64;
        self.window_max = (self.window_max + step * size).clamp(1.0, 0.8 * size);
        self.demote();
    }
}

impl Policy for WTinyLfu {
    fn access(&mut self, key: u64) -> bool {
        self.sketch.add(key);
        self.accesses += 1;
        let hit = self.find(key);
        self.hits += usize::from(hit);
        if !hit {
            self.window.put(key);
            self.evict();
        }
        self.climb();
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hits::policy::hits;

    #[test]
    fn sketch_counts_and_halves() {
        let mut sketch = Sketch::new(100);
        for _ in 0..20 {
            sketch.add(7);
        }
        (0..5).for_each(|_| sketch.add(8));
        assert_eq!(
            (sketch.count(7), sketch.count(8), sketch.count(9)),
            (15, 5, 0)
        );
        (0..975).for_each(|other| sketch.add(1000 + other % 50));
        assert!((7..=9).contains(&sketch.count(7)), "{}", sketch.count(7));
    }

    #[test]
    fn w_tiny_lfu_admits_only_what_is_more_frequent() {
        let mut cache = WTinyLfu::new(4);
        assert_eq!(hits(&mut cache, &[1, 2, 3, 1, 2, 3]), "...hhh");
        // Each of these was seen once: none of the three gives way to it.
        let scan: Vec<u64> = (10..30).collect();
        assert_eq!(hits(&mut cache, &scan), ".".repeat(20));
        assert_eq!(hits(&mut cache, &[1, 2, 3]), "hhh");
        // Seen often enough, it comes in.
        assert!(hits(&mut cache, &[9, 40, 9, 41, 9, 42, 9, 43, 9, 44, 9]).ends_with('h'));
    }
}
