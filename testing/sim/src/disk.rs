//! A device with a volatile write cache that lies only as its declaration allows.
//!
//! 1. A durable write is durable when it completes; a plain one when the device feels like it.
//! 2. A durable write makes only itself durable (it is FUA, no flush).
//! 3. When power is cut, each 512-byte sector of what was not durable is kept or lost on its own:
//!    of a write in flight, everything, nothing, the beginning, some blocks, or some sectors.
//! 4. A read that races a write sees old or new, sector by sector.
//! 5. A write that failed left old or new, sector by sector.
//! 6. Rot flips bits at rest. It can be undone, so that a run goes on after a refused opening.
//! 7. Once, if it is told to, it breaks these rules in one of the ways of [`Lie`].
//!
//! Times and failures are decided by whoever drives it.

use std::collections::BTreeMap;
use std::ops::Range;

use fastrand::Rng;
use hdcs_core::base::buf::Buf;
use hdcs_core::base::limits::{BLOCK_BYTES, SECTOR_BYTES};

type Block = Box<[u8; BLOCK_BYTES]>;

/// Names one operation in flight.
pub type OpId = u64;

/// How a device lies: what firmware, cables and controllers were seen to do, each once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// A write is acknowledged and never happens.
    LostWrite,
    /// A write is acknowledged and happens in another place.
    MisdirectedWrite,
    /// The durable write that was acknowledged last is undone by a power cut.
    NewestWriteLost,
    /// A cut write damages blocks beside it, in the same unit of 16 to 64 KiB.
    DamagedNeighbour,
    /// A read returns what lies in another place.
    MisdirectedRead,
    /// A read returns bytes that are not on the medium; the next one is right.
    BadRead,
}

impl Lie {
    /// Every one.
    pub const ALL: [Self; 6] = [
        Self::LostWrite,
        Self::MisdirectedWrite,
        Self::NewestWriteLost,
        Self::DamagedNeighbour,
        Self::MisdirectedRead,
        Self::BadRead,
    ];

    fn is_of_writes(self) -> bool {
        matches!(self, Self::LostWrite | Self::MisdirectedWrite)
    }

    fn is_of_reads(self) -> bool {
        matches!(self, Self::MisdirectedRead | Self::BadRead)
    }

    fn is_of_power_cuts(self) -> bool {
        matches!(self, Self::NewestWriteLost | Self::DamagedNeighbour)
    }
}

/// A lie that was told, and the bytes that it was told of: those that are wrong on the medium from then on, or those
/// that were asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// Which.
    pub lie: Lie,
    /// Where.
    pub bytes: Range<u64>,
}

/// When a read looks at the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sampling {
    AtSubmission,
    AtCompletion,
    /// Some sectors then, some later.
    Both,
}

#[derive(Debug)]
enum Op {
    Read {
        offset: u64,
        early: Vec<u8>,
        sampling: Sampling,
    },
    Write {
        offset: u64,
        data: Vec<u8>,
        durable: bool,
    },
}

/// One device.
#[derive(Debug)]
pub struct Disk {
    bytes: u64,
    /// What is on the medium; absent blocks are zero.
    medium: Vec<Option<Block>>,
    /// What was written since and may be lost; the last one is what reads see.
    volatile: BTreeMap<u64, Vec<Block>>,
    ops: BTreeMap<OpId, Op>,
    next_op: OpId,
    /// Counts what has changed what readers see.
    version: u64,
    /// Bits flipped and not overwritten since, by byte offset.
    rot: BTreeMap<u64, u8>,
    /// The lie that is to be told, after so many operations of its kind.
    lie: Option<(Lie, u64)>,
    told: Option<Told>,
    /// What the durable write that was acknowledged last has replaced, while a power cut is to undo it.
    replaced: Option<(u64, Vec<u8>)>,
    random: Rng,
}

/// The bytes of buffers, one after the other.
pub fn joined(data: &[Buf]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(data.iter().map(|buf| buf.len()).sum());
    for buf in data {
        bytes.extend_from_slice(buf);
    }
    bytes
}

impl Disk {
    /// A device of `bytes` zeroes.
    pub fn new(bytes: u64, seed: u64) -> Self {
        assert!(bytes.is_multiple_of(BLOCK_BYTES as u64), "whole blocks");
        Self {
            bytes,
            medium: vec![None; (bytes / BLOCK_BYTES as u64) as usize],
            volatile: BTreeMap::new(),
            ops: BTreeMap::new(),
            next_op: 0,
            version: 0,
            rot: BTreeMap::new(),
            lie: None,
            told: None,
            replaced: None,
            random: Rng::with_seed(seed),
        }
    }

