//! The wrapped data key of an encrypted volume, beside its objects: whoever has the key-encryption key
//! can take the volume over, from any node.

use std::cell::Cell;
use std::time::{Duration, Instant};

use hdcs_core::objects::io::KEY_PREFIX;
use uuid::Uuid;

use super::contents::newest_manifest;
use super::opening::within;
use super::{BackendError, backend_error};
use crate::crypt::wrapped::{OBJECT_BYTES, WrappedKey};
use crate::stores::{Client, Condition, StoreError};

/// The object's name.
pub(super) const NAME: &str = "key/wrapped";

/// An opening that has failed goes on for so long at most.
const TAKE_BACK_TIME_MAX: Duration = Duration::from_secs(5);
/// Attempts to delete a key, each after a look whether it is still there, and how long it is waited between them.
const DELETE_TRIES_MAX: usize = 10;
const DELETE_PAUSE: Duration = Duration::from_secs(1);

const _: () = assert!(NAME.len() > KEY_PREFIX.len());

/// The key that is there.
pub(super) async fn get(client: &Client) -> Result<Option<WrappedKey>, BackendError> {
    match client.get(NAME, 0, OBJECT_BYTES).await {
        Ok(bytes) => {
            let parsed = WrappedKey::from_object(&bytes);
            parsed.map(Some).map_err(|error| refused(client, &error))
        }
        Err(StoreError::NotFound) => Ok(None),
        Err(error) => Err(backend_error(&error)),
    }
}

/// Put a key, whatever is there.
pub(super) async fn put(client: &Client, key: &WrappedKey) -> Result<(), BackendError> {
    let put = client.put(NAME, key.to_object().into(), Condition::Always);
    put.await.map_err(|error| backend_error(&error))
}

/// Delete this key, and no other one: where it is deleted another volume may be made at once, which puts its own.
pub(super) async fn delete(client: &Client, key: Uuid) -> Result<(), BackendError> {
    // An attempt whose answer was lost may have deleted it.
    let once = client.with_patience(Duration::ZERO);
    let mut tries = 0;
    while get(client).await?.is_some_and(|there| there.id() == key) {
        tries += 1;
        match once.delete(NAME).await {
            Err(StoreError::Unreachable(_)) if tries < DELETE_TRIES_MAX => {
                tokio::time::sleep(DELETE_PAUSE).await;
            }
            deleted => return deleted.map_err(|error| backend_error(&error)),
        }
    }
    Ok(())
}

/// What is to be done where the key of an encrypted volume is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lacking {
    /// It is put: nothing is there yet, or it was lost, since what is there is known to be the volume.
    Put,
    /// Nothing: there will be no volume.
    Leave,
    /// What is there is not encrypted: a key beside it would keep it from being opened.
    Refuse,
}

/// Open or make a volume with this UUID: before, its place has its key, or none if it is not encrypted. A key that was put
/// for a volume that is not made after all is removed.
pub(super) fn beside<T>(
    client: &Client,
    key: Option<&WrappedKey>,
    lacking: Lacking,
    uuid: Option<[u8; 16]>,
    until: Instant,
    open: impl FnOnce() -> Result<T, BackendError>,
) -> Result<T, BackendError> {
    let is_put = Cell::new(false);
    let settled = within(until, client, settle(client, key, lacking, &is_put));
    let is_settled = settled.is_ok();
    let opened = settled.and_then(|()| open());
    if let (Err(error), Some(key), true) = (&opened, key, is_put.get()) {
        match error {
            // A manifest may still be on its way: without its key nobody could read what comes to be.
            BackendError::Unreachable(why) if is_settled => warn_of_left(client, why),
            _ => take_back(client, key, uuid),
        }
    }
    opened
}

/// The place has its key, or none if it is not encrypted; `is_put` if it may have been put.
async fn settle(
    client: &Client,
    key: Option<&WrappedKey>,
    lacking: Lacking,
    is_put: &Cell<bool>,
) -> Result<(), BackendError> {
    let mut there = get(client).await?;
    if let (None, Some(key)) = (&there, key) {
        match lacking {
            Lacking::Leave => return Ok(()),
            Lacking::Refuse => {
                let why = "what is there is not encrypted, or has lost its object key/wrapped";
                return Err(refused(client, &why));
            }
            Lacking::Put => {}
        }
        is_put.set(true);
        let object = key.to_object().into();
        match client.put(NAME, object, Condition::IfAbsent).await {
            Ok(()) => return Ok(()),
            // Somebody else was faster, or it was put and the answer was lost.
            Err(StoreError::Exists) => there = get(client).await?,
            Err(error) => return Err(backend_error(&error)),
        }
    }
    match (there, key) {
        (None, None) => Ok(()),
        (Some(there), Some(key)) if there.id() == key.id() => Ok(()),
        (Some(there), Some(_)) => Err(refused(
            client,
            &format_args!(
                "what is there is encrypted with another data key, {}: name another place, or delete the \
                 object {NAME} if that is all there is",
                there.id()
            ),
        )),
        (Some(there), None) => Err(refused(
            client,
            &format_args!(
                "what is there is encrypted: open it with --encrypt and the key {}, or delete the object \
                 {NAME} if that is all there is",
                there.wrapped_with()
            ),
        )),
        (None, Some(_)) => Err(backend_error(&StoreError::Exists)),
    }
}

/// Remove the key that was put for a volume that is not made: another one would not open beside it, nor would one be made
/// where a volume was given up.
fn take_back(client: &Client, key: &WrappedKey, uuid: Option<[u8; 16]>) {
    let take_back = async {
        let there = newest_manifest(client).await?;
        // Its manifest may be there although nobody was told.
        let is_made = there.is_some_and(|there| !there.gone && Some(there.volume) == uuid);
        if is_made {
            return Ok(());
        }
        delete(client, key.id()).await
    };
    // It is late, perhaps.
    if let Err(error) = within(Instant::now() + TAKE_BACK_TIME_MAX, client, take_back) {
        warn_of_left(client, &error);
    }
}

fn warn_of_left(client: &Client, why: &dyn std::fmt::Display) {
    tracing::warn!(
        "{}: the object {NAME} may be left of a volume that was not made: delete it if that is all there is: {why}",
        client.place()
    );
}

fn refused(client: &Client, why: &dyn std::fmt::Display) -> BackendError {
    BackendError::Refused(format!("{}: {why}", client.place()))
}
