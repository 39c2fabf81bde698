//! What objects of the map hold: pages and their index, and usage tables.

use alloc::vec::Vec;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{OBJECT_VERSION, Writer};
use crate::base::error::FormatError;
use crate::base::limits::{
    BLOCK_BYTES, OBJECT_BATCH_BLOCKS_MAX, OBJECT_MAP_PAGES_MAX, OBJECT_NUMBER_MAX,
    OBJECT_PAGE_BLOCKS_MAX, OBJECT_PAGE_BYTES_MAX, OBJECT_RUNS_MAX, OBJECT_USAGE_ENTRIES_MAX,
};
use crate::format::{Field, Structure, on_disk, seal, seal_at, verify, verify_at};
use crate::objects::map::directory::PAGE_ALIGN;
use crate::objects::map::{Place, Run};

/// First bytes of a page of the map.
pub const PAGE_MAGIC: [u8; 8] = *b"HDCSOMAP";
/// Last bytes but 56 of a map object.
pub const MAP_MAGIC: [u8; 8] = *b"HDCSOMIX";
/// First bytes of a usage table.
pub const USAGE_MAGIC: [u8; 8] = *b"HDCSOUSE";
on_disk! {
    /// A page of the map; followed by its runs.
    MapPage: 64 bytes {
        /// `HDCSOMAP`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// MapRuns that follow.
        runs: U16,
        /// Zero.
        reserved_a: [u8; 4],
        /// CRC-64/NVME of this and the runs with this field zero.
        checksum: U64,
        /// UUID of the volume that stored it.
        volume: [u8; 16],
        /// Number of the object.
        number: U64,
        /// Number of the page: its first block divided by the blocks of a page.
        page: U64,
        /// Zero.
        reserved_b: [u8; 8],
    }
}

on_disk! {
    /// Where a page is in a map object. They ascend by page.
    MapIndexEntry: 16 bytes {
        /// Number of the page.
        page: U64,
        /// Its offset in the object, a multiple of 64.
        offset: U32,
        /// Its bytes; zero: nothing is in it, and it is not stored.
        bytes: U16,
        /// 1: every block of it is somewhere; 2: no object of the volume that stored it has changed it.
        flags: U16,
    }
}

on_disk! {
    /// The end of a map object; the index is before it.
    MapFooter: 64 bytes {
        /// `HDCSOMIX`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Zero.
        reserved_a: [u8; 2],
        /// MapIndexEntries before this footer.
        pages: U32,
        /// CRC-64/NVME of the index and this footer with this field zero.
        checksum: U64,
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of the object.
        number: U64,
        /// Zero.
        reserved_b: [u8; 16],
    }
}

on_disk! {
    /// The head of a usage table: how much of which data objects the map needs. UsageEntries follow.
    UsageHeader: 64 bytes {
        /// `HDCSOUSE`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Zero.
        reserved_a: [u8; 2],
        /// UsageEntries that follow.
        entries: U32,
        /// CRC-64/NVME of the whole with this field zero.
        checksum: U64,
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of the object that this is.
        number: U64,
        /// Zero.
        reserved_b: [u8; 16],
    }
}

on_disk! {
    /// How much of a data object the map needs. Each data object with a block in the map has one.
    UsageEntry: 16 bytes {
        /// Number of the data object.
        number: U64,
        /// Blocks that the map has there.
        live: U16,
        /// Its DataRuns.
        runs: U16,
        /// 1 if it is compressed.
        compressed: u8,
        /// Zero.
        reserved: [u8; 3],
    }
}

on_disk! {
    /// Consecutive blocks in consecutive slots. Runs of a page ascend and do not overlap.
    MapRun: 12 bytes {
        /// First block, counted from the beginning of the page.
        first: U16,
        /// Number of blocks.
        count: U16,
        /// Place of the first one.
        place: U64,
    }
}

/// Pages of the map of a volume.
pub const fn pages(volume_bytes: u64, page_blocks: u32) -> u64 {
    volume_bytes
        .div_ceil(BLOCK_BYTES as u64)
        .div_ceil(page_blocks as u64)
}

/// Bytes of a page with so many runs.
pub const fn page_bytes(runs: usize) -> usize {
    size_of::<MapPage>() + runs * size_of::<MapRun>()
}

const _: () = assert!(
    page_bytes(OBJECT_PAGE_BLOCKS_MAX as usize) <= OBJECT_PAGE_BYTES_MAX,
    "a page with a run for every block is not too large"
);

