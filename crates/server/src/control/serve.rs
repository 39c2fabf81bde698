//! The life of the daemon: start, serve, stop.
//!
//! ```text
//!  configuration ─► lock ─► shard ─► sockets bound ─► catalogue read ─► volumes open ─► ready line ─► serving
//!                                                                     └─ the control socket answers from here on
//!  serving ──SIGTERM, SIGINT──► stopping (policy: destage or not) ──► closed ──► exit 0
//!  stopping ──second signal──► content with "durable in the logs" ──third──► exit 1 at once
//! ```
//!
//! Invariants:
//! 1. Nothing in the data directory is touched before its lock is held; a socket file is removed
//!    only if no living process listens on it.
//! 2. One line goes to standard output, when every volume has been opened or given up and clients
//!    can connect. The log goes to standard error.
//! 3. Whatever moment the process ends at, what was acknowledged as durable is durable.
//! 4. A stop without destage ends within [`HANG_TIME_MAX`] of its own bound even if the shard hangs.

use std::fs;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use hdcs_api::events::{Event, Outcome};
use hdcs_api::{ApiError, ErrorKind};
use hdcs_backend::memory::Share;
use hdcs_core::base::io::Nanos;
use hdcs_core::cache::{CacheConfig, FillMarks, SsdConfig};
use hdcs_device::ring::RingConfig;
use hdcs_frontend::VolumeNumber;
use hdcs_frontend::access::Peer;
use hdcs_frontend::nbd::tls::{self, Certificates};
use hdcs_frontend::nbd::{NbdConfig, NbdSession};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;

use super::cache_at::CacheAt;
use super::link::{DataPath, ask};
use super::node::{Node, lock, run_groups};
use super::{API_TIME_MAX, METRICS_TIME_MAX, Server, Who, audit, metrics_router, router};
use crate::cluster::joining::{JoinError, claim_records, join};
use crate::config::budget::Budget;
use crate::config::machine::{self, Machine};
use crate::config::value::Listen;
use crate::config::{Config, ConfigError, NodeSettings};
use crate::data_dir::{DataDir, DataDirError};
use crate::events::{Events, Recorder};
use crate::log_limit::LogLimit;
use crate::shard::cache_place::CachePlace;
use crate::shard::command::{Command, SessionFactory, Transport};
use crate::shard::groups::GroupEvent;
use crate::shard::places::Places;
use crate::shard::{
    self, ACCEPT_FAULT_PERIOD, ACCEPT_PAUSE, CacheDevice, ConnectionLimits, Peers, SendError,
    ShardConfig, ShardError, Shards, clock,
};
use crate::{abort_report, acceptor, descriptors, logging};

/// Longest path of a unix socket, the terminating zero included.
const SOCKET_PATH_BYTES_MAX: usize = 108;
/// How often rates are sampled and the shard is looked after.
const TICK: Duration = Duration::from_secs(1);
/// Volumes that are sampled each second; of more, each is sampled less often.
const VOLUMES_SAMPLED_S: usize = 400;
/// How long the last events may take to be written.
const EVENTS_TIME_MAX: Duration = Duration::from_secs(2);
/// How long the shard may take to begin to listen.
const LISTEN_TIME_MAX: Duration = Duration::from_secs(10);
/// How long after the bounds of its own the shard may take to answer a stop: then it counts as hanging.
const HANG_TIME_MAX: Duration = Duration::from_secs(10);

