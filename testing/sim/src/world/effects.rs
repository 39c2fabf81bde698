//! Performing actions and returning completions.

use hdcs_core::base::io::Durability;
use hdcs_core::cache::Tie;
use hdcs_core::format::{CACHE_HEADER_BLOCKS, LogSuperblock};

use super::{
    Action, BLOCK_BYTES, Buf, BufMut, CacheEvent, Completion, Content, DiskId, Done, Event,
    Happening, InFlight, Io, IoError, LOG_HEADER_BLOCKS, Nanos, OpId, Owner, Phase, Plant, Pool,
    Rng, SECTOR_BYTES, SectorRange, Token, Unit, Violation, World, check_bounds,
};
use crate::check_log;
use crate::disk::joined;

impl World {
    pub(super) fn perform_all(
        &mut self,
        owner: Owner,
        actions: Vec<Action>,
    ) -> Result<(), Violation> {
        for action in actions {
            self.perform(owner, action)?;
        }
        Ok(())
    }

    fn perform(&mut self, owner: Owner, action: Action) -> Result<(), Violation> {
        let unit = match owner {
            Owner::Volume(unit) => unit,
            Owner::ClosedVolume(_) | Owner::Cache(_) => 0,
        };
        let asks = match &action {
            Action::BackendRead { .. } => Some("a read"),
            Action::BackendWrite { .. } => Some("a write"),
            Action::BackendZero { .. } => Some("a zeroing"),
            Action::BackendFlush { .. } => Some("a flush"),
            Action::BackendExtents { .. } => Some("a question"),
            _ => None,
        };
        if let Some(what) = asks {
            self.units[unit].fence.check_ask(unit, what)?;
            if self.holds(unit, &action) {
                self.units[unit].held.push(action);
                return Ok(());
            }
        }
        self.perform_now(owner, action)
    }

    pub(super) fn perform_now(&mut self, owner: Owner, action: Action) -> Result<(), Violation> {
        let Some(action) = self.ask_stack(owner, action)? else {
            return Ok(());
        };
        let unit = match owner {
            Owner::Volume(unit) => unit,
            Owner::ClosedVolume(_) | Owner::Cache(_) => 0,
        };
        match action {
            Action::LogRead {
                token, offset, buf, ..
            } => self.disk_read(owner, token, DiskId::Log(unit), offset, buf),
            Action::CacheRead { token, offset, buf } => {
                if matches!(owner, Owner::Volume(_)) {
                    self.note_rot_met(offset);
                }
                self.disk_read(owner, token, DiskId::Cache, offset, buf)
            }
            Action::LogWrite {
                token,
                offset,
                data,
                way,
            } => {
                self.check_log_is_used(unit)?;
                let syncs = way.is_some_and(|way| way.call == Durability::Fdatasync);
                self.disk_write(owner, token, DiskId::Log(unit), offset, data, !syncs)
            }
            Action::KeepSuperblock { token, block } => {
                self.begin(
                    owner,
                    token,
                    Io::Keep(unit, block),
                    "keep superblock",
                    [0; 2],
                );
                Ok(())
            }
            Action::CacheWrite {
                token,
                offset,
                data,
                durable,
            } => self.disk_write(owner, token, DiskId::Cache, offset, data, durable),
            Action::BackendRead { token, offset, buf } => {
                let range = self.backend_range("backend read", unit, offset, buf.len())?;
                let op = self.units[unit].backend.submit_read(range);
                self.watched.count(unit, range);
                self.begin(
                    owner,
                    token,
                    Io::BackendRead(unit, op, buf),
                    "backend read",
                    [offset, range.count],
                );
                Ok(())
            }
            Action::BackendWrite {
                token,
                offset,
                data,
            } => self.backend_write(unit, token, offset, data),
            Action::BackendZero {
                token,
                offset,
                bytes,
                unmap,
            } => {
                let Some(range) = self.cut_range("backend zero", unit, offset, bytes as usize)?
                else {
                    self.begin_nothing(owner, token, unit);
                    return Ok(());
                };
                let contents = vec![Content::Zero; range.count as usize];
                self.check_backend_write(unit, range, &contents)?;
                let op = self.units[unit].backend.submit_zero(range, unmap);
                let plant = self.plant(&[Plant::LostZero]);
                let io = Io::BackendWrite {
                    volume: unit,
                    op,
                    offset,
                    held: Vec::new(),
                    plant,
                };
                self.begin(owner, token, io, "backend zero", [offset, range.count]);
                Ok(())
            }
            Action::BackendFlush { token } => {
                check_bounds::check_flush(self.flushes_under_way(unit))?;
                let op = self.units[unit].backend.submit_flush();
                self.begin(
                    owner,
                    token,
                    Io::BackendFlush(unit, op),
                    "backend flush",
                    [0; 2],
                );
                Ok(())
            }
            Action::BackendExtents { token, range } => {
                let bytes = range.bytes();
                self.backend_range("backend extents", unit, range.byte_offset(), bytes)?;
                self.begin(
                    owner,
                    token,
                    Io::BackendExtents(unit, range),
                    "backend extents",
                    [range.start, range.count],
                );
                Ok(())
            }
            // It is for local stores.
            Action::BackendUnsettled { .. } => Ok(()),
            Action::Reply { request, result } => self.replied(unit, request, result),
        }
    }

