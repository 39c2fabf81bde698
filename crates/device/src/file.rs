//! A region of a file or block device.
//!
//! Invariants:
//! 1. A region is locked (an open-file-description lock on its bytes) while it is open: no second
//!    opening of overlapping bytes by anybody who locks succeeds, in this process or another.
//! 2. With direct I/O no byte of it is in the page cache on our behalf. Where direct I/O is
//!    refused, everything is buffered; the two are never mixed on one file.
//! 3. No operation reaches beyond the region's end; one that would is a bug, and asserts.
//!
//! Failure: everything that opening can meet is a [`DeviceError`] with the path and what to do.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::io::{DurableWay, Token};
use hdcs_core::base::limits::{BLOCK_BYTES, LOG_READ_TRIES_MAX};
use hdcs_core::format::{LOG_SUPERBLOCKS, LogSuperblock};
use hdcs_core::log::replay::superblocks_hold;
use thiserror::Error;

use super::durability::{self, DeviceCache, Durability};
use super::measurements::{Measurements, Medium};
use super::ring::{Owner, Ring, Target};
use crate::{DeviceRegion, space};

/// Why a file or device could not be used.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// A system call failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// How it failed.
        source: io::Error,
    },
    /// Neither a regular file nor a block device.
    #[error("{} is neither a regular file nor a block device", .0.display())]
    Kind(PathBuf),
    /// It ends before the region does.
    #[error("{} holds {has} bytes, but {needs} are needed; enlarge it or give a larger device", path.display())]
    TooSmall {
        /// The file or device.
        path: PathBuf,
        /// Its size.
        has: u64,
        /// Where the region ends.
        needs: u64,
    },
    /// The device cannot write 4 KiB at a time.
    #[error("{} has blocks of {bytes} bytes; HDCS needs blocks of 4096 bytes or less", path.display())]
    BlockSize {
        /// The device.
        path: PathBuf,
        /// Its logical block.
        bytes: u64,
    },
    /// Somebody has it open.
    #[error("{} is in use by another program or volume; close that first", .0.display())]
    Locked(PathBuf),
    /// It exists already.
    #[error("{} exists already; remove it or choose another path", .0.display())]
    Exists(PathBuf),
    /// The file system is full.
    #[error("{}: no space for {bytes} bytes; free some, or choose a smaller size or another place", path.display())]
    NoSpace {
        /// What was to be made.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// A region does not begin or end at a block.
    #[error("region of {} at byte {offset}, {bytes} bytes: both must be multiples of 4096, and not empty", path.display())]
    Region {
        /// The file or device.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Length.
        bytes: u64,
    },
}

impl DeviceError {
    /// An error of the operating system in the context of a path.
    pub fn io(what: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            what,
            path: path.to_path_buf(),
            source,
        }
    }
}

/// What an opened file is.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The open file.
    pub file: Arc<File>,
    /// Where.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Whether it is a block device.
    pub block_device: bool,
    /// The offset alignment of direct I/O, or `None` where everything is buffered.
    pub direct_align: Option<u64>,
    /// Whether the kernel may wait while it takes an operation on it. See [`Target`].
    pub may_wait: bool,
}

impl Opened {
    /// For transfers.
    pub fn target(&self) -> Target {
        Target {
            fd: self.file.as_raw_fd(),
            may_wait: self.may_wait,
        }
    }
}

/// Whether to try direct I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direct {
    /// If the file allows it at this alignment.
    UpTo(u64),
    /// Not at all.
    Off,
}

/// Open a file or device for reading and writing, with direct I/O if the file allows it.
pub fn open_file(path: &Path, direct: Direct) -> Result<Opened, DeviceError> {
    open_for(path, direct, true)
}

/// The same for reading alone, for which it need not be locked.
pub fn open_to_read(path: &Path, direct: Direct) -> Result<Opened, DeviceError> {
    open_for(path, direct, false)
}

