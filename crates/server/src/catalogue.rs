//! The catalogue: one durable entry per volume, and the crash-safe making and removing of volumes.
//!
//! A volume is made in `volumes/.new-NAME` and appears by renaming that directory to its name; it
//! disappears by renaming it to `.gone-NAME-UUID`. A crash in between leaves a hidden directory,
//! which [`recover`] removes at the next start. One that cannot be removed stays until it can, and keeps nothing from
//! serving.
//!
//! Invariants:
//! 1. A directory under its own name is a whole volume: entry, log and backing file are durable.
//! 2. No two entries that serve share a number, uuid, log or backend.
//! 3. A damaged entry costs its volume alone, and nothing of it is changed or removed.
//! 4. A name reaches a path only as a [`VolumeName`].
//! 5. A log or local store outside of a volume's directory goes with the volume that owns it: a directory whose entry
//!    has another name is a copy, and a file that another entry names, too, stays.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use hdcs_api::value::Value;
use hdcs_backend::crypt::Encryption;
use hdcs_backend::file::snapshots_of;
use hdcs_backend::url::file_url;
use hdcs_core::base::limits::{
    SECTOR_BYTES, VOLUME_BYTES_MAX, VOLUME_BYTES_MIN, VOLUME_NAME_BYTES_MAX,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::data_dir::sealed::{self, Kind, SealedError, sync_directory};
use crate::data_dir::{DataDir, Layout, beside, key};

const ENTRY: Kind = Kind {
    magic: "hdcs-volume",
    version: 1,
};
const ENTRY_FILE: &str = "volume.json";
const NEW_PREFIX: &str = ".new-";
const GONE_PREFIX: &str = ".gone-";
/// What follows the name of a deleted volume: a hyphen and a uuid.
const GONE_SUFFIX_BYTES: usize = 1 + uuid::fmt::Hyphenated::LENGTH;

/// Why a name was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// No name.
    #[error("a volume name cannot be empty")]
    Empty,
    /// Longer than a name may be.
    #[error("a volume name has at most {VOLUME_NAME_BYTES_MAX} bytes, this one has {0}")]
    TooLong(usize),
    /// A character that no name has.
    #[error("a volume name has letters A-Z a-z, digits, `.`, `_` and `-` only; this one has {0:?}")]
    Character(char),
    /// It would be hidden, an option, or a way out of its directory.
    #[error("a volume name cannot start with `{0}`")]
    Start(char),
}

/// The name of a volume: safe as a file name, NBD export name and metric label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeName(String);

impl VolumeName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for VolumeName {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if let Some(bad) = text.chars().find(|&c| !is_allowed(c)) {
            return Err(NameError::Character(bad));
        }
        if text.len() > VOLUME_NAME_BYTES_MAX {
            return Err(NameError::TooLong(text.len()));
        }
        match text.chars().next() {
            None => Err(NameError::Empty),
            Some(start @ ('.' | '-')) => Err(NameError::Start(start)),
            Some(_) => Ok(Self(text)),
        }
    }
}

impl std::str::FromStr for VolumeName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::try_from(text.to_owned())
    }
}

impl From<VolumeName> for String {
    fn from(name: VolumeName) -> Self {
        name.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Check the size of a volume; the error says what a size must be.
pub fn check_volume_bytes(bytes: u64) -> Result<(), String> {
    if bytes == 0 {
        return Err("a volume cannot have size zero".to_owned());
    }
    if !bytes.is_multiple_of(SECTOR_BYTES as u64) {
        return Err(format!(
            "the size of a volume is a multiple of {SECTOR_BYTES} bytes; {bytes} is not (the next one is {})",
            bytes.next_multiple_of(SECTOR_BYTES as u64)
        ));
    }
    if bytes < VOLUME_BYTES_MIN {
        return Err(format!(
            "a volume has at least {VOLUME_BYTES_MIN} bytes, not {bytes}"
        ));
    }
    if bytes > VOLUME_BYTES_MAX {
        return Err(format!(
            "a volume has at most {VOLUME_BYTES_MAX} bytes (1P), not {bytes}"
        ));
    }
    Ok(())
}

/// Where a volume's write log is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogPlace {
    /// A file or block device; relative to the volume's directory.
    pub path: PathBuf,
    /// Length of the region, from the start of the file or device.
    pub bytes: u64,
    /// When it is made: how much of it is prepared at once, if it shares the space of its file system. Else all is.
    #[serde(skip)]
    pub prepared: Option<u64>,
}

/// A range of a volume that stays in the SSD tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinnedRange {
    /// First byte.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// Which data key a volume has, as its entry says it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataKeyId {
    /// Of the data key.
    data_key: Uuid,
}

