//! What a client did to one volume, and what is known about what is left of it.
//!
//! The volume logs writes in the order in which they arrive, so a history is a sequence: write 1, 2, …
//! An *epoch* is the stretch between two crashes. After a crash a prefix of the epoch survives:
//! all its writes below a *cut* that nobody tells us. The history keeps an interval for every cut;
//! promises made before the crash raise its lower end, and everything that is observed afterwards
//! narrows it. A history is inconsistent as soon as an interval is empty. The checkers
//! ([`crate::check_reads`], [`crate::check_recovery`], [`crate::check_backend`]) say which
//! observation means what; this file only keeps the books.
//!
//! A write that went past the log (a *direct* one) belongs to no prefix: once it is acknowledged it stays while
//! its backend stays, whatever happens to the node; until a flush has *settled* it, in whichever epoch,
//! the backend may lose each sector of it, which makes it uncertain at once. One that a crash finds under
//! way may be there or not. Whether writes go past the log changes only when those under way are all of one
//! kind.
//!
//! Invariants: a sector's versions are in the order of arrival; a refused write is no version; a
//! write that failed may be there or not, sector by sector, wherever the cut is.

use hdcs_core::base::io::{Nanos, SectorRange};

use crate::content::{Content, WriteId};

/// Counts what happens to a history, so that "before" has a meaning.
pub type Seq = u64;

/// How a write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has not.
    Pending,
    /// Acknowledged.
    Acked(Seq),
    /// Refused: it must never be seen.
    Refused,
    /// It failed, or its epoch ended with an error: it may be seen.
    Failed,
}

/// One write, write-zeroes or discard.
#[derive(Clone, Copy, Debug)]
pub struct WriteOp {
    /// Where.
    pub range: SectorRange,
    /// What each of its sectors holds.
    pub content: Content,
    /// When it was sent.
    pub issued: Seq,
    /// How it ended.
    pub outcome: Outcome,
    /// When it was acknowledged or failed.
    pub ended: Seq,
    /// The same, of one that was acknowledged, in time.
    pub acked_time: Nanos,
    /// In which epoch it was sent.
    pub epoch: usize,
    /// It goes past the log.
    pub direct: bool,
}

/// One stretch between crashes.
#[derive(Clone, Copy, Debug)]
pub struct Epoch {
    /// Writes below this one have survived.
    pub lo: WriteId,
    /// Writes from this one on have not.
    pub hi: WriteId,
    /// Those before need not be a prefix: the log has lost some of which the backend was given a part.
    pub mixed: bool,
}

/// One acknowledged flush.
#[derive(Clone, Copy, Debug)]
pub struct Barrier {
    /// The first write that was sent after it was acknowledged.
    pub boundary: WriteId,
    /// When it was sent: what was acknowledged before goes before the boundary.
    pub issued: Seq,
}

/// One acknowledged write with FUA.
#[derive(Clone, Copy, Debug)]
pub struct FuaBarrier {
    /// The first write that was sent after it was acknowledged.
    pub boundary: WriteId,
    /// It goes before the boundary; what was written beside it need not.
    pub write: WriteId,
}

/// A flush in flight.
#[derive(Clone, Copy, Debug)]
pub struct FlushOp {
    /// When it was sent.
    pub issued: Seq,
    /// Writes below this one were acknowledged, or come before one that was, when it was sent.
    pub covers: WriteId,
}

/// A read in flight.
#[derive(Clone, Copy, Debug)]
pub struct ReadOp {
    /// What it reads.
    pub range: SectorRange,
    /// When it was sent.
    pub issued: Seq,
}

