//! Checker: what a client was promised to find again.
//!
//! 1. Under on-write, and under auto until the first flush is sent: what was acknowledged, and what
//!    was read, survives.
//! 2. Under every mode: a write with FUA that was acknowledged, and what was acknowledged before a
//!    flush was sent that was acknowledged, survives.
//! 3. Under on-flush, what was acknowledged longer ago than the age allowed survives, unless the log's
//!    device was slow or failing; and what is lost is no more than the bytes allowed.
//! 4. A clean close keeps everything.
//! 5. Past the log: a write with FUA, and what was acknowledged before a flush was sent that was
//!    acknowledged, survives ([`crate::check_policy`]); of the rest any part.
//!
//! Because a crash keeps a prefix, a promise about one write is one about all before it.

use hdcs_core::base::io::Nanos;
use hdcs_core::volume::Persist;

use crate::content::WriteId;
use crate::model::{FlushOp, History, Outcome, Seq, WriteOp};
use crate::violation::Violation;

/// The promise under which a volume works at present.
#[derive(Debug)]
pub struct Durability {
    persist: Persist,
    /// Since when an acknowledgement means durability; `None` while it does not.
    since: Option<Seq>,
}

impl Durability {
    /// A volume was opened.
    pub fn opened(persist: Persist, now: Seq) -> Self {
        Self {
            persist,
            since: (persist != Persist::OnFlush).then_some(now),
        }
    }

    /// Its mode was changed.
    pub fn changed(&mut self, persist: Persist, now: Seq) {
        if persist == self.persist {
            return;
        }
        // Whether auto has seen a flush is not carried over for certain: promise nothing.
        self.since = (persist == Persist::OnWrite).then(|| self.since.unwrap_or(now));
        self.persist = persist;
    }

    /// Whether an acknowledgement means durability at present.
    pub fn is_on_write(&self) -> bool {
        self.since.is_some()
    }

    /// A flush is about to be sent.
    pub fn flush_sent(&mut self) {
        if self.persist == Persist::Auto {
            self.since = None;
        }
    }

    /// A write was acknowledged.
    pub fn write_acked(&self, history: &mut History, id: WriteId, fua: bool) {
        let WriteOp { issued, direct, .. } = *history.write(id);
        if direct {
            if fua {
                history.settle(id);
            }
        } else if fua || self.since.is_some_and(|since| since <= issued) {
            history.promise(id + 1);
        }
    }

    /// A read showed writes below `seen_end`.
    pub fn read_seen(&self, history: &mut History, seen_end: WriteId) {
        if seen_end == 0 {
            return;
        }
        let write = *history.write(seen_end - 1);
        let present = write.epoch == history.epochs.len();
        if present && !write.direct && self.since.is_some_and(|since| since <= write.issued) {
            history.promise(seen_end);
        }
    }

    /// A flush was acknowledged.
    pub fn flush_acked(&self, history: &mut History, flush: FlushOp) {
        history.ack_flush(flush);
    }
}

/// What was acknowledged before `time` must survive.
pub fn promise_aged(history: &mut History, time: Nanos) {
    let epoch = history.epochs.len();
    let aged = (1..history.next_write()).rev().find(|&id| {
        let write = history.write(id);
        write.epoch == epoch
            && matches!(write.outcome, Outcome::Acked(_))
            && write.acked_time < time
    });
    if let Some(id) = aged {
        history.promise(id + 1);
    }
}

/// Check how much of the last epoch's acknowledged data is certainly lost.
pub fn check_lost_bytes(history: &History, bytes_max: u64) -> Result<(), Violation> {
    let Some(number) = history.epochs.len().checked_sub(1) else {
        return Ok(());
    };
    let hi = history.epochs[number].hi;
    let lost: u64 = (hi..history.next_write())
        .map(|id| history.write(id))
        .filter(|write| write.epoch == number && !write.direct)
        .filter(|write| matches!(write.outcome, Outcome::Acked(_)))
        .map(|write| match write.content {
            crate::content::Content::Zero => 0,
            _ => write.range.bytes() as u64,
        })
        .sum();
    if lost > bytes_max {
        return Err(Violation::new(
            "crash-lost-too-much",
            format!("{lost} acknowledged bytes are lost, {bytes_max} are allowed"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::io::SectorRange;

    use super::*;
    use crate::check_reads::check_sector;
    use crate::content::Content;

    const ONE: SectorRange = SectorRange::new(0, 1);

    fn lost_after_crash(persist: Persist, fua: bool, flush_before: bool) -> Option<&'static str> {
        let mut history = History::new(vec![Content::Zero; 4]);
        let mut durability = Durability::opened(persist, history.now());
        if flush_before {
            durability.flush_sent();
            let flush = history.issue_flush();
            durability.flush_acked(&mut history, flush);
        }
        let id = history.issue_write(ONE, None);
        history.ack_write(id, Nanos(10));
        durability.write_acked(&mut history, id, fua);
        history.crash();
        let issued = history.tick();
        let result = check_sector(&mut history, 0, Content::Zero, issued);
        result.err().map(|violation| violation.rule)
    }

    #[test]
    fn durability_follows_the_mode() {
        assert_eq!(
            lost_after_crash(Persist::OnWrite, false, false),
            Some("read-stale")
        );
        assert_eq!(
            lost_after_crash(Persist::OnWrite, false, true),
            Some("read-stale")
        );
        assert_eq!(lost_after_crash(Persist::OnFlush, false, false), None);
        assert_eq!(
            lost_after_crash(Persist::OnFlush, true, false),
            Some("read-stale")
        );
        assert_eq!(
            lost_after_crash(Persist::Auto, false, false),
            Some("read-stale")
        );
        assert_eq!(lost_after_crash(Persist::Auto, false, true), None);
    }

    #[test]
    fn durability_covers_what_was_read_on_write() {
        let mut history = History::new(vec![Content::Zero; 4]);
        let durability = Durability::opened(Persist::OnWrite, history.now());
        let id = history.issue_write(ONE, None);
        durability.read_seen(&mut history, id + 1);
        assert_eq!(history.promised, id + 1);
    }

    #[test]
    fn durability_by_age_and_bytes_is_checked() {
        let mut history = History::new(vec![Content::Zero; 4]);
        for time in [10, 20, 30] {
            let id = history.issue_write(ONE, None);
            history.ack_write(id, Nanos(time));
        }
        promise_aged(&mut history, Nanos(25));
        assert_eq!(history.promised, 3);
        history.crash();
        assert!(check_lost_bytes(&history, 0).is_ok());
        history.epochs[0].hi = 2;
        let lost = check_lost_bytes(&history, 512).unwrap_err();
        assert_eq!(lost.rule, "crash-lost-too-much");
        assert!(check_lost_bytes(&history, 1024).is_ok());
    }
}