/// What the catalogue says of one volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[serde(bound(serialize = "E: Serialize", deserialize = "E: Deserialize<'de>"))]
pub struct Entry<E = Encryption> {
    /// Its name, which is also its directory's.
    pub name: VolumeName,
    /// Its number on this node, never reused.
    pub number: u32,
    /// Its identity everywhere.
    pub uuid: Uuid,
    /// Its size.
    pub bytes: u64,
    /// Its write log.
    pub log: LogPlace,
    /// The backend's URL; none: the file `data` in the volume's directory, which HDCS made.
    pub backend: Option<String>,
    /// What the backend was when the volume was first opened, or is to be then, if it can tell: see
    /// [`hdcs_backend::Opened::identity`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend_identity: Option<String>,
    /// Whether nothing was at the backend's place when the volume was made: what its first opening finds there, after a
    /// crash perhaps, is somebody else's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub backend_is_new: bool,
    /// How it is encrypted, if it is. On disk it is a file of its own ([`key`]), and the entry names the data key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<E>,
    /// The file or block device of its local store, relative to the volume's directory; none: cache mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<PathBuf>,
    /// What stays in the SSD tier.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pins: Vec<PinnedRange>,
    /// The shard that somebody has put it on. It is opened there, if there is one of this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<usize>,
    /// Whether other nodes have copies of its write log. Then the record of its group says who may open it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_replicated: bool,
    /// Settings that differ from the node's.
    pub settings: BTreeMap<String, Value>,
}

/// Name of the backing file that a volume has without a backend of the user's.
pub const DATA_FILE: &str = "data";
/// Name of the write log in a volume's directory.
pub const LOG_FILE: &str = "log";
/// Name of the local store of a volume in storage mode in its directory.
pub const HOME_FILE: &str = "home";

impl<E> Entry<E> {
    /// The same with its key said in another way.
    fn with_key<T>(self, say: impl FnOnce(E) -> T) -> Entry<T> {
        Entry {
            name: self.name,
            number: self.number,
            uuid: self.uuid,
            bytes: self.bytes,
            log: self.log,
            backend: self.backend,
            backend_identity: self.backend_identity,
            backend_is_new: self.backend_is_new,
            encryption: self.encryption.map(say),
            home: self.home,
            pins: self.pins,
            shard: self.shard,
            is_replicated: self.is_replicated,
            settings: self.settings,
        }
    }
}

impl Entry {
    /// The write log's file or device.
    pub fn log_path(&self, layout: &Layout) -> PathBuf {
        directory(layout, &self.name).join(&self.log.path)
    }

    /// The file or device of its local store, if it is in storage mode.
    pub fn home_path(&self, layout: &Layout) -> Option<PathBuf> {
        let home = self.home.as_ref()?;
        Some(directory(layout, &self.name).join(home))
    }

    /// What can be dirty in it at most.
    pub fn dirty_bytes_max(&self) -> u64 {
        self.log.bytes + self.home.as_ref().map_or(0, |_| self.bytes)
    }

    /// The backend's URL, with its path absolute.
    pub fn backend_url(&self, layout: &Layout) -> String {
        self.backend.clone().unwrap_or_else(|| {
            let path = directory(layout, &self.name).join(DATA_FILE);
            file_url(&path)
        })
    }

    /// Whether its backend can only be read.
    pub fn is_read_only(&self) -> bool {
        self.backend
            .as_deref()
            .is_some_and(hdcs_backend::is_read_only)
    }
}

/// What was found under one name.
#[derive(Clone, Debug)]
pub enum Found {
    /// A whole entry.
    Entry(Box<Entry>),
    /// An entry that cannot be trusted, and why, with what to do.
    Damaged(String),
}

