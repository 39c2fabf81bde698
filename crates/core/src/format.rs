//! Every on-disk structure. docs/FORMATS.md is generated from this file.
//!
//! All integers are little-endian. Every structure carries a magic, a version and a checksum, has
//! no padding, and zeroes what is reserved. Readers check in this order: magic, version, checksum,
//! identity, bounds; nothing is used before that.
//!
//! # Versions
//!
//! Every format has a version of its own, and a program reads those from 1 to the newest that it knows. What a newer
//! program has made is refused ("made by a newer program") and left as it is, also if only one of two superblocks is
//! newer: magic, version and checksum keep their places in every version, so that a damaged version number is not taken
//! for a newer one. To add a version: raise the constant (`LOG_VERSION`, `CACHE_VERSION`, `HOME_VERSION`, …, or the
//! `version` of a `Kind` in crates/server/src); have the readers take the version before as well; write the golden
//! image of the new version with `HDCS_UPDATE=1` beside those of the others (crates/core/tests/golden,
//! crates/server/tests/golden), and never change these. The table in crates/server/tests/formats.rs then opens the
//! images of all versions, and refuses that of the next. A new format gets a row there.
//!
//! # Write log
//!
//! ```text
//! block 0, 16     LogSuperblock, written in turn by the parity of their sequence; the valid one with the
//!                 higher sequence counts
//! block 32..      the ring: `ring_blocks` blocks of 4 KiB
//! ```
//!
//! What lies between is zero: a drive that is cut off while it writes may damage the whole unit, of up to
//! 64 KiB, in which the write lies. So no two superblocks share one, nor one and the ring.
//!
//! A *position* counts ring blocks since the log was made and never wraps; block
//! `32 + position % ring_blocks` holds it. A *span* is `control_blocks` blocks (a [`SpanHeader`],
//! its [`SpanEntry`]s, then one CRC-32C for each data block) followed by `data_blocks` blocks of
//! data. A span never wraps: where it would, it starts at the next multiple of `ring_blocks`. So may any other: what the
//! file system has no space for behind some block of the ring is a hole, and spans lie before that. Data
//! block `i` of an entry holds block `start / 8 + i` of the volume, each sector in its place, with
//! zeroes outside the entry. Of a compressed entry all these blocks, at most 64 KiB, make
//! `stored_bytes` bytes from byte `stored_offset` of its first data block on; such entries lie one
//! behind the other after the blocks of the others.
//!
//! A *record* is bytes that mean nothing to the log: as many as `sectors` says, from byte
//! `stored_offset` of its first data block on. So several may lie one behind the other, and one is as
//! large as the data of a span at most. A volume has none: one that meets a record in its log, or an entry
//! of a kind or a compression that it does not know, is not opened.
//!
//! Of a log that has copies in a *group* each copy has the same spans at the same positions, and superblocks of its own,
//! of version 2. A copy that has what the others do not is *cut*: from `cut_position` on, a span of an opening before
//! `void_before` is *void*. It stays on the medium until something is written over it, but it is not part of the log, and
//! what it says of the log is not so any more. While the superblock has the flag of a copy that is being brought up, spans
//! behind the cut may lie there without those before them, whatever they say of these. A program that knows no cuts knows
//! version 1 only, so it refuses the log. Spans are the same in both versions. The superblock of a log without a group
//! stays version 1.
//!
//! # Requests of clients in a log of records
//!
//! ```text
//! registration    ClientRecordHeader
//! request         ClientRecordHeader, the result, the effect
//! checkpoint      ClientRecordHeader, for each client a CheckpointClient and its results, each a CheckpointResult and
//!                 the bytes; then what the checkpoint says beside the clients
//! ```
//!
//! Each is one record, so the result of a request is in the log exactly if its effect is. What effects mean is for who
//! wrote them. No volume has such records.
//!
//! A client registers, and gets the next number: none is given twice in a log. It numbers its requests from 1 on, and
//! sends number *n* once it has the answer to *n* − 8. The *client table* is what the records say, from the first
//! checkpoint on or from the beginning of the log: of each of the last 64 clients the results whose numbers are less than
//! 8 below the highest. A client that registers beyond those takes the place of the one whose last record is the oldest.
//! The tail of the log never passes its newest checkpoint.
//!
//! # Read cache
//!
//! ```text
//! block 0, 16     CacheSuperblock, written in turn by the parity of their sequence
//! between, ..32   zero: a drive that damages what lies beside a cut write damages one of them at most
//! block 32..      two halves of the journal of invalidations, `half` blocks each
//! then            segments of 256 blocks: lines from the front, CacheFooter in the last block
//! ```
//!
//! With `n` segments that fit the region, `half` is `64 + 2 * ceil(n / 126)`. A journal *epoch*
//! fills half `epoch % 2` from its front, one block per write: a [`CacheJournalHeader`] and its
//! entries. The superblock names the epochs that count. A footer is followed by one key (`U64`, all
//! ones if the line is not in use) per line, then one byte per line: how many blocks it has, and
//! then one CRC-32C (`U32`) per block of the lines. Lines lie one behind the other. One of fewer
//! than `line_blocks` blocks is compressed: it is a [`CacheLineHeader`], then the bytes that make
//! the whole line, an LZ4 block or a Zstandard frame, then zeroes.
//!
//! A *stamp* counts what the journal has made durable: its upper 24 bits are the start of the cache
//! (`incarnation`), the others count the blocks written since then. The superblock of a write log
//! says up to which stamp of which cache the invalidations have to be there for its tail to be right
//! (`cache`, `cache_stamp`). If they are not, nothing that the cache holds of the volume counts.
//!
//! # Local store of a volume in storage mode
//!
//! ```text
//! block 0, 1      HomeSuperblock, written in turn by the parity of their sequence
//! block 2..8      zero
//! then            for each page of the map: the HomePage, its copy, 126 blocks of checksums, and the 16128
//!                 blocks that it describes
//! ```
//!
//! Block `i` of the volume is described by page `i / 16128` and lies in block
//! `8 + 128 * (i / 16128 + 1) + i`. The copy of a page is written when the page is durable, and the
//! page only when the copy is. What a page calls clean is absent if its `log` is not the log that
//! the volume has.
//!
//! A commit that changes pages writes a superblock together with their copies. Its `map_digest` is the sum, modulo
//! 2^64, of `mix(generation ^ mix(number + 1))` of all pages, where `mix` is the finalizer of SplitMix64. Of each page
//! the newest copy up to `commits` has to make up that sum, unless both copies of one are newer; none is newer by more
//! than one commit. Otherwise a page or a superblock is older than what was flushed, and the local store is refused.
//!
//! The checksums are the CRC-32C of each sector of the page's blocks, as it is stored, four bytes each in the order of
//! the sectors. If the data is encrypted, the first four bytes of the sector's tag follow each of them, and there are
//! 252 blocks of checksums instead of 126; block `i` of the volume lies in block `8 + 254 * (i / 16128 + 1) + i` then.
//! Those of sectors that the map calls neither clean nor dirty mean nothing. There is no copy: what a flush has made
//! durable matches, and what was written since is in the write log. They hold under the log that the superblock names.
//!
//! With a `data_key` each sector of data is encrypted for itself, with AES-256-XTS: under a key derived for local
//! stores from that data key, its tweak the number of the sector on the volume and, in the upper eight bytes, that of
//! the local store. Superblocks, pages and sectors then have a [tag](#encrypted-volumes).
//!
//! # Volumes over object stores
//!
//! ```text
//! manifest/N      ManifestHeader, then ManifestMap (of the map, then of usage tables), ManifestTail, U64 (beginnings of epochs),
//!                 ManifestSnapshot, ManifestAncestor in the numbers that the header gives, then the
//!                 ancestors' places as text; the highest N counts
//! data/N          slots of 4100 bytes (a block of the volume, then its CRC-32C), DataRuns, DataFooter
//!                 or, if it is compressed: FrameHeader, 256 lengths (U16), frames, zeroes, DataRuns, DataFooter
//! map/N           pages, each a MapPage with its MapRuns at a multiple of 64 bytes, then MapIndexEntries, MapFooter
//!                 or a usage table: UsageHeader, then UsageEntries
//! snapshot/N      a copy of a manifest
//! clone/N         CloneReference, then the clone's place as text; N is the first eight bytes of the clone's UUID
//! ```
//!
//! N has 20 digits. Data, map and snapshots share one row of numbers below 2^48; none is used
//! twice. A *place* is `N << 16 | slot`, with bit 15 set if the object is compressed. A slot's
//! CRC-32C is taken over the UUID of the volume that wrote it, N (`U64`), the number of the block
//! on the volume (`U64`) and the block itself, so a block that lies in another place than its own
//! is not accepted. The state of a manifest is that of the pages of its map, of which those in objects that
//! it names later count before those in earlier ones, and then of the objects of its tail in the order in which it
//! names them: of each, first what is unmapped, then what is mapped. Numbers say nothing about order.
//!
//! Frame `i` of a compressed object is its slots from `16 * i` on, 16 of them or what is left,
//! compressed as one piece, an LZ4 block or a Zstandard frame. A length is that of the stored
//! frame; 0: the slots are stored as they are. The zeroes are as many (up to 4095) as it takes for
//! the size of the object and the number of its slots to leave the same rest when divided by 4096.
//! The runs of an object of the tail begin where its ManifestTail says.
//!
//! # Heat maps
//!
//! A HeatHeader, then its HeatRuns in the order of the volume. The units of all runs are as many as
//! the volume has, the last one perhaps cut short; no run is empty, and two that follow each other
//! differ in heat. A unit is as hot as the hottest part of it. There are at most 262144 runs and
//! 16777216 units.
//!
//! # Files of the data directory
//!
//! ```text
//! node.json                  identity of the node and its cache, counters
//! volumes/NAME/volume.json   the catalogue entry; of an encrypted volume, which data key it has
//! volumes/NAME/given-up-clone, given-up-objects  empty: a deletion has given up what the backend has, or was about to
//! volumes/NAME/key.json      source of the key-encryption key, and the wrapped data key
//! volumes/NAME/dirty.json    what the backend lacks, for the day on which the log is lost
//! volumes/NAME/scrub.json    when it was scrubbed, and what that found
//! volumes/NAME/heat.map      a heat map
//! volumes/NAME/superblock    the LogSuperblock of a log whose device takes no writes any more
//! ```
//!
//! The JSON files are `{"magic", "version", "checksum", "content"}`; the checksum is CRC-64/NVME of the compact form of
//! `content`. Each kind has its own magic and version.
//!
//! # Encrypted volumes
//!
//! A volume has a data key of 64 random bytes. `HKDF-SHA-512(salt "hdcs data key", data key, info)`
//! gives a key for AES-256-XTS for each medium; the tweak is 16 bytes, little-endian, as one
//! number:
//!
//! ```text
//! medium      info       unit                              tweak
//! write log   log        each block from block 32 on       block of the region + (`log` of the superblock << 64)
//! read cache  cache      each block of a line              number of the block on the volume
//!                        each stored block, if compressed  2^40 + number of the first block + stored block
//! data/N      objects    each slot of 4100 bytes, whole    UUID of its writer ^ (N << 64) ^ slot
//!                        each compressed frame, whole     UUID of its writer ^ (N << 64) ^ (2^32 + frame)
//! ```
//!
//! A *tag* of bytes in a place, two numbers (`U64`), is AES-256 of their POLYVAL (RFC 8452) XOR the place. The key of
//! AES is the first 32 bytes of what HKDF gives, that of POLYVAL the 16 bytes behind them:
//!
//! ```text
//! tagged                        info               place
//! superblocks of the write log  log superblocks    0, 0
//! of a local store:
//!   superblocks, pages          home map           its number, 0
//!   sectors                     home sectors       its number, number of the sector on the volume
//! ```
//!
//! Of a superblock or page the tag is made before the checksum, with both fields zero; a field that is shorter than a
//! tag has the first bytes of it.
//!
//! Checksums of the log and of slots are of plaintext, and encrypted with it; those in footers of
//! the read cache are of what is on the medium. Superblocks, the cache's journal and footers,
//! tables of data objects, maps and manifests are plain. The data key lies in `key.json` beside
//! `volume.json`, and for objects padded with blanks to 1024 bytes as `key/wrapped`: JSON with `cipher`
//! ("aes-256-xts"), `id` (its UUID), `wrapped_with` (8 bytes of HKDF-SHA-512 of the key-encryption
//! key, salt "hdcs wrapping key", info "fingerprint"), `nonce` and `key` (AES-256-GCM with `cipher`
//! and the bytes of `id` as associated data, the tag at the end; base64).

