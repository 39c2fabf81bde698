//! Checker: at every moment the backend alone is a disk that the client could have seen.
//!
//! A flush that was acknowledged orders what was acknowledged before it was sent before what was sent
//! after it was acknowledged. With M the newest write of which the backend may show anything, and F
//! the last flush acknowledged before M was sent:
//!
//! 1. Everything acknowledged before F was sent is in the backend, or something newer in its place.
//!    It must be durable there before M is *submitted*: from then on, a power loss may keep M.
//!    So the check covers every moment and every subset of unflushed sectors at once.
//!    Of an atomic backend nothing can be kept before a flush takes effect: there it must be durable
//!    once M is, and every time that something becomes durable is checked.
//! 2. The backend is given only what was written to that sector, and is in the history still.
//! 3. Within one opening, no sector goes back to an older version. (A generation that was
//!    interrupted by a crash may be cut elsewhere afterwards, within rule 1.)
//! 4. When all is said to be destaged, it is durable in the backend.
//! 5. A write with FUA that was acknowledged before M was sent is in the backend by the same measure, or
//!    something newer in its place. What was acknowledged beside it need not be.

use std::collections::{BTreeMap, BTreeSet};

use hdcs_core::base::io::SectorRange;

use crate::check_reads::survived;
use crate::content::{Content, WriteId};
use crate::model::{FuaBarrier, History, Seq};
use crate::violation::Violation;

/// What the backend was given so far.
#[derive(Debug, Default)]
pub struct BackendOrder {
    /// The newest write of which anything was submitted.
    newest: WriteId,
    /// How many barriers lie before it.
    passed: usize,
    /// What was acknowledged before this must be durable.
    enforced: Seq,
    /// Sectors that may not be durable in the backend yet.
    behind: BTreeSet<u64>,
    /// The newest version of each sector that this opening has submitted.
    submitted: BTreeMap<u64, WriteId>,
    /// How many acknowledged writes with FUA lie before the newest, and what they want of each sector.
    fua_passed: usize,
    fua_required: BTreeMap<u64, WriteId>,
}

impl BackendOrder {
    /// A client's write was sent: its sectors are behind.
    pub fn written(&mut self, range: SectorRange) {
        self.behind.extend(range.start..range.end());
    }

    /// Another opening begins.
    pub fn reopened(&mut self) {
        self.submitted.clear();
    }

    /// The volume became smaller.
    pub fn resized(&mut self, sectors: u64) {
        self.behind.retain(|&sector| sector < sectors);
        self.submitted.retain(|&sector, _| sector < sectors);
        self.fua_required.retain(|&sector, _| sector < sectors);
    }

    /// Check a write or zero that is about to be submitted, against what is `durable`.
    pub fn submit(
        &mut self,
        history: &mut History,
        range: SectorRange,
        contents: &[Content],
        durable: impl Fn(u64) -> Content,
    ) -> Result<(), Violation> {
        let given = (range.start..).zip(contents.iter().copied());
        self.give(history, given, durable).map(drop)
    }

    /// Check what an atomic backend has just made `durable`: each sector, and what it holds now.
    /// Returns how many flushes of the client it has gone past.
    pub fn commit(
        &mut self,
        history: &mut History,
        committed: &[(u64, Content)],
        durable: impl Fn(u64) -> Content,
    ) -> Result<usize, Violation> {
        self.give(history, committed.iter().copied(), durable)
    }

    fn give(
        &mut self,
        history: &mut History,
        given: impl Iterator<Item = (u64, Content)>,
        durable: impl Fn(u64) -> Content,
    ) -> Result<usize, Violation> {
        let mut newest = self.newest;
        let sectors = history.sectors();
        // What was cut off may be made durable before it is gone.
        for (sector, content) in given.filter(|&(sector, _)| sector < sectors) {
            let id = self.version(history, sector, content)?;
            newest = newest.max(id);
        }
        self.newest = newest;
        self.pass_fua(history, &durable)?;
        let boundaries = &history.barriers[self.passed..];
        let passed = boundaries
            .iter()
            .take_while(|barrier| barrier.boundary <= newest);
        let mut count = 0;
        for barrier in passed {
            count += 1;
            self.enforced = self.enforced.max(barrier.issued);
        }
        if count == 0 {
            return Ok(0);
        }
        self.passed += count;
        let enforced = self.enforced;
        let mut failed = None;
        self.behind.retain(|&sector| {
            let has = history.matches(sector, durable(sector)).next();
            let required = history.required_in_order(sector, enforced);
            if has.unwrap_or(0) < required && failed.is_none() {
                failed = Some((sector, required));
            }
            let latest = history.sectors[sector as usize].versions.last();
            has != latest.copied()
        });
        match failed {
            None => Ok(count),
            Some((sector, required)) => Err(Violation::new(
                "backend-order",
                format!(
                    "write {newest} goes to the backend, but write {required}, which a flush put before it, \
                     is not durable there (sector {sector} holds {:?})",
                    durable(sector)
                ),
            )),
        }
    }

