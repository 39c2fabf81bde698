//! The socket of one connection to a node: what its ring does for it, and when it can be dropped.
//!
//! ```text
//! connecting ── connected ─► open ── the connection is over, and has taken leave ─► dead ── nothing is under way ─► done
//!      └──────────────────────┴──────────────── kill ────────────────────────────────┘
//! ```
//!
//! Invariants:
//! 1. The place that the connection named for receiving is untouched until that has finished: it is dropped, and asked for
//!    another place, only then. That it is sent with meanwhile changes no place (its transport's contract).
//! 2. Chunks that are being sent stay where they are until the send has finished.
//! 3. It is done only when nothing is under way on its socket.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use hdcs_core::base::io::Nanos;
use hdcs_device::Errno;
use hdcs_device::ring::{Key, Owner, Ring};
use hdcs_messenger::connection::Connection;
use hdcs_messenger::link::Link;
use hdcs_messenger::transport::{Chunk, Receive};

/// Chunks in one send at most: below the kernel's 1024 vectors of one message.
const SEND_CHUNKS_MAX: usize = 512;
/// Bytes that one socket sends in a turn, about.
const SEND_BYTES_MAX: usize = 2 << 20;

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// To be connected to this.
    Unconnected(SocketAddr),
    /// Connecting.
    Connecting,
    Open,
    /// Nothing is sent or received any more.
    Dead,
}

/// See the module.
pub struct Socket {
    /// What is said over it.
    pub connection: Connection,
    fd: OwnedFd,
    stage: Stage,
    connecting: Option<Key>,
    receiving: Option<Key>,
    sending: Option<Key>,
    /// Whether the ring was told to end what is under way.
    is_cancelled: bool,
    /// Whether the connection waits for memory.
    waits: bool,
    /// What is being sent; untouched while `sending`.
    chunks: VecDeque<Chunk>,
    /// Bytes of the front chunk that are sent.
    sent: usize,
    vectors: Vec<libc::iovec>,
    message: Box<libc::msghdr>,
}

impl Socket {
    /// One that is to be connected.
    pub fn connect(fd: OwnedFd, connection: Connection, address: SocketAddr) -> Self {
        Self::new(fd, connection, Stage::Unconnected(address))
    }

    /// One that was accepted.
    pub fn accepted(fd: OwnedFd, connection: Connection) -> Self {
        Self::new(fd, connection, Stage::Open)
    }

    fn new(fd: OwnedFd, connection: Connection, stage: Stage) -> Self {
        // SAFETY: all zeroes is a valid, empty message.
        let message: libc::msghdr = unsafe { std::mem::zeroed() };
        Self {
            connection,
            fd,
            stage,
            connecting: None,
            receiving: None,
            sending: None,
            is_cancelled: false,
            waits: false,
            chunks: VecDeque::new(),
            sent: 0,
            vectors: Vec::new(),
            message: Box::new(message),
        }
    }

    /// Connecting has ended.
    pub fn connected(&mut self, result: Result<(), Errno>) {
        self.connecting = None;
        match result {
            _ if self.stage != Stage::Connecting => {}
            Ok(()) => self.stage = Stage::Open,
            Err(errno) => self.fail(errno),
        }
    }

    /// A receive has ended.
    pub fn received(&mut self, result: Result<usize, Errno>, now: Nanos) {
        self.receiving = None;
        match result {
            _ if self.stage != Stage::Open => {}
            Ok(bytes) => self.connection.received(bytes, now),
            Err(errno) => self.fail(errno),
        }
    }

    /// A send has ended.
    pub fn sent(&mut self, result: Result<usize, Errno>) {
        self.sending = None;
        match result {
            _ if self.stage == Stage::Dead => {}
            Ok(bytes) => self.drop_sent(bytes),
            Err(errno) => self.fail(errno),
        }
    }

    fn drop_sent(&mut self, bytes: usize) {
        let mut bytes = bytes + self.sent;
        while let Some(chunk) = self.chunks.front() {
            let len = chunk.bytes().len();
            if bytes < len {
                break;
            }
            bytes -= len;
            self.chunks.pop_front();
        }
        self.sent = bytes;
    }

    fn fail(&mut self, errno: Errno) {
        let error = io::Error::from_raw_os_error(errno.0);
        self.connection.failed(error.kind());
        self.kill();
    }

