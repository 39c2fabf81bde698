//! Scrubs of volumes, piece by piece, beside the clients' requests: the core says what is next and how soon.

use std::sync::Arc;

use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{Reply, Request};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::node::scrub::{Pace, ScrubAt, Scrubbed};
use hdcs_frontend::VolumeNumber;

use super::command::Answer;
use super::served::{Ended, Origin, Submitted};
use super::turn::{NEVER, Shard};
use crate::scrub::{Part, Progress};

/// One volume being scrubbed.
pub struct Scrub {
    volume: VolumeNumber,
    at: ScrubAt,
    pace: Pace,
    under_way: bool,
    progress: Arc<Progress>,
    answer: Answer<()>,
}

impl Scrub {
    /// Of which volume.
    pub fn volume(&self) -> VolumeNumber {
        self.volume
    }

    /// Take the end of a piece; whether there is more.
    fn ended(&mut self, found: Scrubbed, now: hdcs_core::base::io::Nanos) -> bool {
        let progress = &self.progress;
        progress.moved(found.read_bytes, found.passed_bytes);
        progress.found(found.bad_blocks, found.healed_blocks);
        if let Some(range) = found.damaged {
            let (from, to) = (
                range.byte_offset(),
                range.byte_offset() + range.bytes() as u64,
            );
            progress.problem(format!(
                "write log: bytes {from} to {to} of the volume, which its backend does not have yet, are damaged \
                 on the log's device, and memory does not hold them any more: write them again, or restore them \
                 from a backup"
            ));
        }
        self.pace.ended(now, found.read_bytes);
        if let Some(next) = found.next {
            self.at = next;
        }
        found.next.is_some()
    }
}

impl Shard {
    /// Begin to scrub what a volume has on this node's devices. Answered at its end.
    pub fn begin_scrub(
        &mut self,
        number: VolumeNumber,
        progress: Arc<Progress>,
        answer: Answer<()>,
    ) {
        let slot = match self.state.open_slot(number) {
            Ok(slot) => slot,
            Err(error) => {
                // Whoever asked may have gone.
                let _ = answer.send(Err(error));
                return;
            }
        };
        let used = self.state.volumes.get(slot).map_or(0, |served| {
            served.volume.stats(self.state.now).log_used_blocks
        });
        progress.begin(Part::Log, used * BLOCK_BYTES as u64);
        self.scrubs.insert(Scrub {
            volume: number,
            at: ScrubAt::LOG,
            pace: Pace::new(progress.rate(), self.state.now),
            under_way: false,
            progress,
            answer,
        });
    }

    /// A piece has ended.
    pub fn scrub_ended(&mut self, slot: u32, result: Ended) {
        let now = self.state.now;
        let Some(scrub) = self.scrubs.get_mut(slot) else {
            return;
        };
        scrub.under_way = false;
        let more = match result {
            Ok(Reply::Scrubbed(found)) => scrub.ended(found, now) || self.next_part(slot),
            Ok(_) => unreachable!("a scrub is answered with what was found"),
            Err(error) => return self.end_scrub(slot, Err(error)),
        };
        if !more {
            self.end_scrub(slot, Ok(()));
        }
    }

    /// Go on with the next part; false if there is none.
    fn next_part(&mut self, slot: u32) -> bool {
        let Some(scrub) = self.scrubs.get_mut(slot) else {
            return false;
        };
        match scrub.at {
            ScrubAt::Log { .. } => {
                scrub.at = ScrubAt::CACHE;
                let bytes = self.state.cache.scrub_bytes();
                scrub.progress.begin(Part::Cache, bytes);
                true
            }
            ScrubAt::Cache { .. } | ScrubAt::Home { .. } => false,
        }
    }

    fn end_scrub(&mut self, slot: u32, result: Result<(), RequestError>) {
        if let Some(scrub) = self.scrubs.remove(slot) {
            let result = result.map_err(|error| error.to_string());
            // Whoever asked may have gone.
            let _ = scrub.answer.send(result);
        }
    }

    /// Begin the pieces that may begin now.
    pub fn run_scrubs(&mut self) {
        let now = self.state.now;
        for slot in 0..self.scrubs.end() {
            let Some(scrub) = self.scrubs.get_mut(slot).filter(|scrub| !scrub.under_way) else {
                continue;
            };
            if scrub.progress.is_cancelled() {
                self.end_scrub(slot, Ok(()));
                continue;
            }
            let volume = self.state.numbers.get(&scrub.volume);
            let served = volume.and_then(|&slot| self.state.volumes.get(slot));
            let requests = served.map_or(0, |served| served.requests + served.waiting.len());
            if !scrub.pace.may_begin(now, requests) {
                continue;
            }
            scrub.under_way = true;
            self.state.requests.submit(Submitted {
                origin: Origin::Scrub(slot),
                volume: scrub.volume,
                arrived: now,
                ticket: None,
                request: Request::Scrub { at: scrub.at },
            });
        }
    }

    /// When a piece may begin.
    pub fn scrub_wakeup(&self) -> hdcs_core::base::io::Nanos {
        let waiting = self.scrubs.iter().filter(|(_, scrub)| !scrub.under_way);
        let next = waiting.map(|(_, scrub)| scrub.pace.ready_at()).min();
        next.unwrap_or(NEVER)
    }
}
