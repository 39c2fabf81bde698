//! On-disk structures of a volume's home, part of docs/FORMATS.md by way of [`crate::format`].

use alloc::boxed::Box;
use alloc::vec;

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::FormatError;
use crate::format::{Field, Structure, on_disk, seal, verify};
use crate::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};

/// Blocks before the first page of the map.
pub const HOME_HEADER_BLOCKS: u64 = 8;
/// First bytes of a home's superblock.
pub const HOME_MAGIC: [u8; 8] = *b"HDCSHOME";
/// First bytes of a page of its map.
pub const HOME_PAGE_MAGIC: [u8; 8] = *b"HDCSHMAP";
/// The newest version of a home. Those before it have another [`Layout`].
pub const HOME_VERSION: u16 = 4;
/// The version of the pages of the map.
pub const HOME_PAGE_VERSION: u16 = 1;
/// Blocks of the volume that one page of the map describes.
pub const PAGE_BLOCKS: u64 = (PAGE_STATE_BYTES * 4) as u64;
/// Bytes of states in one page.
pub const PAGE_STATE_BYTES: usize = 4032;
/// [`HomeSuperblock::flags`]: the backend is between two states.
pub const HOME_BETWEEN: u64 = 1;
/// [`HomeSuperblock::sums_log`]: the checksums hold for no write log. A new home has 0 there.
pub const SUMS_UNTRUSTED: u64 = u64::MAX;
/// Sectors of the volume whose checksums are in one block of the store.
pub const SUMS_SECTORS: u64 = (BLOCK_BYTES / SUM_BYTES) as u64;
/// Bytes of a checksum: the CRC-32C of a sector, little-endian.
pub const SUM_BYTES: usize = 4;
/// Blocks of the volume whose checksums are in one block of the store.
pub const SUMS_BLOCKS: u64 = SUMS_SECTORS / BLOCK_SECTORS;
const _: () = assert!(
    SECTOR_BYTES.is_multiple_of(SUM_BYTES) && PAGE_BLOCKS.is_multiple_of(SUMS_BLOCKS),
    "a checksum is in one sector, and those of a page's blocks share no block with others"
);

on_disk! {
    /// The root of a home: whose it is.
    HomeSuperblock: 4096 bytes {
        /// `HDCSHOME`.
        magic: [u8; 8],
        /// Format version: 4. Those before have the checksums of data behind it: 3 if it is encrypted, else 2;
        /// 1 has none.
        version: U16,
        /// Zero.
        reserved_a: [u8; 6],
        /// CRC-64/NVME of the block with this field zero.
        checksum: U64,
        /// UUID of the volume.
        volume: [u8; 16],
        /// Random number of this home, repeated in the pages of its map.
        home: U64,
        /// Counts superblock writes; the higher one counts.
        sequence: U64,
        /// Size of the volume in bytes.
        bytes: U64,
        /// Bit 0: tiering out has begun and not ended, so the backend is between two states.
        flags: U64,
        /// Random number of the write log under which the checksums of data hold; 0: no log yet; all ones: under
        /// none, since one was lost or held not all that was written. Zero in version 1.
        sums_log: U64,
        /// Which data key data is encrypted with; zeroes: it is plain. Zero in versions 1 and 2.
        data_key: [u8; 16],
        /// Zero.
        reserved_b: [u8; 4000],
    }
}

on_disk! {
    /// A page of a home's map.
    HomePage: 4096 bytes {
        /// `HDCSHMAP`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Zero.
        reserved_a: [u8; 6],
        /// CRC-64/NVME of the block with this field zero.
        checksum: U64,
        /// Random number of the home.
        home: U64,
        /// Random number of the write log in front of it when this was written.
        log: U64,
        /// Counts writes of this page; the copy with the higher one counts.
        generation: U64,
        /// Number of the page.
        page: U64,
        /// Zero.
        reserved_b: [u8; 8],
        /// Two bits for each block, the lowest bits first: 0 absent, 1 clean, 2 dirty, 3 zero.
        states: [u8; 4032],
    }
}

/// Where in a store what is. A home keeps the one that it was made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The checksums of a page's blocks lie between the page and these blocks, so that a home ends with its
    /// last block and can grow.
    Grouped,
    /// All checksums lie behind the last block: homes of versions 1 to 3, which keep their size.
    Trailing,
}

