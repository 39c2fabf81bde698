//! Reads: from what is gathered, from batches that are being put, or with one ranged get for each
//! run of consecutive slots. Of a compressed object, that get brings whole frames. A read whose page of the map
//! is not in memory waits for it first ([`super::pages`]), as does a question for extents that knows nothing yet.

use alloc::vec::Vec;

use super::batch;
use super::format::{SLOT_BYTES, slot_checksum};
use super::frames::{FRAME_SLOTS, FRAMES_OFFSET, Frames};
use super::io::{Action, Kind, StoreError, Stored};
use super::map::{Found, Place};
use super::pages::Waiter;
use super::turns;
use super::{ObjectVolume, Purpose, end};
use crate::base::buf::BufMut;
use crate::base::error::IoError;
use crate::base::io::{Done, Extent, ExtentState, SectorRange, Token};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS};

/// Blocks of one get at most: with their checksums they fill a buffer of 512 KiB.
pub(super) const FETCH_BLOCKS_MAX: u64 = (512 << 10) / SLOT_BYTES as u64;
/// Runs that one answer to a question for extents has at most.
const EXTENTS_MAX: usize = 256;

/// Consecutive blocks in consecutive slots of one object.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetch {
    pub(super) place: Place,
    pub(super) block: u64,
    pub(super) count: u32,
}

/// Slots of one get from a place on at most: of a compressed object, up to the end of a frame.
fn fetch_blocks(place: Place) -> u64 {
    if !place.is_compressed() {
        return FETCH_BLOCKS_MAX;
    }
    let slot = u64::from(place.slot());
    let frame = u64::from(FRAME_SLOTS);
    (slot + FETCH_BLOCKS_MAX) / frame * frame - slot
}

/// A get of slots that waits for the frames of its object.
#[derive(Debug)]
pub(super) struct Waiting {
    token: Token,
    slot: u32,
    buf: BufMut,
}

/// A read under way.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) token: Token,
    buf: BufMut,
    begin: u64,
    /// Where the first byte is that nobody has looked for yet.
    at: u64,
    end: u64,
    pending: u32,
    error: Option<IoError>,
}

/// A question for extents.
#[derive(Debug)]
pub(super) struct Survey {
    pub(super) token: Token,
    range: SectorRange,
    /// The next block to look at.
    block: u64,
    extents: Vec<Extent>,
}

/// How far a request at the front of the queue has come.
enum Resolved {
    /// It needs nothing more from the queue.
    Done,
    /// It waits for a page, and comes back.
    Parked,
    /// It needs a get, and waits for its turn.
    Blocked,
}

impl Read {
    /// Where the bytes of `block` go that are not before `at`, and where they are in the block.
    fn part(&mut self, block: u64) -> (usize, &mut [u8]) {
        let start = block * BLOCK_BYTES as u64;
        let from = start.max(self.begin);
        let to = (start + BLOCK_BYTES as u64).min(self.end);
        let range = (from - self.begin) as usize..(to - self.begin) as usize;
        ((from - start) as usize, &mut self.buf[range])
    }

    fn give(&mut self, block: u64, data: &[u8]) {
        let (within, out) = self.part(block);
        let bytes = out.len();
        out.copy_from_slice(&data[within..within + bytes]);
    }
}

impl ObjectVolume {
    pub(super) fn begin_read(&mut self, token: Token, offset: u64, buf: BufMut) {
        let end = offset + buf.len() as u64;
        assert!(
            end <= self.blocks() * BLOCK_BYTES as u64,
            "a read of {} bytes at {offset} of {}",
            buf.len(),
            self.bytes
        );
        self.next_id += 1;
        let read = Read {
            token,
            buf,
            begin: offset,
            at: offset,
            end,
            pending: 0,
            error: None,
        };
        self.reads.insert(self.next_id, read);
        self.read_queue.push_back(self.next_id);
    }

