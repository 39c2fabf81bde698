//! A directory of any file system: an object is a file, made under a name of its own, synced, and given its name.
//!
//! A conditional put is a hard link, or where the file system has none a rename that does not replace. What a crash leaves
//! half-made lies in `PATH/.tmp` and is swept when it is old.
//!
//! Invariants:
//! 1. A put that ended well is durable, and so is what a conditional put has found: file and directories were synced
//!    before.
//! 2. Another directory at the path (a mount that came or went while this was in use) is never taken for this one: what is
//!    done while it is there counts as not reachable, whatever it brought. Neither is a path above which nothing is.
//! 3. Only files with names that the stores take are objects; links and everything else are left alone.
//! 4. A file system that does not answer holds no more than [`ROOT_THREADS_MAX`] threads for a directory, however often
//!    that was reached, and [`THREADS_MAX`] for all.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use rustix::fs::{CWD, RenameFlags, StatFs, renameat_with, statfs, statvfs};
use rustix::io::Errno;
use tokio::sync::Semaphore;

use super::{
    ABANDONED, Condition, LIST_MAX, Listing, Object, Pending, Store, StoreError, WORKSHOP, is_name,
};

/// Operations that are under way at once in one directory, and in all: the runtime of the stores has 512 threads that may
/// block, and others need some.
const ROOT_THREADS_MAX: usize = 16;
const THREADS_MAX: usize = 128;
/// Attempts to put an object whose directory is removed meanwhile, since what was in it was deleted.
const PUTS_MAX: usize = 10;
/// Names that one walk of the directories keeps, so that the pages that follow need no other.
const NAMES_MAX: usize = 32 * LIST_MAX;
/// Files and directories are ours alone.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// See the module.
#[derive(Debug)]
pub struct Dir {
    inner: Arc<Inner>,
    threads: Arc<Semaphore>,
    timeout: Duration,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    /// The directory that was first found or made there.
    identity: OnceLock<Identity>,
    swept: AtomicBool,
    /// What the last listing found beyond its page.
    ahead: Mutex<Option<Ahead>>,
}

/// What a directory is told from others by, also after it was mounted again: kind and number of its file system, and its
/// own number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    kind: i64,
    file_system: u64,
    number: u64,
}

static THREADS: Semaphore = Semaphore::const_new(THREADS_MAX);
/// Those of each directory that is in use.
static ROOTS: Mutex<BTreeMap<PathBuf, Weak<Semaphore>>> = Mutex::new(BTreeMap::new());

fn threads_of(root: &Path) -> Arc<Semaphore> {
    let mut roots = ROOTS.lock().unwrap_or_else(PoisonError::into_inner);
    roots.retain(|_, threads| threads.strong_count() > 0);
    let known = roots.get(root).and_then(Weak::upgrade);
    known.unwrap_or_else(|| {
        let threads = Arc::new(Semaphore::new(ROOT_THREADS_MAX));
        roots.insert(root.to_owned(), Arc::downgrade(&threads));
        threads
    })
}

/// Names that the page after `after` begins with.
#[derive(Debug)]
struct Ahead {
    /// When it was looked.
    began: Instant,
    prefix: String,
    after: String,
    names: BTreeSet<String>,
    /// Whether there is more than these.
    more: bool,
}

impl Dir {
    /// Use a directory, which may not be there yet; an operation may take so long.
    pub fn new(root: &Path, timeout: Duration) -> Self {
        Self {
            inner: Arc::new(Inner {
                root: root.to_owned(),
                identity: OnceLock::new(),
                swept: AtomicBool::new(false),
                ahead: Mutex::new(None),
            }),
            threads: threads_of(root),
            timeout,
        }
    }

