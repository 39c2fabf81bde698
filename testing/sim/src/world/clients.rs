//! Clients: sending requests and judging replies.

use std::collections::BTreeSet;

use hdcs_core::base::limits::LOST_RANGES_MAX;
use hdcs_core::log::write_log::ADMISSION_BYTES;
use hdcs_core::volume::{State, Trouble};

use super::open_loops::LULL;
use super::{
    Ask, BACKEND_TROUBLE, BLOCK_BYTES, BLOCK_SECTORS, BlockKey, Content, Discard, Event,
    ExtentKind, FREE_BLOCKS_WHEN_FULL_MAX, Happening, Nanos, OpenClient, Phase, Plant, ReadOp,
    Reply, Request, RequestError, RequestId, SECTOR_BYTES, SMALL_POOL_BYTES, SectorRange, Unit,
    Violation, Volume, Waiting, World, check_promotion, check_reads,
};

/// What the trace calls each kind of request.
const ASKS: [&str; 10] = [
    "ask read",
    "ask write",
    "ask write-zeroes",
    "ask discard",
    "ask flush",
    "ask promote",
    "ask evict",
    "ask extents",
    "ask bad read",
    "ask bad discard",
];

impl World {
    /// One client's turn: fill its queue.
    pub(super) fn client(&mut self, unit: usize) -> Result<(), Violation> {
        if self.volumes() <= unit {
            return Ok(());
        }
        if self.shrinks(unit)? {
            return Ok(());
        }
        self.units[unit].client_waits = true;
        let burst = self.random.usize(1..=8);
        for _ in 0..burst {
            let state = &mut self.units[unit];
            if state.asks_left == 0 || state.waits_in_turn() >= state.workload.depth() {
                break;
            }
            let sectors = state.history.sectors();
            let ask = state
                .postponed
                .take()
                .unwrap_or_else(|| state.workload.next(sectors));
            if !self.ask(unit, ask)? {
                self.units[unit].postponed = Some(ask);
                break;
            }
            self.units[unit].asks_left -= 1;
        }
        let state = &self.units[unit];
        if state.postponed.is_some() {
            // Nobody tells when a buffer is free.
            self.engine.at(
                self.engine.now().plus(Nanos::from_millis(1)),
                Happening::Client(unit),
            );
            self.units[unit].client_waits = false;
        } else if state.waits_in_turn() < state.workload.depth() {
            self.wake_client(unit);
        }
        Ok(())
    }

    /// Let a client that waits for an answer go on after a moment.
    fn wake_client(&mut self, unit: usize) {
        if self.units[unit].asks_left > 0 {
            self.units[unit].client_waits = false;
            let pause = Nanos::from_micros(self.random.u64(1..200));
            self.engine
                .at(self.engine.now().plus(pause), Happening::Client(unit));
        }
    }

