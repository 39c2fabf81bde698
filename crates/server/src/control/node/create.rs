//! Making a volume: everything that can be refused is refused before anything is made, and what was
//! made is removed again if the rest fails.

use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, io};

use hdcs_api::groups::WhenShort;
use hdcs_api::{ApiError, CreateVolume, ErrorKind, Volume};
use hdcs_backend::crypt::{Encryption, Unlocked};
use hdcs_backend::url::BackendUrl;
use hdcs_backend::{BackendError, Found};
use hdcs_core::base::limits::{BLOCK_BYTES, LOG_BYTES_MAX, LOG_BYTES_MIN};
use hdcs_core::format::{LogSuperblock, Membership};
use hdcs_core::replication::record::GroupRecord;
use hdcs_core::volume::{Volume as CoreVolume, VolumeConfig, sharing};
use hdcs_device::DeviceRegion;
use hdcs_device::create::{create_region_with, zero_region};
use hdcs_device::file::DeviceError;
use hdcs_frontend::VolumeNumber;
use uuid::Uuid;
use zerocopy::IntoBytes;

use super::delete::forget;
use super::encryption::plan_encryption;
use super::groups::{GroupPlan, NotRemoved};
use super::home::{make_home, plan_home};
use super::open::NotOpen;
use super::replicas::close_copy;
use super::setup::Setup;
use super::volumes::Volumes;
use super::{
    ANSWER_TIME_MAX, COMMAND_TIME_MAX, Node, at_volume, beside, failed, invalid, looks, parse_name,
};
use crate::catalogue::{
    self, CatalogueError, Entry, LOG_FILE, LogPlace, PendingVolume, StagedData, VolumeName,
    check_volume_bytes,
};
use crate::data_dir::Layout;
use crate::inspect;
use crate::shard::command::Command;

/// Refuse what a new volume would destroy, since it is not the bytes of one, or cannot be told from that. What else is
/// wrong with a URL others say.
async fn refuse_foreign(name: &str, url: &str) -> Result<(), ApiError> {
    let (place, is_there) = (url.to_owned(), Arc::new(AtomicBool::new(false)));
    let was_found = Arc::clone(&is_there);
    let look = move || {
        let Ok(url) = BackendUrl::parse(&place) else {
            return Ok(None);
        };
        let place = url.place;
        if place.is_read_only() {
            return Ok(None);
        }
        let found = place.path().is_some_and(Path::exists);
        was_found.store(found, Ordering::Relaxed);
        place.foreign()
    };
    let looked = looks::in_time(url, ANSWER_TIME_MAX, look).await;
    let more = if url.contains('?') { '&' } else { '?' };
    let unseen = |why: &str| {
        failed(format!(
            "volume {name}: backend {url}: its beginning cannot be read ({why}), and an image of another format would \
             be destroyed: put that right, or, if it is raw, say {url}{more}raw=on"
        ))
    };
    match looked {
        Some(Ok(None)) => Ok(()),
        Some(Ok(Some(what))) => Err(invalid(format!(
            "volume {name}: backend {url}: it is {what}, not the bytes of a volume, and the first write would destroy \
             it: `hdcs volume import` takes what qemu-img reads; if a volume has written this, say {url}{more}raw=on"
        ))),
        Some(Err(error)) => Err(unseen(&error.to_string())),
        None if is_there.load(Ordering::Relaxed) => Err(unseen("it does not answer")),
        None => Err(failed(format!(
            "volume {name}: backend {url}: what it lies on does not answer"
        ))),
    }
}

impl Node {
    /// Make and open a volume.
    pub async fn create(&self, request: CreateVolume) -> Result<Volume, ApiError> {
        // What is there is not taken, or taken whatever it is.
        let is_settled = request.must_be_new || request.backend_overwrite;
        if let Some(url) = request.backend.as_ref().filter(|_| !is_settled) {
            refuse_foreign(&request.name, url).await?;
        }
        self.create_over(request, None).await
    }

