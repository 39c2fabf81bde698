//! Peers that lie, repeat, stop, or speak something else: each ends its link with an error that says so.

use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::wire::{FRAME_HEADER_BYTES, PayloadChecksum, WIRE_VERSION};

use super::*;
use crate::conformance::{ONE, TWO, config, fill, filled, known, own};
use crate::error::{FrameError, Violation};
use crate::handshake::greet;

/// A link that was connected to, and a peer whose frames a test makes.
struct Wire {
    link: Link,
    pool: Arc<Pool>,
    now: Nanos,
    sequence: u32,
    version: u16,
    /// What the link has sent.
    heard: Vec<u8>,
    events: Vec<Event>,
}

impl Wire {
    /// Before the Hello.
    fn new() -> Self {
        let pool = Pool::new(4 << 20);
        let now = Nanos::from_millis(1);
        Self {
            link: Link::accept(config(TWO), Arc::clone(&pool), now),
            pool,
            now,
            sequence: 0,
            version: WIRE_VERSION,
            heard: Vec::new(),
            events: Vec::new(),
        }
    }

    /// After the handshake.
    fn open(purpose: Purpose) -> Self {
        let mut wire = Self::new();
        wire.hello(purpose);
        wire.link.admit(Some(&known(ONE)));
        wire.settle();
        assert!(wire.link.is_open());
        wire.events.clear();
        wire.heard.clear();
        wire
    }

    fn hello(&mut self, purpose: Purpose) {
        let greeting = greet(&own(ONE), TWO, 0, purpose);
        self.frame(Frame::with(Head::new(Kind::Hello), &greeting));
    }

    /// Give the link bytes, as far as it takes any; how many it took.
    fn bytes(&mut self, mut bytes: &[u8]) -> usize {
        let all = bytes.len();
        while !bytes.is_empty() {
            self.settle();
            let (here, behind) = match self.link.receive() {
                Receive::Into(here) => (here, &mut [][..]),
                Receive::IntoBoth(here, behind) => (here, behind),
                Receive::Wait | Receive::Close => break,
            };
            let first = bytes.len().min(here.len());
            here[..first].copy_from_slice(&bytes[..first]);
            let second = (bytes.len() - first).min(behind.len());
            behind[..second].copy_from_slice(&bytes[first..first + second]);
            bytes = &bytes[first + second..];
            self.link.received(first + second, self.now);
        }
        self.settle();
        all - bytes.len()
    }

    fn settle(&mut self) {
        let heard = self.link.output().drain(..);
        let heard: Vec<Chunk> = heard.collect();
        for chunk in heard {
            self.heard.extend(chunk.bytes());
        }
        while let Some(event) = self.link.event() {
            self.events.push(event);
        }
    }

    fn frame(&mut self, frame: Frame) {
        let mut bytes = frame.front(self.version, self.sequence).to_vec();
        self.sequence += 1;
        frame.parts.iter().for_each(|part| bytes.extend(&part[..]));
        self.bytes(&bytes);
    }

    fn bare(&mut self, head: Head) {
        self.frame(Frame::bare(head));
    }

    fn open_stream(&mut self, stream: u32) {
        self.bare(Head {
            stream,
            epoch: 3,
            position: 50,
            ..Head::new(Kind::Open)
        });
    }

    fn append(&mut self, position: u64, follows: u64, blocks: usize) {
        let head = Head {
            stream: 1,
            epoch: 3,
            position,
            number: follows,
            ..Head::new(Kind::Append)
        };
        let marks = AppendMarks::from(Marks::default());
        let frame = Frame::with(head, &marks);
        let mut bytes = vec![0; blocks * BLOCK_BYTES];
        fill(&mut bytes, position);
        let mut checksum = PayloadChecksum::new();
        checksum.update(&bytes);
        let frame = Frame {
            head: Head {
                payload_bytes: bytes.len() as u32,
                payload_checksum: checksum.value(),
                ..frame.head
            },
            ..frame
        };
        let front = frame.front(self.version, self.sequence).to_vec();
        self.sequence += 1;
        self.bytes(&[front, bytes].concat());
    }

