//! What an honest pair does.

use std::path::Path;
use std::process::Command;

use hdcs_messenger::tls::{Files, certificate_name};

use super::*;

/// The first node asks, the second is told the same, and answers.
fn asks(rig: &mut Rig, epoch: u64, asked: &Message) {
    let links = &mut rig.one().links;
    assert_eq!(links.ask(TWO, about(epoch), asked), Ok(()));
    let came = rig.received(TWO, "a request");
    assert_eq!(
        (came.from, came.about, &came.message),
        (ONE, about(epoch), asked)
    );
}

/// The second node says this, and the first one is told the same.
fn answers(rig: &mut Rig, epoch: u64, said: &Message) {
    let links = &mut rig.two().links;
    links.answer(ONE, about(epoch), said, &[]);
    let came = rig.received(ONE, "an answer");
    assert_eq!(
        (came.from, came.about, &came.message),
        (TWO, about(epoch), said)
    );
}

/// Send a span as soon as there is room for it.
fn append(rig: &mut Rig, epoch: u64, span: &SpanId, data: &[Buf]) {
    rig.turn_until("room for a span", |rig| {
        let links = &mut rig.one().links;
        match links.append(TWO, about(epoch), span, span.evidence, data) {
            Ok(()) => true,
            Err(NotSent::Full) => false,
            Err(error) => panic!("{error}"),
        }
    });
}

fn appends(rig: &mut Rig, epoch: u64, span: SpanId, seed: u8) {
    let data = data(span.blocks, seed);
    append(rig, epoch, &span, &data);
    let came = rig.received(TWO, "a span");
    assert_eq!(
        (came.about, came.message, came.committed),
        (about(epoch), Message::Append(span), span.evidence)
    );
    assert!(joined(&came.data) == joined(&data), "a span is altered");
}

fn acks(rig: &mut Rig, epoch: u64, durable: u64) {
    rig.two().links.ack(ONE, about(epoch), durable, durable);
    is_acked(rig, epoch, durable);
}

fn is_acked(rig: &mut Rig, epoch: u64, durable: u64) {
    let came = rig.received(ONE, "an acknowledgement");
    let expected = (about(epoch), Message::Ack { durable });
    assert_eq!((came.about, came.message), expected);
}

/// Everything that a leader and a member say to one another.
fn speaks(rig: &mut Rig) {
    asks(rig, 5, &Message::Attach);
    answers(rig, 5, &Message::Attached(copy()));
    asks(rig, 5, &Message::Promise { floor: at(20) });
    answers(rig, 5, &Message::Promised(copy()));
    asks(rig, 5, &Message::Join);
    let points: Vec<Point> = (0..JOIN_POINTS_MAX as u64).map(at).collect();
    answers(rig, 5, &Message::Joining { points });
    let cut = Cut {
        at: at(80),
        void_before: 2,
        joined: 3,
        change: change(1),
    };
    asks(rig, 5, &Message::JoinAt(cut));
    answers(rig, 5, &Message::HasCut(cut));
    for number in [2, 3] {
        asks(rig, 5, &superblock(number));
    }
    // One answer for both.
    answers(rig, 5, &Message::Named { number: 3 });
    let again = rig.received(ONE, "the other answer");
    assert_eq!(again.message, Message::Named { number: 3 });
    let largest = WIRE_PARTS_MAX as u32;
    for (start, skipped, blocks) in [(80, 0, 1), (81, 5, 3), (89, 100, largest)] {
        let span = span(start, skipped, blocks);
        appends(rig, 5, span, blocks as u8);
        acks(rig, 5, span.end.position);
    }
    let up_to = at(85);
    asks(rig, 5, &Message::Verify { up_to });
    answers(rig, 5, &Message::NotWhole { up_to });
    asks(rig, 5, &Message::Verify { up_to });
    answers(rig, 5, &Message::Verified { up_to });
    fetches(rig, span(100, 0, largest));
    rig.nothing_happens();
    rig.is_clean();
}

/// The first node fetches a span of the second one's log.
fn fetches(rig: &mut Rig, span: SpanId) {
    let after = span.start;
    asks(rig, 5, &Message::ReadLog { after });
    let data = data(span.blocks, 9);
    let said = Message::LogData(span);
    rig.two().links.answer(ONE, about(5), &said, &data);
    let came = rig.received(ONE, "a span of the log");
    assert_eq!(came.message, said);
    assert!(joined(&came.data) == joined(&data), "a span is altered");
}

