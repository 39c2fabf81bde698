//! Opening a copy: its device, and what a replay finds there. On a thread of its own, since it blocks.

use std::sync::Arc;

use hdcs_backend::crypt::{Encryption, LogCipher};
use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::OpenError;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_HEADER_BLOCKS, LogSuperblock};
use hdcs_core::log::replay::{Found, Replay};
use hdcs_core::replication::SpanId;
use hdcs_core::replication::participant::Found as CopyFound;
use hdcs_device::DeviceRegion;
use hdcs_device::durability::Durability;
use hdcs_device::file::{Device, DeviceError};
use hdcs_device::measurements::Measurements;
use thiserror::Error;
use uuid::Uuid;

/// Memory that a replay reads into.
const REPLAY_POOL_BYTES: usize = 8 << 20;

/// A copy that is to be opened.
#[derive(Clone, Debug)]
pub struct CopySpec {
    /// The volume.
    pub volume: Uuid,
    /// Its log's place on this node.
    pub log: DeviceRegion,
    /// How it is encrypted, if it is.
    pub encryption: Option<Encryption>,
}

/// A copy that is open.
pub struct CopyOpened {
    pub(super) device: Arc<Device>,
    pub(super) found: CopyFound,
    pub(super) cipher: Option<LogCipher>,
}

/// Why it is not.
#[derive(Debug, Error)]
pub enum CopyError {
    /// Its device.
    #[error("its log: {0}")]
    Device(#[from] DeviceError),
    /// What is on it.
    #[error("its log: {0}")]
    Log(#[from] OpenError),
    /// Its keys.
    #[error("its keys: {0}")]
    Keys(String),
    /// It has lost something that it once had.
    #[error(
        "its log: {lost_blocks} blocks of it are damaged, and it is left as it is: if another member is whole, remove this \
         node's log, and it is brought up anew"
    )]
    Damaged {
        /// Data blocks that do not match their checksums.
        lost_blocks: u32,
    },
    /// It was made for a volume on this node alone.
    #[error("its log belongs to no group: it was made for this node alone")]
    Alone,
}

/// Open a copy.
pub fn open(
    spec: &CopySpec,
    durability: Option<Durability>,
    known: &Measurements,
) -> Result<CopyOpened, CopyError> {
    let unmeasured = durability.unwrap_or(Durability::Fdatasync);
    let mut device = Device::open(&spec.log, Some(unmeasured))?;
    device.sync()?;
    let unlocked = spec.encryption.as_ref().map(Encryption::unlock).transpose();
    let unlocked = unlocked.map_err(|error| CopyError::Keys(error.to_string()))?;
    let blocks = device.read_superblocks_again()?;
    let log = blocks
        .iter()
        .find_map(|block| LogSuperblock::parse(block).ok());
    let cipher = unlocked.zip(log).map(|(keys, log)| keys.log(log.log.get()));
    let found = replay(spec.volume, &device, cipher.as_ref())?;
    if found.superblock.membership().is_none() {
        return Err(CopyError::Alone);
    }
    if durability.is_none() {
        device.measure_durability(known);
    }
    Ok(CopyOpened {
        device: Arc::new(device),
        found,
        cipher,
    })
}

fn replay(
    volume: Uuid,
    device: &Device,
    cipher: Option<&LogCipher>,
) -> Result<CopyFound, CopyError> {
    let pool = Pool::new(REPLAY_POOL_BYTES);
    let mut replay = Replay::new(*volume.as_bytes(), device.bytes());
    if let Some(cipher) = cipher {
        replay.authenticate(Arc::new(cipher.clone()));
    }
    let (mut spans, mut is_done, mut lost_blocks) = (Vec::new(), false, 0);
    while !is_done && let Some(mut read) = replay.next_read(&pool) {
        device.read_now(read.offset, &mut read.buf)?;
        if let Some(cipher) =
            cipher.filter(|_| read.offset >= LOG_HEADER_BLOCKS * BLOCK_BYTES as u64)
        {
            cipher.decrypt(read.offset, &mut read.buf);
        }
        replay.read_done(Nanos(0), read.chunk, Ok(read.buf), |_, found| match found {
            Found::Span(span) => {
                lost_blocks += span.damaged_blocks;
                spans.push(SpanId::from(span));
            }
            Found::Done => is_done = true,
            Found::Entries(_) | Found::Record(_) => {}
        })?;
    }
    if lost_blocks > 0 {
        return Err(CopyError::Damaged { lost_blocks });
    }
    let superblock = *replay
        .superblock()
        .expect("it was chosen before anything was found");
    Ok(CopyFound { superblock, spans })
}
