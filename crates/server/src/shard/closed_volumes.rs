//! Volumes that are closed while a device owes them the end of operations.
//!
//! A closed volume takes those and does nothing else. It is dropped with the last one. Until then it keeps what they need:
//! the slot that they name, and the device of the write log with its lock, which no second opening of that log gets past.

use std::collections::HashMap;
use std::sync::Arc;

use hdcs_backend::memory::VolumeMemory;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::Completion;
use hdcs_core::volume::{Context, Event, Volume};
use hdcs_device::file::Device;

use super::ciphered_log::CipheredLog;
use super::command::VolumeSpec;
use super::residents::Residence;
use super::served::Served;
use super::state::ShardState;

/// Why a volume is not opened whose log's device is still to answer.
const LOG_HANGS: &str = "the device of its write log has not answered since the volume was closed, and may still write what \
                         it was given then: open the volume once the device answers";

/// See the module.
pub struct ClosedVolume {
    volume: Volume,
    log: Arc<Device>,
    /// Whether a superblock may be on its way to a place beside the log.
    keeps: bool,
    log_operations: usize,
    cache_reads: usize,
    /// The volume has its index until it goes.
    _memory: Arc<VolumeMemory>,
    /// Whoever opens it again asks this shard, which knows what is in the way.
    _residence: Residence,
}

impl ClosedVolume {
    /// Of a volume that has left its slot.
    fn new(served: Served) -> Self {
        let mut volume = served.volume;
        volume.shed();
        Self {
            volume,
            log: served.log,
            keeps: served.log_given_up,
            log_operations: served.log_operations,
            cache_reads: served.cache_reads,
            _memory: served.memory,
            _residence: served.residence,
        }
    }

    /// Whether what its log's device has not answered could meet the log of an opening.
    fn is_in_the_way_of(&self, spec: &VolumeSpec) -> bool {
        let is_its_log = self.keeps || self.log.path() == spec.log.path;
        let is_same = self.volume.config().uuid == spec.config.uuid;
        self.log_operations > 0 && is_same && is_its_log
    }
}

/// What a device has brought a closed volume, which waits for it no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// The device of its write log.
    Log,
    /// The device of the cache.
    Cache,
}

/// All of them, by the slots that they were in.
#[derive(Default)]
pub struct ClosedVolumes(HashMap<u32, ClosedVolume>);

impl ClosedVolumes {
    /// What they are left of.
    pub fn volumes(&self) -> impl Iterator<Item = &Volume> {
        self.0.values().map(|closed| &closed.volume)
    }

    /// Why a volume cannot be opened for the sake of what an earlier opening has left behind.
    pub fn hindrance(&self, spec: &VolumeSpec) -> Option<&'static str> {
        let is_hindered = self.0.values().any(|closed| closed.is_in_the_way_of(spec));
        is_hindered.then_some(LOG_HANGS)
    }
}

impl ShardState {
    /// A volume has left its slot, which was vacated for what is under way on devices.
    pub fn keep_closed(&mut self, slot: u32, mut served: Served) {
        // What has not reached the device never will.
        let cipher = served.log_cipher.take();
        let unwritten = cipher.map_or_else(Vec::new, CipheredLog::into_unwritten);
        self.closed_volumes
            .0
            .insert(slot, ClosedVolume::new(served));
        for token in unwritten {
            let result = Err(IoError::Failed);
            self.ended_late(slot, Late::Log, Completion { token, result });
        }
    }

    /// A device has brought a closed volume something; what was the last of it lets the volume go.
    pub fn ended_late(&mut self, slot: u32, late: Late, completion: Completion) {
        let Some(closed) = self.closed_volumes.0.get_mut(&slot) else {
            return;
        };
        match late {
            Late::Log => closed.log_operations -= 1,
            Late::Cache => closed.cache_reads -= 1,
        }
        let mut context = Context {
            cache: &mut self.cache,
            pool: &self.pool,
            actions: &mut self.actions,
        };
        let event = Event::Completed(completion);
        closed.volume.step(self.now, event, &mut context);
        drop(context);
        assert!(
            self.actions.is_empty(),
            "a volume that is closed does nothing"
        );
        if closed.log_operations == 0
            && closed.cache_reads == 0
            && let Some(closed) = self.closed_volumes.0.remove(&slot)
        {
            self.volumes.release(slot);
            self.forget_ciphers(&closed.volume);
        }
    }
}
