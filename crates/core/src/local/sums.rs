//! Checksums of a local store's data: a CRC-32C for each sector, in a table between a page of the map and its blocks.
//!
//! If the data is encrypted, a keyed tag follows each of them. The CRC-32C is of what is stored, so it is for whoever
//! looks without the key; who can write to the medium can make it right. The tag needs the key. Both lie together, so
//! that all that is said here of checksums holds for tags.
//!
//! They lie in place, without a copy and without an order among writes: what a crash leaves of them and of the
//! data differs only in sectors that were written since the last flush, and those the write log writes again. Until
//! it has, they are *unsettled*: the volume names them when it is opened, and one that does not match is refused to
//! whoever reads it, but is no damage. A torn write of the table is harmless for the same reason, since every checksum
//! is within one sector of it. So a flush has to bring what changed of the table to the store before its sync, and that
//! is all.
//!
//! What of the table is in memory is bounded. A block of it leaves when another one is needed, after it was
//! written if it was changed; half of what there may be may be changed before some is written.
//!
//! The runs of unsettled sectors share that memory, and take a quarter of it at most. Beyond that, neighbouring runs
//! become one, with the gap between them. Rot in such a gap is refused to readers like all other, so no wrong byte is
//! returned; but it is not reported as damage before the next opening.
//!
//! Where the log does not write everything again (it was lost, or let writes past it), the table is not
//! believed: it is made anew from the data first, from the first block to the last (see [`super::patrol`]).

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::Action;
use super::format::{Layout, SUMS_UNTRUSTED};
use super::store::{Purpose, Store};
use crate::base::buf::Buf;
use crate::base::cipher::KeyedCipher;
use crate::base::error::IoError;
use crate::base::io::{Done, SectorRange};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, HOME_UNSETTLED_RUN_BYTES, SECTOR_BYTES};
use crate::format::block_checksum;

/// Reads and writes of the table under way at most, each.
const IN_FLIGHT_MAX: usize = 32;
/// Pages that are looked at to find one that may leave. If none of them may, there is one more for a while.
const LOOKS_MAX: usize = 256;
/// Damaged sectors that are remembered.
pub(super) const DAMAGED_MAX: usize = 4096;

/// A block of the table.
#[derive(Debug)]
struct Page {
    /// `None` while it is read.
    sums: Option<Box<[u8; BLOCK_BYTES]>>,
    /// Which of its sectors differ from what was written, or is being written, last.
    touched: Range<usize>,
    /// Those that are about to change it.
    pins: u32,
    /// Whether it was used since it was last looked at.
    is_used: bool,
    /// Whether nobody has used it yet. It is read for somebody, who may wait for another one as well.
    is_fresh: bool,
}

/// The table, as far as it is in memory.
#[derive(Debug)]
pub(super) struct Sums {
    layout: Layout,
    /// What makes the tags of sectors, if they have any.
    cipher: Option<Arc<dyn KeyedCipher>>,
    pages: BTreeMap<u64, Page>,
    /// Memory for pages and for unsettled runs.
    bytes_max: usize,
    /// Pages that somebody waits for, and that are not being read.
    wanted: BTreeSet<u64>,
    touched: BTreeSet<u64>,
    reads: usize,
    writing: BTreeSet<u64>,
    /// Of the commit that is under way: pages to write, and whether the write that counts has begun.
    commit: BTreeMap<u64, bool>,
    /// Where to look for a page that may leave, and for one that is written early.
    leave_at: u64,
    write_at: u64,
    /// The checksums of the blocks before this one are believed.
    pub trusted_until: u64,
    /// Sectors whose checksum did not match, and that were not written since.
    pub damaged: BTreeSet<u64>,
    /// Runs of sectors, by their first one and with their end, that the log writes again: their data may be of that
    /// write, which the last life has begun, and their checksum of the one before.
    unsettled: BTreeMap<u64, u64>,
    runs_max: usize,
}

