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
//! served. What a step costs is bounded whatever the entries cover: one that covers much takes many.
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

mod lead;
mod rate;

use alloc::collections::BinaryHeap;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::ops::Range;

use lead::Lead;
use rate::Rate;

use crate::base::io::{Nanos, SectorRange};
use crate::base::limits::{
    CACHE_PROBE_BLOCKS_MAX, DESTAGE_ENTRIES_MAX, DESTAGE_PIECE_BYTES, DESTAGE_PLAN_BYTES_ATOMIC,
    DESTAGE_PLAN_BYTES_LEAST, REQUEST_BYTES_MAX, RUN_BYTES, SECTOR_BYTES, STEP_WORK_MAX,
    ZERO_SECTORS_MAX, pieces_max,
};
use crate::base::work::Work;
use crate::cache::Barrier;
use crate::format::EntryKind;
use crate::log::budget::{IndexBudget, Share};
use crate::log::extent_index::{ExtentIndex, Sequence};
use crate::log::write_log::{Span, WriteLog};

// The bounds of a generation over an atomic backend may grow from one version to the next and never shrink, for the sake
// of the fifth invariant. Over others they are what `rate` says, and these at most.

/// Share of the ring that one generation takes at most, as a divisor: space comes back in steps.
const BATCH_RING_DIVISOR: u64 = 8;
/// Largest batch in bytes: bounds the time to commit.
const BATCH_BYTES_MAX: u64 = 64 << 20;
/// Most entries in one batch: bounds the plan's memory.
const BATCH_ENTRIES_MAX: u64 = DESTAGE_ENTRIES_MAX;
/// Entries retired in one step: some ten microseconds, for which clients wait.
const STEP_ENTRIES: u64 = 128;
/// Runs of the plan that one piece replaces at once.
const PIECE_RUNS_MAX: usize = 64;
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
    /// Those that are written with it.
    own_bytes: u64,
    /// The end of its entries.
    end: Sequence,
    /// Log blocks that it gives back.
    freed_blocks: u64,
    next: usize,
    done: usize,
    /// The first entry of which something may be left in the index, and what.
    listed: Sequence,
    listed_rest: Option<SectorRange>,
}

impl Plan {
    /// Log blocks that it gives back at its end and that nobody needs any more, about.
    pub fn written_blocks(&self) -> u64 {
        let blocks = u128::from(self.freed_blocks) * self.done as u128;
        (blocks / self.items.len().max(1) as u128) as u64
    }

    /// Data bytes of its entries that were never written, since later ones replaced them.
    pub fn coalesced_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.own_bytes + self.ahead_bytes)
    }
}

/// What one step of planning has brought.
#[derive(Debug)]
pub enum Planned {
    /// Another step is needed.
    Further,
    /// These items are as they stay.
    Items(Range<usize>),
    /// The plan is made, and its writes may begin.
    Whole,
}

/// Where planning is.
#[derive(Clone, Copy, Debug, Default)]
enum PlanStep {
    /// The entries are gone through.
    #[default]
    Entries,
    /// Pieces become items.
    Items,
    /// Items are put in the order of the log.
    Sorting,
    /// They are as they stay: so many were handed out.
    Handing(usize),
}

/// What is being found out for a plan.
#[derive(Debug, Default)]
struct Planning {
    step: PlanStep,
    map: ExtentIndex,
    entries: Range<Sequence>,
    /// What of the first of them is still to be looked at, if not all of it.
    rest: Option<SectorRange>,
    /// Pieces that entries were cut into, and how many there may be.
    pieces: usize,
    pieces_max: usize,
    /// Writes before this one are durable and have no sync point between them and the generation.
    covers_before: Sequence,
    /// Writes behind the generation and before this one may go along with it.
    gathers_before: Sequence,
    /// Some data is not in memory.
    reads_log: bool,
    /// Of the last item.
    packed_blocks: u64,
    /// Items by the first of their entries.
    by_entry: BinaryHeap<Reverse<(Sequence, usize)>>,
    sorted: Vec<Item>,
}

