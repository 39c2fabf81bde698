//! A read cache without a DRAM tier, over a device that does what it is told at once, or fails.

use std::sync::Arc;

use hdcs_core::base::buf::Pool;
use hdcs_core::base::cipher::BlockCipher;
use hdcs_core::base::codec::Method;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Action, BlockKey, Completion, Done, Nanos};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::cache::{
    CacheConfig, CacheEvent, Corrupt, Lookup, ReadCache, SsdConfig, SsdTaken, Tier,
};

use crate::lz4::Lz4;

/// Blocks of one line.
pub const LINE_BLOCKS: usize = 4;
/// Bytes of one line.
pub const LINE_BYTES: usize = LINE_BLOCKS * BLOCK_BYTES;

/// See the module.
pub struct Rig {
    /// Where buffers come from.
    pub pool: Arc<Pool>,
    /// The cache.
    pub cache: ReadCache,
    /// Its device.
    pub medium: Vec<u8>,
    /// What the next start makes it with.
    pub config: CacheConfig,
    /// What it has asked for and was not performed yet.
    pub actions: Vec<Action>,
    /// Which actions fail, and do nothing.
    pub fails: fn(&Action) -> bool,
}

impl Rig {
    /// A cache on an empty device of so many bytes.
    pub fn new(bytes: usize) -> Self {
        let config = CacheConfig {
            dram_blocks: 0,
            ssd: Some(SsdConfig {
                bytes: bytes as u64,
                uuid: [1; 16],
                line_blocks: LINE_BLOCKS,
            }),
            ssd_answer_max: Nanos::from_millis(5_000),
        };
        let pool = Pool::new(16 << 20);
        let mut actions = Vec::new();
        let mut cache = ReadCache::new(config.clone(), Nanos(0), Arc::clone(&pool), &mut actions);
        cache.set_codec(&Lz4);
        let mut rig = Self {
            pool,
            cache,
            medium: vec![0; bytes],
            config,
            actions,
            fails: |_| false,
        };
        rig.run();
        rig
    }

    /// Poll and perform until nothing is left to do.
    pub fn run(&mut self) {
        self.event(CacheEvent::Poll);
        while !self.actions.is_empty() {
            let action = self.actions.remove(0);
            self.perform(action);
        }
        self.cache.check_invariants();
    }

    /// One step.
    pub fn event(&mut self, event: CacheEvent) {
        self.cache.step(Nanos(0), event, &mut self.actions);
    }

    /// Do what it asks for, and tell it.
    pub fn perform(&mut self, action: Action) {
        let fails = (self.fails)(&action);
        let (token, done) = match action {
            Action::CacheRead {
                token,
                offset,
                mut buf,
            } => {
                let (at, bytes) = (offset as usize, buf.len());
                buf.copy_from_slice(&self.medium[at..at + bytes]);
                (token, Done::Read(buf))
            }
            Action::CacheWrite {
                token,
                offset,
                data,
                ..
            } => {
                let mut at = offset as usize;
                for part in data.iter().filter(|_| !fails) {
                    self.medium[at..at + part.len()].copy_from_slice(part);
                    at += part.len();
                }
                (token, Done::Written)
            }
            other => panic!("not of a cache: {other:?}"),
        };
        let result = if fails {
            Err(IoError::Failed)
        } else {
            Ok(done)
        };
        self.event(CacheEvent::Completed(Completion { token, result }));
    }

    /// Write everything out, so that the next start is warm.
    pub fn close(&mut self) {
        self.event(CacheEvent::Close);
        self.run();
        assert!(self.cache.is_closed());
    }

    /// Start again with what is on the medium.
    pub fn restart(&mut self) {
        self.actions.clear();
        let pool = Arc::clone(&self.pool);
        self.cache = ReadCache::new(self.config.clone(), Nanos(0), pool, &mut self.actions);
        self.cache.set_codec(&Lz4);
        self.run();
        assert!(self.cache.is_ready());
    }

    /// Fill a line with what `write` makes of its bytes; what follows from it is left to [`Self::run`].
    pub fn put(&mut self, volume: u32, line: u64, write: impl FnOnce(&mut [u8])) {
        let mut data = self.pool.alloc(LINE_BYTES).expect("memory for a line");
        write(&mut data);
        self.cache.fill(key(volume, line), &data.freeze());
    }