    /// Send one request; false if there is no buffer for it at present.
    pub fn ask(&mut self, unit: usize, ask: Ask) -> Result<bool, Violation> {
        let is_beside = matches!(ask, Ask::Flush)
            && self.is_flush_after_return(unit)
            && self.flushes_under_way(unit) > 0;
        let Self {
            units,
            pool,
            engine,
            planted,
            coverage,
            ..
        } = self;
        let state = &mut units[unit];
        let history = &mut state.history;
        let (waiting, request, code) = match ask {
            Ask::Read(range) => (
                Waiting::Read(history.issue_read(range)),
                Request::Read { range },
                0,
            ),
            Ask::Write(range, content, fua) => {
                let Some(mut buf) = pool.alloc_for(range) else {
                    return Ok(false);
                };
                let id = history.issue_write(range, content);
                let content = history.write(id).content;
                for (sector, bytes) in (range.start..).zip(buf.chunks_mut(SECTOR_BYTES)) {
                    content.fill(state.volume, sector, bytes);
                }
                state.order.written(range);
                let data = buf.freeze();
                let waiting = Waiting::Write(id, fua);
                // It is durable when it is acknowledged all the same.
                let is_durable = state.durability.is_on_write() && !history.is_direct();
                let fua = fua && !(is_durable && planted.strikes(Plant::ForgottenFua));
                (waiting, Request::Write { range, data, fua }, 1)
            }
            Ask::WriteZeroes(range, fua, no_hole) => {
                let id = history.issue_write(range, Some(Content::Zero));
                state.order.written(range);
                let request = Request::WriteZeroes {
                    range,
                    fua,
                    no_hole,
                };
                (Waiting::Write(id, fua), request, 2)
            }
            Ask::Discard(range, fua) if state.config.discard == Discard::Ignore => {
                let request = if planted.is(Plant::ForcedDiscard) {
                    Request::WriteZeroes {
                        range,
                        fua,
                        no_hole: false,
                    }
                } else {
                    Request::Discard { range, fua }
                };
                (Waiting::Ignored, request, 3)
            }
            Ask::Discard(range, fua) => {
                let id = history.issue_write(range, Some(Content::Zero));
                state.order.written(range);
                (Waiting::Write(id, fua), Request::Discard { range, fua }, 3)
            }
            Ask::Flush => {
                coverage.flushes_beside += u64::from(is_beside);
                state.durability.flush_sent();
                (Waiting::Flush(history.issue_flush()), Request::Flush, 4)
            }
            Ask::Promote(range) => {
                let shown = |sector| state.backend.visible(sector);
                let before = planted
                    .is(Plant::StalePromotion)
                    .then(|| (range.start..range.end()).map(shown).collect());
                let before = before.unwrap_or_default();
                let waiting = Waiting::Promote(range, before);
                (waiting, Request::Promote { range }, 5)
            }
            Ask::Evict(range) => (Waiting::Other, Request::Evict { range }, 6),
            Ask::Extents(range, kind) => {
                let asked = history.issue_read(range);
                (
                    Waiting::Extents(asked, kind),
                    Request::Extents { range, kind },
                    7,
                )
            }
            Ask::Bad(range, true) => (Waiting::Bad, Request::Read { range }, 8),
            Ask::Bad(range, false) => (Waiting::Bad, Request::Discard { range, fua: false }, 9),
        };
        let number = match &waiting {
            Waiting::Write(id, _) => {
                let range = history.write(*id).range;
                let is_other = |sector: &u64| !(range.start..range.end()).contains(sector);
                state.lost.retain(is_other);
                if !state.opened {
                    state.asked_early.extend(range.start..range.end());
                }
                u64::from(*id)
            }
            _ => 0,
        };
        let range = match ask {
            Ask::Read(range)
            | Ask::Write(range, ..)
            | Ask::WriteZeroes(range, ..)
            | Ask::Discard(range, _)
            | Ask::Promote(range)
            | Ask::Evict(range)
            | Ask::Extents(range, _)
            | Ask::Bad(range, _) => range,
            Ask::Flush => SectorRange::new(0, 0),
        };
        let id = state.requests.sent(engine.now(), waiting);
        self.engine
            .note(ASKS[code], [id.0, range.start, range.count, number]);
        if self.planted.is(Plant::ArrivalsFirst) {
            self.engine.after(LULL, Happening::Tick);
        }
        if matches!(ask, Ask::Promote(_)) && self.planted.strikes(Plant::IdlePromotion) {
            self.replied(unit, id, Ok(Reply::Done))?;
            return Ok(true);
        }
        self.step_volume(unit, Event::Request { id, request })?;
        Ok(true)
    }