/// What [`recover`] found and did.
#[derive(Debug, Default)]
pub struct Recovered {
    /// Every volume by name.
    pub volumes: BTreeMap<String, Found>,
    /// What was left of interrupted work and has been removed, for the log.
    pub removed: Vec<String>,
    /// What interrupted work has left and could not be removed, and why, for the log.
    pub left: Vec<String>,
    /// What was left untouched because it is not HDCS's, for the log.
    pub ignored: Vec<String>,
}

impl Recovered {
    fn note(&mut self, what: String, removed: Result<(), CatalogueError>) {
        match removed {
            Ok(()) => self.removed.push(what),
            Err(error) => self.left.push(format!("{what}: {error}")),
        }
    }
}

/// Why the catalogue could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum CatalogueError {
    /// A file could not be made, written or removed.
    #[error("{path}: {source}{hint}", path = path.display(), hint = hint(path, source))]
    Io {
        /// Which file.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
    /// An entry could not be written.
    #[error("{path}: {source}", path = path.display())]
    Sealed {
        /// Which file.
        path: PathBuf,
        /// What happened.
        source: SealedError,
    },
}

fn hint(path: &Path, error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded if path.ends_with(LOG_FILE) => {
            ": make room, or give a smaller --log-size; nothing was left behind"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": make room there and try again"
        }
        io::ErrorKind::PermissionDenied => ": let the daemon's user write there",
        _ => "",
    }
}

/// An I/O error together with its file.
pub fn io_at(path: &Path) -> impl FnOnce(io::Error) -> CatalogueError + '_ {
    move |source| CatalogueError::Io {
        path: path.to_owned(),
        source,
    }
}

/// The directory of a volume.
pub fn directory(layout: &Layout, name: &VolumeName) -> PathBuf {
    layout.volumes().join(name.as_str())
}

/// Whether a directory is that of a volume, whatever is left of it.
pub fn is_volume_directory(directory: &Path) -> bool {
    entry_file(directory).exists()
}

fn entry_file(directory: &Path) -> PathBuf {
    directory.join(ENTRY_FILE)
}

/// An entry as it is on disk.
type Stored = Entry<DataKeyId>;

/// Read the key of a volume beside its entry; an error says what is wrong with which file.
fn with_encryption(directory: &Path, entry: Stored) -> Result<Entry, String> {
    let Some(DataKeyId { data_key }) = entry.encryption else {
        return Ok(entry.with_key(|_| unreachable!("it has none")));
    };
    let path = key::file(directory);
    let found = key::read(directory).map_err(|error| format!("{}: {error}", path.display()))?;
    if found.key.id() != data_key {
        return Err(format!(
            "{}: it has data key {}, and the volume is encrypted with {data_key}",
            path.display(),
            found.key.id()
        ));
    }
    Ok(entry.with_key(|_| found))
}

/// How the volume is encrypted whose log is at `log`, if that is in the volume's directory.
pub fn encryption_beside(log: &Path) -> Option<Encryption> {
    let directory = log.parent()?;
    let entry = sealed::read::<Stored>(&entry_file(directory), ENTRY).ok()?;
    let is_its_log = entry.log.path == Path::new(log.file_name()?);
    let found = is_its_log.then(|| with_encryption(directory, entry))?;
    found.ok()?.encryption
}

