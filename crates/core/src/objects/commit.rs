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
//! States are told by the positions of sealed objects ([`super::tail`]), and by counting the changes other than of data.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

use super::batch::Batch;
use super::checkpoint::Checkpoint;
use super::end;
use super::format::{Manifest, Snapshot};
use super::io::{Action, Condition, Kind, Name, StoreError, Stored};
use super::port::{Context, Port, Purpose};
use super::tail::Tail;
use crate::base::buf::Buf;
use crate::base::error::IoError;
use crate::base::io::{Done, Token};
use crate::base::limits::{OBJECT_NUMBER_MAX, OBJECT_NUMBERS_AHEAD};

/// Something that ends when a manifest with all before it is there.
#[derive(Debug)]
struct Flush {
    /// Nobody waits for an internal one.
    token: Option<Token>,
    /// Position of the last object that it is about; not known before what is gathered is sealed.
    target: Option<u64>,
    /// Changes other than of data that it is about.
    changes: u64,
    /// The size that the volume has from there on, if that changes.
    bytes: Option<u64>,
}

/// A manifest on its way.
#[derive(Debug)]
struct Commit {
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

/// What came of a step of the manifest on its way.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It goes on.
    Pending,
    /// It is there: [`Commits::take_committed`].
    Committed,
    /// The next manifest is of another owner.
    Fenced,
    /// The store failed.
    Failed(IoError),
}

/// What manifests are made of.
#[derive(Debug)]
pub(super) struct State<'a> {
    pub(super) batches: &'a BTreeMap<u64, Batch>,
    pub(super) tail: &'a Tail,
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) snapshots: &'a [Snapshot],
    /// Whether the volume is given up.
    pub(super) gone: bool,
    /// Whether writes may soon wait for a shorter tail.
    pub(super) has_many_changes: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Commits {
    /// Tells this owner's manifests from those of others.
    nonce: u64,
    /// Size of the volume, as of what was accepted last.
    bytes: u64,
    /// Position of the last object of the state of the newest manifest.
    committed: u64,
    /// And of the last one that is in the pages of its map.
    adopted: u64,
    /// Changes other than of data that it has, and that there are.
    committed_changes: u64,
    changes: u64,
    /// The number of the next object.
    next_number: u64,
    flushes: VecDeque<Flush>,
    under_way: Option<Commit>,
}

impl Commits {
    /// Of an owner with this nonce, whose volume is not open yet.
    pub(super) fn new(nonce: u64) -> Self {
        Self {
            nonce,
            bytes: 0,
            committed: 0,
            adopted: 0,
            committed_changes: 0,
            changes: 0,
            next_number: 0,
            flushes: VecDeque::new(),
            under_way: None,
        }
    }

    /// The size is known.
    pub(super) fn taken_over(&mut self, manifest: &Manifest) {
        self.bytes = manifest.bytes;
        self.next_number = manifest.number_first;
    }

    /// The tail is replayed up to this position.
    pub(super) fn opened(&mut self, last: u64) {
        self.committed = last;
    }

    /// Size of the volume, as of what was accepted last.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Position of the last object of the state of the newest manifest.
    pub(super) fn committed(&self) -> u64 {
        self.committed
    }

    /// Position of the last object that is in the pages of its map.
    pub(super) fn adopted(&self) -> u64 {
        self.adopted
    }

    /// Changes other than of data that there are.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Whether so many changes other than of data are committed.
    pub(super) fn has_committed(&self, changes: u64) -> bool {
        changes <= self.committed_changes
    }

    /// Whether a manifest is on its way.
    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Whether there is nothing to be committed.
    pub(super) fn has_no_flush(&self) -> bool {
        self.flushes.is_empty()
    }

    /// Whether nobody waits for a flush.
    pub(super) fn is_idle(&self) -> bool {
        self.flushes.iter().all(|flush| flush.token.is_none())
    }

    /// The number of the next object; `None` if a manifest of the state that is committed has to allow more of them first.
    pub(super) fn next_number(&mut self, newest: &Manifest, port: &mut Port) -> Option<u64> {
        if self.next_number < newest.number_limit {
            return Some(self.next_number);
        }
        if self.flushes.iter().all(|flush| flush.token.is_some()) {
            self.commit_change(port);
        }
        None
    }

