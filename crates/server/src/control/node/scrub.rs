//! Scrubs: by hand and by the schedule, one volume at a time, with the last whole one on record beside the
//! volume's entry.
//!
//! A scrub that a stop, a crash or a cancel has ended left nothing; the next one begins again. Only one that
//! came to its end is recorded.
//!
//! Invariant: whoever looks at a record finds it in memory. It is read when its volume is found or opened, and written
//! beside the control plane, of each volume by one thread at a time; a disk that hangs costs the record, and nothing
//! waits for it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hdcs_api::time::unix_ms;
use hdcs_api::{ApiError, ErrorKind, LastScrub, Scrub, ScrubVolume, Volume};
use hdcs_backend::BackendError;
use hdcs_backend::memory::{self, Lease, ObjectMemory, Shortage};
use hdcs_backend::url::BackendUrl;
use hdcs_backend::verify::Verified;
use hdcs_frontend::VolumeNumber;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::memory::Memories;
use super::setup::Setup;
use super::volumes::Volumes;
use super::{ANSWER_TIME_MAX, Node, at_volume, find, in_time, invalid, lock};
use crate::catalogue::{self, Entry};
use crate::control::link::Link;
use crate::data_dir::beside::{SCRUB, SCRUB_FILE};
use crate::data_dir::sealed;
use crate::inspect;
use crate::scrub::{Pace, Part, Progress};
use crate::shard::command::Command;

const HOUR_MS: u64 = 3_600_000;
const MIB: u64 = 1 << 20;
/// How often a thread that verifies a backend is told whether clients keep the volume busy.
const WATCH_PERIOD: Duration = Duration::from_millis(500);
/// Unanswered requests from which on it lets them go first.
const BUSY_REQUESTS: u64 = 8;
/// After the end of a scrub by the schedule that came to no result, for a reason such as a backend that
/// cannot be reached: when it is tried again.
const RETRY_MS: u64 = HOUR_MS;
/// The longest that a scrub of the node's own devices may take: longer than any device at any rate.
const SCRUB_TIME_MAX: Duration = Duration::from_hours(24 * 365);

/// What is known of a volume's scrubs beyond the life of the process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Since when the time to the next one counts: Unix time in milliseconds.
    since_ms: u64,
    last: Option<LastScrub>,
}

/// What the node knows of scrubs.
pub(super) struct Scrubs {
    setup: Arc<Setup>,
    link: Arc<Link>,
    volumes: Arc<Volumes>,
    memories: Arc<Memories>,
    /// Scrubs that are under way, by the number of the volume.
    running: Mutex<BTreeMap<u32, Arc<Progress>>>,
    records: Arc<Mutex<BTreeMap<u32, Known>>>,
}

/// The record of a volume, and how far it is written.
#[derive(Clone, Debug, Default)]
struct Known {
    record: Record,
    /// A thread is writing it.
    is_being_written: bool,
    /// It has changed since that thread took it.
    has_changed: bool,
}

/// How a scrub ended, if it came to an end.
type Ended = Result<Arc<Progress>, ApiError>;

impl Scrubs {
    /// Nothing is known yet.
    pub fn new(
        setup: Arc<Setup>,
        link: Arc<Link>,
        volumes: Arc<Volumes>,
        memories: Arc<Memories>,
    ) -> Self {
        Self {
            setup,
            link,
            volumes,
            memories,
            running: Mutex::default(),
            records: Arc::default(),
        }
    }

    /// A volume is gone, or goes.
    pub fn cancel(&self, number: u32) -> bool {
        let running = lock(&self.running);
        let progress = running.get(&number);
        progress.inspect(|progress| progress.cancel()).is_some()
    }

    /// The node stops.
    pub fn cancel_all(&self) {
        lock(&self.running)
            .values()
            .for_each(|progress| progress.cancel());
    }

    /// What is known of a volume's scrubs, once that was read.
    fn record_of(&self, number: u32) -> Option<Record> {
        let records = lock(&self.records);
        records.get(&number).map(|known| known.record.clone())
    }

    /// A volume was found in the catalogue, with this on record.
    pub fn note(&self, number: u32, record: Option<Record>) {
        if let Some(record) = record {
            let known = Known {
                record,
                ..Known::default()
            };
            lock(&self.records).insert(number, known);
        }
    }

