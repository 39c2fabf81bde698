//! Direct writes that wait for one another.
//!
//! Invariant: a write is ready once no earlier one overlaps it, so that they go to the backend in the order of arrival
//! wherever that shows. Both steps look at each other write once, not at each pair of them.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::base::buf::Buf;
use crate::base::error::RequestError;
use crate::base::io::{Action, RequestId, SectorRange};
use crate::base::limits::SECTOR_BYTES;
use crate::base::work::Work;
use crate::cache::Barrier;
use crate::volume::Context;
use crate::volume::op::Op;
use crate::volume::port::{Kind, Port};

#[derive(Debug)]
pub(super) enum What {
    Data(Buf),
    Zero { unmap: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteStage {
    /// An earlier one overlaps it, or enough are under way.
    Waiting,
    /// The cache makes durable that it has forgotten the range, and the log that such writes began.
    Preparing(Barrier),
    /// The backend has it.
    Submitted,
}

/// A direct write that has not ended.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) id: RequestId,
    pub(super) kind: Kind,
    pub(super) range: SectorRange,
    pub(super) what: What,
    pub(super) fua: bool,
    stage: WriteStage,
    /// Earlier ones that overlap it and have not ended.
    blockers: usize,
}

impl Write {
    /// A write that waits for its turn.
    pub(super) fn new(
        id: RequestId,
        kind: Kind,
        range: SectorRange,
        what: What,
        fua: bool,
    ) -> Self {
        Self {
            id,
            kind,
            range,
            what,
            fua,
            stage: WriteStage::Waiting,
            blockers: 0,
        }
    }
}

/// Direct writes that have not ended.
#[derive(Debug, Default)]
pub(super) struct DirectWrites {
    /// By order of arrival.
    writes: BTreeMap<u64, Write>,
    next: u64,
    /// Of them, those that wait for nothing but their turn.
    ready: BTreeSet<u64>,
    /// Those that do not wait.
    started: usize,
    /// Looks at other writes.
    work: Work,
}

impl DirectWrites {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// Whether one does not wait for its turn.
    pub(super) fn has_started(&self) -> bool {
        self.started > 0
    }

    /// Whether a write overlaps a range and has not ended.
    pub(super) fn overlaps(&self, range: SectorRange) -> bool {
        let mut writes = self.writes.values();
        writes.any(|write| write.range.overlaps(range))
    }

    /// Whether what is fetched of a range now may be replaced before it comes.
    pub(super) fn is_changing(&self, range: SectorRange) -> bool {
        let mut writes = self.writes.values();
        self.started > 0
            && writes.any(|write| write.stage != WriteStage::Waiting && write.range.overlaps(range))
    }

    /// What those cover that do not wait for their turn.
    pub(super) fn ranges_under_way(&self) -> impl Iterator<Item = SectorRange> {
        let started = |write: &&Write| write.stage != WriteStage::Waiting;
        let under_way = self.writes.values().filter(started);
        under_way.map(|write| write.range)
    }

    /// What was looked at so far, where that is counted.
    pub(super) fn work(&self) -> u64 {
        self.work.units()
    }

    /// What taking a write costs: it is compared with all that have not ended.
    pub(in crate::volume) fn push_looks(&self) -> usize {
        1 + self.writes.len()
    }

    /// Take a write behind all others. It is ready if it overlaps none of them.
    pub(super) fn push(&mut self, mut write: Write) {
        self.work.add(self.writes.len() as u64);
        let others = self.writes.values();
        let overlaps = |other: &&Write| other.range.overlaps(write.range);
        write.blockers = others.filter(overlaps).count();
        let number = self.next;
        self.next += 1;
        if write.blockers == 0 {
            self.ready.insert(number);
        }
        self.writes.insert(number, write);
    }

    /// A write that was started has ended: those that waited for nothing else are ready.
    pub(super) fn pop(&mut self, number: u64) -> Write {
        let write = self.writes.remove(&number).expect("it was started");
        self.started -= 1;
        self.work.add(self.writes.len() as u64);
        for (&number, later) in self.writes.range_mut(number..) {
            if later.range.overlaps(write.range) {
                later.blockers -= 1;
                if later.blockers == 0 {
                    self.ready.insert(number);
                }
            }
        }
        write
    }

    /// Start the next one that waits for nothing but its turn, if fewer than so many are under way.
    pub(super) fn start_next(&mut self, started_max: usize) -> Option<(u64, SectorRange)> {
        if self.started >= started_max {
            return None;
        }
        let number = self.ready.pop_first()?;
        self.started += 1;
        Some((number, self.writes[&number].range))
    }

    /// It waits until the cache has forgotten its range, and the log says that such writes began.
    pub(super) fn prepare(&mut self, number: u64, barrier: Barrier) {
        self.set_stage(number, WriteStage::Preparing(barrier));
    }

    /// Those that are prepared, once the cache has forgotten so much.
    pub(super) fn prepared(&self, persisted: Barrier) -> Vec<u64> {
        let forgotten = |write: &Write| matches!(write.stage, WriteStage::Preparing(barrier) if barrier <= persisted);
        let writes = self.writes.iter();
        writes
            .filter(|(_, write)| forgotten(write))
            .map(|(&number, _)| number)
            .collect()
    }

    fn set_stage(&mut self, number: u64, stage: WriteStage) {
        let write = self.writes.get_mut(&number);
        write.expect("it has not ended").stage = stage;
    }

    /// Give one to the backend.
    pub(super) fn submit(&mut self, number: u64, port: &mut Port, cx: &mut Context<'_>) {
        self.set_stage(number, WriteStage::Submitted);
        let token = port.begin(Op::DirectWrite { number });
        let write = &self.writes[&number];
        let offset = write.range.byte_offset();
        cx.actions.push(match &write.what {
            What::Data(data) => Action::BackendWrite {
                token,
                offset,
                data: Vec::from([data.clone()]),
            },
            What::Zero { unmap } => Action::BackendZero {
                token,
                offset,
                bytes: write.range.count * SECTOR_BYTES as u64,
                unmap: *unmap,
            },
        });
    }

    /// Refuse those that the backend was not given yet.
    pub(super) fn refuse_unsubmitted(
        &mut self,
        error: RequestError,
        port: &mut Port,
        cx: &mut Context<'_>,
    ) {
        let submitted = |write: &Write| write.stage == WriteStage::Submitted;
        let writes = core::mem::take(&mut self.writes);
        let (kept, refused): (BTreeMap<_, _>, BTreeMap<_, _>) =
            writes.into_iter().partition(|(_, write)| submitted(write));
        self.started = kept.len();
        self.writes = kept;
        self.ready.clear();
        for write in refused.into_values() {
            port.reply(write.id, write.kind, Err(error), cx);
        }
    }

    /// Assert what must always hold.
    pub(super) fn check(&self, is_marked: bool) {
        let started = |write: &&Write| write.stage != WriteStage::Waiting;
        assert_eq!(
            self.writes.values().filter(started).count(),
            self.started,
            "direct writes under way are counted"
        );
        let waits = |write: &Write| write.stage == WriteStage::Waiting && write.blockers == 0;
        let ready = self.writes.iter().filter(|(_, write)| waits(write));
        assert!(ready.map(|(number, _)| number).eq(&self.ready));
        let submitted = |write: &Write| write.stage == WriteStage::Submitted;
        assert!(
            is_marked || !self.writes.values().any(submitted),
            "the log says that writes go past it"
        );
    }
}
