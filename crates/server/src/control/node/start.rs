//! How far a start is with opening volumes: which one may begin next, how many are left, and how long these take.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use hdcs_api::StartProgress;
use hdcs_core::base::io::Nanos;
use hdcs_core::node::start::Starting;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::lock;

/// How far the start is with opening volumes.
#[derive(Debug)]
pub(super) struct Start {
    progress: Mutex<Option<Progress>>,
    places: Mutex<Starting>,
    /// One has ended.
    ended: Notify,
    origin: Instant,
}

/// What a start has opened, or found that it cannot open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    began: Instant,
    /// Since then.
    pub elapsed: Duration,
    /// All that it opens.
    pub volumes: usize,
    /// Those that it has not opened yet.
    pub left: usize,
}

impl Default for Start {
    fn default() -> Self {
        Self {
            progress: Mutex::default(),
            places: Mutex::default(),
            ended: Notify::new(),
            origin: Instant::now(),
        }
    }
}

impl Start {
    /// It has so many volumes to open.
    pub fn begin(&self, volumes: usize) {
        *lock(&self.progress) = Some(Progress {
            began: Instant::now(),
            elapsed: Duration::ZERO,
            volumes,
            left: volumes,
        });
    }

    fn now(&self) -> Nanos {
        Nanos(self.origin.elapsed().as_nanos() as u64)
    }

    /// Wait until there is a place for a volume among those that are being opened, and take it.
    pub async fn place_for(&self, number: u32) {
        loop {
            let ended = self.one_ended();
            let Err(pause) = self.take_place(number) else {
                return;
            };
            let _either_will_do = tokio::time::timeout(pause, ended).await;
        }
    }

    /// Have the opening of a volume begin, or else wait so long at most.
    fn take_place(&self, number: u32) -> Result<(), Duration> {
        let (now, mut places) = (self.now(), lock(&self.places));
        match places.look(now) {
            Ok(()) => {
                places.begin(now, number);
                Ok(())
            }
            Err(until) => Err(Duration::from_nanos(until.since(now).0)),
        }
    }

    /// The opening of a volume has ended, which had such a place.
    pub fn note_ended(&self, place: Option<u32>) {
        if let Some(number) = place {
            lock(&self.places).end(self.now(), number);
        }
        if let Some(progress) = &mut *lock(&self.progress) {
            progress.left -= 1;
            progress.elapsed = progress.began.elapsed();
        }
        self.ended.notify_waiters();
    }

    /// Wait until one has ended.
    pub fn one_ended(&self) -> Notified<'_> {
        self.ended.notified()
    }

    /// How far the start is; `None` once it has opened, or given up, all that it had to open.
    pub fn view(&self) -> Option<StartProgress> {
        let progress = self.progress();
        (progress.left > 0).then(|| StartProgress {
            volumes: progress.volumes as u64,
            left: progress.left as u64,
            elapsed_ms: progress.elapsed.as_millis() as u64,
            left_ms: progress.time_left().map(|left| left.as_millis() as u64),
        })
    }

    /// As it is now.
    pub fn progress(&self) -> Progress {
        let mut progress = lock(&self.progress).unwrap_or(Progress {
            began: Instant::now(),
            elapsed: Duration::ZERO,
            volumes: 0,
            left: 0,
        });
        if progress.left > 0 {
            progress.elapsed = progress.began.elapsed();
        }
        progress
    }
}

impl Progress {
    /// How long the rest takes at the rate of what it has opened so far; `None` if that cannot be told, or nothing is left.
    pub fn time_left(&self) -> Option<Duration> {
        let opened = self.volumes - self.left;
        if opened == 0 || self.left == 0 {
            return None;
        }
        let nanos = self.elapsed.as_nanos() * self.left as u128 / opened as u128;
        Some(Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX)))
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opened = self.volumes - self.left;
        write!(f, "opened {opened} of {} volumes", self.volumes)?;
        match self.time_left() {
            Some(left) => write!(f, ", about {} s left", left.as_secs_f64().ceil()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_says_how_far_it_is_and_how_long_the_rest_takes() {
        let start = Start::default();
        assert_eq!(start.progress().to_string(), "opened 0 of 0 volumes");
        start.begin(3);
        assert_eq!(start.progress().to_string(), "opened 0 of 3 volumes");
        start.note_ended(None);
        let progress = Progress {
            elapsed: Duration::from_millis(700),
            ..start.progress()
        };
        assert_eq!(progress.time_left(), Some(Duration::from_millis(1400)));
        assert_eq!(
            progress.to_string(),
            "opened 1 of 3 volumes, about 2 s left"
        );
        start.note_ended(None);
        start.note_ended(None);
        let over = start.progress();
        assert_eq!((over.left, over.time_left()), (0, None));
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(start.progress(), over, "its time stands still");
    }
}
