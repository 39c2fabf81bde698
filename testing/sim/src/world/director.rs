//! What happens to a node beside its clients: faults, and what an operator does.

use hdcs_core::format::{CacheSuperblock, LogSuperblock};
use hdcs_core::volume::Cut;

use super::{
    BLOCK_BYTES, CacheEvent, DiskId, Event, Happening, Io, IoError, Nanos, OpId, Phase, Plant,
    SECTOR_BYTES, Violation, Volume, World, check_log, check_trouble, scenario,
};

/// The shortest pause before a cache device that was given up is tried again.
const CACHE_RETRY: Nanos = Nanos::from_millis(20);

impl World {
    /// Let the director act from now on.
    pub(super) fn start_director(&mut self) {
        let pause = self.random.u64(1..self.scenario.director_pause.0 * 2);
        self.engine
            .at(self.engine.now().plus(Nanos(pause)), Happening::Director);
    }

    /// Something happens.
    pub(super) fn direct(&mut self) -> Result<(), Violation> {
        if self.calm_since.is_some() || self.volumes() == 0 {
            return Ok(());
        }
        self.start_director();
        let unit = self.random.usize(..self.volumes());
        self.begin_scrub(unit);
        self.log_dies(unit);
        self.log_falls_silent(unit);
        self.begin_resize(unit)?;
        self.repin(unit)?;
        self.change_log_space(unit)?;
        self.tier_sometimes(unit)?;
        if self.scenario.switches && self.random.u8(..4) == 0 {
            return self.switch_policy(unit);
        }
        match self.random.u8(..20) {
            0 | 1 => self.backend_goes(unit, IoError::Unreachable),
            2 => self.backend_goes(unit, IoError::NoSpace),
            3 => return self.backend_loses_power(unit),
            4 | 5 => self.log_rots(unit),
            6 | 7 if self.scenario.faults.cache_rot => self.cache_rots_now(),
            8 => self.cache_dies(),
            9 => return self.destage_all(unit),
            10 => {
                self.units[unit].destage_all = None;
                self.cancel_flush_of_snapshot(unit)?;
                self.engine
                    .note("cancel destage all", [unit as u64, 0, 0, 0]);
                return self.step_volume(unit, Event::CancelDestageAll);
            }
            11 | 12 => return self.reconfigure(unit),
            13 => return self.grow(unit),
            14 => self.backend_falls_silent(unit),
            15 | 17 | 18 => self.cache_falls_silent(),
            16 => self.backend_is_taken_over(unit),
            19 => return self.snapshot_or_shrink(unit),
            _ => {}
        }
        Ok(())
    }

    fn backend_goes(&mut self, unit: usize, error: IoError) {
        let faults = &self.scenario.faults;
        let wanted = match error {
            IoError::NoSpace => faults.backend_full,
            _ => faults.backend_outage,
        };
        if !wanted || self.units[unit].backend_down.is_some() {
            return;
        }
        let pause = Nanos::from_micros(self.random.u64(100..2_000_000));
        self.engine
            .note("backend goes", [unit as u64, pause.0, error as u64, 0]);
        self.units[unit].backend_down = Some(error);
        self.units[unit].backend_trouble = Some(self.engine.now());
        self.engine.at(
            self.engine.now().plus(pause),
            Happening::BackendReturns(unit),
        );
    }

    fn backend_falls_silent(&mut self, unit: usize) {
        if !self.scenario.faults.backend_hang || self.units[unit].backend_silent > self.engine.now()
        {
            return;
        }
        let pause = Nanos::from_micros(self.random.u64(100..20_000_000));
        self.engine
            .note("backend silent", [unit as u64, pause.0, 0, 0]);
        self.units[unit].backend_silent = self.engine.now().plus(pause);
    }

    fn cache_falls_silent(&mut self) {
        if !self.scenario.faults.cache_hang || self.cache_silent > self.engine.now() {
            return;
        }
        let patience = self.scenario.cache.ssd_answer_max.0;
        let pause = match self.random.u8(..6) {
            // For good: until the node starts again, at the earliest.
            0 => Nanos(u64::MAX),
            1 => Nanos::from_micros(self.random.u64(100..10_000_000)),
            // About as long as it takes to be given up, so that what comes back is still of use.
            _ => Nanos(self.random.u64(patience / 2..patience * 2)),
        };
        self.engine.note("cache silent", [pause.0, 0, 0, 0]);
        self.cache_silent = self.engine.now().plus(pause);
    }

