//! Who keeps the dirty records ([`crate::data_dir::dirty`]): at most a few durable writes a second,
//! on threads of their own, never while a volume is being taken away.
//!
//! Invariants:
//! 1. A record is written only while its volume is tracked, under `writing`: once
//!    [`Records::untrack`] has returned, nothing is written in the volume's directory any more.
//! 2. Before a log takes a write, its record says that it is in use, or there is none.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hdcs_api::time::unix_ms;
use hdcs_backend::Absent;
use hdcs_core::base::cipher::Authenticator;
use hdcs_core::format::LogSuperblock;
use hdcs_core::node::opening::Failure;
use uuid::Uuid;

use super::{beside, lock};
use crate::catalogue::{self, Entry};
use crate::control::node_report::NodeReport;
use crate::data_dir::dirty::{DirtyRecord, Left, LogIdentity, RECORD_FILE};
use crate::data_dir::sealed::SealedError;
use crate::data_dir::{DataDir, Layout, kept};
use crate::shard::command::{Admission, OpenFailure, VolumeReport};

/// Records renewed in one round; the others wait for the next.
const WRITES_PER_ROUND: usize = 16;

/// One open volume.
#[derive(Clone, Debug)]
struct Tracked {
    directory: PathBuf,
    /// What can be dirty at most, and what in the log.
    bytes_max: u64,
    log_bytes: u64,
    /// As it is on the disk.
    record: DirtyRecord,
    /// How often its log was opened, this opening included.
    incarnation: u64,
    opened: Instant,
    written: Instant,
    /// The last attempt to renew it failed, and that was said.
    failed: bool,
}

/// The records of every open volume, by number.
#[derive(Clone, Debug, Default)]
pub(super) struct Records {
    tracked: Arc<Mutex<BTreeMap<u32, Tracked>>>,
    writing: Arc<tokio::sync::Mutex<()>>,
}

/// When a look at the volumes was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    at: Instant,
    unix_ms: u64,
}

impl Asked {
    pub fn now() -> Self {
        Self {
            at: Instant::now(),
            unix_ms: unix_ms(),
        }
    }
}

impl Records {
    /// A volume was opened.
    pub async fn track(&self, entry: &Entry, layout: &Layout, log: LogIdentity) {
        let directory = catalogue::directory(layout, &entry.name);
        let now = Instant::now();
        let (at, uuid) = (directory.clone(), entry.uuid);
        let read = beside(move || DirtyRecord::read(&at, uuid)).await;
        let record = read
            .ok()
            .flatten()
            .unwrap_or_else(|| DirtyRecord::begun(None, entry.uuid, log, entry.home.is_some()));
        let tracked = Tracked {
            directory,
            bytes_max: entry.dirty_bytes_max(),
            log_bytes: entry.log.bytes,
            record,
            incarnation: log.incarnation,
            opened: now,
            written: now,
            failed: false,
        };
        lock(&self.tracked).insert(entry.number, tracked);
    }

    /// A volume is being taken away: what it had recorded last.
    pub async fn untrack(&self, number: u32) -> Option<DirtyRecord> {
        let tracked = lock(&self.tracked).remove(&number);
        let _none_is_being_written = self.writing.lock().await;
        tracked.map(|tracked| tracked.record)
    }

    /// A volume was closed: what its log holds is known exactly.
    pub async fn closed(&self, number: u32, left: Option<Left>) {
        let tracked = lock(&self.tracked).remove(&number);
        let _writing = self.writing.lock().await;
        let (Some(tracked), Some(left)) = (tracked, left) else {
            return;
        };
        let record = DirtyRecord {
            incarnation: tracked.incarnation,
            ..tracked.record.closed(left)
        };
        let written = tokio::task::spawn_blocking(move || {
            if let Err(error) = record.write(&tracked.directory) {
                not_written(&tracked.directory, &error);
            }
        });
        // Without it the record says "in use", which is less precise and as true.
        let _ = written.await;
    }

