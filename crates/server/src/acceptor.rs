//! TLS handshakes of NBD clients, on a thread of its own: the data path meets a client only when its
//! certificate is verified.
//!
//! ```text
//!  accept ─► waits for its client ◄──────┐
//!                │  ▲ (sends, receives)   │ not over
//!                ▼  │                     │
//!            waits for its turn ─► a step of the handshake ─► over: handed to the shard
//! ```
//!
//! Invariants:
//! 1. Handshakes under way are at most [`Limits::handshakes_max`]. A newcomer beyond takes the place of
//!    one of the network that has the most: see [`whose_place`].
//! 2. At most [`Limits::handshakes_s`] begin in a second; the others wait for their turn, in order.
//! 3. Each ends within [`Limits::time_max`].
//! 4. A client takes a place of its own listener from its first byte on, and no other listener's.
//!
//! Failure: whatever a client does ends its own connection. Where the system has no descriptor, accepting
//! pauses.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hdcs_api::events::{Event, Outcome};
use hdcs_core::base::buf::BufMut;
use hdcs_core::base::io::{Request, RequestId, SectorRange};
use hdcs_frontend::access::Peer;
use hdcs_frontend::nbd::tls::Certificates;
use hdcs_frontend::nbd::{Admitted, NbdConfig, NbdSession};
use hdcs_frontend::{Chunk, Ending, Export, Host, Receive, Session, VolumeNumber};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, oneshot};
use tokio::task::{AbortHandle, LocalSet};
use tokio::time::Instant;

use crate::events::Recorder;
use crate::log_limit::LogLimit;
use crate::shard::command::{Adopted, Command, Transport};
use crate::shard::places::{NO_PLACE, Place, Places};
use crate::shard::{
    ACCEPT_FAULT_PERIOD, ACCEPT_PAUSE, SendError, Shards, note_accepting, prepare_tcp,
};

/// Between two lines in the log about clients that were refused.
const REFUSAL_PERIOD: Duration = Duration::from_secs(1);
/// Before a shard that has too much to do is asked again to take a client.
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// What strangers may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Handshakes under way at once.
    pub handshakes_max: usize,
    /// Handshakes that begin in a second.
    pub handshakes_s: u64,
    /// For one handshake.
    pub time_max: Duration,
}

/// A socket that listens, and the places that its clients may have.
pub type Door = (std::net::TcpListener, Arc<Places>);

/// The running thread; it ends when this is dropped.
#[derive(Debug)]
pub struct Acceptor {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Nothing there blocks, and a panic there has said so.
            let _ = thread.join();
        }
    }
}

/// Begin to accept.
pub fn start(
    doors: Vec<Door>,
    certificates: Arc<Certificates>,
    limits: Limits,
    shards: Arc<Shards>,
    events: Recorder,
) -> io::Result<Acceptor> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut listeners = Vec::new();
    for (listener, places) in doors {
        listener.set_nonblocking(true)?;
        let _inside = runtime.enter();
        listeners.push((TcpListener::from_std(listener)?, places));
    }
    let (stop, stopped) = oneshot::channel::<()>();
    let run = move || {
        let serve = async move {
            let hall = Rc::new(Hall::new(certificates, limits, shards, events));
            for (listener, places) in listeners {
                let hall = Rc::clone(&hall);
                tokio::task::spawn_local(async move { hall.accept(&listener, &places).await });
            }
            // Until the other end is dropped.
            let _ = stopped.await;
        };
        LocalSet::new().block_on(&runtime, serve);
    };
    let thread = std::thread::Builder::new()
        .name("hdcs-tls".into())
        .spawn(run)?;
    Ok(Acceptor {
        stop: Some(stop),
        thread: Some(thread),
    })
}

/// Why a client did not get through its TLS handshake.
struct Failure {
    outcome: Outcome,
    why: String,
    /// Who it is, if it has shown that.
    peer: Peer,
}

impl Failure {
    fn refused(why: impl Into<String>) -> Self {
        Self {
            outcome: Outcome::Refused,
            why: why.into(),
            peer: Peer::Unnamed,
        }
    }

