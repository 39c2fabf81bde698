//! A backend that is held as a tier has left it, for a snapshot: that is the state of one flush, not before the
//! one that was the last when it was asked for, and nothing else is written there until it is let go.

use fastrand::Rng;
use hdcs_core::local::{Event, LocalStore, TierState};

use super::Options;
use super::plant::Plant;
use super::world::StoreWorld;
use crate::content::{Content, mix};
use crate::violation::Violation;

/// Where a snapshot is. Its randomness is a stream of its own.
#[derive(Debug)]
pub(super) struct Holding {
    random: Rng,
    is_off: bool,
    /// What it may be at the earliest, among the states of flushes, while it is waited for.
    pub wanted_from: Option<usize>,
    /// What the backend holds.
    held: Option<Vec<Content>>,
}

impl Holding {
    pub fn new(seed: u64, options: Options) -> Self {
        Self {
            random: Rng::with_seed(mix(seed ^ mix(12))),
            // Other plants are found as they were before there were any.
            is_off: options.plant.is_some_and(|plant| !plant.is_of_holds()),
            wanted_from: None,
            held: None,
        }
    }

    /// Whether a snapshot is waited for, or made.
    pub fn is_asked_for(&self) -> bool {
        self.wanted_from.is_some() || self.held.is_some()
    }

    /// Nobody asks for anything any more.
    pub fn forget(&mut self) {
        (self.wanted_from, self.held) = (None, None);
    }
}

impl StoreWorld {
    pub(super) fn begin_tier(&mut self) {
        self.engine.note("tier", [0; 4]);
        self.note_tier();
        self.event(Event::Tier);
    }

    /// A tier is asked for.
    pub(super) fn note_tier(&mut self) {
        self.asked_from = self.moments.len() - 1;
        // A change of size may have asked for one before.
        let tier = self.home.as_ref().map(|home| home.status().tier);
        let is_of_size = !matches!(tier, None | Some(TierState::Idle | TierState::Held));
        if !self.tier_wanted && !is_of_size {
            self.moments_from = self.asked_from;
        }
        self.tier_wanted = true;
    }

    pub(super) fn cancel_tier(&mut self) {
        self.engine.note("cancel", [0; 4]);
        self.holding.forget();
        self.sizing.may_fail();
        self.event(Event::CancelTier);
        self.tier_wanted = self
            .home
            .as_ref()
            .is_some_and(|home| home.status().tier != TierState::Idle);
        self.coverage.tiers_given_up += u64::from(!self.tier_wanted);
    }

    /// Ask for a snapshot, or let the backend go after one, sometimes.
    pub(super) fn hold_or_release(&mut self) -> Result<(), Violation> {
        if self.holding.held.is_some() {
            if self.calm || self.holding.random.u8(..3) == 0 {
                return self.release();
            }
        } else if !self.calm && !self.holding.is_off && self.holding.random.u8(..5) == 0 {
            self.note_tier();
            self.holding.wanted_from = Some(self.asked_from);
            self.engine.note("hold", [self.asked_from as u64, 0, 0, 0]);
            self.sizing.may_fail();
            self.event(Event::TierAndHold);
            if self.is_planted(Plant::HeldBeforeTier) {
                return self.is_held(0);
            }
        }
        Ok(())
    }

    fn release(&mut self) -> Result<(), Violation> {
        self.engine.note("release", [0; 4]);
        let held = self.holding.held.take();
        if held.is_some_and(|held| held != self.backend_state()) {
            let why = "what the backend holds has changed".to_owned();
            return Err(Violation::new("held-changed", why));
        }
        self.event(Event::Release);
        // Another tier was asked for meanwhile.
        let status = self
            .home
            .as_ref()
            .map(LocalStore::status)
            .unwrap_or_default();
        self.tier_wanted = status.tier != TierState::Idle;
        Ok(())
    }

    /// A tier has ended with the state `found` of a flush.
    pub(super) fn may_be_held(&mut self, tier: TierState, found: usize) -> Result<(), Violation> {
        let is_held = tier == TierState::Held && self.holding.held.is_none();
        if is_held {
            return self.is_held(found);
        }
        self.holding.wanted_from = self
            .holding
            .wanted_from
            .map(|from| from.saturating_sub(found));
        Ok(())
    }

    fn is_held(&mut self, found: usize) -> Result<(), Violation> {
        let from = self.holding.wanted_from.take();
        if from.is_none_or(|from| found < from) {
            let why = format!("the state of flush {found} is held, and {from:?} was asked for");
            return Err(Violation::new("held-state", why));
        }
        self.check_backend("held-state", from.unwrap_or(0))?;
        self.coverage.holds += 1;
        self.holding.held = Some(self.backend_state());
        if self.is_planted(Plant::HeldAndWritten) {
            self.event(Event::Release);
            self.event(Event::Tier);
        }
        Ok(())
    }

    /// Something is written to the backend, or it is flushed.
    pub(super) fn backend_is_changed(&self) -> Result<(), Violation> {
        match self.holding.held {
            None => Ok(()),
            Some(_) => Err(Violation::new(
                "held-changed",
                "the backend is written while it is held".to_owned(),
            )),
        }
    }
}
