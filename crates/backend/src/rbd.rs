//! The rbd backend: an image of a Ceph cluster, byte for byte what the volume's clients wrote.
//!
//! Invariants:
//! 1. The image's exclusive lock is held while it is open, in the mode in which others that ask for
//!    it are refused; see [`owner`]. Once the lock is lost, or the cluster has locked this client
//!    out, every operation ends in [`IoError::Fenced`], and none is sent any more.
//! 2. A buffer that librbd was given stays until the operation has ended. A backend that is dropped
//!    before leaves its buffers and its image behind: what is under way may never end.
//! 3. The ring waits for the image's descriptor exactly while operations of librbd are under way, so
//!    nothing of it outlives a volume in its slot.
//! 4. Operations go out without a time limit: one that was given up could still be carried out later,
//!    over what was written since. They wait for the cluster to come back, and the volume's log
//!    takes the writes meanwhile. Everything before that, when an image is opened, has its limit.
//! 5. A snapshot of an image is opened without its lock, and only read. It is opened as for writing
//!    all the same, though librbd then refuses to write to it: so it is told of the snapshot's
//!    deletion. Opened read-only, librbd would go on, and read zeroes. What it has read counts only
//!    once it was asked again whether the snapshot is there ([`RbdBackend::check`]).
//!
//! librbd's own cache is off; the volume is one. Extents and resizing block and run on a thread of the
//! backend's own, and so does closing ([`closing`]).

mod ceph;
mod owner;
mod snapshots;

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;

use ceph::{Ceph, Cluster, Event, Image, Pool};
use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{Done, Extent, ExtentState, Nanos, SectorRange, Token};
use hdcs_core::base::limits::{BLOCK_BYTES, SECTOR_BYTES};
use hdcs_core::volume::Inherited;
use hdcs_device::Errno;
use hdcs_device::ring::Outcome;
use hdcs_device::worker::{JobOutput, Remote};
use slab::Slab;

use super::url::{Given, OptionList, Scheme, UrlError, decode};
use super::{
    Absent, Ask, Backend, BackendError, Capabilities, Found, Opened, Operation, Place, Port,
    SnapshotStore, check_size, closing,
};
use crate::memory;

/// Operations under way at most: enough to keep a cluster busy, and below the number at which the
/// library begins to hold callers up.
const IN_FLIGHT_MAX: usize = 256;
/// How long a cluster may take for each step before an image is used.
const STEP_SECONDS: &str = "10";
/// How long opening may take in all: several such steps, and the lock.
const OPEN_TIME_MAX: Duration = Duration::from_secs(45);
/// How long an earlier use of the image in this process gets to end.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(20);
/// Objects that one answer about extents covers at most; a client asks again from where it ended.
const EXTENT_OBJECTS_MAX: u64 = 4096;
/// The token of the wait for the image's descriptor; without the bits by which a local store tells its own.
const EVENT_TOKEN: Token = Token(u64::MAX >> 2);

/// See the module.
pub const SCHEME: Scheme = Scheme {
    name: "rbd",
    form: "rbd:POOL/IMAGE[@SNAP]",
    options: &["conf", "id", "steal"],
    parse,
};

/// What a URL says.
#[derive(Clone, Debug)]
struct ImagePlace {
    pool: String,
    /// Empty: the default one.
    namespace: String,
    image: String,
    snapshot: Option<String>,
    conf: Option<String>,
    id: Option<String>,
    /// Whether a new volume takes the image away from a client that is alive.
    steal: bool,
}

fn parse(given: &Given<'_>, options: &mut OptionList) -> Result<Box<dyn Place>, UrlError> {
    parse_place(given, options).map(|place| Box::new(place) as Box<dyn Place>)
}

