//! One client's socket: at most one receive and one send under way, the session between.
//!
//! Invariants:
//! 1. The place that the session named for receiving is untouched until that has finished: the
//!    session is not dropped, and asked for no other place, before.
//! 2. Chunks that are being sent stay where they are until the send has finished.
//! 3. A connection is dropped only when nothing is under way on its socket and every request it submitted is answered,
//!    or nobody takes the answers any more ([`super::leavers`]).
//! 4. What it is said to hold ([`Connection::held`]) includes what waits in the socket's queue, so a
//!    client that takes nothing is allowed nothing more.
//!
//! A failure of the socket ends this connection and no other. So does a client that owes something
//! for too long: [`Connection::look`], called now and then, costs the data path nothing.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;
use std::{io, mem};

use hdcs_core::base::io::{Nanos, RequestId};
use hdcs_core::node::turns::Account;
use hdcs_device::Errno;
use hdcs_device::ring::{Key, Owner, Ring};
use hdcs_frontend::access::Peer;
use hdcs_frontend::{Chunk, Ending, Export, Held, Host, Owed, Receive, Session, VolumeNumber};
use rustix::net::sockopt;

use super::command::{Adopted, Process, Transport, Visit};
use super::counts::ShardCounts;
use super::handover::Station;
use super::leavers::Presence;
use super::places;
use super::served::Ended;

/// Chunks in one send at most: below the kernel's 1024 vectors of one message.
const SEND_CHUNKS_MAX: usize = 512;
/// Bytes in one send at most, so that one client with large reads does not hold up the others; and
/// of all sends of a turn together, as far as each may still send a little.
const SEND_BYTES_MAX: usize = 2 << 20;
const TURN_SEND_BYTES_MAX: usize = 8 << 20;
const SEND_BYTES_MIN: usize = 128 << 10;

/// What clients may hold, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Connections of each listener at most; more are closed as they come.
    pub count_max: usize,
    /// For the handshake.
    pub handshake_max: Nanos,
    /// For a part of a request's data, and for taking any of what is sent.
    pub stall_max: Nanos,
    /// What a client takes a second at least, over that time, while replies wait for it; 0: any.
    pub rate_min_bytes: u64,
    /// Memory for all of them, data left out.
    pub heap_bytes: u64,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            count_max: 1024,
            handshake_max: Nanos::from_millis(10_000),
            stall_max: Nanos::from_millis(30_000),
            rate_min_bytes: 64 << 10,
            heap_bytes: 64 << 20,
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
    /// What was sent when replies began to wait, or when its rate was last looked at, and when that was.
    sent_bytes: u64,
    sent_since: Nanos,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Serving.
    Open,
    /// Sending what is left.
    Draining,
    /// Of no more use: waiting for what is under way.
    Broken {
        /// Whether [`Connection::breaks_off`] has said so.
        is_told: bool,
    },
}

/// Who says why it ends.
enum End {
    /// Its session, as far as is known.
    OfSession,
    /// Something else, which came first.
    Because(Ending),
    /// It was told already, by [`Connection::end`].
    Told,
}

/// Where the session wants to receive: valid until the session is called again.
#[derive(Clone, Copy)]
pub struct Place([libc::iovec; 2]);

fn vector(place: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: place.as_mut_ptr().cast(),
        iov_len: place.len(),
    }
}

