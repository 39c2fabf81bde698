//! Checker: rot in the log is told where the log itself proves it, never forgotten.
//!
//! Reads a log's image with nothing but the documented format, apart from the code under test: the
//! superblock with the higher sequence, then span after span as long as each is whole, and linked
//! to the one before. Beyond the end, a valid span that says that the end was durable, or a
//! superblock of a clean close that says that the log went on, is proof that data was lost. Then a span that follows
//! and of which only data is damaged is taken but for that; without one, the log is to be refused.
//!
//! Where nothing proves it, the same reader looks at the image as it was before anything rotted ([`read_sound`]): what
//! that has behind the end is what the rot has taken, and nothing else may be missing.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SPAN_DATA_BLOCKS_MAX};
use hdcs_core::format::{
    EntryKind, LOG_HEADER_BLOCKS, LOG_UNFLUSHED, LogSuperblock, SpanEntry, SpanHeader,
    block_checksum,
};
use zerocopy::FromBytes;

use crate::disk::Disk;

/// Where the superblocks are, as documented.
const SUPERBLOCKS: [u64; 2] = [0, 16];
/// No span has more blocks: its data, and what describes it.
const SPAN_BLOCKS_MAX: u64 = SPAN_DATA_BLOCKS_MAX as u64 + 8;

/// What a log's image says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogView {
    /// Position after the last span that was taken.
    pub end: u64,
    /// Something beyond the end proves that there was more.
    pub proof: bool,
    /// Position before which something says that the log had been durable.
    pub known: u64,
    /// Of each span that was taken, its end, and how many writes, zeroings and discards it has.
    pub spans: Vec<(u64, u64)>,
    /// The sectors that it has lost, and does not hold in a later span.
    pub lost: BTreeSet<u64>,
    /// The sectors of which it has lost anything, whatever it holds in later spans.
    pub gaps: BTreeSet<u64>,
    /// Spans that were taken though some of their data is damaged.
    pub damaged: usize,
    /// Writes in them of which something is damaged, and the blocks that are.
    pub damaged_entries: u64,
    /// See above.
    pub damaged_blocks: u64,
}

impl LogView {
    /// How many of them an opening replays: what is damaged of one may be all of it, or cut it in pieces.
    pub fn entries_to_replay(&self) -> RangeInclusive<u64> {
        let entries = self.entries();
        entries - self.damaged_entries..=entries + self.damaged_blocks
    }

    /// Writes, zeroings and discards that end behind a position.
    pub fn entries_beyond(&self, position: u64) -> u64 {
        let beyond = self.spans.iter().filter(|(end, _)| *end > position);
        beyond.map(|(_, entries)| entries).sum()
    }

    /// All of them.
    pub fn entries(&self) -> u64 {
        self.entries_beyond(0)
    }
}

/// How an image is looked at.
#[derive(Clone, Copy, Debug)]
struct Image<'a> {
    disk: &'a Disk,
    /// As if nothing were rotten.
    is_sound: bool,
}

impl Image<'_> {
    fn read(self, block: u64, blocks: usize) -> Vec<u8> {
        let mut out = vec![0; blocks * BLOCK_BYTES];
        let offset = block * BLOCK_BYTES as u64;
        if self.is_sound {
            self.disk.peek_sound(offset, &mut out);
        } else {
            self.disk.peek(offset, &mut out);
        }
        out
    }

    /// The newest superblock on the device, and of what is kept of the same log beside it.
    fn superblock(self, kept: Option<&LogSuperblock>) -> Option<LogSuperblock> {
        let found = SUPERBLOCKS
            .into_iter()
            .filter_map(|block| LogSuperblock::parse(&self.read(block, 1)).ok())
            .max_by_key(|superblock| superblock.sequence.get())?;
        let kept =
            kept.filter(|kept| kept.log == found.log && kept.sequence.get() > found.sequence.get());
        Some(kept.copied().unwrap_or(found))
    }
}