#[test]
fn links_carry_all_messages() {
    speaks(&mut Rig::paired(&Settings::default()));
}

#[test]
fn links_carry_all_messages_over_tls() {
    let directory = tempfile::tempdir().unwrap();
    let tls_sh = |arguments: &[&str]| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testenv/tls.sh");
        let mut command = Command::new(script);
        let made = command.arg(directory.path()).args(arguments).output();
        let made = made.unwrap();
        assert!(made.status.success(), "{made:?}");
    };
    tls_sh(&[]);
    let credentials = [ONE, TWO].map(|member| {
        let name = format!("DNS:{}", certificate_name(CLUSTER, node(member)));
        let place = member.0.to_string();
        tls_sh(&["node", &place, &name]);
        let path = |name: &str| directory.path().join(&place).join(name);
        let loaded = Credentials::load(&Files {
            certificate: path("node-cert.pem"),
            key: path("node-key.pem"),
            authority: directory.path().join("ca-cert.pem"),
            revocations: None,
        });
        Some(loaded.unwrap())
    });
    speaks(&mut Rig::paired(&Settings {
        credentials,
        ..Settings::default()
    }));
}

#[test]
fn nodes_that_lead_different_logs_have_a_pair_each() {
    let mut rig = Rig::paired(&Settings::default());
    rig.two().links.want(ONE);
    rig.until(TWO, "Connected", |event| {
        matches!(event, Event::Connected(ONE)).then_some(())
    });
    rig.until(ONE, "PeerConnected", |event| {
        matches!(event, Event::PeerConnected(TWO)).then_some(())
    });
    asks(&mut rig, 5, &Message::Attach);
    let back = rig.two().links.ask(ONE, about(6), &Message::Join);
    assert_eq!(back, Ok(()));
    assert_eq!(rig.received(ONE, "a request").message, Message::Join);
    answers(&mut rig, 5, &Message::Attached(copy()));
    rig.one().links.unwant(TWO);
    rig.until(ONE, "Disconnected", |event| {
        matches!(event, Event::Disconnected(TWO)).then_some(())
    });
    rig.until(TWO, "PeerDisconnected", |event| {
        matches!(event, Event::PeerDisconnected(ONE)).then_some(())
    });
    // The other pair goes on.
    let points = vec![at(1)];
    let said = Message::Joining { points };
    rig.one().links.answer(TWO, about(6), &said, &[]);
    assert_eq!(rig.received(TWO, "an answer").message, said);
    rig.nothing_happens();
}

#[test]
fn leader_sends_no_further_than_the_window() {
    let mut rig = Rig::paired(&Settings::default());
    let (blocks, window) = (256, POOL_BYTES as u64 / BLOCK_BYTES as u64 / 2);
    assert!(window >= WINDOW_BLOCKS_MIN && window.is_multiple_of(u64::from(blocks)));
    let data = data(blocks, 1);
    let mut position = 0;
    append(&mut rig, 5, &span(position, 0, blocks), &data);
    position += u64::from(blocks);
    while position < window {
        append(&mut rig, 5, &span(position, 0, blocks), &data);
        position += u64::from(blocks);
    }
    let next = span(position, 0, blocks);
    let full = |rig: &mut Rig| {
        let links = &mut rig.one().links;
        links.append(TWO, about(5), &next, next.evidence, &data)
    };
    assert_eq!(full(&mut rig), Err(NotSent::Full));
    let mut held = Vec::new();
    while held.len() < (window / u64::from(blocks)) as usize {
        held.push(rig.received(TWO, "a span").data);
    }
    rig.nothing_happens();
    assert_eq!(full(&mut rig), Err(NotSent::Full));
    acks(&mut rig, 5, u64::from(blocks));
    rig.until(ONE, "Room", |event| {
        matches!(event, Event::Room(TWO)).then_some(())
    });
    assert_eq!(full(&mut rig), Ok(()));
    drop(held);
    drop(rig.received(TWO, "a span"));
    rig.is_clean();
}

