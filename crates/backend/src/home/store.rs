//! The file or block device that a local store lies in: made, opened, and looked at while nobody has it open.
//! All of it blocks.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hdcs_core::base::buf::Arena;
use hdcs_core::base::cipher::KeyedCipher;
use hdcs_core::base::error::{FormatError, IoError};
use hdcs_core::base::limits::{BLOCK_BYTES, SECTOR_BYTES};
use hdcs_core::local::Config;
use hdcs_core::local::format::{self, HomeSuperblock, Layout, MapCheck, SUMS_UNTRUSTED};
use hdcs_core::local::map::{BlockState, Map};
use hdcs_core::local::open::{Before, Opening, Refused, Step};
use hdcs_device::file::{self as device, DeviceError, Direct};
use thiserror::Error;
use uuid::Uuid;
use zerocopy::IntoBytes;

use crate::crypt::Unlocked;
use crate::memory::{Shortage, VolumeMemory};

/// Why a store cannot be used.
#[derive(Debug, Error)]
pub enum StoreError {
    /// It is not there, or cannot be read or written.
    #[error("local store: {0}")]
    Device(#[from] DeviceError),
    /// What is there is no local store, a damaged one, or another volume's.
    #[error("local store: {}: {source}", path.display())]
    Format {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
    /// A page of its map is gone, and with it what is dirty.
    #[error("local store: {}: both copies of page {page} of its map: {source}", path.display())]
    Page {
        /// Where.
        path: PathBuf,
        /// Which.
        page: u64,
        /// What is wrong.
        source: FormatError,
    },
    /// The checksum of a part of its map is right, and nobody who has the key has written it.
    #[error(
        "local store: {}: its {part} does not authenticate: somebody without the volume's key has written it: find out who can \
         write to its medium; put the local store back that was there, or restore it from a backup", path.display()
    )]
    Forged {
        /// Where.
        path: PathBuf,
        /// What of it.
        part: String,
    },
    /// A write of its map is gone that the device had acknowledged.
    #[error("local store: {}: its map: {source}", path.display())]
    Map {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
    /// Its map does not fit the memory for that.
    #[error("local store: {}: {shortage}", path.display())]
    Memory {
        /// Where.
        path: PathBuf,
        /// What is not there.
        shortage: Shortage,
    },
    /// It is encrypted and the volume is not, or the other way round, or with another key.
    #[error("local store: {}: {what}: put the right local store back", path.display())]
    Key {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// It is of another size than the volume.
    #[error("local store: {}: it is of a volume of {has} bytes, not {needs}", path.display())]
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
    /// Whether somebody else uses it.
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::Device(DeviceError::Locked(_)))
    }

    /// Whether what it held is lost, as far as anybody can tell now.
    pub fn is_lost(&self) -> bool {
        match self {
            Self::Device(DeviceError::Locked(_)) | Self::Memory { .. } => false,
            Self::Format { source, .. } | Self::Page { source, .. } => {
                !matches!(source, FormatError::Newer { .. })
            }
            Self::Device(_)
            | Self::Map { .. }
            | Self::Forged { .. }
            | Self::Size { .. }
            | Self::Key { .. } => true,
        }
    }
}

/// Why a store that is in use cannot have another size. Nothing has changed.
#[derive(Debug, Error)]
pub enum ResizeError {
    /// There is no room.
    #[error(
        "its local store needs {needs} bytes more in {}, and {missing} of them are missing there: make room", path.display()
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// How much larger it has to be.
        needs: u64,
        /// How much of that is not to be had.
        missing: u64,
    },
    /// Its device is too small, or its file cannot be changed.
    #[error("its local store: {0}")]
    Device(#[from] DeviceError),
}

