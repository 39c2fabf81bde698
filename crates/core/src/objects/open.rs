//! Opening: the newest manifest, taking over, what is known of the map, the tail.
//!
//! ```text
//!  Listing ─► Reading ─checked─► TakingOver ─created─► Confirming ─► Loading ─indexes, usages, tail─► Open
//!    ▲  │none                        │ another one is there │ a later one is
//!    │  └─► Looking ─empty─► TakingOver (a new volume)      │
//!    └───────────────────────────────┴──────────────────────┘
//!  a clone:     Looking ─empty─► Listing, Reading, CopyReading of the parent ─► Referring
//!               ─► Listing, Reading of the parent once more ─► TakingOver
//!  a snapshot:  Reading ─► CopyReading ─► Loading
//!  given up:    Reading ─► Releasing ─► Failed
//! ```
//!
//! A manifest that was created is not the newest for certain: between the listing and now the owner
//! may have created it and the next ones, and removed it. The newest is never removed, so another
//! listing tells.
//!
//! Taking over comes before loading: from then on whoever was the owner before can commit nothing,
//! and so removes nothing that the manifest needs.
//!
//! Of the map only the indexes of its objects are read, which say where its pages are.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::data::Object;
use super::format::{
    Ancestor, Manifest, MapEntry, Reference, Snapshot, TailEntry, pages, parse_index, parse_table,
    parse_usage, table_bytes,
};
use super::io::{
    Action, Condition, KEY_PREFIX, Kind, Listed, Name, OpenError, Phase, SnapshotName, StoreError,
    Stored,
};
use super::map::directory::Entry;
use super::port::Purpose;
use super::snapshots::clone_number;
use super::{Access, ObjectVolume};
use crate::base::buf::{Buf, BufMut};
use crate::base::error::{FormatError, IoError};
use crate::base::limits::{
    BLOCK_BYTES, OBJECT_ANCESTORS_MAX, OBJECT_LOCATION_BYTES_MAX, OBJECT_MANIFEST_BYTES_MAX,
    OBJECT_NUMBER_MAX, OBJECT_NUMBERS_AHEAD, OBJECT_PAGES_MAX, OBJECT_VOLUME_BYTES_MAX,
    SECTOR_BYTES,
};

/// Times that somebody else may be first.
const CONTENTIONS_MAX: u32 = 16;
/// Failures in a row after which opening is given up; the driver tried each several times.
const FAILURES_MAX: u32 = 5;
/// Tables of the tail that are fetched ahead.
const TABLES_AHEAD_MAX: usize = 8;
/// Blocks of the largest volume: one may have been larger when an object was put.
const BLOCKS_MAX: u64 = OBJECT_VOLUME_BYTES_MAX / BLOCK_BYTES as u64;

/// An opening under way.
#[derive(Debug)]
pub(super) struct Opening {
    /// Where the volume is that this is to be a clone of.
    pub(super) parent: String,
    /// Where it is itself to be.
    pub(super) own: String,
    stage: Stage,
    /// Whether what the stage asks for was asked for.
    asked: bool,
    contentions: u32,
    failures: u32,
    clone: Option<Cloning>,
    /// The numbers of the volume that was here before and is given up.
    before: Before,
}

/// What a new volume goes on with at the place of one that was given up.
#[derive(Clone, Debug, Default)]
struct Before {
    volume: [u8; 16],
    sequence: u64,
    epoch: u64,
    beginnings: Vec<u64>,
    number_limit: u64,
}

impl Before {
    fn of(gone: Manifest) -> Self {
        Self {
            volume: gone.volume,
            sequence: gone.sequence,
            epoch: gone.epoch,
            beginnings: gone.beginnings,
            number_limit: gone.number_limit,
        }
    }

    /// Have a manifest go on with these numbers.
    fn number(&self, manifest: &mut Manifest) {
        manifest.sequence = self.sequence;
        manifest.epoch = self.epoch;
        manifest.beginnings.clone_from(&self.beginnings);
        manifest.number_limit = manifest.number_limit.max(self.number_limit);
    }
}

