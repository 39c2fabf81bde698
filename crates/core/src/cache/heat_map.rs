//! Heat maps: what of a volume its cache holds and how much that was used, so that another cache can be
//! warmed up like it.
//!
//! ```text
//! cache ──a bounded step at a time──► Gathering ──finish──► HeatMap ◄──encode, parse──► file
//!                                                              └──plan──► ranges, the hottest first
//! ```
//!
//! Invariants:
//! 1. A map covers its volume exactly: units of one size, the last one perhaps cut short.
//! 2. Memory is bounded whatever the sizes of volume and cache: beyond [`HEAT_UNITS_MAX`] units or
//!    [`HEAT_RUNS_MAX`] runs the units become larger, and a unit is as hot as the hottest part of it.
//! 3. There is one encoding of a map, and nothing else is accepted: what was parsed encodes to the same bytes.
//!
//! A map is a hint. What changes while it is gathered may be in it, twice or not at all.

use alloc::vec;
use alloc::vec::Vec;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::error::FormatError;
use crate::base::io::SectorRange;
use crate::base::limits::{
    BLOCK_BYTES, HEAT_RUNS_MAX, HEAT_UNITS_MAX, SECTOR_BYTES, VOLUME_BYTES_MAX, VOLUME_BYTES_MIN,
};
use crate::format::{Field, Structure, on_disk, seal, verify};

/// First bytes of a heat map.
pub const HEAT_MAGIC: [u8; 8] = *b"HDCSHEAT";
/// The newest version of heat maps.
pub const HEAT_VERSION: u16 = 1;
/// The largest encoded map.
pub const HEAT_BYTES_MAX: usize = size_of::<HeatHeader>() + HEAT_RUNS_MAX * size_of::<HeatRun>();
/// Bits of a run that tell its heat; the others count its units.
const HEAT_BITS: u32 = 2;

on_disk! {
    /// The head of a heat map.
    HeatHeader: 64 bytes {
        /// `HDCSHEAT`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Zero.
        reserved_a: [u8; 6],
        /// CRC-64/NVME of the whole map with this field zero.
        checksum: U64,
        /// Size of the volume in bytes.
        bytes: U64,
        /// Blocks of one unit: a line of the read cache, or that times a power of two.
        unit_blocks: U32,
        /// Runs.
        runs: U32,
        /// Zero.
        reserved_b: [u8; 24],
    }
}

on_disk! {
    /// One run of a heat map: units that are equally hot.
    HeatRun: 4 bytes {
        /// Heat (0 cold, 1 cool, 2 warm, 3 hot) in the lowest two bits, above them the number of units.
        run: U32,
    }
}

/// How hot a part of a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Heat {
    /// Not cached.
    Cold,
    /// In the SSD tier, and not used since it came there.
    Cool,
    /// In the SSD tier and used once, or in memory and not used since it came there.
    Warm,
    /// In memory and used, or in the SSD tier and used more than once.
    Hot,
}

impl Heat {
    const fn of_bits(bits: u32) -> Self {
        match bits & 3 {
            0 => Self::Cold,
            1 => Self::Cool,
            2 => Self::Warm,
            _ => Self::Hot,
        }
    }
}

/// Which parts of a volume are how hot; see the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeatMap {
    bytes: u64,
    unit_blocks: u32,
    /// As in the format.
    runs: Vec<u32>,
}

/// What to fetch for a map, and what is left out of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The hottest first, and those that are equally hot by address.
    pub ranges: Vec<SectorRange>,
    /// Bytes of them.
    pub bytes: u64,
    /// Bytes of the map that lie beyond the end of the volume.
    pub beyond_bytes: u64,
    /// Bytes, the coolest ones, for which the cache has no room.
    pub over_bytes: u64,
}

fn units_of(bytes: u64, unit_blocks: u32) -> u64 {
    bytes.div_ceil(u64::from(unit_blocks) * BLOCK_BYTES as u64)
}

impl HeatMap {
    /// Size of the volume that it is of, in bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of one unit.
    pub const fn unit_bytes(&self) -> u64 {
        self.unit_blocks as u64 * BLOCK_BYTES as u64
    }

