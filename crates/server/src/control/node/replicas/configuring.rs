//! A group that becomes another one: the copy of the node that serves asks for the records, one after the other.

use std::time::{Duration, Instant};

use hdcs_api::{ApiError, ErrorKind};
use hdcs_core::replication::record::{GroupRecord, Shape};

use super::Replicas;
use crate::cluster::spec::VolumeSpecFile;
use crate::control::node::{COMMAND_TIME_MAX, WATCH_PERIOD, beside, failed};
use crate::shard::command::Command;

/// How long a change is waited for. A member that does not answer leaves long before.
const CHANGE_TIME_MAX: Duration = Duration::from_secs(60);

impl Replicas {
    /// Have the group become this, and wait until its record says so.
    pub(super) async fn configure(
        &self,
        spec: &VolumeSpecFile,
        before: &GroupRecord,
        shape: Shape,
    ) -> Result<(), ApiError> {
        let (name, volume) = (&spec.name, spec.uuid);
        let asked = Box::new(shape.clone());
        let begun = self.0.link.command(
            name.as_str(),
            "changing its group",
            COMMAND_TIME_MAX,
            |answer| Command::Configure(volume, asked, answer),
        );
        begun.await?;
        let until = Instant::now() + CHANGE_TIME_MAX;
        loop {
            let store = self.0.store.clone();
            let read = beside(move || store.read(volume)).await?;
            let record = read.map_err(|error| failed(format!("volume {name}: {error}")))?;
            let is_ours = |record: &GroupRecord| record.epoch == before.epoch;
            let Some(record) = record.filter(is_ours) else {
                let why = format!(
                    "volume {name}: another node has taken its group over, or it is deleted, and the change may be there \
                     in part: see `hdcs group show {name}`, and ask the node that serves"
                );
                return Err(ApiError::new(ErrorKind::Conflict, why));
            };
            if record.toward(&shape).is_none() {
                return Ok(());
            }
            if Instant::now() > until {
                let why = format!(
                    "volume {name}: its group is not changed after {} s, and goes on with that: members that stay have to \
                     have what was acknowledged first; see `hdcs group show {name}`",
                    CHANGE_TIME_MAX.as_secs()
                );
                return Err(ApiError::new(ErrorKind::Timeout, why));
            }
            tokio::time::sleep(WATCH_PERIOD).await;
        }
    }
}
