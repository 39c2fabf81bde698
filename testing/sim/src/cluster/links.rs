//! Sending and receiving: what nodes have for one another, over [`super::link`].

use hdcs_core::base::buf::Buf;
use hdcs_core::base::io::Nanos;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::LOG_HEADER_BLOCKS;
use hdcs_core::replication::Member;
use hdcs_core::replication::message::Message;

use super::Plant;
use super::link::{Arrival, ConnectionId, End, Lane, Pair, Wire};
use super::scenario::RING_BLOCKS;
use super::world::{ClusterWorld, Happening};

/// A member that could not be reached is tried again after so long.
const CONNECT_AGAIN: Nanos = Nanos::from_millis(60);
/// An end that gets nothing from the other one knows that the connection is broken after so long at most.
const SILENT_MAX_MILLIS: u64 = 3_000;

/// A message that comes twice comes again after so long at most: soon, or when the connection may be another one.
const REPEAT_MAX_MICROS: [u64; 2] = [20_000, 2_000_000];

/// What becomes of a message in a world whose links do not hold to their contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disorder {
    Twice,
    /// With the one before it.
    Exchanged,
    /// Its span is sent as it was before it was encrypted.
    Clear,
}

/// Whether whoever gets a message tells by what it says whether it comes in its turn: by an epoch and a position or number. The
/// others are for links that lose, repeat and exchange nothing, as TCP's do.
fn is_checked(message: &Message) -> bool {
    matches!(
        message,
        Message::Append(_)
            | Message::Ack { .. }
            | Message::Superblock(_)
            | Message::Named { .. }
            | Message::Beat { .. }
            | Message::Echo { .. }
            | Message::ReadLog { .. }
            | Message::LogData(_)
    )
}

/// What planted bugs have a message to a member say.
fn spoil(message: &mut Message, plant: Option<Plant>) {
    match (plant, message) {
        (Some(Plant::PromiseWithoutWaiting), Message::Beat { lease_ms, .. }) => *lease_ms = 0,
        (Some(Plant::LostMark), Message::Superblock(change)) => change.is_unflushed = false,
        _ => {}
    }
}

/// What the trace calls a message, and the position or number in it.
fn name(message: &Message) -> (&'static str, u64) {
    match message {
        Message::Attach => ("attach", 0),
        Message::Attached(copy) => ("attached", copy.head.position),
        Message::Append(span) => ("append", span.end.position),
        Message::Ack { durable } => ("ack", *durable),
        Message::Superblock(change) => ("superblock", change.number),
        Message::Named { number } => ("named", *number),
        Message::Fenced { promised } => ("fenced", *promised),
        Message::Promise { floor } => ("promise", floor.position),
        Message::Promised(copy) => ("promised", copy.head.position),
        Message::ReadLog { after } => ("read log", after.position),
        Message::LogData(span) => ("log data", span.end.position),
        Message::Beat { number, .. } => ("beat", *number),
        Message::Echo { number } => ("echo", *number),
        Message::Join => ("join", 0),
        Message::Joining { points } => ("joining", points.len() as u64),
        Message::JoinAt(cut) => ("join at", cut.at.position),
        Message::HasCut(cut) => ("has cut", cut.at.position),
        Message::Verify { up_to } => ("verify", up_to.position),
        Message::NotWhole { up_to } => ("not whole", up_to.position),
        Message::Verified { up_to } => ("verified", up_to.position),
        Message::Nothing(_) => ("nothing", 0),
    }
}

impl ClusterWorld {
    /// Send what a node has for others. Returns whether there was anything.
    pub(super) fn send(&mut self, node: usize) -> bool {
        let mut has_some = false;
        for member in 0..self.nodes.len() {
            while self.links.present((node, member), End::Leader).is_some()
                && self.links.under_way((node, member)) < self.scenario.window
            {
                let now = self.nodes[node].now(self.engine.now());
                let Some(up) = self.nodes[node].running() else {
                    return has_some;
                };
                let to = Member(member as u16);
                let Some((epoch, message, data)) = up.participant.next_send(to) else {
                    break;
                };
                let (mut message, data) = (message.clone(), data.to_vec());
                spoil(&mut message, self.plant);
                up.participant.sent(now, to);
                has_some = true;
                if !self.forge(node, member, epoch, &message) {
                    let wire = Wire {
                        epoch,
                        message,
                        data,
                    };
                    self.put((node, member), End::Member, wire);
                }
            }
        }
        has_some
    }

