//! How a write is made durable, and which way is faster on a device.
//!
//! Both calls end in a flush of the device's volatile cache or a write that bypasses it; which is cheaper depends on the
//! device and the file system. So it is measured when a region is opened: through an io_uring, one write at a time and
//! several at once, as the log is used. Later measurements are those of the log's own writes (the core's `DurableWays`).
//! A measurement writes back what it has just read, so that a crash in the middle harms nothing.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::fs::{File, read_to_string};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

pub use hdcs_core::base::io::Durability;
use hdcs_core::base::limits::{BLOCK_BYTES, SPANS_IN_FLIGHT_MAX};
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};

use super::Errno;

/// Rounds of each kind that are timed, and after how long there are no more of them, once there was one of each.
const ROUNDS: usize = 8;
const TIME_MAX: Duration = Duration::from_millis(200);
/// Writes at once in the rounds with several, if the region has as many blocks.
const DEPTH: usize = 4;
const _: () = assert!(DEPTH <= SPANS_IN_FLIGHT_MAX);

/// How much faster several `fdatasync` must be to be chosen: the ring hands each to a worker thread, which costs context
/// switches that matter when the processor is busy, and adds a second operation.
const FDATASYNC_FACTOR: u32 = 2;

/// What durable writes of 4 KiB take by one call: medians.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// One alone.
    pub alone: Duration,
    /// Several at once, until all are durable.
    pub together: Duration,
}

/// What a probe found.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// `RWF_DSYNC`; `None` if the file refuses it.
    pub dsync: Option<Times>,
    /// Write and `fdatasync`.
    pub fdatasync: Times,
}

impl Probe {
    /// The faster way.
    pub fn faster(&self) -> Durability {
        let Some(dsync) = self.dsync else {
            return Durability::Fdatasync;
        };
        let fdatasync = self.fdatasync;
        let is_faster = fdatasync.together * FDATASYNC_FACTOR < dsync.together
            && fdatasync.alone <= dsync.alone;
        if is_faster {
            Durability::Fdatasync
        } else {
            Durability::Dsync
        }
    }
}

/// Time both calls on the last blocks of the `bytes` before `end`, whose content stays what it is.
pub fn probe(fd: RawFd, end: u64, bytes: u64) -> Result<Probe, Errno> {
    let depth = (bytes / BLOCK_BYTES as u64).clamp(1, DEPTH as u64) as usize;
    let mut rounds = Rounds::new(fd, end - (depth * BLOCK_BYTES) as u64, depth)?;
    // By call, and by whether one is alone.
    let mut times = [const { Vec::new() }; 4];
    let (started, mut has_dsync) = (Instant::now(), true);
    for round in 0..ROUNDS {
        if round > 0 && started.elapsed() > TIME_MAX {
            break;
        }
        // Alternating, so that a slow moment of the device hurts both.
        for (at, depth) in [(0, 1), (2, depth)] {
            times[at].push(rounds.run(Durability::Fdatasync, depth)?);
            if has_dsync {
                match rounds.run(Durability::Dsync, depth) {
                    Ok(time) => times[at + 1].push(time),
                    Err(_) => has_dsync = false,
                }
            }
        }
    }
    let [mut alone, mut dsync_alone, mut together, mut dsync_together] = times;
    let times = |alone: &mut [Duration], together: &mut [Duration]| {
        let (alone, together) = (median(alone)?, median(together)?);
        Some(Times { alone, together })
    };
    let dsync = times(&mut dsync_alone, &mut dsync_together).filter(|_| has_dsync);
    let fdatasync = times(&mut alone, &mut together).expect("rounds were made");
    Ok(Probe { dsync, fdatasync })
}

/// Read the block at `offset` and write it back durably.
pub fn prove(fd: RawFd, offset: u64) -> Result<(), Errno> {
    Rounds::new(fd, offset, 1)?.run(Durability::Fdatasync, 1)?;
    Ok(())
}

fn median(times: &mut [Duration]) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

/// Writes of blocks that were read before.
struct Rounds {
    // Ended before its blocks are freed: nothing is under way between rounds.
    ring: IoUring,
    blocks: Vec<Block>,
    fd: RawFd,
    offset: u64,
}

