//! The backend side of a volume: performs what [`crate::log::destage`] decides.

mod depth;
mod reserve;
mod sources;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

use reserve::Reserve;
use sources::DestageSources;

use super::compression::Packed;
use super::damage::Damage;
use super::direct::Direct;
use super::health::Health;
use super::log_chunks::{LogChunks, Source, Waiting};
use super::op::Op;
use super::open_log::OpenLog;
use super::read::{block_of, whole_blocks_of};
use super::{Context, Policy, Volume, VolumeConfig};
use crate::base::buf::{Buf, BufMut};
use crate::base::error::{IoError, RequestError};
use crate::base::io::{Action, Done, Nanos, SectorRange};
use crate::base::limits::{BLOCK_BYTES, LOG_READ_TRIES_MAX, SECTOR_BYTES, STEP_WORK_MAX};
use crate::format::EntryKind;
use crate::log::destage::{Destage, Part, Planned, Stage};
use crate::log::extent_index::{ExtentIndex, Sequence};
use crate::log::write_log::WriteLog;

/// Destaged entries larger than this are not kept in DRAM: they are streams, not hot spots.
const KEEP_BYTES_MAX: usize = 64 << 10;

/// How far a [`super::Event::DestageAll`] goes.
#[derive(Clone, Copy, Debug)]
struct Target {
    sequence: Sequence,
    /// Where the last sealed span ended. One that replay took may have no entries: all of it was lost.
    end: u64,
    /// Of [`crate::log::write_log::LogBytes`].
    bytes: u64,
}

impl Target {
    fn is_reached(self, log: &WriteLog) -> bool {
        self.sequence <= log.first_sequence() && self.end <= log.tail()
    }
}

/// There is no buffer to unpack into.
struct NoMemory;

/// An item whose data is being read from the log.
#[derive(Debug)]
struct Gathering {
    parts: Vec<Option<Buf>>,
    missing: usize,
    failed: bool,
    /// There was no memory to unpack a part.
    starved: bool,
}

/// The backend side of a volume.
#[derive(Debug, Default)]
pub(super) struct Destaging {
    generation: Destage,
    target: Option<Target>,
    /// Items under way at most, as of the last poll.
    depth: usize,
    gathering: BTreeMap<usize, Gathering>,
    chunks: LogChunks,
    /// The generation that is taken up needs what is bad in the log, and waits for it.
    meets_damage: bool,
    /// For reading the log when the pool is empty, so that destage always goes on.
    reserve: Option<Reserve>,
    /// Whether the backend gives no answer, as of the last poll: what it is given meanwhile may be gone for long.
    is_silent: bool,
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

    /// The generation that is on its way, and what destage decides of it.
    pub(super) fn generation(&self) -> &Destage {
        &self.generation
    }

    /// The same, to be told of what has happened to it.
    pub(super) fn generation_mut(&mut self) -> &mut Destage {
        &mut self.generation
    }

    /// Destage all that is in the log now.
    fn aim(&mut self, log: &WriteLog) {
        let target = Target {
            sequence: log.next_sequence(),
            end: log.sealed_end(),
            bytes: log.bytes().appended,
        };
        self.target = (!target.is_reached(log)).then_some(target);
    }

    /// Nobody waits for all to be destaged any more.
    pub(super) fn forget_target(&mut self) {
        self.target = None;
    }

    /// Bytes that are left until all is destaged that somebody waits for; 0: nobody does.
    pub(super) fn target_remaining_bytes(&self, log: &WriteLog) -> u64 {
        let retired = log.bytes().retired;
        // Discards have no bytes: until the target is reached, something is left.
        (self.target).map_or(0, |target| target.bytes.saturating_sub(retired).max(1))
    }

    /// Whether it waits for what is bad in the log: it has done what it can, or is about to.
    pub(super) fn is_stuck(&self, config: &VolumeConfig, damage: &Damage, log: &WriteLog) -> bool {
        let waits = self.generation.stage() == Stage::Writing && self.meets_damage;
        self.is_blocked(config, damage, log) || (damage.is_damaged() && waits)
    }

