//! What a client asks, drawn from a seed: sizes, alignments, hot ranges, kinds.

use fastrand::Rng;
use hdcs_core::base::io::{ExtentKind, SectorRange};
use hdcs_core::base::limits::{BLOCK_SECTORS, REQUEST_BYTES_MAX, SECTOR_BYTES};

use crate::content::Content;

const REQUEST_SECTORS_MAX: u64 = (REQUEST_BYTES_MAX / SECTOR_BYTES) as u64;

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct Behaviour {
    /// Requests in flight.
    pub depth: usize,
    /// Largest request in sectors.
    pub sectors_max: u64,
    /// Share of requests in percent that are whole blocks.
    pub aligned_percent: u32,
    /// Share of requests in percent that go to the hot ranges.
    pub hot_percent: u32,
    /// Share of reads in percent.
    pub read_percent: u32,
    /// Share of write-zeroes and discards among the writes in percent.
    pub trim_percent: u32,
    /// Share of writes in percent with FUA.
    pub fua_percent: u32,
    /// Share of writes in percent that repeat a pattern.
    pub pattern_percent: u32,
    /// One request in so many is a flush; 0 for never.
    pub flush_one_in: u32,
    /// One request in so many is something else: promote, evict, extents, a bad one.
    pub odd_one_in: u32,
    /// Reads run on from where the last one ended, this often in percent.
    pub sequential_percent: u32,
    /// Patterns there are.
    pub patterns: u32,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub enum Ask {
    /// Read.
    Read(SectorRange),
    /// Write data of its own, or a pattern.
    Write(SectorRange, Option<Content>, bool),
    /// Write zeroes: FUA, no hole.
    WriteZeroes(SectorRange, bool, bool),
    /// Discard.
    Discard(SectorRange, bool),
    /// Flush.
    Flush,
    /// Promote.
    Promote(SectorRange),
    /// Evict.
    Evict(SectorRange),
    /// Extents.
    Extents(SectorRange, ExtentKind),
    /// A read, or a discard, that must be refused.
    Bad(SectorRange, bool),
}

/// One client.
#[derive(Debug)]
pub struct Workload {
    behaviour: Behaviour,
    hot: Vec<u64>,
    stream: u64,
    /// Zeroes that the next request may go on with, as one that cuts a long range does.
    zeroes: Option<Ask>,
    random: Rng,
}

impl Behaviour {
    /// A behaviour from a seed.
    pub fn draw(random: &mut Rng) -> Self {
        let depth = [1, 2, 4, 8, 16, 32, 64];
        let sectors_max = [8, 16, 64, 64, 256, REQUEST_SECTORS_MAX];
        Self {
            depth: depth[random.usize(..depth.len())],
            sectors_max: sectors_max[random.usize(..sectors_max.len())],
            aligned_percent: random.u32(..=100),
            hot_percent: random.u32(..=90),
            read_percent: random.u32(5..=70),
            trim_percent: random.u32(..=20),
            fua_percent: [0, 0, 2, 10, 50][random.usize(..5)],
            pattern_percent: [0, 10, 50][random.usize(..3)],
            flush_one_in: [0, 4, 20, 20, 100][random.usize(..5)],
            odd_one_in: [15, 100][random.usize(..2)],
            sequential_percent: [0, 0, 20, 80][random.usize(..4)],
            patterns: random.u32(1..8),
        }
    }
}

impl Workload {
    /// A client of a volume of `sectors`.
    pub fn new(behaviour: Behaviour, sectors: u64, seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let hot = (0..random.usize(1..4))
            .map(|_| random.u64(..sectors))
            .collect();
        Self {
            behaviour,
            hot,
            stream: 0,
            zeroes: None,
            random,
        }
    }

    /// Requests in flight.
    pub fn depth(&self) -> usize {
        self.behaviour.depth
    }

    /// The next request to a volume of `sectors`.
    pub fn next(&mut self, sectors: u64) -> Ask {
        if let Some(ask) = self.go_on(sectors) {
            self.zeroes = Some(ask);
            return ask;
        }
        let one_in = |random: &mut Rng, count: u32| count > 0 && random.u32(..count) == 0;
        if one_in(&mut self.random, self.behaviour.flush_one_in) {
            return Ask::Flush;
        }
        if one_in(&mut self.random, self.behaviour.odd_one_in) {
            return self.odd(sectors);
        }
        if self.percent(self.behaviour.read_percent) {
            return Ask::Read(self.read_range(sectors));
        }
        let fua = self.percent(self.behaviour.fua_percent);
        if self.percent(self.behaviour.trim_percent) {
            let range = self.long_range(sectors);
            let ask = if self.random.bool() {
                Ask::WriteZeroes(range, fua, self.random.bool())
            } else {
                Ask::Discard(range, fua)
            };
            self.zeroes = Some(ask);
            return ask;
        }
        let pattern = self.percent(self.behaviour.pattern_percent);
        let content = pattern.then(|| Content::Pattern(self.random.u32(..self.behaviour.patterns)));
        Ask::Write(self.range(sectors), content, fua)
    }

    /// Zeroes behind the last ones.
    fn go_on(&mut self, sectors: u64) -> Option<Ask> {
        let last = self.zeroes.take()?;
        let (Ask::WriteZeroes(range, ..) | Ask::Discard(range, _)) = last else {
            unreachable!("they are zeroes");
        };
        if range.end() >= sectors || self.random.bool() {
            return None;
        }
        let left = (sectors - range.end()).min(self.behaviour.sectors_max);
        let range = SectorRange::new(range.end(), self.random.u64(1..=left));
        let fua = self.percent(self.behaviour.fua_percent);
        Some(match last {
            Ask::WriteZeroes(_, _, no_hole) => Ask::WriteZeroes(range, fua, no_hole),
            _ => Ask::Discard(range, fua),
        })
    }

    fn odd(&mut self, sectors: u64) -> Ask {
        match self.random.u8(..8) {
            0 | 1 => Ask::Promote(self.long_range(sectors)),
            2 => Ask::Evict(self.long_range(sectors)),
            3 | 4 => Ask::Extents(self.long_range(sectors), ExtentKind::Allocation),
            5 => Ask::Extents(self.long_range(sectors), ExtentKind::Cache),
            6 => Ask::Bad(
                SectorRange::new(self.random.u64(..=sectors), 0),
                self.random.bool(),
            ),
            _ => {
                let beyond = [
                    sectors,
                    sectors - 1,
                    sectors * 2,
                    u64::MAX / SECTOR_BYTES as u64 - 8,
                ];
                let start = beyond[self.random.usize(..beyond.len())];
                Ask::Bad(SectorRange::new(start, 2), self.random.bool())
            }
        }
    }

    fn percent(&mut self, percent: u32) -> bool {
        self.random.u32(..100) < percent
    }

    fn start(&mut self, sectors: u64) -> u64 {
        if self.percent(self.behaviour.hot_percent) {
            let hot = self.hot[self.random.usize(..self.hot.len())];
            (hot + self.random.u64(..64)) % sectors
        } else {
            self.random.u64(..sectors)
        }
    }

    /// A range of at most the largest request, which does not cross a multiple of it.
    fn range(&mut self, sectors: u64) -> SectorRange {
        let start = self.start(sectors);
        let longest = self.behaviour.sectors_max;
        let limit = if self.random.bool() {
            longest
        } else {
            longest.min(8)
        };
        let count = 1 + self.random.u64(..limit);
        self.fit(start, count, sectors)
    }

    fn fit(&mut self, start: u64, count: u64, sectors: u64) -> SectorRange {
        let (mut start, mut end) = (start, start + count);
        if self.percent(self.behaviour.aligned_percent) {
            start -= start % BLOCK_SECTORS;
            end = end.next_multiple_of(BLOCK_SECTORS);
        }
        let boundary = (start / REQUEST_SECTORS_MAX + 1) * REQUEST_SECTORS_MAX;
        SectorRange::between(start, end.min(boundary).min(sectors))
    }

    fn read_range(&mut self, sectors: u64) -> SectorRange {
        let range = if self.percent(self.behaviour.sequential_percent) && self.stream < sectors {
            let count = 1 + self.random.u64(..self.behaviour.sectors_max);
            self.fit(self.stream, count, sectors)
        } else {
            self.range(sectors)
        };
        self.stream = range.end();
        range
    }

    /// A range that may be of any length.
    fn long_range(&mut self, sectors: u64) -> SectorRange {
        if self.random.u32(..4) > 0 {
            return self.range(sectors);
        }
        let start = self.start(sectors);
        SectorRange::new(start, self.random.u64(1..=sectors - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workload_asks_within_bounds_and_overlaps_itself() {
        for seed in 0..20 {
            let mut random = Rng::with_seed(seed);
            let behaviour = Behaviour::draw(&mut random);
            let sectors = random.u64(8..5000);
            let mut workload = Workload::new(behaviour, sectors, seed);
            for _ in 0..2000 {
                match workload.next(sectors) {
                    Ask::Read(range) | Ask::Write(range, ..) => {
                        assert!(!range.is_empty() && range.end() <= sectors, "{range:?}");
                        let pieces = range.start / REQUEST_SECTORS_MAX
                            ..=(range.end() - 1) / REQUEST_SECTORS_MAX;
                        assert_eq!(pieces.count(), 1, "{range:?} crosses a boundary");
                    }
                    Ask::WriteZeroes(range, ..)
                    | Ask::Discard(range, _)
                    | Ask::Promote(range)
                    | Ask::Evict(range)
                    | Ask::Extents(range, _) => {
                        assert!(!range.is_empty() && range.end() <= sectors, "{range:?}");
                    }
                    Ask::Bad(range, _) => assert!(range.is_empty() || range.end() > sectors),
                    Ask::Flush => {}
                }
            }
        }
    }
}
