//! Write logs on their way to the other side, and from it.
//!
//! ```text
//! opener:     ask ─► Asked ── first Ack ──► Accepted ── Close, by either ──► forgotten
//! other side: Open ► Asked ── accept ─────► Accepted ── Close, by either ──► forgotten
//! ```
//!
//! Invariants, which both sides keep and check:
//! 1. Streams are numbered upwards by whoever opens them; a number is never used again. So what comes for a number that is
//!    not in the table, but was, is late and dropped; for one that never was, it is a mistake.
//! 2. A span begins at or behind the end of the one before, and names that: none is missing, none comes twice.
//! 3. A span ends at the limit at most.
//! 4. What is durable, the tail and the limit never go back; tail <= durable <= what was sent. The marks of an Append do not
//!    either; they may be far ahead of its span, if that was read again from the log.
//!
//! Where a span goes on the medium is not decided here, and neither is what its bytes mean.

use std::collections::{BTreeMap, BTreeSet};

use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{BLOCK_BYTES, WIRE_STREAMS_MAX};
use hdcs_core::wire::{AckMarks, AppendMarks, FRAME_BY_OPENER, Kind};

use crate::error::{SendError, Violation};
use crate::frame::Head;

/// Which span it is, beside its place, and what its sender knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// Position below which the log was durable at the primary when it sealed the span.
    pub durable: u64,
    /// Position below which it is committed.
    pub committed: u64,
    /// Checksum of the span before.
    pub chain_before: u64,
    /// Checksum of the span.
    pub chain: u64,
    /// The opening that wrote it.
    pub incarnation: u64,
}

impl From<&AppendMarks> for Marks {
    fn from(wire: &AppendMarks) -> Self {
        Self {
            durable: wire.durable.get(),
            committed: wire.committed.get(),
            chain_before: wire.chain_before.get(),
            chain: wire.chain.get(),
            incarnation: wire.incarnation.get(),
        }
    }
}

impl From<Marks> for AppendMarks {
    fn from(marks: Marks) -> Self {
        Self {
            durable: marks.durable.into(),
            committed: marks.committed.into(),
            chain_before: marks.chain_before.into(),
            chain: marks.chain.into(),
            incarnation: marks.incarnation.into(),
            reserved: [0; 24],
        }
    }
}

/// What a member says of its copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Position below which it is durable.
    pub durable: u64,
    /// Its durable tail.
    pub tail: u64,
    /// Position up to which it takes spans.
    pub limit: u64,
}

/// A log that goes to the other side.
#[derive(Debug)]
struct Outgoing {
    epoch: u64,
    /// Where the last span ended.
    next: u64,
    /// `None`: not accepted yet.
    progress: Option<Progress>,
    /// When it is given up if it is not accepted.
    deadline: Nanos,
    /// Somebody waits for the limit to move.
    is_short: bool,
}

/// The logs that go to the other side.
#[derive(Debug, Default)]
pub struct Sending {
    streams: BTreeMap<u32, Outgoing>,
    last: u32,
}

impl Sending {
    /// Open a stream.
    pub fn open(&mut self, epoch: u64, position: u64, deadline: Nanos) -> Result<Head, SendError> {
        if self.streams.len() >= WIRE_STREAMS_MAX || self.last == u32::MAX {
            return Err(SendError::Streams(WIRE_STREAMS_MAX));
        }
        self.last += 1;
        let stream = Outgoing {
            epoch,
            next: position,
            progress: None,
            deadline,
            is_short: false,
        };
        self.streams.insert(self.last, stream);
        Ok(Head {
            stream: self.last,
            epoch,
            position,
            ..Head::new(Kind::Open)
        })
    }

