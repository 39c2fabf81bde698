//! Every error of the messenger, with what was wrong, where, and what to do about it.
//!
//! [`Ended`] is why a link is over; [`SendError`] is why something was not taken to be sent, which changes nothing.

use std::fmt;
use std::io;

use hdcs_core::base::io::Nanos;
use hdcs_core::wire::replication::MessageError;
use hdcs_core::wire::{ClusterId, Kind, NodeId, Purpose};
use thiserror::Error;

use crate::handshake::Versions;
use crate::tls::TlsError;

/// Why a link is over.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{place}: {why}")]
pub struct Ended {
    /// Which link.
    pub place: Place,
    /// Why.
    pub why: Why,
}

/// Which link: what an operator needs to find the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// How the driver calls the other end: an address.
    pub address: String,
    /// The other node, once it has said who it is.
    pub node: Option<u32>,
    /// What the connection is for, once that is known.
    pub purpose: Option<Purpose>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.node {
            Some(node) => write!(f, "node {node} at {}", self.address)?,
            None => f.write_str(&self.address)?,
        }
        match self.purpose {
            Some(purpose) => write!(f, " ({purpose})"),
            None => Ok(()),
        }
    }
}

/// What ended a link.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Why {
    /// In order, by this side.
    #[error("this side has ended the connection in order")]
    Finished,
    /// In order, by the other side.
    #[error(
        "the peer has ended the connection in order; it is connected to again when it is needed"
    )]
    Bye,
    /// By the other side, which was not content.
    #[error(
        "the peer has ended the connection, since {0}: see its log; if that comes back, what lies between damages data"
    )]
    Blamed(Blame),
    /// The connection closed between two frames.
    #[error(
        "the peer has closed the connection without saying so: it has stopped or lost power; see its log"
    )]
    Closed,
    /// The connection closed within a frame.
    #[error(
        "the connection was cut within a frame, after {received} bytes of it: the peer has stopped, or the network has failed"
    )]
    Cut {
        /// Bytes of the frame that came.
        received: usize,
    },
    /// The connection closed before TLS was agreed upon.
    #[error(
        "the peer has closed the connection when TLS was to begin: it does not speak TLS (give all nodes the TLS files of \
         [cluster], or none), or it has stopped; see its log"
    )]
    NoTls,
    /// The socket failed.
    #[error("the connection has failed: {0}: check the network and the peer")]
    Io(io::ErrorKind),
    /// The handshake took too long.
    #[error("the handshake was not over after {} ms: the peer hangs, or is not an HDCS node", .0.as_millis())]
    HandshakeLate(Nanos),
    /// A Ping was not answered.
    #[error(
        "the peer has not answered a ping for {} ms{}: it hangs, or the network drops what is sent; it is connected to again",
        .waited.as_millis(), within(*.received)
    )]
    Silent {
        /// How long it was waited for.
        waited: Nanos,
        /// Bytes of a frame of which the rest did not come.
        received: usize,
    },
    /// One side has refused the other.
    #[error("{by} {refusal}")]
    Refused {
        /// Which.
        by: Side,
        /// Why.
        refusal: Refused,
    },
    /// A frame that is none.
    #[error("frame {frame} of the peer: {error}")]
    Frame {
        /// Its number in its direction.
        frame: u32,
        /// What is wrong.
        error: FrameError,
    },
    /// A frame that must not come here.
    #[error(
        "frame {frame} of the peer: {error}: one of the two programs is wrong; report it, with both logs"
    )]
    Violation {
        /// Its number in its direction.
        frame: u32,
        /// What is wrong.
        error: Violation,
    },
    /// TLS failed.
    #[error("TLS: {0}")]
    Tls(TlsError),
}

fn within(received: usize) -> String {
    match received {
        0 => String::new(),
        bytes => format!(", and has stopped within a frame, after {bytes} bytes of it"),
    }
}

/// One of two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that this is.
    This,
    /// The other one.
    Peer,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::This => "this node refuses the peer:",
            Self::Peer => "the peer refuses this node:",
        })
    }
}