    /// The same over whatever is at its backend's place, or with `data` as its backing file if it has its own.
    pub(super) async fn create_over(
        &self,
        request: CreateVolume,
        data: Option<Arc<StagedData>>,
    ) -> Result<Volume, ApiError> {
        let name = parse_name(&request.name)?;
        let busy = self.volumes.begin(name.as_str(), "created")?;
        if self.volumes.has(name.as_str()) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!("volume {name}: it exists already: choose another name"),
            ));
        }
        self.groups.refuse_name(&name, None).await?;
        let group = self.groups.plan(&name, &request)?;
        let entry = self.plan(name.clone(), &request).await?;
        let volumes = self.volumes.count() + 1;
        let config = self.setup.core_config(&entry, volumes, None)?;
        let layout = self.setup.layout().clone();
        let overwrite = [request.log_overwrite, request.store_overwrite];
        let (high, low) = Uuid::new_v4().as_u64_pair();
        let log = high ^ low;
        let made = tokio::task::spawn_blocking(move || {
            make(&layout, entry, (&config, log), overwrite, data.as_deref())
        });
        let entry = made
            .await
            .map_err(|error| failed(format!("volume {name}: creating it: {error}")))??;
        let opened = match group {
            Some(group) => {
                self.volumes.put(entry.clone(), Some(NotOpen::Copy));
                // Whoever serves the group opens it.
                drop(busy);
                found(self, &entry, log, group).await
            }
            None => (self.open(&entry, volumes).await).map_err(|error| error.to_string()),
        };
        if let Err(error) = opened {
            if entry.is_replicated {
                // It may be on its way.
                let number = VolumeNumber(entry.number);
                let closed =
                    self.link
                        .ask("closing it", COMMAND_TIME_MAX, |answer| Command::Close {
                            volume: number,
                            destage: false,
                            answer,
                        });
                if let Err(why) = closed.await {
                    tracing::debug!("volume {name}: {why}");
                }
            }
            // Whoever sees that its group is removed leaves it alone meanwhile.
            let _busy = self.volumes.begin(name.as_str(), "removed").ok();
            if let Err(NotRemoved { error, .. }) = self.groups.remove(&entry, false).await {
                tracing::warn!("{error}: its group stays");
            }
            close_copy(self, &entry).await;
            // Nothing was ever written to it; a backend of the user's is not touched.
            self.volumes.remove(name.as_str());
            self.volumes.explain(name.as_str(), None);
            forget(&entry, self.setup.layout(), &self.link).await;
            let (layout, of) = (self.setup.layout().clone(), entry.name.clone());
            let removed = beside(move || catalogue::remove(&layout, &of, None)).await?;
            self.groups.gone(&entry).await;
            let rest = removed.err().map_or(String::new(), |error| {
                format!(" (and what was made could not be removed: {error})")
            });
            return Err(failed(format!("volume {name}: {error}{rest}")));
        }
        self.share_memory().await;
        tracing::info!("volume {name} was created");
        self.volume(name.as_str()).await
    }

    /// Check everything about a new volume that can be checked before anything is made.
    pub(super) async fn plan(
        &self,
        name: VolumeName,
        request: &CreateVolume,
    ) -> Result<Entry, ApiError> {
        let at = |error: String| invalid(format!("volume {name}: {error}"));
        self.setup
            .settings_of(&request.settings)
            .map_err(|error| at(error.message))?;
        let shard = request.shard;
        let shard = shard.map(|shard| self.check_shard(name.as_str(), shard));
        let shard = shard.transpose()?;
        let found = match &request.backend {
            Some(url) => check_backend(url, &self.setup, &self.volumes)
                .await
                .map_err(|error| at_volume(name.as_str(), error))?,
            None => None,
        };
        if let (true, Some(url), Some(found)) = (request.must_be_new, &request.backend, found) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: backend {url} is there already, with {} bytes, and is left as it was: name \
                     a place where nothing is, or take that one and what it holds with --overwrite",
                    found.bytes
                ),
            ));
        }
        let bytes = match (request.bytes, found) {
            (Some(bytes), None) => bytes,
            (None, Some(found)) if found.bytes == 0 => return Err(at(empty_backend())),
            (None, Some(found)) => found.bytes,
            (Some(bytes), Some(found)) if bytes == found.bytes => bytes,
            // The rest of it is not touched.
            (Some(bytes), Some(found)) if found.partly && bytes < found.bytes => bytes,
            (Some(bytes), Some(found)) => return Err(at(other_size(bytes, found.bytes))),
            (None, None) => {
                let none = |url: &String| format!("there is nothing at {url} yet, so that it");
                let what = request.backend.as_ref().map_or("it".to_owned(), none);
                return Err(at(format!("{what} needs a size: give --size")));
            }
        };
        check_volume_bytes(bytes).map_err(&at)?;
        let encryption = plan_encryption(&name, request, found.is_some());
        let encryption = encryption.await?;
        let log = plan_log(&name, request, &self.setup, &self.volumes)
            .await
            .map_err(&at)?;
        let home = plan_home(&name, bytes, request, self.setup.layout(), &self.volumes)
            .await
            .map_err(&at)?;
        // A backend of its own is made with the rest.
        let new = request.backend.as_deref().filter(|_| found.is_none());
        let mut entry = Entry {
            name: name.clone(),
            number: 0,
            uuid: Uuid::new_v4(),
            bytes,
            // A copy may be filled at any time, and so is this one to be.
            log: LogPlace {
                prepared: log.prepared.filter(|_| request.group.is_none()),
                ..log
            },
            backend: request.backend.clone(),
            pins: Vec::new(),
            shard,
            backend_identity: new.and_then(hdcs_backend::choose_identity),
            backend_is_new: new.is_some(),
            encryption,
            home,
            is_replicated: request.group.is_some(),
            settings: request.settings.clone(),
        };
        self.memories.check(&entry)?;
        entry.number = self.catalogue.next_number(name.as_str()).await?;
        Ok(entry)
    }
}

