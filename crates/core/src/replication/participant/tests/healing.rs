//! Takeovers with copies that are damaged.

use super::*;

const A: Member = Member(0);
const B: Member = Member(1);
const C: Member = Member(2);

/// So many nodes whose log has five spans, and all of which stop.
fn stopped(count: u16, ack: AckLevel) -> (Net, Vec<SpanId>) {
    let mut net = Net::new(count, ack);
    net.take(A);
    net.settle();
    for byte in 1..=5 {
        net.write(A, 3, byte);
        net.settle();
    }
    for member in members(count) {
        net.kill(member);
    }
    let pool = Arc::clone(&net.pool);
    let (_, found) = replay(&net.nodes[0].disk, &pool);
    (net, found.spans)
}

/// Start a node whose copy has damaged data.
fn start_doubted(net: &mut Net, member: Member) {
    net.start(member);
    net.participant(member).doubt();
}

/// A block of data of this span rots.
fn rot(net: &mut Net, member: Member, span: &SpanId) {
    let ring_blocks = LOG_BYTES_MIN / BLOCK_BYTES as u64;
    let block = LOG_HEADER_BLOCKS + (span.end.position - 1) % ring_blocks;
    net.node(member).disk[block as usize * BLOCK_BYTES + 5] ^= 1;
}

fn serves(net: &mut Net, member: Member) -> bool {
    net.participant(member).status().role == Role::Serves
}

#[test]
fn two_copies_that_are_damaged_at_different_places_make_one_that_is_not() {
    let (mut net, spans) = stopped(2, AckLevel::All);
    let sound = net.nodes[0].disk.clone();
    for (member, damaged) in [(A, [1, 2]), (B, [0, 4])] {
        for index in damaged {
            rot(&mut net, member, &spans[index]);
        }
        start_doubted(&mut net, member);
    }
    net.take(A);
    net.pass(3_000);
    assert!(serves(&mut net, A), "{:?}", net.stop);
    let place = |span: &SpanId| {
        let at = LOG_HEADER_BLOCKS + span.end.position - u64::from(span.blocks);
        at as usize * BLOCK_BYTES..(at as usize + span.blocks as usize) * BLOCK_BYTES
    };
    for span in &spans {
        assert!(net.nodes[0].disk[place(span)] == sound[place(span)]);
    }
    // The other one gives up what it had, and is brought up anew.
    net.pass(3_000);
    assert_eq!(net.record.config.members.count(), 2);
    assert_eq!(
        (net.bytes(A), net.bytes(B)),
        (vec![1, 2, 3, 4, 5], vec![1, 2, 3, 4, 5])
    );
}

#[test]
fn candidate_stops_and_says_what_nobody_has_whole() {
    let (mut net, spans) = stopped(2, AckLevel::All);
    for member in [A, B] {
        rot(&mut net, member, &spans[3]);
        start_doubted(&mut net, member);
    }
    let before = net.nodes[0].disk.clone();
    net.take(B);
    net.pass(3_000);
    let end = spans[3].end.position;
    let missing = vec![(end - u64::from(spans[3].blocks), end)];
    assert_eq!(net.stop, Some(Stop::OwnDamaged { count: 1, missing }));
    assert!(!net.participant(B).status().is_whole);
    // Nothing was given up.
    let ring = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;
    assert!(net.nodes[0].disk[ring..] == before[ring..]);
    assert_eq!(net.record.phase, Phase::Taking { candidate: B });
}

#[test]
fn candidate_waits_for_a_member_that_may_have_what_is_damaged_here() {
    let (mut net, spans) = stopped(2, AckLevel::All);
    rot(&mut net, A, &spans[3]);
    start_doubted(&mut net, A);
    net.take(A);
    net.pass(10_000);
    assert_eq!((net.node(A).stopped, serves(&mut net, A)), (0, false));
    let end = spans[3].end.position;
    let missing = net.participant(A).status().missing;
    assert_eq!(missing, [(end - u64::from(spans[3].blocks), end)]);
    net.start(B);
    net.pass(3_000);
    assert!(serves(&mut net, A));
    assert_eq!(net.bytes(A), [1, 2, 3, 4, 5]);
}

#[test]
fn damaged_copies_of_others_do_not_count_for_a_candidate_that_healed() {
    let (mut net, spans) = stopped(3, AckLevel::Majority);
    for (member, span) in [(A, &spans[1]), (B, &spans[2])] {
        rot(&mut net, member, span);
        start_doubted(&mut net, member);
    }
    net.take(A);
    net.pass(10_000);
    assert!(!serves(&mut net, A), "it takes two that count");
    net.start(C);
    net.pass(3_000);
    assert!(serves(&mut net, A), "{:?}", net.stop);
    assert_eq!(net.bytes(A), [1, 2, 3, 4, 5]);
}

#[test]
fn candidate_that_healed_without_the_last_primary_waits_for_its_lease_and_serves() {
    let (mut net, spans) = stopped(3, AckLevel::All);
    for (member, span) in [(B, &spans[1]), (C, &spans[2])] {
        rot(&mut net, member, span);
        start_doubted(&mut net, member);
    }
    net.take(B);
    net.pass(2_000);
    assert!(!serves(&mut net, B), "the last primary may have a lease");
    net.pass(2_000);
    assert!(serves(&mut net, B), "{:?}", net.stop);
    assert_eq!(net.bytes(B), [1, 2, 3, 4, 5]);
}

#[test]
fn medium_that_does_not_keep_what_is_written_again_is_no_source() {
    let (mut net, spans) = stopped(2, AckLevel::All);
    rot(&mut net, A, &spans[3]);
    let (offset, rotten) = {
        let at = (LOG_HEADER_BLOCKS + spans[3].end.position - 1) as usize * BLOCK_BYTES;
        (at, net.nodes[0].disk[at..at + BLOCK_BYTES].to_vec())
    };
    start_doubted(&mut net, A);
    net.start(B);
    net.sticky = Some((A, offset, rotten));
    net.take(A);
    net.pass(3_000);
    assert!(
        matches!(net.stop, Some(Stop::OwnDamaged { count: 1, .. })),
        "{:?}",
        net.stop
    );
}

#[test]
fn reads_of_an_earlier_attempt_in_the_same_epoch_count_for_nothing() {
    let (mut net, spans) = stopped(2, AckLevel::All);
    rot(&mut net, A, &spans[3]);
    start_doubted(&mut net, A);
    net.held_reads = Some(Vec::new());
    net.take(A);
    net.settle();
    let now = net.now;
    let count = net.held_reads.as_ref().unwrap().len();
    assert!(count > 1, "spans that are read back: {count}");
    // The attempt ends, and a newer record of its epoch has another one begin while those reads are under way.
    let higher = Message::Fenced {
        promised: net.record.epoch + 1,
    };
    let mut again = net.record.clone();
    again.revision += 1;
    let candidate = net.participant(A);
    candidate.connected(now, B);
    candidate.receive(now, B, again.epoch, &higher, Vec::new());
    candidate.see(now, &again);
    net.record = again;
    net.disconnect((A, B));
    net.settle();
    assert!(
        matches!(net.stop, Some(Stop::Fenced { .. })),
        "{:?}",
        net.stop
    );
    let held = net.held_reads.take().unwrap();
    for (of, token, offset, buf) in held {
        net.end_read(of, token, offset, buf);
    }
    net.pass(1_000);
    assert!(!serves(&mut net, A), "one of its spans is damaged");
    net.start(B);
    net.pass(3_000);
    assert!(serves(&mut net, A), "{:?}", net.stop);
    assert_eq!(net.bytes(A), [1, 2, 3, 4, 5]);
}
