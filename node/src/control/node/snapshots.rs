//! Snapshots and clones: what only some backends have, the others refuse with what to do instead.
//!
//! Invariants:
//! 1. A snapshot holds everything that was acknowledged before it was asked for: the shard destages
//!    that first, and asks the backend behind it.
//! 2. A snapshot that a clone begins with is not deleted, nor is a volume that has snapshots or
//!    clones, unless its data is kept. That is for people: the backend itself keeps what clones need.
//! 3. A clone is deleted by saying so at its place before its parent may free anything; if the place
//!    has another owner by now, it is left alone.

use std::pin::pin;

use hdcs_core::objects::io::{SnapshotError, SnapshotName};
use hdcs_core::volume::Phase;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{
    MOVE_TIME_MAX, Node, STOP_TIME_MAX, at_volume, failed, find, invalid, lock, parse_name,
};
use crate::backends::url::BackendUrl;
use crate::backends::{BackendError, Keep, Keeper, Kept, KeptClone};
use crate::catalogue::{Entry, Found};
use crate::control::api::{
    ApiError, CloneVolume, CreateVolume, DeleteOptions, ErrorKind, MakeSnapshot, Snapshot,
    Snapshots, Volume,
};
use crate::control::link::report;
use crate::crypt::wrapped::WrappedKey;
use crate::data_dir::dirty::unix_ms;
use crate::frontends::VolumeNumber;
use crate::shard::command::{Command, KeepFailure};

fn parse_snapshot(name: &str) -> Result<SnapshotName, ApiError> {
    SnapshotName::new(name).ok_or_else(|| {
        invalid(format!(
            "snapshot name {name:?}: it has 1 to 64 letters A-Z a-z, digits, `.`, `_` and `-`"
        ))
    })
}

