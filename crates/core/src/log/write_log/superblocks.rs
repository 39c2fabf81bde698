//! What superblocks say of a log, and when they are made.

use alloc::sync::Arc;

use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::{Tail, WriteLog};
use crate::base::buf::{Buf, Pool};
use crate::base::cipher::Authenticator;
use crate::base::io::SectorRange;
use crate::base::limits::BLOCK_BYTES;
use crate::cache::Tie;
use crate::format::{LOG_SHARES_SPACE, LOG_UNFLUSHED, LogSuperblock};
use crate::log::lost::LostSectors;

/// The superblocks of a log: what the last one says, and what the next one will say besides. That of an opening says
/// what was found.
#[derive(Debug)]
pub struct Superblocks {
    pub(super) last: LogSuperblock,
    /// What authenticates them, if something does.
    keys: Option<Arc<dyn Authenticator>>,
    /// They come from here, so that a full pool cannot stop the log.
    pool: Arc<Pool>,
    /// What is lost, as of the tail that the last one names; but of what replay found, as of its end.
    pub(super) lost: LostSectors,
    /// Data blocks that replay found damaged in the spans that it took.
    pub(super) damaged_blocks: u64,
    /// The tails that the last one names and the one before that.
    tails: [Option<u64>; 2],
    /// The older one on the device does not say yet what this opening found.
    is_told_once: bool,
}

impl Superblocks {
    /// Those that follow `last`.
    pub(super) fn new(
        last: &LogSuperblock,
        keys: Option<Arc<dyn Authenticator>>,
        pool: Arc<Pool>,
    ) -> Self {
        Self {
            last: *last,
            keys,
            pool,
            lost: LostSectors::recorded(last),
            damaged_blocks: 0,
            tails: [Some(last.tail.get()), None],
            is_told_once: false,
        }
    }

    /// Whether the last two that were made both name this tail.
    pub(super) fn both_name(&self, tail: u64) -> bool {
        self.tails == [Some(tail); 2]
    }

    /// Whether the next one says that the backend may hold writes past the log which it has not flushed.
    pub fn mark_unflushed(&mut self, unflushed: bool) {
        let others = self.last.flags.get() & !LOG_UNFLUSHED;
        let mark = if unflushed { LOG_UNFLUSHED } else { 0 };
        self.last.flags = U64::new(others | mark);
    }

    /// What the last one says of that.
    pub fn is_marked_unflushed(&self) -> bool {
        self.last.flags.get() & LOG_UNFLUSHED != 0
    }

    /// Whether the log shares the space of its file system.
    pub fn shares_space(&self) -> bool {
        self.last.flags.get() & LOG_SHARES_SPACE != 0
    }

    /// What the next one says of the read cache.
    pub fn set_tie(&mut self, tie: Tie) {
        self.last.cache = U64::new(tie.cache);
        self.last.cache_stamp = U64::new(tie.stamp);
    }

    /// What the last one says of that.
    pub fn tie(&self) -> Tie {
        Tie {
            cache: self.last.cache.get(),
            stamp: self.last.cache_stamp.get(),
        }
    }

    /// What is lost, of the sectors that the log had when it was opened, and of what its superblock recorded.
    pub fn lost(&self) -> &LostSectors {
        &self.lost
    }

    /// What lies there is not needed: nothing is recorded of it any more.
    pub fn forget_lost(&mut self, range: SectorRange) {
        self.lost.remove(range);
    }

    /// Whether it is a copy among others, and replay found damaged blocks.
    pub(crate) fn is_damaged_copy(&self) -> bool {
        self.damaged_blocks > 0 && self.last.membership().is_some()
    }

    /// Data blocks that replay found damaged, whether something newer takes the place of what they held or not.
    pub fn damaged_blocks(&self) -> u64 {
        self.damaged_blocks
    }

    /// The other one of an opening, if the first one is to be told twice: of a log that is damaged, no older
    /// superblock may come into force which knows less of that. To be written durably before the first append.
    pub fn beside_opening(&mut self) -> Option<(u64, Buf)> {
        core::mem::take(&mut self.is_told_once).then(|| self.next())
    }

    /// One that says what the last one did, but for what was told since: its offset on the region, and the block.
    #[expect(
        clippy::should_implement_trait,
        reason = "there is always a next one, and no end"
    )]
    pub fn next(&mut self) -> (u64, Buf) {
        self.lost.record(&mut self.last);
        self.tails = [Some(self.last.tail.get()), self.tails[0]];
        let sequence = self.last.sequence.get() + 1;
        self.last.sequence = U64::new(sequence);
        self.last.ahead_sequence = self.last.sequence;
        self.last.seal_with(self.keys.as_deref());
        let mut block = self
            .pool
            .alloc(BLOCK_BYTES)
            .expect("one superblock is written at a time");
        block.copy_from_slice(self.last.as_bytes());
        (LogSuperblock::offset_of(sequence), block.freeze())
    }
}

impl WriteLog {
    /// Whether what is durable ends with spans that nothing on the device says were: neither a later span nor a superblock.
    pub fn end_is_unproven(&self) -> bool {
        let proven = self.superblocks.last.known_head.get().max(self.tail);
        self.flights.is_empty() && self.durable > proven
    }

    /// What is durable now, the next superblock says.
    pub fn name_durable(&mut self) {
        let known = self.superblocks.last.known_head.get().max(self.durable);
        self.superblocks.last.known_head = U64::new(known);
    }

    /// Replay has found that all before this position had been durable.
    pub(crate) fn know_head(&mut self, known: u64) {
        assert!(known <= self.head, "a log that ends before it is refused");
        self.superblocks.last.known_head = U64::new(known);
    }

    /// A superblock that names `tail` as the tail, to be written durably at the returned offset
    /// before [`Self::retire`]. With `clean`, it says that the log ends at its head.
    pub fn superblock_for(&mut self, tail: &Tail, clean: bool) -> (u64, Buf) {
        self.find_written(tail.position);
        self.superblocks.last.tail = U64::new(tail.position);
        self.superblocks.last.tail_chain = U64::new(tail.chain);
        self.superblocks.last.sync_points = U64::new(tail.sync_points);
        if self.head == tail.position && self.open.entries.is_empty() {
            self.ahead.emptied();
        }
        self.superblocks.last.ahead = U64::new(self.ahead.named());
        self.superblocks.last.clean_head = U64::new(if clean { self.head } else { u64::MAX });
        self.superblocks.next()
    }

    /// The superblock of a new opening, to be written durably before the first append, and before
    /// [`Superblocks::beside_opening`].
    pub fn superblock_for_opening(&mut self) -> (u64, Buf) {
        let superblocks = &mut self.superblocks;
        superblocks.is_told_once = superblocks.damaged_blocks > 0 || !superblocks.lost.is_empty();
        let last = &mut superblocks.last;
        last.incarnation.set(last.incarnation.get() + 1);
        last.clean_head = U64::new(u64::MAX);
        last.ahead = U64::new(self.ahead.named());
        self.lost_from = self.next_sequence();
        self.superblocks.next()
    }
}