    /// That number is used.
    pub(super) fn use_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    /// Something is to end when a manifest with everything up to `target` is there; `None`: with what is gathered now.
    pub(super) fn flush(&mut self, token: Option<Token>, target: Option<u64>, port: &mut Port) {
        self.flushes.push_back(Flush {
            token,
            target,
            changes: self.changes,
            bytes: None,
        });
        port.again = true;
    }

    /// The size changes, after what [`Self::flush`] would be about.
    pub(super) fn resize(
        &mut self,
        token: Token,
        bytes: u64,
        target: Option<u64>,
        port: &mut Port,
    ) {
        self.bytes = bytes;
        self.changes += 1;
        self.flush(Some(token), target, port);
        if let Some(flush) = self.flushes.back_mut() {
            flush.bytes = Some(bytes);
        }
    }

    /// Have something other than data committed.
    pub(super) fn commit_change(&mut self, port: &mut Port) {
        self.changes += 1;
        self.flush(None, Some(self.committed), port);
    }

    /// Everything that was gathered is in objects up to a position.
    pub(super) fn sealed(&mut self, last: u64) {
        for flush in &mut self.flushes {
            flush.target.get_or_insert(last);
        }
    }

    /// End the flushes that somebody waits for with an error.
    pub(super) fn fail_flushes(&mut self, error: IoError, actions: &mut Vec<Action>) {
        self.flushes.retain_mut(|flush| match flush.token.take() {
            Some(token) => {
                end(token, Err(error), actions);
                // A size that was taken on is committed all the same.
                flush.bytes.is_some()
            }
            None => true,
        });
    }

    /// Nothing is committed any more.
    pub(super) fn clear(&mut self) {
        self.flushes.clear();
        self.under_way = None;
    }

    /// Put the next manifest, if there is one to be put.
    pub(super) fn pump(&mut self, of: &State<'_>, cx: &mut Context<'_>) {
        self.end_flushes(cx.actions);
        if self.under_way.is_none()
            && let Some(upto) = self.next(of)
        {
            self.under_way = self.prepare(upto, of, cx);
        }
        if cx.port.may_try()
            && let Some(commit) = &mut self.under_way
            && commit.stage == Stage::Waiting
        {
            commit.stage = Stage::UnderWay;
            let name = Name::own(Kind::Manifest, commit.manifest.sequence);
            let data = vec![commit.data.clone()];
            cx.port.stats.puts_manifest += 1;
            let token = cx.port.issue(Purpose::PutManifest);
            cx.actions.push(Action::Put {
                token,
                name,
                data,
                slot_bytes: 0,
                condition: Condition::IfAbsent,
            });
        }
    }

