//! Copies are made and opened each on a task of its own: that may take as long as a device or a key's command takes, and
//! meanwhile others are looked at, whose groups wait for what they are told of the records.
//!
//! Invariants:
//! 1. Of one volume one copy is made or opened at a time, and nothing else is done with it then.
//! 2. [`OPENINGS_MAX`] are at a time, but for those that have taken longer than [`TURN_MAX`]; [`UNDER_WAY_MAX`] with those.
//! 3. That this node has a copy is among the records before there is one
//!    ([`has_copy`](crate::cluster::records::RecordStore::has_copy)).

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hdcs_api::ApiError;
use hdcs_core::replication::record::GroupRecord;
use hdcs_device::DeviceRegion;
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::{FAULT_PERIOD, Known, Replicas, beginning, entry_of, look_at, make_own_copy, with_log};
use crate::cluster::spec::VolumeSpecFile;
use crate::control::node::{MOVE_TIME_MAX, Node, beside, failed, lock};
use crate::shard::command::Command;
use crate::shard::groups::CopySpec;

/// Copies that are made or opened at once: each reads its log through memory of its own.
const OPENINGS_MAX: usize = 8;
/// One that takes longer waits for a device or a key that does not answer, and holds up no other one.
const TURN_MAX: Duration = Duration::from_secs(5);
/// Those that wait so in all, and those that wait for their turn: the memory of all of them is bounded.
const UNDER_WAY_MAX: usize = 64;

/// Turns to make and open copies.
pub(super) struct Turns {
    quick: Semaphore,
    all: Semaphore,
    turn_max: Duration,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            turn_max: TURN_MAX,
            quick: Semaphore::new(OPENINGS_MAX),
            all: Semaphore::new(UNDER_WAY_MAX),
        }
    }

    /// Do something in its turn.
    async fn take<T>(&self, work: impl Future<Output = T>) -> T {
        // Nobody closes them.
        let _place = self.all.acquire().await;
        let turn = self.quick.acquire().await;
        let mut work = pin!(work);
        if let Ok(done) = tokio::time::timeout(self.turn_max, &mut work).await {
            return done;
        }
        drop(turn);
        work.await
    }
}

/// That something is done with a copy that may take long; until this is dropped.
pub(super) struct Busy {
    replicas: Replicas,
    volume: Uuid,
    /// Which one it is of all that there were: of a volume that was forgotten meanwhile there may be another one.
    number: u64,
    forgets: bool,
}

impl Busy {
    /// Nothing else is done with the copy from now on, unless something is.
    pub(super) fn begin(replicas: &Replicas, volume: Uuid) -> Option<Self> {
        let number = replicas.0.busy_count.fetch_add(1, Ordering::Relaxed);
        let is_first = replicas.with(volume, |known| known.be_busy(number));
        is_first.then(|| Self {
            replicas: replicas.clone(),
            volume,
            number,
            forgets: false,
        })
    }

    /// Know nothing of the group any more, from the moment at which something else may be done with it.
    pub(super) const fn forget(&mut self) {
        self.forgets = true;
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut known = lock(&self.replicas.0.known);
        let is_over = known
            .get_mut(&self.volume)
            .is_some_and(|known| known.end_busy(self.number));
        if is_over && self.forgets {
            known.remove(&self.volume);
        }
    }
}

impl Known {
    fn be_busy(&mut self, number: u64) -> bool {
        let is_free = self.busy.is_none();
        self.busy.get_or_insert(number);
        is_free
    }

    /// Returns whether it was this one.
    fn end_busy(&mut self, number: u64) -> bool {
        self.busy.take_if(|busy| *busy == number).is_some()
    }

    /// What is known of a group whose copy is closed, and is being let go of.
    pub(super) fn let_go(&mut self) {
        *self = Self {
            busy: self.busy,
            ..Self::default()
        };
    }
}

/// Whether something is done with a copy that may take long.
pub(super) fn is_busy(replicas: &Replicas, volume: Uuid) -> bool {
    let known = lock(&replicas.0.known);
    known.get(&volume).is_some_and(|known| known.busy.is_some())
}