/// Why the daemon could not start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The configuration was refused.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// The data directory was refused.
    #[error("{0}")]
    DataDir(#[from] DataDirError),
    /// The shard could not start.
    #[error("cannot start the data path: {0}")]
    Shard(#[from] ShardError),
    /// The system gives too few descriptors.
    #[error("cannot run: {0}")]
    Descriptors(#[from] descriptors::TooFew),
    /// A socket could not be used.
    #[error("cannot listen on {what}: {reason}")]
    Listen {
        /// Which.
        what: String,
        /// Why, and what to do.
        reason: String,
    },
    /// The TLS files could not be used.
    #[error("cannot use the TLS files of nbd_tls_*: {0}")]
    Tls(String),
    /// The control plane failed.
    #[error("{0}")]
    Control(#[from] ApiError),
    /// The node cannot speak with others of its cluster.
    #[error("cannot join the cluster: {0}")]
    Join(#[from] JoinError),
    /// The operating system refused something that every daemon needs.
    #[error("cannot run: {what}: {source}")]
    System {
        /// What.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The data path has ended by itself.
    #[error(
        "the data path has ended: see the log above; acknowledged data is safe in the write logs"
    )]
    DataPathEnded,
    /// The stop came to its end, but not as it should.
    #[error("the node has stopped, but not cleanly: {0}")]
    Unclean(String),
    /// The shard's thread waits for something that does not answer.
    #[error(
        "stopped without the data path, which does not answer: a device or the kernel may be hanging; the next start \
         replays the write logs"
    )]
    Hangs,
    /// Somebody was in a hurry.
    #[error(
        "stopped at once, before every volume was closed; the next start replays the write logs"
    )]
    Hurried,
}

/// Whether a command was taken.
fn taken(sent: Result<(), SendError>) -> bool {
    match sent {
        Ok(()) => true,
        Err(error @ SendError::Busy(_)) => {
            tracing::warn!("{error}");
            false
        }
        Err(SendError::Stopped(_)) => false,
    }
}

impl DataPath for Shards {
    fn send(&self, command: Command) -> bool {
        taken(Self::send(self, command))
    }

    fn shards(&self) -> usize {
        self.count()
    }

    fn send_to(&self, shard: usize, command: Command) -> bool {
        taken(Self::send_to(self, shard, command))
    }

    fn is_stopping(&self) -> bool {
        Self::is_stopping(self)
    }

    fn shard_of(&self, volume: VolumeNumber) -> Option<usize> {
        Self::shard_of(self, volume)
    }

    fn note(&self, shard: usize, cpu: Duration, connections: usize) {
        Self::note(self, shard, cpu, connections);
    }
}

/// A bound socket for NBD.
struct Bound {
    socket: OwnedFd,
    address: Listen,
}

/// Every socket that listens, and what its clients meet.
struct Listeners {
    nbd: Vec<Bound>,
    control: UnixListener,
    control_path: PathBuf,
    metrics: Option<TcpListener>,
    certificates: Option<Arc<Certificates>>,
    shards: Arc<Shards>,
    /// What the first shard tells of copies, of a node in a cluster.
    groups: Option<UnboundedReceiver<GroupEvent>>,
}

impl Listeners {
    /// The files of unix sockets.
    fn files(&self) -> Vec<PathBuf> {
        let nbd = self.nbd.iter().filter_map(|bound| match &bound.address {
            Listen::Unix(path) => Some(path.clone()),
            Listen::Tcp(_) => None,
        });
        nbd.chain([self.control_path.clone()]).collect()
    }
}

