//! The local store of a volume in storage mode: its superblocks, both copies of every page of its map, and its data.
//!
//! The data of a local store that is in use is compared with its checksums by whoever has it open, which knows what is
//! being written.

pub mod data;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use data::Compared;
use hdcs_api::CheckReport;
use hdcs_backend::home::store::pair;
use hdcs_backend::verify::{Verified, Watch};
use hdcs_core::base::error::FormatError;
use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::local::format::{
    FoundPage, HOME_BETWEEN, HOME_MAGIC, HomeSuperblock, MapCheck, SUMS_UNTRUSTED, choose_page,
    pages,
};
use hdcs_core::local::map::{BlockState, Map};
use serde::Serialize;
use uuid::Uuid;

use super::{LIVE_PAUSE, OTHER_SUPERBLOCK, Use};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// How often a page that is being written may be found torn.
const LIVE_TRIES: usize = 20;
/// Data that is read at once.
const READ_BLOCKS: u64 = 256;

/// What is in a local store.
#[derive(Clone, Debug, Serialize)]
pub struct LocalStoreSummary {
    /// The volume that it is of.
    pub volume: Uuid,
    /// Size of the volume.
    pub bytes: u64,
    /// Counts superblock writes.
    pub sequence: u64,
    /// The data key that its data is encrypted with, if it is.
    pub data_key: Option<Uuid>,
    /// Whether tiering out has begun and not ended, so that the backend is between two states.
    pub backend_between: bool,
    /// Pages of the map.
    pub pages: u64,
    /// Copies of pages that cannot be used although the other can.
    pub damaged_copies: u64,
    /// Bytes that the backend lacks.
    pub dirty_bytes: u64,
    /// Bytes that read as zeroes, which the backend lacks.
    pub zero_bytes: u64,
    /// Bytes that the backend has too.
    pub clean_bytes: u64,
    /// Bytes that only the backend has.
    pub absent_bytes: u64,
    /// Whether the checksums of its data are believed.
    pub checksums_believed: bool,
    /// What is wrong.
    pub problems: Vec<String>,
}

