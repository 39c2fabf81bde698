//! Who has the space of the file systems that write logs lie on: what the core decides
//! ([`hdcs_core::node::log_space`]) is carried out here, beside everything else.
//!
//! ```text
//!  a log fills up, or a second has passed
//!     └─► for each file system with nothing under way: look at its free space ─► decide ─┬─► nothing
//!           ┌── prepared, durable: its shard is told ◄── allocate, zero, sync ◄──────────┤
//!           └── its shard uses no more than the rest: the hole is made ◄─────────────────┘
//! ```
//!
//! Invariants:
//! 1. Of each file system one log at a time is changed. One that hangs holds up no other.
//! 2. What is under way keeps the log's file open, and so locked: the log is not opened again in the meantime.
//! 3. A log is told of more after that is durable, and uses less before it is taken away.
//!
//! Failure: the log stays as it is, and the file system is left alone for a while.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use hdcs_core::base::io::Nanos;
use hdcs_core::node::log_space::{Act, Space, next_act};
use hdcs_core::volume::sharing::GivenBack;
use hdcs_device::space;
use hdcs_frontend::VolumeNumber;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::{COMMAND_TIME_MAX, WATCH_PERIOD, lock};
use crate::catalogue::Entry;
use crate::control::link::Link;
use crate::shard::command::Command;
use crate::shard::log_space::LogSpace;

/// How often free space is looked at.
const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// After a failure a file system is left alone for so long.
const FAILURE_PAUSE: Duration = Duration::from_secs(10);
/// How often a log is asked that is about to be at rest.
const ASKS_MAX: u32 = 40;

/// The space of all logs.
#[derive(Debug, Default)]
pub(super) struct LogSpaces {
    /// With the volume's number and name.
    logs: Mutex<Vec<(u32, String, Weak<LogSpace>)>>,
    wanted: Arc<Notify>,
    failures: AtomicU64,
}

/// An open log.
#[derive(Clone)]
struct Log {
    number: VolumeNumber,
    name: String,
    space: Arc<LogSpace>,
    quiet: Nanos,
}

/// What is known of a file system.
#[derive(Default)]
struct FileSystem {
    under_way: Option<JoinHandle<Result<bool, String>>>,
    not_before: Option<Instant>,
    /// That it has no space was said.
    is_said: bool,
}

impl LogSpaces {
    /// The log of this volume is about to be opened.
    pub fn enter(&self, entry: &Entry) -> Arc<LogSpace> {
        let space = Arc::new(LogSpace::new(Arc::clone(&self.wanted)));
        let mut logs = lock(&self.logs);
        logs.retain(|(.., log)| log.strong_count() > 0);
        logs.push((entry.number, entry.name.to_string(), Arc::downgrade(&space)));
        space
    }

    /// How often more space for a log was not to be had although there seemed to be some.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    fn open(&self) -> Vec<Log> {
        let logs = lock(&self.logs);
        let log = |(number, name, space): &(u32, String, Weak<LogSpace>)| {
            Some(Log {
                number: VolumeNumber(*number),
                name: name.clone(),
                space: space.upgrade()?,
                quiet: Nanos(0),
            })
        };
        logs.iter().filter_map(log).collect()
    }
}

impl LogSpaces {
    /// Share the space of file systems among logs, for as long as the node runs.
    pub fn share(self: &Arc<Self>, link: &Arc<Link>) {
        let (spaces, link) = (Arc::downgrade(self), Arc::clone(link));
        tokio::spawn(async move {
            let mut systems: HashMap<u64, FileSystem> = HashMap::new();
            let mut quiet_since: HashMap<VolumeNumber, Instant> = HashMap::new();
            loop {
                let Some(spaces) = spaces.upgrade() else {
                    return;
                };
                let wanted = Arc::clone(&spaces.wanted);
                spaces.look(&link, &mut systems, &mut quiet_since).await;
                drop(spaces);
                let _ = tokio::time::timeout(LOOK_PERIOD, wanted.notified()).await;
            }
        });
    }

    async fn look(
        &self,
        link: &Arc<Link>,
        systems: &mut HashMap<u64, FileSystem>,
        quiet_since: &mut HashMap<VolumeNumber, Instant>,
    ) {
        let now = Instant::now();
        let open = self.open();
        quiet_since.retain(|number, _| open.iter().any(|log| log.number == *number));
        let mut of_systems: HashMap<u64, Vec<Log>> = HashMap::new();
        let mut all: HashMap<u64, Vec<Arc<LogSpace>>> = HashMap::new();
        for mut log in open {
            if let Some(system) = log.space.file_system() {
                all.entry(system).or_default().push(Arc::clone(&log.space));
            }
            let since = quiet_since.entry(log.number).or_insert(now);
            if log.space.take_used() {
                *since = now;
            }
            log.quiet = Nanos((now - *since).as_nanos() as u64);
            if log.space.view(log.quiet).is_some()
                && !log.space.is_left_alone()
                && let Some(system) = log.space.file_system()
            {
                of_systems.entry(system).or_default().push(log);
            }
        }
        for (system, logs) in of_systems {
            let all = all.remove(&system).unwrap_or_default();
            let system = systems.entry(system).or_default();
            self.end_of(system).await;
            let waits = system.not_before.is_some_and(|at| now < at);
            if system.under_way.is_none() && !waits {
                let link = Arc::clone(link);
                system.under_way = Some(tokio::spawn(async move {
                    let mut has_changed = false;
                    while change_one(&logs, &all, &link).await? {
                        has_changed = true;
                    }
                    Ok(has_changed)
                }));
            }
        }
    }

