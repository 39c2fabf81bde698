//! What a volume's write log holds that its backend does not have, recorded outside of the log: for
//! the day on which the log is lost. In storage mode the local store counts as well, and what only the log holds is
//! recorded beside that, since a log is mostly lost without the local store.
//!
//! `DIR/volumes/NAME/dirty.json` is renewed at a bounded rate while the volume is open, and once more
//! when it was closed. It is never on the data path.
//!
//! Invariants:
//! 1. A record that is not `in_use` is exact: nobody has opened the log since. It is marked before
//!    the log takes a write.
//! 2. A record names the log by its random number and counts its openings, so that another log of
//!    the volume, or an older copy, is not taken for the one that was lost.
//! 3. `complete_until_ms` is never later than the truth: everything acknowledged before is in the
//!    backend.
//!
//! Failure: without a record, or with a damaged one, nothing is known, and the loss is said to be at
//! most what a log of that size holds.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hdcs_api::time::{unix_ms, utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::sealed::{self, Kind, SealedError};

/// What kind of file it is.
pub const RECORD: Kind = Kind {
    magic: "hdcs-dirty",
    version: 1,
};
/// Name of the record in a volume's directory.
pub const RECORD_FILE: &str = "dirty.json";
/// Share of the log by which the dirty bytes must have changed to be recorded again.
const CHANGE_SHARE: u64 = 8;
/// By how much the recorded time may lag while there is dirty data, and while there is none.
const LAG_MS_MAX: u64 = 10_000;
const CLEAN_LAG_MS_MAX: u64 = 60_000;

/// What a log's superblock says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogIdentity {
    /// The random number of the log.
    pub log: u64,
    /// How often it was opened.
    pub incarnation: u64,
}

/// What is in one place, or was lost there, and is not in another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount {
    /// Bytes of data.
    pub dirty_bytes: u64,
    /// Whether it is nothing at all, discards and zeroes included, and nothing was lost.
    pub nothing: bool,
    /// How old the oldest of it is, at most.
    pub age: Duration,
}

/// What a volume has, or has lost, that its backend does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// In its log, and in its local store if it has one.
    pub all: Amount,
    /// In storage mode: what only the log has, and neither the local store nor the backend.
    pub in_log: Option<Amount>,
}

/// What was recorded of an amount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// Bytes that the other place did not have.
    pub dirty_bytes: u64,
    /// Whether there was nothing at all that it did not have, discards included.
    pub nothing_dirty: bool,
    /// Unix time in milliseconds up to which it has everything, if that is known.
    pub complete_until_ms: Option<u64>,
}

impl Recorded {
    /// The same after a look, which was asked for at `now`; see [`DirtyRecord::seen`].
    fn seen(&self, now: u64, amount: Amount, open_for: Duration) -> Self {
        let complete_until_ms = if amount.nothing {
            Some(now)
        } else if amount.age < open_for {
            Some(now.saturating_sub(amount.age.as_millis() as u64 + 1))
        } else {
            self.complete_until_ms
        };
        Self {
            dirty_bytes: amount.dirty_bytes,
            nothing_dirty: amount.nothing,
            complete_until_ms,
        }
    }