    /// The head of a span of so many bytes that begins at `position`, if it may be sent.
    pub fn append(&mut self, number: u32, position: u64, bytes: usize) -> Result<Head, SendError> {
        let stream = self.streams.get_mut(&number);
        let stream = stream.ok_or(SendError::Stream(number))?;
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(SendError::NotBlocks(bytes));
        }
        let misplaced = SendError::Position {
            position,
            expected: stream.next,
        };
        if position < stream.next {
            return Err(misplaced);
        }
        let blocks = (bytes / BLOCK_BYTES) as u64;
        let end = position.checked_add(blocks).ok_or(misplaced)?;
        if stream.progress.is_none_or(|progress| end > progress.limit) {
            stream.is_short = true;
            return Err(SendError::Full);
        }
        Ok(Head {
            stream: number,
            epoch: stream.epoch,
            position,
            number: stream.next,
            ..Head::new(Kind::Append)
        })
    }

    /// A span of so many blocks, whose head [`Self::append`] gave, is going to be sent.
    pub fn appended(&mut self, head: &Head, bytes: usize) {
        if let Some(stream) = self.streams.get_mut(&head.stream) {
            stream.next = head.position + (bytes / BLOCK_BYTES) as u64;
        }
    }

    /// Forget a stream; whether there was one.
    pub fn close(&mut self, stream: u32) -> bool {
        self.streams.remove(&stream).is_some()
    }

    /// An Ack has come: what it says, and whether somebody waits for the limit to move; `None`: it is late.
    pub fn acked(
        &mut self,
        head: &Head,
        marks: &AckMarks,
    ) -> Result<Option<(Progress, bool)>, Violation> {
        let number = head.stream;
        let Some(stream) = self.streams.get_mut(&number) else {
            return self.late(Kind::Ack, number).map(|()| None);
        };
        if head.epoch != stream.epoch {
            return Err(Violation::Epoch {
                stream: number,
                expected: stream.epoch,
                found: head.epoch,
            });
        }
        let progress = Progress {
            durable: head.position,
            tail: marks.tail.get(),
            limit: marks.limit.get(),
        };
        let before = stream.progress.unwrap_or_default();
        below(number, "durable", progress.durable, stream.next)?;
        below(number, "tail", progress.tail, progress.durable)?;
        not_back(number, "durable", progress.durable, before.durable)?;
        not_back(number, "tail", progress.tail, before.tail)?;
        not_back(number, "limit", progress.limit, before.limit)?;
        stream.progress = Some(progress);
        let moved = stream.is_short && progress.limit > before.limit;
        stream.is_short &= !moved;
        Ok(Some((progress, moved)))
    }

    /// The other side has closed a stream: whether it was there.
    pub fn closed(&mut self, stream: u32) -> Result<bool, Violation> {
        if self.close(stream) {
            return Ok(true);
        }
        self.late(Kind::Close, stream).map(|()| false)
    }

    fn late(&self, kind: Kind, stream: u32) -> Result<(), Violation> {
        if stream == 0 || stream > self.last {
            return Err(Violation::Stream { kind, stream });
        }
        Ok(())
    }

    /// The first time at which a stream is given up.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let asked = self.streams.values().filter(|one| one.progress.is_none());
        asked.map(|one| one.deadline).min()
    }

    /// Forget one that was not accepted in time.
    pub fn give_up(&mut self, now: Nanos) -> Option<u32> {
        let late = |one: &Outgoing| one.progress.is_none() && one.deadline <= now;
        let (&number, _) = self.streams.iter().find(|(_, one)| late(one))?;
        self.streams.remove(&number);
        Some(number)
    }
}

/// A log that comes from the other side.
#[derive(Debug)]
struct Incoming {
    epoch: u64,
    /// Where the last span ended.
    next: u64,
    marks: Marks,
    /// `None`: not accepted yet.
    progress: Option<Progress>,
}

/// The logs that come from the other side.
#[derive(Debug, Default)]
pub struct Receiving {
    streams: BTreeMap<u32, Incoming>,
    last: u32,
    /// Streams of which there is something to be said.
    acks: BTreeSet<u32>,
    /// Spans that came for streams that are closed.
    late: u64,
}

/// What becomes of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is taken.
    Take,
    /// Its stream is closed, which its sender could not know.
    Drop,
}

impl Receiving {
    /// An Open has come.
    pub fn asked(&mut self, head: &Head) -> Result<(), Violation> {
        if head.stream <= self.last {
            return Err(Violation::StreamNumber {
                found: head.stream,
                last: self.last,
            });
        }
        if self.streams.len() >= WIRE_STREAMS_MAX {
            return Err(Violation::Streams(WIRE_STREAMS_MAX));
        }
        self.last = head.stream;
        let stream = Incoming {
            epoch: head.epoch,
            next: head.position,
            marks: Marks::default(),
            progress: None,
        };
        self.streams.insert(head.stream, stream);
        Ok(())
    }

