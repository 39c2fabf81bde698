//! One run: owners of a volume, one after another, on one fake store, and the rules that hold.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use fastrand::Rng;
use hdcs_core::base::buf::{BufMut, Pool};
use hdcs_core::base::io::{Nanos, SectorRange, Token};
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_core::objects::frames::{Frames, Part};
use hdcs_core::objects::io::{
    Action, Ask, Condition, Event, Kind, Name, OpenError, Phase, SnapshotName, StoreError, Stored,
};
use hdcs_core::objects::{Access, Config, ObjectVolume};

use super::model::{Before, Model};
use super::plant::Plant;
use super::scenario::{Coverage, Paging, Scenario};
use super::store::Store;
use super::{Options, reader};
use crate::content::Content;
use crate::engine::{Ended, Engine, Simulated};
use crate::trace::Trace;
use crate::violation::Violation;

/// Number of the volume in the contents of its sectors.
pub(super) const VOLUME: u32 = 1;
/// Where the volume is, and where its clone.
pub(super) const PLACE: &str = "bucket/volume/";
pub(super) const CLONE_PLACE: &str = "bucket/clone/";
pub(super) const UUID: [u8; 16] = [7; 16];
pub(super) const CLONE_UUID: [u8; 16] = [9; 16];
/// A request that waits longer is stalled: a bucket that was full has had room for long.
const PATIENCE: Nanos = Nanos::from_millis(1_200_000);
/// An owner knows that long after a put was refused that it was.
pub(super) const REFUSAL_TELLS: Nanos = Nanos::from_millis(21_000);

/// A request under way.
#[derive(Debug)]
pub(super) enum Op {
    Read(SectorRange, Before),
    Write(SectorRange, Content),
    Flush(u64),
    Extents(SectorRange),
    Resize(u64),
    Snapshot(SnapshotName),
    Forget,
    GiveUp,
}

impl Op {
    /// For the trace.
    fn describe(&self) -> (&'static str, [u64; 2]) {
        match self {
            Self::Read(range, _) => ("read", [range.start, range.count]),
            Self::Write(range, Content::Zero) => ("zero", [range.start, range.count]),
            Self::Write(range, _) => ("write", [range.start, range.count]),
            Self::Flush(boundary) => ("flush", [*boundary, 0]),
            Self::Extents(range) => ("extents", [range.start, range.count]),
            Self::Resize(sectors) => ("resize", [*sectors, 0]),
            Self::Snapshot(_) => ("snapshot", [0, 0]),
            Self::Forget => ("forget", [0, 0]),
            Self::GiveUp => ("give up", [0, 0]),
        }
    }
}

/// A process that has, or had, the volume.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) machine: Option<ObjectVolume>,
    pub(super) nonce: u64,
    pub(super) model: Option<Model>,
    pub(super) ops: BTreeMap<u64, (Nanos, Op)>,
    pub(super) next_token: u64,
    /// Snapshots that this owner was asked to make, and what they hold.
    pub(super) place: &'static str,
    pub(super) was_replaced: bool,
}

/// What happens at some time.
#[derive(Debug)]
pub(super) enum Happening {
    /// A put or delete happens, and perhaps tells.
    Happen {
        owner: usize,
        token: Option<Token>,
        effect: Effect,
    },
    /// A get or list is answered from what is there.
    Look {
        owner: usize,
        token: Token,
        look: Look,
    },
    /// An owner is told.
    Tell {
        owner: usize,
        token: Token,
        result: Result<Stored, StoreError>,
    },
}

#[derive(Clone, Debug)]
pub(super) enum Effect {
    Put {
        name: String,
        short: Name,
        bytes: Rc<Vec<u8>>,
        /// How it was compressed.
        frames: Option<Frames>,
        condition: Condition,
    },
    Delete {
        name: String,
    },
}

#[derive(Debug)]
pub(super) enum Look {
    GetFrames {
        name: String,
        part: Part,
        buf: BufMut,
    },
    Get {
        name: String,
        kind: Kind,
        offset: u64,
        slots: bool,
        buf: BufMut,
    },
    List {
        place: String,
        prefix: &'static str,
        after: String,
    },
}

