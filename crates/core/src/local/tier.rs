//! Tiering out: the state of one moment goes to the backend, while writes go on.
//!
//! ```text
//!   idle ──► waiting ──► recording ──► copying ──► flushing ──► marking ──► idle
//!     ▲         │ the moment: nothing was written since a flush     │
//!     └─────────┴── cancelled, failed (begins anew after a pause) ◄─┘ (not any more when the backend is flushed)
//! ```
//!
//! Clients that write past the log leave no such moment by themselves. So while a tier waits for one, a flush
//! makes one: the writes that have begun end first, no other begins before that, and what is there then is the moment.
//! It is copied once the flush has made it durable.
//!
//! Of a tier that did not end, the backend may have anything: unless its flushes are atomic, the superblock
//! says so until another one ends. Nothing that it copied became clean, so the next one copies all of it.
//!
//! A tier may be asked to hold the backend as it leaves it, for a snapshot of that. No other one begins then.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::ops::Range;

use super::map::{BlockState, Blocks, Map};
use super::store::{Purpose, Store};
use super::sums::Sum;
use super::writes::Writes;
use super::{Action, Config};
use crate::base::error::IoError;
use crate::base::io::{Done, Nanos, SectorRange};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, REQUEST_BLOCKS_MAX};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Copies under way at most.
const COPIES_MAX: usize = 4;
/// First and longest pause after a failure of the backend.
const PAUSE_MIN: Nanos = Nanos::from_millis(100);
const PAUSE_MAX: Nanos = Nanos::from_millis(5_000);
/// A write waits so long for a tier that does not get on; then the tier is given up.
const PATIENCE: Nanos = Nanos::from_millis(5_000);
/// A flush, and the writes behind it, wait no longer for the writes that have begun, one of which may wait for the
/// backend: then another flush is to make the moment, after the longest pause. It may wait for twice as long, up
/// to [`PATIENCE`].
const HOLD_MIN: Nanos = Nanos::from_millis(200);
/// Blocks that are marked at once, so that nobody waits for long.
const MARKS_MAX: usize = 1 << 16;

/// What tiering out is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TierState {
    /// Nothing.
    #[default]
    Idle,
    /// Waiting for a moment in which nothing was written since a flush.
    Waiting,
    /// Waiting after a failure of the backend, or after a write that has kept it from its moment for too long.
    Pausing,
    /// Copying.
    Copying,
    /// Making it durable in the backend, and recording that.
    Finishing,
    /// It has ended, and the backend stays as it has left it.
    Held,
}

/// Whether the backend is to stay as a tier leaves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Hold {
    #[default]
    No,
    /// As the next tier leaves it that begins.
    Wanted,
    /// As the one leaves it that is under way.
    Coming,
    /// It does.
    Held,
}

/// Where a tier is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Idle,
    Recording,
    Copying,
    Flushing,
    Marking,
    /// The marks are made by the commit with this number.
    Committing(u64),
}

#[derive(Debug)]
struct Copy {
    blocks: Range<u64>,
    /// Whether it is still to be read from the store.
    reading: bool,
    /// Whether the backend is told to zero them, and given no data.
    is_zero: bool,
    /// Whether it is of a tier that was given up.
    is_orphan: bool,
    /// The checksums of what is read.
    expected: Vec<Sum>,
}

/// The tier that is under way.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct Tier {
    pub wanted: bool,
    /// Asked for again since its moment: another one follows.
    again: bool,
    phase: Phase,
    pub hold: Hold,
    /// Blocks of its moment that are still to be read.
    pending: Blocks,
    /// Blocks that are still as they were at its moment.
    unchanged: Blocks,
    /// Blocks of data of its moment, and how many of them are not copied. Zeroes are no bytes to copy.
    total_blocks: u64,
    left_blocks: u64,
    cursor: u64,
    urgent: VecDeque<u64>,
    copies: BTreeMap<u64, Copy>,
    failures: u32,
    pub trouble: Option<IoError>,
    /// Why one failed or is not to be, since a change of size began to wait for it.
    pub failure: Option<IoError>,
    /// Whether none begins, because the size changes.
    pub is_kept_off: bool,
    retry_at: Option<Nanos>,
    moved_at: Nanos,
    /// The commit that makes its moment durable, and when that was.
    moment: u64,
    moment_at: Nanos,
    /// Since when a flush waits for the writes that have begun.
    holds_since: Option<Nanos>,
    /// How often that was given up.
    holds_given_up: u32,
    /// Whether it shows as a whole, with its last flush.
    is_atomic: bool,
    /// Blocks copied since the backend was flushed, also by tiers that were given up, and whether it is being flushed.
    unflushed_blocks: u64,
    is_flushing: bool,
}

