//! Connections that break at any time: what belongs to a pair comes while there is that pair, in order, and nothing later.

use super::*;

/// Breaks in all.
const BREAKS: u32 = 12;
/// Numbers of a pair's changes begin here, for each one before.
const STRIDE: u64 = 1_000_000;

/// What one run knows of both ends.
struct Run {
    rig: Rig,
    random: fastrand::Rng,
    /// Pairs that the leader was told of; the epoch of what it sends over the last one.
    pairs: u64,
    is_connected: bool,
    is_followed: bool,
    /// What the leader sends next: a change, and a span.
    change: u64,
    position: u64,
    /// What the member expects next, of the pair whose number it is.
    pair: u64,
    expected_change: u64,
    expected_position: u64,
    /// Messages that came, of both kinds, and answers to them.
    spans: u64,
    changes: u64,
    answers: u64,
}

impl Run {
    fn leader_hears(&mut self, event: Event) {
        match event {
            Event::Connected(TWO) => {
                assert!(!self.is_connected, "connected twice");
                self.is_connected = true;
                self.pairs += 1;
                (self.change, self.position) = (1, 0);
            }
            Event::Disconnected(TWO) => {
                assert!(self.is_connected, "disconnected twice");
                self.is_connected = false;
            }
            Event::Received(said) => {
                assert!(self.is_connected, "an answer without a pair");
                assert_eq!(said.about.epoch, self.pairs, "an answer of another pair");
                self.answers += 1;
            }
            Event::Room(TWO) => {}
            event => panic!("{event:?}"),
        }
    }

    fn leader_sends(&mut self) {
        if !self.is_connected {
            return;
        }
        let about = about(self.pairs);
        let links = &mut self.rig.one().links;
        if self.random.u8(..4) == 0 {
            let asked = superblock(self.pairs * STRIDE + self.change);
            if links.ask(TWO, about, &asked).is_ok() {
                self.change += 1;
            }
        }
        let blocks = self.random.u32(1..40);
        let span = span(self.position, self.random.u64(..3), blocks);
        let sent = links.append(TWO, about, &span, span.evidence, &data(blocks, 1));
        if sent.is_ok() {
            self.position = span.end.position;
        }
    }

    fn member_hears(&mut self, event: Event) {
        match event {
            Event::PeerConnected(ONE) => {
                assert!(!self.is_followed, "connected twice");
                self.is_followed = true;
                self.pair = 0;
            }
            Event::PeerDisconnected(ONE) => {
                assert!(self.is_followed, "disconnected twice");
                self.is_followed = false;
            }
            Event::Received(said) => self.member_takes(said),
            event => panic!("{event:?}"),
        }
    }

    fn member_takes(&mut self, said: Received) {
        assert!(self.is_followed, "a message without a pair");
        let epoch = said.about.epoch;
        if self.pair == 0 {
            (self.pair, self.expected_change, self.expected_position) = (epoch, 1, 0);
        }
        assert_eq!(epoch, self.pair, "a message of another pair");
        match said.message {
            Message::Append(span) => {
                assert_eq!(
                    span.start.position, self.expected_position,
                    "a span is missing"
                );
                self.expected_position = span.end.position;
                self.spans += 1;
                let durable = span.end.position;
                self.rig.two().links.ack(ONE, said.about, durable, 0);
            }
            Message::Superblock(change) => {
                let number = epoch * STRIDE + self.expected_change;
                assert_eq!(change.number, number, "a change is missing");
                self.expected_change += 1;
                self.changes += 1;
                let named = Message::Named { number };
                self.rig.two().links.answer(ONE, said.about, &named, &[]);
            }
            other => panic!("{other:?}"),
        }
    }

    /// Have one of the connections fail, at either end.
    fn break_one(&mut self) {
        let index = self.random.usize(..2);
        let links = &mut self.rig.nodes[index].links;
        let slots: Vec<u32> = links.wires.iter().map(|(slot, _)| slot).collect();
        if slots.is_empty() {
            return;
        }
        let slot = slots[self.random.usize(..slots.len())];
        if let Some(wire) = links.wires.get_mut(slot) {
            wire.socket
                .connection
                .failed(io::ErrorKind::ConnectionReset);
        }
        links.settle(slot);
        // They would grow, as no pair of this test holds for long.
        for peer in self
            .rig
            .nodes
            .iter_mut()
            .flat_map(|node| node.links.peers.values_mut())
        {
            peer.pauses = Pauses::new(self.random.u64(..));
        }
    }

    fn turn(&mut self) {
        self.rig.turn();
        while let Some(event) = self.rig.one().events.pop_front() {
            self.leader_hears(event);
        }
        while let Some(event) = self.rig.two().events.pop_front() {
            self.member_hears(event);
        }
        self.leader_sends();
    }
}

#[test]
fn breaks_leave_nothing_of_a_pair_for_the_next() {
    let mut rig = Rig::new(&Settings::default());
    rig.one().links.want(TWO);
    let mut run = Run {
        rig,
        random: fastrand::Rng::with_seed(11),
        pairs: 0,
        is_connected: false,
        is_followed: false,
        change: 1,
        position: 0,
        pair: 0,
        expected_change: 1,
        expected_position: 0,
        spans: 0,
        changes: 0,
        answers: 0,
    };
    for _ in 0..BREAKS {
        let started = Instant::now();
        let (spans, answers) = (run.spans, run.answers);
        let (more_spans, more_answers) = (run.random.u64(..50), run.random.u64(..20));
        while run.spans < spans + more_spans || run.answers < answers + more_answers {
            assert!(started.elapsed() < PATIENCE, "nothing comes any more");
            run.turn();
        }
        run.break_one();
    }
    assert!(run.pairs > u64::from(BREAKS) / 2 && run.changes > 0);
    let Run { mut rig, .. } = run;
    rig.one().links.unwant(TWO);
    rig.turn_until("all connections have ended", |rig| {
        for node in &mut rig.nodes {
            node.events.clear();
        }
        rig.nodes.iter().all(|node| node.links.is_idle())
    });
    rig.is_clean();
}
