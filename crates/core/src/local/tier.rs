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

use super::map::{BlockState, Blocks};
use super::sums::Sum;
use super::{Action, Config, Home, Purpose};
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
    total_blocks: u64,
    left_blocks: u64,
    cursor: u64,
    urgent: VecDeque<u64>,
    copies: BTreeMap<u64, Copy>,
    failures: u32,
    pub trouble: Option<IoError>,
    retry_at: Option<Nanos>,
    moved_at: Nanos,
    /// The commit that makes its moment durable.
    moment: u64,
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
}

impl Home {
    pub(super) fn begin_tier(&mut self) {
        if self.failed.is_some() {
            return;
        }
        let tier = &mut self.tier;
        if tier.wanted && tier.phase != Phase::Idle {
            tier.again = true;
        } else if !tier.wanted {
            // One that was cancelled while it was being finished has its moment behind it.
            tier.again = tier.phase != Phase::Idle;
            tier.wanted = true;
            tier.retry_at = None;
        }
    }

    /// Whether the backend is held, or is to be.
    pub(super) fn is_to_be_held(&self) -> bool {
        self.tier.hold != Hold::No
    }

    /// Whether the backend is held, or is to be as the tier leaves it that is under way.
    pub(super) fn is_to_be_held_next(&self) -> bool {
        matches!(self.tier.hold, Hold::Coming | Hold::Held)
    }

    /// Whether the backend was given something that no flush has covered.
    pub(super) fn has_unflushed(&self) -> bool {
        self.tier.unflushed_blocks > 0
    }

    /// Have a tier end, since only that covers what the backend was given.
    pub(super) fn have_it_flushed(&mut self) {
        if self.tier.is_at_rest() && !self.tier.wanted {
            self.begin_tier();
        }
    }

    /// Whether nothing of a tier is under way, also of one that was given up.
    pub(super) fn tier_is_at_rest(&self) -> bool {
        self.tier.is_at_rest()
    }

    /// Give a tier up that is copying; another one begins when it may.
    pub(super) fn restart_tier(&mut self) {
        if matches!(self.tier.phase, Phase::Recording | Phase::Copying) {
            self.abandon_tier();
        }
    }

    pub(super) fn cancel_tier(&mut self) {
        self.tier_fails_resize(IoError::Failed);
        self.tier.wanted = false;
        self.tier.again = false;
        self.tier.retry_at = None;
        self.tier.hold = Hold::No;
        if matches!(self.tier.phase, Phase::Recording | Phase::Copying) {
            self.abandon_tier();
        }
    }

    /// Let go of a tier. What is being written to the backend ends before another one begins.
    pub(super) fn abandon_tier(&mut self) {
        let tier = &mut self.tier;
        tier.phase = Phase::Idle;
        tier.again = false;
        tier.pending = Blocks::default();
        tier.unchanged = Blocks::default();
        tier.urgent.clear();
        for copy in tier.copies.values_mut() {
            copy.is_orphan = true;
        }
        (tier.total_blocks, tier.left_blocks) = (0, 0);
    }

    /// What the checksums of these blocks are cannot be read.
    pub(super) fn refuse_tier(&mut self, blocks: &Range<u64>, error: IoError) {
        if self.tier.pending.next(blocks.clone()).is_some() {
            self.tier_failed(error);
        }
    }

    fn tier_failed(&mut self, error: IoError) {
        self.tier_fails_resize(error);
        self.abandon_tier();
        let tier = &mut self.tier;
        if tier.hold == Hold::Coming {
            tier.hold = Hold::Wanted;
        }
        tier.trouble = Some(error);
        let pause = PAUSE_MIN.0 << tier.failures.min(10);
        tier.failures += 1;
        tier.retry_at = Some(self.now.plus(Nanos(pause.min(PAUSE_MAX.0))));
    }

