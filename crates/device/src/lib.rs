//! Files and block devices behind one io_uring.
//!
//! [`ring`] owns every operation that the kernel has not ended, with its buffers; [`file`] knows
//! what a region of a file or device needs (alignment, durability, lock); [`create`] makes
//! regions, [`space`] says what of them is taken; [`measurements`] has what was measured of devices; [`worker`] runs what would block, [`writers`] what a client waits for; [`memory`] tells the system where huge
//! pages pay.

pub mod create;
pub mod durability;
pub mod file;
pub mod measurements;
pub mod memory;
pub mod ring;
pub mod space;
pub mod worker;
pub mod writers;

use std::path::PathBuf;

use hdcs_core::base::error::IoError;

/// A region of a file or block device.
#[derive(Clone, Debug)]
pub struct DeviceRegion {
    /// The file or device.
    pub path: PathBuf,
    /// First byte of the region, a multiple of 4096.
    pub offset: u64,
    /// Length in bytes, a multiple of 4096.
    pub bytes: u64,
}

/// An error number of the operating system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    /// The error number of the last failed system call of this thread.
    pub fn last() -> Self {
        Self::from(&std::io::Error::last_os_error())
    }
}

impl From<&std::io::Error> for Errno {
    fn from(error: &std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl From<Errno> for IoError {
    fn from(errno: Errno) -> Self {
        match errno.0 {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpace,
            libc::ENODEV
            | libc::ENXIO
            | libc::ENOMEDIUM
            | libc::ESTALE
            | libc::ESHUTDOWN
            | libc::ENOTCONN
            | libc::EHOSTUNREACH
            | libc::ENETUNREACH
            | libc::ECONNREFUSED
            | libc::ETIMEDOUT => Self::Unreachable,
            _ => Self::Failed,
        }
    }
}
