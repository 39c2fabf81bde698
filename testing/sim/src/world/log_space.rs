//! The space of write logs: it is prepared late, or not at all, taken back when a log is at rest, and found as it is by
//! the next opening, wherever a crash has cut in.
//!
//! Checked are: no span is written beyond what is prepared, what a volume takes for prepared is, and nothing is given back
//! that an opening would replay from either superblock.

use fastrand::Rng;
use hdcs_core::base::limits::LOG_BYTES_MIN;
use hdcs_core::format::LOG_SHARES_SPACE;
use hdcs_core::volume::sharing::{self, GivenBack};

use super::{
    BLOCK_BYTES, Happening, LOG_HEADER_BLOCKS, LogSuperblock, Nanos, Phase, Plant, Scenario,
    Stream, Unit, Violation, Volume, World, check_log,
};

/// What of a log's region is prepared, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogSpace {
    /// It changes.
    shares: bool,
    /// What an opening would find.
    found: u64,
    /// What the volume may use.
    usable: u64,
    /// Up to where more is being prepared.
    growing: Option<u64>,
}

impl LogSpace {
    /// All of a region.
    pub(super) fn whole(bytes: u64) -> Self {
        Self {
            shares: false,
            found: bytes,
            usable: bytes,
            growing: None,
        }
    }

    /// That of a new log of a scenario.
    pub(super) fn of(scenario: &Scenario, bytes: u64) -> Self {
        if !scenario.log_space {
            return Self::whole(bytes);
        }
        Self {
            shares: true,
            found: LOG_BYTES_MIN,
            usable: LOG_BYTES_MIN,
            growing: None,
        }
    }
}

/// The first block of a new log that shares space: it says so, and the log begins somewhere near the end of what is
/// prepared, so that it goes on with its next lap soon.
pub(super) fn begin_late(
    scenario: &Scenario,
    index: u64,
    block: &[u8; BLOCK_BYTES],
) -> [u8; BLOCK_BYTES] {
    if !scenario.log_space {
        return *block;
    }
    let mut random = Rng::with_seed(Stream::LogSpace.seed_of(scenario.seed, 1 + index));
    let mut superblock = LogSuperblock::parse(block).expect("a new log's superblock is good");
    superblock.flags = (superblock.flags.get() | LOG_SHARES_SPACE).into();
    if random.u8(..4) > 0 {
        let least = LOG_BYTES_MIN / BLOCK_BYTES as u64 - LOG_HEADER_BLOCKS;
        let position = random
            .u64(least - 900..least + 100)
            .min(superblock.ring_blocks.get());
        superblock.tail = position.into();
        superblock.clean_head = position.into();
    }
    superblock.seal();
    zerocopy::transmute!(superblock)
}

impl World {
    /// A volume is about to be opened: what is under way for its log has ended, or a crash has cut it off.
    pub(super) fn find_log_space(&mut self, unit: usize) -> u64 {
        let Unit { log, space, .. } = &mut self.units[unit];
        if let Some(to) = space.growing.take() {
            // Zeroes are written in order, and what was written is taken.
            let blocks = (to - space.usable) / BLOCK_BYTES as u64;
            let to = space.usable + self.random.u64(..=blocks) * BLOCK_BYTES as u64;
            log.punch(space.usable);
            space.found = space.found.max(to);
        }
        space.usable = space.found;
        space.found
    }