    /// Whether `new` says something that is worth a durable write, of what has so many bytes at most.
    fn is_outdated_by(&self, new: &Self, bytes_max: u64) -> bool {
        let change = self.dirty_bytes.abs_diff(new.dirty_bytes);
        let lag_max = if self.nothing_dirty && new.nothing_dirty {
            CLEAN_LAG_MS_MAX
        } else {
            LAG_MS_MAX
        };
        let until = |recorded: &Self| recorded.complete_until_ms.unwrap_or(0);
        self.nothing_dirty != new.nothing_dirty
            || change >= bytes_max / CHANGE_SHARE
            || until(new).abs_diff(until(self)) >= lag_max
    }
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirtyRecord {
    /// The volume.
    pub volume: Uuid,
    /// Random number of its log.
    pub log: u64,
    /// How often that log was opened, as far as is known.
    pub incarnation: u64,
    /// Whether the log may have changed since.
    pub in_use: bool,
    /// Bytes that the backend did not have.
    pub dirty_bytes: u64,
    /// Whether the log held nothing at all that the backend did not have, discards included.
    pub nothing_dirty: bool,
    /// Unix time in milliseconds up to which the backend has everything; unknown of a volume that is
    /// older than its record.
    pub complete_until_ms: Option<u64>,
    /// Unix time in milliseconds at which this was seen.
    pub recorded_ms: u64,
    /// In storage mode: what of it the local store did not have either; unknown of a record that was begun without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_log: Option<Recorded>,
}

fn file(directory: &Path) -> PathBuf {
    directory.join(RECORD_FILE)
}

impl DirtyRecord {
    /// The record in a volume's directory, if there is one that can be trusted.
    pub fn read(directory: &Path, volume: Uuid) -> Option<Self> {
        let path = file(directory);
        match sealed::read::<Self>(&path, RECORD) {
            Ok(record) if record.volume == volume => Some(record),
            Ok(_) => None,
            Err(error) if error.is_absent() => None,
            Err(error) => {
                tracing::warn!("not taken into account: {}: {error}", path.display());
                None
            }
        }
    }

    /// Replace the record, durably.
    pub fn write(&self, directory: &Path) -> Result<(), SealedError> {
        sealed::write(&file(directory), RECORD, self)
    }

    /// Remove the record, durably: nothing is known any more.
    pub fn remove(directory: &Path) -> std::io::Result<()> {
        match std::fs::remove_file(file(directory)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => sealed::sync_directory(directory),
        }
    }

    /// The first record of a log.
    pub fn of_new_log(volume: Uuid, log: u64, complete_until_ms: Option<u64>) -> Self {
        Self {
            volume,
            log,
            incarnation: 0,
            in_use: false,
            dirty_bytes: 0,
            nothing_dirty: true,
            complete_until_ms,
            recorded_ms: unix_ms(),
            in_log: None,
        }
    }

    /// The first record of a log that is made beside a local store, whose old one was lost: what the local store has is
    /// not looked at.
    #[must_use]
    pub fn of_new_log_beside(before: Option<&Self>, volume: Uuid, log: u64) -> Self {
        let until = before.and_then(|before| before.complete_until_ms);
        Self {
            in_use: true,
            nothing_dirty: false,
            dirty_bytes: before.map_or(0, |before| before.dirty_bytes),
            ..Self::of_new_log(volume, log, until)
        }
    }

    /// The part of it that is about what only the log holds, if that is known.
    pub fn of_log_alone(&self) -> Option<Self> {
        if !self.in_use && self.nothing_dirty {
            return Some(self.clone());
        }
        let in_log = self.in_log?;
        Some(Self {
            dirty_bytes: in_log.dirty_bytes,
            nothing_dirty: in_log.nothing_dirty,
            complete_until_ms: in_log.complete_until_ms,
            in_log: None,
            ..self.clone()
        })
    }

    fn all(&self) -> Recorded {
        Recorded {
            dirty_bytes: self.dirty_bytes,
            nothing_dirty: self.nothing_dirty,
            complete_until_ms: self.complete_until_ms,
        }
    }

    /// What is recorded before the log that was found is used.
    ///
    /// `has_home` says whether the volume has a local store.
    pub fn begun(before: Option<&Self>, volume: Uuid, found: LogIdentity, has_home: bool) -> Self {
        let now = unix_ms();
        let is_new = before.is_none() && found.incarnation == 0;
        let empty = Recorded {
            dirty_bytes: 0,
            nothing_dirty: true,
            complete_until_ms: Some(now),
        };
        let in_log = match before {
            None => is_new.then_some(empty),
            Some(before) => before.in_log.map(|in_log| {
                if !before.in_use && in_log.nothing_dirty {
                    return empty;
                }
                Recorded {
                    nothing_dirty: false,
                    ..in_log
                }
            }),
        };
        let was_empty = before.is_some_and(|before| !before.in_use && before.nothing_dirty);
        Self {
            volume,
            log: found.log,
            incarnation: found.incarnation,
            in_use: true,
            dirty_bytes: before.map_or(0, |before| before.dirty_bytes),
            nothing_dirty: is_new || was_empty,
            complete_until_ms: if is_new || was_empty {
                Some(now)
            } else {
                before.and_then(|before| before.complete_until_ms)
            },
            recorded_ms: now,
            in_log: has_home.then_some(in_log).flatten(),
        }
    }

