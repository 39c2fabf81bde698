//! Opening volumes: all of them at start, one that has to wait again and again, one by hand,
//! and one whose write log is lost from its backend alone.
//!
//! ```text
//!            ┌───────────── next attempt ────────────┐
//!            ▼                                        │
//!  start ─► opening ──► open            waiting (backend unreachable, too little memory; 1 s to 30 s;
//!            │ │ └────────────────────────────────────┘ log still in use: half a minute in all, then refused)
//!            │ └─► refused ──────── `volume open` ──► opening
//!            └───► log or local store lost ── `volume open` ──► opening
//!                     └─ `volume open --discard-dirty` ─► new log, new local store, new number ──► opening
//! ```
//!
//! Invariants:
//! 1. Volumes begin to be opened in order, so many at a time ([`hdcs_core::node::start`]), but none waits for one whose log or
//!    backend hangs; nor do clients of the node for longer than [`START_PATIENCE`]. The control plane answers from when the
//!    catalogue was read.
//! 2. A log is given up only if it cannot be opened, the backend can, and `discard_dirty` says so or
//!    it is certain that it holds nothing. It is moved aside, not destroyed, unless it is a device.
//! 3. A volume that gives up its log gets a new number with the new log, in one durable step: what
//!    the read cache holds under the old number, some of it of data that is lost now, is never found
//!    again. Before that step the volume is as lost as before, after it as new as its backend.
//! 4. A volume that a start is to open is opened, or found not to open, whatever else is done to it when its turn comes.
//!    Until that turn nothing of it counts as hanging.
//! 5. An opening whose thread hangs is given up only for a volume that is to go. Whatever that thread
//!    brings later is closed; it changes neither records nor volumes any more ([`Gate`]).

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, fs};

use hdcs_api::time::{unix_ms, utc};
use hdcs_api::{ApiError, ErrorKind, Lost, OpenVolume, OpenedVolume};
use hdcs_backend::Absent;
use hdcs_backend::crypt::Unlocked;
use hdcs_backend::home::store;
use hdcs_backend::memory::{ObjectMemory, Shortage};
use hdcs_backend::url::BackendUrl;
use hdcs_core::node::opening::{Failure, retry_pause};
use hdcs_core::volume::{Volume as CoreVolume, sharing};
use hdcs_frontend::VolumeNumber;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::create::{check_log_place, is_block_device, make_log};
use super::delete::{DELETED, Leaving, forget_cached};
use super::entries::Catalogue;
use super::home::make_home;
use super::moving::{Destination, Moving};
use super::places::{dirty_of_unopened, log_answers};
use super::record::Gate;
use super::replicas::Replicas;
use super::volumes::{Busy, Volumes};
use super::{
    COMMAND_TIME_MAX, Node, WATCH_PERIOD, at_volume, beside, failed, invalid, lock, moving,
};
use crate::catalogue::{self, Entry, Found};
use crate::data_dir::dirty::{DirtyRecord, Loss};
use crate::data_dir::{kept, sealed};
use crate::inspect;
use crate::shard::command::{Command, OpenFailure, OpenedAs};

/// How long the start waits for volumes that are slow to open; they go on opening after it.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// How long an opening may take before it counts as hanging: files open at once, and what is reached
/// over a network gives up by itself before the second time.
const HANG_TIME_LOCAL: Duration = Duration::from_secs(10);
const HANG_TIME_REMOTE: Duration = Duration::from_secs(60);
/// Openings that are handed over at once: fewer than the commands that the data path takes.
const OPENINGS_PER_ROUND: usize = 64;

/// How often it is said how many volumes a start has opened, and of how many at least at its end.
const PROGRESS_PERIOD: Duration = Duration::from_secs(1);
const VOLUMES_SAID_MIN: usize = 20;
/// Why a volume is not open.
#[derive(Clone, Debug)]
pub(super) enum NotOpen {
    /// A start opens it.
    Opening {
        /// When that began; none before its turn.
        since: Option<Instant>,
    },
    /// It is between two shards.
    Moving(Moving),
    /// Its backend cannot be reached, somebody still uses its log, or there is too little memory for it; it is tried
    /// again.
    Waiting {
        why: String,
        kind: Failure,
        /// In a row that have failed like this.
        attempts: u32,
        retry_at: Instant,
    },
    /// Its write log is lost.
    LogLost { why: String, loss: Loss },
    /// Its local store is lost.
    LocalStoreLost { why: String, loss: Loss },
    /// The node stops.
    Stopping,
    /// This node has a copy of its log, and another one serves it, or none does.
    Copy,
    /// Somebody must put something right.
    Refused { why: String },
    /// Deleting or detaching it has begun, and did not end.
    Leaving {
        why: String,
        /// What becomes of what it has at its backend's place once that ends.
        what: Leaving,
    },
}

