//! What stands between a link and whatever carries its bytes.
//!
//! A driver (the shard's ring, or a test's loop) owns the socket: it receives into the places that [`Transport::receive`]
//! names, says how much came, and sends the slices that [`Transport::output`] holds. A transport turns that into what the
//! link wants and has. A plain one passes it through: what is received lands where it is to lie, and what is sent is sent
//! from where it lies. TLS cannot: it decrypts into a buffer of its own, and copies from there. RDMA can do more than a
//! socket, and needs no more than this: places in the order of the stream, and slices in that order, in registered memory
//! (of the pool; fronts of frames in a ring of their own).
//!
//! What every transport keeps, and `conformance.rs` checks:
//! 1. Bytes arrive in order, once, and unaltered, or the link ends with an error.
//! 2. A place that was named stays where it is until [`Transport::received`], whatever happens in between.
//! 3. Slices that the driver has not taken may grow at their end, and change nowhere else.
//! 4. What it holds beside the link is bounded.

use std::collections::VecDeque;
use std::fmt;

use hdcs_core::base::buf::Buf;
use hdcs_core::base::io::Nanos;
use smallvec::SmallVec;

use crate::handshake::Identity;
use crate::link::Link;

/// What a link wants of its socket.
#[derive(Debug)]
pub enum Receive<'a> {
    /// Receive up to this many bytes, here.
    Into(&'a mut [u8]),
    /// Receive up to this many bytes, here, and what does not fit there: what belongs to two places comes at once.
    IntoBoth(&'a mut [u8], &'a mut [u8]),
    /// Nothing at present: events wait to be taken, or the pool has no memory. The driver asks again after it has taken
    /// events, after a send, and when buffers become free.
    Wait,
    /// Nothing any more: send what is left and close.
    Close,
}

/// A piece of what is to be sent.
#[derive(Clone)]
pub enum Chunk {
    /// Fronts of frames; ciphertext.
    Bytes(SmallVec<[u8; 128]>),
    /// Data, sent from where it lies. It is held until it was sent.
    Data(Buf),
}

impl Chunk {
    /// What is to be sent.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Data(data) => data,
        }
    }
}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "Bytes({})", bytes.len()),
            Self::Data(data) => write!(f, "Data({})", data.len()),
        }
    }
}

/// Bytes that wait to be sent.
pub fn waiting_bytes(chunks: &VecDeque<Chunk>) -> usize {
    chunks.iter().map(|chunk| chunk.bytes().len()).sum()
}

/// See the module.
pub trait Transport: Send {
    /// Where the next bytes go.
    fn receive<'a>(&'a mut self, link: &'a mut Link) -> Receive<'a>;
    /// So many came, into the first place and then the second; 0 is the end.
    fn received(&mut self, bytes: usize, link: &mut Link, now: Nanos);
    /// What is to be sent, in order; the driver takes chunks from the front.
    fn output<'a>(&'a mut self, link: &'a mut Link, now: Nanos) -> &'a mut VecDeque<Chunk>;
    /// Whether the other end has proved that it is this node. One that knows nothing of proofs believes everybody.
    fn vouches_for(&self, peer: &Identity) -> bool {
        let _ = peer;
        true
    }
    /// When it wants to be asked for output again, if it holds some back.
    fn next_deadline(&self) -> Option<Nanos> {
        None
    }
    /// Bytes of memory that it holds beside the link.
    fn held_bytes(&self) -> usize {
        0
    }
}

/// Bytes as they are: a unix socket, or TCP within a network that is trusted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl Transport for Plain {
    fn receive<'a>(&'a mut self, link: &'a mut Link) -> Receive<'a> {
        link.receive()
    }

    fn received(&mut self, bytes: usize, link: &mut Link, now: Nanos) {
        link.received(bytes, now);
    }

    fn output<'a>(&'a mut self, link: &'a mut Link, _: Nanos) -> &'a mut VecDeque<Chunk> {
        link.output()
    }
}