/// How the store treats one action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// It does not happen.
    Fails,
    /// It happens and is reported as failed.
    Unknown,
    /// It is reported as failed and happens later.
    Late,
    /// It happens, and once more later.
    Twice,
    /// What is read is damaged on the way.
    Corrupt,
}

/// A run.
#[derive(Debug)]
pub struct ObjectsWorld {
    pub(super) engine: Engine<Happening>,
    /// What the run saw.
    pub coverage: Coverage,
    pub(super) scenario: Scenario,
    pub(super) paging: Paging,
    pub(super) random: Rng,
    /// Whether objects are compressed, and what is drawn for that.
    pub(super) compresses: bool,
    pub(super) choices: Rng,
    pub(super) plant: Option<Plant>,
    pub(super) store: Store,
    pub(super) owners: Vec<Owner>,
    pub(super) pool: Arc<Pool>,
    pub(super) calm: bool,
    /// When something was last told to have failed, or damaged.
    pub(super) last_fault: Nanos,
    /// The bucket's quota, and until when it has it.
    pub(super) quota: Option<(u64, Nanos)>,
    /// When a put was last refused because of it.
    pub(super) last_refusal: Nanos,
    /// A planted bug: this owner's puts are refused for good.
    pub(super) latched: Option<usize>,
    pub(super) next_write: u32,
    pub(super) needed: Option<BTreeSet<String>>,
    pub(super) snapshots: BTreeMap<SnapshotName, Model>,
    pub(super) resized_to: u64,
    pub(super) crash_at: Option<u64>,
    pub(super) actions: Vec<Action>,
}

impl Simulated for ObjectsWorld {
    fn now(&self) -> Nanos {
        self.engine.now()
    }

    fn trace(&self) -> &Trace {
        &self.engine.trace
    }

    fn advance(&mut self) -> Result<bool, Violation> {
        let machines = self
            .owners
            .iter()
            .filter_map(|owner| owner.machine.as_ref());
        let wakeup = machines.filter_map(ObjectVolume::next_wakeup).min();
        self.engine.go_on(wakeup)
    }

    fn turn(&mut self) -> Result<Ended, Violation> {
        if let Some(happening) = self.engine.take_due() {
            self.happen(happening)?;
        }
        for owner in 0..self.owners.len() {
            if self.owners[owner].machine.is_some() {
                self.poll(owner)?;
            }
        }
        self.check_patience()?;
        Ok(Ended::Reached)
    }

    fn deadline(&self, _: Nanos) -> Option<Nanos> {
        // Each request has its own.
        None
    }

    fn waiting(&self) -> String {
        let ops = self.owners.iter().map(|owner| owner.ops.len());
        format!("{} requests wait", ops.sum::<usize>())
    }
}

impl ObjectsWorld {
    /// The run of a seed.
    pub fn new(seed: u64, options: Options) -> Self {
        let mut random = Rng::with_seed(seed ^ 0x6f62_6a65_6374_7321);
        let mut scenario = Scenario::draw(&mut random);
        if options.crash_at.is_some() {
            scenario.requests = 25;
            scenario.lives = 1;
            scenario.sectors = scenario.sectors.min(300);
            scenario.corrupts = false;
        }
        let mut choices = Rng::with_seed(seed ^ 0x636f_6d70_7265_7373);
        Self {
            compresses: choices.bool(),
            choices,
            paging: Paging::draw(&mut Rng::with_seed(seed ^ 0x7061_6765_7321)),
            engine: Engine::new(Nanos(0), options.verbose),
            coverage: Coverage::default(),
            scenario,
            random,
            plant: options.plant,
            store: Store::default(),
            owners: Vec::new(),
            pool: Pool::new(8 << 20),
            calm: false,
            last_fault: Nanos(0),
            quota: None,
            last_refusal: Nanos(0),
            latched: None,
            next_write: 0,
            needed: None,
            snapshots: BTreeMap::new(),
            resized_to: scenario.sectors,
            crash_at: options.crash_at,
            actions: Vec::new(),
        }
    }

