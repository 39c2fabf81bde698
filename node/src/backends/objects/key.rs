//! The wrapped data key of an encrypted volume, beside its objects: whoever has the key-encryption key
//! can take the volume over, from any node.

use hdcs_core::objects::io::KEY_PREFIX;

use super::{BackendError, backend_error};
use crate::crypt::ObjectKey;
use crate::crypt::wrapped::{OBJECT_BYTES, WrappedKey};
use crate::stores::{Client, Condition, StoreError, runtime};

/// The object's name.
pub(super) const NAME: &str = "key/wrapped";

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

/// What there was to do about a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Settled {
    /// Nothing.
    There,
    /// It was put.
    Put,
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

/// Before a volume is opened or made: the place has its key, or none if it is not encrypted.
pub(super) fn settle(
    client: &Client,
    key: Option<&ObjectKey>,
    lacking: Lacking,
) -> Result<Settled, BackendError> {
    runtime().block_on(async {
        match (get(client).await?, key) {
            (None, None) => Ok(Settled::There),
            (None, Some(_)) if lacking == Lacking::Leave => Ok(Settled::There),
            (None, Some(_)) if lacking == Lacking::Refuse => Err(refused(
                client,
                &"what is there is not encrypted, or has lost its object key/wrapped",
            )),
            (Some(there), Some(key)) if there.id() == key.wrapped.id() => Ok(Settled::There),
            (Some(there), Some(_)) => Err(refused(
                client,
                &format_args!(
                    "what is there is encrypted with another data key, {}",
                    there.id()
                ),
            )),
            (Some(there), None) => Err(refused(
                client,
                &format_args!(
                    "what is there is encrypted: open it with --encrypt and the key {}",
                    there.wrapped_with()
                ),
            )),
            // Nobody else has made another one meanwhile.
            (None, Some(key)) => {
                let object = key.wrapped.to_object().into();
                let put = client.put(NAME, object, Condition::IfAbsent).await;
                put.map(|()| Settled::Put)
                    .map_err(|error| backend_error(&error))
            }
        }
    })
}

/// Remove the key that was put for a volume that is not made, since another one came there meanwhile: that one
/// would not open beside it.
pub(super) fn take_back(client: &Client) {
    if let Err(error) = runtime().block_on(client.delete(NAME)) {
        tracing::warn!(
            "{}: the object {NAME} is left of a volume that was not made: delete it: {error}",
            client.place()
        );
    }
}

fn refused(client: &Client, why: &dyn std::fmt::Display) -> BackendError {
    BackendError::Refused(format!("{}: {why}", client.place()))
}
