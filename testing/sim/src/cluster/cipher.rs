//! An encrypted log: its volume writes and reads in the clear, the driver encrypts what goes to the ring and decrypts what the
//! volume reads of it, and members get the same bytes as they are on the medium.

use std::borrow::Cow;
use std::sync::Arc;

use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::cipher::{Authenticator, BlockCipher, LogKeys};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_HEADER_BLOCKS, LogSuperblock};

use crate::content::mix;
use crate::toy_cipher::ToyCipher;

/// Name of the key.
const KEY_NAME: [u8; 16] = [6; 16];

/// The keys of a log, if it is encrypted.
#[derive(Clone, Debug)]
pub(super) struct LogCipher(Option<Arc<ToyCipher>>);

impl LogCipher {
    /// That of a seed.
    pub(super) fn new(seed: u64, is_encrypted: bool) -> Self {
        Self(is_encrypted.then(|| Arc::new(ToyCipher(mix(seed ^ mix(0xc3))))))
    }

    /// Whether it does anything.
    pub(super) fn encrypts(&self) -> bool {
        self.0.is_some()
    }

    /// For whoever decrypts what is of the log.
    pub(super) fn keys(&self) -> Option<Arc<dyn LogKeys>> {
        let keys = self.0.clone()?;
        Some(keys)
    }

    /// For whoever reads superblocks.
    pub(super) fn tags(&self) -> Option<Arc<dyn Authenticator>> {
        let keys = self.0.clone()?;
        Some(keys)
    }

    /// Seal a superblock.
    pub(super) fn seal(&self, superblock: &mut LogSuperblock) {
        if self.0.is_some() {
            superblock.data_key = KEY_NAME;
        }
        let keys = self.0.as_deref();
        superblock.seal_with(keys.map(|keys| keys as &dyn Authenticator));
    }

    /// What goes to the medium of what is written there.
    pub(super) fn encrypted(&self, offset: u64, data: &[Buf]) -> Vec<Buf> {
        self.made(offset, data, ToyCipher::encrypt)
    }

    /// The contrary.
    pub(super) fn decrypted(&self, offset: u64, data: &[Buf]) -> Vec<Buf> {
        self.made(offset, data, ToyCipher::decrypt)
    }

    fn made(&self, offset: u64, data: &[Buf], call: fn(&ToyCipher, u64, &mut [u8])) -> Vec<Buf> {
        let mut at = offset;
        let parts = data.iter().map(|part| {
            let from = at;
            at += part.len() as u64;
            if self.0.is_none() {
                return part.clone();
            }
            let blocks = part.len().div_ceil(BLOCK_BYTES).next_power_of_two();
            let pool = Pool::small(blocks);
            let mut buf = pool.alloc(part.len()).expect("it is as large, and free");
            buf.copy_from_slice(part);
            self.each(from, &mut buf, call);
            buf.freeze()
        });
        parts.collect()
    }

    /// Decrypt what was read there.
    pub(super) fn decrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.each(offset, bytes, ToyCipher::decrypt);
    }

    /// What the first block of these says in the clear.
    pub(super) fn head<'a>(&self, offset: u64, data: &'a [Buf]) -> Cow<'a, [u8]> {
        let first = data.first().and_then(|part| part.get(..BLOCK_BYTES));
        let first = first.unwrap_or_default();
        if self.0.is_none() {
            return Cow::Borrowed(first);
        }
        let mut clear = first.to_vec();
        self.decrypt(offset, &mut clear);
        Cow::Owned(clear)
    }

    /// Each block of the ring. Superblocks are not encrypted.
    fn each(&self, offset: u64, bytes: &mut [u8], call: fn(&ToyCipher, u64, &mut [u8])) {
        let Some(keys) = &self.0 else { return };
        let numbers = offset / BLOCK_BYTES as u64..;
        for (number, block) in numbers.zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
            if number >= LOG_HEADER_BLOCKS {
                call(keys, number, block);
            }
        }
    }
}
