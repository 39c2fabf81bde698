//! Group commit by measurement: how much a span gathers, how many are written at once, and how long a client need not be
//! heard.
//!
//! A durable write costs a device much the same for one block or for thirty, and each span costs processor time. So spans
//! gather; but what waits for others is late, and a device that waits is idle. Two things are known when that is weighed:
//! how long durable writes take here, alone and beside another one; and how many writes are *expected*: those that are
//! not durable, and those that were answered a moment ago, for whoever has an answer sends the next request.
//!
//! * Several spans are written at once where that pays: while clients take the answers of one and send their next
//!   requests, the device has another. Each gathers an equal part of what is expected. How many is tried out now and then
//!   ([`SpansAtOnce`]): what is answered in a time with one more or one fewer decides, for it depends on the device, on
//!   the processor and on the clients.
//! * With none under way, a span waits for its part for half of what a durable write takes at most, or is written at once
//!   if nothing is expected: a single client that waits for each write never waits for others.
//! * A span that is large enough to keep the device busy by its transfer alone waits for nothing.
//!
//! In which way spans are made durable is tried out as well ([`super::durable_ways`]).
//!
//! So a device that makes a write durable in 10 µs has spans that wait 5 µs at most, and one that needs milliseconds has
//! spans that hold all that clients send meanwhile.
//!
//! It decides; [`super::Writes`] performs. There are no failures.

mod spans_at_once;

use alloc::collections::VecDeque;

use spans_at_once::SpansAtOnce;

use super::durable_ways::{DurableWays, Took};
use crate::base::io::{DurableWay, Nanos};

/// A span of so many bytes is large: its transfer takes as long as making it durable.
const LARGE_SPAN_BYTES: usize = 256 << 10;
/// Large spans that are written at once.
const LARGE_SPANS_AT_ONCE: usize = 4;
/// What a durable write is taken to need before one was measured.
const DURABLE_GUESS: Nanos = Nanos::from_micros(100);
/// A share of a new measurement in the smoothed one, as a divisor.
const SMOOTHING: u64 = 8;
/// One measurement counts as so many times the smoothed one at most: a moment in which the device hung says nothing.
const OUTLIER: u64 = 4;
/// A client is not heard for this share of a durable write, as a divisor, while one is under way.
const DEAF_SHARE: u64 = 4;
/// To stop hearing a client and begin again costs more than a shorter time is worth.
const DEAF_MIN: Nanos = Nanos::from_micros(10);
/// A client is not heard for so long at most.
const DEAF_MAX: Nanos = Nanos::from_micros(200);
/// Clients whose writes are as large as this on average are heard at all times.
const HEARD_WRITE_BYTES: u64 = 8 << 10;

/// A smoothed time.
#[derive(Clone, Copy, Debug, Default)]
struct Smoothed(Option<Nanos>);

impl Smoothed {
    fn note(&mut self, time: Nanos) {
        let Some(before) = self.0 else {
            self.0 = Some(time);
            return;
        };
        let time = time.0.min(before.0.saturating_mul(OUTLIER)).max(1);
        let kept = before.0 - before.0 / SMOOTHING;
        self.0 = Some(Nanos(kept + time.div_ceil(SMOOTHING)));
    }
}

/// A span that is being written.
#[derive(Clone, Copy, Debug)]
struct Flight {
    end: u64,
    begun: Nanos,
    is_alone: bool,
    /// How it is made durable, and what it is compared with others by.
    way: Option<DurableWay>,
    bytes: usize,
    depth: usize,
}

/// What is to be decided about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gathered {
    /// Entries and bytes of the open span, and when its first entry came.
    pub(super) entries: usize,
    pub(super) bytes: usize,
    pub(super) since: Nanos,
    /// Spans that are being written.
    pub(super) flights: usize,
    /// Requests that wait for durability.
    pub(super) waiting: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct GroupCommit {
    flights: VecDeque<Flight>,
    /// How long a durable write takes, alone and beside others.
    alone: Smoothed,
    together: Smoothed,
    at_once: SpansAtOnce,
    ways: DurableWays,
    /// Requests that were answered and that no other one has followed, and when the last ones were.
    answered: usize,
    answered_at: Nanos,
    /// What one of the last span's writes brought on average, in bytes.
    write_bytes: u64,
}

