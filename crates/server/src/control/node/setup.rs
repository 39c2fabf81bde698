//! What the node was set up with, which stays as it is while it runs: its configuration, the split of its memory, and
//! where its data is. What volumes are to be follows from that and their entries.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use hdcs_api::ApiError;
use hdcs_api::value::Value;
use hdcs_backend::codec::CODECS;
use hdcs_backend::memory::{Kind, Needs, VolumeMemory};
use hdcs_backend::url::BackendUrl;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::LOG_BYTES_MIN;
use hdcs_core::volume::{LogFailure, VolumeConfig};
use hdcs_device::{DeviceRegion, space};
use hdcs_frontend::access::Allow;

use super::create::is_block_device;
use super::invalid;
use crate::catalogue::{Entry, LogPlace};
use crate::config::budget::Budget;
use crate::config::cluster::Cluster;
use crate::config::{Config, NodeSettings, VolumeSettings};
use crate::data_dir::Layout;
use crate::shard::Residence;
use crate::shard::command::{Admission, VolumeSpec};
use crate::shard::log_space::LogSpace;

const MIB: u64 = 1 << 20;
/// Of what is free, a new log takes this part at most, as a divisor: the hundredth log has a fifth of what the first one
/// had.
const LOG_FREE_DIVISOR: u64 = 64;

/// What is prepared of a new log at once where so much is free.
fn prepared_of(usual: u64, free: u64) -> u64 {
    let part = free / LOG_FREE_DIVISOR / MIB * MIB;
    usual.min(part.max(LOG_BYTES_MIN))
}

/// What the node was set up with.
#[derive(Debug)]
pub(super) struct Setup {
    config: Config,
    budget: Budget,
    layout: Layout,
}

impl Setup {
    pub fn new(config: Config, budget: Budget, layout: Layout) -> Self {
        Self {
            config,
            budget,
            layout,
        }
    }

    /// What belongs to the node as a whole.
    pub fn node(&self) -> &NodeSettings {
        &self.config.node
    }

    /// The cluster that it is a node of; none: it is alone.
    pub fn cluster(&self) -> Option<&Cluster> {
        self.config.cluster.as_ref()
    }

    /// Size of the log of a new volume that nobody has said, and how much of it is prepared at once if it shares the space
    /// of its file system. The size is that of the configuration. If that does not say it either, no more is taken than a
    /// part of what is free in the directory, so that there is room for many: where files have no holes, the log is no
    /// larger than that. Blocks.
    pub fn log_bytes(&self, directory: &Path) -> (u64, Option<u64>) {
        let usual = self.node().log_size_mib << 20;
        if self.config.is_given("log_size_mib") {
            return (usual, None);
        }
        let free = rustix::fs::statvfs(directory).map(|found| found.f_bavail * found.f_frsize);
        let prepared = free.map_or(usual, |free| prepared_of(usual, free));
        if space::has_holes(directory) {
            (usual, Some(prepared))
        } else {
            (prepared, None)
        }
    }

    /// The log of a volume in the place of the one that it had, of the same size. Blocks.
    pub fn log_again(&self, entry: &Entry) -> LogPlace {
        let path = entry.log_path(self.layout());
        let directory = path.parent().filter(|_| !is_block_device(&path));
        let (_, prepared) = directory.map_or((0, None), |directory| self.log_bytes(directory));
        LogPlace {
            prepared: prepared.map(|prepared| prepared.min(entry.log.bytes)),
            ..entry.log.clone()
        }
    }

    /// How memory is split.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Where the node's data is.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The settings of a volume that overrides these.
    pub fn settings_of(
        &self,
        overrides: &BTreeMap<String, Value>,
    ) -> Result<VolumeSettings, ApiError> {
        let mut settings = self.config.volume.clone();
        for (key, value) in overrides {
            settings
                .set_known(key, value)
                .map_err(|error| invalid(error.to_string()))?;
        }
        settings
            .check()
            .and_then(|()| self.budget.check_unpersisted(&settings))
            .map_err(|error| invalid(error.to_string()))?;
        Ok(settings)
    }

    /// Which clients may open a volume over TCP; nobody if that cannot be told.
    pub fn allow_of(&self, entry: &Entry) -> Allow {
        let settings = self.settings_of(&entry.settings);
        settings.map_or_else(|_| Allow::default(), |settings| settings.allow)
    }

