//! Deleting a volume. Dirty data is lost only if `discard_dirty` says so, and the answer says how
//! much it was.

use hdcs_core::volume::Phase;
use uuid::Uuid;

use super::create::is_block_device;
use super::{COMMAND_TIME_MAX, MOVE_TIME_MAX, Node, at_volume, failed, find, lock, parse_name};
use crate::catalogue::{self, Entry, Found};
use crate::control::api::{ApiError, DeleteOptions, Deleted, ErrorKind};
use crate::control::link::{ask, report};
use crate::frontends::VolumeNumber;
use crate::inspect;
use crate::shard::command::Command;

impl Node {
    /// Delete a volume.
    pub async fn delete(&self, name: &str, options: DeleteOptions) -> Result<Deleted, ApiError> {
        let _busy = self.begin(name, "deleted")?;
        let slot = self.slot(name)?;
        let volume_name = parse_name(name)?;
        let discarded = match &slot.found {
            Found::Entry(entry) => self.close_for_good(name, entry, &options).await?,
            Found::Damaged(why) if options.discard_dirty => {
                tracing::warn!("volume {name} is deleted although {why}");
                0
            }
            Found::Damaged(why) => {
                return Err(ApiError::new(
                    ErrorKind::Conflict,
                    format!(
                        "volume {name}: how much dirty data it has is unknown ({why}): to lose all of it, \
                         say --discard-dirty"
                    ),
                ));
            }
        };
        let layout = self.layout();
        let has_own_data = catalogue::directory(&layout, &volume_name)
            .join(catalogue::DATA_FILE)
            .exists();
        let keep = (options.keep_data && has_own_data)
            .then(|| layout.kept().join(format!("{name}-{}.img", Uuid::new_v4())));
        let users = match &slot.found {
            Found::Entry(entry) => entry.backend.clone(),
            Found::Damaged(_) => None,
        };
        if let Err(error) = catalogue::remove(&layout, &volume_name, keep.as_deref()) {
            let why = format!("deleting it did not end: {error}: delete it again");
            if let Some(slot) = lock(&self.slots).get_mut(name) {
                slot.open_error = Some(why.clone());
            }
            return Err(failed(format!("volume {name}: {why}")));
        }
        lock(&self.slots).remove(name);
        self.share_memory().await;
        tracing::info!("volume {name} was deleted, {discarded} dirty bytes discarded");
        Ok(Deleted {
            name: name.to_owned(),
            discarded_dirty_bytes: discarded,
            data: keep.as_deref().map(catalogue::file_url).or(users),
        })
    }

    /// Close a volume that will be deleted; returns the dirty bytes that this loses.
    async fn close_for_good(
        &self,
        name: &str,
        entry: &Entry,
        options: &DeleteOptions,
    ) -> Result<u64, ApiError> {
        let number = VolumeNumber(entry.number);
        let report = report(&*self.path).await?;
        let Some(volume) = find(&report, number).filter(|v| v.phase == Phase::Open) else {
            return self.give_up_unopened(name, entry, options).await;
        };
        let dirty = volume.stats.dirty_bytes;
        if !options.discard_dirty && dirty > 0 {
            self.destage(name, number).await.map_err(|error| {
                ApiError::new(
                    ErrorKind::Conflict,
                    format!("{error}, or lose {dirty} dirty bytes with --discard-dirty"),
                )
            })?;
        }
        let destage = !options.discard_dirty;
        ask(&*self.path, "closing it", MOVE_TIME_MAX, |answer| {
            Command::Close {
                volume: number,
                destage,
                answer,
            }
        })
        .await
        .map_err(|error| at_volume(name, error))?;
        self.forget(entry).await;
        Ok(if options.discard_dirty { dirty } else { 0 })
    }

    /// The same for a volume that could not be opened: what it holds is read from its log.
    async fn give_up_unopened(
        &self,
        name: &str,
        entry: &Entry,
        options: &DeleteOptions,
    ) -> Result<u64, ApiError> {
        let (path, uuid) = (entry.log_path(&self.layout()), entry.uuid);
        let inspected = tokio::task::spawn_blocking(move || inspect::dirty_bytes(&path, uuid))
            .await
            .map_err(|error| failed(format!("volume {name}: {error}")))?;
        let (lost, how_much) = match inspected {
            Some(bytes) => (bytes, format!("{bytes} dirty bytes")),
            None => (0, "an unknown amount of dirty data".to_owned()),
        };
        if !options.discard_dirty && inspected != Some(0) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: it is not open and its write log holds {how_much} that the backend \
                     does not have: put it right and restart the daemon, or lose that with --discard-dirty"
                ),
            ));
        }
        let number = VolumeNumber(entry.number);
        let closed = ask(&*self.path, "closing it", COMMAND_TIME_MAX, |answer| {
            Command::Close {
                volume: number,
                destage: false,
                answer,
            }
        });
        if let Err(error) = closed.await {
            tracing::debug!("volume {name} was not open: {error}");
        }
        self.forget(entry).await;
        Ok(lost)
    }

    /// Drop what the read cache and the log device still hold of a closed volume.
    pub(super) async fn forget(&self, entry: &Entry) {
        let number = VolumeNumber(entry.number);
        let forgotten = ask(&*self.path, "forgetting it", COMMAND_TIME_MAX, |answer| {
            Command::Forget(number, answer)
        });
        if let Err(error) = forgotten.await {
            // Its number is never used again, so what stays is only memory that ages out.
            tracing::warn!("volume {}: {error}", entry.name);
        }
        let log = entry.log_path(&self.layout());
        if is_block_device(&log)
            && let Err(error) = inspect::wipe_log_device(&log)
        {
            tracing::warn!(
                "volume {}: {}: {error}: wipe it with `wipefs` before using it again",
                entry.name,
                log.display()
            );
        }
    }
}