impl NotOpen {
    /// Why a volume is not open after so many attempts in a row to open it, the last of which failed like this.
    async fn of(
        failure: &OpenFailure,
        attempts: u32,
        entry: &Entry,
        catalogue: &Catalogue,
    ) -> Self {
        let why = failure.message.clone();
        match failure.kind {
            kind if kind.is_tried_again(attempts) => Self::Waiting {
                why,
                kind,
                attempts,
                retry_at: Instant::now() + Duration::from_nanos(retry_pause(attempts).0),
            },
            Failure::LogLost => Self::LogLost {
                why,
                loss: catalogue.loss_of(entry, false).await,
            },
            Failure::LocalLost => Self::LocalStoreLost {
                why,
                loss: catalogue.loss_of(entry, true).await,
            },
            Failure::Gone => {
                // Another node may have deleted it, who knows nothing of what is dirty here.
                match catalogue.given_up(&entry.name).await {
                    Some(what) => Self::Leaving {
                        why: "its deletion has begun, and did not end: delete it again".to_owned(),
                        what: what.into(),
                    },
                    None => Self::Refused { why },
                }
            }
            Failure::Stopping => Self::Stopping,
            Failure::InUse => Self::Refused {
                why: format!("{why}: so it was at each of {attempts} attempts"),
            },
            Failure::Unreachable | Failure::Shortage | Failure::Refused => Self::Refused { why },
        }
    }

    /// What was given up in the backend by a deletion that did not end: nobody can open it any more, so it goes
    /// whenever that goes on. An image might be somebody else's by then.
    pub fn given_up(&self) -> Option<Leaving> {
        match self {
            Self::Leaving { what, .. } => what.given_up().map(Leaving::from),
            _ => None,
        }
    }

    /// The phase that it is shown in.
    pub fn phase(&self) -> &'static str {
        match self {
            Self::Opening { .. } => "opening",
            Self::Moving(_) => "moving",
            Self::Waiting { .. } => "waiting",
            Self::Stopping => "closed",
            Self::Copy => "copy",
            Self::LogLost { .. }
            | Self::LocalStoreLost { .. }
            | Self::Refused { .. }
            | Self::Leaving { .. } => "failed",
        }
    }

    /// For how long it has been opening, if that is longer than it should take.
    pub fn hangs_for(&self) -> Option<Duration> {
        match self {
            // Before its turn nothing of it was asked, and nothing is late.
            Self::Opening { since } => since
                .map(|since| since.elapsed())
                .filter(|age| *age >= HANG_TIME_LOCAL),
            Self::Moving(moving) => moving.hangs_for(),
            _ => None,
        }
    }
}

/// A volume that the shard was asked to open.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opening {
    number: u32,
    since: Instant,
    hang_time: Duration,
}

impl fmt::Display for NotOpen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opening { .. } => match self.hangs_for() {
                None => f.write_str("it is being opened"),
                Some(age) => write!(
                    f,
                    "it has been opening for {} s: its write log or its backend does not answer; it \
                     opens by itself once they do, and `hdcs volume detach` or `delete` lets go of it",
                    age.as_secs()
                ),
            },
            Self::Moving(moving) => write!(f, "{moving}"),
            Self::Stopping => {
                f.write_str("the node is stopping; the volume is opened at the next start")
            }
            Self::Copy => f.write_str(
                "this node has a copy of its write log and does not serve it: `hdcs group show` says which node does, and \
                 `hdcs volume takeover` has this one do so",
            ),
            Self::Waiting { why, attempts, .. } => write!(
                f,
                "{why}: tried {attempts} times, and again by itself; `hdcs volume open` tries at once"
            ),
            Self::LogLost { why, loss } => write!(
                f,
                "{why}: its write log is lost: {loss}: put the log back and run `hdcs volume open`, or \
                 open it from its {} alone with `hdcs volume open --discard-dirty`",
                loss.left
            ),
            Self::LocalStoreLost { why, loss } => write!(
                f,
                "{why}: its local store is lost: {loss}: put it back and run `hdcs volume open`, or open the volume \
                 from its backend alone with `hdcs volume open --discard-dirty`"
            ),
            Self::Refused { why } => {
                write!(f, "{why}: put that right and run `hdcs volume open`")
            }
            Self::Leaving { why, .. } => f.write_str(why),
        }
    }
}

