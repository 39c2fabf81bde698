//! Snapshots and clones: what only some backends have, the others refuse with what to do instead.
//!
//! Invariants:
//! 1. A snapshot holds everything that was acknowledged before it was asked for: the shard destages
//!    that first, in storage mode tiers it out, and asks the backend behind it.
//! 2. A snapshot that a clone begins with is not deleted, nor is a volume that has snapshots or
//!    clones, unless its data is kept. That is for people: the backend itself keeps what clones need.
//! 3. A clone is deleted by saying so at its place before its parent may free anything; if the place
//!    has another owner by now, it is left alone.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hdcs_api::time::unix_ms;
use hdcs_api::{
    ApiError, CloneVolume, CreateVolume, DeleteOptions, ErrorKind, MakeSnapshot, Snapshot,
    Snapshots, Volume,
};
use hdcs_backend::copying::Copying;
use hdcs_backend::memory::{Kind, ObjectMemory};
use hdcs_backend::url::{BackendUrl, file_url};
use hdcs_backend::{BackendError, CloneOrigin, SnapshotCommand, SnapshotStore, StoredSnapshots};
use hdcs_core::objects::io::{SnapshotError, SnapshotName};
use hdcs_core::volume::Phase;
use hdcs_frontend::VolumeNumber;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::encryption::key_place;
use super::flush::Flushes;
use super::memory::short;
use super::places::is_gone;
use super::volumes::Volumes;
use super::{
    ANSWER_TIME_MAX, COMMAND_TIME_MAX, FLUSH_TIME_MAX, MOVE_TIME_MAX, Node, beside, failed, find,
    in_time, invalid, lock, lost, parse_name,
};
use crate::catalogue::{Entry, StagedData, VolumeName};
use crate::control::link::Link;
use crate::data_dir::Layout;
use crate::shard::command::{Command, SnapshotFailure, VolumeReport};

/// How often it is looked whether a copy moves.
const COPY_WATCH_PERIOD: Duration = Duration::from_secs(1);

fn parse_snapshot(name: &str) -> Result<SnapshotName, ApiError> {
    SnapshotName::new(name).ok_or_else(|| {
        invalid(format!(
            "snapshot name {name:?}: it has 1 to 64 letters A-Z a-z, digits, `.`, `_` and `-`"
        ))
    })
}

/// A clone's place is in its parent's store.
fn check_clone_place(new: &VolumeName, url: &str, parent: &str) -> Result<(), ApiError> {
    let place = BackendUrl::parse(url).map_err(|error| invalid(error.to_string()))?;
    if let Some(exposure) = place.place.exposure() {
        return Err(invalid(format!("volume {new}: {exposure}")));
    }
    let scheme = |url: &str| url.split(':').next().map(str::to_owned);
    if place.place.snapshot_store().is_none() || scheme(url) != scheme(parent) {
        return Err(invalid(format!(
            "volume {new}: a clone shares what a snapshot of its parent holds: name a place in the same store, not {}",
            place.place.name()
        )));
    }
    Ok(())
}

/// What was found at a volume's place.
struct Looked {
    kept: StoredSnapshots,
    /// See [`SnapshotStore::copy_bytes`].
    copy_bytes: u64,
    /// See [`SnapshotStore::is_objects`].
    is_objects: bool,
}

impl Looked {
    /// What depends on a volume, as its place says; `None`: its backend has no snapshots.
    async fn at(entry: &Entry, layout: &Layout) -> Result<Option<Self>, BackendError> {
        let url = entry.backend_url(layout);
        let looked = tokio::task::spawn_blocking(move || {
            let place = BackendUrl::parse(&url)?.place;
            match place.snapshot_store() {
                None => Ok(None),
                Some(store) => match store.kept()? {
                    Some(kept) => Ok(Some(Self {
                        kept,
                        // Whoever copies finds out; a full file system must not stand against a deletion.
                        copy_bytes: store.copy_bytes().unwrap_or_default(),
                        is_objects: store.is_objects(),
                    })),
                    None => Err(BackendError::Absent(place.name())),
                },
            }
        });
        looked
            .await
            .unwrap_or_else(|error| Err(BackendError::Refused(error.to_string())))
    }

