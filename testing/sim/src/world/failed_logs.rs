//! Logs whose devices die, and what is kept of them elsewhere.

use hdcs_core::format::LogSuperblock;
use hdcs_core::volume::LogFailure;

use super::{
    Buf, DiskId, Done, Happening, Io, IoError, Nanos, Phase, Plant, Trouble, Unit, Violation,
    Volume, World,
};

impl World {
    /// A log's device takes nothing any more until the node starts again, and perhaps gives nothing.
    pub(super) fn log_dies(&mut self, unit: usize) {
        if !self.scenario.faults.log_death
            || self.units[unit].log_dead.is_some()
            || self.random.u8(..16) > 0
        {
            return;
        }
        let is_mute = self.random.u8(..4) == 0;
        self.engine
            .note("log dies", [unit as u64, u64::from(is_mute), 0, 0]);
        self.units[unit].log_dead = Some(is_mute);
    }

    /// Whether the device of some log has died.
    pub fn has_dead_log(&self) -> bool {
        self.units.iter().any(|unit| unit.log_dead.is_some())
    }

    /// Whether a write that the device says has failed has reached it all the same.
    pub(super) fn reached_dead_log(&mut self, disk: DiskId) -> bool {
        let DiskId::Log(unit) = disk else {
            return false;
        };
        self.units[unit].log_dead.is_some() && self.random.bool()
    }

    /// Nothing is written to a log that its volume has given up.
    pub(super) fn check_log_is_used(&self, unit: usize) -> Result<(), Violation> {
        let trouble = self.volume(unit).and_then(Volume::trouble);
        match trouble {
            Some((Trouble::LogEmptying | Trouble::LogGivenUp, _)) => Err(Violation::new(
                "failed-log-written",
                format!("volume {unit} writes to its log, which it has given up"),
            )),
            _ => Ok(()),
        }
    }

    /// Whether the log's device is a reason for a volume to fail requests: not if it can go on without.
    pub(super) fn log_excuses(&self, unit: usize) -> bool {
        let state = &self.units[unit];
        let goes_on = state.config.log_failure == LogFailure::PassThrough
            && !state.log_stuck
            && !state.log_rotten
            && self.phase(unit) == Some(Phase::Open);
        state.log_trouble && !goes_on
    }

    pub(super) fn superblock_was_kept(
        &mut self,
        unit: usize,
        block: &Buf,
        fails: Option<IoError>,
    ) -> Result<Done, IoError> {
        let superblock = LogSuperblock::parse(block).expect("a superblock is kept");
        if let Some(error) = fails {
            if self.random.bool() {
                self.units[unit].kept = Some(superblock);
            }
            return Err(error);
        }
        if self.planted.strikes(Plant::LateKeeping) {
            let late = Nanos(self.random.u64(..500_000_000));
            self.engine
                .at(self.engine.now().plus(late), Happening::LateKeep(unit));
            self.units[unit].kept_late = Some(superblock);
            return Ok(Done::Written);
        }
        if !self.planted.strikes(Plant::LostKeeping) {
            self.units[unit].kept = Some(superblock);
        }
        self.coverage.kept_superblocks += 1;
        Ok(Done::Written)
    }

    /// A crash finds a superblock on its way: it is kept, or what was before.
    pub(super) fn crash_keeping(&mut self, unit: usize) {
        self.units[unit].kept_late = None;
        let keeps = |io: &Io| match io {
            Io::Keep(of, block) if *of == unit => LogSuperblock::parse(block).ok(),
            _ => None,
        };
        let under_way = self.in_flight.values().find_map(|one| keeps(&one.io));
        if let Some(superblock) = under_way
            && self.random.bool()
        {
            self.units[unit].kept = Some(superblock);
        }
    }

    /// A volume is about to be opened; a planted bug looks at its log's device alone.
    pub(super) fn forget_kept(&mut self, unit: usize) {
        if self.planted.strikes(Plant::StaleLog) {
            self.units[unit].kept = None;
        }
    }
}

impl Unit {
    /// The node, or the volume, has gone. Of what a failed log was to bring to the backend, that may have a part
    /// which no replay completes.
    pub(super) fn end_epoch(&mut self) {
        self.history.crash();
        if self.log_trouble && self.config.log_failure == LogFailure::PassThrough {
            self.history.mix();
        }
    }
}
