//! Volumes in storage mode: a local store between a volume and its backend, stacked as a node stacks them.
//!
//! The volume asks the store what it would ask its backend. The store asks its own device, and the backend that lies
//! below it, which has that backend's faults. What the unit has as `backend` is then what the store promises: it is
//! given what the store was given, and after a crash it is what the store, opened again, would show. So every rule
//! about a volume and its backend holds of a volume and its store.
//!
//! Of the backend below, one rule is checked here: unless the store says that it is between two states, it is a disk
//! that the client could have seen, and once all is tiered out, it has everything.

use std::collections::BTreeMap;

use fastrand::Rng;
use hdcs_core::base::io::{Extent, ExtentState};
use hdcs_core::base::limits::BLOCK_SECTORS;
use hdcs_core::format::{LOG_UNFLUSHED, LogSuperblock};
use hdcs_core::local::format::{self, Layout};
use hdcs_core::local::map::BlockState;
use hdcs_core::local::open::{Before, Opening, Step};
use hdcs_core::local::{Action as StoreAction, Ask as StoreAsk, Config, Event as StoreEvent, Home};
use zerocopy::IntoBytes;

use super::{
    Action, BLOCK_BYTES, BufMut, Completion, Content, Done, Happening, InFlight, Io, IoError,
    Nanos, OpId, Owner, Plant, SECTOR_BYTES, SectorRange, Token, Unit, Violation, World,
    check_backend, check_bounds, check_log,
};
use crate::backend::Backend;
use crate::disk::{Disk, joined};
use crate::scenario::{LocalStoreScenario, Stream};

/// The random number of a store.
const STORE: u64 = 99;
/// Memory for checksums.
const SUMS_BYTES: usize = 1 << 20;
const SECTOR: u64 = SECTOR_BYTES as u64;

/// What a store has asked for.
#[derive(Debug)]
enum Asked {
    StoreRead(OpId, BufMut),
    StoreWrite(OpId),
    StoreSync,
    Read(OpId, BufMut),
    Write(OpId),
    Flush(OpId),
}

impl Asked {
    /// Whether it is asked of the backend.
    const fn is_of_backend(&self) -> bool {
        matches!(self, Self::Read(..) | Self::Write(_) | Self::Flush(_))
    }
}

/// A local store, and the backend below it.
#[derive(Debug)]
pub(super) struct LocalStore {
    volume: [u8; 16],
    home: Home,
    store: Disk,
    below: Backend,
    scenario: LocalStoreScenario,
    random: Rng,
    asked: BTreeMap<u64, (Token, Asked, Option<IoError>)>,
    next: u64,
    /// What the store has ended of what the volume asked, until it is delivered.
    ended: BTreeMap<u64, Result<Done, IoError>>,
    actions: Vec<StoreAction>,
    /// What the log was to write again when the volume was opened.
    unsettled: Vec<SectorRange>,
}

impl LocalStore {
    /// The store of a new volume, with nothing in it yet, over a backend with `base`.
    pub(super) fn new(
        scenario: LocalStoreScenario,
        unit: u64,
        number: u32,
        volume: [u8; 16],
        base: Vec<Content>,
        (log, seed): (&Disk, u64),
    ) -> Self {
        let mut random = Rng::with_seed(Stream::LocalStores.seed_of(seed, unit));
        let bytes = base.len() as u64 * SECTOR;
        let layout = Layout::of(false);
        let mut store = Disk::new(layout.store_bytes(bytes), random.u64(..));
        store.put(0, &format::format_head(volume, STORE, bytes, [0; 16], None));
        for page in 0..format::pages(bytes) {
            for copy in [0, 1] {
                let empty = format::format_page(STORE, page, None);
                store.put(layout.page_offset(page, copy), empty.as_bytes());
            }
        }
        let below = Backend::new(number, base, scenario.atomic, random.u64(..));
        Self {
            home: open(&mut store, volume, scenario, before(log, None)),
            volume,
            store,
            below,
            scenario,
            random,
            asked: BTreeMap::new(),
            next: 0,
            ended: BTreeMap::new(),
            actions: Vec::new(),
            unsettled: Vec::new(),
        }
    }

    /// When it wants to be polled; what it does in turns takes a little time.
    pub(super) fn next_wakeup(&self, now: Nanos) -> Option<Nanos> {
        let due = self.home.next_wakeup();
        due.map(|due| due.max(now.plus(Nanos::from_micros(1))))
    }