    /// What a volume needs of memory.
    pub fn needs_of(&self, entry: &Entry) -> Needs {
        let url = BackendUrl::parse(&entry.backend_url(self.layout()));
        let settings = self.settings_of(&entry.settings);
        Needs {
            bytes: entry.bytes,
            log_bytes: entry.log.bytes,
            home_bytes: entry.home.as_ref().map(|_| entry.bytes),
            // What cannot be parsed is not opened.
            kind: url.map_or(Kind::File, |url| url.place.memory_kind()),
            encrypted: entry.encryption.is_some(),
            compressed: settings.is_ok_and(|settings| settings.compression.is_some()),
        }
    }

    /// What the core is told of a volume, one of so many, that has this memory if it has some already.
    pub fn core_config(
        &self,
        entry: &Entry,
        volumes: usize,
        memory: Option<&VolumeMemory>,
    ) -> Result<VolumeConfig, ApiError> {
        let settings = self.settings_of(&entry.settings)?;
        Ok(VolumeConfig {
            number: entry.number,
            uuid: entry.uuid.into_bytes(),
            bytes: entry.bytes,
            log_bytes: entry.log.bytes,
            policy: settings.policy,
            persist: settings.persist,
            compression: settings.compression,
            codec: &CODECS,
            when_full: settings.when_full,
            // Past the log is past its copies.
            log_failure: if entry.is_replicated {
                LogFailure::ReadOnly
            } else {
                settings.log_failure
            },
            discard: settings.discard,
            unpersisted_bytes_max: settings.unpersisted_max_kib * 1024,
            unpersisted_age_max: Nanos::from_millis(settings.unpersisted_age_max_ms),
            dirty_age_max: Nanos::from_millis(settings.destage_age_max_ms),
            dirty_ratio_min: settings.dirty_ratio_min as u8,
            dirty_ratio_max: settings.dirty_ratio_max as u8,
            destage_depth_max: settings.cache_flush_queue_depth as usize,
            sequential_cutoff_bytes: settings.sequential_cutoff_kib * 1024,
            promote_hits: settings.cache_promote_hits as u8,
            fill_rate_max_bytes_s: settings.cache_warm_rate_mib_s << 20,
            read_ahead_bytes_max: settings.read_ahead_max_kib * 1024,
            // No fewer than it has blocks.
            log_entries_max: memory.map_or(0, VolumeMemory::entries_max),
            resident_bytes_max: self.budget.resident_bytes_max(volumes),
            backend_extents: true,
            backend_atomic: false,
            backend_answer_max: Nanos::from_millis(settings.backend_answer_max_ms),
            log_answer_max: Nanos::from_millis(settings.log_answer_max_ms),
        })
    }

    /// What the shard opens a volume with.
    pub fn spec(
        &self,
        entry: &Entry,
        volumes: usize,
        admission: Arc<dyn Admission>,
        memory: Arc<VolumeMemory>,
        space: Arc<LogSpace>,
    ) -> Result<VolumeSpec, ApiError> {
        let layout = self.layout();
        let settings = self.settings_of(&entry.settings)?;
        Ok(VolumeSpec {
            name: entry.name.to_string(),
            config: self.core_config(entry, volumes, Some(&memory))?,
            qos: settings.qos(),
            log: DeviceRegion {
                path: entry.log_path(layout),
                offset: 0,
                bytes: entry.log.bytes,
            },
            is_replicated: entry.is_replicated,
            copy: None,
            backend: entry.backend_url(layout),
            identity: entry.backend_identity.clone(),
            encryption: entry.encryption.clone(),
            home: entry.home_path(layout),
            pins: super::pins::sectors(&entry.pins),
            allow: settings.allow,
            admission,
            memory,
            space,
            shard: None,
            continues: None,
            residence: Residence::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_hundreds_of_volumes_fit_the_device_whatever_it_has() {
        const GIB: u64 = 1 << 30;
        assert_eq!(prepared_of(512 * MIB, 1000 * GIB), 512 * MIB);
        let mut free = 48 * GIB;
        let mut sizes = Vec::new();
        for _ in 0..200 {
            sizes.push(prepared_of(1500 * MIB, free));
            free -= sizes[sizes.len() - 1];
        }
        assert!(free > GIB && sizes.is_sorted_by(|one, next| one >= next));
        assert_eq!((sizes[0], sizes[199] / MIB), (768 * MIB, 33));
        assert_eq!(prepared_of(512 * MIB, 0), LOG_BYTES_MIN);
    }
}