/// Remove what interrupted work left behind, as far as that is possible, and read every entry.
pub fn recover(dir: &DataDir) -> Result<Recovered, CatalogueError> {
    let volumes = dir.layout().volumes();
    let mut recovered = Recovered::default();
    let mut names = Vec::new();
    for item in fs::read_dir(&volumes).map_err(io_at(&volumes))? {
        let item = item.map_err(io_at(&volumes))?;
        names.push(item.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    for name in names {
        let path = volumes.join(&name);
        if name.starts_with(NEW_PREFIX) || name.starts_with(GONE_PREFIX) {
            let what = if name.starts_with(NEW_PREFIX) {
                "a volume whose creation was interrupted"
            } else {
                "the rest of a deleted volume"
            };
            let what = format!("{what}: {}", path.display());
            recovered.note(what, remove_directory(dir.layout(), &path));
        } else if name.parse::<VolumeName>().is_err() || !path.is_dir() {
            recovered.ignored.push(path.display().to_string());
        } else {
            let what = || {
                let path = path.display();
                format!("a wrapping of a data key that does not count: {path}")
            };
            match key::tidy(&path).map_err(io_at(&path)) {
                Ok(false) => {}
                // The key that counts is whole in any case.
                tidied => recovered.note(what(), tidied.map(drop)),
            }
            let found = read_entry(&path, &name);
            recovered.volumes.insert(name, found);
        }
    }
    refuse_twins(dir.layout(), &mut recovered.volumes);
    Ok(recovered)
}

/// Read the catalogue without changing anything; for offline inspection.
pub fn list(layout: &Layout) -> io::Result<BTreeMap<String, Found>> {
    let mut volumes = BTreeMap::new();
    for item in fs::read_dir(layout.volumes())? {
        let item = item?;
        let name = item.file_name().to_string_lossy().into_owned();
        if name.parse::<VolumeName>().is_ok() && item.path().is_dir() {
            let found = read_entry(&item.path(), &name);
            volumes.insert(name, found);
        }
    }
    refuse_twins(layout, &mut volumes);
    Ok(volumes)
}

fn read_entry(directory: &Path, name: &str) -> Found {
    let path = entry_file(directory);
    let damaged = |what: &dyn fmt::Display| {
        Found::Damaged(format!(
            "catalogue entry: {}: {what}: restore the file from a copy, then restart the daemon; \
             nothing of the volume was changed",
            path.display()
        ))
    };
    if let Err(why) = beside::refuse_newer(directory) {
        return Found::Damaged(format!("{why}; nothing of the volume was changed"));
    }
    let entry = match sealed::read::<Stored>(&path, ENTRY) {
        Ok(entry) => entry,
        Err(newer @ SealedError::Newer { .. }) => {
            let path = path.display();
            return Found::Damaged(format!(
                "{path}: {newer}; nothing of the volume was changed"
            ));
        }
        Err(error) => return damaged(&error),
    };
    if entry.name.as_str() != name {
        return damaged(&format!(
            "it is of volume `{}`; the directory was renamed or copied",
            entry.name
        ));
    }
    if let Err(error) = check_volume_bytes(entry.bytes) {
        return damaged(&error);
    }
    match with_encryption(directory, entry) {
        Ok(entry) => Found::Entry(Box::new(entry)),
        Err(error) => Found::Damaged(format!(
            "its wrapped data key: {error}: restore the file from a copy, without which the volume cannot be read, \
             then restart the daemon; nothing of the volume was changed"
        )),
    }
}

/// Of entries that share an identity or a file, none serves: which one is the original cannot be
/// told, and two writers on one log would destroy it.
fn refuse_twins(layout: &Layout, volumes: &mut BTreeMap<String, Found>) {
    let mut owners: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, found) in &*volumes {
        if let Found::Entry(entry) = found {
            let home = entry.home_path(layout);
            let marks = [
                format!("number {}", entry.number),
                format!("uuid {}", entry.uuid),
                format!("write log {}", entry.log_path(layout).display()),
                format!("backend {}", entry.backend_url(layout)),
            ];
            let home = home.map(|path| format!("local store {}", path.display()));
            for mark in marks.into_iter().chain(home) {
                owners.entry(mark).or_default().push(name.clone());
            }
        }
    }
    for (mark, names) in owners {
        if names.len() > 1 {
            for name in &names {
                let reason = format!(
                    "catalogue entry: volumes {} have the same {mark}: move the copy out of {} and \
                     restart the daemon",
                    names.join(" and "),
                    layout.volumes().display()
                );
                volumes.insert(name.clone(), Found::Damaged(reason));
            }
        }
    }
}

/// A volume that is being made. Dropped before [`PendingVolume::commit`], it leaves nothing behind.
#[derive(Debug)]
pub struct PendingVolume {
    layout: Layout,
    entry: Entry,
    directory: PathBuf,
    committed: bool,
}

impl PendingVolume {
    /// Begin to make `entry`.
    pub fn begin(layout: &Layout, entry: Entry) -> Result<Self, CatalogueError> {
        let directory = layout.volumes().join(format!("{NEW_PREFIX}{}", entry.name));
        let this = Self {
            layout: layout.clone(),
            entry,
            directory,
            committed: false,
        };
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&this.directory)
            .map_err(io_at(&this.directory))?;
        // First, so that recovery finds a log outside of the directory by it.
        write_entry(&this.directory, &this.entry)?;
        if let Some(encryption) = &this.entry.encryption {
            let path = key::file(&this.directory);
            key::create(&this.directory, encryption).map_err(sealed_at(path))?;
        }
        Ok(this)
    }

    /// Where the write log is to be made.
    pub fn log_path(&self) -> PathBuf {
        self.directory.join(&self.entry.log.path)
    }

    /// What is being made.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Where the local store is to be made, if the volume is in storage mode.
    pub fn home_path(&self) -> Option<PathBuf> {
        Some(self.directory.join(self.entry.home.as_ref()?))
    }

    /// Where the backing file is to be made, if the volume has its own.
    pub fn data_path(&self) -> Option<PathBuf> {
        self.entry
            .backend
            .is_none()
            .then(|| self.directory.join(DATA_FILE))
    }

    /// Everything is in place and durable: give the volume its name.
    pub fn commit(mut self) -> Result<Entry, CatalogueError> {
        let volumes = self.layout.volumes();
        let target = directory(&self.layout, &self.entry.name);
        sync_directory(&self.directory)
            .and_then(|()| fs::rename(&self.directory, &target))
            .map_err(io_at(&target))?;
        self.committed = true;
        sync_directory(&volumes).map_err(io_at(&volumes))?;
        Ok(self.entry.clone())
    }
}