    /// What is to be said of a stream, for the first time to accept it. What went back would break a promise: of each
    /// number the highest that was ever said counts.
    pub fn ack(&mut self, number: u32, progress: Progress) -> Result<(), SendError> {
        let stream = self.streams.get_mut(&number);
        let stream = stream.ok_or(SendError::Stream(number))?;
        let before = stream.progress.unwrap_or_default();
        let durable = progress.durable.min(stream.next).max(before.durable);
        stream.progress = Some(Progress {
            durable,
            tail: progress.tail.min(durable).max(before.tail),
            limit: progress.limit.max(before.limit),
        });
        self.acks.insert(number);
        Ok(())
    }

    /// The next Ack to be sent: one for each stream, however often it has something to say.
    pub fn next_ack(&mut self) -> Option<(Head, AckMarks)> {
        let number = self.acks.pop_first()?;
        let stream = self.streams.get(&number)?;
        let progress = stream.progress?;
        let head = Head {
            stream: number,
            epoch: stream.epoch,
            position: progress.durable,
            ..Head::new(Kind::Ack)
        };
        let marks = AckMarks {
            tail: progress.tail.into(),
            limit: progress.limit.into(),
            reserved: [0; 16],
        };
        Some((head, marks))
    }

    /// A span is about to come: whether it is taken. Nothing of its payload was looked at yet.
    pub fn appending(&mut self, head: &Head, marks: &AppendMarks) -> Result<Fate, Violation> {
        let number = head.stream;
        let Some(stream) = self.streams.get_mut(&number) else {
            if number == 0 || number > self.last {
                let kind = Kind::Append;
                return Err(Violation::Stream {
                    kind,
                    stream: number,
                });
            }
            self.late += 1;
            return Ok(Fate::Drop);
        };
        let Some(progress) = stream.progress else {
            return Err(Violation::Early(number));
        };
        if head.epoch != stream.epoch {
            return Err(Violation::Epoch {
                stream: number,
                expected: stream.epoch,
                found: head.epoch,
            });
        }
        let blocks = u64::from(head.payload_bytes) / BLOCK_BYTES as u64;
        let misplaced = Violation::Position {
            stream: number,
            position: head.position,
            follows: head.number,
            expected: stream.next,
        };
        let is_whole =
            head.payload_bytes > 0 && (head.payload_bytes as usize).is_multiple_of(BLOCK_BYTES);
        if head.number != stream.next || head.position < stream.next || !is_whole {
            return Err(misplaced);
        }
        let end = head.position.checked_add(blocks).ok_or(misplaced)?;
        if end > progress.limit {
            return Err(Violation::Limit {
                stream: number,
                end,
                limit: progress.limit,
            });
        }
        let marks = Marks::from(marks);
        below(number, "committed", marks.committed, marks.durable)?;
        not_back(number, "durable", marks.durable, stream.marks.durable)?;
        not_back(number, "committed", marks.committed, stream.marks.committed)?;
        Ok(Fate::Take)
    }

    /// A span is whole: what its sender knew; `None`: its stream was closed while it came.
    pub fn appended(&mut self, head: &Head, marks: &AppendMarks) -> Option<Marks> {
        let stream = self.streams.get_mut(&head.stream)?;
        stream.next = head.position + u64::from(head.payload_bytes) / BLOCK_BYTES as u64;
        stream.marks = marks.into();
        Some(stream.marks)
    }

    /// Forget a stream; whether there was one.
    pub fn close(&mut self, stream: u32) -> bool {
        self.acks.remove(&stream);
        self.streams.remove(&stream).is_some()
    }

    /// Whoever opened a stream has closed it: whether it was there.
    pub fn closed(&mut self, stream: u32) -> Result<bool, Violation> {
        if self.close(stream) {
            return Ok(true);
        }
        if stream == 0 || stream > self.last {
            let kind = Kind::Close;
            return Err(Violation::Stream { kind, stream });
        }
        Ok(false)
    }

    /// Spans that came for streams that are closed.
    pub fn late(&self) -> u64 {
        self.late
    }
}

/// The head of a Close.
pub fn close_head(stream: u32, code: u16, by_opener: bool) -> Head {
    Head {
        stream,
        code,
        flags: if by_opener { FRAME_BY_OPENER } else { 0 },
        ..Head::new(Kind::Close)
    }
}

