//! The SSD tier as the shards of a node share it: one, behind a lock.
//!
//! ```text
//!  shard 0:  DRAM tier ─┐
//!  shard 1:  DRAM tier ─┼─ lock ─ SSD tier (index, segments, journal) ─ cache device
//!  shard 2:  DRAM tier ─┘
//! ```
//!
//! A shard takes the lock where a step first touches the tier, and gives it back at the end of that step. So whatever one
//! step does to the tier happens at once for the others, and a step that does not touch it (a write to a log, a hit in
//! DRAM) takes no lock. What shards ask at every turn is said beside the lock. Whichever shard's step lets the tier act
//! performs that: operations of one tier may be under way on the rings of several shards.
//!
//! Invariants:
//! 1. No shard waits for anything while it has the lock.
//! 2. What is said beside the lock is what was so when the lock was last given back.
//! 3. A shard whose volumes wait for the tier is told of what has changed since it looked: it says that it waits, and then
//!    looks whether something has; whoever changes something says so, and then looks who waits.

use alloc::sync::Arc;
use core::cell::{Cell, RefCell};
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{ArcMutexGuard, Mutex, RawMutex};

use super::SsdState;
use super::ssd::Ssd;
use crate::base::io::Nanos;

/// More shards than this cannot share a tier: each has a bit.
const SHARDS_MAX: u32 = u64::BITS;

/// What is asked of the tier at every turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// Up to where invalidations are durable.
    pub persisted: u64,
    pub losses: u64,
    pub forgotten_volumes: u64,
    pub must_reset: bool,
    pub can_readmit: bool,
    state: SsdState,
}

impl Said {
    fn of(ssd: &Ssd) -> Self {
        Self {
            persisted: ssd.persisted(),
            losses: ssd.store.counters.losses,
            forgotten_volumes: ssd.store.counters.forgotten_volumes,
            must_reset: ssd.must_reset(),
            can_readmit: ssd.can_readmit(),
            state: ssd.state(),
        }
    }
}

/// The same beside the lock. Each value is right on its own; they may be of different moments.
#[derive(Debug, Default)]
struct Board {
    persisted: AtomicU64,
    losses: AtomicU64,
    forgotten_volumes: AtomicU64,
    must_reset: AtomicBool,
    can_readmit: AtomicBool,
    /// Whether a poll may go further although nothing has ended.
    may_go_on: AtomicBool,
    changes: AtomicU64,
    /// A bit for each shard that waits.
    waiting: AtomicU64,
}

struct Guarded {
    ssd: Ssd,
    /// What is on the board.
    said: Said,
    /// Since when it has been in its state.
    since: Nanos,
    /// Whether an operation has ended, or it has begun anew.
    has_changed: bool,
}

struct Inner {
    /// In an `Arc` of its own for the sake of guards that are kept.
    guarded: Arc<Mutex<Guarded>>,
    board: Board,
    line_blocks: u64,
}

/// The SSD tier of a node, on its way to another shard.
#[derive(Clone)]
pub struct SharedTier(Arc<Inner>);

impl SharedTier {
    pub(super) fn new(ssd: Ssd, line_blocks: u64) -> Self {
        let said = Said::default();
        let guarded = Guarded {
            ssd,
            said,
            since: Nanos(0),
            has_changed: true,
        };
        Self(Arc::new(Inner {
            guarded: Arc::new(Mutex::new(guarded)),
            board: Board::default(),
            line_blocks,
        }))
    }

    pub(super) fn line_blocks(&self) -> u64 {
        self.0.line_blocks
    }

    /// The tier as a shard sees it.
    pub(super) fn of(&self, shard: u32) -> Tier {
        assert!(shard < SHARDS_MAX);
        let tier = Tier {
            inner: Arc::clone(&self.0),
            bit: 1 << shard,
            held: RefCell::default(),
            touched: Cell::new(true),
            wakeup: Cell::new(None),
            to_tell: Cell::new(0),
        };
        // So that it is said what is so.
        tier.with(|_| ());
        tier.release();
        tier
    }
}

impl fmt::Debug for SharedTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedTier")
    }
}

/// See the module.
pub(super) struct Tier {
    inner: Arc<Inner>,
    bit: u64,
    /// The lock, if this shard has it.
    held: RefCell<Option<ArcMutexGuard<RawMutex, Guarded>>>,
    /// Whether this shard has touched the tier since it was last polled.
    touched: Cell<bool>,
    /// When the tier has to be polled, as this shard left it.
    wakeup: Cell<Option<Nanos>>,
    /// Shards that waited for what this one has changed.
    to_tell: Cell<u64>,
}

impl Tier {
    pub fn shared(&self) -> SharedTier {
        SharedTier(Arc::clone(&self.inner))
    }