    /// Tell this lie once: at the read or write after `skip` others, or at the power cut after so many.
    pub fn lie_once(&mut self, lie: Lie, skip: u64) {
        self.lie = Some((lie, skip));
    }

    /// The lie that was told last, if any was.
    pub fn told(&self) -> Option<&Told> {
        self.told.as_ref()
    }

    /// Whether a lie of this kind is told now, and which.
    fn lies(&mut self, of: impl Fn(Lie) -> bool) -> Option<Lie> {
        let (lie, skip) = self.lie.as_mut().filter(|(lie, _)| of(*lie))?;
        if let Some(left) = skip.checked_sub(1) {
            *skip = left;
            return None;
        }
        let lie = *lie;
        self.lie = None;
        Some(lie)
    }

    fn tell(&mut self, lie: Lie, offset: u64, bytes: usize) {
        let bytes = offset..offset + bytes as u64;
        self.told = Some(Told { lie, bytes });
    }

    /// Another place of so many bytes: near by or anywhere.
    fn elsewhere(&mut self, offset: u64, bytes: usize) -> Option<u64> {
        let block = BLOCK_BYTES as u64;
        let places = (self.bytes.checked_sub(bytes as u64)?) / block + 1;
        let here = offset / block;
        let place = if self.random.bool() {
            let near = 32.min(places - 1);
            let first = here.saturating_sub(near / 2).min(places - 1 - near);
            self.random.u64(first..=first + near)
        } else {
            self.random.u64(..places)
        };
        (place != here).then_some(place * block)
    }

    /// Another number than before whenever a reader may see something else than before.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Have so many bytes, as a file may: what is cut off is gone, what there is anew is zeroes.
    pub fn resize(&mut self, bytes: u64) {
        assert!(bytes.is_multiple_of(BLOCK_BYTES as u64), "whole blocks");
        let blocks = bytes / BLOCK_BYTES as u64;
        self.version += 1;
        self.bytes = bytes;
        self.medium.resize(blocks as usize, None);
        self.volatile.split_off(&blocks);
        self.rot.split_off(&bytes);
    }

    /// Have nothing from a byte on, as a file with a hole there; the size stays.
    pub fn punch(&mut self, from: u64) {
        let bytes = self.bytes;
        self.resize(from);
        self.resize(bytes);
    }

    /// Whether a write is in flight that ends behind a byte.
    pub fn writes_from(&self, from: u64) -> bool {
        self.ops.values().any(|op| match op {
            Op::Write { offset, data, .. } => offset + data.len() as u64 > from,
            Op::Read { .. } => false,
        })
    }

    /// Put `data` on the medium at once: how a device is formatted.
    pub fn put(&mut self, offset: u64, data: &[u8]) {
        self.store(offset, data, true, |_, _| true);
    }

    /// Begin a read of `bytes`.
    pub fn submit_read(&mut self, offset: u64, bytes: usize) -> OpId {
        let sampling = match self.random.u8(..3) {
            0 => Sampling::AtSubmission,
            1 => Sampling::AtCompletion,
            _ => Sampling::Both,
        };
        let mut early = Vec::new();
        if sampling != Sampling::AtCompletion {
            early = vec![0; bytes];
            self.load(offset, &mut early);
        }
        self.begin(Op::Read {
            offset,
            early,
            sampling,
        })
    }

    /// Begin a write.
    pub fn submit_write(&mut self, offset: u64, data: &[Buf], durable: bool) -> OpId {
        let data = joined(data);
        self.begin(Op::Write {
            offset,
            data,
            durable,
        })
    }

