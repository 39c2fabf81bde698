//! Deleting a volume. Dirty data is lost only if `discard_dirty` says so, and the answer says how
//! much it was.

use std::time::Duration;

use hdcs_api::{ApiError, DeleteOptions, Deleted, ErrorKind};
use hdcs_backend::objects::given_up::{Remains, remains};
use hdcs_backend::url::BackendUrl;
use hdcs_backend::{BackendError, Held, SnapshotStore, closing};
use hdcs_core::volume::Phase;
use hdcs_frontend::VolumeNumber;
use uuid::Uuid;

use super::groups::NotRemoved;
use super::open::NotOpen;
use super::places::{dirty_of_unopened, is_gone, missing_backend, wipe_home, wipe_log};
use super::replicas::{close_copy, end_group, refuse_copy};
use super::snapshots::{NotKept, give_up_clone, is_free_clone};
use super::volumes::Volumes;
use super::{
    ANSWER_TIME_MAX, COMMAND_TIME_MAX, MOVE_TIME_MAX, Node, beside, failed, find, in_time, invalid,
    lost, parse_name,
};
use crate::catalogue::{self, Entry, Found, GivenUp};
use crate::control::link::Link;
use crate::data_dir::Layout;
use crate::shard::command::Command;

/// What is being done to a volume that is deleted.
pub(super) const DELETED: &str = "deleted";
/// How long closing a backend may take until its volume counts as deleted all the same.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(10);
/// How long the removal of a large file may take.
const UNLINK_TIME_MAX: Duration = Duration::from_secs(60);

/// Wait for the end of a backend's use, so that others can use its place from now on.
pub(super) async fn settle(url: String) {
    let name = move || BackendUrl::parse(&url).ok().map(|url| url.place.name());
    // A place that does not answer does not close either.
    let Some(Some(name)) = in_time(ANSWER_TIME_MAX, name).await else {
        return;
    };
    let wait = move || closing::wait(Some(&name), CLOSE_TIME_MAX);
    // It only ends early if the thread could not be started.
    let _ = tokio::task::spawn_blocking(wait).await;
}

/// What becomes of what a volume has at its backend's place when it is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// It stays.
    Stays,
    /// It is a clone, which is given up and swept.
    Clone,
    /// Objects that are given up, and removed because that was said.
    Objects,
    /// A file or image that is removed because that was said: what its volume had open then.
    Image(Held),
}

impl From<GivenUp> for Leaving {
    fn from(what: GivenUp) -> Self {
        match what {
            GivenUp::Clone => Self::Clone,
            GivenUp::Objects => Self::Objects,
        }
    }
}

impl Leaving {
    /// What nobody can open any more once it leaves.
    pub(super) fn given_up(self) -> Option<GivenUp> {
        match self {
            Self::Clone => Some(GivenUp::Clone),
            Self::Objects => Some(GivenUp::Objects),
            Self::Stays | Self::Image(_) => None,
        }
    }
}

/// What is wrong with what a volume of that identity and of `bytes` bytes has left at its backend's place; `true` if
/// nothing is there.
async fn wrong_with(url: String, identity: Option<String>, bytes: u64) -> Option<(String, bool)> {
    let at = url.clone();
    let find = move || {
        let mut place = BackendUrl::parse(&at)?.place;
        if let Some(identity) = identity {
            place.expect(&identity);
        }
        // A look into objects would be tried again for as long as the volume's own requests.
        if place.path().is_none() && place.is_gone() {
            let why = format!("{at}: nothing is there, or its file system is not mounted");
            return Err(BackendError::Unreachable(why));
        }
        place.find()
    };
    match in_time(ANSWER_TIME_MAX, find).await {
        None => Some((format!("{url} does not answer"), false)),
        Some(Err(error)) => Some((error.to_string(), false)),
        Some(Ok(None)) => Some((format!("nothing is at {url} any more"), true)),
        Some(Ok(Some(found))) if found.bytes < bytes => Some((
            format!("of its {bytes} bytes only {} are there", found.bytes),
            false,
        )),
        Some(Ok(Some(_))) => None,
    }
}