    /// Do something on a thread that may block, within its time.
    async fn perform<T: Send + 'static>(
        &self,
        what: String,
        work: impl FnOnce(&Inner) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, StoreError> {
        let inner = Arc::clone(&self.inner);
        let threads = Arc::clone(&self.threads);
        let done = async move {
            // The thread keeps its places for as long as it runs, also when nobody waits for it any more.
            let places = (threads.acquire_owned().await, THREADS.acquire().await);
            let run = tokio::task::spawn_blocking(move || {
                let _places = places;
                let done = work(&inner);
                // What was found, or not found, may be of another directory, and what was made may be in one.
                inner.is_there()?;
                done
            });
            run.await
                .unwrap_or_else(|error| Err(Failure::Other(error.to_string())))
        };
        let ended = tokio::time::timeout(self.timeout, done).await;
        let place = self.place();
        let told = |why: &str| format!("{place}: {what}: {why}");
        match ended {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(Failure::Store(error))) => Err(error),
            Ok(Err(Failure::Other(why))) => Err(StoreError::Failed(told(&why))),
            Ok(Err(Failure::Away(why))) => Err(StoreError::Unreachable(told(&why))),
            Ok(Err(Failure::Io(error))) => Err(meaning(&error, told(&error.to_string()))),
            Err(_) => Err(StoreError::Unreachable(told(&format!(
                "no answer within {} s",
                self.timeout.as_secs()
            )))),
        }
    }
}

/// How an operation failed.
enum Failure {
    /// In a way that has a meaning of its own.
    Store(StoreError),
    /// The directory is not there, or is another one.
    Away(String),
    /// As the file system says.
    Io(io::Error),
    /// Otherwise.
    Other(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// What an error of the file system means.
fn meaning(error: &io::Error, message: String) -> StoreError {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StoreError::NoSpace(message),
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => StoreError::Refused(message),
        // What passes.
        ErrorKind::OutOfMemory | ErrorKind::ResourceBusy | ErrorKind::WouldBlock => {
            StoreError::Unreachable(message)
        }
        _ if [Errno::MFILE, Errno::NFILE]
            .map(|errno| Some(errno.raw_os_error()))
            .contains(&error.raw_os_error()) =>
        {
            StoreError::Unreachable(message)
        }
        // Of network file systems; what a local disk could not read stays an error.
        ErrorKind::StaleNetworkFileHandle
        | ErrorKind::TimedOut
        | ErrorKind::NotConnected
        | ErrorKind::ConnectionAborted
        | ErrorKind::ConnectionRefused
        | ErrorKind::ConnectionReset
        | ErrorKind::HostUnreachable
        | ErrorKind::NetworkDown
        | ErrorKind::NetworkUnreachable
        | ErrorKind::Interrupted => StoreError::Unreachable(message),
        _ => StoreError::Failed(message),
    }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Make a directory if it is not there, durably; its parent must be.
fn make_directory(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(DIRECTORY_MODE).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        // Whoever has made it may not have synced it yet.
        _ => path.parent().map_or(Ok(()), sync_directory),
    }
}

/// Make a file whole and durable, but for its name.
fn make_file(path: &Path, data: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(FILE_MODE)
        .open(path)?;
    file.write_all(data)?;
    file.sync_all()
}

/// Give a file another name that nothing has.
fn publish_new(from: &Path, to: &Path) -> Result<(), Failure> {
    let taken = || Err(Failure::Store(StoreError::Exists));
    match fs::hard_link(from, to) {
        // It has two names for a moment; the first one is swept if it stays.
        Ok(()) => {
            let _ = fs::remove_file(from);
            return Ok(());
        }
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return taken(),
        // Not every file system has them.
        Err(error)
            if [Errno::OPNOTSUPP, Errno::NOSYS, Errno::PERM, Errno::MLINK]
                .map(|errno| Some(errno.raw_os_error()))
                .contains(&error.raw_os_error()) => {}
        Err(error) => return Err(error.into()),
    }
    // A client of SMB looks for the name itself, and has the server replace what another client has made since.
    let is_local = !SMB.contains(&kind_of(&statfs(from)?));
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        _ if !is_local => {}
        Ok(()) => return Ok(()),
        Err(Errno::EXIST) => return taken(),
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        Err(errno) => return Err(errno.into()),
    }
    Err(Failure::Store(StoreError::Refused(format!(
        "{}: its file system can neither make hard links nor rename without replacing, one of which a volume needs: use \
         another one",
        to.display()
    ))))
}

/// Kinds of SMB, as `statfs` has them.
const SMB: [i64; 3] = [0x517B, 0xFF53_4D42, 0xFE53_4D42];

// The type of the field differs between architectures.
#[allow(clippy::useless_conversion, clippy::unnecessary_cast)]
fn kind_of(found: &StatFs) -> i64 {
    found.f_type as i64
}