    /// The power goes, or the process; then what its device and its backend have is what there is.
    pub(super) fn crash(&mut self, power: bool) {
        if power {
            self.store.power_cut();
        } else {
            self.store.process_kill();
        }
    }

    /// The host of its backend loses power: what is under way there fails.
    pub(super) fn cut_backend(&mut self) {
        self.below.power_cut();
        self.fail_all(IoError::Unreachable);
    }

    fn fail_all(&mut self, error: IoError) {
        for (_, asked, fails) in self.asked.values_mut() {
            if asked.is_of_backend() {
                *fails = Some(error);
            }
        }
    }

    /// Open it again, behind the log that was `before` it, and say what it shows.
    fn reopen(&mut self, before: Before) -> Result<Vec<Content>, Violation> {
        self.asked.clear();
        self.ended.clear();
        self.actions.clear();
        self.unsettled.clear();
        self.store.process_kill();
        self.below.client_lost();
        self.below.opened();
        self.below.take_commits();
        self.home = open(&mut self.store, self.volume, self.scenario, before);
        self.shown()
    }

    /// What a reader would get of each sector.
    fn shown(&self) -> Result<Vec<Content>, Violation> {
        let layout = Layout::of(false);
        let number = self.below.volume();
        let sectors = self.below.sectors();
        let blocks = sectors / BLOCK_SECTORS;
        let (mut block, mut bytes) = (0, vec![0; BLOCK_BYTES]);
        let mut shown = Vec::with_capacity(sectors as usize);
        while block < blocks {
            let (state, end) = self.home.state_of(block, blocks);
            for block in block..end {
                let range = SectorRange::new(block * BLOCK_SECTORS, BLOCK_SECTORS);
                let of_range = range.start..range.end();
                match state {
                    BlockState::Zero => shown.extend(of_range.map(|_| Content::Zero)),
                    BlockState::Absent => {
                        shown.extend(of_range.map(|sector| self.below.visible(sector)));
                    }
                    BlockState::Clean | BlockState::Dirty => {
                        self.store
                            .peek(layout.data_offset(range.byte_offset()), &mut bytes);
                        shown.extend(decode(number, range, &bytes)?);
                    }
                }
            }
            block = end;
        }
        Ok(shown)
    }

    /// What the store says of a range, or that the backend knows; and of how much of it.
    fn extent(&self, range: SectorRange) -> (SectorRange, Option<ExtentState>) {
        let end = range.end().div_ceil(BLOCK_SECTORS);
        let (state, end) = self.home.state_of(range.first_block(), end);
        let known = SectorRange::between(range.start, (end * BLOCK_SECTORS).min(range.end()));
        let state = match state {
            BlockState::Clean | BlockState::Dirty => Some(ExtentState::Data),
            BlockState::Zero => Some(ExtentState::Hole),
            BlockState::Absent => None,
        };
        (known, state)
    }

    /// Whether it may refuse to read something of a range because the log is to write it again.
    pub(super) fn may_refuse(&self, range: SectorRange) -> bool {
        self.unsettled.iter().any(|other| other.overlaps(range))
    }

    /// Whether the backend below has everything that the store has.
    fn is_tiered(&self) -> bool {
        let status = self.home.status();
        status.dirty_bytes + status.zero_bytes == 0 && !status.between && status.tier_rests
    }

    /// The backend alone is a disk that the client could have seen, unless a tier is between two states.
    fn check_below(&self, unit: &Unit) -> Result<(), Violation> {
        if self.home.status().between {
            return Ok(());
        }
        check_backend::check_whole(&unit.history, |sector| self.below.durable(sector))
    }
}

/// The log that is before a store.
fn before(log: &Disk, kept: Option<&LogSuperblock>) -> Before {
    let superblock = check_log::newest_superblock(log, kept).expect("no log rots here");
    Before {
        log: superblock.log.get(),
        is_whole: superblock.flags.get() & LOG_UNFLUSHED == 0,
    }
}