/// What is known of a snapshot that is being cloned.
#[derive(Clone, Debug)]
struct Cloning {
    parent: [u8; 16],
    snapshot: Snapshot,
    /// What the clone begins with.
    manifest: Manifest,
}

#[derive(Debug)]
enum Stage {
    /// Looking for the newest manifest of this volume (0) or of the parent (1).
    Listing {
        volume: u16,
        after: String,
        newest: Option<(u64, u64)>,
    },
    /// There is none: looking whether there is anything.
    Looking,
    /// Reading it.
    Reading {
        name: Name,
        bytes: usize,
    },
    /// Reading the copy that a snapshot is.
    CopyReading {
        volume: u16,
        parent: [u8; 16],
        snapshot: Snapshot,
    },
    /// Telling the parent.
    Referring,
    /// It was given up: telling the parent, if whoever did that did not come so far.
    Releasing,
    /// Creating the manifest that begins this epoch, or reading whose it is.
    TakingOver {
        manifest: Manifest,
        data: Option<Buf>,
        checking: bool,
    },
    /// Looking whether there is a later one.
    Confirming {
        manifest: Manifest,
    },
    Loading(Loading),
    Done,
}

/// Which part of opening was asked of the store.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// What the stage asks for.
    Stage,
    /// The index of an object of the map, by its place in the manifest.
    Index(usize),
    /// A usage table, by its place in the manifest.
    Usage(usize),
    /// Runs of an object of the tail, by its index.
    Table(usize),
}

/// Map and tail.
#[derive(Debug, Default)]
struct Loading {
    /// Slots of the objects of the map, in the order of the manifest.
    slots: Vec<u32>,
    /// Places of indexes and usage tables that are to be asked for, and how many did not come yet.
    indexes: VecDeque<usize>,
    indexes_left: usize,
    usages: VecDeque<usize>,
    usages_left: usize,
    tail: Vec<TailEntry>,
    /// Indexes of tables that are to be asked for, ascending.
    tables: VecDeque<usize>,
    /// Tables that came before their turn.
    early: BTreeMap<usize, BufMut>,
    applied: usize,
}

impl Default for Opening {
    fn default() -> Self {
        Self {
            parent: String::new(),
            own: String::new(),
            stage: listing(0),
            asked: false,
            contentions: 0,
            failures: 0,
            clone: None,
            before: Before::default(),
        }
    }
}

const fn listing(volume: u16) -> Stage {
    Stage::Listing {
        volume,
        after: String::new(),
        newest: None,
    }
}

impl ObjectVolume {
    pub(super) fn pump_open(&mut self, actions: &mut Vec<Action>) {
        if !self.port.may_try() {
            return;
        }
        if let Stage::Loading(_) = self.opening.stage {
            return self.load(actions);
        }
        if self.opening.asked {
            return;
        }
        let Some(action) = self.ask() else {
            return;
        };
        self.opening.asked = true;
        actions.push(action);
    }