    /// Flushes of a backend that have not ended.
    pub(super) fn flushes_under_way(&self, unit: usize) -> usize {
        let flushes = self.in_flight.values();
        let flushes = flushes.filter(|one| matches!(one.io, Io::BackendFlush(of, _) if of == unit));
        flushes.count()
    }

    pub(super) fn backend_range(
        &self,
        what: &'static str,
        unit: usize,
        offset: u64,
        bytes: usize,
    ) -> Result<SectorRange, Violation> {
        let size = self.units[unit].backend.sectors() * SECTOR_BYTES as u64;
        check_bounds::check_range(what, offset, bytes as u64, SECTOR_BYTES, size)?;
        let sector = SECTOR_BYTES as u64;
        Ok(SectorRange::new(offset / sector, bytes as u64 / sector))
    }

    /// The same without what lies beyond the end of a volume that was cut; `None` if that is all.
    pub(super) fn cut_range(
        &self,
        what: &'static str,
        unit: usize,
        offset: u64,
        bytes: usize,
    ) -> Result<Option<SectorRange>, Violation> {
        let (start, count) = (offset / SECTOR_BYTES as u64, (bytes / SECTOR_BYTES) as u64);
        let inside = if self.scenario.resizes {
            self.units[unit].within_backend(start, count)
        } else {
            count
        };
        match inside as usize {
            0 if count > 0 => Ok(None),
            inside if inside < count as usize => self
                .backend_range(what, unit, offset, inside * SECTOR_BYTES)
                .map(Some),
            _ => self.backend_range(what, unit, offset, bytes).map(Some),
        }
    }

    pub(super) fn begin_nothing(&mut self, owner: Owner, token: Token, unit: usize) {
        let io = Io::BackendNothing(unit);
        self.begin(owner, token, io, "backend beyond", [0; 2]);
    }

    fn disk_read(
        &mut self,
        owner: Owner,
        token: Token,
        disk: DiskId,
        offset: u64,
        buf: BufMut,
    ) -> Result<(), Violation> {
        let name = disk.name();
        let size = self.disk(disk).bytes();
        check_bounds::check_range(name, offset, buf.len() as u64, BLOCK_BYTES, size)?;
        let bytes = buf.len();
        let op = self.disk(disk).submit_read(offset, bytes);
        let what = match disk {
            DiskId::Log(_) => "log read",
            DiskId::Cache => "cache read",
        };
        self.begin(
            owner,
            token,
            Io::DiskRead(disk, op, offset, buf),
            what,
            [offset, bytes as u64],
        );
        Ok(())
    }