/// Open a store, as a node does.
fn open(store: &mut Disk, volume: [u8; 16], scenario: LocalStoreScenario, before: Before) -> Home {
    let two_blocks = |store: &Disk, offset: u64| {
        [offset, offset + BLOCK_BYTES as u64].map(|offset| {
            let mut block = vec![0; BLOCK_BYTES];
            store.peek(offset, &mut block);
            block
        })
    };
    let [one, other] = two_blocks(store, 0);
    let mut opening = Opening::begin([&one, &other], volume, before).expect("its superblock");
    let bytes = opening.bytes();
    opening.authenticate(None, bytes).expect("it is plain");
    loop {
        match opening.step() {
            Step::Read(offset) => {
                let [one, other] = two_blocks(store, offset);
                opening.read([&one, &other]).expect("a page of its map");
                continue;
            }
            Step::Sync => store.sync(),
            Step::Write(offset, block) => store.put(offset, &block[..]),
            Step::Done => break,
        }
        opening.done();
    }
    let (found, map) = opening.finish(SUMS_BYTES);
    let config = Config {
        backend_atomic: scenario.atomic,
        flush_every_blocks: scenario.flush_every_blocks,
        turn_blocks: scenario.turn_blocks,
        ..found
    };
    Home::new(config, map, None)
}

fn decode(volume: u32, range: SectorRange, bytes: &[u8]) -> Result<Vec<Content>, Violation> {
    let sectors = bytes.chunks(SECTOR_BYTES).zip(range.start..);
    let decoded = sectors.map(|(bytes, sector)| {
        Content::decode(volume, sector, bytes).ok_or_else(|| {
            let why =
                format!("sector {sector} below volume {volume} has bytes that nobody wrote there");
            Violation::new("store-foreign", why)
        })
    });
    decoded.collect()
}

fn sectors_of(offset: u64, bytes: usize) -> SectorRange {
    SectorRange::new(offset / SECTOR, (bytes / SECTOR_BYTES) as u64)
}

impl Unit {
    fn local_store(&mut self) -> &mut LocalStore {
        self.local.as_mut().expect("it is in storage mode")
    }

    /// The client of the store is gone, and so is the store's own memory.
    pub(super) fn lose_store(&mut self) -> Result<(), Violation> {
        let before = before(&self.log, self.kept.as_ref());
        let shown = self.local_store().reopen(before)?;
        self.backend.become_as(shown);
        // Where writes went past the log, its memory held what nobody had flushed.
        self.history.loosen(true);
        let local = self.local.as_ref().expect("it was opened");
        local.check_below(self)
    }
}

impl World {
    /// What a volume in storage mode asks of its backend goes to its store. Returns what does not.
    pub(super) fn ask_store(
        &mut self,
        owner: Owner,
        action: Action,
    ) -> Result<Option<Action>, Violation> {
        let unit = match owner {
            Owner::Volume(unit) if self.units[unit].local.is_some() => unit,
            _ => return Ok(Some(action)),
        };
        match action {
            Action::BackendRead { token, offset, buf } => {
                if self.planted.strikes(Plant::ReadPastStore) {
                    self.read_past_store(unit, token, offset, buf);
                    return Ok(None);
                }
                let range = self.backend_range("store read", unit, offset, buf.len())?;
                let io = Io::StoreRead(unit);
                let ask = StoreAsk::Read { offset, buf };
                let numbers = [offset, range.count];
                self.submit_to_store(unit, token, io, "store read", numbers, ask)?;
            }
            Action::BackendWrite {
                token,
                offset,
                data,
            } => {
                let bytes = joined(&data);
                let range = self.backend_range("store write", unit, offset, bytes.len())?;
                let contents = decode(self.units[unit].volume, range, &bytes)?;
                self.check_backend_write(unit, range, &contents)?;
                self.coverage.destaged_bytes += bytes.len() as u64;
                let op = self.units[unit].backend.submit_write(range, contents);
                let io = Io::backend_write(unit, op, offset);
                let ask = StoreAsk::Write { offset, data };
                let numbers = [offset, range.count];
                self.submit_to_store(unit, token, io, "store write", numbers, ask)?;
            }
            Action::BackendZero {
                token,
                offset,
                bytes,
                unmap,
            } => {
                let range = self.backend_range("store zero", unit, offset, bytes as usize)?;
                let contents = vec![Content::Zero; range.count as usize];
                self.check_backend_write(unit, range, &contents)?;
                let op = self.units[unit].backend.submit_zero(range, unmap);
                let io = Io::backend_write(unit, op, offset);
                let ask = StoreAsk::Zero { offset, bytes };
                let numbers = [offset, range.count];
                self.submit_to_store(unit, token, io, "store zero", numbers, ask)?;
            }
            Action::BackendFlush { token } => {
                check_bounds::check_flush(self.flushes_under_way(unit))?;
                let op = self.units[unit].backend.submit_flush();
                let io = Io::BackendFlush(unit, op);
                if self.planted.strikes(Plant::FlushPastStore) {
                    let number = self.insert(Owner::Volume(unit), token, io, "store flush", [0; 2]);
                    self.end_of_store(unit, number, Ok(Done::Written));
                    return Ok(None);
                }
                self.submit_to_store(unit, token, io, "store flush", [0; 2], StoreAsk::Flush)?;
            }
            Action::BackendUnsettled { range } => {
                let local = self.units[unit].local_store();
                local.home.unsettle(range);
                local.unsettled.push(range);
            }
            other => return Ok(Some(other)),
        }
        Ok(None)
    }