impl Node {
    /// Have the shard open a volume; what it says, and what of it is recorded.
    async fn ask_to_open(
        &self,
        entry: &Entry,
        volumes: usize,
        destination: Destination,
    ) -> Result<OpenedAs, OpenFailure> {
        let refused = |why: String| OpenFailure::new(Failure::Refused, why);
        let may_serve = |replicas: &Replicas| replicas.may_serve(entry.uuid);
        if entry.is_replicated && !self.replicas.as_ref().is_some_and(may_serve) {
            return Err(refused(NotOpen::Copy.to_string()));
        }
        let gate = Arc::new(self.catalogue.gate(entry));
        let short = |shortage: Shortage| OpenFailure::new(Failure::Shortage, shortage.to_string());
        let memory = if let Some(memory) = destination.memory {
            memory
        } else {
            let others = self.volumes.least_bytes();
            let memory = self.memories.reserve(entry, &others).map_err(short)?;
            self.memories.wait(&self.link).await?;
            memory
        };
        let mut spec = self
            .setup
            .spec(
                entry,
                volumes,
                Arc::<Gate>::clone(&gate),
                memory,
                self.log_spaces.enter(entry),
            )
            .map_err(|error| refused(error.message))?;
        let shards = self.link.path().shards();
        let put_there = entry.shard.filter(|&shard| shard < shards);
        spec.shard = if entry.is_replicated {
            // It stands on its copy, which is there.
            Some(0)
        } else {
            destination.shard.or(put_there)
        };
        spec.continues = destination.continues;
        let (answer, answered) = oneshot::channel();
        let stopping = || OpenFailure::new(Failure::Stopping, "the node is stopping");
        if !self.link.send(Command::Open(Box::new(spec), answer)) {
            if self.link.path().is_stopping() {
                return Err(stopping());
            }
            let why = "the data path has too much to do to take it; it is tried again";
            return Err(OpenFailure::new(Failure::Shortage, why));
        }
        // However long it takes: a log may be large and a backend far away.
        let result = answered.await.unwrap_or_else(|_| Err(stopping()));
        if result.is_err() {
            // A thread that panics has said so; then the record says "in use".
            let _ = tokio::task::spawn_blocking(move || gate.take_back()).await;
        }
        result
    }

    /// Open a volume on the shard that it was put on, or else on that which has least to do, and note what became of it.
    pub(super) async fn open(&self, entry: &Entry, volumes: usize) -> Result<(), OpenFailure> {
        self.open_at(entry, volumes, Destination::default()).await
    }

    /// The same on a certain shard.
    pub(super) async fn open_at(
        &self,
        entry: &Entry,
        volumes: usize,
        destination: Destination,
    ) -> Result<(), OpenFailure> {
        let before = self.volumes.not_open(entry.name.as_str());
        let opening = Opening {
            number: entry.number,
            since: Instant::now(),
            hang_time: hang_time(&entry.backend_url(self.setup.layout())),
        };
        lock(&self.openings).insert(entry.name.to_string(), opening);
        self.volumes.note_begun(entry.name.as_str(), opening.since);
        let mut result = self.ask_to_open(entry, volumes, destination.clone()).await;
        while let Err(failure) = &result
            && destination.is_waited_for(failure.kind, opening.since.elapsed())
        {
            tracing::info!(
                "volume {}: its opening on another shard is tried again while its clients wait: {failure}",
                entry.name
            );
            tokio::time::sleep(WATCH_PERIOD).await;
            result = self.ask_to_open(entry, volumes, destination.clone()).await;
        }
        lock(&self.openings).remove(entry.name.as_str());
        let mut entry = entry.clone();
        let not_open = match &result {
            Ok(opened) => {
                self.records
                    .track(&entry, self.setup.layout(), opened.log)
                    .await;
                self.catalogue
                    .record_backend(&mut entry, opened.backend.as_deref())
                    .await;
                None
            }
            Err(failure) => {
                let attempts = match before {
                    Some(NotOpen::Waiting { kind, attempts, .. }) if kind == failure.kind => {
                        attempts + 1
                    }
                    _ => 1,
                };
                Some(NotOpen::of(failure, attempts, &entry, &self.catalogue).await)
            }
        };
        if result.is_ok() {
            self.catalogue.keep_after_all(&entry).await;
            self.scrubs.track(&entry).await;
        }
        self.volumes.put(entry.clone(), not_open);
        if result.is_ok() {
            self.heats.track(&entry).await;
        }
        result.map(drop)
    }

