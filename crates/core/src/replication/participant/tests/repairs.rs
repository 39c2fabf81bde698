//! Blocks that rot under who serves.

use super::*;

const PRIMARY: Member = Member(0);
const TOKEN: Token = Token(77);

/// Three nodes whose log has some spans.
fn with_spans(ack: AckLevel) -> (Net, Vec<SpanId>) {
    let mut net = Net::healthy(ack);
    for byte in 1..=4 {
        net.write(PRIMARY, 3, byte);
        net.settle();
    }
    let pool = Arc::clone(&net.pool);
    let (_, found) = replay(&net.nodes[0].disk, &pool);
    (net, found.spans)
}

/// Offset on the region of the last `blocks` blocks of a span.
fn end_of(net: &mut Net, span: &SpanId, blocks: u64) -> u64 {
    let reads = &net.participant(PRIMARY).reads;
    reads.offset_at(span.end.position - blocks)
}

fn rot(net: &mut Net, member: Member, offset: u64) {
    net.node(member).disk[offset as usize + 5] ^= 1;
}

fn repair(net: &mut Net, offset: u64, blocks: u64) {
    let now = net.now;
    net.participant(PRIMARY).repair(now, TOKEN, offset, blocks);
}

#[test]
fn block_that_rots_is_written_again_as_a_member_has_it() {
    let (mut net, spans) = with_spans(AckLevel::Majority);
    let before = net.nodes[0].disk.clone();
    let offset = end_of(&mut net, &spans[1], 2);
    rot(&mut net, PRIMARY, offset);
    // This one is not asked for, and so stays.
    let beside = end_of(&mut net, &spans[2], 1);
    rot(&mut net, PRIMARY, beside);
    repair(&mut net, offset, 2);
    net.settle();
    assert_eq!(net.repaired, [TOKEN]);
    rot(&mut net, PRIMARY, beside);
    assert!(net.nodes[0].disk == before);
    // The log goes on.
    net.write(PRIMARY, 1, 5);
    net.settle();
    assert_eq!(net.bytes(Member(1)), [1, 2, 3, 4, 5]);
}

#[test]
fn head_of_a_span_is_repaired_after_the_ring_was_used_again() {
    let mut net = Net::healthy(AckLevel::All);
    let blocks = LOG_BYTES_MIN / BLOCK_BYTES as u64;
    for round in 0..3 * blocks / 100 {
        net.write(PRIMARY, 100, round as u8 + 1);
        net.settle();
        if round % 4 == 3 {
            net.retire(PRIMARY);
        }
    }
    net.write(PRIMARY, 2, 200);
    net.settle();
    assert!(net.writer(PRIMARY).log.head() > 2 * blocks);
    let pool = Arc::clone(&net.pool);
    let (_, found) = replay(&net.nodes[0].disk, &pool);
    let last = found.spans[found.spans.len() - 1];
    let before = net.nodes[0].disk.clone();
    let offset = end_of(&mut net, &last, u64::from(last.blocks));
    rot(&mut net, PRIMARY, offset);
    repair(&mut net, offset, 1);
    net.settle();
    assert_eq!(net.repaired, [TOKEN]);
    assert!(net.nodes[0].disk == before);
}

#[test]
fn member_whose_copy_rots_too_spoils_nothing_and_another_one_helps() {
    let (mut net, spans) = with_spans(AckLevel::All);
    let before = net.nodes[0].disk.clone();
    let offset = end_of(&mut net, &spans[1], 1);
    rot(&mut net, PRIMARY, offset);
    rot(&mut net, Member(1), offset);
    repair(&mut net, offset, 1);
    // At once, and it stays in step.
    net.settle();
    assert_eq!(net.repaired, [TOKEN]);
    assert!(net.nodes[0].disk == before);
    assert!(net.participant(PRIMARY).links.contains(&Member(1)));
}

#[test]
fn repair_that_nobody_can_help_with_ends() {
    let (mut net, spans) = with_spans(AckLevel::All);
    let offset = end_of(&mut net, &spans[1], 1);
    rot(&mut net, PRIMARY, offset);
    rot(&mut net, Member(1), offset);
    rot(&mut net, Member(2), offset);
    let before = net.nodes[0].disk.clone();
    repair(&mut net, offset, 1);
    net.pass(5_000);
    assert_eq!(net.repaired, [TOKEN]);
    assert!(net.nodes[0].disk == before);
    // What is not in the log is nobody's to give, and neither is what crosses the end of a span.
    for (offset, blocks) in [(0, 1), (u64::MAX, 1), (offset, 2)] {
        net.repaired.clear();
        repair(&mut net, offset, blocks);
        net.act(PRIMARY);
        assert_eq!(net.repaired, [TOKEN], "{offset} {blocks}");
    }
}

#[test]
fn repair_does_not_wait_for_a_member_that_is_silent() {
    let (mut net, spans) = with_spans(AckLevel::One);
    let before = net.nodes[0].disk.clone();
    let offset = end_of(&mut net, &spans[3], 1);
    rot(&mut net, PRIMARY, offset);
    net.full.insert((PRIMARY, Member(1)));
    repair(&mut net, offset, 1);
    net.settle();
    assert_eq!(net.repaired, []);
    net.pass(3_000);
    assert_eq!(net.repaired, [TOKEN]);
    assert!(net.nodes[0].disk == before);
}

