//! What a copy takes, writes, says and gives up.

use core::ops::Range;

use super::*;

const PRIMARY: Member = Member(0);
const CANDIDATE: Member = Member(2);
const RING_BLOCKS: u64 = 8;

fn point(position: u64) -> Point {
    Point {
        position,
        chain: position * 10,
    }
}

fn span(start: u64, evidence: u64) -> SpanId {
    SpanId {
        start: point(start),
        end: point(start + 1),
        blocks: 1,
        incarnation: 1,
        evidence,
    }
}

fn member() -> Replica {
    let mut replica = Replica::new(Superblock::new(true), RING_BLOCKS, []);
    replica.receive(PRIMARY, 1, &Message::Attach);
    assert!(matches!(
        replica.next_message(),
        Some((PRIMARY, 1, Message::Attached(_)))
    ));
    replica
}

fn write_superblock(replica: &mut Replica) -> Superblock {
    let superblock = replica.next_superblock().unwrap();
    assert_eq!(
        replica.next_message(),
        None,
        "it is told once it is durable"
    );
    replica.superblock_written();
    replica.check_invariants();
    superblock
}

fn promise(floor: Point) -> Message {
    Message::Promise { floor }
}

#[test]
fn span_is_acknowledged_in_order_once_durable() {
    let mut replica = member();
    replica.receive(PRIMARY, 1, &Message::Append(span(0, 0)));
    replica.receive(PRIMARY, 1, &Message::Append(span(1, 0)));
    // One that does not follow is not taken.
    replica.receive(PRIMARY, 1, &Message::Append(span(7, 0)));
    assert_eq!(replica.next_write(), Some(span(0, 0)));
    assert_eq!(replica.next_write(), Some(span(1, 0)));
    assert_eq!(replica.next_write(), None);
    replica.written(2);
    assert_eq!(replica.next_message(), None);
    replica.written(1);
    let ack = Message::Ack { durable: 2 };
    assert_eq!(replica.next_message(), Some((PRIMARY, 1, ack)));
}

#[test]
fn span_waits_until_its_evidence_is_durable_here() {
    let mut replica = member();
    replica.receive(PRIMARY, 1, &Message::Append(span(0, 0)));
    replica.receive(PRIMARY, 1, &Message::Append(span(1, 1)));
    assert_eq!(replica.next_write(), Some(span(0, 0)));
    assert_eq!(replica.next_write(), None);
    replica.written(1);
    assert_eq!(replica.next_write(), Some(span(1, 1)));
}

#[test]
fn promise_waits_for_what_is_on_its_way_and_for_the_medium() {
    let mut replica = member();
    replica.receive(PRIMARY, 1, &Message::Append(span(0, 0)));
    replica.receive(PRIMARY, 1, &Message::Append(span(1, 1)));
    replica.next_write().unwrap();
    replica.receive(CANDIDATE, 2, &promise(point(0)));
    assert_eq!(replica.next_superblock(), None, "a span is on its way");
    replica.receive(PRIMARY, 1, &Message::Append(span(2, 0)));
    let fenced = Message::Fenced { promised: 2 };
    assert_eq!(replica.next_message(), Some((PRIMARY, 1, fenced)));
    replica.written(1);
    while replica.next_message().is_some() {}
    assert_eq!(write_superblock(&mut replica).promised, 2);
    let Some((CANDIDATE, 2, Message::Promised(copy))) = replica.next_message() else {
        panic!("it is told");
    };
    // What was taken and not written is gone.
    assert_eq!((copy.head, replica.head()), (point(1), point(1)));
    assert!(copy.is_whole);
}

#[test]
fn promise_of_a_copy_without_the_floor_is_not_whole() {
    let mut replica = member();
    replica.receive(CANDIDATE, 2, &promise(point(3)));
    write_superblock(&mut replica);
    let Some((_, _, Message::Promised(copy))) = replica.next_message() else {
        panic!("it is told");
    };
    assert!(!copy.is_whole);
}

