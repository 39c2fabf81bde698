//! The numbers and layouts of the NBD protocol, as its specification (`doc/proto.md` of the
//! reference implementation) names them. All integers on the wire are big-endian.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// First bytes of the server's greeting.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT": the second magic of the greeting, and the start of every option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of every request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of every simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of every structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags, the server's and the client's alike.
pub mod handshake_flag {
    /// Options get replies.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No padding after the reply to `EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options of the handshake.
pub mod option {
    /// Open an export; there is no reply that could say why not.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// Name every export.
    pub const LIST: u32 = 3;
    /// Change to TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe and open an export.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Name the metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts of an export.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export.
    pub const SERVER: u32 = 2;
    /// One piece of information on an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not known.
    pub const ERR_UNSUP: u32 = 1 << 31 | 1;
    /// The option is known and not allowed.
    pub const ERR_POLICY: u32 = 1 << 31 | 2;
    /// The option's data does not make sense.
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    /// TLS comes first.
    pub const ERR_TLS_REQD: u32 = 1 << 31 | 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    /// The option's data is too long.
    pub const ERR_TOO_BIG: u32 = 1 << 31 | 9;
}

/// Types of information in replies to `INFO` and `GO`.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Canonical name.
    pub const NAME: u16 = 1;
    /// Words for a person.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags.
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` works.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// FUA works.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` works.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` works.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// Unfragmented reads can be asked for.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` works.
    pub const SEND_CACHE: u16 = 1 << 10;
}

/// Commands.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write.
    pub const WRITE: u16 = 1;
    /// End the session.
    pub const DISC: u16 = 2;
    /// Make what was acknowledged durable.
    pub const FLUSH: u16 = 3;
    /// Give space back.
    pub const TRIM: u16 = 4;
    /// Bring into the cache.
    pub const CACHE: u16 = 5;
    /// Zero.
    pub const WRITE_ZEROES: u16 = 6;
    /// Describe a range in the terms of the selected contexts.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
pub mod command_flag {
    /// Durable before the reply.
    pub const FUA: u16 = 1 << 0;
    /// Keep the space allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// One data chunk at most.
    pub const DF: u16 = 1 << 2;
    /// One extent per context.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Types of structured reply chunks.
pub mod chunk {
    /// The last chunk of its reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// Data at an offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Extents of one context.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error.
    pub const ERROR: u16 = 1 << 15 | 1;
    /// An error at an offset.
    pub const ERROR_OFFSET: u16 = 1 << 15 | 2;
}

/// Flags of an extent in `base:allocation`.
pub mod allocation {
    /// Not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// Reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Flags of an extent in `hdcs:cache`: where the newest version of the data lives. Exactly one is
/// set, or none if the node cannot tell.
pub mod cache {
    /// In the read cache, equal to the backend: a read is fast and nothing is lost with the cache.
    pub const CLEAN: u32 = 1 << 0;
    /// In the write log, not yet in the backend.
    pub const DIRTY: u32 = 1 << 1;
    /// Only in the backend: a read waits for it.
    pub const COLD: u32 = 1 << 2;
}

/// Error numbers on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// Writing to what is read-only.
    Perm = 1,
    /// The data could not be read or made durable.
    Io = 5,
    /// Out of buffers.
    NoMem = 12,
    /// The request makes no sense.
    Inval = 22,
    /// Beyond the end, or no room.
    NoSpace = 28,
    /// Too long to be answered unfragmented.
    Overflow = 75,
    /// The node or volume is stopping.
    Shutdown = 108,
}

/// A request, without its payload.
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RequestHeader {
    /// [`REQUEST_MAGIC`].
    pub magic: U32,
    /// [`command_flag`]s.
    pub flags: U16,
    /// A [`command`].
    pub kind: U16,
    /// Chosen by the client, echoed in the reply.
    pub cookie: U64,
    /// First byte.
    pub offset: U64,
    /// Number of bytes.
    pub length: U32,
}

/// The head of an option, without its data.
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct OptionHeader {
    /// [`OPTION_MAGIC`].
    pub magic: U64,
    /// An [`option`].
    pub kind: U32,
    /// Bytes of data that follow.
    pub length: U32,
}

/// Bytes of a request without its payload.
pub const REQUEST_HEADER_BYTES: usize = size_of::<RequestHeader>();
/// Bytes of an option without its data.
pub const OPTION_HEADER_BYTES: usize = size_of::<OptionHeader>();
const _: () = assert!(REQUEST_HEADER_BYTES == 28 && OPTION_HEADER_BYTES == 16);

/// A simple reply without data: magic, error, cookie.
pub fn simple_reply(cookie: u64, error: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// The head of a structured reply chunk: magic, flags, type, cookie, bytes of payload.
pub fn chunk_header(cookie: u64, done: bool, kind: u16, payload_bytes: u32) -> [u8; 20] {
    let flags = if done { chunk::FLAG_DONE } else { 0 };
    let mut bytes = [0; 20];
    bytes[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&payload_bytes.to_be_bytes());
    bytes
}
