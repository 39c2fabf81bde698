//! One run: local stores on one store, one after another, between a log and a backend.

mod crashes;
mod planted;

use std::collections::BTreeMap;
use std::sync::Arc;

use fastrand::Rng;
use hdcs_core::base::buf::{BufMut, Pool};
use hdcs_core::base::cipher::KeyedCipher;
use hdcs_core::base::error::{FormatError, IoError};
use hdcs_core::base::io::{Completion, Done, Nanos, SectorRange, Token};
use hdcs_core::base::limits::{BLOCK_BYTES, BLOCK_SECTORS, SECTOR_BYTES};
use hdcs_core::local::format::{self, Layout, PAGE_BLOCKS};
use hdcs_core::local::open::{Refused, Step};
use hdcs_core::local::{Action, Ask, Config, Event, LocalStore, TierState};
use zerocopy::IntoBytes;

use super::encryption::DATA_KEY;
use super::plant::Plant;
use super::{Coverage, Options};
use crate::backend::Backend;
use crate::content::{Content, WriteId};
use crate::disk::{Disk, OpId};
use crate::engine::{Ended, Engine, Simulated};
use crate::trace::Trace;
use crate::violation::Violation;

pub(super) const VOLUME: u32 = 1;
/// A flush that is planted.
const OF_NOBODY: Token = Token(u64::MAX);
pub(super) const UUID: [u8; 16] = [7; 16];
pub(super) const HOME: u64 = 99;
const SECTOR: u64 = SECTOR_BYTES as u64;
/// Something that waits longer is stalled.
const PATIENCE: Nanos = Nanos::from_millis(120_000);

/// One write of a generation.
#[derive(Clone, Debug)]
pub(super) struct Write {
    pub range: SectorRange,
    pub content: Content,
    pub state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    ToDo,
    Flying,
    Done,
}

/// What is asked of the local store.
#[derive(Debug)]
pub(super) enum Request {
    Write(usize),
    Flush,
    Verify,
    /// What each sector may be, as of its beginning.
    Read(SectorRange, Vec<Vec<Content>>),
}

#[derive(Debug)]
pub(super) enum Happening {
    StoreRead(Token, OpId, BufMut),
    StoreWrite(Token, OpId),
    /// It is acknowledged, and never happens.
    StoreWriteLost(Token, OpId),
    StoreSync(Token),
    /// Nothing was done, and it is said to be.
    Nothing(Token),
    BackendRead(Token, OpId, BufMut),
    BackendWrite(Token, OpId, Option<SectorRange>),
    BackendFlush(Token, OpId),
    StoreResize(Token, u64),
    BackendResize(Token, u64),
}

/// A run.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct StoreWorld {
    pub(super) engine: Engine<Happening>,
    /// What the run saw.
    pub coverage: Coverage,
    random: Rng,
    /// What is drawn for what came later, so that seeds of before do the same.
    choices: Rng,
    options: Options,
    pub(super) store: Disk,
    pub(super) backend: Backend,
    pub(super) home: Option<LocalStore>,
    pool: Arc<Pool>,
    /// Of the volume, by the catalogue; the local store's may be larger while it is not open.
    pub(super) bytes: u64,
    /// The sectors that are written, up to the end of the volume, and to the smaller one while that changes.
    pub(super) window: SectorRange,
    pub(super) log: u64,
    /// Whether the log of the last generation is lost, and nobody has read what is left.
    pub(super) is_log_lost: bool,
    /// What the last flush made durable, in the window.
    pub(super) base: Vec<Content>,
    pub(super) generation: Vec<Write>,
    pub(super) requests: BTreeMap<u64, Request>,
    pub(super) next_request: u64,
    pub(super) next_write: WriteId,
    flushed: bool,
    /// States of flushes since the tier that was last done, that one's among them.
    pub(super) moments: Vec<Vec<Content>>,
    /// Where in them a tier that is wanted may be.
    pub(super) moments_from: usize,
    /// Where it may be that was asked for last.
    pub(super) asked_from: usize,
    tiers: u64,
    pub(super) tier_wanted: bool,
    flush_every_blocks: u64,
    turn_blocks: u64,
    pub(super) faults: bool,
    pub(super) calm: bool,
    pub(super) sums: super::sums::Sums,
    pub(super) holding: super::hold::Holding,
    pub(super) sizing: super::size::Sizing,
    pub(super) lies: super::lies::Lies,
    pub(super) forgery: super::forgery::Forgery,
    /// What encrypts the local store, if something does.
    pub(super) cipher: Option<Arc<dyn KeyedCipher>>,
    /// The step at which the power goes.
    pub(super) cut_at: Option<u64>,
    actions: Vec<Action>,
}

