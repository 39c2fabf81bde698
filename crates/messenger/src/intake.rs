//! What a link receives: fronts of frames in a small inbox, payloads straight where they are to lie.
//!
//! ```text
//! Front ── header and meta are whole ──► the link judges ──► no payload: dispatched
//!   ▲                                       │ needs memory, and there is none: Waiting ──► there is some ─┐
//!   │                                       └───────────────► Payload (pieces, or none: dropped) ◄────────┘
//!   └──────────── whole, and its checksum matches ───────────────┘
//! ```
//!
//! Invariants:
//! 1. Memory for a payload is taken only for a frame whose header was checked and that the link has judged.
//! 2. The inbox is empty while a payload is received past it.
//! 3. A place that was named stays valid and unused until [`Intake::landed`]; nothing moves bytes before.
//!
//! One receive brings the rest of a payload and the front of the next frame, so a stream of spans costs one receive each
//! and no copy. What comes behind small frames is received with them, many at once; the first payload among them is copied
//! as far as it came so.

use hdcs_core::base::buf::BufMut;
use hdcs_core::base::inbox::Inbox;
use hdcs_core::base::limits::WIRE_META_BYTES_MAX;
use hdcs_core::wire::{
    AppendMarks, FRAME_HEADER_BYTES, META_CHECKSUM_BYTES, PayloadChecksum, Purpose,
};
use smallvec::SmallVec;

use crate::error::FrameError;
use crate::frame::{Head, checked_meta};
use crate::transport::Receive;

/// The inbox: the largest front, and as much again, so that small frames come many at once.
pub const INBOX_BYTES: usize = 2 * (FRAME_HEADER_BYTES + WIRE_META_BYTES_MAX + META_CHECKSUM_BYTES);
/// What is received behind a payload: the front of a span.
const BEHIND_BYTES: usize = FRAME_HEADER_BYTES + size_of::<AppendMarks>() + META_CHECKSUM_BYTES;

/// Buffers that a payload is received into, in order.
pub type Pieces = SmallVec<[BufMut; 4]>;

/// Header and meta of a frame.
#[derive(Debug)]
pub struct Front {
    /// The header, checked.
    pub head: Head,
    /// The meta, checked.
    pub meta: Box<[u8]>,
}

/// What has come.
#[derive(Debug)]
pub enum Step {
    /// The front of a frame. If it has a payload, [`Intake::take`] or [`Intake::wait`] follows.
    Front(Front),
    /// A frame whose payload is whole, in these buffers; none: it was dropped.
    Whole(Front, Pieces),
}

#[derive(Debug)]
enum State {
    /// The header of the next frame, once it is there.
    Front(Option<Head>),
    /// For memory.
    Waiting(Front),
    Payload(Box<Payload>),
}

#[derive(Debug)]
struct Payload {
    front: Front,
    pieces: Pieces,
    /// The piece that is being filled, and how far.
    at: usize,
    filled: usize,
    /// Bytes that are still to come.
    left: usize,
    checksum: PayloadChecksum,
}

/// Where the receive under way goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Inbox,
    Payload,
}

/// See the module.
#[derive(Debug)]
pub struct Intake {
    inbox: Inbox,
    /// Frames whose front has come.
    sequence: u32,
    /// The number of the one that was looked at last.
    frame: u32,
    state: State,
    place: Place,
    /// The last frame had a payload: so may the next.
    is_after_payload: bool,
}

impl Intake {
    /// Nothing has come yet.
    pub fn new() -> Self {
        Self {
            inbox: Inbox::new(INBOX_BYTES),
            sequence: 0,
            frame: 0,
            state: State::Front(None),
            place: Place::Inbox,
            is_after_payload: false,
        }
    }

    /// The number of the frame that was looked at last.
    pub fn frame(&self) -> u32 {
        self.frame
    }

    /// Whether no frame has begun.
    pub fn is_between(&self) -> bool {
        matches!(self.state, State::Front(_)) && self.inbox.unread().is_empty()
    }

    /// Bytes of the frame that has begun.
    pub fn begun_bytes(&self) -> usize {
        let front = |front: &Front| front.head.front_bytes();
        match &self.state {
            State::Front(_) => self.inbox.unread().len(),
            State::Waiting(waiting) => front(waiting),
            State::Payload(payload) => {
                let head = &payload.front.head;
                front(&payload.front) + head.payload_bytes as usize - payload.left
            }
        }
    }