    /// Whether nothing is left that may be taken up, for the sake of what is bad in the log. An atomic backend that was
    /// given a part of a generation gets no shorter one.
    fn is_blocked(&self, config: &VolumeConfig, damage: &Damage, log: &WriteLog) -> bool {
        let Some((_, sequence)) = damage.destage_end(log) else {
            return false;
        };
        let is_partial = config.backend_atomic && self.generation.has_unflushed();
        self.generation.stage() == Stage::Idle && (is_partial || sequence == log.first_sequence())
    }

    /// Whether the backend fails what is destaged, or gives no answer.
    pub(super) fn backend_takes_nothing(&self, health: &Health) -> bool {
        self.generation.is_failing() || health.backend_is_silent()
    }

    /// The same, or the log does not give what is to be destaged.
    pub(super) fn gets_nowhere(&self, health: &Health) -> bool {
        self.backend_takes_nothing(health) || health.log_is_silent()
    }

    /// Whether another flush has to wait for destage's own: one of the backend is under way at a time, for a failure is
    /// told to one of them and may have lost what both were to cover. And of an atomic backend it would show a
    /// part of a generation, which destage's will show as a whole.
    pub(super) fn holds_flushes(&self, config: &VolumeConfig) -> bool {
        self.generation.stage() == Stage::Flushing
            || config.backend_atomic && self.generation.has_unflushed()
    }

    /// Whether nothing is taken up any more: the volume closes, and its log stays as it is.
    fn gives_up(close: Option<bool>, log: &OpenLog, direct: &Direct) -> bool {
        let stays = close == Some(false) && !direct.is_emptying_failed_log(log);
        stays || log.has_failed() && close.is_some()
    }

    /// Whether nothing is taken up until the backend is flushed: the log was empty when all was to be destaged, so the end
    /// of that would come in the middle of a generation that began since. An atomic backend shows no part of it.
    fn awaits_direct_flush(
        &self,
        config: &VolumeConfig,
        close: Option<bool>,
        direct: &Direct,
    ) -> bool {
        let ends_with_flush = self.target.is_none() && direct.is_destaging_all();
        ends_with_flush && !config.backend_atomic && close.is_none()
    }

    /// Whether somebody waits for destage.
    fn is_awaited(&self, from: &DestageSources<'_>) -> bool {
        self.target.is_some()
            || from.close == Some(true)
            || from.direct.path().is_draining()
            || from.writes.waits_for_room(from.log.get())
    }

    /// Whether a generation should be taken up now.
    fn is_due(&self, now: Nanos, from: &DestageSources<'_>) -> bool {
        let (config, log) = (from.config, from.log.get());
        !log.spans().is_empty()
            && (self.is_awaited(from)
                || Self::pressure(config, log) > 0.0
                || Self::is_aged(config, log, now))
    }

    /// Go on as far as it goes without waiting.
    fn drive(&mut self, now: Nanos, from: &mut DestageSources<'_>, cx: &mut Context<'_>) {
        self.is_silent = from.health.backend_is_silent();
        self.pass_reserve_on();
        let log = from.log.get();
        self.target = self.target.filter(|target| !target.is_reached(log));
        let giving_up = Self::gives_up(from.close, from.log, from.direct);
        if self.generation.stage() == Stage::Idle
            && !giving_up
            && self.is_due(now, from)
            && !self.awaits_direct_flush(from.config, from.close, from.direct)
            && !(from.direct).awaits_last_spans(from.log, from.damage, self, from.health)
            && !self.is_blocked(from.config, from.damage, from.log.get())
        {
            let end = from.damage.destage_end(from.log.get());
            self.start(now, from.config, from.log.get(), end);
        }
        if self.generation.stage() == Stage::Planning {
            if giving_up {
                self.generation.abandon();
                return;
            }
            let sectors = from.config.bytes / SECTOR_BYTES as u64;
            self.plan_some(sectors, from.log.get(), from.index);
        }
        if self.generation.stage() == Stage::Writing {
            if giving_up {
                return self.give_up();
            }
            let is_awaited = self.is_awaited(from);
            self.depth = self.depth_at(now, from.config, from.log.get(), is_awaited);
            if from.direct.awaits_mark(from.log) && !from.log.has_failed() {
                (from.direct).mark_log(from.writes, self, from.log, from.port, cx);
            }
            if !from.direct.holds_destage(from.config, from.log) {
                self.begin_items(now, from, cx);
            }
            if !from.direct.is_flushing() && self.generation.begin_flush(now) {
                let token = from.port.begin(Op::DestageFlush);
                cx.actions.push(Action::BackendFlush { token });
            }
        }
        if let Stage::Forgetting(_) = self.generation.stage() {
            self.forget_some(from, cx);
        }
        if let Stage::Invalidating(barrier) = self.generation.stage()
            && cx.cache.persisted() >= barrier
            && !from.log.has_failed()
            && !from.direct.writes_superblock(from.writes, self)
        {
            self.commit(from, cx);
        }
    }

