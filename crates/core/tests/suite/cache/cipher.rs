//! Volumes with a cipher in the read cache: ciphertext in the SSD tier, plaintext out of it, and nothing
//! shared but under one key.

use std::sync::Arc;

use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_kit::cache::{Adds, Rig};

const REGION: usize = 16 << 20;
const LINES_PER_SEGMENT: u64 = 63;

/// Volumes 1 and 2 have one key, 3 another, 4 none.
fn set_ciphers(rig: &mut Rig) {
    for (volume, key) in [(1, 16), (2, 16), (3, 50)] {
        let cipher = Arc::new(Adds(key));
        rig.cache.set_cipher(volume, Some(cipher));
    }
}

fn rig() -> Rig {
    let mut rig = Rig::new(REGION);
    set_ciphers(&mut rig);
    rig
}

/// Fill a line whose blocks are all of one byte, which is not the same in any two lines.
fn fill(rig: &mut Rig, volume: u32, line: u64) {
    rig.put(volume, line, |data| data.fill(byte(line)));
}

/// What a block is read as, and whether the medium was needed.
fn read(rig: &mut Rig, volume: u32, line: u64, block: u64) -> Option<(u8, bool)> {
    let (found, from_medium) = rig.find(volume, line, block)?;
    let found = found.unwrap();
    assert!(found.iter().all(|&byte| byte == found[0]));
    Some((found[0], from_medium))
}

fn byte(line: u64) -> u8 {
    100u8.wrapping_add(line as u8)
}

/// Whether a block of nothing but `byte` is on the medium.
fn holds(medium: &[u8], byte: u8) -> bool {
    let mut blocks = medium.chunks_exact(BLOCK_BYTES);
    blocks.any(|block| block.iter().all(|&found| found == byte))
}

#[test]
fn cipher_stands_between_memory_and_the_tier_in_every_state_of_a_segment() {
    let mut rig = rig();
    fill(&mut rig, 1, 0);
    assert_eq!(read(&mut rig, 1, 0, 3), Some((byte(0), false)), "open");
    for line in 1..LINES_PER_SEGMENT {
        fill(&mut rig, 1, line);
    }
    assert_eq!(read(&mut rig, 1, 0, 3), Some((byte(0), false)), "sealing");
    rig.run();
    for line in 0..LINES_PER_SEGMENT {
        assert_eq!(
            read(&mut rig, 1, line, 2),
            Some((byte(line), true)),
            "sealed"
        );
        assert!(!holds(&rig.medium, byte(line)), "line {line} is plain");
    }
    rig.close();
    rig.restart();
    set_ciphers(&mut rig);
    for line in 0..LINES_PER_SEGMENT {
        assert_eq!(read(&mut rig, 1, line, 1), Some((byte(line), true)), "warm");
    }
}

#[test]
fn cipher_leaves_volumes_without_one_plain() {
    let mut rig = rig();
    for line in 0..LINES_PER_SEGMENT {
        fill(&mut rig, 4, line);
    }
    rig.run();
    assert!(holds(&rig.medium, byte(7)));
    assert_eq!(read(&mut rig, 4, 7, 0), Some((byte(7), true)));
}

#[test]
fn cipher_of_one_key_shares_equal_lines_and_of_another_does_not() {
    let mut rig = rig();
    for line in 0..LINES_PER_SEGMENT {
        fill(&mut rig, 1, line);
    }
    rig.run();
    for (volume, shared) in [(2, LINES_PER_SEGMENT), (3, 0), (4, 0)] {
        let before = rig.cache.stats().shared_lines;
        for line in 0..LINES_PER_SEGMENT {
            fill(&mut rig, volume, line);
            rig.run();
        }
        assert_eq!(rig.cache.stats().shared_lines - before, shared);
        for line in 0..LINES_PER_SEGMENT {
            let found = read(&mut rig, volume, line, 3);
            assert_eq!(found.map(|(byte, _)| byte), Some(byte(line)), "{volume}");
        }
    }
}

#[test]
fn cipher_outlives_the_move_of_a_line_that_eviction_keeps() {
    let mut rig = rig();
    for line in 0..LINES_PER_SEGMENT {
        fill(&mut rig, 1, line);
    }
    rig.run();
    for filler in 1..40 {
        for _ in 0..3 {
            assert!(read(&mut rig, 1, 5, 0).is_some_and(|(found, _)| found == byte(5)));
        }
        for line in 0..LINES_PER_SEGMENT {
            fill(&mut rig, 3, filler * 100 + line);
        }
        rig.run();
    }
    assert!(
        rig.cache.stats().ssd_evicted_lines > 0,
        "segments were evicted"
    );
    // It may be in memory still, in the segment that it was moved to.
    let found = read(&mut rig, 1, 5, 1);
    assert_eq!(found.map(|(byte, _)| byte), Some(byte(5)));
}
