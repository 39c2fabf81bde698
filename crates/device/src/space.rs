//! The space that a region of a file has: what of it is taken, more of it, less of it.
//!
//! Taken is what was written: blocks that a file system has only set aside are a hole to whoever asks it for holes, and
//! so they are here, since their first durable write would cost more.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use hdcs_core::base::limits::{BLOCK_BYTES, LOG_BYTES_MIN};

use crate::create::zero;

/// So much is zeroed before it is asked whether that is still wanted.
const STEP_BYTES: u64 = 1 << 20;

/// Whether the files in a directory may have holes and be given some, and their file system tells where. Blocks.
pub fn has_holes(directory: &Path) -> bool {
    const BYTES: u64 = 1 << 20;
    let look = || -> io::Result<bool> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE)
            .mode(0o600)
            .open(directory)?;
        // Zeroes must not be a hole either.
        file.write_all_at(&[0; BLOCK_BYTES], 0)?;
        file.set_len(BYTES)?;
        file.sync_data()?;
        let hole = first_hole(&file)?;
        give_back(&file, 0, BYTES)?;
        Ok(hole >= BLOCK_BYTES as u64 && hole < BYTES)
    };
    look().unwrap_or(false)
}

fn first_hole(file: &File) -> io::Result<u64> {
    // SAFETY: a system call on a descriptor that is held.
    let found = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_HOLE) };
    if found < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(found.unsigned_abs())
}

/// How much of a write log of so many bytes is taken, from its beginning on. All of it where that cannot be told, or where
/// it is less than any log has: it was copied without its zeroes.
pub fn prepared_bytes(file: &File, bytes: u64) -> u64 {
    let block = BLOCK_BYTES as u64;
    match first_hole(file) {
        Ok(hole) if hole >= LOG_BYTES_MIN && hole < bytes => hole / block * block,
        _ => bytes,
    }
}

/// Take the space of a region from `from` to `to`, write zeroes to it, and make that durable. Blocks. What was there is
/// lost. If it fails, the region has no more space than before. So it does, as interrupted, soon after everybody else has
/// let go of the file: who opens it next waits for its lock.
pub fn prepare(file: &Arc<File>, from: u64, to: u64) -> io::Result<()> {
    let own = description_of_its_own(file)?;
    let prepared = take(&own, from, to, &|| Arc::strong_count(file) == 1);
    if prepared.is_err() {
        // The first error is the one that matters.
        let _ = give_back(&own, from, to);
    }
    prepared
}

/// The same file, opened once more. What went wrong with writes that waited in memory is told once to each description: a
/// sync here must not take that away from the log's own.
fn description_of_its_own(file: &File) -> io::Result<File> {
    // SAFETY: a system call on a descriptor that is held.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    OpenOptions::new()
        .write(true)
        .custom_flags(flags & libc::O_DIRECT)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn take(file: &File, from: u64, to: u64, is_left_alone: &dyn Fn() -> bool) -> io::Result<()> {
    let (offset, bytes) = (from.cast_signed(), (to - from).cast_signed());
    // All at once: refused at once if it does not fit, and in few extents if it does.
    // SAFETY: a system call on a descriptor that is held.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, offset, bytes) } < 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EOPNOTSUPP) {
            return Err(error);
        }
    }
    let mut at = from;
    while at < to {
        if is_left_alone() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let step = STEP_BYTES.min(to - at);
        zero(file, at, step, &mut |_| ())?;
        at += step;
    }
    file.sync_data()
}

/// Make a hole of a region from `from` to `to`. Blocks.
pub fn give_back(file: &File, from: u64, to: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (offset, bytes) = (from.cast_signed(), (to - from).cast_signed());
    // SAFETY: a system call on a descriptor that is held.
    if unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, bytes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::DeviceRegion;
    use crate::create::{create_region, create_region_with};
    use crate::file::Device;

    const LEAST: u64 = LOG_BYTES_MIN;

    fn taken(file: &File) -> u64 {
        file.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn region_grows_and_gives_back() {
        let directory = tempfile::tempdir().unwrap();
        if !has_holes(directory.path()) {
            return;
        }
        let path = directory.path().join("log");
        create_region_with(&path, 4 * LEAST, LEAST, &mut |_| ()).unwrap();
        let open = OpenOptions::new().read(true).write(true).open(&path);
        let file = Arc::new(open.unwrap());
        let log = Arc::clone(&file);
        assert_eq!(file.metadata().unwrap().len(), 4 * LEAST);
        assert_eq!(prepared_bytes(&file, 4 * LEAST), LEAST);
        file.write_all_at(&[7; 8192], LEAST - 8192).unwrap();
        prepare(&file, LEAST, 3 * LEAST).unwrap();
        assert_eq!(prepared_bytes(&file, 4 * LEAST), 3 * LEAST);
        assert!(taken(&file) >= 3 * LEAST && taken(&file) < 4 * LEAST);
        // Of a piece that is not finished nothing stays.
        drop(log);
        let stopped = prepare(&file, 3 * LEAST, 4 * LEAST).unwrap_err();
        assert_eq!(stopped.kind(), io::ErrorKind::Interrupted);
        assert_eq!(prepared_bytes(&file, 4 * LEAST), 3 * LEAST);
        give_back(&file, LEAST, 4 * LEAST).unwrap();
        assert_eq!(prepared_bytes(&file, 4 * LEAST), LEAST);
        assert!(taken(&file) < 2 * LEAST);
        let mut kept = [0; 8192];
        file.read_exact_at(&mut kept, LEAST - 8192).unwrap();
        assert_eq!(kept, [7; 8192]);
    }

    #[test]
    fn opening_takes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        if !has_holes(directory.path()) {
            return;
        }
        let path = directory.path().join("log");
        let bytes = 2 * LEAST;
        create_region_with(&path, bytes, LEAST, &mut |_| ()).unwrap();
        let before = taken(&File::open(&path).unwrap());
        let region = DeviceRegion {
            path: path.clone(),
            offset: 0,
            bytes,
        };
        // It measures how writes are made durable.
        let device = Device::open(&region, None).unwrap();
        assert_eq!(device.prepared_bytes(), LEAST);
        drop(device);
        assert_eq!(taken(&File::open(&path).unwrap()), before);
    }

    #[test]
    fn region_without_holes_and_one_that_lost_its_zeroes_are_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        create_region(&path, LEAST + (1 << 20), &mut |_| ()).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(prepared_bytes(&file, LEAST + (1 << 20)), LEAST + (1 << 20));
        let sparse = directory.path().join("sparse");
        let file = File::create(&sparse).unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        file.set_len(2 * LEAST).unwrap();
        assert_eq!(prepared_bytes(&file, 2 * LEAST), 2 * LEAST);
    }
}