/// See the module.
pub struct Connection {
    socket: OwnedFd,
    /// Who is at the other end.
    pub client: Transport,
    session: Box<dyn Session>,
    /// Given back when this is dropped.
    place: places::Place,
    stage: Stage,
    end: End,
    /// What it has opened, once its shard has found that.
    pub visit: Option<Visit>,
    /// Where that is.
    pub station: Station,
    receiving: Option<Key>,
    sending: bool,
    /// Whether the session wanted nothing when it was last asked.
    waits: bool,
    /// What is being sent; untouched while `sending`.
    chunks: VecDeque<Chunk>,
    /// Memory that they keep in use.
    chunks_held: Held,
    /// Bytes of the front chunk that are sent.
    sent: usize,
    vectors: Vec<libc::iovec>,
    message: Box<libc::msghdr>,
    /// Requests of it that are not answered.
    pub requests: usize,
    /// Sends that have ended, and what they sent.
    sends: u64,
    sent_bytes: u64,
    /// Replies that wait for a send, and that are being sent since then.
    replies: u64,
    replies_sending: u64,
    replies_since: Nanos,
    seen: Option<Seen>,
    /// Since when its client has sent nothing any more, and may have gone.
    silent_since: Option<Nanos>,
    /// What its shard has counted of what it holds.
    pub counted: Held,
    /// What it has submitted.
    pub account: Account,
    /// Whether it waits in the shard's list of those to be served.
    pub listed: bool,
}

impl Connection {
    /// A connection that has just come in.
    pub fn new(
        socket: OwnedFd,
        session: Box<dyn Session>,
        client: Transport,
        place: places::Place,
    ) -> Self {
        // SAFETY: all zeroes is a valid, empty message.
        let message: libc::msghdr = unsafe { std::mem::zeroed() };
        Self {
            socket,
            client,
            session,
            place,
            stage: Stage::Open,
            end: End::OfSession,
            visit: None,
            station: Station::Unknown,
            receiving: None,
            sending: false,
            waits: false,
            chunks: VecDeque::new(),
            chunks_held: Held::default(),
            sent: 0,
            vectors: Vec::new(),
            message: Box::new(message),
            requests: 0,
            sends: 0,
            sent_bytes: 0,
            replies: 0,
            replies_sending: 0,
            replies_since: Nanos(0),
            seen: None,
            silent_since: None,
            counted: Held::default(),
            account: Account::default(),
            listed: false,
        }
    }

    /// Whether it belongs to another shard.
    pub fn is_to_travel(&self) -> bool {
        matches!(self.station, Station::Elsewhere { .. } | Station::Waits)
    }

    /// Whether nothing of it is under way, so that it may go elsewhere.
    pub fn may_travel(&mut self) -> bool {
        self.stage == Stage::Open
            && self.is_still()
            && !self.sending
            && self.chunks.is_empty()
            && self.session.output().is_empty()
    }

    /// Whether no request of it is under way, and none can come.
    pub fn is_still(&self) -> bool {
        self.receiving.is_none() && self.requests == 0 && self.session.in_flight() == 0
    }

    /// Have the receive under way end soon.
    pub fn stop_receiving(&self, ring: &mut Ring) {
        if let Some(key) = self.receiving {
            ring.cancel(key);
        }
    }

    /// What of it travels to another shard.
    pub fn pack(mut self) -> Adopted {
        assert!(self.may_travel(), "nothing of it is under way");
        Adopted {
            queued: None,
            socket: self.socket,
            session: self.session,
            client: self.client,
            place: self.place,
            visit: self.visit,
        }
    }

    /// A connection that comes from elsewhere.
    pub fn unpack(adopted: Adopted) -> Self {
        let Adopted {
            queued: _,
            socket,
            session,
            client,
            place,
            visit,
        } = adopted;
        Self {
            visit,
            ..Self::new(socket, session, client, place)
        }
    }

    /// What it holds, with what its session holds.
    pub fn held(&self) -> Held {
        let mut held = self.session.held();
        held += self.queued();
        held.heap_bytes += self.vectors.capacity() * size_of::<libc::iovec>();
        held
    }

    /// What waits in the socket's queue.
    pub fn queued(&self) -> Held {
        let queue = self.chunks.capacity() - self.chunks.len();
        Held {
            heap_bytes: self.chunks_held.heap_bytes + queue * size_of::<Chunk>(),
            ..self.chunks_held
        }
    }

    /// A request of it has ended.
    pub fn answered(&mut self, id: RequestId, result: Ended) {
        self.requests -= 1;
        self.replies += 1;
        self.session.completed(id, result);
    }

