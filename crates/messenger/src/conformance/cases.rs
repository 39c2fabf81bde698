//! The cases of the suite.

use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::{
    BLOCK_BYTES, WIRE_BULK_BYTES_MAX, WIRE_META_BYTES_MAX, WIRE_SPAN_BYTES_MAX, WIRE_URGENT_MAX,
};
use hdcs_core::wire::{BootId, ClusterId, NodeId, PayloadChecksum, Purpose};

use super::{End, Make, ONE, Pair, TWO, config, filled, known};
use crate::error::{Refused, SendError, Side, Why};
use crate::event::{Answer, Ask, Event, NotAsked, Request, Span};
use crate::handshake::{Known, Versions};
use crate::streams::{Marks, Progress};

const ONE_END: fn(&mut Pair) -> &mut End = |pair| &mut pair.one;
const TWO_END: fn(&mut Pair) -> &mut End = |pair| &mut pair.two;

/// A case with its name.
type Case = (&'static str, fn(&mut Make<'_>));

macro_rules! cases {
    ($($case:ident,)*) => { &[$((stringify!($case), $case),)*] };
}

const CASES: &[Case] = cases![
    handshake_names_both_ends,
    newest_common_version_is_spoken,
    refusals_are_told_at_both_ends,
    spans_pass_whole_and_in_order,
    spans_stop_at_the_limit,
    spans_to_a_slow_peer_are_bounded,
    streams_are_closed_from_either_side,
    streams_that_are_not_accepted_end,
    requests_are_answered_in_place,
    requests_stop_at_the_credit,
    urgent_requests_pass_by_others,
    late_answers_are_dropped,
    requests_end_with_the_link,
    answers_may_cross_the_end,
    data_waits_for_memory,
    pings_are_echoed,
    silent_peer_is_given_up,
    last_words_arrive,
];

/// Check every case; a panic names the one that does not hold.
pub fn check_all(make: &mut Make<'_>) {
    for (name, case) in CASES {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(make)));
        if let Err(panic) = result {
            eprintln!("conformance: {name}");
            std::panic::resume_unwind(panic);
        }
    }
}

fn handshake_names_both_ends(make: &mut Make<'_>) {
    for purpose in Purpose::ALL {
        let configs = [config(ONE), config(TWO)];
        let mut pair = Pair::greeting(make, purpose, configs, known(TWO), 1 << 20);
        assert_eq!(
            pair.one
                .connection
                .request(ask(&[], None))
                .unwrap_err()
                .error,
            SendError::NotOpen
        );
        let asked = pair.await_event("Asked", TWO_END, |event| match event {
            Event::Asked { peer, purpose } => Some((peer, purpose)),
            _ => None,
        });
        assert_eq!((asked.0.node, asked.1), (ONE, purpose));
        pair.two.connection.admit(Some(&known(ONE)));
        for (end, node) in [(ONE_END, TWO), (TWO_END, ONE)] {
            let (peer, version) = pair.await_event("Opened", end, |event| match event {
                Event::Opened { peer, version } => Some((peer, version)),
                _ => None,
            });
            assert_eq!((peer, version), (super::own(node).identity, 1));
        }
    }
}

fn newest_common_version_is_spoken(make: &mut Make<'_>) {
    let (mut one, mut two) = (config(ONE), config(TWO));
    let all = Versions {
        oldest: 1,
        newest: 4,
    };
    one.own.versions = all.limited(3);
    two.own.versions = all;
    let mut pair = Pair::open_with(make, Purpose::Requests, [one, two], 1 << 20);
    assert_eq!(pair.one.connection.version(), Some(3));
    assert_eq!(pair.two.connection.version(), Some(3));
    let number = pair.one.connection.request(ask(b"x", None)).unwrap();
    answer_all(&mut pair, 1);
    assert_eq!(answered(&mut pair).number, number);
}

