//! What is at a place of objects, looked at and removed without taking it over.

use bytes::Bytes;
use hdcs_core::objects::format::{Manifest, Reference};
use hdcs_core::objects::io::{KEY_PREFIX, Kind, Name};
use uuid::Uuid;

use super::{backend_error, key};
use crate::crypt::wrapped::WrappedKey;
use crate::stores::{self, Client, LIST_MAX, StoreError};
use crate::{BackendError, StoredClone, StoredSnapshot, StoredSnapshots};

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

/// What a volume is, whatever its place.
pub(super) fn identity(uuid: [u8; 16]) -> String {
    format!("the volume {} in an object store", Uuid::from_bytes(uuid))
}

/// Whose identity that is; `None`: that of something else.
pub(super) fn uuid_of(said: &str) -> Option<[u8; 16]> {
    let mut words = said.split(' ');
    let uuid = words
        .find_map(|word| Uuid::try_parse(word).ok())?
        .into_bytes();
    (identity(uuid) == said).then_some(uuid)
}

/// Refuse a volume that is not the one that is expected.
pub(super) fn refuse_other(there: &Manifest, expected: Option<&str>) -> Result<(), BackendError> {
    let has = identity(there.volume);
    match expected {
        Some(was) if was != has => Err(BackendError::Replaced {
            has,
            was: was.to_owned(),
        }),
        _ => Ok(()),
    }
}

/// What a place has for whoever opens a volume there.
pub(super) enum There {
    /// Nothing, or what a volume that was given up has left and nobody minds: that one's UUID.
    Free(Option<[u8; 16]>),
    /// A volume.
    Volume(Manifest),
    /// One that was given up, and what of it keeps its place from being free.
    Gone(Manifest, &'static str),
}

/// See [`There`], for a volume with this key. Nobody is fenced.
pub(super) async fn at(client: &Client, key: Option<&WrappedKey>) -> Result<There, BackendError> {
    Ok(match newest_manifest(client).await? {
        None => There::Free(None),
        Some(there) if !there.gone => There::Volume(there),
        Some(gone) => match in_the_way(client, &gone, key).await? {
            None => There::Free(Some(gone.volume)),
            Some(left) => There::Gone(gone, left),
        },
    })
}

/// The manifest that says that what is here was given up: only that is nobody's, and nothing depends on it.
pub(super) async fn gone(client: &Client) -> Result<Manifest, BackendError> {
    match newest_manifest(client).await? {
        Some(manifest) if manifest.gone => Ok(manifest),
        _ => Err(BackendError::Refused(format!(
            "{}: it was not given up",
            client.place()
        ))),
    }
}

/// What keeps the place of a volume that was given up from being free for another one: that it was a clone, its key, and
/// what clones that never came to be have left. Nothing else of it is in the way: no other volume uses its names. Nor is
/// the key of the other one, which an earlier attempt to make that has put.
async fn in_the_way(
    client: &Client,
    gone: &Manifest,
    key: Option<&WrappedKey>,
) -> Result<Option<&'static str>, BackendError> {
    if !gone.ancestors.is_empty() {
        return Ok(Some("its manifests"));
    }
    let is_left = async |prefix| {
        let page = client.list(prefix, "", LIST_MAX).await;
        let page = page.map_err(|error| backend_error(&error))?;
        Ok::<_, BackendError>(!page.objects.is_empty())
    };
    if is_left(KEY_PREFIX).await? {
        let there = match key {
            Some(_) => key::get(client).await?,
            None => None,
        };
        let is_own = there.is_some_and(|there| key.is_some_and(|key| there.id() == key.id()));
        if !is_own {
            return Ok(Some("the object key/wrapped"));
        }
    }
    let left = is_left(Kind::Clone.prefix()).await?;
    Ok(left.then_some("the objects below clone/"))
}

/// Whether an object is one of the volume that was given up so, and of no other that may be here by now.
fn is_of(gone: &Manifest, name: &str) -> bool {
    let Some(name) = Name::parse(name) else {
        return false;
    };
    match name.kind {
        Kind::Data | Kind::Map | Kind::Snapshot => name.number < gone.number_limit,
        // What is there of clones that never came to be.
        Kind::Clone => true,
        // Whoever still has the volume open meets one of these, and is fenced.
        Kind::Manifest => {
            let first = gone.beginnings.first().copied().unwrap_or(u64::MAX);
            let begins = gone.beginnings.binary_search(&name.number).is_ok();
            name.number > first && name.number < gone.sequence && !begins
        }
    }
}

/// Delete the data key, if it had one, of a volume that was given up so, and its objects of these kinds in their order; how
/// many those were. It ends once another volume is here.
pub(super) async fn delete_all<const N: usize>(
    client: &Client,
    gone: &Manifest,
    key: Option<Uuid>,
    kinds: [Kind; N],
) -> Result<u64, BackendError> {
    let failed = |error| backend_error(&error);
    // First: without it nothing of what follows can be read.
    if let Some(key) = key {
        key::delete(client, key).await?;
    }
    let mut deleted = 0;
    for kind in kinds {
        let mut after = String::new();
        loop {
            let page = client.list(kind.prefix(), &after, LIST_MAX).await;
            let page = page.map_err(failed)?;
            if newest_manifest(client).await?.as_ref() != Some(gone) {
                return Err(BackendError::Refused(format!(
                    "{}: another volume is there by now",
                    client.place()
                )));
            }
            for object in page
                .objects
                .iter()
                .filter(|object| is_of(gone, &object.name))
            {
                client.delete(&object.name).await.map_err(failed)?;
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
pub(super) fn kept(manifest: &Manifest, references: Vec<Reference>) -> StoredSnapshots {
    let mut kept = StoredSnapshots {
        identity: identity(manifest.volume),
        is_clone: !manifest.ancestors.is_empty(),
        is_gone: manifest.gone,
        snapshots: manifest
            .snapshots
            .iter()
            .map(|snapshot| StoredSnapshot {
                name: snapshot.name.as_str().to_owned(),
                made_ms: snapshot.made_ms,
                clones: Vec::new(),
                hindrance: None,
            })
            .collect(),
        clones: Vec::new(),
    };
    for reference in references {
        let clone = StoredClone {
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