    fn disk_write(
        &mut self,
        owner: Owner,
        token: Token,
        disk: DiskId,
        offset: u64,
        held: Vec<Buf>,
        durable: bool,
    ) -> Result<(), Violation> {
        let name = disk.name();
        let bytes: u64 = held.iter().map(|buf| buf.len() as u64).sum();
        let size = self.disk(disk).bytes();
        check_bounds::check_range(name, offset, bytes, BLOCK_BYTES, size)?;
        match disk {
            DiskId::Log(unit) => {
                self.units[unit].fence.check_log_write(unit, offset)?;
                self.check_log_space(unit, offset, bytes)?;
                self.units[unit].log_writes.begin(name, offset, bytes)?;
                self.units[unit].log_written = self.engine.now();
            }
            DiskId::Cache => self.cache_writes.begin(name, offset, bytes)?,
        }
        let held = match disk {
            DiskId::Log(unit) if offset < LOG_HEADER_BLOCKS * BLOCK_BYTES as u64 => {
                self.unmark(unit, held)
            }
            _ => held,
        };
        let op = self.disk(disk).submit_write(offset, &held, durable);
        let in_ring = offset >= LOG_HEADER_BLOCKS * BLOCK_BYTES as u64;
        let plant = match disk {
            DiskId::Log(_) if in_ring => {
                self.plant(&[Plant::EarlyLogAck, Plant::LostLogWrite, Plant::TornLogWrite])
            }
            DiskId::Cache if durable && bytes == BLOCK_BYTES as u64 => {
                // Destage, which waits for the same, is at rest.
                let is_direct = self.units.iter().all(|unit| unit.history.is_direct());
                let in_journal = offset >= CACHE_HEADER_BLOCKS * BLOCK_BYTES as u64;
                let late = [Plant::LateInvalidation];
                let plant = self.plant(if is_direct && in_journal { &late } else { &[] });
                plant.or_else(|| self.plant(&[Plant::LostInvalidation]))
            }
            _ => None,
        };
        let what = match (disk, durable) {
            (DiskId::Log(_), _) => "log write",
            (DiskId::Cache, true) => "cache write durable",
            (DiskId::Cache, false) => "cache write",
        };
        if let DiskId::Log(unit) = disk {
            let ring = self.units[unit].config.log_bytes;
            self.coverage.log_laps += bytes * 1000 / ring;
        }
        let io = Io::DiskWrite {
            disk,
            op,
            offset,
            held,
            plant,
            syncs: !durable && matches!(disk, DiskId::Log(_)),
        };
        self.begin(owner, token, io, what, [offset, bytes]);
        Ok(())
    }

    /// What planted bugs make of a superblock that says that writes go past the log, what the cache has forgotten, or
    /// what is lost.
    fn unmark(&mut self, unit: usize, held: Vec<Buf>) -> Vec<Buf> {
        let is_opening = self.phase(unit) == Some(Phase::Opening);
        let plant = if is_opening {
            Plant::HastyUnmark
        } else {
            Plant::ForgottenMark
        };
        let unmarks = self.planted.strikes(plant);
        let unties = [
            Plant::ForgottenTie,
            Plant::LostInvalidation,
            Plant::LateInvalidation,
        ];
        let unties = unties.into_iter().any(|plant| self.planted.is(plant));
        let mut superblock = LogSuperblock::parse(&held[0]).expect("a superblock is written");
        let is_first = check_log::superblock(&self.units[unit].log)
            .is_none_or(|there| there.incarnation != superblock.incarnation);
        let forgets_loss = (!is_opening && self.planted.is(Plant::ForgottenLoss))
            || (is_opening && is_first && self.planted.is(Plant::LoneLoss));
        let forgets_head = self.planted.is(Plant::ForgottenHead);
        let forgets_end = !is_opening && self.planted.is(Plant::UnmarkedEnd);
        if !unmarks && !unties && !forgets_loss && !forgets_head && !forgets_end {
            return held;
        }
        if unmarks {
            superblock.flags = 0.into();
        }
        if unties {
            superblock.cache = Tie::NONE.cache.into();
            superblock.cache_stamp = Tie::NONE.stamp.into();
        }
        if forgets_loss {
            superblock.lost_ranges = 0.into();
        }
        if forgets_head || forgets_end {
            superblock.known_head = 0.into();
        }
        superblock.seal_with(self.log_keys(unit).as_deref());
        let bytes: [u8; BLOCK_BYTES] = zerocopy::transmute!(superblock);
        let mut block = Pool::new(BLOCK_BYTES)
            .alloc(BLOCK_BYTES)
            .expect("it is all free");
        block.copy_from_slice(&bytes);
        Vec::from([block.freeze()])
    }

