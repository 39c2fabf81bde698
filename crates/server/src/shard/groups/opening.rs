//! Opening a copy: its device, and what a replay finds there. On a thread of its own, since it blocks.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use hdcs_backend::crypt::{Encryption, LogCipher};
use hdcs_core::base::buf::Pool;
use hdcs_core::base::error::{FormatError, OpenError};
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
    /// Number of the group's log, and blocks of its ring: those of every copy.
    pub log_number: u64,
    /// See `log_number`.
    pub ring_blocks: u64,
    /// How it is encrypted, if it is.
    pub encryption: Option<Encryption>,
}

/// A copy that is open.
pub struct CopyOpened {
    pub(super) device: Arc<Device>,
    pub(super) found: CopyFound,
    pub(super) cipher: Option<LogCipher>,
    /// Data blocks that do not match their checksums.
    pub(super) damaged_blocks: u32,
}

/// Why it is not.
#[derive(Debug, Error)]
pub enum CopyError {
    /// Its device.
    #[error("its log: {0}")]
    Device(#[from] DeviceError),
    /// What is on it.
    #[error("its log: {error}{}", what_next(error, path))]
    Log {
        /// What is wrong.
        error: OpenError,
        /// Where the log is.
        path: String,
    },
    /// Its keys.
    #[error("its keys: {0}")]
    Keys(String),
    /// It is of another log than the group's.
    #[error(
        "its log: it has the number {number:x} and {blocks} blocks, and the group's has the number {group_number:x} and \
         {group_blocks} blocks: it is no copy of that one. Stop this node, move `volumes/NAME` of its data directory away \
         and start it: its copy is made anew"
    )]
    Foreign {
        /// Its number.
        number: u64,
        /// Blocks of its ring.
        blocks: u64,
        /// That of the group.
        group_number: u64,
        /// Blocks of each copy's ring.
        group_blocks: u64,
    },
    /// It was made for a volume on this node alone.
    #[error("its log belongs to no group: it was made for this node alone")]
    Alone,
}

/// What becomes of a copy that cannot be used, and what the operator can do, as the end of a sentence.
fn what_next(error: &OpenError, path: &str) -> String {
    let is_damaged = match error {
        OpenError::Superblock(why) => !matches!(why, FormatError::Newer { .. }),
        OpenError::Forged | OpenError::CorruptLog { .. } | OpenError::LostTooMuch { .. } => true,
        _ => false,
    };
    if !is_damaged {
        return String::new();
    }
    // Where a device was removed a file would be made, in memory.
    let is_device = fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
    let what = if is_device {
        "have another node have the copy (`hdcs group set --nodes`)".to_owned()
    } else {
        format!("stop this node, remove {path} and start it: its copy is then brought up anew")
    };
    format!(
        ". The copy is left as it is, and the group goes on without it. If another member's copy is whole (`hdcs group show` \
         at the primary), {what}"
    )
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
    let (found, damaged_blocks) = replay(spec, &device, cipher.as_ref())?;
    if found.superblock.membership().is_none() {
        return Err(CopyError::Alone);
    }
    let (number, blocks) = (
        found.superblock.log.get(),
        found.superblock.ring_blocks.get(),
    );
    if (number, blocks) != (spec.log_number, spec.ring_blocks) {
        return Err(CopyError::Foreign {
            number,
            blocks,
            group_number: spec.log_number,
            group_blocks: spec.ring_blocks,
        });
    }
    if durability.is_none() {
        device.measure_durability(known);
    }
    Ok(CopyOpened {
        device: Arc::new(device),
        found,
        cipher,
        damaged_blocks,
    })
}

/// What the copy has, and how many of its data blocks are damaged.
fn replay(
    spec: &CopySpec,
    device: &Device,
    cipher: Option<&LogCipher>,
) -> Result<(CopyFound, u32), CopyError> {
    let pool = Pool::new(REPLAY_POOL_BYTES);
    let mut replay = Replay::new(*spec.volume.as_bytes(), device.bytes());
    if let Some(cipher) = cipher {
        replay.authenticate(Arc::new(cipher.clone()));
    }
    let (mut spans, mut is_done, mut damaged_blocks) = (Vec::new(), false, 0);
    let unusable = |error| CopyError::Log {
        error,
        path: spec.log.path.display().to_string(),
    };
    while !is_done && let Some(mut read) = replay.next_read(&pool) {
        device.read_now(read.offset, &mut read.buf)?;
        if let Some(cipher) =
            cipher.filter(|_| read.offset >= LOG_HEADER_BLOCKS * BLOCK_BYTES as u64)
        {
            cipher.decrypt(read.offset, &mut read.buf);
        }
        replay
            .read_done(Nanos(0), read.chunk, Ok(read.buf), |_, found| match found {
                Found::Span(span) => {
                    damaged_blocks += span.damaged_blocks;
                    spans.push(SpanId::from(span));
                }
                Found::Done => is_done = true,
                Found::Entries(_) | Found::Record(_) => {}
            })
            .map_err(unusable)?;
    }
    let superblock = *replay
        .superblock()
        .expect("it was chosen before anything was found");
    Ok((CopyFound { superblock, spans }, damaged_blocks))
}
