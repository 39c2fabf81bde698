//! Three nodes on memory, with real logs: a [`WriteLog`] stands on the copy of whoever serves.

mod asking;
mod changes;
mod encrypted;
mod healing;
mod joining;
mod leases;
mod losing;
mod reading_back;
mod repairs;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use encrypted::{Toy, each_block};

use super::*;
use crate::base::cipher::BlockCipher;
use crate::base::io::SectorRange;
use crate::base::limits::{BLOCK_SECTORS, LOG_BYTES_MIN};
use crate::format::{EntryKind, LOG_HEADER_BLOCKS, Membership};
use crate::log::replay::{Found as Replayed, Replay};
use crate::log::write_log::{Entry, WriteLog};
use crate::replication::Point;
use crate::replication::record::{AckLevel, Config, Nodes, Seat, Shape, WhenShort};

const VOLUME: [u8; 16] = [7; 16];
const LOG: u64 = 99;
const REGION_BYTES: u64 = LOG_BYTES_MIN + LOG_HEADER_BLOCKS * BLOCK_BYTES as u64;

/// What stands on a log: it writes spans, and knows what has ended.
struct Writer {
    log: WriteLog,
    tokens: BTreeMap<Token, Option<u64>>,
    next_token: u64,
    is_fenced: bool,
    is_open: bool,
    told_short: Vec<bool>,
}

struct Node {
    disk: Vec<u8>,
    participant: Option<Participant>,
    writer: Option<Writer>,
    began: u32,
    stopped: u32,
    /// Until when what stands on its log may answer reads.
    lease: Nanos,
}

struct Wire {
    from: Member,
    to: Member,
    epoch: u64,
    message: Message,
    data: Vec<Buf>,
    /// From who leads, or an answer to it.
    is_of_leader: bool,
}

struct Net {
    nodes: Vec<Node>,
    now: Nanos,
    record: GroupRecord,
    wires: VecDeque<Wire>,
    /// Pairs that do not reach one another, leader first.
    cut: BTreeSet<(Member, Member)>,
    connected: BTreeSet<(Member, Member)>,
    /// Pairs whose link takes nothing at present, leader first.
    full: BTreeSet<(Member, Member)>,
    pool: Arc<Pool>,
    is_encrypted: bool,
    sent: usize,
    /// Reads that have ended: whose, and where.
    reads: Vec<(Member, u64)>,
    /// Repairs that have ended.
    repaired: Vec<Token>,
    /// Why a takeover stopped last.
    stop: Option<Stop>,
    /// Who could not be brought up, for want of which span.
    blocked: Vec<(Member, SpanId)>,
    /// A node whose writes do not end by themselves, and those that it has begun.
    slow: Option<(Member, Vec<Token>)>,
    /// Reads are kept under way: of whom, which, where, into what.
    held_reads: Option<Vec<(Member, Token, u64, BufMut)>>,
    /// A place of a node's medium that always says this.
    sticky: Option<(Member, usize, Vec<u8>)>,
    /// Links that were broken since somebody sent what it must not.
    drops: usize,
}

fn members(count: u16) -> Vec<Member> {
    (0..count).map(Member).collect()
}

fn times() -> Times {
    Times::default()
}

/// Whether a copy's superblocks name a key.
fn is_encrypted(disk: &[u8]) -> bool {
    let blocks = disk.chunks_exact(BLOCK_BYTES).take(2);
    let mut found = blocks.filter_map(|block| LogSuperblock::parse(block).ok());
    found.any(|superblock| superblock.data_key != [0; 16])
}

