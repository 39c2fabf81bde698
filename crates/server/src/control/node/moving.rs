//! Moving a volume to another thread of the data path, while its clients go on.
//!
//! ```text
//!  open on one shard ─ Depart ─► held ─► closed there ─ Open ─► open on the other ─ Follow ─► its clients go on there
//!        ▲                        │           └─ Follow, after an opening that failed ─► its clients are ended
//!        └─ requests do not end ──┘
//! ```
//!
//! Invariants:
//! 1. Between the two shards the volume is one that is being opened, and opening it fails as at any time: it is tried again
//!    if that may help, and its clients reconnect.
//! 2. Its memory stays reserved meanwhile: it is neither reserved again beside that, nor given to another volume.
//! 3. Whoever waits for it, on whatever shard, is told in any case where it is.
//! 4. Where somebody has put a volume is recorded, and it is opened there as long as there is such a shard.

use std::sync::Arc;
use std::time::Instant;

use hdcs_api::{ApiError, ErrorKind};
use hdcs_backend::memory::VolumeMemory;
use hdcs_core::base::io::Nanos;
use hdcs_frontend::{OpeningId, VolumeNumber};
use tokio::sync::oneshot;

use super::open::NotOpen;
use super::{COMMAND_TIME_MAX, Node, WATCH_PERIOD, at_volume, failed, invalid};
use crate::catalogue::Entry;
use crate::control::link::DataPath;
use crate::shard::command::Command;

/// How long the requests of clients may take before a volume moves.
const PATIENCE: Nanos = Nanos::from_millis(10_000);

/// Where a volume is to be opened.
#[derive(Clone, Debug, Default)]
pub(super) struct Destination {
    /// On this shard, if somebody has said so.
    pub shard: Option<usize>,
    /// The opening that goes on there, if it comes from another shard.
    pub continues: Option<OpeningId>,
    /// What is reserved for it, which comes from there as well.
    pub memory: Option<Arc<VolumeMemory>>,
}

impl Node {
    /// Whether the data path has a shard of this number.
    pub(super) fn check_shard(&self, name: &str, shard: usize) -> Result<(), ApiError> {
        let count = self.link.path().shards();
        if shard < count {
            return Ok(());
        }
        let which = if count == 1 {
            "has only shard 0: see `shards` in the configuration".to_owned()
        } else {
            format!("has shards 0 to {}", count - 1)
        };
        Err(invalid(format!(
            "volume {name}: there is no shard {shard}: the data path {which}"
        )))
    }

    /// Move an open volume to another shard. Whoever calls it has begun an operation on the volume.
    pub(super) async fn move_to(&self, entry: &Entry, shard: usize) -> Result<(), ApiError> {
        let name = entry.name.as_str();
        self.check_shard(name, shard)?;
        let number = VolumeNumber(entry.number);
        let Some(from) = self.link.path().shard_of(number) else {
            return Err(at_volume(name, failed("it is not open")));
        };
        if from == shard {
            return Ok(());
        }
        let why = format!("it is being moved to shard {shard}");
        self.volumes.explain(name, Some(why));
        let (answer, answered) = oneshot::channel();
        let sent = self.link.send(Command::Depart {
            volume: number,
            patience: PATIENCE,
            answer,
        });
        // However long it takes: it either stays soon, or closes.
        let departed = match answered.await {
            Ok(departed) if sent => departed,
            _ => {
                self.volumes.explain(name, None);
                let why = "the data path did not take it: try again";
                return Err(at_volume(name, ApiError::new(ErrorKind::Unavailable, why)));
            }
        };
        let departed = departed.map_err(|why| {
            self.volumes.explain(name, None);
            let why = format!("it is not moved: {why}");
            at_volume(name, ApiError::new(ErrorKind::Conflict, why))
        })?;
        let since = Instant::now();
        self.volumes
            .put(entry.clone(), Some(NotOpen::Opening { since }));
        self.records.closed(entry.number, departed.left).await;
        let destination = Destination {
            shard: Some(shard),
            continues: Some(departed.opening),
            memory: departed.memory,
        };
        let volumes = self.volumes.entries().len();
        let opened = self.open_at(entry, volumes, destination).await;
        self.say_follow(number).await;
        opened.map_err(|failure| self.volumes.refusal(name, &failure))?;
        if self.link.path().shard_of(number) != Some(shard) {
            let why = "it is not moved: a device had not let go of it, so it was opened where it had been";
            return Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why)));
        }
        tracing::info!(
            "volume {name} was moved from shard {from} to shard {shard} in {} ms",
            since.elapsed().as_millis()
        );
        Ok(())
    }

    /// Have the connections that wait for a volume, on whatever shard, go where that is.
    async fn say_follow(&self, number: VolumeNumber) {
        let shards = 0..self.link.path().shards();
        let told: Vec<_> = shards
            .map(|shard| tokio::spawn(say_follow_to(self.link.shared_path(), shard, number)))
            .collect();
        // Until then the volume does not move on, so that they find it. A shard that is stuck hears of it later.
        let all = async {
            for one in told {
                let _ = one.await;
            }
        };
        let _ = tokio::time::timeout(COMMAND_TIME_MAX, all).await;
    }
}

/// Tell one shard, however long it is busy: connections there wait for it. One that has ended has ended them.
async fn say_follow_to(path: Arc<dyn DataPath>, shard: usize, number: VolumeNumber) {
    while !path.is_stopping() {
        let (answer, answered) = oneshot::channel();
        if path.send_to(shard, Command::Follow(number, answer)) {
            let _ = answered.await;
            return;
        }
        tokio::time::sleep(WATCH_PERIOD).await;
    }
}