    /// A receive ended.
    pub fn received(&mut self, result: Result<usize, Errno>, host: &mut dyn Host) {
        self.receiving = None;
        match result {
            _ if self.stage != Stage::Open => {}
            Ok(bytes) => {
                self.session.received(bytes, host);
                let is_owed = self.session.in_flight() > 0;
                if bytes == 0 && is_owed && Presence::of(&self.socket) == Presence::Gone {
                    self.abort(Ending::Gone);
                }
            }
            Err(Errno(libc::ECANCELED)) => {}
            Err(errno) => self.abort(Ending::Failed(errno.to_string())),
        }
    }

    /// A send ended.
    pub fn sent(&mut self, now: Nanos, result: Result<usize, Errno>, counts: &mut ShardCounts) {
        self.sending = false;
        self.sends += 1;
        counts.sends += 1;
        let mut bytes = match result {
            Ok(bytes) => bytes,
            Err(errno) => return self.abort(Ending::Failed(errno.to_string())),
        };
        self.sent_bytes += bytes as u64;
        bytes += self.sent;
        while let Some(chunk) = self.chunks.front() {
            let len = bytes_of(chunk).len();
            if bytes < len {
                break;
            }
            bytes -= len;
            self.chunks_held -= chunk.held();
            self.chunks.pop_front();
        }
        self.sent = bytes;
        if self.chunks.is_empty() {
            let took = now.since(self.replies_since).0;
            let replies = mem::take(&mut self.replies_sending);
            counts.replies += replies;
            counts.reply_time = counts.reply_time.plus(Nanos(took.saturating_mul(replies)));
        }
    }

    /// Ask the session where it wants to receive, unless a receive is under way.
    pub fn ask_receive(&mut self, host: &mut dyn Host) -> Option<Place> {
        if self.stage != Stage::Open || self.receiving.is_some() || self.is_to_travel() {
            return None;
        }
        self.waits = false;
        match self.session.receive(host) {
            Receive::Into(place) => {
                assert!(!place.is_empty(), "a place to receive into holds something");
                return Some(Place([vector(place), vector(&mut [])]));
            }
            Receive::IntoBoth(place, behind) => {
                assert!(!place.is_empty(), "a place to receive into holds something");
                return Some(Place([vector(place), vector(behind)]));
            }
            Receive::Wait => self.waits = true,
            Receive::Close => self.stage = Stage::Draining,
        }
        None
    }

    /// Receive into the place that the session has just named, and send what is to be sent, when so
    /// many connections are served in this turn. Returns whether something was sent at once, which may have freed memory.
    pub fn serve(
        &mut self,
        now: Nanos,
        slot: u32,
        place: Option<Place>,
        served: usize,
        ring: &mut Ring,
        counts: &mut ShardCounts,
    ) -> bool {
        if let Some(Place(places)) = place {
            let (owner, fd) = (Owner::Receive(slot), self.socket.as_raw_fd());
            // SAFETY: the session keeps the place until `received` (its contract), nobody has
            // called it since, and it outlives the operation (invariant 1).
            self.receiving = Some(unsafe { ring.receive(owner, fd, places) });
        }
        let sends = self.sends;
        if !self.is_broken() {
            let bytes = TURN_SEND_BYTES_MAX / served.max(1);
            let bytes = bytes.clamp(SEND_BYTES_MIN, SEND_BYTES_MAX);
            self.send(now, slot, bytes, ring, counts);
        }
        if self.is_broken() {
            self.session.output().clear();
            if !self.sending {
                self.chunks.clear();
                self.chunks_held = Held::default();
            }
        }
        self.sends != sends
    }

