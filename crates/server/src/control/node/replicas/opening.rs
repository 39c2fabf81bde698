//! Copies are made and opened each on a task of its own: that may take as long as a device or a key's command takes, and
//! meanwhile others are looked at, whose groups wait for what they are told of the records.
//!
//! Invariants:
//! 1. Of one volume one copy is made or opened at a time, and nothing else is done with it then.
//! 2. [`OPENINGS_MAX`] are at a time.
//! 3. That this node has a copy is among the records before there is one
//!    ([`has_copy`](crate::cluster::records::RecordStore::has_copy)).

use std::sync::Arc;
use std::time::Instant;

use hdcs_api::ApiError;
use hdcs_core::replication::record::GroupRecord;
use hdcs_device::DeviceRegion;
use uuid::Uuid;

use super::{FAULT_PERIOD, Replicas, beginning, entry_of, look_at, make_own_copy, with_log};
use crate::cluster::spec::VolumeSpecFile;
use crate::control::node::{MOVE_TIME_MAX, Node, beside, failed, lock};
use crate::shard::command::Command;
use crate::shard::groups::CopySpec;

/// Copies that are made or opened at once: each reads its log through memory of its own.
pub(super) const OPENINGS_MAX: usize = 8;

/// That something is done with a copy that may take long; until this is dropped.
pub(super) struct Busy {
    replicas: Replicas,
    volume: Uuid,
}

impl Busy {
    /// Nothing else is done with the copy from now on, unless something is.
    pub(super) fn begin(replicas: &Replicas, volume: Uuid) -> Option<Self> {
        let is_busy = replicas.with(volume, |known| std::mem::replace(&mut known.is_busy, true));
        (!is_busy).then(|| Self {
            replicas: replicas.clone(),
            volume,
        })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(known) = lock(&self.replicas.0.known).get_mut(&self.volume) {
            known.is_busy = false;
        }
    }
}

/// Whether something is done with a copy that may take long.
pub(super) fn is_busy(replicas: &Replicas, volume: Uuid) -> bool {
    let known = lock(&replicas.0.known);
    known.get(&volume).is_some_and(|known| known.is_busy)
}

/// Begin to have this node's copy, if it is time for that.
pub(super) fn begin(
    node: &Arc<Node>,
    replicas: &Replicas,
    spec: &VolumeSpecFile,
    record: &GroupRecord,
) {
    let (volume, now) = (spec.uuid, Instant::now());
    let waits = replicas.with(volume, |known| known.open_at.is_some_and(|at| at > now));
    if waits {
        return;
    }
    let Some(busy) = Busy::begin(replicas, volume) else {
        return;
    };
    let (node, replicas) = (Arc::clone(node), replicas.clone());
    let (spec, record) = (spec.clone(), record.clone());
    tokio::spawn(async move {
        let Ok(turn) = replicas.0.openings.acquire().await else {
            return;
        };
        let opened = open(&node, &replicas, &spec, &record).await;
        drop(turn);
        drop(busy);
        let opened = match opened {
            Ok(true) => look_at(&node, &replicas, &spec, &record).await,
            other => other.map(drop),
        };
        if let Err(error) = opened {
            replicas.copy_failed(&spec, &error);
        }
        replicas.look(volume).await;
    });
}

/// Have this node's copy. Returns whether it is open then.
async fn open(
    node: &Node,
    replicas: &Replicas,
    spec: &VolumeSpecFile,
    record: &GroupRecord,
) -> Result<bool, ApiError> {
    let volume = spec.uuid;
    replicas.with(volume, |known| {
        known.open_at = Some(Instant::now() + FAULT_PERIOD);
    });
    let entry = entry_of(node, volume);
    if let Some(entry) = entry.as_ref().filter(|entry| !entry.is_replicated) {
        replicas.with(volume, |known| known.open_at = None);
        beginning::go_on(node, replicas, entry, record).await?;
        return Ok(false);
    }
    let store = replicas.store().clone();
    let log = (entry.as_ref()).map(|entry| entry.log_path(node.setup.layout()));
    let told = beside(move || {
        let has_log = log.is_some_and(|log| log.exists());
        (store.has_copy(volume), has_log)
    });
    match told.await? {
        // It says nothing that was not so before: that the file system is full keeps no copy closed.
        (Err(error), true) => replicas.complain(&error.to_string()),
        (told, _) => told.map_err(|error| failed(error.to_string()))?,
    }
    let entry = match entry {
        Some(entry) => with_log(node, entry, spec).await?,
        None => make_own_copy(node, spec).await?,
    };
    let copy = CopySpec {
        volume,
        log: DeviceRegion {
            path: entry.log_path(node.setup.layout()),
            offset: 0,
            bytes: entry.log.bytes,
        },
        log_number: spec.log,
        ring_blocks: spec.ring_blocks(),
        encryption: entry.encryption.clone(),
    };
    let opened = node.link.ask("opening its copy", MOVE_TIME_MAX, |answer| {
        Command::OpenCopy(Box::new(copy), answer)
    });
    opened.await?;
    replicas.with(volume, |known| {
        known.is_open = true;
        known.open_at = None;
        known.trouble = None;
    });
    Ok(true)
}
