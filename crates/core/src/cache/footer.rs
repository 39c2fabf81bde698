//! The footer of a segment: which lines it holds, how many blocks each has, and the checksums of these.
//!
//! Lines lie one behind the other, those that are in use and those that are not any more.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use crate::base::error::FormatError;
use crate::base::limits::{
    BLOCK_BYTES, CACHE_LINE_BLOCKS_MAX, CACHE_LINE_BLOCKS_MIN, CACHE_SEGMENT_LINES_MAX,
    SEGMENT_BYTES,
};
use crate::format::{CACHE_FOOTER_MAGIC, CACHE_VERSION, CacheFooter, seal, verify};

/// Lines of a segment at most, per line that fits uncompressed: beyond it, memory would index what hardly any data
/// compresses to.
const LINES_PER_PLAIN_LINE: usize = 4;

/// Where a line lies in its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its first block.
    pub first: u8,
    /// Its blocks; fewer than those of a line if it is compressed.
    pub blocks: u8,
}

impl Place {
    /// The block behind the line.
    pub const fn end(self) -> usize {
        self.first as usize + self.blocks as usize
    }

    /// Bytes of the line as it is stored.
    pub const fn bytes(self) -> usize {
        self.blocks as usize * BLOCK_BYTES
    }

    /// Where the line begins, from the beginning of its segment.
    pub const fn offset(self) -> usize {
        self.first as usize * BLOCK_BYTES
    }
}

/// A line, as a footer has it.
#[derive(Clone, Copy, Debug)]
pub struct FooterLine<'a> {
    /// Key of its first block; all ones if the line is not in use.
    pub key: u64,
    /// Where it lies.
    pub place: Place,
    /// Checksums of its stored blocks.
    pub checksums: &'a [U32],
}

/// The lines of a footer, by their number in the segment.
#[derive(Clone, Copy, Debug)]
pub struct FooterLines<'a> {
    keys: &'a [U64],
    /// Blocks of each.
    blocks: &'a [u8],
    checksums: &'a [U32],
}

impl<'a> FooterLines<'a> {
    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = FooterLine<'a>> + use<'a> {
        let this = *self;
        let (mut first, mut rest) = (0, this.checksums);
        this.keys
            .iter()
            .zip(this.blocks)
            .map(move |(key, &blocks)| {
                let blocks = usize::from(blocks);
                let place = Place {
                    first: first as u8,
                    blocks: blocks as u8,
                };
                first += blocks;
                let (checksums, others) = rest.split_at(blocks);
                rest = others;
                FooterLine {
                    key: key.get(),
                    place,
                    checksums,
                }
            })
    }

    /// Each that is in use, with its number.
    pub fn used(&self) -> impl Iterator<Item = (usize, FooterLine<'a>)> + use<'a> {
        let lines = self.iter().enumerate();
        lines.filter(|(_, line)| line.key != u64::MAX)
    }
}

/// The footer in `block`, with its checksum verified, and its lines, which fit their segment.
pub fn parse(block: &[u8]) -> Result<(CacheFooter, FooterLines<'_>), FormatError> {
    let length = FormatError::Field("length");
    let (footer, rest) = CacheFooter::read_from_prefix(block).map_err(|_| length)?;
    verify(block, CACHE_FOOTER_MAGIC, CACHE_VERSION)?;
    let line_blocks = usize::from(footer.line_blocks.get());
    if !(CACHE_LINE_BLOCKS_MIN..=CACHE_LINE_BLOCKS_MAX).contains(&line_blocks) {
        return Err(FormatError::Field("line_blocks"));
    }
    let lines = usize::from(footer.lines.get());
    if lines > CacheFooter::lines_max(line_blocks) {
        return Err(FormatError::Field("lines"));
    }
    let (keys, rest) = <[U64]>::ref_from_prefix_with_elems(rest, lines).map_err(|_| length)?;
    let (blocks, rest) = rest.split_at_checked(lines).ok_or(length)?;
    let is_size = |&blocks: &u8| (1..=line_blocks).contains(&usize::from(blocks));
    if !blocks.iter().all(is_size) {
        return Err(FormatError::Field("blocks"));
    }
    let used = blocks.iter().map(|&blocks| usize::from(blocks)).sum();
    if used > CacheFooter::lines(line_blocks) * line_blocks {
        return Err(FormatError::Field("blocks"));
    }
    let (checksums, _) = <[U32]>::ref_from_prefix_with_elems(rest, used).map_err(|_| length)?;
    let lines = FooterLines {
        keys,
        blocks,
        checksums,
    };
    Ok((footer, lines))
}

/// Write a whole block: `footer` with its version and number of lines, key and blocks of each line, checksums of all
/// blocks, its own checksum.
pub fn write(
    mut footer: CacheFooter,
    lines: &[(u64, u8)],
    checksums: impl Iterator<Item = u32>,
    block: &mut [u8],
) {
    footer.version.set(CACHE_VERSION);
    footer.lines.set(lines.len() as u16);
    footer.magic = CACHE_FOOTER_MAGIC;
    block.fill(0);
    let (head, rest) = block.split_at_mut(size_of::<CacheFooter>());
    head.copy_from_slice(footer.as_bytes());
    let (keys, rest) = rest.split_at_mut(lines.len() * 8);
    let (places, rest) = rest.split_at_mut(lines.len());
    let head = keys.chunks_exact_mut(8).zip(places);
    for ((place, blocks), &(key, line_blocks)) in head.zip(lines) {
        place.copy_from_slice(&key.to_le_bytes());
        *blocks = line_blocks;
    }
    for (place, checksum) in rest.chunks_exact_mut(4).zip(checksums) {
        place.copy_from_slice(&checksum.to_le_bytes());
    }
    seal(block);
}

impl CacheFooter {
    /// Lines of one segment, if none is compressed.
    pub const fn lines(line_blocks: usize) -> usize {
        (SEGMENT_BYTES / BLOCK_BYTES - 1) / line_blocks
    }

    /// Lines of one segment at most.
    pub const fn lines_max(line_blocks: usize) -> usize {
        let plain = Self::lines(line_blocks);
        if plain > CACHE_SEGMENT_LINES_MAX {
            plain
        } else if plain * LINES_PER_PLAIN_LINE > CACHE_SEGMENT_LINES_MAX {
            CACHE_SEGMENT_LINES_MAX
        } else {
            plain * LINES_PER_PLAIN_LINE
        }
    }
}

/// Lines in one entry of the journal of invalidations, which has a bit for each.
const BITS: usize = u128::BITS as usize;
const _: () = assert!(
    CacheFooter::lines_max(CACHE_LINE_BLOCKS_MIN) <= BITS && CACHE_SEGMENT_LINES_MAX <= BITS,
    "a journal entry has a bit for every line of a segment"
);
const _: () = assert!(
    size_of::<CacheFooter>() + BITS * 9 + (SEGMENT_BYTES / BLOCK_BYTES - 1) * 4 <= BLOCK_BYTES,
    "a footer is one block"
);
