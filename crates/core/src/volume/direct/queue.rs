//! Direct writes that wait for one another.
//!
//! Invariant: a write is ready once no earlier one overlaps it, so that they go to the backend in the order of arrival
//! wherever that shows. Both steps look at each other write once, not at each pair of them.

use super::{Direct, Write};

impl Direct {
    /// What taking a write costs: it is compared with all that have not ended.
    pub(in crate::volume) fn push_looks(&self) -> usize {
        1 + self.writes.len()
    }

    /// Take a write behind all others. It is ready if it overlaps none of them.
    pub(super) fn push(&mut self, mut write: Write) {
        self.work.add(self.writes.len() as u64);
        let others = self.writes.values();
        let overlaps = |other: &&Write| other.range.overlaps(write.range);
        write.blockers = others.filter(overlaps).count();
        let number = self.next;
        self.next += 1;
        if write.blockers == 0 {
            self.ready.insert(number);
        }
        self.writes.insert(number, write);
    }

    /// A write that was started has ended: those that waited for nothing else are ready.
    pub(super) fn pop(&mut self, number: u64) -> Write {
        let write = self.writes.remove(&number).expect("it was started");
        self.started -= 1;
        self.work.add(self.writes.len() as u64);
        for (&number, later) in self.writes.range_mut(number..) {
            if later.range.overlaps(write.range) {
                later.blockers -= 1;
                if later.blockers == 0 {
                    self.ready.insert(number);
                }
            }
        }
        write
    }
}