impl Tier {
    /// Blocks are about to be written.
    pub fn rewritten(&mut self, blocks: Range<u64>) {
        self.unchanged.remove(blocks);
    }

    /// Whether nothing of one is under way, also of one that was given up.
    pub fn is_at_rest(&self) -> bool {
        self.phase == Phase::Idle && self.copies.is_empty() && !self.is_flushing
    }

    /// Whether the backend is flushed before it gets more.
    fn must_flush(&self, config: &Config) -> bool {
        !self.is_atomic && self.unflushed_blocks >= config.flush_every_blocks
    }

    /// The backend has the state of its moment.
    fn ended(&mut self) {
        if self.hold == Hold::Coming {
            self.hold = Hold::Held;
        }
    }

    /// Have everything tiered out, as of a moment that is still to come.
    pub fn begin(&mut self, store: &Store) {
        if store.failed.is_some() {
            return;
        }
        if self.wanted && self.phase != Phase::Idle {
            self.again = true;
        } else if !self.wanted {
            // One that was cancelled while it was being finished has its moment behind it.
            self.again = self.phase != Phase::Idle;
            self.wanted = true;
            self.retry_at = None;
        }
    }

    /// Whether the backend is held, or is to be.
    pub fn is_to_be_held(&self) -> bool {
        self.hold != Hold::No
    }

    /// Whether the backend is held, or is to be as the tier leaves it that is under way.
    pub fn is_to_be_held_next(&self) -> bool {
        matches!(self.hold, Hold::Coming | Hold::Held)
    }

    /// Whether the backend was given something that no flush has covered.
    pub fn has_unflushed(&self) -> bool {
        self.unflushed_blocks > 0
    }

    /// Have a tier end, since only that covers what the backend was given.
    pub fn have_it_flushed(&mut self, store: &Store) {
        if self.is_at_rest() && !self.wanted {
            self.begin(store);
        }
    }

    /// Give a tier up that is copying; another one begins when it may.
    pub fn restart(&mut self) {
        if matches!(self.phase, Phase::Recording | Phase::Copying) {
            self.abandon();
        }
    }

    /// Stop it, and hold nothing.
    pub fn cancel(&mut self) {
        self.failure = Some(IoError::Failed);
        self.wanted = false;
        self.again = false;
        self.retry_at = None;
        self.hold = Hold::No;
        self.restart();
    }

    /// What is durable is not known any more: none ends well.
    pub fn give_up(&mut self) {
        self.abandon();
        self.wanted = false;
        self.hold = Hold::No;
        self.holds_since = None;
    }

    /// Let go of a tier. What is being written to the backend ends before another one begins.
    fn abandon(&mut self) {
        self.phase = Phase::Idle;
        self.again = false;
        self.pending = Blocks::default();
        self.unchanged = Blocks::default();
        self.urgent.clear();
        for copy in self.copies.values_mut() {
            copy.is_orphan = true;
        }
        (self.total_blocks, self.left_blocks) = (0, 0);
    }

    /// What the checksums of these blocks are cannot be read.
    pub fn refuse(&mut self, blocks: &Range<u64>, error: IoError, now: Nanos) {
        if self.pending.next(blocks.clone()).is_some() {
            self.fail(error, now);
        }
    }

    fn fail(&mut self, error: IoError, now: Nanos) {
        self.failure = Some(error);
        self.abandon();
        if self.hold == Hold::Coming {
            self.hold = Hold::Wanted;
        }
        self.trouble = Some(error);
        let pause = PAUSE_MIN.0 << self.failures.min(10);
        self.failures += 1;
        self.retry_at = Some(now.plus(Nanos(pause.min(PAUSE_MAX.0))));
    }

