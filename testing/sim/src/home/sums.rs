//! Rot of a local store's data and of its checksums, and what the local store may refuse for that: a sector that
//! rotted, and one that a crash may have caught, until the log has written it again. Nothing else.

use std::collections::BTreeSet;

use fastrand::Rng;
use hdcs_core::base::buf::Buf;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{SectorRange, Token};
use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use hdcs_core::format::block_checksum;
use hdcs_core::local::format::{CRC_BYTES, Layout, PAGE_BLOCKS};
use hdcs_core::local::{Event, LocalStore, Verified};

use super::Options;
use super::plant::Plant;
use super::world::{Request, State, StoreWorld, Write};
use crate::content::{Content, mix};
use crate::disk::{Disk, joined};
use crate::violation::Violation;

const SECTOR: u64 = SECTOR_BYTES as u64;

/// Whether the checksums of data lie at an offset of the store.
fn is_sums(layout: Layout, offset: u64) -> bool {
    let first = layout.page_offset(0, 0);
    let group = layout.page_offset(1, 0) - first;
    let of_group = offset.saturating_sub(first) % group;
    let sums = layout.sums_offset(0) - first..layout.data_offset(0) - first;
    offset >= first && sums.contains(&of_group)
}

/// What somebody does who has changed the data of a sector.
fn make_checksum_right(store: &mut Disk, layout: Layout, sector: u64) {
    let mut data = vec![0; SECTOR_BYTES];
    store.peek(layout.data_offset(sector * SECTOR), &mut data);
    let crc = block_checksum(&data).to_le_bytes();
    let place = layout.sum_offset(sector);
    let of_sector = place % SECTOR;
    store.peek(place - of_sector, &mut data);
    data[of_sector as usize..][..CRC_BYTES].copy_from_slice(&crc);
    store.put(place - of_sector, &data);
}

/// What becomes of the log in a crash.
#[derive(Clone, Copy, Debug)]
pub(super) enum LostLog {
    /// Nothing.
    Not,
    /// It let writes past it, so it does not write them again.
    WritesPastIt,
    /// There is another one.
    AsAWhole,
}

/// What a run has besides for its checksums. Its randomness is a stream of its own.
#[derive(Debug)]
pub(super) struct Sums {
    random: Rng,
    /// A volume of which all is written, so that the table does not fit the memory for it.
    pub blocks: Option<u64>,
    pub memory_bytes: usize,
    /// Whether something rots; then no log is lost, or what rotted would be believed.
    pub rots: bool,
    /// Whether the log writes everything again.
    pub is_log_whole: bool,
    rotten: BTreeSet<u64>,
    rotted: u64,
    forged: u64,
    /// Planted: parts of the table that are still to be written.
    pub late: Vec<(u64, Vec<u8>)>,
    /// What a scrub has found damaged, and where it goes on.
    damaged: BTreeSet<u64>,
    next: Option<u64>,
}

impl Sums {
    pub fn new(seed: u64, options: Options) -> Self {
        let mut random = Rng::with_seed(mix(seed ^ mix(11)));
        let is_wide = random.u8(..6) == 0;
        let rots = random.bool();
        Self {
            blocks: is_wide.then_some(250),
            memory_bytes: random.usize(1..3) * BLOCK_BYTES,
            rots: rots && options.crash_at.is_none(),
            random,
            is_log_whole: true,
            rotten: BTreeSet::new(),
            rotted: 0,
            forged: 0,
            late: Vec::new(),
            damaged: BTreeSet::new(),
            next: None,
        }
    }

    /// Whether bits flip at rest.
    pub fn may_rot(&self) -> bool {
        self.rots
    }

    /// What becomes of a log that a crash may have taken.
    pub fn how_log_is_lost(&mut self) -> LostLog {
        if self.rots {
            LostLog::Not
        } else if self.random.bool() {
            LostLog::WritesPastIt
        } else {
            LostLog::AsAWhole
        }
    }

