//! Volumes in storage mode: the local store between a volume and its backend, which may be an image or lie over
//! objects.

use std::collections::BTreeMap;

use fastrand::Rng;
use hdcs_core::base::io::{Extent, ExtentState};
use hdcs_core::base::limits::BLOCK_SECTORS;
use hdcs_core::format::{LOG_UNFLUSHED, LogSuperblock};
use hdcs_core::local::format::{self, Layout};
use hdcs_core::local::map::BlockState;
use hdcs_core::local::open::{Before, Opening, Step};
use hdcs_core::local::sizes::Sizes;
use hdcs_core::local::{
    Action as StoreAction, Ask as StoreAsk, Config, Event as StoreEvent, LocalStore, Status,
};
use hdcs_core::node::tier_out::{Act, Ending, TierOut, View};
use hdcs_core::objects::io::Ask as ObjectAsk;
use zerocopy::IntoBytes;

use super::{
    BLOCK_BYTES, BufMut, Completion, Content, Done, Happening, IoError, Nanos, OpId, Phase, Plant,
    SECTOR_BYTES, SectorRange, Token, Unit, Violation, Volume, VolumeConfig, World, check_bounds,
    check_log,
};
use crate::backend::Backend;
use crate::disk::Disk;
use crate::scenario::{LocalStoreScenario, Stream};

/// The random number of a store.
const STORE: u64 = 99;
/// Marks what a store asks of objects, among what a volume does.
pub(super) const OF_STORE: u64 = 1 << 63;
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
    StoreSize(u64),
    Size(u64),
}

impl Asked {
    /// Whether it is asked of the backend.
    const fn is_of_backend(&self) -> bool {
        matches!(
            self,
            Self::Read(..) | Self::Write(_) | Self::Flush(_) | Self::Size(_)
        )
    }
}

/// A local store, and the backend below it.
#[derive(Debug)]
pub(super) struct SimulatedStore {
    volume: [u8; 16],
    pub(super) home: LocalStore,
    /// Its size beside that of its volume,
    pub(super) sizes: Sizes,
    /// and what waits until it is cut to that.
    pub(super) uncut: Vec<(Token, StoreAsk)>,
    store: Disk,
    /// The backend, if it is an image.
    image: Option<Backend>,
    scenario: LocalStoreScenario,
    random: Rng,
    asked: BTreeMap<u64, (Token, Asked, Option<IoError>)>,
    next: u64,
    actions: Vec<StoreAction>,
    /// What the log was to write again when the volume was opened.
    unsettled: Vec<SectorRange>,
    /// Not if nobody could say which log is before it.
    is_open: bool,
    /// A planted bug says that this one is.
    pretended_log: Option<u64>,
    /// What the backend shows and has durably, if that is an image, while it makes a snapshot.
    keeping: Option<Vec<Content>>,
}

impl SimulatedStore {
    /// The store of a new volume, with nothing in it yet, over an image or not.
    pub(super) fn new(
        scenario: LocalStoreScenario,
        unit: u64,
        config: &VolumeConfig,
        image: Option<Vec<Content>>,
        (log, seed): (&Disk, u64),
    ) -> Self {
        let mut random = Rng::with_seed(Stream::LocalStores.seed_of(seed, unit));
        let layout = Layout::of(false);
        let mut store = Disk::new(layout.store_bytes(config.bytes), random.u64(..));
        store.put(
            0,
            &format::format_head(config.uuid, STORE, config.bytes, [0; 16], None),
        );
        for page in 0..format::pages(config.bytes) {
            for copy in [0, 1] {
                let empty = format::format_page(STORE, page, None);
                store.put(layout.page_offset(page, copy), empty.as_bytes());
            }
        }
        let image_seed = random.u64(..);
        let image =
            image.map(|base| Backend::new(config.number, base, scenario.is_atomic, image_seed));
        Self {
            home: open(
                &mut store,
                config.uuid,
                scenario,
                before(log, None).expect("it was just made"),
            ),
            sizes: Sizes::new(config.bytes, config.bytes),
            uncut: Vec::new(),
            volume: config.uuid,
            store,
            image,
            scenario,
            random,
            asked: BTreeMap::new(),
            next: 0,
            actions: Vec::new(),
            unsettled: Vec::new(),
            is_open: true,
            pretended_log: None,
            keeping: None,
        }
    }

