//! The write log of an encrypted volume: plaintext in memory, ciphertext on its device.
//!
//! What is written stays in memory as it is, since reads and destage come from it; so it is encrypted
//! into memory of its own, which a volume has a fixed amount of. What finds none waits, in order, for
//! the end of writes before it. What has copies on other nodes is encrypted into memory of each span's own, since links hold
//! that longer than writes take; there is as much of it under way as a volume has otherwise. The superblocks are not encrypted: they say which key the ring needs.
//!
//! Invariants:
//! 1. With nothing under way there is memory for the largest span, so something always goes on.
//! 2. No volume waits for the memory of another, whose device may hang.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use hdcs_backend::crypt::LogCipher;
use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, DurableWay, Token};
use hdcs_core::base::limits::{
    BLOCK_BYTES, REQUEST_BLOCKS_MAX, SPAN_DATA_BLOCKS_MAX, SPAN_ENTRIES_MAX,
};
use hdcs_core::format::{LOG_HEADER_BLOCKS, SpanHeader};

/// The largest buffer of a pool.
const RUN_BYTES: usize = REQUEST_BLOCKS_MAX * BLOCK_BYTES;
/// The largest span.
const SPAN_BYTES_MAX: usize = (SPAN_DATA_BLOCKS_MAX
    + SpanHeader::control_blocks_for(SPAN_ENTRIES_MAX, SPAN_DATA_BLOCKS_MAX))
    * BLOCK_BYTES;
/// Memory of one volume; the system provides of it what is used.
const MEMORY_BYTES: usize = SPAN_BYTES_MAX.div_ceil(RUN_BYTES) * RUN_BYTES;

/// A write that is to reach the device.
pub struct Write {
    pub token: Token,
    pub offset: u64,
    pub data: Vec<Buf>,
    pub way: Option<DurableWay>,
}

/// What is written is encrypted into this.
enum Memory {
    OfVolume(Arc<Pool>),
    /// Bytes of the writes that have not ended.
    OfSpans(HashMap<u64, usize>),
}

/// See the module.
pub struct CipheredLog {
    cipher: LogCipher,
    memory: Memory,
    /// Where reads under way read from.
    reads: HashMap<u64, u64>,
    waiting: VecDeque<Write>,
}

fn is_superblock(offset: u64) -> bool {
    offset < LOG_HEADER_BLOCKS * BLOCK_BYTES as u64
}

impl CipheredLog {
    /// With memory of its own; `has_copies` says that other nodes get what is written.
    pub fn new(cipher: LogCipher, has_copies: bool) -> Self {
        let memory = if has_copies {
            Memory::OfSpans(HashMap::new())
        } else {
            Memory::OfVolume(Pool::new(MEMORY_BYTES))
        };
        Self {
            cipher,
            memory,
            reads: HashMap::new(),
            waiting: VecDeque::new(),
        }
    }

    /// A read begins.
    pub fn reads(&mut self, token: Token, offset: u64) {
        if !is_superblock(offset) {
            self.reads.insert(token.0, offset);
        }
    }

    /// A read or write has ended: what was read is decrypted.
    pub fn ended(&mut self, token: Token, result: &mut Result<Done, IoError>) {
        if let Some(offset) = self.reads.remove(&token.0)
            && let Ok(Done::Read(buf)) = result
        {
            self.cipher.decrypt(offset, buf);
        }
        if let Memory::OfSpans(under_way) = &mut self.memory {
            under_way.remove(&token.0);
        }
    }

    /// A write is to be made: [`Self::next`] says when.
    pub fn writes(&mut self, write: Write) {
        self.waiting.push_back(write);
    }

    /// The writes that have not begun, of a volume that is closed.
    pub fn into_unwritten(self) -> Vec<Token> {
        self.waiting.into_iter().map(|write| write.token).collect()
    }

    /// The next write, encrypted, if there is one and memory for it.
    pub fn next(&mut self) -> Option<Write> {
        let write = self.waiting.front()?;
        let data = if is_superblock(write.offset) {
            write.data.clone()
        } else {
            self.encrypt(write)?
        };
        let write = self.waiting.pop_front()?;
        if let Memory::OfSpans(under_way) = &mut self.memory {
            under_way.insert(write.token.0, data.iter().map(|buf| buf.len()).sum());
        }
        Some(Write { data, ..write })
    }

    fn encrypt(&self, write: &Write) -> Option<Vec<Buf>> {
        let mut left: usize = write.data.iter().map(|buf| buf.len()).sum();
        if let Memory::OfSpans(under_way) = &self.memory
            && !under_way.is_empty()
            && under_way.values().sum::<usize>() + left > MEMORY_BYTES
        {
            return None;
        }
        let mut offset = write.offset;
        let mut plain = write
            .data
            .iter()
            .flat_map(|buf| buf.chunks_exact(BLOCK_BYTES));
        let mut encrypted = Vec::with_capacity(left.div_ceil(RUN_BYTES));
        while left > 0 {
            let bytes = left.min(RUN_BYTES);
            let mut run = match &self.memory {
                Memory::OfVolume(pool) => pool.alloc(bytes)?,
                Memory::OfSpans(_) => {
                    let blocks = bytes.div_ceil(BLOCK_BYTES).next_power_of_two();
                    let pool = Pool::small(blocks);
                    pool.alloc(bytes).expect("the pool is as large, and free")
                }
            };
            for (target, block) in run.chunks_exact_mut(BLOCK_BYTES).zip(&mut plain) {
                target.copy_from_slice(block);
            }
            self.cipher.encrypt(offset, &mut run);
            left -= run.len();
            offset += run.len() as u64;
            encrypted.push(run.freeze());
        }
        Some(encrypted)
    }
}