    /// Go on with a tier as far as its phases go.
    pub fn pump(&mut self, store: &mut Store, writes: &Writes, actions: &mut Vec<Action>) {
        if store.failed.is_some() {
            return;
        }
        if self.retry_at.is_some_and(|at| store.now >= at) {
            self.retry_at = None;
        }
        if self.gives_up_at(writes).is_some_and(|at| store.now >= at) {
            self.fail(IoError::Unreachable, store.now);
        }
        if let Phase::Committing(number) = self.phase
            && store.commit.done >= number
        {
            self.phase = Phase::Idle;
            self.wanted = core::mem::take(&mut self.again);
            self.ended();
            store.status.tiers += 1;
            // What is still owed was written after that.
            store.owed_since = Some(self.moment_at);
        }
        if self.phase == Phase::Idle {
            self.try_moment(store, writes);
        }
        // There may be nothing to record; then no commit comes that would call this once more.
        let is_recorded = store.commit.is_between() || self.is_atomic;
        let is_recorded = is_recorded && store.commit.done >= self.moment;
        if self.phase == Phase::Recording && is_recorded {
            self.phase = Phase::Copying;
            self.moved_at = store.now;
        }
        if self.phase == Phase::Marking {
            self.mark(store);
        }
        let is_all = self.pending.count() == 0;
        let is_idle = self.phase == Phase::Copying && self.copies.is_empty() && !self.is_flushing;
        if is_idle && (is_all || self.must_flush(&store.config)) {
            if is_all {
                self.phase = Phase::Flushing;
                self.urgent.clear();
            }
            self.is_flushing = true;
            let token = store.token(Purpose::TierFlush);
            actions.push(Action::BackendFlush { token });
        }
    }

    /// Whether a tier waits for its moment, and for nothing else.
    fn awaits_moment(&self) -> bool {
        let is_free = self.retry_at.is_none() && self.copies.is_empty() && !self.is_flushing;
        let may_begin = self.wanted && self.phase == Phase::Idle && is_free;
        may_begin && self.hold != Hold::Held && !self.is_kept_off
    }

    /// Whether no write begins, so that a flush leaves the moment that a tier waits for.
    pub fn holds_writes(&self, store: &Store) -> bool {
        self.awaits_moment() && store.commit.is_due()
    }

    /// Whether that flush has to wait for writes that have begun.
    pub fn awaits_writes(&mut self, store: &Store, writes: &Writes) -> bool {
        if !writes.any_begun() || !self.holds_writes(store) {
            self.holds_since = None;
            return false;
        }
        self.holds_since.get_or_insert(store.now);
        if self.hold_ends_at().is_some_and(|at| store.now < at) {
            return true;
        }
        self.holds_since = None;
        self.holds_given_up += 1;
        self.retry_at = Some(store.now.plus(PAUSE_MAX));
        false
    }

    /// When a flush no longer waits for writes.
    fn hold_ends_at(&self) -> Option<Nanos> {
        let max = HOLD_MIN.0 << self.holds_given_up.min(10);
        let since = self.holds_since?;
        Some(since.plus(Nanos(max.min(PATIENCE.0))))
    }

    /// Take the state of this moment, if it is one that a flush has left.
    fn try_moment(&mut self, store: &mut Store, writes: &Writes) {
        if self.awaits_moment() && !writes.is_changed && store.commit.is_idle() {
            debug_assert!(!writes.any_begun());
            self.take_moment(store);
        }
    }

    /// A flush begins, and no write is under way: take the state that it will have made durable.
    pub fn take_moment_of_flush(&mut self, store: &mut Store) {
        if self.awaits_moment() {
            self.take_moment(store);
        }
    }

    fn take_moment(&mut self, store: &mut Store) {
        let (pending, unchanged) = (Blocks::owed(&store.map), Blocks::owed(&store.map));
        self.pending = pending;
        self.unchanged = unchanged;
        self.total_blocks = store.map.count(BlockState::Dirty);
        self.left_blocks = self.total_blocks;
        self.cursor = 0;
        if self.hold == Hold::Wanted {
            self.hold = Hold::Coming;
        }
        self.moment = store.commit.begun;
        self.moment_at = store.now;
        self.holds_given_up = 0;
        if self.pending.count() == 0 && !store.commit.is_between() {
            self.wanted = false;
            self.trouble = None;
            self.ended();
            store.status.tiers += 1;
            return;
        }
        self.phase = Phase::Recording;
        // What those left there that were given up is of no state, until all of this one covers it.
        let max = store.config.flush_every_blocks;
        let is_small = store.map.blocks() <= max && self.unflushed_blocks <= max;
        self.is_atomic = store.config.backend_atomic && is_small;
        if !self.is_atomic {
            store.commit.set_between(true);
        }
    }

    /// Whether one of these blocks is to be read for a copy before it is written. It is read next.
    pub fn must_copy_first(&mut self, blocks: &Range<u64>) -> bool {
        let Some(block) = self.pending.next(blocks.clone()) else {
            return false;
        };
        if !self.urgent.contains(&block) {
            self.urgent.push_back(block);
        }
        true
    }