/// Both ends of a handshake that is refused: whether each had the same reason, and who said so.
fn refused(
    make: &mut Make<'_>,
    change: impl FnOnce(
        &mut crate::link::LinkConfig,
        &mut crate::link::LinkConfig,
        &mut Known,
        &mut Option<Known>,
    ),
    by: Side,
) -> Refused {
    let (mut one, mut two) = (config(ONE), config(TWO));
    let (mut expects, mut knows) = (known(TWO), Some(known(ONE)));
    change(&mut one, &mut two, &mut expects, &mut knows);
    let mut pair = Pair::greeting(make, Purpose::Spans, [one, two], expects, 1 << 20);
    pair.until("the end of both", |pair| {
        if pair.two.connection.asked().is_some() {
            pair.two.connection.admit(knows.as_ref());
        }
        pair.one.is_closed() && pair.two.is_closed()
    });
    let mut reason = None;
    let other = match by {
        Side::This => Side::Peer,
        Side::Peer => Side::This,
    };
    for (end, by) in [(&mut pair.one, by), (&mut pair.two, other)] {
        let ended = end.connection.ended().expect("it is over");
        let Why::Refused { by: found, refusal } = &ended.why else {
            panic!("{ended}");
        };
        assert_eq!(*found, by, "{ended}");
        assert_eq!(*reason.get_or_insert(*refusal), *refusal);
        let last = end.events.pop_back();
        assert!(matches!(last, Some(Event::Ended(_))), "{last:?}");
    }
    reason.expect("there is one")
}

fn refusals_are_told_at_both_ends(make: &mut Make<'_>) {
    let by_two = Side::Peer;
    let reason = refused(
        make,
        |_, two, _, _| {
            two.own.versions = Versions {
                oldest: 2,
                newest: 3,
            };
        },
        by_two,
    );
    assert!(matches!(reason, Refused::Version { .. }));
    let reason = refused(
        make,
        |_, two, _, _| {
            two.own.identity.cluster = ClusterId([9; 16]);
        },
        by_two,
    );
    assert!(matches!(reason, Refused::Cluster { .. }));
    assert!(matches!(
        refused(make, |_, _, _, knows| *knows = None, by_two),
        Refused::Unknown(_)
    ));
    let reason = refused(
        make,
        |_, _, _, knows| {
            *knows = Some(Known {
                node: ONE,
                boot: Some((8, BootId([8; 16]))),
            });
        },
        by_two,
    );
    assert!(matches!(reason, Refused::OlderBoot { .. }));
    let reason = refused(
        make,
        |_, _, _, knows| {
            *knows = Some(Known {
                node: ONE,
                boot: Some((7, BootId([8; 16]))),
            });
        },
        by_two,
    );
    assert!(matches!(reason, Refused::SecondBoot { .. }));
    let reason = refused(
        make,
        |_, _, _, knows| {
            *knows = Some(Known {
                node: NodeId([5; 16]),
                boot: None,
            });
        },
        by_two,
    );
    assert!(matches!(reason, Refused::Taken { .. }));
    // By the side that connects, once it has seen who is there.
    let reason = refused(
        make,
        |_, _, expects, _| {
            expects.boot = Some((8, BootId([8; 16])));
        },
        Side::This,
    );
    assert!(matches!(reason, Refused::OlderBoot { .. }));
}

/// Open a stream from side one that side two takes up to `limit`.
fn stream(pair: &mut Pair, limit: u64) -> u32 {
    let deadline = pair.now.plus(Nanos::from_millis(1000));
    let opened = pair.one.connection.open_stream(7, 100, b"a log", deadline);
    let stream = opened.unwrap();
    let early = pair.one.connection.append(
        stream,
        100,
        Marks::default(),
        &[filled(&pair.pools[0], BLOCK_BYTES, 1)],
    );
    assert_eq!(early, Err(SendError::Full), "not accepted yet");
    let asked = pair.await_event("StreamAsked", TWO_END, |event| match event {
        Event::StreamAsked {
            stream,
            epoch,
            position,
            meta,
        } => Some((stream, epoch, position, meta)),
        _ => None,
    });
    assert_eq!(asked, (stream, 7, 100, (*b"a log").into()));
    ack(pair, stream, 100, limit);
    let (accepted, progress) = acked(pair);
    assert_eq!((accepted, progress.limit), (stream, limit));
    await_room(pair);
    stream
}