/// Write a page to `out`, which has [`page_bytes`].
pub fn write_page(volume: [u8; 16], number: u64, page: u64, runs: &[Run], out: &mut [u8]) {
    let mut head = MapPage::new_zeroed();
    head.magic = PAGE_MAGIC;
    head.version.set(OBJECT_VERSION);
    head.runs.set(runs.len() as u16);
    head.volume = volume;
    head.number.set(number);
    head.page.set(page);
    let (place, rest) = out.split_at_mut(size_of::<MapPage>());
    place.copy_from_slice(head.as_bytes());
    for (place, run) in rest.chunks_exact_mut(size_of::<MapRun>()).zip(runs) {
        let run = MapRun {
            first: U16::new(run.first),
            count: U16::new(run.count),
            place: U64::new(run.place().0),
        };
        place.copy_from_slice(run.as_bytes());
    }
    seal(out);
}

/// The runs of a page of `page_blocks` blocks, from its bytes, behind which there may be others.
pub fn parse_page(
    volume: &[u8; 16],
    number: u64,
    page: u64,
    page_blocks: u64,
    bytes: &[u8],
) -> Result<Vec<Run>, FormatError> {
    let length = FormatError::Field("length");
    let (head, _) = MapPage::read_from_prefix(bytes).map_err(|_| length)?;
    if head.magic != PAGE_MAGIC {
        return Err(FormatError::Magic);
    }
    let used = bytes.get(..page_bytes(head.runs.get().into()));
    let used = used.ok_or(length)?;
    verify(used, PAGE_MAGIC, OBJECT_VERSION)?;
    if (head.volume, head.number.get(), head.page.get()) != (*volume, number, page) {
        return Err(FormatError::Identity);
    }
    let runs = <[MapRun]>::ref_from_bytes(&used[size_of::<MapPage>()..]).map_err(|_| length)?;
    parse_runs(runs, page_blocks as u32)
}

/// The runs of a page of `limit` blocks.
fn parse_runs(runs: &[MapRun], limit: u32) -> Result<Vec<Run>, FormatError> {
    let mut end = 0;
    let mut out = Vec::with_capacity(runs.len());
    for run in runs {
        let (first, count) = (u32::from(run.first.get()), u32::from(run.count.get()));
        let place = Place(run.place.get());
        if first < end || count == 0 || first + count > limit {
            return Err(FormatError::Field("first"));
        }
        if place.number() == 0 || place.slot() + count > OBJECT_BATCH_BLOCKS_MAX as u32 {
            return Err(FormatError::Field("place"));
        }
        end = first + count;
        out.push(Run::new(first as u16, count as u16, place));
    }
    Ok(out)
}

/// A page of a map object, as its index tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    /// Number of the page.
    pub page: u64,
    /// Its offset in the object.
    pub offset: u32,
    /// Its bytes; none: nothing is in it, and it is not stored.
    pub bytes: u32,
    /// Whether every block of it is somewhere.
    pub is_full: bool,
    /// Whether no object of the volume that stored it has changed it.
    pub is_inherited: bool,
}

const INDEX_FULL: u16 = 1;
const INDEX_INHERITED: u16 = 2;

/// Bytes of the index and the footer of a map object.
pub const fn index_bytes(pages: usize) -> usize {
    pages * size_of::<MapIndexEntry>() + size_of::<MapFooter>()
}

/// Write index and footer to `out`, which has [`index_bytes`].
pub fn write_index(volume: [u8; 16], number: u64, pages: &[IndexEntry], out: &mut [u8]) {
    let at = out.len() - size_of::<MapFooter>();
    let (index, place) = out.split_at_mut(at);
    for (place, entry) in index
        .chunks_exact_mut(size_of::<MapIndexEntry>())
        .zip(pages)
    {
        let full = if entry.is_full { INDEX_FULL } else { 0 };
        let inherited = if entry.is_inherited {
            INDEX_INHERITED
        } else {
            0
        };
        let entry = MapIndexEntry {
            page: U64::new(entry.page),
            offset: U32::new(entry.offset),
            bytes: U16::new(entry.bytes as u16),
            flags: U16::new(full | inherited),
        };
        place.copy_from_slice(entry.as_bytes());
    }
    let mut footer = MapFooter::new_zeroed();
    footer.magic = MAP_MAGIC;
    footer.version.set(OBJECT_VERSION);
    footer.pages.set(pages.len() as u32);
    footer.volume = volume;
    footer.number.set(number);
    place.copy_from_slice(footer.as_bytes());
    seal_at(out, at);
}