fn parse_place(given: &Given<'_>, options: &mut OptionList) -> Result<ImagePlace, UrlError> {
    let must = "it must name a pool and an image, as in rbd:POOL/IMAGE or rbd:POOL/NAMESPACE/IMAGE";
    let name = |part: &str| match String::from_utf8(decode(part)?) {
        Ok(name) if !name.is_empty() && !name.contains(['\0', '/', '@']) => Ok(name),
        _ => Err(given.refuse(must)),
    };
    let (place, snapshot) = match given.place.split_once('@') {
        Some((place, snapshot)) => (place, Some(name(snapshot)?)),
        None => (given.place, None),
    };
    let parts: Vec<&str> = place.split('/').collect();
    let (pool, namespace, image) = match parts[..] {
        [pool, image] => (name(pool)?, String::new(), name(image)?),
        [pool, namespace, image] => (name(pool)?, name(namespace)?, name(image)?),
        _ => return Err(given.refuse(must)),
    };
    let conf = options.path("conf")?;
    let steal = options.switch("steal")?.unwrap_or(false);
    if steal && snapshot.is_some() {
        return Err(given.refuse("a snapshot has no owner: leave out steal=on"));
    }
    Ok(ImagePlace {
        pool,
        namespace,
        image,
        snapshot,
        conf: conf.map(|path| path.display().to_string()),
        id: options.take("id"),
        steal,
    })
}

impl Place for ImagePlace {
    fn memory_kind(&self) -> memory::Kind {
        memory::Kind::Rbd
    }

    fn name(&self) -> String {
        let conf = self.conf.as_deref().unwrap_or("");
        format!("{} {conf}", self.spec())
    }

    fn is_read_only(&self) -> bool {
        self.snapshot.is_some()
    }

    fn snapshot_store(&self) -> Option<&dyn SnapshotStore> {
        // A snapshot has none of its own.
        self.snapshot.is_none().then_some(self)
    }

    fn find(&self) -> Result<Option<Found>, BackendError> {
        let (ceph, this) = (ceph::load()?, self.clone());
        bounded(&self.spec(), move || match this.look(ceph)? {
            Look::Image { bytes } => Ok(Some(Found {
                bytes,
                partly: false,
            })),
            Look::Nothing(pool) => {
                drop(pool);
                Ok(None)
            }
        })
    }

    fn open(&self, bytes: u64, absent: Absent) -> Result<Box<dyn Opened>, BackendError> {
        let (ceph, this) = (ceph::load()?, self.clone());
        closing::wait(Some(&self.name()), CLOSE_TIME_MAX);
        bounded(&self.spec(), move || this.open_now(ceph, bytes, absent))
            .map(|prepared| Box::new(prepared) as Box<dyn Opened>)
    }

    fn remove(&self, _was: super::Held) -> Result<(), BackendError> {
        if self.snapshot.is_some() {
            let what = "a snapshot is deleted by the volume that it is of";
            return Err(BackendError::Refused(format!("{}: {what}", self.spec())));
        }
        let pool = self.connect(ceph::load()?, true)?;
        let removed = pool.remove_image(&self.image);
        removed.map_err(|errno| self.fail("removing it", errno))
    }
}

/// Run something that talks to a cluster on a thread, and give up on it if it does not end. What it
/// brings later is dropped, and so closed.
fn bounded<T: Send + 'static>(
    place: &str,
    run: impl FnOnce() -> Result<T, BackendError> + Send + 'static,
) -> Result<T, BackendError> {
    let (answer, answered) = sync_channel(1);
    let busy = closing::begin(format!("opening {place}"));
    std::thread::Builder::new()
        .name("hdcs-rbd-open".into())
        .spawn(move || {
            // Whoever asked may have given up.
            let _ = answer.send(run());
            drop(busy);
        })
        .map_err(|error| BackendError::Refused(format!("{place}: no thread: {error}")))?;
    match answered.recv_timeout(OPEN_TIME_MAX) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(BackendError::Unreachable(format!(
            "{place}: the cluster gave no answer for {} s",
            OPEN_TIME_MAX.as_secs()
        ))),
        Err(RecvTimeoutError::Disconnected) => Err(BackendError::Refused(format!(
            "{place}: opening it ended without an answer"
        ))),
    }
}

/// A failure to open, in words.
fn failure(place: &str, what: &str, errno: Errno) -> BackendError {
    match IoError::from(errno) {
        _ if errno.0 == libc::ESHUTDOWN => BackendError::Refused(format!(
            "{place}: {what}: the cluster has locked this client out (see `ceph osd blocklist ls`)"
        )),
        IoError::Unreachable => BackendError::Unreachable(format!("{place}: {what}: {errno}")),
        _ => BackendError::Refused(format!("{place}: {what}: {errno}")),
    }
}

/// What was found before an image is used.
enum Look {
    Image { bytes: u64 },
    Nothing(Arc<Pool>),
}

