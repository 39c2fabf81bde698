//! What volumes share, and whoever has several of them tells and asks each: the read cache, and the memory for the indexes
//! of their logs.

use alloc::rc::Rc;

use super::{Phase, Volume};
use crate::base::io::Nanos;
use crate::cache::Barrier;
use crate::log::budget::IndexBudget;
use crate::log::destage::Stage;

/// What a volume needs of memory to know what its log holds is of this budget: to be said at once after [`Volume::open`].
pub fn set_index_budget(volume: &mut Volume, budget: &Rc<IndexBudget>) {
    if let Some(replay) = volume.opening.replay() {
        replay.set_budget(budget);
    }
    let atomic = volume.config.backend_atomic;
    volume.destaging.generation_mut().set_budget(budget, atomic);
    volume.direct.set_budget(budget);
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
