//! The records of groups in a directory that all nodes see, with compare-and-swap.
//!
//! ```text
//!   DIR/UUID/spec-N.json       what the volume is, in revision N; written once, by whoever is first
//!   DIR/UUID/record-N.json     the record of revision N; written once, by whoever is first
//!   DIR/UUID/copy-NODE         this node has a copy, or is about to make one, whether a record names it or not
//!   DIR/UUID/removed.json      the group is no more: these nodes let go of their copies
//!   DIR/UUID/gone-NODE         this one has
//!   DIR/tmp/NODE-…             what a node is about to give one of these names
//!   DIR/running-NODE           locked by the process that runs as this node
//! ```
//!
//! A record is written whole and synced under a name of its own in `tmp`, and then linked to `record-N.json`. Of several
//! nodes that link, one makes the name and the others find it there. The same with what the volume is. The files are
//! those of [`sealed`].
//!
//! That a group is removed is written, and never taken from a directory's absence: one that is not mounted would have
//! nodes delete their copies. The last of the nodes that let go removes the directory: those of the last record, and those
//! that were taken out of the group while they were away, and do not know that yet.
//!
//! Invariants:
//! 1. The file of a record never changes. So a revision has one content for ever.
//! 2. Revision N + 1 is only written by who has read revision N, and only if [`GroupRecord::check_next`] lets it follow.
//! 3. The newest record and [`KEPT`] before it stay. Older ones go in order, so that who links to a name that was removed
//!    finds that the record before it is gone, or far behind the newest, and has lost.
//! 4. A record that is damaged is an error, and never passed over: an older one would undo a takeover.
//!
//! Failure: an error of a write leaves it unknown whether the record is there, until the records are read again. A crash
//! leaves files in `tmp`, which the node removes when it opens the store the next time.
//!
//! Every call waits for the directory's file system. Over NFS, reading may show the past for as long as the client caches
//! names; writing never does, since it is the server that makes the link.

mod owning;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hdcs_api::groups::{Ack, WhenShort as ShortWord};
use hdcs_core::replication::record::{
    Config, GroupRecord, Members, Nodes, Phase, RecordError, Seat,
};
use hdcs_core::replication::{Member, Point};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::spec::VolumeSpecFile;
use super::{ack_level, ack_word, short_word, when_short};
use crate::data_dir::sealed::{self, Kind, SealedError, sync_directory};

const RECORD: Kind = Kind {
    magic: "hdcs-group",
    version: 2,
};
const SPEC: Kind = Kind {
    magic: "hdcs-group-volume",
    version: 2,
};
const CLUSTER_FILE: &str = "cluster.json";
const REMOVED: Kind = Kind {
    magic: "hdcs-group-removed",
    version: 1,
};
const REMOVED_FILE: &str = "removed.json";
const COPY: &str = "copy-";
const GONE: &str = "gone-";
const RECORDS: &str = "record-";
const SPECS: &str = "spec-";
const TEMPORARY: &str = "tmp";
/// Records before the newest that stay: who is about to write one may be late by so many.
const KEPT: u64 = 8;
/// A node that has not let go of its copy of a removed group for so long may be gone for good.
const LATE_MIN: Duration = Duration::from_mins(10);
/// Names in one directory at most: one for each group, or a few for the records of one.
const NAMES_MAX: usize = 8192;
/// Members and joiners of a record at most: more are no record of a volume's log.
const NODES_MAX: usize = 64;
/// Revisions and epochs at most.
const NUMBER_MAX: u64 = u64::MAX / 2;
/// How often a record is looked for that is removed at the same moment since newer ones are there.
const READS_MAX: usize = 16;

