//! What is done to a volume that goes on serving: settings, size, flush, cache, check.

use std::collections::BTreeMap;

use hdcs_api::value::Value;
use hdcs_api::{
    ApiError, CheckReport, ErrorKind, ResizeVolume, SetVolume, ShardChoice, Volume, VolumeRange,
};
use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_core::volume::LogFailure;
use hdcs_frontend::VolumeNumber;

use super::entries::Catalogue;
use super::groups::PAST_COPIES;
use super::home::check_resize;
use super::open::NotOpen;
use super::places::refuse_longer_image;
use super::replicas::refuse_with_copies;
use super::volumes::{MOVED, Volumes};
use super::{COMMAND_TIME_MAX, MOVE_TIME_MAX, Node, failed, find, invalid, pins};
use crate::catalogue::{Entry, Found, check_volume_bytes};
use crate::config::VolumeSettings;
use crate::control::link::Link;
use crate::control::node_report::NodeReport;
use crate::inspect;
use crate::shard::command::{Command, VolumeReport};

/// Whether what an interrupted shrink has cut off is still in a volume's log.
async fn holds_cut(number: VolumeNumber, link: &Link) -> Result<bool, ApiError> {
    let report = link.report().await?;
    Ok(find(&report, number).is_some_and(|volume| volume.holds_cut))
}

/// The size that a volume has now, and keeps, if it is open.
async fn bytes_of(number: VolumeNumber, link: &Link) -> Option<u64> {
    let report = link.report().await.ok()?;
    let volume = find(&report, number).filter(|volume| !volume.is_resizing);
    volume.map(|volume| volume.config.bytes)
}

/// Have a volume that is not open opened on a shard, or wherever there is least to do, once it is.
async fn set_shard_of_unopened(
    name: &str,
    shard: Option<usize>,
    not_open: NotOpen,
    volumes: &Volumes,
    catalogue: &Catalogue,
) -> Result<(), ApiError> {
    if matches!(not_open, NotOpen::Leaving { .. } | NotOpen::Stopping) {
        let why = format!("volume {name}: it is not open: {not_open}");
        return Err(ApiError::new(ErrorKind::Conflict, why));
    }
    let mut entry = volumes.known(name)?;
    entry.shard = shard;
    catalogue.update(&entry).await?;
    volumes.put(entry, Some(not_open));
    Ok(())
}

/// Have the catalogue say what size a volume has, and before that other nodes that may have to serve it.
async fn say_size(node: &Node, entry: &Entry) -> Result<(), ApiError> {
    node.groups.change(entry).await?;
    node.catalogue.update(entry).await
}

impl Node {
    /// Change settings of a volume.
    pub async fn set(&self, name: &str, request: SetVolume) -> Result<Volume, ApiError> {
        if let Some(value) = request.settings.get("shard") {
            let value = match value {
                None => "auto".to_owned(),
                Some(Value::Text(text)) => text.clone(),
                Some(value) => value.to_string(),
            };
            return Err(invalid(format!(
                "volume {name}: shard is no setting: use `--shard {value}`"
            )));
        }
        if request.shard.is_some() {
            refuse_with_copies(self, name, "where it is")?;
        }
        let what = match request.shard {
            Some(ShardChoice::On(_)) => MOVED,
            _ => "changed",
        };
        let _busy = self.volumes.begin(name, what)?;
        let slot = self.volumes.slot(name)?;
        let shard = match request.shard {
            Some(ShardChoice::On(shard)) => Some(self.check_shard(name, shard)?),
            _ => None,
        };
        if let Some(not_open) = slot.not_open
            && request.shard.is_some()
            && request.settings.is_empty()
        {
            let volumes = &self.volumes;
            set_shard_of_unopened(name, shard, not_open, volumes, &self.catalogue).await?;
            return self.volume(name).await;
        }
        let mut entry = self.volumes.entry(name)?;
        if !request.settings.is_empty() {
            self.set_settings(name, &mut entry, request.settings)
                .await?;
        }
        if request.shard.is_some() {
            if let Some(shard) = shard {
                self.move_to(&entry, shard).await?;
                // The opening there may have recorded something of it.
                entry = self.volumes.entry(name)?;
            }
            if entry.shard != shard {
                entry.shard = shard;
                self.catalogue.update(&entry).await?;
                self.volumes.put(entry, None);
            }
        }
        self.volume(name).await
    }

