//! What the objects of a volume hold; the layout is described in [`crate::format`].
//!
//! Everything is parsed from bytes that a store returned, so nothing is trusted: a parser checks
//! magic, version, checksum, identity and bounds, in this order, and never panics.

mod map;

use alloc::string::String;
use alloc::vec::Vec;

pub use map::*;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::frames::{COMPRESSED_SLOTS_MIN, FRAMES_OFFSET};
use super::io::SnapshotName;
use super::map::Place;
use crate::base::error::FormatError;
use crate::base::limits::{
    BLOCK_BYTES, OBJECT_ANCESTORS_MAX, OBJECT_BATCH_BLOCKS_MAX, OBJECT_BEGINNINGS_MAX,
    OBJECT_LOCATION_BYTES_MAX, OBJECT_MANIFEST_BYTES_MAX, OBJECT_MAP_BYTES_MAX,
    OBJECT_MAP_PAGES_MAX, OBJECT_MAPS_MAX, OBJECT_NUMBER_MAX, OBJECT_PAGE_BLOCKS_MAX,
    OBJECT_PAGE_BLOCKS_MIN, OBJECT_PAGES_MAX, OBJECT_RUNS_MAX, OBJECT_SNAPSHOT_NAME_BYTES_MAX,
    OBJECT_SNAPSHOTS_MAX, OBJECT_USAGE_ENTRIES_MAX, OBJECT_USAGES_MAX, OBJECT_VOLUME_BYTES_MAX,
    SECTOR_BYTES,
};
use crate::format::{Field, Structure, on_disk, seal, seal_at, verify, verify_at};

/// Last bytes but 56 of a data object.
pub const DATA_MAGIC: [u8; 8] = *b"HDCSODAT";
/// First bytes of a manifest.
pub const MANIFEST_MAGIC: [u8; 8] = *b"HDCSOMAN";
/// First bytes of the reference of a clone.
pub const CLONE_MAGIC: [u8; 8] = *b"HDCSOCLN";
/// The version of all of these.
pub const OBJECT_VERSION: u16 = 1;

/// Bytes of a slot: a block and its checksum.
pub const SLOT_BYTES: usize = BLOCK_BYTES + 4;
const _: () = assert!(
    OBJECT_RUNS_MAX <= u16::MAX as usize,
    "a ManifestTail has 16 bits for its runs"
);
const _: () = assert!(
    OBJECT_BATCH_BLOCKS_MAX <= u16::MAX as usize,
    "a ManifestTail has 16 bits for its slots"
);
/// [`DataRun::slot`] of what is unmapped.
pub const SLOT_NONE: u32 = u32::MAX;

on_disk! {
    /// The end of a data object; the runs are before it.
    DataFooter: 64 bytes {
        /// `HDCSODAT`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// 1 if the object is compressed.
        compressed: u8,
        /// Zero.
        reserved_a: u8,
        /// DataRuns before this footer.
        runs: U32,
        /// CRC-64/NVME of the runs and this footer with this field zero.
        checksum: U64,
        /// UUID of the volume.
        volume: [u8; 16],
        /// Number of the object.
        number: U64,
        /// Epoch of its writer.
        epoch: U64,
        /// Slots from the beginning of the object.
        slots: U32,
        /// Zero.
        reserved_b: [u8; 4],
    }
}

on_disk! {
    /// Blocks that a data object maps to its slots, or unmaps. What is unmapped comes first.
    DataRun: 16 bytes {
        /// First block on the volume.
        block: U64,
        /// Number of blocks.
        count: U32,
        /// Slot of the first one; all ones: they are unmapped.
        slot: U32,
    }
}