fn await_room(pair: &mut Pair) {
    pair.await_event("Room", ONE_END, |event| {
        matches!(event, Event::Room).then_some(())
    });
}

fn ack(pair: &mut Pair, stream: u32, durable: u64, limit: u64) {
    let progress = Progress {
        durable,
        tail: 90,
        limit,
    };
    pair.two.connection.ack(stream, progress).unwrap();
}

fn acked(pair: &mut Pair) -> (u32, Progress) {
    pair.await_event("Acked", ONE_END, |event| match event {
        Event::Acked { stream, progress } => Some((stream, progress)),
        _ => None,
    })
}

fn span(pair: &mut Pair) -> Span {
    pair.await_event("Span", TWO_END, |event| match event {
        Event::Span(span) => Some(span),
        _ => None,
    })
}

/// A span of so many blocks in several parts, as a log has them: the control block, then data.
fn parts(pair: &Pair, blocks: usize, seed: u64) -> Vec<Buf> {
    let mut parts = vec![filled(&pair.pools[0], BLOCK_BYTES, seed)];
    let mut left = blocks - 1;
    while left > 0 {
        let part = left.min(1 + (seed as usize * 7) % 40);
        parts.push(filled(
            &pair.pools[0],
            part * BLOCK_BYTES,
            seed + left as u64,
        ));
        left -= part;
    }
    parts
}

fn joined(parts: &[Buf]) -> Vec<u8> {
    parts.iter().flat_map(|part| part.iter().copied()).collect()
}

fn checksum(parts: &[Buf]) -> u64 {
    let mut checksum = PayloadChecksum::new();
    for part in parts {
        checksum.update(part);
    }
    checksum.value()
}

fn spans_pass_whole_and_in_order(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Spans);
    let stream = stream(&mut pair, 10_000);
    let mut position = 100;
    let largest = WIRE_SPAN_BYTES_MAX / BLOCK_BYTES;
    for (seed, blocks) in [2, 1, 3, 257, 40, largest, 2, 255, 9]
        .into_iter()
        .enumerate()
    {
        let sent = parts(&pair, blocks, seed as u64);
        let marks = Marks {
            durable: position,
            committed: position - 2,
            chain_before: position + 7,
            chain: position + 9,
            incarnation: 3,
        };
        // A gap, as where a log begins its next lap.
        position += seed as u64 % 2;
        pair.one
            .connection
            .append(stream, position, marks, &sent)
            .unwrap();
        let came = span(&mut pair);
        assert_eq!(
            (came.stream, came.epoch, came.position, came.marks),
            (stream, 7, position, marks)
        );
        assert_eq!(came.checksum, checksum(&sent));
        assert!(
            came.parts
                .iter()
                .all(|part| part.as_ptr().addr().is_multiple_of(BLOCK_BYTES))
        );
        assert!(joined(&came.parts) == joined(&sent), "a span is altered");
        drop(sent);
        position += blocks as u64;
        ack(&mut pair, stream, position, 10_000);
        let (_, progress) = acked(&mut pair);
        assert_eq!(progress.durable, position);
    }
    pair.until("memory back", |pair| {
        pair.pools
            .iter()
            .all(|pool| pool.free_bytes() == pool.total_bytes())
    });
    // Many at once.
    let mut sent = Vec::new();
    for seed in 0..100 {
        let one = parts(&pair, 2 + seed % 5, seed as u64);
        let bytes: usize = one.iter().map(|part| part.len()).sum();
        let marks = Marks {
            durable: position,
            committed: position,
            ..Marks::default()
        };
        pair.one
            .connection
            .append(stream, position, marks, &one)
            .unwrap();
        sent.push((position, joined(&one)));
        position += (bytes / BLOCK_BYTES) as u64;
    }
    for (position, bytes) in sent {
        let came = span(&mut pair);
        assert_eq!(came.position, position);
        assert!(joined(&came.parts) == bytes, "a span is altered");
    }
}

