//! Volumes over objects: the object volume below a volume, or below its local store, on a fake object store.
//!
//! Puts and deletes happen when they end, or, where that is not known, perhaps. What the owner has asked for when it goes
//! happens or not. What the bucket holds is read alone ([`reader`]), and is a disk that the client could have seen.

use std::collections::BTreeMap;
use std::rc::Rc;

use fastrand::Rng;
use hdcs_core::objects::format::{Manifest, Snapshot};
use hdcs_core::objects::io::{
    Action as ObjectAction, Ask as ObjectAsk, Condition, Event as ObjectEvent, Name, Phase,
    SnapshotError, StoreError, Stored,
};
use hdcs_core::objects::{Access, Config, ObjectVolume};

use super::bucket_snapshots::{BucketSnapshots, Command};
use super::{
    BufMut, Completion, Content, Done, Happening, IoError, Nanos, Plant, Pool, SECTOR_BYTES,
    SectorRange, Token, Unit, Violation, World,
};
use crate::disk::joined;
use crate::objects::reader;
use crate::objects::store::Store;
use crate::scenario::{ObjectsScenario, Stream};

/// Where a volume is in its bucket.
const PLACE: &str = "bucket/volume/";
/// Sectors of one write of what a volume begins with.
const BASE_SECTORS: u64 = 256;
/// Steps that an opening without faults takes at most.
const STEPS_MAX: u32 = 1_000_000;

/// What is asked of the object store.
#[derive(Debug)]
enum Wanted {
    Put {
        name: String,
        bytes: Rc<Vec<u8>>,
        condition: Condition,
    },
    Delete(String),
    Get {
        name: String,
        offset: u64,
        buf: BufMut,
    },
    List {
        prefix: &'static str,
        after: String,
    },
}

/// What becomes of it.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Done,
    /// Nothing happens.
    Fails(IoError),
    /// It happens or not, and is said to have failed.
    Unknown,
    /// Nothing happens, and it is said to be done, as a planted bug has it.
    Swallowed,
}

/// An object volume, and the bucket it is in.
#[derive(Debug)]
pub(super) struct Objects {
    machine: ObjectVolume,
    bucket: Store,
    pub(super) snapshots: BucketSnapshots,
    scenario: ObjectsScenario,
    number: u32,
    random: Rng,
    asked: BTreeMap<u64, (Token, Wanted, Fate)>,
    next: u64,
    actions: Vec<ObjectAction>,
    /// Whether it has not been polled since something happened to it.
    is_due: bool,
}

impl Objects {
    /// A new object volume that holds `base`.
    pub(super) fn new(
        scenario: ObjectsScenario,
        unit: u64,
        number: u32,
        uuid: [u8; 16],
        base: &[Content],
        seed: u64,
    ) -> Self {
        let mut random = Rng::with_seed(Stream::ObjectVolumes.seed_of(seed, unit));
        let bytes = (base.len() * SECTOR_BYTES) as u64;
        let mut config = scenario.config(Access::Create { uuid }, random.u64(..));
        config.bytes = Some(bytes);
        let mut this = Self {
            machine: ObjectVolume::new(config),
            bucket: Store::default(),
            snapshots: BucketSnapshots::default(),
            scenario,
            number,
            random,
            asked: BTreeMap::new(),
            next: 0,
            actions: Vec::new(),
            is_due: false,
        };
        this.drive();
        this.fill(base);
        this
    }

    fn fill(&mut self, base: &[Content]) {
        let pool = Pool::new(1 << 20);
        let sectors = base.len() as u64;
        for start in (0..sectors).step_by(BASE_SECTORS as usize) {
            let range = SectorRange::between(start, sectors.min(start + BASE_SECTORS));
            let contents = &base[start as usize..range.end() as usize];
            if contents.iter().all(|&content| content == Content::Zero) {
                continue;
            }
            let mut buf = pool.alloc_for(range).expect("one at a time");
            for (content, (sector, bytes)) in
                (contents.iter()).zip((start..).zip(buf.chunks_mut(SECTOR_BYTES)))
            {
                content.fill(self.number, sector, bytes);
            }
            let (offset, data) = (range.byte_offset(), vec![buf.freeze()]);
            self.perform_at_once(ObjectAsk::Write { offset, data });
        }
        self.perform_at_once(ObjectAsk::Flush);
    }