#[test]
fn repair_ends_with_the_part_and_changes_nothing_afterwards() {
    let (mut net, spans) = with_spans(AckLevel::Majority);
    let offset = end_of(&mut net, &spans[1], 1);
    net.full.insert((PRIMARY, Member(1)));
    net.full.insert((PRIMARY, Member(2)));
    rot(&mut net, PRIMARY, offset);
    repair(&mut net, offset, 1);
    let before = net.nodes[0].disk.clone();
    net.take(Member(1));
    net.pass(500);
    assert_eq!(net.repaired, [TOKEN]);
    let place = offset as usize..offset as usize + BLOCK_BYTES;
    assert!(net.nodes[0].disk[place.clone()] == before[place]);
}

/// The third node is away while four spans are written, and is out of the group.
fn with_joiner() -> (Net, Vec<SpanId>) {
    let mut net = Net::healthy(AckLevel::Majority);
    net.write(PRIMARY, 1, 1);
    net.settle();
    net.kill(Member(2));
    net.pass(3_000);
    assert!(!net.record.config.members.contains(Member(2)));
    for byte in 2..=5 {
        net.write(PRIMARY, 3, byte);
        net.settle();
    }
    let pool = Arc::clone(&net.pool);
    let (_, found) = replay(&net.nodes[0].disk, &pool);
    (net, found.spans)
}

fn stage_of(net: &mut Net, member: Member) -> Option<Stage> {
    let others = net.participant(PRIMARY).status().others;
    let other = others.into_iter().find(|other| other.member == member);
    other.map(|other| other.stage)
}

#[test]
fn joiner_gets_what_has_rotted_here_from_another_member() {
    let (mut net, spans) = with_joiner();
    let before = net.nodes[0].disk.clone();
    let offset = end_of(&mut net, &spans[3], 2);
    rot(&mut net, PRIMARY, offset);
    net.start(Member(2));
    net.settle();
    assert!(net.record.config.members.contains(Member(2)));
    assert_eq!(net.bytes(Member(2)), [1, 2, 3, 4, 5]);
    assert!(net.nodes[0].disk == before, "and it is written again here");
    assert_eq!((net.blocked, net.repaired), (Vec::new(), Vec::new()));
}

#[test]
fn joiner_is_not_asked_for_ever_if_nobody_has_what_it_needs_and_joins_once_the_log_lets_go_of_that()
{
    let (mut net, spans) = with_joiner();
    let offset = end_of(&mut net, &spans[3], 2);
    rot(&mut net, PRIMARY, offset);
    rot(&mut net, Member(1), offset);
    net.start(Member(2));
    net.settle();
    assert_eq!(net.blocked, [(Member(2), spans[3])]);
    assert_eq!(stage_of(&mut net, Member(2)), Some(Stage::Blocked));
    // It is tried now and then, and not said again.
    let sent = net.sent;
    net.pass(35_000);
    assert!(net.sent - sent < 300, "{}", net.sent - sent);
    assert_eq!(net.blocked.len(), 1);
    net.write(PRIMARY, 1, 6);
    net.settle();
    net.retire(PRIMARY);
    net.pass(12_000);
    assert_eq!(stage_of(&mut net, Member(2)), Some(Stage::InStep));
    assert!(net.record.config.members.contains(Member(2)));
}

#[test]
fn joiner_joins_once_a_member_that_has_what_it_needs_is_back() {
    let (mut net, spans) = with_joiner();
    let offset = end_of(&mut net, &spans[3], 2);
    rot(&mut net, PRIMARY, offset);
    net.full.insert((PRIMARY, Member(1)));
    net.start(Member(2));
    net.pass(1_500);
    assert_eq!(stage_of(&mut net, Member(2)), Some(Stage::Blocked));
    net.full.clear();
    net.pass(25_000);
    assert_eq!(stage_of(&mut net, Member(2)), Some(Stage::InStep));
    assert_eq!(net.bytes(Member(2)), [1, 2, 3, 4, 5]);
    assert_eq!(net.blocked.len(), 1);
}

#[test]
fn no_write_of_a_span_begins_while_something_is_written_again() {
    let (mut net, spans) = with_spans(AckLevel::Majority);
    let offset = end_of(&mut net, &spans[1], 1);
    net.slow = Some((PRIMARY, Vec::new()));
    let begun = |net: &Net| net.slow.as_ref().expect("it is slow").1.clone();
    repair(&mut net, offset, 1);
    net.settle();
    let rewrite = begun(&net);
    assert_eq!(rewrite.len(), 1);
    net.write(PRIMARY, 1, 5);
    net.settle();
    assert_eq!(begun(&net), rewrite);
    let now = net.now;
    let participant = net.participant(PRIMARY);
    participant.finished(now, rewrite[0], Ok(Done::Written));
    net.settle();
    assert_eq!(begun(&net).len(), 2);
    assert_eq!(net.repaired, [TOKEN]);
}

#[test]
fn what_was_promised_outlives_the_newest_superblock() {
    let mut net = Net::healthy(AckLevel::Majority);
    net.take(Member(1));
    net.settle();
    let (epoch, pool) = (net.record.epoch, Arc::clone(&net.pool));
    for member in members(3) {
        for sequence in 0..2 {
            let mut disk = net.node(member).disk.clone();
            disk[LogSuperblock::offset_of(sequence) as usize + 100] ^= 1;
            let (_, found) = replay(&disk, &pool);
            let says = found.superblock.membership().unwrap();
            assert_eq!((says.promised, says.is_whole), (epoch, true), "{member}");
        }
    }
}
