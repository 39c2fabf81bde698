//! Groups with too few members, and groups that are asked to become others.

use super::*;

#[test]
fn fewer_members_than_the_least_number_commit_nothing() {
    let mut net = Net::healthy(AckLevel::All);
    net.configure(shape_of(3, 2, WhenShort::Wait));
    net.kill(Member(1));
    net.kill(Member(2));
    net.pass(5_000);
    net.write(Member(0), 1, 1);
    net.pass(5_000);
    assert_eq!(net.record.config.members.count(), 1);
    assert_eq!(net.writer(Member(0)).tokens.len(), 1, "it waits");
    net.start(Member(1));
    net.pass(3_000);
    assert!(net.writer(Member(0)).tokens.is_empty());
}

#[test]
fn what_stands_on_the_log_is_told_when_writes_are_to_fail_for_want_of_members() {
    let mut net = Net::healthy(AckLevel::All);
    net.configure(shape_of(3, 2, WhenShort::Error));
    net.kill(Member(1));
    net.pass(5_000);
    assert_eq!(net.writer(Member(0)).told_short, []);
    net.kill(Member(2));
    net.pass(5_000);
    assert_eq!(net.writer(Member(0)).told_short, [true]);
    net.start(Member(1));
    net.pass(3_000);
    assert_eq!(net.writer(Member(0)).told_short, [true, false]);
}

#[test]
fn group_becomes_what_it_is_asked_to_be_and_members_that_go_are_not_waited_for() {
    let mut net = Net::healthy(AckLevel::All);
    net.write(Member(0), 1, 1);
    net.pass(100);
    let one = Shape {
        nodes: [Member(0)].into_iter().collect(),
        ..shape_of(3, 1, WhenShort::Wait)
    };
    net.configure(one);
    assert_eq!(net.record.config.members.count(), 1);
    assert!(net.record.joiners.is_empty());
    net.kill(Member(1));
    net.kill(Member(2));
    net.write(Member(0), 1, 1);
    net.pass(100);
    assert!(net.writer(Member(0)).tokens.is_empty());
    net.start(Member(1));
    net.start(Member(2));
    net.configure(shape_of(3, 1, WhenShort::Wait));
    net.pass(5_000);
    assert_eq!(net.record.config.members.count(), 3);
}

#[test]
fn only_who_serves_has_its_group_change() {
    let mut net = Net::healthy(AckLevel::All);
    let now = net.now;
    let asked = shape_of(3, 1, WhenShort::Wait);
    assert!(!net.participant(Member(1)).configure(now, asked.clone()));
    let without = Shape {
        nodes: [Member(1), Member(2)].into_iter().collect(),
        ..asked
    };
    assert!(!net.participant(Member(0)).configure(now, without));
}
