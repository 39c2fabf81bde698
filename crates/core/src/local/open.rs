//! How a store is opened: what is read of it, what that must be, and what is written before anything else is.
//!
//! ```text
//!  superblocks ─► Pages ─► Sync ─► Repairs ─► Begun ─► SyncAgain ─► Done
//!                             └────────── nothing to write ──────────▲
//! ```
//!
//! | state | what is done | why |
//! |---|---|---|
//! | – | both superblocks are read | the newest one says whose store it is, how large, and which key it needs |
//! | Pages | both copies of each page of the map are read | the newest whole copy counts, if no write of the map is gone ([`MapCheck`]) |
//! | Sync | the store is made durable | what an earlier process wrote and did not make durable was read, and is believed |
//! | Repairs | the copies of pages that are old or torn are written | a torn write of the other copy would leave none |
//! | Begun | the superblock is written, if it changes | checksums hold only under one write log ([`HomeSuperblock::begin`]) |
//! | SyncAgain | what was written is made durable | – |
//!
//! Invariants:
//! 1. Nothing is written before all of the map was read and is believed: a store that is refused is as it was.
//! 2. With keys, nothing that is not authentic is believed.
//!
//! Failure: the store is refused, and [`Refused`] says for what.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use zerocopy::IntoBytes;

use super::Config;
use super::format::{self, HomePage, HomeSuperblock, MapCheck, choose_page};
use super::map::Map;
use crate::base::cipher::KeyedCipher;
use crate::base::error::FormatError;
use crate::base::limits::{BLOCK_BYTES, HOME_TIER_FLUSH_BYTES, HOME_TURN_BLOCKS, VOLUME_BYTES_MAX};

/// Why a store is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It has no superblock that can be believed, or another volume's.
    Superblock(FormatError),
    /// Both copies of a page of its map are damaged.
    Page {
        /// Which.
        page: u64,
        /// How.
        why: FormatError,
    },
    /// A write of its map is gone that the device had acknowledged.
    Map(FormatError),
    /// It is of a volume of so many bytes.
    Size(u64),
}

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Read two blocks from this offset on, and give them to [`Opening::read`].
    Read(u64),
    /// Make durable what the store holds: [`Opening::done`].
    Sync,
    /// Write a block there: [`Opening::done`].
    Write(u64, Box<[u8; BLOCK_BYTES]>),
    /// It may be used: [`Opening::finish`].
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Pages,
    Sync,
    Writes,
    SyncAgain,
    Done,
}

/// The write log before a store.
#[derive(Clone, Copy, Debug)]
pub struct Before {
    /// Its random number.
    pub log: u64,
    /// Whether it writes everything again that was not flushed: no write went past it.
    pub is_whole: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Opening {
    state: State,
    superblock: HomeSuperblock,
    keys: Option<Arc<dyn KeyedCipher>>,
    before: Before,
    check: MapCheck,
    pages: Vec<Box<HomePage>>,
    writes: VecDeque<(u64, Box<[u8; BLOCK_BYTES]>)>,
    repairs: usize,
}

impl Opening {
    /// Begin with the two blocks at the beginning of a store, which must be that of `volume`.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn begin(blocks: [&[u8]; 2], volume: [u8; 16], before: Before) -> Result<Self, Refused> {
        let superblock = HomeSuperblock::newest(blocks).map_err(Refused::Superblock)?;
        if superblock.volume != volume {
            return Err(Refused::Superblock(FormatError::Identity));
        }
        Ok(Self {
            state: State::Pages,
            check: MapCheck::new(&superblock),
            superblock,
            keys: None,
            before,
            pages: Vec::new(),
            writes: VecDeque::new(),
            repairs: 0,
        })
    }

    /// Its random number, from which its keys derive.
    pub fn home(&self) -> u64 {
        self.superblock.home.get()
    }

    /// UUID of the key that it is encrypted with; zeroes: it is plain.
    pub fn data_key(&self) -> [u8; 16] {
        self.superblock.data_key
    }

    /// Size of the volume in bytes that it is for.
    pub fn bytes(&self) -> u64 {
        self.superblock.bytes.get()
    }