impl Simulated for StoreWorld {
    fn now(&self) -> Nanos {
        self.engine.now()
    }

    fn trace(&self) -> &Trace {
        &self.engine.trace
    }

    fn advance(&mut self) -> Result<bool, Violation> {
        self.engine
            .go_on(self.home.as_ref().and_then(LocalStore::next_wakeup))
    }

    fn turn(&mut self) -> Result<Ended, Violation> {
        if let Some(happening) = self.engine.take_due() {
            self.happen(happening)?;
        } else if let Some(home) = &mut self.home {
            home.poll(self.engine.now(), &mut self.actions);
        }
        self.settle_turn()
    }

    fn deadline(&self, began: Nanos) -> Option<Nanos> {
        Some(began.plus(PATIENCE))
    }

    fn waiting(&self) -> String {
        format!("{:?} wait", self.requests)
    }
}

impl StoreWorld {
    /// The run of a seed.
    pub fn new(seed: u64, options: Options) -> Self {
        let mut random = Rng::with_seed(seed ^ 0x686f_6d65_2121_2121);
        let blocks: u64 = match random.u8(..8) {
            0 => PAGE_BLOCKS + 40,
            _ => random.u64(8..200),
        };
        let sums = super::sums::Sums::new(seed, options);
        let blocks = sums.blocks.unwrap_or(blocks);
        let written = sums.blocks.unwrap_or(100);
        let mut sizing = super::size::Sizing::new(seed, options);
        let (blocks, has_room_for) = sizing.blocks(blocks, written, PAGE_BLOCKS);
        let sectors = blocks * BLOCK_SECTORS;
        let first = sectors.saturating_sub(written * BLOCK_SECTORS);
        let window = SectorRange::between(first, sectors);
        let mut content = vec![Content::Zero; sectors as usize];
        let mut base = Vec::new();
        for sector in window.start..window.end() {
            let number = if random.bool() { 1 } else { 2 };
            let old = Content::Pattern(number);
            content[sector as usize] = old;
            base.push(old);
        }
        let bytes = sectors * SECTOR;
        let cipher = super::encryption::cipher_of(seed);
        let layout = Layout::of(cipher.is_some());
        let store_bytes = layout.store_bytes(has_room_for * BLOCK_BYTES as u64);
        let mut store = Disk::new(store_bytes, random.u64(..));
        sizing.durable_bytes = store_bytes;
        let data_key = cipher.as_ref().map_or([0; 16], |_| DATA_KEY);
        store.put(
            0,
            &format::format_head(UUID, HOME, bytes, data_key, cipher.as_deref()),
        );
        for page in 0..format::pages(bytes) {
            for copy in [0, 1] {
                let empty = format::format_page(HOME, page, cipher.as_deref());
                store.put(layout.page_offset(page, copy), empty.as_bytes());
            }
        }
        let atomic = random.u8(..3) == 0;
        let backend = Backend::new(VOLUME, content, atomic, random.u64(..));
        let flush_every_blocks = random.u64(4..400);
        Self {
            engine: Engine::new(Nanos(0), options.verbose),
            coverage: Coverage::default(),
            // Most ranges that become zero are cut.
            turn_blocks: flush_every_blocks % 4 + 1,
            flush_every_blocks: sizing.flush_every(flush_every_blocks, atomic),
            faults: random.bool() && options.crash_at.is_none(),
            options,
            store,
            backend,
            home: None,
            pool: Pool::new(16 << 20),
            bytes,
            window,
            log: 1,
            is_log_lost: false,
            moments: vec![base.clone()],
            base,
            generation: Vec::new(),
            requests: BTreeMap::new(),
            next_request: 0,
            next_write: 0,
            flushed: true,
            moments_from: 0,
            asked_from: 0,
            tiers: 0,
            tier_wanted: false,
            calm: false,
            sums,
            holding: super::hold::Holding::new(seed, options),
            sizing,
            lies: super::lies::Lies::new(seed, options),
            forgery: super::forgery::Forgery::new(seed),
            cipher,
            cut_at: None,
            actions: Vec::new(),
            choices: Rng::with_seed(seed ^ 0x6c69_6e67_6572_2121),
            random,
        }
    }