/// What data is beside its checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Compared {
    /// It matches.
    Same,
    /// It does not where the log writes it again.
    Unsettled,
    /// It does not.
    Damaged,
}

impl Compared {
    /// Whoever wants the data gets it only if it matches.
    pub fn or_refused(self) -> Result<(), IoError> {
        match self {
            Self::Same => Ok(()),
            Self::Unsettled | Self::Damaged => Err(IoError::Corrupt),
        }
    }
}

/// What the table has of a sector: the CRC-32C of what is stored, and in the upper half its tag, if it is encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum(u64);

impl Sum {
    fn crc(self) -> u32 {
        self.0 as u32
    }
}

/// The sum of each sector of `data`, the first of which has this number. Tags are made a few at once, which is faster.
fn sums_of(
    cipher: Option<&dyn KeyedCipher>,
    first: u64,
    data: &[u8],
) -> impl Iterator<Item = (u64, Sum)> {
    const TAGS: usize = BLOCK_SECTORS as usize;
    let runs = (first..)
        .step_by(TAGS)
        .zip(data.chunks(TAGS * SECTOR_BYTES));
    runs.flat_map(move |(first, run)| {
        let mut tags = [0; TAGS];
        if let Some(cipher) = cipher {
            cipher.unit_tags(first, run, &mut tags[..run.len() / SECTOR_BYTES]);
        }
        let sectors = (first..).zip(run.chunks(SECTOR_BYTES)).zip(tags);
        sectors.map(|((sector, data), tag)| {
            let crc = u64::from(block_checksum(data));
            (sector, Sum(u64::from(tag) << 32 | crc))
        })
    })
}

impl Sums {
    /// A table of which nothing is in memory, and at most `bytes` bytes will be.
    pub fn new(sums_log: u64, bytes: usize, cipher: Option<Arc<dyn KeyedCipher>>) -> Self {
        Self {
            layout: Layout::of(cipher.is_some()),
            cipher,
            pages: BTreeMap::new(),
            bytes_max: bytes,
            wanted: BTreeSet::new(),
            touched: BTreeSet::new(),
            reads: 0,
            writing: BTreeSet::new(),
            commit: BTreeMap::new(),
            leave_at: 0,
            write_at: 0,
            trusted_until: if sums_log == SUMS_UNTRUSTED {
                0
            } else {
                u64::MAX
            },
            damaged: BTreeSet::new(),
            unsettled: BTreeMap::new(),
            runs_max: (bytes / 4 / HOME_UNSETTLED_RUN_BYTES).max(1),
        }
    }

    /// The blocks of the table that have the checksums of these blocks.
    fn pages_of(&self, blocks: &Range<u64>) -> Range<u64> {
        let per_page = self.layout.sums_blocks();
        blocks.start / per_page..blocks.end.div_ceil(per_page)
    }

    /// Pages that there may be beside the runs that are unsettled.
    fn pages_max(&self) -> usize {
        let pages_bytes = self.bytes_max.saturating_sub(self.unsettled_bytes());
        (pages_bytes / BLOCK_BYTES).max(1)
    }

    fn unsettled_bytes(&self) -> usize {
        self.unsettled.len() * HOME_UNSETTLED_RUN_BYTES
    }

    /// The log writes these sectors again; until then it is no damage if they do not match.
    pub fn unsettle(&mut self, sectors: SectorRange) {
        let (mut start, mut end) = (sectors.start, sectors.end());
        while let Some((&first, &last)) = self.unsettled.range(..=end).next_back()
            && last >= start
        {
            self.unsettled.remove(&first);
            (start, end) = (start.min(first), end.max(last));
        }
        if self.unsettled.len() >= self.runs_max {
            (start, end) = self.joined_with_nearest(start, end);
        }
        self.unsettled.insert(start, end);
    }

