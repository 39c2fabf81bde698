//! The data directory of a node: who owns it, whose it is, and where things are in it.
//!
//! ```text
//! DIR/lock             flock of the daemon; holds its process id
//! DIR/node.json        identity and counters of the node
//! DIR/volumes/NAME/    one directory per volume: volume.json, key.json, dirty.json, heat.map, log, data, superblock
//! DIR/volumes/.new-*   a volume that is being created; removed at the next start
//! DIR/volumes/.gone-*  a volume that is being deleted; removed at the next start
//! DIR/kept/            backing files that `volume delete --keep-data` kept
//! DIR/detached/        directories of volumes that `volume detach` let go
//! DIR/cache            the SSD tier of the read cache
//! DIR/events.jsonl     what was done and refused, and by whom; DIR/events.1.jsonl: before that
//! DIR/events-clients.jsonl  the same of clients, so that they cannot wash out the others
//! DIR/control.sock     the control API; DIR/nbd.sock: NBD
//! ```
//!
//! Invariants:
//! 1. Whoever changes anything below DIR holds the lock.
//! 2. A volume number that was handed out is durable in `node.json` before it is used, and is
//!    never handed out again.
//! 3. At most one medium carries the cache's identity, and it has been in use at every start since:
//!    whatever else is found, or nothing, leads to a new identity before anything is served.
//! 4. A directory that is not HDCS's, is of a newer version, or is damaged is left untouched.
//! 5. Nobody but its owner, who runs the daemon, can write in it. That others can look into its root is warned about
//!    and not changed: what is in it has modes of its own, and an administrator may let a client of another user
//!    reach a socket there. Nobody has business in `volumes`, so that is narrowed.

pub mod beside;
pub mod dirty;
pub mod heat;
pub mod kept;
pub mod key;
pub mod sealed;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hdcs_core::base::limits::VOLUME_NUMBER_MAX;
use sealed::{Kind, SealedError};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

const IDENTITY: Kind = Kind {
    magic: "hdcs-node",
    version: 1,
};
/// States that volumes began as whose numbers are kept: the newest ones.
const ORIGINS_MAX: usize = 1024;
/// Names that may be in a directory without `node.json` that is taken for one of ours.
const OWN_NAMES: &[&str] = &[
    "lock",
    "volumes",
    "kept",
    "detached",
    "cache",
    "control.sock",
    "nbd.sock",
    "events.jsonl",
    "events.1.jsonl",
    "events-clients.jsonl",
    "events-clients.1.jsonl",
];

/// Why a data directory was refused.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// It could not be reached.
    #[error("cannot use the data directory: {path}: {source}: check that it exists, is writable and has space", path = path.display())]
    Io {
        /// What was being used.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
    /// A start of the node as one of a cluster could not be recorded.
    #[error("cannot start as a node of the cluster: {path}: {source}: each start is counted there first, so that the other nodes can tell it from the last one: that takes two blocks of the file system; free some space, or have it take writes, and start the daemon again", path = path.display())]
    NotCounted {
        /// The identity file.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
    /// Another daemon has it.
    #[error("another daemon{holder} is using this data directory: {path}: stop that one first, or pass another --data", path = path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
        /// ` (process 123)` if known.
        holder: String,
    },
    /// It is somebody else's.
    #[error("not an HDCS data directory and not empty (it holds `{found}`): {path}: pass an empty directory with --data", path = path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// A name in it.
        found: String,
    },
    /// Another user owns it.
    #[error("the data directory belongs to user {owner} (mode {mode:04o}), and this is user {user}: {path}: run the daemon as its owner, or give it to this user with `chown -R {user} {path}`", path = path.display())]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its permissions.
        mode: u32,
        /// Who runs this.
        user: u32,
    },
    /// Others can put things into it, or in the place of what is there.
    #[error("others than its owner, user {owner}, can write in the data directory (mode {mode:04o}), and so replace keys, logs and sockets in it: {path}: take that from them with `chmod go-w {path}`, and look whether all in it is yours", path = path.display())]
    Writable {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its permissions.
        mode: u32,
    },
    /// A newer program made it.
    #[error("the data directory: {path}: {source}; nothing was changed", path = path.display())]
    Newer {
        /// The identity file.
        path: PathBuf,
        /// What is newer.
        source: SealedError,
    },
    /// Its identity file cannot be trusted.
    #[error("the identity of the data directory cannot be read: {path}: {source}: move it away and start again (volumes are kept, the read cache starts cold)", path = path.display())]
    Damaged {
        /// The identity file.
        path: PathBuf,
        /// What is wrong.
        source: SealedError,
    },
    /// Every volume number was used.
    #[error("all {VOLUME_NUMBER_MAX} volume numbers of this data directory were used: {path}: start a new data directory", path = path.display())]
    NumbersUsedUp {
        /// The identity file.
        path: PathBuf,
    },
}