    /// Run it.
    pub fn run(&mut self) -> Result<(), Violation> {
        let bytes = self.scenario.sectors * SECTOR_BYTES as u64;
        let mut owner = self.start(Access::Create { uuid: UUID }, Some(bytes), PLACE);
        for life in 0..self.scenario.lives {
            if let Some(opened) = self.open(owner)? {
                owner = opened;
            }
            if !self.work(owner)? {
                self.kill(owner);
                owner = self.start(Access::Create { uuid: UUID }, None, PLACE);
                continue;
            }
            if life + 1 == self.scenario.lives {
                break;
            }
            match self.random.u8(0..3) {
                0 => {
                    self.kill(owner);
                    owner = self.start(Access::Existing, None, PLACE);
                }
                1 => {
                    // The one before goes on, and does not know.
                    self.coverage.takeovers += 1;
                    let next = self.start(Access::Existing, None, PLACE);
                    let next = self.open(next)?.unwrap_or(next);
                    self.work_fenced(owner)?;
                    self.kill(owner);
                    owner = next;
                }
                _ => {
                    self.settle(owner)?;
                    self.kill(owner);
                    owner = self.start(Access::Existing, None, PLACE);
                }
            }
        }
        self.finish(owner)
    }

    pub(super) fn config(&mut self, access: Access, bytes: Option<u64>) -> Config {
        Config {
            access,
            bytes,
            uuid: None,
            parent: None,
            nonce: self.random.u64(..),
            batch_blocks: self.scenario.batch_blocks,
            write_memory_bytes: self.scenario.write_memory_bytes,
            read_memory_bytes: 2 << 20,
            map_cache_bytes: self.paging.cache_bytes,
            changes_max: self.paging.changes_max,
            page_blocks: self.paging.page_blocks,
            puts_in_flight_max: self.scenario.puts,
            gets_in_flight_max: self.scenario.gets,
        }
    }

    pub(super) fn start(
        &mut self,
        access: Access,
        bytes: Option<u64>,
        place: &'static str,
    ) -> usize {
        let bytes = match access {
            Access::Create { .. } => bytes.or(Some(self.scenario.sectors * SECTOR_BYTES as u64)),
            _ => bytes,
        };
        let exists = reader::newest(&self.store, place).ok().flatten().is_some();
        let bytes = bytes.filter(|_| !exists);
        let config = self.config(access, bytes);
        let mut machine = ObjectVolume::new(config);
        machine.set_compression(self.draw_compression());
        if let Access::Clone { .. } = access {
            machine.clone_of(PLACE.into(), place.into());
        }
        self.owners.push(Owner {
            machine: Some(machine),
            nonce: config.nonce,
            model: None,
            ops: BTreeMap::new(),
            next_token: 0,
            place,
            was_replaced: false,
        });
        let owner = self.owners.len() - 1;
        self.engine.note("start", [owner as u64, 0, 0, 0]);
        owner
    }

    pub(super) fn machine(&self, owner: usize) -> Option<&ObjectVolume> {
        self.owners[owner].machine.as_ref()
    }

    pub(super) fn is_open(&self, owner: usize) -> bool {
        let phase = self.machine(owner).map(ObjectVolume::phase);
        phase == Some(Phase::Open)
    }

    /// An owner dies. What it has asked of the store happens or not.
    pub(super) fn kill(&mut self, owner: usize) {
        if let Some(machine) = self.owners[owner].machine.take() {
            self.coverage.crashes += 1;
            self.coverage.copied_blocks += machine.stats().copied_blocks;
            self.coverage.maps += machine.stats().puts_map;
            self.coverage.page_gets += machine.stats().gets_of_pages;
            self.coverage.fenced += u64::from(machine.phase() == Phase::Fenced);
        }
        self.owners[owner].ops.clear();
        self.engine.note("kill", [owner as u64, 0, 0, 0]);
        let random = &mut self.random;
        let mut late = 0;
        self.engine.retain(|happening| match happening {
            Happening::Happen { owner: of, .. } if *of == owner => {
                let keep = random.bool();
                late += u64::from(keep);
                keep
            }
            Happening::Look { owner: of, .. } | Happening::Tell { owner: of, .. } => *of != owner,
            Happening::Happen { .. } => true,
        });
        self.coverage.late += late;
    }

