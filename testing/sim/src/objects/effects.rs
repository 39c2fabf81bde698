//! What owners ask of the store, and what becomes of it: when it happens, what goes wrong, and what
//! they are told.

use std::rc::Rc;

use hdcs_core::base::buf::Buf;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Nanos, Token};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::objects::format::{
    DataFooter, Manifest, SLOT_BYTES, USAGE_MAGIC, parse_usage, slot_checksum, write_usage,
};
use hdcs_core::objects::io::{Action, Condition, Event, Kind, Name, StoreError, Stored};
use zerocopy::FromBytes;

use super::compressed::is_compressed;
use super::plant::Plant;
use super::reader;
use super::world::{Effect, Fault, Happening, Look, ObjectsWorld, UUID};
use crate::violation::Violation;

impl ObjectsWorld {
    pub(super) fn latency(&mut self) -> Nanos {
        if !self.calm && self.random.u32(0..100) == 0 {
            return self
                .engine
                .now()
                .plus(Nanos::from_millis(self.random.u64(1000..20_000)));
        }
        self.engine
            .now()
            .plus(Nanos(self.random.u64(1..=self.scenario.latency_max)))
    }

    pub(super) fn draw_fault(&mut self, reads: bool) -> Fault {
        let one_in = self.scenario.fault_one_in;
        if self.calm || one_in == 0 || self.random.u32(0..one_in) > 0 {
            return Fault::None;
        }
        self.coverage.faults += 1;
        if reads {
            return if self.scenario.corrupts && self.random.bool() {
                Fault::Corrupt
            } else {
                Fault::Fails
            };
        }
        let faults = [Fault::Fails, Fault::Unknown, Fault::Late, Fault::Twice];
        self.random.choice(faults).unwrap_or(Fault::Fails)
    }

    /// The bucket gets a quota that it has reached, or nearly so, for a while.
    pub(super) fn fill_up(&mut self) {
        let batch = (self.scenario.batch_blocks * SLOT_BYTES) as u64;
        // Sometimes there is room for a manifest, but for no data.
        let rest = self.random.choice([0, 500, batch]).unwrap_or(0);
        let lasts = Nanos::from_millis(self.random.u64(100..120_000));
        let quota = self.store.bytes() + self.random.u64(0..=rest);
        self.quota = Some((quota, self.engine.now().plus(lasts)));
        self.engine.note("full", [quota, lasts.0, 0, 0]);
    }

    /// Whether the bucket refuses so many bytes more. Everything else it does.
    fn refuses(&mut self, bytes: usize) -> bool {
        if self
            .quota
            .is_some_and(|(_, until)| self.engine.now() >= until)
        {
            self.quota = None;
        }
        let room = |(quota, _)| self.store.bytes() + bytes as u64 > quota;
        !self.calm && self.quota.is_some_and(room)
    }

    pub(super) fn whole(&self, owner: usize, name: Name) -> String {
        let entry = &self.owners[owner];
        let place = match (name.volume, &entry.machine) {
            (0, _) | (_, None) => entry.place,
            (number, Some(machine)) => machine.ancestor_location(number - 1),
        };
        format!("{place}{name}")
    }

