//! What this node does with its copies when their volumes change, or go, at the node that serves them.
//!
//! Invariants:
//! 1. Before a volume with a group is opened here, its entry says what the newest spec of the group says.
//! 2. A copy is deleted only since its group's removal was written: never since a record cannot be found.

use std::sync::Arc;

use hdcs_api::{ApiError, DeleteOptions, ErrorKind};
use hdcs_core::replication::Member;
use uuid::Uuid;

use super::delete::Leaving;
use super::open::NotOpen;
use super::replicas::{Replicas, entry_of};
use super::{Node, beside, failed};
use crate::catalogue::Entry;
use crate::cluster::records::{Removed, StoreError};
use crate::cluster::spec::VolumeSpecFile;

/// Have the entry of a volume that is not served here say what its spec says.
pub(super) async fn follow_spec(node: &Node, spec: &VolumeSpecFile) -> Result<(), ApiError> {
    let is_other = |entry: &mut Entry| spec.bring(entry);
    if !entry_of(node, spec.uuid).is_some_and(|mut entry| is_other(&mut entry)) {
        return Ok(());
    }
    let name = spec.name.as_str();
    // What is being done to it ends first.
    let Ok(_busy) = node.volumes.begin(name, "changed") else {
        return Ok(());
    };
    let is_served = |replicas: &Replicas| replicas.may_serve(spec.uuid);
    let not_open = node.volumes.not_open(name);
    if not_open.is_none() || node.replicas.as_ref().is_some_and(is_served) {
        return Ok(());
    }
    if let Some(mut entry) = entry_of(node, spec.uuid).filter(|entry| entry.is_replicated)
        && spec.bring(&mut entry)
    {
        node.catalogue.update(&entry).await?;
        node.volumes.put(entry, not_open);
        tracing::info!(
            "volume {name}: its node has changed its size or settings, and this one knows that now"
        );
    }
    Ok(())
}

/// The entry of a volume that this node is about to serve, as the newest spec has it.
pub(super) async fn newest_entry(
    node: &Node,
    replicas: &Replicas,
    mut entry: Entry,
) -> Result<Entry, ApiError> {
    let (store, volume) = (replicas.store().clone(), entry.uuid);
    let spec = beside(move || store.spec(volume)).await?;
    let spec = spec.map_err(|error| failed(error.to_string()))?;
    let spec = spec.ok_or_else(|| failed("its group is not among the records"))?;
    if spec.bring(&mut entry) {
        node.catalogue.update(&entry).await?;
        let not_open = node.volumes.not_open(entry.name.as_str());
        node.volumes.put(entry.clone(), not_open);
    }
    Ok(entry)
}

/// The group of a volume was removed: let go of this node's copy, if it has one. Returns the nodes that have not done so for
/// long.
pub(super) async fn let_go(
    node: &Arc<Node>,
    replicas: &Replicas,
    volume: Uuid,
    removed: &Removed,
) -> Result<Vec<Member>, StoreError> {
    let entry = entry_of(node, volume).filter(|entry| entry.is_replicated);
    let Some(entry) = entry else {
        let store = replicas.store().clone();
        return match beside(move || store.gone(volume)).await {
            Ok(gone) => gone,
            // The node stops.
            Err(_) => Ok(Vec::new()),
        };
    };
    let name = entry.name.to_string();
    if removed.is_kept_by(replicas.me()) {
        if let Some(NotOpen::Copy) = node.volumes.not_open(&name) {
            let why = "detaching it did not end: detach it again".to_owned();
            let what = Leaving::Stays;
            (node.volumes).set_not_open(&name, NotOpen::Leaving { why, what });
        }
        return Ok(Vec::new());
    }
    if let Some(given_up) = node.catalogue.given_up(&entry.name).await {
        // This node has deleted it, and what it has at its backend's place is still to go.
        if let Some(NotOpen::Copy) = node.volumes.not_open(&name) {
            let why = "deleting it did not end: delete it again".to_owned();
            let what = given_up.into();
            (node.volumes).set_not_open(&name, NotOpen::Leaving { why, what });
        }
        return Ok(Vec::new());
    }
    // It may take as long as a device takes, and others are looked at meanwhile.
    let node = Arc::clone(node);
    tokio::spawn(async move {
        let options = DeleteOptions {
            discard_dirty: true,
            keep_data: true,
            ..DeleteOptions::default()
        };
        match node.delete(&name, options).await {
            Ok(_) => {
                tracing::info!("volume {name}: it is no more, and this node's copy is deleted");
            }
            // It is being deleted.
            Err(error) if error.kind == ErrorKind::Conflict => tracing::debug!("{error}"),
            Err(error) => {
                tracing::warn!("volume {name}: it is no more, and this node's copy stays: {error}");
            }
        }
    });
    Ok(Vec::new())
}