    fn backend_write(
        &mut self,
        unit: usize,
        token: Token,
        offset: u64,
        held: Vec<Buf>,
    ) -> Result<(), Violation> {
        let bytes: usize = held.iter().map(|buf| buf.len()).sum();
        let Some(range) = self.cut_range("backend write", unit, offset, bytes)? else {
            self.begin_nothing(Owner::Volume(unit), token, unit);
            return Ok(());
        };
        let volume = self.units[unit].volume;
        let mut contents = Vec::with_capacity(range.count as usize);
        let data: Vec<u8> = joined(&held);
        for (sector, bytes) in (range.start..range.end()).zip(data.chunks(SECTOR_BYTES)) {
            let content = Content::decode(volume, sector, bytes).ok_or_else(|| {
                Violation::new(
                    "backend-foreign",
                    format!(
                        "sector {sector} of the backend is given bytes that nobody wrote there"
                    ),
                )
            })?;
            contents.push(content);
        }
        self.check_backend_write(unit, range, &contents)?;
        self.coverage.destaged_bytes += bytes as u64;
        let backend = &mut self.units[unit].backend;
        let op = backend.submit_write(range, contents);
        let early = [Plant::EarlyDirectAck];
        let is_direct = self.units[unit].history.is_direct();
        let plant = self.plant(if is_direct { &early } else { &[] });
        let plant = plant.or_else(|| {
            self.plant(&[
                Plant::LateBackendWrite,
                Plant::TornBackendWrite,
                Plant::EarlyCommit,
            ])
        });
        let io = Io::BackendWrite {
            volume: unit,
            op,
            offset,
            held,
            plant,
        };
        self.begin(
            Owner::Volume(unit),
            token,
            io,
            "backend write",
            [offset, range.count],
        );
        Ok(())
    }

    pub(super) fn check_backend_write(
        &mut self,
        unit: usize,
        range: SectorRange,
        contents: &[Content],
    ) -> Result<(), Violation> {
        let Unit {
            history,
            order,
            backend,
            backend_writes,
            ..
        } = &mut self.units[unit];
        backend_writes.begin("backend", range.byte_offset(), range.bytes() as u64)?;
        if backend.is_atomic() {
            // What it is given matters when it is durable.
            return Ok(());
        }
        order.submit(history, range, contents, |sector| backend.durable(sector))
    }

    fn plant(&mut self, plants: &[Plant]) -> Option<Plant> {
        plants
            .iter()
            .copied()
            .find(|&plant| self.planted.strikes(plant))
    }

    fn begin(&mut self, owner: Owner, token: Token, io: Io, what: &'static str, numbers: [u64; 2]) {
        let (latency, fails) = self.fate(&io);
        self.next_io += 1;
        let number = self.next_io;
        self.engine.note(
            what,
            [number, numbers[0], numbers[1], u64::from(fails.is_some())],
        );
        self.in_flight.insert(
            number,
            InFlight {
                owner,
                token,
                since: self.engine.now(),
                io,
                fails,
            },
        );
        if self.planted.strikes(Plant::LostCompletion) {
            return;
        }
        self.engine
            .at(self.engine.now().plus(latency), Happening::Io(number));
    }