    /// Begin what an owner asks of the store.
    pub(super) fn perform(&mut self, owner: usize, action: Action) -> Result<(), Violation> {
        match action {
            Action::Put {
                token,
                name,
                data,
                slot_bytes,
                condition,
            } => {
                let whole = self.whole(owner, name);
                let bytes = self.gather(name, &data);
                if slot_bytes as u64 != slots_end(name.kind, &bytes) {
                    let what = format!("{whole}: {slot_bytes} bytes of it are said to be slots");
                    return Err(Violation::new("slots", what));
                }
                self.plant_at_put(owner, name, &bytes)?;
                let effect = Effect::Put {
                    name: whole,
                    short: name,
                    bytes: Rc::new(bytes),
                    frames: None,
                    condition,
                };
                self.begin(owner, token, effect, name.kind);
            }
            Action::PutCompressed {
                token,
                name,
                data,
                slot_bytes,
                method,
            } => {
                let (bytes, frames) = self.pack(owner, name, &data, slot_bytes, method);
                let effect = Effect::Put {
                    name: self.whole(owner, name),
                    short: name,
                    bytes: Rc::new(bytes),
                    frames: Some(frames),
                    condition: Condition::Always,
                };
                self.begin(owner, token, effect, name.kind);
            }
            Action::GetCompressed {
                token,
                name,
                part,
                buf,
            } => {
                let name = self.whole(owner, name);
                let look = Look::GetFrames { name, part, buf };
                let time = self.latency();
                self.engine.at(time, Happening::Look { owner, token, look });
            }
            Action::Delete { token, name } => {
                let effect = Effect::Delete {
                    name: self.whole(owner, name),
                };
                self.begin(owner, token, effect, name.kind);
            }
            Action::Get {
                token,
                name,
                offset,
                slots,
                buf,
            } => {
                let look = Look::Get {
                    name: self.whole(owner, name),
                    kind: name.kind,
                    offset,
                    slots: slots && self.plant != Some(Plant::UnmarkedSlots),
                    buf,
                };
                let time = self.latency();
                self.engine.at(time, Happening::Look { owner, token, look });
            }
            Action::List {
                token,
                volume,
                prefix,
                after,
            } => {
                let name = Name {
                    volume,
                    kind: Kind::Data,
                    number: 0,
                };
                let whole = self.whole(owner, name);
                let place = whole.strip_suffix(&name.to_string());
                let look = Look::List {
                    place: place.unwrap_or(&whole).into(),
                    prefix,
                    after,
                };
                let time = self.latency();
                self.engine.at(time, Happening::Look { owner, token, look });
            }
            Action::End(_) | Action::SnapshotEnd { .. } => {}
        }
        Ok(())
    }

    pub(super) fn gather(&mut self, name: Name, data: &[Buf]) -> Vec<u8> {
        let mut bytes: Vec<u8> = Vec::new();
        for buf in data {
            bytes.extend_from_slice(buf);
        }
        if self.plant == Some(Plant::TornBlock)
            && name.kind == Kind::Data
            && bytes.len() > SLOT_BYTES + 100
        {
            // One sector of the first block is lost, as if it had been zero before.
            bytes[512..1024].fill(0);
            Self::put_right(name, 0, &mut bytes);
        }
        if self.plant == Some(Plant::SilentEnd)
            && name.kind == Kind::Manifest
            && let Ok(manifest) = Manifest::parse(&bytes)
        {
            let gone = false;
            Manifest { gone, ..manifest }.write(&mut bytes);
        }
        self.plant_in_map(name, &mut bytes);
        bytes
    }

    /// Planted bugs in how the map is stored.
    fn plant_in_map(&self, name: Name, bytes: &mut [u8]) {
        match self.plant {
            Some(Plant::OldPages) if name.kind == Kind::Manifest => {
                if let Ok(mut manifest) = Manifest::parse(bytes) {
                    manifest.maps.reverse();
                    manifest.write(bytes);
                }
            }
            Some(Plant::WrongUsage) if name.kind == Kind::Map && bytes[..8] == USAGE_MAGIC => {
                let volume: [u8; 16] = bytes[24..40].try_into().unwrap_or_default();
                if let Ok(mut entries) = parse_usage(&volume, name.number, bytes)
                    && let Some(last) = entries.last_mut()
                {
                    last.live += 1;
                    write_usage(volume, name.number, &entries, bytes);
                }
            }
            _ => {}
        }
    }