fn image(disk: &Disk) -> Image<'_> {
    Image {
        disk,
        is_sound: false,
    }
}

/// The newest superblock on the device, or kept beside it.
pub(crate) fn newest_superblock(
    disk: &Disk,
    kept: Option<&LogSuperblock>,
) -> Option<LogSuperblock> {
    image(disk).superblock(kept)
}

/// The newest superblock on the device.
pub(crate) fn superblock(disk: &Disk) -> Option<LogSuperblock> {
    image(disk).superblock(None)
}

/// Whether both superblocks on the device record the same losses, and the same end.
pub(crate) fn superblocks_agree(disk: &Disk) -> bool {
    let [one, other] = SUPERBLOCKS.map(|block| LogSuperblock::parse(&image(disk).read(block, 1)));
    let (Ok(one), Ok(other)) = (one, other) else {
        return false;
    };
    let said = |superblock: &LogSuperblock| (superblock.lost_ranges, superblock.known_head);
    said(&one) == said(&other) && one.lost == other.lost
}

/// Whether a superblock on the device is not what was written.
pub(crate) fn superblock_rots(disk: &Disk) -> bool {
    let bytes = BLOCK_BYTES as u64;
    let mut places = SUPERBLOCKS.into_iter();
    places.any(|block| disk.rots_within(block * bytes, bytes))
}

/// Whether the newest superblock has rotted, and the log holds what was written under it: the other one does not say
/// how that goes on.
pub(crate) fn outlives_superblock(disk: &Disk) -> bool {
    let (Some(left), Some(newest)) = (superblock(disk), sound(disk).superblock(None)) else {
        return false;
    };
    let ring = Ring::of(sound(disk), &newest);
    let is_newer = |(header, _): (SpanHeader, _)| header.incarnation > left.incarnation;
    left.sequence < newest.sequence
        && (0..ring.blocks).any(|slot| ring.control(slot).is_some_and(is_newer))
}

fn sound(disk: &Disk) -> Image<'_> {
    Image {
        disk,
        is_sound: true,
    }
}

/// The first byte behind all spans that an opening would replay, whichever of the superblocks on the device it finds.
pub(crate) fn needed_until(disk: &Disk) -> u64 {
    let image = sound(disk);
    let mut needed = 0;
    for block in SUPERBLOCKS {
        let Ok(superblock) = LogSuperblock::parse(&image.read(block, 1)) else {
            continue;
        };
        let ring = Ring::of(image, &superblock);
        let (mut end, mut chain) = (superblock.tail.get(), superblock.tail_chain.get());
        while let Some(span) = ring.next(end, chain).filter(|span| span.bad.is_empty()) {
            (end, chain) = (span.end, span.checksum);
            needed = needed.max((end - 1) % ring.blocks + 1);
        }
    }
    (LOG_HEADER_BLOCKS + needed) * BLOCK_BYTES as u64
}

/// In how many pieces these sectors lie.
pub(crate) fn pieces(sectors: &BTreeSet<u64>) -> usize {
    let begins = |sector: &&u64| {
        sector
            .checked_sub(1)
            .is_none_or(|one| !sectors.contains(&one))
    };
    sectors.iter().filter(begins).count()
}

/// Whether the image on `disk` says that the backend may hold writes past the log which are not flushed.
pub fn is_marked(disk: &Disk, kept: Option<&LogSuperblock>) -> bool {
    image(disk)
        .superblock(kept)
        .is_some_and(|superblock| superblock.flags.get() & LOG_UNFLUSHED != 0)
}

/// Where the block at a position lies on `disk`, in bytes; `None` if no superblock is valid.
pub fn place_of(disk: &Disk, kept: Option<&LogSuperblock>, position: u64) -> Option<u64> {
    let superblock = image(disk).superblock(kept)?;
    let block = LOG_HEADER_BLOCKS + position % superblock.ring_blocks.get();
    Some(block * BLOCK_BYTES as u64)
}

