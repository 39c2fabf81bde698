//! The control plane's view of the data path: commands go in, answers come back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use hdcs_api::{ApiError, ErrorKind};
use hdcs_frontend::VolumeNumber;
use tokio::sync::{Mutex, oneshot};
use tokio::time::{Instant, timeout_at};

use super::node_report::NodeReport;
use crate::shard::command::{Answer, ClosedReport, Command, ShardReport};

/// How long a report may take: a shard answers between two batches.
const REPORT_TIME_MAX: Duration = Duration::from_secs(10);

/// What the control plane needs of the data path.
pub trait DataPath: Send + Sync {
    /// Hand a command to whom it concerns; false if it was not taken, since a shard has ended.
    fn send(&self, command: Command) -> bool;
    /// How many shards there are.
    fn shards(&self) -> usize;
    /// Hand a command to one of them.
    fn send_to(&self, shard: usize, command: Command) -> bool;
    /// Whether any shard was told to stop.
    fn is_stopping(&self) -> bool;
    /// Where a volume is that is open, opens or closes.
    fn shard_of(&self, volume: VolumeNumber) -> Option<usize>;
    /// What a shard has reported: what its thread has had of its processor since the start, and its connections.
    fn note(&self, shard: usize, cpu: Duration, connections: usize);
}

fn gone() -> ApiError {
    ApiError::new(
        ErrorKind::Unavailable,
        "the node is stopping: try again when it runs",
    )
}

fn failed(what: &str, why: &str) -> ApiError {
    ApiError::new(ErrorKind::Failed, format!("{what} failed: {why}"))
}

fn not_ended(what: &str, time_max: Duration) -> ApiError {
    ApiError::new(
        ErrorKind::Timeout,
        format!(
            "{what} has not ended after {} s: it goes on; see `hdcs volume show`",
            time_max.as_secs()
        ),
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
        Ok(Ok(Err(why))) => Err(failed(what, &why)),
        Ok(Err(_)) => Err(gone()),
        Err(_) => Err(not_ended(what, time_max)),
    }
}

/// Reports of the data path. There may be any number of volumes, and any number of clients that want to know of them:
/// at most one report is asked for at a time, and whoever waits for its turn in the meantime shares the next one.
#[derive(Debug, Default)]
pub struct Reports {
    /// How many were asked for.
    asked: AtomicU64,
    /// The last one that is whole, if somebody still looks at it, and its number.
    last: Mutex<(u64, Weak<NodeReport>)>,
}

impl Reports {
    /// One that is not older than this call, of the shards that answer within so long; `None` if none of them does.
    pub async fn fresh_within(
        &self,
        path: &dyn DataPath,
        time_max: Duration,
    ) -> Result<Option<Arc<NodeReport>>, ApiError> {
        let deadline = Instant::now() + time_max;
        let before = self.asked.load(Ordering::Relaxed);
        let Ok(mut last) = timeout_at(deadline, self.last.lock()).await else {
            // Whoever waits before has waited for a shard that hangs.
            return Ok(None);
        };
        if last.0 > before
            && let Some(report) = last.1.upgrade()
        {
            return Ok(Some(report));
        }
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let asked = std::time::Instant::now();
        let reports = gather(path, deadline).await?;
        let Some(report) = NodeReport::of(asked, reports) else {
            return Ok(None);
        };
        for part in &report.shards {
            let thread = part.counts.thread;
            path.note(part.number, thread.user + thread.system, part.connections);
        }
        let report = Arc::new(report);
        if report.silent.is_empty() {
            *last = (number, Arc::downgrade(&report));
        }
        Ok(Some(report))
    }
}

/// What each shard says of itself, at the same time; `None` of one that does not say it in time.
async fn gather(
    path: &dyn DataPath,
    deadline: Instant,
) -> Result<Vec<Option<ShardReport>>, ApiError> {
    let mut answers = Vec::new();
    for shard in 0..path.shards() {
        let (answer, answered) = oneshot::channel();
        if !path.send_to(shard, Command::Report(answer)) {
            return Err(gone());
        }
        answers.push(answered);
    }
    let mut reports = Vec::new();
    for answered in answers {
        // One that has come is taken however late it is.
        reports.push(match timeout_at(deadline, answered).await {
            Ok(report) => Some(*report.map_err(|_| gone())?),
            Err(_) => None,
        });
    }
    Ok(reports)
}

