//! The life of the daemon: start, serve, stop.
//!
//! ```text
//!  configuration ─► lock ─► shard ─► sockets bound ─► volumes open ─► ready line ─► serving
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

use hdcs_core::io::Nanos;
use hdcs_core::read_cache::{CacheConfig, FillMarks, SsdConfig};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::api::{ApiError, ErrorKind};
use super::cache_at::CacheAt;
use super::link::{DataPath, ask};
use super::node::Node;
use super::{API_TIME_MAX, METRICS_TIME_MAX, Server, metrics_router, router};
use crate::config::budget::Budget;
use crate::config::value::Listen;
use crate::config::{Config, ConfigError, NodeSettings};
use crate::data_dir::{DataDir, DataDirError};
use crate::device::ring::RingConfig;
use crate::frontends::nbd::{NbdConfig, NbdSession, tls};
use crate::shard::cache_place::CachePlace;
use crate::shard::command::{Command, SessionFactory};
use crate::shard::{
    self, CacheDevice, ConnectionLimits, SendError, ShardConfig, ShardError, ShardHandle,
};

/// Longest path of a unix socket, the terminating zero included.
const SOCKET_PATH_BYTES_MAX: usize = 108;
/// How often rates are sampled and the shard is looked after.
const TICK: Duration = Duration::from_secs(1);
/// How long the shard may take to begin to listen.
const LISTEN_TIME_MAX: Duration = Duration::from_secs(10);

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
    /// Somebody was in a hurry.
    #[error(
        "stopped at once, before every volume was closed; the next start replays the write logs"
    )]
    Hurried,
}

impl DataPath for ShardHandle {
    fn send(&self, command: Command) -> bool {
        match Self::send(self, command) {
            Ok(()) => true,
            Err(error @ SendError::Busy(_)) => {
                tracing::warn!("{error}");
                false
            }
            Err(SendError::Stopped(_)) => false,
        }
    }
}

/// A bound socket for NBD.
struct Bound {
    socket: OwnedFd,
    address: Listen,
}

/// Run the daemon until it is told to stop.
pub fn run(config: Option<&Path>, data: &Path) -> Result<(), ServeError> {
    let config = match config {
        Some(path) => Config::load(path)?,
        None => Config::default(),
    };
    // Nothing that this process makes is for others.
    // SAFETY: umask touches no memory.
    unsafe { libc::umask(0o077) };
    let mut dir = DataDir::open(data)?;
    if dir.is_fresh() {
        tracing::info!("new data directory {}", dir.layout().root().display());
    }
    let sessions = sessions(&config.node)?;
    let layout = dir.layout().clone();
    let bound = bind_nbd(&config.node, &layout)?;
    let control = bind_unix(&layout.control_socket(), true)?;
    let metrics = config.node.metrics_listen.map(bind_metrics).transpose()?;
    let budget = Budget::of(&config.node, &config.volume)?;
    if config.node.cache_total_size_mib == 0 {
        // A cache that is left out misses what is written now: what it holds must never count again.
        dir.renew_cache_uuid()?;
    }
    let dir = Arc::new(Mutex::new(dir));
    let (handle, thread) = shard::start(shard_config(&config.node, &budget, &dir))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| ServeError::System {
            what: "the control plane's runtime",
            source,
        })?;
    let sockets: Vec<PathBuf> = bound
        .iter()
        .filter_map(|bound| match &bound.address {
            Listen::Unix(path) => Some(path.clone()),
            Listen::Tcp(_) => None,
        })
        .chain([layout.control_socket()])
        .collect();
    let listen = bound
        .iter()
        .map(|bound| bound.address.to_string())
        .collect();
    let node = Arc::new(Node::new(config, budget, dir, Arc::new(handle), listen));
    let result = runtime.block_on(serve(&node, bound, control, metrics, sessions, thread));
    runtime.shutdown_timeout(Duration::from_secs(1));
    for socket in sockets {
        // The lock is still held, so nobody else can have made it anew.
        let _ = fs::remove_file(socket);
    }
    result
}