    /// What the stage asks for; `None` if there is no memory for it at present.
    fn ask(&mut self) -> Option<Action> {
        let list = |this: &mut Self, volume, prefix, after: String| {
            this.port.stats.lists += 1;
            Action::List {
                token: this.port.issue(Purpose::Open(Part::Stage)),
                volume,
                prefix,
                after,
            }
        };
        Some(match &self.opening.stage {
            Stage::Listing { volume, after, .. } => {
                let (volume, after) = (*volume, after.clone());
                list(self, volume, Kind::Manifest.prefix(), after)
            }
            Stage::Looking => list(self, 0, "", String::new()),
            Stage::Reading { name, bytes } => {
                let (name, bytes) = (*name, *bytes);
                self.get(name, 0, bytes, Part::Stage)?
            }
            Stage::CopyReading {
                volume, snapshot, ..
            } => {
                let name = Name {
                    volume: *volume,
                    kind: Kind::Snapshot,
                    number: snapshot.number,
                };
                let bytes = snapshot.bytes as usize;
                self.get(name, 0, bytes, Part::Stage)?
            }
            Stage::Referring => self.put_reference()?,
            Stage::Releasing => {
                let name = self.manifest.reference_name()?;
                self.port.stats.deletes += 1;
                let token = self.port.issue(Purpose::Open(Part::Stage));
                Action::Delete { token, name }
            }
            Stage::TakingOver {
                manifest,
                checking: true,
                ..
            } => {
                let name = Name::own(Kind::Manifest, manifest.sequence);
                let bytes = manifest.encoded_bytes();
                self.get(name, 0, bytes, Part::Stage)?
            }
            Stage::TakingOver { manifest, .. } => {
                let name = Name::own(Kind::Manifest, manifest.sequence);
                let bytes = self.port.encode(manifest)?;
                if let Stage::TakingOver { data, .. } = &mut self.opening.stage {
                    *data = Some(bytes.clone());
                }
                self.port.stats.puts_manifest += 1;
                Action::Put {
                    token: self.port.issue(Purpose::Open(Part::Stage)),
                    name,
                    data: vec![bytes],
                    slot_bytes: 0,
                    condition: Condition::IfAbsent,
                }
            }
            Stage::Confirming { manifest } => {
                let name = Name::own(Kind::Manifest, manifest.sequence);
                list(self, 0, Kind::Manifest.prefix(), alloc::format!("{name}"))
            }
            Stage::Loading(_) | Stage::Done => return None,
        })
    }

    fn get(&mut self, name: Name, offset: u64, bytes: usize, part: Part) -> Option<Action> {
        let buf = self.store.gets.pool().alloc(bytes)?;
        self.port.stats.gets += 1;
        Some(Action::Get {
            token: self.port.issue(Purpose::Open(part)),
            name,
            offset,
            slots: false,
            buf,
        })
    }

    fn put_reference(&mut self) -> Option<Action> {
        let Access::Clone { uuid, .. } = self.config.access else {
            return None;
        };
        let cloning = self.opening.clone.as_ref()?;
        let reference = Reference {
            clone: uuid,
            pin: cloning.snapshot.pin,
            location: self.opening.own.clone(),
        };
        let parent = cloning.parent;
        let mut buf = self.port.control_pool.alloc(reference.encoded_bytes())?;
        reference.write(parent, &mut buf);
        self.port.stats.puts_other += 1;
        Some(Action::Put {
            token: self.port.issue(Purpose::Open(Part::Stage)),
            name: Name {
                volume: 1,
                kind: Kind::Clone,
                number: clone_number(&uuid),
            },
            data: vec![buf.freeze()],
            slot_bytes: 0,
            condition: Condition::Always,
        })
    }

    pub(super) fn opened(
        &mut self,
        part: Part,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let outcome = match part {
            Part::Stage => {
                self.opening.asked = false;
                self.stage_ended(result)
            }
            Part::Index(index) => self.index_ended(index, result),
            Part::Usage(index) => self.usage_ended(index, result),
            Part::Table(index) => self.table_ended(index, result),
        };
        match outcome {
            Ok(()) => {
                self.opening.failures = 0;
                self.port.again = true;
            }
            Err(OpenError::Io(error)) if self.opening.failures < FAILURES_MAX => {
                let _ = error;
                self.opening.failures += 1;
                self.port.back_off();
            }
            Err(error) => self.fail_open(error, actions),
        }
    }

    fn fail_open(&mut self, error: OpenError, actions: &mut Vec<Action>) {
        self.phase = Phase::Failed(error);
        self.opening.stage = Stage::Done;
        let io = match error {
            OpenError::Io(error) => error,
            _ => IoError::Failed,
        };
        self.end_all(io, actions);
    }