/// How far a shard has come that was told to stop.
#[derive(Debug, Default)]
struct Stopping {
    /// Its answers to all that have asked it to, the last one at the end; all of them are the same.
    answers: Vec<oneshot::Receiver<Result<Vec<ClosedReport>, String>>>,
    closed: Option<Result<Vec<ClosedReport>, String>>,
}

impl Stopping {
    /// Wait for the end; an error if the shard has ended without a word.
    async fn ended(&mut self) -> Result<(), ApiError> {
        while self.closed.is_none() {
            let Some(answered) = self.answers.last_mut() else {
                return Err(gone());
            };
            match answered.await {
                Ok(closed) => self.closed = Some(closed),
                // It had ended when it was asked for the last time.
                Err(_) => drop(self.answers.pop()),
            }
        }
        Ok(())
    }
}

/// The data path as the control plane asks it.
pub struct Link {
    path: Arc<dyn DataPath>,
    reports: Reports,
    /// By the numbers of shards.
    stopping: Mutex<Vec<Stopping>>,
}

impl Link {
    /// A link over running shards.
    pub fn new(path: Arc<dyn DataPath>) -> Self {
        Self {
            path,
            reports: Reports::default(),
            stopping: Mutex::default(),
        }
    }

    /// The data path itself.
    pub fn path(&self) -> &dyn DataPath {
        &*self.path
    }

    /// The same for a task that outlives the caller.
    pub fn shared_path(&self) -> &Arc<dyn DataPath> {
        &self.path
    }

    /// Hand a command to whom it concerns; false if the shard has ended.
    pub fn send(&self, command: Command) -> bool {
        self.path.send(command)
    }

    /// What the data path says of itself and its volumes now.
    pub async fn report(&self) -> Result<Arc<NodeReport>, ApiError> {
        let report = self.reports.fresh_within(&*self.path, REPORT_TIME_MAX);
        let report = report.await?;
        let whole = report.filter(|report| report.silent.is_empty());
        whole.ok_or_else(|| {
            ApiError::new(
                ErrorKind::Timeout,
                format!(
                    "the data path has not answered for {} s: it may be waiting for a device; see the log",
                    REPORT_TIME_MAX.as_secs()
                ),
            )
        })
    }

    /// The same of those shards that say it within so long; `None` if none does.
    pub async fn look_within(
        &self,
        time_max: Duration,
    ) -> Result<Option<Arc<NodeReport>>, ApiError> {
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

    /// Send a command to each shard and wait for all answers, at most `time_max`.
    pub async fn ask_each<T>(
        &self,
        what: &str,
        time_max: Duration,
        make: impl Fn(Answer<T>) -> Command,
    ) -> Result<Vec<T>, ApiError> {
        let deadline = Instant::now() + time_max;
        let mut answers = Vec::new();
        for shard in 0..self.path.shards() {
            let (answer, answered) = oneshot::channel();
            if !self.path.send_to(shard, make(answer)) {
                return Err(gone());
            }
            answers.push(answered);
        }
        let mut values = Vec::new();
        for answered in answers {
            match timeout_at(deadline, answered).await {
                Ok(Ok(Ok(value))) => values.push(value),
                Ok(Ok(Err(why))) => return Err(failed(what, &why)),
                Ok(Err(_)) => return Err(gone()),
                Err(_) => return Err(not_ended(what, time_max)),
            }
        }
        Ok(values)
    }

    /// Have all shards stop, and wait until they have: what they have closed, and why others did not close. May be asked
    /// again by whoever settles for less, and waits for those that have not ended.
    pub async fn stop(&self, destage: bool) -> Result<(Vec<ClosedReport>, Vec<String>), ApiError> {
        let mut stopping = self.stopping.lock().await;
        stopping.resize_with(self.path.shards(), Stopping::default);
        for (shard, one) in stopping.iter_mut().enumerate() {
            let (answer, answered) = oneshot::channel();
            if one.closed.is_none() && self.path.send_to(shard, Command::Stop { destage, answer }) {
                one.answers.push(answered);
            }
        }
        let (mut closed, mut hung) = (Vec::new(), Vec::new());
        for one in stopping.iter_mut() {
            one.ended().await?;
            match &one.closed {
                Some(Ok(volumes)) => closed.extend_from_slice(volumes),
                Some(Err(why)) => hung.push(why.clone()),
                None => unreachable!("it has ended"),
            }
        }
        Ok((closed, hung))
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
