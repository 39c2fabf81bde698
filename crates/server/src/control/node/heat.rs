//! Heat maps of volumes: made for whoever asks, taken for warm-ups, and kept beside the volume's entry for the
//! warm-up that begins by itself.
//!
//! Invariants:
//! 1. Once [`Heats::forget`] has returned, no map is written in the volume's directory any more.
//! 2. A map that says little is not kept over one that says more: none is kept while the volume is warmed up,
//!    while the SSD tier does not serve, or of a cache that has nothing of the volume.
//!
//! Failure: a map that cannot be kept or read costs the next warm-up, and shows; nothing waits for it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hdcs_api::time::unix_ms;
use hdcs_api::{ApiError, ErrorKind, SavedHeat, WarmedFrom};
use hdcs_core::cache::SsdState;
use hdcs_core::cache::heat_map::{HEAT_BYTES_MAX, HeatMap, Plan};
use hdcs_frontend::VolumeNumber;

use super::setup::Setup;
use super::volumes::Volumes;
use super::{
    ANSWER_TIME_MAX, COMMAND_TIME_MAX, Node, at_volume, beside, failed, find, in_time, invalid,
    lock,
};
use crate::catalogue::{self, Entry};
use crate::config::value::Switch;
use crate::control::link::Link;
use crate::data_dir::heat::{self, HEAT_FILE, HeatFileError};
use crate::data_dir::sealed;
use crate::shard::command::Command;

/// Looking at all of the largest cache, a step at a time, and maps that others make meanwhile.
const GATHER_TIME_MAX: Duration = Duration::from_mins(10);

/// How long a stop waits for the maps of all volumes: the ones from before stand.
const STOP_TIME_MAX: Duration = Duration::from_secs(10);

/// What is known of the map that is kept of one open volume.
#[derive(Clone, Debug)]
struct Kept {
    path: PathBuf,
    /// When it is to be written next.
    due: Instant,
    view: SavedHeat,
}

/// The maps that are kept.
pub(super) struct Heats {
    setup: Arc<Setup>,
    link: Arc<Link>,
    volumes: Arc<Volumes>,
    /// Of open volumes, by number.
    kept: Mutex<BTreeMap<u32, Kept>>,
    /// Held while maps are written.
    writing: Arc<tokio::sync::Mutex<()>>,
    is_stopping: AtomicBool,
}

/// The map in these bytes.
fn parsed(name: &str, bytes: &[u8]) -> Result<HeatMap, ApiError> {
    HeatMap::parse(bytes).map_err(|error| {
        invalid(format!(
            "volume {name}: this is no heat map, or it is damaged: {error}: nothing is warmed up; make one with \
             `hdcs volume heat {name} --save FILE`"
        ))
    })
}

impl Heats {
    /// None is kept yet.
    pub fn new(setup: Arc<Setup>, link: Arc<Link>, volumes: Arc<Volumes>) -> Self {
        Self {
            setup,
            link,
            volumes,
            kept: Mutex::default(),
            writing: Arc::default(),
            is_stopping: AtomicBool::new(false),
        }
    }

    /// Have the heat map of a volume made.
    async fn gather(&self, entry: &Entry) -> Result<HeatMap, ApiError> {
        let number = VolumeNumber(entry.number);
        let gathering = self
            .link
            .ask("gathering its heat map", GATHER_TIME_MAX, |answer| {
                Command::Heat(number, answer)
            });
        let gathering = gathering.await?;
        beside(move || gathering.finish()).await
    }