    /// A run, together with the nearest of the others, which is taken out, and with the gap between them.
    fn joined_with_nearest(&mut self, start: u64, end: u64) -> (u64, u64) {
        let before = self.unsettled.range(..start).next_back();
        let before = before.map(|(&first, &last)| (start - last, first, last));
        let after = self.unsettled.range(end..).next();
        let after = after.map(|(&first, &last)| (first - end, first, last));
        let Some((_, first, last)) = before.into_iter().chain(after).min() else {
            return (start, end);
        };
        self.unsettled.remove(&first);
        (start.min(first), end.max(last))
    }

    /// These sectors are written, or are not there any more. If there may be no further run, one that this would
    /// cut in two stays whole.
    fn settle(&mut self, sectors: Range<u64>) {
        while let Some((&first, &last)) = self.unsettled.range(..sectors.end).next_back()
            && last > sectors.start
        {
            let is_cut_in_two = first < sectors.start && last > sectors.end;
            if is_cut_in_two && self.unsettled.len() >= self.runs_max {
                return;
            }
            self.unsettled.remove(&first);
            if first < sectors.start {
                self.unsettled.insert(first, sectors.start);
            }
            if last > sectors.end {
                self.unsettled.insert(sectors.end, last);
            }
        }
    }

    fn is_unsettled(&self, sector: u64) -> bool {
        let run = self.unsettled.range(..=sector).next_back();
        run.is_some_and(|(_, &end)| sector < end)
    }

    /// Whether the checksums of these blocks are in memory. If not, they will be.
    pub fn ready(&mut self, blocks: &Range<u64>) -> bool {
        self.all_ready(core::iter::once(blocks))
    }

