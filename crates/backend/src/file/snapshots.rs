//! Snapshots of an image file: files in a directory beside it, and clones: files that begin as one.
//!
//! ```text
//! DIR/disk                        the image of a volume
//! DIR/disk.hdcs-snap/monday       a snapshot of it: a raw image, only to be read
//! DIR/disk.hdcs-snap/.making-…    one that is being made
//! DIR/clone.hdcs-making           a clone that is being made, as DIR/clone
//! ```
//!
//! Invariants:
//! 1. A snapshot is there whole and durable, or not at all: its file gets its name when it is done. What
//!    a crash leaves of one is removed when the image is opened next.
//! 2. A snapshot's file is never written. Its data is shared with the image where the file system can do
//!    that (reflinks: XFS, Btrfs), else it is copied, if that was allowed ([`super::copier`]).
//! 3. Nothing depends on a snapshot: what needs its data shares that, or has a copy.

use std::ffi::{CStr, OsString};
use std::fs::{self, File, FileTimes, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use hdcs_core::objects::io::{SnapshotError, SnapshotName};
use hdcs_device::Errno;
use hdcs_device::file::{self as device, DeviceError, Opened};
use uuid::Uuid;

use super::copier::copy_all;
pub use super::lineage::identity_of;
use super::presence::{self, CUT, open_to_look};
use super::{ImagePath, lineage};
use crate::copying::Copying;
use crate::url::{Given, OptionList, file_url};
use crate::{
    BackendError, CloneOrigin, Found, Place, SnapshotStore, StoredSnapshot, StoredSnapshots,
};

/// Ends the name of the directory with the snapshots of an image.
const DIRECTORY_SUFFIX: &str = ".hdcs-snap";
/// Begins the name of a snapshot that is being made.
const MAKING_PREFIX: &str = ".making-";
/// Ends the name of a clone that is being made.
const MAKING_SUFFIX: &str = ".hdcs-making";
/// The requests of `ioctl_ficlone(2)` and `ioctl_ficlonerange(2)`.
const FICLONE: libc::Ioctl = 0x4004_9409;
const FICLONERANGE: libc::Ioctl = 0x4020_940D;
/// So much is shared to see whether that is possible: a multiple of every block that file systems have.
const PROBE_BYTES: u64 = 64 << 10;
/// A snapshot's identity, among the attributes of its file.
pub const UUID_ATTRIBUTE: &CStr = c"user.hdcs.snapshot";

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Where the snapshots of an image are.
pub fn directory_of(image: &Path) -> PathBuf {
    let real = fs::canonicalize(image).unwrap_or_else(|_| image.to_owned());
    with_suffix(&real, DIRECTORY_SUFFIX)
}

/// Whether a path is that of a snapshot.
pub fn is_snapshot(path: &Path) -> bool {
    let directory = path.parent().and_then(Path::file_name);
    directory.is_some_and(|name| name.as_bytes().ends_with(DIRECTORY_SUFFIX.as_bytes()))
}

/// Remove what a crash has left of snapshots of an image that is locked.
pub fn remove_leftovers(image: &Path) {
    let Ok(entries) = fs::read_dir(directory_of(image)) else {
        return;
    };
    for entry in entries.flatten() {
        if entry
            .file_name()
            .as_bytes()
            .starts_with(MAKING_PREFIX.as_bytes())
        {
            let removed = fs::remove_file(entry.path());
            let path = entry.path();
            tracing::info!(path = %path.display(), ?removed, "a snapshot that was not finished");
        }
    }
}

/// Have `to` share all the data of `from`. Nothing is copied; refused where that is not possible.
fn share(from: &File, to: &File) -> Result<(), Errno> {
    // SAFETY: a request on two descriptors that are held.
    match unsafe { libc::ioctl(to.as_raw_fd(), FICLONE, from.as_raw_fd()) } {
        0 => Ok(()),
        _ => Err(Errno::last()),
    }
}

/// The same of the beginning alone.
fn share_beginning(from: &File, to: &File) -> Result<(), Errno> {
    let bytes = from.metadata().map_err(|error| Errno::from(&error))?.len();
    // From which file, from where, how much (0: all), to where.
    let bytes = if bytes < PROBE_BYTES { 0 } else { PROBE_BYTES };
    let range: [u64; 4] = [from.as_raw_fd() as u64, 0, bytes, 0];
    // SAFETY: a request on two descriptors that are held, with a range that is valid during the call.
    match unsafe { libc::ioctl(to.as_raw_fd(), FICLONERANGE, range.as_ptr()) } {
        0 => Ok(()),
        _ => Err(Errno::last()),
    }
}

/// Whether a file system has refused to share data, so that it would have to be copied.
fn is_unshareable(errno: Errno) -> bool {
    matches!(
        errno.0,
        libc::EOPNOTSUPP | libc::EXDEV | libc::EINVAL | libc::ENOTTY | libc::ENOSYS
    )
}

/// Set an attribute of a file, if the file system has such: what it says is of use only beside shared data.
pub fn set_attribute(file: &File, name: &CStr, value: &[u8]) {
    // SAFETY: the name and the value are valid during the call.
    let set = unsafe {
        libc::fsetxattr(
            file.as_raw_fd(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    if set != 0 {
        tracing::debug!(error = %Errno::last(), ?name, "an attribute was not set");
    }
}

/// Make what a directory names durable.
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// A snapshot that is being made. Dropped unfinished, nothing of it stays.
pub struct Making {
    /// What is to be the snapshot.
    pub file: File,
    temporary: PathBuf,
    path: PathBuf,
    made_ms: u64,
}

/// How keeping a state has gone.
pub enum Frozen {
    /// The snapshot is there.
    Made,
    /// Data has to be copied; nothing may change in the image before that is done, or it is told
    /// before. What the image is: to ask for that may take long.
    Copy(Making, Box<fs::Metadata>),
}

impl Making {
    /// Begin with a file that nobody takes for a snapshot yet. Blocks.
    pub(super) fn begin(image: &Path, name: &SnapshotName, made_ms: u64) -> io::Result<Self> {
        let directory = directory_of(image);
        let path = directory.join(name.as_str());
        if fs::symlink_metadata(&path).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        match fs::create_dir(&directory) {
            Ok(()) => {
                fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))?;
                sync_directory(directory.parent().unwrap_or(Path::new("/")))?;
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        let temporary = directory.join(format!("{MAKING_PREFIX}{}", Uuid::new_v4()));
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create_new(true).mode(0o600);
        Ok(Self {
            file: options.open(&temporary)?,
            temporary,
            path,
            made_ms,
        })
    }

    /// All of its data is there: give it its name, durably.
    pub fn finish(self) -> io::Result<()> {
        set_attribute(
            &self.file,
            UUID_ATTRIBUTE,
            Uuid::new_v4().to_string().as_bytes(),
        );
        let made = UNIX_EPOCH + Duration::from_millis(self.made_ms);
        self.file.set_times(FileTimes::new().set_modified(made))?;
        self.file
            .set_permissions(fs::Permissions::from_mode(0o400))?;
        self.file.sync_all()?;
        name_it(&self.temporary, &self.path)
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        // Gone already if it was finished.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// Give a file that is durable its name, unless something has that, durably.
fn name_it(temporary: &Path, path: &Path) -> io::Result<()> {
    fs::hard_link(temporary, path)?;
    fs::remove_file(temporary)?;
    sync_directory(path.parent().unwrap_or(Path::new("/")))
}

/// Keep what an image of so many bytes holds now under a name, if it is at its place and whole: what lacks something is
/// no state of the volume. Nothing may write to it meanwhile. Blocks.
pub fn freeze(
    image: &File,
    path: &Path,
    bytes: u64,
    (name, made_ms, may_copy): (&SnapshotName, u64, bool),
) -> Result<Frozen, Errno> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => Errno(libc::EEXIST),
        _ => presence::plain(Errno::from(&error)),
    };
    image.sync_all().map_err(failed)?;
    presence::check(image, path, bytes)?;
    let making = Making::begin(path, name, made_ms).map_err(failed)?;
    match share(image, &making.file) {
        Ok(()) if presence::is_cut(&making.file, bytes) => Err(CUT),
        Ok(()) => {
            making.finish().map_err(failed)?;
            Ok(Frozen::Made)
        }
        Err(errno) if is_unshareable(errno) && may_copy => {
            let found = image.metadata().map_err(failed)?;
            if found.len() < bytes {
                return Err(CUT);
            }
            Ok(Frozen::Copy(making, Box::new(found)))
        }
        Err(errno) => Err(presence::plain(errno)),
    }
}

/// Delete a snapshot. Blocks.
pub fn forget(image: &Path, name: &SnapshotName) -> Result<(), Errno> {
    let directory = directory_of(image);
    let removed = fs::remove_file(directory.join(name.as_str()));
    removed
        .and_then(|()| sync_directory(&directory))
        .map_err(|error| Errno::from(&error))?;
    // It stays while something else is in it.
    let _ = fs::remove_dir(&directory);
    Ok(())
}

/// What stands against a snapshot, if it was refused and has not failed.
pub fn refusal(errno: Errno) -> Option<SnapshotError> {
    match errno.0 {
        libc::EEXIST => Some(SnapshotError::Exists),
        libc::ENOENT => Some(SnapshotError::NotFound),
        _ => None,
    }
}

impl ImagePath {
    /// The place of a URL of this kind; filters are left out.
    fn of(url: &str) -> Result<Self, BackendError> {
        let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let given = Given { url, place };
        if scheme != super::SCHEME.name {
            return Err(given.refuse("it must be a file, file:PATH").into());
        }
        Ok(super::parse_place(&given, &mut OptionList::parse(query)?)?)
    }

    fn snapshots(&self) -> io::Result<Vec<StoredSnapshot>> {
        let mut snapshots = Vec::new();
        let entries = match fs::read_dir(directory_of(&self.path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(snapshots),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if name.starts_with('.') || !entry.file_type()?.is_file() {
                continue;
            }
            let found = match entry.metadata() {
                // It was deleted since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                found => found?,
            };
            let made = found.modified()?.duration_since(UNIX_EPOCH);
            snapshots.push(StoredSnapshot {
                name,
                made_ms: made.map_or(0, |made| made.as_millis() as u64),
                clones: Vec::new(),
                hindrance: None,
            });
        }
        snapshots.sort_unstable_by(|a, b| (a.made_ms, &a.name).cmp(&(b.made_ms, &b.name)));
        Ok(snapshots)
    }

    /// Whether a file beside it could share its data.
    fn can_share(&self) -> io::Result<bool> {
        let Some(image) = open_to_look(&self.path)? else {
            return Ok(false);
        };
        let real = fs::canonicalize(&self.path)?;
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).custom_flags(libc::O_TMPFILE);
        match options.open(real.parent().unwrap_or(Path::new("/"))) {
            Ok(probe) => Ok(share_beginning(&image, &probe).is_ok()),
            // A file system without such files hardly has reflinks.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn begin_clone(&self, parent: &Path, snapshot: &Path) -> Result<(File, PathBuf), BackendError> {
        let here = self.path.display();
        if fs::symlink_metadata(&self.path).is_ok() {
            return Err(BackendError::Refused(format!(
                "{here}: there is something already: name a place where nothing is"
            )));
        }
        if !snapshot.is_file() {
            return Err(BackendError::Refused(format!(
                "{}: its snapshot {} does not exist",
                parent.display(),
                snapshot.display()
            )));
        }
        let temporary = with_suffix(&self.path, MAKING_SUFFIX);
        let at = |what| move |error| DeviceError::io(what, &self.path, error);
        let lock = |file: &File| -> Result<(), BackendError> {
            let locked = Opened {
                file: file.try_clone().map_err(at("make"))?.into(),
                path: temporary.clone(),
                bytes: 0,
                block_device: false,
                direct_align: None,
                may_wait: false,
            };
            Ok(device::lock(&locked, 0, 0)?)
        };
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).mode(0o600);
        match options.open(&temporary) {
            // One that nobody makes any more was left by a crash; it may be the file of an image by now,
            // under a second name.
            Ok(left) => {
                lock(&left)?;
                fs::remove_file(&temporary).map_err(at("remove what is left of"))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at("make")(error).into()),
        }
        let file = options.create_new(true).open(&temporary);
        let file = file.map_err(at("make"))?;
        lock(&file)?;
        Ok((file, temporary))
    }

    fn fill_clone(
        &self,
        snapshot: &Path,
        to: &File,
        copying: &Copying,
    ) -> Result<(), BackendError> {
        let (here, snapshot) = (self.path.display(), snapshot.to_owned());
        let from = File::open(&snapshot).map_err(|e| DeviceError::io("open", &snapshot, e))?;
        match share(&from, to) {
            Ok(()) => {
                lineage::mark(to, &from, &snapshot);
                return Ok(());
            }
            Err(errno) if !is_unshareable(errno) => {
                let why = format!(
                    "{here}: sharing the data of {}: {errno}",
                    snapshot.display()
                );
                return Err(BackendError::Refused(why));
            }
            Err(_) if !copying.is_allowed() => {
                return Err(BackendError::Refused(format!(
                    "{here}: it cannot share data with {}, being on another file system or on one without \
                     reflinks: name a place beside it, or say --copy",
                    snapshot.display()
                )));
            }
            Err(_) => {}
        }
        copy_all(&from, to, copying).map_err(|errno| match errno.0 {
            libc::ECANCELED => BackendError::Refused(format!(
                "{here}: the copy was cancelled, and nothing is left of it"
            )),
            _ => BackendError::Refused(format!("{here}: copying {}: {errno}", snapshot.display())),
        })
    }
}

impl SnapshotStore for ImagePath {
    fn kept(&self) -> Result<Option<StoredSnapshots>, BackendError> {
        let at = |error| DeviceError::io("list the snapshots of", &self.path, error);
        let found = match fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            found => found.map_err(at)?,
        };
        if !found.is_file() {
            return Err(BackendError::Refused(format!(
                "{} is a block device, which has no snapshots here: flush the volume and snapshot the device \
                 itself (LVM, the array), or keep the volume in a file",
                self.path.display()
            )));
        }
        Ok(Some(StoredSnapshots {
            identity: self.name(),
            snapshots: self.snapshots().map_err(at)?,
            ..StoredSnapshots::default()
        }))
    }

    fn clone_from(
        &self,
        origin: &CloneOrigin<'_>,
        copying: &Copying,
    ) -> Result<Found, BackendError> {
        let parent = Self::of(origin.url)?.path;
        let snapshot = directory_of(&parent).join(origin.snapshot.as_str());
        let (file, temporary) = self.begin_clone(&parent, &snapshot)?;
        let filled = self.fill_clone(&snapshot, &file, copying);
        let made = filled.and_then(|()| {
            let named = file
                .sync_all()
                .and_then(|()| name_it(&temporary, &self.path));
            named.map_err(|error| DeviceError::io("make", &self.path, error).into())
        });
        if let Err(error) = made {
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        let found = file.metadata();
        let found = found.map_err(|e| DeviceError::io("measure", &self.path, e))?;
        Ok(Found {
            bytes: found.len(),
            partly: false,
        })
    }

    fn copy_bytes(&self) -> Result<u64, BackendError> {
        let at = |error| DeviceError::io("look at", &self.path, error);
        if self.can_share().map_err(at)? {
            return Ok(0);
        }
        let found = fs::metadata(&self.path).map_err(at)?;
        // What is allocated by now says little: destage goes before.
        Ok(found.len().max(1))
    }

    fn snapshot_url(&self, url: &str, snapshot: &str) -> Option<String> {
        let place = file_url(&directory_of(&self.path).join(snapshot));
        let options = url
            .split_once('?')
            .map(|(_, options)| format!("?{options}"));
        Some(format!("{place}{}", options.unwrap_or_default()))
    }
}

/// The text of a path, for an attribute.
pub fn path_bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// Back again.
pub fn path_from(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url::BackendUrl;

    #[test]
    fn snapshot_url_names_the_file_of_the_snapshot() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("an image?100%");
        fs::write(&image, "").unwrap();
        let url = format!("{}?direct=off", file_url(&image));
        let place = BackendUrl::parse(&url).unwrap().place;
        let found = place
            .snapshot_store()
            .unwrap()
            .snapshot_url(&url, "s")
            .unwrap();
        assert!(found.ends_with("?direct=off"), "{found}");
        let over = BackendUrl::parse(&found).unwrap().place;
        assert_eq!(over.path(), Some(&*directory_of(&image).join("s")));
        assert!(over.is_read_only());
    }
}
