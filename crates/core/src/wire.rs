//! # Between nodes
//!
//! What nodes say to one another, by `crates/messenger`. A connection carries frames in both directions; each is a
//! `FrameHeader`, then *meta*, then *payload*. Either may be missing. The meta is small (8 KiB at most) and followed by its
//! CRC-32C (`U32`), which `meta_bytes` does not count. The payload is data, which its receiver takes in where it is to lie.
//!
//! ```text
//! kind  name     purposes  meta              payload  fields that mean something
//!    1  Hello    all       Greeting          -        -
//!    2  Welcome  all       Greeting          -        -
//!    3  Refuse   all       Refusal           -        -
//!    4  Ping     all       -                 -        number: the sender's time
//!    5  Pong     all       -                 -        number: that of the Ping
//!    6  Bye      all       -                 -        code: 0 in order, else what the sender found wrong
//!   16  Open     spans     LogMeta           -        stream, epoch, position: where its first span begins at the least
//!   17  Append   spans     AppendMarks       a span   stream, epoch, position, number: where the span before ended
//!   18  Ack      spans     AckMarks          -        stream, epoch, position: durable up to there
//!   19  Close    spans     -                 -        stream, code, flag 2
//!   32  Request  all       by its code       bulk     number, code: what is asked, room_bytes, flag 1
//!   33  Answer   all       by its code       bulk     number of the request, code, position: bytes granted in all
//!   34  Credit   all       -                 -        position: bytes granted in all
//! ```
//!
//! The side that connects begins with Hello. The other answers with Welcome, and then both may send anything; or with Refuse,
//! and closes. Frames of the handshake are of version 1 whatever else is spoken; all others are of the version that
//! Welcome names: the highest that both know. Frames of one direction are numbered from 0 by `sequence`, so that one that
//! is missing, repeated or out of place is noticed.
//!
//! A *stream* is one log on its way from one node to the other. Whoever opens it numbers it, from 1 on, and never uses a
//! number twice on a connection. The other side takes spans up to the *limit* of its last Ack. What still comes for a
//! stream that was closed is dropped.
//!
//! A request costs 64 bytes, its meta, its payload and its `room_bytes`: the payload that its answer may have. Costs of
//! all requests together stay below what the other side has granted in all. Urgent ones (flag 1) have neither payload nor
//! room, cost nothing, and are 32 at a time at most.
//!
//! What is asked about a log, and the answers; each meta names the log and the epoch first. An answer that fits none of
//! these codes, or not the request, ends the connection.
//!
//! ```text
//! code  request     meta        connection   code  answer      meta         to
//!   64  Attach      LogMeta     spans          80  Attached    CopyMeta     Attach
//!   65  Superblock  ChangeMeta  spans          81  Named       NumberMeta   Superblock
//!   66  Promise     PointMeta   spans          82  Promised    CopyMeta     Promise
//!   67  Join        LogMeta     spans          83  Joining     LogMeta, then up to 256 JoinPoints: to Join
//!   68  JoinAt      CutMeta     spans          84  HasCut      CutMeta      JoinAt
//!   69  Verify      PointMeta   spans          85  Verified    PointMeta    Verify
//!   70  ReadLog     PointMeta   bulk           86  NotWhole    PointMeta    Verify
//!   71  Beat        BeatMeta    spans          87  LogData     SpanMeta     ReadLog; the span is the payload
//!                                              88  Fenced      NumberMeta   all: the member has promised this epoch
//!                                              89  Nothing     LogMeta      all: it does not apply any more, or there is nothing
//!                                              90  NoLog       LogMeta      all: the node has no such log
//!                                              91  Echo        NumberMeta   Beat
//! ```
//!
//! Close of a stream by its receiver has code 1 if the node has no such log, and 2 if the member has promised a higher epoch.

pub mod replication;

use core::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::limits::{
    WIRE_BULK_BYTES_MAX, WIRE_META_BYTES_MAX, WIRE_SPAN_BYTES_MAX, WIRE_URGENT_META_BYTES_MAX,
};
use crate::format::{Field, Structure, on_disk};

