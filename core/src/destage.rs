//! Destage: which generation goes to the backend, when, and in which writes.
//!
//! ```text
//!  Idle ─start─► Writing ─all written─► Flushing ─flushed─► Invalidating ─durable─► Committing ─► Idle
//!                  ▲                        │                                      (superblock)
//!                  └────── flush failed ────┘   every write of the generation again
//! ```
//!
//! Invariants:
//! 1. One generation at a time: no write of the next before this one is committed.
//! 2. Inside a generation the last write of a sector wins, and only that is written.
//! 3. A failed write is tried again after a pause; after a failed flush every write is repeated,
//!    for a backend may have dropped what it could not flush.
//! 4. A generation is committed only after all its writes, a flush that followed them, and the
//!    durable invalidation of what the cache held of them.
//!
//! It decides; [`crate::volume`] performs.

use alloc::vec::Vec;

use crate::extent_index::{ExtentIndex, Sequence};
use crate::format::EntryKind;
use crate::io::{Nanos, SectorRange};
use crate::limits::{REQUEST_BYTES_MAX, SECTOR_BYTES};
use crate::read_cache::Barrier;
use crate::write_log::WriteLog;

/// Share of the ring that one generation takes at most, as a divisor: space comes back in steps
/// small enough for admission to stay smooth.
const BATCH_RING_DIVISOR: u64 = 16;
/// Largest batch in bytes: bounds the plan's memory and the time to commit.
const BATCH_BYTES_MAX: u64 = 64 << 20;
/// Most entries in one batch: planning and retiring it are single steps of about a microsecond an
/// entry, and clients wait meanwhile.
const BATCH_ENTRIES_MAX: u64 = 4 << 10;
/// Most parts gathered in one backend write.
const ITEM_PARTS_MAX: usize = 256;
/// First and longest pause after a backend failure.
const RETRY_MIN: Nanos = Nanos::from_millis(10);
const RETRY_MAX: Nanos = Nanos::from_millis(2000);

/// Where the destage of the present generation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No generation is taken up.
    Idle,
    /// Its writes are under way.
    Writing,
    /// The backend is being flushed.
    Flushing,
    /// The cache makes its invalidations durable.
    Invalidating(Barrier),
    /// The superblock is being written.
    Committing,
}

/// A run of one entry's sectors within an item.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Which sectors.
    pub range: SectorRange,
    /// Of which entry.
    pub sequence: Sequence,
}

/// One backend write.
#[derive(Clone, Debug)]
pub struct Item {
    /// Which sectors.
    pub range: SectorRange,
    /// Where the data is, in order; for a zeroing, empty.
    pub parts: Vec<Part>,
    /// For a zeroing, whether the backend may give the space back.
    pub unmap: bool,
    /// Parts whose data is still being read from the log, and whether the write is out.
    pub state: ItemState,
}

/// How far one item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemState {
    /// Not begun, or to be repeated.
    Waiting,
    /// Its data is being read, or it is being written.
    Busy,
    /// Written.
    Done,
}

/// The generation that is taken up.
#[derive(Debug, Default)]
pub struct Plan {
    /// Spans that it retires.
    pub spans: usize,
    /// Its writes.
    pub items: Vec<Item>,
    /// Data bytes of its entries.
    pub bytes: u64,
    next: usize,
    done: usize,
}

/// The destage of one volume.
#[derive(Debug)]
pub struct Destage {
    stage: Stage,
    plan: Plan,
    busy: usize,
    retry_at: Option<Nanos>,
    pause: Nanos,
    started: Nanos,
    /// Log blocks that destage frees a second, smoothed.
    rate_blocks: f64,
}

impl Default for Destage {
    fn default() -> Self {
        Self {
            stage: Stage::Idle,
            plan: Plan::default(),
            busy: 0,
            retry_at: None,
            pause: RETRY_MIN,
            started: Nanos(0),
            rate_blocks: 0.0,
        }
    }
}

impl Destage {
    /// Where the present generation is.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The generation that is taken up.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Items being read or written.
    pub fn busy(&self) -> usize {
        self.busy
    }

    /// Whether the backend failed and has not done anything since.
    pub fn is_failing(&self) -> bool {
        self.pause > RETRY_MIN
    }

    /// Whether writes wait though none is under way and no pause is due: memory was short.
    pub fn is_postponed(&self) -> bool {
        self.stage == Stage::Writing && self.busy == 0 && self.retry_at.is_none()
    }

    /// When to try again after a failure.
    pub fn retry_at(&self) -> Option<Nanos> {
        self.retry_at
    }

    /// Log blocks freed a second, smoothed; 0 while nothing was freed yet.
    pub fn rate_blocks(&self) -> f64 {
        self.rate_blocks
    }

    /// Take up the oldest generation, cut to a batch, if something durable waits. `sectors` is the
    /// size of the volume. Returns whether there is one.
    pub fn start(&mut self, now: Nanos, log: &WriteLog, sectors: u64) -> bool {
        debug_assert_eq!(self.stage, Stage::Idle);
        let spans = batch_spans(log);
        if spans == 0 {
            return false;
        }
        let last = &log.spans()[spans - 1];
        let mut map = ExtentIndex::default();
        let volume = SectorRange::new(0, sectors);
        for sequence in log.first_sequence()..last.end_sequence {
            let range = log.entry(sequence).range.intersect(volume);
            if !range.is_empty() {
                map.insert(range, sequence);
            }
        }
        self.plan = Plan {
            spans,
            items: items(log, &map),
            bytes: last.bytes_end - log.bytes().retired,
            next: 0,
            done: 0,
        };
        self.stage = Stage::Writing;
        self.started = now;
        true
    }

