//! Checker: a volume whose write log is lost, opened from its backend alone.
//!
//! 1. What the backend holds when the log is given up is a disk that the client could have seen: a
//!    state that every flush is respected in ([`check_backend::check_whole`]).
//! 2. From then on the volume holds exactly that: nothing of the log, and nothing that the read cache
//!    has kept, older or newer, is ever returned ([`crate::check_reads`], on the history that this
//!    begins).

use crate::check_backend;
use crate::content::Content;
use crate::model::History;
use crate::violation::Violation;

/// The log is given up while each sector of the backend holds `content`.
pub fn give_up_log(
    history: &mut History,
    content: impl Fn(u64) -> Content,
) -> Result<(), Violation> {
    check_backend::check_whole(history, &content)?;
    history.restart(content);
    Ok(())
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::io::{Nanos, SectorRange};

    use super::*;
    use crate::check_reads::check_sector;
    use crate::content::WriteId;

    fn acked(history: &mut History, sector: u64) -> WriteId {
        let id = history.issue_write(SectorRange::new(sector, 1), None);
        history.ack_write(id, Nanos(0));
        id
    }

    fn sees(history: &mut History, sector: u64, content: Content) -> Option<&'static str> {
        let issued = history.tick();
        let seen = check_sector(history, sector, content, issued);
        seen.err().map(|violation| violation.rule)
    }

    #[test]
    fn lost_log_leaves_what_the_backend_holds_and_nothing_else() {
        let mut history = History::new(vec![Content::Zero; 4]);
        let old = Content::Write(acked(&mut history, 0));
        let held = Content::Write(acked(&mut history, 0));
        let lost = Content::Write(acked(&mut history, 0));
        let beside = Content::Write(acked(&mut history, 1));
        history.crash();
        let backend = [held, Content::Zero, Content::Zero, Content::Zero];
        give_up_log(&mut history, |sector| backend[sector as usize]).expect("no flush was acked");
        assert_eq!(sees(&mut history, 0, held), None);
        assert_eq!(
            sees(&mut history, 0, old),
            Some("read-stale"),
            "from the cache"
        );
        assert_eq!(
            sees(&mut history, 0, lost),
            Some("read-stale"),
            "from the log"
        );
        assert_eq!(sees(&mut history, 1, beside), Some("read-stale"));
        let new = Content::Write(acked(&mut history, 1));
        assert_eq!(sees(&mut history, 1, new), None);
        assert_eq!(sees(&mut history, 1, Content::Zero), Some("read-stale"));
        // It can be lost again.
        history.crash();
        give_up_log(&mut history, |sector| backend[sector as usize]).expect("nothing was flushed");
        assert_eq!(sees(&mut history, 1, new), Some("read-stale"));
    }

    #[test]
    fn lost_log_over_a_backend_that_skipped_a_flush_is_caught() {
        let mut history = History::new(vec![Content::Zero; 4]);
        acked(&mut history, 0);
        let flush = history.issue_flush();
        history.ack_flush(flush);
        let newer = Content::Write(acked(&mut history, 1));
        history.crash();
        let backend = [Content::Zero, newer, Content::Zero, Content::Zero];
        let skipped = give_up_log(&mut history, |sector| backend[sector as usize]);
        assert_eq!(skipped.unwrap_err().rule, "backend-not-a-prefix");
    }
}