    /// Fill a line, compressed by a method if there is one.
    pub fn fill(
        &mut self,
        volume: u32,
        line: u64,
        bytes: &[u8],
        method: Option<Method>,
    ) -> SsdTaken {
        let mut data = self.pool.alloc(LINE_BYTES).expect("memory for a line");
        data.copy_from_slice(bytes);
        let taken = (self.cache).fill_compressed(key(volume, line), &data.freeze(), method);
        self.run();
        taken
    }

    /// Fill a line that was asked for with what `write` makes of its bytes.
    pub fn promote(&mut self, volume: u32, line: u64, write: impl FnOnce(&mut [u8])) {
        let mut data = self.pool.alloc(LINE_BYTES).expect("memory for a line");
        write(&mut data);
        self.cache
            .fill_promoted(key(volume, line), &data.freeze(), None);
    }

    /// What a block and those behind it in what is read for it are; `None` if it is not there, `Err` if it is damaged.
    pub fn read(&mut self, volume: u32, line: u64, block: u64) -> Option<Result<Vec<u8>, Corrupt>> {
        Some(self.find(volume, line, block)?.0)
    }

    /// The same, and whether it had to be read from the medium.
    pub fn find(
        &mut self,
        volume: u32,
        line: u64,
        block: u64,
    ) -> Option<(Result<Vec<u8>, Corrupt>, bool)> {
        match self.cache.lookup(BlockKey(key(volume, line).0 + block)) {
            Lookup::Miss => None,
            Lookup::Dram(data) => Some((Ok(data.to_vec()), false)),
            Lookup::Ssd(read) => {
                let at = read.offset as usize;
                let mut data = self.medium[at..at + read.bytes].to_vec();
                let plain = self.cache.finish_ssd_read(read, Some(&mut data));
                Some((plain.map(<[u8]>::to_vec), true))
            }
        }
    }
}

/// A cipher that adds what the key, the block's number and the place in it make: not its own inverse.
#[derive(Debug)]
pub struct Adds(pub u8);

impl Adds {
    fn pad(&self, number: u64, at: usize) -> u8 {
        let number = (number ^ number >> 33) as u8;
        self.0
            .wrapping_add(number.wrapping_mul(2) | 1)
            .wrapping_add(at as u8)
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

/// The first block of a line of a volume.
pub fn key(volume: u32, line: u64) -> BlockKey {
    BlockKey::new(volume, line * LINE_BLOCKS as u64)
}

impl Rig {
    /// A line of volume 1: each block of one byte, the line's number at its head.
    pub fn fill_with(&mut self, line: u64, byte: impl Fn(u64) -> u8) {
        self.put(1, line, |data| {
            for (index, block) in data.chunks_exact_mut(BLOCK_BYTES).enumerate() {
                block.fill(byte(index as u64));
                block[..8].copy_from_slice(&line.to_le_bytes());
            }
        });
    }

    /// A line of any volume: bytes of one kind behind a number.
    pub fn fill_numbered(&mut self, volume: u32, line: u64, byte: u8, number: u64) {
        self.put(volume, line, |data| {
            data.fill(byte);
            data[..8].copy_from_slice(&number.to_le_bytes());
        });
        self.run();
    }

    /// Lines of volume 1, all different.
    pub fn fill_lines(&mut self, lines: std::ops::Range<u64>) {
        for line in lines {
            self.fill_with(line, |block| (line + block) as u8);
            self.run();
        }
    }

    /// Lines of another volume, all different.
    pub fn fill_neighbour(&mut self, lines: std::ops::Range<u64>) {
        for line in lines {
            self.fill_numbered(2, line, 9, line);
        }
    }

    /// A read of a line from the backends of this volume and of its neighbour takes so long.
    pub fn costs(&mut self, own: Nanos, neighbour: Nanos) {
        for _ in 0..100 {
            self.cache.note_miss(BlockKey::new(1, 0), 4, own);
            self.cache.note_miss(BlockKey::new(2, 0), 4, neighbour);
        }
    }

    /// A byte of a block of volume 1.
    pub fn byte(&mut self, line: u64, block: u64) -> Option<Result<u8, Corrupt>> {
        let found = self.read(1, line, block)?;
        Some(found.map(|data| data[100]))
    }

    /// How many of these lines of volume 1 the SSD tier has.
    pub fn present(&self, lines: std::ops::Range<u64>) -> usize {
        lines
            .filter(|&line| self.cache.probe(key(1, line)) == Tier::Ssd)
            .count()
    }
}