impl ImagePlace {
    /// As the `rbd` program writes it.
    fn image_spec(&self) -> String {
        let namespace = match &*self.namespace {
            "" => String::new(),
            name => format!("{name}/"),
        };
        format!("{}/{namespace}{}", self.pool, self.image)
    }

    /// The same with its snapshot, for messages.
    fn spec(&self) -> String {
        let snapshot = self.snapshot.iter().map(|name| format!("@{name}"));
        format!("rbd:{}{}", self.image_spec(), snapshot.collect::<String>())
    }

    /// Open the image or snapshot; `None`: there is no such image. That a snapshot is not there is an
    /// error, since none is ever made.
    fn image(&self, pool: &Arc<Pool>, read_only: bool) -> Result<Option<Image>, BackendError> {
        let (pool, snapshot) = (Arc::clone(pool), self.snapshot.as_deref());
        match pool.image(&self.image, snapshot, read_only, &self.name()) {
            Ok(image) => Ok(Some(image)),
            Err(Errno(libc::ENOENT)) if snapshot.is_none() => Ok(None),
            Err(Errno(libc::ENOENT)) => Err(BackendError::Refused(format!(
                "{} does not exist: `rbd snap ls {}` lists the snapshots that do",
                self.spec(),
                self.image_spec()
            ))),
            Err(errno) => Err(self.fail("opening it", errno)),
        }
    }

    fn fail(&self, what: &str, errno: Errno) -> BackendError {
        failure(&self.spec(), what, errno)
    }

    /// A connection to the pool. With `bounded`, what it is asked for fails after a while if the
    /// cluster does not answer.
    fn connect(&self, ceph: &'static Ceph, bounded: bool) -> Result<Arc<Pool>, BackendError> {
        let fail = |what: &str, errno| self.fail(what, errno);
        let id = self.id.as_deref().unwrap_or("admin");
        let cluster = Cluster::new(ceph, id).map_err(|e| fail("making a client", e))?;
        let conf = self.conf.as_deref();
        cluster.read_conf(conf).map_err(|errno| {
            let file = conf.unwrap_or("/etc/ceph/ceph.conf");
            self.fail(
                &format!("reading the cluster's configuration {file} (option conf=PATH)"),
                errno,
            )
        })?;
        let limit = if bounded { STEP_SECONDS } else { "0" };
        for (option, value) in [
            ("client_mount_timeout", STEP_SECONDS),
            ("rados_mon_op_timeout", limit),
            ("rados_osd_op_timeout", limit),
            ("rbd_cache", "false"),
            // With two threads, the one that opened an image may lock it after the caller has closed and freed it, which
            // ends the process (`ImageState::complete_action_unlock` of 16.2.15).
            ("librados_thread_count", "1"),
            // librbd raises the number of threads to this one.
            ("rbd_op_threads", "1"),
            // Without this copy a write that fails before it is sent, as it does once the lock is
            // lost, never ends (seen with 16.2.15).
            ("rbd_disable_zero_copy_writes", "true"),
            // Whoever loses the lock must not write any more.
            ("rbd_blocklist_on_break_lock", "true"),
        ] {
            let set = cluster.set(option, value);
            set.map_err(|errno| fail(&format!("setting {option}"), errno))?;
        }
        cluster
            .connect()
            .map_err(|e| fail(&format!("connecting to the cluster as client.{id}"), e))?;
        self.pool_in(&Arc::new(cluster))
    }

    /// Its pool, over a connection that is there.
    fn pool_in(&self, cluster: &Arc<Cluster>) -> Result<Arc<Pool>, BackendError> {
        let pool = cluster.pool(&self.pool, &self.namespace);
        pool.map(Arc::new).map_err(|errno| {
            let pool = &self.pool;
            if errno.0 == libc::ENOENT {
                let why = format!("{}: there is no pool {pool}", self.spec());
                return BackendError::Refused(format!(
                    "{why}; make it: ceph osd pool create {pool}"
                ));
            }
            self.fail(&format!("opening pool {pool}"), errno)
        })
    }

