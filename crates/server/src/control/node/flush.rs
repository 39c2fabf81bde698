//! Flushes of everything that a volume has dirty: begun, watched until nothing is left, and cancelled when they get stuck.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hdcs_api::ApiError;
use hdcs_backend::url::BackendUrl;
use hdcs_core::local::Status;
use hdcs_core::volume::Trouble;
use hdcs_frontend::VolumeNumber;

use super::volumes::Volumes;
use super::{COMMAND_TIME_MAX, STALL_TIME_MAX, WATCH_PERIOD, failed, find};
use crate::control::link::Link;
use crate::control::view;
use crate::shard::command::{Command, VolumeReport};

/// What a flush of everything has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Moved {
    remaining_bytes: u64,
    /// Of a local store, zeroes included; 0 while its last tier has failed.
    tiered_bytes: u64,
    /// What the backend has taken of a generation that has not ended, and what its store has; 0 in the same case.
    taken_bytes: u64,
    backend_errors: u64,
}

impl Moved {
    fn of(volume: &VolumeReport) -> Self {
        // A tier that is tried again copies everything again: it gets on once the backend has flushed some of that.
        let has_failed = volume.home.is_some_and(|home| home.tier_trouble.is_some());
        let unless_failed = |bytes: u64| if has_failed { 0 } else { bytes };
        let put_bytes = volume.store.as_ref().map_or(0, |store| store.put_bytes);
        let of_tiers = |home: &Status| home.tiered_bytes + home.tiered_zero_bytes;
        Self {
            remaining_bytes: volume.stats.destage_all_remaining_bytes,
            tiered_bytes: unless_failed(volume.home.as_ref().map_or(0, of_tiers)),
            taken_bytes: unless_failed(volume.stats.destaged_bytes + put_bytes),
            backend_errors: volume.stats.backend_errors,
        }
    }
}

/// Whether a flush of everything still gets on.
#[derive(Clone, Copy, Debug)]
struct Advance {
    last: Moved,
    /// Errors when something was done with for good.
    errors: u64,
    at: Instant,
}

impl Advance {
    fn new(now: Instant, seen: Moved) -> Self {
        Self {
            last: seen,
            errors: seen.backend_errors,
            at: now,
        }
    }

    /// For how long it has not got on. A tier that is under way moves also while more becomes dirty. What the backend
    /// takes counts until an operation fails: then the same may be written again and again.
    fn stalled_for(&mut self, now: Instant, seen: Moved) -> Duration {
        let is_done_with = seen.remaining_bytes < self.last.remaining_bytes
            || seen.tiered_bytes > self.last.tiered_bytes;
        if is_done_with {
            self.errors = seen.backend_errors;
        }
        let has_taken = seen.taken_bytes != self.last.taken_bytes;
        if is_done_with || (has_taken && seen.backend_errors == self.errors) {
            self.at = now;
        }
        self.last = Moved {
            remaining_bytes: seen.remaining_bytes.min(self.last.remaining_bytes),
            tiered_bytes: seen.tiered_bytes.max(self.last.tiered_bytes),
            ..seen
        };
        now.saturating_duration_since(self.at)
    }
}

/// Flushes of everything that an open volume has dirty.
pub(super) struct Flushes {
    link: Arc<Link>,
    volumes: Arc<Volumes>,
}

impl Flushes {
    pub fn new(link: Arc<Link>, volumes: Arc<Volumes>) -> Self {
        Self { link, volumes }
    }

    /// Write everything dirty to the backend and wait for it, unless it gets stuck.
    pub async fn run(&self, name: &str, number: VolumeNumber) -> Result<(), ApiError> {
        self.link
            .command(name, "flushing it", COMMAND_TIME_MAX, |answer| {
                Command::DestageAll(number, answer)
            })
            .await?;
        self.watch(name, number).await
    }

