//! Checker: there is one log.
//!
//! 1. A span of one opening at one position is the same wherever it lies, byte for byte as it is on the medium. What is
//!    written again in its place is what was there.
//! 2. When a span's write ends for a volume, as many members have it on their media as a commit needs.
//! 3. Who begins to serve has everything that was committed behind its tail, and begins at no older tail than one that a
//!    volume was told is durable.
//! 4. The logs of members that are whole are prefixes of one another.
//! 5. A joiner that says where it was cut has that on its medium, and that it is not whole.

use std::collections::BTreeMap;

use hdcs_core::base::buf::Buf;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LogSuperblock, SpanHeader, block_checksum};
use hdcs_core::replication::message::Cut;
use hdcs_core::replication::participant::Found;
use hdcs_core::replication::record::GroupRecord;
use hdcs_core::replication::{Member, Point};

use crate::content::mix;
use crate::disk::{Disk, joined};
use crate::violation::Violation;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Logs {
    /// By opening and position: the checksum, and that of the bytes on the medium.
    spans: BTreeMap<(u64, u64), (u64, u64)>,
    /// Ends of what was committed, by position: the chain there.
    committed: BTreeMap<u64, u64>,
    /// The furthest tail that a volume was told is durable.
    retired: u64,
    /// The highest in which a node has begun to serve.
    epoch: u64,
}

/// The end of the span that is written, whose first block is this one in the clear; `None` if it is less than a whole one.
pub(super) fn end_of(head: &[u8], data: &[Buf]) -> Option<Point> {
    let header = SpanHeader::peek(head).ok()?;
    let blocks = u64::from(header.control_blocks.get()) + u64::from(header.data_blocks.get());
    let bytes: usize = data.iter().map(|part| part.len()).sum();
    (bytes as u64 == blocks * BLOCK_BYTES as u64).then(|| Point {
        position: header.position.get() + blocks,
        chain: header.checksum.get(),
    })
}

impl Logs {
    /// A span goes to a medium: its first block in the clear, and all of it as it is stored.
    pub(super) fn written(&mut self, head: &[u8], stored: &[Buf]) -> Result<(), Violation> {
        let Ok(header) = SpanHeader::peek(head) else {
            return Err(foreign());
        };
        let key = (header.incarnation.get(), header.position.get());
        let blocks = stored.iter().flat_map(|part| part.chunks(BLOCK_BYTES));
        let bytes = blocks.fold(0, |all, block| mix(all ^ u64::from(block_checksum(block))));
        let checksum = (header.checksum.get(), bytes);
        let known = *self.spans.entry(key).or_insert(checksum);
        if known == checksum {
            return Ok(());
        }
        let message = format!(
            "opening {} has written two spans at position {}",
            key.0, key.1
        );
        Err(Violation::new("two-spans", message))
    }

    /// A span's write has ended for a volume; so many media of members have it, of so many that a commit needs.
    pub(super) fn committed(
        &mut self,
        end: Point,
        has: usize,
        needs: usize,
    ) -> Result<(), Violation> {
        self.committed.insert(end.position, end.chain);
        if has >= needs {
            return Ok(());
        }
        let message = format!(
            "what ends at position {} is committed, and {has} members have it of {needs}",
            end.position
        );
        Err(Violation::new("committed-too-few", message))
    }

    /// A volume was told that the log begins here; so many media of members say so, of so many that a commit needs.
    pub(super) fn retired(&mut self, tail: u64, has: usize, needs: usize) -> Result<(), Violation> {
        self.retired = self.retired.max(tail);
        if has >= needs {
            return Ok(());
        }
        let message = format!("the log begins at {tail}, and {has} members say so of {needs}");
        Err(Violation::new("retired-too-few", message))
    }

    /// A node begins to serve in an epoch with this copy. One that comes too late, since another one serves in a higher
    /// epoch by now, has whatever it has: it commits nothing.
    pub(super) fn begin(&mut self, epoch: u64, found: &Found) -> Result<(), Violation> {
        if epoch < self.epoch {
            return Ok(());
        }
        self.epoch = epoch;
        let tail = found.superblock.tail.get();
        if tail < self.retired {
            let message = format!(
                "a log begins at {tail}, and was said to begin at {}",
                self.retired
            );
            return Err(Violation::new("tail-taken-back", message));
        }
        let ends: BTreeMap<u64, u64> = (found.spans.iter())
            .map(|span| (span.end.position, span.end.chain))
            .collect();
        let mut behind = self.committed.range(tail + 1..);
        match behind.find(|(position, chain)| ends.get(position) != Some(chain)) {
            None => Ok(()),
            Some((position, _)) => {
                let message = format!("a new primary lacks what was committed up to {position}");
                Err(Violation::new("committed-lost", message))
            }
        }
    }
}

