//! Destage: which generation goes to the backend, when, and in which writes.
//!
//! ```text
//!  Idle ─start─► Planning ─► Writing ─all written─► Flushing ─flushed─► Forgetting ─► Invalidating
//!   ▲                          ▲                        │                                 │ durable
//!   │                          └────── flush failed ────┘  every write again              ▼
//!   └───────────────────────────────── Retiring ◄────────────────────────────────── Committing
//! ```
//!
//! Planning, Forgetting and Retiring touch every entry; they go in steps, between which clients are
//! served.
//!
//! Invariants:
//! 1. One generation at a time: no write of the next before this one is committed. It holds no sync
//!    point, unless the backend is atomic: then nothing of it can be seen before all of it.
//! 2. Inside a generation the last write of a sector wins, and only that is written. What a later
//!    write covers that is durable in the log and has no sync point before it is left out too, for
//!    both lie between the same two sync points; see [`Lead`] for how long.
//! 3. A failed write is tried again after a pause; after a failed flush every write is repeated,
//!    for a backend may have dropped what it could not flush.
//! 4. A later write of the same kind that lies next to one of the generation is written along with it,
//!    unless the backend is atomic. It is remembered until the log forgets it: it is not written again,
//!    and nothing older goes there any more.
//! 5. What an atomic backend may hold already, since a flush took effect that was never heard of, is in
//!    the next generation again, whole: a generation ends where the log or its bounds do, so one
//!    that is taken up anew from the same tail is never shorter.
//! 6. A generation is committed only after all its writes, a flush that followed them, and the
//!    durable invalidation of what the cache held of them.
//!
//! It decides; [`crate::volume`] performs.

use alloc::vec::Vec;
use core::ops::Range;

use crate::extent_index::{ExtentIndex, Sequence};
use crate::format::EntryKind;
use crate::io::{Nanos, SectorRange};
use crate::limits::{REQUEST_BYTES_MAX, SECTOR_BYTES};
use crate::read_cache::Barrier;
use crate::write_log::{Span, WriteLog};

// The bounds of a generation may grow from one version to the next and never shrink, for the sake
// of the fifth invariant.

/// Share of the ring that one generation takes at most, as a divisor: space comes back in steps
/// small enough for admission to stay smooth.
const BATCH_RING_DIVISOR: u64 = 8;
/// Largest batch in bytes: bounds the time to commit.
const BATCH_BYTES_MAX: u64 = 64 << 20;
/// Most entries in one batch: bounds the plan's memory.
const BATCH_ENTRIES_MAX: u64 = 8 << 10;
/// Entries handled in one step: some ten microseconds, for which clients wait.
const STEP_ENTRIES: u64 = 128;
/// Most parts gathered in one backend write.
const ITEM_PARTS_MAX: usize = 256;
/// Blocks of compressed entries that are read from the log at once for it, each entry rounded up to a power of
/// two of them.
const ITEM_PACKED_BLOCKS_MAX: u64 = 512;
/// Sectors on either side of a write that are looked through for later writes to go along with it:
/// backends charge by the request, up to some ten KiB.
const GATHER_SECTORS: u64 = 64;
/// Most runs remembered as written ahead of their turn: bounds their memory.
const AHEAD_RUNS_MAX: usize = 32 << 10;
/// First and longest pause after a backend failure.
const RETRY_MIN: Nanos = Nanos::from_millis(10);
const RETRY_MAX: Nanos = Nanos::from_millis(2000);

/// Where the destage of the present generation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No generation is taken up.
    Idle,
    /// What to write is being found out.
    Planning,
    /// Its writes are under way.
    Writing,
    /// The backend is being flushed.
    Flushing,
    /// The cache is being told what was overwritten, so far for so many items.
    Forgetting(usize),
    /// The cache makes its invalidations durable.
    Invalidating(Barrier),
    /// The superblock is being written.
    Committing,
    /// The superblock no longer names the generation. What memory still has of its items becomes
    /// clean, so far of so many; then the log forgets it.
    Retiring(usize),
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
    /// Those of them that went along with earlier generations.
    ahead_bytes: u64,
    /// The end of its entries.
    end: Sequence,
    /// Log blocks that it gives back.
    freed_blocks: u64,
    next: usize,
    done: usize,
}

