//! What lies below a volume as a node stacks it: a local store, an object volume, or both, the one over the other.
//!
//! The volume asks the upper one what it would ask its backend, and that one asks the lower one, whose backend or
//! object store has the backend's faults. What the unit has as `backend` is then what the upper one promises: it is
//! given what that one is given, and after a crash it is what that one, opened again, would show. So every rule about a
//! volume and its backend holds of a volume and what lies below it.
//!
//! Of what lies at the bottom two more rules hold: unless a local store says that its backend is between two states,
//! that alone is a disk that the client could have seen; and it has everything once all is tiered out.

use hdcs_core::base::io::Extent;
use hdcs_core::local::{Ask as StoreAsk, Event as StoreEvent};
use hdcs_core::objects::io::Ask as ObjectAsk;

use super::local::{OF_STORE, SimulatedStore, decode};
use super::{
    Action, Buf, Completion, Content, Done, Happening, History, InFlight, Io, IoError, Nanos,
    Owner, Plant, SectorRange, Seq, Token, Unit, Violation, World, check_backend, check_bounds,
    check_lost,
};
use crate::disk::joined;

/// Marks a question about extents that a store passes on, as it is the backend that knows.
const PASSED_ON: u64 = OF_STORE >> 1;
/// A change of size, among what a volume asks.
pub(super) const SIZE: u64 = PASSED_ON >> 1;
/// What a snapshot asks, among what a volume does.
pub(super) const KEEP: u64 = SIZE >> 1;
/// Sectors of the largest volumes that are compared as a whole whenever something is looked at.
const SMALL_SECTORS: u64 = 2048;

impl Unit {
    /// Whether something lies between the volume and its backend.
    pub(super) const fn is_stacked(&self) -> bool {
        self.local.is_some() || self.objects.is_some()
    }

    /// What is at the bottom, durably.
    fn bottom(&self) -> Result<Vec<Content>, Violation> {
        if let Some(objects) = &self.objects {
            return objects.contents();
        }
        let image = self.local.as_ref().and_then(SimulatedStore::image_contents);
        Ok(image.expect("there is an image or objects"))
    }

    /// Who used it is gone, and so is its memory.
    pub(super) fn lose_stack(&mut self) -> Result<(), Violation> {
        if let Some(objects) = &mut self.objects {
            objects.reopen()?;
        }
        self.ended.clear();
        self.tier_out = None;
        // Where writes went past the log, its memory held what nobody had flushed.
        self.history.loosen(true);
        if let Some(local) = &mut self.local
            && !local.reopen(&self.log, self.kept.as_ref())
        {
            self.backend.client_lost();
            return Ok(());
        }
        let bottom = self.bottom()?;
        let shown = match &self.local {
            Some(local) => local.shown(self.volume, &bottom)?,
            None => bottom,
        };
        self.backend.become_as(shown);
        self.check_below()
    }

    /// A log that had rotted may say again who it is, which whatever lies behind it is opened with.
    pub(super) fn reopen_stack(&mut self) -> Result<(), Violation> {
        if self.local.is_some() {
            self.lose_stack()?;
        }
        Ok(())
    }

    /// Another owner takes over what is at the bottom.
    pub(super) fn take_over_stack(&mut self) {
        if let Some(objects) = &mut self.objects {
            objects.take_over();
        }
        if let Some(local) = &mut self.local {
            local.fail_asked(IoError::Fenced);
        }
    }

    /// What is at the bottom alone is a disk that the client could have seen, unless a tier is between two states.
    pub(super) fn check_below(&self) -> Result<(), Violation> {
        let local = self.local.as_ref();
        let is_unknown = local.is_some_and(|local| local.is_between() || !local.is_open());
        if is_unknown || !self.is_stacked() {
            return Ok(());
        }
        let bottom = self.bottom()?;
        let of = |history: &History| {
            check_backend::check_whole(history, |sector| bottom[sector as usize])
        };
        // A local store whose log was lost begins with what it has, which the bottom gets with the next tier.
        let is_of_before = || self.before_losses.iter().any(|before| of(before).is_ok());
        of(&self.history).or_else(|broken| if is_of_before() { Ok(()) } else { Err(broken) })
    }

    /// The log is lost, and another one is before what lies below: the volume has what that shows.
    pub(super) fn lose_log_of_stack(&mut self) -> Result<(), Violation> {
        self.lose_stack()?;
        if self.local.is_some() {
            self.before_losses.push(self.history.clone());
        }
        let backend = &self.backend;
        check_lost::give_up_log(&mut self.history, |sector| backend.visible(sector))
    }

    /// All is destaged and tiered out: what is at the bottom has everything that was acknowledged before.
    pub(super) fn check_tiered(&self, before: Seq) -> Result<(), Violation> {
        let bottom = self.bottom()?;
        check_backend::check_complete(&self.history, before, |sector| bottom[sector as usize])
    }

