//! Local stores that get another size while they are used. In front of them stands what the node does: its catalogue
//! has the new size before a volume shrinks, and after it has grown; a local store that is larger at its opening is cut
//! first.
//!
//! What was cut off reads as zeroes once it has grown again. After every crash the superblock says a size that store
//! and backend have, and not less than the catalogue.

use fastrand::Rng;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, SectorRange, Token};
use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use hdcs_core::local::sizes::Sizes;
use hdcs_core::local::{Ask, Event, LocalStore};

use super::Options;
use super::plant::Plant;
use super::world::StoreWorld;
use crate::content::{Content, mix};
use crate::violation::Violation;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Blocks that a volume grows by at most, beyond what it has been at first.
const GROWTH_MAX: u64 = 80;
/// Blocks of all that is written at most, which is read at once.
const WINDOW_MAX: u64 = 256;

/// A size that is asked for.
#[derive(Debug)]
struct Asked {
    token: Token,
    /// Blocks before and after.
    from: u64,
    to: u64,
    /// Whether there is a reason to refuse it.
    may_fail: bool,
}

/// What a run has besides for its sizes. Its randomness is a stream of its own.
#[derive(Debug)]
pub(super) struct Sizing {
    random: Rng,
    is_off: bool,
    /// Whether the store is a device, which has a size of its own and keeps what was cut off.
    pub is_device: bool,
    asked: Option<Asked>,
    /// Bytes of the store that it has after every crash.
    pub durable_bytes: u64,
    blocks_max: u64,
}

impl Sizing {
    pub fn new(seed: u64, options: Options) -> Self {
        let mut random = Rng::with_seed(mix(seed ^ mix(17)));
        // Other plants are found as they were before there were any.
        let is_off = options.plant.is_some_and(|plant| !plant.is_of_sizes());
        Self {
            is_device: random.bool() && !is_off,
            random,
            is_off,
            asked: None,
            durable_bytes: 0,
            blocks_max: 0,
        }
    }

    /// Blocks of a volume of which so many are written, sometimes about as many as a page has; the store is to have
    /// room for so many.
    pub fn blocks(&mut self, blocks: u64, written: u64, page_blocks: u64) -> (u64, u64) {
        let is_about_a_page = !self.is_off && blocks < page_blocks && self.random.u8(..5) == 0;
        let blocks = if is_about_a_page {
            page_blocks - 30 + self.random.u64(..60)
        } else {
            blocks
        };
        let growth = GROWTH_MAX.min(WINDOW_MAX - written);
        self.blocks_max = blocks + growth;
        let has_room_for = match (self.is_device, self.random.u8(..4)) {
            (false, _) => blocks,
            (true, 0) => blocks + growth / 2,
            (true, _) => self.blocks_max,
        };
        (blocks, has_room_for)
    }

    /// Blocks after which a tier flushes the backend: what was drawn, or so many that it never does.
    pub fn flush_every(&mut self, drawn: u64, is_atomic: bool) -> u64 {
        let is_small = is_atomic && (self.is_off || self.random.u8(..4) > 0);
        if is_small { 1 << 20 } else { drawn }
    }

    /// Whether none is asked for.
    pub fn is_settled(&self) -> bool {
        self.asked.is_none()
    }

    /// What is asked for may be refused from now on.
    pub fn may_fail(&mut self) {
        if let Some(asked) = &mut self.asked {
            asked.may_fail = true;
        }
    }
}

impl StoreWorld {
    /// Ask for another size, sometimes.
    pub(super) fn resize_sometimes(&mut self, one_in: u8) {
        let sizing = &mut self.sizing;
        if sizing.is_off || sizing.asked.is_some() || sizing.random.u8(..one_in) > 0 {
            return;
        }
        let from = self.bytes / BLOCK;
        let mut lowest = self.window.start / BLOCK_SECTORS + 4;
        for write in &self.generation {
            lowest = lowest.max(write.range.end().div_ceil(BLOCK_SECTORS));
        }
        let to = match sizing.random.u8(..3) {
            0 => sizing.random.u64(from..=sizing.blocks_max),
            _ => sizing.random.u64(lowest.min(from)..=sizing.blocks_max),
        };
        if sizing.random.bool() {
            // Under way when it is asked for.
            let count = sizing.random.u64(1..=40).min(self.window.count);
            self.read(SectorRange::new(self.window.end() - count, count));
        }
        self.ask_for_size(from, to);
    }

    fn ask_for_size(&mut self, from: u64, to: u64) {
        self.next_request += 1;
        let token = Token(self.next_request);
        let lacks =
            self.sizing.is_device && self.layout().store_bytes(to * BLOCK) > self.store.bytes();
        self.sizing.asked = Some(Asked {
            token,
            from,
            to,
            may_fail: lacks
                || self.sums.rots
                || self.holding.is_asked_for()
                || (self.faults && !self.calm),
        });
        self.set_window_end(from.min(to));
        self.engine.note("resize", [from, to, 0, 0]);
        if self.is_planted(Plant::BackendCutFirst) && to < from {
            self.backend.resize(to * BLOCK_SECTORS);
        }
        if self.is_planted(Plant::ResizeShowsPart) {
            self.backend.resize(self.backend.sectors());
        }
        let bytes = to * BLOCK;
        let ask = Ask::Resize { bytes };
        self.event(Event::Submit { token, ask });
    }

