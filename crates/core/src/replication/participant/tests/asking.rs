//! What a copy is asked, by whom, and what becomes of it when there is no answer.

use super::*;
use crate::replication::message::{Change, Cut, Question};

/// What a copy answers to who asked.
fn answers(participant: &mut Participant, asker: Member) -> Vec<(u64, Message)> {
    let acts = participant.take_acts().into_iter();
    let answers = acts.filter_map(|act| match act {
        Act::Answer {
            to, epoch, message, ..
        } if to == asker => Some((epoch, message)),
        _ => None,
    });
    answers.collect()
}

#[test]
fn promise_is_made_only_to_the_candidate_that_a_record_names() {
    let mut net = Net::healthy(AckLevel::Majority);
    let (liar, now) = (Member(1), net.now);
    let epoch = net.record.epoch;
    let cut = Message::JoinAt(Cut {
        at: Point::default(),
        void_before: 1,
        joined: 9,
        change: Change::default(),
    });
    let copy = net.participant(Member(2));
    let floor = Point::default();
    for message in [&Message::Promise { floor }, &cut] {
        let question = Question::of(message).unwrap();
        copy.receive(now, liar, u64::MAX, message, Vec::new());
        assert_eq!(answers(copy, liar), [], "the record is waited for");
        let late = now.plus(Nanos::from_millis(1_000));
        assert!(copy.next_wakeup().unwrap() <= late);
        copy.poll(late);
        let nothing = Message::Nothing(question);
        assert_eq!(answers(copy, liar), [(u64::MAX, nothing.clone())]);
        // In the epoch of the record it is another one.
        copy.receive(now, liar, epoch, message, Vec::new());
        assert_eq!(answers(copy, liar), [(epoch, nothing)]);
        assert_eq!(copy.status().promised, epoch);
    }
    net.write(Member(0), 1, 1);
    net.settle();
    assert_eq!(net.bytes(Member(2)), [1], "it goes on as before");
    net.take(Member(1));
    net.pass(2_000);
    assert_eq!(net.record.primary(), Some(Member(1)));
}

#[test]
fn candidate_that_asks_before_the_record_is_seen_gets_its_promise_with_the_record() {
    let mut net = Net::healthy(AckLevel::Majority);
    let taking = net.record.taking(Member(1));
    let (now, floor) = (net.now, Point::default());
    let copy = net.participant(Member(2));
    let promise = Message::Promise { floor };
    copy.receive(now, Member(1), taking.epoch, &promise, Vec::new());
    assert_eq!(copy.status().promised, taking.epoch - 1);
    copy.see(now, &taking);
    while net.act(Member(2)) {}
    let copy = net.participant(Member(2));
    assert_eq!(copy.status().promised, taking.epoch);
    assert!(copy.next_wakeup().is_none());
}

#[test]
fn copy_that_cannot_be_written_has_nothing_to_say() {
    let mut net = Net::healthy(AckLevel::Majority);
    let (primary, epoch, now) = (Member(0), net.record.epoch, net.now);
    let change = Change {
        number: 9,
        is_unflushed: true,
        ..Change::default()
    };
    let copy = net.participant(Member(2));
    let superblock = Message::Superblock(change);
    copy.receive(now, primary, epoch, &superblock, Vec::new());
    let write = copy.take_acts().into_iter().find_map(|act| match act {
        Act::Write { token, .. } => Some(token),
        _ => None,
    });
    copy.finished(now, write.unwrap(), Err(IoError::Failed));
    let nothing = |question| (epoch, Message::Nothing(question));
    assert_eq!(
        answers(copy, primary),
        [nothing(Question::Superblock)],
        "it waits for nothing that was under way"
    );
    copy.receive(now, primary, epoch, &Message::Join, Vec::new());
    assert_eq!(answers(copy, primary), [nothing(Question::Join)]);
}

#[test]
fn member_that_has_nothing_to_say_is_met_again_later() {
    let mut net = Net::healthy(AckLevel::Majority);
    let (now, epoch) = (net.now, net.record.epoch);
    let primary = net.participant(Member(0));
    let nothing = Message::Nothing(Question::Attach);
    primary.receive(now, Member(2), epoch, &nothing, Vec::new());
    assert!(primary.reaches(Member(2)), "its link stays");
    assert_eq!(primary.status().links, [Member(1)]);
    assert!(primary.next_wakeup().is_some());
    net.pass(600);
    assert_eq!(net.participant(Member(0)).status().links.len(), 2);
    assert_eq!(net.record.config.members.count(), 3);
}

#[test]
fn what_was_read_for_a_link_that_broke_does_not_go_over_the_next_one() {
    let mut net = Net::healthy(AckLevel::Majority);
    let (primary, member) = (Member(0), Member(2));
    net.cut.insert((primary, member));
    for byte in 1..4 {
        net.write(primary, 1, byte);
        net.settle();
    }
    net.held_reads = Some(Vec::new());
    net.cut.clear();
    net.settle();
    // The next link begins with another message, so each span has another place there.
    net.disconnect((primary, member));
    let log = &mut net.writer(primary).log;
    let tail = log.tail_after(0);
    let (offset, block) = log.superblock_for(&tail, true);
    net.write_superblock(primary, offset, block);
    net.settle();
    let held = net.held_reads.take().unwrap();
    assert!(held.len() > 3, "of both links: {}", held.len());
    for (of, token, offset, buf) in held {
        net.end_read(of, token, offset, buf);
    }
    net.settle();
    assert_eq!(net.drops, 0);
    assert_eq!(net.bytes(member), [1, 2, 3]);
    assert_eq!(net.record.config.members.count(), 3);
}

#[test]
fn member_that_stops_holds_up_nothing() {
    let mut net = Net::healthy(AckLevel::All);
    let now = net.now;
    net.participant(Member(0)).left(now, Member(2));
    net.cut.insert((Member(0), Member(2)));
    net.write(Member(0), 1, 1);
    net.settle();
    assert!(net.writer(Member(0)).tokens.is_empty());
    assert!(!net.record.config.members.contains(Member(2)));
}

#[test]
fn what_stands_on_the_log_of_a_group_that_is_removed_waits_for_no_member() {
    let mut net = Net::healthy(AckLevel::All);
    for member in [Member(1), Member(2)] {
        net.kill(member);
    }
    net.write(Member(0), 1, 1);
    net.settle();
    assert!(!net.writer(Member(0)).tokens.is_empty());
    let now = net.now;
    end_group(net.participant(Member(0)), now);
    net.settle();
    let writer = net.writer(Member(0));
    assert!(writer.tokens.is_empty() && writer.is_fenced);
}