impl Inner {
    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Whether the directory is there, and the one that it was. If not, at least what it would lie in is.
    fn is_there(&self) -> Result<bool, Failure> {
        let away = |why: &str| Err(Failure::Away(why.to_owned()));
        let found = match fs::metadata(&self.root) {
            Ok(found) => found,
            Err(error) if is_absent(&error) => {
                if self.identity.get().is_some() {
                    return away("the directory is gone: is its file system mounted?");
                }
                return match self.root.parent().map(fs::metadata) {
                    Some(Ok(above)) if above.is_dir() => Ok(false),
                    Some(Err(error)) if !is_absent(&error) => Err(error.into()),
                    _ => away(
                        "the directory above it does not exist: make it first, or mount its file system",
                    ),
                };
            }
            Err(error) => return Err(error.into()),
        };
        if !found.is_dir() {
            return Err(Failure::Store(StoreError::Refused(format!(
                "{}: it is not a directory",
                self.root.display()
            ))));
        }
        let within = statfs(&self.root)?;
        let identity = Identity {
            kind: kind_of(&within),
            file_system: statvfs(&self.root)?.f_fsid,
            number: found.ino(),
        };
        if *self.identity.get_or_init(|| identity) != identity {
            return away("it is another directory than before: is its file system mounted?");
        }
        Ok(true)
    }

    fn put(&self, name: &str, data: &[u8], condition: Condition) -> Result<(), Failure> {
        if !self.is_there()? {
            make_directory(&self.root)?;
            self.is_there()?;
        }
        self.sweep();
        let path = self.path(name);
        for _ in 0..PUTS_MAX {
            match self.attempt(&path, data, condition) {
                // Some directory of it is not there.
                Err(Failure::Io(error)) if is_absent(&error) => {
                    self.is_there()?;
                    make_directory(&self.path(WORKSHOP))?;
                    match self.make_parents(name) {
                        Err(error) if !is_absent(&error) => return Err(error.into()),
                        _ => {}
                    }
                }
                done => return done,
            }
        }
        Err(Failure::Away(
            "its directory goes again and again".to_owned(),
        ))
    }

    fn attempt(&self, path: &Path, data: &[u8], condition: Condition) -> Result<(), Failure> {
        let half_made = self.path(WORKSHOP).join(uuid::Uuid::new_v4().to_string());
        let done =
            make_file(&half_made, data)
                .map_err(Failure::from)
                .and_then(|()| match condition {
                    Condition::Always => Ok(fs::rename(&half_made, path)?),
                    Condition::IfAbsent => publish_new(&half_made, path),
                });
        if done.is_err() {
            // What cannot be deleted now is swept later.
            let _ = fs::remove_file(&half_made);
        }
        // What is there was perhaps made by an attempt of ours that was not synced to its end: whoever is told of it
        // relies on it.
        if matches!(done, Ok(()) | Err(Failure::Store(StoreError::Exists)))
            && let Some(parent) = path.parent()
        {
            sync_directory(parent)?;
        }
        done
    }

    /// Make the directories that an object lies in.
    fn make_parents(&self, name: &str) -> io::Result<()> {
        for (at, _) in name.match_indices('/') {
            make_directory(&self.path(&name[..at]))?;
        }
        Ok(())
    }