    /// Whether the checksums of all these runs of blocks are in memory. If not, they will be; until then those that are
    /// there stay fresh, so that none leaves for another one of the same request.
    pub fn all_ready<'a>(&mut self, runs: impl Iterator<Item = &'a Range<u64>> + Clone) -> bool {
        let mut is_ready = true;
        for blocks in runs.clone() {
            for page in self.pages_of(blocks) {
                let found = self.pages.get(&page);
                is_ready &= found.is_some_and(|page| page.sums.is_some());
                if found.is_none() {
                    self.wanted.insert(page);
                }
            }
        }
        if is_ready {
            for blocks in runs {
                let pages = self.pages_of(blocks);
                for (_, page) in self.pages.range_mut(pages) {
                    (page.is_used, page.is_fresh) = (true, false);
                }
            }
        }
        is_ready
    }

    /// Whether so much has changed that no more may before some is written.
    pub fn is_full(&self) -> bool {
        self.touched.len() > self.pages_max() - self.pages_max() / 4
    }

    /// Keep the checksums of these blocks in memory, or not any more.
    pub fn pin(&mut self, blocks: &Range<u64>, is_pinned: bool) {
        let pages = self.pages_of(blocks);
        for (_, page) in self.pages.range_mut(pages) {
            page.pins = if is_pinned {
                page.pins + 1
            } else {
                page.pins - 1
            };
        }
    }

    /// The checksums of sectors, which are in memory; empty if they are not believed.
    pub fn expected(&self, sectors: SectorRange) -> Vec<Sum> {
        let end = sectors
            .end()
            .min(self.trusted_until.saturating_mul(BLOCK_SECTORS));
        (sectors.start..end)
            .map(|sector| self.get(sector))
            .collect()
    }

    /// The block of the table that has a sector, and where in it.
    fn place_of(&self, sector: u64) -> (u64, Range<usize>) {
        let (per_page, bytes) = (self.layout.sums_sectors(), self.layout.sum_bytes());
        let at = (sector % per_page) as usize * bytes;
        (sector / per_page, at..at + bytes)
    }

    fn get(&self, sector: u64) -> Sum {
        let (number, at) = self.place_of(sector);
        let page = self.pages.get(&number);
        let sums = page.and_then(|page| page.sums.as_ref());
        let mut sum = [0; 8];
        sum[..at.len()].copy_from_slice(&sums.expect("it was made ready")[at]);
        Sum(u64::from_le_bytes(sum))
    }

    fn set(&mut self, sector: u64, sum: Sum) {
        let (number, at) = self.place_of(sector);
        let page = self.pages.get_mut(&number).expect("it is pinned");
        let sums = page.sums.as_mut().expect("it was made ready");
        let touched = at.start / SECTOR_BYTES;
        let bytes = at.len();
        sums[at].copy_from_slice(&sum.0.to_le_bytes()[..bytes]);
        if page.touched.is_empty() {
            page.touched = touched..touched + 1;
            self.touched.insert(number);
        } else {
            page.touched.start = page.touched.start.min(touched);
            page.touched.end = page.touched.end.max(touched + 1);
        }
    }

    /// What is written from `offset` on.
    pub fn write(&mut self, offset: u64, data: &[Buf]) {
        let first = offset / SECTOR_BYTES as u64;
        let mut next = first;
        let cipher = self.cipher.clone();
        for buf in data {
            debug_assert!(buf.len().is_multiple_of(SECTOR_BYTES), "whole sectors");
            for (sector, sum) in sums_of(cipher.as_deref(), next, buf) {
                self.set(sector, sum);
                self.damaged.remove(&sector);
            }
            next += (buf.len() / SECTOR_BYTES) as u64;
        }
        self.settle(first..next);
    }

    /// Take what is there for right.
    pub fn adopt(&mut self, blocks: &Range<u64>, data: &[u8]) {
        let cipher = self.cipher.clone();
        for (sector, sum) in sums_of(cipher.as_deref(), blocks.start * BLOCK_SECTORS, data) {
            if self.get(sector) != sum {
                self.set(sector, sum);
            }
        }
    }

    /// What was damaged in these blocks is not there any more.
    pub fn forget(&mut self, blocks: &Range<u64>) {
        let sectors = blocks.start * BLOCK_SECTORS..blocks.end * BLOCK_SECTORS;
        self.settle(sectors.clone());
        if !self.damaged.is_empty() {
            let gone: Vec<u64> = self.damaged.range(sectors).copied().collect();
            for sector in gone {
                self.damaged.remove(&sector);
            }
        }
    }

    /// The first block of the table that has checksums of none but the blocks from here on.
    fn first_page_from(&self, block: u64) -> u64 {
        block.div_ceil(self.layout.sums_blocks())
    }

    /// Whether checksums of none but the blocks from here on are being read.
    pub fn reads_from(&self, block: u64) -> bool {
        let mut pages = self.pages.range(self.first_page_from(block)..);
        pages.any(|(_, page)| page.sums.is_none())
    }

    /// Whether they are being written.
    pub fn writes_from(&self, block: u64) -> bool {
        let mut writing = self.writing.range(self.first_page_from(block)..);
        writing.next().is_some()
    }

    /// There are no blocks from here on, and nobody reads their checksums. No commit is under way.
    pub fn cut(&mut self, block: u64) {
        let end = self.first_page_from(block);
        for gone in [&mut self.wanted, &mut self.touched] {
            gone.split_off(&end);
        }
        self.pages.split_off(&end);
        self.damaged.split_off(&(block * BLOCK_SECTORS));
        self.settle(block * BLOCK_SECTORS..u64::MAX);
    }

    /// A commit begins: what has changed so far is part of it.
    pub fn begin_commit(&mut self) {
        let writing = self.writing.iter().map(|&number| (number, true));
        self.commit = writing.collect();
        let touched = self.touched.iter().map(|&number| (number, false));
        self.commit.extend(touched);
    }

    /// Whether all of the commit was written.
    pub fn is_committed(&self) -> bool {
        self.commit.is_empty()
    }

    /// The next page to write: of the commit, else early.
    fn next_write(&mut self) -> Option<u64> {
        if self.writing.len() >= IN_FLIGHT_MAX {
            return None;
        }
        let is_free = |number: &u64| !self.writing.contains(number);
        let mut of_commit = self.commit.iter().filter(|(_, begun)| !**begun);
        if let Some((&number, _)) = of_commit.find(|(number, _)| is_free(number)) {
            return Some(number);
        }
        if self.touched.len() <= self.pages_max() / 2 {
            return None;
        }
        let after = self.touched.range(self.write_at..);
        let before = self.touched.range(..self.write_at);
        let number = after.chain(before).copied().find(is_free)?;
        self.write_at = number + 1;
        Some(number)
    }

    /// Make room for one more page.
    fn make_room(&mut self) {
        let pages_max = self.pages_max();
        for _ in 0..LOOKS_MAX {
            if self.pages.len() < pages_max {
                return;
            }
            let next = self.pages.range_mut(self.leave_at..).next();
            let Some((&number, page)) = next else {
                self.leave_at = 0;
                continue;
            };
            self.leave_at = number + 1;
            let is_needed = page.sums.is_none()
                || !page.touched.is_empty()
                || self.writing.contains(&number)
                || page.pins > 0
                || page.is_fresh;
            if !core::mem::take(&mut page.is_used) && !is_needed {
                self.pages.remove(&number);
            }
        }
    }

    /// Memory for what of the table is there, and for the runs that are unsettled.
    pub fn memory_bytes(&self) -> u64 {
        (self.pages.len() * BLOCK_BYTES + self.unsettled_bytes()) as u64
    }
}