    /// Renew what has changed by much. Returns at once; one round is under way at a time.
    pub fn renew(&self, asked: Asked, report: &NodeReport) {
        let Ok(writing) = Arc::clone(&self.writing).try_lock_owned() else {
            return;
        };
        let mut due = Vec::new();
        for (number, tracked) in lock(&self.tracked).iter() {
            let volumes = &mut report.volumes.iter();
            let Some(volume) = volumes.find(|volume| volume.config.number == *number) else {
                continue;
            };
            let Some(new) = look(tracked, asked, volume) else {
                continue;
            };
            let (bytes_max, log_bytes) = (tracked.bytes_max, tracked.log_bytes);
            if tracked.record.is_outdated_by(&new, bytes_max, log_bytes) {
                due.push((tracked.written, *number, new));
            }
        }
        due.sort_unstable_by_key(|(written, ..)| *written);
        due.truncate(WRITES_PER_ROUND);
        if due.is_empty() {
            return;
        }
        let records = Arc::clone(&self.tracked);
        tokio::task::spawn_blocking(move || {
            for (_, number, new) in due {
                // It may have been taken away since.
                let place = |tracked: &Tracked| (tracked.directory.clone(), tracked.failed);
                let Some((directory, failed)) = lock(&records).get(&number).map(place) else {
                    continue;
                };
                let written = new.write(&directory);
                match &written {
                    Err(error) if !failed => not_written(&directory, error),
                    Ok(()) if failed => {
                        tracing::info!("{}: written again", directory.join(RECORD_FILE).display());
                    }
                    _ => {}
                }
                if let Some(tracked) = lock(&records).get_mut(&number) {
                    tracked.written = Instant::now();
                    tracked.failed = written.is_err();
                    if written.is_ok() {
                        tracked.record = new;
                    }
                }
            }
            drop(writing);
        });
    }
}

/// What is recorded of an open volume now; `None` if its log was never read.
fn look(tracked: &Tracked, asked: Asked, volume: &VolumeReport) -> Option<DirtyRecord> {
    let open_for = asked.at.saturating_duration_since(tracked.opened);
    let seen = (tracked.record).seen(asked.unix_ms, volume.left?, open_for);
    Some(DirtyRecord {
        incarnation: tracked.incarnation,
        ..seen
    })
}

fn not_written(directory: &Path, error: &SealedError) {
    let path = directory.join(RECORD_FILE);
    tracing::warn!(
        "what is dirty cannot be recorded: {}: {error}; it is tried again, and said once",
        path.display()
    );
}

/// Lets a volume's log be opened if it is the one that the record knows, and records that it is.
///
/// Once it was taken back it lets nothing in: a thread that hung while it opened the volume may go on
/// when the volume was deleted, detached or opened by another, whose record is not to be touched.
pub(super) struct Gate {
    directory: PathBuf,
    volume: Uuid,
    /// Whether the volume has a local store.
    has_home: bool,
    /// What holds for the backend of a volume that was never opened.
    absent: Absent,
    /// Where the numbers of origins are.
    dir: Option<Arc<Mutex<DataDir>>>,
    /// Held while a record is written.
    passage: Mutex<Passage>,
}

/// How far an opening has come.
#[derive(Debug, Default)]
struct Passage {
    /// What the record was before the opening, once it was replaced.
    before: Option<DirtyRecord>,
    /// The same of what is kept of the log's superblock.
    kept: Option<LogSuperblock>,
    /// The opening has failed, or was given up.
    is_over: bool,
}

impl Gate {
    pub fn new(entry: &Entry, layout: &Layout, dir: Arc<Mutex<DataDir>>, absent: Absent) -> Self {
        Self {
            dir: Some(dir),
            directory: catalogue::directory(layout, &entry.name),
            volume: entry.uuid,
            has_home: entry.home.is_some(),
            absent,
            passage: Mutex::default(),
        }
    }

    fn dirty_record(&self) -> Option<DirtyRecord> {
        DirtyRecord::read(&self.directory, self.volume)
    }

    /// The opening failed after all, and the log took nothing: what was known of it holds. Blocks.
    pub fn take_back(&self) {
        let mut passage = lock(&self.passage);
        passage.is_over = true;
        if let Some(before) = passage.before.take()
            && let Err(error) = before.write(&self.directory)
        {
            not_written(&self.directory, &error);
        }
        if let Some(kept) = passage.kept.take()
            && let Err(error) = kept::write_superblock(&self.directory, &kept)
        {
            // It says less than before, and nothing wrong.
            tracing::warn!("what is kept of a write log is not restored: {error}");
        }
    }

    /// Refuse an opening that has been given up meanwhile.
    fn check_wanted(passage: &Passage) -> Result<(), OpenFailure> {
        if !passage.is_over {
            return Ok(());
        }
        let why = "its opening was given up";
        Err(OpenFailure::new(Failure::Refused, why))
    }
}

impl Admission for Gate {
    fn record(&self) -> Result<Option<LogIdentity>, OpenFailure> {
        Self::check_wanted(&lock(&self.passage))?;
        Ok(self.dirty_record().map(|record| LogIdentity {
            log: record.log,
            incarnation: record.incarnation,
        }))
    }

    fn absent(&self) -> Absent {
        self.absent
    }