    /// Begin copies.
    pub fn pump_copies(&mut self, store: &mut Store, actions: &mut Vec<Action>) {
        if self.phase != Phase::Copying || self.is_flushing {
            return;
        }
        while !self.must_flush(&store.config)
            && self.copies.len() < COPIES_MAX
            && let Some(blocks) = self.next_copy(&store.map)
        {
            if !self.begin_copy(blocks, store, actions) {
                return;
            }
        }
    }

    /// The next blocks to copy: what a write waits for, then all others in their order.
    fn next_copy(&mut self, map: &Map) -> Option<Range<u64>> {
        while let Some(&block) = self.urgent.front() {
            if self.pending.contains(block) && !self.is_being_read(block) {
                return Some(self.run_to_copy(block, map));
            }
            self.urgent.pop_front();
        }
        loop {
            let block = self.pending.next(self.cursor..u64::MAX)?;
            // What is before it was read, or is being read.
            self.cursor = block;
            if !self.is_being_read(block) {
                return Some(self.run_to_copy(block, map));
            }
            self.cursor = block + 1;
        }
    }

    fn is_being_read(&self, block: u64) -> bool {
        let mut copies = self.copies.values();
        copies.any(|copy| copy.reading && copy.blocks.contains(&block))
    }

    fn run_to_copy(&self, first: u64, map: &Map) -> Range<u64> {
        let end = map.blocks().min(first + REQUEST_BLOCKS_MAX as u64);
        let end = map.run_end(first, end, |state| state);
        let mut blocks = first + 1..end;
        let is_other = |&block: &u64| !self.pending.contains(block) || self.is_being_read(block);
        first..blocks.find(is_other).unwrap_or(end)
    }

    /// Begin to copy blocks; false if there is no memory for that.
    fn begin_copy(
        &mut self,
        blocks: Range<u64>,
        store: &mut Store,
        actions: &mut Vec<Action>,
    ) -> bool {
        let count = blocks.end - blocks.start;
        let bytes = count * BLOCK;
        let id = store.number();
        let is_zero = store.map.get(blocks.start) == BlockState::Zero;
        let mut expected = Vec::new();
        if !is_zero {
            if !store.sums.ready(&blocks) {
                return false;
            }
            let first = blocks.start * BLOCK_SECTORS;
            expected = store
                .sums
                .expected(SectorRange::new(first, count * BLOCK_SECTORS));
        }
        if is_zero {
            self.pending.remove(blocks.clone());
            let token = store.token(Purpose::CopyWrite(id));
            let offset = blocks.start * BLOCK;
            actions.push(Action::BackendZero {
                token,
                offset,
                bytes,
            });
        } else {
            let Some(buf) = store.pool.alloc(bytes as usize) else {
                return false;
            };
            let token = store.token(Purpose::CopyRead(id));
            actions.push(Action::StoreRead {
                token,
                offset: store.layout().data_offset(blocks.start * BLOCK),
                buf,
            });
        }
        let copy = Copy {
            blocks,
            reading: !is_zero,
            is_zero,
            is_orphan: false,
            expected,
        };
        self.copies.insert(id, copy);
        self.unflushed_blocks += count;
        true
    }

    /// Blocks of a copy were read: from now on they may be written.
    pub fn copy_was_read(
        &mut self,
        id: u64,
        result: Result<Done, IoError>,
        store: &mut Store,
        actions: &mut Vec<Action>,
    ) {
        let copy = self.copies.get_mut(&id).expect("it was under way");
        copy.reading = false;
        let (blocks, is_orphan) = (copy.blocks.clone(), copy.is_orphan);
        let expected = core::mem::take(&mut copy.expected);
        let result = match result {
            // What is written by now is of no tier.
            Ok(Done::Read(mut buf)) if !is_orphan => store
                .open(blocks.start * BLOCK_SECTORS, &expected, &mut buf, actions)
                .map(|()| Done::Read(buf)),
            other => other,
        };
        let data = match result {
            Ok(Done::Read(buf)) => buf.freeze(),
            Ok(_) => unreachable!("a read brings its buffer"),
            Err(error) => {
                self.copies.remove(&id);
                if !is_orphan {
                    self.fail(error, store.now);
                }
                return;
            }
        };
        if is_orphan {
            self.copies.remove(&id);
            return;
        }
        self.pending.remove(blocks.clone());
        let token = store.token(Purpose::CopyWrite(id));
        let offset = blocks.start * BLOCK;
        actions.push(Action::BackendWrite {
            token,
            offset,
            data,
        });
    }