/// A volume that does not close has its log and backend in use: what is under way there may still be done.
fn still_closing(name: &str, error: ApiError) -> ApiError {
    if error.kind != ErrorKind::Timeout {
        return error;
    }
    ApiError::new(
        ErrorKind::Timeout,
        format!(
            "volume {name}: it is being closed, but its backend, or the device of its write log, has not ended what it \
             was asked before: delete it again once that has ended; if it never does, restart the daemon and delete it \
             then"
        ),
    )
}

/// Which data key a volume is encrypted with, if it is.
fn data_key(entry: &Entry) -> Option<Uuid> {
    entry.encryption.as_ref().map(|own| own.key.id())
}

/// Note that a deletion did not end; it can only be asked for again.
fn did_not_end(name: &str, error: &str, what: Leaving, volumes: &Volumes) -> ApiError {
    let mut why = format!("deleting it did not end: {error}: delete it again");
    if what == Leaving::Objects {
        why += ", or leave what cannot be removed with --discard-dirty";
    }
    let error = failed(format!("volume {name}: {why}"));
    volumes.set_not_open(name, NotOpen::Leaving { why, what });
    error
}

/// Remove the objects of a volume that is given up; why that did not end.
async fn remove_objects(entry: &Entry, layout: &Layout, volumes: &Volumes) -> Result<(), String> {
    let Err(problem) = remove_data(entry, Leaving::Objects, layout, volumes).await else {
        return Ok(());
    };
    let (url, identity) = (entry.backend_url(layout), entry.backend_identity.clone());
    // Another volume that came there since removes them, and only that is let do so.
    match beside(move || remains(&url, identity.as_deref())).await {
        Ok(Ok(Remains::Nothing)) => Ok(()),
        _ => Err(problem),
    }
}

/// Remove what a deleted volume has at its backend's place.
async fn remove_data(
    entry: &Entry,
    leaving: Leaving,
    layout: &Layout,
    volumes: &Volumes,
) -> Result<(), String> {
    // As long as the volume is listed, no other one is made at its place, whose data would be removed.
    let why = "it is being deleted, and what it has at its backend is removed".to_owned();
    let what = leaving;
    volumes.put(entry.clone(), Some(NotOpen::Leaving { why, what }));
    let url = entry.backend_url(layout);
    settle(url.clone()).await;
    let place = url.clone();
    let was = match leaving {
        Leaving::Image(held) => held,
        _ => Held::Objects {
            key: data_key(entry),
        },
    };
    let remove = move || BackendUrl::parse(&place)?.place.remove(was);
    // A file goes at once, or is on something that hangs. All else takes its time, and its requests end by
    // themselves.
    let problem = if let Leaving::Image(Held::File { .. }) = leaving {
        match in_time(UNLINK_TIME_MAX, remove).await {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) => error.to_string(),
            None => "it does not answer".to_owned(),
        }
    } else {
        match tokio::task::spawn_blocking(remove).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        }
    };
    let name = &entry.name;
    tracing::warn!("what volume {name} has at {url} stays there: {problem}");
    Err(problem)
}

