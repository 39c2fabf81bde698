//! Encryption of a local store's data: ciphertext in the store, plaintext everywhere else.
//!
//! The unit is the sector, which is what destage writes and what a checksum is of: so a part of a block is
//! written, read and verified without the rest of it. Its number is that on the volume.
//!
//! Checksums are of what is stored. They tell nothing of the plaintext, and whoever goes through the local store (a
//! scrub, the table made anew, a check offline) needs no key.
//!
//! Superblocks and pages of the map carry tags that only a holder of the key can make. Whoever opens the local store
//! compares them.
//!
//! What is written stays as it is, since reads and a crash's replay come from it; so it is encrypted into memory of
//! its own. A part that finds none waits, in order, for the end of writes before it. Writes to the store alone hold
//! that memory, and they end: nobody waits for the backend here.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::base::buf::{Buf, Pool};
use crate::base::cipher::KeyedCipher;
use crate::base::limits::{HOME_CIPHER_BYTES, REQUEST_BYTES_MAX, SECTOR_BYTES};

/// See the module.
#[derive(Debug)]
pub(super) struct Encryption {
    cipher: Arc<dyn KeyedCipher>,
    memory: Arc<Pool>,
}

impl Encryption {
    /// With memory of its own.
    pub fn new(cipher: Arc<dyn KeyedCipher>) -> Self {
        Self {
            cipher,
            memory: Pool::new(HOME_CIPHER_BYTES),
        }
    }

    /// What tags the map and the superblock.
    pub fn keys(&self) -> &dyn KeyedCipher {
        &*self.cipher
    }

    /// What is stored of `data`, whose first sector has this number; `None` while there is no memory for it.
    pub fn encrypt(&self, first_sector: u64, data: &[Buf]) -> Option<Vec<Buf>> {
        let mut left: usize = data.iter().map(|buf| buf.len()).sum();
        let mut sector = first_sector;
        let mut plain = data.iter().flat_map(|buf| buf.chunks_exact(SECTOR_BYTES));
        let mut stored = Vec::with_capacity(left.div_ceil(REQUEST_BYTES_MAX));
        while left > 0 {
            let mut run = self.memory.alloc(left.min(REQUEST_BYTES_MAX))?;
            for (target, plain) in run.chunks_exact_mut(SECTOR_BYTES).zip(&mut plain) {
                target.copy_from_slice(plain);
                self.cipher.encrypt(sector, target);
                sector += 1;
            }
            left -= run.len();
            stored.push(run.freeze());
        }
        Some(stored)
    }

    /// Decrypt what was read from the store, from this sector on.
    pub fn decrypt(&self, first_sector: u64, data: &mut [u8]) {
        for (number, sector) in (first_sector..).zip(data.chunks_exact_mut(SECTOR_BYTES)) {
            self.cipher.decrypt(number, sector);
        }
    }
}
