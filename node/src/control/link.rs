//! The control plane's view of the data path: commands go in, answers come back.

use std::time::Duration;

use tokio::sync::oneshot;

use super::api::{ApiError, ErrorKind};
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
        "the node is stopping: data path: try again when it runs",
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

/// Ask for a report.
pub async fn report(path: &dyn DataPath) -> Result<Box<ShardReport>, ApiError> {
    let (answer, answered) = oneshot::channel();
    if !path.send(Command::Report(answer)) {
        return Err(gone());
    }
    match tokio::time::timeout(REPORT_TIME_MAX, answered).await {
        Ok(Ok(report)) => Ok(report),
        Ok(Err(_)) => Err(gone()),
        Err(_) => Err(ApiError::new(
            ErrorKind::Timeout,
            format!(
                "the data path has not answered for {} s: it may be waiting for a device; see the log",
                REPORT_TIME_MAX.as_secs()
            ),
        )),
    }
}