    /// The same after a look at the open volume, which was asked for at `now`. `open_for` is the time from the end of
    /// the opening to `now`: what is older came out of the replay, and how old it really is only the record before
    /// knows.
    #[must_use]
    pub fn seen(&self, now: u64, left: Left, open_for: Duration) -> Self {
        let all = self.all().seen(now, left.all, open_for);
        let in_log = self.in_log.unwrap_or_default();
        Self {
            dirty_bytes: all.dirty_bytes,
            nothing_dirty: all.nothing_dirty,
            complete_until_ms: all.complete_until_ms,
            recorded_ms: now,
            in_log: (left.in_log).map(|amount| in_log.seen(now, amount, open_for)),
            ..self.clone()
        }
    }

    /// The same once the volume is closed.
    #[must_use]
    pub fn closed(&self, left: Left) -> Self {
        Self {
            in_use: false,
            // How old it is was seen while it was open.
            ..self.seen(unix_ms(), left, Duration::ZERO)
        }
    }

    /// Whether `new` says something that is worth a durable write; `bytes_max` is what the volume can have dirty, and
    /// `log_bytes` what its log can.
    pub fn is_outdated_by(&self, new: &Self, bytes_max: u64, log_bytes: u64) -> bool {
        let is_log_outdated = match (&self.in_log, &new.in_log) {
            (Some(old), Some(new)) => old.is_outdated_by(new, log_bytes),
            (old, new) => old.is_some() != new.is_some(),
        };
        (self.log, self.incarnation, self.in_use) != (new.log, new.incarnation, new.in_use)
            || self.all().is_outdated_by(&new.all(), bytes_max)
            || is_log_outdated
    }
}

/// What is lost with a log, or with a log and a local store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Dirty bytes at most.
    pub dirty_bytes_max: u64,
    /// What was recorded of it, if anything was.
    pub record: Option<DirtyRecord>,
    /// What is left, and has all else: the backend, or the local store.
    pub left: &'static str,
}

impl Loss {
    /// The loss of all that a volume has here, which can be so many dirty bytes, as far as the record tells.
    pub fn of(record: Option<DirtyRecord>, bytes_max: u64) -> Self {
        let dirty_bytes_max = match &record {
            Some(record) if !record.in_use => record.dirty_bytes,
            _ => bytes_max,
        };
        Self {
            dirty_bytes_max,
            record,
            left: "backend",
        }
    }

    /// The loss of a log of so many bytes, and not of the local store behind it.
    pub fn of_log_alone(record: Option<&DirtyRecord>, log_bytes: u64) -> Self {
        Self {
            left: "local store",
            ..Self::of(record.and_then(DirtyRecord::of_log_alone), log_bytes)
        }
    }

    /// Whether it is certain that nothing is lost.
    pub fn is_none(&self) -> bool {
        let record = self.record.as_ref();
        record.is_some_and(|record| !record.in_use && record.nothing_dirty)
    }