on_disk! {
    /// The root of a volume at one moment.
    ManifestHeader: 128 bytes {
        /// `HDCSOMAN`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// 1 if it begins an epoch: then it is never deleted.
        begins: u8,
        /// 1 if the volume was given up, and with it what it needs of its ancestors.
        gone: u8,
        /// Bytes of the whole.
        length: U32,
        /// CRC-64/NVME of the whole with this field zero.
        checksum: U64,
        /// UUID of the volume.
        volume: [u8; 16],
        /// Drawn by its writer when it opened the volume.
        nonce: U64,
        /// Its number.
        sequence: U64,
        /// Counts openings.
        epoch: U64,
        /// The lowest number of an object that this epoch may use.
        number_first: U64,
        /// Its writer uses numbers below this one until its next manifest.
        number_limit: U64,
        /// Size of the volume.
        bytes: U64,
        /// Number of ManifestMaps.
        maps: U32,
        /// Number of ManifestTails.
        tail: U32,
        /// Number of beginnings of epochs (U64 each, ascending): the newest ones.
        beginnings: U32,
        /// Number of ManifestSnapshots.
        snapshots: U32,
        /// Number of ManifestAncestors.
        ancestors: U32,
        /// Number of usage tables, ManifestMaps behind those of the map.
        usages: U32,
        /// Blocks of a page of the map.
        page_blocks: U16,
        /// 1 if a clone has stored a map of its own: what no page of it has may be written over, or cut off.
        own_map: u8,
        /// Zero.
        reserved: [u8; 13],
    }
}

on_disk! {
    /// An object of the map, or a usage table. Of two map objects with the same page the later one counts.
    ManifestMap: 16 bytes {
        /// Its number.
        number: U64,
        /// Its size.
        bytes: U32,
        /// Its MapIndexEntries or UsageEntries.
        entries: U32,
    }
}

on_disk! {
    /// A data object that is newer than the map, in the order in which they apply.
    ManifestTail: 16 bytes {
        /// Its number.
        number: U64,
        /// Its slots.
        slots: U16,
        /// The lower half of where its runs begin, if it is compressed; else zero.
        table_low: U16,
        /// Its runs.
        runs: U16,
        /// The upper half.
        table_high: U16,
    }
}

on_disk! {
    /// A snapshot.
    ManifestSnapshot: 96 bytes {
        /// Its name, filled up with zeroes.
        name: [u8; 64],
        /// Number of its object.
        number: U64,
        /// It may need objects with numbers below this one.
        pin: U64,
        /// Size of its object.
        bytes: U32,
        /// When it was made: milliseconds since 1970; 0 if nobody said.
        made_ms: U64,
        /// Zero.
        reserved: [u8; 4],
    }
}

on_disk! {
    /// A volume that this one is a clone of, directly or not. They ascend.
    ManifestAncestor: 32 bytes {
        /// Its UUID.
        volume: [u8; 16],
        /// Objects with numbers below this one, and not below that of the ancestor before, are its.
        below: U64,
        /// Bytes of its place.
        location_bytes: U32,
        /// Zero.
        reserved: [u8; 4],
    }
}

on_disk! {
    /// Says that a clone needs objects of this volume. The place of the clone follows, for people.
    CloneReference: 64 bytes {
        /// `HDCSOCLN`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Zero.
        reserved_a: [u8; 2],
        /// Bytes of the place.
        location_bytes: U32,
        /// CRC-64/NVME of this and the place with this field zero.
        checksum: U64,
        /// UUID of this volume.
        volume: [u8; 16],
        /// UUID of the clone.
        clone: [u8; 16],
        /// It may need objects with numbers below this one.
        pin: U64,
    }
}

impl DataFooter {
    /// Whether its object is compressed.
    pub fn is_compressed(&self) -> bool {
        self.compressed == 1
    }
}

/// The checksum of a slot.
pub fn slot_checksum(volume: &[u8; 16], number: u64, block: u64, data: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    let mut place = [0; 32];
    place[..16].copy_from_slice(volume);
    place[16..24].copy_from_slice(&number.to_le_bytes());
    place[24..].copy_from_slice(&block.to_le_bytes());
    digest.update(&place);
    digest.update(data);
    digest.finalize() as u32
}

/// Bytes of the runs and the footer of a data object.
pub const fn table_bytes(runs: usize) -> usize {
    runs * size_of::<DataRun>() + size_of::<DataFooter>()
}