fn io_at(path: &Path) -> impl FnOnce(io::Error) -> DataDirError + '_ {
    move |source| DataDirError::Io {
        path: path.to_owned(),
        source,
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    node: Uuid,
    cache: Uuid,
    next_volume_number: u32,
    /// Numbers in the cache of what clones began as, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    origins: BTreeMap<String, u32>,
    /// Runs of the node as one of a cluster.
    #[serde(default, skip_serializing_if = "is_zero")]
    runs: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(runs: &u64) -> bool {
    *runs == 0
}

/// Where things are below a data directory; holds no lock.
#[derive(Clone, Debug)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    /// The layout of the directory at `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }
    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }
    /// The lock file.
    pub fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }
    /// The identity file.
    pub fn identity(&self) -> PathBuf {
        self.root.join("node.json")
    }
    /// The directory of the volumes.
    pub fn volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }
    /// Whether a path, which has no links, is where HDCS keeps its own files and nobody else may.
    pub fn is_own(&self, real: &Path) -> bool {
        let free = [self.kept(), self.detached()];
        real.starts_with(&self.root) && !free.iter().any(|free| real.starts_with(free))
    }
    /// Why nobody else may.
    pub fn own_refusal(&self) -> String {
        format!(
            "is inside the data directory, where HDCS keeps its own files: choose a path outside, or {}",
            self.kept().display()
        )
    }
    /// Where kept backing files go.
    pub fn kept(&self) -> PathBuf {
        self.root.join("kept")
    }
    /// Where the directories of detached volumes go.
    pub fn detached(&self) -> PathBuf {
        self.root.join("detached")
    }
    /// The default cache file.
    pub fn cache(&self) -> PathBuf {
        self.root.join("cache")
    }
    /// The socket of the control API.
    pub fn control_socket(&self) -> PathBuf {
        self.root.join("control.sock")
    }
    /// What is wrong with the identity file, without changing anything.
    pub fn identity_problem(&self) -> Option<String> {
        let path = self.identity();
        let read = sealed::read::<Identity>(&path, IDENTITY);
        let advice = match read.as_ref().err()? {
            SealedError::Newer { .. } => "",
            _ => {
                ": move it away and start the daemon (volumes are kept, the read cache starts cold)"
            }
        };
        let error = read.err()?;
        Some(format!("{}: {error}{advice}", path.display()))
    }
    /// Identity of the node's read cache, if the identity file can be read.
    pub fn cache_uuid(&self) -> Option<Uuid> {
        let read = sealed::read::<Identity>(&self.identity(), IDENTITY);
        read.ok().map(|identity| identity.cache)
    }
    /// The process id in the lock file, if a daemon holds it now.
    pub fn holder(&self) -> Option<u32> {
        let file = File::open(self.lock()).ok()?;
        if try_lock(&file, libc::LOCK_SH).is_ok() {
            return None;
        }
        read_pid(&file)
    }
}