    /// Begin what takes a volume away, if need be in the place of an opening that hangs. An opening
    /// that does not is waited for; none is given up for what will be refused.
    pub(super) async fn begin_leaving(
        &self,
        name: &str,
        what: &'static str,
        discard_dirty: bool,
    ) -> Result<Busy<'_>, ApiError> {
        let mut given_up: Option<Instant> = None;
        let began = Instant::now();
        while waits_for_its_turn(self, name) {
            if began.elapsed() > COMMAND_TIME_MAX {
                let message = format!(
                    "volume {name} waits for its turn to be opened, after the start of the node: try again in a while"
                );
                return Err(ApiError::new(ErrorKind::Conflict, message));
            }
            tokio::time::sleep(WATCH_PERIOD).await;
        }
        loop {
            let refused = match self.volumes.begin(name, what) {
                Ok(busy) => return Ok(busy),
                Err(refused) => refused,
            };
            let opening = lock(&self.openings).get(name).copied();
            match (opening, given_up) {
                (_, Some(at)) if at.elapsed() < COMMAND_TIME_MAX => {}
                (Some(opening), None) if opening.since.elapsed() < opening.hang_time => {}
                (Some(opening), None) => {
                    self.give_up(name, opening, what, discard_dirty).await?;
                    given_up = Some(Instant::now());
                }
                _ => return Err(refused),
            }
            tokio::time::sleep(WATCH_PERIOD).await;
        }
    }

    /// Give up an opening that hangs.
    async fn give_up(
        &self,
        name: &str,
        opening: Opening,
        what: &'static str,
        discard_dirty: bool,
    ) -> Result<(), ApiError> {
        let age = opening.since.elapsed().as_secs();
        let refuse = |why: String| {
            let message = format!("volume {name}: it has been opening for {age} s: {why}");
            Err(ApiError::new(ErrorKind::Conflict, message))
        };
        if let Found::Entry(entry) = self.volumes.slot(name)?.found {
            if what == DELETED && !log_answers(&entry, self.setup.layout()).await {
                return refuse(format!(
                    "its write log {} does not answer, so that it cannot be removed: detach the volume \
                     with `hdcs volume detach`",
                    entry.log_path(self.setup.layout()).display()
                ));
            }
            let dirty = dirty_of_unopened(name, &entry, &self.catalogue, &self.memories).await?;
            if !discard_dirty && !dirty.is_none() {
                return refuse(format!(
                    "its write log or its backend does not answer, and its write log holds {dirty} that \
                     the backend does not have: bring back what does not answer, or leave that behind \
                     with --discard-dirty"
                ));
            }
        }
        let number = VolumeNumber(opening.number);
        self.link
            .command(name, "giving up its opening", COMMAND_TIME_MAX, |answer| {
                Command::GiveUpOpening(number, answer)
            })
            .await
    }

    /// Open a volume that is in the catalogue, unless something else is being done to it.
    async fn open_by_itself(self: Arc<Self>, name: String) {
        let Some(_busy) = begin_by_itself(&self.volumes, &name).await else {
            return;
        };
        let Ok(slot) = self.volumes.slot(&name) else {
            return;
        };
        let (Found::Entry(entry), Some(before)) = (slot.found, slot.not_open) else {
            return;
        };
        let is_first = matches!(before, NotOpen::Opening { .. });
        match self.open(&entry, self.volumes.count()).await {
            Ok(()) if is_first => {}
            Ok(()) => tracing::info!("volume {name} is open now"),
            Err(failure) if is_first => {
                tracing::error!("volume {name} does not serve: {failure}");
            }
            Err(failure) => tracing::debug!("volume {name} still does not serve: {failure}"),
        }
    }

    /// Read the catalogue. What cannot be opened is listed with its reason; the names of the others, in the order in
    /// which they are to be opened.
    pub async fn recover(&self) -> Result<Vec<String>, ApiError> {
        self.log_spaces.share(&self.link);
        let (recovered, scrubs) = self.catalogue.recover().await?;
        for (number, record) in scrubs {
            self.scrubs.note(number, record);
        }
        for what in recovered.removed {
            tracing::warn!("removed {what}");
        }
        for what in recovered.left {
            tracing::warn!("not removed now, tried again at the next start: {what}");
        }
        for what in recovered.ignored {
            tracing::warn!("left alone, not a volume: {what}");
        }
        let mut names = Vec::new();
        for (at, (name, found)) in recovered.volumes.into_iter().enumerate() {
            if at % OPENINGS_PER_ROUND == OPENINGS_PER_ROUND - 1 {
                // Of each volume the data path is told why it is not open, and takes only so much at once; one that is
                // silent for so long takes it later.
                let _ = self.link.report().await;
            }
            match found {
                Found::Damaged(why) => {
                    tracing::error!("volume {name} does not serve: {why}");
                    self.volumes.put_damaged(name, why);
                }
                Found::Entry(entry) => {
                    let shards = self.link.path().shards();
                    if let Some(shard) = entry.shard.filter(|&shard| shard >= shards) {
                        let all = moving::shards_in_words(shards);
                        tracing::warn!(
                            "volume {name} is set to shard {shard}, but this node has only {all} (`shards`): it is placed \
                             freely until there is a shard {shard} again"
                        );
                    }
                    if entry.is_replicated {
                        // Its group says when.
                        self.volumes.put(*entry, Some(NotOpen::Copy));
                        continue;
                    }
                    self.volumes
                        .put(*entry, Some(NotOpen::Opening { since: None }));
                    names.push(name);
                }
            }
        }
        let names = dirty_first(self, names).await;
        self.start.begin(names.len());
        Ok(names)
    }

    /// Open every volume that was recovered. What takes long goes on opening when this has returned.
    pub async fn open_all(self: &Arc<Self>, names: Vec<String>) -> Result<(), ApiError> {
        let total = names.len();
        let mut in_order = tokio::spawn(open_in_order(Arc::clone(self), names));
        let until = tokio::time::Instant::now() + START_PATIENCE;
        let mut is_begun = false;
        let mut say =
            tokio::time::interval_at(until - START_PATIENCE + PROGRESS_PERIOD, PROGRESS_PERIOD);
        while !(is_begun && self.start.progress().left == 0) {
            tokio::select! {
                begun = &mut in_order, if !is_begun => {
                    begun.map_err(|error| failed(error.to_string()))??;
                    is_begun = true;
                }
                () = self.start.one_ended() => {}
                _ = say.tick() => tracing::info!("{}", self.start.progress()),
                () = tokio::time::sleep_until(until) => break,
            }
        }
        let progress = self.start.progress();
        let (opened, seconds) = (total - progress.left, progress.elapsed.as_secs_f64());
        if total > VOLUMES_SAID_MIN {
            tracing::info!("opened {opened} of {total} volumes in {seconds:.1} s");
        }
        if progress.left > 0 {
            tracing::warn!(
                "{} volumes are still being opened; the others serve",
                progress.left
            );
        }
        Ok(())
    }

    /// Try again what could not be reached and is due; called about once a second.
    pub fn retry(self: &Arc<Self>) {
        let now = Instant::now();
        for name in self.volumes.due(now, OPENINGS_PER_ROUND) {
            tokio::spawn(Arc::clone(self).open_by_itself(name));
        }
    }

    /// Open a volume by hand, if need be without its log.
    pub async fn open_now(
        &self,
        name: &str,
        request: OpenVolume,
    ) -> Result<OpenedVolume, ApiError> {
        let _busy = self.volumes.begin(name, "opened")?;
        let slot = self.volumes.slot(name)?;
        let entry = match (slot.found, slot.not_open) {
            (Found::Damaged(why), _) | (Found::Entry(_), Some(NotOpen::Leaving { why, .. })) => {
                return Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why)));
            }
            (Found::Entry(entry), Some(NotOpen::Copy)) if entry.is_replicated => {
                let why = NotOpen::Copy.to_string();
                return Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why)));
            }
            (Found::Entry(entry), Some(_)) => *entry,
            (Found::Entry(_), None) => {
                let volume = self.volume(name).await?;
                return Ok(OpenedVolume { volume, lost: None });
            }
        };
        let volumes = self.volumes.count();
        let mut opened_without = None;
        if let Err(failure) = self.open(&entry, volumes).await {
            let is_home_lost = failure.kind == Failure::LocalLost;
            let loss = self.catalogue.loss_of(&entry, is_home_lost).await;
            // The log of a group has copies: it is never made anew here.
            let may_lose = (request.discard_dirty || loss.is_none()) && !entry.is_replicated;
            if !failure.kind.is_loss() || !may_lose {
                return Err(self.volumes.refusal(name, &failure));
            }
            let (entry, kept) = self.replace_log(&entry, &request, is_home_lost).await?;
            let what = if is_home_lost { "local store" } else { "log" };
            tracing::warn!("volume {name} is opened without its {what}, which is lost: {loss}");
            let shown = |path: PathBuf| path.display().to_string();
            opened_without = Some(Lost {
                is_home: is_home_lost,
                dirty_bytes_max: loss.dirty_bytes_max,
                complete_until: loss.complete_until(),
                said: loss.to_string(),
                log_kept: kept.log.map(shown),
                home_kept: kept.home.map(shown),
            });
            let opened = self.open(&entry, volumes).await;
            opened.map_err(|failure| self.volumes.refusal(name, &failure))?;
        }
        tracing::info!("volume {name} was opened by hand");
        Ok(OpenedVolume {
            volume: self.volume(name).await?,
            lost: opened_without,
        })
    }

    /// Make a new log for a volume whose log is lost, and a new local store if that is lost: what the log has
    /// follows what the local store had, and means nothing without it. Its entry from now on, and where the old ones
    /// were moved to.
    async fn replace_log(
        &self,
        entry: &Entry,
        request: &OpenVolume,
        is_home_lost: bool,
    ) -> Result<(Entry, Aside), ApiError> {
        let name = entry.name.as_str();
        let log = match (&request.log_path, request.log_bytes) {
            (None, None) => {
                let (setup, of) = (Arc::clone(&self.setup), entry.clone());
                beside(move || setup.log_again(&of)).await?
            }
            (path, bytes) => {
                let path = path.as_ref().map_or(entry.log.path.clone(), PathBuf::from);
                let bytes = bytes.or(request.log_path.is_none().then_some(entry.log.bytes));
                check_log_place(path, bytes, Some(entry), &self.setup, &self.volumes)
                    .await
                    .map_err(|error| invalid(format!("volume {name}: {error}")))?
            }
        };
        let number = self.catalogue.next_number(name).await?;
        let new = Entry {
            number,
            log,
            ..entry.clone()
        };
        self.memories.check(&new)?;
        let config = self.setup.core_config(&new, self.volumes.count(), None)?;
        let (layout, old, overwrite) = (
            self.setup.layout().clone(),
            entry.clone(),
            request.log_overwrite,
        );
        let made = tokio::task::spawn_blocking(move || {
            let (high, low) = Uuid::new_v4().as_u64_pair();
            let log = high ^ low;
            let mut first_block = CoreVolume::format_log(&config, log);
            let directory = catalogue::directory(&layout, &new.name);
            if new.log.prepared.is_some() {
                sharing::share_log_space(&mut first_block);
            }
            if let Some(kept) = kept::read(&directory, new.uuid).map_err(failed)? {
                kept::carry(&kept, &mut first_block);
            }
            let mut unlocked = None;
            if let Some(encryption) = &new.encryption {
                let keys = encryption.unlock();
                let keys = keys.map_err(|error| failed(error.to_string()))?;
                keys.mark(&mut first_block);
                unlocked = Some(keys);
            }
            let objects = unlocked.as_ref().map(|keys| keys.objects.clone());
            // Nothing is given up before it is certain that the backend is there.
            let url = new.backend_url(&layout);
            let memory = ObjectMemory::least();
            let identity = new.backend_identity.as_deref();
            let backend =
                hdcs_backend::open_with(&url, new.bytes, Absent::Refuse, objects, memory, identity);
            drop(backend.map_err(|error| failed(error.to_string()))?);
            let home = new.home_path(&layout).filter(|_| is_home_lost);
            if let Some(home) = &home {
                refuse_foreign_home(home, new.uuid)?;
            }
            let place = new.log_path(&layout);
            let is_old_place = place == old.log_path(&layout);
            let aside = make_way(&place, is_old_place, new.uuid, overwrite)?;
            // The device is this volume's, or it may be overwritten: `make_way` has looked. The local store comes last:
            // until then it is lost as before, so what ends here in between is found by the next opening.
            let made = make_log(&place, &new.log, true, &first_block).and_then(|()| {
                let replace = |home: PathBuf| replace_home(&home, &new, unlocked.as_ref());
                home.map_or(Ok(None), replace)
            });
            let aside = match made {
                Ok(home) => Aside { log: aside, home },
                Err(error) => {
                    if let Some(aside) = &aside {
                        let _back_where_it_was = fs::rename(aside, &place);
                    }
                    return Err(error);
                }
            };
            let before = DirtyRecord::read(&directory, new.uuid);
            let record = if new.home.is_some() && !is_home_lost {
                DirtyRecord::of_new_log_beside(before.as_ref(), new.uuid, log)
            } else {
                let until = before.and_then(|before| before.complete_until_ms);
                DirtyRecord::of_new_log(new.uuid, log, until)
            };
            // In this order: with the old entry or the old record the new log is refused.
            catalogue::update(&layout, &new).map_err(|error| failed(error.to_string()))?;
            record
                .write(&directory)
                .map_err(|error| failed(format!("{}: {error}", directory.display())))?;
            Ok((new, aside))
        });
        let made = made.await.map_err(|error| failed(error.to_string()))?;
        let (new, aside) = made.map_err(|error| at_volume(name, error))?;
        forget_cached(entry, &self.link).await;
        Ok((new, aside))
    }
}

