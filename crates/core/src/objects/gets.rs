//! Gets of slots of data objects, of their tables, and of pages of the map: a bounded number at a time, whose turns are
//! shared ([`Turns`]), into memory that is bounded, too.
//!
//! A get of slots of a compressed object needs the lengths of its frames. They are kept for the objects that were read
//! last; otherwise they are fetched first, once for all gets that wait for them:
//!
//! ```text
//!  slots ──lengths known──────────────────────────────► under way ──► end
//!    └──not known──► waiting ──lengths came──► ready ──►┘
//! ```
//!
//! Invariants:
//! 1. A get that waits or is ready counts as one in flight, and its object as being read.
//! 2. An object is not removed while it is being read ([`Gets::is_reading`]).

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::format::SLOT_BYTES;
use super::frames::{FRAME_SLOTS, FRAMES_OFFSET, FrameCache, Frames};
use super::io::{Action, Kind, StoreError, Stored};
use super::map::Place;
use super::map::directory::Entry;
use super::port::{Context, Port, Purpose};
use super::turns::{self, Turns};
use crate::base::buf::{BufMut, Pool};
use crate::base::error::IoError;
use crate::base::io::Token;

/// Blocks of one get at most: with their checksums they fill a buffer of 512 KiB.
pub(super) const FETCH_BLOCKS_MAX: u64 = (512 << 10) / SLOT_BYTES as u64;

/// Consecutive blocks in consecutive slots of one object.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetch {
    pub(super) place: Place,
    pub(super) block: u64,
    pub(super) count: u32,
}

/// Slots of one get from a place on at most: of a compressed object, up to the end of a frame.
pub(super) fn fetch_blocks(place: Place) -> u64 {
    if !place.is_compressed() {
        return FETCH_BLOCKS_MAX;
    }
    let slot = u64::from(place.slot());
    let frame = u64::from(FRAME_SLOTS);
    (slot + FETCH_BLOCKS_MAX) / frame * frame - slot
}

/// Pages that lie behind each other in the object of the map with this number.
#[derive(Debug)]
pub(super) struct PageGet {
    pub(super) number: u64,
    pub(super) pages: Vec<(u64, Entry)>,
}

/// A get of slots that waits for the frames of its object.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) token: Token,
    slot: u32,
    buf: BufMut,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Gets {
    pool: Arc<Pool>,
    in_flight: usize,
    in_flight_max: usize,
    turns: Turns,
    /// Objects that are being read, by their numbers, and by how many gets.
    readers: BTreeMap<u64, u32>,
    frames: FrameCache,
    /// Gets that wait for the frames of an object to be known, and those that did.
    waiting: BTreeMap<u64, Vec<Waiting>>,
    ready: Vec<Action>,
}

impl Gets {
    /// So many at a time, into so much memory.
    pub(super) fn new(in_flight_max: usize, memory_bytes: usize) -> Self {
        Self {
            pool: Pool::new(memory_bytes),
            in_flight: 0,
            in_flight_max,
            turns: Turns::default(),
            readers: BTreeMap::new(),
            frames: FrameCache::default(),
            waiting: BTreeMap::new(),
            ready: Vec::new(),
        }
    }

    /// Where the buffers come from.
    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Memory of the lengths of frames.
    pub(super) fn memory_bytes(&self) -> usize {
        self.frames.memory_bytes()
    }

    /// Whether a get of this kind may begin; otherwise it waits for its turn, or for another one to end.
    pub(super) fn may_begin(&self, kind: turns::Kind) -> bool {
        self.in_flight < self.in_flight_max && self.turns.is_next(kind)
    }

    /// Say whether gets of this kind wait.
    pub(super) fn set_waits(&mut self, kind: turns::Kind, waits: bool, port: &mut Port) {
        port.again |= self.turns.set_waits(kind, waits);
    }

    /// Gets of this kind wait for nothing any more, and what waits for them looks again anyway.
    pub(super) fn end_waits(&mut self, kind: turns::Kind) {
        let _ = self.turns.set_waits(kind, false);
    }

    /// Whether an object is being read.
    pub(super) fn is_reading(&self, number: u64) -> bool {
        self.readers.contains_key(&number)
    }

    fn begin(&mut self, number: u64, port: &mut Port) {
        *self.readers.entry(number).or_insert(0) += 1;
        self.in_flight += 1;
        port.stats.gets += 1;
    }

    /// Get consecutive slots; `None` if that has to wait for its turn, for another get to end, or for
    /// memory.
    pub(super) fn fetch(
        &mut self,
        fetch: Fetch,
        kind: turns::Kind,
        purpose: Purpose,
        cx: &mut Context<'_>,
    ) -> Option<Token> {
        if !self.may_begin(kind) {
            return None;
        }
        self.slots(fetch.place, fetch.count, kind, purpose, cx)
    }