fn spans_stop_at_the_limit(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Spans);
    let stream = stream(&mut pair, 104);
    let append = |pair: &mut Pair, position| {
        let sent = parts(pair, 2, 1);
        pair.one
            .connection
            .append(stream, position, Marks::default(), &sent)
    };
    assert_eq!(append(&mut pair, 100), Ok(()));
    assert_eq!(
        append(&mut pair, 101),
        Err(SendError::Position {
            position: 101,
            expected: 102
        })
    );
    assert_eq!(append(&mut pair, 102), Ok(()));
    assert_eq!(append(&mut pair, 104), Err(SendError::Full));
    for position in [100, 102] {
        assert_eq!(span(&mut pair).position, position);
    }
    ack(&mut pair, stream, 104, 106);
    await_room(&mut pair);
    assert_eq!(append(&mut pair, 104), Ok(()));
    assert_eq!(append(&mut pair, 106), Err(SendError::Full));
    assert_eq!(span(&mut pair).position, 104);
    let sent = parts(&pair, 1, 0);
    let connection = &mut pair.one.connection;
    let wrong = connection.append(99, 0, Marks::default(), &sent);
    assert_eq!(wrong, Err(SendError::Stream(99)));
}

fn spans_to_a_slow_peer_are_bounded(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Spans);
    let stream = stream(&mut pair, 1 << 40);
    // It takes nothing in.
    pair.two.takes_events = false;
    let mut position = 100;
    let sent = parts(&pair, 64, 3);
    let bound = pair.one.connection.data_bytes_max();
    let mut idle = 0;
    while idle < 1000 {
        match pair
            .one
            .connection
            .append(stream, position, Marks::default(), &sent)
        {
            Ok(()) => position += 64,
            Err(error) => assert_eq!(error, SendError::Full),
        }
        idle = if pair.turn() { 0 } else { idle + 1 };
        // What its driver has taken is a part of what was staged.
        assert!(
            pair.one.held_bytes() <= bound,
            "{} of {bound}",
            pair.one.held_bytes()
        );
    }
    assert!(
        position < 100 + (64 << 20) / BLOCK_BYTES as u64,
        "a queue without end"
    );
    pair.two.takes_events = true;
    await_room(&mut pair);
    let mut expected = 100;
    while expected < position {
        let came = span(&mut pair);
        assert_eq!(came.position, expected);
        expected += 64;
    }
}

fn streams_are_closed_from_either_side(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Spans);
    let closed = |event| match event {
        Event::StreamClosed { stream, own, code } => Some((stream, own, code)),
        _ => None,
    };
    let first = stream(&mut pair, 1000);
    // Closed by the receiver while spans are on their way.
    let sent = parts(&pair, 2, 1);
    pair.one
        .connection
        .append(first, 100, Marks::default(), &sent)
        .unwrap();
    pair.two.connection.close_stream(first, 5).unwrap();
    assert_eq!(
        pair.await_event("StreamClosed", ONE_END, closed),
        (first, true, 5)
    );
    let late = pair
        .one
        .connection
        .append(first, 102, Marks::default(), &sent);
    assert_eq!(late, Err(SendError::Stream(first)));
    let second = stream(&mut pair, 1000);
    assert!(second > first);
    pair.one
        .connection
        .append(second, 100, Marks::default(), &sent)
        .unwrap();
    assert_eq!(span(&mut pair).stream, second);
    assert_eq!(pair.two.connection.late(), 1);
    pair.one.connection.close_own_stream(second, 6).unwrap();
    assert_eq!(
        pair.await_event("StreamClosed", TWO_END, closed),
        (second, false, 6)
    );
    assert!(pair.two.connection.close_stream(second, 0).is_err());
    // What both close at once is closed.
    let third = stream(&mut pair, 1000);
    pair.one.connection.close_own_stream(third, 0).unwrap();
    pair.two.connection.close_stream(third, 0).unwrap();
    let fourth = stream(&mut pair, 1000);
    assert!(fourth > third);
}