#[test]
fn cut_and_verification_are_durable_before_they_are_told() {
    let mut replica = Replica::new(
        Superblock::new(true),
        RING_BLOCKS,
        [span(0, 0), span(1, 0), span(2, 0)],
    );
    let cut = Cut {
        at: point(1),
        void_before: 4,
        joined: 8,
        change: Change {
            number: 1,
            tail: point(0),
            incarnation: 6,
            ..Change::default()
        },
    };
    replica.receive(CANDIDATE, 3, &Message::JoinAt(cut));
    let written = write_superblock(&mut replica);
    assert_eq!((written.promised, written.incarnation), (3, 6));
    assert_eq!((written.cut_position, written.void_before), (1, 4));
    assert_eq!(written.joined, 8);
    assert!(!written.is_whole && !written.counts(&span(1, 0)) && written.counts(&span(0, 0)));
    let has_cut = Message::HasCut(cut);
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, has_cut)));
    assert_eq!(replica.durable(), point(1));

    let up_to = point(1);
    replica.receive(CANDIDATE, 3, &Message::Verify { up_to });
    assert_eq!(replica.next_verify(), Some(up_to));
    assert_eq!(replica.next_verify(), None);
    replica.verified(true);
    assert!(write_superblock(&mut replica).is_whole);
    let verified = Message::Verified { up_to };
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, verified)));
}

#[test]
fn cut_that_was_made_before_takes_the_tail_of_now() {
    let spans = [span(0, 0)];
    let mut replica = Replica::new(Superblock::new(true), RING_BLOCKS, spans);
    let cut = |tail| Cut {
        at: point(1),
        void_before: 4,
        joined: 8,
        change: Change {
            number: 1,
            tail: point(tail),
            incarnation: 6,
            ..Change::default()
        },
    };
    replica.receive(CANDIDATE, 3, &Message::JoinAt(cut(0)));
    let written = write_superblock(&mut replica);
    // The node starts anew, and the log of the others begins later by now.
    let mut replica = Replica::new(written, RING_BLOCKS, spans);
    replica.receive(CANDIDATE, 3, &Message::JoinAt(cut(1)));
    assert_eq!(write_superblock(&mut replica).tail, point(1));
    let has_cut = Message::HasCut(cut(1));
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, has_cut)));
}

#[test]
fn joiner_writes_in_any_order_and_is_whole_once_it_has_all_of_that() {
    let (mut replica, _) = joiner(Superblock::new(false));
    for (start, evidence) in [(0, 0), (1, 1), (2, 2)] {
        replica.receive(CANDIDATE, 3, &Message::Append(span(start, evidence)));
    }
    for start in 0..3 {
        assert_eq!(replica.next_write(), Some(span(start, start)));
    }
    replica.written(1);
    replica.written(3);
    while replica.next_message().is_some() {}
    let up_to = point(1);
    replica.receive(CANDIDATE, 3, &Message::Verify { up_to });
    assert_eq!(replica.next_verify(), Some(up_to));
    replica.verified(true);
    // What comes from now on is in order.
    replica.receive(CANDIDATE, 3, &Message::Append(span(3, 3)));
    assert_eq!(replica.next_write(), None);
    assert_eq!(
        replica.next_superblock(),
        None,
        "the second one may be lost"
    );
    replica.written(2);
    assert_eq!(replica.next_write(), Some(span(3, 3)));
    assert!(write_superblock_beside_ack(&mut replica).is_whole);
    replica.receive(CANDIDATE, 3, &Message::Append(span(4, 4)));
    assert_eq!(replica.next_write(), None);
}

#[test]
fn joiner_that_does_not_read_back_lets_go_of_what_it_has_not_written() {
    let (mut replica, _) = joiner(Superblock::new(false));
    let up_to = point(0);
    replica.receive(CANDIDATE, 3, &Message::Verify { up_to });
    assert_eq!(replica.next_verify(), Some(up_to));
    replica.receive(CANDIDATE, 3, &Message::Append(span(0, 0)));
    assert_eq!(replica.next_write(), Some(span(0, 0)));
    // Of an opening that the superblock does not know yet.
    let waits = SpanId {
        incarnation: 7,
        ..span(1, 0)
    };
    replica.receive(CANDIDATE, 3, &Message::Append(waits));
    assert_eq!((replica.next_write(), replica.head()), (None, point(2)));
    replica.verified(false);
    replica.check_invariants();
    assert_eq!(replica.head(), point(1), "the first one is on its way");
    replica.written(1);
    assert_eq!(replica.head(), point(0));
    assert!(replica.next_superblock().unwrap().is_void());
}