mod log_superblock;

pub use log_superblock::{CopyState, Membership};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::error::FormatError;
use crate::base::limits::{
    BLOCK_BYTES, CACHE_STARTS_KEPT, LOST_RANGES_MAX, SPAN_DATA_BLOCKS_MAX, SPAN_ENTRIES_MAX,
};
use crate::cache::heat_map;
use crate::cache::packed;
use crate::local::format as home;
use crate::log::clients;
use crate::objects::format as objects;
use crate::objects::frames;

/// One field of an on-disk structure, for the generated documentation.
#[derive(Debug)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: &'static str,
    /// Offset in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
    /// What it means.
    pub doc: &'static [&'static str],
}

/// One on-disk structure, for the generated documentation.
#[derive(Debug)]
pub struct Structure {
    /// Its name.
    pub name: &'static str,
    /// Size in bytes.
    pub bytes: usize,
    /// What it is.
    pub doc: &'static [&'static str],
    /// Its fields in order.
    pub fields: &'static [Field],
}

/// Define an on-disk structure of a fixed size: no padding (`IntoBytes` refuses it), the size
/// asserted, the layout described.
macro_rules! on_disk {
    ($(#[doc = $doc:literal])* $name:ident: $size:literal bytes {
        $($(#[doc = $field_doc:literal])* $field:ident: $kind:ty,)*
    }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[doc = $field_doc])* pub $field: $kind,)* }
        const _: () = assert!(size_of::<$name>() == $size);
        impl $name {
            /// The layout, for the generated documentation.
            pub const STRUCTURE: Structure = Structure {
                name: stringify!($name),
                bytes: $size,
                doc: &[$($doc),*],
                fields: &[$(Field {
                    name: stringify!($field),
                    kind: stringify!($kind),
                    offset: core::mem::offset_of!($name, $field),
                    bytes: size_of::<$kind>(),
                    doc: &[$($field_doc),*],
                }),*],
            };
        }
    };
}