    /// Let an owner open; another one takes its place if the store fails it. Returns the one that is
    /// open.
    pub(super) fn open(&mut self, owner: usize) -> Result<Option<usize>, Violation> {
        let mut owner = owner;
        if self.owners[owner].model.is_some() {
            return Ok(None);
        }
        for attempt in 0..40 {
            if attempt == 10 {
                self.calm = true;
            }
            match self.finish_opening(owner)? {
                Some(Phase::Open) => {
                    self.calm = false;
                    self.opened(owner)?;
                    return Ok(Some(owner));
                }
                Some(Phase::Failed(error)) => self.judge_refusal(error)?,
                _ => return Err(Violation::new("fenced-without-cause", "while opening")),
            }
            let place = self.owners[owner].place;
            self.kill(owner);
            let access = match reader::newest(&self.store, place) {
                Ok(Some(_)) => Access::Existing,
                _ => Access::Create { uuid: UUID },
            };
            owner = self.start(access, None, place);
        }
        Err(Violation::new("open-refused", "again and again"))
    }

    /// Go on until an owner has opened, or has failed to.
    pub(super) fn finish_opening(&mut self, owner: usize) -> Result<Option<Phase>, Violation> {
        self.poll(owner)?;
        let phase = |world: &Self| world.machine(owner).map(ObjectVolume::phase);
        self.run_until(|world| phase(world) != Some(Phase::Opening))?;
        Ok(phase(self))
    }

    /// Whatever is to come late comes.
    pub(super) fn drain(&mut self) -> Result<(), Violation> {
        self.run_until(|world| world.engine.next_time().is_none())
            .map(drop)
    }

    pub(super) fn judge_refusal(&self, error: OpenError) -> Result<(), Violation> {
        let excused = match error {
            OpenError::Io(_) => !self.calm,
            OpenError::Damaged { .. } | OpenError::Newer { .. } => {
                self.scenario.corrupts && !self.calm
            }
            // A manifest that was put by an owner who died, and is not there yet.
            OpenError::Absent => {
                let newest = reader::newest(&self.store, PLACE);
                newest.is_ok_and(|newest| newest.is_none())
            }
            _ => false,
        };
        if excused {
            return Ok(());
        }
        Err(Violation::new("open-refused", error.to_string()))
    }

    /// A new owner begins with what the bucket holds, which must be a state that was flushed.
    pub(super) fn opened(&mut self, owner: usize) -> Result<(), Violation> {
        let place = self.owners[owner].place;
        let contents = self.bucket(place)?;
        self.engine
            .note("open", [owner as u64, contents.len() as u64, 0, 0]);
        let mut known = false;
        for before in self.owners[..owner].iter_mut().rev() {
            if before.place == place
                && let Some(model) = &mut before.model
            {
                if !before.was_replaced {
                    model.left_with(&contents)?;
                    before.was_replaced = true;
                }
                known = true;
            }
        }
        if !known && place == PLACE && contents.iter().any(|&content| content != Content::Zero) {
            return Err(Violation::new(
                "not-a-boundary",
                "a new volume is not empty",
            ));
        }
        self.owners[owner].model = Some(Model::new(&contents));
        let bytes = self.machine(owner).map_or(0, ObjectVolume::bytes);
        if bytes != (contents.len() * SECTOR_BYTES) as u64 {
            return Err(Violation::new("not-a-boundary", "the size differs"));
        }
        Ok(())
    }

