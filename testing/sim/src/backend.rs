//! A backend with a volatile cache, which may lose its host's power on its own.
//!
//! 1. A write is visible when it completes and durable after a flush that began later succeeded.
//! 2. Power loss keeps or loses each sector of what was not durable, and of what is in flight.
//!    The first flush after a loss fails, if it would otherwise claim what is gone.
//! 3. A failed flush leaves each unflushed sector durable, volatile, or lost.
//! 4. A read that races a write sees old or new, sector by sector; a failed write leaves either.
//! 5. An atomic one holds what is written beside what it has, where its client sees it; a flush makes
//!    all of it durable at once, or nothing. One that failed has done so, has not, has lost it, or
//!    takes effect later, but before any other. With the power or the client, all that is beside is
//!    gone. A change of size is a flush.
//!
//! Sectors are kept as [`Content`]: whoever submits a write decodes it first, so that garbage never
//! gets this far. Times and failures are decided by whoever drives it.

use std::collections::BTreeMap;

use fastrand::Rng;
use hdcs_core::base::io::{Extent, ExtentState, SectorRange};
use hdcs_core::base::limits::SECTOR_BYTES;

use crate::content::Content;
use crate::disk::OpId;

#[derive(Debug)]
enum Op {
    Read(SectorRange),
    Write(SectorRange, Vec<Content>),
    Zero(SectorRange, bool),
    Flush { before: u64 },
}

/// One raw image with a cache in front.
#[derive(Debug)]
pub struct Backend {
    volume: u32,
    durable: Vec<Content>,
    /// Sectors written since, with the sequence number of each write; the last one is visible.
    volatile: BTreeMap<u64, Vec<(u64, Content)>>,
    /// Whether a sector's space is allocated.
    allocated: Vec<bool>,
    ops: BTreeMap<OpId, Op>,
    next_op: OpId,
    sequence: u64,
    /// Something that completed was lost, and no flush has failed since.
    lost: bool,
    /// Whether what is written is durable all at once.
    atomic: bool,
    /// A flush that failed, of what was written up to this, may yet take effect.
    late: Option<u64>,
    /// What each flush made durable, until somebody takes it.
    commits: Vec<Commit>,
    random: Rng,
}

/// What one flush made durable.
pub type Commit = Vec<(u64, Content)>;

impl Backend {
    /// The image of `volume` with `content`.
    pub fn new(volume: u32, content: Vec<Content>, atomic: bool, seed: u64) -> Self {
        Self {
            volume,
            atomic,
            late: None,
            commits: Vec::new(),
            allocated: content.iter().map(|&held| held != Content::Zero).collect(),
            durable: content,
            volatile: BTreeMap::new(),
            ops: BTreeMap::new(),
            next_op: 0,
            sequence: 0,
            lost: false,
            random: Rng::with_seed(seed),
        }
    }

    /// Whose image it is.
    pub fn volume(&self) -> u32 {
        self.volume
    }

    /// What it has is this from now on, durably, and nothing is under way.
    pub fn become_as(&mut self, content: Vec<Content>) {
        self.allocated = content.iter().map(|&held| held != Content::Zero).collect();
        self.durable = content;
        self.volatile.clear();
        self.ops.clear();
        self.lost = false;
    }

    /// Number of sectors.
    pub fn sectors(&self) -> u64 {
        self.durable.len() as u64
    }

    /// Whether what is written is durable all at once.
    pub fn is_atomic(&self) -> bool {
        self.atomic
    }

    /// What flushes of an atomic backend have made durable since this was asked last.
    pub fn take_commits(&mut self) -> Vec<Commit> {
        std::mem::take(&mut self.commits)
    }

    /// Change the size; new space is a hole.
    pub fn resize(&mut self, sectors: u64) {
        if self.atomic {
            self.commit(self.sequence);
        }
        self.durable.resize(sectors as usize, Content::Zero);
        self.allocated.resize(sectors as usize, false);
        self.volatile.retain(|&sector, _| sector < sectors);
    }

    /// What a sector holds that no power loss can take.
    pub fn durable(&self, sector: u64) -> Content {
        self.durable[sector as usize]
    }

    /// Whether it has something that is not durable.
    pub fn has_staged(&self) -> bool {
        !self.volatile.is_empty()
    }

    /// What a reader sees.
    pub fn visible(&self, sector: u64) -> Content {
        let newest = self.volatile.get(&sector).and_then(|list| list.last());
        // A read may still be on its way when the image is cut.
        let durable = self.durable.get(sector as usize).copied();
        newest.map_or(durable.unwrap_or(Content::Zero), |&(_, content)| content)
    }

