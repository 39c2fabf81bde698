//! Reads: from what is gathered, from batches that are being put, or with one ranged get for each
//! run of consecutive slots. Of a compressed object, that get brings whole frames. A read whose page of the map
//! is not in memory waits for it first ([`super::pages`]), as does a question for extents that knows nothing yet.

use alloc::vec::Vec;

use super::batch;
use super::block_store::{Waiter, slot};
use super::gets::{Fetch, fetch_blocks};
use super::io::{Action, StoreError, Stored};
use super::map::Found;
use super::port::Context;
use super::port::Purpose;
use super::turns;
use super::{ObjectVolume, end};
use crate::base::buf::BufMut;
use crate::base::error::IoError;
use crate::base::io::{Done, Extent, ExtentState, SectorRange, Token};
use crate::base::limits::{BLOCK_BYTES, BLOCK_SECTORS};

/// Runs that one answer to a question for extents has at most.
const EXTENTS_MAX: usize = 256;

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
            self.commits.bytes()
        );
        let id = self.port.next_id();
        let read = Read {
            token,
            buf,
            begin: offset,
            at: offset,
            end,
            pending: 0,
            error: None,
        };
        self.reads.insert(id, read);
        self.read_queue.push_back(id);
    }

    pub(super) fn pump_reads(&mut self, actions: &mut Vec<Action>) {
        self.store.gets.pump(actions);
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
        self.store
            .gets
            .set_waits(turns::Kind::Read, waits, &mut self.port);
    }

    pub(super) fn begin_survey(&mut self, token: Token, range: SectorRange) {
        let id = self.port.next_id();
        let survey = Survey {
            token,
            range,
            block: range.first_block(),
            extents: Vec::new(),
        };
        self.surveys.insert(id, survey);
        self.read_queue.push_back(id);
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
        if self.store.want_page(
            page,
            Waiter::Read(id),
            &mut Context::new(&mut self.port, &self.manifest, actions),
        ) {
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
            let (place, mut count) = match self.store.map.find(block, limit) {
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
                        if self
                            .store
                            .gets
                            .fetch(
                                fetch,
                                kind,
                                purpose,
                                &mut Context::new(&mut self.port, &self.manifest, actions),
                            )
                            .is_none()
                        {
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

    pub(super) fn read_ended(
        &mut self,
        id: u64,
        fetch: Fetch,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let result = self.store.fetched(
            fetch,
            result,
            &mut Context::new(&mut self.port, &self.manifest, actions),
        );
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
                    match self.store.map.find(block, limit) {
                        Found::Here(Some(_), count) => (ExtentState::Data, count),
                        Found::Here(None, count) => (ExtentState::Hole, count),
                        Found::Page(page) if self.store.map.is_full(page) => {
                            let changed = self.store.map.unchanged(block, limit);
                            let rest = (page + 1) * self.store.map.page_blocks() - block;
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