/// Why the store could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The directory is not there, or is no directory that this node can use.
    #[error(
        "records of groups: {path}: {source}: make the directory, let the daemon's user write there, and have all nodes \
         see the same one (`records` of [cluster])", path = path.display()
    )]
    Directory {
        /// Which.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
    /// The directory is not what it was: it is not mounted, or its files were taken away.
    #[error(
        "records of groups: {path}: {source}: mount it again, or put back what was there (`records` of [cluster]); until \
         then no node leaves a group, joins one or takes one over, and writes wait for members that do not answer",
        path = path.display()
    )]
    Away {
        /// What is not to be seen.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Nobody can tell whether this node is there twice.
    #[error(
        "records of groups: {path}: it cannot be locked on a read-only NFS mount ({source}), and so this node may be running \
         already: mount it for writing, then start the node",
        path = path.display()
    )]
    NoLock {
        /// What cannot be locked.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// This node is there twice.
    #[error(
        "records of groups: {path}: node {node} runs already: {holder}: stop that one, or give this one a `number` and an \
         `id` of its own in the files of all nodes (a data directory or a machine that was copied has those of the first \
         one)",
        path = path.display()
    )]
    Twice {
        /// What the other one holds.
        path: PathBuf,
        /// The number of both.
        node: u16,
        /// What that one says of itself.
        holder: String,
    },
    /// A file could not be read, written or given its name.
    #[error("records of groups: {path}: {source}", path = path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
    /// A file is there and is not what this program writes.
    #[error(
        "records of groups: {path}: {source}: nobody takes or serves this volume until the file is restored",
        path = path.display()
    )]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        source: SealedError,
    },
    /// What a file says is no record, or no volume.
    #[error(
        "records of groups: {path}: {why}: nobody takes or serves this volume until the file is restored",
        path = path.display()
    )]
    Content {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// There are more than are ever looked at.
    #[error("records of groups: {path}: more than {NAMES_MAX} names: no directory of records", path = path.display())]
    TooMany {
        /// Where.
        path: PathBuf,
    },
    /// A volume has a group already.
    #[error("records of groups: {path}: this volume has a group already", path = path.display())]
    Exists {
        /// Its directory.
        path: PathBuf,
    },
}

/// What a volume is, and its newest record.
pub type Found = Result<(VolumeSpecFile, GroupRecord), StoreError>;

/// How a proposal ended.
#[derive(Debug)]
pub enum Proposed {
    /// The record is durable, and is the newest.
    Written,
    /// Another one is: this.
    Lost(Box<GroupRecord>),
    /// It may not follow the newest one; nothing was written.
    Refused(RecordError),
    /// Whether it was written is not known: the records have to be read until there is another one.
    Unknown(StoreError),
}

/// What was read of all groups.
#[derive(Debug, Default)]
pub struct Listing {
    /// Those that are there. What is wrong with one of them leaves the others be.
    pub groups: BTreeMap<Uuid, Found>,
    /// Those that were removed, and of whose copies not all are gone.
    pub removed: BTreeMap<Uuid, Removed>,
}

/// How removing a group ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// It is removed, or was.
    Done,
    /// There is no such group.
    NoGroup,
    /// It is this node's by now, and stays.
    Another(Member),
}

/// A group that was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Removed {
    /// The nodes that may have copies.
    nodes: Vec<u16>,
    /// The node that has detached the volume, and keeps its log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keeper: Option<u16>,
}

impl Removed {
    /// Whether a node keeps its log.
    pub fn is_kept_by(&self, node: Member) -> bool {
        self.keeper == Some(node.0)
    }
}

/// The records in a directory.
#[derive(Clone, Debug)]
pub struct RecordStore {
    root: PathBuf,
    node: Member,
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> StoreError + '_ {
    move |source| StoreError::Io {
        path: path.to_owned(),
        source,
    }
}

fn file_at(path: &Path) -> impl FnOnce(SealedError) -> StoreError + '_ {
    move |source| StoreError::File {
        path: path.to_owned(),
        source,
    }
}

fn absent(path: &Path) -> StoreError {
    io_at(path)(io::ErrorKind::NotFound.into())
}

/// Which record a file is, or which spec, by its name.
fn revision_of(name: &str, kind: &str) -> Option<u64> {
    let digits = name.strip_prefix(kind)?.strip_suffix(".json")?;
    let revision = digits.parse().ok()?;
    // No second name for the same one.
    (name_of(kind, revision) == name).then_some(revision)
}

fn name_of(kind: &str, revision: u64) -> String {
    format!("{kind}{revision}.json")
}

fn record_name(revision: u64) -> String {
    name_of(RECORDS, revision)
}

impl RecordStore {
    /// The store in a directory, for the node of this number.
    pub fn new(root: &Path, node: Member) -> Self {
        Self {
            root: root.to_owned(),
            node,
        }
    }

    /// Where the records are.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether the records are to be seen: they are some cluster's. An empty directory is one that is not mounted.
    pub fn is_there(&self) -> Result<(), StoreError> {
        let path = self.root.join(CLUSTER_FILE);
        let seen = fs::metadata(&path).and_then(|_| fs::read_dir(&self.root));
        seen.map(drop)
            .map_err(|source| StoreError::Away { path, source })
    }

