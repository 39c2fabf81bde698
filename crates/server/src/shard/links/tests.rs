//! Two nodes in one process, each with a ring of its own, over loopback; and peers that behave badly.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::time::Instant;

use hdcs_core::base::limits::{BLOCK_BYTES, JOIN_POINTS_MAX, WIRE_PARTS_MAX};
use hdcs_core::replication::message::{Change, Copy, Cut, Question};
use hdcs_core::replication::{Point, SpanId};
use hdcs_core::wire::replication::{LogName, request};
use hdcs_core::wire::{BootId, ClusterId};
use hdcs_device::ring::RingConfig;
use hdcs_messenger::event::Ask;
use hdcs_messenger::handshake::Versions;

use super::window::WINDOW_BLOCKS_MIN;
use super::*;

mod bad_peers;
mod breaks;
mod pairs;

const CLUSTER: ClusterId = ClusterId([0xc1; 16]);
const ONE: Member = Member(1);
const TWO: Member = Member(2);
const POOL_BYTES: usize = 16 << 20;
const LOG: LogName = LogName {
    volume: [7; 16],
    number: 3,
};
/// How long something that has to happen may take.
const PATIENCE: Duration = Duration::from_secs(20);

fn about(epoch: u64) -> About {
    About { log: LOG, epoch }
}

fn at(position: u64) -> Point {
    Point {
        position,
        chain: 1000 + position,
    }
}

/// A span of so many blocks that begins where `start` says, and skips blocks before.
fn span(start: u64, skipped: u64, blocks: u32) -> SpanId {
    SpanId {
        start: at(start),
        end: at(start + skipped + u64::from(blocks)),
        blocks,
        incarnation: 4,
        evidence: start,
    }
}

fn copy() -> Copy {
    Copy {
        promised: 5,
        head: at(90),
        tail: at(70),
        sync_points: 13,
        incarnation: 14,
        is_unflushed: true,
        joined: 15,
        is_whole: true,
        lease_left_ms: 0,
    }
}

fn superblock(number: u64) -> Message {
    Message::Superblock(change(number))
}

fn change(number: u64) -> Change {
    Change {
        number,
        tail: at(70),
        ..Change::default()
    }
}

fn node(member: Member) -> NodeId {
    NodeId([member.0 as u8; 16])
}

fn own(member: Member, boots: u64) -> Own {
    Own {
        identity: Identity {
            cluster: CLUSTER,
            node: node(member),
            number: u32::from(member.0),
            boot: BootId([boots as u8; 16]),
            boots,
        },
        versions: Versions::KNOWN,
        credit_bytes: 8 << 20,
    }
}

/// A node: its links, its ring, and who waits for it to be connected to.
struct Node {
    links: Links,
    ring: Ring,
    listener: TcpListener,
    pool: Arc<Pool>,
    /// That were not looked at yet.
    events: VecDeque<Event>,
    origin: Instant,
}

impl Node {
    fn new(member: Member, listener: TcpListener, peer: PeerConfig, settings: &Settings) -> Self {
        listener.set_nonblocking(true).unwrap();
        let pool = Pool::new(POOL_BYTES);
        let links = Links::new(LinksConfig {
            own: own(member, settings.boots),
            peers: vec![peer],
            credentials: settings.credentials[usize::from(member.0) - 1].clone(),
            pool: Arc::clone(&pool),
            seed: 7,
            times: settings.times,
        });
        Self {
            links,
            ring: Ring::new(RingConfig::default()).unwrap(),
            listener,
            pool,
            events: VecDeque::new(),
            origin: Instant::now(),
        }
    }

    /// One turn, as a shard has them.
    fn turn(&mut self) {
        let timeout = Some(Duration::from_millis(1));
        self.ring.submit_and_wait(timeout).unwrap();
        let mut finished = Vec::new();
        self.ring.reap(&mut finished);
        for one in finished {
            if one.owner != Owner::Shard {
                self.links.finished(one);
            }
        }
        if let Ok((socket, from)) = self.listener.accept() {
            self.links.accepted(socket.into(), from);
        }
        let now = Nanos(self.origin.elapsed().as_nanos() as u64);
        self.links.tick(now);
        while let Some(event) = self.links.next_event() {
            self.events.push_back(event);
        }
        self.links.start_io(&mut self.ring);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.ring.quiesce(), "the kernel uses no memory any more");
        }
    }
}

