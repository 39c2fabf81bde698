//! A read cache without a DRAM tier, over a device that does what it is told at once.

use std::rc::Rc;

use hdcs_core::buf::{Buf, Pool};
use hdcs_core::io::{Action, BlockKey, Completion, Done, Nanos};
use hdcs_core::limits::BLOCK_BYTES;
use hdcs_core::read_cache::{CacheConfig, CacheEvent, ReadCache, SsdConfig};

/// Blocks of one line.
pub const LINE_BLOCKS: usize = 4;
/// Bytes of one line.
pub const LINE_BYTES: usize = LINE_BLOCKS * BLOCK_BYTES;

/// See the module.
pub struct Rig {
    /// Where buffers come from.
    pub pool: Rc<Pool>,
    /// The cache.
    pub cache: ReadCache,
    /// Its device.
    pub medium: Vec<u8>,
    config: CacheConfig,
    actions: Vec<Action>,
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
        let cache = ReadCache::new(config.clone(), Nanos(0), Rc::clone(&pool), &mut actions);
        let mut rig = Self {
            pool,
            cache,
            medium: vec![0; bytes],
            config,
            actions,
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

    fn event(&mut self, event: CacheEvent) {
        self.cache.step(Nanos(0), event, &mut self.actions);
    }

    fn perform(&mut self, action: Action) {
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
                for part in &data {
                    self.medium[at..at + part.len()].copy_from_slice(part);
                    at += part.len();
                }
                (token, Done::Written)
            }
            other => panic!("not of a cache: {other:?}"),
        };
        let result = Ok(done);
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
        let pool = Rc::clone(&self.pool);
        self.cache = ReadCache::new(self.config.clone(), Nanos(0), pool, &mut self.actions);
        self.run();
        assert!(self.cache.is_ready());
    }

    /// A line in a buffer.
    pub fn line(&self, bytes: &[u8]) -> Buf {
        let mut data = self.pool.alloc(LINE_BYTES).expect("memory for a line");
        data.copy_from_slice(bytes);
        data.freeze()
    }
}

/// The first block of a line of a volume.
pub fn key(volume: u32, line: u64) -> BlockKey {
    BlockKey::new(volume, line * LINE_BLOCKS as u64)
}