    pub(super) fn replied(
        &mut self,
        unit: usize,
        id: RequestId,
        result: Result<Reply, RequestError>,
    ) -> Result<(), Violation> {
        if self.planted.strikes(Plant::ReplyNever) {
            return Ok(());
        }
        if self.planted.is(Plant::StarvedRead) && self.is_starved(unit, id) {
            self.units[unit].starved.push((id, result));
            return Ok(());
        }
        let is_arriving = self.units[unit].is_arriving(self.engine.now());
        if self.planted.is(Plant::ArrivalsFirst) && is_arriving {
            self.units[unit].starved.push((id, result));
            return Ok(());
        }
        self.coverage.replies += 1;
        let error = result.as_ref().err().map_or(0, |&error| error as u64 + 1);
        self.engine.note("reply", [id.0, error, unit as u64, 0]);
        let (since, waiting) = self.units[unit].requests.answered(id)?;
        (self.units[unit].fence).check_reply(unit, result.as_ref().err().copied())?;
        let open_loop = &mut self.units[unit].open_loop;
        let is_open = open_loop.as_mut().is_some_and(|one| one.answered(id));
        if self.units[unit].client_waits && !is_open {
            self.wake_client(unit);
        }
        if self.planted.strikes(Plant::ReplyTwice) {
            self.units[unit].requests.answered(id)?;
        }
        let is_deaf = matches!(
            (&waiting, &result),
            (Waiting::Flush(_), Err(RequestError::Io))
        ) && self.planted.strikes(Plant::DeafFlush);
        let failed_before = match &waiting {
            Waiting::Flush(flush) => flush.issued < self.units[unit].flush_failed,
            _ => false,
        };
        let result = match result {
            _ if is_deaf => Ok(Reply::Done),
            Ok(_) if failed_before => Err(RequestError::Io),
            Err(RequestError::Corrupt) => match self.shown_lost(unit, &waiting) {
                Some(reply) => Ok(reply),
                None => Err(RequestError::Corrupt),
            },
            result => result,
        };
        match result {
            Ok(reply) => self.succeeded(unit, waiting, reply),
            Err(error) => {
                if matches!(waiting, Waiting::Scrub(_)) {
                    self.scrub_refused(unit);
                }
                self.coverage.errors += 1;
                self.failed(unit, &waiting, error, since)
            }
        }
    }

    fn succeeded(&mut self, unit: usize, waiting: Waiting, reply: Reply) -> Result<(), Violation> {
        let now = self.engine.now();
        match (waiting, reply) {
            (Waiting::Read(read), Reply::Data(data)) => {
                self.check_not_lost(unit, read.range)?;
                if self.planted.strikes(Plant::LeakBuffer) {
                    self.leaked.push(data.clone());
                }
                let mut data = data.to_vec();
                self.misplace(unit, read, &data);
                self.spoil(unit, read, &mut data);
                let state = &mut self.units[unit];
                let volume = state.volume;
                let seen = check_reads::check_read(&mut state.history, volume, read, &data)?;
                // Of a log that has failed, what will not become durable is shown.
                if !state.log_trouble {
                    state.durability.read_seen(&mut state.history, seen);
                }
                Ok(())
            }
            (Waiting::Write(id, fua), Reply::Done) => {
                self.check_consistent(unit, id)?;
                self.check_written(unit, id, fua)?;
                let state = &mut self.units[unit];
                state.history.ack_write(id, now);
                if fua {
                    state.history.order_fua(id);
                }
                state.durability.write_acked(&mut state.history, id, fua);
                Ok(())
            }
            (Waiting::Flush(flush), Reply::Done) => {
                self.check_flushed(unit, flush)?;
                let state = &mut self.units[unit];
                state.durability.flush_acked(&mut state.history, flush);
                Ok(())
            }
            (Waiting::Extents(asked, ExtentKind::Allocation), Reply::Extents(extents)) => {
                check_reads::check_extents(&self.units[unit].history, asked, &extents)
            }
            (Waiting::Extents(asked, ExtentKind::Cache), Reply::Extents(extents)) => {
                check_reads::check_cache_extents(&self.units[unit].history, asked, &extents)
            }
            (Waiting::Promote(range, before), Reply::Done) => {
                self.promoted(unit, range, &before);
                Ok(())
            }
            (Waiting::Scrub(at), Reply::Scrubbed(found)) => {
                self.scrubbed(unit, at, found);
                Ok(())
            }
            (Waiting::Other | Waiting::Ignored, Reply::Done) => Ok(()),
            (waiting, reply) => Err(Violation::new(
                "reply-kind",
                format!("{waiting:?} was answered with {reply:?}"),
            )),
        }
    }

    /// A promotion was answered; a planted bug puts what was there at its beginning into the cache.
    fn promoted(&mut self, unit: usize, range: SectorRange, before: &[Content]) {
        if !self.planted.strikes(Plant::StalePromotion) {
            return;
        }
        let state = &self.units[unit];
        let Some(node) = &mut self.node else { return };
        let blocks = check_promotion::whole_blocks(range, state.history.sectors());
        for block in blocks {
            let first = block * BLOCK_SECTORS;
            let mut data = vec![0; BLOCK_BYTES];
            let known = (first.checked_sub(range.start))
                .and_then(|at| before.get(at as usize..(at + BLOCK_SECTORS) as usize));
            let Some(known) = known else { continue };
            for ((sector, bytes), content) in
                (first..).zip(data.chunks_mut(SECTOR_BYTES)).zip(known)
            {
                content.fill(state.volume, sector, bytes);
            }
            let key = BlockKey::new(state.config.number, block);
            node.cache_of(unit).fill_block(key, &data);
        }
    }