    fn stage_ended(&mut self, result: Result<Stored, StoreError>) -> Result<(), OpenError> {
        if let Err(StoreError::Io(error)) = result {
            if let Stage::TakingOver { checking, .. } = &mut self.opening.stage {
                // It may be there: the put finds out, and is compared.
                *checking = false;
            }
            return Err(OpenError::Io(error));
        }
        let stage = core::mem::replace(&mut self.opening.stage, Stage::Done);
        self.opening.stage = match (stage, result) {
            (
                Stage::Listing {
                    volume,
                    after: _,
                    newest,
                },
                Ok(Stored::Listed { objects, more }),
            ) => {
                let manifests = objects.iter().filter_map(|object| {
                    let name = Name::parse(&object.name)?;
                    (name.kind == Kind::Manifest).then_some((name.number, object.bytes))
                });
                let newest = manifests.max().max(newest);
                match objects.last() {
                    Some(last) if more => Stage::Listing {
                        volume,
                        after: last.name.clone(),
                        newest,
                    },
                    _ => Self::listed(volume, newest)?,
                }
            }
            (Stage::Looking, Ok(Stored::Listed { objects, .. })) => {
                let foreign = |object: &Listed| !object.name.starts_with(KEY_PREFIX);
                if objects.iter().any(foreign) {
                    return Err(OpenError::Foreign);
                }
                self.nothing_there()?
            }
            (Stage::Reading { name, .. }, Ok(Stored::Read(buf))) => {
                self.read_manifest(name, &buf)?
            }
            // Its owner has gone on since it was listed.
            (Stage::Reading { name, .. }, Err(StoreError::NotFound)) => {
                self.contend(name.volume)?
            }
            (
                Stage::CopyReading {
                    volume,
                    parent,
                    snapshot,
                },
                Ok(Stored::Read(buf)),
            ) => self.read_copy(volume, parent, snapshot, &buf)?,
            (Stage::Referring, Ok(_)) => listing(1),
            (Stage::Releasing, Ok(_)) => return Err(OpenError::Gone),
            (
                Stage::TakingOver {
                    manifest,
                    checking: false,
                    ..
                },
                Ok(_),
            ) => Stage::Confirming { manifest },
            (
                Stage::TakingOver {
                    manifest,
                    data,
                    checking: false,
                },
                Err(StoreError::Exists),
            ) => Stage::TakingOver {
                manifest,
                data,
                checking: true,
            },
            (
                Stage::TakingOver {
                    manifest,
                    data: Some(data),
                    checking: true,
                },
                Ok(Stored::Read(buf)),
            ) if buf[..] == data[..] => Stage::Confirming { manifest },
            (Stage::Confirming { manifest }, Ok(Stored::Listed { objects, .. })) => {
                let later =
                    |name: Name| name.kind == Kind::Manifest && name.number > manifest.sequence;
                let mut names = objects.iter().filter_map(|o| Name::parse(&o.name));
                if names.any(later) {
                    self.contend(0)?
                } else {
                    self.taken_over(manifest)
                }
            }
            (Stage::TakingOver { .. }, _) => self.contend(0)?,
            (Stage::Reading { name, .. }, _) => return Err(damaged(name, short())),
            (
                Stage::CopyReading {
                    volume, snapshot, ..
                },
                error,
            ) => {
                let name = Name {
                    volume,
                    kind: Kind::Snapshot,
                    number: snapshot.number,
                };
                return Err(match error {
                    Err(StoreError::NotFound) => OpenError::Missing { name },
                    _ => damaged(name, short()),
                });
            }
            _ => return Err(OpenError::Io(IoError::Failed)),
        };
        Ok(())
    }

    /// Somebody else was faster: begin again.
    fn contend(&mut self, volume: u16) -> Result<Stage, OpenError> {
        self.opening.contentions += 1;
        if self.opening.contentions > CONTENTIONS_MAX {
            return Err(OpenError::Contended);
        }
        Ok(listing(volume))
    }