impl Drop for PendingVolume {
    fn drop(&mut self) {
        if !self.committed && self.directory.exists() {
            // What cannot be removed now is removed at the next start.
            if let Err(error) = remove_directory(&self.layout, &self.directory) {
                tracing::warn!("a half-made volume stays until the next start: {error}");
            }
        }
    }
}

/// The backing file of a volume that is to be made, until [`PendingVolume`] takes it. Dropped before that, it leaves
/// nothing behind; what a crash leaves of it is removed at the next start.
#[derive(Debug)]
pub struct StagedData {
    directory: PathBuf,
}

impl StagedData {
    /// Make room for one.
    pub fn begin(layout: &Layout) -> Result<Self, CatalogueError> {
        let name = format!("{NEW_PREFIX}data-{}", Uuid::new_v4());
        let directory = layout.volumes().join(name);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&directory)
            .map_err(io_at(&directory))?;
        Ok(Self { directory })
    }

    /// Where the file is to be made.
    pub fn path(&self) -> PathBuf {
        self.directory.join(DATA_FILE)
    }

    /// Move the file to where a volume has its own.
    pub fn move_to(&self, path: &Path) -> Result<(), CatalogueError> {
        fs::rename(self.path(), path).map_err(io_at(path))
    }
}

impl Drop for StagedData {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            let path = self.directory.display();
            tracing::warn!("{path}: it stays until the next start: {error}");
        }
    }
}

fn sealed_at(path: PathBuf) -> impl FnOnce(SealedError) -> CatalogueError {
    move |error| match error {
        SealedError::Io(source) => CatalogueError::Io { path, source },
        source => CatalogueError::Sealed { path, source },
    }
}

fn write_entry(directory: &Path, entry: &Entry) -> Result<(), CatalogueError> {
    let path = entry_file(directory);
    let stored: Stored = entry.clone().with_key(|encryption| DataKeyId {
        data_key: encryption.key.id(),
    });
    sealed::write(&path, ENTRY, &stored).map_err(sealed_at(path))
}

/// Replace the wrapping of a volume's data key, and destroy the one before.
pub fn rotate(
    layout: &Layout,
    name: &VolumeName,
    encryption: &Encryption,
) -> Result<(), key::ReplaceError> {
    key::replace(&directory(layout, name), encryption)
}

/// Replace the entry of a volume that exists, but for its wrapped key: see [`rotate`].
pub fn update(layout: &Layout, entry: &Entry) -> Result<(), CatalogueError> {
    write_entry(&directory(layout, &entry.name), entry)
}