    /// End a read; `out` is what the device returns.
    pub fn complete_read(&mut self, op: OpId, out: &mut [u8]) {
        let Some(Op::Read {
            offset,
            early,
            sampling,
        }) = self.ops.remove(&op)
        else {
            panic!("read {op} is not in flight");
        };
        if sampling != Sampling::AtSubmission {
            self.load(offset, out);
        }
        for (index, sector) in out.chunks_mut(SECTOR_BYTES).enumerate() {
            let take_early = match sampling {
                Sampling::AtSubmission => true,
                Sampling::AtCompletion => false,
                Sampling::Both => self.random.bool(),
            };
            if take_early {
                let start = index * SECTOR_BYTES;
                sector.copy_from_slice(&early[start..start + sector.len()]);
            }
        }
        match self.lies(Lie::is_of_reads) {
            Some(lie @ Lie::MisdirectedRead) => {
                if let Some(place) = self.elsewhere(offset, out.len()) {
                    self.peek(place, out);
                    self.tell(lie, offset, out.len());
                }
            }
            Some(lie) => {
                let start = self.random.usize(..out.len());
                let end = self.random.usize(start + 1..=out.len());
                self.random.fill(&mut out[start..end]);
                self.tell(lie, offset + start as u64, end - start);
            }
            None => {}
        }
    }

    /// End a write well: it is visible, and on the medium if it was durable.
    pub fn complete_write(&mut self, op: OpId) {
        let (offset, data, durable) = self.take_write(op);
        match self.lies(Lie::is_of_writes) {
            Some(lie @ Lie::MisdirectedWrite) => {
                if let Some(place) = self.elsewhere(offset, data.len()) {
                    self.store(place, &data, durable, |_, _| true);
                    self.tell(lie, offset, data.len());
                    return;
                }
            }
            Some(lie) => return self.tell(lie, offset, data.len()),
            None => {}
        }
        if durable && matches!(self.lie, Some((Lie::NewestWriteLost, 0))) {
            let mut before = vec![0; data.len()];
            self.peek(offset, &mut before);
            self.replaced = Some((offset, before));
        }
        self.store(offset, &data, durable, |_, _| true);
    }

    /// End a write badly: each sector is old or new.
    pub fn fail_write(&mut self, op: OpId) {
        let (offset, data, durable) = self.take_write(op);
        self.store(offset, &data, durable, |random, _| random.bool());
    }

    /// End a write without performing it: what a planted bug does.
    pub fn drop_write(&mut self, op: OpId) {
        self.take_write(op);
    }

    /// End a write with only its first half performed: what a planted bug does.
    pub fn tear_write(&mut self, op: OpId) {
        let (offset, data, durable) = self.take_write(op);
        let half = (data.len() / SECTOR_BYTES / 2) as u64;
        self.store(offset, &data, durable, move |_, sector| sector < half);
    }

    /// Forget a read.
    pub fn cancel_read(&mut self, op: OpId) {
        self.ops.remove(&op);
    }

    /// Everything that was completed is on the medium from now on.
    pub fn sync(&mut self) {
        for (block, mut versions) in std::mem::take(&mut self.volatile) {
            self.medium[block as usize] = versions.pop();
        }
    }

    /// Power is gone: what was not durable is kept, lost or torn.
    pub fn power_cut(&mut self) {
        self.version += 1;
        let volatile = std::mem::take(&mut self.volatile);
        for (block, versions) in volatile {
            let base = block * BLOCK_BYTES as u64;
            let whole = self.random.bool();
            let pick = self.random.usize(..=versions.len());
            for sector in 0..BLOCK_BYTES / SECTOR_BYTES {
                let pick = if whole {
                    pick
                } else {
                    self.random.usize(..=versions.len())
                };
                if pick > 0 {
                    let start = sector * SECTOR_BYTES;
                    let bytes = versions[pick - 1][start..start + SECTOR_BYTES].to_vec();
                    self.store(base + start as u64, &bytes, true, |_, _| true);
                }
            }
        }
        let lie = self.lies(Lie::is_of_power_cuts);
        if let Some((lie, (offset, before))) = lie.zip(self.replaced.take()) {
            self.tell(lie, offset, before.len());
            self.store(offset, &before, true, |_, _| true);
        }
        let mut cut = Vec::new();
        for (_, op) in std::mem::take(&mut self.ops) {
            if let Op::Write { offset, data, .. } = op {
                self.tear(offset, &data, true);
                cut.push(offset..offset + data.len() as u64);
            }
        }
        if lie == Some(Lie::DamagedNeighbour) && !cut.is_empty() {
            let write = self.random.usize(..cut.len());
            self.damage_beside(&cut[write]);
        }
    }