    /// What the volume at `place` holds by its newest manifest.
    pub(super) fn bucket(&self, place: &str) -> Result<Vec<Content>, Violation> {
        let broken = |error: String| Violation::new("manifest-dangling", error);
        let manifest = reader::newest(&self.store, place).map_err(broken)?;
        let manifest = manifest.ok_or_else(|| broken("there is no manifest".into()))?;
        let state = reader::read(&self.store, place, manifest).map_err(broken)?;
        reader::contents(&self.store, place, &state, VOLUME).map_err(broken)
    }

    /// Requests, until there were enough; false if the owner is to die now.
    pub(super) fn work(&mut self, owner: usize) -> Result<bool, Violation> {
        let mut left = self.scenario.requests;
        loop {
            if self.crash_at.is_some_and(|at| self.engine.turns() >= at) {
                self.crash_at = None;
                self.coverage.cut = true;
                return Ok(false);
            }
            if self.scenario.fills && self.quota.is_none() && self.random.u8(0..100) == 0 {
                self.fill_up();
            }
            self.change_compression(owner);
            while left > 0
                && self.owners[owner].ops.len() < self.scenario.depth
                && self.send_any(owner)?
            {
                left -= 1;
            }
            self.poll(owner)?;
            if left == 0 && self.random.u8(0..20) == 0 {
                // Whatever is under way may be cut.
                return Ok(true);
            }
            if left == 0 && self.owners[owner].ops.is_empty() {
                return Ok(true);
            }
            if self.go_on()?.is_none() {
                if self.owners[owner].ops.is_empty() {
                    continue;
                }
                return Err(self.stalled("nothing happens"));
            }
        }
    }

    /// Requests of an owner that was replaced: whatever it is told, it commits nothing.
    pub(super) fn work_fenced(&mut self, owner: usize) -> Result<(), Violation> {
        for _ in 0..self.random.u32(1..30) {
            if let Some(Phase::Fenced) = self.machine(owner).map(ObjectVolume::phase) {
                break;
            }
            self.send_any(owner)?;
            self.poll(owner)?;
            for _ in 0..self.random.u32(0..20) {
                self.go_on()?;
            }
        }
        Ok(())
    }

    /// Everything that was asked for ends, and housekeeping too.
    pub(super) fn settle(&mut self, owner: usize) -> Result<(), Violation> {
        self.calm = true;
        self.poll(owner)?;
        self.run_until(|world| {
            let rests = world.machine(owner).is_none_or(ObjectVolume::is_at_rest);
            rests && world.owners[owner].ops.is_empty()
        })?;
        self.calm = false;
        Ok(())
    }

    /// Send a request.
    pub(super) fn send(&mut self, owner: usize, op: Op, ask: Ask) {
        let entry = &mut self.owners[owner];
        entry.next_token += 1;
        let token = Token(entry.next_token);
        let what = op.describe();
        entry.ops.insert(token.0, (self.engine.now(), op));
        let (name, numbers) = what;
        self.engine
            .note(name, [owner as u64, token.0, numbers[0], numbers[1]]);
        let entry = &mut self.owners[owner];
        if let Some(machine) = &mut entry.machine {
            machine.step(
                self.engine.now(),
                Event::Submit { token, ask },
                &mut self.actions,
            );
        }
    }

    /// Send some request; false if none is possible now.
    pub(super) fn send_any(&mut self, owner: usize) -> Result<bool, Violation> {
        if !matches!(
            self.machine(owner).map(ObjectVolume::phase),
            Some(Phase::Open)
        ) {
            return Ok(false);
        }
        let exclusive = |op: &Op| matches!(op, Op::Resize(_) | Op::Snapshot(_) | Op::Forget);
        if self.owners[owner].ops.values().any(|(_, op)| exclusive(op)) {
            return Ok(false);
        }
        if self.owners[owner].ops.is_empty() && self.random.u8(0..15) == 0 {
            let snapshots = self.scenario.snapshots && self.owners[owner].place == PLACE;
            if snapshots && self.random.bool() {
                self.send_snapshot(owner);
                return Ok(true);
            }
            if self.scenario.resizes {
                self.send_resize(owner);
                return Ok(true);
            }
        }
        if self.random.u32(0..self.scenario.flush_one_in) == 0 {
            self.send_flush(owner);
            return Ok(true);
        }
        let range = self.draw_range(owner);
        match self.random.u8(0..10) {
            0..=1 => self.send_read(owner, range),
            2 => {
                self.send(owner, Op::Extents(range), Ask::Extents { range });
                self.settle_actions(owner)?;
            }
            3 => return Ok(self.send_write(owner, range, Content::Zero)),
            _ => {
                self.next_write += 1;
                let content = Content::Write(self.next_write);
                return Ok(self.send_write(owner, range, content));
            }
        }
        Ok(true)
    }