/// Why one node refuses another. `refuser` is what the one knows that says no, `refused` the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// They have no version in common.
    #[error(
        "it speaks versions {refused} of the wire, and is refused by one that speaks {refuser}: {}",
        upgrade(*.refused, *.refuser)
    )]
    Version {
        /// The versions of the one.
        refuser: Versions,
        /// The versions of the other.
        refused: Versions,
    },
    /// Another cluster.
    #[error(
        "it is of cluster {refused}, and is refused by one of cluster {refuser}: check the addresses of the nodes, and which cluster each has joined"
    )]
    Cluster {
        /// The cluster of the one.
        refuser: ClusterId,
        /// The cluster of the other.
        refused: ClusterId,
    },
    /// Another node than the one that was looked for.
    #[error(
        "node {found} is where node {expected} was expected: check the addresses of the nodes in the cluster's records"
    )]
    Node {
        /// Who was looked for.
        expected: NodeId,
        /// Who is there.
        found: NodeId,
    },
    /// A node that is not of the cluster.
    #[error("node {0} is not known to the cluster: join it to the cluster, or stop it")]
    Unknown(NodeId),
    /// A run of a node that has ended.
    #[error(
        "run {found} of node {node} is over, since run {known} is known: stop that process; only the newest may serve"
    )]
    OlderBoot {
        /// Of which node.
        node: NodeId,
        /// Its newest run.
        known: u64,
        /// The run that came.
        found: u64,
    },
    /// Two runs of a node at the same time.
    #[error(
        "node {node} runs twice: run {boots} is known as another process; a data directory or a machine was copied: stop one of the two, and give it an identity of its own"
    )]
    SecondBoot {
        /// Which node.
        node: NodeId,
        /// The number of both runs.
        boots: u64,
    },
    /// The node that refuses.
    #[error("node {0} has reached itself: an address in the cluster's records is its own")]
    Itself(NodeId),
    /// The certificate is of somebody else.
    #[error(
        "the certificate of node {0} does not have its name: it needs the DNS name `NODE.CLUSTER.hdcs`, with the UUIDs of both"
    )]
    Certificate(NodeId),
    /// Another node has its number.
    #[error(
        "number {number} belongs to node {holder}: one of the two has a wrong `node.json`; join it anew"
    )]
    Taken {
        /// The number that both claim.
        number: u32,
        /// Whose it is.
        holder: NodeId,
    },
    /// It has too many connections.
    #[error("node {0} has more connections than it may: it leaves some open, or runs twice")]
    Many(NodeId),
    /// The node that refuses stops.
    #[error("the node is about to stop; it is connected to again when it is back")]
    Stops,
}

/// Which side is to be upgraded.
fn upgrade(refused: Versions, by: Versions) -> &'static str {
    if by.newest < refused.oldest {
        "upgrade the node that refuses, or raise its `wire_version_max`"
    } else {
        "upgrade the node that is refused, or raise its `wire_version_max`"
    }
}

/// What is wrong with a frame, whatever came before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// It does not begin as a frame does.
    #[error(
        "it does not begin as a frame of HDCS does: the other end is another program, or bytes were lost on the way"
    )]
    Magic,
    /// It begins as TLS does.
    #[error(
        "it begins as TLS does, which this node does not speak: give all nodes the TLS files of [cluster], or none"
    )]
    Tls,
    /// Its header is not what was sent.
    #[error(
        "its header does not match its checksum: something between the two nodes damages data; use TLS, check the network cards"
    )]
    HeaderChecksum,
    /// Its meta is not what was sent.
    #[error(
        "its meta does not match its checksum: something between the two nodes damages data; use TLS, check the network cards"
    )]
    MetaChecksum,
    /// Its payload is not what was sent.
    #[error(
        "its payload does not match its checksum: something between the two nodes damages data; use TLS, check the network cards and memory"
    )]
    PayloadChecksum,
    /// It is of another version.
    #[error(
        "it is of version {found} of the wire, and {expected} was agreed on: report it, with the versions of both programs"
    )]
    Version {
        /// In the frame.
        found: u16,
        /// As agreed.
        expected: u16,
    },
    /// Frames are missing, repeated or out of place.
    #[error(
        "it has number {found}: something between the two nodes loses, repeats or reorders data"
    )]
    Sequence {
        /// In the frame.
        found: u32,
    },
    /// Its kind is not known.
    #[error(
        "its kind {0} is not known in this version of the wire: report it, with the versions of both programs"
    )]
    Kind(u8),
    /// It is longer or shorter than its kind may be.
    #[error(
        "{kind} has {bytes} bytes of {part}, and may have {min} to {max}: report it, with the versions of both programs"
    )]
    Length {
        /// What it is.
        kind: Kind,
        /// Meta or payload.
        part: &'static str,
        /// What it says.
        bytes: usize,
        /// The least.
        min: usize,
        /// The most.
        max: usize,
    },
    /// A field is outside its bounds.
    #[error("field `{0}` is out of bounds: report it, with the versions of both programs")]
    Field(&'static str),
}