    /// What was needed in a shortage is given back once it is free, and does not keep others waiting for this volume's
    /// backend until then.
    fn pass_reserve_on(&mut self) {
        if self.is_silent {
            self.reserve.take_if(|reserve| reserve.is_free());
            if let Some(reserve) = &mut self.reserve {
                reserve.keep();
            }
        }
    }

    /// Have the cache forget more of what was overwritten, and then make that durable.
    fn forget_some(&mut self, from: &mut DestageSources<'_>, cx: &mut Context<'_>) {
        // A fetch is compared in a fraction of the time of a lookup.
        let items = (self.generation).forget_some(from.reads.fetches_under_way() / 16);
        for item in items.clone() {
            let range = self.generation.plan().items[item].range;
            from.cached.invalidate(range, cx);
            (from.reads).mark_fetches_stale(range, from.filling, from.port.now);
        }
        if items.is_empty() {
            self.generation.invalidating(cx.cache.barrier());
        }
    }

    /// Have the superblock say that the generation is not needed any more.
    fn commit(&mut self, from: &mut DestageSources<'_>, cx: &mut Context<'_>) {
        let tail = (from.log.get()).tail_after(self.generation.plan().spans);
        (from.direct).keep_mark(from.config.number, from.log, cx.cache);
        let is_last = tail.position == from.log.get().head();
        let ends = from.log.is_given_up() && is_last;
        let superblock = from.log.get_mut().superblock_for(&tail, ends);
        self.generation.committing();
        (from.log).write_superblock(Op::Superblock, superblock, from.port, cx);
    }

    /// Take up a generation, which ends before what is bad.
    fn start(
        &mut self,
        now: Nanos,
        config: &VolumeConfig,
        log: &WriteLog,
        bad: Option<(u64, Sequence)>,
    ) {
        // What somebody asked to have destaged gets there as it is.
        let target = self.target.map(|target| target.sequence);
        let covers_before = target.unwrap_or(Sequence::MAX);
        // What is bad stands in for nothing, and goes along with nothing.
        let covers_before = bad.map_or(covers_before, |(_, first)| covers_before.min(first));
        self.generation
            .stop_before(bad.map(|(position, _)| position));
        self.meets_damage = false;
        let (age_max, atomic) = (config.dirty_age_max, config.backend_atomic);
        if (self.generation).start(now, log, covers_before, age_max, atomic) {
            let spans = self.generation.plan().spans;
            self.chunks.begin(spans, log);
        }
    }

    /// Plan a bounded part more.
    fn plan_some(&mut self, sectors: u64, log: &WriteLog, index: &ExtentIndex) {
        let mut looks_left = STEP_WORK_MAX;
        while looks_left > 0 && self.generation.stage() == Stage::Planning {
            if let Planned::Items(items) =
                (self.generation).plan_some(log, index, sectors, &mut looks_left)
            {
                let items = &self.generation.plan().items[items];
                self.chunks.need(items, log);
            }
        }
    }

    /// Nothing more of the generation is written.
    fn give_up(&mut self) {
        if self.generation.busy() == 0 {
            self.generation.abandon();
            self.chunks.clear();
        }
    }

