//! What lies in the store and how it gets there: the map, its commits, the checksums and the cipher, with what every part
//! of a local store shares.
//!
//! [`super::commit`] makes it durable, [`super::sums`] brings checksums in and out of memory.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use super::commit::Commit;
use super::encryption::Encryption;
use super::format::{Layout, PAGE_BLOCKS};
use super::map::{BlockState, Map};
use super::sums::{Sum, Sums};
use super::{Action, Config, Status};
use crate::base::buf::{BufMut, Pool};
use crate::base::cipher::KeyedCipher;
use crate::base::error::IoError;
use crate::base::io::{Nanos, Token};
use crate::base::limits::{BLOCK_BYTES, HOME_POOL_BYTES};

/// Why something was asked.
#[derive(Debug)]
pub(super) enum Purpose {
    Read(u64),
    Fill { write: u64, part: usize, tail: bool },
    Write(u64),
    Commit,
    Superblock,
    CopyRead(u64),
    CopyWrite(u64),
    TierFlush,
    SumsRead(u64),
    SumsWrite(u64),
    Patrol(u64),
    Resize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Store {
    pub config: Config,
    pub map: Map,
    pub pool: Arc<Pool>,
    pub commit: Commit,
    /// The checksums of its data.
    pub sums: Sums,
    /// What encrypts its data, if something does.
    pub encryption: Option<Encryption>,
    /// Which commit the pages are of that a growth is about to add: newer than whatever lies in their places.
    pub new_generation: u64,
    /// How many blocks more may become zero, or be cut off, in this turn.
    pub turn_blocks: u64,
    /// See [`Status::owed_since`].
    pub owed_since: Option<Nanos>,
    pub failed: Option<IoError>,
    pub in_flight: BTreeMap<u64, Purpose>,
    next_id: u64,
    pub status: Status,
    pub now: Nanos,
}

impl Store {
    /// A store of which this was read.
    pub fn new(config: Config, map: Map, cipher: Option<Arc<dyn KeyedCipher>>) -> Self {
        Self {
            config,
            map,
            pool: Pool::new(HOME_POOL_BYTES),
            commit: Commit::new(&config),
            sums: Sums::new(config.sums_log, config.sums_bytes, cipher.clone()),
            encryption: cipher.map(Encryption::new),
            new_generation: 0,
            turn_blocks: config.turn_blocks,
            owed_since: None,
            failed: None,
            in_flight: BTreeMap::new(),
            next_id: 0,
            status: Status::default(),
            now: Nanos(0),
        }
    }

    /// What tags the map and the superblock, if something does.
    pub fn keys(&self) -> Option<&dyn KeyedCipher> {
        self.encryption.as_ref().map(Encryption::keys)
    }

    /// Where things are in the store.
    pub fn layout(&self) -> Layout {
        Layout::of(self.encryption.is_some())
    }

    /// A token for an action.
    pub fn token(&mut self, purpose: Purpose) -> Token {
        self.next_id += 1;
        self.in_flight.insert(self.next_id, purpose);
        Token(self.next_id)
    }

    /// A number for a request.
    pub fn number(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Change the state of blocks. A commit that is writing their page has what it was before.
    pub fn set(&mut self, blocks: Range<u64>, state: BlockState) {
        let mut at = blocks.start;
        while at < blocks.end {
            let end = blocks.end.min((at / PAGE_BLOCKS + 1) * PAGE_BLOCKS);
            if !self.map.is_all(at..end, state) {
                self.commit.keep(&self.map, at);
                self.map.fill(at..end, state);
            }
            at = end;
        }
    }

    /// Bytes that the backend lacks, and bytes that read as zeroes, which it lacks as well.
    pub fn owed_bytes(&self) -> (u64, u64) {
        let bytes = |state| self.map.count(state) * BLOCK_BYTES as u64;
        (bytes(BlockState::Dirty), bytes(BlockState::Zero))
    }

    /// Note since when something is here that the backend lacks. Called at the end of each turn.
    pub fn note_owed(&mut self) {
        self.owed_since = match self.owed_bytes() {
            (0, 0) => None,
            _ => self.owed_since.or(Some(self.now)),
        };
    }

    /// Compare what was read from the store with its checksums, and make it what was written.
    pub fn open(
        &mut self,
        first_sector: u64,
        expected: &[Sum],
        data: &mut BufMut,
        actions: &mut Vec<Action>,
    ) -> Result<(), IoError> {
        self.verify(first_sector, expected, data, actions)
            .or_refused()?;
        if let Some(encryption) = &self.encryption {
            encryption.decrypt(first_sector, data);
        }
        Ok(())
    }

    /// The table of checksums is complete up to a block.
    pub fn is_believed_until(&mut self, block: u64) {
        let is_all = block >= self.map.blocks();
        self.sums.trusted_until = if is_all { u64::MAX } else { block };
        if is_all {
            // This one makes the table durable; the superblock goes with the pages, after that.
            self.commit.believe(self.config.log);
        }
    }
}