/// Read the image on `disk`; `None` if no superblock is valid.
pub fn read_log(disk: &Disk, kept: Option<&LogSuperblock>) -> Option<LogView> {
    read_image(image(disk), kept)
}

/// Read the image on `disk` as it was before anything of it rotted.
pub fn read_sound(disk: &Disk, kept: Option<&LogSuperblock>) -> Option<LogView> {
    read_image(sound(disk), kept)
}

fn read_image(image: Image<'_>, kept: Option<&LogSuperblock>) -> Option<LogView> {
    let superblock = image.superblock(kept)?;
    let ring = Ring::of(image, &superblock);
    let (mut end, mut chain) = (superblock.tail.get(), superblock.tail_chain.get());
    let (mut lost, mut gaps, mut damaged) = (BTreeSet::new(), BTreeSet::new(), 0);
    let (mut damaged_entries, mut damaged_blocks) = (0, 0);
    for [start, sectors] in &superblock.lost[..superblock.lost_ranges.get() as usize] {
        lost.extend(start.get()..start.get() + sectors.get());
    }
    let clean_head = Some(superblock.clean_head.get()).filter(|&head| head != u64::MAX);
    let known = clean_head
        .max(Some(superblock.known_head.get()))
        .max(ring.durable());
    let known = known.unwrap_or_default();
    let mut spans = Vec::new();
    while let Some(span) = ring.next(end, chain) {
        if !span.bad.is_empty() {
            if end >= known {
                break;
            }
            damaged += 1;
            damaged_blocks += span.bad.len() as u64;
        }
        damaged_entries += span.apply(&mut lost, &mut gaps);
        spans.push((span.end, span.changes()));
        (end, chain) = (span.end, span.checksum);
    }
    Some(LogView {
        end,
        proof: end < known,
        known,
        spans,
        lost,
        gaps,
        damaged,
        damaged_entries,
        damaged_blocks,
    })
}

/// The sectors of which a block of a device holds data, whatever else has become of them: none if it is no data block
/// of a span.
pub(crate) fn sectors_in(disk: &Disk, block: u64) -> BTreeSet<u64> {
    let mut sectors = BTreeSet::new();
    // What says whose data it is may have rotted as well, and an open volume does not look there.
    let image = sound(disk);
    let Some(superblock) = image.superblock(None) else {
        return sectors;
    };
    let ring = Ring::of(image, &superblock);
    let Some(slot) = block.checked_sub(LOG_HEADER_BLOCKS) else {
        return sectors;
    };
    // Spans of several laps may overlap here.
    for at in slot.saturating_sub(SPAN_BLOCKS_MAX)..slot {
        let Some((header, control)) = ring.control(at) else {
            continue;
        };
        let first = at + u64::from(header.control_blocks.get());
        let Some(data) = slot.checked_sub(first) else {
            continue;
        };
        if data < u64::from(header.data_blocks.get()) {
            let span = Span::of(&header, &control, BTreeSet::from([data]));
            span.apply(&mut BTreeSet::new(), &mut sectors);
        }
    }
    sectors
}

#[derive(Clone)]
struct Span {
    end: u64,
    checksum: u64,
    entries: Vec<SpanEntry>,
    /// Which of its data blocks do not match their checksums.
    bad: BTreeSet<u64>,
}

impl Span {
    fn of(header: &SpanHeader, control: &[u8], bad: BTreeSet<u64>) -> Self {
        let end = size_of::<SpanHeader>() + entries_bytes(header);
        let entries = control[size_of::<SpanHeader>()..end].chunks(size_of::<SpanEntry>());
        let blocks = u64::from(header.control_blocks.get()) + u64::from(header.data_blocks.get());
        Self {
            end: header.position.get() + blocks,
            checksum: header.checksum.get(),
            entries: entries
                .map(|entry| SpanEntry::read_from_bytes(entry).expect("an entry has no alignment"))
                .collect(),
            bad,
        }
    }