    /// Begin as many items as may be under way.
    fn begin_items(&mut self, now: Nanos, from: &mut DestageSources<'_>, cx: &mut Context<'_>) {
        let depth = self.depth_to_begin(self.generation.busy());
        while let Some(item) = self.generation.next_item(now, depth) {
            if !self.begin_item(item, from, cx) {
                self.generation.item_postponed(item);
                break;
            }
        }
    }

    /// When an item may be begun, if fewer are under way than may be.
    fn next_item_at(&self) -> Option<Nanos> {
        let busy = self.generation.busy();
        let has_room = busy < self.depth_to_begin(busy);
        has_room.then(|| self.generation.retry_at()).flatten()
    }

    /// Forget more of what the superblock no longer names. Returns the bytes that it had in memory, once that is all.
    fn retire_some(
        &mut self,
        now: Nanos,
        from: &mut DestageSources<'_>,
        cx: &mut Context<'_>,
    ) -> Option<usize> {
        let items = self.generation.keep_some();
        if !items.is_empty() {
            self.keep_destaged(items.clone(), from, cx);
            self.generation.release(items);
            return None;
        }
        if !self.generation.unlist_some(from.log.get(), from.index) {
            return None;
        }
        let spans = self.generation.spans_to_retire(from.log.get());
        let mut resident = 0;
        for entry in from.log.get_mut().retire(spans) {
            if entry.data.is_some() {
                resident += usize::from(entry.held_blocks) * BLOCK_BYTES;
            }
        }
        from.log.forget_checksums();
        from.damage.forget_bad(from.log.get());
        if let Some(plan) = self.generation.retired(now, spans, from.log.get()) {
            self.chunks.clear();
            // Others may need it, and it may be long until this volume reads its log again.
            self.reserve.take_if(|reserve| reserve.is_free());
            from.port.stats.coalesced_bytes += plan.coalesced_bytes();
        }
        Some(resident)
    }

