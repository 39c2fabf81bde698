//! Tests of the primary's side.

use super::*;
use crate::replication::SpanId;
use crate::replication::message::Copy;
use crate::replication::record::AckLevel;
use crate::replication::replica::{Replica, Superblock};

const EPOCH: u64 = 1;

/// The primary of so many, with an empty log.
pub(in crate::replication) fn group_of(count: u16, ack: AckLevel) -> (Group, Replica) {
    let change = Change {
        number: 1,
        incarnation: 1,
        ..Change::default()
    };
    let record = GroupRecord::of_members(count, ack);
    let group = Group::new(Member(0), record, Point::default(), change);
    (group, Replica::new(Superblock::new(true), 64, []))
}

/// The primary of three.
pub(in crate::replication) fn group(ack: AckLevel) -> (Group, Replica) {
    group_of(3, ack)
}

pub(in crate::replication) fn append(log: &mut Replica) {
    let start = log.head();
    let end = Point {
        position: start.position + 1,
        chain: start.position + 100,
    };
    log.append(
        EPOCH,
        SpanId {
            start,
            end,
            blocks: 1,
            incarnation: 1,
            evidence: 0,
        },
    );
    let span = log.next_write().unwrap();
    log.written(span.end.position);
}

pub(in crate::replication) fn messages(
    group: &mut Group,
    log: &Replica,
) -> alloc::vec::Vec<(Member, Message)> {
    let others: alloc::vec::Vec<Member> = group.others().collect();
    let mut messages = alloc::vec::Vec::new();
    for to in others {
        while let Some(message) = group.next_message(to, log) {
            messages.push((to, message));
        }
    }
    messages
}

pub(in crate::replication) fn attach(group: &mut Group, log: &Replica, member: u16) {
    group.connected(Member(member));
    messages(group, log);
    group.receive(Member(member), &Message::Attached(Copy::empty(EPOCH)), log);
}

#[test]
fn commit_waits_for_as_many_as_the_level_wants() {
    for (ack, committed) in [
        (AckLevel::One, [1, 1, 1]),
        (AckLevel::Majority, [0, 1, 1]),
        (AckLevel::All, [0, 0, 1]),
    ] {
        let (mut group, mut log) = group(ack);
        attach(&mut group, &log, 1);
        attach(&mut group, &log, 2);
        append(&mut log);
        assert_eq!(messages(&mut group, &log).len(), 2);
        group.own_durable(1);
        assert_eq!(group.committed(), committed[0], "{ack:?}");
        for member in [1, 2] {
            group.receive(Member(member), &Message::Ack { durable: 1 }, &log);
            assert_eq!(group.committed(), committed[usize::from(member)], "{ack:?}");
        }
    }
}

#[test]
fn acknowledgement_of_what_was_not_sent_does_not_count() {
    let (mut group, mut log) = group(AckLevel::All);
    attach(&mut group, &log, 1);
    attach(&mut group, &log, 2);
    append(&mut log);
    group.own_durable(1);
    for member in [1, 2] {
        group.receive(Member(member), &Message::Ack { durable: 9 }, &log);
    }
    assert_eq!(group.committed(), 0);
    group.check_invariants();
}

#[test]
fn of_two_that_are_late_the_one_leaves_first_that_lacks_what_was_committed() {
    for late in [[1, 2], [2, 1]] {
        let (mut group, mut log) = group(AckLevel::Majority);
        attach(&mut group, &log, 1);
        attach(&mut group, &log, 2);
        append(&mut log);
        messages(&mut group, &log);
        group.own_durable(1);
        group.receive(Member(2), &Message::Ack { durable: 1 }, &log);
        assert_eq!(group.committed(), 1);
        for member in late {
            group.suspect(Member(member));
        }
        let next = group.next_record().unwrap();
        assert!(!next.config.members.contains(Member(1)), "{late:?}");
    }
}

#[test]
fn leave_waits_until_others_have_what_was_committed() {
    let (mut group, mut log) = group(AckLevel::Majority);
    attach(&mut group, &log, 1);
    attach(&mut group, &log, 2);
    append(&mut log);
    messages(&mut group, &log);
    group.own_durable(1);
    group.receive(Member(1), &Message::Ack { durable: 1 }, &log);
    assert_eq!(group.committed(), 1);
    // Two of the three have it; without the first one, one of the two that are left.
    group.suspect(Member(1));
    assert_eq!(group.next_record(), None);
    group.receive(Member(2), &Message::Ack { durable: 1 }, &log);
    let record = group.next_record().unwrap();
    assert!(!record.config.members.contains(Member(1)));
    assert_eq!(group.next_record(), None, "it is asked for once");
    group.seen(&record);
    assert_eq!(group.record(), &record);
}