    /// Give the slot at `offset` of an object a good checksum, whatever block it is.
    pub(super) fn put_right(name: Name, offset: usize, bytes: &mut [u8]) {
        let slot = &mut bytes[offset..offset + SLOT_BYTES];
        let (data, sum) = slot.split_at_mut(BLOCK_BYTES);
        // The block is told by the content of its first sector, if that is a write's.
        let sector = u64::from_le_bytes(data[16..24].try_into().unwrap_or_default());
        let sum_now = slot_checksum(&UUID, name.number, sector / 8, data);
        sum.copy_from_slice(&sum_now.to_le_bytes());
    }

    pub(super) fn plant_at_put(
        &mut self,
        owner: usize,
        name: Name,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        let place = self.owners[owner].place;
        match self.plant {
            Some(Plant::DeleteBeforeCommit) if name.kind == Kind::Manifest => {
                let (Ok(manifest), Ok(before)) =
                    (Manifest::parse(bytes), reader::needed(&self.store, place))
                else {
                    return Ok(());
                };
                let Ok(after) = reader::read(&self.store, place, manifest) else {
                    return Ok(());
                };
                if let Some(name) = before.difference(&after.needs).next() {
                    self.check_delete(name)?;
                }
            }
            Some(Plant::DeleteBeginning) if name.kind == Kind::Manifest => {
                if let Ok(Some(newest)) = reader::newest(&self.store, place)
                    && newest.begins
                {
                    let name = format!("{place}{}", Name::own(Kind::Manifest, newest.sequence));
                    self.check_delete(&name)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Begin a put or a delete, with whatever goes wrong.
    pub(super) fn begin(&mut self, owner: usize, token: Token, effect: Effect, kind: Kind) {
        let time = self.latency();
        let later = Nanos(self.random.u64(1..120_000_000_000));
        let late = time.plus(later);
        let happen = |token| Happening::Happen {
            owner,
            token,
            effect: effect.clone(),
        };
        let tell = |result| Happening::Tell {
            owner,
            token,
            result,
        };
        let failed = || Err(StoreError::Io(IoError::Unreachable));
        let mut fault = self.draw_fault(false);
        if self.plant == Some(Plant::LostEnd) && self.random.u8(0..40) == 0 {
            return self.engine.at(time, happen(None));
        }
        if self.plant == Some(Plant::ManifestBeforeData) && kind == Kind::Data {
            self.engine.at(time, tell(Ok(Stored::Done)));
            return self.engine.at(late, happen(None));
        }
        if self.plant == Some(Plant::DeleteUnknown)
            && kind == Kind::Data
            && let Effect::Put { name, .. } = &effect
            && self.random.u8(0..10) == 0
        {
            let delete = Effect::Delete { name: name.clone() };
            let gone = Happening::Happen {
                owner,
                token: None,
                effect: delete,
            };
            self.engine.at(time, happen(Some(token)));
            return self.engine.at(time.plus(Nanos(1)), gone);
        }
        if self.plant == Some(Plant::UnknownIsSuccess)
            && kind == Kind::Manifest
            && self.random.u8(0..5) == 0
        {
            return self.engine.at(time, tell(Ok(Stored::Done)));
        }
        if self.plant == Some(Plant::UnknownIsFailure)
            && kind == Kind::Manifest
            && matches!(effect, Effect::Put { .. })
            && self.is_open(owner)
            && self.random.bool()
        {
            fault = Fault::Unknown;
        }
        match fault {
            Fault::None | Fault::Corrupt => self.engine.at(time, happen(Some(token))),
            Fault::Fails => self.engine.at(time, tell(failed())),
            Fault::Unknown => {
                self.engine.at(time, happen(None));
                self.engine.at(time.plus(Nanos(1)), tell(failed()));
            }
            Fault::Late => {
                self.coverage.late += 1;
                self.engine.at(time, tell(failed()));
                self.engine.at(late, happen(None));
            }
            Fault::Twice => {
                self.coverage.late += 1;
                self.engine.at(time, happen(Some(token)));
                self.engine.at(late, happen(None));
            }
        }
    }

    pub(super) fn happen(&mut self, happening: Happening) -> Result<(), Violation> {
        match happening {
            Happening::Happen {
                owner,
                token,
                effect,
            } => {
                let result = self.take_effect(owner, effect)?;
                if let Some(token) = token {
                    let time = self.latency();
                    let tell = Happening::Tell {
                        owner,
                        token,
                        result,
                    };
                    self.engine.at(time, tell);
                }
                Ok(())
            }
            Happening::Look { owner, token, look } if self.is_passed(owner, &look) => {
                let time = self.latency();
                self.engine.at(time, Happening::Look { owner, token, look });
                Ok(())
            }
            Happening::Look { owner, token, look } => {
                let result = self.look(owner, look)?;
                self.tell(owner, token, result)
            }
            Happening::Tell {
                owner,
                token,
                result,
            } => self.tell(owner, token, result),
        }
    }

    pub(super) fn tell(
        &mut self,
        owner: usize,
        token: Token,
        result: Result<Stored, StoreError>,
    ) -> Result<(), Violation> {
        self.engine.note(
            "tell",
            [owner as u64, token.0, u64::from(result.is_ok()), 0],
        );
        if let Err(StoreError::Io(error)) = result
            && error != IoError::NoSpace
        {
            self.last_fault = self.engine.now();
        }
        if let Some(machine) = &mut self.owners[owner].machine {
            let event = Event::Stored { token, result };
            machine.step(self.engine.now(), event, &mut self.actions);
        }
        self.settle_actions(owner)
    }

    /// A put or delete happens.
    pub(super) fn take_effect(
        &mut self,
        owner: usize,
        effect: Effect,
    ) -> Result<Result<Stored, StoreError>, Violation> {
        match effect {
            Effect::Put {
                name,
                short,
                bytes,
                frames,
                condition,
            } => {
                self.engine.note(
                    "put",
                    [
                        owner as u64,
                        short.kind as u64,
                        short.number,
                        bytes.len() as u64,
                    ],
                );
                let exists = self.store.get(&name).is_some();
                let plant = self.plant == Some(Plant::NoFence);
                // Which of the two is looked at first is the store's.
                if self.latched == Some(owner) {
                    return Ok(Err(StoreError::Io(IoError::NoSpace)));
                }
                if self.refuses(bytes.len()) && (!exists || self.random.bool()) {
                    return self.refuse(owner);
                }
                if condition == Condition::IfAbsent && exists && !plant {
                    return Ok(Err(StoreError::Exists));
                }
                if short.kind == Kind::Manifest {
                    self.check_manifest(owner, &name, &bytes)?;
                }
                self.store.put(&name, bytes);
                if let Kind::Manifest | Kind::Snapshot | Kind::Clone = short.kind {
                    self.needed = None;
                }
                if short.kind == Kind::Manifest {
                    self.check_state(owner)?;
                }
                Ok(Ok(frames.map_or(Stored::Done, Stored::Packed)))
            }
            Effect::Delete { name } => {
                self.engine.note("delete", [owner as u64, 0, 0, 0]);
                self.coverage.deletes += 1;
                self.coverage.freed_when_full += u64::from(self.quota.is_some());
                self.check_delete(&name)?;
                self.store.delete(&name);
                Ok(Ok(Stored::Done))
            }
        }
    }

    /// A put finds the bucket full: nothing happens, and that is told.
    fn refuse(&mut self, owner: usize) -> Result<Result<Stored, StoreError>, Violation> {
        self.coverage.refused += 1;
        self.last_refusal = self.engine.now();
        match self.plant {
            Some(Plant::FullIsDone) => return Ok(Ok(Stored::Done)),
            Some(Plant::FullForGood) => self.latched = Some(owner),
            Some(Plant::RoomAtAnyPrice) => {
                let place = self.owners[owner].place;
                let prefix = format!("{place}{}", Kind::Data.prefix());
                let first = self.store.below(&prefix).next();
                if let Some(name) = first.map(|(name, _)| name.clone()) {
                    self.check_delete(&name)?;
                    self.store.delete(&name);
                }
            }
            _ => {}
        }
        Ok(Err(StoreError::Io(IoError::NoSpace)))
    }

    /// A get or list is answered.
    pub(super) fn look(
        &mut self,
        owner: usize,
        look: Look,
    ) -> Result<Result<Stored, StoreError>, Violation> {
        let mut fault = self.draw_fault(true);
        if self.plant == Some(Plant::SkipChecksum)
            && matches!(
                look,
                Look::Get {
                    kind: Kind::Data,
                    slots: true,
                    ..
                }
            )
        {
            fault = Fault::Corrupt;
        }
        if self.plant == Some(Plant::FullForReads) && self.refuses(1) {
            return Ok(Err(StoreError::Io(IoError::NoSpace)));
        }
        if fault == Fault::Fails {
            return Ok(Err(StoreError::Io(IoError::Unreachable)));
        }
        match look {
            Look::List {
                place,
                prefix,
                after,
            } => {
                let (objects, more) = self.store.list(&place, prefix, &after);
                Ok(Ok(Stored::Listed { objects, more }))
            }
            Look::GetFrames { name, part, buf } => {
                self.look_into_frames(owner, &name, &part, buf, fault)
            }
            Look::Get {
                name,
                kind,
                offset,
                slots,
                mut buf,
            } => {
                let Some(bytes) = self.store.get(&name).cloned() else {
                    self.check_lost(owner, &name)?;
                    return Ok(Err(StoreError::NotFound));
                };
                let range = offset as usize..offset as usize + buf.len();
                let packed = is_compressed(kind, &bytes);
                let end = if packed { 0 } else { slots_end(kind, &bytes) };
                let Some(bytes) = bytes.get(range.clone()) else {
                    return Ok(Err(StoreError::Short));
                };
                let is_whole = |at: usize| at.is_multiple_of(SLOT_BYTES) && at as u64 <= end;
                let are_slots = is_whole(range.start) && is_whole(range.end);
                let is_table = offset >= end;
                if !(if slots { are_slots } else { is_table }) {
                    let what = format!("{name}: {range:?} with slots up to {end}, said: {slots}");
                    return Err(Violation::new("slots", what));
                }
                buf.copy_from_slice(bytes);
                if self.plant == Some(Plant::UnknownIsFailure)
                    && kind == Kind::Manifest
                    && self.is_open(owner)
                {
                    // As if nobody had compared it.
                    if let Ok(mut manifest) = Manifest::parse(&buf) {
                        manifest.nonce ^= 1;
                        manifest.write(&mut buf);
                    }
                }
                if self.plant == Some(Plant::ForeignFrames) && packed && offset == 0 {
                    self.plant_foreign_frames(&name, &mut buf);
                }
                if fault == Fault::Corrupt {
                    self.last_fault = self.engine.now();
                    let at = self.random.usize(0..buf.len());
                    buf[at] ^= 1 << self.random.u8(0..8);
                    if self.plant == Some(Plant::SkipChecksum)
                        && buf.len().is_multiple_of(SLOT_BYTES)
                        && let Some(name) = name.rsplit('/').next().and_then(|n| n.parse().ok())
                    {
                        // The place in a write's first sector stays, so that the sum can be made.
                        let slot = at / SLOT_BYTES * SLOT_BYTES;
                        buf[slot + 100] ^= 1;
                        Self::put_right(Name::own(kind, name), slot, &mut buf);
                    }
                }
                Ok(Ok(Stored::Read(buf)))
            }
        }
    }
}

/// Where the slots of an object end, as its footer says it.
fn slots_end(kind: Kind, object: &[u8]) -> u64 {
    if kind != Kind::Data {
        return 0;
    }
    let footer = DataFooter::read_from_suffix(object);
    let slots = footer.map_or(0, |(_, footer)| footer.slots.get());
    u64::from(slots) * SLOT_BYTES as u64
}