    /// Note how what was under way on a file system has ended, if it has.
    async fn end_of(&self, system: &mut FileSystem) {
        let Some(ended) = system.under_way.take_if(|job| job.is_finished()) else {
            return;
        };
        match ended.await {
            Ok(Ok(true)) => system.is_said = false,
            Ok(Ok(false)) | Err(_) => {}
            Ok(Err(why)) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                system.not_before = Some(Instant::now() + FAILURE_PAUSE);
                if !std::mem::replace(&mut system.is_said, true) {
                    tracing::warn!("{why}: it goes on with what it has, and this is tried again");
                }
            }
        }
    }
}

/// Take the next step for the logs of a file system, `all` of which have backends. Returns whether there was one.
async fn change_one(logs: &[Log], all: &[Arc<LogSpace>], link: &Link) -> Result<bool, String> {
    // One that has not heard of what it was given fills up in what it knows of.
    let untold = |log: &'_ Log| Some((log.clone(), log.space.untold()?));
    if let Some((log, bytes)) = logs.iter().find_map(untold) {
        return Ok(log.tell_prepared(bytes, link).await);
    }
    let Some(any) = logs.iter().find_map(|log| log.space.file()) else {
        return Ok(false);
    };
    let all = all.to_vec();
    let (found, owed) = blocking(move || {
        let found = rustix::fs::fstatvfs(&*any);
        // Nobody's log is held any longer.
        drop(any);
        let owed = all.iter().map(|space| space.owed_to_backend());
        (found, owed.fold(0, u64::saturating_add))
    })
    .await?;
    let found = found.map_err(|error| format!("the file system of write logs: {error}"))?;
    let space = Space {
        total: found.f_blocks * found.f_frsize,
        free: found.f_bavail * found.f_frsize,
        owed,
    };
    let views = logs.iter().filter_map(|log| log.space.view(log.quiet));
    let views: Vec<_> = views.collect();
    debug_assert_eq!(views.len(), logs.len());
    match next_act(space, &views) {
        None => Ok(false),
        Some(Act::Prepare { log, bytes }) => {
            let log = &logs[log];
            let Some(file) = log.space.file() else {
                return Ok(false);
            };
            // What the log may use already is not zeroed.
            let from = log.space.usable();
            debug_assert!(from < bytes, "what is decided by is no less");
            match blocking(move || space::prepare(&file, from, bytes)).await? {
                Ok(()) => Ok(log.tell_prepared(bytes, link).await),
                // The volume is being closed, or goes to another shard.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    log.space.leave_alone(FAILURE_PAUSE);
                    Ok(false)
                }
                Err(error) => Err(format!(
                    "the write log of volume {} cannot grow to {bytes} bytes: {error}",
                    log.name
                )),
            }
        }
        Some(Act::GiveBack { log, bytes }) => {
            let (view, log) = (views[log], &logs[log]);
            let Some(file) = log.space.file() else {
                return Ok(false);
            };
            if !log.gives_back(bytes, link).await {
                log.space.leave_alone(FAILURE_PAUSE);
                return Ok(false);
            }
            // If no hole can be made, it is tried again. What lies there is prepared anew before the log uses it.
            log.space.take(bytes, view.prepared);
            let given = blocking(move || space::give_back(&file, bytes, view.all));
            given.await?.map_err(|error| {
                let name = &log.name;
                format!("the write log of volume {name} cannot give back space: {error}")
            })?;
            log.space.take(bytes, 0);
            tracing::debug!(
                "the write log of volume {} has given back all but {bytes} bytes",
                log.name
            );
            Ok(true)
        }
    }
}

impl Log {
    /// Tell it that so many bytes are prepared. Returns whether it knows.
    async fn tell_prepared(&self, bytes: u64, link: &Link) -> bool {
        // Before it is told, for an answer may not come in time and the log use it all the same.
        self.space.take(bytes, 0);
        let told = link.ask("growing a log", COMMAND_TIME_MAX, |answer| {
            Command::LogPrepared(self.number, bytes, answer)
        });
        tracing::debug!("the write log of volume {} has {bytes} bytes", self.name);
        // A volume that was closed meanwhile finds it at its next opening; one whose shard is busy learns of it later.
        let knows = told.await.is_ok() && self.space.untold().is_none();
        if !knows {
            self.space.leave_alone(FAILURE_PAUSE);
        }
        knows
    }

    /// Have it use no more than so many bytes. Returns whether it does so from now on.
    async fn gives_back(&self, bytes: u64, link: &Link) -> bool {
        for _ in 0..ASKS_MAX {
            let asked = link.ask("giving back", COMMAND_TIME_MAX, |answer| {
                Command::GiveBackLog(self.number, bytes, answer)
            });
            match asked.await {
                Ok(GivenBack::Yes) => return true,
                Ok(GivenBack::Soon) => tokio::time::sleep(WATCH_PERIOD).await,
                Ok(GivenBack::No) | Err(_) => return false,
            }
        }
        false
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| error.to_string())
}
