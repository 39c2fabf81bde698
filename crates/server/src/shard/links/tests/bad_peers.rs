//! Peers that do not behave: each ends its own connections, and nobody else's.

use std::io::{Read, Write};
use std::net::TcpStream;

use hdcs_messenger::conformance::fill;
use hdcs_messenger::transport::Receive;

use super::*;

/// A connection of the messenger to the second node of a rig, by hand.
struct Hand {
    link: Link,
    stream: TcpStream,
    is_open: bool,
    ended: Option<Ended>,
}

impl Hand {
    /// As the first node would make it.
    fn connect(rig: &mut Rig, own: Own, purpose: Purpose) -> Self {
        let address = rig.two().listener.local_addr().unwrap();
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let known = Known {
            node: node(TWO),
            boot: None,
        };
        let config = LinkConfig::new(address.to_string(), own);
        let link = Link::connect(config, known, purpose, Pool::new(4 << 20), Nanos(0));
        Self {
            link,
            stream,
            is_open: false,
            ended: None,
        }
    }

    fn turn(&mut self) {
        while let Some(chunk) = self.link.output().pop_front() {
            // Little enough for the socket's buffer.
            if self.stream.write_all(chunk.bytes()).is_err() {
                self.link.failed(io::ErrorKind::BrokenPipe);
            }
        }
        while let Receive::Into(place) | Receive::IntoBoth(place, _) = self.link.receive() {
            match self.stream.read(place) {
                Ok(bytes) => self.link.received(bytes, Nanos(0)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => self.link.failed(error.kind()),
            }
            self.events();
        }
        self.events();
    }

    fn events(&mut self) {
        while let Some(event) = self.link.event() {
            match event {
                LinkEvent::Opened { .. } => self.is_open = true,
                LinkEvent::Ended(ended) => self.ended = Some(ended),
                _ => {}
            }
        }
    }

    fn open(rig: &mut Rig, purpose: Purpose) -> Self {
        let mut hand = Self::connect(rig, own(ONE, 1), purpose);
        rig.turn_until("a connection is open", |_| {
            hand.turn();
            hand.is_open
        });
        hand
    }

    /// Both connections of a pair.
    fn pair(rig: &mut Rig) -> [Self; 2] {
        let pair = [Purpose::Spans, Purpose::Bulk].map(|purpose| Self::open(rig, purpose));
        rig.until(TWO, "PeerConnected", |event| {
            matches!(event, Event::PeerConnected(ONE)).then_some(())
        });
        pair
    }

    /// What ends it.
    fn end(&mut self, rig: &mut Rig) -> String {
        rig.turn_until("a connection ends", |_| {
            self.turn();
            self.ended.is_some()
        });
        self.ended.take().unwrap().to_string()
    }

    fn ask(&mut self, code: u16, meta: &[u8]) {
        let asked = self.link.request(Ask {
            code,
            urgent: false,
            meta,
            payload: &[],
            into: None,
            room_bytes: 0,
            deadline: Nanos::from_millis(60_000),
        });
        asked.unwrap();
    }
}

fn is_peer_gone(rig: &mut Rig) {
    rig.until(TWO, "PeerDisconnected", |event| {
        matches!(event, Event::PeerDisconnected(ONE)).then_some(())
    });
}

#[test]
fn request_that_is_none_ends_the_pair_of_its_peer() {
    let mut rig = Rig::new(&Settings::default());
    let (attach, meta) = request(about(5), &Message::Attach).unwrap();
    let (read_log, after) = request(about(5), &Message::ReadLog { after: at(1) }).unwrap();
    for (code, meta) in [
        (attach, &meta[..31]),
        (attach + 1, &meta[..]),
        (1, &meta[..]),
        (80, &meta[..]),
        // On the connection for spans.
        (read_log, &after[..]),
    ] {
        let [mut spans, mut bulk] = Hand::pair(&mut rig);
        spans.ask(code, meta);
        let why = spans.end(&mut rig);
        assert!(
            why.contains("this node has sent what must not come"),
            "{why}"
        );
        bulk.end(&mut rig);
        is_peer_gone(&mut rig);
    }
    rig.nothing_happens();
}

#[test]
fn stream_that_lies_ends_the_pair_of_its_peer() {
    let mut rig = Rig::new(&Settings::default());
    let meta = hdcs_core::wire::replication::open(about(5));
    let deadline = Nanos::from_millis(60_000);
    for case in 0..3 {
        let [mut spans, _bulk] = Hand::pair(&mut rig);
        match case {
            // Of another epoch than its log.
            0 => spans.link.open_stream(6, 0, &meta, deadline).unwrap(),
            1 => spans.link.open_stream(5, 0, &meta[1..], deadline).unwrap(),
            _ => {
                spans.link.open_stream(5, 0, &meta, deadline).unwrap();
                spans.link.open_stream(5, 9, &meta, deadline).unwrap()
            }
        };
        spans.end(&mut rig);
        is_peer_gone(&mut rig);
    }
    rig.nothing_happens();
}

#[test]
fn first_connection_of_a_pair_ends_the_pair_before() {
    let mut rig = Rig::new(&Settings::default());
    let mut first = Hand::pair(&mut rig);
    let _second = Hand::open(&mut rig, Purpose::Spans);
    is_peer_gone(&mut rig);
    for hand in &mut first {
        hand.end(&mut rig);
    }
    let _bulk = Hand::open(&mut rig, Purpose::Bulk);
    rig.until(TWO, "PeerConnected", |event| {
        matches!(event, Event::PeerConnected(ONE)).then_some(())
    });
    // One that belongs to no pair ends alone, and counts as long as its peer keeps it.
    let mut third = Hand::open(&mut rig, Purpose::Bulk);
    let why = third.end(&mut rig);
    assert!(
        why.contains("this node has sent what must not come"),
        "{why}"
    );
    let mut fourth = Hand::connect(&mut rig, own(ONE, 1), Purpose::Bulk);
    let why = fourth.end(&mut rig);
    assert!(why.contains("more connections than it may"), "{why}");
    rig.nothing_happens();
}

#[test]
fn strangers_and_older_runs_are_refused() {
    let mut rig = Rig::new(&Settings::default());
    let mut refused = |own: Own| {
        let mut hand = Hand::connect(&mut rig, own, Purpose::Spans);
        hand.end(&mut rig)
    };
    let why = refused(own(Member(9), 1));
    assert!(why.contains("is not known to the cluster"), "{why}");
    let mut taken = own(Member(9), 1);
    taken.identity.number = 1;
    let why = refused(taken);
    assert!(why.contains("belongs to node"), "{why}");
    let mut foreign = own(ONE, 1);
    foreign.identity.cluster = ClusterId([9; 16]);
    let why = refused(foreign);
    assert!(why.contains("is of cluster"), "{why}");
    let mut newer = Hand::connect(&mut rig, own(ONE, 7), Purpose::Spans);
    rig.turn_until("a newer run is spoken to", |_| {
        newer.turn();
        newer.is_open
    });
    let mut older = Hand::connect(&mut rig, own(ONE, 6), Purpose::Spans);
    let why = older.end(&mut rig);
    assert!(why.contains("is over, since run 7 is known"), "{why}");
}

#[test]
fn bytes_that_are_no_frames_end_their_connection() {
    let mut settings = Settings::default();
    settings.times.handshake_max = Nanos::from_millis(200);
    let mut rig = Rig::paired(&settings);
    let address = rig.two().listener.local_addr().unwrap();
    let mut noise = vec![0; 5000];
    fill(&mut noise, 3);
    let mut strangers = Vec::new();
    for bytes in [0, 1, 63, 64, 5000] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&noise[..bytes]).unwrap();
        strangers.push(stream);
    }
    // And more than may be there at once, which say nothing.
    strangers.extend((0..STRANGERS_MAX).map(|_| TcpStream::connect(address).unwrap()));
    for stream in &mut strangers {
        stream.set_nonblocking(true).unwrap();
        let mut byte = [0];
        rig.turn_until("a stranger's connection ends", |_| {
            match stream.read(&mut byte) {
                Ok(bytes) => bytes == 0,
                Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            }
        });
    }
    // The pair of the other node is what it was.
    let links = &mut rig.one().links;
    assert_eq!(links.ask(TWO, about(5), &Message::Join), Ok(()));
    assert_eq!(rig.received(TWO, "a request").message, Message::Join);
}

#[test]
fn member_that_is_not_there_is_tried_again() {
    let mut rig = Rig::new(&Settings::default());
    // Nobody listens there.
    let gone = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = gone.local_addr().unwrap();
    drop(gone);
    let peer = PeerConfig {
        member: TWO,
        node: node(TWO),
        address,
    };
    let listener = rig.one().listener.try_clone().unwrap();
    rig.nodes[0] = Node::new(ONE, listener, peer, &Settings::default());
    rig.one().links.want(TWO);
    rig.nothing_happens();
    let deadline = rig.one().links.next_deadline();
    assert!(deadline.is_some(), "it is tried again");
    let listener = TcpListener::bind(address).unwrap();
    let found: OwnedFd = {
        listener.set_nonblocking(true).unwrap();
        let mut found = None;
        rig.turn_until("it is connected to", |_| {
            found = listener.accept().ok();
            found.is_some()
        });
        found.unwrap().0.into()
    };
    drop(found);
}