/// Remove what a clone that was given up has left. Nobody waits for it, not even a stop.
pub(super) fn sweep(name: &str, url: String) {
    let name = name.to_owned();
    let thread = std::thread::Builder::new().name("hdcs-sweep".into());
    // Without a thread it stays where it is, which costs space and nothing else.
    let _ = thread.spawn(move || {
        let swept = BackendUrl::parse(&url)
            .map_err(BackendError::from)
            .and_then(|url| url.place.as_keeper().map_or(Ok(0), Keeper::sweep));
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

/// What happened to a request about snapshots.
fn explain(name: &str, failure: KeepFailure) -> ApiError {
    let kind = match failure {
        KeepFailure::Incapable => ErrorKind::Invalid,
        KeepFailure::Refused(SnapshotError::NotFound) => ErrorKind::NotFound,
        KeepFailure::Io(_) => ErrorKind::Failed,
        _ => ErrorKind::Conflict,
    };
    ApiError::new(kind, format!("volume {name}: {failure}"))
}

/// A clone's place must not have a key that objects there may need.
fn refuse_other_key(there: Option<WrappedKey>, key: &WrappedKey) -> Result<(), BackendError> {
    match there {
        Some(there) if there.id() != key.id() => Err(BackendError::Refused(format!(
            "data key {} lies there already: name a place where nothing is",
            there.id()
        ))),
        _ => Ok(()),
    }
}

impl Node {
    /// The entry of a volume, whether it is open or not.
    pub(super) fn known(&self, name: &str) -> Result<Entry, ApiError> {
        match self.slot(name)?.found {
            Found::Entry(entry) => Ok(*entry),
            Found::Damaged(why) => Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why))),
        }
    }

    /// What depends on a volume, as its place says; `None`: its backend has no snapshots.
    async fn kept(&self, entry: &Entry) -> Result<Option<Kept>, BackendError> {
        let url = entry.backend_url(&self.layout());
        let looked = tokio::task::spawn_blocking(move || {
            let place = BackendUrl::parse(&url)?.place;
            match place.as_keeper() {
                None => Ok(None),
                Some(keeper) => match keeper.kept()? {
                    Some(kept) => Ok(Some(kept)),
                    None => Err(BackendError::Absent(place.name())),
                },
            }
        });
        looked
            .await
            .unwrap_or_else(|error| Err(BackendError::Refused(error.to_string())))
    }

    /// The same for somebody who asks for snapshots.
    async fn kept_or_refuse(&self, entry: &Entry) -> Result<Kept, ApiError> {
        let name = &entry.name;
        let kept = self.kept(entry).await.map_err(|error| {
            let kind = if error.is_unreachable() {
                ErrorKind::Unavailable
            } else {
                ErrorKind::Failed
            };
            ApiError::new(kind, format!("volume {name}: {error}"))
        })?;
        kept.ok_or_else(|| invalid(self.instead(entry)))
    }

    /// Why a backend has no snapshots, and what to do instead.
    fn instead(&self, entry: &Entry) -> String {
        let (name, url) = (&entry.name, entry.backend_url(&self.layout()));
        let place = url.split('?').next().unwrap_or(&url);
        match place.split_once(':') {
            Some(("rbd", image)) if entry.is_read_only() => format!(
                "volume {name}: it is a snapshot itself, of an RBD image; for a clone run `rbd clone \
                 {image} POOL/NEW`"
            ),
            Some(("rbd", image)) => format!(
                "volume {name}: the snapshots of an RBD image are Ceph's own: run `hdcs volume flush \
                 {name}`, then `rbd snap create {image}@SNAP`, and `rbd clone` for a clone"
            ),
            _ => format!(
                "volume {name}: its backend {place} has no snapshots; s3: and hdfs: have: run `hdcs \
                 volume flush {name}`, then copy the file (`cp --reflink=auto`) or snapshot the file \
                 system that it is on"
            ),
        }
    }

    /// What a clone is called: by its volume's name if that is here.
    fn called(&self, clone: &KeptClone) -> String {
        let entries = self.entries();
        let mut here = entries.iter();
        let here = here.find(|entry| entry.backend_identity.as_ref() == Some(&clone.identity));
        here.map_or_else(|| clone.location.clone(), |entry| entry.name.to_string())
    }

    fn called_all<'a>(&self, clones: impl IntoIterator<Item = &'a KeptClone>) -> Vec<String> {
        clones.into_iter().map(|clone| self.called(clone)).collect()
    }

    /// The snapshots and clones of a volume.
    pub async fn snapshots(&self, name: &str) -> Result<Snapshots, ApiError> {
        let kept = self.kept_or_refuse(&self.known(name)?).await?;
        let snapshots = kept.snapshots.iter().map(|snapshot| Snapshot {
            name: snapshot.name.as_str().to_owned(),
            made_ms: snapshot.made_ms,
            clones: self.called_all(&snapshot.clones),
        });
        Ok(Snapshots {
            snapshots: snapshots.collect(),
            clones: self.called_all(&kept.clones),
        })
    }

    /// Make a snapshot.
    pub async fn make_snapshot(
        &self,
        name: &str,
        request: MakeSnapshot,
    ) -> Result<Snapshot, ApiError> {
        let snapshot = parse_snapshot(&request.name)?;
        let _busy = self.begin(name, "snapshotted")?;
        let entry = self.entry(name)?;
        let kept = self.kept_or_refuse(&entry).await?;
        if kept.snapshots.iter().any(|kept| kept.name == snapshot) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: there is a snapshot {}: choose another name, or delete it with \
                     `hdcs volume snapshot {name} {} --delete`",
                    request.name, request.name
                ),
            ));
        }
        let made_ms = self.make(name, &entry, snapshot).await?;
        tracing::info!("volume {name}: snapshot {} was made", request.name);
        Ok(Snapshot {
            name: request.name,
            made_ms,
            clones: Vec::new(),
        })
    }

    /// Make a snapshot of an open volume; when that was.
    async fn make(
        &self,
        name: &str,
        entry: &Entry,
        snapshot: SnapshotName,
    ) -> Result<u64, ApiError> {
        let made_ms = unix_ms();
        let keep = Keep::Snapshot {
            name: snapshot,
            made_ms,
        };
        self.keep(name, VolumeNumber(entry.number), keep).await?;
        Ok(made_ms)
    }

    /// Delete a snapshot.
    pub async fn delete_snapshot(&self, name: &str, snapshot: &str) -> Result<(), ApiError> {
        let wanted = parse_snapshot(snapshot)?;
        let _busy = self.begin(name, "changed")?;
        let entry = self.entry(name)?;
        let kept = self.kept_or_refuse(&entry).await?;
        let found = kept.snapshots.iter().find(|kept| kept.name == wanted);
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
            let clones = self.called_all(&found.clones).join(", ");
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: snapshot {snapshot} is what these clones begin with: {clones}: \
                     delete them first"
                ),
            ));
        }
        let keep = Keep::Forget { name: wanted };
        self.keep(name, VolumeNumber(entry.number), keep).await?;
        tracing::info!("volume {name}: snapshot {snapshot} was deleted");
        Ok(())
    }

    /// Make a volume that begins as a snapshot of another one, or as it is now.
    pub async fn clone_volume(&self, name: &str, request: CloneVolume) -> Result<Volume, ApiError> {
        let CloneVolume {
            snapshot,
            mut clone,
        } = request;
        let wanted = snapshot.as_deref().map(parse_snapshot).transpose()?;
        let new = parse_name(&clone.name)?;
        let _busy = self.begin(name, "cloned")?;
        let entry = match wanted {
            Some(_) => self.known(name)?,
            None => self.entry(name)?,
        };
        let kept = self.kept_or_refuse(&entry).await?;
        if let Some(wanted) = wanted
            && !kept.snapshots.iter().any(|kept| kept.name == wanted)
        {
            return Err(ApiError::new(
                ErrorKind::NotFound,
                format!(
                    "volume {name}: there is no snapshot {}: see `hdcs volume snapshot {name} --list`",
                    wanted.as_str()
                ),
            ));
        }
        let Some(url) = clone.backend.clone() else {
            return Err(invalid(format!(
                "volume {new}: a clone needs a place of its own in its parent's store: give --backend"
            )));
        };
        if clone.bytes.is_some() {
            return Err(invalid(format!(
                "volume {new}: a clone has the size of its snapshot: leave the size out, and resize it"
            )));
        }
        if lock(&self.slots).contains_key(new.as_str()) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!("volume {new}: it exists already: choose another name"),
            ));
        }
        let place = BackendUrl::parse(&url).map_err(|error| invalid(error.to_string()))?;
        if place.place.as_keeper().is_none() {
            return Err(invalid(format!(
                "volume {new}: a clone shares the objects of its parent: name a place in the same store, \
                 not {}",
                place.place.name()
            )));
        }
        if clone.encryption.is_some() {
            return Err(invalid(format!(
                "volume {new}: a clone is encrypted as its parent is: leave the key out, and give it \
                 another wrapping with `hdcs volume rotate-key`"
            )));
        }
        clone.encryption = entry
            .encryption
            .as_ref()
            .map(|one| one.source.clone().into());
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
            self.make(name, &entry, own).await?;
            own
        };
        let parent = entry.backend_url(&self.layout());
        let place = url.clone();
        let key = entry.encryption.clone().map(|encryption| encryption.key);
        let made = tokio::task::spawn_blocking(move || {
            let place = BackendUrl::parse(&place)?.place;
            match place.as_keeper() {
                Some(keeper) => {
                    if let Some(key) = key {
                        refuse_other_key(keeper.key()?, &key)?;
                        keeper.put_key(&key)?;
                    }
                    keeper.clone_from(&parent, &begins_with).map(drop)
                }
                None => Err(BackendError::Refused(place.name())),
            }
        });
        let made = made.await.map_err(|error| failed(error.to_string()));
        if wanted.is_none() {
            // The clone has said what it needs; if there is none, nobody needs it.
            let keep = Keep::Forget { name: begins_with };
            let forgotten = self.keep(name, VolumeNumber(entry.number), keep).await;
            if let Err(error) = forgotten {
                tracing::warn!(
                    "{error}: delete the snapshot {} of it when you can",
                    begins_with.as_str()
                );
            }
        }
        made?.map_err(|error| {
            let kind = if error.is_unreachable() {
                ErrorKind::Unavailable
            } else {
                ErrorKind::Invalid
            };
            ApiError::new(kind, format!("volume {new}: {error}"))
        })?;
        let created = self.create(clone).await.map_err(|error| {
            let what = format!(
                "{error}; the clone is made: once that is put right, `hdcs volume create {new} \
                 --backend '{url}'` takes it into use"
            );
            ApiError::new(error.kind, what)
        })?;
        tracing::info!("volume {new} was made as a clone of volume {name}");
        Ok(created)
    }

    /// Whether a volume that is to be deleted is a clone, which is then given up; refused if anything
    /// depends on the volume.
    pub(super) async fn is_free_clone(
        &self,
        name: &str,
        entry: &Entry,
        options: &DeleteOptions,
    ) -> Result<bool, ApiError> {
        if options.keep_data {
            return Ok(false);
        }
        let conflict = |what: String| {
            let what = format!("volume {name}: {what}");
            Err(ApiError::new(ErrorKind::Conflict, what))
        };
        let report = report(&*self.path).await?;
        let volume = find(&report, VolumeNumber(entry.number));
        let store = volume.and_then(|volume| volume.store.as_ref());
        if store.is_some_and(|store| store.is_lost) {
            // Another node has it now, and everything that depends on it.
            return Ok(false);
        }
        let kept = match self.kept(entry).await {
            Ok(None) | Err(BackendError::Absent(_)) => return Ok(false),
            Ok(Some(kept)) => kept,
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
        let clones = self.called_all(kept.all_clones());
        if !clones.is_empty() {
            return conflict(format!(
                "it has clones, which need its objects: {}: delete them first, or let the node forget it \
                 and leave its objects there with --keep-data",
                clones.join(", ")
            ));
        }
        if !kept.snapshots.is_empty() {
            let names = kept.snapshots.iter().map(|snapshot| snapshot.name.as_str());
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

    /// Give a clone up: from then on it cannot be opened, and its parent may free what it needed.
    /// False: another node has it by now, so nothing was done.
    pub(super) async fn give_up_clone(
        &self,
        name: &str,
        number: VolumeNumber,
    ) -> Result<bool, ApiError> {
        let Err(error) = self.keep(name, number, Keep::GiveUp).await else {
            return Ok(true);
        };
        let report = report(&*self.path).await?;
        let store = find(&report, number).and_then(|volume| volume.store.as_ref());
        if store.is_some_and(|store| store.is_lost) {
            return Ok(false);
        }
        Err(error)
    }

    /// Have the shard keep or forget something.
    async fn keep(&self, name: &str, number: VolumeNumber, keep: Keep) -> Result<(), ApiError> {
        let gone = || {
            ApiError::new(
                ErrorKind::Unavailable,
                "the node is stopping: data path: try again when it runs",
            )
        };
        let (answer, answered) = oneshot::channel();
        if !self.path.send(Command::Keep(number, keep, answer)) {
            return Err(gone());
        }
        let mut answered = pin!(answered);
        if let Keep::Snapshot { .. } = keep {
            let time = tokio::time::timeout(STOP_TIME_MAX, self.watch_destage(name, number));
            tokio::select! {
                ended = &mut answered => {
                    return ended.map_err(|_| gone())?.map_err(|failure| explain(name, failure));
                }
                // A flush that is stuck is cancelled, and the snapshot with it.
                flushed = time => flushed.unwrap_or(Ok(()))?,
            }
        }
        match tokio::time::timeout(MOVE_TIME_MAX, answered).await {
            Ok(ended) => ended
                .map_err(|_| gone())?
                .map_err(|failure| explain(name, failure)),
            Err(_) => Err(ApiError::new(
                ErrorKind::Timeout,
                format!(
                    "volume {name}: its backend has not answered for {} s: it goes on; see `hdcs volume \
                     snapshot {name} --list`",
                    MOVE_TIME_MAX.as_secs()
                ),
            )),
        }
    }
}