    /// End it without regard for what is to be sent.
    pub fn kill(&mut self) {
        if self.stage == Stage::Dead {
            return;
        }
        self.stage = Stage::Dead;
        self.waits = false;
        // A system call on a descriptor that is held. It fails if the peer is gone, which is as well.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// Whether it waits for memory.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Whether nothing is sent or received any more.
    pub fn is_dead(&self) -> bool {
        self.stage == Stage::Dead
    }

    /// Whether it can be dropped.
    pub fn is_done(&self) -> bool {
        let is_quiet =
            self.connecting.is_none() && self.receiving.is_none() && self.sending.is_none();
        self.stage == Stage::Dead && is_quiet
    }

    /// Begin what is to be done: connect, receive if that is wanted, send.
    pub fn serve(&mut self, slot: u32, receives: bool, ring: &mut Ring, now: Nanos) {
        match self.stage {
            Stage::Unconnected(address) => {
                self.stage = Stage::Connecting;
                let (owner, fd) = (Owner::LinkConnect(slot), self.fd.as_raw_fd());
                self.connecting = Some(ring.connect(owner, fd, address));
            }
            // It may have been too late.
            Stage::Connecting if self.connection.ended().is_some() => self.kill(),
            Stage::Open => {
                // Receiving first: what sending brings to light would only hold it up.
                if receives && self.receiving.is_none() {
                    self.receive(slot, ring, now);
                }
                self.send(slot, ring, now);
                if self.has_left() {
                    self.kill();
                }
            }
            Stage::Connecting | Stage::Dead => {}
        }
        if self.stage == Stage::Dead {
            self.clear(ring);
        }
    }

    /// Whether the connection is over, and waits no more for the peer to close.
    fn has_left(&self) -> bool {
        let link: &Link = &self.connection;
        link.ended().is_some() && link.next_deadline().is_none()
    }

    /// Have what is under way end soon, and forget what is not.
    fn clear(&mut self, ring: &mut Ring) {
        if !std::mem::replace(&mut self.is_cancelled, true) {
            let under_way = [self.connecting, self.receiving, self.sending];
            under_way.into_iter().flatten().for_each(|key| {
                ring.cancel(key);
            });
        }
        if self.sending.is_none() {
            self.chunks.clear();
        }
    }

    fn receive(&mut self, slot: u32, ring: &mut Ring, now: Nanos) {
        self.waits = false;
        loop {
            let (places, is_begun) = match self.connection.receive() {
                Receive::Into(place) => ([vector(place), vector(&mut [])], false),
                Receive::IntoBoth(place, behind) => ([vector(place), vector(behind)], true),
                Receive::Wait => {
                    self.waits = true;
                    return;
                }
                Receive::Close => return self.kill(),
            };
            // The rest of what has begun is there already, most of the time: that needs no operation, the end of which
            // would cost a turn.
            if is_begun {
                match receive_now(&self.fd, places) {
                    Ok(bytes) => {
                        self.connection.received(bytes, now);
                        continue;
                    }
                    Err(Errno(libc::EAGAIN | libc::EINTR)) => {}
                    Err(errno) => return self.fail(errno),
                }
            }
            let (owner, fd) = (Owner::LinkReceive(slot), self.fd.as_raw_fd());
            // SAFETY: the connection keeps the place until `received` (its contract), and is not dropped before the operation
            // has finished (invariants 1 and 3).
            self.receiving = Some(unsafe { ring.receive(owner, fd, places) });
            return;
        }
    }

    fn send(&mut self, slot: u32, ring: &mut Ring, now: Nanos) {
        if self.sending.is_some() || self.stage != Stage::Open {
            return;
        }
        let mut left = SEND_BYTES_MAX;
        loop {
            self.fill(now);
            let total = self.make_message(left);
            if total == 0 {
                return;
            }
            if total >= left {
                // Enough for this turn. The end of the operation brings it back.
                break;
            }
            // What the socket takes at once needs no operation, the end of which would cost a turn.
            match send_now(&self.fd, &self.message) {
                Ok(bytes) => {
                    self.drop_sent(bytes);
                    left -= bytes;
                    if bytes < total {
                        self.make_message(left);
                        break;
                    }
                }
                Err(Errno(libc::EAGAIN | libc::EINTR)) => break,
                Err(errno) => return self.fail(errno),
            }
        }
        let (owner, fd) = (Owner::LinkSend(slot), self.fd.as_raw_fd());
        // SAFETY: message, vectors and chunks are in the heap and stay as they are while `sending` (invariant 2).
        self.sending = Some(unsafe { ring.send(owner, fd, &raw const *self.message) });
    }

    /// Take over what the connection wants to send, as far as one send takes it.
    fn fill(&mut self, now: Nanos) {
        loop {
            // It may have more once what it had is taken: frames are put behind others as there is room.
            let output = self.connection.output(now);
            if output.is_empty() || self.chunks.len() >= SEND_CHUNKS_MAX {
                return;
            }
            let room = SEND_CHUNKS_MAX - self.chunks.len();
            let taken = output.drain(..room.min(output.len()));
            self.chunks
                .extend(taken.filter(|chunk| !chunk.bytes().is_empty()));
        }
    }

    /// Have the message say what is to be sent next, about so many bytes at most; how many it is.
    fn make_message(&mut self, bytes_max: usize) -> usize {
        self.vectors.clear();
        let (mut skip, mut total) = (self.sent, 0);
        for chunk in &self.chunks {
            let bytes = &chunk.bytes()[skip..];
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
}

fn vector(place: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: place.as_mut_ptr().cast(),
        iov_len: place.len(),
    }
}

/// Receive what is there.
fn receive_now(socket: &OwnedFd, mut places: [libc::iovec; 2]) -> Result<usize, Errno> {
    // SAFETY: all zeroes is a valid, empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = places.as_mut_ptr();
    message.msg_iovlen = places.len() as _;
    // SAFETY: the message points to vectors, and these to places that nothing else uses, which are there until this returns.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| Errno::last())
}

/// Send what the socket takes at once of a message whose vectors are valid.
fn send_now(socket: &OwnedFd, message: &libc::msghdr) -> Result<usize, Errno> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the message points to vectors, and these to chunks, which are there until this returns.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), message, flags) };
    usize::try_from(sent).map_err(|_| Errno::last())
}
