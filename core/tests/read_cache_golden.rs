//! The format of the SSD tier stays what it is: what an earlier program wrote is found again, and the same
//! lines still make the same bytes. A new version of the format adds an image; it replaces none.
//!
//! `HDCS_UPDATE=1` writes the images of the present version anew, for a reviewer to compare.

mod cache_rig;

use std::path::{Path, PathBuf};

use cache_rig::{LINE_BLOCKS, LINE_BYTES, Rig, key};
use hdcs_core::codec::Method;
use hdcs_core::limits::{BLOCK_BYTES, SEGMENT_BYTES};
use hdcs_core::read_cache::Layout;

const REGION: usize = 16 << 20;
/// Of version 2, which keeps lines: blocks from the beginning of a segment.
const KEPT_BLOCKS: usize = 24;

/// One version of the format. An image has both superblocks, the first block of the journal, and the footers of
/// the first two segments.
struct Version {
    number: u16,
    lines: u64,
    /// Lines of which a part is invalidated in the end.
    invalidated: [u64; 2],
    method: Option<Method>,
}

/// Lines of noise, in two segments; they are not in the image.
const PLAIN: Version = Version {
    number: 1,
    lines: 80,
    invalidated: [5, 70],
    method: None,
};
/// Lines of which every second one can be compressed. How far depends on the version of LZ4: another one may write
/// another image, but it has to read this one.
const PACKED: Version = Version {
    number: 2,
    lines: 6,
    invalidated: [3, 4],
    method: Some(Method::Lz4),
};

fn layout() -> Layout {
    Layout::new(REGION as u64, LINE_BLOCKS).expect("a region of this size")
}

impl Version {
    fn image_path(&self) -> PathBuf {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        directory.join(format!("cache-v{}.bin", self.number))
    }

    /// The blocks that are in the image.
    fn kept(&self) -> Vec<usize> {
        let footer = |segment| layout().footer_offset(segment) as usize;
        let journal = layout().journal_offset(1, 0) as usize;
        let mut kept = vec![0, BLOCK_BYTES, journal, footer(0), footer(1)];
        if self.method.is_some() {
            let first = layout().segment_offset(0) as usize;
            kept.extend((0..KEPT_BLOCKS).map(|block| first + block * BLOCK_BYTES));
        }
        kept
    }

    fn line(&self, line: u64) -> Vec<u8> {
        let is_noise = self.method.is_none() || line.is_multiple_of(2);
        let word = |at: u64| {
            if is_noise {
                (line << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            } else {
                (line << 32 | (at / line)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            }
        };
        let words = (0..LINE_BYTES as u64 / 8).map(word);
        words.flat_map(u64::to_le_bytes).collect()
    }

    /// A cache with this image.
    fn written(&self) -> Rig {
        let mut rig = Rig::new(REGION);
        for line in 0..self.lines {
            rig.fill(3, line, &self.line(line), self.method);
        }
        let [first, second] = self.invalidated;
        // Six blocks from the second one on: two lines.
        rig.cache.invalidate(key(3, first), 6);
        rig.cache.invalidate(key(3, second), 1);
        rig.cache.barrier();
        rig.run();
        rig.close();
        rig
    }

    fn is_valid(&self, line: u64) -> bool {
        let [first, second] = self.invalidated;
        ![first, first + 1, second].contains(&line)
    }

    /// What a cache without its image would have lost: lines that can be made anew.
    fn put_lines(&self, medium: &mut [u8]) {
        let per_segment = (SEGMENT_BYTES - BLOCK_BYTES) / LINE_BYTES;
        for line in 0..self.lines {
            let (segment, slot) = (line as usize / per_segment, line as usize % per_segment);
            let at = layout().segment_offset(segment) as usize + slot * LINE_BYTES;
            medium[at..at + LINE_BYTES].copy_from_slice(&self.line(line));
        }
    }
}

#[test]
fn golden_cache_is_still_written_the_same() {
    for version in [PLAIN, PACKED] {
        let rig = version.written();
        let kept = version.kept().into_iter();
        let kept: Vec<&[u8]> = kept.map(|at| &rig.medium[at..at + BLOCK_BYTES]).collect();
        assert_eq!(u16::from(kept[3][8]), version.number, "of the footer");
        let path = version.image_path();
        if std::env::var_os("HDCS_UPDATE").is_some() {
            std::fs::write(&path, kept.concat()).unwrap();
        }
        let golden = std::fs::read(&path).unwrap();
        assert!(
            golden == kept.concat(),
            "the format of the SSD tier has changed: raise its version and add an image"
        );
    }
}

#[test]
fn golden_caches_are_found_again() {
    for version in [PLAIN, PACKED] {
        let golden = std::fs::read(version.image_path()).unwrap();
        let mut rig = Rig::new(REGION);
        rig.medium.fill(0);
        if version.method.is_none() {
            version.put_lines(&mut rig.medium);
        }
        for (at, block) in version.kept().into_iter().zip(golden.chunks(BLOCK_BYTES)) {
            rig.medium[at..at + BLOCK_BYTES].copy_from_slice(block);
        }
        rig.restart();
        for line in 0..version.lines {
            for block in 0..LINE_BLOCKS {
                let found = rig.read(3, line, block as u64).map(|found| found.unwrap());
                assert_eq!(found.is_some(), version.is_valid(line), "line {line}");
                let plain = version.line(line);
                let plain = &plain[block * BLOCK_BYTES..];
                assert!(found.is_none_or(|found| plain.starts_with(&found)));
            }
        }
    }
}