    /// What was acknowledged with FUA before the newest write was sent is durable.
    fn pass_fua(
        &mut self,
        history: &History,
        durable: &impl Fn(u64) -> Content,
    ) -> Result<(), Violation> {
        let newest = self.newest;
        let barriers = history.fua_barriers[self.fua_passed..].iter();
        for barrier in barriers.take_while(|barrier| barrier.boundary <= newest) {
            self.fua_passed += 1;
            for sector in fua_sectors(history, barrier) {
                let has = history.matches(sector, durable(sector)).next();
                if has.unwrap_or(0) < barrier.write {
                    return Err(lacks_fua(newest, barrier.write, sector, durable(sector)));
                }
                self.fua_required.insert(sector, barrier.write);
            }
        }
        Ok(())
    }

    /// Which version of `sector` is being submitted: the oldest that it can legally be.
    fn version(
        &mut self,
        history: &mut History,
        sector: u64,
        content: Content,
    ) -> Result<WriteId, Violation> {
        let of_fua = self.fua_required.get(&sector).copied();
        let of_fua = of_fua.filter(|&id| is_ordered(history, id, sector));
        let required = history.required_in_order(sector, self.enforced);
        let required = required.max(of_fua.unwrap_or(0));
        let before = self.submitted.get(&sector).copied().unwrap_or(0);
        let candidates: Vec<_> = history.matches(sector, content).collect();
        let Some(&newest) = candidates.first() else {
            return Err(Violation::new(
                "backend-foreign",
                format!(
                    "sector {sector} of the backend is given {content:?}, which is not part of its history"
                ),
            ));
        };
        if newest < required || newest < before {
            return Err(Violation::new(
                "backend-goes-back",
                format!(
                    "sector {sector} of the backend is given write {newest} after write {}",
                    required.max(before)
                ),
            ));
        }
        let floor = required.max(before);
        let oldest = candidates.iter().rev().find(|&&id| id >= floor);
        let oldest = oldest.copied().unwrap_or(newest);
        if candidates.len() == 1 {
            survived(history, sector, newest)?;
        }
        self.submitted.insert(sector, oldest);
        Ok(oldest)
    }
}

/// Whether a write with FUA that was acknowledged still has to be there.
fn is_ordered(history: &History, id: WriteId, sector: u64) -> bool {
    history.covers(id, sector) && !history.is_gap(id, sector) && history.is_present(id, Seq::MAX)
}

/// The sectors in which it has to be.
fn fua_sectors<'a>(
    history: &'a History,
    barrier: &'a FuaBarrier,
) -> impl Iterator<Item = u64> + 'a {
    let range = history.write(barrier.write).range;
    (range.start..range.end()).filter(|&sector| is_ordered(history, barrier.write, sector))
}

fn lacks_fua(newest: WriteId, fua: WriteId, sector: u64, has: Content) -> Violation {
    Violation::new(
        "backend-fua-order",
        format!(
            "write {newest} goes to the backend, but write {fua}, which was acknowledged with FUA before it \
             was sent, is not durable there (sector {sector} holds {has:?})"
        ),
    )
}

/// Check a backend that is all that is left: `content` tells each sector.
pub fn check_whole(history: &History, content: impl Fn(u64) -> Content) -> Result<(), Violation> {
    check_first(history.sectors(), history, content)
}

