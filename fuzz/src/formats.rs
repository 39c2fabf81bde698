//! Bytes of a device against the parsers of on-disk structures.
//!
//! Whatever a parser accepts must be within its bounds, and say the same after it is sealed again.

use hdcs_core::format::{LOG_MAGIC, LogSuperblock, SPAN_MAGIC, SpanHeader};
use hdcs_core::limits::{SPAN_DATA_BLOCKS_MAX, SPAN_ENTRIES_MAX};
use zerocopy::IntoBytes;

/// The bytes as they are, and again with magic and checksum put right, so that what lies behind
/// those checks is reached.
pub fn formats(data: &[u8]) {
    superblock(data);
    span(data);
    if let Some(block) = data.get(..4096) {
        let mut block = block.to_vec();
        block[..8].copy_from_slice(&LOG_MAGIC);
        block[8..10].copy_from_slice(&[1, 0]);
        if let Ok(mut sealed) = LogSuperblock::parse(&seal(block)) {
            sealed.seal();
            superblock(sealed.as_bytes());
        }
    }
    if data.len() >= 128 {
        let mut control = data.to_vec();
        control[..8].copy_from_slice(&SPAN_MAGIC);
        control[8..10].copy_from_slice(&[1, 0]);
        SpanHeader::seal(&mut control);
        span(&control);
    }
}

/// The superblock in `block` with the right checksum.
fn seal(block: Vec<u8>) -> Vec<u8> {
    match <LogSuperblock as zerocopy::FromBytes>::read_from_bytes(&block) {
        Ok(mut superblock) => {
            superblock.seal();
            superblock.as_bytes().to_vec()
        }
        Err(_) => block,
    }
}

fn superblock(data: &[u8]) {
    if let Ok(superblock) = LogSuperblock::parse(data) {
        assert!(superblock.ring_blocks.get() >= 4 * SPAN_DATA_BLOCKS_MAX as u64);
        let mut again = superblock;
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
        SpanHeader::seal(&mut again);
        assert_eq!(again, data);
    }
}
