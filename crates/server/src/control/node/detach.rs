//! Detaching a volume: the node forgets it, and leaves its backend, its log and its record alone.
//!
//! Its directory moves to `DIR/detached/`. It has a new number there: moved back before a restart, it
//! is a volume again, and finds nothing in the read cache that its backend may have outlived. One with copies on other
//! nodes has none there: they let go of theirs by themselves.

use hdcs_api::{ApiError, DetachOptions, Detached, ErrorKind};
use hdcs_core::volume::Phase;
use hdcs_frontend::VolumeNumber;
use uuid::Uuid;

use super::delete::{Leaving, forget_cached};
use super::groups::NotRemoved;
use super::open::NotOpen;
use super::places::dirty_of_unopened;
use super::replicas::{close_copy, refuse_copy};
use super::{MOVE_TIME_MAX, Node, at_volume, beside, failed, find, lost, parse_name};
use crate::catalogue::{self, Entry, Found};
use crate::data_dir::dirty::Left;
use crate::shard::command::Command;

impl Node {
    /// Detach a volume.
    pub async fn detach(&self, name: &str, options: DetachOptions) -> Result<Detached, ApiError> {
        refuse_copy(self, name, "detach").await?;
        let _busy = self
            .begin_leaving(name, "detached", options.discard_dirty)
            .await?;
        let slot = self.volumes.slot(name)?;
        let volume_name = parse_name(name)?;
        let is_rest = self.catalogue.is_half_removed(&volume_name).await?;
        if is_rest
            || slot
                .not_open
                .as_ref()
                .is_some_and(|not_open| not_open.given_up().is_some())
        {
            let why = "its deletion has begun: delete it again".to_owned();
            return Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why)));
        }
        let entry = match slot.found {
            Found::Entry(entry) => *entry,
            Found::Damaged(why) => {
                return Err(at_volume(name, ApiError::new(ErrorKind::Conflict, why)));
            }
        };
        let dirty_bytes_left = self.let_go(name, &entry, options).await?;
        let layout = self.setup.layout().clone();
        let number = self.catalogue.next_number(name).await?;
        if let Err(NotRemoved { error, .. }) = self.groups.remove(&entry, true).await {
            if error.kind == ErrorKind::Conflict {
                self.volumes.put(entry, Some(NotOpen::Copy));
                return Err(error);
            }
            let why = format!(
                "detaching it did not end: {}: detach it again",
                error.message
            );
            let what = Leaving::Stays;
            (self.volumes).put(entry, Some(NotOpen::Leaving { why, what }));
            return Err(error);
        }
        close_copy(self, &entry).await;
        let renumbered = Entry {
            number,
            is_replicated: false,
            ..entry.clone()
        };
        let target = layout.detached().join(format!("{name}-{}", Uuid::new_v4()));
        let (at, new, to) = (layout.clone(), renumbered.clone(), target.clone());
        let moved = beside(move || {
            catalogue::update(&at, &new).and_then(|()| catalogue::detach(&at, &volume_name, &to))
        });
        let moved = moved
            .await
            .and_then(|moved| moved.map_err(|error| failed(error.to_string())));
        if let Err(error) = moved {
            let why = format!("detaching it did not end: {error}: detach it again");
            let not_open = NotOpen::Leaving {
                why: why.clone(),
                what: Leaving::Stays,
            };
            let is_replicated = entry.is_replicated;
            let left = Entry {
                is_replicated,
                ..renumbered
            };
            self.volumes.put(left, Some(not_open));
            return Err(failed(format!("volume {name}: {why}")));
        }
        self.volumes.remove(name);
        self.groups.gone(&entry).await;
        super::delete::settle(entry.backend_url(&layout)).await;
        self.volumes.explain(name, None);
        self.share_memory().await;
        tracing::info!(
            "volume {name} was detached, {dirty_bytes_left} dirty bytes left in its log"
        );
        let inside = |path: std::path::PathBuf| path.display().to_string();
        Ok(Detached {
            name: name.to_owned(),
            dirty_bytes_left,
            log: inside(target.join(&entry.log.path)),
            backend: entry
                .backend
                .unwrap_or_else(|| hdcs_backend::url::file_url(&target.join(catalogue::DATA_FILE))),
            directory: inside(target),
        })
    }

    /// Close a volume that the node will forget; how many dirty bytes at most stay in its log.
    async fn let_go(
        &self,
        name: &str,
        entry: &Entry,
        options: DetachOptions,
    ) -> Result<u64, ApiError> {
        let number = VolumeNumber(entry.number);
        let report = self.link.report().await?;
        let Some(volume) = find(&report, number).filter(|v| v.phase == Phase::Open) else {
            let dirty = dirty_of_unopened(name, entry, &self.catalogue, &self.memories).await?;
            if !options.discard_dirty && !dirty.is_none() {
                return Err(ApiError::new(
                    ErrorKind::Conflict,
                    format!(
                        "volume {name}: it is not open, and detaching it would leave {dirty} behind that \
                         the backend does not have: put it right and open it, or leave that behind with \
                         --discard-dirty"
                    ),
                ));
            }
            forget_cached(entry, &self.link).await;
            return Ok(dirty.bytes_max);
        };
        let dirty = volume.stats.dirty_bytes;
        if let Some(lost) = lost(volume).filter(|_| !options.discard_dirty) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: {lost}, which its backend does not say: write over them first, or leave the \
                     backend as it is with --discard-dirty"
                ),
            ));
        }
        if !options.discard_dirty {
            self.flushes.run(name, number).await.map_err(|error| {
                ApiError::new(
                    ErrorKind::Conflict,
                    format!("{error}, or leave {dirty} dirty bytes behind with --discard-dirty"),
                )
            })?;
        }
        let left: Option<Left> = self
            .link
            .command(name, "closing it", MOVE_TIME_MAX, |answer| Command::Close {
                volume: number,
                destage: !options.discard_dirty,
                answer,
            })
            .await?;
        self.records.closed(entry.number, left).await;
        self.scrubs.forget(entry.number);
        self.heats.forget(entry.number).await;
        forget_cached(entry, &self.link).await;
        Ok(left.map_or(dirty, |left| left.all.dirty_bytes))
    }
}