    /// How long an effect takes and whether it fails.
    fn fate(&mut self, io: &Io) -> (Nanos, Option<IoError>) {
        let quiet = self.calm_since.is_some();
        let faults = &self.scenario.faults;
        let random = &mut self.random;
        let fail = |random: &mut Rng, one_in: u32| {
            (one_in > 0 && !quiet && random.u32(..one_in) == 0).then_some(IoError::Failed)
        };
        match io {
            Io::DiskRead(DiskId::Log(unit), ..) => {
                let unit = &mut self.units[*unit];
                let dead = (unit.log_dead == Some(true)).then_some(IoError::Failed);
                let fails = dead.or_else(|| fail(random, faults.log_read_one_in));
                unit.log_trouble |= fails.is_some();
                unit.log_stuck |= fails.is_some();
                (unit.log_latency.draw(random), fails)
            }
            Io::DiskWrite {
                disk: DiskId::Log(unit),
                ..
            }
            | Io::LogSync(unit) => {
                let unit = &mut self.units[*unit];
                let dead = unit.log_dead.map(|_| IoError::Failed);
                let fails = dead.or_else(|| fail(random, faults.log_write_one_in));
                unit.log_trouble |= fails.is_some();
                (unit.log_latency.draw(random), fails)
            }
            Io::Keep(unit, _) => {
                let unit = &mut self.units[*unit];
                let fails = fail(random, faults.keep_one_in);
                unit.log_trouble |= fails.is_some();
                unit.log_stuck |= fails.is_some();
                (unit.log_latency.draw(random), fails)
            }
            Io::DiskRead(DiskId::Cache, ..) | Io::DiskWrite { .. } => {
                let dead = self.cache_dead.then_some(IoError::Failed);
                let fails = dead.or_else(|| fail(random, faults.cache_one_in));
                (self.scenario.cache_latency.draw(random), fails)
            }
            Io::BackendNothing(unit) | Io::StackRead(unit) => {
                (self.units[*unit].backend_latency.draw(random), None)
            }
            Io::BackendRead(index, ..)
            | Io::BackendWrite { volume: index, .. }
            | Io::BackendFlush(index, _)
            | Io::BackendExtents(index, _) => {
                let unit = &mut self.units[*index];
                if unit.fence.is_up() {
                    return (unit.backend_latency.draw(random), Some(IoError::Fenced));
                }
                let down = unit.backend_down.filter(|&error| {
                    // A full backend refuses only what needs space; an atomic one may find out late.
                    let flushes = matches!(io, Io::BackendFlush(..)) && unit.backend.is_atomic();
                    let writes = matches!(io, Io::BackendWrite { .. });
                    error != IoError::NoSpace || writes || flushes
                });
                let fails = down.or_else(|| fail(random, faults.backend_one_in));
                if fails.is_some() {
                    unit.backend_trouble = Some(self.engine.now());
                }
                (unit.backend_latency.draw(random), fails)
            }
        }
    }

    /// Until when whoever performs an effect does not answer.
    fn silent_until(&self, io: &Io) -> Nanos {
        if io.is_of_cache() {
            return self.cache_silent;
        }
        if let Some(unit) = io.log() {
            let answers = self.units[unit].log_reads_only && !self.is_held_like_log_reads(io);
            return if answers {
                Nanos(0)
            } else {
                self.units[unit].log_silent
            };
        }
        let unit = io.backend().map(|unit| &self.units[unit]);
        let is_known = |unit: &&Unit| !unit.is_stacked();
        unit.filter(is_known)
            .map_or(Nanos(0), |unit| unit.backend_silent)
    }