/// First bytes of a frame.
pub const FRAME_MAGIC: [u8; 4] = *b"HDCM";
/// The newest version of what nodes say to one another.
pub const WIRE_VERSION: u16 = 1;
/// The oldest that this program still speaks.
pub const WIRE_VERSION_OLDEST: u16 = 1;
/// The version of the frames of a handshake, in which it is agreed which one the others have.
pub const HANDSHAKE_VERSION: u16 = 1;
/// Bytes of a [`FrameHeader`].
pub const FRAME_HEADER_BYTES: usize = size_of::<FrameHeader>();
/// Bytes of the checksum behind the meta of a frame.
pub const META_CHECKSUM_BYTES: usize = size_of::<U32>();
/// [`FrameHeader::flags`]: a request that is not to wait behind others.
pub const FRAME_URGENT: u8 = 1;
/// [`FrameHeader::flags`]: whoever opened the stream closes it.
pub const FRAME_BY_OPENER: u8 = 2;

/// Every structure, in the order of the documentation.
pub const STRUCTURES: &[Structure] = &[
    FrameHeader::STRUCTURE,
    Greeting::STRUCTURE,
    Refusal::STRUCTURE,
    AppendMarks::STRUCTURE,
    AckMarks::STRUCTURE,
    replication::LogMeta::STRUCTURE,
    replication::NumberMeta::STRUCTURE,
    replication::PointMeta::STRUCTURE,
    replication::BeatMeta::STRUCTURE,
    replication::ChangeMeta::STRUCTURE,
    replication::CutMeta::STRUCTURE,
    replication::CopyMeta::STRUCTURE,
    replication::SpanMeta::STRUCTURE,
    replication::JoinPoint::STRUCTURE,
];

on_disk! {
    /// The beginning of a frame.
    FrameHeader: 64 bytes {
        /// `HDCM`.
        magic: [u8; 4],
        /// Version of the wire: 1 in a handshake, then the one that was agreed on.
        version: U16,
        /// What the frame is.
        kind: u8,
        /// 1: an urgent request. 2: whoever opened the stream closes it.
        flags: u8,
        /// Bytes of payload.
        payload_bytes: U32,
        /// Request: bytes of payload that its answer may have.
        room_bytes: U32,
        /// Open, Append, Ack: fencing number of the stream's replication group.
        epoch: U64,
        /// Open, Append, Ack: a position in the log. Answer, Credit: bytes granted in all.
        position: U64,
        /// Request, Answer: which request. Ping, Pong: a time of whoever sent the Ping. Append: where the span before ended.
        number: U64,
        /// CRC-64/NVME of the payload, zero if there is none.
        payload_checksum: U64,
        /// Open, Append, Ack, Close: which stream.
        stream: U32,
        /// Request: what is asked. Answer: how it ended. Close, Bye: why.
        code: U16,
        /// Bytes of meta.
        meta_bytes: U16,
        /// Frames that were sent before it in its direction, modulo 2^32.
        sequence: U32,
        /// CRC-32C of all before.
        checksum: U32,
    }
}

on_disk! {
    /// Who is at one end of a connection: the meta of Hello and Welcome.
    Greeting: 128 bytes {
        /// UUID of the cluster.
        cluster: [u8; 16],
        /// UUID of the node.
        node: [u8; 16],
        /// UUID of this run of the node.
        boot: [u8; 16],
        /// Hello: UUID of the node that it is meant for.
        expected: [u8; 16],
        /// Counts the runs of the node.
        boots: U64,
        /// Bytes that the other side's requests may cost to begin with.
        credit_bytes: U64,
        /// Number of the node in the cluster.
        number: U32,
        /// Oldest version of the wire that it speaks.
        version_oldest: U16,
        /// Newest.
        version_newest: U16,
        /// Welcome: the one that is spoken from here on; else zero.
        version: U16,
        /// What the connection is for: 1 spans, 2 requests, 3 bulk.
        purpose: U16,
        /// Zero.
        reserved: [u8; 36],
    }
}