async fn serve(
    node: &Arc<Node>,
    bound: Vec<Bound>,
    control: UnixListener,
    metrics: Option<TcpListener>,
    sessions: Sessions,
    thread: JoinHandle<()>,
) -> Result<(), ServeError> {
    let at = |what| move |source| ServeError::System { what, source };
    let mut terminate = signal(SignalKind::terminate()).map_err(at("SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(at("SIGINT"))?;
    node.open_all().await?;
    let mut ready = vec![format!("hdcs: ready, data {}", node.root().display())];
    for Bound { socket, address } in bound {
        ready.push(match &address {
            Listen::Unix(path) => format!("nbd unix {}", path.display()),
            Listen::Tcp(address) => format!("nbd tcp {address}"),
        });
        let what = format!("listening on {address}");
        let sessions = sessions.of(&address);
        ask(node.path(), &what, LISTEN_TIME_MAX, |answer| {
            Command::Listen {
                socket,
                sessions,
                answer,
            }
        })
        .await?;
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
    let socket = node.root().join("control.sock");
    ready.push(format!("control {}", socket.display()));
    if let Some(Ok(address)) = metrics.as_ref().map(tokio::net::TcpListener::local_addr) {
        ready.push(format!("metrics tcp {address}"));
    }
    let ready = ready.join(", ");
    // Whoever started us may not be listening; that is no reason to stop.
    let mut stdout = io::stdout();
    let _ = writeln!(stdout, "{ready}").and_then(|()| stdout.flush());
    tracing::info!("{ready}");

    let api = Server::new(router(Arc::clone(node)), API_TIME_MAX);
    let scraped = Server::new(metrics_router(Arc::clone(node)), METRICS_TIME_MAX);
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = tick.tick() => {
                if thread.is_finished() {
                    return Err(ServeError::DataPathEnded);
                }
                node.sample().await;
                node.retry();
                node.scrub_by_schedule();
                node.save_heat_by_schedule();
            }
            accepted = accept_unix(&api, &control) => {
                if let Some(stream) = accepted { api.spawn(stream) }
            }
            accepted = accept_tcp(&scraped, metrics.as_ref()) => {
                if let Some(stream) = accepted { scraped.spawn(stream) }
            }
        }
    }
    stop(node, &mut terminate, &mut interrupt).await?;
    // It has answered that everything is closed, so it is about to end.
    let _ = tokio::task::spawn_blocking(move || thread.join()).await;
    tracing::info!("stopped");
    Ok(())
}

/// A failed accept (too many open files) passes; a pause keeps it from being tried in a circle.
async fn after_failed_accept(error: &io::Error) {
    tracing::warn!("control connection not accepted: {error}");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

async fn accept_unix(
    server: &Server,
    listener: &tokio::net::UnixListener,
) -> Option<tokio::net::UnixStream> {
    server.ready().await;
    match listener.accept().await {
        Ok((stream, _)) => Some(stream),
        Err(error) => {
            after_failed_accept(&error).await;
            None
        }
    }
}

async fn accept_tcp(
    server: &Server,
    listener: Option<&tokio::net::TcpListener>,
) -> Option<tokio::net::TcpStream> {
    let Some(listener) = listener else {
        return std::future::pending().await;
    };
    server.ready().await;
    match listener.accept().await {
        Ok((stream, _)) => Some(stream),
        Err(error) => {
            after_failed_accept(&error).await;
            None
        }
    }
}

/// Stop as policy asks; the second signal settles for what is durable, the third for nothing.
async fn stop(
    node: &Node,
    terminate: &mut Signal,
    interrupt: &mut Signal,
) -> Result<(), ServeError> {
    let settings = node.settings();
    if settings.destage_on_stop {
        let time_max = Duration::from_millis(settings.destage_on_stop_max_ms);
        tracing::info!("stopping: writing what is dirty to the backends");
        tokio::select! {
            stopped = node.stop(true) => return stopped.map_err(unclean),
            () = tokio::time::sleep(time_max) => tracing::warn!(
                "destage_on_stop_max_ms has passed: the rest stays in the write logs"
            ),
            _ = terminate.recv() => tracing::warn!("told again: the rest stays in the write logs"),
            _ = interrupt.recv() => tracing::warn!("told again: the rest stays in the write logs"),
        }
    } else {
        tracing::info!("stopping: what is dirty stays in the write logs");
    }
    tokio::select! {
        stopped = node.stop(false) => stopped.map_err(unclean),
        _ = terminate.recv() => Err(ServeError::Hurried),
        _ = interrupt.recv() => Err(ServeError::Hurried),
    }
}

/// Why a stop is no success: what the shard said, or that it has ended without a word.
fn unclean(error: ApiError) -> ServeError {
    match error.kind {
        ErrorKind::Unavailable => ServeError::DataPathEnded,
        _ => ServeError::Unclean(error.message),
    }
}

/// How NBD sessions are made.
struct Sessions {
    tls: Option<Arc<rustls::ServerConfig>>,
}

fn sessions(node: &NodeSettings) -> Result<Sessions, ServeError> {
    let tls = match (&node.nbd_tls_cert_file, &node.nbd_tls_key_file) {
        (Some(certificate), Some(key)) => Some(
            tls::load(certificate, key, node.nbd_tls_client_ca_file.as_deref())
                .map_err(|error| ServeError::Tls(error.to_string()))?,
        ),
        _ => None,
    };
    Ok(Sessions { tls })
}

impl Sessions {
    /// Over TCP, TLS is required once there is a certificate; a unix socket is its owner's alone.
    fn of(&self, address: &Listen) -> SessionFactory {
        let tls = match address {
            Listen::Tcp(_) => self.tls.clone(),
            Listen::Unix(_) => None,
        };
        let config = NbdConfig {
            require_tls: tls.is_some(),
            tls,
        };
        SessionFactory(Box::new(move |_| Box::new(NbdSession::new(config.clone()))))
    }
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

fn shard_config(node: &NodeSettings, budget: &Budget, dir: &Arc<Mutex<DataDir>>) -> ShardConfig {
    let place = CacheAt::configured(node, dir);
    let ssd = place.as_ref().map(|place| SsdConfig {
        bytes: place.bytes,
        // The start decides; see `shard::cache_place`.
        uuid: place.identity(),
        line_blocks: node.cache_line_kib.blocks(),
    });
    ShardConfig {
        cache: CacheConfig {
            dram_blocks: budget.dram_blocks(),
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
        pool_bytes: budget.pool_bytes as usize,
        ring: RingConfig {
            writer_threads: node.log_writer_threads as usize,
            raise_priority: node.raise_priority,
            ..RingConfig::default()
        },
        durability: node.log_durability,
        processor: node.shard_processor,
        connections: ConnectionLimits {
            count_max: node.nbd_connections_max as usize,
            handshake_max: Nanos::from_millis(node.nbd_handshake_max_ms),
            stall_max: Nanos::from_millis(node.nbd_stall_max_ms),
        },
    }
}
