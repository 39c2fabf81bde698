//! Removing the references of clones that never came to be, so that their parent frees what it kept for them.
//!
//! What is safe is decided by [`fate`]. A reference is left alone for an hour beside that, by the store's own clock,
//! so that a creation which is only slow is not made to fail.

use std::time::Duration;

use bytes::Bytes;
use hdcs_core::objects::format::{Manifest, Reference};
use hdcs_core::objects::io::{KEY_PREFIX, Kind, Name};
use hdcs_core::objects::references::{Fate, fate, tombstone};

use super::contents::newest_manifest;
use super::{Reach, backend_error, nonce};
use crate::BackendError;
use crate::stores::{Client, Condition, LIST_MAX, Object, StoreError};

/// A creation ends, well or not, long before that.
const GRACE: Duration = Duration::from_secs(3600);
/// Looks at one place in one go: somebody makes a clone there at the same time.
const LOOKS_MAX: usize = 3;

/// Forget the clones of the volume at a place that can never be; how many those were.
pub(super) async fn forget(
    reach: &dyn Reach,
    client: &Client,
    patience: Duration,
) -> Result<u64, BackendError> {
    forget_older(reach, client, patience, GRACE).await
}

/// The same with another grace.
pub(super) async fn forget_older(
    reach: &dyn Reach,
    client: &Client,
    patience: Duration,
    grace: Duration,
) -> Result<u64, BackendError> {
    let references = list(client, Kind::Clone).await?;
    if references.is_empty() {
        return Ok(0);
    }
    let Some(parent) = newest_manifest(client).await? else {
        return Ok(0);
    };
    // The last thing that its owner did is the store's time, or before it.
    let now_ms = list(client, Kind::Manifest).await?;
    let now_ms = now_ms.last().map_or(0, |object| object.modified_ms);
    let mut forgotten = 0;
    for object in references {
        let age_ms = now_ms.saturating_sub(object.modified_ms);
        if u128::from(age_ms) < grace.as_millis() {
            continue;
        }
        let bytes = (object.bytes as usize).min(Reference::BYTES_MAX);
        let got = match client.get(&object.name, 0, bytes).await {
            Err(StoreError::NotFound) => continue,
            got => got.map_err(|error| backend_error(&error))?,
        };
        // Nobody knows where the clone of a damaged one is: `hdcs check` names it.
        let Ok(reference) = Reference::parse(&parent.volume, &got) else {
            continue;
        };
        let Some(there) = reach.elsewhere(&reference.location) else {
            continue;
        };
        let proves_absence = there.proves_absence();
        let there = Client::over(there.reach(None)?, patience);
        if !proves_absence && newest_manifest(&there).await?.is_none() {
            continue;
        }
        if is_dead(&reference, &parent, &reach.location(), &there).await? {
            let deleted = client.delete(&object.name).await;
            deleted.map_err(|error| backend_error(&error))?;
            forgotten += 1;
        }
    }
    Ok(forgotten)
}

/// Whether a clone can never be; made so if nothing is at its place.
async fn is_dead(
    reference: &Reference,
    parent: &Manifest,
    location: &str,
    there: &Client,
) -> Result<bool, BackendError> {
    for _ in 0..LOOKS_MAX {
        let found = newest_manifest(there).await?;
        match fate(reference, found.as_ref()) {
            Fate::Keep => return Ok(false),
            Fate::Remove => return Ok(true),
            Fate::Bury => {}
        }
        if found.is_some() && !is_emptied(there).await? {
            return Ok(false);
        }
        let location = location.to_owned();
        let mut grave = tombstone(reference, parent.volume, location, found.as_ref());
        grave.nonce = nonce();
        let mut bytes = vec![0; grave.encoded_bytes()];
        grave.write(&mut bytes);
        let name = Name::own(Kind::Manifest, grave.sequence).to_string();
        let put = there.put(&name, Bytes::from(bytes), Condition::IfAbsent);
        match put.await {
            Ok(()) => return Ok(true),
            Err(StoreError::Exists) => {}
            Err(error) => return Err(backend_error(&error)),
        }
    }
    Ok(false)
}

/// Whether the removal of a volume that was given up has ended: with another manifest after its last one it would not go
/// on.
async fn is_emptied(client: &Client) -> Result<bool, BackendError> {
    let kinds = [Kind::Data, Kind::Map, Kind::Snapshot, Kind::Clone];
    for prefix in kinds.map(Kind::prefix).into_iter().chain([KEY_PREFIX]) {
        let page = client.list(prefix, "", LIST_MAX).await;
        let page = page.map_err(|error| backend_error(&error))?;
        if !page.objects.is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// All objects of a kind, in the order of their names.
async fn list(client: &Client, kind: Kind) -> Result<Vec<Object>, BackendError> {
    let mut objects: Vec<Object> = Vec::new();
    loop {
        let after = objects.last().map_or("", |object| object.name.as_str());
        let page = client.list(kind.prefix(), after, LIST_MAX).await;
        let page = page.map_err(|error| backend_error(&error))?;
        let more = page.more && !page.objects.is_empty();
        objects.extend(page.objects);
        if !more {
            return Ok(objects);
        }
    }
}