    /// Open an object for reading; what has its name and is no file is none.
    fn open(&self, name: &str) -> io::Result<File> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
            .open(self.path(name))?;
        if file.metadata()?.is_file() {
            Ok(file)
        } else {
            Err(ErrorKind::NotFound.into())
        }
    }

    fn get(&self, name: &str, offset: u64, bytes: usize) -> Result<Bytes, Failure> {
        self.is_there()?;
        let opened = self.open(name).or_else(|error| {
            // It may have been away for a moment.
            let is_there = is_absent(&error) && self.is_there().is_ok_and(|there| there);
            if is_there {
                self.open(name)
            } else {
                Err(error)
            }
        });
        let file = match opened {
            Ok(file) => file,
            Err(error) if is_absent(&error) => {
                return Err(Failure::Store(StoreError::NotFound));
            }
            Err(error) => return Err(error.into()),
        };
        let end = offset.checked_add(bytes as u64);
        let there = file.metadata()?.len();
        if end.is_none_or(|end| there < end) {
            return Err(Failure::Store(StoreError::Short));
        }
        let mut data = vec![0; bytes];
        match file.read_exact_at(&mut data, offset) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(Failure::Store(StoreError::Short))
            }
            done => Ok(done.map(|()| data.into())?),
        }
    }

    fn delete(&self, name: &str) -> Result<(), Failure> {
        self.is_there()?;
        let path = self.path(name);
        match fs::remove_file(&path) {
            Err(error) if is_absent(&error) => return Ok(()),
            done => done?,
        }
        // Whatever is empty goes, up to the directory of the place itself, which may be somebody's.
        for parent in path
            .ancestors()
            .skip(1)
            .take_while(|parent| *parent != self.root)
        {
            if fs::remove_dir(parent).is_err() {
                return Ok(());
            }
        }
        let _ = fs::remove_dir(self.path(WORKSHOP));
        Ok(())
    }

    fn list(&self, prefix: &str, after: &str, max: usize) -> Result<Listing, Failure> {
        if !self.is_there()? {
            return Ok(Listing::default());
        }
        let mut after = after.to_owned();
        let ahead = { self.ahead.lock().unwrap_or_else(PoisonError::into_inner) }.take();
        let mut ahead = ahead.filter(|ahead| ahead.prefix == prefix && ahead.after == after);
        loop {
            let (began, mut names, more) = match ahead.take() {
                Some(ahead) if !ahead.names.is_empty() => (ahead.began, ahead.names, ahead.more),
                _ => {
                    let (began, mut names) = (Instant::now(), BTreeSet::new());
                    let more = self.walk(prefix.trim_end_matches('/'), &after, &mut names)?;
                    (began, names, more)
                }
            };
            let mut objects = Vec::new();
            while objects.len() < max
                && let Some(name) = names.pop_first()
            {
                after.clone_from(&name);
                let found = match fs::symlink_metadata(self.path(&name)) {
                    Ok(found) => found,
                    // It was deleted meanwhile.
                    Err(error) if is_absent(&error) => continue,
                    Err(error) => return Err(error.into()),
                };
                let modified = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let modified = modified.duration_since(SystemTime::UNIX_EPOCH);
                objects.push(Object {
                    bytes: found.len(),
                    modified_ms: modified.map_or(0, |since| since.as_millis() as u64),
                    name,
                });
            }
            let is_more = more || !names.is_empty();
            if objects.is_empty() && is_more {
                // All of these were deleted.
                continue;
            }
            if is_more {
                self.keep_ahead(Ahead {
                    began,
                    prefix: prefix.to_owned(),
                    after,
                    names,
                    more,
                });
            }
            return Ok(Listing {
                objects,
                more: is_more,
            });
        }
    }

    /// Keep names for the page that follows, unless a later listing has.
    fn keep_ahead(&self, ahead: Ahead) {
        let mut kept = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.as_ref().is_none_or(|kept| kept.began < ahead.began) {
            *kept = Some(ahead);
        }
    }

    /// The first names below a directory that come after `after`; whether there are more.
    fn walk(
        &self,
        directory: &str,
        after: &str,
        names: &mut BTreeSet<String>,
    ) -> Result<bool, Failure> {
        let mut more = false;
        let mut directories = vec![directory.to_owned()];
        while let Some(directory) = directories.pop() {
            let entries = match fs::read_dir(self.path(&directory)) {
                Ok(entries) => entries,
                Err(error) if is_absent(&error) => continue,
                Err(error) => return Err(error.into()),
            };
            for entry in entries {
                let entry = entry?;
                let name = entry.file_name();
                let Some(name) = name.to_str().filter(|name| is_name(name)) else {
                    continue;
                };
                let name = if directory.is_empty() {
                    name.to_owned()
                } else {
                    format!("{directory}/{name}")
                };
                let kind = match entry.file_type() {
                    Err(error) if is_absent(&error) => continue,
                    kind => kind?,
                };
                if kind.is_dir() {
                    directories.push(name);
                } else if kind.is_file() && *name > *after {
                    names.insert(name);
                    if names.len() > NAMES_MAX {
                        names.pop_last();
                        more = true;
                    }
                }
            }
        }
        Ok(more)
    }

    /// Once, delete what crashes have left half-made. It may fail: the next opening tries again.
    fn sweep(&self) {
        if self.swept.swap(true, Ordering::Relaxed) {
            return;
        }
        let Ok(entries) = fs::read_dir(self.path(WORKSHOP)) else {
            return;
        };
        for entry in entries.flatten().take(LIST_MAX) {
            let age = entry
                .metadata()
                .and_then(|found| found.modified())
                .ok()
                .and_then(|made| made.elapsed().ok());
            if age.is_some_and(|age| age > ABANDONED) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Whether nothing is there.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

impl Store for Dir {
    fn put<'a>(&'a self, name: &'a str, data: Bytes, condition: Condition) -> Pending<'a, ()> {
        let owned = name.to_owned();
        let work = move |inner: &Inner| inner.put(&owned, &data, condition);
        Box::pin(self.perform(format!("put {name}"), work))
    }

    fn get<'a>(&'a self, name: &'a str, offset: u64, bytes: usize) -> Pending<'a, Bytes> {
        let owned = name.to_owned();
        let work = move |inner: &Inner| inner.get(&owned, offset, bytes);
        Box::pin(self.perform(format!("get {name}"), work))
    }

    fn delete<'a>(&'a self, name: &'a str) -> Pending<'a, ()> {
        let owned = name.to_owned();
        Box::pin(
            self.perform(format!("delete {name}"), move |inner: &Inner| {
                inner.delete(&owned)
            }),
        )
    }

    fn list<'a>(&'a self, prefix: &'a str, after: &'a str, max: usize) -> Pending<'a, Listing> {
        let (prefix, after) = (prefix.to_owned(), after.to_owned());
        let work = move |inner: &Inner| inner.list(&prefix, &after, max);
        Box::pin(self.perform("list".to_owned(), work))
    }

    fn place(&self) -> String {
        format!("directory {}", self.inner.root.display())
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::conformance;
    use super::super::{Client, runtime};
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(200);

    fn client(root: &Path) -> Client {
        Client::new(Dir::new(root, Duration::from_secs(20)), PATIENCE)
    }

    fn ends<T>(future: impl Future<Output = T>) -> T {
        runtime().block_on(future)
    }

    fn put(client: &Client, name: &str) -> Result<(), StoreError> {
        ends(client.put(name, Bytes::from_static(b"abc"), Condition::IfAbsent))
    }

    #[test]
    fn directory_conforms_and_is_left_empty() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("volume");
        let client = client(&root);
        assert_eq!(ends(client.list("", "", 10)).unwrap(), Listing::default());
        assert!(!root.exists(), "looking makes nothing");
        ends(conformance(&client)).unwrap();
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
        assert_eq!(fs::metadata(&root).unwrap().mode() & 0o777, DIRECTORY_MODE);
    }

    #[test]
    fn parent_that_is_not_there_is_not_made() {
        let place = tempfile::tempdir().unwrap();
        let error = put(&client(&place.path().join("absent/volume")), "data/1").unwrap_err();
        assert!(matches!(error, StoreError::Unreachable(_)), "{error:?}");
        assert!(!place.path().join("absent").exists());
    }

    #[test]
    fn another_directory_at_the_path_is_not_taken_for_it() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("volume");
        let client = client(&root);
        put(&client, "data/1").unwrap();
        let away = place.path().join("away");
        fs::rename(&root, &away).unwrap();
        let is_away = |ended: Result<(), StoreError>| {
            assert!(
                matches!(ended, Err(StoreError::Unreachable(_))),
                "{ended:?}"
            );
        };
        let all = || {
            is_away(put(&client, "data/2"));
            is_away(ends(client.get("data/1", 0, 1)).map(drop));
            is_away(ends(client.list("", "", 1)).map(drop));
            is_away(ends(client.delete("data/1")));
        };
        all();
        fs::create_dir(&root).unwrap();
        all();
        assert_eq!(
            fs::read_dir(&root).unwrap().count(),
            0,
            "nothing is made in it"
        );
        fs::remove_dir(&root).unwrap();
        fs::rename(&away, &root).unwrap();
        assert_eq!(ends(client.get("data/1", 0, 3)).unwrap(), "abc");
    }

    #[test]
    fn what_is_no_object_is_left_alone() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path();
        let client = client(root);
        put(&client, "data/1").unwrap();
        fs::write(root.join("data/two words"), "x").unwrap();
        std::os::unix::fs::symlink("/etc", root.join("data/etc")).unwrap();
        let names = |listing: Listing| listing.objects.into_iter().map(|one| one.name);
        let listed: Vec<_> = names(ends(client.list("", "", 10)).unwrap()).collect();
        assert_eq!(listed, ["data/1"]);
        ends(client.delete("data/1")).unwrap();
        assert!(root.join("data/two words").exists() && root.join("data/etc").exists());
    }

    #[test]
    fn put_goes_on_while_its_directory_comes_and_goes() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().to_owned();
        let (one, other) = (client(&root), client(&root));
        let rounds = 100;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for at in 0..rounds {
                    let name = format!("data/a{at}");
                    put(&one, &name).unwrap();
                    ends(one.delete(&name)).unwrap();
                }
            });
            for at in 0..rounds {
                let name = format!("data/b{at}");
                put(&other, &name).unwrap();
                assert_eq!(ends(other.get(&name, 0, 3)).unwrap(), "abc");
                ends(other.delete(&name)).unwrap();
            }
        });
    }

    #[test]
    fn what_has_the_name_of_an_object_and_is_no_file_is_none() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path();
        fs::create_dir(root.join("data")).unwrap();
        let fifo = root.join("data/1");
        rustix::fs::mknodat(CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let client = client(root);
        assert_eq!(ends(client.get("data/1", 0, 1)), Err(StoreError::NotFound));
        assert_eq!(ends(client.list("", "", 10)).unwrap(), Listing::default());
    }

    #[test]
    fn listing_whose_names_ahead_were_deleted_goes_on() {
        let place = tempfile::tempdir().unwrap();
        let client = client(place.path());
        for at in 0..9 {
            put(&client, &format!("data/{at}")).unwrap();
        }
        let first = ends(client.list("data/", "", 3)).unwrap();
        assert!(first.more);
        for at in 3..8 {
            ends(client.delete(&format!("data/{at}"))).unwrap();
        }
        let next = ends(client.list("data/", "data/2", 3)).unwrap();
        assert_eq!((next.objects.len(), next.more), (1, false));
        assert_eq!(next.objects[0].name, "data/8");
    }

    #[test]
    fn directories_of_one_path_share_their_threads() {
        let place = tempfile::tempdir().unwrap();
        let made = |path: &Path| Dir::new(path, Duration::from_secs(1));
        let (one, same) = (made(place.path()), made(place.path()));
        let other = made(&place.path().join("other"));
        assert!(Arc::ptr_eq(&one.threads, &same.threads));
        assert!(!Arc::ptr_eq(&one.threads, &other.threads));
    }

    #[test]
    fn only_what_is_old_and_half_made_is_swept() {
        let place = tempfile::tempdir().unwrap();
        let workshop = place.path().join(WORKSHOP);
        fs::create_dir(&workshop).unwrap();
        let (old, new) = (workshop.join("old"), workshop.join("new"));
        let long_ago = SystemTime::now() - 2 * ABANDONED;
        File::create(&old).unwrap().set_modified(long_ago).unwrap();
        File::create(&new).unwrap();
        put(&client(place.path()), "data/1").unwrap();
        assert!(!old.exists() && new.exists());
    }

    #[test]
    fn listing_in_pages_holds_no_more_names_than_it_may() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path();
        fs::create_dir(root.join("data")).unwrap();
        let all: Vec<_> = (0..NAMES_MAX + 10)
            .map(|at| format!("data/{at:08}"))
            .collect();
        for name in &all {
            File::create(root.join(name)).unwrap();
        }
        let client = client(root);
        let (mut listed, mut after) = (Vec::new(), String::new());
        loop {
            let page = ends(client.list("data/", &after, 4 * LIST_MAX)).unwrap();
            listed.extend(page.objects.into_iter().map(|one| one.name));
            listed.last().unwrap().clone_into(&mut after);
            if !page.more {
                break;
            }
        }
        assert_eq!(listed, all);
    }
}