#[test]
fn what_is_durable_before_its_span_has_come_is_said_once_it_has() {
    let mut rig = Rig::paired(&Settings::default());
    asks(&mut rig, 5, &Message::Attach);
    answers(&mut rig, 5, &Message::Attached(copy()));
    rig.two().links.ack(ONE, about(5), 96, 0);
    rig.nothing_happens();
    append(&mut rig, 5, &span(90, 0, 4), &data(4, 3));
    // The stream was accepted with what it begins with.
    is_acked(&mut rig, 5, 90);
    rig.received(TWO, "a span");
    is_acked(&mut rig, 5, 94);
    append(&mut rig, 5, &span(94, 0, 4), &data(4, 3));
    rig.received(TWO, "a span");
    is_acked(&mut rig, 5, 96);
}

#[test]
fn cut_takes_back_what_was_durable() {
    let mut rig = Rig::paired(&Settings::default());
    appends(&mut rig, 5, span(90, 0, 4), 1);
    acks(&mut rig, 5, 94);
    let cut = Cut {
        at: at(91),
        void_before: 2,
        joined: 3,
        change: Change::default(),
    };
    asks(&mut rig, 5, &Message::JoinAt(cut));
    answers(&mut rig, 5, &Message::HasCut(cut));
    // From another place: a new stream, of which nothing but what was kept is durable.
    let again = span(91, 0, 4);
    append(&mut rig, 5, &again, &data(4, 3));
    is_acked(&mut rig, 5, 91);
    let came = rig.received(TWO, "a span");
    assert_eq!(came.message, Message::Append(again));
    rig.nothing_happens();
    acks(&mut rig, 5, 95);
}

#[test]
fn later_epoch_has_a_stream_of_its_own() {
    let mut rig = Rig::paired(&Settings::default());
    appends(&mut rig, 5, span(90, 0, 4), 1);
    acks(&mut rig, 5, 94);
    appends(&mut rig, 6, span(94, 0, 4), 2);
    acks(&mut rig, 6, 98);
}

#[test]
fn fence_reaches_who_sends_and_who_asks() {
    let mut rig = Rig::paired(&Settings::default());
    appends(&mut rig, 5, span(90, 0, 4), 1);
    asks(&mut rig, 5, &superblock(1));
    let fenced = Message::Fenced { promised: 8 };
    rig.two().links.answer(ONE, about(5), &fenced, &[]);
    // By the end of the stream, which knows no number but that it is higher, and by the answer.
    let by_stream = rig.received(ONE, "a fence");
    assert_eq!(by_stream.about, about(5));
    assert_eq!(by_stream.message, Message::Fenced { promised: 6 });
    let by_answer = rig.received(ONE, "a fence");
    assert_eq!((by_answer.about, by_answer.message), (about(5), fenced));
}

#[test]
fn log_that_is_not_there_is_said_to_be_not_there() {
    let mut rig = Rig::paired(&Settings::default());
    let is_no_log = |event: &Event| {
        matches!(event, Event::NoLog { from: TWO, about: found } if *found == about(5))
            .then_some(())
    };
    asks(&mut rig, 5, &Message::Attach);
    rig.two().links.no_log(ONE, LOG);
    rig.until(ONE, "NoLog", is_no_log);
    append(&mut rig, 5, &span(90, 0, 4), &data(4, 3));
    rig.received(TWO, "a span");
    rig.two().links.no_log(ONE, LOG);
    rig.until(ONE, "NoLog", is_no_log);
    rig.nothing_happens();
}

#[test]
fn question_that_does_not_apply_any_more_ends() {
    let mut rig = Rig::paired(&Settings::default());
    let is_nothing = |question| {
        move |event: &Event| {
            matches!(
                event,
                Event::Received(Received { message: Message::Nothing(found), .. }) if *found == question
            )
            .then_some(())
        }
    };
    asks(&mut rig, 5, &Message::ReadLog { after: at(7) });
    let nothing = Message::Nothing(Question::ReadLog);
    rig.two().links.answer(ONE, about(5), &nothing, &[]);
    rig.until(ONE, "Nothing", is_nothing(Question::ReadLog));
    // What was followed by another request has no answer, and nobody is told so.
    asks(&mut rig, 5, &Message::Verify { up_to: at(8) });
    asks(&mut rig, 6, &Message::Promise { floor: at(0) });
    answers(&mut rig, 6, &Message::Promised(copy()));
    asks(&mut rig, 6, &Message::Join);
    asks(&mut rig, 6, &Message::Join);
    let joining = Message::Joining {
        points: vec![at(3)],
    };
    answers(&mut rig, 6, &joining);
    rig.nothing_happens();
}

