//! What a volume's write log holds that its backend does not have, recorded outside of the log: for
//! the day on which the log is lost.
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

/// What the log of a volume holds, or has lost, that the backend does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Bytes of data.
    pub dirty_bytes: u64,
    /// Whether it holds nothing at all, discards and zeroes included, and has lost nothing.
    pub nothing: bool,
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
        }
    }

    /// What is recorded before the log that was found is used.
    pub fn begun(before: Option<&Self>, volume: Uuid, found: LogIdentity) -> Self {
        let now = unix_ms();
        let is_new = before.is_none() && found.incarnation == 0;
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
        }
    }

    /// The same after a look at the open volume, which was asked for at `now`. `dirty_age` is the
    /// age of the oldest dirty data, `open_for` the time from the end of the opening to `now`: what is
    /// older came out of the replay, and how old it really is only the record before knows.
    #[must_use]
    pub fn seen(&self, now: u64, left: Left, dirty_age: Duration, open_for: Duration) -> Self {
        let complete_until_ms = if left.nothing {
            Some(now)
        } else if dirty_age < open_for {
            Some(now.saturating_sub(dirty_age.as_millis() as u64 + 1))
        } else {
            self.complete_until_ms
        };
        Self {
            dirty_bytes: left.dirty_bytes,
            nothing_dirty: left.nothing,
            complete_until_ms,
            recorded_ms: now,
            ..self.clone()
        }
    }

    /// The same once the volume is closed.
    #[must_use]
    pub fn closed(&self, left: Left) -> Self {
        let complete_until_ms = if left.nothing {
            Some(unix_ms())
        } else {
            self.complete_until_ms
        };
        Self {
            in_use: false,
            dirty_bytes: left.dirty_bytes,
            nothing_dirty: left.nothing,
            complete_until_ms,
            recorded_ms: unix_ms(),
            ..self.clone()
        }
    }

    /// Whether `new` says something that is worth a durable write.
    pub fn is_outdated_by(&self, new: &Self, log_bytes: u64) -> bool {
        let change = self.dirty_bytes.abs_diff(new.dirty_bytes);
        let lag_max = if self.nothing_dirty && new.nothing_dirty {
            CLEAN_LAG_MS_MAX
        } else {
            LAG_MS_MAX
        };
        let until = |record: &Self| record.complete_until_ms.unwrap_or(0);
        (self.log, self.incarnation, self.in_use) != (new.log, new.incarnation, new.in_use)
            || self.nothing_dirty != new.nothing_dirty
            || change >= log_bytes / CHANGE_SHARE
            || until(new).abs_diff(until(self)) >= lag_max
    }
}

/// What is lost with a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Dirty bytes at most.
    pub dirty_bytes_max: u64,
    /// What was recorded of it, if anything was.
    pub record: Option<DirtyRecord>,
}

impl Loss {
    /// The loss of a log of so many bytes, as far as the record tells.
    pub fn of(record: Option<DirtyRecord>, log_bytes: u64) -> Self {
        let dirty_bytes_max = match &record {
            Some(record) if !record.in_use => record.dirty_bytes,
            _ => log_bytes,
        };
        Self {
            dirty_bytes_max,
            record,
        }
    }

    /// Whether it is certain that nothing is lost.
    pub fn is_none(&self) -> bool {
        let record = self.record.as_ref();
        record.is_some_and(|record| !record.in_use && record.nothing_dirty)
    }

    /// Up to when the backend has everything.
    pub fn complete_until(&self) -> Option<String> {
        self.record
            .as_ref()
            .and_then(|record| record.complete_until_ms)
            .map(utc)
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(record) = &self.record else {
            return write!(
                f,
                "how much of it the backend does not have was not recorded: {} dirty bytes at most",
                self.dirty_bytes_max
            );
        };
        let seen = utc(record.recorded_ms);
        if self.is_none() {
            return write!(
                f,
                "it was closed at {seen} and held nothing that the backend does not have"
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
            Some(until) => write!(f, "; the backend has everything written before {until}"),
            None => f.write_str("; from when on the backend lacks data was not recorded"),
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

    fn left(dirty_bytes: u64, nothing: bool) -> Left {
        Left {
            dirty_bytes,
            nothing,
        }
    }

    fn new() -> DirtyRecord {
        DirtyRecord::begun(None, Uuid::new_v4(), FOUND)
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
        let record = DirtyRecord::begun(None, Uuid::new_v4(), found);
        assert_eq!(record.complete_until_ms, None);
        assert!(!record.nothing_dirty);
    }

    #[test]
    fn dirty_record_time_never_runs_ahead_of_what_came_out_of_the_replay() {
        let hour = Duration::from_hours(1);
        let mut record = new();
        record.complete_until_ms = Some(1_000);
        let record = DirtyRecord::begun(Some(&record), record.volume, FOUND);
        assert_eq!(record.complete_until_ms, Some(1_000));
        // As old as the opening: its real age is not known.
        let replayed = record.seen(unix_ms(), left(5, false), hour, hour);
        assert_eq!(replayed.complete_until_ms, Some(1_000));
        let later = record.seen(unix_ms(), left(5, false), hour, 2 * hour);
        assert!(later.complete_until_ms.unwrap() <= unix_ms() - 3_600_000);
        assert!(later.complete_until_ms.unwrap() > unix_ms() - 3_700_000);
        let empty = record.seen(unix_ms(), left(0, true), Duration::ZERO, hour);
        assert!(empty.complete_until_ms.unwrap() > unix_ms() - 10_000);
    }

    #[test]
    fn dirty_record_is_renewed_only_for_much() {
        let record = new().seen(unix_ms(), left(0, true), Duration::ZERO, Duration::ZERO);
        let seen = |bytes, nothing| {
            record.seen(
                unix_ms(),
                left(bytes, nothing),
                Duration::ZERO,
                Duration::ZERO,
            )
        };
        assert!(!record.is_outdated_by(&seen(0, true), LOG_BYTES));
        assert!(record.is_outdated_by(&seen(0, false), LOG_BYTES));
        let dirty = seen(1, false);
        assert!(!dirty.is_outdated_by(&seen(LOG_BYTES / 8, false), LOG_BYTES));
        assert!(dirty.is_outdated_by(&seen(LOG_BYTES / 8 + 1, false), LOG_BYTES));
        assert!(dirty.is_outdated_by(&dirty.closed(left(1, false)), LOG_BYTES));
    }

    #[test]
    fn loss_is_exact_after_a_close_and_bounded_before() {
        let open = new().seen(unix_ms(), left(5, false), Duration::ZERO, Duration::ZERO);
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