    /// Get `count` slots from a place on, if there is memory for that; it is the turn of this kind.
    pub(super) fn slots(
        &mut self,
        place: Place,
        count: u32,
        kind: turns::Kind,
        purpose: Purpose,
        cx: &mut Context<'_>,
    ) -> Option<Token> {
        let number = place.number();
        let buf = self.pool.alloc(count as usize * SLOT_BYTES)?;
        let frames = if place.is_compressed() {
            self.frames.get(number)
        } else {
            None
        };
        let asks = place.is_compressed() && frames.is_none() && !self.waiting.contains_key(&number);
        let table = match asks.then(|| self.pool.alloc(FRAMES_OFFSET)) {
            Some(None) => return None,
            table => table.flatten(),
        };
        self.turns.begun(kind);
        self.begin(number, cx.port);
        let token = cx.port.issue(purpose);
        let name = cx.manifest.name(Kind::Data, number);
        let slot = place.slot();
        if !place.is_compressed() {
            cx.actions.push(Action::Get {
                token,
                name,
                offset: u64::from(slot) * SLOT_BYTES as u64,
                slots: true,
                buf,
            });
        } else if let Some(frames) = frames {
            let part = frames.part(slot, count);
            cx.actions.push(Action::GetCompressed {
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
            cx.port.stats.gets += 1;
            let token = cx.port.issue(Purpose::Frames(number));
            cx.actions.push(Action::Get {
                token,
                name,
                offset: 0,
                slots: false,
                buf,
            });
        }
        Some(token)
    }

    /// Get the table of a data object, if there is memory for that; it is the turn of copies.
    pub(super) fn table(
        &mut self,
        number: u64,
        offset: u64,
        bytes: usize,
        cx: &mut Context<'_>,
    ) -> bool {
        let Some(buf) = self.pool.alloc(bytes) else {
            return false;
        };
        self.turns.begun(turns::Kind::Copy);
        self.begin(number, cx.port);
        let token = cx.port.issue(Purpose::Table(number));
        cx.actions.push(Action::Get {
            token,
            name: cx.manifest.name(Kind::Data, number),
            offset,
            slots: false,
            buf,
        });
        true
    }

    /// Get pages of the map that lie behind each other in the object with this number; false if that has to wait.
    pub(super) fn pages(
        &mut self,
        number: u64,
        pages: Vec<(u64, Entry)>,
        kind: turns::Kind,
        purpose: impl FnOnce(PageGet) -> Purpose,
        cx: &mut Context<'_>,
    ) -> bool {
        let (Some(&(_, first)), Some(&(_, last))) = (pages.first(), pages.last()) else {
            return false;
        };
        if !self.may_begin(kind) {
            return false;
        }
        let Some(buf) = (self.pool).alloc(last.offset() + last.bytes() - first.offset()) else {
            return false;
        };
        self.turns.begun(kind);
        self.begin(number, cx.port);
        cx.port.stats.gets_of_pages += 1;
        let token = cx.port.issue(purpose(PageGet { number, pages }));
        cx.actions.push(Action::Get {
            token,
            name: cx.manifest.name(Kind::Map, number),
            offset: first.offset() as u64,
            slots: false,
            buf,
        });
        true
    }

    /// What a get of an object has brought, which nobody has verified yet.
    pub(super) fn ended(
        &mut self,
        number: u64,
        result: Result<Stored, StoreError>,
        cx: &mut Context<'_>,
    ) -> Result<BufMut, IoError> {
        self.in_flight -= 1;
        if let Some(readers) = self.readers.get_mut(&number) {
            *readers -= 1;
            if *readers == 0 {
                self.readers.remove(&number);
            }
        }
        match result {
            Ok(Stored::Read(buf)) => Ok(buf),
            Ok(_) => Err(IoError::Failed),
            Err(StoreError::Io(error)) => Err(error),
            Err(_) => {
                cx.port.probe(cx.manifest.sequence, cx.actions);
                Err(IoError::Failed)
            }
        }
    }

    /// It is known where the frames of an object are: what waited for that is ready.
    pub(super) fn add_frames(&mut self, number: u64, frames: Frames, cx: &mut Context<'_>) {
        let frames = self.frames.insert(number, frames);
        let name = cx.manifest.name(Kind::Data, number);
        for Waiting { token, slot, buf } in self.take_waiting(number) {
            let part = frames.part(slot, (buf.len() / SLOT_BYTES) as u32);
            self.ready.push(Action::GetCompressed {
                token,
                name,
                part,
                buf,
            });
        }
        cx.port.again = true;
    }

    /// An object that was just put has its frames there.
    pub(super) fn note_frames(&mut self, number: u64, frames: Frames) {
        self.frames.insert(number, frames);
    }

    /// Where the frames of an object are is not known any more, or not needed.
    pub(super) fn forget_frames(&mut self, number: u64) {
        self.frames.remove(number);
    }

    /// What waits for the frames of an object.
    pub(super) fn take_waiting(&mut self, number: u64) -> Vec<Waiting> {
        self.waiting.remove(&number).unwrap_or_default()
    }

    /// Ask for what is ready.
    pub(super) fn pump(&mut self, actions: &mut Vec<Action>) {
        actions.append(&mut self.ready);
    }

    /// Nobody waits any more for gets that were not asked for yet.
    pub(super) fn forget_waiting(&mut self, port: &mut Port) {
        for waiting in core::mem::take(&mut self.waiting).into_values().flatten() {
            port.forget(waiting.token);
        }
        for action in core::mem::take(&mut self.ready) {
            if let Action::GetCompressed { token, .. } = action {
                port.forget(token);
            }
        }
    }

    /// Stop at what cannot be.
    pub(super) fn check_invariants(&self) {
        assert!(self.in_flight <= self.in_flight_max);
    }
}