fn streams_that_are_not_accepted_end(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Spans);
    let deadline = pair.now.plus(Nanos::from_millis(100));
    let stream = pair
        .one
        .connection
        .open_stream(1, 0, &[], deadline)
        .unwrap();
    pair.await_event("StreamAsked", TWO_END, |event| {
        matches!(event, Event::StreamAsked { .. }).then_some(())
    });
    pair.pass(Nanos::from_millis(100));
    let late = pair.await_event("StreamLate", ONE_END, |event| match event {
        Event::StreamLate { stream } => Some(stream),
        _ => None,
    });
    assert_eq!(late, stream);
    // Too late to matter, and no mistake.
    let _ = pair.two.connection.ack(stream, Progress::default());
    pair.await_event("StreamClosed", TWO_END, |event| {
        matches!(event, Event::StreamClosed { .. }).then_some(())
    });
    self::stream(&mut pair, 500);
}

/// A request without data.
fn ask(meta: &[u8], into: Option<BufMut>) -> Ask<'_> {
    Ask {
        code: 3,
        urgent: false,
        meta,
        payload: &[],
        into,
        room_bytes: 0,
        deadline: Nanos::from_millis(5000),
    }
}

fn asking(pair: &mut Pair) -> Request {
    pair.await_event("a request", TWO_END, |event| match event {
        Event::Asking(request) => Some(request),
        _ => None,
    })
}

fn answered(pair: &mut Pair) -> Answer {
    pair.await_event("an answer", ONE_END, |event| match event {
        Event::Answered(answer) => Some(answer),
        _ => None,
    })
}

fn answer_all(pair: &mut Pair, count: usize) {
    for _ in 0..count {
        let request = asking(pair);
        let answered = pair
            .two
            .connection
            .answer(request.number, 0, &request.meta, &[]);
        answered.unwrap();
    }
}

fn requests_are_answered_in_place(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Bulk);
    let meta = vec![9; WIRE_META_BYTES_MAX];
    for (seed, bytes) in [0, 1, 4096, 100_000, WIRE_BULK_BYTES_MAX]
        .into_iter()
        .enumerate()
    {
        let payload = if bytes == 0 {
            Vec::new()
        } else {
            vec![filled(&pair.pools[0], bytes, seed as u64)]
        };
        let into = pair.pools[0].alloc(WIRE_BULK_BYTES_MAX).unwrap();
        let address = into.as_ptr().addr();
        let number = pair.one.connection.request(Ask {
            payload: &payload,
            ..ask(&meta[..bytes.min(meta.len())], Some(into))
        });
        let number = number.unwrap();
        let request = asking(&mut pair);
        assert_eq!(
            (request.number, request.code, request.room_bytes as usize),
            (number, 3, WIRE_BULK_BYTES_MAX)
        );
        assert_eq!(request.meta.len(), bytes.min(meta.len()));
        assert!(
            joined(&request.payload) == joined(&payload),
            "a request is altered"
        );
        let back = joined(&request.payload);
        let connection = &mut pair.two.connection;
        let taken = connection.answer(number, 77, b"meta", &request.payload);
        taken.unwrap();
        let again = pair.two.connection.answer(number, 77, &[], &[]);
        assert_eq!(again, Err(SendError::Unasked(number)));
        let answer = answered(&mut pair);
        assert_eq!(
            (answer.number, answer.code, &*answer.meta),
            (number, 77, &b"meta"[..])
        );
        let into = answer.into.unwrap();
        assert_eq!(into.as_ptr().addr(), address, "the asker's own buffer");
        assert!(into[..answer.payload_bytes] == back, "an answer is altered");
        assert_eq!(
            answer.checksum,
            if bytes == 0 { 0 } else { checksum(&payload) }
        );
    }
    let large = pair
        .one
        .connection
        .request(ask(&vec![0; WIRE_META_BYTES_MAX + 1], None));
    assert!(matches!(
        large.unwrap_err().error,
        SendError::TooLarge { part: "meta", .. }
    ));
    // More than one buffer holds, into memory of the asker's pool.
    let number = pair.one.connection.request(Ask {
        room_bytes: WIRE_SPAN_BYTES_MAX,
        ..ask(&[], None)
    });
    let number = number.unwrap();
    assert_eq!(asking(&mut pair).room_bytes as usize, WIRE_SPAN_BYTES_MAX);
    let data = parts(&pair, WIRE_SPAN_BYTES_MAX / BLOCK_BYTES, 5);
    let connection = &mut pair.two.connection;
    connection.answer(number, 77, &[], &data).unwrap();
    let answer = answered(&mut pair);
    assert!(answer.into.is_none() && answer.payload_bytes == WIRE_SPAN_BYTES_MAX);
    assert!(
        joined(&answer.payload) == joined(&data),
        "an answer is altered"
    );
    drop((answer, data));
    // The other way at the same time.
    let forth = pair.one.connection.request(ask(b"forth", None)).unwrap();
    let back = pair.two.connection.request(ask(b"back", None)).unwrap();
    assert_eq!(&*asking(&mut pair).meta, b"forth");
    pair.two.connection.answer(forth, 0, b"f", &[]).unwrap();
    let request = pair.await_event("a request", ONE_END, |event| match event {
        Event::Asking(request) => Some(request),
        _ => None,
    });
    assert_eq!(&*request.meta, b"back");
    pair.one.connection.answer(back, 0, b"b", &[]).unwrap();
    assert_eq!(&*answered(&mut pair).meta, b"f");
    let mut pair = Pair::open(make, Purpose::Requests);
    let into = pair.pools[0].alloc(10);
    let NotAsked { error, into } = pair.one.connection.request(ask(&[], into)).unwrap_err();
    assert!(matches!(error, SendError::TooLarge { part: "room", .. }) && into.is_some());
    let streams = pair.one.connection.open_stream(1, 0, &[], Nanos(0));
    assert!(matches!(streams, Err(SendError::Purpose { .. })));
}