    /// Damage blocks of the units in which a cut write begins or ends, but not its own.
    fn damage_beside(&mut self, cut: &Range<u64>) {
        let unit = (16 << 10) << self.random.u32(..3);
        let block = BLOCK_BYTES as u64;
        let first = cut.start / unit * unit;
        let end = cut.end.next_multiple_of(unit).min(self.bytes);
        let beside = (first..cut.start).chain(cut.end..end).step_by(BLOCK_BYTES);
        let (mut from, mut to) = (u64::MAX, 0);
        for offset in beside.collect::<Vec<_>>() {
            if self.random.bool() {
                let mut garbage = [0; BLOCK_BYTES];
                if self.random.bool() {
                    self.random.fill(&mut garbage);
                }
                self.store(offset, &garbage, true, |_, _| true);
                (from, to) = (from.min(offset), to.max(offset + block));
            }
        }
        if from < to {
            self.tell(Lie::DamagedNeighbour, from, (to - from) as usize);
        }
    }

    /// The process is gone, the device is not: what is in flight ends anyhow, or never began.
    pub fn process_kill(&mut self) {
        for (_, op) in std::mem::take(&mut self.ops) {
            if let Op::Write {
                offset,
                data,
                durable,
            } = op
            {
                self.tear(offset, &data, durable);
            }
        }
    }

    /// Everything is gone: another device, or one that was wiped.
    pub fn wipe(&mut self) {
        self.version += 1;
        self.medium.fill_with(|| None);
        self.volatile.clear();
        self.ops.clear();
        self.rot.clear();
        self.replaced = None;
    }

    /// Flip one bit at rest. Blocks that were not written are left alone; tells whether it flipped.
    pub fn rot(&mut self, offset: u64, bit: u8) -> bool {
        let block = offset / BLOCK_BYTES as u64;
        let Some(Some(data)) = self.medium.get_mut(block as usize) else {
            return false;
        };
        if self.volatile.contains_key(&block) {
            return false;
        }
        self.version += 1;
        let mask = 1 << (bit % 8);
        data[(offset % BLOCK_BYTES as u64) as usize] ^= mask;
        *self.rot.entry(offset).or_default() ^= mask;
        true
    }

    /// Whether a bit is rotten at present.
    pub fn is_rotten(&self) -> bool {
        self.rot.values().any(|&mask| mask != 0)
    }

    /// Whether any of so many bytes from one on is rotten.
    pub fn rots_within(&self, offset: u64, bytes: u64) -> bool {
        let mut masks = self.rot.range(offset..offset + bytes);
        masks.any(|(_, &mask)| mask != 0)
    }

    /// Undo all rot that was not overwritten.
    pub fn heal(&mut self) {
        self.version += 1;
        for (offset, mask) in std::mem::take(&mut self.rot) {
            let block = (offset / BLOCK_BYTES as u64) as usize;
            if let Some(data) = &mut self.medium[block] {
                data[(offset % BLOCK_BYTES as u64) as usize] ^= mask;
            }
        }
    }

    /// What a reader would see now, without races: for checkers that look at the medium.
    pub fn peek(&self, offset: u64, out: &mut [u8]) {
        let (mut at, mut rest) = (offset, out);
        while !rest.is_empty() {
            let start = (at % BLOCK_BYTES as u64) as usize;
            let (part, behind) = rest.split_at_mut(rest.len().min(BLOCK_BYTES - start));
            match self.visible(at / BLOCK_BYTES as u64) {
                Some(data) => part.copy_from_slice(&data[start..start + part.len()]),
                None => part.fill(0),
            }
            at += part.len() as u64;
            rest = behind;
        }
    }

    /// The same, as if nothing were rotten.
    pub fn peek_sound(&self, offset: u64, out: &mut [u8]) {
        self.peek(offset, out);
        let rotten = self.rot.range(offset..offset + out.len() as u64);
        for (&at, &mask) in rotten {
            if !self.volatile.contains_key(&(at / BLOCK_BYTES as u64)) {
                out[(at - offset) as usize] ^= mask;
            }
        }
    }

    fn begin(&mut self, op: Op) -> OpId {
        self.next_op += 1;
        self.ops.insert(self.next_op, op);
        self.next_op
    }

    fn take_write(&mut self, op: OpId) -> (u64, Vec<u8>, bool) {
        match self.ops.remove(&op) {
            Some(Op::Write {
                offset,
                data,
                durable,
            }) => (offset, data, durable),
            _ => panic!("write {op} is not in flight"),
        }
    }

