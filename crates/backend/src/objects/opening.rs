//! Which volume is opened at a place, or made there: looked at before anybody is fenced or a key is put, and within one
//! time for all of it.

use std::time::Instant;

use hdcs_core::base::limits::OBJECT_LOCATION_BYTES_MAX;
use hdcs_core::objects::io::OpenError;
use hdcs_core::objects::{Access, Config, ObjectVolume};
use uuid::Uuid;

use super::contents::{There, at, refuse_other, uuid_of};
use super::key::{self, Lacking};
use super::{OPEN_TIME_MAX, ObjectsPlace, nonce, objects_place};
use crate::memory::ObjectMemory;
use crate::stores::{Client, runtime};
use crate::{Absent, BackendError, CloneOrigin, Found};

/// Which volume is opened at a place.
pub(super) struct Which {
    pub access: Access,
    /// What it must be.
    pub uuid: Option<[u8; 16]>,
    pub lacking: Lacking,
}

/// Why nothing can be made where a volume was given up.
pub(super) fn not_free(client: &Client, left: &str) -> BackendError {
    BackendError::Refused(format!(
        "{}: {}, or delete what is left of it there: {left}",
        client.place(),
        OpenError::Gone
    ))
}

/// Work that an opening waits for, if it ends in time. Blocks.
pub(super) fn within<T>(
    until: Instant,
    client: &Client,
    work: impl Future<Output = Result<T, BackendError>>,
) -> Result<T, BackendError> {
    let bounded = async { tokio::time::timeout_at(until.into(), work).await };
    let ended = runtime().block_on(bounded);
    ended.unwrap_or_else(|_| Err(late(client.place())))
}

/// Why an opening is given up that takes too long.
pub(super) fn late(place: String) -> BackendError {
    let why = format!("{place}: it did not open within {OPEN_TIME_MAX:?}");
    BackendError::Unreachable(why)
}

impl ObjectsPlace {
    /// Which volume is opened, where that is there: another one than was meant, what is no volume, and one that comes
    /// there meanwhile get no key and are not even fenced.
    pub(super) fn which(
        &self,
        client: &Client,
        there: There,
        absent: Absent,
    ) -> Result<Which, BackendError> {
        let is_new = absent != Absent::Refuse;
        let expected = self.expected.as_deref().and_then(uuid_of);
        let existing = |uuid, lacking| {
            Ok(Which {
                access: Access::Existing,
                uuid,
                lacking,
            })
        };
        match there {
            There::Volume(there) => match expected {
                Some(uuid) if is_new && uuid != there.volume => {
                    Err(BackendError::Exists(client.place()))
                }
                None if absent == Absent::CreateNew => Err(BackendError::Exists(client.place())),
                _ => {
                    refuse_other(&there, self.expected.as_deref())?;
                    let is_known = expected.is_some();
                    let lacking = if is_known {
                        Lacking::Put
                    } else {
                        Lacking::Refuse
                    };
                    existing(Some(there.volume), lacking)
                }
            },
            There::Gone(gone, left)
                if is_new && expected.is_some_and(|uuid| uuid != gone.volume) =>
            {
                Err(not_free(client, left))
            }
            There::Gone(gone, _) => {
                refuse_other(&gone, self.expected.as_deref())?;
                // Its parent may still have to be told.
                existing(Some(gone.volume), Lacking::Leave)
            }
            There::Free(Some(gone)) if !is_new || Some(gone) == expected => {
                Err(BackendError::Gone(client.place()))
            }
            There::Free(_) if !is_new => existing(expected, Lacking::Leave),
            There::Free(_) => {
                let uuid = expected.unwrap_or_else(|| *Uuid::new_v4().as_bytes());
                Ok(Which {
                    access: Access::Create { uuid },
                    uuid: Some(uuid),
                    lacking: Lacking::Put,
                })
            }
        }
    }

    /// See [`crate::SnapshotStore::clone_from`].
    pub(super) fn make_clone(&self, origin: &CloneOrigin<'_>) -> Result<Found, BackendError> {
        let (parent, place) = (objects_place(origin.url)?, self.reach.name());
        if parent.reach.store() != self.reach.store() {
            return Err(BackendError::Refused(format!(
                "{place}: the parent is in {}, and a clone shares its objects: name a place in the same \
                 store",
                parent.reach.store()
            )));
        }
        let locations = [parent.reach.location(), self.reach.location()];
        if locations
            .iter()
            .any(|text| text.len() > OBJECT_LOCATION_BYTES_MAX)
        {
            return Err(BackendError::Refused(format!(
                "{place}: a place of a parent or clone has at most {OBJECT_LOCATION_BYTES_MAX} bytes"
            )));
        }
        let there = || {
            BackendError::Refused(format!(
                "{place}: there is a volume already: name a place where nothing is"
            ))
        };
        let client = self.brief_client()?;
        let until = Instant::now() + self.open_time;
        match within(until, &client, at(&client, origin.key))? {
            There::Free(_) => {}
            There::Volume(_) => return Err(there()),
            There::Gone(_, left) => return Err(not_free(&client, left)),
        }
        let uuid = *Uuid::new_v4().as_bytes();
        let snapshot = origin.snapshot;
        let mut config = Config::new(Access::Clone { uuid, snapshot }, nonce());
        config.uuid = Some(uuid);
        config.parent = origin.identity.and_then(uuid_of);
        // It is opened anew once it is made.
        ObjectMemory::least().bound(&mut config);
        let mut machine = ObjectVolume::new(config);
        let [parent, own] = locations;
        machine.clone_of(parent, own);
        let driver = key::beside(&client, origin.key, Lacking::Put, Some(uuid), until, || {
            self.drive(machine, until)
        });
        let driver = driver.map_err(|error| match error {
            BackendError::Exists(_) => there(),
            error => error,
        })?;
        Ok(Found {
            bytes: driver.machine.bytes(),
            partly: false,
        })
    }
}