/// What is left of a volume whose removal has begun and did not end: it has no other directory any more.
fn rest_of(layout: &Layout, name: &VolumeName) -> Result<Vec<PathBuf>, CatalogueError> {
    let path = directory(layout, name);
    if fs::symlink_metadata(path).is_ok() {
        return Ok(Vec::new());
    }
    let volumes = layout.volumes();
    let mut rest = Vec::new();
    for item in fs::read_dir(&volumes).map_err(io_at(&volumes))? {
        let item = item.map_err(io_at(&volumes))?.path();
        let hidden = item.file_name().unwrap_or_default().as_bytes();
        let is_gone = hidden.starts_with(GONE_PREFIX.as_bytes());
        if is_gone && name_of_hidden(&item).as_ref() == Some(name) {
            rest.push(item);
        }
    }
    Ok(rest)
}

/// What a deletion of a volume gives up in its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenUp {
    /// A clone, which its parent is told of.
    Clone,
    /// Objects that are to be removed.
    Objects,
}

impl GivenUp {
    /// Name of the empty file in a volume's directory that says so.
    const fn file(self) -> &'static str {
        match self {
            Self::Clone => "given-up-clone",
            Self::Objects => "given-up-objects",
        }
    }
}

/// Note durably, before it is so, that a deletion gives up what a volume has in its backend. Blocks.
pub fn give_up(layout: &Layout, name: &VolumeName, what: GivenUp) -> Result<(), CatalogueError> {
    let path = directory(layout, name).join(what.file());
    sealed::replace(&path, b"").map_err(io_at(&path))
}

/// What a deletion on this node has given up, or was about to. Blocks.
pub fn given_up(layout: &Layout, name: &VolumeName) -> Option<GivenUp> {
    let directory = directory(layout, name);
    [GivenUp::Clone, GivenUp::Objects]
        .into_iter()
        .find(|what| directory.join(what.file()).exists())
}

/// It turned out that nothing was given up. Blocks.
pub fn keep_after_all(layout: &Layout, name: &VolumeName) -> Result<(), CatalogueError> {
    let directory = directory(layout, name);
    for what in [GivenUp::Clone, GivenUp::Objects] {
        match fs::remove_file(directory.join(what.file())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed
                .and_then(|()| sync_directory(&directory))
                .map_err(io_at(&directory))?,
        }
    }
    Ok(())
}

/// Whether the removal of a volume has begun and did not end: [`remove`] ends it. Blocks.
pub fn is_half_removed(layout: &Layout, name: &VolumeName) -> bool {
    rest_of(layout, name).is_ok_and(|rest| !rest.is_empty())
}

/// Remove a volume; its backing file is moved to `keep` if that is given. The volume is gone, and
/// its kept data in place, when this returns. Of one whose removal did not end the rest is removed.
pub fn remove(
    layout: &Layout,
    name: &VolumeName,
    keep: Option<&Path>,
) -> Result<(), CatalogueError> {
    let rest = rest_of(layout, name)?;
    if !rest.is_empty() {
        return rest
            .iter()
            .try_for_each(|path| remove_directory(layout, path));
    }
    let path = directory(layout, name);
    if let Some(keep) = keep {
        if let Some(parent) = keep.parent() {
            fs::create_dir_all(parent).map_err(io_at(parent))?;
        }
        // A hard link first: at no moment is the data without a name. The name must be new.
        let data = path.join(DATA_FILE);
        fs::hard_link(&data, keep).map_err(io_at(keep))?;
        link_all(&snapshots_of(&data), &snapshots_of(keep))?;
        if let Some(parent) = keep.parent() {
            sync_directory(parent).map_err(io_at(parent))?;
        }
    }
    let volumes = layout.volumes();
    let gone = volumes.join(format!("{GONE_PREFIX}{name}-{}", Uuid::new_v4()));
    fs::rename(&path, &gone).map_err(io_at(&path))?;
    sync_directory(&volumes).map_err(io_at(&volumes))?;
    remove_directory(layout, &gone)
}

