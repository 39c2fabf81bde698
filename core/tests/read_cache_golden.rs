//! The format of the SSD tier stays what it is: what an earlier program wrote is found again, and the same
//! lines still make the same bytes.
//!
//! `HDCS_UPDATE=1` writes the images of the present version anew, for a reviewer to compare.

mod cache_rig;

use std::path::{Path, PathBuf};

use cache_rig::{LINE_BYTES, Rig, key};
use hdcs_core::io::BlockKey;
use hdcs_core::limits::{BLOCK_BYTES, SEGMENT_BYTES};
use hdcs_core::read_cache::{Layout, Lookup};

const REGION: usize = 16 << 20;
const LINES: u64 = 80;

fn image_path(version: u16) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    directory.join(format!("cache-v{version}.bin"))
}

fn layout() -> Layout {
    Layout::new(REGION as u64, cache_rig::LINE_BLOCKS).expect("a region of this size")
}

/// What of the cache is kept: both superblocks, the first block of the journal, and the footers of the two segments
/// that were filled. The lines themselves are made anew.
fn kept_blocks() -> [usize; 5] {
    let footer = |segment| layout().footer_offset(segment) as usize;
    let journal = layout().journal_offset(1, 0) as usize;
    [0, BLOCK_BYTES, journal, footer(0), footer(1)]
}

fn plain_line(line: u64) -> Vec<u8> {
    let word = |at: u64| (line << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = (0..LINE_BYTES as u64 / 8).map(word);
    words.flat_map(u64::to_le_bytes).collect()
}

/// A segment that is full and one that is not, and some of what is in both invalidated.
fn write_image(rig: &mut Rig) {
    for line in 0..LINES {
        let data = rig.line(&plain_line(line));
        rig.cache.fill(key(3, line), &data);
        rig.run();
    }
    rig.cache.invalidate(key(3, 5), 6);
    rig.cache.invalidate(key(3, 70), 1);
    rig.cache.barrier();
    rig.run();
    rig.close();
}

fn is_valid(line: u64) -> bool {
    ![5, 6, 70].contains(&line)
}

#[test]
fn golden_cache_is_still_written_the_same() {
    let mut rig = Rig::new(REGION);
    write_image(&mut rig);
    let kept = kept_blocks().map(|at| &rig.medium[at..at + BLOCK_BYTES]);
    if std::env::var_os("HDCS_UPDATE").is_some() {
        std::fs::write(image_path(1), kept.concat()).unwrap();
    }
    let golden = std::fs::read(image_path(1)).unwrap();
    assert!(
        golden == kept.concat(),
        "the format of the SSD tier has changed: raise its version and add an image"
    );
}

#[test]
fn golden_caches_are_found_again() {
    let golden = std::fs::read(image_path(1)).unwrap();
    let mut rig = Rig::new(REGION);
    rig.medium.fill(0);
    for (at, block) in kept_blocks().into_iter().zip(golden.chunks(BLOCK_BYTES)) {
        rig.medium[at..at + BLOCK_BYTES].copy_from_slice(block);
    }
    let per_segment = ((SEGMENT_BYTES - BLOCK_BYTES) / LINE_BYTES) as u64;
    for line in 0..LINES {
        let (segment, slot) = (line / per_segment, (line % per_segment) as usize);
        let at = layout().segment_offset(segment as usize) as usize + slot * LINE_BYTES;
        rig.medium[at..at + LINE_BYTES].copy_from_slice(&plain_line(line));
    }
    rig.restart();
    for line in 0..LINES {
        for block in 0..4 {
            match rig.cache.lookup(BlockKey(key(3, line).0 + block)) {
                Lookup::Ssd(read) => {
                    let at = read.offset as usize;
                    let mut data = rig.medium[at..at + BLOCK_BYTES].to_vec();
                    rig.cache.finish_ssd_read(read, Some(&mut data)).unwrap();
                    let start = block as usize * BLOCK_BYTES;
                    assert!(data == plain_line(line)[start..start + BLOCK_BYTES]);
                    assert!(is_valid(line));
                }
                Lookup::Miss => assert!(!is_valid(line), "line {line}"),
                Lookup::Dram(_) => panic!("nothing is in memory"),
            }
        }
    }
}