/// Begin to open a volume, unless something else is being done to it. If a start is to open it, the end of that is waited
/// for: nothing would try again.
async fn begin_by_itself<'a>(volumes: &'a Volumes, name: &str) -> Option<Busy<'a>> {
    loop {
        if let Ok(busy) = volumes.begin(name, "opened") {
            return Some(busy);
        }
        if !matches!(volumes.not_open(name), Some(NotOpen::Opening { .. })) {
            return None;
        }
        tokio::time::sleep(WATCH_PERIOD).await;
    }
}

/// Whether a start is to open a volume and has not begun to: nobody can say of it yet that it cannot be opened.
fn waits_for_its_turn(node: &Node, name: &str) -> bool {
    let slot = node.volumes.slot(name);
    let is_to_be_opened =
        slot.is_ok_and(|slot| matches!(slot.not_open, Some(NotOpen::Opening { .. })));
    is_to_be_opened && node.start.view().is_some() && !lock(&node.openings).contains_key(name)
}

/// Begin to open volumes in this order, some at a time; returns when the last one has begun.
async fn open_in_order(node: Arc<Node>, names: Vec<String>) -> Result<(), ApiError> {
    for (at, name) in names.into_iter().enumerate() {
        let place = match node.volumes.slot(&name).map(|slot| slot.found) {
            // One far away takes its time, and costs little here.
            Ok(Found::Entry(entry)) if is_local(&entry.backend_url(node.setup.layout())) => {
                node.start.place_for(entry.number).await;
                Some(entry.number)
            }
            _ => None,
        };
        if node.link.path().is_stopping() {
            return Ok(());
        }
        let opener = Arc::clone(&node);
        tokio::spawn(async move {
            Arc::clone(&opener).open_by_itself(name).await;
            opener.start.note_ended(place);
        });
        if at % OPENINGS_PER_ROUND == OPENINGS_PER_ROUND - 1 {
            // Once it has answered, it has taken what was sent before. One that is silent for so long takes it later.
            tokio::task::yield_now().await;
            let _ = node.link.report().await;
        }
    }
    Ok(())
}