    /// Pages of the map whose older or torn copy is written anew.
    pub fn repairs(&self) -> usize {
        self.repairs
    }

    /// With its keys, if it is encrypted, for a volume of `bytes` bytes. A resize that was interrupted may have left it
    /// larger than that: it has its own size then.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn authenticate(
        &mut self,
        keys: Option<Arc<dyn KeyedCipher>>,
        bytes: u64,
    ) -> Result<(), Refused> {
        let authentic = self.superblock.authenticate(keys.as_deref());
        authentic.map_err(Refused::Superblock)?;
        self.keys = keys;
        if !(bytes..=VOLUME_BYTES_MAX).contains(&self.bytes()) {
            return Err(Refused::Size(self.bytes()));
        }
        Ok(())
    }

    /// What is next.
    pub fn step(&self) -> Step {
        match self.state {
            State::Pages => {
                let layout = self.superblock.layout();
                Step::Read(layout.page_offset(self.pages.len() as u64, 0))
            }
            State::Sync | State::SyncAgain => Step::Sync,
            State::Writes => {
                let (offset, block) = &self.writes[0];
                Step::Write(*offset, block.clone())
            }
            State::Done => Step::Done,
        }
    }

    /// Two blocks were read.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn read(&mut self, blocks: [&[u8]; 2]) -> Result<(), Refused> {
        let page = self.pages.len() as u64;
        let found = choose_page(blocks, self.home(), page, self.keys.as_deref());
        let found = found.map_err(|why| Refused::Page { page, why })?;
        self.check.add(&found);
        if let Some(copy) = found.repair {
            let place = self.superblock.layout().page_offset(page, copy);
            self.writes.push_back((place, block(found.page.as_bytes())));
            self.repairs += 1;
        }
        self.pages.push(found.page);
        if self.pages.len() as u64 == format::pages(self.bytes()) {
            self.state = State::Sync;
            self.check.end().map_err(Refused::Map)?;
        }
        Ok(())
    }

    /// What was asked for is done.
    ///
    /// # Panics
    /// If blocks are to be read.
    pub fn done(&mut self) {
        self.state = match self.state {
            State::Pages => unreachable!("its blocks are told"),
            State::Sync => {
                let Before { log, is_whole } = self.before;
                let keys = self.keys.as_deref();
                if let Some(begun) = self.superblock.begin(log, is_whole, &self.check, keys) {
                    self.writes
                        .push_back((begun.place(), block(begun.as_bytes())));
                    self.superblock = begun;
                }
                if self.writes.is_empty() {
                    State::Done
                } else {
                    State::Writes
                }
            }
            State::Writes => {
                self.writes.pop_front();
                if self.writes.is_empty() {
                    State::SyncAgain
                } else {
                    State::Writes
                }
            }
            State::SyncAgain | State::Done => State::Done,
        };
    }

    /// What it is and has, with so much memory for checksums. What the caller knows of its backend it adds.
    ///
    /// # Panics
    /// Before it is done.
    pub fn finish(self, sums_bytes: usize) -> (Config, Map) {
        assert_eq!(self.state, State::Done, "a store is used once it is open");
        let superblock = &self.superblock;
        let config = Config {
            bytes: superblock.bytes.get(),
            volume: superblock.volume,
            home: superblock.home.get(),
            log: self.before.log,
            data_key: superblock.data_key,
            sequence: superblock.sequence.get(),
            commits: superblock.commits.get(),
            between: superblock.flags.get() & format::HOME_BETWEEN != 0,
            sums_log: superblock.sums_log.get(),
            sums_bytes,
            backend_atomic: false,
            flush_every_blocks: HOME_TIER_FLUSH_BYTES / BLOCK_BYTES as u64,
            turn_blocks: HOME_TURN_BLOCKS,
        };
        let blocks = config.bytes / BLOCK_BYTES as u64;
        let Before { log, is_whole } = self.before;
        let map = Map::load(self.pages, blocks, log, is_whole);
        (config, map)
    }
}

fn block(bytes: &[u8]) -> Box<[u8; BLOCK_BYTES]> {
    let mut block = Box::new([0; BLOCK_BYTES]);
    block.copy_from_slice(bytes);
    block
}