/// Replay a copy.
fn replay(disk: &[u8], pool: &Arc<Pool>) -> (WriteLog, Found) {
    let mut replay = Replay::new(VOLUME, disk.len() as u64);
    let is_encrypted = is_encrypted(disk);
    if is_encrypted {
        replay.authenticate(Arc::new(Toy));
    }
    let (mut spans, mut is_done) = (Vec::new(), false);
    while let Some(mut read) = replay.next_read(pool) {
        let at = read.offset as usize;
        let bytes = read.buf.len();
        read.buf.copy_from_slice(&disk[at..at + bytes]);
        if is_encrypted {
            each_block(read.offset, &mut read.buf, |number, block| {
                Toy.decrypt(number, block);
            });
        }
        let result = replay.read_done(Nanos(0), read.chunk, Ok(read.buf), |_, found| match found {
            Replayed::Span(span) => spans.push(SpanId::from(span)),
            Replayed::Done => is_done = true,
            _ => {}
        });
        result.expect("nothing is lost of it");
        if is_done {
            break;
        }
    }
    let superblock = *replay.superblock().expect("it was chosen");
    (replay.into_log(), Found { superblock, spans })
}

/// So many nodes with a copy each, at `all`.
fn shape_of(count: u16, copies_min: u8, when_short: WhenShort) -> Shape {
    Shape {
        nodes: members(count).into_iter().collect(),
        ack: AckLevel::All,
        copies_min,
        when_short,
    }
}

impl Writer {
    fn new(log: WriteLog) -> Self {
        Self {
            log,
            tokens: BTreeMap::new(),
            next_token: 0,
            is_fenced: false,
            is_open: false,
            told_short: Vec::new(),
        }
    }

    fn token(&mut self, end: Option<u64>) -> Token {
        self.next_token += 1;
        let token = Token(self.next_token);
        self.tokens.insert(token, end);
        token
    }

    fn ended(&mut self, completion: Completion) {
        let end = self
            .tokens
            .remove(&completion.token)
            .expect("it is under way");
        match (completion.result, end) {
            (Ok(_), Some(end)) => {
                self.log.span_written(Nanos(0), end);
            }
            (Ok(_), None) => self.is_open = true,
            (Err(error), _) => {
                assert_eq!(error, IoError::Fenced);
                self.is_fenced = true;
            }
        }
    }
}

impl Net {
    /// So many nodes, of which the first one has a log of its own, and the others are to join.
    fn new(count: u16, ack: AckLevel) -> Self {
        Self::made(count, ack, false)
    }

    fn made(count: u16, ack: AckLevel, is_encrypted: bool) -> Self {
        let pool = Pool::new(64 << 20);
        let first = Member(0);
        let config = Config {
            members: [Seat {
                member: first,
                joined: 1,
            }]
            .into_iter()
            .collect(),
            replicas: count as u8,
            ack,
            copies_min: 1,
            when_short: WhenShort::Wait,
        };
        let joiners: Nodes = members(count).into_iter().skip(1).collect();
        let record = GroupRecord::first(first, config, joiners);
        let nodes = (members(count).into_iter()).map(|member| {
            let is_whole = member == first;
            let mut disk = vec![0; REGION_BYTES as usize];
            let mut superblock = LogSuperblock::new(VOLUME, LOG, REGION_BYTES);
            superblock.incarnation = u64::from(is_whole).into();
            superblock.set_membership(Membership {
                promised: u64::from(is_whole),
                cut_position: 0,
                void_before: 0,
                joined: u64::from(is_whole),
                is_whole,
            });
            if is_encrypted {
                superblock.data_key = [6; 16];
            }
            superblock.seal_with(is_encrypted.then_some(&Toy as &dyn Authenticator));
            disk[..BLOCK_BYTES].copy_from_slice(zerocopy::IntoBytes::as_bytes(&superblock));
            Node {
                disk,
                participant: None,
                writer: None,
                began: 0,
                stopped: 0,
                lease: Nanos(0),
            }
        });
        let mut net = Self {
            nodes: nodes.collect(),
            now: Nanos(1),
            record,
            wires: VecDeque::new(),
            cut: BTreeSet::new(),
            connected: BTreeSet::new(),
            full: BTreeSet::new(),
            pool,
            is_encrypted,
            sent: 0,
            reads: Vec::new(),
            repaired: Vec::new(),
            stop: None,
            blocked: Vec::new(),
            slow: None,
            held_reads: None,
            drops: 0,
            sticky: None,
        };
        for member in members(count) {
            net.start(member);
        }
        net
    }