fn write_superblock_beside_ack(replica: &mut Replica) -> Superblock {
    assert!(matches!(
        replica.next_message(),
        Some((_, _, Message::Ack { .. }))
    ));
    write_superblock(replica)
}

/// A joiner that was cut at the beginning, of opening 1 to 6.
fn joiner(superblock: Superblock) -> (Replica, Cut) {
    let mut replica = Replica::new(superblock, RING_BLOCKS, []);
    let cut = Cut {
        at: point(0),
        void_before: 1,
        joined: 8,
        change: change(1, 0, 6),
    };
    replica.receive(CANDIDATE, 3, &Message::JoinAt(cut));
    write_superblock(&mut replica);
    let has_cut = Message::HasCut(cut);
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, has_cut)));
    (replica, cut)
}

fn change(number: u64, tail: u64, incarnation: u64) -> Change {
    Change {
        number,
        tail: point(tail),
        incarnation,
        ..Change::default()
    }
}

fn take(replica: &mut Replica, epoch: u64, spans: Range<u64>) {
    for start in spans {
        replica.receive(PRIMARY, epoch, &Message::Append(span(start, 0)));
    }
}

fn write_spans(replica: &mut Replica) -> usize {
    let spans: Vec<SpanId> = core::iter::from_fn(|| replica.next_write()).collect();
    for span in &spans {
        replica.written(span.end.position);
    }
    replica.check_invariants();
    spans.len()
}

#[test]
fn verification_that_fails_gives_up_the_copy_durably() {
    let (mut replica, cut) = joiner(Superblock::new(false));
    take(&mut replica, 3, 0..2);
    write_spans(&mut replica);
    while replica.next_message().is_some() {}
    let up_to = point(2);
    replica.receive(CANDIDATE, 3, &Message::Verify { up_to });
    assert_eq!(replica.next_verify(), Some(up_to));
    replica.verified(false);
    let given_up = write_superblock(&mut replica);
    assert!(!given_up.counts(&span(0, 0)) && !given_up.is_whole);
    let not_whole = Message::NotWhole { up_to };
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, not_whole)));

    // The node starts anew: a replay finds nothing, and nothing is taken before the cut.
    let mut replica = Replica::new(given_up, RING_BLOCKS, []);
    replica.receive(CANDIDATE, 3, &Message::Append(span(0, 0)));
    assert_eq!(replica.head(), point(0));
    replica.receive(CANDIDATE, 3, &Message::Join);
    let points = [point(0)].into();
    let joining = Message::Joining { points };
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, joining)));
    replica.receive(CANDIDATE, 3, &Message::JoinAt(cut));
    if replica.next_superblock().is_some() {
        replica.superblock_written();
    }
    let has_cut = Message::HasCut(cut);
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, has_cut)));
    assert!(!replica.superblock().counts(&span(0, 0)));

    // What is given counts once all of it was read back.
    take(&mut replica, 3, 0..2);
    write_spans(&mut replica);
    while replica.next_message().is_some() {}
    replica.receive(CANDIDATE, 3, &Message::Verify { up_to });
    assert_eq!(replica.next_verify(), Some(up_to));
    replica.verified(true);
    let whole = write_superblock(&mut replica);
    assert!(whole.is_whole && whole.counts(&span6(0)));
}

/// A span of opening 6.
fn span6(start: u64) -> SpanId {
    SpanId {
        incarnation: 6,
        ..span(start, 0)
    }
}