    fn send(
        &mut self,
        now: Nanos,
        slot: u32,
        bytes_max: usize,
        ring: &mut Ring,
        counts: &mut ShardCounts,
    ) {
        if self.sending {
            return;
        }
        let mut left = bytes_max;
        loop {
            // A session may have more once what it had is taken: TLS encrypts a part at a time.
            let output = self.session.output();
            while self.chunks.len() < SEND_CHUNKS_MAX
                && let Some(chunk) = output.pop_front()
            {
                if !bytes_of(&chunk).is_empty() {
                    self.chunks_held += chunk.held();
                    self.chunks.push_back(chunk);
                }
            }
            let total = self.make_message(left);
            if total == 0 {
                return;
            }
            if self.replies_sending == 0 {
                self.replies_since = now;
            }
            self.replies_sending += mem::take(&mut self.replies);
            if total >= left {
                // Enough for this turn. The end of the operation brings it back.
                break;
            }
            // What the socket takes at once needs no operation, the end of which would cost a turn.
            match send_now(&self.socket, &self.message) {
                Ok(bytes) => {
                    self.sent(now, Ok(bytes), counts);
                    left -= bytes;
                    if bytes < total {
                        self.make_message(left);
                        break;
                    }
                }
                Err(Errno(libc::EAGAIN | libc::EINTR)) => break,
                Err(errno) => return self.abort(Ending::Failed(errno.to_string())),
            }
        }
        self.sending = true;
        let (owner, fd) = (Owner::Send(slot), self.socket.as_raw_fd());
        // SAFETY: message, vectors and chunks are in the heap and stay as they are while
        // `sending` (invariant 2).
        unsafe { ring.send(owner, fd, &raw const *self.message) };
    }