/// Write runs and footer.
pub fn write_table(
    volume: [u8; 16],
    number: u64,
    epoch: u64,
    slots: u32,
    is_compressed: bool,
    runs: &[DataRun],
    out: &mut [u8],
) {
    let (head, tail) = out.split_at_mut(size_of_val(runs));
    head.copy_from_slice(runs.as_bytes());
    let mut footer = DataFooter::new_zeroed();
    footer.magic = DATA_MAGIC;
    footer.version.set(OBJECT_VERSION);
    footer.compressed = u8::from(is_compressed);
    footer.runs.set(runs.len() as u32);
    footer.volume = volume;
    footer.number.set(number);
    footer.epoch.set(epoch);
    footer.slots.set(slots);
    tail.copy_from_slice(footer.as_bytes());
    seal_at(out, size_of_val(runs));
}

/// The runs of a data object of a volume with `blocks` blocks, from its runs and footer.
pub fn parse_table<'a>(
    volume: &[u8; 16],
    number: u64,
    blocks: u64,
    bytes: &'a [u8],
) -> Result<(DataFooter, &'a [DataRun]), FormatError> {
    let length = FormatError::Field("length");
    let (rest, footer) = DataFooter::read_from_suffix(bytes)
        .map_err(|_| length)
        .map(|(rest, footer): (&[u8], DataFooter)| (rest, footer))?;
    verify_at(bytes, rest.len(), DATA_MAGIC, OBJECT_VERSION)?;
    if footer.volume != *volume || footer.number.get() != number {
        return Err(FormatError::Identity);
    }
    let slots = footer.slots.get() as usize;
    let runs = <[DataRun]>::ref_from_bytes(rest).map_err(|_| length)?;
    if runs.len() != footer.runs.get() as usize || runs.len() > OBJECT_RUNS_MAX {
        return Err(FormatError::Field("runs"));
    }
    if slots > OBJECT_BATCH_BLOCKS_MAX {
        return Err(FormatError::Field("slots"));
    }
    if footer.compressed > 1 {
        return Err(FormatError::Field("compressed"));
    }
    let mut mapping = false;
    let mut mapped = 0;
    for run in runs {
        let (count, slot) = (run.count.get(), run.slot.get());
        let end = run.block.get().checked_add(u64::from(count));
        if count == 0 || end.is_none_or(|end| end > blocks) {
            return Err(FormatError::Field("block"));
        }
        if slot == SLOT_NONE {
            if mapping {
                return Err(FormatError::Field("slot"));
            }
        } else {
            mapping = true;
            if slot as usize + count as usize > slots {
                return Err(FormatError::Field("slot"));
            }
            mapped += count as usize;
            if mapped > slots {
                return Err(FormatError::Field("count"));
            }
        }
    }
    Ok((footer, runs))
}

/// A snapshot, in a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its name.
    pub name: SnapshotName,
    /// Number of its object.
    pub number: u64,
    /// It may need objects with numbers below this one.
    pub pin: u64,
    /// Size of its object.
    pub bytes: u32,
    /// When it was made: milliseconds since 1970; 0 if nobody said.
    pub made_ms: u64,
}

/// What a clone has left with the volume that it is a clone of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// UUID of the clone.
    pub clone: [u8; 16],
    /// It may need objects with numbers below this one: that of its snapshot.
    pub pin: u64,
    /// Where the clone is, for people.
    pub location: String,
}

/// A volume that this one is a clone of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ancestor {
    /// Its UUID.
    pub volume: [u8; 16],
    /// Objects with numbers below this one, and not below that of the ancestor before, are its.
    pub below: u64,
    /// Where it is.
    pub location: String,
}

/// An object of the map or a usage table, in a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// Its number.
    pub number: u64,
    /// Its size.
    pub bytes: u32,
    /// Its pages, or the data objects that it is about.
    pub entries: u32,
}

impl MapEntry {
    /// Where its index begins, if it is a map object.
    pub const fn index_offset(&self) -> u64 {
        self.bytes as u64 - index_bytes(self.entries as usize) as u64
    }

    fn is_map(&self) -> bool {
        let pages = self.entries as usize;
        let index = index_bytes(pages.min(OBJECT_MAP_PAGES_MAX));
        let most = OBJECT_MAP_BYTES_MAX + index;
        (1..=OBJECT_MAP_PAGES_MAX).contains(&pages)
            && (index..=most).contains(&(self.bytes as usize))
    }