#[test]
fn damaged_copy_is_given_up_and_is_no_source() {
    let mut replica = Replica::damaged(Superblock::new(true), RING_BLOCKS);
    replica.receive(CANDIDATE, 1, &Message::Attach);
    let Some((.., Message::Attached(copy))) = replica.next_message() else {
        panic!("it answers");
    };
    assert!(!copy.is_whole);
    let superblock = write_superblock(&mut replica);
    assert!(superblock.is_void() && !superblock.is_whole);
    assert_eq!(replica.next_superblock(), None);
}

#[test]
fn span_waits_for_room_in_the_ring() {
    let mut replica = member();
    take(&mut replica, 1, 0..RING_BLOCKS + 2);
    assert_eq!(write_spans(&mut replica) as u64, RING_BLOCKS);
    // One block too few: the superblock that lets it go is not durable yet.
    replica.receive(PRIMARY, 1, &Message::Superblock(change(1, 2, 1)));
    assert_eq!(
        replica.next_superblock().map(|next| next.tail),
        Some(point(2))
    );
    assert_eq!(replica.next_write(), None);
    replica.superblock_written();
    assert_eq!(write_spans(&mut replica), 2);
    assert_eq!(replica.durable(), point(RING_BLOCKS + 2));
}

#[test]
fn tail_that_is_behind_a_full_ring_moves_in_steps() {
    let mut replica = member();
    let tail = RING_BLOCKS + 3;
    take(&mut replica, 1, 0..tail);
    replica.receive(PRIMARY, 1, &Message::Superblock(change(1, tail, 1)));
    write_spans(&mut replica);
    while replica.next_message().is_some() {}
    assert_eq!(write_superblock(&mut replica).tail, point(RING_BLOCKS));
    assert_eq!(write_spans(&mut replica), 3);
    while replica.next_message().is_some() {}
    assert_eq!(write_superblock(&mut replica).tail, point(tail));
    let named = Message::Named { number: 1 };
    assert_eq!(replica.next_message(), Some((PRIMARY, 1, named)));
}

#[test]
fn span_that_never_fits_is_not_taken() {
    let mut replica = member();
    let end = point(RING_BLOCKS + 1);
    for blocks in [0, 1, u32::MAX] {
        let span = SpanId {
            end,
            blocks,
            ..span(0, 0)
        };
        replica.receive(PRIMARY, 1, &Message::Append(span));
        assert_eq!(replica.head(), point(0), "{blocks} blocks");
    }
}

#[test]
fn change_of_a_lower_number_is_not_taken() {
    let mut replica = member();
    let unflushed = Change {
        is_unflushed: true,
        ..change(3, 0, 1)
    };
    replica.receive(PRIMARY, 1, &Message::Superblock(unflushed));
    replica.receive(PRIMARY, 1, &Message::Superblock(change(2, 0, 1)));
    let nothing = Message::Nothing(Question::Superblock);
    assert_eq!(replica.next_message(), Some((PRIMARY, 1, nothing)));
    assert!(write_superblock(&mut replica).is_unflushed);
    let named = Message::Named { number: 3 };
    assert_eq!(replica.next_message(), Some((PRIMARY, 1, named)));
    replica.receive(PRIMARY, 1, &Message::Superblock(change(4, 0, 1)));
    assert!(!write_superblock(&mut replica).is_unflushed);
}

#[test]
fn opening_is_known_with_where_it_begins_once_all_before_is_durable() {
    let mut replica = member();
    take(&mut replica, 1, 0..1);
    let opening = Change {
        opens_at: 1,
        ..change(1, 0, 5)
    };
    replica.receive(PRIMARY, 1, &Message::Superblock(opening));
    assert_eq!(replica.next_superblock(), None);
    write_spans(&mut replica);
    while replica.next_message().is_some() {}
    let superblock = write_superblock(&mut replica);
    assert_eq!(superblock.incarnation, 5);
    // A span that was written behind one that was lost follows that one again. It does not count.
    assert!(superblock.counts(&span(0, 0)) && !superblock.counts(&span(1, 0)));
}

