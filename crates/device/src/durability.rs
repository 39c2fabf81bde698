//! How a write is made durable, and which way is faster on a device.
//!
//! Both ways end in a flush of the device's volatile cache or a write that bypasses it; which is
//! cheaper depends on the device and the file system, so it is measured when a region is opened.
//! The measurement writes back what it has just read, so that a crash in the middle harms nothing.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use hdcs_core::base::limits::BLOCK_BYTES;

use super::Errno;

/// How a write is made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// `RWF_DSYNC` on the write.
    Dsync,
    /// The write, then `fdatasync`.
    Fdatasync,
}

impl std::fmt::Display for Durability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Dsync => "RWF_DSYNC",
            Self::Fdatasync => "write + fdatasync",
        })
    }
}

/// Writes of each kind that are timed.
const PROBES: usize = 8;

/// How much faster `fdatasync` must be to be chosen: the ring hands it to a worker thread, which
/// costs context switches that are not in this measurement, and it adds a second operation.
const FDATASYNC_FACTOR: u32 = 2;

/// What a probe found.
#[derive(Clone, Copy, Debug)]
pub struct Probe {
    /// The faster way.
    pub faster: Durability,
    /// Median of a durable 4 KiB write by `RWF_DSYNC`; `None` if the file refuses it.
    pub dsync: Option<Duration>,
    /// Median of write and `fdatasync`.
    pub fdatasync: Duration,
}

/// Time both on the block at `offset`, whose content stays what it is.
pub fn probe(fd: RawFd, offset: u64) -> Result<Probe, Errno> {
    let mut block = Block::new();
    block.transfer(fd, offset, Way::Read)?;
    let mut dsync = Vec::with_capacity(PROBES);
    let mut fdatasync = Vec::with_capacity(PROBES);
    // Alternating, so that a slow moment of the device hurts both.
    for _ in 0..PROBES {
        let started = Instant::now();
        if block.transfer(fd, offset, Way::Dsync).is_ok() {
            dsync.push(started.elapsed());
        }
        let started = Instant::now();
        block.transfer(fd, offset, Way::Plain)?;
        // SAFETY: a system call on a descriptor that the caller holds.
        if unsafe { libc::fdatasync(fd) } < 0 {
            return Err(Errno::last());
        }
        fdatasync.push(started.elapsed());
    }
    let fdatasync = median(&mut fdatasync).expect("probes were made");
    let dsync = median(&mut dsync);
    let faster = match dsync {
        Some(dsync) if dsync <= fdatasync * FDATASYNC_FACTOR => Durability::Dsync,
        _ => Durability::Fdatasync,
    };
    Ok(Probe {
        faster,
        dsync,
        fdatasync,
    })
}

fn median(times: &mut [Duration]) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Read,
    Plain,
    Dsync,
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

    fn transfer(&mut self, fd: RawFd, offset: u64, way: Way) -> Result<(), Errno> {
        let vector = libc::iovec {
            iov_base: self.0.cast(),
            iov_len: BLOCK_BYTES,
        };
        let offset = offset.cast_signed();
        // SAFETY: the vector is the block, which lives until this returns.
        let moved = unsafe {
            match way {
                Way::Read => libc::preadv(fd, &raw const vector, 1, offset),
                Way::Plain => libc::pwritev(fd, &raw const vector, 1, offset),
                Way::Dsync => libc::pwritev2(fd, &raw const vector, 1, offset, libc::RWF_DSYNC),
            }
        };
        match moved {
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