    fn listed(volume: u16, newest: Option<(u64, u64)>) -> Result<Stage, OpenError> {
        let Some((number, bytes)) = newest else {
            return if volume == 0 {
                Ok(Stage::Looking)
            } else {
                Err(OpenError::Absent)
            };
        };
        let name = Name {
            volume,
            kind: Kind::Manifest,
            number,
        };
        if bytes == 0 || bytes > OBJECT_MANIFEST_BYTES_MAX as u64 {
            return Err(damaged(name, short()));
        }
        Ok(Stage::Reading {
            name,
            bytes: bytes as usize,
        })
    }

    /// There is nothing at the place, or nothing but what says that a volume was given up. A new one goes on with the numbers
    /// of that one: it uses none of its names, which whoever removes it may not be done with, and whoever still has
    /// that one open meets a manifest and is fenced.
    fn nothing_there(&mut self) -> Result<Stage, OpenError> {
        match self.config.access {
            Access::Existing | Access::Snapshot(_) => Err(OpenError::Absent),
            Access::Create { uuid } => {
                let bytes = self.config.bytes.unwrap_or(0);
                if bytes == 0
                    || !bytes.is_multiple_of(SECTOR_BYTES as u64)
                    || bytes > OBJECT_VOLUME_BYTES_MAX
                    || pages(bytes, self.config.page_blocks) > OBJECT_PAGES_MAX
                {
                    return Err(OpenError::Size { bytes });
                }
                let mut manifest = Manifest {
                    volume: uuid,
                    number_limit: 1,
                    bytes,
                    page_blocks: self.config.page_blocks,
                    ..Manifest::default()
                };
                self.opening.before.number(&mut manifest);
                self.take_over(&manifest)
            }
            Access::Clone { .. } => {
                if let Some(cloning) = self.opening.clone.clone() {
                    return self.take_over(&cloning.manifest);
                }
                let places = [&self.opening.parent, &self.opening.own];
                if places
                    .iter()
                    .any(|place| place.is_empty() || place.len() > OBJECT_LOCATION_BYTES_MAX)
                {
                    return Err(OpenError::Absent);
                }
                // The driver asks where volume 1 is.
                self.manifest.ancestors = vec![Ancestor {
                    volume: [0; 16],
                    below: 0,
                    location: self.opening.parent.clone(),
                }];
                Ok(listing(1))
            }
        }
    }

    fn read_manifest(&mut self, name: Name, bytes: &[u8]) -> Result<Stage, OpenError> {
        let manifest = parse(name, bytes)?;
        if manifest.sequence != name.number {
            return Err(damaged(name, FormatError::Identity));
        }
        if name.volume != 0 {
            return self.read_parent(&manifest);
        }
        let is_new = matches!(
            self.config.access,
            Access::Create { .. } | Access::Clone { .. }
        );
        // Since this clone was begun the same volume may have said again that it is given up. Whatever else came there
        // has said that this clone never is to be.
        let is_same = self.opening.before.volume == manifest.volume;
        let goes_on = self.opening.clone.is_none() || is_same;
        if manifest.gone && is_new && goes_on && manifest.ancestors.is_empty() {
            self.opening.before = Before::of(manifest);
            if let Some(cloning) = &mut self.opening.clone {
                self.opening.before.number(&mut cloning.manifest);
            }
            return self.nothing_there();
        }
        if let Some(uuid) = self.config.uuid
            && uuid != manifest.volume
        {
            return Err(OpenError::OtherVolume);
        }
        if manifest.gone {
            self.manifest = manifest;
            return match self.manifest.reference_name() {
                Some(_) => Ok(Stage::Releasing),
                None => Err(OpenError::Gone),
            };
        }
        // Another volume came there: it is not fenced for that.
        if let Access::Clone { uuid, .. } = self.config.access
            && uuid != manifest.volume
        {
            return Err(OpenError::OtherVolume);
        }
        if let Access::Snapshot(wanted) = self.config.access {
            let snapshot = find_snapshot(&manifest, wanted)?;
            return Ok(Stage::CopyReading {
                volume: 0,
                parent: manifest.volume,
                snapshot,
            });
        }
        if let Some(needs) = self.config.bytes
            && needs != manifest.bytes
        {
            let has = manifest.bytes;
            return Err(OpenError::OtherSize { has, needs });
        }
        self.take_over(&manifest)
    }