impl Planning {
    /// Have what is next to `piece` in the volume, and waits in the log behind the generation,
    /// written along with it. Reading it from the log costs less than a backend write of its own.
    /// Returns how many pieces were looked at.
    fn gather(&mut self, piece: SectorRange, log: &WriteLog, sectors: &Sectors<'_>) -> usize {
        let behind = self.entries.end..self.gathers_before;
        if behind.is_empty() || self.takes_all() || self.map.len() >= self.pieces_max {
            return 0;
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
        let mut looks = before.len() + 1;
        let before = before.into_iter().rev().take_while(goes_along);
        for (range, sequence) in before.chain(after) {
            self.map.insert(range, sequence.expect("it goes along"));
            looks += 1;
        }
        looks
    }

    /// Whether every entry is taken as it is from now on: once one is, those behind it have to be.
    fn takes_all(&self) -> bool {
        self.pieces >= self.pieces_max
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
    /// Nothing is taken up of the span that holds this position, nor behind it.
    stop_before: Option<u64>,
    retry_at: Option<Nanos>,
    /// The next pause after a write that fails.
    pause: Nanos,
    /// The same after a flush that fails: writes that succeed do not shorten it.
    flush_pause: Nanos,
    started: Nanos,
    /// When the present generation's last write had ended.
    written: Nanos,
    rate: Rate,
    /// Memory for the plan, and for what went along with earlier ones.
    share: Share,
    /// What the plan has of it.
    plan_bytes: u64,
    work: Work,
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
            stop_before: None,
            retry_at: None,
            pause: RETRY_MIN,
            flush_pause: RETRY_MIN,
            started: Nanos(0),
            written: Nanos(0),
            rate: Rate::default(),
            share: Share::default(),
            plan_bytes: 0,
            work: Work::default(),
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

    /// Whether the last write or flush of the backend failed.
    pub fn is_failing(&self) -> bool {
        self.pause.max(self.flush_pause) > RETRY_MIN
    }

    /// Whether writes wait though none is under way and no pause is due: memory was short.
    pub fn is_postponed(&self) -> bool {
        self.stage == Stage::Writing && self.busy == 0 && self.retry_at.is_none()
    }

    /// When to try again after a failure.
    pub fn retry_at(&self) -> Option<Nanos> {
        self.retry_at
    }

    /// Log blocks freed a second; 0 while nothing was freed yet.
    pub fn rate_blocks(&self, now: Nanos) -> f64 {
        (self.rate).blocks_s(self.plan.freed_blocks, now.since(self.started))
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
        let blocks_max = (log.ring_blocks() / BATCH_RING_DIVISOR).max(1);
        let blocks_max = if atomic {
            blocks_max
        } else {
            self.rate.generation_blocks(blocks_max)
        };
        let spans = batch_spans(log, blocks_max, atomic).min(self.spans_before_stop(log));
        if spans == 0 {
            return false;
        }
        let (spans, pieces_max) = self.reserve(spans, log, atomic);
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
        let ahead_bytes = DESTAGE_ENTRIES_MAX * RUN_BYTES;
        let gathers = !atomic && self.ahead.len() < AHEAD_RUNS_MAX && self.share.takes(ahead_bytes);
        let end = entries.end;
        let listed = entries.start;
        self.planning = Planning {
            entries,
            covers_before,
            gathers_before: if gathers { interval_end } else { end },
            pieces_max,
            ..Planning::default()
        };
        self.plan = Plan {
            spans,
            items: Vec::new(),
            bytes: last.bytes_end - log.bytes().retired,
            end,
            freed_blocks: last.end() - log.spans()[0].position,
            listed,
            ..Plan::default()
        };
        self.stage = Stage::Planning;
        self.doubted = false;
        self.started = now;
        true
    }

    /// The memory for plans is of this budget.
    pub fn set_budget(&mut self, budget: &Rc<IndexBudget>, atomic: bool) {
        let least = if atomic {
            DESTAGE_PLAN_BYTES_ATOMIC
        } else {
            DESTAGE_PLAN_BYTES_LEAST
        };
        self.share = Share::new(budget, least);
        self.charge();
    }

    /// That budget.
    pub fn budget(&self) -> &Rc<IndexBudget> {
        self.share.budget()
    }

    fn charge(&mut self) {
        let ahead_bytes = self.ahead.len() as u64 * RUN_BYTES;
        self.share.set(self.plan_bytes + ahead_bytes);
    }

    /// Take memory for the plan of a generation of so many spans: how many it may have, and into how many pieces its
    /// entries may be cut. Where memory is short, everything is written as it is, and then less at a time, unless the
    /// backend is atomic.
    fn reserve(&mut self, spans: usize, log: &WriteLog, atomic: bool) -> (usize, usize) {
        let entries_of = |spans: usize| log.spans()[spans - 1].end_sequence - log.first_sequence();
        // An entry that lies within another one cuts that in two.
        let bytes_of = |entries: u64, pieces: u64| (2 * entries + pieces + 1) * DESTAGE_PIECE_BYTES;
        let entries = entries_of(spans);
        let most = pieces_max(log.entries_max());
        let pieces = [most, entries.min(most), 0];
        let fits = |&pieces: &u64| self.share.takes(bytes_of(entries, pieces));
        let (spans, pieces) = match pieces.into_iter().find(fits) {
            Some(pieces) => (spans, pieces),
            None if atomic => (spans, 0),
            None => {
                let fit = (1..=spans).rev();
                let mut fit = fit.filter(|&spans| self.share.takes(bytes_of(entries_of(spans), 0)));
                (fit.next().unwrap_or(1), 0)
            }
        };
        self.plan_bytes = bytes_of(entries_of(spans), pieces);
        self.charge();
        (spans, pieces as usize)
    }

    /// The plan is gone.
    fn release_plan(&mut self) {
        self.plan_bytes = 0;
        self.charge();
    }

    /// Generations that are taken up from now on end before the span that holds this position.
    pub fn stop_before(&mut self, position: Option<u64>) {
        self.stop_before = position;
    }

    fn spans_before_stop(&self, log: &WriteLog) -> usize {
        let Some(position) = self.stop_before else {
            return usize::MAX;
        };
        log.spans().partition_point(|span| span.end() <= position)
    }

    /// Plan some more, for about so many looks. `index` names the last write of each sector in the log; `sectors` is
    /// the size of the volume.
    pub fn plan_some(
        &mut self,
        log: &WriteLog,
        index: &ExtentIndex,
        sectors: u64,
        looks_left: &mut usize,
    ) -> Planned {
        debug_assert_eq!(self.stage, Stage::Planning);
        let mut planned = Planned::Further;
        let looks = match self.planning.step {
            PlanStep::Entries => self.plan_entries(log, index, sectors, *looks_left),
            PlanStep::Items => self.make_items(log, *looks_left),
            PlanStep::Sorting => self.sort_items(*looks_left),
            PlanStep::Handing(from) if from < self.plan.items.len() => {
                let each = |item: &Item| 1 + item.parts.len();
                let (to, looks) = end_of_step(&self.plan.items, from, *looks_left, each);
                self.planning.step = PlanStep::Handing(to);
                planned = Planned::Items(from..to);
                looks
            }
            PlanStep::Handing(_) => {
                self.planning = Planning::default();
                self.stage = Stage::Writing;
                planned = Planned::Whole;
                1
            }
        };
        self.work.add(looks as u64);
        *looks_left = looks_left.saturating_sub(looks);
        planned
    }

    fn plan_entries(
        &mut self,
        log: &WriteLog,
        index: &ExtentIndex,
        sectors: u64,
        looks_max: usize,
    ) -> usize {
        let sectors = Sectors {
            volume: SectorRange::new(0, sectors),
            index,
            ahead: &self.ahead,
        };
        let planning = &mut self.planning;
        let mut looks = 0;
        while looks < looks_max && !planning.entries.is_empty() {
            looks += 1;
            let sequence = planning.entries.start;
            let is_begun = planning.rest.is_some();
            let whole = || log.entry(sequence).range.intersect(sectors.volume);
            let range = planning.rest.take().unwrap_or_else(whole);
            if range.is_empty() {
                planning.entries.start += 1;
                continue;
            }
            planning.pieces += usize::from(is_begun);
            let first = |index: &ExtentIndex| index.pieces(range).next().expect("it is not empty");
            let (piece, last) = if planning.takes_all() {
                (range, None)
            } else {
                first(sectors.index)
            };
            let last = last.unwrap_or(sequence);
            let left = |piece: SectorRange| Some(SectorRange::between(piece.end(), range.end()));
            if last != sequence && last < planning.covers_before {
                if last >= self.plan.end && self.lead.since.is_none() {
                    self.lead.since = log.oldest_since();
                }
                planning.rest = left(piece);
                continue;
            }
            let (piece, had) = sectors.ahead.pieces(piece).next().expect("as above");
            if had.is_some_and(|had| had >= sequence) {
                if had == Some(sequence) {
                    self.plan.ahead_bytes += piece.bytes() as u64;
                }
                planning.rest = left(piece);
                continue;
            }
            let piece = if has_few_runs(piece) {
                piece
            } else {
                planning.map.prefix(piece, PIECE_RUNS_MAX)
            };
            planning.rest = left(piece);
            let runs = planning.map.len();
            planning.map.insert(piece, sequence);
            looks += (runs + 1).saturating_sub(planning.map.len());
            looks += planning.gather(piece, log, &sectors);
        }
        if planning.entries.is_empty() {
            planning.step = PlanStep::Items;
        }
        looks
    }

    /// Merge adjacent pieces into writes of at most one request, and zeroings of any length but
    /// [`ZERO_SECTORS_MAX`]. They are in the order of the volume, which a backend likes, as long as memory has
    /// their data.
    fn make_items(&mut self, log: &WriteLog, looks_max: usize) -> usize {
        let (planning, plan) = (&mut self.planning, &mut self.plan);
        for looks in 1..=looks_max {
            let Some((range, sequence)) = planning.map.pop_first() else {
                planning.step = if planning.reads_log {
                    PlanStep::Sorting
                } else {
                    PlanStep::Handing(0)
                };
                return looks;
            };
            let entry = log.entry(sequence);
            let is_data = entry.kind == EntryKind::Write;
            planning.reads_log |= is_data && entry.data.is_none();
            let unmap = !is_data && !entry.no_hole;
            let stored = entry.stored.as_ref();
            let packed = stored.map_or(0, |stored| stored.block_count().next_power_of_two());
            planning.packed_blocks += packed;
            if is_data && sequence < plan.end {
                plan.own_bytes += range.bytes() as u64;
            }
            let packed_blocks = planning.packed_blocks;
            let joins = |last: &&mut Item| {
                let sectors = last.range.count + range.count;
                let fits = if is_data {
                    packed_blocks <= ITEM_PACKED_BLOCKS_MAX
                        && last.parts.len() < ITEM_PARTS_MAX
                        && sectors * SECTOR_BYTES as u64 <= REQUEST_BYTES_MAX as u64
                } else {
                    last.unmap == unmap && sectors <= ZERO_SECTORS_MAX
                };
                fits && last.parts.is_empty() != is_data && last.range.end() == range.start
            };
            let part = is_data.then_some(Part { range, sequence });
            if let Some(last) = plan.items.last_mut().filter(joins) {
                last.range.count += range.count;
                last.parts.extend(part);
                continue;
            }
            planning.packed_blocks = packed;
            plan.items.push(Item {
                range,
                parts: part.map_or_else(Vec::new, |part| Vec::from([part])),
                unmap,
                state: ItemState::Waiting,
            });
        }
        looks_max
    }

    /// Put the items in the order in which the log has the first of each, so that reading the log for them is
    /// sequential; zeroings come first.
    fn sort_items(&mut self, looks_max: usize) -> usize {
        let (planning, plan) = (&mut self.planning, &mut self.plan);
        let from = planning.by_entry.len();
        if planning.sorted.is_empty() && from < plan.items.len() {
            if from == 0 {
                planning.by_entry.reserve_exact(plan.items.len());
                planning.sorted.reserve_exact(plan.items.len());
            }
            let each = |item: &Item| 1 + item.parts.len();
            let (to, looks) = end_of_step(&plan.items, from, looks_max, each);
            for (index, item) in (from..to).zip(&plan.items[from..to]) {
                let first = item.parts.iter().map(|part| part.sequence).min();
                let key = first.map_or(0, |first| first + 1);
                planning.by_entry.push(Reverse((key, index)));
            }
            return looks;
        }
        for looks in 1..=looks_max {
            let Some(Reverse((_, index))) = planning.by_entry.pop() else {
                plan.items = core::mem::take(&mut planning.sorted);
                planning.step = PlanStep::Handing(0);
                return looks;
            };
            let item = &mut plan.items[index];
            planning.sorted.push(Item {
                parts: core::mem::take(&mut item.parts),
                ..*item
            });
        }
        looks_max
    }

    /// The next item to write, if one may begin now. The caller reads its data and writes it.
    pub fn next_item(&mut self, now: Nanos, depth: usize) -> Option<usize> {
        if self.stage != Stage::Writing || self.busy >= depth || self.retry_at > Some(now) {
            return None;
        }
        self.retry_at = None;
        let waiting = |item: &Item| item.state == ItemState::Waiting;
        let mut others = self.plan.items[self.plan.next..].iter();
        let Some(offset) = others.position(waiting) else {
            if self.plan.items[..self.plan.next].iter().any(waiting) {
                self.plan.next = 0;
                self.fail(now);
            }
            return None;
        };
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

    /// What an item needs of the log is bad: the others come first, and then it is tried again after a pause.
    pub fn item_unreadable(&mut self, index: usize) {
        self.busy -= 1;
        self.plan.items[index].state = ItemState::Waiting;
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
            self.written = now;
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
        self.retry_at = Some(now.plus(self.flush_pause));
        self.flush_pause = Nanos((self.flush_pause.0 * 2).min(RETRY_MAX.0));
    }

    /// The flush ended.
    pub fn flushed(&mut self, now: Nanos, ok: bool) {
        debug_assert_eq!(self.stage, Stage::Flushing);
        if ok && !self.doubted {
            self.unflushed = false;
            (self.pause, self.flush_pause) = (RETRY_MIN, RETRY_MIN);
            self.stage = Stage::Forgetting(0);
            return;
        }
        self.repeat(now);
    }

    /// The next items whose ranges the cache is to forget; none once it was told of all. Each takes so many looks
    /// beside those for what it has.
    pub fn forget_some(&mut self, looks_each: usize) -> Range<usize> {
        let Stage::Forgetting(next) = &mut self.stage else {
            return 0..0;
        };
        let blocks = |item: &Item| item.range.block_count().min(CACHE_PROBE_BLOCKS_MAX as u64);
        let from = *next;
        let each = |item: &Item| 1 + looks_each + item.parts.len() + blocks(item) as usize;
        let (to, looks) = end_of_step(&self.plan.items, from, STEP_WORK_MAX, each);
        self.work.add(looks as u64);
        *next = to;
        for part in self.plan.items[from..*next]
            .iter()
            .flat_map(|item| &item.parts)
        {
            if part.sequence >= self.plan.end {
                self.ahead.insert(part.range, part.sequence);
            }
        }
        from..*next
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
        // The whole of it is copied.
        let blocks = |item: &Item| {
            if item.parts.is_empty() {
                return 0;
            }
            item.range.block_count() as usize
        };
        let each = |item: &Item| 1 + item.parts.len() + blocks(item);
        let (to, looks) = end_of_step(&self.plan.items, from, STEP_WORK_MAX, each);
        self.work.add(looks as u64);
        *next = to;
        from..to
    }

    /// Nobody needs the parts of these items any more.
    pub fn release(&mut self, items: Range<usize>) {
        for item in &mut self.plan.items[items] {
            item.parts = Vec::new();
        }
    }

    /// Let `index` forget more of the entries that are retired, which the backend has by now. Returns whether
    /// it has forgotten all.
    pub fn unlist_some(&mut self, log: &WriteLog, index: &mut ExtentIndex) -> bool {
        let (plan, mut looks) = (&mut self.plan, 0);
        while plan.listed < plan.end && looks < STEP_WORK_MAX {
            let rest = plan.listed_rest.take();
            let range = rest.unwrap_or_else(|| log.entry(plan.listed).range);
            let runs_max = PIECE_RUNS_MAX;
            let piece = if has_few_runs(range) {
                range
            } else {
                self.ahead.prefix(index.prefix(range, runs_max), runs_max)
            };
            let left = index.remove_some_before(piece, plan.end, runs_max);
            debug_assert!(left.is_empty());
            self.ahead.remove_before(piece, plan.end);
            looks += if piece == range { 2 } else { runs_max };
            if piece == range {
                plan.listed += 1;
            } else {
                plan.listed_rest = Some(SectorRange::between(piece.end(), range.end()));
            }
        }
        self.work.add(looks as u64);
        plan.listed == plan.end
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

    /// What was looked at so far, where that is counted.
    pub fn work(&self) -> u64 {
        self.work.units() + self.planning.map.work() + self.ahead.work()
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
        let (took, still) = (now.since(self.started), now.since(self.written));
        self.rate.freed(self.plan.freed_blocks, took, still);
        self.release_plan();
        Some(core::mem::take(&mut self.plan))
    }

    /// Give the generation up (the volume closes); nothing of it may be under way.
    pub fn abandon(&mut self) {
        debug_assert!(self.busy == 0 && matches!(self.stage, Stage::Planning | Stage::Writing));
        self.stage = Stage::Idle;
        self.planning = Planning::default();
        self.plan = Plan::default();
        self.release_plan();
        self.retry_at = None;
    }
}

/// Whether a range can have no more runs than are replaced at once, so that nothing has to be looked for to know it.
fn has_few_runs(range: SectorRange) -> bool {
    range.count <= PIECE_RUNS_MAX as u64
}

/// How many of the oldest spans make the next batch: durable, bounded by so many blocks among others, and without a
/// sync point between them unless the backend is `atomic`.
fn batch_spans(log: &WriteLog, blocks_max: u64, atomic: bool) -> usize {
    let Some(front) = log.spans().front() else {
        return 0;
    };
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

/// Where a step ends that begins with the item `from`, takes at least that, and goes on up to so many looks; and how
/// many it takes.
fn end_of_step(
    items: &[Item],
    from: usize,
    looks_max: usize,
    each: impl Fn(&Item) -> usize,
) -> (usize, usize) {
    let (mut to, mut looks) = (from, 0);
    while to < items.len() && looks < looks_max {
        looks += each(&items[to]);
        to += 1;
    }
    (to, looks)
}