    /// When it wants to be polled; what it does in turns takes a little time.
    pub(super) fn next_wakeup(&self, now: Nanos) -> Option<Nanos> {
        let due = self.home.next_wakeup().filter(|_| self.is_open);
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
        if let Some(image) = &mut self.image {
            image.power_cut();
        }
        self.fail_asked(IoError::Unreachable);
    }

    /// What is under way in the backend fails.
    pub(super) fn fail_asked(&mut self, error: IoError) {
        for (_, asked, fails) in self.asked.values_mut() {
            if asked.is_of_backend() {
                *fails = Some(error);
            }
        }
    }

    /// Open it again, behind the log of a volume. Returns whether that says who it is: else neither is opened.
    pub(super) fn reopen(&mut self, log: &Disk, kept: Option<&LogSuperblock>) -> bool {
        self.asked.clear();
        self.actions.clear();
        self.unsettled.clear();
        self.uncut.clear();
        self.keeping = None;
        self.store.process_kill();
        if let Some(image) = &mut self.image {
            image.client_lost();
            image.opened();
            image.take_commits();
        }
        let before = before(log, kept);
        self.is_open = before.is_some();
        if let Some(mut before) = before {
            before.log = self.pretended_log.unwrap_or(before.log);
            self.home = open(&mut self.store, self.volume, self.scenario, before);
        }
        self.is_open
    }

    /// A planted bug opens it from now on as if this log were still before it.
    pub(super) fn pretend(&mut self, log: &Disk, kept: Option<&LogSuperblock>) {
        let known = check_log::newest_superblock(log, kept);
        self.pretended_log = known.map(|superblock| superblock.log.get());
    }

    /// A volume of so many bytes is opened over it.
    pub(super) fn begin_sizes(&mut self, bytes: u64) {
        self.sizes = Sizes::new(bytes, self.home.status().bytes);
    }

    /// Whether somebody closes its volume once all is tiered out.
    pub(super) fn is_tiered_before_close(&mut self) -> bool {
        self.random.u8(..3) > 0
    }

    /// Whether it is open.
    pub(super) const fn is_open(&self) -> bool {
        self.is_open
    }

    /// It is polled, if it is open. Returns the size that it is to be asked for first of all, if there is one.
    pub(super) fn poll(&mut self, now: Nanos) -> Option<u64> {
        if !self.is_open {
            return None;
        }
        let cut = self.sizes.cut();
        self.home.poll(now, &mut self.actions);
        cut
    }

    /// The backend is asked for a snapshot: nothing is being written there then.
    pub(super) fn begin_keeping(&mut self) -> Result<(), Violation> {
        let mut asked = self.asked.values();
        if asked.any(|(_, asked, _)| asked.is_of_backend() && !matches!(asked, Asked::Read(..))) {
            let why = "a snapshot is asked for while the backend is written".to_owned();
            return Err(Violation::new("snapshot-unheld", why));
        }
        self.keeping = self.image_contents();
        Ok(())
    }

    /// The backend has made it, or not. What it shows, and has durably, has not changed meanwhile. Returns that.
    pub(super) fn end_keeping(&mut self) -> Result<Vec<Content>, Violation> {
        let before = self.keeping.take();
        let image = self
            .image
            .as_ref()
            .expect("an object volume ends it itself");
        let sectors = 0..image.sectors();
        let shown: Vec<Content> = sectors.map(|sector| image.visible(sector)).collect();
        if before.is_some_and(|before| before != shown) {
            let why = "the backend is written while it makes a snapshot".to_owned();
            return Err(Violation::new("snapshot-unheld", why));
        }
        Ok(shown)
    }

    /// What its backend holds durably, if that is an image.
    pub(super) fn image_contents(&self) -> Option<Vec<Content>> {
        let image = self.image.as_ref()?;
        Some(
            (0..image.sectors())
                .map(|sector| image.durable(sector))
                .collect(),
        )
    }

    /// What a reader would get of each sector, of volume `number`, over a backend that shows `below`.
    pub(super) fn shown(&self, number: u32, below: &[Content]) -> Result<Vec<Content>, Violation> {
        let layout = Layout::of(false);
        // An interrupted change of size may have left more below it.
        let blocks = self.home.status().bytes / BLOCK_BYTES as u64;
        let (mut block, mut bytes) = (0, vec![0; BLOCK_BYTES]);
        let mut shown = Vec::with_capacity(below.len());
        while block < blocks {
            let (state, end) = self.home.state_of(block, blocks);
            for block in block..end {
                let range = SectorRange::new(block * BLOCK_SECTORS, BLOCK_SECTORS);
                match state {
                    BlockState::Zero => shown.extend([Content::Zero; BLOCK_SECTORS as usize]),
                    BlockState::Absent => {
                        shown.extend(&below[range.start as usize..range.end() as usize]);
                    }
                    BlockState::Clean | BlockState::Dirty => {
                        let at = layout.data_offset(range.byte_offset());
                        self.store.peek(at, &mut bytes);
                        shown.extend(decode(number, range, &bytes)?);
                    }
                }
            }
            block = end;
        }
        Ok(shown)
    }

