//! Bytes of a device against the parsers of on-disk structures.
//!
//! Whatever a parser accepts must be within its bounds, and say the same after it is sealed again.

use hdcs_core::base::limits::{CACHE_BYTES_MIN, SPAN_DATA_BLOCKS_MAX, SPAN_ENTRIES_MAX};
use hdcs_core::cache::{FooterFound, Layout, Root, read_footer};
use hdcs_core::format::{
    CACHE_FOOTER_MAGIC, LOG_MAGIC, LogSuperblock, SPAN_MAGIC, SpanHeader, seal,
};
use zerocopy::IntoBytes;

/// The bytes as they are, and again with magic and checksum put right, so that what lies behind
/// those checks is reached.
pub fn formats(data: &[u8]) {
    superblock(data);
    span(data);
    if let Some(block) = data.get(..4096) {
        let mut block = block.to_vec();
        block[..8].copy_from_slice(&LOG_MAGIC);
        block[8..10].copy_from_slice(&[data[8].clamp(1, 2), 0]);
        seal(&mut block);
        superblock(&block);
    }
    if let Some(block) = data.get(..4096) {
        footer(block);
        footer(&sealed_footer(block));
    }
    if data.len() >= 128 {
        let mut control = data.to_vec();
        control[..8].copy_from_slice(&SPAN_MAGIC);
        control[8..10].copy_from_slice(&[1, 0]);
        seal(&mut control);
        span(&control);
    }
}

fn superblock(data: &[u8]) {
    if let Ok(superblock) = LogSuperblock::parse(data) {
        assert!(superblock.ring_blocks.get() >= 4 * SPAN_DATA_BLOCKS_MAX as u64);
        let lost = &superblock.lost[..superblock.lost_ranges.get() as usize];
        let ends = lost
            .iter()
            .map(|[start, sectors]| start.get() + sectors.get());
        let starts = lost.iter().skip(1).map(|[start, _]| start.get());
        assert!(ends.zip(starts).all(|(end, start)| end < start));
        let mut again = superblock;
        if let Some(membership) = superblock.membership() {
            assert!(membership.void_before <= superblock.incarnation.get());
            again.set_membership(membership);
        }
        again.seal();
        assert_eq!(again.as_bytes(), data);
    }
}

fn span(data: &[u8]) {
    let peeked = SpanHeader::peek(data);
    if let Ok(header) = &peeked {
        let (entries, blocks) = (header.entries.get().into(), header.data_blocks.get().into());
        assert!(entries <= SPAN_ENTRIES_MAX && blocks <= SPAN_DATA_BLOCKS_MAX);
        let control_blocks = SpanHeader::control_blocks_for(entries, blocks);
        assert_eq!(usize::from(header.control_blocks.get()), control_blocks);
    }
    if SpanHeader::verify(data).is_ok() {
        let mut again = data.to_vec();
        seal(&mut again);
        assert_eq!(again, data);
    }
}

const UUID: [u8; 16] = [7; 16];

/// The block as a footer of this cache, as far as that is checked before its lines are.
fn sealed_footer(block: &[u8]) -> Vec<u8> {
    let mut block = block.to_vec();
    let (version, line_blocks) = (block[8].clamp(1, 2), 2 << (block[10] / 3 % 4));
    block[..8].copy_from_slice(&CACHE_FOOTER_MAGIC);
    block[8..12].copy_from_slice(&[version, 0, line_blocks, 0]);
    block[24..40].copy_from_slice(&UUID);
    // Format 1, a sequence number of the first incarnation, segment 0.
    block[40..48].copy_from_slice(&1u64.to_le_bytes());
    block[48..56].copy_from_slice(&9u64.to_le_bytes());
    block[56..60].fill(0);
    seal(&mut block);
    block
}

fn footer(block: &[u8]) {
    for line_blocks in [2, 4, 8, 16] {
        let layout = Layout::new(CACHE_BYTES_MIN, line_blocks).expect("a region of this size");
        let root = Root::fresh(1, false);
        if let FooterFound::Lines { lines, .. } = read_footer(&layout, UUID, &root, 0, block) {
            let mut end = 0;
            for (slot, line) in lines.iter().enumerate() {
                assert!(slot < layout.lines_per_segment);
                assert_eq!(usize::from(line.place.first), end);
                assert_eq!(line.checksums.len(), usize::from(line.place.blocks));
                assert!((1..=line_blocks).contains(&line.checksums.len()));
                assert!(line.key == u64::MAX || line.key.is_multiple_of(line_blocks as u64));
                end = line.place.end();
            }
            assert!(end <= layout.room_blocks());
        }
    }
}
