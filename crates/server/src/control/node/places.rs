//! What lies in the places of a volume: its backend, its write log and its local store, looked at without opening the
//! volume, and cleared once it is closed.

use hdcs_api::{ApiError, ErrorKind};
use hdcs_backend::home::store;
use hdcs_backend::url::BackendUrl;

use super::create::is_block_device;
use super::entries::Catalogue;
use super::memory::Memories;
use super::{ANSWER_TIME_MAX, COMMAND_TIME_MAX, failed, in_time};
use crate::catalogue::Entry;
use crate::data_dir::Layout;
use crate::inspect;

/// Dirty data of a volume that is not open.
pub(super) struct Dirty {
    /// Bytes at most.
    pub bytes_max: u64,
    is_exact: bool,
    is_none: bool,
}

impl Dirty {
    /// Whether it is certain that there is none, discards included.
    pub fn is_none(&self) -> bool {
        self.is_none
    }
}

impl std::fmt::Display for Dirty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_exact {
            write!(f, "{} dirty bytes", self.bytes_max)
        } else {
            write!(
                f,
                "an unknown amount of dirty data, {} bytes at most,",
                self.bytes_max
            )
        }
    }
}

/// Why a volume's backend does not have all of it, as far as can be seen without opening it.
pub(super) async fn missing_backend(entry: &Entry, layout: &Layout) -> Option<String> {
    let (url, bytes) = (entry.backend_url(layout), entry.bytes);
    let looked = in_time(ANSWER_TIME_MAX, move || {
        let found = BackendUrl::parse(&url).map(|url| url.place.find());
        match found {
            Ok(Ok(Some(found))) if found.bytes < bytes => {
                Some(format!("{} bytes of {bytes}", found.bytes))
            }
            Ok(Ok(Some(_))) => None,
            Ok(Ok(None)) => Some("there is none".to_owned()),
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(error.to_string()),
        }
    });
    looked
        .await
        .unwrap_or_else(|| Some("it does not answer".to_owned()))
}

/// Whether it can be seen at once that nothing is at a backend's place.
pub(super) async fn is_gone(url: &str) -> bool {
    let url = url.to_owned();
    let look = move || BackendUrl::parse(&url).is_ok_and(|url| url.place.is_gone());
    in_time(ANSWER_TIME_MAX, look).await == Some(true)
}

/// Whether whatever is in the place of a volume's log can be looked at in time.
pub(super) async fn log_answers(entry: &Entry, layout: &Layout) -> bool {
    let path = entry.log_path(layout);
    let looked = in_time(ANSWER_TIME_MAX, move || inspect::log_owner(&path)).await;
    looked.is_some()
}

/// What a volume that is not open has dirty: what its log says, or else its record.
pub(super) async fn dirty_of_unopened(
    name: &str,
    entry: &Entry,
    catalogue: &Catalogue,
    memories: &Memories,
) -> Result<Dirty, ApiError> {
    let layout = catalogue.layout();
    let (path, of, uuid) = (entry.log_path(layout), entry.clone(), entry.uuid);
    // Without memory to read its log, the record has to do, which never says less.
    let memory = memories.to_read_log(entry);
    let inspected = if let Ok(memory) = memory
        && log_answers(entry, layout).await
    {
        let look = move || {
            let _memory = memory;
            inspect::dirty_of(&path, of.uuid, of.encryption.as_ref())
        };
        tokio::task::spawn_blocking(look)
            .await
            .map_err(|error| failed(format!("volume {name}: {error}")))?
    } else {
        None
    };
    let loss = catalogue.loss_of(entry, true).await;
    let home = entry.home_path(layout);
    let at_home = match home {
        Some(path) => in_time(COMMAND_TIME_MAX, move || store::dirty_of(&path, uuid)).await,
        None => Some(Some((0, true))),
    };
    let inspected = inspected.zip(at_home.flatten());
    let inspected = inspected.map(|((bytes, entries), (at_home, is_nothing))| {
        (bytes + at_home, entries + u64::from(!is_nothing))
    });
    Ok(match inspected {
        Some((bytes_max, entries)) => Dirty {
            bytes_max,
            is_exact: true,
            is_none: entries == 0,
        },
        None => Dirty {
            bytes_max: loss.dirty_bytes_max,
            is_exact: loss.record.as_ref().is_some_and(|record| !record.in_use),
            is_none: loss.is_none(),
        },
    })
}

/// Drop what a device still holds of the local store of a closed volume.
pub(super) async fn wipe_home(entry: &Entry, layout: &Layout) {
    let Some(path) = entry.home_path(layout) else {
        return;
    };
    let (device, uuid) = (path.clone(), entry.uuid);
    let wiped = in_time(ANSWER_TIME_MAX, move || {
        if !is_block_device(&device) || !store::is_of(&device, uuid) {
            return Ok(());
        }
        inspect::wipe_device(&device)
    });
    let problem = match wiped.await {
        Some(Ok(())) => return,
        Some(Err(error)) => error.to_string(),
        None => "it does not answer".to_owned(),
    };
    tracing::warn!(
        "volume {}: {}: {problem}: wipe it with `wipefs` before using it again",
        entry.name,
        path.display()
    );
}

/// Refuse to change the size of an image that holds more than its volume: what is beyond the end would be cut off.
pub(super) async fn refuse_longer_image(entry: &Entry, layout: &Layout) -> Result<(), ApiError> {
    let (url, bytes) = (entry.backend_url(layout), entry.bytes);
    let look = move || BackendUrl::parse(&url).is_ok_and(|url| url.place.has_beyond(bytes));
    let name = &entry.name;
    match in_time(ANSWER_TIME_MAX, look).await {
        Some(false) => Ok(()),
        Some(true) => Err(ApiError::new(
            ErrorKind::Conflict,
            format!(
                "volume {name}: its image holds data beyond the {bytes} bytes of the volume, left by an \
                 interrupted shrink or written by another program, which would be lost: save it, or lose it with \
                 --shrink"
            ),
        )),
        // It may answer by the time that its size is changed.
        None => Err(ApiError::new(
            ErrorKind::Unavailable,
            format!(
                "volume {name}: its image does not answer, and may hold data beyond the {bytes} bytes of the \
                 volume, which would be lost: try again when it answers, or lose that with --shrink"
            ),
        )),
    }
}

/// Drop what a device still holds of the write log of a closed volume.
pub(super) async fn wipe_log(entry: &Entry, layout: &Layout) {
    let log = entry.log_path(layout);
    let (path, uuid) = (log.clone(), entry.uuid);
    let wiped = in_time(COMMAND_TIME_MAX, move || {
        // Another disk may be in its place by now.
        let is_its_own = is_block_device(&path) && inspect::log_owner(&path) == Some(uuid);
        let wiped = is_its_own.then(|| inspect::wipe_device(&path));
        wiped.and_then(|wiped| wiped.err().map(|error| error.to_string()))
    });
    if let Some(problem) = wiped.await.unwrap_or(Some("it does not answer".to_owned())) {
        tracing::warn!(
            "volume {}: {}: {problem}: wipe it with `wipefs` before using it again",
            entry.name,
            log.display()
        );
    }
}