impl Plan {
    /// Data bytes of its entries that were never written, since later ones replaced them.
    pub fn coalesced_bytes(&self) -> u64 {
        let parts = self.items.iter().flat_map(|item| &item.parts);
        let own = parts.filter(|part| part.sequence < self.end);
        let written: u64 = own.map(|part| part.range.bytes() as u64).sum();
        self.bytes.saturating_sub(written + self.ahead_bytes)
    }
}

/// What is being found out for a plan.
#[derive(Debug, Default)]
struct Planning {
    map: ExtentIndex,
    entries: Range<Sequence>,
    /// Writes before this one are durable and have no sync point between them and the generation.
    covers_before: Sequence,
    /// Writes behind the generation and before this one may go along with it.
    gathers_before: Sequence,
}

impl Planning {
    /// Have what is next to `piece` in the volume, and waits in the log behind the generation,
    /// written along with it. Reading it from the log costs less than a backend write of its own.
    fn gather(&mut self, piece: SectorRange, log: &WriteLog, sectors: &Sectors<'_>) {
        let behind = self.entries.end..self.gathers_before;
        if behind.is_empty() {
            return;
        }
        let goes_along = |&(range, last): &(SectorRange, Option<Sequence>)| {
            last.filter(|sequence| behind.contains(sequence))
                .is_some_and(|sequence| {
                    log.entry(sequence).kind == EntryKind::Write
                        && !sectors.was_written(range, sequence)
                })
        };
        let start = piece.start.saturating_sub(GATHER_SECTORS);
        let before: Vec<_> = sectors
            .index
            .pieces(SectorRange::between(start, piece.start))
            .collect();
        let after = SectorRange::new(piece.end(), GATHER_SECTORS).intersect(sectors.volume);
        let after = sectors.index.pieces(after).take_while(goes_along);
        let before = before.into_iter().rev().take_while(goes_along);
        for (range, sequence) in before.chain(after) {
            self.map.insert(range, sequence.expect("it goes along"));
        }
    }
}

/// What a plan is made from.
struct Sectors<'a> {
    volume: SectorRange,
    /// The last write of each sector in the log.
    index: &'a ExtentIndex,
    /// What the backend was given ahead of its turn.
    ahead: &'a ExtentIndex,
}

impl Sectors<'_> {
    /// Whether the backend has a part of `range` as of `sequence` or later already.
    fn was_written(&self, range: SectorRange, sequence: Sequence) -> bool {
        self.ahead.overlaps(range).any(|(_, had)| had >= sequence)
    }
}

/// How long writes beyond the generation may stand in for those in it.
///
/// A sector that is overwritten all the time would never reach the backend. So from the first write
/// that is left out this goes on for half of the greatest age, and then everything that is in the log
/// by then is destaged before it begins again.
#[derive(Debug, Default)]
struct Lead {
    /// When the oldest write was accepted that may have been left out and not been made up for.
    since: Option<Nanos>,
    /// Nothing is left out until the log begins here: then all is made up for.
    settles_at: Option<Sequence>,
}

impl Lead {
    /// Whether a generation that begins now may leave out what is covered beyond it.
    fn allows(&mut self, now: Nanos, log: &WriteLog, age_max: Nanos) -> bool {
        if self.settles_at.is_none()
            && self
                .since
                .is_some_and(|since| now >= since.plus(Nanos(age_max.0 / 2)))
        {
            self.settles_at = Some(log.next_sequence());
        }
        self.settles_at.is_none()
    }

    /// The log begins later than it did.
    fn retired(&mut self, log: &WriteLog) {
        let first = log.first_sequence();
        if self.settles_at.is_some_and(|at| first >= at) || first == log.next_sequence() {
            *self = Self::default();
        }
    }
}

