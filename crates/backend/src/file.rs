//! The file backend: a raw image, byte for byte what the volume's clients wrote, sparse where
//! nothing was written; or a block device.
//!
//! Invariants:
//! 1. The image is locked while it is open, so two volumes or two nodes never share it.
//! 2. Either all I/O is direct, which needs a device whose alignment is a sector, or all of it is
//!    buffered. Mixing them on one file could bring back a stale page over a direct write.
//! 3. An image is never created in the place of one that should be there, and never resized
//!    unless that was asked for.
//!
//! 4. A snapshot of an image ([`snapshots`]) is only read. It is not locked: nobody writes to it.
//! 5. Flushes, snapshots and resizes fail if the image was removed, replaced or truncated while it is open: each of them
//!    looks. A truncated image is not extended again, neither by a write to its end nor by a resize, because zeroes
//!    would take the place of the data that was cut off.
//!
//! Zeroing tries to punch a hole or to zero in place, and writes zeroes where the file system or
//! device does neither. Extents and resizing run on the ring's worker, since both may block.

mod copier;
mod lineage;
mod presence;
mod snapshots;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use copier::Copier;
use hdcs_core::base::buf::{Arena, Buf};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, Extent, ExtentState, Nanos, SectorRange, Token};
use hdcs_core::base::limits::{BLOCK_BYTES, SECTOR_BYTES};
use hdcs_core::volume::Inherited;
use hdcs_device::Errno;
use hdcs_device::file::{self as device, DeviceError, Direct, Opened};
use hdcs_device::ring::{Outcome, Target};
use hdcs_device::worker::{JobOutput, Remote};
use lineage::Origin;
pub use presence::Spoilt;
use presence::{CUT, GONE};
use snapshots::Frozen;
pub use snapshots::directory_of as snapshots_of;

use super::copying::Copying;
use super::url::{Given, OptionList, Scheme, UrlError, decode};
use super::{
    Absent, Ask, Backend, BackendError, Capabilities, Found, Held, Operation, Place, Port,
    SnapshotCommand, SnapshotStore, verify,
};
use crate::image_format::{self, MAGIC_BYTES};

/// Blocks of the buffer that zeroes are written from.
const ZERO_BLOCKS: usize = 16;
/// Bytes in one write of zeroes.
const ZERO_PIECE_BYTES: u64 = 4 << 20;
/// Runs in one answer about extents; a client asks again from where it ended.
const EXTENTS_MAX: usize = 256;

/// An image that is open and locked, or a snapshot that is open.
pub struct Prepared {
    opened: Opened,
    /// What the volume needs of it.
    bytes: u64,
    read_only: bool,
    identity: Option<String>,
    origin: Option<Origin>,
    copying: Arc<Copying>,
    spoilt: Arc<Spoilt>,
}

impl super::Opened for Prepared {
    fn build(self: Box<Self>) -> Box<dyn Backend> {
        Box::new(FileBackend::new(*self))
    }

    fn identity(&self) -> Option<String> {
        self.identity.clone()
    }

    fn origin(&self) -> Option<&str> {
        self.origin.as_ref().map(|origin| &*origin.name)
    }

    fn inherit(&self, inherited: &mut Inherited) {
        let block = BLOCK_BYTES as u64;
        for &(offset, bytes) in self.origin.iter().flat_map(|origin| &origin.inherited) {
            let (first, end) = (offset.div_ceil(block), (offset + bytes) / block);
            inherited.insert(first, end.saturating_sub(first));
        }
    }

    fn copying(&self) -> Option<Arc<Copying>> {
        Some(Arc::clone(&self.copying))
    }

    fn spoilt(&self) -> Option<Arc<Spoilt>> {
        Some(Arc::clone(&self.spoilt))
    }
}

/// See the module.
pub const SCHEME: Scheme = Scheme {
    name: "file",
    form: "file:PATH",
    options: &["direct", "raw"],
    parse,
};

#[derive(Debug)]
struct ImagePath {
    path: PathBuf,
    /// Whether direct I/O is tried.
    direct: bool,
    /// Whether what is there is taken as it is, whatever it looks like.
    raw: bool,
}

fn parse(given: &Given<'_>, options: &mut OptionList) -> Result<Box<dyn Place>, UrlError> {
    parse_place(given, options).map(|place| Box::new(place) as Box<dyn Place>)
}