    /// The same for somebody who asks for snapshots.
    async fn at_or_refuse(entry: &Entry, layout: &Layout) -> Result<Self, ApiError> {
        let name = &entry.name;
        let kept = Self::at(entry, layout).await.map_err(|error| {
            let kind = if error.is_unreachable() {
                ErrorKind::Unavailable
            } else {
                ErrorKind::Failed
            };
            ApiError::new(kind, format!("volume {name}: {error}"))
        })?;
        let looked = kept.ok_or_else(|| invalid(instead(entry, layout)))?;
        let place = entry.backend_url(layout);
        let identity = entry.backend_identity.as_deref();
        let refused = looked.kept.refuse_other(&place, identity);
        refused.map_err(|error| {
            ApiError::new(ErrorKind::Conflict, format!("volume {name}: {error}"))
        })?;
        Ok(looked)
    }
}

/// Why a backend has no snapshots, and what to do instead.
fn instead(entry: &Entry, layout: &Layout) -> String {
    let (name, url) = (&entry.name, entry.backend_url(layout));
    let place = url.split('?').next().unwrap_or(&url);
    match place.split_once(':') {
        Some(("rbd", image)) if entry.is_read_only() => format!(
            "volume {name}: it is a snapshot itself, of an RBD image; for a clone run `rbd clone \
             {image} POOL/NEW`"
        ),
        Some(("file", path)) if entry.is_read_only() => format!(
            "volume {name}: it is a snapshot itself, of a file; for a clone run `hdcs volume clone` with \
             the volume that it is of, or `cp --reflink=auto {path} NEW` and create a volume over that"
        ),
        _ => format!(
            "volume {name}: its backend {place} has no snapshots; a file has, and rbd:, dir:, s3: and hdfs: have: \
             run `hdcs volume flush {name}`, then snapshot the device (LVM, the array)"
        ),
    }
}

/// Which volume of this node is over a snapshot of another one.
async fn volume_over(
    entry: &Entry,
    snapshot: &str,
    layout: &Layout,
    volumes: &Volumes,
) -> Option<String> {
    let others = volumes.entries().into_iter();
    let others = others.map(|other| (other.name.to_string(), other.backend_url(layout)));
    let (others, url) = (others.collect::<Vec<_>>(), entry.backend_url(layout));
    let snapshot = snapshot.to_owned();
    let found = in_time(ANSWER_TIME_MAX, move || {
        let place = BackendUrl::parse(&url).ok()?.place;
        let name = |url: &str| BackendUrl::parse(url).ok().map(|url| url.place.name());
        let over = name(&place.snapshot_store()?.snapshot_url(&url, &snapshot)?)?;
        let mut others = others.into_iter();
        let found = others.find(|(_, url)| name(url).as_ref() == Some(&over));
        found.map(|(name, _)| name)
    });
    found.await.flatten()
}

/// What volumes over these snapshots of a volume name as their backends, where there can be any.
async fn snapshot_urls(
    entry: &Entry,
    snapshots: Vec<String>,
    layout: &Layout,
) -> Vec<Option<String>> {
    let url = entry.backend_url(layout);
    let none = vec![None; snapshots.len()];
    let found = in_time(ANSWER_TIME_MAX, move || {
        let place = BackendUrl::parse(&url).ok()?.place;
        let store = place.snapshot_store()?;
        let urls = snapshots.iter().map(|one| store.snapshot_url(&url, one));
        Some(urls.collect())
    });
    found.await.flatten().unwrap_or(none)
}

/// Remove what a clone that was given up has left. Nobody waits for it, not even a stop.
pub(super) fn sweep(name: &str, url: String, key: Option<Uuid>) {
    let name = name.to_owned();
    let thread = std::thread::Builder::new().name("hdcs-sweep".into());
    // Without a thread it stays where it is, which costs space and nothing else.
    let _ = thread.spawn(move || {
        let swept = BackendUrl::parse(&url)
            .map_err(BackendError::from)
            .and_then(|url| url.place.snapshot_store().map_or(Ok(0), |store| store.sweep(key)));
        match swept {
            Ok(count) => {
                tracing::info!("volume {name} was a clone: {count} objects of it were removed");
            }
            Err(error) => {
                tracing::warn!(
                    "volume {name} was a clone, and what is left at its place is not needed any more: \
                     {error}"
                );
            }
        }
    });
}