    /// Run it.
    pub fn run(&mut self) -> Result<(), Violation> {
        let is_short = self.options.crash_at.is_some();
        let lives = if is_short { 1 } else { self.random.u32(1..6) };
        for _ in 0..lives {
            if !is_short && self.random.bool() {
                self.cut_at = Some(self.engine.turns() + self.random.u64(1..400));
            }
            self.open()?;
            if self.lies.is_refused {
                return Ok(());
            }
            let generations = if is_short { 4 } else { self.random.u32(1..12) };
            for _ in 0..generations {
                if !self.generation()? {
                    break;
                }
            }
            if self.home.is_some() {
                self.crash();
            }
        }
        self.calm = true;
        self.cut_at = None;
        // A crash at a step may be here.
        loop {
            self.open()?;
            if self.lies.is_refused {
                return Ok(());
            }
            let is_good = self.generation()? && self.wait(|world| world.sizing.is_settled())?;
            if is_good && self.scrub()? && self.tier_to_the_end()? {
                return self.read_all();
            }
        }
    }

    pub(super) fn is_planted(&self, plant: Plant) -> bool {
        self.options.plant == Some(plant)
    }

    pub(super) fn plant(&self) -> Option<Plant> {
        self.options.plant
    }

    /// Open the local store, as the node does.
    fn open(&mut self) -> Result<(), Violation> {
        self.forge_sometimes()?;
        let mut opening = match self.begin_opening() {
            Ok(opening) => opening,
            Err(Refused::Map(why)) => return self.refused_for_lost_write(&why),
            // A copy was lost, and then its page was torn.
            Err(Refused::Page { why, .. }) if self.lies.is_news && why != FormatError::Forged => {
                return self.refused_for_lost_write(&why);
            }
            Err(why) => return Err(Violation::new("open-refused", format!("{why:?}"))),
        };
        let bytes = opening.bytes();
        self.check_size(bytes)?;
        self.has_survived_lie();
        loop {
            match opening.step() {
                Step::Read(_) => unreachable!("all of it was read"),
                Step::Sync => self.store.sync(),
                Step::Write(offset, block) => self.store.put(offset, &block[..]),
                Step::Done => break,
            }
            opening.done();
        }
        self.coverage.repairs += u64::from(opening.repairs() > 0);
        let (found, map) = opening.finish(self.sums.memory_bytes);
        if !self.calm {
            let layout = self.layout();
            self.sums.rot(&mut self.store, layout, self.window);
        }
        self.backend.opened();
        let between = found.between;
        self.coverage.betweens += u64::from(between);
        self.engine
            .note("open", [self.log, u64::from(between), 0, 0]);
        if !between {
            self.check_backend("between-unsaid", 0)?;
        }
        let config = Config {
            backend_atomic: self.backend.is_atomic(),
            flush_every_blocks: self.flush_every_blocks,
            turn_blocks: self.turn_blocks,
            ..found
        };
        self.home = Some(LocalStore::new(config, map, self.cipher_for_home()));
        self.tiers = 0;
        self.tier_wanted = false;
        for write in &mut self.generation {
            write.state = State::ToDo;
        }
        if let Some(home) = &mut self.home
            && !self.is_log_lost
            && self.options.plant != Some(Plant::UnsettledUnsaid)
        {
            for write in &self.generation {
                home.unsettle(write.range);
            }
        }
        let is_open = self.cut_to_catalogue(bytes)?;
        if !is_open || self.generation.is_empty() {
            return Ok(());
        }
        if self.is_log_lost {
            return self.learn();
        }
        if !self.is_used_before_rewriting()? {
            return Ok(());
        }
        // The log has the last generation.
        self.end_generation().map(drop)
    }