#[cfg(test)]
mod tests {
    use hdcs_backend::crypt::Encryption;
    use hdcs_backend::crypt::source::KeySource;
    use hdcs_core::format::LogSuperblock;

    use super::*;

    fn log(has_copies: bool) -> CipheredLog {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        std::fs::write(&path, [9; 32]).unwrap();
        let made = Encryption::new(KeySource::File(path)).unwrap();
        CipheredLog::new(made.unlock().unwrap().log(42), has_copies)
    }

    fn blocks(pool: &Pool, count: usize, byte: u8) -> Buf {
        let mut buf = pool.alloc(count * BLOCK_BYTES).unwrap();
        buf.fill(byte);
        buf.freeze()
    }

    #[test]
    fn ciphered_log_reads_what_it_has_written_and_leaves_the_plain_alone() {
        let (mut log, pool) = (log(false), Pool::new(8 << 20));
        let token = Token(3);
        let offset = (LOG_HEADER_BLOCKS + 2) * BLOCK_BYTES as u64;
        let data = vec![
            blocks(&pool, 1, 1),
            blocks(&pool, 3, 2),
            blocks(&pool, 1, 3),
        ];
        log.writes(Write {
            token,
            offset,
            data: data.clone(),
            way: None,
        });
        let written = log.next().unwrap();
        assert_eq!((written.token, written.offset), (token, offset));
        assert!(data[1].iter().all(|&byte| byte == 2));
        let medium: Vec<u8> = written.data.iter().flat_map(|buf| buf.to_vec()).collect();
        assert_eq!(medium.len(), 5 * BLOCK_BYTES);
        for read in 0..5 {
            let mut buf = pool.alloc(BLOCK_BYTES).unwrap();
            buf.copy_from_slice(&medium[read * BLOCK_BYTES..][..BLOCK_BYTES]);
            let expected = [1, 2, 2, 2, 3][read];
            assert!(buf.iter().any(|&byte| byte != expected));
            log.reads(token, offset + (read * BLOCK_BYTES) as u64);
            let mut result = Ok(Done::Read(buf));
            log.ended(token, &mut result);
            let Ok(Done::Read(buf)) = result else {
                panic!("it was read");
            };
            assert!(buf.iter().all(|&byte| byte == expected));
        }
    }

    #[test]
    fn ciphered_log_leaves_superblocks_as_they_are() {
        let (mut log, pool) = (log(false), Pool::new(1 << 20));
        for sequence in 0..2 {
            log.writes(Write {
                token: Token(1),
                offset: LogSuperblock::offset_of(sequence),
                data: vec![blocks(&pool, 1, 5)],
                way: None,
            });
            assert!(log.next().unwrap().data[0].iter().all(|&byte| byte == 5));
        }
    }

    #[test]
    fn ciphered_log_waits_for_memory_in_order_and_always_goes_on() {
        let (mut log, pool) = (log(false), Pool::new(32 << 20));
        let small = |token| Write {
            token: Token(token),
            offset: 1 << 20,
            data: vec![blocks(&pool, 2, 7)],
            way: None,
        };
        log.writes(small(0));
        let held = log.next().unwrap();
        let mut data: Vec<Buf> = (0..2)
            .map(|_| blocks(&pool, REQUEST_BLOCKS_MAX, 8))
            .collect();
        data.push(blocks(
            &pool,
            SPAN_BYTES_MAX / BLOCK_BYTES - SPAN_DATA_BLOCKS_MAX,
            8,
        ));
        for token in [1, 2] {
            log.writes(Write {
                token: Token(token),
                offset: 2 << 20,
                data: data.clone(),
                way: None,
            });
        }
        log.writes(small(3));
        let large = log.next();
        assert_eq!(large.as_ref().map(|write| write.token), Some(Token(1)));
        assert!(
            log.next().is_none(),
            "the second one does not fit beside it"
        );
        drop(held);
        assert!(log.next().is_none());
        drop(large);
        assert_eq!(log.next().map(|write| write.token), Some(Token(2)));
        assert_eq!(log.next().map(|write| write.token), Some(Token(3)));
        assert!(log.next().is_none());
    }

    #[test]
    fn ciphered_log_with_copies_goes_on_however_long_links_hold_what_was_written() {
        let (mut log, pool) = (log(true), Pool::new(64 << 20));
        let write = |token, count| Write {
            token: Token(token),
            offset: 1 << 20,
            data: vec![blocks(&pool, count, 7)],
            way: None,
        };
        let mut held = Vec::new();
        let rounds = 2 * MEMORY_BYTES / RUN_BYTES;
        for token in 0..rounds as u64 {
            log.writes(write(token, REQUEST_BLOCKS_MAX));
            held.push(log.next().expect("writes before it have ended"));
            log.ended(Token(token), &mut Ok(Done::Written));
        }
        // But no more is under way than a volume has memory for.
        let mut begun = 0;
        for token in 100..120 {
            log.writes(write(token, REQUEST_BLOCKS_MAX));
            begun += usize::from(log.next().is_some());
        }
        assert_eq!(begun, MEMORY_BYTES / RUN_BYTES);
    }
}