fn requests_stop_at_the_credit(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Bulk);
    let request = |pair: &mut Pair| {
        let into = pair.pools[0].alloc(WIRE_BULK_BYTES_MAX);
        pair.one.connection.request(ask(&[], into))
    };
    let mut taken = 0;
    while request(&mut pair).is_ok() {
        taken += 1;
    }
    assert_eq!(taken, 3, "4 MiB were granted, less than four requests cost");
    assert_eq!(request(&mut pair).unwrap_err().error, SendError::Full);
    answer_all(&mut pair, 1);
    answered(&mut pair);
    await_room(&mut pair);
    assert!(request(&mut pair).is_ok());
    assert_eq!(request(&mut pair).unwrap_err().error, SendError::Full);
    // A larger window comes without an answer.
    pair.two.connection.set_credit(6 << 20);
    await_room(&mut pair);
    assert!(request(&mut pair).is_ok());
    answer_all(&mut pair, 4);
    for _ in 0..4 {
        answered(&mut pair);
    }
    assert_eq!(pair.one.connection.requests(), (0, 0));
    assert_eq!(pair.two.connection.requests(), (0, 0));
}

fn urgent_requests_pass_by_others(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Bulk);
    let payload = filled(&pair.pools[0], WIRE_BULK_BYTES_MAX, 5);
    let mut others = 0;
    loop {
        let request = Ask {
            payload: std::slice::from_ref(&payload),
            ..ask(&[], None)
        };
        if pair.one.connection.request(request).is_err() {
            break;
        }
        others += 1;
    }
    let urgent = |pair: &mut Pair| {
        pair.one.connection.request(Ask {
            urgent: true,
            ..ask(b"lease", None)
        })
    };
    for _ in 0..WIRE_URGENT_MAX {
        urgent(&mut pair).unwrap();
    }
    assert_eq!(urgent(&mut pair).unwrap_err().error, SendError::Full);
    let first = asking(&mut pair);
    assert!(first.urgent, "it came before what was asked before");
    pair.two
        .connection
        .answer(first.number, 0, &[], &[])
        .unwrap();
    answer_all(&mut pair, others + WIRE_URGENT_MAX - 1);
    for _ in 0..others + WIRE_URGENT_MAX {
        answered(&mut pair);
    }
    urgent(&mut pair).unwrap();
}