    /// How many of its entries change the volume.
    fn changes(&self) -> u64 {
        let changes = |entry: &&SpanEntry| {
            matches!(
                EntryKind::from_code(entry.kind),
                Some(EntryKind::Write | EntryKind::WriteZeroes | EntryKind::Discard)
            )
        };
        self.entries.iter().filter(changes).count() as u64
    }

    /// What it holds is not lost any more, and what is damaged of it is; of how many of its writes that is.
    fn apply(&self, lost: &mut BTreeSet<u64>, gaps: &mut BTreeSet<u64>) -> u64 {
        let mut damaged = 0;
        for entry in &self.entries {
            let (start, end) = (entry.start.get(), entry.start.get() + entry.sectors.get());
            let first = u64::from(entry.data_block.get());
            let block = |sector: u64| first + sector / BLOCK_SECTORS - start / BLOCK_SECTORS;
            let stored = u64::from(entry.stored_offset.get()) + u64::from(entry.stored_bytes.get());
            let stored = first..first + stored.div_ceil(BLOCK_BYTES as u64);
            match EntryKind::from_code(entry.kind) {
                Some(EntryKind::Write) if entry.method != 0 => {
                    if self.bad.range(stored).next().is_some() {
                        damaged += 1;
                        lost.extend(start..end);
                        gaps.extend(start..end);
                    } else {
                        lost.retain(|sector| !(start..end).contains(sector));
                    }
                }
                Some(EntryKind::Write) => {
                    let stored = block(start)..block(end - 1) + 1;
                    damaged += u64::from(self.bad.range(stored).next().is_some());
                    for sector in start..end {
                        if self.bad.contains(&block(sector)) {
                            lost.insert(sector);
                            gaps.insert(sector);
                        } else {
                            lost.remove(&sector);
                        }
                    }
                }
                Some(EntryKind::WriteZeroes | EntryKind::Discard) => {
                    lost.retain(|sector| !(start..end).contains(sector));
                }
                Some(EntryKind::SyncPoint | EntryKind::Record) | None => {}
            }
        }
        damaged
    }
}

fn entries_bytes(header: &SpanHeader) -> usize {
    usize::from(header.entries.get()) * size_of::<SpanEntry>()
}

struct Ring<'a> {
    image: Image<'a>,
    blocks: u64,
    log: u64,
    incarnation: u64,
}

impl<'a> Ring<'a> {
    fn of(image: Image<'a>, superblock: &LogSuperblock) -> Self {
        Self {
            image,
            blocks: superblock.ring_blocks.get(),
            log: superblock.log.get(),
            incarnation: superblock.incarnation.get(),
        }
    }

    /// The span that follows one that ends at `end` and has checksum `chain`; its data may be damaged.
    fn next(&self, end: u64, chain: u64) -> Option<Span> {
        let wrapped = end.next_multiple_of(self.blocks);
        let mut spans = [end, wrapped].map(|at| self.span(at, chain)).into_iter();
        // An opening that takes one for torn goes on at the other.
        let whole = spans.clone().flatten().find(|span| span.bad.is_empty());
        whole.or_else(|| spans.find_map(|span| span))
    }

    /// The control part at a position, if it is one of this log.
    fn control(&self, slot: u64) -> Option<(SpanHeader, Vec<u8>)> {
        let first = self.image.read(LOG_HEADER_BLOCKS + slot, 1);
        let header = SpanHeader::peek(&first).ok()?;
        let blocks = u64::from(header.control_blocks.get()) + u64::from(header.data_blocks.get());
        if slot + blocks > self.blocks {
            return None;
        }
        let control_blocks = usize::from(header.control_blocks.get());
        let control = self.image.read(LOG_HEADER_BLOCKS + slot, control_blocks);
        let header = SpanHeader::verify(&control).ok()?;
        let ours = header.log.get() == self.log
            && header.incarnation.get() <= self.incarnation
            && header.position.get() % self.blocks == slot;
        ours.then_some((header, control))
    }

