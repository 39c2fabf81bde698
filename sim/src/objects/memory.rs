//! Memory for the maps of all owners, of which there is little now and then. A write that has no room is refused, an
//! opening too, and somebody provides more then; no owner ever has more than there is, and none keeps what it had.

use std::sync::Arc;

use fastrand::Rng;
use hdcs_core::memory::Share;
use hdcs_core::objects::ObjectVolume;
use hdcs_core::objects::map::CHANGE_BYTES_MAX;

use super::plant::Plant;
use super::world::World;
use crate::violation::Violation;

/// What writes leave to discards; little, so that little memory is enough for some writes.
pub(super) const UNMAP_RESERVE_BYTES: usize = 1024;
/// What is asked for beside what is gathered: some objects, some discards.
const BESIDE_BYTES: u64 = 32 * CHANGE_BYTES_MAX as u64;

/// What there is, in bytes.
#[derive(Debug)]
pub(super) struct Memory {
    share: Arc<Share>,
    /// `None`: as much as anybody wants.
    bytes: Option<u64>,
}

impl Memory {
    /// What a seed has: little, one time in three.
    pub(super) fn draw(random: &mut Rng) -> Self {
        let bytes = (random.u8(0..3) == 0).then(|| random.u64(3 << 10..12 << 10));
        Self {
            share: Share::new(bytes.unwrap_or(u64::MAX)),
            bytes,
        }
    }
}

impl World {
    /// Give a new owner its part.
    pub(super) fn lend(&self, machine: &mut ObjectVolume) {
        if self.plant == Some(Plant::MemoryBeyondShare) {
            machine.set_memory(&Share::unlimited());
        } else {
            machine.set_memory(&self.memory.share);
        }
    }

    /// An opening found too little: somebody provides as much as anybody wants.
    pub(super) fn lend_more(&mut self) {
        self.coverage.short_of_memory += 1;
        self.lend_enough();
    }

    /// There is as much as anybody wants.
    pub(super) fn lend_enough(&mut self) {
        self.memory.bytes = None;
        self.memory.share.set_bytes(u64::MAX);
    }

    /// Whether a write may be refused for want of memory.
    pub(super) fn is_short_of_memory(&self) -> bool {
        let Some(bytes) = self.memory.bytes else {
            return false;
        };
        let batch = 2 * (self.scenario.batch_blocks * CHANGE_BYTES_MAX) as u64;
        let wanted = UNMAP_RESERVE_BYTES as u64 + batch + BESIDE_BYTES;
        self.memory.share.leased_bytes() + wanted > bytes
    }

    /// Whether an owner that begins may find too little.
    pub(super) fn has_little_memory(&self) -> bool {
        self.memory.bytes.is_some()
    }

    /// Owners have no more than there is, and what they had goes back with them.
    pub(super) fn check_memory(&self) -> Result<(), Violation> {
        let machines = || {
            self.owners
                .iter()
                .filter_map(|owner| owner.machine.as_ref())
        };
        let used: u64 = machines().map(|m| m.stats().leased_memory_bytes).sum();
        if let Some(bytes) = self.memory.bytes
            && used > bytes
        {
            let message = format!("{used} bytes of {bytes} are in use");
            return Err(Violation::new("memory-share", message));
        }
        let leased: u64 = machines().map(|m| m.stats().lease_bytes).sum();
        let held = self.memory.share.leased_bytes();
        if held != leased && self.plant != Some(Plant::MemoryBeyondShare) {
            let message = format!("{held} bytes are taken, and owners have {leased}");
            return Err(Violation::new("memory-lost", message));
        }
        Ok(())
    }
}