    fn perform_at_once(&mut self, ask: ObjectAsk) {
        let token = Token(0);
        let event = ObjectEvent::Submit { token, ask };
        self.machine.step(Nanos(0), event, &mut self.actions);
        self.drive();
    }

    /// Go on until nothing is under way, while nothing goes wrong and no time passes.
    fn drive(&mut self) {
        for _ in 0..STEPS_MAX {
            self.machine.poll(Nanos(0), &mut self.actions);
            if self.actions.is_empty() {
                assert_eq!(self.machine.phase(), Phase::Open, "it opens");
                return;
            }
            for action in std::mem::take(&mut self.actions) {
                let Some((token, wanted)) = Self::wanted(action) else {
                    continue;
                };
                let result = self.take_effect(wanted);
                let event = ObjectEvent::Stored { token, result };
                self.machine.step(Nanos(0), event, &mut self.actions);
            }
        }
        unreachable!("it goes on for ever");
    }

    /// What an action asks of the object store; `None` if it is the end of a request.
    fn wanted(action: ObjectAction) -> Option<(Token, Wanted)> {
        let whole = |name: Name| format!("{PLACE}{name}");
        Some(match action {
            ObjectAction::Put {
                token,
                name,
                data,
                condition,
                ..
            } => {
                let (name, bytes) = (whole(name), Rc::new(joined(&data)));
                let put = Wanted::Put {
                    name,
                    bytes,
                    condition,
                };
                (token, put)
            }
            ObjectAction::Get {
                token,
                name,
                offset,
                buf,
                ..
            } => {
                let name = whole(name);
                (token, Wanted::Get { name, offset, buf })
            }
            ObjectAction::Delete { token, name } => (token, Wanted::Delete(whole(name))),
            ObjectAction::List {
                token,
                prefix,
                after,
                ..
            } => (token, Wanted::List { prefix, after }),
            ObjectAction::PutCompressed { .. } | ObjectAction::GetCompressed { .. } => {
                unreachable!("nobody asks for compression")
            }
            ObjectAction::End(_) | ObjectAction::SnapshotEnd { .. } => return None,
        })
    }

    fn take_effect(&mut self, wanted: Wanted) -> Result<Stored, StoreError> {
        match wanted {
            Wanted::Put {
                name,
                bytes,
                condition,
            } => {
                if condition == Condition::IfAbsent && self.bucket.get(&name).is_some() {
                    return Err(StoreError::Exists);
                }
                self.bucket.put(&name, bytes);
                Ok(Stored::Done)
            }
            Wanted::Delete(name) => {
                self.bucket.delete(&name);
                Ok(Stored::Done)
            }
            Wanted::Get {
                name,
                offset,
                mut buf,
            } => {
                let bytes = self.bucket.get(&name).ok_or(StoreError::NotFound)?;
                let range = offset as usize..offset as usize + buf.len();
                buf.copy_from_slice(bytes.get(range).ok_or(StoreError::Short)?);
                Ok(Stored::Read(buf))
            }
            Wanted::List { prefix, after } => {
                let (objects, more) = self.bucket.list(PLACE, prefix, &after);
                Ok(Stored::Listed { objects, more })
            }
        }
    }

    /// When it wants to be polled; what it does in turns takes a little time.
    pub(super) fn next_wakeup(&self, now: Nanos) -> Option<Nanos> {
        let due = self.machine.next_wakeup();
        let due = due.or(self.is_due.then_some(now));
        due.map(|due| due.max(now.plus(Nanos::from_micros(1))))
    }

    /// It is polled.
    pub(super) fn poll(&mut self, now: Nanos) {
        self.is_due = false;
        self.machine.poll(now, &mut self.actions);
    }

    /// The store is not reached: what is under way there happens or not.
    pub(super) fn cut(&mut self) {
        for (.., fate) in self.asked.values_mut() {
            *fate = Fate::Unknown;
        }
    }