    /// See what is there, without taking part in it. Ends in bounded time.
    fn look(&self, ceph: &'static Ceph) -> Result<Look, BackendError> {
        let pool = self.connect(ceph, true)?;
        let Some(image) = self.image(&pool, true)? else {
            return Ok(Look::Nothing(pool));
        };
        let bytes = image.bytes();
        let features = image.features();
        image.close();
        let bytes = bytes.map_err(|errno| self.fail("asking for its size", errno))?;
        let features = features.map_err(|errno| self.fail("asking for its features", errno))?;
        if self.snapshot.is_none() && features & ceph::FEATURE_EXCLUSIVE_LOCK == 0 {
            return Err(BackendError::Refused(format!(
                "{} lacks the feature exclusive-lock, without which two nodes could write to it at \
                 once; turn it on: rbd feature enable {}/{} exclusive-lock",
                self.spec(),
                self.pool,
                self.image
            )));
        }
        Ok(Look::Image { bytes })
    }

    fn open_now(
        &self,
        ceph: &'static Ceph,
        bytes: u64,
        absent: Absent,
    ) -> Result<Prepared, BackendError> {
        let spec = self.spec();
        let found = Found {
            bytes: match (self.look(ceph)?, absent) {
                (Look::Image { .. }, Absent::CreateNew) => return Err(BackendError::Exists(spec)),
                (Look::Image { bytes }, _) => bytes,
                (Look::Nothing(_), Absent::Refuse) => return Err(BackendError::Absent(spec)),
                (Look::Nothing(pool), Absent::Create | Absent::CreateNew) => {
                    match pool.create_image(&self.image, bytes) {
                        Ok(()) => bytes,
                        Err(Errno(libc::EEXIST)) if absent == Absent::CreateNew => {
                            return Err(BackendError::Exists(spec));
                        }
                        Err(errno) => return Err(self.fail("creating it", errno)),
                    }
                }
            },
            partly: false,
        };
        check_size(&spec, found, bytes, absent)?;
        let pool = self.connect(ceph, false)?;
        let Some(mut image) = self.image(&pool, false)? else {
            return Err(BackendError::Absent(spec));
        };
        if self.snapshot.is_none() {
            // Only a new volume steals: an older one that was fenced must not take the image back.
            let steal = self.steal && absent != Absent::Refuse;
            owner::take(&image, &spec, steal)?;
        }
        // Whoever had it before may have changed it meanwhile.
        let found = Found {
            bytes: image
                .bytes()
                .map_err(|errno| self.fail("asking for its size", errno))?,
            ..found
        };
        check_size(&spec, found, bytes, absent)?;
        let prepared = Prepared::about(&image, self.snapshot.as_deref());
        let (identity, extents) = prepared.map_err(|errno| self.fail("looking at it", errno))?;
        // Without a list of its objects nobody knows which of them are its own.
        let is_known = self.snapshot.is_none() && extents.is_some();
        let origin = is_known.then(|| Origin::of(&image)).transpose();
        let origin = origin.map_err(|errno| self.fail("looking at its parent", errno))?;
        let event = image.make_event();
        event.map_err(|errno| self.fail("asking to be told of finished operations", errno))?;
        Ok(Prepared {
            image,
            identity,
            origin: origin.flatten(),
            extents,
            read_only: self.snapshot.is_some(),
            place: spec,
        })
    }
}

/// An image that is open and locked, or a snapshot that is open.
struct Prepared {
    image: Image,
    identity: String,
    origin: Option<Origin>,
    read_only: bool,
    /// Bytes of an object, if the image knows which of its objects exist.
    extents: Option<u64>,
    place: String,
}

/// The snapshot that an image began as, and what is still as there.
struct Origin {
    name: String,
    /// Runs of bytes: offsets and lengths.
    inherited: Vec<(u64, u64)>,
}

impl Origin {
    /// Of an image that is locked, so that nobody else writes to it. An object that the image has not got
    /// is read from the parent; one that was discarded it has, empty.
    fn of(image: &Image) -> Result<Option<Self>, Errno> {
        let Some(parent) = image.parent()? else {
            return Ok(None);
        };
        let pool = image.pool();
        let snapshot = format!("{}@{}", parent.image, parent.snapshot);
        Ok(Some(Self {
            name: format!("rbd:{}/{}/{snapshot}", pool.cluster.fsid()?, parent.pool),
            inherited: gaps(&image.own(image.bytes()?)?, parent.overlap_bytes),
        }))
    }
}

/// What lies below `end` and in none of some runs, which are in order.
fn gaps(runs: &[(u64, u64)], end: u64) -> Vec<(u64, u64)> {
    let (mut gaps, mut at) = (Vec::new(), 0);
    for &(offset, bytes) in runs.iter().chain([&(end, 0)]) {
        let to = offset.min(end);
        if at < to {
            gaps.push((at, to - at));
        }
        at = at.max(offset + bytes);
    }
    gaps
}