/// Make the group of a new volume, and have this node serve it.
async fn found(node: &Node, entry: &Entry, log: u64, plan: GroupPlan) -> Result<(), String> {
    // The name is said once.
    let named = format!("volume {}: ", entry.name);
    let why = |error: ApiError| error.message.replacen(&named, "", 1);
    let fails_short = plan.request.when_short == WhenShort::Error;
    let founded = (node.groups)
        .found(entry, log, GroupRecord::FIRST, plan)
        .await;
    founded.map_err(why)?;
    let replicas = node.replicas.as_ref().ok_or("this node is alone")?;
    let served = replicas.await_served(entry.name.as_str(), entry.uuid);
    served.await.map_err(why)?;
    if fails_short {
        replicas.await_members(&node.link, entry).await;
    }
    Ok(())
}

/// Check a backend's URL; returns what is there already.
async fn check_backend(
    url: &str,
    setup: &Setup,
    volumes: &Volumes,
) -> Result<Option<Found>, ApiError> {
    let place_of = |url: &str| BackendUrl::parse(url).map(|url| url.place);
    let place = place_of(url).map_err(|error| invalid(error.to_string()))?;
    if let Some(exposure) = place.exposure() {
        return Err(invalid(format!("backend {}: {exposure}", place.name())));
    }
    let name_of = async |url: String| {
        let at = url.clone();
        let look = move || place_of(&url).ok().map(|place| place.name());
        looks::in_time(&at, ANSWER_TIME_MAX, look).await
    };
    let silent = || failed(format!("backend {url}: what it lies on does not answer"));
    let name = name_of(url.to_owned()).await.ok_or_else(silent)?;
    for other in volumes.entries() {
        // One that does not answer has a volume that holds its lock.
        let theirs = name_of(other.backend_url(setup.layout())).await.flatten();
        if theirs.is_some() && theirs == name {
            return Err(invalid(format!(
                "backend {url} is the backend of volume {} already, and two volumes on one would \
                 destroy what is written: use that volume, or choose another backend",
                other.name
            )));
        }
    }
    if let Some(path) = place.local_path() {
        let real = real_path(path).await;
        // A directory says better by itself that it does not answer.
        if real.is_none() && place.path().is_some() {
            return Err(silent());
        }
        let layout = setup.layout();
        // A snapshot there is only read.
        if !place.is_read_only() && real.is_some_and(|real| layout.is_own(&real)) {
            let why = layout.own_refusal();
            return Err(invalid(format!("backend {url} {why}")));
        }
    }
    let found = tokio::task::spawn_blocking(move || place.find()).await;
    found
        .map_err(|error| failed(error.to_string()))?
        .map_err(|error| match error {
            BackendError::Unreachable(_) => failed(error.to_string()),
            _ => invalid(error.to_string()),
        })
}