impl HomeSuperblock {
    /// A superblock, sealed, of plain data. Without checksums (`sums_log`) the layout is [`Layout::Trailing`].
    pub fn sealed(
        volume: [u8; 16],
        home: u64,
        sequence: u64,
        bytes: u64,
        flags: u64,
        sums_log: Option<u64>,
        layout: Layout,
    ) -> Self {
        let mut this = Self::new_zeroed();
        this.magic = HOME_MAGIC;
        this.version = U16::new(match (layout, sums_log) {
            (Layout::Grouped, _) => HOME_VERSION,
            (Layout::Trailing, Some(_)) => 2,
            (Layout::Trailing, None) => 1,
        });
        this.sums_log = U64::new(sums_log.unwrap_or(0));
        this.volume = volume;
        this.home = U64::new(home);
        this.sequence = U64::new(sequence);
        this.bytes = U64::new(bytes);
        this.flags = U64::new(flags);
        this.seal();
        this
    }

    /// The same of a home whose data is encrypted with this key, sealed; zeroes change nothing.
    #[must_use]
    pub fn encrypted(mut self, data_key: [u8; 16]) -> Self {
        if data_key != [0; 16] {
            self.version = U16::new(self.version.get().max(3));
            self.data_key = data_key;
            self.seal();
        }
        self
    }

    fn seal(&mut self) {
        seal(self.as_mut_bytes());
    }

    /// Where in the store what is.
    pub fn layout(&self) -> Layout {
        match self.version.get() {
            HOME_VERSION => Layout::Grouped,
            _ => Layout::Trailing,
        }
    }

    /// The superblock in `block`, checked but for its identity.
    pub fn parse(block: &[u8]) -> Result<Self, FormatError> {
        let this = Self::read_from_bytes(block).map_err(|_| FormatError::Field("length"))?;
        verify(block, HOME_MAGIC, HOME_VERSION)?;
        if !this.bytes.get().is_multiple_of(BLOCK_BYTES as u64) || this.bytes.get() == 0 {
            return Err(FormatError::Field("bytes"));
        }
        Ok(this)
    }

    /// The log under which the checksums of its data hold, if it has any.
    pub fn sums(&self) -> Option<u64> {
        (self.version.get() >= 2).then(|| self.sums_log.get())
    }

    /// What has to be durable before it is used behind a write log. Checksums hold after a crash because that
    /// log writes again what was not flushed: so not under another one, nor if it let writes past it.
    pub fn begin(&self, log: u64, is_log_whole: bool) -> Option<Self> {
        let sums_log = match self.sums()? {
            0 => log,
            found if found == SUMS_UNTRUSTED || (found == log && is_log_whole) => return None,
            _ => SUMS_UNTRUSTED,
        };
        let begun = Self::sealed(
            self.volume,
            self.home.get(),
            self.sequence.get() + 1,
            self.bytes.get(),
            self.flags.get(),
            Some(sums_log),
            self.layout(),
        );
        Some(begun.encrypted(self.data_key))
    }

    /// Where in the store a superblock lies.
    pub fn place(&self) -> u64 {
        self.sequence.get() % 2 * BLOCK_BYTES as u64
    }

    /// The newest of both copies; if none can be used, why the first cannot.
    pub fn newest(blocks: [&[u8]; 2]) -> Result<Self, FormatError> {
        match blocks.map(Self::parse) {
            [Ok(one), Ok(two)] if two.sequence.get() > one.sequence.get() => Ok(two),
            [Ok(one), _] => Ok(one),
            [Err(_), Ok(two)] => Ok(two),
            [Err(error), Err(_)] => Err(error),
        }
    }
}

impl HomePage {
    /// A page, sealed.
    pub fn sealed(home: u64, log: u64, generation: u64, page: u64, states: &[u8]) -> Self {
        let mut this = Self::new_zeroed();
        this.magic = HOME_PAGE_MAGIC;
        this.version = U16::new(HOME_PAGE_VERSION);
        this.home = U64::new(home);
        this.log = U64::new(log);
        this.generation = U64::new(generation);
        this.page = U64::new(page);
        this.states.copy_from_slice(states);
        seal(this.as_mut_bytes());
        this
    }

    /// The page `page` of a home in `block`.
    pub fn parse(block: &[u8], home: u64, page: u64) -> Result<Self, FormatError> {
        let this = Self::read_from_bytes(block).map_err(|_| FormatError::Field("length"))?;
        verify(block, HOME_PAGE_MAGIC, HOME_PAGE_VERSION)?;
        if this.home.get() != home || this.page.get() != page {
            return Err(FormatError::Identity);
        }
        Ok(this)
    }
}

