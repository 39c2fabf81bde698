//! The node as the control plane knows it: its volumes, and every operation on them.
//!
//! Invariants:
//! 1. The catalogue never names a size that the backend does not have: it changes after the shard
//!    has grown a volume, and before the shard shrinks it. It names a volume before the shard
//!    opens it, and until after the shard has closed it. So a crash in between leaves a volume
//!    that opens.
//! 2. One operation at a time changes a volume; a second one is refused, not queued.
//! 3. Operations that change something run to their end even if the client goes away.
//! 4. What may wait for a disk runs [`beside`] the control plane, and so never under a lock that its thread takes.
//! 5. Dirty data is lost only by `discard_dirty`, and the answer says how much it was.

mod change;
mod copies;
mod create;
mod delete;
mod detach;
mod encryption;
mod entries;
mod flush;
mod groups;
mod heat;
mod home;
mod log_space;
mod looks;
mod memory;
mod moving;
mod open;
mod pins;
mod places;
mod record;
mod replicas;
mod report;
mod resyncs;
mod scrub;
mod setup;
mod snapshots;
mod start;
mod volumes;
mod watch;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use entries::Catalogue;
use flush::Flushes;
pub(super) use groups::set_group;
use groups::{Groups, Replication};
use hdcs_api::events::{Event, Outcome};
use hdcs_api::time::utc;
use hdcs_api::{ApiError, ErrorKind, Reloaded};
use hdcs_backend::memory::Share;
use hdcs_core::node::stop::LOG_PATIENCE_MAX;
use hdcs_frontend::VolumeNumber;
use hdcs_frontend::nbd::tls::Certificates;
use heat::Heats;
use home::Tiers;
use log_space::LogSpaces;
use memory::Memories;
use moving::Moves;
use open::Opening;
use record::Records;
use replicas::Replicas;
pub(super) use replicas::run as run_groups;
use scrub::Scrubs;
use setup::Setup;
use snapshots::Copies;
use start::Start;
use tokio::sync::Semaphore;
use uuid::Uuid;
use volumes::Volumes;
use watch::Watch;

use super::link::{DataPath, Link, at_volume};
use super::node_report::NodeReport;
use crate::catalogue::VolumeName;
use crate::cluster::records::RecordStore;
use crate::config::budget::Budget;
use crate::config::{Config, NodeSettings};
use crate::data_dir::DataDir;
use crate::events::Events;
use crate::shard::command::{Command, VolumeReport};

/// What needs no device.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(10);
/// Looking at one file: what it is, its first block. Then what it lies on counts as not answering.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(3);
/// What moves data.
const MOVE_TIME_MAX: Duration = Duration::from_mins(10);
/// A flush before a snapshot: whoever does not want to wait cancels it.
const FLUSH_TIME_MAX: Duration = Duration::from_hours(48);
/// A destage that has moved nothing for so long is taken for stuck.
const STALL_TIME_MAX: Duration = Duration::from_secs(10);
/// How often progress is looked at.
const WATCH_PERIOD: Duration = Duration::from_millis(50);
/// Looks at what a volume's file takes up that may be under way at once.
const LOOKS_MAX: usize = 8;

/// The node: it leads its parts through the operations that operators ask for, and each part has its own state.
pub struct Node {
    /// What it was set up with.
    setup: Arc<Setup>,
    /// The data path.
    link: Arc<Link>,
    /// What it keeps of volumes in its data directory.
    catalogue: Catalogue,
    /// Its volumes, and what is under way on them.
    volumes: Arc<Volumes>,
    /// Volumes whose opening the shard was asked for and has not answered.
    openings: Mutex<BTreeMap<String, Opening>>,
    /// How far the start is.
    start: Start,
    /// Volumes on their way from one shard to another.
    moves: Moves,
    /// Memory that volumes have reserved.
    memories: Arc<Memories>,
    /// What is dirty, recorded beside the entries.
    records: Records,
    /// The space that write logs have.
    log_spaces: Arc<LogSpaces>,
    /// Flushes that are waited for.
    flushes: Flushes,
    /// The schedule of tiering out.
    tiers: Tiers,
    /// What clones have to copy.
    copies: Copies,
    scrubs: Arc<Scrubs>,
    /// Groups of the nodes of the cluster.
    pub(in crate::control) groups: Groups,
    /// Its copies of replicated logs, if it is one of a cluster.
    replicas: Option<Replicas>,
    /// Heat maps that are kept.
    heats: Arc<Heats>,
    /// What volumes were seen to do.
    watch: Watch,
    events: Events,
    /// For looks at what a file takes up that are under way.
    looks: Arc<Semaphore>,
    uuid: Uuid,
    nbd_listen: Vec<String>,
    certificates: Option<Arc<Certificates>>,
    started: Instant,
}