    /// The newest manifest of the volume that is to be cloned.
    fn read_parent(&mut self, parent: &Manifest) -> Result<Stage, OpenError> {
        let Access::Clone { snapshot, .. } = self.config.access else {
            return Err(OpenError::Absent);
        };
        // Another volume may have a snapshot of that name.
        if self.config.parent.is_some_and(|uuid| uuid != parent.volume) {
            return Err(OpenError::NoSnapshot);
        }
        let found = find_snapshot(parent, snapshot)?;
        if let Some(cloning) = &self.opening.clone {
            // The second look, after the reference: is it still the same?
            if cloning.snapshot != found || cloning.parent != parent.volume {
                return Err(OpenError::NoSnapshot);
            }
            return self.take_over(&cloning.manifest.clone());
        }
        Ok(Stage::CopyReading {
            volume: 1,
            parent: parent.volume,
            snapshot: found,
        })
    }

    fn read_copy(
        &mut self,
        volume: u16,
        parent: [u8; 16],
        snapshot: Snapshot,
        bytes: &[u8],
    ) -> Result<Stage, OpenError> {
        let name = Name {
            volume,
            kind: Kind::Snapshot,
            number: snapshot.number,
        };
        let mut manifest = parse(name, bytes)?;
        if manifest.volume != parent {
            return Err(damaged(name, FormatError::Identity));
        }
        if let Some(needs) = self.config.bytes
            && needs != manifest.bytes
        {
            let has = manifest.bytes;
            return Err(OpenError::OtherSize { has, needs });
        }
        let Access::Clone { uuid, .. } = self.config.access else {
            return Ok(self.taken_over(manifest));
        };
        if manifest.ancestors.len() >= OBJECT_ANCESTORS_MAX {
            return Err(OpenError::TooManyGenerations);
        }
        manifest.ancestors.push(Ancestor {
            volume: parent,
            below: manifest.number_limit,
            location: self.opening.parent.clone(),
        });
        manifest.volume = uuid;
        self.opening.before.number(&mut manifest);
        manifest.snapshots.clear();
        manifest.own_map = false;
        self.opening.clone = Some(Cloning {
            parent,
            snapshot,
            manifest,
        });
        Ok(Stage::Referring)
    }

    /// The manifest that begins this epoch: the state of `before`.
    fn take_over(&mut self, before: &Manifest) -> Result<Stage, OpenError> {
        let sequence = before.sequence + 1;
        let beginnings = before.next_beginnings();
        let number_limit = before.number_limit + OBJECT_NUMBERS_AHEAD;
        if number_limit > OBJECT_NUMBER_MAX {
            let name = Name::own(Kind::Manifest, before.sequence);
            return Err(damaged(name, FormatError::Field("number_limit")));
        }
        let manifest = Manifest {
            begins: true,
            nonce: self.config.nonce,
            sequence,
            epoch: before.epoch + 1,
            number_first: before.number_limit,
            number_limit,
            beginnings,
            ..before.clone()
        };
        Ok(Stage::TakingOver {
            manifest,
            data: None,
            checking: false,
        })
    }

    /// The volume is ours: load what it names.
    fn taken_over(&mut self, manifest: Manifest) -> Stage {
        self.store.map.set_page_blocks(manifest.page_blocks);
        let maps = manifest.maps.iter();
        let slots = maps
            .map(|&map| self.store.inventory.maps.insert(map))
            .collect();
        let usages = manifest.usages.iter().map(|usage| usage.number);
        usages.for_each(|usage| self.store.inventory.insert_usage(usage));
        let loading = Loading {
            slots,
            indexes: (0..manifest.maps.len()).collect(),
            indexes_left: manifest.maps.len(),
            usages: (0..manifest.usages.len()).collect(),
            usages_left: manifest.usages.len(),
            tail: manifest.tail.clone(),
            tables: (0..manifest.tail.len()).collect(),
            ..Loading::default()
        };
        self.commits.taken_over(&manifest);
        self.manifest = manifest;
        Stage::Loading(loading)
    }