fn open_for(path: &Path, direct: Direct, writes: bool) -> Result<Opened, DeviceError> {
    let open = |flags: i32| {
        OpenOptions::new()
            .read(true)
            .write(writes)
            .custom_flags(flags)
            .open(path)
    };
    let metadata = std::fs::metadata(path).map_err(|e| DeviceError::io("open", path, e))?;
    let kind = metadata.file_type();
    let block_device = kind.is_block_device();
    if !kind.is_file() && !block_device {
        return Err(DeviceError::Kind(path.to_path_buf()));
    }
    let mut direct_align = None;
    let mut opened = None;
    if let Direct::UpTo(limit) = direct {
        match open(libc::O_DIRECT) {
            Ok(file) => {
                let align = direct_alignment(&file, block_device);
                if align.is_some_and(|align| align <= limit) {
                    direct_align = align;
                    opened = Some(file);
                } else if block_device && limit >= BLOCK_BYTES as u64 {
                    let bytes = align.unwrap_or(0);
                    let path = path.to_path_buf();
                    return Err(DeviceError::BlockSize { path, bytes });
                }
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(DeviceError::io("open", path, error)),
        }
        if opened.is_none() {
            tracing::warn!(
                path = %path.display(),
                "direct I/O is not possible here; using the page cache and fdatasync"
            );
        }
    }
    let file = match opened {
        Some(file) => file,
        None => open(0).map_err(|e| DeviceError::io("open", path, e))?,
    };
    let bytes = if block_device {
        device_bytes(&file).map_err(|e| DeviceError::io("measure", path, e))?
    } else {
        metadata.len()
    };
    let may_wait = is_on_fuse(&file);
    Ok(Opened {
        may_wait,
        file: Arc::new(file),
        path: path.to_path_buf(),
        bytes,
        block_device,
        direct_align,
    })
}

/// Whether FUSE serves it, which says to io_uring that it never waits, and does: for the lock of the file while a write
/// is under way, and for its queue (seen with Linux 6.18).
fn is_on_fuse(file: &File) -> bool {
    file_system(file) == Some(libc::FUSE_SUPER_MAGIC)
}

/// Which kind of file system (`statfs(2)`).
fn file_system(file: &File) -> Option<libc::__fsword_t> {
    // SAFETY: all zeroes are a valid value; the call fills it.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `found` lives until the call returns.
    let told = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) };
    (told == 0).then_some(found.f_type)
}

/// How long a lock is waited for. The kernel closes a killed program's files only after their
/// operations in flight have ended, which may be a moment after the program has gone.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// How often it is tried meanwhile.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Lock bytes of a file against every other opening; `bytes` 0 is all that the file may become.
/// Blocks for up to [`LOCK_PATIENCE`] while somebody else holds them.
pub fn lock(opened: &Opened, offset: u64, bytes: u64) -> Result<(), DeviceError> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match try_lock(opened, offset, bytes) {
            Err(DeviceError::Locked(_)) if Instant::now() < deadline => {
                std::thread::sleep(LOCK_PAUSE);
            }
            result => return result,
        }
    }
}

/// Whether another opening has locked any bytes of a file.
pub fn is_locked(file: &File) -> bool {
    // SAFETY: all zeroes is a valid `flock`, which says: from the begin, all that the file may become.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_WRLCK as i16;
    range.l_whence = libc::SEEK_SET as i16;
    // SAFETY: `range` lives until the call returns.
    let told = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    told == 0 && range.l_type != libc::F_UNLCK as i16
}

fn try_lock(opened: &Opened, offset: u64, bytes: u64) -> Result<(), DeviceError> {
    // SAFETY: all zeroes is a valid `flock`.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::F_WRLCK as i16;
    range.l_whence = libc::SEEK_SET as i16;
    range.l_start = offset.cast_signed();
    range.l_len = bytes.cast_signed();
    let fd = opened.file.as_raw_fd();
    // SAFETY: `range` lives until the call returns.
    if unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const range) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EAGAIN) => Err(DeviceError::Locked(opened.path.clone())),
        _ => Err(DeviceError::io("lock", &opened.path, error)),
    }
}

/// The alignment that direct I/O needs in the file, `None` if it cannot be used.
fn direct_alignment(file: &File, block_device: bool) -> Option<u64> {
    // SAFETY: all zeroes is a valid `statx`.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is empty and the buffer lives until the call returns.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut found,
        )
    };
    if result == 0 && found.stx_mask & libc::STATX_DIOALIGN != 0 {
        // Buffers are aligned to a block, or as their range is within one: to a sector at least.
        let memory = u64::from(found.stx_dio_mem_align);
        let offset = u64::from(found.stx_dio_offset_align);
        return (offset > 0).then(|| offset.max(if memory > 512 { memory } else { 0 }));
    }
    if block_device {
        let mut block: libc::c_int = 0;
        // SAFETY: the request writes one int.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::BLKSSZGET, &raw mut block) };
        return (result == 0).then_some(block as u64);
    }
    // A kernel before 6.1 does not tell: whole blocks are the safe assumption.
    Some(BLOCK_BYTES as u64)
}