    /// A planted bug reads what only the backend has, whatever the store has.
    fn read_past_store(&mut self, unit: usize, token: Token, offset: u64, mut buf: BufMut) {
        let range = sectors_of(offset, buf.len());
        let local = self.units[unit].local_store();
        let op = local.below.submit_read(range);
        local.below.complete_read(op, &mut buf);
        let io = Io::StoreRead(unit);
        let number = self.insert(
            Owner::Volume(unit),
            token,
            io,
            "read past store",
            [offset, range.count],
        );
        self.end_of_store(unit, number, Ok(Done::Read(buf)));
    }

    fn submit_to_store(
        &mut self,
        unit: usize,
        token: Token,
        io: Io,
        what: &'static str,
        numbers: [u64; 2],
        ask: StoreAsk,
    ) -> Result<(), Violation> {
        let number = self.insert(Owner::Volume(unit), token, io, what, numbers);
        let token = Token(number);
        self.step_store(unit, StoreEvent::Submit { token, ask })
    }

    fn insert(
        &mut self,
        owner: Owner,
        token: Token,
        io: Io,
        what: &'static str,
        numbers: [u64; 2],
    ) -> u64 {
        self.next_io += 1;
        let number = self.next_io;
        self.note(what, [number, numbers[0], numbers[1], 0]);
        let since = self.now;
        let fails = None;
        self.in_flight.insert(
            number,
            InFlight {
                owner,
                token,
                since,
                io,
                fails,
            },
        );
        number
    }

    /// The volume hears of it in its turn.
    fn end_of_store(&mut self, unit: usize, number: u64, result: Result<Done, IoError>) {
        self.units[unit].local_store().ended.insert(number, result);
        self.queue.add(self.now, Happening::Io(number));
    }

    /// How the store has ended what a volume asked of it, if it is of a store.
    pub(super) fn take_end_of_store(
        &mut self,
        io: &Io,
        number: u64,
    ) -> Option<Result<Done, IoError>> {
        let unit = io.backend()?;
        let local = self.units[unit].local.as_mut()?;
        local.ended.remove(&number)
    }

    fn step_store(&mut self, unit: usize, event: StoreEvent) -> Result<(), Violation> {
        let now = self.now;
        let local = self.units[unit].local_store();
        let tiers = local.home.status().tiers;
        local.home.step(now, event, &mut local.actions);
        self.go_on_with_store(unit)?;
        self.check_tier(unit, tiers)
    }

    /// The stores are polled.
    pub(super) fn poll_stores(&mut self) -> Result<(), Violation> {
        for unit in 0..self.volumes() {
            let now = self.now;
            if let Some(local) = &mut self.units[unit].local {
                local.home.poll(now, &mut local.actions);
                self.go_on_with_store(unit)?;
            }
        }
        Ok(())
    }

    fn go_on_with_store(&mut self, unit: usize) -> Result<(), Violation> {
        while !self.units[unit].local_store().actions.is_empty() {
            for action in std::mem::take(&mut self.units[unit].local_store().actions) {
                self.perform_for_store(unit, action)?;
            }
        }
        match self.units[unit].local_store().home.status().failed {
            None => Ok(()),
            Some(error) => Err(Violation::new(
                "store-failed",
                format!("the store of volume {unit} makes nothing durable any more: {error}"),
            )),
        }
    }