    fn backend_is_taken_over(&mut self, unit: usize) {
        let state = &mut self.units[unit];
        if !self.scenario.faults.backend_fence || state.fence.is_up() || self.random.u8(..8) > 0 {
            return;
        }
        state.fence.put_up();
        let is_stacked = state.is_stacked();
        if is_stacked {
            state.take_over_stack();
            // Until it has found out, what the other owner has removed is missed.
            state.backend_trouble = Some(self.engine.now());
        }
        for in_flight in self.in_flight.values_mut() {
            if in_flight.io.backend() == Some(unit) && !is_stacked {
                in_flight.fails = Some(IoError::Fenced);
            }
        }
        self.engine
            .note("backend taken over", [unit as u64, 0, 0, 0]);
    }

    /// The node tries its cache device, which was given up.
    pub(super) fn probe_cache(&mut self) -> Result<(), Violation> {
        if !self.readmission.is_trying() {
            // Of a node that has gone down.
            return Ok(());
        }
        let can_readmit = (self.node.as_ref()).is_some_and(|node| node.cache().can_readmit());
        if self.cache_dead && self.random.bool() {
            // It is back, with what it held.
            self.cache_dead = false;
        }
        let is_open = !self.cache_dead && self.cache_silent <= self.engine.now();
        let is_used = self
            .readmission
            .tried(self.engine.now(), is_open, can_readmit);
        self.wake_for_cache();
        if !is_used {
            return Ok(());
        }
        let under_way = self.in_flight.values().filter(|one| one.io.is_of_cache());
        check_trouble::check_readmitted(under_way.count())?;
        let before = self.scenario.cache.ssd.as_ref().map(|ssd| ssd.uuid);
        self.give_cache_another_identity();
        let mut uuid = self.scenario.cache.ssd.as_ref().map(|ssd| ssd.uuid);
        if self.planted.strikes(Plant::StaleReadmission) {
            uuid = self.cache_carries().or(before);
        }
        self.engine.note("cache readmitted", [0; 4]);
        let Some(uuid) = uuid else { return Ok(()) };
        self.step_cache(0, CacheEvent::Readmit { uuid })
    }

    /// The identity that a superblock on the cache device carries.
    fn cache_carries(&mut self) -> Option<[u8; 16]> {
        let mut block = vec![0; BLOCK_BYTES];
        let op = self.cache_disk.submit_read(0, BLOCK_BYTES);
        self.cache_disk.complete_read(op, &mut block);
        CacheSuperblock::parse(&block).ok().map(|found| found.uuid)
    }

    fn backend_loses_power(&mut self, unit: usize) -> Result<(), Violation> {
        if !self.scenario.faults.backend_power || self.units[unit].backend_down.is_some() {
            return Ok(());
        }
        self.engine
            .note("backend power cut", [unit as u64, 0, 0, 0]);
        self.cut_backend(unit)?;
        let pause = Nanos::from_micros(self.random.u64(100..500_000));
        self.units[unit].backend_down = Some(IoError::Unreachable);
        self.engine.at(
            self.engine.now().plus(pause),
            Happening::BackendReturns(unit),
        );
        Ok(())
    }

    /// The backend's host loses power: what is in flight fails.
    pub(super) fn cut_backend(&mut self, unit: usize) -> Result<(), Violation> {
        let state = &mut self.units[unit];
        state.backend_trouble = Some(self.engine.now());
        if state.is_stacked() {
            // A local store still has what its backend has lost, and objects are durable.
            if let Some(local) = &mut state.local {
                local.cut_backend();
            }
            if let Some(objects) = &mut state.objects {
                objects.cut();
            }
            return Ok(());
        }
        state.backend.power_cut();
        state.history.loosen(false);
        let lost: Vec<u64> = self
            .in_flight
            .iter()
            .filter(|(_, in_flight)| in_flight.io.backend() == Some(unit))
            .map(|(&number, _)| number)
            .collect();
        for number in lost {
            let in_flight = self.in_flight.get_mut(&number).expect("just found");
            in_flight.fails = Some(IoError::Unreachable);
        }
        self.check_commits(unit)
    }

    /// Let the end of each log rot that has one, or its newest superblock, where that is what rots.
    pub fn rot_ends(&mut self) {
        if !self.scenario.faults.log_rot {
            return;
        }
        for unit in 0..self.units.len() {
            let state = &self.units[unit];
            if self.scenario.faults.rots_superblocks {
                if let Some(newest) = check_log::superblock(&state.log) {
                    let offset = LogSuperblock::offset_of(newest.sequence.get());
                    let byte = self.random.u64(..BLOCK_BYTES as u64);
                    self.rot_log(unit, offset + byte, 0);
                }
                continue;
            }
            let Some(view) = check_log::read_log(&state.log, state.kept.as_ref()) else {
                continue;
            };
            // Any block of the last span.
            let mut ends = view.spans.iter().rev().map(|(end, _)| *end);
            let (Some(last), Some(first)) = (ends.next(), ends.next()) else {
                continue;
            };
            let position = self.random.u64(first..last);
            let Some(place) = check_log::place_of(&state.log, state.kept.as_ref(), position) else {
                continue;
            };
            let offset = place + self.random.u64(..BLOCK_BYTES as u64);
            let bit = self.random.u8(..);
            self.rot_log(unit, offset, bit);
        }
    }

