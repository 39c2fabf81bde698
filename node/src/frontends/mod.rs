//! Protocols that clients speak, one directory or file each, as sessions without I/O.
//!
//! The shard owns the sockets: it receives into the place that [`Session::receive`] names, tells
//! the session how much came, and sends what [`Session::output`] holds. A session parses, submits
//! requests through its [`Host`], and formats replies. So every protocol is tested and fuzzed
//! without a socket.

pub mod memory;
pub mod nbd;

use std::collections::VecDeque;

use hdcs_core::buf::{Buf, BufMut};
use hdcs_core::error::RequestError;
use hdcs_core::io::{Reply, Request, RequestId, SectorRange};

/// Number of a volume on its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeNumber(pub u32);

/// What a frontend tells its clients about a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Which volume.
    pub number: VolumeNumber,
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether a discard does something.
    pub discards: bool,
}

/// What a session needs of its shard.
pub trait Host {
    /// Every volume that is open, by name.
    fn exports(&self) -> Vec<Export>;
    /// The open volume of this name.
    fn export(&self, name: &str) -> Option<Export>;
    /// Why there is no open volume of this name, if the node has one that is not open.
    fn why_not(&self, name: &str) -> Option<String> {
        let _ = name;
        None
    }
    /// A buffer for the data of a write; see [`hdcs_core::buf::Pool::alloc_for`]. `None`: the
    /// session answers [`Receive::Wait`] until the shard calls it again.
    fn alloc(&mut self, range: SectorRange) -> Option<BufMut>;
    /// Submit a request; [`Session::completed`] follows with the same id, perhaps in a later turn,
    /// never from within this call.
    fn submit(&mut self, volume: VolumeNumber, id: RequestId, request: Request);
}

/// What a session wants of its socket.
#[derive(Debug)]
pub enum Receive<'a> {
    /// Receive up to this many bytes, here.
    Into(&'a mut [u8]),
    /// Nothing at present: too much is in flight or waits to be sent, or no buffer is free. The
    /// shard asks again after every completion and every send of this connection, and when buffers
    /// become free.
    Wait,
    /// Nothing any more: send what is left and close.
    Close,
}

/// A piece of a session's output.
#[derive(Clone, Debug)]
pub enum Chunk {
    /// Headers and short replies.
    Bytes(smallvec::SmallVec<[u8; 64]>),
    /// Data, sent from where it lies.
    Data(Buf),
}

/// What a client owes its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owed {
    /// Nothing: it may be silent for as long as it likes.
    Nothing,
    /// The rest of the handshake.
    Handshake,
    /// The rest of a request's data; another number is another part of it.
    Data(u64),
}

/// One connection of one protocol.
pub trait Session {
    /// Where the next bytes go. The place stays valid and unused until [`Self::received`].
    fn receive(&mut self, host: &mut dyn Host) -> Receive<'_>;
    /// So many bytes came into the place that [`Self::receive`] named; 0 is the peer's end.
    fn received(&mut self, bytes: usize, host: &mut dyn Host);
    /// A submitted request ended.
    fn completed(&mut self, id: RequestId, result: Result<Reply, RequestError>);
    /// What is to be sent, in order; the shard takes chunks from the front. A chunk that it has not
    /// taken may still grow.
    fn output(&mut self) -> &mut VecDeque<Chunk>;
    /// What its client owes it at present.
    fn owed(&self) -> Owed {
        Owed::Nothing
    }
    /// Requests submitted and not yet completed: a connection is dropped only when this is 0.
    fn in_flight(&self) -> usize;
    /// The volume that this connection has open, if any.
    fn volume(&self) -> Option<VolumeNumber> {
        None
    }
    /// Stop taking requests, answer what is in flight, then close (the node stops).
    fn shut_down(&mut self);
}