impl Rounds {
    fn new(fd: RawFd, offset: u64, depth: usize) -> Result<Self, Errno> {
        let mut blocks: Vec<Block> = (0..depth).map(|_| Block::new()).collect();
        for (block, at) in blocks.iter_mut().zip((offset..).step_by(BLOCK_BYTES)) {
            block.read(fd, at)?;
        }
        let ring = IoUring::new(2 * DEPTH as u32).map_err(|error| Errno::from(&error))?;
        Ok(Self {
            ring,
            blocks,
            fd,
            offset,
        })
    }

    /// How long so many writes take, by such a call each.
    fn run(&mut self, call: Durability, depth: usize) -> Result<Duration, Errno> {
        let started = Instant::now();
        let mut operations = 0;
        for index in 0..depth {
            let at = self.offset + (index * BLOCK_BYTES) as u64;
            let write = opcode::Write::new(Fd(self.fd), self.blocks[index].0, BLOCK_BYTES as u32);
            let write = write.offset(at);
            match call {
                Durability::Dsync => self.push(&write.rw_flags(libc::RWF_DSYNC).build()),
                Durability::Fdatasync => {
                    // The second begins when the first has ended well.
                    self.push(&write.build().flags(squeue::Flags::IO_LINK));
                    let sync = opcode::Fsync::new(Fd(self.fd)).flags(FsyncFlags::DATASYNC);
                    self.push(&sync.build().user_data(1));
                }
            }
            operations += match call {
                Durability::Dsync => 1,
                Durability::Fdatasync => 2,
            };
        }
        let mut result = Ok(());
        while operations > 0 {
            match self.ring.submit_and_wait(operations) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => {
                    // What is under way may still read its blocks.
                    std::mem::forget(std::mem::take(&mut self.blocks));
                    return Err(Errno::from(&error));
                }
            }
            for entry in self.ring.completion() {
                operations -= 1;
                let expected = if entry.user_data() == 1 {
                    0
                } else {
                    BLOCK_BYTES as i32
                };
                if entry.result() != expected && result.is_ok() {
                    let errno = entry.result().checked_neg().filter(|errno| *errno > 0);
                    result = Err(Errno(errno.unwrap_or(libc::EIO)));
                }
            }
        }
        result.map(|()| started.elapsed())
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the block is not freed before the operation has ended.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("the ring has room for all of a round");
    }
}

/// What a durable write means to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceCache {
    /// It has no volatile cache: a write is durable when it ends.
    None,
    /// It has one, and writes that bypass it (FUA).
    Fua,
    /// It has one that has to be flushed after a write.
    Flush,
    /// The kernel does not say: there is no device of its own below the file.
    #[default]
    Unknown,
}

impl fmt::Display for DeviceCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no volatile cache",
            Self::Fua => "FUA",
            Self::Flush => "flush, no FUA",
            Self::Unknown => "unknown",
        })
    }
}

/// The number of the block device that the file is, or of the file system that it lies on.
pub(crate) fn device_number(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    Ok(if metadata.file_type().is_block_device() {
        metadata.rdev()
    } else {
        metadata.dev()
    })
}

impl DeviceCache {
    /// Of the device that the file is, or lies on.
    pub fn of(file: &File) -> Self {
        let Ok(number) = device_number(file) else {
            return Self::Unknown;
        };
        let (major, minor) = (libc::major(number), libc::minor(number));
        Self::read(Path::new(&format!("/sys/dev/block/{major}:{minor}")))
    }

    fn read(device: &Path) -> Self {
        // A partition has its queue beside it.
        let attribute = |name: &str| {
            let own = read_to_string(device.join("queue").join(name));
            own.or_else(|_| read_to_string(device.join("../queue").join(name)))
        };
        let (Ok(cache), Ok(fua)) = (attribute("write_cache"), attribute("fua")) else {
            return Self::Unknown;
        };
        match (cache.trim(), fua.trim()) {
            ("write through", _) => Self::None,
            (_, "1") => Self::Fua,
            _ => Self::Flush,
        }
    }
}