    /// The span at `position` that follows one with checksum `chain`.
    fn span(&self, position: u64, chain: u64) -> Option<Span> {
        let slot = position % self.blocks;
        let (header, control) = self.control(slot)?;
        if header.position.get() != position || header.chain.get() != chain {
            return None;
        }
        let control_blocks = u64::from(header.control_blocks.get());
        let data_blocks = usize::from(header.data_blocks.get());
        let data = (self.image).read(LOG_HEADER_BLOCKS + slot + control_blocks, data_blocks);
        let checksums = size_of::<SpanHeader>() + entries_bytes(&header);
        let is_bad = |(index, block): &(usize, &[u8])| {
            control[checksums + index * 4..][..4] != block_checksum(block).to_le_bytes()
        };
        let blocks = data.chunks(BLOCK_BYTES).enumerate();
        let bad = blocks.filter(is_bad).map(|(index, _)| index as u64);
        Some(Span::of(&header, &control, bad.collect()))
    }

    /// Before which position spans say that the log had been durable.
    fn durable(&self) -> Option<u64> {
        let controls = (0..self.blocks).filter_map(|slot| self.control(slot));
        controls.map(|(header, _)| header.durable.get()).max()
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::format::{
        LOG_HOLDS_VOLUME, LOG_MAGIC, LOG_VERSION_ALONE, SPAN_MAGIC, SPAN_VERSION,
    };

    use super::*;

    const RING_BLOCKS: u64 = 4096;

    /// A log of two spans of one data block each, the second sealed when the first was durable.
    fn log() -> Disk {
        let mut disk = Disk::new((RING_BLOCKS + LOG_HEADER_BLOCKS) * BLOCK_BYTES as u64, 1);
        let mut superblock = LogSuperblock {
            magic: LOG_MAGIC,
            version: LOG_VERSION_ALONE.into(),
            holds: LOG_HOLDS_VOLUME.into(),
            reserved_a: [0; 4],
            checksum: 0.into(),
            volume: [1; 16],
            log: 77.into(),
            sequence: 1.into(),
            incarnation: 1.into(),
            epoch: 0.into(),
            ring_blocks: RING_BLOCKS.into(),
            tail: 0.into(),
            tail_chain: 0.into(),
            clean_head: u64::MAX.into(),
            sync_points: 0.into(),
            data_key: [0; 16],
            flags: 0.into(),
            cache: 0.into(),
            cache_stamp: 0.into(),
            backend_commit: [0; 64],
            known_head: 0.into(),
            tag: [0; 16],
            ahead: 0.into(),
            ahead_sequence: 0.into(),
            cut_position: 0.into(),
            void_before: 0.into(),
            joined: 0.into(),
            reserved_b: [0; 1760],
            lost_ranges: 0.into(),
            lost: [[0.into(); 2]; 128],
        };
        superblock.seal();
        let bytes: [u8; BLOCK_BYTES] = zerocopy::transmute!(superblock);
        disk.put(0, &bytes);
        let mut chain = 0;
        for position in [0, 2] {
            let data = [position as u8 + 1; BLOCK_BYTES];
            let header = SpanHeader {
                magic: SPAN_MAGIC,
                version: SPAN_VERSION.into(),
                control_blocks: 1.into(),
                data_blocks: 1.into(),
                entries: 1.into(),
                checksum: 0.into(),
                chain: chain.into(),
                log: 77.into(),
                incarnation: 1.into(),
                epoch: 0.into(),
                position: position.into(),
                durable: position.into(),
                sync_points: 0.into(),
                ahead: 0.into(),
                reserved: [0; 40],
            };
            let mut control = [0; BLOCK_BYTES];
            let header: [u8; size_of::<SpanHeader>()] = zerocopy::transmute!(header);
            control[..header.len()].copy_from_slice(&header);
            let entry = SpanEntry {
                start: 0.into(),
                sectors: 8.into(),
                data_block: 0.into(),
                kind: 1,
                flags: 0,
                stored_offset: 0.into(),
                stored_bytes: 0.into(),
                method: 0,
                reserved: 0,
                checksum: 0.into(),
            };
            let entry: [u8; size_of::<SpanEntry>()] = zerocopy::transmute!(entry);
            control[128..160].copy_from_slice(&entry);
            control[160..164].copy_from_slice(&block_checksum(&data).to_le_bytes());
            chain = SpanHeader::seal(&mut control);
            let offset = (LOG_HEADER_BLOCKS + position) * BLOCK_BYTES as u64;
            disk.put(offset, &control);
            disk.put(offset + BLOCK_BYTES as u64, &data);
        }
        disk
    }

    /// The second span says that the first one was durable.
    fn view(end: u64, proof: bool) -> LogView {
        LogView {
            end,
            proof,
            known: 2,
            spans: [(2, 1), (4, 1)]
                .into_iter()
                .filter(|span| span.0 <= end)
                .collect(),
            lost: BTreeSet::new(),
            gaps: BTreeSet::new(),
            damaged: 0,
            damaged_entries: 0,
            damaged_blocks: 0,
        }
    }

    fn offset(position: u64) -> u64 {
        (LOG_HEADER_BLOCKS + position) * BLOCK_BYTES as u64
    }

    #[test]
    fn log_view_reads_a_whole_log() {
        assert_eq!(read_log(&log(), None), Some(view(4, false)));
    }

    #[test]
    fn log_view_finds_proof_of_rot_in_the_middle_only() {
        let mut disk = log();
        assert!(disk.rot(offset(0) + 100, 3));
        assert_eq!(read_log(&disk, None), Some(view(0, true)));
        disk.heal();
        assert_eq!(read_log(&disk, None), Some(view(4, false)));
        let mut disk = log();
        assert!(disk.rot(offset(3) + 5, 3));
        assert_eq!(read_log(&disk, None), Some(view(2, false)));
    }

    #[test]
    fn log_view_of_what_was_before_the_rot_tells_what_it_has_taken() {
        let mut disk = log();
        let sound = view(4, false);
        assert_eq!(read_sound(&disk, None), Some(sound.clone()));
        assert!(disk.rot(offset(3) + 5, 3));
        assert_eq!(read_sound(&disk, None), Some(sound.clone()));
        let torn = read_log(&disk, None).unwrap();
        assert_eq!((sound.entries_beyond(torn.end), torn.entries()), (1, 1));
        // Rot where nothing is takes nothing.
        let mut disk = log();
        disk.put(offset(40), &[7; BLOCK_BYTES]);
        assert!(disk.rot(offset(40), 1));
        let view = read_log(&disk, None).unwrap();
        assert_eq!(sound.entries_beyond(view.end), 0);
    }

    #[test]
    fn log_block_names_the_sectors_that_it_has_data_of() {
        let disk = log();
        let sectors = |position| sectors_in(&disk, LOG_HEADER_BLOCKS + position);
        assert_eq!(sectors(1), (0..8).collect());
        assert_eq!(sectors(3), (0..8).collect());
        for no_data in [0, 2, 4, 50] {
            assert_eq!(sectors(no_data), BTreeSet::new());
        }
        assert_eq!(sectors_in(&disk, 0), BTreeSet::new());
    }

    #[test]
    fn log_view_takes_what_is_good_of_a_damaged_span() {
        let mut disk = log();
        assert!(disk.rot(offset(1) + 5, 3));
        let saved = LogView {
            gaps: (0..8).collect(),
            damaged: 1,
            damaged_entries: 1,
            damaged_blocks: 1,
            ..view(4, false)
        };
        // The second span has written the same sectors.
        assert_eq!(read_log(&disk, None), Some(saved));
    }

    #[test]
    fn log_view_needs_a_superblock() {
        let mut disk = log();
        assert!(disk.rot(50, 0));
        assert_eq!(read_log(&disk, None), None);
    }
}