/// Run the daemon until it is told to stop.
pub fn run(config: Option<&Path>, data: &Path) -> Result<(), ServeError> {
    let mut config = match config {
        Some(path) => Config::load(path)?,
        None => Config::default(),
    };
    abort_report::install();
    share_descriptors(&mut config.node)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| ServeError::System {
            what: "the control plane's runtime",
            source,
        })?;
    // From the first moment on, since it ends a process that does not expect it.
    let hangup = {
        let _inside = runtime.enter();
        signal(SignalKind::hangup()).map_err(|source| ServeError::System {
            what: "SIGHUP",
            source,
        })?
    };
    // Nothing that this process makes is for others.
    // SAFETY: umask touches no memory.
    unsafe { libc::umask(0o077) };
    let mut told = {
        let _inside = runtime.enter();
        Told::listen().map_err(|source| ServeError::System {
            what: "SIGTERM, SIGINT",
            source,
        })?
    };
    let dir = DataDir::open(data)?;
    if dir.is_fresh() {
        tracing::info!("new data directory {}", dir.layout().root().display());
    }
    let layout = dir.layout();
    let machine = Machine::here(layout.root(), &layout.cache());
    if let Some(chosen) = config.fit(&machine) {
        tracing::info!("{chosen}");
    }
    config.check()?;
    config.check_machine(&machine)?;
    tracing::info!("shards = {}", config.node.shards.count());
    let events = Events::open(dir.layout().root()).map_err(|source| ServeError::System {
        what: "the thread that writes events",
        source,
    })?;
    let before = events.last_end().unwrap_or_default();
    let version = format!(
        "version {}, pid {}",
        env!("CARGO_PKG_VERSION"),
        std::process::id()
    );
    // The lock is held for as long as this is.
    let dir = Arc::new(Mutex::new(dir));
    let (node, listeners, threads) = match prepare(config, &dir, &events) {
        Ok(prepared) => prepared,
        Err(error) => {
            let event = Event::new("start", Outcome::Failed, "node").what(version);
            events.note(event.why(error.to_string()));
            events.finish(EVENTS_TIME_MAX);
            return Err(error);
        }
    };
    let event = Event::new("start", Outcome::Done, "node").what(version);
    events.note(event.why(before));
    let sockets = listeners.files();
    let serving = serve(&node, listeners, hangup, &mut told, threads);
    let result = runtime.block_on(serving);
    runtime.shutdown_timeout(Duration::from_secs(1));
    let event = match &result {
        Ok(()) => Event::new("stop", Outcome::Done, told.by()),
        Err(error) => Event::new("stop", Outcome::Failed, told.by()).why(error.to_string()),
    };
    events.note(event);
    events.finish(EVENTS_TIME_MAX);
    // The lock is still held, so nobody else can have made them anew. The disk that they are on may hang.
    let (removed, wait) = std::sync::mpsc::sync_channel(1);
    let remove = std::thread::Builder::new().spawn(move || {
        for socket in sockets {
            let _ = fs::remove_file(socket);
        }
        let _ = removed.send(());
    });
    if remove.is_ok() {
        let _ = wait.recv_timeout(Duration::from_secs(1));
    }
    result
}

/// The shards' threads.
type Threads = Vec<JoinHandle<()>>;

/// Bind the sockets and start the shards.
fn prepare(
    config: Config,
    dir: &Arc<Mutex<DataDir>>,
    events: &Events,
) -> Result<(Arc<Node>, Listeners, Threads), ServeError> {
    let certificates = certificates(&config.node)?;
    if let Some(cluster) = &config.cluster {
        // What is wrong with the directory is better known now than when a group has to be taken.
        let running = claim_records(cluster, lock(dir).layout())
            .map_err(|error| ServeError::Config(ConfigError::Relation(error.to_string())))?;
        lock(dir).hold(running);
    }
    let layout = lock(dir).layout().clone();
    let nbd = bind_nbd(&config.node, &layout)?;
    let control = bind_unix(&layout.control_socket(), true)?;
    let metrics = config.node.metrics_listen.map(bind_metrics).transpose()?;
    let budget = Budget::of(&config.node, &config.volume)?;
    check_processors(config.node.shard_processor.numbers())?;
    if config.node.cache_total_size_mib == 0 {
        // A cache that is left out misses what is written now: what it holds must never count again.
        lock(dir).renew_cache_uuid()?;
    }
    let joined = match &config.cluster {
        Some(cluster) => Some(join(cluster, lock(dir).count_run()?)?),
        None => None,
    };
    let memory = Share::of_shards(budget.volumes_bytes, budget.shards);
    let recorder = events.recorder();
    let shard_configs = shard_configs(&config.node, &budget, dir, &memory, &recorder);
    let (shards, threads) = shard::start_all(shard_configs)?;
    let groups = joined.map(|(config, told)| {
        // The first shard takes what it is sent first.
        taken(shards.send(Command::JoinCluster(Box::new(config))));
        told
    });
    let listen = nbd.iter().map(|bound| bound.address.to_string()).collect();
    let node = Node::new(
        config,
        (budget, memory),
        Arc::clone(dir),
        Arc::<Shards>::clone(&shards),
        listen,
        certificates.clone(),
        events.clone(),
    );
    let listeners = Listeners {
        nbd,
        control,
        control_path: layout.control_socket(),
        metrics,
        certificates,
        shards,
        groups,
    };
    Ok((Arc::new(node), listeners, threads))
}