fn parse_place(given: &Given<'_>, options: &mut OptionList) -> Result<ImagePath, UrlError> {
    // `file:///path` is what other programs write.
    let path = given.place.strip_prefix("//").unwrap_or(given.place);
    let path = decode(path)?;
    if !path.starts_with(b"/") || path.contains(&0) {
        return Err(given.refuse("the path must be absolute, as in file:/var/lib/image"));
    }
    Ok(ImagePath {
        path: PathBuf::from(OsString::from_vec(path)),
        direct: options.switch("direct")?.unwrap_or(true),
        raw: options.switch("raw")?.unwrap_or(false),
    })
}

impl Place for ImagePath {
    fn name(&self) -> String {
        let real = fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        format!("file:{}", real.display())
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn is_read_only(&self) -> bool {
        snapshots::is_snapshot(&self.path)
    }

    fn snapshot_store(&self) -> Option<&dyn SnapshotStore> {
        // A snapshot has none of its own.
        (!self.is_read_only()).then_some(self)
    }

    fn verify(&self, watch: &mut dyn verify::Watch) -> Result<verify::Verified, BackendError> {
        verify::read_file(&self.path, watch)
    }

    fn find(&self) -> Result<Option<Found>, BackendError> {
        let path = &self.path;
        let refused = |why: &str| BackendError::Refused(format!("{}: {why}", path.display()));
        let found = match fs::metadata(path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.is_read_only() => {
                return Err(refused(
                    "there is no such snapshot, and only a volume makes one",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return match path.parent() {
                    Some(parent) if parent.is_dir() => Ok(None),
                    _ => Err(refused("its directory does not exist: make it first")),
                };
            }
            Err(error) => return Err(refused(&error.to_string())),
        };
        let partly = found.file_type().is_block_device();
        let bytes = if partly {
            let mut device = File::open(path).map_err(|e| DeviceError::io("open", path, e))?;
            let end = device.seek(SeekFrom::End(0));
            end.map_err(|e| DeviceError::io("measure", path, e))?
        } else if found.is_file() {
            found.len()
        } else {
            return Err(refused("it is neither a file nor a block device"));
        };
        Ok(Some(Found { bytes, partly }))
    }

    fn held(&self) -> Option<Held> {
        presence::held(&self.path)
    }

    fn has_beyond(&self, bytes: u64) -> bool {
        let file = presence::open_to_look(&self.path).ok().flatten();
        let found = file.as_ref().and_then(|file| file.metadata().ok());
        let is_longer = found.is_some_and(|found| found.is_file() && found.len() > bytes);
        let data = file.filter(|_| is_longer);
        data.is_some_and(|file| !matches!(copier::data_from(&file, bytes), Ok(None)))
    }

    fn foreign(&self) -> Result<Option<&'static str>, BackendError> {
        if self.raw || fs::metadata(&self.path).is_err() {
            return Ok(None);
        }
        let failed = |error| DeviceError::io("read", &self.path, error);
        let Some(file) = presence::open_to_look(&self.path).map_err(failed)? else {
            return Ok(None);
        };
        let mut begin = Vec::new();
        let read = file.take(MAGIC_BYTES as u64).read_to_end(&mut begin);
        read.map_err(failed)?;
        Ok(image_format::of(&begin))
    }

    fn open(&self, bytes: u64, absent: Absent) -> Result<Box<dyn super::Opened>, BackendError> {
        let opened = if self.is_read_only() {
            open_snapshot(&self.path, bytes, self.direct, absent)
        } else {
            open(&self.path, bytes, self.direct, absent)
        };
        opened.map(|prepared| Box::new(prepared) as Box<dyn super::Opened>)
    }

    fn remove(&self, was: Held) -> Result<(), BackendError> {
        let path = &self.path;
        let refused = |why: &str| BackendError::Refused(format!("{}: {why}", path.display()));
        let at = |error| DeviceError::io("remove", path, error);
        if self.is_read_only() {
            return Err(refused("a snapshot is deleted by the volume that it is of"));
        }
        if !fs::symlink_metadata(path).map_err(at)?.is_file() {
            return Err(refused("it is no ordinary file"));
        }
        if snapshots_of(path).exists() {
            return Err(refused("it has snapshots"));
        }
        presence::remove(path, was)
    }
}

/// Open the image, or make it if it may be made. Blocks.
pub fn open(
    path: &Path,
    bytes: u64,
    direct: bool,
    absent: Absent,
) -> Result<Prepared, BackendError> {
    let opened = presence::open(path, bytes, direct_or_not(direct), absent)?;
    snapshots::remove_leftovers(path);
    let found = Found {
        bytes: opened.bytes,
        partly: opened.block_device,
    };
    super::check_size(&path.display().to_string(), found, bytes, absent)?;
    // What an earlier process wrote and did not flush is in the page cache, perhaps. If that process's
    // log is lost too, nobody writes it again, and a power loss would take back what was read.
    let synced = opened.file.sync_all();
    synced.map_err(|error| DeviceError::io("make durable what is in", path, error))?;
    Ok(Prepared {
        bytes,
        read_only: false,
        identity: None,
        origin: lineage::origin_of(&opened.file),
        copying: Arc::default(),
        spoilt: Arc::default(),
        opened,
    })
}

/// Open a snapshot. Blocks.
fn open_snapshot(
    path: &Path,
    bytes: u64,
    direct: bool,
    absent: Absent,
) -> Result<Prepared, BackendError> {
    if absent == Absent::CreateNew {
        return Err(BackendError::Exists(path.display().to_string()));
    }
    let opened = match device::open_to_read(path, direct_or_not(direct)) {
        Err(DeviceError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(BackendError::Absent(path.display().to_string()));
        }
        opened => opened?,
    };
    let found = Found {
        bytes: opened.bytes,
        partly: false,
    };
    super::check_size(&path.display().to_string(), found, bytes, absent)?;
    Ok(Prepared {
        bytes,
        read_only: true,
        identity: snapshots::identity_of(&opened.file),
        origin: None,
        copying: Arc::default(),
        spoilt: Arc::default(),
        opened,
    })
}

fn direct_or_not(direct: bool) -> Direct {
    if direct {
        Direct::UpTo(SECTOR_BYTES as u64)
    } else {
        Direct::Off
    }
}

/// Zeroes that are being written because nothing else makes the range zero.
struct Zeroing {
    token: Token,
    offset: u64,
    end: u64,
}

/// See the module.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct FileBackend {
    file: Arc<File>,
    /// The same for transfers.
    target: Target,
    block_device: bool,
    /// Cleared once `fallocate` was refused.
    can_punch: bool,
    can_zero: bool,
    zeroes: Buf,
    /// Zero requests under way: few, so a search is short.
    zeroing: Vec<(Zeroing, Way)>,
    path: PathBuf,
    /// The image has at least so many, unless somebody has cut it.
    bytes: u64,
    read_only: bool,
    /// The change of size that is under way, and from how many to how many.
    resizing: Option<(Token, [u64; 2])>,
    /// Flushes, and those of them that look whether the image is still there.
    flushing: Vec<Token>,
    checking: Vec<Token>,
    /// Why it is not, if that was said.
    spoilt: Option<Errno>,
    /// The same, for whoever asks.
    shown: Arc<Spoilt>,
    /// The snapshot that is being made or deleted.
    keeping: Option<Token>,
    /// The copy that a snapshot has begun, until it is known how that ended.
    copier: Option<Copier>,
    copying: Arc<Copying>,
    /// What waits until what it changes is copied.
    held: Vec<Operation>,
    /// What waits until it is known whether it would make an image whole that was cut.
    looking: Vec<Operation>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Punch,
    ZeroRange,
    Write,
}

impl FileBackend {
    /// Put an open image to use.
    pub fn new(prepared: Prepared) -> Self {
        let zeroes = Arena::new(ZERO_BLOCKS)
            .claim(0, ZERO_BLOCKS)
            .expect("a new arena is free")
            .freeze();
        Self {
            target: prepared.opened.target(),
            file: prepared.opened.file,
            block_device: prepared.opened.block_device,
            can_punch: true,
            can_zero: true,
            zeroes,
            zeroing: Vec::new(),
            path: prepared.opened.path,
            bytes: prepared.bytes,
            read_only: prepared.read_only,
            resizing: None,
            flushing: Vec::new(),
            checking: Vec::new(),
            spoilt: None,
            shown: prepared.spoilt,
            keeping: None,
            copier: None,
            copying: prepared.copying,
            held: Vec::new(),
            looking: Vec::new(),
        }
    }