impl Prepared {
    /// The identity of an image or snapshot, and whether it can tell its allocation.
    fn about(image: &Image, snapshot: Option<&str>) -> Result<(String, Option<u64>), Errno> {
        let pool = image.pool();
        let mut identity = format!("rbd:{}/{}/{}", pool.cluster.fsid()?, pool.id(), image.id()?);
        if let Some(name) = snapshot {
            identity = format!("{identity}@{}", image.snapshot_id(name)?);
        }
        // Without that list, or when it cannot be trusted, every object would have to be asked for.
        let extents = if image.features()? & ceph::FEATURE_FAST_DIFF != 0
            && image.flags()? & ceph::FLAG_FAST_DIFF_INVALID == 0
        {
            Some(image.object_bytes()?)
        } else {
            None
        };
        Ok((identity, extents))
    }
}

impl Opened for Prepared {
    fn build(self: Box<Self>) -> Box<dyn Backend> {
        Box::new(RbdBackend {
            image: Arc::new(self.image),
            flights: Slab::new(),
            events: Vec::new(),
            vectors: Vec::new(),
            waiting: false,
            fenced: false,
            read_only: self.read_only,
            unchecked: Vec::new(),
            extents: self.extents,
            keeping: None,
            side: None,
            place: self.place,
        })
    }

    fn identity(&self) -> Option<String> {
        Some(self.identity.clone())
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
}

/// What an operation of librbd works on, for as long as it does.
enum Held {
    Read(BufMut),
    Write {
        _data: Vec<Buf>,
    },
    Nothing,
    /// What a snapshot has answered, while it is asked whether it is still there.
    Unchecked(Vec<(Token, Done)>),
}

/// Something that blocks in librbd, and ends its operation by itself.
type Job = Box<dyn FnOnce() + Send>;

/// See the module.
struct RbdBackend {
    image: Arc<Image>,
    /// Operations of librbd under way, by the number that it knows.
    flights: Slab<(Token, Held)>,
    /// Stay, so that their capacity is used again.
    events: Vec<Event>,
    vectors: Vec<libc::iovec>,
    /// Whether the ring waits for the image's descriptor.
    waiting: bool,
    fenced: bool,
    read_only: bool,
    /// What a snapshot has answered since it was last asked whether it is still there.
    unchecked: Vec<(Token, Done)>,
    extents: Option<u64>,
    /// The snapshot that is being made or deleted.
    keeping: Option<Token>,
    /// The thread for what blocks, once there was something.
    side: Option<Sender<Job>>,
    place: String,
}

impl RbdBackend {
    /// How an operation failed. Without the lock the library refuses writes as to a read-only image;
    /// from a client that is locked out the cluster takes nothing; a snapshot that was deleted the
    /// library does not find any more.
    fn error(&mut self, errno: Errno) -> IoError {
        let lost = match (errno.0, self.read_only) {
            (libc::ENOENT, true) => {
                Some("the snapshot was deleted; nothing is read from it any more")
            }
            (libc::ESHUTDOWN, true) => Some("the cluster has locked this client out"),
            (libc::ESHUTDOWN | libc::EROFS, false) => {
                Some("another client has taken the image over; nothing is written to it any more")
            }
            _ => None,
        };
        if let Some(why) = lost.filter(|_| !self.fenced) {
            self.fenced = true;
            tracing::error!(image = self.place, "{why}");
        }
        if self.fenced {
            return IoError::Fenced;
        }
        tracing::debug!(image = self.place, error = %errno, "an operation failed");
        IoError::from(errno)
    }

    /// Note an operation that is handed to librbd, under a number.
    fn begin(
        &mut self,
        token: Token,
        held: Held,
        start: impl FnOnce(&Image, usize) -> Result<(), Errno>,
        port: &mut Port<'_>,
    ) {
        let number = self.flights.insert((token, held));
        if let Err(errno) = start(&self.image, number) {
            self.flights.remove(number);
            let error = self.error(errno);
            return port.end(token, Err(error));
        }
        self.wait(port);
    }

    /// Have the ring wait for the image's descriptor while operations are under way.
    fn wait(&mut self, port: &mut Port<'_>) {
        if !self.waiting && !self.flights.is_empty() {
            self.waiting = true;
            port.ring
                .readable(port.owner, EVENT_TOKEN, self.image.event());
        }
    }