/// What NBD clients meet once they are let in.
struct Clients {
    nbd: Vec<Bound>,
    certificates: Option<Arc<Certificates>>,
    shards: Arc<Shards>,
}

impl Clients {
    /// Listen to them. What accepts those with TLS, and what the ready line says of all.
    async fn let_in(
        self,
        node: &Node,
    ) -> Result<(Option<acceptor::Acceptor>, Vec<String>), ServeError> {
        let at = |what| move |source| ServeError::System { what, source };
        let mut ready = vec![format!("hdcs: ready, data {}", node.root().display())];
        let mut doors = Vec::new();
        for Bound { socket, address } in self.nbd {
            ready.push(match &address {
                Listen::Unix(path) => format!("nbd unix {}", path.display()),
                Listen::Tcp(address) => format!("nbd tcp {address}"),
            });
            if let (Listen::Tcp(_), Some(_)) = (&address, &self.certificates) {
                let places = Places::new(node.settings().nbd_connections_max as usize);
                doors.push((TcpListener::from(socket), places));
                continue;
            }
            let what = format!("listening on {address}");
            let sessions = plain_sessions();
            ask(node.path(), &what, LISTEN_TIME_MAX, |answer| {
                Command::Listen {
                    socket,
                    sessions,
                    answer,
                }
            })
            .await?;
        }
        let acceptor = match self.certificates {
            Some(certificates) => {
                let settings = node.settings();
                let limits = acceptor::Limits {
                    handshakes_max: settings.nbd_tls_handshakes_max as usize,
                    handshakes_s: settings.nbd_tls_handshakes_s,
                    time_max: Duration::from_millis(settings.nbd_handshake_max_ms),
                };
                let recorder = node.events().recorder();
                let started = acceptor::start(doors, certificates, limits, self.shards, recorder);
                Some(started.map_err(at("the thread of TLS handshakes"))?)
            }
            None => None,
        };
        Ok((acceptor, ready))
    }
}

fn say_ready(ready: &str) {
    // Whoever started us may not be listening; that is no reason to stop.
    let mut stdout = io::stdout();
    let _ = writeln!(stdout, "{ready}").and_then(|()| stdout.flush());
    tracing::info!("{ready}");
}