/// The destage of one volume.
#[derive(Debug)]
pub struct Destage {
    stage: Stage,
    planning: Planning,
    lead: Lead,
    plan: Plan,
    /// Later writes that went along with a generation that is flushed.
    ahead: ExtentIndex,
    busy: usize,
    /// The backend was asked for writes that are not known to be flushed.
    unflushed: bool,
    /// A flush that somebody else asked for has failed since: what was written may be gone.
    doubted: bool,
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
            planning: Planning::default(),
            lead: Lead::default(),
            plan: Plan::default(),
            ahead: ExtentIndex::default(),
            busy: 0,
            unflushed: false,
            doubted: false,
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

    /// Whether the backend was asked for writes that are not known to be flushed.
    pub fn has_unflushed(&self) -> bool {
        self.unflushed
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

    /// Take up the oldest generation, cut to a batch, if something durable waits. Writes from
    /// `covers_before` on never stand in for older ones, and none for longer than `age_max` allows.
    /// Over an `atomic` backend it goes on past sync points. Returns whether there is one.
    pub fn start(
        &mut self,
        now: Nanos,
        log: &WriteLog,
        covers_before: Sequence,
        age_max: Nanos,
        atomic: bool,
    ) -> bool {
        debug_assert_eq!(self.stage, Stage::Idle);
        let spans = batch_spans(log, atomic);
        if spans == 0 {
            return false;
        }
        let last = &log.spans()[spans - 1];
        let entries = log.first_sequence()..last.end_sequence;
        // Past a sync point that lies inside the generation, nothing stands in for anything.
        let interval_end = interval_end(log).min(covers_before).max(entries.end);
        let covers_before = if self.lead.allows(now, log, age_max) {
            // What is in memory alone, since the log's device failed, is lost in a crash: it stands in for nothing.
            interval_end.min(log.durable_sequence()).max(entries.end)
        } else {
            entries.end
        };
        let gathers = !atomic && self.ahead.len() < AHEAD_RUNS_MAX;
        let end = entries.end;
        self.planning = Planning {
            map: ExtentIndex::default(),
            entries,
            covers_before,
            gathers_before: if gathers { interval_end } else { end },
        };
        self.plan = Plan {
            spans,
            items: Vec::new(),
            bytes: last.bytes_end - log.bytes().retired,
            ahead_bytes: 0,
            end,
            freed_blocks: last.end() - log.spans()[0].position,
            next: 0,
            done: 0,
        };
        self.stage = Stage::Planning;
        self.doubted = false;
        self.started = now;
        true
    }

    /// Plan some more. `index` names the last write of each sector in the log; `sectors` is the size
    /// of the volume. Returns whether the plan is made, and its writes may begin.
    pub fn plan_some(&mut self, log: &WriteLog, index: &ExtentIndex, sectors: u64) -> bool {
        debug_assert_eq!(self.stage, Stage::Planning);
        let sectors = Sectors {
            volume: SectorRange::new(0, sectors),
            index,
            ahead: &self.ahead,
        };
        let planning = &mut self.planning;
        for _ in 0..STEP_ENTRIES.min(planning.entries.end - planning.entries.start) {
            let sequence = planning.entries.start;
            planning.entries.start += 1;
            let range = log.entry(sequence).range.intersect(sectors.volume);
            for (piece, last) in index.pieces(range) {
                let last = last.unwrap_or(sequence);
                if last != sequence && last < planning.covers_before {
                    if last >= self.plan.end && self.lead.since.is_none() {
                        self.lead.since = log.oldest_since();
                    }
                    continue;
                }
                for (piece, had) in sectors.ahead.pieces(piece) {
                    if had.is_some_and(|had| had >= sequence) {
                        if had == Some(sequence) {
                            self.plan.ahead_bytes += piece.bytes() as u64;
                        }
                        continue;
                    }
                    planning.map.insert(piece, sequence);
                    planning.gather(piece, log, &sectors);
                }
            }
        }
        if !planning.entries.is_empty() {
            return false;
        }
        self.plan.items = items(log, &planning.map);
        self.planning = Planning::default();
        self.stage = Stage::Writing;
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
        self.unflushed = true;
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
        if ready && self.doubted {
            self.repeat(now);
            return false;
        }
        if ready {
            self.stage = Stage::Flushing;
        }
        ready
    }

    /// A flush that was not its own has failed. It may have lost what was written so far, and told nobody else:
    /// its own would succeed.
    pub fn doubt(&mut self) {
        self.doubted = self.unflushed;
    }

    fn repeat(&mut self, now: Nanos) {
        for item in &mut self.plan.items {
            item.state = ItemState::Waiting;
        }
        (self.plan.next, self.plan.done) = (0, 0);
        self.stage = Stage::Writing;
        self.doubted = false;
        self.fail(now);
    }

    /// The flush ended.
    pub fn flushed(&mut self, now: Nanos, ok: bool) {
        debug_assert_eq!(self.stage, Stage::Flushing);
        if ok && !self.doubted {
            self.unflushed = false;
            self.pause = RETRY_MIN;
            self.stage = Stage::Forgetting(0);
            for part in self.plan.items.iter().flat_map(|item| &item.parts) {
                if part.sequence >= self.plan.end {
                    self.ahead.insert(part.range, part.sequence);
                }
            }
            return;
        }
        self.repeat(now);
    }

    /// The next items whose ranges the cache is to forget; none once it was told of all.
    pub fn forget_some(&mut self) -> Vec<SectorRange> {
        let Stage::Forgetting(next) = &mut self.stage else {
            return Vec::new();
        };
        let items = self.plan.items[*next..].iter().take(STEP_ENTRIES as usize);
        let ranges: Vec<_> = items.map(|item| item.range).collect();
        *next += ranges.len();
        ranges
    }

    /// The cache was told to forget what the generation overwrote; wait for its barrier.
    pub fn invalidating(&mut self, barrier: Barrier) {
        debug_assert_eq!(self.stage, Stage::Forgetting(self.plan.items.len()));
        self.stage = Stage::Invalidating(barrier);
    }

    /// The superblock is on its way, perhaps once more: to be kept beside the device, which has failed.
    pub fn committing(&mut self) {
        debug_assert!(matches!(
            self.stage,
            Stage::Invalidating(_) | Stage::Committing
        ));
        self.stage = Stage::Committing;
    }

    /// The superblock no longer names the generation.
    pub fn committed(&mut self) {
        debug_assert_eq!(self.stage, Stage::Committing);
        self.stage = Stage::Retiring(0);
    }

    /// The next items of what is retired; none once all were named.
    pub fn keep_some(&mut self) -> Range<usize> {
        let Stage::Retiring(next) = &mut self.stage else {
            return 0..0;
        };
        let from = *next;
        *next = self.plan.items.len().min(from + STEP_ENTRIES as usize);
        from..*next
    }

    /// How many spans to retire next.
    pub fn spans_to_retire(&self, log: &WriteLog) -> usize {
        debug_assert_eq!(self.stage, Stage::Retiring(self.plan.items.len()));
        let enough = log.first_sequence() + STEP_ENTRIES;
        let spans = log.spans().iter().take(self.plan.spans - 1);
        1 + spans.take_while(|span| span.end_sequence < enough).count()
    }

    /// When the oldest write was accepted that the backend may lack, though the log no longer has it.
    pub fn left_out_since(&self) -> Option<Nanos> {
        self.lead.since
    }

    /// The log has no write of `range` before `limit` any more.
    pub fn forget_ahead(&mut self, range: SectorRange, limit: Sequence) {
        self.ahead.remove_before(range, limit);
    }

    /// So many spans are retired. Returns the plan once all are.
    pub fn retired(&mut self, now: Nanos, spans: usize, log: &WriteLog) -> Option<Plan> {
        self.lead.retired(log);
        debug_assert!(matches!(self.stage, Stage::Retiring(_)));
        self.plan.spans -= spans;
        if self.plan.spans > 0 {
            return None;
        }
        self.stage = Stage::Idle;
        let seconds = (now.since(self.started).0 as f64 / 1e9).max(1e-4);
        let freed_blocks = self.plan.freed_blocks;
        let rate = freed_blocks as f64 / seconds;
        self.rate_blocks = if self.rate_blocks == 0.0 {
            rate
        } else {
            self.rate_blocks * 0.75 + rate * 0.25
        };
        Some(core::mem::take(&mut self.plan))
    }

    /// Give the generation up (the volume closes); nothing of it may be under way.
    pub fn abandon(&mut self) {
        debug_assert!(self.busy == 0 && matches!(self.stage, Stage::Planning | Stage::Writing));
        self.stage = Stage::Idle;
        self.planning = Planning::default();
        self.plan = Plan::default();
        self.retry_at = None;
    }
}

/// How many of the oldest spans make the next batch: durable, bounded, and without a sync point
/// between them unless the backend is `atomic`.
fn batch_spans(log: &WriteLog, atomic: bool) -> usize {
    let Some(front) = log.spans().front() else {
        return 0;
    };
    let blocks_max = (log.ring_blocks() / BATCH_RING_DIVISOR).max(1);
    let bytes_end = log.bytes().retired + BATCH_BYTES_MAX;
    let fits = log.spans().iter().take_while(|span| {
        span.end() <= log.durable()
            && (atomic || span.sync_points == front.sync_points)
            && span.end() - front.position <= blocks_max
            && span.bytes_end <= bytes_end
            && span.end_sequence - log.first_sequence() <= BATCH_ENTRIES_MAX
    });
    let alone = usize::from(front.end() <= log.durable());
    fits.count().max(alone)
}

/// The end of the writes that are durable and have no sync point between them and the log's oldest.
fn interval_end(log: &WriteLog) -> Sequence {
    let spans = log.spans();
    let Some(front) = spans.front() else {
        return log.first_sequence();
    };
    let within = |span: &Span| span.end() <= log.durable() && span.sync_points == front.sync_points;
    match spans.partition_point(within).checked_sub(1) {
        Some(last) => spans[last].end_sequence,
        None => log.first_sequence(),
    }
}

/// Merge adjacent pieces into writes of at most one request. They are in the order of the volume,
/// which a backend likes, as long as memory has their data; else in the order in which the log has the
/// first of each, so that reading the log for them is sequential.
fn items(log: &WriteLog, map: &ExtentIndex) -> Vec<Item> {
    let mut items: Vec<Item> = Vec::new();
    let mut resident = true;
    // Of the last item.
    let mut packed_blocks = 0;
    for (range, sequence) in map.iter() {
        let entry = log.entry(sequence);
        resident &= entry.kind != EntryKind::Write || entry.data.is_some();
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
        let packed = entry
            .stored
            .map_or(0, |stored| stored.block_count().next_power_of_two());
        packed_blocks += packed;
        match items.last_mut() {
            Some(last)
                if !last.parts.is_empty()
                    && packed_blocks <= ITEM_PACKED_BLOCKS_MAX
                    && last.parts.len() < ITEM_PARTS_MAX
                    && last.range.end() == range.start
                    && (last.range.count + range.count) * SECTOR_BYTES as u64
                        <= REQUEST_BYTES_MAX as u64 =>
            {
                last.range.count += range.count;
                last.parts.push(part);
            }
            _ => {
                packed_blocks = packed;
                items.push(Item {
                    range,
                    parts: Vec::from([part]),
                    unmap: false,
                    state: ItemState::Waiting,
                });
            }
        }
    }
    if !resident {
        items.sort_by_key(|item| item.parts.iter().map(|part| part.sequence).min());
    }
    items
}