#[test]
fn spans_are_found_by_position() {
    let long = SpanId {
        start: point(2),
        end: point(6),
        blocks: 2,
        ..span(2, 0)
    };
    let spans = [span(0, 0), span(1, 0), long, span(6, 0)];
    let replica = Replica::new(Superblock::new(true), RING_BLOCKS, spans);
    let ends = |position| replica.span_after(position).map(|span| span.end.position);
    assert_eq!(
        [0, 1, 2, 5, 6, 7].map(ends),
        [Some(1), Some(2), Some(6), Some(6), Some(7), None]
    );
    assert!(replica.has(point(6)) && !replica.has(point(4)));
    assert!(!replica.has(Point {
        chain: 1,
        ..point(6)
    }));
}

/// Requests that a node has not been answered.
#[derive(Default)]
struct Unanswered(Vec<(Member, u64, Message)>);

impl Unanswered {
    fn asked(&mut self, by: Member, epoch: u64, message: &Message) {
        let question = Question::of(message).unwrap();
        self.0.retain(|(other, before, asked)| {
            let is_over = *before < epoch || Question::of(asked).unwrap().gives_way_to(question);
            *other != by || !is_over
        });
        self.0.push((by, epoch, message.clone()));
    }

    fn answered(&mut self, to: Member, epoch: u64, answer: &Message) {
        self.0.retain(|(by, asked_in, asked)| {
            let is_it = match (answer, asked) {
                (Message::Fenced { .. }, _) => *asked_in <= epoch,
                (Message::Nothing(question), _) => Question::of(asked) == Some(*question),
                (Message::Named { number }, Message::Superblock(change)) => {
                    change.number <= *number
                }
                (Message::Attached(_), Message::Attach)
                | (Message::Promised(_), Message::Promise { .. })
                | (Message::LogData(_), Message::ReadLog { .. })
                | (Message::Joining { .. }, Message::Join)
                | (Message::HasCut(_), Message::JoinAt(_))
                | (Message::Verified { .. } | Message::NotWhole { .. }, Message::Verify { .. }) => {
                    true
                }
                _ => false,
            };
            let is_his =
                *by == to && (*asked_in == epoch || matches!(answer, Message::Fenced { .. }));
            !(is_his && is_it)
        });
    }
}

/// A request that needs nothing that is still to come.
fn any_request(replica: &Replica, number: u64, random: &mut fastrand::Rng) -> Message {
    let (tail, durable) = (replica.superblock().tail, replica.durable());
    let change = Change {
        number: number - random.u64(..2),
        tail,
        incarnation: random.u64(1..3),
        opens_at: durable.position,
        ..Change::default()
    };
    match random.u8(..8) {
        0 => Message::Attach,
        1 => Message::Promise { floor: durable },
        2 => Message::ReadLog { after: tail },
        3 => Message::Join,
        4 => {
            let at = if random.bool() { durable } else { tail };
            let change = Change {
                opens_at: at.position,
                ..change
            };
            Message::JoinAt(Cut {
                at,
                void_before: 1,
                joined: number,
                change,
            })
        }
        5 => Message::Verify { up_to: durable },
        6 => Message::ReadLog { after: durable },
        _ => Message::Superblock(change),
    }
}

#[test]
fn request_is_answered_whatever_comes_between() {
    for seed in 0..3_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut replica, mut unanswered) = (member(), Unanswered::default());
        let mut epochs = [1, 1];
        for step in 1..40 {
            let one = random.usize(..2);
            let by = [PRIMARY, CANDIDATE][one];
            match random.u8(..8) {
                0 => epochs[one] += random.u64(1..3),
                1 => {
                    let next = span(replica.head().position, 0);
                    let follows = next.start == replica.head();
                    if follows {
                        replica.receive(by, epochs[one], &Message::Append(next));
                    }
                }
                2 if random.u8(..4) == 0 => {
                    replica.disconnected(by);
                    unanswered.0.retain(|(other, ..)| *other != by);
                }
                2..5 => go_on(&mut replica, 1, &mut random),
                _ => {
                    let message = any_request(&replica, step, &mut random);
                    unanswered.asked(by, epochs[one], &message);
                    replica.receive(by, epochs[one], &message);
                }
            }
            while let Some((to, epoch, answer)) = replica.next_message() {
                unanswered.answered(to, epoch, &answer);
            }
            replica.check_invariants();
        }
        go_on(&mut replica, 100, &mut random);
        while let Some((to, epoch, answer)) = replica.next_message() {
            unanswered.answered(to, epoch, &answer);
        }
        assert!(unanswered.0.is_empty(), "seed {seed}: {:?}", unanswered.0);
    }
}

