//! The control plane's view of the data path: commands go in, answers come back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hdcs_api::{ApiError, ErrorKind};
use tokio::sync::{Mutex, oneshot};

use crate::shard::command::{Answer, Command, ShardReport};

/// How long a report may take: the shard answers between two batches.
const REPORT_TIME_MAX: Duration = Duration::from_secs(10);

/// What the control plane needs of the data path.
pub trait DataPath: Send + Sync {
    /// Hand a command to the shard; false if the shard has ended.
    fn send(&self, command: Command) -> bool;
}

fn gone() -> ApiError {
    ApiError::new(
        ErrorKind::Unavailable,
        "the node is stopping: try again when it runs",
    )
}

/// Send a command and wait for its answer, at most `time_max`.
pub async fn ask<T>(
    path: &dyn DataPath,
    what: &str,
    time_max: Duration,
    make: impl FnOnce(Answer<T>) -> Command,
) -> Result<T, ApiError> {
    let (answer, answered) = oneshot::channel();
    if !path.send(make(answer)) {
        return Err(gone());
    }
    match tokio::time::timeout(time_max, answered).await {
        Ok(Ok(Ok(value))) => Ok(value),
        Ok(Ok(Err(why))) => Err(ApiError::new(
            ErrorKind::Failed,
            format!("{what} failed: {why}"),
        )),
        Ok(Err(_)) => Err(gone()),
        Err(_) => Err(ApiError::new(
            ErrorKind::Timeout,
            format!(
                "{what} has not ended after {} s: it goes on; see `hdcs volume show`",
                time_max.as_secs()
            ),
        )),
    }
}

/// Reports of the data path. There may be any number of volumes, and any number of clients that want to know of them:
/// at most one report is asked for at a time, and whoever waits for its turn in the meantime shares the next one.
#[derive(Debug, Default)]
pub struct Reports {
    /// How many were asked for.
    asked: AtomicU64,
    /// The last one, if somebody still looks at it, and its number.
    last: Mutex<(u64, Weak<ShardReport>)>,
}

impl Reports {
    /// One that is not older than this call.
    pub async fn fresh(&self, path: &dyn DataPath) -> Result<Arc<ShardReport>, ApiError> {
        self.fresh_within(path, REPORT_TIME_MAX).await
    }

    /// The same, for so long.
    pub async fn fresh_within(
        &self,
        path: &dyn DataPath,
        time_max: Duration,
    ) -> Result<Arc<ShardReport>, ApiError> {
        match tokio::time::timeout(time_max, self.next(path)).await {
            Ok(report) => report,
            Err(_) => Err(ApiError::new(
                ErrorKind::Timeout,
                format!(
                    "the data path has not answered for {} s: it may be waiting for a device; see the log",
                    time_max.as_secs()
                ),
            )),
        }
    }

    async fn next(&self, path: &dyn DataPath) -> Result<Arc<ShardReport>, ApiError> {
        let before = self.asked.load(Ordering::Relaxed);
        let mut last = self.last.lock().await;
        if last.0 > before
            && let Some(report) = last.1.upgrade()
        {
            return Ok(report);
        }
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let (answer, answered) = oneshot::channel();
        if !path.send(Command::Report(answer)) {
            return Err(gone());
        }
        let report: Arc<_> = answered.await.map_err(|_| gone())?.into();
        *last = (number, Arc::downgrade(&report));
        Ok(report)
    }
}

/// The data path as the control plane asks it.
pub struct Link {
    path: Arc<dyn DataPath>,
    reports: Reports,
}

impl Link {
    /// A link over a running shard.
    pub fn new(path: Arc<dyn DataPath>) -> Self {
        Self {
            path,
            reports: Reports::default(),
        }
    }

    /// The data path itself.
    pub fn path(&self) -> &dyn DataPath {
        &*self.path
    }

    /// Hand a command to the shard; false if the shard has ended.
    pub fn send(&self, command: Command) -> bool {
        self.path.send(command)
    }

    /// What the data path says of itself and its volumes now.
    pub async fn report(&self) -> Result<Arc<ShardReport>, ApiError> {
        self.reports.fresh(&*self.path).await
    }

    /// The same, for so long.
    pub async fn report_within(&self, time_max: Duration) -> Result<Arc<ShardReport>, ApiError> {
        self.reports.fresh_within(&*self.path, time_max).await
    }

    /// Send a command and wait for its answer, at most `time_max`.
    pub async fn ask<T>(
        &self,
        what: &str,
        time_max: Duration,
        make: impl FnOnce(Answer<T>) -> Command,
    ) -> Result<T, ApiError> {
        ask(&*self.path, what, time_max, make).await
    }

    /// Have the shard do something with a volume; what goes wrong names that.
    pub async fn command<T>(
        &self,
        name: &str,
        what: &str,
        time_max: Duration,
        make: impl FnOnce(Answer<T>) -> Command,
    ) -> Result<T, ApiError> {
        let done = self.ask(what, time_max, make).await;
        done.map_err(|error| at_volume(name, error))
    }
}

/// The same error, which names its volume.
pub fn at_volume(name: &str, error: ApiError) -> ApiError {
    ApiError::new(error.kind, format!("volume {name}: {error}"))
}
