//! One client's socket: at most one receive and one send under way, the session between.
//!
//! Invariants:
//! 1. The place that the session named for receiving is untouched until that has finished: the
//!    session is not dropped, and asked for no other place, before.
//! 2. Chunks that are being sent stay where they are until the send has finished.
//! 3. A connection is dropped only when nothing is under way on its socket and every request it
//!    submitted is answered.
//!
//! A failure of the socket ends this connection and no other. So does a client that owes something
//! for too long: [`Connection::look`], called now and then, costs the data path nothing.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};

use hdcs_core::io::Nanos;

use super::command::Transport;
use crate::device::Errno;
use crate::device::ring::{Key, Owner, Ring};
use crate::frontends::{Chunk, Host, Owed, Receive, Session, VolumeNumber};

/// Chunks in one send at most: below the kernel's 1024 vectors of one message.
const SEND_CHUNKS_MAX: usize = 512;
/// Bytes in one send at most, so that one client with large reads does not hold up the others.
const SEND_BYTES_MAX: usize = 2 << 20;

/// What clients may hold, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Connections at most; more are closed as they come.
    pub count_max: usize,
    /// For the handshake.
    pub handshake_max: Nanos,
    /// For a part of a request's data, and for taking any of what is sent.
    pub stall_max: Nanos,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            count_max: 1024,
            handshake_max: Nanos::from_millis(10_000),
            stall_max: Nanos::from_millis(30_000),
        }
    }
}

impl ConnectionLimits {
    /// How often connections are looked at: often enough that a limit is kept to an eighth.
    pub fn look_period(&self) -> Nanos {
        let shortest = self.handshake_max.0.min(self.stall_max.0);
        Nanos((shortest / 8).clamp(1_000_000, 1_000_000_000))
    }
}

/// What the last look at a connection saw, and since when it has been so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    owed: Owed,
    owed_since: Nanos,
    sends: u64,
    sends_since: Nanos,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Serving.
    Open,
    /// Sending what is left.
    Draining,
    /// Of no more use: waiting for what is under way.
    Broken,
}

/// Where the session wants to receive: valid until the session is called again.
#[derive(Clone, Copy)]
pub struct Place(*mut u8, usize);

/// See the module.
pub struct Connection {
    socket: OwnedFd,
    session: Box<dyn Session>,
    stage: Stage,
    receiving: Option<Key>,
    sending: bool,
    /// Whether the session wanted nothing when it was last asked.
    waits: bool,
    /// What is being sent; untouched while `sending`.
    chunks: VecDeque<Chunk>,
    /// Bytes of the front chunk that are sent.
    sent: usize,
    vectors: Vec<libc::iovec>,
    message: Box<libc::msghdr>,
    /// Requests of it that are not answered.
    pub requests: usize,
    /// Sends that have ended.
    sends: u64,
    seen: Option<Seen>,
    /// Whether it waits in the shard's list of those to be served.
    pub listed: bool,
}

impl Connection {
    /// A connection that has just come in.
    pub fn new(socket: OwnedFd, session: Box<dyn Session>) -> Self {
        // SAFETY: all zeroes is a valid, empty message.
        let message: libc::msghdr = unsafe { std::mem::zeroed() };
        Self {
            socket,
            session,
            stage: Stage::Open,
            receiving: None,
            sending: false,
            waits: false,
            chunks: VecDeque::new(),
            sent: 0,
            vectors: Vec::new(),
            message: Box::new(message),
            requests: 0,
            sends: 0,
            seen: None,
            listed: false,
        }
    }

    /// The protocol that is spoken here.
    pub fn session(&mut self) -> &mut dyn Session {
        &mut *self.session
    }

    /// A receive ended.
    pub fn received(&mut self, result: Result<usize, Errno>, host: &mut dyn Host) {
        self.receiving = None;
        match result {
            _ if self.stage != Stage::Open => {}
            Ok(bytes) => self.session.received(bytes, host),
            Err(Errno(libc::ECANCELED)) => {}
            Err(_) => self.abort(),
        }
    }

    /// A send ended.
    pub fn sent(&mut self, result: Result<usize, Errno>) {
        self.sending = false;
        self.sends += 1;
        let Ok(mut bytes) = result else {
            return self.abort();
        };
        bytes += self.sent;
        while let Some(chunk) = self.chunks.front() {
            let len = bytes_of(chunk).len();
            if bytes < len {
                break;
            }
            bytes -= len;
            self.chunks.pop_front();
        }
        self.sent = bytes;
    }

    /// Ask the session where it wants to receive, unless a receive is under way.
    pub fn ask_receive(&mut self, host: &mut dyn Host) -> Option<Place> {
        if self.stage != Stage::Open || self.receiving.is_some() {
            return None;
        }
        self.waits = false;
        match self.session.receive(host) {
            Receive::Into(place) => {
                assert!(!place.is_empty(), "a place to receive into holds something");
                return Some(Place(place.as_mut_ptr(), place.len()));
            }
            Receive::Wait => self.waits = true,
            Receive::Close => self.stage = Stage::Draining,
        }
        None
    }