    /// Whether a frame waits for memory.
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting(_))
    }

    /// Bytes of buffers that are being filled.
    pub fn held_bytes(&self) -> usize {
        match &self.state {
            State::Payload(payload) => payload.pieces.iter().map(BufMut::held_bytes).sum(),
            _ => 0,
        }
    }

    /// What has come next; `None`: more is needed, bytes or memory.
    pub fn next(
        &mut self,
        agreed: Option<u16>,
        purpose: Option<Purpose>,
    ) -> Result<Option<Step>, FrameError> {
        match &mut self.state {
            State::Waiting(_) => Ok(None),
            State::Front(known) => {
                let unread = self.inbox.unread();
                let Some(header) = unread.first_chunk() else {
                    return Ok(None);
                };
                self.frame = self.sequence;
                let head = match *known {
                    Some(head) => head,
                    None => Head::decode(header, agreed, purpose, self.sequence)?,
                };
                let front_bytes = head.front_bytes();
                let Some(meta) = unread.get(FRAME_HEADER_BYTES..front_bytes) else {
                    *known = Some(head);
                    return Ok(None);
                };
                let meta = checked_meta(meta)?.into();
                self.inbox.consume(front_bytes);
                self.sequence = self.sequence.wrapping_add(1);
                self.state = State::Front(None);
                self.is_after_payload = head.payload_bytes > 0;
                Ok(Some(Step::Front(Front { head, meta })))
            }
            State::Payload(payload) => {
                let unread = self.inbox.unread();
                let bytes = unread.len().min(payload.left);
                payload.copy(&unread[..bytes]);
                self.inbox.consume(bytes);
                if payload.left > 0 {
                    return Ok(None);
                }
                let State::Payload(whole) = std::mem::replace(&mut self.state, State::Front(None))
                else {
                    unreachable!("it was a payload");
                };
                if whole.checksum.value() != whole.front.head.payload_checksum {
                    return Err(FrameError::PayloadChecksum);
                }
                Ok(Some(Step::Whole(whole.front, whole.pieces)))
            }
        }
    }

    /// Receive the payload of a frame into these buffers, which have room for it; into none: drop it.
    pub fn take(&mut self, front: Front, pieces: Pieces) {
        let left = front.head.payload_bytes as usize;
        let room: usize = pieces.iter().map(|piece| piece.len()).sum();
        assert!(pieces.is_empty() || room >= left, "room for the payload");
        self.state = State::Payload(Box::new(Payload {
            front,
            pieces,
            at: 0,
            filled: 0,
            left,
            checksum: PayloadChecksum::new(),
        }));
    }

    /// Wait for memory.
    pub fn wait(&mut self, front: Front) {
        self.state = State::Waiting(front);
    }

    /// The frame that waits for memory, no longer.
    pub fn take_waiting(&mut self) -> Option<Front> {
        if !self.is_waiting() {
            return None;
        }
        let State::Waiting(front) = std::mem::replace(&mut self.state, State::Front(None)) else {
            unreachable!("it waits");
        };
        Some(front)
    }

    /// Where the next bytes go.
    pub fn receive(&mut self) -> Receive<'_> {
        let unread = self.inbox.unread().len();
        let is_short =
            self.is_after_payload && matches!(self.state, State::Front(_)) && unread < BEHIND_BYTES;
        let is_direct = match &self.state {
            State::Payload(payload) => !payload.pieces.is_empty() && unread == 0,
            _ => false,
        };
        if is_direct && let State::Payload(payload) = &mut self.state {
            self.place = Place::Payload;
            let (at, filled, left) = (payload.at, payload.filled, payload.left);
            let (here, behind) = payload.pieces.split_at_mut(at + 1);
            let here = &mut here[at];
            let end = here.len().min(filled + left);
            let here = &mut here[filled..end];
            let left = left - here.len();
            return match behind.first_mut() {
                Some(next) if left > 0 => {
                    let end = next.len().min(left);
                    Receive::IntoBoth(here, &mut next[..end])
                }
                _ => Receive::IntoBoth(here, &mut self.inbox.room()[..BEHIND_BYTES]),
            };
        }
        self.place = Place::Inbox;
        let room = self.inbox.room();
        let bytes = if is_short {
            room.len().min(BEHIND_BYTES - unread)
        } else {
            room.len()
        };
        Receive::Into(&mut room[..bytes])
    }

    /// So many bytes came where [`Self::receive`] said.
    pub fn landed(&mut self, mut bytes: usize) {
        if self.place == Place::Payload
            && let State::Payload(payload) = &mut self.state
        {
            while bytes > 0 && payload.left > 0 {
                bytes -= payload.filled_by(bytes);
            }
        }
        self.place = Place::Inbox;
        self.inbox.received(bytes);
    }

    /// Forget what has come. No receive may be under way.
    pub fn forget(&mut self) {
        self.state = State::Front(None);
        self.place = Place::Inbox;
        self.is_after_payload = false;
        self.inbox.consume(self.inbox.unread().len());
    }
}