    /// What planted bugs do to the data of a reply.
    fn spoil(&mut self, unit: usize, read: ReadOp, data: &mut [u8]) {
        if self.planted.strikes(Plant::CorruptReply) {
            data[0] ^= 1;
        }
        if self.planted.strikes(Plant::StaleReply) {
            let state = &self.units[unit];
            for (sector, bytes) in (read.range.start..).zip(data.chunks_mut(SECTOR_BYTES)) {
                state
                    .backend
                    .visible(sector)
                    .fill(state.volume, sector, bytes);
            }
        }
    }

    fn failed(
        &mut self,
        unit: usize,
        waiting: &Waiting,
        error: RequestError,
        since: Nanos,
    ) -> Result<(), Violation> {
        let allowed = self.error_is_allowed(unit, waiting, error, since);
        let state = &mut self.units[unit];
        if matches!(waiting, Waiting::Flush(_) | Waiting::Write(_, true)) {
            state.history.told_of_loss();
        }
        if let Waiting::Write(id, _) = *waiting {
            match error {
                RequestError::Io | RequestError::Corrupt | RequestError::Fenced => {
                    state.history.fail_write(id);
                }
                _ => state.history.refuse_write(id),
            }
        }
        if error == RequestError::LogFull {
            self.check_log_is_full(unit)?;
        }
        self.coverage.cut_refused += u64::from(self.was_cut_off(unit, waiting));
        if allowed {
            return Ok(());
        }
        Err(Violation::new(
            "error-without-cause",
            format!("{waiting:?} failed: {error}"),
        ))
    }

    /// A write may be refused for want of room only when the log could not take the largest span, or the memory that all
    /// share has no place for what it would add to the index.
    fn check_log_is_full(&self, unit: usize) -> Result<(), Violation> {
        let Some(volume) = self.volume(unit) else {
            return Ok(());
        };
        let trouble = volume.trouble().map(|(trouble, _)| trouble);
        if let Some(Trouble::LogEmptying | Trouble::LogSilent) = trouble {
            // It takes nothing any more, and what is written past it waits for the backend.
            return Ok(());
        }
        let stats = volume.stats(self.engine.now());
        let free = stats.log_prepared_blocks - stats.log_used_blocks;
        let budget = (self.node.as_ref()).map(|node| node.indexes.of(node.shards.of(unit)));
        let lacks_memory = budget.is_some_and(|budget| budget.free() < ADMISSION_BYTES);
        if free <= FREE_BLOCKS_WHEN_FULL_MAX || lacks_memory {
            return Ok(());
        }
        Err(Violation::new(
            "log-full-with-room",
            format!(
                "a write was refused with {free} of {} blocks free",
                stats.log_prepared_blocks
            ),
        ))
    }

    /// Whether what was asked for reaches beyond the end that the volume has by now.
    fn was_cut_off(&self, unit: usize, waiting: &Waiting) -> bool {
        let history = &self.units[unit].history;
        let range = match waiting {
            Waiting::Read(read) | Waiting::Extents(read, _) => read.range,
            Waiting::Write(id, _) => history.write(*id).range,
            Waiting::Promote(range, _) => *range,
            _ => return false,
        };
        range.end() > history.sectors()
    }

    /// Whether the volume cannot have the data that a request needs: it is lost, or was in a block that has rotted.
    fn rot_excuses(&self, unit: usize, waiting: &Waiting) -> bool {
        let state = &self.units[unit];
        let is_gone = |range: SectorRange| {
            let of = |sectors: &BTreeSet<u64>| sectors.range(range.start..range.end()).count() > 0;
            let is_lost = self
                .volume(unit)
                .is_some_and(|volume| volume.lost().overlaps(range));
            is_lost || of(&state.rotten) || of(&state.lost)
        };
        match waiting {
            Waiting::Read(read) => is_gone(read.range),
            _ => !state.rotten.is_empty(),
        }
    }

