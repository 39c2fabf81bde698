//! Which key a new volume gets, and another wrapping for the key of one that is there.
//!
//! Invariants:
//! 1. A data key is made only where nothing is yet; what is there already keeps its own.
//! 2. A rotation replaces each copy of the wrapped key at once, the one beside the objects before the
//!    one on this node, of which no byte of the old one stays: a crash in between leaves both whole, each of them good with its own key. It changes
//!    nothing about the data key, so the volume serves on.

use std::path::Path;

use hdcs_api::{ApiError, CreateVolume, ErrorKind, KeyPlace, Volume, VolumeEncryption};
use hdcs_backend::crypt::Encryption;
use hdcs_backend::crypt::source::{KeyError, KeySource};
use hdcs_backend::crypt::wrapped::WrappedKey;
use hdcs_backend::url::BackendUrl;
use hdcs_backend::{BackendError, SnapshotStore};

use super::replicas::refuse_with_copies;
use super::{Node, at_volume, failed, invalid};
use crate::catalogue::{self, Entry, VolumeName};
use crate::data_dir::key::ReplaceError;

/// As the API names it.
pub fn key_place(source: KeySource) -> KeyPlace {
    match source {
        KeySource::File(path) => KeyPlace {
            key_file: Some(path.display().to_string()),
            key_command: None,
        },
        KeySource::Command(command) => KeyPlace {
            key_file: None,
            key_command: Some(command),
        },
    }
}

fn parse(place: &KeyPlace) -> Result<KeySource, ApiError> {
    match (&place.key_file, &place.key_command) {
        (Some(path), None) if Path::new(path).is_absolute() => Ok(KeySource::File(path.into())),
        (Some(path), None) => Err(invalid(format!("key file {path}: give an absolute path"))),
        (None, Some(command)) => Ok(KeySource::Command(command.clone())),
        _ => Err(invalid(
            "a key comes from a file or a command: give --key-file or --key-command".to_owned(),
        )),
    }
}

fn no_key(error: KeyError) -> ApiError {
    let kind = match error {
        KeyError::Form(_) | KeyError::Other { .. } => ErrorKind::Invalid,
        _ => ErrorKind::Failed,
    };
    ApiError::new(kind, error.to_string())
}

fn no_backend(error: BackendError) -> ApiError {
    let kind = if error.is_unreachable() {
        ErrorKind::Unavailable
    } else {
        ErrorKind::Invalid
    };
    ApiError::new(kind, error.to_string())
}

/// The key that lies at the place of a URL.
fn key_at(url: &str) -> Result<Option<WrappedKey>, BackendError> {
    let place = BackendUrl::parse(url)?.place;
    place.snapshot_store().map_or(Ok(None), SnapshotStore::key)
}

/// The key of a new volume, or of one that is at its place already. Blocks.
fn choose(
    url: Option<&str>,
    source: Option<KeySource>,
    is_there: bool,
) -> Result<Option<Encryption>, ApiError> {
    let keeps_keys = match url {
        Some(url) => {
            let url = BackendUrl::parse(url).map_err(|error| invalid(error.to_string()))?;
            url.place
                .snapshot_store()
                .is_some_and(SnapshotStore::is_objects)
        }
        None => false,
    };
    let there = url.map_or(Ok(None), key_at).map_err(no_backend)?;
    match (source, there) {
        (None, None) => Ok(None),
        // Left by a creation that did not end; refused when it is opened if it is no such thing.
        (None, Some(_)) if !is_there => Ok(None),
        (None, Some(there)) => Err(invalid(format!(
            "the volume there is encrypted: give --encrypt and its key, {}, with --key-file or \
             --key-command",
            there.wrapped_with()
        ))),
        (Some(_), None) if is_there && keeps_keys => Err(invalid(
            "the volume there is not encrypted: leave --encrypt out, or name a place where nothing is \
             and copy it there"
                .to_owned(),
        )),
        (Some(source), None) => Encryption::new(source).map(Some).map_err(no_key),
        (Some(source), Some(key)) => {
            let key = Box::new(key);
            let found = Encryption { source, key };
            found.unlock().map_err(no_key)?;
            Ok(Some(found))
        }
    }
}

