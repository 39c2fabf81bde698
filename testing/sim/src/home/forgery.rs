//! Somebody without the key writes to the store of an encrypted home while it is not open: a page of its map or its
//! superblock, with a checksum that is right. No opening may take it.

use fastrand::Rng;
use hdcs_core::base::cipher::KeyedCipher;
use hdcs_core::base::error::FormatError;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::seal;
use hdcs_core::local::format::{self, FoundPage, HomePage, HomeSuperblock, MapCheck, choose_page};
use zerocopy::IntoBytes;

use super::plant::Plant;
use super::world::{HOME, World};
use crate::content::mix;
use crate::violation::Violation;

/// When something is forged. Its randomness is a stream of its own.
#[derive(Debug)]
pub(super) struct Forgery(Rng);

impl Forgery {
    pub fn new(seed: u64) -> Self {
        Self(Rng::with_seed(mix(seed ^ mix(21))))
    }
}

/// What the store has of a home.
pub(super) struct Found {
    pub superblock: HomeSuperblock,
    pub pages: Vec<FoundPage>,
    pub check: MapCheck,
}

impl World {
    fn block_at(&self, offset: u64) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES];
        self.store.peek(offset, &mut block);
        block
    }

    /// Superblock and map, as the node reads them; else why not, and of which page.
    pub(super) fn find_map(&self) -> Result<Found, (Option<u64>, FormatError)> {
        let keys = self.keys();
        let keys = keys.filter(|_| !self.is_planted(Plant::ForgedMapTaken));
        let both = [0, BLOCK_BYTES as u64].map(|offset| self.block_at(offset));
        let superblock = HomeSuperblock::newest([&both[0], &both[1]]).map_err(|why| (None, why))?;
        superblock.authenticate(keys).map_err(|why| (None, why))?;
        let mut check = MapCheck::new(&superblock);
        let mut pages = Vec::new();
        for page in 0..format::pages(superblock.bytes.get()) {
            let both = [0, 1].map(|copy| self.block_at(self.layout().page_offset(page, copy)));
            let found = choose_page([&both[0], &both[1]], HOME, page, keys);
            let found = found.map_err(|why| (Some(page), why))?;
            check.add(&found);
            pages.push(found);
        }
        Ok(Found {
            superblock,
            pages,
            check,
        })
    }

    /// Forge something, see that it is refused, and put back what was there.
    pub(super) fn forge_sometimes(&mut self) -> Result<(), Violation> {
        if self.calm || self.forgery.0.u8(..4) > 0 || self.cipher.is_none() {
            return Ok(());
        }
        let Ok(found) = self.find_map() else {
            return Ok(());
        };
        let page = self.forgery.0.u64(..found.pages.len() as u64);
        let offset = match self.forgery.0.u64(..3) {
            2 => found.superblock.place(),
            copy => self.layout().page_offset(page, copy as usize),
        };
        let before = self.block_at(offset);
        let mut forged = before.clone();
        if HomeSuperblock::parse(&before).is_ok() {
            // It is the newest of all.
            let sequence = core::mem::offset_of!(HomeSuperblock, sequence);
            let next = found.superblock.sequence.get() + 2;
            forged[sequence..sequence + 8].copy_from_slice(next.as_bytes());
        } else if HomePage::parse(&before, HOME, page).is_ok() {
            let states = core::mem::offset_of!(HomePage, states);
            forged[states + self.forgery.0.usize(..16)] ^= 0x55;
        } else {
            return Ok(());
        }
        seal(&mut forged);
        self.store.put(offset, &forged);
        let found = self.find_map().err().map(|(_, why)| why);
        self.store.put(offset, &before);
        self.coverage.forged += 1;
        if found != Some(FormatError::Forged) {
            let why = format!("what lies at {offset} was forged, and an opening says {found:?}");
            return Err(Violation::new("forged-taken", why));
        }
        Ok(())
    }

    /// What tags the map, if something does.
    pub(super) fn keys(&self) -> Option<&dyn KeyedCipher> {
        self.cipher.as_deref()
    }
}
