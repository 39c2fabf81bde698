//! What the superblocks of a write log say before it is replayed. Replay chooses between them in the same way; here it is
//! only found out whether there is anything to choose from, and what others have to know before the replay. Nothing of
//! that holds before they are authenticated.

use hdcs_core::base::error::FormatError;
use hdcs_core::base::limits::BLOCK_BYTES;
use hdcs_core::format::{LOG_UNFLUSHED, LogSuperblock};

use crate::data_dir::dirty::LogIdentity;

/// Which log these superblocks are of, which data key it is encrypted with, and whether it is whole: whether no write
/// went past it that the backend has not flushed.
pub fn identify(
    superblocks: &[[u8; BLOCK_BYTES]; 2],
    volume: [u8; 16],
) -> Result<(LogIdentity, [u8; 16], bool), FormatError> {
    LogSuperblock::refuse_newer(&superblocks.each_ref().map(|block| &block[..]))?;
    let found = superblocks.each_ref().map(|block| {
        let superblock = LogSuperblock::parse(block)?;
        if superblock.volume != volume {
            return Err(FormatError::Identity);
        }
        Ok(superblock)
    });
    let newest = found.iter().flatten().max_by_key(|s| s.sequence.get());
    match (newest, &found) {
        (Some(newest), _) => {
            let identity = LogIdentity {
                log: newest.log.get(),
                incarnation: newest.incarnation.get(),
            };
            let is_whole = newest.flags.get() & LOG_UNFLUSHED == 0;
            Ok((identity, newest.data_key, is_whole))
        }
        // The second block of a new log is empty, which says nothing; the first one's reason counts.
        (None, [Err(error), _]) => Err(*error),
        (None, [Ok(_), _]) => unreachable!("the first one would be the newest"),
    }
}
