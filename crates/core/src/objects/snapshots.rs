//! Snapshots: kept copies of manifests. And giving a volume up, which looks for clones as forgetting
//! a snapshot does.
//!
//! ```text
//!  make     Idle ─► Putting ─copy is there─► Listing ─manifest names it─► Idle
//!  forget   Idle ─► Unlisting ─manifest names it no more─► Unpinning ─clones are known─► Idle
//!  give up  Idle ─► Looking ─there is no clone─► Marking ─manifest says so─► Releasing ─► Idle
//! ```
//!
//! A snapshot is of the state of the newest manifest, which is that of a flush: what was written
//! since is not in it. It counts when a manifest names it: what an owner of before puts late is
//! nothing. It pins every number below its own: objects that were there when it was made stay,
//! whatever becomes of them later. A clone puts a reference with the same pin, then looks whether the
//! snapshot is still named. Whoever forgets a snapshot lists the references afterwards, before
//! anything is removed; so one of the two sees the other.
//!
//! A clone that is given up says so in a manifest, which stays; only then is the reference removed
//! that it left with its parent. So whoever opens its place later never reads what the parent may
//! have removed since, and ends the removal if it was interrupted (see `open.rs`). A volume with
//! snapshots or clones is not given up: they need what it needs of its parent. Without snapshots no
//! new clone of it comes to be. From Marking on it takes no writes or flushes any more, whatever
//! becomes of the request: nobody would ever read them. A request that fails there may still have
//! given it up; the same request goes on with that.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use super::ObjectVolume;
use super::format::{Manifest, Snapshot};
use super::io::{Action, Condition, Kind, Name, SnapshotError, SnapshotName, StoreError, Stored};
use super::port::Purpose;
use crate::base::error::IoError;
use crate::base::io::Token;
use crate::base::limits::OBJECT_SNAPSHOTS_MAX;

/// Something that was asked for about a snapshot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) token: Token,
    what: What,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Make { name: SnapshotName, made_ms: u64 },
    Forget { name: SnapshotName },
    GiveUp,
}

/// Which part of it was asked of the store.
#[derive(Debug)]
pub(super) enum Part {
    Put,
    Release,
}

/// How far the request at the front is.
#[derive(Debug)]
pub(super) enum Stage {
    Idle,
    Putting {
        snapshot: Snapshot,
        manifest: Box<Manifest>,
        in_flight: bool,
    },
    Listing {
        snapshot: Snapshot,
        changes: u64,
    },
    Unlisting {
        snapshot: Snapshot,
        changes: u64,
    },
    Unpinning {
        snapshot: Snapshot,
    },
    Looking,
    Marking {
        changes: u64,
    },
    Releasing {
        in_flight: bool,
    },
}

impl Stage {
    /// What has to stay for its sake.
    pub(super) fn pin(&self) -> u64 {
        match self {
            Self::Idle | Self::Looking | Self::Marking { .. } | Self::Releasing { .. } => 0,
            Self::Putting { snapshot, .. }
            | Self::Listing { snapshot, .. }
            | Self::Unlisting { snapshot, .. }
            | Self::Unpinning { snapshot } => snapshot.pin,
        }
    }
}

impl ObjectVolume {
    pub(super) fn begin_snapshot(&mut self, token: Token, what: What) {
        let request = Request { token, what };
        self.snapshot_requests.push_back(request);
    }

    pub(super) fn pump_snapshots(&mut self, actions: &mut Vec<Action>) {
        match &self.snapshot_stage {
            Stage::Idle => {
                if let Some(&request) = self.snapshot_requests.front()
                    && let Err(error) = self.begin_next(request)
                {
                    self.end_snapshot(Err(error), actions);
                }
            }
            Stage::Putting { in_flight, .. } => {
                if !in_flight {
                    self.put_snapshot(actions);
                }
            }
            Stage::Listing { changes, .. } => {
                if self.commits.has_committed(*changes) {
                    self.end_snapshot(Ok(()), actions);
                }
            }
            &Stage::Unlisting { snapshot, changes } => {
                if self.commits.has_committed(changes) {
                    self.scan.again_for_clones();
                    self.snapshot_stage = Stage::Unpinning { snapshot };
                    self.port.again = true;
                }
            }
            &Stage::Unpinning { snapshot } => {
                if self.scan.knows_clones() {
                    let name = Name::own(Kind::Snapshot, snapshot.number);
                    if snapshot.number >= self.manifest.own_first() {
                        self.deletions.push(name);
                    }
                    self.end_snapshot(Ok(()), actions);
                    self.bury();
                    self.consider_collecting();
                }
            }
            Stage::Looking => {
                if self.scan.knows_clones() {
                    if self.clone_pin > 0 {
                        return self.end_snapshot(Err(SnapshotError::HasClones), actions);
                    }
                    self.gone = true;
                    self.end_waiting(IoError::Failed, actions);
                    self.commits.commit_change(&mut self.port);
                    let changes = self.commits.changes();
                    self.snapshot_stage = Stage::Marking { changes };
                }
            }
            &Stage::Marking { changes } => {
                if self.commits.has_committed(changes) {
                    self.snapshot_stage = Stage::Releasing { in_flight: false };
                    self.port.again = true;
                }
            }
            &Stage::Releasing { in_flight } => {
                if !in_flight && self.port.may_try() {
                    self.unrefer(actions);
                }
            }
        }
    }

