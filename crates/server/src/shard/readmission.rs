//! Brings the SSD tier back after it was given up, as [`machine::Readmission`] decides.
//!
//! Trying never blocks the shard or its worker: a device may hang even while it is opened.

use std::sync::Arc;

use hdcs_core::base::io::{Nanos, Token};
use hdcs_core::cache::CacheEvent;
use hdcs_core::node::readmission as machine;
use hdcs_device::file::Device;
use hdcs_device::ring::Owner;
use hdcs_device::worker::JobOutput;

use super::CacheDevice;
use super::cache_place::CacheTrouble;
use super::state::ShardState;

/// The token of a try; openings count from zero.
pub const TOKEN: Token = Token(u64::MAX - 1);

/// What a try brought: the device, and the identity under which it is used.
pub type Tried = Result<(Device, [u8; 16]), String>;

/// See the module.
#[derive(Debug, Default)]
pub struct Readmission {
    machine: machine::Readmission,
    /// Why the last try failed, until one succeeds.
    trouble: Option<String>,
}

impl Readmission {
    /// Of a node that has started without its device.
    pub fn after(trouble: String) -> Self {
        Self {
            trouble: Some(trouble),
            ..Self::default()
        }
    }

    /// At the end of a turn: try the device if it is time to.
    pub fn go_on(&mut self, state: &mut ShardState, device: &CacheDevice) {
        let can_readmit = state.cache.can_readmit();
        if self.machine.go_on(state.now, can_readmit, device.retry) {
            self.begin(state, device);
        }
    }

    fn begin(&mut self, state: &mut ShardState, device: &CacheDevice) {
        assert_eq!(
            state.cache_operations, 0,
            "the cache says that nothing of it is under way"
        );
        state.cache.release();
        state.shared_cache.set_device(None);
        let place = Arc::clone(&device.place);
        let remote = state.ring.remote(Owner::Shard);
        let spawned = std::thread::Builder::new()
            .name("hdcs-cache".into())
            .spawn(move || {
                let found = place.open().map_err(CacheTrouble::why);
                let tried: Tried = found.and_then(|found| Ok((found.device, place.renew()?)));
                remote.end(TOKEN, JobOutput::Any(Box::new(tried)));
            });
        match spawned {
            Ok(_) => state.ring.begin_remote(),
            Err(error) => self.tried(state, Err(format!("no thread to open it: {error}"))),
        }
    }

    /// A try ended.
    pub fn tried(&mut self, state: &mut ShardState, tried: Tried) {
        let can_readmit = state.cache.can_readmit();
        let is_used = self.machine.tried(state.now, tried.is_ok(), can_readmit);
        match tried {
            Err(why) => {
                if self.trouble.as_ref() != Some(&why) {
                    tracing::warn!("the SSD tier cannot be used yet: {why}; trying again");
                }
                self.trouble = Some(why);
            }
            Ok((device, uuid)) if is_used => {
                tracing::warn!("the SSD tier is back: it starts empty, under a new identity");
                state.shared_cache.set_device(Some(device));
                self.trouble = None;
                state.step_cache(CacheEvent::Readmit { uuid });
                state.cache_touched = true;
            }
            Ok(_) => {}
        }
    }

    /// When to try again.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        self.machine.next_wakeup()
    }

    /// Why the device could not be used at the last try.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }
}