    /// A tier has ended well: what is at the bottom is of the volume as it is.
    pub(super) fn note_tiered(&mut self) -> Result<(), Violation> {
        self.before_losses.clear();
        self.check_below()
    }
}

impl World {
    /// What a volume asks of what lies below it. Returns what goes straight to its backend.
    pub(super) fn ask_stack(
        &mut self,
        owner: Owner,
        action: Action,
    ) -> Result<Option<Action>, Violation> {
        let unit = match owner {
            Owner::Volume(unit) if self.units[unit].is_stacked() => unit,
            _ => return Ok(Some(action)),
        };
        match action {
            Action::BackendRead { token, offset, buf } => {
                let range = self.backend_range("stack read", unit, offset, buf.len())?;
                let io = Io::StackRead(unit);
                let number = self.insert(unit, token, io, "stack read", [offset, range.count]);
                self.watched.count(unit, range);
                if self.planted.strikes(Plant::ReadPastStore) {
                    let mut buf = buf;
                    if let Some(local) = &mut self.units[unit].local {
                        local.read_image(range, &mut buf);
                    }
                    self.end_of_stack(unit, number, Ok(Done::Read(buf)));
                } else {
                    self.submit(unit, number, StoreAsk::Read { offset, buf })?;
                }
            }
            Action::BackendWrite {
                token,
                offset,
                data,
            } => {
                let mut data = data;
                let mut bytes = joined(&data);
                let Some(range) = self.cut_range("stack write", unit, offset, bytes.len())? else {
                    self.begin_nothing(owner, token, unit);
                    return Ok(None);
                };
                if range.bytes() < bytes.len() {
                    cut(&mut data, range.bytes());
                    bytes.truncate(range.bytes());
                }
                let contents = decode(self.units[unit].volume, range, &bytes)?;
                self.check_backend_write(unit, range, &contents)?;
                self.coverage.destaged_bytes += bytes.len() as u64;
                let op = self.units[unit].backend.submit_write(range, contents);
                let io = Io::backend_write(unit, op, offset);
                let number = self.insert(unit, token, io, "stack write", [offset, range.count]);
                self.submit(unit, number, StoreAsk::Write { offset, data })?;
            }
            Action::BackendZero {
                token,
                offset,
                bytes,
                unmap,
            } => {
                let Some(range) = self.cut_range("stack zero", unit, offset, bytes as usize)?
                else {
                    self.begin_nothing(owner, token, unit);
                    return Ok(None);
                };
                let bytes = range.bytes() as u64;
                let contents = vec![Content::Zero; range.count as usize];
                self.check_backend_write(unit, range, &contents)?;
                let op = self.units[unit].backend.submit_zero(range, unmap);
                let io = Io::backend_write(unit, op, offset);
                let number = self.insert(unit, token, io, "stack zero", [offset, range.count]);
                self.submit(unit, number, StoreAsk::Zero { offset, bytes })?;
            }
            Action::BackendFlush { token } => {
                check_bounds::check_flush(self.flushes_under_way(unit))?;
                let op = self.units[unit].backend.submit_flush();
                let io = Io::BackendFlush(unit, op);
                let number = self.insert(unit, token, io, "stack flush", [0; 2]);
                if self.planted.strikes(Plant::FlushPastStore) {
                    self.end_of_stack(unit, number, Ok(Done::Written));
                } else {
                    self.submit(unit, number, StoreAsk::Flush)?;
                }
            }
            Action::BackendExtents { token, range } => {
                let (offset, bytes) = (range.byte_offset(), range.bytes());
                self.backend_range("stack extents", unit, offset, bytes)?;
                let io = Io::BackendExtents(unit, range);
                let numbers = [range.start, range.count];
                let number = self.insert(unit, token, io, "stack extents", numbers);
                self.ask_extents(unit, number, range)?;
            }
            Action::BackendUnsettled { range } => {
                if let Some(local) = &mut self.units[unit].local {
                    local.unsettle(range);
                }
            }
            other => return Ok(Some(other)),
        }
        Ok(None)
    }

    /// The local stores are polled, then the object volumes.
    pub(super) fn poll_stacks(&mut self) -> Result<(), Violation> {
        let now = self.engine.now();
        for unit in 0..self.volumes() {
            if let Some(local) = &mut self.units[unit].local {
                let cut = local.poll(now);
                self.go_on_with_store(unit)?;
                if let Some(bytes) = cut {
                    self.size_store(unit, bytes)?;
                }
            }
        }
        for unit in 0..self.volumes() {
            if let Some(objects) = &mut self.units[unit].objects {
                objects.poll(now);
                self.go_on_with_objects(unit)?;
            }
        }
        Ok(())
    }