    /// Hold a change back whose range is still to be copied.
    fn hold(&mut self, operation: Operation, port: &mut Port<'_>) -> Option<Operation> {
        let Some((copier, range)) = self.copier.as_ref().zip(changed(&operation.ask)) else {
            return Some(operation);
        };
        if !copier.holds(range, operation.token) {
            return Some(operation);
        }
        port.ring.begin_remote();
        self.held.push(operation);
        None
    }

    /// Make or delete a snapshot, on a thread of its own: sharing the data of a large file takes time.
    fn keep(&mut self, token: Token, keep: SnapshotCommand, port: &mut Port<'_>) {
        self.keeping = Some(token);
        if let (SnapshotCommand::Complete, Some(copier)) = (keep, &self.copier) {
            copier.wait(token);
            return port.ring.begin_remote();
        }
        let (file, path, bytes) = (Arc::clone(&self.file), self.path.clone(), self.bytes);
        let is_spoilt = self.spoilt == Some(CUT);
        let job = move || match keep {
            SnapshotCommand::Snapshot {
                name,
                made_ms,
                copy,
            } => {
                let asked = (&name, made_ms, copy);
                let frozen = if is_spoilt {
                    Err(CUT)
                } else {
                    snapshots::freeze(&file, &path, bytes, asked)
                };
                JobOutput::Any(Box::new(frozen))
            }
            SnapshotCommand::Forget { name } => JobOutput::Unit(snapshots::forget(&path, &name)),
            // It is never given up, and waits for its copy otherwise.
            SnapshotCommand::GiveUp | SnapshotCommand::Complete => {
                JobOutput::Unit(Err(Errno(libc::EOPNOTSUPP)))
            }
        };
        let remote: Remote = port.ring.remote(port.owner);
        let thread = std::thread::Builder::new().name("hdcs-snapshot".into());
        match thread.spawn(move || remote.end(token, job())) {
            Ok(_) => port.ring.begin_remote(),
            Err(error) => self.kept(token, Err(Errno::from(&error)), port),
        }
    }