/// What leaves its place with a volume that is to be deleted; refused if anything depends on that.
async fn what_leaves(
    name: &str,
    entry: &Entry,
    options: &DeleteOptions,
    layout: &Layout,
    link: &Link,
    volumes: &Volumes,
) -> Result<Leaving, ApiError> {
    if is_free_clone(name, entry, options, layout, link, volumes).await? {
        return Ok(Leaving::Clone);
    }
    let place = entry.backend.as_deref().map(BackendUrl::parse);
    let url = match place.filter(|_| options.remove_data) {
        None => return Ok(Leaving::Stays),
        Some(Ok(url)) => url,
        Some(Err(error)) => {
            return Err(invalid(format!(
                "volume {name}: what is at its backend cannot be removed: {error}; or delete it without remove_data"
            )));
        }
    };
    // Of one that is not open nobody knows whose it is by now.
    let report = link.report().await?;
    let volume = find(&report, VolumeNumber(entry.number));
    if volume.is_none_or(|volume| volume.phase != Phase::Open) {
        return Ok(Leaving::Stays);
    }
    let named = url.place.name();
    if url.place.is_read_only() {
        return Err(ApiError::new(
            ErrorKind::Conflict,
            format!(
                "volume {name}: {named} is a snapshot, which is not removed with a volume over it: delete the \
                 volume without remove_data, and the snapshot with the volume that it is of"
            ),
        ));
    }
    if url
        .place
        .snapshot_store()
        .is_some_and(SnapshotStore::is_objects)
    {
        return Ok(Leaving::Objects);
    }
    let why = match in_time(ANSWER_TIME_MAX, move || url.place.held()).await {
        Some(Some(held)) => return Ok(Leaving::Image(held)),
        Some(None) => {
            format!("what lies at {named} is not the image that it has open: put that back")
        }
        None => format!("{named} does not answer: try again once it does"),
    };
    Err(ApiError::new(
        ErrorKind::Conflict,
        format!("volume {name}: {why}, or delete the volume without remove_data"),
    ))
}

/// Drop what the read cache and the log device still hold of a closed volume.
pub(super) async fn forget(entry: &Entry, layout: &Layout, link: &Link) {
    forget_cached(entry, link).await;
    wipe_home(entry, layout).await;
    wipe_log(entry, layout).await;
}

/// Drop what the read cache holds of a closed volume whose number will not be used again.
pub(super) async fn forget_cached(entry: &Entry, link: &Link) {
    let number = VolumeNumber(entry.number);
    let forgotten = link.ask_each("forgetting it", COMMAND_TIME_MAX, |answer| {
        Command::Forget(number, answer)
    });
    if let Err(error) = forgotten.await {
        // Its number is never used again, so what stays is only memory that ages out.
        tracing::warn!("volume {}: {error}", entry.name);
    }
}

/// Refuse what would keep the place of a volume from being given up, as long as its group is there: without it the volume
/// can only go.
async fn refuse_group_end(
    node: &Node,
    name: &str,
    entry: &Entry,
    options: &DeleteOptions,
) -> Result<(), ApiError> {
    let (layout, volumes) = (node.setup.layout(), &node.volumes);
    // Others that share the store may have made clones since.
    is_free_clone(name, entry, options, layout, &node.link, volumes).await?;
    let report = node.link.report().await?;
    let volume = find(&report, VolumeNumber(entry.number));
    if volume.is_some_and(|volume| volume.is_resizing || volume.is_snapshotting) {
        let why = "another snapshot or a resize is under way; wait for its end";
        let error = ApiError::new(ErrorKind::Conflict, format!("volume {name}: {why}"));
        return Err(error);
    }
    Ok(())
}