    /// Why the link is over, which it tells once and last.
    fn why(&mut self) -> Why {
        self.settle();
        let ended = self.link.ended().expect("it is over").clone();
        let told = self
            .events
            .iter()
            .filter(|event| matches!(event, Event::Ended(_)));
        assert_eq!(told.count(), 1);
        assert!(matches!(self.events.last(), Some(Event::Ended(told)) if *told == ended));
        let text = ended.to_string();
        assert!(text.contains("end of 2") && text.len() > 40, "{text}");
        assert_eq!(self.link.held_bytes(), 0, "{text}");
        assert_eq!(
            self.link
                .request(Ask {
                    code: 0,
                    urgent: false,
                    meta: &[],
                    payload: &[],
                    into: None,
                    room_bytes: 0,
                    deadline: self.now,
                })
                .unwrap_err()
                .error,
            SendError::Ended
        );
        ended.why
    }

    fn violation(&mut self) -> Violation {
        match self.why() {
            Why::Violation { error, .. } => {
                self.blames(Blame::Violation);
                error
            }
            other => panic!("{other}"),
        }
    }

    /// The last frame that the peer hears is a Bye of this kind.
    fn blames(&self, blame: Blame) {
        let at = self.heard.len() - FRAME_HEADER_BYTES;
        assert_eq!(self.heard[at + 6], Kind::Bye.code());
        let code = u16::from_le_bytes([self.heard[at + 52], self.heard[at + 53]]);
        assert_eq!(Blame::from_code(code), Some(blame));
    }
}