fn device_bytes(file: &File) -> io::Result<u64> {
    const BLKGETSIZE64: libc::Ioctl = 0x8008_1272;
    let mut bytes: u64 = 0;
    // SAFETY: the request writes one u64.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut bytes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(bytes)
}

/// A region that is open for block I/O: a write log or a cache device.
#[derive(Debug)]
pub struct Device {
    opened: Opened,
    base: u64,
    bytes: u64,
    durability: Durability,
    cache: DeviceCache,
    /// Whether there is another call: it was tried, and does as well.
    has_calls: bool,
}

impl Device {
    /// Open and lock a region. Durability is measured unless it is given. Blocks for some
    /// milliseconds: not for a shard's thread.
    pub fn open(
        region: &DeviceRegion,
        durability: Option<Durability>,
    ) -> Result<Self, DeviceError> {
        let DeviceRegion {
            path,
            offset,
            bytes,
        } = region;
        let block = BLOCK_BYTES as u64;
        let end = offset
            .checked_add(*bytes)
            .filter(|_| offset.is_multiple_of(block) && bytes.is_multiple_of(block) && *bytes > 0);
        let Some(end) = end else {
            return Err(DeviceError::Region {
                path: path.clone(),
                offset: *offset,
                bytes: *bytes,
            });
        };
        let opened = open_file(path, Direct::UpTo(block))?;
        if opened.bytes < end {
            return Err(DeviceError::TooSmall {
                path: path.clone(),
                has: opened.bytes,
                needs: end,
            });
        }
        lock(&opened, *offset, *bytes)?;
        let cache = DeviceCache::of(&opened.file);
        let mut device = Self {
            opened,
            base: *offset,
            bytes: *bytes,
            durability: durability.unwrap_or(Durability::Fdatasync),
            cache,
            has_calls: false,
        };
        if durability.is_none() {
            device.measure_durability(&Measurements::default());
        }
        Ok(device)
    }

    /// Measure how its writes are made durable faster, unless that is known of the device already. Writes back what it
    /// reads. Blocks.
    pub fn measure_durability(&mut self, known: &Measurements) {
        let path = self.opened.path.display();
        // A write into a hole would tell something else, and take space.
        let bytes = self.prepared_bytes();
        let end = self.base + bytes;
        let fd = self.opened.file.as_raw_fd();
        let measure = || durability::probe(fd, end, bytes);
        let found = match self.medium() {
            Ok(medium) => known.of(medium, measure),
            Err(_) => measure().map(|probe| (probe, true)),
        };
        match found {
            Ok((probe, is_new)) => {
                self.durability = probe.faster();
                self.has_calls = probe.dsync.is_some();
                if !is_new {
                    return;
                }
                let micros = |time: Duration| time.as_micros() as u64;
                tracing::info!(
                    %path,
                    chosen = %self.durability,
                    device = %self.cache,
                    dsync_us = probe.dsync.map(|times| micros(times.alone)),
                    dsync_together_us = probe.dsync.map(|times| micros(times.together)),
                    fdatasync_us = micros(probe.fdatasync.alone),
                    fdatasync_together_us = micros(probe.fdatasync.together),
                    "measured durable writes"
                );
            }
            Err(errno) => {
                tracing::warn!(%path, error = %errno, "could not measure durable writes");
                self.durability = Durability::Fdatasync;
                self.has_calls = false;
            }
        }
    }

    /// What it lies on.
    fn medium(&self) -> io::Result<Medium> {
        Ok(Medium {
            device: durability::device_number(&self.opened.file)?,
            is_direct: self.is_direct(),
        })
    }

    /// Make durable what a process before this one has written, whether its writes completed or not: what is read of
    /// that before could be lost with the power after. Blocks.
    pub fn sync(&self) -> Result<(), DeviceError> {
        let synced = self.opened.file.sync_data();
        synced.map_err(|error| DeviceError::io("sync", &self.opened.path, error))
    }

    /// Length of the region.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What the space of a region can be changed through, if it is the whole of a file. Whoever has it keeps the region
    /// locked.
    pub fn resizable(&self) -> Option<&Arc<File>> {
        (self.base == 0 && !self.opened.block_device).then_some(&self.opened.file)
    }