    fn put(&mut self, pair: Pair, to: End, mut wire: Wire) {
        if is_lost(self) {
            let (what, number) = name(&wire.message);
            self.engine
                .note("lost", [pair.0 as u64, pair.1 as u64, 0, 0]);
            self.engine.note(what, [0, 0, wire.epoch, number]);
            self.coverage.lost_messages += 1;
            return;
        }
        let lane = Lane::of(to, &wire.message);
        let pause = self.scenario.link.draw(&mut self.random);
        let at = self.engine.now().plus(pause);
        let disorder = self.draw_disorder(&wire.message);
        if disorder == Some(Disorder::Clear) {
            send_clear(self, &mut wire);
        }
        let again = (disorder == Some(Disorder::Twice)).then(|| wire.clone());
        let Some((connection, at)) = self.links.send(pair, lane, wire, at) else {
            return;
        };
        self.engine.at(at, Happening::Deliver { connection, lane });
        let is_exchanged = disorder == Some(Disorder::Exchanged)
            && (self.links).exchange(connection, lane, is_checked);
        self.coverage.unruly += u64::from(is_exchanged || again.is_some());
        if let Some(wire) = again {
            let max = REPEAT_MAX_MICROS[self.random.usize(..REPEAT_MAX_MICROS.len())];
            let pause = Nanos::from_micros(self.random.u64(1..max));
            let happening = Happening::Repeat {
                connection,
                pair,
                lane,
                wire,
            };
            self.engine.after(pause, happening);
        }
    }

    fn draw_disorder(&mut self, message: &Message) -> Option<Disorder> {
        let one_in = self.scenario.unruly_one_in;
        let is_drawn = one_in > 0 && !self.is_calm && self.random.u32(..one_in) == 0;
        if !is_drawn || !is_checked(message) {
            return None;
        }
        let has_span = matches!(message, Message::Append(_) | Message::LogData(_));
        let disorders = [Disorder::Twice, Disorder::Exchanged, Disorder::Clear];
        let count = 2 + usize::from(has_span && self.scenario.cipher.encrypts());
        Some(disorders[self.random.usize(..count)])
    }

    /// What planted bugs make of a message to a member. Returns whether it does not go there.
    fn forge(&mut self, node: usize, member: usize, epoch: u64, message: &Message) -> bool {
        let (forged, is_kept) = match (self.plant, message) {
            (Some(Plant::EarlyAck), Message::Append(span)) => {
                let durable = span.end.position;
                (Message::Ack { durable }, false)
            }
            (Some(Plant::ForgedVerify), Message::Verify { up_to }) => {
                (Message::Verified { up_to: *up_to }, true)
            }
            _ => return false,
        };
        let now = self.nodes[node].now(self.engine.now());
        if let Some(up) = self.nodes[node].running() {
            up.participant
                .receive(now, Member(member as u16), epoch, &forged, Vec::new());
        }
        is_kept
    }

    /// Answer a leader.
    pub(super) fn answer(
        &mut self,
        node: usize,
        to: Member,
        epoch: u64,
        message: Message,
        data: Vec<Buf>,
    ) {
        let pair = (usize::from(to.0), node);
        self.put(
            pair,
            End::Leader,
            Wire {
                epoch,
                message,
                data,
            },
        );
    }

    /// A message arrives, unless nothing gets through.
    pub(super) fn deliver(&mut self, connection: ConnectionId, lane: Lane) {
        let nodes = &self.nodes;
        let arrival = self
            .links
            .arrive(connection, lane, |to| nodes[to].paused.is_none());
        let Arrival::Message(from, to, wire) = arrival else {
            return;
        };
        let now = self.nodes[to].now(self.engine.now());
        let Some(up) = self.nodes[to].running() else {
            return;
        };
        let Wire {
            epoch,
            message,
            data,
        } = wire;
        let (what, number) = name(&message);
        self.engine
            .note(what, [from as u64, to as u64, epoch, number]);
        up.participant
            .receive(now, Member(from as u16), epoch, &message, data);
        self.coverage.messages += 1;
        self.touched.insert(to);
        // There is room for more.
        self.touched.insert(from);
    }

    /// Reach those whom a node has to lead.
    pub(super) fn want_links(&mut self, node: usize) {
        let Some(up) = self.nodes[node].running() else {
            return;
        };
        for member in up.participant.peers() {
            let pair = (node, usize::from(member.0));
            if self.links.begin(pair) {
                let pause = self.scenario.link.draw(&mut self.random);
                self.engine.after(pause, Happening::Connect { pair });
            }
        }
    }

