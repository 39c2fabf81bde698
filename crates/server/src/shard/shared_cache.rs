//! What the shards of a node share of the read cache: the SSD tier, which the first shard makes and keeps, and its device.
//!
//! Whichever shard's step lets the tier act performs that on its own ring, so each needs the device; nobody keeps it, so
//! that it is closed, and its lock with it, as soon as the keeper takes it out.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hdcs_core::cache::SharedTier;
use hdcs_device::file::Device;

/// See the module.
#[derive(Default)]
pub struct SharedCache {
    tier: OnceLock<Option<SharedTier>>,
    device: Mutex<Option<Arc<Device>>>,
}

impl SharedCache {
    /// The first shard has made its cache.
    pub(super) fn made(&self, tier: Option<SharedTier>) {
        let first = self.tier.set(tier).is_ok();
        assert!(first, "one shard makes the cache");
    }

    /// The SSD tier, if there is one; none before the first shard was started.
    pub(super) fn tier(&self) -> Option<&SharedTier> {
        self.tier.get()?.as_ref()
    }

    /// The device, if it can be used.
    pub(super) fn device(&self) -> Option<Arc<Device>> {
        self.locked().clone()
    }

    /// Use this one, or none, from now on.
    pub(super) fn set_device(&self, device: Option<Device>) {
        *self.locked() = device.map(Arc::new);
    }

    fn locked(&self) -> MutexGuard<'_, Option<Arc<Device>>> {
        // Nothing that holds it can panic half-way.
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for SharedCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedCache")
    }
}