    /// Its owner goes, and another one opens it.
    pub(super) fn reopen(&mut self) -> Result<(), Violation> {
        self.actions.clear();
        for (_, wanted, _) in std::mem::take(&mut self.asked).into_values() {
            if self.random.bool() {
                let _ = self.take_effect(wanted);
            }
        }
        let config = (self.scenario).config(Access::Existing, self.random.u64(..));
        self.machine = ObjectVolume::new(config);
        self.drive();
        let mut snapshots = std::mem::take(&mut self.snapshots);
        let checked = snapshots.reopened(self);
        self.snapshots = snapshots;
        checked
    }

    /// Another owner opens it, too: this one finds out some time.
    pub(super) fn take_over(&mut self) {
        let config = (self.scenario).config(Access::Existing, self.random.u64(..));
        let before = std::mem::replace(&mut self.machine, ObjectVolume::new(config));
        self.drive();
        self.machine = before;
    }

    fn newest(&self) -> Result<Manifest, Violation> {
        let manifest = reader::newest(&self.bucket, PLACE).map_err(dangling)?;
        manifest.ok_or_else(|| dangling("there is no manifest".into()))
    }

    fn read(&self, manifest: Manifest) -> Result<Vec<Content>, String> {
        let state = reader::read(&self.bucket, PLACE, manifest)?;
        reader::contents(&self.bucket, PLACE, &state, self.number)
    }

    /// What the bucket holds.
    pub(super) fn contents(&self) -> Result<Vec<Content>, Violation> {
        self.read(self.newest()?).map_err(dangling)
    }

    /// The snapshots that the bucket names.
    pub(super) fn snapshots(&self) -> Result<Vec<Snapshot>, Violation> {
        Ok(self.newest()?.snapshots)
    }

    /// What a snapshot holds.
    pub(super) fn contents_of(&self, snapshot: &Snapshot) -> Result<Vec<Content>, Violation> {
        let manifest = reader::kept(&self.bucket, PLACE, snapshot);
        let contents = manifest.and_then(|manifest| self.read(manifest));
        contents.map_err(|error| Violation::new("snapshot-dangling", error))
    }

    /// A planted bug removes data that only snapshots need.
    pub(super) fn sweep(&mut self) -> Result<(), Violation> {
        let mut newest = self.newest()?;
        let Ok(with_snapshots) = reader::needed(&self.bucket, PLACE) else {
            // It has done so before.
            return Ok(());
        };
        newest.snapshots.clear();
        let without = reader::read(&self.bucket, PLACE, newest).map_err(dangling)?;
        let only = with_snapshots.difference(&without.needs);
        for name in only.filter(|name| name.contains("/data/")) {
            self.bucket.delete(name);
        }
        Ok(())
    }

    /// What was asked about snapshots is done.
    pub(super) fn snapshot_ended(
        &mut self,
        command: Command,
    ) -> Result<Option<Vec<Content>>, Violation> {
        let mut snapshots = std::mem::take(&mut self.snapshots);
        let held = snapshots.ended(command, self);
        self.snapshots = snapshots;
        held
    }
}

fn dangling(error: String) -> Violation {
    Violation::new("manifest-dangling", error)
}

impl ObjectsScenario {
    fn config(self, access: Access, nonce: u64) -> Config {
        Config {
            page_blocks: self.page_blocks,
            batch_blocks: self.batch_blocks,
            map_cache_bytes: self.map_cache_bytes,
            puts_in_flight_max: self.puts,
            gets_in_flight_max: self.gets,
            write_memory_bytes: 1 << 20,
            read_memory_bytes: 2 << 20,
            ..Config::new(access, nonce)
        }
    }
}

impl Unit {
    fn object_volume(&mut self) -> &mut Objects {
        self.objects.as_mut().expect("it lies over objects")
    }
}

impl World {
    pub(super) fn submit_to_objects(
        &mut self,
        unit: usize,
        token: Token,
        ask: ObjectAsk,
    ) -> Result<(), Violation> {
        let now = self.engine.now();
        let objects = self.units[unit].object_volume();
        let event = ObjectEvent::Submit { token, ask };
        objects.is_due = true;
        objects.machine.step(now, event, &mut objects.actions);
        self.go_on_with_objects(unit)
    }