fn late_answers_are_dropped(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Bulk);
    let into = pair.pools[0].alloc(WIRE_BULK_BYTES_MAX);
    let number = pair.one.connection.request(Ask {
        deadline: pair.now.plus(Nanos::from_millis(10)),
        ..ask(&[], into)
    });
    let number = number.unwrap();
    assert_eq!(asking(&mut pair).number, number);
    pair.pass(Nanos::from_millis(10));
    let (late, into) = pair.await_event("TimedOut", ONE_END, |event| match event {
        Event::TimedOut { number, into } => Some((number, into)),
        _ => None,
    });
    assert_eq!(late, number);
    drop(into.expect("the buffer comes back"));
    let payload = filled(&pair.pools[1], WIRE_BULK_BYTES_MAX, 5);
    pair.two
        .connection
        .answer(number, 0, &[], &[payload])
        .unwrap();
    let next = pair.one.connection.request(ask(b"next", None)).unwrap();
    answer_all(&mut pair, 1);
    assert_eq!(answered(&mut pair).number, next);
    assert_eq!(pair.one.connection.late(), 1);
    let pool = &pair.pools[0];
    assert_eq!(
        pool.free_bytes(),
        pool.total_bytes(),
        "no memory for what is dropped"
    );
}

fn requests_end_with_the_link(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Bulk);
    let mut open = Vec::new();
    for seed in 0..3 {
        let into = pair.pools[0].alloc(4096);
        open.push(pair.one.connection.request(ask(&[seed], into)).unwrap());
    }
    answer_all(&mut pair, 1);
    let done = answered(&mut pair).number;
    open.retain(|number| *number != done);
    assert_eq!(asking(&mut pair).number, open[0]);
    pair.two.connection.shut_down();
    pair.until("the end", |pair| {
        pair.one.is_closed() && pair.two.is_closed()
    });
    for number in &open {
        let Some(Event::Disconnected {
            number: found,
            into,
        }) = pair.one.events.pop_front()
        else {
            panic!("each ends once");
        };
        assert_eq!((found, into.is_some()), (*number, true));
    }
    let Some(Event::Ended(ended)) = pair.one.events.pop_front() else {
        panic!("then the link");
    };
    assert_eq!(ended.why, Why::Bye);
    assert!(pair.one.events.is_empty());
    assert_eq!(
        pair.one
            .connection
            .request(ask(&[], None))
            .unwrap_err()
            .error,
        SendError::Ended
    );
    assert_eq!(
        pair.two.connection.answer(open[0], 0, &[], &[]),
        Err(SendError::Ended)
    );
    assert_eq!(
        pair.two.connection.ended().map(|ended| &ended.why),
        Some(&Why::Finished)
    );
}

/// What comes for a side that is about to end is no mistake of the other.
fn answers_may_cross_the_end(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Bulk);
    let number = pair.one.connection.request(ask(b"forth", None)).unwrap();
    assert_eq!(asking(&mut pair).number, number);
    for _ in 0..3 {
        let into = pair.pools[1].alloc(WIRE_BULK_BYTES_MAX);
        let back = pair.two.connection.request(ask(b"back", into)).unwrap();
        let request = pair.await_event("a request", ONE_END, |event| match event {
            Event::Asking(request) => Some(request),
            _ => None,
        });
        assert_eq!(request.number, back);
        let payload = filled(&pair.pools[0], WIRE_BULK_BYTES_MAX, 5);
        let answered = pair.one.connection.answer(back, 0, &[], &[payload]);
        answered.unwrap();
    }
    pair.one.connection.shut_down();
    pair.two.connection.answer(number, 0, b"late", &[]).unwrap();
    let mut answered = 0;
    pair.until("the end of both", |pair| {
        while let Some(event) = pair.two.events.pop_front() {
            answered += u32::from(matches!(event, Event::Answered(_)));
        }
        pair.one.is_closed() && pair.two.is_closed()
    });
    assert_eq!(answered, 3);
    let Some(Event::Disconnected { number: found, .. }) = pair.one.events.pop_front() else {
        panic!("its own request ends");
    };
    assert_eq!(found, number);
    let Some(Event::Ended(ended)) = pair.one.events.pop_front() else {
        panic!("then the link");
    };
    assert_eq!(ended.why, Why::Finished);
    assert_eq!(
        pair.two.connection.ended().map(|ended| &ended.why),
        Some(&Why::Bye)
    );
}