impl Payload {
    /// Up to so many bytes have come into the present piece; how many belong there.
    fn filled_by(&mut self, bytes: usize) -> usize {
        let piece = &self.pieces[self.at];
        let end = piece.len().min(self.filled + self.left);
        let bytes = bytes.min(end - self.filled);
        self.checksum
            .update(&piece[self.filled..self.filled + bytes]);
        self.filled += bytes;
        self.left -= bytes;
        if self.filled == piece.len() {
            self.at += 1;
            self.filled = 0;
        }
        bytes
    }

    /// Take bytes that came another way.
    fn copy(&mut self, mut bytes: &[u8]) {
        if self.pieces.is_empty() {
            self.checksum.update(bytes);
            self.left -= bytes.len();
            return;
        }
        while !bytes.is_empty() {
            let piece = &mut self.pieces[self.at];
            let room = (piece.len() - self.filled).min(bytes.len());
            piece[self.filled..self.filled + room].copy_from_slice(&bytes[..room]);
            let taken = self.filled_by(room);
            bytes = &bytes[taken..];
        }
    }
}

#[cfg(test)]
mod tests {
    use hdcs_core::base::buf::Pool;
    use hdcs_core::wire::Kind;

    use super::*;
    use crate::conformance::fill;
    use crate::frame::Frame;
    use crate::streams::Marks;

    /// Meta and payload of a frame.
    type Sent = (Vec<u8>, Vec<u8>);
    /// The same as it came; without a payload that was dropped.
    type Came = (Vec<u8>, Option<Vec<u8>>);

    /// Frames of all sizes, as bytes on the wire, and what is to come of them.
    fn stream(random: &mut fastrand::Rng, pool: &Pool) -> (Vec<u8>, Vec<Sent>) {
        let (mut wire, mut frames) = (Vec::new(), Vec::new());
        for sequence in 0..40 {
            let mut meta = vec![0; [0, 5, 300, WIRE_META_BYTES_MAX][random.usize(..4)]];
            fill(&mut meta, random.u64(..));
            let mut payload = vec![0; [0, 1, 5000, 70_000][random.usize(..4)]];
            fill(&mut payload, random.u64(..));
            let mut parts = Vec::new();
            for part in payload.chunks(9000) {
                let mut buf = pool.alloc(part.len()).unwrap();
                buf.copy_from_slice(part);
                parts.push(buf.freeze());
            }
            let frame = Frame::new(Head::new(Kind::Request), meta.clone().into(), parts);
            wire.extend(frame.front(1, sequence));
            wire.extend(&payload);
            frames.push((meta, payload));
        }
        (wire, frames)
    }

    fn pieces(pool: &Pool, mut bytes: usize) -> Pieces {
        let mut pieces = Pieces::new();
        while bytes > 0 {
            let piece = bytes.min(16 << 10);
            pieces.push(pool.alloc(piece).unwrap());
            bytes -= piece;
        }
        pieces
    }

    /// Give `wire` to an intake in pieces of any size; what comes of it, until an error.
    fn run(
        random: &mut fastrand::Rng,
        pool: &Pool,
        mut wire: &[u8],
    ) -> (Vec<Came>, Option<FrameError>) {
        let mut intake = Intake::new();
        let mut found = Vec::new();
        let most = [1, 64, 3000, usize::MAX][random.usize(..4)];
        loop {
            loop {
                match intake.next(Some(1), Some(Purpose::Bulk)) {
                    Err(error) => return (found, Some(error)),
                    Ok(None) => break,
                    Ok(Some(Step::Front(front))) if front.head.payload_bytes == 0 => {
                        found.push((front.meta.into(), Some(Vec::new())));
                    }
                    Ok(Some(Step::Front(front))) => match random.u8(..3) {
                        0 => intake.take(front, Pieces::new()),
                        1 => {
                            intake.wait(front);
                            assert!(intake.next(Some(1), None).unwrap().is_none());
                            let front = intake.take_waiting().unwrap();
                            let pieces = pieces(pool, front.head.payload_bytes as usize);
                            intake.take(front, pieces);
                        }
                        _ => {
                            let pieces = pieces(pool, front.head.payload_bytes as usize);
                            intake.take(front, pieces);
                        }
                    },
                    Ok(Some(Step::Whole(front, pieces))) => {
                        let payload = pieces.iter().flat_map(|piece| piece.iter().copied());
                        let payload: Vec<u8> = payload.collect();
                        found.push((front.meta.into(), (!pieces.is_empty()).then_some(payload)));
                    }
                }
            }
            if wire.is_empty() {
                return (found, None);
            }
            let (here, behind) = match intake.receive() {
                Receive::Into(here) => (here, &mut [][..]),
                Receive::IntoBoth(here, behind) => (here, behind),
                Receive::Wait | Receive::Close => unreachable!(),
            };
            assert!(!here.is_empty());
            let bytes = wire.len().min(here.len() + behind.len()).min(most);
            let bytes = random.usize(1..=bytes);
            let first = bytes.min(here.len());
            here[..first].copy_from_slice(&wire[..first]);
            behind[..bytes - first].copy_from_slice(&wire[first..bytes]);
            wire = &wire[bytes..];
            intake.landed(bytes);
        }
    }

