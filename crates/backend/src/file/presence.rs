//! Whether an image that is open is what lies at its place, and whole.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};

use hdcs_device::Errno;
use hdcs_device::file::{self as device, DeviceError, Direct, Opened};

use crate::{Absent, BackendError, Held};

/// That an image is too short.
pub const CUT: Errno = Errno(libc::ENODATA);
/// That an image was removed or replaced.
pub const GONE: Errno = Errno(libc::ESTALE);
/// An image that is replaced each time that it is opened is given up after so many.
const OPEN_TRIES_MAX: usize = 8;

/// Why an open image is not what its volume needs, as whoever asks is told.
#[derive(Debug, Default)]
pub struct Spoilt(AtomicI32);

impl Spoilt {
    /// Remember it; `None` if all is well.
    pub fn set(&self, why: Option<Errno>) {
        self.0.store(why.map_or(0, |why| why.0), Ordering::Relaxed);
    }

    /// What is wrong, and what to do.
    pub fn words(&self) -> Option<&'static str> {
        match Errno(self.0.load(Ordering::Relaxed)) {
            Errno(0) => None,
            why => Some(words(why)),
        }
    }
}

/// The error of a call that does not look whether an image is there: a disk that cannot be read says [`CUT`], too.
pub fn plain(errno: Errno) -> Errno {
    match errno {
        CUT | GONE => Errno(libc::EIO),
        errno => errno,
    }
}

/// What is wrong with an open image, and what to do.
pub fn words(why: Errno) -> &'static str {
    match why {
        CUT => {
            "the image was cut while its volume is open: nothing more is written to it; put it right, then restart \
             the node"
        }
        GONE => {
            "the image was removed or replaced while its volume is open: no flush succeeds until that file is back \
             in its place"
        }
        _ => {
            "whether the image is still in its place cannot be seen: no flush succeeds until it can"
        }
    }
}

/// Whether an open image is what lies at its place, with so many bytes at least. Blocks.
pub fn check(file: &File, path: &Path, bytes: u64) -> Result<(), Errno> {
    let own = file.metadata().map_err(|error| Errno::from(&error))?;
    let found = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(GONE),
        found => found.map_err(|error| Errno::from(&error)),
    }?;
    if (own.dev(), own.ino()) != (found.dev(), found.ino()) {
        return Err(GONE);
    }
    if own.len() < bytes {
        return Err(CUT);
    }
    Ok(())
}

/// Whether an image is shorter than it should be.
pub fn is_cut(file: &File, bytes: u64) -> bool {
    file.metadata().is_ok_and(|found| found.len() < bytes)
}

/// Open what lies at a path to look at it, if it is a file or block device: another kind may never open.
pub fn open_to_look(path: &Path) -> io::Result<Option<File>> {
    let found = fs::metadata(path)?;
    if !found.is_file() && !found.file_type().is_block_device() {
        return Ok(None);
    }
    // It may be a pipe by now.
    let mut options = OpenOptions::new();
    let options = options.read(true).custom_flags(libc::O_NONBLOCK);
    options.open(path).map(Some)
}

/// What is open at a path, if anybody has locked it.
pub fn held(path: &Path) -> Option<Held> {
    let file = open_to_look(path).ok().flatten()?;
    let is_locked = device::is_locked(&file);
    is_locked.then(|| of(&file).ok()).flatten()
}

/// Which file this is.
pub fn of(file: &File) -> io::Result<Held> {
    let found = file.metadata()?;
    Ok(Held::File {
        device: found.dev(),
        inode: found.ino(),
    })
}

/// Open and lock an image, or make it if it may be made. Blocks.
pub fn open(
    path: &Path,
    bytes: u64,
    direct: Direct,
    absent: Absent,
) -> Result<Opened, BackendError> {
    let open = |_| open_present(path, bytes, direct, absent).transpose();
    (0..OPEN_TRIES_MAX).find_map(open).unwrap_or_else(|| {
        let path = path.display();
        let why = format!("{path}: it was removed or replaced each time that it was opened");
        Err(BackendError::Refused(why))
    })
}

/// The same once; `None`: what was opened is not what lies there any more.
fn open_present(
    path: &Path,
    bytes: u64,
    direct: Direct,
    absent: Absent,
) -> Result<Option<Opened>, BackendError> {
    let exists = || BackendError::Exists(path.display().to_string());
    let new = match fs::metadata(path) {
        Ok(_) if absent == Absent::CreateNew => return Err(exists()),
        Ok(_) => false,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let directory = path.parent().unwrap_or(Path::new("."));
            if let Err(error) = fs::metadata(directory) {
                return Err(BackendError::Unreachable(format!(
                    "{}: {error}: is its file system mounted?",
                    directory.display()
                )));
            }
            if absent == Absent::Refuse {
                return Err(BackendError::Absent(path.display().to_string()));
            }
            true
        }
        Err(error) => return Err(DeviceError::io("open", path, error).into()),
    };
    if new {
        create(path, bytes).map_err(|error| match error {
            DeviceError::Exists(_) if absent == Absent::CreateNew => exists(),
            error => error.into(),
        })?;
    }
    let mut opened = match device::open_file(path, direct) {
        Err(DeviceError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        opened => opened?,
    };
    // Whoever has it locked may remove or replace it, or change its size, and let it go only then.
    device::lock(&opened, 0, 0)?;
    let looked = |error| DeviceError::io("look at", path, error);
    match check(&opened.file, path, 0) {
        Err(GONE) => return Ok(None),
        checked => checked.map_err(|errno| looked(io::Error::from_raw_os_error(errno.0)))?,
    }
    if !opened.block_device {
        opened.bytes = opened.file.metadata().map_err(looked)?.len();
    }
    Ok(Some(opened))
}

fn create(path: &Path, bytes: u64) -> Result<(), DeviceError> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => DeviceError::Exists(path.to_owned()),
            _ => DeviceError::io("create", path, error),
        })?;
    let sized = file.set_len(bytes).and_then(|()| file.sync_all());
    if let Err(error) = sized {
        // The error that matters is the first one.
        let _ = fs::remove_file(path);
        return Err(DeviceError::io("size", path, error));
    }
    Ok(())
}

/// Remove an image that nobody has open, if it is what was held. Blocks.
pub fn remove(path: &Path, was: Held) -> Result<(), BackendError> {
    let at = |error| DeviceError::io("remove", path, error);
    // Somebody else may have opened it since its volume was closed, or put another file in its place.
    let opened = device::open_file(path, Direct::Off)?;
    device::lock(&opened, 0, 0)?;
    let is_it = was == Held::Unnamed || of(&opened.file).map_err(at)? == was;
    if !is_it || check(&opened.file, path, 0).is_err() {
        return Err(BackendError::Refused(format!(
            "{}: it is not the image that the volume had open",
            path.display()
        )));
    }
    Ok(fs::remove_file(path).map_err(at)?)
}