    /// Read what an item needs from the log, or write it at once. Returns whether it has begun.
    fn begin_item(
        &mut self,
        item: usize,
        from: &mut DestageSources<'_>,
        cx: &mut Context<'_>,
    ) -> bool {
        let plan = &self.generation.plan().items[item];
        if plan.parts.is_empty() {
            let (offset, bytes) = (
                plan.range.byte_offset(),
                plan.range.count * SECTOR_BYTES as u64,
            );
            let unmap = plan.unmap;
            let token = from.port.begin(Op::DestageWrite { item });
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
        let (mut reads, mut waits) = (Vec::new(), Vec::new());
        let first = first_in_log(&parts, from.log.get());
        for (index, part) in parts.iter().enumerate() {
            let log = from.log.get();
            let entry = log.entry(part.sequence);
            if let Some(data) = &entry.data {
                let start = (part.range.start - entry.range.start) as usize * SECTOR_BYTES;
                gathered.push(Some(data.slice(start..start + part.range.bytes())));
                continue;
            }
            let blocks = entry.positions(part.range);
            let position = blocks.start;
            let packed = Packed::of(entry);
            let mut source = self.chunks.find(&blocks, first, log);
            if let Source::Chunk(chunk) = &source {
                source = self.read_chunk(chunk, from, cx);
            }
            gathered.push(match source {
                Source::Data(data) => {
                    let Ok(place) = self.place_for(packed, part.range, cx) else {
                        return false;
                    };
                    let checked = from.checked_part(part.range, position, &data, place);
                    if checked.is_none() {
                        self.distrust_chunk(position, from);
                        return false;
                    }
                    checked
                }
                Source::Later(chunk) => {
                    waits.push((chunk, Waiting { item, part: index }));
                    None
                }
                Source::Chunk(_) | Source::Alone => {
                    // What is unpacked takes the place of what was read.
                    let stored = (blocks.end - blocks.start) as usize * BLOCK_BYTES;
                    let bytes = stored.max(part.range.block_count() as usize * BLOCK_BYTES);
                    let Some(buf) = self.buffer(bytes, cx) else {
                        return false;
                    };
                    reads.push((index, position, buf.narrow(0..stored)));
                    None
                }
            });
        }
        if reads.is_empty() && waits.is_empty() {
            self.write_item(item, gathered.into_iter().flatten().collect(), from, cx);
            return true;
        }
        let gathering = Gathering {
            parts: gathered,
            missing: reads.len() + waits.len(),
            failed: false,
            starved: false,
        };
        self.gathering.insert(item, gathering);
        for (chunk, part) in waits {
            self.chunks.wait(chunk, part);
        }
        for (part, position, buf) in reads {
            let op = Op::DestageRead {
                item,
                part,
                position,
                tries: 0,
            };
            from.log.read(position, op, buf, from.port, cx);
        }
        true
    }

    fn write_item(
        &mut self,
        item: usize,
        data: Vec<Buf>,
        from: &mut DestageSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let offset = self.generation.plan().items[item].range.byte_offset();
        let token = from.port.begin(Op::DestageWrite { item });
        cx.actions.push(Action::BackendWrite {
            token,
            offset,
            data,
        });
    }

    /// Read a chunk of the log, and the next one ahead, if there is memory.
    fn read_chunk(
        &mut self,
        chunk: &Range<u64>,
        from: &mut DestageSources<'_>,
        cx: &mut Context<'_>,
    ) -> Source {
        if !self.ask_for_chunk(chunk, from, cx) {
            return Source::Alone;
        }
        let log = from.log.get();
        if let Some(next) = self.chunks.next(chunk, log) {
            self.ask_for_chunk(&next, from, cx);
        }
        Source::Later(chunk.start)
    }

    fn ask_for_chunk(
        &mut self,
        chunk: &Range<u64>,
        from: &mut DestageSources<'_>,
        cx: &mut Context<'_>,
    ) -> bool {
        let bytes = (chunk.end - chunk.start) as usize * BLOCK_BYTES;
        let Some(buf) = shared_buffer(bytes, cx) else {
            return false;
        };
        let position = chunk.start;
        self.chunks.reading(chunk);
        let op = Op::DestageChunk { position };
        from.log.read(position, op, buf, from.port, cx);
        true
    }

    /// A chunk of the log was read, or could not be.
    pub(super) fn chunk_was_read(
        &mut self,
        now: Nanos,
        position: u64,
        result: Result<Done, IoError>,
        from: &mut DestageSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let data = if let Ok(Done::Read(data)) = result {
            Some(data.freeze())
        } else {
            None
        };
        for Waiting { item, part } in self.chunks.was_read(position, data.clone()) {
            let Part { range, sequence } = self.generation.plan().items[item].parts[part];
            let entry = from.log.get().entry(sequence);
            let (blocks, packed) = (entry.positions(range), Packed::of(entry));
            let place = self.place_for(packed, range, cx);
            let read = data.as_ref().zip(place.ok()).and_then(|(data, place)| {
                let start = (blocks.start - position) as usize * BLOCK_BYTES;
                let end = (blocks.end - position) as usize * BLOCK_BYTES;
                let part = from.checked_part(range, blocks.start, &data.slice(start..end), place);
                if part.is_none() {
                    self.distrust_chunk(position, from);
                }
                part
            });
            // It is tried again soon, alone if it was bad.
            let postponed = read.is_none() && data.is_some();
            self.part_was_read(now, item, part, (read, postponed), from, cx);
        }
    }

    /// Memory for a part out of a chunk, if it is compressed there.
    fn place_for(
        &mut self,
        packed: Option<Packed>,
        range: SectorRange,
        cx: &Context<'_>,
    ) -> Result<Option<(Packed, BufMut)>, NoMemory> {
        let Some(packed) = packed else {
            return Ok(None);
        };
        let buf = self.buffer(range.bytes(), cx).ok_or(NoMemory)?;
        Ok(Some((packed, buf)))
    }

    /// A part of a chunk is bad: what is needed of it is read part by part, and again where that is bad.
    fn distrust_chunk(&mut self, position: u64, from: &mut DestageSources<'_>) {
        let log = from.log.get();
        self.chunks.distrust(position, log);
    }

    fn buffer(&mut self, bytes: usize, cx: &Context<'_>) -> Option<BufMut> {
        if let Some(buf) = shared_buffer(bytes, cx) {
            // What was needed in a shortage is given back.
            let is_free = |reserve: &mut Reserve| reserve.is_free();
            self.reserve.take_if(is_free);
            return Some(buf);
        }
        if self.reserve.is_none() && !self.is_silent {
            self.reserve = Reserve::take(self.generation.budget());
        }
        self.reserve.as_ref()?.alloc(bytes)
    }

    /// A part was read alone, or could not be. Returns whether it is bad, for good.
    pub(super) fn log_was_read(
        &mut self,
        (item, part): (usize, usize),
        position: u64,
        tries: u8,
        result: Result<Done, IoError>,
        from: &mut DestageSources<'_>,
        cx: &mut Context<'_>,
    ) -> bool {
        let tries = tries + 1;
        let mut is_bad = false;
        let read = if let Ok(Done::Read(data)) = result {
            let is_good = from.log.blocks_match(&data, position);
            if !is_good && tries < LOG_READ_TRIES_MAX {
                let token = from.port.begin(Op::DestageRead {
                    item,
                    part,
                    position,
                    tries,
                });
                from.log.read_pinned(token, position, data, true, cx);
                return false;
            }
            let taken = self.taken_out(item, part, position, data, is_good, from);
            is_bad = taken.is_none();
            taken
        } else {
            None
        };
        from.log.unpin(position);
        self.part_was_read(from.port.now, item, part, (read, false), from, cx);
        is_bad
    }

    /// The sectors of a part out of its blocks, which were read alone; `None` if they are bad, for good.
    fn taken_out(
        &mut self,
        item: usize,
        part: usize,
        position: u64,
        data: BufMut,
        is_good: bool,
        from: &mut DestageSources<'_>,
    ) -> Option<Buf> {
        let Part { range, sequence } = self.generation.plan().items[item].parts[part];
        let packed = Packed::of(from.log.get().entry(sequence));
        let blocks = (data.len() / BLOCK_BYTES) as u64;
        let taken = match packed {
            _ if !is_good => Err(data),
            None => {
                let start = range.offset_in_block();
                Ok(data.freeze().slice(start..start + range.bytes()))
            }
            Some(packed) => from.unpacked_in_place(&packed, range, data),
        };
        match taken {
            Ok(part) => {
                from.damage.found_good(&(position..position + blocks));
                Some(part)
            }
            Err(data) => {
                from.damage
                    .found_bad(position, &data, from.log.get(), &mut from.port.stats);
                self.meets_damage = true;
                None
            }
        }
    }

    /// A part of an item has been read, or could not be.
    fn part_was_read(
        &mut self,
        now: Nanos,
        item: usize,
        part: usize,
        (read, starved): (Option<Buf>, bool),
        from: &mut DestageSources<'_>,
        cx: &mut Context<'_>,
    ) {
        let gathering = self.gathering.get_mut(&item).expect("the item gathers");
        gathering.failed |= read.is_none() && !starved;
        gathering.starved |= starved;
        gathering.parts[part] = read;
        gathering.missing -= 1;
        if gathering.missing > 0 {
            return;
        }
        let gathering = self.gathering.remove(&item).expect("just used");
        if gathering.failed && self.meets_damage && !from.port.is_fenced() {
            self.generation.item_unreadable(item);
        } else if gathering.failed || from.port.is_fenced() {
            self.generation.item_done(now, item, false);
        } else if gathering.starved {
            self.generation.item_postponed(item);
        } else {
            self.write_item(
                item,
                gathering.parts.into_iter().flatten().collect(),
                from,
                cx,
            );
        }
    }

    /// An item was written, or could not be.
    pub(super) fn was_written(
        &mut self,
        now: Nanos,
        item: usize,
        result: Result<Done, IoError>,
        from: &mut DestageSources<'_>,
    ) {
        if result.is_err() {
            from.port.stats.backend_errors += 1;
        } else {
            let plan = &self.generation.plan().items[item];
            if !plan.parts.is_empty() {
                from.port.stats.destaged_bytes += plan.range.bytes() as u64;
            }
        }
        self.generation.item_done(now, item, result.is_ok());
    }

    /// What was destaged and is still in memory is what the backend holds now: keep it as clean.
    fn keep_destaged(
        &mut self,
        items: Range<usize>,
        from: &mut DestageSources<'_>,
        cx: &mut Context<'_>,
    ) {
        if matches!(
            from.config.policy,
            Policy::WriteAround | Policy::PassThrough
        ) {
            return;
        }
        let log = from.log.get();
        let items = &self.generation.plan().items[items];
        for part in items.iter().flat_map(|item| &item.parts) {
            let entry = log.entry(part.sequence);
            if entry.kind != EntryKind::Write || entry.range.bytes() > KEEP_BYTES_MAX {
                continue;
            }
            let Some(data) = &entry.data else { continue };
            for block in whole_blocks_of(part.range) {
                let data = block_of(data, entry.range, block);
                cx.cache.fill_block(from.cached.own_key(block), &data);
            }
        }
    }
}

impl Volume {
    /// A part of an item was read from the log.
    pub(super) fn destage_was_read(
        &mut self,
        place: (usize, usize),
        position: u64,
        tries: u8,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        if result.is_err() {
            self.dirty_is_unreadable(cx);
        }
        let (destaging, mut from) = self.destage_side();
        if destaging.log_was_read(place, position, tries, result, &mut from, cx) {
            self.refuse_for_damage(cx);
        }
    }