    /// Go on with a tier as far as its phases go.
    pub(super) fn pump_tier(&mut self, actions: &mut Vec<Action>) {
        if self.failed.is_some() {
            return;
        }
        if self.tier.retry_at.is_some_and(|at| self.now >= at) {
            self.tier.retry_at = None;
        }
        if self.tier_gives_up_at().is_some_and(|at| self.now >= at) {
            self.tier_failed(IoError::Unreachable);
        }
        if let Phase::Committing(number) = self.tier.phase
            && self.commit.done >= number
        {
            let tier = &mut self.tier;
            tier.phase = Phase::Idle;
            tier.wanted = core::mem::take(&mut tier.again);
            tier.ended();
            self.status.tiers += 1;
        }
        if self.tier.phase == Phase::Idle {
            self.try_moment();
        }
        // There may be nothing to record; then no commit comes that would call this once more.
        let is_recorded = self.commit.is_between() || self.tier.is_atomic;
        let is_recorded = is_recorded && self.commit.done >= self.tier.moment;
        if self.tier.phase == Phase::Recording && is_recorded {
            self.tier.phase = Phase::Copying;
            self.tier.moved_at = self.now;
        }
        if self.tier.phase == Phase::Marking {
            self.mark();
        }
        let is_all = self.tier.pending.count() == 0;
        let tier = &mut self.tier;
        let is_idle = tier.phase == Phase::Copying && tier.copies.is_empty() && !tier.is_flushing;
        if is_idle && (is_all || tier.must_flush(&self.config)) {
            if is_all {
                tier.phase = Phase::Flushing;
                tier.urgent.clear();
            }
            tier.is_flushing = true;
            let token = self.token(Purpose::TierFlush);
            actions.push(Action::BackendFlush { token });
        }
    }

    /// Whether a tier waits for its moment, and for nothing else.
    fn awaits_moment(&self) -> bool {
        let tier = &self.tier;
        let is_free = tier.retry_at.is_none() && tier.copies.is_empty() && !tier.is_flushing;
        let may_begin = tier.wanted && tier.phase == Phase::Idle && is_free;
        may_begin && tier.hold != Hold::Held && !self.keeps_tiers_off()
    }

    /// Whether no write begins, so that a flush leaves the moment that a tier waits for.
    pub(super) fn holds_writes(&self) -> bool {
        self.awaits_moment() && self.commit.is_due()
    }

    /// Whether that flush has to wait for writes that have begun.
    pub(super) fn awaits_writes(&mut self) -> bool {
        let is_begun = self.writes.iter().any(|write| write.is_begun);
        if !is_begun || !self.holds_writes() {
            self.tier.holds_since = None;
            return false;
        }
        self.tier.holds_since.get_or_insert(self.now);
        if self.hold_ends_at().is_some_and(|at| self.now < at) {
            return true;
        }
        self.tier.holds_since = None;
        self.tier.holds_given_up += 1;
        self.tier.retry_at = Some(self.now.plus(PAUSE_MAX));
        false
    }

    /// When a flush no longer waits for writes.
    fn hold_ends_at(&self) -> Option<Nanos> {
        let max = HOLD_MIN.0 << self.tier.holds_given_up.min(10);
        let since = self.tier.holds_since?;
        Some(since.plus(Nanos(max.min(PATIENCE.0))))
    }

    /// Take the state of this moment, if it is one that a flush has left.
    fn try_moment(&mut self) {
        if self.awaits_moment() && !self.is_changed && self.commit.is_idle() {
            self.take_moment();
        }
    }

    /// A flush begins, and no write is under way: take the state that it will have made durable.
    pub(super) fn take_moment_of_flush(&mut self) {
        if self.awaits_moment() {
            self.take_moment();
        }
    }

    fn take_moment(&mut self) {
        debug_assert!(!self.writes.iter().any(|write| write.is_begun));
        let (pending, unchanged) = (Blocks::owed(&self.map), Blocks::owed(&self.map));
        let tier = &mut self.tier;
        tier.pending = pending;
        tier.unchanged = unchanged;
        tier.total_blocks = tier.pending.count();
        tier.left_blocks = tier.total_blocks;
        tier.cursor = 0;
        if tier.hold == Hold::Wanted {
            tier.hold = Hold::Coming;
        }
        tier.moment = self.commit.begun;
        tier.holds_given_up = 0;
        if tier.total_blocks == 0 && !self.commit.is_between() {
            tier.wanted = false;
            tier.trouble = None;
            tier.ended();
            self.status.tiers += 1;
            return;
        }
        tier.phase = Phase::Recording;
        // What those left there that were given up is of no state, until all of this one covers it.
        let max = self.config.flush_every_blocks;
        let is_small = self.map.blocks() <= max && tier.unflushed_blocks <= max;
        tier.is_atomic = self.config.backend_atomic && is_small;
        if !tier.is_atomic {
            self.commit.set_between(true);
        }
    }

