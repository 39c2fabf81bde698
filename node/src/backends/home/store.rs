//! The file or block device that a home lies in: made, opened, and looked at while nobody has it open.
//! All of it blocks.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hdcs_core::buf::Arena;
use hdcs_core::cipher::BlockCipher;
use hdcs_core::error::FormatError;
use hdcs_core::home::Config;
use hdcs_core::home::format::{
    self, HOME_BETWEEN, HOME_HEADER_BLOCKS, HomePage, HomeSuperblock, Layout, SUMS_UNTRUSTED,
};
use hdcs_core::home::map::{BlockState, Map};
use hdcs_core::limits::{
    BLOCK_BYTES, HOME_SUMS_BYTES, HOME_TIER_FLUSH_BYTES, HOME_TURN_BLOCKS, SECTOR_BYTES,
};
use thiserror::Error;
use uuid::Uuid;
use zerocopy::IntoBytes;

use crate::crypt::Unlocked;
use crate::device::file::{self as device, DeviceError, Direct};

/// Why a store cannot be used.
#[derive(Debug, Error)]
pub enum StoreError {
    /// It is not there, or cannot be read or written.
    #[error("home: {0}")]
    Device(#[from] DeviceError),
    /// What is there is no home, a damaged one, or another volume's.
    #[error("home: {}: {source}", path.display())]
    Format {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
    /// A page of its map is gone, and with it what is dirty.
    #[error("home: {}: both copies of page {page} of its map: {source}", path.display())]
    Page {
        /// Where.
        path: PathBuf,
        /// Which.
        page: u64,
        /// What is wrong.
        source: FormatError,
    },
    /// It is encrypted and the volume is not, or the other way round, or with another key.
    #[error("home: {}: {what}: put the right home back", path.display())]
    Key {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// It is of another size than the volume.
    #[error("home: {}: it is of a volume of {has} bytes, not {needs}", path.display())]
    Size {
        /// Where.
        path: PathBuf,
        /// Of what size.
        has: u64,
        /// The volume's.
        needs: u64,
    },
}

impl StoreError {
    /// Whether what it held is lost, as far as anybody can tell now.
    pub fn is_lost(&self) -> bool {
        match self {
            Self::Device(DeviceError::Locked(_)) => false,
            Self::Format { source, .. } | Self::Page { source, .. } => {
                !matches!(source, FormatError::Newer { .. })
            }
            Self::Device(_) | Self::Size { .. } | Self::Key { .. } => true,
        }
    }
}

/// A store that is open and locked.
pub struct Store {
    /// Its file or device.
    pub opened: device::Opened,
    /// What it is.
    pub config: Config,
    /// What it has.
    pub map: Map,
    /// What encrypts its data, if something does.
    pub cipher: Option<Arc<dyn BlockCipher>>,
}

/// Make a store with nothing in it, whose data is encrypted if there is a key, and reserve all of its room. A file
/// must be new.
pub fn create(
    path: &Path,
    volume: Uuid,
    bytes: u64,
    is_device: bool,
    data_key: Option<Uuid>,
) -> Result<(), DeviceError> {
    let needs = Layout::Grouped.store_bytes(bytes);
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(!is_device)
        .mode(0o600)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(DeviceError::Exists(path.to_owned()));
        }
        Err(error) => return Err(DeviceError::io("create", path, error)),
    };
    let reserved = if is_device {
        let opened = device::open_file(path, Direct::Off)?;
        device::lock(&opened, 0, 0)?;
        if opened.bytes < needs {
            return Err(DeviceError::TooSmall {
                path: path.to_owned(),
                has: opened.bytes,
                needs,
            });
        }
        Ok(())
    } else {
        // SAFETY: a system call on a descriptor that is held.
        match unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, needs.cast_signed()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let (high, low) = Uuid::new_v4().as_u64_pair();
    let home = high ^ low;
    let data_key = data_key.unwrap_or_default().into_bytes();
    let head = format::format_head(volume.into_bytes(), home, bytes, data_key);
    let made = reserved.and_then(|()| {
        for page in 0..format::pages(bytes) {
            let empty = format::format_page(home, page);
            for copy in [0, 1] {
                let place = Layout::Grouped.page_offset(page, copy);
                file.write_all_at(empty.as_bytes(), place)?;
            }
        }
        file.write_all_at(&head, 0)?;
        file.sync_all()
    });
    made.map_err(|error| {
        if !is_device {
            // The error that matters is the first one.
            let _ = std::fs::remove_file(path);
        }
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => DeviceError::NoSpace {
                path: path.to_owned(),
                bytes: needs,
            },
            _ => DeviceError::io("reserve room in", path, error),
        }
    })
}

/// Open the store of a volume, whose write log has the random number `log`. The log writes everything again that
/// was not flushed, unless it let writes past it. `keys` are the volume's, if it is encrypted.
pub fn open(
    path: &Path,
    volume: [u8; 16],
    bytes: u64,
    log: u64,
    is_log_whole: bool,
    keys: Option<&Unlocked>,
) -> Result<Store, StoreError> {
    let opened = device::open_file(path, Direct::UpTo(SECTOR_BYTES as u64))?;
    device::lock(&opened, 0, 0)?;
    let mut blocks = Arena::new(2).claim(0, 2).expect("a new arena is free");
    let mut read = |offset: u64| {
        let read = opened.file.read_exact_at(&mut blocks, offset);
        read.map_err(|error| DeviceError::io("read", path, error))
            .map(|()| {
                [
                    blocks[..BLOCK_BYTES].to_vec(),
                    blocks[BLOCK_BYTES..].to_vec(),
                ]
            })
    };
    let wrong = |source| StoreError::Format {
        path: path.to_owned(),
        source,
    };
    let found = read(0)?;
    let mut superblock = HomeSuperblock::newest([&found[0], &found[1]]).map_err(wrong)?;
    if superblock.volume != volume {
        return Err(wrong(FormatError::Identity));
    }
    let has = superblock.bytes.get();
    if has != bytes {
        return Err(StoreError::Size {
            path: path.to_owned(),
            has,
            needs: bytes,
        });
    }
    if let Some(what) = wrong_key(superblock.data_key, keys) {
        let path = path.to_owned();
        return Err(StoreError::Key { path, what });
    }
    let (home, layout) = (superblock.home.get(), superblock.layout());
    let mut pages = Vec::new();
    let mut repairs: Vec<(u64, Box<HomePage>)> = Vec::new();
    for page in 0..format::pages(bytes) {
        let found = read(layout.page_offset(page, 0))?;
        let found = format::choose_page([&found[0], &found[1]], home, page);
        let found = found.map_err(|source| StoreError::Page {
            path: path.to_owned(),
            page,
            source,
        })?;
        if let Some(copy) = found.repair {
            repairs.push((layout.page_offset(page, copy), found.page.clone()));
        }
        pages.push(found.page);
    }
    // What an earlier process wrote and did not make durable was read here and is trusted.
    let sync = || {
        let synced = opened.file.sync_all();
        synced.map_err(|error| DeviceError::io("make durable what is in", path, error))
    };
    sync()?;
    let write = |bytes: &[u8], offset: u64| {
        let mut block = Arena::new(1).claim(0, 1).expect("a new arena is free");
        block.copy_from_slice(bytes);
        let written = opened.file.write_all_at(&block, offset);
        written.map_err(|error| DeviceError::io("repair", path, error))
    };
    for (offset, page) in &repairs {
        write(page.as_bytes(), *offset)?;
    }
    if let Some(begun) = superblock.begin(log, is_log_whole) {
        write(begun.as_bytes(), begun.place())?;
        sync()?;
        superblock = begun;
    }
    if !repairs.is_empty() {
        sync()?;
        tracing::info!(
            path = %path.display(),
            pages = repairs.len(),
            "pages of a home's map were written anew from their copies"
        );
    }
    let config = Config {
        bytes,
        volume,
        home,
        log,
        data_key: superblock.data_key,
        layout,
        sequence: superblock.sequence.get(),
        between: superblock.flags.get() & HOME_BETWEEN != 0,
        sums_log: superblock.sums(),
        sums_bytes: HOME_SUMS_BYTES,
        backend_atomic: false,
        flush_every_blocks: HOME_TIER_FLUSH_BYTES / BLOCK_BYTES as u64,
        turn_blocks: HOME_TURN_BLOCKS,
    };
    if superblock.sums() == Some(SUMS_UNTRUSTED) {
        tracing::warn!(
            path = %path.display(),
            "what was written last is not in the write log any more, so that the checksums of this home are not \
             believed: they are made anew from its data, and until then damage goes unseen"
        );
    }
    let map = Map::load(pages, bytes / BLOCK_BYTES as u64, log, is_log_whole);
    Ok(Store {
        opened,
        config,
        map,
        cipher: keys.map(|keys| keys.home(home)),
    })
}

/// Why a volume with these keys, or none, cannot have a home that is encrypted with this one.
fn wrong_key(data_key: [u8; 16], keys: Option<&Unlocked>) -> Option<String> {
    let has = Uuid::from_bytes(data_key);
    match (has.is_nil(), keys.map(|keys| keys.objects.wrapped.id())) {
        (true, None) => None,
        (false, Some(needs)) if has == needs => None,
        (true, Some(_)) => Some("it is not encrypted, and its volume is".to_owned()),
        (false, None) => Some(format!(
            "it is encrypted with data key {has}, and its volume is not encrypted"
        )),
        (false, Some(needs)) => Some(format!(
            "it is encrypted with data key {has}, and its volume with {needs}"
        )),
    }
}

/// What a store that nobody has open has, which the backend lacks: bytes of data, and whether it is
/// nothing at all. `None` if that cannot be told.
pub fn dirty_of(path: &Path, volume: Uuid) -> Option<(u64, bool)> {
    let file = std::fs::File::open(path).ok()?;
    let read = |offset: u64| {
        let mut blocks = vec![0; 2 * BLOCK_BYTES];
        file.read_exact_at(&mut blocks, offset).ok()?;
        Some(blocks)
    };
    let halves = |blocks: &[u8]| {
        [
            blocks[..BLOCK_BYTES].to_vec(),
            blocks[BLOCK_BYTES..].to_vec(),
        ]
    };
    let found = halves(&read(0)?);
    let superblock = HomeSuperblock::newest([&found[0], &found[1]]).ok()?;
    if superblock.volume != volume.into_bytes() {
        return None;
    }
    let (home, bytes, layout) = (
        superblock.home.get(),
        superblock.bytes.get(),
        superblock.layout(),
    );
    let mut pages = Vec::new();
    for page in 0..format::pages(bytes) {
        let found = halves(&read(layout.page_offset(page, 0))?);
        let found = format::choose_page([&found[0], &found[1]], home, page).ok()?;
        pages.push(found.page);
    }
    let map = Map::load(pages, bytes / BLOCK_BYTES as u64, 0, true);
    let (dirty, zero) = (map.count(BlockState::Dirty), map.count(BlockState::Zero));
    Some((dirty * BLOCK_BYTES as u64, dirty + zero == 0))
}

/// Whether a file or device begins like a home of this volume.
pub fn is_of(path: &Path, volume: Uuid) -> bool {
    let mut head = vec![0; HOME_HEADER_BLOCKS as usize * BLOCK_BYTES];
    let read = std::fs::File::open(path).and_then(|file| file.read_exact_at(&mut head, 0));
    let blocks = [&head[..BLOCK_BYTES], &head[BLOCK_BYTES..2 * BLOCK_BYTES]];
    read.is_ok()
        && HomeSuperblock::newest(blocks).is_ok_and(|found| found.volume == volume.into_bytes())
}