    /// A state is kept, or not.
    fn frozen(&mut self, token: Token, frozen: Result<Frozen, Errno>, port: &mut Port<'_>) {
        if let Err(errno @ (CUT | GONE)) = frozen {
            let _ = self.checked(Err(errno));
        }
        let kept = frozen.and_then(|frozen| match frozen {
            Frozen::Made => Ok(()),
            Frozen::Copy(making, found) => {
                let (file, copying) = (Arc::clone(&self.file), Arc::clone(&self.copying));
                let remote = port.ring.remote(port.owner);
                let copier = Copier::start(file, &found, making, copying, remote);
                self.copier = Some(copier.map_err(|error| {
                    self.copying.end();
                    Errno::from(&error)
                })?);
                Ok(())
            }
        });
        self.kept(token, kept, port);
    }

    /// Making or deleting a snapshot has ended.
    fn kept(&mut self, token: Token, result: Result<(), Errno>, port: &mut Port<'_>) {
        self.keeping = None;
        let result = match result {
            Ok(()) => Ok(Done::Written),
            Err(errno) => {
                tracing::debug!(path = %self.path.display(), error = %errno, "a snapshot");
                let refused = snapshots::refusal(errno);
                refused.map(Done::Refused).ok_or_else(|| errno.into())
            }
        };
        port.end(token, result);
    }

    /// What was written is durable; look whether it can be found again. Whoever hears of the flush drops its own copy.
    fn flushed(&mut self, token: Token, port: &mut Port<'_>) {
        if self.block_device {
            return port.end(token, Ok(Done::Written));
        }
        // On a thread of its own: its path may lead through what does not answer, wherever the image itself is.
        let (file, path, bytes) = (Arc::clone(&self.file), self.path.clone(), self.bytes);
        let job = move || JobOutput::Unit(presence::check(&file, &path, bytes));
        self.checking.push(token);
        port.ring.job(port.owner, token, Box::new(job));
    }

    /// It was looked whether the image is still there.
    fn checked(&mut self, result: Result<(), Errno>) -> Result<Done, Errno> {
        // What was cut off does not come back with a length.
        let result = match self.spoilt {
            Some(CUT) => Err(CUT),
            _ => result,
        };
        let path = self.path.display();
        match (result, self.spoilt) {
            (Err(errno), before) if before == Some(errno) => {}
            (Err(error), _) => tracing::error!(%path, %error, "{}", presence::words(error)),
            (Ok(()), Some(_)) => tracing::info!(%path, "the image is back in its place"),
            (Ok(()), None) => {}
        }
        self.spoilt = result.err();
        self.shown.set(self.spoilt);
        result.map(|()| Done::Written)
    }