    /// Three nodes that have a copy each, with the first one as the primary.
    fn healthy(ack: AckLevel) -> Self {
        Self::new(3, ack).brought_up()
    }

    fn brought_up(self) -> Self {
        let mut net = self;
        net.take(Member(0));
        net.settle();
        assert_eq!(net.record.config.members.count(), 3, "{:?}", net.record);
        assert!(net.record.joiners.is_empty());
        net
    }

    fn node(&mut self, member: Member) -> &mut Node {
        &mut self.nodes[usize::from(member.0)]
    }

    fn participant(&mut self, member: Member) -> &mut Participant {
        self.node(member).participant.as_mut().expect("it is up")
    }

    fn writer(&mut self, member: Member) -> &mut Writer {
        self.node(member).writer.as_mut().expect("it serves")
    }

    fn start(&mut self, member: Member) {
        let pool = Arc::clone(&self.pool);
        let node = self.node(member);
        let (_, found) = replay(&node.disk, &pool);
        let keys = is_encrypted(&node.disk).then(|| Arc::new(Toy) as Arc<dyn LogKeys>);
        let mut participant = Participant::new(member, self.now, found, keys, pool, times());
        let (now, record) = (self.now, self.record.clone());
        participant.see(now, &record);
        self.node(member).participant = Some(participant);
    }

    fn kill(&mut self, member: Member) {
        let node = self.node(member);
        (node.participant, node.writer) = (None, None);
        self.wires
            .retain(|wire| wire.from != member && wire.to != member);
        let pairs = self.connected.iter().copied();
        let broken: Vec<_> = pairs
            .filter(|(a, b)| *a == member || *b == member)
            .collect();
        for pair in broken {
            self.disconnect(pair);
        }
    }

    fn disconnect(&mut self, (leader, member): (Member, Member)) {
        self.connected.remove(&(leader, member));
        let is_between = |wire: &Wire| {
            let ends = if wire.is_of_leader {
                (wire.from, wire.to)
            } else {
                (wire.to, wire.from)
            };
            ends == (leader, member)
        };
        self.wires.retain(|wire| !is_between(wire));
        let now = self.now;
        if let Some(participant) = &mut self.node(leader).participant {
            participant.disconnected(now, member);
        }
        if let Some(participant) = &mut self.node(member).participant {
            participant.leader_gone(now, leader);
        }
    }

    /// Have a node take the group.
    fn take(&mut self, candidate: Member) {
        let taking = self.record.taking(candidate);
        self.write_record(taking);
    }

    /// The first node, which serves, is asked to have the group become this.
    fn configure(&mut self, shape: Shape) {
        let now = self.now;
        assert!(self.participant(Member(0)).configure(now, shape));
        self.settle();
    }

    fn write_record(&mut self, record: GroupRecord) {
        self.record
            .check_next(&record)
            .expect("the record may follow");
        self.record = record.clone();
        let now = self.now;
        for node in &mut self.nodes {
            if let Some(participant) = &mut node.participant {
                participant.see(now, &record);
            }
        }
    }

    /// Let everything happen that needs no time.
    fn settle(&mut self) {
        let mut rounds = 0;
        while self.round() {
            rounds += 1;
            assert!(rounds < 100_000, "it never comes to rest");
        }
        for node in &self.nodes {
            if let Some(participant) = &node.participant {
                participant.check_invariants();
            }
        }
    }

    fn pass(&mut self, millis: u64) {
        let until = self.now.plus(Nanos::from_millis(millis));
        while self.now < until {
            self.now = self.now.plus(Nanos::from_millis(50)).min(until);
            let now = self.now;
            for node in &mut self.nodes {
                if let Some(participant) = &mut node.participant {
                    participant.poll(now);
                }
            }
            self.settle();
        }
    }

