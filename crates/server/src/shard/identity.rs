//! Records a new identity for a cache whose device can no longer say what is void, as [`CacheIdentity`] decides. The log
//! says at every attempt that it fails, and so does the node's report.

use std::sync::Arc;

use hdcs_core::base::io::{Nanos, Token};
use hdcs_core::node::cache_identity::CacheIdentity;
use hdcs_device::ring::Owner;
use hdcs_device::worker::JobOutput;

use super::cache_place::CachePlace;
use super::state::ShardState;

/// The token of the job; openings count from zero.
pub const TOKEN: Token = Token(u64::MAX);

/// What the worker hands back: whether the identity was recorded.
pub type Recorded = Result<(), String>;

/// See the module.
#[derive(Debug, Default)]
pub struct Identity {
    machine: CacheIdentity,
    /// Why the last attempt failed, until one succeeds.
    error: Option<String>,
    /// Volumes of which it was said that the cache has lost something that they need.
    forgotten_volumes: u64,
}

impl Identity {
    /// At the end of a turn: begin to record a new identity if the cache needs one.
    pub fn go_on(&mut self, state: &mut ShardState, place: &Arc<dyn CachePlace>) {
        let forgotten = state.cache.forgotten_volumes();
        if forgotten != self.forgotten_volumes {
            tracing::warn!(
                volumes = forgotten,
                "what the SSD tier held of these volumes is older than their logs, and was not used: its device has lost a \
                 write that it had acknowledged, or its content is not that of the last run"
            );
            self.forgotten_volumes = forgotten;
        }
        if !self.machine.go_on(state.now, state.cache.must_reset()) {
            return;
        }
        if self.error.is_none() {
            tracing::warn!(
                "the cache device fails or does not answer, and what it holds cannot be voided: \
                 giving the read cache a new identity"
            );
        }
        let place = Arc::clone(place);
        let job = move || {
            let recorded: Recorded = place.renew().map(drop);
            JobOutput::Any(Box::new(recorded))
        };
        state.ring.job(Owner::Shard, TOKEN, Box::new(job));
    }

    /// An attempt ended.
    pub fn recorded(&mut self, state: &mut ShardState, result: Recorded) {
        if self.machine.recorded(state.now, result.is_ok()) {
            state.cache.reset_recorded();
            // They wait for their invalidations to count as durable.
            for slot in 0..state.volumes.end() {
                state.touch(slot);
            }
        }
        match result {
            Ok(()) => {
                tracing::warn!(
                    "the read cache has a new identity: the SSD tier stays off until its device is \
                     well again, and starts empty"
                );
                self.error = None;
            }
            Err(error) => {
                tracing::warn!(
                    error,
                    "cannot record a new identity of the read cache; destage waits for it, trying \
                     again"
                );
                self.error = Some(error);
            }
        }
    }

    /// When to try again.
    pub fn next_wakeup(&self) -> Option<Nanos> {
        self.machine.next_wakeup()
    }

    /// Why destage waits for this, if it does.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }
}