    pub(super) fn draw_range(&mut self, owner: usize) -> SectorRange {
        let model = self.owners[owner].model.as_ref();
        let sectors = model.map_or(1, Model::sectors);
        let count = self.random.u64(1..=self.scenario.sectors_max.min(sectors));
        let span = if self.scenario.hot && self.random.bool() {
            sectors.div_ceil(8)
        } else {
            sectors
        };
        let start = self.random.u64(0..span).min(sectors - count);
        if self.scenario.aligned && start + count >= 8 {
            let (from, to) = (
                start / 8 * 8,
                (start + count).next_multiple_of(8).min(sectors),
            );
            return SectorRange::between(from, to);
        }
        SectorRange::new(start, count)
    }

    pub(super) fn send_read(&mut self, owner: usize, range: SectorRange) {
        let (Some(buf), Some(model)) = (
            self.pool.alloc(range.bytes()),
            self.owners[owner].model.as_ref(),
        ) else {
            return;
        };
        let before = model.read_sent(range);
        let offset = range.byte_offset();
        self.send(owner, Op::Read(range, before), Ask::Read { offset, buf });
    }

    pub(super) fn send_write(
        &mut self,
        owner: usize,
        range: SectorRange,
        content: Content,
    ) -> bool {
        let overlaps = |op: &Op| matches!(op, Op::Write(other, _) if other.overlaps(range));
        if self.owners[owner].ops.values().any(|(_, op)| overlaps(op)) {
            return false;
        }
        let offset = range.byte_offset();
        let ask = if content == Content::Zero {
            Ask::Zero {
                offset,
                bytes: range.bytes() as u64,
            }
        } else {
            let Some(mut buf) = self.pool.alloc(range.bytes()) else {
                return false;
            };
            for (index, out) in buf.chunks_mut(SECTOR_BYTES).enumerate() {
                content.fill(VOLUME, range.start + index as u64, out);
            }
            let whole = buf.freeze();
            let cut = self.random.usize(0..=whole.len());
            let data = vec![whole.slice(0..cut), whole.slice(cut..whole.len())];
            Ask::Write { offset, data }
        };
        if let Some(model) = &mut self.owners[owner].model {
            model.write_sent(range, content);
        }
        self.send(owner, Op::Write(range, content), ask);
        true
    }

    pub(super) fn send_flush(&mut self, owner: usize) {
        let boundary = self.owners[owner].model.as_mut().map(Model::flush_sent);
        self.send(owner, Op::Flush(boundary.unwrap_or(0)), Ask::Flush);
    }

    pub(super) fn send_snapshot(&mut self, owner: usize) {
        let names = ["one", "two", "three"];
        let text = self.random.choice(names).unwrap_or("one");
        let Some(name) = SnapshotName::new(text) else {
            return;
        };
        let there = self
            .machine(owner)
            .is_some_and(|machine| machine.snapshots().contains(&name));
        if there {
            // Whether it is still there is not certain before the end.
            self.snapshots.remove(&name);
            self.send(owner, Op::Forget, Ask::DeleteSnapshot { name });
        } else {
            if let Some(model) = &self.owners[owner].model {
                self.snapshots.insert(name, model.clone());
            }
            let made_ms = 0;
            self.send(owner, Op::Snapshot(name), Ask::Snapshot { name, made_ms });
        }
    }