    fn round(&mut self) -> bool {
        let mut has_some = self.connect();
        for member in members(self.nodes.len() as u16) {
            has_some |= self.act(member);
            has_some |= self.send(member);
        }
        while let Some(wire) = self.wires.pop_front() {
            has_some = true;
            self.sent += 1;
            let now = self.now;
            if let Some(participant) = &mut self.node(wire.to).participant {
                participant.receive(now, wire.from, wire.epoch, &wire.message, wire.data);
            }
        }
        has_some
    }

    /// Make and unmake links as leaders want them.
    fn connect(&mut self) -> bool {
        let mut has_some = false;
        for leader in members(self.nodes.len() as u16) {
            let Some(participant) = &self.node(leader).participant else {
                continue;
            };
            let wanted = participant.peers();
            for member in wanted {
                let pair = (leader, member);
                let is_up = self.node(member).participant.is_some() && !self.cut.contains(&pair);
                if is_up && self.connected.insert(pair) {
                    let now = self.now;
                    self.participant(leader).connected(now, member);
                    has_some = true;
                } else if !is_up && self.connected.contains(&pair) {
                    self.disconnect(pair);
                    has_some = true;
                }
            }
        }
        has_some
    }

    fn send(&mut self, from: Member) -> bool {
        let mut has_some = false;
        let now = self.now;
        for to in members(self.nodes.len() as u16) {
            if !self.connected.contains(&(from, to)) || self.full.contains(&(from, to)) {
                continue;
            }
            while let Some(participant) = &mut self.nodes[usize::from(from.0)].participant
                && let Some((epoch, message, data)) = participant.next_send(to)
            {
                self.wires.push_back(Wire {
                    from,
                    to,
                    epoch,
                    message: message.clone(),
                    data: data.to_vec(),
                    is_of_leader: true,
                });
                participant.sent(now, to);
                has_some = true;
            }
        }
        has_some
    }

    fn act(&mut self, member: Member) -> bool {
        let Some(participant) = &mut self.node(member).participant else {
            return false;
        };
        let acts = participant.take_acts();
        let has_some = !acts.is_empty();
        for act in acts {
            self.perform(member, act);
        }
        has_some
    }

    fn perform(&mut self, member: Member, act: Act) {
        let now = self.now;
        match act {
            Act::Write {
                token,
                offset,
                data,
                ..
            } => {
                let mut at = offset as usize;
                for part in &data {
                    self.node(member).disk[at..at + part.len()].copy_from_slice(part);
                    at += part.len();
                }
                if let Some((_, at, says)) = self.sticky.clone().filter(|(of, ..)| *of == member) {
                    self.node(member).disk[at..at + says.len()].copy_from_slice(&says);
                }
                if let Some((_, begun)) = self.slow.as_mut().filter(|(slow, _)| *slow == member) {
                    return begun.push(token);
                }
                self.participant(member)
                    .finished(now, token, Ok(Done::Written));
            }
            Act::Read {
                token, offset, buf, ..
            } => match &mut self.held_reads {
                Some(held) => held.push((member, token, offset, buf)),
                None => self.end_read(member, token, offset, buf),
            },
            Act::Ended(completion) => {
                if let Some(writer) = &mut self.node(member).writer {
                    writer.ended(completion);
                }
            }
            Act::Answer {
                to,
                epoch,
                message,
                data,
            } => {
                if self.connected.contains(&(to, member)) {
                    self.wires.push_back(Wire {
                        from: member,
                        to,
                        epoch,
                        message,
                        data,
                        is_of_leader: false,
                    });
                }
            }
            Act::Ask(record) => {
                if self.record.check_next(&record).is_ok() {
                    self.write_record(record);
                } else {
                    let last = self.record.clone();
                    self.participant(member).see(now, &last);
                }
            }
            Act::Repaired(token) => self.repaired.push(token),
            Act::Blocked { member, span } => self.blocked.push((member, span)),
            Act::Break(peer) => self.disconnect((member, peer)),
            Act::Drop(leader) => {
                self.drops += 1;
                self.disconnect((leader, member));
            }
            Act::Began => self.open(member),
            Act::Lease { until } => self.node(member).lease = until,
            Act::Fenced => self.node(member).writer = None,
            Act::Short(refuses) => self.writer(member).told_short.push(refuses),
            Act::Stopped(why) => {
                self.node(member).stopped += 1;
                self.stop = Some(why);
            }
            Act::Failed(error) => panic!("{error}"),
        }
    }