    /// What the store says of a range, or that the backend knows; and of how much of it.
    pub(super) fn extent(&self, range: SectorRange) -> (SectorRange, Option<ExtentState>) {
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

    /// How it is.
    pub(super) fn status(&self) -> Status {
        self.home.status()
    }

    /// Whether a tier has left the backend between two states.
    pub(super) fn is_between(&self) -> bool {
        self.home.status().between
    }

    /// The allocation of a range that only the backend knows of, if it is an image.
    pub(super) fn image_extents(&mut self, range: SectorRange) -> Option<Vec<Extent>> {
        self.image.as_mut().map(|image| image.extents(range))
    }

    /// What the backend shows of a range, if it is an image.
    pub(super) fn read_image(&mut self, range: SectorRange, buf: &mut [u8]) {
        if let Some(image) = &mut self.image {
            let op = image.submit_read(range);
            image.complete_read(op, buf);
        }
    }

    /// The log writes these sectors again.
    pub(super) fn unsettle(&mut self, range: SectorRange) {
        self.home.unsettle(range);
        self.unsettled.push(range);
    }
}

/// The log that is before a store, unless it has rotted where it says so.
fn before(log: &Disk, kept: Option<&LogSuperblock>) -> Option<Before> {
    let superblock = check_log::newest_superblock(log, kept)?;
    Some(Before {
        log: superblock.log.get(),
        is_whole: superblock.flags.get() & LOG_UNFLUSHED == 0,
    })
}

/// Open a store, as a node does.
fn open(
    store: &mut Disk,
    volume: [u8; 16],
    scenario: LocalStoreScenario,
    before: Before,
) -> LocalStore {
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
        backend_atomic: scenario.is_atomic,
        flush_every_blocks: scenario.flush_every_blocks,
        turn_blocks: scenario.turn_blocks,
        ..found
    };
    LocalStore::new(config, map, None)
}

/// How an operation of an image ends.
fn end_of_image(
    image: &mut Backend,
    asked: Asked,
    fails: Option<IoError>,
) -> Result<Done, IoError> {
    match (asked, fails) {
        (Asked::Read(op, mut buf), None) => {
            image.complete_read(op, &mut buf);
            Ok(Done::Read(buf))
        }
        (Asked::Write(op), None) => {
            image.complete_write(op);
            Ok(Done::Written)
        }
        (Asked::Flush(op), None) => {
            let is_good = image.complete_flush(op);
            is_good.then_some(Done::Written).ok_or(IoError::Failed)
        }
        (Asked::Write(op), Some(IoError::Failed)) => {
            image.fail_write(op);
            Err(IoError::Failed)
        }
        // What was not reached, or had no room, is as it was.
        (Asked::Read(op, _) | Asked::Write(op), Some(error)) => {
            image.cancel(op);
            Err(error)
        }
        (Asked::Flush(op), Some(error)) => {
            image.fail_flush(op);
            Err(error)
        }
        (Asked::Size(bytes), None) => {
            image.resize(bytes / SECTOR);
            Ok(Done::Written)
        }
        (Asked::Size(_), Some(error)) => Err(error),
        (asked, _) => unreachable!("{asked:?} is of the store"),
    }
}

/// What a store asks of objects, among what a volume does.
pub(super) const fn of_store(token: Token) -> Token {
    Token(token.0 | OF_STORE)
}