    /// A volume was opened. What was never recorded begins to count now.
    pub async fn track(&self, entry: &Entry) {
        if self.record_of(entry.number).is_some() {
            return;
        }
        let directory = catalogue::directory(self.setup.layout(), &entry.name);
        match in_time(ANSWER_TIME_MAX, move || read(&directory)).await {
            Some(Some(record)) => self.note(entry.number, Some(record)),
            Some(None) => self.record(entry, |record| record.since_ms = unix_ms()),
            // Nobody knows what it says: it is neither replaced nor followed.
            None => tracing::warn!(
                volume = entry.name.as_str(),
                "when it was scrubbed last cannot be read in time: it is scrubbed by hand alone until the next start"
            ),
        }
    }

    /// Change the record of a volume, and have it written; returns at once.
    fn record(&self, entry: &Entry, change: impl FnOnce(&mut Record)) {
        {
            let mut records = lock(&self.records);
            let known = records.entry(entry.number).or_default();
            change(&mut known.record);
            known.has_changed = true;
            if std::mem::replace(&mut known.is_being_written, true) {
                return;
            }
        }
        let path = catalogue::directory(self.setup.layout(), &entry.name).join(SCRUB_FILE);
        let (records, number) = (Arc::clone(&self.records), entry.number);
        tokio::task::spawn_blocking(move || keep(&records, number, &path));
    }

    /// The running scrub and the last whole one, as the API has it.
    pub fn view(&self, entry: &Entry) -> Scrub {
        let mut view = Scrub {
            last: self.record_of(entry.number).and_then(|record| record.last),
            ..Scrub::default()
        };
        if let Some(progress) = lock(&self.running).get(&entry.number) {
            let (part, bytes, left) = progress.part();
            let (bad_blocks, healed_blocks) = progress.blocks();
            view.running = true;
            part.word().clone_into(&mut view.part);
            view.part_bytes = bytes;
            view.part_left_bytes = left;
            view.read_bytes = progress.read_bytes();
            view.rate_bytes_per_s = progress.rate();
            view.bad_blocks = bad_blocks;
            view.healed_blocks = healed_blocks;
            view.problems = progress.problems();
        }
        view
    }

    /// Begin to scrub a volume, at so many bytes a second.
    pub fn begin(self: &Arc<Self>, entry: &Entry, rate: u64) -> Result<(), ApiError> {
        let progress = Arc::new(Progress::new(rate));
        {
            let mut running = lock(&self.running);
            // Several would read several times as much a second.
            if let Some(&other) = running.keys().next() {
                let which = self.volumes.name_of(VolumeNumber(other));
                return Err(ApiError::new(
                    ErrorKind::Conflict,
                    format!(
                        "volume {}: {} is being scrubbed, and one volume is at a time: wait for its end, or \
                         cancel it with `hdcs volume scrub {which} --cancel`",
                        entry.name,
                        if other == entry.number { "it" } else { &which },
                    ),
                ));
            }
            running.insert(entry.number, Arc::clone(&progress));
        }
        let (scrubs, entry) = (Arc::clone(self), entry.clone());
        // Its end is in the record, and in the log.
        tokio::spawn(async move {
            let ended = scrubs.scrub_all(&entry, progress).await;
            scrubs.note_end(&entry, ended);
            lock(&scrubs.running).remove(&entry.number);
        });
        Ok(())
    }