    /// End what has finished.
    fn take_events(&mut self, port: &mut Port<'_>) {
        let mut events = std::mem::take(&mut self.events);
        self.image.take_events(&mut events);
        for Event { number, result } in events.drain(..) {
            let (token, held) = self.flights.remove(number);
            let result = match (result, held) {
                (result, Held::Unchecked(answers)) => {
                    let error = result.err().map(|errno| self.error(errno));
                    for (token, done) in answers {
                        port.end(token, error.map_or(Ok(done), Err));
                    }
                    continue;
                }
                (Ok(bytes), Held::Read(buf)) if bytes == buf.len() => Ok(Done::Read(buf)),
                // The image ends before the range does: somebody has cut it.
                (Ok(_), Held::Read(_)) => Err(IoError::Failed),
                (Ok(_), _) => Ok(Done::Written),
                (Err(errno), _) => Err(self.error(errno)),
            };
            self.end(token, result, port);
        }
        self.events = events;
        self.check(port);
    }

    /// End an operation, but keep what a snapshot has answered for [`Self::check`].
    fn end(&mut self, token: Token, result: Result<Done, IoError>, port: &mut Port<'_>) {
        match result {
            Ok(done) if self.read_only => self.unchecked.push((token, done)),
            result => port.end(token, result),
        }
    }

    /// Ask whether the snapshot is still there, for all that it has answered. Told of its deletion,
    /// librbd takes that in with the next reads, but only after it has let them pass; they may bring
    /// zeroes. A read of nothing costs the cluster no request, and does not pass any more.
    fn check(&mut self, port: &mut Port<'_>) {
        if self.unchecked.is_empty() {
            return;
        }
        let answers = std::mem::take(&mut self.unchecked);
        let flight = self.flights.vacant_entry();
        let nowhere = std::ptr::dangling_mut();
        // SAFETY: no byte is written there.
        match unsafe { self.image.read(flight.key(), 0, nowhere, 0) } {
            Ok(()) => {
                flight.insert((EVENT_TOKEN, Held::Unchecked(answers)));
            }
            Err(errno) => {
                let error = self.error(errno);
                for (token, _) in answers {
                    port.end(token, Err(error));
                }
            }
        }
        self.wait(port);
    }

    /// Run something that blocks on the backend's thread; it ends the operation.
    fn beside(
        &mut self,
        token: Token,
        job: impl FnOnce(&Image) -> JobOutput + Send + 'static,
        port: &mut Port<'_>,
    ) {
        let remote: Remote = port.ring.remote(port.owner);
        let side = self.side.get_or_insert_with(|| {
            let (sender, jobs) = channel::<Job>();
            let started = std::thread::Builder::new()
                .name("hdcs-rbd".into())
                .spawn(move || jobs.into_iter().for_each(|job| job()));
            if let Err(error) = started {
                tracing::error!(%error, "no thread for what blocks in librbd");
            }
            sender
        });
        let image = Arc::clone(&self.image);
        let job = Box::new(move || {
            let output = job(&image);
            // First, so that nobody holds the image once all operations have ended.
            drop(image);
            remote.end(token, output);
        });
        if side.send(job).is_ok() {
            port.ring.begin_remote();
        } else {
            // There is no thread; perhaps there can be one next time.
            self.side = None;
            port.end(token, Err(IoError::Failed));
        }
    }
}

impl Backend for RbdBackend {
    fn submit(&mut self, _now: Nanos, operation: Operation, port: &mut Port<'_>) {
        let Operation { token, ask } = operation;
        if self.fenced {
            return port.end(token, Err(IoError::Fenced));
        }
        match ask {
            Ask::Read { offset, mut buf } => {
                let (address, bytes) = (buf.as_mut_ptr(), buf.len());
                // SAFETY: the buffer is kept in `flights` until the operation has been taken.
                let start =
                    |image: &Image, number| unsafe { image.read(number, offset, address, bytes) };
                self.begin(token, Held::Read(buf), start, port);
            }
            Ask::Write { offset, data } => {
                let mut vectors = std::mem::take(&mut self.vectors);
                gather(&data, &mut vectors);
                if vectors.is_empty() {
                    port.end(token, Ok(Done::Written));
                } else {
                    // SAFETY: the buffers are kept in `flights` until the operation has been taken.
                    let start =
                        |image: &Image, number| unsafe { image.write(number, offset, &vectors) };
                    self.begin(token, Held::Write { _data: data }, start, port);
                }
                vectors.clear();
                self.vectors = vectors;
            }
            Ask::Zero { bytes: 0, .. } => port.end(token, Ok(Done::Written)),
            Ask::Zero {
                offset,
                bytes,
                unmap,
            } => {
                // Not a discard: that leaves what is smaller than a granule as it is.
                let start = |image: &Image, number| image.zero(number, offset, bytes, !unmap);
                self.begin(token, Held::Nothing, start, port);
            }
            Ask::Flush => self.begin(token, Held::Nothing, Image::flush, port),
            Ask::Extents { range } => {
                let Some(object_bytes) = self.extents else {
                    let state = ExtentState::Data;
                    return port.end(token, Ok(Done::Extents(vec![Extent { range, state }])));
                };
                let job =
                    move |image: &Image| JobOutput::Extents(extents(image, object_bytes, range));
                self.beside(token, job, port);
            }
            Ask::Resize { bytes } => {
                let job = move |image: &Image| JobOutput::Unit(image.resize(bytes));
                self.beside(token, job, port);
            }
            Ask::Snapshot(keep) => {
                self.keeping = Some(token);
                let job = move |image: &Image| JobOutput::Unit(snapshots::perform(image, keep));
                self.beside(token, job, port);
            }
        }
    }