pub(super) fn decode(
    volume: u32,
    range: SectorRange,
    bytes: &[u8],
) -> Result<Vec<Content>, Violation> {
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

pub(super) fn sectors_of(offset: u64, bytes: usize) -> SectorRange {
    SectorRange::new(offset / SECTOR, (bytes / SECTOR_BYTES) as u64)
}

impl Unit {
    pub(super) fn local_store(&mut self) -> &mut SimulatedStore {
        self.local.as_mut().expect("it is in storage mode")
    }

    /// Whether it is to close once all is tiered out, which its log will not have.
    pub(super) fn is_to_close_stuck(&self, volume: &Volume) -> bool {
        self.tier_out.is_some_and(|one| one.then_closes()) && volume.log_is_stuck()
    }
}

impl World {
    pub(super) fn step_store(&mut self, unit: usize, event: StoreEvent) -> Result<(), Violation> {
        let now = self.engine.now();
        let local = self.units[unit].local_store();
        let before = local.home.status().tiers;
        local.home.step(now, event, &mut local.actions);
        self.go_on_with_store(unit)?;
        let state = &mut self.units[unit];
        let ended = state.local_store().home.status().tiers - before;
        self.coverage.tiers += ended;
        // A tier that has ended has left a disk that the client could have seen.
        if ended > 0 {
            state.note_tiered()
        } else {
            Ok(())
        }
    }

    pub(super) fn go_on_with_store(&mut self, unit: usize) -> Result<(), Violation> {
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
        // Objects check that themselves.
        let size = (local.image.as_ref()).map_or(u64::MAX, |image| image.sectors() * SECTOR);
        let (token, asked) = match action {
            StoreAction::End(Completion { token, result }) => {
                self.end_of_stack(unit, token.0, result);
                return Ok(());
            }
            StoreAction::Verified(..) => unreachable!("nobody asks for it"),
            StoreAction::StoreResize { token, bytes } => (token, Asked::StoreSize(bytes)),
            StoreAction::BackendResize { token, bytes } if local.image.is_none() => {
                let ask = ObjectAsk::Resize { bytes };
                return self.submit_to_objects(unit, of_store(token), ask);
            }
            StoreAction::BackendResize { token, bytes } => (token, Asked::Size(bytes)),
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
                let Some(image) = &mut local.image else {
                    let ask = ObjectAsk::Read { offset, buf };
                    return self.submit_to_objects(unit, of_store(token), ask);
                };
                let op = image.submit_read(sectors_of(offset, buf.len()));
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
                let Some(image) = &mut local.image else {
                    let data = vec![data];
                    let ask = ObjectAsk::Write { offset, data };
                    return self.submit_to_objects(unit, of_store(token), ask);
                };
                (token, Asked::Write(image.submit_write(range, contents)))
            }
            StoreAction::BackendZero {
                token,
                offset,
                bytes,
            } => {
                check_bounds::check_range("backend zero", offset, bytes, SECTOR_BYTES, size)?;
                let Some(image) = &mut local.image else {
                    let ask = ObjectAsk::Zero { offset, bytes };
                    return self.submit_to_objects(unit, of_store(token), ask);
                };
                let range = sectors_of(offset, bytes as usize);
                (token, Asked::Write(image.submit_zero(range, true)))
            }
            StoreAction::BackendFlush { token } => match &mut local.image {
                Some(image) => (token, Asked::Flush(image.submit_flush())),
                None => return self.submit_to_objects(unit, of_store(token), ObjectAsk::Flush),
            },
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
            let fenced = state.fence.is_up().then_some(IoError::Fenced);
            let fails = fenced.or(down).or(failed.then_some(IoError::Failed));
            if fails.is_some() {
                state.backend_trouble = Some(self.engine.now());
            }
            (state.backend_latency.draw(random), fails)
        } else {
            (state.log_latency.draw(random), None)
        };
        local.next += 1;
        let number = local.next;
        local.asked.insert(number, (token, asked, fails));
        let at = self.engine.now().plus(latency);
        self.engine.at(at, Happening::OfStore(unit, number));
    }

    /// Something that a store has asked for is done.
    pub(super) fn done_for_store(&mut self, unit: usize, number: u64) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        let silent = state.backend_silent;
        let local = state.local.as_mut().expect("it is in storage mode");
        let Some((token, asked, fails)) = local.asked.remove(&number) else {
            return Ok(());
        };
        if asked.is_of_backend() && silent > self.engine.now() {
            local.asked.insert(number, (token, asked, fails));
            let at = silent.plus(Nanos(local.random.u64(..1_000_000)));
            self.engine.at(at, Happening::OfStore(unit, number));
            return Ok(());
        }
        let result = match asked {
            Asked::StoreRead(op, mut buf) => {
                local.store.complete_read(op, &mut buf);
                Ok(Done::Read(buf))
            }
            Asked::StoreWrite(op) => {
                local.store.complete_write(op);
                Ok(Done::Written)
            }
            Asked::StoreSync => Ok(Done::Written),
            Asked::StoreSize(bytes) => {
                local.store.resize(bytes);
                Ok(Done::Written)
            }
            asked => {
                let image = local.image.as_mut().expect("it was asked");
                let result = end_of_image(image, asked, fails);
                image.take_commits();
                result
            }
        };
        self.step_store(unit, StoreEvent::Completed(Completion { token, result }))
    }

    /// Tiering out begins or is cancelled, sometimes.
    pub(super) fn tier_sometimes(&mut self, unit: usize) -> Result<(), Violation> {
        let Some(local) = &mut self.units[unit].local else {
            return Ok(());
        };
        match local.random.u8(..8) {
            0..=2 => self.begin_tiering(unit, false),
            3 => {
                self.engine.note("cancel tier", [unit as u64, 0, 0, 0]);
                let tier_out = &mut self.units[unit].tier_out;
                // Whoever closes the volume does not let it be cancelled.
                if tier_out.take_if(|one| !one.then_closes()).is_none() {
                    return Ok(());
                }
                self.step_store(unit, StoreEvent::CancelTier)
            }
            _ => Ok(()),
        }
    }

    /// Have a store tier out what it has, perhaps before its volume is closed.
    pub(super) fn begin_tiering(&mut self, unit: usize, then_close: bool) -> Result<(), Violation> {
        if self.phase(unit) != Some(Phase::Open) {
            return Ok(());
        }
        self.engine
            .note("tier", [unit as u64, u64::from(then_close), 0, 0]);
        let before = self.units[unit].tier_out;
        self.units[unit].tier_out = Some(TierOut::begin(then_close, before));
        self.destage_all(unit)
    }

    /// Do what [`TierOut`] decides.
    pub(super) fn go_on_tiering(&mut self, unit: usize) -> Result<(), Violation> {
        let Some(volume) = self.node.as_ref().and_then(|node| node.volumes.get(unit)) else {
            return Ok(());
        };
        let (has, log_is_stuck) = (volume.stats(self.engine.now()), volume.log_is_stuck());
        let owes_flush = volume.owes_flush();
        let state = &mut self.units[unit];
        let (Some(tier_out), Some(local)) = (&mut state.tier_out, &state.local) else {
            return Ok(());
        };
        let was_asked = tier_out.is_asked();
        let act = tier_out.go_on(&View {
            destage_left_bytes: has.destage_all_remaining_bytes,
            log_used_blocks: has.log_used_blocks,
            owes_flush,
            log_is_stuck,
            local: local.home.status(),
        });
        let closes = tier_out.then_closes();
        match act {
            None => Ok(()),
            Some(Act::Begin) if closes && self.planted.is(Plant::UntieredClose) => {
                self.end_tiering(unit, Ending::Close)
            }
            Some(Act::Begin) => {
                // It may have ended at once.
                self.tick();
                self.step_store(unit, StoreEvent::Tier)
            }
            Some(Act::DestageAll) if closes && was_asked && self.planted.is(Plant::DirtyClose) => {
                self.end_tiering(unit, Ending::Close)
            }
            Some(Act::DestageAll) => {
                self.coverage.tiered_again += u64::from(closes);
                self.destage_all(unit)
            }
            Some(Act::End(ending)) => self.end_tiering(unit, ending),
        }
    }

    fn end_tiering(&mut self, unit: usize, ending: Ending) -> Result<(), Violation> {
        self.engine.note(
            "tiered",
            [unit as u64, u64::from(ending != Ending::Done), 0, 0],
        );
        let state = &mut self.units[unit];
        state.tier_out = None;
        match ending {
            Ending::Done => return Ok(()),
            Ending::Close => {
                self.coverage.tiered_closes += 1;
                // What is answered later, nobody is connected any more to be told.
                state.tiered_to_close = Some(state.history.tick());
            }
            Ending::CancelAndClose => {
                self.coverage.untiered_closes += 1;
                self.step_store(unit, StoreEvent::CancelTier)?;
            }
            Ending::Failed(_) => unreachable!("no store of this world fails"),
        }
        self.units[unit].asks_left = 0;
        self.close_volume(unit, true)
    }

    /// Have all stores tier out what they have.
    pub fn begin_tiers(&mut self) -> Result<(), Violation> {
        for unit in 0..self.volumes() {
            if self.units[unit].local.is_some() {
                self.begin_tiering(unit, false)?;
            }
        }
        self.tick();
        Ok(())
    }

    /// Whether all of that is done.
    pub fn is_tiered(&self) -> bool {
        let mut stores = self.units.iter().filter_map(|unit| unit.local.as_ref());
        stores.all(SimulatedStore::is_tiered)
    }
}