    async fn set_settings(
        &self,
        name: &str,
        entry: &mut Entry,
        settings: BTreeMap<String, Option<Value>>,
    ) -> Result<(), ApiError> {
        for (key, value) in settings {
            if let Some(value) = value {
                entry.settings.insert(key, value);
            } else {
                VolumeSettings::check_key(&key)
                    .map_err(|error| invalid(format!("volume {name}: {error}")))?;
                entry.settings.remove(&key);
            }
        }
        let memory = self.memories.of(entry.number);
        let config = self
            .setup
            .core_config(entry, self.volumes.count(), memory.as_deref())
            .map_err(|error| invalid(format!("volume {name}: {error}")))?;
        let settings = self.setup.settings_of(&entry.settings)?;
        if entry.is_replicated && settings.log_failure == LogFailure::PassThrough {
            return Err(invalid(format!("volume {name}: {PAST_COPIES}")));
        }
        let qos = settings.qos();
        let number = VolumeNumber(entry.number);
        // Whoever takes over knows it before any client sees an effect of it.
        self.groups.change(entry).await?;
        self.catalogue.update(entry).await?;
        self.volumes.put(entry.clone(), None);
        self.link
            .ask("changing it", COMMAND_TIME_MAX, |answer| {
                Command::SetAllow(number, settings.allow, answer)
            })
            .await?;
        self.link
            .ask("changing it", COMMAND_TIME_MAX, |answer| {
                Command::Reconfigure(Box::new(config), answer)
            })
            .await?;
        self.link
            .ask("changing it", COMMAND_TIME_MAX, |answer| {
                Command::SetQos(number, qos, answer)
            })
            .await
    }