    /// Scrub every part of a volume.
    async fn scrub_all(&self, entry: &Entry, progress: Arc<Progress>) -> Ended {
        let number = VolumeNumber(entry.number);
        let shared = Arc::clone(&progress);
        self.link
            .ask("scrubbing it", SCRUB_TIME_MAX, |answer| {
                Command::Scrub(number, shared, answer)
            })
            .await?;
        if progress.is_cancelled() {
            return Ok(progress);
        }
        if let Some(path) = entry.home_path(self.setup.layout()) {
            let (shared, uuid) = (Arc::clone(&progress), entry.uuid);
            let link = Arc::clone(&self.link);
            let memory = self.memories.lease(memory::verify_home(entry.bytes));
            let memory = memory.map_err(|shortage| no_memory(entry, Part::Home, &shortage))?;
            let verifying = move || {
                let _memory = memory;
                let mut ask = |block: u64| {
                    let (answer, answered) = oneshot::channel();
                    link.send(Command::VerifyHome(number, block, answer));
                    let found = answered.blocking_recv();
                    let found = found.unwrap_or_else(|_| Err("it was closed".to_owned()));
                    let found = found.map_err(std::io::Error::other)?;
                    shared.found(found.damaged.len() as u64, 0);
                    Ok(found)
                };
                let mut pace = Pace::new(&shared);
                inspect::home::verify(&path, uuid, &mut pace, &mut ask)
            };
            self.scrub_beside(entry, &progress, Part::Home, verifying)
                .await?;
        }
        if progress.is_cancelled() {
            return Ok(progress);
        }
        let (url, encryption) = (
            entry.backend_url(self.setup.layout()),
            entry.encryption.clone(),
        );
        let (shared, name) = (Arc::clone(&progress), entry.name.clone());
        let memory = self.memory_to_verify(entry)?;
        let verifying = move || {
            let mut place = BackendUrl::parse(&url)
                .map_err(|error| BackendError::Refused(error.to_string()))?
                .place;
            if let Some(encryption) = encryption {
                let unlocked = encryption.unlock();
                let unlocked =
                    unlocked.map_err(|error| BackendError::Refused(error.to_string()))?;
                place.encrypt(unlocked.objects);
            }
            let (_memory, is_short) = memory;
            if is_short {
                place.bound(ObjectMemory::least());
            }
            let verified = place.verify(&mut Pace::new(&shared));
            if !shared.is_cancelled()
                && let Some(store) = place.snapshot_store()
            {
                // What it keeps for clones that never came to be costs space, and nothing else.
                match store.forget_dead_clones() {
                    Ok(0) => {}
                    Ok(count) => tracing::info!(
                        "volume {name}: {count} clones never came to be; what was kept for them is freed"
                    ),
                    Err(error) => tracing::warn!(
                        "volume {name}: whether all of its clones came to be cannot be seen: {error}"
                    ),
                }
            }
            verified
        };
        self.scrub_beside(entry, &progress, Part::Backend, verifying)
            .await?;
        Ok(progress)
    }

    /// Memory to verify the backend of a volume, and whether that is the least that is needed for it.
    fn memory_to_verify(&self, entry: &Entry) -> Result<(Option<Lease>, bool), ApiError> {
        if self.setup.needs_of(entry).kind != memory::Kind::Objects {
            return Ok((None, false));
        }
        let [plenty, enough] = memory::VERIFY_OBJECTS;
        if let Ok(lease) = self.memories.lease(plenty) {
            return Ok((Some(lease), false));
        }
        let reserved = self.memories.lease(enough);
        let lease = reserved.map_err(|shortage| no_memory(entry, Part::Backend, &shortage))?;
        Ok((Some(lease), true))
    }