/// Check where the log of a new volume is to be, and how large.
async fn plan_log(
    name: &VolumeName,
    request: &CreateVolume,
    setup: &Arc<Setup>,
    volumes: &Volumes,
) -> Result<LogPlace, String> {
    let path = match (&request.log_path, &setup.node().log_path) {
        (Some(path), _) => PathBuf::from(path),
        (None, Some(directory)) => directory.join(format!("{name}-{}.log", Uuid::new_v4())),
        (None, None) => PathBuf::from(LOG_FILE),
    };
    // Nothing is ever written to a volume that is only read. It has a log all the same, since to
    // open, close and check a volume is to do that to its log; so it is the smallest that there is.
    let read_only = request
        .backend
        .as_deref()
        .is_some_and(hdcs_backend::is_read_only);
    let bytes = request.log_bytes.or(read_only.then_some(LOG_BYTES_MIN));
    let place = check_log_place(path, bytes, None, setup, volumes).await?;
    if place.path.is_absolute() && is_taken(&place.path).await != Some(false) {
        return Err(format!(
            "log path {}: it exists already, and is no block device: choose another",
            place.path.display()
        ));
    }
    Ok(place)
}

/// Check where a log is to be, and how large; `of` is the volume that has one already.
pub(super) async fn check_log_place(
    path: PathBuf,
    bytes: Option<u64>,
    of: Option<&Entry>,
    setup: &Arc<Setup>,
    volumes: &Volumes,
) -> Result<LogPlace, String> {
    if path != Path::new(LOG_FILE) && !path.is_absolute() {
        return Err(format!(
            "log path {}: give an absolute path",
            path.display()
        ));
    }
    let silent = || {
        format!(
            "log path {}: what it lies on does not answer",
            path.display()
        )
    };
    let looked_at = path.clone();
    let at = path.to_string_lossy();
    let device = looks::in_time(&at, ANSWER_TIME_MAX, move || {
        is_block_device(&looked_at).then(|| device_bytes(&looked_at))
    });
    let (bytes, prepared) = match (bytes, device.await.ok_or_else(silent)?) {
        (Some(bytes), _) => (bytes, None),
        (None, Some(found)) => {
            let found = found.map_err(|error| format!("log path {}: {error}", path.display()))?;
            (found / BLOCK_BYTES as u64 * BLOCK_BYTES as u64, None)
        }
        (None, None) => {
            let directory = match path.parent() {
                Some(parent) if path.is_absolute() => parent.to_owned(),
                _ => setup.layout().root().to_owned(),
            };
            let (setup, at) = (Arc::clone(setup), directory.display().to_string());
            let look = move || setup.log_bytes(&directory);
            let chosen = looks::in_time(&at, ANSWER_TIME_MAX, look).await;
            chosen.ok_or_else(silent)?
        }
    };
    if !(LOG_BYTES_MIN..=LOG_BYTES_MAX).contains(&bytes)
        || !bytes.is_multiple_of(BLOCK_BYTES as u64)
    {
        return Err(format!(
            "the size of a write log is a multiple of {BLOCK_BYTES} bytes from {LOG_BYTES_MIN} (16M) \
             to {LOG_BYTES_MAX} (1T), not {bytes}"
        ));
    }
    let layout = setup.layout();
    let mut others = volumes.entries();
    others.retain(|other| of.is_none_or(|entry| other.name != entry.name));
    let real = real_path(&path).await.ok_or_else(silent)?;
    if path.is_absolute() && layout.is_own(&real) {
        let why = layout.own_refusal();
        return Err(format!("log path {} {why}", path.display()));
    }
    for other in &others {
        // One that does not answer has a volume that holds its lock.
        if real_path(&other.log_path(layout)).await.as_ref() == Some(&real) {
            return Err(format!(
                "log path {} is the write log of volume {}: choose another",
                path.display(),
                other.name
            ));
        }
    }
    Ok(LogPlace {
        path,
        bytes,
        prepared,
    })
}

