//! Volumes that are closed while a device owes them the end of operations.
//!
//! A closed volume takes those and does nothing else. It is dropped with the last one. Until then it keeps what they need:
//! the slot that they name, and the device of the write log with its lock, which no second opening of that log gets past.

use std::sync::Arc;

use hdcs_backend::memory::VolumeMemory;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, Nanos, Token};
use hdcs_core::volume::{Context, Event, Volume};
use hdcs_device::file::Device;

use super::ciphered_log::CipheredLog;
use super::command::VolumeSpec;
use super::served::Served;
use super::state::ShardState;

/// Why a volume is not opened whose log's device is still to answer.
const LOG_HANGS: &str = "the device of its write log has not answered since the volume was closed, and may still write what \
                         it was given then: open the volume once the device answers";

/// See the module.
pub struct ClosedVolume {
    volume: Volume,
    log: Device,
    /// Whether a superblock may be on its way to a place beside the log.
    keeps: bool,
    log_operations: usize,
    cache_reads: usize,
    /// The volume has its index until it goes.
    _memory: Arc<VolumeMemory>,
}

impl ClosedVolume {
    /// Of a volume that has left its slot.
    pub fn new(served: Served) -> Self {
        let mut volume = served.volume;
        volume.shed();
        Self {
            volume,
            log: served.log,
            keeps: served.log_given_up,
            log_operations: served.log_operations,
            cache_reads: served.cache_reads,
            _memory: served.memory,
        }
    }

    /// The volume that it is left of.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Whether what its log's device has not answered could meet the log of an opening.
    fn is_in_the_way_of(&self, spec: &VolumeSpec) -> bool {
        let is_its_log = self.keeps || self.log.path() == spec.log.path;
        let is_same = self.volume.config().uuid == spec.config.uuid;
        self.log_operations > 0 && is_same && is_its_log
    }
}

impl ShardState {
    /// Why a volume cannot be opened for the sake of what an earlier opening has left behind.
    pub fn hindrance(&self, spec: &VolumeSpec) -> Option<String> {
        let mut closed_volumes = self.closed_volumes.values();
        let is_hindered = closed_volumes.any(|closed| closed.is_in_the_way_of(spec));
        is_hindered.then(|| format!("volume `{}`: {LOG_HANGS}", spec.name))
    }

    /// How long the device of a write log may take for an answer: the most of any volume.
    pub fn log_patience(&self) -> Nanos {
        let open = self.volumes.iter();
        let longest = open
            .map(|(_, served)| served.volume.config().log_answer_max)
            .max();
        longest.unwrap_or(Nanos(0))
    }

    /// A volume has left its slot, which was vacated for what is under way on devices.
    pub fn keep_closed(&mut self, slot: u32, mut served: Served) {
        // What has not reached the device never will.
        let cipher = served.log_cipher.take();
        let unwritten = cipher.map_or_else(Vec::new, CipheredLog::into_unwritten);
        self.closed_volumes.insert(slot, ClosedVolume::new(served));
        for token in unwritten {
            self.log_ended_late(slot, token, Err(IoError::Failed));
        }
    }

    /// A log's device has brought a closed volume what that waits for no longer.
    pub fn log_ended_late(&mut self, slot: u32, token: Token, result: Result<Done, IoError>) {
        if let Some(closed) = self.closed_volumes.get_mut(&slot) {
            closed.log_operations -= 1;
        }
        self.step_closed(slot, Completion { token, result });
    }

    /// The cache's device has done so.
    pub fn cache_ended_late(&mut self, slot: u32, completion: Completion) {
        if let Some(closed) = self.closed_volumes.get_mut(&slot) {
            closed.cache_reads -= 1;
        }
        self.step_closed(slot, completion);
    }

    fn step_closed(&mut self, slot: u32, completion: Completion) {
        let Some(closed) = self.closed_volumes.get_mut(&slot) else {
            return;
        };
        let mut context = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut self.actions,
        };
        let event = Event::Completed(completion);
        closed.volume.step(self.now, event, &mut context);
        assert!(
            self.actions.is_empty(),
            "a volume that is closed does nothing"
        );
        if closed.log_operations == 0
            && closed.cache_reads == 0
            && let Some(closed) = self.closed_volumes.remove(&slot)
        {
            self.volumes.release(slot);
            self.forget_ciphers(&closed.volume);
        }
    }
}
