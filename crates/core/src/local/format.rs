//! On-disk structures of a volume's local store, part of docs/FORMATS.md by way of [`crate::format`].

use alloc::boxed::Box;
use alloc::vec;

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::cipher::{KeyedCipher, TAG_BYTES, compare_tags};
use crate::base::error::FormatError;
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use crate::format::{Field, Structure, on_disk, refuse_newer, seal, verify};

/// Blocks before the first page of the map.
pub const HOME_HEADER_BLOCKS: u64 = 8;
/// First bytes of a local store's superblock.
pub const HOME_MAGIC: [u8; 8] = *b"HDCSHOME";
/// First bytes of a page of its map.
pub const HOME_PAGE_MAGIC: [u8; 8] = *b"HDCSHMAP";
/// The version of a local store's structures.
pub const HOME_VERSION: u16 = 1;
/// Blocks of the volume that one page of the map describes.
pub const PAGE_BLOCKS: u64 = (PAGE_STATE_BYTES * 4) as u64;
/// Bytes of states in one page.
pub const PAGE_STATE_BYTES: usize = 4032;
/// [`HomeSuperblock::flags`]: the backend is between two states.
pub const HOME_BETWEEN: u64 = 1;
/// [`HomeSuperblock::sums_log`]: the checksums hold for no write log. A new local store has 0 there.
pub const SUMS_UNTRUSTED: u64 = u64::MAX;
/// Bytes of the CRC-32C of a sector as it is stored, little-endian.
pub const CRC_BYTES: usize = 4;
/// Bytes of the tag of a sector that is encrypted, little-endian, behind its CRC-32C.
pub const SECTOR_TAG_BYTES: usize = 4;

on_disk! {
    /// The root of a local store: whose it is.
    HomeSuperblock: 4096 bytes {
        /// `HDCSHOME`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Zero.
        reserved_a: [u8; 6],
        /// CRC-64/NVME of the block with this field zero.
        checksum: U64,
        /// UUID of the volume.
        volume: [u8; 16],
        /// Random number of this local store, repeated in the pages of its map.
        home: U64,
        /// Counts superblock writes; the higher one counts.
        sequence: U64,
        /// Size of the volume in bytes.
        bytes: U64,
        /// Bit 0: tiering out has begun and not ended, so the backend is between two states.
        flags: U64,
        /// Random number of the write log under which the checksums of data hold; 0: no log yet; all ones: under
        /// none, since one was lost or held not all that was written.
        sums_log: U64,
        /// Which data key data is encrypted with; zeroes: it is plain.
        data_key: [u8; 16],
        /// Commits that have changed pages of the map, or this. No page that is older than it was then may count.
        commits: U64,
        /// Sum of what [`page_digest`] makes of each page's number and `generation`.
        map_digest: U64,
        /// Of encrypted data: the tag of the block with this field and `checksum` zero.
        tag: [u8; 16],
        /// Zero.
        reserved_b: [u8; 3968],
    }
}

on_disk! {
    /// A page of a local store's map.
    HomePage: 4096 bytes {
        /// `HDCSHMAP`.
        magic: [u8; 8],
        /// Format version, 1.
        version: U16,
        /// Zero.
        reserved_a: [u8; 6],
        /// CRC-64/NVME of the block with this field zero.
        checksum: U64,
        /// Random number of the local store.
        home: U64,
        /// Random number of the write log in front of it when this was written.
        log: U64,
        /// Number of the commit that wrote it (`commits` of the superblock); the copy with the higher one counts.
        generation: U64,
        /// Number of the page.
        page: U64,
        /// Of encrypted data: the first bytes of the tag of the block with this field and `checksum` zero.
        tag: [u8; 8],
        /// Two bits for each block, the lowest bits first: 0 absent, 1 clean, 2 dirty, 3 zero.
        states: [u8; 4032],
    }
}

impl HomeSuperblock {
    /// A superblock, sealed, of plain data.
    pub fn sealed(
        volume: [u8; 16],
        home: u64,
        sequence: u64,
        bytes: u64,
        flags: u64,
        sums_log: u64,
    ) -> Self {
        let mut this = Self::new_zeroed();
        this.magic = HOME_MAGIC;
        this.version = U16::new(HOME_VERSION);
        this.sums_log = U64::new(sums_log);
        this.volume = volume;
        this.home = U64::new(home);
        this.sequence = U64::new(sequence);
        this.bytes = U64::new(bytes);
        this.flags = U64::new(flags);
        this.seal();
        this
    }