pub(crate) use on_disk;

/// Every structure, in the order of the documentation.
pub const STRUCTURES: &[Structure] = &[
    LogSuperblock::STRUCTURE,
    SpanHeader::STRUCTURE,
    SpanEntry::STRUCTURE,
    clients::ClientRecordHeader::STRUCTURE,
    clients::CheckpointClient::STRUCTURE,
    clients::CheckpointResult::STRUCTURE,
    CacheSuperblock::STRUCTURE,
    CacheJournalHeader::STRUCTURE,
    CacheJournalEntry::STRUCTURE,
    CacheFooter::STRUCTURE,
    packed::CacheLineHeader::STRUCTURE,
    home::HomeSuperblock::STRUCTURE,
    home::HomePage::STRUCTURE,
    objects::DataFooter::STRUCTURE,
    objects::DataRun::STRUCTURE,
    frames::FrameHeader::STRUCTURE,
    objects::MapPage::STRUCTURE,
    objects::MapRun::STRUCTURE,
    objects::MapIndexEntry::STRUCTURE,
    objects::MapFooter::STRUCTURE,
    objects::UsageHeader::STRUCTURE,
    objects::UsageEntry::STRUCTURE,
    objects::ManifestHeader::STRUCTURE,
    objects::ManifestMap::STRUCTURE,
    objects::ManifestTail::STRUCTURE,
    objects::ManifestSnapshot::STRUCTURE,
    objects::ManifestAncestor::STRUCTURE,
    objects::CloneReference::STRUCTURE,
    heat_map::HeatHeader::STRUCTURE,
    heat_map::HeatRun::STRUCTURE,
];