/// These volumes, those first whose logs held most when that was last recorded: they take longest to open, and have
/// clients that wait.
async fn dirty_first(node: &Node, names: Vec<String>) -> Vec<String> {
    let entries: Vec<_> = (names.iter())
        .map(|name| node.volumes.slot(name).map(|slot| slot.found))
        .collect();
    let layout = node.setup.layout().clone();
    let dirty = tokio::task::spawn_blocking(move || {
        let dirty = entries.into_iter().map(|found| match found {
            Ok(Found::Entry(entry)) => {
                let directory = catalogue::directory(&layout, &entry.name);
                let record = DirtyRecord::read(&directory, entry.uuid);
                record.map_or(0, |record| record.dirty_bytes)
            }
            _ => 0,
        });
        dirty.collect::<Vec<_>>()
    });
    let Ok(dirty) = dirty.await else {
        return names;
    };
    let mut names: Vec<_> = dirty.into_iter().zip(names).collect();
    names.sort_by_key(|&(dirty, _)| Reverse(dirty));
    names.into_iter().map(|(_, name)| name).collect()
}

/// How long opening a backend may take before that counts as hanging.
fn hang_time(url: &str) -> Duration {
    if is_local(url) {
        HANG_TIME_LOCAL
    } else {
        HANG_TIME_REMOTE
    }
}

