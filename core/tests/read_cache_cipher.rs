//! Volumes with a cipher in the read cache: ciphertext in the SSD tier, plaintext out of it, and nothing
//! shared but under one key.

use std::rc::Rc;
use std::sync::Arc;

use hdcs_core::buf::Pool;
use hdcs_core::cipher::BlockCipher;
use hdcs_core::io::{Action, BlockKey, Completion, Done, Nanos};
use hdcs_core::limits::BLOCK_BYTES;
use hdcs_core::read_cache::{CacheConfig, CacheEvent, Lookup, ReadCache, SsdConfig};

const REGION: usize = 16 << 20;
const LINE_BLOCKS: u64 = 4;
const LINES_PER_SEGMENT: u64 = 63;

/// Adds what the key, the block and the place in it make: not its own inverse.
#[derive(Debug)]
struct Adds(u8);

impl Adds {
    fn pad(&self, number: u64, at: usize) -> u8 {
        let number = (number as u8).wrapping_mul(2) | 1;
        self.0.wrapping_add(number).wrapping_add(at as u8)
    }
}

impl BlockCipher for Adds {
    fn encrypt(&self, number: u64, block: &mut [u8]) {
        for (at, byte) in block.iter_mut().enumerate() {
            *byte = byte.wrapping_add(self.pad(number, at));
        }
    }

    fn decrypt(&self, number: u64, block: &mut [u8]) {
        for (at, byte) in block.iter_mut().enumerate() {
            *byte = byte.wrapping_sub(self.pad(number, at));
        }
    }
}

struct Rig {
    pool: Rc<Pool>,
    cache: ReadCache,
    medium: Vec<u8>,
    actions: Vec<Action>,
}