/// CRC-32C (Castagnoli, RFC 3720): the checksum of one data block.
pub fn block_checksum(block: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(block)
}

/// CRC-64/NVME: the checksum of a control structure, and the link of the chain.
pub fn control_checksum(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// Blocks from one superblock of a log to the next, and from the last to the ring: what a drive that is cut off
/// while it writes may damage beside that (64 KiB).
pub const LOG_SUPERBLOCK_STRIDE: u64 = 16;
/// Superblocks of a log.
pub const LOG_SUPERBLOCKS: u64 = 2;
/// Blocks before the ring.
pub const LOG_HEADER_BLOCKS: u64 = LOG_SUPERBLOCKS * LOG_SUPERBLOCK_STRIDE;
/// First bytes of a log superblock.
pub const LOG_MAGIC: [u8; 8] = *b"HDCSLOG\0";
/// First bytes of a span.
pub const SPAN_MAGIC: [u8; 8] = *b"HDCSSPAN";
/// The newest version of the log's superblock: that of a log of a group.
pub const LOG_VERSION: u16 = 2;
/// The version of the superblock of a log without a group.
pub const LOG_VERSION_ALONE: u16 = 1;
/// The version of spans.
pub const SPAN_VERSION: u16 = 1;
/// [`LogSuperblock::holds`]: a volume stands on the log.
pub const LOG_HOLDS_VOLUME: u16 = 1;
/// [`LogSuperblock::flags`]: the backend may hold writes past the log that it has not flushed.
pub const LOG_UNFLUSHED: u64 = 1;
/// [`LogSuperblock::flags`]: the log may be given less space than its size while it needs no more.
pub const LOG_SHARES_SPACE: u64 = 2;
/// [`LogSuperblock::flags`]: the copy of a group's log is being brought up, and is no source.
pub const LOG_NOT_WHOLE: u64 = 4;

on_disk! {
    /// The root of a write log: who it belongs to and where replay begins.
    LogSuperblock: 4096 bytes {
        /// `HDCSLOG\0`.
        magic: [u8; 8],
        /// Format version: 1, or 2 if the log is of a group.
        version: U16,
        /// What stands on the log: 1 a volume.
        holds: U16,
        /// Zero.
        reserved_a: [u8; 4],
        /// CRC-64/NVME of the block with this field zero.
        checksum: U64,
        /// UUID of the volume, or of what else stands on it.
        volume: [u8; 16],
        /// Random number of this log, repeated in its spans.
        log: U64,
        /// Counts superblock writes; the higher one counts.
        sequence: U64,
        /// Counts openings; a span of an opening that the superblock does not know is not valid.
        incarnation: U64,
        /// Highest epoch that this copy has promised to its group; without a group zero.
        epoch: U64,
        /// Blocks in the ring.
        ring_blocks: U64,
        /// Position of the first span that is not retired; replay begins there.
        tail: U64,
        /// Checksum of the span before the tail (0 for the first).
        tail_chain: U64,
        /// Position after the last span when the log was closed cleanly, else all ones.
        clean_head: U64,
        /// Sync points retired since the log was made.
        sync_points: U64,
        /// Which data key everything after the superblocks is encrypted with; zeroes: it is not.
        data_key: [u8; 16],
        /// Bit 0: the backend may hold writes that went past the log and that it has not flushed. Bit 1: the log shares
        /// the space of its file system, so what it does not need may be a hole from some block of the ring on. Bit
        /// 2, of a group: this copy is being brought up, and is no source. A program that does not know a bit keeps it.
        flags: U64,
        /// The read cache that has forgotten what was destaged before the tail: CRC-64/NVME of its identity, then
        /// its `format` (`U64`). Zero: nothing was destaged yet. All ones: it cannot be told.
        cache: U64,
        /// The stamp of its journal that it has to have reached.
        cache_stamp: U64,
        /// What the backend's last commit is known by; zeroes: nothing is known of it.
        backend_commit: [u8; 64],
        /// Position before which the log was known to be durable when it was opened, or later: one that seems to end
        /// before it has lost something.
        known_head: U64,
        /// With a `data_key`: the tag of the block with this field and `checksum` zero.
        tag: [u8; 16],
        /// Blocks that the spans behind the tail are written ahead of what is durable; [`SpanHeader::ahead`].
        ahead: U64,
        /// The `sequence` that `ahead` was written with: if it is another one, a program that did not know of `ahead` has
        /// written the block, and kept nothing to it.
        ahead_sequence: U64,
        /// Of a group, else zero: position from which on spans of openings before `void_before` are void.
        cut_position: U64,
        /// Of a group, else zero: see `cut_position`. At most `incarnation`.
        void_before: U64,
        /// Of a group, else zero: revision of the record under which this copy was brought up.
        joined: U64,
        /// Zero.
        reserved_b: [u8; 1760],
        /// How many of `lost` count.
        lost_ranges: U64,
        /// Sectors whose data the log has lost, as of the tail, and of what was in the ring when it was opened: first
        /// sector and number of each range, in order. What the ring holds of them counts.
        lost: [[U64; 2]; 128],
    }
}

on_disk! {
    /// The head of a span's control part.
    SpanHeader: 128 bytes {
        /// `HDCSSPAN`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Blocks of the control part.
        control_blocks: U16,
        /// Blocks of data.
        data_blocks: U16,
        /// Entries.
        entries: U16,
        /// CRC-64/NVME of the control part with this field zero.
        checksum: U64,
        /// Checksum of the span before.
        chain: U64,
        /// Random number of the log.
        log: U64,
        /// Opening that wrote it.
        incarnation: U64,
        /// Fencing number when it was written.
        epoch: U64,
        /// Position of its first block.
        position: U64,
        /// Every span below this position was durable when this one was sealed.
        durable: U64,
        /// Sync points in the log before this span.
        sync_points: U64,
        /// Blocks that are accepted ahead of what is durable from when this span is durable on until one that names more is,
        /// but for one request alone. At most twice that of the span before. Zero: it is not known.
        ahead: U64,
        /// Zero.
        reserved: [u8; 40],
    }
}

on_disk! {
    /// One write of a span.
    SpanEntry: 32 bytes {
        /// First sector (of 512 bytes) on the volume. Record: its writer's.
        start: U64,
        /// Number of sectors. Record: number of bytes.
        sectors: U64,
        /// Index of its first data block among the span's.
        data_block: U32,
        /// 1 write, 2 write-zeroes, 3 discard, 4 sync point, 5 record.
        kind: u8,
        /// Bit 0: keep the backend's space (write-zeroes).
        flags: u8,
        /// Compressed or record: byte of its first data block at which it begins; else 0.
        stored_offset: U16,
        /// Compressed: how many bytes it has there; else 0.
        stored_bytes: U16,
        /// How it is compressed: 0 not, 1 LZ4 block format, 2 Zstandard.
        method: u8,
        /// Zero.
        reserved: u8,
        /// Compressed: CRC-32C of its blocks before that; else 0.
        checksum: U32,
    }
}

/// What an entry of a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// Data.
    Write,
    /// Zeroes, without data.
    WriteZeroes,
    /// Given back; reads as zeroes.
    Discard,
    /// Everything before goes to the backend before everything after.
    SyncPoint,
    /// Bytes that mean nothing to the log.
    Record,
}