/// The same for its first sectors alone.
pub fn check_first(
    sectors: u64,
    history: &History,
    content: impl Fn(u64) -> Content,
) -> Result<(), Violation> {
    let mut newest = 0;
    for sector in 0..sectors {
        match history.matches(sector, content(sector)).last() {
            Some(oldest) => newest = newest.max(oldest),
            None => {
                return Err(Violation::new(
                    "backend-foreign",
                    format!("sector {sector} of the backend holds {:?}", content(sector)),
                ));
            }
        }
    }
    let fua = history.fua_barriers.iter();
    let fua = fua.take_while(|barrier| barrier.boundary <= newest);
    for barrier in fua {
        let lacking = fua_sectors(history, barrier)
            .filter(|&sector| sector < sectors)
            .find(|&sector| {
                let has = history.matches(sector, content(sector)).next();
                has.unwrap_or(0) < barrier.write
            });
        if let Some(sector) = lacking {
            return Err(lacks_fua(newest, barrier.write, sector, content(sector)));
        }
    }
    let passed = history
        .barriers
        .iter()
        .filter(|barrier| barrier.boundary <= newest);
    let Some(enforced) = passed.map(|barrier| barrier.issued).max() else {
        return Ok(());
    };
    holds(sectors, history, enforced, content, "backend-not-a-prefix")
}

/// Check that everything acknowledged before `seq` is in `durable`.
pub fn check_complete(
    history: &History,
    seq: Seq,
    durable: impl Fn(u64) -> Content,
) -> Result<(), Violation> {
    holds(
        history.sectors(),
        history,
        seq,
        durable,
        "backend-incomplete",
    )
}