/// Notes a copy for as long as it may be under way.
pub(super) struct Copied<'a> {
    copies: &'a Copies,
    name: String,
    copying: Arc<Copying>,
}

impl Drop for Copied<'_> {
    fn drop(&mut self) {
        lock(&self.copies.under_way).remove(&self.name);
    }
}

/// Copies that clones have to make, by the volume that is cloned.
#[derive(Debug, Default)]
pub(super) struct Copies {
    under_way: Mutex<BTreeMap<String, Arc<Copying>>>,
}

impl Copies {
    /// Note that something of a volume is being copied, so that it can be seen and cancelled.
    fn begin(&self, name: &str, is_allowed: bool) -> Copied<'_> {
        let copying = Arc::new(Copying::new(is_allowed));
        lock(&self.under_way).insert(name.to_owned(), Arc::clone(&copying));
        Copied {
            copies: self,
            name: name.to_owned(),
            copying,
        }
    }

    /// Bytes that are still to be copied for a snapshot or clone of a volume.
    pub fn left_bytes(&self, name: &str, volume: &VolumeReport) -> u64 {
        let copies = lock(&self.under_way);
        let for_clone = copies.get(name).map(|copying| copying.progress());
        volume.copying.left_bytes + for_clone.unwrap_or_default().left_bytes
    }

    /// Give up what is being copied of a volume, if something is.
    fn cancel(&self, name: &str) {
        if let Some(copying) = lock(&self.under_way).get(name) {
            copying.cancel();
        }
    }
}

/// What has to be copied is, only if that was said.
fn refuse_copy(name: &str, copy_bytes: u64, is_allowed: bool) -> Result<(), ApiError> {
    if copy_bytes == 0 || is_allowed {
        return Ok(());
    }
    // The command is right, and may be done as it is on another file system.
    Err(ApiError::new(
        ErrorKind::Conflict,
        format!(
            "volume {name}: its file system has no reflinks, so up to {copy_bytes} bytes have to be copied: say --copy \
             if that is meant, or put the file on XFS or Btrfs"
        ),
    ))
}

/// Why something was not kept, forgotten or given up.
pub(super) struct NotKept {
    pub error: ApiError,
    /// Whether it is certain that it did not happen, and will not.
    pub is_refused: bool,
}

impl From<ApiError> for NotKept {
    fn from(error: ApiError) -> Self {
        let is_refused = false;
        Self { error, is_refused }
    }
}

impl From<NotKept> for ApiError {
    fn from(not_kept: NotKept) -> Self {
        not_kept.error
    }
}

/// What happened to a request about snapshots.
fn explain(name: &str, failure: SnapshotFailure) -> NotKept {
    let is_refused = failure.is_refusal();
    let kind = match failure {
        SnapshotFailure::Incapable => ErrorKind::Invalid,
        SnapshotFailure::Refused(SnapshotError::NotFound) => ErrorKind::NotFound,
        SnapshotFailure::Io(_) => ErrorKind::Failed,
        _ => ErrorKind::Conflict,
    };
    let error = ApiError::new(kind, format!("volume {name}: {failure}"));
    NotKept { error, is_refused }
}