    /// Whether one of these blocks is to be read for a copy before it is written. It is read next.
    pub(super) fn must_copy_first(&mut self, blocks: &Range<u64>) -> bool {
        let Some(block) = self.tier.pending.next(blocks.clone()) else {
            return false;
        };
        if !self.tier.urgent.contains(&block) {
            self.tier.urgent.push_back(block);
        }
        true
    }

    /// Begin copies.
    pub(super) fn pump_copies(&mut self, actions: &mut Vec<Action>) {
        if self.tier.phase != Phase::Copying || self.tier.is_flushing {
            return;
        }
        while !self.tier.must_flush(&self.config)
            && self.tier.copies.len() < COPIES_MAX
            && let Some(blocks) = self.next_copy()
        {
            if !self.begin_copy(blocks, actions) {
                return;
            }
        }
    }

    /// The next blocks to copy: what a write waits for, then all others in their order.
    fn next_copy(&mut self) -> Option<Range<u64>> {
        while let Some(&block) = self.tier.urgent.front() {
            if self.tier.pending.contains(block) && !self.is_being_read(block) {
                return Some(self.run_to_copy(block));
            }
            self.tier.urgent.pop_front();
        }
        loop {
            let block = self.tier.pending.next(self.tier.cursor..u64::MAX)?;
            // What is before it was read, or is being read.
            self.tier.cursor = block;
            if !self.is_being_read(block) {
                return Some(self.run_to_copy(block));
            }
            self.tier.cursor = block + 1;
        }
    }

    fn is_being_read(&self, block: u64) -> bool {
        let mut copies = self.tier.copies.values();
        copies.any(|copy| copy.reading && copy.blocks.contains(&block))
    }

    fn run_to_copy(&self, first: u64) -> Range<u64> {
        let end = self.map.blocks().min(first + REQUEST_BLOCKS_MAX as u64);
        let end = self.map.run_end(first, end, |state| state);
        let mut blocks = first + 1..end;
        let is_other =
            |&block: &u64| !self.tier.pending.contains(block) || self.is_being_read(block);
        first..blocks.find(is_other).unwrap_or(end)
    }

    /// Begin to copy blocks; false if there is no memory for that.
    fn begin_copy(&mut self, blocks: Range<u64>, actions: &mut Vec<Action>) -> bool {
        let count = blocks.end - blocks.start;
        let bytes = count * BLOCK;
        let id = self.number();
        let is_zero = self.map.get(blocks.start) == BlockState::Zero;
        let mut expected = Vec::new();
        if !is_zero {
            if !self.sums.ready(&blocks) {
                return false;
            }
            let first = blocks.start * BLOCK_SECTORS;
            expected = self
                .sums
                .expected(SectorRange::new(first, count * BLOCK_SECTORS));
        }
        if is_zero {
            self.tier.pending.remove(blocks.clone());
            let token = self.token(Purpose::CopyWrite(id));
            let offset = blocks.start * BLOCK;
            actions.push(Action::BackendZero {
                token,
                offset,
                bytes,
            });
        } else {
            let Some(buf) = self.pool.alloc(bytes as usize) else {
                return false;
            };
            let token = self.token(Purpose::CopyRead(id));
            actions.push(Action::StoreRead {
                token,
                offset: self.layout().data_offset(blocks.start * BLOCK),
                buf,
            });
        }
        let copy = Copy {
            blocks,
            reading: !is_zero,
            is_orphan: false,
            expected,
        };
        self.tier.copies.insert(id, copy);
        self.tier.unflushed_blocks += count;
        true
    }

    /// Blocks of a copy were read: from now on they may be written.
    pub(super) fn copy_was_read(
        &mut self,
        id: u64,
        result: Result<Done, IoError>,
        actions: &mut Vec<Action>,
    ) {
        let copy = self.tier.copies.get_mut(&id).expect("it was under way");
        copy.reading = false;
        let (blocks, is_orphan) = (copy.blocks.clone(), copy.is_orphan);
        let expected = core::mem::take(&mut copy.expected);
        let result = match result {
            // What is written by now is of no tier.
            Ok(Done::Read(mut buf)) if !is_orphan => self
                .open(blocks.start * BLOCK_SECTORS, &expected, &mut buf, actions)
                .map(|()| Done::Read(buf)),
            other => other,
        };
        let data = match result {
            Ok(Done::Read(buf)) => buf.freeze(),
            Ok(_) => unreachable!("a read brings its buffer"),
            Err(error) => {
                self.tier.copies.remove(&id);
                if !is_orphan {
                    self.tier_failed(error);
                }
                return;
            }
        };
        if is_orphan {
            self.tier.copies.remove(&id);
            return;
        }
        self.tier.pending.remove(blocks.clone());
        let token = self.token(Purpose::CopyWrite(id));
        let offset = blocks.start * BLOCK;
        actions.push(Action::BackendWrite {
            token,
            offset,
            data,
        });
    }