impl EntryKind {
    /// The byte on the medium.
    pub const fn code(self) -> u8 {
        match self {
            Self::Write => 1,
            Self::WriteZeroes => 2,
            Self::Discard => 3,
            Self::SyncPoint => 4,
            Self::Record => 5,
        }
    }

    /// The kind of a byte on the medium.
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Write,
            2 => Self::WriteZeroes,
            3 => Self::Discard,
            4 => Self::SyncPoint,
            5 => Self::Record,
            _ => return None,
        })
    }
}

/// [`SpanEntry::flags`]: keep the backend's space allocated.
pub const ENTRY_NO_HOLE: u8 = 1;

/// Where every structure that begins with a magic has its version.
const VERSION_OFFSET: usize = 8;
/// Where every structure that begins with a magic has its checksum.
const CHECKSUM_OFFSET: usize = 16;

/// Check magic and version of the structure that `bytes` begin with.
fn check_head(bytes: &[u8], magic: [u8; 8], supported: u16) -> Result<(), FormatError> {
    if bytes[..8] != magic {
        return Err(FormatError::Magic);
    }
    let found = u16::from_le_bytes([bytes[VERSION_OFFSET], bytes[VERSION_OFFSET + 1]]);
    if found > supported {
        return Err(FormatError::Newer { found, supported });
    }
    if found == 0 {
        return Err(FormatError::Field("version"));
    }
    Ok(())
}