    /// End the flushes that the newest manifest fulfils.
    pub(super) fn end_flushes(&mut self, actions: &mut Vec<Action>) {
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
    fn next(&self, of: &State<'_>) -> Option<u64> {
        let unput = of.batches.values().map(|batch| batch.position);
        let first_unput = unput.min().unwrap_or(u64::MAX);
        let flushed = self.flushes.iter().filter_map(|flush| flush.target);
        let ready = flushed.filter(|&target| {
            target < first_unput
                && (target <= self.committed || !of.checkpoint.must_precede(target, of.tail))
        });
        match ready.max() {
            Some(upto) => Some(upto.max(self.committed)),
            // The same state again, with a shorter tail: the next flush would have done it without
            // another manifest, but writes may wait for it.
            None => ((of.tail.is_full() || of.has_many_changes)
                && of.checkpoint.adoptable(self.committed).is_some())
            .then_some(self.committed),
        }
    }

    /// A manifest of the state up to a position; `None` if there is no memory for it at present.
    fn prepare(&self, upto: u64, of: &State<'_>, cx: &Context<'_>) -> Option<Commit> {
        let newest = cx.manifest;
        let (begin, maps, usages) = match of.checkpoint.adoptable(upto) {
            Some((begin, maps, usages)) => (Some(begin), maps.to_vec(), usages.to_vec()),
            None => (None, newest.maps.clone(), newest.usages.clone()),
        };
        let tail = of.tail.iter().filter(|sealed| {
            sealed.position <= upto && begin.is_none_or(|begin| sealed.position > begin)
        });
        let tail = tail.map(|sealed| sealed.entry).collect();
        let flushed = self.flushes.iter();
        let flushed = flushed.filter(|flush| flush.target.is_some_and(|target| target <= upto));
        let bytes = flushed.filter_map(|flush| flush.bytes).next_back();
        let manifest = Manifest {
            begins: false,
            gone: of.gone,
            nonce: self.nonce,
            sequence: newest.sequence + 1,
            number_limit: (self.next_number + OBJECT_NUMBERS_AHEAD).min(OBJECT_NUMBER_MAX),
            bytes: bytes.unwrap_or(newest.bytes),
            own_map: newest.own_map || (begin.is_some() && newest.own_first() > 0),
            maps,
            usages,
            tail,
            snapshots: of.snapshots.to_vec(),
            ..newest.clone()
        };
        let data = cx.port.encode(&manifest)?;
        Some(Commit {
            manifest,
            data,
            upto,
            changes: self.changes,
            adopts: begin.is_some(),
            stage: Stage::Waiting,
        })
    }

    pub(super) fn put_ended(
        &mut self,
        result: Result<Stored, StoreError>,
        cx: &mut Context<'_>,
    ) -> Outcome {
        match result {
            Ok(_) => Outcome::Committed,
            Err(StoreError::Exists) => {
                self.check(cx);
                Outcome::Pending
            }
            Err(error) => {
                self.wait();
                Outcome::Failed(error.as_io())
            }
        }
    }

    fn wait(&mut self) {
        if let Some(commit) = &mut self.under_way {
            commit.stage = Stage::Waiting;
        }
    }

    /// There is a manifest of that number: read it, to see whose it is.
    fn check(&mut self, cx: &mut Context<'_>) {
        let Some(commit) = &self.under_way else {
            return;
        };
        let name = Name::own(Kind::Manifest, commit.manifest.sequence);
        let Some(buf) = cx.port.control_pool.alloc(commit.data.len()) else {
            // The put will find it there again.
            return self.wait();
        };
        cx.port.stats.gets += 1;
        let token = cx.port.issue(Purpose::CheckManifest);
        cx.actions.push(Action::Get {
            token,
            name,
            offset: 0,
            slots: false,
            buf,
        });
    }

    pub(super) fn check_ended(
        &mut self,
        result: Result<Stored, StoreError>,
        cx: &mut Context<'_>,
    ) -> Outcome {
        let Some(commit) = &self.under_way else {
            return Outcome::Pending;
        };
        match result {
            Ok(Stored::Read(buf)) if buf[..] == commit.data[..] => return Outcome::Committed,
            Ok(Stored::Read(buf)) if Manifest::parse(&buf).is_ok() => return Outcome::Fenced,
            // Longer than ours, or damaged on the way.
            Ok(_) => {
                let sequence = cx.manifest.sequence;
                (cx.port).list_manifests(Purpose::CheckLength, sequence, cx.actions);
            }
            Err(StoreError::Short) => return Outcome::Fenced,
            Err(StoreError::NotFound) => self.wait(),
            Err(error) => {
                self.wait();
                return Outcome::Failed(error.as_io());
            }
        }
        Outcome::Pending
    }

    /// A manifest of another length is not ours.
    pub(super) fn length_ended(
        &mut self,
        result: Result<Stored, StoreError>,
        port: &mut Port,
    ) -> Outcome {
        let Some(commit) = &self.under_way else {
            return Outcome::Pending;
        };
        let (number, length) = (commit.manifest.sequence, commit.data.len() as u64);
        let Ok(Stored::Listed { objects, .. }) = result else {
            self.wait();
            port.back_off();
            return Outcome::Pending;
        };
        let name = Name::own(Kind::Manifest, number);
        let found = objects
            .iter()
            .find(|object| Name::parse(&object.name) == Some(name));
        if found.is_some_and(|object| object.bytes != length) {
            return Outcome::Fenced;
        }
        // The put will find it there again, and it is read again.
        self.wait();
        Outcome::Pending
    }

    /// The manifest that was on its way is there: it, and whether its map is the one that was stored last.
    pub(super) fn take_committed(&mut self) -> Option<(Manifest, bool)> {
        let commit = self.under_way.take()?;
        self.committed = commit.upto;
        self.committed_changes = commit.changes;
        Some((commit.manifest, commit.adopts))
    }

    /// The newest manifest has everything up to this position in the pages of its map.
    pub(super) fn adopt(&mut self, begin: u64) {
        self.adopted = begin;
    }
}