impl Node {
    /// Delete a volume.
    pub async fn delete(&self, name: &str, options: DeleteOptions) -> Result<Deleted, ApiError> {
        refuse_copy(self, name, "delete").await?;
        let _busy = self
            .begin_leaving(name, DELETED, options.discard_dirty)
            .await?;
        let volume_name = parse_name(name)?;
        if options.keep_data && options.remove_data {
            return Err(invalid(format!(
                "volume {name}: its data is either kept or removed: leave out keep_data or remove_data"
            )));
        }
        let mut leaving = Leaving::Stays;
        let mut data_trouble = None;
        let is_rest = self.catalogue.is_half_removed(&volume_name).await?;
        let begun = if is_rest {
            self.volumes
                .slot(name)?
                .not_open
                .as_ref()
                .and_then(NotOpen::given_up)
        } else {
            self.begun(name, &options).await?
        };
        let slot = self.volumes.slot(name)?;
        let has_no_other = matches!(&slot.found, Found::Entry(entry) if entry.backend.is_none());
        if options.keep_data && (begun.is_some() || is_rest && has_no_other) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: its removal has begun, and its data cannot be kept any more: delete it again \
                     without keep_data"
                ),
            ));
        }
        let discarded = match &slot.found {
            // What it had dirty was looked at before its removal began.
            _ if is_rest => {
                leaving = begun.unwrap_or(leaving);
                0
            }
            Found::Entry(entry) => {
                leaving = match begun {
                    Some(begun) => begun,
                    None => {
                        what_leaves(
                            name,
                            entry,
                            &options,
                            self.setup.layout(),
                            &self.link,
                            &self.volumes,
                        )
                        .await?
                    }
                };
                let (discarded, stays) = self
                    .close_for_good(name, entry, &options, &mut leaving, begun.is_some())
                    .await?;
                data_trouble = stays;
                discarded
            }
            Found::Damaged(why) if options.discard_dirty => {
                tracing::warn!("volume {name} is deleted although {why}");
                0
            }
            Found::Damaged(why) => {
                return Err(ApiError::new(
                    ErrorKind::Conflict,
                    format!(
                        "volume {name}: how much dirty data it has is unknown ({why}): to lose all of it, \
                         say --discard-dirty"
                    ),
                ));
            }
        };
        if let Found::Entry(entry) = &slot.found
            && let Err(NotRemoved { error, .. }) = self.groups.remove(entry, false).await
        {
            if error.kind == ErrorKind::Conflict {
                self.volumes.put((**entry).clone(), Some(NotOpen::Copy));
                return Err(error);
            }
            // With its group there, this node would make its copy anew, and another one could take a volume without data.
            return Err(did_not_end(name, &error.message, leaving, &self.volumes));
        }
        let mut is_removed = leaving == Leaving::Clone;
        if let (Leaving::Objects, Found::Entry(entry)) = (leaving, &slot.found) {
            // Before its directory, in which is noted that they are given up: nothing leaves any of them behind.
            match remove_objects(entry, self.setup.layout(), &self.volumes).await {
                Ok(()) => is_removed = true,
                // It was tried before, and nobody can open them any more.
                Err(problem) if options.discard_dirty && begun.is_some() => {
                    let url = entry.backend_url(self.setup.layout());
                    data_trouble = Some(format!(
                        "some of what it had at {url} stays there, which nobody can open any more: {problem}"
                    ));
                    is_removed = true;
                }
                Err(problem) => return Err(did_not_end(name, &problem, leaving, &self.volumes)),
            }
        }
        if let (false, Found::Entry(entry)) = (is_rest, &slot.found) {
            forget(entry, self.setup.layout(), &self.link).await;
        }
        let layout = self.setup.layout().clone();
        let has_own_data = catalogue::directory(&layout, &volume_name)
            .join(catalogue::DATA_FILE)
            .exists();
        let keep = (options.keep_data && has_own_data)
            .then(|| layout.kept().join(format!("{name}-{}.img", Uuid::new_v4())));
        let users = match &slot.found {
            Found::Entry(entry) => entry.backend.clone(),
            Found::Damaged(_) => None,
        };
        // Its log may be elsewhere, on something that does not answer.
        let (at, of, kept) = (
            self.setup.layout().clone(),
            volume_name.clone(),
            keep.clone(),
        );
        let removed = tokio::task::spawn_blocking(move || {
            catalogue::remove(&at, &of, kept.as_deref()).map_err(|error| error.to_string())
        });
        let removed = removed.await.unwrap_or_else(|error| Err(error.to_string()));
        if let Err(error) = removed {
            return Err(did_not_end(name, &error, leaving, &self.volumes));
        }
        if let Found::Entry(entry) = &slot.found {
            close_copy(self, entry).await;
            self.groups.gone(entry).await;
            let url = entry.backend_url(&layout);
            if let Leaving::Image(_) = leaving {
                is_removed = remove_data(entry, leaving, self.setup.layout(), &self.volumes)
                    .await
                    .is_ok();
            } else if leaving != Leaving::Objects {
                self.volumes.remove(name);
                settle(url.clone()).await;
                if leaving == Leaving::Clone {
                    super::snapshots::sweep(name, url, data_key(entry));
                }
            }
        }
        self.volumes.remove(name);
        self.volumes.explain(name, None);
        self.share_memory().await;
        tracing::info!("volume {name} was deleted, {discarded} dirty bytes discarded");
        let mut left = users.filter(|_| !is_removed);
        if data_trouble.is_none()
            && let (Some(url), Found::Entry(entry)) = (left.clone(), &slot.found)
            && let Some((trouble, is_absent)) =
                wrong_with(url, entry.backend_identity.clone(), entry.bytes).await
        {
            tracing::warn!(
                "volume {name} was deleted, and of what it had at its backend: {trouble}"
            );
            left = left.filter(|_| !is_absent);
            data_trouble = Some(trouble);
        }
        Ok(Deleted {
            name: name.to_owned(),
            discarded_dirty_bytes: discarded,
            data: keep.as_deref().map(hdcs_backend::url::file_url).or(left),
            data_trouble,
        })
    }

    /// What a deletion before this one has given up of a volume, so that this one goes on with it: nothing can be kept
    /// any more. A volume that turns out to be whole is opened.
    async fn begun(
        &self,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<Option<Leaving>, ApiError> {
        let slot = self.volumes.slot(name)?;
        let (Found::Entry(entry), Some(not_open)) = (slot.found, slot.not_open) else {
            return Ok(None);
        };
        let known = not_open.given_up();
        let mut noted = known;
        if known.is_none() {
            // However its opening failed: that may have been before its place was looked at.
            let found = self.catalogue.given_up(&entry.name).await;
            noted = found.map(Leaving::from);
        }
        let Some(leaving) = noted else {
            return Ok(None);
        };
        let report = self.link.report().await?;
        let volume = find(&report, VolumeNumber(entry.number));
        if volume.is_some_and(|volume| volume.phase == Phase::Open) {
            return Ok(known);
        }
        // Of what is not there any more, nothing is left to be removed.
        let nothing = known.map(|_| Leaving::Stays);
        let (url, identity) = (
            entry.backend_url(self.setup.layout()),
            entry.backend_identity.clone(),
        );
        match beside(move || remains(&url, identity.as_deref())).await? {
            Ok(Remains::GivenUp) => Ok(Some(leaving)),
            Ok(Remains::Nothing) => Ok(nothing),
            Ok(Remains::Whole) if known.is_some() && entry.is_replicated => {
                tracing::warn!(
                    "volume {name}: what it has in its store stays there: its group was removed before that was given up, \
                     and nobody can open it any more"
                );
                Ok(nothing)
            }
            Ok(Remains::Whole) => {
                if known.is_some()
                    && let Err(failure) = self.open(&entry, self.volumes.count()).await
                {
                    return Err(self.volumes.refusal(name, &failure));
                }
                Ok(None)
            }
            Err(error) if options.discard_dirty => {
                tracing::warn!("volume {name}: what it has in its store stays there: {error}");
                Ok(nothing)
            }
            Err(error) => Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: its deletion has begun, and what is left to be done cannot be seen: {error}: \
                     delete it again once that is put right, or leave what its store has with --discard-dirty"
                ),
            )),
        }
    }

    /// Give up what leaves, so that nobody can open it any more, if it is that kind of thing; before that, its group. What
    /// another node has taken over stays, and what is refused when the group is removed already, which is said.
    async fn give_up_place(
        &self,
        name: &str,
        entry: &Entry,
        options: &DeleteOptions,
        leaving: Leaving,
        has_begun: bool,
    ) -> Result<(Leaving, Option<String>), ApiError> {
        if leaving.given_up().is_none() {
            return Ok((leaving, None));
        }
        if !has_begun {
            if entry.is_replicated {
                refuse_group_end(self, name, entry, options).await?;
            }
            self.catalogue.note_given_up(entry, leaving).await?;
        }
        // First of all, lest another node take a volume over that has no data any more.
        match self.groups.remove(entry, false).await {
            Ok(()) => {}
            Err(NotRemoved {
                error,
                is_certain: true,
            }) => {
                if !has_begun {
                    self.catalogue.keep_after_all(entry).await;
                }
                return Err(error);
            }
            // The removal may count by now, or soon: what is written to it from here on would be lost.
            Err(NotRemoved { error, .. }) => {
                let closed = self.close_given_up(name, entry, false, CLOSE_TIME_MAX);
                if let Err(error) = closed.await {
                    tracing::warn!("{error}");
                }
                return Err(did_not_end(name, &error.message, leaving, &self.volumes));
            }
        }
        let number = VolumeNumber(entry.number);
        let given_up = give_up_clone(name, number, &self.link, &self.flushes).await;
        end_group(self, entry).await;
        match given_up {
            Ok(true) => Ok((leaving, None)),
            Ok(false) => {
                self.catalogue.keep_after_all(entry).await;
                Ok((Leaving::Stays, None))
            }
            Err(NotKept { error, is_refused }) if is_refused && !has_begun => {
                self.catalogue.keep_after_all(entry).await;
                // A volume whose group is removed can only go.
                if leaving == Leaving::Clone && !entry.is_replicated {
                    return Err(error);
                }
                let stays = format!(
                    "what it has in its store stays there, and nothing removes it any more: {}",
                    error.message
                );
                tracing::warn!("volume {name}: {stays}");
                Ok((Leaving::Stays, Some(stays)))
            }
            // It may be given up all the same, or be so later: what is written to it from here on would be lost.
            Err(NotKept { error, .. }) => {
                if let Err(error) = self.close_given_up(name, entry, false, MOVE_TIME_MAX).await {
                    tracing::warn!("{error}");
                }
                Err(did_not_end(name, &error.message, leaving, &self.volumes))
            }
        }
    }

    /// Close a volume that will be deleted; returns the dirty bytes that this loses, and why something stays in its store that
    /// was to go.
    async fn close_for_good(
        &self,
        name: &str,
        entry: &Entry,
        options: &DeleteOptions,
        leaving: &mut Leaving,
        has_begun: bool,
    ) -> Result<(u64, Option<String>), ApiError> {
        let number = VolumeNumber(entry.number);
        let report = self.link.report().await?;
        let volume = find(&report, number);
        let Some(volume) = volume.filter(|volume| volume.phase == Phase::Open) else {
            let is_closing = volume.is_some_and(|volume| volume.phase == Phase::Closing);
            // What it writes to its log may wait for members that are letting go of their copies.
            if has_begun && is_closing && self.groups.remove(entry, false).await.is_ok() {
                end_group(self, entry).await;
            }
            let unopened = self.give_up_unopened(name, entry, options, has_begun, is_closing);
            return Ok((unopened.await?, None));
        };
        let dirty = volume.stats.dirty_bytes;
        let asks = !options.discard_dirty && !has_begun;
        if let Some(lost) = lost(volume).filter(|_| asks) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: {lost}, which what stays of it does not say: write over them first, or lose them \
                     with --discard-dirty"
                ),
            ));
        }
        if asks && dirty > 0 {
            let url = entry.backend_url(self.setup.layout());
            // A file that is open is still whole without its name.
            let is_open_file = BackendUrl::parse(&url).is_ok_and(|url| url.place.path().is_some());
            if !is_open_file && is_gone(&url).await {
                let why = format!(
                    "volume {name}: nothing is at {url}, or its file system is not mounted: put it back, or lose {dirty} \
                     dirty bytes with --discard-dirty"
                );
                return Err(ApiError::new(ErrorKind::Conflict, why));
            }
            self.flushes
                .run(name, number)
                .await
                .map_err(|error| match error.kind {
                    // Nothing is wrong with the backend.
                    ErrorKind::Unavailable => error,
                    _ => ApiError::new(
                        ErrorKind::Conflict,
                        format!("{error}, or lose {dirty} dirty bytes with --discard-dirty"),
                    ),
                })?;
        }
        let ends_group = entry.is_replicated && leaving.given_up().is_some();
        let given_up = self.give_up_place(name, entry, options, *leaving, has_begun);
        let stays;
        (*leaving, stays) = given_up.await?;
        let is_given_up = leaving.given_up().is_some();
        // What is given up takes nothing any more, and a log without its group gives nothing.
        let destage = asks && !is_given_up && !ends_group;
        let patience = if destage || is_given_up {
            MOVE_TIME_MAX
        } else {
            CLOSE_TIME_MAX
        };
        let closed = self.close_given_up(name, entry, destage, patience);
        if let Err(error) = closed.await {
            if !is_given_up {
                return Err(still_closing(name, error));
            }
            // Whatever happens from here on, it can only be deleted.
            return Err(did_not_end(name, &error.message, *leaving, &self.volumes));
        }
        Ok((if asks { 0 } else { dirty }, stays))
    }

    /// Close a volume whose place is given up, if it leaves it.
    async fn close_given_up(
        &self,
        name: &str,
        entry: &Entry,
        destage: bool,
        patience: Duration,
    ) -> Result<(), ApiError> {
        let number = VolumeNumber(entry.number);
        let close = |answer| Command::Close {
            volume: number,
            destage,
            answer,
        };
        let left = (self.link.command(name, "closing it", patience, close)).await?;
        if let Some(left) = left.filter(|left| destage && !left.all.nothing) {
            self.records.closed(entry.number, Some(left)).await;
            let why = format!(
                "its write log failed or did not answer while it was closed, and the backend may lack {} bytes",
                left.all.dirty_bytes
            );
            let refused = NotOpen::Refused { why: why.clone() };
            self.volumes.put(entry.clone(), Some(refused));
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: {why}: put it right and open it, or lose that with --discard-dirty"
                ),
            ));
        }
        self.untrack(entry.number).await;
        Ok(())
    }

    /// Keep no account of a volume any more that is closed, or will be.
    async fn untrack(&self, number: u32) {
        self.records.untrack(number).await;
        self.scrubs.forget(number);
        self.heats.forget(number).await;
    }

    /// The same for a volume that could not be opened: what it holds is read from its log. What its place is given
    /// up for had its say already.
    async fn give_up_unopened(
        &self,
        name: &str,
        entry: &Entry,
        options: &DeleteOptions,
        is_given_up: bool,
        is_closing: bool,
    ) -> Result<u64, ApiError> {
        let dirty = dirty_of_unopened(name, entry, &self.catalogue, &self.memories).await?;
        let conflict = |what: String| {
            let what = format!(
                "volume {name}: it is not open and {what}: put it right and open it, or lose that with --discard-dirty"
            );
            Err(ApiError::new(ErrorKind::Conflict, what))
        };
        let loses = options.discard_dirty || is_given_up;
        if !loses && !dirty.is_none() {
            return conflict(format!(
                "its write log holds {dirty} that the backend does not have"
            ));
        }
        if !loses
            && entry.home.is_some()
            && let Some(why) = missing_backend(entry, self.setup.layout()).await
        {
            return conflict(format!(
                "its local store may hold the only copy of its data, since its backend is not whole ({why})"
            ));
        }
        let number = VolumeNumber(entry.number);
        let closed = self
            .link
            .ask("closing it", COMMAND_TIME_MAX, |answer| Command::Close {
                volume: number,
                destage: false,
                answer,
            });
        match closed.await {
            Err(error) if error.kind == ErrorKind::Timeout && is_closing => {
                return Err(still_closing(name, error));
            }
            Err(error) => tracing::debug!("volume {name} was not open: {error}"),
            Ok(_) => {}
        }
        self.untrack(entry.number).await;
        Ok(dirty.bytes_max)
    }
}