    /// Without its log, the local store is what it reads as: of each sector what was flushed, or newer.
    fn learn(&mut self) -> Result<(), Violation> {
        while self.is_log_lost {
            let window = self.window;
            self.read(window);
            if !self.wait(|world| world.requests.is_empty())? {
                return Ok(());
            }
        }
        self.coverage.lost_logs += 1;
        self.generation.clear();
        self.moments.push(self.base.clone());
        self.flushed = false;
        Ok(())
    }

    /// One generation, with reads and tiers beside it; false if the local store is gone.
    fn generation(&mut self) -> Result<bool, Violation> {
        if self.home.is_none() {
            return Ok(false);
        }
        let writes = self.random.usize(1..12);
        let mut taken: Vec<SectorRange> = Vec::new();
        let is_planted = self.is_planted(Plant::NoFill);
        for _ in 0..writes {
            let count = match self.random.u8(..4) {
                0 => BLOCK_SECTORS * self.random.u64(1..4),
                1 => self.random.u64(1..40),
                _ => self.random.u64(1..8),
            };
            let count = count.min(self.window.count);
            let mut start = self.window.start + self.random.u64(..=self.window.count - count);
            if self.random.bool() && !is_planted {
                start -= start % BLOCK_SECTORS;
            }
            let range = SectorRange::new(start, count);
            if start < self.window.start || taken.iter().any(|other| other.overlaps(range)) {
                continue;
            }
            taken.push(range);
            self.next_write += 1;
            let content = match self.random.u8(..5) {
                0 => Content::Zero,
                _ => Content::Write(self.next_write),
            };
            let state = State::ToDo;
            self.generation.push(Write {
                range,
                content,
                state,
            });
        }
        if self.calm {
            self.write_over_rot();
        }
        match self.random.u8(..6) {
            0 | 1 => self.begin_tier(),
            2 => self.cancel_tier(),
            _ => {}
        }
        self.hold_or_release()?;
        self.resize_sometimes(3);
        self.end_generation()
    }

