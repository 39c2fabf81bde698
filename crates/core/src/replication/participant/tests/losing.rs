//! Links that lose a message and stay.

use super::*;

/// Let things happen until this message is on its way, lose it, and go on.
fn lose(net: &mut Net, is_it: impl Fn(&Message) -> bool) {
    loop {
        net.connect();
        for member in members(net.nodes.len() as u16) {
            net.act(member);
            net.send(member);
        }
        if let Some(index) = net.wires.iter().position(|wire| is_it(&wire.message)) {
            net.wires.remove(index);
            return net.settle();
        }
        let now = net.now;
        if let Some(wire) = net.wires.pop_front() {
            let (from, epoch) = (wire.from, wire.epoch);
            (net.participant(wire.to)).receive(now, from, epoch, &wire.message, wire.data);
            continue;
        }
        assert!(now < Nanos::from_millis(60_000), "the message comes");
        net.now = now.plus(Nanos::from_millis(50));
        let now = net.now;
        let nodes = net.nodes.iter_mut();
        for participant in nodes.filter_map(|node| node.participant.as_mut()) {
            participant.poll(now);
        }
    }
}

/// Three nodes whose primary has just sent the next beats.
fn beating() -> Net {
    let mut net = Net::healthy(AckLevel::All);
    net.now = net.now.plus(Nanos::from_millis(600));
    let now = net.now;
    net.participant(Member(0)).poll(now);
    net
}

#[test]
fn member_whose_beat_or_echo_was_lost_leaves_and_joins_for_good() {
    let is_beat = |message: &Message| matches!(message, Message::Beat { .. });
    let is_echo = |message: &Message| matches!(message, Message::Echo { .. });
    let lost: [fn(&Message) -> bool; 2] = [is_beat, is_echo];
    for is_lost in lost {
        let mut net = beating();
        let revision = net.record.revision;
        lose(&mut net, is_lost);
        net.pass(4_000);
        assert_eq!(net.record.config.members.count(), 3);
        assert_eq!(net.record.revision, revision + 2, "it left, and joined");
        net.pass(20_000);
        assert_eq!(net.record.revision, revision + 2, "it stays");
        assert!(net.nodes[0].lease > net.now);
    }
}

#[test]
fn member_whose_span_or_acknowledgement_was_lost_leaves_and_joins() {
    let is_span = |message: &Message| matches!(message, Message::Append(_));
    let is_ack = |message: &Message| matches!(message, Message::Ack { .. });
    let lost: [fn(&Message) -> bool; 2] = [is_span, is_ack];
    for is_lost in lost {
        let mut net = Net::healthy(AckLevel::All);
        net.write(Member(0), 1, 1);
        lose(&mut net, is_lost);
        // What follows is not taken by who lacks that.
        net.write(Member(0), 1, 2);
        net.pass(6_000);
        assert!(net.writer(Member(0)).tokens.is_empty());
        assert_eq!(net.record.config.members.count(), 3);
        for member in members(3) {
            assert_eq!(net.bytes(member), [1, 2]);
        }
    }
}

/// The first one serves and dies with spans that the third one has, and the candidate lacks; commits are of two.
fn dying() -> Net {
    let mut net = Net::healthy(AckLevel::Majority);
    net.full.insert((Member(0), Member(1)));
    net.write(Member(0), 1, 1);
    net.settle();
    net.kill(Member(0));
    net.full.clear();
    net
}

#[test]
fn candidate_asks_again_when_a_question_or_its_answer_was_lost() {
    let lost: [fn(&Message) -> bool; 4] = [
        |message| matches!(message, Message::Promise { .. }),
        |message| matches!(message, Message::Promised(_)),
        |message| matches!(message, Message::ReadLog { .. }),
        |message| matches!(message, Message::LogData(_)),
    ];
    for is_lost in lost {
        let mut net = dying();
        net.take(Member(1));
        lose(&mut net, is_lost);
        net.pass(10_000);
        assert_eq!(
            net.record.primary(),
            None,
            "it waits for who does not answer"
        );
        net.pass(60_000);
        assert_eq!(net.record.primary(), Some(Member(1)));
        assert_eq!(net.bytes(Member(1)), [1]);
    }
}