    fn visible(&self, block: u64) -> Option<&Block> {
        self.volatile
            .get(&block)
            .and_then(|versions| versions.last())
            .or_else(|| self.medium.get(block as usize)?.as_ref())
    }

    /// Copy what is visible, with a coin for each sector that a write in flight covers.
    fn load(&mut self, offset: u64, out: &mut [u8]) {
        self.peek(offset, out);
        let end = offset + out.len() as u64;
        for op in self.ops.values() {
            let Op::Write {
                offset: other,
                data,
                ..
            } = op
            else {
                continue;
            };
            let from = offset.max(*other);
            let to = end.min(other + data.len() as u64);
            let mut at = from;
            while at < to {
                if self.random.bool() {
                    let source = (at - other) as usize;
                    let target = (at - offset) as usize;
                    out[target..target + SECTOR_BYTES]
                        .copy_from_slice(&data[source..source + SECTOR_BYTES]);
                }
                at += SECTOR_BYTES as u64;
            }
        }
    }

    /// Write those sectors of `data` that `choose` says.
    fn store(
        &mut self,
        offset: u64,
        data: &[u8],
        durable: bool,
        mut choose: impl FnMut(&mut Rng, u64) -> bool,
    ) {
        self.version += 1;
        for (index, chunk) in data.chunks(SECTOR_BYTES).enumerate() {
            if !choose(&mut self.random, index as u64) {
                continue;
            }
            let at = offset + (index * SECTOR_BYTES) as u64;
            let (block, start) = (at / BLOCK_BYTES as u64, (at % BLOCK_BYTES as u64) as usize);
            if !self.rot.is_empty() {
                let sector = at..at + SECTOR_BYTES as u64;
                let healed: Vec<u64> = self.rot.range(sector).map(|(&byte, _)| byte).collect();
                for byte in healed {
                    self.rot.remove(&byte);
                }
            }
            if !durable {
                let first = start == 0 || index == 0;
                let versions = self.volatile.entry(block).or_default();
                if first || versions.is_empty() {
                    let base = versions.last().or(self.medium[block as usize].as_ref());
                    let copy = base.map_or_else(|| Box::new([0; BLOCK_BYTES]), Block::clone);
                    versions.push(copy);
                }
                let last = versions.last_mut().expect("just pushed");
                last[start..start + chunk.len()].copy_from_slice(chunk);
                continue;
            }
            // What is durable is in every version that may survive.
            let slot = &mut self.medium[block as usize];
            let target = slot.get_or_insert_with(|| Box::new([0; BLOCK_BYTES]));
            target[start..start + chunk.len()].copy_from_slice(chunk);
            for version in self.volatile.get_mut(&block).into_iter().flatten() {
                version[start..start + chunk.len()].copy_from_slice(chunk);
            }
        }
    }