    /// Let a bit of a log rot. Returns whether anything was there that can.
    fn rot_log(&mut self, unit: usize, offset: u64, bit: u8) -> bool {
        let state = &mut self.units[unit];
        if !state.log.rot(offset, bit) {
            return false;
        }
        state.log_rotten = true;
        let block = offset / BLOCK_BYTES as u64;
        (state.rotten).extend(check_log::sectors_in(&state.log, block));
        self.engine
            .note("log rots", [unit as u64, offset, u64::from(bit % 8), 0]);
        true
    }

    pub(super) fn log_rots(&mut self, unit: usize) {
        // What becomes of an opening is judged by what the log held when that began.
        let is_opening = self.phase(unit) == Some(Phase::Opening);
        let faults = &self.scenario.faults;
        let rots = faults.log_rot && !faults.rots_superblocks;
        if !rots || is_opening || self.random.u8(..4) > 0 {
            return;
        }
        let bytes = self.units[unit].log.bytes();
        // Superblocks are few: aim at them now and then.
        let at_superblocks = self.random.u8(..8) == 0;
        for _ in 0..200 {
            let bit = self.random.u8(..);
            let offset = if at_superblocks {
                let superblock = LogSuperblock::offset_of(self.random.u64(..2));
                superblock + self.random.u64(..BLOCK_BYTES as u64)
            } else {
                self.random.u64(..bytes)
            };
            if self.rot_log(unit, offset, bit) {
                return;
            }
        }
    }

    /// Bits of the cache's device rot, whether or not the scenario has it.
    pub(super) fn cache_rots_now(&mut self) {
        if self.cache_disk.bytes() == 0 {
            return;
        }
        for _ in 0..200 {
            let offset = self.random.u64(..self.cache_disk.bytes());
            let bit = self.random.u8(..);
            if self.cache_disk.rot(offset, bit) {
                self.engine
                    .note("cache rots", [offset, u64::from(bit % 8), 0, 0]);
                return;
            }
        }
    }

    fn cache_dies(&mut self) {
        if self.scenario.faults.cache_death && self.random.u8(..4) == 0 {
            self.engine.note("cache dies", [0; 4]);
            self.cache_dead = true;
        }
    }

    /// What is on the cache device belongs to nobody from now on.
    pub(super) fn give_cache_another_identity(&mut self) {
        self.engine.note("cache identity", [0; 4]);
        if let Some(ssd) = &mut self.scenario.cache.ssd {
            self.random.fill(&mut ssd.uuid);
        }
    }

    /// The node has recorded another identity of its cache, or could not.
    pub(super) fn cache_identity_recorded(&mut self) {
        if !self.cache_identity.is_recording() {
            // Of a node that has gone down.
            return;
        }
        let is_recorded = self.calm_since.is_some() || self.random.u8(..8) > 0;
        if is_recorded {
            self.give_cache_another_identity();
        }
        if self.cache_identity.recorded(self.engine.now(), is_recorded)
            && let Some(node) = &mut self.node
        {
            node.cache_mut().reset_recorded();
        }
        self.wake_for_cache();
    }

    /// What a node does for its cache in the background.
    pub(super) fn look_after_cache(&mut self) {
        let Some(node) = &self.node else {
            return;
        };
        let (must_reset, can_readmit) = (node.cache().must_reset(), node.cache().can_readmit());
        if self.cache_identity.go_on(self.engine.now(), must_reset) {
            let pause = Nanos::from_micros(self.random.u64(1..5000));
            self.engine.at(
                self.engine.now().plus(pause),
                Happening::CacheIdentityRecorded,
            );
        }
        let waited = self.readmission.next_wakeup();
        if self
            .readmission
            .go_on(self.engine.now(), can_readmit, CACHE_RETRY)
        {
            let pause = Nanos::from_micros(self.random.u64(1..5000));
            self.engine
                .at(self.engine.now().plus(pause), Happening::CacheProbed);
        } else if self.readmission.next_wakeup() != waited {
            self.wake_for_cache();
        }
    }

