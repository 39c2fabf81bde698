//! Encryption of a local store's data: nothing that is written to its place in the store may be what a client wrote,
//! and all of it must decrypt to that as the sector that it is written as.

use std::sync::Arc;

use fastrand::Rng;
use hdcs_core::base::buf::Buf;
use hdcs_core::base::cipher::{Authenticator, BlockCipher, KeyedCipher, TAG_BYTES};
use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::{BLOCK_BYTES, SECTOR_BYTES};
use hdcs_core::local::format::{Layout, PAGE_BLOCKS};

use super::plant::Plant;
use super::world::StoreWorld;
use crate::content::{Content, mix};
use crate::disk::joined;
use crate::toy_cipher::ToyCipher;
use crate::violation::Violation;

/// The data key's number.
pub(super) const DATA_KEY: [u8; 16] = [5; 16];

/// What encrypts the local store of a seed, in half of them. Its randomness is a stream of its own.
pub(super) fn cipher_of(seed: u64) -> Option<Arc<dyn KeyedCipher>> {
    let mut random = Rng::with_seed(mix(seed ^ mix(16)));
    let is_encrypted = random.bool();
    is_encrypted.then(|| Arc::new(ToyCipher(random.u64(..))) as Arc<dyn KeyedCipher>)
}

/// A cipher that is not applied to some sectors, or as if they were others.
#[derive(Debug)]
struct Planted {
    cipher: Arc<dyn KeyedCipher>,
    plant: Plant,
}

impl Planted {
    fn is_hit(&self, number: u64, plant: Plant) -> bool {
        self.plant == plant && number.is_multiple_of(7)
    }
}

impl BlockCipher for Planted {
    fn encrypt(&self, number: u64, sector: &mut [u8]) {
        if !self.is_hit(number, Plant::StoredPlain) {
            self.cipher.encrypt(number, sector);
        }
    }

    fn decrypt(&self, number: u64, sector: &mut [u8]) {
        if self.is_hit(number, Plant::StoredPlain) {
            return;
        }
        let is_other = self.is_hit(number, Plant::DecryptedAsAnother);
        self.cipher.decrypt(number + u64::from(is_other), sector);
    }
}

impl Authenticator for Planted {
    fn tag(&self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        self.cipher.tag(bytes)
    }
}

impl KeyedCipher for Planted {
    fn unit_tags(&self, first: u64, units: &[u8], tags: &mut [u32]) {
        if self.plant == Plant::ForgedSectorsTaken {
            return tags.fill(0);
        }
        self.cipher.unit_tags(first, units, tags);
    }
}

/// The sector of the volume that lies at an offset of the store, if one does.
fn sector_at(layout: Layout, offset: u64, bytes: u64) -> Option<u64> {
    let group = layout.page_offset(1, 0) - layout.page_offset(0, 0);
    let page = offset.checked_sub(layout.page_offset(0, 0))? / group;
    let first = page * PAGE_BLOCKS * BLOCK_BYTES as u64;
    let at = first + offset.checked_sub(layout.data_offset(first))?;
    (at < bytes).then_some(at / SECTOR_BYTES as u64)
}

impl StoreWorld {
    /// Where things are in the store.
    pub(super) fn layout(&self) -> Layout {
        Layout::of(self.cipher.is_some())
    }

    /// What the local store gets to encrypt with.
    pub(super) fn cipher_for_home(&self) -> Option<Arc<dyn KeyedCipher>> {
        let cipher = self.cipher.clone()?;
        let is_of_ciphers = |plant: &Plant| {
            matches!(
                plant,
                Plant::StoredPlain | Plant::DecryptedAsAnother | Plant::ForgedSectorsTaken
            )
        };
        match self.plant().filter(is_of_ciphers) {
            Some(plant) => Some(Arc::new(Planted { cipher, plant })),
            None => Some(cipher),
        }
    }

    /// What lies in the store from this sector on, as clients wrote it.
    pub(super) fn decrypt(&self, first_sector: u64, stored: &mut [u8]) {
        if let Some(cipher) = &self.cipher {
            for (sector, unit) in (first_sector..).zip(stored.chunks_exact_mut(SECTOR_BYTES)) {
                cipher.decrypt(sector, unit);
            }
        }
    }

    /// Something is written to the store.
    pub(super) fn check_stored(&self, offset: u64, data: &[Buf]) -> Result<(), Violation> {
        let Some(first) =
            sector_at(self.layout(), offset, self.bytes).filter(|_| self.cipher.is_some())
        else {
            return Ok(());
        };
        let mut stored = joined(data);
        for (sector, unit) in (first..).zip(stored.chunks_exact(SECTOR_BYTES)) {
            if Content::decode(super::world::VOLUME, sector, unit).is_some() {
                let why = format!("sector {sector} is in the store as it was written");
                return Err(Violation::new("stored-plain", why));
            }
        }
        self.decrypt(first, &mut stored);
        let count = (stored.len() / SECTOR_BYTES) as u64;
        Self::decode(SectorRange::new(first, count), &stored).map(drop)
    }
}