    /// What becomes of a write that was in flight.
    fn tear(&mut self, offset: u64, data: &[u8], durable: bool) {
        let sectors = (data.len() / SECTOR_BYTES) as u64;
        let per_block = (BLOCK_BYTES / SECTOR_BYTES) as u64;
        match self.random.u8(..6) {
            0 => {}
            1 => self.store(offset, data, durable, |_, _| true),
            2 => {
                let kept = self.random.u64(..=sectors);
                self.store(offset, data, durable, move |_, sector| sector < kept);
            }
            3 => {
                let lost = self.random.u64(..=sectors);
                self.store(offset, data, durable, move |_, sector| sector >= lost);
            }
            4 => {
                let mut keep = false;
                self.store(offset, data, durable, move |random, sector| {
                    if sector % per_block == 0 {
                        keep = random.bool();
                    }
                    keep
                });
            }
            _ => self.store(offset, data, durable, |random, _| random.bool()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hdcs_core::base::buf::Pool;

    use super::*;

    const BLOCK: u64 = BLOCK_BYTES as u64;

    fn block(pool: &Arc<Pool>, blocks: usize, mark: u8) -> Vec<Buf> {
        let mut buf = pool.alloc(blocks * BLOCK_BYTES).expect("room");
        buf.fill(mark);
        vec![buf.freeze()]
    }

    fn read(disk: &mut Disk, offset: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        let op = disk.submit_read(offset, bytes);
        disk.complete_read(op, &mut out);
        out
    }

    #[test]
    fn disk_keeps_what_was_durable_through_a_power_cut() {
        let pool = Pool::new(1 << 20);
        let mut disk = Disk::new(16 * BLOCK, 1);
        for seed in 0..50 {
            let op = disk.submit_write(2 * BLOCK, &block(&pool, 2, seed), true);
            disk.complete_write(op);
            disk.power_cut();
            assert_eq!(read(&mut disk, 2 * BLOCK, 8192), vec![seed; 8192]);
        }
    }

    #[test]
    fn disk_loses_keeps_and_tears_what_was_volatile_or_in_flight() {
        let pool = Pool::new(1 << 20);
        let (mut lost, mut kept, mut torn) = (0, 0, 0);
        for seed in 0..200 {
            let mut disk = Disk::new(16 * BLOCK, seed);
            let op = disk.submit_write(0, &block(&pool, 2, 7), seed % 2 == 0);
            if seed % 2 == 1 {
                disk.complete_write(op);
                assert_eq!(read(&mut disk, 0, 8192), vec![7; 8192], "visible");
            }
            disk.power_cut();
            let after = read(&mut disk, 0, 8192);
            let new = after.chunks(SECTOR_BYTES).filter(|sector| sector[0] == 7);
            match new.count() {
                0 => lost += 1,
                16 => kept += 1,
                _ => {
                    let whole = |sector: &[u8]| sector.iter().all(|&byte| byte == sector[0]);
                    assert!(after.chunks(SECTOR_BYTES).all(whole), "sectors are atomic");
                    torn += 1;
                }
            }
            disk.power_cut();
            assert_eq!(read(&mut disk, 0, 8192), after, "what is there stays");
        }
        assert!(lost > 10 && kept > 10 && torn > 10, "{lost} {kept} {torn}");
    }

    #[test]
    fn disk_durable_write_makes_only_itself_durable() {
        let pool = Pool::new(1 << 20);
        let mut lost = false;
        for seed in 0..50 {
            let mut disk = Disk::new(16 * BLOCK, seed);
            let plain = disk.submit_write(0, &block(&pool, 1, 1), false);
            disk.complete_write(plain);
            let durable = disk.submit_write(BLOCK, &block(&pool, 1, 2), true);
            disk.complete_write(durable);
            disk.power_cut();
            lost |= read(&mut disk, 0, 4096) == vec![0; 4096];
            assert_eq!(read(&mut disk, BLOCK, 4096), vec![2; 4096]);
        }
        assert!(lost);
    }

    #[test]
    fn disk_read_that_races_a_write_sees_old_or_new_sectors() {
        let pool = Pool::new(1 << 20);
        let mut mixed = false;
        for seed in 0..50 {
            let mut disk = Disk::new(16 * BLOCK, seed);
            let read = disk.submit_read(0, 4096);
            let write = disk.submit_write(0, &block(&pool, 1, 9), true);
            let mut out = vec![0; 4096];
            disk.complete_read(read, &mut out);
            disk.complete_write(write);
            for sector in out.chunks(SECTOR_BYTES) {
                assert!(sector.iter().all(|&byte| byte == sector[0]));
            }
            mixed |= out.contains(&0) && out.contains(&9);
        }
        assert!(mixed);
    }

    /// A disk that holds a 1 in each byte of its first 32 blocks, and is about to tell a lie.
    fn liar(pool: &Arc<Pool>, lie: Lie, seed: u64) -> Disk {
        let mut disk = Disk::new(64 * BLOCK, seed);
        let op = disk.submit_write(0, &block(pool, 32, 1), true);
        disk.complete_write(op);
        disk.lie_once(lie, 0);
        disk
    }

    fn write(disk: &mut Disk, pool: &Arc<Pool>, block_number: u64, mark: u8) {
        let op = disk.submit_write(block_number * BLOCK, &block(pool, 1, mark), true);
        disk.complete_write(op);
    }

    #[test]
    fn disk_loses_one_write_when_it_is_to_lie() {
        let pool = Pool::new(1 << 20);
        let mut disk = liar(&pool, Lie::LostWrite, 1);
        write(&mut disk, &pool, 2, 7);
        assert_eq!(read(&mut disk, 2 * BLOCK, 4096), vec![1; 4096]);
        let bytes = 2 * BLOCK..3 * BLOCK;
        assert_eq!(disk.told().map(|told| told.bytes.clone()), Some(bytes));
        write(&mut disk, &pool, 2, 7);
        assert_eq!(read(&mut disk, 2 * BLOCK, 4096), vec![7; 4096], "only once");
    }

    #[test]
    fn disk_writes_elsewhere_once_when_it_is_to_lie() {
        let pool = Pool::new(1 << 20);
        for seed in 0..20 {
            let mut disk = liar(&pool, Lie::MisdirectedWrite, seed);
            write(&mut disk, &pool, 2, 7);
            let all = read(&mut disk, 0, 64 * BLOCK_BYTES);
            let hit = |block: &[u8]| block.iter().all(|&byte| byte == 7);
            assert_eq!(
                all.chunks(BLOCK_BYTES).filter(|block| hit(block)).count(),
                1
            );
            let told = disk.told().is_some();
            assert_eq!(hit(&all[2 * BLOCK_BYTES..3 * BLOCK_BYTES]), !told);
        }
    }

    #[test]
    fn disk_undoes_the_newest_write_at_a_power_cut_when_it_is_to_lie() {
        let pool = Pool::new(1 << 20);
        let mut disk = liar(&pool, Lie::NewestWriteLost, 1);
        write(&mut disk, &pool, 2, 7);
        write(&mut disk, &pool, 3, 8);
        assert_eq!(
            read(&mut disk, 3 * BLOCK, 4096),
            vec![8; 4096],
            "until then"
        );
        disk.power_cut();
        assert_eq!(read(&mut disk, 2 * BLOCK, 4096), vec![7; 4096]);
        assert_eq!(read(&mut disk, 3 * BLOCK, 4096), vec![1; 4096]);
        write(&mut disk, &pool, 3, 9);
        disk.power_cut();
        assert_eq!(read(&mut disk, 3 * BLOCK, 4096), vec![9; 4096], "only once");
    }

    #[test]
    fn disk_damages_what_lies_beside_a_cut_write_when_it_is_to_lie() {
        let pool = Pool::new(1 << 20);
        let mut damaged = 0;
        for seed in 0..20 {
            let mut disk = liar(&pool, Lie::DamagedNeighbour, seed);
            disk.submit_write(17 * BLOCK, &block(&pool, 1, 1), true);
            disk.power_cut();
            let all = read(&mut disk, 0, 32 * BLOCK_BYTES);
            let blocks = all.chunks(BLOCK_BYTES).enumerate();
            for (number, _) in blocks.filter(|(_, block)| block.iter().any(|&byte| byte != 1)) {
                assert!((16..32).contains(&number) && number != 17, "block {number}");
                damaged += 1;
            }
        }
        assert!(damaged > 20);
    }

    #[test]
    fn disk_reads_wrongly_once_when_it_is_to_lie() {
        let pool = Pool::new(1 << 20);
        let (mut elsewhere, mut garbage) = (0, 0);
        for seed in 0..20 {
            let mut disk = liar(&pool, Lie::MisdirectedRead, seed);
            write(&mut disk, &pool, 2, 7);
            elsewhere += usize::from(read(&mut disk, 2 * BLOCK, 4096) != vec![7; 4096]);
            assert_eq!(read(&mut disk, 2 * BLOCK, 4096), vec![7; 4096]);
            let mut disk = liar(&pool, Lie::BadRead, seed);
            garbage += usize::from(read(&mut disk, 2 * BLOCK, 4096) != vec![1; 4096]);
            assert_eq!(read(&mut disk, 2 * BLOCK, 4096), vec![1; 4096]);
        }
        assert!(elsewhere > 10 && garbage > 10, "{elsewhere} {garbage}");
    }

    #[test]
    fn disk_rot_heals_unless_overwritten() {
        let pool = Pool::new(1 << 20);
        let mut disk = Disk::new(16 * BLOCK, 1);
        assert!(!disk.rot(5, 1), "nothing is there");
        disk.put(0, &[3; 8192]);
        assert!(disk.rot(5, 1) && disk.rot(BLOCK + 5, 1));
        assert_eq!(read(&mut disk, 0, 4096)[5], 1);
        let op = disk.submit_write(0, &block(&pool, 1, 4), true);
        disk.complete_write(op);
        assert!(disk.is_rotten());
        disk.heal();
        assert!(!disk.is_rotten());
        assert_eq!(read(&mut disk, 0, 4096), vec![4; 4096]);
        assert_eq!(read(&mut disk, BLOCK, 4096), vec![3; 4096]);
    }
}