    pub(super) fn pump_reads(&mut self, actions: &mut Vec<Action>) {
        actions.append(&mut self.ready);
        let mut waits = false;
        while let Some(&id) = self.read_queue.front() {
            let resolved = if let Some(mut read) = self.reads.remove(&id) {
                let resolved = self.resolve(id, &mut read, actions);
                self.reads.insert(id, read);
                resolved
            } else if let Some(mut survey) = self.surveys.remove(&id) {
                let resolved = self.survey(id, &mut survey, actions);
                if let Resolved::Done = resolved {
                    end(survey.token, Ok(Done::Extents(survey.extents)), actions);
                } else {
                    self.surveys.insert(id, survey);
                }
                resolved
            } else {
                Resolved::Done
            };
            if let Resolved::Blocked = resolved {
                waits = true;
                break;
            }
            self.read_queue.pop_front();
            if let Resolved::Done = resolved {
                self.end_read_if_done(id, actions);
            }
        }
        self.again |= self.turns.set_waits(turns::Kind::Read, waits);
    }

    pub(super) fn begin_survey(&mut self, token: Token, range: SectorRange) {
        self.next_id += 1;
        let survey = Survey {
            token,
            range,
            block: range.first_block(),
            extents: Vec::new(),
        };
        self.surveys.insert(self.next_id, survey);
        self.read_queue.push_back(self.next_id);
    }

    /// A page that a read needs could not be read.
    pub(super) fn fail_read(&mut self, id: u64, error: IoError, actions: &mut Vec<Action>) {
        if let Some(survey) = self.surveys.remove(&id) {
            return end(survey.token, Err(error), actions);
        }
        if let Some(read) = self.reads.get_mut(&id) {
            read.error.get_or_insert(error);
            read.at = read.end;
        }
        self.end_read_if_done(id, actions);
    }

    /// Wait for a page.
    fn park(&mut self, id: u64, page: u64, actions: &mut Vec<Action>) -> Resolved {
        if self.want_page(page, Waiter::Read(id), actions) {
            Resolved::Parked
        } else {
            Resolved::Blocked
        }
    }

    /// Find the rest of what a read asks for.
    fn resolve(&mut self, id: u64, read: &mut Read, actions: &mut Vec<Action>) -> Resolved {
        let block_bytes = BLOCK_BYTES as u64;
        while read.at < read.end {
            let block = read.at / block_bytes;
            let rest = read.end.div_ceil(block_bytes) - block;
            let next = |blocks: u64| (block + blocks) * block_bytes;
            match self.gathering.find(block) {
                Some(batch::Found::Data(data)) => {
                    read.give(block, data);
                    read.at = next(1).min(read.end);
                    continue;
                }
                Some(batch::Found::Zero) => {
                    read.part(block).1.fill(0);
                    read.at = next(1).min(read.end);
                    continue;
                }
                None => {}
            }
            let limit = (self.gathering.next_held(block + 1) - block).min(rest);
            let (place, mut count) = match self.map.find(block, limit) {
                Found::Here(place, count) => (place, count.min(limit)),
                Found::Page(page) => return self.park(id, page, actions),
            };
            match place {
                None => (block..block + count).for_each(|block| read.part(block).1.fill(0)),
                Some(place) => {
                    if let Some(batch) = self.batches.get(&place.number()) {
                        for index in 0..count as u32 {
                            let data = batch.block(place.slot() + index);
                            read.give(block + u64::from(index), data);
                        }
                    } else {
                        count = count.min(fetch_blocks(place));
                        let fetch = Fetch {
                            place,
                            block,
                            count: count as u32,
                        };
                        let purpose = Purpose::Read { request: id, fetch };
                        let kind = turns::Kind::Read;
                        if self.fetch(fetch, kind, purpose, actions).is_none() {
                            return Resolved::Blocked;
                        }
                        read.pending += 1;
                    }
                }
            }
            read.at = next(count).min(read.end);
        }
        Resolved::Done
    }

    /// Get consecutive slots; `None` if that has to wait for its turn, for another get to end, or for
    /// memory.
    pub(super) fn fetch(
        &mut self,
        fetch: Fetch,
        kind: turns::Kind,
        purpose: Purpose,
        actions: &mut Vec<Action>,
    ) -> Option<Token> {
        if self.gets_in_flight >= self.config.gets_in_flight_max || !self.turns.is_next(kind) {
            return None;
        }
        let token = self.get_slots(fetch.place, fetch.count, purpose, actions);
        let token = token.ok()?;
        self.turns.begun(kind);
        Some(token)
    }