/// The versions of one sector.
#[derive(Clone, Debug)]
pub(crate) struct Sector {
    /// What it held before the first version.
    pub base: Content,
    /// The writes that cover it, in order.
    pub versions: Vec<WriteId>,
    /// The two newest versions that a read has returned in this epoch, and when.
    pub seen: [(WriteId, Seq); 2],
    /// The backend has lost some of it, and the cache need not know: what is seen may change.
    pub loose: bool,
    /// Versions below this one were lost with the log, which has said so: none of them has to be there.
    pub lost_below: WriteId,
    /// One of those below this one was lost with the log: none has to get to the backend, though a newer one is there.
    pub gap_below: WriteId,
}

/// Everything that a client did to one volume.
#[derive(Clone, Debug)]
pub struct History {
    pub(crate) sectors: Vec<Sector>,
    /// Write `id` is at `id`; 0 stands for the state before all writes.
    pub(crate) writes: Vec<WriteOp>,
    /// The past epochs; the present one has not ended.
    pub(crate) epochs: Vec<Epoch>,
    pub(crate) barriers: Vec<Barrier>,
    pub(crate) fua_barriers: Vec<FuaBarrier>,
    /// Writes of this epoch below this one must survive whatever happens.
    pub(crate) promised: WriteId,
    /// One above the newest acknowledged write.
    pub(crate) acked_end: WriteId,
    /// Writes go past the log.
    direct: bool,
    /// Direct writes that have ended, and when, and are not settled.
    unsettled: Vec<(WriteId, Seq)>,
    /// Of them, those that were acknowledged and that the backend may have lost, while no client was told.
    untold: Vec<(WriteId, Seq)>,
    /// When the backend may have lost something last.
    pub(crate) loosened: Seq,
    /// When it became smaller, and how many sectors it was left.
    cuts: Vec<(Seq, u64)>,
    seq: Seq,
}

impl History {
    /// A volume whose sectors hold `base`.
    pub fn new(base: Vec<Content>) -> Self {
        let before = WriteOp {
            range: SectorRange::new(0, 0),
            content: Content::Zero,
            issued: 0,
            outcome: Outcome::Acked(0),
            ended: 0,
            acked_time: Nanos(0),
            epoch: 0,
            direct: false,
        };
        Self {
            sectors: base.into_iter().map(Sector::new).collect(),
            writes: vec![before],
            epochs: Vec::new(),
            barriers: Vec::new(),
            fua_barriers: Vec::new(),
            promised: 0,
            acked_end: 0,
            direct: false,
            unsettled: Vec::new(),
            untold: Vec::new(),
            loosened: 0,
            cuts: Vec::new(),
            seq: 1,
        }
    }

    /// Size in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// The next write's number.
    pub fn next_write(&self) -> WriteId {
        self.writes.len() as WriteId
    }

    /// One write.
    pub fn write(&self, id: WriteId) -> &WriteOp {
        &self.writes[id as usize]
    }

    /// Whether a write is one of a sector that was not cut off since.
    pub fn covers(&self, id: WriteId, sector: u64) -> bool {
        let sector = self.sectors.get(sector as usize);
        sector.is_some_and(|sector| sector.versions.binary_search(&id).is_ok())
    }

    /// A write is sent. `content` is what it writes, `None` for data of its own.
    pub fn issue_write(&mut self, range: SectorRange, content: Option<Content>) -> WriteId {
        let id = self.next_write();
        let issued = self.tick();
        self.writes.push(WriteOp {
            range,
            content: content.unwrap_or(Content::Write(id)),
            issued,
            outcome: Outcome::Pending,
            ended: Seq::MAX,
            acked_time: Nanos(0),
            epoch: self.epochs.len(),
            direct: self.direct,
        });
        for sector in range.start..range.end() {
            self.sectors[sector as usize].versions.push(id);
        }
        id
    }

    /// It is acknowledged.
    pub fn ack_write(&mut self, id: WriteId, now: Nanos) {
        let seq = self.tick();
        let write = &mut self.writes[id as usize];
        write.outcome = Outcome::Acked(seq);
        (write.ended, write.acked_time) = (seq, now);
        if write.direct {
            self.unsettled.push((id, seq));
        }
        self.acked_end = self.acked_end.max(id + 1);
    }

