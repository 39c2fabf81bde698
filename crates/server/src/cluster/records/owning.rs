//! Whose the records are, and that each node runs only once.
//!
//! Invariants:
//! 1. Nothing is written to a directory whose records are another cluster's.
//! 2. A node that has run with these records before starts again while their file system is full or read-only: its copies
//!    can follow who serves. What it could not write it says in its log.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use hdcs_core::replication::Member;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{CLUSTER_FILE, RecordStore, StoreError, file_at, io_at, names_in, remove_any};
use crate::data_dir::sealed::{self, Kind, sync_directory};
use crate::data_dir::try_lock;

const CLUSTER: Kind = Kind {
    magic: "hdcs-cluster",
    version: 1,
};
/// How long another one is waited for that runs as this node, and how often it is tried meanwhile.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// What it says of itself at most.
const HOLDER_BYTES_MAX: u64 = 256;

/// Whose the directory is.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterFile {
    id: Uuid,
}

/// Whether a write failed since the file system takes none at present.
fn takes_no_writes(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    [QuotaExceeded, ReadOnlyFilesystem, StorageFull].contains(&error.kind())
}

/// Open a file to write it, or else, if its file system takes no writes, to lock it; and why it is not to be written then.
fn open_or_make(path: &Path) -> io::Result<(File, Option<io::Error>)> {
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    match options.mode(0o600).open(path) {
        Err(error) if takes_no_writes(&error) => match File::open(path) {
            Ok(file) => Ok((file, Some(error))),
            // This node has not run before with these records.
            Err(_) => Err(error),
        },
        opened => Ok((opened?, None)),
    }
}

/// Why a file was not locked that was opened to be written, or only to be read.
pub(super) fn not_locked(path: &Path, source: io::Error, is_writable: bool) -> StoreError {
    // NFS locks bytes for it, which only who may write them can.
    if !is_writable && source.raw_os_error() == Some(libc::EBADF) {
        let path = path.to_owned();
        return StoreError::NoLock { path, source };
    }
    io_at(path)(source)
}

impl RecordStore {
    /// The same of a directory that has to be there. What a crash of this node left is removed, so it must be running only
    /// once ([`Self::be_the_only_one`]), and not have begun to write.
    pub fn open(root: &Path, node: Member) -> Result<Self, StoreError> {
        let unusable = |source| StoreError::Directory {
            path: root.to_owned(),
            source,
        };
        if !fs::metadata(root).map_err(unusable)?.is_dir() {
            return Err(unusable(io::ErrorKind::NotADirectory.into()));
        }
        let this = Self::new(root, node);
        let temporary = this.temporary();
        let mut builder = fs::DirBuilder::new();
        match builder.mode(0o700).create(&temporary) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists || temporary.is_dir() => {}
            made => made.map_err(unusable)?,
        }
        let own = format!("{}-", node.0);
        for name in names_in(&temporary)? {
            if name.starts_with(&own) {
                let path = temporary.join(name);
                match remove_any(&path) {
                    // It goes when the store is opened the next time.
                    Err(error) if takes_no_writes(&error) => {}
                    removed => removed.map_err(io_at(&path))?,
                }
            }
        }
        Ok(this)
    }

    /// Be the only one that runs as this node for as long as what is returned is held. `who` is what others are told.
    ///
    /// # Errors
    /// [`StoreError::Twice`] if another one does, [`StoreError::NoLock`] if nobody can tell.
    pub fn be_the_only_one(&self, who: &str) -> Result<File, StoreError> {
        let path = self.root.join(format!("running-{}", self.node.0));
        let opened = open_or_make(&path).map_err(|source| StoreError::Directory {
            path: self.root.clone(),
            source,
        });
        let (mut file, unwritten) = opened?;
        let began = Instant::now();
        loop {
            match try_lock(&file, libc::LOCK_EX) {
                Ok(()) => break,
                // What a killed program had under way may keep it for a moment.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if began.elapsed() > LOCK_PATIENCE {
                        let mut holder = String::new();
                        let read = (&file).take(HOLDER_BYTES_MAX).read_to_string(&mut holder);
                        return Err(StoreError::Twice {
                            path,
                            node: self.node.0,
                            holder: match read {
                                Ok(_) if !holder.trim().is_empty() => holder.trim().to_owned(),
                                _ => "it does not say where".to_owned(),
                            },
                        });
                    }
                    std::thread::sleep(LOCK_PAUSE);
                }
                Err(error) => return Err(not_locked(&path, error, unwritten.is_none())),
            }
        }
        let told = match unwritten {
            Some(error) => Err(error),
            None => (file.set_len(0)).and_then(|()| file.write_all(who.as_bytes())),
        };
        if let Err(error) = told {
            // Others are told less; the lock is what counts.
            tracing::warn!(
                "records of groups: {}: {error}: nobody leaves a group, joins one or takes one over until they can be \
                 written again",
                self.root.display()
            );
        }
        Ok(file)
    }

    /// Whether the directory is that of this cluster; else it is no cluster's yet.
    ///
    /// # Errors
    /// [`StoreError::Content`] if it is another one's: its nodes would take one another's groups.
    pub fn is_of(&self, cluster: Uuid) -> Result<bool, StoreError> {
        let path = self.root.join(CLUSTER_FILE);
        let found: ClusterFile = match sealed::read(&path, CLUSTER) {
            Err(error) if error.is_absent() => return Ok(false),
            found => found.map_err(file_at(&path))?,
        };
        if found.id == cluster {
            return Ok(true);
        }
        Err(StoreError::Content {
            path,
            why: format!(
                "the records are those of cluster {}, and this node's is {cluster}: give it the `id` or the `records` of its \
                 own cluster",
                found.id
            ),
        })
    }

    /// Have the directory be that of this cluster, if it is no cluster's yet.
    ///
    /// # Errors
    /// Like [`Self::is_of`].
    pub fn claim(&self, cluster: Uuid) -> Result<(), StoreError> {
        if self.is_of(cluster)? {
            return Ok(());
        }
        let path = self.root.join(CLUSTER_FILE);
        let text = sealed::encode(CLUSTER, &ClusterFile { id: cluster }).map_err(file_at(&path))?;
        if self.link_new(&path, &text)? {
            return sync_directory(&self.root).map_err(io_at(&self.root));
        }
        // Another node was first.
        self.is_of(cluster).map(drop)
    }
}
