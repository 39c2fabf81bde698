//! Where cold data lives: one file per kind behind one small trait, with filters that stack over
//! the same trait.
//!
//! The contract. [`Stack`] asserts it of every backend and filter. What one operation shows (rules 1, 4, 6, 7 and 10) it
//! asserts always. What the rules say of contents (2, 3, 4, 8 and 9) it asserts in the tests, which have it remember each
//! sector ([`Stack::watching`]). The conformance suite counts how often a call has waited (rule 5).
//! 1. Every [`Operation`] ends in exactly one [`Completion`] with its token, in any order, in a
//!    later turn or at once.
//! 2. A read brings what the last completed write, zero or resize of each byte left there.
//! 3. What was completed before a flush was submitted is durable when the flush completes.
//! 4. `Extents` answers with consecutive runs from the start of the range, at least one, all
//!    within it; what it calls a hole or zero reads as zeroes.
//! 5. No method blocks; what would block runs on the ring's worker or on threads of the backend's
//!    own, which end operations through a [`hdcs_device::worker::Remote`].
//! 6. At most [`Capabilities::in_flight_max`] operations are under way in a backend; the others
//!    wait here, in order.
//! 7. Once another owner has taken the backend over, or what it reads from is gone for good, every
//!    operation ends with [`IoError::Fenced`], and no byte of this owner reaches it any more.
//! 8. If [`Capabilities::atomic_flush`] is set, what others find at the place, or the next opening, is
//!    what was completed before some flush or resize was submitted, whole, and nothing later. One
//!    that failed may have taken effect.
//! 9. If [`Capabilities::read_only`] is set, every read of a byte brings the same for as long as the
//!    place exists, to however many have it open; it is never asked to write, zero or resize.
//! 10. A backend that has snapshots and no atomic flush is asked for one while nothing else is under way,
//!     and is asked for nothing but reads and extents until it has answered.
//!
//! Failure: operations end with an [`IoError`]; opening fails with a [`BackendError`], a sentence
//! for the user.

pub mod closing;
pub mod codec;
pub mod compression;
pub mod conformance;
mod contract;
pub mod copying;
pub mod crypt;
pub mod dir;
pub mod file;
pub mod filters;
#[cfg(feature = "hdfs")]
pub mod hdfs;
pub mod home;
pub mod image_format;
pub mod memory;
pub mod objects;
#[cfg(feature = "rbd")]
pub mod rbd;
#[cfg(feature = "s3")]
pub mod s3;
mod stack;
pub mod stores;
pub mod url;
pub mod verify;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use compression::Compression;
pub use contract::Content;
use copying::Copying;
use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Completion, Done, Nanos, SectorRange, Token};
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::objects::io::SnapshotName;
use hdcs_core::volume::Inherited;
use hdcs_device::file::DeviceError;
use hdcs_device::ring::{Outcome, Owner, Ring};
pub use stack::Stack;
use thiserror::Error;
use url::{BackendUrl, Scheme, UrlError};
use uuid::Uuid;

use crate::crypt::ObjectKey;
use crate::crypt::wrapped::WrappedKey;
use crate::stores::Counters;

/// Every kind of backend: a new one is a file of its own and a line here.
pub const SCHEMES: &[Scheme] = &[
    file::SCHEME,
    dir::SCHEME,
    #[cfg(feature = "rbd")]
    rbd::SCHEME,
    #[cfg(feature = "s3")]
    s3::SCHEME,
    #[cfg(feature = "hdfs")]
    hdfs::SCHEME,
];

