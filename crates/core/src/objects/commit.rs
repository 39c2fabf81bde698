//! Flushes and manifests.
//!
//! ```text
//!  Waiting ─put if absent─► Putting ─done─► committed
//!     ▲  ▲                   │   └─exists─► Checking ─ours─► committed
//!     │  └──────error────────┘                │  └───not ours──► fenced
//!     └───────────────error, not there────────┘
//! ```
//!
//! One manifest is on its way at a time, and it stays the same until it is known to be there: it
//! may be there already. Its state is that of a flush; what was written since is not in it.
//!
//! Sealed objects have positions, in the order in which they apply. States are told by them, never by the
//! numbers of objects, which are names.

use alloc::vec;
use alloc::vec::Vec;

use super::checkpoint::Checkpoint;
use super::format::{Manifest, MapEntry};
use super::io::{Action, Condition, Kind, Name, StoreError, Stored};
use super::{Flush, ObjectVolume, Purpose, end};
use crate::base::buf::Buf;
use crate::base::io::Done;
use crate::base::limits::{
    OBJECT_MAPS_MAX, OBJECT_NUMBER_MAX, OBJECT_NUMBERS_AHEAD, OBJECT_TAIL_MAX, OBJECT_USAGES_MAX,
};

/// A manifest on its way.
#[derive(Debug)]
pub(super) struct Commit {
    manifest: Manifest,
    data: Buf,
    /// Position of the last object of its state.
    upto: u64,
    changes: u64,
    /// Whether its map is the one that was stored last.
    adopts: bool,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    UnderWay,
}

impl ObjectVolume {
    pub(super) fn pump_commit(&mut self, actions: &mut Vec<Action>) {
        self.end_flushes(actions);
        if self.commit.is_none()
            && let Some(upto) = self.next_commit()
        {
            self.prepare_commit(upto);
        }
        if self.may_try()
            && let Some(commit) = &mut self.commit
            && commit.stage == Stage::Waiting
        {
            commit.stage = Stage::UnderWay;
            let name = Name::own(Kind::Manifest, commit.manifest.sequence);
            let data = vec![commit.data.clone()];
            self.stats.puts_manifest += 1;
            let token = self.issue(Purpose::PutManifest);
            actions.push(Action::Put {
                token,
                name,
                data,
                slot_bytes: 0,
                condition: Condition::IfAbsent,
            });
        }
    }

    /// End the flushes that the newest manifest fulfils.
    fn end_flushes(&mut self, actions: &mut Vec<Action>) {
        let (committed, changes) = (self.committed, self.committed_changes);
        self.flushes.retain(|flush| {
            let there =
                flush.target.is_some_and(|target| target <= committed) && flush.changes <= changes;
            if there && let Some(token) = flush.token {
                end(token, Ok(Done::Written), actions);
            }
            !there
        });
    }

    /// Position of the last object of a state that is worth a manifest, and may have one: that of the latest
    /// flush whose objects are all there.
    fn next_commit(&self) -> Option<u64> {
        let unput = self.batches.values().map(|batch| batch.position);
        let first_unput = unput.min().unwrap_or(u64::MAX);
        let flushed = self.flushes.iter().filter_map(|flush| flush.target);
        let ready = flushed.filter(|&target| {
            target < first_unput
                && (target <= self.committed || !self.must_wait_for_checkpoint(target))
        });
        let adoptable = |upto: u64| self.adoptable(upto).is_some();
        match ready.max() {
            Some(upto) => Some(upto.max(self.committed)),
            // The same state again, with a shorter tail: the next flush would have done it without
            // another manifest, but writes may wait for it.
            None => ((self.tail.len() >= OBJECT_TAIL_MAX || self.has_many_changes())
                && adoptable(self.committed))
            .then_some(self.committed),
        }
    }

    /// The map as it was stored last, if a manifest of this state may name it: more objects than it has room for would
    /// make one that nobody can read.
    fn adoptable(&self, upto: u64) -> Option<(u64, &[MapEntry], &[MapEntry])> {
        match &self.checkpoint {
            Checkpoint::Ready {
                begin,
                maps,
                usages,
            } if *begin <= upto
                && maps.len() <= OBJECT_MAPS_MAX
                && usages.len() <= OBJECT_USAGES_MAX =>
            {
                Some((*begin, maps, usages))
            }
            _ => None,
        }
    }

