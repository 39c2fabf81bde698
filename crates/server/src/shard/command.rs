//! What the control plane asks of a shard, and what it gets back.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hdcs_backend::copying::Progress;
use hdcs_backend::crypt::{Encryption, ObjectKey};
use hdcs_backend::memory::{ObjectMemory, VolumeMemory};
use hdcs_backend::url::BackendUrl;
use hdcs_backend::{Absent, BackendError, Prepared, SnapshotCommand};
use hdcs_core::base::cipher::Authenticator;
use hdcs_core::base::error::IoError;
use hdcs_core::base::io::{DurableWay, Nanos, SectorRange};
use hdcs_core::cache::heat_map::Gathering;
use hdcs_core::cache::{CacheStats, VolumeBenefit};
use hdcs_core::format::LogSuperblock;
use hdcs_core::node::opening::Failure;
use hdcs_core::node::qos::{Qos, QosStats};
use hdcs_core::objects::io::SnapshotError;
use hdcs_core::replication::Member;
use hdcs_core::replication::record::{GroupRecord, Shape};
use hdcs_core::volume::sharing::GivenBack;
use hdcs_core::volume::{Phase, State, Trouble, VolumeConfig, VolumeStats};
use hdcs_device::DeviceRegion;
use hdcs_device::durability::DeviceCache;
use hdcs_device::file::Device;
use hdcs_frontend::access::{Allow, Peer};
use hdcs_frontend::{OpeningId, Session, Unopened, VolumeNumber};
use thiserror::Error;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::control::NOT_OPEN;
use super::counts::LoopReport;
use super::groups::{CopySpec, GroupsConfig, Seen};
use super::log_space::LogSpace;
use super::places::Place;
use super::residents::Residence;
use crate::data_dir::dirty::{Left, LogIdentity};
use crate::scrub;

/// What an open volume was found to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenedAs {
    /// Its log, counting this opening.
    pub log: LogIdentity,
    /// What its backend is, if that has a name: see [`hdcs_backend::Opened::identity`].
    pub backend: Option<String>,
}

/// Why a volume could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct OpenFailure {
    /// What can be done about it.
    pub kind: Failure,
    /// For the user.
    pub message: String,
}

impl OpenFailure {
    /// A failure of this kind.
    pub fn new(kind: Failure, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}

/// Who decides whether a log may be opened, and knows that it was. Its calls block, on the thread
/// that opens the volume, which may be long after the opening was given up.
pub trait Admission: Send + Sync {
    /// What is recorded of the volume's log, if it was ever opened.
    fn record(&self) -> Result<Option<LogIdentity>, OpenFailure>;
    /// What becomes of a backend that is absent, where it may be made.
    fn absent(&self) -> Absent;
    /// Log and backend are there: from now on the log may hold what the backend does not. `keys` authenticate its
    /// superblocks, if something does.
    fn begin(&self, log: LogIdentity, keys: Option<&dyn Authenticator>) -> Result<(), OpenFailure>;
    /// What is kept of the log's superblock beside its device.
    fn kept(&self) -> Result<Option<LogSuperblock>, OpenFailure> {
        Ok(None)
    }
    /// Keep one there, durably.
    fn keep(&self, _block: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// The number in the read cache of the state that the volume began as, which has this name. None:
    /// it cannot be had.
    fn origin(&self, _name: &str) -> Option<u32> {
        None
    }
}

/// Everything that a shard needs to open a volume.
#[derive(Clone)]
pub struct VolumeSpec {
    /// Name, as exported.
    pub name: String,
    /// What the core needs.
    pub config: VolumeConfig,
    /// Its quality of service.
    pub qos: Qos,
    /// The write log.
    pub log: DeviceRegion,
    /// Whether other nodes have copies of that: it stands on this node's copy then, which is open.
    pub is_replicated: bool,
    /// The device of that copy, which the shard knows.
    pub copy: Option<Arc<Device>>,
    /// Backend URL (`file:PATH`), filters included as options: `?delay_us=1000&error_rate=…`.
    pub backend: String,
    /// What the volume was made over, if that is known: something else is refused.
    pub identity: Option<String>,
    /// How it is encrypted, if it is.
    pub encryption: Option<Encryption>,
    /// The store of its local store, if it is in storage mode.
    pub home: Option<PathBuf>,
    /// What stays in the SSD tier.
    pub pins: Vec<SectorRange>,
    /// Which clients may open it over TCP.
    pub allow: Allow,
    /// Who is asked before it is opened.
    pub admission: Arc<dyn Admission>,
    /// Memory that is reserved for it.
    pub memory: Arc<VolumeMemory>,
    /// What others know of the space of its log.
    pub space: Arc<LogSpace>,
    /// The shard that is to open it, if somebody has said so.
    pub shard: Option<usize>,
    /// The opening that goes on there, if it comes from another shard.
    pub continues: Option<OpeningId>,
    /// Its stay there; whoever sends the command notes it.
    pub residence: Residence,
}

impl VolumeSpec {
    /// The local file, device or directory that takes space for what the volume's log holds, if there is one. A local
    /// store has its own already.
    pub fn destages_to(&self) -> Option<PathBuf> {
        let url = BackendUrl::parse(&self.backend).ok()?;
        let path = url.place.local_path()?;
        self.home.is_none().then(|| path.to_owned())
    }