    /// Every volume that has a group.
    pub fn list(&self) -> Result<Vec<Uuid>, StoreError> {
        let names = names_in(&self.root)?;
        let mut volumes: Vec<_> = (names.iter())
            .filter_map(|name| {
                let uuid = Uuid::parse_str(name).ok()?;
                (uuid.hyphenated().to_string() == *name).then_some(uuid)
            })
            .collect();
        volumes.sort_unstable();
        Ok(volumes)
    }

    /// All groups, each with what its volume is and its newest record, and those that were removed.
    pub fn all(&self) -> Result<Listing, StoreError> {
        let mut all = Listing::default();
        for volume in self.list()? {
            match self.removed(volume) {
                Ok(None) => {}
                Ok(Some(removed)) => {
                    all.removed.insert(volume, removed);
                    continue;
                }
                Err(error) => {
                    all.groups.insert(volume, Err(error));
                    continue;
                }
            }
            let spec = self.spec(volume);
            let found = spec.and_then(|spec| Ok((spec, self.read(volume)?)));
            match found {
                Ok((Some(spec), Some(record))) => all.groups.insert(volume, Ok((spec, record))),
                Err(error) => all.groups.insert(volume, Err(error)),
                // It is being removed, or nobody's.
                Ok(_) => None,
            };
        }
        Ok(all)
    }

    /// Those that are there.
    pub fn groups(&self) -> Result<BTreeMap<Uuid, Found>, StoreError> {
        Ok(self.all()?.groups)
    }

    /// What a volume is, if it has a group.
    pub fn spec(&self, volume: Uuid) -> Result<Option<VolumeSpecFile>, StoreError> {
        self.read_newest(volume, SPECS, |revision, path| {
            let spec: VolumeSpecFile = sealed::read(path, SPEC)?;
            Ok(spec.check().and_then(|()| {
                if (spec.uuid, spec.revision) == (volume, revision) {
                    return Ok(spec);
                }
                let (uuid, revision) = (spec.uuid, spec.revision);
                Err(format!("it is of volume {uuid}, revision {revision}"))
            }))
        })
    }

    /// The newest record of a volume, if it has a group.
    pub fn read(&self, volume: Uuid) -> Result<Option<GroupRecord>, StoreError> {
        self.read_newest(volume, RECORDS, |revision, path| {
            Ok(sealed::read::<RecordFile>(path, RECORD)?.into_record(revision))
        })
    }

    /// The newest file of a kind.
    fn read_newest<T>(
        &self,
        volume: Uuid,
        kind: &str,
        read_file: impl Fn(u64, &Path) -> Result<Result<T, String>, SealedError>,
    ) -> Result<Option<T>, StoreError> {
        let mut read = Ok(None);
        for _ in 0..READS_MAX {
            let Some(newest) = self.newest(volume, kind)? else {
                return Ok(None);
            };
            let path = self.directory(volume).join(name_of(kind, newest));
            read = match read_file(newest, &path) {
                // Newer ones have pushed it out since.
                Err(error) if error.is_absent() => Err(file_at(&path)(error)),
                Err(error) => return Err(file_at(&path)(error)),
                Ok(content) => {
                    return content
                        .map(Some)
                        .map_err(|why| StoreError::Content { path, why });
                }
            };
        }
        read
    }

    /// Have `next` follow what the volume was, if that is what `next` was made of; whether it does.
    pub fn change(&self, next: &VolumeSpecFile) -> Result<bool, StoreError> {
        let volume = next.uuid;
        let path = self.directory(volume).join(name_of(SPECS, next.revision));
        if self.removed(volume)?.is_some() {
            return Err(absent(&path));
        }
        let last = self.spec(volume)?.ok_or_else(|| absent(&path))?;
        if last == *next {
            // It was written before, and nobody could say so.
            sync_directory(&self.directory(volume)).map_err(io_at(&path))?;
            return Ok(true);
        }
        if last.revision + 1 != next.revision {
            return Ok(false);
        }
        let text = sealed::encode(SPEC, next).map_err(file_at(&path))?;
        let is_first = self.link_new(&path, &text)?;
        let newest = (self.newest(volume, SPECS)?).ok_or_else(|| absent(&path))?;
        if !is_first || !self.is_kept(volume, SPECS, last.revision, newest)? {
            return Ok(false);
        }
        sync_directory(&self.directory(volume)).map_err(io_at(&path))?;
        self.remove_old(volume, SPECS, next.revision);
        Ok(true)
    }