    /// It was one with FUA.
    pub fn order_fua(&mut self, id: WriteId) {
        self.fua_barriers.push(FuaBarrier {
            boundary: self.next_write(),
            write: id,
        });
    }

    /// It is refused: it has had no effect and never will.
    pub fn refuse_write(&mut self, id: WriteId) {
        self.writes[id as usize].outcome = Outcome::Refused;
    }

    /// It failed: its effect is unknown.
    pub fn fail_write(&mut self, id: WriteId) {
        let seq = self.tick();
        let write = &mut self.writes[id as usize];
        (write.outcome, write.ended) = (Outcome::Failed, seq);
        if write.direct {
            self.unsettled.push((id, seq));
        }
    }

    /// A flush is sent.
    pub fn issue_flush(&mut self) -> FlushOp {
        FlushOp {
            issued: self.tick(),
            covers: self.acked_end,
        }
    }

    /// It is acknowledged.
    pub fn ack_flush(&mut self, flush: FlushOp) {
        self.tick();
        self.promise(flush.covers);
        self.settle_before(flush.issued);
        self.barriers.push(Barrier {
            boundary: self.next_write(),
            issued: flush.issued,
        });
    }

    /// A read is sent.
    pub fn issue_read(&mut self, range: SectorRange) -> ReadOp {
        ReadOp {
            range,
            issued: self.tick(),
        }
    }

    /// Writes below `end` must survive from now on.
    pub fn promise(&mut self, end: WriteId) {
        self.promised = self.promised.max(end);
    }

    // Past the log.

    /// Whether writes go past the log.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// From now on writes go past the log, or no longer; so do those that are under way.
    pub fn set_direct(&mut self, direct: bool) {
        if direct {
            // The log is empty: whatever it held, the backend has for good.
            self.promise(self.next_write());
        }
        self.direct = direct;
        for write in self.pending() {
            write.direct = direct;
        }
    }

    fn pending(&mut self) -> impl Iterator<Item = &mut WriteOp> {
        let epoch = self.epochs.len();
        let writes = self.writes.iter_mut();
        writes.filter(move |write| write.epoch == epoch && write.outcome == Outcome::Pending)
    }

    /// A direct write is durable.
    pub fn settle(&mut self, id: WriteId) {
        self.unsettled.retain(|&(other, _)| other != id);
    }

    /// Direct writes that had ended before `seq` are durable, as they are.
    pub fn settle_before(&mut self, seq: Seq) {
        self.unsettled.retain(|&(_, ended)| ended >= seq);
    }

    /// The same, but for those that a flush that failed may have taken: no later one need have succeeded.
    pub fn settle_acked_before(&mut self, seq: Seq) {
        let writes = &self.writes;
        let is_acked = |id: WriteId| matches!(writes[id as usize].outcome, Outcome::Acked(_));
        self.unsettled
            .retain(|&(id, ended)| ended >= seq || !is_acked(id));
    }