impl GroupCommit {
    /// Spans may be made durable in these ways from now on.
    pub(super) fn set_ways(&mut self, ways: DurableWays) {
        self.ways = ways;
    }

    /// How they are at present, but for trials.
    pub(super) fn way(&self) -> Option<DurableWay> {
        self.ways.usual()
    }

    /// What the last span has of clients: so many writes, and the bytes of all together.
    pub(super) fn brought(&mut self, writes: u64, bytes: u64) {
        self.write_bytes = bytes / writes.max(1);
    }

    /// The write of the span of so many bytes that ends at `end` begins. Returns how it is to be made durable.
    pub(super) fn begun(&mut self, now: Nanos, end: u64, bytes: usize) -> Option<DurableWay> {
        self.at_once.begun(now);
        let is_alone = self.flights.is_empty();
        for other in &mut self.flights {
            other.is_alone = false;
        }
        let way = self.ways.next(now);
        self.flights.push_back(Flight {
            end,
            begun: now,
            is_alone,
            way,
            bytes,
            depth: self.flights.len() + 1,
        });
        way
    }

    /// It is durable.
    pub(super) fn ended(&mut self, now: Nanos, end: u64) {
        let found = self.flights.iter().position(|flight| flight.end == end);
        let Some(flight) = found.and_then(|index| self.flights.remove(index)) else {
            return;
        };
        let took = now.since(flight.begun);
        if let Some(way) = flight.way {
            let (bytes, depth) = (flight.bytes, flight.depth);
            let nanos = took;
            self.ways.ended(
                now,
                way,
                Took {
                    nanos,
                    bytes,
                    depth,
                },
            );
        }
        if flight.is_alone {
            self.alone.note(took);
        } else {
            self.together.note(took);
        }
    }

    /// A request comes that waits for durability.
    pub(super) fn came(&mut self) {
        self.answered = self.answered.saturating_sub(1);
    }

    /// So many requests were answered.
    pub(super) fn answered(&mut self, now: Nanos, requests: usize) {
        if requests == 0 {
            return;
        }
        if self.is_long_ago(now) {
            self.answered = 0;
        }
        self.answered += requests;
        self.answered_at = now;
        self.at_once.answered(requests);
    }

    /// Whether whoever was answered last would have come again by now.
    fn is_long_ago(&self, now: Nanos) -> bool {
        now.since(self.answered_at) > self.durable()
    }

    /// How long a durable write takes by itself.
    fn durable(&self) -> Nanos {
        self.alone.0.or(self.together.0).unwrap_or(DURABLE_GUESS)
    }

    /// How many writes are under way, or may come at any moment.
    fn expected(&self, now: Nanos, waiting: usize) -> usize {
        if self.is_long_ago(now) {
            return waiting;
        }
        waiting + self.answered
    }

    /// When the open span has gathered enough, though nothing more comes; only where none is being written.
    pub(super) fn until(&self, since: Nanos) -> Nanos {
        since.plus(Nanos(self.durable().0 / 2))
    }

    /// Whether the open span has gathered enough, if somebody waits for it.
    pub(super) fn is_enough(&self, now: Nanos, open: Gathered) -> bool {
        if open.bytes >= LARGE_SPAN_BYTES && open.flights < LARGE_SPANS_AT_ONCE {
            return true;
        }
        let at_once = self.at_once.get();
        let part = self.expected(now, open.waiting).div_ceil(at_once);
        let is_part = open.entries >= part;
        match open.flights {
            0 => is_part || now >= self.until(open.since),
            flights => is_part && flights < at_once,
        }
    }

