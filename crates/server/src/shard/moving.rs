//! A volume leaves this shard for another one, and its connections follow it.
//!
//! ```text
//!           Depart                 nothing is under way              closed
//!  serving ───────▶ held (Waits) ────────────────────▶ closing ───────────▶ gone, its connections wait ── Follow ─▶
//!     ▲                  │ too late, closed, or the node stops                 for where it is opened        they go
//!     └──────────────────┘                                                                                   there
//! ```
//!
//! Invariants:
//! 1. While it is held no client's request is taken, and none is lost: what has come waits in its session, the rest in its
//!    socket.
//! 2. The volume is closed only when every request was answered and nothing of it seems to hang, and without destage: what
//!    it has in its log is there where it is opened.
//! 3. A connection waits until it is said where the volume is, and ends if that is nowhere.
//! 4. What was reserved of memory for it goes along, so that it is neither counted twice nor taken by another volume.
//! 5. What the cache of this shard has of the volume in DRAM is forgotten when the volume goes: it may change elsewhere
//!    before it comes back.
//!
//! Failure: a volume whose requests do not end in time goes on here. From when it closes there is no way back; whoever
//! moves it opens it elsewhere, and says [`Command::Follow`] in any case.
//!
//! [`Command::Follow`]: super::command::Command::Follow

use std::sync::Arc;

use hdcs_core::base::io::Nanos;
use hdcs_core::volume::{Event, Phase, sharing};
use hdcs_frontend::{Ending, OpeningId, VolumeNumber};

use super::command::{Answer, Departed};
use super::control::{NOT_OPEN, STOPPING, tell};
use super::directory::Whereabouts;
use super::handover::Station;
use super::served::Served;
use super::state::ShardState;
use super::turn::{NEVER, Shard};

/// Why a volume stays.
const TOO_SLOW: &str = "what is under way did not end in time, requests of its clients or operations of its backend \
                        and its devices, so it stays where it is: see `hdcs volume show` for what it waits for, and move \
                        it again";
/// Operations that are older than this may hang, and a close would wait for them: there is no way back from it.
const OPERATION_AGE_MAX: Nanos = Nanos::from_millis(1_000);
const WAS_CLOSED: &str = "it was closed";

/// A volume on its way out.
#[derive(Debug)]
pub struct Departing {
    until: Nanos,
    answer: Answer<Departed>,
    /// Whether it closes: there is no way back.
    closes: bool,
}

impl Served {
    /// Whether it was closed so that another shard opens it.
    pub(super) fn goes_on(&self) -> bool {
        let departing = self.departing.as_ref();
        departing.is_some_and(|departing| departing.closes) && self.volume.phase() == Phase::Closed
    }

    /// Why it cannot go elsewhere now.
    fn refuses_to_depart(
        &self,
        destage_left_bytes: u64,
        policy_left_bytes: u64,
    ) -> Option<&'static str> {
        if self.departing.is_some() {
            Some("it is being moved already")
        } else if self.opening.is_some() {
            Some("it is still being opened")
        } else if self.resizing.is_some() {
            Some("a resize is under way; wait for its end")
        } else if self.snapshotting.is_some() {
            Some("a snapshot is under way; wait for its end")
        } else if self.tier_out.is_some() || destage_left_bytes > 0 {
            Some("a flush is under way; wait for its end, or cancel it")
        } else if self.volume.log_failed() || self.log_given_up || policy_left_bytes > 0 {
            Some("its write log is being emptied, or has failed; `hdcs volume show` says why")
        } else if self.volume.log_is_stuck() {
            Some("the device of its write log does not answer")
        } else {
            None
        }
    }
}

impl ShardState {
    /// Where an opening of a volume is: one that is on its way out of this shard is between two already.
    pub(super) fn whereabouts(&self, number: VolumeNumber, opening: OpeningId) -> Whereabouts {
        let served = self.served(number);
        let served = served.filter(|one| one.departing.is_some() && one.opening_id == opening);
        match served {
            Some(_) => Whereabouts::Between,
            None => self.directory.whereabouts(number, opening),
        }
    }
}

impl Shard {
    /// Begin to let go of a volume, for another shard, if its requests end within this time. Answered when it is closed
    /// here.
    pub(super) fn depart(
        &mut self,
        number: VolumeNumber,
        patience: Nanos,
        answer: Answer<Departed>,
    ) {
        let slot = match self.may_depart(number) {
            Ok(slot) => slot,
            Err(why) => return tell(answer, Err(why)),
        };
        let until = self.state.now.plus(patience);
        if let Some(served) = self.state.volumes.get_mut(slot) {
            served.departing = Some(Departing {
                until,
                answer,
                closes: false,
            });
        }
        self.departures_until = self.departures_until.min(until);
        // In this order, so that whoever asks for it in between waits.
        self.state.directory.begin_move(number, self.state.now);
        self.state.publish(slot);
        self.state.settle_later(slot);
        for slot in 0..self.connections.end() {
            if let Some(connection) = self.connections.get_mut(slot)
                && connection.volume() == Some(number)
            {
                connection.station = Station::Waits;
                connection.stop_receiving(&mut self.state.ring);
                self.list(slot);
            }
        }
    }