    /// Hand what a map says to the shard; what that is.
    async fn warm_like(
        &self,
        entry: &Entry,
        map: HeatMap,
        if_cold: bool,
    ) -> Result<Plan, ApiError> {
        let report = self.link.report().await?;
        let room_bytes = report.cache_room_bytes(VolumeNumber(entry.number));
        if room_bytes == 0 {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                "this node has no read cache to warm up: set cache_total_size_mib or memory_max_mib and restart \
                 the daemon",
            ));
        }
        let (volume, volume_bytes) = (VolumeNumber(entry.number), entry.bytes);
        let mut plan = beside(move || map.plan(volume_bytes, room_bytes)).await?;
        let ranges = std::mem::take(&mut plan.ranges);
        self.link
            .ask("warming it up", COMMAND_TIME_MAX, |answer| {
                Command::WarmUpLike {
                    volume,
                    ranges,
                    if_cold,
                    answer,
                }
            })
            .await?;
        Ok(plan)
    }

    fn keeps(&self, entry: &Entry) -> bool {
        let settings = self.setup.settings_of(&entry.settings);
        settings.is_ok_and(|settings| settings.cache_warm_up == Switch::On)
    }

    /// What is known of the map that is kept of a volume.
    pub fn view(&self, entry: &Entry) -> Option<SavedHeat> {
        let kept = lock(&self.kept).get(&entry.number)?.view.clone();
        (kept != SavedHeat::default()).then_some(kept)
    }

    fn note(&self, number: u32, note: impl FnOnce(&mut SavedHeat)) {
        if let Some(kept) = lock(&self.kept).get_mut(&number) {
            note(&mut kept.view);
        }
    }

    /// A volume was opened: from now on its map is kept, and it is warmed up from the last one if its cache is cold.
    pub async fn track(&self, entry: &Entry) {
        let path = catalogue::directory(self.setup.layout(), &entry.name).join(HEAT_FILE);
        let kept = Kept {
            path: path.clone(),
            due: Instant::now() + Duration::from_secs(self.setup.node().heat_save_interval_s),
            view: SavedHeat::default(),
        };
        lock(&self.kept).insert(entry.number, kept);
        if !self.keeps(entry) {
            return;
        }
        let shown = path.display().to_string();
        let read = move || -> Result<(HeatMap, SystemTime), HeatFileError> {
            Ok((heat::read(&path)?, std::fs::metadata(&path)?.modified()?))
        };
        let warmed = match in_time(ANSWER_TIME_MAX, read).await {
            Some(Err(error)) if error.is_absent() => return,
            Some(Err(error)) => Err(format!("{shown}: {error}")),
            None => Err(format!("{shown}: it does not answer")),
            Some(Ok((map, saved))) => {
                let saved = saved.duration_since(UNIX_EPOCH);
                self.note(entry.number, |view| {
                    view.saved_ms = saved.ok().map(|at| at.as_millis() as u64);
                });
                let warmed = self.warm_like(entry, map, true).await;
                warmed.map_err(|error| error.to_string())
            }
        };
        match warmed {
            Ok(plan) => tracing::info!(
                volume = entry.name.as_str(),
                bytes = plan.bytes,
                "if its cache is cold, it is warmed up from its heat map"
            ),
            Err(why) => self.trouble(entry, format!("it is not warmed up: {why}")),
        }
    }

    fn trouble(&self, entry: &Entry, why: String) {
        tracing::warn!(volume = entry.name.as_str(), "heat map: {why}");
        self.note(entry.number, |view| view.trouble = Some(why));
    }

    /// Keep the map whose turn it is, if none is being written; called about once a second.
    pub fn save_by_schedule(self: &Arc<Self>) {
        let Ok(writing) = Arc::clone(&self.writing).try_lock_owned() else {
            return;
        };
        let now = Instant::now();
        let due = |entry: &Entry| Some(lock(&self.kept).get(&entry.number)?.due);
        let entries = self.volumes.entries().into_iter();
        let entries = entries.filter(|entry| self.keeps(entry));
        let next = entries.filter_map(|entry| Some((due(&entry)?, entry)));
        let Some((due, entry)) = next.min_by_key(|(due, _)| *due) else {
            return;
        };
        if due > now {
            return;
        }
        if let Some(kept) = lock(&self.kept).get_mut(&entry.number) {
            kept.due = now + Duration::from_secs(self.setup.node().heat_save_interval_s);
        }
        let heats = Arc::clone(self);
        tokio::spawn(async move {
            heats.save(&entry).await;
            drop(writing);
        });
    }

    /// The node stops: keep every map as it is now.
    pub async fn save_at_stop(&self) {
        if self.is_stopping.swap(true, Ordering::Relaxed) {
            return;
        }
        let all = async {
            let _writing = self.writing.lock().await;
            for entry in self.volumes.entries() {
                if self.keeps(&entry) {
                    self.save(&entry).await;
                }
            }
        };
        if tokio::time::timeout(STOP_TIME_MAX, all).await.is_err() {
            tracing::warn!("not every heat map could be kept in time: the ones from before stand");
        }
    }

    async fn save(&self, entry: &Entry) {
        match self.try_save(entry).await {
            Ok(false) => {}
            Ok(true) => self.note(entry.number, |view| {
                *view = SavedHeat {
                    saved_ms: Some(unix_ms()),
                    trouble: None,
                };
            }),
            Err(error) => self.trouble(entry, format!("it is not kept: {error}")),
        }
    }

    /// Whether the map was kept: else there is nothing to keep at present.
    async fn try_save(&self, entry: &Entry) -> Result<bool, ApiError> {
        let report = self.link.report().await?;
        let serves = matches!(report.cache.ssd_state, SsdState::Off | SsdState::Online);
        let volume = find(&report, VolumeNumber(entry.number));
        if !serves || volume.is_none_or(|volume| volume.stats.warm_left_bytes > 0) {
            return Ok(false);
        }
        let map = self.gather(entry).await?;
        let kept = lock(&self.kept).get(&entry.number).cloned();
        let Some(kept) = kept.filter(|_| !map.is_cold()) else {
            return Ok(false);
        };
        let shown = kept.path.display().to_string();
        let written = beside(move || sealed::replace(&kept.path, &map.encode())).await?;
        written.map_err(|error| failed(format!("{shown}: {error}: the one from before stands")))?;
        Ok(true)
    }

    /// A volume goes: nothing is written in its directory any more.
    pub async fn forget(&self, number: u32) {
        lock(&self.kept).remove(&number);
        // What hangs in a write is not waited for: its directory goes another way.
        let _ = tokio::time::timeout(ANSWER_TIME_MAX, self.writing.lock()).await;
    }
}

