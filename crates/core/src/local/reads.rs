//! Reads of clients, from the store and from the backend.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use super::map::BlockState;
use super::store::{Purpose, Store};
use super::sums::Sum;
use super::writes::Writes;
use super::{Action, end};
use crate::base::buf::{BufMut, Pool};
use crate::base::error::IoError;
use crate::base::io::{Done, SectorRange, Token};
use crate::base::limits::{BLOCK_BYTES, HOME_READ_POOL_BYTES, REQUEST_BYTES_MAX, SECTOR_BYTES};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A read.
#[derive(Debug)]
pub(super) struct Read {
    token: Token,
    offset: u64,
    /// `None` while an action has it.
    buf: Option<BufMut>,
    bytes: usize,
    /// Bytes that are there.
    done: usize,
    /// Whether the piece that is being read is the local store's,
    is_stored: bool,
    /// the blocks of it that nobody may write,
    reading: Range<u64>,
    /// and what the checksums of that piece are.
    expected: Vec<Sum>,
}

impl Read {
    /// The end of the blocks that it touches.
    pub fn end_block(&self) -> u64 {
        (self.offset + self.bytes as u64).div_ceil(BLOCK)
    }
}

/// What came of going on with a read.
enum Step {
    /// It goes on when something ends, or has ended.
    Taken,
    /// It waits for a write, or for checksums.
    Waits,
    NoMemory,
}

/// Where the bytes of a read come from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Store,
    Backend,
    Zeroes,
}

fn source(state: BlockState) -> Source {
    match state {
        BlockState::Absent => Source::Backend,
        BlockState::Clean | BlockState::Dirty => Source::Store,
        BlockState::Zero => Source::Zeroes,
    }
}

/// The reads of clients.
#[derive(Debug)]
pub(super) struct Reads {
    under_way: BTreeMap<u64, Read>,
    /// Those of them that go on when they may.
    queue: VecDeque<u64>,
    /// For pieces of them.
    pool: Arc<Pool>,
}

impl Reads {
    /// None.
    pub fn new() -> Self {
        Self {
            under_way: BTreeMap::new(),
            queue: VecDeque::new(),
            pool: Pool::new(HOME_READ_POOL_BYTES),
        }
    }

    /// Fill a buffer from here on.
    pub fn read(&mut self, token: Token, offset: u64, buf: BufMut, store: &mut Store) {
        let id = store.number();
        let read = Read {
            token,
            offset,
            bytes: buf.len(),
            buf: Some(buf),
            done: 0,
            is_stored: false,
            reading: 0..0,
            expected: Vec::new(),
        };
        self.under_way.insert(id, read);
        self.queue.push_back(id);
    }

    /// Go on with the reads that need not wait.
    pub fn pump(&mut self, store: &mut Store, writes: &Writes, actions: &mut Vec<Action>) {
        let mut waiting = VecDeque::new();
        while let Some(id) = self.queue.pop_front() {
            match self.read_on(id, store, writes, actions) {
                Step::Taken => {}
                Step::Waits => waiting.push_back(id),
                Step::NoMemory => {
                    self.queue.push_front(id);
                    break;
                }
            }
        }
        waiting.append(&mut self.queue);
        self.queue = waiting;
    }

