//! What a log has counted of its spans, and of the time that entries spend in them. Times are those of the steps that
//! the log is told of anyway.

use super::{Flight, OpenSpan};
use crate::base::io::Nanos;

/// Counters of an open log. Divided by `entries`, the times are those of one write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// Writes, zeroes and discards whose spans became durable.
    pub entries: u64,
    /// At the beginning of each span's write: spans that were being written, this one included, all together.
    pub in_flight: u64,
    /// From when entries were accepted until their span was sealed, all together.
    pub open_time: Nanos,
    /// From when their span was sealed until it was durable, all together: what waits for spans before it counts.
    pub device_time: Nanos,
}

impl SpanCounts {
    /// The write of a span begins, as one of so many.
    pub(super) fn begun(&mut self, in_flight: usize) {
        self.in_flight += in_flight as u64;
    }

    /// A span is durable, now.
    pub(super) fn durable(&mut self, flight: &Flight, now: Nanos) {
        let waited = now.since(flight.sealed).0.saturating_mul(flight.entries);
        self.entries += flight.entries;
        self.open_time = self.open_time.plus(flight.open_time);
        self.device_time = self.device_time.plus(Nanos(waited));
    }
}

impl OpenSpan {
    /// An entry of a client's is accepted.
    pub(super) fn note_accepted(&mut self, now: Nanos) {
        self.accepted += 1;
        self.later = self.later.plus(now.since(self.since));
    }

    /// How long its entries have been in it, all together.
    pub(super) fn open_time(&self, now: Nanos) -> Nanos {
        let all = now.since(self.since).0.saturating_mul(self.accepted);
        Nanos(all).since(self.later)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::io::SectorRange;
    use crate::base::limits::LOG_BYTES_MIN as LOG_BYTES;
    use crate::format::{EntryKind, LogSuperblock};
    use crate::log::write_log::{Entry, WriteLog};

    fn discard(start: u64) -> Entry {
        Entry {
            range: SectorRange::new(start, 8),
            kind: EntryKind::Discard,
            no_hole: false,
            position: u64::MAX,
            stored: None,
            data: None,
            held_blocks: 0,
        }
    }

    #[test]
    fn time_of_entries_is_that_in_the_open_span_and_that_until_it_is_durable() {
        let micros = Nanos::from_micros;
        let mut log = WriteLog::new(LogSuperblock::new([0; 16], 1, LOG_BYTES), None);
        log.append(micros(100), discard(0), None);
        log.append(micros(130), discard(80), None);
        log.seal(micros(150));
        log.append(micros(160), discard(160), None);
        log.seal(micros(160));
        let first = log.next_write(8).unwrap().end;
        let second = log.next_write(8).unwrap().end;
        assert_eq!(log.counts().in_flight, 1 + 2);

        // The second span's entry waits for the first one's write.
        assert!(!log.span_written(micros(200), second));
        assert_eq!(log.counts().entries, 0);
        assert!(log.span_written(micros(350), first));
        let counts = log.counts();
        assert_eq!(counts.entries, 3);
        assert_eq!(counts.open_time, micros(50 + 20));
        assert_eq!(counts.device_time, micros(200 + 200 + 190));
    }

    #[test]
    fn entries_that_an_extension_takes_in_are_one() {
        let mut log = WriteLog::new(LogSuperblock::new([0; 16], 1, LOG_BYTES), None);
        log.append(Nanos(1), discard(0), None);
        log.append(Nanos(2), discard(8), None);
        log.seal(Nanos(3));
        let end = log.next_write(8).unwrap().end;
        assert!(log.span_written(Nanos(4), end));
        assert_eq!(log.counts().entries, 1);
    }
}