    /// The next item to write, if one may begin now. The caller reads its data and writes it.
    pub fn next_item(&mut self, now: Nanos, depth: usize) -> Option<usize> {
        if self.stage != Stage::Writing || self.busy >= depth || self.retry_at > Some(now) {
            return None;
        }
        self.retry_at = None;
        let waiting = |item: &Item| item.state == ItemState::Waiting;
        let offset = self.plan.items[self.plan.next..].iter().position(waiting)?;
        let index = self.plan.next + offset;
        self.plan.next = index + 1;
        self.plan.items[index].state = ItemState::Busy;
        self.busy += 1;
        Some(index)
    }

    /// An item was written, or failed.
    pub fn item_done(&mut self, now: Nanos, index: usize, ok: bool) {
        self.busy -= 1;
        if ok {
            self.plan.items[index].state = ItemState::Done;
            self.plan.done += 1;
            self.pause = RETRY_MIN;
        } else {
            self.put_back(index);
            self.fail(now);
        }
    }

    /// An item could not begin (no buffer, say): it waits again.
    pub fn item_postponed(&mut self, index: usize) {
        self.busy -= 1;
        self.put_back(index);
    }

    fn put_back(&mut self, index: usize) {
        self.plan.items[index].state = ItemState::Waiting;
        self.plan.next = self.plan.next.min(index);
    }

    fn fail(&mut self, now: Nanos) {
        self.retry_at = Some(now.plus(self.pause));
        self.pause = Nanos((self.pause.0 * 2).min(RETRY_MAX.0));
    }

    /// Whether every item is written and the backend should be flushed now; the stage moves on.
    pub fn begin_flush(&mut self, now: Nanos) -> bool {
        let ready = self.stage == Stage::Writing
            && self.plan.done == self.plan.items.len()
            && self.retry_at <= Some(now);
        if ready {
            self.stage = Stage::Flushing;
        }
        ready
    }

    /// The flush ended.
    pub fn flushed(&mut self, now: Nanos, ok: bool) {
        debug_assert_eq!(self.stage, Stage::Flushing);
        if ok {
            self.pause = RETRY_MIN;
            return;
        }
        for item in &mut self.plan.items {
            item.state = ItemState::Waiting;
        }
        (self.plan.next, self.plan.done) = (0, 0);
        self.stage = Stage::Writing;
        self.fail(now);
    }

    /// The cache was told to forget what the generation overwrote; wait for its barrier.
    pub fn invalidating(&mut self, barrier: Barrier) {
        debug_assert_eq!(self.stage, Stage::Flushing);
        self.stage = Stage::Invalidating(barrier);
    }

    /// The superblock is on its way.
    pub fn committing(&mut self) {
        debug_assert!(matches!(self.stage, Stage::Invalidating(_)));
        self.stage = Stage::Committing;
    }

    /// The generation is retired, freeing so many blocks of the ring.
    pub fn committed(&mut self, now: Nanos, freed_blocks: u64) -> Plan {
        debug_assert_eq!(self.stage, Stage::Committing);
        self.stage = Stage::Idle;
        let seconds = (now.since(self.started).0 as f64 / 1e9).max(1e-4);
        let rate = freed_blocks as f64 / seconds;
        self.rate_blocks = if self.rate_blocks == 0.0 {
            rate
        } else {
            self.rate_blocks * 0.75 + rate * 0.25
        };
        core::mem::take(&mut self.plan)
    }

    /// Give the generation up (the volume closes); nothing of it may be under way.
    pub fn abandon(&mut self) {
        debug_assert!(self.busy == 0 && self.stage == Stage::Writing);
        self.stage = Stage::Idle;
        self.plan = Plan::default();
        self.retry_at = None;
    }
}

/// How many of the oldest spans make the next batch: durable, of one generation, bounded.
fn batch_spans(log: &WriteLog) -> usize {
    let Some(front) = log.spans().front() else {
        return 0;
    };
    let blocks_max = (log.ring_blocks() / BATCH_RING_DIVISOR).max(1);
    let bytes_end = log.bytes().retired + BATCH_BYTES_MAX;
    let fits = log.spans().iter().take_while(|span| {
        span.end() <= log.durable()
            && span.sync_points == front.sync_points
            && span.end() - front.position <= blocks_max
            && span.bytes_end <= bytes_end
            && span.end_sequence - log.first_sequence() <= BATCH_ENTRIES_MAX
    });
    let alone = usize::from(front.end() <= log.durable());
    fits.count().max(alone)
}

/// Merge adjacent pieces into writes of at most one request.
fn items(log: &WriteLog, map: &ExtentIndex) -> Vec<Item> {
    let mut items: Vec<Item> = Vec::new();
    for (range, sequence) in map.iter() {
        let entry = log.entry(sequence);
        if entry.kind != EntryKind::Write {
            items.push(Item {
                range,
                parts: Vec::new(),
                unmap: !entry.no_hole,
                state: ItemState::Waiting,
            });
            continue;
        }
        let part = Part { range, sequence };
        match items.last_mut() {
            Some(last)
                if !last.parts.is_empty()
                    && last.parts.len() < ITEM_PARTS_MAX
                    && last.range.end() == range.start
                    && (last.range.count + range.count) * SECTOR_BYTES as u64
                        <= REQUEST_BYTES_MAX as u64 =>
            {
                last.range.count += range.count;
                last.parts.push(part);
            }
            _ => items.push(Item {
                range,
                parts: Vec::from([part]),
                unmap: false,
                state: ItemState::Waiting,
            }),
        }
    }
    items
}