    pub(super) fn complete(&mut self, number: u64) -> Result<(), Violation> {
        let Some(in_flight) = self.in_flight.get(&number) else {
            return Ok(());
        };
        let silent = self.silent_until(&in_flight.io);
        if silent > self.engine.now() {
            // A log's device does not answer in order: one of before may come after those of the next opening.
            let is_slow = in_flight.io.log().is_some() && self.random.bool();
            let late_max = if is_slow { 200_000_000 } else { 1_000_000 };
            let late = Nanos(self.random.u64(..late_max));
            self.engine.at(silent.plus(late), Happening::Io(number));
            return Ok(());
        }
        let Some(InFlight {
            owner,
            token,
            io,
            fails,
            ..
        }) = self.in_flight.remove(&number)
        else {
            return Ok(());
        };
        let asked = io.backend();
        let log = io.log_written();
        let of_stack = self.take_end_of_stack(&io, number);
        let fails = match &of_stack {
            Some(Err(error)) => Some(*error),
            _ => fails,
        };
        let result = match io {
            Io::StackRead(_) => of_stack.expect("it ends when that says so"),
            Io::DiskRead(disk, op, offset, buf) => self.disk_was_read(disk, op, offset, buf, fails),
            Io::DiskWrite {
                disk,
                op,
                offset,
                held,
                plant,
                syncs,
            } => {
                drop(held);
                let written = self.disk_was_written(disk, op, offset, plant, fails);
                if let (DiskId::Log(unit), true, Ok(_)) = (disk, syncs, &written)
                    && !self.planted.strikes(Plant::UnsyncedLogWrite)
                {
                    let numbers = [number, offset];
                    self.begin(owner, token, Io::LogSync(unit), "log sync", numbers);
                    return Ok(());
                }
                written
            }
            Io::LogSync(unit) => {
                if let Some(error) = fails {
                    Err(error)
                } else {
                    self.coverage.log_syncs += 1;
                    self.disk(DiskId::Log(unit)).sync();
                    Ok(Done::Written)
                }
            }
            Io::BackendRead(unit, op, mut buf) => {
                if let Some(error) = fails {
                    self.units[unit].backend.cancel(op);
                    Err(error)
                } else {
                    self.units[unit].backend.complete_read(op, &mut buf);
                    Ok(Done::Read(buf))
                }
            }
            Io::BackendWrite {
                volume,
                op,
                offset,
                held,
                plant,
            } => {
                drop(held);
                self.backend_was_written(volume, op, offset, plant, fails)
            }
            Io::BackendFlush(unit, op) => self.backend_was_flushed(unit, op, fails),
            Io::BackendNothing(_) => fails.map_or(Ok(Done::Written), Err),
            Io::Keep(unit, block) => self.superblock_was_kept(unit, &block, fails),
            Io::BackendExtents(unit, range) => match fails {
                Some(error) => Err(error),
                None => of_stack
                    .unwrap_or_else(|| Ok(Done::Extents(self.units[unit].backend.extents(range)))),
            },
        };
        self.engine
            .note("completed", [number, u64::from(result.is_err()), 0, 0]);
        if let Some(unit) = asked {
            self.check_commits(unit)?;
        }
        if let (Some(unit), true) = (log, result.is_ok()) {
            self.log_write_ended(unit, number)?;
        }
        let mut completion = Completion { token, result };
        if let (Some(unit), Err(IoError::Fenced)) = (asked, &completion.result) {
            self.coverage.fences += u64::from(!self.units[unit].fence.is_told());
            self.units[unit].fence.tell();
            if self.planted.strikes(Plant::IgnoredFence) {
                completion.result = Err(IoError::Failed);
            }
        }
        match owner {
            Owner::ClosedVolume(closed) => self.step_closed(closed, Event::Completed(completion)),
            Owner::Volume(unit) => self.step_volume(unit, Event::Completed(completion)),
            Owner::Cache(shard) => self.step_cache(shard, CacheEvent::Completed(completion)),
        }
    }

    fn disk_was_read(
        &mut self,
        disk: DiskId,
        op: OpId,
        offset: u64,
        mut buf: BufMut,
        fails: Option<IoError>,
    ) -> Result<Done, IoError> {
        if let Some(error) = fails {
            self.disk(disk).cancel_read(op);
            return Err(error);
        }
        self.disk(disk).complete_read(op, &mut buf);
        if let DiskId::Log(unit) = disk {
            self.spoil_log_read(unit, offset, &mut buf);
        }
        Ok(Done::Read(buf))
    }