    /// Get `count` slots from a place on. Gives back the purpose if there is no memory for that.
    pub(super) fn get_slots(
        &mut self,
        place: Place,
        count: u32,
        purpose: Purpose,
        actions: &mut Vec<Action>,
    ) -> Result<Token, Purpose> {
        let number = place.number();
        let Some(buf) = self.read_pool.alloc(count as usize * SLOT_BYTES) else {
            return Err(purpose);
        };
        let frames = if place.is_compressed() {
            self.frames.get(number)
        } else {
            None
        };
        let asks = place.is_compressed() && frames.is_none() && !self.waiting.contains_key(&number);
        let table = match asks.then(|| self.read_pool.alloc(FRAMES_OFFSET)) {
            Some(None) => return Err(purpose),
            table => table.flatten(),
        };
        self.objects.begin_read(number);
        self.gets_in_flight += 1;
        self.stats.gets += 1;
        let token = self.issue(purpose);
        let name = self.name(Kind::Data, number);
        let slot = place.slot();
        if !place.is_compressed() {
            actions.push(Action::Get {
                token,
                name,
                offset: u64::from(slot) * SLOT_BYTES as u64,
                slots: true,
                buf,
            });
        } else if let Some(frames) = frames {
            let part = frames.part(slot, count);
            actions.push(Action::GetCompressed {
                token,
                name,
                part,
                buf,
            });
        } else {
            let waiting = self.waiting.entry(number).or_default();
            waiting.push(Waiting { token, slot, buf });
        }
        if let Some(buf) = table {
            self.stats.gets += 1;
            let token = self.issue(Purpose::Frames(number));
            actions.push(Action::Get {
                token,
                name,
                offset: 0,
                slots: false,
                buf,
            });
        }
        Ok(token)
    }

    /// It is known, or not, where the frames of an object are.
    pub(super) fn frames_ended(
        &mut self,
        number: u64,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let frames = match result {
            Ok(Stored::Read(buf)) => Frames::parse(&self.writer(number), number, &buf)
                .map_err(|_| StoreError::Io(self.damaged(number))),
            Ok(_) => Err(StoreError::Io(IoError::Failed)),
            Err(error) => Err(error),
        };
        let waiting = self.waiting.remove(&number).unwrap_or_default();
        match frames {
            Ok(frames) => {
                let frames = self.frames.insert(number, frames);
                let name = self.name(Kind::Data, number);
                for Waiting { token, slot, buf } in waiting {
                    let part = frames.part(slot, (buf.len() / SLOT_BYTES) as u32);
                    self.ready.push(Action::GetCompressed {
                        token,
                        name,
                        part,
                        buf,
                    });
                }
                self.again = true;
            }
            Err(error) => {
                for waiting in waiting {
                    self.stored(waiting.token, Err(error), actions);
                }
            }
        }
    }

    /// Nobody waits any more for gets that were not asked for yet.
    pub(super) fn end_waiting_gets(&mut self) {
        for waiting in core::mem::take(&mut self.waiting).into_values().flatten() {
            self.in_flight.remove(&waiting.token.0);
        }
        for action in core::mem::take(&mut self.ready) {
            if let Action::GetCompressed { token, .. } = action {
                self.in_flight.remove(&token.0);
            }
        }
    }

    /// The slots that were fetched, if every one is what it should be.
    pub(super) fn fetched(
        &mut self,
        fetch: Fetch,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) -> Result<BufMut, IoError> {
        let buf = self.unverified(fetch.place.number(), result, actions)?;
        for index in 0..fetch.count {
            let place = fetch.place.plus(index);
            if !self.is_good(place, fetch.block + u64::from(index), slot(&buf, index)) {
                return Err(self.damaged(place.number()));
            }
        }
        Ok(buf)
    }