    #[test]
    fn frames_are_the_same_however_they_are_cut() {
        let pool = Pool::new(8 << 20);
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (wire, frames) = stream(&mut random, &pool);
            let (found, error) = run(&mut random, &pool, &wire);
            assert_eq!(error, None, "seed {seed}");
            assert_eq!(found.len(), frames.len(), "seed {seed}");
            for ((meta, payload), expected) in found.iter().zip(&frames) {
                assert_eq!(meta, &expected.0, "seed {seed}");
                let dropped = payload.is_none();
                assert!(
                    dropped || payload.as_ref() == Some(&expected.1),
                    "seed {seed}"
                );
            }
        }
        assert_eq!(pool.free_bytes(), pool.total_bytes());
    }

    #[test]
    fn frame_that_was_damaged_is_never_taken() {
        let pool = Pool::new(8 << 20);
        for seed in 0..400 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut wire, frames) = stream(&mut random, &pool);
            let at = random.usize(..wire.len());
            wire[at] ^= 1 << random.u8(..8);
            let (found, error) = run(&mut random, &pool, &wire);
            // Nothing but the frames before it.
            assert!(error.is_some(), "seed {seed}");
            for ((meta, payload), expected) in found.iter().zip(&frames) {
                let is_good = payload
                    .as_ref()
                    .is_none_or(|payload| *payload == expected.1);
                assert!(*meta == expected.0 && is_good, "seed {seed}");
            }
        }
        assert_eq!(pool.free_bytes(), pool.total_bytes());
    }

    #[test]
    fn span_is_received_where_it_is_to_lie() {
        let pool = Pool::new(4 << 20);
        let mut intake = Intake::new();
        let mut buf = pool.alloc(16384).unwrap();
        buf.fill(5);
        let frame = Frame::with(
            Head {
                stream: 1,
                ..Head::new(Kind::Append)
            },
            &AppendMarks::from(Marks::default()),
        );
        let frame = Frame::new(frame.head, frame.meta, vec![buf.freeze()]);
        for sequence in 0..3 {
            let front = frame.front(1, sequence);
            assert_eq!(front.len(), BEHIND_BYTES);
            if sequence == 0 {
                let Receive::Into(place) = intake.receive() else {
                    unreachable!()
                };
                place[..front.len()].copy_from_slice(&front);
                intake.landed(front.len());
            }
            let Some(Step::Front(taken)) = intake.next(Some(1), Some(Purpose::Spans)).unwrap()
            else {
                panic!("the front is whole");
            };
            let pieces: Pieces = [pool.alloc(16384).unwrap()].into_iter().collect();
            let address = pieces[0].as_ptr();
            intake.take(taken, pieces);
            assert!(
                intake
                    .next(Some(1), Some(Purpose::Spans))
                    .unwrap()
                    .is_none()
            );
            let Receive::IntoBoth(here, behind) = intake.receive() else {
                panic!("one receive for the payload and the next front");
            };
            assert_eq!((here.as_ptr(), here.len()), (address, 16384));
            assert!(here.as_ptr().addr().is_multiple_of(4096));
            here.fill(5);
            behind.copy_from_slice(&frame.front(1, sequence + 1));
            intake.landed(16384 + BEHIND_BYTES);
            let Some(Step::Whole(_, pieces)) = intake.next(Some(1), Some(Purpose::Spans)).unwrap()
            else {
                panic!("the span is whole");
            };
            assert_eq!(pieces[0].as_ptr(), address);
        }
    }
}