/// No holder of these locks leaves a half-changed map behind, so a panic elsewhere changes nothing.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorKind::Invalid, message)
}

fn failed(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorKind::Failed, message)
}

fn parse_name(name: &str) -> Result<VolumeName, ApiError> {
    name.parse()
        .map_err(|error| invalid(format!("volume name {name:?}: {error}")))
}

impl Node {
    /// A node over a data directory and a running shard. Volumes are opened by [`Self::open_all`].
    pub fn new(
        config: Config,
        (budget, share): (Budget, Arc<Share>),
        dir: Arc<Mutex<DataDir>>,
        path: Arc<dyn DataPath>,
        nbd_listen: Vec<String>,
        certificates: Option<Arc<Certificates>>,
        events: Events,
    ) -> Self {
        let (layout, uuid) = {
            let dir = lock(&dir);
            (dir.layout().clone(), dir.node_uuid())
        };
        let setup = Arc::new(Setup::new(config, budget, layout));
        let link = Arc::new(Link::new(path));
        let volumes = Arc::new(Volumes::new(Arc::clone(&setup), Arc::clone(&link)));
        let memories = Arc::new(Memories::new(Arc::clone(&setup), share));
        let flushes = Flushes::new(Arc::clone(&link), Arc::clone(&volumes));
        let heats = Heats::new(Arc::clone(&setup), Arc::clone(&link), Arc::clone(&volumes));
        let scrubs = Scrubs::new(
            Arc::clone(&setup),
            Arc::clone(&link),
            Arc::clone(&volumes),
            Arc::clone(&memories),
        );
        let replicas = setup.cluster().map(|cluster| {
            let member = cluster.own.member;
            let store = RecordStore::new(&cluster.records, member);
            Replicas::new(store, member, Arc::clone(&link), Arc::clone(&setup))
        });
        let replication = replicas.clone();
        let replication =
            replication.map(|replicas| -> Arc<dyn Replication> { Arc::new(replicas) });
        let groups = Groups::new(Arc::clone(&setup), replication);
        Self {
            setup,
            groups,
            replicas,
            link,
            catalogue: Catalogue::new(dir),
            volumes,
            openings: Mutex::default(),
            start: Start::default(),
            moves: Moves::default(),
            memories,
            records: Records::default(),
            log_spaces: Arc::default(),
            flushes,
            tiers: Tiers::default(),
            copies: Copies::default(),
            scrubs: Arc::new(scrubs),
            heats: Arc::new(heats),
            watch: Watch::default(),
            events,
            looks: Arc::new(Semaphore::new(LOOKS_MAX)),
            uuid,
            nbd_listen,
            certificates,
            started: Instant::now(),
        }
    }

    /// What is kept of what was done.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// How long a stop waits at most for write logs whose devices do not answer.
    pub fn log_patience(&self) -> Duration {
        let settings = self.volumes.entries().into_iter();
        let settings = settings.filter_map(|entry| self.setup.settings_of(&entry.settings).ok());
        let longest = settings.map(|settings| settings.log_answer_max_ms).max();
        Duration::from_millis(longest.unwrap_or(0)).min(Duration::from_nanos(LOG_PATIENCE_MAX.0))
    }