/// The backend is there and has another size than the volume is to have.
fn other_size(bytes: u64, has: u64) -> String {
    if has == 0 {
        return empty_backend();
    }
    let way_out = if bytes < has {
        format!("leave --size out, or say --size {has}, to use it as it is")
    } else {
        format!(
            "to use it as it is, leave --size out, or say --size {has}; for a volume of {bytes} bytes, make it \
             that long (`truncate -s {bytes}`), or remove it"
        )
    };
    format!("the backend exists and has {has} bytes, not {bytes}: {way_out}")
}

fn empty_backend() -> String {
    "the backend exists and is empty: remove it, and it is made; or give it the volume's size (`truncate -s SIZE`)"
        .to_owned()
}

/// A path without links, as far as it exists; `None` if what it lies on does not answer.
pub(super) async fn real_path(path: &Path) -> Option<PathBuf> {
    let at = path.to_string_lossy();
    let path = path.to_owned();
    let look = move || {
        let made_there = || {
            Some(
                fs::canonicalize(path.parent()?)
                    .ok()?
                    .join(path.file_name()?),
            )
        };
        let there = fs::canonicalize(&path).ok();
        there.or_else(made_there).unwrap_or(path)
    };
    looks::in_time(&at, ANSWER_TIME_MAX, look).await
}

/// Whether something is at a path where a file is to be made, other than a device; `None` if what it lies on does not
/// answer. It would go with a volume whose making fails.
pub(super) async fn is_taken(path: &Path) -> Option<bool> {
    let at = path.to_string_lossy();
    let path = path.to_owned();
    let look = move || fs::symlink_metadata(&path).is_ok() && !is_block_device(&path);
    looks::in_time(&at, ANSWER_TIME_MAX, look).await
}

pub(super) fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

fn device_bytes(path: &Path) -> io::Result<u64> {
    use io::{Seek, SeekFrom};
    fs::File::open(path)?.seek(SeekFrom::End(0))
}

/// Make the files of a new volume, whose log has this number. Blocks.
fn make(
    layout: &Layout,
    entry: Entry,
    (config, log_number): (&VolumeConfig, u64),
    [overwrite_log, overwrite_store]: [bool; 2],
    staged: Option<&StagedData>,
) -> Result<Entry, ApiError> {
    let name = entry.name.clone();
    let here = |error: CatalogueError| {
        let full = matches!(&error, CatalogueError::Io { source, .. }
            if source.kind() == io::ErrorKind::StorageFull);
        let kind = if full {
            ErrorKind::NoSpace
        } else {
            ErrorKind::Failed
        };
        ApiError::new(kind, format!("volume {name}: cannot be created: {error}"))
    };
    let (bytes, log) = (entry.bytes, entry.log.clone());
    let encryption = entry.encryption.clone();
    let pending = PendingVolume::begin(layout, entry).map_err(here)?;
    if let Some(data) = pending.data_path() {
        let made = match staged {
            Some(staged) => staged.move_to(&data),
            None => make_sparse(&data, bytes).map_err(catalogue::io_at(&data)),
        };
        made.map_err(here)?;
    }
    let mut first_block = CoreVolume::format_log(config, log_number);
    if log.prepared.is_some() {
        sharing::share_log_space(&mut first_block);
    }
    if pending.entry().is_replicated {
        begin_group(&mut first_block, true);
    }
    let unlocked = unlock(encryption.as_ref()).map_err(|error| at_volume(name.as_str(), error))?;
    if let Some(keys) = &unlocked {
        keys.mark(&mut first_block);
    }
    make_log(&pending.log_path(), &log, overwrite_log, &first_block)
        .map_err(|error| at_volume(name.as_str(), error))?;
    if let Some(home) = pending.home_path() {
        let advice = "make room, or name another place with --store-path";
        make_home(
            &home,
            pending.entry(),
            unlocked.as_ref(),
            overwrite_store,
            advice,
        )
        .map_err(|error| at_volume(name.as_str(), error))?;
    }
    pending.commit().map_err(here)
}

