//! The local stores of volumes in storage mode: where they may be, making and giving them up, and the schedule of
//! tiering out.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use hdcs_api::{ApiError, CreateVolume, ErrorKind, Mode};
use hdcs_backend::crypt::Unlocked;
use hdcs_backend::home::store;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::local::TierState;
use hdcs_core::local::format::Layout;
use hdcs_device::file::DeviceError;
use hdcs_frontend::VolumeNumber;
use tokio::sync::oneshot;

use super::create::{is_block_device, is_taken, real_path};
use super::memory::{Memories, short};
use super::setup::Setup;
use super::volumes::Volumes;
use super::{invalid, lock};
use crate::catalogue::{Entry, HOME_FILE, VolumeName};
use crate::control::link::Link;
use crate::control::node_report::NodeReport;
use crate::inspect;
use crate::shard::command::Command;

/// When what each volume has dirty was last tiered out by the schedule, or is taken to have been, by its number.
#[derive(Debug, Default)]
pub(super) struct Tiers {
    last: Mutex<BTreeMap<u32, Instant>>,
}

impl Tiers {
    /// Tier out what is due, and go on with what the end of the last process has interrupted.
    pub fn begin_by_schedule(
        &self,
        report: &NodeReport,
        setup: &Setup,
        volumes: &Volumes,
        link: &Link,
    ) {
        let mut times = lock(&self.last);
        let now = Instant::now();
        times.retain(|number, _| {
            let mut open = report.volumes.iter();
            open.any(|volume| volume.config.number == *number)
        });
        for entry in volumes.entries() {
            let number = VolumeNumber(entry.number);
            let home = super::find(report, number).and_then(|volume| volume.home);
            let Some(home) = home else {
                continue;
            };
            let is_new = !times.contains_key(&entry.number);
            let last = times.entry(entry.number).or_insert(now);
            // What is interrupted from now on was cancelled.
            if home.tier != TierState::Idle {
                continue;
            }
            let interval_s = setup
                .settings_of(&entry.settings)
                .map_or(0, |settings| settings.tier_interval_s);
            let interval = Duration::from_secs(interval_s);
            let is_owed = home.dirty_bytes + home.zero_bytes > 0;
            let is_due = interval_s > 0 && now.duration_since(*last) >= interval && is_owed;
            let is_interrupted = is_new && home.between;
            if !is_due && !is_interrupted {
                continue;
            }
            *last = now;
            let is_busy = volumes.is_busy(entry.name.as_str());
            if !is_busy {
                // Whether it has begun shows in the counters.
                let (answer, _) = oneshot::channel();
                link.send(Command::DestageAll(number, answer));
            }
        }
    }
}

/// Check where the local store of a new volume is to be, if it is to have one.
pub(super) async fn plan_home(
    name: &VolumeName,
    bytes: u64,
    request: &CreateVolume,
    layout: &crate::data_dir::Layout,
    volumes: &Volumes,
) -> Result<Option<PathBuf>, String> {
    if request.mode == Mode::Cache {
        return match request.store_path {
            Some(_) => Err("--store-path is for --mode storage".to_owned()),
            None => Ok(None),
        };
    }
    let backend = request.backend.as_deref();
    if backend.is_some_and(hdcs_backend::is_read_only) {
        return Err("its backend can only be read, so nothing can be tiered out to it".to_owned());
    }
    check_bytes(bytes)?;
    let Some(path) = &request.store_path else {
        return Ok(Some(PathBuf::from(HOME_FILE)));
    };
    let path = PathBuf::from(path);
    if !path.is_absolute() {
        return Err(format!(
            "store path {}: give an absolute path",
            path.display()
        ));
    }
    let silent = || {
        format!(
            "store path {}: what it lies on does not answer",
            path.display()
        )
    };
    let real = real_path(&path).await.ok_or_else(silent)?;
    let is_taken = is_taken(&path).await.ok_or_else(silent)?;
    if layout.is_own(&real) {
        let why = layout.own_refusal();
        return Err(format!("store path {} {why}", path.display()));
    }
    for other in volumes.entries() {
        let theirs = [Some(other.log_path(layout)), other.home_path(layout)];
        for theirs in theirs.into_iter().flatten() {
            // One that does not answer has a volume that holds its lock.
            if real_path(&theirs).await.as_ref() == Some(&real) {
                return Err(format!(
                    "store path {} is in use by volume {}: choose another",
                    path.display(),
                    other.name
                ));
            }
        }
    }
    if is_taken {
        return Err(format!(
            "store path {}: it exists already, and is no block device: choose another",
            path.display()
        ));
    }
    if request.log_path.as_deref().map(Path::new) == Some(&*path) {
        return Err(format!(
            "store path {} is where the write log of {name} is to be: choose another",
            path.display()
        ));
    }
    Ok(Some(path))
}

/// Refuse a size that a volume cannot have; what it needs of memory for the new one is reserved.
pub(super) fn check_resize(entry: &Entry, bytes: u64, memories: &Memories) -> Result<(), ApiError> {
    let name = &entry.name;
    if entry.home.is_some() {
        check_bytes(bytes).map_err(|error| invalid(format!("volume {name}: {error}")))?;
    }
    let memory = memories.of(entry.number);
    let reached = memory.map_or(Ok(()), |memory| memory.reach_bytes(bytes));
    reached.map_err(|shortage| short(name, &shortage))
}

fn check_bytes(bytes: u64) -> Result<(), String> {
    if bytes.is_multiple_of(BLOCK_BYTES as u64) {
        return Ok(());
    }
    Err(format!(
        "in storage mode its size is a multiple of {BLOCK_BYTES} bytes; {bytes} is not (the next one is {})",
        bytes.next_multiple_of(BLOCK_BYTES as u64)
    ))
}

/// Make a local store, of an encrypted volume with its `keys`; `advice` is what to do if that fails. Blocks.
pub(super) fn make_home(
    path: &Path,
    entry: &Entry,
    keys: Option<&Unlocked>,
    overwrite: bool,
    advice: &str,
) -> Result<(), ApiError> {
    let is_device = is_block_device(path);
    if is_device && !overwrite && !store::is_of(path, entry.uuid) {
        inspect::refuse_used_device(path).map_err(|why| {
            let why = why.replace("log device", "store device");
            let why = why.replace("--log-overwrite", "--store-overwrite");
            ApiError::new(ErrorKind::Conflict, why)
        })?;
    }
    if inspect::is_missing_device(path) {
        let why = format!(
            "its local store: {}: there is no such device",
            path.display()
        );
        return Err(ApiError::new(ErrorKind::Conflict, why));
    }
    store::create(path, entry.uuid, entry.bytes, is_device, keys).map_err(|error| {
        let kind = match error {
            DeviceError::NoSpace { .. } | DeviceError::TooSmall { .. } => ErrorKind::NoSpace,
            DeviceError::Exists(_) | DeviceError::Locked(_) => ErrorKind::Conflict,
            _ => ErrorKind::Failed,
        };
        let needs = Layout::of(keys.is_some()).store_bytes(entry.bytes);
        let why = format!("its local store of {needs} bytes cannot be made: {error}: {advice}");
        ApiError::new(kind, why)
    })
}
