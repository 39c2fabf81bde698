//! What the schedulers of a node's shards know of each other: so that weights and reservations hold between volumes on
//! different shards, which share devices.
//!
//! There is one window for all shards ([`super::qos`]). While a flow with a weight or a reservation is active on any of
//! them, each has the part of it that the weights of its active flows are of all, and may take more as long as all of it
//! is not used: what one shard does not use is lent. Whoever has taken more lets nothing go until it is within its part.
//! By Little's law requests that take equally long are served in the proportion in which they are under way.
//!
//! Each shard says what it has in a line of its own, with plain stores, and only while a volume of the node has a weight
//! or a reservation: without, a turn costs one load. Nobody waits for anybody, and no shard is woken for another one: each
//! has its part, and what it has under way itself brings its next turn.
//!
//! Invariants:
//! 1. A shard whose flows have nothing under way may let one go: parts are never nothing.
//! 2. What a shard has said counts only for as long as it meant it to: one that is idle, or has ended, takes nothing from
//!    the others.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::base::io::Nanos;

/// See the module.
#[derive(Debug)]
pub struct CommonWindow {
    /// A bit for each shard that has flows with weights or reservations, active or not.
    shared: AtomicU64,
    shards: Box<[Slot]>,
}

/// What a shard has said.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Slot {
    weight: AtomicU64,
    active_until: AtomicU64,
    shared_until: AtomicU64,
    reserved_until: AtomicU64,
    size: AtomicU64,
    under_way: AtomicU64,
    lapse: AtomicU64,
}

/// What a shard says.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Said {
    /// The weights of its active flows, and until when they count.
    pub weight: u64,
    pub active_until: Nanos,
    /// Until when flows with weights or reservations are active, and with reservations.
    pub shared_until: Nanos,
    pub reserved_until: Nanos,
    /// How large the window may be for the sake of its reservations.
    pub size: u64,
    /// What it has under way, in which lapse.
    pub under_way: u64,
    pub lapse: u64,
}

/// What the others have said, at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Others {
    pub weight: u64,
    pub shared_until: Nanos,
    pub size: u64,
    pub under_way: u64,
}

impl CommonWindow {
    /// Of so many shards, no more than bits of a word.
    pub fn of(shards: usize) -> Arc<Self> {
        assert!(shards <= u64::BITS as usize);
        Arc::new(Self {
            shared: AtomicU64::new(0),
            shards: (0..shards).map(|_| Slot::default()).collect(),
        })
    }
}

/// One shard's place there.
#[derive(Debug)]
pub(super) struct Member {
    window: Arc<CommonWindow>,
    shard: usize,
}

impl Member {
    pub fn new(window: &Arc<CommonWindow>, shard: usize) -> Self {
        assert!(shard < window.shards.len());
        Self {
            window: Arc::clone(window),
            shard,
        }
    }

    /// Whether another shard has flows with weights or reservations.
    #[inline]
    pub fn others_are_shared(&self) -> bool {
        self.window.shared.load(Ordering::Relaxed) & !(1 << self.shard) != 0
    }

    /// Whether this shard has some.
    pub fn set_shared(&self, is_shared: bool) {
        let bit = 1 << self.shard;
        if is_shared {
            self.window.shared.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.window.shared.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    pub fn say(&self, said: &Said) {
        let slot = &self.window.shards[self.shard];
        for (place, value) in [
            (&slot.weight, said.weight),
            (&slot.active_until, said.active_until.0),
            (&slot.shared_until, said.shared_until.0),
            (&slot.reserved_until, said.reserved_until.0),
            (&slot.size, said.size),
            (&slot.under_way, said.under_way),
            (&slot.lapse, said.lapse),
        ] {
            place.store(value, Ordering::Relaxed);
        }
    }

    /// What the others say, in this lapse. Each value is right on its own; they may be of different moments.
    pub fn others(&self, now: Nanos, lapse: u64) -> Others {
        let mut others = Others {
            weight: 0,
            shared_until: Nanos(0),
            size: u64::MAX,
            under_way: 0,
        };
        let get = |value: &AtomicU64| value.load(Ordering::Relaxed);
        for (shard, slot) in self.window.shards.iter().enumerate() {
            if shard == self.shard {
                continue;
            }
            others.shared_until = others.shared_until.max(Nanos(get(&slot.shared_until)));
            if get(&slot.active_until) > now.0 {
                others.weight += get(&slot.weight);
            }
            if get(&slot.reserved_until) > now.0 {
                others.size = others.size.min(get(&slot.size));
            }
            // Older than that counts no more where it was said, either.
            if get(&slot.lapse) + 1 >= lapse {
                others.under_way += get(&slot.under_way);
            }
        }
        others
    }
}
