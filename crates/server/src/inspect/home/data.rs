//! The data of a local store that nobody has open, compared with its checksums.
//!
//! What was written since the last flush need not match: the write log writes it again. So what the log has is
//! left out. If that is not known, as without the key of an encrypted log, what does not match is counted alone.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use hdcs_backend::crypt::Encryption;
use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use hdcs_core::format::{LOG_UNFLUSHED, LogSuperblock, block_checksum};
use hdcs_core::local::format::{CRC_BYTES, HomeSuperblock, PAGE_BLOCKS};
use hdcs_core::local::map::Map;
use uuid::Uuid;

use super::{BLOCK, READ_BLOCKS};
use crate::data_dir::kept;
use crate::inspect::{foreign, packed, replay, superblocks};

/// What is in the write log of a volume, whose directory is `directory`; `None` if that is not all that was written
/// since a flush, or cannot be told. Of a log that was given up, what is kept beside it counts, as at an opening: its
/// device holds what was written since in the local store.
pub fn logged(
    log: &Path,
    directory: &Path,
    uuid: Uuid,
    encryption: Option<&Encryption>,
) -> Option<Vec<SectorRange>> {
    let file = File::open(log).ok()?;
    let found = superblocks(&file).ok()?;
    let superblock = &LogSuperblock::in_force(found).ok()?;
    let kept = kept::read(directory, uuid).ok()?;
    let is_newer = |kept: &LogSuperblock| {
        kept.log == superblock.log && kept.sequence.get() > superblock.sequence.get()
    };
    let kept = kept.filter(is_newer);
    let flags = kept.as_ref().unwrap_or(superblock).flags.get();
    if foreign(superblock, Some(uuid)).is_some() || flags & LOG_UNFLUSHED != 0 {
        return None;
    }
    let cipher = Encryption::of_log(encryption, superblock).ok()?;
    let (log, _) = replay(&file, superblock, kept.as_ref(), cipher.as_ref()).ok()?;
    let mut ranges: Vec<_> = packed::entries(&log).map(|entry| entry.range).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<SectorRange> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end() => {
                *last = SectorRange::between(last.start, last.end().max(range.end()));
            }
            _ => merged.push(range),
        }
    }
    Some(merged)
}

/// What a comparison has found.
#[derive(Debug, Default)]
pub struct Compared {
    /// Blocks that match.
    pub good_blocks: u64,
    /// Sectors that do not, and that the log writes again.
    pub to_come_sectors: u64,
    /// Sectors that do not, and of which nobody knows whether it does.
    pub unknown_sectors: u64,
}

impl Compared {
    /// Compare what a page of the map says is here.
    pub fn add(
        &mut self,
        file: &File,
        superblock: &HomeSuperblock,
        (number, map): (u64, &Map),
        logged: Option<&[SectorRange]>,
        problems: &mut Vec<String>,
    ) -> io::Result<()> {
        let blocks = map.blocks();
        let mut data = vec![0; (READ_BLOCKS * BLOCK) as usize];
        let layout = superblock.layout();
        let sums_bytes = BLOCK_SECTORS as usize * layout.sum_bytes();
        let mut sums = vec![0; READ_BLOCKS as usize * sums_bytes];
        let mut bad: Option<Range<u64>> = None;
        let mut block = 0;
        while block < blocks {
            let end = (block + READ_BLOCKS).min(blocks);
            let first = number * PAGE_BLOCKS + block;
            let here: Vec<bool> = (block..end).map(|block| map.get(block).is_here()).collect();
            block = end;
            if !here.contains(&true) {
                continue;
            }
            let data = &mut data[..here.len() * BLOCK_BYTES];
            let sums = &mut sums[..here.len() * sums_bytes];
            if let Err(error) = file.read_exact_at(data, layout.data_offset(first * BLOCK)) {
                let at = first * BLOCK;
                problems.push(format!(
                    "bytes {at} to {} of the volume cannot be read: {error}: look at its device, and write them \
                     again or restore them from a backup",
                    at + data.len() as u64
                ));
                continue;
            }
            file.read_exact_at(sums, layout.sum_offset(first * BLOCK_SECTORS))?;
            for (index, _) in here.iter().enumerate().filter(|(_, is_here)| **is_here) {
                let block = first + index as u64;
                let data = &data[index * BLOCK_BYTES..][..BLOCK_BYTES];
                let sums = &sums[index * sums_bytes..][..sums_bytes];
                let Some(logged) = logged else {
                    let sectors = bad_sectors(block, data, sums).count() as u64;
                    self.good_blocks += u64::from(sectors == 0);
                    self.unknown_sectors += sectors;
                    continue;
                };
                if self.is_good(block, data, sums, logged) {
                    self.good_blocks += 1;
                    continue;
                }
                match &mut bad {
                    Some(run) if run.end == block => run.end += 1,
                    _ => {
                        problems.extend(bad.replace(block..block + 1).map(words));
                    }
                }
            }
        }
        problems.extend(bad.map(words));
        Ok(())
    }

    fn is_good(&mut self, block: u64, data: &[u8], sums: &[u8], logged: &[SectorRange]) -> bool {
        let mut is_good = true;
        for sector in bad_sectors(block, data, sums) {
            let after = logged.partition_point(|range| range.end() <= sector);
            if logged.get(after).is_some_and(|range| range.start <= sector) {
                self.to_come_sectors += 1;
            } else {
                is_good = false;
            }
        }
        is_good
    }
}

/// The sectors of a block that do not match their checksums.
fn bad_sectors(block: u64, data: &[u8], sums: &[u8]) -> impl Iterator<Item = u64> {
    // A tag may follow each of them, for whoever has the key.
    let sums = sums.chunks(sums.len() / BLOCK_SECTORS as usize);
    let sectors = (block * BLOCK_SECTORS..).zip(data.chunks(SECTOR_BYTES).zip(sums));
    sectors.filter_map(|(sector, (data, sum))| {
        (block_checksum(data).to_le_bytes() != sum[..CRC_BYTES]).then_some(sector)
    })
}

/// What is to be known of blocks that do not match.
pub fn words(blocks: Range<u64>) -> String {
    format!(
        "bytes {} to {} of the volume do not match their checksums: reading them fails; write them again, or \
         restore them from a backup",
        blocks.start * BLOCK,
        blocks.end * BLOCK
    )
}