    fn end_read(&mut self, member: Member, token: Token, offset: u64, mut buf: BufMut) {
        let (at, bytes, now) = (offset as usize, buf.len(), self.now);
        self.reads.push((member, offset));
        buf.copy_from_slice(&self.node(member).disk[at..at + bytes]);
        self.participant(member)
            .finished(now, token, Ok(Done::Read(buf)));
    }

    /// Have something stand on the log of a node that serves.
    fn open(&mut self, member: Member) {
        let pool = Arc::clone(&self.pool);
        let node = self.node(member);
        node.began += 1;
        node.participant.as_mut().expect("it is up").stand();
        let (mut log, _) = replay(&node.disk, &pool);
        let (offset, block) = log.superblock_for_opening();
        node.writer = Some(Writer::new(log));
        self.write_superblock(member, offset, block);
    }

    fn write_superblock(&mut self, member: Member, offset: u64, block: Buf) {
        let token = self.writer(member).token(None);
        let now = self.now;
        let participant = self.participant(member);
        participant.announce(token, offset, core::slice::from_ref(&block));
        participant.write(now, token, Vec::from([block]), None);
    }

    /// Write a span of so many blocks that say this byte.
    fn write(&mut self, member: Member, blocks: u64, byte: u8) {
        let mut buf = self.pool.alloc(blocks as usize * BLOCK_BYTES).unwrap();
        buf.fill(byte);
        let entry = Entry {
            range: SectorRange::new(0, blocks * BLOCK_SECTORS),
            kind: EntryKind::Write,
            no_hole: false,
            position: 0,
            stored: None,
            data: Some(buf.freeze()),
            held_blocks: 0,
        };
        let now = self.now;
        let log = &mut self.writer(member).log;
        assert!(log.has_room(blocks, None));
        log.append(now, entry, None);
        log.seal(now);
        while let Some(write) = self.writer(member).log.next_write(8) {
            let token = self.writer(member).token(Some(write.end));
            let data = self.encrypted(write.offset, &write.data);
            let participant = self.participant(member);
            participant.announce(token, write.offset, &write.data);
            participant.write(now, token, data, None);
        }
    }

    /// What a driver makes of a write to the ring.
    fn encrypted(&self, offset: u64, data: &[Buf]) -> Vec<Buf> {
        if !self.is_encrypted {
            return data.to_vec();
        }
        let mut at = offset;
        let parts = data.iter().map(|part| {
            let mut buf = self.pool.alloc(part.len()).unwrap();
            buf.copy_from_slice(part);
            each_block(at, &mut buf, |number, block| Toy.encrypt(number, block));
            at += part.len() as u64;
            buf.freeze()
        });
        parts.collect()
    }

    /// Have all that is committed retired.
    fn retire(&mut self, member: Member) {
        let log = &mut self.writer(member).log;
        let spans = log.spans().len();
        let tail = log.tail_after(spans);
        let (offset, block) = log.superblock_for(&tail, false);
        self.writer(member).is_open = false;
        self.write_superblock(member, offset, block);
        self.settle();
        let writer = self.writer(member);
        assert!(writer.is_open, "the superblock is durable at all");
        writer.log.retire(spans).for_each(drop);
    }