/// Whether a backend is a file or device of this machine, or nobody knows what it is.
fn is_local(url: &str) -> bool {
    BackendUrl::parse(url).map_or(true, |url| url.place.path().is_some())
}

/// A device in the place of a lost local store must be this volume's or empty: names of devices change, and it may be
/// the local store of another volume, or no local store at all.
fn refuse_foreign_home(home: &Path, volume: Uuid) -> Result<(), ApiError> {
    if inspect::is_missing_device(home) {
        return Err(ApiError::new(
            ErrorKind::Conflict,
            format!(
                "its local store cannot be made: {}: there is no such device: connect it, or an empty one of its \
                 size, there, and run `hdcs volume open` again",
                home.display()
            ),
        ));
    }
    if !is_block_device(home) || store::is_of(home, volume) || inspect::is_empty_device(home) {
        return Ok(());
    }
    Err(ApiError::new(
        ErrorKind::Conflict,
        format!(
            "its local store cannot be made: {}: the device holds something else, which would be lost: connect the \
             right one there, or clear it with `wipefs --all` and `blkdiscard`",
            home.display()
        ),
    ))
}

/// Where what was in the places of a lost log and local store is kept.
#[derive(Debug)]
struct Aside {
    log: Option<PathBuf>,
    home: Option<PathBuf>,
}