    fn is_usage(&self) -> bool {
        let entries = self.entries as usize;
        (1..=OBJECT_USAGE_ENTRIES_MAX).contains(&entries)
            && self.bytes as usize == usage_bytes(entries)
    }
}

/// A data object that is newer than the map, in a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailEntry {
    /// Its number.
    pub number: u64,
    /// Its slots.
    pub slots: u32,
    /// Its runs.
    pub runs: u32,
    /// If it is compressed, where its runs begin; otherwise 0: behind the slots.
    pub compressed_bytes: u32,
}

impl TailEntry {
    /// Bytes of the object.
    pub const fn bytes(&self) -> u64 {
        self.table_offset() + table_bytes(self.runs as usize) as u64
    }
    /// Where its runs begin.
    pub const fn table_offset(&self) -> u64 {
        match self.compressed_bytes {
            0 => self.slots as u64 * SLOT_BYTES as u64,
            bytes => bytes as u64,
        }
    }
    /// Whether it can be a compressed object.
    fn is_compressed_well(&self) -> bool {
        let least = FRAMES_OFFSET;
        let most = least + (self.slots as usize + 1) * SLOT_BYTES;
        self.slots >= COMPRESSED_SLOTS_MIN
            && (least..=most).contains(&(self.compressed_bytes as usize))
    }
    /// The place of its first slot.
    pub const fn origin(&self) -> Place {
        let origin = Place::new(self.number, 0);
        if self.compressed_bytes == 0 {
            origin
        } else {
            origin.compressed()
        }
    }
}

/// A manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// Whether it begins an epoch.
    pub begins: bool,
    /// Whether the volume was given up.
    pub gone: bool,
    /// UUID of the volume.
    pub volume: [u8; 16],
    /// Of its writer.
    pub nonce: u64,
    /// Its number.
    pub sequence: u64,
    /// Counts openings.
    pub epoch: u64,
    /// The lowest number of an object that this epoch may use.
    pub number_first: u64,
    /// Numbers below this one may be in use.
    pub number_limit: u64,
    /// Size of the volume.
    pub bytes: u64,
    /// Blocks of a page of the map.
    pub page_blocks: u32,
    /// Whether a clone has stored a map of its own.
    pub own_map: bool,
    /// Objects of the map: of two with the same page the later one counts.
    pub maps: Vec<MapEntry>,
    /// How much of which data objects the map needs.
    pub usages: Vec<MapEntry>,
    /// Data objects that are newer than the map, in the order in which they apply.
    pub tail: Vec<TailEntry>,
    /// Manifests that begin epochs: the newest ones, ascending.
    pub beginnings: Vec<u64>,
    /// Snapshots, in the order in which they were made.
    pub snapshots: Vec<Snapshot>,
    /// Volumes that this one is a clone of, ascending.
    pub ancestors: Vec<Ancestor>,
}

impl Manifest {
    /// The beginnings of epochs that the next manifest names, if it begins one.
    pub(super) fn next_beginnings(&self) -> Vec<u64> {
        let mut beginnings = self.beginnings.clone();
        beginnings.push(self.sequence + 1);
        if beginnings.len() > OBJECT_BEGINNINGS_MAX {
            beginnings.remove(0);
        }
        beginnings
    }

    /// Bytes that it takes.
    pub fn encoded_bytes(&self) -> usize {
        size_of::<ManifestHeader>()
            + (self.maps.len() + self.usages.len()) * size_of::<ManifestMap>()
            + self.tail.len() * size_of::<ManifestTail>()
            + self.beginnings.len() * size_of::<U64>()
            + self.snapshots.len() * size_of::<ManifestSnapshot>()
            + self
                .ancestors
                .iter()
                .map(|ancestor| size_of::<ManifestAncestor>() + ancestor.location.len())
                .sum::<usize>()
    }