    /// Begin or go on with a zero request by the best way that is left.
    fn zero(&mut self, index: usize, port: &mut Port<'_>) {
        let fd = self.target.fd;
        let (zeroing, way) = &mut self.zeroing[index];
        if *way == Way::Punch && !self.can_punch {
            *way = Way::ZeroRange;
        }
        if *way == Way::ZeroRange && !self.can_zero {
            *way = Way::Write;
        }
        let (token, offset, bytes) = (zeroing.token, zeroing.offset, zeroing.end - zeroing.offset);
        let way = *way;
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        match way {
            Way::Punch => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | keep;
                port.ring
                    .allocate(port.owner, token, fd, mode, offset, bytes);
            }
            Way::ZeroRange => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | keep;
                port.ring
                    .allocate(port.owner, token, fd, mode, offset, bytes);
            }
            // It may have been cut since the request came, and this piece would make it whole.
            Way::Write if self.makes_whole(offset + bytes.min(ZERO_PIECE_BYTES)) => {
                self.look(token, port);
            }
            Way::Write => self.write_zeroes(index, port),
        }
    }

    /// Write the next piece of a zero request.
    fn write_zeroes(&mut self, index: usize, port: &mut Port<'_>) {
        let (zeroing, _) = &mut self.zeroing[index];
        let (token, offset) = (zeroing.token, zeroing.offset);
        if self.spoilt == Some(CUT) {
            self.zeroing.swap_remove(index);
            return port.end(token, Err(IoError::Failed));
        }
        let piece = (zeroing.end - offset).min(ZERO_PIECE_BYTES);
        zeroing.offset += piece;
        let whole = (ZERO_BLOCKS * BLOCK_BYTES) as u64;
        let mut data = vec![self.zeroes.clone(); (piece / whole) as usize];
        if !piece.is_multiple_of(whole) {
            data.push(self.zeroes.slice(0..(piece % whole) as usize));
        }
        port.ring
            .write(port.owner, token, self.target, offset, data, None);
    }

    /// Whether a write that ends there would make an image whole that was cut: zeroes in the place of what was cut off
    /// must not pass for that. A write that ends before the end of the volume leaves the image shorter, which the next
    /// flush sees.
    fn makes_whole(&self, end: u64) -> bool {
        end >= self.bytes && !self.block_device && self.spoilt != Some(CUT)
    }

    /// Look whether the image was cut. On a thread of its own: a network file system asks its server, and NFS waits for
    /// all that is written to the file before.
    fn look(&self, token: Token, port: &mut Port<'_>) {
        let (file, bytes) = (Arc::clone(&self.file), self.bytes);
        let job = move || {
            let is_cut = presence::is_cut(&file, bytes);
            JobOutput::Unit(if is_cut { Err(CUT) } else { Ok(()) })
        };
        port.ring.job(port.owner, token, Box::new(job));
    }

    /// A step of a zero request ended.
    fn zeroed(&mut self, index: usize, result: Result<Done, Errno>, port: &mut Port<'_>) {
        let (zeroing, way) = &self.zeroing[index];
        let refused = matches!(
            result,
            Err(Errno(
                libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS | libc::ENODEV
            ))
        );
        match way {
            Way::Punch if refused => {
                self.can_punch = false;
                return self.zero(index, port);
            }
            Way::ZeroRange if refused => {
                self.can_zero = false;
                return self.zero(index, port);
            }
            Way::Write if result.is_ok() && zeroing.offset < zeroing.end => {
                return self.zero(index, port);
            }
            _ => {}
        }
        let token = zeroing.token;
        self.zeroing.swap_remove(index);
        port.end(token, result.map_err(IoError::from));
    }

    /// It was looked whether the image was cut.
    fn looked(&mut self, outcome: &Outcome) {
        if let Outcome::Job(JobOutput::Unit(Err(CUT))) = outcome {
            let _ = self.checked(Err(CUT));
        }
    }

    fn zeroing_of(&self, token: Token) -> Option<usize> {
        let mut zeroing = self.zeroing.iter();
        zeroing.position(|(zero, _)| zero.token == token)
    }

    /// A change of size has ended, or failed.
    fn resized(&mut self, [had, bytes]: [u64; 2], result: Result<(), Errno>) {
        match result {
            Ok(()) => self.bytes = bytes,
            Err(errno @ (CUT | GONE)) => {
                // Nothing was changed, and what is missing is still missed.
                self.bytes = had;
                let _ = self.checked(Err(errno));
            }
            Err(_) => {}
        }
    }

    /// Begin what waits for nothing any more.
    fn begin(&mut self, operation: Operation, port: &mut Port<'_>) {
        let Operation { token, ask } = operation;
        let (target, fd) = (self.target, self.target.fd);
        if self.spoilt == Some(CUT)
            && (changed(&ask).is_some() || matches!(ask, Ask::Resize { .. }))
        {
            return port.end(token, Err(IoError::Failed));
        }
        match ask {
            Ask::Read { offset, buf } => port.ring.read(port.owner, token, target, offset, buf),
            Ask::Write { offset, data } => {
                port.ring
                    .write(port.owner, token, target, offset, data, None);
            }
            Ask::Flush => {
                self.flushing.push(token);
                port.ring.sync(port.owner, token, fd);
            }
            Ask::Zero { bytes: 0, .. } => port.end(token, Ok(Done::Written)),
            Ask::Zero {
                offset,
                bytes,
                unmap,
            } => {
                // A device's discard promises no zeroes everywhere; the kernel's punch does, but
                // it works on whole logical blocks, and what it refuses is written.
                let way = if unmap { Way::Punch } else { Way::ZeroRange };
                let end = offset + bytes;
                self.zeroing.push((Zeroing { token, offset, end }, way));
                self.zero(self.zeroing.len() - 1, port);
            }
            Ask::Extents { range } if self.block_device => {
                let state = ExtentState::Data;
                port.end(token, Ok(Done::Extents(vec![Extent { range, state }])));
            }
            Ask::Extents { range } => {
                let file = Arc::clone(&self.file);
                let job = move || JobOutput::Extents(extents(&file, range));
                port.ring.job(port.owner, token, Box::new(job));
            }
            Ask::Resize { bytes } => {
                let had = self.bytes;
                // Until it is done, it may have either size.
                self.bytes = had.min(bytes);
                self.resizing = Some((token, [had, bytes]));
                let (file, path) = (Arc::clone(&self.file), self.path.clone());
                let block_device = self.block_device;
                let job = move || {
                    let whole = if block_device {
                        Ok(())
                    } else {
                        presence::check(&file, &path, had)
                    };
                    JobOutput::Unit(whole.and_then(|()| resize(&file, block_device, bytes)))
                };
                port.ring.job(port.owner, token, Box::new(job));
            }
            Ask::Snapshot(keep) => self.keep(token, keep, port),
        }
    }
}