    /// Wait until nothing is left of a flush of everything, or cancel it when it gets stuck.
    pub async fn watch(&self, name: &str, number: VolumeNumber) -> Result<(), ApiError> {
        let stall_time_max = STALL_TIME_MAX.max(self.patience_of(name));
        let mut advance: Option<Advance> = None;
        loop {
            let report = self.link.report().await?;
            let Some(volume) = find(&report, number) else {
                return Err(failed(format!("volume {name}: it is not open any more")));
            };
            let (now, seen) = (Instant::now(), Moved::of(volume));
            if seen.remaining_bytes == 0 {
                return Ok(());
            }
            let local = volume.home.as_ref();
            if let Some(why) = local.and_then(|local| view::home(local).failed) {
                self.cancel(name).await?;
                return Err(failed(format!(
                    "volume {name}: nothing can be tiered out any more ({why}): put its local store or its backend \
                     right and restart the daemon"
                )));
            }
            let store = volume.store.as_ref().filter(|store| store.is_lost);
            if let Some(why) = store.and_then(|store| store.trouble.clone()) {
                self.cancel(name).await?;
                return Err(failed(format!("volume {name}: {why}")));
            }
            let advance = advance.get_or_insert_with(|| Advance::new(now, seen));
            if advance.stalled_for(now, seen) > stall_time_max {
                self.cancel(name).await?;
                let dirty = volume.stats.dirty_bytes;
                match volume.trouble.map(|(trouble, _)| trouble) {
                    Some(Trouble::CopiesTooFew) => {
                        return Err(failed(format!(
                            "volume {name}: fewer nodes have a copy of its write log than writes need, and {dirty} dirty \
                             bytes are left: start the others again, or let it go on with fewer (`hdcs group set \
                             --copies-min`)"
                        )));
                    }
                    Some(Trouble::LogSilent) if self.has_copies(name) => {
                        return Err(failed(format!(
                            "volume {name}: its write log does not answer, and {dirty} dirty bytes are left: `hdcs volume \
                             show {name}` says whether it waits for its device or for other nodes"
                        )));
                    }
                    Some(Trouble::LogSilent) => {
                        return Err(failed(format!(
                            "volume {name}: the device of its write log does not answer, and {dirty} dirty bytes are \
                             left: put the device right"
                        )));
                    }
                    _ => {}
                }
                let errors = volume.stats.backend_errors;
                let why = view::reason(volume, false)
                    .unwrap_or_else(|| format!("{errors} operations failed"));
                let backend = self.volumes.backend_of(name);
                return Err(failed(format!(
                    "volume {name}: its backend takes no data and {dirty} dirty bytes are left ({why}): {backend}: \
                     put the backend right"
                )));
            }
            tokio::time::sleep(WATCH_PERIOD).await;
        }
    }

    fn has_copies(&self, name: &str) -> bool {
        let entry = self.volumes.known(name);
        entry.is_ok_and(|entry| entry.is_replicated)
    }

    /// How long one operation of a volume's backend may take by what its URL says.
    fn patience_of(&self, name: &str) -> Duration {
        let url = BackendUrl::parse(&self.volumes.backend_of(name));
        url.map_or(Duration::ZERO, |url| url.place.patience())
    }

    /// Have a volume return to destaging by policy, and give up what is being copied of it for a snapshot or clone.
    pub async fn cancel(&self, name: &str) -> Result<(), ApiError> {
        let number = VolumeNumber(self.volumes.entry(name)?.number);
        self.link
            .command(name, "cancelling the flush", COMMAND_TIME_MAX, |answer| {
                Command::CancelDestageAll(number, answer)
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is seen once a second, and for how long nothing has got on at the end.
    fn stalled_for(seen: impl IntoIterator<Item = Moved>) -> u64 {
        let begun = Instant::now();
        let mut seen = seen.into_iter();
        let mut advance = Advance::new(begun, seen.next().unwrap());
        let mut stalled = Duration::ZERO;
        for (seconds, seen) in (1..).zip(seen) {
            stalled = advance.stalled_for(begun + Duration::from_secs(seconds), seen);
        }
        stalled.as_secs()
    }

    const MOVED: Moved = Moved {
        remaining_bytes: 1000,
        tiered_bytes: 0,
        taken_bytes: 0,
        backend_errors: 3,
    };

    #[test]
    fn flush_gets_on_while_its_backend_takes_what_a_generation_has() {
        let slow = |second| Moved {
            taken_bytes: second,
            ..MOVED
        };
        assert_eq!(stalled_for((0..100).map(slow)), 0);
        assert_eq!(stalled_for([MOVED; 100]), 99);
        let stops = |second: u64| slow(second.min(40));
        assert_eq!(stalled_for((0..100).map(stops)), 59);
    }

    #[test]
    fn flush_that_writes_the_same_again_and_again_does_not_get_on() {
        let failing = |second: u64| Moved {
            taken_bytes: second,
            backend_errors: 3 + second / 10,
            ..MOVED
        };
        assert_eq!(stalled_for((0..100).map(failing)), 90);
        // Once something is done with for good, it does.
        let recovered = |second: u64| Moved {
            remaining_bytes: if second < 50 { 1000 } else { 500 },
            backend_errors: 3 + (second / 10).min(5),
            ..failing(second)
        };
        assert_eq!(stalled_for((0..100).map(recovered)), 0);
    }

    #[test]
    fn flush_of_a_home_gets_on_while_more_becomes_dirty() {
        let tiering = |second| Moved {
            remaining_bytes: 1000 + second,
            tiered_bytes: second,
            ..MOVED
        };
        assert_eq!(stalled_for((0..100).map(tiering)), 0);
    }
}