/// One aligned block of memory.
struct Block(*mut u8);

impl Block {
    const LAYOUT: Layout = match Layout::from_size_align(BLOCK_BYTES, BLOCK_BYTES) {
        Ok(layout) => layout,
        Err(_) => panic!("a block is its own alignment"),
    };

    fn new() -> Self {
        // SAFETY: the layout's size is not zero.
        let address = unsafe { alloc_zeroed(Self::LAYOUT) };
        if address.is_null() {
            std::alloc::handle_alloc_error(Self::LAYOUT);
        }
        Self(address)
    }

    fn read(&mut self, fd: RawFd, offset: u64) -> Result<(), Errno> {
        let vector = libc::iovec {
            iov_base: self.0.cast(),
            iov_len: BLOCK_BYTES,
        };
        // SAFETY: the vector is the block, which lives until this returns.
        match unsafe { libc::preadv(fd, &raw const vector, 1, offset.cast_signed()) } {
            -1 => Err(Errno::last()),
            moved if moved as usize == BLOCK_BYTES => Ok(()),
            _ => Err(Errno(libc::EIO)),
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.0, Self::LAYOUT) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn micros(alone: u64, together: u64) -> Times {
        Times {
            alone: Duration::from_micros(alone),
            together: Duration::from_micros(together),
        }
    }

    fn faster(dsync: Option<Times>, fdatasync: Times) -> Durability {
        Probe { dsync, fdatasync }.faster()
    }

    #[test]
    fn probe_chooses_by_what_several_writes_at_once_take() {
        let dsync = Some(micros(100, 400));
        assert_eq!(faster(dsync, micros(90, 210)), Durability::Dsync);
        assert_eq!(faster(dsync, micros(100, 190)), Durability::Fdatasync);
        // One that is alone is not to suffer.
        assert_eq!(faster(dsync, micros(110, 190)), Durability::Dsync);
        assert_eq!(faster(None, micros(900, 900)), Durability::Fdatasync);
    }

    #[test]
    fn probe_leaves_what_it_writes_as_it_was() {
        let file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..6 * BLOCK_BYTES).map(|at| (at / 512) as u8).collect();
        file.write_all_at(&content, 0).unwrap();
        for bytes in [content.len(), 2 * BLOCK_BYTES, BLOCK_BYTES] {
            let (end, bytes) = (content.len() as u64, bytes as u64);
            let probe = probe(file.as_raw_fd(), end, bytes).unwrap();
            assert!(probe.fdatasync.together > Duration::ZERO);
        }
        prove(file.as_raw_fd(), 0).unwrap();
        let mut read = vec![0; content.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, content);
        assert_eq!(file.metadata().unwrap().len(), content.len() as u64);
    }

    #[test]
    fn probe_of_what_cannot_be_written_fails() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8 * BLOCK_BYTES as u64).unwrap();
        let read_only = File::open(file.path()).unwrap();
        let end = 8 * BLOCK_BYTES as u64;
        assert!(probe(read_only.as_raw_fd(), end, end).is_err());
        assert!(prove(read_only.as_raw_fd(), 0).is_err());
    }

    #[test]
    fn device_cache_is_what_the_kernel_says_of_the_device_or_of_the_whole_of_a_partition() {
        let directory = tempfile::tempdir().unwrap();
        let device = directory.path();
        let partition = device.join("partition");
        std::fs::create_dir_all(device.join("queue")).unwrap();
        std::fs::create_dir(&partition).unwrap();
        assert_eq!(DeviceCache::read(device), DeviceCache::Unknown);
        for (cache, fua, found) in [
            ("write back\n", "0\n", DeviceCache::Flush),
            ("write back\n", "1\n", DeviceCache::Fua),
            ("write through\n", "0\n", DeviceCache::None),
        ] {
            std::fs::write(device.join("queue/write_cache"), cache).unwrap();
            std::fs::write(device.join("queue/fua"), fua).unwrap();
            assert_eq!(DeviceCache::read(device), found);
            assert_eq!(DeviceCache::read(&partition), found);
        }
    }
}