    /// Write what is to be written, then flush; false if the local store is gone.
    fn end_generation(&mut self) -> Result<bool, Violation> {
        self.flushed = false;
        let is_written = |world: &Self| world.generation.iter().all(|w| w.state == State::Done);
        loop {
            for index in 0..self.generation.len() {
                let is_now = self.calm || self.random.u8(..4) > 0;
                if self.generation[index].state == State::ToDo && is_now {
                    self.write(index);
                }
            }
            if !self.calm && self.random.u8(..16) == 0 {
                self.begin_tier();
            }
            if self.is_planted(Plant::FlushOfNobody) {
                self.event(Event::Submit {
                    token: OF_NOBODY,
                    ask: Ask::Flush,
                });
            }
            self.resize_sometimes(8);
            self.verify_sometimes();
            if self.random.u8(..3) == 0 {
                let start = self.window.start + self.random.u64(..self.window.count);
                let count = self.random.u64(1..=64).min(self.window.end() - start);
                self.read(SectorRange::new(start, count));
            }
            if !self.wait(|world| world.requests.is_empty())? {
                return Ok(false);
            }
            if is_written(self) {
                break;
            }
        }
        if self.lingers() {
            self.linger_and_be_killed()?;
            return Ok(false);
        }
        while !self.flushed {
            self.ask(Request::Flush, Ask::Flush);
            if !self.wait(|world| world.requests.is_empty())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn write(&mut self, index: usize) {
        let Write { range, content, .. } = self.generation[index];
        self.generation[index].state = State::Flying;
        let offset = range.byte_offset();
        let ask = if content == Content::Zero {
            let bytes = range.bytes() as u64;
            Ask::Zero { offset, bytes }
        } else {
            let mut buf = self.pool.alloc_for(range).expect("the pool is large");
            for (at, sector) in buf.chunks_mut(SECTOR_BYTES).enumerate() {
                content.fill(VOLUME, range.start + at as u64, sector);
            }
            let data = vec![buf.freeze()];
            Ask::Write { offset, data }
        };
        self.engine
            .note("write", [range.start, range.count, index as u64, 0]);
        self.ask(Request::Write(index), ask);
    }

    pub(super) fn read(&mut self, range: SectorRange) {
        let end = range.end().min(self.window.end());
        if end <= range.start {
            return;
        }
        let range = SectorRange::between(range.start, end);
        let may: Vec<_> = (range.start..range.end())
            .map(|sector| self.may_be(sector))
            .collect();
        let buf = self.pool.alloc(range.bytes()).expect("the pool is large");
        let offset = range.byte_offset();
        self.engine.note("read", [range.start, range.count, 0, 0]);
        self.ask(Request::Read(range, may), Ask::Read { offset, buf });
    }

    /// What a sector may be now.
    fn may_be(&self, sector: u64) -> Vec<Content> {
        let base = self.base[(sector - self.window.start) as usize];
        let mut writes = self.generation.iter();
        match writes.find(|write| (write.range.start..write.range.end()).contains(&sector)) {
            None => vec![base],
            Some(write) if write.state == State::Done => vec![write.content],
            Some(write) => vec![base, write.content],
        }
    }

    fn ask(&mut self, request: Request, ask: Ask) {
        self.next_request += 1;
        let token = Token(self.next_request);
        self.requests.insert(self.next_request, request);
        self.event(Event::Submit { token, ask });
    }

    pub(super) fn event(&mut self, event: Event) {
        if let Some(home) = &mut self.home {
            home.step(self.engine.now(), event, &mut self.actions);
        }
    }

    /// Go on until something holds; false if the local store is gone.
    pub(super) fn wait(&mut self, holds: impl Fn(&Self) -> bool) -> Result<bool, Violation> {
        if self.settle_turn()? == Ended::Crash {
            return Ok(false);
        }
        let ended = self.run_until(|world| holds(world))?;
        Ok(ended == Ended::Reached)
    }

    /// Do what the local store asks, and crash if it is time.
    fn settle_turn(&mut self) -> Result<Ended, Violation> {
        self.perform()?;
        let turns = self.engine.turns();
        if self.options.crash_at == Some(turns) && !self.coverage.cut {
            self.coverage.cut = true;
            self.crash();
        }
        if self.cut_at.take_if(|at| turns >= *at).is_some() {
            self.crash();
        }
        let Some(home) = &self.home else {
            return Ok(Ended::Crash);
        };
        if home.status().failed.is_some() {
            self.coverage.failed += 1;
            self.crash();
            return Ok(Ended::Crash);
        }
        Ok(Ended::Reached)
    }

    fn perform(&mut self) -> Result<(), Violation> {
        while !self.actions.is_empty() {
            for action in std::mem::take(&mut self.actions) {
                self.act(action)?;
            }
        }
        self.watch_tier()
    }

    fn act(&mut self, action: Action) -> Result<(), Violation> {
        let at = self
            .engine
            .now()
            .plus(Nanos(self.random.u64(1_000..3_000_000)));
        let sectors = |offset: u64, bytes: usize| {
            SectorRange::new(offset / SECTOR, (bytes / SECTOR_BYTES) as u64)
        };
        let happening = match action {
            Action::End(completion) if completion.token == OF_NOBODY => return Ok(()),
            Action::End(Completion { token, result }) if self.is_of_sizing(token) => {
                return self.resized(result);
            }
            Action::End(completion) => return self.ended(completion),
            Action::Verified(token, found) => return self.verified(token, found),
            Action::Damaged { offset, .. } => return self.is_damaged(offset / SECTOR),
            Action::StoreRead { token, offset, buf } => {
                self.check_end(offset + buf.len() as u64, 0)?;
                if self.is_planted(Plant::NoVerify) {
                    self.make_sums_match(offset);
                }
                Happening::StoreRead(token, self.store.submit_read(offset, buf.len()), buf)
            }
            Action::StoreWrite {
                token,
                offset,
                data,
            } => {
                let bytes: usize = data.iter().map(|buf| buf.len()).sum();
                self.check_end(offset + bytes as u64, 0)?;
                self.check_stored(offset, &data)?;
                if self.is_planted(Plant::NewPagesLost)
                    && bytes == 2 * BLOCK_BYTES
                    && self.is_of_map(offset)
                {
                    self.engine.at(at, Happening::Nothing(token));
                    return Ok(());
                }
                let (offset, data) = self.planted_write(offset, data);
                if self.loses_sums(offset, &data) {
                    self.engine.at(at, Happening::Nothing(token));
                    return Ok(());
                }
                let durable = self.is_planted(Plant::MapBeforeData) && self.is_of_root(offset);
                let op = self.store.submit_write(offset, &data, durable);
                if self.loses_map(offset) {
                    Happening::StoreWriteLost(token, op)
                } else {
                    Happening::StoreWrite(token, op)
                }
            }
            Action::StoreSync { token } => {
                // It promises nothing of what ends while it is under way.
                if !self.is_planted(Plant::SyncLie) && !self.is_planted(Plant::MapBeforeData) {
                    self.store.sync();
                    self.sizing.durable_bytes = self.store.bytes();
                }
                Happening::StoreSync(token)
            }
            Action::BackendRead { token, offset, buf } => {
                let range = sectors(offset, buf.len());
                self.check_end(0, range.end())?;
                let op = self.backend.submit_read(range);
                Happening::BackendRead(token, op, buf)
            }
            Action::BackendWrite {
                token,
                offset,
                data,
            } => {
                self.backend_is_changed()?;
                let range = sectors(offset, data.len());
                self.check_end(0, range.end())?;
                let contents = Self::decode(range, &data)?;
                let planted = self.is_planted(Plant::NoCopyFirst).then_some(range);
                let op = self.backend.submit_write(range, contents);
                Happening::BackendWrite(token, op, planted)
            }
            Action::BackendZero {
                token,
                offset,
                bytes,
            } => {
                self.backend_is_changed()?;
                let range = sectors(offset, bytes as usize);
                self.check_end(0, range.end())?;
                let op = self.backend.submit_zero(range, true);
                Happening::BackendWrite(token, op, None)
            }
            Action::BackendFlush { token } => {
                self.backend_is_changed()?;
                Happening::BackendFlush(token, self.backend.submit_flush())
            }
            Action::StoreResize { token, bytes } => Happening::StoreResize(token, bytes),
            Action::BackendResize { token, bytes } => {
                self.backend_is_changed()?;
                Happening::BackendResize(token, bytes / SECTOR)
            }
        };
        self.engine.at(at, happening);
        Ok(())
    }

    /// What bytes are, each sector in its place.
    pub(super) fn decode(range: SectorRange, bytes: &[u8]) -> Result<Vec<Content>, Violation> {
        let sectors = bytes.chunks(SECTOR_BYTES).enumerate();
        let decoded = sectors.map(|(index, sector)| {
            let at = range.start + index as u64;
            Content::decode(VOLUME, at, sector)
                .ok_or_else(|| Violation::new("foreign", format!("sector {at}")))
        });
        decoded.collect()
    }

    /// Whether something fails.
    fn fails(&mut self, one_in: u32) -> bool {
        self.faults && !self.calm && self.random.u32(..one_in) == 0
    }

    fn happen(&mut self, happening: Happening) -> Result<(), Violation> {
        let (token, result) = match happening {
            Happening::StoreRead(token, op, mut buf) => {
                self.store.complete_read(op, &mut buf);
                let result = if self.fails(200) {
                    Err(IoError::Failed)
                } else {
                    Ok(Done::Read(buf))
                };
                (token, result)
            }
            Happening::StoreWrite(token, op) => {
                if self.fails(400) {
                    self.store.fail_write(op);
                    (token, Err(IoError::Failed))
                } else {
                    self.store.complete_write(op);
                    (token, Ok(Done::Written))
                }
            }
            Happening::StoreWriteLost(token, op) => {
                self.store.drop_write(op);
                (token, Ok(Done::Written))
            }
            Happening::Nothing(token) => (token, Ok(Done::Written)),
            Happening::StoreSync(token) => {
                let result = if self.fails(400) {
                    Err(IoError::Failed)
                } else {
                    Ok(Done::Written)
                };
                (token, result)
            }
            Happening::BackendRead(token, op, mut buf) => {
                if self.fails(20) {
                    self.backend.cancel(op);
                    (token, Err(IoError::Unreachable))
                } else {
                    self.backend.complete_read(op, &mut buf);
                    (token, Ok(Done::Read(buf)))
                }
            }
            Happening::BackendWrite(token, op, planted) => {
                if self.fails(20) {
                    self.backend.fail_write(op);
                    (token, Err(IoError::Unreachable))
                } else {
                    self.backend.complete_write(op);
                    if let Some(range) = planted {
                        self.write_what_is_there(range);
                    }
                    (token, Ok(Done::Written))
                }
            }
            Happening::BackendFlush(token, op) => self.flush_backend(token, op),
            Happening::StoreResize(token, _) if self.fails(10) => (token, Err(IoError::NoSpace)),
            Happening::StoreResize(token, bytes) => {
                if self.store.writes_from(bytes) {
                    let why = format!("the store is cut at {bytes} while it is written there");
                    return Err(Violation::new("beyond-end", why));
                }
                (token, self.resize_store(bytes))
            }
            Happening::BackendResize(token, sectors) => {
                let fails = self.fails(8);
                if !fails || self.random.bool() {
                    self.resize_backend(sectors);
                }
                let failed = fails.then_some(IoError::Unreachable);
                (token, failed.map_or(Ok(Done::Written), Err))
            }
        };
        if token.0 == u64::MAX {
            return Ok(());
        }
        if self.is_planted(Plant::LostEnd) && self.random.u8(..50) == 0 {
            return Ok(());
        }
        self.event(Event::Completed(Completion { token, result }));
        Ok(())
    }

    fn flush_backend(&mut self, token: Token, op: OpId) -> (Token, Result<Done, IoError>) {
        if self.is_planted(Plant::CleanBeforeFlush) {
            self.backend.cancel(op);
            return (token, Ok(Done::Written));
        }
        if self.fails(10) {
            self.backend.fail_flush(op);
            return (token, Err(IoError::Unreachable));
        }
        let result = if self.backend.complete_flush(op) {
            Ok(Done::Written)
        } else {
            Err(IoError::Failed)
        };
        (token, result)
    }

    fn ended(&mut self, completion: Completion) -> Result<(), Violation> {
        let Completion { token, result } = completion;
        let Some(request) = self.requests.remove(&token.0) else {
            return Err(Violation::new("ended-twice", format!("{token:?}")));
        };
        let is_ok = result.is_ok();
        if let (Request::Read(range, _), Err(IoError::Corrupt)) = (&request, &result) {
            self.engine
                .note("refused", [range.start, range.count, 0, 0]);
            return self.refused(*range);
        }
        if !is_ok && (self.calm || !self.faults) {
            return Err(Violation::new(
                "error-without-cause",
                format!("{request:?}"),
            ));
        }
        self.engine.note("end", [token.0, u64::from(is_ok), 0, 0]);
        match (request, result) {
            (Request::Write(index), result) => {
                let state = result.map_or(State::ToDo, |_| State::Done);
                self.generation[index].state = state;
                if state == State::Done {
                    self.sums.heal(self.generation[index].range);
                }
            }
            (Request::Flush, Ok(_)) => self.has_flushed(),
            (Request::Read(range, may), Ok(Done::Read(buf))) => {
                return self.read_ended(range, &may, &buf);
            }
            (Request::Flush | Request::Read(..) | Request::Verify, _) => {}
        }
        Ok(())
    }

    fn has_flushed(&mut self) {
        self.coverage.flushes += 1;
        for write in std::mem::take(&mut self.generation) {
            for sector in write.range.start..write.range.end() {
                self.base[(sector - self.window.start) as usize] = write.content;
            }
        }
        self.flushed = true;
        self.sums.is_log_whole = true;
        self.moments.push(self.base.clone());
        for (offset, data) in std::mem::take(&mut self.sums.late) {
            self.store.put(offset, &data);
        }
    }

    fn read_ended(
        &mut self,
        range: SectorRange,
        may: &[Vec<Content>],
        bytes: &[u8],
    ) -> Result<(), Violation> {
        for (index, content) in Self::decode(range, bytes)?.into_iter().enumerate() {
            let sector = range.start + index as u64;
            let now = self.may_be(sector);
            if !may[index].contains(&content) && !now.contains(&content) {
                let why = format!(
                    "sector {sector} is {content:?}, not {:?} or {now:?}",
                    may[index]
                );
                return Err(Violation::new("read-wrong", why));
            }
            if self.is_log_lost {
                self.base[(sector - self.window.start) as usize] = content;
            }
        }
        self.is_log_lost = false;
        Ok(())
    }

    /// A tier that has ended left one of the states of a flush, durably.
    fn watch_tier(&mut self) -> Result<(), Violation> {
        let Some(home) = &self.home else {
            return Ok(());
        };
        let status = home.status();
        if self.backend.is_atomic() && !status.between {
            self.backend.take_commits();
            self.check_backend("between-shown", 0)?;
        }
        if status.tiers > self.tiers {
            self.tiers = status.tiers;
            self.tier_wanted = !matches!(status.tier, TierState::Idle | TierState::Held);
            self.coverage.tiers += 1;
            let found = self.check_backend("tier-state", self.moments_from)?;
            self.engine.note("tiered", [found as u64, 0, 0, 0]);
            self.may_be_held(status.tier, found)?;
            self.moments.drain(..found);
            self.asked_from = self.asked_from.saturating_sub(found);
            self.moments_from = self.asked_from;
        }
        Ok(())
    }

    /// What the backend has durably is one of the states from a moment on; which.
    pub(super) fn check_backend(
        &self,
        rule: &'static str,
        from: usize,
    ) -> Result<usize, Violation> {
        let durable = self.backend_state();
        // What is being cut off is of no state.
        let mut moments = self.moments.iter();
        let found = moments.rposition(|moment| moment[..durable.len()] == durable[..]);
        found.filter(|&found| found >= from).ok_or_else(|| {
            let last = &self.moments[self.moments.len() - 1];
            let differs = (0..durable.len()).find(|&index| durable[index] != last[index]);
            let differs = differs.unwrap_or(0);
            let why = format!(
                "the backend has no state of a flush: sector {} is {:?}, at last {:?}",
                self.window.start + differs as u64,
                durable[differs],
                last[differs]
            );
            Violation::new(rule, why)
        })
    }

    /// What the backend has durably.
    pub(super) fn backend_state(&self) -> Vec<Content> {
        (self.window.start..self.window.end())
            .map(|sector| self.backend.durable(sector))
            .collect()
    }

    /// All is well: what is dirty gets to the backend; false if the local store is gone.
    fn tier_to_the_end(&mut self) -> Result<bool, Violation> {
        self.begin_tier();
        if !self.wait(|world| !world.tier_wanted)? {
            return Ok(false);
        }
        let status = self
            .home
            .as_ref()
            .map(LocalStore::status)
            .unwrap_or_default();
        self.coverage.fills += status.filled_blocks;
        self.coverage.waits += status.waited_writes;
        if status.dirty_bytes + status.zero_bytes > 0 || status.between {
            return Err(Violation::new("tier-incomplete", format!("{status:?}")));
        }
        self.check_backend("tier-state", self.moments.len() - 1)?;
        Ok(true)
    }

    fn read_all(&mut self) -> Result<(), Violation> {
        let window = self.window;
        self.read(window);
        self.wait(|world| world.requests.is_empty()).map(drop)
    }
}
