//! Heat maps of volumes, gathered a bounded step at a time beside the clients' requests, and warm-ups from them.
//!
//! Invariant: one map is in the making at a time, so that the memory for that is bounded; others wait.

use std::collections::VecDeque;

use hdcs_core::base::io::{Nanos, SectorRange};
use hdcs_core::base::limits::HEAT_RUNS_MAX;
use hdcs_core::cache::heat_map::Gathering;
use hdcs_core::volume::{CachedBlocks, Event};
use hdcs_frontend::VolumeNumber;

use super::command::Answer;
use super::control::tell;
use super::state::ShardState;
use super::turn::{NEVER, Shard};

/// Maps that wait to be gathered: what the control plane asks for at once is bounded, this more tightly.
const WAITING_MAX: usize = 64;

/// The map that is in the making.
struct Running {
    volume: VolumeNumber,
    gathering: Gathering,
    next_at: Nanos,
    answer: Answer<Gathering>,
}

/// See the module.
#[derive(Default)]
pub struct Gatherings {
    running: Option<Running>,
    waiting: VecDeque<(VolumeNumber, Answer<Gathering>)>,
}

impl Gatherings {
    /// Gather a map of a volume in its turn.
    pub fn ask(&mut self, volume: VolumeNumber, answer: Answer<Gathering>) {
        if self.waiting.len() == WAITING_MAX {
            let why = "too many heat maps are being made: try again later";
            return tell(answer, Err(why.to_owned()));
        }
        self.waiting.push_back((volume, answer));
    }

    /// Go on with the map in the making, if it is time to.
    fn go_on(&mut self, state: &ShardState) {
        while self.running.is_none()
            && let Some((volume, answer)) = self.waiting.pop_front()
        {
            match state.open_slot(volume).map(|slot| state.volumes.get(slot)) {
                // Whoever asked may have gone: then nothing is done for it.
                _ if answer.is_closed() => {}
                Ok(Some(served)) => {
                    self.running = Some(Running {
                        volume,
                        gathering: served.volume.cached().begin_gathering(&state.cache),
                        next_at: state.now,
                        answer,
                    });
                }
                Ok(None) => {}
                Err(why) => tell(answer, Err(why)),
            }
        }
        let Some(mut running) = self.running.take_if(|running| running.next_at <= state.now) else {
            return;
        };
        let slot = state.open_slot(running.volume);
        match slot.map(|slot| state.volumes.get(slot)) {
            Ok(Some(served)) => {
                if served
                    .volume
                    .cached()
                    .gather(&mut running.gathering, &state.cache)
                {
                    running.next_at = state.now.plus(CachedBlocks::GATHER_PAUSE);
                    self.running = Some(running);
                } else {
                    tell(running.answer, Ok(running.gathering));
                }
            }
            Ok(None) => {}
            Err(why) => tell(running.answer, Err(why)),
        }
    }

    fn next_wakeup(&self, now: Nanos) -> Nanos {
        match &self.running {
            Some(running) => running.next_at,
            None if self.waiting.is_empty() => NEVER,
            None => now,
        }
    }
}

impl Shard {
    /// Gather on.
    pub fn run_gatherings(&mut self) {
        self.gatherings.go_on(&self.state);
    }

    /// When to gather on.
    pub fn gatherings_wakeup(&self) -> Nanos {
        self.gatherings.next_wakeup(self.state.now)
    }
}

impl ShardState {
    /// Warm these ranges of a volume up in this order, instead of what is left of an earlier warm-up; with
    /// `if_cold` only if the cache does not have them, and only where it has room.
    pub fn warm_up_like(
        &mut self,
        number: VolumeNumber,
        ranges: Vec<SectorRange>,
        if_cold: bool,
    ) -> Result<(), String> {
        let slot = self.open_slot(number)?;
        let others = self.volumes.iter().filter(|(other, _)| *other != slot);
        let others: usize = others
            .map(|(_, served)| served.volume.warm_up_ranges())
            .sum();
        if others + ranges.len() > HEAT_RUNS_MAX {
            return Err(format!(
                "warm-ups of other volumes have {others} ranges left, this one would have {}, and all may have \
                 {HEAT_RUNS_MAX}: wait until they have come further, or cancel one",
                ranges.len()
            ));
        }
        let event = if if_cold {
            Event::WarmUpIfCold(ranges)
        } else {
            Event::WarmUp(ranges)
        };
        self.step(slot, event);
        Ok(())
    }
}