async fn serve(
    node: &Arc<Node>,
    listeners: Listeners,
    mut hangup: Signal,
    told: &mut Told,
    threads: Threads,
) -> Result<(), ServeError> {
    let Listeners {
        nbd,
        control,
        control_path: socket,
        metrics,
        certificates,
        shards,
        groups,
    } = listeners;
    let at = |what| move |source| ServeError::System { what, source };
    let names = tokio::select! {
        recovered = node.recover() => recovered?,
        () = told.times(1) => return finish(node, told, tokio::spawn(tick(Arc::clone(node), threads))).await,
    };
    if let Some(groups) = groups {
        tokio::spawn(run_groups(Arc::clone(node), groups));
    }
    control
        .set_nonblocking(true)
        .map_err(at("control socket"))?;
    let control = tokio::net::UnixListener::from_std(control).map_err(at("control socket"))?;
    let metrics = match metrics {
        Some(listener) => {
            listener
                .set_nonblocking(true)
                .map_err(at("metrics_listen"))?;
            Some(tokio::net::TcpListener::from_std(listener).map_err(at("metrics_listen"))?)
        }
        None => None,
    };
    let recorder = || node.events().recorder();
    let api = Server::new(router(Arc::clone(node)), API_TIME_MAX, recorder());
    let scraped = metrics_router(Arc::clone(node));
    let scraped = Server::new(scraped, METRICS_TIME_MAX, recorder());
    let mut at_control = Accepting::new(format!("control {}", socket.display()), recorder());
    let mut at_metrics = Accepting::new("metrics_listen".to_owned(), recorder());
    let metrics_address = metrics.as_ref().map(tokio::net::TcpListener::local_addr);
    let clients = Clients {
        nbd,
        certificates,
        shards,
    };
    let mut opening = Box::pin(async {
        node.open_all(names).await?;
        let (acceptor, mut ready) = clients.let_in(node).await?;
        ready.push(format!("control {}", socket.display()));
        if let Some(Ok(address)) = metrics_address {
            ready.push(format!("metrics tcp {address}"));
        }
        say_ready(&ready.join(", "));
        Ok::<_, ServeError>(acceptor)
    });
    // Until every volume has been opened or given up, those who ask are told how far that is.
    let mut acceptor = None;
    let mut threads = Some(threads);
    let mut ticking = None;
    loop {
        tokio::select! {
            () = told.times(1) => break,
            opened = &mut opening, if threads.is_some() => {
                acceptor = opened?;
                let threads = threads.take().expect("it was looked at");
                ticking = Some(tokio::spawn(tick(Arc::clone(node), threads)));
            }
            _ = hangup.recv() => {
                let node = Arc::clone(node);
                tokio::spawn(async move {
                    let reloaded = node.reload().await;
                    if let Err(error) = &reloaded {
                        tracing::warn!("SIGHUP: {error}");
                    }
                    let result = reloaded.as_ref().map(drop);
                    audit::note_signal(&node, "reload", "signal SIGHUP", result);
                });
            }
            // It ends with a shard alone.
            _ = async { ticking.as_mut().expect("it was looked at").await }, if ticking.is_some() => {
                return Err(ServeError::DataPathEnded);
            }
            accepted = accept_unix(&api, &control, &mut at_control) => {
                if let Some(stream) = accepted {
                    let who = Who::of(&stream);
                    api.spawn(stream, who);
                }
            }
            accepted = accept_tcp(&scraped, metrics.as_ref(), &mut at_metrics) => {
                if let Some((stream, peer)) = accepted {
                    let who = Transport::Tcp { peer }.to_string();
                    scraped.spawn(stream, Who(who.into()));
                }
            }
        }
    }
    // Nothing more is opened.
    drop(opening);
    drop(acceptor);
    let ticking = match (ticking, threads) {
        (Some(ticking), _) => ticking,
        (None, threads) => tokio::spawn(tick(Arc::clone(node), threads.unwrap_or_default())),
    };
    finish(node, told, ticking).await
}

/// Stop, and wait for the shards to end.
async fn finish(
    node: &Node,
    told: &mut Told,
    ticking: tokio::task::JoinHandle<()>,
) -> Result<(), ServeError> {
    stop(node, told).await?;
    // They have answered that everything is closed, and are about to end, unless the kernel holds up their last requests.
    if tokio::time::timeout(HANG_TIME_MAX, ticking).await.is_err() {
        tracing::warn!(
            "a device does not answer: the data path is left as it is, with everything closed"
        );
    }
    tracing::info!("stopped");
    Ok(())
}

/// Do what is due every second, until a shard has ended, or all if the node stops.
async fn tick(node: Arc<Node>, shards: Threads) {
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut ticks, mut volumes) = (0, 0);
    let has_ended = || {
        let mut shards = shards.iter();
        if node.path().is_stopping() {
            shards.all(JoinHandle::is_finished)
        } else {
            shards.any(JoinHandle::is_finished)
        }
    };
    while !has_ended() {
        tick.tick().await;
        logging::say_dropped();
        // A look at very many volumes is not free, and not needed every second.
        if ticks % (1 + volumes / VOLUMES_SAMPLED_S) == 0 {
            volumes = node.sample().await.unwrap_or(volumes);
        }
        ticks += 1;
        node.retry();
        node.scrub_by_schedule();
        node.save_heat_by_schedule();
    }
}