    /// The byte that each span of a copy says, as a replay finds it.
    fn bytes(&mut self, member: Member) -> Vec<u8> {
        let pool = Arc::clone(&self.pool);
        let node = self.node(member);
        let (log, found) = replay(&node.disk, &pool);
        let at = |span: &SpanId| {
            let (offset, _) = log.locate(span.end.position - 1);
            let mut block = node.disk[offset as usize..][..BLOCK_BYTES].to_vec();
            if is_encrypted(&node.disk) {
                each_block(offset, &mut block, |number, block| {
                    Toy.decrypt(number, block);
                });
            }
            block[0]
        };
        found.spans.iter().map(at).collect()
    }

    fn committed(&mut self, member: Member) -> u64 {
        self.writer(member).log.durable()
    }
}

#[test]
fn joiners_get_the_log_and_become_members() {
    let mut net = Net::new(3, AckLevel::All);
    net.take(Member(0));
    net.settle();
    assert_eq!(net.record.config.members.count(), 3);
    assert!(net.writer(Member(0)).is_open);
    net.write(Member(0), 3, 1);
    net.write(Member(0), 1, 2);
    net.settle();
    for member in members(3) {
        assert_eq!(net.bytes(member), [1, 2], "{member}");
    }
    let ring = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;
    let first = net.nodes[0].disk[ring..].to_vec();
    assert!(
        net.nodes[1].disk[ring..] == first,
        "the rings are the same bytes"
    );
}

#[test]
fn write_ends_once_as_many_members_have_it_as_the_level_wants() {
    for (ack, ends) in [
        (AckLevel::One, true),
        (AckLevel::Majority, true),
        (AckLevel::All, false),
    ] {
        let mut net = Net::healthy(ack);
        net.cut.insert((Member(0), Member(2)));
        net.write(Member(0), 1, 1);
        net.settle();
        assert_eq!(net.writer(Member(0)).tokens.is_empty(), ends, "{ack:?}");
        // Who is late leaves, and then it ends in any case.
        net.pass(3_000);
        assert!(net.writer(Member(0)).tokens.is_empty(), "{ack:?}");
        assert!(!net.record.config.members.contains(Member(2)));
        net.cut.clear();
        net.pass(200);
        assert!(
            net.record.config.members.contains(Member(2)),
            "it joined again"
        );
        assert_eq!(net.bytes(Member(2)), [1]);
    }
}

#[test]
fn link_that_is_slow_holds_up_neither_others_nor_memory_of_who_writes_the_log() {
    let mut net = Net::healthy(AckLevel::Majority);
    net.full.insert((Member(0), Member(2)));
    // More than there is memory for, of spans that are under way, and more than wait for one member.
    for byte in 1..100 {
        net.write(Member(0), 1, byte);
        net.settle();
        assert!(
            net.writer(Member(0)).tokens.is_empty(),
            "two of three have it"
        );
    }
    net.full.clear();
    net.settle();
    let expected: Vec<u8> = (1..100).collect();
    assert_eq!(net.bytes(Member(2)), expected);
}

#[test]
fn joiner_that_was_none_for_a_moment_is_brought_up_over_the_link_that_was_there() {
    let mut net = Net::new(2, AckLevel::All);
    net.cut.insert((Member(0), Member(1)));
    net.take(Member(0));
    net.settle();
    net.full.insert((Member(0), Member(1)));
    net.cut.clear();
    net.settle();
    let none = net.record.with_joiners(Nodes::new());
    net.write_record(none);
    net.settle();
    let again = net.record.with_joiners([Member(1)].into_iter().collect());
    net.write_record(again);
    net.full.clear();
    net.settle();
    assert_eq!(net.record.config.members.count(), 2, "{:?}", net.record);
}