    /// Some bits flip at rest, of the data or of a checksum. Some of an encrypted local store are not rot: somebody
    /// without the key changes the data, and makes its checksum right again.
    pub fn rot(&mut self, store: &mut Disk, layout: Layout, window: SectorRange) {
        if !self.rots || self.random.bool() {
            return;
        }
        for _ in 0..self.random.u32(1..6) {
            let sector = window.start + self.random.u64(..window.count);
            let is_data = self.random.bool();
            let offset = if is_data {
                layout.data_offset(sector * SECTOR) + self.random.u64(..SECTOR)
            } else {
                layout.sum_offset(sector) + self.random.u64(..layout.sum_bytes() as u64)
            };
            if store.rot(offset, self.random.u8(..8)) {
                self.rotten.insert(sector);
                self.rotted += 1;
                if is_data && layout == Layout::TAGGED && self.random.bool() {
                    make_checksum_right(store, layout, sector);
                    self.forged += 1;
                }
            }
        }
    }

    /// There is nothing any more from a sector on.
    pub fn forget_from(&mut self, sector: u64) {
        self.rotten.split_off(&sector);
    }

    /// What is written is good.
    pub fn heal(&mut self, range: SectorRange) {
        self.rotten
            .retain(|sector| !(range.start..range.end()).contains(sector));
    }
}

impl StoreWorld {
    /// Whether a sector may not match: it rotted, or it was being written when the power went.
    fn may_be_bad(&self, sector: u64) -> bool {
        let mut writes = self.generation.iter();
        let is_of = |write: &Write| (write.range.start..write.range.end()).contains(&sector);
        let is_unsettled = writes.any(|write| write.state != State::Done && is_of(write));
        is_unsettled || self.sums.rotten.contains(&sector)
    }

    /// The local store has named a sector.
    pub(super) fn is_damaged(&mut self, sector: u64) -> Result<(), Violation> {
        self.engine.note("damaged", [sector, 0, 0, 0]);
        if self.is_log_lost || !self.sums.rotten.contains(&sector) {
            let why = format!("sector {sector} is good, and is said to be damaged");
            return Err(Violation::new("good-refused", why));
        }
        Ok(())
    }

    /// A read was refused: what is good in its range is read by itself.
    pub(super) fn refused(&mut self, range: SectorRange) -> Result<(), Violation> {
        self.coverage.refused += 1;
        let sectors = range.start..range.end();
        if self.is_log_lost || !sectors.clone().any(|sector| self.may_be_bad(sector)) {
            let why = format!("a read of {range:?} was refused, and nothing there is bad");
            return Err(Violation::new("good-refused", why));
        }
        let mut from = range.start;
        for sector in sectors {
            if self.may_be_bad(sector) {
                if from < sector {
                    self.read(SectorRange::between(from, sector));
                }
                from = sector + 1;
            }
        }
        if from < range.end() {
            self.read(SectorRange::between(from, range.end()));
        }
        Ok(())
    }

    /// Write over everything that rotted: that makes it good.
    pub(super) fn write_over_rot(&mut self) {
        let end = self.window.end();
        for sector in self.sums.rotten.range(..end).copied().collect::<Vec<_>>() {
            let range = SectorRange::new(sector, 1);
            if self
                .generation
                .iter()
                .any(|write| write.range.overlaps(range))
            {
                continue;
            }
            self.next_write += 1;
            self.generation.push(Write {
                range,
                content: Content::Write(self.next_write),
                state: State::ToDo,
            });
        }
    }

    /// A planted bug: a block of the table is, when it is read, made that of what the store holds.
    pub(super) fn make_sums_match(&mut self, offset: u64) {
        let layout = self.layout();
        if !is_sums(layout, offset) {
            return;
        }
        let group = layout.page_offset(1, 0) - layout.page_offset(0, 0);
        let page = (offset - layout.page_offset(0, 0)) / group;
        let of_page = (offset - layout.page_offset(page, 2)) / BLOCK_BYTES as u64;
        let first = page * PAGE_BLOCKS * BLOCK_SECTORS + of_page * layout.sums_sectors();
        let end = (first + layout.sums_sectors()).min(self.bytes / SECTOR);
        let (mut data, mut sums) = (vec![0; SECTOR_BYTES], vec![0; BLOCK_BYTES]);
        for (sector, sum) in (first..end).zip(sums.chunks_exact_mut(layout.sum_bytes())) {
            self.store
                .peek(layout.data_offset(sector * SECTOR), &mut data);
            let (crc, tag) = sum.split_at_mut(CRC_BYTES);
            crc.copy_from_slice(&block_checksum(&data).to_le_bytes());
            if let Some(cipher) = &self.cipher {
                let mut tags = [0];
                cipher.unit_tags(sector, &data, &mut tags);
                tag.copy_from_slice(&tags[0].to_le_bytes());
            }
        }
        self.store.put(offset, &sums);
    }