    /// Open the volume's backend, if it is what the volume was made over. Blocks.
    pub fn open_backend(
        &self,
        absent: Absent,
        key: Option<ObjectKey>,
    ) -> Result<Prepared, BackendError> {
        let memory = self.memory.objects().unwrap_or(ObjectMemory::least());
        let (url, bytes) = (&self.backend, self.config.bytes);
        let identity = self.identity.as_deref();
        hdcs_backend::open_with(url, bytes, absent, key, memory, identity)
    }
}

impl std::fmt::Debug for VolumeSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VolumeSpec")
            .field("name", &self.name)
            .field("log", &self.log)
            .field("backend", &self.backend)
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

/// Latencies of one class, in nanoseconds; `None` if nothing of it was ever asked. Reports share them.
pub type Latencies = Option<Arc<hdrhistogram::Histogram<u64>>>;

/// One volume as its shard sees it.
#[derive(Clone, Debug)]
pub struct VolumeReport {
    /// Its name.
    pub name: String,
    /// Its shard.
    pub shard: usize,
    /// Where it is in its life.
    pub phase: Phase,
    /// Which of the five states.
    pub state: State,
    /// What is wrong, and for how long it has been.
    pub trouble: Option<(Trouble, Nanos)>,
    /// How it is configured now.
    pub config: VolumeConfig,
    /// Counters and gauges.
    pub stats: VolumeStats,
    /// What it has that its backend does not have; `None` if its log was never read.
    pub left: Option<Left>,
    /// Whether its log holds something beyond its end, which has to be destaged before it grows.
    pub holds_cut: bool,
    /// Latency of reads in nanoseconds, from arrival to reply.
    pub read_latency: Latencies,
    /// Latency of writes.
    pub write_latency: Latencies,
    /// Latency of flushes.
    pub flush_latency: Latencies,
    /// NBD connections that have it open.
    pub connections: usize,
    /// What quality of service has counted.
    pub qos: QosStats,
    /// How long requests have waited before it took them, all together.
    pub queued: Nanos,
    /// What reading it costs, and how the cache weighs it.
    pub benefit: VolumeBenefit,
    /// Requests to its backend's store, if that has one.
    pub store: Option<hdcs_backend::stores::Counts>,
    /// What is wrong with its image, and what to do.
    pub image_trouble: Option<&'static str>,
    /// Why what was pinned is not, if it is not.
    pub pin_trouble: Option<String>,
    /// How its log is made durable at present, and what that means to the device.
    pub log_way: (Option<DurableWay>, DeviceCache),
    /// Its local store, if it is in storage mode. What is dirty there is part of `stats`.
    pub home: Option<hdcs_core::local::Status>,
    /// How far the copy is that a snapshot of it has to make, if it makes one.
    pub copying: Progress,
    /// Whether it is being given another size.
    pub is_resizing: bool,
    /// Whether a snapshot of it is being made or removed.
    pub is_snapshotting: bool,
}

/// One shard as a whole.
#[derive(Clone, Debug)]
pub struct ShardReport {
    /// Which one of the node's shards it is.
    pub number: usize,
    /// The processor that it keeps to, if it does.
    pub processor: Option<usize>,
    /// Its volumes, by name.
    pub volumes: Vec<VolumeReport>,
    /// The nodes of the cluster that it speaks with.
    pub peers: Vec<Member>,
    /// Its read cache.
    pub cache: CacheStats,
    /// Bytes that the tier holds that promotions fill.
    pub cache_room_bytes: u64,
    /// Why the cache has no new identity yet although it needs one; destage waits for that.
    pub cache_identity_error: Option<String>,
    /// Why the cache device could not be used when it was last tried, if it could not.
    pub cache_trouble: Option<String>,
    /// How long the SSD tier has been in its state.
    pub cache_state_age: Nanos,
    /// Bytes of the buffer pool in all.
    pub pool_bytes: u64,
    /// Bytes of the buffer pool that are free.
    pub pool_free_bytes: u64,
    /// Memory that connections have, data left out.
    pub connections_used_bytes: u64,
    /// Connections open.
    pub connections: usize,
    /// For how many more there is memory.
    pub connections_left: usize,
    /// The longest turn of the last 30 to 60 seconds.
    pub longest_turn: Nanos,
    /// What it has done since the start.
    pub counts: LoopReport,
}

/// Answers travel back by value; the error is a sentence for the user.
pub type Answer<T, E = String> = oneshot::Sender<Result<T, E>>;

/// A volume that a stop has closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClosedReport {
    /// Which.
    pub volume: VolumeNumber,
    /// What its log still holds; `None` if it was never read.
    pub left: Option<Left>,
    /// Whether a write to its log has failed, perhaps the one that closes it.
    pub log_failed: bool,
}

/// A process at the other end of a unix socket, as the kernel knew it when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Whose it is.
    pub uid: u32,
    /// Its number; 0 if it is in a container whose numbers this node does not see.
    pub pid: i32,
}