    /// Direct writes that were acknowledged before `seq`, in any epoch, and are not known to be durable.
    pub fn direct_acked_before(&self, seq: Seq) -> impl Iterator<Item = WriteId> + '_ {
        let ended = self.unsettled.iter().filter(move |(_, ended)| *ended < seq);
        let acked = |id| matches!(self.write(id).outcome, Outcome::Acked(_));
        ended.map(|&(id, _)| id).filter(move |&id| acked(id))
    }

    /// Direct writes that were acknowledged before `seq` and may be lost, and nobody was told.
    pub fn untold_before(&self, seq: Seq) -> impl Iterator<Item = WriteId> + '_ {
        let ended = self.untold.iter().filter(move |(_, ended)| *ended < seq);
        ended.map(|&(id, _)| id)
    }

    /// A client was told that the backend may have lost something, or has to expect it.
    pub fn told_of_loss(&mut self) {
        self.untold.clear();
    }

    /// The backend may have lost what it had not flushed: what is not settled is there or not. If that
    /// was not `told`, a cache may go on showing it for a while.
    pub fn loosen(&mut self, told: bool) {
        self.loosened = self.tick();
        for &(id, ended) in &self.unsettled {
            let write = &mut self.writes[id as usize];
            if matches!(write.outcome, Outcome::Acked(_)) {
                self.untold.push((id, ended));
            }
            write.outcome = Outcome::Failed;
            for sector in write.range.start..write.range.end() {
                if let Some(sector) = self.sectors.get_mut(sector as usize) {
                    sector.loose = !told;
                    sector.seen = [(0, 0); 2];
                }
            }
        }
    }

    /// The epoch ends: what was not promised may be lost, but only from its end.
    pub fn crash(&mut self) {
        let seq = self.tick();
        for id in 0..self.next_write() {
            let write = &mut self.writes[id as usize];
            let pending = write.outcome == Outcome::Pending && write.epoch == self.epochs.len();
            if pending && write.direct {
                (write.outcome, write.ended) = (Outcome::Failed, seq);
                self.unsettled.push((id, seq));
            }
        }
        self.direct = false;
        self.epochs.push(Epoch {
            lo: self.promised,
            hi: self.next_write(),
            mixed: false,
        });
        for sector in &mut self.sectors {
            sector.seen = [(0, 0); 2];
            sector.loose = false;
        }
    }

    /// Of the last epoch, what was promised has survived, and of the rest any part: nothing replays it.
    pub fn mix(&mut self) {
        if let Some(epoch) = self.epochs.last_mut() {
            epoch.mixed = true;
        }
    }

    /// The log has lost some of what was written, and says so: all else has survived as far as it was promised, and the
    /// backend was given it without that.
    pub fn mix_all(&mut self) {
        for epoch in &mut self.epochs {
            epoch.mixed = true;
        }
    }

    /// The log has lost up to so many of the entries that it held last, and cannot tell: of the newest writes that had
    /// survived for certain as many need not have. Zeroes that follow one another may be one entry.
    pub fn forgive(&mut self, entries: u64) {
        let mut left = entries;
        let mut zeroes_from = None;
        for id in (1..self.next_write()).rev() {
            let write = &self.writes[id as usize];
            let (epoch, is_refused) = (write.epoch, write.outcome == Outcome::Refused);
            let Some(epoch) = self.epochs.get_mut(epoch) else {
                continue;
            };
            if write.direct || is_refused || id >= epoch.lo {
                continue;
            }
            let is_zero = write.content == Content::Zero;
            if !is_zero || zeroes_from != Some(write.range.end()) {
                if left == 0 {
                    return;
                }
                left -= 1;
            }
            zeroes_from = is_zero.then_some(write.range.start);
            epoch.lo = id;
        }
    }

    /// From now on each sector holds `content`, exactly, whatever was written before: that is past.
    pub fn restart(&mut self, content: impl Fn(u64) -> Content) {
        self.tick();
        self.unsettled.clear();
        self.untold.clear();
        for (number, sector) in (0..).zip(&mut self.sectors) {
            *sector = Sector::new(content(number));
        }
    }

    /// The size changes. What is cut off is gone, and new space is zero.
    pub fn resize(&mut self, sectors: u64) {
        let seq = self.tick();
        if sectors < self.sectors() {
            self.cuts.push((seq, sectors));
        }
        self.sectors
            .resize(sectors as usize, Sector::new(Content::Zero));
    }

    /// Whether a sector was not cut off since `seq`: what was asked for then may show what is gone by now.
    pub fn is_kept(&self, sector: u64, seq: Seq) -> bool {
        let mut cuts = self.cuts.iter();
        cuts.all(|&(cut, sectors)| cut < seq || sector < sectors)
    }

    /// Whether a write can be part of what is there now.
    pub fn may_be_present(&self, id: WriteId) -> bool {
        let write = self.write(id);
        match (write.outcome, self.epochs.get(write.epoch)) {
            (Outcome::Refused, _) => false,
            _ if write.direct => true,
            (_, Some(epoch)) => id < epoch.hi,
            (_, None) => true,
        }
    }

    /// Whether a write of a past epoch has certainly survived, or one of this epoch was
    /// acknowledged before `seq`.
    pub fn is_present(&self, id: WriteId, seq: Seq) -> bool {
        let write = self.write(id);
        match (write.outcome, self.epochs.get(write.epoch)) {
            (Outcome::Refused | Outcome::Failed, _) | (Outcome::Pending, None) => false,
            (_, Some(_)) if write.direct => true,
            (_, Some(epoch)) => id < epoch.lo,
            (Outcome::Acked(acked), None) => acked < seq,
        }
    }

    /// The newest version of `sector` that the backend must be given in order; 0 if there is none.
    pub fn required_in_order(&self, sector: u64, seq: Seq) -> WriteId {
        let required = self.required(sector, seq);
        if self.is_gap(required, sector) {
            0
        } else {
            required
        }
    }

    /// Whether a log that was damaged may not have had this version of `sector` for the backend.
    pub fn is_gap(&self, id: WriteId, sector: u64) -> bool {
        id < self.sectors[sector as usize].gap_below
    }

    /// The log has lost a version of `sector`.
    pub fn skip(&mut self, sector: u64) {
        self.sectors[sector as usize].gap_below = self.next_write();
    }

    /// Whether the log has said that it has lost this version of `sector`.
    fn is_lost(&self, id: WriteId, sector: u64) -> bool {
        id < self.sectors[sector as usize].lost_below
    }

    /// The log says that it has lost what `sector` held.
    pub fn lose(&mut self, sector: u64) {
        self.sectors[sector as usize].lost_below = self.next_write();
    }

    /// The newest version of `sector` that must be there if everything acknowledged before `seq`
    /// is; 0 if none must.
    pub fn required(&self, sector: u64, seq: Seq) -> WriteId {
        let versions = &self.sectors[sector as usize].versions;
        let acked_before = |id: WriteId| match self.write(id).outcome {
            Outcome::Acked(acked) => acked < seq,
            _ => false,
        };
        let found = versions
            .iter()
            .rev()
            .find(|&&id| acked_before(id) && self.is_present(id, seq));
        let found = found.filter(|&&id| !self.is_lost(id, sector));
        found.copied().unwrap_or(0)
    }

    /// The newest version of `sector` that was acknowledged from the log, or certainly survived; 0 if there
    /// is none.
    pub fn required_of_log(&self, sector: u64) -> WriteId {
        let versions = &self.sectors[sector as usize].versions;
        let logged = |id: WriteId| !self.write(id).direct && self.is_present(id, Seq::MAX);
        let found = versions.iter().rev().find(|&&id| logged(id));
        let found = found.filter(|&&id| !self.is_lost(id, sector));
        found.copied().unwrap_or(0)
    }

    /// The versions of `sector`, newest first, that hold `content` and may be present; 0 stands for
    /// what it held before.
    pub fn matches(&self, sector: u64, content: Content) -> impl Iterator<Item = WriteId> + '_ {
        let held = &self.sectors[sector as usize];
        let newest_first = held.versions.iter().rev().copied();
        newest_first
            .filter(move |&id| self.write(id).content == content && self.may_be_present(id))
            .chain((held.base == content).then_some(0))
    }

    /// Now, in the history's count.
    pub fn now(&self) -> Seq {
        self.seq
    }

    pub(crate) fn tick(&mut self) -> Seq {
        self.seq += 1;
        self.seq
    }
}

impl Sector {
    fn new(base: Content) -> Self {
        Self {
            base,
            versions: Vec::new(),
            seen: [(0, 0); 2],
            loose: false,
            lost_below: 0,
            gap_below: 0,
        }
    }
}