/// Where a backend's data is, as its URL says; nothing has been looked at.
pub trait Place: std::fmt::Debug + Send {
    /// Two places of one name are the same.
    fn name(&self) -> String;
    /// The local file or device that it is.
    fn path(&self) -> Option<&Path> {
        None
    }
    /// The local file, device or directory that it is.
    fn local_path(&self) -> Option<&Path> {
        self.path()
    }
    /// Whether it can be seen at once that nothing is there, or that what it would be in is not mounted. Blocks.
    fn is_gone(&self) -> bool {
        self.path().is_some_and(dir::is_absent)
    }
    /// Whether what is there can only be read; then it is not made either, and nobody has it alone.
    fn is_read_only(&self) -> bool {
        false
    }
    /// Why no new volume should be there: what it stores could be read on the way, and nobody has said that this
    /// is well.
    fn exposure(&self) -> Option<String> {
        None
    }
    /// What is there, if anything. Blocks.
    fn find(&self) -> Result<Option<Found>, BackendError>;
    /// What a volume has open here, as far as that can be seen; `None`: nothing.
    fn held(&self) -> Option<Held> {
        Some(Held::Unnamed)
    }
    /// Whether there is data beyond the end of a volume of `bytes` bytes here, which a change of its size would cut
    /// off. Blocks.
    fn has_beyond(&self, _bytes: u64) -> bool {
        false
    }
    /// What is here in words, if it is not the bytes of a volume: a volume over it would destroy it.
    fn foreign(&self) -> Result<Option<&'static str>, BackendError> {
        Ok(None)
    }
    /// Verify what is there without opening it, for `hdcs check`. Blocks.
    fn verify(&self, watch: &mut dyn verify::Watch) -> Result<verify::Verified, BackendError> {
        let _ = watch;
        Ok(verify::Verified {
            note: Some(
                "not read: this backend verifies what it holds by itself (Ceph: its deep scrub)"
                    .to_owned(),
            ),
            ..verify::Verified::default()
        })
    }
    /// The same place as one that keeps snapshots and clones, if it is of that kind.
    fn snapshot_store(&self) -> Option<&dyn SnapshotStore> {
        None
    }
    /// The volume that will be opened here is encrypted. A place that holds a raw image by contract
    /// keeps it plain.
    fn encrypt(&mut self, _key: ObjectKey) {}
    /// The volume that will be opened here is this one ([`Opened::identity`]). A place where another one would notice
    /// that it is opened looks first.
    fn expect(&mut self, _identity: &str) {}
    /// What a volume that is made here is to be ([`Opened::identity`]), if that can be chosen before: it tells what an
    /// earlier attempt has made from what came here meanwhile.
    fn choose_identity(&self) -> Option<String> {
        None
    }
    /// How long one of its operations may take before it fails, if that is longer than a disk takes.
    fn patience(&self) -> Duration {
        Duration::ZERO
    }
    /// What a volume here takes of memory.
    fn memory_kind(&self) -> memory::Kind {
        memory::Kind::File
    }
    /// The volume that will be opened here keeps to this.
    fn bound(&mut self, _memory: memory::ObjectMemory) {}
    /// Open it for a volume of `bytes` bytes, alone. Blocks.
    fn open(&self, bytes: u64, absent: Absent) -> Result<Box<dyn Opened>, BackendError>;
    /// Remove what a volume has had here, with everything in it, and nothing that came in its place; nobody has it
    /// open, and a volume of objects was given up ([`SnapshotCommand::GiveUp`]). Blocks.
    fn remove(&self, was: Held) -> Result<(), BackendError>;
}

/// What a volume has at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// It cannot be told from something else there.
    Unnamed,
    /// A file.
    File {
        /// On which device.
        device: u64,
        /// Its inode.
        inode: u64,
    },
    /// Objects.
    Objects {
        /// The data key that they are encrypted with, if they are.
        key: Option<Uuid>,
    },
}

/// A place whose volume can have snapshots and clones. Snapshots are made and deleted by whoever has
/// the volume open ([`Ask::Snapshot`]); all of this does without, and fences nobody. It blocks.
pub trait SnapshotStore {
    /// The snapshots and clones of the volume there; `None`: there is no volume.
    fn kept(&self) -> Result<Option<StoredSnapshots>, BackendError>;
    /// Make a volume here, where nothing is yet, that begins as a snapshot of another one. What has to be copied
    /// for it is, if `copying` allows that, and is counted there.
    fn clone_from(
        &self,
        origin: &CloneOrigin<'_>,
        copying: &Copying,
    ) -> Result<Found, BackendError>;
    /// Whether a volume here is objects that are this program's own. A clone can be given up then, and a
    /// wrapped key lies beside it. What is no such thing is a plain image: it stays when its volume is
    /// deleted, with its snapshots.
    fn is_objects(&self) -> bool {
        false
    }
    /// Bytes that a snapshot or clone would copy, at most: 0 where the place needs no copy.
    fn copy_bytes(&self) -> Result<u64, BackendError> {
        Ok(0)
    }
    /// What a volume over a snapshot of what is here names as its backend, if there can be one; `url` is what
    /// this place was named by.
    fn snapshot_url(&self, _url: &str, _snapshot: &str) -> Option<String> {
        None
    }
    /// The wrapped data key that lies here, if the volume is encrypted, or one is about to be made.
    fn key(&self) -> Result<Option<WrappedKey>, BackendError> {
        Ok(None)
    }
    /// Put the key of the volume here in the place of the same one with another wrapping.
    fn put_key(&self, _key: &WrappedKey) -> Result<(), BackendError> {
        Ok(())
    }
    /// Stop keeping what only clones need that never came to be; how many those were.
    fn forget_dead_clones(&self) -> Result<u64, BackendError> {
        Ok(0)
    }
    /// Remove what a volume here that was given up has left, which was encrypted with this data key, if it was; how
    /// many objects that were.
    fn sweep(&self, _key: Option<Uuid>) -> Result<u64, BackendError> {
        Ok(0)
    }
}

