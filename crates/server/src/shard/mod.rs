//! A shard: one thread with its own io_uring that owns volumes and their connections.
//!
//! Its loop: reap a batch of completions, step the state machines, poll them once, submit the
//! batch of their actions. Other threads reach it through [`ShardHandle`] alone.
//!
//! A node has one or several ([`group`]), which share nothing but what [`peers`] says.
//!
//! [`turn`] is the loop, [`works`] performs what volumes ask for, [`control`] carries out commands, [`connection`] moves bytes between
//! sockets and sessions, [`served`] is one volume with its devices, [`jobs`] cuts long ranges
//! into pieces, [`pinning`] asks for what stays in the cache, [`heat`] for what is hot in it, [`identity`] keeps destage going when the cache device is gone, and [`readmission`]
//! brings it back ([`cache_place`] says from where), [`visits`] notes clients' comings and goings. [`ciphered_log`] stands between an encrypted volume and its log,
//! [`groups`] between a replicated one and its log, and [`links`] has the connections to other nodes.
//!
//! Failure: a device or peer can fail operations, never the shard. If its ring fails the thread
//! ends with a reason, and everyone who waits for an answer finds its sender dropped.

pub mod cache_place;
mod ciphered_log;
mod clients;
pub mod clock;
mod closed_volumes;
pub mod command;
mod connection;
mod control;
pub mod counts;
mod directory;
mod due;
pub mod group;
pub mod groups;
mod handover;
mod heat;
mod identity;
mod jobs;
mod leavers;
pub mod links;
pub mod log_space;
mod moving;
mod opening;
mod peers;
mod pinning;
pub mod places;
mod readmission;
mod requests;
mod residents;
mod resizing;
mod scrub;
mod served;
mod shared_cache;
mod shares;
mod slots;
mod snapshots;
mod state;
mod tiering;
mod turn;
mod visits;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use cache_place::CachePlace;
use command::{Command, QueuePlace};
pub use connection::{ConnectionLimits, prepare_tcp};
pub use group::{Shards, start_all};
use hdcs_backend::memory::Share;
use hdcs_core::base::io::Nanos;
use hdcs_core::cache::{CacheConfig, FillMarks, Tiering};
use hdcs_core::node::stop::{CLOSE_PATIENCE, STOP_PATIENCE};
use hdcs_device::durability::Durability;
use hdcs_device::measurements::Measurements;
use hdcs_device::ring::RingConfig;
use hdcs_device::worker::Waker;
pub use peers::Peers;
pub use residents::Residence;
pub use shared_cache::SharedCache;
use thiserror::Error;
pub use visits::note_accepting;

use crate::events::Recorder;

/// After a failure to accept (no descriptors, no memory), the next attempt.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Between two lines in the log about that.
pub const ACCEPT_FAULT_PERIOD: Duration = Duration::from_secs(10);

/// Commands that wait at most: the control plane sends few, and finds out if they are not taken.
const COMMANDS_MAX: usize = 256;

/// Of them, clients that are handed over.
const CLIENTS_QUEUED_MAX: usize = COMMANDS_MAX / 2;

/// How long a stop without destage takes at most, beside the devices of the cache and the write logs: then volumes are
/// given up.
pub const STOP_TIME_MAX: Duration = Duration::from_nanos(STOP_PATIENCE.0 + CLOSE_PATIENCE.0);

/// Where the SSD tier is.
#[derive(Clone)]
pub struct CacheDevice {
    /// Its place, and its identity's.
    pub place: Arc<dyn CachePlace>,
    /// The pause before a device that was given up is tried again, at first.
    pub retry: Nanos,
}

impl std::fmt::Debug for CacheDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CacheDevice(tried again after {:?})", self.retry)
    }
}