/// An open, locked data directory.
#[derive(Debug)]
pub struct DataDir {
    layout: Layout,
    identity: Identity,
    /// Keeps the lock until this is dropped or the process ends.
    _lock: File,
    /// Locks of what is elsewhere, kept as long.
    held: Vec<File>,
    /// Whether `node.json` was not there and had to be made.
    fresh: bool,
}

impl DataDir {
    /// Lock the directory at `root` and read whose it is; a directory that does not exist or is
    /// empty becomes a new one.
    pub fn open(root: &Path) -> Result<Self, DataDirError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(root)
            .map_err(io_at(root))?;
        let root = fs::canonicalize(root).map_err(io_at(root))?;
        let layout = Layout::new(root);
        refuse_open_to_others(&layout)?;
        let identity = read_identity(&layout)?;
        let lock = lock(&layout)?;
        // Once more under the lock: another daemon may have made it in between.
        let identity = match identity {
            Some(identity) => Some(identity),
            None => read_identity(&layout)?,
        };
        let fresh = identity.is_none();
        let identity = identity.unwrap_or_else(|| Identity {
            node: Uuid::new_v4(),
            cache: Uuid::new_v4(),
            next_volume_number: 1,
            origins: BTreeMap::new(),
            runs: 0,
        });
        let mut this = Self {
            layout,
            identity,
            _lock: lock,
            held: Vec::new(),
            fresh,
        };
        let volumes = this.layout.volumes();
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&volumes)
            .map_err(io_at(&volumes))?;
        if fresh {
            this.persist()?;
        }
        Ok(this)
    }

    /// Where things are.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
    /// Identity of the node.
    pub fn node_uuid(&self) -> Uuid {
        self.identity.node
    }
    /// Identity of the node's read cache.
    pub fn cache_uuid(&self) -> Uuid {
        self.identity.cache
    }
    /// Keep a lock of what is elsewhere for as long as that of this directory.
    pub fn hold(&mut self, lock: File) {
        self.held.push(lock);
    }
    /// Whether the identity was made by this opening.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Give the cache another identity, durably: what carries the one before never counts again.
    pub fn renew_cache_uuid(&mut self) -> Result<(), DataDirError> {
        let before = std::mem::replace(&mut self.identity.cache, Uuid::new_v4());
        if let Err(error) = self.persist() {
            self.identity.cache = before;
            return Err(error);
        }
        Ok(())
    }

    /// The number of this run of the node among those as one of a cluster, durably.
    pub fn count_run(&mut self) -> Result<u64, DataDirError> {
        self.identity.runs += 1;
        self.persist().map_err(|error| match error {
            DataDirError::Io { path, source } => DataDirError::NotCounted { path, source },
            other => other,
        })?;
        Ok(self.identity.runs)
    }

    /// Hand out a volume number that was never used, durably.
    pub fn next_volume_number(&mut self) -> Result<u32, DataDirError> {
        let number = self.identity.next_volume_number;
        if number > VOLUME_NUMBER_MAX {
            return Err(DataDirError::NumbersUsedUp {
                path: self.layout.identity(),
            });
        }
        self.identity.next_volume_number = number + 1;
        if let Err(error) = self.persist() {
            self.identity.next_volume_number = number;
            return Err(error);
        }
        Ok(number)
    }

    /// The number of the state with this name that volumes begin as; one of its own from the row of the
    /// volumes', handed out durably when it is first asked for. The oldest are forgotten when there are
    /// too many: whoever asks for such a one again gets another number, under which nothing is cached.
    pub fn origin_number(&mut self, name: &str) -> Result<u32, DataDirError> {
        if let Some(&number) = self.identity.origins.get(name) {
            return Ok(number);
        }
        let before = self.identity.clone();
        let number = before.next_volume_number;
        let mut origins = before.origins.clone();
        while origins.len() >= ORIGINS_MAX {
            let oldest = origins.iter().min_by_key(|(_, number)| **number);
            let oldest = oldest.map(|(name, _)| name.clone()).unwrap_or_default();
            origins.remove(&oldest);
        }
        origins.insert(name.to_owned(), number);
        self.identity.origins = origins;
        let handed_out = self.next_volume_number();
        if handed_out.is_err() {
            self.identity = before;
        }
        handed_out
    }

    /// Make sure that `number`, found in the catalogue, is never handed out again: the counter may
    /// be younger than the volumes if `node.json` was lost.
    pub fn note_used_number(&mut self, number: u32) -> Result<(), DataDirError> {
        if number >= self.identity.next_volume_number {
            self.identity.next_volume_number = number.saturating_add(1);
            self.persist()?;
        }
        Ok(())
    }

    fn persist(&mut self) -> Result<(), DataDirError> {
        let path = self.layout.identity();
        sealed::write(&path, IDENTITY, &self.identity).map_err(|error| match error {
            SealedError::Io(source) => DataDirError::Io { path, source },
            source => DataDirError::Damaged { path, source },
        })
    }
}

