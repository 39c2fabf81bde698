//! Memory of volumes: what each needs is reserved before it is opened, and shown.

use std::sync::Arc;

use hdcs_api::{ApiError, ErrorKind};
use hdcs_backend::memory::{Lease, Parts, Share, Shortage, VolumeMemory, verify_log};
use hdcs_core::base::limits::BLOCK_BYTES;

use super::{Node, lock};
use crate::catalogue::{Entry, VolumeName};

/// Why something is not done that there is too little memory for.
pub(super) fn short(name: &VolumeName, shortage: &Shortage) -> ApiError {
    ApiError::new(ErrorKind::Invalid, format!("volume {name}: {shortage}"))
}

impl Node {
    /// Refuse a volume that there is not enough memory for.
    pub(super) fn check_memory(&self, entry: &Entry) -> Result<(), ApiError> {
        let checked = self.setup.needs_of(entry).check(&self.share);
        checked.map_err(|shortage| short(&entry.name, &shortage))
    }

    /// Reserve the memory of a volume that is to be opened.
    pub(super) fn reserve(&self, entry: &Entry) -> Result<Arc<VolumeMemory>, ApiError> {
        let others_bytes = self.bytes_of_unopened(entry.number);
        let reserved = self
            .setup
            .needs_of(entry)
            .reserve(&self.share, others_bytes);
        let memory = Arc::new(reserved.map_err(|shortage| short(&entry.name, &shortage))?);
        let mut memories = lock(&self.memories);
        memories.retain(|_, memory| memory.strong_count() > 0);
        memories.insert(entry.number, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// What all volumes need at least that have no memory yet, but for the one with this number.
    fn bytes_of_unopened(&self, number: u32) -> u64 {
        let unopened = self.volumes.entries_that_stay().into_iter();
        unopened
            .filter(|entry| entry.number != number && self.memory_of(entry.number).is_none())
            .map(|entry| self.setup.needs_of(&entry).least_parts().total())
            .fold(0, u64::saturating_add)
    }

    /// Reserve what it takes to read the log of a volume, beside what the volume has if it is open.
    pub(super) fn memory_to_read_log(&self, entry: &Entry) -> Result<Lease, Shortage> {
        let blocks = entry.log.bytes / BLOCK_BYTES as u64;
        let entries = self
            .memory_of(entry.number)
            .map(|memory| memory.entries_max());
        let needs = verify_log(entry.log.bytes, entries.unwrap_or(blocks));
        self.share.reserve(needs)
    }

    /// What the volume with a number has reserved, if it is open or being opened.
    pub(super) fn memory_of(&self, number: u32) -> Option<Arc<VolumeMemory>> {
        lock(&self.memories).get(&number)?.upgrade()
    }

    /// Memory for volumes, and what of it they have reserved.
    pub(super) fn memory_of_volumes(&self) -> (u64, Parts) {
        (self.share.bytes(), self.share.held())
    }

    /// The memory for volumes.
    pub(super) fn share(&self) -> &Arc<Share> {
        &self.share
    }
}