/// What a clone begins with.
#[derive(Clone, Copy, Debug)]
pub struct CloneOrigin<'a> {
    /// Where its parent is.
    pub url: &'a str,
    /// What its parent is, if that is known ([`Opened::identity`]).
    pub identity: Option<&'a str>,
    /// The snapshot of it.
    pub snapshot: SnapshotName,
    /// The wrapped data key of both, if they are encrypted.
    pub key: Option<&'a WrappedKey>,
}

/// What depends on a volume, and what it depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredSnapshots {
    /// What it is: see [`Opened::identity`].
    pub identity: String,
    /// In the order in which they were made.
    pub snapshots: Vec<StoredSnapshot>,
    /// Clones of snapshots that are forgotten.
    pub clones: Vec<StoredClone>,
    /// Whether it is a clone itself.
    pub is_clone: bool,
    /// Whether it was given up ([`SnapshotCommand::GiveUp`]).
    pub is_gone: bool,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSnapshot {
    /// Its name. One that was made elsewhere may have one that [`SnapshotName`] does not allow.
    pub name: String,
    /// When it was made: milliseconds since 1970.
    pub made_ms: u64,
    /// The clones that begin with it.
    pub clones: Vec<StoredClone>,
    /// Why it cannot be deleted, and what to do, if it has no clones.
    pub hindrance: Option<String>,
}

/// A clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredClone {
    /// What an open backend over it says it is: see [`Opened::identity`].
    pub identity: String,
    /// Where it is, for people.
    pub location: String,
}

impl StoredSnapshots {
    /// Refuse what is not what a volume was made over, if that is known, and what was given up; `place` is for people.
    pub fn refuse_other(&self, place: &str, identity: Option<&str>) -> Result<(), BackendError> {
        match identity {
            Some(was) if was != self.identity => Err(BackendError::Replaced {
                has: self.identity.clone(),
                was: was.to_owned(),
            }),
            _ if self.is_gone => Err(BackendError::Gone(place.to_owned())),
            _ => Ok(()),
        }
    }

    /// Every clone.
    pub fn all_clones(&self) -> impl Iterator<Item = &StoredClone> {
        let snapshots = self.snapshots.iter();
        snapshots.flat_map(|s| &s.clones).chain(&self.clones)
    }
}

/// What is at a backend's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its size.
    pub bytes: u64,
    /// Whether a new volume may use a part of it.
    pub partly: bool,
}

/// What is asked of a backend. Offsets and lengths are bytes, multiples of 512.
#[derive(Debug)]
pub enum Ask {
    /// Fill the buffer.
    Read {
        /// From where.
        offset: u64,
        /// Returned filled.
        buf: BufMut,
    },
    /// Write buffers one after another.
    Write {
        /// To where.
        offset: u64,
        /// What.
        data: Vec<Buf>,
    },
    /// Make a range read as zeroes.
    Zero {
        /// From where.
        offset: u64,
        /// How much.
        bytes: u64,
        /// Whether its space may be given back.
        unmap: bool,
    },
    /// Make completed writes durable.
    Flush,
    /// Describe the allocation.
    Extents {
        /// Of what.
        range: SectorRange,
    },
    /// Change the size; what is added reads as zeroes.
    Resize {
        /// The new size.
        bytes: u64,
    },
    /// What only backends with [`Capabilities::snapshots`] are asked.
    Snapshot(SnapshotCommand),
}

