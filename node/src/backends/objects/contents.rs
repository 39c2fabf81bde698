//! What is at a place of objects, looked at and removed without taking it over.

use bytes::Bytes;
use hdcs_core::objects::format::{Manifest, Reference};
use hdcs_core::objects::io::Kind;

use super::{backend_error, identity, key};
use crate::backends::{BackendError, Kept, KeptClone, KeptSnapshot};
use crate::stores::{self, Client, LIST_MAX, StoreError};

/// The newest manifest of what is at a place, without taking it over.
pub(super) async fn newest_manifest(client: &Client) -> Result<Option<Manifest>, BackendError> {
    let Some((name, bytes)) = newest_manifest_bytes(client).await? else {
        return Ok(None);
    };
    let refused = |error| {
        let place = client.place();
        BackendError::Refused(format!("{place}: object {name} is damaged: {error}"))
    };
    Manifest::parse(&bytes).map(Some).map_err(refused)
}

/// How often the newest manifest may have gone by the time that it is got: an owner commits beside a reader, some times
/// a second.
const NEWEST_TRIES: usize = 100;

/// The same as it is stored, with its name.
pub(super) async fn newest_manifest_bytes(
    client: &Client,
) -> Result<Option<(String, Bytes)>, BackendError> {
    for _ in 0..NEWEST_TRIES {
        let mut newest: Option<stores::Object> = None;
        loop {
            let after = newest.as_ref().map_or("", |object| object.name.as_str());
            let page = client.list(Kind::Manifest.prefix(), after, LIST_MAX).await;
            let page = page.map_err(|error| backend_error(&error))?;
            let more = page.more;
            newest = page.objects.into_iter().next_back().or(newest);
            if !more {
                break;
            }
        }
        let Some(object) = newest else {
            return Ok(None);
        };
        match client.get(&object.name, 0, object.bytes as usize).await {
            Ok(bytes) => return Ok(Some((object.name, bytes))),
            // Its owner has committed the next one since.
            Err(StoreError::NotFound) => {}
            Err(error) => return Err(backend_error(&error)),
        }
    }
    let place = client.place();
    Err(BackendError::Unreachable(format!(
        "{place}: the newest manifest that it lists is not there when it is got, again and again"
    )))
}

/// Only what its last owner has given up is nobody's, and nothing depends on it.
pub(super) async fn refuse_unless_gone(client: &Client) -> Result<(), BackendError> {
    match newest_manifest(client).await? {
        Some(manifest) if manifest.gone => Ok(()),
        _ => Err(BackendError::Refused(format!(
            "{}: it was not given up",
            client.place()
        ))),
    }
}

/// Delete the key, and every object of these kinds in their order; how many those were.
pub(super) async fn delete_all<const N: usize>(
    client: &Client,
    kinds: [Kind; N],
) -> Result<u64, StoreError> {
    // First: without it nothing of what follows can be read.
    client.delete(key::NAME).await?;
    let mut deleted = 0;
    for kind in kinds {
        let mut after = String::new();
        loop {
            let page = client.list(kind.prefix(), &after, LIST_MAX).await?;
            for object in &page.objects {
                client.delete(&object.name).await?;
                deleted += 1;
            }
            match page.objects.last() {
                Some(last) if page.more => after.clone_from(&last.name),
                _ => break,
            }
        }
    }
    Ok(deleted)
}

/// What clones have left with the volume of a manifest.
pub(super) async fn references(
    client: &Client,
    manifest: &Manifest,
) -> Result<Vec<Reference>, BackendError> {
    let mut references = Vec::new();
    each_reference(client, |name, got| {
        let bytes = got.map_err(|error| backend_error(&error))?;
        let parsed = Reference::parse(&manifest.volume, &bytes);
        references.push(parsed.map_err(|error| {
            let place = client.place();
            BackendError::Refused(format!("{place}: object {name} is damaged: {error}"))
        })?);
        Ok(())
    })
    .await?;
    Ok(references)
}

/// The name of every reference of a clone goes to `found`, with what getting it has brought.
pub(super) async fn each_reference(
    client: &Client,
    mut found: impl FnMut(&str, Result<Bytes, StoreError>) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let mut after = String::new();
    loop {
        let page = client.list(Kind::Clone.prefix(), &after, LIST_MAX).await;
        let page = page.map_err(|error| backend_error(&error))?;
        for object in &page.objects {
            let bytes = (object.bytes as usize).min(Reference::BYTES_MAX);
            match client.get(&object.name, 0, bytes).await {
                // Its clone was deleted since.
                Err(StoreError::NotFound) => {}
                got => found(&object.name, got)?,
            }
        }
        match page.objects.last() {
            Some(last) if page.more => after.clone_from(&last.name),
            _ => return Ok(()),
        }
    }
}

/// Which clone begins with which snapshot: pins are never used twice.
pub(super) fn kept(manifest: &Manifest, references: Vec<Reference>) -> Kept {
    let mut kept = Kept {
        identity: identity(manifest.volume),
        is_clone: !manifest.ancestors.is_empty(),
        is_gone: manifest.gone,
        snapshots: manifest
            .snapshots
            .iter()
            .map(|snapshot| KeptSnapshot {
                name: snapshot.name.as_str().to_owned(),
                made_ms: snapshot.made_ms,
                clones: Vec::new(),
                hindrance: None,
            })
            .collect(),
        clones: Vec::new(),
    };
    for reference in references {
        let clone = KeptClone {
            identity: identity(reference.clone),
            location: reference.location,
        };
        let mut snapshots = manifest.snapshots.iter();
        match snapshots.position(|snapshot| snapshot.pin == reference.pin) {
            Some(index) => kept.snapshots[index].clones.push(clone),
            None => kept.clones.push(clone),
        }
    }
    kept
}