/// Check magic, version and checksum of the structure that `bytes` begin with. The checksum is that of
/// all of `bytes`, which are as long as the structure at least.
pub(crate) fn verify(bytes: &[u8], magic: [u8; 8], supported: u16) -> Result<(), FormatError> {
    verify_at(bytes, 0, magic, supported)
}

/// The same for a structure that begins at `at`, with something before it.
pub(crate) fn verify_at(
    bytes: &[u8],
    at: usize,
    magic: [u8; 8],
    supported: u16,
) -> Result<(), FormatError> {
    check_head(&bytes[at..], magic, supported)?;
    let offset = at + CHECKSUM_OFFSET;
    if bytes[offset..offset + 8] != checksum_without(bytes, offset).to_le_bytes() {
        return Err(FormatError::Checksum);
    }
    Ok(())
}

/// Refuse copies of a structure of which a newer program has written one, whatever is in the others: what an older
/// program makes of an older copy is not what was written last. In every version magic, version and checksum are where
/// they are in this one, so that a version number that is damaged is not taken for a newer one.
pub(crate) fn refuse_newer(
    copies: &[&[u8]],
    magic: [u8; 8],
    supported: u16,
) -> Result<(), FormatError> {
    for copy in copies {
        let Err(newer @ FormatError::Newer { .. }) = check_head(copy, magic, supported) else {
            continue;
        };
        let found = copy[CHECKSUM_OFFSET..].first_chunk();
        if found == Some(&checksum_without(copy, CHECKSUM_OFFSET).to_le_bytes()) {
            return Err(newer);
        }
    }
    Ok(())
}

/// [`control_checksum`] of `bytes` with the eight bytes at `offset` taken as zero.
fn checksum_without(bytes: &[u8], offset: usize) -> u64 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    digest.update(&bytes[..offset]);
    digest.update(&[0; 8]);
    digest.update(&bytes[offset + 8..]);
    digest.finalize()
}

/// Store the checksum of all of `bytes` in the structure that they begin with, one that has a magic;
/// returns it.
pub fn seal(bytes: &mut [u8]) -> u64 {
    seal_at(bytes, 0)
}

/// The same for a structure that begins at `at`, with something before it.
pub fn seal_at(bytes: &mut [u8], at: usize) -> u64 {
    let offset = at + CHECKSUM_OFFSET;
    let checksum = checksum_without(bytes, offset);
    bytes[offset..offset + 8].copy_from_slice(&checksum.to_le_bytes());
    checksum
}

impl SpanHeader {
    /// Bytes of control for so many entries and data blocks.
    pub const fn control_bytes(entries: usize, data_blocks: usize) -> usize {
        size_of::<Self>() + entries * size_of::<SpanEntry>() + data_blocks * 4
    }

    /// Blocks of control for so many entries and data blocks.
    pub const fn control_blocks_for(entries: usize, data_blocks: usize) -> usize {
        Self::control_bytes(entries, data_blocks).div_ceil(BLOCK_BYTES)
    }

    /// The header at the start of a block, with its counts checked: enough to know how many blocks
    /// the control part has. Its checksum is not.
    pub fn peek(block: &[u8]) -> Result<Self, FormatError> {
        let (this, _) = Self::read_from_prefix(block).map_err(|_| FormatError::Field("length"))?;
        check_head(block, SPAN_MAGIC, SPAN_VERSION)?;
        let (entries, data_blocks) = (this.entries.get() as usize, this.data_blocks.get() as usize);
        if entries == 0 || entries > SPAN_ENTRIES_MAX {
            return Err(FormatError::Field("entries"));
        }
        if data_blocks > SPAN_DATA_BLOCKS_MAX {
            return Err(FormatError::Field("data_blocks"));
        }
        let control_blocks = Self::control_blocks_for(entries, data_blocks);
        if usize::from(this.control_blocks.get()) != control_blocks {
            return Err(FormatError::Field("control_blocks"));
        }
        Ok(this)
    }