/// What is asked about keeping states. Ends with [`Done::Written`] or [`Done::Refused`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotCommand {
    /// Keep a state under a name: what the last flush made durable is in it, and nothing that is
    /// submitted after its end.
    Snapshot {
        /// The name.
        name: SnapshotName,
        /// The time: milliseconds since 1970.
        made_ms: u64,
        /// Whether data may be copied for it where nothing else is possible. The state is kept when this
        /// ends, but the snapshot is there only once the copy has ended ([`SnapshotCommand::Complete`]).
        copy: bool,
    },
    /// Wait for the end of the copy that a snapshot has begun ([`Opened::copying`]).
    Complete,
    /// Forget a snapshot.
    Forget {
        /// Which.
        name: SnapshotName,
    },
    /// The volume is not needed any more: its parent may free what it has for it. From then on it
    /// cannot be opened.
    GiveUp,
}

impl Ask {
    /// A word for it, and the bytes that it is about.
    pub fn describe(&self) -> (&'static str, u64, u64) {
        match self {
            Self::Read { offset, buf } => ("read", *offset, buf.len() as u64),
            Self::Write { offset, data } => {
                let bytes = data.iter().map(|buf| buf.len() as u64).sum();
                ("write", *offset, bytes)
            }
            Self::Zero {
                offset,
                bytes,
                unmap,
            } => (if *unmap { "discard" } else { "zero" }, *offset, *bytes),
            Self::Flush => ("flush", 0, 0),
            Self::Extents { range } => ("extents", range.byte_offset(), range.bytes() as u64),
            Self::Resize { bytes } => ("resize", 0, *bytes),
            Self::Snapshot(SnapshotCommand::Snapshot { .. }) => ("snapshot", 0, 0),
            Self::Snapshot(SnapshotCommand::Complete) => ("complete", 0, 0),
            Self::Snapshot(SnapshotCommand::Forget { .. }) => ("forget", 0, 0),
            Self::Snapshot(SnapshotCommand::GiveUp) => ("give-up", 0, 0),
        }
    }
}

/// One thing that is asked of a backend.
#[derive(Debug)]
pub struct Operation {
    /// Echoed in the completion; unique among the operations of its backend under way.
    pub token: Token,
    /// What.
    pub ask: Ask,
}

/// What a backend works with during one call.
pub struct Port<'a> {
    /// Where its I/O goes.
    pub ring: &'a mut Ring,
    /// Whose operations they are.
    pub owner: Owner,
    /// What has ended.
    pub done: &'a mut Vec<Completion>,
}

impl Port<'_> {
    /// End an operation.
    pub fn end(&mut self, token: Token, result: Result<Done, IoError>) {
        self.done.push(Completion { token, result });
    }
}

/// One backend, or a filter over one.
pub trait Backend {
    /// Begin an operation.
    fn submit(&mut self, now: Nanos, operation: Operation, port: &mut Port<'_>);
    /// An operation that it gave to the ring ended.
    fn completed(&mut self, now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>);
    /// Go on with what has waited for its time.
    fn poll(&mut self, now: Nanos, port: &mut Port<'_>);
    /// When [`Self::poll`] is due.
    fn next_wakeup(&self) -> Option<Nanos>;
    /// What it can do; does not change while it is open.
    fn capabilities(&self) -> Capabilities;
    /// The local store that it is, if the volume is in storage mode.
    fn home(&self) -> Option<&home::LocalStoreBackend> {
        None
    }
    /// See [`Self::home`].
    fn home_mut(&mut self) -> Option<&mut home::LocalStoreBackend> {
        None
    }
    /// No operation comes any more: begin nothing of its own, and say whether nothing is under way.
    /// Asked again whenever something has ended, and dropped only then.
    fn finish(&mut self) -> bool {
        true
    }
}

/// What a backend can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Capabilities {
    /// Whether it answers `Extents` with more than "data".
    pub extents: bool,
    /// Whether it takes [`Ask::Snapshot`]; others never see it.
    pub snapshots: bool,
    /// Whether it can only be read, as [`Place::is_read_only`] said.
    pub read_only: bool,
    /// Operations under way at most.
    pub in_flight_max: usize,
    /// Whether what is written becomes visible to others and durable all at once, at the next flush
    /// or resize: before it the place holds what the last one left, whatever happens.
    pub atomic_flush: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            extents: false,
            snapshots: false,
            read_only: false,
            in_flight_max: usize::MAX,
            atomic_flush: false,
        }
    }
}