/// Have the first block of a new log say that it is the copy of a group's first member, or one that is to be brought up.
fn begin_group(first_block: &mut [u8; BLOCK_BYTES], is_member: bool) {
    let mut superblock = LogSuperblock::parse(first_block).expect("it was just made");
    let first = u64::from(is_member);
    superblock.incarnation.set(first);
    superblock.set_membership(Membership {
        promised: first,
        cut_position: 0,
        void_before: 0,
        joined: first,
        is_whole: is_member,
    });
    superblock.seal();
    first_block.copy_from_slice(superblock.as_bytes());
}

/// Unlock the key of a volume that is encrypted. Blocks.
fn unlock(encryption: Option<&Encryption>) -> Result<Option<Unlocked>, ApiError> {
    let unlocked = encryption.map(Encryption::unlock).transpose();
    unlocked.map_err(|error| failed(error.to_string()))
}

/// The first block of a copy that is to be brought up. Blocks.
fn first_block_of_copy(
    entry: &Entry,
    config: &VolumeConfig,
    log_number: u64,
) -> Result<[u8; BLOCK_BYTES], ApiError> {
    let mut first_block = CoreVolume::format_log(config, log_number);
    begin_group(&mut first_block, false);
    if let Some(keys) = unlock(entry.encryption.as_ref())? {
        keys.mark(&mut first_block);
    }
    Ok(first_block)
}

/// Make the log of a copy anew whose medium was lost. Blocks.
pub(super) fn make_copy_again(
    layout: &Layout,
    entry: &Entry,
    config: &VolumeConfig,
    log_number: u64,
) -> Result<(), ApiError> {
    let first_block = first_block_of_copy(entry, config, log_number)?;
    make_log(&entry.log_path(layout), &entry.log, false, &first_block)
}

/// Make a copy of another node's log that is still to be brought up, and the entry of its volume. Blocks.
pub(super) fn make_copy(
    layout: &Layout,
    entry: Entry,
    config: &VolumeConfig,
    log_number: u64,
) -> Result<Entry, ApiError> {
    let (name, log) = (entry.name.clone(), entry.log.clone());
    let here = |error: CatalogueError| failed(format!("volume {name}: {error}"));
    // Who cannot unlock the key has no use for a copy.
    let first_block = first_block_of_copy(&entry, config, log_number)
        .map_err(|error| at_volume(name.as_str(), error))?;
    let pending = PendingVolume::begin(layout, entry).map_err(here)?;
    make_log(&pending.log_path(), &log, false, &first_block)
        .map_err(|error| at_volume(name.as_str(), error))?;
    pending.commit().map_err(here)
}

fn make_sparse(path: &Path, bytes: u64) -> io::Result<()> {
    let file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.set_len(bytes)?;
    file.sync_all()
}

/// Make a write log: zeroes, each of them written as far as it is to be prepared, then its first block; all durable.
pub(super) fn make_log(
    path: &Path,
    log: &LogPlace,
    overwrite: bool,
    first_block: &[u8; BLOCK_BYTES],
) -> Result<(), ApiError> {
    let is_device = is_block_device(path);
    if is_device && !overwrite {
        inspect::refuse_used_device(path).map_err(|why| ApiError::new(ErrorKind::Conflict, why))?;
    }
    let made = if is_device {
        let region = DeviceRegion {
            path: path.to_owned(),
            offset: 0,
            bytes: log.bytes,
        };
        zero_region(&region, &mut |_| ())
    } else {
        create_region_with(
            path,
            log.bytes,
            log.prepared.unwrap_or(log.bytes),
            &mut |_| (),
        )
    };
    made.map_err(|error| {
        let kind = match error {
            DeviceError::NoSpace { .. } => ErrorKind::NoSpace,
            DeviceError::Exists(_) | DeviceError::Locked(_) => ErrorKind::Conflict,
            _ => ErrorKind::Failed,
        };
        ApiError::new(kind, format!("its write log cannot be made: {error}"))
    })?;
    let written = fs::OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|file| {
            file.write_all_at(first_block, 0)
                .and_then(|()| file.sync_all())
        });
    written.map_err(|error| {
        failed(format!(
            "its write log cannot be written: {}: {error}",
            path.display()
        ))
    })
}