fn foreign() -> Violation {
    Violation::new(
        "span-foreign",
        "what is written to a ring is no span, and not what was there",
    )
}

/// Check blocks that are written again in their place.
pub(super) fn check_again(disk: &Disk, offset: u64, stored: &[Buf]) -> Result<(), Violation> {
    let stored = joined(stored);
    let mut sound = vec![0; stored.len()];
    disk.peek_sound(offset, &mut sound);
    if sound == stored {
        Ok(())
    } else {
        Err(foreign())
    }
}

/// Check the medium of a joiner that says that it was cut, or of a member that was to go on at the tail, which is whole.
pub(super) fn check_cut(cut: &Cut, superblock: Option<&LogSuperblock>) -> Result<(), Violation> {
    let says = superblock.and_then(LogSuperblock::membership);
    let begins_there = superblock.is_some_and(|superblock| {
        let is_tail = superblock.tail.get() == cut.at.position && cut.at == cut.change.tail;
        is_tail && superblock.tail_chain.get() == cut.at.chain
    });
    let is_there = says.is_some_and(|says| {
        let goes_on = begins_there && says.joined == cut.joined;
        says.cut_position == cut.at.position && (!says.is_whole || goes_on)
    });
    if is_there {
        return Ok(());
    }
    let message = format!(
        "a copy was cut at {:?}, and its medium says {says:?}",
        cut.at
    );
    Err(Violation::new("cut-not-durable", message))
}

/// Check the copies of members, under this record.
pub(super) fn check_prefixes(
    record: &GroupRecord,
    copies: &[(Member, Found)],
) -> Result<(), Violation> {
    let is_whole = |(member, found): &&(Member, Found)| {
        let membership = found.superblock.membership();
        membership.is_some_and(|says| {
            says.is_whole && record.config.members.joined(*member) == Some(says.joined)
        })
    };
    let whole: Vec<_> = copies.iter().filter(is_whole).collect();
    for (one, found) in &whole {
        for (other, others) in &whole {
            let (Some(first), Some(last)) = (others.spans.first(), others.spans.last()) else {
                continue;
            };
            let common = found.spans.iter().filter(|span| {
                span.start.position >= first.start.position
                    && span.end.position <= last.end.position
            });
            let mut lacking = common.filter(|span| !others.spans.contains(span));
            if let Some(span) = lacking.next() {
                let message = format!("{one} has {span:?}, and {other} something else there");
                return Err(Violation::new("no-prefix", message));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(position: u64) -> Point {
        Point {
            position,
            chain: position * 7,
        }
    }

    fn found(tail: u64, ends: &[u64]) -> Found {
        use hdcs_core::replication::SpanId;

        let mut superblock = LogSuperblock::new([1; 16], 1, 16 << 20);
        superblock.tail = tail.into();
        let span = |&position: &u64| SpanId {
            start: point(position - 1),
            end: point(position),
            blocks: 1,
            incarnation: 1,
            evidence: 0,
        };
        Found {
            superblock,
            spans: ends.iter().map(span).collect(),
        }
    }

    #[test]
    fn primary_without_what_was_committed_is_noticed() {
        let mut logs = Logs::default();
        logs.committed(point(3), 2, 2).unwrap();
        logs.committed(point(4), 2, 2).unwrap();
        assert_eq!(logs.begin(1, &found(2, &[3, 4])), Ok(()));
        assert_eq!(logs.begin(2, &found(4, &[])), Ok(()));
        assert_eq!(
            logs.begin(2, &found(2, &[3])).unwrap_err().rule,
            "committed-lost"
        );
    }

    #[test]
    fn primary_that_comes_too_late_need_not_have_what_others_have_committed() {
        let mut logs = Logs::default();
        logs.begin(2, &found(0, &[])).unwrap();
        logs.committed(point(1), 2, 2).unwrap();
        assert_eq!(logs.begin(1, &found(0, &[])), Ok(()));
        assert!(logs.begin(3, &found(0, &[])).is_err());
    }

    #[test]
    fn tail_that_goes_back_is_noticed() {
        let mut logs = Logs::default();
        logs.retired(3, 2, 2).unwrap();
        assert_eq!(logs.begin(2, &found(3, &[4])), Ok(()));
        assert_eq!(
            logs.begin(2, &found(2, &[3])).unwrap_err().rule,
            "tail-taken-back"
        );
    }

    #[test]
    fn commit_by_too_few_is_noticed() {
        let rule = Logs::default().committed(point(1), 1, 2).unwrap_err().rule;
        assert_eq!(rule, "committed-too-few");
    }
}
