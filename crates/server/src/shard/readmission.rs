//! Brings the SSD tier back after it was given up.
//!
//! ```text
//! Well ──tier given up, nothing of it under way──► Waiting ──pause over──► Trying
//!   ▲                                                 ▲                      │ │
//!   │                                                 └──────── failed ──────┘ │
//!   └───────────── open, under a new identity: the cache begins anew ──────────┘
//! ```
//!
//! Invariants:
//! 1. The device is closed before it is opened again, and closed only when nothing is under way on
//!    it. So what an old operation does late meets neither a new file nor a new cache.
//! 2. The new identity is durable before the cache begins to use the device.
//! 3. Trying never blocks the shard or its worker: a device may hang even while it is opened.
//!
//! Failure: a device that cannot be used is tried again after a pause, which doubles each time up to
//! a bound, and begins anew after the tier has served for as long as the last one.

use std::sync::Arc;

use hdcs_core::base::io::{Nanos, Token};
use hdcs_core::cache::CacheEvent;
use hdcs_device::file::Device;
use hdcs_device::ring::Owner;
use hdcs_device::worker::JobOutput;

use super::CacheDevice;
use super::cache_place::CacheTrouble;
use super::works::Works;

/// How often the pause doubles.
const DOUBLINGS_MAX: u32 = 5;
/// The token of a try; openings count from zero.
pub const TOKEN: Token = Token(u64::MAX - 1);

/// What a try brought: the device, and the identity under which it is used.
pub type Tried = Result<(Device, [u8; 16]), String>;

#[derive(Debug, Default)]
enum State {
    #[default]
    Well,
    Waiting(Nanos),
    Trying,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Readmission {
    state: State,
    first_pause: Nanos,
    /// The last pause.
    pause: Nanos,
    /// Pauses since the tier last served for as long as one.
    pauses: u32,
    /// When the device was last brought back.
    back: Nanos,
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
    pub fn go_on(&mut self, works: &mut Works, device: &CacheDevice) {
        if !works.cache.can_readmit() {
            return;
        }
        match self.state {
            State::Well => {
                self.first_pause = device.retry;
                if works.now.since(self.back) >= self.pause {
                    self.pauses = 0;
                }
                self.wait(works.now);
            }
            State::Waiting(until) if until <= works.now => self.begin(works, device),
            State::Waiting(_) | State::Trying => {}
        }
    }

    fn wait(&mut self, now: Nanos) {
        self.pause = Nanos(self.first_pause.0 << self.pauses.min(DOUBLINGS_MAX));
        self.pauses += 1;
        self.state = State::Waiting(now.plus(self.pause));
    }

    fn begin(&mut self, works: &mut Works, device: &CacheDevice) {
        assert_eq!(
            works.cache_operations, 0,
            "the cache says that nothing of it is under way"
        );
        works.cache_device = None;
        self.state = State::Trying;
        let place = Arc::clone(&device.place);
        let remote = works.ring.remote(Owner::Shard);
        let spawned = std::thread::Builder::new()
            .name("hdcs-cache".into())
            .spawn(move || {
                let found = place.open().map_err(CacheTrouble::why);
                let tried: Tried = found.and_then(|found| Ok((found.device, place.renew()?)));
                remote.end(TOKEN, JobOutput::Any(Box::new(tried)));
            });
        match spawned {
            Ok(_) => works.ring.begin_remote(),
            Err(error) => self.failed(works.now, format!("no thread to open it: {error}")),
        }
    }

    fn failed(&mut self, now: Nanos, why: String) {
        if self.trouble.as_ref() != Some(&why) {
            tracing::warn!("the SSD tier cannot be used yet: {why}; trying again");
        }
        self.trouble = Some(why);
        self.wait(now);
    }

    /// A try ended.
    pub fn tried(&mut self, works: &mut Works, tried: Tried) {
        match tried {
            Err(why) => self.failed(works.now, why),
            // The cache closes: whoever comes next finds the device, and starts empty.
            Ok(_) if !works.cache.can_readmit() => self.state = State::Well,
            Ok((device, uuid)) => {
                tracing::warn!("the SSD tier is back: it starts empty, under a new identity");
                works.cache_device = Some(device);
                self.state = State::Well;
                self.trouble = None;
                self.back = works.now;
                works.step_cache(CacheEvent::Readmit { uuid });
                works.cache_touched = true;
            }
        }
    }

    /// When to try again.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        match self.state {
            State::Waiting(until) => Some(until),
            State::Well | State::Trying => None,
        }
    }

    /// Why the device could not be used at the last try.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }
}