/// Have the shard keep or forget something.
async fn keep(
    name: &str,
    number: VolumeNumber,
    what: SnapshotCommand,
    link: &Link,
    flushes: &Flushes,
) -> Result<(), NotKept> {
    let gone = || {
        ApiError::new(
            ErrorKind::Unavailable,
            "the node is stopping: try again when it runs",
        )
    };
    let (answer, answered) = oneshot::channel();
    if !link.send(Command::Snapshot(number, what, answer)) {
        return Err(gone().into());
    }
    let mut answered = pin!(answered);
    if let SnapshotCommand::Snapshot { .. } = what {
        let time = tokio::time::timeout(FLUSH_TIME_MAX, flushes.watch(name, number));
        tokio::select! {
            ended = &mut answered => {
                return ended.map_err(|_| gone())?.map_err(|failure| explain(name, failure));
            }
            // A flush that is stuck is cancelled, and the snapshot with it.
            watched = time => watched.unwrap_or(Ok(()))?,
        }
    }
    let mut moved = (Instant::now(), 0);
    loop {
        if let Ok(ended) = tokio::time::timeout(COPY_WATCH_PERIOD, &mut answered).await {
            return ended
                .map_err(|_| gone())?
                .map_err(|failure| explain(name, failure));
        }
        let report = link.report().await?;
        let left = find(&report, number).map_or(0, |v| v.copying.left_bytes);
        if left != moved.1 {
            moved = (Instant::now(), left);
        }
        if moved.0.elapsed() > MOVE_TIME_MAX {
            let why = format!(
                "volume {name}: its backend has not answered for {} s: it goes on; see `hdcs volume \
                 snapshot {name} --list`",
                MOVE_TIME_MAX.as_secs()
            );
            return Err(ApiError::new(ErrorKind::Timeout, why).into());
        }
    }
}

/// Give a clone up: from then on it cannot be opened, and its parent may free what it needed.
/// False: another node has it by now, so nothing was done.
pub(super) async fn give_up_clone(
    name: &str,
    number: VolumeNumber,
    link: &Link,
    flushes: &Flushes,
) -> Result<bool, NotKept> {
    let Err(error) = keep(name, number, SnapshotCommand::GiveUp, link, flushes).await else {
        return Ok(true);
    };
    let report = link.report().await?;
    let store = find(&report, number).and_then(|volume| volume.store.as_ref());
    if store.is_some_and(|store| store.is_lost) {
        return Ok(false);
    }
    Err(error)
}

/// Make a snapshot of an open volume; when that was.
async fn make(
    name: &str,
    entry: &Entry,
    snapshot: SnapshotName,
    copy: bool,
    link: &Link,
    flushes: &Flushes,
) -> Result<u64, ApiError> {
    let report = link.report().await?;
    let volume = find(&report, VolumeNumber(entry.number));
    if let Some(lost) = volume.and_then(lost) {
        return Err(ApiError::new(
            ErrorKind::Conflict,
            format!(
                "volume {name}: a snapshot or clone would show older data where {lost}: write over them first"
            ),
        ));
    }
    let made_ms = unix_ms();
    let what = SnapshotCommand::Snapshot {
        name: snapshot,
        made_ms,
        copy,
    };
    keep(name, VolumeNumber(entry.number), what, link, flushes).await?;
    Ok(made_ms)
}