    fn perform_for_store(&mut self, unit: usize, action: StoreAction) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let number = state.volume;
        let local = state.local.as_mut().expect("it is in storage mode");
        let size = local.below.sectors() * SECTOR;
        let (token, asked) = match action {
            StoreAction::End(Completion { token, result }) => {
                self.end_of_store(unit, token.0, result);
                return Ok(());
            }
            StoreAction::Verified(..) => unreachable!("nobody asks for it"),
            StoreAction::StoreResize { .. } | StoreAction::BackendResize { .. } => {
                unreachable!("nobody asks for another size")
            }
            StoreAction::Damaged { offset, .. } => {
                let why = format!("the store of volume {unit} is damaged at byte {offset}");
                return Err(Violation::new("store-damaged", why));
            }
            StoreAction::StoreRead { token, offset, buf } => {
                let bytes = local.store.bytes();
                check_bounds::check_range("store", offset, buf.len() as u64, SECTOR_BYTES, bytes)?;
                let op = local.store.submit_read(offset, buf.len());
                (token, Asked::StoreRead(op, buf))
            }
            StoreAction::StoreWrite {
                token,
                offset,
                data,
            } => {
                let written: usize = data.iter().map(|buf| buf.len()).sum();
                let bytes = local.store.bytes();
                check_bounds::check_range("store", offset, written as u64, SECTOR_BYTES, bytes)?;
                let op = local.store.submit_write(offset, &data, false);
                (token, Asked::StoreWrite(op))
            }
            StoreAction::StoreSync { token } => {
                local.store.sync();
                (token, Asked::StoreSync)
            }
            StoreAction::BackendRead { token, offset, buf } => {
                let bytes = buf.len() as u64;
                check_bounds::check_range("backend read", offset, bytes, SECTOR_BYTES, size)?;
                let op = local.below.submit_read(sectors_of(offset, buf.len()));
                (token, Asked::Read(op, buf))
            }
            StoreAction::BackendWrite {
                token,
                offset,
                data,
            } => {
                let bytes = data.len() as u64;
                check_bounds::check_range("backend write", offset, bytes, SECTOR_BYTES, size)?;
                let range = sectors_of(offset, data.len());
                let contents = decode(number, range, &data)?;
                self.coverage.tiered_bytes += bytes;
                (
                    token,
                    Asked::Write(local.below.submit_write(range, contents)),
                )
            }
            StoreAction::BackendZero {
                token,
                offset,
                bytes,
            } => {
                check_bounds::check_range("backend zero", offset, bytes, SECTOR_BYTES, size)?;
                let range = sectors_of(offset, bytes as usize);
                (token, Asked::Write(local.below.submit_zero(range, true)))
            }
            StoreAction::BackendFlush { token } => {
                (token, Asked::Flush(local.below.submit_flush()))
            }
        };
        self.begin_for_store(unit, token, asked);
        Ok(())
    }

    fn begin_for_store(&mut self, unit: usize, token: Token, asked: Asked) {
        let quiet = self.calm_since.is_some();
        let one_in = self.scenario.faults.backend_one_in;
        let state = &mut self.units[unit];
        let local = state.local.as_mut().expect("it is in storage mode");
        let random = &mut local.random;
        let (latency, fails) = if asked.is_of_backend() {
            let down = state
                .backend_down
                .filter(|&error| error != IoError::NoSpace || !matches!(asked, Asked::Read(..)));
            let failed = one_in > 0 && !quiet && random.u32(..one_in) == 0;
            let fails = down.or(failed.then_some(IoError::Failed));
            if fails.is_some() {
                state.backend_trouble = Some(self.now);
            }
            (state.backend_latency.draw(random), fails)
        } else {
            (state.log_latency.draw(random), None)
        };
        local.next += 1;
        let number = local.next;
        local.asked.insert(number, (token, asked, fails));
        let at = self.now.plus(latency);
        self.queue.add(at, Happening::OfStore(unit, number));
    }

    /// Something that a store has asked for is done.
    pub(super) fn done_for_store(&mut self, unit: usize, number: u64) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let silent = state.backend_silent;
        let local = state.local.as_mut().expect("it is in storage mode");
        let Some((token, asked, fails)) = local.asked.remove(&number) else {
            return Ok(());
        };
        if asked.is_of_backend() && silent > self.now {
            local.asked.insert(number, (token, asked, fails));
            let at = silent.plus(Nanos(local.random.u64(..1_000_000)));
            self.queue.add(at, Happening::OfStore(unit, number));
            return Ok(());
        }
        let is_unreached = !matches!(fails, None | Some(IoError::Failed));
        let result = match (asked, fails) {
            (Asked::StoreRead(op, mut buf), _) => {
                local.store.complete_read(op, &mut buf);
                Ok(Done::Read(buf))
            }
            (Asked::StoreWrite(op), _) => {
                local.store.complete_write(op);
                Ok(Done::Written)
            }
            (Asked::StoreSync, _) => Ok(Done::Written),
            (Asked::Read(op, mut buf), None) => {
                local.below.complete_read(op, &mut buf);
                Ok(Done::Read(buf))
            }
            (Asked::Write(op), None) => {
                local.below.complete_write(op);
                Ok(Done::Written)
            }
            (Asked::Flush(op), None) => {
                let is_good = local.below.complete_flush(op);
                is_good.then_some(Done::Written).ok_or(IoError::Failed)
            }
            (Asked::Read(op, _), Some(error)) => {
                local.below.cancel(op);
                Err(error)
            }
            (Asked::Write(op), Some(error)) => {
                if is_unreached {
                    local.below.cancel(op);
                } else {
                    local.below.fail_write(op);
                }
                Err(error)
            }
            (Asked::Flush(op), Some(error)) => {
                local.below.fail_flush(op);
                Err(error)
            }
        };
        local.below.take_commits();
        self.step_store(unit, StoreEvent::Completed(Completion { token, result }))
    }

    /// A tier that has ended has left a disk that the client could have seen.
    fn check_tier(&mut self, unit: usize, before: u64) -> Result<(), Violation> {
        let state = &self.units[unit];
        let local = state.local.as_ref().expect("it is in storage mode");
        let ended = local.home.status().tiers - before;
        self.coverage.tiers += ended;
        if ended == 0 {
            return Ok(());
        }
        local.check_below(state)
    }

    /// What must hold of the backends below stores whenever the machines rest.
    pub(super) fn check_below(&self, unit: usize) -> Result<(), Violation> {
        let state = &self.units[unit];
        state
            .local
            .as_ref()
            .map_or(Ok(()), |local| local.check_below(state))
    }

    /// The allocation of a range, as a volume's backend or store tells it.
    pub(super) fn extents_of(&mut self, unit: usize, range: SectorRange) -> Vec<Extent> {
        let is_past_store = self.planted.is(Plant::ExtentsPastStore);
        let state = &mut self.units[unit];
        let Some(local) = &mut state.local else {
            return state.backend.extents(range);
        };
        let (range, known) = match local.extent(range) {
            _ if is_past_store => (range, None),
            extent => extent,
        };
        match known {
            Some(state) => vec![Extent { range, state }],
            None => local.below.extents(range),
        }
    }

    /// A tier begins or is cancelled, sometimes.
    pub(super) fn tier_sometimes(&mut self, unit: usize) -> Result<(), Violation> {
        let Some(local) = &mut self.units[unit].local else {
            return Ok(());
        };
        match local.random.u8(..8) {
            0..=2 => self.begin_tier(unit),
            3 => {
                self.note("cancel tier", [unit as u64, 0, 0, 0]);
                self.step_store(unit, StoreEvent::CancelTier)
            }
            _ => Ok(()),
        }
    }

    fn begin_tier(&mut self, unit: usize) -> Result<(), Violation> {
        self.note("tier", [unit as u64, 0, 0, 0]);
        self.step_store(unit, StoreEvent::Tier)
    }

    /// Whether some volume is in storage mode.
    pub fn has_local_stores(&self) -> bool {
        self.units.iter().any(|unit| unit.local.is_some())
    }

    /// Have all stores tier out what they have.
    pub fn begin_tiers(&mut self) -> Result<(), Violation> {
        for unit in 0..self.volumes() {
            if self.units[unit].local.is_some() {
                self.begin_tier(unit)?;
            }
        }
        self.tick();
        Ok(())
    }

    /// Whether all of that is done.
    pub fn is_tiered(&self) -> bool {
        let mut stores = self.units.iter().filter_map(|unit| unit.local.as_ref());
        stores.all(LocalStore::is_tiered)
    }

    /// All is destaged and tiered out: the backends below have everything.
    pub fn check_tiered(&self) -> Result<(), Violation> {
        for unit in &self.units {
            if let Some(local) = &unit.local {
                let now = unit.history.now() + 1;
                let below = |sector| local.below.durable(sector);
                check_backend::check_complete(&unit.history, now, below)?;
            }
        }
        Ok(())
    }
}