#[test]
fn commits_wait_for_members_before_and_after_a_change() {
    let (mut group, mut log) = group(AckLevel::All);
    attach(&mut group, &log, 1);
    attach(&mut group, &log, 2);
    group.suspect(Member(1));
    let record = group.next_record().unwrap();
    append(&mut log);
    messages(&mut group, &log);
    group.own_durable(1);
    group.receive(Member(2), &Message::Ack { durable: 1 }, &log);
    assert_eq!(
        group.committed(),
        0,
        "the record may still name the first one"
    );
    group.seen(&record);
    assert_eq!(group.committed(), 1);
}

#[test]
fn primary_is_fenced_by_a_promise_or_a_record() {
    let (mut first, log) = group(AckLevel::All);
    first.receive(Member(1), &Message::Fenced { promised: 2 }, &log);
    assert!(first.is_fenced());
    let (mut second, _) = group(AckLevel::All);
    let taking = second.record().taking(Member(2));
    second.seen(&taking);
    assert!(second.is_fenced() && second.next_record().is_none());
}

#[test]
fn member_whose_copy_somebody_else_brought_up_is_to_leave() {
    let (mut group, log) = group(AckLevel::Majority);
    attach(&mut group, &log, 2);
    group.connected(Member(1));
    messages(&mut group, &log);
    let copy = Copy {
        joined: 5,
        ..Copy::empty(EPOCH)
    };
    group.receive(Member(1), &Message::Attached(copy), &log);
    let record = group.next_record().unwrap();
    assert!(!record.config.members.contains(Member(1)));
}

#[test]
fn member_that_has_less_than_it_had_said_is_to_leave() {
    let (mut group, mut log) = group(AckLevel::Majority);
    attach(&mut group, &log, 1);
    append(&mut log);
    messages(&mut group, &log);
    group.own_durable(1);
    group.receive(Member(1), &Message::Ack { durable: 1 }, &log);
    attach(&mut group, &log, 2);
    messages(&mut group, &log);
    group.receive(Member(2), &Message::Ack { durable: 1 }, &log);
    group.disconnected(Member(1));
    attach(&mut group, &log, 1);
    let record = group.next_record().unwrap();
    assert!(!record.config.members.contains(Member(1)));
}

fn next_change(group: &Group) -> Change {
    Change {
        is_unflushed: true,
        ..group.change()
    }
}

#[test]
fn change_is_retired_once_enough_superblocks_say_it() {
    let (mut group, log) = group(AckLevel::Majority);
    attach(&mut group, &log, 1);
    attach(&mut group, &log, 2);
    let number = group.set_change(next_change(&group));
    assert_eq!(number, 2);
    // It was not told yet: such an answer does not count.
    group.own_named(number);
    group.receive(Member(1), &Message::Named { number }, &log);
    assert!(!group.is_retired());
    assert_eq!(messages(&mut group, &log).len(), 2);
    group.receive(Member(1), &Message::Named { number: 9 }, &log);
    assert!(!group.is_retired());
    group.receive(Member(1), &Message::Named { number }, &log);
    assert_eq!(group.retired(), 2);
    group.check_invariants();
}

#[test]
fn member_is_told_again_what_its_superblock_does_not_say() {
    let (mut group, log) = group(AckLevel::All);
    attach(&mut group, &log, 1);
    attach(&mut group, &log, 2);
    let number = group.set_change(next_change(&group));
    group.own_named(number);
    messages(&mut group, &log);
    group.receive(Member(2), &Message::Named { number }, &log);
    group.disconnected(Member(1));
    attach(&mut group, &log, 1);
    let told = group.next_message(Member(1), &log);
    assert_eq!(told, Some(Message::Superblock(group.change())));
    assert_eq!(group.next_message(Member(2), &log), None);
    group.receive(Member(1), &Message::Named { number }, &log);
    assert!(group.is_retired());
}

