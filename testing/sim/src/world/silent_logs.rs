//! Logs whose devices do not answer, for a time or for ever.

use hdcs_core::volume::WhenFull;

use super::{
    DiskId, Event, Happening, Io, Nanos, Owner, Phase, Plant, RequestError, SMALL_POOL_BYTES,
    Violation, Volume, VolumeConfig, Waiting, World, check_trouble,
};

impl Io {
    /// The volume whose log it reads or writes, on its device or beside it.
    pub(super) fn log(&self) -> Option<usize> {
        match self {
            Self::DiskRead(DiskId::Log(unit), ..)
            | Self::DiskWrite {
                disk: DiskId::Log(unit),
                ..
            }
            | Self::LogSync(unit)
            | Self::Keep(unit, _) => Some(*unit),
            _ => None,
        }
    }

    fn is_read_of_log(&self) -> bool {
        matches!(self, Self::DiskRead(DiskId::Log(_), ..))
    }
}

impl World {
    /// A log's device does not answer, for a while or until all is well.
    pub(super) fn log_falls_silent(&mut self, unit: usize) {
        if !self.scenario.faults.log_hang
            || self.units[unit].log_silent > self.engine.now()
            || self.random.u8(..8) > 0
        {
            return;
        }
        let patience = self.units[unit].config.log_answer_max.0;
        let pause = match self.random.u8(..4) {
            0 => Nanos(u64::MAX),
            1 => Nanos::from_micros(self.random.u64(100..10_000_000)),
            _ => Nanos(self.random.u64(patience / 2..patience * 2)),
        };
        self.engine.note("log silent", [unit as u64, pause.0, 0, 0]);
        self.units[unit].log_silent = self.engine.now().plus(pause);
        let state = &mut self.units[unit];
        state.log_hung = true;
        state.log_reads_only = pause.0 % 3 == 1;
        state.log_writes_hung |= !state.log_reads_only;
    }

    /// Whether a silence of the log's reads holds this effect back, too.
    pub(super) fn is_held_like_log_reads(&self, io: &Io) -> bool {
        io.is_read_of_log() || self.planted.is(Plant::ReadsHoldWrites)
    }

    /// The node starts: a log's device that did not answer may do so again.
    pub(super) fn revive_log(&mut self, unit: usize) {
        let is_silent = self.units[unit].log_silent > self.engine.now();
        if is_silent && self.random.bool() {
            self.units[unit].log_silent = Nanos(0);
        }
        let state = &mut self.units[unit];
        state.log_hung = state.log_silent > self.engine.now();
        state.log_writes_hung = state.log_hung && !state.log_reads_only;
        (state.log_told, state.log_writes_told) = (false, false);
    }

    /// All is well: what logs' devices have not answered they answer now.
    pub(super) fn end_silence_of_logs(&mut self) {
        for unit in 0..self.units.len() {
            if std::mem::take(&mut self.units[unit].log_silent) != Nanos(u64::MAX) {
                continue;
            }
            let theirs = self.in_flight.iter();
            let theirs = theirs.filter(|(_, one)| one.io.log() == Some(unit));
            let owed: Vec<u64> = theirs.map(|(&number, _)| number).collect();
            for number in owed {
                self.engine.after(Nanos(0), Happening::Io(number));
            }
        }
    }

    /// Whether a log's device has not answered what a volume asked of it that is closed.
    pub(super) fn owes_log_answers(&self, unit: usize) -> bool {
        let mut under_way = self.in_flight.values();
        under_way.any(|one| one.io.log() == Some(unit))
    }

    /// The volumes are closed: what a log's device has not answered it may still do, or not.
    pub(super) fn leave_silent_logs(&mut self) {
        for unit in 0..self.units.len() {
            self.note_closed_late(unit);
            if self.owes_log_answers(unit) {
                self.units[unit].log.process_kill();
                self.crash_keeping(unit);
            }
        }
    }

    /// A volume is closed. One that has let go of its log has closed it no better than a crash.
    pub(super) fn note_closed_late(&mut self, unit: usize) {
        let is_late = self.volume(unit).is_some_and(Volume::log_failed);
        if self.units[unit].log_hung && is_late {
            self.units[unit].log_trouble = true;
            self.coverage.late_closes += 1;
        }
    }

    /// Whether a log that is silent, or was, is a reason to fail a request. Slow reads are none to fail a write.
    pub(super) fn silent_log_excuses(&self, unit: usize, waiting: &Waiting) -> bool {
        let state = &self.units[unit];
        let is_told = state.config.when_full == WhenFull::Error;
        let is_open = self.phase(unit) == Some(Phase::Open);
        if matches!(waiting, Waiting::Write(..)) && is_open && !state.was_direct {
            // A log that has failed is emptied first, which slow reads hold up.
            let waits = state.log_writes_hung || state.log_trouble && state.log_hung;
            return state.log_writes_told || waits && is_told;
        }
        state.log_told || state.log_hung && (is_told || !is_open)
    }