    fn load(&mut self, actions: &mut Vec<Action>) {
        loop {
            if self.port.under_way().len() >= self.config.gets_in_flight_max {
                break;
            }
            let Stage::Loading(loading) = &mut self.opening.stage else {
                return;
            };
            let parts_left = loading.indexes_left + loading.usages_left;
            if parts_left == 0 && loading.applied == loading.tail.len() {
                self.finish_open(actions);
                return;
            }
            let action = if let Some(&index) = loading.indexes.front() {
                let map = self.manifest.maps[index];
                let bytes = u64::from(map.bytes) - map.index_offset();
                let offset = map.index_offset();
                self.get_of_map(map, offset, bytes as usize, Part::Index(index))
            } else if let Some(&index) = loading.usages.front() {
                let usage = self.manifest.usages[index];
                self.get_of_map(usage, 0, usage.bytes as usize, Part::Usage(index))
            } else if parts_left == 0
                && let Some(&index) = loading.tables.front()
                && index < loading.applied + TABLES_AHEAD_MAX
            {
                let entry = loading.tail[index];
                let name = self.manifest.name(Kind::Data, entry.number);
                let bytes = table_bytes(entry.runs as usize);
                self.get(name, entry.table_offset(), bytes, Part::Table(index))
            } else {
                None
            };
            let Some(action) = action else {
                break;
            };
            if let Stage::Loading(loading) = &mut self.opening.stage {
                let _ = loading
                    .indexes
                    .pop_front()
                    .or_else(|| loading.usages.pop_front())
                    .or_else(|| loading.tables.pop_front());
            }
            actions.push(action);
        }
    }

    fn get_of_map(
        &mut self,
        map: MapEntry,
        offset: u64,
        bytes: usize,
        part: Part,
    ) -> Option<Action> {
        let name = self.manifest.name(Kind::Map, map.number);
        self.get(name, offset, bytes, part)
    }

    /// Where the pages of an object of the map are.
    fn index_ended(
        &mut self,
        index: usize,
        result: Result<Stored, StoreError>,
    ) -> Result<(), OpenError> {
        let map = self.manifest.maps[index];
        let name = self.manifest.name(Kind::Map, map.number);
        let Stage::Loading(loading) = &mut self.opening.stage else {
            return Ok(());
        };
        let buf = match result {
            Ok(Stored::Read(buf)) => buf,
            other => {
                loading.indexes.push_front(index);
                return Err(missing(name, other));
            }
        };
        loading.indexes_left -= 1;
        let slot = loading.slots[index];
        let pages = BLOCKS_MAX / self.store.map.page_blocks();
        let writer = self.manifest.writer(map.number);
        let entries = parse_index(&writer, map.number, map.bytes, pages, &buf)
            .map_err(|reason| damaged(name, reason))?;
        if entries.len() != map.entries as usize {
            return Err(damaged(name, FormatError::Field("pages")));
        }
        for page in entries {
            let entry = Entry::new(slot, page.offset as usize, page.bytes as usize);
            let entry = entry.with(page.is_full, page.is_inherited);
            let store = &mut self.store;
            (store.inventory.maps).point_if_newer(&mut store.map.directory, page.page, entry);
        }
        if self.store.map.directory.len() > OBJECT_PAGES_MAX {
            return Err(damaged(name, FormatError::Field("pages")));
        }
        Ok(())
    }