/// A page of the map as it was found, and which copy of it must be written anew first.
#[derive(Debug)]
pub struct FoundPage {
    /// The page.
    pub page: Box<HomePage>,
    /// The copy that is older or torn: it is written and made durable before anything else is, or a
    /// torn write of the other copy would leave none.
    pub repair: Option<usize>,
}

/// Choose between both copies of a page.
pub fn choose_page(blocks: [&[u8]; 2], home: u64, page: u64) -> Result<FoundPage, FormatError> {
    let generation = |page: &HomePage| page.generation.get();
    let (chosen, repair) = match blocks.map(|block| HomePage::parse(block, home, page)) {
        [Ok(one), Ok(two)] if generation(&one) == generation(&two) => (one, None),
        [Ok(one), Ok(two)] if generation(&one) < generation(&two) => (two, Some(0)),
        [Ok(one), _] => (one, Some(1)),
        [Err(_), Ok(two)] => (two, Some(0)),
        [Err(error), Err(_)] => return Err(error),
    };
    Ok(FoundPage {
        page: Box::new(chosen),
        repair,
    })
}

/// Pages of the map of a volume of `bytes` bytes.
pub const fn pages(bytes: u64) -> u64 {
    (bytes / BLOCK_BYTES as u64).div_ceil(PAGE_BLOCKS)
}

impl Layout {
    /// Blocks of checksums between a page and its blocks.
    const fn group_sums(self) -> u64 {
        match self {
            Self::Grouped => PAGE_BLOCKS / SUMS_BLOCKS,
            Self::Trailing => 0,
        }
    }

    /// Blocks of the store up to the data of a page's blocks, from the page on.
    const fn group_head(self) -> u64 {
        2 + self.group_sums()
    }

    /// Bytes of the store of a volume of `bytes` bytes.
    pub const fn store_bytes(self, bytes: u64) -> u64 {
        let trailing = match self {
            Self::Grouped => 0,
            Self::Trailing => (bytes / BLOCK_BYTES as u64).div_ceil(SUMS_BLOCKS),
        };
        self.data_end(bytes) + trailing * BLOCK_BYTES as u64
    }

    /// Where the last byte of a volume of `bytes` bytes ends in the store.
    const fn data_end(self, bytes: u64) -> u64 {
        bytes + (HOME_HEADER_BLOCKS + self.group_head() * pages(bytes)) * BLOCK_BYTES as u64
    }

    /// Where in the store of a volume of `bytes` bytes the block `number` of checksums is, in bytes. Those of one
    /// page's blocks are adjacent. Version 1 has none.
    pub const fn sums_offset(self, bytes: u64, number: u64) -> u64 {
        match self {
            Self::Grouped => {
                let page = number / self.group_sums();
                self.page_offset(page, 2) + number % self.group_sums() * BLOCK_BYTES as u64
            }
            Self::Trailing => self.data_end(bytes) + number * BLOCK_BYTES as u64,
        }
    }

    /// Where a copy of a page is in the store, in bytes.
    pub const fn page_offset(self, page: u64, copy: usize) -> u64 {
        let group = self.group_head() + PAGE_BLOCKS;
        (HOME_HEADER_BLOCKS + page * group + copy as u64) * BLOCK_BYTES as u64
    }

    /// Where a byte of the volume is in the store. Bytes of one page's blocks are adjacent.
    pub const fn data_offset(self, offset: u64) -> u64 {
        let page = offset / BLOCK_BYTES as u64 / PAGE_BLOCKS;
        offset + (HOME_HEADER_BLOCKS + self.group_head() * (page + 1)) * BLOCK_BYTES as u64
    }
}

/// The first blocks of a new home, up to its first page; `data_key` is zeroes if its data is plain.
pub fn format_head(volume: [u8; 16], home: u64, bytes: u64, data_key: [u8; 16]) -> Box<[u8]> {
    let mut head = vec![0; HOME_HEADER_BLOCKS as usize * BLOCK_BYTES];
    let superblock = HomeSuperblock::sealed(volume, home, 1, bytes, 0, Some(0), Layout::Grouped)
        .encrypted(data_key);
    head[BLOCK_BYTES..2 * BLOCK_BYTES].copy_from_slice(superblock.as_bytes());
    head.into()
}

/// A page of a new home's map: nothing is there.
pub fn format_page(home: u64, page: u64) -> HomePage {
    HomePage::sealed(home, 0, 1, page, &[0; PAGE_STATE_BYTES])
}