    /// Space of a log comes and goes.
    pub(super) fn change_log_space(&mut self, unit: usize) -> Result<(), Violation> {
        let space = self.units[unit].space;
        if !space.shares || space.growing.is_some() || self.phase(unit) != Some(Phase::Open) {
            return Ok(());
        }
        let block = BLOCK_BYTES as u64;
        let all = self.units[unit].log.bytes();
        if self.random.bool() {
            let more = (all - space.usable) / block;
            if more == 0 {
                return Ok(());
            }
            let to = space.usable + self.random.u64(1..=more.min(1024)) * block;
            let late = if self.random.u8(..4) == 0 {
                3_000_000
            } else {
                20_000
            };
            let pause = Nanos::from_micros(self.random.u64(1..late));
            self.engine.note("log grows", [unit as u64, to, pause.0, 0]);
            self.units[unit].space.growing = Some(to);
            let at = self.engine.now().plus(pause);
            self.engine.at(at, Happening::LogPrepared(unit));
            if self.planted.is(Plant::HastyPreparation) {
                self.tell_prepared(unit, to);
            }
            return Ok(());
        }
        let blocks = (space.usable - LOG_BYTES_MIN) / block;
        let to = LOG_BYTES_MIN + self.random.u64(..=blocks) * block;
        let Some(volume) = self.volume_mut(unit) else {
            return Ok(());
        };
        let given = sharing::give_log_back(volume, to);
        match given {
            GivenBack::Yes => {
                self.engine.note("log gives back", [unit as u64, to, 0, 0]);
                self.coverage.log_gifts += u64::from(to < space.usable);
                self.units[unit].space.usable = to;
                // A crash may come before the hole is made; else nothing is under way there.
                if self.random.u8(..4) > 0 {
                    self.make_hole(unit, to)?;
                }
            }
            GivenBack::Soon if self.planted.is(Plant::HastyGift) => {
                self.make_hole(unit, LOG_BYTES_MIN)?;
            }
            GivenBack::Soon => self.tick(),
            GivenBack::No => {}
        }
        Ok(())
    }

    fn make_hole(&mut self, unit: usize, from: u64) -> Result<(), Violation> {
        let Unit { log, space, .. } = &mut self.units[unit];
        // Reads that an opening did not need may go on.
        if log.writes_from(from) {
            return Err(Violation::new(
                "log-hole-in-use",
                format!("the log of volume {unit} has given back what is being written"),
            ));
        }
        let needed = check_log::needed_until(log);
        if needed > from {
            return Err(Violation::new(
                "log-hole-needed",
                format!(
                    "the log of volume {unit} has given back all from {from} on, and is needed up to {needed}"
                ),
            ));
        }
        log.punch(from);
        space.found = from;
        Ok(())
    }

    /// More of a log is prepared, or there was no space for it.
    pub(super) fn log_was_prepared(&mut self, unit: usize) {
        let Some(to) = self.units[unit].space.growing.take() else {
            // The volume was closed meanwhile.
            return;
        };
        let fails = self.random.u8(..4) == 0;
        let usable = self.units[unit].space.usable;
        self.engine
            .note("log prepared", [unit as u64, to, u64::from(fails), 0]);
        let state = &mut self.units[unit];
        state.log.punch(usable);
        state.space.found = usable;
        if fails {
            return;
        }
        state.space.found = to;
        state.space.usable = to;
        self.coverage.log_growths += 1;
        self.tell_prepared(unit, to);
    }

    fn tell_prepared(&mut self, unit: usize, to: u64) {
        if let Some(volume) = self.volume_mut(unit) {
            sharing::set_log_prepared(volume, to);
        }
        self.tick();
    }

    fn volume_mut(&mut self, unit: usize) -> Option<&mut Volume> {
        self.node.as_mut()?.volumes.get_mut(unit)
    }

    /// Check a write to a log.
    pub(super) fn check_log_space(
        &self,
        unit: usize,
        offset: u64,
        bytes: u64,
    ) -> Result<(), Violation> {
        let usable = self.units[unit].space.usable;
        if offset + bytes <= usable {
            return Ok(());
        }
        Err(Violation::new(
            "log-write-unprepared",
            format!(
                "{bytes} bytes at {offset} of the log of volume {unit}, of which {usable} are prepared"
            ),
        ))
    }

    /// Check what a volume takes for prepared.
    pub(super) fn check_prepared(&self, unit: usize, volume: &Volume) -> Result<(), Violation> {
        let usable = self.units[unit].space.usable;
        match sharing::log_bytes(volume) {
            Some(log) if log.prepared > usable => Err(Violation::new(
                "log-prepared-unknown",
                format!(
                    "volume {unit} uses {} bytes of its log, and {usable} are prepared",
                    log.prepared
                ),
            )),
            _ => Ok(()),
        }
    }
}