impl Node {
    /// The heat map of a volume, as a file has it.
    pub async fn heat(&self, name: &str) -> Result<Vec<u8>, ApiError> {
        let entry = self.volumes.entry(name)?;
        let gathered = self.heats.gather(&entry).await;
        let map = gathered.map_err(|error| at_volume(name, error))?;
        Ok(map.encode())
    }

    /// Warm a volume up as a heat map says, the hottest ranges first.
    pub async fn warm_from(&self, name: &str, encoded: &[u8]) -> Result<WarmedFrom, ApiError> {
        let entry = self.volumes.entry(name)?;
        if encoded.len() > HEAT_BYTES_MAX {
            return Err(invalid(format!(
                "volume {name}: this is no heat map: none is larger than {HEAT_BYTES_MAX} bytes"
            )));
        }
        let map = parsed(name, encoded)?;
        let map_bytes = map.bytes();
        let plan = self.heats.warm_like(&entry, map, false).await;
        let plan = plan.map_err(|error| at_volume(name, error))?;
        Ok(WarmedFrom {
            volume: self.volume(name).await?,
            map_volume_bytes: map_bytes,
            warm_bytes: plan.bytes,
            beyond_bytes: plan.beyond_bytes,
            over_bytes: plan.over_bytes,
        })
    }

    /// Keep the heat map whose turn it is, if none is being written; called about once a second.
    pub fn save_heat_by_schedule(&self) {
        self.heats.save_by_schedule();
    }
}