on_disk! {
    /// Why a connection is refused, and what whoever refuses it knows: the meta of Refuse.
    Refusal: 64 bytes {
        /// 1 no version in common, 2 another cluster, 3 another node than was expected, 4 a node that is not known,
        /// 5 an older run of the node than is known, 6 a second run of it at the same time, 7 the node itself, 8 the
        /// certificate is not the node's, 9 the node stops, 10 another node has its number, 11 the node has too many
        /// connections.
        reason: U16,
        /// Oldest version of the wire that it speaks.
        version_oldest: U16,
        /// Newest.
        version_newest: U16,
        /// Zero.
        reserved_a: U16,
        /// UUID of its cluster.
        cluster: [u8; 16],
        /// UUID of its node.
        node: [u8; 16],
        /// The newest run of the other node that it knows, by number; or zero.
        boots: U64,
        /// Zero.
        reserved_b: [u8; 16],
    }
}

on_disk! {
    /// Which span an Append brings, beside its place in the header, and what its sender knows: the meta of Append.
    AppendMarks: 64 bytes {
        /// Position below which the log was durable at the primary when it sealed the span: the span's evidence.
        durable: U64,
        /// Position below which the log is committed; at most `durable`.
        committed: U64,
        /// Checksum of the span before.
        chain_before: U64,
        /// Checksum of the span.
        chain: U64,
        /// The opening that wrote it.
        incarnation: U64,
        /// Zero.
        reserved: [u8; 24],
    }
}

on_disk! {
    /// What a member says beside what is durable: the meta of Ack.
    AckMarks: 32 bytes {
        /// The tail of the log that is durable on its medium.
        tail: U64,
        /// Position up to which it takes spans.
        limit: U64,
        /// Zero.
        reserved: [u8; 16],
    }
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The first frame of the side that connects.
    Hello,
    /// The answer to it.
    Welcome,
    /// The other answer to it.
    Refuse,
    /// Are you there?
    Ping,
    /// Yes.
    Pong,
    /// Nothing follows.
    Bye,
    /// A log begins to be sent.
    Open,
    /// A span of it.
    Append,
    /// What of it is durable, and how far it may go on.
    Ack,
    /// It ends.
    Close,
    /// A question.
    Request,
    /// The answer to one.
    Answer,
    /// More may be asked.
    Credit,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Hello,
        Self::Welcome,
        Self::Refuse,
        Self::Ping,
        Self::Pong,
        Self::Bye,
        Self::Open,
        Self::Append,
        Self::Ack,
        Self::Close,
        Self::Request,
        Self::Answer,
        Self::Credit,
    ];

    /// The byte on the wire.
    pub const fn code(self) -> u8 {
        match self {
            Self::Hello => 1,
            Self::Welcome => 2,
            Self::Refuse => 3,
            Self::Ping => 4,
            Self::Pong => 5,
            Self::Bye => 6,
            Self::Open => 16,
            Self::Append => 17,
            Self::Ack => 18,
            Self::Close => 19,
            Self::Request => 32,
            Self::Answer => 33,
            Self::Credit => 34,
        }
    }

    /// The kind of a byte on the wire.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// Whether it belongs to a handshake.
    pub const fn is_handshake(self) -> bool {
        matches!(self, Self::Hello | Self::Welcome | Self::Refuse)
    }

    /// Whether a connection of this purpose carries it.
    pub const fn is_for(self, purpose: Purpose) -> bool {
        match self {
            Self::Open | Self::Append | Self::Ack | Self::Close => {
                matches!(purpose, Purpose::Spans)
            }
            _ => true,
        }
    }

    /// Bytes of meta that it may have: at least, at most.
    pub const fn meta_bytes(self) -> (usize, usize) {
        match self {
            Self::Hello | Self::Welcome => (size_of::<Greeting>(), size_of::<Greeting>()),
            Self::Refuse => (size_of::<Refusal>(), size_of::<Refusal>()),
            Self::Append => (size_of::<AppendMarks>(), size_of::<AppendMarks>()),
            Self::Ack => (size_of::<AckMarks>(), size_of::<AckMarks>()),
            Self::Open | Self::Request | Self::Answer => (0, WIRE_META_BYTES_MAX),
            Self::Ping | Self::Pong | Self::Bye | Self::Close | Self::Credit => (0, 0),
        }
    }

    /// Bytes of payload that it may have at most.
    pub const fn payload_bytes_max(self, purpose: Purpose) -> usize {
        match (self, purpose) {
            (Self::Append, Purpose::Spans) | (Self::Answer, Purpose::Bulk) => WIRE_SPAN_BYTES_MAX,
            (Self::Request, Purpose::Bulk) => WIRE_BULK_BYTES_MAX,
            _ => 0,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What a connection is for. Two nodes have one of each, so that no heartbeat waits behind a span, and no span behind what
/// is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// Write logs.
    Spans,
    /// Heartbeats and other questions without data.
    Requests,
    /// Questions with data in them, or in their answers.
    Bulk,
}

impl Purpose {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Spans, Self::Requests, Self::Bulk];

    /// The number on the wire.
    pub const fn code(self) -> u16 {
        match self {
            Self::Spans => 1,
            Self::Requests => 2,
            Self::Bulk => 3,
        }
    }

    /// The purpose of a number on the wire.
    pub fn from_code(code: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.code() == code)
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Spans => "spans",
            Self::Requests => "requests",
            Self::Bulk => "bulk",
        })
    }
}

