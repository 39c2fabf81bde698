//! What the control plane asks of a shard, and what it gets back.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use hdcs_core::io::SectorRange;
use hdcs_core::read_cache::CacheStats;
use hdcs_core::volume::{Phase, State, VolumeConfig, VolumeStats};
use tokio::sync::oneshot;

use crate::frontends::{Session, VolumeNumber};

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

/// Everything that a shard needs to open a volume.
#[derive(Clone, Debug)]
pub struct VolumeSpec {
    /// Name, as exported.
    pub name: String,
    /// What the core needs.
    pub config: VolumeConfig,
    /// The write log.
    pub log: DeviceRegion,
    /// Backend URL (`file:PATH`), filters included as options: `?delay_us=1000&error_rate=…`.
    pub backend: String,
}

/// One volume as its shard sees it.
#[derive(Clone, Debug)]
pub struct VolumeReport {
    /// Its name.
    pub name: String,
    /// Where it is in its life.
    pub phase: Phase,
    /// Which of the five states.
    pub state: State,
    /// How it is configured now.
    pub config: VolumeConfig,
    /// Counters and gauges.
    pub stats: VolumeStats,
    /// Latency of reads in nanoseconds, from arrival to reply.
    pub read_latency: hdrhistogram::Histogram<u64>,
    /// Latency of writes.
    pub write_latency: hdrhistogram::Histogram<u64>,
    /// Latency of flushes.
    pub flush_latency: hdrhistogram::Histogram<u64>,
    /// NBD connections that have it open.
    pub connections: usize,
}

/// One shard as a whole.
#[derive(Clone, Debug)]
pub struct ShardReport {
    /// Its volumes, by name.
    pub volumes: Vec<VolumeReport>,
    /// Its read cache.
    pub cache: CacheStats,
    /// Why the cache has no new identity yet although it needs one; destage waits for that.
    pub cache_identity_error: Option<String>,
    /// Bytes of the buffer pool in all.
    pub pool_bytes: u64,
    /// Bytes of the buffer pool that are free.
    pub pool_free_bytes: u64,
    /// Connections open.
    pub connections: usize,
}

/// Answers travel back by value; the error is a sentence for the user.
pub type Answer<T> = oneshot::Sender<Result<T, String>>;

/// How a client reached the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Over a unix socket.
    Unix,
    /// Over TCP.
    Tcp {
        /// From where.
        peer: SocketAddr,
    },
}

/// Makes the session of a new connection; called on the shard's thread.
pub struct SessionFactory(pub Box<dyn Fn(Transport) -> Box<dyn Session> + Send>);

impl std::fmt::Debug for SessionFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionFactory")
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
    /// Open a volume; answered when its log is replayed.
    Open(Box<VolumeSpec>, Answer<()>),
    /// Close a volume, with `destage` only after its backend holds everything; connections to it
    /// are dropped.
    Close {
        /// Which.
        volume: VolumeNumber,
        /// Whether the backend must hold everything first.
        destage: bool,
        /// When it is closed.
        answer: Answer<()>,
    },
    /// Begin to destage all that is dirty; watch [`VolumeStats::destage_all_remaining_bytes`].
    DestageAll(VolumeNumber, Answer<()>),
    /// Return to destaging by policy.
    CancelDestageAll(VolumeNumber, Answer<()>),
    /// Change the size, of the backend too.
    Resize(VolumeNumber, u64, Answer<()>),
    /// Change the behaviour.
    Reconfigure(Box<VolumeConfig>, Answer<()>),
    /// Bring a range into the read cache; answered when it is there.
    Promote(VolumeNumber, SectorRange, Answer<()>),
    /// Drop the clean part of a range from the read cache.
    Evict(VolumeNumber, SectorRange, Answer<()>),
    /// Forget a deleted volume's cached blocks.
    Forget(VolumeNumber, Answer<()>),
    /// Counters and gauges.
    Report(oneshot::Sender<Box<ShardReport>>),
    /// Close every connection and volume as `Close` does, write the cache's footers, and end the
    /// thread.
    Stop {
        /// Whether the backends must hold everything first.
        destage: bool,
        /// When everything is closed.
        answer: Answer<()>,
    },
}
