//! Memory for the indexes of write logs: a budget for each shard, a part of what there is for all.
//!
//! A shard follows its part in its own turns: in others it may not have seen yet that it has another one. Runs are too
//! short for their logs to take much beyond the least of each, so a log that is none takes some on each shard, and gives it
//! back.

use std::rc::Rc;
use std::sync::Arc;

use fastrand::Rng;
use hdcs_core::log::budget::{IndexBudget, Share};
use hdcs_core::log::index_cap::{IndexCap, IndexPart};
use hdcs_core::volume::{Event, sharing};

use super::{World, check_bounds};
use crate::plant::Plant;
use crate::scenario::Stream;
use crate::violation::Violation;

/// See the module.
#[derive(Debug)]
pub(super) struct Indexes {
    cap: Arc<IndexCap>,
    parts: Vec<IndexPart>,
    budgets: Vec<Rc<IndexBudget>>,
    /// What takes some of each as if it were a log, where there is a bound and somebody to share it with.
    pretended: Vec<Share>,
    random: Rng,
}

/// What a log that is none takes at once at most.
const PRETENDED_BYTES_MAX: u64 = 8 << 10;

impl Indexes {
    /// So many bytes for so many shards.
    pub fn new(bytes: u64, shards: usize, seed: u64) -> Self {
        let cap = IndexCap::new(bytes, shards);
        let parts: Vec<_> = (0..shards)
            .map(|shard| IndexPart::new(&cap, shard))
            .collect();
        let budgets: Vec<_> = parts.iter().map(IndexPart::budget).collect();
        let is_shared = shards > 1 && bytes != u64::MAX;
        let pretended = budgets.iter().filter(|_| is_shared);
        Self {
            pretended: pretended.map(|budget| Share::new(budget, 0)).collect(),
            random: Rng::with_seed(Stream::Shards.seed(seed ^ bytes)),
            budgets,
            parts,
            cap,
        }
    }

    /// That of a shard.
    pub fn of(&self, shard: usize) -> &Rc<IndexBudget> {
        &self.budgets[shard]
    }

    /// Its log that is none takes something, or gives some back.
    fn pretend(&mut self, shard: usize) {
        let Some(log) = self.pretended.get_mut(shard) else {
            return;
        };
        if self.random.u32(..16) > 0 {
            return;
        }
        let more = self.random.u64(..PRETENDED_BYTES_MAX);
        // It leaves some to the others.
        if log.takes(2 * more) && self.random.u32(..4) > 0 {
            log.set(log.held() + more);
        } else {
            log.set(self.random.u64(..=log.held()));
        }
    }

    /// A shard has a turn. Which others have another part now, a bit for each.
    fn follow(&mut self, shard: usize, hoards: bool) -> u64 {
        let (part, budget) = (&mut self.parts[shard], &self.budgets[shard]);
        let before = budget.total();
        let others = part.follow(budget);
        if hoards && budget.total() < before {
            budget.set_total(before);
        }
        others
    }
}

impl World {
    /// Have the shards that have a turn follow their parts, and their volumes what that leaves them.
    pub(super) fn share_indexes(&mut self) -> Result<(), Violation> {
        let shards = self.node.as_ref().map_or(0, |node| node.shards.count());
        let hoards = self.planted.is(Plant::HoardedIndex);
        for shard in 0..shards {
            let Some(node) = &mut self.node else { break };
            node.indexes.pretend(shard);
            let bound = node.indexes.cap.bound(shard);
            check_bounds::check_budget(node.indexes.of(shard), bound, node.volumes.len())?;
            let others = node.indexes.follow(shard, hoards);
            check_bounds::check_budgets(&node.indexes.budgets, node.indexes.cap.cap())?;
            self.coverage.index_parts += u64::from(others.count_ones());
            let Some(node) = &mut self.node else { break };
            for other in (0..shards).filter(|other| others >> other & 1 == 1) {
                node.shards.wake(other);
            }
            if !node.indexes.of(shard).has_changed() {
                continue;
            }
            for unit in 0..self.volumes() {
                let is_here =
                    (self.node.as_ref()).is_some_and(|node| node.shards.of(unit) == shard);
                if is_here && self.volume(unit).is_some_and(sharing::follows_budget) {
                    self.step_volume(unit, Event::Poll)?;
                }
            }
        }
        Ok(())
    }
}