#[test]
fn something_that_is_no_frame_ends_the_link_and_is_told_nothing() {
    let mut wire = Wire::new();
    wire.bytes(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\nX: 0123456789\r\n\r\n");
    let frame = 0;
    let error = FrameError::Magic;
    assert_eq!(wire.why(), Why::Frame { frame, error });
    assert!(wire.heard.is_empty());
    assert!(matches!(wire.link.receive(), Receive::Close));
}

#[test]
fn frame_before_the_hello_is_a_violation() {
    let mut wire = Wire::new();
    wire.version = 1;
    wire.bare(Head::new(Kind::Ping));
    let why = wire.why();
    assert!(matches!(
        why,
        Why::Violation {
            error: Violation::Unexpected {
                kind: Kind::Ping,
                ..
            },
            ..
        }
    ));
}

#[test]
fn handshake_that_stops_is_given_up() {
    let mut wire = Wire::new();
    wire.bytes(b"HDCM");
    let deadline = wire.link.next_deadline().unwrap();
    wire.link.tick(Nanos(deadline.0 - 1));
    assert!(wire.link.ended().is_none());
    wire.link.tick(deadline);
    assert!(matches!(wire.why(), Why::HandshakeLate(_)));
}

#[test]
fn second_hello_is_a_violation() {
    let mut wire = Wire::open(Purpose::Spans);
    wire.hello(Purpose::Spans);
    assert!(matches!(
        wire.violation(),
        Violation::Unexpected {
            kind: Kind::Hello,
            ..
        }
    ));
}

#[test]
fn spans_on_a_connection_for_requests_are_a_violation() {
    for head in [Head::new(Kind::Open), close_head(1, 0, true)] {
        let mut wire = Wire::open(Purpose::Requests);
        wire.bare(head);
        assert!(matches!(wire.violation(), Violation::Unexpected { .. }));
    }
    // Its length alone is one that no frame has there.
    let mut wire = Wire::open(Purpose::Requests);
    wire.append(0, 0, 1);
    assert!(matches!(
        wire.why(),
        Why::Frame {
            error: FrameError::Length { .. },
            ..
        }
    ));
    wire.blames(Blame::Frame);
}

#[test]
fn frame_of_another_version_ends_the_link() {
    let mut wire = Wire::open(Purpose::Spans);
    wire.version = 9;
    wire.bare(Head::new(Kind::Ping));
    let why = wire.why();
    let (found, expected) = (9, 1);
    assert_eq!(
        why,
        Why::Frame {
            frame: 1,
            error: FrameError::Version { found, expected }
        }
    );
}

#[test]
fn frame_that_is_replayed_ends_the_link() {
    let mut wire = Wire::open(Purpose::Requests);
    wire.bare(Head::new(Kind::Ping));
    wire.sequence -= 1;
    wire.bare(Head::new(Kind::Ping));
    assert!(matches!(
        wire.why(),
        Why::Frame {
            error: FrameError::Sequence { found: 1 },
            ..
        }
    ));
    wire.blames(Blame::Frame);
}

#[test]
fn span_that_is_damaged_never_reaches_the_node() {
    let mut wire = Wire::open(Purpose::Spans);
    wire.open_stream(1);
    let limit = 1000;
    wire.link
        .ack(
            1,
            Progress {
                durable: 50,
                tail: 50,
                limit,
            },
        )
        .unwrap();
    wire.append(50, 50, 3);
    assert!(matches!(wire.events.last(), Some(Event::Span(span)) if span.position == 50));
    let mut bytes = vec![0; 2 * BLOCK_BYTES];
    fill(&mut bytes, 1);
    let buf = filled(&wire.pool, bytes.len(), 1);
    let head = Head {
        stream: 1,
        epoch: 3,
        position: 53,
        number: 53,
        ..Head::new(Kind::Append)
    };
    let marks = AppendMarks::from(Marks::default());
    let meta = Frame::with(head, &marks).meta;
    let frame = Frame::new(head, meta, vec![buf]);
    bytes[5000] ^= 1;
    let front = frame.front(1, wire.sequence).to_vec();
    wire.bytes(&[front, bytes].concat());
    let error = FrameError::PayloadChecksum;
    assert_eq!(wire.why(), Why::Frame { frame: 3, error });
    wire.blames(Blame::Frame);
    let spans = wire
        .events
        .iter()
        .filter(|event| matches!(event, Event::Span(_)));
    assert_eq!(spans.count(), 1);
    wire.events.clear();
    drop(frame);
    wire.link.receive();
    assert_eq!(wire.pool.free_bytes(), wire.pool.total_bytes());
}

#[test]
fn span_in_a_wrong_place_is_a_violation() {
    let accepted = || {
        let mut wire = Wire::open(Purpose::Spans);
        wire.open_stream(1);
        let limit = 60;
        wire.link
            .ack(
                1,
                Progress {
                    durable: 50,
                    tail: 50,
                    limit,
                },
            )
            .unwrap();
        wire.append(50, 50, 2);
        assert!(wire.link.is_open());
        wire
    };
    let cases: [(u64, u64, usize); 4] = [(50, 50, 2), (53, 53, 2), (52, 52, 9), (51, 52, 1)];
    for (position, follows, blocks) in cases {
        let mut wire = accepted();
        let free = wire.pool.free_bytes();
        wire.append(position, follows, blocks);
        let violation = wire.violation();
        assert!(
            matches!(
                violation,
                Violation::Position { .. } | Violation::Limit { .. }
            ),
            "{violation}"
        );
        assert_eq!(wire.pool.free_bytes(), free, "no memory for it");
    }
    let mut wire = Wire::open(Purpose::Spans);
    wire.append(50, 50, 2);
    assert!(matches!(wire.violation(), Violation::Stream { .. }));
    let mut wire = Wire::open(Purpose::Spans);
    wire.open_stream(1);
    wire.append(50, 50, 2);
    assert_eq!(wire.violation(), Violation::Early(1));
}

#[test]
fn requests_beyond_the_credit_are_a_violation() {
    let mut wire = Wire::open(Purpose::Bulk);
    let head = |number| Head {
        number,
        room_bytes: 1 << 20,
        ..Head::new(Kind::Request)
    };
    let fit = own(TWO).credit_bytes / ((1 << 20) + 64);
    for number in 0..fit {
        wire.bare(head(number));
    }
    assert!(wire.link.is_open());
    wire.bare(head(fit));
    assert!(matches!(wire.violation(), Violation::Credit { .. }));
    let mut wire = Wire::open(Purpose::Bulk);
    wire.bare(head(4));
    wire.bare(head(4));
    assert_eq!(wire.violation(), Violation::Repeated(4));
}

#[test]
fn answers_and_pongs_to_nothing_are_violations() {
    let mut wire = Wire::open(Purpose::Bulk);
    wire.bare(Head {
        number: 5,
        position: u64::MAX,
        ..Head::new(Kind::Answer)
    });
    assert_eq!(wire.violation(), Violation::Unasked(5));
    let mut wire = Wire::open(Purpose::Requests);
    wire.bare(Head {
        number: 5,
        ..Head::new(Kind::Pong)
    });
    assert_eq!(wire.violation(), Violation::Pong(5));
    let mut wire = Wire::open(Purpose::Requests);
    wire.bare(Head {
        position: WIRE_CREDIT_BYTES_MIN,
        ..Head::new(Kind::Credit)
    });
    assert!(matches!(wire.violation(), Violation::Granted { .. }));
}

#[test]
fn request_ends_even_if_its_answer_is_a_violation() {
    let mut wire = Wire::open(Purpose::Requests);
    let number = wire.link.request(Ask {
        code: 0,
        urgent: false,
        meta: b"x",
        payload: &[],
        into: None,
        room_bytes: 0,
        deadline: Nanos::from_millis(1000),
    });
    let number = number.unwrap();
    wire.settle();
    wire.bare(Head {
        number,
        position: 1,
        ..Head::new(Kind::Answer)
    });
    assert!(matches!(wire.violation(), Violation::Granted { .. }));
    let ends = wire.events.iter().filter(
        |event| matches!(event, Event::Disconnected { number: found, .. } if *found == number),
    );
    assert_eq!(ends.count(), 1);
}

#[test]
fn answer_that_comes_twice_is_a_violation() {
    let mut wire = Wire::open(Purpose::Requests);
    let number = wire.link.request(Ask {
        code: 0,
        urgent: false,
        meta: b"x",
        payload: &[],
        into: None,
        room_bytes: 0,
        deadline: Nanos::from_millis(1000),
    });
    let number = number.unwrap();
    wire.settle();
    let answer = Head {
        number,
        position: 1 << 30,
        ..Head::new(Kind::Answer)
    };
    wire.bare(answer);
    assert!(matches!(wire.events.last(), Some(Event::Answered(answer)) if answer.number == number));
    wire.bare(answer);
    assert_eq!(wire.violation(), Violation::Unasked(number));
}

#[test]
fn peer_that_stops_within_a_frame_is_given_up_with_its_memory() {
    let mut wire = Wire::open(Purpose::Bulk);
    let buf = filled(&wire.pool, 1 << 20, 1);
    let frame = Frame::new(Head::new(Kind::Request), Box::default(), vec![buf]);
    let mut bytes = frame.front(1, wire.sequence).to_vec();
    bytes.extend(&frame.parts[0][..5000]);
    drop(frame);
    wire.bytes(&bytes);
    assert_eq!(wire.link.held_bytes(), 1 << 20);
    assert!(matches!(wire.link.receive(), Receive::IntoBoth(..)));
    for _ in 0..2 {
        wire.now = wire.link.next_deadline().unwrap();
        wire.link.tick(wire.now);
        wire.settle();
    }
    let received = 64 + 5000;
    assert!(
        matches!(wire.link.ended().unwrap().why, Why::Silent { received: found, .. } if found == received)
    );
    wire.blames(Blame::Silent);
    // The driver may still be receiving there.
    wire.link.received(100, wire.now);
    wire.why();
    assert_eq!(wire.pool.free_bytes(), wire.pool.total_bytes());
    // The peer is waited for to close, but not for ever.
    assert!(matches!(wire.link.receive(), Receive::Into(_)));
    wire.link.tick(wire.link.next_deadline().unwrap());
    assert!(matches!(wire.link.receive(), Receive::Close));
}

#[test]
fn silent_peer_is_given_up_while_requests_time_out() {
    let mut wire = Wire::open(Purpose::Requests);
    wire.now = wire.link.next_deadline().unwrap();
    wire.link.tick(wire.now);
    wire.settle();
    let ping_deadline = wire.link.next_deadline().unwrap();
    let asked = wire.link.request(Ask {
        code: 0,
        urgent: true,
        meta: &[],
        payload: &[],
        into: None,
        room_bytes: 0,
        deadline: ping_deadline,
    });
    let number = asked.unwrap();
    wire.link.tick(ping_deadline);
    assert!(matches!(wire.why(), Why::Silent { received: 0, .. }));
    let ends = wire.events.iter().filter(|event| match event {
        Event::TimedOut { number: found, .. } | Event::Disconnected { number: found, .. } => {
            *found == number
        }
        _ => false,
    });
    assert_eq!(ends.count(), 1);
}

#[test]
fn peer_is_not_to_blame_for_what_this_side_does_not_take_in() {
    let mut wire = Wire::open(Purpose::Bulk);
    let payload = filled(&wire.pool, 4096, 1);
    let mut held = Vec::new();
    while let Some(buf) = wire.pool.alloc(1) {
        held.push(buf);
    }
    let parts = vec![payload.clone()];
    wire.frame(Frame::new(Head::new(Kind::Request), Box::default(), parts));
    for _ in 0..5 {
        assert!(matches!(wire.link.receive(), Receive::Wait));
        wire.now = wire.link.next_deadline().unwrap();
        wire.link.tick(wire.now);
        wire.settle();
    }
    assert!(wire.link.is_open());
    held.clear();
    assert!(
        matches!(wire.link.receive(), Receive::Wait),
        "an event waits"
    );
    wire.settle();
    assert!(matches!(wire.events.last(), Some(Event::Asking(_))));
    assert!(matches!(wire.link.receive(), Receive::Into(_)));
    wire.now = wire.link.next_deadline().unwrap();
    wire.link.tick(wire.now);
    assert!(matches!(wire.why(), Why::Silent { .. }));
}

#[test]
fn end_within_a_frame_is_told_from_one_between_frames() {
    let mut wire = Wire::open(Purpose::Bulk);
    wire.link.receive();
    wire.link.received(0, wire.now);
    assert_eq!(wire.why(), Why::Closed);
    let mut wire = Wire::open(Purpose::Bulk);
    let front = Frame::bare(Head::new(Kind::Ping)).front(1, wire.sequence);
    wire.bytes(&front[..40]);
    wire.link.receive();
    wire.link.received(0, wire.now);
    assert_eq!(wire.why(), Why::Cut { received: 40 });
    let mut wire = Wire::open(Purpose::Bulk);
    wire.link.failed(std::io::ErrorKind::ConnectionReset);
    assert_eq!(wire.why(), Why::Io(std::io::ErrorKind::ConnectionReset));
}

/// A socket that is closed with something unread in it takes back what was sent last.
#[test]
fn link_that_ends_in_order_takes_in_what_comes_until_the_other_side_closes() {
    let mut wire = Wire::open(Purpose::Requests);
    wire.link.shut_down();
    wire.settle();
    assert_eq!(wire.why(), Why::Finished);
    assert_eq!(wire.heard[6], Kind::Bye.code());
    wire.bare(Head::new(Kind::Ping));
    wire.bytes(&vec![7; 100_000]);
    assert!(matches!(wire.link.receive(), Receive::Into(_)));
    wire.link.received(0, wire.now);
    assert!(matches!(wire.link.receive(), Receive::Close));
}

#[test]
fn bye_says_whose_mistake_it_was() {
    for (code, expected) in [
        (0, Why::Bye),
        (1, Why::Blamed(Blame::Frame)),
        (77, Why::Blamed(Blame::Other(77))),
    ] {
        let mut wire = Wire::open(Purpose::Requests);
        wire.bare(Head {
            code,
            ..Head::new(Kind::Bye)
        });
        assert_eq!(wire.why(), expected);
    }
}

#[test]
fn peer_that_asks_and_never_listens_is_not_listened_to() {
    let mut wire = Wire::open(Purpose::Spans);
    // Its streams are refused one by one, and it takes none of that in.
    let mut stream = 0;
    loop {
        stream += 1;
        let head = Head {
            stream,
            ..Head::new(Kind::Open)
        };
        let frame = Frame::bare(head).front(1, wire.sequence);
        wire.sequence += 1;
        let Receive::Into(place) = wire.link.receive() else {
            break;
        };
        place[..frame.len()].copy_from_slice(&frame);
        wire.link.received(frame.len(), wire.now);
        while let Some(event) = wire.link.event() {
            assert!(matches!(event, Event::StreamAsked { .. }));
        }
        wire.link.close_stream(stream, 1).unwrap();
        assert!(stream < 2 * QUEUE_FRAMES_MAX as u32, "a queue without end");
    }
    assert!(wire.link.is_open());
    // Once it listens, it is heard.
    wire.settle();
    wire.settle();
    while !wire.link.output().is_empty() {
        wire.settle();
    }
    assert!(matches!(wire.link.receive(), Receive::Into(_)));
}

#[test]
fn pings_that_are_not_taken_in_are_echoed_once() {
    let mut wire = Wire::open(Purpose::Requests);
    let mut bytes = Vec::new();
    for number in 0..50 {
        let head = Head {
            number,
            ..Head::new(Kind::Ping)
        };
        bytes.extend(Frame::bare(head).front(1, wire.sequence));
        wire.sequence += 1;
    }
    wire.bytes(&bytes);
    assert_eq!(wire.heard.len(), FRAME_HEADER_BYTES, "the newest counts");
    assert_eq!(wire.heard[32], 49);
}

#[test]
fn ping_waits_behind_no_queue() {
    let mut wire = Wire::open(Purpose::Bulk);
    let payload = filled(&wire.pool, 1 << 20, 2);
    for _ in 0..3 {
        let asked = wire.link.request(Ask {
            code: 0,
            urgent: false,
            meta: &[],
            payload: std::slice::from_ref(&payload),
            into: None,
            room_bytes: 0,
            deadline: Nanos(u64::MAX),
        });
        asked.unwrap();
    }
    // The driver takes nothing: what is staged is one frame.
    let staged: usize = wire
        .link
        .output()
        .iter()
        .map(|chunk| chunk.bytes().len())
        .sum();
    assert_eq!(staged, FRAME_HEADER_BYTES + (1 << 20));
    wire.now = wire.link.next_deadline().unwrap();
    wire.link.tick(wire.now);
    wire.link.output().clear();
    let next = wire.link.output().front().unwrap().bytes()[6];
    assert_eq!(next, Kind::Ping.code());
}

#[test]
fn greeting_of_unknown_versions_is_refused_whatever_else_it_says() {
    let mut wire = Wire::new();
    let mut greeting = greet(&own(ONE), TWO, 0, Purpose::Bulk);
    greeting.version_oldest = 50.into();
    greeting.version_newest = 60.into();
    greeting.purpose = 99.into();
    wire.frame(Frame::with(Head::new(Kind::Hello), &greeting));
    let why = wire.why();
    let text = why.to_string();
    assert!(
        text.contains("50 to 60") && text.contains("1 to 1"),
        "{text}"
    );
    assert!(matches!(
        why,
        Why::Refused {
            by: Side::This,
            refusal: Refused::Version { .. }
        }
    ));
    assert_eq!(wire.heard[6], Kind::Refuse.code());
}

#[test]
fn any_bytes_end_the_link_or_are_taken() {
    for seed in 0..2000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut wire = Wire::open(Purpose::ALL[random.usize(..3)]);
        wire.link.open_stream(1, 0, &[], Nanos(u64::MAX)).ok();
        for _ in 0..random.usize(1..60) {
            let kind = Kind::ALL[random.usize(..Kind::ALL.len())];
            let small = |random: &mut fastrand::Rng| {
                [0, 1, 2, 50, 60, 4096, 1 << 20, u64::MAX][random.usize(..8)]
            };
            let (min, max) = kind.meta_bytes();
            let head = Head {
                flags: random.u8(..4) & random.u8(..4),
                code: random.u16(..3),
                stream: random.u32(..3),
                epoch: random.u64(..4),
                position: small(&mut random),
                number: small(&mut random),
                room_bytes: small(&mut random) as u32,
                ..Head::new(kind)
            };
            let meta = vec![random.u8(..2); if max > 300 { random.usize(..300) } else { min }];
            let mut frame = Frame::new(head, meta.into(), Vec::new());
            let payload = if random.bool() {
                random.usize(..3) * BLOCK_BYTES
            } else {
                0
            };
            if payload > 0 {
                let mut checksum = PayloadChecksum::new();
                checksum.update(&vec![0; payload]);
                frame.head.payload_bytes = payload as u32;
                frame.head.payload_checksum = checksum.value();
            }
            let mut bytes = frame.front(1, wire.sequence).to_vec();
            bytes.resize(bytes.len() + payload, 0);
            wire.sequence += 1;
            if random.u8(..20) == 0 {
                let at = random.usize(..bytes.len());
                bytes[at] ^= 1 << random.u8(..8);
            }
            wire.bytes(&bytes);
            wire.link
                .ack(
                    random.u32(..3),
                    Progress {
                        durable: 50,
                        tail: 0,
                        limit: 100,
                    },
                )
                .ok();
            wire.link.answer(random.u64(..3), 0, &[], &[]).ok();
            if random.u8(..10) == 0 {
                wire.now = wire.link.next_deadline().unwrap_or(wire.now);
                wire.link.tick(wire.now);
            }
            assert!(wire.link.held_bytes() <= wire.link.data_bytes_max());
            if wire.link.ended().is_some() {
                wire.why();
                break;
            }
        }
        wire.events.clear();
        drop(wire.link);
        assert_eq!(
            wire.pool.free_bytes(),
            wire.pool.total_bytes(),
            "seed {seed}"
        );
    }
}