fn holds(
    sectors: u64,
    history: &History,
    seq: Seq,
    content: impl Fn(u64) -> Content,
    rule: &'static str,
) -> Result<(), Violation> {
    for sector in 0..sectors {
        let required = history.required_in_order(sector, seq);
        let has = history.matches(sector, content(sector)).next();
        if has.unwrap_or(0) < required {
            return Err(Violation::new(
                rule,
                format!(
                    "sector {sector} of the backend holds {:?} and lacks write {required}",
                    content(sector)
                ),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::io::Nanos;

    use super::*;

    /// A history with its checker and a backend of which everything is durable at once.
    struct Fixture {
        history: History,
        order: BackendOrder,
        backend: Vec<Content>,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                history: History::new(vec![Content::Zero; 8]),
                order: BackendOrder::default(),
                backend: vec![Content::Zero; 8],
            }
        }

        fn write(&mut self, sector: u64) -> WriteId {
            let range = SectorRange::new(sector, 1);
            let id = self.history.issue_write(range, None);
            self.history.ack_write(id, Nanos(0));
            self.order.written(range);
            id
        }

        fn flush(&mut self) {
            let flush = self.history.issue_flush();
            self.history.ack_flush(flush);
        }

        fn submit(&mut self, sector: u64, id: WriteId) -> Option<&'static str> {
            let Self {
                history,
                order,
                backend,
            } = self;
            let range = SectorRange::new(sector, 1);
            let result = order.submit(history, range, &[Content::Write(id)], |s| {
                backend[s as usize]
            });
            result.err().map(|violation| violation.rule)
        }

        fn destage(&mut self, sector: u64, id: WriteId) -> Option<&'static str> {
            let rule = self.submit(sector, id);
            self.backend[sector as usize] = Content::Write(id);
            rule
        }
    }

    #[test]
    fn backend_order_allows_any_subset_of_the_generation_under_way() {
        let mut fixture = Fixture::new();
        let ids: Vec<_> = (0..4).map(|sector| fixture.write(sector)).collect();
        assert_eq!(fixture.destage(3, ids[3]), None);
        assert_eq!(fixture.destage(1, ids[1]), None);
        assert!(check_whole(&fixture.history, |s| fixture.backend[s as usize]).is_ok());
    }

    #[test]
    fn backend_order_catches_a_generation_begun_before_the_last_is_durable() {
        let mut fixture = Fixture::new();
        let first = fixture.write(0);
        fixture.flush();
        let second = fixture.write(1);
        assert_eq!(fixture.submit(1, second), Some("backend-order"));
        let mut fixture = Fixture::new();
        assert_eq!(first, fixture.write(0));
        fixture.flush();
        assert_eq!(second, fixture.write(1));
        assert_eq!(fixture.destage(0, first), None);
        assert_eq!(fixture.destage(1, second), None);
    }

    #[test]
    fn backend_order_catches_what_overtakes_an_acknowledged_write_with_fua() {
        for destaged in [false, true] {
            let mut fixture = Fixture::new();
            let beside = fixture.write(2);
            let journal = fixture.write(0);
            fixture.history.order_fua(journal);
            let next = fixture.write(1);
            if destaged {
                assert_eq!(fixture.destage(0, journal), None);
            }
            let rule = (!destaged).then_some("backend-fua-order");
            assert_eq!(fixture.submit(1, next), rule);
            fixture.backend[1] = Content::Write(next);
            let whole = check_whole(&fixture.history, |s| fixture.backend[s as usize]);
            assert_eq!(whole.err().map(|violation| violation.rule), rule);
            // What was written beside it may come later.
            let late = destaged.then(|| fixture.submit(2, beside));
            assert_eq!(late.flatten(), None);
        }
    }

    /// A write that was sent before the acknowledgement is not ordered by it.
    #[test]
    fn backend_order_lets_what_was_under_way_overtake_a_write_with_fua() {
        let mut fixture = Fixture::new();
        let journal = fixture.write(0);
        let beside = fixture.write(1);
        fixture.history.order_fua(journal);
        assert_eq!(fixture.destage(1, beside), None);
        assert!(check_whole(&fixture.history, |s| fixture.backend[s as usize]).is_ok());
    }

    #[test]
    fn backend_order_lets_an_atomic_backend_go_past_flushes_only_with_all_before_them() {
        let given = |ids: &[(u64, WriteId)]| -> Vec<(u64, Content)> {
            let contents = ids.iter().map(|&(sector, id)| (sector, Content::Write(id)));
            contents.collect()
        };
        for whole in [true, false] {
            let mut fixture = Fixture::new();
            let first = fixture.write(0);
            fixture.flush();
            let second = fixture.write(1);
            fixture.flush();
            let third = fixture.write(2);
            let mut commit = given(&[(1, second), (2, third)]);
            if whole {
                commit.extend(given(&[(0, first)]));
            }
            for &(sector, content) in &commit {
                fixture.backend[sector as usize] = content;
            }
            let Fixture {
                history,
                order,
                backend,
            } = &mut fixture;
            let result = order.commit(history, &commit, |s| backend[s as usize]);
            match result {
                Ok(passed) => assert!(whole && passed == 2),
                Err(violation) => assert!(!whole && violation.rule == "backend-order"),
            }
        }
    }

    /// What was committed before a crash is not taken back by a shorter generation after it.
    #[test]
    fn backend_order_catches_a_generation_that_is_shorter_the_second_time() {
        let mut fixture = Fixture::new();
        let old = fixture.write(0);
        fixture.flush();
        let new = fixture.write(0);
        fixture.flush();
        let other = fixture.write(1);
        let commit = [(0, Content::Write(new)), (1, Content::Write(other))];
        for (sector, content) in commit {
            fixture.backend[sector as usize] = content;
        }
        let Fixture {
            history,
            order,
            backend,
        } = &mut fixture;
        assert!(
            order
                .commit(history, &commit, |s| backend[s as usize])
                .is_ok()
        );
        history.promise(other + 1);
        history.crash();
        order.reopened();
        let again = order.commit(history, &[(0, Content::Write(old))], |s| {
            backend[s as usize]
        });
        assert_eq!(again.unwrap_err().rule, "backend-goes-back");
    }

    #[test]
    fn backend_order_catches_old_foreign_and_lost_data() {
        let mut fixture = Fixture::new();
        let old = fixture.write(0);
        let new = fixture.write(0);
        assert_eq!(fixture.destage(0, new), None);
        assert_eq!(fixture.submit(0, old), Some("backend-goes-back"));
        assert_eq!(fixture.submit(1, old), Some("backend-foreign"));
        let lost = fixture.write(2);
        fixture.history.crash();
        fixture.history.epochs[0].hi = lost;
        assert_eq!(fixture.submit(2, lost), Some("backend-foreign"));
    }

    #[test]
    fn backend_whole_catches_a_missing_older_generation() {
        let mut fixture = Fixture::new();
        fixture.write(0);
        fixture.flush();
        let second = fixture.write(1);
        fixture.backend[1] = Content::Write(second);
        let result = check_whole(&fixture.history, |s| fixture.backend[s as usize]);
        assert_eq!(result.unwrap_err().rule, "backend-not-a-prefix");
    }

    #[test]
    fn backend_complete_catches_what_is_missing() {
        let mut fixture = Fixture::new();
        let id = fixture.write(0);
        let now = fixture.history.tick();
        let missing = check_complete(&fixture.history, now, |_| Content::Zero);
        assert_eq!(missing.unwrap_err().rule, "backend-incomplete");
        fixture.backend[0] = Content::Write(id);
        assert!(check_complete(&fixture.history, now, |s| fixture.backend[s as usize]).is_ok());
    }
}