/// Begin to have this node's copy, if it is time for that.
pub(super) fn begin(
    node: &Arc<Node>,
    replicas: &Replicas,
    spec: &VolumeSpecFile,
    record: &GroupRecord,
) {
    let (volume, now) = (spec.uuid, Instant::now());
    let waits = replicas.with(volume, |known| known.open_at.is_some_and(|at| at > now));
    if waits {
        return;
    }
    let Some(busy) = Busy::begin(replicas, volume) else {
        return;
    };
    let (node, replicas) = (Arc::clone(node), replicas.clone());
    let (spec, record) = (spec.clone(), record.clone());
    tokio::spawn(async move {
        let opening = open(&node, &replicas, &spec, &record);
        let opened = replicas.0.openings.take(opening).await;
        drop(busy);
        let opened = match opened {
            Ok(true) => look_at(&node, &replicas, &spec, &record).await,
            other => other.map(drop),
        };
        if let Err(error) = opened {
            replicas.copy_failed(&spec, &error);
        }
        replicas.look(volume).await;
    });
}

/// Have this node's copy. Returns whether it is open then.
async fn open(
    node: &Node,
    replicas: &Replicas,
    spec: &VolumeSpecFile,
    record: &GroupRecord,
) -> Result<bool, ApiError> {
    let volume = spec.uuid;
    replicas.with(volume, |known| {
        known.open_at = Some(Instant::now() + FAULT_PERIOD);
    });
    let entry = entry_of(node, volume);
    if let Some(entry) = entry.as_ref().filter(|entry| !entry.is_replicated) {
        replicas.with(volume, |known| known.open_at = None);
        beginning::go_on(node, replicas, entry, record).await?;
        return Ok(false);
    }
    let store = replicas.store().clone();
    let log = (entry.as_ref()).map(|entry| entry.log_path(node.setup.layout()));
    let told = beside(move || {
        let has_log = log.is_some_and(|log| log.exists());
        (store.has_copy(volume), has_log)
    });
    match told.await? {
        // It says nothing that was not so before: that the file system is full keeps no copy closed.
        (Err(error), true) => replicas.complain(&error.to_string()),
        (told, _) => told.map_err(|error| failed(error.to_string()))?,
    }
    let entry = match entry {
        Some(entry) => with_log(node, entry, spec).await?,
        None => make_own_copy(node, spec).await?,
    };
    let copy = CopySpec {
        volume,
        log: DeviceRegion {
            path: entry.log_path(node.setup.layout()),
            offset: 0,
            bytes: entry.log.bytes,
        },
        log_number: spec.log,
        ring_blocks: spec.ring_blocks(),
        encryption: entry.encryption.clone(),
    };
    let opened = node.link.ask("opening its copy", MOVE_TIME_MAX, |answer| {
        Command::OpenCopy(Box::new(copy), answer)
    });
    opened.await?;
    replicas.with(volume, |known| {
        known.is_open = true;
        known.open_at = None;
        known.trouble = None;
    });
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn openings_that_hang_hold_up_no_other_one() {
        let turns = Arc::new(Turns {
            turn_max: Duration::from_millis(1),
            ..Turns::new()
        });
        let never_ends = |_| {
            let turns = Arc::clone(&turns);
            tokio::spawn(async move { turns.take(pending::<()>()).await })
        };
        let hung: Vec<_> = (0..OPENINGS_MAX).map(never_ends).collect();
        while turns.all.available_permits() > UNDER_WAY_MAX - OPENINGS_MAX {
            tokio::task::yield_now().await;
        }
        turns.take(async {}).await;
        assert!(hung.iter().all(|one| !one.is_finished()));
        hung.iter().for_each(tokio::task::JoinHandle::abort);
    }

    #[test]
    fn end_of_what_was_done_with_a_forgotten_copy_frees_no_newer_one() {
        let mut known = Known::default();
        assert!(known.be_busy(1) && !known.be_busy(2));
        known.let_go();
        assert!(!known.be_busy(2), "it is still being let go of");
        // The group was forgotten in between, and is known anew.
        known = Known::default();
        assert!(known.be_busy(3));
        assert!(!known.end_busy(1));
        assert!(!known.be_busy(4), "the newer one goes on");
        assert!(known.end_busy(3) && known.be_busy(4));
    }
}
