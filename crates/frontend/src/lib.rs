//! Protocols that clients speak, one directory or file each, as sessions without I/O.
//!
//! The shard owns the sockets: it receives into the place that [`Session::receive`] names, tells
//! the session how much came, and sends what [`Session::output`] holds. A session parses, submits
//! requests through its [`Host`], and formats replies. So every protocol is tested and fuzzed
//! without a socket.

pub mod access;
pub mod memory;
pub mod nbd;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;

use hdcs_core::base::buf::{Buf, BufMut};
use hdcs_core::base::error::RequestError;
use hdcs_core::base::io::{Reply, Request, RequestId, SectorRange};
use hdcs_core::base::limits::{
    CONNECTION_DATA_BYTES_MAX, CONNECTION_HEAP_BYTES_MAX, REQUEST_BYTES_MAX,
};

use crate::access::{Allow, Peer};

/// Number of a volume on its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeNumber(pub u32);

/// Tells one opening of a volume from the next: a connection belongs to one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpeningId(pub u64);

/// What a frontend tells its clients about a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Which volume.
    pub number: VolumeNumber,
    /// Since which opening of it.
    pub opening: OpeningId,
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether a discard does something.
    pub discards: bool,
    /// Which clients may open it over TCP.
    pub allow: Allow,
}

/// A volume that the node has and that is not open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unopened {
    /// Why.
    pub why: String,
    /// Which clients may know.
    pub allow: Allow,
}

/// Memory that a session takes up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Buffers of clients' data: of the pool, or frames of the DRAM tier, which they keep in use.
    pub data_bytes: usize,
    /// Everything else: inboxes, tables, replies without data.
    pub heap_bytes: usize,
}

/// What a session may do before its shard is asked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// What it may hold in all. It gives nothing back because of it, but takes nothing more.
    pub held: Held,
    /// Work that it may still submit in this turn, in the unit of [`work_of`]. The last request may
    /// be larger than the rest.
    pub work: usize,
}

impl Allowance {
    /// What one connection holds at most, if nobody else wants anything.
    pub const WHOLE: Self = Self {
        held: Held {
            data_bytes: CONNECTION_DATA_BYTES_MAX,
            heap_bytes: CONNECTION_HEAP_BYTES_MAX,
        },
        work: usize::MAX,
    };
}

/// What a request costs the thread that serves it, where a read of one block from memory is 1: an
/// estimate, by which clients take turns.
pub fn work_of(request: &Request) -> usize {
    /// As much data as costs one unit to copy or to look up, about.
    const UNIT_BYTES: usize = 64 << 10;
    /// Thousands of lookups.
    const EXTENTS: usize = 64;
    /// What is below in the index goes.
    const RANGE: usize = 16;
    match request {
        Request::Read { range } | Request::Write { range, .. } | Request::Promote { range } => {
            1 + range.bytes().min(REQUEST_BYTES_MAX) / UNIT_BYTES
        }
        Request::Discard { range, .. } | Request::WriteZeroes { range, .. } => {
            1 + (range.bytes() / UNIT_BYTES).min(RANGE)
        }
        Request::Extents { .. } => EXTENTS,
        Request::Flush | Request::Evict { .. } | Request::Scrub { .. } => 1,
    }
}

/// What a session needs of its shard.
pub trait Host {
    /// Every volume that is open, by name.
    fn exports(&self) -> Vec<Export>;
    /// The open volume of this name.
    fn export(&self, name: &str) -> Option<Export>;
    /// Why there is no open volume of this name, if the node has one that is not open.
    fn why_not(&self, name: &str) -> Option<Unopened> {
        let _ = name;
        None
    }
    /// Who may open the volume of this name, if that is on its way from one thread to another: it is exported again soon.
    fn moves(&self, name: &str) -> Option<Allow> {
        let _ = name;
        None
    }
    /// A client has asked for an export that it does not get.
    fn refused(&self, name: &str, peer: &Peer) {
        let _ = (name, peer);
    }
    /// What the session may hold and submit at present. It is asked before each request, and costs
    /// next to nothing.
    fn allowance(&self) -> Allowance {
        Allowance::WHOLE
    }
    /// A buffer for the data of a write; see [`hdcs_core::base::buf::Pool::alloc_for`]. `None`: the
    /// session answers [`Receive::Wait`] until the shard calls it again.
    fn alloc(&mut self, range: SectorRange) -> Option<BufMut>;
    /// Take from the session's work of this turn what it has done without submitting anything.
    fn charge(&mut self, work: usize);
    /// How many volumes are open: what looking for one costs.
    fn volumes(&self) -> usize;
    /// Whether requests for a volume can be submitted here. If not, the session submits none: it travels to where they can.
    fn serves(&self, volume: VolumeNumber) -> bool {
        let _ = volume;
        true
    }
    /// Submit a request; [`Session::completed`] follows with the same id, perhaps in a later turn,
    /// never from within this call.
    fn submit(&mut self, volume: VolumeNumber, id: RequestId, request: Request);
}

/// What one client sees of a [`Host`]'s volumes: those that it may open. The others are to it as if they
/// were not there.
#[derive(Clone, Copy)]
pub struct Permitted<'a> {
    host: &'a dyn Host,
    peer: &'a Peer,
}

