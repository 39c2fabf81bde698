//! Changes of policy, and what follows from the one in effect.

use super::{
    Ask, Event, FlushOp, Phase, Plant, Policy, Violation, Waiting, World, WriteId, check_policy,
};

impl World {
    fn draw_policy(&mut self) -> Policy {
        match self.random.u8(..10) {
            0..=3 => Policy::WriteBack,
            4 | 5 => Policy::WriteThrough,
            6 | 7 => Policy::WriteAround,
            8 => Policy::PassThrough,
            _ => Policy::ReadOnly,
        }
    }

    /// Somebody may have set another policy while the node was down.
    pub(super) fn set_policy_offline(&mut self, unit: usize) {
        if self.scenario.switches && self.calm_since.is_none() && self.random.bool() {
            let policy = self.draw_policy();
            self.engine
                .note("policy offline", [unit as u64, policy as u64, 0, 0]);
            self.units[unit].config.policy = policy;
        }
    }

    /// A client that comes back may go on with the flush that was not answered.
    pub(super) fn repeat_flush(&mut self, unit: usize) {
        if self.scenario.switches && self.random.bool() {
            self.units[unit].postponed = Some(Ask::Flush);
        }
    }

    /// Somebody sets another policy.
    pub(super) fn switch_policy(&mut self, unit: usize) -> Result<(), Violation> {
        let mut config = self.units[unit].config.clone();
        config.policy = self.draw_policy();
        self.engine
            .note("policy", [unit as u64, config.policy as u64, 0, 0]);
        let state = &mut self.units[unit];
        let now = state.history.tick();
        if config.policy == Policy::ReadOnly {
            state.read_only_since.get_or_insert(now);
        } else if state.read_only_since.take().is_some() {
            state.read_only_until = self.engine.now().0;
        }
        state.was_direct |= config.policy.is_direct();
        state.config = config.clone();
        self.step_volume(unit, Event::Reconfigure(config))
    }

    /// Writes may go past the log from now on, or no longer.
    pub(super) fn notice_policy(&mut self, unit: usize) -> Result<(), Violation> {
        let Some(volume) = self.volume(unit) else {
            return Ok(());
        };
        if !matches!(volume.phase(), Phase::Open | Phase::Closing) {
            return Ok(());
        }
        let (asked, is) = (volume.config().policy, volume.policy());
        let is_hasty = self.planted.is(Plant::HastySwitch) && asked.is_direct();
        let is_direct = is.is_direct() || is_hasty;
        let state = &mut self.units[unit];
        if is_direct == state.history.is_direct() {
            return Ok(());
        }
        if is_direct {
            self.coverage.switches += 1;
            state.was_direct = true;
            let backend = &state.backend;
            check_policy::check_begun(&state.history, |sector| backend.durable(sector))?;
        }
        state.history.set_direct(is_direct);
        self.engine
            .note("policy in effect", [unit as u64, is as u64, 0, 0]);
        Ok(())
    }

    /// A write is acknowledged.
    pub(super) fn check_written(
        &mut self,
        unit: usize,
        id: WriteId,
        fua: bool,
    ) -> Result<(), Violation> {
        let state = &self.units[unit];
        check_policy::check_writable(&state.history, id, state.read_only_since)?;
        if !state.history.write(id).direct {
            return Ok(());
        }
        self.coverage.direct_writes += 1;
        let backend = &state.backend;
        if fua {
            return check_policy::check_written(&state.history, id, |sector| {
                backend.durable(sector)
            });
        }
        check_policy::check_written(&state.history, id, |sector| backend.visible(sector))
    }

    /// A flush is acknowledged.
    pub(super) fn check_flushed(&self, unit: usize, flush: FlushOp) -> Result<(), Violation> {
        let Some(state) = self.units.get(unit) else {
            return Ok(());
        };
        let backend = &state.backend;
        check_policy::check_flushed(&state.history, flush, |sector| backend.durable(sector))
    }

    /// Whether a flush of the backend would be one that direct writes wait for after the policy is
    /// write-back again.
    pub(super) fn is_flush_after_return(&self, unit: usize) -> bool {
        let history = &self.units[unit].history;
        !history.is_direct() && history.direct_acked_before(history.now()).next().is_some()
    }

    /// A flush of the backend has failed: whether a planted bug has only those told who wait for it. Others whose
    /// writes it has lost are the volume itself, for its destage.
    pub(super) fn hides_failed_flush(&mut self, unit: usize) -> bool {
        let destages = self.volume(unit).is_some_and(|v| !v.backend_is_flushed());
        let waits = self.units[unit]
            .requests
            .any(|waiting| matches!(waiting, Waiting::Flush(_)));
        if !destages || !waits || !self.planted.strikes(Plant::UndoubtedFlush) {
            return false;
        }
        let state = &mut self.units[unit];
        state.flush_failed = state.history.tick();
        true
    }
}