    fn completed(&mut self, _now: Nanos, token: Token, outcome: Outcome, port: &mut Port<'_>) {
        let kept = self.keeping.take_if(|keeping| *keeping == token).is_some();
        let result = match outcome {
            Outcome::Readable(_) => {
                self.waiting = false;
                self.take_events(port);
                return self.wait(port);
            }
            Outcome::Job(JobOutput::Unit(result)) => match result {
                Ok(()) => Ok(Done::Written),
                Err(errno) => {
                    let refused = snapshots::refusal(errno).filter(|_| kept);
                    refused.map(Done::Refused).ok_or(errno)
                }
            },
            Outcome::Job(JobOutput::Extents(result)) => result.map(Done::Extents),
            other => unreachable!("an rbd backend starts nothing that ends in {other:?}"),
        };
        let result = result.map_err(|errno| self.error(errno));
        self.end(token, result, port);
        self.check(port);
    }

    fn poll(&mut self, _now: Nanos, _port: &mut Port<'_>) {}

    fn next_wakeup(&self) -> Option<Nanos> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            extents: self.extents.is_some(),
            in_flight_max: IN_FLIGHT_MAX,
            atomic_flush: false,
            snapshots: !self.read_only,
            read_only: self.read_only,
        }
    }
}

impl Drop for RbdBackend {
    fn drop(&mut self) {
        if !self.flights.is_empty() {
            tracing::warn!(
                image = self.place,
                operations = self.flights.len(),
                "left with operations under way that did not end; their memory stays behind"
            );
            std::mem::forget(std::mem::take(&mut self.flights));
            Image::leak(Arc::clone(&self.image));
        }
    }
}

/// One vector for each run of buffers that are neighbours in memory.
fn gather(data: &[Buf], vectors: &mut Vec<libc::iovec>) {
    for buf in data.iter().filter(|buf| !buf.is_empty()) {
        let base = buf.as_ptr().cast_mut();
        match vectors.last_mut() {
            Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => {
                last.iov_len += buf.len();
            }
            _ => vectors.push(libc::iovec {
                iov_base: base.cast(),
                iov_len: buf.len(),
            }),
        }
    }
}

/// The allocation from the start of `range`, in whole objects: the library answers for a range that
/// begins within one with wrong offsets (Ceph before 16.2.8 and 17.1).
fn extents(image: &Image, object_bytes: u64, range: SectorRange) -> Result<Vec<Extent>, Errno> {
    let sector = SECTOR_BYTES as u64;
    let first = range.byte_offset() / object_bytes * object_bytes;
    let most = first + EXTENT_OBJECTS_MAX * object_bytes;
    let range = SectorRange::between(range.start, range.end().min(most / sector));
    let end = (range.end() * sector)
        .next_multiple_of(object_bytes)
        .min(image.bytes()?);
    let allocated = image.allocated(first, end.saturating_sub(first))?;
    Ok(runs(&allocated, range))
}