    /// First byte, end and heat of each run, in order.
    pub fn runs(&self) -> impl Iterator<Item = (u64, u64, Heat)> + '_ {
        let mut unit = 0;
        self.runs.iter().map(move |&run| {
            let first = unit * self.unit_bytes();
            unit += u64::from(run >> HEAT_BITS);
            let end = (unit * self.unit_bytes()).min(self.bytes);
            (first, end, Heat::of_bits(run))
        })
    }

    /// Whether nothing of the volume is cached.
    pub fn is_cold(&self) -> bool {
        self.runs().all(|(.., heat)| heat == Heat::Cold)
    }

    /// What a volume of `volume_bytes` fetches for it into a cache that has room for `room_bytes`.
    pub fn plan(&self, volume_bytes: u64, room_bytes: u64) -> Plan {
        let mut plan = Plan::default();
        let sector = SECTOR_BYTES as u64;
        for heat in [Heat::Hot, Heat::Warm, Heat::Cool] {
            for (first, end, _) in self.runs().filter(|(.., of)| *of == heat) {
                let inside = end.min(volume_bytes).max(first);
                plan.beyond_bytes += end - inside;
                let left = (room_bytes - plan.bytes) / self.unit_bytes() * self.unit_bytes();
                let taken = inside.min(first.saturating_add(left));
                plan.over_bytes += inside - taken;
                if first < taken {
                    plan.bytes += taken - first;
                    let range = SectorRange::between(first / sector, taken / sector);
                    plan.ranges.push(range);
                }
            }
        }
        plan
    }

    /// The map as a file has it.
    pub fn encode(&self) -> Vec<u8> {
        let mut header = HeatHeader::new_zeroed();
        header.magic = HEAT_MAGIC;
        header.version = U16::new(HEAT_VERSION);
        header.bytes = U64::new(self.bytes);
        header.unit_blocks = U32::new(self.unit_blocks);
        header.runs = U32::new(self.runs.len() as u32);
        let mut out = header.as_bytes().to_vec();
        for &run in &self.runs {
            out.extend(run.to_le_bytes());
        }
        seal(&mut out);
        out
    }

    /// The map that a file has.
    pub fn parse(encoded: &[u8]) -> Result<Self, FormatError> {
        let (header, rest) =
            HeatHeader::read_from_prefix(encoded).map_err(|_| FormatError::Field("length"))?;
        verify(encoded, HEAT_MAGIC, HEAT_VERSION)?;
        let (bytes, unit_blocks) = (header.bytes.get(), header.unit_blocks.get());
        let count = header.runs.get() as usize;
        if header.reserved_a != [0; 6] || header.reserved_b != [0; 24] {
            return Err(FormatError::Field("reserved"));
        }
        if !(VOLUME_BYTES_MIN..=VOLUME_BYTES_MAX).contains(&bytes)
            || !bytes.is_multiple_of(SECTOR_BYTES as u64)
        {
            return Err(FormatError::Field("bytes"));
        }
        if !unit_blocks.is_power_of_two() || units_of(bytes, unit_blocks) > HEAT_UNITS_MAX as u64 {
            return Err(FormatError::Field("unit_blocks"));
        }
        if count > HEAT_RUNS_MAX || rest.len() != count * size_of::<HeatRun>() {
            return Err(FormatError::Field("runs"));
        }
        let words = rest.chunks_exact(size_of::<HeatRun>());
        let runs: Vec<u32> = words
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let units: u64 = runs.iter().map(|&run| u64::from(run >> HEAT_BITS)).sum();
        let is_empty = |&run: &u32| run >> HEAT_BITS == 0;
        let is_split = |pair: &[u32]| Heat::of_bits(pair[0]) == Heat::of_bits(pair[1]);
        if units != units_of(bytes, unit_blocks)
            || runs.iter().any(is_empty)
            || runs.windows(2).any(is_split)
        {
            return Err(FormatError::Field("run"));
        }
        Ok(Self {
            bytes,
            unit_blocks,
            runs,
        })
    }
}

/// A map in the making: two bits for each unit.
#[derive(Clone, Debug)]
pub struct Gathering {
    bytes: u64,
    unit_blocks: u32,
    cells: Vec<u8>,
    /// Where the walk over the cache goes on.
    pub(crate) at: u64,
}

