//! The backend side of a volume: performs what [`crate::destage`] decides.

use alloc::collections::BTreeMap;
use alloc::rc::Rc;
use alloc::vec::Vec;

use super::read::{block_of, whole_blocks_of};
use super::{Context, Op, Volume};
use crate::buf::{Buf, Pool};
use crate::destage::{Plan, Stage};
use crate::error::IoError;
use crate::extent_index::Sequence;
use crate::format::EntryKind;
use crate::io::{Action, BlockKey, Done, Nanos};
use crate::limits::{BLOCK_BYTES, REQUEST_BYTES_MAX, SECTOR_BYTES};
use crate::write_log::WriteLog;

/// Destage at the pace of the deadline uses this share of its depth, as a divisor.
const IDLE_DEPTH_DIVISOR: usize = 4;
/// Destaged entries larger than this are not kept in DRAM: they are streams, not hot spots.
const KEEP_BYTES_MAX: usize = 64 << 10;

/// How far a [`super::Event::DestageAll`] goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    sequence: Sequence,
    /// Of [`crate::write_log::LogBytes`].
    pub(super) bytes: u64,
}

/// An item whose data is being read from the log.
#[derive(Debug)]
struct Gathering {
    parts: Vec<Option<Buf>>,
    missing: usize,
    failed: bool,
}

/// The backend side of a volume.
#[derive(Debug, Default)]
pub(super) struct Destaging {
    pub(super) target: Option<Target>,
    gathering: BTreeMap<usize, Gathering>,
    /// For reading the log when the pool is empty, so that destage always goes on.
    reserve: Option<Rc<Pool>>,
}

impl Destaging {
    /// Whether the open span holds something that is to be destaged now.
    pub(super) fn wants_seal(&self, log: &WriteLog) -> bool {
        let sealed = log
            .spans()
            .back()
            .map_or(log.first_sequence(), |span| span.end_sequence);
        self.target.is_some_and(|target| target.sequence > sealed)
    }
}

impl Volume {
    pub(super) fn destage_all(&mut self) {
        let Some(log) = &self.log else { return };
        let target = Target {
            sequence: log.next_sequence(),
            bytes: log.bytes().appended,
        };
        self.destaging.target = (target.sequence > log.first_sequence()).then_some(target);
    }

    /// Move the destage as far as it goes without waiting.
    pub(super) fn destage_poll(&mut self, now: Nanos, cx: &mut Context<'_>) {
        if self.log_corrupt {
            return;
        }
        if self
            .destaging
            .target
            .is_some_and(|end| end.sequence <= self.log().first_sequence())
        {
            self.destaging.target = None;
        }
        let giving_up = self.gives_up_destage();
        if self.destage.stage() == Stage::Idle && !giving_up && self.destage_is_due(now) {
            let sectors = self.config.bytes / SECTOR_BYTES as u64;
            let log = self.log.as_ref().expect("open");
            self.destage.start(now, log, sectors);
        }
        if self.destage.stage() == Stage::Writing {
            if giving_up {
                if self.destage.busy() == 0 {
                    self.destage.abandon();
                }
                return;
            }
            let depth = self.destage_depth();
            while let Some(item) = self.destage.next_item(now, depth) {
                if !self.begin_item(item, cx) {
                    self.destage.item_postponed(item);
                    break;
                }
            }
            if self.destage.begin_flush(now) {
                let token = self.token(Op::DestageFlush);
                cx.actions.push(Action::BackendFlush { token });
            }
        }
        if let Stage::Invalidating(barrier) = self.destage.stage()
            && cx.cache.persisted() >= barrier
            && !self.log_failed
        {
            self.commit(cx);
        }
    }

    /// Whether nothing is taken up any more: it is closing, and its log stays as it is.
    fn gives_up_destage(&self) -> bool {
        self.close == Some(false) || self.log_failed && self.close.is_some()
    }

    /// Whether a generation should be taken up now.
    fn destage_is_due(&self, now: Nanos) -> bool {
        let log = self.log();
        !log.spans().is_empty()
            && (self.destage_in_haste()
                || log
                    .oldest_since()
                    .is_some_and(|since| now >= since.plus(self.destage_age())))
    }

    /// Destage begins at this age: early enough to be done at the deadline.
    fn destage_age(&self) -> Nanos {
        Nanos(self.config.dirty_age_max.0 / 2)
    }

