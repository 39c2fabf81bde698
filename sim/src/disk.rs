//! A device with a volatile write cache that lies only as its declaration allows.
//!
//! 1. A durable write is durable when it completes; a plain one when the device feels like it.
//! 2. A durable write makes only itself durable (it is FUA, no flush).
//! 3. When power is cut, each 512-byte sector of what was not durable is kept or lost on its own:
//!    of a write in flight, everything, nothing, the beginning, some blocks, or some sectors.
//! 4. A read that races a write sees old or new, sector by sector.
//! 5. A write that failed left old or new, sector by sector.
//! 6. Rot flips bits at rest. It can be undone, so that a run goes on after a refused opening.
//!
//! Times and failures are decided by whoever drives it.

use std::collections::BTreeMap;

use fastrand::Rng;
use hdcs_core::buf::Buf;
use hdcs_core::limits::{BLOCK_BYTES, SECTOR_BYTES};

type Block = Box<[u8; BLOCK_BYTES]>;

/// Names one operation in flight.
pub type OpId = u64;

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
    /// Bits flipped and not overwritten since, by byte offset.
    rot: BTreeMap<u64, u8>,
    random: Rng,
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
            rot: BTreeMap::new(),
            random: Rng::with_seed(seed),
        }
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Have so many bytes, as a file may: what is cut off is gone, what there is anew is zeroes.
    pub fn resize(&mut self, bytes: u64) {
        assert!(bytes.is_multiple_of(BLOCK_BYTES as u64), "whole blocks");
        let blocks = bytes / BLOCK_BYTES as u64;
        self.bytes = bytes;
        self.medium.resize(blocks as usize, None);
        self.volatile.split_off(&blocks);
        self.rot.split_off(&bytes);
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
        let data = data.iter().flat_map(|buf| buf.iter().copied()).collect();
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
    }

    /// End a write well: it is visible, and on the medium if it was durable.
    pub fn complete_write(&mut self, op: OpId) {
        let (offset, data, durable) = self.take_write(op);
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
        for (_, op) in std::mem::take(&mut self.ops) {
            if let Op::Write { offset, data, .. } = op {
                self.tear(offset, &data, true);
            }
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
        self.medium.fill_with(|| None);
        self.volatile.clear();
        self.ops.clear();
        self.rot.clear();
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
        for (offset, mask) in std::mem::take(&mut self.rot) {
            let block = (offset / BLOCK_BYTES as u64) as usize;
            if let Some(data) = &mut self.medium[block] {
                data[(offset % BLOCK_BYTES as u64) as usize] ^= mask;
            }
        }
    }

    /// What a reader would see now, without races: for checkers that look at the medium.
    pub fn peek(&self, offset: u64, out: &mut [u8]) {
        for (index, sector) in out.chunks_mut(SECTOR_BYTES).enumerate() {
            let at = offset + (index * SECTOR_BYTES) as u64;
            let start = (at % BLOCK_BYTES as u64) as usize;
            match self.visible(at / BLOCK_BYTES as u64) {
                Some(data) => sector.copy_from_slice(&data[start..start + sector.len()]),
                None => sector.fill(0),
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
    use std::rc::Rc;

    use hdcs_core::buf::Pool;

    use super::*;

    const BLOCK: u64 = BLOCK_BYTES as u64;

    fn block(pool: &Rc<Pool>, blocks: usize, mark: u8) -> Vec<Buf> {
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