/// How often the process was told to stop, and by which signal at last.
struct Told {
    times: watch::Receiver<(u32, &'static str)>,
}

impl Told {
    /// Listen to SIGTERM and SIGINT from now on, in a task of its own.
    fn listen() -> io::Result<Self> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let (tell, times) = watch::channel((0, "node"));
        tokio::spawn(async move {
            loop {
                let signal = tokio::select! {
                    _ = terminate.recv() => "signal SIGTERM",
                    _ = interrupt.recv() => "signal SIGINT",
                };
                tell.send_modify(|told| *told = (told.0 + 1, signal));
            }
        });
        Ok(Self { times })
    }

    /// Wait until it was told so often.
    async fn times(&mut self, times: u32) {
        // The sender lives as long as the runtime.
        let _ = self.times.wait_for(|told| told.0 >= times).await;
    }

    /// What told it to stop: a signal, or else the node itself.
    fn by(&self) -> &'static str {
        self.times.borrow().1
    }
}

/// How accepting goes at one listener of the control plane.
struct Accepting {
    place: String,
    events: Recorder,
    faults: LogLimit,
    is_failing: bool,
}

impl Accepting {
    fn new(place: String, events: Recorder) -> Self {
        Self {
            place,
            events,
            faults: LogLimit::new(ACCEPT_FAULT_PERIOD),
            is_failing: false,
        }
    }

