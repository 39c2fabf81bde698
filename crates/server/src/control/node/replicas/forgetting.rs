//! A node that was taken out of a group lets go of its copy, and of the volume.
//!
//! Invariants:
//! 1. What is let go of is a copy that no record needs: the newest record that this node has ever seen does not name it, and
//!    is newer than the one under which the copy was brought up. A directory over NFS may show the past, in which a node
//!    is not named yet whose copy counts by now.
//! 2. The backend is not touched: the volume lives on.
//! 3. Nothing of it is known any more only once all is done that belongs to the letting go, and the node has not begun
//!    anew to have a copy before.
//! 4. While this node has a copy the records say so ([`has_copy`](crate::cluster::records::RecordStore::has_copy)). So a
//!    removal of the group waits for a node that was taken out of it while it was away.

use std::sync::Arc;

use hdcs_api::ErrorKind;
use hdcs_core::replication::participant::Role;
use hdcs_core::replication::record::GroupRecord;
use uuid::Uuid;

use super::opening::Busy;
use super::{Known, Replicas, Serving, entry_of};
use crate::catalogue::{self, Entry};
use crate::control::node::delete::forget;
use crate::control::node::{COMMAND_TIME_MAX, Node, beside, failed};
use crate::shard::command::Command;

/// Whether this node has a copy of a volume's log, or the rest of one.
pub(super) fn has_copy(node: &Node, volume: Uuid) -> bool {
    entry_of(node, volume).is_some_and(|entry| entry.is_replicated)
}

/// Begin to let go of the copy of a volume whose record does not name this node, if that is so for good and nothing else is
/// done with it; else at the next look. Others are looked at meanwhile.
pub(super) fn begin(node: &Arc<Node>, replicas: &Replicas, volume: Uuid, record: GroupRecord) {
    let is_out = replicas.with(volume, |known| {
        let follows = |copy: &hdcs_core::replication::participant::Status| {
            copy.role == Role::Follows && copy.joined < record.revision
        };
        known.revision == record.revision
            && known.serving == Serving::No
            && known.status.as_ref().is_some_and(follows)
    });
    if !is_out {
        return;
    }
    let Some(mut busy) = Busy::begin(replicas, volume) else {
        return;
    };
    let (node, replicas) = (Arc::clone(node), replicas.clone());
    tokio::spawn(async move {
        forget_copy(&node, &replicas, volume, &record, &mut busy).await;
        drop(busy);
    });
}

async fn forget_copy(
    node: &Node,
    replicas: &Replicas,
    volume: Uuid,
    record: &GroupRecord,
    busy: &mut Busy,
) {
    let Some(entry) = entry_of(node, volume) else {
        return;
    };
    let name = entry.name.as_str();
    let Ok(_busy) = node.volumes.begin(name, "let go of") else {
        return;
    };
    match let_go(node, replicas, &entry, record.revision).await {
        Ok(()) => {
            busy.forget();
            tracing::info!(
                "volume {name}: this node was taken out of its group, and has let go of its copy"
            );
        }
        // Its device may have something to end first.
        Err(error) if error.kind == ErrorKind::Failed => replicas.complain(&format!(
            "volume {name}: this node was taken out of its group, and its copy is still there: {error}"
        )),
        Err(error) => replicas.complain(&error.to_string()),
    }
}

async fn let_go(
    node: &Node,
    replicas: &Replicas,
    entry: &Entry,
    revision: u64,
) -> Result<(), hdcs_api::ApiError> {
    let name = entry.name.as_str();
    let closed = (node.link).command(name, "closing its copy", COMMAND_TIME_MAX, |answer| {
        Command::ForgetCopy(entry.uuid, revision, answer)
    });
    closed.await?;
    // What is left of it after a crash is removed at the next start, or opened and let go of again.
    replicas.with(entry.uuid, Known::let_go);
    forget(entry, node.setup.layout(), &node.link).await;
    let (layout, of) = (node.setup.layout().clone(), entry.name.clone());
    let removed = beside(move || catalogue::remove(&layout, &of, None)).await?;
    removed.map_err(|error| failed(error.to_string()))?;
    let (store, volume) = (replicas.store().clone(), entry.uuid);
    if let Err(error) = beside(move || store.forgot_copy(volume)).await? {
        // It is asked to let go of what it has not, should the group be removed.
        replicas.complain(&error.to_string());
    }
    node.volumes.remove(name);
    node.volumes.explain(name, None);
    node.share_memory().await;
    Ok(())
}