    /// Ask what lies below the volume.
    pub(super) fn submit(
        &mut self,
        unit: usize,
        number: u64,
        ask: StoreAsk,
    ) -> Result<(), Violation> {
        let token = Token(number);
        if let Some(local) = &mut self.units[unit].local {
            if local.sizes.is_uncut() {
                local.uncut.push((token, ask));
                return Ok(());
            }
            return self.step_store(unit, StoreEvent::Submit { token, ask });
        }
        let ask = match ask {
            StoreAsk::Read { offset, buf } => ObjectAsk::Read { offset, buf },
            StoreAsk::Write { offset, data } => ObjectAsk::Write { offset, data },
            StoreAsk::Zero { offset, bytes } => ObjectAsk::Zero { offset, bytes },
            StoreAsk::Flush => ObjectAsk::Flush,
            StoreAsk::Resize { bytes } => ObjectAsk::Resize { bytes },
        };
        self.submit_to_objects(unit, token, ask)
    }

    /// What a local store has is known there; of all else the backend knows.
    fn ask_extents(
        &mut self,
        unit: usize,
        number: u64,
        range: SectorRange,
    ) -> Result<(), Violation> {
        let is_past_store = self.planted.is(Plant::ExtentsPastStore);
        let local = &mut self.units[unit].local;
        let (range, known) = match local {
            Some(local) if !is_past_store => local.extent(range),
            _ => (range, None),
        };
        let extents = match known {
            Some(state) => Some(vec![Extent { range, state }]),
            None => local.as_mut().and_then(|local| local.image_extents(range)),
        };
        if let Some(extents) = extents {
            self.end_of_stack(unit, number, Ok(Done::Extents(extents)));
            return Ok(());
        }
        let token = Token(number | PASSED_ON);
        self.submit_to_objects(unit, token, ObjectAsk::Extents { range })
    }

    /// Something that was asked of an object volume has ended.
    pub(super) fn ended_by_objects(
        &mut self,
        unit: usize,
        token: Token,
        result: Result<Done, IoError>,
    ) -> Result<(), Violation> {
        if token.0 & OF_STORE == 0 {
            self.end_of_stack(unit, token.0 & !PASSED_ON, result);
            return Ok(());
        }
        let token = Token(token.0 & !OF_STORE);
        self.step_store(unit, StoreEvent::Completed(Completion { token, result }))
    }

    fn insert(
        &mut self,
        unit: usize,
        token: Token,
        io: Io,
        what: &'static str,
        numbers: [u64; 2],
    ) -> u64 {
        self.next_io += 1;
        let number = self.next_io;
        self.engine.note(what, [number, numbers[0], numbers[1], 0]);
        let in_flight = InFlight {
            owner: Owner::Volume(unit),
            token,
            since: self.engine.now(),
            io,
            fails: None,
        };
        self.in_flight.insert(number, in_flight);
        number
    }

    /// The volume hears of it in its turn.
    pub(super) fn end_of_stack(&mut self, unit: usize, number: u64, result: Result<Done, IoError>) {
        if number == SIZE {
            self.engine
                .after(Nanos(0), Happening::StackResized(unit, result.map(drop)));
            return;
        }
        if number == KEEP {
            self.engine
                .after(Nanos(0), Happening::StackKept(unit, result.map(drop)));
            return;
        }
        self.units[unit].ended.insert(number, result);
        // A turn takes a little time.
        let at = self.engine.now().plus(Nanos::from_micros(10));
        self.engine.at(at, Happening::Io(number));
    }

    /// How what lies below a volume has ended what that asked, if something does.
    pub(super) fn take_end_of_stack(
        &mut self,
        io: &Io,
        number: u64,
    ) -> Option<Result<Done, IoError>> {
        self.units[io.backend()?].ended.remove(&number)
    }

    /// What must hold of what is at the bottom whenever the machines rest.
    pub(super) fn check_bottom(&self, unit: usize) -> Result<(), Violation> {
        let state = &self.units[unit];
        let is_costly = state.objects.is_some() && state.backend.sectors() > SMALL_SECTORS;
        if is_costly && !self.engine.turns().is_multiple_of(4096) {
            return Ok(());
        }
        state.check_below()
    }

    /// Whether something lies below a volume.
    pub fn is_stacked(&self, unit: usize) -> bool {
        self.units[unit].is_stacked()
    }

    /// All is destaged and tiered out: what is at the bottom has everything.
    pub fn check_tiered(&self) -> Result<(), Violation> {
        let mut stacks = self.units.iter().filter(|unit| unit.is_stacked());
        stacks.try_for_each(|unit| unit.check_tiered(unit.history.now() + 1))
    }
}

/// Leave out what lies beyond so many bytes.
fn cut(data: &mut Vec<Buf>, mut bytes: usize) {
    data.retain_mut(|buf| {
        let keep = buf.len().min(bytes);
        bytes -= keep;
        if keep < buf.len() {
            *buf = buf.slice(0..keep);
        }
        keep > 0
    });
}