    /// The bytes that a get of slots of an object brought.
    pub(super) fn unverified(
        &mut self,
        number: u64,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) -> Result<BufMut, IoError> {
        self.gets_in_flight -= 1;
        self.objects.end_read(number);
        match result {
            Ok(Stored::Read(buf)) => Ok(buf),
            Ok(_) => Err(IoError::Failed),
            Err(StoreError::Io(error)) => Err(error),
            Err(_) => {
                self.probe(actions);
                Err(IoError::Failed)
            }
        }
    }

    /// Whether a slot holds what the map says.
    pub(super) fn is_good(&self, place: Place, block: u64, slot: &[u8]) -> bool {
        let number = place.number();
        let (data, sum) = slot.split_at(BLOCK_BYTES);
        slot_checksum(&self.writer(number), number, block, data).to_le_bytes() == *sum
    }

    /// A block of an object is not what it should be.
    pub(super) fn damaged(&mut self, number: u64) -> IoError {
        self.stats.damaged_blocks += 1;
        // Where its frames are may be what was wrong.
        self.frames.remove(number);
        self.objects.mark_damaged(number);
        IoError::Failed
    }

    pub(super) fn read_ended(
        &mut self,
        id: u64,
        fetch: Fetch,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let result = self.fetched(fetch, result, actions);
        let Some(read) = self.reads.get_mut(&id) else {
            return;
        };
        read.pending -= 1;
        match result {
            Ok(buf) => {
                for index in 0..fetch.count {
                    read.give(fetch.block + u64::from(index), slot(&buf, index));
                }
            }
            Err(error) => {
                read.error.get_or_insert(error);
            }
        }
        self.end_read_if_done(id, actions);
    }

    fn end_read_if_done(&mut self, id: u64, actions: &mut Vec<Action>) {
        let done = |read: &Read| read.at >= read.end && read.pending == 0;
        if !self.reads.get(&id).is_some_and(done) {
            return;
        }
        if let Some(read) = self.reads.remove(&id) {
            let result = match read.error {
                None => Ok(Done::Read(read.buf)),
                Some(error) => Err(error),
            };
            end(read.token, result, actions);
        }
    }

    /// What is mapped of a range, from its start on; perhaps not all of it. It waits for a page only while nothing is known
    /// yet, and for none of a page all of whose blocks are somewhere.
    fn survey(&mut self, id: u64, survey: &mut Survey, actions: &mut Vec<Action>) -> Resolved {
        let range = survey.range;
        let blocks_end = range.end().div_ceil(BLOCK_SECTORS);
        while survey.block < blocks_end {
            let block = survey.block;
            let (state, count) = match self.gathering.find(block) {
                Some(batch::Found::Data(_)) => (ExtentState::Data, 1),
                Some(batch::Found::Zero) => (ExtentState::Hole, 1),
                None => {
                    let held = self.gathering.next_held(block + 1);
                    let limit = (held - block).min(blocks_end - block);
                    match self.map.find(block, limit) {
                        Found::Here(Some(_), count) => (ExtentState::Data, count),
                        Found::Here(None, count) => (ExtentState::Hole, count),
                        Found::Page(page) if self.map.is_full(page) => {
                            let changed = self.map.unchanged(block, limit);
                            let rest = (page + 1) * self.map.page_blocks() - block;
                            (ExtentState::Data, rest.min(changed))
                        }
                        Found::Page(page) if survey.extents.is_empty() => {
                            return self.park(id, page, actions);
                        }
                        Found::Page(_) => return Resolved::Done,
                    }
                }
            };
            let piece = SectorRange::new(block * BLOCK_SECTORS, count * BLOCK_SECTORS);
            let piece = piece.intersect(range);
            let full = survey.extents.len() == EXTENTS_MAX;
            match survey.extents.last_mut() {
                Some(last) if last.state == state => last.range.count += piece.count,
                _ if full => break,
                _ => survey.extents.push(Extent {
                    range: piece,
                    state,
                }),
            }
            survey.block += count;
        }
        Resolved::Done
    }
}

/// A slot of a buffer of slots.
pub(super) fn slot(buf: &[u8], index: u32) -> &[u8] {
    &buf[index as usize * SLOT_BYTES..(index as usize + 1) * SLOT_BYTES]
}