fn read_identity(layout: &Layout) -> Result<Option<Identity>, DataDirError> {
    let path = layout.identity();
    match sealed::read(&path, IDENTITY) {
        Ok(identity) => Ok(Some(identity)),
        Err(error) if error.is_absent() => {
            refuse_foreign(layout)?;
            Ok(None)
        }
        Err(SealedError::Io(source)) => Err(DataDirError::Io { path, source }),
        Err(source @ SealedError::Newer { .. }) => Err(DataDirError::Newer { path, source }),
        Err(source) => Err(DataDirError::Damaged { path, source }),
    }
}

fn refuse_open_to_others(layout: &Layout) -> Result<(), DataDirError> {
    let (root, volumes) = (layout.root(), layout.volumes());
    let user = rustix::process::geteuid().as_raw();
    let mode = check_owner(root, user)?;
    if mode & 0o055 != 0 {
        tracing::warn!(
            "others than its owner can look into the data directory (mode {mode:04o}): {path}: unless that is meant, \
             for a client of another user, `chmod 700 {path}`",
            path = root.display()
        );
    }
    if volumes.exists() && check_owner(&volumes, user)? & 0o077 != 0 {
        let own = fs::Permissions::from_mode(0o700);
        fs::set_permissions(&volumes, own).map_err(io_at(&volumes))?;
    }
    Ok(())
}

/// The permissions of a directory in which nobody but `user`, its owner, can write.
fn check_owner(path: &Path, user: u32) -> Result<u32, DataDirError> {
    let found = fs::metadata(path).map_err(io_at(path))?;
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    let path = path.to_owned();
    if owner != user {
        return Err(DataDirError::Owner {
            path,
            owner,
            mode,
            user,
        });
    }
    if mode & 0o022 != 0 {
        return Err(DataDirError::Writable { path, owner, mode });
    }
    Ok(mode)
}

fn refuse_foreign(layout: &Layout) -> Result<(), DataDirError> {
    let root = layout.root();
    for entry in fs::read_dir(root).map_err(io_at(root))? {
        let name = entry.map_err(io_at(root))?.file_name();
        let name = name.to_string_lossy();
        // `lost+found` is in the root of a fresh file system; `node.json.*` was moved away.
        let known =
            OWN_NAMES.contains(&&*name) || name == "lost+found" || name.starts_with("node.json.");
        if !known {
            return Err(DataDirError::Foreign {
                path: root.to_owned(),
                found: name.into_owned(),
            });
        }
    }
    Ok(())
}

fn lock(layout: &Layout) -> Result<File, DataDirError> {
    let path = layout.lock();
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(io_at(&path))?;
    match try_lock(&file, libc::LOCK_EX) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let holder = read_pid(&file).map_or(String::new(), |pid| format!(" (process {pid})"));
            return Err(DataDirError::Locked {
                path: layout.root().to_owned(),
                holder,
            });
        }
        Err(error) => return Err(io_at(&path)(error)),
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(io_at(&path))?;
    Ok(file)
}

