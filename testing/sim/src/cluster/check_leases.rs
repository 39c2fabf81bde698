//! Checker: no read is answered past a lease.
//!
//! A read that an opening of the volume answers shows nothing older than what openings of higher epochs had acknowledged when
//! the read was sent. Older is what was sent to an opening of a lower epoch than that of the write that was acknowledged:
//! what one opening does with writes beside one another is the matter of [`crate::check_reads`].

use std::collections::BTreeMap;

use hdcs_core::base::io::SectorRange;
use hdcs_core::base::limits::SECTOR_BYTES;

use super::client::VOLUME;
use crate::content::{Content, WriteId};
use crate::violation::Violation;

/// What is known of a sector.
#[derive(Clone, Copy, Debug, Default)]
struct Sector {
    /// The highest epoch in which a write was acknowledged.
    acked: u64,
    /// The highest epoch in which zeroes were sent; which ones were read cannot be told.
    zeroed: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// In which epoch each write was sent.
    sent: BTreeMap<WriteId, u64>,
    sectors: BTreeMap<u64, Sector>,
    /// What was acknowledged last.
    newest: Option<SectorRange>,
}

/// For each sector of a read the epoch that what it shows is at least of; 0 for any.
pub(super) type Floors = Vec<u64>;

impl Leases {
    /// A write is sent to the opening of an epoch.
    pub(super) fn sent(&mut self, epoch: u64, id: WriteId, content: Content, range: SectorRange) {
        self.sent.insert(id, epoch);
        if content == Content::Zero {
            for sector in range.start..range.end() {
                let known = self.sectors.entry(sector).or_default();
                known.zeroed = known.zeroed.max(epoch);
            }
        }
    }

    /// It was acknowledged.
    pub(super) fn acked(&mut self, id: WriteId, range: SectorRange) {
        let epoch = self.sent.get(&id).copied().unwrap_or(0);
        self.newest = Some(range);
        for sector in range.start..range.end() {
            let known = self.sectors.entry(sector).or_default();
            known.acked = known.acked.max(epoch);
        }
    }

    /// Where something was acknowledged last.
    pub(super) fn newest(&self) -> Option<SectorRange> {
        self.newest
    }

    /// A read is sent to the opening of this epoch.
    pub(super) fn floors(&self, epoch: u64, range: SectorRange) -> Floors {
        let acked = |sector| self.sectors.get(&sector).map_or(0, |known| known.acked);
        let all = (range.start..range.end()).map(acked);
        all.map(|acked| if acked > epoch { acked } else { 0 })
            .collect()
    }

    /// It was answered with this.
    pub(super) fn check(
        &self,
        epoch: u64,
        first: u64,
        floors: &Floors,
        data: &[u8],
    ) -> Result<(), Violation> {
        let all = (first..).zip(floors).zip(data.chunks(SECTOR_BYTES));
        for ((sector, &floor), bytes) in all {
            let Some(content) = Content::decode(VOLUME, sector, bytes) else {
                let message = format!("sector {sector} returned bytes that nobody wrote there");
                return Err(Violation::new("read-foreign", message));
            };
            let of = match content {
                Content::Write(id) => self.sent.get(&id).copied().unwrap_or(0),
                _ => self.sectors.get(&sector).map_or(0, |known| known.zeroed),
            };
            if of < floor {
                let message = format!(
                    "the opening of epoch {epoch} answered a read of sector {sector} with {content:?} of epoch {of}, \
                     after a write of epoch {floor} had been acknowledged"
                );
                return Err(Violation::new("read-past-lease", message));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: SectorRange = SectorRange::new(5, 1);

    fn bytes(content: Content) -> Vec<u8> {
        let mut bytes = vec![0; SECTOR_BYTES];
        content.fill(VOLUME, 5, &mut bytes);
        bytes
    }

    fn rule(leases: &Leases, floors: &Floors, content: Content) -> Option<&'static str> {
        let checked = leases.check(1, 5, floors, &bytes(content));
        checked.err().map(|violation| violation.rule)
    }

    #[test]
    fn read_of_an_old_opening_may_not_show_what_was_written_before_a_newer_one_acknowledged() {
        let mut leases = Leases::default();
        leases.sent(1, 1, Content::Write(1), RANGE);
        leases.acked(1, RANGE);
        leases.sent(2, 2, Content::Write(2), RANGE);
        let early = leases.floors(1, RANGE);
        leases.acked(2, RANGE);
        let late = leases.floors(1, RANGE);
        let (old, new) = (Content::Write(1), Content::Write(2));
        assert_eq!(rule(&leases, &early, old), None, "it was sent before");
        assert_eq!(rule(&leases, &late, old), Some("read-past-lease"));
        assert_eq!(rule(&leases, &late, Content::Zero), Some("read-past-lease"));
        assert_eq!(rule(&leases, &late, new), None);
        assert_eq!(leases.floors(2, RANGE), [0], "its own are others' matter");
        leases.sent(2, 3, Content::Zero, RANGE);
        assert_eq!(rule(&leases, &late, Content::Zero), None);
    }
}