    /// Write it to `out`, which has [`Self::encoded_bytes`].
    pub fn write(&self, out: &mut [u8]) {
        let mut header = ManifestHeader::new_zeroed();
        header.magic = MANIFEST_MAGIC;
        header.version.set(OBJECT_VERSION);
        header.begins = u8::from(self.begins);
        header.gone = u8::from(self.gone);
        header.length.set(out.len() as u32);
        header.volume = self.volume;
        header.nonce.set(self.nonce);
        header.sequence.set(self.sequence);
        header.epoch.set(self.epoch);
        header.number_first.set(self.number_first);
        header.number_limit.set(self.number_limit);
        header.bytes.set(self.bytes);
        header.maps.set(self.maps.len() as u32);
        header.tail.set(self.tail.len() as u32);
        header.beginnings.set(self.beginnings.len() as u32);
        header.snapshots.set(self.snapshots.len() as u32);
        header.ancestors.set(self.ancestors.len() as u32);
        header.usages.set(self.usages.len() as u32);
        header.page_blocks.set(self.page_blocks as u16);
        header.own_map = u8::from(self.own_map);
        let mut writer = Writer { out, at: 0 };
        writer.put(header.as_bytes());
        for map in self.maps.iter().chain(&self.usages) {
            let entry = ManifestMap {
                number: U64::new(map.number),
                bytes: U32::new(map.bytes),
                entries: U32::new(map.entries),
            };
            writer.put(entry.as_bytes());
        }
        for tail in &self.tail {
            let entry = ManifestTail {
                number: U64::new(tail.number),
                slots: U16::new(tail.slots as u16),
                table_low: U16::new(tail.compressed_bytes as u16),
                runs: U16::new(tail.runs as u16),
                table_high: U16::new((tail.compressed_bytes >> 16) as u16),
            };
            writer.put(entry.as_bytes());
        }
        for &begin in &self.beginnings {
            writer.put(U64::new(begin).as_bytes());
        }
        for snapshot in &self.snapshots {
            let mut entry = ManifestSnapshot::new_zeroed();
            entry.name = snapshot.name.padded();
            entry.number.set(snapshot.number);
            entry.pin.set(snapshot.pin);
            entry.bytes.set(snapshot.bytes);
            entry.made_ms.set(snapshot.made_ms);
            writer.put(entry.as_bytes());
        }
        for ancestor in &self.ancestors {
            let mut entry = ManifestAncestor::new_zeroed();
            entry.volume = ancestor.volume;
            entry.below.set(ancestor.below);
            entry.location_bytes.set(ancestor.location.len() as u32);
            writer.put(entry.as_bytes());
        }
        for ancestor in &self.ancestors {
            writer.put(ancestor.location.as_bytes());
        }
        let Writer { out, at } = writer;
        assert_eq!(at, out.len(), "a manifest is as long as it was said to be");
        seal(out);
    }

