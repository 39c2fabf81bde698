//! A shard's connections to other nodes, over its ring: what [`Message`]s of replication become on the wire, and back.
//!
//! ```text
//!  participants ── append, ask ──────► Links ──► Connection ──► Socket ──► ring     this node leads
//!       ▲      ── answer, ack ───────►   │ ◄──── (messenger)  ◄────────── ring     this node follows
//!       └──────── events ────────────────┘
//! ```
//!
//! Whoever leads connects. A *pair* is what a leader has to a member: one connection for spans and all requests but one, in
//! order, and one for [`Message::ReadLog`], whose answers have data. If either breaks both are closed, and
//! [`Event::Disconnected`] or [`Event::PeerDisconnected`] comes before anything of a new pair. Two nodes that lead
//! different logs have two pairs.
//!
//! | file | what it does |
//! |---|---|
//! | [`leading`] | pairs that this node has made: streams of spans, requests and who waits for their answers |
//! | [`following`] | pairs that others have made: which requests an answer belongs to, how far a leader may send |
//! | [`socket`] | moves bytes between a connection and the ring |
//! | [`questions`], [`window`], [`pauses`] | what they reckon with, without any I/O |
//!
//! Invariants:
//! 1. Whatever a peer does ends its own pair at most, with a text that says what was wrong: once in ten seconds for each
//!    peer in the log.
//! 2. Every request ends: by its answer, or with its pair. One that is not answered in time breaks the pair.
//! 3. Spans come into a pool of their own; a leader sends no further than the window that fits it ([`window`]). While it is
//!    empty, they wait in their sockets.
//! 4. A peer has [`CONNECTIONS_MAX`] connections to this node at most, and [`STRANGERS_MAX`] have not said who they are.
//! 5. Nothing is received while events wait to be taken, so there are never more than those of one turn.
//! 6. Nothing here waits, but in [`crate::shard`]'s ring.
//!
//! In each turn the shard hands in what has ended ([`Links::finished`]), says what time it is ([`Links::tick`]), takes events,
//! and has I/O begun ([`Links::start_io`]), even if nothing happened on a link: memory may have become free. It has the
//! ring at rest before it drops this; if the ring does not come to rest, this is never dropped.

mod following;
mod leading;
mod pauses;
mod questions;
mod socket;
#[cfg(test)]
mod tests;
mod window;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hdcs_core::base::buf::{Buf, Pool};
use hdcs_core::base::io::Nanos;
use hdcs_core::replication::Member;
use hdcs_core::replication::message::Message;
use hdcs_core::wire::replication::{About, MessageError};
use hdcs_core::wire::{NodeId, Purpose};
use hdcs_device::ring::{Finished, Outcome, Owner, Ring};
use hdcs_messenger::connection::Connection;
use hdcs_messenger::error::{Ended, Refused, Why};
use hdcs_messenger::event::Event as LinkEvent;
use hdcs_messenger::handshake::{Identity, Known, Own};
use hdcs_messenger::link::{Link, LinkConfig};
use hdcs_messenger::tls::{Credentials, TlsError};
use hdcs_messenger::transport::Plain;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use thiserror::Error;

use self::following::Following;
use self::leading::Leading;
use self::pauses::Pauses;
use self::socket::Socket;
use self::window::Window;
use super::prepare_tcp;
use super::slots::Slots;
use crate::cluster::names::Named;
use crate::log_limit::LogLimit;

/// Connections that a peer has made to this node at most: a pair, and one of the next.
pub const CONNECTIONS_MAX: usize = 3;
/// Connections that have not said who they are at most; more are closed as they come.
pub const STRANGERS_MAX: usize = 32;
/// Between two lines in the log about the same peer.
const FAULT_PERIOD: Duration = Duration::from_secs(10);
/// How soon memory is looked for again, if nothing else happens.
const MEMORY_PAUSE: Nanos = Nanos::from_millis(5);

/// Another node.
#[derive(Clone, Copy, Debug)]
pub struct PeerConfig {
    /// Its number, by which records name it.
    pub member: Member,
    /// Its identity.
    pub node: NodeId,
    /// Where it listens.
    pub address: SocketAddr,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// The handshake of a connection.
    pub handshake_max: Nanos,
    /// Between two pings.
    pub ping_interval: Nanos,
    /// The echo of a ping.
    pub ping_max: Nanos,
    /// The answer to a request that takes no write of the medium.
    pub answer_max: Nanos,
    /// The answer to what waits for the medium: to Promise, JoinAt, Verify, for which a log is read, and Superblock, which is
    /// durable only once all before the opening is. That a copy is too slow is for its group to say: others on this link
    /// may be fine.
    pub slow_answer_max: Nanos,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            handshake_max: Nanos::from_millis(5_000),
            ping_interval: Nanos::from_millis(500),
            ping_max: Nanos::from_millis(5_000),
            answer_max: Nanos::from_millis(15_000),
            slow_answer_max: Nanos::from_millis(3_600_000),
        }
    }
}