    /// A failed accept (too many open files) passes; a pause keeps it from being tried in a circle.
    async fn accepted<T>(&mut self, accepted: io::Result<T>) -> Option<T> {
        match accepted {
            Ok(accepted) => {
                if std::mem::take(&mut self.is_failing) {
                    shard::note_accepting(&self.events, &self.place, Ok(()));
                }
                Some(accepted)
            }
            Err(error) => {
                self.is_failing = true;
                shard::note_accepting(&self.events, &self.place, Err(&error));
                if let Some(left_out) = self.faults.pass() {
                    let place = &self.place;
                    tracing::warn!(%error, left_out, "connection not accepted: {place}");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                None
            }
        }
    }
}

async fn accept_unix(
    server: &Server,
    listener: &tokio::net::UnixListener,
    accepting: &mut Accepting,
) -> Option<tokio::net::UnixStream> {
    server.ready().await;
    let accepted = listener.accept().await;
    accepting.accepted(accepted.map(|(stream, _)| stream)).await
}

async fn accept_tcp(
    server: &Server,
    listener: Option<&tokio::net::TcpListener>,
    accepting: &mut Accepting,
) -> Option<(tokio::net::TcpStream, SocketAddr)> {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    server.ready().await;
    let accepted = listener.accept().await;
    accepting.accepted(accepted).await
}

/// Stop as policy asks; the second signal settles for what is durable, the third for nothing.
async fn stop(node: &Node, told: &mut Told) -> Result<(), ServeError> {
    let settings = node.settings();
    // Signals that came while it was starting count as one.
    let first = told.times.borrow().0;
    if settings.destage_on_stop {
        let time_max = Duration::from_millis(settings.destage_on_stop_max_ms);
        tracing::info!("stopping: writing what is dirty to the backends");
        tokio::select! {
            stopped = node.stop(true) => return stopped.map_err(unclean),
            () = tokio::time::sleep(time_max) => tracing::warn!(
                "destage_on_stop_max_ms has passed: the rest stays in the write logs"
            ),
            () = told.times(first + 1) => {
                tracing::warn!("told again: the rest stays in the write logs");
            }
        }
    } else {
        tracing::info!("stopping: what is dirty stays in the write logs");
    }
    let cache = Duration::from_millis(settings.cache_answer_max_ms);
    let time_max = shard::STOP_TIME_MAX + cache + node.log_patience() + HANG_TIME_MAX;
    let again = told.times.borrow().0.max(first) + 1;
    tokio::select! {
        stopped = node.stop(false) => stopped.map_err(unclean),
        () = tokio::time::sleep(time_max) => Err(ServeError::Hangs),
        () = told.times(again) => Err(ServeError::Hurried),
    }
}

/// Why a stop is no success: what the shard said, or that it has ended without a word.
fn unclean(error: ApiError) -> ServeError {
    match error.kind {
        ErrorKind::Unavailable => ServeError::DataPathEnded,
        _ => ServeError::Unclean(error.message),
    }
}

/// Raise the limit of descriptors, and have clients leave some of them to files.
fn share_descriptors(node: &mut NodeSettings) -> Result<(), ServeError> {
    let limit = descriptors::raise();
    let wanted = node.nbd_connections_max as usize;
    let each = descriptors::connections_max(limit, node.nbd_listen.len(), wanted)?;
    if each < wanted {
        tracing::warn!(
            "the limit of {limit} open files has room for {each} connections on each address of nbd_listen, not for \
             nbd_connections_max = {wanted}: raise it (LimitNOFILE= of a systemd service)"
        );
        node.nbd_connections_max = each as u64;
    }
    Ok(())
}

/// The certificates of TCP listeners, if they have some.
fn certificates(node: &NodeSettings) -> Result<Option<Arc<Certificates>>, ServeError> {
    let (Some(certificate), Some(key)) = (&node.nbd_tls_cert_file, &node.nbd_tls_key_file) else {
        return Ok(None);
    };
    let files = tls::Files {
        certificate: certificate.clone(),
        key: key.clone(),
        client_authority: node.nbd_tls_client_ca_file.clone(),
        client_revocations: node.nbd_tls_client_crl_file.clone(),
    };
    let loaded = Certificates::load(files).map_err(|error| ServeError::Tls(error.to_string()))?;
    Ok(Some(Arc::new(loaded)))
}

/// Sessions without TLS: of the unix socket, which is its owner's alone, and of TCP without certificates.
fn plain_sessions() -> SessionFactory {
    SessionFactory(Box::new(|transport| {
        let (peer, address) = match transport {
            Transport::Unix(_) => (Peer::Local, None),
            Transport::Tcp { peer } => (Peer::Unnamed, Some(peer)),
        };
        Box::new(NbdSession::new(NbdConfig {
            peer,
            address,
            ..NbdConfig::default()
        }))
    }))
}

fn bind_nbd(
    node: &NodeSettings,
    layout: &crate::data_dir::Layout,
) -> Result<Vec<Bound>, ServeError> {
    let mut bound = Vec::new();
    for listen in &node.nbd_listen {
        bound.push(match listen {
            Listen::Unix(path) => {
                let path = layout.root().join(path);
                Bound {
                    socket: bind_unix(&path, path.starts_with(layout.root()))?.into(),
                    address: Listen::Unix(path),
                }
            }
            Listen::Tcp(address) => {
                let socket = TcpListener::bind(address)
                    .map_err(|error| refused(listen.to_string(), &error, "nbd_listen"))?;
                // With port 0 the system has chosen one.
                let address = socket.local_addr().unwrap_or(*address);
                Bound {
                    socket: socket.into(),
                    address: Listen::Tcp(address),
                }
            }
        });
    }
    Ok(bound)
}

fn bind_metrics(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address)
        .map_err(|error| refused(format!("tcp:{address}"), &error, "metrics_listen"))
}

fn refused(what: String, error: &io::Error, key: &str) -> ServeError {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!(": another program has it; stop that one, or change {key}")
        }
        _ => format!(": check {key}"),
    };
    ServeError::Listen {
        what,
        reason: format!("{error}{advice}"),
    }
}

