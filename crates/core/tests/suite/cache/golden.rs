//! The format of the SSD tier stays what it is: what an earlier program wrote is found again, and the same
//! lines still make the same bytes.
//!
//! `HDCS_UPDATE=1` writes the image anew, for a reviewer to compare.

use std::path::{Path, PathBuf};

use hdcs_core::base::codec::Method;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::{Layout, ReadCache, SsdFailure, Tie};
use hdcs_core::format::{CACHE_SUPERBLOCK_BLOCKS, CACHE_VERSION, seal};
use hdcs_kit::cache::{LINE_BLOCKS, LINE_BYTES, Rig, key};

const REGION: usize = 16 << 20;
/// Lines, of which every second one can be compressed. How far depends on the version of LZ4: another one may write
/// another image, but it has to read this one.
const LINES: u64 = 6;
/// Lines of which a part is invalidated in the end.
const INVALIDATED: [u64; 2] = [3, 4];
/// The image has both superblocks, the first block of the journal, the footer of the first segment, and so many of
/// its blocks.
const KEPT_BLOCKS: usize = 24;

fn layout() -> Layout {
    Layout::new(REGION as u64, LINE_BLOCKS).expect("a region of this size")
}

fn image_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/cache-v{CACHE_VERSION}.bin"))
}

/// The blocks that are in the image.
fn kept() -> Vec<usize> {
    let superblocks = CACHE_SUPERBLOCK_BLOCKS.map(|block| block as usize * BLOCK_BYTES);
    let journal = layout().journal_offset(1, 0) as usize;
    let mut kept = superblocks.to_vec();
    kept.extend([journal, layout().footer_offset(0) as usize]);
    let first = layout().segment_offset(0) as usize;
    kept.extend((0..KEPT_BLOCKS).map(|block| first + block * BLOCK_BYTES));
    kept
}

fn line(line: u64) -> Vec<u8> {
    let word = |at: u64| {
        let at = if line.is_multiple_of(2) {
            at
        } else {
            at / line
        };
        (line << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    let words = (0..LINE_BYTES as u64 / 8).map(word);
    words.flat_map(u64::to_le_bytes).collect()
}

/// A cache with this image.
fn written() -> Rig {
    let mut rig = Rig::new(REGION);
    for number in 0..LINES {
        rig.fill(3, number, &line(number), Some(Method::Lz4));
    }
    let [first, second] = INVALIDATED;
    // Six blocks from the second one on: two lines.
    rig.cache.invalidate(key(3, first), 6);
    rig.cache.invalidate(key(3, second), 1);
    rig.cache.barrier();
    rig.run();
    rig.close();
    rig
}

fn is_valid(line: u64) -> bool {
    let [first, second] = INVALIDATED;
    ![first, first + 1, second].contains(&line)
}

#[test]
fn golden_cache_is_still_written_the_same() {
    let rig = written();
    let kept = kept().into_iter();
    let kept: Vec<&[u8]> = kept.map(|at| &rig.medium[at..at + BLOCK_BYTES]).collect();
    let path = image_path();
    if std::env::var_os("HDCS_UPDATE").is_some() {
        std::fs::write(&path, kept.concat()).unwrap();
    }
    let golden = std::fs::read(&path).unwrap();
    assert!(
        golden == kept.concat(),
        "the format of the SSD tier has changed: raise its version and add an image"
    );
}

#[test]
fn golden_cache_is_found_again() {
    let golden = std::fs::read(image_path()).unwrap();
    let mut rig = Rig::new(REGION);
    rig.medium.fill(0);
    for (at, block) in kept().into_iter().zip(golden.chunks(BLOCK_BYTES)) {
        rig.medium[at..at + BLOCK_BYTES].copy_from_slice(block);
    }
    rig.restart();
    for number in 0..LINES {
        for block in 0..LINE_BLOCKS {
            let found = rig
                .read(3, number, block as u64)
                .map(|found| found.unwrap());
            assert_eq!(found.is_some(), is_valid(number), "line {number}");
            let plain = line(number);
            let plain = &plain[block * BLOCK_BYTES..];
            assert!(found.is_none_or(|found| plain.starts_with(&found)));
        }
    }
}

#[test]
fn golden_cache_of_a_newer_program_is_not_touched() {
    let mut rig = written();
    for at in &kept()[..2] {
        let block = &mut rig.medium[*at..at + BLOCK_BYTES];
        block[8] += 1;
        seal(block);
    }
    let before = rig.medium.clone();
    let pool = std::sync::Arc::clone(&rig.pool);
    rig.cache = ReadCache::new(rig.config.clone(), Nanos(0), pool, &mut rig.actions);
    rig.run();
    let stats = rig.cache.stats();
    assert_eq!(stats.ssd_failure, Some(SsdFailure::Newer));
    // Only under an identity that this medium does not carry may the logs go on.
    assert!(rig.cache.must_reset() && rig.cache.tie_of(3) == Tie::UNKNOWN);
    rig.cache.reset_recorded();
    rig.run();
    assert!(rig.medium == before, "not a byte is written");
}