impl<'a> Permitted<'a> {
    /// What `peer` sees of `host`.
    pub fn new(host: &'a dyn Host, peer: &'a Peer) -> Self {
        Self { host, peer }
    }

    /// What an option of the handshake costs at most, in the unit of [`work_of`]: a look at every volume.
    pub fn option_work(&self) -> usize {
        /// Volumes that are looked at, and perhaps listed, for one unit.
        const VOLUMES: usize = 8;
        1 + self.host.volumes() / VOLUMES
    }

    /// Every open volume that it may open, by name.
    pub fn exports(&self) -> Vec<Export> {
        let mut exports = self.host.exports();
        exports.retain(|export| export.allow.lets_in(self.peer));
        exports
    }

    /// The open volume of this name, if it may open it.
    pub fn export(&self, name: &str) -> Option<Export> {
        let export = self.host.export(name)?;
        export.allow.lets_in(self.peer).then_some(export)
    }

    /// Whether a volume of this name that it may open is about to be exported again: [`Host::moves`].
    pub fn moves(&self, name: &str) -> bool {
        let allow = self.host.moves(name);
        allow.is_some_and(|allow| allow.lets_in(self.peer))
    }

    /// It asked for an export of this name and does not get it.
    pub fn refused(&self, name: &str) {
        self.host.refused(name, self.peer);
    }

    /// Why there is no open volume of this name, if it may open that once it is open.
    pub fn why_not(&self, name: &str) -> Option<String> {
        let unopened = self.host.why_not(name)?;
        unopened.allow.lets_in(self.peer).then_some(unopened.why)
    }
}

/// What a session wants of its socket.
#[derive(Debug)]
pub enum Receive<'a> {
    /// Receive up to this many bytes, here.
    Into(&'a mut [u8]),
    /// Receive up to this many bytes, here, and what does not fit there: what belongs to two places comes at once.
    IntoBoth(&'a mut [u8], &'a mut [u8]),
    /// Nothing at present: too much is in flight or waits to be sent, no buffer is free, or its
    /// [`Allowance`] is spent. The shard asks again after every completion and every send of this
    /// connection, when buffers become free, and in the next turn if its work was spent.
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

impl Chunk {
    /// Memory that it keeps in use, itself included.
    pub fn held(&self) -> Held {
        let (data_bytes, beside) = match self {
            Self::Bytes(bytes) if bytes.spilled() => (0, bytes.capacity()),
            Self::Bytes(_) => (0, 0),
            Self::Data(data) => (data.held_bytes(), 0),
        };
        Held {
            data_bytes,
            heap_bytes: size_of::<Self>() + beside,
        }
    }
}

impl std::ops::AddAssign for Held {
    fn add_assign(&mut self, other: Self) {
        self.data_bytes += other.data_bytes;
        self.heap_bytes += other.heap_bytes;
    }
}

impl std::ops::SubAssign for Held {
    fn sub_assign(&mut self, other: Self) {
        self.data_bytes -= other.data_bytes;
        self.heap_bytes -= other.heap_bytes;
    }
}

impl std::iter::Sum for Held {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        let mut sum = Self::default();
        all.for_each(|one| sum += one);
        sum
    }
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

/// Why a connection ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Its client said that it leaves.
    Left,
    /// Its client closed it without a word.
    Gone,
    /// The node stops.
    NodeStops,
    /// Its client asked for an export that it does not get.
    NoExport,
    /// Its client broke the protocol.
    Violation(Cow<'static, str>),
    /// The node ended it, since its client stalls or has lost a right.
    Ended(&'static str),
    /// The network, or the client's end of it, failed.
    Failed(String),
}

impl Ending {}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left => f.write_str("the client left"),
            Self::Gone => {
                f.write_str("the client closed the connection without saying that it leaves")
            }
            Self::NodeStops => f.write_str("the node stops"),
            Self::NoExport => f.write_str("the client asked for an export that it does not get"),
            Self::Violation(what) => write!(f, "the client broke the protocol: {what}"),
            Self::Ended(why) => write!(f, "the node ended it: {why}"),
            Self::Failed(error) => write!(f, "the connection failed: {error}"),
        }
    }
}

/// One connection of one protocol. It may travel to another thread while the place of no receive is in use and nothing
/// is in flight; what it has received goes with it.
pub trait Session: Send {
    /// Where the next bytes go. The place stays valid and unused until [`Self::received`].
    fn receive(&mut self, host: &mut dyn Host) -> Receive<'_>;
    /// So many bytes came into the place that [`Self::receive`] named, or into the first of two and then the second; 0 is
    /// the peer's end.
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
    /// Memory that it takes up: its own, its output's, and that of requests under way.
    fn held(&self) -> Held {
        Held::default()
    }
    /// Requests submitted and not yet completed: a connection is dropped only when this is 0.
    fn in_flight(&self) -> usize;
    /// What this connection has open, as it was when it opened it.
    fn opened(&self) -> Option<&Export> {
        None
    }
    /// Who is at the other end.
    fn peer(&self) -> &Peer {
        &Peer::Unnamed
    }
    /// Why it takes nothing any more, if it does not.
    fn ending(&self) -> Option<&Ending> {
        None
    }
    /// Stop taking requests, answer what is in flight, then close (the node stops).
    fn shut_down(&mut self);
}
