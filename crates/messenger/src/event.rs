//! What a link tells its node, and what it is asked for.

use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::io::Nanos;
use hdcs_core::wire::Purpose;

use crate::error::{Ended, SendError};
use crate::handshake::Identity;
use crate::streams::{Marks, Progress};

/// What has happened on a link.
#[derive(Debug)]
pub enum Event {
    /// Somebody has connected: [`crate::link::Link::admit`] or [`crate::link::Link::refuse`] is awaited.
    Asked {
        /// Who it is, it says.
        peer: Identity,
        /// For what.
        purpose: Purpose,
    },
    /// The handshake is over.
    Opened {
        /// Who is there.
        peer: Identity,
        /// What is spoken.
        version: u16,
    },
    /// The other side opens a stream: [`crate::link::Link::ack`] or [`crate::link::Link::close_stream`] is awaited.
    StreamAsked {
        /// Its number.
        stream: u32,
        /// Its epoch.
        epoch: u64,
        /// Where its first span begins at the least.
        position: u64,
        /// What it is, between the nodes.
        meta: Box<[u8]>,
    },
    /// A span has come.
    Span(Span),
    /// The other side says how far it is.
    Acked {
        /// With which stream of this side.
        stream: u32,
        /// How far.
        progress: Progress,
    },
    /// The other side has closed a stream.
    StreamClosed {
        /// Which.
        stream: u32,
        /// Whether this side has opened it.
        own: bool,
        /// Why, between the nodes.
        code: u16,
    },
    /// A stream of this side was not accepted before its deadline.
    StreamLate {
        /// Which.
        stream: u32,
    },
    /// The other side asks something: [`crate::link::Link::answer`] is awaited.
    Asking(Request),
    /// A request of this side is answered.
    Answered(Answer),
    /// It is not answered before its deadline. Whether it was carried out is not known.
    TimedOut {
        /// Which.
        number: u64,
        /// The buffer for its answer.
        into: Option<BufMut>,
    },
    /// It will not be answered, as the link is over or about to be. Whether it was carried out is not known.
    Disconnected {
        /// Which.
        number: u64,
        /// The buffer for its answer, unless it was being filled.
        into: Option<BufMut>,
    },
    /// The other side has echoed a ping.
    Echo {
        /// When this side had sent it, by its own clock.
        sent: Nanos,
    },
    /// Something was not taken for lack of room, and now may be.
    Room,
    /// It is over; nothing follows.
    Ended(Ended),
}

/// A span that has come.
#[derive(Debug)]
pub struct Span {
    /// Of which stream of the other side.
    pub stream: u32,
    /// Its epoch.
    pub epoch: u64,
    /// Where the span before ended.
    pub follows: u64,
    /// Where it begins.
    pub position: u64,
    /// Which span it is, and what its sender knew.
    pub marks: Marks,
    /// Its blocks, in order.
    pub parts: Vec<Buf>,
    /// CRC-64/NVME of them, which they match.
    pub checksum: u64,
}

/// A request of the other side.
#[derive(Debug)]
pub struct Request {
    /// By which it is answered.
    pub number: u64,
    /// What is asked.
    pub code: u16,
    /// Whether it passes by others.
    pub urgent: bool,
    /// What is said with it.
    pub meta: Box<[u8]>,
    /// Its data, in order.
    pub payload: Vec<Buf>,
    /// CRC-64/NVME of that, which it matches; zero if there is none.
    pub checksum: u64,
    /// Bytes of data that its answer may have.
    pub room_bytes: u32,
}

/// The answer to a request of this side.
#[derive(Debug)]
pub struct Answer {
    /// To which.
    pub number: u64,
    /// How it ended.
    pub code: u16,
    /// What is said with it.
    pub meta: Box<[u8]>,
    /// The asker's buffer, with the data at its beginning.
    pub into: Option<BufMut>,
    /// The data, in order, if the asker gave no buffer but room.
    pub payload: Vec<Buf>,
    /// How much data it is, here or there.
    pub payload_bytes: usize,
    /// CRC-64/NVME of that, which it matches; zero if there is none.
    pub checksum: u64,
}

/// A request that is to be asked.
#[derive(Debug)]
pub struct Ask<'a> {
    /// What is asked, between the nodes.
    pub code: u16,
    /// Whether it passes by others: without data in either direction, and short.
    pub urgent: bool,
    /// What is said with it.
    pub meta: &'a [u8],
    /// Its data, held until it was sent.
    pub payload: &'a [Buf],
    /// Where the data of the answer goes; none: to memory of the pool, once it comes.
    pub into: Option<BufMut>,
    /// Bytes of data that the answer may have, if no buffer is given.
    pub room_bytes: usize,
    /// When it has timed out.
    pub deadline: Nanos,
}

/// A request that was not taken.
#[derive(Debug)]
pub struct NotAsked {
    /// Why.
    pub error: SendError,
    /// The buffer for its answer.
    pub into: Option<BufMut>,
}