    /// Be there when that goes on.
    fn wake_for_cache(&mut self) {
        let next = [
            self.cache_identity.next_wakeup(),
            self.readmission.next_wakeup(),
        ];
        for at in next.into_iter().flatten() {
            self.engine.at(at.max(self.engine.now()), Happening::Tick);
        }
    }

    /// Ask for everything to be destaged.
    pub(super) fn destage_all(&mut self, unit: usize) -> Result<(), Violation> {
        if self.phase(unit) != Some(Phase::Open) {
            return Ok(());
        }
        self.engine.note("destage all", [unit as u64, 0, 0, 0]);
        let state = &mut self.units[unit];
        state.destage_all = Some(state.history.now() + 1);
        state.history.tick();
        self.step_volume(unit, Event::DestageAll)
    }

    fn reconfigure(&mut self, unit: usize) -> Result<(), Violation> {
        let mut config = self.units[unit].config.clone();
        scenario::draw_behaviour(&mut self.random, &mut config);
        self.engine.note(
            "reconfigure",
            [
                unit as u64,
                config.persist as u64,
                config.when_full as u64,
                0,
            ],
        );
        let state = &mut self.units[unit];
        // Until the step is over, a reply may come under either mode.
        let now = state.history.tick();
        state.durability.changed(config.persist, now);
        state.unpersisted_bytes_max = state
            .unpersisted_bytes_max
            .max(config.unpersisted_bytes_max);
        state.config = config.clone();
        self.step_volume(unit, Event::Reconfigure(config))
    }

    fn grow(&mut self, unit: usize) -> Result<(), Violation> {
        let sectors = self.units[unit].history.sectors();
        let holds_cut = self
            .volume(unit)
            .is_some_and(|volume| volume.cut() == Cut::Held);
        // Where volumes shrink as well, they grow as a node has them grow.
        let is_busy = self.scenario.resizes || holds_cut;
        let is_busy = is_busy || self.units[unit].is_stacked();
        if self.phase(unit) != Some(Phase::Open) || sectors > 200_000 || is_busy {
            return Ok(());
        }
        let more = self.random.u64(1..=256);
        let volume = self.volume(unit);
        if self.units[unit].backend.is_atomic() && !volume.is_some_and(Volume::backend_is_flushed) {
            // It would show half a generation; a node waits until it is whole.
            return Ok(());
        }
        self.resize(unit, sectors + more)
    }

    /// Change a volume's size: the backend grows before it and shrinks after it.
    pub fn resize(&mut self, unit: usize, sectors: u64) -> Result<(), Violation> {
        self.engine.note("resize", [unit as u64, sectors, 0, 0]);
        let bytes = sectors * SECTOR_BYTES as u64;
        let state = &mut self.units[unit];
        if sectors > state.history.sectors() {
            state.resize_backend(sectors);
        }
        self.step_volume(unit, Event::Resize { bytes })?;
        let state = &mut self.units[unit];
        if sectors < state.backend.sectors() {
            state.backend.resize(sectors);
        }
        self.check_commits(unit)?;
        let is = self
            .volume(unit)
            .map_or(bytes, |volume| volume.config().bytes);
        if is == bytes {
            return Ok(());
        }
        Err(Violation::new(
            "resize-ignored",
            format!("volume {unit} has {is} bytes after it was resized to {bytes}"),
        ))
    }
}

impl Io {
    /// A write or zeroing that a store is asked for.
    pub(super) const fn backend_write(volume: usize, op: OpId, offset: u64) -> Self {
        Self::BackendWrite {
            volume,
            op,
            offset,
            held: Vec::new(),
            plant: None,
        }
    }

    /// Whether it goes to the cache device.
    pub(super) fn is_of_cache(&self) -> bool {
        matches!(
            self,
            Self::DiskRead(DiskId::Cache, ..)
                | Self::DiskWrite {
                    disk: DiskId::Cache,
                    ..
                }
        )
    }

    /// The volume whose log it writes to.
    pub(super) fn log_written(&self) -> Option<usize> {
        match self {
            Self::DiskWrite {
                disk: DiskId::Log(unit),
                ..
            } => Some(*unit),
            _ => None,
        }
    }

    /// The volume whose backend it goes to.
    pub(super) fn backend(&self) -> Option<usize> {
        match self {
            Self::BackendRead(unit, ..)
            | Self::BackendNothing(unit)
            | Self::BackendWrite { volume: unit, .. }
            | Self::BackendFlush(unit, _)
            | Self::BackendExtents(unit, _)
            | Self::StackRead(unit) => Some(*unit),
            Self::DiskRead(..) | Self::DiskWrite { .. } | Self::LogSync(_) | Self::Keep(..) => None,
        }
    }
}