impl Backend for FileBackend {
    fn submit(&mut self, _now: Nanos, operation: Operation, port: &mut Port<'_>) {
        let Some(Operation { token, ask }) = self.hold(operation, port) else {
            return;
        };
        if changed(&ask).is_some_and(|range| self.makes_whole(range.end)) {
            self.look(token, port);
            return self.looking.push(Operation { token, ask });
        }
        self.begin(Operation { token, ask }, port);
    }

    fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        // What it would change is copied.
        if let Some(index) = self.held.iter().position(|held| held.token == token) {
            let operation = self.held.swap_remove(index);
            return self.submit(now, operation, port);
        }
        if let Some(index) = self.looking.iter().position(|held| held.token == token) {
            let operation = self.looking.swap_remove(index);
            self.looked(&outcome);
            return self.begin(operation, port);
        }
        let result = match outcome {
            Outcome::Job(JobOutput::Any(frozen)) => {
                let frozen = frozen.downcast::<Result<Frozen, Errno>>();
                let frozen = frozen.expect("nothing else ends so");
                return self.frozen(token, *frozen, port);
            }
            Outcome::Job(JobOutput::Unit(result)) if self.keeping == Some(token) => {
                // If there was a copy, this is how it has ended.
                if self.copier.take().is_some() {
                    self.copying.end();
                }
                return self.kept(token, result, port);
            }
            Outcome::Job(JobOutput::Unit(result)) if taken(&mut self.checking, token) => {
                self.checked(result)
            }
            Outcome::Device(result) if taken(&mut self.flushing, token) => match result {
                Ok(_) => return self.flushed(token, port),
                Err(errno) => Err(errno),
            },
            Outcome::Device(result) => {
                if let Some(index) = self.zeroing_of(token) {
                    return self.zeroed(index, result, port);
                }
                result
            }
            Outcome::Job(JobOutput::Unit(result)) => {
                if let Some(index) = self.zeroing_of(token) {
                    self.looked(&outcome);
                    return self.write_zeroes(index, port);
                }
                if let Some((_, sizes)) = self.resizing.take_if(|(resize, _)| *resize == token) {
                    self.resized(sizes, result);
                }
                result.map(|()| Done::Written)
            }
            Outcome::Job(JobOutput::Extents(result)) => result.map(Done::Extents),
            other => unreachable!("a file backend starts nothing that ends in {other:?}"),
        };
        port.end(token, result.map_err(IoError::from));
    }

    fn poll(&mut self, _now: Nanos, _port: &mut Port<'_>) {}

    fn next_wakeup(&self) -> Option<Nanos> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            extents: !self.block_device,
            snapshots: !self.block_device && !self.read_only,
            read_only: self.read_only,
            ..Capabilities::default()
        }
    }
}

