//! Going through what a local store has: to verify it, which is asked for a piece at a time, and to make the table of
//! its checksums anew where that is not believed, which goes on by itself.
//!
//! Nobody writes what is being read here. The new table counts from where it is complete: what is before that
//! is believed, and after the last block a commit makes that durable, and then says so in the superblock.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

use super::Action;
use super::map::BlockState;
use super::store::{Purpose, Store};
use super::sums::{Compared, Sum};
use super::writes::Writes;
use crate::base::buf::BufMut;
use crate::base::error::IoError;
use crate::base::io::{Done, SectorRange, Token};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Blocks that are read at once.
const PIECE_BLOCKS: u64 = (crate::node::scrub::PIECE_BYTES / BLOCK_BYTES) as u64;
/// Blocks that are looked through at once for one that is here.
const LOOK_BLOCKS: u64 = 1 << 16;

/// What a piece was found to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The block to go on with; `None`: this was the last piece.
    pub next: Option<u64>,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// The blocks that do not match their checksums.
    pub damaged: Vec<u64>,
}

/// A piece that is being read.
#[derive(Debug)]
struct Piece {
    /// Who asked; `None`: it is to make the table anew.
    token: Option<Token>,
    blocks: Range<u64>,
    expected: Vec<Sum>,
}

/// What is being gone through.
#[derive(Debug, Default)]
pub(super) struct Patrol {
    /// Pieces that are asked for and wait.
    asked: Vec<(Token, u64)>,
    pieces: BTreeMap<u64, Piece>,
    /// Whether the table cannot be made anew in this life.
    gives_up: bool,
    /// Whether it goes on at once, since there was nothing to read.
    pub goes_on: bool,
}

impl Piece {
    /// Compare what was read with the checksums.
    fn verify(&self, data: &BufMut, store: &mut Store, actions: &mut Vec<Action>) -> Verified {
        let mut damaged = Vec::new();
        let per_block = BLOCK_SECTORS as usize;
        let expected = self.expected.chunks(per_block);
        for ((block, data), expected) in (self.blocks.start..)
            .zip(data.chunks(BLOCK_BYTES))
            .zip(expected)
        {
            let first = block * BLOCK_SECTORS;
            if store.verify(first, expected, data, actions) == Compared::Damaged {
                damaged.push(block);
            }
        }
        Verified {
            next: (self.blocks.end < store.map.blocks()).then_some(self.blocks.end),
            read_bytes: data.len() as u64,
            damaged,
        }
    }
}

impl Patrol {
    /// Whether one of these blocks is being read.
    pub fn reads(&self, blocks: &Range<u64>) -> bool {
        let mut pieces = self.pieces.values().map(|piece| &piece.blocks);
        pieces.any(|piece| piece.start < blocks.end && blocks.start < piece.end)
    }

    /// Begin nothing by itself any more.
    pub fn stop(&mut self) {
        self.gives_up = true;
    }

    /// Verify what is here from a block on, as much as is read at once.
    pub fn ask(&mut self, token: Token, block: u64) {
        self.asked.push((token, block));
    }

    /// Go on where nothing is in the way.
    /// Those blocks are gone through that are before `end_block`.
    pub fn pump(
        &mut self,
        store: &mut Store,
        writes: &Writes,
        end_block: u64,
        actions: &mut Vec<Action>,
    ) {
        self.goes_on = false;
        let asked = core::mem::take(&mut self.asked);
        for (token, block) in asked {
            if !self.begin(Some(token), block..end_block, store, writes, actions) {
                self.asked.push((token, block));
            }
        }
        let is_adopting = self.pieces.values().any(|piece| piece.token.is_none());
        let stops = self.gives_up || store.failed.is_some() || is_adopting;
        let block = store.sums.trusted_until;
        if block < end_block && !stops {
            self.begin(None, block..end_block, store, writes, actions);
        }
    }

    /// Begin to read what is here of `blocks`; false if that has to wait.
    fn begin(
        &mut self,
        token: Option<Token>,
        blocks: Range<u64>,
        store: &mut Store,
        writes: &Writes,
        actions: &mut Vec<Action>,
    ) -> bool {
        let (block, end_block) = (blocks.start, blocks.end);
        if (end_block..store.map.blocks()).contains(&block) {
            // It is known soon whether that is cut off.
            return false;
        }
        let end = end_block.min(block.saturating_add(LOOK_BLOCKS));
        let is_here = |state: BlockState| state.is_here();
        let mut first = block;
        while first < end && !is_here(store.map.get(first)) {
            first = store.map.run_end(first, end, is_here);
        }
        if first >= end {
            let found = Verified {
                next: (end < store.map.blocks()).then_some(end),
                ..Verified::default()
            };
            if let Some(token) = token {
                actions.push(Action::Verified(token, Ok(found)));
            } else {
                self.goes_on = true;
                store.is_believed_until(end);
            }
            return true;
        }
        let blocks = first
            ..store
                .map
                .run_end(first, end.min(first + PIECE_BLOCKS), is_here);
        if writes.touch(&blocks) {
            return false;
        }
        let sums = &mut store.sums;
        if (token.is_none() && sums.is_full()) || !sums.ready(&blocks) {
            return false;
        }
        let bytes = (blocks.end - blocks.start) * BLOCK;
        let Some(buf) = store.pool.alloc(bytes as usize) else {
            return false;
        };
        sums.pin(&blocks, true);
        let sectors =
            SectorRange::between(blocks.start * BLOCK_SECTORS, blocks.end * BLOCK_SECTORS);
        let piece = Piece {
            token,
            expected: sums.expected(sectors),
            blocks: blocks.clone(),
        };
        let id = store.number();
        self.pieces.insert(id, piece);
        let token = store.token(Purpose::Patrol(id));
        actions.push(Action::StoreRead {
            token,
            offset: store.layout().data_offset(blocks.start * BLOCK),
            buf,
        });
        true
    }

    /// A piece was read.
    pub fn ended(
        &mut self,
        id: u64,
        result: Result<Done, IoError>,
        store: &mut Store,
        actions: &mut Vec<Action>,
    ) {
        let piece = self.pieces.remove(&id).expect("it was under way");
        store.sums.pin(&piece.blocks, false);
        let result = result.map(|done| match done {
            Done::Read(buf) => buf,
            _ => unreachable!("a read brings its buffer"),
        });
        match (piece.token, result) {
            (Some(token), result) => {
                let found = result.map(|data| piece.verify(&data, store, actions));
                actions.push(Action::Verified(token, found));
            }
            (None, Ok(data)) => {
                store.sums.adopt(&piece.blocks, &data);
                store.is_believed_until(piece.blocks.end);
            }
            // The next life tries again.
            (None, Err(_)) => self.gives_up = true,
        }
    }

    /// A block of the table cannot be read, and somebody may wait for it.
    pub fn refuse(&mut self, error: IoError, actions: &mut Vec<Action>) {
        for (token, _) in core::mem::take(&mut self.asked) {
            actions.push(Action::Verified(token, Err(error)));
        }
        self.gives_up = true;
    }
}