    /// Up to when what is left has everything.
    pub fn complete_until(&self) -> Option<String> {
        self.record
            .as_ref()
            .and_then(|record| record.complete_until_ms)
            .map(utc)
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let left = self.left;
        let Some(record) = &self.record else {
            return write!(
                f,
                "how much of it the {left} does not have was not recorded: {} dirty bytes at most",
                self.dirty_bytes_max
            );
        };
        let seen = utc(record.recorded_ms);
        if self.is_none() {
            return write!(
                f,
                "it was closed at {seen} and held nothing that the {left} does not have"
            );
        }
        if record.in_use {
            write!(
                f,
                "it held {} dirty bytes when that was last recorded, at {seen}, and {} at most",
                record.dirty_bytes, self.dirty_bytes_max
            )?;
        } else {
            write!(
                f,
                "it was closed at {seen} and held {} dirty bytes",
                record.dirty_bytes
            )?;
        }
        match self.complete_until() {
            Some(until) => write!(f, "; the {left} has everything written before {until}"),
            None => write!(f, "; from when on the {left} lacks data was not recorded"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG_BYTES: u64 = 16 << 20;
    const FOUND: LogIdentity = LogIdentity {
        log: 7,
        incarnation: 0,
    };

    fn left_since(dirty_bytes: u64, nothing: bool, age: Duration) -> Left {
        let all = Amount {
            dirty_bytes,
            nothing,
            age,
        };
        Left { all, in_log: None }
    }

    fn left(dirty_bytes: u64, nothing: bool) -> Left {
        left_since(dirty_bytes, nothing, Duration::ZERO)
    }

    fn new() -> DirtyRecord {
        DirtyRecord::begun(None, Uuid::new_v4(), FOUND, false)
    }

    #[test]
    fn dirty_record_of_a_new_volume_is_complete() {
        assert!(new().complete_until_ms.is_some());
        // A volume that is older than its record: nothing is known.
        let incarnation = 3;
        let found = LogIdentity {
            incarnation,
            ..FOUND
        };
        let record = DirtyRecord::begun(None, Uuid::new_v4(), found, false);
        assert_eq!(record.complete_until_ms, None);
        assert!(!record.nothing_dirty);
    }

    #[test]
    fn dirty_record_time_never_runs_ahead_of_what_came_out_of_the_replay() {
        let hour = Duration::from_hours(1);
        let mut record = new();
        record.complete_until_ms = Some(1_000);
        let record = DirtyRecord::begun(Some(&record), record.volume, FOUND, false);
        assert_eq!(record.complete_until_ms, Some(1_000));
        // As old as the opening: its real age is not known.
        let replayed = record.seen(unix_ms(), left_since(5, false, hour), hour);
        assert_eq!(replayed.complete_until_ms, Some(1_000));
        let later = record.seen(unix_ms(), left_since(5, false, hour), 2 * hour);
        assert!(later.complete_until_ms.unwrap() <= unix_ms() - 3_600_000);
        assert!(later.complete_until_ms.unwrap() > unix_ms() - 3_700_000);
        let empty = record.seen(unix_ms(), left(0, true), hour);
        assert!(empty.complete_until_ms.unwrap() > unix_ms() - 10_000);
    }

    #[test]
    fn dirty_record_is_renewed_only_for_much() {
        let record = new().seen(unix_ms(), left(0, true), Duration::ZERO);
        let seen = |bytes, nothing| record.seen(unix_ms(), left(bytes, nothing), Duration::ZERO);
        let is_outdated =
            |old: &DirtyRecord, new: &DirtyRecord| old.is_outdated_by(new, LOG_BYTES, LOG_BYTES);
        assert!(!is_outdated(&record, &seen(0, true)));
        assert!(is_outdated(&record, &seen(0, false)));
        let dirty = seen(1, false);
        assert!(!is_outdated(&dirty, &seen(LOG_BYTES / 8, false)));
        assert!(is_outdated(&dirty, &seen(LOG_BYTES / 8 + 1, false)));
        assert!(is_outdated(&dirty, &dirty.closed(left(1, false))));
    }

    #[test]
    fn loss_of_a_log_before_a_local_store_is_what_only_the_log_held() {
        const HOME_BYTES: u64 = 1 << 30;
        let amount = |dirty_bytes, nothing| Amount {
            dirty_bytes,
            nothing,
            age: Duration::ZERO,
        };
        let both = |in_log| Left {
            all: amount(HOME_BYTES, false),
            in_log: Some(in_log),
        };
        let new = DirtyRecord::begun(None, Uuid::new_v4(), FOUND, true);
        assert!(new.in_log.unwrap().complete_until_ms.is_some());
        let open = new.seen(unix_ms(), both(amount(5, false)), Duration::ZERO);
        let loss = Loss::of_log_alone(Some(&open), LOG_BYTES);
        assert_eq!((loss.dirty_bytes_max, loss.is_none()), (LOG_BYTES, false));
        let closed = open.closed(both(amount(5, false)));
        let loss = Loss::of_log_alone(Some(&closed), LOG_BYTES);
        assert_eq!((loss.dirty_bytes_max, loss.is_none()), (5, false));
        assert!(loss.to_string().contains("held 5 dirty bytes"), "{loss}");
        assert!(loss.to_string().contains("the local store "), "{loss}");
        assert_eq!(
            Loss::of(Some(closed.clone()), LOG_BYTES).dirty_bytes_max,
            HOME_BYTES
        );
        let empty = open.closed(both(amount(0, true)));
        let loss = Loss::of_log_alone(Some(&empty), LOG_BYTES);
        assert!(loss.is_none() && !Loss::of(Some(empty.clone()), LOG_BYTES).is_none());
        // It held nothing when it was opened, and may hold something since.
        let begun = DirtyRecord::begun(Some(&empty), empty.volume, FOUND, true);
        assert!(begun.in_log.is_some_and(|in_log| in_log.nothing_dirty));
        let dirty = DirtyRecord::begun(Some(&closed), closed.volume, FOUND, true);
        assert!(dirty.in_log.is_some_and(|in_log| !in_log.nothing_dirty));
        assert!(!Loss::of_log_alone(Some(&begun), LOG_BYTES).is_none());
        // Of a new log beside the old local store nothing is certain, and less of the local store.
        let beside = DirtyRecord::of_new_log_beside(Some(&begun), begun.volume, 9);
        let losses = [
            Loss::of_log_alone(Some(&beside), LOG_BYTES),
            Loss::of(Some(beside), HOME_BYTES),
        ];
        assert_eq!(losses[0].dirty_bytes_max, LOG_BYTES);
        assert_eq!(losses[1].dirty_bytes_max, HOME_BYTES);
        assert!(losses.iter().all(|loss| !loss.is_none()));
    }

    #[test]
    fn loss_is_exact_after_a_close_and_bounded_before() {
        let open = new().seen(unix_ms(), left(5, false), Duration::ZERO);
        let loss = Loss::of(Some(open.clone()), LOG_BYTES);
        assert_eq!((loss.dirty_bytes_max, loss.is_none()), (LOG_BYTES, false));
        assert!(
            loss.to_string().contains("held 5 dirty bytes when"),
            "{loss}"
        );
        assert!(loss.to_string().contains("16777216 at most"), "{loss}");
        let closed = Loss::of(Some(open.closed(left(5, false))), LOG_BYTES);
        assert_eq!((closed.dirty_bytes_max, closed.is_none()), (5, false));
        let discards = Loss::of(Some(open.closed(left(0, false))), LOG_BYTES);
        assert!(!discards.is_none(), "what was zeroed or discarded counts");
        let clean = Loss::of(Some(open.closed(left(0, true))), LOG_BYTES);
        assert!(clean.is_none());
        assert_eq!(Loss::of(None, LOG_BYTES).dirty_bytes_max, LOG_BYTES);
    }

    #[test]
    fn dirty_record_that_is_damaged_or_of_another_volume_says_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let record = new();
        record.write(directory.path()).unwrap();
        let read = |volume| DirtyRecord::read(directory.path(), volume);
        assert_eq!(read(record.volume), Some(record.clone()));
        assert_eq!(read(Uuid::new_v4()), None);
        let path = directory.path().join(RECORD_FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("true", "false")).unwrap();
        assert_eq!(read(record.volume), None);
        DirtyRecord::remove(directory.path()).unwrap();
        DirtyRecord::remove(directory.path()).unwrap();
    }
}