    /// Begin a read.
    pub fn submit_read(&mut self, range: SectorRange) -> OpId {
        self.begin(Op::Read(range))
    }

    /// Begin a write of one content for each sector.
    pub fn submit_write(&mut self, range: SectorRange, contents: Vec<Content>) -> OpId {
        assert_eq!(contents.len() as u64, range.count, "one content per sector");
        self.begin(Op::Write(range, contents))
    }

    /// Begin to zero a range.
    pub fn submit_zero(&mut self, range: SectorRange, unmap: bool) -> OpId {
        self.begin(Op::Zero(range, unmap))
    }

    /// Begin a flush.
    pub fn submit_flush(&mut self) -> OpId {
        let before = self.sequence;
        self.begin(Op::Flush { before })
    }

    /// End a read; `out` is what the backend returns.
    pub fn complete_read(&mut self, op: OpId, out: &mut [u8]) {
        let Some(Op::Read(range)) = self.ops.remove(&op) else {
            panic!("read {op} is not in flight");
        };
        for (index, bytes) in out.chunks_mut(SECTOR_BYTES).enumerate() {
            let sector = range.start + index as u64;
            let mut content = self.visible(sector);
            for racing in self.ops.values() {
                let new = match racing {
                    Op::Write(other, contents) if other.overlaps(SectorRange::new(sector, 1)) => {
                        contents[(sector - other.start) as usize]
                    }
                    Op::Zero(other, _) if other.overlaps(SectorRange::new(sector, 1)) => {
                        Content::Zero
                    }
                    _ => continue,
                };
                if self.random.bool() {
                    content = new;
                }
            }
            content.fill(self.volume, sector, bytes);
        }
    }

    /// End a write or zero well.
    pub fn complete_write(&mut self, op: OpId) {
        let op = self.ops.remove(&op).expect("write is in flight");
        self.apply(&op, |_, _| true);
        if self.late.is_some() && self.random.u8(..4) == 0 {
            self.take_effect_late();
        }
    }

    /// End a write well and let it be durable before any flush, as a planted bug does.
    pub fn leak_write(&mut self, op: OpId) {
        let range = match &self.ops[&op] {
            Op::Write(range, _) | Op::Zero(range, _) => *range,
            _ => SectorRange::new(0, 0),
        };
        self.complete_write(op);
        for sector in range.start..range.end().min(self.sectors()) {
            self.durable[sector as usize] = self.visible(sector);
        }
    }

    /// End a write or zero badly: each sector is old or new.
    pub fn fail_write(&mut self, op: OpId) {
        let op = self.ops.remove(&op).expect("write is in flight");
        self.apply(&op, |random, _| random.bool());
    }

    /// Perform only the first half of a write, as a planted bug does.
    pub fn tear_write(&mut self, op: OpId) {
        let op = self.ops.remove(&op).expect("write is in flight");
        let half = match &op {
            Op::Write(range, _) | Op::Zero(range, _) => range.start + range.count / 2,
            _ => 0,
        };
        self.apply(&op, move |_, sector| sector < half);
    }

    /// Forget an operation.
    pub fn cancel(&mut self, op: OpId) {
        self.ops.remove(&op);
    }

    /// End a flush; false means that it failed because something had been lost.
    pub fn complete_flush(&mut self, op: OpId) -> bool {
        let Some(Op::Flush { before }) = self.ops.remove(&op) else {
            panic!("flush {op} is not in flight");
        };
        if std::mem::take(&mut self.lost) {
            return false;
        }
        self.late = None;
        self.commit(before);
        true
    }

    /// Make durable what was written up to a sequence number.
    fn commit(&mut self, before: u64) {
        let durable = &mut self.durable;
        let mut commit = Commit::new();
        self.volatile.retain(|&sector, list| {
            let flushed = list.partition_point(|&(sequence, _)| sequence <= before);
            if flushed > 0 {
                durable[sector as usize] = list[flushed - 1].1;
                commit.push((sector, list[flushed - 1].1));
                list.drain(..flushed);
            }
            !list.is_empty()
        });
        if self.atomic {
            self.commits.push(commit);
        }
    }

    /// A flush that failed takes effect after all.
    fn take_effect_late(&mut self) {
        if let Some(before) = self.late.take() {
            self.commit(before);
        }
    }