    /// The same of a local store whose data is encrypted with this key, sealed; zeroes change nothing.
    #[must_use]
    pub fn encrypted(mut self, data_key: [u8; 16]) -> Self {
        if data_key != [0; 16] {
            self.data_key = data_key;
            self.seal();
        }
        self
    }

    /// The same of a map with this digest after so many commits, sealed.
    #[must_use]
    pub fn counting(mut self, commits: u64, map_digest: u64) -> Self {
        self.commits = U64::new(commits);
        self.map_digest = U64::new(map_digest);
        self.seal();
        self
    }

    /// The same with the tag of these keys, sealed; without any, nothing changes. Whatever is changed afterwards takes
    /// its tag from it.
    #[must_use]
    pub fn tagged(mut self, keys: Option<&dyn KeyedCipher>) -> Self {
        if let Some(keys) = keys {
            self.tag = self.tag_by(keys);
            self.seal();
        }
        self
    }

    fn tag_by(mut self, keys: &dyn KeyedCipher) -> [u8; TAG_BYTES] {
        self.checksum = U64::new(0);
        self.tag = [0; TAG_BYTES];
        keys.tag(self.as_bytes())
    }

    /// Whether a holder of these keys has written it; without any that is not asked.
    ///
    /// # Errors
    /// [`FormatError::Forged`] if nobody has.
    pub fn authenticate(&self, keys: Option<&dyn KeyedCipher>) -> Result<(), FormatError> {
        keys.map_or(Ok(()), |keys| compare_tags(&self.tag, &self.tag_by(keys)))
    }