    /// Blocks were written to the backend.
    pub(super) fn copied(&mut self, id: u64, result: Result<(), IoError>) {
        let copy = self.tier.copies.remove(&id).expect("it was under way");
        if copy.is_orphan {
            return;
        }
        if let Err(error) = result {
            return self.tier_failed(error);
        }
        let blocks = copy.blocks.end - copy.blocks.start;
        self.tier.left_blocks -= blocks;
        self.tier.moved_at = self.now;
        self.status.tiered_bytes += blocks * BLOCK;
    }

    /// The backend has made all of it durable, or not.
    pub(super) fn tier_flushed(&mut self, result: Result<(), IoError>) {
        self.tier.is_flushing = false;
        if result.is_ok() {
            // Nothing is given to it meanwhile.
            self.tier.unflushed_blocks = 0;
        }
        match (self.tier.phase, result) {
            (Phase::Copying, Ok(())) => self.tier.moved_at = self.now,
            (Phase::Flushing, Ok(())) => {
                self.tier.failures = 0;
                self.tier.trouble = None;
                self.tier.phase = Phase::Marking;
                self.tier.cursor = 0;
            }
            (Phase::Copying | Phase::Flushing, Err(error)) => self.tier_failed(error),
            // Of one that was given up.
            _ => {}
        }
    }

    /// What is as it was at the moment is the same in the backend.
    fn mark(&mut self) {
        for _ in 0..MARKS_MAX {
            let Some(block) = self.tier.unchanged.next(self.tier.cursor..u64::MAX) else {
                let again = self.tier.again;
                self.abandon_tier();
                self.tier.again = again;
                self.commit.set_between(false);
                self.commit.wanted = true;
                self.tier.phase = Phase::Committing(self.commit.begun + 1);
                return;
            };
            self.tier.unchanged.remove(block..block + 1);
            self.tier.cursor = block + 1;
            let state = match self.map.get(block) {
                BlockState::Zero => BlockState::Absent,
                _ => BlockState::Clean,
            };
            self.set(block..block + 1, state);
        }
    }

    pub(super) fn tier_state(&self) -> TierState {
        match self.tier.phase {
            Phase::Idle if self.tier.hold == Hold::Held => TierState::Held,
            Phase::Idle if !self.tier.wanted => TierState::Idle,
            Phase::Idle if self.tier.retry_at.is_some() => TierState::Pausing,
            Phase::Idle => TierState::Waiting,
            Phase::Recording | Phase::Copying => TierState::Copying,
            Phase::Flushing | Phase::Marking | Phase::Committing(_) => TierState::Finishing,
        }
    }

    /// Bytes of the tier in all, and still to go.
    pub(super) fn tier_progress(&self) -> (u64, u64) {
        let tier = &self.tier;
        (tier.total_blocks * BLOCK, tier.left_blocks * BLOCK)
    }

    /// When a tier is given up that a write waits for.
    fn tier_gives_up_at(&self) -> Option<Nanos> {
        let since = self
            .writes
            .iter()
            .filter_map(|write| write.waits_since)
            .min()?;
        let since = since.max(self.tier.moved_at);
        (self.tier.phase == Phase::Copying).then_some(since.plus(PATIENCE))
    }

    pub(super) fn tier_wakeup(&self) -> Option<Nanos> {
        if self.tier.phase == Phase::Marking {
            return Some(self.now);
        }
        let retry = self.tier.retry_at.filter(|_| self.tier.wanted);
        let times = [retry, self.hold_ends_at(), self.tier_gives_up_at()];
        times.into_iter().flatten().min()
    }

    pub(super) fn check_tier(&self) {
        let tier = &self.tier;
        let is_none = tier.pending.count() == 0 && tier.urgent.is_empty();
        debug_assert!(
            matches!(tier.phase, Phase::Recording | Phase::Copying) || is_none,
            "blocks are to be copied for no tier"
        );
        let copies = tier.copies.values().filter(|copy| !copy.is_orphan);
        debug_assert!(copies.count() == 0 || tier.phase == Phase::Copying);
        debug_assert!(
            tier.hold != Hold::Held || tier.is_at_rest(),
            "the backend is held while it is written"
        );
    }
}