/// Let writes and readings end.
fn go_on(replica: &mut Replica, times: usize, random: &mut fastrand::Rng) {
    for _ in 0..times {
        if let Some(span) = replica.next_write() {
            replica.written(span.end.position);
        }
        if replica.next_superblock().is_some() {
            replica.superblock_written();
        }
        if replica.next_verify().is_some() {
            replica.verified(random.u8(..4) > 0);
        }
    }
}

/// The superblock of a whole member that has promised this epoch.
fn whole_in_epoch(promised: u64) -> Superblock {
    Superblock {
        promised,
        ..Superblock::new(true)
    }
}

#[test]
fn whole_copy_goes_on_at_a_tail_that_it_lacks_and_a_joiner_is_not_whole_there() {
    let at = |joined, tail| Cut {
        at: point(tail),
        void_before: 4,
        joined,
        change: Change {
            number: 1,
            tail: point(tail),
            incarnation: 6,
            ..Change::default()
        },
    };
    for (promised, cut, is_whole) in [
        (3, at(1, 3), true),
        (3, at(8, 3), false),
        (2, at(1, 3), false),
    ] {
        let mut replica = Replica::new(whole_in_epoch(promised), RING_BLOCKS, [span(0, 0)]);
        replica.receive(CANDIDATE, 3, &Message::JoinAt(cut));
        let written = write_superblock(&mut replica);
        assert_eq!(written.is_whole, is_whole);
        assert_eq!((written.tail, written.cut_position), (point(3), 3));
        let has_cut = Message::HasCut(cut);
        assert_eq!(replica.next_message(), Some((CANDIDATE, 3, has_cut)));
        assert_eq!(replica.durable(), point(3));
        // The same once more takes no superblock.
        replica.receive(CANDIDATE, 3, &Message::JoinAt(cut));
        assert_eq!(replica.next_superblock(), None);
        let has_cut = Message::HasCut(cut);
        assert_eq!(replica.next_message(), Some((CANDIDATE, 3, has_cut)));
    }
}

#[test]
fn whole_copy_that_goes_on_before_the_present_opening_does_not_know_that_yet() {
    let change = Change {
        opens_at: 4,
        ..change(1, 3, 6)
    };
    let cut = Cut {
        at: point(3),
        void_before: 1,
        joined: 1,
        change,
    };
    let mut replica = Replica::new(whole_in_epoch(3), RING_BLOCKS, [span(0, 0)]);
    replica.receive(CANDIDATE, 3, &Message::JoinAt(cut));
    assert_eq!(write_superblock(&mut replica).incarnation, 1);
    let has_cut = Message::HasCut(cut);
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, has_cut)));
    assert!(!replica.copy(Point::default()).says(&change));
    replica.receive(CANDIDATE, 3, &Message::Superblock(change));
    replica.receive(CANDIDATE, 3, &Message::Append(span(3, 3)));
    replica.next_write().unwrap();
    replica.written(4);
    let ack = Message::Ack { durable: 4 };
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, ack)));
    let written = write_superblock(&mut replica);
    assert_eq!((written.incarnation, written.cut_position), (6, 4));
}

#[test]
fn cut_that_the_superblock_says_already_is_told_without_another_one() {
    let (mut replica, cut) = joiner(Superblock::new(false));
    replica.append(3, span(cut.at.position, 6));
    replica.receive(CANDIDATE, 3, &Message::JoinAt(cut));
    assert_eq!(replica.next_superblock(), None);
    let has_cut = Message::HasCut(cut);
    assert_eq!(replica.next_message(), Some((CANDIDATE, 3, has_cut)));
}