    /// Try to reach a member.
    pub(super) fn connect(&mut self, pair: Pair) {
        let (leader, member) = pair;
        self.links.give_up(pair);
        let wants = self.nodes[leader]
            .running()
            .is_some_and(|up| up.participant.peers().contains(&Member(member as u16)));
        if !wants {
            // A leader that stands still tries again when it goes on.
            return;
        }
        if !self.nodes[member].runs() || self.links.is_cut(leader, member) {
            self.links.begin(pair);
            self.engine
                .after(CONNECT_AGAIN, Happening::Connect { pair });
            return;
        }
        self.close_end(pair, End::Leader);
        self.close_end(pair, End::Member);
        self.links.connect(pair);
        self.coverage.connections += 1;
        self.engine
            .note("connects", [leader as u64, member as u64, 0, 0]);
        let now = self.nodes[leader].now(self.engine.now());
        if let Some(up) = self.nodes[leader].running() {
            up.participant.connected(now, Member(member as u16));
        }
        self.touched.insert(leader);
    }

    /// An end learns that its connection is broken.
    pub(super) fn closed(&mut self, connection: ConnectionId, pair: Pair, end: End) {
        let node = if end == End::Leader { pair.0 } else { pair.1 };
        if self.nodes[node].paused.is_some() {
            self.nodes[node].inbox.push(Happening::Closed {
                connection,
                pair,
                end,
            });
        } else if self.links.present(pair, end) == Some(connection) {
            self.close_end(pair, end);
        }
    }

    /// An end closes its connection, and its node is told.
    pub(super) fn close_end(&mut self, pair: Pair, end: End) {
        let Some(connection) = self.links.close(pair, end) else {
            return;
        };
        let (node, other) = match end {
            End::Leader => pair,
            End::Member => (pair.1, pair.0),
        };
        let now = self.nodes[node].now(self.engine.now());
        if let Some(up) = self.nodes[node].up.as_mut() {
            let other = Member(other as u16);
            match end {
                End::Leader => up.participant.disconnected(now, other),
                End::Member => up.participant.leader_gone(now, other),
            }
        }
        self.touched.insert(node);
        self.tell_closed(connection, pair, end.other(), true);
    }

    /// The other end learns in its time that a connection has been closed, or that its peer has gone.
    pub(super) fn tell_closed(
        &mut self,
        connection: ConnectionId,
        pair: Pair,
        end: End,
        is_told: bool,
    ) {
        let pause = if is_told && !self.links.is_cut(pair.0, pair.1) {
            self.scenario.link.draw(&mut self.random)
        } else {
            Nanos::from_millis(self.random.u64(50..SILENT_MAX_MILLIS))
        };
        self.engine.after(
            pause,
            Happening::Closed {
                connection,
                pair,
                end,
            },
        );
    }

    /// What arrived while nothing got through is let through, if it may be.
    pub(super) fn deliver_stalled(&mut self) {
        for (connection, lane) in self.links.take_stalled() {
            let pause = self.scenario.link.draw(&mut self.random);
            self.engine
                .after(pause, Happening::Deliver { connection, lane });
        }
    }
}

/// A message comes once more: to a member also on a newer connection than the one that it was sent on.
pub(super) fn repeat(
    world: &mut ClusterWorld,
    connection: ConnectionId,
    pair: Pair,
    lane: Lane,
    wire: Wire,
) {
    let present = world.links.present(pair, lane.to.other());
    if lane.to == End::Leader && present != Some(connection) {
        return;
    }
    let at = world.engine.now();
    if let Some((connection, at)) = world.links.send(pair, lane, wire, at) {
        world.engine.at(at, Happening::Deliver { connection, lane });
    }
}

/// Whether a message is lost on its way, and the connection stays.
fn is_lost(world: &mut ClusterWorld) -> bool {
    let one_in = world.scenario.lost_one_in;
    one_in > 0 && !world.is_calm && world.random.u32(..one_in) == 0
}

/// A span that was not encrypted is on its way: who gets it must not take it.
fn send_clear(world: &mut ClusterWorld, wire: &mut Wire) {
    if let Message::Append(span) | Message::LogData(span) = &wire.message {
        let at = (span.end.position - u64::from(span.blocks)) % RING_BLOCKS;
        let offset = (LOG_HEADER_BLOCKS + at) * BLOCK_BYTES as u64;
        wire.data = world.scenario.cipher.decrypted(offset, &wire.data);
        world.coverage.clear += 1;
    }
}