impl Process {
    /// Who connected; `None` if the kernel does not say.
    pub fn of(socket: &OwnedFd) -> Option<Self> {
        let mut found = libc::ucred {
            pid: 0,
            uid: 0,
            gid: 0,
        };
        let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the call writes at most `bytes` bytes, which is the size of `found`, plain numbers all.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut bytes,
            )
        };
        (result == 0).then_some(Self {
            uid: found.uid,
            pid: found.pid,
        })
    }
}

/// How a client reached the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Over a unix socket.
    Unix(Option<Process>),
    /// Over TCP.
    Tcp {
        /// From where.
        peer: SocketAddr,
    },
}

impl std::fmt::Display for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(Some(Process { uid, pid })) => write!(f, "uid {uid}, pid {pid}"),
            Self::Unix(None) => f.write_str("a local client"),
            Self::Tcp { peer } => write!(f, "tcp {}", peer.ip().to_canonical()),
        }
    }
}

impl Transport {
    /// The client in words: where it comes from and the names in its certificate. Two connections of one client are
    /// the same.
    pub fn who(self, peer: &Peer) -> String {
        match peer {
            Peer::Named(identity) => format!("{self}, certificate of {}", identity.names()),
            Peer::Unnamed | Peer::Local => self.to_string(),
        }
    }

    /// Whether it came over a unix socket.
    pub fn is_local(self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// What tells one connection of a client from another.
    pub fn which(self) -> String {
        match self {
            Self::Unix(_) => String::new(),
            Self::Tcp { peer } => format!("port {}", peer.port()),
        }
    }
}

/// Makes the session of a new connection; called on the shard's thread.
pub struct SessionFactory(pub Box<dyn Fn(Transport) -> Box<dyn Session> + Send>);

impl std::fmt::Debug for SessionFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionFactory")
    }
}