    /// Give every open volume its share of memory after their number has changed.
    async fn share_memory(&self) {
        let entries = self.volumes.entries();
        let volumes = entries.len();
        for entry in entries {
            let memory = self.memories.of(entry.number);
            let Ok(config) = self.setup.core_config(&entry, volumes, memory.as_deref()) else {
                continue;
            };
            let what = "sharing memory";
            let shared = self.link.ask(what, COMMAND_TIME_MAX, |answer| {
                Command::Reconfigure(Box::new(config), answer)
            });
            if let Err(error) = shared.await {
                tracing::debug!("volume {}: {error}", entry.name);
            }
        }
    }

    /// Where the node's data is.
    pub fn root(&self) -> &std::path::Path {
        self.setup.layout().root()
    }

    /// The data path.
    pub fn path(&self) -> &dyn DataPath {
        self.link.path()
    }

    /// What belongs to the node as a whole.
    pub fn settings(&self) -> &NodeSettings {
        self.setup.node()
    }

    /// Read the TLS files again. What cannot be used changes nothing.
    pub async fn reload(&self) -> Result<Reloaded, ApiError> {
        let Some(certificates) = self.certificates.clone() else {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                "there are no TLS files to read again: `nbd_tls_cert_file` is not set",
            ));
        };
        let files = Arc::clone(&certificates);
        let read = tokio::task::spawn_blocking(move || files.reload());
        let read = read
            .await
            .map_err(|error| failed(format!("reading the TLS files: {error}")))?;
        let ended_clients = read.map_err(|error| {
            failed(format!(
                "the TLS files cannot be used, and those that were read before stay in force: {error}"
            ))
        })?;
        if !self.link.send(Command::EndRevoked) {
            return Err(failed(
                "the TLS files were read again, and clients whose certificates are not good any more are still \
                 connected: the data path did not take that: reload again",
            ));
        }
        let until = certificates.current().valid_until_ms;
        let until = until.map_or_else(String::new, |ms| format!(" valid until {}", utc(ms)));
        let what =
            format!("a certificate{until}; {ended_clients} clients are not trusted any more");
        self.events
            .note(Event::new("certificates", Outcome::Done, "node").what(what));
        tracing::info!(
            "read the TLS files again: {ended_clients} connected clients are not trusted any more"
        );
        Ok(Reloaded { ended_clients })
    }

    /// Close every connection and volume, making everything acknowledged durable, with `destage`
    /// after the backends hold everything, and end the shards. Asked again without `destage`, the
    /// shards settle for that. It is bounded by its caller, or without `destage` by the shards.
    pub async fn stop(&self, destage: bool) -> Result<(), ApiError> {
        self.scrubs.cancel_all();
        self.heats.save_at_stop().await;
        let (closed, hung) = self.link.stop(destage).await?;
        for one in &closed {
            self.records.closed(one.volume.0, one.left).await;
        }
        let failed_logs: Vec<String> = closed
            .iter()
            .filter(|one| one.log_failed)
            .map(|one| self.volumes.name_of(one.volume))
            .collect();
        if !hung.is_empty() {
            return Err(failed(hung.join("; ")));
        }
        if failed_logs.is_empty() {
            return Ok(());
        }
        Err(failed(format!(
            "writes to the logs of these volumes failed or were not answered: {}; what was acknowledged as durable before is \
             in them: put their devices right before the next start",
            failed_logs.join(", ")
        )))
    }
}

/// Look at files of the node's volumes on a thread of its own, since what they lie on may hang; `None` if it does.
async fn in_time<T: Send + 'static>(
    time_max: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    looks::in_time("", time_max, look).await
}

/// Do what may wait for a disk on a thread of its own: the control plane has one thread for everybody.
async fn beside<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| {
        failed(format!(
            "internal error: {error}: see the log of the daemon"
        ))
    })
}

/// What an open volume has lost with its write log, in words.
fn lost(volume: &VolumeReport) -> Option<String> {
    let stats = &volume.stats;
    (stats.lost_bytes > 0).then(|| {
        let (bytes, places) = (stats.lost_bytes, stats.lost_ranges);
        format!("its damaged write log has lost {bytes} bytes in {places} places")
    })
}

fn find(report: &NodeReport, number: VolumeNumber) -> Option<&VolumeReport> {
    report.find(number)
}