    fn may_depart(&self, number: VolumeNumber) -> Result<u32, String> {
        let slot = self.state.open_slot(number)?;
        let served = self.state.volumes.get(slot).ok_or(NOT_OPEN)?;
        let stats = served.volume.stats(self.state.now);
        let (destage, policy) = (
            stats.destage_all_remaining_bytes,
            stats.policy_remaining_bytes,
        );
        if let Some(why) = served.refuses_to_depart(destage, policy) {
            return Err(why.to_owned());
        }
        if self.jobs.iter().any(|(_, job)| job.volume == number) {
            return Err("a range is being promoted or evicted; wait for its end".to_owned());
        }
        if self
            .scrubs
            .iter()
            .any(|(_, scrub)| scrub.volume() == number)
        {
            return Err("it is being scrubbed; wait for its end, or cancel it".to_owned());
        }
        Ok(slot)
    }

    /// The next step of a volume that is on its way out.
    pub(super) fn go_on_departing(&mut self, slot: u32) {
        let Some(served) = self.state.volumes.get(slot) else {
            return;
        };
        let Some(departing) = &served.departing else {
            return;
        };
        if departing.closes {
            return;
        }
        if self.state.now >= departing.until {
            return self.stay(slot, TOO_SLOW);
        }
        let now = self.state.now;
        let oldest = sharing::oldest_operation(&served.volume);
        let hangs = oldest.is_some_and(|since| now.since(since) > OPERATION_AGE_MAX);
        let owes_reads = served.cache_reads > 0 || served.volume.log_is_stuck();
        if hangs || owes_reads {
            return;
        }
        let number = served.number;
        let mut theirs = self.connections.iter();
        let busy = theirs.any(|(_, one)| one.volume() == Some(number) && !one.is_still());
        let queued = self.state.requests.scheduler.queued_bytes(served.flow);
        if busy || served.requests > 0 || !served.waiting.is_empty() || queued > 0 {
            return;
        }
        if let Some(served) = self.state.volumes.get_mut(slot) {
            // As when it is closed by hand.
            served.backend.end_retries();
            if let Some(departing) = &mut served.departing {
                departing.closes = true;
            }
        }
        self.state.step(slot, Event::Close { destage: false });
    }

    /// A volume does not go, or not to where it was to go: its clients are served again as far as it serves.
    pub(super) fn stay(&mut self, slot: u32, why: &str) {
        let Some(served) = self.state.volumes.get_mut(slot) else {
            return;
        };
        let Some(departing) = served.departing.take() else {
            return;
        };
        let number = served.number;
        self.state.publish(slot);
        for slot in 0..self.connections.end() {
            if let Some(connection) = self.connections.get_mut(slot)
                && connection.volume() == Some(number)
            {
                connection.station = Station::Here;
                self.list(slot);
            }
        }
        tell(departing.answer, Err(why.to_owned()));
    }

    /// A volume that was on its way out has left its slot. What is to be told once somebody else may open it.
    pub(super) fn has_left(&mut self, served: &mut Served) -> Option<impl FnOnce() + use<>> {
        let is_closed = served.goes_on();
        let departing = served.departing.take()?;
        let left = served.left(self.state.now);
        let opening = served.opening_id;
        // What its devices owe it still needs that, and it is opened nowhere else.
        let memory = (!served.is_owed()).then(|| Arc::clone(&served.memory));
        Some(move || {
            let result = if is_closed {
                Ok(Departed {
                    left,
                    opening,
                    memory,
                })
            } else {
                Err(WAS_CLOSED.to_owned())
            };
            tell(departing.answer, result);
        })
    }

    /// It is known where a volume is that has moved, or that it does not: connections that wait for it here go there, or
    /// end. Those that ask for it are served in this turn, as all that wait.
    pub(super) fn follow(&mut self, number: VolumeNumber) {
        self.state.directory.end_move(number);
        for slot in 0..self.connections.end() {
            let connection = self.connections.get(slot);
            let waits = connection.is_some_and(|connection| {
                connection.volume() == Some(number) && connection.station == Station::Waits
            });
            if waits {
                self.find_home(slot);
                self.list(slot);
            }
        }
    }

    /// The node stops: nobody waits for a volume that has left.
    pub(super) fn end_those_that_wait(&mut self) {
        for slot in 0..self.state.volumes.end() {
            self.stay(slot, STOPPING);
        }
        self.state.directory.end_moves();
        for slot in 0..self.connections.end() {
            let connection = self.connections.get(slot);
            if connection.is_some_and(|one| one.station == Station::Waits) {
                self.end(slot, Ending::NodeStops);
                self.list(slot);
            }
        }
    }

    /// When the patience with a volume that is on its way out comes to its end.
    pub(super) fn note_departures(&mut self) {
        if self.state.now < self.departures_until {
            return;
        }
        let volumes = self.state.volumes.iter();
        let departing = volumes.filter_map(|(_, served)| served.departing.as_ref());
        let until = departing.filter(|one| !one.closes).map(|one| one.until);
        self.departures_until = until.min().unwrap_or(NEVER);
    }
}