    /// How much of which data objects the map needs.
    fn usage_ended(
        &mut self,
        index: usize,
        result: Result<Stored, StoreError>,
    ) -> Result<(), OpenError> {
        let usage = self.manifest.usages[index];
        let name = self.manifest.name(Kind::Map, usage.number);
        let Stage::Loading(loading) = &mut self.opening.stage else {
            return Ok(());
        };
        let buf = match result {
            Ok(Stored::Read(buf)) => buf,
            other => {
                loading.usages.push_front(index);
                return Err(missing(name, other));
            }
        };
        loading.usages_left -= 1;
        let writer = self.manifest.writer(usage.number);
        let entries =
            parse_usage(&writer, usage.number, &buf).map_err(|reason| damaged(name, reason))?;
        for entry in entries {
            self.store.inventory.data.load(&entry);
        }
        Ok(())
    }

    fn table_ended(
        &mut self,
        index: usize,
        result: Result<Stored, StoreError>,
    ) -> Result<(), OpenError> {
        let Stage::Loading(loading) = &mut self.opening.stage else {
            return Ok(());
        };
        match result {
            Ok(Stored::Read(buf)) => {
                loading.early.insert(index, buf);
            }
            other => {
                let number = loading.tail[index].number;
                loading.tables.push_back(index);
                loading.tables.make_contiguous().sort_unstable();
                return Err(missing(self.manifest.name(Kind::Data, number), other));
            }
        }
        while let Stage::Loading(loading) = &mut self.opening.stage
            && let Some(buf) = loading.early.remove(&loading.applied)
        {
            let entry = loading.tail[loading.applied];
            loading.applied += 1;
            self.replay(entry, &buf)?;
        }
        Ok(())
    }

    /// Apply one object of the tail to the map.
    fn replay(&mut self, entry: TailEntry, bytes: &[u8]) -> Result<(), OpenError> {
        let name = self.manifest.name(Kind::Data, entry.number);
        let writer = self.manifest.writer(entry.number);
        let parsed = parse_table(&writer, entry.number, BLOCKS_MAX, bytes);
        let (footer, runs) = parsed.map_err(|reason| damaged(name, reason))?;
        if footer.slots.get() != entry.slots {
            return Err(damaged(name, FormatError::Field("slots")));
        }
        if footer.is_compressed() != (entry.compressed_bytes > 0) {
            return Err(damaged(name, FormatError::Field("compressed")));
        }
        for run in runs {
            let (block, count) = (run.block.get(), run.count.get());
            self.apply(entry.origin(), block, count, run.slot.get());
        }
        Ok(())
    }

    /// Everything is there: count what lives where, and serve.
    fn finish_open(&mut self, actions: &mut Vec<Action>) {
        let stage = core::mem::replace(&mut self.opening.stage, Stage::Done);
        let Stage::Loading(loading) = stage else {
            return;
        };
        for entry in loading.tail {
            let object = Object::of(&entry, entry.compressed_bytes > 0);
            self.store.inventory.data.insert(entry.number, object);
            self.tail.push(entry, true);
        }
        self.commits.opened(self.tail.last());
        self.snapshots = self.manifest.snapshots.clone();
        self.phase = Phase::Open;
        self.port.again = true;
        for (token, ask) in core::mem::take(&mut self.early) {
            self.submit(token, ask, actions);
        }
    }
}

fn parse(name: Name, bytes: &[u8]) -> Result<Manifest, OpenError> {
    Manifest::parse(bytes).map_err(|reason| match reason {
        FormatError::Newer { found, supported } => OpenError::Newer { found, supported },
        reason => damaged(name, reason),
    })
}

fn find_snapshot(manifest: &Manifest, name: SnapshotName) -> Result<Snapshot, OpenError> {
    let found = manifest.snapshots.iter().find(|s| s.name == name);
    found.copied().ok_or(OpenError::NoSnapshot)
}

const fn damaged(name: Name, reason: FormatError) -> OpenError {
    OpenError::Damaged { name, reason }
}

const fn short() -> FormatError {
    FormatError::Field("length")
}

/// Why an object that the manifest names could not be read.
fn missing(name: Name, result: Result<Stored, StoreError>) -> OpenError {
    match result {
        Err(StoreError::Io(error)) => OpenError::Io(error),
        Err(StoreError::Short) => damaged(name, short()),
        _ => OpenError::Missing { name },
    }
}
