//! Opening the files of a volume, in the order of [`Opening`]; on a thread of its own, since it blocks.

use std::fmt::Display;
use std::sync::Arc;

use hdcs_backend::crypt::{Encryption, Unlocked};
use hdcs_backend::home;
use hdcs_backend::{Absent, BackendError, Prepared};
use hdcs_core::base::cipher::Authenticator;
use hdcs_core::base::error::OpenError;
use hdcs_core::format::LogSuperblock;
use hdcs_core::node::opening::{Failure, LogRefused, Opening, Step};
use hdcs_core::volume::Inherited;
use hdcs_device::durability::Durability;
use hdcs_device::file::{Device, DeviceError};
use hdcs_device::measurements::Measurements;

use super::command::{OpenFailure, VolumeSpec};
use crate::data_dir::dirty::LogIdentity;

/// A volume's files.
pub struct Opened {
    pub log: Arc<Device>,
    /// How much of it is prepared.
    pub log_prepared_bytes: u64,
    pub log_identity: LogIdentity,
    pub kept: Option<LogSuperblock>,
    pub backend: Prepared,
    pub inherited: Option<Inherited>,
    pub unlocked: Option<Unlocked>,
}

/// Open a volume's log, local store and backend. Without a `durability` that of the log's device is measured, unless it
/// is known by what was measured before.
pub fn open_files(
    spec: &VolumeSpec,
    durability: Option<Durability>,
    known: &Measurements,
) -> Result<Opened, OpenFailure> {
    let volume = spec.config.uuid;
    let mut log: Option<Arc<Device>> = None;
    let mut unlocked = None;
    let (mut absent, mut kept, mut local, mut backend) = (Absent::Refuse, None, None, None);
    let mut opening = Opening::begin(volume, spec.home.is_some());
    loop {
        let identity = || LogIdentity {
            log: opening.log().log,
            incarnation: opening.log().incarnation,
        };
        let log_keys = |unlocked: &Option<Unlocked>, log| {
            let keys = unlocked.as_ref();
            keys.map(|keys| keys.log(log))
        };
        match opening.step() {
            Step::Log => {
                // Measured only once it is known to be ours: that writes to it.
                let device = if let Some(copy) = &spec.copy {
                    Arc::clone(copy)
                } else {
                    let unmeasured = durability.unwrap_or(Durability::Fdatasync);
                    let device = Device::open(&spec.log, Some(unmeasured));
                    Arc::new(device.map_err(|error| log_fails(&error))?)
                };
                let blocks = device.read_superblocks_again();
                let blocks = blocks.map_err(|error| log_fails(&error))?;
                log = Some(device);
                let found = opening.log_read(&blocks);
                let found = found.map_err(|why| log_refused(&opening, why))?;
                let keys = spec.encryption.as_ref().map(Encryption::unlock);
                unlocked = (keys.transpose()).map_err(|error| failure(Failure::Refused, &error))?;
                let keys = log_keys(&unlocked, found.log);
                let keys = keys.as_ref().map(|keys| keys as &dyn Authenticator);
                let key = spec.encryption.as_ref().map(|one| *one.key.id().as_bytes());
                opening
                    .authenticate(&blocks, key.unwrap_or_default(), keys)
                    .map_err(|why| log_refused(&opening, why))?;
            }
            Step::Records => {
                let recorded = spec.admission.record()?;
                let recorded = recorded.map(|record| (record.log, record.incarnation));
                let may_be_made = opening.recorded(recorded);
                if may_be_made.map_err(|why| log_refused(&opening, why))? {
                    absent = spec.admission.absent();
                }
                kept = spec.admission.kept()?;
                opening.kept(kept.as_ref());
            }
            Step::Local => {
                let path = spec.home.as_ref().expect("it has a local store");
                let (bytes, found) = (spec.config.bytes, opening.log());
                let keys = unlocked.as_ref();
                let (log, is_whole) = (found.log, found.is_whole);
                let opened =
                    home::store::open(path, volume, bytes, log, is_whole, keys, &spec.memory);
                local = Some(opened.map_err(|error| {
                    let kind = if error.is_in_use() {
                        Failure::InUse
                    } else if error.is_lost() {
                        Failure::LocalLost
                    } else {
                        Failure::Refused
                    };
                    failure(kind, &error)
                })?);
                opening.done();
            }
            Step::Backend => {
                let objects = unlocked.as_ref().map(|keys| keys.objects.clone());
                let opened = spec.open_backend(absent, objects).map_err(|error| {
                    let kind = match error {
                        BackendError::Gone(_) => Failure::Gone,
                        _ if error.is_unreachable() => Failure::Unreachable,
                        _ => Failure::Refused,
                    };
                    failure(kind, &error)
                })?;
                backend = Some(opened.behind(local.take()));
                opening.done();
            }
            Step::Sync => {
                let log = log.as_ref().expect("it is open");
                log.sync().map_err(|error| log_fails(&error))?;
                opening.done();
            }
            Step::Begin => {
                let keys = log_keys(&unlocked, opening.log().log);
                let keys = keys.as_ref().map(|keys| keys as &dyn Authenticator);
                let begun = spec.admission.begin(identity(), keys);
                begun?;
                // It writes, so it comes after the look whether the opening was given up, and the device with it.
                if durability.is_none()
                    && let Some(log) = log.as_mut().and_then(Arc::get_mut)
                {
                    // That of a copy is known.
                    log.measure_durability(known);
                }
                opening.done();
            }
            Step::Done => {
                let backend = backend.expect("it is open");
                let log = log.expect("it is open");
                spec.space.opened(&log, spec.destages_to());
                return Ok(Opened {
                    log_prepared_bytes: log.prepared_bytes(),
                    log,
                    log_identity: identity(),
                    kept,
                    inherited: inherited(spec, &backend)?,
                    backend,
                    unlocked,
                });
            }
        }
    }
}