    pub(super) fn go_on_with_objects(&mut self, unit: usize) -> Result<(), Violation> {
        for action in std::mem::take(&mut self.units[unit].object_volume().actions) {
            if let ObjectAction::End(Completion { token, result }) = action {
                self.ended_by_objects(unit, token, result)?;
            } else if let ObjectAction::SnapshotEnd { token, result } = action {
                let result = match result {
                    Ok(()) => Ok(Done::Written),
                    Err(SnapshotError::Io(error)) => Err(error),
                    Err(error) => {
                        return Err(Violation::new("snapshot-refused", error.to_string()));
                    }
                };
                self.ended_by_objects(unit, token, result)?;
            } else if let Some((token, wanted)) = Objects::wanted(action) {
                self.begin_for_objects(unit, token, wanted);
            }
        }
        let is_taken_over = self.units[unit].fence.is_up();
        match self.units[unit].object_volume().machine.phase() {
            Phase::Open => Ok(()),
            Phase::Fenced if is_taken_over => Ok(()),
            phase => Err(Violation::new(
                "objects-lost",
                format!("the object volume of volume {unit} is {phase:?}"),
            )),
        }
    }

    fn begin_for_objects(&mut self, unit: usize, token: Token, wanted: Wanted) {
        let quiet = self.calm_since.is_some();
        let one_in = self.scenario.faults.backend_one_in;
        let state = &mut self.units[unit];
        let objects = state.objects.as_mut().expect("it lies over objects");
        let random = &mut objects.random;
        let is_put = matches!(wanted, Wanted::Put { .. });
        let down = state.backend_down;
        let down = down.filter(|&error| error != IoError::NoSpace || is_put);
        let failed = one_in > 0 && !quiet && random.u32(..one_in) == 0;
        let is_kept = matches!(&wanted, Wanted::Put { name, .. } if name.contains("/snapshot/"));
        let is_swallowed = is_kept && self.planted.strikes(Plant::SwallowedSnapshot);
        let fate = match down {
            _ if is_swallowed => Fate::Swallowed,
            Some(error) => Fate::Fails(error),
            None if failed && random.bool() => Fate::Unknown,
            None if failed => Fate::Fails(IoError::Unreachable),
            None => Fate::Done,
        };
        if !matches!(fate, Fate::Done | Fate::Swallowed) {
            state.backend_trouble = Some(self.engine.now());
        }
        let latency = state.backend_latency.draw(random);
        objects.next += 1;
        let number = objects.next;
        objects.asked.insert(number, (token, wanted, fate));
        let at = self.engine.now().plus(latency);
        self.engine.at(at, Happening::OfObjects(unit, number));
    }

    /// Something that an object volume has asked for is done.
    pub(super) fn done_for_objects(&mut self, unit: usize, number: u64) -> Result<(), Violation> {
        let (now, state) = (self.engine.now(), &mut self.units[unit]);
        let silent = state.backend_silent;
        let objects = state.objects.as_mut().expect("it lies over objects");
        let Some((token, wanted, fate)) = objects.asked.remove(&number) else {
            return Ok(());
        };
        if silent > now {
            objects.asked.insert(number, (token, wanted, fate));
            let at = silent.plus(Nanos(objects.random.u64(..1_000_000)));
            self.engine.at(at, Happening::OfObjects(unit, number));
            return Ok(());
        }
        let result = match fate {
            Fate::Done => objects.take_effect(wanted),
            Fate::Fails(error) => Err(StoreError::Io(error)),
            Fate::Swallowed => Ok(Stored::Done),
            Fate::Unknown => {
                let is_read = matches!(wanted, Wanted::Get { .. } | Wanted::List { .. });
                if !is_read && objects.random.bool() {
                    let _ = objects.take_effect(wanted);
                }
                Err(StoreError::Io(IoError::Unreachable))
            }
        };
        let event = ObjectEvent::Stored { token, result };
        objects.is_due = true;
        objects.machine.step(now, event, &mut objects.actions);
        self.go_on_with_objects(unit)
    }
}