    pub(super) fn send_resize(&mut self, owner: usize) {
        let sectors = self.random.u64(1..=self.scenario.sectors + 50);
        let Some(model) = &mut self.owners[owner].model else {
            return;
        };
        // Both sizes may be found until it is known which.
        model.flush_sent();
        let old = model.sectors();
        if sectors < old {
            model.write_sent(SectorRange::between(sectors, old), Content::Zero);
            model.flush_sent();
        }
        model.resized(sectors);
        model.flush_sent();
        self.resized_to = sectors;
        let bytes = sectors * SECTOR_BYTES as u64;
        self.send(owner, Op::Resize(sectors), Ask::Resize { bytes });
    }

    /// Let an owner go on, and perform what it asks.
    pub(super) fn poll(&mut self, owner: usize) -> Result<(), Violation> {
        if let Some(machine) = &mut self.owners[owner].machine {
            machine.poll(self.engine.now(), &mut self.actions);
        }
        self.settle_actions(owner)
    }

    pub(super) fn settle_actions(&mut self, owner: usize) -> Result<(), Violation> {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::End(completion) => self.ended(owner, completion)?,
                Action::SnapshotEnd { token, result } => {
                    self.snapshot_ended(owner, token, result)?;
                }
                action => self.perform(owner, action)?,
            }
        }
        self.check_fenced(owner)
    }

    /// Everything ends, whatever the store does: nothing here lasts as long as the patience.
    pub(super) fn check_patience(&self) -> Result<(), Violation> {
        for entry in self.owners.iter().filter(|entry| entry.machine.is_some()) {
            for (since, op) in entry.ops.values() {
                if self.engine.now().since(*since) > PATIENCE {
                    return Err(Violation::new("stall", format!("{op:?} waits")));
                }
            }
        }
        Ok(())
    }

    /// All is well from here on: everything must be there, and garbage must not.
    pub(super) fn finish(&mut self, owner: usize) -> Result<(), Violation> {
        self.kill(owner);
        self.calm = true;
        self.drain()?;
        let access = match reader::newest(&self.store, PLACE) {
            Ok(Some(_)) => Access::Existing,
            _ => Access::Create { uuid: UUID },
        };
        let owner = self.start(access, None, PLACE);
        let owner = self.open(owner)?.unwrap_or(owner);
        self.calm = true;
        self.verify(owner)?;
        self.check_snapshots()?;
        if self.choices.bool() {
            self.beside_readers(owner)?;
        }
        if self.scenario.clones {
            self.clone(owner)?;
        }
        self.churn(owner)?;
        self.verify(owner)?;
        self.check_snapshots()?;
        self.check_garbage(owner)?;
        self.kill(owner);
        Ok(())
    }

    /// Read everything.
    pub(super) fn verify(&mut self, owner: usize) -> Result<(), Violation> {
        let sectors = self.owners[owner].model.as_ref().map_or(0, Model::sectors);
        for start in (0..sectors).step_by(64) {
            self.send_read(owner, SectorRange::between(start, sectors.min(start + 64)));
        }
        self.settle(owner)?;
        self.calm = true;
        if let Some(machine) = self.machine(owner) {
            machine.check_map();
        }
        Ok(())
    }

    /// Write and flush so much that the map is stored and what was there before is garbage. It is stored
    /// after so many bytes, so they are not compressed.
    pub(super) fn churn(&mut self, owner: usize) -> Result<(), Violation> {
        if let Some(machine) = &mut self.owners[owner].machine {
            machine.set_compression(None);
        }
        let sectors = self.owners[owner].model.as_ref().map_or(1, Model::sectors);
        let blocks = self.scenario.batch_blocks as u64;
        for _ in 0..8 * (1 + blocks * 8 / sectors.max(1)).min(8) {
            for index in 0..blocks.min(sectors.div_ceil(8)) {
                let start = index * 8 % sectors;
                let range = SectorRange::between(start, sectors.min(start + 8));
                self.next_write += 1;
                let content = Content::Write(self.next_write);
                self.send_write(owner, range, content);
            }
            self.settle(owner)?;
            self.send_flush(owner);
            self.settle(owner)?;
            self.calm = true;
        }
        Ok(())
    }

    /// Clone a snapshot, let both live, forget the snapshot: the clone keeps what it has.
    pub(super) fn clone(&mut self, owner: usize) -> Result<(), Violation> {
        let Some(name) = SnapshotName::new("for-clone") else {
            return Ok(());
        };
        self.send_flush(owner);
        self.settle(owner)?;
        let made_ms = 0;
        self.send(owner, Op::Snapshot(name), Ask::Snapshot { name, made_ms });
        self.settle(owner)?;
        self.calm = true;
        let contents = self.bucket(PLACE)?;
        self.dead_clone(name, &contents)?;
        let access = Access::Clone {
            uuid: CLONE_UUID,
            snapshot: name,
        };
        let clone = self.start(access, None, CLONE_PLACE);
        let clone = self.open(clone)?.unwrap_or(clone);
        self.calm = true;
        if self.bucket(CLONE_PLACE)? != contents {
            return Err(Violation::new("clone", "it differs from its snapshot"));
        }
        self.verify(clone)?;
        let clone = self.diverge(clone, &contents)?;
        self.verify(clone)?;
        self.send(owner, Op::Forget, Ask::DeleteSnapshot { name });
        self.settle(owner)?;
        self.calm = true;
        self.churn(owner)?;
        self.verify(clone)?;
        self.churn(clone)?;
        self.verify(clone)?;
        self.coverage.clones += 1;
        // A clone that is opened once more knows where the rest of it is.
        self.kill(clone);
        let clone = self.start(Access::Existing, None, CLONE_PLACE);
        let clone = self.open(clone)?.unwrap_or(clone);
        self.calm = true;
        self.check_inherited(clone, &contents)?;
        self.verify(clone)?;
        if self.random.bool() {
            self.kill(clone);
            return Ok(());
        }
        self.give_up(clone)
    }

    /// Give a clone up, with faults and deaths in between: from the moment on at which it says so it
    /// cannot be opened, and in the end its parent knows of it no more.
    fn give_up(&mut self, clone: usize) -> Result<(), Violation> {
        self.calm = false;
        let mut clone = clone;
        for attempt in 0..40 {
            self.calm = attempt >= 10;
            if self.is_open(clone) {
                self.send(clone, Op::GiveUp, Ask::GiveUp);
                self.poll(clone)?;
            }
            let steps = self.random.u32(1..200);
            for _ in 0..steps {
                if self.owners[clone].ops.is_empty() || self.go_on()?.is_none() {
                    break;
                }
            }
            self.kill(clone);
            // What it has asked for happens or not, before or after the next one looks.
            clone = self.start(Access::Existing, None, CLONE_PLACE);
            match self.finish_opening(clone)? {
                Some(Phase::Failed(OpenError::Gone)) => {
                    let gone = reader::newest(&self.store, CLONE_PLACE).ok().flatten();
                    if !gone.is_some_and(|manifest| manifest.gone) {
                        let message = "it cannot be opened, and was not given up";
                        return Err(Violation::new("given-up", message));
                    }
                    let mut kept = reader::clones(&self.store, PLACE, &UUID).into_iter();
                    if kept.any(|reference| reference.clone == CLONE_UUID) {
                        let message = "its parent still keeps what it needed";
                        return Err(Violation::new("given-up", message));
                    }
                    self.coverage.given_up += 1;
                    self.kill(clone);
                    self.calm = true;
                    return Ok(());
                }
                Some(Phase::Open) => {
                    // It never came so far: it is whole.
                    self.calm = true;
                    self.opened(clone)?;
                    self.verify(clone)?;
                }
                Some(Phase::Failed(error)) => self.judge_refusal(error)?,
                _ => {}
            }
        }
        Err(Violation::new("given-up", "it never ends"))
    }
}