/// What lies beside the objects must be this volume's key still: another volume may be there by now, or
/// another node has the volume and has given it another key.
fn refuse_other_wrapping(there: Option<WrappedKey>, ours: &WrappedKey) -> Result<(), ApiError> {
    match there {
        Some(there) if there != *ours => Err(ApiError::new(
            ErrorKind::Conflict,
            format!(
                "its place has another key by now, data key {} wrapped with {}, and keeps that: the volume \
                 was replaced there, or another node has taken it over",
                there.id(),
                there.wrapped_with()
            ),
        )),
        _ => Ok(()),
    }
}

/// What is at the place must be this volume: beside another one, or what is left of a deleted one, a key keeps that, or
/// the next volume there, from being opened.
fn refuse_other_volume(
    store: &dyn SnapshotStore,
    place: &str,
    identity: Option<&str>,
) -> Result<(), ApiError> {
    let kept = store.kept().map_err(no_backend)?;
    let kept = kept.ok_or_else(|| BackendError::Absent(place.to_owned()));
    kept.and_then(|kept| kept.refuse_other(place, identity))
        .map_err(|error| ApiError::new(ErrorKind::Conflict, error.to_string()))
}

/// How a new volume is to be encrypted.
pub(super) async fn plan_encryption(
    name: &VolumeName,
    request: &CreateVolume,
    is_there: bool,
) -> Result<Option<Encryption>, ApiError> {
    let source = request.encryption.as_ref().map(parse).transpose();
    let source = source.map_err(|error| at_volume(name.as_str(), error))?;
    let url = request.backend.clone();
    let chosen =
        tokio::task::spawn_blocking(move || choose(url.as_deref(), source, is_there)).await;
    chosen
        .map_err(|error| failed(error.to_string()))?
        .map_err(|error| at_volume(name.as_str(), error))
}

impl Node {
    /// Wrap a volume's data key with another key-encryption key.
    pub async fn rotate_key(&self, name: &str, place: KeyPlace) -> Result<Volume, ApiError> {
        refuse_with_copies(self, name, "the new wrapping of its key")?;
        let _busy = self.volumes.begin(name, "given another key")?;
        let entry = self.volumes.known(name)?;
        let source = parse(&place).map_err(|error| at_volume(name, error))?;
        let Some(encryption) = entry.encryption.clone() else {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "volume {name}: it is not encrypted: copy it to one that was created with --encrypt"
                ),
            ));
        };
        let layout = self.setup.layout().clone();
        let old = entry.clone();
        let old_key = encryption.key.clone();
        let rotated = tokio::task::spawn_blocking(move || {
            let rotated = encryption.rotated(source).map_err(no_key)?;
            let url = BackendUrl::parse(&old.backend_url(&layout));
            let place = url.map_err(|error| invalid(error.to_string()))?.place;
            if let Some(store) = place.snapshot_store().filter(|store| store.is_objects()) {
                refuse_other_volume(store, &place.name(), old.backend_identity.as_deref())?;
                refuse_other_wrapping(store.key().map_err(no_backend)?, &old_key)?;
                store.put_key(&rotated.key).map_err(no_backend)?;
            }
            let new = Entry {
                encryption: Some(rotated.clone()),
                ..old
            };
            let left = match catalogue::rotate(&layout, &new.name, &rotated) {
                Ok(()) => None,
                Err(error @ ReplaceError::OldIsLeft { .. }) => Some(failed(error.to_string())),
                Err(error) => return Err(failed(error.to_string())),
            };
            Ok((new, left))
        });
        let rotated = rotated.await.map_err(|error| failed(error.to_string()))?;
        let (new, left) = rotated.map_err(|error: ApiError| at_volume(name, error))?;
        let not_open = self.volumes.slot(name)?.not_open;
        self.volumes.put(new, not_open);
        if let Some(left) = left {
            return Err(at_volume(name, left));
        }
        tracing::info!("volume {name}: its data key is wrapped with another key now");
        self.volume(name).await
    }
}

/// For people.
pub(super) fn shown(encryption: &Encryption) -> VolumeEncryption {
    VolumeEncryption {
        place: key_place(encryption.source.clone()),
        wrapped_with: encryption.key.wrapped_with().to_owned(),
        data_key: encryption.key.id().to_string(),
    }
}