    /// A chunk of the log was read.
    pub(super) fn destage_chunk_was_read(
        &mut self,
        position: u64,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        self.log.unpin(position);
        if result.is_err() {
            self.dirty_is_unreadable(cx);
        }
        let now = self.port.now;
        let (destaging, mut from) = self.destage_side();
        destaging.chunk_was_read(now, position, result, &mut from, cx);
    }

    pub(super) fn destage_all(&mut self) {
        self.direct.want_destage_all();
        let Some(log) = self.log.if_open() else {
            return;
        };
        self.destaging.aim(log);
    }

    /// Move the destage as far as it goes without waiting.
    pub(super) fn destage_poll(&mut self, now: Nanos, cx: &mut Context<'_>) {
        if let Stage::Retiring(_) = self.destaging.generation().stage() {
            self.retire_some(now, cx);
        }
        self.watch_failed_log(cx);
        // Between two generations it is decided whether the next one is the last of a drain.
        self.switch_path();
        if !self.port.is_fenced() {
            let (destaging, mut from) = self.destage_side();
            destaging.drive(now, &mut from, cx);
        }
    }

    /// Whether flushes wait for a generation that is not flushed any more.
    pub(super) fn holds_flushes_in_vain(&self) -> bool {
        let config = &self.config;
        self.destaging.holds_flushes(config)
            && self.destaging.generation().stage() != Stage::Flushing
            && (self
                .destaging
                .is_stuck(config, &self.damage, self.log.get())
                || Destaging::gives_up(self.close, &self.log, &self.direct))
    }

