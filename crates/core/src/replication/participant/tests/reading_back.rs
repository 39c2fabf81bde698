//! What of a joiner's copy is read back.

use super::*;

const PRIMARY: Member = Member(0);
const JOINER: Member = Member(1);
const AWAY: Member = Member(2);

fn write(net: &mut Net, count: u8, blocks: u64) {
    for byte in 1..=count {
        net.write(PRIMARY, blocks, byte);
        net.settle();
    }
}

/// A group, one of whose members has missed more than a joiner may lack when it begins to read back; offset on the region
/// of the first span that it missed.
fn one_lacks_some() -> (Net, u64) {
    let mut net = Net::healthy(AckLevel::Majority);
    write(&mut net, 9, 8);
    let offset = end_of_copy(&mut net);
    net.kill(AWAY);
    net.pass(5_000);
    assert_eq!(net.record.config.members.count(), 2);
    write(&mut net, 6, 250);
    net.start(AWAY);
    (net, offset)
}

/// Offset on the region of where the copy ends that may be away.
fn end_of_copy(net: &mut Net) -> u64 {
    let head = net.participant(AWAY).status().head;
    net.participant(AWAY).reads.offset_at(head)
}

/// From which offset on the joiner read its copy until it was a member.
fn read_back_from(net: &mut Net) -> Option<u64> {
    net.reads.clear();
    net.pass(10_000);
    assert_eq!(net.record.config.members.count(), 3);
    let reads = net.reads.iter().filter(|(member, _)| *member == AWAY);
    reads.map(|(_, offset)| *offset).min()
}

#[test]
fn only_what_came_since_the_replay_is_read_back() {
    let (mut net, offset) = one_lacks_some();
    assert_eq!(read_back_from(&mut net), Some(offset));
}

#[test]
fn copy_that_is_doubted_is_read_back_from_its_tail_on() {
    let (mut net, _) = one_lacks_some();
    net.participant(AWAY).doubt();
    let tail = net.participant(AWAY).reads.offset_at(0);
    assert_eq!(read_back_from(&mut net), Some(tail));
}

/// The member is not reached for a moment, and misses so many spans of so many blocks. Returns offset on the region of the
/// first of them.
fn misses_some(net: &mut Net, count: u8, blocks: u64) -> u64 {
    net.cut.insert((PRIMARY, AWAY));
    net.disconnect((PRIMARY, AWAY));
    net.pass(5_000);
    assert_eq!(net.record.config.members.count(), 2);
    let offset = end_of_copy(net);
    write(net, count, blocks);
    net.cut.clear();
    offset
}

#[test]
fn all_is_read_back_after_a_while_however_often_a_copy_joins() {
    let (mut net, _) = one_lacks_some();
    let tail = net.participant(AWAY).reads.offset_at(0);
    read_back_from(&mut net);
    net.pass(200_000);
    misses_some(&mut net, 1, 8);
    assert_ne!(read_back_from(&mut net), Some(tail));
    net.pass(200_000);
    misses_some(&mut net, 1, 8);
    assert_eq!(read_back_from(&mut net), Some(tail));
}

#[test]
fn what_was_read_back_before_a_link_broke_is_not_again() {
    let (mut net, first) = one_lacks_some();
    read_back_from(&mut net);
    let offset = misses_some(&mut net, 6, 250);
    let from = read_back_from(&mut net);
    // Little may have come after it was read back the first time.
    assert!(
        from.is_some_and(|from| from > first && from <= offset),
        "{from:?}: {first} to {offset}"
    );
}

/// A member and a primary whose log is longer than what a joiner may lack; they get to know of one another once a cut is
/// taken away.
fn joiner_of_a_long_log() -> Net {
    let mut net = Net::new(2, AckLevel::All);
    net.cut.insert((PRIMARY, JOINER));
    net.take(PRIMARY);
    net.settle();
    write(&mut net, 6, 250);
    net.cut.clear();
    net
}

/// Whether a joiner is to read back what it has.
fn is_told(wire: &Wire) -> bool {
    matches!(wire.message, Message::Verify { .. })
}

#[test]
fn what_a_joiner_has_is_read_back_before_anybody_asks() {
    let mut net = joiner_of_a_long_log();
    net.reads.clear();
    while !net.wires.iter().any(is_told) {
        assert!(net.round());
        net.act(PRIMARY);
        net.send(PRIMARY);
    }
    let by_joiner = |(member, _): &&(Member, u64)| *member == JOINER;
    let before = net.reads.iter().filter(by_joiner).count();
    assert!(before > 0);
    net.pass(1_000);
    assert_eq!(net.record.config.members.count(), 2);
    // Each span once: pieces of it lie at different places.
    let mut places: Vec<u64> = (net.reads.iter())
        .filter(by_joiner)
        .map(|(_, offset)| *offset)
        .collect();
    let count = places.len();
    places.sort_unstable();
    places.dedup();
    assert_eq!(places.len(), count);
}

/// Its link is made anew each minute meanwhile, as it says nothing.
#[test]
fn joiner_that_reads_back_for_long_reads_nothing_twice() {
    let (mut net, first) = one_lacks_some();
    net.participant(AWAY).doubt();
    net.reads.clear();
    net.held_reads = Some(Vec::new());
    let mut seconds = 0;
    while net.record.config.members.count() == 2 {
        net.pass(1_000);
        seconds += 1;
        assert!(seconds < 5_000);
        // Each read takes the joiner up to 100 s.
        let held = net.held_reads.replace(Vec::new()).unwrap();
        for (member, token, offset, buf) in held {
            if member == AWAY && seconds % 100 > 0 {
                let held = net.held_reads.as_mut().unwrap();
                held.push((member, token, offset, buf));
            } else {
                net.end_read(member, token, offset, buf);
            }
        }
        net.settle();
    }
    assert!(
        seconds > 600,
        "it takes longer than what was compared counts"
    );
    let tail = net.participant(AWAY).reads.offset_at(0);
    for offset in [tail, first] {
        let is_it = |read: &&(Member, u64)| **read == (AWAY, offset);
        assert_eq!(net.reads.iter().filter(is_it).count(), 1);
    }
}

#[test]
fn what_was_bad_before_anybody_asked_is_read_once_more_when_somebody_does() {
    let mut net = joiner_of_a_long_log();
    net.reads.clear();
    // The first span rots as soon as it is there.
    let place = net.participant(JOINER).reads.offset_at(1) as usize;
    while net.record.config.members.count() == 1 && net.round() {
        let disk = &mut net.node(JOINER).disk;
        if disk[place] == 1 {
            disk[place] = 99;
            break;
        }
    }
    while !net.wires.iter().any(is_told) {
        assert!(net.round());
        net.act(PRIMARY);
        net.send(PRIMARY);
    }
    let first = net.participant(JOINER).reads.offset_at(0);
    let begins = |(member, offset): &&(Member, u64)| *member == JOINER && *offset == first;
    assert_eq!(net.reads.iter().filter(begins).count(), 1);
    // A disk that has come to itself.
    net.node(JOINER).disk[place] = 1;
    net.pass(1_000);
    assert_eq!(net.record.config.members.count(), 2);
    assert_eq!(net.reads.iter().filter(begins).count(), 2);
}