    /// Planted bugs of writes of the table; whether this one is not performed now.
    pub(super) fn loses_sums(&mut self, offset: u64, data: &[Buf]) -> bool {
        if !is_sums(self.layout(), offset) {
            return false;
        }
        if self.is_planted(Plant::SumsAfterAnswer) {
            self.sums.late.push((offset, joined(data)));
            return true;
        }
        self.is_planted(Plant::SumsLost) && offset.is_multiple_of(3)
    }

    /// All of the local store is compared with its checksums, which hold; false if the local store is gone.
    pub(super) fn scrub(&mut self) -> Result<bool, Violation> {
        self.coverage.rots += core::mem::take(&mut self.sums.rotted);
        self.coverage.forged_sectors += core::mem::take(&mut self.sums.forged);
        let is_rebuilding = |world: &Self| {
            let status = world.home.as_ref().map(LocalStore::status);
            status.is_some_and(|status| status.sums_rebuild.is_some())
        };
        if is_rebuilding(self) {
            self.coverage.rebuilds += 1;
            if !self.wait(|world| !is_rebuilding(world))? {
                return Ok(false);
            }
        }
        self.sums.damaged.clear();
        self.sums.next = Some(0);
        while let Some(block) = self.sums.next.take() {
            self.verify(block);
            if !self.wait(|world| world.requests.is_empty())? {
                return Ok(false);
            }
        }
        // All that rotted was written over.
        match self.sums.damaged.first() {
            None => Ok(true),
            Some(block) => Err(Violation::new("good-refused", format!("block {block}"))),
        }
    }

    /// Before the log writes the last generation again, it is scrubbed, and a tier is asked for, sometimes; false if
    /// the local store is gone.
    pub(super) fn is_used_before_rewriting(&mut self) -> Result<bool, Violation> {
        if self.calm || self.sums.random.bool() {
            return Ok(true);
        }
        if self.sums.random.bool() {
            self.begin_tier();
        }
        for index in 0..self.generation.len() {
            let range = self.generation[index].range;
            self.verify(range.first_block());
            if self.sums.random.bool() {
                self.read(range);
            }
        }
        self.wait(|world| world.requests.is_empty())
    }

    /// A piece of a scrub beside everything else, sometimes.
    pub(super) fn verify_sometimes(&mut self) {
        if !self.calm && self.sums.random.u8(..12) == 0 {
            let first = self.window.start / BLOCK_SECTORS;
            // Some are behind the end.
            let blocks = self.window.count / BLOCK_SECTORS + 20;
            let block = first + self.sums.random.u64(..blocks);
            self.verify(block);
        }
    }

    fn verify(&mut self, block: u64) {
        self.next_request += 1;
        let token = Token(self.next_request);
        self.requests.insert(self.next_request, Request::Verify);
        self.event(Event::Verify { token, block });
    }

    /// A piece of a scrub has ended.
    pub(super) fn verified(
        &mut self,
        token: Token,
        found: Result<Verified, IoError>,
    ) -> Result<(), Violation> {
        if self.requests.remove(&token.0).is_none() {
            return Err(Violation::new("ended-twice", format!("{token:?}")));
        }
        match found {
            Ok(found) => {
                self.sums.damaged.extend(&found.damaged);
                self.sums.next = found.next;
                let mut damaged = found.damaged.iter();
                let is_good = |block: &&u64| {
                    let first = **block * BLOCK_SECTORS;
                    let sectors = first..first + BLOCK_SECTORS;
                    self.sums.rotten.range(sectors).next().is_none()
                };
                match damaged.find(is_good) {
                    None => Ok(()),
                    Some(block) => Err(Violation::new("good-refused", format!("block {block}"))),
                }
            }
            Err(_) if self.faults && !self.calm => Ok(()),
            Err(error) => Err(Violation::new(
                "error-without-cause",
                format!("scrub: {error}"),
            )),
        }
    }
}