    /// How long clients with much under way need not be heard, while a span is being written: their requests go out with
    /// the next one, and a wakeup for each costs more than they do. Large ones are received at once: a socket holds three
    /// of 64 KiB, so their client could not go on sending meanwhile, and the copy of one costs more than the wakeup.
    pub(super) fn deaf_time(&self) -> Nanos {
        if self.write_bytes >= HEARD_WRITE_BYTES {
            return Nanos(0);
        }
        let time = Nanos(self.durable().0 / DEAF_SHARE);
        if time < DEAF_MIN {
            Nanos(0)
        } else {
            time.min(DEAF_MAX)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: u64 = 1_000;

    fn at(micros: u64) -> Nanos {
        Nanos(micros * MICRO)
    }

    /// What was measured on a device that needs so long for a durable write, with so many answered at 1 s.
    fn measured(durable: Nanos, answered: usize) -> GroupCommit {
        let mut group = GroupCommit::default();
        for end in 0..64 {
            let begun = Nanos(end * 1_000_000);
            group.begun(begun, end, 8192);
            group.ended(begun.plus(durable), end);
        }
        group.answered(at(1_000_000), answered);
        group
    }

    fn open(entries: usize, since: Nanos, flights: usize, waiting: usize) -> Gathered {
        Gathered {
            entries,
            bytes: entries * 4096,
            since,
            flights,
            waiting,
        }
    }

    #[test]
    fn whoever_waits_for_each_write_never_waits_for_others() {
        let mut group = measured(at(100), 1);
        let now = at(1_000_020);
        group.came();
        assert!(group.is_enough(now, open(1, now, 0, 1)));
    }

    #[test]
    fn a_span_waits_for_its_part_of_what_is_expected_but_not_for_long() {
        let mut group = measured(at(100), 16);
        let now = at(1_000_020);
        group.came();
        assert!(!group.is_enough(now, open(1, now, 0, 1)), "15 may come yet");
        assert!(group.is_enough(now.plus(at(50)), open(1, now, 0, 1)));
        for _ in 1..8 {
            group.came();
        }
        assert!(group.is_enough(now, open(8, now, 0, 8)), "half of all");
    }

    #[test]
    fn what_was_answered_long_ago_is_not_waited_for() {
        let mut group = measured(at(100), 16);
        let now = at(1_000_200);
        group.came();
        assert!(group.is_enough(now, open(1, now, 0, 1)));
    }

    #[test]
    fn a_second_span_gathers_as_much_as_the_first_and_a_third_waits() {
        let group = measured(at(100), 0);
        let now = at(1_000_020);
        assert!(!group.is_enough(now, open(7, now, 1, 15)));
        assert!(group.is_enough(now, open(8, now, 1, 16)));
        assert!(!group.is_enough(now, open(30, now, 2, 46)));
        // Unless its transfer alone keeps the device busy.
        assert!(group.is_enough(now, open(64, now, 2, 80)));
    }

    #[test]
    fn waits_are_shares_of_what_a_durable_write_takes_on_the_device() {
        let protected = measured(at(10), 16);
        assert_eq!(protected.until(at(7)), at(12));
        assert_eq!(protected.deaf_time(), Nanos(0));
        let flushed = measured(at(100), 16);
        assert_eq!(flushed.deaf_time(), at(25));
        let slow = measured(at(10_000), 16);
        assert_eq!(slow.deaf_time(), DEAF_MAX);
    }

    #[test]
    fn clients_whose_writes_are_large_are_heard_at_all_times() {
        let mut group = measured(at(100), 16);
        group.brought(4, 256 << 10);
        assert_eq!(group.deaf_time(), Nanos(0));
        group.brought(64, 256 << 10);
        assert_eq!(group.deaf_time(), at(25));
    }

    #[test]
    fn a_moment_in_which_the_device_hangs_is_soon_forgotten() {
        let mut group = measured(at(100), 0);
        group.begun(at(2_000_000), 100, 8192);
        group.ended(at(2_350_000), 100);
        assert!(group.durable() <= at(150), "{:?}", group.durable());
        for end in 101..133 {
            group.begun(Nanos(0), end, 8192);
            group.ended(at(100), end);
        }
        assert!(group.durable() <= at(110), "{:?}", group.durable());
    }
}