#[test]
fn request_that_is_not_answered_in_time_breaks_the_pair() {
    let mut settings = Settings::default();
    settings.times.answer_max = Nanos::from_millis(50);
    let mut rig = Rig::paired(&settings);
    asks(&mut rig, 5, &Message::Attach);
    rig.until(ONE, "Disconnected", |event| {
        matches!(event, Event::Disconnected(TWO)).then_some(())
    });
    rig.until(TWO, "PeerDisconnected", |event| {
        matches!(event, Event::PeerDisconnected(ONE)).then_some(())
    });
    // The answer comes too late, and means nothing to the next pair.
    rig.two()
        .links
        .answer(ONE, about(5), &Message::Attached(copy()), &[]);
    rig.until(ONE, "Connected", |event| {
        matches!(event, Event::Connected(TWO)).then_some(())
    });
}

#[test]
fn pair_is_made_again_when_the_member_is_back() {
    let mut rig = Rig::paired(&Settings::default());
    appends(&mut rig, 5, span(90, 0, 4), 1);
    asks(&mut rig, 5, &superblock(1));
    let listener = rig.two().listener.try_clone().unwrap();
    let peer = PeerConfig {
        member: ONE,
        node: node(ONE),
        address: rig.one().listener.local_addr().unwrap(),
    };
    let settings = Settings {
        boots: 2,
        ..Settings::default()
    };
    rig.nodes[1] = Node::new(TWO, listener, peer, &settings);
    rig.until(ONE, "Disconnected", |event| {
        matches!(event, Event::Disconnected(TWO)).then_some(())
    });
    let links = &mut rig.one().links;
    let asked = links.ask(TWO, about(5), &Message::Attach);
    assert_eq!(asked, Err(NotSent::Disconnected));
    rig.until(ONE, "Connected", |event| {
        matches!(event, Event::Connected(TWO)).then_some(())
    });
    rig.until(TWO, "PeerConnected", |event| {
        matches!(event, Event::PeerConnected(ONE)).then_some(())
    });
    appends(&mut rig, 5, span(94, 0, 4), 2);
}

#[test]
fn node_that_stops_takes_leave() {
    let mut rig = Rig::paired(&Settings::default());
    rig.one().links.shut_down();
    rig.until(ONE, "Disconnected", |event| {
        matches!(event, Event::Disconnected(TWO)).then_some(())
    });
    rig.until(TWO, "PeerDisconnected", |event| {
        matches!(event, Event::PeerDisconnected(ONE)).then_some(())
    });
    rig.turn_until("no connection is left", |rig| {
        rig.nodes.iter().all(|node| node.links.is_idle())
    });
    rig.nothing_happens();
}

#[test]
fn second_run_of_a_node_is_refused_while_the_first_one_lives() {
    let mut rig = Rig::paired(&Settings::default());
    rig.two().links.want(ONE);
    rig.until(TWO, "Connected", |event| {
        matches!(event, Event::Connected(ONE)).then_some(())
    });
    rig.until(ONE, "PeerConnected", |event| {
        matches!(event, Event::PeerConnected(TWO)).then_some(())
    });
    // A copy of the second node's data directory, started later.
    let peer = PeerConfig {
        member: ONE,
        node: node(ONE),
        address: rig.one().listener.local_addr().unwrap(),
    };
    let settings = Settings {
        boots: 2,
        ..Settings::default()
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut copy = Node::new(TWO, listener, peer, &settings);
    copy.links.want(ONE);
    let until = Instant::now() + Duration::from_millis(600);
    while Instant::now() < until {
        copy.turn();
        rig.turn();
        for node in [&mut copy, rig.one()] {
            node.events.retain(|event| !matches!(event, Event::Room(_)));
            assert!(node.events.is_empty(), "{:?}", node.events);
        }
    }
    // Once the first one is gone it is a restart like any other.
    rig.nodes[1] = copy;
    rig.until(TWO, "Connected", |event| {
        matches!(event, Event::Connected(ONE)).then_some(())
    });
}

#[test]
fn leader_learns_that_a_member_stops() {
    let mut rig = Rig::paired(&Settings::default());
    rig.two().links.shut_down();
    rig.until(ONE, "Left", |event| {
        matches!(event, Event::Left(TWO)).then_some(())
    });
    rig.until(ONE, "Disconnected", |event| {
        matches!(event, Event::Disconnected(TWO)).then_some(())
    });
}