    fn error_is_allowed(
        &self,
        unit: usize,
        waiting: &Waiting,
        error: RequestError,
        since: Nanos,
    ) -> bool {
        let state = &self.units[unit];
        let volume = self.volume(unit);
        let backend_trouble = state
            .backend_trouble
            .is_some_and(|time| time >= since || self.engine.now().since(time) < BACKEND_TROUBLE);
        let phase = volume.map(Volume::phase);
        match error {
            RequestError::BadRange => {
                matches!(waiting, Waiting::Bad) || self.was_cut_off(unit, waiting)
            }
            RequestError::Io => {
                let writes = matches!(waiting, Waiting::Write(..) | Waiting::Flush(_));
                let open_failed = matches!(phase, Some(Phase::Failed(_)));
                let log = self.log_excuses(unit) || (state.log_rotten && open_failed);
                let past_log = writes && state.was_direct && state.backend_trouble.is_some();
                let hung = self.silent_log_excuses(unit, waiting);
                let lost = volume.is_some_and(|volume| is_refused_for_lost(volume, waiting));
                // A promotion brings what the store has, also where the log will write it again.
                let unsettled = match (waiting, &state.local) {
                    (Waiting::Promote(range, _), Some(local)) => local.may_refuse(*range),
                    _ => false,
                };
                // What a planted bug tells those who waited is not what shows it.
                let planted = match waiting {
                    Waiting::Flush(flush) => flush.issued < state.flush_failed,
                    _ => false,
                };
                let of_backend = (!writes && backend_trouble) || past_log || planted;
                unsettled || log || hung || of_backend || lost
            }
            RequestError::Corrupt => self.rot_excuses(unit, waiting),
            RequestError::Inconsistent => {
                let writes = matches!(waiting, Waiting::Write(..) | Waiting::Flush(_));
                let is_inconsistent = volume.map(Volume::state) == Some(State::Inconsistent);
                writes && is_inconsistent && !state.rotten.is_empty()
            }
            RequestError::LogFull => {
                // Whether it says so with reason is checked on its own.
                let trouble = volume.and_then(Volume::trouble);
                let silent = matches!(
                    trouble,
                    Some((Trouble::BackendSilent | Trouble::LogSilent, _))
                );
                // The volume shows another trouble if it has one that is worse.
                let max = state.config.backend_answer_max;
                let mut theirs = self.in_flight.values();
                let late = theirs.any(|one| {
                    one.io.backend() == Some(unit) && self.engine.now().since(one.since) >= max
                });
                state.config.when_full == hdcs_core::volume::WhenFull::Error
                    && (backend_trouble || silent || late || state.log_trouble)
            }
            RequestError::ReadOnly => {
                let hung = self.silent_log_refuses(unit, error);
                hung || self.log_excuses(unit)
            }
            RequestError::Policy => {
                let refused = state.read_only_since.is_some() || state.read_only_until >= since.0;
                let writes = matches!(waiting, Waiting::Write(..) | Waiting::Ignored);
                refused && (writes || matches!(waiting, Waiting::Bad))
            }
            RequestError::Fenced => state.fence.is_told(),
            RequestError::Closing => phase != Some(Phase::Open) || state.is_leaving,
            RequestError::NoBuffers => self.scenario.pool_bytes <= SMALL_POOL_BYTES,
        }
    }
}

impl Unit {
    /// Requests that the client waits for which sends no more than so many at once.
    fn waits_in_turn(&self) -> usize {
        let open = self.open_loop.as_ref().map_or(0, OpenClient::waiting);
        self.requests.len() - open
    }
}

/// Whether a write may fail for the sake of what its volume has lost: it goes past the log, or would split what cannot be
/// told in more pieces.
fn is_refused_for_lost(volume: &Volume, waiting: &Waiting) -> bool {
    let Some((trouble, _)) = volume.trouble() else {
        return false;
    };
    let goes_past = matches!(trouble, Trouble::LogEmptying | Trouble::LogGivenUp);
    let is_full = volume.lost().count() == LOST_RANGES_MAX;
    matches!(waiting, Waiting::Write(..)) && !volume.lost().is_empty() && (goes_past || is_full)
}