/// Units in one cell.
const CELL_UNITS: u64 = 4;

impl Gathering {
    /// Nothing yet, of a volume of so many bytes in a cache with lines of so many blocks, a power of two.
    pub fn new(volume_bytes: u64, line_blocks: u64) -> Self {
        let mut unit_blocks = line_blocks as u32;
        while units_of(volume_bytes, unit_blocks) > HEAT_UNITS_MAX as u64 {
            unit_blocks *= 2;
        }
        let cells = units_of(volume_bytes, unit_blocks).div_ceil(CELL_UNITS);
        Self {
            bytes: volume_bytes,
            unit_blocks,
            cells: vec![0; cells as usize],
            at: 0,
        }
    }

    fn units(&self) -> u64 {
        units_of(self.bytes, self.unit_blocks)
    }

    /// The heat of a unit, in two bits.
    fn bits(&self, unit: u64) -> u8 {
        (self.cells[(unit / CELL_UNITS) as usize] >> (unit % CELL_UNITS * 2)) & 3
    }

    /// A block is so hot, at least.
    pub fn see(&mut self, block: u64, heat: Heat) {
        let unit = block / u64::from(self.unit_blocks);
        // The volume may have grown meanwhile.
        if unit < self.units() && self.bits(unit) < heat as u8 {
            let shift = unit % CELL_UNITS * 2;
            let cell = &mut self.cells[(unit / CELL_UNITS) as usize];
            *cell = (*cell & !(3 << shift)) | (heat as u8) << shift;
        }
    }

    fn runs(&self) -> Vec<u32> {
        let mut runs: Vec<u32> = Vec::new();
        for unit in 0..self.units() {
            let bits = u32::from(self.bits(unit));
            let is_full = runs.len() > HEAT_RUNS_MAX;
            match runs.last_mut() {
                Some(last) if *last & 3 == bits => *last += 1 << HEAT_BITS,
                _ if is_full => break,
                _ => runs.push(1 << HEAT_BITS | bits),
            }
        }
        runs
    }