    /// Whether more than age calls for destage.
    fn destage_in_haste(&self) -> bool {
        let log = self.log();
        let threshold = log.ring_blocks() * u64::from(self.config.dirty_ratio_min) / 100;
        self.destaging.target.is_some()
            || self.close == Some(true)
            || !self.writes.admission.is_empty()
            || log.used_blocks() > threshold
    }

    fn destage_depth(&self) -> usize {
        let depth = self.config.destage_depth_max.max(1);
        if self.destage_in_haste() {
            depth
        } else {
            (depth / IDLE_DEPTH_DIVISOR).max(1)
        }
    }

    /// Read what an item needs from the log, or write it at once. Returns whether it has begun.
    fn begin_item(&mut self, item: usize, cx: &mut Context<'_>) -> bool {
        let plan = &self.destage.plan().items[item];
        if plan.parts.is_empty() {
            let (offset, bytes) = (
                plan.range.byte_offset(),
                plan.range.count * SECTOR_BYTES as u64,
            );
            let unmap = plan.unmap;
            let token = self.token(Op::DestageWrite { item });
            cx.actions.push(Action::BackendZero {
                token,
                offset,
                bytes,
                unmap,
            });
            return true;
        }
        let parts = plan.parts.clone();
        let mut gathered = Vec::with_capacity(parts.len());
        let mut reads = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            let entry = self.log().entry(part.sequence);
            gathered.push(entry.data.as_ref().map(|data| {
                let start = (part.range.start - entry.range.start) as usize * SECTOR_BYTES;
                data.slice(start..start + part.range.bytes())
            }));
            if entry.data.is_none() {
                let position =
                    entry.position + part.range.first_block() - entry.range.first_block();
                let bytes = part.range.block_count() as usize * BLOCK_BYTES;
                let Some(buf) = self.destage_buffer(bytes, cx) else {
                    return false;
                };
                reads.push((index, position, buf));
            }
        }
        if reads.is_empty() {
            self.write_item(item, gathered.into_iter().flatten().collect(), cx);
            return true;
        }
        let gathering = Gathering {
            parts: gathered,
            missing: reads.len(),
            failed: false,
        };
        self.destaging.gathering.insert(item, gathering);
        for (part, position, buf) in reads {
            self.pin(position);
            let (offset, _) = self.log().locate(position);
            let token = self.token(Op::DestageRead {
                item,
                part,
                position,
            });
            cx.actions.push(Action::LogRead { token, offset, buf });
        }
        true
    }

    fn destage_buffer(&mut self, bytes: usize, cx: &Context<'_>) -> Option<crate::buf::BufMut> {
        // A quarter of the pool is left to clients.
        if cx.pool.free_bytes() > cx.pool.total_bytes() / 4
            && let Some(buf) = cx.pool.alloc(bytes)
        {
            return Some(buf);
        }
        self.destaging
            .reserve
            .get_or_insert_with(|| Pool::new(RESERVE_BYTES))
            .alloc(bytes)
    }

    pub(super) fn destage_was_read(
        &mut self,
        now: Nanos,
        item: usize,
        part: usize,
        position: u64,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        let range = self.destage.plan().items[item].parts[part].range;
        let read = match result {
            Ok(Done::Read(data)) if self.blocks_match(&data, position) => {
                let start = range.offset_in_block();
                Some(data.freeze().slice(start..start + range.bytes()))
            }
            Ok(_) => {
                // The only copy is bad: stop here rather than skip it.
                self.log_corrupt = true;
                self.stats.log_corrupt_blocks += 1;
                None
            }
            Err(_) => None,
        };
        let gathering = self
            .destaging
            .gathering
            .get_mut(&item)
            .expect("the item gathers");
        gathering.failed |= read.is_none();
        gathering.parts[part] = read;
        gathering.missing -= 1;
        if gathering.missing > 0 {
            return;
        }
        let gathering = self.destaging.gathering.remove(&item).expect("just used");
        if gathering.failed {
            self.destage.item_done(now, item, false);
        } else {
            self.write_item(item, gathering.parts.into_iter().flatten().collect(), cx);
        }
    }

    fn write_item(&mut self, item: usize, data: Vec<Buf>, cx: &mut Context<'_>) {
        let offset = self.destage.plan().items[item].range.byte_offset();
        let token = self.token(Op::DestageWrite { item });
        cx.actions.push(Action::BackendWrite {
            token,
            offset,
            data,
        });
    }

    pub(super) fn destage_was_written(
        &mut self,
        now: Nanos,
        item: usize,
        result: Result<Done, IoError>,
    ) {
        if result.is_err() {
            self.stats.backend_errors += 1;
        } else {
            let plan = &self.destage.plan().items[item];
            if !plan.parts.is_empty() {
                self.stats.destaged_bytes += plan.range.bytes() as u64;
            }
        }
        self.destage.item_done(now, item, result.is_ok());
    }

    pub(super) fn destage_was_flushed(
        &mut self,
        now: Nanos,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        self.destage.flushed(now, result.is_ok());
        if result.is_err() {
            self.stats.backend_errors += 1;
            return;
        }
        let ranges: Vec<_> = self
            .destage
            .plan()
            .items
            .iter()
            .map(|item| item.range)
            .collect();
        for range in ranges {
            cx.cache
                .invalidate(self.key(range.first_block()), range.block_count());
            self.mark_fetches_stale(range);
        }
        self.destage.invalidating(cx.cache.barrier());
    }

    fn commit(&mut self, cx: &mut Context<'_>) {
        let tail = self.log().tail_after(self.destage.plan().spans);
        let (offset, block) = self.log_mut().superblock_for(&tail, false);
        self.destage.committing();
        let token = self.token(Op::Superblock);
        cx.actions.push(Action::LogWrite {
            token,
            offset,
            data: Vec::from([block]),
        });
    }

    pub(super) fn superblock_written(
        &mut self,
        now: Nanos,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        if result.is_err() {
            // The device may hold either tail: nothing may be retired any more.
            return self.fail_log(cx);
        }
        let before = self.log().used_blocks();
        self.keep_destaged(cx);
        let spans = self.destage.plan().spans;
        let log = self.log.as_mut().expect("open");
        let (mut ranges, mut resident) = (Vec::new(), 0);
        for entry in log.retire(spans) {
            ranges.push(entry.range);
            resident += entry
                .data
                .as_ref()
                .map_or(0, |data| data.held_bytes() as u64);
        }
        let limit = log.first_sequence();
        let freed = before - log.used_blocks();
        self.writes.resident_bytes -= resident;
        for range in ranges {
            self.index.remove_before(range, limit);
        }
        let plan = self.destage.committed(now, freed);
        let written: u64 = written_bytes(&plan);
        self.stats.coalesced_bytes += plan.bytes.saturating_sub(written);
    }

    /// What was destaged and is still in memory is what the backend holds now: keep it as clean.
    fn keep_destaged(&mut self, cx: &mut Context<'_>) {
        let log = self.log.as_ref().expect("open");
        let number = self.config.number;
        for part in self
            .destage
            .plan()
            .items
            .iter()
            .flat_map(|item| &item.parts)
        {
            let entry = log.entry(part.sequence);
            if entry.kind != EntryKind::Write || entry.range.bytes() > KEEP_BYTES_MAX {
                continue;
            }
            let Some(data) = &entry.data else { continue };
            for block in whole_blocks_of(part.range) {
                let data = block_of(data, entry.range, block);
                cx.cache.fill_block(BlockKey::new(number, block), &data);
            }
        }
    }

    pub(super) fn destage_wakeup(&self) -> Option<Nanos> {
        if self.log_corrupt || self.gives_up_destage() {
            return None;
        }
        match self.destage.stage() {
            // What is not durable cannot be taken up: its completion is what wakes.
            Stage::Idle => {
                let log = self.log();
                let oldest = log
                    .spans()
                    .front()
                    .filter(|span| span.end() <= log.durable());
                oldest.map(|span| span.since.plus(self.destage_age()))
            }
            // With enough under way, it is a completion that wakes.
            Stage::Writing if self.destage.busy() < self.destage_depth() => self.destage.retry_at(),
            _ => None,
        }
    }
}

fn written_bytes(plan: &Plan) -> u64 {
    let written = plan.items.iter().filter(|item| !item.parts.is_empty());
    written.map(|item| item.range.bytes() as u64).sum()
}

/// Room to read one largest item from the log, each part rounded up to blocks and to a power of
/// two of them.
const RESERVE_BYTES: usize = 4 * REQUEST_BYTES_MAX;