#[test]
fn joiner_is_begun_with_anew_when_a_question_or_its_answer_was_lost() {
    let lost: [fn(&Message) -> bool; 7] = [
        |message| matches!(message, Message::Join),
        |message| matches!(message, Message::Joining { .. }),
        |message| matches!(message, Message::JoinAt(_)),
        |message| matches!(message, Message::HasCut(_)),
        |message| matches!(message, Message::Append(_)),
        |message| matches!(message, Message::Verify { .. }),
        |message| matches!(message, Message::Verified { .. }),
    ];
    for is_lost in lost {
        let mut net = Net::healthy(AckLevel::All);
        net.kill(Member(2));
        net.pass(3_000);
        net.write(Member(0), 1, 1);
        net.settle();
        net.start(Member(2));
        lose(&mut net, is_lost);
        assert_eq!(net.record.config.members.count(), 2);
        net.pass(65_000);
        assert_eq!(net.record.config.members.count(), 3);
        assert_eq!(net.bytes(Member(2)), [1]);
    }
}

#[test]
fn members_that_were_not_asked_what_they_have_leave_and_join() {
    let mut net = Net::healthy(AckLevel::All);
    net.write(Member(0), 1, 1);
    net.settle();
    for member in [Member(1), Member(2)] {
        net.disconnect((Member(0), member));
    }
    net.connect();
    net.send(Member(0));
    let sent = net.wires.len();
    (net.wires).retain(|wire| !matches!(wire.message, Message::Attach));
    assert_eq!(net.wires.len() + 2, sent);
    net.write(Member(0), 1, 2);
    net.pass(20_000);
    assert!(net.writer(Member(0)).tokens.is_empty());
    assert_eq!(net.record.config.members.count(), 3);
    assert_eq!(net.bytes(Member(2)), [1, 2]);
}

#[test]
fn what_was_taken_and_is_cut_off_is_not_held() {
    let (primary, slow) = (Member(0), Member(2));
    let mut net = Net::healthy(AckLevel::Majority);
    net.slow = Some((slow, Vec::new()));
    let ring = net.writer(primary).log.ring_blocks();
    for round in 0..ring / 251 + 3 {
        net.write(primary, 250, round as u8);
        net.settle();
        net.retire(primary);
    }
    net.cut.insert((primary, slow));
    net.settle();
    let (_, tokens) = net.slow.take().unwrap();
    let now = net.now;
    for token in tokens {
        let participant = net.participant(slow);
        participant.finished(now, token, Ok(Done::Written));
    }
    net.settle();
    net.write(primary, 250, 77);
    net.settle();
    net.retire(primary);
    let held = net.participant(slow).held.len();
    assert!(held > 0, "some have no room in its ring");
    net.cut.clear();
    net.settle();
    net.write(primary, 1, 78);
    net.settle();
    assert_eq!(net.record.config.members.count(), 3);
    assert!(net.participant(slow).held.is_empty());
}

#[test]
fn joiner_that_has_promised_a_higher_epoch_of_another_group_stops_nobody() {
    let primary = Member(0);
    let mut net = Net::new(2, AckLevel::Majority);
    net.kill(Member(1));
    let mut superblock = LogSuperblock::new(VOLUME, LOG, REGION_BYTES);
    superblock.incarnation = 5.into();
    superblock.set_membership(Membership {
        promised: 7,
        cut_position: 0,
        void_before: 0,
        joined: 3,
        is_whole: true,
    });
    superblock.seal();
    let bytes = zerocopy::IntoBytes::as_bytes(&superblock);
    net.nodes[1].disk[..BLOCK_BYTES].copy_from_slice(bytes);
    net.start(Member(1));
    net.take(primary);
    net.settle();
    net.write(primary, 1, 1);
    net.pass(120_000);
    assert!(net.writer(primary).tokens.is_empty());
}