    /// Verify a part on a thread of its own, and tell it meanwhile whether clients keep the volume busy.
    async fn scrub_beside<E: std::fmt::Display + Send + 'static>(
        &self,
        entry: &Entry,
        progress: &Arc<Progress>,
        part: Part,
        verify: impl FnOnce() -> Result<Verified, E> + Send + 'static,
    ) -> Result<(), ApiError> {
        progress.begin(part, 0);
        let mut verifying = tokio::task::spawn_blocking(verify);
        let verified = loop {
            tokio::select! {
                verified = &mut verifying => break verified,
                () = tokio::time::sleep(WATCH_PERIOD) => {}
            }
            let report = self.link.report().await?;
            let Some(volume) = find(&report, VolumeNumber(entry.number)) else {
                // It was closed: what it has is not looked at any more.
                progress.cancel();
                continue;
            };
            progress.set_busy(volume.stats.requests_in_flight >= BUSY_REQUESTS);
        };
        let part = part.word();
        let fails = |why: String| {
            let why = format!("its {part} cannot be verified: {why}");
            at_volume(entry.name.as_str(), ApiError::new(ErrorKind::Failed, why))
        };
        let verified = verified.map_err(|error| fails(error.to_string()))?;
        let verified = verified.map_err(|error| fails(error.to_string()))?;
        if verified.is_cut_short {
            progress.cancel();
        }
        for problem in verified.problems {
            progress.problem(format!("{part}: {problem}"));
        }
        if verified.more_problems > 0 {
            let more = verified.more_problems;
            progress.problem(format!("{part}: {more} more problems are not listed"));
        }
        // Nothing is recorded, since most of it may not have been verified; it is tried again soon.
        if let Some(why) = verified.ended_by {
            for problem in progress.problems() {
                tracing::error!(volume = entry.name.as_str(), "scrub: {problem}");
            }
            return Err(fails(why));
        }
        Ok(())
    }

    fn note_end(&self, entry: &Entry, ended: Ended) {
        let name = entry.name.as_str();
        // A volume that has left meanwhile, or come back as another one, has no result.
        let is_there = self
            .volumes
            .entry(name)
            .is_ok_and(|now| now.number == entry.number);
        let progress = match ended {
            Ok(progress) if !progress.is_cancelled() && is_there => progress,
            Ok(_) => return tracing::info!(volume = name, "its scrub was cancelled"),
            Err(error) => {
                self.postpone(entry);
                return tracing::warn!(volume = name, "its scrub did not come to its end: {error}");
            }
        };
        let (bad_blocks, healed_blocks) = progress.blocks();
        let problems = progress.problems();
        for problem in &problems {
            tracing::error!(volume = name, "scrub: {problem}");
        }
        let last = LastScrub {
            ended_ms: unix_ms(),
            took_ms: progress.elapsed().as_millis() as u64,
            read_bytes: progress.read_bytes(),
            bad_blocks,
            healed_blocks,
            problems,
        };
        tracing::info!(
            volume = name,
            read_bytes = last.read_bytes,
            bad_blocks,
            healed_blocks,
            problems = last.problems.len(),
            "it was scrubbed"
        );
        self.record(entry, |record| {
            *record = Record {
                since_ms: last.ended_ms,
                last: Some(last),
            };
        });
    }

    /// Nothing came of it: try again sooner than after the whole interval, but not at once.
    fn postpone(&self, entry: &Entry) {
        let interval = self.interval_ms(entry);
        let since = retried_since(unix_ms(), interval);
        if let Some(known) = lock(&self.records).get_mut(&entry.number) {
            known.record.since_ms = known.record.since_ms.max(since);
        }
    }

    fn interval_ms(&self, entry: &Entry) -> u64 {
        let settings = self.setup.settings_of(&entry.settings);
        settings.map_or(0, |settings| settings.scrub_interval_h) * HOUR_MS
    }

    /// Scrub the volume whose turn it is, if none is being scrubbed; called about once a second.
    pub fn begin_by_schedule(self: &Arc<Self>) {
        if !lock(&self.running).is_empty() {
            return;
        }
        let now = unix_ms();
        let open = self.volumes.entries().into_iter().filter_map(|entry| {
            let interval = self.interval_ms(&entry);
            let is_open = self.volumes.entry(entry.name.as_str()).is_ok();
            let is_wanted = interval > 0 && is_open;
            let record = is_wanted.then(|| self.record_of(entry.number))?;
            Some((record?.since_ms, interval, entry))
        });
        let Some(entry) = next_due(now, open) else {
            return;
        };
        let Ok(settings) = self.setup.settings_of(&entry.settings) else {
            return;
        };
        if let Err(error) = self.begin(&entry, settings.scrub_rate_mib_s * MIB) {
            tracing::debug!("{error}");
        }
    }

    /// No scrub may stand in the way of a volume's end.
    pub fn forget(&self, number: u32) {
        self.cancel(number);
        lock(&self.records).remove(&number);
    }
}

impl Node {
    /// Begin to scrub a volume.
    pub async fn scrub(&self, name: &str, request: ScrubVolume) -> Result<Volume, ApiError> {
        let entry = self.volumes.entry(name)?;
        let rate = match request.rate_bytes_per_s {
            Some(0) => return Err(invalid(format!("volume {name}: the rate is at least 1"))),
            Some(rate) => rate,
            None => self.setup.settings_of(&entry.settings)?.scrub_rate_mib_s * MIB,
        };
        self.scrubs.begin(&entry, rate)?;
        self.volume(name).await
    }

    /// End a running scrub soon.
    pub fn cancel_scrub(&self, name: &str) -> Result<(), ApiError> {
        let entry = self.volumes.entry(name)?;
        if self.scrubs.cancel(entry.number) {
            return Ok(());
        }
        Err(ApiError::new(
            ErrorKind::Conflict,
            format!("volume {name}: it is not being scrubbed"),
        ))
    }

    /// Scrub the volume whose turn it is, if none is being scrubbed; called about once a second.
    pub fn scrub_by_schedule(&self) {
        self.scrubs.begin_by_schedule();
    }
}

/// Why a part of a volume is not verified.
fn no_memory(entry: &Entry, part: Part, shortage: &Shortage) -> ApiError {
    let why = format!("its {} cannot be verified: {shortage}", part.word());
    at_volume(entry.name.as_str(), ApiError::new(ErrorKind::Failed, why))
}