#[test]
fn member_that_was_away_for_a_moment_is_sent_what_it_lacks_from_the_medium() {
    let mut net = Net::healthy(AckLevel::Majority);
    net.cut.insert((Member(0), Member(2)));
    for byte in 1..100 {
        net.write(Member(0), 250, byte);
        net.settle();
        net.retire(Member(0));
        if byte > 90 {
            net.cut.clear();
        }
    }
    net.pass(3_000);
    assert_eq!(net.record.config.members.count(), 3);
    net.write(Member(0), 1, 200);
    net.settle();
    assert_eq!(net.bytes(Member(2)).last(), Some(&200));
}

#[test]
fn what_was_acknowledged_is_there_after_the_primary_was_lost() {
    for survivor in [Member(1), Member(2)] {
        let mut net = Net::healthy(AckLevel::Majority);
        for byte in 1..20 {
            net.write(Member(0), u64::from(byte), byte);
            net.settle();
        }
        assert!(net.writer(Member(0)).tokens.is_empty());
        let committed = net.committed(Member(0));
        net.kill(Member(0));
        net.take(survivor);
        net.pass(3_000);
        assert_eq!(net.node(survivor).began, 1);
        assert_eq!(net.writer(survivor).log.durable(), committed);
        let expected: Vec<u8> = (1..20).collect();
        assert_eq!(net.bytes(survivor), expected);
        net.write(survivor, 1, 100);
        net.settle();
        assert!(net.writer(survivor).tokens.is_empty());
        net.start(Member(0));
        net.pass(3_000);
        assert!(net.record.config.members.contains(Member(0)));
        assert_eq!(net.bytes(Member(0)).last(), Some(&100));
    }
}

#[test]
fn primary_that_was_taken_over_is_fenced_and_joins_with_what_others_have() {
    let mut net = Net::healthy(AckLevel::All);
    net.write(Member(0), 1, 1);
    net.settle();
    // The old primary hears of nothing while somebody else takes the group.
    for member in [1, 2] {
        net.cut.insert((Member(0), Member(member)));
        net.cut.insert((Member(member), Member(0)));
    }
    net.write(Member(0), 1, 66);
    net.settle();
    assert_eq!(net.writer(Member(0)).tokens.len(), 1, "only it has that");
    let taking = net.record.taking(Member(1));
    net.record = taking.clone();
    let now = net.now;
    net.participant(Member(1)).see(now, &taking);
    net.participant(Member(2)).see(now, &taking);
    net.pass(8_000);
    assert_eq!(net.node(Member(1)).began, 1);
    net.write(Member(1), 1, 2);
    net.settle();
    net.cut.clear();
    let (now, record) = (net.now, net.record.clone());
    net.participant(Member(0)).see(now, &record);
    net.pass(5_000);
    assert!(net.node(Member(0)).writer.is_none(), "it was told to end");
    assert_eq!(net.record.config.members.count(), 3, "{:?}", net.record);
    assert_eq!(net.bytes(Member(0)), [1, 2], "what only it had was cut off");
}

#[test]
fn what_a_crash_left_behind_a_lost_span_does_not_come_back_with_that_span() {
    let mut net = Net::healthy(AckLevel::All);
    net.write(Member(0), 1, 1);
    net.send(Member(0));
    net.full
        .extend([(Member(0), Member(1)), (Member(0), Member(2))]);
    net.write(Member(0), 1, 2);
    net.settle();
    // Both were under way at once, the others got the first one, and the crash took that here.
    net.kill(Member(0));
    let disk = &mut net.node(Member(0)).disk;
    let mut blocks = disk.chunks_mut(BLOCK_BYTES);
    let lost = blocks
        .find(|block| block.iter().all(|byte| *byte == 1))
        .expect("it was written");
    lost.fill(0);
    net.full.clear();
    net.start(Member(0));
    net.take(Member(0));
    net.pass(3_000);
    assert_eq!(net.bytes(Member(0)), [1]);
    net.write(Member(0), 1, 3);
    net.settle();
    for member in members(3) {
        assert_eq!(net.bytes(member), [1, 3], "{member}");
    }
}