    /// Receive into the place that the session has just named, and send what is to be sent.
    pub fn serve(&mut self, slot: u32, place: Option<Place>, ring: &mut Ring) {
        if let Some(Place(address, bytes)) = place {
            let (owner, fd) = (Owner::Receive(slot), self.socket.as_raw_fd());
            // SAFETY: the session keeps the place until `received` (its contract), nobody has
            // called it since, and it outlives the operation (invariant 1).
            self.receiving = Some(unsafe { ring.receive(owner, fd, address, bytes) });
        }
        if self.stage == Stage::Broken {
            self.session.output().clear();
            if !self.sending {
                self.chunks.clear();
            }
            return;
        }
        self.send(slot, ring);
    }

    fn send(&mut self, slot: u32, ring: &mut Ring) {
        if self.sending {
            return;
        }
        let output = self.session.output();
        while self.chunks.len() < SEND_CHUNKS_MAX
            && let Some(chunk) = output.pop_front()
        {
            if !bytes_of(&chunk).is_empty() {
                self.chunks.push_back(chunk);
            }
        }
        self.vectors.clear();
        let (mut skip, mut total) = (self.sent, 0);
        for chunk in &self.chunks {
            let bytes = &bytes_of(chunk)[skip..];
            skip = 0;
            self.vectors.push(libc::iovec {
                iov_base: bytes.as_ptr().cast_mut().cast(),
                iov_len: bytes.len(),
            });
            total += bytes.len();
            if total >= SEND_BYTES_MAX {
                break;
            }
        }
        if self.vectors.is_empty() {
            return;
        }
        self.message.msg_iov = self.vectors.as_mut_ptr();
        self.message.msg_iovlen = self.vectors.len() as _;
        self.sending = true;
        let (owner, fd) = (Owner::Send(slot), self.socket.as_raw_fd());
        // SAFETY: message, vectors and chunks are in the heap and stay as they are while
        // `sending` (invariant 2).
        unsafe { ring.send(owner, fd, &raw const *self.message) };
    }

    /// Whether the session must be asked again when buffers have become free.
    pub fn waits(&self) -> bool {
        self.waits && self.stage == Stage::Open
    }

    /// Whether nobody takes its answers any more.
    pub fn is_broken(&self) -> bool {
        self.stage == Stage::Broken
    }

    /// The volume that it has open.
    pub fn volume(&self) -> Option<VolumeNumber> {
        self.session.volume()
    }

    /// What its client has owed for too long.
    pub fn look(&mut self, now: Nanos, limits: &ConnectionLimits) -> Option<&'static str> {
        if self.stage == Stage::Broken {
            return None;
        }
        // What is not being received now is not the client's fault.
        let owed = match self.session.owed() {
            Owed::Data(_) if self.receiving.is_none() => Owed::Nothing,
            owed => owed,
        };
        let (sends, sending) = (self.sends, self.sending);
        let seen = self.seen.get_or_insert(Seen {
            owed,
            owed_since: now,
            sends,
            sends_since: now,
        });
        if seen.owed != owed {
            seen.owed = owed;
            seen.owed_since = now;
        }
        if seen.sends != sends || !sending {
            seen.sends = sends;
            seen.sends_since = now;
        }
        let waited = now.since(seen.owed_since);
        match owed {
            Owed::Handshake if waited >= limits.handshake_max => Some("it did not open an export"),
            Owed::Data(_) if waited >= limits.stall_max => Some("it did not send a write's data"),
            _ if now.since(seen.sends_since) >= limits.stall_max => Some("it took no replies"),
            _ => None,
        }
    }

    /// Whether it can be dropped.
    pub fn is_over(&mut self) -> bool {
        let drained = match self.stage {
            Stage::Open => return false,
            Stage::Draining => self.chunks.is_empty() && self.session.output().is_empty(),
            Stage::Broken => true,
        };
        drained
            && self.receiving.is_none()
            && !self.sending
            && self.requests == 0
            && self.session.in_flight() == 0
    }

    /// End it without regard for what is to be sent.
    pub fn abort(&mut self) {
        self.stage = Stage::Broken;
        // SAFETY: a system call on a descriptor that is held. It fails if the peer is gone,
        // which is as well.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// End it once what is in flight is answered.
    pub fn shut_down(&mut self, ring: &mut Ring) {
        self.session.shut_down();
        if let Some(key) = self.receiving {
            ring.cancel(key);
        }
    }
}

fn bytes_of(chunk: &Chunk) -> &[u8] {
    match chunk {
        Chunk::Bytes(bytes) => bytes,
        Chunk::Data(buf) => buf,
    }
}

/// Find out who is at the other end. `None` if it has gone already.
pub fn introduce(socket: OwnedFd, tcp: bool) -> Option<(OwnedFd, Transport)> {
    if !tcp {
        return Some((socket, Transport::Unix));
    }
    let stream = TcpStream::from(socket);
    let peer = stream.peer_addr().ok()?;
    // Replies are sent whole, at once; waiting to fill a segment would only delay them.
    stream.set_nodelay(true).ok()?;
    Some((stream.into(), Transport::Tcp { peer }))
}