    fn prepare_commit(&mut self, upto: u64) {
        let (begin, maps, usages) = if let Some((begin, maps, usages)) = self.adoptable(upto) {
            (Some(begin), maps.to_vec(), usages.to_vec())
        } else {
            let manifest = &self.manifest;
            (None, manifest.maps.clone(), manifest.usages.clone())
        };
        let tail = self.tail.iter().filter(|tail| {
            tail.position <= upto && begin.is_none_or(|begin| tail.position > begin)
        });
        let tail = tail.map(|tail| tail.entry).collect();
        let flushed = self.flushes.iter();
        let flushed = flushed.filter(|flush| flush.target.is_some_and(|target| target <= upto));
        let bytes = flushed.filter_map(|flush| flush.bytes).next_back();
        let manifest = Manifest {
            begins: false,
            gone: self.gone,
            nonce: self.config.nonce,
            sequence: self.manifest.sequence + 1,
            number_limit: (self.next_number + OBJECT_NUMBERS_AHEAD).min(OBJECT_NUMBER_MAX),
            bytes: bytes.unwrap_or(self.manifest.bytes),
            own_map: self.manifest.own_map || (begin.is_some() && self.own_first() > 0),
            maps,
            usages,
            tail,
            snapshots: self.snapshots.clone(),
            ..self.manifest.clone()
        };
        let Some(data) = self.encode(&manifest) else {
            return;
        };
        self.commit = Some(Commit {
            manifest,
            data,
            upto,
            changes: self.changes,
            adopts: begin.is_some(),
            stage: Stage::Waiting,
        });
    }

    /// The bytes of a manifest; `None` if there is no memory for them at present.
    pub(super) fn encode(&self, manifest: &Manifest) -> Option<Buf> {
        let mut data = self.control_pool.alloc(manifest.encoded_bytes())?;
        manifest.write(&mut data);
        Some(data.freeze())
    }

    pub(super) fn put_manifest_ended(
        &mut self,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        match result {
            Ok(_) => self.committed_now(actions),
            Err(StoreError::Exists) => self.check_manifest(actions),
            Err(error) => {
                self.wait_with_commit();
                self.fail_waiting(error.as_io(), actions);
            }
        }
    }

    fn wait_with_commit(&mut self) {
        if let Some(commit) = &mut self.commit {
            commit.stage = Stage::Waiting;
        }
    }

    /// There is a manifest of that number: read it, to see whose it is.
    fn check_manifest(&mut self, actions: &mut Vec<Action>) {
        let Some(commit) = &self.commit else {
            return;
        };
        let name = Name::own(Kind::Manifest, commit.manifest.sequence);
        let Some(buf) = self.control_pool.alloc(commit.data.len()) else {
            // The put will find it there again.
            return self.wait_with_commit();
        };
        self.stats.gets += 1;
        let token = self.issue(Purpose::CheckManifest);
        actions.push(Action::Get {
            token,
            name,
            offset: 0,
            slots: false,
            buf,
        });
    }

    pub(super) fn check_manifest_ended(
        &mut self,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let Some(commit) = &self.commit else {
            return;
        };
        match result {
            Ok(Stored::Read(buf)) if buf[..] == commit.data[..] => self.committed_now(actions),
            Ok(Stored::Read(buf)) if Manifest::parse(&buf).is_ok() => self.fence(actions),
            // Longer than ours, or damaged on the way.
            Ok(_) => self.check_length(actions),
            Err(StoreError::Short) => self.fence(actions),
            Err(StoreError::NotFound) => self.wait_with_commit(),
            Err(error) => {
                self.wait_with_commit();
                self.fail_waiting(error.as_io(), actions);
            }
        }
    }

    fn check_length(&mut self, actions: &mut Vec<Action>) {
        self.stats.lists += 1;
        let token = self.issue(Purpose::CheckLength);
        actions.push(Action::List {
            token,
            volume: 0,
            prefix: Kind::Manifest.prefix(),
            after: alloc::format!("{}", Name::own(Kind::Manifest, self.manifest.sequence)),
        });
    }

    /// A manifest of another length is not ours.
    pub(super) fn check_length_ended(
        &mut self,
        result: Result<Stored, StoreError>,
        actions: &mut Vec<Action>,
    ) {
        let Some(commit) = &self.commit else {
            return;
        };
        let (number, length) = (commit.manifest.sequence, commit.data.len() as u64);
        let Ok(Stored::Listed { objects, .. }) = result else {
            self.wait_with_commit();
            return self.back_off();
        };
        let name = Name::own(Kind::Manifest, number);
        let found = objects
            .iter()
            .find(|object| Name::parse(&object.name) == Some(name));
        if found.is_some_and(|object| object.bytes != length) {
            return self.fence(actions);
        }
        // The put will find it there again, and it is read again.
        self.wait_with_commit();
    }

    /// The manifest that was on its way is there.
    fn committed_now(&mut self, actions: &mut Vec<Action>) {
        let Some(commit) = self.commit.take() else {
            return;
        };
        self.went_well();
        self.again = true;
        if !self.manifest.begins {
            let before = Name::own(Kind::Manifest, self.manifest.sequence);
            self.deletes.push_back(before);
        }
        self.manifest = commit.manifest;
        self.committed = commit.upto;
        self.committed_changes = commit.changes;
        if commit.adopts {
            self.adopt();
        }
        self.end_flushes(actions);
        self.bury();
        self.consider_collecting();
    }

    /// Have the committed state committed again.
    pub(super) fn recommit(&mut self) {
        if self.flushes.iter().all(|flush| flush.token.is_some()) {
            self.commit_change();
        }
    }

    /// Have something other than data committed.
    pub(super) fn commit_change(&mut self) {
        self.changes += 1;
        self.flushes.push_back(Flush {
            token: None,
            target: Some(self.committed),
            changes: self.changes,
            bytes: None,
        });
        self.again = true;
    }
}