fn below(stream: u32, mark: &'static str, found: u64, bound: u64) -> Result<(), Violation> {
    if found > bound {
        return Err(Violation::Mark {
            stream,
            mark,
            found,
            than: "above",
            bound,
        });
    }
    Ok(())
}

fn not_back(stream: u32, mark: &'static str, found: u64, bound: u64) -> Result<(), Violation> {
    if found < bound {
        return Err(Violation::Mark {
            stream,
            mark,
            found,
            than: "below",
            bound,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 2 * BLOCK_BYTES;

    fn marks(durable: u64, committed: u64) -> AppendMarks {
        let marks = Marks {
            durable,
            committed,
            ..Marks::default()
        };
        marks.into()
    }

    fn progress(durable: u64, tail: u64, limit: u64) -> Progress {
        Progress {
            durable,
            tail,
            limit,
        }
    }

    /// Both ends of a stream of epoch 7 from position 100 on, accepted up to position 110.
    fn pair() -> (Sending, Receiving) {
        let (mut sending, mut receiving) = (Sending::default(), Receiving::default());
        let head = sending.open(7, 100, Nanos(5)).unwrap();
        assert_eq!(sending.append(1, 100, BYTES), Err(SendError::Full));
        receiving.asked(&head).unwrap();
        receiving.ack(1, progress(100, 50, 110)).unwrap();
        let (head, ack) = receiving.next_ack().unwrap();
        let (_, moved) = sending.acked(&head, &ack).unwrap().unwrap();
        assert!(moved, "somebody waited");
        (sending, receiving)
    }

    fn append(sending: &mut Sending, position: u64) -> Result<Head, SendError> {
        let mut head = sending.append(1, position, BYTES)?;
        head.payload_bytes = BYTES as u32;
        sending.appended(&head, BYTES);
        Ok(head)
    }

    #[test]
    fn spans_pass_in_order_up_to_the_limit() {
        let (mut sending, mut receiving) = pair();
        for position in [100, 102, 106, 108] {
            let head = append(&mut sending, position).unwrap();
            let marks = marks(position, position - 1);
            assert_eq!(receiving.appending(&head, &marks), Ok(Fate::Take));
            let found = receiving.appended(&head, &marks).unwrap();
            assert_eq!(found.committed, position - 1);
        }
        assert_eq!(append(&mut sending, 110), Err(SendError::Full));
        let (position, expected) = (109, 110);
        let misplaced = SendError::Position { position, expected };
        assert_eq!(append(&mut sending, 109), Err(misplaced));
        assert_eq!(sending.append(1, 110, 5), Err(SendError::NotBlocks(5)));
        // What is said twice before it is sent is one Ack.
        receiving.ack(1, progress(104, 60, 120)).unwrap();
        receiving.ack(1, progress(110, 50, 115)).unwrap();
        let (head, ack) = receiving.next_ack().unwrap();
        assert!(receiving.next_ack().is_none());
        let (found, moved) = sending.acked(&head, &ack).unwrap().unwrap();
        assert_eq!((found, moved), (progress(110, 60, 120), true));
        assert!(append(&mut sending, 110).is_ok());
    }

    #[test]
    fn span_that_lies_is_noticed() {
        let (mut sending, mut receiving) = pair();
        let head = append(&mut sending, 100).unwrap();
        let good = marks(100, 90);
        let mut with = |change: fn(&mut Head)| {
            let mut head = head;
            change(&mut head);
            receiving.appending(&head, &good).unwrap_err()
        };
        assert!(matches!(
            with(|head| head.stream = 2),
            Violation::Stream { .. }
        ));
        assert!(matches!(
            with(|head| head.stream = 0),
            Violation::Stream { .. }
        ));
        assert!(matches!(
            with(|head| head.epoch = 6),
            Violation::Epoch { .. }
        ));
        assert!(matches!(
            with(|head| head.number = 99),
            Violation::Position { .. }
        ));
        assert!(matches!(
            with(|head| head.position = 99),
            Violation::Position { .. }
        ));
        assert!(matches!(
            with(|head| head.payload_bytes = 5000),
            Violation::Position { .. }
        ));
        assert!(matches!(
            with(|head| head.payload_bytes = 0),
            Violation::Position { .. }
        ));
        assert!(matches!(
            with(|head| head.position = u64::MAX),
            Violation::Position { .. }
        ));
        assert!(matches!(
            with(|head| head.position = 109),
            Violation::Limit { .. }
        ));
        let mark = receiving.appending(&head, &marks(90, 91)).unwrap_err();
        assert!(matches!(mark, Violation::Mark { than: "above", .. }));
        // A span that is read again from the log is sent when much behind it is durable.
        let again = receiving.appending(&head, &marks(5000, 4000));
        assert_eq!(again, Ok(Fate::Take));
        assert_eq!(receiving.appending(&head, &good), Ok(Fate::Take));
        receiving.appended(&head, &good);
        // Repeated.
        assert!(receiving.appending(&head, &good).is_err());
        let next = append(&mut sending, 102).unwrap();
        let back = receiving.appending(&next, &marks(99, 90)).unwrap_err();
        assert!(matches!(back, Violation::Mark { than: "below", .. }));
    }

    #[test]
    fn ack_that_lies_is_noticed() {
        let (mut sending, _) = pair();
        append(&mut sending, 100).unwrap();
        let mut ack = |stream, epoch, durable, tail: u64, limit: u64| {
            let head = Head {
                stream,
                epoch,
                position: durable,
                ..Head::new(Kind::Ack)
            };
            let marks = AckMarks {
                tail: tail.into(),
                limit: limit.into(),
                reserved: [0; 16],
            };
            sending.acked(&head, &marks)
        };
        assert!(matches!(
            ack(2, 7, 100, 50, 110),
            Err(Violation::Stream { .. })
        ));
        assert!(matches!(
            ack(1, 8, 100, 50, 110),
            Err(Violation::Epoch { .. })
        ));
        for (durable, tail, limit) in [
            (103, 50, 110),
            (99, 50, 110),
            (100, 101, 110),
            (100, 49, 110),
            (100, 50, 109),
        ] {
            let found = ack(1, 7, durable, tail, limit);
            assert!(matches!(found, Err(Violation::Mark { .. })), "{found:?}");
        }
        assert!(ack(1, 7, 102, 50, 110).is_ok());
    }

    #[test]
    fn what_comes_for_a_closed_stream_is_dropped() {
        let (mut sending, mut receiving) = pair();
        let head = append(&mut sending, 100).unwrap();
        assert!(receiving.close(1));
        assert_eq!(receiving.appending(&head, &marks(0, 0)), Ok(Fate::Drop));
        assert_eq!(receiving.late(), 1);
        assert_eq!(sending.closed(1), Ok(true));
        assert_eq!(sending.closed(1), Ok(false));
        assert_eq!(append(&mut sending, 102), Err(SendError::Stream(1)));
        assert!(sending.closed(2).is_err() && receiving.closed(2).is_err());
        assert_eq!(receiving.closed(1), Ok(false));
        let reused = Head {
            stream: 1,
            ..Head::new(Kind::Open)
        };
        assert!(receiving.asked(&reused).is_err());
    }

    #[test]
    fn span_before_its_stream_is_accepted_is_noticed() {
        let mut receiving = Receiving::default();
        let open = Head {
            stream: 1,
            ..Head::new(Kind::Open)
        };
        receiving.asked(&open).unwrap();
        let head = Head {
            stream: 1,
            payload_bytes: BYTES as u32,
            ..Head::new(Kind::Append)
        };
        assert_eq!(
            receiving.appending(&head, &marks(0, 0)),
            Err(Violation::Early(1))
        );
    }

    #[test]
    fn streams_are_bounded_and_given_up_in_time() {
        let (mut sending, mut receiving) = (Sending::default(), Receiving::default());
        for number in 0..WIRE_STREAMS_MAX as u64 {
            let head = sending.open(1, 0, Nanos(number)).unwrap();
            receiving.asked(&head).unwrap();
        }
        assert!(sending.open(1, 0, Nanos(0)).is_err());
        let one_more = Head {
            stream: 5000,
            ..Head::new(Kind::Open)
        };
        assert!(matches!(
            receiving.asked(&one_more),
            Err(Violation::Streams(_))
        ));
        assert_eq!(sending.next_deadline(), Some(Nanos(0)));
        assert_eq!(sending.give_up(Nanos(1)), Some(1));
        assert_eq!(sending.give_up(Nanos(1)), Some(2));
        assert_eq!(sending.give_up(Nanos(1)), None);
        assert!(sending.open(1, 0, Nanos(0)).is_ok());
    }
}