    /// Remove the reference that this clone left with its parent.
    fn unrefer(&mut self, actions: &mut Vec<Action>) {
        let Some(name) = self.manifest.reference_name() else {
            return self.end_snapshot(Ok(()), actions);
        };
        self.snapshot_stage = Stage::Releasing { in_flight: true };
        self.port.stats.deletes += 1;
        let token = self.port.issue(Purpose::Snapshots(Part::Release));
        actions.push(Action::Delete { token, name });
    }

    fn begin_next(&mut self, request: Request) -> Result<(), SnapshotError> {
        let find = |name| self.snapshots.iter().position(|s| s.name == name);
        match request.what {
            What::Make { name, made_ms } => {
                if find(name).is_some() {
                    return Err(SnapshotError::Exists);
                }
                if self.gone {
                    return Err(SnapshotError::ReadOnly);
                }
                if self.snapshots.len() >= OBJECT_SNAPSHOTS_MAX {
                    return Err(SnapshotError::TooMany);
                }
                self.take_snapshot(name, made_ms);
            }
            What::Forget { name } => {
                let index = find(name).ok_or(SnapshotError::NotFound)?;
                let snapshot = self.snapshots.remove(index);
                self.commits.commit_change(&mut self.port);
                self.snapshot_stage = Stage::Unlisting {
                    snapshot,
                    changes: self.commits.changes(),
                };
            }
            What::GiveUp if self.gone => {
                self.snapshot_stage = Stage::Marking {
                    changes: self.commits.changes(),
                };
            }
            What::GiveUp => {
                if !self.snapshots.is_empty() || !self.manifest.snapshots.is_empty() {
                    return Err(SnapshotError::HasSnapshots);
                }
                self.scan.again_for_clones();
                self.snapshot_stage = Stage::Looking;
            }
        }
        self.port.again = true;
        Ok(())
    }

    /// The state to keep is that of the newest manifest, now.
    fn take_snapshot(&mut self, name: SnapshotName, made_ms: u64) {
        let number = self.commits.use_number();
        let manifest = Box::new(self.manifest.clone());
        let snapshot = Snapshot {
            name,
            number,
            pin: number + 1,
            bytes: manifest.encoded_bytes() as u32,
            made_ms,
        };
        self.snapshot_stage = Stage::Putting {
            snapshot,
            manifest,
            in_flight: false,
        };
    }

    fn put_snapshot(&mut self, actions: &mut Vec<Action>) {
        let Stage::Putting {
            snapshot, manifest, ..
        } = &self.snapshot_stage
        else {
            return;
        };
        let name = Name::own(Kind::Snapshot, snapshot.number);
        let Some(data) = self.port.encode(manifest) else {
            return;
        };
        let data = vec![data];
        self.port.stats.puts_other += 1;
        let token = self.port.issue(Purpose::Snapshots(Part::Put));
        actions.push(Action::Put {
            token,
            name,
            data,
            slot_bytes: 0,
            condition: Condition::Always,
        });
        if let Stage::Putting { in_flight, .. } = &mut self.snapshot_stage {
            *in_flight = true;
        }
    }

    pub(super) fn snapshots_ended(
        &mut self,
        part: Part,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        if let Part::Release = part {
            return match result {
                Ok(_) => self.end_snapshot(Ok(()), actions),
                Err(error) => self.fail_waiting(error.as_io(), actions),
            };
        }
        let Stage::Putting { snapshot, .. } = self.snapshot_stage else {
            return;
        };
        match result {
            Ok(_) => {
                self.snapshots.push(snapshot);
                self.commits.commit_change(&mut self.port);
                self.snapshot_stage = Stage::Listing {
                    snapshot,
                    changes: self.commits.changes(),
                };
            }
            Err(error) => {
                // No manifest will ever name it.
                self.deletions
                    .push(Name::own(Kind::Snapshot, snapshot.number));
                self.fail_waiting(error.as_io(), actions);
            }
        }
    }

    /// The store fails: a snapshot that is not named by a manifest on its way is given up. Whoever gives the volume
    /// up hears of it, and the manifest stays on its way.
    pub(super) fn snapshot_failed(&mut self, error: IoError, actions: &mut Vec<Action>) {
        match self.snapshot_stage {
            Stage::Putting {
                in_flight: true, ..
            }
            | Stage::Releasing { in_flight: true }
                if !self.has_snapshot_in_flight() =>
            {
                self.end_snapshot(Err(error.into()), actions);
            }
            Stage::Marking { .. } => self.end_snapshot(Err(error.into()), actions),
            _ => {}
        }
    }

    fn has_snapshot_in_flight(&self) -> bool {
        (self.port.under_way()).any(|purpose| matches!(purpose, Purpose::Snapshots(_)))
    }

    fn end_snapshot(&mut self, result: Result<(), SnapshotError>, actions: &mut Vec<Action>) {
        self.snapshot_stage = Stage::Idle;
        self.port.again = true;
        if let Some(request) = self.snapshot_requests.pop_front() {
            actions.push(Action::SnapshotEnd {
                token: request.token,
                result,
            });
        }
    }
}

/// The number of the reference of a clone.
pub(super) fn clone_number(clone: &[u8; 16]) -> u64 {
    let first = clone.iter().take(size_of::<u64>());
    first.fold(0, |number, &byte| number << 8 | u64::from(byte))
}