    /// Check the whole control part against the checksum in its header.
    pub fn verify(control: &[u8]) -> Result<Self, FormatError> {
        let this = Self::peek(control)?;
        verify(control, SPAN_MAGIC, SPAN_VERSION)?;
        Ok(this)
    }

    /// Compute and store the checksum of a control part; returns it.
    pub fn seal(control: &mut [u8]) -> u64 {
        seal(control)
    }
}

const _: () = assert!(size_of::<LogSuperblock>() == BLOCK_BYTES);
const _: () = assert!(LOST_RANGES_MAX == 128, "the superblock has room for them");
const _: () = assert!(SPAN_ENTRIES_MAX <= u16::MAX as usize);
const _: () = assert!(
    SpanHeader::control_blocks_for(SPAN_ENTRIES_MAX, SPAN_DATA_BLOCKS_MAX) * BLOCK_BYTES
        <= 64 << 10,
    "the largest control part is one small buffer"
);

/// Blocks before the journal of a read cache.
pub const CACHE_HEADER_BLOCKS: u64 = 32;
/// The blocks of its superblocks, by the parity of their sequence: 64 KiB from each other, and from all else.
pub const CACHE_SUPERBLOCK_BLOCKS: [u64; 2] = [0, 16];
/// First bytes of a read cache's superblock.
pub const CACHE_MAGIC: [u8; 8] = *b"HDCSCACH";
/// First bytes of a block of the journal of invalidations.
pub const CACHE_JOURNAL_MAGIC: [u8; 8] = *b"HDCSJRNL";
/// First bytes of a segment's footer.
pub const CACHE_FOOTER_MAGIC: [u8; 8] = *b"HDCSFOOT";
/// The version of the read cache's structures.
pub const CACHE_VERSION: u16 = 1;
/// Bits of a stamp, and of a segment's sequence number, below the start that it belongs to.
pub const CACHE_START_SHIFT: u32 = 40;

on_disk! {
    /// The root of a read cache: whose it is and which part of the journal counts.
    CacheSuperblock: 4096 bytes {
        /// `HDCSCACH`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Blocks of one line.
        line_blocks: U16,
        /// 1 while the region is being made: nothing in it counts.
        forming: u8,
        /// Zero.
        reserved_a: [u8; 3],
        /// CRC-64/NVME of the block with this field zero.
        checksum: U64,
        /// Identity of the cache.
        uuid: [u8; 16],
        /// Counts the times that all content was declared void; journal and footers repeat it.
        format: U64,
        /// Counts superblock writes; the block of this structure is its parity.
        sequence: U64,
        /// Counts starts; the upper 24 bits of the sequence numbers of segments.
        incarnation: U64,
        /// Bytes of the region.
        region_bytes: U64,
        /// First epoch of the journal that counts.
        journal_first: U64,
        /// Last epoch of the journal: the one that is appended to.
        journal_last: U64,
        /// The stamp when it was written.
        stamp: U64,
        /// The stamps that were found at the starts before, each of the last one before it; the present one's first.
        /// What a start has found missing stays missing, though its numbers are used again.
        ends: [U64; 16],
        /// Zero.
        reserved_b: [u8; 3872],
    }
}

on_disk! {
    /// The head of one block of the journal of invalidations.
    CacheJournalHeader: 64 bytes {
        /// `HDCSJRNL`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Entries that follow.
        entries: U16,
        /// Zero.
        reserved_a: [u8; 4],
        /// CRC-64/NVME of the block with this field zero.
        checksum: U64,
        /// That of the superblock.
        format: U64,
        /// Which epoch it belongs to.
        epoch: U64,
        /// Its place within the epoch.
        index: U64,
        /// The stamp that is reached with it.
        stamp: U64,
        /// Zero.
        reserved_b: [u8; 8],
    }
}

on_disk! {
    /// One invalidation.
    CacheJournalEntry: 32 bytes {
        /// Range: applies to segments up to this sequence number. Segment: footers of lower
        /// sequence numbers are void; of the footer with this one, the lines in `dead`.
        sequence: U64,
        /// Range: key of the first block. Segment: `dead`, bits 0 to 63.
        first: U64,
        /// Range: number of blocks. Segment: `dead`, bits 64 to 127.
        second: U64,
        /// Segment: its number.
        segment: U32,
        /// 1 range, 2 segment.
        kind: u8,
        /// Zero.
        reserved: [u8; 3],
    }
}