/// Take a token out of a list, which is short.
fn taken(list: &mut Vec<Token>, token: Token) -> bool {
    let at = list.iter().position(|one| *one == token);
    at.map(|at| list.swap_remove(at)).is_some()
}

/// The bytes that an operation changes, if it does.
fn changed(ask: &Ask) -> Option<Range<u64>> {
    let (_, offset, bytes) = ask.describe();
    match ask {
        Ask::Write { .. } | Ask::Zero { .. } => Some(offset..offset + bytes),
        Ask::Read { .. }
        | Ask::Flush
        | Ask::Extents { .. }
        | Ask::Resize { .. }
        | Ask::Snapshot(_) => None,
    }
}

fn resize(file: &File, block_device: bool, bytes: u64) -> Result<(), Errno> {
    if block_device {
        // A device has the size it has; it must hold the volume.
        let has = (&*file)
            .seek(SeekFrom::End(0))
            .map_err(|e| Errno::from(&e))?;
        return if has >= bytes {
            Ok(())
        } else {
            Err(Errno(libc::ENOSPC))
        };
    }
    file.set_len(bytes)
        .and_then(|()| file.sync_all())
        .map_err(|e| presence::plain(Errno::from(&e)))
}

/// The allocation of a file from the start of `range`.
fn extents(file: &File, range: SectorRange) -> Result<Vec<Extent>, Errno> {
    let seek = |offset: u64, whence: i32| {
        // SAFETY: a system call on a descriptor that is held.
        let found = unsafe { libc::lseek(file.as_raw_fd(), offset.cast_signed(), whence) };
        if found >= 0 {
            return Ok(Some(found as u64));
        }
        match Errno::last() {
            Errno(libc::ENXIO) => Ok(None),
            errno => Err(errno),
        }
    };
    let sector = SECTOR_BYTES as u64;
    let (mut runs, mut at): (Vec<Extent>, u64) = (Vec::new(), range.start);
    while at < range.end() && runs.len() < EXTENTS_MAX {
        let data = match seek(at * sector, libc::SEEK_DATA) {
            Ok(found) => found.map_or(range.end(), |byte| byte / sector),
            // A file system that cannot tell holds data everywhere.
            Err(Errno(libc::EINVAL | libc::EOPNOTSUPP)) => at,
            Err(errno) => return Err(errno),
        };
        let (end, state) = if data > at {
            (data, ExtentState::Hole)
        } else {
            // The file may have a hole that ends within a sector: that sector holds data.
            let hole = seek(at * sector, libc::SEEK_HOLE).unwrap_or(None);
            let hole = hole.map_or(range.end(), |byte| byte.div_ceil(sector));
            (hole.max(at + 1), ExtentState::Data)
        };
        let end = end.min(range.end());
        match runs.last_mut() {
            Some(last) if last.state == state => last.range.count += end - at,
            _ => runs.push(Extent {
                range: SectorRange::between(at, end),
                state,
            }),
        }
        at = end;
    }
    Ok(runs)
}