    fn set_window_end(&mut self, blocks: u64) {
        self.window = SectorRange::between(self.window.start, blocks * BLOCK_SECTORS);
    }

    /// The volume has another size: what is cut off is gone, and what there is anew is zeroes.
    fn has_size(&mut self, blocks: u64) {
        self.bytes = blocks * BLOCK;
        self.set_window_end(blocks);
        let sectors = self.window.count as usize;
        for state in self.moments.iter_mut().chain([&mut self.base]) {
            state.resize(sectors, Content::Zero);
        }
        self.sums.forget_from(self.window.end());
    }

    /// Whether this is the end of a change of size.
    pub(super) fn is_of_sizing(&self, token: Token) -> bool {
        let asked = self.sizing.asked.as_ref();
        asked.is_some_and(|asked| asked.token == token)
    }

    /// A change of size has ended.
    pub(super) fn resized(&mut self, result: Result<Done, IoError>) -> Result<(), Violation> {
        let Some(asked) = self.sizing.asked.take() else {
            return Ok(());
        };
        let Asked { from, to, .. } = asked;
        self.engine
            .note("resized", [from, to, u64::from(result.is_ok()), 0]);
        let found = self
            .home
            .as_ref()
            .map(LocalStore::status)
            .unwrap_or_default();
        let expected = if result.is_ok() { to } else { from };
        if found.bytes != expected * BLOCK && found.failed.is_none() {
            let why = format!(
                "{} bytes after {result:?}, asked for {asked:?}",
                found.bytes
            );
            return Err(Violation::new("size", why));
        }
        if let Err(error) = result {
            self.set_window_end(from);
            self.coverage.resizes_refused += 1;
            if asked.may_fail {
                return Ok(());
            }
            let why = format!("{asked:?}: {error}");
            return Err(Violation::new("error-without-cause", why));
        }
        if to > from && !self.calm && self.sizing.random.u8(..6) == 0 {
            // The power goes before the catalogue has it.
            self.cut_at = Some(self.engine.turns());
            return Ok(());
        }
        self.coverage.grown += u64::from(to > from);
        self.coverage.shrunk += u64::from(to < from);
        self.has_size(to);
        Ok(())
    }

    /// The power has gone: the catalogue has the smaller size.
    pub(super) fn sizing_crashed(&mut self, keeps_growth: bool) {
        if let Some(Asked { from, to, .. }) = self.sizing.asked.take() {
            self.coverage.resizes_cut += 1;
            self.has_size(from.min(to));
        }
        if !keeps_growth && self.store.bytes() > self.sizing.durable_bytes {
            self.store.resize(self.sizing.durable_bytes);
        }
        self.sizing.durable_bytes = self.store.bytes();
    }

    /// A local store is opened whose superblock says that it has so many bytes.
    pub(super) fn check_size(&self, bytes: u64) -> Result<(), Violation> {
        let lacks = if bytes < self.bytes {
            format!("the catalogue says {}", self.bytes)
        } else if self.layout().store_bytes(bytes) > self.store.bytes() {
            format!("its store has {}", self.store.bytes())
        } else if bytes / SECTOR_BYTES as u64 > self.backend.sectors() {
            format!("its backend has {} sectors", self.backend.sectors())
        } else {
            return Ok(());
        };
        let why = format!("the home has {bytes} bytes, and {lacks}");
        Err(Violation::new("size", why))
    }

    /// A local store that is larger than the catalogue says is cut before anybody uses it; false if the local store is
    /// gone.
    pub(super) fn cut_to_catalogue(&mut self, bytes: u64) -> Result<bool, Violation> {
        let Some(next) = Sizes::new(self.bytes, bytes).cut() else {
            return Ok(true);
        };
        self.ask_for_size(bytes / BLOCK, next / BLOCK);
        self.wait(|world| world.sizing.is_settled())
    }

    /// Something is done with the store up to a byte, or with the backend up to a sector.
    pub(super) fn check_end(&self, store_end: u64, backend_end: u64) -> Result<(), Violation> {
        if store_end > self.store.bytes() || backend_end > self.backend.sectors() {
            let why =
                format!("byte {store_end} of the store or sector {backend_end} of the backend");
            return Err(Violation::new("beyond-end", why));
        }
        Ok(())
    }

    /// The store is to have another size; whether it has.
    pub(super) fn resize_store(&mut self, bytes: u64) -> Result<Done, IoError> {
        if self.sizing.is_device {
            let is_there = self.store.bytes() >= bytes;
            return if is_there {
                Ok(Done::Written)
            } else {
                Err(IoError::NoSpace)
            };
        }
        self.store.resize(bytes);
        self.sizing.durable_bytes = self.sizing.durable_bytes.min(bytes);
        Ok(Done::Written)
    }

    /// The backend is to have another size.
    pub(super) fn resize_backend(&mut self, sectors: u64) {
        let keeps = self.is_planted(Plant::BackendKeepsTail) && sectors < self.backend.sectors();
        if !keeps {
            self.backend.resize(sectors);
        }
    }
}
