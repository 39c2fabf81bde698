//! The SSD tier's place as the configuration and the data directory name it.
//!
//! A cache file that is missing or has another size is made anew: it holds nothing that cannot be
//! fetched again. What is there and is no cache is never touched.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::{fs, io};

use hdcs_device::DeviceRegion;
use hdcs_device::durability::Durability;
use hdcs_device::file::{Device, DeviceError};

use super::node::lock;
use crate::config::NodeSettings;
use crate::data_dir::DataDir;
use crate::inspect;
use crate::shard::cache_place::{CachePlace, CacheTrouble, Found};

/// See the module.
#[derive(Debug)]
pub struct CacheAt {
    path: PathBuf,
    /// Size of the tier.
    pub bytes: u64,
    durability: Option<Durability>,
    dir: Arc<Mutex<DataDir>>,
    /// Whether the data directory is new, so that a file that is missing says nothing.
    is_fresh: bool,
}

fn refused(path: &Path, reason: &str) -> CacheTrouble {
    CacheTrouble::Refused(format!(
        "cannot use {} for the read cache: {reason}: set cache_path to something else",
        path.display()
    ))
}

fn away(path: &Path, reason: impl std::fmt::Display) -> CacheTrouble {
    CacheTrouble::Away(format!("{}: {reason}", path.display()))
}

impl CacheAt {
    /// The place that is configured, if the tier is not turned off.
    pub fn configured(node: &NodeSettings, dir: &Arc<Mutex<DataDir>>) -> Option<Self> {
        let bytes = node.cache_total_size_mib << 20;
        if bytes == 0 {
            return None;
        }
        let (path, is_fresh) = {
            let dir = lock(dir);
            let path = match &node.cache_path {
                Some(path) => dir.layout().root().join(path),
                None => dir.layout().cache(),
            };
            (path, dir.is_fresh())
        };
        Some(Self {
            path,
            bytes,
            durability: node.log_durability,
            dir: Arc::clone(dir),
            is_fresh,
        })
    }

    /// Make the file if it is not there, or has another size.
    fn settle(&self) -> Result<(), CacheTrouble> {
        let path = &self.path;
        let found = match fs::metadata(path) {
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(away(path, error)),
        };
        let Some(found) = found else {
            if inspect::is_missing_device(path) {
                return Err(away(
                    path,
                    "there is no such device: connect it, set another cache_path, or go without \
                     with cache_total_size_mib = 0",
                ));
            }
            if !self.is_fresh {
                let shown = path.display();
                tracing::info!("read cache: {shown} is not there: it is made and starts cold");
            }
            return self.make();
        };
        if inspect::is_foreign_to_cache(path).map_err(|error| away(path, error))? {
            return Err(refused(
                path,
                "it holds something that is not an HDCS cache",
            ));
        }
        if let Some(why) = inspect::cache_made_newer(path).map_err(|error| away(path, error))? {
            let what = format!(
                "the read cache there: {why}, or remove or wipe the cache, which holds nothing that is not elsewhere"
            );
            return Err(refused(path, &what));
        }
        if !found.file_type().is_block_device() && found.len() != self.bytes {
            tracing::warn!(
                "read cache: {} has {} bytes instead of {}: it is made anew and starts cold",
                path.display(),
                found.len(),
                self.bytes
            );
            return self.make();
        }
        Ok(())
    }

    fn make(&self) -> Result<(), CacheTrouble> {
        make_cache(&self.path, self.bytes).map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge
            | io::ErrorKind::NotFound
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::PermissionDenied => CacheTrouble::Refused(format!(
                "cannot make the read cache: {}: {error}: make room, or set cache_path or \
                 cache_total_size_mib",
                self.path.display()
            )),
            _ => away(&self.path, error),
        })
    }
}

impl CachePlace for CacheAt {
    fn open(&self) -> Result<Found, CacheTrouble> {
        self.settle()?;
        let carries_identity = inspect::is_cache_of(&self.path, self.identity());
        let region = DeviceRegion {
            path: self.path.clone(),
            offset: 0,
            bytes: self.bytes,
        };
        let opened = Device::open(&region, self.durability).map_err(|error| match error {
            DeviceError::Kind(_)
            | DeviceError::TooSmall { .. }
            | DeviceError::BlockSize { .. }
            | DeviceError::Region { .. } => refused(&self.path, &error.to_string()),
            other => CacheTrouble::Away(other.to_string()),
        });
        let device = opened?;
        // A device that takes no writes would be given up at once.
        device
            .prove()
            .map_err(|error| CacheTrouble::Away(error.to_string()))?;
        Ok(Found {
            device,
            carries_identity,
        })
    }

    fn identity(&self) -> [u8; 16] {
        lock(&self.dir).cache_uuid().into_bytes()
    }

    fn renew(&self) -> Result<[u8; 16], String> {
        let mut dir = lock(&self.dir);
        dir.renew_cache_uuid().map_err(|error| error.to_string())?;
        Ok(dir.cache_uuid().into_bytes())
    }
}

/// Allocated, so that it never runs out of space; not written, since its writes are large and only
/// few of them have to be durable.
fn make_cache(path: &Path, bytes: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    // SAFETY: a system call on a descriptor that is held.
    let allocated = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes as i64) };
    let result = if allocated == 0 {
        Ok(())
    } else {
        match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => file.set_len(bytes),
            error => Err(error),
        }
    };
    if result.is_err() {
        // A part of a cache file would only take the room that is short.
        let _ = fs::remove_file(path);
    }
    result
}