on_disk! {
    /// The last block of a segment, followed by keys and checksums of its lines.
    CacheFooter: 64 bytes {
        /// `HDCSFOOT`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Blocks of one line.
        line_blocks: U16,
        /// 0 small, 1 main: the queue that the segment waits in.
        stream: u8,
        /// Zero.
        reserved_a: [u8; 3],
        /// CRC-64/NVME of the block with this field zero.
        checksum: U64,
        /// Identity of the cache.
        uuid: [u8; 16],
        /// That of the superblock.
        format: U64,
        /// Order in which segments were sealed; never used twice.
        sequence: U64,
        /// Number of the segment.
        segment: U32,
        /// How many lines follow.
        lines: U16,
        /// Zero.
        reserved_b: [u8; 2],
    }
}

/// Entries of one block of the journal of invalidations at most.
pub const CACHE_JOURNAL_ENTRIES_MAX: usize =
    (BLOCK_BYTES - size_of::<CacheJournalHeader>()) / size_of::<CacheJournalEntry>();
/// [`CacheJournalEntry::kind`] of a range of keys.
pub const CACHE_ENTRY_RANGE: u8 = 1;
/// [`CacheJournalEntry::kind`] of lines of a segment.
pub const CACHE_ENTRY_SEGMENT: u8 = 2;

/// Bound of the counters in a superblock: they start below 2^63 and grow by one.
const CACHE_COUNTER_MAX: u64 = u64::MAX - (1 << 40);

impl CacheSuperblock {
    /// Fill in the checksum.
    pub fn seal(&mut self) {
        seal(self.as_mut_bytes());
    }

    /// Refuse the blocks of both superblocks if a newer program has written one of them.
    pub fn refuse_newer(blocks: &[&[u8]]) -> Result<(), FormatError> {
        refuse_newer(blocks, CACHE_MAGIC, CACHE_VERSION)
    }

    /// The superblock in `block`, checked but for its identity and geometry.
    pub fn parse(block: &[u8]) -> Result<Self, FormatError> {
        let this = Self::read_from_bytes(block).map_err(|_| FormatError::Field("length"))?;
        verify(block, CACHE_MAGIC, CACHE_VERSION)?;
        let (first, last) = (this.journal_first.get(), this.journal_last.get());
        if last < first || last - first > 1 {
            return Err(FormatError::Field("journal_last"));
        }
        if [this.format.get(), this.sequence.get(), last]
            .iter()
            .any(|&counter| counter >= CACHE_COUNTER_MAX)
        {
            return Err(FormatError::Field("sequence"));
        }
        Ok(this)
    }
}

impl CacheJournalHeader {
    /// The header of a whole block with its checksum verified, and its entries.
    pub fn parse(block: &[u8]) -> Result<(Self, &[CacheJournalEntry]), FormatError> {
        let (this, rest) =
            Self::read_from_prefix(block).map_err(|_| FormatError::Field("length"))?;
        verify(block, CACHE_JOURNAL_MAGIC, CACHE_VERSION)?;
        let entries = usize::from(this.entries.get());
        if entries > CACHE_JOURNAL_ENTRIES_MAX {
            return Err(FormatError::Field("entries"));
        }
        let bytes = &rest[..entries * size_of::<CacheJournalEntry>()];
        let entries = <[CacheJournalEntry]>::ref_from_bytes(bytes)
            .map_err(|_| FormatError::Field("entries"))?;
        Ok((this, entries))
    }

    /// Write a whole block: this header, the entries, the checksum.
    pub fn write(&self, entries: &[CacheJournalEntry], block: &mut [u8]) {
        block.fill(0);
        let (head, rest) = block.split_at_mut(size_of::<Self>());
        head.copy_from_slice(self.as_bytes());
        rest[..size_of_val(entries)].copy_from_slice(entries.as_bytes());
        seal(block);
    }
}

const _: () = assert!(size_of::<CacheSuperblock>() == BLOCK_BYTES);
const _: () = assert!(CACHE_STARTS_KEPT == 16, "the superblock has room for them");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_with_a_magic_begin_alike() {
        let with_magic = STRUCTURES.iter().filter(|it| it.fields[0].name == "magic");
        for structure in with_magic {
            let mut fields = structure.fields.iter();
            let mut place = |name| {
                let field = fields.find(|field| field.name == name);
                field.map(|field| (field.offset, field.bytes))
            };
            assert_eq!(place("magic"), Some((0, 8)), "{}", structure.name);
            let version = Some((VERSION_OFFSET, 2));
            assert_eq!(place("version"), version, "{}", structure.name);
            let checksum = Some((CHECKSUM_OFFSET, 8));
            assert_eq!(place("checksum"), checksum, "{}", structure.name);
        }
    }
}