macro_rules! uuid {
    ($(#[doc = $doc:literal])* $name:ident) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                for (index, byte) in self.0.iter().enumerate() {
                    if matches!(index, 4 | 6 | 8 | 10) {
                        f.write_str("-")?;
                    }
                    write!(f, "{byte:02x}")?;
                }
                Ok(())
            }
        }
    };
}

uuid! {
    /// UUID of a cluster.
    ClusterId
}
uuid! {
    /// UUID of a node.
    NodeId
}
uuid! {
    /// UUID of one run of a node.
    BootId
}

/// CRC-64/NVME of a payload that comes in pieces.
#[derive(Clone)]
pub struct PayloadChecksum(crc_fast::Digest);

impl PayloadChecksum {
    /// Of nothing yet.
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme))
    }

    /// The next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Of all pieces so far.
    pub fn value(&self) -> u64 {
        self.0.finalize()
    }
}

impl Default for PayloadChecksum {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for PayloadChecksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PayloadChecksum({:016x})", self.value())
    }
}

const _: () = assert!(WIRE_META_BYTES_MAX <= u16::MAX as usize);
const _: () = assert!(WIRE_URGENT_META_BYTES_MAX <= WIRE_META_BYTES_MAX);
const _: () = assert!(WIRE_SPAN_BYTES_MAX <= u32::MAX as usize);

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn kinds_and_purposes_are_those_of_their_codes() {
        for code in 0..=u8::MAX {
            let kind = Kind::from_code(code);
            assert!(kind.is_none_or(|kind| kind.code() == code));
        }
        let known = (0..=u8::MAX).filter_map(Kind::from_code).count();
        assert_eq!(known, Kind::ALL.len());
        for purpose in Purpose::ALL {
            assert_eq!(Purpose::from_code(purpose.code()), Some(purpose));
        }
        assert_eq!(Purpose::from_code(0), None);
    }

    #[test]
    fn only_what_carries_data_has_payload() {
        for (kind, purpose) in Kind::ALL
            .into_iter()
            .flat_map(|kind| Purpose::ALL.map(|purpose| (kind, purpose)))
        {
            let carries = kind.payload_bytes_max(purpose) > 0;
            let expected = match purpose {
                Purpose::Spans => kind == Kind::Append,
                Purpose::Requests => false,
                Purpose::Bulk => matches!(kind, Kind::Request | Kind::Answer),
            };
            assert_eq!(carries, expected, "{kind} on {purpose}");
        }
    }

    #[test]
    fn uuid_is_written_as_usual() {
        let node = NodeId(core::array::from_fn(|index| index as u8 * 17));
        assert_eq!(node.to_string(), "00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn checksum_in_pieces_is_that_of_the_whole() {
        let bytes: [u8; 1000] = core::array::from_fn(|index| (index * 7) as u8);
        let mut pieces = PayloadChecksum::new();
        bytes.chunks(17).for_each(|piece| pieces.update(piece));
        assert_eq!(pieces.value(), crate::format::control_checksum(&bytes));
    }
}