/// What is wrong with a frame by what came before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Violation {
    /// It does not belong to this part of a connection.
    #[error("{kind} must not come {when}")]
    Unexpected {
        /// What it is.
        kind: Kind,
        /// When.
        when: &'static str,
    },
    /// A version was chosen that was not offered.
    #[error("version {chosen} was chosen, and {offered} offered")]
    Chosen {
        /// By the peer.
        chosen: u16,
        /// By this side.
        offered: Versions,
    },
    /// A purpose that is not known or not the one that was asked for.
    #[error("the purpose {0} is not the one of this connection")]
    Purpose(u16),
    /// A stream that was never opened.
    #[error("{kind} of stream {stream}, which was never opened")]
    Stream {
        /// What it is.
        kind: Kind,
        /// Which.
        stream: u32,
    },
    /// A stream number that was used already.
    #[error("stream {found} is opened after stream {last}")]
    StreamNumber {
        /// The new one.
        found: u32,
        /// The last one.
        last: u32,
    },
    /// Too many streams.
    #[error("it opens more than {0} streams")]
    Streams(usize),
    /// A span before its stream was accepted.
    #[error("a span of stream {0} comes before the stream was accepted")]
    Early(u32),
    /// Another epoch than the stream's.
    #[error("stream {stream} is of epoch {expected}, and the frame of epoch {found}")]
    Epoch {
        /// Which stream.
        stream: u32,
        /// The stream's.
        expected: u64,
        /// The frame's.
        found: u64,
    },
    /// A span is missing or repeated.
    #[error(
        "a span at position {position} of stream {stream} that follows {follows}, where {expected} is reached"
    )]
    Position {
        /// Which stream.
        stream: u32,
        /// Where it begins.
        position: u64,
        /// Where the one before ended, it says.
        follows: u64,
        /// Where it did.
        expected: u64,
    },
    /// A span beyond the limit.
    #[error("a span of stream {stream} ends at position {end}, beyond the limit {limit}")]
    Limit {
        /// Which stream.
        stream: u32,
        /// Where it ends.
        end: u64,
        /// Up to where it may.
        limit: u64,
    },
    /// A mark that contradicts others.
    #[error("`{mark}` of stream {stream} is {found}, and cannot be {than} {bound}")]
    Mark {
        /// Which stream.
        stream: u32,
        /// Which one.
        mark: &'static str,
        /// What it is.
        found: u64,
        /// Below or above.
        than: &'static str,
        /// What.
        bound: u64,
    },
    /// A request number that is in use.
    #[error("request {0} is asked a second time before it is answered")]
    Repeated(u64),
    /// More is asked than was granted.
    #[error("its requests cost {asked} bytes in all, and {granted} are granted")]
    Credit {
        /// In all.
        asked: u64,
        /// In all.
        granted: u64,
    },
    /// Less is granted than was before.
    #[error("it grants {found} bytes in all, and has granted {before} before")]
    Granted {
        /// Now.
        found: u64,
        /// Before.
        before: u64,
    },
    /// Too many requests.
    #[error("it asks more than {0} requests of a kind at a time")]
    Requests(usize),
    /// An urgent request with data.
    #[error("an urgent request has more than a short meta")]
    Urgent,
    /// An answer to nothing.
    #[error("an answer to request {0}, which was not asked or has been answered")]
    Unasked(u64),
    /// An answer that is larger than what was made room for.
    #[error("an answer of {bytes} bytes to request {number}, which has room for {room}")]
    Room {
        /// Which request.
        number: u64,
        /// Its payload.
        bytes: u32,
        /// What there is room for.
        room: u32,
    },
    /// A Pong to nothing.
    #[error("a pong of {0}, at which no ping was sent")]
    Pong(u64),
    /// A frame that is none of the messages that it may be.
    #[error("{0}")]
    Message(MessageError),
}

/// What a Bye says was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Blame {
    /// [`Why::Frame`].
    #[error("a frame of this node came to it damaged")]
    Frame,
    /// [`Why::Violation`].
    #[error("this node has sent what must not come")]
    Violation,
    /// [`Why::Silent`].
    #[error("this node did not answer its ping in time")]
    Silent,
    /// Something that this version does not know.
    #[error("of a reason {0} that this program does not know")]
    Other(u16),
}

impl Blame {
    /// The number on the wire; 0 is an end in order.
    pub const fn code(self) -> u16 {
        match self {
            Self::Frame => 1,
            Self::Violation => 2,
            Self::Silent => 3,
            Self::Other(code) => code,
        }
    }

    /// The blame of a number on the wire.
    pub const fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            0 => return None,
            1 => Self::Frame,
            2 => Self::Violation,
            3 => Self::Silent,
            code => Self::Other(code),
        })
    }
}

/// Why something was not taken to be sent. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SendError {
    /// The window, the credit or the queue is used up: [`crate::Event::Room`] says when to try again.
    #[error("the peer has not granted room for that yet: try again when it has")]
    Full,
    /// The handshake is not over.
    #[error("the connection is not open yet")]
    NotOpen,
    /// The link is over or about to be.
    #[error("the connection is over: connect again")]
    Ended,
    /// A connection of this purpose carries nothing of the kind.
    #[error("{kind} does not go over a connection for {purpose}")]
    Purpose {
        /// What.
        kind: Kind,
        /// Over which.
        purpose: Purpose,
    },
    /// Too many logs.
    #[error("one connection carries {0} logs in one direction")]
    Streams(usize),
    /// No such stream, or it is closed.
    #[error("stream {0} is closed")]
    Stream(u32),
    /// A span that does not follow the one before.
    #[error("a span at position {position} does not follow on {expected}")]
    Position {
        /// Where it begins.
        position: u64,
        /// Where the one before ended.
        expected: u64,
    },
    /// It is longer than the wire carries.
    #[error("{bytes} bytes of {part}, and at most {max} can be sent")]
    TooLarge {
        /// Meta, payload, parts or room.
        part: &'static str,
        /// What it has.
        bytes: usize,
        /// The most.
        max: usize,
    },
    /// Not whole blocks, or none.
    #[error("a span of {0} bytes is not made of whole blocks")]
    NotBlocks(usize),
    /// Answered already, or never asked.
    #[error("request {0} does not wait for an answer")]
    Unasked(u64),
}