    fn failed(why: impl Into<String>) -> Self {
        Self {
            outcome: Outcome::Failed,
            ..Self::refused(why)
        }
    }

    fn connection(error: &io::Error) -> Self {
        Self::failed(format!("its connection failed: {error}"))
    }

    /// The end of a session before its TLS handshake was over.
    fn end(why: Option<&Ending>) -> Self {
        match why {
            Some(Ending::Violation(what)) => Self::refused(&**what),
            None | Some(Ending::Gone | Ending::Left) => {
                Self::failed("it closed the connection before its TLS handshake was over")
            }
            Some(other) => Self::failed(other.to_string()),
        }
    }
}

/// A handshake under way.
struct Underway {
    address: SocketAddr,
    /// Whether it is the client's turn.
    waits: Rc<Cell<bool>>,
    task: AbortHandle,
}

/// What counts as one peer: an IPv4 address, or the 64 bits of an IPv6 address that a network has in common.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let prefix = address.to_bits() & !u128::from(u64::MAX);
            IpAddr::V6(Ipv6Addr::from_bits(prefix))
        }
        address @ IpAddr::V4(_) => address,
    }
}

/// Which of those under way (number, network, whether it waits for its client) has to go when one more comes; `None`:
/// the newcomer. It is one of the network that has the most, with the newcomer: so a network that floods the node only
/// shuts out itself. Of these it is the one that has waited longest for its client, or else the one that came last, so
/// that those before it get their turn.
fn whose_place(
    underway: impl Iterator<Item = (u64, IpAddr, bool)> + Clone,
    newcomer: IpAddr,
) -> Option<u64> {
    let mut of_network = HashMap::<IpAddr, usize>::from([(newcomer, 1)]);
    for (_, network, _) in underway.clone() {
        *of_network.entry(network).or_default() += 1;
    }
    let rank = |id: u64, network, waits| {
        let patience = if waits { u64::MAX - id } else { id };
        (of_network[&network], waits, patience)
    };
    let others = underway.map(|(id, network, waits)| (rank(id, network, waits), Some(id)));
    let newcomer = (rank(u64::MAX, newcomer, false), None);
    others.chain([newcomer]).max().and_then(|(_, id)| id)
}

/// Where strangers are.
struct Hall {
    certificates: Arc<Certificates>,
    limits: Limits,
    shards: Arc<Shards>,
    /// By the order in which they came.
    underway: RefCell<BTreeMap<u64, Underway>>,
    count: Cell<u64>,
    /// When the next handshake may begin; whoever waits for its turn holds it, and the others are queued.
    next_turn: Mutex<Instant>,
    refusals: RefCell<LogLimit>,
    full: RefCell<LogLimit>,
    events: Recorder,
}

impl Hall {
    fn new(
        certificates: Arc<Certificates>,
        limits: Limits,
        shards: Arc<Shards>,
        events: Recorder,
    ) -> Self {
        Self {
            certificates,
            limits,
            shards,
            underway: RefCell::default(),
            count: Cell::new(0),
            next_turn: Mutex::new(Instant::now()),
            refusals: RefCell::new(LogLimit::new(REFUSAL_PERIOD)),
            full: RefCell::new(LogLimit::new(REFUSAL_PERIOD)),
            events,
        }
    }