    /// Have the message say what is to be sent next, about so many bytes at most; how many it is.
    fn make_message(&mut self, bytes_max: usize) -> usize {
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
            if total >= bytes_max {
                break;
            }
        }
        self.message.msg_iov = self.vectors.as_mut_ptr();
        self.message.msg_iovlen = self.vectors.len() as _;
        total
    }

    /// Whether the session must be asked again when buffers have become free.
    pub fn waits(&self) -> bool {
        self.waits && self.stage == Stage::Open && !self.is_to_travel()
    }

    /// Whether nobody takes its answers any more; true once.
    pub fn breaks_off(&mut self) -> bool {
        match &mut self.stage {
            Stage::Broken { is_told } => !std::mem::replace(is_told, true),
            Stage::Open | Stage::Draining => false,
        }
    }

    fn is_broken(&self) -> bool {
        matches!(self.stage, Stage::Broken { .. })
    }

    /// What it has open, as its client was told.
    pub fn opened(&self) -> Option<&Export> {
        self.session.opened()
    }

    /// The volume of that.
    pub fn volume(&self) -> Option<VolumeNumber> {
        Some(self.opened()?.number)
    }

    /// Who is at its other end.
    pub fn peer(&self) -> &Peer {
        self.session.peer()
    }

    /// What its client has owed for too long.
    pub fn look(&mut self, now: Nanos, limits: &ConnectionLimits) -> Option<&'static str> {
        if self.is_broken() {
            return None;
        }
        // What is not being received now is not the client's fault.
        let owed = match self.session.owed() {
            Owed::Data(_) if self.receiving.is_none() => Owed::Nothing,
            owed => owed,
        };
        let (sends, sending, sent_bytes) = (self.sends, self.sending, self.sent_bytes);
        let seen = self.seen.get_or_insert(Seen {
            owed,
            owed_since: now,
            sends,
            sends_since: now,
            sent_bytes,
            sent_since: now,
        });
        if seen.owed != owed {
            seen.owed = owed;
            seen.owed_since = now;
        }
        if seen.sends != sends || !sending {
            seen.sends = sends;
            seen.sends_since = now;
        }
        if !sending {
            (seen.sent_bytes, seen.sent_since) = (sent_bytes, now);
        }
        let mut is_slow = false;
        let waits = now.since(seen.sent_since);
        if waits >= limits.stall_max {
            let least = u128::from(limits.rate_min_bytes) * u128::from(waits.0) / 1_000_000_000;
            is_slow = u128::from(sent_bytes - seen.sent_bytes) < least;
            (seen.sent_bytes, seen.sent_since) = (sent_bytes, now);
        }
        let waited = now.since(seen.owed_since);
        match owed {
            Owed::Handshake if waited >= limits.handshake_max => Some("it did not open an export"),
            Owed::Data(_) if waited >= limits.stall_max => Some("it did not send a write's data"),
            _ if now.since(seen.sends_since) >= limits.stall_max => Some("it took no replies"),
            _ if is_slow => Some("it took its replies too slowly"),
            _ => None,
        }
    }

    /// Whether its client has gone while requests of it hang, as far as that can be told; then it is broken off. One
    /// that sends nothing any more may still take answers, for as long as it may take for a handshake.
    pub fn has_departed(&mut self, now: Nanos, limits: &ConnectionLimits) -> bool {
        let may_tell = !self.is_broken() && self.receiving.is_none() && self.requests > 0;
        let presence = if may_tell {
            Presence::of(&self.socket)
        } else {
            Presence::Here
        };
        if presence == Presence::Here {
            self.silent_since = None;
            return false;
        }
        let since = *self.silent_since.get_or_insert(now);
        let is_gone = presence == Presence::Gone || now.since(since) >= limits.handshake_max;
        if is_gone {
            self.abort(Ending::Gone);
        }
        is_gone
    }

    /// Whether nothing of it is left but requests whose answers nobody takes.
    pub fn is_left(&self) -> bool {
        let is_quiet = self.receiving.is_none() && !self.sending;
        self.is_broken() && is_quiet && self.requests > 0
    }

    /// Whether it can be dropped.
    pub fn is_over(&mut self) -> bool {
        let drained = match self.stage {
            Stage::Open => return false,
            Stage::Draining => self.chunks.is_empty() && self.session.output().is_empty(),
            Stage::Broken { .. } => true,
        };
        drained
            && self.receiving.is_none()
            && !self.sending
            && self.requests == 0
            && self.session.in_flight() == 0
    }

    /// Why it ends, once: when that is settled.
    pub fn end(&mut self) -> Option<Ending> {
        if self.stage == Stage::Open {
            return None;
        }
        match mem::replace(&mut self.end, End::Told) {
            End::Told => None,
            End::Because(why) => Some(why),
            End::OfSession => Some(self.session.ending().cloned().unwrap_or(Ending::Gone)),
        }
    }

    /// End it without regard for what is to be sent.
    pub fn abort(&mut self, why: Ending) {
        // If the session had ended by itself, a send that fails after that is no reason.
        if self.session.ending().is_none() && matches!(self.end, End::OfSession) {
            self.end = End::Because(why);
        }
        if !self.is_broken() {
            self.stage = Stage::Broken { is_told: false };
        }
        // SAFETY: a system call on a descriptor that is held. It fails if the peer is gone,
        // which is as well.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// End it once what is in flight is answered.
    pub fn shut_down(&mut self, ring: &mut Ring) {
        self.session.shut_down();
        self.stop_receiving(ring);
    }
}

/// Send what the socket takes at once of a message whose vectors are valid.
fn send_now(socket: &OwnedFd, message: &libc::msghdr) -> Result<usize, Errno> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the message points to vectors, and these to chunks, which are there until this returns.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), message, flags) };
    usize::try_from(sent).map_err(|_| Errno::last())
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
        let process = Process::of(&socket);
        return Some((socket, Transport::Unix(process)));
    }
    let stream = TcpStream::from(socket);
    let peer = stream.peer_addr().ok()?;
    prepare_tcp(&stream).ok()?;
    Some((stream.into(), Transport::Tcp { peer }))
}

/// Set what every TCP connection has. A peer that has vanished without a word is noticed after two minutes, and what it
/// held is given back; one that is only silent may be so for as long as it likes.
pub fn prepare_tcp(socket: &impl AsFd) -> io::Result<()> {
    // Replies are sent whole, at once; waiting to fill a segment would only delay them.
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(socket, 6)?;
    sockopt::set_socket_keepalive(socket, true)?;
    Ok(())
}