    /// Blocks were written to the backend.
    pub fn copied(&mut self, id: u64, result: Result<(), IoError>, store: &mut Store) {
        let copy = self.copies.remove(&id).expect("it was under way");
        if copy.is_orphan {
            return;
        }
        if let Err(error) = result {
            return self.fail(error, store.now);
        }
        let blocks = copy.blocks.end - copy.blocks.start;
        self.moved_at = store.now;
        if copy.is_zero {
            store.status.tiered_zero_bytes += blocks * BLOCK;
        } else {
            self.left_blocks -= blocks;
            store.status.tiered_bytes += blocks * BLOCK;
        }
    }

    /// The backend has made all of it durable, or not.
    pub fn flushed(&mut self, result: Result<(), IoError>, now: Nanos) {
        self.is_flushing = false;
        if result.is_ok() {
            // Nothing is given to it meanwhile.
            self.unflushed_blocks = 0;
        }
        match (self.phase, result) {
            (Phase::Copying, Ok(())) => self.moved_at = now,
            (Phase::Flushing, Ok(())) => {
                self.failures = 0;
                self.trouble = None;
                self.phase = Phase::Marking;
                self.cursor = 0;
            }
            (Phase::Copying | Phase::Flushing, Err(error)) => self.fail(error, now),
            // Of one that was given up.
            _ => {}
        }
    }

    /// What is as it was at the moment is the same in the backend.
    fn mark(&mut self, store: &mut Store) {
        for _ in 0..MARKS_MAX {
            let Some(block) = self.unchanged.next(self.cursor..u64::MAX) else {
                let again = self.again;
                self.abandon();
                self.again = again;
                store.commit.set_between(false);
                store.commit.wanted = true;
                self.phase = Phase::Committing(store.commit.begun + 1);
                return;
            };
            self.unchanged.remove(block..block + 1);
            self.cursor = block + 1;
            let state = match store.map.get(block) {
                BlockState::Zero => BlockState::Absent,
                _ => BlockState::Clean,
            };
            store.set(block..block + 1, state);
        }
    }

    /// What it is doing.
    pub fn state(&self) -> TierState {
        match self.phase {
            Phase::Idle if self.hold == Hold::Held => TierState::Held,
            Phase::Idle if !self.wanted => TierState::Idle,
            Phase::Idle if self.retry_at.is_some() => TierState::Pausing,
            Phase::Idle => TierState::Waiting,
            Phase::Recording | Phase::Copying => TierState::Copying,
            Phase::Flushing | Phase::Marking | Phase::Committing(_) => TierState::Finishing,
        }
    }

    /// Bytes of data of the tier in all, and still to go.
    pub fn progress(&self) -> (u64, u64) {
        (self.total_blocks * BLOCK, self.left_blocks * BLOCK)
    }

    /// When a tier is given up that a write waits for.
    fn gives_up_at(&self, writes: &Writes) -> Option<Nanos> {
        let since = writes.waits_since()?;
        let since = since.max(self.moved_at);
        (self.phase == Phase::Copying).then_some(since.plus(PATIENCE))
    }

    /// When it goes on by itself.
    pub fn wakeup(&self, now: Nanos, writes: &Writes) -> Option<Nanos> {
        if self.phase == Phase::Marking {
            return Some(now);
        }
        let retry = self.retry_at.filter(|_| self.wanted);
        let times = [retry, self.hold_ends_at(), self.gives_up_at(writes)];
        times.into_iter().flatten().min()
    }

    /// Assert what must always hold.
    pub fn check_invariants(&self) {
        let is_none = self.pending.count() == 0 && self.urgent.is_empty();
        debug_assert!(
            matches!(self.phase, Phase::Recording | Phase::Copying) || is_none,
            "blocks are to be copied for no tier"
        );
        let copies = self.copies.values().filter(|copy| !copy.is_orphan);
        debug_assert!(copies.count() == 0 || self.phase == Phase::Copying);
        debug_assert!(
            self.hold != Hold::Held || self.is_at_rest(),
            "the backend is held while it is written"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tier_that_is_given_up_waits_for_no_write() {
        let mut tier = Tier {
            wanted: true,
            holds_since: Some(Nanos(7)),
            ..Tier::default()
        };
        assert!(tier.hold_ends_at().is_some());
        tier.give_up();
        assert_eq!(tier.hold_ends_at(), None);
    }
}
