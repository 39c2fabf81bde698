//! What is damaged of a log, in words: of one that is alone, and of one of which other nodes may have copies.

use hdcs_core::base::error::OpenError;
use hdcs_core::base::limits::SECTOR_BYTES;
use hdcs_core::format::LogSuperblock;
use hdcs_core::log::write_log::WriteLog;

/// What to do about a copy that cannot be read to its end.
pub const COPY_UNUSABLE: &str = "if this is a copy of a volume whose log other nodes have too, and one of theirs is whole, stop \
                             this node, remove the log and start it: it is brought up anew from theirs (do not \
                             remove a block device: have another node have the copy)";

/// What is damaged of a log, and what of its volume was lost with it, in words. A copy has lost nothing that another one has;
/// a log that was a copy once still says so.
pub fn lost_with(log: &WriteLog, superblock: &LogSuperblock) -> Option<String> {
    let (lost, damaged) = (log.superblocks().lost(), log.superblocks().damaged_blocks());
    let (bytes, places) = (lost.sectors() * SECTOR_BYTES as u64, lost.count());
    if !lost.is_empty() && superblock.membership().is_some() {
        return Some(format!(
            "data blocks of it are, or were, damaged: {bytes} bytes of the volume in {places} places are missing here. If \
             other nodes have copies of the log, what is missing is got from them, when this node is brought up or takes the \
             group; only what no copy has is lost"
        ));
    }
    if !lost.is_empty() {
        return Some(format!(
            "data blocks of it are, or were, damaged: {bytes} bytes of the volume in {places} places are lost; an \
             opening saves all else"
        ));
    }
    (damaged > 0).then(|| {
        format!(
            "{damaged} data blocks of it are damaged: all that they held was written again since, and nothing is lost"
        )
    })
}

/// Why a log cannot be read to its end, and what to do if it is a copy.
pub fn unusable(error: &OpenError, superblock: &LogSuperblock) -> String {
    match error {
        OpenError::CorruptLog { .. } | OpenError::LostTooMuch { .. }
            if superblock.membership().is_some() =>
        {
            format!("{error}: {COPY_UNUSABLE}")
        }
        _ => error.to_string(),
    }
}