/// Give all files of a directory, if there is one, a second name in a new one.
fn link_all(from: &Path, to: &Path) -> Result<(), CatalogueError> {
    let files = match fs::read_dir(from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        files => files.map_err(io_at(from))?,
    };
    fs::DirBuilder::new()
        .mode(0o700)
        .create(to)
        .map_err(io_at(to))?;
    for file in files {
        let file = file.map_err(io_at(from))?;
        let link = to.join(file.file_name());
        fs::hard_link(file.path(), &link).map_err(io_at(&link))?;
    }
    sync_directory(to).map_err(io_at(to))
}

/// Move a volume's directory, with all that is in it, out of the catalogue.
pub fn detach(layout: &Layout, name: &VolumeName, target: &Path) -> Result<(), CatalogueError> {
    let path = directory(layout, name);
    let parent = layout.detached();
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&parent)
        .map_err(io_at(&parent))?;
    fs::rename(&path, target).map_err(io_at(&path))?;
    for directory in [&parent, &layout.volumes(), layout.root()] {
        sync_directory(directory).map_err(io_at(directory))?;
    }
    Ok(())
}

/// The name of the volume whose hidden directory this is.
fn name_of_hidden(path: &Path) -> Option<VolumeName> {
    let hidden = path.file_name()?.to_str()?;
    if let Some(name) = hidden.strip_prefix(NEW_PREFIX) {
        return name.parse().ok();
    }
    let (name, uuid) = hidden.strip_prefix(GONE_PREFIX)?.split_at_checked(
        hidden
            .len()
            .checked_sub(GONE_PREFIX.len() + GONE_SUFFIX_BYTES)?,
    )?;
    uuid.strip_prefix('-')?.parse::<Uuid>().ok()?;
    name.parse().ok()
}

/// The files of a volume, as its entry names them: its log, its local store.
fn files_of(directory: &Path, entry: &Stored) -> Vec<PathBuf> {
    let files = [Some(&entry.log.path), entry.home.as_ref()];
    let files = files.into_iter().flatten();
    files.map(|file| directory.join(file)).collect()
}

/// The log and local store outside of a hidden directory that go with it.
fn files_outside(layout: &Layout, path: &Path) -> Result<Vec<PathBuf>, CatalogueError> {
    // What cannot be trusted decides nothing about files elsewhere.
    let Ok(entry) = sealed::read::<Stored>(&entry_file(path), ENTRY) else {
        return Ok(Vec::new());
    };
    let mut files = files_of(path, &entry);
    files.retain(|file| file.parent() != Some(path));
    if files.is_empty() {
        return Ok(files);
    }
    if name_of_hidden(path).as_ref() != Some(&entry.name) {
        tracing::warn!(
            "{}: it was a copy of volume {}, whose files elsewhere are left alone",
            path.display(),
            entry.name
        );
        return Ok(Vec::new());
    }
    let volumes = layout.volumes();
    for item in fs::read_dir(&volumes).map_err(io_at(&volumes))? {
        let other = item.map_err(io_at(&volumes))?.path();
        let Ok(theirs) = sealed::read::<Stored>(&entry_file(&other), ENTRY) else {
            continue;
        };
        if other == path {
            continue;
        }
        let theirs = files_of(&other, &theirs);
        files.retain(|file| {
            let is_theirs = theirs.contains(file);
            if is_theirs {
                tracing::warn!(
                    "{} is left alone, since {} names it, too",
                    file.display(),
                    other.display()
                );
            }
            !is_theirs
        });
    }
    Ok(files)
}

/// Remove a hidden directory, and the log and local store outside of it that are its volume's alone. Its wrapped key
/// goes first: whatever else a medium keeps is unreadable from then on.
fn remove_directory(layout: &Layout, path: &Path) -> Result<(), CatalogueError> {
    key::destroy(path).map_err(io_at(path))?;
    for file in files_outside(layout, path)? {
        // A block device is wiped by who opened it.
        if fs::metadata(&file).is_ok_and(|found| found.is_file()) {
            fs::remove_file(&file).map_err(io_at(&file))?;
        }
    }
    fs::remove_dir_all(path).map_err(io_at(path))
}

#[cfg(test)]
pub(crate) mod tests;
