//! The place of the SSD tier's device, and how a start takes what is there.
//!
//! Invariants:
//! 1. The tier begins under the identity that is recorded only if the device carries it and so has
//!    been in use at every start since; in all other cases under a new one.
//! 2. Whatever a device does, or does not do, the start goes on: without it, if need be. Only what
//!    must not be overwritten, and what will never fit, is refused.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use hdcs_core::base::io::Nanos;
use hdcs_device::file::Device;

/// What opening may take beyond one answer of the device: its lock may still be held by a program
/// that has just ended, and durable writes are measured.
const OPEN_SLACK: Duration = Duration::from_secs(5);

/// Where the SSD tier's device is found, and its identity recorded.
pub trait CachePlace: Send + Sync {
    /// Open what is there. It blocks, perhaps for ever.
    fn open(&self) -> Result<Found, CacheTrouble>;
    /// The identity of the cache ([`hdcs_core::cache::SsdConfig::uuid`]), as it is recorded.
    fn identity(&self) -> [u8; 16];
    /// Give the cache another identity, durably. It blocks, but not on the cache's device; an error
    /// is a sentence for the user.
    fn renew(&self) -> Result<[u8; 16], String>;
}

/// A device that is open.
#[derive(Debug)]
pub struct Found {
    /// The device.
    pub device: Device,
    /// Whether it carries the identity that is recorded.
    pub carries_identity: bool,
}

/// Why a device cannot be used. Each is a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheTrouble {
    /// It fails, or is not there: it may come back.
    Away(String),
    /// It belongs to somebody else, or can never be used.
    Refused(String),
}

impl CacheTrouble {
    /// The sentence.
    pub fn why(self) -> String {
        match self {
            Self::Away(why) | Self::Refused(why) => why,
        }
    }
}

/// How the SSD tier starts.
#[derive(Debug)]
pub struct Started {
    /// Under which identity.
    pub uuid: [u8; 16],
    /// On what; or why on nothing.
    pub device: Result<Device, String>,
}

/// Open what is at the place, within the time that a device has for an answer.
pub fn start(place: &Arc<dyn CachePlace>, answer_max: Nanos) -> Result<Started, String> {
    let time_max = Duration::from_nanos(answer_max.0).saturating_add(OPEN_SLACK);
    let (found, taken) = sync_channel(1);
    let opener = Arc::clone(place);
    let spawned = std::thread::Builder::new()
        .name("hdcs-cache".into())
        .spawn(move || {
            // After the time allowed nobody waits, and the device is closed again.
            let _ = found.send(opener.open());
        });
    let found = match spawned {
        Err(error) => Err(format!("no thread to open it: {error}")),
        Ok(_) => match taken.recv_timeout(time_max) {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(CacheTrouble::Refused(why))) => return Err(why),
            Ok(Err(CacheTrouble::Away(why))) => Err(why),
            Err(RecvTimeoutError::Timeout) => {
                Err(format!("no answer for {} s", time_max.as_secs()))
            }
            Err(RecvTimeoutError::Disconnected) => Err("opening it broke off".to_owned()),
        },
    };
    let uuid = match &found {
        Ok(found) if found.carries_identity => place.identity(),
        _ => place.renew()?,
    };
    match &found {
        Ok(found) if found.carries_identity => {}
        Ok(_) => tracing::info!("the SSD tier starts empty"),
        Err(why) => tracing::error!(
            "the node starts without its SSD tier: {why}: it is tried again, and starts empty then"
        ),
    }
    Ok(Started {
        uuid,
        device: found.map(|found| found.device),
    })
}