    fn disk_was_written(
        &mut self,
        disk: DiskId,
        op: OpId,
        offset: u64,
        plant: Option<Plant>,
        fails: Option<IoError>,
    ) -> Result<Done, IoError> {
        match disk {
            DiskId::Log(unit) => self.units[unit].log_writes.end(offset),
            DiskId::Cache => self.cache_writes.end(offset),
        }
        if let Some(error) = fails {
            if self.reached_dead_log(disk) {
                self.disk(disk).complete_write(op);
            } else {
                self.disk(disk).fail_write(op);
            }
            return Err(error);
        }
        match plant {
            Some(Plant::EarlyLogAck | Plant::LateInvalidation) => {
                let late = Nanos(self.random.u64(..50_000_000));
                self.engine.at(
                    self.engine.now().plus(late),
                    Happening::LateDiskWrite(disk, op),
                );
            }
            Some(Plant::TornLogWrite) => self.disk(disk).tear_write(op),
            Some(_) => self.disk(disk).drop_write(op),
            None => self.disk(disk).complete_write(op),
        }
        Ok(Done::Written)
    }

    fn backend_was_written(
        &mut self,
        unit: usize,
        op: OpId,
        offset: u64,
        plant: Option<Plant>,
        fails: Option<IoError>,
    ) -> Result<Done, IoError> {
        self.units[unit].backend_writes.end(offset);
        let is_stacked = self.units[unit].is_stacked();
        let backend = &mut self.units[unit].backend;
        if let Some(error) = fails {
            match error {
                // What lies below may have it or not, until it is written again.
                _ if is_stacked => backend.cancel(op),
                // What was not reached, or had no room, is as it was.
                IoError::Unreachable | IoError::NoSpace | IoError::Fenced => backend.cancel(op),
                IoError::Failed | IoError::Corrupt => backend.fail_write(op),
            }
            return Err(error);
        }
        match plant {
            Some(Plant::LateBackendWrite | Plant::EarlyDirectAck) => {
                let late = Nanos(self.random.u64(..200_000_000));
                self.engine.at(
                    self.engine.now().plus(late),
                    Happening::LateBackendWrite(unit, op),
                );
            }
            Some(Plant::TornBackendWrite) => backend.tear_write(op),
            Some(Plant::EarlyCommit) => backend.leak_write(op),
            Some(_) => backend.cancel(op),
            None => backend.complete_write(op),
        }
        Ok(Done::Written)
    }

    fn backend_was_flushed(
        &mut self,
        unit: usize,
        op: OpId,
        fails: Option<IoError>,
    ) -> Result<Done, IoError> {
        let lies = self.planted.strikes(Plant::FlushLie)
            || (self.is_flush_after_return(unit) && self.planted.strikes(Plant::ForgottenFlush));
        if fails.is_some() {
            self.units[unit].history.loosen(true);
        }
        let hides = fails.is_some() && self.hides_failed_flush(unit);
        let is_stacked = self.units[unit].is_stacked();
        let backend = &mut self.units[unit].backend;
        if let Some(error) = fails {
            if is_stacked {
                // What lies below keeps what it has taken.
                backend.cancel(op);
            } else {
                backend.fail_flush(op);
            }
            return if hides { Ok(Done::Written) } else { Err(error) };
        }
        if lies {
            backend.cancel(op);
            return Ok(Done::Written);
        }
        if backend.complete_flush(op) {
            return Ok(Done::Written);
        }
        self.units[unit].backend_trouble = Some(self.engine.now());
        self.units[unit].history.loosen(true);
        Err(IoError::Failed)
    }
}

impl DiskId {
    fn name(self) -> &'static str {
        match self {
            Self::Log(_) => "log",
            Self::Cache => "cache",
        }
    }
}
