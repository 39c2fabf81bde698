//! How a local store goes: the power or the process, at any moment; or the process some time after writes past the log
//! that nobody has flushed. Of these, what was acknowledged is still there, as it would be in a raw file.

use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::HOME_UNCOMMITTED_AGE_MS;
use hdcs_core::local::LocalStore;

use super::StoreWorld;
use crate::home::plant::Plant;
use crate::home::sums::LostLog;
use crate::violation::Violation;

/// So long after the last write the process is killed: a commit may be under way before the one that has all.
const LINGERS: Nanos = Nanos::from_millis(3 * HOME_UNCOMMITTED_AGE_MS);

impl StoreWorld {
    /// The power goes, or the process; perhaps the log as well, and the backend's host.
    pub(super) fn crash(&mut self) {
        let is_killed = self.random.u8(..4) == 0;
        self.die(is_killed);
        if !self.generation.is_empty() && self.random.u8(..4) == 0 {
            match self.sums.how_log_is_lost() {
                LostLog::Not => return,
                LostLog::WritesPastIt => self.sums.is_log_whole = false,
                LostLog::AsAWhole => self.log += 1,
            }
            self.is_log_lost = true;
        }
    }

    /// The local store is gone, and what the store had not made durable with it, unless only the process was killed.
    fn die(&mut self, is_killed: bool) {
        if let Some(home) = self.home.take() {
            self.coverage.fills += home.status().filled_blocks;
            self.coverage.waits += home.status().waited_writes;
        }
        self.coverage.crashes += 1;
        self.sums.late.clear();
        self.holding.forget();
        self.requests.clear();
        self.engine.retain(|_| false);
        self.actions.clear();
        if is_killed {
            self.store.process_kill();
        } else {
            self.store.power_cut();
        }
        self.sizing_crashed(is_killed);
        match self.random.u8(..3) {
            0 => self.backend.power_cut(),
            _ => self.backend.client_lost(),
        }
        self.backend.client_lost();
        self.engine.note("crash", [0; 4]);
    }

    /// Whether the writes of this generation went past the log, and the process is killed before anybody flushes.
    pub(super) fn lingers(&mut self) -> bool {
        let may = !self.calm
            && !self.faults
            && self.options.crash_at.is_none()
            && !self.sums.may_rot()
            && self.sizing.is_settled();
        may && self.choices.u8(..24) == 0
    }

    /// Let time pass after a generation that is written and not flushed, then kill the process. The local store is gone
    /// then.
    pub(super) fn linger_and_be_killed(&mut self) -> Result<(), Violation> {
        let until = self.engine.now().plus(LINGERS);
        if self.is_planted(Plant::SleepsThrough) {
            self.engine.pass_until(until);
        } else {
            let rests = |home: &LocalStore| home.next_wakeup().is_none();
            let is_over = |world: &Self| {
                let rests = world.home.as_ref().is_none_or(rests);
                world.engine.now() >= until || rests && world.engine.next_time().is_none()
            };
            if !self.wait(is_over)? {
                return Ok(());
            }
        }
        for write in std::mem::take(&mut self.generation) {
            for sector in write.range.start..write.range.end() {
                self.base[(sector - self.window.start) as usize] = write.content;
            }
        }
        self.moments.push(self.base.clone());
        self.coverage.lingered += 1;
        self.sums.is_log_whole = false;
        self.die(true);
        Ok(())
    }
}