/// Lock a file, shared or exclusively, unless that has to wait.
pub fn try_lock(file: &File, how: libc::c_int) -> io::Result<()> {
    // SAFETY: flock takes a valid descriptor and touches no memory.
    if unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn read_pid(mut file: &File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_dir_second_opening_is_refused_with_the_holder() {
        let root = tempfile::tempdir().unwrap();
        let first = DataDir::open(root.path()).unwrap();
        let error = DataDir::open(root.path()).unwrap_err();
        assert!(matches!(&error, DataDirError::Locked { .. }), "{error}");
        assert!(error.to_string().contains(&std::process::id().to_string()));
        assert_eq!(first.layout().holder(), Some(std::process::id()));
        drop(first);
        DataDir::open(root.path()).unwrap();
    }

    #[test]
    fn data_dir_keeps_identity_and_never_repeats_a_number() {
        let root = tempfile::tempdir().unwrap();
        let mut first = DataDir::open(root.path()).unwrap();
        let uuid = first.node_uuid();
        assert_eq!(first.next_volume_number().unwrap(), 1);
        assert_eq!(first.next_volume_number().unwrap(), 2);
        first.note_used_number(9).unwrap();
        drop(first);
        let mut again = DataDir::open(root.path()).unwrap();
        assert_eq!(again.node_uuid(), uuid);
        assert_eq!(again.next_volume_number().unwrap(), 10);
    }

    #[test]
    fn data_dir_origins_keep_their_numbers_and_share_them_with_nobody() {
        let root = tempfile::tempdir().unwrap();
        let mut dir = DataDir::open(root.path()).unwrap();
        assert_eq!(dir.next_volume_number().unwrap(), 1);
        assert_eq!(dir.origin_number("snapshot 7").unwrap(), 2);
        assert_eq!(dir.origin_number("snapshot 8").unwrap(), 3);
        assert_eq!(dir.next_volume_number().unwrap(), 4);
        drop(dir);
        let mut dir = DataDir::open(root.path()).unwrap();
        assert_eq!(dir.origin_number("snapshot 7").unwrap(), 2);
        assert_eq!(dir.origin_number("snapshot 9").unwrap(), 5);
        // Nothing can be written where a directory is in the way.
        let in_the_way = root.path().join("node.json.tmp");
        fs::create_dir(&in_the_way).unwrap();
        dir.origin_number("snapshot 10").unwrap_err();
        fs::remove_dir(in_the_way).unwrap();
        assert_eq!(dir.next_volume_number().unwrap(), 6);
        assert_eq!(dir.origin_number("snapshot 10").unwrap(), 7);
    }

    #[test]
    fn data_dir_forgets_the_oldest_of_too_many_origins() {
        let root = tempfile::tempdir().unwrap();
        let mut dir = DataDir::open(root.path()).unwrap();
        let name = |number: usize| format!("snapshot {number}");
        dir.identity.origins = (1..=ORIGINS_MAX).map(|n| (name(n), n as u32)).collect();
        dir.identity.next_volume_number = ORIGINS_MAX as u32 + 1;
        assert_eq!(dir.origin_number("new").unwrap(), ORIGINS_MAX as u32 + 1);
        assert_eq!(dir.identity.origins.len(), ORIGINS_MAX);
        assert_eq!(dir.origin_number(&name(2)).unwrap(), 2);
        assert_eq!(dir.origin_number(&name(1)).unwrap(), ORIGINS_MAX as u32 + 2);
    }

    #[test]
    fn data_dir_new_cache_identity_is_durable_or_not_taken() {
        let root = tempfile::tempdir().unwrap();
        let mut dir = DataDir::open(root.path()).unwrap();
        let first = dir.cache_uuid();
        // Nothing can be written where a directory is in the way.
        let in_the_way = root.path().join("node.json.tmp");
        fs::create_dir(&in_the_way).unwrap();
        let error = dir.renew_cache_uuid().unwrap_err();
        assert!(error.to_string().contains("node.json"), "{error}");
        assert_eq!(dir.cache_uuid(), first);
        fs::remove_dir(in_the_way).unwrap();
        dir.renew_cache_uuid().unwrap();
        let second = dir.cache_uuid();
        assert_ne!(first, second);
        assert_eq!(dir.next_volume_number().unwrap(), 1);
        drop(dir);
        assert_eq!(DataDir::open(root.path()).unwrap().cache_uuid(), second);
    }

    #[test]
    fn data_dir_numbers_end_at_the_limit() {
        let root = tempfile::tempdir().unwrap();
        let mut dir = DataDir::open(root.path()).unwrap();
        dir.note_used_number(VOLUME_NUMBER_MAX).unwrap();
        assert!(matches!(
            dir.next_volume_number(),
            Err(DataDirError::NumbersUsedUp { .. })
        ));
    }

    #[test]
    fn data_dir_in_which_others_can_write_is_refused_and_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let set = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        for mode in [0o770, 0o702, 0o1777] {
            set(root, mode);
            let error = DataDir::open(root).unwrap_err();
            assert!(matches!(error, DataDirError::Writable { .. }), "{error}");
            let said = error.to_string();
            let owner = fs::metadata(root).unwrap().uid();
            for part in [format!("user {owner}"), format!("{mode:04o}")] {
                assert!(said.contains(&part), "{said}");
            }
            assert!(said.contains(&format!("`chmod go-w {}`", root.display())));
        }
        assert_eq!(fs::read_dir(root).unwrap().count(), 0);
        // Others may look into it, but not into what it holds.
        set(root, 0o755);
        drop(DataDir::open(root).unwrap());
        let volumes = root.join("volumes");
        set(&volumes, 0o755);
        drop(DataDir::open(root).unwrap());
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(root), mode(&volumes)), (0o755, 0o700));
        set(&volumes, 0o720);
        assert!(matches!(
            DataDir::open(root),
            Err(DataDirError::Writable { path, .. }) if path.ends_with("volumes")
        ));
    }

    #[test]
    fn data_dir_of_another_user_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let own = fs::Permissions::from_mode(0o700);
        fs::set_permissions(root.path(), own).unwrap();
        let owner = fs::metadata(root.path()).unwrap().uid();
        assert_eq!(check_owner(root.path(), owner).unwrap(), 0o700);
        let error = check_owner(root.path(), owner + 1).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, DataDirError::Owner { .. }), "{said}");
        let advice = format!("`chown -R {} {}`", owner + 1, root.path().display());
        for part in [&format!("user {owner}"), "0700", &advice] {
            assert!(said.contains(part), "{said}");
        }
    }

    #[test]
    fn data_dir_foreign_directory_is_left_untouched() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("thesis.tex"), "x").unwrap();
        let error = DataDir::open(root.path()).unwrap_err();
        assert!(matches!(&error, DataDirError::Foreign { found, .. } if found == "thesis.tex"));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    }

    #[test]
    fn data_dir_damaged_and_newer_identities_are_refused() {
        let root = tempfile::tempdir().unwrap();
        drop(DataDir::open(root.path()).unwrap());
        let path = root.path().join("node.json");
        let good = fs::read_to_string(&path).unwrap();
        fs::write(&path, good.replace("\"version\": 1", "\"version\": 2")).unwrap();
        assert!(matches!(
            DataDir::open(root.path()),
            Err(DataDirError::Newer { .. })
        ));
        fs::write(&path, good.replace("number\": 1", "number\": 0")).unwrap();
        assert!(matches!(
            DataDir::open(root.path()),
            Err(DataDirError::Damaged { .. })
        ));
        fs::rename(&path, root.path().join("node.json.damaged")).unwrap();
        assert!(DataDir::open(root.path()).unwrap().is_fresh());
    }
}