    /// What was written of a group's removal.
    pub fn removed(&self, volume: Uuid) -> Result<Option<Removed>, StoreError> {
        let path = self.directory(volume).join(REMOVED_FILE);
        match sealed::read(&path, REMOVED) {
            Err(error) if error.is_absent() => {}
            found => return found.map(Some).map_err(file_at(&path)),
        }
        // Who removed it may have ended before that was written.
        let Some(newest) = self.newest(volume, RECORDS)? else {
            return Ok(None);
        };
        Ok(sealed::read(&self.record_path(volume, newest), REMOVED).ok())
    }

    /// Make the group of a new volume: `first` is of revision 1. All of it is there afterwards, or nothing.
    pub fn create(&self, spec: &VolumeSpecFile, first: &GroupRecord) -> Result<(), StoreError> {
        let target = self.directory(spec.uuid);
        let made = self.temporary_name();
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700).create(&made).map_err(io_at(&made))?;
        let filled = fill(&made, spec, first).and_then(|()| {
            // A directory takes the place of an empty one, and of no other.
            fs::rename(&made, &target).map_err(|source| match source.raw_os_error() {
                Some(libc::ENOTEMPTY | libc::EEXIST) => StoreError::Exists {
                    path: target.clone(),
                },
                _ => io_at(&target)(source),
            })
        });
        if filled.is_err() {
            // What cannot be removed now goes when the store is opened the next time.
            let _ = fs::remove_dir_all(&made);
        }
        filled?;
        sync_directory(&self.root).map_err(io_at(&self.root))
    }

    /// Whether a removal can be tried: what it reads can be read, and the directory takes new files. Nothing is changed.
    pub fn may_remove(&self, volume: Uuid) -> Result<(), StoreError> {
        if self.removed(volume)?.is_some() || self.read(volume)?.is_none() {
            return Ok(());
        }
        let temporary = self.temporary_name();
        let written = write_new(&temporary, b"tried").map_err(io_at(&temporary));
        // What cannot be removed now goes when the store is opened the next time.
        let _ = fs::remove_file(&temporary);
        written
    }

    /// Remove the group of a volume that is deleted, or detached by a node that keeps its log. Only the node that the record
    /// names may, and what it writes takes the place of the next record: either the group is removed, or another node
    /// takes it. All nodes of the last record, and those that have copies still, are to let go of them, and to say so:
    /// [`Self::gone`]. Whoever proposes something afterwards finds nothing.
    ///
    /// # Errors
    /// The removal may count all the same.
    pub fn remove(&self, volume: Uuid, keeper: Option<Member>) -> Result<Removal, StoreError> {
        let directory = self.directory(volume);
        let path = directory.join(REMOVED_FILE);
        let mut has_written = false;
        loop {
            if let Some(removed) = self.removed(volume)? {
                let text = sealed::encode(REMOVED, &removed).map_err(file_at(&path))?;
                self.link_new(&path, &text)?;
                sync_directory(&directory).map_err(io_at(&directory))?;
                return Ok(Removal::Done);
            }
            let Some(record) = self.read(volume)? else {
                if has_written {
                    return Err(absent(&directory));
                }
                return Ok(Removal::NoGroup);
            };
            let (Phase::Taking { candidate: named } | Phase::Serving { primary: named }) =
                record.phase;
            if named != self.node {
                return Ok(Removal::Another(named));
            }
            let members = record.config.members.iter();
            let nodes = members.chain(record.joiners.iter().copied());
            let named = nodes.map(|node| node.0);
            let nodes: BTreeSet<u16> = named.chain(self.copies(volume)?).collect();
            let removed = Removed {
                nodes: nodes.into_iter().collect(),
                keeper: keeper.map(|keeper| keeper.0),
            };
            let text = sealed::encode(REMOVED, &removed).map_err(file_at(&path))?;
            // Whoever was first with that revision is seen in the next round.
            self.link_new(&self.record_path(volume, record.revision + 1), &text)?;
            has_written = true;
        }
    }

    /// This node has a copy of a group's log from now on, until [`Self::forgot_copy`]: if the group is removed meanwhile,
    /// that is kept until the node knows it.
    pub fn has_copy(&self, volume: Uuid) -> Result<(), StoreError> {
        let directory = self.directory(volume);
        let own = directory.join(format!("{COPY}{}", self.node.0));
        if own.exists() {
            return Ok(());
        }
        self.link_new(&own, b"")?;
        sync_directory(&directory).map_err(io_at(&own))
    }

    /// It has none any more, since it was taken out of the group.
    pub fn forgot_copy(&self, volume: Uuid) -> Result<(), StoreError> {
        let own = self
            .directory(volume)
            .join(format!("{COPY}{}", self.node.0));
        match fs::remove_file(&own) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(io_at(&own)),
        }
    }

    /// Nodes that have copies of a group's log, or had.
    fn copies(&self, volume: Uuid) -> Result<impl Iterator<Item = u16> + use<>, StoreError> {
        let names = names_in(&self.directory(volume))?.into_iter();
        Ok(names.filter_map(|name| name.strip_prefix(COPY)?.parse().ok()))
    }

    /// This node has let go of its copy of a group that was removed. The last one removes what is left of the group. Returns
    /// the nodes that have not done so for [`LATE_MIN`].
    pub fn gone(&self, volume: Uuid) -> Result<Vec<Member>, StoreError> {
        let Some(removed) = self.removed(volume)? else {
            return Ok(Vec::new());
        };
        let directory = self.directory(volume);
        let own = self.gone_mark(volume, self.node);
        if removed.nodes.contains(&self.node.0) && !own.exists() {
            self.link_new(&own, b"")?;
            sync_directory(&directory).map_err(io_at(&own))?;
        }
        let nodes = removed.nodes.iter().copied().map(Member);
        let has_copy = |node: &Member| !self.gone_mark(volume, *node).exists();
        let waits: Vec<_> = nodes.filter(has_copy).collect();
        if waits.is_empty() {
            self.sweep(volume)?;
        }
        let written = fs::metadata(directory.join(REMOVED_FILE)).and_then(|file| file.modified());
        let is_late =
            (written.ok().and_then(|at| at.elapsed().ok())).is_some_and(|age| age > LATE_MIN);
        Ok(if is_late { waits } else { Vec::new() })
    }

    /// The file that says that a node has no copy any more of a group that was removed.
    pub fn gone_mark(&self, volume: Uuid, node: Member) -> PathBuf {
        self.directory(volume).join(format!("{GONE}{}", node.0))
    }

    fn sweep(&self, volume: Uuid) -> Result<(), StoreError> {
        let (path, gone) = (self.directory(volume), self.temporary_name());
        match fs::rename(&path, &gone) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed.map_err(io_at(&path))?,
        }
        sync_directory(&self.root).map_err(io_at(&self.root))?;
        fs::remove_dir_all(&gone).map_err(io_at(&gone))
    }

    /// Have `next` follow the newest record, if it is that which `next` was made of.
    pub fn propose(&self, volume: Uuid, next: &GroupRecord) -> Proposed {
        match self.try_propose(volume, next) {
            Ok(proposed) => proposed,
            Err(error) => Proposed::Unknown(error),
        }
    }

    fn try_propose(&self, volume: Uuid, next: &GroupRecord) -> Result<Proposed, StoreError> {
        let path = self.record_path(volume, next.revision);
        if self.removed(volume)?.is_some() {
            return Err(absent(&path));
        }
        let last = self.read(volume)?.ok_or_else(|| absent(&path))?;
        if last == *next {
            // It was written before, and nobody could say so.
            sync_directory(&self.directory(volume)).map_err(io_at(&path))?;
            return Ok(Proposed::Written);
        }
        if last.revision >= next.revision {
            return Ok(Proposed::Lost(Box::new(last)));
        }
        if let Err(error) = last.check_next(next) {
            return Ok(Proposed::Refused(error));
        }
        self.link_after(volume, last.revision, next, &path)
    }

    /// Give a record its name, made of that of revision `last`.
    fn link_after(
        &self,
        volume: Uuid,
        last: u64,
        next: &GroupRecord,
        path: &Path,
    ) -> Result<Proposed, StoreError> {
        let is_first = self.link_new(path, &encode(next).map_err(file_at(path))?)?;
        let newest = (self.newest(volume, RECORDS)?).ok_or_else(|| absent(path))?;
        if is_first && self.is_kept(volume, RECORDS, last, newest)? {
            sync_directory(&self.directory(volume)).map_err(io_at(path))?;
            self.remove_old(volume, RECORDS, next.revision);
            return Ok(Proposed::Written);
        }
        let newest = self.read(volume)?.ok_or_else(|| absent(path))?;
        Ok(Proposed::Lost(Box::new(newest)))
    }

    /// Whether a file of a kind was never removed until now. Who found a name free after it may have been slower than all the
    /// records that came since and the removal of the one that had the name; what it has linked goes with the next
    /// removal, and counts for nobody until then.
    fn is_kept(
        &self,
        volume: Uuid,
        kind: &str,
        revision: u64,
        newest: u64,
    ) -> Result<bool, StoreError> {
        let path = self.directory(volume).join(name_of(kind, revision));
        match fs::symlink_metadata(&path) {
            Ok(_) => Ok(newest <= revision.saturating_add(KEPT)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_at(&path)(error)),
        }
    }

    /// Give durable bytes a name; whether nothing had it.
    fn link_new(&self, path: &Path, text: &[u8]) -> Result<bool, StoreError> {
        let temporary = self.temporary_name();
        let linked = write_new(&temporary, text)
            .map_err(io_at(&temporary))
            .and_then(|()| match fs::hard_link(&temporary, path) {
                Ok(()) => Ok(true),
                // The answer of a server may be lost, and the same be asked for again, although it was done.
                Err(_) if fs::metadata(&temporary).is_ok_and(|found| found.nlink() == 2) => {
                    Ok(true)
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(error) => Err(io_at(path)(error)),
            });
        // What cannot be removed now goes when the store is opened the next time.
        let _ = fs::remove_file(&temporary);
        linked
    }

    /// Remove what nobody needs any more, the oldest first. What stays is removed after the next record.
    fn remove_old(&self, volume: Uuid, kind: &str, newest: u64) {
        let directory = self.directory(volume);
        let Ok(names) = names_in(&directory) else {
            return;
        };
        let mut old: Vec<_> = (names.iter())
            .filter_map(|name| revision_of(name, kind))
            .filter(|revision| revision.saturating_add(KEPT) < newest)
            .collect();
        old.sort_unstable();
        for revision in old {
            let path = directory.join(name_of(kind, revision));
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return,
                _ => {}
            }
        }
    }

    /// The highest revision that a volume has a file of this kind of.
    fn newest(&self, volume: Uuid, kind: &str) -> Result<Option<u64>, StoreError> {
        let directory = self.directory(volume);
        let names = match names_in(&directory) {
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            names => names?,
        };
        let listed = names
            .iter()
            .filter_map(|name| revision_of(name, kind))
            .max();
        let Some(mut newest) = listed else {
            return Ok(None);
        };
        // A list may be older than the names.
        while let Some(next) = newest.checked_add(1)
            && fs::symlink_metadata(directory.join(name_of(kind, next))).is_ok()
        {
            newest = next;
        }
        Ok(Some(newest))
    }

    fn directory(&self, volume: Uuid) -> PathBuf {
        self.root.join(volume.hyphenated().to_string())
    }

    fn record_path(&self, volume: Uuid, revision: u64) -> PathBuf {
        self.directory(volume).join(record_name(revision))
    }

    fn temporary(&self) -> PathBuf {
        self.root.join(TEMPORARY)
    }

    /// A name that nobody else has.
    fn temporary_name(&self) -> PathBuf {
        let name = format!("{}-{}", self.node.0, Uuid::new_v4());
        self.temporary().join(name)
    }
}