    /// Change the size of a volume.
    pub async fn resize(&self, name: &str, request: ResizeVolume) -> Result<Volume, ApiError> {
        check_volume_bytes(request.bytes)
            .map_err(|error| invalid(format!("volume {name}: {error}")))?;
        let _busy = self.volumes.begin(name, "resized")?;
        let mut entry = self.volumes.entry(name)?;
        if entry.is_read_only() {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: it is read-only and keeps its size, since its backend {} is a \
                     snapshot; a clone of that can be resized",
                    entry.backend_url(self.setup.layout())
                ),
            ));
        }
        check_resize(&entry, request.bytes, &self.memories)?;
        let old = entry.clone();
        let number = VolumeNumber(entry.number);
        let shrinks = request.bytes < entry.bytes;
        if shrinks && !request.shrink {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: {} bytes is less than its {}: what is beyond would be lost; say so \
                     with --shrink",
                    request.bytes, entry.bytes
                ),
            ));
        }
        if !request.shrink {
            refuse_longer_image(&entry, self.setup.layout()).await?;
        }
        entry.bytes = request.bytes;
        let resize = self
            .link
            .command(name, "resizing it", MOVE_TIME_MAX, |answer| {
                Command::Resize(number, request.bytes, answer)
            });
        if shrinks || holds_cut(number, &self.link).await? {
            self.flushes.run(name, number).await?;
        }
        if shrinks {
            entry.pins = pins::without(&entry.pins, entry.bytes, u64::MAX);
            if let Err(error) = say_size(self, &entry).await {
                // The smaller size may stand there all the same, if only making its name durable failed.
                say_size(self, &old).await?;
                return Err(error);
            }
            if let Err(error) = resize.await {
                if bytes_of(number, &self.link).await == Some(old.bytes) {
                    say_size(self, &old).await?;
                } else {
                    // The volume is that small, and its local store or its object volume may be so by now, or soon: a
                    // store commits a size that it has taken on, however long it was away. One that is not is larger
                    // than what the catalogue says, which every opening takes; one that is smaller is refused.
                    self.volumes.put(entry, None);
                }
                return Err(error);
            }
        } else {
            resize.await?;
            // Only then may clients write beyond the old end: an opening cuts off what the catalogue does not know of.
            say_size(self, &entry).await?;
            let grown = self
                .link
                .command(name, "growing it", COMMAND_TIME_MAX, |answer| {
                    Command::Grow(number, request.bytes, answer)
                });
            if let Err(error) = grown.await {
                // It has the size at the next opening.
                self.volumes.put(entry, None);
                return Err(error);
            }
        }
        let has_other_pins = entry.pins != old.pins;
        self.volumes.put(entry.clone(), None);
        if has_other_pins {
            pins::apply(&entry, &self.link).await?;
        }
        self.volume(name).await
    }

    /// Have the catalogue say what size the volumes have: a resize that took longer than anybody waits, or whose end
    /// could not be recorded, has left another one there. A local store that is larger than the catalogue says would be
    /// cut at the next opening, and any backend that is smaller would be refused.
    pub(super) async fn record_sizes(&self, report: &NodeReport) {
        for entry in self.volumes.entries() {
            let number = VolumeNumber(entry.number);
            let is_other = |volume: &VolumeReport| volume.config.bytes != entry.bytes;
            if !find(report, number).is_some_and(is_other) {
                continue;
            }
            // What the report said may have been before the end of a resize.
            let Ok(_busy) = self.volumes.begin(entry.name.as_str(), "resized") else {
                continue;
            };
            let (Ok(mut entry), Some(bytes)) = (
                self.volumes.entry(entry.name.as_str()),
                bytes_of(number, &self.link).await,
            ) else {
                continue;
            };
            if entry.bytes == bytes {
                continue;
            }
            entry.bytes = bytes;
            entry.pins = pins::without(&entry.pins, bytes, u64::MAX);
            match say_size(self, &entry).await {
                Ok(()) => self.volumes.put(entry, None),
                Err(error) => tracing::warn!(
                    "volume {}: its size of {bytes} bytes cannot be recorded: {error}",
                    entry.name
                ),
            }
        }
    }

    /// Begin to write everything dirty to the backend. Progress is in the counters.
    pub async fn flush(&self, name: &str) -> Result<Volume, ApiError> {
        self.volumes.refuse_while_moved(name)?;
        let number = VolumeNumber(self.volumes.entry(name)?.number);
        self.link
            .command(name, "flushing it", COMMAND_TIME_MAX, |answer| {
                Command::DestageAll(number, answer)
            })
            .await?;
        self.volume(name).await
    }

    /// Return to destaging by policy, and give up what is being copied for a snapshot or clone.
    pub async fn cancel_flush(&self, name: &str) -> Result<(), ApiError> {
        self.flushes.cancel(name).await
    }

    /// Bring a range into the read cache, or drop it from there.
    pub async fn move_range(
        &self,
        name: &str,
        range: VolumeRange,
        promote: bool,
    ) -> Result<(), ApiError> {
        self.volumes.refuse_while_moved(name)?;
        let entry = self.volumes.entry(name)?;
        let number = VolumeNumber(entry.number);
        let bytes = range
            .bytes
            .unwrap_or(entry.bytes.saturating_sub(range.offset));
        let sector = SECTOR_BYTES as u64;
        let end = range.offset.checked_add(bytes);
        if bytes == 0
            || !range.offset.is_multiple_of(sector)
            || !bytes.is_multiple_of(sector)
            || end.is_none_or(|end| end > entry.bytes)
        {
            return Err(invalid(format!(
                "volume {name}: the range of {bytes} bytes at {} is empty, not a multiple of {sector}, or \
                 beyond its {} bytes",
                range.offset, entry.bytes
            )));
        }
        let sectors = SectorRange::new(range.offset / sector, bytes / sector);
        let what = if promote {
            "promoting it"
        } else {
            "evicting it"
        };
        self.link
            .command(name, what, MOVE_TIME_MAX, |answer| {
                if promote {
                    Command::Promote(number, sectors, answer)
                } else {
                    Command::Evict(number, sectors, answer)
                }
            })
            .await
    }

    /// Verify every checksum of a volume's write log while it is in use.
    pub async fn check(&self, name: &str) -> Result<CheckReport, ApiError> {
        let slot = self.volumes.slot(name)?;
        let entry = match slot.found {
            Found::Entry(entry) => entry,
            Found::Damaged(why) => {
                return Ok(CheckReport {
                    path: name.to_owned(),
                    problems: vec![why],
                    ..CheckReport::default()
                });
            }
        };
        let path = entry.log_path(self.setup.layout());
        let memory = self.memories.to_read_log(&entry).map_err(|shortage| {
            let why = format!("volume {name}: its write log cannot be checked: {shortage}");
            ApiError::new(ErrorKind::Failed, why)
        })?;
        let checked = tokio::task::spawn_blocking(move || {
            let _memory = memory;
            let encryption = entry.encryption.as_ref();
            inspect::check_log(&path, Some(entry.uuid), encryption, inspect::Use::Live)
        });
        checked
            .await
            .map_err(|error| failed(format!("volume {name}: checking it: {error}")))
    }
}