/// A client that was accepted elsewhere, by whoever makes its TLS handshake or by another shard.
pub struct Adopted {
    /// Its socket, blocking.
    pub socket: OwnedFd,
    /// Its session, of which nothing is under way.
    pub session: Box<dyn Session>,
    /// How it came.
    pub client: Transport,
    /// Its place among its listener's clients.
    pub place: Place,
    /// The volume for whose sake it comes, if it has opened one.
    pub visit: Option<Visit>,
    /// Its place in the queue of the shard that is to take it.
    pub queued: Option<QueuePlace>,
}

/// One of the places in a shard's queue of commands that clients may take.
#[derive(Debug)]
pub struct QueuePlace(Arc<AtomicUsize>);

impl QueuePlace {
    /// One more than are taken, if that is no more than `max`.
    pub fn take(taken: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let place = Self(Arc::clone(taken));
        let before = taken.fetch_add(1, Ordering::Relaxed);
        (before < max).then_some(place)
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What is known of a volume that was closed for another shard to open it.
#[derive(Clone, Debug)]
pub struct Departed {
    /// What its log holds, if that is known.
    pub left: Option<Left>,
    /// Which opening goes on elsewhere.
    pub opening: OpeningId,
    /// What is reserved for it, which it is opened with; `None` if something of it is still in use.
    pub memory: Option<Arc<VolumeMemory>>,
}

/// What a connection has opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The volume's name.
    pub name: String,
    /// Which opening of it.
    pub opening: OpeningId,
    /// Whether it was noted among the events.
    pub is_noted: bool,
}

impl std::fmt::Debug for Adopted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Adopted")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

/// Why a state was not kept or forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SnapshotFailure {
    /// The volume is not open, or another such operation is under way.
    #[error("{0}")]
    Now(&'static str),
    /// The flush that goes before a snapshot was cancelled, or the copy that it makes.
    #[error("it was cancelled: nothing was made; run it again")]
    Cancelled,
    /// Its backend has no snapshots.
    #[error("its backend has no snapshots")]
    Incapable,
    /// In storage mode: the backend did not take what it was to keep.
    #[error(
        "its backend did not take all that is dirty ({0}): nothing was made, and the backend may be between two \
         states; run `hdcs volume flush` until that has ended, then this again"
    )]
    Untiered(IoError),
    /// In storage mode: the local store is of no use until the volume is opened anew.
    #[error("its local store failed ({0}), so that nothing can be tiered out: nothing was made")]
    LocalStoreFailed(IoError),
    /// The backend refused.
    #[error(transparent)]
    Refused(#[from] SnapshotError),
    /// The backend failed.
    #[error("its backend: {0}; whether it has happened shows `hdcs volume snapshot --list`")]
    Io(#[from] IoError),
}

impl SnapshotFailure {
    /// Whether it is certain that it did not happen, and will not: the store was not even asked.
    pub fn is_refusal(self) -> bool {
        match self {
            Self::Now(why) => why != NOT_OPEN,
            Self::Incapable | Self::Refused(_) => true,
            Self::Cancelled | Self::Untiered(_) | Self::LocalStoreFailed(_) | Self::Io(_) => false,
        }
    }
}

/// What the control plane asks.
#[derive(Debug)]
pub enum Command {
    /// Accept connections on a socket that listens already, until the shard stops.
    Listen {
        /// The socket, unix or TCP.
        socket: OwnedFd,
        /// What speaks on its connections.
        sessions: SessionFactory,
        /// When it accepts.
        answer: Answer<()>,
    },
    /// Take a client that was accepted elsewhere.
    Adopt(Box<Adopted>),
    /// Break off the connections of clients that are trusted no more.
    EndRevoked,
    /// Open a volume; answered when its log is replayed.
    Open(Box<VolumeSpec>, Answer<OpenedAs, OpenFailure>),
    /// Wait no longer for the files of a volume to be opened: its `Open` is answered with a refusal,
    /// and what its thread brings in the end is closed. An error if none is waited for.
    GiveUpOpening(VolumeNumber, Answer<()>),
    /// Close a volume, with `destage` only after its backend holds everything; connections to it
    /// are dropped. Answered with what its log still holds, if that is known.
    Close {
        /// Which.
        volume: VolumeNumber,
        /// Whether the backend must hold everything first.
        destage: bool,
        /// When it is closed.
        answer: Answer<Option<Left>>,
    },
    /// Begin to destage all that is dirty, and to tier it out in storage mode; watch
    /// [`VolumeStats::destage_all_remaining_bytes`].
    DestageAll(VolumeNumber, Answer<()>),
    /// Return to destaging by policy, and give up a snapshot that waits for that.
    CancelDestageAll(VolumeNumber, Answer<()>),
    /// Change the size, of the backend too. A volume that is to grow has only a larger backend afterwards: once
    /// whoever asked has recorded the size, [`Self::Grow`] lets clients use it. So what they write there is never
    /// beyond the size that the next opening knows of.
    Resize(VolumeNumber, u64, Answer<()>),
    /// Let a volume have the size that its backend was given by [`Self::Resize`].
    Grow(VolumeNumber, u64, Answer<()>),
    /// Make or forget a snapshot, or give the backend up. What was acknowledged before is in a
    /// snapshot: it is made once the backend has all of that.
    Snapshot(VolumeNumber, SnapshotCommand, Answer<(), SnapshotFailure>),
    /// Give up the snapshot that waits for destage or is being copied.
    CancelSnapshot(VolumeNumber, Answer<()>),
    /// Let go of a volume that another shard is to have, once its clients' requests have ended: their connections wait
    /// for [`Self::Follow`]. An error: it stays.
    Depart {
        /// Which.
        volume: VolumeNumber,
        /// For how long the requests are waited for.
        patience: Nanos,
        /// When it is closed.
        answer: Answer<Departed>,
    },
    /// It is known where a volume is that has left: its connections go there. If it is nowhere, they end.
    Follow(VolumeNumber, Answer<()>),
    /// So many bytes of the volume's log are prepared by now.
    LogPrepared(VolumeNumber, u64, Answer<()>),
    /// Use no more than so many bytes of the volume's log from now on, if it needs no more.
    GiveBackLog(VolumeNumber, u64, Answer<GivenBack>),
    /// Change the behaviour.
    Reconfigure(Box<VolumeConfig>, Answer<()>),
    /// Change the quality of service.
    SetQos(VolumeNumber, Qos, Answer<()>),
    /// Change which clients may open it over TCP; the connections of those that no longer may are ended.
    SetAllow(VolumeNumber, Allow, Answer<()>),
    /// Bring a range into the read cache; answered when it is there.
    Promote(VolumeNumber, SectorRange, Answer<()>),
    /// Keep these ranges, and no others, in the SSD tier; answered when that is accepted. Watch
    /// [`VolumeStats::pinned_left_bytes`].
    Pin(VolumeNumber, Vec<SectorRange>, Answer<()>),
    /// Bring these ranges into the SSD tier in the background, instead of what is left of an earlier
    /// warm-up; answered when that is accepted. Watch [`VolumeStats::warm_left_bytes`].
    WarmUp(VolumeNumber, Vec<SectorRange>, Answer<()>),
    /// The same for the ranges of a heat map, to DRAM if there is no SSD tier; with `if_cold` only if the cache
    /// does not have them, and only where it has room.
    WarmUpLike {
        /// Which.
        volume: VolumeNumber,
        /// The hottest first.
        ranges: Vec<SectorRange>,
        /// Whether nobody has asked for it.
        if_cold: bool,
        /// When that is accepted.
        answer: Answer<()>,
    },
    /// Gather what the cache knows of how hot a volume is.
    Heat(VolumeNumber, Answer<Gathering>),
    /// Drop the clean part of a range from the read cache.
    Evict(VolumeNumber, SectorRange, Answer<()>),
    /// Verify what the volume has on this node's devices, healing what has another copy; answered at its
    /// end, or when it was cancelled through its progress.
    Scrub(VolumeNumber, Arc<scrub::Progress>, Answer<()>),
    /// Compare what is in the local store of a volume with its checksums, from a block on: one piece.
    VerifyHome(VolumeNumber, u64, Answer<hdcs_core::local::Verified>),
    /// Forget a deleted volume's cached blocks.
    Forget(VolumeNumber, Answer<()>),
    /// Have copies of replicated logs, and speak with other nodes from now on.
    JoinCluster(Box<GroupsConfig>),
    /// Open the copy of a replicated log: it follows, and plays the part that records give it.
    OpenCopy(Box<CopySpec>, Answer<()>),
    /// Let go of the copy of a volume that is not open.
    CloseCopy(Uuid, Answer<()>),
    /// The same of one that was brought up before the record of this revision, which does not name this node.
    ForgetCopy(Uuid, u64, Answer<()>),
    /// A volume's group was removed: what stands on its copy ends without its members.
    EndGroup(Uuid, Answer<()>),
    /// The store has this record of a volume's group.
    SeeRecord(Uuid, Box<GroupRecord>),
    /// Have a volume's group become this: only who serves it does that.
    Configure(Uuid, Box<Shape>, Answer<()>),
    /// It is not known how asking for a record ended; the one that was seen last is still there.
    AskAgain(Uuid),
    /// What may be known of the copy of a volume's log.
    CopyStatus(Uuid, Answer<Seen>),
    /// What clients are told who ask for a volume that is not open; `None`: there is none of this name.
    Explain(String, Option<Unopened>),
    /// Counters and gauges.
    Report(oneshot::Sender<Box<ShardReport>>),
    /// Close every connection and volume as `Close` does, write the cache's footers, and end the
    /// thread.
    Stop {
        /// Whether the backends must hold everything first.
        destage: bool,
        /// When everything is closed.
        answer: Answer<Vec<ClosedReport>>,
    },
}

/// Whom a command concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Concern {
    /// The shard that has this volume.
    Volume(VolumeNumber),
    /// The shard that is to have a volume.
    Opening,
    /// One shard, which accepts clients.
    Listener,
    /// One shard, which serves a client.
    Client,
    /// What all shards share, which the first one changes.
    Shared,
    /// All shards.
    All,
    /// All shards, each of which gives an answer of its own.
    Each,
}

