//! Every message there and back, and everything that is none refused.

use alloc::vec;

use super::*;

const ABOUT: About = About {
    log: LogName {
        volume: [7; 16],
        number: 3,
    },
    epoch: 9,
};

fn at(position: u64) -> Point {
    Point {
        position,
        chain: position * 1000 + 1,
    }
}

fn change() -> Change {
    Change {
        number: 4,
        tail: at(70),
        sync_points: 5,
        incarnation: 6,
        opens_at: 71,
        is_unflushed: true,
    }
}

fn cut() -> Cut {
    Cut {
        at: at(80),
        void_before: 11,
        joined: 12,
        change: change(),
    }
}

fn copy() -> Copy {
    Copy {
        promised: 9,
        head: at(90),
        tail: at(70),
        sync_points: 13,
        incarnation: 14,
        is_unflushed: true,
        joined: 15,
        is_whole: false,
        lease_left_ms: 0,
    }
}

fn span() -> SpanId {
    SpanId {
        start: at(100),
        end: at(110),
        blocks: 8,
        incarnation: 16,
        evidence: 99,
    }
}

fn requests() -> Vec<Message> {
    vec![
        Message::Attach,
        Message::Superblock(change()),
        Message::Promise { floor: at(20) },
        Message::Join,
        Message::JoinAt(cut()),
        Message::Verify { up_to: at(21) },
        Message::ReadLog { after: at(22) },
        Message::Beat {
            number: 23,
            lease_ms: LEASE_MS_MAX,
        },
    ]
}

fn answers() -> Vec<Answer> {
    let points: Vec<Point> = (0..JOIN_POINTS_MAX as u64).map(at).collect();
    let whole = Copy {
        is_unflushed: false,
        is_whole: true,
        lease_left_ms: 2_200,
        ..copy()
    };
    let messages = [
        Message::Attached(copy()),
        Message::Promised(whole),
        Message::Named { number: 30 },
        Message::Fenced { promised: 31 },
        Message::HasCut(cut()),
        Message::Verified { up_to: at(32) },
        Message::NotWhole { up_to: at(33) },
        Message::LogData(span()),
        Message::Echo { number: 34 },
        Message::Joining { points: Vec::new() },
        Message::Joining { points },
    ];
    let messages = messages.into_iter().map(Answer::Message);
    messages.chain([Answer::Nothing, Answer::NoLog]).collect()
}

#[test]
fn messages_are_read_as_they_were_written() {
    for message in requests() {
        let (code, meta) = request(ABOUT, &message).unwrap();
        assert_eq!(read_request(code, &meta), Ok((ABOUT, message)));
        assert!(read_answer(code, &meta).is_err());
    }
    for one in answers() {
        let (code, meta) = answer(ABOUT, &one).unwrap();
        assert_eq!(read_answer(code, &meta), Ok((ABOUT, one)));
        assert!(read_request(code, &meta).is_err());
    }
    assert_eq!(read_open(9, &open(ABOUT)), Ok(ABOUT.log));
    assert!(matches!(
        read_open(8, &open(ABOUT)),
        Err(MessageError::About { .. })
    ));
}

#[test]
fn message_is_a_request_or_an_answer_or_goes_over_a_stream() {
    for message in requests() {
        let as_answer = Answer::Message(message);
        assert_eq!(answer(ABOUT, &as_answer), None, "{as_answer:?}");
    }
    for one in answers() {
        if let Answer::Message(message) = one {
            assert_eq!(request(ABOUT, &message), None, "{message:?}");
        }
    }
    for message in [Message::Append(span()), Message::Ack { durable: 5 }] {
        assert_eq!(request(ABOUT, &message), None);
        assert_eq!(answer(ABOUT, &Answer::Message(message)), None);
    }
    let points = vec![at(1); JOIN_POINTS_MAX + 1];
    let many = Answer::Message(Message::Joining { points });
    assert_eq!(answer(ABOUT, &many), None);
}