/// Write the files of a new group into its directory, durably.
fn fill(made: &Path, spec: &VolumeSpecFile, first: &GroupRecord) -> Result<(), StoreError> {
    let files = [
        (name_of(SPECS, spec.revision), sealed::encode(SPEC, spec)),
        (record_name(first.revision), encode(first)),
    ];
    for (name, text) in files {
        let path = made.join(name);
        let text = text.map_err(file_at(&path))?;
        write_new(&path, &text).map_err(io_at(&path))?;
    }
    sync_directory(made).map_err(io_at(made))
}

/// The names in a directory, as far as they are text.
fn names_in(path: &Path) -> Result<Vec<String>, StoreError> {
    let mut names = Vec::new();
    for item in fs::read_dir(path).map_err(io_at(path))? {
        if names.len() == NAMES_MAX {
            return Err(StoreError::TooMany {
                path: path.to_owned(),
            });
        }
        let name = item.map_err(io_at(path))?.file_name();
        names.extend(name.into_string());
    }
    Ok(names)
}

fn remove_any(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

/// Make a file that is not there yet, durable but for its name.
fn write_new(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text)?;
    file.sync_all()
}

fn encode(record: &GroupRecord) -> Result<Vec<u8>, SealedError> {
    sealed::encode(RECORD, &RecordFile::of(record))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum PhaseFile {
    Taking { candidate: u16 },
    Serving { primary: u16 },
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SeatFile {
    node: u16,
    joined: u64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PointFile {
    position: u64,
    chain: u64,
}

/// A [`GroupRecord`] as its file has it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordFile {
    revision: u64,
    epoch: u64,
    phase: PhaseFile,
    members: Vec<SeatFile>,
    replicas: u8,
    ack: Ack,
    copies_min: u8,
    when_short: ShortWord,
    joiners: Vec<u16>,
    floor: PointFile,
}

impl RecordFile {
    fn of(record: &GroupRecord) -> Self {
        let config = &record.config;
        let seats = config.members.iter().map(|member| SeatFile {
            node: member.0,
            joined: config.members.joined(member).unwrap_or_default(),
        });
        Self {
            revision: record.revision,
            epoch: record.epoch,
            phase: match record.phase {
                Phase::Taking { candidate } => PhaseFile::Taking {
                    candidate: candidate.0,
                },
                Phase::Serving { primary } => PhaseFile::Serving { primary: primary.0 },
            },
            members: seats.collect(),
            replicas: config.replicas,
            ack: ack_word(config.ack),
            copies_min: config.copies_min,
            when_short: short_word(config.when_short),
            joiners: record.joiners.iter().map(|joiner| joiner.0).collect(),
            floor: PointFile {
                position: record.floor.position,
                chain: record.floor.chain,
            },
        }
    }

    /// The record, whose file has the name of this revision.
    fn into_record(self, revision: u64) -> Result<GroupRecord, String> {
        if self.revision != revision {
            return Err(format!("it is of revision {}", self.revision));
        }
        if self.epoch == 0 || self.replicas == 0 || self.members.is_empty() {
            return Err("it has no epoch, no members or no replicas".to_owned());
        }
        // Each is followed by one more.
        if self.revision.max(self.epoch) > NUMBER_MAX {
            return Err(format!(
                "a revision or an epoch above {NUMBER_MAX} was never reached"
            ));
        }
        if !(1..=self.replicas).contains(&self.copies_min) {
            return Err(format!(
                "copies_min is {}, of {} replicas",
                self.copies_min, self.replicas
            ));
        }
        if self.members.len() + self.joiners.len() > NODES_MAX {
            return Err(format!("it names more than {NODES_MAX} nodes"));
        }
        let seats = self.members.iter().map(|seat| Seat {
            member: Member(seat.node),
            joined: seat.joined,
        });
        let members: Members = seats.collect();
        let joiners: Nodes = self.joiners.iter().copied().map(Member).collect();
        let is_twice = members.count() != self.members.len() || joiners.len() != self.joiners.len();
        if is_twice || joiners.iter().any(|joiner| members.contains(*joiner)) {
            return Err("it names a node twice".to_owned());
        }
        let phase = match self.phase {
            PhaseFile::Taking { candidate } => Phase::Taking {
                candidate: Member(candidate),
            },
            PhaseFile::Serving { primary } => Phase::Serving {
                primary: Member(primary),
            },
        };
        let (Phase::Taking { candidate: lead } | Phase::Serving { primary: lead }) = phase;
        if !members.contains(lead) {
            return Err(format!("{lead} leads it and is no member"));
        }
        Ok(GroupRecord {
            revision,
            epoch: self.epoch,
            phase,
            config: Config {
                members,
                replicas: self.replicas,
                ack: ack_level(self.ack),
                copies_min: self.copies_min,
                when_short: when_short(self.when_short),
            },
            joiners,
            floor: Point {
                position: self.floor.position,
                chain: self.floor.chain,
            },
        })
    }
}

#[cfg(test)]
mod tests;
