//! Somebody without the key writes to the store of an encrypted local store while it is not open: a page of its map or
//! its superblock, with a checksum that is right. No opening may take it.

use fastrand::Rng;
use hdcs_core::base::error::FormatError;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::seal;
use hdcs_core::local::format::{self, HomePage, HomeSuperblock};
use hdcs_core::local::open::{Before, Opening, Refused, Step};
use zerocopy::IntoBytes;

use super::plant::Plant;
use super::world::{HOME, StoreWorld, UUID};
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

impl StoreWorld {
    fn block_at(&self, offset: u64) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES];
        self.store.peek(offset, &mut block);
        block
    }

    fn two_blocks_at(&self, offset: u64) -> [Vec<u8>; 2] {
        [offset, offset + BLOCK_BYTES as u64].map(|offset| self.block_at(offset))
    }

    /// Superblock and map are read, as the node reads them.
    pub(super) fn begin_opening(&self) -> Result<Opening, Refused> {
        let keys = (self.cipher.clone()).filter(|_| !self.is_planted(Plant::ForgedMapTaken));
        let before = Before {
            log: self.log,
            is_whole: self.sums.is_log_whole || self.is_planted(Plant::TrustSums),
        };
        let [one, other] = self.two_blocks_at(0);
        let mut opening = Opening::begin([&one, &other], UUID, before)?;
        opening.authenticate(keys, self.bytes)?;
        let mut page = 0;
        while let Step::Read(offset) = opening.step() {
            let mut both = self.two_blocks_at(offset);
            if self.is_planted(Plant::TrustClean) {
                for block in &mut both {
                    self.as_of_this_log(block, page);
                }
            }
            match opening.read([&both[0], &both[1]]) {
                Err(Refused::Map(_)) if self.is_planted(Plant::MapUnchecked) => {}
                read => read?,
            }
            page += 1;
        }
        Ok(opening)
    }

    /// A page of the map, if it is one, as if this log had been before the local store when it was written.
    fn as_of_this_log(&self, block: &mut [u8], page: u64) {
        let keys = self.cipher.as_deref();
        if let Ok(found) = HomePage::parse(block, HOME, page)
            && found.authenticate(keys).is_ok()
        {
            let (generation, states) = (found.generation.get(), &found.states);
            let changed = HomePage::sealed(HOME, self.log, generation, page, states);
            block.copy_from_slice(changed.tagged(keys).as_bytes());
        }
    }

    /// Forge something, see that it is refused, and put back what was there.
    pub(super) fn forge_sometimes(&mut self) -> Result<(), Violation> {
        if self.calm || self.forgery.0.u8(..4) > 0 || self.cipher.is_none() {
            return Ok(());
        }
        if self.begin_opening().is_err() {
            return Ok(());
        }
        let [one, other] = self.two_blocks_at(0);
        let superblock = HomeSuperblock::newest([&one, &other]).expect("it opens");
        let page = self.forgery.0.u64(..format::pages(superblock.bytes.get()));
        let offset = match self.forgery.0.u64(..3) {
            2 => superblock.place(),
            copy => self.layout().page_offset(page, copy as usize),
        };
        let before = self.block_at(offset);
        let mut forged = before.clone();
        if HomeSuperblock::parse(&before).is_ok() {
            // It is the newest of all.
            let sequence = core::mem::offset_of!(HomeSuperblock, sequence);
            let next = superblock.sequence.get() + 2;
            forged[sequence..sequence + 8].copy_from_slice(next.as_bytes());
        } else if HomePage::parse(&before, HOME, page).is_ok() {
            let states = core::mem::offset_of!(HomePage, states);
            forged[states + self.forgery.0.usize(..16)] ^= 0x55;
        } else {
            return Ok(());
        }
        seal(&mut forged);
        self.store.put(offset, &forged);
        let found = self.begin_opening().err().and_then(why);
        self.store.put(offset, &before);
        self.coverage.forged += 1;
        if found != Some(FormatError::Forged) {
            let why = format!("what lies at {offset} was forged, and an opening says {found:?}");
            return Err(Violation::new("forged-taken", why));
        }
        Ok(())
    }
}

fn why(refused: Refused) -> Option<FormatError> {
    match refused {
        Refused::Superblock(why) | Refused::Page { why, .. } | Refused::Map(why) => Some(why),
        Refused::Size(_) => None,
    }
}
