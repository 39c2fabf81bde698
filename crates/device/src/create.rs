//! Making regions that are cheap to write durably.
//!
//! A block that was allocated but never written makes its first durable write pay for a change
//! of metadata too. So every byte of a new region is written once, when nobody waits for it.
//!
//! Failure: a file that could not be made whole is removed again.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use hdcs_core::base::buf::Arena;
use hdcs_core::base::limits::BLOCK_BYTES;

use super::file::{self, DeviceError, Direct};
use crate::DeviceRegion;

/// Bytes in one write of zeroes.
const PIECE_BYTES: usize = 1 << 20;

/// Make a file of `bytes` zeroes, every one of them written; `progress` gets the bytes written so
/// far. The file is readable and writable by its owner alone and durable when this returns.
pub fn create_region(
    path: &Path,
    bytes: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<(), DeviceError> {
    create_region_with(path, bytes, bytes, progress)
}

/// The same, but only the first `taken` bytes are written, and the rest is a hole.
pub fn create_region_with(
    path: &Path,
    bytes: u64,
    taken: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<(), DeviceError> {
    let made = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    let file = match made {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(DeviceError::Exists(path.to_path_buf()));
        }
        Err(error) => return Err(DeviceError::io("create", path, error)),
    };
    let filled = file
        .set_len(bytes)
        .and_then(|()| fill_new(path, &file, taken, progress));
    drop(file);
    if let Err(error) = filled {
        // The error that matters is the first one; what remains is named in it.
        let _ = std::fs::remove_file(path);
        return Err(match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => DeviceError::NoSpace {
                path: path.to_path_buf(),
                bytes: taken,
            },
            _ => DeviceError::io("write", path, error),
        });
    }
    Ok(())
}

fn fill_new(path: &Path, file: &File, bytes: u64, progress: &mut dyn FnMut(u64)) -> io::Result<()> {
    // Everything at once: refused at once if it does not fit, and in few extents if it does.
    // SAFETY: a system call on a descriptor that is held.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes.cast_signed()) } < 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EOPNOTSUPP) {
            return Err(error);
        }
    }
    let direct = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path);
    zero(direct.as_ref().unwrap_or(file), 0, bytes, progress)?;
    file.sync_all()?;
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(parent)?.sync_all()
}

/// Write zeroes over a region of an existing file or device. What was there is lost.
pub fn zero_region(
    region: &DeviceRegion,
    progress: &mut dyn FnMut(u64),
) -> Result<(), DeviceError> {
    let path = &region.path;
    let opened = file::open_file(path, Direct::UpTo(4096))?;
    let end = region.offset.saturating_add(region.bytes);
    if opened.bytes < end {
        return Err(DeviceError::TooSmall {
            path: path.clone(),
            has: opened.bytes,
            needs: end,
        });
    }
    file::lock(&opened, region.offset, region.bytes)?;
    zero(&opened.file, region.offset, region.bytes, progress)
        .and_then(|()| opened.file.sync_all())
        .map_err(|e| DeviceError::io("write", path, e))
}

pub(crate) fn zero(
    file: &File,
    offset: u64,
    bytes: u64,
    progress: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let blocks = PIECE_BYTES / BLOCK_BYTES;
    let zeroes = Arena::new(blocks)
        .claim(0, blocks)
        .expect("a new arena is free");
    let mut done = 0;
    while done < bytes {
        let piece = (bytes - done).min(PIECE_BYTES as u64) as usize;
        match file.write_at(&zeroes[..piece], offset + done) {
            Ok(0) => return Err(io::Error::from_raw_os_error(libc::EIO)),
            Ok(written) => done += written as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        progress(done);
    }
    Ok(())
}