/// What a shard is made of.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Which one of the node's shards it is.
    pub number: usize,
    /// All of them.
    pub peers: Arc<Peers>,
    /// The read cache's sizes; its SSD tier is on the device below.
    pub cache: CacheConfig,
    /// How full its SSD tier becomes.
    pub cache_fill: FillMarks,
    /// By what it chooses what it keeps.
    pub cache_tiering: Tiering,
    /// The SSD tier's device, if the cache has one, for the shard that keeps the tier.
    pub cache_device: Option<CacheDevice>,
    /// What all shards share of the cache.
    pub shared_cache: Arc<SharedCache>,
    /// What [`clock`] showed when the time of all shards began.
    pub origin: Nanos,
    /// Bytes of buffers for requests, spans and segments.
    pub pool_bytes: usize,
    /// What of that is touched at the start.
    pub touched_bytes: usize,
    /// How its ring is set up.
    pub ring: RingConfig,
    /// How writes are made durable; measured for each device if not given.
    pub durability: Option<Durability>,
    /// What was measured of that, for all shards.
    pub measurements: Arc<Measurements>,
    /// The processor that it keeps to.
    pub processor: Option<usize>,
    /// What clients may hold, and for how long.
    pub connections: ConnectionLimits,
    /// Memory for volumes, of which the indexes of their logs take what is not reserved.
    pub volumes: Arc<Share>,
    /// Where clients' comings and goings are noted.
    pub events: Recorder,
}

/// Why a shard could not start.
#[derive(Debug, Error)]
pub enum ShardError {
    /// The cache device must not be used, or its identity cannot be recorded.
    #[error("{0}")]
    Cache(String),
    /// No ring: the kernel is too old, or io_uring is forbidden or out of memory.
    #[error(
        "cannot set up io_uring: {0}; it needs Linux 5.19 and must not be disabled (sysctl kernel.io_uring_disabled)"
    )]
    Ring(std::io::Error),
    /// No thread.
    #[error("cannot start the shard's thread: {0}")]
    Thread(std::io::Error),
}

/// A command that the shard did not take.
#[derive(Debug, Error)]
pub enum SendError {
    /// Too many wait already.
    #[error("the shard is busy: {COMMANDS_MAX} commands wait already; try again")]
    Busy(Box<Command>),
    /// It has stopped.
    #[error("the shard has stopped")]
    Stopped(Box<Command>),
}

/// How other threads reach a shard.
#[derive(Clone, Debug)]
pub struct ShardHandle {
    commands: SyncSender<Command>,
    waker: Waker,
    /// Clients that wait in its queue.
    clients: Arc<AtomicUsize>,
}

impl ShardHandle {
    /// Queue a command; never blocks.
    pub fn send(&self, mut command: Command) -> Result<(), SendError> {
        if let Command::Adopt(adopted) = &mut command {
            // However many clients come, the control plane gets through.
            adopted.queued = None;
            match QueuePlace::take(&self.clients, CLIENTS_QUEUED_MAX) {
                Some(place) => adopted.queued = Some(place),
                None => return Err(SendError::Busy(Box::new(command))),
            }
        }
        self.commands
            .try_send(command)
            .map_err(|error| match error {
                TrySendError::Full(command) => SendError::Busy(Box::new(command)),
                TrySendError::Disconnected(command) => SendError::Stopped(Box::new(command)),
            })?;
        self.waker.wake();
        Ok(())
    }
}

/// How a shard's thread is called.
fn thread_name(number: usize, count: usize) -> String {
    if count == 1 {
        "hdcs-shard".to_owned()
    } else {
        format!("hdcs-shard-{number}")
    }
}

/// Start a shard. The thread ends after [`Command::Stop`].
pub fn start(config: ShardConfig) -> Result<(ShardHandle, JoinHandle<()>), ShardError> {
    let cache_start = match &config.cache_device {
        Some(device) if config.cache.ssd.is_some() => {
            let answer_max = config.cache.ssd_answer_max;
            let started = cache_place::start(&device.place, answer_max);
            Some(started.map_err(ShardError::Cache)?)
        }
        _ => None,
    };
    let (commands, queue) = sync_channel(COMMANDS_MAX);
    let (ready, made) = sync_channel(1);
    let thread = std::thread::Builder::new()
        .name(thread_name(config.number, config.peers.count()))
        .spawn(move || {
            // Everything with an `Rc` is made here, on the thread that keeps it.
            match turn::Shard::new(config, cache_start, queue) {
                Ok(shard) => {
                    // `start` waits for it, so somebody receives.
                    let _ = ready.send(Ok(shard.waker()));
                    shard.run();
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        })
        .map_err(ShardError::Thread)?;
    let waker = made
        .recv()
        .map_err(|_| ShardError::Thread(std::io::Error::other("it ended at once")))?
        .map_err(ShardError::Ring)?;
    let clients = Arc::default();
    let handle = ShardHandle {
        commands,
        waker,
        clients,
    };
    Ok((handle, thread))
}