impl Command {
    /// Whom it concerns.
    pub fn concerns(&self) -> Concern {
        match self {
            Self::Listen { .. } => Concern::Listener,
            Self::Adopt(_) => Concern::Client,
            Self::EndRevoked => Concern::All,
            // One after the other, so that the last one counts.
            Self::Explain(..)
            | Self::JoinCluster(_)
            | Self::OpenCopy(..)
            | Self::CloseCopy(..)
            | Self::ForgetCopy(..)
            | Self::EndGroup(..)
            | Self::SeeRecord(..)
            | Self::Configure(..)
            | Self::AskAgain(_)
            | Self::CopyStatus(..) => Concern::Shared,
            Self::Forget(..) | Self::Follow(..) | Self::Report(_) | Self::Stop { .. } => {
                Concern::Each
            }
            Self::Open(..) => Concern::Opening,
            Self::Reconfigure(config, _) => Concern::Volume(VolumeNumber(config.number)),
            Self::GiveUpOpening(volume, _)
            | Self::Close { volume, .. }
            | Self::DestageAll(volume, _)
            | Self::CancelDestageAll(volume, _)
            | Self::Resize(volume, ..)
            | Self::Grow(volume, ..)
            | Self::Snapshot(volume, ..)
            | Self::Depart { volume, .. }
            | Self::CancelSnapshot(volume, _)
            | Self::LogPrepared(volume, ..)
            | Self::GiveBackLog(volume, ..)
            | Self::SetQos(volume, ..)
            | Self::SetAllow(volume, ..)
            | Self::Promote(volume, ..)
            | Self::Pin(volume, ..)
            | Self::WarmUp(volume, ..)
            | Self::WarmUpLike { volume, .. }
            | Self::Heat(volume, _)
            | Self::Evict(volume, ..)
            | Self::Scrub(volume, ..)
            | Self::VerifyHome(volume, ..) => Concern::Volume(*volume),
        }
    }
}