    /// Go on with a read.
    fn read_on(
        &mut self,
        id: u64,
        store: &mut Store,
        writes: &Writes,
        actions: &mut Vec<Action>,
    ) -> Step {
        let Some(read) = self.under_way.get_mut(&id) else {
            return Step::Taken;
        };
        let Some(mut buf) = read.buf.take() else {
            return Step::Taken;
        };
        loop {
            if read.done == read.bytes {
                end(actions, read.token, Ok(Done::Read(buf)));
                self.under_way.remove(&id);
                return Step::Taken;
            }
            let at = read.offset + read.done as u64;
            let until = read.offset + read.bytes as u64;
            let run = store.map.run_end(at / BLOCK, until.div_ceil(BLOCK), source);
            let bytes = ((run * BLOCK).min(until) - at) as usize;
            let from = source(store.map.get(at / BLOCK));
            if from == Source::Zeroes {
                buf[read.done..read.done + bytes].fill(0);
                read.done += bytes;
                continue;
            }
            let is_whole = bytes == read.bytes;
            let bytes = if is_whole {
                bytes
            } else {
                bytes.min(REQUEST_BYTES_MAX)
            };
            if from == Source::Store {
                let sums = &mut store.sums;
                let blocks = at / BLOCK..(at + bytes as u64).div_ceil(BLOCK);
                let is_written = writes.keep_off(&blocks);
                if is_written || !sums.ready(&blocks) {
                    read.buf = Some(buf);
                    return Step::Waits;
                }
                let count = (bytes / SECTOR_BYTES) as u64;
                read.expected = sums.expected(SectorRange::new(at / SECTOR_BYTES as u64, count));
                read.reading = blocks;
            }
            let into = if is_whole {
                buf
            } else {
                // A piece of several has memory of its own; the request keeps its buffer.
                let into = self.pool.alloc(bytes);
                read.buf = Some(buf);
                let Some(into) = into else {
                    read.reading = 0..0;
                    return Step::NoMemory;
                };
                into
            };
            read.is_stored = from == Source::Store;
            let token = store.token(Purpose::Read(id));
            actions.push(match from {
                Source::Store => Action::StoreRead {
                    token,
                    offset: store.layout().data_offset(at),
                    buf: into,
                },
                _ => Action::BackendRead {
                    token,
                    offset: at,
                    buf: into,
                },
            });
            return Step::Taken;
        }
    }

    /// A piece of one has come, or has not.
    pub fn ended(
        &mut self,
        id: u64,
        result: Result<Done, IoError>,
        store: &mut Store,
        actions: &mut Vec<Action>,
    ) {
        let Some(read) = self.under_way.get_mut(&id) else {
            return;
        };
        read.reading = 0..0;
        let expected = core::mem::take(&mut read.expected);
        let sector = (read.offset + read.done as u64) / SECTOR_BYTES as u64;
        let is_stored = read.is_stored;
        let result = match result {
            Ok(Done::Read(mut piece)) if is_stored => store
                .open(sector, &expected, &mut piece, actions)
                .map(|()| Done::Read(piece)),
            other => other,
        };
        let Some(read) = self.under_way.get_mut(&id) else {
            return;
        };
        match result {
            Ok(Done::Read(piece)) => {
                let bytes = piece.len();
                match &mut read.buf {
                    Some(buf) => buf[read.done..read.done + bytes].copy_from_slice(&piece),
                    None => read.buf = Some(piece),
                }
                read.done += bytes;
                self.queue.push_back(id);
            }
            Ok(_) => unreachable!("a read brings its buffer"),
            Err(error) => {
                end(actions, read.token, Err(error));
                self.under_way.remove(&id);
            }
        }
    }

    /// Whether one of these blocks is being read.
    pub fn reads(&self, blocks: &Range<u64>) -> bool {
        let mut reads = self.under_way.values().map(|read| &read.reading);
        reads.any(|read| read.start < blocks.end && blocks.start < read.end)
    }

    /// Whether one of them goes beyond this block.
    pub fn reach(&self, block: u64) -> bool {
        self.under_way.values().any(|read| read.end_block() > block)
    }

    /// Nothing can be done with these blocks.
    pub fn refuse(&mut self, blocks: &Range<u64>, error: IoError, actions: &mut Vec<Action>) {
        let queued = core::mem::take(&mut self.queue);
        for id in queued {
            let Some(read) = self.under_way.get(&id) else {
                continue;
            };
            if read.offset / BLOCK < blocks.end && blocks.start < read.end_block() {
                end(actions, read.token, Err(error));
                self.under_way.remove(&id);
            } else {
                self.queue.push_back(id);
            }
        }
    }
}