/// Whether a volume that is to be deleted is a clone, which is then given up; refused if anything
/// depends on the volume.
pub(super) async fn is_free_clone(
    name: &str,
    entry: &Entry,
    options: &DeleteOptions,
    layout: &Layout,
    link: &Link,
    volumes: &Volumes,
) -> Result<bool, ApiError> {
    // An image stays with its snapshots, unless it is in the volume's directory.
    let place = entry.backend.as_deref().map(BackendUrl::parse);
    let is_image = place.is_some_and(|url| {
        let is_objects = url.map(|url| {
            url.place
                .snapshot_store()
                .is_some_and(SnapshotStore::is_objects)
        });
        !is_objects.unwrap_or(true)
    });
    if options.keep_data || is_image {
        return Ok(false);
    }
    let conflict = |what: String| {
        let what = format!("volume {name}: {what}");
        Err(ApiError::new(ErrorKind::Conflict, what))
    };
    let report = link.report().await?;
    let volume = find(&report, VolumeNumber(entry.number));
    let store = volume.and_then(|volume| volume.store.as_ref());
    if store.is_some_and(|store| store.is_lost) {
        // Another node has it now, and everything that depends on it.
        return Ok(false);
    }
    if options.discard_dirty && is_gone(&entry.backend_url(layout)).await {
        let url = entry.backend_url(layout);
        tracing::warn!(
            "volume {name} is deleted although nobody knows what depends on it: nothing is at {url} any more"
        );
        return Ok(false);
    }
    let kept = match Looked::at(entry, layout).await {
        Ok(None) | Err(BackendError::Absent(_)) => return Ok(false),
        Ok(Some(looked)) => looked.kept,
        Err(error) if options.discard_dirty => {
            tracing::warn!(
                "volume {name} is deleted although nobody knows what depends on it: {error}"
            );
            return Ok(false);
        }
        Err(error) => {
            return conflict(format!(
                "whether it has snapshots or clones cannot be seen: {error}: put that right, or \
                 leave all that is there as it is with --keep-data"
            ));
        }
    };
    let identity = entry.backend_identity.as_ref();
    if identity.is_some_and(|identity| *identity != kept.identity) || kept.is_gone {
        return Ok(false);
    }
    let clones = volumes.called_all(kept.all_clones());
    if !clones.is_empty() {
        return conflict(format!(
            "it has clones, which need its objects: {}: delete them first, or let the node forget it \
             and leave its objects there with --keep-data",
            clones.join(", ")
        ));
    }
    if !kept.snapshots.is_empty() {
        let names = kept.snapshots.iter().map(|snapshot| &*snapshot.name);
        return conflict(format!(
            "it has snapshots: {}: delete them first, or let the node forget it and leave all its \
             objects there with --keep-data",
            names.collect::<Vec<_>>().join(", ")
        ));
    }
    let is_open = volume.is_some_and(|volume| volume.phase == Phase::Open);
    if kept.is_clone && !is_open {
        return conflict(
            "it is a clone and not open, so its parent would keep what it needs for ever: put it \
             right and open it, or leave it there as it is with --keep-data"
                .to_owned(),
        );
    }
    Ok(kept.is_clone)
}

impl Node {
    /// The snapshots and clones of a volume.
    pub async fn snapshots(&self, name: &str) -> Result<Snapshots, ApiError> {
        let entry = self.volumes.known(name)?;
        let Looked {
            kept, copy_bytes, ..
        } = Looked::at_or_refuse(&entry, self.setup.layout()).await?;
        let names = kept.snapshots.iter().map(|one| one.name.clone());
        let urls = snapshot_urls(&entry, names.collect(), self.setup.layout()).await;
        let snapshots = kept.snapshots.iter().zip(urls);
        let snapshots = snapshots.map(|(snapshot, backend)| Snapshot {
            name: snapshot.name.clone(),
            made_ms: snapshot.made_ms,
            clones: self.volumes.called_all(&snapshot.clones),
            backend,
        });
        Ok(Snapshots {
            snapshots: snapshots.collect(),
            clones: self.volumes.called_all(&kept.clones),
            copy_bytes,
        })
    }