impl From<&ResizeError> for IoError {
    fn from(error: &ResizeError) -> Self {
        match error {
            ResizeError::NoSpace { .. } | ResizeError::Device(DeviceError::TooSmall { .. }) => {
                Self::NoSpace
            }
            ResizeError::Device(_) => Self::Failed,
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
    pub cipher: Option<Arc<dyn KeyedCipher>>,
}

/// Make a store with nothing in it, whose data is encrypted if there are keys, and reserve all of its room. A file
/// must be new.
pub fn create(
    path: &Path,
    volume: Uuid,
    bytes: u64,
    is_device: bool,
    keys: Option<&Unlocked>,
) -> Result<(), DeviceError> {
    let layout = Layout::of(keys.is_some());
    let needs = layout.store_bytes(bytes);
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
        reserve(&file, 0, needs)
    };
    let (high, low) = Uuid::new_v4().as_u64_pair();
    let home = high ^ low;
    let data_key = keys.map(|keys| keys.objects.wrapped.id());
    let data_key = data_key.unwrap_or_default().into_bytes();
    let keys = keys.map(|keys| keys.home(home));
    let keys = keys.as_deref();
    let head = format::format_head(volume.into_bytes(), home, bytes, data_key, keys);
    let made = reserved.and_then(|()| {
        for page in 0..format::pages(bytes) {
            let empty = format::format_page(home, page, keys);
            for copy in [0, 1] {
                let place = layout.page_offset(page, copy);
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
        if is_no_space(&error) {
            let path = path.to_owned();
            return DeviceError::NoSpace { path, bytes: needs };
        }
        DeviceError::io("reserve room in", path, error)
    })
}

/// Reserve bytes of a file.
fn reserve(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    let (offset, bytes) = (offset.cast_signed(), bytes.cast_signed());
    // SAFETY: a system call on a descriptor that is held.
    match unsafe { libc::fallocate(file.as_raw_fd(), 0, offset, bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn is_no_space(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG)
    )
}

/// Bytes that are free where a file lies, if that can be told.
fn free_bytes(file: &File) -> Option<u64> {
    let mut found = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: fills the structure if it succeeds, which is checked before it is used.
    let found = unsafe {
        match libc::fstatvfs(file.as_raw_fd(), found.as_mut_ptr()) {
            0 => found.assume_init(),
            _ => return None,
        }
    };
    Some(found.f_bavail * found.f_frsize)
}

/// Have an open store hold `bytes` bytes: room is reserved in a file, durably, and what is more is given back; a
/// device has to be as large.
pub fn resize(file: &File, path: &Path, is_device: bool, bytes: u64) -> Result<(), ResizeError> {
    let wrong = |what| move |error| DeviceError::io(what, path, error);
    let has = (&*file).seek(SeekFrom::End(0));
    let has = has.map_err(wrong("measure"))?;
    if has >= bytes {
        if !is_device {
            file.set_len(bytes).map_err(wrong("cut"))?;
        }
        return Ok(());
    }
    let path_of = || path.to_owned();
    if is_device {
        let (path, needs) = (path_of(), bytes);
        return Err(DeviceError::TooSmall { path, has, needs }.into());
    }
    let needs = bytes - has;
    let reserved = reserve(file, has, needs).and_then(|()| file.sync_all());
    reserved.map_err(|error| {
        // A part of it may have been had; the error that matters is the first one.
        let _ = file.set_len(has);
        if !is_no_space(&error) {
            return wrong("reserve room in")(error).into();
        }
        let missing = free_bytes(file).map_or(0, |free| needs.saturating_sub(free));
        ResizeError::NoSpace {
            path: path_of(),
            needs,
            // A quota, of which nobody knows what is left of it.
            missing: if missing == 0 { needs } else { missing },
        }
    })
}

/// Open the store of a volume, whose write log has the random number `log`. The log writes everything again that
/// was not flushed, unless it let writes past it. `keys` are the volume's, if it is encrypted. A resize that was
/// interrupted may have left it larger than the volume: it has its own size then.
pub fn open(
    path: &Path,
    volume: [u8; 16],
    bytes: u64,
    log: u64,
    is_log_whole: bool,
    keys: Option<&Unlocked>,
    memory: &VolumeMemory,
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
    let before = Before {
        log,
        is_whole: is_log_whole,
    };
    let found = read(0)?;
    let begun = Opening::begin([&found[0], &found[1]], volume, before);
    let refused = |why| refused(path, bytes, why);
    let mut opening = begun.map_err(refused)?;
    if let Some(what) = wrong_key(opening.data_key(), keys) {
        let path = path.to_owned();
        return Err(StoreError::Key { path, what });
    }
    let cipher = keys.map(|keys| keys.home(opening.home()));
    opening
        .authenticate(cipher.clone(), bytes)
        .map_err(refused)?;
    memory
        .reach_bytes(opening.bytes())
        .map_err(|shortage| StoreError::Memory {
            path: path.to_owned(),
            shortage,
        })?;
    loop {
        match opening.step() {
            Step::Read(offset) => {
                let found = read(offset)?;
                opening.read([&found[0], &found[1]]).map_err(refused)?;
            }
            Step::Sync => {
                let synced = opened.file.sync_all();
                synced.map_err(|error| DeviceError::io("make durable what is in", path, error))?;
                opening.done();
            }
            Step::Write(offset, bytes) => {
                let mut block = Arena::new(1).claim(0, 1).expect("a new arena is free");
                block.copy_from_slice(&bytes[..]);
                let written = opened.file.write_all_at(&block, offset);
                written.map_err(|error| DeviceError::io("repair", path, error))?;
                opening.done();
            }
            Step::Done => break,
        }
    }
    if opening.repairs() > 0 {
        tracing::info!(
            path = %path.display(),
            pages = opening.repairs(),
            "pages of a local store's map were written anew from their copies"
        );
    }
    let (config, map) = opening.finish(memory.sums_bytes());
    let needs = Layout::of(config.data_key != [0; 16]).store_bytes(config.bytes);
    if !opened.block_device && opened.bytes > needs {
        // Room that a resize had reserved, or had yet to give back, when it was interrupted.
        let given_back = opened.file.set_len(needs);
        if let Err(error) = given_back {
            tracing::warn!(path = %path.display(), "what is behind the end of a local store stays there: {error}");
        }
    }
    if config.sums_log == SUMS_UNTRUSTED {
        tracing::warn!(
            path = %path.display(),
            "what was written last is not in the write log any more, so that the checksums of this local store are not \
             believed: they are made anew from its data, and until then damage goes unseen"
        );
    }
    Ok(Store {
        opened,
        config,
        map,
        cipher,
    })
}

/// Why the store of a volume of `needs` bytes is not used.
fn refused(path: &Path, needs: u64, why: Refused) -> StoreError {
    let path = path.to_owned();
    match why {
        Refused::Superblock(FormatError::Forged) => StoreError::Forged {
            path,
            part: "superblock".to_owned(),
        },
        Refused::Superblock(source) => StoreError::Format { path, source },
        Refused::Page {
            page,
            why: FormatError::Forged,
        } => StoreError::Forged {
            path,
            part: format!("map (page {page})"),
        },
        Refused::Page { page, why: source } => StoreError::Page { path, page, source },
        Refused::Map(source) => StoreError::Map { path, source },
        Refused::Size(has) => StoreError::Size { path, has, needs },
    }
}

/// Why a volume with these keys, or none, cannot have a local store that is encrypted with this one.
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
    let file = File::open(path).ok()?;
    let superblock = superblock_of(&file, volume)?;
    let (home, bytes) = (superblock.home.get(), superblock.bytes.get());
    let mut check = MapCheck::new(&superblock);
    let (mut dirty, mut zero) = (0, 0);
    for page in 0..format::pages(bytes) {
        let found = pair(&file, superblock.layout().page_offset(page, 0)).ok()?;
        let found = format::choose_page([&found[0], &found[1]], home, page, None).ok()?;
        check.add(&found);
        // Never more than one of them in memory, whatever the size of the local store.
        let map = Map::of_page(found.page, bytes);
        dirty += map.count(BlockState::Dirty);
        zero += map.count(BlockState::Zero);
    }
    check.end().ok()?;
    Some((dirty * BLOCK_BYTES as u64, dirty + zero == 0))
}

/// Two blocks of a file or device, from this offset in bytes on. Nobody needs to have it open.
pub fn pair(file: &File, offset: u64) -> io::Result<[Vec<u8>; 2]> {
    let mut blocks = vec![0; 2 * BLOCK_BYTES];
    file.read_exact_at(&mut blocks, offset)?;
    let second = blocks.split_off(BLOCK_BYTES);
    Ok([blocks, second])
}

fn superblock_of(file: &File, volume: Uuid) -> Option<HomeSuperblock> {
    let found = pair(file, 0).ok()?;
    let superblock = HomeSuperblock::newest([&found[0], &found[1]]).ok()?;
    (superblock.volume == volume.into_bytes()).then_some(superblock)
}

/// Whether a file or device begins like a local store of this volume.
pub fn is_of(path: &Path, volume: Uuid) -> bool {
    let file = File::open(path);
    file.is_ok_and(|file| superblock_of(&file, volume).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 3 * format::PAGE_BLOCKS * BLOCK_BYTES as u64 / 2;
    const VOLUME: Uuid = Uuid::from_u128(7);
    const LOG: u64 = 5;

    fn open(path: &Path, bytes: u64) -> Result<Store, StoreError> {
        let memory = VolumeMemory::unlimited(0);
        super::open(path, VOLUME.into_bytes(), bytes, LOG, true, None, &memory)
    }

    #[test]
    fn store_that_is_larger_than_its_volume_opens_in_its_own_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("home");
        create(&path, VOLUME, BYTES, false, None).unwrap();
        let needs = Layout::PLAIN.store_bytes(BYTES);
        // Room of a resize that did not come as far as the superblock.
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(needs + 9 * BLOCK_BYTES as u64).unwrap();
        let store = open(&path, BYTES / 2).unwrap();
        assert_eq!(store.config.bytes, BYTES);
        assert_eq!(store.map.blocks(), BYTES / BLOCK_BYTES as u64);
        assert_eq!(file.metadata().unwrap().len(), needs);
        drop(store);
        let refused = open(&path, BYTES + BLOCK_BYTES as u64);
        assert!(matches!(refused, Err(StoreError::Size { has: BYTES, .. })));
    }

    #[test]
    fn store_resize_reserves_room_and_gives_it_back() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("home");
        create(&path, VOLUME, 1 << 20, false, None).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        for bytes in [9 << 20, 2 << 20, 4 << 20] {
            resize(&file, &path, false, bytes).unwrap();
            let found = file.metadata().unwrap();
            assert_eq!(found.len(), bytes);
            assert!(found.blocks() * 512 >= bytes, "it is not reserved");
        }
        // More than any file system has.
        let refused = resize(&file, &path, false, 1 << 61).unwrap_err();
        let ResizeError::NoSpace { needs, missing, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!(needs, (1 << 61) - (4 << 20));
        assert!(missing <= needs && missing > 1 << 60, "{missing}");
        assert_eq!(file.metadata().unwrap().len(), 4 << 20);
        // A file takes the place of a device: it is only looked at.
        let refused = resize(&file, &path, true, 5 << 20).unwrap_err();
        assert!(
            refused
                .to_string()
                .contains("4194304 bytes, but 5242880 are needed")
        );
        resize(&file, &path, true, 1 << 20).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 4 << 20);
    }
}
