//! Tiering out what a volume in storage mode has dirty: the log is destaged into the home, then the home
//! tiers out. A volume in cache mode is destaged, and that is all.

use hdcs_backend::Port;
use hdcs_backend::home::Tiers;
use hdcs_core::local::{TierState, Verified};
use hdcs_core::volume::{Event, Trouble};
use hdcs_device::ring::Owner;
use hdcs_frontend::VolumeNumber;

use super::command::Answer;
use super::served::Tiering;
use super::works::Works;

impl Works {
    /// Begin to destage and to tier out everything that is dirty now.
    pub fn begin_tiering(&mut self, number: VolumeNumber, then_close: bool) -> Result<(), String> {
        let slot = self.open_slot(number)?;
        if let Some(served) = self.volumes.get_mut(slot)
            && served.home().is_some()
        {
            let before = served.tiering.take();
            served.tiering = Some(Tiering {
                asked: false,
                then_close: then_close || before.is_some_and(|before| before.then_close),
            });
        }
        self.step(slot, Event::DestageAll);
        Ok(())
    }

    /// Tier everything out before a volume is closed; false if it has no home, or is not open.
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
        let cancelled = served.tiering.take_if(|tiering| !tiering.then_close);
        if cancelled.is_some() {
            self.ask_home(slot, Tiers::Cancel);
        }
    }

    pub(super) fn ask_home(&mut self, slot: u32, ask: Tiers) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let mut port = Port {
            ring: &mut self.ring,
            owner: Owner::Backend(slot),
            done: &mut self.completions,
        };
        served.backend.tier(self.now, ask, &mut port);
        self.perform(slot);
    }

    /// Compare a piece of a home with its checksums.
    pub fn verify_home(&mut self, number: VolumeNumber, block: u64, answer: Answer<Verified>) {
        let slot = match self.open_slot(number) {
            Ok(slot) => slot,
            Err(error) => {
                // Whoever asked may have gone.
                let _ = answer.send(Err(error));
                return;
            }
        };
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let mut port = Port {
            ring: &mut self.ring,
            owner: Owner::Backend(slot),
            done: &mut self.completions,
        };
        let now = self.now;
        served.backend.verify_home(now, block, answer, &mut port);
        self.perform(slot);
    }

    /// The next step of tiering out.
    pub fn go_on_tiering(&mut self, slot: u32) {
        let Some(served) = self.volumes.get_mut(slot) else {
            return;
        };
        let (stats, home) = (served.volume.stats(self.now), served.home());
        let (Some(tiering), Some(home)) = (&mut served.tiering, home) else {
            return;
        };
        let log_is_silent = matches!(served.volume.trouble(), Some((Trouble::LogSilent, _)));
        if tiering.then_close && log_is_silent {
            // What is to be destaged first cannot be had: a close does not wait for it.
            served.tiering = None;
            self.ask_home(slot, Tiers::Cancel);
            return self.step(slot, Event::Close { destage: true });
        }
        if !tiering.asked {
            if stats.destage_all_remaining_bytes == 0 {
                tiering.asked = true;
                self.ask_home(slot, Tiers::Begin);
            }
            return;
        }
        if home.tier == TierState::Waiting
            && stats.destage_all_remaining_bytes == 0
            && served.volume.owes_flush()
        {
            // Its moment is one that a flush leaves, and for what went past the log since nobody else need ask for
            // one for long.
            return self.step(slot, Event::DestageAll);
        }
        if home.tier != TierState::Idle {
            return;
        }
        let then_close = tiering.then_close;
        served.tiering = None;
        if !then_close {
            return;
        }
        if let Some(error) = home.failed {
            for answer in served.closing.drain(..) {
                let why = format!("its home failed ({error}) and cannot be tiered out");
                // Whoever asked may have gone.
                let _ = answer.send(Err(why));
            }
        } else if stats.log_used_blocks > 0 || home.dirty_bytes + home.zero_bytes > 0 {
            // What came in before its connections were closed.
            served.tiering = Some(Tiering {
                asked: false,
                then_close,
            });
            self.step(slot, Event::DestageAll);
        } else {
            self.step(slot, Event::Close { destage: true });
        }
    }
}
