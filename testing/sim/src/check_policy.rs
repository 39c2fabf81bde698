//! Checker: what the policy in effect promises, and what a change of it may not lose.
//!
//! 1. Writes go past the log only once everything is durable in the backend that was acknowledged from
//!    the log.
//! 2. A write that went past the log is shown by the backend when it is acknowledged, and durable there
//!    if it has FUA.
//! 3. When a flush is acknowledged, every such write is durable in the backend that was acknowledged
//!    before it was sent, whatever the policy is by then, and however often the node crashed since.
//!    A flush of the backend that fails may lose such writes: then the next of the client's fails, or one that
//!    was sent already.
//! 4. While writes go past the log, nothing is dirty.
//! 5. What is sent under read-only is refused.

use hdcs_core::volume::{Policy, VolumeStats};

use crate::content::{Content, WriteId};
use crate::model::{FlushOp, History, Seq};
use crate::violation::Violation;

/// Writes are said to go past the log from now on.
pub fn check_begun(history: &History, durable: impl Fn(u64) -> Content) -> Result<(), Violation> {
    for sector in 0..history.sectors() {
        let required = history.required_of_log(sector);
        let has = history.matches(sector, durable(sector)).next();
        if has.unwrap_or(0) < required {
            return Err(Violation::new(
                "policy-hasty",
                format!(
                    "writes go past the log, and sector {sector} of the backend holds {:?} and lacks \
                     write {required}",
                    durable(sector)
                ),
            ));
        }
    }
    Ok(())
}

/// A write that went past the log is acknowledged: `held` tells what has to show it.
pub fn check_written(
    history: &History,
    id: WriteId,
    held: impl Fn(u64) -> Content,
) -> Result<(), Violation> {
    let range = history.write(id).range;
    for sector in (range.start..range.end()).filter(|&sector| history.covers(id, sector)) {
        let has = history.matches(sector, held(sector)).next();
        if has.unwrap_or(0) < id {
            return Err(Violation::new(
                "policy-early-ack",
                format!(
                    "write {id} is acknowledged, and sector {sector} of the backend holds {:?}",
                    held(sector)
                ),
            ));
        }
    }
    Ok(())
}

/// A flush is acknowledged.
pub fn check_flushed(
    history: &History,
    flush: FlushOp,
    durable: impl Fn(u64) -> Content,
) -> Result<(), Violation> {
    let untold = history.untold_before(flush.issued);
    for id in history.direct_acked_before(flush.issued).chain(untold) {
        check_written(history, id, &durable)
            .map_err(|missing| Violation::new("policy-flush", missing.message))?;
    }
    Ok(())
}

/// What a volume says of itself.
pub fn check_clean(stats: &VolumeStats) -> Result<(), Violation> {
    if stats.policy == Policy::WriteBack || stats.dirty_bytes == 0 {
        return Ok(());
    }
    Err(Violation::new(
        "policy-dirty",
        format!(
            "{} bytes are dirty under {:?}",
            stats.dirty_bytes, stats.policy
        ),
    ))
}

/// A write is acknowledged; since when it would have been refused, if it would.
pub fn check_writable(
    history: &History,
    id: WriteId,
    read_only_since: Option<Seq>,
) -> Result<(), Violation> {
    if read_only_since.is_none_or(|since| history.write(id).issued < since) {
        return Ok(());
    }
    Err(Violation::new(
        "policy-read-only",
        format!("write {id} was sent to a read-only volume and acknowledged"),
    ))
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::io::{Nanos, SectorRange};

    use super::*;

    fn acked(history: &mut History, sector: u64) -> WriteId {
        let id = history.issue_write(SectorRange::new(sector, 1), None);
        history.ack_write(id, Nanos(0));
        id
    }

    fn rule(result: Result<(), Violation>) -> Option<&'static str> {
        result.err().map(|violation| violation.rule)
    }

    #[test]
    fn policy_that_begins_with_dirty_data_is_caught() {
        let mut history = History::new(vec![Content::Zero; 4]);
        let id = acked(&mut history, 1);
        assert_eq!(
            rule(check_begun(&history, |_| Content::Zero)),
            Some("policy-hasty")
        );
        let held = |sector| {
            if sector == 1 {
                Content::Write(id)
            } else {
                Content::Zero
            }
        };
        assert_eq!(rule(check_begun(&history, held)), None);
    }

    #[test]
    fn policy_acknowledgements_before_the_backend_are_caught() {
        let mut history = History::new(vec![Content::Zero; 4]);
        history.set_direct(true);
        let old = acked(&mut history, 1);
        let new = acked(&mut history, 1);
        let holds = |id| move |_| Content::Write(id);
        assert_eq!(rule(check_written(&history, new, holds(new))), None);
        assert_eq!(rule(check_written(&history, old, holds(new))), None);
        assert_eq!(
            rule(check_written(&history, new, holds(old))),
            Some("policy-early-ack")
        );
        let flush = history.issue_flush();
        assert_eq!(
            rule(check_flushed(&history, flush, holds(old))),
            Some("policy-flush")
        );
        assert_eq!(rule(check_flushed(&history, flush, holds(new))), None);
    }

    #[test]
    fn policy_of_a_loss_that_no_flush_tells_is_caught() {
        let mut history = History::new(vec![Content::Zero; 4]);
        history.set_direct(true);
        let id = acked(&mut history, 1);
        let flush = history.issue_flush();
        history.loosen(true);
        let lost = |_| Content::Zero;
        assert_eq!(
            rule(check_flushed(&history, flush, lost)),
            Some("policy-flush")
        );
        let kept = |_| Content::Write(id);
        assert_eq!(rule(check_flushed(&history, flush, kept)), None);
        history.told_of_loss();
        assert_eq!(rule(check_flushed(&history, flush, lost)), None);
    }

    #[test]
    fn policy_of_dirty_and_written_read_only_volumes_is_caught() {
        let mut stats = VolumeStats {
            dirty_bytes: 512,
            ..VolumeStats::default()
        };
        assert_eq!(rule(check_clean(&stats)), None);
        stats.policy = Policy::WriteAround;
        assert_eq!(rule(check_clean(&stats)), Some("policy-dirty"));
        let mut history = History::new(vec![Content::Zero; 4]);
        let before = acked(&mut history, 0);
        let since = history.tick();
        let after = acked(&mut history, 0);
        assert_eq!(rule(check_writable(&history, before, Some(since))), None);
        let wrong = check_writable(&history, after, Some(since));
        assert_eq!(rule(wrong), Some("policy-read-only"));
    }
}