/// The pages of a map object of a volume with `pages` pages at most, from its index and footer; `object_bytes`
/// is its size.
pub fn parse_index(
    volume: &[u8; 16],
    number: u64,
    object_bytes: u32,
    pages: u64,
    bytes: &[u8],
) -> Result<Vec<IndexEntry>, FormatError> {
    let length = FormatError::Field("length");
    let (index, footer) = MapFooter::read_from_suffix(bytes).map_err(|_| length)?;
    verify_at(bytes, index.len(), MAP_MAGIC, OBJECT_VERSION)?;
    if (footer.volume, footer.number.get()) != (*volume, number) {
        return Err(FormatError::Identity);
    }
    let index = <[MapIndexEntry]>::ref_from_bytes(index).map_err(|_| length)?;
    if index.len() != footer.pages.get() as usize || index.len() > OBJECT_MAP_PAGES_MAX {
        return Err(FormatError::Field("pages"));
    }
    let before_index = (object_bytes as usize)
        .checked_sub(bytes.len())
        .ok_or(length)?;
    let mut parsed: Vec<IndexEntry> = Vec::with_capacity(index.len());
    for entry in index {
        let (page, flags) = (entry.page.get(), entry.flags.get());
        let (offset, bytes) = (entry.offset.get(), u32::from(entry.bytes.get()));
        let ascends = parsed.last().is_none_or(|before| before.page < page);
        if !ascends || page >= pages {
            return Err(FormatError::Field("page"));
        }
        let (from, size) = (offset as usize, bytes as usize);
        if !from.is_multiple_of(PAGE_ALIGN)
            || (1..page_bytes(1)).contains(&size)
            || size > OBJECT_PAGE_BYTES_MAX
            || from.saturating_add(size) > before_index
        {
            return Err(FormatError::Field("offset"));
        }
        if flags & !(INDEX_FULL | INDEX_INHERITED) != 0 {
            return Err(FormatError::Field("flags"));
        }
        parsed.push(IndexEntry {
            page,
            offset,
            bytes,
            is_full: flags & INDEX_FULL != 0,
            is_inherited: flags & INDEX_INHERITED != 0,
        });
    }
    Ok(parsed)
}

/// How much of a data object the map needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Number of the data object.
    pub number: u64,
    /// Blocks that the map has there.
    pub live: u16,
    /// Its runs.
    pub runs: u16,
    /// Whether it is compressed.
    pub is_compressed: bool,
}

/// Bytes of a usage table.
pub const fn usage_bytes(entries: usize) -> usize {
    size_of::<UsageHeader>() + entries * size_of::<UsageEntry>()
}

/// Write a usage table to `out`, which has [`usage_bytes`].
pub fn write_usage(volume: [u8; 16], number: u64, entries: &[Usage], out: &mut [u8]) {
    let mut head = UsageHeader::new_zeroed();
    head.magic = USAGE_MAGIC;
    head.version.set(OBJECT_VERSION);
    head.entries.set(entries.len() as u32);
    head.volume = volume;
    head.number.set(number);
    let mut writer = Writer { out, at: 0 };
    writer.put(head.as_bytes());
    for usage in entries {
        let mut entry = UsageEntry::new_zeroed();
        entry.number.set(usage.number);
        entry.live.set(usage.live);
        entry.runs.set(usage.runs);
        entry.compressed = u8::from(usage.is_compressed);
        writer.put(entry.as_bytes());
    }
    let Writer { out, .. } = writer;
    seal(out);
}

/// A usage table.
pub fn parse_usage(
    volume: &[u8; 16],
    number: u64,
    bytes: &[u8],
) -> Result<Vec<Usage>, FormatError> {
    let length = FormatError::Field("length");
    let (head, entries) = UsageHeader::read_from_prefix(bytes).map_err(|_| length)?;
    verify(bytes, USAGE_MAGIC, OBJECT_VERSION)?;
    if (head.volume, head.number.get()) != (*volume, number) {
        return Err(FormatError::Identity);
    }
    let entries = <[UsageEntry]>::ref_from_bytes(entries).map_err(|_| length)?;
    if entries.len() != head.entries.get() as usize || entries.len() > OBJECT_USAGE_ENTRIES_MAX {
        return Err(FormatError::Field("entries"));
    }
    let parse = |entry: &UsageEntry| {
        let usage = Usage {
            number: entry.number.get(),
            live: entry.live.get(),
            runs: entry.runs.get(),
            is_compressed: entry.compressed == 1,
        };
        let good = (1..OBJECT_NUMBER_MAX).contains(&usage.number)
            && usage.live > 0
            && usize::from(usage.live) <= OBJECT_BATCH_BLOCKS_MAX
            && usize::from(usage.runs) <= OBJECT_RUNS_MAX
            && entry.compressed <= 1;
        if good {
            Ok(usage)
        } else {
            Err(FormatError::Field("entry"))
        }
    };
    entries.iter().map(parse).collect()
}