    /// The manifest in `bytes`, checked but for its identity.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let length = FormatError::Field("length");
        let (header, rest) = ManifestHeader::read_from_prefix(bytes).map_err(|_| length)?;
        verify(bytes, MANIFEST_MAGIC, OBJECT_VERSION)?;
        if bytes.len() > OBJECT_MANIFEST_BYTES_MAX || header.length.get() as usize != bytes.len() {
            return Err(length);
        }
        let (maps, rest) =
            <[ManifestMap]>::ref_from_prefix_with_elems(rest, header.maps.get() as usize)
                .map_err(|_| length)?;
        let (usages, rest) =
            <[ManifestMap]>::ref_from_prefix_with_elems(rest, header.usages.get() as usize)
                .map_err(|_| length)?;
        let (tail, rest) =
            <[ManifestTail]>::ref_from_prefix_with_elems(rest, header.tail.get() as usize)
                .map_err(|_| length)?;
        let (beginnings, rest) =
            <[U64]>::ref_from_prefix_with_elems(rest, header.beginnings.get() as usize)
                .map_err(|_| length)?;
        let (snapshots, rest) =
            <[ManifestSnapshot]>::ref_from_prefix_with_elems(rest, header.snapshots.get() as usize)
                .map_err(|_| length)?;
        let (ancestors, rest) =
            <[ManifestAncestor]>::ref_from_prefix_with_elems(rest, header.ancestors.get() as usize)
                .map_err(|_| length)?;
        let this = Self {
            begins: header.begins == 1,
            gone: header.gone == 1,
            volume: header.volume,
            nonce: header.nonce.get(),
            sequence: header.sequence.get(),
            epoch: header.epoch.get(),
            number_first: header.number_first.get(),
            number_limit: header.number_limit.get(),
            bytes: header.bytes.get(),
            page_blocks: u32::from(header.page_blocks.get()),
            own_map: header.own_map == 1,
            maps: maps.iter().map(MapEntry::from).collect(),
            usages: usages.iter().map(MapEntry::from).collect(),
            tail: tail
                .iter()
                .map(|tail| TailEntry {
                    number: tail.number.get(),
                    slots: u32::from(tail.slots.get()),
                    runs: u32::from(tail.runs.get()),
                    compressed_bytes: u32::from(tail.table_low.get())
                        | u32::from(tail.table_high.get()) << 16,
                })
                .collect(),
            beginnings: beginnings.iter().map(|begin| begin.get()).collect(),
            snapshots: parse_snapshots(snapshots)?,
            ancestors: parse_ancestors(ancestors, rest)?,
        };
        this.check()?;
        Ok(this)
    }

    fn check(&self) -> Result<(), FormatError> {
        let field = |good: bool, name| {
            if good {
                Ok(())
            } else {
                Err(FormatError::Field(name))
            }
        };
        let limit = self.number_limit;
        let sector = SECTOR_BYTES as u64;
        field(self.sequence > 0 && self.sequence < u64::MAX, "sequence")?;
        field(self.epoch > 0 && self.epoch < u64::MAX, "epoch")?;
        field(limit <= OBJECT_NUMBER_MAX, "number_limit")?;
        field(
            self.number_first > 0 && self.number_first <= limit,
            "number_first",
        )?;
        field(
            self.bytes > 0
                && self.bytes <= OBJECT_VOLUME_BYTES_MAX
                && self.bytes.is_multiple_of(sector),
            "bytes",
        )?;
        let numbers = |number: u64| number > 0 && number < limit;
        field(
            self.page_blocks.is_power_of_two()
                && (OBJECT_PAGE_BLOCKS_MIN..=OBJECT_PAGE_BLOCKS_MAX).contains(&self.page_blocks),
            "page_blocks",
        )?;
        field(
            pages(self.bytes, self.page_blocks) <= OBJECT_PAGES_MAX,
            "bytes",
        )?;
        field(
            self.maps.len() <= OBJECT_MAPS_MAX
                && self.maps.iter().all(|m| numbers(m.number) && m.is_map()),
            "maps",
        )?;
        field(
            self.usages.len() <= OBJECT_USAGES_MAX
                && self
                    .usages
                    .iter()
                    .all(|m| numbers(m.number) && m.is_usage()),
            "usages",
        )?;
        field(
            self.tail.iter().all(|tail| {
                numbers(tail.number)
                    && tail.slots as usize <= OBJECT_BATCH_BLOCKS_MAX
                    && tail.runs as usize <= OBJECT_RUNS_MAX
                    && (tail.compressed_bytes == 0 || tail.is_compressed_well())
            }),
            "tail",
        )?;
        let maps = self.maps.iter().chain(&self.usages).map(|map| map.number);
        let tail = self.tail.iter().map(|tail| tail.number);
        let mut named: Vec<u64> = maps.chain(tail).collect();
        named.sort_unstable();
        field(named.is_sorted_by(|a, b| a < b), "numbers")?;
        field(
            self.beginnings.len() <= OBJECT_BEGINNINGS_MAX
                && self.beginnings.is_sorted_by(|a, b| a < b)
                && self.beginnings.iter().all(|&begin| begin <= self.sequence),
            "beginnings",
        )?;
        field(
            self.snapshots.len() <= OBJECT_SNAPSHOTS_MAX
                && self.snapshots.iter().all(|snapshot| {
                    numbers(snapshot.number)
                        && snapshot.pin <= limit
                        && snapshot.bytes as usize <= OBJECT_MANIFEST_BYTES_MAX
                }),
            "snapshots",
        )?;
        field(
            self.ancestors.is_sorted_by(|a, b| a.below < b.below)
                && self.ancestors.iter().all(|a| a.below <= self.number_first),
            "ancestors",
        )
    }
}