    /// End a flush badly.
    pub fn fail_flush(&mut self, op: OpId) {
        let flush = self.ops.remove(&op);
        if self.atomic {
            let Some(Op::Flush { before }) = flush else {
                return;
            };
            if std::mem::take(&mut self.lost) {
                // It makes all of it durable, or nothing, and has lost a part.
                self.volatile.clear();
                return;
            }
            match self.random.u8(..4) {
                0 => self.commit(before),
                1 => {}
                2 => self.late = Some(before),
                _ => self.volatile.clear(),
            }
            return;
        }
        let random = &mut self.random;
        let durable = &mut self.durable;
        self.volatile.retain(|&sector, list| match random.u8(..3) {
            0 => {
                durable[sector as usize] = list.last().expect("never empty").1;
                false
            }
            1 => true,
            _ => false,
        });
    }

    /// The backend's host loses power; its clients see every operation fail.
    pub fn power_cut(&mut self) {
        if self.atomic {
            return self.forget_staged();
        }
        for (_, op) in std::mem::take(&mut self.ops) {
            self.apply(&op, |random, _| random.bool());
        }
        for (sector, list) in std::mem::take(&mut self.volatile) {
            let kept = self.random.usize(..=list.len());
            if kept > 0 {
                self.durable[sector as usize] = list[kept - 1].1;
            }
            self.lost |= kept < list.len();
        }
    }

    /// The node is gone: what it had in flight happened or not.
    pub fn client_lost(&mut self) {
        if self.atomic {
            self.forget_staged();
        }
        for (_, op) in std::mem::take(&mut self.ops) {
            self.apply(&op, |random, _| random.bool());
        }
        // A new client begins a new promise: its flush covers what it sees.
        self.lost = false;
    }

    /// What is not durable is gone; a flush in flight takes effect before that, or not.
    fn forget_staged(&mut self) {
        if self.random.bool() {
            self.take_effect_late();
        }
        self.late = None;
        for (_, op) in std::mem::take(&mut self.ops) {
            if let Op::Flush { before } = op
                && self.random.bool()
                && !self.lost
            {
                self.commit(before);
            }
        }
        self.lost |= !self.volatile.is_empty();
        self.volatile.clear();
    }

    /// It is opened, which makes durable what it shows.
    pub fn opened(&mut self) {
        if self.atomic {
            return self.forget_staged();
        }
        for (sector, list) in std::mem::take(&mut self.volatile) {
            if let Some(&(_, content)) = list.last() {
                self.durable[sector as usize] = content;
            }
        }
    }

    /// The allocation of a range, cut after a few runs as a real backend may.
    pub fn extents(&mut self, range: SectorRange) -> Vec<Extent> {
        let mut runs: Vec<Extent> = Vec::new();
        let limit = self.random.usize(1..64);
        for sector in range.start..range.end().min(self.sectors()) {
            let state = match (
                self.allocated[sector as usize],
                self.visible(sector) == Content::Zero,
            ) {
                (false, true) => ExtentState::Hole,
                (true, true) => ExtentState::Zero,
                (_, false) => ExtentState::Data,
            };
            let full = runs.len() == limit;
            match runs.last_mut() {
                Some(last) if last.state == state => last.range.count += 1,
                _ if full => break,
                _ => runs.push(Extent {
                    range: SectorRange::new(sector, 1),
                    state,
                }),
            }
        }
        runs
    }

    fn begin(&mut self, op: Op) -> OpId {
        self.next_op += 1;
        self.ops.insert(self.next_op, op);
        self.next_op
    }

