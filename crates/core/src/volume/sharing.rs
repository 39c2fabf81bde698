//! What volumes share, and whoever has several of them tells and asks each: the read cache, and the memory for the indexes
//! of their logs.

use alloc::rc::Rc;

use zerocopy::IntoBytes;

use super::{Phase, Volume};
use crate::base::io::Nanos;
use crate::base::limits::BLOCK_BYTES;
use crate::cache::Barrier;
use crate::format::{LOG_SHARES_SPACE, LogSuperblock};
use crate::log::budget::IndexBudget;
use crate::log::destage::Stage;
use crate::log::write_log::region_bytes;

/// What a volume needs of memory to know what its log holds is of this budget: to be said at once after [`Volume::open`].
pub fn set_index_budget(volume: &mut Volume, budget: &Rc<IndexBudget>) {
    if let Some(replay) = volume.opening.replay() {
        replay.set_budget(budget);
    }
    let atomic = volume.config.backend_atomic;
    volume.destaging.generation_mut().set_budget(budget, atomic);
    volume.direct.set_budget(budget);
}

/// Only so many bytes of the region of a volume's log are prepared: to be said at once after [`Volume::open`]. Later: so
/// many are by now.
pub fn set_log_prepared(volume: &mut Volume, bytes: u64) {
    if let Some(replay) = volume.opening.replay() {
        replay.set_prepared(bytes);
    } else if volume.log.if_open().is_some() {
        volume.log.get_mut().prepare(bytes);
    }
}

/// Bytes of the region of a volume's log, of which nothing lies beyond `prepared`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogBytes {
    /// All that it may ever use.
    pub all: u64,
    /// Those that may be used.
    pub prepared: u64,
    /// How many of these are in use.
    pub used: u64,
    /// Whether the log may be asked for what it does not need.
    pub is_shared: bool,
}

/// What a volume's log has of its region, once it is open.
pub fn log_bytes(volume: &Volume) -> Option<LogBytes> {
    let log = volume.log.if_open()?;
    let prepared = region_bytes(log.prepared_blocks());
    // One that is not written any more can use no more, and has nothing to give: its device is left as it is.
    let can_change = volume.log.takes_superblocks() && !volume.port.is_fenced();
    Some(LogBytes {
        all: if can_change {
            region_bytes(log.ring_blocks())
        } else {
            prepared
        },
        prepared,
        used: log.occupied_blocks() * BLOCK_BYTES as u64,
        is_shared: can_change && log.superblocks().shares_space(),
    })
}

/// What becomes of it when a volume is asked to give back what its log does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBack {
    /// It uses no more than what was said, and neither superblock needs more.
    Yes,
    /// Its log is empty, and the older superblock is about to say so, too: ask again.
    Soon,
    /// Its log is in use, or takes no superblocks.
    No,
}

/// Have the first block of a new log say that it shares the space of its file system.
pub fn share_log_space(first_block: &mut [u8; BLOCK_BYTES]) {
    let superblock = LogSuperblock::parse(first_block);
    let mut superblock = superblock.expect("a log that was just made");
    superblock.flags = (superblock.flags.get() | LOG_SHARES_SPACE).into();
    superblock.seal();
    first_block.copy_from_slice(superblock.as_bytes());
}

/// Have the log of a volume use no more than so many bytes of its region, if it is at rest. What lies behind may be given
/// to somebody else then.
pub fn give_log_back(volume: &mut Volume, bytes: u64) -> GivenBack {
    let is_open = volume.phase == Phase::Open && volume.close.is_none();
    let takes_part = is_open && volume.log.takes_superblocks() && !volume.port.is_fenced();
    if !takes_part
        || !volume.log.get().superblocks().shares_space()
        || !volume.log.get().is_empty()
        || volume.log.oldest_pin().is_some()
    {
        return GivenBack::No;
    }
    // One that is being written may be the one that names the tail of before.
    let is_written = (volume.direct).writes_superblock(&volume.writes, &volume.destaging);
    if is_written || volume.writes.tells_tail() {
        return GivenBack::Soon;
    }
    if !volume.log.get().is_at_rest() {
        volume.writes.tell_tail();
        return GivenBack::Soon;
    }
    volume.log.get_mut().give_back(bytes);
    GivenBack::Yes
}

/// Whether a volume has to be polled when much of its budget has been taken or given back since.
pub fn follows_budget(volume: &Volume) -> bool {
    let log = volume.log.if_open();
    volume.writes.waiting() > 0
        || volume.phase == Phase::Opening
        || log.is_some_and(|log| log.share().held() > 0)
}

/// Up to where invalidations have to be durable before a volume's destage goes on, if it waits for that alone.
pub fn awaited(volume: &Volume) -> Option<Barrier> {
    let is_held = volume.log.has_failed()
        || (volume.direct).writes_superblock(&volume.writes, &volume.destaging);
    match volume.destaging.generation().stage() {
        Stage::Invalidating(barrier) if !is_held => Some(barrier),
        _ => None,
    }
}

/// Since when the oldest operation of a volume's devices or its backend is under way, if any is: a close waits for all.
pub fn oldest_operation(volume: &Volume) -> Option<Nanos> {
    volume.port.oldest()
}

/// Whether a volume may go on, or has to look again, when an operation of the cache's device ends.
pub fn follows_cache(volume: &Volume) -> bool {
    volume.phase != Phase::Open
        || volume.close.is_some()
        || !volume.port.is_idle()
        || volume.port.owes_answer()
        || matches!(
            volume.destaging.generation().stage(),
            Stage::Invalidating(_)
        )
        || volume.filling.follows_cache()
}