/// Whether a file or device begins like a local store.
pub fn is_home(file: &File) -> io::Result<bool> {
    let mut head = vec![0; 2 * BLOCK_BYTES];
    match file.read_exact_at(&mut head, 0) {
        Ok(()) => Ok(head
            .chunks(BLOCK_BYTES)
            .any(|block| block.starts_with(&HOME_MAGIC))),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gets the number of a good page, what it says, and the list of problems; whether to go on.
type Visit<'a> = dyn FnMut(u64, &Map, &mut Vec<String>) -> io::Result<bool> + 'a;

/// Whether both copies of a page are whole.
fn is_whole(found: &Result<FoundPage, FormatError>) -> bool {
    (found.as_ref()).is_ok_and(|found| found.generations.iter().all(Result::is_ok))
}

/// Read both copies of a page. One that is being written is read again.
fn page(
    file: &File,
    superblock: &HomeSuperblock,
    number: u64,
    how: Use,
) -> io::Result<Result<FoundPage, FormatError>> {
    let (home, place) = (
        superblock.home.get(),
        superblock.layout().page_offset(number, 0),
    );
    let tries = if how == Use::Live { LIVE_TRIES } else { 1 };
    for left in (0..tries).rev() {
        let copies = pair(file, place)?;
        let found = choose_page([&copies[0], &copies[1]], home, number, None);
        if is_whole(&found) || left == 0 {
            return Ok(found);
        }
        std::thread::sleep(LIVE_PAUSE);
    }
    unreachable!("the last try returns")
}

/// Whether a local store that is in use has been cut before a page.
fn is_cut_off(file: &File, page: u64) -> io::Result<bool> {
    let found = pair(file, 0)?;
    let superblock = HomeSuperblock::newest([&found[0], &found[1]]);
    Ok(superblock.is_ok_and(|superblock| pages(superblock.bytes.get()) <= page))
}

/// Describe the local store in `file`, of which is known which volume's it should be.
pub fn summarize(file: &File, expected: Option<Uuid>, how: Use) -> io::Result<LocalStoreSummary> {
    walk(file, expected, how, &mut |_, _, _| Ok(true))
}

/// Go through a local store.
fn walk(
    file: &File,
    expected: Option<Uuid>,
    how: Use,
    visit: &mut Visit<'_>,
) -> io::Result<LocalStoreSummary> {
    let mut summary = LocalStoreSummary {
        volume: Uuid::nil(),
        bytes: 0,
        sequence: 0,
        data_key: None,
        backend_between: false,
        pages: 0,
        damaged_copies: 0,
        dirty_bytes: 0,
        zero_bytes: 0,
        clean_bytes: 0,
        absent_bytes: 0,
        checksums_believed: false,
        problems: Vec::new(),
    };
    let found = pair(file, 0)?;
    let superblock = match HomeSuperblock::newest([&found[0], &found[1]]) {
        Ok(superblock) => superblock,
        Err(error) => {
            summary
                .problems
                .push(format!(
                    "no usable superblock: {error}: put a good copy of the local store back, or give up what only it \
                     holds with `hdcs volume open NAME --discard-dirty`"
                ));
            return Ok(summary);
        }
    };
    for (copy, block) in found.iter().enumerate() {
        // The first of a new local store was never written.
        let is_empty = block.iter().all(|&byte| byte == 0);
        if let Some(error) = HomeSuperblock::parse(block).err().filter(|_| !is_empty) {
            let problem = format!("superblock {copy}: {error}: {OTHER_SUPERBLOCK}");
            summary.problems.push(problem);
        }
    }
    summary.volume = Uuid::from_bytes(superblock.volume);
    if let Some(expected) = expected.filter(|&expected| expected != summary.volume) {
        let found = summary.volume;
        summary.problems.push(format!(
            "it is the local store of volume {found}, not of {expected}: put the right one in its place"
        ));
        return Ok(summary);
    }
    summary.bytes = superblock.bytes.get();
    summary.sequence = superblock.sequence.get();
    let data_key = Uuid::from_bytes(superblock.data_key);
    summary.data_key = (!data_key.is_nil()).then_some(data_key);
    summary.backend_between = superblock.flags.get() & HOME_BETWEEN != 0;
    summary.checksums_believed = superblock.sums_log.get() != SUMS_UNTRUSTED;
    summary.pages = pages(summary.bytes);
    let mut check = MapCheck::new(&superblock);
    let mut is_all = true;
    for number in 0..summary.pages {
        let found = page(file, &superblock, number, how);
        if !found.as_ref().is_ok_and(is_whole) && how == Use::Live && is_cut_off(file, number)? {
            is_all = false;
            break;
        }
        let found = match found? {
            Ok(found) => found,
            Err(error) => {
                summary.problems.push(format!(
                    "both copies of page {number} of its map: {error}: what is dirty below it is lost; restore it \
                     from a backup"
                ));
                is_all = false;
                continue;
            }
        };
        check.add(&found);
        for (copy, generation) in found.generations.iter().enumerate() {
            if let Err(error) = generation {
                summary.damaged_copies += 1;
                summary.problems.push(format!(
                    "copy {copy} of page {number} of its map: {error}: the other copy is good, and the next opening \
                     writes this one anew"
                ));
            }
        }
        let map = Map::of_page(found.page, summary.bytes);
        summary.absent_bytes += map.count(BlockState::Absent) * BLOCK;
        summary.clean_bytes += map.count(BlockState::Clean) * BLOCK;
        summary.dirty_bytes += map.count(BlockState::Dirty) * BLOCK;
        summary.zero_bytes += map.count(BlockState::Zero) * BLOCK;
        if !visit(number, &map, &mut summary.problems)? {
            is_all = false;
            break;
        }
    }
    // One that is in use commits meanwhile.
    if is_all
        && how == Use::Offline
        && let Err(error) = check.end()
    {
        let why = format!(
            "its map: {error}, so that what was flushed last is gone: restore it from a backup"
        );
        summary.problems.push(why);
    }
    Ok(summary)
}

/// Verify superblocks and map of the local store at `path`, and, if nobody has it open, its data; `logged` is what its
/// log is going to write again, if that is known. Checksums are of what is stored, so it needs no key.
pub fn check(
    path: &Path,
    expected: Option<Uuid>,
    how: Use,
    logged: Option<&[SectorRange]>,
) -> CheckReport {
    let mut report = CheckReport {
        path: path.display().to_string(),
        ..CheckReport::default()
    };
    match File::open(path).and_then(|file| check_file(&file, expected, how, logged)) {
        Ok((summary, compared, note)) => {
            let pages = 2 * summary.pages - summary.damaged_copies.min(2 * summary.pages);
            report.blocks = pages + compared.good_blocks;
            report.note = note;
            let shown = path.display();
            let problems = summary.problems.iter();
            report.problems = problems.map(|why| format!("{shown}: {why}")).collect();
        }
        Err(error) => report.problems.push(format!("{}: {error}", path.display())),
    }
    report
}

fn check_file(
    file: &File,
    expected: Option<Uuid>,
    how: Use,
    logged: Option<&[SectorRange]>,
) -> io::Result<(LocalStoreSummary, Compared, Option<String>)> {
    let superblock = pair(file, 0)?;
    let superblock = HomeSuperblock::newest([&superblock[0], &superblock[1]]).ok();
    let mut compared = Compared::default();
    let sums_log = superblock.as_ref().map(|one| one.sums_log.get());
    let left_out = match sums_log {
        Some(SUMS_UNTRUSTED) => Some(
            "only its map was verified: the checksums of its data are being made anew, so check it again later",
        ),
        _ if how == Use::Live => Some(
            "only its map was verified: to verify its data, run `hdcs volume scrub`, or without a daemon `hdcs check DIR` \
             on the data directory",
        ),
        _ => None,
    };
    let summary = walk(file, expected, how, &mut |number, map, problems| {
        if let (None, Some(superblock)) = (left_out, &superblock) {
            compared.add(file, superblock, (number, map), logged, problems)?;
        }
        Ok(true)
    })?;
    let (to_come, unknown) = (compared.to_come_sectors, compared.unknown_sectors);
    let note = match left_out {
        Some(why) => Some(why.to_owned()),
        None if to_come > 0 => Some(format!(
            "{to_come} sectors do not match their checksums and are in the write log, which writes them again"
        )),
        None if unknown > 0 => Some(format!(
            "{unknown} sectors do not match their checksums: they are damaged, or the write log writes them again, \
             which cannot be told without it and its key"
        )),
        None => None,
    };
    Ok((summary, compared, note))
}

/// Asks whoever has a local store open to compare what is in it from a block on.
pub type AskHome<'a> = dyn FnMut(u64) -> io::Result<hdcs_core::local::Verified> + 'a;

/// Verify the map of a local store that is in use, and its data by its checksums.
pub fn verify(
    path: &Path,
    expected: Uuid,
    watch: &mut dyn Watch,
    ask: &mut AskHome<'_>,
) -> io::Result<Verified> {
    let file = File::open(path)?;
    let mut verified = Verified::default();
    watch.total(file.metadata()?.len());
    let summary = walk(&file, Some(expected), Use::Live, &mut |_, _, _| {
        if !watch.passed(2 * BLOCK) {
            verified.is_cut_short = true;
            return Ok(false);
        }
        verified.bytes += 2 * BLOCK;
        Ok(true)
    })?;
    for problem in summary.problems {
        verified.problem(problem);
    }
    let mut next = (!verified.is_cut_short).then_some(0);
    while let Some(block) = next {
        let found = ask(block)?;
        next = found.next;
        for block in found.damaged {
            verified.problem(data::words(block..block + 1));
        }
        verified.bytes += found.read_bytes;
        if !watch.passed(found.read_bytes) {
            verified.is_cut_short = true;
            break;
        }
    }
    Ok(verified)
}

#[cfg(test)]
mod tests {
    use hdcs_backend::home::store;
    use hdcs_core::base::limits::{BLOCK_SECTORS, SECTOR_BYTES};
    use hdcs_core::format::block_checksum;
    use hdcs_core::local::format::{
        CRC_BYTES, HomePage, Layout, PAGE_BLOCKS, PAGE_STATE_BYTES, page_digest,
    };
    use zerocopy::IntoBytes;

    use super::*;

    const BYTES: u64 = 3 * PAGE_BLOCKS * BLOCK / 2;
    const PLAIN: Layout = Layout::PLAIN;

    #[test]
    fn home_check_counts_and_names_what_is_damaged() {
        let directory = tempfile::tempdir().unwrap();
        let (path, uuid) = (directory.path().join("home"), Uuid::from_u128(5));
        store::create(&path, uuid, BYTES, false, None).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let summary = summarize(&file, Some(uuid), Use::Offline).unwrap();
        assert_eq!((summary.pages, summary.absent_bytes), (2, BYTES));
        assert!(
            is_home(&file).unwrap() && summary.problems.is_empty(),
            "{summary:?}"
        );
        assert!(
            check(&path, Some(uuid), Use::Offline, Some(&[]))
                .problems
                .is_empty()
        );
        let foreign = check(&path, Some(Uuid::from_u128(6)), Use::Offline, Some(&[]));
        assert!(foreign.problems[0].contains("not of"), "{foreign:?}");
        // One copy, then the other.
        file.write_all_at(&[1], PLAIN.page_offset(1, 1) + 99)
            .unwrap();
        let one = check(&path, Some(uuid), Use::Live, Some(&[]));
        assert_eq!(one.problems.len(), 1);
        assert!(one.problems[0].contains("copy 1 of page 1") && one.problems[0].contains("anew"));
        file.write_all_at(&[1], PLAIN.page_offset(1, 0) + 99)
            .unwrap();
        let both = check(&path, Some(uuid), Use::Offline, Some(&[]));
        assert!(
            both.problems[0].contains("both copies of page 1"),
            "{both:?}"
        );
        file.write_all_at(&[1; 3 * BLOCK_BYTES], 0).unwrap();
        let none = check(&path, Some(uuid), Use::Offline, Some(&[]));
        assert!(
            none.problems[0].contains("no usable superblock"),
            "{none:?}"
        );
        assert!(!is_home(&file).unwrap());
    }

    #[test]
    fn home_check_compares_data_with_its_checksums_and_needs_no_key() {
        for data_key in [[0; 16], [5; 16]] {
            check_data(data_key);
        }
    }

    fn check_data(data_key: [u8; 16]) {
        let directory = tempfile::tempdir().unwrap();
        let (path, uuid) = (directory.path().join("home"), Uuid::from_u128(5));
        let file = File::create(&path).unwrap();
        let digest = (0..pages(BYTES)).map(|page| page_digest(page, 1));
        let superblock = HomeSuperblock::sealed(uuid.into_bytes(), 3, 1, BYTES, 0, 9)
            .encrypted(data_key)
            .counting(1, digest.fold(0, u64::wrapping_add));
        let layout = superblock.layout();
        file.set_len(layout.store_bytes(BYTES)).unwrap();
        file.write_all_at(superblock.as_bytes(), superblock.place())
            .unwrap();
        for number in 0..pages(BYTES) {
            let mut states = [0; PAGE_STATE_BYTES];
            // Its second block is dirty.
            states[0] = 2 << 2;
            let page = HomePage::sealed(3, 9, 1, number, &states);
            for copy in [0, 1] {
                file.write_all_at(page.as_bytes(), layout.page_offset(number, copy))
                    .unwrap();
            }
            let block = number * PAGE_BLOCKS + 1;
            let data = [number as u8 + 1; BLOCK_BYTES];
            file.write_all_at(&data, layout.data_offset(block * BLOCK))
                .unwrap();
            let crc = block_checksum(&data[..SECTOR_BYTES]).to_le_bytes();
            // Nobody looks at tags without the key.
            let sum = [&crc[..], &[0x5a; 4][..layout.sum_bytes() - CRC_BYTES]].concat();
            let sums = layout.sum_offset(block * BLOCK_SECTORS);
            file.write_all_at(&sum.repeat(BLOCK_SECTORS as usize), sums)
                .unwrap();
        }
        let good = check(&path, Some(uuid), Use::Offline, Some(&[]));
        assert!(good.problems.is_empty(), "{good:?}");
        assert_eq!(good.blocks, 2 * 2 + 2);
        let place = layout.data_offset((PAGE_BLOCKS + 1) * BLOCK);
        file.write_all_at(&[9], place).unwrap();
        let bad = check(&path, Some(uuid), Use::Offline, Some(&[]));
        let at = (PAGE_BLOCKS + 1) * BLOCK;
        assert!(
            bad.problems.len() == 1 && bad.problems[0].contains(&format!("bytes {at} to")),
            "{bad:?}"
        );
    }

    #[test]
    fn home_that_is_cut_while_it_is_checked_has_no_pages_behind_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let (path, uuid) = (directory.path().join("home"), Uuid::from_u128(5));
        store::create(&path, uuid, BYTES, false, None).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut seen = Vec::new();
        let summary = walk(&file, Some(uuid), Use::Live, &mut |number, _, _| {
            seen.push(number);
            // As a shrink does, in this order.
            let bytes = PAGE_BLOCKS * BLOCK;
            let [_, second] = pair(&file, 0)?;
            let home = HomeSuperblock::parse(&second).unwrap().home.get();
            let cut = HomeSuperblock::sealed(uuid.into_bytes(), home, 2, bytes, 0, 0);
            file.write_all_at(cut.as_bytes(), cut.place())?;
            file.set_len(PLAIN.store_bytes(bytes))?;
            Ok(true)
        });
        assert!(summary.unwrap().problems.is_empty());
        assert_eq!(seen, [0]);
    }
}