    /// The log's device does not give what only it has. The item is tried again after a pause.
    fn dirty_is_unreadable(&mut self, cx: &mut Context<'_>) {
        let again = self.health.log_is_unreadable();
        self.failed_log_is_unreadable(cx);
        if again {
            // It may never be read: whoever waits for the generation to be whole is told.
            let (direct, mut from) = self.direct_side();
            direct.refuse_flushes_behind_destage(RequestError::Io, &mut from, cx);
        }
    }

    pub(super) fn destage_was_flushed(
        &mut self,
        now: Nanos,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        self.destaging.generation_mut().flushed(now, result.is_ok());
        let (direct, mut from) = self.direct_side();
        direct.destage_flush_ended(result.is_ok(), &mut from, cx);
        if result.is_err() {
            self.port.stats.backend_errors += 1;
        } else {
            // Everything of the generation was read for it.
            self.health.log_was_read();
        }
    }

    pub(super) fn superblock_written(
        &mut self,
        result: Result<Done, IoError>,
        cx: &mut Context<'_>,
    ) {
        if result.is_err() {
            // The device may hold either tail: nothing may be retired before one is known to be durable.
            if self.superblock_failed(cx) {
                let (destaging, mut from) = self.destage_side();
                destaging.commit(&mut from, cx);
            }
            return;
        }
        self.log.superblock_ended();
        self.destaging.generation_mut().committed();
    }

