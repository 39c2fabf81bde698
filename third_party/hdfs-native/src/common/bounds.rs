//! What a peer may ask for in memory by the length that it gives for a message.

use crate::{HdfsError, Result};

/// Bytes of an answer of a NameNode. The longest are listings, of 1,000 entries unless it is set up otherwise.
pub(crate) const RPC_ANSWER_MAX: usize = 16 << 20;
/// Bytes of a packet, an answer or an encrypted message of a DataNode. It sends packets of 64 KiB, or of its
/// `io.file.buffer.size` where that is more.
pub(crate) const DATANODE_MESSAGE_MAX: usize = 4 << 20;

/// `length`, unless it is more than `most`.
pub(crate) fn bounded(length: usize, most: usize) -> Result<usize> {
    if length > most {
        return Err(HdfsError::DataTransferError(format!(
            "the peer announces a message of {length} bytes, at most {most} are taken"
        )));
    }
    Ok(length)
}