fn data_waits_for_memory(make: &mut Make<'_>) {
    let configs = [config(ONE), config(TWO)];
    let mut pair = Pair::open_with(make, Purpose::Spans, configs, 4 << 20);
    let stream = stream(&mut pair, 1 << 20);
    let mut held = Vec::new();
    while let Some(buf) = pair.pools[1].alloc(BLOCK_BYTES) {
        held.push(buf);
    }
    let sent = parts(&pair, 5, 2);
    pair.one
        .connection
        .append(stream, 100, Marks::default(), &sent)
        .unwrap();
    for _ in 0..1000 {
        pair.turn();
    }
    assert!(pair.two.events.is_empty() && pair.two.connection.is_open());
    // It is this side that takes nothing, so the other is not to blame; what is free lies in single blocks.
    let mut index = 0;
    held.retain(|_| {
        index += 1;
        index % 2 == 0
    });
    let came = span(&mut pair);
    assert!(joined(&came.parts) == joined(&sent), "a span is altered");
    assert_eq!(came.parts.len(), 5);
}

fn pings_are_echoed(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Requests);
    let interval = config(ONE).ping_interval;
    let mut last = Nanos(0);
    for _ in 0..5 {
        let before = pair.now;
        pair.pass(interval);
        let sent = pair.await_event("Echo", ONE_END, |event| match event {
            Event::Echo { sent } => Some(sent),
            _ => None,
        });
        assert!(
            sent > last && sent >= before && sent <= pair.now,
            "{sent:?}"
        );
        last = sent;
        assert!(pair.one.connection.next_deadline() > Some(pair.now));
        pair.await_event("Echo", TWO_END, |event| {
            matches!(event, Event::Echo { .. }).then_some(())
        });
    }
}

fn silent_peer_is_given_up(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Requests);
    let number = pair.one.connection.request(Ask {
        deadline: Nanos::from_millis(1 << 30),
        ..ask(&[], None)
    });
    let number = number.unwrap();
    // The other end is not driven any more.
    let ping_max = config(ONE).ping_max;
    for time in [Nanos(0), ping_max] {
        pair.now = pair.now.plus(time);
        pair.one.connection.tick(pair.now);
        while pair.one.turn(pair.now) {}
    }
    pair.one.take_events();
    let Some(Event::Disconnected { number: found, .. }) = pair.one.events.pop_front() else {
        panic!("the request ends");
    };
    assert_eq!(found, number);
    let Some(Event::Ended(ended)) = pair.one.events.pop_front() else {
        panic!("the link ends");
    };
    assert!(matches!(ended.why, Why::Silent { .. }), "{ended}");
}

fn last_words_arrive(make: &mut Make<'_>) {
    let mut pair = Pair::open(make, Purpose::Spans);
    let stream = stream(&mut pair, 1 << 20);
    let sent = parts(&pair, 300, 2);
    for position in [100, 400, 700] {
        pair.one
            .connection
            .append(stream, position, Marks::default(), &sent)
            .unwrap();
    }
    pair.one.connection.shut_down();
    let more = pair
        .one
        .connection
        .append(stream, 1000, Marks::default(), &sent);
    assert_eq!(more, Err(SendError::Ended));
    for position in [100, 400, 700] {
        let came = span(&mut pair);
        assert_eq!(came.position, position);
        assert!(joined(&came.parts) == joined(&sent), "a span is altered");
    }
    pair.until("the end of both", |pair| {
        pair.one.is_closed() && pair.two.is_closed()
    });
    assert_eq!(
        pair.two.connection.ended().map(|ended| &ended.why),
        Some(&Why::Bye)
    );
    assert_eq!(
        pair.one.connection.ended().map(|ended| &ended.why),
        Some(&Why::Finished)
    );
}
