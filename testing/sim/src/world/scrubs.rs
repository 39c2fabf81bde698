//! Scrubs, beside everything else and at the end of a run.
//!
//! Checker: what a scrub has passed without a word is good. After one of everything, with nothing going wrong
//! any more, no read finds a bad block of the cache, nor one of the log unless the scrub said that data is
//! damaged.

use hdcs_core::base::io::Reply;
use hdcs_core::node::scrub::{ScrubAt, Scrubbed};

use super::{Event, Happening, Nanos, Phase, Plant, Request, Violation, Waiting, World};

/// Between two pieces.
const PAUSE: Nanos = Nanos::from_micros(100);

/// How far the scrub of a volume is.
#[derive(Debug, Default)]
pub(super) struct Progress {
    running: bool,
    damaged: bool,
    /// Bad blocks of the cache and of the log that were met when all had ended.
    met: (u64, u64),
}

impl Progress {
    /// The node is gone.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}

impl World {
    /// Scrub a volume from the beginning, unless that is being done.
    pub fn begin_scrub(&mut self, unit: usize) {
        let scrub = &mut self.units[unit].scrub;
        if self.scenario.scrubs && !scrub.running {
            scrub.running = true;
            scrub.damaged = false;
            let at = self.engine.now().plus(PAUSE);
            self.engine.at(at, Happening::Scrub(unit, ScrubAt::LOG));
        }
    }

    /// The next piece.
    pub(super) fn scrub(&mut self, unit: usize, at: ScrubAt) -> Result<(), Violation> {
        if !self.units[unit].scrub.running {
            return Ok(());
        }
        if self.phase(unit) != Some(Phase::Open) {
            self.units[unit].scrub.running = false;
            return Ok(());
        }
        let id = self.units[unit]
            .requests
            .sent(self.engine.now(), Waiting::Scrub(at));
        self.engine.note("ask scrub", [id.0, unit as u64, 0, 0]);
        if self.planted.strikes(Plant::IdleScrub) {
            let found = Reply::Scrubbed(Scrubbed::default());
            return self.replied(unit, id, Ok(found));
        }
        let request = Request::Scrub { at };
        self.step_volume(unit, Event::Request { id, request })
    }

    /// A piece was scrubbed.
    pub(super) fn scrubbed(&mut self, unit: usize, at: ScrubAt, found: Scrubbed) {
        let scrub = &mut self.units[unit].scrub;
        scrub.damaged |= found.damaged.is_some();
        self.coverage.scrub_healed += found.healed_blocks;
        let next = match (found.next, at) {
            (Some(next), _) => next,
            (None, ScrubAt::Log { .. }) => ScrubAt::CACHE,
            (None, _) => {
                self.coverage.scrubs += 1;
                self.units[unit].scrub.running = false;
                return;
            }
        };
        let at = self.engine.now().plus(PAUSE);
        self.engine.at(at, Happening::Scrub(unit, next));
    }

    /// A piece was refused: the volume is leaving.
    pub(super) fn scrub_refused(&mut self, unit: usize) {
        self.units[unit].scrub.running = false;
    }

    fn bad_blocks_met(&self, unit: usize) -> (u64, u64) {
        let node = self.node.as_ref();
        let cache = node.map_or(0, |node| node.cache().stats().corrupt_blocks);
        let volume = self.volume(unit);
        (
            cache,
            volume.map_or(0, |volume| {
                volume.stats(self.engine.now()).log_corrupt_blocks
            }),
        )
    }

    /// Whether runs of this scenario are scrubbed.
    pub fn has_scrubs(&self) -> bool {
        self.scenario.scrubs
    }

    /// Whether the SSD tier gets all that it takes before the last one.
    pub fn fills_before_scrub(&self) -> bool {
        self.scenario.fills_before_scrub
    }

    /// Whether no scrub is under way.
    pub fn is_scrubbed(&self) -> bool {
        self.units.iter().all(|unit| !unit.scrub.running)
    }

    /// All scrubs have ended: what they have met is past.
    pub fn note_scrubbed(&mut self) {
        for unit in 0..self.units.len() {
            self.units[unit].scrub.met = self.bad_blocks_met(unit);
        }
    }

    /// Let the cache's device rot once more.
    pub fn rot(&mut self) {
        for _ in 0..64 {
            self.cache_rots_now();
        }
    }

    /// Everything was read since it was scrubbed.
    pub fn check_scrubbed(&self) -> Result<(), Violation> {
        for unit in 0..self.units.len() {
            let (cache, log) = self.bad_blocks_met(unit);
            let scrub = &self.units[unit].scrub;
            // A device that has lied may have done so since.
            let lied = self.cache_disk.told().is_some();
            if (cache > scrub.met.0 && !lied) || (log > scrub.met.1 && !scrub.damaged) {
                let message = format!(
                    "volume {unit}: reads have met {} bad blocks of the cache and {} of the log after a scrub",
                    cache - scrub.met.0,
                    log - scrub.met.1
                );
                return Err(Violation::new("scrub-missed", message));
            }
        }
        Ok(())
    }
}
