//! The catalogue as the control plane uses it, and what else the data directory keeps of each volume: whatever may wait
//! for its disk runs beside the control plane.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hdcs_api::ApiError;
use hdcs_backend::Absent;
use hdcs_core::format::LogSuperblock;

use super::delete::Leaving;
use super::record::Gate;
use super::{ANSWER_TIME_MAX, beside, failed, in_time, lock, scrub};
use crate::catalogue::{self, Entry, Found, GivenUp, Recovered, VolumeName};
use crate::data_dir::dirty::{Amount, DirtyRecord, Left, Loss};
use crate::data_dir::{DataDir, Layout, kept};

/// The catalogue of the node.
pub(super) struct Catalogue {
    layout: Layout,
    dir: Arc<Mutex<DataDir>>,
}

impl Catalogue {
    /// The catalogue of a data directory.
    pub fn new(dir: Arc<Mutex<DataDir>>) -> Self {
        let layout = lock(&dir).layout().clone();
        Self { layout, dir }
    }

    /// Where the data directory has what.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What the data directory has at the start, and what it keeps of each volume's scrubs, by its number.
    pub async fn recover(
        &self,
    ) -> Result<(Recovered, Vec<(u32, Option<scrub::Record>)>), ApiError> {
        let dir = Arc::clone(&self.dir);
        let recovered = beside(move || {
            let mut dir = lock(&dir);
            let recovered = catalogue::recover(&dir).map_err(|error| failed(error.to_string()))?;
            let mut scrubs = Vec::new();
            for found in recovered.volumes.values() {
                if let Found::Entry(entry) = found {
                    dir.note_used_number(entry.number)
                        .map_err(|error| failed(error.to_string()))?;
                    let directory = catalogue::directory(dir.layout(), &entry.name);
                    scrubs.push((entry.number, scrub::read(&directory)));
                }
            }
            Ok::<_, ApiError>((recovered, scrubs))
        });
        recovered.await?
    }

    /// Make a changed entry durable in the catalogue. The operation that marks the volume as busy keeps the order.
    pub async fn update(&self, entry: &Entry) -> Result<(), ApiError> {
        let (layout, entry) = (self.layout().clone(), entry.clone());
        let updated = beside(move || catalogue::update(&layout, &entry)).await?;
        updated.map_err(|error| failed(error.to_string()))
    }

    /// Hand out a volume number that was never used, durably.
    pub async fn next_number(&self, name: &str) -> Result<u32, ApiError> {
        let dir = Arc::clone(&self.dir);
        let number = beside(move || lock(&dir).next_volume_number()).await?;
        number.map_err(|error| failed(format!("volume {name}: {error}")))
    }

    /// Note durably what is about to be given up.
    pub async fn note_given_up(&self, entry: &Entry, leaving: Leaving) -> Result<(), ApiError> {
        let Some(what) = leaving.given_up() else {
            return Ok(());
        };
        let (at, of) = (self.layout().clone(), entry.name.clone());
        let noted = beside(move || catalogue::give_up(&at, &of, what)).await?;
        noted.map_err(|error| failed(format!("volume {}: {error}", entry.name)))
    }

    /// Nothing was given up.
    pub async fn keep_after_all(&self, entry: &Entry) {
        let (at, of) = (self.layout().clone(), entry.name.clone());
        let kept = beside(move || catalogue::keep_after_all(&at, &of)).await;
        if let Ok(Err(error)) = kept {
            tracing::warn!("volume {}: {error}", entry.name);
        }
    }

    /// Record what a volume's backend is, if that was not known.
    pub async fn record_backend(&self, entry: &mut Entry, identity: Option<&str>) {
        if entry.backend_identity.is_some() || identity.is_none() {
            return;
        }
        let known = Entry {
            backend_identity: identity.map(str::to_owned),
            ..entry.clone()
        };
        match self.update(&known).await {
            Ok(()) => *entry = known,
            // Until it is recorded, another image in its place would not be noticed.
            Err(error) => tracing::warn!(
                "volume {}: its backend is not recorded: {error}",
                entry.name
            ),
        }
    }

    /// What is lost if the log of a volume is, and with `home` its local store as well.
    pub async fn loss_of(&self, entry: &Entry, home: bool) -> Loss {
        let directory = catalogue::directory(self.layout(), &entry.name);
        let uuid = entry.uuid;
        let read = in_time(ANSWER_TIME_MAX, move || {
            let kept = kept::read(&directory, uuid).ok().flatten();
            (DirtyRecord::read(&directory, uuid), kept)
        });
        // What cannot be read in time may be anything.
        let (record, kept) = read.await.unwrap_or_default();
        let is_empty = |record: &DirtyRecord| {
            let same = kept.filter(|kept| kept.log.get() == record.log);
            let has_all =
                |kept: LogSuperblock| kept::is_empty(&kept) && kept.lost_ranges.get() == 0;
            entry.home.is_none() && same.is_some_and(has_all)
        };
        let record = record.map(|record| {
            if !is_empty(&record) {
                return record;
            }
            // It was given up when its device failed, once the backend had everything.
            record.closed(Left {
                all: Amount {
                    dirty_bytes: 0,
                    nothing: true,
                    age: Duration::ZERO,
                },
                in_log: None,
            })
        });
        if !home && entry.home.is_some() {
            return Loss::of_log_alone(record.as_ref(), entry.log.bytes);
        }
        Loss::of(record, entry.dirty_bytes_max())
    }

    /// Whether the directory of a volume is half removed.
    pub async fn is_half_removed(&self, name: &VolumeName) -> Result<bool, ApiError> {
        let (at, of) = (self.layout().clone(), name.clone());
        beside(move || catalogue::is_half_removed(&at, &of)).await
    }

    /// What is noted of a volume as given up, as far as that can be seen in time.
    pub async fn given_up(&self, name: &VolumeName) -> Option<GivenUp> {
        let (at, of) = (self.layout().clone(), name.clone());
        let found = in_time(ANSWER_TIME_MAX, move || catalogue::given_up(&at, &of));
        found.await.flatten()
    }

    /// What lets the log of a volume be opened, once.
    pub fn gate(&self, entry: &Entry) -> Gate {
        let absent = if entry.backend_is_new {
            Absent::CreateNew
        } else {
            Absent::Create
        };
        Gate::new(entry, self.layout(), Arc::clone(&self.dir), absent)
    }
}