/// A backend that is open, but not yet on the thread that will use it.
pub trait Opened: Send {
    /// Put it to use on this thread.
    fn build(self: Box<Self>) -> Box<dyn Backend>;
    /// Names what was found at the place, the same at every opening, so that a volume notices when
    /// something else stands there. `None`: the place has no identity of its own.
    fn identity(&self) -> Option<String> {
        None
    }
    /// Names the immutable state that what is there began as, such as a snapshot that it is a clone of:
    /// the same name for everything that began as that, and for nothing else, for ever.
    fn origin(&self) -> Option<&str> {
        None
    }
    /// Add the blocks that are certainly still as in the origin, before anything is asked of it.
    fn inherit(&self, _inherited: &mut Inherited) {}
    /// What it counts of the requests to its store, if it has one.
    fn counters(&self) -> Option<Arc<Counters>> {
        None
    }
    /// How far the copy for a snapshot is, if it may have to make one.
    fn copying(&self) -> Option<Arc<Copying>> {
        None
    }
    /// Where it says why an image is not what its volume needs.
    fn spoilt(&self) -> Option<Arc<file::Spoilt>> {
        None
    }
    /// Where it looks how it is to compress, if it can.
    fn compression(&self) -> Option<Arc<Compression>> {
        None
    }
}

/// Why a backend could not be opened.
#[derive(Debug, Error)]
pub enum BackendError {
    /// Its URL is wrong.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// Its file could not be used.
    #[error("backend: {0}")]
    Device(#[from] DeviceError),
    /// It cannot be reached at present; later it may.
    #[error("backend: {0}")]
    Unreachable(String),
    /// It was reached and refused: locked, forbidden, damaged, or not what it should be.
    #[error("backend: {0}")]
    Refused(String),
    /// There is nothing at its place.
    #[error("backend: {0} does not exist; put it back, or delete the volume if its data is gone")]
    Absent(String),
    /// What it had at its place was given up: nobody can open it any more.
    #[error(
        "backend: the volume at {0} was deleted: name another place, or delete this volume if that is right"
    )]
    Gone(String),
    /// There is something at its place, where nothing was to be.
    #[error(
        "backend: {0} is there already, and is left as it was: name a place where nothing is, or take that \
         one and what it holds with `hdcs volume create`, or `hdcs volume import --overwrite`"
    )]
    Exists(String),
    /// Something else stands at its place than when the volume was made.
    #[error(
        "backend: it is {has}, but the volume was made over {was}: another image stands in its place; \
         put the right one back, or delete the volume if its data is gone"
    )]
    Replaced {
        /// What is there.
        has: String,
        /// What was.
        was: String,
    },
    /// A new volume over an existing image of another size.
    #[error(
        "backend: {place} exists and holds {has} bytes, but the volume has {needs}; create the volume \
         with --size {has} to use it as it is, or name a place where nothing is"
    )]
    Size {
        /// The image.
        place: String,
        /// Its size.
        has: u64,
        /// The volume's size.
        needs: u64,
    },
    /// The image of an existing volume has lost its end.
    #[error(
        "backend: {place} holds {has} bytes, but the volume has {needs}: it was cut or replaced; restore \
         it, or enlarge it to that size if zeroes at its end are acceptable"
    )]
    Shrunk {
        /// The image.
        place: String,
        /// Its size.
        has: u64,
        /// The volume's size.
        needs: u64,
    },
    /// A filter's log file could not be used.
    #[error("backend: cannot open the log {}: {source}", path.display())]
    Log {
        /// The log.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl BackendError {
    /// Whether another attempt may succeed without anybody having changed the volume.
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            // A file system behind a network that is away, or not mounted any more.
            Self::Device(DeviceError::Io { source, .. }) => matches!(
                source.raw_os_error(),
                Some(
                    libc::ESTALE
                        | libc::ENODEV
                        | libc::ENOTCONN
                        | libc::EHOSTDOWN
                        | libc::EHOSTUNREACH
                        | libc::ETIMEDOUT
                )
            ),
            _ => false,
        }
    }
}

/// What to do when nothing is at the backend's place, and when something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absent {
    /// Make it: the volume is new. What is there is used.
    Create,
    /// Make it, and refuse what is there, also if that came while this was looking; but not the volume that the place
    /// was told to expect, which an earlier attempt has made.
    CreateNew,
    /// Refuse: the volume's data should be there.
    Refuse,
}