    /// The same of writes that are refused before they reach the log.
    pub(super) fn silent_log_refuses(&self, unit: usize, error: RequestError) -> bool {
        let is_closing = self.phase(unit) != Some(Phase::Open);
        error == RequestError::ReadOnly && is_closing && self.units[unit].log_hung
    }

    /// What a volume is opened with, as planted bugs have it.
    pub(super) fn config_to_open(&self, unit: usize) -> VolumeConfig {
        let mut config = self.units[unit].config.clone();
        if self.planted.is(Plant::UnwatchedLog) {
            config.log_answer_max = Nanos(u64::MAX);
        }
        if self.planted.is(Plant::UntoldWaiters) {
            config.when_full = WhenFull::Wait;
        }
        config
    }

    /// A volume is asked to close; a planted bug has it wait for its log.
    pub(super) fn close_volume(&mut self, unit: usize, destage: bool) -> Result<(), Violation> {
        if self.planted.is(Plant::PatientClose) && self.phase(unit) == Some(Phase::Open) {
            let mut config = self.units[unit].config.clone();
            config.log_answer_max = Nanos(u64::MAX);
            self.step_volume(unit, Event::Reconfigure(config))?;
        }
        self.units[unit].is_leaving = true;
        self.tick();
        self.step_volume(unit, Event::Close { destage })
    }

    /// What must hold while a log's device does not answer.
    pub(super) fn check_silent_log(&mut self, unit: usize) -> Result<(), Violation> {
        if !self.scenario.faults.log_hang {
            return Ok(());
        }
        let Some(volume) = self.volume(unit) else {
            return Ok(());
        };
        let state = &self.units[unit];
        let max = state.config.log_answer_max;
        let (phase, health) = (volume.phase(), volume.state());
        // Of a log that was given up nothing is waited for but that the backend has it.
        let is_given_up = volume.log_is_given_up();
        let mut theirs = self.in_flight.values();
        let of_others = theirs.any(|one| one.io.is_of_cache() || one.io.backend() == Some(unit));
        let of_log = self
            .in_flight
            .values()
            .filter(|one| one.owner == Owner::Volume(unit) && one.io.log() == Some(unit));
        let since = of_log.map(|one| one.since).min();
        let age = since.map_or(Nanos(0), |since| self.engine.now().since(since));
        if age < max {
            return Ok(());
        }
        self.coverage.log_silent_rounds += 1;
        let writes = (self.in_flight.values())
            .filter(|one| one.owner == Owner::Volume(unit) && one.io.log() == Some(unit))
            .filter(|one| !one.io.is_read_of_log());
        let since = writes.map(|one| one.since).min();
        let writes_late = since.is_some_and(|since| self.engine.now().since(since) >= max);
        let state = &self.units[unit];
        if phase == Phase::Open {
            check_trouble::check_shown(unit, age, max, health)?;
        }
        let tells = state.config.when_full == WhenFull::Error && phase == Phase::Open;
        let is_told = tells && !is_given_up;
        // Then it is something else that is waited for.
        let waits_for_others = of_others || state.resizing.is_some() || !state.held.is_empty();
        if waits_for_others {
            self.note_told(unit, tells, is_told && writes_late);
            return Ok(());
        }
        // What was given up before is not what a close waits for.
        let of_log = (self.in_flight.values())
            .filter(|one| one.owner == Owner::Volume(unit) && one.io.log() == Some(unit));
        let newest = of_log.map(|one| one.since).max();
        let all_old = newest.is_some_and(|newest| self.engine.now().since(newest) >= max);
        // Where memory is short, reads wait for that, which others may hold.
        let is_tight = self.pool.total_bytes() <= SMALL_POOL_BYTES;
        let closes_late = all_old && phase == Phase::Closing && !is_tight;
        check_trouble::check_close(unit, age, closes_late)?;
        // Reads that meet that fail once all else has come, perhaps under another configuration.
        self.note_told(unit, tells, is_told && writes_late);
        let state = &self.units[unit];
        let waits = |what: &Waiting| matches!(what, Waiting::Write(..) | Waiting::Flush(_));
        check_trouble::check_told(
            unit,
            age,
            is_told && writes_late && state.requests.any(waits),
        )
    }

    /// Whoever waits for the log is told of an error: of reads also if it was given up, of writes not.
    fn note_told(&mut self, unit: usize, tells: bool, tells_writes: bool) {
        let state = &mut self.units[unit];
        state.log_told |= tells;
        state.log_writes_told |= tells_writes;
    }
}
