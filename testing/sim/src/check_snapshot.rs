//! Checker: what a snapshot holds.
//!
//! 1. When it is taken it holds everything that was acknowledged before it was asked for, and everything that was
//!    acknowledged before the newest write in it was sent: it is a prefix of what was written.
//! 2. It is a disk that the client could have seen: nothing of what was sent after a flush without all
//!    that the flush put before it ([`check_backend::check_first`]), however many flushes destage went
//!    past at once.
//! 3. It stays that through crashes and changes of size: it never holds what the volume has lost. What
//!    was cut off since is not compared any more, for its history is gone.

use crate::check_backend;
use crate::content::Content;
use crate::model::{History, Seq};
use crate::violation::Violation;

/// A snapshot that was taken.
#[derive(Debug)]
pub struct Snapshot {
    contents: Vec<Content>,
    /// Sectors below this one were never cut off.
    kept: u64,
}

impl Snapshot {
    /// A snapshot with `contents` is taken, which was asked for at `asked`.
    pub fn take(history: &History, asked: Seq, contents: Vec<Content>) -> Result<Self, Violation> {
        let at = |sector: u64| contents[sector as usize];
        check_backend::check_complete(history, asked, at)
            .map_err(|missing| Violation::new("snapshot-incomplete", missing.message))?;
        let sectors = 0..contents.len() as u64;
        // The oldest write that may have left it: no later one is certain to be there.
        let newest = sectors.filter_map(|sector| history.matches(sector, at(sector)).last());
        if let Some(newest) = newest.max().filter(|&newest| newest > 0) {
            check_backend::check_complete(history, history.write(newest).issued, at)
                .map_err(|missing| Violation::new("snapshot-not-a-prefix", missing.message))?;
        }
        let snapshot = Self {
            kept: contents.len() as u64,
            contents,
        };
        snapshot.check(history)?;
        Ok(snapshot)
    }

    /// The volume's size changes.
    pub fn resized(&mut self, sectors: u64) {
        self.kept = self.kept.min(sectors);
    }

    /// Check it against what is known now.
    pub fn check(&self, history: &History) -> Result<(), Violation> {
        check_backend::check_first(self.kept, history, |sector| self.contents[sector as usize])
            .map_err(|wrong| Violation::new("snapshot-not-a-prefix", wrong.message))
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::io::{Nanos, SectorRange};

    use super::*;
    use crate::content::WriteId;

    fn acked(history: &mut History, sector: u64) -> WriteId {
        let id = history.issue_write(SectorRange::new(sector, 1), None);
        history.ack_write(id, Nanos(0));
        id
    }

    fn flush(history: &mut History) {
        let flush = history.issue_flush();
        history.ack_flush(flush);
    }

    fn rule(result: Result<Snapshot, Violation>) -> Option<&'static str> {
        result.err().map(|violation| violation.rule)
    }

    #[test]
    fn snapshot_holds_what_was_acknowledged_before_it_was_asked_for() {
        let mut history = History::new(vec![Content::Zero; 4]);
        let first = Content::Write(acked(&mut history, 0));
        let asked = history.tick();
        let later = Content::Write(acked(&mut history, 1));
        let zero = Content::Zero;
        let take = |contents: [Content; 4]| Snapshot::take(&history, asked, contents.to_vec());
        assert_eq!(rule(take([first, zero, zero, zero])), None);
        assert_eq!(rule(take([first, later, zero, zero])), None);
        let missing = take([zero, zero, zero, zero]);
        assert_eq!(rule(missing), Some("snapshot-incomplete"));
    }

    #[test]
    fn snapshot_is_no_half_of_what_a_flush_orders() {
        let mut history = History::new(vec![Content::Zero; 4]);
        let asked = history.tick();
        let first = Content::Write(acked(&mut history, 0));
        flush(&mut history);
        let second = Content::Write(acked(&mut history, 1));
        let zero = Content::Zero;
        let take = |contents: [Content; 4]| Snapshot::take(&history, asked, contents.to_vec());
        assert_eq!(rule(take([first, second, zero, zero])), None);
        let half = take([zero, second, zero, zero]);
        assert_eq!(rule(half), Some("snapshot-not-a-prefix"));
    }

    #[test]
    fn snapshot_never_holds_what_was_lost_unless_it_was_cut_off() {
        let mut history = History::new(vec![Content::Zero; 4]);
        let asked = history.tick();
        let id = acked(&mut history, 3);
        let contents = vec![
            Content::Zero,
            Content::Zero,
            Content::Zero,
            Content::Write(id),
        ];
        let mut snapshot = Snapshot::take(&history, asked, contents).expect("it is whole");
        history.crash();
        history.epochs[0].hi = id;
        let wrong = snapshot.check(&history).unwrap_err();
        assert_eq!(wrong.rule, "snapshot-not-a-prefix");
        history.resize(2);
        snapshot.resized(2);
        history.resize(4);
        snapshot.resized(4);
        assert!(snapshot.check(&history).is_ok());
    }
}