struct Settings {
    boots: u64,
    times: Times,
    credentials: [Option<Credentials>; 2],
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            boots: 1,
            times: Times::default(),
            credentials: [None, None],
        }
    }
}

/// Both nodes.
struct Rig {
    nodes: [Node; 2],
}

impl Rig {
    fn new(settings: &Settings) -> Self {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = [0, 1].map(|index: usize| listeners[index].local_addr().unwrap());
        let [first, second] = listeners;
        let peer = |member, address| PeerConfig {
            member,
            node: node(member),
            address,
        };
        Self {
            nodes: [
                Node::new(ONE, first, peer(TWO, addresses[1]), settings),
                Node::new(TWO, second, peer(ONE, addresses[0]), settings),
            ],
        }
    }

    /// Two nodes of which the first leads, and has its pair.
    fn paired(settings: &Settings) -> Self {
        let mut rig = Self::new(settings);
        rig.one().links.want(TWO);
        rig.until(ONE, "Connected", |event| {
            matches!(event, Event::Connected(TWO)).then_some(())
        });
        rig.until(TWO, "PeerConnected", |event| {
            matches!(event, Event::PeerConnected(ONE)).then_some(())
        });
        rig
    }

    fn one(&mut self) -> &mut Node {
        &mut self.nodes[0]
    }

    fn two(&mut self) -> &mut Node {
        &mut self.nodes[1]
    }

    fn turn(&mut self) {
        for node in &mut self.nodes {
            node.turn();
        }
    }

    /// Turn until the next event of a node is there, and have it looked at.
    fn until<T>(
        &mut self,
        member: Member,
        what: &str,
        look: impl FnOnce(&Event) -> Option<T>,
    ) -> T {
        let event = self.next(member, what);
        look(&event).unwrap_or_else(|| panic!("{event:?} is not {what}"))
    }

    fn next(&mut self, member: Member, what: &str) -> Event {
        let started = Instant::now();
        loop {
            let node = &mut self.nodes[usize::from(member.0) - 1];
            match node.events.pop_front() {
                // What waited for room may have had it already.
                Some(Event::Room(_)) if what != "Room" => {}
                Some(event) => return event,
                None => {}
            }
            assert!(started.elapsed() < PATIENCE, "{what} does not come");
            self.turn();
        }
    }

    /// The next message of a node.
    fn received(&mut self, member: Member, what: &str) -> Received {
        match self.next(member, what) {
            Event::Received(received) => received,
            event => panic!("{event:?} is not {what}"),
        }
    }

    /// Turn until this holds.
    fn turn_until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            assert!(started.elapsed() < PATIENCE, "never: {what}");
            self.turn();
        }
    }

    /// Some turns, in which nothing may happen.
    fn nothing_happens(&mut self) {
        for _ in 0..30 {
            self.turn();
        }
        for node in &mut self.nodes {
            node.events.retain(|event| !matches!(event, Event::Room(_)));
            assert!(node.events.is_empty(), "{:?}", node.events);
        }
    }

    /// Every buffer is back.
    fn is_clean(&mut self) {
        self.turn_until("memory back", |rig| {
            let mut pools = rig.nodes.iter().map(|node| &node.pool);
            pools.all(|pool| pool.free_bytes() == pool.total_bytes())
        });
    }
}

/// Data of memory of its own, whose bytes tell it from other data.
fn data(blocks: u32, seed: u8) -> Vec<Buf> {
    let pool = Pool::new(blocks as usize * BLOCK_BYTES);
    let pieces = (0..blocks).map(|index| {
        let mut piece = pool.alloc(BLOCK_BYTES).unwrap();
        piece.fill(seed.wrapping_add(index as u8));
        piece.freeze()
    });
    pieces.collect()
}

fn joined(parts: &[Buf]) -> Vec<u8> {
    parts.iter().flat_map(|part| part.iter().copied()).collect()
}