    fn begin(&self, log: LogIdentity, keys: Option<&dyn Authenticator>) -> Result<(), OpenFailure> {
        let mut passage = lock(&self.passage);
        Self::check_wanted(&passage)?;
        if let Some(kept) = self.kept()?.filter(kept::is_empty) {
            kept::write_superblock(&self.directory, &kept::claims_no_more(&kept, keys)).map_err(
                |error| {
                    let path = kept::file(&self.directory);
                    OpenFailure::new(
                        Failure::Refused,
                        format!(
                            "cannot record that its log is in use: {}: {error}",
                            path.display()
                        ),
                    )
                },
            )?;
            passage.kept = Some(kept);
        }
        let before = self.dirty_record();
        let begun = DirtyRecord::begun(before.as_ref(), self.volume, log, self.has_home);
        passage.before = before;
        let Err(error) = begun.write(&self.directory) else {
            return Ok(());
        };
        // No record says less than a stale one, and nothing wrong.
        DirtyRecord::remove(&self.directory).map_err(|_| {
            OpenFailure::new(
                Failure::Refused,
                format!(
                    "cannot record that its log is in use: {}: {error}: make the data directory \
                     writable, with room",
                    self.directory.join(RECORD_FILE).display()
                ),
            )
        })
    }

    fn kept(&self) -> Result<Option<LogSuperblock>, OpenFailure> {
        kept::read(&self.directory, self.volume)
            .map_err(|why| OpenFailure::new(Failure::Refused, why))
    }

    fn keep(&self, block: &[u8]) -> io::Result<()> {
        // In what directory it would be by now, nobody knows.
        if lock(&self.passage).is_over {
            return Err(io::ErrorKind::NotFound.into());
        }
        kept::write(&self.directory, block)
    }

    fn origin(&self, name: &str) -> Option<u32> {
        let numbered = lock(self.dir.as_ref()?).origin_number(name);
        if let Err(error) = &numbered {
            tracing::warn!("{name} gets no place of its own in the cache: {error}");
        }
        numbered.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::data_dir::dirty::Amount;

    fn gate(directory: &Path) -> Gate {
        Gate {
            directory: directory.to_owned(),
            volume: Uuid::from_u128(1),
            has_home: false,
            absent: Absent::CreateNew,
            dir: None,
            passage: Mutex::default(),
        }
    }

    fn log(log: u64, incarnation: u64) -> LogIdentity {
        LogIdentity { log, incarnation }
    }

    #[test]
    fn gate_records_the_log_that_is_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let gate = gate(directory.path());
        assert_eq!(gate.record().unwrap(), None);
        gate.begin(log(7, 3), None).unwrap();
        assert!(gate.dirty_record().unwrap().in_use);
        assert_eq!(gate.record().unwrap(), Some(log(7, 3)));
    }

    #[test]
    fn gate_takes_back_what_a_failed_opening_recorded() {
        let directory = tempfile::tempdir().unwrap();
        let all = Amount {
            dirty_bytes: 5,
            nothing: false,
            age: Duration::ZERO,
        };
        let left = Left { all, in_log: None };
        let exact = DirtyRecord::of_new_log(Uuid::from_u128(1), 7, None).closed(left);
        exact.write(directory.path()).unwrap();
        let gate = gate(directory.path());
        gate.take_back();
        assert_eq!(gate.dirty_record(), Some(exact.clone()));
        let gate = self::gate(directory.path());
        gate.begin(log(7, 1), None).unwrap();
        assert!(gate.dirty_record().unwrap().in_use);
        gate.take_back();
        assert_eq!(gate.dirty_record(), Some(exact));
    }

    #[test]
    fn gate_of_an_opening_that_was_given_up_lets_nothing_in() {
        let directory = tempfile::tempdir().unwrap();
        let late = gate(directory.path());
        late.take_back();
        // By now there may be another volume in that directory.
        gate(directory.path()).begin(log(9, 1), None).unwrap();
        let record = late.dirty_record();
        for refused in [late.record().err(), late.begin(log(7, 1), None).err()] {
            assert_eq!(refused.unwrap().kind, Failure::Refused);
        }
        assert_eq!(late.dirty_record(), record);
    }

    #[test]
    fn gate_without_room_for_a_record_leaves_none() {
        let directory = tempfile::tempdir().unwrap();
        let gate = gate(directory.path());
        gate.begin(log(7, 1), None).unwrap();
        // Nothing can be written where a directory is in the way.
        std::fs::create_dir(directory.path().join("dirty.json.tmp")).unwrap();
        gate.begin(log(7, 2), None).unwrap();
        assert_eq!(gate.dirty_record(), None);
    }
}