    fn apply(&mut self, op: &Op, mut choose: impl FnMut(&mut Rng, u64) -> bool) {
        let (range, contents, keep_space) = match op {
            Op::Write(range, contents) => (range, Some(contents), true),
            Op::Zero(range, unmap) => (range, None, !unmap),
            Op::Read(_) | Op::Flush { .. } => return,
        };
        self.sequence += 1;
        for sector in range.start..range.end().min(self.sectors()) {
            if !choose(&mut self.random, sector) {
                continue;
            }
            let content = contents.map_or(Content::Zero, |contents| {
                contents[(sector - range.start) as usize]
            });
            self.allocated[sector as usize] = keep_space;
            let list = self.volatile.entry(sector).or_default();
            list.push((self.sequence, content));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend(seed: u64) -> Backend {
        Backend::new(1, vec![Content::Zero; 64], false, seed)
    }

    fn atomic(seed: u64) -> Backend {
        Backend::new(1, vec![Content::Zero; 64], true, seed)
    }

    fn write(backend: &mut Backend, start: u64, id: u32) {
        let op = backend.submit_write(SectorRange::new(start, 4), vec![Content::Write(id); 4]);
        backend.complete_write(op);
    }

    #[test]
    fn backend_flush_covers_what_completed_before_it_began() {
        let mut backend = backend(1);
        write(&mut backend, 0, 1);
        let flush = backend.submit_flush();
        write(&mut backend, 8, 2);
        assert!(backend.complete_flush(flush));
        assert_eq!(backend.durable(0), Content::Write(1));
        assert_eq!(backend.durable(8), Content::Zero);
        assert_eq!(backend.visible(8), Content::Write(2));
    }

    #[test]
    fn backend_power_cut_loses_some_and_the_next_flush_says_so() {
        let (mut lost, mut kept) = (0, 0);
        for seed in 0..50 {
            let mut backend = backend(seed);
            write(&mut backend, 0, 1);
            backend.power_cut();
            let survivors = (0..4)
                .filter(|&s| backend.visible(s) != Content::Zero)
                .count();
            let flush = backend.submit_flush();
            assert_eq!(backend.complete_flush(flush), survivors == 4);
            kept += survivors;
            lost += 4 - survivors;
        }
        assert!(lost > 20 && kept > 20, "{lost} {kept}");
    }

    #[test]
    fn backend_failed_flush_promises_nothing() {
        let outcomes: std::collections::BTreeSet<_> = (0..50)
            .map(|seed| {
                let mut backend = backend(seed);
                write(&mut backend, 0, 1);
                let flush = backend.submit_flush();
                backend.fail_flush(flush);
                (backend.durable(0), backend.visible(0))
            })
            .collect();
        let new = Content::Write(1);
        assert_eq!(
            outcomes.into_iter().collect::<Vec<_>>(),
            [
                (Content::Zero, Content::Zero),
                (Content::Zero, new),
                (new, new)
            ]
        );
    }

    /// Both of two writes are durable, or none, whatever becomes of the flush after them.
    #[test]
    fn backend_that_is_atomic_keeps_all_or_nothing() {
        let ends: [fn(&mut Backend, OpId); 4] = [
            |backend, flush| backend.fail_flush(flush),
            |backend, _| backend.power_cut(),
            |backend, _| backend.client_lost(),
            |backend, flush| {
                backend.fail_flush(flush);
                backend.power_cut();
            },
        ];
        for end in ends {
            let (mut all, mut none) = (0, 0);
            for seed in 0..50 {
                let mut backend = atomic(seed);
                write(&mut backend, 0, 1);
                write(&mut backend, 8, 2);
                assert_eq!(backend.visible(8), Content::Write(2));
                assert_eq!(backend.durable(8), Content::Zero);
                let flush = backend.submit_flush();
                write(&mut backend, 16, 3);
                end(&mut backend, flush);
                assert_eq!(backend.durable(16), Content::Zero, "after the flush began");
                match (backend.durable(0), backend.durable(8)) {
                    (Content::Zero, Content::Zero) => none += 1,
                    (Content::Write(1), Content::Write(2)) => all += 1,
                    torn => panic!("{torn:?}"),
                }
                assert_eq!(
                    backend.take_commits().len(),
                    usize::from(backend.durable(0) != Content::Zero)
                );
            }
            assert!(all > 5 && none > 5, "{all} {none}");
        }
    }

    #[test]
    fn backend_that_is_atomic_says_at_the_next_flush_what_a_power_cut_took() {
        let mut backend = atomic(1);
        write(&mut backend, 0, 1);
        backend.power_cut();
        assert_eq!(backend.visible(0), Content::Zero);
        let flush = backend.submit_flush();
        assert!(!backend.complete_flush(flush));
        write(&mut backend, 0, 1);
        let flush = backend.submit_flush();
        assert!(backend.complete_flush(flush));
        assert_eq!(backend.durable(0), Content::Write(1));
    }

    #[test]
    fn backend_extents_tell_holes_zeroes_and_data() {
        for seed in 0..20 {
            let mut backend = backend(seed);
            write(&mut backend, 8, 1);
            let op = backend.submit_zero(SectorRange::new(10, 4), false);
            backend.complete_write(op);
            let runs = backend.extents(SectorRange::new(8, 8));
            let states = [
                (8, 2, ExtentState::Data),
                (10, 4, ExtentState::Zero),
                (14, 2, ExtentState::Hole),
            ];
            for (run, (start, count, state)) in runs.iter().zip(states) {
                assert_eq!(
                    (run.range.start, run.range.count, run.state),
                    (start, count, state)
                );
            }
        }
    }
}