    /// Make a snapshot.
    pub async fn make_snapshot(
        &self,
        name: &str,
        request: MakeSnapshot,
    ) -> Result<Snapshot, ApiError> {
        let snapshot = parse_snapshot(&request.name)?;
        let _busy = self.volumes.begin(name, "snapshotted")?;
        let entry = self.volumes.entry(name)?;
        let Looked {
            kept,
            copy_bytes,
            is_objects,
        } = Looked::at_or_refuse(&entry, self.setup.layout()).await?;
        if kept.snapshots.iter().any(|kept| kept.name == request.name) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: there is a snapshot {}: choose another name, or delete it with \
                     `hdcs volume snapshot {name} {} --delete`",
                    request.name, request.name
                ),
            ));
        }
        if !is_objects && request.name.starts_with('.') {
            return Err(invalid(format!(
                "snapshot name {:?}: that of an image does not begin with a dot",
                request.name
            )));
        }
        refuse_copy(name, copy_bytes, request.copy)?;
        let made_ms = make(
            name,
            &entry,
            snapshot,
            request.copy,
            &self.link,
            &self.flushes,
        )
        .await?;
        tracing::info!("volume {name}: snapshot {} was made", request.name);
        let urls = snapshot_urls(&entry, vec![request.name.clone()], self.setup.layout());
        Ok(Snapshot {
            backend: urls.await.pop().flatten(),
            name: request.name,
            made_ms,
            clones: Vec::new(),
        })
    }

    /// Delete a snapshot.
    pub async fn delete_snapshot(&self, name: &str, snapshot: &str) -> Result<(), ApiError> {
        let wanted = parse_snapshot(snapshot)?;
        let _busy = self.volumes.begin(name, "changed")?;
        let entry = self.volumes.entry(name)?;
        let Looked {
            kept, is_objects, ..
        } = Looked::at_or_refuse(&entry, self.setup.layout()).await?;
        let found = kept.snapshots.iter().find(|kept| kept.name == snapshot);
        let Some(found) = found else {
            return Err(ApiError::new(
                ErrorKind::NotFound,
                format!(
                    "volume {name}: there is no snapshot {snapshot}: see `hdcs volume snapshot {name} \
                     --list`"
                ),
            ));
        };
        if !found.clones.is_empty() {
            let clones = self.volumes.called_all(&found.clones).join(", ");
            // The image of a deleted volume stays.
            let how = if is_objects {
                ""
            } else {
                ", and their images with `rbd rm`, or make them independent with `rbd flatten`"
            };
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: snapshot {snapshot} is what these clones begin with: {clones}: \
                     delete them first{how}"
                ),
            ));
        }
        if let Some(why) = &found.hindrance {
            let what = format!("volume {name}: snapshot {snapshot}: {why}");
            return Err(ApiError::new(ErrorKind::Conflict, what));
        }
        if let Some(other) = volume_over(&entry, snapshot, self.setup.layout(), &self.volumes).await
        {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: snapshot {snapshot} is the backend of volume {other}: delete that first"
                ),
            ));
        }
        let what = SnapshotCommand::Forget { name: wanted };
        keep(
            name,
            VolumeNumber(entry.number),
            what,
            &self.link,
            &self.flushes,
        )
        .await?;
        tracing::info!("volume {name}: snapshot {snapshot} was deleted");
        Ok(())
    }

    /// Make a volume that begins as a snapshot of another one, or as it is now.
    pub async fn clone_volume(&self, name: &str, request: CloneVolume) -> Result<Volume, ApiError> {
        let CloneVolume {
            snapshot,
            mut clone,
            copy,
        } = request;
        let wanted = snapshot.as_deref().map(parse_snapshot).transpose()?;
        let new = parse_name(&clone.name)?;
        let _busy = self.volumes.begin(name, "cloned")?;
        let entry = match wanted {
            Some(_) => self.volumes.known(name)?,
            None => self.volumes.entry(name)?,
        };
        let Looked {
            kept, copy_bytes, ..
        } = Looked::at_or_refuse(&entry, self.setup.layout()).await?;
        if let Some(wanted) = wanted
            && !kept
                .snapshots
                .iter()
                .any(|kept| kept.name == wanted.as_str())
        {
            return Err(ApiError::new(
                ErrorKind::NotFound,
                format!(
                    "volume {name}: there is no snapshot {}: see `hdcs volume snapshot {name} --list`",
                    wanted.as_str()
                ),
            ));
        }
        if clone.backend.is_none() && entry.backend.is_some() {
            return Err(invalid(format!(
                "volume {new}: a clone needs a place of its own in its parent's store: give --backend"
            )));
        }
        if clone.bytes.is_some() {
            return Err(invalid(format!(
                "volume {new}: a clone has the size of its snapshot: leave the size out, and resize it"
            )));
        }
        if self.volumes.has(new.as_str()) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!("volume {new}: it exists already: choose another name"),
            ));
        }
        let parent = entry.backend_url(self.setup.layout());
        if let Some(url) = &clone.backend {
            check_clone_place(&new, url, &parent)?;
        }
        // A clone's always is; once it is made, something is there.
        clone.must_be_new = false;
        if clone.encryption.is_some() {
            return Err(invalid(format!(
                "volume {new}: a clone is encrypted as its parent is: leave the key out, and give it \
                 another wrapping with `hdcs volume rotate-key`"
            )));
        }
        clone.encryption = entry
            .encryption
            .as_ref()
            .map(|one| key_place(one.source.clone()));
        refuse_copy(name, copy_bytes, copy)?;
        // Whatever else can be refused is, before anything is made.
        let with_size = CreateVolume {
            bytes: Some(entry.bytes),
            ..clone.clone()
        };
        self.plan(new.clone(), &with_size).await?;
        let begins_with = if let Some(wanted) = wanted {
            wanted
        } else {
            let own = parse_snapshot(&format!("clone-{}", Uuid::new_v4()))?;
            make(name, &entry, own, copy, &self.link, &self.flushes).await?;
            own
        };
        // What makes it ends before it is opened.
        let memory = self.setup.needs_of(&entry).kind == Kind::Objects;
        let memory = memory.then(|| self.memories.lease(ObjectMemory::least().parts()));
        let memory = memory
            .transpose()
            .map_err(|shortage| short(&new, &shortage))?;
        let (place, layout) = (clone.backend.clone(), self.setup.layout().clone());
        let key = entry.encryption.clone().map(|encryption| encryption.key);
        let identity = entry.backend_identity.clone();
        let copied = self.copies.begin(name, copy);
        let copying = Arc::clone(&copied.copying);
        let made = tokio::task::spawn_blocking(move || {
            let _memory = memory;
            // Without a place of its own it becomes a file in the data directory, as its parent is.
            let (url, staged) = if let Some(url) = place {
                (url, None)
            } else {
                let staged = StagedData::begin(&layout)
                    .map_err(|error| BackendError::Refused(error.to_string()))?;
                (file_url(&staged.path()), Some(staged))
            };
            let place = BackendUrl::parse(&url)?.place;
            let Some(store) = place.snapshot_store() else {
                return Err(BackendError::Refused(place.name()));
            };
            let origin = CloneOrigin {
                url: &parent,
                identity: identity.as_deref(),
                snapshot: begins_with,
                key: key.as_deref(),
            };
            let found = store.clone_from(&origin, &copying)?;
            Ok((found, staged.map(Arc::new)))
        });
        let made = made.await.map_err(|error| failed(error.to_string()));
        drop(copied);
        if wanted.is_none() {
            // The clone has said what it needs; if there is none, nobody needs it.
            let what = SnapshotCommand::Forget { name: begins_with };
            let forgotten = keep(
                name,
                VolumeNumber(entry.number),
                what,
                &self.link,
                &self.flushes,
            )
            .await;
            if let Err(error) = forgotten {
                tracing::warn!(
                    "{}: delete the snapshot {} of it when you can",
                    error.error,
                    begins_with.as_str()
                );
            }
        }
        let (found, staged) = made?.map_err(|error| {
            let kind = if error.is_unreachable() {
                ErrorKind::Unavailable
            } else {
                ErrorKind::Invalid
            };
            ApiError::new(kind, format!("volume {new}: {error}"))
        })?;
        let place = clone.backend.clone();
        if staged.is_some() {
            clone.bytes = Some(found.bytes);
        }
        let created = self.create_over(clone, staged.clone()).await;
        // What was not taken is removed, which may block.
        beside(move || drop(staged)).await?;
        let created = created.map_err(|error| match place {
            None => error,
            Some(url) => ApiError::new(
                error.kind,
                format!(
                    "{error}; the clone is made: once that is put right, `hdcs volume create {new} \
                     --backend '{url}'` takes it into use"
                ),
            ),
        })?;
        tracing::info!("volume {new} was made as a clone of volume {name}");
        Ok(created)
    }

    /// Give up the snapshot or clone of a volume that is being made.
    pub async fn cancel_copy(&self, name: &str) -> Result<(), ApiError> {
        self.copies.cancel(name);
        let number = VolumeNumber(self.volumes.entry(name)?.number);
        self.link
            .command(name, "giving up its snapshot", COMMAND_TIME_MAX, |answer| {
                Command::CancelSnapshot(number, answer)
            })
            .await
    }
}