    async fn accept(self: Rc<Self>, listener: &TcpListener, places: &Arc<Places>) {
        let mut faults = LogLimit::new(ACCEPT_FAULT_PERIOD);
        let mut is_failing = false;
        let place = listener.local_addr();
        let place = place.map_or_else(|_| "tcp".to_owned(), |address| format!("tcp {address}"));
        loop {
            match listener.accept().await {
                Ok((stream, address)) => {
                    if std::mem::take(&mut is_failing) {
                        note_accepting(&self.events, &place, Ok(()));
                    }
                    match places.take() {
                        Some(place) => self.begin(stream, address, place),
                        None => self.say_full(address, places.max()),
                    }
                }
                Err(error) => {
                    is_failing = true;
                    note_accepting(&self.events, &place, Err(&error));
                    if let Some(left_out) = faults.pass() {
                        tracing::warn!(%error, left_out, "cannot accept a connection");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Make room for a newcomer; false if it is itself the one to go.
    fn make_room(&self, newcomer: IpAddr) -> bool {
        let mut underway = self.underway.borrow_mut();
        if underway.len() < self.limits.handshakes_max {
            return true;
        }
        let others = underway
            .iter()
            .map(|(id, one)| (*id, network(one.address.ip()), one.waits.get()));
        let Some(id) = whose_place(others, newcomer) else {
            return false;
        };
        if let Some(one) = underway.remove(&id) {
            one.task.abort();
            let why = "a newer client took its place: too many TLS handshakes are under way (nbd_tls_handshakes_max)";
            self.note(one.address, &Failure::refused(why));
        }
        true
    }

    fn begin(self: &Rc<Self>, stream: TcpStream, address: SocketAddr, place: Place) {
        let network = network(address.ip());
        if !self.make_room(network) {
            let why = "its network has the most TLS handshakes under way, and there are too many (nbd_tls_handshakes_max)";
            return self.note(address, &Failure::refused(why));
        }
        let id = self.count.get();
        self.count.set(id + 1);
        let waits = Rc::new(Cell::new(true));
        let (this, turn) = (Rc::clone(self), Rc::clone(&waits));
        let task = tokio::task::spawn_local(async move {
            let shaken = this.shake(stream, address, &turn);
            let shaken = tokio::time::timeout(this.limits.time_max, shaken).await;
            this.underway.borrow_mut().remove(&id);
            match shaken {
                Ok(Ok((stream, admitted))) => {
                    this.hand_over(stream, address, admitted, place).await;
                }
                Ok(Err(failure)) => this.say_refused(address, &failure),
                Err(_) => {
                    let why = "its TLS handshake took too long (nbd_handshake_max_ms)";
                    this.say_refused(address, &Failure::refused(why));
                }
            }
        });
        let one = Underway {
            address,
            waits,
            task: task.abort_handle(),
        };
        self.underway.borrow_mut().insert(id, one);
    }

    /// The way from the greeting to the end of the TLS handshake.
    async fn shake(
        &self,
        mut stream: TcpStream,
        address: SocketAddr,
        waits: &Cell<bool>,
    ) -> Result<(TcpStream, Admitted), Failure> {
        let gone = |error: io::Error| Failure::connection(&error);
        prepare_tcp(&stream).map_err(gone)?;
        let material = self.certificates.current();
        let mut session = NbdSession::for_handshake(NbdConfig {
            tls: Some(Arc::clone(&material.config)),
            require_tls: true,
            peer: Peer::Unnamed,
            address: Some(address),
        });
        let mut has_turn = false;
        loop {
            while let Some(chunk) = session.output().pop_front() {
                let Chunk::Bytes(bytes) = chunk else {
                    unreachable!("a handshake sends no volume's data");
                };
                stream.write_all(&bytes).await.map_err(gone)?;
            }
            let received = match session.receive(&mut Nowhere) {
                Receive::Into(place) | Receive::IntoBoth(place, _) => {
                    Some(stream.read(place).await.map_err(gone)?)
                }
                Receive::Wait | Receive::Close => None,
            };
            let Some(bytes) = received else {
                if session.output().is_empty() {
                    break;
                }
                continue;
            };
            waits.set(false);
            if session.has_started_tls() && !has_turn {
                self.turn().await;
                has_turn = true;
            }
            session.received(bytes, &mut Nowhere);
            waits.set(true);
        }
        let ending = session.ending().cloned();
        let admitted = session
            .into_admitted()
            .ok_or_else(|| Failure::end(ending.as_ref()))?;
        if let Peer::Named(identity) = admitted.peer() {
            self.certificates.watch(identity, &material);
            if identity.is_revoked() {
                return Err(Failure {
                    peer: admitted.peer().clone(),
                    ..Failure::refused("its certificate is not good any more")
                });
            }
        }
        Ok((stream, admitted))
    }

    /// Wait until another handshake may begin.
    async fn turn(&self) {
        let mut next = self.next_turn.lock().await;
        tokio::time::sleep_until(*next).await;
        *next = Instant::now() + Duration::from_secs(1) / self.limits.handshakes_s as u32;
    }

    async fn hand_over(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        admitted: Admitted,
        place: Place,
    ) {
        let socket = stream.into_std().and_then(|stream| {
            // The ring waits for what is to come; it would be told to come back otherwise.
            stream.set_nonblocking(false)?;
            Ok(OwnedFd::from(stream))
        });
        let Ok(socket) = socket else {
            return;
        };
        let mut command = Command::Adopt(Box::new(Adopted {
            queued: None,
            socket,
            session: Box::new(NbdSession::admitted(admitted)),
            client: Transport::Tcp { peer: address },
            place,
            visit: None,
        }));
        let deadline = Instant::now() + self.limits.time_max;
        while let Err(SendError::Busy(refused)) = self.shards.send(command) {
            if Instant::now() >= deadline {
                let why = "the data path has too much to do to take it";
                return self.say_refused(address, &Failure::failed(why));
            }
            command = *refused;
            tokio::time::sleep(BUSY_PAUSE).await;
        }
    }

    fn note(&self, address: SocketAddr, failure: &Failure) {
        let client = Transport::Tcp { peer: address };
        let event = Event::new("tls", failure.outcome, client.who(&failure.peer));
        self.events
            .note(event.what(client.which()).why(&failure.why));
    }

    fn say_refused(&self, address: SocketAddr, failure: &Failure) {
        self.note(address, failure);
        if let Some(left_out) = self.refusals.borrow_mut().pass() {
            let why = &failure.why;
            tracing::warn!(%address, left_out, "a client did not get through its TLS handshake: {why}");
        }
    }

    fn say_full(&self, address: SocketAddr, max: usize) {
        let client = Transport::Tcp { peer: address };
        let event = Event::new("connect", Outcome::Refused, client.to_string());
        self.events.note(event.what(client.which()).why(NO_PLACE));
        if let Some(left_out) = self.full.borrow_mut().pass() {
            tracing::warn!(
                max,
                left_out,
                "too many connections: closed the newest; raise nbd_connections_max if they are needed"
            );
        }
    }
}

/// Before the end of the handshake there is nothing to be had.
struct Nowhere;

impl Host for Nowhere {
    fn exports(&self) -> Vec<Export> {
        Vec::new()
    }

    fn export(&self, _name: &str) -> Option<Export> {
        None
    }

    fn alloc(&mut self, _range: SectorRange) -> Option<BufMut> {
        None
    }

    fn charge(&mut self, _: usize) {}

    fn volumes(&self) -> usize {
        0
    }

    fn submit(&mut self, _volume: VolumeNumber, _id: RequestId, _request: Request) {
        unreachable!("no volume was opened")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    #[test]
    fn place_is_taken_from_the_network_that_has_most() {
        let of = |ones: &[(u64, u8, bool)], newcomer| {
            let ones = ones.iter().map(|&(id, last, waits)| (id, v4(last), waits));
            whose_place(ones, v4(newcomer))
        };
        // Of those that wait for their client, the one that has waited longest.
        assert_eq!(of(&[(1, 1, true), (2, 2, true), (3, 2, true)], 3), Some(2));
        // Those that wait for their turn do not keep others out; the last of them goes.
        let queued = [(1, 1, true), (2, 2, false), (3, 2, false), (4, 2, false)];
        assert_eq!(of(&queued, 1), Some(4));
        assert_eq!(of(&queued, 3), Some(4));
        // One more of that network goes itself.
        assert_eq!(of(&queued, 2), None);
        // Where everybody has one, those that say nothing go first, and then the newcomer.
        assert_eq!(of(&[(1, 1, false), (2, 2, true), (3, 3, true)], 4), Some(2));
        assert_eq!(of(&[(1, 1, false), (2, 2, false)], 3), None);
    }

    #[test]
    fn network_of_an_address() {
        let of = |address: &str| network(address.parse().unwrap()).to_string();
        assert_eq!(of("192.0.2.7"), "192.0.2.7");
        assert_eq!(of("::ffff:192.0.2.7"), "192.0.2.7");
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
    }
}
