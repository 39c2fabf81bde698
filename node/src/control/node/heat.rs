//! Heat maps of volumes: made for whoever asks, and taken for warm-ups.

use std::time::Duration;

use hdcs_core::heat::{HEAT_BYTES_MAX, HeatMap, Plan};

use super::{COMMAND_TIME_MAX, Node, at_volume, failed, invalid};
use crate::catalogue::Entry;
use crate::control::api::{ApiError, ErrorKind, WarmedFrom};
use crate::control::link::{ask, report};
use crate::frontends::VolumeNumber;
use crate::shard::command::Command;

/// Looking at all of the largest cache, a step at a time, and maps that others make meanwhile.
const GATHER_TIME_MAX: Duration = Duration::from_mins(10);

/// Run something that takes a while on another thread.
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

/// The map in these bytes.
fn parsed(name: &str, bytes: &[u8]) -> Result<HeatMap, ApiError> {
    HeatMap::parse(bytes).map_err(|error| {
        invalid(format!(
            "volume {name}: this is no heat map, or it is damaged: {error}: nothing is warmed up; make one with \
             `hdcs volume heat {name} --save FILE`"
        ))
    })
}

impl Node {
    /// The heat map of a volume, as a file has it.
    pub async fn heat(&self, name: &str) -> Result<Vec<u8>, ApiError> {
        let entry = self.entry(name)?;
        let gathered = self.gather_heat(&entry).await;
        gathered.map_err(|error| at_volume(name, error))
    }

    async fn gather_heat(&self, entry: &Entry) -> Result<Vec<u8>, ApiError> {
        let number = VolumeNumber(entry.number);
        let gathering = ask(
            &*self.path,
            "gathering its heat map",
            GATHER_TIME_MAX,
            |answer| Command::Heat(number, answer),
        );
        let gathering = gathering.await?;
        beside(move || gathering.finish().encode()).await
    }

    /// Warm a volume up as a heat map says, the hottest ranges first.
    pub async fn warm_from(&self, name: &str, encoded: &[u8]) -> Result<WarmedFrom, ApiError> {
        let entry = self.entry(name)?;
        if encoded.len() > HEAT_BYTES_MAX {
            return Err(invalid(format!(
                "volume {name}: this is no heat map: none is larger than {HEAT_BYTES_MAX} bytes"
            )));
        }
        let map = parsed(name, encoded)?;
        let map_bytes = map.bytes();
        let plan = self.warm_like(&entry, map, false).await;
        let plan = plan.map_err(|error| at_volume(name, error))?;
        Ok(WarmedFrom {
            volume: self.volume(name).await?,
            map_volume_bytes: map_bytes,
            warm_bytes: plan.bytes,
            beyond_bytes: plan.beyond_bytes,
            over_bytes: plan.over_bytes,
        })
    }

    /// Hand what a map says to the shard; what that is.
    async fn warm_like(
        &self,
        entry: &Entry,
        map: HeatMap,
        if_cold: bool,
    ) -> Result<Plan, ApiError> {
        let room_bytes = report(&*self.path).await?.cache_room_bytes;
        if room_bytes == 0 {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                "this node has no read cache to warm up: set cache_total_size_mib or memory_max_mib and restart \
                 the daemon",
            ));
        }
        let (volume, volume_bytes) = (VolumeNumber(entry.number), entry.bytes);
        let mut plan = beside(move || map.plan(volume_bytes, room_bytes)).await?;
        let ranges = std::mem::take(&mut plan.ranges);
        ask(&*self.path, "warming it up", COMMAND_TIME_MAX, |answer| {
            Command::WarmUpLike {
                volume,
                ranges,
                if_cold,
                answer,
            }
        })
        .await?;
        Ok(plan)
    }
}