/// A backend with its filters, open but not yet on its shard's thread.
pub struct Prepared {
    backend: Box<dyn Opened>,
    filters: filters::Prepared,
    bytes: u64,
    home: Option<home::store::Store>,
}

/// Whether an image of `has` bytes can carry a volume of `needs`. A place of which a volume may use
/// a part, such as a device, may be larger. An image that is larger when its volume is made was
/// hardly meant for it; later, it is what an interrupted resize leaves.
pub fn check_size(
    place: &str,
    found: Found,
    needs: u64,
    absent: Absent,
) -> Result<(), BackendError> {
    let (place, has) = (place.to_owned(), found.bytes);
    if has == needs || has > needs && (found.partly || absent == Absent::Refuse) {
        return Ok(());
    }
    Err(match absent {
        Absent::Create | Absent::CreateNew => BackendError::Size { place, has, needs },
        Absent::Refuse => BackendError::Shrunk { place, has, needs },
    })
}

/// Open a backend. Blocks: not for a shard's thread.
pub fn open(url: &str, bytes: u64, absent: Absent) -> Result<Prepared, BackendError> {
    open_with(url, bytes, absent, None, memory::ObjectMemory::most(), None)
}

/// The same with the key of the volume, if it is encrypted, and what the volume was made over, if that is known:
/// something else is refused.
pub fn open_with(
    url: &str,
    bytes: u64,
    absent: Absent,
    key: Option<ObjectKey>,
    memory: memory::ObjectMemory,
    identity: Option<&str>,
) -> Result<Prepared, BackendError> {
    let mut url = BackendUrl::parse(url)?;
    if let Some(exposure) = url.place.exposure() {
        // A volume that is there already is served all the same.
        tracing::warn!(place = url.place.name(), "{exposure}");
    }
    let filters = filters::prepare(&url.filters)?;
    if let Some(key) = key {
        url.place.encrypt(key);
    }
    if let Some(identity) = identity {
        url.place.expect(identity);
    }
    url.place.bound(memory);
    let backend = Prepared::over(url.place.open(bytes, absent)?, filters, bytes);
    backend.expect(identity)?;
    Ok(backend)
}

/// See [`Place::choose_identity`].
pub fn choose_identity(url: &str) -> Option<String> {
    BackendUrl::parse(url).ok()?.place.choose_identity()
}

/// What is at a URL's place, if anything. Blocks.
pub fn find(url: &str) -> Result<Option<Found>, BackendError> {
    BackendUrl::parse(url)?.place.find()
}

/// Whether what a URL names can only be read; not so if nobody knows what it names.
pub fn is_read_only(url: &str) -> bool {
    BackendUrl::parse(url).is_ok_and(|url| url.place.is_read_only())
}

impl Prepared {
    /// An open backend of `bytes` bytes under filters.
    pub fn over(backend: Box<dyn Opened>, filters: filters::Prepared, bytes: u64) -> Self {
        Self {
            backend,
            filters,
            bytes,
            home: None,
        }
    }

    /// With the local store of a volume in storage mode in front of it.
    #[must_use]
    pub fn behind(self, home: Option<home::store::Store>) -> Self {
        Self { home, ..self }
    }

    /// See [`Opened::identity`].
    pub fn identity(&self) -> Option<String> {
        self.backend.identity()
    }

    /// See [`Opened::origin`].
    pub fn origin(&self) -> Option<&str> {
        self.backend.origin()
    }

    /// What a volume of `bytes` bytes over it has inherited of its origin, whose number in the cache is
    /// given.
    pub fn inherited(&self, origin: u32, bytes: u64) -> Inherited {
        let mut inherited = Inherited::new(origin);
        self.backend.inherit(&mut inherited);
        let blocks = bytes / BLOCK_BYTES as u64;
        inherited.remove(blocks, u64::MAX - blocks);
        inherited
    }

    /// Refuse what is not what the volume was made over.
    fn expect(&self, identity: Option<&str>) -> Result<(), BackendError> {
        let has = self.identity();
        match (identity, &has) {
            (Some(was), Some(has)) if was != has => Err(BackendError::Replaced {
                has: has.clone(),
                was: was.to_owned(),
            }),
            _ => Ok(()),
        }
    }
}