impl From<&ManifestMap> for MapEntry {
    fn from(map: &ManifestMap) -> Self {
        Self {
            number: map.number.get(),
            bytes: map.bytes.get(),
            entries: map.entries.get(),
        }
    }
}

fn parse_snapshots(snapshots: &[ManifestSnapshot]) -> Result<Vec<Snapshot>, FormatError> {
    const { assert!(OBJECT_SNAPSHOT_NAME_BYTES_MAX == 64) }
    let parse = |snapshot: &ManifestSnapshot| {
        Some(Snapshot {
            name: SnapshotName::from_padded(&snapshot.name)?,
            number: snapshot.number.get(),
            pin: snapshot.pin.get(),
            bytes: snapshot.bytes.get(),
            made_ms: snapshot.made_ms.get(),
        })
    };
    let snapshots: Option<Vec<_>> = snapshots.iter().map(parse).collect();
    snapshots.ok_or(FormatError::Field("name"))
}

fn parse_ancestors(
    ancestors: &[ManifestAncestor],
    mut text: &[u8],
) -> Result<Vec<Ancestor>, FormatError> {
    if ancestors.len() > OBJECT_ANCESTORS_MAX {
        return Err(FormatError::Field("ancestors"));
    }
    let mut parsed = Vec::with_capacity(ancestors.len());
    for ancestor in ancestors {
        let bytes = ancestor.location_bytes.get() as usize;
        if bytes > OBJECT_LOCATION_BYTES_MAX || bytes > text.len() {
            return Err(FormatError::Field("location_bytes"));
        }
        let (location, rest) = text.split_at(bytes);
        text = rest;
        let location =
            core::str::from_utf8(location).map_err(|_| FormatError::Field("location"))?;
        parsed.push(Ancestor {
            volume: ancestor.volume,
            below: ancestor.below.get(),
            location: String::from(location),
        });
    }
    if text.is_empty() {
        Ok(parsed)
    } else {
        Err(FormatError::Field("length"))
    }
}

impl Reference {
    /// Bytes of the shortest and of the longest one.
    pub const BYTES_MIN: usize = size_of::<CloneReference>();
    /// See [`Self::BYTES_MIN`].
    pub const BYTES_MAX: usize = Self::BYTES_MIN + OBJECT_LOCATION_BYTES_MAX;

    /// Bytes that it takes.
    pub fn encoded_bytes(&self) -> usize {
        Self::BYTES_MIN + self.location.len()
    }

    /// Write it to `out`, which has [`Self::encoded_bytes`], for the volume that it is left with.
    pub fn write(&self, volume: [u8; 16], out: &mut [u8]) {
        let mut head = CloneReference::new_zeroed();
        head.magic = CLONE_MAGIC;
        head.version.set(OBJECT_VERSION);
        head.location_bytes.set(self.location.len() as u32);
        head.volume = volume;
        head.clone = self.clone;
        head.pin.set(self.pin);
        let mut writer = Writer { out, at: 0 };
        writer.put(head.as_bytes());
        writer.put(self.location.as_bytes());
        let Writer { out, at } = writer;
        assert_eq!(at, out.len(), "a reference is as long as it was said to be");
        seal(out);
    }

    /// The reference in `bytes` to the volume.
    pub fn parse(volume: &[u8; 16], bytes: &[u8]) -> Result<Self, FormatError> {
        let length = FormatError::Field("length");
        let (head, location) = CloneReference::read_from_prefix(bytes).map_err(|_| length)?;
        verify(bytes, CLONE_MAGIC, OBJECT_VERSION)?;
        if head.volume != *volume {
            return Err(FormatError::Identity);
        }
        if head.pin.get() > OBJECT_NUMBER_MAX {
            return Err(FormatError::Field("pin"));
        }
        if bytes.len() > Self::BYTES_MAX || head.location_bytes.get() as usize != location.len() {
            return Err(FormatError::Field("location_bytes"));
        }
        let location =
            core::str::from_utf8(location).map_err(|_| FormatError::Field("location"))?;
        Ok(Self {
            clone: head.clone,
            pin: head.pin.get(),
            location: String::from(location),
        })
    }
}

/// Bytes, written one after another.
struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

#[cfg(test)]
mod tests;
