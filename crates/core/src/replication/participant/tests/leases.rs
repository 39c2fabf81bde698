//! Until when a primary may answer reads, and who waits for that.

use super::*;

/// Cut a primary off from everybody, and have the next node take the group unseen by it.
fn take_from_one_that_is_cut_off(net: &mut Net) {
    for member in [1, 2] {
        net.cut.insert((Member(0), Member(member)));
        net.cut.insert((Member(member), Member(0)));
    }
    net.settle();
    let taking = net.record.taking(Member(1));
    net.record = taking.clone();
    let now = net.now;
    for member in [1, 2] {
        net.participant(Member(member)).see(now, &taking);
    }
}

#[test]
fn primary_has_a_lease_while_members_echo_whether_anything_is_written_or_not() {
    let mut net = Net::healthy(AckLevel::All);
    for _ in 0..20 {
        net.pass(500);
        let left = net.node(Member(0)).lease.since(net.now);
        assert!(left >= Nanos::from_millis(1_400), "{left:?}");
    }
    net.cut.insert((Member(0), Member(2)));
    net.pass(1_900);
    assert_eq!(net.record.config.members.count(), 3);
    let left = net.node(Member(0)).lease.since(net.now);
    assert!(left < Nanos::from_millis(500), "{left:?}");
    net.pass(1_000);
    assert_eq!(net.record.config.members.count(), 2, "it was left out");
    let left = net.node(Member(0)).lease.since(net.now);
    assert!(left >= Nanos::from_millis(1_400), "{left:?}");
}

#[test]
fn what_stands_on_the_log_anew_is_told_of_the_lease_that_there_is() {
    for count in [1, 2] {
        let mut net = Net::new(count, AckLevel::All);
        net.take(Member(0));
        net.settle();
        let lease = net.nodes[0].lease;
        assert!(lease > net.now);
        let participant = net.participant(Member(0));
        participant.stand();
        let acts = participant.take_acts();
        assert!(matches!(acts[..], [Act::Lease { until }] if until == lease));
    }
}

/// Let so much time pass of which the primary alone notices, and only afterwards.
fn poll(net: &mut Net, millis: u64) {
    net.now = net.now.plus(Nanos::from_millis(millis));
    let now = net.now;
    net.participant(Member(0)).poll(now);
    net.act(Member(0));
}

/// The primary has written, and waits for an answer and an echo of each.
fn waiting() -> Net {
    let mut net = Net::healthy(AckLevel::All);
    net.pass(3_000);
    net.full
        .extend([1, 2].map(|member| (Member(0), Member(member))));
    net.pass(700);
    net.write(Member(0), 1, 1);
    net.settle();
    poll(&mut net, 1);
    net
}

#[test]
fn primary_that_stood_still_leaves_out_nobody_who_answers_when_it_goes_on() {
    let mut net = waiting();
    let (lease, revision) = (net.node(Member(0)).lease, net.record.revision);
    poll(&mut net, 10_000);
    net.full.clear();
    assert!(lease < net.now);
    assert_eq!(net.node(Member(0)).lease, lease);
    net.settle();
    let now = net.now;
    assert!(net.node(Member(0)).lease > now);
    // Nobody has left, not even to join again at once.
    assert_eq!(net.record.revision, revision, "{:?}", net.record);
    let status = net.participant(Member(0)).status();
    assert_eq!(status.committed, Some(status.head));
}

#[test]
fn primary_that_stood_still_leaves_out_who_answers_nothing_afterwards() {
    let mut net = waiting();
    poll(&mut net, 10_000);
    net.pass(1_900);
    assert_eq!(net.record.config.members.count(), 3);
    net.pass(200);
    assert!(net.record.config.members.count() < 3, "{:?}", net.record);
}

#[test]
fn primary_that_comes_late_each_time_leaves_out_who_answers_nothing() {
    let mut net = waiting();
    for _ in 0..4 {
        poll(&mut net, 1_500);
    }
    assert!(net.record.config.members.count() < 3, "{:?}", net.record);
}

#[test]
fn member_that_hangs_while_nothing_is_written_is_left_out() {
    let mut net = Net::healthy(AckLevel::Majority);
    net.full.insert((Member(0), Member(2)));
    net.pass(3_000);
    assert!(!net.record.config.members.contains(Member(2)));
}

#[test]
fn candidate_serves_only_once_the_lease_of_one_that_is_cut_off_is_over() {
    for ack in [AckLevel::Majority, AckLevel::All] {
        let mut net = Net::healthy(ack);
        net.pass(600);
        take_from_one_that_is_cut_off(&mut net);
        let mut waited = false;
        while net.node(Member(1)).began == 0 {
            net.pass(50);
            waited |= net.now < net.nodes[0].lease;
        }
        assert!(waited, "it was there meanwhile: {ack:?}");
        assert!(net.now > net.nodes[0].lease, "{ack:?}");
    }
}

#[test]
fn candidate_says_whom_and_what_it_waits_for() {
    let mut net = Net::healthy(AckLevel::All);
    net.pass(600);
    take_from_one_that_is_cut_off(&mut net);
    let mut waits = Vec::new();
    while net.node(Member(1)).began == 0 {
        let now = net.now;
        let taking = Taking::of(net.participant(Member(1)), now);
        let taking = taking.expect("it has not begun to serve");
        assert!(taking.silent.contains(&Member(0)) && taking.needed == 1);
        if matches!(taking.waits, Waits::Lease { .. }) {
            assert_eq!(taking.silent, [Member(0)]);
            assert_eq!(taking.promised, [Member(1), Member(2)]);
        }
        waits.push(taking.waits);
        net.pass(50);
    }
    assert_eq!(waits[0], Waits::Promises);
    let lefts: Vec<_> = (waits.iter())
        .filter_map(|waits| match waits {
            Waits::Lease { left } => Some(*left),
            _ => None,
        })
        .collect();
    assert!(lefts.len() > 1, "{waits:?}");
    assert!(lefts.is_sorted_by(|left, next| left > next), "{lefts:?}");
    let now = net.now;
    assert_eq!(Taking::of(net.participant(Member(1)), now), None);
}

#[test]
fn candidate_that_has_the_old_primarys_promise_waits_for_no_lease() {
    let mut net = Net::healthy(AckLevel::All);
    net.pass(600);
    net.take(Member(1));
    net.pass(100);
    assert_eq!(net.node(Member(1)).began, 1);
    assert!(net.node(Member(0)).writer.is_none());
}

#[test]
fn member_that_has_restarted_is_waited_for_as_if_it_had_just_echoed() {
    let mut net = Net::healthy(AckLevel::All);
    net.pass(10_000);
    net.kill(Member(0));
    net.pass(10_000);
    let taking = net.record.taking(Member(1));
    net.record = taking;
    net.kill(Member(1));
    net.kill(Member(2));
    net.start(Member(1));
    net.pass(2_000);
    assert_eq!(net.node(Member(1)).began, 0);
    net.pass(1_000);
    assert_eq!(net.node(Member(1)).began, 1);
}