    fn seal(&mut self) {
        seal(self.as_mut_bytes());
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

    /// What has to be durable before it is used behind a write log. Checksums hold after a crash because that log
    /// writes again what was not flushed: so not under another one, nor if it let writes past it. Pages that a commit
    /// wrote which a crash has cut short count from now on. It is tagged with the keys of the local store, if it has
    /// any.
    pub fn begin(
        &self,
        log: u64,
        is_log_whole: bool,
        map: &MapCheck,
        keys: Option<&dyn KeyedCipher>,
    ) -> Option<Self> {
        let sums_log = match self.sums_log.get() {
            0 => log,
            found if found == SUMS_UNTRUSTED || (found == log && is_log_whole) => found,
            _ => SUMS_UNTRUSTED,
        };
        let (commits, map_digest) = (map.commits.max(map.newest), map.chosen);
        let is_same = sums_log == self.sums_log.get()
            && commits == self.commits.get()
            && map_digest == self.map_digest.get();
        if is_same {
            return None;
        }
        let begun = Self::sealed(
            self.volume,
            self.home.get(),
            self.sequence.get() + 1,
            self.bytes.get(),
            self.flags.get(),
            sums_log,
        );
        let begun = begun.encrypted(self.data_key);
        Some(begun.counting(commits, map_digest).tagged(keys))
    }

    /// Where everything else is in the store.
    pub fn layout(&self) -> Layout {
        Layout::of(self.data_key != [0; 16])
    }

    /// Where in the store a superblock lies.
    pub fn place(&self) -> u64 {
        self.sequence.get() % 2 * BLOCK_BYTES as u64
    }

    /// The newest of both copies; if none can be used, why the first cannot; neither if a newer program wrote one.
    pub fn newest(blocks: [&[u8]; 2]) -> Result<Self, FormatError> {
        refuse_newer(&blocks, HOME_MAGIC, HOME_VERSION)?;
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
        this.version = U16::new(HOME_VERSION);
        this.home = U64::new(home);
        this.log = U64::new(log);
        this.generation = U64::new(generation);
        this.page = U64::new(page);
        this.states.copy_from_slice(states);
        seal(this.as_mut_bytes());
        this
    }

    /// The same with the tag of these keys, sealed; without any, nothing changes.
    #[must_use]
    pub fn tagged(mut self, keys: Option<&dyn KeyedCipher>) -> Self {
        if let Some(keys) = keys {
            let tag = self.tag_by(keys);
            let bytes = self.tag.len();
            self.tag.copy_from_slice(&tag[..bytes]);
            seal(self.as_mut_bytes());
        }
        self
    }

    fn tag_by(mut self, keys: &dyn KeyedCipher) -> [u8; TAG_BYTES] {
        self.checksum = U64::new(0);
        self.tag = [0; 8];
        keys.tag(self.as_bytes())
    }

    /// Whether a holder of these keys has written it; without any that is not asked.
    ///
    /// # Errors
    /// [`FormatError::Forged`] if nobody has.
    pub fn authenticate(&self, keys: Option<&dyn KeyedCipher>) -> Result<(), FormatError> {
        keys.map_or(Ok(()), |keys| compare_tags(&self.tag, &self.tag_by(keys)))
    }

    /// The page `page` of a local store in `block`.
    pub fn parse(block: &[u8], home: u64, page: u64) -> Result<Self, FormatError> {
        let this = Self::read_from_bytes(block).map_err(|_| FormatError::Field("length"))?;
        verify(block, HOME_PAGE_MAGIC, HOME_VERSION)?;
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
    /// Of each copy the commit that wrote it, or why it cannot be used.
    pub generations: [Result<u64, FormatError>; 2],
}

/// What a page adds to the digest of a map.
pub const fn page_digest(page: u64, generation: u64) -> u64 {
    mix(generation ^ mix(page.wrapping_add(1)))
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
const fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// Whether the pages that were found are those that the superblock knows. A page is older if the device has lost a
/// write that it had acknowledged; a commit that a crash has cut short leaves newer ones.
///
/// The superblock of a commit is written with the copies of its pages, once the pages are durable. So of each page
/// the newest copy up to that commit has to make up the digest. If both copies of a page are newer, copies of the next
/// commit were being written: its pages are durable, and what of it is older is that of no answered flush.
#[derive(Clone, Copy, Debug)]
pub struct MapCheck {
    commits: u64,
    expected: u64,
    /// The digest of what is there of up to that commit, and of the pages that count.
    found: u64,
    chosen: u64,
    /// The newest commit that wrote one of them.
    newest: u64,
    /// Whether a page has no copy of up to that commit.
    is_ahead: bool,
}

impl MapCheck {
    /// Nothing was found yet.
    pub fn new(superblock: &HomeSuperblock) -> Self {
        Self {
            commits: superblock.commits.get(),
            expected: superblock.map_digest.get(),
            found: 0,
            chosen: 0,
            newest: 0,
            is_ahead: false,
        }
    }

    /// A page was found.
    pub fn add(&mut self, found: &FoundPage) {
        let (page, generation) = (found.page.page.get(), found.page.generation.get());
        let generations = found.generations.into_iter().flatten();
        match generations.filter(|&one| one <= self.commits).max() {
            Some(known) => self.found = self.found.wrapping_add(page_digest(page, known)),
            None => self.is_ahead = true,
        }
        self.chosen = self.chosen.wrapping_add(page_digest(page, generation));
        self.newest = self.newest.max(generation);
    }

    /// All of them were.
    ///
    /// # Errors
    /// [`FormatError::Stale`] if one is older than the superblock says, or the superblock than they are.
    pub fn end(&self) -> Result<(), FormatError> {
        let is_superblock_lost = self.newest > self.commits.saturating_add(1);
        if is_superblock_lost || (!self.is_ahead && self.found != self.expected) {
            return Err(FormatError::Stale);
        }
        Ok(())
    }
}

/// Choose between both copies of a page, of which neither may be forged if there are keys to tell.
pub fn choose_page(
    blocks: [&[u8]; 2],
    home: u64,
    page: u64,
    keys: Option<&dyn KeyedCipher>,
) -> Result<FoundPage, FormatError> {
    refuse_newer(&blocks, HOME_PAGE_MAGIC, HOME_VERSION)?;
    let generation = |page: &HomePage| page.generation.get();
    let copies = blocks.map(|block| HomePage::parse(block, home, page));
    for copy in copies.iter().flatten() {
        copy.authenticate(keys)?;
    }
    let generations =
        [&copies[0], &copies[1]].map(|copy| copy.as_ref().map(generation).map_err(|error| *error));
    let (chosen, repair) = match copies {
        [Ok(one), Ok(two)] if generation(&one) == generation(&two) => (one, None),
        [Ok(one), Ok(two)] if generation(&one) < generation(&two) => (two, Some(0)),
        [Ok(one), _] => (one, Some(1)),
        [Err(_), Ok(two)] => (two, Some(0)),
        [Err(error), Err(_)] => return Err(error),
    };
    Ok(FoundPage {
        page: Box::new(chosen),
        repair,
        generations,
    })
}

/// Pages of the map of a volume of `bytes` bytes.
pub const fn pages(bytes: u64) -> u64 {
    (bytes / BLOCK_BYTES as u64).div_ceil(PAGE_BLOCKS)
}

/// Where things are in a store. In the table of an encrypted local store a tag follows each checksum, so it is twice as
/// long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    sum_bytes: usize,
}

impl Layout {
    /// Of a local store whose data is plain.
    pub const PLAIN: Self = Self {
        sum_bytes: CRC_BYTES,
    };
    /// Of a local store whose data is encrypted.
    pub const TAGGED: Self = Self {
        sum_bytes: CRC_BYTES + SECTOR_TAG_BYTES,
    };

    /// Of a local store whose data is encrypted, or not.
    pub const fn of(is_encrypted: bool) -> Self {
        if is_encrypted {
            Self::TAGGED
        } else {
            Self::PLAIN
        }
    }

    /// Bytes of a sector's entry in the table.
    pub const fn sum_bytes(self) -> usize {
        self.sum_bytes
    }

    /// Sectors of the volume whose entries are in one block of the table.
    pub const fn sums_sectors(self) -> u64 {
        (BLOCK_BYTES / self.sum_bytes) as u64
    }

    /// Blocks of the volume whose entries are in one block of the table.
    pub const fn sums_blocks(self) -> u64 {
        self.sums_sectors() / BLOCK_SECTORS
    }

    /// Blocks of the table between a page and its blocks.
    const fn group_sums(self) -> u64 {
        PAGE_BLOCKS / self.sums_blocks()
    }

    /// Blocks of the store up to the data of a page's blocks, from the page on.
    const fn group_head(self) -> u64 {
        2 + self.group_sums()
    }

    /// Bytes of the store of a volume of `bytes` bytes. It ends with the volume's last block, so that it can grow.
    pub const fn store_bytes(self, bytes: u64) -> u64 {
        bytes + (HOME_HEADER_BLOCKS + self.group_head() * pages(bytes)) * BLOCK_BYTES as u64
    }

    /// Where in the store the block `number` of the table is, in bytes. Those of one page's blocks are adjacent.
    pub const fn sums_offset(self, number: u64) -> u64 {
        let (page, of_page) = (number / self.group_sums(), number % self.group_sums());
        self.page_offset(page, 2) + of_page * BLOCK_BYTES as u64
    }

    /// Where in the store the entry of a sector of the volume is, in bytes.
    pub const fn sum_offset(self, sector: u64) -> u64 {
        let of_block = sector % self.sums_sectors() * self.sum_bytes as u64;
        self.sums_offset(sector / self.sums_sectors()) + of_block
    }

    /// Where a copy of a page is in the store, in bytes.
    pub const fn page_offset(self, page: u64, copy: usize) -> u64 {
        let group = self.group_head() + PAGE_BLOCKS;
        (HOME_HEADER_BLOCKS + page * group + copy as u64) * BLOCK_BYTES as u64
    }

    /// Where in the store the data at `offset` of the volume is, in bytes.
    pub const fn data_offset(self, offset: u64) -> u64 {
        let page = offset / (PAGE_BLOCKS * BLOCK_BYTES as u64);
        offset + (HOME_HEADER_BLOCKS + self.group_head() * (page + 1)) * BLOCK_BYTES as u64
    }

    const fn is_sound(self) -> bool {
        SECTOR_BYTES.is_multiple_of(self.sum_bytes)
            && PAGE_BLOCKS.is_multiple_of(self.sums_blocks())
    }
}

const _: () = assert!(
    Layout::PLAIN.is_sound() && Layout::TAGGED.is_sound(),
    "an entry is in one sector, and those of a page's blocks share no block with others"
);

/// The first blocks of a new local store, up to its first page; `data_key` is zeroes if its data is plain, and else
/// `keys` are those of the local store.
pub fn format_head(
    volume: [u8; 16],
    home: u64,
    bytes: u64,
    data_key: [u8; 16],
    keys: Option<&dyn KeyedCipher>,
) -> Box<[u8]> {
    let mut head = vec![0; HOME_HEADER_BLOCKS as usize * BLOCK_BYTES];
    let terms = (0..pages(bytes)).map(|page| page_digest(page, 1));
    let superblock = HomeSuperblock::sealed(volume, home, 1, bytes, 0, 0)
        .encrypted(data_key)
        .counting(1, terms.fold(0, u64::wrapping_add))
        .tagged(keys);
    head[BLOCK_BYTES..2 * BLOCK_BYTES].copy_from_slice(superblock.as_bytes());
    head.into()
}

/// A page of a new local store's map: nothing is there.
pub fn format_page(home: u64, page: u64, keys: Option<&dyn KeyedCipher>) -> HomePage {
    empty_page(home, 1, page).tagged(keys)
}

/// A page that a local store grows by in the commit with this number.
pub fn empty_page(home: u64, generation: u64, page: u64) -> HomePage {
    HomePage::sealed(home, 0, generation, page, &[0; PAGE_STATE_BYTES])
}