/// Of volumes, with since when their intervals count and how long these are (0: by hand alone), the one whose
/// scrub is due: whose last one is the longest ago. Times are in milliseconds.
fn next_due<T>(now: u64, volumes: impl Iterator<Item = (u64, u64, T)>) -> Option<T> {
    volumes
        .filter(|(since, interval, _)| *interval > 0 && now >= since.saturating_add(*interval))
        .min_by_key(|(since, ..)| *since)
        .map(|(.., volume)| volume)
}

/// Since when the interval counts of a volume whose scrub came to no result: it is tried again after a pause.
fn retried_since(now: u64, interval: u64) -> u64 {
    (now + RETRY_MS).saturating_sub(interval)
}

/// The record in a volume's directory. Blocks.
pub(super) fn read(directory: &Path) -> Option<Record> {
    sealed::read(&directory.join(SCRUB_FILE), SCRUB).ok()
}

/// Write the record of a volume, until it is on the disk as it is in memory or the volume is gone. Without it the next
/// start counts anew. Blocks.
fn keep(records: &Mutex<BTreeMap<u32, Known>>, number: u32, path: &Path) {
    loop {
        let record = {
            let mut records = lock(records);
            let Some(known) = records.get_mut(&number) else {
                return;
            };
            if !std::mem::take(&mut known.has_changed) {
                known.is_being_written = false;
                return;
            }
            known.record.clone()
        };
        if let Err(error) = sealed::write(path, SCRUB, &record) {
            tracing::warn!("{}: {error}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrub_is_due_after_its_interval_and_not_before() {
        let volume = |since, hours| std::iter::once((since, hours * HOUR_MS, "v"));
        let begun = 1_000_000 * HOUR_MS;
        for hours in [1, 168, 8760] {
            let due = begun + hours * HOUR_MS;
            assert_eq!(next_due(due - 1, volume(begun, hours)), None);
            assert_eq!(next_due(due, volume(begun, hours)), Some("v"));
        }
        // By hand alone, however long ago.
        assert_eq!(next_due(u64::MAX, volume(0, 0)), None);
        // A clock that was put back makes it wait, no more.
        assert_eq!(next_due(begun, volume(begun + HOUR_MS, 1)), None);
    }

    #[test]
    fn scrub_that_is_due_for_the_longest_time_comes_first() {
        let hours = |hours: u64| hours * HOUR_MS;
        let volumes = [
            (hours(50), hours(10), "young"),
            (hours(20), hours(200), "not due"),
            (hours(30), hours(20), "old"),
            (hours(10), 0, "by hand"),
        ];
        assert_eq!(next_due(hours(100), volumes.into_iter()), Some("old"));
        assert_eq!(next_due(hours(60), volumes.into_iter()), Some("old"));
        assert_eq!(next_due(hours(49), volumes.into_iter()), None);
    }

    #[test]
    fn scrub_record_that_changes_while_it_is_written_is_written_again() {
        let directory = tempfile::tempdir().unwrap();
        let records = Mutex::new(BTreeMap::new());
        let path = directory.path().join(SCRUB_FILE);
        let change = |since_ms| {
            let mut records = lock(&records);
            let known: &mut Known = records.entry(1).or_default();
            known.record.since_ms = since_ms;
            known.has_changed = true;
            known.is_being_written = true;
        };
        let since = || read(directory.path()).map(|record| record.since_ms);
        assert_eq!(since(), None);
        change(1);
        // Nobody reads what is written into a pipe, so that the first write hangs.
        let pipe = directory.path().join(format!("{SCRUB_FILE}.tmp"));
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| keep(&records, 1, &path));
            while lock(&records)[&1].has_changed {
                std::thread::yield_now();
            }
            // Whoever looks or changes it does not wait.
            change(2);
            assert!(!writer.is_finished());
            drop(std::fs::File::open(&pipe).unwrap());
            writer.join().unwrap();
        });
        assert!(!lock(&records)[&1].is_being_written);
        assert_eq!(since(), Some(2));
        // Of a volume that is gone nothing is written.
        lock(&records).clear();
        std::fs::remove_file(&path).unwrap();
        keep(&records, 1, &path);
        assert_eq!(since(), None);
    }

    #[test]
    fn scrub_without_a_result_is_tried_again_after_a_pause() {
        let (now, interval) = (1_000 * HOUR_MS, 168 * HOUR_MS);
        let since = retried_since(now, interval);
        let volume = || std::iter::once((since, interval, "v"));
        assert_eq!(next_due(now + RETRY_MS - 1, volume()), None);
        assert_eq!(next_due(now + RETRY_MS, volume()), Some("v"));
    }
}