/// What a volume reads of another one's state, if it began as that.
fn inherited(spec: &VolumeSpec, backend: &Prepared) -> Result<Option<Inherited>, OpenFailure> {
    let number = backend.origin().and_then(|origin| {
        // What is encrypted with different keys is not shared.
        let key = spec.encryption.as_ref().map(|one| one.key.id());
        let key = key.map(|key| format!(" with key {key}"));
        spec.admission
            .origin(&format!("{origin}{}", key.unwrap_or_default()))
    });
    let Some(number) = number else {
        return Ok(None);
    };
    let reached = spec.memory.reach_inherited(spec.config.bytes);
    reached.map_err(|shortage| failure(Failure::Shortage, &shortage))?;
    Ok(Some(backend.inherited(number, spec.config.bytes)))
}

/// Whoever is told knows of which volume.
fn failure(kind: Failure, what: &dyn Display) -> OpenFailure {
    OpenFailure::new(kind, what.to_string())
}

fn log_fails(error: &DeviceError) -> OpenFailure {
    let kind = match error {
        DeviceError::Locked(_) => Failure::InUse,
        _ => Failure::LogLost,
    };
    failure(kind, &format_args!("write log: {error}"))
}

fn log_refused(opening: &Opening, why: LogRefused) -> OpenFailure {
    let lost = |what: &dyn Display| failure(Failure::LogLost, &format_args!("write log: {what}"));
    match why {
        LogRefused::Superblock(error) => not_replayed(OpenError::Superblock(error)),
        LogRefused::Forged => not_replayed(OpenError::Forged),
        LogRefused::OtherKey => lost(
            &"it is encrypted with another key than the volume, or only one of them is: put the right log back",
        ),
        LogRefused::Another { recorded } => lost(&format_args!(
            "this is another log of the volume ({:016x}, not {recorded:016x}), one that was given up",
            opening.log().log
        )),
        LogRefused::Older { recorded } => lost(&format_args!(
            "this is an older copy of the log: it was opened {} times, the volume {recorded} times, and its \
             old data would overwrite newer data in the backend",
            opening.log().incarnation
        )),
    }
}

/// Why a log could not be used.
pub fn not_replayed(error: OpenError) -> OpenFailure {
    failure(error.into(), &error)
}