impl Store {
    /// Read what somebody waits for, and write what has changed.
    pub(super) fn pump_sums(&mut self, actions: &mut Vec<Action>) {
        while self.sums.reads < IN_FLIGHT_MAX
            && let Some(&page) = self.sums.wanted.first()
        {
            let sums = &mut self.sums;
            let Some(buf) = self.pool.alloc(BLOCK_BYTES) else {
                break;
            };
            sums.wanted.remove(&page);
            sums.make_room();
            let read = Page {
                sums: None,
                touched: 0..0,
                pins: 0,
                is_used: true,
                is_fresh: true,
            };
            sums.pages.insert(page, read);
            sums.reads += 1;
            let token = self.token(Purpose::SumsRead(page));
            let offset = self.layout().sums_offset(page);
            actions.push(Action::StoreRead { token, offset, buf });
        }
        while self.failed.is_none()
            && let Some(number) = self.sums.next_write()
        {
            let sums = &mut self.sums;
            let page = sums.pages.get_mut(&number).expect("what changed stays");
            let range = page.touched.start * SECTOR_BYTES..page.touched.end * SECTOR_BYTES;
            let Some(mut buf) = self.pool.alloc(range.len()) else {
                break;
            };
            let table = page.sums.as_ref().expect("what changed is there");
            buf.copy_from_slice(&table[range.clone()]);
            page.touched = 0..0;
            sums.touched.remove(&number);
            sums.writing.insert(number);
            if let Some(begun) = sums.commit.get_mut(&number) {
                *begun = true;
            }
            self.status.sums_written_bytes += range.len() as u64;
            let token = self.token(Purpose::SumsWrite(number));
            actions.push(Action::StoreWrite {
                token,
                offset: self.layout().sums_offset(number) + range.start as u64,
                data: vec![buf.freeze()],
            });
        }
    }

    /// A block of the table was read, or could not be: then nothing can be done with the blocks that it is of.
    pub(super) fn sums_were_read(
        &mut self,
        number: u64,
        result: Result<Done, IoError>,
    ) -> Result<(), (Range<u64>, IoError)> {
        let sums = &mut self.sums;
        sums.reads -= 1;
        match result {
            Ok(Done::Read(buf)) => {
                let page = sums.pages.get_mut(&number).expect("it is being read");
                let read: &[u8; BLOCK_BYTES] =
                    (&buf[..]).try_into().expect("a block was asked for");
                page.sums = Some(Box::new(*read));
                Ok(())
            }
            Ok(_) => unreachable!("a read brings its buffer"),
            Err(error) => {
                sums.pages.remove(&number);
                for page in sums.pages.values_mut() {
                    // Whoever waited for both does not come.
                    page.is_fresh = false;
                }
                let per_page = sums.layout.sums_blocks();
                let blocks = number * per_page..(number + 1) * per_page;
                Err((blocks, error))
            }
        }
    }