    /// Look at the tier; this shard has its lock until [`Self::release`].
    pub fn with<T>(&self, look: impl FnOnce(&Ssd) -> T) -> T {
        let mut held = self.held.borrow_mut();
        look(
            &held
                .get_or_insert_with(|| self.inner.guarded.lock_arc())
                .ssd,
        )
    }

    /// Change the tier; this shard has its lock until [`Self::release`].
    pub fn get_mut(&mut self) -> &mut Ssd {
        self.touched.set(true);
        &mut self.guarded().ssd
    }

    fn guarded(&mut self) -> &mut Guarded {
        let held = self.held.get_mut();
        held.get_or_insert_with(|| self.inner.guarded.lock_arc())
    }

    /// Whether this is the shard that keeps it, the first one.
    pub fn is_kept(&self) -> bool {
        self.bit == 1
    }

    /// Since when it has been in its state.
    pub fn since(&self) -> Nanos {
        let mut held = self.held.borrow_mut();
        (held.get_or_insert_with(|| self.inner.guarded.lock_arc())).since
    }

    /// What is so now.
    #[inline]
    pub fn said(&self) -> Said {
        if let Some(guarded) = &*self.held.borrow() {
            return Said::of(&guarded.ssd);
        }
        let board = &self.inner.board;
        Said {
            persisted: board.persisted.load(Ordering::Acquire),
            losses: board.losses.load(Ordering::Relaxed),
            forgotten_volumes: board.forgotten_volumes.load(Ordering::Relaxed),
            must_reset: board.must_reset.load(Ordering::Relaxed),
            can_readmit: board.can_readmit.load(Ordering::Relaxed),
            state: SsdState::Off,
        }
    }

    /// Whether a poll may have something to do: this shard has touched the tier, or its time has come, or there
    /// was more to do than one poll does.
    pub fn is_due(&self, now: Nanos) -> bool {
        self.touched.get()
            || self.inner.board.may_go_on.load(Ordering::Relaxed)
            || self.wakeup.get().is_some_and(|wakeup| wakeup <= now)
    }

    /// When it is to be polled at the latest, if this shard does nothing before.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        match &*self.held.borrow() {
            Some(guarded) => wakeup_of(&guarded.ssd),
            None => self.wakeup.get(),
        }
    }

    /// A step of the tier has ended; whether that was the end of an operation, or a new beginning.
    pub fn stepped(&mut self, now: Nanos, has_changed: bool) {
        let guarded = self.guarded();
        guarded.has_changed |= has_changed;
        if guarded.ssd.state() != guarded.said.state {
            guarded.since = now;
        }
        self.touched.set(false);
    }

    /// Give the lock back, and say what is so.
    #[inline]
    pub fn release(&self) {
        let held = self.held.borrow_mut().take();
        if let Some(mut guarded) = held {
            self.publish(&mut guarded);
        }
    }

    fn publish(&self, guarded: &mut Guarded) {
        let board = &self.inner.board;
        self.wakeup.set(wakeup_of(&guarded.ssd));
        (board.may_go_on).store(guarded.ssd.may_go_on(), Ordering::Relaxed);
        let said = Said::of(&guarded.ssd);
        if said == guarded.said && !core::mem::take(&mut guarded.has_changed) {
            return;
        }
        guarded.said = said;
        guarded.has_changed = false;
        board.persisted.store(said.persisted, Ordering::Release);
        board.losses.store(said.losses, Ordering::Relaxed);
        (board.forgotten_volumes).store(said.forgotten_volumes, Ordering::Relaxed);
        board.must_reset.store(said.must_reset, Ordering::Relaxed);
        board.can_readmit.store(said.can_readmit, Ordering::Relaxed);
        board.changes.fetch_add(1, Ordering::SeqCst);
        let others = !self.bit;
        if board.waiting.load(Ordering::SeqCst) & others != 0 {
            let waiting = board.waiting.fetch_and(!others, Ordering::SeqCst) & others;
            self.to_tell.set(self.to_tell.get() | waiting);
        }
    }

    pub fn changes(&self) -> u64 {
        self.inner.board.changes.load(Ordering::SeqCst)
    }

    pub fn wait_for_changes(&self) {
        self.inner
            .board
            .waiting
            .fetch_or(self.bit, Ordering::SeqCst);
    }

    pub fn take_waiting(&self) -> u64 {
        self.to_tell.take()
    }
}

fn wakeup_of(ssd: &Ssd) -> Option<Nanos> {
    if ssd.has_forgotten() {
        ssd.next_wakeup()
    } else {
        Some(Nanos(0))
    }
}

impl fmt::Debug for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tier({:?})", self.said())
    }
}
