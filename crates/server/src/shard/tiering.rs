//! Tiering out what a volume in storage mode has dirty: performs what [`TierOut`] decides.

use hdcs_backend::home::Tiers;
use hdcs_core::local::Verified;
use hdcs_core::node::tier_out::{Act, Ending, TierOut, View};
use hdcs_core::volume::Event;
use hdcs_frontend::VolumeNumber;

use super::command::Answer;
use super::state::ShardState;

impl ShardState {
    /// Begin to destage and to tier out everything that is dirty now.
    pub fn begin_tiering(&mut self, number: VolumeNumber, then_close: bool) -> Result<(), String> {
        let slot = self.open_slot(number)?;
        if let Some(served) = self.volumes.get_mut(slot)
            && let Some(local) = served.home()
        {
            if let Some(error) = local.failed
                && !then_close
            {
                return Err(format!(
                    "its local store failed ({error}), so nothing can be tiered out: put its device right and restart \
                     the daemon"
                ));
            }
            served.tier_out = Some(TierOut::begin(then_close, served.tier_out));
        }
        self.step(slot, Event::DestageAll);
        Ok(())
    }

    /// Tier everything out before a volume is closed; false if it has no local store, or is not open.
    pub fn tier_and_close(&mut self, number: VolumeNumber) -> bool {
        let slot = self.open_slot(number).ok();
        let served = slot.and_then(|slot| self.volumes.get(slot));
        served.is_some_and(|served| served.home().is_some())
            && self.begin_tiering(number, true).is_ok()
    }

    /// Stop tiering out, unless the volume is being closed.
    pub fn cancel_tiering(&mut self, number: VolumeNumber) {
        let Ok(slot) = self.open_slot(number) else {
            return;
        };
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let cancelled = served.tier_out.take_if(|one| !one.then_closes());
        if cancelled.is_some() {
            self.ask_home(slot, Tiers::Cancel);
        }
    }

    pub(super) fn ask_home(&mut self, slot: u32, ask: Tiers) {
        let now = self.now;
        let Some((served, mut port)) = self.backend_of(slot) else {
            return;
        };
        served.backend.tier(now, ask, &mut port);
        self.perform(slot);
    }

    /// Compare a piece of a local store with its checksums.
    pub fn verify_home(&mut self, number: VolumeNumber, block: u64, answer: Answer<Verified>) {
        let slot = match self.open_slot(number) {
            Ok(slot) => slot,
            Err(error) => {
                // Whoever asked may have gone.
                let _ = answer.send(Err(error));
                return;
            }
        };
        let now = self.now;
        let Some((served, mut port)) = self.backend_of(slot) else {
            return;
        };
        served.backend.verify_home(now, block, answer, &mut port);
        self.perform(slot);
    }

    /// The next step of tiering out.
    pub fn go_on_tiering(&mut self, slot: u32) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let (stats, local) = (served.volume.stats(self.now), served.home());
        let (Some(tier_out), Some(local)) = (&mut served.tier_out, local) else {
            return;
        };
        let act = tier_out.go_on(&View {
            destage_left_bytes: stats.destage_all_remaining_bytes,
            log_used_blocks: stats.log_used_blocks,
            owes_flush: served.volume.owes_flush(),
            log_is_stuck: served.volume.log_is_stuck(),
            local,
        });
        match act {
            None => {}
            Some(Act::Begin) => self.ask_home(slot, Tiers::Begin),
            Some(Act::DestageAll) => self.step(slot, Event::DestageAll),
            Some(Act::End(ending)) => self.end_tiering(slot, ending),
        }
    }

    fn end_tiering(&mut self, slot: u32, ending: Ending) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        served.tier_out = None;
        match ending {
            Ending::Done => {}
            Ending::Close => self.step(slot, Event::Close { destage: true }),
            Ending::CancelAndClose => {
                self.ask_home(slot, Tiers::Cancel);
                self.step(slot, Event::Close { destage: true });
            }
            Ending::Failed(error) => {
                for answer in served.closing.drain(..) {
                    let why = format!("its local store failed ({error}) and cannot be tiered out");
                    // Whoever asked may have gone.
                    let _ = answer.send(Err(why));
                }
            }
        }
    }
}
