//! Reads of blocks that are rewritten all the time.
//!
//! Checker: a read that has everything it asked devices and backend for waits only until what was written
//! before it is durable. So no more than a few writes to the log begin after that and end before its reply. A write
//! that overtakes an earlier one does not count: it is that one, late, which the read may wait for.

use super::{Io, Owner, Reply, RequestError, RequestId, Violation, Waiting, World};

/// Writes to the log that may begin while a read waits for nothing else, and end before its reply: all that
/// may be sealed and not submitted when it comes, and some more.
const PASSED_MAX: u32 = 40;

/// A read that waits for nothing but durability.
#[derive(Clone, Copy, Debug)]
pub(super) struct Starving {
    read: RequestId,
    /// Effects up to this one had begun when it was first seen to wait so.
    begun: u64,
    passed: u32,
}

impl World {
    /// A write to the log of a volume has ended well.
    pub(super) fn log_write_ended(&mut self, unit: usize, number: u64) -> Result<(), Violation> {
        let is_read = |what: &Waiting| matches!(what, Waiting::Read(_));
        let read = self.units[unit].requests.first(is_read);
        let (Some(read), false) = (read, self.may_wait_otherwise(unit)) else {
            self.units[unit].starving = None;
            return Ok(());
        };
        let begun = self.next_io;
        let known = self.units[unit].starving.filter(|known| known.read == read);
        let mut starving = known.unwrap_or(Starving {
            read,
            begun,
            passed: 0,
        });
        let overtakes = (self.in_flight.range(..number))
            .any(|(_, earlier)| earlier.io.log_written() == Some(unit));
        starving.passed += u32::from(number > starving.begun && !overtakes);
        self.units[unit].starving = Some(starving);
        if starving.passed <= PASSED_MAX {
            return Ok(());
        }
        Err(Violation::new(
            "read-starved",
            format!(
                "read {} of volume {unit} waits for nothing but the log, and {PASSED_MAX} later writes to it have ended",
                read.0
            ),
        ))
    }

    /// Whether a read may wait for a device, the backend or memory.
    fn may_wait_otherwise(&self, unit: usize) -> bool {
        let is_tight = self.pool.free_bytes() < self.pool.total_bytes() / 2;
        let mut under_way = self.in_flight.values();
        is_tight
            || !self.units[unit].held.is_empty()
            || under_way.any(|one| {
                let reads = matches!(
                    one.io,
                    Io::DiskRead(..) | Io::BackendRead(..) | Io::StackRead(_)
                );
                reads && one.owner == Owner::Volume(unit)
            })
    }

    /// Whether a planted bug keeps the reply of a read, since its range is being written.
    pub(super) fn is_starved(&self, unit: usize, id: RequestId) -> bool {
        let requests = &self.units[unit].requests;
        let Some(Waiting::Read(read)) = requests.get(id) else {
            return false;
        };
        let history = &self.units[unit].history;
        requests.any(|what| match what {
            Waiting::Write(write, _) => history.write(*write).range.overlaps(read.range),
            _ => false,
        })
    }

    /// Look again at what a planted bug keeps.
    pub(super) fn release_starved(&mut self, unit: usize) -> Result<(), Violation> {
        let kept: Vec<(RequestId, Result<Reply, RequestError>)> =
            std::mem::take(&mut self.units[unit].starved);
        for (id, result) in kept {
            self.replied(unit, id, result)?;
        }
        Ok(())
    }
}