/// Have the other one than `away` and this node write and retire two spans; the tail behind them.
fn tail_without(group: &mut Group, log: &mut Replica, away: Member) -> Point {
    let other = Member(3 - away.0);
    attach(group, log, other.0);
    append(log);
    append(log);
    messages(group, log);
    group.own_durable(2);
    group.receive(other, &Message::Ack { durable: 2 }, log);
    let tail = log.head();
    let change = Change {
        tail,
        ..group.change()
    };
    let number = group.set_change(change);
    log.change_own(Member(0), EPOCH, group.change());
    log.next_superblock().unwrap();
    log.superblock_written();
    group.own_named(number);
    messages(group, log);
    group.receive(other, &Message::Named { number }, log);
    assert!(group.is_retired());
    tail
}

/// What a member says of its whole copy, which begins and ends there.
fn copy_at(tail: Point) -> Copy {
    Copy {
        head: tail,
        tail,
        ..Copy::empty(EPOCH)
    }
}

#[test]
fn member_whose_copy_was_not_whole_where_it_was_to_go_on_leaves() {
    let (mut group, mut log) = group(AckLevel::Majority);
    let tail = tail_without(&mut group, &mut log, Member(1));
    attach(&mut group, &log, 1);
    let Some(Message::JoinAt(cut)) = group.next_message(Member(1), &log) else {
        panic!("it is told where to go on");
    };
    group.receive(Member(1), &Message::HasCut(cut), &log);
    messages(&mut group, &log);
    let copy = Copy {
        is_whole: false,
        ..copy_at(tail)
    };
    group.receive(Member(1), &Message::Attached(copy), &log);
    let next = group.next_record().unwrap();
    assert!(!next.config.members.contains(Member(1)));
}

#[test]
fn joiner_that_has_promised_a_higher_epoch_fences_nobody() {
    let (mut group, log) = group(AckLevel::Majority);
    attach(&mut group, &log, 2);
    group.suspect(Member(1));
    let record = group.next_record().unwrap();
    group.seen(&record);
    let fenced = Message::Fenced {
        promised: EPOCH + 1,
    };
    group.receive(Member(1), &fenced, &log);
    assert!(!group.is_fenced());
    group.receive(Member(2), &fenced, &log);
    assert!(group.is_fenced());
}

#[test]
fn member_that_ends_before_the_tail_goes_on_there_without_leaving() {
    let (mut group, mut log) = group(AckLevel::Majority);
    let tail = tail_without(&mut group, &mut log, Member(1));
    // The other one has gone, so nobody could leave.
    group.disconnected(Member(2));
    append(&mut log);
    group.own_durable(3);

    attach(&mut group, &log, 1);
    assert_eq!(group.next_record(), None);
    let Some(Message::JoinAt(cut)) = group.next_message(Member(1), &log) else {
        panic!("it is told where to go on");
    };
    let joined = group.record().config.members.joined(Member(1));
    assert_eq!((cut.at, Some(cut.joined)), (tail, joined));
    assert_eq!(group.next_message(Member(1), &log), None);
    group.receive(Member(1), &Message::HasCut(cut), &log);
    // Only what it says then tells whether it is whole.
    assert_eq!(group.next_message(Member(1), &log), Some(Message::Attach));
    group.receive(Member(1), &Message::Attached(copy_at(tail)), &log);
    let next = group.next_message(Member(1), &log);
    assert!(matches!(next, Some(Message::Append(span)) if span.start == tail));
    group.receive(Member(1), &Message::Ack { durable: 3 }, &log);
    assert!(group.is_retired() && group.committed() == 3);
    group.check_invariants();
}

#[test]
fn member_in_step_whose_next_span_has_gone_is_asked_anew() {
    let (mut group, mut log) = group(AckLevel::Majority);
    attach(&mut group, &log, 1);
    attach(&mut group, &log, 2);
    append(&mut log);
    // Nothing is sent to the first one.
    while group.next_message(Member(2), &log).is_some() {}
    group.own_durable(1);
    group.receive(Member(2), &Message::Ack { durable: 1 }, &log);
    let change = Change {
        tail: log.head(),
        ..group.change()
    };
    group.set_change(change);
    log.change_own(Member(0), EPOCH, group.change());
    log.next_superblock().unwrap();
    log.superblock_written();
    append(&mut log);
    let told = group.next_message(Member(1), &log);
    assert_eq!(told, Some(Message::Superblock(group.change())));
    let asked = group.next_message(Member(1), &log);
    assert_eq!(asked, Some(Message::Attach));
    assert_eq!(group.next_message(Member(1), &log), None);
}