/// What links are made of.
#[derive(Debug)]
pub struct LinksConfig {
    /// This node, as it greets others; its number is that of its member.
    pub own: Own,
    /// The other nodes of the cluster.
    pub peers: Vec<PeerConfig>,
    /// How it speaks TLS; `None`: it does not.
    pub credentials: Option<Credentials>,
    /// Where spans come in. Nothing else takes memory of it.
    pub pool: Arc<Pool>,
    /// Pauses are drawn from it.
    pub seed: u64,
    /// How long things may take.
    pub times: Times,
}

/// Why something was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotSent {
    /// The peer takes no more at present: it is offered again after [`Event::Room`].
    #[error("the peer takes no more at present")]
    Full,
    /// There is no pair, or no more: [`Event::Disconnected`] has come or is about to.
    #[error("there is no connection to the peer")]
    Disconnected,
}

/// A message of another node.
#[derive(Debug)]
pub struct Received {
    /// Which one. Whether this node leads or follows is said by the message: it is an answer, or not.
    pub from: Member,
    /// About which log, and in which epoch its leader acts.
    pub about: About,
    /// What it says.
    pub message: Message,
    /// With Append: up to where the leader's log is committed.
    pub committed: u64,
    /// With Append and LogData: the span's blocks, in order. Its checksums are not looked at yet.
    pub data: Vec<Buf>,
}

/// What has happened.
#[derive(Debug)]
pub enum Event {
    /// The pair to a member that this node wants one to is made.
    Connected(Member),
    /// It is over, and will be made again if it is still wanted.
    Disconnected(Member),
    /// The member stops; [`Self::Disconnected`] comes next.
    Left(Member),
    /// Another node has made its pair to this one.
    PeerConnected(Member),
    /// It is over.
    PeerDisconnected(Member),
    /// A message has come.
    Received(Received),
    /// A member has no such log.
    NoLog {
        /// Which member.
        from: Member,
        /// Which log, and the epoch of what it answers.
        about: About,
    },
    /// What was not sent to this member for lack of room may be now.
    Room(Member),
}

/// Whose connection it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Somebody who has not said who it is, or was refused.
    Stranger,
    /// Of the pair that this node has made.
    Leading(Member, Purpose),
    /// Of the pair that the other one has made.
    Following(Member, Purpose),
    /// Of a pair that is over, which this node had made: it takes leave.
    Left,
    /// The same, which the other one had made: it still counts as its.
    Gone(Member),
}

impl Role {
    /// What it is once its pair is over.
    fn retired(self) -> Self {
        match self {
            Self::Leading(..) => Self::Left,
            Self::Following(member, _) => Self::Gone(member),
            Self::Stranger | Self::Left | Self::Gone(_) => self,
        }
    }
}

struct Wire {
    socket: Socket,
    role: Role,
}

struct Peer {
    config: PeerConfig,
    known: Known,
    leading: Leading,
    following: Following,
    pauses: Pauses,
    faults: LogLimit,
}

/// See the module.
pub struct Links {
    own: Own,
    credentials: Option<Credentials>,
    pool: Arc<Pool>,
    window: Window,
    times: Times,
    wires: Slots<Wire>,
    peers: BTreeMap<Member, Peer>,
    events: VecDeque<Event>,
    strangers: LogLimit,
    now: Nanos,
}