#[test]
fn meta_of_another_length_is_refused() {
    for message in requests() {
        let (code, meta) = request(ABOUT, &message).unwrap();
        for bytes in 0..meta.len() + 40 {
            let mut other = meta.clone();
            other.resize(bytes, 0);
            let expected = bytes == meta.len();
            assert_eq!(read_request(code, &other).is_ok(), expected, "{message:?}");
        }
    }
    for one in answers() {
        let (code, meta) = answer(ABOUT, &one).unwrap();
        for bytes in (0..200).chain([meta.len() + 16]) {
            let mut other = meta.clone();
            other.resize(bytes, 0);
            let is_points = code == CODE_JOINING && bytes >= 32 && bytes % 16 == 0;
            let fits = bytes <= 32 + JOIN_POINTS_MAX * 16;
            let expected = bytes == meta.len() || is_points && fits;
            assert_eq!(read_answer(code, &other).is_ok(), expected, "{one:?}");
        }
    }
}

#[test]
fn what_is_read_is_written_the_same() {
    // Each bit matters, and none that does not is let pass.
    for message in requests() {
        let (code, meta) = request(ABOUT, &message).unwrap();
        for bit in 0..meta.len() * 8 {
            let mut other = meta.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            if let Ok((about, message)) = read_request(code, &other) {
                assert_eq!(request(about, &message), Some((code, other)));
            }
        }
    }
    for one in answers() {
        let (code, meta) = answer(ABOUT, &one).unwrap();
        for bit in 0..meta.len().min(200) * 8 {
            let mut other = meta.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            if let Ok((about, one)) = read_answer(code, &other) {
                assert_eq!(answer(about, &one), Some((code, other)));
            }
        }
    }
}

#[test]
fn unknown_codes_and_flags_are_refused() {
    for code in (0..64).chain(92..=u16::MAX) {
        let meta = open(ABOUT);
        assert_eq!(read_request(code, &meta), Err(MessageError::Code(code)));
        assert_eq!(read_answer(code, &meta), Err(MessageError::Code(code)));
    }
    let (code, meta) = request(ABOUT, &Message::Superblock(change())).unwrap();
    for at in [80, 84] {
        let mut other = meta.clone();
        other[at] |= 2;
        assert_eq!(
            read_request(code, &other),
            Err(MessageError::Reserved(code))
        );
    }
}

#[test]
fn lease_that_is_longer_than_any_is_refused() {
    let beat = Message::Beat {
        number: 1,
        lease_ms: LEASE_MS_MAX + 1,
    };
    let (code, meta) = request(ABOUT, &beat).unwrap();
    assert!(matches!(
        read_request(code, &meta),
        Err(MessageError::Unexpected(_))
    ));
}

#[test]
fn answer_fits_the_request_that_it_belongs_to() {
    for question in Question::ALL {
        for one in answers() {
            let (code, _) = answer(ABOUT, &one).unwrap();
            let expected = match &one {
                Answer::Nothing | Answer::NoLog => true,
                Answer::Message(message) => match message {
                    Message::Fenced { .. } => true,
                    Message::Attached(_) => question == Question::Attach,
                    Message::Promised(_) => question == Question::Promise,
                    Message::Named { .. } => question == Question::Superblock,
                    Message::HasCut(_) => question == Question::JoinAt,
                    Message::Verified { .. } | Message::NotWhole { .. } => {
                        question == Question::Verify
                    }
                    Message::LogData(_) => question == Question::ReadLog,
                    Message::Joining { .. } => question == Question::Join,
                    Message::Echo { .. } => question == Question::Beat,
                    other => unreachable!("{other:?} is no answer"),
                },
            };
            assert_eq!(fits(question, code), expected, "{question:?} {one:?}");
        }
        assert!(!fits(question, 79) && !fits(question, 92));
    }
}

#[test]
fn span_is_what_frame_and_marks_say() {
    let marks = marks_of(&span(), 95);
    assert_eq!(marks.committed.get(), 95);
    assert_eq!(span_of(100, 102, 8 * BLOCK_BYTES, &marks), Ok(span()));
    assert_eq!(marks_of(&span(), 500).committed.get(), 99);
    for (follows, position, bytes) in [
        (103, 102, 8 * BLOCK_BYTES),
        (100, 102, 0),
        (100, 102, 8 * BLOCK_BYTES + 1),
        (100, u64::MAX, 8 * BLOCK_BYTES),
        (100, 102, (WIRE_PARTS_MAX + 1) * BLOCK_BYTES),
    ] {
        let found = span_of(follows, position, bytes, &marks);
        assert!(matches!(found, Err(MessageError::Span { .. })), "{found:?}");
    }
}