    /// Forget more of what the superblock no longer names.
    fn retire_some(&mut self, now: Nanos, cx: &mut Context<'_>) {
        let (destaging, mut from) = self.destage_side();
        let Some(resident) = destaging.retire_some(now, &mut from, cx) else {
            return;
        };
        self.writes.resident.retired(resident);
        if self.log.is_given_up() {
            self.answer_durable(cx);
        }
    }

    pub(super) fn destage_wakeup(&self) -> Option<Nanos> {
        let (config, log) = (&self.config, self.log.get());
        let stuck = self.destaging.is_blocked(config, &self.damage, log) || self.port.is_fenced();
        match self.destaging.generation().stage() {
            Stage::Retiring(_) => Some(self.port.now),
            Stage::Planning | Stage::Forgetting(_) if !stuck => Some(self.port.now),
            _ if stuck || Destaging::gives_up(self.close, &self.log, &self.direct) => None,
            // The flush wakes.
            Stage::Idle
                if (self.destaging).awaits_direct_flush(config, self.close, &self.direct) =>
            {
                None
            }
            // What is not durable cannot be taken up: its completion is what wakes.
            Stage::Idle
                if (self.direct).awaits_last_spans(
                    &self.log,
                    &self.damage,
                    &self.destaging,
                    &self.health,
                ) =>
            {
                None
            }
            Stage::Idle => {
                let log = self.log.get();
                let oldest = log
                    .spans()
                    .front()
                    .filter(|span| span.end() <= log.durable());
                oldest.map(|span| span.since.plus(Destaging::age(&self.config)))
            }
            // With enough under way, it is a completion that wakes.
            // While a flush or a superblock holds it up, the end of that wakes.
            Stage::Writing if self.direct.holds_destage(&self.config, &self.log) => None,
            Stage::Writing if self.direct.is_flushing() => self
                .destaging
                .generation()
                .retry_at()
                .filter(|&at| at > self.port.now),
            Stage::Writing => self.destaging.next_item_at(),
            _ => None,
        }
    }
}

/// Where the first of these parts begins in the log.
fn first_in_log(parts: &[Part], log: &WriteLog) -> u64 {
    let positions = parts
        .iter()
        .map(|part| log.entry(part.sequence).positions(part.range).start);
    positions.min().unwrap_or(0)
}

/// A buffer from the common pool, of which a quarter is left to clients.
fn shared_buffer(bytes: usize, cx: &Context<'_>) -> Option<BufMut> {
    let pool = &cx.pool;
    if pool.free_bytes() <= pool.total_bytes() / 4 {
        return None;
    }
    pool.alloc(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::LogSuperblock;
    use crate::volume::tests::config;

    #[test]
    fn destaging_is_given_up_by_a_close_but_of_a_failed_log_that_can_be_emptied() {
        let config = config();
        let (mut log, direct) = (OpenLog::default(), Direct::default());
        let superblock = LogSuperblock::new(config.uuid, 1, config.log_bytes);
        log.opened(WriteLog::new(superblock, None));
        let gives_up = |log: &OpenLog| {
            [None, Some(true), Some(false)].map(|close| Destaging::gives_up(close, log, &direct))
        };
        assert_eq!(gives_up(&log), [false, false, true]);
        log.give_up();
        assert_eq!(gives_up(&log), [false, false, false]);
        log.fail();
        assert_eq!(gives_up(&log), [false, true, true]);
    }

    #[test]
    fn destaging_of_an_empty_log_holds_nothing_and_waits_for_nothing() {
        let config = config();
        let superblock = LogSuperblock::new(config.uuid, 1, config.log_bytes);
        let log = WriteLog::new(superblock, None);
        let destaging = Destaging::default();
        assert!(!destaging.holds_flushes(&config));
        assert!(!destaging.is_stuck(&config, &Damage::default(), &log));
    }
}