#[test]
fn ring_is_used_again_once_members_have_the_tail() {
    let mut net = Net::healthy(AckLevel::All);
    let blocks = net.writer(Member(0)).log.ring_blocks();
    let laps = 3 * blocks / 250;
    for round in 0..laps {
        net.write(Member(0), 250, round as u8);
        net.settle();
        net.retire(Member(0));
    }
    net.write(Member(0), 1, 250);
    net.settle();
    assert!(net.writer(Member(0)).log.head() > 2 * blocks);
    for member in members(3) {
        assert_eq!(net.bytes(member), [250]);
    }
    net.kill(Member(0));
    net.take(Member(2));
    net.pass(3_000);
    assert_eq!(net.bytes(Member(2)), [250]);
}

#[test]
fn joiner_whose_medium_spoils_what_it_is_given_does_not_become_a_member() {
    let mut net = Net::new(2, AckLevel::All);
    net.cut.insert((Member(0), Member(1)));
    net.take(Member(0));
    net.settle();
    // More than a joiner may lack when it begins to read back.
    for _ in 0..6 {
        net.write(Member(0), 250, 171);
        net.settle();
    }
    net.cut.clear();
    // Whatever it writes of that turns out otherwise.
    let mut spoiled = 0;
    for _ in 0..60 {
        net.round();
        let ring = LOG_HEADER_BLOCKS as usize * BLOCK_BYTES;
        let disk = &mut net.nodes[1].disk[ring..];
        if let Some(place) = disk.iter().position(|byte| *byte == 171) {
            disk[place] = 9;
            spoiled += 1;
        }
    }
    assert!(spoiled > 1, "it was brought up more than once");
    assert_eq!(net.record.config.members.count(), 1);
    // It does not spoil any more.
    net.pass(70_000);
    assert_eq!(net.record.config.members.count(), 2);
    assert_eq!(net.bytes(Member(1)), [171; 6]);
}

#[test]
fn leader_that_sends_another_log_is_dropped_and_the_copy_stays_as_it_is() {
    let mut net = Net::healthy(AckLevel::All);
    net.write(Member(0), 1, 1);
    net.settle();
    let before = net.nodes[1].disk.clone();
    let head = net.participant(Member(1)).replica.head();
    let span = SpanId {
        start: head,
        end: Point {
            position: head.position + 2,
            chain: 5,
        },
        blocks: 2,
        incarnation: 2,
        evidence: 0,
    };
    let now = net.now;
    let epoch = net.record.epoch;
    let mut data = net.pool.alloc(2 * BLOCK_BYTES).unwrap();
    data.fill(3);
    let participant = net.participant(Member(1));
    participant.receive(
        now,
        Member(0),
        epoch,
        &Message::Append(span),
        vec![data.freeze()],
    );
    let acts = participant.take_acts();
    assert!(matches!(acts[..], [Act::Drop(Member(0))]), "{acts:?}");
    assert!(net.nodes[1].disk == before);
}

#[test]
fn write_that_fails_ends_with_its_error_and_nothing_more_is_written() {
    let mut net = Net::healthy(AckLevel::All);
    net.write(Member(0), 1, 1);
    let participant = net.participant(Member(0));
    let acts = participant.take_acts();
    let token = acts.iter().find_map(|act| match act {
        Act::Write { token, .. } => Some(*token),
        _ => None,
    });
    participant.finished(Nanos(5), token.unwrap(), Err(IoError::NoSpace));
    let acts = participant.take_acts();
    assert!(matches!(acts[0], Act::Failed(IoError::NoSpace)), "{acts:?}");
    assert!(acts.iter().any(|act| matches!(
        act,
        Act::Ended(Completion {
            result: Err(IoError::NoSpace),
            ..
        })
    )));
    let _ = Box::new(acts);
}
