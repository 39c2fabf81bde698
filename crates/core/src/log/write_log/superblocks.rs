//! What superblocks say of a log, and when they are made.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U64};

use super::{Tail, WriteLog};
use crate::base::buf::Buf;
use crate::base::cipher::TAG_BYTES;
use crate::base::limits::{BLOCK_BYTES, LOST_RANGES_MAX};
use crate::cache::Tie;
use crate::format::{
    LOG_HEADER_BLOCKS, LOG_HOLDS_VOLUME, LOG_MAGIC, LOG_UNFLUSHED, LOG_VERSION, LogSuperblock,
};

impl WriteLog {
    /// The superblock of a new log.
    pub fn format(volume: [u8; 16], log: u64, region_bytes: u64) -> LogSuperblock {
        let mut superblock = LogSuperblock {
            magic: LOG_MAGIC,
            version: U16::new(LOG_VERSION),
            holds: U16::new(LOG_HOLDS_VOLUME),
            reserved_a: [0; 4],
            checksum: U64::new(0),
            volume,
            log: U64::new(log),
            // Even: it belongs in block 0, and the first opening writes the other one.
            sequence: U64::new(0),
            incarnation: U64::new(0),
            epoch: U64::new(0),
            ring_blocks: U64::new(region_bytes / BLOCK_BYTES as u64 - LOG_HEADER_BLOCKS),
            tail: U64::new(0),
            tail_chain: U64::new(0),
            clean_head: U64::new(0),
            sync_points: U64::new(0),
            data_key: [0; 16],
            flags: U64::new(0),
            cache: U64::new(Tie::NONE.cache),
            cache_stamp: U64::new(Tie::NONE.stamp),
            backend_commit: [0; 64],
            known_head: U64::new(0),
            tag: [0; TAG_BYTES],
            reserved_b: [0; 1800],
            lost_ranges: U64::new(0),
            lost: [[U64::new(0); 2]; LOST_RANGES_MAX],
        };
        superblock.seal();
        superblock
    }

    /// Whether the next superblock says that the backend may hold writes past the log which it has not
    /// flushed. That of an opening says what was found.
    pub fn mark_unflushed(&mut self, unflushed: bool) {
        let others = self.superblock.flags.get() & !LOG_UNFLUSHED;
        let mark = if unflushed { LOG_UNFLUSHED } else { 0 };
        self.superblock.flags = U64::new(others | mark);
    }

    /// What the last superblock says of that.
    pub fn is_marked_unflushed(&self) -> bool {
        self.superblock.flags.get() & LOG_UNFLUSHED != 0
    }

    /// What the next superblock says of the read cache. That of an opening says what was found.
    pub fn set_tie(&mut self, tie: Tie) {
        self.superblock.cache = U64::new(tie.cache);
        self.superblock.cache_stamp = U64::new(tie.stamp);
    }

    /// What the last superblock says of that.
    pub fn tie(&self) -> Tie {
        Tie {
            cache: self.superblock.cache.get(),
            stamp: self.superblock.cache_stamp.get(),
        }
    }

    /// Whether what is durable ends with spans that nothing on the device says were: neither a later span nor a superblock.
    pub fn end_is_unproven(&self) -> bool {
        let proven = self.superblock.known_head.get().max(self.tail);
        self.flights.is_empty() && self.durable > proven
    }

    /// What is durable now, the next superblock says.
    pub fn name_durable(&mut self) {
        let known = self.superblock.known_head.get().max(self.durable);
        self.superblock.known_head = U64::new(known);
    }

    /// Replay has found that all before this position had been durable.
    pub(crate) fn know_head(&mut self, known: u64) {
        assert!(known <= self.head, "a log that ends before it is refused");
        self.superblock.known_head = U64::new(known);
    }

    /// A superblock that names `tail` as the tail, to be written durably at the returned offset
    /// before [`Self::retire`]. With `clean`, it says that the log ends at its head.
    pub fn superblock_for(&mut self, tail: &Tail, clean: bool) -> (u64, Buf) {
        self.find_written(tail.position);
        self.superblock.tail = U64::new(tail.position);
        self.superblock.tail_chain = U64::new(tail.chain);
        self.superblock.sync_points = U64::new(tail.sync_points);
        self.superblock.clean_head = U64::new(if clean { self.head } else { u64::MAX });
        self.next_superblock()
    }

    /// The superblock of a new opening, to be written durably before the first append, and before
    /// [`Self::superblock_beside_opening`].
    pub fn superblock_for_opening(&mut self) -> (u64, Buf) {
        self.is_told_once = self.damaged_blocks > 0 || !self.lost.is_empty();
        self.superblock
            .incarnation
            .set(self.superblock.incarnation.get() + 1);
        self.lost_from = self.next_sequence();
        self.superblock.clean_head = U64::new(u64::MAX);
        self.next_superblock()
    }

    /// The other superblock of an opening, if the first one is to be told twice: of a log that is damaged, no older
    /// superblock may come into force which knows less of that. To be written durably before the first append.
    pub fn superblock_beside_opening(&mut self) -> Option<(u64, Buf)> {
        core::mem::take(&mut self.is_told_once).then(|| self.next_superblock())
    }

    /// A superblock that says what the last one did, but for the mark.
    pub fn next_superblock(&mut self) -> (u64, Buf) {
        self.lost.record(&mut self.superblock);
        let sequence = self.superblock.sequence.get() + 1;
        self.superblock.sequence = U64::new(sequence);
        self.superblock.seal_with(self.keys.as_deref());
        let mut block = self
            .control_pool
            .alloc(BLOCK_BYTES)
            .expect("one superblock is written at a time");
        block.copy_from_slice(self.superblock.as_bytes());
        (LogSuperblock::offset_of(sequence), block.freeze())
    }
}