/// Bind a unix socket for its owner alone. In the data directory our lock says that whoever made
/// the file is gone; elsewhere only a refused connection does.
fn bind_unix(path: &Path, is_locked: bool) -> Result<UnixListener, ServeError> {
    let refuse = |reason: String| ServeError::Listen {
        what: format!("unix:{}", path.display()),
        reason,
    };
    let bytes = path.as_os_str().as_bytes().len();
    if bytes >= SOCKET_PATH_BYTES_MAX {
        return Err(refuse(format!(
            "the path has {bytes} bytes, a unix socket's at most {}: use a data directory with a \
             shorter path",
            SOCKET_PATH_BYTES_MAX - 1
        )));
    }
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(refuse(
                "something that is not a socket has this name: move it away".to_owned(),
            ));
        }
        if !is_locked && UnixStream::connect(path).is_ok() {
            return Err(refuse(
                "another program listens there: stop it, or change nbd_listen".to_owned(),
            ));
        }
        fs::remove_file(path).map_err(|error| refuse(error.to_string()))?;
    }
    let listener = UnixListener::bind(path)
        .map_err(|error| refused(format!("unix:{}", path.display()), &error, "nbd_listen"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .map_err(|error| refuse(error.to_string()))?;
    Ok(listener)
}

/// Refuse processors that this process cannot run on.
fn check_processors(wanted: &[usize]) -> Result<(), ServeError> {
    let allowed = machine::processors().map_err(|source| ServeError::System {
        what: "the processors that it may run on",
        source,
    })?;
    let Some(number) = wanted.iter().find(|number| !allowed.contains(number)) else {
        return Ok(());
    };
    let allowed: Vec<String> = allowed.iter().map(usize::to_string).collect();
    let why = format!(
        "`shard_processor` names processor {number}, which is not there for this process: it has {}",
        allowed.join(", ")
    );
    Err(ServeError::Config(ConfigError::Relation(why)))
}

/// What each shard is made of. The first one makes the SSD tier, which all share.
fn shard_configs(
    node: &NodeSettings,
    budget: &Budget,
    dir: &Arc<Mutex<DataDir>>,
    volumes: &Arc<Share>,
    events: &Recorder,
) -> Vec<ShardConfig> {
    let place = CacheAt::configured(node, dir);
    let ssd = place.as_ref().map(|place| SsdConfig {
        bytes: place.bytes,
        // The start decides; see `shard::cache_place`.
        uuid: place.identity(),
        line_blocks: node.cache_line_kib.blocks(),
    });
    let first = ShardConfig {
        number: 0,
        peers: Arc::new(Peers::of(1)),
        cache: CacheConfig {
            dram_blocks: budget.shard_dram_blocks(),
            ssd,
            ssd_answer_max: Nanos::from_millis(node.cache_answer_max_ms),
        },
        cache_fill: FillMarks {
            ratio_max: node.cache_ratio_max as u8,
            ratio_health: node.cache_ratio_health as u8,
            pin_ratio_max: node.cache_pin_ratio_max as u8,
        },
        cache_tiering: node.cache_tiering,
        cache_device: place.map(|place| CacheDevice {
            place: Arc::new(place),
            retry: Nanos::from_millis(node.cache_retry_ms),
        }),
        shared_cache: Arc::default(),
        origin: clock::now(),
        pool_bytes: budget.shard_pool_bytes() as usize,
        touched_bytes: budget.shard_touched_bytes(node) as usize,
        ring: RingConfig {
            writer_threads: node.log_writer_threads as usize,
            raise_priority: node.raise_priority,
            ..RingConfig::default()
        },
        durability: node.log_durability,
        measurements: Arc::default(),
        processor: None,
        connections: ConnectionLimits {
            count_max: node.nbd_connections_max as usize,
            handshake_max: Nanos::from_millis(node.nbd_handshake_max_ms),
            stall_max: Nanos::from_millis(node.nbd_stall_max_ms),
            rate_min_bytes: node.nbd_rate_min_kib_s << 10,
            heap_bytes: budget.shard_connections_bytes(),
        },
        volumes: Arc::clone(volumes),
        events: events.clone(),
    };
    let processors = node.shard_processor.numbers();
    let shard = |number: usize| {
        let mut config = first.clone();
        config.processor = processors.get(number).copied();
        if number > 0 {
            config.cache.ssd = None;
            config.cache_device = None;
        }
        config
    };
    (0..budget.shards).map(shard).collect()
}