impl Rig {
    fn new(medium: Vec<u8>) -> Self {
        let config = CacheConfig {
            dram_blocks: 0,
            ssd: Some(SsdConfig {
                bytes: REGION as u64,
                uuid: [1; 16],
                line_blocks: LINE_BLOCKS as usize,
            }),
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        let pool = Pool::new(16 << 20);
        let mut actions = Vec::new();
        let mut cache = ReadCache::new(config, Nanos(0), Rc::clone(&pool), &mut actions);
        // Volumes 1 and 2 have one key, 3 another, 4 none.
        for (volume, key) in [(1, 16), (2, 16), (3, 50)] {
            cache.set_cipher(volume, Some(Arc::new(Adds(key))));
        }
        let mut rig = Self {
            pool,
            cache,
            medium,
            actions,
        };
        rig.run();
        rig
    }

    /// Poll and perform until nothing is left to do.
    fn run(&mut self) {
        self.cache
            .step(Nanos(0), CacheEvent::Poll, &mut self.actions);
        while !self.actions.is_empty() {
            let action = self.actions.remove(0);
            self.perform(action);
        }
        self.cache.check_invariants();
    }

    fn perform(&mut self, action: Action) {
        let (token, done) = match action {
            Action::CacheRead {
                token,
                offset,
                mut buf,
            } => {
                let (at, len) = (offset as usize, buf.len());
                buf.copy_from_slice(&self.medium[at..at + len]);
                (token, Done::Read(buf))
            }
            Action::CacheWrite {
                token,
                offset,
                data,
                ..
            } => {
                let mut at = offset as usize;
                for buf in &data {
                    self.medium[at..at + buf.len()].copy_from_slice(buf);
                    at += buf.len();
                }
                (token, Done::Written)
            }
            other => panic!("{other:?}"),
        };
        let result = Ok(done);
        let event = CacheEvent::Completed(Completion { token, result });
        self.cache.step(Nanos(0), event, &mut self.actions);
    }

    /// A line whose blocks are all of one byte, which is not the same in any two lines.
    fn fill(&mut self, volume: u32, line: u64) {
        let mut data = self.pool.alloc(LINE_BLOCKS as usize * BLOCK_BYTES).unwrap();
        data.fill(byte(line));
        let first = BlockKey::new(volume, line * LINE_BLOCKS);
        self.cache.fill(first, &data.freeze());
    }

    /// What a block is read as, and whether the medium was needed.
    fn read(&mut self, volume: u32, line: u64, block: u64) -> Option<(u8, bool)> {
        let key = BlockKey::new(volume, line * LINE_BLOCKS + block);
        match self.cache.lookup(key) {
            Lookup::Miss => None,
            Lookup::Dram(buf) => {
                assert!(buf.iter().all(|&byte| byte == buf[0]));
                Some((buf[0], false))
            }
            Lookup::Ssd(read) => {
                let at = read.offset as usize;
                let mut data = self.medium[at..at + BLOCK_BYTES].to_vec();
                let read = self.cache.finish_ssd_read(read, Some(&mut data));
                Some((read.unwrap()[0], true))
            }
        }
    }
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
    let mut rig = Rig::new(vec![0; REGION]);
    rig.fill(1, 0);
    assert_eq!(rig.read(1, 0, 3), Some((byte(0), false)), "open");
    for line in 1..LINES_PER_SEGMENT {
        rig.fill(1, line);
    }
    assert_eq!(rig.read(1, 0, 3), Some((byte(0), false)), "sealing");
    rig.run();
    for line in 0..LINES_PER_SEGMENT {
        assert_eq!(rig.read(1, line, 2), Some((byte(line), true)), "sealed");
        assert!(!holds(&rig.medium, byte(line)), "line {line} is plain");
    }
    rig.cache
        .step(Nanos(0), CacheEvent::Close, &mut rig.actions);
    rig.run();
    let mut rig = Rig::new(rig.medium);
    for line in 0..LINES_PER_SEGMENT {
        assert_eq!(rig.read(1, line, 1), Some((byte(line), true)), "warm");
    }
}

#[test]
fn cipher_leaves_volumes_without_one_plain() {
    let mut rig = Rig::new(vec![0; REGION]);
    for line in 0..LINES_PER_SEGMENT {
        rig.fill(4, line);
    }
    rig.run();
    assert!(holds(&rig.medium, byte(7)));
    assert_eq!(rig.read(4, 7, 0), Some((byte(7), true)));
}

#[test]
fn cipher_of_one_key_shares_equal_lines_and_of_another_does_not() {
    let mut rig = Rig::new(vec![0; REGION]);
    for line in 0..LINES_PER_SEGMENT {
        rig.fill(1, line);
    }
    rig.run();
    for (volume, shared) in [(2, LINES_PER_SEGMENT), (3, 0), (4, 0)] {
        let before = rig.cache.stats().shared_lines;
        for line in 0..LINES_PER_SEGMENT {
            rig.fill(volume, line);
            rig.run();
        }
        assert_eq!(rig.cache.stats().shared_lines - before, shared);
        for line in 0..LINES_PER_SEGMENT {
            let found = rig.read(volume, line, 3);
            assert_eq!(found.map(|(byte, _)| byte), Some(byte(line)), "{volume}");
        }
    }
}

#[test]
fn cipher_outlives_the_move_of_a_line_that_eviction_keeps() {
    let mut rig = Rig::new(vec![0; REGION]);
    for line in 0..LINES_PER_SEGMENT {
        rig.fill(1, line);
    }
    rig.run();
    for filler in 1..40 {
        for _ in 0..3 {
            assert!(rig.read(1, 5, 0).is_some_and(|(found, _)| found == byte(5)));
        }
        for line in 0..LINES_PER_SEGMENT {
            rig.fill(3, filler * 100 + line);
        }
        rig.run();
    }
    assert!(
        rig.cache.stats().ssd_evicted_lines > 0,
        "segments were evicted"
    );
    // It may be in memory still, in the segment that it was moved to.
    let found = rig.read(1, 5, 1);
    assert_eq!(found.map(|(byte, _)| byte), Some(byte(5)));
}
