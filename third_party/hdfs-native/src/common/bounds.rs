//! What a peer may ask for in memory: by the length that it gives for a message, by messages of many empty parts, and
//! by what it says of erasure coding.

use prost::bytes::Buf;
use prost::encoding::{WireType, decode_key, decode_varint};

use crate::{HdfsError, Result};

/// Bytes of an answer of a NameNode. The longest are listings, of 1,000 entries unless it is set up otherwise.
pub(crate) const RPC_ANSWER_MAX: usize = 16 << 20;
/// Bytes of a packet, an answer or an encrypted message of a DataNode. It sends packets of 64 KiB, or of its
/// `io.file.buffer.size` where that is more.
pub(crate) const DATANODE_MESSAGE_MAX: usize = 4 << 20;
/// Bytes of a cell of erasure coding, and units of a group.
pub(crate) const CELL_MAX: usize = 4 << 20;
pub(crate) const UNITS_MAX: usize = 32;
/// Directories in each other that one listing enters.
pub(crate) const DEPTH_MAX: usize = 8;
/// Fields in the three outer levels of an answer: 1,000 entries of a listing have some 14 each. An empty entry takes
/// two bytes of an answer and hundreds in memory.
const FIELDS_MAX: usize = 1 << 16;
const LEVELS: usize = 3;

/// A NameNode or DataNode asks for too much. It is not tried again: the answer would be the same.
pub(crate) fn refused(what: String) -> HdfsError {
    HdfsError::RPCError("OutOfBounds".to_string(), what)
}

/// `length`, unless it is more than `most`.
pub(crate) fn bounded(length: usize, most: usize) -> Result<usize> {
    if length > most {
        return Err(refused(format!(
            "the peer announces a message of {length} bytes, at most {most} are taken"
        )));
    }
    Ok(length)
}

/// Refuse a message, with its length before it, of more fields than an honest one has.
pub(crate) fn check_fields(message: &[u8]) -> Result<()> {
    let mut buf = message;
    if decode_varint(&mut buf).is_err() {
        // Decoding it says what is wrong.
        return Ok(());
    }
    if count_fields(buf, LEVELS, 0) > FIELDS_MAX {
        return Err(refused(format!(
            "an answer has more than {FIELDS_MAX} fields (is `dfs.ls.limit` raised?)"
        )));
    }
    Ok(())
}

/// Count the fields of a message and of those in it, until there are too many.
fn count_fields(mut buf: &[u8], levels: usize, mut seen: usize) -> usize {
    while buf.has_remaining() && seen <= FIELDS_MAX {
        let Ok((_, kind)) = decode_key(&mut buf) else {
            break;
        };
        seen += 1;
        let length = match kind {
            WireType::Varint => {
                if decode_varint(&mut buf).is_err() {
                    break;
                }
                0
            }
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::LengthDelimited => match decode_varint(&mut buf) {
                Ok(length) => usize::try_from(length).unwrap_or(usize::MAX),
                Err(_) => break,
            },
            WireType::StartGroup | WireType::EndGroup => 0,
        };
        let Some((inner, rest)) = buf.split_at_checked(length) else {
            break;
        };
        if kind == WireType::LengthDelimited && levels > 1 {
            seen = count_fields(inner, levels - 1, seen);
        }
        buf = rest;
    }
    seen
}