    /// The map. Takes time in proportion to the number of units: not for a thread that serves clients.
    pub fn finish(mut self) -> HeatMap {
        loop {
            let runs = self.runs();
            if runs.len() <= HEAT_RUNS_MAX {
                return HeatMap {
                    bytes: self.bytes,
                    unit_blocks: self.unit_blocks,
                    runs,
                };
            }
            let mut coarser = Self::new(self.bytes, u64::from(self.unit_blocks) * 2);
            for unit in 0..self.units() {
                let heat = Heat::of_bits(u32::from(self.bits(unit)));
                coarser.see(unit * u64::from(self.unit_blocks), heat);
            }
            self = coarser;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Of 1 MiB and a sector, in units of 16 KiB: block 0 hot, blocks 8 to 15 cool, the last unit warm.
    fn example() -> HeatMap {
        let mut gathering = Gathering::new(MIB + 512, 4);
        gathering.see(1, Heat::Cool);
        gathering.see(0, Heat::Hot);
        (8..16).for_each(|block| gathering.see(block, Heat::Cool));
        gathering.see(256, Heat::Warm);
        // Beyond the end.
        gathering.see(260, Heat::Hot);
        gathering.finish()
    }

    #[test]
    fn heat_map_has_runs_that_cover_the_volume() {
        let map = example();
        let runs: Vec<_> = map.runs().collect();
        let kib = 1024;
        assert_eq!(
            runs,
            vec![
                (0, 16 * kib, Heat::Hot),
                (16 * kib, 32 * kib, Heat::Cold),
                (32 * kib, 64 * kib, Heat::Cool),
                (64 * kib, MIB, Heat::Cold),
                (MIB, MIB + 512, Heat::Warm),
            ]
        );
    }

    #[test]
    fn heat_map_parses_what_it_encodes_and_nothing_else() {
        let encoded = example().encode();
        assert_eq!(HeatMap::parse(&encoded), Ok(example()));
        for index in 0..encoded.len() {
            let mut bad = encoded.clone();
            bad[index] ^= 0x10;
            assert!(HeatMap::parse(&bad).is_err(), "byte {index}");
            // Behind a checksum that is right, another map or none, but never one with another encoding.
            seal(&mut bad);
            if let Ok(other) = HeatMap::parse(&bad) {
                assert_eq!(other.encode(), bad, "byte {index}");
            }
            assert!(HeatMap::parse(&encoded[..index]).is_err(), "cut at {index}");
        }
        let mut longer = encoded;
        longer.push(0);
        assert!(HeatMap::parse(&longer).is_err());
        seal(&mut longer);
        assert!(HeatMap::parse(&longer).is_err());
    }

    #[test]
    fn heat_map_with_a_run_that_nobody_writes_is_refused() {
        let refused = |change: fn(&mut Vec<u32>)| {
            let mut map = example();
            change(&mut map.runs);
            HeatMap::parse(&map.encode()) == Err(FormatError::Field("run"))
        };
        assert!(!refused(|_| ()));
        assert!(refused(|runs| runs.push(Heat::Hot as u32)), "an empty one");
        let split = |runs: &mut Vec<u32>| runs[0] = 1 << HEAT_BITS | Heat::Cold as u32;
        assert!(refused(split), "two of the same heat");
        assert!(refused(|runs| runs[1] += 1 << HEAT_BITS), "too many units");
    }

    #[test]
    fn heat_map_is_planned_hottest_first_within_volume_and_room() {
        let ranges = |plan: &Plan| -> Vec<(u64, u64)> {
            let range = |range: &SectorRange| (range.start / 8, range.end().div_ceil(8));
            plan.ranges.iter().map(range).collect()
        };
        let plan = example().plan(2 * MIB, MIB);
        assert_eq!(ranges(&plan), vec![(0, 4), (256, 257), (8, 16)]);
        assert_eq!((plan.beyond_bytes, plan.over_bytes), (0, 0));
        assert_eq!(plan.bytes, (16 << 10) + 512 + (32 << 10));
        let cut = example().plan(48 << 10, MIB);
        assert_eq!(ranges(&cut), vec![(0, 4), (8, 12)]);
        assert_eq!(cut.beyond_bytes, 512 + (16 << 10));
        // Room for whole units only, and for the hottest.
        let small = example().plan(2 * MIB, 40 << 10);
        assert_eq!(ranges(&small), vec![(0, 4), (256, 257), (8, 12)]);
        assert_eq!(small.over_bytes, 16 << 10);
        assert_eq!(example().plan(2 * MIB, 0).ranges, vec![]);
        assert_eq!(example().plan(u64::MAX, u64::MAX), plan);
    }

    #[test]
    fn heat_map_of_the_largest_volume_is_bounded() {
        let mut gathering = Gathering::new(VOLUME_BYTES_MAX, 2);
        assert!(gathering.units() <= HEAT_UNITS_MAX as u64);
        let last = VOLUME_BYTES_MAX / BLOCK_BYTES as u64 - 1;
        gathering.see(last, Heat::Hot);
        let map = gathering.finish();
        let hot = map.runs().last();
        let first = VOLUME_BYTES_MAX - map.unit_bytes();
        assert_eq!(hot, Some((first, VOLUME_BYTES_MAX, Heat::Hot)));
        assert_eq!(HeatMap::parse(&map.encode()), Ok(map));
    }

    #[test]
    fn heat_map_of_too_many_runs_becomes_coarser_and_loses_nothing() {
        let runs = HEAT_RUNS_MAX as u64;
        let mut gathering = Gathering::new(runs * 16 * 4 * BLOCK_BYTES as u64, 4);
        (0..runs).for_each(|run| gathering.see(run * 16 * 4, Heat::Warm));
        let map = gathering.finish();
        // Hot and cold units alternate until a unit is as large as their distance.
        assert_eq!(map.unit_bytes(), 16 * 4 * BLOCK_BYTES as u64);
        let all: Vec<_> = map.runs().collect();
        assert_eq!(all, vec![(0, map.bytes(), Heat::Warm)]);
        let mut gathering = Gathering::new(runs / 2 * 16 * 4 * BLOCK_BYTES as u64, 4);
        (0..runs / 2).for_each(|run| gathering.see(run * 16 * 4, Heat::Warm));
        let map = gathering.finish();
        assert_eq!(map.runs().count() as u64, runs);
        assert!(map.encode().len() <= HEAT_BYTES_MAX);
    }
}