    /// A part of the table was written, or could not be: then what is durable is not known any more.
    pub(super) fn sums_were_written(
        &mut self,
        number: u64,
        result: Result<Done, IoError>,
        actions: &mut Vec<Action>,
    ) -> Result<(), IoError> {
        let sums = &mut self.sums;
        sums.writing.remove(&number);
        if sums.commit.get(&number) == Some(&true) {
            sums.commit.remove(&number);
        }
        result?;
        self.sums_are_written(actions);
        Ok(())
    }

    /// Compare data with its checksums, and tell what is damaged. What the log is to write again does not match
    /// either, for all that is known: it is refused, and not told.
    pub(super) fn verify(
        &mut self,
        first_sector: u64,
        expected: &[Sum],
        data: &[u8],
        actions: &mut Vec<Action>,
    ) -> Compared {
        let sums = &mut self.sums;
        let mut compared = Compared::Same;
        let (layout, cipher) = (sums.layout, sums.cipher.clone());
        let found = sums_of(cipher.as_deref(), first_sector, data);
        for ((sector, sum), expected) in found.zip(expected) {
            if sum == *expected {
                continue;
            }
            if sums.is_unsettled(sector) {
                compared = compared.max(Compared::Unsettled);
                continue;
            }
            compared = Compared::Damaged;
            self.status.damaged_reads += 1;
            if sums.damaged.len() < DAMAGED_MAX && sums.damaged.insert(sector) {
                let offset = sector * SECTOR_BYTES as u64;
                actions.push(Action::Damaged {
                    offset,
                    store_offset: layout.data_offset(offset),
                    is_forged: sum.crc() == expected.crc(),
                });
            }
        }
        compared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS_MAX: u64 = 8;

    fn sums() -> Sums {
        Sums::new(1, RUNS_MAX as usize * 4 * HOME_UNSETTLED_RUN_BYTES, None)
    }

    /// A log may have very many writes, each of them a run: memory for them is bounded, and none of them is forgotten.
    #[test]
    fn unsettled_runs_are_bounded_and_none_is_forgotten() {
        let mut sums = sums();
        let mut random = fastrand::Rng::with_seed(7);
        let mut named = Vec::new();
        for _ in 0..1000 {
            let sectors = SectorRange::new(random.u64(..1 << 40), random.u64(1..20));
            sums.unsettle(sectors);
            named.push(sectors);
            assert!(sums.unsettled.len() as u64 <= RUNS_MAX);
            assert!(sums.memory_bytes() <= sums.bytes_max as u64);
        }
        for sectors in named {
            let mut each = sectors.start..sectors.end();
            assert!(each.all(|sector| sums.is_unsettled(sector)), "{sectors:?}");
        }
    }

    /// What joins two runs is the smallest gap beside the one that comes.
    #[test]
    fn unsettled_run_that_is_one_too_many_joins_the_nearest() {
        let mut sums = sums();
        for run in 0..RUNS_MAX {
            sums.unsettle(SectorRange::new(run * 100, 10));
        }
        sums.unsettle(SectorRange::new(230, 10));
        assert_eq!(sums.unsettled.get(&200), Some(&240));
        sums.unsettle(SectorRange::new(290, 5));
        assert_eq!(sums.unsettled.get(&290), Some(&310));
        assert_eq!(sums.unsettled.len() as u64, RUNS_MAX);
        // No run is cut in two; from its ends sectors are taken as ever.
        sums.settle(220..225);
        assert_eq!(sums.unsettled.get(&200), Some(&240));
        sums.settle(190..225);
        assert_eq!(sums.unsettled.get(&225), Some(&240));
        sums.settle(0..1000);
        assert!(sums.unsettled.is_empty());
        sums.unsettle(SectorRange::new(0, 100));
        sums.settle(40..50);
        assert_eq!(sums.unsettled.len(), 2);
    }
}