/// Make a new local store for a volume; a file in the place of the old one is moved aside, and back if that fails.
/// Where it is.
fn replace_home(
    home: &Path,
    volume: &Entry,
    keys: Option<&Unlocked>,
) -> Result<Option<PathBuf>, ApiError> {
    let aside = make_way(home, true, volume.uuid, true)?;
    // Its place is the volume's, and is not chosen anew.
    let advice = "make room there, and run `hdcs volume open` again";
    let made = make_home(home, volume, keys, true, advice);
    if let (Err(_), Some(aside)) = (&made, &aside) {
        let _back_where_it_was = fs::rename(aside, home);
    }
    made.map(|()| aside)
}

/// Make way for a new log of `volume`: a file in the place of its old one is moved aside, a device must
/// be this volume's or empty. A file elsewhere is somebody's, and left for [`make_log`] to refuse.
fn make_way(
    path: &Path,
    is_old_place: bool,
    volume: Uuid,
    overwrite: bool,
) -> Result<Option<PathBuf>, ApiError> {
    if is_block_device(path) {
        if !overwrite && inspect::log_owner(path) != Some(volume) {
            inspect::refuse_used_device(path)
                .map_err(|why| ApiError::new(ErrorKind::Conflict, why))?;
        }
        return Ok(None);
    }
    if inspect::is_missing_device(path) {
        return Err(ApiError::new(
            ErrorKind::Conflict,
            format!(
                "its write log cannot be made: {}: there is no such device: connect one, or name \
                 another place with --log-path",
                path.display()
            ),
        ));
    }
    if !is_old_place || fs::symlink_metadata(path).is_err() {
        return Ok(None);
    }
    let mut aside = path.as_os_str().to_owned();
    aside.push(format!(".lost-{}", utc(unix_ms())));
    let aside = PathBuf::from(aside);
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::rename(path, &aside)
        .and_then(|()| sealed::sync_directory(parent))
        .map_err(|error| {
            failed(format!(
                "{}: cannot be moved aside: {error}",
                path.display()
            ))
        })?;
    Ok(Some(aside))
}

#[cfg(test)]
mod tests;