    /// How much of it is taken, from its beginning on; of a device, all. Blocks.
    pub fn prepared_bytes(&self) -> u64 {
        let file = self.resizable();
        file.map_or(self.bytes, |file| space::prepared_bytes(file, self.bytes))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.opened.path
    }

    /// How its writes are made durable.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Whether the other call was measured as well, so that it may be used instead.
    pub fn has_calls(&self) -> bool {
        self.has_calls
    }

    /// What a durable write means to the device.
    pub fn cache(&self) -> DeviceCache {
        self.cache
    }

    /// Whether it bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.opened.direct_align.is_some()
    }

    /// Read the superblocks of a write log from the region; blocks.
    pub fn read_superblocks(
        &self,
    ) -> Result<[[u8; BLOCK_BYTES]; LOG_SUPERBLOCKS as usize], DeviceError> {
        #[repr(align(4096))]
        struct Aligned([u8; BLOCK_BYTES]);
        let mut read = Box::new(Aligned([0; BLOCK_BYTES]));
        let mut blocks = [[0; BLOCK_BYTES]; LOG_SUPERBLOCKS as usize];
        for (index, block) in (0..).zip(&mut blocks) {
            let offset = self.base + LogSuperblock::offset_of(index);
            std::os::unix::fs::FileExt::read_exact_at(&*self.opened.file, &mut read.0, offset)
                .map_err(|e| DeviceError::io("read", &self.opened.path, e))?;
            block.copy_from_slice(&read.0);
        }
        Ok(blocks)
    }

    /// The same, and again while what was read does not hold; blocks.
    pub fn read_superblocks_again(
        &self,
    ) -> Result<[[u8; BLOCK_BYTES]; LOG_SUPERBLOCKS as usize], DeviceError> {
        let mut found = self.read_superblocks()?;
        for _ in 1..LOG_READ_TRIES_MAX {
            if superblocks_hold(&found.each_ref().map(|block| &block[..])) {
                break;
            }
            found = self.read_superblocks()?;
        }
        Ok(found)
    }

    /// Fill `buf`, which is as aligned as those of a pool, from `offset` of the region; blocks.
    pub fn read_now(&self, offset: u64, buf: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, buf.len());
        let read =
            std::os::unix::fs::FileExt::read_exact_at(&*self.opened.file, buf, self.base + offset);
        read.map_err(|error| DeviceError::io("read", &self.opened.path, error))
    }

    /// Read a block and write it back durably; blocks. A device that cannot do that is of no use.
    pub fn prove(&self) -> Result<(), DeviceError> {
        let last = self.base + self.bytes - BLOCK_BYTES as u64;
        let proof = durability::prove(self.opened.file.as_raw_fd(), last);
        proof.map_err(|errno| {
            let source = io::Error::from_raw_os_error(errno.0);
            DeviceError::io("write durably to", &self.opened.path, source)
        })
    }

    /// Fill `buf` from `offset` of the region.
    pub fn read(&self, ring: &mut Ring, owner: Owner, token: Token, offset: u64, buf: BufMut) {
        self.check(offset, buf.len());
        ring.read(owner, token, self.opened.target(), self.base + offset, buf);
    }

    /// Write at `offset` of the region.
    pub fn write(
        &self,
        ring: &mut Ring,
        owner: Owner,
        token: Token,
        offset: u64,
        data: Vec<Buf>,
        durable: bool,
    ) {
        self.check(offset, data.iter().map(|buf| buf.len()).sum());
        let durable = durable.then_some(self.durability);
        ring.write(
            owner,
            token,
            self.opened.target(),
            self.base + offset,
            data,
            durable,
        );
    }

    /// Write durably at `offset` of the region, for a client that waits for it; in this way, or in that of the region.
    pub fn write_urgently(
        &self,
        ring: &mut Ring,
        owner: Owner,
        token: Token,
        offset: u64,
        data: Vec<Buf>,
        way: Option<DurableWay>,
    ) {
        self.check(offset, data.iter().map(|buf| buf.len()).sum());
        let (file, offset) = (self.opened.target(), self.base + offset);
        let own = || DurableWay {
            call: self.durability,
            by_thread: false,
        };
        ring.write_urgently(owner, token, file, offset, data, way.unwrap_or_else(own));
    }

    fn check(&self, offset: u64, bytes: usize) {
        assert!(
            offset
                .checked_add(bytes as u64)
                .is_some_and(|end| end <= self.bytes),
            "transfer beyond the region"
        );
    }
}