/// Cut a range into what is allocated, given as bytes in order, and what is not.
fn runs(allocated: &[(u64, u64)], range: SectorRange) -> Vec<Extent> {
    let sector = SECTOR_BYTES as u64;
    let (mut runs, mut at): (Vec<Extent>, u64) = (Vec::new(), range.start);
    let mut push = |to: u64, state: ExtentState, at: &mut u64| {
        let to = to.min(range.end());
        if to <= *at {
            return;
        }
        match runs.last_mut() {
            Some(last) if last.state == state => last.range.count += to - *at,
            _ => runs.push(Extent {
                range: SectorRange::between(*at, to),
                state,
            }),
        }
        *at = to;
    };
    for &(offset, bytes) in allocated {
        push(offset / sector, ExtentState::Hole, &mut at);
        push(
            (offset + bytes).div_ceil(sector),
            ExtentState::Data,
            &mut at,
        );
    }
    push(range.end(), ExtentState::Hole, &mut at);
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url::BackendUrl;

    fn name_of(url: &str) -> String {
        BackendUrl::parse(url).unwrap().place.name()
    }

    #[test]
    fn place_names_pool_and_image() {
        assert_eq!(name_of("rbd:pool/image"), "rbd:pool/image ");
        assert_eq!(name_of("rbd:p/ns/a%20b?id=x"), "rbd:p/ns/a b ");
        assert_eq!(
            name_of("rbd:p/i@s?conf=/etc/x.conf"),
            "rbd:p/i@s /etc/x.conf"
        );
        let message = |url: &str| BackendUrl::parse(url).unwrap_err().to_string();
        for wrong in [
            "rbd:",
            "rbd:image",
            "rbd:a/b/c/d",
            "rbd:a/",
            "rbd:/b",
            "rbd:a/b@",
        ] {
            assert!(message(wrong).contains("rbd:POOL/IMAGE"), "{wrong}");
        }
        assert!(message("rbd:a/b?conf=x").contains("an absolute path"));
        assert!(message("rbd:a/b?steel=on").contains("did you mean `steal`"));
        assert!(message("rbd:a/b?steal=1").contains("`on` or `off`"));
    }

    #[test]
    fn snapshot_is_read_only_and_its_image_is_not() {
        let read_only = |url: &str| BackendUrl::parse(url).unwrap().place.is_read_only();
        assert!(read_only("rbd:p/i@s"));
        assert!(read_only("rbd:p/ns/i@a%20b?conf=/etc/x.conf"));
        assert!(!read_only("rbd:p/i"));
        assert!(!read_only("rbd:p/i?steal=on"));
        let error = BackendUrl::parse("rbd:p/i@s?steal=on").unwrap_err();
        assert!(error.to_string().contains("leave out steal=on"), "{error}");
        assert!(BackendUrl::parse("rbd:p/i@s@t").is_err());
    }

    #[test]
    fn gaps_are_what_no_run_covers() {
        assert_eq!(gaps(&[], 10), [(0, 10)]);
        assert_eq!(gaps(&[], 0), []);
        assert_eq!(gaps(&[(0, 4), (4, 2), (8, 4)], 10), [(6, 2)]);
        assert_eq!(gaps(&[(2, 2), (20, 4)], 10), [(0, 2), (4, 6)]);
        assert_eq!(gaps(&[(0, 12)], 10), []);
        assert_eq!(gaps(&[(12, 4)], 10), [(0, 10)]);
    }

    #[test]
    fn runs_cover_the_range_in_order() {
        let shown = |allocated: &[(u64, u64)], start: u64, count: u64| -> Vec<(u64, u64, bool)> {
            runs(allocated, SectorRange::new(start, count))
                .iter()
                .map(|run| {
                    (
                        run.range.start,
                        run.range.count,
                        run.state == ExtentState::Data,
                    )
                })
                .collect()
        };
        assert_eq!(shown(&[], 3, 5), [(3, 5, false)]);
        assert_eq!(shown(&[(0, 1 << 20)], 3, 5), [(3, 5, true)]);
        assert_eq!(
            shown(&[(512, 512), (1024, 512), (4096, 512)], 0, 10),
            [
                (0, 1, false),
                (1, 2, true),
                (3, 5, false),
                (8, 1, true),
                (9, 1, false)
            ]
        );
        // The image may end within a sector.
        assert_eq!(shown(&[(0, 700)], 0, 4), [(0, 2, true), (2, 2, false)]);
    }
}