impl Links {
    /// No links yet.
    pub fn new(config: LinksConfig) -> Self {
        let LinksConfig {
            own,
            peers,
            credentials,
            pool,
            seed,
            times,
        } = config;
        let window = Window::new(pool.total_bytes());
        let peers = peers.into_iter().map(|config| {
            let seed = seed ^ u64::from(config.member.0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (config.member, Peer::new(config, seed))
        });
        Self {
            own,
            credentials,
            pool,
            window,
            times,
            wires: Slots::default(),
            peers: peers.collect(),
            events: VecDeque::new(),
            strangers: LogLimit::new(FAULT_PERIOD),
            now: Nanos(0),
        }
    }

    /// The nodes that a pair is made with, by either side.
    pub fn paired(&self) -> impl Iterator<Item = Member> {
        let is_paired = |peer: &Peer| peer.leading.is_connected() || peer.following.is_there();
        let peers = self.peers.iter();
        peers.filter_map(move |(member, peer)| is_paired(peer).then_some(*member))
    }

    /// What has happened, in order.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether something has happened that was not taken.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Somebody has connected.
    pub fn accepted(&mut self, socket: OwnedFd, from: SocketAddr) {
        let strangers = self.wires.iter();
        let strangers = strangers.filter(|(_, wire)| wire.role == Role::Stranger);
        if strangers.count() >= STRANGERS_MAX {
            if let Some(left_out) = self.strangers.pass() {
                tracing::warn!(%from, left_out, "a connection of a node is refused: {STRANGERS_MAX} have not said who they are");
            }
            return;
        }
        // One that has gone already is noticed when it is received from.
        let _ = prepare_tcp(&socket);
        let link = Link::accept(self.link_config(from), Arc::clone(&self.pool), self.now);
        let connection = match &self.credentials {
            None => Connection::new(link, Plain),
            Some(credentials) => match credentials.accept() {
                Ok(tls) => Connection::new(link, tls),
                Err(error) => return self.say_tls(from, &error),
            },
        };
        self.wires.insert(Wire {
            socket: Socket::accepted(socket, connection),
            role: Role::Stranger,
        });
    }

    /// An operation of a link has ended: `owner` is one of the three of links.
    pub fn finished(&mut self, finished: Finished) {
        let (slot, outcome) = match finished.owner {
            Owner::LinkConnect(slot) | Owner::LinkReceive(slot) | Owner::LinkSend(slot) => {
                (slot, finished.outcome)
            }
            owner => unreachable!("{owner:?} is no link"),
        };
        let wire = self.wires.get_mut(slot);
        let socket = &mut wire.expect("it stays while something is under way").socket;
        match (finished.owner, outcome) {
            (Owner::LinkConnect(_), Outcome::Connected(result)) => socket.connected(result),
            (Owner::LinkReceive(_), Outcome::Count(result)) => socket.received(result, self.now),
            (Owner::LinkSend(_), Outcome::Count(result)) => socket.sent(result),
            (owner, outcome) => unreachable!("{owner:?} starts nothing that ends in {outcome:?}"),
        }
        self.settle(slot);
    }

    /// It is so late. What has ended is handed in before, lest a peer be given up for what has come.
    pub fn tick(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        for slot in 0..self.wires.end() {
            let Some(wire) = self.wires.get_mut(slot) else {
                continue;
            };
            let connection = &mut wire.socket.connection;
            if connection.next_deadline().is_some_and(|at| at <= now) {
                connection.tick(now);
                self.settle(slot);
            }
        }
    }

    /// When [`Self::tick`] and [`Self::start_io`] are to be called, if nothing else happens.
    pub fn next_deadline(&self) -> Option<Nanos> {
        if self.has_events() {
            return Some(self.now);
        }
        let wires = self.wires.iter().flat_map(|(_, Wire { socket, .. })| {
            let memory = socket.waits().then(|| self.now.plus(MEMORY_PAUSE));
            [socket.connection.next_deadline(), memory]
        });
        let attempts = self.peers.values().map(|peer| peer.leading.attempt_at());
        wires.chain(attempts).flatten().min()
    }

    /// Begin what is to be done on sockets.
    pub fn start_io(&mut self, ring: &mut Ring) {
        self.connect_due();
        let receives = self.events.is_empty();
        for slot in 0..self.wires.end() {
            let Some(wire) = self.wires.get_mut(slot) else {
                continue;
            };
            wire.socket.serve(slot, receives, ring, self.now);
            self.settle(slot);
            let wire = self.wires.get(slot);
            if wire.is_some_and(|wire| wire.socket.is_done()) {
                self.wires.remove(slot);
            }
        }
    }

    /// Take leave of everybody: what is not sent is, and nothing is connected to any more. It has ended once this
    /// [is idle](Self::is_idle).
    pub fn shut_down(&mut self) {
        for member in self.members() {
            self.unwant(member);
            self.end_following(member, true);
        }
        for slot in 0..self.wires.end() {
            if let Some(wire) = self.wires.get_mut(slot)
                && wire.role == Role::Stranger
            {
                wire.socket.connection.refuse(Refused::Stops);
                self.settle(slot);
            }
        }
    }

    /// Close the pair that this leader has made: it sent what it must not.
    pub fn drop_leader(&mut self, leader: Member) {
        self.end_following(leader, false);
    }

    /// The other nodes.
    pub fn members(&self) -> Vec<Member> {
        self.peers.keys().copied().collect()
    }

    /// Whether no connection is left.
    pub fn is_idle(&self) -> bool {
        self.wires.is_empty()
    }

    fn link_config(&self, address: SocketAddr) -> LinkConfig {
        LinkConfig {
            handshake_max: self.times.handshake_max,
            ping_interval: self.times.ping_interval,
            ping_max: self.times.ping_max,
            ..LinkConfig::new(address.to_string(), self.own)
        }
    }

    /// Make what is due of the pairs that are wanted.
    fn connect_due(&mut self) {
        let due: Vec<(Member, Purpose)> = (self.peers.iter())
            .filter_map(|(member, peer)| Some((*member, peer.leading.due(self.now)?)))
            .collect();
        for (member, purpose) in due {
            if let Err(error) = self.connect(member, purpose) {
                if let Some(peer) = self.peers.get_mut(&member)
                    && let Some(left_out) = peer.faults.pass()
                {
                    tracing::warn!(member = %Named(member), %error, left_out, "cannot connect");
                }
                self.end_leading(member, false);
            }
        }
    }

    fn connect(&mut self, member: Member, purpose: Purpose) -> Result<(), ConnectError> {
        let peer = self.peers.get(&member).expect("it is wanted");
        let (address, known) = (peer.config.address, peer.known);
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(io::Error::from)?;
        prepare_tcp(&socket)?;
        let (config, pool) = (self.link_config(address), Arc::clone(&self.pool));
        let link = Link::connect(config, known, purpose, pool, self.now);
        let connection = match &self.credentials {
            None => Connection::new(link, Plain),
            Some(credentials) => {
                let tls = credentials.connect(self.own.identity.cluster, known.node)?;
                Connection::new(link, tls)
            }
        };
        let slot = self.wires.insert(Wire {
            socket: Socket::connect(socket, connection, address),
            role: Role::Leading(member, purpose),
        });
        let peer = self.peers.get_mut(&member).expect("it is wanted");
        peer.leading.begun(purpose, slot);
        Ok(())
    }

    /// Take what a connection has to say.
    fn settle(&mut self, slot: u32) {
        while let Some(wire) = self.wires.get_mut(slot)
            && let Some(event) = wire.socket.connection.event()
        {
            let role = wire.role;
            let result = match (role, event) {
                (_, LinkEvent::Ended(ended)) => {
                    self.ended(slot, role, &ended);
                    Ok(())
                }
                (Role::Stranger, LinkEvent::Asked { peer, purpose }) => {
                    self.asked(slot, &peer, purpose);
                    Ok(())
                }
                (Role::Stranger | Role::Left | Role::Gone(_), _) => Ok(()),
                (Role::Leading(member, purpose), event) => self.led(member, purpose, event),
                (Role::Following(member, purpose), event) => self.followed(member, purpose, event),
            };
            if let Err(error) = result
                && let Some(wire) = self.wires.get_mut(slot)
            {
                wire.socket.connection.object(error);
            }
        }
    }

    /// A connection is over.
    fn ended(&mut self, slot: u32, role: Role, ended: &Ended) {
        self.retire(slot);
        match role {
            Role::Stranger => {
                if let Some(left_out) = self.strangers.pass() {
                    tracing::warn!(left_out, "{ended}");
                }
            }
            Role::Leading(member, _) => {
                self.say_ended(member, ended);
                let peer = self.peers.get(&member);
                if ended.why == Why::Bye && peer.is_some_and(|peer| peer.leading.is_connected()) {
                    self.events.push_back(Event::Left(member));
                }
                self.end_leading(member, false);
            }
            Role::Following(member, _) => {
                self.say_ended(member, ended);
                self.end_following(member, false);
            }
            Role::Left | Role::Gone(_) => {}
        }
    }

    fn say_ended(&mut self, member: Member, ended: &Ended) {
        let is_in_order = matches!(ended.why, Why::Finished | Why::Bye);
        if let Some(peer) = self.peers.get_mut(&member)
            && !is_in_order
            && let Some(left_out) = peer.faults.pass()
        {
            tracing::warn!(member = %Named(member), left_out, "{ended}");
        }
    }

    fn say_tls(&mut self, from: SocketAddr, error: &TlsError) {
        if let Some(left_out) = self.strangers.pass() {
            tracing::warn!(%from, left_out, "TLS: {error}");
        }
    }

    /// Nothing of a connection counts any more; it may take leave.
    fn retire(&mut self, slot: u32) {
        if let Some(wire) = self.wires.get_mut(slot) {
            wire.role = wire.role.retired();
        }
    }

    /// Close a connection whose pair is over: in order, or at once.
    fn close(&mut self, slot: u32, in_order: bool) {
        // What has ended by itself takes leave.
        let wire = self.wires.get_mut(slot);
        let Some(wire) = wire.filter(|wire| wire.role != wire.role.retired()) else {
            return;
        };
        wire.role = wire.role.retired();
        if in_order {
            wire.socket.connection.shut_down();
        } else {
            wire.socket.kill();
        }
    }

    /// Somebody has said who it is.
    fn asked(&mut self, slot: u32, found: &Identity, purpose: Purpose) {
        let member = u16::try_from(found.number).ok().map(Member);
        let peer = member.and_then(|member| self.peers.get(&member));
        let known = peer.map(|peer| peer.known);
        let count = self.wires.iter().filter(|(_, wire)| {
            let (Role::Following(of, _) | Role::Gone(of)) = wire.role else {
                return false;
            };
            Some(of) == member && !wire.socket.is_dead()
        });
        let is_many = count.count() >= CONNECTIONS_MAX;
        let second = member.and_then(|member| self.other_run(member, found));
        let Some(wire) = self.wires.get_mut(slot) else {
            return;
        };
        let connection = &mut wire.socket.connection;
        if is_many {
            return connection.refuse(Refused::Many(found.node));
        }
        if let Some(boots) = second {
            let node = found.node;
            return connection.refuse(Refused::SecondBoot { node, boots });
        }
        connection.admit(known.as_ref());
        // Whoever is refused is told so, and is no peer.
        if connection.is_open()
            && let Some(member) = member
        {
            wire.role = Role::Following(member, purpose);
            self.note_run(member, found);
            self.admitted(member, purpose, slot);
        }
    }

    /// The number of the run of this node that is spoken to at present, if a later one was found: both live, so
    /// a data directory or a machine was copied. One that has died is noticed by its connections, within `ping_max`.
    fn other_run(&self, member: Member, found: &Identity) -> Option<u64> {
        let known = self.peers.get(&member)?.known;
        let (boots, boot) = known.boot?;
        let is_its = |wire: &Wire| {
            let (Role::Leading(of, _) | Role::Following(of, _)) = wire.role else {
                return false;
            };
            of == member && wire.socket.connection.is_open() && !wire.socket.is_dead()
        };
        let is_other = found.node == known.node && found.boots > boots && found.boot != boot;
        let lives = is_other && self.wires.iter().any(|(_, wire)| is_its(wire));
        lives.then_some(boots)
    }

    /// A run of a peer was spoken to: older ones are not any more.
    fn note_run(&mut self, member: Member, found: &Identity) {
        if let Some(peer) = self.peers.get_mut(&member) {
            peer.known.boot = Some((found.boots, found.boot));
        }
    }

    /// Nothing goes over a connection any more: its peer has not answered in time.
    fn give_up(&mut self, member: Member, what: &str) {
        if let Some(peer) = self.peers.get_mut(&member)
            && let Some(left_out) = peer.faults.pass()
        {
            tracing::warn!(member = %Named(member), left_out, "the node has not answered {what} in time; it is connected to again");
        }
        self.end_leading(member, false);
    }

    fn connection(&mut self, slot: Option<u32>) -> Option<&mut Connection> {
        Some(&mut self.wires.get_mut(slot?)?.socket.connection)
    }
}

impl Peer {
    fn new(config: PeerConfig, seed: u64) -> Self {
        Self {
            config,
            known: Known {
                node: config.node,
                boot: None,
            },
            leading: Leading::default(),
            following: Following::default(),
            pauses: Pauses::new(seed),
            faults: LogLimit::new(FAULT_PERIOD),
        }
    }
}

/// Why a connection could not be begun.
#[derive(Debug, Error)]
enum ConnectError {
    #[error("{0}")]
    Socket(#[from] io::Error),
    #[error("TLS: {0}")]
    Tls(#[from] TlsError),
}

/// A mistake of a peer that no code says.
fn unexpected<T>(what: &'static str) -> Result<T, MessageError> {
    Err(MessageError::Unexpected(what))
}
